//! 16-bit floats: one rounding an operation (PTX ISA 9.7.4).

use super::float::{least, most, unary};
use super::lanes::{Words, put, zip3};
use super::warp::Warp;
use crate::instruction::{FloatUnary, Half, HalfOp, Slot};
use crate::number::{BF16, F16, Format, Round, add_odd};

impl Warp {
    pub(super) fn half(&mut self, half: Half, [d, a, b, c]: [Slot; 4], mask: u32) {
        let operands = [a, b, c].map(|r| &self.words[r as usize]);
        let v = if half.format == F16 { all::<false>(half, operands) } else { all::<true>(half, operands) };
        put(&mut self.words[d as usize], v, mask);
    }
}

/// One loop an operation and format: products of 16-bit floats are exact in f64; sums are rounded to odd, so that the
/// last rounding is the only one.
fn all<const IS_BF16: bool>(half: Half, [a, b, c]: [&Words; 3]) -> Words {
    macro_rules! each {
        ($f:expr) => {
            zip3(a, b, c, |a, b, c| {
                let one = |a, b, c| one::<IS_BF16>(half, [a, b, c], $f);
                let low = one(a & 0xffff, b & 0xffff, c & 0xffff);
                if half.packed { low | one(a >> 16, b >> 16, c >> 16) << 16 } else { low }
            })
        };
    }
    let signs = if half.packed { 0x8000_8000 } else { 0x8000 };
    match half.op {
        // On the bits: also of a NaN.
        HalfOp::Neg => a.map(|x| x ^ signs),
        HalfOp::Abs => a.map(|x| x & !signs),
        HalfOp::Add => each!(|x, y, _| add_odd(x, y)),
        HalfOp::Sub => each!(|x, y, _| add_odd(x, -y)),
        HalfOp::Mul => each!(|x, y, _| x * y),
        HalfOp::Fma => each!(|x, y, z| add_odd(x * y, z)),
        HalfOp::Min { nan } => each!(|x, y, _| f64::from(least(x as f32, y as f32, nan))),
        HalfOp::Max { nan } => each!(|x, y, _| f64::from(most(x as f32, y as f32, nan))),
        HalfOp::Ex2 => each!(|x, _, _| unary(FloatUnary::Ex2, x)),
        HalfOp::Tanh => each!(|x, _, _| unary(FloatUnary::Tanh, x)),
    }
}

/// Denormals to zeros of their sign.
fn flushed(format: Format, bits: u32) -> u32 {
    if bits & format.infinity() == 0 { bits & 0x8000 } else { bits }
}

#[inline(always)]
fn one<const IS_BF16: bool>(half: Half, operands: [u32; 3], f: impl Fn(f64, f64, f64) -> f64) -> u32 {
    let format = if IS_BF16 { BF16 } else { F16 };
    let [x, y, z] =
        operands.map(|bits| f64::from(format.value(if half.flush { flushed(format, bits) } else { bits })));
    let exact = f(x, y, z);
    let exact = match half.saturate {
        true if exact > 0.0 => exact.min(1.0),
        true => 0.0,
        false => exact,
    };
    // `.relu`: negative to zero, NaN stays.
    let exact = if half.relu && exact <= 0.0 { 0.0 } else { exact };
    let bits = format.of(exact, Round::Nearest);
    if half.flush { flushed(format, bits) } else { bits }
}
