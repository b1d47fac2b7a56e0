//! Masks of requests that are held to a grammar, computed on a thread of their own while the step of the next token runs.
//!
//! ```text
//! answer ── guide takes the token ──► masks' thread: mask ──┐
//!    ▲                                                      ▼
//!    └── sample ◄── the step of the next token ◄── wait, hardly ever
//! ```
//! A mask depends on the tokens of its own answer alone, so when it is computed changes no answer.

use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

use crate::host::unpin_current_thread;
use crate::text::{Constraint, Guide, Mask};
use crate::{Error, Result};

/// A guide with the tokens that it allows next, or why there are none.
type Ready = (Guide, Result<Mask, String>);

/// The thread, from the first request that needs it on.
#[derive(Default)]
pub(super) struct Masks(Option<Sender<(Guide, SyncSender<Ready>)>>);

impl Masks {
    /// Has the next mask computed.
    fn compute(&mut self, guide: Guide) -> Next {
        if self.0.is_none() {
            let (sender, jobs) = channel();
            let thread = std::thread::Builder::new().name("tandem-masks".into()).spawn(|| work(jobs));
            self.0 = thread.is_ok().then_some(sender);
        }
        let Some(sender) = &self.0 else { return Next::Here(Box::new(ready(guide))) };
        let (to, from) = sync_channel(1);
        match sender.send((guide, to)) {
            Ok(()) => Next::Away(from),
            // The thread has ended, which it never does by itself.
            Err(unsent) => Next::Here(Box::new(ready(unsent.0.0))),
        }
    }
}

fn work(jobs: Receiver<(Guide, SyncSender<Ready>)>) {
    // Its parent may be pinned with a pool.
    unpin_current_thread();
    while let Ok((guide, to)) = jobs.recv() {
        // A request that has ended waits for nothing.
        let _ = to.send(ready(guide));
    }
}

fn ready(mut guide: Guide) -> Ready {
    let mask = guide.mask().map_err(|e| e.to_string());
    (guide, mask)
}

/// Where the next mask of an answer is.
enum Next {
    Here(Box<Ready>),
    Away(Receiver<Ready>),
    /// Its thread has failed.
    Lost,
}

/// An answer that is held to a grammar.
pub(super) struct Held(Next);

impl Held {
    /// An answer that begins.
    pub fn to(constraint: &Constraint) -> Held {
        Held(Next::Here(Box::new((constraint.guide(), Ok(constraint.first().clone())))))
    }

    /// The tokens that may come next.
    ///
    /// # Errors
    /// If the grammar takes too many steps.
    pub fn mask(&mut self) -> Result<&Mask> {
        let (_, mask) = self.ready()?;
        mask.as_ref().map_err(|why| Error::Run(why.clone()))
    }

    /// Takes the next token. Returns whether the answer is complete; else its next mask is on the way.
    ///
    /// # Errors
    /// If the grammar does not allow the token.
    pub fn take(&mut self, token: u32, masks: &mut Masks) -> Result<bool> {
        self.ready()?;
        let Next::Here(ready) = std::mem::replace(&mut self.0, Next::Lost) else { return Err(lost()) };
        let (mut guide, _) = *ready;
        let over = guide.take(token)?;
        if !over {
            self.0 = masks.compute(guide);
        }
        Ok(over)
    }

    fn ready(&mut self) -> Result<&mut Ready> {
        if let Next::Away(from) = &self.0 {
            self.0 = from.recv().map_or(Next::Lost, |ready| Next::Here(Box::new(ready)));
        }
        match &mut self.0 {
            Next::Here(ready) => Ok(ready),
            _ => Err(lost()),
        }
    }
}

fn lost() -> Error {
    Error::Run("the answer cannot be held to its grammar: the thread that computes masks has failed".into())
}
