//! The thread of a [`Service`](super::Service): takes what clients ask for, makes a step, and sleeps when there is nothing to
//! compute.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Duration;

use super::{Command, Shared, Shutdown};
use crate::engine::requests::{Requests, StepReport};
use crate::engine::sequences::Engine;
use crate::{Error, Result};

/// How long a step that had nothing to do is waited behind: work in flight on another lane has to come first.
const PAUSE: Duration = Duration::from_micros(200);

/// What the thread owns.
pub(super) struct Stepper {
    requests: Requests,
    inbox: Receiver<Command>,
    shared: Arc<Shared>,
    stop: Option<Shutdown>,
}

impl Stepper {
    /// Over requests of which some may be in flight.
    pub fn new(requests: Requests, inbox: Receiver<Command>, shared: Arc<Shared>) -> Stepper {
        Stepper { requests, inbox, shared, stop: None }
    }

    /// Serves until it is told to stop, its device is lost, or something panics. Only after a stop is there an engine left.
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
        // Streams learn of the end when their senders are dropped. What a panic has left half done may panic again.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(self)));
        Err(shared.unavailable())
    }

    fn serve(&mut self) -> Result<()> {
        let mut progress = true;
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
                if report.failed > 0 {
                    self.check_device()?;
                }
            }
        }
    }

    /// All commands that are there. With nothing to compute, waits for one; after a step without progress, a moment.
    fn take_commands(&mut self, progress: bool) {
        if self.requests.is_idle() && self.stop.is_none() {
            match self.inbox.recv() {
                Ok(command) => self.obey(command),
                // Nobody is left to ask for anything.
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
            Command::Submit(request, reply) => {
                let answer = match self.stop {
                    None => self.requests.submit(request),
                    Some(_) => {
                        Err(Error::Unavailable("the service takes no requests: it is being shut down".into()))
                    }
                };
                // A client that has gone away has dropped its stream; its first token finds no receiver.
                let _ = reply.send(answer);
            }
            Command::Cancel(id) => {
                self.requests.cancel(id);
            }
            // Cancelling is the stronger wish.
            Command::Stop(Shutdown::Finish) if self.stop.is_some() => {}
            Command::Stop(how) => self.stop = Some(how),
        }
    }

    /// # Errors
    /// The device is lost: no request will ever succeed.
    fn check_device(&self) -> Result<()> {
        // The first call may report what an earlier one had enqueued; that is over.
        self.requests.engine().check_device().or_else(|_| self.requests.engine().check_device())
    }
}

/// What a panic said.
fn said(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
