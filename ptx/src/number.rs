//! Floating point numbers by their bits: one rounding, in any direction, to any format.

/// Directions of rounding: `.rn`, `.rz`, `.rm`, `.rp`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Round {
    Nearest,
    Zero,
    Down,
    Up,
}

/// Widths of exponent and mantissa.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Format {
    pub exponent: u32,
    pub mantissa: u32,
}

pub(crate) const F16: Format = Format { exponent: 5, mantissa: 10 };
pub(crate) const BF16: Format = Format { exponent: 8, mantissa: 7 };
pub(crate) const F32: Format = Format { exponent: 8, mantissa: 23 };

/// The NaN that arithmetic returns (PTX ISA 9.7.3: "canonical NaN").
pub(crate) const NAN_F32: u32 = 0x7fff_ffff;

impl Format {
    fn sign(self) -> u32 {
        1 << (self.exponent + self.mantissa)
    }

    pub fn infinity(self) -> u32 {
        self.sign() - (1 << self.mantissa)
    }

    pub fn nan(self) -> u32 {
        self.sign() - 1
    }

    /// The value's bits: rounded once, denormals kept, NaN canonical.
    #[inline]
    pub fn of(self, value: f64, round: Round) -> u32 {
        let bits = value.to_bits();
        let negative = bits >> 63 == 1;
        let sign = if negative { self.sign() } else { 0 };
        if round == Round::Nearest
            && let Some(magnitude) = self.nearest_normal(bits & (u64::MAX >> 1))
        {
            return sign | magnitude;
        }
        if value.is_nan() {
            return self.nan();
        }
        if value.is_infinite() {
            return sign | self.infinity();
        }
        let field = (bits >> 52 & 0x7ff) as i32;
        let fraction = bits & ((1 << 52) - 1);
        let (exponent, whole) =
            if field == 0 { (-1022, fraction) } else { (field - 1023, fraction | 1 << 52) };
        // In units of the last place of the result, which stops shrinking at the least normal exponent.
        let least = 2 - (1 << (self.exponent - 1));
        let place = exponent.max(least);
        let shift = (52 - self.mantissa as i32 + place - exponent).min(63) as u32;
        let (mut units, rest) = (whole >> shift, whole & ((1 << shift) - 1));
        let half = 1u64 << (shift - 1);
        units += u64::from(match round {
            Round::Nearest => rest > half || rest == half && units & 1 == 1,
            Round::Zero => false,
            Round::Down => negative && rest != 0,
            Round::Up => !negative && rest != 0,
        });
        // A carry out of the mantissa lands in the exponent, where it belongs.
        let magnitude = (((place - least) as u64) << self.mantissa) + units;
        let infinity = u64::from(self.infinity());
        if magnitude < infinity {
            return sign | magnitude as u32;
        }
        let away = match round {
            Round::Nearest => true,
            Round::Zero => false,
            Round::Down => negative,
            Round::Up => !negative,
        };
        sign | if away { self.infinity() } else { self.infinity() - 1 }
    }

    /// Numbers that are normal in the format, before and after rounding: most are.
    #[inline(always)]
    fn nearest_normal(self, magnitude: u64) -> Option<u32> {
        let shift = 52 - self.mantissa;
        let rounded = (magnitude + (1 << (shift - 1)) - 1 + (magnitude >> shift & 1)) >> shift;
        // The difference of the exponents' biases, 1023 and 2^(exponent - 1) - 1.
        let biases = (1024 - (1u64 << (self.exponent - 1))) << self.mantissa;
        let result = rounded.checked_sub(biases)?;
        let normal = u64::from(1u32 << self.mantissa)..u64::from(self.infinity());
        // What rounds up to the least normal number here does among the coarser denormals, too.
        normal.contains(&result).then_some(result as u32)
    }

    /// The value of bits, exactly.
    pub fn value(self, bits: u32) -> f32 {
        match self.mantissa {
            10 => f16_value(bits as u16),
            7 => f32::from_bits(bits << 16),
            _ => f32::from_bits(bits),
        }
    }
}

/// The exponent is moved by a multiplication, which also makes denormals normal.
pub(crate) fn f16_value(bits: u16) -> f32 {
    let magnitude = f32::from_bits(u32::from(bits & 0x7fff) << 13) * f32::from_bits(0x7780_0000);
    let sign = u32::from(bits & 0x8000) << 16;
    let special = if magnitude >= 65536.0 { 0x7f80_0000 } else { 0 };
    f32::from_bits(magnitude.to_bits() | special | sign)
}

/// a + b rounded to odd: a later rounding to a format at least two bits narrower is as if it were the only one.
pub(crate) fn add_odd(a: f64, b: f64) -> f64 {
    let sum = a + b;
    if !sum.is_finite() {
        return sum;
    }
    let part = sum - a;
    let lost = (a - (sum - part)) + (b - part);
    if lost == 0.0 || sum.to_bits() & 1 == 1 {
        return sum;
    }
    let outwards = (lost > 0.0) == (sum > 0.0);
    f64::from_bits(if outwards { sum.to_bits() + 1 } else { sum.to_bits() - 1 })
}

/// Bits of an f32 result.
pub(crate) fn canonical(value: f32) -> u32 {
    if value.is_nan() { NAN_F32 } else { value.to_bits() }
}

/// `.ftz`: denormals are zeros of their sign.
pub(crate) fn flush(value: f32) -> f32 {
    if value.abs() < f32::MIN_POSITIVE { f32::from_bits(value.to_bits() & 0x8000_0000) } else { value }
}
