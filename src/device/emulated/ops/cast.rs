//! Casts bytes of the device's memory to numbers, and converts halves to floats.

use std::borrow::Cow;

use crate::device::accelerator::Shape;
use crate::tensor::Half;

/// Plain numbers: every bit pattern is valid.
///
/// # Safety
/// Every bit pattern must be a valid value, and the type must have no padding.
pub unsafe trait Number: Copy {}
// SAFETY: a plain number.
unsafe impl Number for u8 {}
// SAFETY: as above.
unsafe impl Number for i8 {}
// SAFETY: as above.
unsafe impl Number for u16 {}
// SAFETY: as above.
unsafe impl Number for u32 {}
// SAFETY: as above.
unsafe impl Number for f32 {}

/// All of `bytes` as numbers.
///
/// # Panics
/// If the bytes are misaligned or do not make up whole numbers: an address or length was computed wrongly.
pub fn numbers<T: Number>(bytes: &[u8]) -> &[T] {
    // SAFETY: every bit pattern is a `T` (`Number`).
    let (before, all, after) = unsafe { bytes.align_to::<T>() };
    assert!(before.is_empty() && after.is_empty(), "{} bytes at {:p} as numbers", bytes.len(), bytes);
    all
}

/// [`numbers`], mutable.
///
/// # Panics
/// As [`numbers`].
pub fn numbers_mut<T: Number>(bytes: &mut [u8]) -> &mut [T] {
    let (len, at) = (bytes.len(), bytes.as_ptr());
    // SAFETY: every bit pattern is a `T` (`Number`).
    let (before, all, after) = unsafe { bytes.align_to_mut::<T>() };
    assert!(before.is_empty() && after.is_empty(), "{len} bytes at {at:p} as numbers");
    all
}

/// The storage type of activations and queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// Rounded to 16 bits, as on a GPU.
    Half(Half),
    /// Not rounded, as on the CPU.
    F32,
}

impl Kept {
    /// `half`, unless results are exact.
    pub fn of(shape: &Shape, half: Half) -> Kept {
        if shape.exact.is_some() { Kept::F32 } else { Kept::Half(half) }
    }

    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Kept::Half(_) => 2,
            Kept::F32 => 4,
        }
    }

    /// Elements, as floats.
    pub fn read(self, bytes: &[u8]) -> Cow<'_, [f32]> {
        match self {
            Kept::Half(half) => to_f32(half, numbers(bytes)).into(),
            Kept::F32 => numbers(bytes).into(),
        }
    }

    /// Stores the elements of `x`.
    pub fn write(self, x: &[f32], out: &mut [u8]) {
        match self {
            Kept::Half(half) => half.narrow(x, numbers_mut(out)),
            Kept::F32 => numbers_mut(out).copy_from_slice(x),
        }
    }
}

/// Widens to f32.
pub fn to_f32(from: Half, x: &[u16]) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    from.widen(x, &mut out);
    out
}
