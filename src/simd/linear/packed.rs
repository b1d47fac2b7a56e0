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
//! | q2_k | d f16, dmin f16, sc (low) and min nibbles [16] | | pairs of bits [128] |
//! | q3_k | d f16, 32 unused, sc i8 [16] | masks [64] | pairs of bits [128] |
//! | iq4_nl | d f16 [2] | | nibbles [256] |
//! | iq4_xs | d f16, 32 unused, sc i8 [8] | | nibbles [256] |
//! | mxfp4 | d bf16 [2] | | nibbles [256] |
//! | q6_k | d f16, 32 unused, sc i8 [16] | pairs of bits [128] | nibbles [256] |
//! | bf16, f16 | | | bf16 [16 pairs][16 rows][2]: a B tile; f16 is rounded, to nearest even |
//!
//! A block's high bits lie directly before its codes, not together with those of other blocks, so that a kernel reads
//! one ascending stream, which hardware prefetchers follow.
//!
//! *Nibbles* of a block of 32: four lines of 64 bytes; line j holds, for each row, a dword with elements
//! 4j..4j+4 in the low nibbles and 16+4j..16+4j+4 in the high ones. So one 64-byte load gives two operands
//! of vpdpbusd with a row per lane: no shuffle, no horizontal sum. *Masks*: for each of the 8 quads of
//! elements a 64-bit mask, bit 4·row + i: the highest bit. *Pairs of bits*: two lines; the byte of element i
//! of quad q has its upper two bits at 2·(q mod 4) of line q/4.
//!
//! Cost over the file's own layout: none for the 32-blocks with f16 scales and q2_k, 5.9% for mxfp4, 5.5% for q3_k, 2.9% for iq4_xs, 2.8% for
//! q4_k, 2.3% for q5_k, 1% for q6_k.

use super::kernel::GROUP;
use crate::tensor::formats::{BlockFormat, Scales, with_format};
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
        match dtype {
            DType::F32 => None,
            DType::F16 | DType::BF16 => Some(RecordLayout::sized(64, 0, 0, 2 * 32 * GROUP)),
            quantised => Some(with_format!(quantised, F => RecordLayout::new::<F>())),
        }
    }

    /// The layout of a quantised format.
    pub const fn new<F: BlockFormat>() -> RecordLayout {
        let (record_k, scale_bytes) = match F::SCALES {
            Scales::Scale | Scales::PowerOfTwo => (64, 64),
            Scales::ScaleMin => (64, 128),
            Scales::SuperMin if nibble_scales::<F>() => (256, 64 + 256 / F::SUB * GROUP),
            Scales::SuperMin => (256, 64 + 2 * (256 / F::SUB) * GROUP),
            Scales::SuperSigned => (256, 64 + 256 / F::SUB * GROUP),
        };
        let (high_bytes, code_bytes) = match F::BITS {
            8 => (0, 512),
            2 => (0, 128),
            3 => (64, 128),
            bits => (64 * (bits as usize - 4), 256),
        };
        RecordLayout::sized(record_k, scale_bytes, high_bytes, code_bytes)
    }

    const fn sized(record_k: usize, scale_bytes: usize, high_bytes: usize, code_bytes: usize) -> Self {
        let record_bytes = scale_bytes + record_k / 32 * (high_bytes + code_bytes);
        RecordLayout { record_k, scale_bytes, high_bytes, code_bytes, record_bytes }
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

/// Whether a sub-block's scale (low) and minimum (high) share a byte of the record.
pub const fn nibble_scales<F: BlockFormat>() -> bool {
    F::SUB_MAX < 16
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
    #[inline]
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

/// The low four and two bits and the lowest bit of four bytes.
const LOW: u32 = 0x0f0f_0f0f;
const PAIRS: u32 = 0x0303_0303;
const ONES: u32 = 0x0101_0101;

/// Packs rows `16·group..` of `w` into `out` (exactly one group's bytes).
pub fn pack_group(w: &Tensor, group: usize, out: &mut [u8]) {
    let layout = RecordLayout::of(w.dtype).expect("f32 is not packed");
    assert_eq!(out.len(), layout.group_bytes(w.cols()));
    let rows = GROUP.min(w.rows() - group * GROUP);
    if !w.dtype.is_quantised() {
        return pack_floats(w, group * GROUP, rows, out);
    }
    out.fill(0);
    with_format!(w.dtype, F => {
        let per_record = layout.record_k / F::LEN;
        for r in 0..rows {
            for (b, block) in w.row(group * GROUP + r).chunks_exact(F::BYTES).enumerate() {
                let record = &mut out[b / per_record * layout.record_bytes..][..layout.record_bytes];
                pack_block::<F>(r, b % per_record, block, record);
            }
        }
    });
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

/// Writes source block `block` (number `b` of its record) of row `r` into `record`, which was zero.
#[inline(always)]
fn pack_block<F: BlockFormat>(r: usize, b: usize, block: &[u8], record: &mut [u8]) {
    let layout = const { RecordLayout::new::<F>() };
    let s = F::scales(block);
    let mut put_half = |at: usize, bits: u16| record[at + r * 2..][..2].copy_from_slice(&bits.to_le_bytes());
    match F::SCALES {
        Scales::Scale | Scales::PowerOfTwo => put_half(b * 32, s.d),
        Scales::ScaleMin => {
            put_half(b * 32, s.d);
            put_half(64 + b * 32, s.m);
        }
        Scales::SuperMin => {
            put_half(0, s.d);
            put_half(32, s.m);
            let subs = F::LEN / F::SUB;
            for sub in 0..subs {
                let (scale, min) = (s.subs[sub], s.sub_mins[sub]);
                if nibble_scales::<F>() {
                    record[64 + sub * 16 + r] = scale | min << 4;
                } else {
                    record[64 + sub * 16 + r] = scale;
                    record[64 + (subs + sub) * 16 + r] = min;
                }
            }
        }
        Scales::SuperSigned => {
            put_half(0, s.d);
            (0..F::LEN / F::SUB).for_each(|sub| record[64 + sub * 16 + r] = s.subs[sub]);
        }
    }
    for i in 0..F::LEN / 32 {
        let codes = F::codes(block, i);
        let (high, low) = record[layout.high(b + i)..].split_at_mut(layout.high_bytes);
        let quad = |q: usize| dw(&codes, q);
        if F::BITS == 8 {
            (0..8).for_each(|q| put(low, q * 16 + r, quad(q)));
            continue;
        }
        // Pairs of bits from bit `at` on, as two lines hold them.
        let put_pairs = |lines: &mut [u8], at: u32| {
            for l in 0..2 {
                let pairs = (0..4).fold(0, |v, q| v | (quad(l * 4 + q) >> at & PAIRS) << (2 * q));
                put(lines, l * 16 + r, pairs);
            }
        };
        if F::BITS < 4 {
            put_pairs(low, 0);
        } else {
            (0..4).for_each(|j| put(low, j * 16 + r, (quad(j) & LOW) | (quad(j + 4) & LOW) << 4));
        }
        if F::BITS == 5 || F::BITS == 3 {
            for q in [0, 2, 4, 6] {
                // The product gathers the highest bits of two quads in its top byte.
                let highest = |q| u64::from(quad(q) >> (F::BITS - 1) & ONES);
                let both = highest(q) | highest(q + 1) << 32;
                let bits = (both.wrapping_mul(0x0102_0408_1020_4080) >> 56) as u8;
                high[q * 8 + r / 2] |= (bits & 15) << (4 * (r % 2));
                high[q * 8 + 8 + r / 2] |= (bits >> 4) << (4 * (r % 2));
            }
        } else if F::BITS == 6 {
            put_pairs(high, 4);
        }
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
