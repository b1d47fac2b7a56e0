//! What decides: which requests are admitted, and which rows the next step has.

use crate::program::{Iteration, RequestId};

use super::queues::Queues;

/// What the engine has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Rows of a sub-batch.
    pub rows: u32,
    /// Sub-batches of a step. A streamed layer crosses the link once for all of them.
    pub sub_batches: u32,
    /// Requests that run at a time.
    pub sequences: u32,
    /// Pages of keys and values.
    pub pages: usize,
}

/// What a strategy decides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// Waiting requests that get memory now.
    pub admit: Vec<RequestId>,
    /// Waiting requests that later ones overtake by this decision, and how many.
    pub passed: Vec<(RequestId, u32)>,
    /// The next step's rows, of running requests and of those admitted now. No sub-batch if there is nothing to do.
    pub iteration: Iteration,
}

/// Decides a step. Pure: what it knows is in its arguments, and in what it decided before.
pub trait Strategy: Send {
    /// Its name, for messages.
    fn name(&self) -> &'static str;

    /// The next step. As long as there are requests whose pages fit [`Limits::pages`], it has rows; every request waits
    /// for a bounded number of steps.
    fn plan(&mut self, queues: &Queues, limits: &Limits) -> Decision;
}
