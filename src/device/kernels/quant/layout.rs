//! The layout of a packed matrix: tiles of 16 rows x 64 columns in the order of mma fragments, and their sizes.
//!
//! The layout is drawn in `cuda/include/quant_tile.cuh`. Rows are padded to 16 and columns to 64 with codes and scales
//! of zero; kernels read zeros of x there, so the padding adds nothing.

use crate::tensor::DType;
use crate::tensor::formats::{BlockFormat, Scales, with_format};

/// Rows and columns of a tile.
pub(super) const ROWS: usize = 16;
pub(super) const COLS: usize = 64;

/// How a format's codes and scales are stored in a tile: sizes in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Format {
    pub bits: usize,
    pub low: usize,
    pub high: usize,
    pub scales: usize,
    /// Super-scales behind every 4 tiles; 0 without super-blocks.
    pub super_scales: usize,
}

impl Format {
    pub const fn of(dtype: DType) -> Option<Format> {
        match dtype {
            DType::F32 | DType::F16 | DType::BF16 => None,
            quantised => with_format!(quantised, F => Format::new::<F>()),
        }
    }

    /// `None` where codes have two or three bits, or index a table other than that of four-bit floats: there are no kernels.
    const fn new<F: BlockFormat>() -> Option<Format> {
        let floats = matches!(F::SCALES, Scales::PowerOfTwo);
        if F::TABLE.is_some() && !floats || F::BITS < 4 {
            return None;
        }
        let bits = F::BITS as usize;
        let (scales, super_scales) = match F::SCALES {
            Scales::Scale | Scales::PowerOfTwo => (64, 0),
            Scales::ScaleMin => (128, 0),
            Scales::SuperMin => (64, 64),
            Scales::SuperSigned => (64, 32),
        };
        let (low, high) = match bits {
            8 => (1024, 0),
            bits => (512, (bits - 4) * 128),
        };
        Some(Format { bits, low, high, scales, super_scales })
    }

    /// Tiles that share super-scales.
    pub fn group(self) -> usize {
        if self.super_scales > 0 { 4 } else { 1 }
    }

    pub fn body(self) -> usize {
        self.low + self.high + self.scales
    }

    pub fn group_bytes(self) -> usize {
        self.group() * self.body() + self.super_scales
    }
}

/// The type and shape of a packed matrix, from which its size and the launch sizes of kernels follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PackedLayout {
    pub(super) dtype: DType,
    pub(super) n: usize,
    pub(super) k: usize,
}

impl PackedLayout {
    /// The layout of `n` rows of `k` elements; `None` if `dtype` has no codes, `n` or `k` is 0, or `k` is no multiple
    /// of the block length.
    pub fn new(dtype: DType, n: usize, k: usize) -> Option<PackedLayout> {
        Format::of(dtype)?;
        (n > 0 && k > 0 && k.is_multiple_of(dtype.block_len())).then_some(PackedLayout { dtype, n, k })
    }

    /// The quantised types that have a layout, and kernels.
    pub fn dtypes() -> impl Iterator<Item = DType> {
        DType::QUANTISED.into_iter().filter(|&dtype| Format::of(dtype).is_some())
    }

    /// The type of the weight that it is packed from.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Rows.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Columns.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Tiles along the rows, and along the columns.
    pub fn tiles(&self) -> (usize, usize) {
        (self.n.div_ceil(ROWS), self.k.div_ceil(COLS))
    }

    /// Bytes of a row of tiles (16 rows).
    pub fn row_tile_bytes(&self) -> usize {
        let format = self.format();
        self.tiles().1 / format.group() * format.group_bytes()
    }

    /// Bytes of the whole matrix.
    pub fn bytes(&self) -> usize {
        self.tiles().0 * self.row_tile_bytes()
    }

    /// Bytes of a tile in shared memory: its body, then its group's super-scales.
    pub(in crate::device::kernels) fn shared_tile_bytes(&self) -> usize {
        let format = self.format();
        format.body() + format.super_scales
    }

    /// Bits of a code.
    pub(in crate::device::kernels) fn bits(&self) -> usize {
        self.format().bits
    }

    /// Whether the scales have two levels.
    pub(in crate::device::kernels) fn has_super_blocks(&self) -> bool {
        self.format().super_scales > 0
    }

    pub(super) fn format(&self) -> Format {
        Format::of(self.dtype).expect("checked by `new`")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_of_a_weight() {
        // 4096 x 4096: the bits per weight that the kernels' headers state.
        for (dtype, bits) in [
            (DType::Q4_0, 4.5),
            (DType::Q4_1, 5.0),
            (DType::Q4_K, 4.625),
            (DType::Q5_0, 5.5),
            (DType::Q5_1, 6.0),
            (DType::Q5_K, 5.625),
            (DType::Q6_K, 6.5625),
            (DType::Q8_0, 8.5),
            // Scales of 8 bits take 16.
            (DType::MXFP4, 4.5),
        ] {
            let layout = PackedLayout::new(dtype, 4096, 4096).unwrap();
            assert_eq!(layout.bytes() as f64 * 8.0 / (4096.0 * 4096.0), bits, "{dtype}");
        }
    }

    #[test]
    fn what_has_no_layout() {
        assert_eq!(PackedLayout::new(DType::F16, 16, 64), None);
        assert_eq!(PackedLayout::new(DType::Q4_0, 16, 48), None);
        assert_eq!(PackedLayout::new(DType::Q4_K, 16, 128), None);
        assert_eq!(PackedLayout::new(DType::Q8_0, 0, 64), None);
        assert_eq!(PackedLayout::new(DType::Q2_K, 16, 256), None);
        assert_eq!(PackedLayout::new(DType::Q3_K, 16, 256), None);
        assert_eq!(PackedLayout::new(DType::IQ4_XS, 16, 256), None);
        assert_eq!(PackedLayout::new(DType::IQ4_NL, 16, 256), None);
    }
}
