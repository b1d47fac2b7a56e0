//! setp and set (PTX ISA 9.7.5).

use super::lanes::{bits, put};
use super::warp::Warp;
use crate::instruction::{Compare, Compared, Logic, Slot, Test};
use crate::number::flush;

#[inline(always)]
fn ordered<T: PartialOrd>(test: Test, x: &T, y: &T) -> bool {
    let unordered = || x.partial_cmp(y).is_none();
    match test {
        Test::Eq => x == y,
        Test::Ne => x != y && !unordered(),
        Test::Lt => x < y,
        Test::Le => x <= y,
        Test::Gt => x > y,
        Test::Ge => x >= y,
        Test::EqU => x == y || unordered(),
        Test::NeU => x != y,
        Test::LtU => x < y || unordered(),
        Test::LeU => x <= y || unordered(),
        Test::GtU => x > y || unordered(),
        Test::GeU => x >= y || unordered(),
        Test::Ordered => !unordered(),
        Test::Unordered => unordered(),
    }
}

/// One loop a comparison, of lanes that are made numbers by `f`.
#[inline(always)]
fn all<S: Copy, T: PartialOrd>(test: Test, a: &[S; 32], b: &[S; 32], f: impl Fn(S) -> T) -> u32 {
    macro_rules! each {
        ($($test:ident)*) => {
            match test {
                $(Test::$test => bits(|i| ordered(Test::$test, &f(a[i]), &f(b[i]))),)*
            }
        };
    }
    each!(Eq Ne Lt Le Gt Ge EqU NeU LtU LeU GtU GeU Ordered Unordered)
}

pub(super) fn logic(op: Logic, a: u32, b: u32) -> u32 {
    match op {
        Logic::And => a & b,
        Logic::Or => a | b,
        Logic::Xor => a ^ b,
    }
}

impl Warp {
    /// The result in each lane, and combined with the negated comparison.
    fn compare(&self, c: &Compare) -> (u32, u32) {
        let (a, b) = (c.a as usize, c.b as usize);
        let words = || (&self.words[a], &self.words[b]);
        let doubles = || (&self.doubles[a], &self.doubles[b]);
        let test = c.test;
        let result = match c.kind {
            Compared::Unsigned32 => all(test, words().0, words().1, |x| x),
            Compared::Signed32 => all(test, words().0, words().1, |x| x as i32),
            Compared::Signed16 => all(test, words().0, words().1, |x| x as u16 as i16),
            Compared::Unsigned64 => all(test, doubles().0, doubles().1, |x| x),
            Compared::Signed64 => all(test, doubles().0, doubles().1, |x| x as i64),
            Compared::F32 { flush: false } => all(test, words().0, words().1, f32::from_bits),
            Compared::F32 { flush: true } => all(test, words().0, words().1, |x| flush(f32::from_bits(x))),
            Compared::F64 => all(test, doubles().0, doubles().1, f64::from_bits),
            Compared::Half(format) => all(test, words().0, words().1, |x| format.value(x)),
        };
        match c.combine {
            None => (result, !result),
            Some((op, p, negated)) => {
                let p = self.predicates[p as usize];
                let p = if negated { !p } else { p };
                (logic(op, result, p), logic(op, !result, p))
            }
        }
    }

    pub(super) fn set_pred(&mut self, c: &Compare, d: Slot, other: Option<Slot>, mask: u32) {
        let (result, opposite) = self.compare(c);
        self.set_predicate(d, result, mask);
        if let Some(other) = other {
            self.set_predicate(other, opposite, mask);
        }
    }

    pub(super) fn set(&mut self, c: &Compare, float: bool, d: Slot, mask: u32) {
        let (result, _) = self.compare(c);
        let yes = if float { 1f32.to_bits() } else { u32::MAX };
        let v = std::array::from_fn(|i| if result >> i & 1 == 1 { yes } else { 0 });
        put(&mut self.words[d as usize], v, mask);
    }

    pub(super) fn set_predicate(&mut self, d: Slot, value: u32, mask: u32) {
        let d = &mut self.predicates[d as usize];
        *d = *d & !mask | value & mask;
    }
}
