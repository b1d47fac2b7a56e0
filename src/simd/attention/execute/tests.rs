//! Tables of kernels against the reference, and ways of computing a row against each other.

use proptest::prelude::*;

use super::*;
use crate::cache::{KvGeometry, KvType, PAGE_TOKENS, PagePool, SeqRows};
use crate::simd::Caps;
use crate::simd::attention::AttnShape;
use crate::simd::attention::kernels::BlockKernels;

/// Includes the tables that `select` does not prefer on this machine.
#[test]
fn every_table_agrees_with_the_reference_and_with_itself() {
    let pool = Pool::new(2);
    for dtype in KvType::ALL {
        for (head_dim, group, window, softcap) in [
            (64, 3, None, None),
            (80, 1, Some(70), Some(1.5)),
            (128, 8, None, None),
            (128, 5, None, Some(0.5)),
        ] {
            let (len, h_kv) = (700, 2);
            let (width, kv_width) = (h_kv * group * head_dim, h_kv * head_dim);
            let cache =
                PagePool::new(KvGeometry { n_layers: 1, n_kv_heads: h_kv, head_dim, dtype }, 22).unwrap();
            let kv = cache.layer(0);
            let pages: Vec<u32> = (0..22).map(|i| (i * 5 + 3) % 22).collect();
            let x = |i: usize| ((i * 2_654_435_761) % 1009) as f32 / 504.0 - 1.0;
            let at = |seed: usize, n: usize| (0..n).map(|i| x(i + seed)).collect::<Vec<f32>>();
            for pos in 0..len {
                // SAFETY: one thread.
                unsafe { kv.append(&pages, pos, &at(pos * 977, kv_width), &at(pos * 31 + 7, kv_width)) };
            }
            let scale = 1.0 / (head_dim as f32).sqrt();
            let shape =
                AttnShape { n_heads: h_kv * group, n_kv_heads: h_kv, head_dim, scale, softcap, window };
            let q = at(5, 3 * width);
            let run = |kernels: Option<&'static BlockKernels>, first: usize, rows: usize, q: &[f32]| {
                let rows = SeqRows { pages: &pages, first_pos: first, n_rows: rows, row0: 0 };
                let mut out = vec![0.0; q.len()];
                let mut plan = AttnPlan::new(&shape, &[rows], 2).unwrap();
                let rows = AttnOut::Whole(RowsMut::new(&mut out, width));
                plan.execute(
                    &pool,
                    Choice { many: kernels, few: None, vector_rows: 0 },
                    &kv,
                    Rows::new(q, width),
                    rows,
                );
                out
            };
            let want = run(None, len - 3, 3, &q);
            for table in tiers::all(dtype, head_dim) {
                let got = run(Some(table), len - 3, 3, &q);
                for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                    // |v| <= 1; scores below √128·(b + ...): see tests/kernels/attention.rs. This
                    // bound is the same formula with its largest terms.
                    let tol = if table.bf16 { 2.0 * (12.0 + 1.0) / 512.0 } else { 1e-4 };
                    assert!((got - want).abs() <= tol, "{}: {i}: {got}, want {want}", table.name);
                }
                for row in 0..3 {
                    let alone = run(Some(table), len - 3 + row, 1, &q[row * width..(row + 1) * width]);
                    assert_eq!(alone, got[row * width..(row + 1) * width], "{}: row {row}", table.name);
                }
            }
        }
    }
}

/// Few rows use the vector kernels of the tier below, bit for bit, also if their segments are spread over threads; more
/// rows, and other tiers, are unaffected.
#[test]
fn few_rows_by_vectors_are_those_of_the_tier_below() {
    let (len, h_kv, group, head_dim) = (1300usize, 2usize, 3usize, 64usize);
    let (width, kv_width) = (h_kv * group * head_dim, h_kv * head_dim);
    let pages: Vec<u32> = (0..len.div_ceil(PAGE_TOKENS) as u32).collect();
    let x = |i: usize| ((i * 2_654_435_761) % 1009) as f32 / 504.0 - 1.0;
    let at = |seed: usize, n: usize| (0..n).map(|i| x(i + seed)).collect::<Vec<f32>>();
    let geometry = KvGeometry { n_layers: 1, n_kv_heads: h_kv, head_dim, dtype: KvType::BF16 };
    let cache = PagePool::new(geometry, pages.len()).unwrap();
    let kv = cache.layer(0);
    for pos in 0..len {
        // SAFETY: one thread.
        unsafe { kv.append(&pages, pos, &at(pos * 977, kv_width), &at(pos * 31 + 7, kv_width)) };
    }
    let shape = AttnShape {
        n_heads: h_kv * group,
        n_kv_heads: h_kv,
        head_dim,
        scale: 0.125,
        softcap: None,
        window: None,
    };
    for isa in Isa::supported().into_iter().skip(1) {
        for rows in [1, 2, 3] {
            let q = at(5, rows * width);
            let run = |isa: Isa, vector_rows: usize| {
                let rows = SeqRows { pages: &pages, first_pos: len - rows, n_rows: rows, row0: 0 };
                let mut plan = AttnPlan::new(&shape, &[], 2).unwrap().with_vector_rows(vector_rows);
                plan.rebuild(&[rows]);
                let mut out = vec![0.0; q.len()];
                plan.run(&Pool::new(2), isa, &kv, &q, &mut out);
                out
            };
            let few = isa == Isa::Amx && rows * group <= 8;
            let like = if few { Isa::Avx512 } else { isa };
            assert_eq!(run(isa, 8), run(like, 0), "{isa}, {rows} positions of {group} heads");
        }
    }
}

/// `n` values from -1 to 1 by a seed, from the `from`-th on.
fn values(seed: u64, from: usize, n: usize) -> Vec<f32> {
    let x = |i: u64| ((seed ^ i).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f32 / 8_388_608.0 - 1.0;
    (from..from + n).map(|i| x(i as u64)).collect()
}

/// Keys and values of `len` tokens of a layer, and the pages that they lie in. Slots after the last token hold NaN.
fn stored(len: usize, n_kv_heads: usize, head_dim: usize, dtype: KvType, seed: u64) -> (PagePool, Vec<u32>) {
    let (n_pages, width) = (len.div_ceil(PAGE_TOKENS), n_kv_heads * head_dim);
    let cache = PagePool::new(KvGeometry { n_layers: 1, n_kv_heads, head_dim, dtype }, n_pages).unwrap();
    let pages: Vec<u32> = (0..n_pages).map(|i| ((i + seed as usize % 97) % n_pages) as u32).collect();
    let nan = vec![f32::NAN; width];
    for pos in 0..n_pages * PAGE_TOKENS {
        let (k, v) = if pos < len {
            (values(seed, pos * 977, width), values(seed, pos * 31 + 7, width))
        } else {
            (nan.clone(), nan.clone())
        };
        // SAFETY: one thread.
        unsafe { cache.layer(0).append(&pages, pos, &k, &v) };
    }
    (cache, pages)
}

/// Lengths around pages, blocks and segments, and windows.
fn lengths_and_windows() -> (impl Strategy<Value = usize>, impl Strategy<Value = Option<usize>>) {
    let edges = [1usize, 31, 32, 33, 63, 64, 65, 127, 128, 129, 511, 512, 513, 700];
    let window = prop_oneof![
        2 => Just(None),
        1 => prop::sample::select(vec![1usize, 17, 64, 100, 513]).prop_map(Some),
    ];
    (prop_oneof![prop::sample::select(edges.to_vec()), 1..=700usize], window)
}

/// Rows of a prompt that are attended by several row blocks at a time, or by parts of them that are merged, have the bits that each
/// has alone, in every table, and agree with the reference up to rounding, whatever the slots without a token hold.
#[test]
fn row_blocks_together_have_the_bits_of_rows_alone() {
    use proptest::test_runner::{Config, TestRunner};
    let (length, window) = lengths_and_windows();
    let cases = (
        length,
        prop::sample::select(vec![32usize, 80, 128]),
        (1..=2usize, prop::sample::select(vec![1usize, 3, 4, 8, 17, 32])),
        (window, prop::sample::select(vec![None, Some(1.0f32)]), prop::sample::select(KvType::ALL.to_vec())),
        (any::<u64>(), 1..200usize, prop::sample::select(vec![1usize, 2, 8]), any::<bool>()),
    );
    let pool = Pool::new(1);
    let mut runner = TestRunner::new(Config { cases: 60, failure_persistence: None, ..Config::default() });
    runner
        .run(
            &cases,
            |(len, head_dim, (h_kv, group), (window, softcap, dtype), (seed, rows, threads, by_page))| {
                let (rows, width) = (rows.min(len), h_kv * group * head_dim);
                let (cache, pages) = stored(len, h_kv, head_dim, dtype, seed);
                let kv = cache.layer(0);
                let scale = 3.0 / (head_dim as f32).sqrt();
                let shape =
                    AttnShape { n_heads: h_kv * group, n_kv_heads: h_kv, head_dim, scale, softcap, window };
                let q = values(seed, 5, rows * width);
                let run = |kernels: Option<&'static BlockKernels>, seqs: &[SeqRows<'_>], threads: usize| {
                    let mut out = vec![0.0; q.len()];
                    let mut plan = AttnPlan::new(&shape, &[], threads).unwrap();
                    if by_page {
                        plan = plan.in_segments_of(PAGE_TOKENS);
                    }
                    plan.rebuild(seqs);
                    let choice = Choice { many: kernels, few: None, vector_rows: 0 };
                    let to = AttnOut::Whole(RowsMut::new(&mut out, width));
                    plan.execute(&pool, choice, &kv, Rows::new(&q, width), to);
                    out
                };
                let row = |row0| SeqRows { pages: &pages, first_pos: len - rows + row0, n_rows: 1, row0 };
                let together = SeqRows { n_rows: rows, ..row(0) };
                let alone: Vec<_> = (0..rows).map(row).collect();
                let reference = run(None, &[together], threads);
                for table in tiers::all(dtype, head_dim) {
                    let (got, want) = (run(Some(table), &[together], threads), run(Some(table), &alone, 1));
                    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    prop_assert_eq!(bits(&got), bits(&want), "{}", table.name);
                    // |v| < 1, and P and q may be bf16: as in `every_table_agrees_with_the_reference_and_with_itself`.
                    let most = scale * head_dim as f32;
                    let tolerance = 2.0 * (most + 1.0) / 512.0;
                    for (got, want) in got.iter().zip(&reference) {
                        prop_assert!((got - want).abs() <= tolerance, "{}: {} for {}", table.name, got, want);
                    }
                }
                Ok(())
            },
        )
        .unwrap();
}

/// Softmax that overlaps with the products of other blocks gives the same bits as one kernel after the other, and
/// agrees with the reference up to rounding, whatever the slots without a token hold.
#[cfg(target_os = "linux")]
#[test]
fn runs_of_blocks_have_the_bits_of_blocks_one_by_one() {
    use proptest::test_runner::{Config, TestRunner};
    if !Caps::get().avx512_bf16 {
        println!("skipped: this CPU lacks AVX-512 BF16");
        return;
    }
    if crate::amx::available().is_err() {
        crate::amx::emulate::install().unwrap();
    }
    let tiles = &crate::simd::attention::amx::KERNELS;
    let one_by_one: &'static BlockKernels =
        Box::leak(Box::new(BlockKernels { run: None, name: "one by one", ..*tiles }));
    let pool = Pool::new(2);
    let (length, window) = lengths_and_windows();
    let cases = (
        length,
        prop::sample::select(vec![64usize, 96, 128, 256]),
        (1..=2usize, prop::sample::select(vec![1usize, 2, 3, 4, 5, 7, 8, 17, 32])),
        (window, prop::sample::select(vec![None, Some(1.0f32), Some(50.0)])),
        (any::<u64>(), 1..40usize),
    );
    let mut runner = TestRunner::new(Config { cases: 40, failure_persistence: None, ..Config::default() });
    runner
        .run(&cases, |(len, head_dim, (h_kv, group), (window, softcap), (seed, rows))| {
            let (rows, width) = (rows.min(len), h_kv * group * head_dim);
            let (cache, pages) = stored(len, h_kv, head_dim, KvType::BF16, seed);
            let kv = cache.layer(0);
            let scale = 3.0 / (head_dim as f32).sqrt();
            let shape =
                AttnShape { n_heads: h_kv * group, n_kv_heads: h_kv, head_dim, scale, softcap, window };
            let q = values(seed, 5, rows * width);
            let run = |kernels: Option<&'static BlockKernels>| {
                let rows = SeqRows { pages: &pages, first_pos: len - rows, n_rows: rows, row0: 0 };
                let mut out = vec![0.0; q.len()];
                let mut plan = AttnPlan::new(&shape, &[rows], 2).unwrap();
                let rows = AttnOut::Whole(RowsMut::new(&mut out, width));
                plan.execute(
                    &pool,
                    Choice { many: kernels, few: None, vector_rows: 0 },
                    &kv,
                    Rows::new(&q, width),
                    rows,
                );
                out
            };
            let (got, want) = (run(Some(tiles)), run(Some(one_by_one)));
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(&got), bits(&want));
            // |v| < 1, and P and q are bf16: as in `every_table_agrees_with_the_reference_and_with_itself`.
            let most = scale * head_dim as f32;
            let tolerance = 2.0 * (most + 1.0) / 512.0;
            for (got, want) in got.iter().zip(&run(None)) {
                prop_assert!((got - want).abs() <= tolerance, "{} for {}", got, want);
            }
            Ok(())
        })
        .unwrap();
}
