//! One step of all requests: carries out the strategy's decision and sends the results to the streams.
//!
//! ```text
//! plan ─► admit ─► swap, compute, sample ─► observe ─► commit ─► end what is over
//!                        │ fails
//!                        └─► each swap and each request alone: those that fail alone are the ones in error
//! ```
//! A request that cannot run for lack of pages has not failed: it is left out, and the strategy decides anew. If
//! nothing at all makes progress for long, the oldest request ends with the reason, so that no strategy can make a
//! client wait forever.

use std::borrow::Cow;
use std::collections::HashMap;
use std::time::Instant;

use super::super::input::{Input, Logits, StepPlan};
use super::super::kv::{Swap, Target};
use super::super::seq_id::SeqId;
use super::super::sequences::NOT_NUMBERS;
use super::{Event, Finish, Live, Requests, StepReport};
use crate::cache::KvGeometry;
use crate::program::{Flow, Group, Iteration, Kv, PageMove, Phase, RequestId, Side, SubBatch, Wants};
use crate::sched::{Decision, Observed, RequestView};
use crate::text::NO_TOKEN_LEFT;
use crate::{Error, Result};

/// Most consecutive steps without progress of any request.
const IDLE_STEPS: u32 = 64;

/// The outcome of a step.
#[derive(Default)]
pub(super) struct Outcome {
    pub report: StepReport,
    /// Requests that end with an error.
    failed: Vec<(RequestId, String)>,
    /// Requests without pages to continue.
    left_out: Vec<RequestId>,
    /// Requests that have ended normally.
    over: Vec<(RequestId, Finish)>,
    /// Why nothing made progress, if so.
    held_up: Option<String>,
    /// Cohorts, and those of them that advanced.
    pub cohorts: u32,
    pub advanced: u32,
}

impl Requests {
    /// Makes one step. A step that fails is tried again request by request; those that fail alone end with the error,
    /// the others go on, since a failed step does not change stored data.
    pub fn step(&mut self) -> StepReport {
        self.settle();
        let decision = self.strategy.plan(&self.queues, &self.limits, &*self.costs);
        self.queues.admit(&decision);
        let mut done = Outcome::default();
        self.admit(&decision, &mut done);
        let swaps = self.swaps(&decision);
        let mut iteration = decision.iteration;
        let refused: Vec<RequestId> = done.failed.iter().map(|(id, _)| *id).collect();
        keep(&mut iteration, |g| !refused.contains(&g.request));
        self.fit_staging(&mut iteration);
        if iteration.flow == Flow::Async && !self.engine.overlaps() {
            // There is no device, or a layer changes sides within its products.
            iteration.flow = Flow::Serial;
            iteration.sub_batches.iter_mut().for_each(|b| b.at = None);
        }
        let rows = iteration.sub_batches.iter().any(|b| !b.groups.is_empty());
        let mut parked = Vec::new();
        if rows || !swaps.is_empty() {
            iteration.pick = self.is_greedy(&iteration.sub_batches);
            iteration.top = !iteration.pick && self.has_tops(&iteration);
            let predicted = if rows { self.predict(&mut iteration, &swaps) } else { 0.0 };
            self.unpark(&iteration);
            let computed = match iteration.flow {
                Flow::Async => self.overlap(&mut iteration, &swaps, &mut done),
                flow => self.compute(&iteration.sub_batches, flow, &swaps, &mut done).map(|()| Vec::new()),
            };
            match computed {
                Ok(now) => {
                    parked = now;
                    done.report.flow = rows.then_some(iteration.flow);
                    done.report.predicted = predicted;
                    done.report.swapped = swaps.len();
                    let (seconds, cohorts, advanced) = (done.report.seconds, done.cohorts, done.advanced);
                    self.strategy.observe(&Observed { predicted, seconds, cohorts, advanced });
                }
                Err(error) => self.one_by_one(&iteration, &swaps, error, &mut done),
            }
        }
        let lost = |id: RequestId| done.failed.iter().any(|(f, _)| *f == id) || done.left_out.contains(&id);
        keep(&mut iteration, |g| !lost(g.request));
        // Between steps hardly any time passes while there are requests.
        self.queues.set_now(self.queues.now() + done.report.seconds);
        self.queues.commit(&iteration, &parked);
        self.watch(&mut done);
        let report = self.close(done);
        self.settle();
        report
    }

    /// Adds sequences for admitted requests, on the decided side.
    fn admit(&mut self, decision: &Decision, done: &mut Outcome) {
        done.report.admitted = decision.admit.len();
        for &(id, side) in &decision.admit {
            let seq = match self.engine.has_homes() {
                true => self.engine.add_at(side),
                false => Ok(self.engine.add()),
            };
            match (seq, self.live.get_mut(id)) {
                (Ok(seq), Some(live)) => live.seq = Some(seq),
                (Ok(seq), None) => self.engine.remove(seq),
                (Err(error), _) => done.failed.push((id, error.to_string())),
            }
        }
    }

    /// The sequences that change sides, entirely or (moves of the iteration) from their beginning.
    fn swaps(&self, decision: &Decision) -> Vec<Swap> {
        let whole = decision.swaps.iter().map(|&(id, side)| (id, Target::Whole(side)));
        let parts = decision.iteration.moves.iter().map(|m| {
            let boundary = if m.to == Side::Host { m.pages.end } else { m.pages.start };
            (m.request, Target::Split(boundary as usize))
        });
        // A parked row does not move.
        let free = |seq: &SeqId| self.engine.parked(*seq).is_none();
        let swap = |(id, to)| Some(Swap { seq: self.live.get(id)?.seq.filter(free)?, to });
        match self.engine.has_homes() {
            true => whole.chain(parts).filter_map(swap).collect(),
            false => Vec::new(),
        }
    }

    /// Predicted seconds of an iteration, including the copies of whole requests.
    fn predict(&self, iteration: &mut Iteration, swaps: &[Swap]) -> f64 {
        let parts = iteration.moves.len();
        for swap in swaps {
            let (Target::Whole(to), from) = (swap.to, self.engine.side(swap.seq)) else { continue };
            let pages = KvGeometry::pages_for(self.engine.len(swap.seq)) as u32;
            let job =
                |job: &&RequestView| self.live.get(job.id).is_some_and(|live| live.seq == Some(swap.seq));
            if let Some(job) = self.queues.running().iter().find(job)
                && from.is_some_and(|from| from != to)
                && pages > 0
            {
                iteration.moves.push(PageMove { request: job.id, to, pages: 0..pages });
            }
        }
        let seconds = self.costs.iteration(iteration);
        iteration.moves.truncate(parts);
        seconds
    }

    /// Leaves out prompts that go to the host and do not fit in staging memory; they follow in later steps.
    fn fit_staging(&self, iteration: &mut Iteration) {
        let mut left = self.engine.staging_pages();
        if !self.engine.has_homes() || left == 0 {
            return;
        }
        keep(iteration, |g| {
            let staged = g.kv == Kv::Host && g.phase == Phase::Prefill;
            let pages = if staged { KvGeometry::pages_for(g.end() as usize) } else { 0 };
            let fits = pages <= left;
            left -= if fits { pages } else { 0 };
            fits
        });
    }

    /// Tries each swap and request again, alone.
    fn one_by_one(&mut self, iteration: &Iteration, swaps: &[Swap], error: Error, done: &mut Outcome) {
        let groups: Vec<Group> = iteration.sub_batches.iter().flat_map(|b| &b.groups).copied().collect();
        if let ([group], []) = (&groups[..], swaps) {
            return done.leave(group.request, error);
        }
        // A sequence whose pages could not move is still complete on its old side.
        for &swap in swaps {
            match self.engine.change(&[swap]) {
                Ok(()) => done.report.swapped += 1,
                Err(error) => done.held_up = Some(error.to_string()),
            }
        }
        self.alone(&groups, done);
    }

    /// Computes groups one after the other. Parked groups stay parked.
    pub(super) fn alone(&mut self, groups: &[Group], done: &mut Outcome) {
        for &group in groups {
            let seq = self.live.get(group.request).and_then(|live| live.seq);
            if seq.is_some_and(|seq| self.engine.parked(seq).is_some()) {
                done.left_out.push(group.request);
                continue;
            }
            if let Err(error) = self.compute(&[SubBatch::of(vec![group])], Flow::Serial, &[], done) {
                done.leave(group.request, error);
            }
        }
    }

    /// Updates where sequences live and where their rows are parked: swaps may fail, and a cohort that loses a member
    /// starts over.
    pub(super) fn settle(&mut self) {
        if !self.engine.has_homes() {
            return;
        }
        let (live, engine) = (&self.live, &self.engine);
        let parked: HashMap<SeqId, u32> = engine
            .cohorts()
            .into_iter()
            .flat_map(|(seqs, at)| seqs.into_iter().map(move |s| (s, at)))
            .collect();
        self.queues.settle(|id| {
            let seq = live.get(id)?.seq?;
            Some((engine.side(seq)?, parked.get(&seq).copied()))
        });
    }

    /// Ensures progress.
    fn watch(&mut self, done: &mut Outcome) {
        let r = &done.report;
        let moves =
            done.cohorts > 0 || r.rows > 0 || r.swapped > 0 || r.admitted > 0 || !done.failed.is_empty();
        self.idle_steps = if moves || self.queues.is_empty() { 0 } else { self.idle_steps + 1 };
        if self.idle_steps <= IDLE_STEPS {
            return;
        }
        self.idle_steps = 0;
        let oldest = self.queues.running().first().or(self.queues.waiting().next()).map(|job| job.id);
        let why = done.held_up.take().unwrap_or_else(|| {
            format!("strategy {} makes no step of any request that is there", self.strategy.name())
        });
        done.failed.extend(oldest.map(|id| (id, why)));
    }

    /// Ends the requests that are over.
    fn close(&mut self, done: Outcome) -> StepReport {
        let Outcome { mut report, mut failed, over, .. } = done;
        for (id, how) in over {
            match how {
                Finish::Failed(why) => failed.push((id, why)),
                how => report.finished += usize::from(self.end(id, how)),
            }
        }
        for (id, why) in failed {
            report.failed += usize::from(self.end(id, Finish::Failed(why)));
        }
        report
    }

    /// Computes the rows of sub-batches and samples; requests that end thereby go to `done`.
    fn compute(
        &mut self,
        batches: &[SubBatch],
        flow: Flow,
        swaps: &[Swap],
        done: &mut Outcome,
    ) -> Result<()> {
        let live = &self.live;
        let of = |group: &Group| live.get(group.request).expect("a request that runs");
        let groups = || batches.iter().flat_map(|batch| &batch.groups);
        let input = |group| {
            let of: &Live = of(group);
            let rows = group.first as usize..group.end() as usize;
            let logits = if group.wants == Wants::Last { Logits::Last } else { Logits::None };
            Input { seq: of.seq.expect("admitted"), tokens: &of.tokens[rows], logits }
        };
        let inputs: Vec<Input<'_>> = groups().map(input).collect();
        let split: Vec<u8> =
            (0u8..).zip(batches).flat_map(|(i, batch)| std::iter::repeat_n(i, batch.groups.len())).collect();
        let plan = StepPlan { split: Some(&split), flow, swaps };
        let ready: Vec<RequestId> = groups().filter(|g| g.wants == Wants::Last).map(|g| g.request).collect();
        let greedy = self.is_greedy(batches);
        let begun = (Instant::now(), self.engine.emulated_seconds());
        let mut picks: Vec<Pick> = Vec::new();
        match greedy {
            true => picks.extend(self.engine.picks_plan(&inputs, &plan)?.iter().map(|p| likeliest(*p))),
            false => {
                let factor = |id: &RequestId| live.get(*id).and_then(Live::top_factor);
                let factors: Vec<Option<f32>> = ready.iter().map(factor).collect();
                self.engine.forward_tops(&inputs, &factors, &plan)?;
            }
        }
        done.report.seconds += match (begun.1, self.engine.emulated_seconds()) {
            (Some(begun), Some(now)) => now - begun,
            _ => begun.0.elapsed().as_secs_f64(),
        };
        if !greedy {
            picks.extend(ready.iter().enumerate().map(|(row, &id)| self.drawn(id, row)));
        }
        done.report.rows += batches.iter().map(|batch| batch.rows() as usize).sum::<usize>();
        for (id, pick) in ready.into_iter().zip(picks) {
            self.answer(id, pick, done);
        }
        Ok(())
    }

    /// Whether logits stay on the device: where any of their rows has a use for it.
    fn has_tops(&self, iteration: &Iteration) -> bool {
        let groups = iteration.sub_batches.iter().flat_map(|batch| &batch.groups);
        let has = |g: &Group| self.live.get(g.request).is_some_and(|live| live.top_factor().is_some());
        iteration.flow != Flow::Async
            && self.engine.gives_tops()
            && groups.filter(|g| g.wants == Wants::Last).any(has)
    }

    /// Whether all rows need only their likeliest token.
    fn is_greedy(&self, batches: &[SubBatch]) -> bool {
        let mut groups = batches.iter().flat_map(|batch| &batch.groups).filter(|g| g.wants == Wants::Last);
        groups.all(|g| self.live.get(g.request).is_some_and(Live::is_greedy))
    }

    /// The next token of a request, from a row of the last step: among the likeliest tokens if these tell, else from all.
    fn drawn(&mut self, id: RequestId, row: usize) -> Pick {
        let live = self.live.get_mut(id).expect("a request that runs");
        if live.top_factor().is_some()
            && let Some(token) = self.engine.top(row).and_then(|top| live.sampler.choose_among(top))
        {
            return Ok(token);
        }
        // The step is done, so it cannot be tried again.
        sample(live, self.engine.logits_row(row).map_err(|e| Cow::from(format!("{LOST}: {e}")))?)
    }

    /// Appends a request's next token.
    pub(super) fn answer(&mut self, id: RequestId, pick: Pick, done: &mut Outcome) {
        let live = self.live.get_mut(id).expect("a request that runs");
        let token = match pick {
            Ok(token) => token,
            Err(why) => {
                done.over.push((id, Finish::Failed(why.into_owned())));
                return;
            }
        };
        done.report.tokens += 1;
        live.tokens.push(token);
        let heard = live.events.send(Event::Token(token)).is_ok();
        if live.stop.contains(&token) {
            done.over.push((id, Finish::Stop));
        } else if live.tokens.len() >= live.end {
            done.over.push((id, Finish::Length));
        } else if !heard {
            done.over.push((id, Finish::Cancelled));
        }
    }
}

impl Outcome {
    /// Handles a request that could not be computed alone.
    fn leave(&mut self, id: RequestId, error: Error) {
        match error {
            Error::Capacity(why) => {
                self.left_out.push(id);
                self.held_up = Some(why);
            }
            error => self.failed.push((id, error.to_string())),
        }
    }
}

/// Keeps only the groups that `keep` accepts.
fn keep(iteration: &mut Iteration, mut keep: impl FnMut(&Group) -> bool) {
    iteration.sub_batches.iter_mut().for_each(|b| b.groups.retain(&mut keep));
}

/// Why there is no token of a row whose logits have stayed on a device that fails.
const LOST: &str = "the scores could not be read";

/// The next token of a request, or why there is none.
pub(super) type Pick = std::result::Result<u32, Cow<'static, str>>;

/// The token that the device has chosen, which has none among scores that are not numbers.
pub(super) fn likeliest(pick: Option<u32>) -> Pick {
    pick.ok_or(NOT_NUMBERS.into())
}

/// The next token of a request, by its sampler. A score of minus infinity only excludes its token.
pub(super) fn sample(live: &mut Live, logits: &mut [f32]) -> Pick {
    let usable = logits.iter().all(|&x| x < f32::INFINITY) && logits.iter().any(|x| x.is_finite());
    if !usable {
        return Err(NOT_NUMBERS.into());
    }
    live.sampler.choose(logits, &live.tokens).ok_or(NO_TOKEN_LEFT.into())
}
