//! IQ4_NL: 32 elements in 18 bytes: f16 d, 16 bytes of nibbles (0..16 low, 16..32 high), each the index of a value in a table
//! whose steps grow with the distance from zero; x = d·v.

use super::parts::{nibbles, put_nibbles};
use super::{BlockFormat, BlockScales, Scales};

/// See the file's header.
#[derive(Debug)]
#[allow(non_camel_case_types)]
pub struct IQ4_NL;

/// The values of codes, plus 128.
pub(super) const VALUES: [u8; 16] = [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241];

impl BlockFormat for IQ4_NL {
    const NAME: &'static str = "iq4_nl";
    const GGML: u32 = 20;
    const LEN: usize = 32;
    const BYTES: usize = 18;
    const BITS: u32 = 4;
    const ZERO: u8 = 128;
    const TABLE: Option<&'static [u8; 16]> = Some(&VALUES);
    const SCALES: Scales = Scales::Scale;
    const STD: f32 = 67.439;

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
