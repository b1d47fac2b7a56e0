//! Q5_0: 32 elements in 22 bytes: f16 d, u32 of fifth bits, 16 bytes of nibbles; x = d·(q - 16).

use super::parts::{nibbles, put_fifth_bits, put_nibbles, spread, with_high};
use super::{BlockFormat, BlockScales, Scales};

/// See the file's header.
#[derive(Debug)]
#[allow(non_camel_case_types)]
pub struct Q5_0;

impl BlockFormat for Q5_0 {
    const NAME: &'static str = "q5_0";
    const GGML: u32 = 6;
    const LEN: usize = 32;
    const BYTES: usize = 22;
    const BITS: u32 = 5;
    const ZERO: u8 = 16;
    const SCALES: Scales = Scales::Scale;
    const STD: f32 = 9.2466;

    #[inline(always)]
    fn codes(block: &[u8], _: usize) -> [u8; 32] {
        with_high::<4>(nibbles(&block[6..22]), spread(&block[2..6]))
    }

    fn put_codes(codes: &[u8; 32], _: usize, block: &mut [u8]) {
        put_nibbles(codes, &mut block[6..22]);
        put_fifth_bits(codes, &mut block[2..6]);
    }

    #[inline(always)]
    fn scales(block: &[u8]) -> BlockScales {
        BlockScales::scale(block)
    }

    fn put_scales(scales: &BlockScales, block: &mut [u8]) {
        block[..2].copy_from_slice(&scales.d.to_le_bytes());
    }
}
