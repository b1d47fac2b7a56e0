//! The answers of two devices, compared by margin: tokens must be equal as long as the first one's likeliest leads by
//! more than both round.

use super::{models, rounding};

/// Every logit of each token, up to a constant a row: log-probabilities of the whole vocabulary, by id.
pub fn rows(report: &serde_json::Value, vocab: usize) -> Vec<Vec<f32>> {
    let entries = report["logprobs"].as_array().unwrap();
    let row = |entry: &serde_json::Value| {
        let mut row = vec![f32::NAN; vocab];
        for pair in entry["top"].as_array().unwrap() {
            row[pair[0].as_u64().unwrap() as usize] = pair[1].as_f64().unwrap() as f32;
        }
        row
    };
    entries.iter().map(row).collect()
}

/// Compares two reports of `generate --json --logprobs V`; returns how many tokens had to be equal.
///
/// Random weights lead by little: a token may differ where the lead is within the rounding of both, and what follows
/// differs then, too.
#[track_caller]
pub fn compare(want: &serde_json::Value, got: &serde_json::Value, vocab: usize, bound: f64) -> usize {
    let mut sure = 0;
    for (i, (g, w)) in rows(got, vocab).iter().zip(rows(want, vocab)).enumerate() {
        let off = models::distance(g, &w).0;
        assert!(off <= bound, "token {i}: {off:.2e} standard deviations, at most {bound:.2e}");
        sure += usize::from(rounding::is_sure(&w, bound));
        if want["tokens"][i] != got["tokens"][i] {
            assert!(!rounding::is_sure(&w, bound), "token {i} of {want} leads, but {got}");
            break;
        }
    }
    sure
}
