//! Q4_K: 256 elements in 144 bytes: f16 d, f16 dmin, 12 bytes of 6-bit scales and minima of 32 elements each, 128 bytes of
//! nibbles, of which 32 hold 64 elements; x = d·sc·q - dmin·m.

use super::parts::{bits, put_bits, put_sub_scales, sub_scales};
use super::{BlockFormat, BlockScales, Scales};

/// See the file's header.
#[derive(Debug)]
#[allow(non_camel_case_types)]
pub struct Q4_K;

impl BlockFormat for Q4_K {
    const NAME: &'static str = "q4_k";
    const GGML: u32 = 12;
    const LEN: usize = 256;
    const BYTES: usize = 144;
    const BITS: u32 = 4;
    const SCALES: Scales = Scales::SuperMin;
    const STD: f32 = 4.6098;

    #[inline(always)]
    fn codes(block: &[u8], i: usize) -> [u8; 32] {
        bits::<4>(&block[16 + i / 2 * 32..], i % 2 * 4)
    }

    fn put_codes(codes: &[u8; 32], i: usize, block: &mut [u8]) {
        put_bits::<4>(codes, 0, &mut block[16 + i / 2 * 32..], i % 2 * 4);
    }

    #[inline(always)]
    fn scales(block: &[u8]) -> BlockScales {
        let (subs, sub_mins) = sub_scales(&block[4..16]);
        BlockScales { subs, sub_mins, ..BlockScales::scale_and_min(block) }
    }

    fn put_scales(scales: &BlockScales, block: &mut [u8]) {
        block[..2].copy_from_slice(&scales.d.to_le_bytes());
        block[2..4].copy_from_slice(&scales.m.to_le_bytes());
        put_sub_scales(&scales.subs, &scales.sub_mins, &mut block[4..16]);
    }
}
