//! atom and red (PTX ISA 9.7.13.5, 9.7.13.6).

use super::Context;
use super::access::{align, resolve};
use super::lanes::lanes;
use super::warp::Warp;
use crate::fault::{FaultKind, Outcome, Problem, Space};
use crate::instruction::{Atomic, AtomicOp};
use crate::number::{BF16, F16, Format, Round, add_odd, canonical};
use crate::types::Type;

impl Warp {
    pub(super) fn atomic(&mut self, cx: &mut Context<'_>, atomic: &Atomic, mask: u32) -> Outcome {
        let addresses = self.addresses(&atomic.address);
        let a = self.values(atomic.a);
        let b = atomic.b.map_or([0; 32], |b| self.values(b));
        let mut old = [0; 32];
        // Lanes come one after the other.
        for lane in lanes(mask) {
            let mut update = |old| apply(atomic.op, atomic.kind, old, a[lane], b[lane]);
            old[lane] =
                one(cx, atomic, addresses[lane], &mut update).map_err(|kind| Problem::of_lane(lane, kind))?;
        }
        if let Some(d) = atomic.d {
            self.set_values(d, old, mask);
        }
        Ok(())
    }
}

fn one(
    cx: &mut Context<'_>,
    atomic: &Atomic,
    address: u64,
    update: &mut dyn FnMut(u64) -> u64,
) -> Result<u64, FaultKind> {
    let bytes = atomic.kind.bytes() as usize;
    let (space, at) = resolve(atomic.place, address)?;
    align(space, at, bytes as u32)?;
    match space {
        Space::Global => {
            cx.note_write(at, bytes)?;
            Ok(cx.memory.atomic(at, bytes, update)?)
        }
        Space::Shared => {
            let mut number = [0; 8];
            cx.shared.read(at, &mut number[..bytes])?;
            let old = u64::from_le_bytes(number);
            cx.shared.write(at, &update(old).to_le_bytes()[..bytes])?;
            Ok(old)
        }
        _ => Err(FaultKind::Operand(format!("no atomics in {space} memory"))),
    }
}

/// The new value.
pub(super) fn apply(op: AtomicOp, kind: Type, old: u64, a: u64, b: u64) -> u64 {
    let signed = |x: u64| if kind.bits() == 32 { i64::from(x as i32) } else { x as i64 };
    match op {
        AtomicOp::Add => add(kind, old, a),
        AtomicOp::Exchange => a,
        AtomicOp::CompareSwap => {
            if old == a {
                b
            } else {
                old
            }
        }
        AtomicOp::Min if kind.is_signed() => {
            if signed(a) < signed(old) {
                a
            } else {
                old
            }
        }
        AtomicOp::Max if kind.is_signed() => {
            if signed(a) > signed(old) {
                a
            } else {
                old
            }
        }
        AtomicOp::Min => old.min(a),
        AtomicOp::Max => old.max(a),
        AtomicOp::And => old & a,
        AtomicOp::Or => old | a,
        AtomicOp::Xor => old ^ a,
        AtomicOp::Inc => {
            if old >= a {
                0
            } else {
                old + 1
            }
        }
        AtomicOp::Dec => {
            if old == 0 || old > a {
                a
            } else {
                old - 1
            }
        }
    }
}

fn add(kind: Type, old: u64, a: u64) -> u64 {
    let half = |format: Format, x: u64, y: u64| {
        let value = |x: u64| f64::from(format.value(x as u32 & 0xffff));
        u64::from(format.of(add_odd(value(x), value(y)), Round::Nearest))
    };
    let pair = |format: Format| half(format, old, a) | half(format, old >> 16, a >> 16) << 16;
    match kind {
        Type::F32 => u64::from(canonical(f32::from_bits(old as u32) + f32::from_bits(a as u32))),
        Type::F64 => (f64::from_bits(old) + f64::from_bits(a)).to_bits(),
        Type::F16 => half(F16, old, a),
        Type::Bf16 => half(BF16, old, a),
        Type::F16x2 => pair(F16),
        Type::Bf16x2 => pair(BF16),
        _ if kind.bits() == 32 => u64::from((old as u32).wrapping_add(a as u32)),
        _ => old.wrapping_add(a),
    }
}
