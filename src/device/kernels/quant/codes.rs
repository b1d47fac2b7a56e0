//! Reads codes and scales out of GGUF's block formats, into a form that packing handles alike for every format.

use super::layout::{COLS, PackedLayout, ROWS};
use crate::reference::dequant::k_scale_min;
use crate::tensor::DType;

/// Codes and scales of 16 rows, independent of the file's format: all tiles of a row tile are assembled from them.
pub(super) struct CodeRows {
    /// Elements of a row of `codes`: whole tiles.
    pub width: usize,
    /// `[row][width]`: one byte per code.
    pub codes: Vec<u8>,
    /// `[row][tile]`: the bytes that the tile stores for the row, 4 or 8.
    pub scales: Vec<[u8; 8]>,
    /// `[row][group]`: the bytes that the group stores for the row's super-block, 2 or 4.
    pub supers: Vec<[u8; 4]>,
}

impl CodeRows {
    pub fn new(layout: &PackedLayout) -> CodeRows {
        let tiles = layout.tiles().1;
        CodeRows {
            width: tiles * COLS,
            codes: vec![0; ROWS * tiles * COLS],
            scales: vec![[0; 8]; ROWS * tiles],
            supers: vec![[0; 4]; ROWS * tiles.div_ceil(4)],
        }
    }

    pub fn clear(&mut self, row: usize) {
        let (tiles, groups) = (self.width / COLS, (self.width / COLS).div_ceil(4));
        self.codes[row * self.width..][..self.width].fill(0);
        self.scales[row * tiles..][..tiles].fill([0; 8]);
        self.supers[row * groups..][..groups].fill([0; 4]);
    }

    pub fn fill(&mut self, dtype: DType, row: usize, bytes: &[u8]) {
        let tiles = self.width / COLS;
        let codes = &mut self.codes[row * self.width..][..self.width];
        let scales = &mut self.scales[row * tiles..][..tiles];
        let supers = &mut self.supers[row * tiles.div_ceil(4)..][..tiles.div_ceil(4)];
        let blocks = bytes.chunks_exact(dtype.block_bytes());
        for (i, (b, codes)) in blocks.zip(codes.chunks_exact_mut(dtype.block_len())).enumerate() {
            match dtype {
                DType::Q4_0 => nibbles(&b[2..18], codes),
                DType::Q4_1 => nibbles(&b[4..20], codes),
                DType::Q5_0 => five_bits(&b[6..22], &b[2..6], codes),
                DType::Q5_1 => five_bits(&b[8..24], &b[4..8], codes),
                DType::Q8_0 => codes.copy_from_slice(&b[2..34]),
                DType::Q4_K => four_bits_k(&b[16..144], codes),
                DType::Q5_K => {
                    four_bits_k(&b[48..176], codes);
                    for (sub, codes) in codes.chunks_exact_mut(32).enumerate() {
                        codes.iter_mut().zip(&b[16..48]).for_each(|(c, h)| *c |= ((h >> sub) & 1) << 4);
                    }
                }
                DType::Q6_K => six_bits(&b[..128], &b[128..192], codes),
                DType::F32 | DType::F16 | DType::BF16 => unreachable!("no layout of {dtype}"),
            }
            match dtype {
                // Two blocks per tile.
                DType::Q4_0 | DType::Q5_0 | DType::Q8_0 => {
                    scales[i / 2][i % 2 * 2..][..2].copy_from_slice(&b[..2]);
                }
                DType::Q4_1 | DType::Q5_1 => scales[i / 2][i % 2 * 4..][..4].copy_from_slice(&b[..4]),
                // Four tiles per block.
                DType::Q4_K | DType::Q5_K => {
                    supers[i].copy_from_slice(&b[..4]);
                    for sub in 0..8 {
                        let (scale, min) = k_scale_min(&b[4..16], sub);
                        scales[4 * i + sub / 2][sub % 2 * 2..][..2].copy_from_slice(&[scale, min]);
                    }
                }
                DType::Q6_K => {
                    supers[i][..2].copy_from_slice(&b[208..210]);
                    for (sub, scale) in b[192..208].iter().enumerate() {
                        scales[4 * i + sub / 4][sub % 4] = scale.wrapping_add(128);
                    }
                }
                DType::F32 | DType::F16 | DType::BF16 => unreachable!("no layout of {dtype}"),
            }
        }
    }
}

/// 32 codes: low nibbles first.
fn nibbles(b: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(16);
    for ((l, h), b) in low.iter_mut().zip(high).zip(b) {
        (*l, *h) = (b & 15, b >> 4);
    }
}

fn five_bits(b: &[u8], high: &[u8], codes: &mut [u8]) {
    nibbles(b, codes);
    for (i, code) in codes.iter_mut().enumerate() {
        *code |= ((high[i / 8] >> (i % 8)) & 1) << 4;
    }
}

/// 256 codes, in groups of 64 that share 32 bytes: low nibbles first.
fn four_bits_k(b: &[u8], codes: &mut [u8]) {
    for (b, codes) in b.chunks_exact(32).zip(codes.chunks_exact_mut(64)) {
        let (low, high) = codes.split_at_mut(32);
        for ((l, h), b) in low.iter_mut().zip(high).zip(b) {
            (*l, *h) = (b & 15, b >> 4);
        }
    }
}

/// 256 codes in halves of 128. In each half, quarters 0 and 1 are low nibbles, 2 and 3 high ones; the bit pairs are
/// ordered by quarter.
fn six_bits(low: &[u8], high: &[u8], codes: &mut [u8]) {
    for (h, codes) in codes.chunks_exact_mut(128).enumerate() {
        for (quarter, codes) in codes.chunks_exact_mut(32).enumerate() {
            let low = &low[h * 64 + quarter % 2 * 32..][..32];
            let high = &high[h * 32..][..32];
            for ((code, l), t) in codes.iter_mut().zip(low).zip(high) {
                *code = ((l >> (4 * (quarter / 2))) & 15) | ((t >> (2 * quarter)) & 3) << 4;
            }
        }
    }
}
