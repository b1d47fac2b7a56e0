//! The two queues: requests that wait for memory, and those that have it.

use std::collections::VecDeque;

use crate::cache::KvGeometry;
use crate::program::{Iteration, Phase, RequestId};

use super::strategy::Decision;

/// What a strategy knows of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// Which.
    pub id: RequestId,
    /// Tokens of the prompt, at least 1.
    pub prompt: u32,
    /// Tokens stored when it has grown as far as it may.
    pub most: u32,
    /// Tokens stored: of the prompt first, then those generated.
    pub stored: u32,
    /// Later requests that were admitted before it.
    pub passed: u32,
}

impl Job {
    /// A new request.
    pub fn new(id: RequestId, prompt: u32, most: u32) -> Job {
        Job { id, prompt, most: most.max(prompt), stored: 0, passed: 0 }
    }

    /// Whether its next rows are of the prompt.
    pub fn phase(&self) -> Phase {
        if self.stored < self.prompt { Phase::Prefill } else { Phase::Decode }
    }

    /// Pages of keys and values that it may come to need: promised when it is admitted, so that it never stops half way
    /// for want of one.
    pub fn pages(&self) -> usize {
        KvGeometry::pages_for(self.most as usize)
    }
}

/// See the [module](self). A request is in one of them from [`Queues::submit`] to [`Queues::end`].
#[derive(Debug, Clone, Default)]
pub struct Queues {
    waiting: VecDeque<Job>,
    running: Vec<Job>,
}

impl Queues {
    /// A request joins the end of the waiting ones.
    pub fn submit(&mut self, job: Job) {
        self.waiting.push_back(job);
    }

    /// A request is over, or has been cancelled; returns whether it was there.
    pub fn end(&mut self, id: RequestId) -> bool {
        let before = self.waiting.len() + self.running.len();
        self.waiting.retain(|j| j.id != id);
        self.running.retain(|j| j.id != id);
        self.waiting.len() + self.running.len() < before
    }

    /// Requests without memory, in the order in which they came.
    pub fn waiting(&self) -> impl ExactSizeIterator<Item = &Job> {
        self.waiting.iter()
    }

    /// Requests with memory, in the order in which they were admitted.
    pub fn running(&self) -> &[Job] {
        &self.running
    }

    /// Whether there is no request.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Pages promised to the running requests.
    pub fn promised(&self) -> usize {
        self.running.iter().map(Job::pages).sum()
    }

    /// Requests change queues as decided.
    pub fn admit(&mut self, decision: &Decision) {
        for &(id, by) in &decision.passed {
            if let Some(job) = self.waiting.iter_mut().find(|j| j.id == id) {
                job.passed += by;
            }
        }
        for &id in &decision.admit {
            if let Some(at) = self.waiting.iter().position(|j| j.id == id) {
                self.running.extend(self.waiting.remove(at));
            }
        }
    }

    /// What an iteration computed is stored. Groups of requests that have ended meanwhile are left out.
    pub fn commit(&mut self, iteration: &Iteration) {
        for group in iteration.sub_batches.iter().flat_map(|s| &s.groups) {
            if let Some(job) = self.running.iter_mut().find(|j| j.id == group.request) {
                job.stored = group.end();
            }
        }
    }
}
