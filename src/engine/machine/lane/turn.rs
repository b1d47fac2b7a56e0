//! The host's lane without a thread, which runs a job when its turn comes.

use super::{Shared, lock, missing};
use crate::Result;
use crate::device::{Actor, Turns};

impl<S: Send> Actor for Shared<S> {
    /// Runs any one of the ready jobs: only their dependencies order them.
    fn act(&self, draw: &mut dyn FnMut(usize) -> usize) -> bool {
        let mut queue = lock(&self.queue);
        let ready = |at: &usize| -> Option<Result<usize>> {
            let job = &queue.pending[*at].1;
            if job.after.iter().any(|t| queue.open.contains(t)) {
                return None;
            }
            missing(job, &*self.runtime).map(|event| event.is_none().then_some(*at)).transpose()
        };
        let ready: Result<Vec<usize>> = (0..queue.pending.len()).filter_map(|at| ready(&at)).collect();
        match ready {
            Ok(ready) if ready.is_empty() => false,
            Ok(ready) => {
                let (ticket, job) = queue.pending.remove(ready[draw(ready.len())]).expect("it is pending");
                drop(queue);
                self.run(ticket, job);
                true
            }
            Err(error) => {
                queue.fail(error);
                self.changed(queue);
                true
            }
        }
    }
}

impl<S: Send> Shared<S> {
    /// Lets an actor act while the issuing thread waits. If none can act, the event that the oldest job waits for will
    /// never come.
    ///
    /// # Panics
    /// If no job waits for anything: a deadlock.
    pub(super) fn turn(&self, turns: &Turns) {
        if turns.one() {
            return;
        }
        let queue = lock(&self.queue);
        assert!(!queue.pending.is_empty(), "deadlock: a job is waited for that nobody was given");
        let event = queue.ready(&*self.runtime);
        drop(queue);
        let failed = match event {
            Ok(Ok(_)) => return,
            Ok(Err(event)) => self.runtime.synchronize(&event).err(),
            Err(error) => Some(error),
        };
        if let Some(error) = failed {
            let mut queue = lock(&self.queue);
            queue.fail(error);
            self.changed(queue);
        }
    }
}
