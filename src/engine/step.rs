//! One step: an [`Iteration`] goes in, results of its rows come out.
//!
//! ```text
//! check ─► make room ─► change sides ─► reserve pages ─► compute ─► count the tokens as stored
//!             │              │                │             │ fails
//!             └──────────────┴────────────────┴─────────────┴─► every page is back where it was
//! ```
//! The iteration says which rows are computed, in which sub-batches; the engine adds what only it knows: the pages of
//! each sequence, where they are, and which cohorts are parked.

use std::time::Instant;

use super::kv::{Moved, SequenceKv};
use super::machine::{GroupRows, Parked, Results};
use super::outcome::{CohortOutcome, Outcome, TokenSource};
use super::sequences::Engine;
use crate::program::{Far, Flow, Group, Iteration, Kv, Phase, RequestId, Side, SubBatch, Wants};
use crate::sched::SlotMap;
use crate::{Error, Result};

impl Engine {
    /// Runs an iteration, which appends the keys and values of its rows.
    ///
    /// `swaps` are whole sequences that change sides, and new tokens with them; [`Iteration::moves`] are beginnings of
    /// sequences that do (the pages up to the end of a move to the host, or up to the start of a move to the device, are on the
    /// host afterwards). Both happen before the rows of these sequences, and while others are computed; they need an
    /// engine that [`has_homes`](Engine::has_homes).
    ///
    /// With [`Flow::Async`] all parked cohorts take part, whether the iteration names them or not, and the sub-batches
    /// behind the first that are not [parked](SubBatch::at) begin as cohorts: one token of each of their sequences,
    /// which live on the host. Until its token has passed all layers, a cohort's sequences are unchanged and in no other step.
    ///
    /// [`Group::kv`] of the iteration is not read: the engine knows where keys and values are.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, a sequence has ended, does not continue where its group begins, is parked, would
    /// outgrow its context or occurs twice; if there are no free pages, more sub-batches than
    /// [`Options::sub_batches`](super::Options::sub_batches), or more rows than planned; or if the device has failed. No
    /// sequence has changed then, but one whose copies had to end first to make room stays at its new place; and cohorts
    /// that had begun or advanced in this step are no longer parked ([`Engine::parked`]): their tokens start over.
    pub fn run(
        &mut self,
        iteration: &Iteration,
        swaps: &[(RequestId, Side)],
        source: &dyn TokenSource,
    ) -> Result<Outcome> {
        let is_async = iteration.flow == Flow::Async;
        // Parked rows have their pages and tokens already.
        let unparked = iteration.sub_batches.iter().filter(|b| b.at.is_none());
        let step: Vec<Group> = unparked.flat_map(|b| &b.groups).copied().collect();
        self.check_moves(swaps, &iteration.moves)?;
        self.check_groups(&step, source)?;
        if is_async {
            self.check_cohorts(iteration, swaps)?;
        } else {
            self.make_room(&step)?;
        }
        let began = (Instant::now(), self.emulated_seconds());
        let parked: Vec<(usize, Parked)> = match is_async {
            true => self.machine.cohorts().map(|(b, p)| (b, p.clone())).collect(),
            false => Vec::new(),
        };
        let mut moved = Vec::new();
        let done = self
            .begin_moves(swaps, &iteration.moves, &mut moved)
            .and_then(|()| self.reserve_for(&step, is_async, &mut moved))
            .and_then(|()| self.compute(iteration, source, &parked, &moved));
        if done.is_err() {
            step.iter().for_each(|g| self.release(g.request));
            let left = |g: &&Group| self.machine.parked_at(g.request).is_none();
            let gone: Vec<Group> = parked.iter().flat_map(|(_, p)| &p.groups).filter(left).copied().collect();
            gone.iter().for_each(|g| self.release(g.request));
        }
        self.moved(&moved, done.is_ok());
        let cohorts = done?;
        let own = if is_async {
            iteration.sub_batches.get(..1).unwrap_or_default()
        } else {
            &iteration.sub_batches
        };
        own.iter().flat_map(|b| &b.groups).for_each(|g| self.advance(g));
        for cohort in &cohorts {
            match (&cohort.failed, &cohort.rows) {
                (Some(_), _) => cohort.groups.iter().for_each(|g| self.release(g.request)),
                (None, Some(_)) => cohort.groups.iter().for_each(|g| self.advance(g)),
                (None, None) => {}
            }
        }
        let seconds = match (began.1, self.emulated_seconds()) {
            (Some(began), Some(now)) => now - began,
            _ => began.0.elapsed().as_secs_f64(),
        };
        Ok(Outcome { cohorts, seconds })
    }

    fn check_groups(&self, step: &[Group], source: &dyn TokenSource) -> Result<()> {
        step.iter().try_for_each(|g| self.check_live(g.request))?;
        self.check_unparked(step.iter().map(|g| g.request))?;
        if repeats(step.iter().map(|g| g.request.slot as usize), self.sequences.capacity()) {
            return Err(Error::usage("a sequence appears twice in one step"));
        }
        for g in step {
            let (tokens, stored) = (source.tokens(g), self.len(g.request));
            if tokens.len() != g.tokens as usize || g.first as usize != stored {
                return Err(Error::usage(format!(
                    "{} tokens from position {} on for {} rows of a sequence that holds {stored}",
                    tokens.len(),
                    g.first,
                    g.tokens
                )));
            }
            if g.end() as usize > self.context() {
                return Err(Error::Capacity(format!(
                    "{} tokens do not fit the context of {}; raise `context`",
                    g.end(),
                    self.context()
                )));
            }
            self.check_tokens(tokens)?;
        }
        Ok(())
    }

    /// Makes room for a step on the device, if pages can leave it.
    fn make_room(&mut self, step: &[Group]) -> Result<()> {
        let kv = self.machine.kv();
        let Some(pager) = &kv.pager else { return Ok(()) };
        let moved = pager.make_room(self.sequences.values_mut(), &mut kv.pages, step)?;
        if moved.is_empty() {
            return Ok(());
        }
        let done = self.machine.move_pages(&moved);
        self.moved(&moved, done.is_ok());
        done
    }

    /// Takes the pages that the rows of a step need, and appends to `moved` those that leave ahead of the next one's need.
    fn reserve_for(&mut self, step: &[Group], is_async: bool, moved: &mut Vec<Moved>) -> Result<()> {
        if let Err(error) = self.reserve(step) {
            // Pages may become free once copies from them have ended.
            if moved.is_empty() {
                return Err(error);
            }
            step.iter().for_each(|g| self.release(g.request));
            self.finish_moves(moved)?;
            self.reserve(step)?;
        }
        let kv = self.machine.kv();
        if let Some(pager) = kv.pager.as_ref().filter(|_| !is_async) {
            *moved = pager.ahead(self.sequences.values_mut(), &mut kv.pages, step);
        }
        Ok(())
    }

    fn reserve(&mut self, step: &[Group]) -> Result<()> {
        let kv = self.machine.kv();
        for g in step {
            let table = self.sequences.get_mut(g.request).expect("a live sequence");
            table.reserve(&mut kv.pages, g.tokens as usize)?;
        }
        Ok(())
    }

    /// Frees the pages that were reserved for rows that are not stored.
    pub(super) fn release(&mut self, id: RequestId) {
        if let Some(table) = self.sequences.get_mut(id) {
            let len = table.len();
            table.truncate(&mut self.machine.kv().pages, len);
        }
    }

    /// Counts a group's tokens as stored.
    fn advance(&mut self, group: &Group) {
        let table = self.sequences.get_mut(group.request).expect("a live sequence");
        table.advance(group.tokens as usize);
    }

    /// Records the end of the copies of moved pages. If they failed (`well` is false), the pages return to their old
    /// side.
    pub(super) fn moved(&mut self, moved: &[Moved], well: bool) {
        let pages = &mut self.machine.kv().pages;
        match well {
            true => moved.iter().for_each(|m| m.finish(pages)),
            false => moved.iter().rev().for_each(|m| m.undo(pages, self.sequences.values_mut())),
        }
    }

    /// Runs an iteration whose rows have their pages, and returns what became of cohorts.
    fn compute(
        &mut self,
        iteration: &Iteration,
        source: &dyn TokenSource,
        parked: &[(usize, Parked)],
        moved: &[Moved],
    ) -> Result<Vec<CohortOutcome>> {
        let far = self.machine.kv_ref().far.usual();
        let mut rows = RowsOf { sequences: &self.sequences, far, batches: Vec::new(), results: 0 };
        let mut starts = Vec::new();
        // Of each row with a result, in order.
        let mut factors: Vec<Option<f32>> = Vec::new();
        let mut ask = |groups: &[Group]| {
            for g in groups.iter().filter(|_| iteration.top && !iteration.pick) {
                let factor = if g.wants == Wants::Last { source.top_factor(g.request) } else { None };
                factors.extend((0..g.wanted()).map(|_| factor));
            }
        };
        if iteration.flow == Flow::Async {
            let free = self.machine.free_slots();
            let begin =
                iteration.sub_batches.iter().skip(1).filter(|b| b.at.is_none() && !b.groups.is_empty());
            let begin: Vec<(usize, &SubBatch)> = free.into_iter().zip(begin).collect();
            let last = parked.iter().map(|(b, _)| *b).chain(begin.iter().map(|(b, _)| *b)).max();
            starts = vec![0; last.unwrap_or_default() + 1];
            rows.batches.resize_with(starts.len(), Default::default);
            if let Some(own) = iteration.sub_batches.first() {
                rows.put(0, own, source);
                ask(&own.groups);
            }
            for (b, cohort) in parked {
                starts[*b] = rows.results;
                rows.put_parked(*b, cohort);
                ask(&cohort.groups);
            }
            for (b, batch) in begin {
                starts[b] = rows.results;
                rows.put(b, batch, source);
                ask(&batch.groups);
            }
        } else {
            rows.batches.resize_with(iteration.sub_batches.len(), Default::default);
            for (b, batch) in iteration.sub_batches.iter().enumerate() {
                rows.put(b, batch, source);
                ask(&batch.groups);
            }
        }
        let results = Results { rows: rows.results, pick: iteration.pick, factors };
        let (sub_batches, rows): (Vec<_>, Vec<_>) = rows.batches.into_iter().unzip();
        let iteration = Iteration {
            sub_batches,
            moves: Moved::all_of_iteration(moved),
            flow: iteration.flow,
            pick: iteration.pick,
            top: false,
        };
        let mut cohorts = self.machine.run(iteration, rows.concat(), moved, &results)?;
        for cohort in cohorts.iter_mut().filter(|c| c.at.is_none() && c.failed.is_none()) {
            cohort.rows = Some(starts[cohort.slot]..starts[cohort.slot] + cohort.groups.len());
        }
        Ok(cohorts)
    }
}

/// The rows of an iteration's sub-batches with their pages.
struct RowsOf<'a> {
    sequences: &'a SlotMap<SequenceKv>,
    far: Far,
    batches: Vec<(SubBatch, Vec<GroupRows<'a>>)>,
    /// Rows with results so far.
    results: usize,
}

impl<'a> RowsOf<'a> {
    fn put(&mut self, b: usize, batch: &SubBatch, source: &'a dyn TokenSource) {
        let mut all: Vec<(Group, GroupRows<'a>)> = Vec::with_capacity(batch.groups.len());
        for group in &batch.groups {
            let table = self.sequences.get(group.request).expect("a live sequence");
            let rows = GroupRows { tokens: source.tokens(group), table, out: self.results };
            all.push((Group { kv: table.kv(self.far), ..*group }, rows));
            self.results += group.wanted() as usize;
        }
        // Neighbours of the same phase with keys and values on the same side are computed together.
        all.sort_by_key(|(group, _)| {
            let home = match group.kv {
                Kv::Host => 0,
                Kv::Split { .. } => 1,
                Kv::Device => 2,
            };
            let decode = group.phase == Phase::Decode;
            (decode, if decode { 2 - home } else { home })
        });
        let (groups, rows) = all.into_iter().unzip();
        self.batches[b] = (SubBatch { groups, at: None }, rows);
    }

    fn put_parked(&mut self, b: usize, cohort: &'a Parked) {
        let mut rows = Vec::with_capacity(cohort.groups.len());
        for (group, tokens) in cohort.groups.iter().zip(cohort.tokens.chunks_exact(1)) {
            let table = self.sequences.get(group.request).expect("a live sequence");
            rows.push(GroupRows { tokens, table, out: self.results });
            self.results += 1;
        }
        self.batches[b] = (SubBatch::parked(cohort.groups.clone(), cohort.at), rows);
    }
}

/// Whether one of `ids`, all below `n`, occurs twice.
pub(super) fn repeats(ids: impl Iterator<Item = usize>, n: usize) -> bool {
    let mut seen = vec![false; n];
    ids.into_iter().any(|id| std::mem::replace(&mut seen[id], true))
}
