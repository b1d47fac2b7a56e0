//! AMX kernels against naive products, on shapes around the tiles' edges: to the bit against the order of
//! sums that the kernels promise, and within the bound of that arithmetic against f64.
//! Without AMX hardware the kernels' machine code runs on emulated tiles.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use proptest::prelude::*;
use tandem::amx::{
    self,
    attention::{pv_bf16, qk_bf16, qk_bf16_pages},
    bf16::{Panels, gemm_bf16, gemm_bf16_raw},
    emulate, int8,
    pack::{a_blocks_len, bf16_from_f32, pack_a_bf16, pack_panel_bf16, panel_len},
    session::{Session, Shapes},
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
    let mut asked = vec![CANARY; out.len()];
    let copied = Copied { panels: &panels, k, tall: false, at: nowhere() };
    // SAFETY: A and panels are whole, `asked` is as large as `out`, which was checked.
    unsafe { gemm_bf16_raw(&mut session(), m, n, k, a.as_ptr(), &copied, asked.as_mut_ptr(), ldc) };
    if asked.iter().zip(&out).any(|(a, b)| a.to_bits() != b.to_bits()) {
        return Err(format!("{m}x{n}x{k}: stored panels and panels made on the way differ"));
    }
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

/// Several chunks of K, several passes over rows, rings and buffers, streamed C, with odd remainders.
#[test]
fn gemm_bf16_across_cache_blocks() {
    let mut failures = Vec::new();
    for (m, n, k) in [
        (33, 40, 18 * 32 + 1),
        (50, 272, 1200),
        (530, 48, 640),
        (512, 80, 1100),
        (96, 304, 6000),
        (300, 40, 4200),
        (64, 36, 2100),
        (48, 20, 2100),
        (20, 36, 4100),
        (32, 16, 40),
        (530, 1019, 40),
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

/// Panels that the product has to ask for, piece by piece.
struct Copied<'a> {
    panels: &'a [u16],
    k: usize,
    tall: bool,
    /// The lowest and the highest address that a tile was made at.
    at: [AtomicUsize; 2],
}

fn nowhere() -> [AtomicUsize; 2] {
    [AtomicUsize::new(usize::MAX), AtomicUsize::new(0)]
}

impl Copied<'_> {
    fn made_at(&self, out: *mut u16) {
        self.at[0].fetch_min(out.addr(), Relaxed);
        self.at[1].fetch_max(out.addr(), Relaxed);
    }

    /// Bytes from the first tile to the last.
    fn span(&self) -> usize {
        self.at[1].load(Relaxed) - self.at[0].load(Relaxed)
    }
}

impl Panels for Copied<'_> {
    fn stored(&self, _: usize, _: usize) -> Option<*const u16> {
        None
    }
    unsafe fn fill(&self, panel: usize, step: usize, out: *mut u16) {
        let tile = &self.panels[panel * panel_len(self.k)..][step * 512..(step + 1) * 512];
        self.made_at(out);
        // SAFETY: `out` has room for a tile.
        unsafe { out.copy_from_nonoverlapping(tile.as_ptr(), tile.len()) };
    }
    unsafe fn quarter(&self, panel: usize, step: usize, quarter: usize, out: *mut u16) {
        let tile = &self.panels[panel * panel_len(self.k)..][step * 512..(step + 1) * 512];
        let part = &tile[quarter * 128..(quarter + 1) * 128];
        self.made_at(out);
        // SAFETY: `out` has room for a tile.
        unsafe { out.add(quarter * 128).copy_from_nonoverlapping(part.as_ptr(), part.len()) };
    }
    fn ring_of_64(&self) -> bool {
        self.tall
    }
    fn prefetch(&self, panel: usize, step: usize, quarter: usize) {
        assert!(
            quarter < 4 && panel * panel_len(self.k) + (step + 1) * 512 <= self.panels.len(),
            "{panel}, {step}"
        );
    }
}

/// One block of four times 16 rows, its tiles of weights from a ring: the same bits as two blocks, also where only the last rows are few, K
/// goes round the ring many times or is too long for it.
#[test]
fn a_block_of_64_rows_has_the_bits_of_two_of_32() {
    let shapes: [(usize, usize, usize); 7] = [
        (64, 48, 700),
        (49, 5, 40),
        (63, 40, 2100),
        (50, 17, 32),
        (64, 7, 8300),
        (48, 20, 300),
        (65, 20, 300),
    ];
    for (m, n, k) in shapes {
        let mut next = noise(k as u64);
        let x: Vec<f32> = (0..m * k).map(|_| next()).collect();
        let mut a = vec![0u16; a_blocks_len(m, k)];
        pack_a_bf16(&x, m, k, k, &mut a);
        let mut panels = vec![0u16; n.div_ceil(16) * panel_len(k)];
        panels.fill_with(|| bf16_from_f32(next()));
        let ldc = n + 3;
        let run = |tall: bool| {
            let mut out = vec![CANARY; m * ldc];
            let panels = Copied { panels: &panels, k, tall, at: nowhere() };
            // SAFETY: A blocks and panels of these shapes; `out` has the rows and columns.
            unsafe { gemm_bf16_raw(&mut session(), m, n, k, a.as_ptr(), &panels, out.as_mut_ptr(), ldc) };
            (out, panels.span())
        };
        let ((tall, ring), (flat, panel)) = (run(true), run(false));
        // The ring is shorter than a pair of panels, which a K too long for it falls back to: the block of 64 rows was really taken.
        if (49..=64).contains(&m) && (700..8000).contains(&k) {
            assert!(ring < panel, "{m} x {n} x {k}: tiles over {ring} and {panel} bytes");
        }
        assert!(tall.iter().zip(&flat).all(|(a, b)| a.to_bits() == b.to_bits()), "{m} x {n} x {k}");
        assert!(
            tall.chunks(ldc).all(|row| row[n..] == [CANARY; 3] && !row[..n].contains(&CANARY)),
            "{m} x {n} x {k}"
        );
    }
}

/// Workers that own columns of one output: the same bits as one worker, whatever the split.
#[test]
fn workers_may_split_columns() {
    let (m, n, k): (usize, usize, usize) = (37, 100, 700);
    let mut next = noise(11);
    let x: Vec<f32> = (0..m * k).map(|_| next()).collect();
    let mut a = vec![0u16; a_blocks_len(m, k)];
    pack_a_bf16(&x, m, k, k, &mut a);
    let mut panels = vec![0u16; n.div_ceil(16) * panel_len(k)];
    panels.fill_with(|| bf16_from_f32(next()));
    let mut alone = vec![0f32; m * n];
    gemm_bf16(&mut session(), m, n, k, &a, &panels, &mut alone, n);
    let mut split = vec![CANARY; m * n];
    let out = split.as_mut_ptr() as usize;
    std::thread::scope(|scope| {
        for (from, to) in [(0, 48), (48, 80), (80, n)] {
            let (a, panels) =
                (&a, Copied { panels: &panels[from / 16 * panel_len(k)..], k, tall: false, at: nowhere() });
            scope.spawn(move || {
                let to_column = (out as *mut f32).wrapping_add(from);
                // SAFETY: A and panels are whole; each worker writes its own columns of `split`, which lives on.
                unsafe { gemm_bf16_raw(&mut session(), m, to - from, k, a.as_ptr(), &panels, to_column, n) };
            });
        }
    });
    assert!(split.iter().zip(&alone).all(|(a, b)| a.to_bits() == b.to_bits()));
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

const HEADS: [usize; 5] = [64, 80, 96, 128, 256];

/// K of 32 tokens of one head: `[token/16][head_dim/2][16][2]`.
fn k_page(k: &[f32], head_dim: usize) -> Vec<u16> {
    let mut page = vec![0u16; 32 * head_dim];
    for (token, row) in k.chunks_exact(head_dim).enumerate() {
        for (d, &v) in row.iter().enumerate() {
            page[token / 16 * 16 * head_dim + d / 2 * 32 + token % 16 * 2 + d % 2] = bf16_from_f32(v);
        }
    }
    page
}

/// V of 32 tokens of one head: `[token/2][head_dim][2]`.
fn v_page(v: &[f32], head_dim: usize) -> Vec<u16> {
    let mut page = vec![0u16; 32 * head_dim];
    for (token, row) in v.chunks_exact(head_dim).enumerate() {
        for (d, &x) in row.iter().enumerate() {
            page[(token / 2 * head_dim + d) * 2 + token % 2] = bf16_from_f32(x);
        }
    }
    page
}

fn same(
    got: f32,
    want: f32,
    pairs: impl Iterator<Item = (f32, f32)>,
    start: f32,
    what: &str,
) -> Result<(), String> {
    let (mut exact, mut sum_abs, mut k) = (f64::from(start), f64::from(start).abs(), 0);
    for (x, y) in pairs {
        let product = f64::from(x) * f64::from(y);
        (exact, sum_abs, k) = (exact + product, sum_abs + product.abs(), k + 1);
    }
    let bits = got.to_bits() == want.to_bits() || (got == 0.0 && want == 0.0);
    if !bits || (f64::from(got) - exact).abs() > tolerance(k, sum_abs) {
        return Err(format!("{what}: got {got}, in order {want}, exact {exact}"));
    }
    Ok(())
}

/// As many pages to prefetch as `pages`, of which some do not exist.
fn ahead(pages: &[&[u16]]) -> Vec<*const u16> {
    pages.iter().enumerate().map(|(i, page)| page.as_ptr().wrapping_add(i << 40)).collect()
}

fn check_qk(rows: usize, head_dim: usize, pages: usize, pad: usize, seed: u64) -> Result<(), String> {
    let mut next = noise(seed);
    let (tokens, q_stride) = (32 * pages, head_dim + pad);
    let q: Vec<f32> = (0..(rows - 1) * q_stride + head_dim).map(|_| next()).collect();
    let q16: Vec<u16> = q.iter().map(|&v| bf16_from_f32(v)).collect();
    let k: Vec<f32> = (0..tokens * head_dim).map(|_| next()).collect();
    let stored: Vec<Vec<u16>> = k.chunks_exact(32 * head_dim).map(|k| k_page(k, head_dim)).collect();
    let refs: Vec<&[u16]> = stored.iter().map(|p| &p[..]).collect();
    let s_stride = tokens + pad;
    let mut s = vec![CANARY; rows * s_stride + 16];
    let mut tiles = session();
    qk_bf16_pages(&mut tiles, &q16, q_stride, rows, head_dim, &refs, &[], &mut s, s_stride);
    // Prefetching changes no bit. A prefetch faults nowhere, so pages ahead may lie anywhere.
    let mut with = vec![CANARY; s.len()];
    qk_bf16_pages(&mut tiles, &q16, q_stride, rows, head_dim, &refs, &ahead(&refs), &mut with, s_stride);
    if !s.iter().zip(&with).all(|(a, b)| a.to_bits() == b.to_bits()) {
        return Err(format!(
            "QK rows {rows}, head_dim {head_dim}, pages {pages}: other bits with pages ahead"
        ));
    }
    for (i, &got) in s.iter().enumerate() {
        let (row, token) = (i / s_stride, i % s_stride);
        let what = format!("QK rows {rows}, head_dim {head_dim}, pages {pages}: [{row}][{token}]");
        if row >= rows || token >= tokens {
            if got != CANARY {
                return Err(format!("{what} was written"));
            }
            continue;
        }
        let pairs = || (0..head_dim).map(|d| (q[row * q_stride + d], k[token * head_dim + d]));
        same(got, chain(pairs(), 0.0), pairs(), 0.0, &what)?;
    }
    // One group at a time gives the same bits.
    for group in 0..2 * pages {
        let mut one = vec![CANARY; (rows - 1) * 16 + 16];
        let k = &refs[group / 2][group % 2 * 16 * head_dim..][..16 * head_dim];
        qk_bf16(&mut tiles, &q16, q_stride, rows, head_dim, k, &mut one, 16);
        for (i, got) in one.iter().enumerate() {
            if got.to_bits() != s[i / 16 * s_stride + group * 16 + i % 16].to_bits() {
                return Err(format!("QK rows {rows}, head_dim {head_dim}: group {group} differs at {i}"));
            }
        }
    }
    Ok(())
}

fn check_pv(rows: usize, head_dim: usize, pages: usize, pad: usize, seed: u64) -> Result<(), String> {
    let mut next = noise(seed);
    let (tokens, p_stride) = (32 * pages, 32 * pages + pad);
    let p: Vec<f32> = (0..(rows - 1) * p_stride + tokens).map(|_| next().abs()).collect();
    let p16: Vec<u16> = p.iter().map(|&v| bf16_from_f32(v)).collect();
    let v: Vec<f32> = (0..tokens * head_dim).map(|_| next()).collect();
    let stored: Vec<Vec<u16>> = v.chunks_exact(32 * head_dim).map(|v| v_page(v, head_dim)).collect();
    let refs: Vec<&[u16]> = stored.iter().map(|p| &p[..]).collect();
    let o_stride = head_dim + pad;
    let before: Vec<f32> = (0..rows * o_stride + 16).map(|_| next()).collect();
    let mut o = before.clone();
    pv_bf16(&mut session(), &p16, p_stride, rows, &refs, &[], head_dim, &mut o, o_stride);
    let mut with = before.clone();
    pv_bf16(&mut session(), &p16, p_stride, rows, &refs, &ahead(&refs), head_dim, &mut with, o_stride);
    if !o.iter().zip(&with).all(|(a, b)| a.to_bits() == b.to_bits()) {
        return Err(format!(
            "PV rows {rows}, head_dim {head_dim}, pages {pages}: other bits with pages ahead"
        ));
    }
    for (i, (&got, &start)) in o.iter().zip(&before).enumerate() {
        let (row, d) = (i / o_stride, i % o_stride);
        let what = format!("PV rows {rows}, head_dim {head_dim}, pages {pages}: [{row}][{d}]");
        if row >= rows || d >= head_dim {
            if got != start {
                return Err(format!("{what} was written"));
            }
            continue;
        }
        let pairs = || (0..tokens).map(|t| (p[row * p_stride + t], v[t * head_dim + d]));
        same(got, chain(pairs(), start), pairs(), start, &what)?;
    }
    Ok(())
}

#[test]
fn attention_products_for_every_row_count_and_head_size() {
    let mut failures = Vec::new();
    for head_dim in HEADS {
        for rows in 1..=32 {
            let pages = [1, 2, 3][rows % 3];
            failures.extend(check_qk(rows, head_dim, pages, rows % 2 * 3, (rows * head_dim) as u64).err());
            failures.extend(check_pv(rows, head_dim, pages, rows % 2 * 3, (rows * head_dim) as u64).err());
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// More pages than one kernel call takes.
#[test]
fn attention_products_over_many_pages() {
    for (rows, head_dim) in [(3, 64), (20, 32)] {
        for pages in [63, 64, 65, 129] {
            check_qk(rows, head_dim, pages, 0, 3).unwrap();
            check_pv(rows, head_dim, pages, 0, 3).unwrap();
        }
    }
    pv_bf16(&mut session(), &[], 0, 1, &[], &[], 64, &mut [], 64);
    qk_bf16_pages(&mut session(), &[], 64, 1, 64, &[], &[], &mut [], 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn attention_products_of_any_shape(
        rows in 1usize..=32, sixteenths in 2usize..=17, pages in 1usize..6, pad in 0usize..40, seed: u64,
    ) {
        check_qk(rows, 16 * sixteenths, pages, pad, seed).map_err(TestCaseError::fail)?;
        check_pv(rows, 16 * sixteenths, pages, pad, seed).map_err(TestCaseError::fail)?;
    }
}

/// What a page holds in tokens that do not exist must not leak into those that do, not even as NaN.
#[test]
fn garbage_keys_stay_in_their_own_columns() {
    for (rows, head_dim) in [(4, 80), (32, 128)] {
        let q = vec![0x3f80u16; rows * head_dim];
        let mut page = k_page(&vec![1.0; 32 * head_dim], head_dim);
        for d in 0..head_dim {
            for token in 20..32 {
                page[token / 16 * 16 * head_dim + d / 2 * 32 + token % 16 * 2 + d % 2] = 0x7fc1;
            }
        }
        let mut s = vec![0f32; rows * 32];
        qk_bf16_pages(&mut session(), &q, head_dim, rows, head_dim, &[&page], &[], &mut s, 32);
        for (i, v) in s.iter().enumerate() {
            assert!(
                if i % 32 < 20 { *v == head_dim as f32 } else { v.is_nan() },
                "row {}, token {}",
                i / 32,
                i % 32
            );
        }
    }
}

/// Each of the four registers, each number of rows; nothing behind the rows is written.
#[test]
fn int8_products_are_exact() {
    for rows in 1..=16 {
        let mut next = noise(rows as u64);
        let mut bytes = |n: usize| -> Vec<i8> { (0..n).map(|_| (next() * 128.0) as i8).collect() };
        let (a, b) = (bytes(rows * int8::TILE_K), bytes(int8::B_BYTES));
        let mut session = session();
        session.load(&Shapes::int8(rows));
        for i in 0..4 {
            let mut c = [77; int8::C_LEN];
            let (x, w, to) = (a.as_ptr(), b.as_ptr(), c.as_mut_ptr());
            // SAFETY: the shapes are loaded; the arrays are as long as they say.
            unsafe {
                match i {
                    0 => int8::product::<0>(x, w, to),
                    1 => int8::product::<1>(x, w, to),
                    2 => int8::product::<2>(x, w, to),
                    _ => int8::product::<3>(x, w, to),
                }
            }
            for (at, &got) in c.iter().enumerate() {
                let (row, col) = (at / 16, at % 16);
                let product =
                    |k: usize| i32::from(a[row * 32 + k]) * i32::from(b[k / 4 * 64 + col * 4 + k % 4]);
                let want = if row < rows { (0..32).map(product).sum() } else { 77 };
                assert_eq!(got, want, "{rows} rows, register {i}: row {row}, column {col}");
            }
        }
    }
}
