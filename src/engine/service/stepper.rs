//! The thread of a [`Service`](super::Service): takes the clients' commands, makes a step, and sleeps when there is
//! nothing to compute.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::delivery::{Deliveries, Delivery};
use super::{Command, Shared, Shutdown};
use crate::engine::batcher::{Batcher, Request, StepReport};
use crate::engine::sequences::Engine;
use crate::program::RequestId;
use crate::{Error, Result};

/// Pause after a step that had nothing to do because it waits for work in flight on another lane.
const PAUSE: Duration = Duration::from_micros(200);

/// The thread's state.
pub(super) struct Stepper {
    requests: Batcher,
    inbox: Receiver<Command>,
    shared: Arc<Shared>,
    stop: Option<Shutdown>,
}

impl Stepper {
    /// A stepper for `requests`, some of which may be in flight.
    pub fn new(requests: Batcher, inbox: Receiver<Command>, shared: Arc<Shared>) -> Stepper {
        Stepper { requests, inbox, shared, stop: None }
    }

    /// Serves until it is told to stop, its device is lost, or something panics. Returns the engine only after a stop.
    pub fn run_to_the_end(mut self) -> Result<Engine> {
        let served = catch_unwind(AssertUnwindSafe(|| self.serve()));
        let why = match served {
            Ok(Ok(())) => {
                let _ = self.shared.ended.set("it has been shut down".into());
                return Ok(self.requests.into_engine());
            }
            Ok(Err(error)) => error.to_string(),
            Err(panic) => format!("its engine panicked: {}", said(&*panic)),
        };
        let _ = self.shared.ended.set(why);
        let shared = self.shared.clone();
        // Streams detect the end when their senders are dropped. State that a panic left inconsistent may panic again.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(self)));
        Err(shared.unavailable())
    }

    fn serve(&mut self) -> Result<()> {
        let mut progress = true;
        self.tell(&StepReport::default());
        loop {
            self.take_commands(progress);
            match self.stop {
                Some(Shutdown::Cancel) => return Ok(()),
                Some(Shutdown::Finish) if self.requests.is_idle() => return Ok(()),
                _ => {}
            }
            if !self.requests.is_idle() {
                let report = self.requests.step();
                progress = report != StepReport::default();
                self.tell(&report);
                if report.failed > 0 {
                    self.check_device()?;
                }
            }
        }
    }

    /// Takes all commands in the inbox. Waits for one if there is nothing to compute, or briefly after a step without
    /// progress.
    fn take_commands(&mut self, progress: bool) {
        if self.requests.is_idle() && self.stop.is_none() {
            match self.inbox.recv() {
                Ok(command) => self.obey(command),
                // No client is left.
                Err(_) => self.stop = Some(Shutdown::Finish),
            }
        } else if !progress && let Ok(command) = self.inbox.recv_timeout(PAUSE) {
            self.obey(command);
        }
        loop {
            match self.inbox.try_recv() {
                Ok(command) => self.obey(command),
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => return,
            }
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Submit(request, deliveries) => self.submit(*request, deliveries),
            Command::Cancel(id) => self.cancel(id),
            Command::Drop(id) => {
                if let Some(id) = id.get() {
                    self.cancel(*id);
                }
            }
            // A request to cancel takes precedence.
            Command::Stop(Shutdown::Finish) if self.stop.is_some() => {}
            Command::Stop(how) => self.stop = Some(how),
        }
    }

    fn submit(&mut self, request: Request, deliveries: Deliveries) {
        // Shared by the request's events and this call, which are on one thread.
        let deliveries = Arc::new(Mutex::new(deliveries));
        let send = |deliveries: &Mutex<Deliveries>, delivery| {
            deliveries.lock().unwrap_or_else(PoisonError::into_inner).send(delivery)
        };
        let events = deliveries.clone();
        let accepted = match self.stop {
            None => {
                self.requests.submit_to(request, Box::new(move |event| send(&events, Delivery::Event(event))))
            }
            Some(_) => Err(Error::Unavailable("the service takes no requests: it is being shut down".into())),
        };
        match accepted {
            Ok(id) => {
                if !send(&deliveries, Delivery::Accepted(id)) {
                    self.cancel(id);
                }
            }
            Err(error) => drop(send(&deliveries, Delivery::Refused(error))),
        }
    }

    fn cancel(&mut self, id: RequestId) {
        self.requests.cancel(id);
        self.tell(&StepReport::default());
    }

    /// Updates the status that clients see.
    fn tell(&mut self, report: &StepReport) {
        let (load, free_pages) = (self.requests.load(), self.requests.free_pages());
        let kept_pages = self.requests.kept_pages();
        let limits = self.requests.limits();
        let mut status = self.shared.status();
        status.strategy = self.requests.strategy();
        (status.load, status.free_pages, status.kept_pages) = (load, free_pages, kept_pages);
        status.busy = self.requests.engine().busy_seconds();
        status.link_bytes = self.requests.engine().link_bytes();
        status.exchanged_experts = self.requests.engine().exchanged_experts();
        status.is_emulated = self.requests.engine().emulated_seconds().is_some();
        status.pages = [limits.device_pages, limits.host_pages];
        status.steps += u64::from(*report != StepReport::default());
        status.rows += report.rows as u64;
        status.cached += report.cached as u64;
        status.tokens += report.tokens as u64;
        status.ended.0 += report.finished as u64;
        status.ended.1 += report.failed as u64;
        status.swapped += report.swapped as u64;
        status.seconds.0 += report.seconds;
        status.seconds.1 += report.predicted;
    }

    /// # Errors
    /// If the device is lost, so that no request can succeed.
    fn check_device(&self) -> Result<()> {
        // The first call may report an error of earlier work, which no longer matters.
        self.requests.engine().check_device().or_else(|_| self.requests.engine().check_device())
    }
}

/// The message of a panic.
fn said(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
