//! Arithmetic on words, packed halves and floats.

use super::*;

#[test]
fn bits_and_integer_dot_products() {
    const N: usize = 1000;
    let mut words = Words::new(7);
    let input: Vec<u32> = (0..3 * N).map(|_| words.next()).collect();
    for rt in runtimes() {
        let shape = Shape { grid: N.div_ceil(32) as u32, n: N as u32, ..WARP };
        let Some(out) = run(&rt, "conformance_bits", shape, &input, 5 * N) else { continue };
        for (t, out) in out.chunks_exact(5).enumerate() {
            let [a, b, c] = input[3 * t..][..3].try_into().unwrap();
            assert_eq!(out[0], prmt(a, b, c), "prmt {a:#x} {b:#x} {c:#x}");
            assert_eq!(out[1], (a & b) | c, "lop3 0xea");
            assert_eq!(out[2], a ^ b ^ c, "lop3 0x96");
            assert_eq!(out[3], lop3(0x1d, a, b, c), "lop3 0x1d");
            let dot = |w: u32, v: u32| -> i32 {
                w.to_le_bytes()
                    .iter()
                    .zip(v.to_le_bytes())
                    .map(|(x, y)| i32::from(*x as i8) * i32::from(y as i8))
                    .sum()
            };
            assert_eq!(out[4] as i32, dot(a, b).wrapping_add(c as i32), "dp4a {a:#x} {b:#x} {c:#x}");
        }
    }
}

/// The ISA: byte i of the result is byte `sel.nibble[i] & 7` of {b, a}; with bit 3, its sign eight times.
fn prmt(a: u32, b: u32, sel: u32) -> u32 {
    let source: Vec<u8> = a.to_le_bytes().into_iter().chain(b.to_le_bytes()).collect();
    let byte = |i: usize| {
        let nibble = (sel >> (4 * i)) as usize & 0xf;
        let byte = source[nibble & 7];
        if nibble & 8 == 0 { byte } else { ((byte as i8) >> 7) as u8 }
    };
    u32::from_le_bytes([byte(0), byte(1), byte(2), byte(3)])
}

/// The ISA: bit by bit, the table's entry number (a b c).
fn lop3(table: u32, a: u32, b: u32, c: u32) -> u32 {
    (0..32).fold(0, |r, i| {
        let entry = (a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1);
        r | (table >> entry & 1) << i
    })
}

#[test]
fn packed_arithmetic_rounds_once() {
    const N: usize = 2000;
    for rt in runtimes() {
        for half in [Half::F16, Half::Bf16] {
            let mut words = Words::new(11);
            // Exponents within 16 of each other, so that f64 holds every sum exactly; and the special values.
            let special = [0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 1.0, -1.0];
            let mut value = || {
                let pick = words.next();
                if pick.is_multiple_of(8) {
                    return half.bits(special[words.next() as usize % special.len()]);
                }
                let v = 1.0 + f64::from(words.next() % 2048) / 2048.0;
                let v = v * 2f64.powi((words.next() % 12) as i32 - 8);
                half.bits(if pick & 16 == 0 { v } else { -v })
            };
            let input: Vec<u32> = (0..3 * N).map(|_| u32::from(value()) | u32::from(value()) << 16).collect();
            let name = format!("conformance_packed_{}", half.name());
            let shape = Shape { grid: N.div_ceil(32) as u32, n: N as u32, ..WARP };
            let Some(out) = run(&rt, &name, shape, &input, 9 * N) else { continue };
            for (t, out) in out.chunks_exact(9).enumerate() {
                let [a, b, c] = input[3 * t..][..3].try_into().unwrap();
                let both = |f: &dyn Fn(f64, f64, f64) -> f64| {
                    let at = |shift: u32| {
                        let v = |w: u32| half.value((w >> shift) as u16);
                        u32::from(half.bits(f(v(a), v(b), v(c)))) << shift
                    };
                    at(0) | at(16)
                };
                let case = format!("{name}: {a:#x} {b:#x} {c:#x}");
                for (i, want) in [
                    both(&|a, b, c| a * b + c),
                    both(&|a, b, _| a * b),
                    both(&|a, b, _| a + b),
                    both(&|a, b, _| a - b),
                ]
                .into_iter()
                .enumerate()
                {
                    let op = ["fma2", "mul2", "add2", "sub2"][i];
                    assert!(half.same2(out[i], want), "{case}: {op} gives {:#x}, not {want:#x}", out[i]);
                }
            }
        }
    }
}

#[test]
fn conversions_round_to_nearest_even() {
    const N: usize = 4000;
    for rt in runtimes() {
        for half in [Half::F16, Half::Bf16] {
            // Any bits at all, and values around the ends and ties of both formats.
            let mut words = Words::new(13);
            let near = [
                65504.0,
                65520.0,
                65519.99,
                3.0e38,
                f32::MAX,
                6.1e-5,
                5.96e-8,
                2.98e-8,
                2.981e-8,
                1e-40,
                1.00390625,
            ];
            let mut value = |i: usize| match i % 4 {
                0 => words.next(),
                1 => near[words.next() as usize % near.len()].to_bits() ^ (words.next() & 1) << 31,
                2 => words.next() & 0xffff_8000 | 0x8000,
                _ => (1.0 + words.next() as f32 / u32::MAX as f32).to_bits(),
            };
            let input: Vec<u32> = (0..3 * N).map(&mut value).collect();
            let name = format!("conformance_packed_{}", half.name());
            let shape = Shape { grid: N.div_ceil(32) as u32, n: N as u32, ..WARP };
            let Some(out) = run(&rt, &name, shape, &input, 9 * N) else { continue };
            for (t, out) in out.chunks_exact(9).enumerate() {
                let (x, y) = (f32::from_bits(input[3 * t]), f32::from_bits(input[3 * t + 1]));
                let (lo, hi) = (half.rounded(x), half.rounded(y));
                let pair = u32::from(lo) | u32::from(hi) << 16;
                assert!(
                    half.same2(out[4], pair),
                    "{name}: pack2({x:e}, {y:e}) is {:#x}, not {pair:#x}",
                    out[4]
                );
                assert!(
                    half.same(out[5] as u16, lo),
                    "{name}: from_f32({x:e}) is {:#x}, not {lo:#x}",
                    out[5]
                );
                let wide = |bits: u16| half.value(bits) as f32;
                let (low, high) = (x.to_bits() as u16, (x.to_bits() >> 16) as u16);
                assert!(same_f32(out[6], wide(low)), "{name}: to_f32({low:#x})");
                assert!(
                    same_f32(out[7], wide(low)) && same_f32(out[8], wide(high)),
                    "{name}: unpack2({x:e})"
                );
            }
        }
    }
}

/// Bounds in units of ε = 2^-24 of the result: ex2 2^-22 (ISA), __expf 2 + 1.16|x| ulp, the others 2 ulp (CUDA's
/// programming guide, an ulp is up to 2 ε); activations from those by the chain rule (below).
#[test]
fn functions_are_as_close_as_documented() {
    const N: usize = 4000;
    let input: Vec<f32> = (0..N).map(|i| (i as f32 / N as f32 - 0.5) * 40.0 + 1e-3).collect();
    let words: Vec<u32> = input.iter().map(|x| x.to_bits()).collect();
    let eps = 2f64.powi(-24);
    for rt in runtimes() {
        let shape = Shape { grid: N.div_ceil(32) as u32, n: N as u32, ..WARP };
        let Some(out) = run(&rt, "conformance_functions", shape, &words, 7 * N) else { continue };
        for (x, out) in input.iter().zip(out.chunks_exact(7)) {
            let x = f64::from(*x);
            let expf = (2.0 + 1.16 * x.abs()) * 2.0 * eps;
            let silu = x / (1.0 + (-x).exp());
            // gelu: the argument of tanh has a few roundings; tanh' a <= 1/2; then 1 + t cancels for negative x, so
            // the error is of x, not of the result: |x| / 2 * (2 ulp + 4 ε / 2 + rounding of 1 + t).
            let gelu = 8.0 * eps * x.abs();
            let wants = [
                ("ex2", x.exp2(), 4.0 * eps * x.exp2()),
                ("__expf", x.exp(), expf * x.exp()),
                ("rsqrtf", x.abs().powf(-0.5), 4.0 * eps * x.abs().powf(-0.5)),
                ("tanhf", x.tanh(), 4.0 * eps * x.tanh().abs()),
                ("silu", silu, (expf + 4.0 * eps) * silu.abs()),
                (
                    "gelu_tanh",
                    0.5 * x * (1.0 + (0.7978845608028654 * (x + 0.044715 * x * x * x)).tanh()),
                    gelu,
                ),
            ];
            for (i, (name, want, bound)) in wants.into_iter().enumerate() {
                let got = f64::from(f32::from_bits(out[i]));
                assert!((got - want).abs() <= bound, "{name}({x}) is {got:e}, not {want:e} to {bound:e}");
            }
            // No erf in the standard library: its derivative's bound and oddness instead. gelu(x) - gelu(-x) = x.
            let erf = f64::from(f32::from_bits(out[6]));
            let mean = erf - x.max(0.0);
            assert!((-0.17 - gelu..=gelu).contains(&mean), "gelu_erf({x}) is {erf}");
        }
    }
}
