//! Weights, 16 rows interleaved: quantised ones as the int8 kernels read them, 16-bit floats as AMX tiles.
//!
//! A *group* is 16 consecutive rows of W (the last one padded with zero rows), a *record* the part of a
//! group that covers 64 elements of k (256 for K-quants; k is padded with zero scales, or zeros). Inside a record
//! (bytes; each array is `[..][16 rows]`):
//!
//! | dtype | scales, then a block of 32 after the other: | high bits | codes |
//! |---|---|---|---|
//! | q4_0 | d f16 [2] | | nibbles [256] |
//! | q4_1 | d f16 [2], m f16 [2] | | nibbles [256] |
//! | q5_0 | d f16 [2] | masks [64] | nibbles [256] |
//! | q5_1 | d f16 [2], m f16 [2] | masks [64] | nibbles [256] |
//! | q8_0 | d f16 [2] | | bytes [512], sign bit flipped |
//! | q4_k | d f16, dmin f16, sc u8 [8], min u8 [8] | | nibbles [256] |
//! | q5_k | d f16, dmin f16, sc u8 [8], min u8 [8] | masks [64] | nibbles [256] |
//! | q6_k | d f16, 32 unused, sc i8 [16] | pairs of bits [128] | nibbles [256] |
//! | bf16, f16 | | | bf16 [16 pairs][16 rows][2]: a B tile; f16 is rounded, to nearest even |
//!
//! A block's high bits lie directly before its codes, not together with those of other blocks, so that a kernel reads
//! one ascending stream, which hardware prefetchers follow.
//!
//! *Nibbles* of a block of 32: four lines of 64 bytes; line j holds, for each row, a dword with elements
//! 4j..4j+4 in the low nibbles and 16+4j..16+4j+4 in the high ones. So one 64-byte load gives two operands
//! of vpdpbusd with a row per lane: no shuffle, no horizontal sum. *Masks*: for each of the 8 quads of
//! elements a 64-bit mask, bit 4·row + i: the fifth bit. *Pairs of bits*: two lines; the byte of element i
//! of quad q has its upper two bits at 2·(q mod 4) of line q/4.
//!
//! Cost over the file's own layout: none for the 32-blocks, 2.8% for q4_k, 2.3% for q5_k, 1% for q6_k.

use super::kernel::GROUP;
use crate::tensor::{Bytes, DType, Tensor};

/// Shape of the records of a dtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordLayout {
    /// Elements of k per record.
    pub record_k: usize,
    /// Bytes of scales, before the blocks.
    pub scale_bytes: usize,
    /// Bytes of high bits per block of 32 elements.
    pub high_bytes: usize,
    /// Bytes of codes per block of 32 elements.
    pub code_bytes: usize,
    /// Bytes per record.
    pub record_bytes: usize,
}

impl RecordLayout {
    /// The layout of `dtype`; `None` for f32.
    pub const fn of(dtype: DType) -> Option<RecordLayout> {
        let (record_k, scale_bytes, high_bytes, code_bytes) = match dtype {
            DType::Q4_0 => (64, 64, 0, 256),
            DType::Q4_1 => (64, 128, 0, 256),
            DType::Q5_0 => (64, 64, 64, 256),
            DType::Q5_1 => (64, 128, 64, 256),
            DType::Q8_0 => (64, 64, 0, 512),
            DType::Q4_K => (256, 64 + 256, 0, 256),
            DType::Q5_K => (256, 64 + 256, 64, 256),
            DType::Q6_K => (256, 64 + 256, 128, 256),
            DType::F16 | DType::BF16 => (64, 0, 0, 2 * 32 * GROUP),
            DType::F32 => return None,
        };
        let record_bytes = scale_bytes + record_k / 32 * (high_bytes + code_bytes);
        Some(RecordLayout { record_k, scale_bytes, high_bytes, code_bytes, record_bytes })
    }

    /// Where the high bits of block `b` of a record begin.
    pub const fn high(self, b: usize) -> usize {
        self.scale_bytes + b * (self.high_bytes + self.code_bytes)
    }

    /// Where the codes of block `b` of a record begin.
    pub const fn codes(self, b: usize) -> usize {
        self.high(b) + self.high_bytes
    }

    /// Bytes of one group of 16 rows of `k` elements.
    pub const fn group_bytes(self, k: usize) -> usize {
        k.div_ceil(self.record_k) * self.record_bytes
    }
}

/// A packed weight.
#[derive(Debug, Clone)]
pub struct Packed {
    /// The dtype it came from.
    pub dtype: DType,
    /// Output features.
    pub n: usize,
    /// Input features.
    pub k: usize,
    /// `ceil(n/16)` groups, 64-byte aligned.
    pub data: Bytes,
}

impl Packed {
    /// Bytes that a packed `[n, k]` weight takes; `None` for f32.
    pub fn size(dtype: DType, n: usize, k: usize) -> Option<usize> {
        RecordLayout::of(dtype).map(|l| n.div_ceil(GROUP) * l.group_bytes(k))
    }

    /// Wraps bytes that [`pack_group`] has filled.
    pub fn new(dtype: DType, n: usize, k: usize, data: Bytes) -> Packed {
        assert_eq!(Some(data.len()), Packed::size(dtype, n, k), "{dtype} [{n}, {k}]");
        assert_eq!(data.as_ptr() as usize % 64, 0, "packed weights are 64-byte aligned");
        Packed { dtype, n, k, data }
    }

    /// Groups of 16 rows.
    pub fn groups(&self) -> usize {
        self.n.div_ceil(GROUP)
    }

    /// The bytes of groups `g0..g1`, one after the other.
    pub fn group_range(&self, g0: usize, g1: usize) -> &[u8] {
        let b = RecordLayout::of(self.dtype).expect("f32 is not packed").group_bytes(self.k);
        &self.data[g0 * b..g1 * b]
    }
}

fn dw(b: &[u8], i: usize) -> u32 {
    u32::from_le_bytes(b[i * 4..i * 4 + 4].try_into().expect("4 bytes"))
}

fn put(out: &mut [u8], i: usize, v: u32) {
    out[i * 4..i * 4 + 4].copy_from_slice(&v.to_le_bytes());
}

const LOW: u32 = 0x0f0f_0f0f;

/// Packs rows `16·group..` of `w` into `out` (exactly one group's bytes).
pub fn pack_group(w: &Tensor, group: usize, out: &mut [u8]) {
    let layout = RecordLayout::of(w.dtype).expect("f32 is not packed");
    assert_eq!(out.len(), layout.group_bytes(w.cols()));
    let rows = GROUP.min(w.rows() - group * GROUP);
    if !w.dtype.is_quantised() {
        return pack_floats(w, group * GROUP, rows, out);
    }
    out.fill(0);
    let bb = w.dtype.block_bytes();
    let per_record = layout.record_k / w.dtype.block_len();
    for r in 0..rows {
        for (b, block) in w.row(group * GROUP + r).chunks_exact(bb).enumerate() {
            let record = &mut out[b / per_record * layout.record_bytes..][..layout.record_bytes];
            pack_block(w.dtype, r, b % per_record, block, record);
        }
    }
}

/// Packs `rows` rows of 16-bit floats from `first` on as tiles into `out`.
fn pack_floats(w: &Tensor, first: usize, rows: usize, out: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if crate::simd::Caps::get().avx512 {
        let (k, kp) = (w.cols(), w.cols().next_multiple_of(64));
        let block = super::float::panel::RowBlock { dtype: w.dtype, w: w.row(first).as_ptr(), rows, k };
        assert!(out.len() == kp * GROUP * 2 && (first + rows) * w.row_bytes() <= w.data.len());
        // SAFETY: the tier's features are there; `rows` rows of `k` are behind `w`, tiles of 16 rows of kp fit in `out`.
        unsafe { super::float::panel::panel_bf16(block, 0, k, kp, out.as_mut_ptr().cast()) };
        return;
    }
    out.fill(0);
    for r in 0..rows {
        for (i, e) in w.row(first + r).chunks_exact(2).enumerate() {
            let bits = match w.dtype {
                DType::BF16 => [e[0], e[1]],
                _ => half::bf16::from_f32(half::f16::from_le_bytes([e[0], e[1]]).to_f32()).to_le_bytes(),
            };
            out[(i / 2 * GROUP + r) * 4 + i % 2 * 2..][..2].copy_from_slice(&bits);
        }
    }
}

/// Writes source block `block` (number `b` of its record) of row `r` into `record`.
fn pack_block(dtype: DType, r: usize, b: usize, block: &[u8], record: &mut [u8]) {
    let layout = RecordLayout::of(dtype).expect("f32 is not packed");
    let (high, codes) = (|b| layout.high(b), |b| layout.codes(b));
    // Nibbles of a 32-block whose bytes hold element i low, element i + 16 high: the layout's own order.
    let nibbles = |codes: &mut [u8], qs: &[u8]| (0..4).for_each(|j| put(codes, j * 16 + r, dw(qs, j)));
    let half = |out: &mut [u8], src: &[u8]| out[r * 2..r * 2 + 2].copy_from_slice(src);
    // The fifth bits of a 32-block as one u32, bit i = element i.
    let masks = |out: &mut [u8], bits: u32| {
        for q in 0..8 {
            let nibble = ((bits >> (4 * q)) & 15) as u8;
            out[q * 8 + r / 2] |= nibble << (4 * (r % 2));
        }
    };
    match dtype {
        DType::Q4_0 => {
            half(&mut record[b * 32..], &block[0..2]);
            nibbles(&mut record[codes(b)..], &block[2..18]);
        }
        DType::Q4_1 => {
            half(&mut record[b * 32..], &block[0..2]);
            half(&mut record[64 + b * 32..], &block[2..4]);
            nibbles(&mut record[codes(b)..], &block[4..20]);
        }
        DType::Q5_0 => {
            half(&mut record[b * 32..], &block[0..2]);
            masks(&mut record[high(b)..], dw(&block[2..], 0));
            nibbles(&mut record[codes(b)..], &block[6..22]);
        }
        DType::Q5_1 => {
            half(&mut record[b * 32..], &block[0..2]);
            half(&mut record[64 + b * 32..], &block[2..4]);
            masks(&mut record[high(b)..], dw(&block[4..], 0));
            nibbles(&mut record[codes(b)..], &block[8..24]);
        }
        DType::Q8_0 => {
            half(&mut record[b * 32..], &block[0..2]);
            let out = &mut record[codes(b)..];
            (0..8).for_each(|j| put(out, j * 16 + r, dw(&block[2..], j) ^ 0x8080_8080));
        }
        DType::Q4_K | DType::Q5_K => {
            half(record, &block[0..2]);
            half(&mut record[32..], &block[2..4]);
            for s in 0..8 {
                let (sc, min) = scale_min_k4(s, &block[4..16]);
                record[64 + s * 16 + r] = sc;
                record[192 + s * 16 + r] = min;
            }
            let five = dtype == DType::Q5_K;
            let qs = if five { &block[48..] } else { &block[16..] };
            if five {
                let qh = &block[16..48];
                for s in 0..8 {
                    let bits = (0..8).fold(0u32, |acc, q| {
                        let v = (dw(qh, q) >> s) & 0x0101_0101;
                        acc | ((v | v >> 7 | v >> 14 | v >> 21) & 15) << (4 * q)
                    });
                    masks(&mut record[high(s)..], bits);
                }
            }
            // A chunk of 32 bytes holds two blocks: one in its low nibbles, one in its high.
            for c in 0..4 {
                for j in 0..4 {
                    let (x, y) = (dw(&qs[c * 32..], j), dw(&qs[c * 32..], j + 4));
                    put(&mut record[codes(2 * c)..], j * 16 + r, (x & LOW) | (y & LOW) << 4);
                    put(&mut record[codes(2 * c + 1)..], j * 16 + r, (x >> 4 & LOW) | (y & !LOW));
                }
            }
        }
        DType::Q6_K => {
            let (ql, qh, sc, d) = (&block[0..128], &block[128..192], &block[192..208], &block[208..210]);
            half(record, d);
            for (s, &sc) in sc.iter().enumerate() {
                record[64 + s * 16 + r] = sc;
            }
            for s in 0..8 {
                // Block s: half s/4, of whose four quarters (s mod 4) gives byte range, nibble and bit pair.
                let (h, quarter) = (s / 4, s % 4);
                let lo = &ql[h * 64 + (quarter % 2) * 32..];
                let hi = &qh[h * 32..];
                let nibble = |j: usize| if quarter < 2 { dw(lo, j) & LOW } else { dw(lo, j) >> 4 & LOW };
                let pair = |q: usize| dw(hi, q) >> (2 * quarter) & 0x0303_0303;
                let out = &mut record[codes(s)..];
                (0..4).for_each(|j| put(out, j * 16 + r, nibble(j) | nibble(j + 4) << 4));
                let bits = &mut record[high(s)..];
                for l in 0..2 {
                    let v = (0..4).fold(0, |acc, q| acc | pair(l * 4 + q) << (2 * q));
                    put(bits, l * 16 + r, v);
                }
            }
        }
        DType::F32 | DType::F16 | DType::BF16 => unreachable!("checked by RecordLayout::of"),
    }
}

/// The 6-bit scale and minimum of sub-block `s` of a q4_k/q5_k block (`b`: its 12 scale bytes).
fn scale_min_k4(s: usize, b: &[u8]) -> (u8, u8) {
    if s < 4 {
        (b[s] & 63, b[s + 4] & 63)
    } else {
        ((b[s + 4] & 15) | (b[s - 4] >> 6) << 4, (b[s + 4] >> 4) | (b[s] >> 6) << 4)
    }
}

/// Packs a whole weight on this thread into newly allocated memory. Loading a model instead packs many weights in
/// parallel into one arena ([`pack_group`]).
pub fn pack(w: &Tensor) -> Packed {
    let (n, k) = (w.rows(), w.cols());
    let len = Packed::size(w.dtype, n, k).expect("f32 is not packed");
    let mut map = memmap2::MmapMut::map_anon(len.max(1)).expect("out of memory");
    let groups = n.div_ceil(GROUP);
    for (g, out) in map.chunks_exact_mut((len / groups.max(1)).max(1)).enumerate().take(groups) {
        pack_group(w, g, out);
    }
    let map = map.make_read_only().expect("a mapping can be made read-only");
    let data = Bytes::from_anonymous(map).slice(0, len).expect("as long as the map");
    Packed::new(w.dtype, n, k, data)
}
