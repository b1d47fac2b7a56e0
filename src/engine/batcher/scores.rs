//! Log-probabilities: of the tokens of answers, and of those of prompts.
//!
//! A prompt's token is scored by the row before it. So all rows of such a prompt pass the model's head, in as many steps as their logits
//! need ([`Engine::logit_rows`](crate::engine::Engine::logit_rows)), and none of them may be taken from an earlier request, which has left keys and values but
//! no logits. Prompts that are not to be scored have the logits of their last row only.

use super::{Batcher, Event, Live, Logprobs};
use crate::engine::sequences::NOT_NUMBERS;
use crate::program::{Group, Iteration, Phase, Wants};
use crate::text::logprobs;
use crate::{Error, Result};

impl Logprobs {
    /// Those of `token`, and of the `k` likeliest tokens, by a row of logits.
    ///
    /// # Errors
    /// If the logits are not numbers.
    pub(super) fn of(logits: &[f32], token: u32, k: usize) -> Result<Logprobs> {
        check(logits)?;
        let (lse, top) = logprobs(logits, k);
        let own = logits[token as usize];
        let rank = logits.iter().filter(|&&other| other >= own).count();
        Ok(Logprobs { token: f64::from(own) - lse, rank, top })
    }
}

/// # Errors
/// If a row of logits is of no use. A score of minus infinity only excludes its token.
pub(super) fn check(logits: &[f32]) -> Result<()> {
    let usable = logits.iter().all(|&x| x < f32::INFINITY) && logits.iter().any(|x| x.is_finite());
    if usable { Ok(()) } else { Err(Error::Run(NOT_NUMBERS.into())) }
}

impl Live {
    /// Whether the rows of a group are to be scored.
    fn scores(&self, group: &Group) -> bool {
        self.prompt_logprobs.is_some() && group.phase == Phase::Prefill
    }
}

impl Batcher {
    /// Asks for all logits of prompts that are scored, of as many rows as there is room for beside those of the other groups. The
    /// rest follows in later steps.
    pub(super) fn want_scores(&self, iteration: &mut Iteration) {
        let scored = |g: &Group| self.live.get(&g.request).is_some_and(|live| live.scores(g));
        let groups = || iteration.sub_batches.iter().flat_map(|b| &b.groups);
        if !groups().any(scored) {
            return;
        }
        // Each group has one row in any case: there is room for one of each sequence.
        let least = groups().map(|g| if scored(g) { 1 } else { g.wanted() as usize }).sum();
        let mut room = self.engine.logit_rows().saturating_sub(least);
        for group in iteration.sub_batches.iter_mut().flat_map(|b| &mut b.groups).filter(|g| scored(g)) {
            let rows = (group.tokens as usize).min(1 + room);
            room -= rows - 1;
            *group = Group { tokens: rows as u32, wants: Wants::All, ..*group };
        }
    }

    /// Scores the tokens of a prompt behind those of a group, whose results begin at `row`, and tells them.
    ///
    /// # Errors
    /// If the logits are not numbers, or the device has failed.
    pub(super) fn score(&mut self, group: &Group, row: usize) -> Result<()> {
        let Some(live) = self.live.get_mut(&group.request) else { return Ok(()) };
        let Some(k) = live.prompt_logprobs else { return Ok(()) };
        let next = &live.tokens[group.first as usize + 1..];
        // Behind the prompt's last token comes the answer.
        let mut scores = Vec::with_capacity(next.len().min(group.tokens as usize));
        for (row, &token) in (row..row + group.tokens as usize).zip(next) {
            scores.push(Logprobs::of(self.engine.logits_row(row)?, token, k)?);
        }
        if !scores.is_empty() {
            // That nobody listens is found with the first token.
            (live.deliver)(Event::Prompt(scores));
        }
        Ok(())
    }
}
