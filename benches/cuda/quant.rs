//! Linear layers of quantised weights in decode: `gemv_quant.cu`, `linear_quant.cu`.

use tandem::Result;
use tandem::device::kernels::product::{self, DecodePlan, Epilogue, Matrix, ProductArgs, Weight};
use tandem::device::kernels::quant::{self, PackedLayout};
use tandem::device::{Buffer, DevPtr, Lane};
use tandem::host::Pool;
use tandem::reference::dequant::dequantise_row;
use tandem::tensor::{DType, Half, quantise_row};

use crate::data;
use crate::measure::{Bench, Work};

/// Rows are quantised once and repeated: a prime, so that no tile sees the same rows at the same places.
const DISTINCT: usize = 251;
const ACT: Half = Half::BF16;

pub fn decode(bench: &mut Bench) -> Result<()> {
    let (weights, tokens): (&[(&str, usize, usize)], &[usize]) = if bench.test {
        (&[("tiny", 40, 512)], &[1, 9])
    } else {
        let weights: &[_] = &[
            ("llama-3-8b qkv", 6144, 4096),
            ("llama-3-8b gate_up", 28672, 4096),
            ("llama-3-8b down", 4096, 14336),
            ("smollm2-135m down", 576, 1536),
        ];
        (weights, &[1, 4, 8, 16, 32, 64])
    };
    let pool = Pool::new(std::thread::available_parallelism().map_or(1, |n| n.get()));
    for dtype in [DType::Q4_0, DType::Q4_1, DType::Q4_K, DType::Q6_K, DType::Q8_0] {
        for &(name, n, k) in weights {
            let Some(layout) = PackedLayout::new(dtype, n, k) else { continue };
            let matrix = Matrix::Quantised(layout);
            let plans = tokens.iter().map(|&m| (m, DecodePlan::new(bench.rt.info(), &matrix, ACT, m)));
            let todo: Vec<_> = plans
                .filter(|(m, p)| {
                    bench.rt.has_kernel(&p.kernel)
                        && bench.wants("decode-quantised", &p.kernel, &shape(name, *m))
                })
                .collect();
            if todo.is_empty() {
                continue;
            }
            let max_m = tokens[tokens.len() - 1];
            let row_bytes = dtype.row_bytes(k).expect("whole blocks");
            let rows: Vec<Vec<u8>> = (0..DISTINCT)
                .map(|r| {
                    let row: Vec<f32> =
                        (0..k).map(|c| data::noise(3, r * k + c) / (k as f32).sqrt()).collect();
                    let mut out = vec![0; row_bytes];
                    quantise_row(dtype, &row, &mut out);
                    out
                })
                .collect();
            let mut packed = vec![0; layout.bytes()];
            quant::pack(&layout, &|r| &rows[r % DISTINCT][..], &pool, &mut packed);
            let x = data::halves(ACT, max_m * k, 2, 1.0);
            let rt = bench.rt.clone();
            let upload = |bytes: &[u8]| Buffer::from_bytes(&rt, Lane::Compute, bytes);
            let copies =
                (0..bench.copies(packed.len())).map(|_| upload(&packed)).collect::<Result<Vec<_>>>()?;
            let x_buffer = upload(data::bytes_of(&x))?;
            let scratch = upload(&vec![0; product::decode::scratch_bytes(rt.info(), &matrix, max_m)])?;
            let y = Buffer::new(&rt, max_m * n * 4)?;
            for (m, plan) in todo {
                let mut launch = |i: usize| {
                    let ptr = copies[i % copies.len()].ptr();
                    let args = ProductArgs {
                        w: Weight { ptr, matrix, bias: DevPtr::NULL },
                        act: ACT,
                        x: x_buffer.ptr(),
                        ldx: k,
                        y: y.ptr(),
                        ldy: n,
                        m,
                        epilogue: Epilogue::F32,
                        scratch: scratch.ptr(),
                    };
                    product::decode(&*rt, Lane::Compute, &args)
                };
                launch(0)?;
                let mut bytes = vec![0; m * n * 4];
                rt.download(Lane::Compute, y.ptr(), &mut bytes)?;
                let mut row = vec![0f32; k];
                for at in data::sample(m * n, if bench.test { m * n } else { 200 }) {
                    let (token, r) = (at / n, at % n);
                    dequantise_row(dtype, &rows[r % DISTINCT], &mut row);
                    let (mut want, mut size) = (0.0, 0.0);
                    for (c, &w) in row.iter().enumerate() {
                        let p = f64::from(w) * data::value(ACT, x[token * k + c]);
                        want += p;
                        size += p.abs();
                    }
                    // A weight may be rounded to the activation type (scale and minimum apart: twice its half ulp, of
                    // terms that are at most twice the weights' range); sums as for dense weights.
                    let tolerance = size * ((k + 64) as f64 * 2f64.powi(-23)) + 4.0 * 2f64.powi(-8) * size;
                    let got =
                        f64::from(f32::from_le_bytes(bytes[4 * at..4 * at + 4].try_into().expect("4 bytes")));
                    assert!(
                        (got - want).abs() <= tolerance,
                        "{} on {name}: token {token}, row {r} is {got}, wanted {want} within {tolerance:e}",
                        plan.kernel
                    );
                }
                let work = Work {
                    family: "decode-quantised",
                    kernel: plan.kernel,
                    shape: shape(name, m),
                    // What the file's format takes, not what packing pads it to.
                    bytes: (n * row_bytes + 2 * m * k + 4 * m * n) as f64,
                    flops: 2.0 * (m * n * k) as f64,
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
