//! What a step needs beside its iteration, and what comes out of it.

use std::ops::Range;

use crate::Error;
use crate::program::{Group, RequestId};

/// Whoever holds the requests: tells an engine what the rows of an iteration are.
pub trait TokenSource {
    /// The token ids of a group's rows, as many as [`Group::tokens`].
    fn tokens(&self, group: &Group) -> &[u32];

    /// What the likeliest tokens of a request's row are summed with ([`crate::text::Sampler::top_factor`]), or `None`
    /// if all its logits are needed. Asked only for iterations with [`Iteration::top`](crate::program::Iteration::top).
    fn top_factor(&self, request: RequestId) -> Option<f32> {
        let _ = request;
        None
    }
}

/// The outcome of a step.
///
/// Rows that want logits have results, by number: [`Engine::picks`](super::Engine::picks) if the iteration [picks](crate::program::Iteration::pick), else
/// [`Engine::logits`](super::Engine::logits) or one by one [`Engine::top`](super::Engine::top) and [`Engine::logits_row`](super::Engine::logits_row). They are counted group by group in the
/// order of the iteration; with [`Flow::Async`](crate::program::Flow::Async) only those of the first sub-batch, and
/// [`CohortOutcome::rows`] has those of cohorts.
#[derive(Debug, Default)]
pub struct Outcome {
    /// With [`Flow::Async`](crate::program::Flow::Async): what became of the cohorts that were parked, then of those that began.
    pub cohorts: Vec<CohortOutcome>,
    /// Seconds that the step took; emulated ones on a device in emulated time.
    pub seconds: f64,
}

/// The outcome of a step for a cohort.
#[derive(Debug)]
pub struct CohortOutcome {
    /// Its sub-batch on the machine.
    pub(super) slot: usize,
    /// Its rows.
    pub groups: Vec<Group>,
    /// Where it is parked now ([`Placement::next_stop`](crate::program::Placement::next_stop)); `None`: its rows have
    /// logits, or it failed.
    pub at: Option<u32>,
    /// Whether it has advanced.
    pub advanced: bool,
    /// The numbers of its rows' results, once they have any.
    pub rows: Option<Range<usize>>,
    /// The error if its attention on the host failed: its sequences are then as before its token, which can start over.
    pub failed: Option<Error>,
}
