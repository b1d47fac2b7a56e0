//! A request, as far as its order and its rows are concerned: lengths, places and times, but no token.

use crate::cache::KvGeometry;
use crate::program::{Group, Kv, Phase, RequestId, Side, Wants};

use super::lengths::LearnedLengths;
use super::seconds::OptionalSeconds;
use super::targets::OwnTargets;

/// A request as strategies see it.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestView {
    /// The request's id.
    pub id: RequestId,
    /// Tokens of the prompt, at least 1.
    pub prompt: u32,
    /// Tokens stored at its longest: memory is promised for them.
    pub most: u32,
    /// Tokens stored when it is likely to end, at most `most`: what strategies expect of time.
    pub likely: u32,
    /// Tokens stored: of the prompt first, then those generated.
    pub stored: u32,
    /// Later requests that were admitted before it.
    pub passed: u32,
    /// Where its keys and values live; `None` while it waits.
    pub home: Option<Side>,
    /// Asynchronous flow: its next token's row is parked, with attention of this layer under way.
    pub at: Option<u32>,
    /// Iterations since it last advanced.
    pub waited: u32,
    /// When it came, by [`Queues::now`](super::Queues::now); `None`: when it is submitted.
    pub arrived: OptionalSeconds,
    /// When it had its first token.
    pub first: OptionalSeconds,
    /// Whose it is: waiting requests of different tenants take turns.
    pub tenant: u32,
    /// Of its tenant's waiting requests, those with a lower one come first.
    pub priority: i32,
    /// What it asks of latency for itself.
    pub targets: OwnTargets,
    /// Its turn while it waits; the queue sets it.
    pub turn: u64,
}

impl RequestView {
    /// A new request.
    pub fn new(id: RequestId, prompt: u32, most: u32) -> RequestView {
        RequestView {
            id,
            prompt,
            most: most.max(prompt),
            likely: most.max(prompt),
            stored: 0,
            passed: 0,
            home: None,
            at: None,
            waited: 0,
            arrived: OptionalSeconds::NONE,
            first: OptionalSeconds::NONE,
            tenant: 0,
            priority: 0,
            targets: OwnTargets::default(),
            turn: 0,
        }
    }

    /// Whether it came after the start, where all of an offline workload are.
    pub(super) fn came_later(&self) -> bool {
        self.arrived.unwrap_or(0.0) > 0.0
    }

    /// Whether somebody waits for its first token who has not said how long: it came after the start.
    pub(super) fn is_awaited(&self) -> bool {
        self.came_later() && self.targets.ttft.is_none()
    }

    /// Seconds to its first token and between its tokens, if it ends `now`.
    pub(super) fn latency(&self, now: f64) -> (f64, Option<f64>) {
        let first = self.first.unwrap_or(now);
        let tokens = self.stored.saturating_sub(self.prompt);
        let between = (tokens > 0).then(|| (now - first) / f64::from(tokens));
        (first - self.arrived.unwrap_or(first), between)
    }

    /// Tokens of its answer so far.
    pub(super) fn made(&self) -> u32 {
        if self.stored < self.prompt { 0 } else { self.stored - self.prompt + 1 }
    }

    /// What is likely of it as far as answers are known.
    pub(super) fn expect(&mut self, lengths: &LearnedLengths) {
        // The last token of an answer is not stored.
        let answer = lengths.likely(self.made(), self.most - self.prompt + 1);
        self.likely =
            (self.prompt + answer.max(1) - 1).clamp(self.stored.max(self.prompt).min(self.most), self.most);
    }

    /// Whether its next rows are of the prompt.
    pub fn phase(&self) -> Phase {
        if self.stored < self.prompt { Phase::Prefill } else { Phase::Decode }
    }

    /// Pages of keys and values that it may come to need: promised when it is admitted, so that it never stops half way
    /// for want of one.
    pub fn pages(&self) -> usize {
        KvGeometry::pages_for(self.most as usize)
    }

    /// Pages that its stored tokens and `more` take.
    pub fn pages_with(&self, more: u32) -> usize {
        KvGeometry::pages_for((self.stored + more) as usize)
    }

    /// Its next rows, with keys and values on `side`.
    pub fn group(&self, tokens: u32, side: Side) -> Group {
        let end = self.stored + tokens;
        Group {
            request: self.id,
            phase: self.phase(),
            first: self.stored,
            tokens,
            kv: match side {
                Side::Device => Kv::Device,
                Side::Host => Kv::Host,
            },
            wants: if end >= self.prompt { Wants::Last } else { Wants::Nothing },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Strategies and rollouts go over a thousand of them several times a step: with 128 bytes planning took up to a tenth longer.
    #[test]
    fn a_view_is_small() {
        let size = size_of::<RequestView>();
        assert!(size <= 96, "{size} bytes");
    }
}
