//! Products of quantised weights, packed ([`packed`](super::packed)), with int8 activations.

mod avx2_int8;
pub(super) mod avx2_kernels;
mod avx2_unpacked;
pub(super) mod format;
pub(super) mod vnni;

use super::kernel::Work;

/// Pointers to prepared int8 activations of a tile's first row, with strides.
#[derive(Clone, Copy)]
pub(in super::super) struct X {
    pub q: *const i8,
    pub d: *const f32,
    pub sum32: *const f32,
    pub sum16: *const f32,
    pub minus32: *const i32,
    pub minus16: *const i32,
    /// Elements of `q` between rows; a multiple of 64.
    pub stride: usize,
}

impl X {
    /// The activations of a work's plane.
    #[inline]
    pub fn of(work: &Work<'_>) -> X {
        let (x, rows) = (&work.x, work.plane * work.x.m());
        let first = X {
            q: x.q().as_ptr(),
            d: x.d().as_ptr(),
            sum32: x.sum32().as_ptr(),
            sum16: x.sum16().as_ptr(),
            minus32: x.minus32().as_ptr(),
            minus16: x.minus16().as_ptr(),
            stride: x.k_padded(),
        };
        assert!(x.q().len() >= (rows + x.m()) * x.k_padded(), "plane {} was not prepared", work.plane);
        // SAFETY: the rows exist, as asserted; the other arrays have as many.
        unsafe { first.row(rows) }
    }

    /// These activations, advanced by `rows` rows.
    ///
    /// # Safety
    /// The rows exist.
    #[inline]
    pub unsafe fn row(self, rows: usize) -> X {
        // SAFETY: in range by the caller's promise; the arrays have stride, stride/32, stride/16 columns.
        unsafe {
            X {
                q: self.q.add(rows * self.stride),
                d: self.d.add(rows * self.stride / 32),
                sum32: self.sum32.add(rows * self.stride / 32),
                sum16: self.sum16.add(rows * self.stride / 16),
                minus32: self.minus32.add(rows * self.stride / 32),
                minus16: self.minus16.add(rows * self.stride / 16),
                stride: self.stride,
            }
        }
    }
}
