//! Floats: one rounding, the rules of NaN, denormals and signed zeros. References are in f64, or by search.

mod common;
use common::{Random, check, check_with, lanes};

fn f(bits: u32) -> f64 {
    f64::from(f32::from_bits(bits))
}

/// The same value; of NaN, the canonical one.
fn bits(value: f32) -> u32 {
    if value.is_nan() { 0x7fff_ffff } else { value.to_bits() }
}

/// Numbers of like size, so that sums are exact in f64, and specials.
fn operand(random: &mut Random) -> u32 {
    const SPECIAL: [f32; 8] =
        [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1.0, f32::MIN_POSITIVE, 1e-40];
    match random.next() % 4 {
        0 => SPECIAL[random.next() as usize % SPECIAL.len()].to_bits(),
        1 => random.word(),
        _ => (random.unit() * 2f32.powi((random.next() % 8) as i32)).to_bits(),
    }
}

#[test]
fn sums_products_and_quotients_round_once() {
    let body = "mov.b32 %f0, %r0; mov.b32 %f1, %r1; add.f32 %f2, %f0, %f1; sub.f32 %f3, %f0, %f1;\n\
                mul.f32 %f4, %f0, %f1; div.rn.f32 %f5, %f0, %f1; neg.f32 %f6, %f0; abs.f32 %f7, %f0;\n\
                mov.b32 %r32, %f2; mov.b32 %r33, %f3; mov.b32 %r34, %f4; mov.b32 %r35, %f5; mov.b32 %r36, %f6;\n\
                mov.b32 %r37, %f7;";
    check_with(body, 2, 6, &mut operand, |v| {
        let (x, y) = (f32::from_bits(v[0]), f32::from_bits(v[1]));
        vec![bits(x + y), bits(x - y), bits(x * y), bits(x / y), v[0] ^ 1 << 31, v[0] & !(1 << 31)]
    });
}

/// (1 + ε)² - (1 + 2ε) is ε²: a product that is rounded first would leave 0.
#[test]
fn fma_keeps_the_whole_product() {
    let input: Vec<u32> = (0..32).flat_map(|_| [0x3f80_0001, 0x3f80_0001, 0xbf80_0002]).collect();
    let out = lanes("fma.rn.f32 %r32, %r0, %r1, %r2;", 3, &input, 1);
    assert_eq!(out, [2f32.powi(-46).to_bits(); 32]);
}

/// Numbers of few bits, so that the reference in f64 is exact.
#[test]
fn fma_rounds_once() {
    let mut small = |random: &mut Random| ((random.next() % 4096) as f32 - 2048.0).to_bits();
    check_with(
        "fma.rn.f32 %r32, %r0, %r1, %r2; fma.rn.sat.f32 %r33, %r0, %r1, %r2;",
        3,
        2,
        &mut small,
        |v| {
            let exact = f(v[0]) * f(v[1]) + f(v[2]);
            vec![(exact as f32).to_bits(), (exact.clamp(0.0, 1.0) as f32 + 0.0).to_bits()]
        },
    );
}

/// Neighbours of the exact value, found by stepping: below and above.
#[test]
fn directed_roundings() {
    let body = "add.rz.f32 %r32, %r0, %r1; add.rm.f32 %r33, %r0, %r1; add.rp.f32 %r34, %r0, %r1;\n\
                mul.rm.f32 %r35, %r0, %r1; mul.rp.f32 %r36, %r0, %r1;";
    let mut number = |random: &mut Random| (random.unit() * 1000.0).to_bits();
    check_with(body, 2, 5, &mut number, |v| {
        let around = |exact: f64| {
            let near = exact as f32;
            let below = if f64::from(near) > exact { near.next_down() } else { near };
            let above = if f64::from(near) < exact { near.next_up() } else { near };
            (below.to_bits(), above.to_bits())
        };
        let (sum, product) = (f(v[0]) + f(v[1]), f(v[0]) * f(v[1]));
        let (s, p) = (around(sum), around(product));
        vec![if sum > 0.0 { s.0 } else { s.1 }, s.0, s.1, p.0, p.1]
    });
}

#[test]
fn least_and_greatest_prefer_numbers() {
    let body = "min.f32 %r32, %r0, %r1; max.f32 %r33, %r0, %r1; min.NaN.f32 %r34, %r0, %r1; copysign.f32 %r35, %r0, %r1;";
    let nan = f32::NAN.to_bits();
    let one = 1f32.to_bits();
    let (plus, minus) = (0u32, 1u32 << 31);
    let cases = [(nan, one), (one, nan), (nan, nan), (plus, minus), (minus, plus), (one, minus)];
    let input: Vec<u32> = (0..32).flat_map(|i| [cases[i % 6].0, cases[i % 6].1]).collect();
    let out = lanes(body, 2, &input, 4);
    let canonical = 0x7fff_ffff;
    let want = [
        [one, one, canonical],
        [one, one, canonical],
        [canonical, canonical, canonical],
        [minus, plus, minus],
        [minus, plus, minus],
        [minus, one, minus],
    ];
    for (i, got) in out.chunks(4).enumerate() {
        assert_eq!(got[..3], want[i % 6], "{:x?}", cases[i % 6]);
        assert_eq!(got[3], cases[i % 6].0 & minus | cases[i % 6].1 & !minus, "copysign");
    }
}

#[test]
fn denormals_are_kept_or_flushed() {
    let tiny = 1u32;
    let input: Vec<u32> = (0..32).flat_map(|_| [tiny, 0x8000_0001]).collect();
    let body = "add.f32 %r32, %r0, %r0; add.ftz.f32 %r33, %r0, %r0; mul.ftz.f32 %r34, %r1, 0f3F800000;\n\
                setp.eq.ftz.f32 %p0, %r0, 0f00000000; selp.u32 %r35, 1, 0, %p0;\n\
                setp.eq.f32 %p1, %r0, 0f00000000; selp.u32 %r36, 1, 0, %p1;";
    assert_eq!(lanes(body, 2, &input, 5)[..5], [2, 0, 0x8000_0000, 1, 0]);
}

/// To half a unit in the last place and a little: closer than every bound of the ISA (2^-22 of ex2, 1 ulp of rcp).
#[test]
fn approximations_are_the_exact_value_rounded() {
    let body = "ex2.approx.f32 %r32, %r0; rcp.approx.ftz.f32 %r33, %r0; abs.f32 %r1, %r0; rsqrt.approx.f32 %r34, %r1;\n\
                lg2.approx.f32 %r35, %r1; sqrt.rn.f32 %r36, %r1; tanh.approx.f32 %r37, %r0; sin.approx.f32 %r38, %r0;";
    let number = |random: &mut Random| (random.unit() * 20.0 + 0.001).to_bits();
    let mut random = Random(5);
    for _ in 0..50 {
        let input: Vec<u32> = (0..32).map(|_| number(&mut random)).collect();
        for (x, out) in input.iter().zip(lanes(body, 1, &input, 7).chunks(7)) {
            let (x, a) = (f(*x), f(*x).abs());
            let want = [x.exp2(), 1.0 / x, a.powf(-0.5), a.log2(), a.sqrt(), x.tanh(), x.sin()];
            for (i, want) in want.iter().enumerate() {
                let error = (f(out[i]) - want).abs();
                assert!(
                    error <= want.abs() * 2f64.powi(-24) * 1.0001,
                    "function {i} of {x}: off by {error:e}"
                );
            }
        }
    }
}

#[test]
fn flushed_exponentials_and_divisors_beyond_the_range() {
    let body =
        "ex2.approx.ftz.f32 %r32, %r0; ex2.approx.f32 %r33, %r0; div.approx.f32 %r34, 0f3F800000, %r1;";
    let input: Vec<u32> =
        (0..32).flat_map(|_| [(-130f32).to_bits(), 1.5f32.to_bits() + (126 << 23)]).collect();
    let out = lanes(body, 2, &input, 3);
    assert_eq!(out[..3], [0, 2f32.powi(-130).to_bits(), 0]);
}

#[test]
fn comparisons_of_unordered_numbers() {
    let tests = ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"];
    let mut body = String::new();
    for (i, test) in tests.iter().enumerate() {
        body += &format!("setp.{test}.f32 %p0, %r0, %r1; selp.b32 %r{}, 1, 0, %p0;\n", 32 + i);
    }
    check_with(&body, 2, tests.len(), &mut operand, |v| {
        let (x, y) = (f(v[0]), f(v[1]));
        let nan = x.is_nan() || y.is_nan();
        let plain = [x == y, !nan && x != y, x < y, x <= y, x > y, x >= y];
        let all = plain.into_iter().chain(plain.map(|p| p || nan)).chain([!nan, nan]);
        all.map(u32::from).collect()
    });
}

#[test]
fn comparisons_of_integers_and_what_they_are_combined_with() {
    let body = "setp.lt.s32 %p0, %r0, %r1; setp.lt.u32 %p1|%p2, %r0, %r1; selp.b32 %r32, 1, 0, %p0;\n\
                selp.b32 %r33, 1, 0, %p1; selp.b32 %r34, 1, 0, %p2; setp.ge.or.u32 %p3, %r0, %r1, !%p0;\n\
                selp.b32 %r35, 1, 0, %p3; set.hi.u32.u32 %r36, %r0, %r1; and.pred %p4, %p0, %p1; not.pred %p5, %p4;\n\
                xor.pred %p6, %p5, %p0; selp.b32 %r37, %r0, %r1, %p6; mov.pred %p7, -1; @!%p7 mov.u32 %r37, 77;\n\
                mov.b32 {%h0, %h1}, %r0; setp.gt.s16 %p8, %h0, %h1; selp.b32 %r38, 1, 0, %p8;";
    check(body, 2, 7, |v| {
        let (a, b) = (v[0], v[1]);
        let (signed, unsigned) = ((a as i32) < b as i32, a < b);
        let mixed = (signed && unsigned) == signed;
        vec![
            u32::from(signed),
            u32::from(unsigned),
            u32::from(!unsigned),
            u32::from(a >= b || !signed),
            if a > b { u32::MAX } else { 0 },
            if mixed { a } else { b },
            u32::from(a as u16 as i16 > (a >> 16) as u16 as i16),
        ]
    });
}

#[test]
fn doubles() {
    let body = "mov.b64 %g0, {%r0, %r1}; mov.b64 %g1, {%r2, %r3}; add.f64 %g2, %g0, %g1; mul.f64 %g3, %g0, %g1;\n\
                fma.rn.f64 %g4, %g0, %g1, %g2; mov.b64 {%r32, %r33}, %g2; mov.b64 {%r34, %r35}, %g3;\n\
                mov.b64 {%r36, %r37}, %g4;";
    let mut random = Random(9);
    let values: Vec<f64> = (0..64).map(|_| f64::from(random.unit())).collect();
    let input: Vec<u32> =
        values.iter().flat_map(|v| [v.to_bits() as u32, (v.to_bits() >> 32) as u32]).collect();
    for (v, out) in values.chunks(2).zip(lanes(body, 4, &input, 6).chunks(6)) {
        let got = |i: usize| f64::from_bits(u64::from(out[2 * i]) | u64::from(out[2 * i + 1]) << 32);
        assert_eq!([got(0), got(1)], [v[0] + v[1], v[0] * v[1]]);
        assert_eq!(got(2), v[0].mul_add(v[1], v[0] + v[1]));
    }
}

/// An exact difference of zero is -0 only when rounding down (IEEE 754, 6.3).
#[test]
fn zeros_of_directed_roundings() {
    let body = "add.rm.f32 %r32, %r0, %r1; add.rp.f32 %r33, %r0, %r1; add.rz.f32 %r34, %r0, %r1; sub.rm.f32 %r35, %r0, %r0;\n\
                add.rm.f32 %r36, 0f00000000, 0f00000000; add.rm.f32 %r37, 0f80000000, 0f80000000;";
    let input: Vec<u32> = (0..32).flat_map(|_| [1f32.to_bits(), (-1f32).to_bits()]).collect();
    let minus = 1 << 31;
    assert_eq!(lanes(body, 2, &input, 6)[..6], [minus, 0, 0, minus, 0, minus]);
}
