//! What `auto` chooses among: each strategy there is, and its own way of mixing them step by step.

use crate::program::Side;

use super::apex::Apex;
use super::decision::Decision;
use super::fastdecode::FastDecode;
use super::gpu_only::GpuOnly;
use super::mixed::Mixed;
use super::neo::Neo;
use super::predict::Predict;
use super::queues::Queues;
use super::strategy::{Limits, Observed, Strategy};

/// A strategy that can be copied, to be tried out.
#[derive(Debug, Clone)]
enum Inner {
    Mixed(Mixed),
    GpuOnly(GpuOnly),
    FastDecode(FastDecode),
    Neo(Neo),
    Apex(Apex),
}

/// A strategy, taken up in the middle of a run: rows that another one has parked get their token first.
#[derive(Debug, Clone)]
pub(super) struct Policy {
    inner: Inner,
    /// Ends cohorts for a strategy that has none.
    ending: Mixed,
}

impl Policy {
    fn new(inner: Inner) -> Policy {
        Policy { inner, ending: Mixed::ending() }
    }

    /// The best way of each step, whatever comes after.
    pub fn mixed() -> Policy {
        Policy::new(Inner::Mixed(Mixed::default()))
    }

    /// All of them, new. Those first whose steps are few and long: their rollouts cost least, and bound the others.
    pub fn all() -> [Policy; 5] {
        [
            Policy::mixed(),
            Policy::new(Inner::FastDecode(FastDecode::default())),
            Policy::new(Inner::Apex(Apex::default())),
            Policy::new(Inner::Neo(Neo::default())),
            Policy::new(Inner::GpuOnly(GpuOnly::default())),
        ]
    }

    fn strategy(&self) -> &dyn Strategy {
        match &self.inner {
            Inner::Mixed(s) => s,
            Inner::GpuOnly(s) => s,
            Inner::FastDecode(s) => s,
            Inner::Neo(s) => s,
            Inner::Apex(s) => s,
        }
    }

    fn strategy_mut(&mut self) -> &mut dyn Strategy {
        match &mut self.inner {
            Inner::Mixed(s) => s,
            Inner::GpuOnly(s) => s,
            Inner::FastDecode(s) => s,
            Inner::Neo(s) => s,
            Inner::Apex(s) => s,
        }
    }

    fn has_cohorts(&self) -> bool {
        matches!(self.inner, Inner::Mixed(_) | Inner::Apex(_))
    }

    /// Whether it is the one that a new run begins with.
    pub fn is_mixed(&self) -> bool {
        matches!(self.inner, Inner::Mixed(_))
    }

    /// Whether it serves all requests that are there. FastDecode has no rows for those on the device, and the device alone none for
    /// those that are too long for it.
    pub fn serves(&self, queues: &Queues, limits: &Limits) -> bool {
        let most = self.strategy().most_pages(limits);
        let on_device = matches!(self.inner, Inner::FastDecode(_));
        queues
            .running()
            .iter()
            .all(|job| job.pages() <= most && !(on_device && job.home == Some(Side::Device)))
            && queues.waiting().all(|job| job.pages() <= most)
    }
}

impl Strategy for Policy {
    fn name(&self) -> &'static str {
        self.strategy().name()
    }

    fn plan(&mut self, queues: &Queues, limits: &Limits, costs: &dyn Predict) -> Decision {
        if !self.has_cohorts() && queues.running().iter().any(|job| job.at.is_some()) {
            return self.ending.plan(queues, limits, costs);
        }
        self.strategy_mut().plan(queues, limits, costs)
    }

    fn observe(&mut self, seen: &Observed) {
        self.strategy_mut().observe(seen);
    }
}
