//! One file per quantised weight type: where its blocks hold codes and scales, and what they stand for.
//!
//! All code that reads or writes blocks goes through [`BlockFormat`]: the reference, embeddings, the packers of the CPU's and
//! the accelerator's layouts, quantisation, random models. A type is a file here, its name in the table of [`with_format`], and
//! a variant of [`DType`].
//!
//! source     ggml-common.h (`block_*`) and gguf-py/gguf/quants.py of llama.cpp; `tests/fixtures/dequant.json` holds blocks
//!            with the values that gguf-py decodes them to

mod dtype;
mod encode;
mod iq4_nl;
mod iq4_xs;
mod mxfp4;
mod parts;
mod q2_k;
mod q3_k;
mod q4_0;
mod q4_1;
mod q4_k;
mod q5_0;
mod q5_1;
mod q5_k;
mod q6_k;
mod q8_0;

pub use dtype::DType;
pub use encode::quantise_row;
use half::{bf16, f16};
pub use iq4_nl::IQ4_NL;
pub use iq4_xs::IQ4_XS;
pub use mxfp4::MXFP4;
pub use q2_k::Q2_K;
pub use q3_k::Q3_K;
pub use q4_0::Q4_0;
pub use q4_1::Q4_1;
pub use q4_k::Q4_K;
pub use q5_0::Q5_0;
pub use q5_1::Q5_1;
pub use q5_k::Q5_K;
pub use q6_k::Q6_K;
pub use q8_0::Q8_0;

/// Evaluates `$body` with the [`BlockFormat`] of a quantised dtype as the type `$F`. Its last lines are the table of formats.
macro_rules! with_format {
    (@ $dtype:expr, $F:ident => $body:expr; $($T:ident)*) => {
        match $dtype {
            $($crate::tensor::DType::$T => {
                type $F = $crate::tensor::formats::$T;
                $body
            })*
            $crate::tensor::DType::F32 | $crate::tensor::DType::F16 | $crate::tensor::DType::BF16 => {
                unreachable!()
            }
        }
    };
    ($dtype:expr, $F:ident => $body:expr) => {
        $crate::tensor::formats::with_format!(@ $dtype, $F => $body;
            IQ4_NL IQ4_XS MXFP4 Q2_K Q3_K Q4_0 Q4_1 Q4_K Q5_0 Q5_1 Q5_K Q6_K Q8_0)
    };
}
pub(crate) use with_format;

/// A quantised weight type: blocks of codes with scales.
///
/// An element is `scale·value + min`, where the product and the sum round to f32 one after the other, as in ggml.
pub trait BlockFormat {
    /// The field's name for it: `q4_k`.
    const NAME: &'static str;
    /// ggml's type number (GGUF tensor info).
    const GGML: u32;
    /// Elements of a block: 32 or 256.
    const LEN: usize;
    /// Bytes of a block.
    const BYTES: usize;
    /// Bits of a code: 2, 3, 4, 5, 6 or 8.
    const BITS: u32;
    /// What stands for a value of zero: the value of code `c` is `c - ZERO`, or `TABLE[c] - ZERO`. Zero in formats with minima.
    const ZERO: u8 = 0;
    /// The values of codes plus [`BlockFormat::ZERO`], where they are not the codes themselves: the table of a byte shuffle.
    const TABLE: Option<&'static [u8; 16]> = None;
    /// Which scales a block has.
    const SCALES: Scales;
    /// Elements that share a scale: 32 or 16.
    const SUB: usize = 32;
    /// The largest scale or minimum of a sub-block.
    const SUB_MAX: u8 = 63;
    /// Standard deviation of the values of uniformly distributed codes; about zero if there are no minima.
    const STD: f32;

    /// The codes of elements `32·i..32·(i + 1)` of a block.
    fn codes(block: &[u8], i: usize) -> [u8; 32];
    /// The inverse of [`BlockFormat::codes`]; other codes and scales stay as they are.
    fn put_codes(codes: &[u8; 32], i: usize, block: &mut [u8]);
    /// The scales of a block.
    fn scales(block: &[u8]) -> BlockScales;
    /// The inverse of [`BlockFormat::scales`]; codes stay as they are.
    fn put_scales(scales: &BlockScales, block: &mut [u8]);

    /// The values of elements `32·i..32·(i + 1)` of a block, plus [`BlockFormat::ZERO`].
    #[inline(always)]
    fn values(block: &[u8], i: usize) -> [u8; 32] {
        let mut values = Self::codes(block, i);
        if let Some(table) = Self::TABLE {
            values.iter_mut().for_each(|v| *v = table[usize::from(*v & 15)]);
        }
        values
    }

    /// Scale and minimum of the elements `sub·SUB..(sub + 1)·SUB`; a minimum of -0 where there is none, as adding +0 would
    /// turn -0 into +0.
    #[inline(always)]
    fn scale_min(s: &BlockScales, sub: usize) -> (f32, f32) {
        match Self::SCALES {
            Scales::Scale => (float(s.d), -0.0),
            Scales::PowerOfTwo => (f32::from_bits(u32::from(s.d) << 16), -0.0),
            Scales::ScaleMin => (float(s.d), float(s.m)),
            Scales::SuperMin => {
                (float(s.d) * f32::from(s.subs[sub]), -(float(s.m) * f32::from(s.sub_mins[sub])))
            }
            Scales::SuperSigned => (float(s.d) * f32::from(s.subs[sub] as i8), -0.0),
        }
    }

    /// Decodes a block.
    fn decode(block: &[u8], out: &mut [f32]) {
        let scales = Self::scales(block);
        for (i, out) in out.chunks_exact_mut(32).enumerate() {
            let values = Self::values(block, i);
            for (j, (x, &v)) in out.iter_mut().zip(&values).enumerate() {
                let (d, m) = Self::scale_min(&scales, (32 * i + j) / Self::SUB);
                *x = d * (i32::from(v) - i32::from(Self::ZERO)) as f32 + m;
            }
        }
    }
}

/// Which scales a block has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scales {
    /// One scale `d`.
    Scale,
    /// One scale `d`, a power of two in bf16, which holds more of them than f16.
    PowerOfTwo,
    /// A scale `d` and a minimum `m`.
    ScaleMin,
    /// For each sub-block an unsigned scale and minimum of a byte, times `d` and minus `m`.
    SuperMin,
    /// For each sub-block a signed scale of a byte, times `d`.
    SuperSigned,
}

/// The scales of a block as it stores them; what [`Scales`] does not mention is zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockScales {
    /// f16 (bf16 for [`Scales::PowerOfTwo`]): the scale, or what the sub-blocks' scales are multiplied by.
    pub d: u16,
    /// f16: the minimum, or what the sub-blocks' minima are multiplied by.
    pub m: u16,
    /// Scales of sub-blocks.
    pub subs: [u8; 16],
    /// Minima of sub-blocks.
    pub sub_mins: [u8; 16],
}

impl BlockScales {
    /// The scale in bytes 0..2.
    #[inline(always)]
    fn scale(block: &[u8]) -> BlockScales {
        BlockScales { d: word(block, 0), ..BlockScales::default() }
    }

    /// Scale and minimum in bytes 0..4.
    #[inline(always)]
    fn scale_and_min(block: &[u8]) -> BlockScales {
        BlockScales { m: word(block, 2), ..BlockScales::scale(block) }
    }
}

/// The little-endian word at `at`.
#[inline(always)]
fn word(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

/// The value of an f16. Inlined, so that it is an instruction in kernels whose features have one.
#[inline(always)]
fn float(bits: u16) -> f32 {
    f16::from_bits(bits).to_f32()
}

/// Sets the scale `d` and the minimum `m` of a block, and leaves codes and sub-scales as they are: makes numbers of random
/// bytes. Blocks of floats have none; where scales are powers of two, `d` becomes one that is not larger.
pub fn set_scales(dtype: DType, block: &mut [u8], d: f32, m: f32) {
    if dtype.is_quantised() {
        with_format!(dtype, F => {
            let power = F::SCALES == Scales::PowerOfTwo;
            let d = if power { bf16::from_f32(d).to_bits() } else { f16::from_f32(d).to_bits() };
            let m = f16::from_f32(m).to_bits();
            F::put_scales(&BlockScales { d, m, ..F::scales(block) }, block);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_from_a_block_is_written_back_to_it() {
        for dtype in DType::QUANTISED {
            let block: Vec<u8> = (0..dtype.block_bytes()).map(|i| (i * 151 + i / 7) as u8).collect();
            with_format!(dtype, F => {
                let mut back = vec![0xa5; F::BYTES];
                for i in 0..F::LEN / 32 {
                    let codes = F::codes(&block, i);
                    assert!(codes.iter().all(|&c| u32::from(c) < 1 << F::BITS), "{dtype}");
                    F::put_codes(&codes, i, &mut back);
                }
                F::put_scales(&F::scales(&block), &mut back);
                assert_eq!(back, block, "{dtype}");
            });
        }
    }
}
