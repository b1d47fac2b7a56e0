//! How a plan is run: what the engine asks of whatever computes its steps.

use std::sync::Arc;

use super::input::Input;
use super::iterate::Sharing;
use super::memory::Memory;
use super::timeline::Timeline;
use crate::Result;
use crate::cache::{BlockTable, PageList};
use crate::device::clock::Clock;

/// Where and how a model runs, for messages and `plan` in JSON.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// `cpu`, `cuda:0`, `emulated`, `emulated:kernels`.
    pub device: String,
    /// The strategy's name: `cpu-only`, `gpu-only`...
    pub strategy: &'static str,
    /// Tier of the CPU's kernels, or the accelerator's architecture.
    pub isa: String,
    /// Threads of the host's pool.
    pub threads: usize,
    /// How keys and values are stored.
    pub kv_type: &'static str,
}

/// Computes steps. One implementation per way of running a plan.
pub(super) trait Executor: Send {
    /// The pages that block tables are made of.
    fn pages(&mut self) -> &mut PageList;

    /// Runs the rows of `inputs`; the tables have room for them, and do not count them yet.
    ///
    /// # Errors
    /// The device failed. Then nothing that the tables count is lost.
    fn run(
        &mut self,
        inputs: &[Input<'_>],
        tables: &[&BlockTable],
        want: Want,
        sharing: Sharing<'_>,
    ) -> Result<()>;

    /// The logits of the last run, `[rows that wanted them][V]`.
    fn logits(&self) -> &[f32];

    /// The likeliest token of each row of the last run that wanted logits, `None` where they are not numbers; of a run for
    /// [`Want::Argmax`].
    fn argmax(&self) -> &[Option<u32>];

    /// Begins to note when operations run.
    ///
    /// # Errors
    /// It runs steps as a whole.
    fn trace(&mut self) -> Result<()> {
        Err(crate::Error::usage(
            "a timeline is of a model on two sides (--strategy helm, lia or stream); on one side a step is one segment",
        ))
    }

    /// What was noted since [`Executor::trace`].
    fn timeline(&mut self) -> Option<Timeline> {
        None
    }

    /// Sub-batches of a step that it has room for.
    fn sub_batches(&self) -> usize {
        1
    }

    /// Where it runs.
    fn placement(&self) -> Placement;

    /// What the dry run said.
    fn memory(&self) -> Memory;

    /// The clock of emulated time, if it runs in that.
    fn clock(&self) -> Option<&Arc<Clock>> {
        None
    }

    /// Bytes of weights that one decode step reads.
    fn bytes_per_step(&self) -> u64;
}

/// What a run leaves behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Want {
    /// All logits.
    Logits,
    /// Only each row's likeliest token.
    Argmax,
}
