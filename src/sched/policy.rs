//! What strategies choose among: the device alone, the papers' hybrids, and a way of mixing them step by step.

use crate::program::Side;

use super::apex::Apex;
use super::decision::Decision;
use super::fastdecode::FastDecode;
use super::gpu_only::OnDevice;
use super::mixed::Mixed;
use super::neo::Neo;
use super::pace::PromptPace;
use super::predict::Predict;
use super::queues::Queues;
use super::strategy::{Limits, Observed, Strategy};
use super::view::RequestView;

/// Prompts of a policy: the ways that are tried.
const BOTH: [PromptPace; 2] = [PromptPace::Paced, PromptPace::Full];

/// A strategy that can be copied, to be tried out.
#[derive(Debug, Clone)]
enum Inner {
    Mixed(Mixed),
    OnDevice(OnDevice),
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
    /// Most requests that it lets run at a time; `None`: as many as there is room for.
    most_running: Option<u32>,
}

impl Policy {
    fn new(inner: Inner) -> Policy {
        Policy { inner, ending: Mixed::ending(), most_running: None }
    }

    /// The same with at most so many requests at a time.
    pub fn with_most_running(&self, most: u32) -> Policy {
        Policy { most_running: Some(most), ..self.clone() }
    }

    /// Whether it decides as another one that has seen the same.
    pub fn is_like(&self, other: &Policy) -> bool {
        self.name() == other.name() && self.most_running == other.most_running
    }

    /// The best way of each step, whatever comes after.
    pub fn mixed() -> Policy {
        Policy::new(Inner::Mixed(Mixed::default()))
    }

    fn on_device(prompts: PromptPace, ahead: bool) -> Policy {
        Policy::new(Inner::OnDevice(OnDevice::new(prompts, ahead)))
    }

    /// The device alone.
    pub fn gpu_only() -> Vec<Policy> {
        let ways = [
            (PromptPace::Paced, true),
            (PromptPace::Paced, false),
            (PromptPace::Full, true),
            (PromptPace::Full, false),
        ];
        ways.into_iter().map(|(prompts, ahead)| Policy::on_device(prompts, ahead)).collect()
    }

    /// The device alone as vLLM has it: decode rows first, and prompts in chunks as there is room.
    pub fn vllm() -> Vec<Policy> {
        vec![Policy::on_device(PromptPace::Full, false)]
    }

    /// NEO, or the device alone.
    pub fn neo() -> Vec<Policy> {
        let neo = BOTH.map(|prompts| Policy::new(Inner::Neo(Neo::new(prompts))));
        neo.into_iter().chain(Policy::gpu_only()).collect()
    }

    /// APEX, or the device alone.
    pub fn apex() -> Vec<Policy> {
        let apex = BOTH.map(|prompts| Policy::new(Inner::Apex(Apex::new(prompts))));
        apex.into_iter().chain(Policy::gpu_only()).collect()
    }

    /// All of them. Those first that are rarely far behind, since their rollouts bound the others.
    pub fn all() -> Vec<Policy> {
        let hybrids =
            |prompts| [Inner::Apex(Apex::new(prompts)), Inner::Neo(Neo::new(prompts))].map(Policy::new);
        let first = [Policy::mixed(), Policy::on_device(PromptPace::Paced, true)].into_iter();
        let paced =
            hybrids(PromptPace::Paced).into_iter().chain([Policy::on_device(PromptPace::Paced, false)]);
        let fastdecode = Policy::new(Inner::FastDecode(FastDecode::default()));
        let full = [true, false].map(|ahead| Policy::on_device(PromptPace::Full, ahead));
        first.chain(paced).chain([fastdecode]).chain(hybrids(PromptPace::Full)).chain(full).collect()
    }

    fn strategy(&self) -> &dyn Strategy {
        match &self.inner {
            Inner::Mixed(s) => s,
            Inner::OnDevice(s) => s,
            Inner::FastDecode(s) => s,
            Inner::Neo(s) => s,
            Inner::Apex(s) => s,
        }
    }

    fn strategy_mut(&mut self) -> &mut dyn Strategy {
        match &mut self.inner {
            Inner::Mixed(s) => s,
            Inner::OnDevice(s) => s,
            Inner::FastDecode(s) => s,
            Inner::Neo(s) => s,
            Inner::Apex(s) => s,
        }
    }

    /// Whether rows of the host that have waited for [`AGE`](super::pipeline::AGE) steps get their turn, whatever else is faster.
    pub fn gives_turns(&self) -> bool {
        !matches!(self.inner, Inner::OnDevice(_))
    }

    fn has_cohorts(&self) -> bool {
        matches!(self.inner, Inner::Mixed(_) | Inner::Apex(_))
    }

    /// Whether it serves all requests that are there. FastDecode has no rows for those on the device, if the host has no room for them,
    /// and the device alone none for those that are too long for it.
    pub fn serves(&self, queues: &Queues, limits: &Limits) -> bool {
        let most = self.strategy().most_pages(limits);
        let pages: usize = queues.running().iter().map(RequestView::pages).sum();
        let on_device = || queues.running().iter().any(|job| job.home == Some(Side::Device));
        let held = matches!(self.inner, Inner::FastDecode(_)) && pages > limits.host_pages && on_device();
        !held && queues.running().iter().chain(queues.waiting()).all(|job| job.pages() <= most)
    }
}

impl Strategy for Policy {
    fn name(&self) -> &'static str {
        self.strategy().name()
    }

    fn most_pages(&self, limits: &Limits) -> usize {
        self.strategy().most_pages(limits)
    }

    fn plan(&mut self, queues: &Queues, limits: &Limits, costs: &dyn Predict) -> Decision {
        if !self.has_cohorts() && queues.running().iter().any(|job| job.at.is_some()) {
            return self.ending.plan(queues, limits, costs);
        }
        let sequences = match self.most_running {
            // Who has come meanwhile does not wait for others to end, and requests of unknown lengths make no waves.
            Some(most) if queues.are_known() => most.min(limits.sequences),
            _ => limits.sequences,
        };
        self.strategy_mut().plan(queues, &Limits { sequences, ..*limits }, costs)
    }

    fn observe(&mut self, seen: &Observed) {
        self.strategy_mut().observe(seen);
    }
}
