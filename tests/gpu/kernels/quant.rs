//! Quantised linear (`cuda/gemv_quant.cu`, `cuda/linear_quant.cu`, `cuda/dequant.cu`) against f64 on decoded weights.

use std::sync::Arc;

use crate::support;
use crate::support::gpu::linear::{Case, Launch, Operands, noise, random};
use crate::support::gpu::memory::{Output, upload};
use half::{bf16, f16};
use proptest::prelude::*;
use tandem::device::kernels::product::choose::GEMV_ROWS;
use tandem::device::kernels::product::quant::forced as forced_plan;
use tandem::device::kernels::product::{DecodePlan, Epilogue, decode_as};
use tandem::device::kernels::quant::{self, GatherArgs, PackedLayout, RowsArgs};
use tandem::device::{Lane, Runtime};
use tandem::host::Pool;
use tandem::reference::dequant::dequantise_row;
use tandem::tensor::{DType, Half, set_scales};

/// Tokens of a block of every kernel: the first is GEMV.
const KERNELS: [usize; 5] = [GEMV_ROWS, 8, 16, 32, 64];

fn plain(dtype: DType, act: Half, m: usize, n: usize, k: usize) -> Case {
    Case { weights: dtype, ..Case::plain(act, m, n, k) }
}

fn layout(c: &Case) -> PackedLayout {
    PackedLayout::new(c.weights, c.n, c.k).expect("a quantised matrix")
}

/// Scale and minimum of block `i` of a matrix of `k` columns, for weights of about 3/sqrt(k).
fn scales(dtype: DType, i: usize, k: usize) -> [f32; 2] {
    let largest = match dtype {
        DType::Q4_0 | DType::Q4_1 => 8.0,
        DType::Q5_0 | DType::Q5_1 => 16.0,
        DType::Q8_0 => 128.0,
        DType::MXFP4 => 12.0,
        DType::Q4_K => 8.0 * 32.0,
        DType::Q5_K => 16.0 * 32.0,
        _ => 32.0 * 64.0,
    };
    let size = 3.0 / (largest * (k as f64).sqrt());
    // Minima are as large as the codes make them.
    let min = if matches!(dtype, DType::Q4_1 | DType::Q5_1) { largest } else { 1.0 };
    [(noise(2, i, 0) * size) as f32, (noise(2, i, 1) * size * min) as f32]
}

/// Random codes by `seed` and scales, weights of about 1/sqrt(k): sums then lie where activations bend. Extremes of codes and
/// scales are among them.
fn random_rows(dtype: DType, n: usize, k: usize, seed: u64) -> Vec<u8> {
    let row_bytes = dtype.row_bytes(k).expect("whole blocks");
    let mut bytes: Vec<u8> =
        (0..n * row_bytes).map(|i| random(seed ^ 1, i / row_bytes, i % row_bytes) as u8).collect();
    for (i, block) in bytes.chunks_exact_mut(dtype.block_bytes()).enumerate() {
        let [d, m] = scales(dtype, i, k);
        set_scales(dtype, block, d, m);
    }
    bytes
}

/// Weights packed for the device, and what they decode to. Gate and up are one matrix after the other before.
pub fn operands(c: &Case) -> Operands {
    let (dtype, row_bytes) = (c.weights, c.weights.row_bytes(c.k).expect("whole blocks"));
    let bytes = random_rows(dtype, c.n, c.k, c.seed);
    let source = |r: usize| &bytes[c.row_of_file(r) * row_bytes..][..row_bytes];
    let mut packed = vec![0xa5; layout(c).bytes()];
    quant::pack(&layout(c), &source, &Pool::new(2), &mut packed);
    let (mut w, mut parts) = (Vec::new(), Vec::new());
    let (mut row, mut min) = (vec![0.0; c.k], vec![0.0; c.k]);
    for r in 0..c.n {
        dequantise_row(dtype, source(r), &mut row);
        // Scales of zero: the minimum alone, where the format has one.
        let mut zeros = source(r).to_vec();
        let first = c.row_of_file(r) * c.k / dtype.block_len();
        for (i, block) in zeros.chunks_exact_mut(dtype.block_bytes()).enumerate() {
            let [_, m] = scales(dtype, first + i, c.k);
            set_scales(dtype, block, 0.0, m);
        }
        dequantise_row(dtype, &zeros, &mut min);
        w.extend(row.iter().map(|&v| f64::from(v)));
        // w = d q + m: |d q| <= |w| + |m|.
        parts.extend(row.iter().zip(&min).map(|(&v, &m)| f64::from(v.abs()) + 2.0 * f64::from(m.abs())));
    }
    Operands::new(c, packed, w, parts)
}

fn run(rt: &Arc<dyn Runtime>, c: &Case, o: &Operands, plan: &DecodePlan) -> Vec<u8> {
    again(&Launch::new(rt, c, o, plan.scratch_bytes()), c, plan)
}

fn again(launch: &Launch, c: &Case, plan: &DecodePlan) -> Vec<u8> {
    launch.output(decode_as(&*launch.rt, Lane::Compute, &launch.args(c), plan), &format!("{c:?} {plan:?}"))
}

/// Roundings that a product meets on its way into a sum: at most 32 in its block, one for its scale and two for each
/// block after it (16 columns at least; minima are a second addition), 8 warps, the splits, the bias, and one in
/// the reference's weight.
pub fn roundings(k: usize, splits: usize) -> usize {
    32 + 1 + k.div_ceil(16) * 2 + 8 + splits + 1 + 1
}

/// Runs `c` as `plan` says and compares every element.
fn check(rt: &Arc<dyn Runtime>, c: &Case, plan: &DecodePlan) -> Vec<u8> {
    let operands = operands(c);
    let y = run(rt, c, &operands, plan);
    c.check(&operands, roundings(c.k, plan.splits), &y, &format!("{plan:?}"));
    y
}

/// The kernel for `tokens` tokens, if this runtime has it, splitting k after `k_split` columns.
fn forced(rt: &dyn Runtime, c: &Case, tokens: usize, k_split: usize) -> Option<DecodePlan> {
    let plan = forced_plan(rt.info(), &layout(c), c.act, c.m, tokens, k_split);
    (rt.has_kernel(&plan.kernel) && plan.shared <= rt.info().shared_per_block).then_some(plan)
}

fn unsplit(rt: &dyn Runtime, c: &Case, tokens: usize) -> Option<DecodePlan> {
    forced(rt, c, tokens, c.k.next_multiple_of(128))
}

/// Every format, kernel and type of activations that this runtime has.
fn each_kernel_of(rt: &Arc<dyn Runtime>, f: &mut impl FnMut(&Arc<dyn Runtime>, DType, Half, usize)) {
    let mut found = 0;
    for dtype in PackedLayout::dtypes() {
        for act in [Half::F16, Half::BF16] {
            for tokens in KERNELS {
                let c = plain(dtype, act, tokens, 16, 256);
                if unsplit(&**rt, &c, tokens).is_some() {
                    f(rt, dtype, act, tokens);
                    found += 1;
                }
            }
        }
    }
    // bf16 from 80 on; devices of 64 KiB lack some of the kernels for 32 and 64 tokens.
    let types = if rt.info().sm >= 80 { 2 } else { 1 };
    let most = PackedLayout::dtypes().count() * types * KERNELS.len();
    let large =
        if rt.info().shared_per_block < 99 << 10 { 2 * PackedLayout::dtypes().count() * types } else { 0 };
    assert!((most - large..=most).contains(&found), "{:?} has {found} of {most} kernels", rt.info());
}

fn each_kernel(mut f: impl FnMut(&Arc<dyn Runtime>, DType, Half, usize)) {
    for rt in support::gpu::runtimes() {
        each_kernel_of(&rt, &mut f);
    }
}

#[test]
fn every_kernel_is_right_at_the_edges_of_its_tiles() {
    each_kernel(|rt, dtype, act, tokens| {
        // One tile of 64 columns, half a tile, an odd number of tiles; super-blocks are whole.
        let shapes = match dtype.block_len() {
            256 => [(1, 1, 256), (tokens, 33, 512), (tokens - 1, 16, 256)],
            _ => [(1, 1, 32), (tokens, 33, 224), (tokens - 1, 16, 64)],
        };
        for (m, n, k) in shapes {
            let c = Case { pad_x: 8, pad_y: (0, 3), ..plain(dtype, act, m, n, k) };
            check(rt, &c, &unsplit(&**rt, &c, tokens).expect("asked before"));
        }
    });
}

#[test]
fn several_blocks_of_rows_and_tokens() {
    each_kernel(|rt, dtype, act, tokens| {
        // GEMV has one block of tokens; in emulation a few formats stand for all.
        let few = [DType::Q4_0, DType::Q4_K, DType::Q8_0].contains(&dtype);
        if tokens == GEMV_ROWS || !few || act == Half::F16 && tokens != 8 {
            return;
        }
        let c = Case { pad_y: (0, 1), ..plain(dtype, act, tokens + 3, 275, 256) };
        check(rt, &c, &unsplit(&**rt, &c, tokens).expect("asked before"));
    });
}

#[test]
fn every_epilogue_of_every_kernel() {
    each_kernel(|rt, dtype, act, tokens| {
        if ![DType::Q4_1, DType::Q6_K].contains(&dtype) {
            return; // what becomes of a sum does not know where it came from
        }
        for epilogue in Epilogue::ALL {
            for bias in [false, true] {
                let c = Case { epilogue, bias, pad_y: (0, 1), ..plain(dtype, act, tokens.min(11), 48, 256) };
                check(rt, &c, &unsplit(&**rt, &c, tokens).expect("asked before"));
            }
        }
    });
}

#[test]
fn splits_of_k_add_up_and_leave_their_counters_at_zero() {
    each_kernel(|rt, dtype, act, tokens| {
        if act == Half::F16 && dtype != DType::Q4_0 {
            return;
        }
        let k = if dtype.block_len() == 256 { 512 } else { 416 };
        for k_split in [128, 256] {
            let epilogue = if k_split == 128 { Epilogue::F32 } else { Epilogue::SwiGlu };
            let c = Case { epilogue, bias: true, ..plain(dtype, act, tokens.min(9), 32, k) };
            check(rt, &c, &forced(&**rt, &c, tokens, k_split).expect("asked before"));
        }
    });
}

#[test]
fn a_row_does_not_depend_on_the_other_rows() {
    each_kernel(|rt, dtype, act, tokens| {
        if act == Half::F16 && dtype != DType::Q4_1 {
            return;
        }
        let c = plain(dtype, act, tokens.min(18), 40, 512);
        let plan = forced(&**rt, &c, tokens, 256).expect("asked before");
        let all = check(rt, &c, &plan);
        for m in [1, 3] {
            let few = Case { m, ..c };
            let few = check(rt, &few, &forced(&**rt, &few, tokens, 256).expect("asked before"));
            let row = c.n * 4;
            assert_eq!(few[..m * row], all[..m * row], "{plan:?}: {m} tokens against {}", c.m);
        }
    });
}

#[test]
fn sums_of_splits_repeat_bit_for_bit() {
    for rt in support::gpu::runtimes() {
        for tokens in KERNELS {
            let c = plain(DType::Q4_K, Half::F16, tokens.min(18), 80, 1024);
            let plan = forced(&*rt, &c, tokens, 256).expect("f16 on every device");
            assert!(plan.splits > 1, "{plan:?}");
            let launch = Launch::new(&rt, &c, &operands(&c), plan.scratch_bytes());
            let first = again(&launch, &c, &plan);
            // One operand, one scratch: what a repetition leaves behind is what the next one meets.
            for i in 0..support::gpu::count(&rt, (1000, 2)) {
                assert!(again(&launch, &c, &plan) == first, "{plan:?}: repetition {i} gives other bits");
            }
        }
    }
}

#[test]
fn the_planned_kernels_are_right() {
    for rt in support::gpu::runtimes() {
        for (dtype, n, k) in [(DType::Q4_K, 64, 1024), (DType::Q8_0, 48, 1056), (DType::Q6_K, 528, 256)] {
            for m in [1, 2, 5, 12, 20, 40, 70] {
                let c = Case { bias: true, ..plain(dtype, Half::F16, m, n, k) };
                check(&rt, &c, &DecodePlan::new(rt.info(), &c.matrix(), c.act, m));
            }
        }
    }
}

#[test]
fn infinite_and_invalid_activations_stay_in_their_token() {
    for rt in support::gpu::runtimes() {
        for tokens in KERNELS {
            let c = plain(DType::Q4_1, Half::F16, 3, 20, 96);
            let plan = unsplit(&*rt, &c, tokens).expect("f16 on every device");
            let mut operands = operands(&c);
            let clean = run(&rt, &c, &operands, &plan);
            operands.x[c.ldx() + 5] = f16::INFINITY.to_bits();
            operands.x[c.ldx() + 70] = f16::NAN.to_bits();
            let y = run(&rt, &c, &operands, &plan);
            let row = c.n * 4;
            assert_eq!((&y[..row], &y[2 * row..]), (&clean[..row], &clean[2 * row..]), "{plan:?}");
            assert!((c.n..2 * c.n).all(|at| c.element(&y, at).is_nan()), "{plan:?}: a NaN is lost");
        }
    }
}

#[test]
fn decoded_rows_are_the_references_rounded() {
    for rt in support::gpu::runtimes() {
        for dtype in PackedLayout::dtypes() {
            let (n, k) = (37, if dtype.block_len() == 256 { 768 } else { 608 });
            let layout = PackedLayout::new(dtype, n, k).expect("a quantised matrix");
            let bytes = random_rows(dtype, n, k, 0);
            let row_bytes = dtype.row_bytes(k).expect("whole blocks");
            let source = |r: usize| &bytes[r * row_bytes..][..row_bytes];
            let mut packed = vec![0; layout.bytes()];
            quant::pack(&layout, &source, &Pool::new(2), &mut packed);
            let w = upload(&rt, &packed);
            let mut want = vec![0.0f32; n * k];
            (0..n).for_each(|r| dequantise_row(dtype, source(r), &mut want[r * k..][..k]));

            for to in [Half::F16, Half::BF16] {
                if !rt.has_kernel(&format!("quant_rows_{dtype}_{}", to.name())) {
                    continue;
                }
                for (first, count) in [(0, n), (16, 18), (32, 1)] {
                    let ldy = k + 8;
                    let y = Output::new(&rt, count * ldy * 2);
                    let args = RowsArgs { layout, w: w.ptr(), to, y: y.ptr(), ldy, first, count };
                    quant::rows(&*rt, Lane::Compute, &args).expect("launch");
                    let got = y.u16();
                    for r in 0..count {
                        for c in 0..k {
                            let w = want[(first + r) * k + c];
                            let bits = match to {
                                Half::F16 => f16::from_f32(w).to_bits(),
                                Half::BF16 => bf16::from_f32(w).to_bits(),
                            };
                            let found = got[r * ldy + c];
                            // Zero codes under negative scales are -0 here, 0 - 0 there: equal.
                            let zeros = (found | bits) & 0x7fff == 0;
                            assert!(
                                found == bits || zeros,
                                "{dtype} {to:?} ({r}, {c}): {found:x}, not {bits:x}"
                            );
                        }
                        assert!(
                            (k..ldy).all(|c| got[r * ldy + c] == 0xffff),
                            "{dtype}: wrote beyond row {r}"
                        );
                    }
                }
            }

            // The last is no row: padding.
            let ids = [36u32, 0, 8, 23, 0, u32::MAX];
            let row_ids = upload(&rt, &ids);
            let ldy = k + 2;
            let y = Output::new(&rt, ids.len() * ldy * 4);
            let args = GatherArgs {
                layout,
                w: w.ptr(),
                row_ids: row_ids.ptr(),
                y: y.ptr(),
                ldy,
                count: ids.len(),
                scale: 1.5,
            };
            quant::gather(&*rt, Lane::Compute, &args).expect("launch");
            let got = y.f32();
            for (i, &id) in ids.iter().enumerate() {
                for c in 0..k {
                    let w = if id == u32::MAX { 0.0 } else { 1.5 * want[id as usize * k + c] };
                    assert_eq!(got[i * ldy + c], w, "{dtype} row {id} column {c}");
                }
                assert!(got[i * ldy + k].is_nan(), "{dtype}: wrote beyond row {id}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_shape(
        dtype in proptest::sample::select(PackedLayout::dtypes().collect::<Vec<_>>()),
        bf16: bool,
        kernel in 0usize..KERNELS.len(),
        m in 1usize..70,
        n16 in 1usize..8,
        n_odd in 0usize..16,
        blocks in 1usize..14,
        splits in 1usize..4,
        pad in 0usize..3,
        bias: bool,
        epilogue in proptest::sample::select(Epilogue::ALL.to_vec()),
    ) {
        let k = if dtype.block_len() == 256 { 256 * blocks.div_ceil(5) } else { 32 * blocks };
        let tokens = KERNELS[kernel];
        let m = if tokens == GEMV_ROWS { m.div_ceil(18) } else { m };
        let n = if epilogue.is_gated() { 16 * n16 } else { 16 * n16 - n_odd };
        let act = if bf16 { Half::BF16 } else { Half::F16 };
        let c = Case { pad_x: 8 * pad, pad_y: (0, pad), bias, epilogue, ..plain(dtype, act, m, n, k) };
        let k_split = k.div_ceil(splits).next_multiple_of(128);
        for rt in support::gpu::runtimes() {
            if let Some(plan) = forced(&*rt, &c, tokens, k_split) {
                check(&rt, &c, &plan);
            }
        }
    }
}

/// On devices with room for two, three and four stages of the ring, threads in every order, copies at any time, every
/// access checked.
#[cfg(tandem_emulation)]
#[test]
fn every_ring_in_every_schedule() {
    use tandem::device::emulated::{CopyTiming, EmulatedOptions, EmulatedRuntime, KernelChecks, Schedule};
    for (sm, schedule, copies) in [
        (75, Schedule::Descending, CopyTiming::AtOnce),
        (86, Schedule::Random, CopyTiming::Random),
        (90, Schedule::Preempted, CopyTiming::Random),
    ] {
        let checks = KernelChecks { schedule, copies, seed: 11, ..KernelChecks::default() };
        let options = EmulatedOptions { sm, checks, ..EmulatedOptions::default() };
        let rt: Arc<dyn Runtime> = Arc::new(EmulatedRuntime::new(options).expect("a device"));
        each_kernel_of(&rt, &mut |rt, dtype, act, tokens| {
            if ![DType::Q4_K, DType::Q5_1, DType::Q6_K, DType::Q8_0].contains(&dtype) {
                return; // one of each way to store scales, one of each size of codes
            }
            // Five steps of 128 columns or more: rings go round. Two splits.
            let k = if dtype.block_len() == 256 { 1280 } else { 1248 };
            let c = Case { bias: true, ..plain(dtype, act, tokens.min(10), 33, k) };
            check(rt, &c, &forced(&**rt, &c, tokens, 640).expect("asked before"));
        });
    }
}

/// Fragments are read from shared memory without bank conflicts, as the headers say.
#[cfg(tandem_emulation)]
#[test]
fn no_bank_conflicts() {
    use tandem::device::emulated::ffi;
    each_kernel(|rt, dtype, act, tokens| {
        let c = plain(dtype, act, tokens, 33, 256);
        let plan = unsplit(&**rt, &c, tokens).expect("asked before");
        check(rt, &c, &plan);
        if tokens > GEMV_ROWS && rt.info().name.contains("emulated") {
            let stats = ffi::kernel_stats(&plan.kernel).expect("it ran");
            assert!(stats.ldmatrix_phases > 0 && stats.ldmatrix_conflicts == 0, "{}: {stats:?}", plan.kernel);
        }
    });
}
