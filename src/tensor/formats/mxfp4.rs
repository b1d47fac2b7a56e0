//! MXFP4 (OCP Microscaling Formats 1.0): 32 elements in 17 bytes: a scale of eight bits, e, and 16 bytes of nibbles (0..16 low,
//! 16..32 high) of floats with a sign, two bits of exponent and one of mantissa; x = 2^(e - 127)·v. Values are doubled here, to
//! be integers: 0 to 12, and 2^(e - 128) is the scale.

use super::parts::{nibbles, put_nibbles};
use super::{BlockFormat, BlockScales, Scales};

/// See the file's header.
#[derive(Debug)]
pub struct MXFP4;

/// The doubled values of codes, plus 128.
const VALUES: [u8; 16] = [128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116];

impl BlockFormat for MXFP4 {
    const NAME: &'static str = "mxfp4";
    const GGML: u32 = 39;
    const LEN: usize = 32;
    const BYTES: usize = 17;
    const BITS: u32 = 4;
    const ZERO: u8 = 128;
    const TABLE: Option<&'static [u8; 16]> = Some(&VALUES);
    const SCALES: Scales = Scales::PowerOfTwo;
    const STD: f32 = 5.8523;

    #[inline(always)]
    fn codes(block: &[u8], _: usize) -> [u8; 32] {
        nibbles(&block[1..17])
    }

    fn put_codes(codes: &[u8; 32], _: usize, block: &mut [u8]) {
        put_nibbles(codes, &mut block[1..17]);
    }

    /// The bits of the bf16 2^(e - 128), which is subnormal for the least two.
    #[inline(always)]
    fn scales(block: &[u8]) -> BlockScales {
        let d = match block[0] {
            0 => 0x20,
            1 => 0x40,
            e => (u16::from(e) - 1) << 7,
        };
        BlockScales { d, ..BlockScales::default() }
    }

    /// Rounds a scale that is no power of two down.
    fn put_scales(scales: &BlockScales, block: &mut [u8]) {
        block[0] = match (scales.d >> 7) as u8 {
            0 => u8::from(scales.d & 0x40 != 0),
            exponent => exponent.saturating_add(1),
        };
    }
}
