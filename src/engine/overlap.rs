//! Asynchronous steps: cohorts of sequences on the host advance by one layer per step, while the device goes on with
//! its own rows (APEX §4).
//!
//! ```text
//! advance(device rows, cohorts that begin) ─► Advanced { logits of the device's rows, what became of each cohort }
//! ```
//! Each step checks every parked cohort. A cohort's sequences are unchanged until its token has passed all layers; then
//! its rows have logits, and the sequences can be used like all others. Meanwhile, steps of other kinds can use the
//! sub-batches without a cohort.

use std::collections::HashMap;
use std::ops::Range;

use super::input::{Input, Logits, StepPlan};
use super::iterate::iterations;
use super::kv::{Moved, SequenceKv, Swap};
use super::machine::{GroupRows, Outcome, Parked};
use super::seq_id::SeqId;
use super::sequences::Engine;
use crate::program::{Flow, Group, Iteration, Kv, Phase, RequestId, Side, SubBatch, Wants};
use crate::{Error, Result};

/// The work of an asynchronous step, in addition to the parked cohorts.
#[derive(Debug, Clone, Copy, Default)]
pub struct Overlap<'a> {
    /// Rows of sequences that the device computes, as in any step, except that no input may want all logits.
    pub device: &'a [Input<'a>],
    /// Cohorts that begin: one token of each of their sequences, which must live on the host.
    pub begin: &'a [&'a [Input<'a>]],
    /// Sequences that change sides; none may be parked.
    pub swaps: &'a [Swap],
    /// Whether rows get their likeliest token instead of logits.
    pub pick: bool,
}

/// The outcome of a step for a cohort.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CohortStep {
    /// Its sequences.
    pub seqs: Vec<SeqId>,
    /// The layer that it is parked at now; `None` if its rows have logits, or if it failed.
    pub at: Option<u32>,
    /// Whether it has advanced.
    pub advanced: bool,
    /// Places of its rows among logits or tokens, once they have any.
    pub rows: Option<Range<usize>>,
    /// The error if its attention on the host failed: its sequences are then as before its token, which can start over.
    pub failed: Option<String>,
}

/// The result of an asynchronous step.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Advanced {
    /// The cohorts: those parked before, then those that began.
    pub cohorts: Vec<CohortStep>,
    /// Likeliest tokens, if requested: for the device's inputs that want logits, in order, then for cohorts
    /// ([`CohortStep::rows`]). `None` for a row whose logits are not numbers.
    pub picks: Vec<Option<u32>>,
    /// Otherwise the logits, `[rows][V]`. Rows of cohorts without logits are unspecified.
    pub logits: Vec<f32>,
}

impl Engine {
    /// The layer at which a sequence's row is parked, if it is.
    pub fn parked(&self, id: SeqId) -> Option<u32> {
        self.machine.parked_at(id.request())
    }

    /// The sequences of each cohort that is parked, and the layer where it is.
    pub fn cohorts(&self) -> Vec<(Vec<SeqId>, u32)> {
        self.machine.cohorts().map(|(_, p)| (seqs(&p.groups), p.at)).collect()
    }

    /// Whether there can be cohorts: this needs a device, each layer's products after its attention on one side, and
    /// sub-batches for cohorts.
    pub fn overlaps(&self) -> bool {
        self.sub_batches() > 1 && self.machine.check_cohorts().is_ok()
    }

    /// Number of cohorts that could begin: sub-batches without a cohort, except the first.
    pub fn cohorts_free(&self) -> usize {
        self.machine.free_slots().len()
    }

    /// Makes an asynchronous step ([`Flow::Async`]).
    ///
    /// # Errors
    /// As [`Engine::forward_plan`]; and if a sequence is parked, a cohort is impossible, or there are more cohorts than
    /// sub-batches ([`Options::sub_batches`](super::Options::sub_batches) less one); with
    /// [`Mode::Deterministic`](crate::simd::linear::Mode), if the host does not finish within a minute. The sequences
    /// are then unchanged, and cohorts that had begun or advanced in this step are no longer parked
    /// ([`Engine::parked`]): their tokens must start over.
    pub fn advance(&mut self, step: &Overlap<'_>) -> Result<Advanced> {
        self.check_overlap(step)?;
        let mut moved = Vec::new();
        let parked: Vec<(usize, Parked)> = self.machine.cohorts().map(|(b, p)| (b, p.clone())).collect();
        let done = match self.begin_swaps(step.swaps, &mut moved) {
            Ok(()) => {
                self.reserve_overlap(step, &mut moved).and_then(|()| self.overlap(step, &parked, &moved))
            }
            Err(e) => Err(e),
        };
        self.moved(&moved, done.is_ok());
        let inputs = || step.device.iter().chain(step.begin.iter().copied().flatten());
        match done {
            Ok((outcomes, places)) => {
                for input in step.device {
                    let table = self.sequences.get_mut(input.seq.request()).expect("a live sequence");
                    table.advance(input.tokens.len());
                }
                Ok(self.advanced(outcomes, &places, step.pick))
            }
            Err(error) => {
                inputs().for_each(|i| self.unpark(i.seq));
                for (_, cohort) in parked {
                    let seqs = seqs(&cohort.groups).into_iter();
                    let gone: Vec<SeqId> = seqs.filter(|&s| self.parked(s).is_none()).collect();
                    gone.into_iter().for_each(|s| self.unpark(s));
                }
                Err(error)
            }
        }
    }

    fn check_overlap(&self, step: &Overlap<'_>) -> Result<()> {
        self.check_swaps(step.swaps)?;
        let begin = || step.begin.iter().copied().flatten();
        let inputs: Vec<Input<'_>> = step.device.iter().chain(begin()).copied().collect();
        self.check_inputs(&inputs)?;
        if step.device.iter().any(|i| i.logits == Logits::All) {
            return Err(Error::usage("all logits of an input in an asynchronous step"));
        }
        let free = self.cohorts_free();
        if step.begin.len() > free {
            return Err(Error::Capacity(format!(
                "{} cohorts are to begin, there is room for {free}: sub-batches less one, less those that are parked",
                step.begin.len()
            )));
        }
        if step.begin.iter().any(|cohort| cohort.is_empty()) {
            return Err(Error::usage("a cohort of no sequence"));
        }
        let sides = self.machine.kv_ref().sides;
        for input in begin() {
            if input.tokens.len() != 1 || input.logits != Logits::Last {
                return Err(Error::usage("rows of a cohort are single tokens that want logits"));
            }
            let swapped = step.swaps.iter().any(|s| s.seq == input.seq);
            if sides.device && (self.side(input.seq) != Some(Side::Host) || swapped) {
                return Err(Error::usage("sequences of a cohort live on the host, and stay there"));
            }
        }
        Ok(())
    }

    /// Takes the pages that the rows of the step need.
    fn reserve_overlap(&mut self, step: &Overlap<'_>, moved: &mut Vec<Moved>) -> Result<()> {
        let inputs: Vec<Input<'_>> =
            step.device.iter().chain(step.begin.iter().copied().flatten()).copied().collect();
        let Err(error) = self.reserve(&inputs) else { return Ok(()) };
        // Pages may become free once copies from them have ended.
        if moved.is_empty() {
            return Err(error);
        }
        self.give_back(&inputs);
        self.finish_moves(moved)?;
        self.reserve(&inputs)
    }

    /// Runs the iteration. Returns the outcomes of the cohorts, and where the logits of each sub-batch begin.
    fn overlap(
        &mut self,
        step: &Overlap<'_>,
        parked: &[(usize, Parked)],
        moved: &[Moved],
    ) -> Result<(Vec<Outcome>, Vec<usize>)> {
        let table = |seq: SeqId| self.sequences.get(seq.request()).expect("a live sequence");
        let tables: Vec<&SequenceKv> = step.device.iter().map(|i| table(i.seq)).collect();
        let (far, most) = (self.machine.kv_ref().far.usual(), self.machine.logit_rows());
        let (own, mut out) = iterations(step.device, &tables, (moved, far), &StepPlan::ONE, step.pick, most);
        let mut own = own.into_iter();
        let (Some((first, own_rows)), None) = (own.next(), own.next()) else {
            return Err(Error::Capacity(format!("logits of {out} rows, there is room for {most}")));
        };
        let free = self.machine.free_slots();
        let slots = parked.iter().map(|&(b, _)| b).chain(free.iter().copied().take(step.begin.len()));
        let n = slots.max().unwrap_or_default() + 1;
        let mut batches: Vec<(SubBatch, Vec<GroupRows<'_>>)> = vec![Default::default(); n];
        let mut places = vec![0; n];
        batches[0] = (first.sub_batches.into_iter().next().unwrap_or_default(), own_rows);
        for (b, cohort) in parked {
            places[*b] = out;
            let rows = cohort.groups.iter().zip(cohort.tokens.chunks_exact(1)).enumerate().map(
                |(i, (g, tokens))| {
                    let table = self.sequences.get(g.request).expect("a live sequence");
                    GroupRows { tokens, table, out: out + i }
                },
            );
            batches[*b] = (SubBatch::parked(cohort.groups.clone(), cohort.at), rows.collect());
            out += cohort.groups.len();
        }
        for (&b, inputs) in free.iter().zip(step.begin) {
            places[b] = out;
            let group = |i: &Input<'_>| Group {
                request: i.seq.request(),
                phase: Phase::Decode,
                first: table(i.seq).len() as u32,
                tokens: 1,
                kv: if table(i.seq).kv(far) == Kv::Host { Kv::Host } else { Kv::Device },
                wants: Wants::Last,
            };
            let rows = inputs.iter().enumerate();
            let rows = rows.map(|(i, input)| GroupRows {
                tokens: input.tokens,
                table: table(input.seq),
                out: out + i,
            });
            batches[b] = (SubBatch::of(inputs.iter().map(group).collect()), rows.collect());
            out += inputs.len();
        }
        let rows: Vec<GroupRows<'_>> = batches.iter().flat_map(|(_, rows)| rows).copied().collect();
        let sub_batches = batches.into_iter().map(|(batch, _)| batch).collect();
        let mut iteration = Iteration { sub_batches, flow: Flow::Async, ..first };
        self.machine.settle(&mut iteration);
        self.machine.expect(out, step.pick);
        Ok((self.machine.advance(&iteration, &rows, moved)?, places))
    }

    /// Updates the sequences by the outcomes of their cohorts.
    fn advanced(&mut self, outcomes: Vec<Outcome>, places: &[usize], pick: bool) -> Advanced {
        let mut all = Advanced::default();
        for Outcome { slot, groups, at, advanced, failed } in outcomes {
            let (seqs, failed) = (seqs(&groups), failed.map(|e| e.to_string()));
            let done = at.is_none() && failed.is_none();
            for &seq in &seqs {
                match &failed {
                    Some(_) => self.unpark(seq),
                    None if done => self.sequences.get_mut(seq.request()).expect("live").advance(1),
                    None => {}
                }
            }
            let rows = done.then(|| places[slot]..places[slot] + seqs.len());
            all.cohorts.push(CohortStep { seqs, at, advanced, rows, failed });
        }
        match pick {
            true => all.picks = self.machine.argmax().to_vec(),
            false => all.logits = self.machine.logits().to_vec(),
        }
        all
    }

    /// Frees the pages that were reserved for an unfinished row.
    fn unpark(&mut self, seq: SeqId) {
        if let Some(table) = self.sequences.get_mut(seq.request()) {
            let len = table.len();
            table.truncate(&mut self.machine.kv().pages, len);
        }
    }

    /// Called before a sequence changes: ends the parking of its row and of its cohort's rows.
    pub(super) fn leave(&mut self, id: SeqId) {
        for request in self.machine.leave(id.request()) {
            self.unpark(SeqId::named(request));
        }
    }

    /// Returns an error for sequences whose rows are parked.
    pub(super) fn check_free(&self, seqs: impl Iterator<Item = SeqId>) -> Result<()> {
        let rows = self.machine.cohorts().flat_map(|(_, p)| p.groups.iter().map(|g| (g.request, p.at)));
        let parked: HashMap<RequestId, u32> = rows.collect();
        for request in seqs.map(SeqId::request) {
            if let Some(layer) = parked.get(&request) {
                return Err(Error::usage(format!(
                    "sequence {} has a row parked at layer {layer}: it goes on with its cohort",
                    request.slot
                )));
            }
        }
        Ok(())
    }
}

fn seqs(groups: &[Group]) -> Vec<SeqId> {
    groups.iter().map(|g| SeqId::named(g.request)).collect()
}

#[cfg(test)]
mod tests;
