//! cvt (PTX ISA 9.7.9.21).

use super::float::saturate;
use super::warp::Warp;
use crate::instruction::{Convert, Rounding};
use crate::number::{BF16, F16, F32, Format, Round, add_odd, flush};
use crate::types::Type;

/// A number of any type.
#[derive(Clone, Copy)]
enum Number {
    Integer(i128),
    Float(f64),
}

impl Warp {
    pub(super) fn convert(&mut self, c: &Convert, mask: u32) {
        let a = self.values(c.a);
        let b = c.b.map(|b| self.values(b));
        let v = std::array::from_fn(|i| {
            let high = one(c, a[i]);
            match &b {
                // The first source is the upper half.
                Some(b) => high << 16 | one(c, b[i]),
                None => high,
            }
        });
        self.set_values(c.d, v, mask);
    }
}

fn format(kind: Type) -> Option<Format> {
    match kind {
        Type::F16 | Type::F16x2 => Some(F16),
        Type::Bf16 | Type::Bf16x2 => Some(BF16),
        Type::F32 => Some(F32),
        _ => None,
    }
}

fn one(c: &Convert, bits: u64) -> u64 {
    match read(c, bits) {
        Number::Integer(value) if c.to.is_integer() => integer(c, value),
        // Rounded to odd where f64 has too few bits, so that the last rounding is the only one.
        Number::Integer(value) => float(c, wide(value)),
        Number::Float(value) => match c.rounding {
            Rounding::ToInteger(round) if c.to.is_integer() => {
                if value.is_nan() {
                    return 0;
                }
                let whole = whole(value, round);
                // Floats to integers always end at the ends of the range.
                let (least, most) = range(c.to);
                (whole.clamp(least as f64, most as f64) as i128).clamp(least, most) as u64
            }
            Rounding::ToInteger(round) => float(c, whole(value, round)),
            _ => float(c, value),
        },
    }
}

/// The low bits that the type has, as a number.
fn read(c: &Convert, bits: u64) -> Number {
    let unused = 64u32.saturating_sub(c.from.bits());
    match c.from {
        Type::Signed(_) => Number::Integer(((bits << unused) as i64 >> unused).into()),
        Type::Unsigned(_) | Type::Bits(_) => Number::Integer((bits << unused >> unused).into()),
        Type::F64 => Number::Float(f64::from_bits(bits)),
        kind => {
            let value = format(kind).unwrap_or(F32).value(bits as u32);
            let value = if c.flush && kind == Type::F32 { flush(value) } else { value };
            Number::Float(f64::from(value))
        }
    }
}

/// High and low halves are exact in f64.
fn wide(value: i128) -> f64 {
    let (high, low) = (value >> 32, value & 0xffff_ffff);
    add_odd(high as f64 * 2f64.powi(32), low as f64)
}

fn whole(value: f64, round: Round) -> f64 {
    match round {
        Round::Nearest => value.round_ties_even(),
        Round::Zero => value.trunc(),
        Round::Down => value.floor(),
        Round::Up => value.ceil(),
    }
}

fn range(kind: Type) -> (i128, i128) {
    let bits = kind.bits();
    if kind.is_signed() { (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) } else { (0, (1 << bits) - 1) }
}

/// Sign-extended to the register, if the type is signed.
fn integer(c: &Convert, value: i128) -> u64 {
    let (least, most) = range(c.to);
    if c.saturate {
        return value.clamp(least, most) as u64;
    }
    let unused = 64 - c.to.bits();
    let bits = value as u64;
    if c.to.is_signed() { ((bits << unused) as i64 >> unused) as u64 } else { bits << unused >> unused }
}

fn float(c: &Convert, value: f64) -> u64 {
    let round = match c.rounding {
        Rounding::ToFloat(round) => round,
        _ => Round::Nearest,
    };
    let value = if c.saturate { if value > 0.0 { value.min(1.0) } else { 0.0 } } else { value };
    let value = if c.relu && value <= 0.0 { 0.0 } else { value };
    match format(c.to) {
        Some(F32) => {
            let bits = F32.of(value, round);
            let bits = if c.flush { flush(f32::from_bits(bits)).to_bits() } else { bits };
            u64::from(if c.saturate { saturate(f32::from_bits(bits)).to_bits() } else { bits })
        }
        Some(format) => u64::from(format.of(value, round)),
        None => value.to_bits(),
    }
}
