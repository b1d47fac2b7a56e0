//! How many rows of prompts a step computes: as many as let requests begin as fast as others end.
//!
//! ```text
//! R = ρ · (max(D, D_long) + n)      ρ = Σ prompt / Σ answer; n decode rows of the host; D of the device, D_long in the long run
//! ```
//! A step reads the weights once, for prompts and decode rows, and prompts hide attention on the host. Requests that begin
//! together end together: then there are decode rows without prompts, and prompts without decode rows. D_long, since rows of
//! prompts that follow the decode rows of the moment stay few once those are few.
//!
//! Full rate until the device and the host have their requests, and where those that wait are so few that they may all begin.

use super::draft::Draft;
use super::predict::Predict;
use super::queues::Queues;
use super::steady::{LongRun, Steady};
use super::strategy::Limits;
use crate::program::{Phase, Side};

/// Where mixing prompts and decode rows gains little: waiting requests per running one up to which all begin at once.
const FEW: f64 = 0.5;

/// See the [module](self).
#[derive(Debug, Clone, Copy)]
pub(super) struct Pace {
    /// ρ.
    per_row: f64,
    /// Decode rows of the device in the long run.
    device: usize,
    /// Full rate, until the device and the host have their requests.
    ramps: bool,
    /// Full rate, since few requests wait.
    few: bool,
}

impl Pace {
    /// From the numbers of requests that decode on the device and on the host.
    pub fn of(steady: &Steady, queues: &Queues, decoding: [usize; 2]) -> Pace {
        let (waiting, running) = (queues.waiting().len(), queues.running().len());
        let few = match steady.mixes {
            true => steady.least == 0 && waiting == 0,
            false => waiting as f64 <= FEW * running as f64,
        };
        let [device, host] = decoding;
        let ramps = 2 * device <= steady.device || host < steady.least;
        Pace { per_row: steady.prompts, device: steady.device, ramps, few }
    }

    fn beside(&self, device: usize, host: f64) -> u64 {
        (self.per_row * (device.max(self.device) as f64 + host)).ceil().max(1.0) as u64
    }

    /// Rows of prompts beside these decode rows; `None`: as many as there is room for.
    pub fn rows(&self, device: u64, host: f64) -> Option<u64> {
        (!self.few && !self.ramps).then(|| self.beside(device as usize, host))
    }

    /// Rows of prompts that must be pending before admission for their sake stops.
    pub fn pending(&self, device: usize, host: usize) -> u64 {
        if self.few { u64::MAX } else { self.beside(device, host as f64) }
    }
}

/// Whether a policy's prompts are paced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum PromptPace {
    /// As many rows as there is room for.
    #[default]
    Full,
    /// As many as let requests begin as fast as others end.
    Paced,
}

/// The pace of a policy, with its view of the long run.
#[derive(Debug, Clone, Default)]
pub(super) struct Pacer {
    prompts: PromptPace,
    long_run: LongRun,
}

impl Pacer {
    /// Of prompts at full rate or paced.
    pub fn new(prompts: PromptPace) -> Pacer {
        Pacer { prompts, ..Pacer::default() }
    }

    /// Whether prompts are paced at all.
    pub fn prompts(&self) -> PromptPace {
        self.prompts
    }

    /// The pace of this step; `None` at full rate. `limits` without host pages are those of a host that attends nothing, `fill` is the
    /// share of an iteration that cohorts fill.
    pub fn pace(
        &mut self,
        draft: &Draft<'_>,
        queues: &Queues,
        limits: &Limits,
        costs: &dyn Predict,
        fill: f64,
    ) -> Option<Pace> {
        if self.prompts == PromptPace::Full {
            return None;
        }
        let steady = self.long_run.estimate(queues, limits, costs, fill);
        let [device, host] = [Side::Device, Side::Host].map(|side| draft.of(side, Phase::Decode).count());
        let host = if limits.host_pages == 0 { 0 } else { host };
        Some(Pace::of(&steady, queues, [device, host]))
    }
}

/// Most rows of a step, of them `device` decode rows of the device, beside `host` tokens of the host.
pub(super) fn most_rows(pace: Option<Pace>, device: u64, host: f64, limits: &Limits) -> u32 {
    let rows = u64::from(limits.rows);
    pace.and_then(|pace| pace.rows(device, host)).map_or(rows, |n| rows.min(device + n)) as u32
}
