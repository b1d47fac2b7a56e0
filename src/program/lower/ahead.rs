//! What is streamed, weights and pages, ahead of the layers that need it. Both take the one lane to the device, which keeps the order
//! of issue: so they are issued in the order in which they are needed, pages before weights of the same layer (the first attention
//! over them begins earlier than the last product). Otherwise a layer's pages would stand behind the weights of the layer after, which
//! wait for this layer's computation.

use super::blank;
use super::block::{Lane, is_staged};
use super::whole;
use crate::program::op::{Buffer, Kind, Op};
use crate::program::placement::Residence;
use crate::program::unit::Unit;

/// Streamed layers, and which of them is next.
pub(super) struct Ahead {
    layers: Vec<(u32, Residence)>,
    buffers: usize,
    next: usize,
}

impl Ahead {
    /// Of these layers, ascending, through that many staging buffers by turns.
    pub fn new(layers: Vec<(u32, Residence)>, buffers: usize) -> Ahead {
        Ahead { layers, buffers, next: 0 }
    }

    /// Issues weights of layers before `end` as far as there are buffers, where the operations of the layers before `issued`
    /// are issued.
    pub fn weights(&mut self, ops: &mut Vec<Op>, issued: usize, end: usize) {
        let before = |end: usize| move |&(l, _): &(u32, Residence)| (l as usize) < end;
        let upto = self.layers.partition_point(before(issued)) + self.buffers;
        let upto = upto.min(self.layers.partition_point(before(end)));
        for at in self.next..upto {
            let slot = self.slot(at);
            let writes = vec![whole(Buffer::Weights(slot))];
            let (layer, weights) = self.layers[at];
            let kind = Kind::Stream { slot, experts: weights == Residence::StreamedExperts };
            ops.push(Op { layer: Some(layer), writes, ..blank(kind, Unit::H2d) });
        }
        self.next = self.next.max(upto);
    }

    /// Issues the pages that a layer's attention streams.
    pub fn pages(&self, ops: &mut Vec<Op>, lanes: &mut [Lane], layer: usize) {
        let of = lanes.iter_mut().filter_map(|lane| lane.layers.get_mut(layer));
        of.for_each(|layer| ops.append(&mut layer.pages));
    }

    /// Operations with a streamed layer's weights read its staging buffer.
    pub fn assign(&self, ops: &mut [Op]) {
        for op in ops {
            let at = op.layer.and_then(|l| self.layers.binary_search_by_key(&l, |&(l, _)| l).ok());
            if let Some(at) = at.filter(|&at| is_staged(op, self.layers[at].1)) {
                op.reads.push(whole(Buffer::Weights(self.slot(at))));
            }
        }
    }

    /// The staging buffer of the streamed layer at `at`.
    fn slot(&self, at: usize) -> u8 {
        (at % self.buffers) as u8
    }
}
