//! Rows between f32 and the 16-bit formats: nearest, ties to even; NaN stays NaN.

/// To bfloat16 bits.
pub fn f32_to_bf16(x: &[f32], out: &mut [u16]) {
    for (o, &v) in out.iter_mut().zip(x) {
        *o = half::bf16::from_f32(v).to_bits();
    }
}

/// To IEEE half bits.
pub fn f32_to_f16(x: &[f32], out: &mut [u16]) {
    for (o, &v) in out.iter_mut().zip(x) {
        *o = half::f16::from_f32(v).to_bits();
    }
}

/// From bfloat16 bits.
pub fn bf16_to_f32(x: &[u16], out: &mut [f32]) {
    for (o, &v) in out.iter_mut().zip(x) {
        *o = half::bf16::from_bits(v).to_f32();
    }
}

/// From IEEE half bits.
pub fn f16_to_f32(x: &[u16], out: &mut [f32]) {
    for (o, &v) in out.iter_mut().zip(x) {
        *o = half::f16::from_bits(v).to_f32();
    }
}
