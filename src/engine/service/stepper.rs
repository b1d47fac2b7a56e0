//! The thread of a [`Service`](super::Service): takes the clients' commands, makes a step, and sleeps when there is
//! nothing to compute.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Duration;

use super::{Command, Shared, Shutdown};
use crate::engine::batcher::{Batcher, StepReport};
use crate::engine::sequences::Engine;
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
            Command::Submit(request, reply) => {
                let answer = match self.stop {
                    None => self.requests.submit(*request),
                    Some(_) => {
                        Err(Error::Unavailable("the service takes no requests: it is being shut down".into()))
                    }
                };
                // If the client has gone away it has dropped its stream, and its first token finds no receiver.
                let _ = reply.send(answer);
            }
            Command::Cancel(id) => {
                self.requests.cancel(id);
            }
            // A request to cancel takes precedence.
            Command::Stop(Shutdown::Finish) if self.stop.is_some() => {}
            Command::Stop(how) => self.stop = Some(how),
        }
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
