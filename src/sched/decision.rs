//! What a strategy decides, and queues carry out.

use crate::program::{Iteration, RequestId, Side};

/// What a strategy decides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// Waiting requests that get memory now, and the side it is on.
    pub admit: Vec<(RequestId, Side)>,
    /// Waiting requests that later ones overtake by this decision, and how many.
    pub passed: Vec<(RequestId, u32)>,
    /// Whole requests that change sides before the iteration's rows, and the side they go to. Those to the host come
    /// first: what they leave is there for the others.
    pub swaps: Vec<(RequestId, Side)>,
    /// The next step's rows, of running requests and of those admitted now. No sub-batch if there is nothing to do.
    pub iteration: Iteration,
}
