//! Norms of what was added, and what leaves with them.

use super::*;

#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub layer: bool,
    pub act: Half,
    pub rows: usize,
    pub d: usize,
    pub delta: bool,
    pub delta_bias: bool,
    pub post: bool,
    /// Without weights the sum itself leaves.
    pub weights: bool,
    pub bias: bool,
    pub sum: bool,
    pub x: bool,
    pub listed: bool,
    pub pad: usize,
    pub seed: u64,
}

impl Case {
    pub fn plain(act: Half, rows: usize, d: usize) -> Case {
        Case {
            layer: false,
            act,
            rows,
            d,
            delta: true,
            delta_bias: false,
            post: false,
            weights: true,
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
pub fn check(rt: &Arc<dyn Runtime>, c: &Case) -> Vec<u16> {
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
        weight: NormWeight {
            w: or_null(c.weights, vectors_dev[2].ptr()),
            b: or_null(c.bias, vectors_dev[3].ptr()),
        },
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
        if !c.weights {
            for i in 0..d {
                let error = h_error[i] + rounding(c.act, h[i].abs() + h_error[i]);
                close(&format!("{what}: x, row {row}"), i, decode(c.act, out[i]), h[i], error);
            }
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
                    check(&rt, &Case { layer, bias: layer, ..Case::plain(act, rows, d) });
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
                let c = Case { pad: 4, ..Case::plain(act, 6, d) };
                for (delta, delta_bias, post) in
                    [(false, false, false), (true, true, false), (true, false, true), (true, true, true)]
                {
                    check(&rt, &Case { delta, delta_bias, post, ..c });
                    check(&rt, &Case { delta, delta_bias, post, layer: true, bias: true, ..c });
                }
                check(&rt, &Case { x: false, ..c });
                check(&rt, &Case { weights: false, ..c });
                check(&rt, &Case { weights: false, post: true, ..c });
                check(&rt, &Case { sum: false, ..c });
                check(&rt, &Case { layer: true, bias: false, ..c });
            }
        }
    }
}

#[test]
fn listed_rows_come_out_side_by_side() {
    for rt in gpu::runtimes() {
        for act in norm_types(&rt) {
            for d in [64, 1088] {
                let c = Case { listed: true, pad: 8, ..Case::plain(act, 6, d) };
                check(&rt, &c);
                check(&rt, &Case { sum: false, ..c });
                check(&rt, &Case { post: true, layer: true, bias: true, ..c });
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
                let many = Case { post: true, ..Case::plain(act, 9, d) };
                let one = |c: &Case| {
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
                let (sum1, x1) = one(&Case { rows: 1, ..many });
                assert!(sum == sum1.repeat(9) && x == x1.repeat(9), "d {d}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_norm(
        act in half_type(),
        rows in 0..7usize,
        quads in 1..420usize,
        switches in any::<[bool; 9]>(),
        pad in 0..3usize,
        seed in any::<u64>(),
    ) {
        let [layer, delta, delta_bias, post, weights, bias, sum, x, listed] = switches;
        let delta_bias = delta_bias && delta;
        let post = post && delta;
        let d = quads * 4;
        for rt in gpu::runtimes().iter().filter(|rt| norm_types(rt).contains(&act)) {
            let pad = pad * 4;
            let c = Case { layer, act, rows, d, delta, delta_bias, post, weights, bias, sum, x, listed, pad, seed };
            check(rt, &c);
        }
    }
}
