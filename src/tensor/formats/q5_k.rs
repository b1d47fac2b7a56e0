//! Q5_K: 256 elements in 176 bytes: as Q4_K, with 32 bytes of fifth bits before the nibbles: bit s of byte l is that of
//! element l of sub-block s; x = d·sc·q - dmin·m.

use super::parts::{bits, put_bits, put_sub_scales, sub_scales, with_high};
use super::{BlockFormat, BlockScales, Scales};

/// See the file's header.
#[derive(Debug)]
#[allow(non_camel_case_types)]
pub struct Q5_K;

impl BlockFormat for Q5_K {
    const NAME: &'static str = "q5_k";
    const GGML: u32 = 13;
    const LEN: usize = 256;
    const BYTES: usize = 176;
    const BITS: u32 = 5;
    const SCALES: Scales = Scales::SuperMin;
    const STD: f32 = 9.2331;

    #[inline(always)]
    fn codes(block: &[u8], i: usize) -> [u8; 32] {
        let low = bits::<4>(&block[48 + i / 2 * 32..], i % 2 * 4);
        let high = bits::<1>(&block[16..], i);
        with_high::<4>(low, high)
    }

    fn put_codes(codes: &[u8; 32], i: usize, block: &mut [u8]) {
        put_bits::<4>(codes, 0, &mut block[48 + i / 2 * 32..], i % 2 * 4);
        put_bits::<1>(codes, 4, &mut block[16..], i);
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
