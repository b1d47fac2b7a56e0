//! Q5_1: 32 elements in 24 bytes: f16 d, f16 m, u32 of fifth bits, 16 bytes of nibbles; x = d·q + m.

use super::parts::{nibbles, put_fifth_bits, put_nibbles, spread, with_high};
use super::{BlockFormat, BlockScales, Scales};

/// See the file's header.
#[derive(Debug)]
#[allow(non_camel_case_types)]
pub struct Q5_1;

impl BlockFormat for Q5_1 {
    const NAME: &'static str = "q5_1";
    const GGML: u32 = 7;
    const LEN: usize = 32;
    const BYTES: usize = 24;
    const BITS: u32 = 5;
    const SCALES: Scales = Scales::ScaleMin;
    const STD: f32 = 9.2331;

    #[inline(always)]
    fn codes(block: &[u8], _: usize) -> [u8; 32] {
        with_high::<4>(nibbles(&block[8..24]), spread(&block[4..8]))
    }

    fn put_codes(codes: &[u8; 32], _: usize, block: &mut [u8]) {
        put_nibbles(codes, &mut block[8..24]);
        put_fifth_bits(codes, &mut block[4..8]);
    }

    #[inline(always)]
    fn scales(block: &[u8]) -> BlockScales {
        BlockScales::scale_and_min(block)
    }

    fn put_scales(scales: &BlockScales, block: &mut [u8]) {
        block[..2].copy_from_slice(&scales.d.to_le_bytes());
        block[2..4].copy_from_slice(&scales.m.to_le_bytes());
    }
}
