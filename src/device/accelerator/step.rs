//! A prepared step, with what its operations need.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use super::rows::StepRows;
use super::shape::Shape;
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
    /// Which rows are what.
    pub lists: Arc<StepRows>,
    /// Equal keys: the same launches with other contents of device memory, so that a recorded graph of one
    /// runs the other. `None`: not to be recorded.
    pub graph_key: Option<u64>,
    /// The implementation's.
    pub inner: Arc<dyn Any + Send + Sync>,
}

/// The arguments that all operations share.
#[derive(Clone, Copy)]
pub struct StepContext<'a> {
    /// Where it is enqueued.
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

    /// Refuses rows that the step does not have, and a workspace planned for steps of other limits: the
    /// step's lists lead to places that it does not have.
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
