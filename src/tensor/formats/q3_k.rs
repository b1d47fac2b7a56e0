//! Q3_K: 256 elements in 110 bytes: 32 bytes of third bits, 64 bytes of bit pairs, 12 bytes of 16 scales of six bits and 16
//! elements each, f16 d; x = d·(sc - 32)·(q - 4).
//!
//! Each half of 128 elements has 32 bytes of pairs, a quarter in each pair. Bit i of third byte j is that of element j of the
//! 32 elements i.

use super::parts::{bits, put_bits, with_high};
use super::{BlockFormat, BlockScales, Scales, word};

/// See the file's header.
#[derive(Debug)]
#[allow(non_camel_case_types)]
pub struct Q3_K;

impl BlockFormat for Q3_K {
    const NAME: &'static str = "q3_k";
    const GGML: u32 = 11;
    const LEN: usize = 256;
    const BYTES: usize = 110;
    const BITS: u32 = 3;
    const ZERO: u8 = 4;
    const SCALES: Scales = Scales::SuperSigned;
    const SUB: usize = 16;
    const SUB_MAX: u8 = 31;
    const STD: f32 = 2.3452;

    #[inline(always)]
    fn codes(block: &[u8], i: usize) -> [u8; 32] {
        let pairs = bits::<2>(&block[32 + i / 4 * 32..], i % 4 * 2);
        with_high::<2>(pairs, bits::<1>(block, i))
    }

    fn put_codes(codes: &[u8; 32], i: usize, block: &mut [u8]) {
        put_bits::<2>(codes, 0, &mut block[32 + i / 4 * 32..], i % 4 * 2);
        put_bits::<1>(codes, 2, &mut block[..32], i);
    }

    /// Lower four bits: eight bytes, scales 0 to 7 in the low nibbles; upper two: four bytes, scales 4j.. in pair j.
    #[inline(always)]
    fn scales(block: &[u8]) -> BlockScales {
        let mut s = BlockScales { d: word(block, 108), ..BlockScales::default() };
        for (i, sub) in s.subs.iter_mut().enumerate() {
            let low = block[96 + i % 8] >> (4 * (i / 8)) & 15;
            *sub = (low | (block[104 + i % 4] >> (2 * (i / 4)) & 3) << 4).wrapping_sub(32);
        }
        s
    }

    fn put_scales(scales: &BlockScales, block: &mut [u8]) {
        block[96..108].fill(0);
        for (i, sub) in scales.subs.iter().enumerate() {
            let bits = sub.wrapping_add(32);
            block[96 + i % 8] |= (bits & 15) << (4 * (i / 8));
            block[104 + i % 4] |= (bits >> 4 & 3) << (2 * (i / 4));
        }
        block[108..110].copy_from_slice(&scales.d.to_le_bytes());
    }
}
