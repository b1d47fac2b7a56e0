//! norm.cu, activation.cu.

use super::*;

#[test]
fn norms() {
    for module in modules("norm") {
        for half in Half::BOTH {
            for (d, layer) in [(256usize, false), (1536, false), (320, true), (2048, true)] {
                let (shape, block, rows_a_block) = match d {
                    _ if d <= 1024 => ("warp", 128, 4),
                    _ => ("block2", (d as u32 / 8).next_multiple_of(32), 1),
                };
                let kind = if layer { "layer" } else { "rms" };
                let kernel = format!("norm_{kind}_{}_{shape}", half.name());
                if !has(&module, &kernel) {
                    continue;
                }
                let rows = 5usize;
                let mut random = Random(d as u64);
                let (hidden, delta) = (random.floats(rows * d), random.floats(rows * d));
                let (w, b) = (random.floats(d), random.floats(d));
                let mut memory = Buffers::new();
                let mut add = |v: &[f32]| memory.add(&float_bytes(v));
                let (at_hidden, at_delta, at_w, at_b) = (add(&hidden), add(&delta), add(&w), add(&b));
                let sum = add(&vec![0.0; rows * d]);
                let x = memory.add(&vec![0; rows * d * 2]);
                let eps = 1e-5f32;
                let params = Params::default()
                    .pointers(&[at_hidden, at_delta, 0, 0, at_w, if layer { at_b } else { 0 }, sum, x, 0])
                    .words(&[rows as u32, d as u32, d as u32, d as u32])
                    .float(eps)
                    .float(0.0);
                let grid = [(rows as u32).div_ceil(rows_a_block), 1, 1];
                launch(&module, &kernel, grid, (block, 128), &params, &mut memory);
                let sums = floats(memory.bytes(sum));
                let got = half.values(memory.bytes(x));
                for r in 0..rows {
                    let row: Vec<f64> =
                        (0..d).map(|i| f64::from(hidden[r * d + i]) + f64::from(delta[r * d + i])).collect();
                    let mean = if layer { row.iter().sum::<f64>() / d as f64 } else { 0.0 };
                    let square = row.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / d as f64;
                    let scale = 1.0 / (square + f64::from(eps)).sqrt();
                    for i in 0..d {
                        let at = r * d + i;
                        assert_eq!(sums[at], hidden[at] + delta[at], "{kernel}: sum");
                        let bias = if layer { f64::from(b[i]) } else { 0.0 };
                        let want = (row[i] - mean) * scale * f64::from(w[i]) + bias;
                        let bound = want.abs() * half.epsilon() * 1.01 + 2e-5;
                        let error = (f64::from(got[at]) - want).abs();
                        assert!(error <= bound, "{kernel}: x[{r}][{i}] is off by {error:e}");
                    }
                }
            }
        }
    }
}

#[test]
fn activations() {
    for module in modules("activation") {
        for half in Half::BOTH {
            for kind in ["swiglu", "clamped_swiglu", "geglu", "relu"] {
                let kernel = format!("activation_{kind}_{}", half.name());
                if !has(&module, &kernel) {
                    continue;
                }
                let (rows, n) = (3usize, 1100usize);
                let mut random = Random(3);
                let gate: Vec<f32> = random.floats(rows * n).iter().map(|v| v * 6.0).collect();
                let up = random.floats(rows * n);
                let bias = random.floats(n);
                let mut memory = Buffers::new();
                let mut add = |v: &[f32]| memory.add(&float_bytes(v));
                let (at_gate, at_up, at_bias) = (add(&gate), add(&up), add(&bias));
                let out = memory.add(&vec![0; rows * n * 2]);
                let sizes = [rows as u32, n as u32, n as u32, n as u32, n as u32];
                let params = Params::default().pointers(&[at_gate, at_up, at_bias, 0, out]).words(&sizes);
                let grid = [rows as u32, (n as u32).div_ceil(1024), 1];
                launch(&module, &kernel, grid, (256, 0), &params, &mut memory);
                for (at, got) in half.values(memory.bytes(out)).iter().enumerate() {
                    let g = f64::from(gate[at]) + f64::from(bias[at % n]);
                    let u = f64::from(up[at]);
                    let want = match kind {
                        "swiglu" => g / (1.0 + (-g).exp()) * u,
                        "clamped_swiglu" => {
                            let g = g.min(7.0);
                            g / (1.0 + (-1.702 * g).exp()) * (u.clamp(-7.0, 7.0) + 1.0)
                        }
                        "geglu" => {
                            0.5 * g
                                * (1.0 + ((g + 0.044715 * g * g * g) * 0.797_884_560_802_865_4).tanh())
                                * u
                        }
                        _ => g.max(0.0),
                    };
                    let bound = want.abs() * half.epsilon() * 1.01 + 1e-5 * (1.0 + g.abs());
                    let error = (f64::from(*got) - want).abs();
                    assert!(error <= bound, "{kernel}: {at} is off by {error:e} of {want}");
                }
            }
        }
    }
}
