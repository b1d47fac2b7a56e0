//! Products with dense weights: gemv.cu, linear_dense.cu, gemm.cu.

use super::*;

/// Operands of y[m][n] = sum_k x[m][k] w[n][k] + bias[n], rounded to the format, and where they are.
struct Product {
    half: Half,
    m: usize,
    n: usize,
    k: usize,
    w: Vec<f32>,
    x: Vec<f32>,
    bias: Vec<f32>,
    memory: Buffers,
    at: [u64; 4],
}

impl Product {
    fn new(half: Half, m: usize, n: usize, k: usize) -> Product {
        let mut random = Random((m * n + k) as u64);
        let mut rounded = |n| random.floats(n).into_iter().map(|v| half.round(v)).collect::<Vec<f32>>();
        let (w, x) = (rounded(n * k), rounded(m * k));
        let bias = random.floats(n);
        let mut memory = Buffers::new();
        let at = [
            memory.add(&half.bytes(&w)),
            memory.add(&half.bytes(&x)),
            memory.add(&float_bytes(&bias)),
            memory.add(&vec![0; m * n * 4]),
        ];
        Product { half, m, n, k, w, x, bias, memory, at }
    }

    fn sum(&self, row: usize, col: usize) -> (f64, f64) {
        let (x, w) = (&self.x[row * self.k..][..self.k], &self.w[col * self.k..][..self.k]);
        let products = || x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w));
        (products().sum::<f64>() + f64::from(self.bias[col]), products().map(f64::abs).sum())
    }

    /// Sums in f32 of k exact products, in any order.
    fn check(&self, kernel: &str) {
        let y = floats(self.memory.bytes(self.at[3]));
        for row in 0..self.m {
            for col in 0..self.n {
                let (want, magnitude) = self.sum(row, col);
                let error = (f64::from(y[row * self.n + col]) - want).abs();
                let bound = (self.k as f64 / 4.0 + 16.0) * 2f64.powi(-24) * (magnitude + 1.0);
                assert!(error <= bound, "{kernel}: y[{row}][{col}] is off by {error:e} of {want}");
            }
        }
    }

    /// The same with LINEAR_SWIGLU: rows of w are interleaved by 8, results are of the format.
    fn check_gated(&self, kernel: &str) {
        let y = self.half.values(self.memory.bytes(self.at[3]));
        for row in 0..self.m {
            for i in 0..self.n / 2 {
                let gate = i / 8 * 16 + i % 8;
                let ((g, _), (u, _)) = (self.sum(row, gate), self.sum(row, gate + 8));
                let want = g / (1.0 + (-g).exp()) * u;
                let error = (f64::from(y[row * self.n / 2 + i]) - want).abs();
                let bound = want.abs() * self.half.epsilon() * 1.01 + 1e-4 * (1.0 + g.abs() + u.abs());
                assert!(error <= bound, "{kernel}: y[{row}][{i}] is off by {error:e} of {want}");
            }
        }
    }

    fn linear(&self, splits: [u64; 2], epilogue: u32, rest: [u32; 3]) -> Params {
        let [w, x, bias, y] = self.at;
        let ldy = if epilogue == 0 { self.n } else { self.n / 2 };
        Params::default()
            .pointers(&[w, x, bias, y, splits[0], splits[1]])
            .words(&[self.m, self.n, self.k, self.k, ldy].map(|v| v as u32))
            .word(epilogue)
            .words(&rest)
    }
}

#[test]
fn gemv() {
    for module in modules("gemv") {
        for half in Half::BOTH {
            for (m, k_warps_log2, epilogue) in [(1, 0, 0), (2, 2, 0), (3, 3, 2), (4, 1, 0)] {
                let kernel = format!("gemv_{}_m{m}", half.name());
                if !has(&module, &kernel) {
                    continue;
                }
                let mut product = Product::new(half, m, 48, 1288);
                let k_split = (1288u32 >> k_warps_log2).next_multiple_of(256);
                let params = product.linear([0, 0], epilogue, [k_warps_log2, 0, k_split]);
                let grid = [24u32.div_ceil(8 >> k_warps_log2), 1, 1];
                launch(&module, &kernel, grid, (256, 64 * m as u32), &params, &mut product.memory);
                if epilogue == 0 { product.check(&kernel) } else { product.check_gated(&kernel) }
            }
        }
    }
}

#[test]
fn linear_dense() {
    for module in modules("linear_dense") {
        for half in Half::BOTH {
            for (m, bn, tm, stages, splits, epilogue) in [
                (7, 64, 8, 4, 1, 0u32),
                (13, 64, 16, 2, 2, 0),
                (30, 128, 32, 3, 1, 2),
                (45, 128, 64, 2, 2, 0),
                (130, 128, 128, 2, 1, 0),
            ] {
                let kernel = format!("linear_dense_{}_n{tm}", half.name());
                if !has(&module, &kernel) {
                    continue;
                }
                let mut product = Product::new(half, m, 144, 328);
                let (tokens, rows) = ((m as u32).div_ceil(tm), 144u32.div_ceil(bn));
                let tiles = (tokens * rows) as usize;
                let partials = product.memory.add(&vec![0; tiles * splits * (bn * tm) as usize * 4]);
                let counters = product.memory.add_words(&vec![0; tiles]);
                let k_split = 328u32.div_ceil(splits as u32).next_multiple_of(64);
                let params = product.linear([partials, counters], epilogue, [0, stages, k_split]);
                let grid = [tokens, rows, splits as u32];
                let shared = stages * (bn + tm) * 128;
                launch(&module, &kernel, grid, (256, shared), &params, &mut product.memory);
                if epilogue == 0 {
                    product.check(&kernel)
                } else {
                    product.check_gated(&kernel)
                }
                assert!(product.memory.words(counters).iter().all(|c| *c == 0), "{kernel}: counters");
            }
        }
    }
}

/// Groups of an expert's places: a full one, one that is not, and one of none.
#[test]
fn grouped() {
    for module in modules("experts_dense") {
        for half in Half::BOTH {
            for (bn, tm, stages, epilogue) in
                [(64u32, 8u32, 4u32, 0u32), (64, 16, 2, 0), (128, 32, 3, 2), (128, 64, 2, 0)]
            {
                let kernel = format!("experts_dense_{}_n{tm}", half.name());
                if !has(&module, &kernel) {
                    continue;
                }
                let mut product = Product::new(half, tm as usize + 3, 144, 328);
                let groups = product.memory.add_words(&[[0, 3, tm, 0], [0, 0, 3, 0], [0; 4]].concat());
                // What is not used may be anything.
                let params = product.linear([1, 1], epilogue, [0, stages, 384]).pointers(&[groups, 16]);
                let shared = stages * (bn + tm) * 128;
                launch(
                    &module,
                    &kernel,
                    [144u32.div_ceil(bn), 3, 1],
                    (256, shared),
                    &params,
                    &mut product.memory,
                );
                if epilogue == 0 { product.check(&kernel) } else { product.check_gated(&kernel) }
            }
        }
    }
}

#[test]
fn gemm() {
    for module in modules("gemm") {
        for (half, tile, stages, splits) in [
            (Half::F16, "f16_128x128", 3, 1),
            (Half::F16, "f16_128x64", 3, 2),
            (Half::Bf16, "bf16_128x128", 3, 2),
            (Half::Bf16, "bf16_128x64", 3, 1),
            (Half::F16, "f16_128x128_sync", 2, 2),
            (Half::F16, "f16_128x64_sync", 2, 1),
        ] {
            let kernel = format!("gemm_{tile}");
            if !has(&module, &kernel) {
                continue;
            }
            let tokens = if tile.contains("128x64") { 64u32 } else { 128 };
            let (m, n, k) = (150usize, 136usize, 200usize);
            let mut product = Product::new(half, m, n, k);
            let [w, x, bias, y] = product.at;
            let tiles = (m as u32).div_ceil(tokens) * (n as u32).div_ceil(128);
            let size = (tiles * splits * 128 * tokens * 4) as usize;
            let partial = product.memory.add(&vec![0; size]);
            let arrived = product.memory.add_words(&vec![0; tiles as usize]);
            let k_per_split = (k as u32).div_ceil(splits).next_multiple_of(32);
            let params = Params::default()
                .pointers(&[bias, y, n as u64])
                .words(&[m as u32, n as u32, 0, 0])
                .pointers(&[partial, arrived])
                .words(&[splits, k_per_split])
                .pointers(&[w, x, k as u64])
                .words(&[k as u32, 0]);
            let shared = stages * (128 + tokens) * 64;
            launch(&module, &kernel, [tiles, splits, 1], (128, shared), &params, &mut product.memory);
            product.check(&kernel);
        }
    }
}

/// Fewer blocks than work items, operands by tensor maps.
#[test]
fn gemm_sm90a() {
    for module in modules("gemm_sm90a") {
        for (half, tokens, stages, splits) in [
            (Half::F16, 256u32, 4u32, 1u32),
            (Half::Bf16, 256, 4, 2),
            (Half::F16, 128, 6, 2),
            (Half::Bf16, 128, 6, 1),
        ] {
            let kernel = format!("gemm_{}_128x{tokens}_sm90a", half.name());
            let (m, n, k) = (270usize, 136usize, 456usize);
            let mut product = Product::new(half, m, n, k);
            let [w, x, bias, y] = product.at;
            let tiles = (m as u32).div_ceil(tokens) * (n as u32).div_ceil(128);
            let partial = product.memory.add(&vec![0; (tiles * splits * 128 * tokens * 4) as usize]);
            let arrived = product.memory.add_words(&vec![0; tiles as usize]);
            let map = |address, rows: usize, box_rows| {
                let (rows, k) = (rows as u64, k as u64);
                TensorMap { address, rows, cols: k, stride: k, box_rows, box_cols: 64 }.encode()
            };
            let k_per_split = (k as u32).div_ceil(splits).next_multiple_of(64);
            let params = Params::default()
                .raw(&map(w, n, 128))
                .raw(&map(x, m, tokens))
                .pointers(&[bias, y, n as u64])
                .words(&[m as u32, n as u32, 0, 0])
                .pointers(&[partial, arrived])
                .words(&[splits, k_per_split, k as u32, 0])
                .align(128);
            let shared = stages * ((128 + tokens) * 128 + 16) + 16;
            launch(&module, &kernel, [3, 1, 1], (384, shared), &params, &mut product.memory);
            product.check(&kernel);
        }
    }
}
