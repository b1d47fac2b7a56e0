//! Attention kernels of accelerators against an oracle in f64, and against themselves: the same bits however a
//! row is batched or chunked.
//!
//! Tolerance. With u = 2^-24 (f32), b half an ulp of the KV type at 1 (2^-8 bf16, 2^-11 f16), n tokens seen in
//! t tiles, A = max_t scale·Σ_d |q_d k_td|:
//!
//! * products of 16-bit floats are exact in f32; tensor cores may truncate where they add: 2u a step. With the
//!   scale rounded twice and the largest score subtracted: δe <= (2·head_dim + 8)·u·A;
//! * a soft-cap c has slope <= 1, so it makes no error larger; 2c·(½ − 1/(1 + 2^y)) adds those of 2^y (6u with its argument's,
//!   at slope ¼ of 2c), of the sum and the quotient (5u of up to 2c), of the difference and the product: δe grows by 16uc;
//! * a score of q8 is multiplied by its key's scale, which is rounded (with the product before: 2u of A);
//! * a weight is 2^x with x rounded as above (4u), rescaled at most once a tile, warp and split (5u each, the
//!   exponents' roundings telescope to 2uA), and rounded to the KV type (b):
//!   η = e^(δe + 2uA) − 1 + (4 + 5·(t + 8))·u + b;
//! * sums of up to n + t + 8 terms: 2u each. Numerator and denominator carry both:
//!   |δout| <= 2·(η + 2·(n + t + 8)·u)·Σ w_t |v_t|
//! * an f16 weight below 2^-14 of the largest is rounded absolutely: 2^-25·Σ |v_t| more, twice; of q8 it is the weight times the
//!   value's scale, and the largest of these products is between 1 and 2: 2^-25·Σ |code_t|;
//! * a sink is one more score, of which no product is taken: A is at least its magnitude;
//! * out is rounded: half an ulp of its type.

mod world;

use std::sync::Arc;

use crate::support::gpu::memory::{LANE, bytes, decode, encode, epsilon, scale_of, store, stored};
use crate::support::gpu::{self, Rng};
use proptest::prelude::*;
use tandem::cache::KvType;
use tandem::device::kernels::abi::{ATTENTION_FINAL, DecodeItem, PrefillItem};
use tandem::device::kernels::attention::*;
use tandem::device::{Buffer, DevPtr, PartialRows, Runtime};
use tandem::tensor::Half;
use world::*;

const PAGE: usize = 32;
/// What memory holds that nobody should read, or write.
const CANARY: u32 = 0x7fc0_babe;

/// The output type is the other one, since the kernels do not tie them; a device below 80 has f16 alone.
fn shape(
    rt: &Arc<dyn Runtime>,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    kv: KvType,
) -> AttentionShape {
    let out = if kv == KvType::BF16 { Half::F16 } else { Half::BF16 };
    let f16 = if kv.is_scaled() { kv } else { KvType::F16 };
    let (kv, out) = if rt.info().sm < 80 { (f16, Half::F16) } else { (kv, out) };
    AttentionShape {
        n_heads,
        n_kv_heads,
        head_dim,
        scale: 1.0 / (head_dim as f32).sqrt(),
        softcap: None,
        kv,
        out,
    }
}

const TYPES: [KvType; 3] = [KvType::F16, KvType::BF16, KvType::Q8];
const CONTEXTS: [usize; 10] = [1, 31, 32, 33, 255, 256, 257, 512, 513, 1000];

fn all(world: &World) -> Vec<usize> {
    (0..world.parts.len()).collect()
}

/// With every kernel that prefill can run on.
fn run_and_check(rt: &Arc<dyn Runtime>, world: &World, what: &str) {
    for kernel in world.kernels(rt) {
        let world = world.on(kernel);
        world.check(&all(&world), &world.run(rt, &all(&world)), &format!("{what} {kernel:?}"));
    }
}

#[test]
fn decode_matches_the_oracle_for_every_head_size() {
    for rt in gpu::runtimes() {
        for kv in TYPES {
            for hd in HEAD_DIMS {
                let parts: Vec<Part> = CONTEXTS.iter().map(|&n| Part::decode(n - 1)).collect();
                let world = World::new(shape(&rt, 4, 2, hd, kv), None, &parts, 1.0, 1);
                run_and_check(&rt, &world, &format!("{kv:?} {hd}"));
            }
        }
    }
}

#[test]
fn decode_of_every_group() {
    for rt in gpu::runtimes() {
        for (i, (heads, kv_heads)) in
            [(1, 1), (2, 1), (6, 2), (4, 1), (5, 1), (12, 2), (7, 1), (8, 1), (12, 1), (17, 1)]
                .into_iter()
                .enumerate()
        {
            let parts = [Part::decode(39), Part::decode(299)];
            let world =
                World::new(shape(&rt, heads, kv_heads, 64, TYPES[i % 3]), None, &parts, 1.0, i as u64);
            run_and_check(&rt, &world, &format!("{heads} heads, {kv_heads} KV heads"));
        }
    }
}

#[test]
fn decode_with_a_window() {
    for rt in gpu::runtimes() {
        for (window, kv) in
            [1, 17, 32, 300].iter().flat_map(|&w| [KvType::BF16, KvType::Q8].map(|kv| (w, kv)))
        {
            let parts: Vec<Part> = [0, 16, 17, 40, 255, 256, 599].map(Part::decode).into();
            let world = World::new(shape(&rt, 4, 2, 64, kv), Some(window), &parts, 1.0, window as u64);
            run_and_check(&rt, &world, &format!("{kv:?}, window {window}"));
        }
    }
}

/// Scores far apart: one token takes all the weight, and the maximum moves from tile to tile.
#[test]
fn peaked_scores() {
    for rt in gpu::runtimes() {
        for kv in TYPES {
            let parts = [Part::decode(599), Part::chunk(70, 100)];
            let world = World::new(shape(&rt, 4, 2, 64, kv), None, &parts, 8.0, 3);
            run_and_check(&rt, &world, &format!("{kv:?}"));
        }
    }
}

/// Scores that a cap hardly bends, and scores of which most reach it; tokens that a row must not see stay unseen.
#[test]
fn soft_capped_scores() {
    for rt in gpu::runtimes() {
        for (i, hd) in HEAD_DIMS.into_iter().enumerate() {
            for (cap, k_scale) in [(50.0, 1.0), (1.5, 8.0)] {
                let parts = [
                    Part::decode(299),
                    Part::chunk(33, 65),
                    Part { partial: true, ..Part::decode(70) },
                    Part { partial: true, ..Part::chunk(60, 20) },
                ];
                let shape = AttentionShape { softcap: Some(cap), ..shape(&rt, 4, 2, hd, TYPES[i % 3]) };
                let window = (i % 2 == 1).then_some(50);
                let world = World::new(shape, window, &parts, k_scale, i as u64);
                run_and_check(&rt, &world, &format!("{hd}, cap {cap}, window {window:?}"));
            }
        }
    }
}

/// Sinks join rows that are finished here, once, however many splits a row has; partial rows leave without. One that is no logit at all
/// changes no bit.
#[test]
fn sinks_join_finished_rows() {
    for rt in gpu::runtimes() {
        for (i, hd) in HEAD_DIMS.into_iter().enumerate() {
            let parts = [
                Part::decode(699),
                Part::decode(3),
                Part::chunk(33, 65),
                Part { partial: true, ..Part::decode(70) },
                Part { partial: true, ..Part::chunk(60, 20) },
                Part { from: 64, ..Part::chunk(40, 9) }, // sees nothing
            ];
            let window = (i % 2 == 1).then_some(50);
            let without = World::new(shape(&rt, 6, 2, hd, TYPES[i % 3]), window, &parts, 2.0, i as u64);
            let world = without.clone().with_sinks(i as u64);
            run_and_check(&rt, &world, &format!("{hd}, window {window:?}"));
            for kernel in without.kernels(&rt) {
                let run = |world: &World| world.on(kernel).run(&rt, &all(world));
                let nothing = World { sinks: vec![f32::NEG_INFINITY; 6], ..without.clone() };
                assert!(run(&nothing) == run(&without), "{hd} {kernel:?}: sinks of no weight");
                assert!(run(&world) != run(&without), "{hd} {kernel:?}: sinks without effect");
            }
        }
    }
}

#[test]
fn prefill_matches_the_oracle_for_every_head_size() {
    for rt in gpu::runtimes() {
        for kv in TYPES {
            for hd in HEAD_DIMS {
                // Chunks around the tile, at the start, in the middle of a tile, after a long context.
                let parts =
                    [Part::chunk(0, 5), Part::chunk(0, 64), Part::chunk(33, 65), Part::chunk(200, 31)];
                let world = World::new(shape(&rt, 2, 1, hd, kv), None, &parts, 1.0, 2);
                run_and_check(&rt, &world, &format!("{kv:?} {hd}"));
            }
        }
    }
}

#[test]
fn prefill_of_every_group_and_window() {
    for rt in gpu::runtimes() {
        for (i, (heads, kv_heads, window)) in
            [(1, 1, None), (3, 1, Some(1)), (4, 2, Some(20)), (8, 1, Some(64)), (12, 1, Some(100))]
                .into_iter()
                .enumerate()
        {
            let parts = [Part::chunk(0, 70), Part::chunk(150, 20)];
            let world =
                World::new(shape(&rt, heads, kv_heads, 64, TYPES[i % 3]), window, &parts, 1.0, i as u64);
            run_and_check(&rt, &world, &format!("{heads} heads, {kv_heads} KV heads, window {window:?}"));
        }
    }
}

/// Rows of which this device holds only the later tokens, or none at all, leave as partials.
#[test]
fn partial_rows_are_not_normalised() {
    for rt in gpu::runtimes() {
        for hd in HEAD_DIMS {
            let part =
                |first_pos, n_rows, from| Part { from, partial: true, ..Part::chunk(first_pos, n_rows) };
            let parts = [
                part(600, 1, 0),
                part(600, 1, 288),
                part(300, 1, 320), // nothing here
                part(90, 40, 32),
                part(0, 10, 0),
                part(60, 10, 64), // some rows see nothing here
                part(0, 77, 96),  // none does
                // Only earlier tokens; in the last two, none.
                Part { to: 320, ..part(600, 1, 0) },
                Part { to: 64, ..part(90, 40, 0) },
                Part { to: 0, ..part(90, 1, 0) },
                Part { to: 0, ..part(64, 9, 0) },
                Part::decode(30),
            ];
            for (window, kv) in [(None, KvType::BF16), (Some(50), KvType::BF16), (None, KvType::Q8)] {
                let world = World::new(shape(&rt, 4, 2, hd, kv), window, &parts, 1.0, 5);
                run_and_check(&rt, &world, &format!("{kv:?} {hd}, window {window:?}"));
            }
        }
    }
}

/// A row that sees nothing at all and is finished here is zero, not NaN; so are padding rows.
#[test]
fn nothing_seen_is_zero() {
    for rt in gpu::runtimes() {
        let nothing = |n_rows| Part { from: 64, ..Part::chunk(40, n_rows) };
        let parts = [nothing(1), nothing(9), Part::decode(12)];
        let world = World::new(shape(&rt, 4, 2, 64, KvType::F16), None, &parts, 1.0, 6);
        // The row between the first two parts becomes padding.
        let padding = world.row0[1] - 1;
        let (plan, table) = world.plan(&all(&world), padding as u32..padding as u32 + 1);
        let got = world.run_plan(&rt, &plan, &table);
        let w = world.width();
        assert!(got.out[w..world.row0[1] * w + 9 * w].iter().all(|&x| x == 0));
        assert!(got.out[..w].iter().any(|&x| x != 0), "the first row is nobody's");
    }
}

/// Split attention: the tokens before `at` on one side, the others on the other, merged.
#[test]
fn partials_merged_in_any_split_equal_the_whole() {
    for rt in gpu::runtimes() {
        for (kv, hd, at) in [
            (KvType::BF16, 64, 32),
            (KvType::F16, 80, 256),
            (KvType::BF16, 128, 544),
            (KvType::F16, 64, 640),
            (KvType::Q8, 80, 256),
            (KvType::Q8, 64, 544),
        ] {
            let shape = shape(&rt, 4, 2, hd, kv);
            let part =
                |first_pos, n_rows, from| Part { from, partial: true, ..Part::chunk(first_pos, n_rows) };
            let parts = |from| [part(600, 1, from), part(580, 20, from), part(10, 1, from)];
            let kernel = PrefillKernel::best(&*rt, &shape);
            let world = World::new(shape, None, &parts(at), 1.0, 7).on(kernel);
            let world = if kv != KvType::BF16 { world.with_sinks(hd as u64) } else { world };
            let late = world.run(&rt, &all(&world));
            world.check(&all(&world), &late, "late tokens");
            // The same world, all tokens here, items cut off.
            let early = World { parts: parts(0).to_vec(), ..world.clone() };
            let (mut plan, table) = early.plan(&all(&early), 0..0);
            let cut = |begin: &mut u32, end: &mut u32| {
                *end = (*end).min(at as u32);
                *begin = (*begin).min(*end);
            };
            plan.decode.iter_mut().for_each(|i: &mut DecodeItem| cut(&mut i.begin, &mut i.end));
            plan.prefill.iter_mut().for_each(|i: &mut PrefillItem| cut(&mut i.begin, &mut i.end));
            let early_out = early.run_plan(&rt, &plan, &table);

            let n = late.m.len() / shape.n_heads;
            let up = |v: &[u32]| Buffer::from_bytes(&rt, LANE, bytes(v)).unwrap();
            let side = |o: &Output| [up(&o.m), up(&o.s), up(&o.o)];
            let ptrs = |b: &[Buffer; 3]| PartialRows { m: b[0].ptr(), s: b[1].ptr(), o: b[2].ptr() };
            let (a, b) = (side(&late), side(&early_out));
            let rows: Vec<u32> = (0..3)
                .flat_map(|i| (0..world.parts[i].n_rows).map(move |r| (i, r)))
                .map(|(i, r)| (world.row0[i] + r) as u32)
                .collect();
            let (rows, n_rows) = (up(&rows), up(&[n as u32]));
            let total = world.rows * world.width();
            let out = up(&vec![CANARY; total / 2]);
            let sinks = world.sinks_on(&rt);
            let args = MergeAttention {
                here: ptrs(&a),
                elsewhere: ptrs(&b),
                rows: rows.ptr(),
                n_rows: n_rows.ptr(),
                max_rows: n + 5,
                sinks: sinks.as_ref().map_or(DevPtr::NULL, Buffer::ptr),
                out: out.ptr(),
            };
            merge_attention(&*rt, LANE, &shape, &args).unwrap();
            let mut merged = vec![0u8; total * 2];
            rt.download(LANE, out.ptr(), &mut merged).unwrap();
            let merged = merged.chunks_exact(2).map(|c| u16::from_le_bytes([c[0], c[1]])).collect();
            let whole = World { parts: parts(0).map(|p| Part { partial: false, ..p }).to_vec(), ..early };
            let got = Output { out: merged, m: Vec::new(), s: Vec::new(), o: Vec::new() };
            whole.check(&all(&whole), &got, &format!("{kv:?} {hd} merged at {at}"));
        }
    }
}

/// The same bits alone, in a batch, and in another order.
#[test]
fn a_row_does_not_depend_on_the_batch() {
    for rt in gpu::runtimes() {
        for (window, kv) in [(None, KvType::BF16), (Some(100), KvType::BF16), (None, KvType::Q8)] {
            let parts = [
                Part::decode(700),
                Part::chunk(20, 70),
                Part::decode(3),
                Part { partial: true, ..Part::decode(300) },
                Part::chunk(300, 3),
                Part { partial: true, ..Part::chunk(0, 66) },
            ];
            let world = World::new(shape(&rt, 4, 2, 64, kv), window, &parts, 1.0, 8);
            for kernel in world.kernels(&rt) {
                let world = world.on(kernel);
                let together = world.run(&rt, &all(&world));
                let reversed = world.run(&rt, &[5, 4, 3, 2, 1, 0]);
                for i in 0..parts.len() {
                    let alone = world.rows_of(i, &world.run(&rt, &[i]));
                    let what = format!("{:?}, {kv:?}, window {window:?}, {kernel:?}", parts[i]);
                    assert!(alone == world.rows_of(i, &together), "{what} in a batch");
                    assert!(alone == world.rows_of(i, &reversed), "{what} in a reversed batch");
                }
            }
        }
    }
}

/// Prefill gives the same bits however the prompt is cut into chunks.
#[test]
fn a_prompt_does_not_depend_on_its_chunks() {
    for rt in gpu::runtimes() {
        for (window, kv) in [(None, KvType::BF16), (Some(50), KvType::BF16), (Some(50), KvType::Q8)] {
            let world = World::new(shape(&rt, 2, 1, 64, kv), window, &[Part::chunk(0, 170)], 1.0, 9);
            for kernel in world.kernels(&rt) {
                let whole = world.on(kernel);
                let want = whole.run(&rt, &[0]);
                let w = whole.width();
                for cut in [5, 63, 64, 100] {
                    // Two parts of the same sequence, run from the same memory.
                    let parts = World {
                        parts: vec![Part::chunk(0, cut), Part::chunk(cut, 170 - cut)],
                        row0: vec![1, 1 + cut],
                        pages: vec![whole.pages[0].clone(), whole.pages[0].clone()],
                        ..whole.clone()
                    };
                    let got = parts.run(&rt, &[0, 1]);
                    let same = got.out[w..171 * w] == want.out[w..171 * w];
                    assert!(same, "cut at {cut}, window {window:?}, {kernel:?}");
                }
            }
        }
    }
}

/// Whatever order threads run in and whenever copies land.
#[test]
fn every_schedule_gives_the_same_bits() {
    let parts = [Part::decode(520), Part::chunk(40, 70), Part { partial: true, ..Part::decode(270) }];
    for hd in [64, 96, 256] {
        let kernels = [PrefillKernel::Mma, PrefillKernel::Wgmma].map(|kernel| (kernel, KvType::BF16));
        for (kernel, kv) in kernels.into_iter().chain([(PrefillKernel::Mma, KvType::Q8)]) {
            let mut want: Option<Output> = None;
            gpu::for_schedules(|rt, schedule| {
                let world = World::new(shape(rt, 3, 1, hd, kv), Some(600), &parts, 1.0, 10).on(kernel);
                if !world.kernels(rt).contains(&kernel) {
                    return;
                }
                let got = world.run(rt, &all(&world));
                match &want {
                    None => want = Some(got),
                    Some(want) => assert!(*want == got, "{schedule} at head_dim {hd}, {kernel:?}, {kv:?}"),
                }
            });
        }
    }
}

#[test]
fn ldmatrix_is_free_of_bank_conflicts() {
    let parts = [Part::decode(300), Part::chunk(0, 70)];
    for kv in TYPES {
        for hd in HEAD_DIMS {
            let run = |rt: &Arc<dyn Runtime>| {
                World::new(shape(rt, 2, 1, hd, kv), None, &parts, 1.0, 11).run(rt, &[0, 1]);
            };
            let Some((phases, conflicts)) = gpu::bank_conflicts("_attention_", run) else { return };
            assert!(phases > 0, "the kernels use ldmatrix");
            assert_eq!(conflicts, 0, "of {phases} phases, {kv:?} {hd}");
        }
    }
}

#[test]
fn what_kernels_do_not_cover_is_said() {
    for rt in gpu::runtimes() {
        let good = shape(&rt, 4, 2, 64, KvType::BF16);
        for (bad, says) in [
            (AttentionShape { head_dim: 72, ..good }, "72"),
            (AttentionShape { n_kv_heads: 3, ..good }, "3 KV heads"),
            (AttentionShape { scale: 0.0, ..good }, "scale"),
            (AttentionShape { softcap: Some(0.0), ..good }, "soft-cap 0:"),
            (AttentionShape { softcap: Some(1e4), ..good }, "soft-cap 10000:"),
        ] {
            let message = bad.check(&*rt).unwrap_err().to_string();
            assert!(message.contains(says), "{message}");
        }
        // The tests above have seen every kernel there is.
        let want = if rt.info().sm == 90 { PrefillKernel::Wgmma } else { PrefillKernel::Mma };
        for hd in HEAD_DIMS {
            let best = PrefillKernel::best(&*rt, &AttentionShape { head_dim: hd, ..good });
            assert_eq!(best, if [80, 96].contains(&hd) { PrefillKernel::Mma } else { want }, "head_dim {hd}");
            // Tiles of codes are converted in registers, where wgmma does not read its second operand.
            let codes = AttentionShape { head_dim: hd, kv: KvType::Q8, ..good };
            assert_eq!(PrefillKernel::best(&*rt, &codes), PrefillKernel::Mma, "codes, head_dim {hd}");
        }
    }
}

fn any_part() -> impl Strategy<Value = Part> {
    let rows = prop_oneof![Just(1usize), 2..5usize, 5..90usize];
    (0..400usize, rows, 0..12usize, 0..3usize).prop_map(|(first_pos, n_rows, page, which)| {
        let whole = Part::chunk(first_pos, n_rows);
        match which {
            0 => whole,
            1 => Part { from: page * PAGE, partial: true, ..whole },
            _ => Part { to: page.min(first_pos / PAGE) * PAGE, partial: true, ..whole },
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn any_step_matches_the_oracle(
        parts in proptest::collection::vec(any_part(), 1..4),
        (kv_heads, group) in (1..3usize, 1..10usize),
        hd in prop::sample::select(HEAD_DIMS.to_vec()),
        kv in prop::sample::select(TYPES.to_vec()),
        window in proptest::option::of(1..300usize),
        k_scale in prop::sample::select(vec![0.1f32, 1.0, 4.0]),
        sinks in any::<bool>(),
        seed in any::<u64>(),
    ) {
        for rt in gpu::runtimes() {
            let shape = shape(&rt, kv_heads * group, kv_heads, hd, kv);
            let world = World::new(shape, window, &parts, k_scale, seed);
            let world = if sinks { world.with_sinks(seed) } else { world };
            run_and_check(&rt, &world, "proptest");
        }
    }

    /// Items cover what each row sees exactly once, and steps within the limits fit the capacity.
    #[test]
    fn plans_cover_every_token_once(
        lens in proptest::collection::vec((0..40_000u32, prop_oneof![Just(1u32), 1..5u32, 5..200u32]), 0..8),
        window in proptest::option::of(1..5000u32),
        padding in 0..4u32,
        queries in prop::sample::select(vec![64u32, 128]),
    ) {
        let (mut rows, mut row0) = (Vec::new(), 0);
        for &(first_pos, n_rows) in &lens {
            rows.push(RowRun { row0, n_rows, first_pos, from: 0, to: u32::MAX, page: 0, partial: None });
            row0 += n_rows;
        }
        let plan = AttentionPlan::new(&rows, row0..row0 + padding, window, queries);
        let total = (row0 + padding) as usize;
        let mut seen = vec![0u32; total]; // tokens, per decoded row
        let mut tiles = vec![0u32; total]; // prefill items, per row
        let mut slots = vec![0u32; plan.splits];
        for i in &plan.decode {
            seen[i.row as usize] += i.end - i.begin;
            prop_assert!(i.begin == i.end || i.end - i.begin <= 1024);
            prop_assert_eq!(i.partial, ATTENTION_FINAL);
            if i.n_splits > 1 {
                prop_assert!(i.split < i.n_splits);
                slots[(i.workspace + i.split) as usize] += 1;
            }
        }
        for i in &plan.prefill {
            for r in 0..i.n_rows {
                tiles[(i.row0 + r) as usize] += 1;
                let pos = i.first_pos + r;
                prop_assert!(i.end > pos && i.begin <= (pos + 1).saturating_sub(window.unwrap_or(u32::MAX)));
            }
        }
        prop_assert!(slots.iter().all(|&n| n == 1));
        for r in &rows {
            for i in 0..r.n_rows {
                let (row, tokens) = ((r.row0 + i) as usize, r.first_pos + i + 1);
                let sees = tokens.min(window.unwrap_or(u32::MAX));
                prop_assert!((seen[row], tiles[row]) == (sees, 0) || (seen[row], tiles[row]) == (0, 1));
            }
        }
        let longest = lens.iter().map(|&(p, n)| p + n).max().unwrap_or(1);
        let capacity = Capacity::new(total.max(1), lens.len().max(1), longest as usize);
        prop_assert!(plan.decode.len() <= capacity.decode_items, "{} of {capacity:?}", plan.decode.len());
        prop_assert!(plan.prefill.len() <= capacity.prefill_items, "{} of {capacity:?}", plan.prefill.len());
        prop_assert!(plan.splits <= capacity.splits, "{} of {capacity:?}", plan.splits);
    }
}

/// Tokens attended here may begin at any page, and so within a split of a long sequence.
#[test]
fn spans_that_begin_at_any_page_fit_what_was_planned() {
    let mut straddled = false;
    for tokens in [32u32, 96, 256, 1024, 9000, 40_000] {
        for from in [0u32, 32, 224, 8160, 16_352, 99_968] {
            let row = |row0: u32| {
                let first_pos = from + tokens - 1;
                RowRun { row0, n_rows: 1, first_pos, from, to: u32::MAX, page: 0, partial: Some(row0) }
            };
            let rows: Vec<RowRun> = (0..4).map(row).collect();
            let plan = AttentionPlan::new(&rows, 0..0, None, 64);
            let (aligned, anywhere) =
                (Capacity::new(4, 4, tokens as usize), Capacity::anywhere(4, 4, tokens as usize));
            assert!(plan.decode.len() <= anywhere.decode_items, "{tokens} from {from}: {anywhere:?}");
            assert!(plan.splits <= anywhere.splits, "{tokens} from {from}: {} of {anywhere:?}", plan.splits);
            straddled |= plan.decode.len() > aligned.decode_items;
        }
    }
    assert!(straddled, "no span needed more than one from token 0");
}
