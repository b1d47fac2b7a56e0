//! Dense linear layers: decode (`gemv.cu`, `linear_dense.cu`) and prefill (`gemm.cu`, `gemm_sm90a.cu`).

use tandem::Result;
use tandem::device::kernels::product::choose::DENSE_TILES_ROWS;
use tandem::device::kernels::product::gemm::{self, Path};
use tandem::device::kernels::product::{self, COUNTER_BYTES, DecodePlan, Epilogue, Matrix, ProductArgs};
use tandem::device::{Buffer, DevPtr, Lane};
use tandem::tensor::Half;

use crate::data;
use crate::measure::{Bench, Work};

/// A weight of a model: name, rows, columns, epilogue.
pub type Weight = (&'static str, usize, usize, Epilogue);

pub const LLAMA_8B: [Weight; 4] = [
    ("llama-3-8b qkv", 6144, 4096, Epilogue::F32),
    ("llama-3-8b o", 4096, 4096, Epilogue::F32),
    ("llama-3-8b gate_up", 28672, 4096, Epilogue::SwiGlu),
    ("llama-3-8b down", 4096, 14336, Epilogue::F32),
];
const SMOLLM2_135M: [Weight; 4] = [
    ("smollm2-135m qkv", 960, 576, Epilogue::F32),
    ("smollm2-135m o", 576, 576, Epilogue::F32),
    ("smollm2-135m gate_up", 3072, 576, Epilogue::SwiGlu),
    ("smollm2-135m down", 576, 1536, Epilogue::F32),
];
pub const TINY: [Weight; 2] =
    [("tiny plain", 40, 264, Epilogue::F32), ("tiny gate_up", 48, 72, Epilogue::SwiGlu)];

/// Operands of one weight on the device, the weight as often as it takes to be cold.
pub struct Operands {
    dtype: Half,
    weight: Weight,
    w: Vec<u16>,
    x: Vec<u16>,
    w_copies: Vec<Buffer>,
    x_buffer: Buffer,
    y: Buffer,
    scratch: Buffer,
}

impl Operands {
    pub fn new(bench: &Bench, dtype: Half, weight: Weight, max_m: usize) -> Result<Operands> {
        Operands::with_scratch(bench, dtype, weight, max_m, 0)
    }

    /// [`Operands::new`] with at least so many bytes of scratch.
    pub fn with_scratch(
        bench: &Bench,
        dtype: Half,
        weight: Weight,
        max_m: usize,
        least: usize,
    ) -> Result<Operands> {
        let (_, n, k, _) = weight;
        let rt = &bench.rt;
        let w = data::halves(dtype, n * k, 1, (3.0 / k as f32).sqrt());
        let x = data::halves(dtype, max_m * k, 2, 1.0);
        let upload = |v: &[u16]| Buffer::from_bytes(rt, Lane::Compute, data::bytes_of(v));
        let w_copies = (0..bench.copies(n * k * 2)).map(|_| upload(&w)).collect::<Result<Vec<_>>>()?;
        let scratch_bytes =
            product::decode::scratch_bytes(rt.info(), &Matrix::Dense { n, k }, max_m.min(DENSE_TILES_ROWS))
                .max(gemm::scratch_bytes(rt.info()))
                .max(least);
        let scratch = Buffer::new(rt, scratch_bytes)?;
        rt.fill(Lane::Compute, scratch.ptr(), 0, COUNTER_BYTES)?;
        let y = Buffer::new(rt, max_m * n * 4)?;
        Ok(Operands { dtype, weight, x_buffer: upload(&x)?, w, x, w_copies, y, scratch })
    }

    /// The product of `m` tokens with the `i`th copy.
    pub fn args(&self, i: usize, m: usize) -> ProductArgs {
        let (_, n, k, epilogue) = self.weight;
        let ptr = self.w_copies[i % self.w_copies.len()].ptr();
        ProductArgs {
            w: product::Weight { ptr, matrix: Matrix::Dense { n, k }, bias: DevPtr::NULL },
            act: self.dtype,
            x: self.x_buffer.ptr(),
            ldx: k,
            y: self.y.ptr(),
            ldy: self.columns(),
            m,
            epilogue,
            scratch: self.scratch.ptr(),
        }
    }

    fn columns(&self) -> usize {
        if self.weight.3.is_gated() { self.weight.1 / 2 } else { self.weight.1 }
    }

    /// A sample of the outputs for `m` tokens against f64. As tests/gpu/kernels/gemm.rs derives it, a sum of k products has
    /// an error within (k + 64) 2^-23 of their magnitudes, slopes of activations are below 1.13.
    pub fn check(&self, bench: &Bench, kernel: &str, m: usize) -> Result<()> {
        let (name, _, k, epilogue) = self.weight;
        let (columns, gated) = (self.columns(), epilogue.is_gated());
        let mut bytes = vec![0; m * columns * if gated { 2 } else { 4 }];
        bench.rt.download(Lane::Compute, self.y.ptr(), &mut bytes)?;
        let sum = |token: usize, row: usize| {
            let products = (0..k).map(|c| {
                data::value(self.dtype, self.w[row * k + c]) * data::value(self.dtype, self.x[token * k + c])
            });
            products.fold((0.0, 0.0), |(s, e): (f64, f64), p| {
                (s + p, e + p.abs() * (k + 64) as f64 * 2f64.powi(-23))
            })
        };
        for at in data::sample(m * columns, if bench.test { m * columns } else { 300 }) {
            let (token, column) = (at / columns, at % columns);
            let (got, want, tolerance) = if gated {
                let row = column / 8 * 16 + column % 8;
                let ((gate, gate_error), (up, up_error)) = (sum(token, row), sum(token, row + 8));
                let silu = gate / (1.0 + (-gate).exp());
                let error = (1.13 * gate_error + 2f64.powi(-19) * (gate.abs() + 1.0)) * (up.abs() + up_error)
                    + silu.abs() * up_error;
                let bits = u16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]]);
                let rounding = 2f64.powi(-8) * ((silu * up).abs() + error) + 2f64.powi(-25);
                (data::value(self.dtype, bits), silu * up, error + rounding)
            } else {
                let (want, error) = sum(token, column);
                let got = f32::from_le_bytes(bytes[4 * at..4 * at + 4].try_into().expect("4 bytes"));
                (f64::from(got), want, error)
            };
            assert!(
                (got - want).abs() <= tolerance,
                "{kernel} on {name}: token {token} of {m}, column {column} is {got}, wanted {want} within {tolerance:e}"
            );
        }
        Ok(())
    }

    pub fn bytes(&self, m: usize) -> f64 {
        let (_, n, k, epilogue) = self.weight;
        (2 * n * k + 2 * m * k + m * self.columns() * if epilogue.is_gated() { 2 } else { 4 }) as f64
    }

    pub fn flops(&self, m: usize) -> f64 {
        2.0 * m as f64 * self.weight.1 as f64 * self.weight.2 as f64
    }
}

fn weights(test: bool) -> Vec<Weight> {
    if test { TINY.to_vec() } else { [LLAMA_8B, SMOLLM2_135M].concat() }
}

/// Decode: 1 to 64 tokens.
pub fn decode(bench: &mut Bench) -> Result<()> {
    let tokens: &[usize] = if bench.test { &[1, 4, 9] } else { &[1, 2, 4, 8, 16, 32, 64] };
    for dtype in [Half::BF16, Half::F16] {
        for weight in weights(bench.test) {
            let (name, n, k, _) = weight;
            let plans = tokens
                .iter()
                .map(|&m| (m, DecodePlan::new(bench.rt.info(), &Matrix::Dense { n, k }, dtype, m)));
            let todo: Vec<_> = plans
                .filter(|(m, p)| {
                    bench.rt.has_kernel(&p.kernel)
                        && bench.wants("decode-linear", &p.kernel, &shape(name, *m))
                })
                .collect();
            if todo.is_empty() || (dtype == Half::F16 && !bench.test && name != "llama-3-8b qkv") {
                continue;
            }
            let o = Operands::new(bench, dtype, weight, tokens[tokens.len() - 1])?;
            for (m, plan) in todo {
                let rt = bench.rt.clone();
                let mut launch = |i: usize| {
                    let args = o.args(i, m);
                    product::decode(&*rt, Lane::Compute, &args)
                };
                launch(0)?;
                o.check(bench, &plan.kernel, m)?;
                let work = Work {
                    family: "decode-linear",
                    kernel: plan.kernel,
                    shape: shape(name, m),
                    bytes: o.bytes(m),
                    flops: o.flops(m),
                    peak: None,
                };
                bench.run(work, &mut launch)?;
            }
        }
    }
    Ok(())
}

fn shape(name: &str, m: usize) -> String {
    format!("{name} m={m}")
}

/// Prefill: 128 tokens and more, by every kind of instruction that the device has.
pub fn prefill(bench: &mut Bench) -> Result<()> {
    let tokens: &[usize] = if bench.test { &[70] } else { &[128, 512, 2048] };
    for dtype in [Half::BF16, Half::F16] {
        for weight in weights(bench.test) {
            let (name, n, k, _) = weight;
            let mut todo = Vec::new();
            for path in [Path::Tma, Path::Async, Path::Sync] {
                for &m in tokens {
                    let plan = gemm::plan(bench.rt.info(), path, m, n, k);
                    let kernel = path.kernel(dtype, plan.tokens);
                    let runs =
                        bench.rt.has_kernel(&kernel) && (path != Path::Tma || bench.rt.info().sm == 90);
                    if runs && bench.wants("prefill-gemm", &kernel, &shape(name, m)) {
                        todo.push((m, plan, kernel));
                    }
                }
            }
            if todo.is_empty() || (dtype == Half::F16 && !bench.test && name != "llama-3-8b qkv") {
                continue;
            }
            let o = Operands::new(bench, dtype, weight, tokens[tokens.len() - 1])?;
            for (m, plan, kernel) in todo {
                let rt = bench.rt.clone();
                let mut launch = |i: usize| {
                    let args = o.args(i, m);
                    gemm::gemm_as(&*rt, Lane::Compute, &args, &plan)
                };
                launch(0)?;
                o.check(bench, &kernel, m)?;
                // Of the best that the device can, not of what the instructions at hand can.
                let peak = ["peak_wgmma", "peak_mma"].map(|p| format!("{p}_{}", dtype.name()));
                let peak = peak.iter().find(|p| bench.matrix.contains_key(p.as_str())).cloned();
                let work = Work {
                    family: "prefill-gemm",
                    kernel,
                    shape: format!("{} splits={}", shape(name, m), plan.splits),
                    bytes: o.bytes(m),
                    flops: o.flops(m),
                    peak: peak.as_deref(),
                };
                bench.run(work, &mut launch)?;
            }
        }
    }
    Ok(())
}
