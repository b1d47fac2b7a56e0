//! `y = x·Wᵀ`, row by row, in f64.

use crate::tensor::DType;

/// `out(t, n, Σ_k w[n][k]·x[t][k])` for the rows of `k` elements of `dtype` in `w` and those of `x`, `[m][k]`: weights dequantised
/// to f32, products and sums in f64.
///
/// # Panics
/// If `w` is not whole rows.
pub fn linear_rows(dtype: DType, w: &[u8], k: usize, x: &[f32], out: &mut dyn FnMut(usize, usize, f32)) {
    let row_bytes = dtype.row_bytes(k).expect("rows are whole blocks");
    let mut row = vec![0f32; k];
    for (n, w) in w.chunks_exact(row_bytes).enumerate() {
        super::dequant::dequantise_row(dtype, w, &mut row);
        for (t, x) in x.chunks_exact(k).enumerate() {
            let sum: f64 = row.iter().zip(x).map(|(&w, &x)| w as f64 * x as f64).sum();
            out(t, n, sum as f32);
        }
    }
}
