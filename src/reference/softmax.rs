//! Max and log Σ e^x, in double precision.

/// max x (NaN ignored, -inf if nothing else) and log Σ e^x (NaN if any is).
pub fn max_and_logsumexp(x: &[f32]) -> (f32, f64) {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, |m, v| if v > m { v } else { m });
    if x.iter().any(|v| v.is_nan()) {
        return (max, f64::NAN);
    }
    if max.is_infinite() {
        return (max, max as f64);
    }
    let total: f64 = x.iter().map(|&v| (v as f64 - max as f64).exp()).sum();
    (max, max as f64 + total.ln())
}
