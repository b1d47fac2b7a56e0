//! NEO: asymmetric pipelining, with load-aware scheduling (NEO §3.2).
//!
//! ```text
//! gpu    | linear 0            | linear 1 | attend 0 |     0: prompts, decode of the device, a few of the host
//! host     attend 1            | attend 0            |     1: decode of the host
//!
//! T = max(T_l0, T_ca1 + t_launch) + max(T_l1 + T_pf0 + T_ga0, T_ca0 + t_launch)
//! ```
//!
//! 1. Two empty sub-batches.
//! 2. The device's decode rows into the first. The newest requests are swapped out when pages lack, the oldest of the host
//!    swapped in below 95%.
//! 3. Prompts until the rows are full; new ones go to the device while it has room, then to the host.
//! 4. The host's decode rows into either while its attention stays hidden ([`pipeline`](super::pipeline)).
//! 5. Prompts to the host are dropped where there is no bubble for them.
//! 6. This, or the first sub-batch without the host's rows: whichever does more work in a second ([`weigh`](super::weigh)).
//!
//! Departures from print, each for a reason told in the module that makes it: T_pf0 and t_launch are part of the time; work over
//! time is made largest, and weighed in seconds; a request that waits for long gets its row (step 4) and its prompt (step 5)
//! anyhow; on an idle device the watermark does not hold, so that a request of more than 95% of it gets through; a
//! request is admitted to the host only while the host has time for it.

use super::continuous::Continuous;
use super::decision::Decision;
use super::draft::{Draft, PATIENCE};
use super::pace::{Pacer, PromptPace, most_rows};
use super::pipeline::{AGE, Pipelined};
use super::predict::Predict;
use super::queues::Queues;
use super::rows::{RowLoad, SubBatchRows, longest_waiting};
use super::strategy::{Limits, Strategy};
use super::weigh::{HostPool, Worth, rate};
use crate::program::{Phase, Side};

/// See the [module](self).
#[derive(Debug, Clone, Default)]
pub(super) struct Neo {
    one_side: Continuous,
    pacer: Pacer,
}

impl Neo {
    /// With prompts at full rate or paced.
    pub fn new(prompts: PromptPace) -> Neo {
        Neo { pacer: Pacer::new(prompts), ..Neo::default() }
    }
}

/// Seconds of a decode step of the device's requests: products, and attention.
pub(super) fn decode_step(draft: &Draft<'_>, costs: &dyn Predict) -> (f64, f64) {
    let jobs = draft.of(Side::Device, Phase::Decode);
    let (rows, kv) = jobs.fold((0, 0), |(n, kv), job| (n + 1, kv + u64::from(job.stored) + 1));
    let load = RowLoad { rows, device: (rows, kv), ..RowLoad::default() };
    (costs.linear(rows.max(1)), load.device_attention(costs))
}

impl Strategy for Neo {
    fn name(&self) -> &'static str {
        match self.pacer.prompts() {
            PromptPace::Paced => "neo, paced",
            PromptPace::Full => "neo",
        }
    }

    fn plan(&mut self, queues: &Queues, limits: &Limits, costs: &dyn Predict) -> Decision {
        if limits.one_sided() {
            return self.one_side.plan(queues, limits, costs);
        }
        // Steps 2 and 3.
        let mut draft = Draft::new(queues, limits);
        draft.evict();
        draft.swap_in();
        let (linear, attention) = decode_step(&draft, costs);
        let mut pool = HostPool::of(&draft, 2.0 * linear + attention, limits.rows, costs);
        draft.admit(true, |job| pool.takes(job));
        let prompts = draft.prompts();
        let pace = self.pacer.pace(&draft, queues, limits, costs, 0.0);
        let mut first = SubBatchRows::decode(&draft, &prompts, limits);
        let on_host = draft.of(Side::Host, Phase::Decode).count() as f64;
        first.prompts(&prompts, most_rows(pace, first.load.rows, on_host, limits));
        // Steps 4 and 5.
        let hosts = longest_waiting(draft.of(Side::Host, Phase::Decode).collect());
        let aged = hosts.first().is_some_and(|job| job.waited >= AGE);
        let is_old = |id| {
            let prompt = prompts.iter().find(|(job, _)| job.id == id);
            prompt.is_some_and(|(job, _)| job.passed >= PATIENCE || (job.stored > 0 && job.waited >= AGE))
        };
        let worth = Worth::beside(&first.load, limits, costs);
        let both = Pipelined::new(first, &hosts, is_old, limits, costs);
        for &id in &both.dropped {
            draft.withdraw(id);
        }
        // Step 6.
        let host_rows = both.batches.iter().map(|rows| rows.load.host.0).sum::<u64>();
        let alone = both.batches[0].on_device();
        if host_rows == 0 {
            return draft.decide(alone.alone());
        }
        let worths = [alone.load, both.batches[0].load, both.batches[1].load].map(|load| worth.of(&load));
        let (both, alone) = (both.iteration(), alone.alone());
        let pipelined = alone.sub_batches.is_empty()
            || aged
            || rate(worths[1] + worths[2], costs.iteration(&both))
                >= rate(worths[0], costs.iteration(&alone));
        draft.decide(if pipelined { both } else { alone })
    }
}
