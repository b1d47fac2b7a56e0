//! The vector of `f32` lanes that every generic kernel is written over.
//!
//! A value of a [`Simd`] type is a *proof token*: it exists only where the CPU is known to have the
//! instructions, so its arithmetic is safe to call; only methods that take a pointer are `unsafe`. Kernels in
//! `generic/` are [`SimdOp`]s, whose `vectors` are `#[inline(always)]`; the one `run` of each tier instantiates them inside a
//! `#[target_feature]` function, where everything is inlined into one body.
//! Closures are avoided, because a closure does not inherit the target features of its caller.

/// A small operation with its operands: written once for vectors of any tier, and once more as its definition.
pub(crate) trait SimdOp {
    /// What it returns beside what it writes.
    type Output;

    /// In safe scalar code: the reference tier.
    fn reference(self) -> Self::Output;

    /// With the vectors of a tier. `#[inline(always)]`, so that it is compiled with the tier's features.
    fn vectors<S: Simd>(self, s: S) -> Self::Output;
}

/// `LANES` `f32` values and the operations on them.
pub(crate) trait Simd: Copy {
    /// Lanes per vector.
    const LANES: usize;
    /// `LANES` x f32.
    type F: Copy;

    /// `x` in every lane.
    fn splat(self, x: f32) -> Self::F;

    /// # Safety
    /// `p` is valid for reading `LANES` elements (any alignment).
    unsafe fn load(self, p: *const f32) -> Self::F;
    /// The first `n < LANES` elements at `p`, `fill` in the other lanes; touches no other memory.
    ///
    /// # Safety
    /// `p` is valid for reading `n` elements.
    unsafe fn load_tail(self, p: *const f32, n: usize, fill: f32) -> Self::F;
    /// # Safety
    /// `p` is valid for writing `LANES` elements (any alignment).
    unsafe fn store(self, p: *mut f32, v: Self::F);
    /// Stores the first `n < LANES` lanes; touches no other memory.
    ///
    /// # Safety
    /// `p` is valid for writing `n` elements.
    unsafe fn store_tail(self, p: *mut f32, n: usize, v: Self::F);

    /// `a + b`.
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a - b`.
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b`.
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a / b`.
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a * b - c` in even lanes, `a * b + c` in odd lanes: half a complex product.
    fn fma_sub_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a > b ? a : b`: the second operand if either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a < b ? a : b`: the second operand if either is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// The nearest integer, ties to even.
    fn round(self, a: Self::F) -> Self::F;
    /// `|a|`.
    fn abs(self, a: Self::F) -> Self::F;
    /// `magnitude` (sign bit clear) with the sign bit of `sign`.
    fn with_sign(self, magnitude: Self::F, sign: Self::F) -> Self::F;
    /// `a < b ? yes : no`, lane by lane; `no` where either is NaN.
    fn select_lt(self, a: Self::F, b: Self::F, yes: Self::F, no: Self::F) -> Self::F;
    /// `a * 2^n` for integral `n` in -160..=130, overflowing and underflowing as it should.
    fn scale2(self, a: Self::F, n: Self::F) -> Self::F;
    /// `a * 2^n` for integral `n` in -126..=127, where the result is a normal number.
    fn scale2_normal(self, a: Self::F, n: Self::F) -> Self::F;
    /// Bit `i` is set where `a[i] == b[i]`.
    fn eq_mask(self, a: Self::F, b: Self::F) -> u32;

    /// Lane 0 + lane 1 + ..., as a tree: halves are added until one lane is left.
    fn reduce_sum(self, a: Self::F) -> f32;
    /// The greatest lane; lanes must not be NaN.
    fn reduce_max(self, a: Self::F) -> f32;

    /// Lanes 2i and 2i + 1 exchanged.
    fn swap_pairs(self, a: Self::F) -> Self::F;
    /// `LANES / 2` elements, each twice: `p[0] p[0] p[1] p[1] ...`.
    ///
    /// # Safety
    /// `p` is valid for reading `LANES / 2` elements.
    unsafe fn load_twice(self, p: *const f32) -> Self::F;

    /// `LANES` bf16 values, widened.
    ///
    /// # Safety
    /// `p` is valid for reading `LANES` elements.
    unsafe fn load_bf16(self, p: *const u16) -> Self::F;
    /// `LANES` IEEE halves, widened.
    ///
    /// # Safety
    /// `p` is valid for reading `LANES` elements.
    unsafe fn load_f16(self, p: *const u16) -> Self::F;
    /// Rounds to bf16, ties to even, by integer arithmetic: subnormals are kept, NaN stays a (quiet) NaN.
    ///
    /// # Safety
    /// `p` is valid for writing `LANES` elements.
    unsafe fn store_bf16(self, p: *mut u16, v: Self::F);

    /// `LANES` unsigned bytes.
    ///
    /// # Safety
    /// `p` is valid for reading `LANES` bytes.
    unsafe fn load_bytes(self, p: *const u8) -> Self::F;
}
