//! How far the logits of one computation may be from those of another, derived from what each rounds; and when their
//! likeliest tokens must therefore agree. In standard deviations of a row's logits, root mean square over the row, for
//! the worst of some 70 rows, which gets four times what is expected of one.

use tandem::cache::KvType;
use tandem::model::{LoadedModel, ModelSpec};
use tandem::simd::Isa;
use tandem::tensor::DType;

/// Unit roundoff of stored keys and values, half of the distance between neighbours. Codes are 1/127 of the largest of a head apart,
/// itself about 2.4 standard deviations of 64.
fn stored(kv: KvType) -> f64 {
    match kv {
        KvType::BF16 => 2f64.powi(-9),
        KvType::F16 => 2f64.powi(-11),
        KvType::Q8 => 0.5 * 2.4 / 127.0,
    }
}

/// Of a CPU tier whose matrices see activations in f32, from exact arithmetic.
///
/// f32 arithmetic alone: a dot product of n = 768 terms is off by about √n·2⁻²⁴ = 1.7e-6 of its size. But where
/// that error e moves a key or value across a rounding boundary of the cache (of spacing 2u for a unit
/// roundoff u), it becomes a whole 2u: a share e/2u of the elements, so √(e/2u)·2u = √(2eu) root mean square.
/// That is 8e-5 for bf16 (u = 2⁻⁹), 4e-5 for f16 (u = 2⁻¹¹) and 2e-4 for codes of 8 bits.
/// Kernels with bf16 dot products also round q and the probabilities: 2⁻⁹/√3 each, 1.6e-3 together.
/// A layer adds independent errors of that size to keys, values and scores: √(3L) of them. That is what a row
/// is expected to be off by; the worst of 70 rows, of which the first average over few keys, gets four of it.
/// tests/models/families.rs shows what this still catches.
pub fn cpu(spec: &ModelSpec, kv: impl Into<KvType>, bf16_products: bool) -> f64 {
    let u = stored(kv.into());
    let e = 768f64.sqrt() * 2f64.powi(-24);
    let products = if bf16_products { 2f64.powi(-9) * (2.0f64 / 3.0).sqrt() } else { 0.0 };
    4.0 * (3.0 * spec.n_layers as f64).sqrt() * ((2.0 * e * u).sqrt() + products + e)
}

/// Of a CPU tier whose matrices see activations in f32, from exact arithmetic whose keys and values are not rounded either.
///
/// As [`cpu`], and each layer rounds its keys and its values to `kv`, of unit roundoff u. That moves values by u/√3 of
/// their size, root mean square, and scores by u/√3 of their standard deviation `scores`, which moves the weights as
/// much: √(1 + scores²) of such errors a layer, of L layers; the worst row gets four times that.
pub fn cpu_and_cache(spec: &ModelSpec, kv: impl Into<KvType>, scores: f64) -> f64 {
    let kv = kv.into();
    let u = stored(kv);
    cpu(spec, kv, false) + 4.0 * ((1.0 + scores * scores) * spec.n_layers as f64).sqrt() * u / 3f64.sqrt()
}

/// By how much two kernels of a CPU tier may disagree: one may see the activations in f32, the other in bf16 (u = 2⁻⁹)
/// or in int8 blocks of 32 (half a step of 1/127 of the largest of 32, itself about 2.1 standard deviations:
/// u = 0.5·2.1/127·2 = 2⁻⁶), which is u/√3 root mean square; f16 weights are read as they are by one kernel of the AMX
/// tier and rounded to bf16 by the other, a second independent error of that size. The 4 inputs of each of L layers and
/// that of the head are rounded so, independently; the worst of 67 rows gets four of the expectation.
pub fn activations(m: &LoadedModel, isa: Isa) -> f64 {
    let dtype = m.weights.get("blk.0.attn_output.weight").unwrap().dtype;
    let u = match (isa, dtype) {
        (Isa::Amx, d) if d.is_quantised() => 2f64.powi(-6),
        (Isa::Amx, DType::F16) => 2f64.sqrt() * 2f64.powi(-9),
        _ => 2f64.powi(-9),
    };
    4.0 * u / 3f64.sqrt() * (4.0 * m.spec.n_layers as f64 + 1.0).sqrt()
}

/// Of an accelerator, from exact arithmetic.
///
/// As for a CPU, but what enters every matrix is rounded to 16 bits: with unit roundoff u (2⁻⁸ for
/// bfloat16, 2⁻¹¹ for f16), u/√3 root mean square of a value. A layer rounds the inputs of q|k|v (which moves q, k
/// and v), q, k and v themselves, the probabilities, attention's output, and the inputs of up and down: seven
/// independent errors of that size, so √(7L) of them; the worst of 70 rows gets four times that. Keys and values in codes of 8 bits
/// become other codes by such an error e, which is √(2eu) each, as in [`cpu`].
pub fn accelerator(spec: &ModelSpec, kv: impl Into<KvType>, bf16: bool) -> f64 {
    let u = |bf16: bool| if bf16 { 2f64.powi(-8) } else { 2f64.powi(-11) };
    let kv = kv.into();
    let e = u(bf16 || kv == KvType::BF16) / 3f64.sqrt();
    let codes = if kv.is_scaled() { (2.0 * e * stored(kv)).sqrt() } else { 0.0 };
    let layers = spec.n_layers as f64;
    4.0 * ((7.0 * layers).sqrt() * e + (2.0 * layers).sqrt() * codes)
}

/// The likeliest token, by how much it leads the second, and the standard deviation of the logits.
pub fn lead(logits: &[f32]) -> (u32, f64, f64) {
    let best = tandem::reference::reduce::argmax(logits);
    let second = logits.iter().enumerate().filter(|(i, _)| *i != best).map(|(_, x)| *x);
    let lead = f64::from(logits[best]) - f64::from(second.fold(f32::NEG_INFINITY, f32::max));
    let n = logits.len() as f64;
    let mean = logits.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
    let std = (logits.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n).sqrt();
    (best as u32, lead, std)
}

/// Whether rows that are within `bound` of each other must agree on the likeliest token: none can overtake it.
///
/// A row is expected to be off by e = bound/4. Its logits' errors are about normal, so that of the V = 512 to 50 000 of
/// a few dozen rows none is beyond 6e (2e-9 each), and no difference of two is beyond 12e = 3 bounds.
pub fn is_sure(logits: &[f32], bound: f64) -> bool {
    let (_, lead, std) = lead(logits);
    lead > 3.0 * bound * std
}
