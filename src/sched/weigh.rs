//! The worth of a step: the seconds that the device alone would need for its rows.
//!
//! ```text
//! worth of a decode row   (linear(n) + attention(n)) / n, of the n decode rows that the device has
//! worth of a prompt's row linear(R) / R, of as many rows R as a step has room for
//! rate of a step          Σ worth / seconds: the device alone, without prompts, has 1
//! ```
//! Tokens are weighed by their time, not counted: with requests or plain tokens, as printed, a step with a prompt of 500 rows looks
//! a hundred times as good as one of five decode rows (NEO, step 6; print also maximises T/x, which is the wrong way up).

use super::draft::Draft;
use super::predict::Predict;
use super::rows::RowLoad;
use super::strategy::Limits;
use super::view::RequestView;

/// Worth of a row, in seconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Worth {
    decode: f64,
    prompt: f64,
}

impl Worth {
    /// Worth measured by a sub-batch with the device's rows.
    pub fn beside(first: &RowLoad, limits: &Limits, costs: &dyn Predict) -> Worth {
        let n = first.device.0.max(1);
        let alone = RowLoad { rows: n, device: first.device, ..RowLoad::default() };
        let most = u64::from(limits.rows);
        Worth {
            decode: (costs.linear(n) + alone.device_attention(costs)) / n as f64,
            prompt: costs.linear(most) / most as f64,
        }
    }

    /// From the seconds of a decode row and of a prompt's row.
    pub fn priced(decode: f64, prompt: f64) -> Worth {
        Worth { decode, prompt }
    }

    /// Worth of all rows.
    pub fn of(&self, load: &RowLoad) -> f64 {
        self.decode * (load.device.0 + load.host.0) as f64 + self.prompt * load.prompt.0 as f64
    }

    /// Worth of `rows` decode rows; may be a fraction.
    pub fn decode(&self, rows: f64) -> f64 {
        self.decode * rows
    }
}

/// Worth per second of a step.
pub(super) fn rate(worth: f64, seconds: f64) -> f64 {
    if seconds > 0.0 { worth / seconds } else { worth }
}

/// Decides how many requests the host takes: as long as its attention still fits the window.
pub(super) struct HostPool<'a> {
    rows: u64,
    kv: u64,
    /// Rows of prompts still to be computed.
    pending: u64,
    /// Seconds that the host has for attention of all layers.
    window: f64,
    /// Limit on them: what one step has room for.
    most_pending: u64,
    costs: &'a dyn Predict,
}

/// Tokens that a request has stored half way through its answer.
fn projected(job: &RequestView) -> u64 {
    u64::from(job.stored.max(job.prompt)).midpoint(u64::from(job.likely))
}

impl<'a> HostPool<'a> {
    /// From the draft's requests on the host, a window in seconds for attention over all layers, and the prompt rows that a step has room for.
    pub fn of(draft: &Draft<'_>, window: f64, most_pending: u32, costs: &'a dyn Predict) -> HostPool<'a> {
        HostPool {
            rows: draft.host.len() as u64,
            kv: draft.host.iter().map(|(_, job)| projected(job)).sum(),
            pending: draft.prompts().iter().map(|(job, _)| u64::from(job.prompt - job.stored)).sum(),
            window,
            most_pending: u64::from(most_pending),
            costs,
        }
    }

    /// Whether one more request fits the host's time and the step's prompt rows; if so, it is counted.
    pub fn takes(&mut self, job: &RequestView) -> bool {
        let (rows, kv) = (self.rows + 1, self.kv + projected(job));
        // One at least, however slow the host is: who fits nowhere else must get through.
        let fits = rows == 1 || self.costs.host_attention(rows, kv) <= self.window;
        let takes = fits && self.pending < self.most_pending;
        if takes {
            (self.rows, self.kv) = (rows, kv);
            self.pending += u64::from(job.prompt);
        }
        takes
    }
}
