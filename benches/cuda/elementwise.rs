//! What lies between the matrices: residual + norm, and the greatest of the logits.

use tandem::Result;
use tandem::device::accelerator::{Half, NormWeight};
use tandem::device::kernels::elementwise::{
    LogitsReduce, NormRows, logits_reduce, logits_workspace_bytes, norm,
};
use tandem::device::runtime::{Buffer, DevPtr, Lane};
use tandem::model::spec::Norm;

use crate::data;
use crate::measure::{Bench, Work};

/// `len` f32 of noise.
fn floats(len: usize, seed: u64) -> Vec<f32> {
    (0..len).map(|i| data::noise(seed, i)).collect()
}

/// hidden + delta, and its RMS norm in bf16.
pub fn norms(bench: &mut Bench) -> Result<()> {
    let (rows, d): (&[usize], usize) = if bench.test { (&[3], 128) } else { (&[1, 64, 2048], 4096) };
    for &rows in rows {
        let name = format!("add+rms rows={rows} d={d}");
        if !bench.wants("norm", "norm_rms_bf16", &name) || !bench.rt.has_kernel("norm_rms_bf16_warp") {
            continue;
        }
        let (hidden, delta, weight) = (floats(rows * d, 1), floats(rows * d, 2), floats(d, 3));
        let rt = bench.rt.clone();
        let upload = |v: &[f32]| Buffer::from_bytes(&rt, Lane::Compute, data::bytes_of(v));
        let (h, dl, w) = (upload(&hidden)?, upload(&delta)?, upload(&weight)?);
        let (sum, x) = (Buffer::new(&rt, rows * d * 4)?, Buffer::new(&rt, rows * d * 2)?);
        let eps = 1e-5;
        // Into another buffer than hidden, so that every call does the same.
        let mut launch = |_: usize| {
            let args = NormRows {
                norm: Norm::Rms { eps },
                hidden: h.ptr(),
                delta: dl.ptr(),
                delta_bias: DevPtr::NULL,
                post: DevPtr::NULL,
                weight: NormWeight { w: w.ptr(), b: DevPtr::NULL },
                sum: sum.ptr(),
                x: x.ptr(),
                act: Half::BF16,
                row_list: DevPtr::NULL,
                rows,
                d,
                ld_delta: d,
                ld_x: d,
            };
            norm(&*rt, Lane::Compute, &args)
        };
        launch(0)?;
        let mut bytes = vec![0; rows * d * 2];
        rt.download(Lane::Compute, x.ptr(), &mut bytes)?;
        for row in data::sample(rows, 8) {
            let sums: Vec<f64> = (row * d..(row + 1) * d).map(|i| f64::from(hidden[i] + delta[i])).collect();
            let square = sums.iter().map(|v| v * v).sum::<f64>() / d as f64 + f64::from(eps);
            for (i, v) in sums.iter().enumerate() {
                let want = v / square.sqrt() * f64::from(weight[i]);
                let at = 2 * (row * d + i);
                let got = data::value(Half::BF16, u16::from_le_bytes([bytes[at], bytes[at + 1]]));
                // bf16 rounding, and d roundings of an all-positive sum of squares in f32 (twice that under the root).
                let tolerance = want.abs() * (2f64.powi(-8) + (d + 8) as f64 * 2f64.powi(-24));
                assert!((got - want).abs() <= tolerance, "norm: row {row} [{i}] is {got}, wanted {want}");
            }
        }
        let work = Work {
            family: "norm",
            kernel: "norm_rms_bf16".into(),
            shape: name,
            bytes: (rows * d * (4 + 4 + 4 + 2)) as f64,
            flops: 0.0,
            peak: None,
        };
        bench.run(work, &mut launch)?;
    }
    Ok(())
}

/// The greatest logit of each row.
pub fn logits(bench: &mut Bench) -> Result<()> {
    let (rows, vocab): (&[usize], usize) = if bench.test { (&[2], 3000) } else { (&[1, 64], 128_256) };
    for &rows in rows {
        let name = format!("greedy rows={rows} vocab={vocab}");
        if !bench.wants("logits", "logits_spans", &name) || !bench.rt.has_kernel("logits_spans") {
            continue;
        }
        let values = floats(rows * vocab, 5);
        let rt = bench.rt.clone();
        let copies = (0..bench.copies(values.len() * 4))
            .map(|_| Buffer::from_bytes(&rt, Lane::Compute, data::bytes_of(&values)))
            .collect::<Result<Vec<_>>>()?;
        let workspace = Buffer::new(&rt, logits_workspace_bytes(rows, vocab, 1))?;
        let indices = Buffer::new(&rt, rows * 4)?;
        let mut launch = |i: usize| {
            let args = LogitsReduce {
                logits: copies[i % copies.len()].ptr(),
                workspace: workspace.ptr(),
                indices: indices.ptr(),
                values: DevPtr::NULL,
                logsumexp: DevPtr::NULL,
                rows,
                vocab,
                ld: vocab,
                k: 1,
            };
            logits_reduce(&*rt, Lane::Compute, &args)
        };
        launch(0)?;
        let mut bytes = vec![0; rows * 4];
        rt.download(Lane::Compute, indices.ptr(), &mut bytes)?;
        for (row, index) in bytes.as_chunks::<4>().0.iter().enumerate() {
            let all = &values[row * vocab..(row + 1) * vocab];
            let want = (0..vocab).rev().max_by(|&a, &b| all[a].total_cmp(&all[b])).expect("a vocabulary");
            assert_eq!(u32::from_le_bytes(*index) as usize, want, "logits: row {row}");
        }
        let work = Work {
            family: "logits",
            kernel: "logits_spans".into(),
            shape: name,
            bytes: (rows * vocab * 4) as f64,
            flops: 0.0,
            peak: None,
        };
        bench.run(work, &mut launch)?;
    }
    Ok(())
}
