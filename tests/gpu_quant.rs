//! Quantised linear (`cuda/gemv_quant.cu`, `cuda/linear_quant.cu`, `cuda/dequant.cu`) against f64 on decoded weights.
#![cfg(tandem_kernels)]

mod support;

use std::sync::Arc;

use half::{bf16, f16};
use proptest::prelude::*;
use tandem::device::accelerator::Half;
use tandem::device::host::Pool;
use tandem::device::kernels::linear::{COUNTER_BYTES, Epilogue};
use tandem::device::kernels::quant::{
    self, GEMV_TOKENS, GatherArgs, Layout, Plan, QuantLinearArgs, RowsArgs, gate_up_row, linear_as,
};
use tandem::device::runtime::{Buffer, DevPtr, Lane, Runtime};
use tandem::reference::dequant::dequantise_row;
use tandem::tensor::DType;

const QUANTISED: [DType; 8] =
    [DType::Q4_0, DType::Q4_1, DType::Q4_K, DType::Q5_0, DType::Q5_1, DType::Q5_K, DType::Q6_K, DType::Q8_0];
/// Tokens of a block of every kernel: the first is GEMV.
const KERNELS: [usize; 5] = [GEMV_TOKENS, 8, 16, 32, 64];

/// What outputs and their surroundings are filled with before: a NaN, as f32 and as two halves.
const CANARY: u8 = 0xff;
/// Bytes after the last element of an output that nobody may write.
const GUARD: usize = 64;

#[derive(Debug, Clone, Copy)]
struct Case {
    dtype: DType,
    act: Half,
    m: usize,
    n: usize,
    k: usize,
    /// Elements that a row of x, and of y, has more than needed.
    pad_x: usize,
    pad_y: usize,
    bias: bool,
    epilogue: Epilogue,
}

impl Case {
    fn plain(dtype: DType, act: Half, m: usize, n: usize, k: usize) -> Case {
        Case { dtype, act, m, n, k, pad_x: 0, pad_y: 0, bias: false, epilogue: Epilogue::F32 }
    }
    fn columns(&self) -> usize {
        if self.epilogue.is_gated() { self.n / 2 } else { self.n }
    }
    fn ldx(&self) -> usize {
        self.k + self.pad_x
    }
    fn ldy(&self) -> usize {
        self.columns() + self.pad_y
    }
    /// Bytes of an element of y.
    fn size(&self) -> usize {
        if self.epilogue == Epilogue::F32 { 4 } else { 2 }
    }
    fn layout(&self) -> Layout {
        Layout::new(self.dtype, self.n, self.k).expect("a quantised matrix")
    }
}

fn bits_of(act: Half, v: f64) -> u16 {
    match act {
        Half::F16 => f16::from_f64(v).to_bits(),
        Half::BF16 => bf16::from_f64(v).to_bits(),
    }
}

fn value_of(act: Half, bits: u16) -> f64 {
    match act {
        Half::F16 => f16::from_bits(bits).to_f64(),
        Half::BF16 => bf16::from_bits(bits).to_f64(),
    }
}

/// Uniform in 0..2^32, by place: the same whatever the sizes, so that batches of different m compare.
fn random(seed: u64, row: usize, col: usize) -> u32 {
    let mut z = seed ^ (row as u64) << 40 ^ (col as u64) << 8;
    for _ in 0..2 {
        z = (z ^ z >> 30).wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z ^= z >> 27;
    }
    (z >> 32) as u32
}

/// Uniform in -1..1.
fn noise(seed: u64, row: usize, col: usize) -> f64 {
    f64::from(random(seed, row, col)) / f64::from(1u32 << 31) - 1.0
}

/// Where a block has its f16 scales, and its codes.
fn places(dtype: DType) -> (&'static [usize], std::ops::Range<usize>) {
    match dtype {
        DType::Q4_0 => (&[0], 2..18),
        DType::Q5_0 => (&[0], 2..22),
        DType::Q8_0 => (&[0], 2..34),
        DType::Q4_1 => (&[0, 2], 4..20),
        DType::Q5_1 => (&[0, 2], 4..24),
        DType::Q4_K => (&[0, 2], 16..144),
        DType::Q5_K => (&[0, 2], 16..176),
        DType::Q6_K => (&[208], 0..192),
        DType::F32 | DType::F16 | DType::BF16 => panic!("{dtype} has no codes"),
    }
}

/// Random codes and scales, weights of about 1/sqrt(k): sums then lie where activations bend. Extremes of codes and
/// scales are among them.
fn random_rows(dtype: DType, n: usize, k: usize) -> Vec<u8> {
    let row_bytes = dtype.row_bytes(k).expect("whole blocks");
    let mut bytes: Vec<u8> =
        (0..n * row_bytes).map(|i| random(1, i / row_bytes, i % row_bytes) as u8).collect();
    let largest = match dtype {
        DType::Q4_0 | DType::Q4_1 => 8.0,
        DType::Q5_0 | DType::Q5_1 => 16.0,
        DType::Q8_0 => 128.0,
        DType::Q4_K => 8.0 * 32.0,
        DType::Q5_K => 16.0 * 32.0,
        _ => 32.0 * 64.0,
    };
    let size = 3.0 / (largest * (k as f64).sqrt());
    for (i, block) in bytes.chunks_exact_mut(dtype.block_bytes()).enumerate() {
        for (j, &at) in places(dtype).0.iter().enumerate() {
            // Minima are as large as the codes make them.
            let each = if j == 1 && matches!(dtype, DType::Q4_1 | DType::Q5_1) { largest } else { 1.0 };
            let value = f16::from_f64(noise(2, i, j) * size * each);
            block[at..at + 2].copy_from_slice(&value.to_le_bytes());
        }
    }
    bytes
}

/// Operands as the device gets them, and what the rows of y are sums of.
struct Operands {
    packed: Vec<u8>,
    /// `[n][k]` in the order of the packed rows: weights, and how large the parts are that they are made of.
    w: Vec<f64>,
    parts: Vec<f64>,
    x: Vec<u16>,
    bias: Vec<f32>,
}

impl Operands {
    fn new(c: &Case) -> Operands {
        let (layout, row_bytes) = (c.layout(), c.dtype.row_bytes(c.k).expect("whole blocks"));
        let bytes = random_rows(c.dtype, c.n, c.k);
        // Gate and up are one matrix after the other before they are packed.
        let source = |r: usize| {
            let from = match (c.epilogue.is_gated(), gate_up_row(r)) {
                (true, (up, i)) => usize::from(up) * c.n / 2 + i,
                (false, _) => r,
            };
            &bytes[from * row_bytes..][..row_bytes]
        };
        let mut packed = vec![0xa5; layout.bytes()];
        quant::pack(&layout, &source, &Pool::new(2), &mut packed);
        let (mut w, mut parts) = (Vec::new(), Vec::new());
        let (mut row, mut min) = (vec![0.0; c.k], vec![0.0; c.k]);
        for r in 0..c.n {
            dequantise_row(c.dtype, source(r), &mut row);
            // Codes of zero: the minimum alone, where the format has one.
            let mut zeros = source(r).to_vec();
            if matches!(c.dtype, DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K) {
                for block in zeros.chunks_exact_mut(c.dtype.block_bytes()) {
                    block[places(c.dtype).1].fill(0);
                }
                dequantise_row(c.dtype, &zeros, &mut min);
            }
            w.extend(row.iter().map(|&v| f64::from(v)));
            // w = d q + m: |d q| <= |w| + |m|.
            parts.extend(row.iter().zip(&min).map(|(&v, &m)| f64::from(v.abs()) + 2.0 * f64::from(m.abs())));
        }
        // Padding of x is NaN: a sum that takes some in shows it.
        let x = (0..c.m * c.ldx())
            .map(|i| (i / c.ldx(), i % c.ldx()))
            .map(|(m, k)| if k < c.k { bits_of(c.act, 2.0 * noise(3, m, k)) } else { 0x7fff })
            .collect();
        let bias = (0..c.n).map(|i| noise(4, i, 0) as f32).collect();
        Operands { packed, w, parts, x, bias }
    }

    /// Packed row n's sum for token m in f64, and the sum of magnitudes.
    fn sum(&self, c: &Case, m: usize, n: usize) -> (f64, f64) {
        let mut sum = if c.bias { f64::from(self.bias[n]) } else { 0.0 };
        let mut size = sum.abs();
        let x = &self.x[m * c.ldx()..][..c.k];
        for ((w, part), &x) in self.w[n * c.k..].iter().zip(&self.parts[n * c.k..]).zip(x) {
            let x = value_of(c.act, x);
            sum += w * x;
            size += part * x.abs();
        }
        (sum, size)
    }

    /// Element (m, column) of the output, and how far a right result may be from it.
    ///
    /// On its way into a sum, a product meets at most 32 roundings in its block, one for its scale and two for each
    /// block after it (16 columns at least; minima are a second addition), 8 warps, the splits, the bias, and one in
    /// the reference's weight: each within 2^-23 (tensor cores cut where IEEE rounds) of the magnitudes summed so far. silu
    /// and gelu_tanh have slopes below 1.13; their f32 evaluation is within 2^-19 of their argument's magnitude + 1
    /// (fast exponential: 2 + 1.2 |x| units in the last place, |x| < 12).
    fn expect(&self, c: &Case, splits: usize, m: usize, column: usize) -> (f64, f64) {
        let roundings = (32 + 1 + c.k.div_ceil(16) * 2 + 8 + splits + 1 + 1) as f64 * 2f64.powi(-23);
        let half = |v: f64| match c.act {
            Half::F16 => v.abs() * 2f64.powi(-11) + 2f64.powi(-25),
            Half::BF16 => v.abs() * 2f64.powi(-8),
        };
        if !c.epilogue.is_gated() {
            let (sum, size) = self.sum(c, m, column);
            let error = roundings * size;
            return match c.epilogue {
                Epilogue::F32 => (sum, error),
                _ => (sum.max(0.0), error + half(sum.abs() + error)),
            };
        }
        let row = column / 8 * 16 + column % 8;
        let ((gate, gate_size), (up, up_size)) = (self.sum(c, m, row), self.sum(c, m, row + 8));
        let (eg, eu) = (roundings * gate_size, roundings * up_size);
        let act = match c.epilogue {
            Epilogue::SwiGlu => gate / (1.0 + (-gate).exp()),
            _ => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044715 * gate.powi(3));
                0.5 * gate * (1.0 + inner.tanh())
            }
        };
        let ea = 1.13 * eg + 2f64.powi(-19) * (gate.abs() + 1.0);
        let out = act * up;
        let error = ea * (up.abs() + eu) + act.abs() * eu;
        (out, error + half(out.abs() + error))
    }
}

fn upload(rt: &Arc<dyn Runtime>, bytes: &[u8]) -> Buffer {
    Buffer::from_bytes(rt, Lane::Compute, bytes).expect("upload")
}

fn bytes_of<T: Copy, const N: usize>(values: &[T], bytes: fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&v| bytes(v)).collect()
}

fn run(rt: &Arc<dyn Runtime>, c: &Case, o: &Operands, plan: &Plan) -> Vec<u8> {
    let w = upload(rt, &o.packed);
    let x = upload(rt, &bytes_of(&o.x, u16::to_le_bytes));
    let bias = upload(rt, &bytes_of(&o.bias, f32::to_le_bytes));
    let mut out = vec![CANARY; c.m * c.ldy() * c.size() + GUARD];
    let y = upload(rt, &out);
    // NaNs: a partial sum that is read before it is written shows.
    let mut scratch = vec![CANARY; plan.scratch_bytes()];
    scratch[..COUNTER_BYTES].fill(0);
    let scratch = upload(rt, &scratch);
    let args = QuantLinearArgs {
        layout: c.layout(),
        w: w.ptr(),
        act: c.act,
        x: x.ptr(),
        bias: if c.bias { bias.ptr() } else { DevPtr::NULL },
        y: y.ptr(),
        scratch: scratch.ptr(),
        m: c.m,
        ldx: c.ldx(),
        ldy: c.ldy(),
        epilogue: c.epilogue,
    };
    linear_as(&**rt, Lane::Compute, &args, plan).unwrap_or_else(|e| panic!("{c:?} {plan:?}: {e}"));
    rt.download(Lane::Compute, y.ptr(), &mut out).unwrap_or_else(|e| panic!("{c:?} {plan:?}: {e}"));
    let mut counters = vec![1; COUNTER_BYTES];
    rt.download(Lane::Compute, scratch.ptr(), &mut counters).expect("download");
    assert!(counters.iter().all(|&b| b == 0), "{plan:?}: counters are not left at zero");
    out
}

fn element(c: &Case, y: &[u8], at: usize) -> f64 {
    if c.epilogue == Epilogue::F32 {
        f32::from_le_bytes(y[at * 4..at * 4 + 4].try_into().expect("4 bytes")).into()
    } else {
        value_of(c.act, u16::from_le_bytes([y[at * 2], y[at * 2 + 1]]))
    }
}

/// Runs `c` as `plan` says and compares every element; what lies between and after them is untouched.
fn check(rt: &Arc<dyn Runtime>, c: &Case, plan: &Plan) -> Vec<u8> {
    let operands = Operands::new(c);
    let y = run(rt, c, &operands, plan);
    for m in 0..c.m {
        for column in 0..c.columns() {
            let got = element(c, &y, m * c.ldy() + column);
            let (want, tolerance) = operands.expect(c, plan.splits, m, column);
            assert!(
                (got - want).abs() <= tolerance,
                "{c:?} {plan:?}: token {m} column {column} is {got}, wanted {want} within {tolerance:e}"
            );
        }
        let padding = &y[(m * c.ldy() + c.columns()) * c.size()..(m + 1) * c.ldy() * c.size()];
        assert!(padding.iter().all(|&b| b == CANARY), "{c:?} {plan:?}: token {m}: wrote beyond its columns");
    }
    let guard = &y[c.m * c.ldy() * c.size()..];
    assert!(guard.iter().all(|&b| b == CANARY), "{c:?} {plan:?}: wrote beyond the last token");
    y
}

/// The kernel for `tokens` tokens, if this runtime has it, splitting k after `k_split` columns.
fn forced(rt: &dyn Runtime, c: &Case, tokens: usize, k_split: usize) -> Option<Plan> {
    let plan = Plan::forced(rt.info(), &c.layout(), c.act, c.m, tokens, k_split);
    (rt.has_kernel(&plan.kernel) && plan.shared <= rt.info().shared_per_block).then_some(plan)
}

fn unsplit(rt: &dyn Runtime, c: &Case, tokens: usize) -> Option<Plan> {
    forced(rt, c, tokens, c.k.next_multiple_of(128))
}

/// Every format, kernel and type of activations that this runtime has.
fn each_kernel_of(rt: &Arc<dyn Runtime>, f: &mut impl FnMut(&Arc<dyn Runtime>, DType, Half, usize)) {
    let mut found = 0;
    for dtype in QUANTISED {
        for act in [Half::F16, Half::BF16] {
            for tokens in KERNELS {
                let c = Case::plain(dtype, act, tokens, 16, 256);
                if unsplit(&**rt, &c, tokens).is_some() {
                    f(rt, dtype, act, tokens);
                    found += 1;
                }
            }
        }
    }
    // bf16 from 80 on; devices of 64 KiB lack some of the kernels for 32 and 64 tokens.
    let types = if rt.info().sm >= 80 { 2 } else { 1 };
    let most = QUANTISED.len() * types * KERNELS.len();
    let large = if rt.info().shared_per_block < 99 << 10 { 2 * QUANTISED.len() * types } else { 0 };
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
            let c = Case { pad_x: 8, pad_y: 3, ..Case::plain(dtype, act, m, n, k) };
            check(rt, &c, &unsplit(&**rt, &c, tokens).expect("asked before"));
        }
    });
}

#[test]
fn several_blocks_of_rows_and_tokens() {
    each_kernel(|rt, dtype, act, tokens| {
        // GEMV has one block of tokens; in emulation a few formats stand for all.
        let few = [DType::Q4_0, DType::Q4_K, DType::Q8_0].contains(&dtype);
        if tokens == GEMV_TOKENS || !few || act == Half::F16 && tokens != 8 {
            return;
        }
        let c = Case { pad_y: 1, ..Case::plain(dtype, act, tokens + 3, 275, 256) };
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
                let c = Case { epilogue, bias, pad_y: 1, ..Case::plain(dtype, act, tokens.min(11), 48, 256) };
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
            let c = Case { epilogue, bias: true, ..Case::plain(dtype, act, tokens.min(9), 32, k) };
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
        let c = Case::plain(dtype, act, tokens.min(18), 40, 512);
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
fn the_planned_kernels_are_right() {
    for rt in support::gpu::runtimes() {
        for (dtype, n, k) in [(DType::Q4_K, 64, 1024), (DType::Q8_0, 48, 1056), (DType::Q6_K, 528, 256)] {
            for m in [1, 2, 5, 12, 20, 40, 70] {
                let c = Case { bias: true, ..Case::plain(dtype, Half::F16, m, n, k) };
                check(&rt, &c, &Plan::new(rt.info(), &c.layout(), c.act, m));
            }
        }
    }
}

#[test]
fn infinite_and_invalid_activations_stay_in_their_token() {
    for rt in support::gpu::runtimes() {
        for tokens in KERNELS {
            let c = Case::plain(DType::Q4_1, Half::F16, 3, 20, 96);
            let plan = unsplit(&*rt, &c, tokens).expect("f16 on every device");
            let mut operands = Operands::new(&c);
            let clean = run(&rt, &c, &operands, &plan);
            operands.x[c.ldx() + 5] = f16::INFINITY.to_bits();
            operands.x[c.ldx() + 70] = f16::NAN.to_bits();
            let y = run(&rt, &c, &operands, &plan);
            let row = c.n * 4;
            assert_eq!((&y[..row], &y[2 * row..]), (&clean[..row], &clean[2 * row..]), "{plan:?}");
            assert!((c.n..2 * c.n).all(|at| element(&c, &y, at).is_nan()), "{plan:?}: a NaN is lost");
        }
    }
}

#[test]
fn decoded_rows_are_the_references_rounded() {
    for rt in support::gpu::runtimes() {
        for dtype in QUANTISED {
            let (n, k) = (37, if dtype.block_len() == 256 { 768 } else { 608 });
            let layout = Layout::new(dtype, n, k).expect("a quantised matrix");
            let bytes = random_rows(dtype, n, k);
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
                    let mut out = vec![CANARY; count * ldy * 2 + GUARD];
                    let y = upload(&rt, &out);
                    let args = RowsArgs { layout, w: w.ptr(), to, y: y.ptr(), ldy, first, count };
                    quant::rows(&*rt, Lane::Compute, &args).expect("launch");
                    rt.download(Lane::Compute, y.ptr(), &mut out).expect("download");
                    let got = |at: usize| u16::from_le_bytes([out[2 * at], out[2 * at + 1]]);
                    for r in 0..count {
                        for c in 0..k {
                            let w = want[(first + r) * k + c];
                            let bits = match to {
                                Half::F16 => f16::from_f32(w).to_bits(),
                                Half::BF16 => bf16::from_f32(w).to_bits(),
                            };
                            let found = got(r * ldy + c);
                            // Zero codes under negative scales are -0 here, 0 - 0 there: equal.
                            let zeros = (found | bits) & 0x7fff == 0;
                            assert!(
                                found == bits || zeros,
                                "{dtype} {to:?} ({r}, {c}): {found:x}, not {bits:x}"
                            );
                        }
                        assert!(
                            (k..ldy).all(|c| got(r * ldy + c) == 0xffff),
                            "{dtype}: wrote beyond row {r}"
                        );
                    }
                    assert!(
                        out[count * ldy * 2..].iter().all(|&b| b == CANARY),
                        "{dtype}: wrote beyond the rows"
                    );
                }
            }

            // The last is no row: padding.
            let ids = [36u32, 0, 8, 23, 0, u32::MAX];
            let row_ids = upload(&rt, &bytes_of(&ids, u32::to_le_bytes));
            let ldy = k + 2;
            let mut out = vec![CANARY; ids.len() * ldy * 4 + GUARD];
            let y = upload(&rt, &out);
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
            rt.download(Lane::Compute, y.ptr(), &mut out).expect("download");
            let got = |at: usize| f32::from_le_bytes(out[4 * at..4 * at + 4].try_into().expect("4 bytes"));
            for (i, &id) in ids.iter().enumerate() {
                for c in 0..k {
                    let w = if id == u32::MAX { 0.0 } else { 1.5 * want[id as usize * k + c] };
                    assert_eq!(got(i * ldy + c), w, "{dtype} row {id} column {c}");
                }
                assert!(got(i * ldy + k).is_nan(), "{dtype}: wrote beyond row {id}");
            }
            assert!(
                out[ids.len() * ldy * 4..].iter().all(|&b| b == CANARY),
                "{dtype}: wrote beyond the rows"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_shape(
        dtype in proptest::sample::select(QUANTISED.to_vec()),
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
        let c = Case {
            dtype,
            act: if bf16 { Half::BF16 } else { Half::F16 },
            m: if tokens == GEMV_TOKENS { m.div_ceil(18) } else { m },
            n: if epilogue.is_gated() { 16 * n16 } else { 16 * n16 - n_odd },
            k,
            pad_x: 8 * pad,
            pad_y: pad,
            bias,
            epilogue,
        };
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
            let c = Case { bias: true, ..Case::plain(dtype, act, tokens.min(10), 33, k) };
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
        let c = Case::plain(dtype, act, tokens, 33, 256);
        let plan = unsplit(&**rt, &c, tokens).expect("asked before");
        check(rt, &c, &plan);
        if tokens > GEMV_TOKENS && rt.info().name.contains("emulated") {
            let stats = ffi::kernel_stats(&plan.kernel).expect("it ran");
            assert!(stats.ldmatrix_phases > 0 && stats.ldmatrix_conflicts == 0, "{}: {stats:?}", plan.kernel);
        }
    });
}
