//! 16-bit floats. The reference rounds by search among all values of the format.

mod common;
use common::{Random, check_with, lanes};

/// A format's finite values that are not negative, ascending, with their bits; what is beyond the last rounds to infinity.
struct Format {
    name: &'static str,
    values: Vec<f64>,
}

/// By the definition: sign, exponent, fraction.
fn value(name: &str, bits: u32) -> f64 {
    let (exponents, mantissa) = if name == "f16" { (5, 10) } else { (8, 7) };
    let bias = (1 << (exponents - 1)) - 1;
    let exponent = (bits >> mantissa & ((1 << exponents) - 1)) as i32;
    let fraction = f64::from(bits & ((1 << mantissa) - 1)) / f64::from(1 << mantissa);
    let sign = if bits >> 15 & 1 == 1 { -1.0 } else { 1.0 };
    sign * match exponent {
        0 => fraction * 2f64.powi(1 - bias),
        e if e == (1 << exponents) - 1 && fraction == 0.0 => f64::INFINITY,
        e if e == (1 << exponents) - 1 => f64::NAN,
        e => (1.0 + fraction) * 2f64.powi(e - bias),
    }
}

impl Format {
    fn new(name: &'static str) -> Format {
        let values = (0..0x8000).map(|b| value(name, b)).take_while(|v| v.is_finite()).collect();
        Format { name, values }
    }
    fn value(&self, bits: u32) -> f64 {
        value(self.name, bits)
    }
    /// To the nearest, of two the even one.
    fn round(&self, v: f64) -> u32 {
        if v.is_nan() {
            return 0x7fff;
        }
        let sign = if v.is_sign_negative() { 0x8000 } else { 0 };
        let v = v.abs();
        let above = self.values.partition_point(|x| *x < v);
        let infinity = self.values.len();
        // The value after the last one, if exponents went on.
        let at = |i: usize| {
            if i < infinity {
                self.values[i]
            } else {
                2.0 * self.values[infinity - 1] - self.values[infinity - 2]
            }
        };
        let magnitude = if v == f64::INFINITY {
            infinity
        } else if above == 0 {
            0
        } else if above > infinity {
            infinity
        } else {
            let (down, up) = (v - at(above - 1), at(above) - v);
            if down < up || down == up && (above - 1) % 2 == 0 { above - 1 } else { above }
        };
        sign | magnitude as u32
    }
    fn pair(&self, f: impl Fn(usize) -> f64) -> u32 {
        self.round(f(0)) | self.round(f(1)) << 16
    }
}

/// Any bits for half of them; for the others exponents that are close, so that sums are exact in f64.
fn operand(name: &'static str) -> impl FnMut(&mut Random) -> u32 {
    let one = if name == "f16" { 0x3c00 } else { 0x3f80 };
    let step = if name == "f16" { 10 } else { 7 };
    move |random| {
        let mut half = || match random.next() % 4 {
            // Beside denormals of bf16, sums are not exact in f64.
            0 if name == "bf16" => [0, 0x8000, 0x7fff, one][random.next() as usize % 4],
            0 => [0, 0x8000, 0x7fff, 1, 0x8001, one, one - 1][random.next() as usize % 7],
            1 if name == "f16" => random.next() & 0xffff,
            _ => {
                (one + random.next() % (8 << step)).wrapping_sub(4 << step) & 0x7fff
                    | (random.next() & 0x8000)
            }
        };
        half() | half() << 16
    }
}

#[test]
fn packed_arithmetic_rounds_once() {
    for name in ["f16", "bf16"] {
        let format = Format::new(name);
        let body = format!(
            "fma.rn.{name}x2 %r32, %r0, %r1, %r2; add.rn.{name}x2 %r33, %r0, %r1; sub.rn.{name}x2 %r34, %r0, %r1;\n\
             mul.rn.{name}x2 %r35, %r0, %r1;"
        );
        check_with(&body, 3, 4, &mut operand(name), |v| {
            let x = |word: usize, i: usize| format.value(v[word] >> (16 * i) & 0xffff);
            vec![
                format.pair(|i| x(0, i) * x(1, i) + x(2, i)),
                format.pair(|i| x(0, i) + x(1, i)),
                format.pair(|i| x(0, i) - x(1, i)),
                format.pair(|i| x(0, i) * x(1, i)),
            ]
        });
    }
}

/// Sums with bits beyond those of f64: what f64 would lose decides a tie.
#[test]
fn a_sum_with_more_bits_than_f64_rounds_once() {
    let sum = |a: u32, b: u32, c: u32| {
        let input: Vec<u32> = (0..32).flat_map(|_| [a, b, c]).collect();
        lanes("fma.rn.bf16x2 %r32, %r0, %r1, %r2;", 3, &input, 1)[0] & 0xffff
    };
    // 161 * 192 * 2^-15 needs one bit more than bf16 has: a tie between 241 and 242 at 2^-8.
    let bf16 = Format::new("bf16");
    let product = bf16.value(0x3ea1) * bf16.value(0x40c0);
    let even = bf16.round(product);
    let below = even - 1;
    assert_eq!(bf16.value(below) + bf16.value(even), 2.0 * product, "a tie, and the upper one is even");
    assert_eq!(sum(0x3ea1, 0x40c0, 0), even);
    // The least denormal, 2^-133, is on either side of it.
    assert_eq!(sum(0x3ea1, 0x40c0, 0x0001), even);
    assert_eq!(sum(0x3ea1, 0x40c0, 0x8001), below);
    // 131 * 192 is a tie whose lower neighbour is even. What is added, 1.75 * 2^-53, is less than the last place of an
    // f64: a sum there ends just above what is meant, and stepping back from it would give the tie.
    let product = bf16.value(0x3f83) * bf16.value(0x3fc0);
    let even = bf16.round(product);
    assert_eq!(bf16.value(even) + bf16.value(even + 1), 2.0 * product, "a tie, and the lower one is even");
    assert_eq!(bf16.value(0x2560), 1.75 * 2f64.powi(-53));
    assert_eq!(sum(0x3f83, 0x3fc0, 0x2560), even + 1);
}

#[test]
fn conversions_round_to_nearest_even() {
    let edges = [65504.0, 65519.99, 65520.0, 6.1e-5, 2.98e-8, 2.981e-8, 1e-40, 3.39e38, 1.003_906_25];
    for name in ["f16", "bf16"] {
        let format = Format::new(name);
        let body = format!(
            "cvt.rn.{name}.f32 %h0, %r0; cvt.u32.u16 %r32, %h0; cvt.rn.{name}x2.f32 %r33, %r0, %r1;\n\
             cvt.rn.relu.{name}x2.f32 %r34, %r0, %r1; mov.b32 {{%h1, %h2}}, %r0; cvt.f32.{name} %r35, %h1;"
        );
        let mut number = |random: &mut Random| match random.next() % 3 {
            0 => random.next(),
            1 => (edges[random.next() as usize % edges.len()] as f32).to_bits() ^ (random.next() & 1) << 31,
            // Ties of bf16, and of f16.
            _ => (random.next() & 0xffff_0000 | 0x8000) & !(random.next() & 0x1_0000),
        };
        check_with(&body, 2, 4, &mut number, |v| {
            let (x, y) = (f64::from(f32::from_bits(v[0])), f64::from(f32::from_bits(v[1])));
            let relu = |v: f64| if v <= 0.0 { 0.0 } else { v };
            let wide = format.value(v[0] & 0xffff) as f32;
            vec![
                format.round(x),
                format.round(y) | format.round(x) << 16,
                format.round(relu(y)) | format.round(relu(x)) << 16,
                if wide.is_nan() { 0x7fff_ffff } else { wide.to_bits() },
            ]
        });
    }
}

#[test]
fn integers_and_floats() {
    let body = "cvt.rn.f32.s32 %r32, %r0; cvt.rn.f32.u32 %r33, %r0; cvt.rz.f32.u32 %r34, %r0; mov.b32 {%h0, %h1}, %r0;\n\
                cvt.rn.f32.s16 %r35, %h0; cvt.rn.f32.u16 %r36, %h0; cvt.s16.s8 %h2, %h0; cvt.s32.s16 %r37, %h2;\n\
                cvt.s64.s32 %q0, %r0; mov.b64 {%r38, %r39}, %q0; cvt.sat.u8.s32 %r40, %r0; cvt.u16.u32 %h3, %r0;\n\
                cvt.u32.u16 %r41, %h3;";
    common::check(body, 1, 10, |v| {
        let (x, half) = (v[0], v[0] as u16);
        // By truncation of the exact value: the bits below the 24 highest are dropped.
        let drop = 8u32.saturating_sub(x.leading_zeros());
        vec![
            (x as i32 as f32).to_bits(),
            (x as f32).to_bits(),
            ((x >> drop << drop) as f32).to_bits(),
            f32::from(half as i16).to_bits(),
            f32::from(half).to_bits(),
            i32::from(half as u8 as i8) as u32,
            x,
            if x >> 31 == 1 { u32::MAX } else { 0 },
            (x as i32).clamp(0, 255) as u32,
            x & 0xffff,
        ]
    });
    let body = "cvt.rzi.s32.f32 %r32, %r0; cvt.rni.s32.f32 %r33, %r0; cvt.rmi.f32.f32 %r34, %r0; cvt.rpi.u32.f32 %r35, %r0;";
    let mut number = |random: &mut Random| match random.next() % 8 {
        0 => [f32::NAN, f32::INFINITY, -1e20, 0.5, 1.5, 2.5, -0.5, 3e9][random.next() as usize % 8].to_bits(),
        _ => (random.unit() * 1000.0).to_bits(),
    };
    check_with(body, 1, 4, &mut number, |v| {
        let x = f32::from_bits(v[0]);
        // `as` truncates, stops at the ends and makes NaN 0.
        vec![
            x as i32 as u32,
            x.round_ties_even() as i32 as u32,
            if x.is_nan() { 0x7fff_ffff } else { x.floor().to_bits() },
            x.ceil() as u32,
        ]
    });
}
