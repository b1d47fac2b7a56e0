//! Predicted times for the choice of a placement, and for schedulers.

use std::sync::Arc;

use super::basis::Basis;
use super::settings::Settings;
use crate::cache::KvType;
use crate::device::{DeviceInfo, Kind};
use crate::engine::Options;
use crate::hardware::Hardware;
use crate::model::{LoadedModel, RouterProfile};
use crate::plan::{
    self, Bytes, Candidate, CostSource, Costs, FarForecast, Predictor, StepTimes, Strategy as System,
    Workload, programs,
};
use crate::profile::{ModelIdentity, kept_router};
use crate::program::{Placement, Side};
use crate::progress::Progress;
use crate::simd::Isa;
use crate::{Error, Result, sched};

/// The work of a run, as far as known in advance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunWork {
    /// Tokens of a prompt.
    pub prompt: usize,
    /// Decode steps.
    pub gen_len: usize,
    /// Sequences.
    pub batch: usize,
}

/// The best of one strategy.
#[derive(Debug, Clone, PartialEq)]
pub struct Considered {
    /// The system whose candidate it is.
    pub strategy: System,
    /// What it does, or why it does not fit.
    pub what: String,
    /// Seconds of the prefill and of all decode steps; none if it does not fit.
    pub seconds: Option<(f64, f64)>,
    /// Bytes on the device and on the host.
    pub bytes: (u64, u64),
}

impl Considered {
    fn of(c: &Candidate) -> Considered {
        Considered {
            strategy: c.strategy,
            what: c.reason.clone(),
            seconds: c.t_prefill_s.zip(c.t_decode_s).filter(|_| c.feasible),
            bytes: (c.memory.gpu.total, c.memory.host.total),
        }
    }
}

/// A choice by predicted time.
pub struct Prediction {
    /// Seconds of the whole prefill.
    pub prefill: f64,
    /// Seconds of all decode steps.
    pub decode: f64,
    /// The best of every strategy that was compared.
    pub considered: Vec<Considered>,
    /// How decode steps attend pages that leave the device, if any do.
    pub far: Option<FarForecast>,
    /// The reason for the choice.
    pub why: String,
    /// The work that it is predicted for.
    pub work: Workload,
    /// The machine whose times these are, if not this machine.
    pub whose: Option<String>,
    /// What the figures come from.
    pub from: String,
    /// Choices that make up for the exchange of an expert ([`plan::exchange_pays`]).
    pub exchange_pays: Option<f64>,
    times: StepTimes,
}

impl Prediction {
    /// Seconds of a decode step, in the mean; `None` without an answer.
    pub fn step(&self) -> Option<f64> {
        let n = self.work.gen_len;
        (n > 0).then(|| self.decode / n as f64)
    }

    /// Predictions of steps, for as long as the model runs.
    pub fn times(&self) -> StepTimes {
        self.times.clone()
    }
}

/// What is known of the times of a run before it is placed.
struct Known {
    hardware: Hardware,
    source: Arc<dyn CostSource>,
    sized: plan::Sizes,
    work: Workload,
    whose: Option<String>,
    from: String,
}

impl Known {
    /// Calls `with` with the costs.
    fn ask<T>(&self, with: impl FnOnce(&dyn Costs) -> T) -> T {
        let (mut with, mut answer) = (Some(with), None);
        self.source.ask(&self.sized, &mut |costs| answer = with.take().map(|with| with(costs)));
        answer.expect("a source has costs")
    }

    fn prediction(
        self,
        (prefill, decode): (f64, f64),
        considered: Vec<Considered>,
        far: Option<FarForecast>,
        why: String,
    ) -> Prediction {
        let Known { hardware, source, sized, work, whose, from } = self;
        let (times, exchange_pays) = (StepTimes::of(source, sized), plan::exchange_pays(&hardware));
        Prediction { exchange_pays, prefill, decode, considered, far, why, work, whose, from, times }
    }
}

/// A model, how it is to run, and for what.
pub(super) struct PredictionSubject<'a> {
    pub settings: &'a Settings,
    pub model: &'a LoadedModel,
    pub options: &'a Options,
    pub work: RunWork,
    pub progress: &'a dyn Progress,
}

impl PredictionSubject<'_> {
    /// The fastest placement that fits, of `strategies`, with its predicted time. Where no length of chunks is set and the whole run is
    /// known, the best of several is chosen, too ([`Candidate::chunk`]).
    ///
    /// # Errors
    /// [`Error::Capacity`] if nothing fits, with the numbers; a hardware description that cannot be read or has no GPU; something
    /// fixed that the model does not have; work beyond all reason.
    pub fn fastest(
        &self,
        device: (&Kind, &DeviceInfo),
        bytes: &dyn Bytes,
        strategies: &[System],
    ) -> Result<(Candidate, Prediction)> {
        let known = self.known(Some(device))?.expect("every device has figures");
        plan::countable(&known.sized, known.work.batch, known.work.context())?;
        let request = plan::PlanRequest {
            prompt: known.work.prompt,
            gen_len: known.work.gen_len,
            batch: known.work.batch,
            gpu_memory: None,
            chunk: (!self.seeks_chunk()).then_some(known.work.chunk),
            overlap: false,
            fixed: self.settings.fixed,
        };
        let plan = known.ask(|costs| {
            plan::plan_within(bytes, &known.sized, &known.hardware, &request, strategies, costs)
        })?;
        let Some(chosen) = plan.chosen.map(|i| &plan.candidates[i]) else {
            return Err(Error::Capacity(nothing_fits(&plan.candidates)));
        };
        let considered = plan.candidates.iter().map(Considered::of).collect();
        let seconds = (chosen.t_prefill_s.unwrap_or(0.0), chosen.t_decode_s.unwrap_or(0.0));
        let far = chosen.far.clone();
        let known = Known { work: Workload { chunk: chosen.chunk, ..known.work }, ..known };
        Ok((chosen.clone(), known.prediction(seconds, considered, far, plan.why)))
    }

    /// Whether the length of chunks is to be chosen with the placement: it is not set, and all of the run is known: later prompts, which
    /// could be longer, do not fit the context.
    pub fn seeks_chunk(&self) -> bool {
        let whole = self.work.prompt + self.work.gen_len;
        self.settings.chunk.is_none() && self.work.gen_len > 0 && self.options.context <= whole
    }

    /// The predicted time with everything on one side, in so many bytes of both: on `device`, or without one on the CPU. `None` if nothing can be
    /// predicted.
    ///
    /// # Errors
    /// A description of hardware that cannot be read, or has no GPU.
    pub fn alone(
        &self,
        device: Option<(&Kind, &DeviceInfo)>,
        placement: &Placement,
        bytes: (u64, u64),
    ) -> Result<Option<Prediction>> {
        let Some(known) = self.known(device)? else { return Ok(None) };
        // No prediction if the figures would overflow.
        if plan::countable(&known.sized, known.work.batch, known.work.context()).is_err() {
            return Ok(None);
        }
        // Unlimited pages.
        let placement = Placement { device_pages: usize::MAX >> 1, ..placement.clone() };
        let run = known.ask(|costs| programs(costs, &known.sized, &placement, &known.work))?;
        let (strategy, side) = match device {
            Some(_) => (System::GpuOnly, "device"),
            None => (System::CpuOnly, "CPU"),
        };
        let seconds = (run.prefill, run.decode);
        let considered =
            Considered { strategy, what: format!("everything on the {side}"), seconds: Some(seconds), bytes };
        let why = format!("{}: as it was asked for", strategy.name());
        Ok(Some(known.prediction(seconds, vec![considered], None, why)))
    }

    /// The costs of this machine, and the sizes of the model.
    fn known(&self, device: Option<(&Kind, &DeviceInfo)>) -> Result<Option<Known>> {
        let basis = Basis::of(self.settings, self.model, device, self.progress)?;
        let Some(Basis { hardware, tables, whose, mut from }) = basis else { return Ok(None) };
        let sized = sized(self.settings, self.model, self.progress)?;
        if sized.has_router() {
            from += ", experts as their router chose them";
        }
        let work = Workload {
            prompt: self.work.prompt.max(1) as u64,
            gen_len: self.work.gen_len as u64,
            batch: self.work.batch.max(1) as u64,
            chunk: self.options.chunk.min(self.options.context) as u64,
        };
        let source = Basis::source(hardware.clone(), tables);
        Ok(Some(Known { hardware, source, sized, work, whose, from }))
    }
}

/// The sizes of a model, its experts read as was recorded of its routers, if anything was. In emulated time all experts of whole layers
/// are alike to the clock, and so they are here.
fn sized(settings: &Settings, model: &LoadedModel, progress: &dyn Progress) -> Result<plan::Sizes> {
    let LoadedModel { spec, weights, .. } = model;
    let sizes = plan::Sizes::of_weights(spec, weights, Isa::selected()?)
        .with_kv(settings.kv_type.unwrap_or(KvType::BF16));
    Ok(match router(model, progress) {
        Some(router) if settings.timed_machine().is_some() => sizes.with_most_used(&router),
        Some(router) => sizes.with_router(router),
        None => sizes,
    })
}

/// What was recorded of a model's routers, if anything was.
pub(super) fn router(model: &LoadedModel, progress: &dyn Progress) -> Option<RouterProfile> {
    let LoadedModel { spec, weights, source, .. } = model;
    spec.experts.as_ref()?;
    match kept_router(&ModelIdentity::of(spec, weights, source), spec) {
        Ok(record) => Some(record?.router),
        Err(e) => {
            progress.note(&format!("experts as if used alike: {e}"));
            None
        }
    }
}

/// The sentence if no candidate fits: what the one lacks that lacks least.
fn nothing_fits(candidates: &[Candidate]) -> String {
    let lack = |c: &&Candidate| {
        let (gpu, host) = (&c.memory.gpu, &c.memory.host);
        gpu.total.saturating_sub(gpu.available) + host.total.saturating_sub(host.available)
    };
    let Some(c) = candidates.iter().min_by_key(lack) else { return "nothing to choose from".into() };
    format!(
        "`strategy` {}: {}; try a smaller `context` or `chunk`, or `device` cpu",
        c.strategy.name(),
        c.reason
    )
}

/// Predictions for schedulers of requests on two sides.
pub(super) struct Scheduling {
    source: Arc<dyn CostSource>,
    sizes: plan::Sizes,
    placement: Placement,
}

impl Scheduling {
    /// Predictions for schedulers of a model on this machine with this device, all of it there.
    ///
    /// # Errors
    /// A description of hardware that cannot be read, or has no GPU.
    pub fn of(
        settings: &Settings,
        model: &LoadedModel,
        device: (&Kind, &DeviceInfo),
        progress: &dyn Progress,
    ) -> Result<Scheduling> {
        let basis = Basis::of(settings, model, Some(device), progress)?.expect("every device has figures");
        let sizes = sized(settings, model, progress)?;
        let placement = Placement::all(Side::Device, sizes.layers(), 0);
        Ok(Scheduling { source: basis.uncached(), sizes, placement })
    }

    /// The same in this placement.
    pub fn on(self, placement: Placement) -> Scheduling {
        Scheduling { placement, ..self }
    }

    /// The placement with experts on the host that is fastest for `work`, of those that `fits` takes: see [`plan::experts_for_requests`].
    pub fn experts_on_host<T>(&self, work: &Workload, fits: impl Fn(Placement) -> Option<T>) -> Option<T> {
        let blocks = 1..=self.sizes.layers();
        plan::experts_for_requests(&*self.source, &self.sizes, work, blocks, fits).map(|found| found.1)
    }

    /// Predictions for a scheduler.
    pub fn predict(&self) -> Box<dyn sched::Predict + Send> {
        Box::new(Predictor::of(self.source.clone(), self.sizes.clone(), self.placement.clone()))
    }
}
