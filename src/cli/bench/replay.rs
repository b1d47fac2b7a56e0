//! A trace on the real engine: each request is submitted when it arrives, and its tokens are timed.
//!
//! Time is the engine's: this computer's clock, or emulated time, which arrivals then follow, too. An idle engine waits
//! for the next arrival.

use std::collections::HashMap;
use std::sync::mpsc::Receiver;

use tandem::cache::KvGeometry;
use tandem::engine::{Batcher, Event, Finish, Request};
use tandem::program::{Flow, RequestId, Side, Unit};
use tandem::sim::{LinkBytes, Report, RunSums, Trip, report};
use tandem::timeline::{StepWindow, Timeline};
use tandem::workload::Arrival;

use crate::cli::stopwatch::Stopwatch;

/// Number of waiting requests that the scheduler sees, as in a simulation; later ones follow in order.
const IN_SIGHT: usize = 512;

/// A request in flight.
struct Flight {
    index: usize,
    events: Receiver<Event>,
    /// The side that holds it, once it runs.
    side: Option<Side>,
}

/// Arbitrary tokens of the vocabulary, different for each request.
fn prompt(arrival: &Arrival, index: usize, vocab: usize) -> Vec<u32> {
    (0..arrival.input as usize).map(|i| ((i * 7919 + index * 104_729 + 13) % vocab) as u32).collect()
}

fn trip(a: &Arrival) -> Trip {
    Trip { arrived: a.at, output: a.output, ..Trip::default() }
}

/// The steps of a replay that are recorded for a timeline.
pub struct RecordedSteps {
    window: StepWindow,
    tokens: u64,
    /// Steps recorded, from the first on.
    steps: Option<u32>,
    timeline: Timeline,
}

impl RecordedSteps {
    /// Records the steps of `window`.
    pub fn new(window: StepWindow, arrivals: &[Arrival]) -> RecordedSteps {
        let tokens = arrivals.iter().map(|a| u64::from(a.output)).sum();
        RecordedSteps { window, tokens, steps: None, timeline: Timeline::default() }
    }

    /// Starts recording before the first step of the window.
    fn before(&mut self, requests: &mut Batcher, now: f64, made: u64) {
        if self.steps.is_none() && self.window.begins(now, made, self.tokens) {
            requests.trace();
            self.steps = Some(0);
        }
    }

    /// Called after a step: stops recording after the last step of the window.
    fn after(&mut self, requests: &mut Batcher) {
        if let Some(steps) = self.steps.as_mut().filter(|n| **n < self.window.recorded()) {
            *steps += 1;
            if *steps == self.window.recorded() {
                self.end(requests);
            }
        }
    }

    fn end(&mut self, requests: &mut Batcher) {
        if let Some(timeline) = requests.end_trace() {
            self.timeline = self.window.cut(&timeline);
        }
    }

    /// The recorded timeline.
    pub fn into_timeline(self) -> Timeline {
        self.timeline
    }
}

/// Runs `arrivals`, in the order of their times, to completion; answers have the lengths of the trace. `seen` is called
/// with the number of finished requests, the number of tokens, and the time.
pub fn replay(
    requests: &mut Batcher,
    strategy: &str,
    arrivals: &[Arrival],
    mut look: Option<&mut RecordedSteps>,
    seen: &mut dyn FnMut(usize, u64, f64),
) -> Report {
    let mut run = Run {
        watch: Stopwatch::start(requests.engine()),
        trips: arrivals.iter().map(trip).collect(),
        sums: RunSums::default(),
        flights: HashMap::new(),
        over: 0,
        tokens: 0,
    };
    requests.count_busy();
    let before = requests.engine().busy_seconds();
    let crossed = requests.engine().link_bytes();
    let mut next = 0;
    // A time that was waited for counts as reached, whatever the rounding of sums of seconds.
    let mut reached = 0.0f64;
    loop {
        let now = run.watch.seconds(requests.engine()).max(reached);
        while requests.load().0 < IN_SIGHT
            && let Some(arrival) = arrivals.get(next).filter(|a| a.at <= now)
        {
            run.submit(requests, next, arrival);
            next += 1;
        }
        if requests.is_idle() {
            match arrivals.get(next) {
                Some(arrival) => {
                    run.watch.wait_until(requests.engine(), arrival.at);
                    reached = arrival.at;
                }
                None => break,
            }
            continue;
        }
        if let Some(look) = &mut look {
            look.before(requests, now, run.tokens);
        }
        run.step(requests);
        if let Some(look) = &mut look {
            look.after(requests);
        }
        seen(run.over, run.tokens, run.watch.seconds(requests.engine()));
    }
    if let Some(look) = look {
        look.end(requests);
    }
    let [gpu, h2d, d2h, cpu] = match before.zip(requests.engine().busy_seconds()) {
        // For a step on the CPU alone, all of the step.
        _ if requests.engine().placement().device == "cpu" => [f64::NAN, 0.0, 0.0, run.sums.running],
        Some((before, after)) => Unit::ALL.map(|unit| after[unit] - before[unit]),
        None => [f64::NAN; 4],
    };
    (run.sums.gpu, run.sums.h2d, run.sums.d2h, run.sums.cpu) = (gpu, h2d, d2h, cpu);
    let [to_device, to_host] = requests.engine().link_bytes();
    run.sums.link_bytes =
        Some(LinkBytes { to_device: to_device - crossed[0], to_host: to_host - crossed[1] });
    report(strategy, &run.trips, run.sums, &requests.queues().targets())
}

struct Run {
    watch: Stopwatch,
    trips: Vec<Trip>,
    sums: RunSums,
    flights: HashMap<RequestId, Flight>,
    over: usize,
    tokens: u64,
}

impl Run {
    fn submit(&mut self, requests: &mut Batcher, index: usize, arrival: &Arrival) {
        let request = Request {
            prompt: prompt(arrival, index, requests.engine().spec().vocab),
            max_tokens: arrival.output as usize,
            ..Request::default()
        };
        match requests.submit(request) {
            Ok((id, events)) => {
                self.flights.insert(id, Flight { index, events, side: None });
            }
            Err(e) => self.fail(index, e.to_string()),
        }
    }

    fn fail(&mut self, index: usize, why: String) {
        self.trips[index].failed = true;
        self.sums.fail(why);
        self.over += 1;
    }

    /// Runs a step and processes its results.
    fn step(&mut self, requests: &mut Batcher) {
        let began = self.watch.seconds(requests.engine());
        let report = requests.step();
        let now = self.watch.seconds(requests.engine());
        self.sums.iterations += 1;
        self.sums.running += now - began;
        let flow = report.flow.map(|flow| match flow {
            Flow::Serial => 0,
            Flow::TwoLanes => 1,
            Flow::Async => 2,
        });
        if let Some(flow) = flow {
            self.sums.flows[flow] += 1;
        }
        for job in requests.queues().running() {
            if let (Some(flight), Some(side)) = (self.flights.get_mut(&job.id), job.home) {
                let before = flight.side.replace(side);
                if before.is_some_and(|before| before != side) {
                    self.sums.swapped_pages += KvGeometry::pages_for(job.stored as usize) as u64;
                }
            }
        }
        // A request that finishes in the step that admits it was on the side where requests are admitted first.
        let first = requests.limits().first_side();
        let mut made = 0;
        let mut ended = Vec::new();
        for (&id, flight) in &self.flights {
            for event in flight.events.try_iter() {
                match event {
                    Event::Token(_) => {
                        self.trips[flight.index].token(now, flight.side.unwrap_or(first));
                        made += 1;
                    }
                    Event::Cached(_) | Event::Prompt(_) => {}
                    Event::End(how) => ended.push((id, how)),
                }
            }
        }
        if made > 0 {
            self.sums.tokens.push((now, made));
            self.tokens += u64::from(made);
        }
        debug_assert_eq!(report.tokens, made as usize, "every token goes to its stream");
        for (id, how) in ended {
            let flight = self.flights.remove(&id).expect("it was there");
            match how {
                Finish::Failed(why) => self.fail(flight.index, why.to_string()),
                _ => self.over += 1,
            }
        }
    }
}
