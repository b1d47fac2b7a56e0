//! A step: prepare both sides, issue the program, collect, and leave nothing in flight.

use std::sync::Arc;

use super::cohorts::{Outcome, Turn};
use super::graphs::decodes;
use super::issue::Issue;
use super::lowered::Lowered;
use super::{HostSide, RealMachine};
use crate::cache::KvGeometry;
use crate::engine::host::{HostSeq, HostWorkspace};
use crate::engine::kv::{Moved, SequenceKv};
use crate::engine::memory::check_beyond;
use crate::program::{Far, Group, Iteration, Kind, Kv, Phase, Side, Unit, Wants};
use crate::{Error, Result};

/// What a machine has to know of a group of an iteration, beside what the group says.
#[derive(Clone, Copy)]
pub(in crate::engine) struct GroupRows<'a> {
    /// As many as the group's rows.
    pub tokens: &'a [u32],
    /// The sequence's pages, with room for the new tokens.
    pub table: &'a SequenceKv,
    /// Where the group's logits (or tokens) go, counted in rows of all that the step was asked for.
    pub out: usize,
}

/// A sub-batch of a step.
pub(super) struct Part<'a> {
    pub groups: &'a [Group],
    pub rows: &'a [GroupRows<'a>],
    /// Of all groups, in order.
    pub tokens: Vec<u32>,
    /// Rows that want logits, ascending.
    pub wanted: Vec<usize>,
    /// Where the logits of each of them go.
    pub places: Vec<usize>,
    /// Of each group, its pages in staging memory of layers with keys and values on the device: from that of token 0 on.
    pub staged: Vec<Vec<u32>>,
}

/// Pages that a group takes in staging memory.
fn staged_pages(group: &Group) -> usize {
    let tokens = match (group.kv, group.phase) {
        (Kv::Split { boundary, far: Far::Stream }, _) => boundary,
        (Kv::Host, Phase::Prefill) => group.end(),
        _ => 0,
    };
    KvGeometry::pages_for(tokens as usize)
}

impl<'a> Part<'a> {
    /// The sub-batches of an iteration; `rows` are those of all groups, in the order of the sub-batches.
    ///
    /// # Errors
    /// Rows that are not those of the groups.
    pub fn of(iteration: &'a Iteration, mut rows: &'a [GroupRows<'a>]) -> Result<Vec<Part<'a>>> {
        let mut parts = Vec::with_capacity(iteration.sub_batches.len());
        let mut staged = 0;
        for batch in &iteration.sub_batches {
            let groups = batch.groups.as_slice();
            let fits = |(g, r): (&Group, &GroupRows<'_>)| g.tokens as usize == r.tokens.len() && g.tokens > 0;
            if rows.len() < groups.len() || !groups.iter().zip(rows).all(fits) {
                return Err(Error::usage("the tokens of a step are not those of its groups"));
            }
            let own;
            (own, rows) = rows.split_at(groups.len());
            let mut part = Part {
                groups,
                rows: own,
                tokens: own.iter().flat_map(|r| r.tokens).copied().collect(),
                wanted: Vec::new(),
                places: Vec::new(),
                staged: Vec::with_capacity(groups.len()),
            };
            let mut row = 0;
            for (group, rows) in groups.iter().zip(own) {
                let end = row + group.tokens as usize;
                let wanted = match group.wants {
                    Wants::Nothing => end..end,
                    Wants::Last => end - 1..end,
                    Wants::All => row..end,
                };
                part.places.extend(rows.out..rows.out + wanted.len());
                part.wanted.extend(wanted);
                let pages = staged_pages(group) as u32;
                part.staged.push((staged..staged + pages).collect());
                staged += pages;
                row = end;
            }
            parts.push(part);
        }
        match rows {
            [] => Ok(parts),
            _ => Err(Error::usage("a step has tokens of more groups than there are")),
        }
    }

    /// As the host sees them: in layers with keys and values on the host, or those with some away from the device.
    pub fn host_sequences(&self, far: bool) -> Vec<HostSeq<'a>> {
        let sequence = |(g, r): (&Group, &GroupRows<'a>)| HostSeq {
            pages: if far { r.table.far_pages() } else { r.table.host_pages() },
            first_pos: g.first as usize,
            n_rows: g.tokens as usize,
            tokens: match g.kv {
                Kv::Split { boundary, .. } if far => 0..boundary as usize,
                Kv::Device if far => 0..0,
                _ => HostSeq::ALL,
            },
        };
        self.groups.iter().zip(self.rows).map(sequence).collect()
    }

    /// Of each group, the tokens whose pages are away from the device, in layers with keys and values there.
    pub fn boundaries(&self) -> Vec<usize> {
        let of = |g: &Group| match g.kv {
            Kv::Split { boundary, .. } => boundary as usize,
            _ => 0,
        };
        self.groups.iter().map(of).collect()
    }

    /// Whether the host has anything to do with pages away from the device.
    fn is_far(&self) -> bool {
        self.groups.iter().any(|g| g.kv != Kv::Device)
    }
}

impl RealMachine {
    /// What follows is a step that was asked for logits of `rows` rows: of their likeliest tokens only, if `pick`.
    pub fn expect(&mut self, rows: usize, pick: bool) {
        self.expected = if pick { (0, rows) } else { (rows, 0) };
        self.in_place = false;
    }

    /// Runs an iteration: `rows` are those of all its groups, in the order of the sub-batches; `moved` has the copies of its
    /// moves, in order. Whatever happens, nothing
    /// is in flight afterwards: pages may be given to others.
    ///
    /// # Errors
    /// An iteration that contradicts itself or cannot be lowered; more rows or sub-batches than were planned for; a
    /// device that failed, or an operation of the host.
    pub fn run(&mut self, iteration: &Iteration, rows: &[GroupRows<'_>], moved: &[Moved]) -> Result<()> {
        self.advance(iteration, rows, moved).map(drop)
    }

    /// As [`RealMachine::run`], of an asynchronous iteration: returns what has become of its cohorts. Of these attention on the host may
    /// be in flight afterwards, until they are told to leave. In an iteration that fails, those that had begun or joined are given
    /// up; the others are as they were.
    ///
    /// # Errors
    /// As [`RealMachine::run`]; cohorts that are not where the iteration says.
    pub fn advance(
        &mut self,
        iteration: &Iteration,
        rows: &[GroupRows<'_>],
        moved: &[Moved],
    ) -> Result<Vec<Outcome>> {
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
        let lowered = self.programs.get(&self.placement, iteration)?;
        let chains = self.begin_cohorts(iteration, &parts)?;
        if let Some(trace) = &mut self.trace {
            trace.begin_step(self.device.as_ref().map(|d| &*d.runtime))?;
        }
        let mut issue = Issue::new(&lowered, moved, chains);
        let done = self.run_parts(&lowered, &parts, &mut issue, iteration.pick);
        let logits = parts.iter().any(|p| !p.places.is_empty());
        let ended = self.end(&lowered, done.is_ok(), logits);
        let done = done.and(ended);
        let outcomes = self.end_cohorts(&parts, &issue.chains, &mut issue.lists, done.is_ok());
        done.map(|()| outcomes)
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
        // The host may be at cohorts of earlier steps: it is only asked for where it has something to do.
        let computes = |b: usize| inline || lowered.parts[b].on_host;
        let own: Vec<usize> =
            (0..parts.len()).filter(|&b| computes(b) && issue.chains[b].turn == Turn::None).collect();
        if !own.is_empty() && (issue.has_cohorts() || self.cohorts().next().is_some()) {
            // The lane may be busy with a cohort, which no step waits for.
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
        // What moves, or is attended in parts, is another step every time.
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
                let joins = self.join(op, issue)? == Turn::Joined;
                if let (Some(trace), Some(device)) = (&mut self.trace, &self.device) {
                    trace.looked(at, op, joins, &*device.runtime)?;
                }
                at += 1;
                continue;
            }
            if let Some(segment) = lowered.segment(at).filter(|_| repeated)
                && self.issue_graph(lowered, segment, issue)?
            {
                at = segment.ops.end;
                continue;
            }
            at += self.issue(lowered, at, issue, parts)?;
        }
        // Before the logits, which are waited for.
        if let (Some(busy), Some(device)) = (&mut self.busy, &self.device) {
            busy.pause_all(&*device.runtime)?;
        }
        self.collect(parts, &issue.chains, pick)
    }

    /// Refuses steps wider than planned.
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
        // On the CPU alone there is more than was planned for, if the system has it.
        let (rows, logits) = parts.iter().fold((0, 0), |(r, l), p| (r + p.tokens.len(), l + p.wanted.len()));
        let bytes = HostWorkspace::bytes(&self.spec, rows, logits);
        if bytes > self.planned {
            let what = format!("a step of {rows} rows with logits of {logits}");
            check_beyond(&what, bytes - self.planned)?;
            self.planned = bytes;
        }
        Ok(())
    }

    /// The step is issued, or given up: waits until nothing of it runs.
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
            // All of a step on one lane comes before the logits, which were waited for.
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
