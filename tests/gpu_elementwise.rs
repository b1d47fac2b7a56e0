//! Row-wise kernels of accelerators (embedding, norms, RoPE with append, activations) against the definition.
//!
//! Exact where the arithmetic is: dequantisation, sums of two, rounding to 16 bits, copies. Elsewhere each test says
//! where its tolerance comes from, in u = 2^-24, the rounding of one f32 operation.
#![cfg(tandem_kernels)]

#[path = "support/gpu_memory.rs"]
mod memory;
mod support;

use std::sync::Arc;

use half::f16;
use memory::*;
use proptest::prelude::*;
use support::gpu::{self, Rng};
use tandem::device::accelerator::{Half, NormWeight};
use tandem::device::kernels::elementwise::*;
use tandem::device::runtime::{DevPtr, Runtime};
use tandem::model::spec::{Ffn, Norm, RopePairing};
use tandem::reference;
use tandem::tensor::DType;

const U: f64 = 1.0 / (1u64 << 24) as f64;

fn normals(rng: &mut Rng, n: usize) -> Vec<f32> {
    (0..n).map(|_| rng.normal()).collect()
}

/// Checks `got` against `want` within `error`, element by element; NaN never passes.
#[track_caller]
fn close(what: &str, i: usize, got: f64, want: f64, error: f64) {
    assert!((got - want).abs() <= error, "{what}, element {i}: {got} instead of {want} (within {error:e})");
}

// ---------------------------------------------------------------------------------------------------------
// Embedding.

/// Random blocks: every bit of a quantised block but its f16 scales, which are finite; plain floats are ordinary.
fn random_table(rng: &mut Rng, dtype: DType, elements: usize) -> Vec<u8> {
    let mut out = Vec::new();
    for _ in 0..elements / dtype.block_len() {
        let at = out.len();
        match dtype {
            DType::F32 => out.extend(rng.normal().to_le_bytes()),
            DType::F16 => out.extend(encode(Half::F16, rng.normal()).to_le_bytes()),
            DType::BF16 => out.extend(encode(Half::BF16, rng.normal()).to_le_bytes()),
            _ => out.extend((0..dtype.block_bytes()).map(|_| rng.next_u64() as u8)),
        }
        let scales: &[usize] = match dtype {
            DType::Q8_0 | DType::Q4_0 | DType::Q5_0 => &[0],
            DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => &[0, 2],
            DType::Q6_K => &[208],
            _ => &[],
        };
        for s in scales {
            let d = f16::from_f32(rng.normal());
            out[at + s..at + s + 2].copy_from_slice(&d.to_le_bytes());
        }
    }
    out
}

#[derive(Debug, Clone)]
struct EmbedCase {
    dtype: DType,
    d: usize,
    vocab: usize,
    tokens: Option<Vec<u32>>,
    scale: f32,
    positions: Option<DType>,
    seed: u64,
}

fn check_embed(rt: &Arc<dyn Runtime>, c: &EmbedCase) {
    let mut rng = Rng::new(c.seed);
    let table = random_table(&mut rng, c.dtype, c.vocab * c.d);
    let rows = c.tokens.as_ref().map_or(c.vocab, Vec::len);
    let (n_positions, offset) = (9, 2);
    let positions = c.positions.map(|t| (t, random_table(&mut rng, t, n_positions * c.d)));
    // Position 7 is row 9: beyond the table.
    let row_pos: Vec<u32> = (0..rows).map(|_| rng.below(n_positions - offset + 1) as u32).collect();

    let (table_dev, pos_dev) = (upload(rt, &table), upload(rt, &row_pos));
    let tokens_dev = c.tokens.as_ref().map(|t| upload(rt, t));
    let positions_dev = positions.as_ref().map(|(_, p)| upload(rt, p));
    let hidden = Output::new(rt, rows * c.d * 4);
    let args = Embed {
        tokens: at(&tokens_dev),
        table: table_dev.ptr(),
        dtype: c.dtype,
        vocab: c.vocab,
        scale: c.scale,
        positions: c.positions.map(|dtype| Positions {
            table: at(&positions_dev),
            dtype,
            n: n_positions,
            offset,
            row_pos: pos_dev.ptr(),
        }),
        hidden: hidden.ptr(),
        rows,
        d: c.d,
    };
    embed(&**rt, LANE, &args).expect("launch");

    let got = hidden.u32();
    let row_bytes = c.dtype.row_bytes(c.d).unwrap();
    for row in 0..rows {
        let token = c.tokens.as_ref().map_or(row, |t| t[row] as usize);
        let mut want = vec![0f32; c.d];
        if token < c.vocab {
            let from = &table[token * row_bytes..(token + 1) * row_bytes];
            reference::embed::embed_row(c.dtype, from, c.scale, &mut want);
            let p = row_pos[row] as usize + offset;
            if let Some((t, bytes)) = positions.as_ref().filter(|_| p < n_positions) {
                let bytes_of_row = t.row_bytes(c.d).unwrap();
                let mut add = vec![0f32; c.d];
                let from = &bytes[p * bytes_of_row..(p + 1) * bytes_of_row];
                reference::embed::embed_row(*t, from, 1.0, &mut add);
                reference::activation::add(&mut want, &add);
            }
        }
        for (i, (&g, w)) in got[row * c.d..][..c.d].iter().zip(&want).enumerate() {
            assert_eq!(g, w.to_bits(), "{c:?}, row {row}, element {i}: {} not {w}", f32::from_bits(g));
        }
    }
}

#[test]
fn every_table_decodes_to_the_bits_of_the_reference() {
    for rt in gpu::runtimes() {
        for dtype in DType::ALL {
            for d in [256, 1024 + 256] {
                let tokens = Some(vec![3, 0, u32::MAX, 4, 5, 3]);
                let c = EmbedCase { dtype, d, vocab: 5, tokens, scale: 1.0, positions: None, seed: 1 };
                check_embed(&rt, &c);
                check_embed(&rt, &EmbedCase { scale: 33.941125, seed: 2, ..c });
            }
        }
    }
}

#[test]
fn rows_that_the_host_looked_up_are_taken_in_order() {
    for rt in gpu::runtimes() {
        for d in [1, 3, 64, 513] {
            let c = EmbedCase {
                dtype: DType::F32,
                d,
                vocab: 3,
                tokens: None,
                scale: 1.0,
                positions: None,
                seed: 3,
            };
            check_embed(&rt, &c);
        }
    }
}

#[test]
fn learned_positions_are_added() {
    for rt in gpu::runtimes() {
        for t in [DType::F32, DType::F16, DType::BF16] {
            let tokens = Some((0..20).map(|i| i % 7).collect());
            let c = EmbedCase {
                dtype: DType::F16,
                d: 68,
                vocab: 6,
                tokens,
                scale: 1.0,
                positions: Some(t),
                seed: 4,
            };
            check_embed(&rt, &c);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------
// Norm.

#[derive(Debug, Clone, Copy)]
struct NormCase {
    layer: bool,
    act: Half,
    rows: usize,
    d: usize,
    delta: bool,
    delta_bias: bool,
    post: bool,
    bias: bool,
    sum: bool,
    x: bool,
    listed: bool,
    pad: usize,
    seed: u64,
}

impl NormCase {
    fn plain(act: Half, rows: usize, d: usize) -> NormCase {
        NormCase {
            layer: false,
            act,
            rows,
            d,
            delta: true,
            delta_bias: false,
            post: false,
            bias: false,
            sum: true,
            x: true,
            listed: false,
            pad: 0,
            seed: 5,
        }
    }
}

/// Runs a case, checks it, and returns x's bits.
///
/// With D roundings in a sum of d (positive) squares, D <= d/threads + 5 + warps <= 32 + 5 + 32: its relative error
/// is D·u, that of its inverse root half as much, and the division, the square root (2 ulp = 4u) and each factor of
/// x add 1u. A layer norm's mean is off by δm = (D + 1)·u·mean|h|, its centred elements by δc = u|c| + δm.
fn check_norm(rt: &Arc<dyn Runtime>, c: &NormCase) -> Vec<u16> {
    const D: f64 = 69.0;
    let (d, eps) = (c.d, 1e-5f32);
    let mut rng = Rng::new(c.seed);
    let (ld_delta, ld_x) = (d + c.pad, d + 2 * c.pad);
    let stored = c.rows + 3;
    // A mean that is not zero, so that a layer norm has something to subtract.
    let hidden: Vec<f32> = normals(&mut rng, stored * d).iter().map(|v| v + 0.75).collect();
    let mut delta = normals(&mut rng, stored * ld_delta);
    for (i, v) in delta.iter_mut().enumerate().filter(|(i, _)| i % ld_delta >= d) {
        *v = if i % 2 == 0 { f32::NAN } else { f32::INFINITY };
    }
    let vectors: [Vec<f32>; 4] = std::array::from_fn(|_| normals(&mut rng, d));
    let [delta_bias, post_w, w, b] = &vectors;
    let mut list: Vec<u32> = (0..c.rows).map(|i| ((i * 7 + 2) % stored) as u32).collect();
    if let Some(last) = list.last_mut() {
        *last = u32::MAX;
    }

    let hidden_dev = Output::of(rt, &hidden);
    let delta_dev = upload(rt, &delta);
    let vectors_dev = vectors.each_ref().map(|v| upload(rt, v));
    let list_dev = upload(rt, &list);
    let sum_apart = c.listed.then(|| Output::new(rt, c.rows * d * 4));
    let x = Output::new(rt, c.rows * ld_x * 2);
    let or_null = |wanted: bool, p: DevPtr| if wanted { p } else { DevPtr::NULL };
    let sum_ptr = sum_apart.as_ref().map_or(hidden_dev.ptr(), Output::ptr);
    let args = NormRows {
        norm: if c.layer { Norm::Layer { eps } } else { Norm::Rms { eps } },
        hidden: hidden_dev.ptr(),
        delta: or_null(c.delta, delta_dev.ptr()),
        delta_bias: or_null(c.delta_bias, vectors_dev[0].ptr()),
        post: or_null(c.post, vectors_dev[1].ptr()),
        weight: NormWeight { w: vectors_dev[2].ptr(), b: or_null(c.bias, vectors_dev[3].ptr()) },
        sum: or_null(c.sum, sum_ptr),
        x: or_null(c.x, x.ptr()),
        act: c.act,
        row_list: or_null(c.listed, list_dev.ptr()),
        rows: c.rows,
        d,
        ld_delta,
        ld_x,
    };
    norm(&**rt, LANE, &args).expect("launch");

    let what = format!("{c:?}");
    let x = x.u16();
    let hidden_after = hidden_dev.f32();
    let sum = sum_apart.map_or_else(|| hidden_after.clone(), |s| s.f32());
    for row in 0..c.rows {
        let from = if c.listed { list[row] } else { row as u32 };
        let none = from == u32::MAX;
        let from = if none { 0 } else { from as usize };
        // What is added, with its error; then the sum.
        let mut add = vec![0f64; d];
        let mut add_error = vec![0f64; d];
        if c.delta {
            for i in 0..d {
                let v = delta[from * ld_delta + i];
                add[i] = if c.delta_bias { f64::from(v + delta_bias[i]) } else { f64::from(v) };
            }
            if c.post {
                let mean = add.iter().map(|v| v * v).sum::<f64>() / d as f64;
                let scale = 1.0 / (mean + f64::from(eps)).sqrt();
                for i in 0..d {
                    add[i] *= scale * f64::from(post_w[i]);
                    add_error[i] = add[i].abs() * (D / 2.0 + 9.0) * U;
                }
            }
        }
        let mut h = vec![0f64; d];
        let mut h_error = vec![0f64; d];
        for i in 0..d {
            let exact = f64::from(hidden[from * d + i]) + add[i];
            h[i] = if none { 0.0 } else { exact };
            if none {
            } else if c.post {
                h_error[i] = add_error[i] + (exact.abs() + add_error[i]) * U;
            } else {
                h[i] = f64::from(exact as f32);
            }
        }
        for i in 0..d {
            let got = f64::from(sum[row * d + i]);
            if c.sum {
                close(&format!("{what}: sum, row {row}"), i, got, h[i], h_error[i]);
            } else if c.listed {
                assert!(got.is_nan(), "{what}: an unwanted sum was written");
            } else {
                assert_eq!(got, f64::from(hidden[row * d + i]), "{what}: hidden was changed");
            }
        }
        let out = &x[row * ld_x..(row + 1) * ld_x];
        if !c.x {
            assert!(out.iter().all(|&v| v == 0xffff), "{what}: an unwanted norm was written");
            continue;
        }
        assert!(out[d..].iter().all(|&v| v == 0xffff), "{what}: padding of x was written");
        if none {
            assert!(out[..d].iter().all(|&v| v == 0), "{what}: a row that is not there");
            continue;
        }
        let n = d as f64;
        let mean = if c.layer { h.iter().sum::<f64>() / n } else { 0.0 };
        let mean_error = if c.layer {
            h.iter().zip(&h_error).map(|(h, e)| h.abs() * (D + 1.0) * U + e).sum::<f64>() / n
        } else {
            0.0
        };
        let centred: Vec<f64> = h.iter().map(|v| v - mean).collect();
        let centred_error: Vec<f64> = centred
            .iter()
            .zip(&h_error)
            .map(|(v, e)| e + mean_error + if c.layer { v.abs() * U } else { 0.0 })
            .collect();
        let squares: f64 = centred.iter().map(|v| v * v).sum();
        let squares_error: f64 =
            centred.iter().zip(&centred_error).map(|(v, e)| 2.0 * v.abs() * e + e * e).sum();
        let relative = (squares_error / squares.max(1e-30) + D * U) / 2.0 + 8.0 * U;
        let scale = 1.0 / (squares / n + f64::from(eps)).sqrt();
        for i in 0..d {
            let factor = scale * f64::from(w[i]);
            let mut want = centred[i] * factor;
            let mut error = centred_error[i] * factor.abs() * 1.01 + want.abs() * relative;
            if c.layer && c.bias {
                want += f64::from(b[i]);
                error += want.abs() * U;
            }
            error += rounding(c.act, want.abs() + error);
            close(&format!("{what}: x, row {row}"), i, decode(c.act, out[i]), want, error);
        }
    }
    x
}

fn norm_types(rt: &Arc<dyn Runtime>) -> Vec<Half> {
    halves(rt, |t| format!("norm_rms_{t}_warp"))
}

#[test]
fn norms_of_all_row_lengths() {
    for rt in gpu::runtimes() {
        for act in norm_types(&rt) {
            // Around the edges of a warp's and a block's share, and the largest.
            for d in [4, 64, 576, 1020, 1024, 1028, 2048, 4100, 8192, 8196, 16384] {
                for layer in [false, true] {
                    let rows = if d > 2048 { 2 } else { 5 };
                    check_norm(&rt, &NormCase { layer, bias: layer, ..NormCase::plain(act, rows, d) });
                }
            }
        }
    }
}

#[test]
fn what_is_added_may_be_biased_normed_or_absent() {
    for rt in gpu::runtimes() {
        for act in norm_types(&rt) {
            for d in [96, 1536] {
                let c = NormCase { pad: 4, ..NormCase::plain(act, 6, d) };
                for (delta, delta_bias, post) in
                    [(false, false, false), (true, true, false), (true, false, true), (true, true, true)]
                {
                    check_norm(&rt, &NormCase { delta, delta_bias, post, ..c });
                    check_norm(&rt, &NormCase { delta, delta_bias, post, layer: true, bias: true, ..c });
                }
                check_norm(&rt, &NormCase { x: false, ..c });
                check_norm(&rt, &NormCase { sum: false, ..c });
                check_norm(&rt, &NormCase { layer: true, bias: false, ..c });
            }
        }
    }
}

#[test]
fn listed_rows_come_out_side_by_side() {
    for rt in gpu::runtimes() {
        for act in norm_types(&rt) {
            for d in [64, 1088] {
                let c = NormCase { listed: true, pad: 8, ..NormCase::plain(act, 6, d) };
                check_norm(&rt, &c);
                check_norm(&rt, &NormCase { sum: false, ..c });
                check_norm(&rt, &NormCase { post: true, layer: true, bias: true, ..c });
            }
        }
    }
}

#[test]
fn a_normed_row_does_not_depend_on_the_other_rows() {
    for rt in gpu::runtimes() {
        for act in norm_types(&rt) {
            for d in [576, 1536] {
                // Row 0 is drawn first, so it is the same in both.
                let many = NormCase { post: true, ..NormCase::plain(act, 9, d) };
                let one = |c: &NormCase| {
                    let mut rng = Rng::new(77);
                    let row = normals(&mut rng, d);
                    let hidden = Output::of(&rt, &row.repeat(c.rows));
                    let w = upload(&rt, &row);
                    let x = Output::new(&rt, c.rows * d * 2);
                    let args = NormRows {
                        norm: Norm::Rms { eps: 1e-6 },
                        hidden: hidden.ptr(),
                        delta: w.ptr(),
                        delta_bias: DevPtr::NULL,
                        post: w.ptr(),
                        weight: NormWeight { w: w.ptr(), b: DevPtr::NULL },
                        sum: hidden.ptr(),
                        x: x.ptr(),
                        act,
                        row_list: DevPtr::NULL,
                        rows: c.rows,
                        d,
                        ld_delta: 0,
                        ld_x: d,
                    };
                    norm(&*rt, LANE, &args).expect("launch");
                    (hidden.bytes(), x.bytes())
                };
                let (sum, x) = one(&many);
                let (sum1, x1) = one(&NormCase { rows: 1, ..many });
                assert!(sum == sum1.repeat(9) && x == x1.repeat(9), "d {d}");
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------
// RoPE and append.

#[derive(Debug, Clone, Copy)]
struct RopeCase {
    kv: Half,
    rows: usize,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    rope_dim: usize,
    pairing: RopePairing,
    bias: bool,
    norms: bool,
    publish: Option<bool>,
    pad: usize,
    seed: u64,
}

impl RopeCase {
    fn plain(kv: Half, rows: usize, head_dim: usize) -> RopeCase {
        RopeCase {
            kv,
            rows,
            n_heads: 3,
            n_kv_heads: 1,
            head_dim,
            rope_dim: head_dim,
            pairing: RopePairing::Half,
            bias: false,
            norms: false,
            publish: None,
            pad: 0,
            seed: 9,
        }
    }
}

/// Runs a case and checks it.
///
/// An element that is biased is rounded once; its norm has D = head_dim/32 + 5 roundings in the sum of squares and 8u
/// after it (see `check_norm`). a·c - b·s has two roundings more, relative to |a c| + |b s|.
fn check_rope(rt: &Arc<dyn Runtime>, c: &RopeCase) {
    const POSITIONS: usize = 40;
    let mut rng = Rng::new(c.seed);
    let (hd, heads) = (c.head_dim, c.n_heads + 2 * c.n_kv_heads);
    let ld = heads * hd + c.pad;
    let qkv: Vec<f32> =
        (0..c.rows * ld).map(|i| if i % ld < heads * hd { rng.normal() } else { f32::NAN }).collect();
    let bias = normals(&mut rng, heads * hd);
    let (wq, wk) = (normals(&mut rng, hd), normals(&mut rng, hd));
    let half = c.rope_dim / 2;
    let angles: Vec<f64> = (0..POSITIONS * half)
        .map(|i| (i / half) as f64 * 1e4f64.powf(-((i % half) as f64) / half as f64))
        .collect();
    let cos: Vec<f32> = angles.iter().map(|a| a.cos() as f32).collect();
    let sin: Vec<f32> = angles.iter().map(|a| a.sin() as f32).collect();
    let row_pos: Vec<u32> = (0..c.rows).map(|_| rng.below(POSITIONS) as u32).collect();
    // Scattered places, all different; every fourth row has none.
    let pages = (c.rows * 5 / 32 + 1) as i32;
    let slots: Vec<i32> =
        (0..c.rows).map(|r| if r % 4 == 3 { -1 } else { (r as i32 * 5 + 3) % (pages * 32) }).collect();
    let place: Vec<i32> = {
        let mut next = 0;
        let mut take = |wanted: bool| {
            next += i32::from(wanted);
            if wanted { next - 1 } else { -1 }
        };
        (0..c.rows).map(|r| take(r % 3 != 1)).collect()
    };
    let n_published = place.iter().filter(|p| **p >= 0).count();

    let dev = |v: &[f32]| upload(rt, v);
    let (qkv_dev, bias_dev, wq_dev, wk_dev) = (dev(&qkv), dev(&bias), dev(&wq), dev(&wk));
    let (cos_dev, sin_dev) = (dev(&cos), dev(&sin));
    let (pos_dev, slots_dev) = (upload(rt, &row_pos), upload(rt, &slots));
    let q = Output::new(rt, c.rows * c.n_heads * hd * 2);
    let kv = Output::new(rt, pages as usize * c.n_kv_heads * 64 * hd * 2);
    let (place_dev, n_dev) = (upload(rt, &place), upload(rt, &[n_published as u32]));
    let (epoch_dev, arrived) = (upload(rt, &[41u32]), Output::of(rt, &[0u32]));
    let element = if c.publish == Some(true) { 4 } else { 2 };
    let stride = (heads * hd * element).next_multiple_of(8) + 8;
    let published = Output::new(rt, n_published * stride);
    let flag = Output::of(rt, &[0u32]);
    let or_null = |wanted: bool, p: DevPtr| if wanted { p } else { DevPtr::NULL };
    let eps = 1e-6f32;
    let args = RopeAppend {
        qkv: qkv_dev.ptr(),
        bias: or_null(c.bias, bias_dev.ptr()),
        q_norm: or_null(c.norms, wq_dev.ptr()),
        k_norm: or_null(c.norms, wk_dev.ptr()),
        eps,
        rope: [or_null(half > 0, cos_dev.ptr()), or_null(half > 0, sin_dev.ptr())],
        rope_dim: c.rope_dim,
        pairing: c.pairing,
        row_pos: pos_dev.ptr(),
        row_slot: slots_dev.ptr(),
        q: q.ptr(),
        kv: kv.ptr(),
        kv_type: c.kv,
        publish: c.publish.map(|f32| PublishRows {
            slots: place_dev.ptr(),
            n: n_dev.ptr(),
            to: published.ptr(),
            stride,
            f32,
            epoch: epoch_dev.ptr(),
            epoch_add: 2,
            epoch_flag: flag.ptr(),
            arrived: arrived.ptr(),
        }),
        rows: c.rows,
        ld,
        n_heads: c.n_heads,
        n_kv_heads: c.n_kv_heads,
        head_dim: hd,
    };
    // Twice: the counter is back where it was.
    rope_append(&**rt, LANE, &args).expect("launch");
    rope_append(&**rt, LANE, &args).expect("launch");
    assert_eq!(flag.u32(), [if c.publish.is_some() { 43 } else { 0 }]);
    assert_eq!(arrived.u32(), [0]);

    let (q, mut kv, published) = (q.u16(), kv.u16(), published.bytes());
    for row in 0..c.rows {
        for head in 0..heads {
            let (is_q, is_v) = (head < c.n_heads, head >= c.n_heads + c.n_kv_heads);
            let mut x: Vec<f64> = (0..hd)
                .map(|i| {
                    let v = qkv[row * ld + head * hd + i];
                    f64::from(if c.bias { v + bias[head * hd + i] } else { v })
                })
                .collect();
            let mut relative = 0.0;
            if c.norms && !is_v {
                let mean = x.iter().map(|v| v * v).sum::<f64>() / hd as f64;
                let scale = 1.0 / (mean + f64::from(eps)).sqrt();
                let w = if is_q { &wq } else { &wk };
                for i in 0..hd {
                    x[i] *= scale * f64::from(w[i]);
                }
                relative = ((hd as f64 / 32.0 + 5.0) / 2.0 + 8.0) * U;
            }
            let mut error: Vec<f64> = x.iter().map(|v| v.abs() * relative).collect();
            if !is_v {
                for p in 0..half {
                    let (a, b) = match c.pairing {
                        RopePairing::Half => (p, p + half),
                        RopePairing::Interleaved => (2 * p, 2 * p + 1),
                    };
                    let t = row_pos[row] as usize * half + p;
                    let (co, si) = (f64::from(cos[t]), f64::from(sin[t]));
                    let (xa, xb) = (x[a], x[b]);
                    (x[a], x[b]) = (xa * co - xb * si, xb * co + xa * si);
                    error[a] = (relative + 2.0 * U) * ((xa * co).abs() + (xb * si).abs());
                    error[b] = (relative + 2.0 * U) * ((xb * co).abs() + (xa * si).abs());
                }
            }
            let what = format!("{c:?}, row {row}, head {head}");
            let compare = |got: &[u16]| {
                for i in 0..hd {
                    let value = decode(c.kv, got[i]);
                    if error[i] == 0.0 {
                        assert_eq!(got[i], encode(c.kv, x[i] as f32), "{what}, element {i}: only rounded");
                    }
                    close(&what, i, value, x[i], error[i] + rounding(c.kv, x[i].abs() + error[i]));
                }
            };
            let mut stored = Vec::new();
            if is_q {
                stored = q[(row * c.n_heads + head) * hd..][..hd].to_vec();
            } else if slots[row] >= 0 {
                let (page, token) = (slots[row] as usize / 32, slots[row] as usize % 32);
                let kv_head = (head - c.n_heads) % c.n_kv_heads;
                let from = ((page * c.n_kv_heads + kv_head) * 2 + usize::from(is_v)) * 32 * hd + token * hd;
                stored = kv[from..from + hd].to_vec();
                kv[from..from + hd].fill(0xffff);
            }
            if !stored.is_empty() {
                compare(&stored);
            }
            if c.publish.is_some() && place[row] >= 0 {
                let from = place[row] as usize * stride + head * hd * element;
                let row_bytes = &published[from..from + hd * element];
                let sent: Vec<u16> = if element == 4 {
                    let values: Vec<f32> = row_bytes
                        .chunks_exact(4)
                        .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
                        .collect();
                    for (i, v) in values.iter().enumerate() {
                        close(&what, i, f64::from(*v), x[i], error[i]);
                    }
                    values.iter().map(|v| encode(c.kv, *v)).collect()
                } else {
                    row_bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect()
                };
                compare(&sent);
                assert!(
                    stored.is_empty() || stored == sent,
                    "{what}: the host gets other bits than the device"
                );
            }
        }
        if c.publish.is_some() && place[row] >= 0 {
            let tail = place[row] as usize * stride + heads * hd * element;
            let end = (place[row] as usize + 1) * stride;
            assert!(published[tail..end].iter().all(|b| *b == CANARY), "{c:?}: behind a published row");
        }
    }
    assert!(kv.iter().all(|v| *v == 0xffff), "{c:?}: a place of the pages that no row has was written");
    if c.publish.is_none() {
        assert!(published.iter().all(|b| *b == CANARY), "{c:?}: published unasked");
    }
}

fn rope_types(rt: &Arc<dyn Runtime>) -> Vec<Half> {
    halves(rt, |t| format!("rope_append_{t}"))
}

#[test]
fn rope_of_all_head_sizes_and_both_pairings() {
    for rt in gpu::runtimes() {
        for kv in rope_types(&rt) {
            for head_dim in [16, 64, 80, 96, 128, 256] {
                for pairing in [RopePairing::Half, RopePairing::Interleaved] {
                    let c = RopeCase { pairing, ..RopeCase::plain(kv, 5, head_dim) };
                    check_rope(&rt, &c);
                    check_rope(&rt, &RopeCase { norms: true, bias: true, pad: 4, n_kv_heads: 2, ..c });
                    // A part of the head is turned, or none of it.
                    check_rope(&rt, &RopeCase { rope_dim: 12, norms: true, ..c });
                    check_rope(&rt, &RopeCase { rope_dim: 0, bias: true, ..c });
                }
            }
        }
    }
}

#[test]
fn rows_for_the_host_get_the_same_bits() {
    for rt in gpu::runtimes() {
        for kv in rope_types(&rt) {
            for f32 in [false, true] {
                let c = RopeCase { publish: Some(f32), norms: true, ..RopeCase::plain(kv, 7, 64) };
                check_rope(&rt, &c);
                check_rope(&rt, &RopeCase { pairing: RopePairing::Interleaved, n_kv_heads: 3, ..c });
                // Rows 0 and 2 are published of one and two rows: the first alone, then none in between.
                check_rope(&rt, &RopeCase { rows: 1, ..c });
                check_rope(&rt, &RopeCase { rows: 2, ..c });
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------
// Activations.

/// The activation in f64 of an exact argument, and the error of its f32 evaluation.
///
/// silu: e^-x is off by (2 + 1.2 |x|)·2^-23 (the fast exponential), which reaches x / (1 + e^-x) weighted by
/// e^-x / (1 + e^-x); three roundings more. gelu: the inner argument has six roundings, weighted by
/// max z·sech²z < 0.45; tanh is off by 2 ulp (4u), the sum with 1 by 2u: 9u of |x|/2, then three of the result.
fn activation(ffn: Ffn, x: f64) -> (f64, f64) {
    match ffn {
        Ffn::SwiGlu => {
            let e = (-x).exp();
            let y = x / (1.0 + e);
            (y, y.abs() * ((2.0 + 1.2 * x.abs()) * 2.0 * U * (e / (1.0 + e)) + 4.0 * U))
        }
        Ffn::GeGlu => {
            let z = std::f64::consts::FRAC_2_PI.sqrt() * (x + 0.044715 * x.powi(3));
            let y = 0.5 * x * (1.0 + z.tanh());
            (y, 0.5 * x.abs() * 9.0 * U + 3.0 * U * y.abs())
        }
        Ffn::Relu => (x.max(0.0), 0.0),
    }
}

fn check_activation(rt: &Arc<dyn Runtime>, ffn: Ffn, act: Half, rows: usize, n: usize, bias: bool) {
    let mut rng = Rng::new(11);
    // Gate and up are columns of one buffer.
    let (ld, ld_out) = (2 * n + 4, n + 8);
    let mut both: Vec<f32> = normals(&mut rng, rows * ld).iter().map(|v| v * 4.0).collect();
    for row in 0..rows {
        both[row * ld + 2 * n..(row + 1) * ld].fill(f32::NAN);
    }
    let (bg, bu) = (normals(&mut rng, n), normals(&mut rng, n));
    let (both_dev, bg_dev, bu_dev) = (upload(rt, &both), upload(rt, &bg), upload(rt, &bu));
    let out = Output::new(rt, rows * ld_out * 2);
    let gated = ffn != Ffn::Relu;
    let or_null = |wanted: bool, p: DevPtr| if wanted { p } else { DevPtr::NULL };
    let args = Activate {
        gate: both_dev.ptr(),
        up: or_null(gated, both_dev.ptr().add(n * 4)),
        gate_bias: or_null(bias, bg_dev.ptr()),
        up_bias: or_null(bias && gated, bu_dev.ptr()),
        out: out.ptr(),
        rows,
        n,
        ld_gate: ld,
        ld_up: ld,
        ld_out,
    };
    activate(&**rt, LANE, Activation::Ffn(ffn, act), &args).expect("launch");
    let got = out.u16();
    for row in 0..rows {
        let line = &got[row * ld_out..(row + 1) * ld_out];
        assert!(line[n..].iter().all(|v| *v == 0xffff), "padding of the output was written");
        for i in 0..n {
            let biased = |v: f32, b: f32| f64::from(if bias { v + b } else { v });
            let (mut y, mut error) = activation(ffn, biased(both[row * ld + i], bg[i]));
            if gated {
                let u = biased(both[row * ld + n + i], bu[i]);
                y *= u;
                error = error * u.abs() + y.abs() * U;
            }
            let what = format!("{ffn:?} {act:?} bias {bias}, row {row}");
            close(&what, i, decode(act, line[i]), y, error + rounding(act, y.abs() + error));
        }
    }
}

#[test]
fn activations_in_both_types() {
    for rt in gpu::runtimes() {
        for act in halves(&rt, |t| format!("activation_swiglu_{t}")) {
            for ffn in [Ffn::SwiGlu, Ffn::GeGlu, Ffn::Relu] {
                for (rows, n) in [(1, 4), (3, 96), (2, 1028)] {
                    check_activation(&rt, ffn, act, rows, n, false);
                    check_activation(&rt, ffn, act, rows, n, true);
                }
            }
        }
    }
}

#[test]
fn casts_round_once_and_biases_are_added_in_place() {
    for rt in gpu::runtimes() {
        let (rows, n, ld) = (3, 1032, 1040);
        let mut rng = Rng::new(12);
        let mut x = normals(&mut rng, rows * ld);
        x[..6].copy_from_slice(&[f32::NAN, f32::INFINITY, -0.0, 1e30, 1e-30, f32::MIN_POSITIVE]);
        let bias = normals(&mut rng, n);
        let bias_dev = upload(&rt, &bias);
        let args = |x: DevPtr, out: DevPtr, bias: DevPtr, ld_out: usize| Activate {
            gate: x,
            up: DevPtr::NULL,
            gate_bias: bias,
            up_bias: DevPtr::NULL,
            out,
            rows,
            n,
            ld_gate: ld,
            ld_up: 0,
            ld_out,
        };
        for act in halves(&rt, |t| format!("cast_{t}")) {
            let x_dev = upload(&rt, &x);
            let out = Output::new(&rt, rows * n * 2);
            let args = args(x_dev.ptr(), out.ptr(), DevPtr::NULL, n);
            activate(&*rt, LANE, Activation::Cast(act), &args).expect("launch");
            for (i, got) in out.u16().into_iter().enumerate() {
                let v = x[i / n * ld + i % n];
                if v.is_nan() {
                    assert!(decode(act, got).is_nan());
                } else {
                    assert_eq!(got, encode(act, v), "{v} as {act:?}");
                }
            }
        }
        let inout = Output::of(&rt, &x);
        let args = args(inout.ptr(), inout.ptr(), bias_dev.ptr(), ld);
        activate(&*rt, LANE, Activation::AddBias, &args).expect("launch");
        for (i, got) in inout.f32().into_iter().enumerate() {
            let want = if i % ld < n { x[i] + bias[i % ld] } else { x[i] };
            assert!(
                got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(),
                "{i}: {got} not {want}"
            );
        }
    }
}

// ---------------------------------------------------------------------------------------------------------
// All together.

#[test]
fn every_order_of_threads_gives_the_same() {
    gpu::for_schedules(|rt, _| {
        let act = Half::F16;
        let tokens = Some(vec![1, u32::MAX, 0]);
        let scale = 2.0;
        let dtype = DType::Q5_K;
        check_embed(rt, &EmbedCase { dtype, d: 512, vocab: 2, tokens, scale, positions: None, seed: 1 });
        for d in [36, 1540] {
            let c = NormCase { post: true, layer: true, bias: true, ..NormCase::plain(act, 3, d) };
            check_norm(rt, &c);
        }
        check_rope(rt, &RopeCase { publish: Some(true), norms: true, ..RopeCase::plain(act, 3, 80) });
        check_activation(rt, Ffn::GeGlu, act, 2, 12, true);
    });
}

fn half_type() -> impl Strategy<Value = Half> {
    prop_oneof![Just(Half::F16), Just(Half::BF16)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_embedding(
        dtype in prop::sample::select(DType::ALL.to_vec()),
        blocks in 1..4usize,
        odd in 0..7usize,
        vocab in 1..6usize,
        tokens in prop::collection::vec(prop_oneof![9 => 0..7u32, 1 => Just(u32::MAX)], 0..6),
        with_positions in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let d = if dtype.is_quantised() { blocks * dtype.block_len() } else { blocks * 100 + odd };
        let positions = with_positions.then_some(DType::F16);
        for rt in gpu::runtimes() {
            let tokens = Some(tokens.clone());
            check_embed(&rt, &EmbedCase { dtype, d, vocab, tokens, scale: 0.5, positions, seed });
        }
    }

    #[test]
    fn any_norm(
        act in half_type(),
        rows in 0..7usize,
        quads in 1..420usize,
        switches in any::<[bool; 8]>(),
        pad in 0..3usize,
        seed in any::<u64>(),
    ) {
        let [layer, delta, delta_bias, post, bias, sum, x, listed] = switches;
        let delta_bias = delta_bias && delta;
        let post = post && delta;
        let d = quads * 4;
        for rt in gpu::runtimes().iter().filter(|rt| norm_types(rt).contains(&act)) {
            let pad = pad * 4;
            let c = NormCase { layer, act, rows, d, delta, delta_bias, post, bias, sum, x, listed, pad, seed };
            check_norm(rt, &c);
        }
    }

    #[test]
    fn any_rope(
        kv in half_type(),
        rows in 0..9usize,
        n_kv_heads in 1..4usize,
        group in 1..9usize,
        quads in 1..65usize,
        turned in 0..65usize,
        switches in any::<[bool; 3]>(),
        publish in prop::option::of(any::<bool>()),
        seed in any::<u64>(),
    ) {
        let [interleaved, bias, norms] = switches;
        let c = RopeCase {
            kv,
            rows,
            n_heads: n_kv_heads * group,
            n_kv_heads,
            head_dim: quads * 4,
            rope_dim: turned.min(quads) * 4,
            pairing: if interleaved { RopePairing::Interleaved } else { RopePairing::Half },
            bias,
            norms,
            // Nothing is launched for no rows, so nothing is published.
            publish: publish.filter(|_| rows > 0),
            pad: 0,
            seed,
        };
        for rt in gpu::runtimes().iter().filter(|rt| rope_types(rt).contains(&kv)) {
            check_rope(rt, &c);
        }
    }
}
