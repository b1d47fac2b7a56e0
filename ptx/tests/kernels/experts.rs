//! experts_route.cu, experts_sort.cu, experts_rows.cu, experts_gemv.cu.

use super::*;

const NONE: u32 = u32::MAX;

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// Logits of few rows and of many, the choice among them, and its weights.
#[test]
fn routing() {
    for module in modules("experts_route") {
        for half in Half::BOTH {
            for (rows, experts, d, size) in [(3usize, 5usize, 300usize, "few"), (35, 11, 132, "many")] {
                let kernel = format!("experts_logits_{}_{size}", half.name());
                if !has(&module, &kernel) {
                    continue;
                }
                let mut random = Random(rows as u64);
                let (router, gate_w) = (random.floats(experts * d), random.floats(d));
                let bias = random.floats(experts);
                let x: Vec<f32> = random.floats(rows * d).into_iter().map(|v| half.round(v)).collect();
                let mut memory = Buffers::new();
                let at = [&router, &gate_w, &bias].map(|w| memory.add(&float_bytes(w)));
                let at_x = memory.add(&half.bytes(&x));
                let (logits, gate) =
                    (memory.add(&vec![0; rows * experts * 4]), memory.add(&vec![0; rows * 4]));
                let params = Params::default()
                    .pointers(&[at[0], at[1], at_x, logits, gate, at[2]])
                    .words(&[rows, experts, d, d].map(|v| v as u32));
                let products = experts as u32 + 1;
                let (grid, shared) = match size {
                    "few" => ([products, rows.div_ceil(4) as u32, 1], 128),
                    _ => ([products.div_ceil(8), rows.div_ceil(32) as u32, 1], 0),
                };
                launch(&module, &kernel, grid, (256, shared), &params, &mut memory);
                let (got, got_gate) = (floats(memory.bytes(logits)), floats(memory.bytes(gate)));
                for r in 0..rows {
                    for e in 0..=experts {
                        let w = if e < experts { &router[e * d..][..d] } else { &gate_w[..] };
                        let products =
                            || w.iter().zip(&x[r * d..]).map(|(w, x)| f64::from(*w) * f64::from(*x));
                        let b = bias.get(e).map_or(0.0, |&b| f64::from(b));
                        let (want, size) =
                            (b + products().sum::<f64>(), b.abs() + products().map(f64::abs).sum::<f64>());
                        let got = if e < experts { got[r * experts + e] } else { got_gate[r] };
                        let bound = (d as f64 / 32.0 + 14.0) * 2f64.powi(-24) * size;
                        assert!(
                            (f64::from(got) - want).abs() <= bound,
                            "{kernel}: row {r}, expert {e}: {got}, {want}"
                        );
                    }
                }
            }
        }
        for (experts, most) in [(5usize, 128), (128, 128), (200, 256), (600, 1024)] {
            for of_all in [0, 1] {
                let (rows, used, mut random) = (5usize, 4usize, Random(experts as u64));
                // Few values, so that many are equal.
                let logits: Vec<f32> =
                    (0..rows * experts).map(|_| (random.next() % 20) as f32 / 3.0).collect();
                let mut memory = Buffers::new();
                let at = memory.add(&float_bytes(&logits));
                let (ids, weights) =
                    (memory.add(&vec![0; rows * used * 4]), memory.add(&vec![0; rows * used * 4]));
                let params = Params::default().pointers(&[at, ids, weights]).words(&[
                    rows as u32,
                    experts as u32,
                    used as u32,
                    of_all,
                ]);
                let kernel = format!("experts_choose_{most}");
                launch(&module, &kernel, [rows.div_ceil(4) as u32, 1, 1], (128, 0), &params, &mut memory);
                let (ids, weights) = (words(memory.bytes(ids)), floats(memory.bytes(weights)));
                for (r, row) in logits.chunks_exact(experts).enumerate() {
                    let mut order: Vec<usize> = (0..experts).collect();
                    order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
                    let exp = |e: usize| f64::from(row[e] - row[order[0]]).exp();
                    let over = if of_all == 1 { &order[..] } else { &order[..used] };
                    let sum: f64 = over.iter().map(|&e| exp(e)).sum();
                    for j in 0..used {
                        let (id, weight) = (ids[r * used + j] as usize, f64::from(weights[r * used + j]));
                        assert_eq!(id, order[j], "{kernel}: row {r}, choice {j}");
                        let want = exp(id) / sum;
                        assert!(
                            (weight - want).abs() <= 1e-5 * want,
                            "{kernel}: row {r}: {weight} instead of {want}"
                        );
                    }
                }
            }
        }
    }
}

/// Places, rows and groups, with a small block and with a large one; then rows to their places, and sums back.
#[test]
fn sorting() {
    for module in modules("experts_sort") {
        // Choices, experts, tokens; threads, warps that count, log2 of the choices of each.
        for (choices, experts, tokens, threads, warps, chunk_log2) in
            [(90usize, 7usize, 4usize, 128, 3usize, 5), (1000, 40, 16, 1024, 32, 5)]
        {
            let (used, mut random) = (2usize, Random(choices as u64));
            let ids: Vec<u32> = (0..choices).map(|_| random.next() % experts as u32).collect();
            let slots: Vec<u32> =
                (0..experts as u32).map(|e| if e % 3 == 1 { NONE } else { experts as u32 - e }).collect();
            let capacity = experts.min(choices) + choices / tokens;
            let mut memory = Buffers::new();
            let (at_ids, at_slots) = (memory.add_words(&ids), memory.add_words(&slots));
            let [places, rows] = [0; 2].map(|_| memory.add(&vec![0xee; choices * 4]));
            let groups = memory.add(&vec![0xee; capacity * 16]);
            let params = Params::default()
                .pointers(&[at_ids, at_slots, places, rows, groups])
                .words(&[choices, used, experts, tokens, capacity, warps, chunk_log2].map(|v| v as u32));
            let shared = (4 * (4 * experts + 64) + 2 * experts * warps) as u32;
            launch(&module, "experts_sort", [1, 1, 1], (threads, shared), &params, &mut memory);
            let (mut want_places, mut want_rows, mut want_groups) =
                (vec![NONE; choices], Vec::new(), Vec::new());
            for (e, &slot) in slots.iter().enumerate().filter(|(_, slot)| **slot != NONE) {
                let first = want_rows.len();
                for i in (0..choices).filter(|&i| ids[i] == e as u32) {
                    want_places[i] = want_rows.len() as u32;
                    want_rows.push((i / used) as u32);
                }
                for at in (first..want_rows.len()).step_by(tokens) {
                    want_groups.extend([slot, at as u32, (want_rows.len() - at).min(tokens) as u32, 0]);
                }
            }
            want_rows.resize(choices, NONE);
            want_groups.resize(capacity * 4, 0);
            assert_eq!(words(memory.bytes(places)), want_places);
            assert_eq!(words(memory.bytes(rows)), want_rows);
            assert_eq!(words(memory.bytes(groups)), want_groups);
        }
    }
}

#[test]
fn rows_of_experts() {
    for module in modules("experts_rows") {
        let (rows, used, d) = (3usize, 2usize, 1064usize);
        let places = [4, 0, NONE, 2, 1, NONE];
        let rows_of = [0, 2, 1, NONE, 0, NONE];
        let mut random = Random(3);
        let (x, out) = (random.floats(rows * d), random.floats(places.len() * d));
        let (weights, shared, gate) =
            (random.floats(rows * used), random.floats(rows * d), random.floats(rows));
        let mut memory = Buffers::new();
        let (at_rows, at_x) = (memory.add_words(&rows_of), memory.add(&Half::F16.bytes(&x)));
        let xs = memory.add(&vec![0; places.len() * d * 2]);
        let vectors = d as u32 / 8;
        let params =
            Params::default().pointers(&[at_rows, at_x, xs]).words(&[places.len() as u32, vectors, vectors]);
        launch(&module, "experts_gather", [places.len() as u32, 1, 1], (128, 0), &params, &mut memory);
        for (place, &row) in rows_of.iter().enumerate() {
            let from = if row == NONE { vec![0.0; d] } else { x[row as usize * d..][..d].to_vec() };
            assert_eq!(memory.bytes(xs)[place * d * 2..][..d * 2], Half::F16.bytes(&from), "place {place}");
        }
        let at = [&out, &weights, &gate].map(|v| memory.add(&float_bytes(v)));
        let (at_places, delta) = (memory.add_words(&places), memory.add(&float_bytes(&shared)));
        let params = Params::default()
            .pointers(&[at[0], at_places, at[1], delta, at[2], delta])
            .words(&[rows, used, d].map(|v| v as u32));
        launch(
            &module,
            "experts_combine",
            [rows as u32, d.div_ceil(1024) as u32, 1],
            (256, 0),
            &params,
            &mut memory,
        );
        for (i, got) in floats(memory.bytes(delta)).into_iter().enumerate() {
            let (row, column) = (i / d, i % d);
            let mut want = f64::from(shared[i]) / (1.0 + (-f64::from(gate[row])).exp());
            for j in (row * used..(row + 1) * used).filter(|&j| places[j] != NONE) {
                want += f64::from(weights[j]) * f64::from(out[places[j] as usize * d + column]);
            }
            assert!(
                (f64::from(got) - want).abs() <= 4e-6,
                "row {row}, column {column}: {got} instead of {want}"
            );
        }
    }
}

/// Groups of one to four rows, each by its expert's matrix; the last group has none.
#[test]
fn grouped_gemv() {
    for module in modules("experts_gemv") {
        for half in Half::BOTH {
            let kernel = format!("experts_gemv_{}_m4", half.name());
            if !has(&module, &kernel) {
                continue;
            }
            let (n, k, slots) = (19usize, 264usize, 3usize);
            let groups = [[2u32, 0, 3, 0], [0, 3, 4, 0], [1, 7, 1, 0], [0, 0, 0, 0]];
            let mut random = Random(9);
            let mut rounded = |n| random.floats(n).into_iter().map(|v| half.round(v)).collect::<Vec<f32>>();
            let (w, x) = (rounded(slots * n * k), rounded(8 * k));
            let mut memory = Buffers::new();
            let (at_w, at_x) = (memory.add(&half.bytes(&w)), memory.add(&half.bytes(&x)));
            let (y, list) = (memory.add(&vec![0; 8 * n * 4]), memory.add_words(&groups.concat()));
            let params = Params::default()
                .pointers(&[at_w, at_x, 0, y, 0, 0])
                .words(&[8, n, k, k, n, 0, 0, 0, 512].map(|v| v as u32))
                .pointers(&[list, (n * k * 2) as u64]);
            let grid = [(n as u32).div_ceil(2).div_ceil(8), groups.len() as u32, 1];
            launch(&module, &kernel, grid, (256, 256), &params, &mut memory);
            let y = floats(memory.bytes(y));
            for [slot, first, count, _] in groups {
                for place in first as usize..(first + count) as usize {
                    for row in 0..n {
                        let w = &w[(slot as usize * n + row) * k..][..k];
                        let products =
                            || w.iter().zip(&x[place * k..]).map(|(w, x)| f64::from(*w) * f64::from(*x));
                        let (want, size) = (products().sum::<f64>(), products().map(f64::abs).sum::<f64>());
                        let error = (f64::from(y[place * n + row]) - want).abs();
                        let bound = (k as f64 / 4.0 + 16.0) * 2f64.powi(-24) * (size + 1.0);
                        assert!(
                            error <= bound,
                            "{kernel}: place {place}, row {row} is off by {error:e} of {want}"
                        );
                    }
                }
            }
        }
    }
}
