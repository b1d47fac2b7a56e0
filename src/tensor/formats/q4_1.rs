//! Q4_1: 32 elements in 20 bytes: f16 d, f16 m, 16 bytes of nibbles; x = d·q + m.

use super::parts::{nibbles, put_nibbles};
use super::{BlockFormat, BlockScales, Scales};

/// See the file's header.
#[derive(Debug)]
#[allow(non_camel_case_types)]
pub struct Q4_1;

impl BlockFormat for Q4_1 {
    const NAME: &'static str = "q4_1";
    const GGML: u32 = 3;
    const LEN: usize = 32;
    const BYTES: usize = 20;
    const BITS: u32 = 4;
    const SCALES: Scales = Scales::ScaleMin;
    const STD: f32 = 4.6098;

    #[inline(always)]
    fn codes(block: &[u8], _: usize) -> [u8; 32] {
        nibbles(&block[4..20])
    }

    fn put_codes(codes: &[u8; 32], _: usize, block: &mut [u8]) {
        put_nibbles(codes, &mut block[4..20]);
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
