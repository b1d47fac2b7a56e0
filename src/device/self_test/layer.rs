//! What stands between the products of a layer: rotation and the append to pages, activations.

use super::Depth;
use super::numbers::{U, floats, some, stored, unit, words};
use super::probe::{LANE, Probe, Worst, at, kv_types};
use crate::Result;
use crate::cache::KvType;
use crate::device::kernels::elementwise::{Activate, Activation, RopeAppend, activate, rope_append};
use crate::device::runtime::DevPtr;
use crate::model::{Ffn, QkNorm, RopePairing};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 64;
const PAGE: usize = 32;

/// Rotation, norms of queries and keys, the append to pages.
pub fn rope(p: &mut Probe, depth: Depth) {
    for kv in kv_types(p) {
        for norms in [None, Some(QkNorm::PerHead), Some(QkNorm::Whole)] {
            for pairing in [RopePairing::Half, RopePairing::Interleaved] {
                if depth == Depth::Quick && (pairing == RopePairing::Interleaved || norms.is_none()) {
                    continue;
                }
                let what = format!("rotation by {pairing:?} with norms {norms:?} in {}", kv.name());
                p.check(&what, |p| rotated(p, kv, norms, pairing));
            }
        }
    }
}

fn rotated(p: &Probe, kv: KvType, norms: Option<QkNorm>, pairing: RopePairing) -> Result<Worst> {
    let (hd, heads, rows, eps) = (HEAD_DIM, HEADS + 2 * KV_HEADS, 3, 1e-5f32);
    let ld = heads * hd;
    let (positions, half) = (40, hd / 2);
    let row_pos = [0u32, 7, 39];
    // Page 1, place 3; nowhere; page 0, the last place.
    let slots = [PAGE as i32 + 3, -1, PAGE as i32 - 1];
    let (qkv, bias) = (some(1, rows * ld), some(2, ld));
    let widths = norms.map_or([hd; 2], |n| n.widths(hd, [HEADS, KV_HEADS]));
    let weights = [some(3, widths[0]), some(4, widths[1])];
    let angle = |i: usize| (i / half) as f64 * 1e4f64.powf(-((i % half) as f64) / half as f64);
    let cos: Vec<f32> = (0..positions * half).map(|i| angle(i).cos() as f32).collect();
    let sin: Vec<f32> = (0..positions * half).map(|i| angle(i).sin() as f32).collect();

    let up = |x: &[f32]| p.up(&floats(x));
    let (qkv_dev, bias_dev, cos_dev, sin_dev) = (up(&qkv)?, up(&bias)?, up(&cos)?, up(&sin)?);
    let norm_dev = match norms {
        None => [None, None],
        Some(_) => [Some(up(&weights[0])?), Some(up(&weights[1])?)],
    };
    let pos_dev = p.up(&words(&row_pos))?;
    let slot_dev = p.up(&words(&slots.map(|s| s as u32)))?;
    let (q, pages) = (p.out(rows * HEADS * hd * 2)?, p.out(2 * KV_HEADS * 2 * kv.part_bytes(hd))?);
    let args = RopeAppend {
        qkv: qkv_dev.ptr(),
        bias: bias_dev.ptr(),
        q_norm: at(&norm_dev[0]),
        k_norm: at(&norm_dev[1]),
        norms: norms.unwrap_or(QkNorm::PerHead),
        eps,
        rope: [cos_dev.ptr(), sin_dev.ptr()],
        rope_dim: hd,
        pairing,
        row_pos: pos_dev.ptr(),
        row_slot: slot_dev.ptr(),
        finished: DevPtr::NULL,
        q: q.ptr(),
        kv: pages.ptr(),
        kv_type: kv,
        publish: None,
        rows,
        ld,
        n_heads: HEADS,
        n_kv_heads: KV_HEADS,
        head_dim: hd,
    };
    rope_append(&*p.rt, LANE, &args)?;

    let mut want_q = Vec::new();
    // Untouched places hold what outputs hold before, which is NaN.
    let mut want_pages = vec![(f64::NAN, 0.0); 2 * KV_HEADS * 2 * PAGE * hd];
    for row in 0..rows {
        let x: Vec<f64> = (0..ld).map(|i| f64::from(qkv[row * ld + i]) + f64::from(bias[i])).collect();
        for (first, count, is_q, is_v) in [
            (0, HEADS, true, false),
            (HEADS, KV_HEADS, false, false),
            (HEADS + KV_HEADS, KV_HEADS, false, true),
        ] {
            let part = &x[first * hd..(first + count) * hd];
            for head in 0..count {
                let mut y: Vec<f64> = part[head * hd..][..hd].to_vec();
                if !is_v && let Some(kind) = norms {
                    let over = if kind == QkNorm::Whole { part } else { &part[head * hd..][..hd] };
                    let square = over.iter().map(|x| x * x).sum::<f64>() / over.len() as f64;
                    let weight = &weights[usize::from(!is_q)];
                    for (d, y) in y.iter_mut().enumerate() {
                        let w = if kind == QkNorm::Whole { weight[head * hd + d] } else { weight[d] };
                        *y *= f64::from(w) / (square + f64::from(eps)).sqrt();
                    }
                }
                let mut turned = y.clone();
                for i in (0..half).filter(|_| !is_v) {
                    let (a, b) = match pairing {
                        RopePairing::Half => (i, i + half),
                        RopePairing::Interleaved => (2 * i, 2 * i + 1),
                    };
                    let place = row_pos[row] as usize * half + i;
                    let (c, s) = (f64::from(cos[place]), f64::from(sin[place]));
                    (turned[a], turned[b]) = (y[a] * c - y[b] * s, y[b] * c + y[a] * s);
                }
                // The bias, a sum of squares over all heads at most, eight more for the norm, two for the rotation.
                let size = y.iter().fold(0f64, |m, y| m.max(y.abs())) + 1.0;
                let off = (HEADS * hd + 16) as f64 * U * size;
                // Half a step of a code, and roundings of up to 127.
                let most = turned.iter().fold(off, |m, y| m.max(y.abs() + off));
                let step = most / 127.0 * (0.5 + 4.0 * 127.0 * U) + off;
                for (d, &y) in turned.iter().enumerate() {
                    let rounded = (y, off + unit(kv.half()) * (y.abs() + off) + 2f64.powi(-25));
                    let want = if kv.is_scaled() { (y, off + step) } else { rounded };
                    match slots[row] {
                        _ if is_q => want_q.push(rounded),
                        -1 => {}
                        slot => {
                            let (page, token) = (slot as usize / PAGE, slot as usize % PAGE);
                            let plane = (page * KV_HEADS + head) * 2 + usize::from(is_v);
                            want_pages[(plane * PAGE + token) * hd + d] = want;
                        }
                    }
                }
            }
        }
    }
    // Untouched elements are NaN, which equals nothing: they are compared as 0 with 0.
    let bytes = p.bytes(&pages)?;
    let got: Vec<f64> = bytes
        .chunks_exact(kv.part_bytes(hd))
        .flat_map(|part| (0..PAGE * hd).map(move |i| stored(kv, part, hd, i / hd, i % hd)))
        .collect();
    let touched = want_pages.iter().zip(&got).map(|(want, &got)| match (want.0.is_nan(), got.is_nan()) {
        (true, true) => (0.0, (0.0, 0.0)),
        (true, false) => (got, (f64::NAN, 0.0)),
        _ => (got, *want),
    });
    let (got, want): (Vec<f64>, Vec<(f64, f64)>) = touched.unzip();
    Ok(Worst::of(&p.halves(&q, kv.half())?, want_q).max(Worst::of(&got, want)))
}

/// Activations of feed-forwards, and plain conversions.
pub fn activation(p: &mut Probe, depth: Depth) {
    let mut kinds = vec![Activation::AddBias];
    for &act in p.half_types() {
        kinds.push(Activation::Ffn(Ffn::SwiGlu, act));
        kinds.push(Activation::Cast(act));
        if depth == Depth::Full {
            kinds.extend([Ffn::GeGlu, Ffn::Relu, Ffn::ClampedSwiGlu].map(|ffn| Activation::Ffn(ffn, act)));
        }
    }
    for kind in kinds {
        p.check(&format!("activation {kind:?}"), |p| activated(p, kind));
    }
}

fn activated(p: &Probe, kind: Activation) -> Result<Worst> {
    let (rows, n, ld) = (3, 1100, 1104);
    let (gate, up) = (some(1, rows * ld), some(2, rows * ld));
    let gate: Vec<f32> = gate.iter().map(|x| 4.0 * x).collect();
    let bias = some(3, n);
    let (gate_dev, up_dev, bias_dev) = (p.up(&floats(&gate))?, p.up(&floats(&up))?, p.up(&floats(&bias))?);
    let half = match kind {
        Activation::Ffn(_, half) | Activation::Cast(half) => Some(half),
        Activation::AddBias => None,
    };
    let out = p.out(rows * n * if half.is_some() { 2 } else { 4 })?;
    let args = Activate {
        gate: gate_dev.ptr(),
        up: up_dev.ptr(),
        gate_bias: bias_dev.ptr(),
        up_bias: DevPtr::NULL,
        out: out.ptr(),
        rows,
        n,
        ld_gate: ld,
        ld_up: ld,
        ld_out: n,
    };
    activate(&*p.rt, LANE, kind, &args)?;
    let mut want = Vec::new();
    for row in 0..rows {
        for i in 0..n {
            let g = f64::from(gate[row * ld + i]) + f64::from(bias[i]);
            let u = f64::from(up[row * ld + i]);
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g * g * g);
            let y = match kind {
                Activation::Ffn(Ffn::SwiGlu, _) => g / (1.0 + (-g).exp()) * u,
                Activation::Ffn(Ffn::GeGlu, _) => 0.5 * g * (1.0 + inner.tanh()) * u,
                Activation::Ffn(Ffn::Relu, _) => g.max(0.0),
                Activation::Ffn(Ffn::ClampedSwiGlu, _) => {
                    let g = g.min(7.0);
                    g / (1.0 + (-1.702 * g).exp()) * (u.clamp(-7.0, 7.0) + 1.0)
                }
                Activation::Cast(_) | Activation::AddBias => g,
            };
            // The argument's roundings, its function's few ulps, and products: relative to what enters.
            let off = 32.0 * U * (1.0 + g.abs()) * (1.0 + u.abs());
            want.push((y, off + half.map_or(0.0, |h| unit(h) * (y.abs() + off) + 2f64.powi(-25))));
        }
    }
    let got = match half {
        Some(half) => p.halves(&out, half)?,
        None => p.floats(&out)?,
    };
    Ok(Worst::of(&got, want))
}
