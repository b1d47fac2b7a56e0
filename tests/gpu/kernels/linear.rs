//! Dense decode linear (`cuda/gemv.cu`, `cuda/linear_dense.cu`) against f64, at the edges of its tiles.

use std::collections::HashMap;
use std::sync::Arc;

use crate::support;
use crate::support::gpu::linear::{Case, Launch, Operands, noise};
use crate::support::gpu::memory::encode;
use proptest::prelude::*;
use tandem::device::kernels::product::{
    DecodePlan, Epilogue, Matrix, ProductArgs, Weight, decode, decode_as,
};
use tandem::device::{DevPtr, DeviceInfo, Lane, Runtime};
use tandem::tensor::Half;

/// Runs `c` as `plan` says; all bytes of y, guard included.
fn run(rt: &Arc<dyn Runtime>, c: &Case, o: &Operands, plan: &DecodePlan) -> Vec<u8> {
    let launch = Launch::new(rt, c, o, plan.scratch_bytes());
    launch.output(decode_as(&**rt, Lane::Compute, &launch.args(c), plan), &format!("{c:?} {plan:?}"))
}

/// Runs `c` as `plan` says and compares every element. A sum has at most k + 64 roundings: its products, and lanes,
/// warps, splits and the bias.
fn check(rt: &Arc<dyn Runtime>, c: &Case, plan: &DecodePlan) -> Vec<u8> {
    let operands = Operands::dense(c);
    let y = run(rt, c, &operands, plan);
    c.check(&operands, c.k + 64, &y, &format!("{plan:?}"));
    y
}

/// The plan for a device of this runtime's kind with so many multiprocessors: more of them, more splits.
fn plan(rt: &Arc<dyn Runtime>, multiprocessors: u32, c: &Case) -> DecodePlan {
    plan_as(&DeviceInfo { multiprocessors, ..rt.info().clone() }, c)
}

fn plan_as(info: &DeviceInfo, c: &Case) -> DecodePlan {
    DecodePlan::new(info, &c.matrix(), c.act, c.m)
}

fn acts(rt: &Arc<dyn Runtime>) -> Vec<Half> {
    let has = |act: &Half| rt.has_kernel(&format!("gemv_{}_m1", act.name()));
    [Half::F16, Half::BF16].into_iter().filter(has).collect()
}

/// Numbers of tokens that fill the tiles of the kernels, one each.
const TOKENS: [usize; 9] = [1, 2, 3, 4, 8, 16, 32, 64, 128];

#[test]
fn every_kernel_is_there() {
    for rt in support::gpu::runtimes() {
        assert!(!acts(&rt).is_empty(), "{}: no dense linear", rt.info().name);
        for act in acts(&rt) {
            for m in TOKENS {
                let plan = plan_as(rt.info(), &Case::plain(act, m, 64, 64));
                assert!(rt.has_kernel(&plan.kernel), "{}: no {}", rt.info().name, plan.kernel);
            }
        }
    }
}

#[test]
fn tails_of_rows_columns_and_tokens() {
    for rt in support::gpu::runtimes() {
        for act in acts(&rt) {
            for m in TOKENS {
                for (m, n, k) in [
                    (m, 1, 8),
                    (m, 15, 56),
                    (m, 65, 264),
                    (m.max(5) - 1, 129, 72),
                    (m, 64, 1032),
                    (if m > 4 { m - 3 } else { m }, 17, 2056),
                ] {
                    let c = Case { pad_x: 8, pad_y: (3, 2), ..Case::plain(act, m, n, k) };
                    check(&rt, &c, &plan(&rt, 1, &c));
                }
            }
        }
    }
}

#[test]
fn every_epilogue_of_every_kernel() {
    for rt in support::gpu::runtimes() {
        for act in acts(&rt) {
            for m in TOKENS {
                for epilogue in Epilogue::ALL {
                    for bias in [false, true] {
                        let n = 144; // nine groups of 16: the last tile is partly empty
                        let c = Case { epilogue, bias, pad_y: (1, 0), ..Case::plain(act, m, n, 136) };
                        check(&rt, &c, &plan(&rt, 2, &c));
                    }
                }
            }
        }
    }
}

#[test]
fn parts_of_k_add_up() {
    for rt in support::gpu::runtimes() {
        for m in [1, 4, 7, 16, 27, 64, 65] {
            let mut seen = Vec::new();
            let k = if m <= 4 { 4104 } else { 1096 };
            for multiprocessors in [1, 2, 3, 4, 132] {
                let epilogue = if multiprocessors % 2 == 0 { Epilogue::SwiGlu } else { Epilogue::F32 };
                let c = Case { bias: true, epilogue, ..Case::plain(Half::F16, m, 80, k) };
                let plan = plan(&rt, multiprocessors, &c);
                check(&rt, &c, &plan);
                seen.push(plan.k_parts());
            }
            assert!(seen.iter().any(|&(warps, splits)| warps * splits >= 4), "{m} tokens: only {seen:?}");
        }
    }
}

#[test]
fn rings_of_every_length() {
    for rt in support::gpu::runtimes() {
        for m in TOKENS.into_iter().filter(|&m| m > 4) {
            let mut lengths = Vec::new();
            for (sm, kib) in [(75, 64), (86, 99), (90, 227)] {
                let shared_per_block = (kib << 10).min(rt.info().shared_per_block);
                let info = DeviceInfo { sm, shared_per_block, ..rt.info().clone() };
                for k in [8, 72, 136, 520] {
                    let c = Case::plain(Half::F16, m, 30, k);
                    let plan = plan_as(&info, &c);
                    check(&rt, &c, &plan);
                    lengths.push(plan.stages);
                }
            }
            lengths.dedup();
            assert!(lengths.len() >= 2, "{m} tokens: only rings of {lengths:?}");
        }
    }
}

/// The same token among others, in other places, in batches of other sizes: as long as the kernel is the same.
#[test]
fn a_tokens_result_does_not_depend_on_its_batch() {
    for rt in support::gpu::runtimes() {
        for act in acts(&rt) {
            for epilogue in [Epilogue::F32, Epilogue::SwiGlu] {
                let base = Case { epilogue, ..Case::plain(act, 1, 80, 840) };
                let token = |m: usize| -> Vec<u16> {
                    (0..base.k).map(|k| encode(act, 3.0 * noise(99, m, k) as f32)).collect()
                };
                let mut seen: HashMap<String, Vec<u8>> = HashMap::new();
                for (m, at) in
                    [(1, 0), (2, 1), (3, 0), (4, 2), (5, 4), (8, 0), (7, 3), (9, 8), (16, 3), (17, 16)]
                        .into_iter()
                        .chain([(32, 1), (33, 5), (64, 63), (65, 64), (128, 2), (130, 129), (150, 0)])
                {
                    let c = Case { m, seed: m as u64, ..base };
                    let mut o = Operands::dense(&Case { seed: 0, ..c });
                    for other in 0..m {
                        // Neighbours differ from batch to batch, one is not even finite.
                        let row = &mut o.x[other * c.k..(other + 1) * c.k];
                        row.copy_from_slice(&token(if other == at { 0 } else { m * 1000 + other }));
                        if other == (at + 1) % m && m > 1 {
                            row[5] = 0x7fff;
                        }
                    }
                    let plan = plan(&rt, 4, &c);
                    let y = run(&rt, &c, &o, &plan);
                    let bytes = c.columns() * c.size();
                    let row = y[at * bytes..(at + 1) * bytes].to_vec();
                    // One to four tokens: four kernels of the same arithmetic, which is more than is promised.
                    let kernel = if m <= 4 { "gemv".into() } else { plan.kernel };
                    let first = seen.entry(kernel.clone()).or_insert_with(|| row.clone());
                    assert_eq!(*first, row, "{kernel}: token {at} of {m}");
                }
                assert_eq!(seen.len(), 6, "kernels run: {:?}", seen.keys());
            }
        }
    }
}

#[test]
fn results_repeat_bit_for_bit() {
    for rt in support::gpu::runtimes() {
        for m in [1, 4, 5, 16, 40, 70] {
            let c = Case::plain(Half::F16, m, 144, 1032);
            let plan = plan(&rt, 24, &c);
            let (warps, splits) = plan.k_parts();
            assert!(warps * splits > 1, "{plan:?}");
            let launch = Launch::new(&rt, &c, &Operands::dense(&c), plan.scratch_bytes());
            let run = || {
                launch.output(decode_as(&*rt, Lane::Compute, &launch.args(&c), &plan), &format!("{plan:?}"))
            };
            let first = run();
            // One operand, one scratch: what a repetition leaves behind is what the next one meets.
            for i in 0..support::gpu::count(&rt, (1000, 3)) {
                assert!(run() == first, "{plan:?}: repetition {i} gives other bits");
            }
        }
    }
}

/// Every order of threads and every time of copies that the emulation knows: the same bits, and its checker
/// finds no race, no read of what nobody wrote and no stray access.
#[test]
fn in_every_schedule() {
    for m in [1, 3, 6, 13, 27, 40, 70] {
        let c = Case { epilogue: Epilogue::GeGlu, bias: true, ..Case::plain(Half::BF16, m, 48, 584) };
        let mut first = None;
        support::gpu::for_schedules(|rt, schedule| {
            let y = check(rt, &c, &plan(rt, 3, &c));
            assert!(*first.get_or_insert_with(|| y.clone()) == y, "{m} tokens, {schedule}");
        });
    }
}

#[test]
fn ldmatrix_has_no_bank_conflicts() {
    for m in TOKENS.into_iter().filter(|&m| m > 4) {
        let c = Case::plain(Half::F16, m, 130, 200);
        let counts =
            support::gpu::bank_conflicts("linear_dense_", |rt| drop(check(rt, &c, &plan(rt, 1, &c))));
        let Some((phases, conflicts)) = counts else { return };
        assert!(phases > 0, "{m} tokens: the kernel uses ldmatrix");
        assert_eq!(conflicts, 0, "{m} tokens: of {phases} phases");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn any_shape(
        m in prop_oneof![1usize..=9, 10usize..=70, Just(129)],
        n in prop_oneof![1usize..=20, 60usize..=140],
        k in 1usize..=90,
        pad_x in 0usize..3,
        pad_y in (0usize..4, 0usize..4),
        bias: bool,
        epilogue in prop::sample::select(Epilogue::ALL.to_vec()),
        multiprocessors in prop::sample::select(vec![1u32, 2, 4, 24]),
        act in 0usize..2,
        seed: u64,
    ) {
        for rt in support::gpu::runtimes() {
            let acts = acts(&rt);
            let n = if epilogue.is_gated() { n.next_multiple_of(16) } else { n };
            let plain = Case::plain(acts[act % acts.len()], m, n, 8 * k);
            let c = Case { pad_x: 8 * pad_x, pad_y, bias, epilogue, seed, ..plain };
            check(&rt, &c, &plan(&rt, multiprocessors, &c));
        }
    }
}

/// What the host refuses before anything is launched.
#[test]
fn wrong_shapes_are_refused_by_name() {
    for rt in support::gpu::runtimes() {
        let refused = |m, n, k, ldx, ldy, epilogue| {
            let at = DevPtr(256);
            let w = Weight { ptr: at, matrix: Matrix::Dense { n, k }, bias: DevPtr::NULL };
            let args = ProductArgs { w, act: Half::F16, x: at, ldx, y: at, ldy, m, epilogue, scratch: at };
            let rt = &rt;
            let call = std::panic::AssertUnwindSafe(|| decode(&**rt, Lane::Compute, &args));
            let panic = std::panic::catch_unwind(call).expect_err("refused");
            panic.downcast_ref::<String>().expect("a formatted message").clone()
        };
        assert!(refused(1, 16, 12, 16, 16, Epilogue::F32).contains("16 x 12 weight"));
        assert!(refused(0, 16, 16, 16, 16, Epilogue::F32).contains("0 tokens"));
        assert!(refused(1, 16, 16, 8, 16, Epilogue::F32).contains("x [1][8]"));
        assert!(refused(2, 16, 16, 16, 15, Epilogue::Relu).contains("y [2][15]"));
        assert!(refused(2, 24, 16, 16, 24, Epilogue::SwiGlu).contains("24 rows"));
    }
}
