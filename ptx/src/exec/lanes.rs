//! A value a lane.

/// Of 32-bit registers; those of 16 bits have zeros above.
pub(crate) type Words = [u32; 32];
/// Of 64-bit registers.
pub(crate) type Doubles = [u64; 32];

/// Writes the lanes of `mask`.
#[inline(always)]
pub(crate) fn put<T: Copy>(to: &mut [T; 32], values: [T; 32], mask: u32) {
    if mask == u32::MAX {
        *to = values;
    } else {
        for (i, (to, value)) in to.iter_mut().zip(values).enumerate() {
            if mask >> i & 1 == 1 {
                *to = value;
            }
        }
    }
}

#[inline(always)]
pub(crate) fn map<T: Copy, R>(a: &[T; 32], f: impl Fn(T) -> R) -> [R; 32] {
    std::array::from_fn(|i| f(a[i]))
}

#[inline(always)]
pub(crate) fn zip<A: Copy, B: Copy, R>(a: &[A; 32], b: &[B; 32], f: impl Fn(A, B) -> R) -> [R; 32] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

#[inline(always)]
pub(crate) fn zip3<A: Copy, B: Copy, C: Copy, R>(
    a: &[A; 32],
    b: &[B; 32],
    c: &[C; 32],
    f: impl Fn(A, B, C) -> R,
) -> [R; 32] {
    std::array::from_fn(|i| f(a[i], b[i], c[i]))
}

/// The bits of those lanes where it holds.
#[inline(always)]
pub(crate) fn bits(f: impl Fn(usize) -> bool) -> u32 {
    (0..32).fold(0, |all, i| all | u32::from(f(i)) << i)
}

/// The lanes of a mask, in order.
#[inline(always)]
pub(crate) fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    let mut rest = mask;
    std::iter::from_fn(move || {
        if rest == 0 {
            return None;
        }
        let lane = rest.trailing_zeros() as usize;
        rest &= rest - 1;
        Some(lane)
    })
}
