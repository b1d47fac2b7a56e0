//! 16-bit floats: one rounding an operation (PTX ISA 9.7.4).

use super::float::{least, most, unary};
use super::lanes::{put, zip3};
use super::warp::Warp;
use crate::instruction::{FloatUnary, Half, HalfOp, Slot};
use crate::number::{Format, Round, add_odd};

impl Warp {
    pub(super) fn half(&mut self, half: Half, [d, a, b, c]: [Slot; 4], mask: u32) {
        let (a, b, c) = (&self.words[a as usize], &self.words[b as usize], &self.words[c as usize]);
        let v = zip3(a, b, c, |a, b, c| {
            let low = one(half, a & 0xffff, b & 0xffff, c & 0xffff);
            if half.packed { low | one(half, a >> 16, b >> 16, c >> 16) << 16 } else { low }
        });
        put(&mut self.words[d as usize], v, mask);
    }
}

/// Denormals to zeros of their sign.
fn flushed(format: Format, bits: u32) -> u32 {
    if bits & format.infinity() == 0 { bits & 0x8000 } else { bits }
}

fn one(half: Half, a: u32, b: u32, c: u32) -> u32 {
    let format = half.format;
    match half.op {
        HalfOp::Neg => return a ^ 0x8000,
        HalfOp::Abs => return a & 0x7fff,
        _ => {}
    }
    let value = |bits| f64::from(format.value(if half.flush { flushed(format, bits) } else { bits }));
    let (x, y, z) = (value(a), value(b), value(c));
    // Products of 16-bit floats are exact in f64; sums are rounded to odd, so that the last rounding is the only one.
    let exact = match half.op {
        HalfOp::Add => add_odd(x, y),
        HalfOp::Sub => add_odd(x, -y),
        HalfOp::Mul => x * y,
        HalfOp::Fma => add_odd(x * y, z),
        HalfOp::Min { nan } => f64::from(least(x as f32, y as f32, nan)),
        HalfOp::Max { nan } => f64::from(most(x as f32, y as f32, nan)),
        HalfOp::Ex2 => unary(FloatUnary::Ex2, x),
        HalfOp::Tanh => unary(FloatUnary::Tanh, x),
        HalfOp::Neg | HalfOp::Abs => x,
    };
    let exact = if half.saturate { if exact > 0.0 { exact.min(1.0) } else { 0.0 } } else { exact };
    // `.relu`: negative to zero, NaN stays.
    let exact = if half.relu && exact <= 0.0 { 0.0 } else { exact };
    let bits = format.of(exact, Round::Nearest);
    if half.flush { flushed(format, bits) } else { bits }
}
