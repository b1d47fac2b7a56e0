//! Integers, bits and predicates of all lanes.

use super::lanes::{Doubles, Words, map, put, zip, zip3};
use super::warp::Warp;
use crate::instruction::{CountOp, IntOp, IntUnary, Op, ShiftOp, Slot, TripleOp, Width};

/// Two operands of one width: `$slot` is the register's type, `$u`, `$s` and `$wide` the number's.
macro_rules! binary {
    ($name:ident, $slot:ty, $u:ty, $s:ty, $wide:ty, $wide_signed:ty) => {
        fn $name(op: IntOp, a: &[$slot; 32], b: &[$slot; 32]) -> [$slot; 32] {
            // A division by zero has no defined result; devices give all ones.
            macro_rules! each {
                ($f:expr) => {
                    zip(a, b, |x, y| {
                        let f: fn($u, $u) -> $u = $f;
                        f(x as $u, y as $u) as $slot
                    })
                };
            }
            match op {
                IntOp::Add => each!(|x, y| x.wrapping_add(y)),
                IntOp::Sub => each!(|x, y| x.wrapping_sub(y)),
                IntOp::MulLow => each!(|x, y| x.wrapping_mul(y)),
                IntOp::MulHigh { signed: false } => {
                    each!(|x, y| (x as $wide * y as $wide >> <$u>::BITS) as $u)
                }
                IntOp::MulHigh { signed: true } => {
                    each!(|x, y| { (x as $s as $wide_signed * y as $s as $wide_signed >> <$u>::BITS) as $u })
                }
                IntOp::Div { signed: false } => each!(|x, y| x.checked_div(y).unwrap_or(<$u>::MAX)),
                IntOp::Div { signed: true } => {
                    each!(|x, y| if y == 0 { <$u>::MAX } else { (x as $s).wrapping_div(y as $s) as $u })
                }
                IntOp::Rem { signed: false } => each!(|x, y| x.checked_rem(y).unwrap_or(<$u>::MAX)),
                IntOp::Rem { signed: true } => {
                    each!(|x, y| if y == 0 { <$u>::MAX } else { (x as $s).wrapping_rem(y as $s) as $u })
                }
                IntOp::Min { signed: false } => each!(|x, y| x.min(y)),
                IntOp::Min { signed: true } => each!(|x, y| (x as $s).min(y as $s) as $u),
                IntOp::Max { signed: false } => each!(|x, y| x.max(y)),
                IntOp::Max { signed: true } => each!(|x, y| (x as $s).max(y as $s) as $u),
                IntOp::And => each!(|x, y| x & y),
                IntOp::Or => each!(|x, y| x | y),
                IntOp::Xor => each!(|x, y| x ^ y),
            }
        }
    };
}
binary!(binary16, u32, u16, i16, u32, i32);
binary!(binary32, u32, u32, i32, u64, i64);
binary!(binary64, u64, u64, i64, u128, i128);

/// Shifts by more than the width give zero, or the sign (PTX ISA 9.7.8.6, 9.7.8.7).
macro_rules! shift {
    ($name:ident, $slot:ty, $u:ty, $s:ty) => {
        fn $name(op: ShiftOp, a: &[$slot; 32], by: &Words) -> [$slot; 32] {
            const LAST: u32 = <$u>::BITS - 1;
            match op {
                ShiftOp::Left => zip(a, by, |x, n| if n > LAST { 0 } else { ((x as $u) << n) as $slot }),
                ShiftOp::Right { signed: false } => {
                    zip(a, by, |x, n| if n > LAST { 0 } else { ((x as $u) >> n) as $slot })
                }
                ShiftOp::Right { signed: true } => {
                    zip(a, by, |x, n| ((x as $u as $s) >> n.min(LAST)) as $u as $slot)
                }
            }
        }
    };
}
shift!(shift16, u32, u16, i16);
shift!(shift32, u32, u32, i32);
shift!(shift64, u64, u64, i64);

impl Warp {
    pub(super) fn int(&mut self, op: IntOp, width: Width, [d, a, b]: [Slot; 3], mask: u32) {
        let (d, a, b) = (d as usize, a as usize, b as usize);
        match width {
            Width::W16 => {
                let v = binary16(op, &self.words[a], &self.words[b]);
                put(&mut self.words[d], v, mask);
            }
            Width::W32 => {
                let v = binary32(op, &self.words[a], &self.words[b]);
                put(&mut self.words[d], v, mask);
            }
            Width::W64 => {
                let v = binary64(op, &self.doubles[a], &self.doubles[b]);
                put(&mut self.doubles[d], v, mask);
            }
        }
    }

    pub(super) fn int_unary(&mut self, op: IntUnary, width: Width, [d, a]: [Slot; 2], mask: u32) {
        let (d, a) = (d as usize, a as usize);
        // Sign-extended to 64 bits, all four are the same at every width.
        let f = |x: i64| match op {
            IntUnary::Not => !x,
            IntUnary::Neg => x.wrapping_neg(),
            IntUnary::Abs => x.wrapping_abs(),
            IntUnary::CNot => i64::from(x == 0),
        };
        match width {
            Width::W16 => {
                let v = map(&self.words[a], |x| f(i64::from(x as u16 as i16)) as u16 as u32);
                put(&mut self.words[d], v, mask);
            }
            Width::W32 => {
                let v = map(&self.words[a], |x| f(i64::from(x as i32)) as u32);
                put(&mut self.words[d], v, mask);
            }
            Width::W64 => {
                let v = map(&self.doubles[a], |x| f(x as i64) as u64);
                put(&mut self.doubles[d], v, mask);
            }
        }
    }

    pub(super) fn shift(&mut self, op: ShiftOp, width: Width, [d, a, by]: [Slot; 3], mask: u32) {
        let (d, a) = (d as usize, a as usize);
        let by = &self.words[by as usize];
        match width {
            Width::W16 => {
                let v = shift16(op, &self.words[a], by);
                put(&mut self.words[d], v, mask);
            }
            Width::W32 => {
                let v = shift32(op, &self.words[a], by);
                put(&mut self.words[d], v, mask);
            }
            Width::W64 => {
                let v = shift64(op, &self.doubles[a], by);
                put(&mut self.doubles[d], v, mask);
            }
        }
    }

    pub(super) fn count(&mut self, op: CountOp, wide: bool, [d, a]: [Slot; 2], mask: u32) {
        let (d, a) = (d as usize, a as usize);
        if wide && op == CountOp::Reverse {
            let v = map(&self.doubles[a], u64::reverse_bits);
            return put(&mut self.doubles[d], v, mask);
        }
        let (width, values): (u32, Doubles) =
            if wide { (64, self.doubles[a]) } else { (32, self.words[a].map(u64::from)) };
        let v = map(&values, |x| match op {
            CountOp::Ones => x.count_ones(),
            CountOp::LeadingZeros => x.leading_zeros() - (64 - width),
            CountOp::Reverse => (x as u32).reverse_bits(),
            CountOp::Find { signed, shift } => {
                let x = if signed && x >> (width - 1) & 1 == 1 { !x & (u64::MAX >> (64 - width)) } else { x };
                match x {
                    0 => u32::MAX,
                    _ if shift => x.leading_zeros() - (64 - width),
                    _ => 63 - x.leading_zeros(),
                }
            }
        });
        put(&mut self.words[d], v, mask);
    }

    pub(super) fn multiply(&mut self, op: &Op, mask: u32) {
        match *op {
            Op::MadLow { width: Width::W64, d, a, b, c } => {
                let (a, b) = (&self.doubles[a as usize], &self.doubles[b as usize]);
                let v = zip3(a, b, &self.doubles[c as usize], |x, y, z| x.wrapping_mul(y).wrapping_add(z));
                put(&mut self.doubles[d as usize], v, mask);
            }
            Op::MadLow { width, d, a, b, c } => {
                let keep = if width == Width::W16 { 0xffff } else { u32::MAX };
                let (a, b) = (&self.words[a as usize], &self.words[b as usize]);
                let v =
                    zip3(a, b, &self.words[c as usize], |x, y, z| x.wrapping_mul(y).wrapping_add(z) & keep);
                put(&mut self.words[d as usize], v, mask);
            }
            Op::MadHigh { signed, d, a, b, c } => {
                let op = IntOp::MulHigh { signed };
                let high = binary32(op, &self.words[a as usize], &self.words[b as usize]);
                let v = zip(&high, &self.words[c as usize], u32::wrapping_add);
                put(&mut self.words[d as usize], v, mask);
            }
            Op::Wide { signed, from: Width::W16, d, a, b, c } => {
                let (a, b) = (&self.words[a as usize], &self.words[b as usize]);
                let sign = |x: u32| if signed { x as u16 as i16 as u32 } else { x };
                let c = c.map_or([0; 32], |c| self.words[c as usize]);
                let v = zip3(a, b, &c, |x, y, z| sign(x).wrapping_mul(sign(y)).wrapping_add(z));
                put(&mut self.words[d as usize], v, mask);
            }
            Op::Wide { signed, d, a, b, c, .. } => {
                let (a, b) = (&self.words[a as usize], &self.words[b as usize]);
                let sign = |x: u32| if signed { x as i32 as u64 } else { u64::from(x) };
                let c = c.map_or([0; 32], |c| self.doubles[c as usize]);
                let v = zip3(a, b, &c, |x, y, z| sign(x).wrapping_mul(sign(y)).wrapping_add(z));
                put(&mut self.doubles[d as usize], v, mask);
            }
            _ => {}
        }
    }

    pub(super) fn triple(&mut self, op: TripleOp, [d, a, b, c]: [Slot; 4], mask: u32) {
        let (a, b, c) = (&self.words[a as usize], &self.words[b as usize], &self.words[c as usize]);
        let v = match op {
            TripleOp::Lop3(table) => zip3(a, b, c, |a, b, c| super::bits::lop3(table, a, b, c)),
            TripleOp::Permute(mode) => zip3(a, b, c, |a, b, c| super::bits::permute(mode, a, b, c)),
            TripleOp::FunnelLeft { wrap } => zip3(a, b, c, |a, b, n| {
                let n = if wrap { n & 31 } else { n.min(32) };
                (((u64::from(b) << 32 | u64::from(a)) << n) >> 32) as u32
            }),
            TripleOp::FunnelRight { wrap } => zip3(a, b, c, |a, b, n| {
                let n = if wrap { n & 31 } else { n.min(32) };
                ((u64::from(b) << 32 | u64::from(a)) >> n) as u32
            }),
            TripleOp::Dot4 { a_signed, b_signed } => {
                zip3(a, b, c, |a, b, c| super::bits::dot4(a, a_signed, b, b_signed, c))
            }
            TripleOp::Sad { signed: false } => zip3(a, b, c, |a, b, c| a.abs_diff(b).wrapping_add(c)),
            TripleOp::Sad { signed: true } => {
                zip3(a, b, c, |a, b, c| (a as i32).abs_diff(b as i32).wrapping_add(c))
            }
        };
        put(&mut self.words[d as usize], v, mask);
    }

    pub(super) fn field(&mut self, op: &Op, mask: u32) {
        match *op {
            Op::Extract { signed, wide, d, a, at, length } => {
                let (at, length) = (self.words[at as usize], self.words[length as usize]);
                if wide {
                    let a = self.doubles[a as usize];
                    let v = zip3(&a, &at, &length, |a, p, l| super::bits::extract(a, 64, p, l, signed));
                    put(&mut self.doubles[d as usize], v, mask);
                } else {
                    let v = zip3(&self.words[a as usize], &at, &length, |a, p, l| {
                        super::bits::extract(u64::from(a), 32, p, l, signed) as u32
                    });
                    put(&mut self.words[d as usize], v, mask);
                }
            }
            Op::Insert { wide, d, a, b, at, length } => {
                let (at, length) = (self.words[at as usize], self.words[length as usize]);
                let field = zip(&at, &length, |p, l| super::bits::field(if wide { 64 } else { 32 }, p, l));
                if wide {
                    let (a, b) = (&self.doubles[a as usize], &self.doubles[b as usize]);
                    let v = zip3(a, b, &field, |a, b, (m, p)| b & !m | a.unbounded_shl(p) & m);
                    put(&mut self.doubles[d as usize], v, mask);
                } else {
                    let (a, b) = (&self.words[a as usize], &self.words[b as usize]);
                    let v =
                        zip3(a, b, &field, |a, b, (m, p)| b & !(m as u32) | a.unbounded_shl(p) & m as u32);
                    put(&mut self.words[d as usize], v, mask);
                }
            }
            _ => {}
        }
    }
}
