//! IQ4_XS: 256 elements in 136 bytes: f16 d, u16 of the upper two bits of eight scales, four bytes of their lower nibbles, 128
//! bytes of nibbles, of which 16 hold 32 elements as in IQ4_NL, whose table they index; x = d·(sc - 32)·v.

use super::iq4_nl::VALUES;
use super::parts::{nibbles, put_nibbles};
use super::{BlockFormat, BlockScales, Scales, word};

/// See the file's header.
#[derive(Debug)]
#[allow(non_camel_case_types)]
pub struct IQ4_XS;

impl BlockFormat for IQ4_XS {
    const NAME: &'static str = "iq4_xs";
    const GGML: u32 = 23;
    const LEN: usize = 256;
    const BYTES: usize = 136;
    const BITS: u32 = 4;
    const ZERO: u8 = 128;
    const TABLE: Option<&'static [u8; 16]> = Some(&VALUES);
    const SCALES: Scales = Scales::SuperSigned;
    const SUB_MAX: u8 = 31;
    const STD: f32 = 67.439;

    #[inline(always)]
    fn codes(block: &[u8], i: usize) -> [u8; 32] {
        nibbles(&block[8 + 16 * i..][..16])
    }

    fn put_codes(codes: &[u8; 32], i: usize, block: &mut [u8]) {
        put_nibbles(codes, &mut block[8 + 16 * i..][..16]);
    }

    #[inline(always)]
    fn scales(block: &[u8]) -> BlockScales {
        let high = word(block, 2);
        let mut s = BlockScales::scale(block);
        for (i, sub) in s.subs[..8].iter_mut().enumerate() {
            let low = block[4 + i / 2] >> (4 * (i % 2)) & 15;
            *sub = (low | ((high >> (2 * i) & 3) as u8) << 4).wrapping_sub(32);
        }
        s
    }

    fn put_scales(scales: &BlockScales, block: &mut [u8]) {
        block[..8].fill(0);
        block[..2].copy_from_slice(&scales.d.to_le_bytes());
        for (i, sub) in scales.subs[..8].iter().enumerate() {
            let bits = sub.wrapping_add(32);
            block[2 + i / 4] |= (bits >> 4 & 3) << (2 * (i % 4));
            block[4 + i / 2] |= (bits & 15) << (4 * (i % 2));
        }
    }
}
