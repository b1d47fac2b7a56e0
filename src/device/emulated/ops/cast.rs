//! Bytes of the device's memory as numbers, and halves as floats.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::device::accelerator::Half;

/// Plain numbers: every bit pattern is one.
///
/// # Safety
/// As it says; and there is no padding.
pub unsafe trait Number: Copy {}
// SAFETY: a plain number.
unsafe impl Number for u16 {}
// SAFETY: as above.
unsafe impl Number for u32 {}
// SAFETY: as above.
unsafe impl Number for f32 {}

/// All of `bytes` as numbers.
///
/// # Panics
/// If they are not aligned, or not whole numbers: an address or a length was computed wrongly.
pub fn numbers<T: Number>(bytes: &[u8]) -> &[T] {
    // SAFETY: every bit pattern is a `T` (`Number`).
    let (before, all, after) = unsafe { bytes.align_to::<T>() };
    assert!(before.is_empty() && after.is_empty(), "{} bytes at {:p} as numbers", bytes.len(), bytes);
    all
}

/// [`numbers`], to be written.
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

/// Widens.
pub fn to_f32(from: Half, x: &[u16]) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    match from {
        Half::F16 => half::slice::HalfBitsSliceExt::reinterpret_cast::<f16>(x).convert_to_f32_slice(&mut out),
        Half::BF16 => {
            half::slice::HalfBitsSliceExt::reinterpret_cast::<bf16>(x).convert_to_f32_slice(&mut out)
        }
    }
    out
}

/// Rounds to nearest, ties to even.
pub fn from_f32(to: Half, x: &[f32], out: &mut [u16]) {
    match to {
        Half::F16 => {
            half::slice::HalfBitsSliceExt::reinterpret_cast_mut::<f16>(out).convert_from_f32_slice(x)
        }
        Half::BF16 => {
            half::slice::HalfBitsSliceExt::reinterpret_cast_mut::<bf16>(out).convert_from_f32_slice(x);
        }
    }
}
