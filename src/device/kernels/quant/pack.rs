//! Packs rows of blocks, as in the file, into the tiles of a [`PackedLayout`].

use super::codes::CodeRows;
use super::layout::{COLS, Format, PackedLayout, ROWS};
use crate::host::{Pieces, Pool};
use crate::tensor::formats::with_format;

/// Packs a matrix whose row `r` is `row(r)` (whole blocks as in the file) into `out`, of [`PackedLayout::bytes`].
///
/// `row` decides the order of rows: it may concatenate matrices, or interleave [gates and ups by
/// eight](super::super::product::gate_up_row).
///
/// # Panics
/// If the length of `out` or of a row differs from the layout's.
pub fn pack<'a>(
    layout: &PackedLayout,
    row: &(dyn Fn(usize) -> &'a [u8] + Sync),
    pool: &Pool,
    out: &mut [u8],
) {
    assert_eq!(out.len(), layout.bytes(), "packed {layout:?}");
    let (row_tiles, _) = layout.tiles();
    let bytes = layout.row_tile_bytes();
    // A chunk is a few row tiles; it unpacks their codes into a buffer that it allocates once.
    let per_chunk = row_tiles.div_ceil(8 * pool.threads()).max(1);
    pool.rows(true, 1, Pieces::new(out, per_chunk * bytes), |chunk, piece| {
        let mut codes = CodeRows::new(layout);
        for (tile, out) in piece.chunks_exact_mut(bytes).enumerate() {
            pack_row_tile(layout, chunk * per_chunk + tile, row, &mut codes, out);
        }
    });
}

fn pack_row_tile<'a>(
    layout: &PackedLayout,
    row_tile: usize,
    row: &(dyn Fn(usize) -> &'a [u8] + Sync),
    rows: &mut CodeRows,
    out: &mut [u8],
) {
    let row_bytes = layout.dtype.row_bytes(layout.k).expect("checked by `PackedLayout::new`");
    for i in 0..ROWS {
        let r = row_tile * ROWS + i;
        if r < layout.n {
            let bytes = row(r);
            assert_eq!(bytes.len(), row_bytes, "row {r} of {layout:?}");
            with_format!(layout.dtype, F => rows.fill::<F>(i, bytes));
        } else {
            rows.clear(i);
        }
    }
    let format = layout.format();
    let tiles = layout.tiles().1;
    for (group, out) in out.chunks_exact_mut(format.group_bytes()).enumerate() {
        let (bodies, supers) = out.split_at_mut(format.group() * format.body());
        for (i, body) in bodies.chunks_exact_mut(format.body()).enumerate() {
            let tile = group * format.group() + i;
            let (low, rest) = body.split_at_mut(format.low);
            let (high, scales) = rest.split_at_mut(format.high);
            pack_codes(format, |r| &rows.codes[r * rows.width + tile * COLS..][..COLS], low, high);
            // Rows g and g + 8 lie side by side: one lane holds both.
            let each = format.scales / ROWS;
            for r in 0..ROWS {
                let at = (r % 8 * 2 + r / 8) * each;
                scales[at..at + each].copy_from_slice(&rows.scales[r * tiles + tile][..each]);
            }
        }
        let each = format.super_scales / ROWS;
        for r in (0..ROWS).filter(|_| each > 0) {
            let at = (r % 8 * 2 + r / 8) * each;
            supers[at..at + each].copy_from_slice(&rows.supers[r * tiles.div_ceil(4) + group][..each]);
        }
    }
}

/// Writes a tile's codes by lane; `row(r)` returns the 64 codes of row `r`.
fn pack_codes<'a>(format: Format, row: impl Fn(usize) -> &'a [u8], low: &mut [u8], high: &mut [u8]) {
    let rows: [&[u8]; ROWS] = std::array::from_fn(row);
    for lane in 0..32 {
        let (g, t) = (lane / 4, lane % 4);
        // The fifth bits, or fifth and sixth bits, of all pairs of the tile.
        let mut tops = [0u32; 2];
        for s in 0..4 {
            // Pair j: fragment register a_j of the step.
            let pair = |j: usize| {
                let at = 16 * s + 8 * (j / 2) + 2 * t;
                let row = rows[g + 8 * (j % 2)];
                [row[at], row[at + 1]]
            };
            if format.bits == 8 {
                let to = &mut low[s / 2 * 512 + lane * 16 + s % 2 * 8..][..8];
                for j in 0..4 {
                    let [a, b] = pair(j);
                    to[j / 2 * 4 + j % 2] = a;
                    to[j / 2 * 4 + j % 2 + 2] = b;
                }
                continue;
            }
            let mut word = 0u32;
            for j in 0..4 {
                let [a, b] = pair(j).map(u32::from);
                word |= ((a & 15) | (b & 15) << 16) << (4 * j);
                let top = (a >> 4) | (b >> 4) << 16;
                if format.bits == 5 {
                    tops[0] |= top << (4 * s + j);
                } else {
                    tops[s / 2] |= top << (2 * (4 * (s % 2) + j));
                }
            }
            low[lane * 16 + 4 * s..][..4].copy_from_slice(&word.to_le_bytes());
        }
        let words = format.high / 128;
        for (i, top) in tops[..words].iter().enumerate() {
            high[(lane * words + i) * 4..][..4].copy_from_slice(&top.to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;
    use crate::reference::dequant::dequantise_row;
    use crate::tensor::{DType, set_scales};

    fn half_at(b: &[u8], at: usize) -> f32 {
        f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
    }

    /// Element (row, col) of a packed matrix, written from the drawing in quant_tile.cuh and independent of the packing
    /// code.
    fn element(layout: &PackedLayout, packed: &[u8], row: usize, col: usize) -> f32 {
        let k_tiles = layout.k.div_ceil(64);
        let (r, c) = (row % 16, col % 64);
        let (g, s, t) = (r % 8, c / 16, c % 8 / 2);
        let (lane, j, second) = (4 * g + t, r / 8 + 2 * (c % 16 / 8), c % 2);
        let (low, high, scales, super_bytes): (usize, usize, usize, usize) = match layout.dtype {
            DType::Q8_0 => (1024, 0, 64, 0),
            DType::Q4_0 | DType::MXFP4 => (512, 0, 64, 0),
            DType::Q4_1 => (512, 0, 128, 0),
            DType::Q4_K => (512, 0, 64, 64),
            DType::Q5_0 => (512, 128, 64, 0),
            DType::Q5_1 => (512, 128, 128, 0),
            DType::Q5_K => (512, 128, 64, 64),
            DType::Q6_K => (512, 256, 64, 32),
            other => panic!("{other}"),
        };
        let body = low + high + scales;
        let (group, in_group) = if super_bytes > 0 { (col / 256, col % 256 / 64) } else { (col / 64, 0) };
        let group_bytes = if super_bytes > 0 { 4 * body + super_bytes } else { body };
        let groups = if super_bytes > 0 { k_tiles / 4 } else { k_tiles };
        let start = (row / 16 * groups + group) * group_bytes;
        let tile = &packed[start + in_group * body..][..body];
        let super_scales = &packed[start + group_bytes - super_bytes..][..super_bytes];
        let word = |at: usize| u32::from_le_bytes(tile[at..at + 4].try_into().unwrap());

        let mut code = if low == 1024 {
            i32::from(tile[s / 2 * 512 + lane * 16 + s % 2 * 8 + j / 2 * 4 + j % 2 + 2 * second] as i8)
        } else {
            (word(lane * 16 + 4 * s) >> (4 * j + 16 * second) & 15) as i32
        };
        if high == 128 {
            code |= ((word(low + 4 * lane) >> (4 * s + j + 16 * second) & 1) as i32) << 4;
        } else if high == 256 {
            let word = word(low + 8 * lane + 4 * (s / 2));
            code |= ((word >> (2 * (4 * (s % 2) + j) + 16 * second) & 3) as i32) << 4;
        }
        let block = c / 32;
        let scale = &tile[low + high + scales / 8 * g + scales / 16 * (r / 8)..][..scales / 16];
        match layout.dtype {
            DType::Q4_0 => half_at(scale, 2 * block) * (code - 8) as f32,
            DType::MXFP4 => {
                let power =
                    f32::from_bits(u32::from(scale[2 * block]) << 16 | u32::from(scale[2 * block + 1]) << 24);
                let size = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][code as usize % 8];
                2.0 * power * if code < 8 { size } else { 0.0 - size }
            }
            DType::Q5_0 => half_at(scale, 2 * block) * (code - 16) as f32,
            DType::Q8_0 => half_at(scale, 2 * block) * code as f32,
            DType::Q4_1 | DType::Q5_1 => {
                half_at(scale, 4 * block) * code as f32 + half_at(scale, 4 * block + 2)
            }
            DType::Q4_K | DType::Q5_K => {
                let at = 8 * g + 4 * (r / 8);
                let (d, dmin) = (half_at(super_scales, at), half_at(super_scales, at + 2));
                d * f32::from(scale[2 * block]) * code as f32 - dmin * f32::from(scale[2 * block + 1])
            }
            _ => {
                let d = half_at(super_scales, 4 * g + 2 * (r / 8));
                d * (i32::from(scale[s]) - 128) as f32 * (code - 32) as f32
            }
        }
    }

    /// Random bytes with finite scales.
    fn rows_of(dtype: DType, n: usize, k: usize, seed: u64) -> Vec<u8> {
        let mut state = seed;
        let mut random = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as u32
        };
        let mut bytes: Vec<u8> = (0..n * dtype.row_bytes(k).unwrap()).map(|_| random() as u8).collect();
        for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
            let mut value = || (random() % 2001) as f32 / 1000.0 - 1.0;
            set_scales(dtype, block, value(), value());
        }
        bytes
    }

    #[test]
    fn every_element_of_every_format_is_bit_for_bit_where_the_drawing_says() {
        let pool = Pool::new(3);
        for dtype in PackedLayout::dtypes() {
            let shapes: &[(usize, usize)] = match dtype.block_len() {
                256 => &[(1, 256), (16, 512), (37, 768)],
                _ => &[(1, 32), (16, 64), (17, 96), (37, 576)],
            };
            for &(n, k) in shapes {
                let layout = PackedLayout::new(dtype, n, k).unwrap();
                let bytes = rows_of(dtype, n, k, 7 + n as u64);
                let row_bytes = dtype.row_bytes(k).unwrap();
                let mut packed = vec![0xa5; layout.bytes()];
                pack(&layout, &|r| &bytes[r * row_bytes..][..row_bytes], &pool, &mut packed);
                for r in 0..n {
                    let mut want = vec![0.0; k];
                    dequantise_row(dtype, &bytes[r * row_bytes..][..row_bytes], &mut want);
                    for (c, want) in want.iter().enumerate() {
                        let got = element(&layout, &packed, r, c);
                        assert_eq!(
                            got.to_bits(),
                            want.to_bits(),
                            "{dtype} {n}x{k} ({r}, {c}): {got}, not {want}"
                        );
                    }
                }
                // Padding adds nothing: its scales and minima are zero.
                for r in n..layout.tiles().0 * 16 {
                    for c in 0..layout.tiles().1 * 64 {
                        assert_eq!(
                            element(&layout, &packed, r, c),
                            0.0,
                            "{dtype} {n}x{k} padding ({r}, {c})"
                        );
                    }
                }
                for c in k..layout.tiles().1 * 64 {
                    assert_eq!(element(&layout, &packed, 0, c), 0.0, "{dtype} {n}x{k} padding (0, {c})");
                }
            }
        }
    }
}
