//! What benches of linear kernels share: weights, kernels for them, a check of their answers.

use half::{bf16, f16};
use tandem::simd::Isa;
use tandem::simd::linear::{Linear, pack};
use tandem::tensor::{Bytes, DType, Tensor, set_scales};

/// A small generator.
pub struct Rng(pub u64);

impl Rng {
    /// 64 random bits.
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    /// In [-1, 1).
    pub fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// A random weight whose scales are 0.01; floats are in [-0.1, 0.1), as those of models nearly are. (Floats of random bits are subnormal
/// now and then, for which a processor of Intel took twenty times as long.)
pub fn random(dtype: DType, n: usize, k: usize, rng: &mut Rng) -> Tensor {
    let len = n * dtype.row_bytes(k).expect("whole blocks");
    let mut next = || {
        let mut half = |bits: fn(f32) -> u16| {
            (0..4).fold(0, |word, _| word << 16 | u64::from(bits(0.1 * rng.uniform())))
        };
        match dtype {
            DType::F32 => (0..2).fold(0, |word, _| word << 32 | u64::from((0.1 * rng.uniform()).to_bits())),
            DType::F16 => half(|x| f16::from_f32(x).to_bits()),
            DType::BF16 => half(|x| bf16::from_f32(x).to_bits()),
            _ => rng.next(),
        }
    };
    let mut words: Vec<u64> = (0..len.div_ceil(8)).map(|_| next()).collect();
    if dtype.is_quantised() {
        // SAFETY: plain bytes of a live vector.
        let bytes = unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast::<u8>(), len) };
        // Weights below one, as those of models are: larger ones are not made with f16 arithmetic. K-quants multiply their scales by
        // up to 127.
        let scale = if dtype.block_len() > 32 { 1e-4 } else { 0.005 };
        for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
            set_scales(dtype, block, scale, scale);
        }
    }
    Tensor::new(dtype, vec![n, k], Bytes::from_words(words, len)).expect("sized above")
}

/// The weight as a tier reads it.
pub fn make(w: &Tensor, isa: Isa) -> Linear {
    if Linear::wants_packing(w.dtype, isa) {
        Linear::from_packed(pack(w), isa)
    } else {
        Linear::from_rows(w.clone(), isa)
    }
}

/// Compares a few rows with the f64 reference; panics when they differ.
pub fn verify(w: &Tensor, x: &[f32], out: &[f32], n: usize, k: usize, what: &str) {
    let mut row = vec![0f32; k];
    for r in [0, n / 2, n - 1] {
        tandem::reference::dequant::dequantise_row(w.dtype, w.row(r), &mut row);
        for (t, x) in x.chunks_exact(k).enumerate().take(2) {
            let want: f64 = row.iter().zip(x).map(|(&w, &x)| w as f64 * x as f64).sum();
            let size: f64 =
                row.iter().zip(x).map(|(&w, &x)| (w as f64 * x as f64).powi(2)).sum::<f64>().sqrt();
            let got = out[t * n + r] as f64;
            assert!(
                (got - want).abs() <= 0.05 * size.max(1e-3),
                "{what}: row {r} token {t}: {got}, want {want}"
            );
        }
    }
}

/// The middle one. (Benches that sort samples by state need none.)
#[allow(dead_code)]
pub fn median(mut v: Vec<f64>) -> f64 {
    v.sort_by(f64::total_cmp);
    v[v.len() / 2]
}
