//! A service: accepts requests from any thread for one engine, whose steps run on a separate thread.
//!
//! ```text
//! Client ── submit, cancel ──► inbox ──► thread: take ─► step ─► take ─► step …     asleep while there is nothing to do
//!    ▲                                      │
//!    └────────── EventStream ◄──────────────┘  tokens, then how it ended
//! ```
//!
//! A [`Client`] is cheap to clone, and may be used from any thread. The thread checks its inbox between two steps, so
//! [`Client::submit`] returns after the step in progress: the request could not have begun sooner. Reading a stream
//! never delays the service; dropping a stream cancels its request. Whoever may not block (a server with a thousand open
//! streams) uses [`Client::send`]: it returns at once, and what happens to the request is delivered by calls.
//!
//! A service ends in one of four ways: [`Service::shutdown`], which finishes requests in flight or cancels them; its
//! drop, which cancels them; the loss of its device; a panic of the engine. In each, every stream still ends with
//! [`Event::End`], and later submissions get [`Error::Unavailable`] with the reason.
//!
//! ```
//! use tandem::engine::{Engine, Finish, Options, Request, Batcher, Service, Shutdown};
//! # fn main() -> tandem::Result<()> {
//! let model = tandem::model::load("synth:tiny-llama")?;
//! let options = Options { sequences: 4, ..Options::new(tandem::simd::Isa::selected()?, 64) };
//! let engine = Engine::new(model.spec, &model.weights, &options, &|_| ())?;
//! let service = Service::start(Batcher::new(engine))?;
//! std::thread::scope(|threads| {
//!     for first in 1..=8 {
//!         let client = service.client();
//!         threads.spawn(move || {
//!             let request = Request { prompt: vec![first], max_tokens: 5, ..Request::default() };
//!             let (_, stream) = client.submit(request).unwrap();
//!             let (tokens, how) = stream.finish();
//!             assert_eq!((tokens.len(), how), (5, Finish::Length));
//!         });
//!     }
//! });
//! let engine = service.shutdown(Shutdown::Finish)?;
//! # Ok(())
//! # }
//! ```

mod delivery;
mod stepper;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use self::delivery::Deliveries;
pub use self::delivery::{Delivery, Flight};
use self::stepper::Stepper;
use super::batcher::{Batcher, Event, Finish, Request};
use super::sequences::Engine;
use crate::host::unpin_current_thread;
use crate::program::{PerUnit, RequestId};
use crate::{Error, Result};

/// Default limit of requests in flight, including waiting ones. Planning a step examines each of them, so many more
/// would slow down the running ones.
pub const MOST_IN_FLIGHT: usize = 16_384;

/// A client's command to the thread.
enum Command {
    Submit(Box<Request>, Deliveries),
    Cancel(RequestId),
    /// Cancels the request of an earlier submission, whose id is known once that is obeyed.
    Drop(Arc<OnceLock<RequestId>>),
    Stop(Shutdown),
}

/// State shared by clients, streams and the thread.
struct Shared {
    /// Number of streams that are neither read to the end nor dropped, and of submissions in the inbox.
    in_flight: AtomicUsize,
    most: usize,
    /// Why the thread has ended, set before any of its data is dropped.
    ended: OnceLock<String>,
    status: Mutex<Status>,
}

/// What a service does and has done, as of its last step.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Status {
    /// The strategy that schedules the requests.
    pub strategy: &'static str,
    /// Requests that wait, and requests that run.
    pub load: (usize, usize),
    /// Pages of keys and values on the device and on the host: those that no request holds.
    pub free_pages: [usize; 2],
    /// Those of them that are kept for requests that begin as earlier ones did.
    pub kept_pages: [usize; 2],
    /// Pages on the device and on the host in all.
    pub pages: [usize; 2],
    /// Steps made.
    pub steps: u64,
    /// Rows computed, of prompts and answers.
    pub rows: u64,
    /// Tokens of prompts that were there from earlier requests.
    pub cached: u64,
    /// Tokens sampled.
    pub tokens: u64,
    /// Requests that ended normally, and requests that failed.
    pub ended: (u64, u64),
    /// Requests that changed sides.
    pub swapped: u64,
    /// Seconds that the steps took, and seconds predicted for them (0 without predictions).
    pub seconds: (f64, f64),
    /// Seconds that each unit has worked, if the engine counts them ([`Batcher::count_busy`]).
    pub busy: Option<PerUnit<f64>>,
    /// Bytes that have crossed the link: to the device, and to the host ([`Engine::link_bytes`]).
    pub link_bytes: [u64; 2],
    /// Experts of divided layers that have changed sides ([`Engine::exchanged_experts`]).
    pub exchanged_experts: u64,
    /// Whether the seconds are of emulated time.
    pub is_emulated: bool,
}

impl Shared {
    fn status(&self) -> std::sync::MutexGuard<'_, Status> {
        // A panic cannot leave it half written.
        self.status.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Counts one more request in flight.
    fn one_more(&self) -> Result<()> {
        if self.ended.get().is_some() {
            return Err(self.unavailable());
        }
        let most = self.most;
        let one_more = |n: usize| (n < most).then_some(n + 1);
        let counted = self.in_flight.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
        counted.map(drop).map_err(|_| {
            Error::Capacity(format!(
                "{most} requests are in flight, as many as this service takes; submit again when some have ended"
            ))
        })
    }

    fn unavailable(&self) -> Error {
        let reason = self.ended.get().map_or("it has ended", String::as_str);
        Error::Unavailable(format!("the service takes no requests: {reason}"))
    }
}

/// The treatment of requests in flight when a service is shut down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shutdown {
    /// They run to completion; new ones are refused.
    Finish,
    /// They are cancelled after the step in progress.
    Cancel,
}

/// Owns the thread; see the [module](self).
pub struct Service {
    client: Client,
    thread: Option<JoinHandle<Result<Engine>>>,
}

impl Service {
    /// Starts the thread, with at most [`MOST_IN_FLIGHT`] requests at a time; those already in flight do not count.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn start(requests: Batcher) -> Result<Service> {
        Service::with_capacity(requests, MOST_IN_FLIGHT)
    }

    /// [`Service::start`] with at most `most` requests in flight.
    ///
    /// # Errors
    /// If the system refuses a thread, or the capacity is 0.
    pub fn with_capacity(requests: Batcher, most: usize) -> Result<Service> {
        if most == 0 {
            return Err(Error::usage("a service for 0 requests; at least 1 is needed"));
        }
        let (sender, inbox) = channel();
        let (in_flight, status) = (AtomicUsize::new(0), Mutex::default());
        let shared = Arc::new(Shared { in_flight, most, ended: OnceLock::new(), status });
        let stepper = Stepper::new(requests, inbox, shared.clone());
        let thread = std::thread::Builder::new()
            .name("tandem-service".into())
            .spawn(|| {
                // Its parent may be pinned with a pool.
                unpin_current_thread();
                stepper.run_to_the_end()
            })
            .map_err(|e| Error::Run(format!("the service's thread: {e}")))?;
        Ok(Service { client: Client { sender, shared }, thread: Some(thread) })
    }

    /// A handle for another thread.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// As [`Client::submit`].
    ///
    /// # Errors
    /// As [`Client::submit`].
    pub fn submit(&self, request: Request) -> Result<(RequestId, EventStream)> {
        self.client.submit(request)
    }

    /// Whether the thread has ended by itself: its device is lost, or it panicked.
    pub fn has_ended(&self) -> bool {
        self.client.shared.ended.get().is_some()
    }

    /// Ends the service, and returns the engine once the requests in flight are finished or cancelled. Submissions that come
    /// later are refused; cancellations are still obeyed.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if it had ended by itself, together with the engine.
    pub fn shutdown(mut self, how: Shutdown) -> Result<Engine> {
        self.end(how).expect("a thread that was not waited for")
    }

    fn end(&mut self, how: Shutdown) -> Option<Result<Engine>> {
        let thread = self.thread.take()?;
        // A thread that has already ended still has a result.
        let _ = self.client.sender.send(Command::Stop(how));
        Some(thread.join().unwrap_or_else(|_| Err(self.client.shared.unavailable())))
    }
}

/// Cancels requests in flight, and waits for the step in progress.
impl Drop for Service {
    fn drop(&mut self) {
        self.end(Shutdown::Cancel);
    }
}

/// Submits to a [`Service`] and cancels, from any thread.
#[derive(Clone)]
pub struct Client {
    sender: Sender<Command>,
    shared: Arc<Shared>,
}

impl Client {
    /// Submits a request and returns its id and the stream of its tokens. Waits for the step in progress.
    ///
    /// # Errors
    /// As [`Batcher::submit`]; [`Error::Capacity`] if the maximum number of requests is in flight;
    /// [`Error::Unavailable`] if the service has ended or is shutting down.
    pub fn submit(&self, request: Request) -> Result<(RequestId, EventStream)> {
        let shared = &self.shared;
        shared.one_more()?;
        let (reply, answer) = sync_channel(1);
        let (events, receiver) = channel();
        let deliver = move |delivery| match delivery {
            // If the client has gone away it has dropped its stream, and the first token finds no receiver.
            Delivery::Accepted(id) => reply.send(Ok(id)).is_ok(),
            Delivery::Refused(error) => reply.send(Err(error)).is_ok(),
            Delivery::Event(event) => events.send(event).is_ok(),
        };
        let sent = self.sender.send(Command::Submit(Box::new(request), Deliveries::new(deliver))).ok();
        // Without an answer the thread has ended.
        match sent.and_then(|()| answer.recv().ok()).unwrap_or_else(|| Err(shared.unavailable())) {
            Ok(id) => Ok((id, EventStream { id, receiver, client: self.clone(), over: false })),
            Err(error) => {
                self.one_less();
                Err(error)
            }
        }
    }

    /// Submits a request without waiting for anything. Calls `deliver` first with the id or the refusal, then with each
    /// event, the end exactly once, from the service's thread, which it must not hold up; what it returns says whether anybody
    /// still listens. Dropping the [`Flight`] cancels the request, also while its prompt is computed.
    ///
    /// # Errors
    /// [`Error::Capacity`] if the maximum number of requests is in flight; [`Error::Unavailable`] if the service has ended.
    pub fn send(
        &self,
        request: Request,
        deliver: impl FnMut(Delivery) -> bool + Send + 'static,
    ) -> Result<Flight> {
        self.shared.one_more()?;
        Ok(Flight::take_off(self.clone(), request, deliver))
    }

    /// # Errors
    /// [`Error::Unavailable`] if the service has ended, with the reason.
    pub fn check(&self) -> Result<()> {
        if self.shared.ended.get().is_some() { Err(self.shared.unavailable()) } else { Ok(()) }
    }

    /// What the service does, as of its last step.
    pub fn status(&self) -> Status {
        *self.shared.status()
    }

    /// Ends a request after the step in progress. A request that has already ended is ignored, even if its slot is used again.
    pub fn cancel(&self, id: RequestId) {
        // A service that has ended has no requests.
        let _ = self.sender.send(Command::Cancel(id));
    }

    /// Requests in flight: those whose streams are neither read to the end nor dropped. A reader that falls behind counts,
    /// because its tokens take memory.
    pub fn in_flight(&self) -> usize {
        self.shared.in_flight.load(Ordering::Relaxed)
    }

    fn one_less(&self) {
        self.shared.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The events of a request: tokens, then [`Event::End`] exactly once, however the service ends. Dropping it before that
/// cancels the request.
///
/// As an iterator it waits for the next event.
pub struct EventStream {
    id: RequestId,
    receiver: Receiver<Event>,
    client: Client,
    over: bool,
}

impl EventStream {
    /// The request's id.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Whether the end has been read, after which nothing follows.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// The next event, if it arrives within `patience`. With zero, only an event that has already arrived.
    pub fn next_within(&mut self, patience: Duration) -> Option<Event> {
        if self.over {
            return None;
        }
        match self.receiver.recv_timeout(patience) {
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => self.heard(None),
            Ok(event) => self.heard(Some(event)),
        }
    }

    /// Waits for the end. Returns the tokens that had not been read, and how the request ended.
    pub fn finish(mut self) -> (Vec<u32>, Finish) {
        let mut tokens = Vec::new();
        for event in &mut self {
            match event {
                Event::Token(token) => tokens.push(token.id),
                Event::Cached(_) | Event::Prompt(_) => {}
                Event::End(how) => return (tokens, how),
            }
        }
        unreachable!("a stream has an end, and this one was not over")
    }

    /// Processes a received event. If the sender is gone, the request was in flight when the service ended.
    fn heard(&mut self, event: Option<Event>) -> Option<Event> {
        let ended = || Event::End(Finish::Failed(Arc::new(self.client.shared.unavailable())));
        let event = event.unwrap_or_else(ended);
        if matches!(event, Event::End(_)) {
            self.over = true;
            self.client.one_less();
        }
        Some(event)
    }
}

impl Iterator for EventStream {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        if self.over {
            return None;
        }
        let event = self.receiver.recv().ok();
        self.heard(event)
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        if !self.over {
            // Cancel first, so that a request that takes the place is submitted after the cancellation.
            self.client.cancel(self.id);
            self.client.one_less();
        }
    }
}
