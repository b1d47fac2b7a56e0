//! Codes and scales of blocks in a form that packing handles alike for every format.

use super::layout::{COLS, PackedLayout, ROWS};
use crate::tensor::formats::{BlockFormat, Scales};

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

    /// Reads a row of blocks.
    pub fn fill<F: BlockFormat>(&mut self, row: usize, bytes: &[u8]) {
        let tiles = self.width / COLS;
        let codes = &mut self.codes[row * self.width..][..self.width];
        let scales = &mut self.scales[row * tiles..][..tiles];
        let supers = &mut self.supers[row * tiles.div_ceil(4)..][..tiles.div_ceil(4)];
        for (i, (b, codes)) in bytes.chunks_exact(F::BYTES).zip(codes.chunks_exact_mut(F::LEN)).enumerate() {
            for (i, to) in codes.chunks_exact_mut(32).enumerate() {
                // Bytes are signed in tiles.
                let flip = if F::BITS == 8 { 0x80 } else { 0 };
                to.copy_from_slice(&F::codes(b, i).map(|c| c ^ flip));
            }
            let s = F::scales(b);
            let (d, m) = (s.d.to_le_bytes(), s.m.to_le_bytes());
            match F::SCALES {
                // Two blocks per tile.
                Scales::Scale | Scales::PowerOfTwo => scales[i / 2][i % 2 * 2..][..2].copy_from_slice(&d),
                Scales::ScaleMin => {
                    scales[i / 2][i % 2 * 4..][..2].copy_from_slice(&d);
                    scales[i / 2][i % 2 * 4 + 2..][..2].copy_from_slice(&m);
                }
                // Four tiles per block.
                Scales::SuperMin => {
                    supers[i] = [d[0], d[1], m[0], m[1]];
                    for sub in 0..8 {
                        let both = [s.subs[sub], s.sub_mins[sub]];
                        scales[4 * i + sub / 2][sub % 2 * 2..][..2].copy_from_slice(&both);
                    }
                }
                Scales::SuperSigned => {
                    supers[i][..2].copy_from_slice(&d);
                    for (sub, scale) in s.subs.iter().enumerate() {
                        scales[4 * i + sub / 4][sub % 4] = scale.wrapping_add(128);
                    }
                }
            }
        }
    }
}
