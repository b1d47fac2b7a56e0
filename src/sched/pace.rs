//! How many rows of prompts `mixed` computes in a step: as many as let requests begin as fast as others end.
//!
//! ```text
//! R = ρ · (max(D, D_long) + n)      ρ = Σ prompt / Σ answer; n decode rows of the host; D of the device, D_long in the long run
//! ```
//! A step reads the weights once, for prompts and decode rows, and prompts hide attention on the host. Requests that begin
//! together end together: then there are decode rows without prompts, and prompts without decode rows. D_long, since rows of
//! prompts that follow the decode rows of the moment stay few once those are few.
//!
//! Full rate until the device and the host have their requests, and where those that wait are so few that they may all begin.

use super::queues::Queues;
use super::steady::Steady;

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
