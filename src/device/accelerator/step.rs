//! A prepared step, and the arguments of its operations.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use super::experts::ExpertRows;
use super::rows::StepRows;
use super::shape::{ExpertShape, Shape};
use super::workspace::Workspace;
use crate::device::runtime::Lane;
use crate::{Error, Result};

/// A prepared step: the implementation's own lists, in device memory.
#[derive(Clone)]
pub struct Step {
    /// Rows launched for.
    pub rows: usize,
    /// Rows that want logits.
    pub n_logits: usize,
    /// The roles of the rows.
    pub lists: Arc<StepRows>,
    /// Steps with equal keys make the same launches over other contents of device memory, so a graph recorded from one
    /// can run the other. `None`: the step must not be recorded.
    pub graph_key: Option<u64>,
    /// The implementation's own data.
    pub inner: Arc<dyn Any + Send + Sync>,
}

/// The arguments that all operations share.
#[derive(Clone, Copy)]
pub struct StepContext<'a> {
    /// The lane that the operation is enqueued on.
    pub lane: Lane,
    /// The model's sizes.
    pub shape: &'a Shape,
    /// Activations.
    pub ws: &'a Workspace,
    /// The step.
    pub step: &'a Step,
}

impl StepContext<'_> {
    /// All rows of the step.
    pub fn all(&self) -> Range<usize> {
        0..self.step.rows
    }

    /// The sizes of experts, and their rows from `row` on.
    ///
    /// # Errors
    /// [`Error::Usage`] if the workspace was planned without experts.
    pub(crate) fn expert_rows(&self, row: usize) -> Result<(ExpertShape, ExpertRows)> {
        let rows = self.ws.expert_rows(self.shape, row).filter(|_| !self.ws.experts.is_null());
        let both = self.shape.experts.zip(rows);
        both.ok_or_else(|| Error::usage("experts on a device whose workspace has no rows of them"))
    }

    /// Returns an error if the step does not have these rows, or if the workspace was planned for other limits, since
    /// the step's lists then lead to places outside it.
    pub(crate) fn check(&self, rows: &Range<usize>) -> Result<()> {
        if rows.start > rows.end || rows.end > self.step.rows {
            return Err(Error::usage(format!("rows {rows:?} of a step of {}", self.step.rows)));
        }
        let (planned, ws) = (self.step.lists.limits(), &self.ws.limits);
        if planned != ws {
            return Err(Error::usage(format!(
                "a step within {planned:?} in a workspace that was planned for {ws:?}"
            )));
        }
        Ok(())
    }
}
