//! Steps by hand: for callers without a scheduler, which say what follows each sequence.

use rustc_hash::FxHashMap;

use super::outcome::{Outcome, TokenSource};
use super::sequences::{Engine, NOT_NUMBERS};
use crate::cache::KvGeometry;
use crate::program::{Flow, Group, Iteration, Kv, Phase, RequestId, Side, SubBatch, Wants};
use crate::{Error, Result};

/// Consecutive new tokens of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct NewTokens<'a> {
    /// The sequence that the tokens belong to.
    pub id: RequestId,
    /// Token ids, appended after those that the sequence holds. Without any, the sequence is not in the step.
    pub tokens: &'a [u32],
    /// Which of these rows need logits.
    pub wants: Wants,
}

/// The tokens of each sequence's rows.
struct Tokens<'a> {
    tokens: FxHashMap<RequestId, &'a [u32]>,
    factors: FxHashMap<RequestId, f32>,
}

impl<'a> Tokens<'a> {
    fn of(rows: impl Iterator<Item = NewTokens<'a>>) -> Tokens<'a> {
        Tokens { tokens: rows.map(|r| (r.id, r.tokens)).collect(), factors: FxHashMap::default() }
    }
}

impl TokenSource for Tokens<'_> {
    fn tokens(&self, group: &Group) -> &[u32] {
        // Of a sequence that is named twice, which is refused, the last.
        self.tokens.get(&group.request).copied().unwrap_or_default()
    }

    fn top_factor(&self, request: RequestId) -> Option<f32> {
        self.factors.get(&request).copied()
    }
}

impl Engine {
    /// The iteration of these rows: those of each sub-batch, which share the lanes as `flow` says. A single token that
    /// wants logits is a decode row, others are rows of prompts.
    pub fn iteration(&self, sub_batches: &[&[NewTokens<'_>]], flow: Flow) -> Iteration {
        let group = |r: &NewTokens<'_>| Group {
            request: r.id,
            phase: match r.tokens.len() == 1 && r.wants != Wants::Nothing {
                true => Phase::Decode,
                false => Phase::Prefill,
            },
            first: self.len(r.id) as u32,
            tokens: r.tokens.len() as u32,
            kv: Kv::Device,
            wants: r.wants,
        };
        let batch =
            |rows: &&[NewTokens<'_>]| rows.iter().filter(|r| !r.tokens.is_empty()).map(group).collect();
        let sub_batches = sub_batches.iter().map(batch).map(SubBatch::of).collect();
        Iteration { sub_batches, moves: Vec::new(), flow, pick: false, top: false }
    }

    /// Runs the rows of sub-batches, changed in what `change` says of their iteration, beside `swaps`: see
    /// [`Engine::run`].
    ///
    /// # Errors
    /// As [`Engine::run`].
    pub fn run_rows(
        &mut self,
        sub_batches: &[&[NewTokens<'_>]],
        flow: Flow,
        swaps: &[(RequestId, Side)],
        change: impl FnOnce(&mut Iteration),
    ) -> Result<Outcome> {
        let mut iteration = self.iteration(sub_batches, flow);
        change(&mut iteration);
        self.run(&iteration, swaps, &Tokens::of(sub_batches.iter().copied().flatten().copied()))
    }

    /// Runs rows in one sub-batch. Returns the requested logits, `[rows][V]`, in the order of `rows`.
    ///
    /// # Errors
    /// As [`Engine::run`].
    pub fn forward(&mut self, rows: &[NewTokens<'_>]) -> Result<&[f32]> {
        self.run_rows(&[rows], Flow::Serial, &[], |_| ())?;
        Ok(self.logits())
    }

    /// Like [`Engine::forward`], for rows from which tokens are drawn: logits stay on the device that computes them, and
    /// what most draws need of each row comes back, [`Engine::top`]. `factors` has the factor of its sum
    /// ([`crate::text::Sampler::top_factor`]) for each of the `rows`, or `None` where all logits are needed.
    ///
    /// # Errors
    /// As [`Engine::run`].
    pub fn forward_tops(&mut self, rows: &[NewTokens<'_>], factors: &[Option<f32>]) -> Result<()> {
        let iteration = Iteration { top: true, ..self.iteration(&[rows], Flow::Serial) };
        let mut source = Tokens::of(rows.iter().copied());
        source.factors = rows.iter().zip(factors).filter_map(|(r, f)| Some((r.id, (*f)?))).collect();
        self.run(&iteration, &[], &source).map(drop)
    }

    /// Like [`Engine::forward`], but returns only the likeliest token of each row that wants logits, or `None` if its
    /// logits are not numbers. On an accelerator the logits stay there.
    ///
    /// # Errors
    /// As [`Engine::run`].
    pub fn forward_picks(&mut self, rows: &[NewTokens<'_>]) -> Result<&[Option<u32>]> {
        self.run_rows(&[rows], Flow::Serial, &[], |iteration| iteration.pick = true)?;
        Ok(self.picks())
    }

    /// Like [`Engine::forward_picks`].
    ///
    /// # Errors
    /// As [`Engine::run`], and if logits are not numbers. The latter is detected after everything has been computed, so
    /// the sequences then hold the step's tokens.
    pub fn forward_greedy(&mut self, rows: &[NewTokens<'_>]) -> Result<Vec<u32>> {
        let picks = self.forward_picks(rows)?.iter().enumerate();
        picks
            .map(|(row, pick)| {
                pick.ok_or_else(|| Error::Run(format!("row {row} of the step: {NOT_NUMBERS}")))
            })
            .collect()
    }

    /// Runs a prompt in chunks and returns the logits of its last token. `progress` is called with the tokens done.
    ///
    /// # Errors
    /// As [`Engine::run`], before any work unless the device fails; and if the prompt is empty. If a chunk fails,
    /// nothing of the prompt is stored.
    pub fn prefill(
        &mut self,
        id: RequestId,
        tokens: &[u32],
        mut progress: impl FnMut(usize),
    ) -> Result<Vec<f32>> {
        if tokens.is_empty() {
            return Err(Error::usage("the prompt is empty"));
        }
        self.check_live(id)?;
        let (before, end) = (self.len(id), self.len(id) + tokens.len());
        if end > self.context() {
            return Err(Error::Capacity(format!(
                "the prompt takes the sequence to {end} tokens, more than the context of {}; raise `context` or shorten it",
                self.context()
            )));
        }
        self.check_tokens(tokens)?;
        // Check for all pages now, so that no chunk fails after others have been computed. If pages move, count those
        // of both sides.
        let kv = self.machine.kv();
        if kv.pager.is_some() && kv.pages.pages_move() {
            kv.pages.suffice(KvGeometry::pages_for(end) - KvGeometry::pages_for(before))?;
        } else {
            let table = self.sequences.get_mut(id).expect("a live sequence");
            table.reserve(&mut kv.pages, tokens.len())?;
        }
        let logits = self.run_chunks(id, tokens, &mut progress);
        if logits.is_err() {
            self.truncate(id, before);
        }
        logits
    }

    fn run_chunks(
        &mut self,
        id: RequestId,
        tokens: &[u32],
        progress: &mut dyn FnMut(usize),
    ) -> Result<Vec<f32>> {
        let mut done = 0;
        let mut logits = Vec::new();
        for chunk in tokens.chunks(self.chunk()) {
            done += chunk.len();
            let wants = if done == tokens.len() { Wants::Last } else { Wants::Nothing };
            let out = self.forward(&[NewTokens { id, tokens: chunk, wants }])?;
            if wants == Wants::Last {
                logits = out.to_vec();
            }
            progress(done);
        }
        Ok(logits)
    }
}
