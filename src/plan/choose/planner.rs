//! What the strategies share: a draft of a placement, how it is measured, predicted and turned into a candidate.

use super::{Candidate, PlanRequest, Strategy};
use crate::plan::bytes::Bytes;
use crate::plan::cost::Costs;
use crate::plan::experts::{ExpertCounts, exchange_pays};
use crate::plan::hardware::{Energy, Hardware};
use crate::plan::memory::Memory;
use crate::plan::price::price;
use crate::plan::programs::{PredictedRun, far_forecast, programs_with};
use crate::plan::search::most;
use crate::plan::sizes::Sizes;
use crate::program::{Far, LayerPlacement, Placement, Policy, Side, Sublayer};

/// The sides of embedding and head.
pub(super) type Ends = [Side; 2];

/// In the order of trial: the head is read for every token, the embedding only looks up a row.
pub(super) const ENDS: [Ends; 3] =
    [[Side::Device, Side::Device], [Side::Host, Side::Device], [Side::Host, Side::Host]];

/// What the strategies share.
pub(super) struct Planner<'a> {
    pub sizes: &'a Sizes,
    pub hardware: &'a Hardware,
    pub request: &'a PlanRequest,
    pub costs: &'a dyn Costs,
    pub bytes: &'a dyn Bytes,
}

/// A placement with its rows, before it is turned into a candidate.
#[derive(Clone)]
pub(super) struct CandidateDraft {
    pub placement: Placement,
    pub chunk: u64,
    /// How tokens whose pages have left the GPU are attended.
    pub far: Option<Far>,
    pub reason: String,
    pub k: Option<usize>,
    pub policies: Option<(Policy, Policy)>,
    pub pinned: Option<usize>,
    pub notes: Vec<String>,
    /// What it takes, once that has been predicted.
    pub run: Option<std::result::Result<PredictedRun, String>>,
}

impl CandidateDraft {
    pub fn new(placement: Placement, chunk: u64, reason: impl Into<String>) -> CandidateDraft {
        CandidateDraft {
            placement,
            chunk,
            far: Some(Far::Attend),
            reason: reason.into(),
            k: None,
            policies: None,
            pinned: None,
            notes: Vec::new(),
            run: None,
        }
    }

    /// What it takes, as predicted.
    pub fn seconds(&self) -> f64 {
        match &self.run {
            Some(Ok(run)) => run.total(),
            _ => f64::INFINITY,
        }
    }
}

impl Planner<'_> {
    /// With tokens whose pages have left the GPU attended in the way that needs the least memory.
    pub fn memory(&self, placement: &Placement, chunk: u64) -> Memory {
        self.bytes.memory(placement, chunk, self.bytes.ways()[0])
    }

    pub fn memory_of(&self, draft: &CandidateDraft) -> Memory {
        self.bytes.memory(&draft.placement, draft.chunk, draft.far)
    }

    /// In closed form.
    pub fn total(&self, placement: &Placement, chunk: u64) -> f64 {
        let t = price(self.costs, self.sizes, placement, &self.request.work(chunk));
        t.prefill + self.request.gen_len as f64 * t.step
    }

    /// Predicts by programs.
    pub fn predict(&self, draft: &mut CandidateDraft) {
        let work = self.request.work(draft.chunk);
        let run = programs_with(self.costs, self.sizes, &draft.placement, &work, draft.far);
        // A placement that cannot be lowered cannot run.
        draft.run = Some(run.map_err(|e| e.to_string()));
    }

    /// Rows of a prefill step to try, ascending.
    pub fn chunks(&self) -> Vec<u64> {
        let longest = self.bytes.longest_chunk();
        let mut chunks: Vec<u64> = self.request.chunks().into_iter().map(|c| c.min(longest)).collect();
        chunks.dedup();
        chunks
    }

    /// Rows of a prefill step of strategies that do not search.
    pub fn default_chunk(&self) -> u64 {
        self.request.default_chunk().min(self.bytes.longest_chunk())
    }

    /// Pages of a block that all sequences need.
    pub fn pages(&self) -> usize {
        self.bytes.pages()
    }

    /// Pages of a block on the GPU, where nothing is short.
    pub fn device_pages(&self) -> usize {
        self.bytes.fixed_pages().map_or(self.pages(), |pages| pages.min(self.pages()))
    }

    /// The most pages of `place`'s blocks on the GPU with which it fits, if not all do: no fewer than any step needs, and a
    /// sixteenth of all. `None`: the number is fixed, or it fits with none.
    pub fn fewer_pages(&self, chunk: u64, place: impl Fn(usize) -> Placement) -> Option<usize> {
        let fits = |pages: usize| self.memory(&place(pages), chunk).fits();
        let (least, all) = (self.bytes.fewest_pages(chunk).max(self.pages() / 16).max(1), self.pages());
        if self.bytes.fixed_pages().is_some() || least >= all || !fits(least) {
            return None;
        }
        // With all of them none moves, which takes less than one page fewer.
        Some(least + most(all - 1 - least, |more| fits(least + more)))
    }

    pub fn units(&self) -> usize {
        self.sizes.units()
    }

    /// What the run draws and costs.
    pub fn energy(&self, run: &PredictedRun) -> Option<Energy> {
        let PlanRequest { batch, gen_len, .. } = *self.request;
        let phases = [run.prefill, run.decode].into_iter().zip(run.busy);
        let (host, gpu) = phases.fold((0.0, 0.0), |(host, gpu), (t, b)| (host + t * b.host, gpu + t * b.gpu));
        let total = run.total();
        let tokens = batch as f64 * gen_len as f64;
        self.hardware.power?.energy(total, (host / total, gpu / total), tokens, self.hardware.price.as_ref())
    }

    /// The draft as a candidate: predicted, measured, and infeasible if it does not fit.
    pub fn candidate(&self, strategy: Strategy, mut draft: CandidateDraft) -> Candidate {
        let memory = self.memory_of(&draft);
        let lack = memory.lack();
        let weights = self.hardware.weights.as_ref().filter(|_| memory.nodes.is_some());
        let there = self.hardware.accelerator.is_some() || !draft.placement.uses(Side::Device);
        if there && draft.run.is_none() {
            self.predict(&mut draft);
        }
        let (run, refused) = match draft.run {
            Some(Ok(run)) => (Some(run), None),
            Some(Err(e)) => (None, Some(e)),
            None => (None, None),
        };
        let of = |f: fn(&PredictedRun) -> f64| run.as_ref().map(f);
        let (prefill, decode, total) = (of(|r| r.prefill), of(|r| r.decode), of(PredictedRun::total));
        let on_gpu = |layer: &LayerPlacement| layer.weights.stays_on_device(Sublayer::Qkv);
        let ends = [draft.placement.embedding, draft.placement.head];
        let gpu_units = draft.placement.layers.iter().filter(|l| on_gpu(l)).count()
            + ends.iter().filter(|&&side| side == Side::Device).count();
        Candidate {
            strategy,
            feasible: run.is_some() && lack.is_none(),
            reason: match lack.or(refused) {
                _ if !there => "this machine has no GPU".into(),
                Some(problem) => problem,
                None => draft.reason,
            },
            k: draft.k,
            cpu_units: self.units() - gpu_units,
            gpu_units,
            t_prefill_s: prefill,
            t_decode_s: decode,
            t_decode_step_s: decode.map(|d| d / self.request.gen_len as f64),
            t_total_s: total,
            prefill_policy: draft.policies.map(|p| p.0.bits()),
            decode_policy: draft.policies.map(|p| p.1.bits()),
            pinned_blocks: draft.pinned,
            experts: ExpertCounts::of(&self.sizes.spec, &draft.placement)
                .map(|experts| experts.with_cache(exchange_pays(self.hardware).is_some())),
            chunk: draft.chunk,
            way: draft.far,
            spilled: run.as_ref().and_then(|r| r.spilled),
            far: run.as_ref().filter(|r| r.spilled.is_some()).and_then(|_| {
                let work = self.request.work(draft.chunk);
                far_forecast(self.costs, self.sizes, &draft.placement, &work).ok().flatten()
            }),
            energy: run.as_ref().and_then(|r| self.energy(r)),
            busy: run.as_ref().map(|r| r.busy),
            operations: run.as_ref().map(|r| r.operations.clone()).unwrap_or_default(),
            stages: run.map(|r| r.stages).unwrap_or_default(),
            memory,
            weights_nodes: weights.map(|on| on.nodes.clone()),
            longest_context: match there {
                true => self.bytes.longest_context(&draft.placement, draft.chunk, draft.far),
                false => 0,
            },
            notes: draft.notes,
            placement: draft.placement,
        }
    }

    /// The chunk with which `placement` fits and is fastest, of those as good the nearest to the engine's default,
    /// which it is too if it fits with none.
    pub fn best_chunk(&self, placement: &Placement) -> u64 {
        const AS_GOOD: f64 = 1.002;
        let chunks = self.chunks();
        let usable = self.hardware.accelerator.is_some() || !placement.uses(Side::Device);
        let fitting = chunks.iter().copied().filter(|&c| usable && self.memory(placement, c).fits());
        let timed: Vec<(u64, f64)> = fitting.map(|c| (c, self.total(placement, c))).collect();
        let least = timed.iter().map(|t| t.1).fold(f64::INFINITY, f64::min);
        let default = self.default_chunk();
        let good = timed.into_iter().filter(|t| t.1 <= least * AS_GOOD).map(|t| t.0);
        good.min_by_key(|c| c.abs_diff(default)).unwrap_or(default)
    }

    /// The draft in each way to attend tokens whose pages have left the GPU.
    pub fn in_every_way(&self, draft: CandidateDraft) -> Vec<CandidateDraft> {
        let ways = self.bytes.ways();
        let ways = if self.bytes.pages_move(&draft.placement) { ways } else { &ways[..1] };
        let known = |far| if far == draft.far { draft.run.clone() } else { None };
        ways.iter().map(|&far| CandidateDraft { far, run: known(far), ..draft.clone() }).collect()
    }

    /// The fastest of the drafts by their programs, of those that fit; if none does, the one that needs the least on the GPU.
    pub fn fastest(&self, drafts: Vec<CandidateDraft>, strategy: Strategy) -> Candidate {
        // Memory for streamed pages has to pay.
        const PAYS: f64 = 1.0 - 1e-6;
        let mut drafts: Vec<CandidateDraft> = drafts.into_iter().flat_map(|d| self.in_every_way(d)).collect();
        let memory: Vec<Memory> = drafts.iter().map(|d| self.memory_of(d)).collect();
        if drafts.len() > 1 && self.hardware.accelerator.is_some() {
            let fitting = drafts.iter_mut().zip(&memory).filter(|(d, m)| d.run.is_none() && m.fits());
            fitting.for_each(|(draft, _)| self.predict(draft));
        }
        let seconds = |i: usize| match (memory[i].fits(), drafts[i].far) {
            (true, Some(Far::Attend)) => drafts[i].seconds() * PAYS,
            (true, _) => drafts[i].seconds(),
            (false, _) => f64::INFINITY,
        };
        let order = |&a: &usize, &b: &usize| {
            let total = seconds(a).total_cmp(&seconds(b));
            let least = || memory[a].gpu.total.cmp(&memory[b].gpu.total);
            if seconds(a).is_infinite() { total.then_with(least) } else { total }
        };
        let best = (0..drafts.len()).min_by(order).expect("there is a draft");
        self.candidate(strategy, drafts.swap_remove(best))
    }
}
