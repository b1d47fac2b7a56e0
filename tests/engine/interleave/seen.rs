//! What a strategy has decided, counted: a test of a combination shows that there was one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tandem::program::{Flow, Kind, Kv, Op, Placement, RequestId, Residence, Side, Unit, lower};
use tandem::sched::{Decision, Limits, Observed, Predict, Queues, RequestView, Strategy};

use super::random::Random;

/// Iterations by what was in them.
#[derive(Debug, Default)]
pub struct Counts {
    /// With rows of both sub-batches in lock step.
    pub two_lanes: AtomicUsize,
    /// With cohorts.
    pub asynchronous: AtomicUsize,
    /// With cohorts, over weights on both sides.
    pub asynchronous_split: AtomicUsize,
    /// Cohorts that stayed parked, since the host was not done.
    pub late: AtomicUsize,
    /// With rows for the host that cross on the copy lanes.
    pub copy_lanes: AtomicUsize,
    /// With rows of both sides' requests.
    pub both_sides: AtomicUsize,
    /// Requests whose first pages went to the host.
    pub splits: AtomicUsize,
    /// Requests that changed sides.
    pub swaps: AtomicUsize,
    /// Cancels, by where the request was then ([`Counts::STATES`]).
    pub cancelled: [AtomicUsize; Counts::STATES.len()],
}

impl Counts {
    /// Where a request may be when it is cancelled.
    pub const STATES: [&str; 8] = [
        "over",
        "waiting",
        "admitted",
        "within its prompt",
        "decoded on the device",
        "decoded on the host",
        "parked at the first layer",
        "parked at a later layer",
    ];

    /// A request is cancelled.
    pub fn cancels(&self, id: RequestId, queues: &Queues) {
        let running = queues.running().iter().find(|j| j.id == id);
        let state = match running {
            _ if queues.waiting().any(|j| j.id == id) => 1,
            None => 0,
            Some(RequestView { at: Some(0), .. }) => 6,
            Some(RequestView { at: Some(_), .. }) => 7,
            Some(j) if j.stored == 0 => 2,
            Some(j) if j.stored < j.prompt => 3,
            Some(j) => {
                if j.home == Some(Side::Device) {
                    4
                } else {
                    5
                }
            }
        };
        self.cancelled[state].fetch_add(1, Ordering::Relaxed);
    }

    /// Of several threads.
    pub fn sum(all: &[Arc<Counts>]) -> Counts {
        let sum = Counts::default();
        for c in all {
            let add = |to: &AtomicUsize, from: &AtomicUsize| {
                to.fetch_add(from.load(Ordering::Relaxed), Ordering::Relaxed);
            };
            add(&sum.two_lanes, &c.two_lanes);
            add(&sum.asynchronous, &c.asynchronous);
            add(&sum.asynchronous_split, &c.asynchronous_split);
            add(&sum.late, &c.late);
            add(&sum.copy_lanes, &c.copy_lanes);
            add(&sum.both_sides, &c.both_sides);
            add(&sum.splits, &c.splits);
            add(&sum.swaps, &c.swaps);
            sum.cancelled.iter().zip(&c.cancelled).for_each(|(to, from)| add(to, from));
        }
        sum
    }
}

pub struct Counted {
    pub inner: Box<dyn Strategy>,
    pub counts: Arc<Counts>,
    /// What steps took: strategies learn of it, and a run does not depend on the clock.
    pub random: Random,
    /// Where the engine's weights are.
    pub placement: Placement,
}

impl Strategy for Counted {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn most_pages(&self, limits: &Limits) -> usize {
        self.inner.most_pages(limits)
    }

    fn plan(&mut self, queues: &Queues, limits: &Limits, costs: &dyn Predict) -> Decision {
        let decision = self.inner.plan(queues, limits, costs);
        let iteration = &decision.iteration;
        let filled = iteration.sub_batches.iter().filter(|b| !b.groups.is_empty()).count();
        let has = |kv| iteration.sub_batches.iter().flat_map(|b| &b.groups).any(|g| g.kv == kv);
        let count = |counter: &AtomicUsize, n: usize| counter.fetch_add(n, Ordering::Relaxed);
        let c = &self.counts;
        count(&c.two_lanes, usize::from(iteration.flow == Flow::TwoLanes && filled == 2));
        let cohorts = iteration.cohorts().next().is_some();
        count(&c.asynchronous, usize::from(cohorts));
        let splits_layers = self.placement.layers.iter().any(|l| l.weights != Residence::Device)
            || [self.placement.embedding, self.placement.head].contains(&Side::Host);
        count(&c.asynchronous_split, usize::from(cohorts && splits_layers));
        let program = lower(&self.placement, iteration);
        let crosses = |op: &Op| op.unit == Unit::D2h && matches!(op.kind, Kind::Publish { .. });
        count(&c.copy_lanes, usize::from(program.is_ok_and(|p| p.ops.iter().any(crosses))));
        count(&c.both_sides, usize::from(has(Kv::Device) && has(Kv::Host)));
        count(&c.splits, iteration.moves.len());
        count(&c.swaps, decision.swaps.len());
        decision
    }

    fn observe(&mut self, seen: &Observed) {
        self.counts.late.fetch_add((seen.cohorts - seen.advanced) as usize, Ordering::Relaxed);
        let seconds = seen.predicted * (0.5 + self.random.below(1000) as f64 / 500.0);
        self.inner.observe(&Observed { seconds, ..*seen });
    }
}
