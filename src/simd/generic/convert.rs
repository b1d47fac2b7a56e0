//! Converts rows between f32 and the 16-bit formats.

use crate::reference;
use crate::simd::vector::{Simd, SimdOp};

/// The longest vector of any tier; tails pass through a buffer of this size, since AVX2 has no masked
/// 16-bit accesses.
const MAX_LANES: usize = 16;

/// Which 16-bit format.
pub(crate) trait Half16<S: Simd>: Copy {
    /// # Safety
    /// `p` is valid for reading `LANES` elements.
    unsafe fn load(self, s: S, p: *const u16) -> S::F;
}

/// bfloat16.
#[derive(Clone, Copy)]
pub(crate) struct Bf16;
impl<S: Simd> Half16<S> for Bf16 {
    #[inline(always)]
    unsafe fn load(self, s: S, p: *const u16) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { s.load_bf16(p) }
    }
}

/// IEEE half.
#[derive(Clone, Copy)]
pub(crate) struct F16;
impl<S: Simd> Half16<S> for F16 {
    #[inline(always)]
    unsafe fn load(self, s: S, p: *const u16) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { s.load_f16(p) }
    }
}

/// Rounds each element to bf16, by integer arithmetic.
pub(crate) struct F32ToBf16<'a> {
    pub x: &'a [f32],
    pub out: &'a mut [u16],
}

impl SimdOp for F32ToBf16<'_> {
    type Output = ();

    fn reference(self) {
        reference::convert::f32_to_bf16(self.x, self.out)
    }

    #[inline(always)]
    fn vectors<S: Simd>(self, s: S) {
        let F32ToBf16 { x, out } = self;
        let n = x.len();
        assert!(out.len() == n);
        let mut i = 0;
        // SAFETY: accesses are at i..i + LANES <= n in slices of n elements; the tail reads n - i elements
        // and writes a buffer of MAX_LANES >= LANES.
        unsafe {
            while i + S::LANES <= n {
                s.store_bf16(out.as_mut_ptr().add(i), s.load(x.as_ptr().add(i)));
                i += S::LANES;
            }
            if i < n {
                let mut buf = [0u16; MAX_LANES];
                s.store_bf16(buf.as_mut_ptr(), s.load_tail(x.as_ptr().add(i), n - i, 0.0));
                out[i..].copy_from_slice(&buf[..n - i]);
            }
        }
    }
}

/// Widens each element (exact), times `scale`, from bytes that need no alignment.
///
/// # Safety
/// `x` is valid for reading `2·out.len()` bytes.
#[inline(always)]
pub(crate) unsafe fn widen_bytes<S: Simd>(
    s: S,
    x: *const u8,
    scale: f32,
    out: &mut [f32],
    f: impl Half16<S>,
) {
    let n = out.len();
    let k = s.splat(scale);
    let mut i = 0;
    // SAFETY: accesses are at i..i + LANES <= n in runs of n elements; the tail copies n - i elements to
    // a buffer of MAX_LANES >= LANES and writes n - i.
    unsafe {
        while i + S::LANES <= n {
            s.store(out.as_mut_ptr().add(i), s.mul(f.load(s, x.add(2 * i).cast()), k));
            i += S::LANES;
        }
        if i < n {
            let mut buf = [0u16; MAX_LANES];
            std::ptr::copy_nonoverlapping(x.add(2 * i), buf.as_mut_ptr().cast(), 2 * (n - i));
            s.store_tail(out.as_mut_ptr().add(i), n - i, s.mul(f.load(s, buf.as_ptr()), k));
        }
    }
}
