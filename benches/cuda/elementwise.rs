//! What lies between the matrices: residual + norm, RoPE + append, activations; the ends: embedding, greatest logits.

use tandem::Result;
use tandem::cache::{KvType, PAGE_TOKENS};
use tandem::device::kernels::elementwise::{
    Activate, Activation, Embed, LogitsReduce, NormRows, RopeAppend, TopK, activate, embed, logits_reduce,
    logits_top_k, logits_workspace_bytes, norm, rope_append,
};
use tandem::device::{Buffer, DevPtr, Lane, NormWeight, TOP_BYTES, TOP_K, top_of};
use tandem::model::{Ffn, Norm, QkNorm, RopePairing};
use tandem::tensor::{DType, Half};

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

/// What sampling needs of each row.
pub fn top_k(bench: &mut Bench) -> Result<()> {
    let (rows, vocab): (&[usize], usize) = if bench.test { (&[2], 3000) } else { (&[1, 64], 128_256) };
    for &rows in rows {
        let name = format!("top {TOP_K} rows={rows} vocab={vocab}");
        if !bench.wants("logits", "logits_top_k", &name) || !bench.rt.has_kernel("logits_top_k") {
            continue;
        }
        let (values, factors) = (floats(rows * vocab, 5), vec![1.25; rows]);
        let rt = bench.rt.clone();
        let copies = (0..bench.copies(values.len() * 4))
            .map(|_| Buffer::from_bytes(&rt, Lane::Compute, data::bytes_of(&values)))
            .collect::<Result<Vec<_>>>()?;
        let out = Buffer::new(&rt, rows * TOP_BYTES)?;
        let mut launch = |i: usize| {
            let logits = copies[i % copies.len()].ptr();
            logits_top_k(
                &*rt,
                Lane::Compute,
                &TopK { logits, out: out.ptr(), factors: &factors, vocab, ld: vocab },
            )
        };
        launch(0)?;
        let mut bytes = vec![0; rows * TOP_BYTES];
        rt.download(Lane::Compute, out.ptr(), &mut bytes)?;
        for (row, bytes) in bytes.chunks_exact(TOP_BYTES).enumerate() {
            let all = &values[row * vocab..(row + 1) * vocab];
            let mut want: Vec<(f32, u32)> = all.iter().copied().zip(0..).collect();
            want.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            assert!(top_of(bytes, vocab).0 == want[..TOP_K], "top k: row {row}");
        }
        let work = Work {
            family: "logits",
            kernel: "logits_top_k".into(),
            shape: name,
            bytes: (rows * vocab * 4) as f64, // the second time from the level-two cache
            flops: 0.0,
            peak: None,
        };
        bench.run(work, &mut launch)?;
    }
    Ok(())
}

/// Rows of a bf16 table.
pub fn embeddings(bench: &mut Bench) -> Result<()> {
    let (rows, d, vocab): (&[usize], usize, usize) =
        if bench.test { (&[3], 64, 50) } else { (&[1, 64, 2048], 4096, 32_768) };
    for &rows in rows {
        let name = format!("bf16 rows={rows} d={d}");
        if !bench.wants("embed", "embed_bf16", &name) || !bench.rt.has_kernel("embed_bf16") {
            continue;
        }
        let rt = bench.rt.clone();
        let table = data::halves(Half::BF16, vocab * d, 6, 1.0);
        let at = Buffer::from_bytes(&rt, Lane::Compute, data::bytes_of(&table))?;
        let ids: Vec<u32> = (0..rows).map(|r| (r * 7919 % vocab) as u32).collect();
        let tokens = Buffer::from_bytes(&rt, Lane::Compute, data::bytes_of(&ids))?;
        let hidden = Buffer::new(&rt, rows * d * 4)?;
        let args = Embed {
            tokens: tokens.ptr(),
            table: at.ptr(),
            dtype: DType::BF16,
            vocab,
            scale: 1.0,
            positions: None,
            hidden: hidden.ptr(),
            rows,
            d,
        };
        embed(&*rt, Lane::Compute, &args)?;
        let mut bytes = vec![0; rows * d * 4];
        rt.download(Lane::Compute, hidden.ptr(), &mut bytes)?;
        for (i, got) in bytes.as_chunks::<4>().0.iter().enumerate() {
            let want = data::value(Half::BF16, table[ids[i / d] as usize * d + i % d]);
            assert_eq!(f64::from(f32::from_le_bytes(*got)), want, "embed: element {i}");
        }
        let (kernel, bytes) = ("embed_bf16".into(), (rows * d * 6) as f64);
        let work = Work { family: "embed", kernel, shape: name, bytes, flops: 0.0, peak: None };
        bench.run(work, &mut |_| embed(&*rt, Lane::Compute, &args))?;
    }
    Ok(())
}

/// RoPE of q and k, and k and v into their pages; at position 0, where nothing turns, so that the answer is plain.
pub fn rope(bench: &mut Bench) -> Result<()> {
    let (all, heads, kv_heads, hd): (&[usize], usize, usize, usize) =
        if bench.test { (&[3], 4, 2, 64) } else { (&[1, 64, 512], 32, 8, 128) };
    for &rows in all {
        let name = format!("rows={rows}, {heads} + 2 x {kv_heads} heads of {hd}");
        if !bench.wants("rope", "rope_append_f16", &name) || !bench.rt.has_kernel("rope_append_f16") {
            continue;
        }
        let rt = bench.rt.clone();
        let width = (heads + 2 * kv_heads) * hd;
        let values = floats(rows * width, 8);
        let upload = |bytes: &[u8]| Buffer::from_bytes(&rt, Lane::Compute, bytes);
        let qkv = upload(data::bytes_of(&values))?;
        let (cos, sin) = (upload(data::bytes_of(&vec![1f32; hd / 2]))?, upload(&vec![0; hd / 2 * 4])?);
        let positions = upload(&vec![0; rows * 4])?;
        let slots = upload(data::bytes_of(&(0..rows as i32).collect::<Vec<_>>()))?;
        let q = Buffer::new(&rt, rows * heads * hd * 2)?;
        let kv = Buffer::new(&rt, rows.div_ceil(PAGE_TOKENS) * kv_heads * 2 * PAGE_TOKENS * hd * 2)?;
        let args = RopeAppend {
            qkv: qkv.ptr(),
            bias: DevPtr::NULL,
            q_norm: DevPtr::NULL,
            k_norm: DevPtr::NULL,
            norms: QkNorm::PerHead,
            eps: 1e-5,
            rope: [cos.ptr(), sin.ptr()],
            rope_dim: hd,
            pairing: RopePairing::Half,
            row_pos: positions.ptr(),
            row_slot: slots.ptr(),
            finished: DevPtr::NULL,
            q: q.ptr(),
            kv: kv.ptr(),
            kv_type: KvType::F16,
            publish: None,
            rows,
            ld: width,
            n_heads: heads,
            n_kv_heads: kv_heads,
            head_dim: hd,
        };
        rope_append(&*rt, Lane::Compute, &args)?;
        let mut bytes = vec![0; rows * heads * hd * 2];
        rt.download(Lane::Compute, q.ptr(), &mut bytes)?;
        for (i, got) in bytes.as_chunks::<2>().0.iter().enumerate() {
            let want = values[i / (heads * hd) * width + i % (heads * hd)];
            assert_eq!(u16::from_le_bytes(*got), data::to_bits(Half::F16, want), "rope: element {i} of q");
        }
        let (kernel, bytes) = ("rope_append_f16".into(), (rows * width * 6) as f64);
        let work = Work { family: "rope", kernel, shape: name, bytes, flops: 0.0, peak: None };
        bench.run(work, &mut |_| rope_append(&*rt, Lane::Compute, &args))?;
    }
    Ok(())
}

/// silu(gate) times up, where they could not be fused into their products.
pub fn activations(bench: &mut Bench) -> Result<()> {
    let (rows, n): (&[usize], usize) = if bench.test { (&[3], 96) } else { (&[1, 64, 512], 14_336) };
    for &rows in rows {
        let name = format!("rows={rows} n={n}");
        let kernel = "activation_swiglu_f16";
        if !bench.wants("activation", kernel, &name) || !bench.rt.has_kernel(kernel) {
            continue;
        }
        let rt = bench.rt.clone();
        let values = floats(rows * 2 * n, 10);
        let both = Buffer::from_bytes(&rt, Lane::Compute, data::bytes_of(&values))?;
        let out = Buffer::new(&rt, rows * n * 2)?;
        let args = Activate {
            gate: both.ptr(),
            up: both.ptr().add(4 * n),
            gate_bias: DevPtr::NULL,
            up_bias: DevPtr::NULL,
            out: out.ptr(),
            rows,
            n,
            ld_gate: 2 * n,
            ld_up: 2 * n,
            ld_out: n,
        };
        let what = Activation::Ffn(Ffn::SwiGlu, Half::F16);
        activate(&*rt, Lane::Compute, what, &args)?;
        let mut bytes = vec![0; rows * n * 2];
        rt.download(Lane::Compute, out.ptr(), &mut bytes)?;
        for at in data::sample(rows * n, 1000) {
            let (row, i) = (at / n, at % n);
            let (gate, up) = (f64::from(values[row * 2 * n + i]), f64::from(values[row * 2 * n + n + i]));
            let want = gate / (1.0 + (-gate).exp()) * up;
            let got = data::value(Half::F16, u16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]]));
            // Half an ulp of f16, its smallest step, and the fast exponential's few ulps of f32.
            let tolerance = want.abs() * (2f64.powi(-11) + 2f64.powi(-20)) + 2f64.powi(-24);
            assert!((got - want).abs() <= tolerance, "activation: element {at} is {got}, wanted {want}");
        }
        let (kernel, bytes) = (kernel.into(), (rows * n * 10) as f64);
        let work = Work { family: "activation", kernel, shape: name, bytes, flops: 0.0, peak: None };
        bench.run(work, &mut |_| activate(&*rt, Lane::Compute, what, &args))?;
    }
    Ok(())
}
