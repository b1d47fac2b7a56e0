//! GPU-only: continuous batching on the device's pages, the baseline that hybrids are measured against.
//!
//! ```text
//! gpu    | rows of all that decode, and of prompts |  the next step …
//! host     keeps what was evicted, computes nothing
//! ```
//!
//! * **Admission**: by what a request needs now, as long as everything that may have to leave has a place on the host
//!   ([`draft`](super::draft)); none while an evicted request waits to come back.
//! * **Preemption**: the newest leave when the device is full, and come back oldest first. Their pages are kept, not
//!   computed again.
//! * **Rows**: those of all that decode, then prompts in chunks, in one sub-batch: at full rate or paced, in
//!   their turn or ahead of it.
//!
//! refs   vLLM (Kwon et al. 2023, §4.5: preemption by swapping); Orca; Sarathi-Serve

use crate::program::{Phase, Side};

use super::continuous::Continuous;
use super::decision::Decision;
use super::draft::Draft;
use super::pace::{Pacer, PromptPace, most_rows};
use super::predict::Predict;
use super::queues::Queues;
use super::rows::SubBatchRows;
use super::strategy::{Limits, Strategy};

/// See the [module](self).
#[derive(Debug, Clone, Default)]
pub(super) struct OnDevice {
    one_side: Continuous,
    pacer: Pacer,
    /// Whether prompts are computed ahead of their turn: the host keeps what they store until the device has room for them, so that a
    /// request that ends is followed by one that decodes.
    ahead: bool,
}

impl OnDevice {
    /// With prompts at full rate or paced, in their turn or ahead of it.
    pub fn new(prompts: PromptPace, ahead: bool) -> OnDevice {
        OnDevice { pacer: Pacer::new(prompts), ahead, ..OnDevice::default() }
    }
}

impl Strategy for OnDevice {
    fn name(&self) -> &'static str {
        match (self.pacer.prompts(), self.ahead) {
            (PromptPace::Full, false) => "gpu-only",
            (PromptPace::Full, true) => "gpu-only, ahead",
            (PromptPace::Paced, false) => "gpu-only, paced",
            (PromptPace::Paced, true) => "gpu-only, paced, ahead",
        }
    }

    fn most_pages(&self, limits: &Limits) -> usize {
        limits.pages(limits.first_side())
    }

    fn plan(&mut self, queues: &Queues, limits: &Limits, costs: &dyn Predict) -> Decision {
        if limits.one_sided() {
            return self.one_side.plan(queues, limits, costs);
        }
        let mut draft = Draft::new(queues, limits);
        draft.evict();
        draft.swap_in();
        // The long run of a machine whose host attends nothing.
        let alone = Limits { host_pages: 0, ..*limits };
        let pace = self.pacer.pace(&draft, queues, &alone, costs, 0.0);
        let decoding = draft.of(Side::Device, Phase::Decode).count() as u64;
        let most = most_rows(pace, decoding, 0.0, limits);
        let rows = u64::from(most).saturating_sub(decoding).max(1);
        if self.ahead {
            admit_ahead(&mut draft, rows, limits);
        } else if draft.host.is_empty() {
            draft.admit_rows(rows);
        }
        let prompts = draft.prompts();
        let mut iteration = SubBatchRows::decode(&draft, &prompts, limits);
        iteration.prompts(&prompts, most);
        draft.decide(iteration.alone())
    }
}

/// One request in this many is prepared ahead of its turn.
const AHEAD: usize = 8;

/// Admits to the device while there is room, then a few to the host, while their prompts have rows to come.
fn admit_ahead(draft: &mut Draft<'_>, rows: u64, limits: &Limits) {
    let mut kept = draft.host.len();
    let most = draft.device.len().div_ceil(AHEAD).max(1);
    let mut pending: u64 = draft.prompts().iter().map(|(job, _)| u64::from(job.prompt - job.stored)).sum();
    draft.admit(true, |job| {
        let takes = kept < most && pending < rows && job.pages() <= limits.device_pages;
        if takes {
            kept += 1;
            pending += u64::from(job.prompt);
        }
        takes
    });
}
