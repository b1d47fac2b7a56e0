//! From the block formats of GGUF to tiles of 16 rows x 64 columns in the order of mma fragments.
//!
//! The layout is drawn in `cuda/include/quant_tile.cuh`. Rows are padded to 16 and columns to 64 with codes and
//! scales of zero, which multiply what kernels read of x there (zeros) to nothing.

use crate::device::host::Pool;
use crate::reference::dequant::k_scale_min;
use crate::tensor::DType;

/// Rows and columns of a tile.
const ROWS: usize = 16;
const COLS: usize = 64;

/// How a format's codes and scales are stored in a tile: sizes in bytes.
#[derive(Debug, Clone, Copy)]
struct Format {
    bits: usize,
    low: usize,
    high: usize,
    scales: usize,
    /// Behind every 4 tiles; 0 without super-blocks.
    super_scales: usize,
}

impl Format {
    const fn of(dtype: DType) -> Option<Format> {
        let (bits, scales, super_scales) = match dtype {
            DType::Q4_0 => (4, 64, 0),
            DType::Q4_1 => (4, 128, 0),
            DType::Q4_K => (4, 64, 64),
            DType::Q5_0 => (5, 64, 0),
            DType::Q5_1 => (5, 128, 0),
            DType::Q5_K => (5, 64, 64),
            DType::Q6_K => (6, 64, 32),
            DType::Q8_0 => (8, 64, 0),
            DType::F32 | DType::F16 | DType::BF16 => return None,
        };
        let (low, high) = match bits {
            8 => (1024, 0),
            bits => (512, (bits - 4) * 128),
        };
        Some(Format { bits, low, high, scales, super_scales })
    }

    /// Tiles that share super-scales.
    fn group(self) -> usize {
        if self.super_scales > 0 { 4 } else { 1 }
    }

    fn body(self) -> usize {
        self.low + self.high + self.scales
    }

    fn group_bytes(self) -> usize {
        self.group() * self.body() + self.super_scales
    }
}

/// A packed matrix: what it is of, from which its size and every kernel's follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Layout {
    dtype: DType,
    n: usize,
    k: usize,
}

impl Layout {
    /// Of `n` rows of `k` elements; `None` if `dtype` has no codes, or there is nothing, or `k` is no multiple of
    /// its block.
    pub fn new(dtype: DType, n: usize, k: usize) -> Option<Layout> {
        Format::of(dtype)?;
        (n > 0 && k > 0 && k.is_multiple_of(dtype.block_len())).then_some(Layout { dtype, n, k })
    }

    /// What it is packed from.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Rows.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Columns.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Tiles along the rows, and along the columns.
    pub fn tiles(&self) -> (usize, usize) {
        (self.n.div_ceil(ROWS), self.k.div_ceil(COLS))
    }

    /// Bytes of 16 rows.
    pub fn row_tile_bytes(&self) -> usize {
        let format = self.format();
        self.tiles().1 / format.group() * format.group_bytes()
    }

    /// Bytes of all.
    pub fn bytes(&self) -> usize {
        self.tiles().0 * self.row_tile_bytes()
    }

    /// Bytes of a tile in shared memory: its body, then its group's super-scales.
    pub(super) fn shared_tile_bytes(&self) -> usize {
        let format = self.format();
        format.body() + format.super_scales
    }

    /// Bits of a code.
    pub(super) fn bits(&self) -> usize {
        self.format().bits
    }

    /// Whether its scales are in two levels.
    pub(super) fn has_super_blocks(&self) -> bool {
        self.format().super_scales > 0
    }

    fn format(&self) -> Format {
        Format::of(self.dtype).expect("checked by `new`")
    }
}

/// Packs a matrix whose row `r` is `row(r)` (whole blocks as in the file) into `out`, of [`Layout::bytes`].
///
/// Any order of rows is a matter of `row`: concatenated matrices, or [gates and ups by eight](gate_up_row).
///
/// # Panics
/// `out` or a row has another length than the layout says.
pub fn pack<'a>(layout: &Layout, row: &(dyn Fn(usize) -> &'a [u8] + Sync), pool: &Pool, out: &mut [u8]) {
    assert_eq!(out.len(), layout.bytes(), "packed {layout:?}");
    let (row_tiles, _) = layout.tiles();
    let bytes = layout.row_tile_bytes();
    // Chunks of a few row tiles: their codes are unpacked into a buffer that each chunk allocates once.
    let per_chunk = row_tiles.div_ceil(8 * pool.threads()).max(1);
    let to = Out(out.as_mut_ptr());
    pool.run(row_tiles.div_ceil(per_chunk), &|chunk, _| {
        let mut codes = Rows::new(layout);
        for tile in chunk * per_chunk..((chunk + 1) * per_chunk).min(row_tiles) {
            // SAFETY: `out` has `row_tiles` pieces of `bytes` (asserted above), every piece belongs to one tile,
            // every tile to one chunk, and the pool gives each chunk to one thread and ends before `run` does.
            let out = unsafe { std::slice::from_raw_parts_mut(to.get().add(tile * bytes), bytes) };
            pack_row_tile(layout, tile, row, &mut codes, out);
        }
    });
}

/// The start of the output, for threads that write disjoint pieces of it.
struct Out(*mut u8);

impl Out {
    fn get(&self) -> *mut u8 {
        self.0
    }
}

// SAFETY: only the address is shared; who writes where is argued at the one place that uses it.
unsafe impl Sync for Out {}

/// Which row of which part becomes row `r` of a gate and an up projection interleaved by eight: `(false, i)` is the
/// gate's row `i`, `(true, i)` the up's.
pub fn gate_up_row(r: usize) -> (bool, usize) {
    (r % 16 >= 8, r / 16 * 8 + r % 8)
}

/// Codes and scales of 16 rows, format gone: what all tiles of a row tile are assembled from.
struct Rows {
    /// Elements of a row of `codes`: whole tiles.
    width: usize,
    /// `[row][width]`: a byte a code.
    codes: Vec<u8>,
    /// `[row][tile]`: the bytes that the tile stores for the row, 4 or 8.
    scales: Vec<[u8; 8]>,
    /// `[row][group]`: the same of the super-block, 2 or 4.
    supers: Vec<[u8; 4]>,
}

impl Rows {
    fn new(layout: &Layout) -> Rows {
        let tiles = layout.tiles().1;
        Rows {
            width: tiles * COLS,
            codes: vec![0; ROWS * tiles * COLS],
            scales: vec![[0; 8]; ROWS * tiles],
            supers: vec![[0; 4]; ROWS * tiles.div_ceil(4)],
        }
    }

    fn clear(&mut self, row: usize) {
        let (tiles, groups) = (self.width / COLS, (self.width / COLS).div_ceil(4));
        self.codes[row * self.width..][..self.width].fill(0);
        self.scales[row * tiles..][..tiles].fill([0; 8]);
        self.supers[row * groups..][..groups].fill([0; 4]);
    }

    fn fill(&mut self, dtype: DType, row: usize, bytes: &[u8]) {
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
                // Two blocks a tile.
                DType::Q4_0 | DType::Q5_0 | DType::Q8_0 => {
                    scales[i / 2][i % 2 * 2..][..2].copy_from_slice(&b[..2]);
                }
                DType::Q4_1 | DType::Q5_1 => scales[i / 2][i % 2 * 4..][..4].copy_from_slice(&b[..4]),
                // Four tiles a block.
                DType::Q4_K | DType::Q5_K => {
                    supers[i].copy_from_slice(&b[..4]);
                    for sub in 0..8 {
                        let (scale, min) = k_scale_min(&b[4..16], sub);
                        scales[4 * i + sub / 2][sub % 2 * 2..][..2].copy_from_slice(&[scale, min]);
                    }
                }
                _ => {
                    supers[i][..2].copy_from_slice(&b[208..210]);
                    for (sub, scale) in b[192..208].iter().enumerate() {
                        scales[4 * i + sub / 4][sub % 4] = scale.wrapping_add(128);
                    }
                }
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

/// 256 codes: of 64 that share 32 bytes, low nibbles first.
fn four_bits_k(b: &[u8], codes: &mut [u8]) {
    for (b, codes) in b.chunks_exact(32).zip(codes.chunks_exact_mut(64)) {
        let (low, high) = codes.split_at_mut(32);
        for ((l, h), b) in low.iter_mut().zip(high).zip(b) {
            (*l, *h) = (b & 15, b >> 4);
        }
    }
}

/// 256 codes: halves of 128; in each, quarters 0 and 1 are low nibbles, 2 and 3 high ones; bit pairs by quarter.
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

fn pack_row_tile<'a>(
    layout: &Layout,
    row_tile: usize,
    row: &(dyn Fn(usize) -> &'a [u8] + Sync),
    rows: &mut Rows,
    out: &mut [u8],
) {
    let row_bytes = layout.dtype.row_bytes(layout.k).expect("checked by `Layout::new`");
    for i in 0..ROWS {
        let r = row_tile * ROWS + i;
        if r < layout.n {
            let bytes = row(r);
            assert_eq!(bytes.len(), row_bytes, "row {r} of {layout:?}");
            rows.fill(layout.dtype, i, bytes);
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
            // Rows g and g + 8 side by side: a lane has both.
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

/// Codes of a tile by lane: `row(r)` are the 64 of row `r`.
fn pack_codes<'a>(format: Format, row: impl Fn(usize) -> &'a [u8], low: &mut [u8], high: &mut [u8]) {
    let rows: [&[u8]; ROWS] = std::array::from_fn(row);
    for lane in 0..32 {
        let (g, t) = (lane / 4, lane % 4);
        // Fifth bits, or fifth and sixth bits, of all pairs of the tile.
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

    fn half_at(b: &[u8], at: usize) -> f32 {
        f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
    }

    /// Element (row, col) of a packed matrix, by the drawing in quant_tile.cuh and in its own words.
    fn element(layout: &Layout, packed: &[u8], row: usize, col: usize) -> f32 {
        let k_tiles = layout.k.div_ceil(64);
        let (r, c) = (row % 16, col % 64);
        let (g, s, t) = (r % 8, c / 16, c % 8 / 2);
        let (lane, j, second) = (4 * g + t, r / 8 + 2 * (c % 16 / 8), c % 2);
        let (low, high, scales, super_bytes): (usize, usize, usize, usize) = match layout.dtype {
            DType::Q8_0 => (1024, 0, 64, 0),
            DType::Q4_0 => (512, 0, 64, 0),
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

    /// Random bytes, with scales that are finite.
    fn rows_of(dtype: DType, n: usize, k: usize, seed: u64) -> Vec<u8> {
        let mut state = seed;
        let mut random = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as u32
        };
        let mut bytes: Vec<u8> = (0..n * dtype.row_bytes(k).unwrap()).map(|_| random() as u8).collect();
        for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
            let halves: &[usize] = match dtype {
                DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => &[0, 2],
                DType::Q6_K => &[208],
                _ => &[0],
            };
            for &at in halves {
                let value = f16::from_f32((random() % 2001) as f32 / 1000.0 - 1.0);
                block[at..at + 2].copy_from_slice(&value.to_le_bytes());
            }
        }
        bytes
    }

    #[test]
    fn every_element_of_every_format_is_bit_for_bit_where_the_drawing_says() {
        let pool = Pool::new(3);
        for dtype in DType::QUANTISED {
            let shapes: &[(usize, usize)] = match dtype.block_len() {
                256 => &[(1, 256), (16, 512), (37, 768)],
                _ => &[(1, 32), (16, 64), (17, 96), (37, 576)],
            };
            for &(n, k) in shapes {
                let layout = Layout::new(dtype, n, k).unwrap();
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
                // Padding is worth nothing: scales of zero (and so are minima).
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

    #[test]
    fn bits_of_a_weight() {
        // 4096 x 4096: what the kernels' headers say of memory traffic.
        for (dtype, bits) in [
            (DType::Q4_0, 4.5),
            (DType::Q4_1, 5.0),
            (DType::Q4_K, 4.625),
            (DType::Q5_0, 5.5),
            (DType::Q5_1, 6.0),
            (DType::Q5_K, 5.625),
            (DType::Q6_K, 6.5625),
            (DType::Q8_0, 8.5),
        ] {
            let layout = Layout::new(dtype, 4096, 4096).unwrap();
            assert_eq!(layout.bytes() as f64 * 8.0 / (4096.0 * 4096.0), bits, "{dtype}");
        }
    }

    #[test]
    fn what_has_no_layout() {
        assert_eq!(Layout::new(DType::F16, 16, 64), None);
        assert_eq!(Layout::new(DType::Q4_0, 16, 48), None);
        assert_eq!(Layout::new(DType::Q4_K, 16, 128), None);
        assert_eq!(Layout::new(DType::Q8_0, 0, 64), None);
    }
}
