//! The batcher: turns prompts into streams of tokens, many at a time on one [`Engine`].
//!
//! ```text
//! submit ─► schedule ─► step ─► sample ─► commit ─┐        cancel: at any time, of any id
//!               ▲                                 │
//!               └──────────── Batcher::step ◄────┘ ─► Receiver<Event> or Deliver: tokens, then how it ended
//! ```
//!
//! A [`Strategy`] decides which requests are computed in each step ([`crate::sched`]). A request gives the same tokens
//! as alone: its sampler has its own seed, and rows of a step do not mix (bit by bit in deterministic mode).

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use rustc_hash::FxHashMap;

mod best;
mod masks;
mod scores;
mod step;
#[cfg(test)]
mod tests;

pub use self::best::{Likelihood, best_of};
use self::masks::{Held, Masks};
use super::kv::PageChain;
use super::outcome::TokenSource;
use super::sequences::Engine;
use crate::cache::KvGeometry;
use crate::device::TOP_K;
use crate::program::{Flow, Group, RequestId, Side};
use crate::sched::{
    Continuous, Limits, OwnTargets, Predict, Queues, RequestView, Strategy, Targets, Untimed,
};
use crate::text::{Answer, Constraint, Ending, Sampler, SamplerParams, Tokenizer};
use crate::timeline::Timeline;
use crate::{Error, Result};

/// A request for an answer.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Request {
    /// Tokens to continue, at least one.
    pub prompt: Vec<u32>,
    /// How tokens are chosen; the seed is the request's own.
    pub sampling: SamplerParams,
    /// Most tokens to generate. The context may end it earlier.
    pub max_tokens: usize,
    /// What ends the answer, and what of it is text. Its tokens include the one that ends it.
    pub ending: Ending,
    /// Log-probabilities: of each token of the answer, and of this many most likely ones beside it.
    pub logprobs: Option<usize>,
    /// Log-probabilities: of each token of the prompt but the first, and of this many most likely ones beside it. The whole prompt is
    /// computed then, whatever earlier requests have left of it.
    pub prompt_logprobs: Option<usize>,
    /// Whose it is: waiting requests of different tenants take turns.
    pub tenant: u32,
    /// Of a tenant's waiting requests, those with a lower one come first.
    pub priority: i32,
    /// What it asks of latency, in the place of what is asked of all requests ([`Batcher::set_targets`]).
    pub targets: OwnTargets,
    /// What form the answer has. It ends when nothing may follow.
    pub constraint: Option<Constraint>,
}

/// Why a request ended.
#[derive(Debug, Clone)]
pub enum Finish {
    /// One of its tokens or texts ended the answer ([`Ending`]).
    Stop,
    /// It has reached its own limit of tokens, or the context's.
    Length,
    /// It was cancelled, or its receiver was dropped.
    Cancelled,
    /// A step failed, or its scores are not numbers.
    Failed(Arc<Error>),
}

/// Failures are equal if they say the same.
impl PartialEq for Finish {
    fn eq(&self, other: &Finish) -> bool {
        match (self, other) {
            (Finish::Failed(a), Finish::Failed(b)) => a.to_string() == b.to_string(),
            (a, b) => std::mem::discriminant(a) == std::mem::discriminant(b),
        }
    }
}

/// An event of a request's stream.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// So many tokens of the prompt need not be computed: an earlier request began with them
    /// ([`Batcher::keep_prefixes`]). Comes at most once, before the first token.
    Cached(usize),
    /// Log-probabilities of the next tokens of the prompt, from its second one on ([`Request::prompt_logprobs`]). All of them
    /// come before the first token.
    Prompt(Vec<Logprobs>),
    /// The next token.
    Token(Token),
    /// The request has ended; no event follows.
    End(Finish),
}

/// A token of an answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// Text that is final with it; it may end later than the token's own, or be empty, where characters or a stop string
    /// are not complete. With the last token comes all the rest.
    pub text: String,
    /// Log-probabilities, if the request wants them.
    pub logprobs: Option<Box<Logprobs>>,
}

/// Log-probabilities of a token, of a prompt or an answer, from the model's logits before any sampling setting changes them.
#[derive(Debug, Clone, PartialEq)]
pub struct Logprobs {
    /// The token's own.
    pub token: f64,
    /// How many tokens are at least as likely, itself included.
    pub rank: usize,
    /// The likeliest tokens with theirs, the best first.
    pub top: Vec<(u32, f64)>,
}

/// Takes the events of a request, on the thread that makes the steps: it must return at once. It returns whether anybody
/// still reads them; a request that nobody reads is cancelled.
pub type Deliver = Box<dyn FnMut(Event) -> bool + Send>;

/// Report of a step.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepReport {
    /// Rows computed.
    pub rows: usize,
    /// Tokens of prompts that were there from earlier requests.
    pub cached: usize,
    /// Tokens sampled.
    pub tokens: usize,
    /// Requests admitted.
    pub admitted: usize,
    /// Requests that ended normally.
    pub finished: usize,
    /// Requests that failed.
    pub failed: usize,
    /// Requests that changed sides.
    pub swapped: usize,
    /// How sub-batches shared the lanes; `None` without rows.
    pub flow: Option<Flow>,
    /// Seconds that the engine took; emulated ones on a device in emulated time.
    pub seconds: f64,
    /// Predicted seconds; 0 without a prediction.
    pub predicted: f64,
}

/// A request in flight.
struct Live {
    /// Prompt and answer, which a repetition penalty covers.
    tokens: Vec<u32>,
    /// Number of tokens at which the answer is complete.
    end: usize,
    answer: Answer,
    logprobs: Option<usize>,
    prompt_logprobs: Option<usize>,
    sampler: Sampler,
    /// Its form.
    held: Option<Held>,
    /// Its pages that others may begin with.
    chain: PageChain,
    deliver: Deliver,
}

impl Live {
    /// Whether it needs only the likeliest token.
    fn is_greedy(&self) -> bool {
        self.sampler.params().is_greedy() && self.logprobs.is_none() && self.held.is_none()
    }

    /// What the likeliest tokens are asked for with, if they may be enough.
    fn top_factor(&self) -> Option<f32> {
        // What a draw would have to know of all tokens that a form allows, nobody has summed up.
        let may = self.held.is_none() || self.sampler.params().is_greedy();
        self.sampler.top_factor(TOP_K).filter(|_| may && self.logprobs.is_none())
    }
}

/// The requests in flight, by the id of their sequence.
type InFlight = FxHashMap<RequestId, Live>;

impl TokenSource for InFlight {
    fn tokens(&self, group: &Group) -> &[u32] {
        let all = self.get(&group.request).map_or(&[][..], |live| &live.tokens);
        all.get(group.first as usize..group.end() as usize).unwrap_or_default()
    }

    fn top_factor(&self, request: RequestId) -> Option<f32> {
        self.get(&request).and_then(Live::top_factor)
    }
}

/// Free pages on the device and on the host.
fn free_pages(engine: &mut Engine) -> [usize; 2] {
    match (engine.has_homes(), engine.home()) {
        (true, _) => [Side::Device, Side::Host].map(|side| engine.kv_pages(side).free),
        (false, Side::Device) => [engine.free_pages(), 0],
        (false, Side::Host) => [0, engine.free_pages()],
    }
}

/// See the [module](self).
pub struct Batcher {
    engine: Engine,
    live: InFlight,
    queues: Queues,
    strategy: Box<dyn Strategy>,
    costs: Box<dyn Predict + Send>,
    tokenizer: Option<Arc<Tokenizer>>,
    limits: Limits,
    masks: Masks,
    /// Consecutive steps in which no request made progress.
    idle_steps: u32,
}

impl Batcher {
    /// Requests on an engine without other sequences, scheduled by continuous batching.
    pub fn new(engine: Engine) -> Batcher {
        Batcher::with(engine, Box::new(Continuous::default()), Box::new(Untimed))
    }

    /// Requests scheduled by `strategy` with the predictions of `costs`. The strategy decides where sequences live on
    /// engines with [`Options::far_pages`](super::Options::far_pages).
    pub fn with(mut engine: Engine, strategy: Box<dyn Strategy>, costs: Box<dyn Predict + Send>) -> Batcher {
        let [device_pages, host_pages] = free_pages(&mut engine);
        let limits = Limits {
            rows: engine.rows() as u32,
            sub_batches: engine.sub_batches() as u32,
            sequences: engine.sequences() as u32,
            device_pages,
            host_pages,
        };
        let (live, queues) = (InFlight::default(), Queues::default());
        let (tokenizer, masks) = (None, Masks::default());
        Batcher { engine, live, queues, strategy, costs, tokenizer, limits, masks, idle_steps: 0 }
    }

    /// The engine.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Starts counting how long each unit works, for [`Engine::busy_seconds`].
    pub fn count_busy(&mut self) {
        self.engine.count_busy();
    }

    /// Shuts down and returns the engine. Requests in flight are cancelled.
    pub fn into_engine(mut self) -> Engine {
        let ids: Vec<RequestId> =
            self.queues.waiting().chain(self.queues.running()).map(|job| job.id).collect();
        for id in ids {
            self.cancel(id);
        }
        self.engine
    }

    /// Starts recording when each operation runs: [`Engine::trace`].
    pub fn trace(&mut self) {
        self.engine.trace();
    }

    /// The timeline recorded since [`Batcher::trace`]; stops recording.
    pub fn end_trace(&mut self) -> Option<Timeline> {
        self.engine.end_trace()
    }

    /// The limits that the scheduler works within.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The strategy's view of the requests.
    pub fn queues(&self) -> &Queues {
        &self.queues
    }

    /// Number of waiting requests, and of running requests.
    pub fn load(&self) -> (usize, usize) {
        (self.queues.waiting().len(), self.queues.running().len())
    }

    /// Pages of keys and values that no request holds, on the device and on the host.
    pub fn free_pages(&mut self) -> [usize; 2] {
        free_pages(&mut self.engine)
    }

    /// Those of them that are kept for requests that begin as earlier ones did.
    pub fn kept_pages(&mut self) -> [usize; 2] {
        self.engine.kept_on_sides()
    }

    /// The name of the strategy that schedules the requests.
    pub fn strategy(&self) -> &'static str {
        self.strategy.name()
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.queues.is_empty()
    }

    /// Accepts a request. Its tokens arrive at the receiver as steps are made; dropping the receiver cancels it.
    ///
    /// # Errors
    /// If the prompt is empty, a token is outside the vocabulary, or the sampling or a target makes no sense;
    /// and if the request does not fit the context or the pages that the strategy may use (with the numbers).
    pub fn submit(&mut self, request: Request) -> Result<(RequestId, Receiver<Event>)> {
        let (events, receiver) = channel();
        let id = self.submit_to(request, Box::new(move |event| events.send(event).is_ok()))?;
        Ok((id, receiver))
    }

    /// [`Batcher::submit`] with the events delivered by a call instead of a channel.
    ///
    /// # Errors
    /// As [`Batcher::submit`]; nothing is delivered then.
    pub fn submit_to(&mut self, request: Request, deliver: Deliver) -> Result<RequestId> {
        let Request { prompt, sampling, max_tokens, ending, logprobs, prompt_logprobs, .. } = request;
        let Request { tenant, priority, targets, constraint, .. } = request;
        targets.check()?;
        if prompt.is_empty() {
            return Err(Error::usage("the prompt is empty"));
        }
        self.engine.check_tokens(&prompt)?;
        let context = self.engine.context();
        if prompt.len() > context {
            return Err(Error::Capacity(format!(
                "a prompt of {} tokens does not fit the context of {context}; raise `context` or shorten it",
                prompt.len()
            )));
        }
        let sampler = Sampler::new(sampling)?.after_prompt(prompt.len());
        // The last token is not stored.
        let most = prompt.len().saturating_add(max_tokens.saturating_sub(1)).min(context);
        let pages = KvGeometry::pages_for(most);
        let Limits { device_pages, host_pages, .. } = self.limits;
        // A strategy would leave a request waiting forever that it cannot serve.
        let most_pages = self.strategy.most_pages(&self.limits);
        if pages > most_pages {
            let there = match (device_pages, host_pages) {
                (n, 0) | (0, n) => format!("{n}"),
                (device, host) if most_pages < device.max(host) => format!(
                    "{device} on the device and {host} on the host, of which strategy {} gives it {most_pages}",
                    self.strategy.name()
                ),
                (device, host) => {
                    format!("{device} on the device and {host} on the host, and one side holds it all")
                }
            };
            return Err(Error::Capacity(format!(
                "a request of up to {most} tokens needs {pages} pages of keys and values, there are {there}"
            )));
        }
        let n = prompt.len();
        let live = Live {
            tokens: prompt,
            end: n.saturating_add(max_tokens).min(context + 1),
            answer: Answer::new(self.tokenizer.clone(), ending),
            logprobs,
            prompt_logprobs,
            sampler,
            held: constraint.as_ref().map(Held::to),
            chain: PageChain::default(),
            deliver,
        };
        // A sequence without tokens takes no pages.
        let id = self.engine.add();
        self.live.insert(id, live);
        let view = RequestView::new(id, n as u32, most as u32);
        self.queues.submit(RequestView { tenant, priority, targets, ..view });
        Ok(id)
    }

    /// The tokenizer for the text of answers that are submitted from now on. Without one it consists of the tokens' numbers, each
    /// with a space behind it.
    pub fn set_tokenizer(&mut self, tokenizer: Option<Arc<Tokenizer>>) {
        self.tokenizer = tokenizer;
    }

    /// Whether requests may begin with pages of keys and values that earlier ones have left
    /// ([`Engine::keep_prefixes`]); not, unless this is called.
    pub fn keep_prefixes(&mut self, keep: bool) {
        self.engine.keep_prefixes(keep);
    }

    /// What is asked of latency by requests that ask nothing for themselves: strategies are as fast as they can be within it.
    pub fn set_targets(&mut self, targets: Targets) {
        self.queues.set_targets(targets);
    }

    /// Whether strategies expect answers to be as long as those that have ended (so unless this is called), or as long as allowed.
    pub fn set_learns_lengths(&mut self, learns: bool) {
        self.queues.set_learns_lengths(learns);
    }

    /// Ends a request and frees its pages. Returns whether it existed: the id of a request that has ended has no
    /// effect, even if its slot is in use again.
    pub fn cancel(&mut self, id: RequestId) -> bool {
        self.end(id, Finish::Cancelled)
    }

    fn end(&mut self, id: RequestId, how: Finish) -> bool {
        let Some(mut live) = self.live.remove(&id) else { return false };
        match how {
            Finish::Stop | Finish::Length => self.queues.answered(id),
            _ => self.queues.end(id),
        };
        let parked = self.engine.parked(id).is_some();
        self.engine.remove(id);
        if parked {
            // The other requests of its cohort start their token over.
            self.update_homes();
        }
        // That nobody reads it is no error.
        (live.deliver)(Event::End(how));
        true
    }

    /// Makes steps until nothing is left to do. Returns their number.
    pub fn run(&mut self) -> usize {
        let mut steps = 0;
        while !self.is_idle() {
            self.step();
            steps += 1;
        }
        steps
    }
}
