//! Q6_K: 256 elements in 210 bytes: 128 bytes of nibbles, 64 bytes of bit pairs, 16 signed scales of 16 elements each, f16 d;
//! x = d·sc·(q - 32).
//!
//! Each half of 128 elements has 64 bytes of nibbles (quarters 0 and 1 low, 2 and 3 high) and 32 bytes of pairs, a quarter in
//! each pair.

use super::parts::{bits, put_bits, with_high};
use super::{BlockFormat, BlockScales, Scales, word};

/// See the file's header.
#[derive(Debug)]
#[allow(non_camel_case_types)]
pub struct Q6_K;

impl BlockFormat for Q6_K {
    const NAME: &'static str = "q6_k";
    const GGML: u32 = 14;
    const LEN: usize = 256;
    const BYTES: usize = 210;
    const BITS: u32 = 6;
    const ZERO: u8 = 32;
    const SCALES: Scales = Scales::SuperSigned;
    const SUB: usize = 16;
    const SUB_MAX: u8 = 127;
    const STD: f32 = 18.480;

    #[inline(always)]
    fn codes(block: &[u8], i: usize) -> [u8; 32] {
        let (half, quarter) = (i / 4, i % 4);
        let low = bits::<4>(&block[half * 64 + quarter % 2 * 32..], quarter / 2 * 4);
        let high = bits::<2>(&block[128 + half * 32..], quarter * 2);
        with_high::<4>(low, high)
    }

    fn put_codes(codes: &[u8; 32], i: usize, block: &mut [u8]) {
        let (half, quarter) = (i / 4, i % 4);
        put_bits::<4>(codes, 0, &mut block[half * 64 + quarter % 2 * 32..], quarter / 2 * 4);
        put_bits::<2>(codes, 4, &mut block[128 + half * 32..], quarter * 2);
    }

    #[inline(always)]
    fn scales(block: &[u8]) -> BlockScales {
        let subs = block[192..208].try_into().expect("16 bytes");
        BlockScales { d: word(block, 208), subs, ..BlockScales::default() }
    }

    fn put_scales(scales: &BlockScales, block: &mut [u8]) {
        block[192..208].copy_from_slice(&scales.subs);
        block[208..210].copy_from_slice(&scales.d.to_le_bytes());
    }
}
