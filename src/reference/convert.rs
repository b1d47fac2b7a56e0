//! Rows of f32 in bfloat16: nearest, ties to even; NaN stays NaN.

/// To bfloat16 bits.
pub fn f32_to_bf16(x: &[f32], out: &mut [u16]) {
    for (o, &v) in out.iter_mut().zip(x) {
        *o = half::bf16::from_f32(v).to_bits();
    }
}
