//! Asynchronous overlap: the device's rows go through all layers, each cohort through one of them (APEX §4).
//!
//! ```text
//! gpu     … pre(i) attend(i) post(i) │ join(c, i) collect post(i) pre(i+1) publish │ pre(i+1) attend(i+1) post(i+1) … head
//! host    a cohort's attention of layer i, from an earlier iteration │              append, attend(i+1) ────────────────►
//! ```
//! The cohort's operations stand behind those of the device's rows of the same layer, so that they are a suffix of its
//! products. What the host has begun need not be done when the iteration is.
//!
//! Where the host computes layers, too, a cohort goes through a run of them without anybody's help, and is parked at the last: the
//! device carries its residual stream over and goes on. For experts of the host the device waits as it does for those of its own rows:
//! a cohort is behind them when its next attention begins.

use super::block::{Lowering, is_staged};
use super::class::attention;
use crate::program::iteration::{Flow, Iteration, Kv};
use crate::program::op::{Kind, Op};
use crate::program::placement::{LayerPlacement, Phase, Placement, Residence, Side, Sublayer};
use crate::program::unit::Unit;
use crate::{Error, Result};

/// Operations that a cohort's attention of a layer is, where the host computes layers for the device's rows, too.
const PIECES: u32 = 4;

/// Operations that a cohort's attention of a layer is. Where the device waits for layers of the host, or for experts, it waits for a piece
/// of a cohort's attention at most.
pub(crate) fn cohort_pieces(placement: &Placement) -> u32 {
    let behind = [Sublayer::Out, Sublayer::Up, Sublayer::Down];
    let on_host =
        |l: &LayerPlacement| behind.iter().any(|&s| l.decode.side(s) == Side::Host) || l.is_divided();
    if placement.layers.iter().any(on_host) { PIECES } else { 1 }
}

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
        if placement.next_stop(at.checked_sub(1)) != Some(at) {
            return Err(Error::usage(format!(
                "a cohort at layer {at}, where no cohort is parked: the host goes on"
            )));
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

/// Refuses cohorts over layers that are not attended on the host, or where the device would have to go on behind the host's products.
pub(super) fn check_layers(placement: &Placement, lowering: &Lowering<'_>) -> Result<()> {
    for (l, layer) in placement.layers.iter().enumerate() {
        for class in &lowering.classes {
            if attention(placement, l, class)? != super::class::Attention::On(Side::Host) {
                return Err(Error::usage(format!(
                    "a cohort's attention of layer {l} is on the device, where it would be computed with the others'"
                )));
            }
        }
        let side = |s| layer.decode.side(s);
        let behind = [Sublayer::Up, Sublayer::Down].map(side);
        // The device goes on where it has projected; the host, to the end of the layer.
        let goes_on = match side(Sublayer::Out) {
            Side::Device => side(Sublayer::Qkv) == Side::Device,
            Side::Host => behind == [Side::Host; 2],
        };
        if !goes_on {
            return Err(Error::usage(format!(
                "a cohort's layer {l} by policy {:?}: with the output projection on the host all behind it is to be there, and with it \
                 on the device what is before the attention, too",
                layer.decode.bits()
            )));
        }
    }
    Ok(())
}

/// Whether the end of an iteration does not wait for an operation of a cohort: the host's, but for the ends of the model, and for experts
/// between products of the device.
fn is_detached(placement: &Placement, op: &Op) -> bool {
    let device_goes_on = |l: u32| !placement.ends_on_host(l);
    let waited_for = match op.kind {
        Kind::Embed | Kind::Head { .. } | Kind::Pick => true,
        Kind::FfnUp { .. } | Kind::FfnDown | Kind::Experts => op.layer.is_some_and(device_goes_on),
        _ => false,
    };
    op.unit == Unit::Host && !waited_for
}

/// What of a cohort's walk through all layers belongs to this iteration: from where it is parked to where it is parked next
/// ([`Placement::next_stop`]).
pub(super) struct Cohort {
    /// The layer of the device's rows after which it joins; `None`: it begins before all layers, or joins after the last.
    behind: Option<u32>,
    /// Whether its token begins.
    begins: bool,
    ops: Vec<Op>,
    head: Vec<Op>,
}

impl Cohort {
    pub fn new(lowering: Lowering<'_>, at: Option<u32>) -> Result<Cohort> {
        let placement = lowering.placement;
        let lowering = match cohort_pieces(placement) {
            1 => lowering,
            pieces => lowering.in_pieces(pieces),
        };
        let next = placement.next_stop(at);
        let join = |at: u32| {
            let last = lowering.classes.len().checked_sub(1)?;
            Some(lowering.op(Kind::Join, Unit::Gpu, Some(placement.joins_behind(at)), 0, last))
        };
        let mut ops: Vec<Op> = at.and_then(join).into_iter().collect();
        let end = next.map_or(placement.layers.len(), |l| l as usize + 1);
        let mut lane = lowering.only(at.unwrap_or(0)..end as u32).run()?;
        match at {
            None => ops.append(&mut lane.embed),
            Some(at) if !placement.ends_on_host(at) => ops.append(&mut lane.layers[at as usize].post),
            Some(_) => {}
        }
        for l in at.map_or(0, |at| at as usize + 1)..end {
            let layer = &mut lane.layers[l];
            for part in [&mut layer.pre, &mut layer.device, &mut layer.host] {
                ops.append(part);
            }
            if placement.ends_on_host(l as u32) {
                ops.append(&mut layer.post);
            }
        }
        ops.iter_mut().for_each(|op| op.detached = is_detached(placement, op));
        let head = if next.is_none() { lane.head } else { Vec::new() };
        // Behind the host's last layer comes the head.
        let last = placement.layers.len().checked_sub(1).map(|l| l as u32);
        let behind = at.filter(|&at| Some(at) != last || !placement.ends_on_host(at));
        Ok(Cohort { behind: behind.map(|at| placement.joins_behind(at)), begins: at.is_none(), ops, head })
    }

    /// The embedding and all up to the first layer where it is parked, of a cohort that begins.
    pub fn begin(&mut self, ops: &mut Vec<Op>) {
        if self.begins {
            ops.append(&mut self.ops);
        }
    }

    /// Appends the operations of a cohort that joins after layer `l` of the device's rows, up to where it is parked next.
    pub fn advance(&mut self, ops: &mut Vec<Op>, l: usize) {
        if self.behind == Some(l as u32) {
            ops.append(&mut self.ops);
        }
    }

    /// Appends the logits, after the last layer.
    pub fn finish(&mut self, ops: &mut Vec<Op>) {
        ops.append(&mut self.ops);
        ops.append(&mut self.head);
    }

    /// Whether the device computes with weights of a layer that do not stay there.
    pub fn uses_staged(&self, layer: u32, weights: Residence) -> bool {
        self.ops.iter().any(|op| op.layer == Some(layer) && is_staged(op, weights))
    }
}
