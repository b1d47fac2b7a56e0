//! The arguments of every product: weights, activations, and the epilogue.

use super::super::abi::{
    LINEAR_CLAMPED_SWIGLU, LINEAR_F32, LINEAR_GEGLU, LINEAR_RELU, LINEAR_SWIGLU, LinearParams,
};
use super::super::quant::PackedLayout;
use crate::device::accelerator::LinearWeight;
use crate::device::runtime::DevPtr;
use crate::tensor::{DType, Half};

/// Bytes of arrival counters at the head of a scratch buffer. They are zero before the first launch, and every launch
/// leaves them zero.
pub const COUNTER_BYTES: usize = 64 << 10;

/// What a kernel does with its sums before it stores them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// f32 `[m][n]`.
    F32,
    /// max(sum, 0), in the activation type.
    Relu,
    /// silu(gate)·up, in the activation type, `[m][n/2]`; the weight's rows are [interleaved](gate_up_row).
    SwiGlu,
    /// gelu_tanh(gate)·up, otherwise like [`Epilogue::SwiGlu`].
    GeGlu,
    /// g·σ(1.702·g)·(u + 1), g = min(gate, 7), u = up between -7 and 7, otherwise like [`Epilogue::SwiGlu`].
    ClampedSwiGlu,
}

impl Epilogue {
    /// All epilogues.
    pub const ALL: [Epilogue; 5] =
        [Epilogue::F32, Epilogue::Relu, Epilogue::SwiGlu, Epilogue::GeGlu, Epilogue::ClampedSwiGlu];

    /// Whether rows of the weight are interleaved gates and ups.
    pub fn is_gated(self) -> bool {
        matches!(self, Epilogue::SwiGlu | Epilogue::GeGlu | Epilogue::ClampedSwiGlu)
    }

    pub(super) fn code(self) -> u32 {
        match self {
            Epilogue::F32 => LINEAR_F32,
            Epilogue::Relu => LINEAR_RELU,
            Epilogue::SwiGlu => LINEAR_SWIGLU,
            Epilogue::GeGlu => LINEAR_GEGLU,
            Epilogue::ClampedSwiGlu => LINEAR_CLAMPED_SWIGLU,
        }
    }
}

/// How a weight `[n][k]` lies on the device.
#[derive(Debug, Clone, Copy)]
pub enum Matrix {
    /// 16-bit floats of the activations' type, rows contiguous; k is a multiple of 8.
    Dense {
        /// Rows (gates and ups both counted).
        n: usize,
        /// Columns.
        k: usize,
    },
    /// [Packed](super::super::quant::pack()).
    Quantised(PackedLayout),
}

impl Matrix {
    /// The matrix of a weight of `dtype`: float weights are stored in the activations' type.
    pub fn of(dtype: DType, n: usize, k: usize) -> Matrix {
        PackedLayout::new(dtype, n, k).map_or(Matrix::Dense { n, k }, Matrix::Quantised)
    }

    /// Rows (gates and ups both counted).
    pub fn n(&self) -> usize {
        match self {
            Matrix::Dense { n, .. } => *n,
            Matrix::Quantised(layout) => layout.n(),
        }
    }

    /// Columns.
    pub fn k(&self) -> usize {
        match self {
            Matrix::Dense { k, .. } => *k,
            Matrix::Quantised(layout) => layout.k(),
        }
    }
}

/// A weight on the device.
#[derive(Debug, Clone, Copy)]
pub struct Weight {
    /// 16-byte aligned.
    pub ptr: DevPtr,
    /// Layout and shape of the weight.
    pub matrix: Matrix,
    /// f32 `[n]` in the order of the matrix's rows, or NULL.
    pub bias: DevPtr,
}

impl From<&LinearWeight> for Weight {
    fn from(w: &LinearWeight) -> Weight {
        Weight { ptr: w.ptr, matrix: Matrix::of(w.dtype, w.n, w.k), bias: w.bias }
    }
}

/// y\[m\]\[n\] = Σ_k x\[m\]\[k\]·w\[n\]\[k\] + bias\[n\].
#[derive(Debug, Clone, Copy)]
pub struct ProductArgs {
    /// w and its bias.
    pub w: Weight,
    /// Type of the activations.
    pub act: Half,
    /// `[m][ldx]` of `act`, 16-byte aligned.
    pub x: DevPtr,
    /// Elements between rows of x, a multiple of 8.
    pub ldx: usize,
    /// `[m][ldy]` of the type that [`Epilogue`] says; may be columns of a wider buffer.
    pub y: DevPtr,
    /// Elements between rows of y.
    pub ldy: usize,
    /// Tokens.
    pub m: usize,
    /// What becomes of the sums.
    pub epilogue: Epilogue,
    /// Scratch of the size that the kernel's `scratch_bytes` says: [`COUNTER_BYTES`] of counters, zeroed once, then
    /// partial sums. Kernels of one lane share it.
    pub scratch: DevPtr,
}

impl ProductArgs {
    /// Columns that are written.
    pub(in crate::device::kernels) fn columns(&self) -> usize {
        if self.epilogue.is_gated() { self.w.matrix.n() / 2 } else { self.w.matrix.n() }
    }

    /// # Panics
    /// If sizes, strides or addresses are not as the fields say; `what` names the kernels.
    pub(super) fn check(&self, what: &str) {
        let (m, n, k, ldx, ldy) = (self.m, self.w.matrix.n(), self.w.matrix.k(), self.ldx, self.ldy);
        assert!(
            ldx >= k && ldx.is_multiple_of(8) && ldy >= self.columns(),
            "{what} of x [{m}][{ldx}] by w [{n}][{k}] to y [{m}][{ldy}]"
        );
        assert!(
            !self.epilogue.is_gated() || n.is_multiple_of(16),
            "{what}: gate and up by 8: {n} rows are no multiple of 16"
        );
        assert!(
            self.w.ptr.0.is_multiple_of(16) && self.x.0.is_multiple_of(16),
            "{what}: w and x lie on 16 bytes"
        );
    }

    /// The parameters that every kernel of `linear_*.cu` and `gemv*.cu` takes.
    ///
    /// # Panics
    /// As [`ProductArgs::check`].
    pub(in crate::device::kernels) fn params(&self, what: &str) -> LinearParams {
        self.check(what);
        LinearParams {
            w: self.w.ptr,
            x: self.x,
            bias: self.w.bias,
            y: self.y,
            partials: self.scratch.add(COUNTER_BYTES),
            counters: self.scratch,
            m: self.m as u32,
            n: self.w.matrix.n() as u32,
            k: self.w.matrix.k() as u32,
            ldx: self.ldx as u32,
            ldy: self.ldy as u32,
            epilogue: self.epilogue.code(),
            ..Default::default()
        }
    }
}

/// The source of row `r` in a gate and an up projection interleaved by eight (gate 0..8, up 0..8, gate 8..16, ...), so
/// that one thread of an mma holds a gate and its up: `(false, i)` is the gate's row `i`, `(true, i)` the up's.
pub fn gate_up_row(r: usize) -> (bool, usize) {
    (r % 16 >= 8, r / 16 * 8 + r % 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gates_and_ups_alternate_by_eight() {
        let rows: Vec<_> = (0..32).map(gate_up_row).collect();
        let want = [(false, 0..8), (true, 0..8), (false, 8..16), (true, 8..16)];
        let want: Vec<_> = want.into_iter().flat_map(|(up, rows)| rows.map(move |i| (up, i))).collect();
        assert_eq!(rows, want);
    }
}
