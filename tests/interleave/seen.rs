//! What a strategy has decided, counted: a test of a combination shows that there was one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tandem::program::{Flow, Kv};
use tandem::sched::{Decision, Limits, Observed, Predict, Queues, Strategy};

/// Iterations by what was in them.
#[derive(Debug, Default)]
pub struct Counts {
    /// With rows of both sub-batches in lock step.
    pub two_lanes: AtomicUsize,
    /// With cohorts.
    pub asynchronous: AtomicUsize,
    /// With rows of both sides' requests.
    pub both_sides: AtomicUsize,
    /// Requests whose first pages went to the host.
    pub splits: AtomicUsize,
    /// Requests that changed sides.
    pub swaps: AtomicUsize,
}

pub struct Counted {
    pub inner: Box<dyn Strategy>,
    pub counts: Arc<Counts>,
}

impl Strategy for Counted {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn plan(&mut self, queues: &Queues, limits: &Limits, costs: &dyn Predict) -> Decision {
        let decision = self.inner.plan(queues, limits, costs);
        let iteration = &decision.iteration;
        let filled = iteration.sub_batches.iter().filter(|b| !b.groups.is_empty()).count();
        let has = |kv| iteration.sub_batches.iter().flat_map(|b| &b.groups).any(|g| g.kv == kv);
        let count = |counter: &AtomicUsize, n: usize| counter.fetch_add(n, Ordering::Relaxed);
        let c = &self.counts;
        count(&c.two_lanes, usize::from(iteration.flow == Flow::TwoLanes && filled == 2));
        count(&c.asynchronous, usize::from(iteration.cohorts().next().is_some()));
        count(&c.both_sides, usize::from(has(Kv::Device) && has(Kv::Host)));
        count(&c.splits, iteration.moves.len());
        count(&c.swaps, decision.swaps.len());
        decision
    }

    fn observe(&mut self, seen: &Observed) {
        self.inner.observe(seen);
    }
}
