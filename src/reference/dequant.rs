//! temporary
use crate::tensor::DType;
fn h(b: &[u8]) -> f32 {
    half::f16::from_le_bytes([b[0], b[1]]).to_f32()
}
pub fn dequantise_row(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    for (b, o) in bytes.chunks_exact(dtype.block_bytes()).zip(out.chunks_exact_mut(dtype.block_len())) {
        match dtype {
            DType::F32 => o[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
            DType::F16 => o[0] = h(b),
            DType::BF16 => o[0] = half::bf16::from_le_bytes([b[0], b[1]]).to_f32(),
            DType::Q8_0 => {
                for i in 0..32 {
                    o[i] = h(b) * (b[2 + i] as i8) as f32
                }
            }
            DType::Q4_0 => {
                for i in 0..16 {
                    o[i] = h(b) * ((b[2 + i] & 15) as f32 - 8.0);
                    o[i + 16] = h(b) * ((b[2 + i] >> 4) as f32 - 8.0)
                }
            }
            DType::Q4_1 => {
                for i in 0..16 {
                    o[i] = h(b) * (b[4 + i] & 15) as f32 + h(&b[2..]);
                    o[i + 16] = h(b) * (b[4 + i] >> 4) as f32 + h(&b[2..])
                }
            }
            DType::Q5_0 | DType::Q5_1 => {
                let at = if dtype == DType::Q5_0 { 2 } else { 4 };
                let bits = u32::from_le_bytes(b[at..at + 4].try_into().unwrap());
                for i in 0..32 {
                    let q = b[at + 4 + i % 16];
                    let q = (if i < 16 { q & 15 } else { q >> 4 }) as u32 | (bits >> i & 1) << 4;
                    o[i] = if at == 2 { h(b) * (q as f32 - 16.0) } else { h(b) * q as f32 + h(&b[2..]) };
                }
            }
            DType::Q4_K | DType::Q5_K => {
                let (d, dm, s) = (h(b), h(&b[2..]), &b[4..16]);
                for i in 0..256 {
                    let j = i / 32;
                    let (sc, m) = if j < 4 {
                        (s[j] & 63, s[j + 4] & 63)
                    } else {
                        (s[j + 4] & 15 | (s[j - 4] >> 6) << 4, s[j + 4] >> 4 | (s[j] >> 6) << 4)
                    };
                    let qs = if dtype == DType::Q4_K { &b[16..] } else { &b[48..] };
                    let q = qs[i / 64 * 32 + i % 32];
                    let mut q = if j % 2 == 0 { q & 15 } else { q >> 4 };
                    if dtype == DType::Q5_K {
                        q |= (b[16 + i % 32] >> j & 1) << 4;
                    }
                    o[i] = d * sc as f32 * q as f32 - dm * m as f32;
                }
            }
            DType::Q6_K => {
                let d = h(&b[208..]);
                for i in 0..256 {
                    let (half, j, l) = (i / 128, i % 128 / 32, i % 32);
                    let ql = b[half * 64 + (j % 2) * 32 + l];
                    let ql = if j < 2 { ql & 15 } else { ql >> 4 };
                    let qh = b[128 + half * 32 + l] >> (2 * j) & 3;
                    o[i] = d * (b[192 + i / 16] as i8) as f32 * ((ql | qh << 4) as f32 - 32.0);
                }
            }
        }
    }
}
