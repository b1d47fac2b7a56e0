//! The prefill GEMM (`cuda/gemm.cu`, `cuda/gemm_sm90a.cu`) against f64, at the edges of its tiles.

use std::sync::Arc;

use crate::support;
use crate::support::gpu::linear::{Case, Launch, Operands};
use proptest::prelude::*;
use tandem::device::kernels::product::choose::gemm_bucket;
use tandem::device::kernels::product::gemm::{self, GemmPlan, Path};
use tandem::device::kernels::product::{COUNTER_BYTES, Epilogue, ProductArgs};
use tandem::device::{DeviceInfo, Lane, Runtime};
use tandem::tensor::Half;

fn launch(rt: &Arc<dyn Runtime>, c: &Case, o: &Operands) -> (Launch, ProductArgs) {
    let launch = Launch::new(rt, c, o, gemm::scratch_bytes(rt.info()));
    let args = launch.args(c);
    (launch, args)
}

fn run((launch, args): &(Launch, ProductArgs), plan: &GemmPlan) -> Vec<u8> {
    launch.output(gemm::gemm_as(&*launch.rt, Lane::Compute, args, plan), &format!("{plan:?}"))
}

/// Runs `c` as `plan` says and compares every element. A sum has at most one rounding for each product, split and the
/// bias.
fn check(rt: &Arc<dyn Runtime>, c: &Case, plan: &GemmPlan) -> Vec<u8> {
    let operands = Operands::dense(c);
    let y = run(&launch(rt, c, &operands), plan);
    c.check(&operands, c.k + plan.splits + 1, &y, &format!("{plan:?}"));
    y
}

/// Paths and tiles that this runtime has for a type.
fn kernels(rt: &dyn Runtime, act: Half) -> Vec<(Path, usize)> {
    [Path::Sync, Path::Async, Path::Tma]
        .into_iter()
        .flat_map(|path| path.tokens().map(|tokens| (path, tokens)))
        .filter(|(path, tokens)| rt.has_kernel(&path.kernel(act, *tokens)))
        .collect()
}

fn unsplit(path: Path, tokens: usize, k: usize) -> GemmPlan {
    GemmPlan { path, tokens, splits: 1, k_per_split: k.next_multiple_of(path.depth()) }
}

/// `splits` parts of K as [`gemm::plan`] cuts it, or fewer.
fn split(path: Path, tokens: usize, k: usize, splits: usize) -> GemmPlan {
    let k_per_split = k.div_ceil(splits).next_multiple_of(path.depth());
    GemmPlan { path, tokens, splits: k.div_ceil(k_per_split), k_per_split }
}

#[test]
fn every_kernel_is_right_at_the_edges_of_its_tiles() {
    for rt in support::gpu::runtimes() {
        for act in [Half::F16, Half::BF16] {
            for (path, tokens) in kernels(&*rt, act) {
                let depth = path.depth();
                for (m, n, k) in [
                    (1, 1, 8),
                    (tokens - 1, 127, depth),
                    (tokens, 128, depth - 8),
                    (tokens + 1, 129, 3 * depth + 8),
                    (7, 136, 7 * depth),
                ] {
                    check(
                        &rt,
                        &Case { pad_x: 8, pad_y: (0, 3), ..Case::plain(act, m, n, k) },
                        &unsplit(path, tokens, k),
                    );
                }
            }
        }
    }
}

#[test]
fn every_epilogue_of_every_kernel() {
    for rt in support::gpu::runtimes() {
        for act in [Half::F16, Half::BF16] {
            for (path, tokens) in kernels(&*rt, act) {
                for epilogue in [Epilogue::F32, Epilogue::Relu, Epilogue::SwiGlu, Epilogue::GeGlu] {
                    for bias in [false, true] {
                        let c = Case { epilogue, bias, pad_y: (0, 1), ..Case::plain(act, 66, 144, 72) };
                        check(&rt, &c, &unsplit(path, tokens, c.k));
                    }
                }
            }
        }
    }
}

#[test]
fn splits_of_k_add_up_and_leave_their_counters_at_zero() {
    for rt in support::gpu::runtimes() {
        for (path, tokens) in kernels(&*rt, Half::F16) {
            for (k, splits) in [(200, 2), (264, 4)] {
                for epilogue in [Epilogue::F32, Epilogue::SwiGlu] {
                    let c = Case { epilogue, bias: true, ..Case::plain(Half::F16, 5, 32, k) };
                    check(&rt, &c, &split(path, tokens, k, splits));
                }
            }
        }
    }
}

#[test]
fn more_items_than_blocks_go_round_the_ring() {
    for rt in support::gpu::runtimes() {
        for (path, tokens) in kernels(&*rt, Half::F16).into_iter().filter(|(path, _)| *path == Path::Tma) {
            // On the emulated device of four multiprocessors: five or six tiles, so a block makes two and its ring goes on.
            check(&rt, &Case::plain(Half::F16, 2 * tokens + 1, 130, 136), &unsplit(path, tokens, 136));
        }
    }
}

#[test]
fn a_row_does_not_depend_on_the_other_rows() {
    for rt in support::gpu::runtimes() {
        for act in [Half::F16, Half::BF16] {
            for (path, tokens) in kernels(&*rt, act) {
                let c = Case::plain(act, tokens + 3, 40, 200);
                let plan = split(path, tokens, c.k, 2);
                let all = check(&rt, &c, &plan);
                for m in [1, 9] {
                    let few = check(&rt, &Case { m, ..c }, &plan);
                    assert_eq!(
                        few[..m * c.n * 4],
                        all[..m * c.n * 4],
                        "{plan:?}: {m} tokens against {}",
                        c.m
                    );
                }
            }
        }
    }
}

#[test]
fn results_repeat_bit_for_bit() {
    for rt in support::gpu::runtimes() {
        for (path, tokens) in kernels(&*rt, Half::F16) {
            let c = Case::plain(Half::F16, 20, 130, 264);
            let plan = split(path, tokens, c.k, 2);
            let device = launch(&rt, &c, &Operands::dense(&c));
            let first = run(&device, &plan);
            for i in 0..support::gpu::count(&rt, (1000, 2)) {
                assert!(run(&device, &plan) == first, "{plan:?}: repetition {i} gives other bits");
            }
        }
    }
}

#[test]
fn the_planned_product_is_right() {
    for rt in support::gpu::runtimes() {
        for act in [Half::F16, Half::BF16] {
            if kernels(&*rt, act).is_empty() {
                continue;
            }
            for (m, n, k) in [(70, 96, 576), (130, 192, 64)] {
                let c = Case::plain(act, m, n, k);
                let path = Path::of(&*rt, act);
                check(&rt, &c, &gemm::plan(rt.info(), path, m, n, k));
            }
        }
    }
}

/// Whatever order threads run in and whenever copies land.
#[test]
fn every_schedule_gives_the_same_bits() {
    let mut first: Vec<Vec<u8>> = Vec::new();
    support::gpu::for_schedules(|rt, schedule| {
        let kernels =
            [(Half::BF16, Path::Async, 64), (Half::F16, Path::Sync, 64), (Half::F16, Path::Tma, 128)];
        for (i, (act, path, tokens)) in kernels.into_iter().enumerate() {
            let c = Case { bias: true, ..Case::plain(act, tokens + 3, 130, 264) };
            let y = check(rt, &c, &split(path, tokens, c.k, 2));
            if first.len() == i {
                first.push(y);
            } else {
                assert!(y == first[i], "{path:?}: {schedule} gives other bits");
            }
        }
    });
}

#[test]
fn ldmatrix_is_free_of_bank_conflicts() {
    for (path, tokens) in [(Path::Async, 128), (Path::Async, 64), (Path::Sync, 128), (Path::Sync, 64)] {
        let c = Case::plain(Half::F16, 100, 130, 136);
        let counted =
            support::gpu::bank_conflicts("gemm_", |rt| drop(check(rt, &c, &unsplit(path, tokens, c.k))));
        let Some((phases, conflicts)) = counted else { return };
        assert!(phases > 0, "{path:?} reads fragments by ldmatrix");
        assert_eq!(conflicts, 0, "{path:?}: of {phases} phases");
    }
}

/// The mistakes of `cuda/host/planted_gemm.cu`: in every schedule the checker names the one that is there.
#[test]
fn planted_mistakes_are_caught() {
    let c = Case::plain(Half::F16, 133, 130, 640);
    let operands = Operands::dense(&c);
    for (kernel, path, tokens, says) in [
        ("planted_gemm_early_read", Path::Async, 64, "while a copy to it is in flight"),
        ("planted_gemm_no_barrier", Path::Async, 64, "nobody wrote"),
        ("planted_gemm_early_release", Path::Tma, 128, ""),
    ] {
        support::gpu::for_schedules(|rt, schedule| {
            let plan = unsplit(path, tokens, c.k);
            let (_buffers, args) = launch(rt, &c, &operands);
            let launched = gemm::gemm_by(&**rt, Lane::Compute, &args, &plan, kernel);
            let failed = launched.and_then(|()| rt.synchronize_all()).expect_err(kernel).to_string();
            assert!(failed.contains(kernel) && failed.contains(says), "{kernel}, {schedule}: {failed}");
            assert!(
                ["in flight", "race", "nobody wrote"].iter().any(|w| failed.contains(w)),
                "{kernel}, {schedule}: {failed}"
            );
        });
    }
}

fn device(sm: u32, multiprocessors: u32) -> DeviceInfo {
    DeviceInfo {
        name: "a device".into(),
        sm,
        multiprocessors,
        memory_total: 1 << 34,
        shared_per_block: 99 << 10,
        l2_bytes: 0,
        memory_bw: 0,
        clock_khz: 0,
        driver: 0,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn plans_cover_k_fit_their_scratch_and_see_only_the_bucket(
        m in 1usize..5000, n in 1usize..40000, k8 in 1usize..4000, sms in 1u32..200, tma: bool,
    ) {
        let (k, info) = (k8 * 8, device(90, sms));
        let path = if tma { Path::Tma } else { Path::Async };
        let plan = gemm::plan(&info, path, m, n, k);
        prop_assert!(plan.k_per_split.is_multiple_of(path.depth()));
        prop_assert_eq!(k.div_ceil(plan.k_per_split), plan.splits);
        let tiles = n.div_ceil(128) * m.div_ceil(plan.tokens);
        if plan.splits > 1 {
            prop_assert!(COUNTER_BYTES + tiles * plan.splits * 128 * plan.tokens * 4 <= gemm::scratch_bytes(&info));
            prop_assert!(tiles * 4 <= COUNTER_BYTES);
        }
        prop_assert!(gemm_bucket(m) >= m && gemm_bucket(gemm_bucket(m)) == gemm_bucket(m));
        prop_assert_eq!(plan, gemm::plan(&info, path, gemm_bucket(m), n, k));
    }
}

#[test]
fn plans_fill_a_device_with_few_tiles() {
    let h200 = device(90, 132);
    // 8 tiles of 4096 rows in K: 132 multiprocessors would mostly idle.
    let few = gemm::plan(&h200, Path::Tma, 128, 1024, 4096);
    assert!(few.splits >= 4 && few.tokens == 128, "{few:?}");
    // Enough tiles: no partial sums, the tile with the most products for its bytes.
    let many = gemm::plan(&h200, Path::Tma, 2048, 14336 * 2, 4096);
    assert!(many.splits == 1 && many.tokens == 256, "{many:?}");
}
