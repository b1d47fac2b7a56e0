//! attention_decode.cu, attention_prefill.cu.

use super::*;

const PAGE: usize = 32;

/// Two rows of 6 heads in 2 groups over paged keys and values; the second row in two splits. `out` and counters. With and without sinks.
#[test]
fn decode() {
    for module in modules("attention_decode") {
        for (half, d, stages) in [(Half::F16, 64usize, 4u32), (Half::Bf16, 128, 3), (Half::F16, 80, 4)] {
            let kernel = format!("decode_attention_{}_d{d}", half.name());
            if !has(&module, &kernel) {
                continue;
            }
            let (heads, kv_heads, tokens) = (6usize, 2usize, [37usize, 150]);
            let n_pages = 8;
            let mut random = Random(d as u64);
            let mut rounded =
                |n: usize| -> Vec<f32> { random.floats(n).into_iter().map(|v| half.round(v)).collect() };
            let q = rounded(2 * heads * d);
            // [page][kv_head][K, V][32][d]
            let kv = rounded(n_pages * kv_heads * 2 * PAGE * d);
            // Pages of the two sequences, shuffled.
            let table = [5u32, 2, 7, 0, 3, 1, 6];
            let pages_of = [0usize, 2];
            let mut memory = Buffers::new();
            let (at_q, at_kv) = (memory.add(&half.bytes(&q)), memory.add(&half.bytes(&kv)));
            let at_table = memory.add_words(&table);
            // row, pages, begin, end, split, n_splits, workspace, partial
            let last = u32::MAX;
            let items = [
                [0, 0, 0, tokens[0] as u32, 0, 1, 0, last],
                [1, 2, 0, 64, 0, 2, 0, last],
                [1, 2, 64, tokens[1] as u32, 1, 2, 0, last],
            ];
            let at_items = memory.add_words(items.as_flattened());
            let n_items = memory.add_words(&[3]);
            let out = memory.add(&vec![0; 2 * heads * d * 2]);
            let split_ms = memory.add(&vec![0; 2 * heads * 2 * 4]);
            let split_o = memory.add(&vec![0; 2 * heads * d * 4]);
            let counters = memory.add_words(&[0; 4]);
            let sinks =
                (d > 64).then(|| random.floats(heads).into_iter().map(|v| 4.0 * v).collect::<Vec<_>>());
            let at_sinks = sinks.as_ref().map_or(0, |sinks| memory.add(&float_bytes(sinks)));
            let scale = 1.0 / (d as f32).sqrt();
            let params = Params::default()
                .pointers(&[at_q, at_kv, at_table, at_items, n_items, out, 0, 0, 0])
                .pointers(&[split_ms, split_o, counters, at_sinks])
                .words(&[heads as u32, kv_heads as u32, u32::from(half == Half::Bf16)])
                .float(scale * std::f32::consts::LOG2_E)
                .float(0.0)
                .float(0.0);
            let shared = 4 * stages * 16 * d as u32 * 2;
            launch(&module, &kernel, [4, 1, 1], (128, shared), &params, &mut memory);
            assert_eq!(memory.words(counters), [0; 4], "{kernel}: counters");
            let got = half.values(memory.bytes(out));
            for row in 0..2 {
                for head in 0..heads {
                    let at = |token: usize, half: usize| {
                        let page = table[pages_of[row] + token / PAGE] as usize;
                        let group = head / (heads / kv_heads);
                        &kv[(((page * kv_heads + group) * 2 + half) * PAGE + token % PAGE) * d..][..d]
                    };
                    let q = &q[(row * heads + head) * d..][..d];
                    let score = |t: usize| {
                        let dot: f64 =
                            q.iter().zip(at(t, 0)).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                        (dot * f64::from(scale)).exp()
                    };
                    let weights: Vec<f64> = (0..tokens[row]).map(score).collect();
                    let sink = sinks.as_ref().map_or(0.0, |sinks| f64::from(sinks[head]).exp());
                    let total = weights.iter().sum::<f64>() + sink;
                    for i in 0..d {
                        let sum: f64 =
                            weights.iter().enumerate().map(|(t, w)| w * f64::from(at(t, 1)[i])).sum();
                        let want = sum / total;
                        // Weights are rounded to the format, and the result is.
                        let bound = 3.0 * half.epsilon();
                        let error = (f64::from(got[(row * heads + head) * d + i]) - want).abs();
                        assert!(error <= bound, "{kernel}: row {row}, head {head}, {i} is off by {error:e}");
                    }
                }
            }
        }
    }
}

#[test]
fn prefill() {
    prefill_with("attention_prefill", "");
    prefill_with("attention_prefill_sm90a", "_sm90a");
}

/// Rows 40.. of a prompt of 110 tokens in tiles of 64 queries: each row sees the tokens up to its own, with a window
/// the last of them, and sinks.
fn prefill_with(file: &str, suffix: &str) {
    for module in modules(file) {
        for (half, d, window) in
            [(Half::F16, 64usize, 0usize), (Half::Bf16, 128, 50), (Half::F16, 128, 0), (Half::F16, 256, 33)]
        {
            let kernel = format!("prefill_attention_{}_d{d}{suffix}", half.name());
            if !has(&module, &kernel) {
                continue;
            }
            let (heads, kv_heads, first, rows) = (2usize, 1usize, 40usize, 70usize);
            let mut random = Random(d as u64 + 7);
            let mut rounded =
                |n: usize| -> Vec<f32> { random.floats(n).into_iter().map(|v| half.round(v)).collect() };
            let (q, kv) = (rounded(rows * heads * d), rounded(4 * kv_heads * 2 * PAGE * d));
            let table = [2u32, 0, 3, 1];
            let mut memory = Buffers::new();
            let (at_q, at_kv) = (memory.add(&half.bytes(&q)), memory.add(&half.bytes(&kv)));
            let at_table = memory.add_words(&table);
            // row0, n_rows, first_pos, pages, begin, end, partial, reserved
            let begin =
                |row: usize| (if window == 0 { 0 } else { (first + row + 1).saturating_sub(window) }) as u32;
            let (last, end) = (u32::MAX, (first + rows) as u32);
            let items = [
                [64, 6, first as u32 + 64, 0, begin(64), end, last, 0],
                [0, 64, first as u32, 0, begin(0), first as u32 + 64, last, 0],
            ];
            let at_items = memory.add_words(items.as_flattened());
            let n_items = memory.add_words(&[2]);
            let out = memory.add(&vec![0; rows * heads * d * 2]);
            let sinks =
                (window > 0).then(|| random.floats(heads).into_iter().map(|v| 4.0 * v).collect::<Vec<_>>());
            let at_sinks = sinks.as_ref().map_or(0, |sinks| memory.add(&float_bytes(sinks)));
            let scale = 1.0 / (d as f32).sqrt();
            let mut params = Params::default()
                .pointers(&[at_q, at_kv, at_table, at_items, n_items, out, 0, 0, 0, at_sinks])
                .words(&[heads as u32, kv_heads as u32, u32::from(half == Half::Bf16), window as u32])
                .float(scale * std::f32::consts::LOG2_E)
                .float(0.0)
                .float(0.0);
            let keys = if d <= 128 { 64 } else { 32 };
            let stages = match d {
                _ if d <= 96 => 4,
                _ if d <= 128 || module.target() != "sm_75" => 3,
                _ => 2,
            };
            let queries = if d <= 128 { 0 } else { 64 * d * 2 };
            let mut shape = (128, (queries + stages * keys * d * 2) as u32);
            if suffix == "_sm90a" {
                let (rows, d64) = (4 * kv_heads as u64 * 2 * PAGE as u64, d as u64);
                let map =
                    TensorMap { address: at_kv, rows, cols: d64, stride: d64, box_rows: 32, box_cols: 64 };
                params = params.align(128).raw(&map.encode());
                let tokens = 128 + 4 * if d <= 128 { 128 } else { 64 };
                shape = (384, (tokens * d * 2 + 4 * 16) as u32);
            }
            launch(&module, &kernel, [2 * heads as u32, 1, 1], shape, &params, &mut memory);
            let got = half.values(memory.bytes(out));
            let at = |token: usize, half: usize| {
                &kv[((table[token / PAGE] as usize * 2 + half) * PAGE + token % PAGE) * d..][..d]
            };
            for row in 0..rows {
                for head in 0..heads {
                    let q = &q[(row * heads + head) * d..][..d];
                    let seen = begin(row) as usize..first + row + 1;
                    let score = |t: usize| {
                        let dot: f64 =
                            q.iter().zip(at(t, 0)).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                        (dot * f64::from(scale)).exp()
                    };
                    let weights: Vec<(usize, f64)> = seen.map(|t| (t, score(t))).collect();
                    let sink = sinks.as_ref().map_or(0.0, |sinks| f64::from(sinks[head]).exp());
                    let total = weights.iter().map(|(_, w)| w).sum::<f64>() + sink;
                    for i in 0..d {
                        let want =
                            weights.iter().map(|(t, w)| w * f64::from(at(*t, 1)[i])).sum::<f64>() / total;
                        let error = (f64::from(got[(row * heads + head) * d + i]) - want).abs();
                        let bound = 3.0 * half.epsilon();
                        assert!(error <= bound, "{kernel}: row {row}, head {head}, {i} is off by {error:e}");
                    }
                }
            }
        }
    }
}
