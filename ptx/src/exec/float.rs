//! f32 and f64 of all lanes (PTX ISA 9.7.3).

use super::lanes::{Words, map, put, zip, zip3};
use super::warp::Warp;
use crate::instruction::{FloatOp, FloatUnary, Mode, Slot};
use crate::number::{F32, Round, add_odd, canonical, flush};

/// Flushing and saturation around an operation; the plain case without either is the common one.
#[inline(always)]
fn two(a: &Words, b: &Words, mode: Mode, f: impl Fn(f32, f32) -> f32) -> Words {
    if !mode.flush && !mode.saturate {
        return zip(a, b, |x, y| canonical(f(f32::from_bits(x), f32::from_bits(y))));
    }
    let input = |x: u32| if mode.flush { flush(f32::from_bits(x)) } else { f32::from_bits(x) };
    zip(a, b, |x, y| finish(f(input(x), input(y)), mode))
}

fn finish(value: f32, mode: Mode) -> u32 {
    let value = if mode.saturate { saturate(value) } else { value };
    canonical(if mode.flush { flush(value) } else { value })
}

/// `.sat`: to 0..=1; NaN is 0.
pub(super) fn saturate(value: f32) -> f32 {
    if value > 0.0 { value.min(1.0) } else { 0.0 }
}

/// A directed rounding of an exact sum, by a sum that is rounded to odd in f64.
fn directed(value: f64, round: Round) -> f32 {
    f32::from_bits(F32.of(value, round))
}

/// -0 is less than +0; one NaN gives the other number, or with `nan` NaN.
#[inline(always)]
pub(super) fn least(x: f32, y: f32, nan: bool) -> f32 {
    if x.is_nan() || y.is_nan() {
        return if nan || x.is_nan() && y.is_nan() {
            f32::NAN
        } else if x.is_nan() {
            y
        } else {
            x
        };
    }
    if x < y || x == y && x.is_sign_negative() { x } else { y }
}

#[inline(always)]
pub(super) fn most(x: f32, y: f32, nan: bool) -> f32 {
    -least(-x, -y, nan)
}

/// Sums and products of f32 in f64, exact or rounded to odd.
fn exact(op: FloatOp, x: f32, y: f32) -> f64 {
    let (x, y) = (f64::from(x), f64::from(y));
    match op {
        FloatOp::Add => add_odd(x, y),
        FloatOp::Sub => add_odd(x, -y),
        _ => x * y,
    }
}

/// An exact zero sum is -0 when rounding down, unless both are +0.
fn directed_op(op: FloatOp, x: f32, y: f32, round: Round) -> f32 {
    let value = exact(op, x, y);
    let sum = op != FloatOp::Mul && value == 0.0 && round == Round::Down;
    let other = if op == FloatOp::Sub { -y } else { y };
    if sum && !(x.is_sign_positive() && other.is_sign_positive()) {
        return -0.0;
    }
    directed(value, round)
}

/// The plain operations.
#[inline(always)]
fn double(op: FloatOp, x: f64, y: f64) -> f64 {
    match op {
        FloatOp::Add => x + y,
        FloatOp::Sub => x - y,
        FloatOp::Mul => x * y,
        FloatOp::Div | FloatOp::DivApprox => x / y,
        FloatOp::Min { .. } => x.min(y),
        FloatOp::Max { .. } => x.max(y),
        FloatOp::CopySign => y.copysign(x),
    }
}

/// Divisors beyond 2^126 give zero, or NaN of infinity (PTX ISA 9.7.3.8).
fn divide_approximately(x: f32, y: f32) -> f32 {
    match y.is_finite() && y.abs() > 2f32.powi(126) {
        true if x.is_infinite() => f32::NAN,
        true => x * 0f32.copysign(y),
        false => x / y,
    }
}

impl Warp {
    pub(super) fn float(&mut self, op: FloatOp, mode: Mode, [d, a, b]: [Slot; 3], mask: u32) {
        let (a, b) = (&self.words[a as usize], &self.words[b as usize]);
        let v = match op {
            _ if mode.round != Round::Nearest => two(a, b, mode, |x, y| directed_op(op, x, y, mode.round)),
            FloatOp::Add => two(a, b, mode, |x, y| x + y),
            FloatOp::Sub => two(a, b, mode, |x, y| x - y),
            FloatOp::Mul => two(a, b, mode, |x, y| x * y),
            FloatOp::Div => two(a, b, mode, |x, y| x / y),
            FloatOp::DivApprox => two(a, b, mode, divide_approximately),
            FloatOp::Min { nan } => two(a, b, mode, |x, y| least(x, y, nan)),
            FloatOp::Max { nan } => two(a, b, mode, |x, y| most(x, y, nan)),
            FloatOp::CopySign => zip(a, b, |x, y| x & 0x8000_0000 | y & 0x7fff_ffff),
        };
        put(&mut self.words[d as usize], v, mask);
    }

    pub(super) fn fma(&mut self, mode: Mode, [d, a, b, c]: [Slot; 4], mask: u32) {
        let (a, b, c) = (&self.words[a as usize], &self.words[b as usize], &self.words[c as usize]);
        let plain = !mode.flush && !mode.saturate && mode.round == Round::Nearest;
        let v = if plain {
            zip3(a, b, c, |x, y, z| {
                canonical(f32::from_bits(x).mul_add(f32::from_bits(y), f32::from_bits(z)))
            })
        } else {
            let input = |x: u32| if mode.flush { flush(f32::from_bits(x)) } else { f32::from_bits(x) };
            zip3(a, b, c, |x, y, z| {
                let (x, y, z) = (input(x), input(y), input(z));
                let value = if mode.round == Round::Nearest {
                    x.mul_add(y, z)
                } else {
                    // The product of two f32 is exact in f64.
                    directed(add_odd(f64::from(x) * f64::from(y), f64::from(z)), mode.round)
                };
                finish(value, mode)
            })
        };
        put(&mut self.words[d as usize], v, mask);
    }

    pub(super) fn float_unary(&mut self, op: FloatUnary, mode: Mode, [d, a]: [Slot; 2], mask: u32) {
        let a = &self.words[a as usize];
        let v = match op {
            // On the bits: also of a NaN.
            FloatUnary::Neg if !mode.flush => map(a, |x| x ^ 0x8000_0000),
            FloatUnary::Abs if !mode.flush => map(a, |x| x & 0x7fff_ffff),
            _ => map(a, |x| {
                let x = f32::from_bits(x);
                let x = f64::from(if mode.flush { flush(x) } else { x });
                finish(directed(unary(op, x), mode.round), mode)
            }),
        };
        put(&mut self.words[d as usize], v, mask);
    }

    pub(super) fn double(&mut self, op: FloatOp, [d, a, b]: [Slot; 3], mask: u32) {
        let (a, b) = (&self.doubles[a as usize], &self.doubles[b as usize]);
        let v = zip(a, b, |x, y| double(op, f64::from_bits(x), f64::from_bits(y)).to_bits());
        put(&mut self.doubles[d as usize], v, mask);
    }

    pub(super) fn double_fma(&mut self, [d, a, b, c]: [Slot; 4], mask: u32) {
        let (a, b, c) = (&self.doubles[a as usize], &self.doubles[b as usize], &self.doubles[c as usize]);
        let v = zip3(a, b, c, |x, y, z| {
            f64::from_bits(x).mul_add(f64::from_bits(y), f64::from_bits(z)).to_bits()
        });
        put(&mut self.doubles[d as usize], v, mask);
    }

    pub(super) fn double_unary(&mut self, op: FloatUnary, [d, a]: [Slot; 2], mask: u32) {
        let v = map(&self.doubles[a as usize], |x| unary(op, f64::from_bits(x)).to_bits());
        put(&mut self.doubles[d as usize], v, mask);
    }
}

/// In f64: after rounding to f32 the correctly rounded value but for one case in some 2^29.
pub(super) fn unary(op: FloatUnary, x: f64) -> f64 {
    match op {
        FloatUnary::Neg => -x,
        FloatUnary::Abs => x.abs(),
        FloatUnary::Rcp => 1.0 / x,
        FloatUnary::Sqrt => x.sqrt(),
        // Of -0 it is -infinity (PTX ISA 9.7.3.17).
        FloatUnary::Rsqrt => 1.0 / x.sqrt(),
        FloatUnary::Ex2 => x.exp2(),
        FloatUnary::Lg2 => x.log2(),
        FloatUnary::Sin => x.sin(),
        FloatUnary::Cos => x.cos(),
        FloatUnary::Tanh => x.tanh(),
    }
}
