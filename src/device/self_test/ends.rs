//! Embedding, norms, and what becomes of logits.

use super::numbers::{U, floats, some, unit, words};
use super::probe::{LANE, Probe, Worst, at};
use super::{Depth, quantised};
use crate::Result;
use crate::device::accelerator::{NormWeight, TOP_BYTES, top_error, top_of};
use crate::device::kernels::elementwise::{
    Embed, LogitsReduce, NormRows, TopK, embed, logits_reduce, logits_top_k, logits_workspace_bytes, norm,
    softcap,
};
use crate::device::kernels::quant::{GatherArgs, PackedLayout, gather, pack};
use crate::device::runtime::DevPtr;
use crate::host::Pool;
use crate::model::Norm;
use crate::reference::dequant::dequantise_row;
use crate::reference::reduce::argmax;
use crate::reference::softmax::max_and_logsumexp;
use crate::tensor::{DType, Half};

/// Embedding tables of every type, and norms of rows of every length.
pub fn embed_and_norm(p: &mut Probe, depth: Depth) {
    let often = [DType::F32, DType::F16, DType::BF16, DType::Q4_0, DType::Q4_K, DType::Q6_K, DType::Q8_0];
    for dtype in DType::ALL {
        if (depth == Depth::Quick && !often.contains(&dtype)) || !p.has(&format!("embed_{dtype}")) {
            continue;
        }
        p.check(&format!("embedding of {dtype}"), |p| embedding(p, dtype, false));
        if dtype.is_quantised() {
            p.check(&format!("embedding of packed {dtype}"), |p| embedding(p, dtype, true));
        }
    }
    for &act in p.half_types() {
        for (kind, name) in [(Norm::Rms { eps: 1e-5 }, "rms"), (Norm::Layer { eps: 1e-5 }, "layer")] {
            for d in [256, 2048, 8704] {
                if depth == Depth::Full || (d < 8000 && name == "rms") {
                    let act_name = act.name();
                    p.check(&format!("{name} norm of {d} elements to {act_name}"), |p| {
                        norms(p, kind, act, d)
                    });
                }
            }
        }
    }
}

/// Three rows of a table of 20, the second of which is none of it. An element is a code times a scale, and a minimum less in
/// some formats: three roundings, of numbers up to twice the largest of its row.
fn embedding(p: &Probe, dtype: DType, packed: bool) -> Result<Worst> {
    let (d, vocab, tokens, scale) = (512, 20, [17u32, u32::MAX, 3], 1.5);
    let table = quantised(dtype, vocab, d, 1);
    let out = p.out(tokens.len() * d * 4)?;
    let ids = p.up(&words(&tokens))?;
    let rt = &*p.rt;
    let row_bytes = dtype.row_bytes(d).expect("whole blocks");
    let row = |r: usize| &table[r * row_bytes..][..row_bytes];
    if packed {
        let layout = PackedLayout::new(dtype, vocab, d).expect("a quantised type");
        let mut bytes = vec![0; layout.bytes()];
        pack(&layout, &row, &Pool::new(1), &mut bytes);
        let w = p.up(&bytes)?;
        let args = GatherArgs {
            layout,
            w: w.ptr(),
            row_ids: ids.ptr(),
            y: out.ptr(),
            ldy: d,
            count: tokens.len(),
            scale,
        };
        gather(rt, LANE, &args)?;
        return compare(p.floats(&out)?, dtype, d, &tokens, scale, &row);
    }
    let table_dev = p.up(&table)?;
    let args = Embed {
        tokens: ids.ptr(),
        table: table_dev.ptr(),
        dtype,
        vocab,
        scale,
        positions: None,
        hidden: out.ptr(),
        rows: tokens.len(),
        d,
    };
    embed(rt, LANE, &args)?;
    compare(p.floats(&out)?, dtype, d, &tokens, scale, &row)
}

fn compare<'a>(
    got: Vec<f64>,
    dtype: DType,
    d: usize,
    tokens: &[u32],
    scale: f32,
    row: &dyn Fn(usize) -> &'a [u8],
) -> Result<Worst> {
    let mut want = Vec::new();
    for &token in tokens {
        let mut decoded = vec![0f32; d];
        if token != u32::MAX {
            dequantise_row(dtype, row(token as usize), &mut decoded);
        }
        let largest = decoded.iter().fold(0f32, |m, x| m.max(x.abs()));
        let allowed = 8.0 * U * f64::from(largest * scale);
        want.extend(decoded.iter().map(|&x| (f64::from(x) * f64::from(scale), allowed)));
    }
    Ok(Worst::of(&got, want))
}

/// Rows plus a delta, and their norm. Sums of d terms in any order: d roundings at most, in mean and square; some eight more of
/// the root, the factors, and the bias.
fn norms(p: &Probe, kind: Norm, act: Half, d: usize) -> Result<Worst> {
    let rows = 3;
    let (hidden, delta) = (some(1, rows * d), some(2, rows * d));
    let (w, b) = (some(3, d), some(4, d));
    let up = |x: &[f32]| p.up(&floats(x));
    let (hidden_dev, delta_dev, w_dev) = (up(&hidden)?, up(&delta)?, up(&w)?);
    let (layer, eps) = match kind {
        Norm::Rms { eps } => (false, eps),
        Norm::Layer { eps } => (true, eps),
    };
    let b_dev = if layer { Some(up(&b)?) } else { None };
    let (sum, x) = (p.out(rows * d * 4)?, p.out(rows * d * 2)?);
    let args = NormRows {
        norm: kind,
        hidden: hidden_dev.ptr(),
        delta: delta_dev.ptr(),
        delta_bias: DevPtr::NULL,
        post: DevPtr::NULL,
        weight: NormWeight { w: w_dev.ptr(), b: at(&b_dev) },
        sum: sum.ptr(),
        x: x.ptr(),
        act,
        row_list: DevPtr::NULL,
        rows,
        d,
        ld_delta: d,
        ld_x: d,
    };
    norm(&*p.rt, LANE, &args)?;
    let sums: Vec<f64> = hidden.iter().zip(&delta).map(|(&h, &d)| f64::from(h) + f64::from(d)).collect();
    let mut want = Vec::new();
    for row in sums.chunks_exact(d) {
        let mean = if layer { row.iter().sum::<f64>() / d as f64 } else { 0.0 };
        let size = row.iter().map(|x| x.abs()).sum::<f64>() / d as f64;
        let square = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / d as f64;
        let inverse = 1.0 / (square + f64::from(eps)).sqrt();
        for (i, x) in row.iter().enumerate() {
            let (w, b) = (f64::from(w[i]), if layer { f64::from(b[i]) } else { 0.0 });
            let exact = (x - mean) * inverse * w + b;
            let arithmetic = ((x.abs() + size) * inverse * w.abs()) * (d + 8) as f64 * U + 2.0 * b.abs() * U;
            want.push((exact, unit(act) * (exact.abs() + arithmetic) + arithmetic + 2f64.powi(-25)));
        }
    }
    let summed = Worst::of(&p.floats(&sum)?, sums.iter().map(|x| (*x, 2.0 * U * x.abs())));
    Ok(summed.max(Worst::of(&p.halves(&x, act)?, want)))
}

/// The greatest logits of each row, log Σ e^x, and the soft-cap.
pub fn logits(p: &mut Probe, depth: Depth) {
    let ks: &[usize] = if depth == Depth::Full { &[1, 5, 64] } else { &[1] };
    for &k in ks {
        p.check(&format!("the {k} greatest logits"), |p| greatest(p, k));
    }
    p.check("the likeliest tokens", likeliest);
    p.check("soft-cap", |p| {
        let (rows, vocab, ld, cap) = (2, 1500, 1504, 30f32);
        let x: Vec<f32> = some(5, rows * ld).iter().map(|x| 100.0 * x).collect();
        let out = p.out(rows * ld * 4)?;
        p.rt.upload(LANE, out.ptr(), &floats(&x))?;
        softcap(&*p.rt, LANE, out.ptr(), cap, rows, vocab, ld)?;
        // tanh within some ulp of one, times the cap. What lies between rows stays.
        let want = x.iter().enumerate().map(|(i, &x)| match i % ld < vocab {
            true => (f64::from(cap) * (f64::from(x) / f64::from(cap)).tanh(), 8.0 * U * f64::from(cap)),
            false => (f64::from(x), 0.0),
        });
        Ok(Worst::of(&p.floats(&out)?, want))
    });
}

fn greatest(p: &Probe, k: usize) -> Result<Worst> {
    let (rows, vocab) = (3, 5000);
    let x: Vec<f32> = some(6, rows * vocab).iter().map(|x| 8.0 * x).collect();
    let logits = p.up(&floats(&x))?;
    let workspace = p.zeros(logits_workspace_bytes(rows, vocab, k))?;
    let (indices, values) = (p.out(rows * k * 4)?, p.out(rows * k * 4)?);
    let logsumexp = p.out(rows * 4)?;
    let args = LogitsReduce {
        logits: logits.ptr(),
        workspace: workspace.ptr(),
        indices: indices.ptr(),
        values: values.ptr(),
        logsumexp: logsumexp.ptr(),
        rows,
        vocab,
        ld: vocab,
        k,
    };
    logits_reduce(&*p.rt, LANE, &args)?;
    let (mut at, mut sums) = (Vec::new(), Vec::new());
    for row in x.chunks_exact(vocab) {
        let mut order: Vec<usize> = (0..vocab).collect();
        order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
        debug_assert_eq!(order[0], argmax(row));
        at.extend(order[..k].iter().map(|&i| (i, f64::from(row[i]))));
        let (_, sum) = max_and_logsumexp(row);
        // A term passes some fifty additions and factors, the logarithm adds two ulps of at most 16.
        sums.push((sum, (64.0 + 32.0) * U + 2.0 * sum.abs() * U));
    }
    let index = Worst::of(&p.words(&indices)?, at.iter().map(|(i, _)| (*i as f64, 0.0)));
    let value = Worst::of(&p.floats(&values)?, at.iter().map(|(_, x)| (*x, 0.0)));
    Ok(index.max(value).max(Worst::of(&p.floats(&logsumexp)?, sums)))
}

/// What tokens are drawn among: the greatest logits, and Σ e^(factor·(x − max)).
fn likeliest(p: &Probe) -> Result<Worst> {
    let (vocab, factors) = (5000, [1.0f32, 0.5, 2.0]);
    let x: Vec<f32> = some(7, factors.len() * vocab).iter().map(|x| 8.0 * x).collect();
    let (logits, out) = (p.up(&floats(&x))?, p.out(factors.len() * TOP_BYTES)?);
    let args = TopK { logits: logits.ptr(), out: out.ptr(), factors: &factors, vocab, ld: vocab };
    logits_top_k(&*p.rt, LANE, &args)?;
    let (mut got, mut want) = (Vec::new(), Vec::new());
    for ((row, factor), bytes) in
        x.chunks_exact(vocab).zip(factors).zip(p.bytes(&out)?.chunks_exact(TOP_BYTES))
    {
        let (found, sum) = top_of(bytes, vocab);
        let mut order: Vec<u32> = (0..vocab as u32).collect();
        order.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]).then(a.cmp(&b)));
        let most = f64::from(row[order[0] as usize]);
        for (i, (value, token)) in found.iter().enumerate() {
            got.extend([f64::from(*value), f64::from(*token)]);
            want.extend([(f64::from(row[order[i] as usize]), 0.0), (f64::from(order[i]), 0.0)]);
        }
        let all: f64 = row.iter().map(|&x| ((f64::from(x) - most) * f64::from(factor)).exp()).sum();
        got.push(f64::from(sum));
        want.push((all, top_error(vocab) * all));
    }
    Ok(Worst::of(&got, want))
}
