//! Constants shared by all exponentials, and the scalar one.
//!
//! | class | error | where |
//! |---|---|---|
//! | f32, any x | 2 ulp, subnormal results included | `generic/exp.rs`: `exp`, for activations and log Σ e^x |
//! | f32, x <= 0 | 2 ulp; 0 below [`MIN`] | `generic/exp.rs`: `exp_nonpositive`, for attention in f32 |
//! | f32, x <= 0, the same bits on every machine | 2 ulp | [`exp1`], where partial results are merged |
//! | 2^x to be rounded to bf16 | 2^-10 relative | `attention/avx512_bf16.rs`: `exp2` |
//!
//! The first three are one: x = n ln 2 + r, |r| <= ln 2 / 2, e^x = 2^n (1 + r + r² P(r)) (Cephes' expf).

/// Below this `exp_nonpositive` and [`exp1`] are 0. e^−87 still is a normal number (2^−126 = e^−87.3).
pub(super) const MIN: f32 = -87.0;
/// ln 2 in two parts, the first exact in few bits (Cody-Waite).
pub(super) const LN2_HI: f32 = 0.693_359_4;
pub(super) const LN2_LO: f32 = -2.121_944_4e-4;
/// (e^r − 1 − r) / r² on |r| <= ln 2 / 2, highest power first (Cephes).
pub(super) const POLY: [f32; 6] =
    [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];

/// e^x for x <= 0, without fused operations, so that it gives the same bits on every machine.
pub(super) fn exp1(x: f32) -> f32 {
    if x < MIN {
        return 0.0;
    }
    if x.is_nan() {
        return x;
    }
    let n = (x * std::f32::consts::LOG2_E).round_ties_even();
    let r = x - n * LN2_HI - n * LN2_LO;
    let p = POLY[1..].iter().fold(POLY[0], |p, k| p * r + k);
    let y = p * (r * r) + r + 1.0;
    y * f32::from_bits(((n as i32 + 127) as u32) << 23)
}
