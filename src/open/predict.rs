//! Predicted times for the choice of a placement, and for schedulers.

use std::sync::Arc;

use super::basis::Basis;
use super::settings::Settings;
use crate::device::{DeviceInfo, Kind};
use crate::engine::{Among, Choice, Considered, Options, Prices, Sizes, Timed, choose_by_time};
use crate::model::LoadedModel;
use crate::plan::{self, CostSource, Costs, Predictor, StepTimes, Strategy as System, Workload, programs};
use crate::program::Placement;
use crate::progress::Progress;
use crate::simd::Isa;
use crate::{Result, sched};

/// The work of a run, as far as known in advance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Use {
    /// Tokens of a prompt.
    pub prompt: usize,
    /// Decode steps.
    pub gen_len: usize,
    /// Sequences.
    pub batch: usize,
}

/// A choice by predicted time.
pub struct Prediction {
    /// The choice.
    pub timed: Timed,
    /// The work that it is predicted for.
    pub work: Workload,
    /// The machine whose times these are, if not this machine.
    pub whose: Option<String>,
    /// What the figures come from.
    pub from: String,
    times: StepTimes,
}

impl Prediction {
    /// Seconds of a decode step, in the mean; `None` without an answer.
    pub fn step(&self) -> Option<f64> {
        let n = self.work.gen_len;
        (n > 0).then(|| self.timed.run.decode / n as f64)
    }

    /// Predictions of steps, for as long as the model runs.
    pub fn times(&self) -> StepTimes {
        self.times.clone()
    }
}

/// A model, how it is to run, and for what.
pub(super) struct Subject<'a> {
    pub settings: &'a Settings,
    pub model: &'a LoadedModel,
    pub options: &'a Options,
    pub work: Use,
    pub progress: &'a dyn Progress,
}

impl Subject<'_> {
    /// The fastest placement that fits, and its predicted time; `None` if nothing can be predicted, or nothing fits.
    ///
    /// # Errors
    /// If the hardware description cannot be read or has no GPU, or the user fixed something that the model does not have.
    pub fn fastest(
        &self,
        device: (&Kind, &DeviceInfo),
        sizes: &Sizes,
        among: Among,
    ) -> Result<Option<Prediction>> {
        let post_norms = self.model.spec.post_norms;
        self.predict(Some(device), |costs, model, work| {
            choose_by_time(sizes, among, &Prices { costs, model, work, post_norms })
        })
    }

    /// The predicted time with everything on one side: on `device`, or without one on the CPU. `None` if nothing can be
    /// predicted.
    ///
    /// # Errors
    /// A description of hardware that cannot be read, or has no GPU.
    pub fn alone(&self, device: Option<(&Kind, &DeviceInfo)>, choice: Choice) -> Result<Option<Prediction>> {
        let strategy = if device.is_some() { System::GpuOnly } else { System::CpuOnly };
        self.predict(device, |costs, sized, work| {
            // Unlimited pages.
            let placement = Placement { device_pages: usize::MAX >> 1, ..choice.placement.clone() };
            let run = programs(costs, sized, &placement, &work)?;
            let considered = Considered {
                strategy,
                what: format!("everything on the {}", if device.is_some() { "device" } else { "CPU" }),
                seconds: Some((run.prefill, run.decode)),
                bytes: (choice.device.total(), choice.host.total()),
            };
            let why = format!("{}: as it was asked for", strategy.name());
            let considered = vec![considered];
            Ok(Some(Timed { strategy, choice, run, considered, fitting: 1, far: None, why }))
        })
    }

    /// Calls `choose` with the costs of this machine and the sizes of the model.
    fn predict(
        &self,
        device: Option<(&Kind, &DeviceInfo)>,
        choose: impl FnOnce(&dyn Costs, &plan::Sizes, Workload) -> Result<Option<Timed>>,
    ) -> Result<Option<Prediction>> {
        let basis = Basis::of(self.settings, self.model, device, self.progress)?;
        let Some(Basis { hardware, tables, whose, from }) = basis else { return Ok(None) };
        let sized = plan::Sizes::of_weights(&self.model.spec, &self.model.weights, Isa::selected()?);
        let work = Workload {
            prompt: self.work.prompt.max(1) as u64,
            gen_len: self.work.gen_len as u64,
            batch: self.work.batch.max(1) as u64,
            chunk: self.options.chunk.min(self.options.context) as u64,
        };
        // No prediction if the figures would overflow.
        if plan::countable(&sized, work.batch, work.context()).is_err() {
            return Ok(None);
        }
        let mut choose = Some(choose);
        let mut chosen = Ok(None);
        let source = Basis::source(hardware, tables);
        source.ask(&sized, &mut |costs| {
            if let Some(choose) = choose.take() {
                chosen = choose(costs, &sized, work);
            }
        });
        let times = StepTimes::of(source, sized);
        Ok(chosen?.map(|timed| Prediction { timed, work, whose, from, times }))
    }
}

/// Predictions for schedulers of requests on two sides.
pub(super) struct Scheduling {
    source: Arc<dyn CostSource>,
    sizes: plan::Sizes,
    placement: Placement,
}

impl Scheduling {
    /// Predictions for schedulers of a model in this placement on this machine with this device; `None` if there are no
    /// figures.
    ///
    /// # Errors
    /// A description of hardware that cannot be read, or has no GPU.
    pub fn of(
        settings: &Settings,
        model: &LoadedModel,
        device: (&Kind, &DeviceInfo),
        placement: &Placement,
        progress: &dyn Progress,
    ) -> Result<Option<Scheduling>> {
        let Some(basis) = Basis::of(settings, model, Some(device), progress)? else { return Ok(None) };
        let sizes = plan::Sizes::of_weights(&model.spec, &model.weights, Isa::selected()?);
        Ok(Some(Scheduling { source: basis.uncached(), sizes, placement: placement.clone() }))
    }

    /// Predictions for a scheduler.
    pub fn predict(&self) -> Box<dyn sched::Predict + Send> {
        Box::new(Predictor::of(self.source.clone(), self.sizes.clone(), self.placement.clone()))
    }
}
