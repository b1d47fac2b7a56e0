//! Asynchronous steps: cohorts stay parked from step to step, and their requests get their tokens after the last layer.

use std::collections::HashMap;
use std::time::Instant;

use super::super::input::{Input, Logits};
use super::super::kv::Swap;
use super::super::overlap::{Advanced, Overlap};
use super::super::seq_id::SeqId;
use super::step::{Outcome, likeliest, sample};
use super::{Live, Requests};
use crate::Result;
use crate::program::{Flow, Group, Iteration, RequestId, Side, SubBatch, Wants};

impl Requests {
    /// Carries out an asynchronous iteration and reduces it to the work that was computed. Returns for each sub-batch
    /// the layer at which it is parked now.
    ///
    /// # Errors
    /// As [`Engine::advance`](super::super::Engine::advance).
    pub(super) fn overlap(
        &mut self,
        iteration: &mut Iteration,
        swaps: &[Swap],
        done: &mut Outcome,
    ) -> Result<Vec<Option<u32>>> {
        self.only_what_can_begin(iteration);
        let of: HashMap<SeqId, RequestId> = self
            .queues
            .running()
            .iter()
            .filter_map(|job| Some((self.live.get(job.id)?.seq?, job.id)))
            .collect();
        let live = &self.live;
        let row = |group: &Group| -> &Live { live.get(group.request).expect("a request that runs") };
        let input = |group: &Group| {
            let (live, rows) = (row(group), group.first as usize..group.end() as usize);
            let logits = if group.wants == Wants::Last { Logits::Last } else { Logits::None };
            Input { seq: live.seq.expect("admitted"), tokens: &live.tokens[rows], logits }
        };
        let inputs = |batch: &SubBatch| -> Vec<Input<'_>> { batch.groups.iter().map(input).collect() };
        let device = iteration.sub_batches.first().map(inputs).unwrap_or_default();
        let begin: Vec<Vec<Input<'_>>> = iteration.sub_batches.iter().skip(1).map(inputs).collect();
        let begin: Vec<&[Input<'_>]> = begin.iter().map(Vec::as_slice).collect();
        let parked = self.engine.cohorts();
        let parked = parked.iter().flat_map(|(seqs, _)| seqs).filter_map(|seq| live.get(*of.get(seq)?));
        let greedy =
            iteration.sub_batches.iter().flat_map(|b| &b.groups).map(row).chain(parked).all(Live::is_greedy);
        let begun = (Instant::now(), self.engine.emulated_seconds());
        let step = Overlap { device: &device, begin: &begin, swaps, pick: greedy };
        let Advanced { cohorts, picks, mut logits } = self.engine.advance(&step)?;
        done.report.seconds += match (begun.1, self.engine.emulated_seconds()) {
            (Some(begun), Some(now)) => now - begun,
            _ => begun.0.elapsed().as_secs_f64(),
        };
        let vocab = self.engine.spec().vocab;
        let mut answer = |all: &mut Requests, id: RequestId, row: usize, done: &mut Outcome| {
            let pick = match greedy {
                true => likeliest(picks[row]),
                false => {
                    let live = all.live.get_mut(id).expect("a request that runs");
                    sample(live, &mut logits[row * vocab..(row + 1) * vocab])
                }
            };
            all.answer(id, pick, done);
        };
        iteration.sub_batches.truncate(1);
        let device = iteration.sub_batches.first().map(|b| b.groups.clone()).unwrap_or_default();
        done.report.rows += device.iter().map(|g| g.tokens as usize).sum::<usize>();
        for (row, group) in device.iter().filter(|g| g.wants == Wants::Last).enumerate() {
            answer(self, group.request, row, done);
        }
        let jobs: HashMap<RequestId, Group> =
            self.queues.running().iter().map(|job| (job.id, job.group(1, Side::Host))).collect();
        let mut parked = vec![None; iteration.sub_batches.len()];
        for cohort in cohorts {
            let ids: Vec<RequestId> = cohort.seqs.iter().filter_map(|seq| of.get(seq).copied()).collect();
            let groups: Vec<Group> = ids.iter().map(|id| jobs[id]).collect();
            done.cohorts += 1;
            if cohort.advanced {
                done.advanced += 1;
                done.report.rows += groups.len();
            }
            if let Some(rows) = cohort.rows {
                for (&id, row) in ids.iter().zip(rows) {
                    answer(self, id, row, done);
                }
            }
            if cohort.failed.is_some() {
                // Compute each alone: those whose attention fails again are at fault.
                self.alone(&groups, done);
            }
            iteration.sub_batches.push(SubBatch::of(groups));
            parked.push(cohort.at);
        }
        Ok(parked)
    }

    /// Keeps only the decided cohorts that begin and can begin: the engine knows which are parked.
    fn only_what_can_begin(&self, iteration: &mut Iteration) {
        let seq =
            |g: &Group| self.live.get(g.request).and_then(|live| live.seq).expect("a request that runs");
        let free = |g: &Group| self.engine.parked(seq(g)).is_none();
        let on_host = |g: &Group| !self.engine.has_homes() || self.engine.side(seq(g)) == Some(Side::Host);
        let mut left = self.engine.cohorts_free();
        let mut place = 0;
        iteration.sub_batches.retain_mut(|batch| {
            place += 1;
            if place == 1 {
                batch.groups.retain(free);
                return true;
            }
            batch.groups.retain(|g| free(g) && on_host(g));
            let begins = batch.at.is_none() && !batch.groups.is_empty() && left > 0;
            left -= usize::from(begins);
            begins
        });
    }

    /// Discards cohorts that a synchronous iteration cannot handle; their requests' tokens start over.
    pub(super) fn unpark(&mut self, iteration: &Iteration) {
        if iteration.flow == Flow::Async {
            return;
        }
        let live = &self.live;
        let of = |g: &Group| live.get(g.request).and_then(|live| live.seq);
        let rows: Vec<SeqId> = iteration.sub_batches.iter().flat_map(|b| &b.groups).filter_map(of).collect();
        for (seqs, _) in self.engine.cohorts() {
            if iteration.sub_batches.len() > 1 || seqs.iter().any(|seq| rows.contains(seq)) {
                self.engine.leave(seqs[0]);
            }
        }
    }
}
