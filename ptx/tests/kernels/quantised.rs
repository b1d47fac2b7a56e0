//! Products with quantised weights: gemv_quant.cu, linear_quant.cu, and dequantised rows: dequant.cu. Weights are packed as the
//! header of quant_tile.cuh says.

use super::*;

/// What stands for a block's values besides its codes.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Scales {
    Scale,
    ScaleMin,
    SuperMin,
    SuperSigned,
    /// Powers of two; codes are doubled E2M1 numbers.
    Power,
}

#[derive(Debug, Clone, Copy)]
struct Format {
    name: &'static str,
    bits: u32,
    /// Subtracted from a code.
    offset: i32,
    scales: Scales,
    /// Row tiles of a warp in linear_quant, up to 32 tokens and with 64.
    row_tiles: [u32; 2],
}

const FORMATS: [Format; 9] = [
    Format { name: "mxfp4", bits: 4, offset: 0, scales: Scales::Power, row_tiles: [4, 2] },
    Format { name: "q4_0", bits: 4, offset: 8, scales: Scales::Scale, row_tiles: [4, 2] },
    Format { name: "q4_1", bits: 4, offset: 0, scales: Scales::ScaleMin, row_tiles: [4, 2] },
    Format { name: "q4_k", bits: 4, offset: 0, scales: Scales::SuperMin, row_tiles: [4, 2] },
    Format { name: "q5_0", bits: 5, offset: 16, scales: Scales::Scale, row_tiles: [4, 2] },
    Format { name: "q5_1", bits: 5, offset: 0, scales: Scales::ScaleMin, row_tiles: [4, 2] },
    Format { name: "q5_k", bits: 5, offset: 0, scales: Scales::SuperMin, row_tiles: [4, 2] },
    Format { name: "q6_k", bits: 6, offset: 32, scales: Scales::SuperSigned, row_tiles: [2, 2] },
    Format { name: "q8_0", bits: 8, offset: 0, scales: Scales::Scale, row_tiles: [2, 2] },
];

impl Format {
    fn is_k(self) -> bool {
        matches!(self.scales, Scales::SuperMin | Scales::SuperSigned)
    }
    fn low(self) -> usize {
        if self.bits == 8 { 1024 } else { 512 }
    }
    fn high(self) -> usize {
        [0, 128, 256][(self.bits as usize - 4) % 4]
    }
    fn body(self) -> usize {
        self.low() + self.high() + if self.scales == Scales::ScaleMin { 128 } else { 64 }
    }
    /// Of four tiles.
    fn super_scales(self) -> usize {
        match self.scales {
            Scales::SuperMin => 64,
            Scales::SuperSigned => 32,
            _ => 0,
        }
    }
    /// Sets the bits of the code at (row, column) of a tile.
    fn put_code(self, tile: &mut [u8], row: usize, col: usize, code: u32) {
        let (step, within) = (col / 16, col % 16);
        let lane = row % 8 * 4 + within % 8 / 2;
        let (j, second) = (row / 8 + 2 * (within / 8), within % 2);
        if self.bits == 8 {
            // [half][lane][step % 2][2] words; a0 and a2 in bytes 0 and 2, a1 and a3 in 1 and 3.
            let word = ((step / 2 * 32 + lane) * 2 + step % 2) * 2 + j / 2;
            tile[word * 4 + j % 2 + 2 * second] = code as u8;
            return;
        }
        let mut or = |at: usize, bits: u32| {
            for (i, byte) in bits.to_le_bytes().iter().enumerate() {
                tile[at + i] |= byte;
            }
        };
        or((lane * 4 + step) * 4, (code & 15) << (4 * j + 16 * second));
        if self.bits == 5 {
            or(512 + lane * 4, (code >> 4) << (4 * step + j + 16 * second));
        }
        if self.bits == 6 {
            let pair = 4 * (step % 2) + j;
            or(512 + (lane * 2 + step / 2) * 4, (code >> 4) << (2 * pair + 16 * second));
        }
    }
}

/// Packed weights, and their values: exact in f64.
struct Weights {
    packed: Vec<u8>,
    values: Vec<f64>,
}

impl Weights {
    /// n a multiple of 16, k of 64 (of 256 for the K formats).
    fn new(format: Format, n: usize, k: usize) -> Weights {
        let mut random = Random(u64::from(format.bits) + n as u64);
        let group = if format.is_k() { 4 } else { 1 };
        let group_bytes = group * format.body() + format.super_scales();
        let k_tiles = k / 64;
        let mut packed = vec![0; n / 16 * (k_tiles / group) * group_bytes];
        let mut values = vec![0.0; n * k];
        for row in 0..n {
            for tile in 0..k_tiles {
                let first = (row / 16 * (k_tiles / group) + tile / group) * group_bytes;
                let (g, r) = (row % 8, row % 16 / 8);
                let at_scales = first + tile % group * format.body() + format.low() + format.high();
                let at_super = first + group * format.body();
                let bits = f16::from_f32(random.unit()).to_bits();
                let small = f16::from_f32(random.unit() / 64.0).to_bits();
                // Super-scales of a row: the first of the four tiles decides.
                let mut super_scale = |place: usize| -> f64 {
                    let at = at_super + place * 2;
                    if tile % group == 0 {
                        packed[at..at + 2].copy_from_slice(&(small ^ place as u16 & 3).to_le_bytes());
                    }
                    f16::from_le_bytes([packed[at], packed[at + 1]]).to_f64()
                };
                let [d, d_min] = match format.scales {
                    Scales::SuperMin => [super_scale(4 * g + 2 * r), super_scale(4 * g + 2 * r + 1)],
                    Scales::SuperSigned => [super_scale(2 * g + r), 0.0],
                    _ => [0.0; 2],
                };
                for col in 0..64 {
                    let (block, step) = (col / 32, col / 16);
                    let mut half_at = |at: usize| {
                        let bits = bits.wrapping_add(8 * block as u16);
                        packed[at..at + 2].copy_from_slice(&bits.to_le_bytes());
                        f16::from_bits(bits).to_f64()
                    };
                    let (scale, min) = match format.scales {
                        Scales::Scale => (half_at(at_scales + 8 * g + 4 * r + 2 * block), 0.0),
                        Scales::Power => {
                            let at = at_scales + 8 * g + 4 * r + 2 * block;
                            let exponent = (row * 5 + tile * 3 + block) % 9;
                            packed[at..at + 2]
                                .copy_from_slice(&(((120 + exponent) << 7) as u16).to_le_bytes());
                            (2f64.powi(exponent as i32 - 7), 0.0)
                        }
                        Scales::ScaleMin => {
                            let at = at_scales + 16 * g + 8 * r + 4 * block;
                            (half_at(at), half_at(at + 2))
                        }
                        Scales::SuperMin => {
                            let at = at_scales + 8 * g + 4 * r + 2 * block;
                            let (sc, m) =
                                ((row * 7 + tile + block) as u8 % 64, (row + tile * 3 + block) as u8 % 64);
                            (packed[at], packed[at + 1]) = (sc, m);
                            (d * f64::from(sc), -d_min * f64::from(m))
                        }
                        Scales::SuperSigned => {
                            let sc = ((row * 11 + tile * 5 + step * 37) % 256) as u8 as i8;
                            packed[at_scales + 8 * g + 4 * r + step] = (i16::from(sc) + 128) as u8;
                            (d * f64::from(sc), 0.0)
                        }
                    };
                    let code = random.next() >> 7 & ((1 << format.bits) - 1);
                    let at_tile = first + tile % group * format.body();
                    format.put_code(&mut packed[at_tile..][..format.body()], row % 16, col, code);
                    let number = match format.scales {
                        Scales::Power => {
                            let size = [0, 1, 2, 3, 4, 6, 8, 12][code as usize % 8];
                            if code < 8 { size } else { -size }
                        }
                        _ if format.bits == 8 => i32::from(code as u8 as i8),
                        _ => code as i32,
                    };
                    values[row * k + tile * 64 + col] = scale * f64::from(number - format.offset) + min;
                }
            }
        }
        Weights { packed, values }
    }
}

struct Product {
    weights: Weights,
    m: usize,
    n: usize,
    k: usize,
    x: Vec<f32>,
}

impl Product {
    fn new(format: Format, half: Half, m: usize, n: usize, k: usize) -> Product {
        let x = Random(m as u64).floats(m * k).into_iter().map(|v| half.round(v)).collect();
        Product { weights: Weights::new(format, n, k), m, n, k, x }
    }

    /// `splits` of k, each of `k_split` columns; the workspace is large enough for every tile. With groups: all of slot 1.
    fn run(
        &self,
        module: &Module,
        kernel: &str,
        half: Half,
        grid: [u32; 3],
        shared: u32,
        (stages, k_split): (u32, u32),
        groups: Option<&[[u32; 4]]>,
    ) {
        let Product { weights, m, n, k, x } = self;
        let mut memory = Buffers::new();
        // Of experts, the matrix of slot 1; of slot 0, codes and scales of zero.
        let other = vec![0; groups.map_or(0, |_| weights.packed.len())];
        let w = memory.add(&[other, weights.packed.clone()].concat());
        let at_x = memory.add(&half.bytes(x));
        let y = memory.add(&vec![0; m * n * 4]);
        let partials = memory.add(&vec![0; 1 << 20]);
        let counters = memory.add_words(&[0; 64]);
        let params = Params::default()
            .pointers(&[w, at_x, 0, y, partials, counters])
            .words(&[*m, *n, *k, *k, *n].map(|v| v as u32))
            .words(&[0, 0, 0, k_split])
            .align(8)
            .word(stages);
        let params = match groups {
            None => params,
            Some(list) => {
                let list = memory.add_words(&list.concat());
                params.pointers(&[list, weights.packed.len() as u64])
            }
        };
        launch(module, kernel, grid, (256, shared), &params, &mut memory);
        assert!(memory.words(counters).iter().all(|c| *c == 0), "{kernel}: counters");
        let y = floats(memory.bytes(y));
        for row in 0..*m {
            for col in 0..*n {
                let products = || {
                    let x = x[row * k..][..*k].iter();
                    x.zip(&weights.values[col * k..][..*k]).map(|(x, w)| f64::from(*x) * w)
                };
                let (want, magnitude) = (products().sum::<f64>(), products().map(f64::abs).sum::<f64>());
                let error = (f64::from(y[row * n + col]) - want).abs();
                // Minima and scales multiply sums that are larger than what is left of them.
                let bound = (*k as f64 / 16.0 + 16.0) * 2f64.powi(-22) * (magnitude + 1.0);
                assert!(error <= bound, "{kernel}: y[{row}][{col}] is off by {error:e} of {want}");
            }
        }
    }
}

#[test]
fn gemv() {
    for module in modules("gemv_quant") {
        for format in FORMATS {
            for half in Half::BOTH {
                let kernel = format!("gemv_{}_{}", format.name, half.name());
                if has(&module, &kernel) {
                    let product = Product::new(format, half, 3, 32, 1280);
                    product.run(&module, &kernel, half, [2, 2, 1], 4096, (0, 768), None);
                }
            }
        }
    }
}

/// Row tiles of a warp, stages of the ring, bytes of shared memory.
fn sizes(format: Format, tokens: u32, turn: u32) -> (u32, u32, u32) {
    let rows = format.row_tiles[usize::from(tokens == 64)];
    let stages = 2 + turn % 3;
    let tile = (format.body() + format.super_scales()) as u32;
    let scales = if format.is_k() { 8 * rows * 256 } else { 0 };
    let ring = stages * (tokens * 256 + 8 * rows * tile) + scales;
    (rows, stages, ring.max(rows * 64 * tokens * 4))
}

#[test]
fn linear() {
    for module in modules("linear_quant") {
        for (i, format) in FORMATS.into_iter().enumerate() {
            for (j, tokens) in [8u32, 16, 32, 64].into_iter().enumerate() {
                // Each format and each size with both types in turns.
                let half = if module.target() == "sm_75" { Half::F16 } else { Half::BOTH[(i + j) % 2] };
                let kernel = format!("linear_{}_{}_t{tokens}", format.name, half.name());
                if !has(&module, &kernel) {
                    continue;
                }
                let (rows, stages, shared) = sizes(format, tokens, (i + j) as u32);
                // The last tiles of tokens and of rows are not full.
                let (m, n) = (tokens as usize + 3, 64 * rows as usize + 16);
                let product = Product::new(format, half, m, n, 768);
                let grid = [m.div_ceil(tokens as usize) as u32, n.div_ceil(64 * rows as usize) as u32, 2];
                product.run(&module, &kernel, half, grid, shared, (stages, 512), None);
            }
        }
    }
}

/// Groups of an expert's places: a full one, one that is not, and one of none.
#[test]
fn grouped() {
    let groups = |tokens: u32| [[1, 3, tokens, 0], [1, 0, 3, 0], [0; 4]];
    for module in modules("experts_gemv_quant") {
        for format in FORMATS {
            for half in Half::BOTH {
                let kernel = format!("experts_gemv_{}_{}", format.name, half.name());
                if has(&module, &kernel) {
                    let product = Product::new(format, half, 7, 32, 1280);
                    product.run(&module, &kernel, half, [2, 3, 1], 4096, (0, 1280), Some(&groups(4)));
                }
            }
        }
    }
    for module in modules("experts_quant") {
        for (i, format) in FORMATS.into_iter().enumerate() {
            for (j, tokens) in [8u32, 16, 32, 64].into_iter().enumerate() {
                let half = if module.target() == "sm_75" { Half::F16 } else { Half::BOTH[(i + j) % 2] };
                let kernel = format!("experts_linear_{}_{}_t{tokens}", format.name, half.name());
                if !has(&module, &kernel) {
                    continue;
                }
                let (rows, stages, shared) = sizes(format, tokens, (i + j) as u32);
                let n = 64 * rows as usize + 16;
                let product = Product::new(format, half, tokens as usize + 3, n, 768);
                product.run(&module, &kernel, half, [2, 3, 1], shared, (stages, 768), Some(&groups(tokens)));
            }
        }
    }
}
