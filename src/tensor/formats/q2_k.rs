//! Q2_K: 256 elements in 84 bytes: 16 bytes with a scale (low) and a minimum (high) of four bits, each of 16 elements, 64 bytes
//! of bit pairs, f16 d, f16 dmin; x = d·sc·q - dmin·m.
//!
//! Each half of 128 elements has 32 bytes of pairs, a quarter in each pair.

use super::parts::{bits, put_bits};
use super::{BlockFormat, BlockScales, Scales, word};

/// See the file's header.
#[derive(Debug)]
#[allow(non_camel_case_types)]
pub struct Q2_K;

impl BlockFormat for Q2_K {
    const NAME: &'static str = "q2_k";
    const GGML: u32 = 10;
    const LEN: usize = 256;
    const BYTES: usize = 84;
    const BITS: u32 = 2;
    const SCALES: Scales = Scales::SuperMin;
    const SUB: usize = 16;
    const SUB_MAX: u8 = 15;
    const STD: f32 = 1.1180;

    #[inline(always)]
    fn codes(block: &[u8], i: usize) -> [u8; 32] {
        bits::<2>(&block[16 + i / 4 * 32..], i % 4 * 2)
    }

    fn put_codes(codes: &[u8; 32], i: usize, block: &mut [u8]) {
        put_bits::<2>(codes, 0, &mut block[16 + i / 4 * 32..], i % 4 * 2);
    }

    #[inline(always)]
    fn scales(block: &[u8]) -> BlockScales {
        let both: [u8; 16] = block[..16].try_into().expect("16 bytes");
        let (subs, sub_mins) = (both.map(|b| b & 15), both.map(|b| b >> 4));
        BlockScales { d: word(block, 80), m: word(block, 82), subs, sub_mins }
    }

    fn put_scales(scales: &BlockScales, block: &mut [u8]) {
        for (i, b) in block[..16].iter_mut().enumerate() {
            *b = scales.subs[i] | scales.sub_mins[i] << 4;
        }
        block[80..82].copy_from_slice(&scales.d.to_le_bytes());
        block[82..84].copy_from_slice(&scales.m.to_le_bytes());
    }
}
