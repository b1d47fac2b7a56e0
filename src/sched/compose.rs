//! Pipelined steps for `mixed`: how many rows of the host and of prompts, and in which sub-batch.
//!
//! NEO holds a step to attention that the other lane hides. Here a step may have all of the host's rows as well, split such
//! that it takes least ([`split`](super::split)), and prompts go into the first sub-batch or into both. With everything on the
//! host that is FastDecode, with a few rows there NEO, with none in the second sub-batch attention on both sides at once.

use crate::program::{Flow, Iteration, Side};

use super::pace::Pace;
use super::pipeline::most;
use super::predict::Predict;
use super::rows::SubBatchRows;
use super::split::{UnsplitRows, split};
use super::strategy::Limits;
use super::view::RequestView;
use super::weigh::{Worth, rate};

/// One row in this many of a sub-batch is reserved for prompts.
const KEPT_FOR_PROMPTS: u64 = 8;

/// The material for steps.
pub(super) struct Parts<'a> {
    /// Decode rows of the device.
    decode: SubBatchRows,
    /// Prompts in the order of admission.
    prompts: &'a [(&'a RequestView, Side)],
    /// Requests that decode on the host, those first that have waited longest.
    hosts: &'a [&'a RequestView],
    /// `tokens[n]`: tokens of the first n of `hosts`.
    tokens: Vec<u64>,
    limits: &'a Limits,
    costs: &'a dyn Predict,
}

/// Two sub-batches, the worth of their rows, and their worth per second by the formula.
struct Step {
    batches: [SubBatchRows; 2],
    worth: f64,
    rate: f64,
}

impl<'a> Parts<'a> {
    /// Of the device's decode rows, prompts in the order of admission, and the host's requests, those first that have waited
    /// longest.
    pub fn new(
        decode: SubBatchRows,
        prompts: &'a [(&'a RequestView, Side)],
        hosts: &'a [&'a RequestView],
        limits: &'a Limits,
        costs: &'a dyn Predict,
    ) -> Parts<'a> {
        let mut tokens = Vec::with_capacity(hosts.len() + 1);
        tokens.push(0);
        let sums = hosts.iter().scan(0, |sum, job| {
            *sum += u64::from(job.stored) + 1;
            Some(*sum)
        });
        tokens.extend(sums);
        Parts { decode, prompts, hosts, tokens, limits, costs }
    }

    fn two_lanes(&self) -> bool {
        self.limits.sub_batches > 1
    }

    /// The best steps with all of the host's rows, and with those whose attention the device hides: each with its worth.
    pub fn steps(&self, pace: &Pace, worth: &Worth) -> Vec<(Iteration, f64)> {
        let all = self.hosts.len();
        let prompts = |n: usize| match pace.rows(self.decode.load.rows, n as f64) {
            Some(rows) => rows.max(self.bubble(n)),
            None => 2 * u64::from(self.limits.rows),
        };
        let hidden = self.hidden(prompts(all)).clamp(1, all);
        let counts = if hidden < all { &[all, hidden][..] } else { &[all] };
        let lanes = if self.two_lanes() { &[false, true][..] } else { &[false] };
        let best = |&n: &usize| {
            let steps = lanes.iter().map(|&both| self.step(prompts(n), both, n, worth));
            let best = steps.max_by(|a, b| a.rate.total_cmp(&b.rate)).expect("one at least");
            (iteration(best.batches), best.worth)
        };
        counts.iter().map(best).collect()
    }

    /// The device's rows, prompts up to `budget` rows in the first sub-batch or in `both`, and the best split of `n` of the host's
    /// rows.
    fn step(&self, budget: u64, both: bool, n: usize, worth: &Worth) -> Step {
        let mut batches = [self.decode.clone(), SubBatchRows::default()];
        let rows = u64::from(self.limits.rows);
        let capacity = [rows, if self.two_lanes() { rows } else { 0 }];
        // Where there is a single row, prompts and the host's rows take turns.
        let waited = |job: Option<&&RequestView>| job.map_or(0, |job| job.waited);
        let first = self.prompts.first().map(|(job, _)| job);
        let own = if rows > 1 {
            (rows / KEPT_FOR_PROMPTS).max(1)
        } else {
            u64::from(waited(first) > waited(self.hosts.first()))
        };
        // The host's rows have to fit, too.
        let kept = match (both, self.two_lanes()) {
            (true, _) => n as u64 / 2,
            (false, true) => 0,
            (false, false) => n as u64,
        };
        let room = rows - kept.min(rows - own);
        let mut left = budget;
        // Several share it: one alone would be all of a sub-batch.
        let mut shares = [if both && self.prompts.len() > 2 { budget.div_ceil(2) } else { budget }; 2];
        for &(job, side) in self.prompts {
            let emptier = usize::from(both && batches[1].load.rows < batches[0].load.rows);
            let i = if shares[emptier] == 0 { 1 - emptier } else { emptier };
            let most = room.saturating_sub(batches[i].load.rows).min(left).min(shares[i]);
            if most == 0 {
                break;
            }
            let tokens = u64::from(job.prompt - job.stored).min(most) as u32;
            batches[i].push(job.group(tokens, side));
            left -= u64::from(tokens);
            shares[i] -= u64::from(tokens);
        }
        let fixed = UnsplitRows {
            rows: [0, 1].map(|i| batches[i].load.rows),
            device: batches.iter().map(|rows| rows.load.device_attention(self.costs)).sum(),
            most: capacity,
        };
        let found = split(&fixed, n, |i| self.tokens[i], self.costs);
        let n = n.min(fixed.room().iter().sum());
        for (i, job) in self.hosts[..n].iter().enumerate() {
            batches[usize::from(i < found.second)].push(job.group(1, Side::Host));
        }
        let worth = batches.iter().map(|rows| worth.of(&rows.load)).sum();
        Step { batches, worth, rate: rate(worth, found.seconds) }
    }

    /// Seconds of the host's attention of the first `n` rows, handed over in two sub-batches.
    fn attention(&self, n: usize) -> f64 {
        let handed = self.costs.launch() * f64::from(self.costs.layers());
        self.costs.host_attention(n as u64, self.tokens[n]) + 2.0 * handed
    }

    /// Seconds of the device, with `n` rows of the host in two sub-batches and `prompts` rows of prompts.
    fn device(&self, n: usize, prompts: u64) -> f64 {
        let half = n as u64 / 2;
        let first = self.decode.load.rows + prompts + n as u64 - half;
        self.costs.linear(first.max(1))
            + self.costs.linear(half.max(1))
            + self.decode.load.device_attention(self.costs)
    }

    /// Rows of the host whose attention the device hides, beside `prompts` rows of prompts.
    fn hidden(&self, prompts: u64) -> usize {
        let pending = self.prompts.iter().map(|(job, _)| u64::from(job.prompt - job.stored)).sum();
        let prompts = prompts.min(pending).min(self.limits.rows.into());
        most(self.hosts.len(), |n| self.attention(n) <= self.device(n, prompts))
    }

    /// Rows of prompts that the device can compute while the host attends `n` rows.
    fn bubble(&self, n: usize) -> u64 {
        let host = self.attention(n);
        most(2 * self.limits.rows as usize, |prompts| self.device(n, prompts as u64) <= host) as u64
    }
}

/// One sub-batch if the other has nothing.
fn iteration(batches: [SubBatchRows; 2]) -> Iteration {
    let full: Vec<_> = batches.into_iter().filter(|rows| !rows.is_empty()).map(SubBatchRows::batch).collect();
    let flow = if full.len() == 2 { Flow::TwoLanes } else { Flow::Serial };
    Iteration { sub_batches: full, moves: Vec::new(), flow, pick: true, top: false }
}
