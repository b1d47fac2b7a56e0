//! AMX kernels against naive products, on shapes around the tiles' edges: to the bit against the order of
//! sums that the kernels promise, and within the bound of that arithmetic against f64.
//! Without AMX hardware the kernels' machine code runs on emulated tiles.
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]

use proptest::prelude::*;
use tandem::amx::{
    self,
    bf16::gemm_bf16,
    emulate,
    pack::{a_blocks_len, bf16_from_f32, pack_a_bf16, pack_panel_bf16, panel_len},
    session::Session,
};

fn session() -> Session {
    if amx::available().is_err() {
        emulate::install().expect("emulation installs");
        println!("no AMX hardware: running on emulated tiles");
    }
    Session::open().expect("tiles work now")
}

fn f32_of(b: u16) -> f32 {
    f32::from_bits(u32::from(b) << 16)
}

/// Values in (-1, 1), representable in bf16.
fn noise(seed: u64) -> impl FnMut() -> f32 {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        f32_of(bf16_from_f32((x >> 40) as f32 / (1u64 << 23) as f32 - 1.0))
    }
}

/// The sum that the kernels promise: K in steps of 32, in order; in a step the even and the odd elements
/// are summed by fused multiply-adds from zero, joined, and added.
fn chain(pairs: impl Iterator<Item = (f32, f32)>, start: f32) -> f32 {
    let mut sum = start;
    let mut pairs = pairs.peekable();
    while pairs.peek().is_some() {
        let mut part = [0f32; 2];
        for (i, (x, y)) in pairs.by_ref().take(32).enumerate() {
            part[i % 2] = x.mul_add(y, part[i % 2]);
        }
        sum += part[0] + part[1];
    }
    sum
}

/// |f32 chain - exact| for k products: each of the k + 2 k/32 roundings errs by at most half an ulp of a
/// partial sum, which is at most sum |x y|; as independent errors they grow with the root of their number.
fn tolerance(k: usize, sum_abs: f64) -> f64 {
    let roundings = (k + k / 16 + 2) as f64;
    2.0 * roundings.sqrt() * f64::from(f32::EPSILON) / 2.0 * sum_abs + f64::from(f32::MIN_POSITIVE)
}

const CANARY: f32 = -12345.5;

fn check_gemm(m: usize, n: usize, k: usize, pad: usize, seed: u64) -> Result<(), String> {
    let mut next = noise(seed);
    let x: Vec<f32> = (0..m * k).map(|_| next()).collect();
    let w: Vec<u16> = (0..n * k).map(|_| bf16_from_f32(next())).collect();
    let mut a = vec![0xffffu16; a_blocks_len(m, k)];
    pack_a_bf16(&x, m, k, k, &mut a);
    let mut panels = vec![0xffffu16; n.div_ceil(16) * panel_len(k)];
    for p in 0..n.div_ceil(16) {
        let rows = (n - p * 16).min(16);
        pack_panel_bf16(&w[p * 16 * k..], rows, k, k, &mut panels[p * panel_len(k)..]);
    }
    let ldc = n + pad;
    let mut out = vec![CANARY; m * ldc + 16];
    gemm_bf16(&mut session(), m, n, k, &a, &panels, &mut out, ldc);
    for row in 0..m {
        for col in 0..ldc {
            let got = out[row * ldc + col];
            if col >= n {
                if got != CANARY {
                    return Err(format!("{m}x{n}x{k}: wrote beside row {row}, at {col}"));
                }
                continue;
            }
            let pair = |i: usize| (x[row * k + i], f32_of(w[col * k + i]));
            let want = chain((0..k).map(pair), 0.0);
            let exact: f64 = (0..k).map(pair).map(|(x, y)| f64::from(x) * f64::from(y)).sum();
            let sum_abs: f64 = (0..k).map(pair).map(|(x, y)| (f64::from(x) * f64::from(y)).abs()).sum();
            if got.to_bits() != want.to_bits() && !(got == 0.0 && want == 0.0) {
                return Err(format!("{m}x{n}x{k}: [{row}][{col}] is {got}, in order {want}, exact {exact}"));
            }
            if (f64::from(got) - exact).abs() > tolerance(k, sum_abs) {
                return Err(format!("{m}x{n}x{k}: [{row}][{col}] is {got}, exact {exact}"));
            }
        }
    }
    match out[m * ldc..].iter().all(|&v| v == CANARY) {
        true => Ok(()),
        false => Err(format!("{m}x{n}x{k}: wrote past the end")),
    }
}

#[test]
fn gemm_bf16_around_tile_edges() {
    let mut failures = Vec::new();
    for m in [0, 1, 15, 16, 17, 31, 32, 33, 48, 49, 65] {
        for n in [1, 15, 16, 17, 32, 33, 48, 63, 64, 65, 80, 113] {
            for k in [1, 31, 32, 33, 64, 80] {
                failures.extend(check_gemm(m, n, k, (m + n) % 3, (m * 7919 + n * 31 + k) as u64).err());
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Several slabs of K, several strips of columns, several passes over rows, with odd remainders.
#[test]
fn gemm_bf16_across_cache_blocks() {
    let mut failures = Vec::new();
    for (m, n, k) in [
        (33, 40, 18 * 32 + 1),
        (50, 272, 1200),
        (530, 48, 640),
        (32, 48, 1300),
        (16, 100, 1300),
        (7, 272, 40),
        (0, 0, 0),
        (3, 5, 0),
        (40, 5, 0),
    ] {
        failures.extend(check_gemm(m, n, k, 5, k as u64).err());
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn gemm_bf16_any_shape(m in 0usize..70, n in 0usize..150, k in 0usize..200, pad in 0usize..20, seed: u64) {
        check_gemm(m, n, k, pad, seed).map_err(TestCaseError::fail)?;
    }
}

/// A row's result does not depend on the rows beside it: `--deterministic` needs that.
#[test]
fn a_rows_bits_do_not_depend_on_m() {
    let (n, k) = (96, 2000);
    let mut next = noise(5);
    let x: Vec<f32> = (0..70 * k).map(|_| next()).collect();
    let mut panels = vec![0u16; 6 * panel_len(k)];
    panels.fill_with(|| bf16_from_f32(next()));
    let mut s = session();
    let mut run = |m: usize| {
        let mut a = vec![0u16; a_blocks_len(m, k)];
        pack_a_bf16(&x[..m * k], m, k, k, &mut a);
        let mut out = vec![0f32; m * n];
        gemm_bf16(&mut s, m, n, k, &a, &panels, &mut out, n);
        out
    };
    let all = run(70);
    for m in [1, 16, 17, 32, 33, 64] {
        let some = run(m);
        assert!(some.iter().zip(&all).all(|(a, b)| a.to_bits() == b.to_bits()), "m = {m}");
    }
}

#[test]
fn gemm_bf16_refuses_short_slices() {
    let mut s = session();
    let refused = |f: &mut dyn FnMut()| {
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(f))
            .expect_err("must be refused")
            .downcast::<String>()
            .map(|s| *s)
            .unwrap_or_default()
    };
    let (a, w) = (vec![0u16; 512], vec![0u16; 1024]);
    let mut out = vec![0f32; 16 * 32];
    gemm_bf16(&mut s, 16, 32, 32, &a, &w, &mut out, 32);
    assert!(refused(&mut || gemm_bf16(&mut s, 17, 32, 32, &a, &w, &mut out, 32)).contains("17 x 32"));
    assert!(refused(&mut || gemm_bf16(&mut s, 16, 33, 32, &a, &w, &mut out, 33)).contains("33 x 32"));
    assert!(refused(&mut || gemm_bf16(&mut s, 16, 32, 33, &a, &w, &mut out, 32)).contains("16 x 33"));
    assert!(refused(&mut || gemm_bf16(&mut s, 16, 32, 32, &a, &w, &mut out[1..], 32)).contains("16 x 32"));
    assert!(refused(&mut || gemm_bf16(&mut s, 16, 32, 32, &a, &w, &mut out, 31)).contains("overlap"));
}
