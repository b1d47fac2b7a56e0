//! `y = x·Wᵀ`, row by row, in f64.

use crate::tensor::Tensor;

/// `out[t][n] = Σ_k w[n][k]·x[t][k]`, weights dequantised to f32, products and sums in f64.
/// `x` is `[m][k]`, `out` is `[m][n]` with rows `ldo` apart; rows `rows` of `w` are computed.
pub fn linear_rows(
    w: &Tensor,
    rows: std::ops::Range<usize>,
    x: &[f32],
    out: &mut dyn FnMut(usize, usize, f32),
) {
    let k = w.cols();
    let mut row = vec![0f32; k];
    for n in rows {
        super::dequant::dequantise_row(w.dtype, w.row(n), &mut row);
        for (t, x) in x.chunks_exact(k).enumerate() {
            let sum: f64 = row.iter().zip(x).map(|(&w, &x)| w as f64 * x as f64).sum();
            out(t, n, sum as f32);
        }
    }
}
