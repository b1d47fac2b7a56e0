//! Requests: prompts in, streams of tokens out, many at a time over one [`Engine`].
//!
//! ```text
//! submit ─► schedule ─► step ─► sample ─► commit ─┐        cancel: at any time, of any id
//!               ▲                                 │
//!               └──────────── Requests::step ◄────┘ ─► Receiver<Event>: tokens, then how it ended
//! ```
//!
//! Who is computed when a [`Strategy`] decides ([`crate::sched`]). A request's tokens are those of running alone: its sampler
//! has a seed of its own, and rows of a step do not mix (in deterministic mode bit by bit).

use std::sync::mpsc::{Receiver, Sender, channel};

use super::input::{Input, Logits};
use super::sequences::{Engine, NOT_NUMBERS, SeqId};
use crate::cache::KvGeometry;
use crate::program::{Flow, Group, RequestId, Side, SubBatch, Wants};
use crate::sched::{Continuous, Job, Limits, Predict, Queues, Slots, Strategy, Untimed};
use crate::text::{Sampler, SamplerParams};
use crate::{Error, Result};

/// What is asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Tokens to continue, at least one.
    pub prompt: Vec<u32>,
    /// How tokens are chosen; the seed is the request's own.
    pub sampling: SamplerParams,
    /// Most tokens to generate, at least one. The context may end it earlier.
    pub max_tokens: usize,
    /// Tokens that end the answer; they are part of it.
    pub stop: Vec<u32>,
}

/// Why a request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finish {
    /// One of its stop tokens.
    Stop,
    /// It has all the tokens that it may have, by its own limit or the context's.
    Length,
    /// It was cancelled, or nobody listens any more.
    Cancelled,
    /// A step failed, or its scores are not numbers; in a sentence.
    Failed(String),
}

/// What a request's stream says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The next token.
    Token(u32),
    /// It is over; nothing follows.
    End(Finish),
}

/// What a step did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepReport {
    /// Rows computed.
    pub rows: usize,
    /// Tokens sampled.
    pub tokens: usize,
    /// Requests admitted.
    pub admitted: usize,
    /// Requests that ended, as they should.
    pub finished: usize,
    /// Requests that failed.
    pub failed: usize,
}

/// A request in flight.
struct Live {
    /// Prompt and answer: what a penalty for repetition looks at.
    tokens: Vec<u32>,
    /// Tokens at which the answer is complete.
    end: usize,
    stop: Vec<u32>,
    sampler: Sampler,
    events: Sender<Event>,
    /// From its admission on.
    seq: Option<SeqId>,
}

impl Live {
    /// Whether the likeliest token is all that it asks for.
    fn is_greedy(&self) -> bool {
        let p = self.sampler.params();
        p.temperature == 0.0 && p.repeat_penalty == 1.0
    }
}

/// See the [module](self).
pub struct Requests {
    engine: Engine,
    live: Slots<Live>,
    queues: Queues,
    strategy: Box<dyn Strategy>,
    costs: Box<dyn Predict + Send>,
    limits: Limits,
}

impl Requests {
    /// Over an engine that has no sequences of others, by continuous batching.
    pub fn new(engine: Engine) -> Requests {
        Requests::with(engine, Box::new(Continuous::default()), Box::new(Untimed))
    }

    /// By another strategy, which weighs what `costs` predicts.
    pub fn with(mut engine: Engine, strategy: Box<dyn Strategy>, costs: Box<dyn Predict + Send>) -> Requests {
        let pages = engine.free_pages();
        let (device_pages, host_pages) = match engine.home() {
            Side::Device => (pages, 0),
            Side::Host => (0, pages),
        };
        let limits = Limits {
            rows: engine.rows() as u32,
            sub_batches: engine.sub_batches() as u32,
            sequences: engine.sequences() as u32,
            device_pages,
            host_pages,
        };
        Requests { engine, live: Slots::default(), queues: Queues::default(), strategy, costs, limits }
    }

    /// The engine.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The engine, when nothing is asked of it any more. Requests in flight are cancelled.
    pub fn into_engine(mut self) -> Engine {
        let ids: Vec<RequestId> =
            self.queues.waiting().chain(self.queues.running()).map(|job| job.id).collect();
        for id in ids {
            self.cancel(id);
        }
        self.engine
    }

    /// What the scheduler goes by.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Requests that wait, and requests that run.
    pub fn load(&self) -> (usize, usize) {
        (self.queues.waiting().len(), self.queues.running().len())
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.queues.is_empty()
    }

    /// Accepts a request; its tokens come through the receiver as steps are made. Dropping the receiver cancels it.
    ///
    /// # Errors
    /// An empty prompt, a token outside the vocabulary, sampling that makes no sense, no token wanted; a request that the
    /// context or all pages together have no room for (with the numbers).
    pub fn submit(&mut self, request: Request) -> Result<(RequestId, Receiver<Event>)> {
        let Request { prompt, sampling, max_tokens, stop } = request;
        if prompt.is_empty() {
            return Err(Error::usage("the prompt is empty"));
        }
        if max_tokens == 0 {
            return Err(Error::usage("a request for 0 tokens; at least 1 is needed"));
        }
        self.engine.check_tokens(&prompt)?;
        let context = self.engine.context();
        if prompt.len() > context {
            return Err(Error::Capacity(format!(
                "a prompt of {} tokens does not fit the context of {context}; raise --ctx or shorten it",
                prompt.len()
            )));
        }
        let sampler = Sampler::new(sampling)?;
        // The last token is not stored.
        let most = prompt.len().saturating_add(max_tokens - 1).min(context);
        let pages = KvGeometry::pages_for(most);
        let there = self.limits.pages(self.limits.first_side());
        if pages > there {
            return Err(Error::Capacity(format!(
                "a request of up to {most} tokens needs {pages} pages of keys and values, there are {there}"
            )));
        }
        let (events, receiver) = channel();
        let n = prompt.len();
        let live = Live {
            tokens: prompt,
            end: n.saturating_add(max_tokens).min(context + 1),
            stop,
            sampler,
            events,
            seq: None,
        };
        let id = self.live.insert(live);
        self.queues.submit(Job::new(id, n as u32, most as u32));
        Ok((id, receiver))
    }

    /// Ends a request; its pages are free again. Returns whether it was there: an id of a request that has ended is
    /// harmless, whoever has its slot now.
    pub fn cancel(&mut self, id: RequestId) -> bool {
        self.end(id, Finish::Cancelled)
    }

    fn end(&mut self, id: RequestId, how: Finish) -> bool {
        let Some(live) = self.live.remove(id) else { return false };
        self.queues.end(id);
        if let Some(seq) = live.seq {
            self.engine.remove(seq);
        }
        // Whoever does not listen need not know.
        let _ = live.events.send(Event::End(how));
        true
    }

    /// Steps until nothing is left to do; returns how many.
    pub fn run(&mut self) -> usize {
        let mut steps = 0;
        while !self.is_idle() {
            self.step();
            steps += 1;
        }
        steps
    }

    /// Makes one step. A step that fails is tried again request by request; those that fail alone end with the error,
    /// the others go on: a failed step leaves no trace in what is stored.
    pub fn step(&mut self) -> StepReport {
        let mut report = StepReport::default();
        let mut decision = self.strategy.plan(&self.queues, &self.limits, &*self.costs);
        self.queues.admit(&decision);
        report.admitted = decision.admit.len();
        for &(id, _) in &decision.admit {
            let live = self.live.get_mut(id).expect("a request that waits");
            live.seq = Some(self.engine.add());
        }
        let mut failed = Vec::new();
        let mut over = Vec::new();
        let batches = &decision.iteration.sub_batches;
        if let Err(error) = self.compute(batches, &mut report, &mut over) {
            let groups: Vec<Group> = batches.iter().flat_map(|b| &b.groups).copied().collect();
            if let [group] = groups[..] {
                failed.push((group.request, error.to_string()));
            } else {
                for group in groups {
                    let one = [SubBatch::of(vec![group])];
                    if let Err(error) = self.compute(&one, &mut report, &mut over) {
                        failed.push((group.request, error.to_string()));
                    }
                }
            }
        }
        let lost = |id: RequestId| failed.iter().any(|(f, _)| *f == id);
        decision.iteration.sub_batches.iter_mut().for_each(|b| b.groups.retain(|g| !lost(g.request)));
        self.queues.commit(&decision.iteration, &[]);
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

    /// Computes the rows of sub-batches and samples; requests that end by it go to `over`.
    fn compute(
        &mut self,
        batches: &[SubBatch],
        report: &mut StepReport,
        over: &mut Vec<(RequestId, Finish)>,
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
        let ready: Vec<RequestId> = groups().filter(|g| g.wants == Wants::Last).map(|g| g.request).collect();
        let greedy = groups().filter(|g| g.wants == Wants::Last).all(|g| of(g).is_greedy());
        let vocab = self.engine.spec().vocab;
        let picks: Vec<Option<u32>> = if greedy {
            self.engine.forward_picks_as(&inputs, &split, Flow::Serial)?.to_vec()
        } else {
            let mut logits = self.engine.forward_as(&inputs, &split, Flow::Serial)?.to_vec();
            let rows = ready.iter().zip(logits.chunks_exact_mut(vocab));
            rows.map(|(&id, row)| sample(self.live.get_mut(id).expect("a request that runs"), row)).collect()
        };
        report.rows += batches.iter().map(|batch| batch.rows() as usize).sum::<usize>();
        for (id, pick) in ready.into_iter().zip(picks) {
            let live = self.live.get_mut(id).expect("a request that runs");
            let Some(token) = pick else {
                over.push((id, Finish::Failed(NOT_NUMBERS.into())));
                continue;
            };
            report.tokens += 1;
            live.tokens.push(token);
            let heard = live.events.send(Event::Token(token)).is_ok();
            if live.stop.contains(&token) {
                over.push((id, Finish::Stop));
            } else if live.tokens.len() >= live.end {
                over.push((id, Finish::Length));
            } else if !heard {
                over.push((id, Finish::Cancelled));
            }
        }
        Ok(())
    }
}

/// The next token of a request, unless its scores are not numbers. Scores of minus infinity are choices not to be taken.
fn sample(live: &mut Live, logits: &mut [f32]) -> Option<u32> {
    let usable = logits.iter().all(|&x| x < f32::INFINITY) && logits.iter().any(|x| x.is_finite());
    usable.then(|| live.sampler.sample(logits, &live.tokens))
}
