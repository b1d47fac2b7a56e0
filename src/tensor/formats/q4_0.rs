//! Q4_0: 32 elements in 18 bytes: f16 d, 16 bytes of nibbles (0..16 low, 16..32 high); x = d·(q - 8).

use super::parts::{nibbles, put_nibbles};
use super::{BlockFormat, BlockScales, Scales};

/// See the file's header.
#[derive(Debug)]
#[allow(non_camel_case_types)]
pub struct Q4_0;

impl BlockFormat for Q4_0 {
    const NAME: &'static str = "q4_0";
    const GGML: u32 = 2;
    const LEN: usize = 32;
    const BYTES: usize = 18;
    const BITS: u32 = 4;
    const ZERO: u8 = 8;
    const SCALES: Scales = Scales::Scale;
    const STD: f32 = 4.6368;

    #[inline(always)]
    fn codes(block: &[u8], _: usize) -> [u8; 32] {
        nibbles(&block[2..18])
    }

    fn put_codes(codes: &[u8; 32], _: usize, block: &mut [u8]) {
        put_nibbles(codes, &mut block[2..18]);
    }

    #[inline(always)]
    fn scales(block: &[u8]) -> BlockScales {
        BlockScales::scale(block)
    }

    fn put_scales(scales: &BlockScales, block: &mut [u8]) {
        block[..2].copy_from_slice(&scales.d.to_le_bytes());
    }
}
