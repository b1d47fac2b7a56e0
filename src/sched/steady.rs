//! The long-run rate of a workload: how many requests on the host pay off, and what a row is worth.
//!
//! ```text
//! d         decode rows of a step: D of the device (as many as its pages hold half way through their answers), N of the host
//! R = ρ·d   rows of prompts that keep them coming: ρ = Σ prompt / Σ answer, of all requests that are there
//!
//! alone        T = l(D+R) + g                                              tokens/T  D / T
//! pipelined    T = max(l(D+R₀+n₀), h(n₁)) + max(l(n₁+R₁) + g, h(n₀))                (D+N) / T       n₀ + n₁ = N
//! overlapped   T = l(D+R) + g + l(c)/L,  h(c)/L + t_launch <= fill·T                (D + c/(L+1)) / T      c <= N
//! ```
//! l: products, g: attention on the device (prompts and D), h: attention on the host, each over all L layers. The host gets the
//! smallest N whose tokens per second are within [`ENOUGH`] of the maximum.
//!
//! Worth follows from the best of these: in the long run a decode row brings ρ rows of prompts with it, and the two together
//! take T / d. A prompt's row is worth the seconds that the device takes for it alone, a decode row what is left:
//!
//! ```text
//! w_p = l(R)/R        w_d = T/d − ρ·w_p
//! ```
//! So a step at the long-run rate scores 1, whatever its rows are. If worth were measured by what the device alone would
//! take (as NEO does), decode rows would look five times too expensive where the host attends most of them, and prompts would wait.

use super::model::Mode;
use super::predict::Predict;
use super::queues::Queues;
use super::split::{UnsplitRows, split};
use super::strategy::Limits;
use super::view::RequestView;
use super::weigh::Worth;
use crate::cache::KvGeometry;

/// Share of the best rate at which fewer requests on the host are preferred.
const ENOUGH: f64 = 0.97;

/// Share of the best rate that separate steps for prompts and decode rows must reach to count as equally good.
const APART: f64 = 0.85;

/// Share of the best rate down to which more requests may be on the host.
const NEARLY: f64 = 0.95;

/// Factor by which overlap must be better: its rows stay parked for a whole token, and it needs many requests.
const CLEARLY: f64 = 1.04;

/// Share of the device's pages that is in use in the long run.
const IN_USE: f64 = 0.95;

/// Steps after which it is estimated again; sooner if the number of requests changes by an eighth.
const LOOKS_AFTER: u32 = 32;

/// Requests that the estimate reads at most.
const LOOKED_AT: usize = 1024;

/// See the [module](self).
#[derive(Debug, Clone, Copy)]
pub(super) struct Steady {
    /// Requests that decode on the device.
    pub device: usize,
    /// Fewest requests worth having on the host.
    pub least: usize,
    /// Most requests worth having on the host.
    pub most: usize,
    /// Whether mixing prompts and decode rows in the same steps pays.
    pub mixes: bool,
    /// The way with the highest rate.
    pub mode: Mode,
    /// Rows of prompts per decode row that admit requests as fast as others end.
    pub prompts: f64,
    /// Worth of a row.
    pub worth: Worth,
}

/// Averages over the present requests.
#[derive(Debug, Clone, Copy)]
struct Mix {
    /// Number of requests.
    requests: usize,
    /// Rows of prompts per decode row, of what is left to compute.
    prompts: f64,
    /// The same over whole requests.
    whole: f64,
    /// Tokens of a prompt.
    prompt: f64,
    /// Tokens that a decode row reads.
    kv: f64,
    /// Pages that a request may grow to.
    pages: f64,
}

impl Mix {
    /// Averages of what is left to compute.
    fn of(queues: &Queues) -> Mix {
        let jobs = queues.running().iter().chain(queues.waiting()).take(LOOKED_AT);
        let (mut n, mut left, mut prompt, mut rows, mut tokens, mut pages) =
            (0usize, 0u64, 0u64, 0u64, 0u64, 0);
        let mut answers = 0;
        for job in jobs {
            let answer = u64::from(job.likely.saturating_sub(job.stored.max(job.prompt))) + 1;
            n += 1;
            left += u64::from(job.prompt.saturating_sub(job.stored));
            prompt += u64::from(job.prompt);
            answers += u64::from(job.likely.saturating_sub(job.prompt)) + 1;
            rows += answer;
            tokens += answer * projected(job);
            pages += job.pages() as u64;
        }
        let of = |sum: u64, n: u64| sum as f64 / n.max(1) as f64;
        Mix {
            requests: queues.running().len() + queues.waiting().len(),
            prompts: of(left, rows),
            whole: of(prompt, answers),
            prompt: of(prompt, n as u64),
            kv: of(tokens, rows),
            pages: of(pages, n as u64),
        }
    }
}

/// Tokens that a request has stored half way through what is left of its answer.
fn projected(job: &RequestView) -> u64 {
    u64::from(job.stored.max(job.prompt)).midpoint(u64::from(job.likely)).max(1)
}

/// Decode rows and seconds of a step that repeats forever.
#[derive(Debug, Clone, Copy)]
struct Step {
    mode: Mode,
    rows: f64,
    seconds: f64,
}

impl Step {
    fn rate(&self) -> f64 {
        if self.seconds > 0.0 { self.rows / self.seconds } else { 0.0 }
    }
}

struct Model<'a> {
    mix: Mix,
    device: u64,
    costs: &'a dyn Predict,
}

impl Model<'_> {
    fn prompts(&self, rows: f64) -> u64 {
        (self.mix.prompts * rows).round() as u64
    }

    fn kv(&self, rows: u64) -> u64 {
        (self.mix.kv * rows as f64) as u64
    }

    /// Attention on the device: its decode rows, and rows of prompts.
    fn device_attention(&self, prompts: u64) -> f64 {
        let of = |rows: u64, kv: u64, pairs: u64| match rows {
            0 => 0.0,
            _ => self.costs.device_attention(rows, kv, pairs),
        };
        let kv = self.kv(self.device);
        let pairs = (prompts as f64 * self.mix.prompt / 2.0) as u64;
        of(self.device, kv, kv) + of(prompts, prompts, pairs)
    }

    fn alone(&self) -> Step {
        let prompts = self.prompts(self.device as f64);
        let seconds = self.costs.linear((self.device + prompts).max(1)) + self.device_attention(prompts);
        Step { mode: Mode::GpuOnly, rows: self.device as f64, seconds }
    }

    fn pipelined(&self, host: u64) -> Step {
        let rows = (self.device + host) as f64;
        let prompts = self.prompts(rows);
        let device = self.device_attention(prompts);
        let of = |second: u64| {
            let fixed =
                UnsplitRows { rows: [self.device + prompts - second, second], device, most: [u64::MAX; 2] };
            split(&fixed, host as usize, |n| self.kv(n as u64), self.costs).seconds
        };
        Step { mode: Mode::Pipelined, rows, seconds: of(0).min(of(prompts / 2)) }
    }

    /// Tokens per second with prompts in separate steps, at `prompt` seconds a row.
    fn apart(&self, host: u64, prompt: f64) -> f64 {
        let decode = Model { mix: Mix { prompts: 0.0, ..self.mix }, ..*self }.pipelined(host);
        decode.rows / (decode.seconds + self.mix.prompts * decode.rows * prompt)
    }

    fn overlapped(&self, host: u64, fill: f64) -> Step {
        let layers = f64::from(self.costs.layers());
        let beside =
            |prompts: u64| self.costs.linear((self.device + prompts).max(1)) + self.device_attention(prompts);
        let alone = beside(self.prompts(self.device as f64));
        let fits = |c: usize| {
            let c = c as u64;
            self.costs.host_attention(c, self.kv(c)) / layers + self.costs.launch() <= fill * alone
        };
        let cohort = super::pipeline::most(host as usize, fits) as u64;
        let rows = self.device as f64 + cohort as f64 / (layers + 1.0);
        let joined = if cohort == 0 { 0.0 } else { self.costs.linear(cohort) / layers };
        Step { mode: Mode::Overlapped, rows, seconds: beside(self.prompts(rows)) + joined }
    }
}

impl Steady {
    /// Estimate for the present requests. `fill` is the share of an iteration that cohorts fill.
    pub fn of(queues: &Queues, limits: &Limits, costs: &dyn Predict, fill: f64) -> Steady {
        let mix = Mix::of(queues);
        let room = IN_USE * limits.device_pages as f64 / KvGeometry::pages_for(mix.kv as usize).max(1) as f64;
        let device = (room as usize).min(mix.requests).min(limits.sequences as usize);
        let most = ((limits.host_pages as f64 / mix.pages.max(1.0)) as usize)
            .min(mix.requests - device)
            .min(limits.sequences as usize - device);
        let model = Model { mix, device: device as u64, costs };
        let alone = model.alone();
        let (mut pipelined, mut overlapped) = (vec![(0, alone)], vec![(0, alone)]);
        let mut n = 1;
        while n <= most && limits.sub_batches > 1 {
            pipelined.push((n, model.pipelined(n as u64)));
            overlapped.push((n, model.overlapped(n as u64, fill)));
            n = if n == most { n + 1 } else { (n + 1).max(n * 5 / 4).min(most) };
        }
        let best = |steps: &[(usize, Step)]| steps.iter().map(|(_, step)| step.rate()).fold(0.0, f64::max);
        let steps = if best(&overlapped) > CLEARLY * best(&pipelined) { overlapped } else { pipelined };
        let best = best(&steps);
        let enough = |share: f64| steps.iter().filter(move |(_, step)| step.rate() >= share * best);
        let &(least, step) = enough(ENOUGH).next().expect("one is the best");
        let most = if least == 0 { 0 } else { enough(NEARLY).next_back().expect("one is the best").0 };
        let rows = u64::from(limits.rows);
        let prompt = costs.linear(rows) / rows as f64;
        let mixes = model.apart(most as u64, prompt) <= APART * best;
        // All that are there, if nothing is lost by that: none is left for the end.
        let all = least > 0 && most == mix.requests - device && !mixes;
        let least = if all { most } else { least };
        let decode = step.seconds / step.rows.max(1e-9) - mix.prompts * prompt;
        Steady {
            device,
            least,
            most,
            mixes,
            mode: step.mode,
            prompts: mix.whole,
            worth: Worth::priced(decode.max(0.0), prompt),
        }
    }
}

/// The long run, estimated again now and then.
#[derive(Debug, Clone, Default)]
pub(super) struct LongRun {
    /// The estimate, and the number of requests that it was made from.
    last: Option<(Steady, usize)>,
    /// Steps since then.
    age: u32,
}

impl LongRun {
    /// As [`Steady::of`], or what that said a few steps ago.
    pub fn estimate(&mut self, queues: &Queues, limits: &Limits, costs: &dyn Predict, fill: f64) -> Steady {
        let n = queues.running().len() + queues.waiting().len();
        self.age += 1;
        match self.last {
            Some((steady, of)) if self.age < LOOKS_AFTER && 8 * n.abs_diff(of) <= of => steady,
            _ => {
                let steady = Steady::of(queues, limits, costs, fill);
                (self.last, self.age) = (Some((steady, n)), 0);
                steady
            }
        }
    }
}
