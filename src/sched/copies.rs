//! Copies of whole requests that change sides in a step: before its rows, or beside them.

use rustc_hash::FxHashMap;

use crate::program::{Iteration, MoveRequest, RequestId, Side};

use super::decision::Decision;
use super::queues::Queues;
use super::strategy::Limits;
use super::view::RequestView;

/// Copies run beside the step, unless it needs pages that they set free: then they come before it, as in the engine
/// ([`Engine::change`](crate::engine::Engine::change)).
#[derive(Debug, Clone)]
pub struct StepCopies {
    /// Free pages of each [`Side`].
    free: [usize; 2],
    first: Vec<MoveRequest>,
    beside: Vec<MoveRequest>,
}

impl StepCopies {
    /// Those of a decision that has not been carried out.
    pub fn of(decision: &Decision, queues: &Queues, limits: &Limits) -> StepCopies {
        let free = [Side::Device, Side::Host].map(|s| limits.pages(s).saturating_sub(queues.stored(s)));
        let mut copies = StepCopies { free, first: Vec::new(), beside: Vec::new() };
        for &(request, to) in &decision.swaps {
            let Some(job) = queues.running().iter().find(|job| job.id == request) else { continue };
            let pages = job.pages_with(0) as u32;
            if job.home.is_some_and(|home| home != to) && pages > 0 {
                copies.add(MoveRequest { request, to, pages: 0..pages });
            }
        }
        copies
    }

    fn add(&mut self, m: MoveRequest) {
        if self.free[m.to as usize] < m.pages.len() {
            self.finish();
        }
        let free = &mut self.free[m.to as usize];
        *free = free.saturating_sub(m.pages.len());
        self.beside.push(m);
    }

    /// Those under way end: what they leave is free.
    fn finish(&mut self) {
        for m in self.beside.drain(..) {
            self.free[1 - m.to as usize] += m.pages.len();
            self.first.push(m);
        }
    }

    /// Pages of all of them.
    pub fn pages(&self) -> u64 {
        self.first.iter().chain(&self.beside).map(|m| m.pages.len() as u64).sum()
    }

    /// All of them, in order.
    pub fn all(&self) -> Vec<MoveRequest> {
        self.first.iter().chain(&self.beside).cloned().collect()
    }

    /// Those before the rows of `iteration`, and those beside them, in order. `queues`: with the decision carried out.
    pub fn split(mut self, iteration: &Iteration, queues: &Queues) -> (Vec<MoveRequest>, Vec<MoveRequest>) {
        if self.beside.is_empty() {
            return (self.first, self.beside);
        }
        let jobs: FxHashMap<RequestId, &RequestView> =
            queues.running().iter().map(|job| (job.id, job)).collect();
        let mut more = [0; 2];
        for group in iteration.sub_batches.iter().flat_map(|batch| &batch.groups) {
            if let Some(job) = jobs.get(&group.request) {
                let side = job.home.unwrap_or(Side::Device);
                more[side as usize] += job.pages_with(group.tokens) - job.pages_with(0);
            }
        }
        if (0..2).any(|side| self.free[side] < more[side]) {
            self.finish();
        }
        (self.first, self.beside)
    }
}
