//! Seconds of whole steps, by costs that are kept: what an engine asks while it runs.

use std::fmt;
use std::sync::Arc;

use super::cost::Costs;
use super::hardware::Hardware;
use super::operation::OpCosts;
use super::roofline::Roofline;
use super::sizes::Sizes;
use crate::program::{Iteration, Placement, lower, virtual_machine};

/// What [`Costs`] are made of, without borrowing.
pub trait CostSource: Send + Sync {
    /// Asks the costs of a model of these sizes.
    fn ask(&self, sizes: &Sizes, question: &mut dyn FnMut(&dyn Costs));
}

/// The roofline.
impl CostSource for Hardware {
    fn ask(&self, sizes: &Sizes, question: &mut dyn FnMut(&dyn Costs)) {
        question(&Roofline::new(self, sizes));
    }
}

/// The roofline of a CPU that finds no keys and values in its cache: see [`Roofline::uncached`].
#[derive(Debug, Clone)]
pub struct Uncached(pub Hardware);

impl CostSource for Uncached {
    fn ask(&self, sizes: &Sizes, question: &mut dyn FnMut(&dyn Costs)) {
        question(&Roofline::new(&self.0, sizes).uncached());
    }
}

/// Predicts steps of one model on one machine: each is lowered and run on the virtual machine.
#[derive(Clone)]
pub struct StepTimes {
    source: Arc<dyn CostSource>,
    sizes: Arc<Sizes>,
}

impl fmt::Debug for StepTimes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StepTimes").field("model", &self.sizes.spec.name).finish_non_exhaustive()
    }
}

impl StepTimes {
    /// Step times for a model of these sizes.
    pub fn new(source: impl CostSource + 'static, sizes: Sizes) -> StepTimes {
        StepTimes::of(Arc::new(source), sizes)
    }

    /// The same of a source that is shared.
    pub fn of(source: Arc<dyn CostSource>, sizes: Sizes) -> StepTimes {
        StepTimes { source, sizes: Arc::new(sizes) }
    }

    /// Seconds of a step; `None` of one that cannot be lowered.
    pub fn seconds(&self, placement: &Placement, iteration: &Iteration) -> Option<f64> {
        let program = lower(placement, iteration).ok()?;
        let mut seconds = 0.0;
        self.source.ask(&self.sizes, &mut |costs| {
            let costs = OpCosts::new(costs, &self.sizes).of(iteration).on(placement);
            seconds = virtual_machine::run(&program, &costs).seconds();
        });
        Some(seconds)
    }
}
