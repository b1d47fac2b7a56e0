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

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::super::outcome::Outcome;
use super::super::sequences::NOT_NUMBERS;
use super::{Batcher, Event, Finish, Live, Logprobs, StepReport, Token, scores};
use crate::cache::{KvGeometry, PAGE_TOKENS};
use crate::program::{Flow, Group, Iteration, Kv, MoveRequest, Phase, RequestId, Side, SubBatch, Wants};
use crate::sched::{Decision, Observed};
use crate::text::NO_TOKEN_LEFT;
use crate::{Error, Result};

/// Whole requests that change sides.
type Swaps = [(RequestId, Side)];

/// Most consecutive steps without progress of any request.
const IDLE_STEPS: u32 = 64;

/// What a step has done so far.
#[derive(Default)]
struct Progress {
    report: StepReport,
    /// Requests that end with an error.
    failed: Vec<(RequestId, Error)>,
    /// Requests without pages to continue.
    left_out: Vec<RequestId>,
    /// Requests that have ended normally.
    over: Vec<(RequestId, Finish)>,
    /// Why nothing made progress, if so.
    held_up: Option<Error>,
    /// Cohorts, and those of them that advanced.
    cohorts: u32,
    advanced: u32,
}

/// What is carried out of a decision.
struct Step {
    iteration: Iteration,
    swaps: Vec<(RequestId, Side)>,
    /// Of each sub-batch, the layer at which it is parked after the step.
    parked: Vec<Option<u32>>,
}

impl Step {
    fn has_rows(&self) -> bool {
        self.iteration.sub_batches.iter().any(|b| !b.groups.is_empty())
    }
}

impl Batcher {
    /// Makes one step. A step that fails is tried again request by request; those that fail alone end with the error,
    /// the others go on, since a failed step does not change stored data.
    pub fn step(&mut self) -> StepReport {
        self.update_homes();
        let decision = self.strategy.plan(&self.queues, &self.limits, &*self.costs);
        let mut done = Progress::default();
        let mut step = self.begin(decision, &mut done);
        self.run_step(&mut step, &mut done);
        self.commit(step, done)
    }

    /// Admits what the decision admits, and keeps of its rows and moves what can be computed now.
    fn begin(&mut self, decision: Decision, done: &mut Progress) -> Step {
        self.queues.admit(&decision);
        self.admit(&decision, done);
        let Decision { mut iteration, mut swaps, .. } = decision;
        keep(&mut iteration, |g| !done.failed.iter().any(|(refused, _)| *refused == g.request));
        self.keep_moves(&mut iteration, &mut swaps);
        self.begin_with_kept(&mut iteration, done);
        self.fit_staging(&mut iteration);
        self.want_scores(&mut iteration);
        if iteration.flow == Flow::Async && !self.engine.overlaps() {
            // There is no device, or a layer changes sides within its products.
            iteration.flow = Flow::Serial;
            iteration.sub_batches.iter_mut().for_each(|b| b.at = None);
        }
        Step { iteration, swaps, parked: Vec::new() }
    }

    /// Computes the rows of a step, and samples.
    fn run_step(&mut self, step: &mut Step, done: &mut Progress) {
        let has_rows = step.has_rows();
        let Step { iteration, swaps, parked } = step;
        if !has_rows && swaps.is_empty() && iteration.moves.is_empty() {
            return;
        }
        self.want_results(iteration);
        let predicted = if has_rows { self.predict(iteration, swaps) } else { 0.0 };
        self.unpark(iteration);
        match self.compute(iteration, swaps, done) {
            Ok(now) => {
                *parked = now;
                done.report.flow = has_rows.then_some(iteration.flow);
                done.report.predicted = predicted;
                done.report.swapped = swaps.len() + iteration.moves.len();
                let (seconds, cohorts, advanced) = (done.report.seconds, done.cohorts, done.advanced);
                self.strategy.observe(&Observed { predicted, seconds, cohorts, advanced });
            }
            Err(error) => self.one_by_one(iteration, swaps, error, done),
        }
    }

    /// Counts as stored what the step has stored, and ends the requests that are over.
    fn commit(&mut self, step: Step, mut done: Progress) -> StepReport {
        let Step { mut iteration, parked, .. } = step;
        let lost = |id: RequestId| done.failed.iter().any(|(f, _)| *f == id) || done.left_out.contains(&id);
        keep(&mut iteration, |g| !lost(g.request));
        // Between steps hardly any time passes while there are requests.
        self.queues.set_now(self.queues.now() + done.report.seconds);
        let engine = &self.engine;
        self.queues.commit(&iteration, &parked, |g| (engine.len(g.request) as u32).saturating_sub(g.first));
        self.remember(&iteration, &parked);
        self.watch(&mut done);
        let report = self.close(done);
        self.update_homes();
        report
    }

    /// Lets admitted requests live on the decided side.
    fn admit(&mut self, decision: &Decision, done: &mut Progress) {
        done.report.admitted = decision.admit.len();
        let has_homes = self.engine.has_homes();
        for &(id, side) in decision.admit.iter().filter(|_| has_homes) {
            if self.live.contains_key(&id)
                && let Err(error) = self.engine.set_side(id, side)
            {
                done.failed.push((id, error));
            }
        }
    }

    /// Lets prompts that begin now begin with pages that are there. At least their last token is computed, whose logits are
    /// wanted.
    fn begin_with_kept(&mut self, iteration: &mut Iteration, done: &mut Progress) {
        if !self.engine.keeps_prefixes() {
            return;
        }
        let groups = iteration.sub_batches.iter_mut().flat_map(|b| &mut b.groups);
        for group in groups.filter(|g| g.phase == Phase::Prefill && g.first == 0) {
            let Some(live) = self.live.get_mut(&group.request) else { continue };
            if live.prompt_logprobs.is_some() {
                // What was kept has no logits.
                continue;
            }
            let prompt = live.tokens.len();
            live.chain = self.engine.begin_with(group.request, &live.tokens[..prompt - 1]);
            let cached = live.chain.pages() * PAGE_TOKENS;
            if cached == 0 {
                continue;
            }
            let Some(job) = self.queues.begin_at(group.request, cached as u32) else { continue };
            *group =
                Group { kv: group.kv, ..job.group(group.tokens.min((prompt - cached) as u32), Side::Device) };
            done.report.cached += cached;
            // That nobody listens is found with the first token.
            (live.deliver)(Event::Cached(cached));
        }
    }

    /// Remembers the pages that a step has filled.
    fn remember(&mut self, iteration: &Iteration, parked: &[Option<u32>]) {
        if !self.engine.keeps_prefixes() {
            return;
        }
        for (i, batch) in iteration.sub_batches.iter().enumerate() {
            let through = parked.get(i).copied().flatten().is_none();
            for group in batch.groups.iter().filter(|_| through) {
                if let Some(live) = self.live.get_mut(&group.request) {
                    self.engine.remember(group.request, &mut live.chain, &live.tokens);
                }
            }
        }
    }

    /// Keeps the moves of pages that can be made: on engines that leave them to the scheduler, of rows that are not parked.
    fn keep_moves(&self, iteration: &mut Iteration, swaps: &mut Vec<(RequestId, Side)>) {
        let can = |id: RequestId| {
            self.engine.has_homes() && self.live.contains_key(&id) && self.engine.parked(id).is_none()
        };
        swaps.retain(|(id, _)| can(*id));
        iteration.moves.retain(|m| can(m.request));
    }

    /// Predicted seconds of an iteration, including the copies of whole requests.
    fn predict(&self, iteration: &mut Iteration, swaps: &Swaps) -> f64 {
        let parts = iteration.moves.len();
        for &(request, to) in swaps {
            let pages = KvGeometry::pages_for(self.engine.len(request)) as u32;
            if self.engine.side(request).is_some_and(|from| from != to) && pages > 0 {
                iteration.moves.push(MoveRequest { request, to, pages: 0..pages });
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
    fn one_by_one(&mut self, iteration: &Iteration, swaps: &Swaps, error: Error, done: &mut Progress) {
        let groups: Vec<Group> = iteration.sub_batches.iter().flat_map(|b| &b.groups).copied().collect();
        if let ([group], [], []) = (&groups[..], swaps, &iteration.moves[..]) {
            return done.leave(group.request, error);
        }
        // A sequence whose pages could not move is still complete on its old side.
        let mut moved = |moved: Result<()>| match moved {
            Ok(()) => done.report.swapped += 1,
            Err(error) => done.held_up = Some(error),
        };
        iteration.moves.iter().for_each(|m| moved(self.engine.move_part(m)));
        swaps.iter().for_each(|&(id, side)| moved(self.engine.swap(id, side)));
        self.alone(&groups, done);
    }

    /// Computes groups one after the other. Parked groups stay parked.
    fn alone(&mut self, groups: &[Group], done: &mut Progress) {
        for &group in groups {
            if self.engine.parked(group.request).is_some() {
                done.left_out.push(group.request);
                continue;
            }
            let mut iteration = Iteration::serial(vec![group], false);
            self.want_results(&mut iteration);
            if let Err(error) = self.compute(&mut iteration, &[], done) {
                done.leave(group.request, error);
            }
        }
    }

    /// Updates where sequences live and where their rows are parked: swaps may fail, and a cohort that loses a member
    /// starts over.
    pub(super) fn update_homes(&mut self) {
        if !self.engine.has_homes() {
            return;
        }
        let engine = &self.engine;
        let parked: HashMap<RequestId, u32> = engine
            .cohorts()
            .into_iter()
            .flat_map(|(ids, at)| ids.into_iter().map(move |id| (id, at)))
            .collect();
        self.queues.update_homes(|id| Some((engine.side(id)?, parked.get(&id).copied())));
    }

    /// Ensures progress.
    fn watch(&mut self, done: &mut Progress) {
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
            let name = self.strategy.name();
            Error::Run(format!("strategy {name} makes no step of any request that is there"))
        });
        done.failed.extend(oldest.map(|id| (id, why)));
    }

    /// Ends the requests that are over.
    fn close(&mut self, done: Progress) -> StepReport {
        let Progress { mut report, mut failed, over, .. } = done;
        for (id, how) in over {
            report.finished += usize::from(self.end(id, how));
        }
        for (id, error) in failed.drain(..) {
            report.failed += usize::from(self.end(id, Finish::Failed(Arc::new(error))));
        }
        report
    }

    /// Says what is wanted of the rows of an iteration: tokens if all of them need only the likeliest; else logits, which stay
    /// on the device where any row has a use for it.
    fn want_results(&self, iteration: &mut Iteration) {
        let is_async = iteration.flow == Flow::Async;
        let groups = || iteration.sub_batches.iter().flat_map(|b| &b.groups);
        let wanted = groups().filter(|g| g.wants == Wants::Last);
        let rows: Vec<&Live> = wanted.filter_map(|g| self.live.get(&g.request)).collect();
        let no_scores = groups().all(|g| g.wants != Wants::All);
        let parked = if is_async { self.engine.cohorts() } else { Vec::new() };
        let parked = parked.iter().flat_map(|(ids, _)| ids).filter_map(|id| self.live.get(id));
        let rows: Vec<&Live> = rows.into_iter().chain(parked).collect();
        iteration.pick = no_scores && rows.iter().copied().all(Live::is_greedy);
        iteration.top = !iteration.pick
            && self.engine.gives_tops()
            && rows.iter().any(|live| live.top_factor().is_some());
    }

    /// Computes an iteration and samples; requests that end thereby go to `done`. Reduces an asynchronous iteration to the
    /// work that was computed, and returns for each of its sub-batches the layer at which it is parked now.
    fn compute(
        &mut self,
        iteration: &mut Iteration,
        swaps: &Swaps,
        done: &mut Progress,
    ) -> Result<Vec<Option<u32>>> {
        let Outcome { cohorts, seconds } = self.engine.run(iteration, swaps, &self.live)?;
        done.report.seconds += seconds;
        if iteration.flow == Flow::Async {
            iteration.sub_batches.truncate(1);
        }
        let groups = || iteration.sub_batches.iter().flat_map(|b| &b.groups);
        done.report.rows += groups().map(|g| g.tokens as usize).sum::<usize>();
        let (mut rows, mut scored) = (Vec::new(), Vec::new());
        let mut row = 0;
        for group in groups() {
            let first = row;
            row += group.wanted() as usize;
            match group.wants {
                Wants::Nothing => {}
                Wants::Last => rows.push((group.request, first)),
                Wants::All => scored.push((*group, first)),
            }
        }
        for (group, first) in scored {
            match self.score(&group, first) {
                Ok(()) if group.end() as usize == self.live[&group.request].tokens.len() => {
                    rows.push((group.request, first + group.tokens as usize - 1));
                }
                Ok(()) => {}
                Err(error) => done.failed.push((group.request, error)),
            }
        }
        let ended =
            cohorts.iter().filter_map(|c| Some(c.groups.iter().map(|g| g.request).zip(c.rows.clone()?)));
        rows.extend(ended.flatten());
        for (id, row) in rows {
            let pick = match iteration.pick {
                true => self.engine.picks()[row]
                    .ok_or_else(|| Error::Run(NOT_NUMBERS.into()))
                    .map(|id| (id, None)),
                false => self.drawn(id, row),
            };
            self.answer(id, pick, done);
        }
        let mut parked = vec![None; iteration.sub_batches.len()];
        let mut failed = Vec::new();
        for cohort in cohorts {
            done.cohorts += 1;
            if cohort.advanced {
                done.advanced += 1;
                done.report.rows += cohort.groups.len();
            }
            if cohort.failed.is_some() {
                failed.extend_from_slice(&cohort.groups);
            }
            iteration.sub_batches.push(SubBatch::of(cohort.groups));
            parked.push(cohort.at);
        }
        // Those whose attention fails again are at fault.
        self.alone(&failed, done);
        Ok(parked)
    }

    /// Agrees a decision about cohorts with those that are parked, which the engine knows. Of an asynchronous iteration, keeps
    /// the device's rows and the cohorts that can begin; for others, discards cohorts that are in their way, whose tokens
    /// start over.
    fn unpark(&mut self, iteration: &mut Iteration) {
        if iteration.flow != Flow::Async {
            let rows: HashSet<RequestId> =
                iteration.sub_batches.iter().flat_map(|b| &b.groups).map(|g| g.request).collect();
            for (ids, _) in self.engine.cohorts() {
                if iteration.sub_batches.len() > 1 || ids.iter().any(|id| rows.contains(id)) {
                    self.engine.unpark(ids[0]);
                }
            }
            return;
        }
        let engine = &self.engine;
        let free = |g: &Group| engine.parked(g.request).is_none();
        let on_host = |g: &Group| !engine.has_homes() || engine.side(g.request) == Some(Side::Host);
        let mut left = engine.cohorts_free();
        let mut first = true;
        iteration.sub_batches.retain_mut(|batch| {
            if std::mem::take(&mut first) {
                batch.groups.retain(free);
                return true;
            }
            batch.groups.retain(|g| free(g) && on_host(g));
            let begins = batch.at.is_none() && !batch.groups.is_empty() && left > 0;
            left -= usize::from(begins);
            begins
        });
    }

    /// The next token of a request, from a row of the last step: among the likeliest tokens if these tell, else from all.
    fn drawn(&mut self, id: RequestId, row: usize) -> Result<Drawn> {
        let live = self.live.get_mut(&id).expect("a request that runs");
        if live.top_factor().is_some()
            && let Some(top) = self.engine.top(row)
        {
            let token = match &mut live.held {
                None => live.sampler.choose_among(top),
                Some(held) => {
                    let mask = held.mask()?;
                    live.sampler.likeliest_among(top, |id| mask.allows(id))
                }
            };
            if let Some(token) = token {
                return Ok((token, None));
            }
        }
        sample(live, self.engine.logits_row(row)?)
    }

    /// Appends a request's next token.
    fn answer(&mut self, id: RequestId, drawn: Result<Drawn>, done: &mut Progress) {
        let live = self.live.get_mut(&id).expect("a request that runs");
        if live.tokens.len() >= live.end {
            // Only its prompt was wanted.
            return done.over.push((id, Finish::Length));
        }
        let (token, logprobs) = match drawn {
            Ok(drawn) => drawn,
            // The step is done, so it cannot be tried again.
            Err(error) => return done.failed.push((id, error)),
        };
        done.report.tokens += 1;
        live.tokens.push(token);
        let mut piece = live.answer.push(token);
        let complete = match &mut live.held {
            Some(held) if !piece.stops => match held.take(token, &mut self.masks) {
                Ok(complete) => complete,
                Err(error) => return done.failed.push((id, error)),
            },
            _ => false,
        };
        let over = match (piece.stops || complete, live.tokens.len() >= live.end) {
            (true, _) => Some(Finish::Stop),
            (false, true) => Some(Finish::Length),
            (false, false) => None,
        };
        if over.is_some() {
            piece.text += &live.answer.finish();
        }
        let heard = (live.deliver)(Event::Token(Token { id: token, text: piece.text, logprobs }));
        done.over.extend(over.or((!heard).then_some(Finish::Cancelled)).map(|how| (id, how)));
    }
}

impl Progress {
    /// Handles a request that could not be computed alone.
    fn leave(&mut self, id: RequestId, error: Error) {
        match error {
            Error::Capacity(_) => {
                self.left_out.push(id);
                self.held_up = Some(error);
            }
            error => self.failed.push((id, error)),
        }
    }
}

/// Keeps only the groups that `keep` accepts.
fn keep(iteration: &mut Iteration, mut keep: impl FnMut(&Group) -> bool) {
    iteration.sub_batches.iter_mut().for_each(|b| b.groups.retain(&mut keep));
}

/// A token with its log-probabilities.
type Drawn = (u32, Option<Box<Logprobs>>);

/// The next token of a request, by its sampler.
fn sample(live: &mut Live, logits: &mut [f32]) -> Result<Drawn> {
    scores::check(logits)?;
    let nothing = || Error::Run(NO_TOKEN_LEFT.into());
    let mut choose = |logits: &mut [f32]| {
        if let Some(held) = &mut live.held {
            held.mask()?.apply(logits);
        }
        live.sampler.choose(logits, &live.tokens).ok_or_else(nothing)
    };
    let Some(k) = live.logprobs else {
        return Ok((choose(logits)?, None));
    };
    let raw = logits.to_vec();
    let token = choose(logits)?;
    Ok((token, Some(Box::new(Logprobs::of(&raw, token, k)?))))
}
