//! Placement and iteration → program.
//!
//! Rows are grouped into classes that go the same way: neighbouring groups of one phase and one kind of [`Kv`](super::Kv). For each block,
//! a class walks the sublayers; where the next is on the other side, what it needs is carried there. Neighbouring classes
//! that need the same operation share it.
//!
//! ```text
//! a layer's operations      pre                       attend                     post
//! queries on the host       project append            host                       out_proj ffn_up ffn_down
//! all on the device         project append            device                     out_proj ffn_up ffn_down
//! keys on the host          project publish           host: append, attend       collect out_proj …
//! keys on both sides        project append publish    device ‖ host              merge out_proj …
//! keys streamed             page_in project append    device (page_out)          (merge) out_proj …
//! experts divided                                                                … ffn_up experts ffn_down add_share
//! ```
//!
//! The outer loop is over layers and the inner one over sub-batches, so that a streamed layer crosses the link once a step. What is
//! streamed is issued two layers ahead, pages before weights:
//!
//! ```text
//! to device  │ pages 0 │ layer 0 │ pages 1 │ layer 1 │         │ pages 2 │ layer 2 │ pages 3 │ layer 3 │
//! compute    │                   │ ░░░ layer 0 ░░░░░░░░░░░░░░░ │ ░░░ layer 1 ░░░░░░░░░░░░ │ …
//! ```
//!
//! Here sub-batches are put in one order; `ahead` says when streamed layers and pages are issued, `block` walks a sub-batch through the blocks, `class` says which rows go
//! the same way, `operation` what an operation reads and writes, `moves` how pages change sides, `copy_lanes` which lanes move the host's
//! rows, `cohorts` what of a cohort's walk belongs to an asynchronous iteration.

mod ahead;
mod block;
mod class;
mod cohorts;
mod copy_lanes;
mod moves;
mod operation;

use self::ahead::Ahead;
use self::block::{Lane, Lowering, STAGED_LAYERS};
use self::cohorts::Cohort;
pub(crate) use self::cohorts::cohort_pieces;
pub(crate) use self::copy_lanes::pays as copy_lanes_pay;
use super::iteration::{Flow, Iteration};
use super::op::{Buffer, Kind, Op, Program, Region, Work};
use super::placement::{Placement, Residence};
use super::unit::Unit;
use crate::Result;

/// The program of one step.
///
/// # Errors
/// [`Error::Usage`](crate::Error::Usage): a policy that attends on the host over keys and values kept on the device, or that splits an
/// attention between the sides; a sublayer on a side without the layer's weights; a boundary that is not a whole number of pages;
/// a cohort of other rows than decode rows with keys and values on the host, or over a layer that the device attends.
pub fn lower(placement: &Placement, iteration: &Iteration) -> Result<Program> {
    let placement = &*placement.at_rows(iteration.prompt_rows());
    cohorts::check(placement, iteration)?;
    let mut ops = moves::page_moves(placement, iteration);
    let mut lanes: Vec<Lane> = Vec::new();
    let mut cohorts: Vec<Cohort> = Vec::new();
    for (i, sub_batch) in iteration.sub_batches.iter().enumerate() {
        let lowering = Lowering::new(placement, sub_batch, i as u8, iteration.pick, &iteration.moves)?;
        if iteration.flow == Flow::Async && i > 0 {
            cohorts::check_layers(placement, &lowering)?;
            if !sub_batch.groups.is_empty() {
                cohorts.push(Cohort::new(lowering, sub_batch.at)?);
            }
        } else {
            lanes.push(lowering.run()?);
        }
    }
    // Layers with something to stage that the device computes with, in order.
    let streamed: Vec<(u32, Residence)> = (0..)
        .zip(placement.layers.iter().map(|at| at.weights))
        .filter(|&(l, weights)| {
            lanes.iter().any(|lane| lane.uses_staged(l, weights))
                || cohorts.iter().any(|cohort| cohort.uses_staged(l, weights))
        })
        .collect();
    let mut ahead = Ahead::new(streamed, placement.staging.buffers());
    for l in 0..STAGED_LAYERS {
        ahead.pages(&mut ops, &mut lanes, l);
        ahead.weights(&mut ops, 0, l + 1);
    }
    ahead.weights(&mut ops, 0, usize::MAX);
    for lane in &mut lanes {
        ops.append(&mut lane.embed);
    }
    cohorts.iter_mut().for_each(|cohort| cohort.begin(&mut ops));
    for l in 0..placement.layers.len() {
        match iteration.flow {
            Flow::Serial | Flow::Async => {
                for lane in &mut lanes {
                    let layer = &mut lane.layers[l];
                    for part in [&mut layer.pre, &mut layer.device, &mut layer.host, &mut layer.post] {
                        ops.append(part);
                    }
                }
                cohorts.iter_mut().for_each(|cohort| cohort.advance(&mut ops, l));
            }
            Flow::TwoLanes => {
                // The device goes from one sub-batch's products to the other's while the host attends the first; the device's own
                // attention comes behind both (NEO §3, figure 5).
                for lane in &mut lanes {
                    if let Some(before) = l.checked_sub(1) {
                        ops.append(&mut lane.layers[before].post);
                    }
                    ops.append(&mut lane.layers[l].pre);
                    ops.append(&mut lane.layers[l].host);
                }
                for lane in &mut lanes {
                    ops.append(&mut lane.layers[l].device);
                }
                if l + 1 == placement.layers.len() {
                    for lane in &mut lanes {
                        ops.append(&mut lane.layers[l].post);
                    }
                }
            }
        }
        // A staging buffer is free for the streamed layer after the next once its operations are issued; in lock step those
        // of the layer before have just been.
        let issued = match iteration.flow {
            Flow::Serial | Flow::Async => l + 1,
            Flow::TwoLanes => l,
        };
        // In the order in which they are needed, as far as their staging memory is free: that of pages is behind this layer's
        // attention, in lock step, too.
        ahead.weights(&mut ops, issued, l + STAGED_LAYERS);
        ahead.pages(&mut ops, &mut lanes, l + STAGED_LAYERS);
        ahead.weights(&mut ops, issued, usize::MAX);
    }
    for lane in &mut lanes {
        ops.append(&mut lane.head);
    }
    cohorts.iter_mut().for_each(|cohort| cohort.finish(&mut ops));
    ahead.assign(&mut ops);
    if copy_lanes_pay(placement, iteration) {
        copy_lanes::assign(&mut ops, iteration.flow);
    }
    Ok(Program { ops, flow: iteration.flow })
}

fn blank(kind: Kind, unit: Unit) -> Op {
    Op {
        kind,
        unit,
        layer: None,
        sub_batch: 0,
        rows: 0..0,
        groups: 0..0,
        wanted_only: false,
        detached: false,
        work: Work::default(),
        reads: Vec::new(),
        writes: Vec::new(),
    }
}

fn whole(buffer: Buffer) -> Region {
    Region { buffer, layers: 0..1, span: 0..1 }
}
