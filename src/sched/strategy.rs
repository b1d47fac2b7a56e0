//! What decides: which requests are admitted, which change sides, and which rows the next step has.

use crate::program::Side;

use super::decision::Decision;
use super::predict::Predict;
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
    /// Pages on the device, of [`PAGE_TOKENS`](crate::cache::PAGE_TOKENS) tokens in all layers.
    pub device_pages: usize,
    /// Pages on the host. An engine on one side has that side's pages and none of the other's.
    pub host_pages: usize,
}

impl Limits {
    /// Pages on a side.
    pub fn pages(&self, side: Side) -> usize {
        match side {
            Side::Device => self.device_pages,
            Side::Host => self.host_pages,
        }
    }

    /// Pages on both sides.
    pub fn all_pages(&self) -> usize {
        self.device_pages + self.host_pages
    }

    /// The side that requests are admitted to while it has room.
    pub fn first_side(&self) -> Side {
        if self.device_pages > 0 { Side::Device } else { Side::Host }
    }

    /// Whether one of the sides has no pages.
    pub fn one_sided(&self) -> bool {
        self.device_pages == 0 || self.host_pages == 0
    }
}

/// What an iteration took.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Observed {
    /// Seconds that [`Predict::iteration`] says of it.
    pub predicted: f64,
    /// Seconds measured.
    pub seconds: f64,
    /// Cohorts in it (asynchronous flow).
    pub cohorts: u32,
    /// Those of them that were ready, and advanced by a layer.
    pub advanced: u32,
}

/// Decides a step. Pure: what it knows is in its arguments, and in what it decided and observed before.
pub trait Strategy: Send {
    /// Its name, for messages.
    fn name(&self) -> &'static str;

    /// Pages of the longest request that it can serve. Longer ones must not be submitted: they would wait for ever.
    fn most_pages(&self, limits: &Limits) -> usize {
        limits.device_pages.max(limits.host_pages)
    }

    /// The next step. As long as there are requests it has rows, and every request waits for a bounded number of steps.
    fn plan(&mut self, queues: &Queues, limits: &Limits, costs: &dyn Predict) -> Decision;

    /// What the last decision's iteration took.
    fn observe(&mut self, _seen: &Observed) {}
}
