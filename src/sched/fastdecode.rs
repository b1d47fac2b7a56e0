//! FastDecode: all decode attention on the host, in two halves that are alike.
//!
//! ```text
//! gpu    | linear A | linear B | linear A | linear B |
//! host     attend B | attend A | attend B | attend A |
//! ```
//!
//! All keys and values live on the host, the device's pages stay empty; taken up in the middle of a run, it moves all requests there. The halves have about as many tokens to attend each, so
//! that neither side waits for long. Prompts go through the device and leave their keys and values on the host, in the
//! half with fewer rows.
//!
//! Departure: FastDecode spreads attention over many hosts; here is one.
//!
//! refs   FastDecode (He & Zhai 2024)

use crate::program::{Flow, Iteration, Phase, Side};

use super::continuous::Continuous;
use super::decision::Decision;
use super::draft::Draft;
use super::predict::Predict;
use super::queues::Queues;
use super::rows::{SubBatchRows, longest_waiting};
use super::strategy::{Limits, Strategy};
use super::view::RequestView;

/// See the [module](self).
#[derive(Debug, Clone, Default)]
pub(super) struct FastDecode {
    one_side: Continuous,
}

impl Strategy for FastDecode {
    fn name(&self) -> &'static str {
        "fastdecode"
    }

    fn most_pages(&self, limits: &Limits) -> usize {
        if limits.one_sided() { limits.pages(limits.first_side()) } else { limits.host_pages }
    }

    fn plan(&mut self, queues: &Queues, limits: &Limits, costs: &dyn Predict) -> Decision {
        if limits.one_sided() {
            return self.one_side.plan(queues, limits, costs);
        }
        let mut draft = Draft::new(queues, limits);
        // Those that another policy has put on the device.
        draft.leave();
        draft.admit(false, |_| true);
        let prompts = draft.prompts();
        let jobs = longest_waiting(draft.of(Side::Host, Phase::Decode).collect());
        let halves = symmetric(&jobs, &prompts, limits);
        let sub_batches: Vec<_> =
            halves.into_iter().filter(|r| !r.is_empty()).map(SubBatchRows::batch).collect();
        let flow = if sub_batches.len() == 2 { Flow::TwoLanes } else { Flow::Serial };
        draft.decide(Iteration { sub_batches, moves: Vec::new(), flow, pick: true, top: false })
    }
}

/// Decode rows of the host in two halves with about as many tokens, and prompts where there are fewer rows.
fn symmetric(jobs: &[&RequestView], prompts: &[(&RequestView, Side)], limits: &Limits) -> Vec<SubBatchRows> {
    let lanes = limits.sub_batches.min(2) as usize;
    let mut halves = vec![SubBatchRows::default(); lanes];
    let full = |r: &SubBatchRows, most: u32| r.load.rows >= u64::from(most);
    // A row is left for a prompt, unless there is a single one: then those go first that have waited longest.
    let first = prompts.first().map_or(0, |(job, _)| job.waited);
    let single = limits.rows == 1 && lanes == 1;
    let kept = match prompts.is_empty() {
        true => 0,
        false if single => u32::from(jobs.iter().all(|job| job.waited < first)),
        false => 1,
    };
    for job in jobs {
        let most = |i: usize| if i == 0 { limits.rows - kept } else { limits.rows };
        let open = (0..lanes).filter(|&i| !full(&halves[i], most(i)));
        let Some(at) = open.min_by_key(|&i| halves[i].load.host.1) else { break };
        halves[at].push(job.group(1, Side::Host));
    }
    for prompt in prompts {
        let least = (0..lanes).min_by_key(|&i| halves[i].load.rows).expect("a lane");
        halves[least].prompts(&[*prompt], limits.rows);
    }
    halves
}
