//! Runs a step: prepares both sides, issues the program, collects the results, and leaves nothing in flight.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::cohort_turn::CohortTurn;
use super::graphs::decodes;
use super::issue::Issue;
use super::lowered::Lowered;
use super::part::{GroupRows, Part};
use super::split::by_logits;
use super::{HostSide, RealMachine};
use crate::engine::host::HostWorkspace;
use crate::engine::kv::Moved;
use crate::engine::memory::check_beyond;
use crate::engine::outcome::CohortOutcome;
use crate::program::{Cargo, Group, Iteration, Kind, Kv, Op, Side, Unit};
#[cfg(doc)]
use crate::text::Top;
use crate::{Error, Result};

/// The shortest and the longest time for which a step keeps the host's threads awake.
const LEAST_ACTIVE: Duration = Duration::from_millis(50);
const MOST_ACTIVE: Duration = Duration::from_secs(2);

/// The results that are wanted of an iteration.
pub(in crate::engine) struct Results {
    /// Rows that want logits.
    pub rows: usize,
    /// Whether these are reduced to their likeliest tokens.
    pub pick: bool,
    /// If the likeliest tokens of some rows are enough for now: of each row, the factor of its [`Top::sum`], or `None`
    /// where all logits are wanted. Else empty. Logits then stay on the device until the next step, if they are computed there.
    pub factors: Vec<Option<f32>>,
}

impl RealMachine {
    /// Whether logits are computed on a device, where they may stay ([`Results::factors`]).
    pub fn gives_tops(&self) -> bool {
        self.placement.head == Side::Device
    }

    /// Runs an iteration: `rows` are those of all its groups, in the order of the sub-batches; `moved` has the copies of
    /// its moves, in order. Returns what became of its cohorts, whose attention on the host may be in flight afterwards, until
    /// they are told to leave. Nothing else is in flight afterwards, in every case, so pages may be reused. If an
    /// iteration fails, cohorts that had begun or joined are given up; the others are unchanged.
    ///
    /// # Errors
    /// If the iteration contradicts itself or cannot be lowered, has more rows or sub-batches than planned, if cohorts are
    /// not in the state that it states, or if the device or an operation of the host fails.
    pub fn run(
        &mut self,
        iteration: Iteration,
        rows: Vec<GroupRows<'_>>,
        moved: &[Moved],
        results: &Results,
    ) -> Result<Vec<CohortOutcome>> {
        let most = self.device.as_ref().map_or(usize::MAX, |d| d.limits.logit_rows);
        let steps = by_logits(iteration, rows, most)?;
        self.expect(results, steps.len() == 1);
        let mut cohorts = Vec::new();
        for (mut iteration, rows) in steps {
            self.kv.far.choose_way(&self.placement, &mut iteration);
            cohorts = self.step(&iteration, &rows, moved)?;
        }
        Ok(cohorts)
    }

    /// Begins steps with these results. The logits of one step may stay on the device; a next one would write over them.
    fn expect(&mut self, results: &Results, one_step: bool) {
        self.expected = if results.pick { (0, results.rows) } else { (results.rows, 0) };
        self.in_place = false;
        self.factors.clear();
        self.tops.clear();
        self.stayed.clear();
        if one_step && self.gives_tops() && results.factors.iter().any(Option::is_some) {
            assert_eq!(results.factors.len(), results.rows, "factors, and rows that want logits");
            self.factors.extend(results.factors.iter().map(|factor| factor.unwrap_or(1.0)));
            self.tops.resize(self.factors.len(), None);
            self.stayed.resize(self.factors.len(), None);
        }
    }

    /// [`RealMachine::run`] of an iteration whose logits fit.
    pub(super) fn step(
        &mut self,
        iteration: &Iteration,
        rows: &[GroupRows<'_>],
        moved: &[Moved],
    ) -> Result<Vec<CohortOutcome>> {
        let parts = Part::of(iteration, rows)?;
        #[cfg(test)]
        if let Some((steps, fails)) = &mut self.pretends {
            *steps += 1;
            self.logits.resize(self.expected.0 * self.spec.vocab, 0.0);
            return match Some(*steps) == *fails {
                true => Err(Error::Capacity("out of luck".into())),
                false => Ok(Vec::new()),
            };
        }
        if iteration.moves.is_empty() && parts.iter().all(|p| p.tokens.is_empty()) {
            return Ok(Vec::new());
        }
        if parts.len() > self.sub_batches {
            return Err(Error::Capacity(format!(
                "a step of {} sub-batches, {} were planned for",
                parts.len(),
                self.sub_batches
            )));
        }
        self.follow_router()?;
        let lowered = self.programs.get(&self.placement, iteration)?;
        let chains = self.begin_cohorts(iteration, &parts)?;
        if let Some(trace) = &mut self.trace {
            trace.begin_step(self.device.as_ref().map(|d| &*d.runtime))?;
        }
        let mut issue = Issue::new(&lowered, moved, chains);
        let began = self.wait_actively(&lowered);
        let done = self.run_parts(&lowered, &parts, &mut issue, iteration.pick);
        let logits = parts.iter().any(|p| !p.places.is_empty());
        let ended = self.end(&lowered, done.is_ok(), logits);
        self.wait_passively(began);
        let done = done.and(ended);
        let outcomes = self.end_cohorts(&parts, &issue.chains, &mut issue.lists, done.is_ok());
        done.map(|()| outcomes)
    }

    /// Keeps the host's threads awake during a step of both sides, which hands over some times a layer, but not much longer than such
    /// steps take. Returns when it began.
    fn wait_actively(&self, lowered: &Lowered) -> Option<Instant> {
        let lane = self.host.as_ref().and_then(|host| match host {
            HostSide::Lane(lane) if lowered.parts.iter().any(|part| part.on_host) => Some(lane),
            _ => None,
        })?;
        lane.wait_actively((4 * self.active_step).clamp(LEAST_ACTIVE, MOST_ACTIVE));
        Some(Instant::now())
    }

    /// Lets them sleep again.
    fn wait_passively(&mut self, began: Option<Instant>) {
        if let (Some(began), Some(HostSide::Lane(lane))) = (began, &self.host) {
            lane.wait_passively();
            self.active_step = began.elapsed();
        }
    }

    fn run_parts(
        &mut self,
        lowered: &Arc<Lowered>,
        parts: &[Part<'_>],
        issue: &mut Issue<'_>,
        pick: bool,
    ) -> Result<()> {
        self.check_rows(parts)?;
        if let Some(areas) = &mut self.areas {
            areas.begin();
        }
        let (head, inline) = (self.placement.head == Side::Host, self.device.is_none());
        // The host may be busy with cohorts of earlier steps, so it is used only if it has something to do.
        let computes = |b: usize| inline || lowered.parts[b].on_host;
        let own: Vec<usize> =
            (0..parts.len()).filter(|&b| computes(b) && issue.chains[b].turn == CohortTurn::None).collect();
        if !own.is_empty() && (issue.has_cohorts() || self.cohorts().next().is_some()) {
            // The lane may be busy with a cohort, for which no step waits.
            own.into_iter().for_each(|b| issue.prepared[b] = Some(self.prepare_by_lane(b, &parts[b], head)));
        } else if let Some(host) = self.host.as_mut().filter(|_| !own.is_empty()) {
            let work = &mut self.work;
            host.with(|half| {
                for b in own {
                    let part = &parts[b];
                    let seqs = part.host_sequences(false);
                    work.begin(b, &seqs, &part.boundaries(), &part.wanted);
                    half.prepare(b, &seqs, &part.tokens, &part.wanted, head);
                    if part.is_far() {
                        half.prepare_far(b, &part.host_sequences(true));
                    }
                }
            });
        }
        self.prepare_cohorts(parts, &mut issue.chains);
        // Steps whose pages move or that are attended in parts differ every time.
        let whole = |g: &Group| g.kv == Kv::Device;
        let own = if issue.has_cohorts() { &parts[..1] } else { parts };
        let repeated = self.device.is_some()
            && issue.moved.is_empty()
            && decodes(own)
            && own.iter().flat_map(|p| p.groups).all(whole);
        issue.lists = self.prepare_lists(lowered, parts, repeated)?;
        let mut at = 0;
        while at < lowered.program.ops.len() {
            let op = &lowered.program.ops[at];
            if issue.stays(op) {
                at += 1;
                continue;
            }
            self.note_begun(lowered, op, issue)?;
            if op.kind == Kind::Join {
                let joins = self.join(op, issue)? == CohortTurn::Joined;
                if let (Some(trace), Some(device)) = (&mut self.trace, &self.device) {
                    trace.looked(at, op, joins, &*device.runtime)?;
                }
                at += 1;
                continue;
            }
            if let Some(segment) = lowered.segment(at).filter(|_| repeated)
                && self.issue_graph(lowered, segment, issue)?
            {
                self.count_crossed(&lowered.program.ops[segment.ops.clone()]);
                at = segment.ops.end;
                continue;
            }
            let n = self.issue(lowered, at, issue, parts)?;
            let is_share = |op: &Op| matches!(op.kind, Kind::Carry { cargo: Cargo::Share, .. });
            if lowered.program.ops[at..at + n].iter().any(is_share) {
                self.send_expert()?;
            }
            self.count_crossed(&lowered.program.ops[at..at + n]);
            at += n;
        }
        // Done before the logits, for which the thread waits.
        if let (Some(busy), Some(device)) = (&mut self.busy, &self.device) {
            busy.pause_all(&*device.runtime)?;
        }
        self.collect(parts, &issue.chains, pick)
    }

    /// Returns an error for steps wider than planned.
    fn check_rows(&mut self, parts: &[Part<'_>]) -> Result<()> {
        let staged = parts.iter().flat_map(|p| &p.staged).map(Vec::len).sum::<usize>();
        if staged > self.kv.staged && self.kv.sides.device {
            return Err(Error::Capacity(format!(
                "prompts take {staged} pages of staging memory on their way to the host, there are {}; use fewer prompts in \
                 a step",
                self.kv.staged
            )));
        }
        if let Some(most) = self.device.as_ref().map(|d| d.limits.rows) {
            return match parts.iter().map(|p| p.tokens.len()).find(|&rows| rows > most) {
                None => Ok(()),
                Some(rows) => Err(Error::Capacity(format!(
                    "a step of {rows} rows, {most} were planned for; use smaller chunks"
                ))),
            };
        }
        // On the CPU alone a step may exceed the plan if the system has the memory.
        let (rows, logits) = parts.iter().fold((0, 0), |(r, l), p| (r + p.tokens.len(), l + p.wanted.len()));
        let bytes = HostWorkspace::bytes(&self.spec, rows, logits);
        if bytes > self.planned {
            let what = format!("a step of {rows} rows with logits of {logits}");
            check_beyond(&what, bytes - self.planned)?;
            self.planned = bytes;
        }
        Ok(())
    }

    /// Called after the step was issued or given up: waits until nothing of it runs.
    fn end(&mut self, lowered: &Lowered, well: bool, logits: bool) -> Result<()> {
        let mut ended = Ok(());
        if let Some(HostSide::Lane(lane)) = &mut self.host {
            if !well {
                lane.cancel();
            }
            let ran = lane.finish();
            if let (Ok(ran), Some(busy)) = (&ran, &mut self.busy) {
                busy.host(ran.iter().map(|r| r.to.saturating_duration_since(r.from).as_secs_f64()).sum());
            }
            match (ran, &mut self.trace) {
                (Ok(ran), Some(trace)) => ran.iter().for_each(|r| {
                    let of = r.program.as_deref().unwrap_or(lowered);
                    let op = &of.program.ops[r.op];
                    trace.ran(op, of.cohort(op), r);
                }),
                (Ok(_), None) => {}
                (Err(e), _) => ended = Err(e),
            }
        }
        if let Some(device) = &mut self.device {
            // If a step runs on one lane, all of it precedes the logits, for which the thread has waited.
            let waited_for = well && logits && lowered.one_unit == Some(Unit::Gpu);
            if !waited_for {
                ended = ended.and(device.release_all()).and(device.runtime.synchronize_all());
            }
        }
        if let Some(busy) = &mut self.busy {
            match well && ended.is_ok() {
                true => busy.end_step(self.device.as_ref().map(|d| &*d.runtime))?,
                false => busy.give_up(),
            }
        }
        if let Some(trace) = &mut self.trace {
            let runtime = self.device.as_ref().map(|d| &*d.runtime);
            match well && ended.is_ok() {
                true => trace.end_step(runtime)?,
                false => trace.give_up(),
            }
        }
        ended
    }
}
