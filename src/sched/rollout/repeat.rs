//! Steps of decode rows that repeat until something happens that a policy would answer to: a request ends, pages run out, a cohort has
//! its token. They are not planned again, and priced by the first and the last of them.
//!
//! Most steps of long answers are such, and without this a comparison of policies over 100 000 steps would end before its work is
//! done. What it neglects: host rows that take turns do so in longer turns, and those that wait until it is their turn ([`AGE`]) wait longer. Such
//! runs looked up to 6% shorter than they are, so where there is time ([`Rollout::exactly`]) no repetition has turns in it.

use super::super::learn::Learned;
use super::super::pipeline::AGE;
use super::super::predict::Predict;
use super::super::rows::RowLoad;
use super::super::strategy::Limits;
use super::super::view::RequestView;
use super::{Rollout, mode};
use crate::program::{Flow, Group, Iteration, Kv, Phase, RequestId, Side};

/// Most repetitions at once.
const MOST: u32 = 16;

/// The same step with its rows `steps` tokens later; those of cohorts stay.
fn later(iteration: &Iteration, steps: u32) -> Iteration {
    let mut next = iteration.clone();
    let own = if iteration.flow == Flow::Async { 1 } else { next.sub_batches.len() };
    let groups = next.sub_batches.iter_mut().take(own).flat_map(|batch| &mut batch.groups);
    groups.for_each(|group: &mut Group| group.first += steps);
    next
}

impl Rollout {
    /// How often a step could follow itself: no row of a prompt, no end, room for all that grows.
    fn repeats(&self, iteration: &Iteration, limits: &Limits) -> u32 {
        let mut groups = iteration.sub_batches.iter().flat_map(|batch| &batch.groups);
        let begins = iteration.cohorts().any(|(_, batch)| batch.at.is_none());
        if begins || !iteration.moves.is_empty() || groups.any(|group| group.phase == Phase::Prefill) {
            return 0;
        }
        let own = if iteration.flow == Flow::Async { 1 } else { usize::MAX }.min(iteration.sub_batches.len());
        let rows: rustc_hash::FxHashSet<RequestId> =
            iteration.sub_batches[..own].iter().flat_map(|b| &b.groups).map(|g| g.request).collect();
        let running = self.queues.running();
        let host_rows = iteration.sub_batches[..own].iter().flat_map(|b| &b.groups).any(|g| g.kv == Kv::Host);
        let is_left_out = |job: &RequestView| {
            let decodes = job.phase() == Phase::Decode && job.home == Some(Side::Host);
            decodes && job.at.is_none() && !rows.contains(&job.id)
        };
        let mut turn = MOST;
        if self.exact > 0 && (host_rows || self.policy.gives_turns()) {
            for job in running.iter().filter(|job| is_left_out(job)) {
                turn = if host_rows { 0 } else { turn.min(AGE.saturating_sub(job.waited + 1)) };
            }
        }
        let left = running
            .iter()
            .filter(|job| rows.contains(&job.id))
            .map(|job| job.likely.saturating_sub(job.stored));
        let mut steps = left.min().map_or(0, |least| least.saturating_sub(1)).min(turn);
        let fits = |steps: u32| {
            [Side::Device, Side::Host].into_iter().all(|side| {
                let jobs = running.iter().filter(|job| job.home == Some(side));
                jobs.map(|job: &RequestView| job.pages_with(steps + 1)).sum::<usize>() <= limits.pages(side)
            })
        };
        while steps > 0 && !fits(steps) {
            steps /= 2;
        }
        steps
    }

    /// Repeats a step that took `takes` seconds and left its sub-batches `parked`, while nothing happens. Returns how often that was
    /// worked out: once for steps without cohorts, which are taken together.
    pub(super) fn repeat(
        &mut self,
        iteration: &Iteration,
        mut parked: Vec<Option<u32>>,
        takes: f64,
        limits: &Limits,
        costs: &dyn Predict,
        learned: &Learned,
    ) -> u32 {
        let steps = self.repeats(iteration, limits);
        self.exact = self.exact.saturating_sub(1);
        let has_token = |parked: &[Option<u32>]| {
            iteration.cohorts().any(|(b, _)| parked.get(b as usize).copied().flatten().is_none())
        };
        if steps < 2 || has_token(&parked) {
            return 0;
        }
        let last = later(iteration, steps);
        let grows = (costs.iteration(&last) * learned.ratio(mode(iteration)) - takes) / f64::from(steps);
        if iteration.flow != Flow::Async {
            let n = f64::from(steps);
            self.seconds += n * takes + grows * n * (n + 1.0) / 2.0;
            let load = RowLoad::of(iteration.sub_batches.iter().flat_map(|b| &b.groups));
            self.advanced(n * self.worth.of(&load));
            self.queues.wait(steps - 1);
            self.queues.set_now(self.from + self.seconds);
            self.queues.commit(&last, &[], |g| g.tokens);
            return 1;
        }
        for step in 1..=steps {
            let mut next = later(iteration, step);
            for (batch, parked) in next.sub_batches.iter_mut().zip(&parked) {
                batch.at = *parked;
            }
            parked = self.commit(&next, takes + grows * f64::from(step), costs);
            if has_token(&parked) {
                return step;
            }
        }
        steps
    }
}
