//! Q8_0: 32 elements in 34 bytes: f16 d, 32 signed bytes; x = d·q. Codes are unsigned here: the byte plus 128.

use super::parts::flipped;
use super::{BlockFormat, BlockScales, Scales};

/// See the file's header.
#[derive(Debug)]
#[allow(non_camel_case_types)]
pub struct Q8_0;

impl BlockFormat for Q8_0 {
    const NAME: &'static str = "q8_0";
    const GGML: u32 = 8;
    const LEN: usize = 32;
    const BYTES: usize = 34;
    const BITS: u32 = 8;
    const ZERO: u8 = 128;
    const SCALES: Scales = Scales::Scale;
    const STD: f32 = 73.902;

    #[inline(always)]
    fn codes(block: &[u8], _: usize) -> [u8; 32] {
        flipped(&block[2..34])
    }

    fn put_codes(codes: &[u8; 32], _: usize, block: &mut [u8]) {
        block[2..34].copy_from_slice(&flipped(codes));
    }

    #[inline(always)]
    fn scales(block: &[u8]) -> BlockScales {
        BlockScales::scale(block)
    }

    fn put_scales(scales: &BlockScales, block: &mut [u8]) {
        block[..2].copy_from_slice(&scales.d.to_le_bytes());
    }
}
