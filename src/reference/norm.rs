//! RMS norm and layer norm, summed in double precision.

/// `out = x·w / √(mean(x²) + eps)`.
pub fn rms_norm(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    let total: f64 = x.iter().map(|&v| v as f64 * v as f64).sum();
    let scale = (1.0 / (total / x.len() as f64 + eps as f64).sqrt()) as f32;
    for ((o, &v), &w) in out.iter_mut().zip(x).zip(w) {
        *o = v * scale * w;
    }
}

/// [`rms_norm`] of each run of `w.len()` elements, in place.
pub fn rms_norm_heads(x: &mut [f32], w: &[f32], eps: f32) {
    for head in x.chunks_exact_mut(w.len().max(1)) {
        let row = head.to_vec();
        rms_norm(&row, w, eps, head);
    }
}

/// `x += delta`, then [`rms_norm`] of it.
pub fn add_rms_norm(x: &mut [f32], delta: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    super::activation::add(x, delta);
    rms_norm(x, w, eps, out);
}

/// `out = (x - mean)·w / √(var + eps) + b`.
pub fn layer_norm(x: &[f32], w: &[f32], b: &[f32], eps: f32, out: &mut [f32]) {
    let n = x.len() as f64;
    let mean = x.iter().map(|&v| v as f64).sum::<f64>() / n;
    let var = x.iter().map(|&v| (v as f64 - mean).powi(2)).sum::<f64>() / n;
    let scale = 1.0 / (var + eps as f64).sqrt();
    for (((o, &v), &w), &b) in out.iter_mut().zip(x).zip(w).zip(b) {
        *o = ((v as f64 - mean) * scale * w as f64 + b as f64) as f32;
    }
}
