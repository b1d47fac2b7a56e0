//! The service: requests of many threads, and every way in which it can end.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use tandem::Error;
use tandem::device::Accelerator;
use tandem::device::emulated::{EmulatedAccelerator, EmulatedOptions, EmulatedRuntime, FaultPlan};
use tandem::engine::{Batcher, Client, Delivery, Engine, Event, Finish, Flight, Request, Service, Shutdown};
use tandem::sched::{Continuous, Decision, Limits, Predict, Queues, Strategy, Untimed};

use super::world::{alone, engine, model, options, prompt, request};

/// Runs `test` on a thread of its own; a test that does not end is a deadlock.
fn watched(test: impl FnOnce() + Send + 'static) {
    let (done, ended) = channel();
    let thread = std::thread::spawn(move || {
        test();
        let _ = done.send(());
    });
    let timely = ended.recv_timeout(Duration::from_secs(180));
    assert!(!matches!(timely, Err(std::sync::mpsc::RecvTimeoutError::Timeout)), "it hangs");
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

fn service(sequences: usize, pages: Option<usize>) -> (Service, usize) {
    let requests = Batcher::new(engine(&model(), &options(sequences, pages)));
    let free = requests.limits().all_pages();
    (Service::start(requests).unwrap(), free)
}

/// A request that runs until it is stopped, near enough.
fn long(vocab: usize) -> Request {
    Request { max_tokens: 1000, ..request(0, vocab) }
}

/// A small generator of random numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

#[test]
fn threads_submit_cancel_and_walk_away_at_random() {
    watched(|| {
        let m = model();
        let vocab = m.spec.vocab;
        let mut lone = engine(&m, &options(1, None));
        let want: Arc<Vec<_>> = Arc::new((0..20).map(|i| alone(&mut lone, &request(i, vocab))).collect());
        let (service, free) = service(3, Some(9));
        let heard_out = Arc::new(AtomicUsize::new(0));
        std::thread::scope(|threads| {
            for thread in 0..6 {
                let (client, want, heard_out) = (service.client(), want.clone(), heard_out.clone());
                threads.spawn(move || {
                    let mut random = Random(thread);
                    let mut kept = Vec::new();
                    for _ in 0..40 {
                        let i = random.below(20) as usize;
                        let (id, mut stream) = client.submit(request(i, vocab)).unwrap();
                        assert_eq!(id, stream.id());
                        match random.below(8) {
                            0 => drop(stream),
                            1 => {
                                stream.next();
                                drop(stream);
                            }
                            2 => client.cancel(id),
                            3 => {
                                stream.next();
                                client.cancel(id);
                                client.cancel(id);
                                let (_, how) = stream.finish_or_over();
                                let ended = [Finish::Cancelled, want[i].1.clone()];
                                assert!(how.is_none_or(|how| ended.contains(&how)));
                            }
                            4 | 5 => {
                                heard_out.fetch_add(1, Ordering::Relaxed);
                                assert_eq!(stream.finish(), want[i]);
                            }
                            _ => kept.push((i, stream)),
                        }
                    }
                    for (i, stream) in kept {
                        heard_out.fetch_add(1, Ordering::Relaxed);
                        assert_eq!(stream.finish(), want[i]);
                    }
                });
            }
        });
        assert!(heard_out.load(Ordering::Relaxed) > 60);
        let client = service.client();
        let mut engine = service.shutdown(Shutdown::Finish).unwrap();
        assert_eq!((client.in_flight(), engine.free_pages()), (0, free));
    });
}

/// For streams whose end may have been read.
trait OrOver {
    fn finish_or_over(self) -> (Vec<u32>, Option<Finish>);
}

impl OrOver for tandem::engine::EventStream {
    fn finish_or_over(self) -> (Vec<u32>, Option<Finish>) {
        if self.is_over() {
            return (Vec::new(), None);
        }
        let (tokens, how) = self.finish();
        (tokens, Some(how))
    }
}

#[test]
fn a_shutdown_finishes_what_is_in_flight_or_cancels_it() {
    watched(|| {
        let m = model();
        let vocab = m.spec.vocab;
        let mut lone = engine(&m, &options(1, None));
        for how in [Shutdown::Finish, Shutdown::Cancel] {
            let (service, free) = service(2, None);
            let client = service.client();
            // Two run, the others wait.
            let requests: Vec<Request> = (0..6).map(|i| request(2 * i, vocab)).collect();
            let streams: Vec<_> =
                requests.iter().chain([&long(vocab)]).map(|r| client.submit(r.clone()).unwrap().1).collect();
            let mut engine = service.shutdown(how).unwrap();
            let ends: Vec<_> = streams.into_iter().map(tandem::engine::EventStream::finish).collect();
            for (r, (tokens, end)) in requests.iter().chain([&long(vocab)]).zip(ends) {
                let (want, wanted) = alone(&mut lone, r);
                match how {
                    Shutdown::Finish => assert_eq!((tokens, end), (want, wanted)),
                    Shutdown::Cancel if end == Finish::Cancelled => assert!(want.starts_with(&tokens)),
                    Shutdown::Cancel => assert_eq!((tokens, end), (want, wanted)),
                }
            }
            assert_eq!(engine.free_pages(), free);
            let refused = client.submit(request(0, vocab)).map(|_| ()).unwrap_err();
            assert!(matches!(refused, Error::Unavailable(_)), "{refused}");
            assert!(refused.to_string().contains("shut down"), "{refused}");
            client.cancel(tandem::program::RequestId { slot: 0, generation: 0 });
        }
    });
}

#[test]
fn a_service_that_is_dropped_cancels_and_a_shutdown_refuses_late_comers() {
    watched(|| {
        let vocab = model().spec.vocab;
        let (dropped, _) = service(2, None);
        let (_, stream) = dropped.submit(long(vocab)).unwrap();
        drop(dropped);
        assert_eq!(stream.finish().1, Finish::Cancelled);

        // Clients that keep coming do not keep a service from ending.
        let (service, _) = service(2, None);
        let (began, first) = channel();
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let (client, began) = (service.client(), began.clone());
                std::thread::spawn(move || {
                    loop {
                        match client.submit(request(0, vocab)) {
                            Ok((_, stream)) => drop(began.send(stream)),
                            Err(refused) => break refused,
                        }
                    }
                })
            })
            .collect();
        let first = first.recv().unwrap();
        service.shutdown(Shutdown::Finish).unwrap();
        assert_eq!(first.finish().1, Finish::Length);
        for thread in threads {
            let refused = thread.join().unwrap();
            assert!(matches!(refused, Error::Unavailable(_)), "{refused}");
        }
    });
}

#[test]
fn a_waiting_request_whose_stream_is_dropped_is_cancelled_before_its_turn() {
    watched(|| {
        let vocab = model().spec.vocab;
        let (service, _) = service(1, None);
        let (running, stream) = service.submit(long(vocab)).unwrap();
        let waiting: Vec<_> = (0..5).map(|_| service.submit(long(vocab)).unwrap().1).collect();
        let client = service.client();
        drop(waiting);
        client.cancel(running);
        let ended = stream.finish().1;
        assert!(matches!(ended, Finish::Cancelled | Finish::Length), "{ended:?}");
        // A submission is taken behind all of these: what is in flight then is what it finds.
        let (_, last) = service.submit(request(3, vocab)).unwrap();
        assert_eq!(last.finish().1, Finish::Length);
        assert_eq!(client.in_flight(), 0);
    });
}

/// Counts plans; panics at the one it is told.
struct Watched {
    inner: Continuous,
    plans: Arc<AtomicUsize>,
    panic_at: usize,
}

impl Strategy for Watched {
    fn name(&self) -> &'static str {
        "watched"
    }
    fn plan(&mut self, queues: &Queues, limits: &Limits, costs: &dyn Predict) -> Decision {
        let n = self.plans.fetch_add(1, Ordering::Relaxed);
        assert!(n < self.panic_at, "plan {n} of a bad strategy");
        self.inner.plan(queues, limits, costs)
    }
}

fn watching(panic_at: usize) -> (Service, Arc<AtomicUsize>) {
    let plans = Arc::new(AtomicUsize::new(0));
    let strategy = Watched { inner: Continuous::default(), plans: plans.clone(), panic_at };
    let requests = Batcher::with(engine(&model(), &options(2, None)), Box::new(strategy), Box::new(Untimed));
    (Service::start(requests).unwrap(), plans)
}

/// Processor time of threads of this name, in clock ticks (10 ms).
#[cfg(target_os = "linux")]
fn ticks_of(name: &str) -> Option<u64> {
    let mut ticks = 0;
    for task in std::fs::read_dir("/proc/self/task").ok()?.flatten() {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        let Some((head, rest)) = stat.rsplit_once(')') else { continue };
        if head.ends_with(name) {
            let field = |n: usize| rest.split_whitespace().nth(n).and_then(|f| f.parse::<u64>().ok());
            ticks += field(11)? + field(12)?;
        }
    }
    Some(ticks)
}

#[test]
#[cfg(target_os = "linux")]
fn a_service_with_nothing_to_do_sleeps() {
    let vocab = model().spec.vocab;
    let (service, plans) = watching(usize::MAX);
    let (_, stream) = service.submit(request(0, vocab)).unwrap();
    assert_eq!(stream.finish().1, Finish::Length);
    let before = plans.load(Ordering::Relaxed);
    // Other tests have services, too, that may be at work just now: one of several spells has to be quiet.
    let quiet = (0..40).any(|_| {
        let began = ticks_of("tandem-service");
        std::thread::sleep(Duration::from_millis(250));
        began.is_some() && ticks_of("tandem-service") == began
    });
    assert!(quiet, "services without requests use the processor");
    assert_eq!(plans.load(Ordering::Relaxed), before, "plans without requests");
    let (_, stream) = service.submit(request(1, vocab)).unwrap();
    assert_eq!(stream.finish().1, Finish::Length, "it wakes up again");
}

#[test]
fn a_panic_ends_all_requests_with_an_error_and_refuses_later_ones() {
    watched(|| {
        let vocab = model().spec.vocab;
        let (service, _) = watching(4);
        let client = service.client();
        let streams: Vec<_> = (0..4).filter_map(|_| client.submit(long(vocab)).ok()).collect();
        assert!(!streams.is_empty());
        for (_, mut stream) in streams {
            let last = stream.by_ref().last();
            let Some(Event::End(Finish::Failed(why))) = last else { panic!("{last:?}") };
            let why = why.to_string();
            assert!(why.contains("of a bad strategy"), "{why}");
            assert!(stream.is_over() && stream.next().is_none());
            assert_eq!(stream.next_within(Duration::ZERO), None);
        }
        let refused = client.submit(request(0, vocab)).map(|_| ()).unwrap_err();
        assert!(matches!(&refused, Error::Unavailable(why) if why.contains("plan 4")), "{refused}");
        assert!(service.has_ended());
        let lost = service.shutdown(Shutdown::Finish).map(|_| ()).unwrap_err();
        assert!(matches!(lost, Error::Unavailable(_)), "{lost}");
    });
}

#[test]
fn a_lost_device_ends_the_service_and_a_refused_launch_does_not() {
    watched(|| {
        let m = model();
        let vocab = m.spec.vocab;
        let runtime = Arc::new(EmulatedRuntime::new(EmulatedOptions::default()).unwrap());
        let accelerator: Arc<dyn Accelerator> = Arc::new(EmulatedAccelerator::new(runtime.clone()));
        let (spec, o) = (m.spec.clone(), options(3, None));
        let engine = Engine::on_accelerator(spec, &m.weights, &o, accelerator, "emulated", &|_| ()).unwrap();
        let service = Service::start(Batcher::new(engine)).unwrap();
        let client = service.client();
        let (_, stream) = client.submit(long(vocab)).unwrap();
        runtime.set_faults(FaultPlan { refuse_launch: Some(30), ..FaultPlan::default() });
        // It was alone in its step, so that the step is not made again; others are not concerned.
        let ended = stream.finish().1;
        assert!(matches!(&ended, Finish::Failed(why) if why.to_string().contains("refused")), "{ended:?}");
        assert_eq!(client.submit(request(0, vocab)).unwrap().1.finish().1, Finish::Length);
        assert!(!service.has_ended());

        let streams: Vec<_> = (0..5).map(|_| client.submit(long(vocab)).unwrap().1).collect();
        runtime.set_faults(FaultPlan { lost_at: Some(5), ..FaultPlan::default() });
        let failed = streams.into_iter().map(|s| s.finish().1).filter(|how| match how {
            Finish::Failed(why) => {
                let why = why.to_string();
                assert!(why.contains("emulated") || why.contains("lost"), "{why}");
                true
            }
            how => panic!("{how:?}"),
        });
        assert_eq!(failed.count(), 5);
        let deadline = Instant::now() + Duration::from_secs(60);
        while !service.has_ended() {
            assert!(Instant::now() < deadline, "the service goes on without a device");
            std::thread::sleep(Duration::from_millis(1));
        }
        let refused = client.submit(request(0, vocab)).map(|_| ()).unwrap_err();
        assert!(matches!(refused, Error::Unavailable(_)), "{refused}");
        service.shutdown(Shutdown::Finish).map(|_| ()).unwrap_err();
    });
}

#[test]
fn a_thousand_requests_are_taken_and_one_more_than_there_is_room_for_is_refused() {
    watched(|| {
        let m = model();
        let vocab = m.spec.vocab;
        let (service, _) = service(8, None);
        let streams: Vec<_> = (0..1000)
            .map(|i| {
                let r = Request { prompt: prompt(2, i, vocab), max_tokens: 2, ..request(0, vocab) };
                service.submit(r).unwrap().1
            })
            .collect();
        assert!(streams.into_iter().all(|s| s.finish().1 == Finish::Length));

        let requests = Batcher::new(engine(&m, &options(1, None)));
        assert!(matches!(
            Service::with_capacity(Batcher::new(engine(&m, &options(1, None))), 0).map(|_| ()),
            Err(Error::Usage(_))
        ));
        let small = Service::with_capacity(requests, 2).unwrap();
        let (id, first) = small.submit(long(vocab)).unwrap();
        // What makes no sense is told at once, and takes no place.
        let bad = small.submit(Request { prompt: Vec::new(), ..long(vocab) }).map(|_| ()).unwrap_err();
        assert!(matches!(bad, Error::Usage(_)), "{bad}");
        let second = small.submit(long(vocab)).unwrap();
        let refused = small.submit(long(vocab)).map(|_| ()).unwrap_err();
        assert!(matches!(&refused, Error::Capacity(why) if why.starts_with("2 requests are in flight")));
        small.client().cancel(id);
        assert!(matches!(first.finish().1, Finish::Cancelled | Finish::Length));
        let again = small.submit(request(3, vocab)).expect("room again").1;
        drop(second);
        assert_eq!((again.finish().1, small.client().in_flight()), (Finish::Length, 0));
    });
}

/// Sends a request whose deliveries arrive at a channel; they are heard as long as that is there.
fn sent(client: &Client, request: Request) -> (Flight, Receiver<Delivery>) {
    let (sender, receiver) = channel();
    (client.send(request, move |delivery| sender.send(delivery).is_ok()).unwrap(), receiver)
}

/// The deliveries of a request to its end: whether it was accepted, its tokens, and its end. Fails if something follows.
fn heard(deliveries: &Receiver<Delivery>) -> (bool, Vec<u32>, Result<Finish, Error>) {
    let (mut accepted, mut tokens, mut end) = (false, Vec::new(), None);
    for delivery in deliveries {
        assert!(end.is_none(), "{delivery:?} behind the end");
        match delivery {
            Delivery::Accepted(_) => assert!(!std::mem::replace(&mut accepted, true) && tokens.is_empty()),
            Delivery::Refused(error) => end = Some(Err(error)),
            Delivery::Event(Event::Cached(_) | Event::Prompt(_)) => {}
            Delivery::Event(Event::Token(token)) => tokens.push(token.id),
            Delivery::Event(Event::End(how)) => end = Some(Ok(how)),
        }
    }
    (accepted, tokens, end.expect("an end"))
}

#[test]
fn deliveries_are_what_a_stream_has() {
    watched(|| {
        let m = model();
        let vocab = m.spec.vocab;
        let mut lone = engine(&m, &options(1, None));
        let (service, free) = service(3, None);
        let client = service.client();
        let flights: Vec<_> = (0..8).map(|i| sent(&client, request(i, vocab))).collect();
        for (i, (flight, deliveries)) in flights.into_iter().enumerate() {
            let (accepted, tokens, end) = heard(&deliveries);
            assert!(accepted);
            assert_eq!((tokens, end.unwrap()), alone(&mut lone, &request(i, vocab)));
            drop(flight);
        }
        let (flight, deliveries) = sent(&client, Request::default());
        let (accepted, tokens, end) = heard(&deliveries);
        assert!(!accepted && tokens.is_empty() && matches!(end, Err(Error::Usage(_))), "no prompt");
        assert_eq!(client.in_flight(), 1, "until its flight is dropped");
        drop(flight);
        assert_eq!(client.in_flight(), 0);
        let status = client.status();
        assert_eq!((status.load, status.ended), ((0, 0), (8, 0)));
        assert_eq!((status.free_pages, status.pages.iter().sum::<usize>()), (status.pages, free));
        service.shutdown(Shutdown::Finish).unwrap();
    });
}

#[test]
fn a_flight_that_is_dropped_is_cancelled_even_before_it_is_accepted() {
    watched(|| {
        let vocab = model().spec.vocab;
        let (service, _) = service(1, None);
        let client = service.client();
        let (_, first) = service.submit(long(vocab)).unwrap();
        for _ in 0..100 {
            let (flight, deliveries) = sent(&client, long(vocab));
            drop(flight);
            assert_eq!(heard(&deliveries).2.unwrap(), Finish::Cancelled);
        }
        // Nobody listens: its first token would be lost.
        let _flight = client.send(long(vocab), |_| false).unwrap();
        drop(first);
        let (_, second) = service.submit(request(1, vocab)).unwrap();
        assert_eq!(second.finish().1, Finish::Length);
    });
}

#[test]
fn every_flight_has_an_end_however_the_service_ends() {
    watched(|| {
        let vocab = model().spec.vocab;
        let (panics, _) = watching(4);
        let (shut_down, _) = service(2, None);
        for (service, ends_itself) in [(panics, true), (shut_down, false)] {
            let client = service.client();
            let flights: Vec<_> = (0..6)
                .filter_map(|_| {
                    let (sender, receiver) = channel();
                    Some((client.send(long(vocab), move |d| sender.send(d).is_ok()).ok()?, receiver))
                })
                .collect();
            assert!(!flights.is_empty());
            let ended = service.shutdown(if ends_itself { Shutdown::Finish } else { Shutdown::Cancel });
            assert_eq!(ended.is_err(), ends_itself);
            for (_flight, deliveries) in &flights {
                match heard(deliveries).2 {
                    Ok(Finish::Failed(why)) => assert!(ends_itself, "{why}"),
                    Ok(how) => assert!(!ends_itself && how == Finish::Cancelled, "{how:?}"),
                    Err(error) => assert!(matches!(error, Error::Unavailable(_)), "{error}"),
                }
            }
            assert!(client.check().is_err() && client.send(long(vocab), |_| true).is_err());
        }
    });
}
