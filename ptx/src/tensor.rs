//! Tensor maps: what a driver's are is not public, so these have a format of their own.

/// A matrix of 16-bit elements whose boxes bulk copies bring to shared memory, rows of 128 bytes swizzled by 128 bytes.
///
/// A kernel takes [`TensorMap::encode`] of it where a device takes what `cuTensorMapEncodeTiled` makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorMap {
    /// Of the first element.
    pub address: u64,
    /// Rows that there are: those outside are zeros.
    pub rows: u64,
    /// Columns that there are.
    pub cols: u64,
    /// Elements from one row to the next.
    pub stride: u64,
    /// Rows of a box.
    pub box_rows: u32,
    /// Columns of a box.
    pub box_cols: u32,
}

const MAGIC: u64 = 0x7078_742d_6d61_7032;

impl TensorMap {
    /// The 128 bytes of a kernel's parameter.
    pub fn encode(&self) -> [u8; 128] {
        let boxes = u64::from(self.box_rows) | u64::from(self.box_cols) << 32;
        let fields = [MAGIC, self.address, self.rows, self.cols, self.stride, boxes];
        let mut bytes = [0; 128];
        for (to, field) in bytes.chunks_exact_mut(8).zip(fields) {
            to.copy_from_slice(&field.to_le_bytes());
        }
        bytes
    }

    /// `None`: the bytes are no map that [`TensorMap::encode`] made.
    pub fn decode(bytes: &[u8; 128]) -> Option<TensorMap> {
        let field = |i: usize| bytes[8 * i..][..8].iter().rev().fold(0, |v, b| v << 8 | u64::from(*b));
        (field(0) == MAGIC).then(|| TensorMap {
            address: field(1),
            rows: field(2),
            cols: field(3),
            stride: field(4),
            box_rows: field(5) as u32,
            box_cols: (field(5) >> 32) as u32,
        })
    }
}
