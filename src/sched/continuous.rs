//! Continuous batching on one side, with all memory promised on admission: each step has a row of every request that decodes, and as many rows of prompts as there is room for.
//!
//! ```text
//! step   1          2          3          4
//! rows   A A A A    A a B B    a B b      a b C C        A: a row of A's prompt, a: a decode row
//! ```
//!
//! * **Admission**: first come, first served, when a slot is free and the pages that a request may ever need are. A request
//!   that has to wait for pages may be overtaken by smaller ones behind it, but by at most [`Continuous::patience`] of
//!   them; then nothing behind it is admitted until it is. So no request starves, and what a request was promised is
//!   never taken back: none is stopped half way for want of a page.
//! * **Rows**: decode rows first (they are few, and somebody reads along), in turns where there are more than rows; an eighth
//!   of the rows is kept for prompts where there are some. Then prompts in the order of admission, in chunks.
//! * **Sub-batches** are filled one after the other, decode rows in the first ones. Prompts of many requests share a step,
//!   and where a step has several sub-batches, they share each streamed layer's way across the link (LIA §5: prefill in
//!   mini-batches, decode as one batch).
//!
//! refs   Orca (Yu et al. 2022, iteration-level scheduling); Sarathi-Serve (Agrawal et al. 2024, chunked prefill)

use crate::program::{Flow, Group, Iteration, Phase, RequestId, Side, SubBatch};

use super::decision::Decision;
use super::predict::Predict;
use super::queues::Queues;
use super::strategy::{Limits, Strategy};
use super::view::RequestView;

/// One row in this many of a step is reserved for prompts.
const KEPT_FOR_PROMPTS: u32 = 8;

/// See the [module](self).
#[derive(Debug, Clone)]
pub struct Continuous {
    /// Requests that may overtake one that waits for pages.
    pub patience: u32,
    /// The decode row whose turn is next.
    turn: usize,
}

impl Default for Continuous {
    fn default() -> Self {
        Continuous::new(16)
    }
}

impl Continuous {
    /// With this patience.
    pub fn new(patience: u32) -> Continuous {
        Continuous { patience, turn: 0 }
    }

    fn admission(&self, queues: &Queues, limits: &Limits) -> (Vec<(RequestId, Side)>, Vec<(RequestId, u32)>) {
        let mut places = (limits.sequences as usize).saturating_sub(queues.running().len());
        let side = limits.first_side();
        let mut pages = limits.pages(side).saturating_sub(queues.promised(side));
        let mut admit = Vec::new();
        // Those that have to wait, with how often each has been overtaken: before, and now.
        let mut held: Vec<(RequestId, u32, u32)> = Vec::new();
        for job in queues.waiting() {
            let patient = held.iter().all(|&(_, before, now)| before + now < self.patience);
            if places == 0 || !patient {
                break;
            }
            if job.pages() > pages {
                held.push((job.id, job.passed, 0));
                continue;
            }
            (places, pages) = (places - 1, pages - job.pages());
            held.iter_mut().for_each(|(.., now)| *now += 1);
            admit.push((job.id, side));
        }
        let passed = held.into_iter().filter(|&(.., now)| now > 0).map(|(id, _, now)| (id, now));
        (admit, passed.collect())
    }
}

/// The rows of a step.
fn rows(jobs: &[&RequestView], limits: &Limits, turn: &mut usize) -> Vec<SubBatch> {
    let side = limits.first_side();
    let (prompts, mut decode): (Vec<&RequestView>, Vec<&RequestView>) =
        jobs.iter().partition(|job| job.phase() == Phase::Prefill);
    let all = limits.rows.saturating_mul(limits.sub_batches);
    let kept = if prompts.is_empty() { 0 } else { (all / KEPT_FOR_PROMPTS).max(1) };
    let most = all.saturating_sub(kept) as usize;
    if decode.len() > most {
        let n = decode.len();
        decode.rotate_left(*turn % n);
        decode.truncate(most);
        *turn = (*turn + most) % n;
    }
    let mut batches: Vec<(Vec<Group>, Vec<Group>)> = Vec::new();
    for chunk in decode.chunks(limits.rows as usize) {
        batches.push((Vec::new(), chunk.iter().map(|job| job.group(1, side)).collect()));
    }
    let (mut at, mut room) = (0, limits.rows - batches.first().map_or(0, |b| b.1.len() as u32));
    for job in prompts {
        while room == 0 && at + 1 < limits.sub_batches as usize {
            at += 1;
            room = limits.rows - batches.get(at).map_or(0, |b| b.1.len() as u32);
        }
        let n = (job.prompt - job.stored).min(room);
        if n == 0 {
            break;
        }
        if at == batches.len() {
            batches.push(Default::default());
        }
        batches[at].0.push(job.group(n, side));
        room -= n;
    }
    let sub_batch = |(prompts, decode): (Vec<Group>, Vec<Group>)| SubBatch::of([prompts, decode].concat());
    batches.into_iter().map(sub_batch).collect()
}

impl Strategy for Continuous {
    fn name(&self) -> &'static str {
        "continuous batching"
    }

    fn most_pages(&self, limits: &Limits) -> usize {
        limits.pages(limits.first_side())
    }

    fn plan(&mut self, queues: &Queues, limits: &Limits, _costs: &dyn Predict) -> Decision {
        assert!(limits.rows > 0 && limits.sub_batches > 0, "no room for a row: {limits:?}");
        let (admit, passed) = self.admission(queues, limits);
        let new = queues.waiting().filter(|job| admit.iter().any(|(id, _)| *id == job.id));
        let jobs: Vec<&RequestView> = queues.running().iter().chain(new).collect();
        let sub_batches = rows(&jobs, limits, &mut self.turn);
        let iteration =
            Iteration { sub_batches, moves: Vec::new(), flow: Flow::Serial, pick: false, top: false };
        Decision { admit, passed, swaps: Vec::new(), iteration }
    }
}

#[cfg(test)]
mod tests;
