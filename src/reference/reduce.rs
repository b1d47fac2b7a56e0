//! Searches over a row.

/// The lowest index of the greatest element; NaN is never chosen, unless there is nothing else (0).
pub fn argmax(x: &[f32]) -> usize {
    let mut best: Option<usize> = None;
    for (i, &v) in x.iter().enumerate() {
        if !v.is_nan() && best.is_none_or(|b| v > x[b]) {
            best = Some(i);
        }
    }
    best.unwrap_or(0)
}
