//! Products of every kernel that the device's plans choose: dense, then quantised.

use super::numbers::{U, some_halves, unit};
use super::probe::{LANE, Probe, Worst};
use super::{Depth, quantised};
use crate::Result;
use crate::device::built::MODULES;
use crate::device::kernels::product::gemm::{self, GemmPlan, Path, gemm_as};
use crate::device::kernels::product::{DecodePlan, Epilogue, Matrix, ProductArgs, Weight, decode_as};
use crate::device::kernels::quant::{PackedLayout, RowsArgs, pack, rows};
use crate::device::runtime::DevPtr;
use crate::host::Pool;
use crate::reference::dequant::dequantise_row;
use crate::tensor::Half;

/// Columns: no whole number of the tiles of any kernel.
const DENSE_K: usize = 1032;
/// A whole number of super-blocks, long enough to be split.
const QUANT_K: usize = 1024;

/// A product, and what it is a sum of.
struct Case {
    act: Half,
    m: usize,
    n: usize,
    k: usize,
    epilogue: Epilogue,
    /// `[n][k]`
    w: Vec<f64>,
    /// How large the parts are that an element of each row is made of: a code times its scale, less a minimum.
    part: Vec<f64>,
    x: Vec<f64>,
    x_bytes: Vec<u8>,
}

impl Case {
    /// (Σ x·w, its allowed error) of a token and a row: every product passes at most k + 64 additions, in which tensor cores may
    /// truncate (two units each).
    fn sum(&self, token: usize, row: usize) -> (f64, f64) {
        let (x, w) = (&self.x[token * self.k..][..self.k], &self.w[row * self.k..][..self.k]);
        let (mut sum, mut size, mut parts) = (0.0, 0.0, 0.0);
        for (x, w) in x.iter().zip(w) {
            sum += x * w;
            size += (x * w).abs();
            parts += x.abs();
        }
        let parts = size + parts * self.part[row];
        (sum, 2.0 * (self.k + 64) as f64 * U * parts)
    }

    /// What is stored, in the order of y.
    fn want(&self) -> Vec<(f64, f64)> {
        let mut want = Vec::new();
        for token in 0..self.m {
            if self.epilogue == Epilogue::F32 {
                want.extend((0..self.n).map(|row| self.sum(token, row)));
                continue;
            }
            assert_eq!(self.epilogue, Epilogue::SwiGlu, "the epilogue of most models");
            for i in 0..self.n / 2 {
                let (gate, gate_off) = self.sum(token, i / 8 * 16 + i % 8);
                let (up, up_off) = self.sum(token, i / 8 * 16 + 8 + i % 8);
                let silu = gate / (1.0 + (-gate).exp());
                // silu' lies in -0.1..1.1; e^-x is off by its argument's rounding and two ulps.
                let off = 1.1 * gate_off * up.abs()
                    + silu.abs() * up_off
                    + 1.1 * gate_off * up_off
                    + 8.0 * (1.0 + gate.abs()) * U * (silu * up).abs();
                want.push((silu * up, off + unit(self.act) * ((silu * up).abs() + off) + 2f64.powi(-25)));
            }
        }
        want
    }

    fn columns(&self) -> usize {
        if self.epilogue == Epilogue::F32 { self.n } else { self.n / 2 }
    }

    /// Runs it by `launch` on these weights.
    fn run(
        &self,
        p: &Probe,
        weights: &[u8],
        matrix: Matrix,
        scratch: usize,
        launch: impl FnOnce(&ProductArgs) -> Result<()>,
    ) -> Result<Worst> {
        let (w, x) = (p.up(weights)?, p.up(&self.x_bytes)?);
        let scratch = p.zeros(scratch)?;
        let element = if self.epilogue == Epilogue::F32 { 4 } else { 2 };
        let y = p.out(self.m * self.columns() * element)?;
        launch(&ProductArgs {
            w: Weight { ptr: w.ptr(), matrix, bias: DevPtr::NULL },
            act: self.act,
            x: x.ptr(),
            ldx: self.k,
            y: y.ptr(),
            ldy: self.columns(),
            m: self.m,
            epilogue: self.epilogue,
            scratch: scratch.ptr(),
        })?;
        let got = if element == 4 { p.floats(&y)? } else { p.halves(&y, self.act)? };
        Ok(Worst::of(&got, self.want()))
    }
}

/// Products with weights of 16 bits: one token to many, every kernel that the device has.
pub fn dense(p: &mut Probe, depth: Depth) {
    for &act in p.half_types() {
        for m in [1, 2, 3, 4, 8, 16, 32, 64, 128] {
            for epilogue in [Epilogue::F32, Epilogue::SwiGlu] {
                if epilogue == Epilogue::F32 || m == 1 || depth == Depth::Full {
                    by_decode(p, act, m, epilogue);
                }
            }
        }
        for path in [Path::Sync, Path::Async, Path::Tma] {
            // What the device would choose, or fall back to (`product::gemm::Path::of`).
            let sm = p.rt.info().sm;
            let runs = match path {
                Path::Sync => sm < 80,
                Path::Async => sm >= 80,
                Path::Tma => sm == 90,
            };
            for tokens in path.tokens() {
                if !runs || !p.has(&path.kernel(act, tokens)) {
                    continue;
                }
                for (splits, epilogue) in [(2, Epilogue::F32), (1, Epilogue::SwiGlu)] {
                    if depth == Depth::Full || splits == 2 {
                        by_gemm(p, act, GemmPlan { path, tokens, splits, k_per_split: 0 }, epilogue);
                    }
                }
            }
        }
    }
}

fn dense_case(act: Half, m: usize, n: usize, epilogue: Epilogue) -> (Case, Vec<u8>) {
    let k = DENSE_K;
    let (w, bytes) = some_halves(act, 1, n * k, 0.1);
    let (x, x_bytes) = some_halves(act, 2, m * k, 1.0);
    (Case { act, m, n, k, epilogue, w, part: vec![0.0; n], x, x_bytes }, bytes)
}

fn by_decode(p: &mut Probe, act: Half, m: usize, epilogue: Epilogue) {
    let (case, bytes) = dense_case(act, m, 80, epilogue);
    let matrix = Matrix::Dense { n: case.n, k: case.k };
    let plan = DecodePlan::new(p.rt.info(), &matrix, act, m);
    if !p.has(&plan.kernel) {
        return;
    }
    p.check(&format!("{} of {m} tokens", plan.kernel), |p| {
        case.run(p, &bytes, matrix, plan.scratch_bytes(), |args| decode_as(&*p.rt, LANE, args, &plan))
    });
}

fn by_gemm(p: &mut Probe, act: Half, plan: GemmPlan, epilogue: Epilogue) {
    // One tile of rows by one of tokens, so that the splits' sums fit any device.
    let (case, bytes) = dense_case(act, 60, 112, epilogue);
    let matrix = Matrix::Dense { n: case.n, k: case.k };
    let k_per_split = case.k.div_ceil(plan.splits).next_multiple_of(plan.path.depth());
    let plan = GemmPlan { k_per_split, ..plan };
    let what = format!("{} in {} parts", plan.path.kernel(act, plan.tokens), plan.splits);
    let scratch = gemm::scratch_bytes(p.rt.info());
    p.check(&what, |p| case.run(p, &bytes, matrix, scratch, |args| gemm_as(&*p.rt, LANE, args, &plan)));
}

/// Whether the largest kernels need no compilation by the driver.
pub fn has_machine_code(p: &Probe) -> bool {
    let info = p.rt.info();
    let mut largest = MODULES.iter().filter(|m| m.name.starts_with("linear_quant") && m.runs_on(info.sm));
    info.driver == 0 || largest.any(|m| m.code_for(info.sm).is_some())
}

/// Products with quantised weights, and their decoding for long prompts.
pub fn quantised_products(p: &mut Probe, depth: Depth) {
    if depth == Depth::Quick && !has_machine_code(p) {
        p.lacks("the driver would compile these kernels for minutes; tandem doctor --gpu checks them");
        return;
    }
    for dtype in PackedLayout::dtypes() {
        for &act in p.half_types() {
            // Activations of quantised models are f16; bf16 is there for what the contract promises.
            if depth == Depth::Quick && act == Half::BF16 {
                continue;
            }
            let (n, k) = (80, QUANT_K);
            let file = quantised(dtype, n, k, 3);
            let row_bytes = dtype.row_bytes(k).expect("whole blocks");
            let row = |r: usize| &file[r * row_bytes..][..row_bytes];
            let layout = PackedLayout::new(dtype, n, k).expect("a quantised type");
            let mut packed = vec![0; layout.bytes()];
            pack(&layout, &row, &Pool::new(1), &mut packed);
            let mut decoded = vec![0f32; n * k];
            for (r, to) in decoded.chunks_exact_mut(k).enumerate() {
                dequantise_row(dtype, row(r), to);
            }
            let w: Vec<f64> = decoded.iter().map(|&w| f64::from(w)).collect();
            // A minimum is no larger than the largest weight of its block; with the code's product, four of them.
            let part: Vec<f64> =
                w.chunks_exact(k).map(|row| 4.0 * row.iter().fold(0f64, |m, w| m.max(w.abs()))).collect();
            p.check(&format!("decoding of {dtype} to {}", act.name()), |p| {
                let (w_dev, y) = (p.up(&packed)?, p.out(n * k * 2)?);
                let to = RowsArgs { layout, w: w_dev.ptr(), to: act, y: y.ptr(), ldy: k, first: 0, count: n };
                rows(&*p.rt, LANE, &to)?;
                let allowed = |i: usize, w: f64| unit(act) * w.abs() + 4.0 * U * part[i / k] + 2f64.powi(-25);
                let want = w.iter().enumerate().map(|(i, &w)| (w, allowed(i, w)));
                Ok(Worst::of(&p.halves(&y, act)?, want))
            });
            for m in [1, 8, 16, 32, 64] {
                let (x, x_bytes) = some_halves(act, 4, m * k, 1.0);
                let (w, part, epilogue) = (w.clone(), part.clone(), Epilogue::F32);
                let case = Case { act, m, n, k, epilogue, w, part, x, x_bytes };
                let matrix = Matrix::Quantised(layout);
                let plan = DecodePlan::new(p.rt.info(), &matrix, act, m);
                if !p.has(&plan.kernel) {
                    continue;
                }
                p.check(&format!("{} of {m} tokens", plan.kernel), |p| {
                    let launch = |args: &ProductArgs| decode_as(&*p.rt, LANE, args, &plan);
                    case.run(p, &packed, matrix, plan.scratch_bytes(), launch)
                });
            }
        }
    }
}
