//! embed.cu, rope_append.cu, logits.cu.

use super::*;

/// Quantised rows as model files have them, bit for bit: every product rounds on its own.
#[test]
fn embeddings() {
    for module in modules("embed") {
        for (kernel, block_bytes) in [("embed_q4_0", 18usize), ("embed_q8_0", 34), ("embed_bf16", 64)] {
            let (d, vocab) = (576usize, 9usize);
            let tokens = [4u32, 0, 8, 4, 900];
            let mut random = Random(block_bytes as u64);
            let row_bytes = d / 32 * block_bytes;
            let mut table: Vec<u8> = (0..vocab * row_bytes).map(|_| random.next() as u8).collect();
            for block in table.chunks_mut(block_bytes) {
                if kernel == "embed_bf16" {
                    block.copy_from_slice(&Half::Bf16.bytes(&random.floats(32)));
                } else {
                    block[..2].copy_from_slice(&f16::from_f32(random.unit()).to_le_bytes());
                }
            }
            let positions = random.floats(3 * d);
            let row_pos = [0u32, 1, 0, 1, 1];
            let mut memory = Buffers::new();
            let (at_tokens, at_table) = (memory.add_words(&tokens), memory.add(&table));
            let (at_row_pos, at_positions) =
                (memory.add_words(&row_pos), memory.add(&float_bytes(&positions)));
            let hidden = memory.add(&vec![0xff; tokens.len() * d * 4]);
            let scale = 1.37f32;
            let params = Params::default()
                .pointers(&[at_tokens, at_table, at_row_pos, at_positions, hidden, row_bytes as u64])
                .words(&[tokens.len() as u32, d as u32, vocab as u32, 3, 0, 1])
                .float(scale);
            let grid = [tokens.len() as u32, (d as u32).div_ceil(512), 1];
            launch(&module, kernel, grid, (128, 0), &params, &mut memory);
            let got = floats(memory.bytes(hidden));
            for (r, token) in tokens.into_iter().enumerate() {
                for i in 0..d {
                    let want = if token as usize >= vocab {
                        0.0
                    } else {
                        let block =
                            &table[token as usize * row_bytes + i / 32 * block_bytes..][..block_bytes];
                        let scale_of = f16::from_le_bytes([block[0], block[1]]).to_f32();
                        let value = match kernel {
                            "embed_q4_0" => {
                                let byte = block[2 + i % 16];
                                let code = if i % 32 < 16 { byte & 15 } else { byte >> 4 };
                                scale_of * (f32::from(code) - 8.0)
                            }
                            "embed_q8_0" => scale_of * f32::from(block[2 + i % 32] as i8),
                            _ => Half::Bf16.values(block)[i % 32],
                        };
                        let position = positions[(row_pos[r] as usize + 1) * d + i];
                        value * scale + position
                    };
                    let got = got[r * d + i];
                    assert_eq!(got.to_bits(), want.to_bits(), "{kernel}: row {r}, {i}: {got} not {want}");
                }
            }
        }
    }
}

/// Bias, norm of each head, rotation of halves; K and V to their places in pages.
#[test]
fn rope_and_append() {
    for module in modules("rope_append") {
        for half in Half::BOTH {
            let kernel = format!("rope_append_{}", half.name());
            if !has(&module, &kernel) {
                continue;
            }
            let (rows, heads, kv_heads, d, rope) = (3usize, 4usize, 2usize, 96usize, 64usize);
            let ld = (heads + 2 * kv_heads) * d;
            let mut random = Random(11);
            let (qkv, bias) = (random.floats(rows * ld), random.floats(ld));
            let norms = random.floats(2 * d);
            let angles: Vec<f64> = (0..40 * rope / 2).map(|i| i as f64 * 0.37).collect();
            let table = |f: fn(f64) -> f64| angles.iter().map(|a| f(*a) as f32).collect::<Vec<f32>>();
            let (cos, sin) = (table(f64::cos), table(f64::sin));
            let row_pos = [3u32, 17, 39];
            // Page 1, token 5; nowhere; page 0, token 31.
            let slots = [37u32, u32::MAX, 31];
            let mut memory = Buffers::new();
            let mut add = |v: &[f32]| memory.add(&float_bytes(v));
            let at = [add(&qkv), add(&bias), add(&norms[..d]), add(&norms[d..]), add(&cos), add(&sin)];
            let (at_pos, at_slot) = (memory.add_words(&row_pos), memory.add_words(&slots));
            let q = memory.add(&vec![0; rows * heads * d * 2]);
            let kv = memory.add(&vec![0; 2 * kv_heads * 2 * 32 * d * 2]);
            let eps = 1e-6f32;
            let params = Params::default()
                .pointers(&at)
                .pointers(&[at_pos, at_slot, 0, q, kv, 0, 0, 0, 0, 0, 0, 0])
                .words(&[0, rows as u32, ld as u32, heads as u32, kv_heads as u32, d as u32, rope as u32, 0])
                .float(eps);
            let all = heads + 2 * kv_heads;
            let grid = [rows as u32, (all as u32).div_ceil(4), 1];
            launch(&module, &kernel, grid, (128, 0), &params, &mut memory);
            let (got_q, got_kv) = (half.values(memory.bytes(q)), half.values(memory.bytes(kv)));
            for r in 0..rows {
                for head in 0..all {
                    let at = head * d;
                    let mut x: Vec<f64> =
                        (0..d).map(|i| f64::from(qkv[r * ld + at + i]) + f64::from(bias[at + i])).collect();
                    let value = head >= heads + kv_heads;
                    if !value {
                        let weights = if head < heads { &norms[..d] } else { &norms[d..] };
                        let square = x.iter().map(|v| v * v).sum::<f64>() / d as f64;
                        let scale = 1.0 / (square + f64::from(eps)).sqrt();
                        x.iter_mut().zip(weights).for_each(|(v, w)| *v *= scale * f64::from(*w));
                        for i in 0..rope / 2 {
                            let angle = row_pos[r] as usize * rope / 2 + i;
                            let (c, s) = (f64::from(cos[angle]), f64::from(sin[angle]));
                            let (a, b) = (x[i], x[i + rope / 2]);
                            (x[i], x[i + rope / 2]) = (a * c - b * s, b * c + a * s);
                        }
                    }
                    for (i, want) in x.iter().enumerate() {
                        let got = if head < heads {
                            got_q[(r * heads + head) * d + i]
                        } else if slots[r] == u32::MAX {
                            continue;
                        } else {
                            let (page, token) = (slots[r] as usize / 32, slots[r] as usize % 32);
                            let group = (head - heads) % kv_heads;
                            got_kv
                                [(((page * kv_heads + group) * 2 + usize::from(value)) * 32 + token) * d + i]
                        };
                        let bound = want.abs() * half.epsilon() * 1.01 + 1e-5;
                        let error = (f64::from(got) - want).abs();
                        assert!(error <= bound, "{kernel}: row {r}, head {head}, {i} is off by {error:e}");
                    }
                }
            }
            let written = got_kv.iter().filter(|v| **v != 0.0).count();
            assert!(written <= 2 * 2 * kv_heads * d, "{kernel}: elements of other tokens are written");
        }
    }
}

#[test]
fn greatest_logits_and_their_sum() {
    for module in modules("logits") {
        let (rows, vocab, ld, k) = (2usize, 5000usize, 5004usize, 5usize);
        let spans = vocab.div_ceil(1024);
        // Few values: many are equal, and the lower index wins.
        let mut random = Random(2);
        let logits: Vec<f32> = (0..rows * ld).map(|_| (random.unit() * 50.0).round() / 4.0).collect();
        let mut memory = Buffers::new();
        let at = memory.add(&float_bytes(&logits));
        let keys = memory.add(&vec![0; rows * spans * k * 8]);
        let sums = memory.add(&vec![0; rows * spans * 8]);
        let indices = memory.add(&vec![0; rows * k * 4]);
        let values = memory.add(&vec![0; rows * k * 4]);
        let sum = memory.add(&vec![0; rows * 4]);
        let params = Params::default()
            .pointers(&[at, keys, sums, indices, values, sum])
            .words(&[rows, vocab, ld, spans, k].map(|v| v as u32));
        let grid = [rows as u32, spans.div_ceil(4) as u32, 1];
        launch(&module, "logits_spans", grid, (128, 0), &params, &mut memory);
        launch(&module, "logits_merge", [rows as u32, 1, 1], (64, 2 * 8 * k as u32), &params, &mut memory);
        for row in 0..rows {
            let logits = &logits[row * ld..][..vocab];
            let mut order: Vec<usize> = (0..vocab).collect();
            order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
            let want: Vec<u32> = order[..k].iter().map(|i| *i as u32).collect();
            assert_eq!(memory.words(indices)[row * k..][..k], want);
            let got = &floats(memory.bytes(values))[row * k..][..k];
            assert!(got.iter().zip(&order).all(|(v, i)| *v == logits[*i]), "values");
            let want = logits.iter().map(|x| f64::from(*x).exp()).sum::<f64>().ln();
            let error = (f64::from(floats(memory.bytes(sum))[row]) - want).abs();
            assert!(error < 1e-5 * want.abs(), "log sum exp is off by {error:e} of {want}");
        }
    }
}
