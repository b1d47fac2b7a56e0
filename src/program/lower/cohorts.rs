//! Asynchronous overlap: the device's rows go through all layers, each cohort through one of them (APEX §4).
//!
//! ```text
//! gpu     … pre(i) attend(i) post(i) │ join(c, i) collect post(i) pre(i+1) publish │ pre(i+1) attend(i+1) post(i+1) … head
//! host    a cohort's attention of layer i, from an earlier iteration │              append, attend(i+1) ────────────────►
//! ```
//! The cohort's operations stand behind those of the device's rows of the same layer, so that they are a suffix of its
//! products. What the host has begun need not be done when the iteration is.

use super::block::{Lane, Lowering};
use super::class::attention;
use crate::program::iteration::{Flow, Iteration, Kv};
use crate::program::op::{Kind, Op, Unit};
use crate::program::placement::{Phase, Placement, Side};
use crate::{Error, Result};

/// Refuses parked sub-batches of other flows, and cohorts that cannot be.
pub(super) fn check(placement: &Placement, iteration: &Iteration) -> Result<()> {
    let layers = placement.layers.len();
    for (b, batch) in iteration.sub_batches.iter().enumerate() {
        let cohort = iteration.flow == Flow::Async && b > 0;
        let Some(at) = batch.at else { continue };
        if !cohort {
            return Err(Error::usage(format!("sub-batch {b} is parked at layer {at}, and is no cohort")));
        }
        if at as usize >= layers {
            return Err(Error::usage(format!("a cohort at layer {at} of {layers}")));
        }
    }
    for (b, batch) in iteration.cohorts() {
        for g in &batch.groups {
            let decodes = g.phase == Phase::Decode && g.tokens == 1 && g.wanted() == 1;
            let home = g.kv == Kv::Host || placement.layers.iter().all(|l| l.kv == Side::Host);
            if !decodes || !home {
                return Err(Error::usage(format!(
                    "cohort {b}: {:?} of request {:?}; a cohort has decode rows with keys and values on the host",
                    g.kv, g.request
                )));
            }
            if iteration.moves.iter().any(|m| m.request == g.request) {
                return Err(Error::usage(format!("cohort {b}: pages of request {:?} move", g.request)));
            }
        }
    }
    Ok(())
}

/// Refuses cohorts over layers that are not attended on the host.
pub(super) fn check_layers(placement: &Placement, lowering: &Lowering<'_>) -> Result<()> {
    for class in &lowering.classes {
        for l in 0..placement.layers.len() {
            if attention(placement, l, class)? != super::class::Attention::On(Side::Host) {
                return Err(Error::usage(format!(
                    "a cohort's attention of layer {l} is on the device, where it would be computed with the others'"
                )));
            }
        }
    }
    Ok(())
}

/// What of a cohort's walk through all layers belongs to this iteration.
pub(super) struct Cohort {
    pub at: Option<u32>,
    lane: Lane,
    join: Vec<Op>,
}

impl Cohort {
    pub fn new(lowering: Lowering<'_>, at: Option<u32>) -> Result<Cohort> {
        let last = lowering.classes.len().checked_sub(1);
        let join = |l| last.map(|last| lowering.op(Kind::Join, Unit::Gpu, Some(l), 0, last));
        let join = at.and_then(join).into_iter().collect();
        Ok(Cohort { at, lane: lowering.run()?, join })
    }

    /// The embedding and what is before the first attention, of a cohort that begins.
    pub fn begin(&mut self, ops: &mut Vec<Op>) {
        if self.at.is_none() {
            ops.append(&mut self.lane.embed);
            self.next(ops, 0);
        }
    }

    /// Of a cohort that is parked at layer `l`, what is behind its attention, up to the next.
    pub fn advance(&mut self, ops: &mut Vec<Op>, l: usize) {
        if self.at != Some(l as u32) {
            return;
        }
        ops.append(&mut self.join);
        ops.append(&mut self.lane.layers[l].post);
        if l + 1 < self.lane.layers.len() {
            self.next(ops, l + 1);
        }
    }

    /// Behind the last layer: the logits.
    pub fn finish(&mut self, ops: &mut Vec<Op>) {
        if self.at.is_some_and(|at| at as usize + 1 == self.lane.layers.len()) {
            ops.append(&mut self.lane.head);
        }
    }

    fn next(&mut self, ops: &mut Vec<Op>, l: usize) {
        let layer = &mut self.lane.layers[l];
        for part in [&mut layer.pre, &mut layer.device, &mut layer.host] {
            ops.append(part);
        }
    }

    pub fn uses_device_weights(&self, layer: u32) -> bool {
        let here = |op: &Op| op.layer == Some(layer) && op.unit == Unit::Gpu && op.kind.has_weights();
        let mut ops = Vec::new();
        let (at, l) = (self.at, layer as usize);
        if at == Some(layer) {
            ops.extend(&self.lane.layers[l].post);
        }
        if l == at.map_or(0, |at| at as usize + 1) {
            ops.extend(&self.lane.layers[l].pre);
        }
        ops.into_iter().any(here)
    }
}
