//! Bulk copies of a box of a matrix to shared memory (PTX ISA 9.7.9.27).
//!
//! Element (r, c) of a box lies at byte r * 128 + 2 c of it, with the number of its 16-byte chunk xor-ed with the number
//! of its 128-byte line modulo 8, both of the address. Elements outside of the matrix are zeros.

use super::Context;
use super::access::align;
use super::lanes::lanes;
use super::warp::Warp;
use crate::fault::{FaultKind, Outcome, Problem, Space};
use crate::instruction::{Bulk, Place};
use crate::memory::Semantics;
use crate::options::Landing;
use crate::tensor::TensorMap;

/// A copy in flight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BulkCopy {
    map: TensorMap,
    to: u64,
    x: i32,
    y: i32,
    barrier: u64,
}

impl BulkCopy {
    fn bytes(&self) -> u32 {
        self.map.box_rows * self.map.box_cols * 2
    }
}

impl Warp {
    pub(super) fn bulk_copy(&mut self, cx: &mut Context<'_>, bulk: &Bulk, mask: u32) -> Outcome {
        let (to, maps) = (self.addresses(&bulk.to), self.addresses(&bulk.map));
        let barriers = self.addresses(&bulk.barrier);
        for lane in lanes(mask) {
            let mut start = || {
                let mut bytes = [0; 128];
                // Maps are aligned to 64 bytes.
                let (first, second) = bytes.split_at_mut(64);
                self.read(cx, Place::Generic, lane, maps[lane], first, Semantics::Constant)?;
                self.read(cx, Place::Generic, lane, maps[lane] + 64, second, Semantics::Constant)?;
                let map = TensorMap::decode(&bytes);
                let map = map.ok_or_else(|| FaultKind::Operand("the bytes are no tensor map".into()))?;
                let [x, y] = bulk.at.map(|slot| self.words[slot as usize][lane] as i32);
                let copy = BulkCopy { map, to: to[lane], x, y, barrier: barriers[lane] };
                if map.box_cols != 64 {
                    return Err(FaultKind::Operand("boxes of 64 columns only".into()));
                }
                align(Space::Shared, copy.to, 1024)?;
                let range = cx.shared.range(copy.to, copy.bytes())?;
                if cx.options.copies == Landing::AtOnce {
                    return land(cx, &copy);
                }
                cx.shared.mark(range, false);
                cx.bulk.push(copy);
                Ok(())
            };
            start().map_err(|kind| Problem::of_lane(lane, kind))?;
        }
        Ok(())
    }
}

/// Lands what this barrier waits for.
pub(super) fn land_for(cx: &mut Context<'_>, barrier: u64) -> Result<(), FaultKind> {
    let (ours, others) = std::mem::take(&mut cx.bulk).into_iter().partition(|c| c.barrier == barrier);
    cx.bulk = others;
    ours.iter().try_for_each(|copy: &BulkCopy| land(cx, copy))
}

fn land(cx: &mut Context<'_>, copy: &BulkCopy) -> Result<(), FaultKind> {
    let map = &copy.map;
    for r in 0..map.box_rows {
        let mut line = [0u8; 128];
        let row = i64::from(copy.y) + i64::from(r);
        let (first, end) = (i64::from(copy.x).max(0), (i64::from(copy.x) + 64).min(map.cols as i64));
        if (0..map.rows as i64).contains(&row) && first < end {
            let at = map.address + (row as u64 * map.stride + first as u64) * 2;
            let into = ((first - i64::from(copy.x)) * 2) as usize;
            cx.memory.read(at, &mut line[into..into + (end - first) as usize * 2], Semantics::Weak)?;
        }
        let at = copy.to + u64::from(r) * 128;
        for (chunk, bytes) in line.chunks_exact(16).enumerate() {
            cx.shared.write(swizzled(at + 16 * chunk as u64), bytes)?;
        }
    }
    super::mbarrier::bytes_arrived(&mut cx.shared, copy.barrier, copy.bytes())
}

/// Swizzle by 128 bytes, of a shared address.
pub(super) fn swizzled(address: u64) -> u64 {
    address ^ (address / 128 % 8 * 16)
}
