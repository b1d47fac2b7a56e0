//! Asynchronous copies from global to shared memory (PTX ISA 9.7.9.25).
//!
//! A copy may land at any time until its thread waits for it. It lands there as late as it may, and until then the
//! bytes have no value; or at once.

use super::Context;
use super::access::{align, resolve};
use super::lanes::lanes;
use super::warp::Warp;
use crate::fault::{FaultKind, Outcome, Problem, Space};
use crate::instruction::{Address, Place, Slot};
use crate::memory::Semantics;
use crate::options::Landing;

#[derive(Debug, Clone, Copy)]
struct Copy {
    lane: usize,
    group: u32,
    to: u64,
    from: u64,
    bytes: usize,
    /// Bytes that are read; the others are zero.
    source: usize,
}

/// A warp's copies in flight, in order, and how many groups each lane has closed.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    flying: Vec<Copy>,
    groups: [u32; 32],
}

impl Warp {
    pub(super) fn copy(
        &mut self,
        cx: &mut Context<'_>,
        (to, from): (&Address, &Address),
        bytes: u32,
        source: Option<Slot>,
        mask: u32,
    ) -> Outcome {
        let (to, from) = (self.addresses(to), self.addresses(from));
        let source = source.map_or([bytes; 32], |s| self.words[s as usize]);
        for lane in lanes(mask) {
            let copy = Copy {
                lane,
                group: self.copies.groups[lane],
                to: to[lane],
                from: from[lane],
                bytes: bytes as usize,
                source: source[lane] as usize,
            };
            start(cx, &copy).map_err(|kind| Problem::of_lane(lane, kind))?;
            if cx.options.copies == Landing::AtWait {
                self.copies.flying.push(copy);
            }
        }
        Ok(())
    }

    /// Whether copies of these lanes, or products of the warp, are in flight.
    pub(super) fn has_flying(&self, mask: u32) -> bool {
        let copies = self.copies.flying.iter().any(|c| mask >> c.lane & 1 == 1);
        copies || mask != 0 && !self.products.is_empty()
    }

    pub(super) fn commit_copies(&mut self, mask: u32) {
        for lane in lanes(mask) {
            self.copies.groups[lane] += 1;
        }
    }

    /// Until at most `pending` groups of each lane are in flight; `None`: until nothing is, closed or not.
    pub(super) fn wait_copies(&mut self, cx: &mut Context<'_>, pending: Option<u32>, mask: u32) -> Outcome {
        let groups = self.copies.groups;
        let lands = |c: &Copy| {
            let closed = pending.is_none_or(|n| c.group + n < groups[c.lane]);
            mask >> c.lane & 1 == 1 && closed
        };
        let mut problem = None;
        self.copies.flying.retain(|copy| {
            if problem.is_some() || !lands(copy) {
                return true;
            }
            problem = land(cx, copy).err().map(|kind| Problem::of_lane(copy.lane, kind));
            false
        });
        problem.map_or(Ok(()), Err)
    }
}

/// Checks the copy where it begins: the instruction that waits knows nothing of it.
fn start(cx: &mut Context<'_>, copy: &Copy) -> Result<(), FaultKind> {
    let bytes = copy.bytes as u32;
    if copy.source > copy.bytes {
        return Err(FaultKind::Operand(format!("{} bytes of source for {bytes}", copy.source)));
    }
    let (space, _) = resolve(Place::Global, copy.from)?;
    if space != Space::Global {
        return Err(FaultKind::Operand("a copy from global memory only".into()));
    }
    align(Space::Global, copy.from, bytes)?;
    align(Space::Shared, copy.to, bytes)?;
    let range = cx.shared.range(copy.to, bytes)?;
    if cx.options.copies == Landing::AtOnce {
        return land(cx, copy);
    }
    let mut probe = [0; 16];
    if copy.source > 0 {
        cx.memory.read(copy.from, &mut probe[..copy.source], Semantics::Weak)?;
    }
    cx.shared.mark(range, false);
    Ok(())
}

fn land(cx: &mut Context<'_>, copy: &Copy) -> Result<(), FaultKind> {
    let mut bytes = [0; 16];
    if copy.source > 0 {
        cx.memory.read(copy.from, &mut bytes[..copy.source], Semantics::Weak)?;
    }
    cx.shared.write(copy.to, &bytes[..copy.bytes])
}
