//! RoPE, and keys and values appended to their pages.

use super::*;

#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub kv: KvType,
    pub rows: usize,
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
    pub rope_dim: usize,
    pub pairing: RopePairing,
    pub bias: bool,
    pub norms: Option<QkNorm>,
    pub publish: bool,
    pub pad: usize,
    pub seed: u64,
}

impl Case {
    pub fn plain(kv: impl Into<KvType>, rows: usize, head_dim: usize) -> Case {
        Case {
            kv: kv.into(),
            rows,
            n_heads: 3,
            n_kv_heads: 1,
            head_dim,
            rope_dim: head_dim,
            pairing: RopePairing::Half,
            bias: false,
            norms: None,
            publish: false,
            pad: 0,
            seed: 9,
        }
    }
}

/// Runs a case and checks it.
///
/// An element that is biased is rounded once; its norm has D roundings in the sum of squares and 8u after it (see
/// `norm::check`): n/32 of a lane and 5 of a warp over the n elements of a head, or n/threads of a thread, 3 of its four
/// sums, 5 of a warp and up to 32 of its block over those of a row. a·c - b·s has two roundings more, relative to |a c| + |b s|.
pub fn check(rt: &Arc<dyn Runtime>, c: &Case) {
    const POSITIONS: usize = 40;
    let mut rng = Rng::new(c.seed);
    let (hd, heads) = (c.head_dim, c.n_heads + 2 * c.n_kv_heads);
    let ld = heads * hd + c.pad;
    let qkv: Vec<f32> =
        (0..c.rows * ld).map(|i| if i % ld < heads * hd { rng.normal() } else { f32::NAN }).collect();
    let bias = normals(&mut rng, heads * hd);
    let widths = c.norms.map_or([hd; 2], |norms| norms.widths(hd, [c.n_heads, c.n_kv_heads]));
    let [wq, wk] = widths.map(|n| normals(&mut rng, n));
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
    let part = c.kv.part_bytes(hd);
    let kv = Output::new(rt, pages as usize * c.n_kv_heads * 2 * part);
    let (place_dev, n_dev) = (upload(rt, &place), upload(rt, &[n_published as u32]));
    let (epoch_dev, arrived) = (upload(rt, &[41u32]), Output::of(rt, &[0u32]));
    let stride = (heads * hd * 2).next_multiple_of(8) + 8;
    let published = Output::new(rt, n_published * stride);
    let flag = Output::of(rt, &[0u32]);
    let or_null = |wanted: bool, p: DevPtr| if wanted { p } else { DevPtr::NULL };
    let eps = 1e-6f32;
    let args = RopeAppend {
        qkv: qkv_dev.ptr(),
        bias: or_null(c.bias, bias_dev.ptr()),
        q_norm: or_null(c.norms.is_some(), wq_dev.ptr()),
        k_norm: or_null(c.norms.is_some(), wk_dev.ptr()),
        norms: c.norms.unwrap_or(QkNorm::PerHead),
        eps,
        rope: [or_null(half > 0, cos_dev.ptr()), or_null(half > 0, sin_dev.ptr())],
        rope_dim: c.rope_dim,
        pairing: c.pairing,
        row_pos: pos_dev.ptr(),
        row_slot: slots_dev.ptr(),
        finished: DevPtr::NULL,
        q: q.ptr(),
        kv: kv.ptr(),
        kv_type: c.kv,
        publish: c.publish.then(|| PublishRows {
            slots: place_dev.ptr(),
            n: n_dev.ptr(),
            to: published.ptr(),
            stride,
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
    assert_eq!(flag.u32(), [if c.publish { 43 } else { 0 }]);
    assert_eq!(arrived.u32(), [0]);

    let half_type = c.kv.half();
    let (q, mut kv, published) = (q.u16(), kv.bytes(), published.bytes());
    for row in 0..c.rows {
        for head in 0..heads {
            let (is_q, is_v) = (head < c.n_heads, head >= c.n_heads + c.n_kv_heads);
            let biased = |i: usize| {
                let v = qkv[row * ld + i];
                f64::from(if c.bias { v + bias[i] } else { v })
            };
            let mut x: Vec<f64> = (0..hd).map(|i| biased(head * hd + i)).collect();
            let mut relative = 0.0;
            if let Some(norms) = c.norms.filter(|_| !is_v) {
                let (w, first) = if is_q { (&wq, 0) } else { (&wk, c.n_heads) };
                // Over these elements of the row; the head is part of them.
                let over = match norms {
                    QkNorm::PerHead => head * hd..(head + 1) * hd,
                    QkNorm::Whole => first * hd..first * hd + w.len(),
                };
                let (n, at) = (over.len() as f64, head * hd - over.start);
                let mean = over.map(|i| biased(i).powi(2)).sum::<f64>() / n;
                let scale = 1.0 / (mean + f64::from(eps)).sqrt();
                for i in 0..hd {
                    x[i] *= scale * f64::from(w[at + i]);
                }
                let roundings = match norms {
                    QkNorm::PerHead => n / 32.0 + 5.0,
                    QkNorm::Whole => n / (32.0 * heads.min(32) as f64) + 3.0 + 5.0 + 32.0,
                };
                relative = (roundings / 2.0 + 8.0) * U;
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
                    let value = decode(half_type, got[i]);
                    if error[i] == 0.0 {
                        assert_eq!(
                            got[i],
                            encode(half_type, x[i] as f32),
                            "{what}, element {i}: only rounded"
                        );
                    }
                    close(&what, i, value, x[i], error[i] + rounding(half_type, x[i].abs() + error[i]));
                }
            };
            let mut stored = Vec::new();
            if is_q {
                stored = q[(row * c.n_heads + head) * hd..][..hd].to_vec();
            } else if slots[row] >= 0 {
                let (page, token) = (slots[row] as usize / 32, slots[row] as usize % 32);
                let kv_head = (head - c.n_heads) % c.n_kv_heads;
                let of = &mut kv[((page * c.n_kv_heads + kv_head) * 2 + usize::from(is_v)) * part..][..part];
                let at = token * hd * c.kv.element()..(token + 1) * hd * c.kv.element();
                if c.kv.is_scaled() {
                    let scale = scale_of(of, hd, token);
                    let amax = x.iter().map(|x| x.abs()).fold(0.0, f64::max);
                    let most = error.iter().copied().fold(0.0, f64::max);
                    close(&what, hd, f64::from(scale) * 127.0, amax, most + 2.0 * U * amax);
                    for i in 0..hd {
                        // Half a step and four roundings of 127 beside what was wrong before.
                        let step = f64::from(scale) * (0.5 + 4.0 * 127.0 * U);
                        close(
                            &what,
                            i,
                            crate::support::gpu::memory::stored(c.kv, of, hd, token, i),
                            x[i],
                            error[i] + most + step,
                        );
                    }
                    of[32 * hd + 4 * token..][..4].fill(CANARY);
                } else {
                    let bits = of[at.clone()].chunks_exact(2);
                    stored = bits.map(|b| u16::from_le_bytes([b[0], b[1]])).collect();
                }
                of[at].fill(CANARY);
            }
            if !stored.is_empty() {
                compare(&stored);
            }
            if c.publish && place[row] >= 0 {
                let from = place[row] as usize * stride + head * hd * 2;
                let sent = published[from..from + hd * 2].chunks_exact(2);
                let sent: Vec<u16> = sent.map(|b| u16::from_le_bytes([b[0], b[1]])).collect();
                compare(&sent);
                assert!(
                    stored.is_empty() || stored == sent,
                    "{what}: the host gets other bits than the device"
                );
            }
        }
        if c.publish && place[row] >= 0 {
            let tail = place[row] as usize * stride + heads * hd * 2;
            let end = (place[row] as usize + 1) * stride;
            assert!(published[tail..end].iter().all(|b| *b == CANARY), "{c:?}: behind a published row");
        }
    }
    assert!(kv.iter().all(|v| *v == CANARY), "{c:?}: a place of the pages that no row has was written");
    if !c.publish {
        assert!(published.iter().all(|b| *b == CANARY), "{c:?}: published unasked");
    }
}

/// One launch that finishes rows in place and one that rounds and stores them, as one launch that does both.
#[test]
fn finishing_then_rounding_gives_the_same_bits() {
    for rt in gpu::runtimes() {
        for kv in rope_types(&rt) {
            for (head_dim, rope_dim, pairing, norms) in [
                (64, 64, RopePairing::Half, QkNorm::PerHead),
                (64, 64, RopePairing::Half, QkNorm::Whole),
                (80, 20, RopePairing::Interleaved, QkNorm::PerHead),
                (256, 0, RopePairing::Half, QkNorm::PerHead),
                (256, 0, RopePairing::Half, QkNorm::Whole),
            ] {
                let (rows, n_heads, n_kv_heads) = (5usize, 4usize, 2usize);
                let width = (n_heads + 2 * n_kv_heads) * head_dim;
                let ld = width + 8;
                let mut rng = Rng::new(4);
                let qkv = normals(&mut rng, rows * ld);
                let floats = |rng: &mut Rng, n: usize| upload(&rt, &normals(rng, n));
                let (bias, norm) = (floats(&mut rng, width), floats(&mut rng, n_heads * head_dim));
                let tables = floats(&mut rng, 8 * (rope_dim / 2).max(1));
                let positions = upload(&rt, &[7u32, 0, 3, 1, 6]);
                let slots = upload(&rt, &[0i32, 40, -1, 63, 9]);
                let pages = 2 * n_kv_heads * 2 * kv.part_bytes(head_dim);
                let outputs = || (Output::new(&rt, rows * n_heads * head_dim * 2), Output::new(&rt, pages));
                let ((q, kv_pages), (q2, kv_pages2)) = (outputs(), outputs());
                let once = upload(&rt, &qkv);
                let twice = Output::of(&rt, &qkv);
                let both = RopeAppend {
                    qkv: once.ptr(),
                    bias: bias.ptr(),
                    q_norm: norm.ptr(),
                    k_norm: norm.ptr(),
                    norms,
                    eps: 1e-5,
                    rope: [tables.ptr(); 2],
                    rope_dim,
                    pairing,
                    row_pos: positions.ptr(),
                    row_slot: slots.ptr(),
                    finished: DevPtr::NULL,
                    q: q.ptr(),
                    kv: kv_pages.ptr(),
                    kv_type: kv,
                    publish: None,
                    rows,
                    ld,
                    n_heads,
                    n_kv_heads,
                    head_dim,
                };
                rope_append(&*rt, LANE, &both).expect("launch");
                let in_place = twice.ptr();
                let (none, rope) = (DevPtr::NULL, [DevPtr::NULL; 2]);
                let finish = RopeAppend {
                    qkv: in_place,
                    finished: in_place,
                    row_slot: none,
                    q: none,
                    kv: none,
                    ..both
                };
                rope_append(&*rt, LANE, &finish).expect("launch");
                let (q_out, kv_out) = (q2.ptr(), kv_pages2.ptr());
                let store = RopeAppend { bias: none, q_norm: none, k_norm: none, rope, rope_dim: 0, ..both };
                let store = RopeAppend { qkv: in_place, q: q_out, kv: kv_out, ..store };
                rope_append(&*rt, LANE, &store).expect("launch");
                assert!(q2.u16() == q.u16(), "{kv:?}, {head_dim}: q");
                assert!(kv_pages2.bytes() == kv_pages.bytes(), "{kv:?}, {head_dim}: pages");
                let finished = twice.bytes();
                for row in 0..rows {
                    let pad = &finished[4 * (row * ld + width)..4 * (row + 1) * ld];
                    assert!(pad == bytes(&qkv[row * ld + width..(row + 1) * ld]), "behind row {row}");
                }
            }
        }
    }
}

fn rope_types(rt: &Arc<dyn Runtime>) -> Vec<KvType> {
    let halves = halves(rt, |t| format!("rope_append_{t}"));
    assert!(rt.has_kernel("rope_append_q8"));
    halves.into_iter().map(KvType::from).chain([KvType::Q8]).collect()
}

#[test]
fn rope_of_all_head_sizes_and_both_pairings() {
    for rt in gpu::runtimes() {
        for kv in rope_types(&rt) {
            for head_dim in [16, 64, 80, 96, 128, 256] {
                for pairing in [RopePairing::Half, RopePairing::Interleaved] {
                    let c = Case { pairing, ..Case::plain(kv, 5, head_dim) };
                    check(&rt, &c);
                    for norms in [QkNorm::PerHead, QkNorm::Whole] {
                        check(&rt, &Case { norms: Some(norms), bias: true, pad: 4, n_kv_heads: 2, ..c });
                    }
                    // A part of the head is turned, or none of it.
                    check(&rt, &Case { rope_dim: 12, norms: Some(QkNorm::PerHead), ..c });
                    check(&rt, &Case { rope_dim: 0, bias: true, ..c });
                }
            }
        }
    }
}

#[test]
fn rows_for_the_host_get_the_same_bits() {
    for rt in gpu::runtimes() {
        for kv in rope_types(&rt) {
            let norms = Some(QkNorm::PerHead);
            let c = Case { publish: true, norms, ..Case::plain(kv, 7, 64) };
            check(&rt, &c);
            check(&rt, &Case { norms: Some(QkNorm::Whole), ..c });
            check(&rt, &Case { pairing: RopePairing::Interleaved, n_kv_heads: 3, ..c });
            // Rows 0 and 2 are published of one and two rows: the first alone, then none in between.
            check(&rt, &Case { rows: 1, ..c });
            check(&rt, &Case { rows: 2, ..c });
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_rope(
        kv in prop::sample::select(KvType::ALL.to_vec()),
        rows in 0..9usize,
        n_kv_heads in 1..4usize,
        group in 1..9usize,
        quads in 1..65usize,
        turned in 0..65usize,
        switches in any::<[bool; 2]>(),
        norms in prop::sample::select(vec![None, Some(QkNorm::PerHead), Some(QkNorm::Whole)]),
        publish in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let [interleaved, bias] = switches;
        let c = Case {
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
            publish: publish && rows > 0,
            pad: 0,
            seed,
        };
        for rt in gpu::runtimes().iter().filter(|rt| rope_types(rt).contains(&kv)) {
            check(rt, &c);
        }
    }
}
