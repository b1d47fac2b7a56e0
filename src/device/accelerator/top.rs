//! The likeliest tokens of rows, as [`Accelerator::top`](super::Accelerator::top) leaves them: what sampling needs of a row of
//! logits, in two kilobytes instead of four bytes a token.

use std::cmp::Ordering;

/// Most tokens of a row.
pub const TOP_K: usize = 256;

/// Words of a row: logits f32 `[TOP_K]`, tokens u32 `[TOP_K]` (`u32::MAX`: none, of a shorter vocabulary), the sum f32, three
/// without a meaning.
const WORDS: usize = 2 * TOP_K + 4;

/// Bytes of a row of [`Workspace::top`](super::Workspace::top).
pub const TOP_BYTES: usize = 4 * WORDS;

/// Logits and tokens of a row, and its sum, from its [`TOP_BYTES`] bytes; `vocab` is the number of logits.
///
/// # Panics
/// If there are fewer bytes.
pub fn top_of(bytes: &[u8], vocab: usize) -> (Vec<(f32, u32)>, f32) {
    let word =
        |i: usize| u32::from_le_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]]);
    let likeliest = (0..TOP_K.min(vocab)).map(|i| (f32::from_bits(word(i)), word(TOP_K + i))).collect();
    (likeliest, f32::from_bits(word(2 * TOP_K)))
}

/// By which fraction of itself the sum of a row may be off: twice what `cuda/top_k.cu` derives.
pub fn top_error(vocab: usize) -> f64 {
    let n = vocab as f64;
    (4.0 * n.ln() + n / 1024.0 + 24.0) * 0.5f64.powi(23)
}

/// Writes a row as [`top_of`] reads it: the reference of the order, by sorting.
pub(crate) fn write_top(logits: &[f32], factor: f32, out: &mut [u8]) {
    let mut all: Vec<(f32, u32)> = logits.iter().copied().zip(0..).collect();
    let by = |a: &(f32, u32), b: &(f32, u32)| {
        let numbers_first = a.0.is_nan().cmp(&b.0.is_nan());
        let greatest_first = if a.0.is_nan() && b.0.is_nan() { Ordering::Equal } else { b.0.total_cmp(&a.0) };
        numbers_first.then(greatest_first).then(a.1.cmp(&b.1))
    };
    if all.len() > TOP_K {
        all.select_nth_unstable_by(TOP_K, by);
        all.truncate(TOP_K);
    }
    all.sort_unstable_by(by);
    let max = all.first().map_or(f32::NEG_INFINITY, |&(x, _)| if x.is_nan() { f32::NEG_INFINITY } else { x });
    let sum: f64 = logits.iter().map(|&x| (f64::from(x - max) * f64::from(factor)).exp()).sum();
    all.resize(TOP_K, (f32::NAN, u32::MAX));
    let words = all.iter().map(|t| t.0.to_bits()).chain(all.iter().map(|t| t.1)).chain([
        (sum as f32).to_bits(),
        0,
        0,
        0,
    ]);
    for (to, word) in out.chunks_exact_mut(4).zip(words) {
        to.copy_from_slice(&word.to_le_bytes());
    }
}
