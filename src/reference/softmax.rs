//! Softmax and log Σ e^x, in double precision.

/// In place. A row with nothing above -inf (fully masked) becomes zeros.
pub fn softmax(x: &mut [f32]) {
    let (max, _) = max_and_logsumexp(x);
    if max == f32::NEG_INFINITY && !x.iter().any(|v| v.is_nan()) {
        x.fill(0.0);
        return;
    }
    let e = |v: f32| (v as f64 - max as f64).exp();
    let total: f64 = x.iter().map(|&v| e(v)).sum();
    for v in x {
        *v = (e(*v) / total) as f32;
    }
}

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
