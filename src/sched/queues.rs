//! The two queues: requests that wait for memory, and those that have it.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use crate::program::{Group, Iteration, RequestId, Side};

use super::decision::Decision;
use super::lengths::LearnedLengths;
use super::targets::Targets;
use super::turns::TenantTurns;
use super::view::RequestView;

/// See the [module](self). A request is in one of them from [`Queues::submit`] to [`Queues::end`].
#[derive(Debug, Clone, Default)]
pub struct Queues {
    waiting: VecDeque<RequestView>,
    running: Vec<RequestView>,
    turns: TenantTurns,
    /// Seconds since the start, as far as who runs the steps has told.
    now: f64,
    targets: Targets,
    /// First tokens of requests that came one by one, and the seconds that they took.
    firsts: (usize, f64),
    lengths: LearnedLengths,
    /// Whether requests are expected to be as long as allowed, whatever others were.
    as_allowed: bool,
    /// Whether an answer ended before its limit: where the others end is not known.
    ends_early: bool,
    /// Whether a request ever had targets of its own: none of them is looked at before.
    own_targets: bool,
}

/// Waiting requests that comparisons look at, and whose lengths are expected anew when others have ended; those behind them come in their turn.
const IN_SIGHT: usize = 512;

impl Queues {
    /// Strategies expect answers to be as long as those that ended by themselves (which is so unless this is called), or as long as
    /// they may be.
    pub fn set_learns_lengths(&mut self, learns: bool) {
        self.as_allowed = !learns;
    }

    /// A request joins the waiting ones: behind those of its tenant, unless their priority is greater, and at the tenant's turn.
    pub fn submit(&mut self, job: RequestView) {
        let arrived = Some(job.arrived.unwrap_or(self.now)).into();
        let mut job = RequestView { arrived, ..job };
        if !self.as_allowed {
            job.expect(&self.lengths);
        }
        self.own_targets |= job.targets.is_some();
        self.turns.join(&mut self.waiting, job);
    }

    /// Seconds since the start.
    pub fn now(&self) -> f64 {
        self.now
    }

    /// Tells the time, before a step's [`commit`](Queues::commit).
    pub fn set_now(&mut self, now: f64) {
        self.now = now;
    }

    /// What is asked of latency.
    pub fn targets(&self) -> Targets {
        self.targets
    }

    /// Whether anything is asked of latency: of all requests, or by one of those in sight for itself.
    pub fn has_targets(&self) -> bool {
        let own = |job: &RequestView| job.targets.is_some();
        let some = || self.running.iter().chain(self.waiting.iter().take(IN_SIGHT)).any(own);
        self.targets.is_some() || self.own_targets && some()
    }

    /// Asks it of all requests that ask nothing for themselves.
    pub fn set_targets(&mut self, targets: Targets) {
        self.targets = targets;
    }

    /// A request has all of its answer, by itself or because it may have no more: others are expected to be like it. Returns whether
    /// it was there.
    pub fn answered(&mut self, id: RequestId) -> bool {
        if let Some(job) = self.running.iter().find(|job| job.id == id) {
            self.lengths.ended(job.made(), job.stored < job.most);
            self.ends_early |= job.stored < job.most;
        }
        let was_there = self.end(id);
        if self.lengths.is_due() && !self.as_allowed {
            let running = self.running.iter().filter(|job| job.first.is_some()).map(RequestView::made);
            self.lengths.learn(running);
            let all = self.running.iter_mut().chain(self.waiting.iter_mut().take(IN_SIGHT));
            all.for_each(|job| job.expect(&self.lengths));
        }
        was_there
    }

    /// A request is over, or has been cancelled; returns whether it was there.
    pub fn end(&mut self, id: RequestId) -> bool {
        let before = self.waiting.len() + self.running.len();
        self.waiting.retain(|j| j.id != id);
        self.running.retain(|j| j.id != id);
        self.waiting.len() + self.running.len() < before
    }

    /// The running requests, and the first waiting ones: what comparisons look at.
    pub(super) fn in_sight(&self) -> Queues {
        let waiting = self.waiting.iter().take(IN_SIGHT).cloned().collect();
        Queues {
            waiting,
            running: self.running.clone(),
            turns: TenantTurns::default(),
            now: self.now,
            targets: self.targets,
            firsts: (0, 0.0),
            lengths: LearnedLengths::default(),
            as_allowed: true,
            ends_early: self.ends_early,
            own_targets: self.own_targets,
        }
    }

    /// Requests without memory, in the order in which they are to be admitted.
    pub fn waiting(&self) -> impl ExactSizeIterator<Item = &RequestView> {
        self.waiting.iter()
    }

    /// Requests with memory, in the order in which they were admitted.
    pub fn running(&self) -> &[RequestView] {
        &self.running
    }

    /// Whether there is no request.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Pages promised to the running requests of a side.
    pub fn promised(&self, side: Side) -> usize {
        self.running.iter().filter(|j| j.home == Some(side)).map(RequestView::pages).sum()
    }

    /// Pages that the stored tokens of a side's requests take.
    pub fn stored(&self, side: Side) -> usize {
        self.running.iter().filter(|j| j.home == Some(side)).map(|j| j.pages_with(0)).sum()
    }

    /// Carries out the admissions and swaps of a decision.
    pub fn admit(&mut self, decision: &Decision) {
        for &(id, by) in &decision.passed {
            if let Some(job) = self.waiting.iter_mut().find(|j| j.id == id) {
                job.passed += by;
            }
        }
        for &(id, side) in &decision.admit {
            if let Some(at) = self.waiting.iter().position(|j| j.id == id) {
                let job = self.waiting.remove(at).expect("it waits there");
                self.turns.take(&job);
                self.running.push(RequestView { home: Some(side), ..job });
            }
        }
        for &(id, side) in &decision.swaps {
            if let Some(job) = self.running.iter_mut().find(|j| j.id == id) {
                job.home = Some(side);
            }
        }
    }

    /// The first tokens of an admitted request's prompt, fewer than it has, are stored before any step. Returns the request;
    /// `None` if it is not running.
    pub fn begin_at(&mut self, id: RequestId, stored: u32) -> Option<&RequestView> {
        let job = self.running.iter_mut().find(|job| job.id == id)?;
        job.stored = stored;
        Some(job)
    }

    /// Sets where running requests live and are parked to what `of` says: swaps may have failed, and cohorts ended.
    pub fn update_homes(&mut self, of: impl Fn(RequestId) -> Option<(Side, Option<u32>)>) {
        for job in &mut self.running {
            if let Some((home, at)) = of(job.id) {
                (job.home, job.at) = (Some(home), at);
            }
        }
    }

    /// Counts as stored what an iteration computed and its caller accepted. Groups of requests that have ended meanwhile are left out.
    ///
    /// `parked`: of each sub-batch, the layer whose attention it now waits for, or `None` if its rows are through all layers.
    /// Sub-batches behind its end are through.
    ///
    /// `accepted`: how many of a group's tokens stay, the first ones: all of them, but where some were guesses. Asked only for groups
    /// that are through all layers.
    ///
    /// # Panics
    /// In debug builds if more tokens of a group are accepted than it has.
    pub fn commit(
        &mut self,
        iteration: &Iteration,
        parked: &[Option<u32>],
        accepted: impl Fn(&Group) -> u32,
    ) {
        let place: FxHashMap<RequestId, usize> =
            self.running.iter().enumerate().map(|(at, job)| (job.id, at)).collect();
        for job in self.waiting.iter_mut().chain(&mut self.running) {
            job.waited += 1;
        }
        for (i, batch) in iteration.sub_batches.iter().enumerate() {
            let now = parked.get(i).copied().flatten();
            for group in &batch.groups {
                let Some(&at) = place.get(&group.request) else { continue };
                let job = &mut self.running[at];
                if now.is_none() {
                    let accepted = accepted(group);
                    debug_assert!(accepted <= group.tokens, "{accepted} tokens of {group:?}");
                    job.stored = group.first + accepted;
                    if job.stored >= job.likely && !self.as_allowed {
                        job.expect(&self.lengths);
                    }
                    if job.stored >= job.prompt && job.first.is_none() {
                        job.first = Some(self.now).into();
                        if job.is_awaited() {
                            let took = self.now - job.arrived.unwrap_or(self.now);
                            self.firsts = (self.firsts.0 + 1, self.firsts.1 + took);
                        }
                    }
                }
                if now.is_none() || now != job.at {
                    job.waited = 0;
                }
                job.at = now;
            }
        }
    }

    /// So many steps pass in which no request has rows.
    pub(super) fn wait(&mut self, steps: u32) {
        self.waiting.iter_mut().chain(&mut self.running).for_each(|job| job.waited += steps);
    }

    /// Ends running requests that have as many tokens as is likely; returns how many there were with targets, and how many of them too
    /// late.
    pub(super) fn end_complete(&mut self) -> (usize, usize) {
        let (mut ended, mut late) = (0, 0);
        let (now, targets) = (self.now, self.targets);
        self.running.retain(|job| {
            let ends = job.stored >= job.likely;
            if ends {
                let (ttft, tpot) = job.latency(now);
                let targets = targets.with(job.targets);
                ended += usize::from(targets.is_some());
                late += usize::from(!targets.met(ttft, tpot));
            }
            !ends
        });
        (ended, late)
    }

    /// Whether it is known which requests there will be, and for how long: then they can be held back so that the last do not end alone.
    pub(super) fn are_known(&self) -> bool {
        !self.ends_early && !self.is_online()
    }

    /// Whether requests came after the start, and others may.
    pub(super) fn is_online(&self) -> bool {
        self.targets.awaited && self.running.iter().chain(&self.waiting).any(RequestView::came_later)
    }

    /// Whether some request without its first token, and without a target for it, came after the start.
    pub(super) fn is_awaited(&self) -> bool {
        self.targets.awaited
            && self.running.iter().chain(&self.waiting).any(|job| job.first.is_none() && job.is_awaited())
    }

    /// The mean seconds to the first tokens of requests that came after the start and have no targets for them, since [`Queues::in_sight`] took them; those that have
    /// none yet count with what they have waited.
    pub(super) fn first_seconds(&self) -> f64 {
        let waits = self.running.iter().chain(&self.waiting).filter(|j| j.first.is_none() && j.is_awaited());
        let (n, sum) = waits
            .fold(self.firsts, |(n, sum), job| (n + 1, sum + self.now - job.arrived.unwrap_or(self.now)));
        sum / n.max(1) as f64
    }

    /// Requests that will be late whatever happens: their first token is, or is not there and would be.
    pub(super) fn hopeless(&self) -> usize {
        if self.targets.ttft.is_none() && !self.own_targets {
            return 0;
        }
        let late = |job: &&RequestView| {
            let most = job.targets.ttft.get().or(self.targets.ttft);
            most.is_some_and(|most| job.first.unwrap_or(self.now) - job.arrived.unwrap_or(self.now) > most)
        };
        self.running.iter().chain(&self.waiting).filter(late).count()
    }

    /// Requests with targets, of all or their own.
    pub(super) fn with_targets(&self) -> usize {
        let all = || self.running.iter().chain(&self.waiting);
        match self.targets.is_some() {
            true => all().count(),
            false if !self.own_targets => 0,
            false => all().filter(|job| job.targets.is_some()).count(),
        }
    }
}
