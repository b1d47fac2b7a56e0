//! Splits the host's decode rows over two sub-batches so that the step is shortest.
//!
//! ```text
//! gpu    | linear 0            | linear 1 | attend 0, prompts |      T = max(l(r₀+n₀), h(n₁)) + max(l(r₁+n₁) + g, h(n₀))
//! host     attend 1            | attend 0                     |
//! ```
//! h(n₁) grows with n₁ and l(r₀+n₀) shrinks, so the first part is least where they cross; the second likewise. T is least at one
//! of the crossings, or with all rows on one side.

use super::pipeline::most;
use super::predict::Predict;

/// The rows that are not split.
#[derive(Debug, Clone, Copy)]
pub(super) struct UnsplitRows {
    /// Rows of each sub-batch: decode rows of the device, and prompts.
    pub rows: [u64; 2],
    /// Attention on the device, of both, in seconds.
    pub device: f64,
    /// Most rows of each sub-batch.
    pub most: [u64; 2],
}

impl UnsplitRows {
    /// Rows of the host that each sub-batch has room for.
    pub fn room(&self) -> [usize; 2] {
        [0, 1].map(|i| self.most[i].saturating_sub(self.rows[i]) as usize)
    }
}

/// A split of the host's rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct HostSplit {
    /// Rows in the second sub-batch; the others are in the first.
    pub second: usize,
    /// Predicted seconds of the step.
    pub seconds: f64,
}

/// The best split of `n` rows, of which the first i have `kv(i)` tokens; the second sub-batch takes the first rows. As many
/// as there is [`room`](Fixed::room) for, if that is less.
pub(super) fn split(
    fixed: &UnsplitRows,
    n: usize,
    kv: impl Fn(usize) -> u64,
    costs: &dyn Predict,
) -> HostSplit {
    let [r0, r1] = fixed.rows;
    let [room0, room1] = fixed.room();
    let n = n.min(room0.saturating_add(room1));
    let handed = costs.launch() * f64::from(costs.layers());
    let linear = |rows: u64| if rows == 0 { 0.0 } else { costs.linear(rows) };
    let host = |rows: usize, kv: u64| match rows {
        0 => 0.0,
        _ => costs.host_attention(rows as u64, kv) + handed,
    };
    let all = kv(n);
    let parts = |second: usize| {
        let first = n - second;
        let tokens = kv(second);
        [
            linear(r0 + first as u64),
            host(second, tokens),
            linear(r1 + second as u64) + fixed.device,
            host(first, all - tokens),
        ]
    };
    let seconds = |second: usize| {
        let [l0, h1, l1, h0] = parts(second);
        l0.max(h1) + l1.max(h0)
    };
    let (least, largest) = (n.saturating_sub(room0), n.min(room1));
    let crossing =
        |below: &dyn Fn([f64; 4]) -> bool| least + most(largest - least, |i| below(parts(least + i)));
    let one = crossing(&|[l0, h1, ..]| h1 <= l0);
    let other = crossing(&|[.., l1, h0]| h0 >= l1);
    let candidates = [least, largest, one, one + 1, other, other + 1];
    let of = |second: usize| HostSplit { second, seconds: seconds(second) };
    candidates
        .into_iter()
        .filter(|&second| second <= largest)
        .map(of)
        .min_by(|a, b| a.seconds.total_cmp(&b.seconds))
        .expect("the least is a candidate")
}
