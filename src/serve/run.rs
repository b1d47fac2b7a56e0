//! The answers to one HTTP request while the engine computes them: one channel for all, which the engine's thread fills.
//!
//! ```text
//! engine's thread ── deliver(Token) ─► channel ─► Run::next ─► stream or collected answer        drop ─► cancel
//! ```
//! The channel has no bound, because the engine waits for nobody; what is in it is bounded by the tokens of the answers,
//! and their number by the places of the queue.

use std::collections::VecDeque;

use serde_json::Value;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::app::Open;
use super::choice::{Choice, Piece, Reading, Scored, Speller};
use super::error::ApiError;
use super::model::Model;
use super::places::{Taken, Tenant};
use super::prompt::Scoring;
use super::record::Record;
use super::settings::Settings;
use crate::engine::{Delivery, Event, Finish, Flight, Likelihood, Logprobs, Request};
use crate::text::Constraint;

/// What is to be computed.
pub(super) struct Order<'a> {
    pub tenant: Tenant,
    pub settings: &'a Settings,
    pub prompts: &'a [Vec<u32>],
    /// Log-probabilities of each token, and of this many likely ones.
    pub logprobs: Option<usize>,
    /// Whether the best answers are looked for: by the log-probabilities of their tokens, told or not.
    pub ranked: bool,
    /// The texts of the prompts, if these are told, too.
    pub echo: Option<&'a [String]>,
    pub constraint: Option<Constraint>,
    pub reading: Reading,
}

/// News of an answer.
pub(super) enum Update {
    /// The tokens of its prompt, before all else: in front of its own, and by themselves.
    Prompt(usize, Option<Vec<Scored>>, Option<Value>),
    /// More of it.
    Piece(usize, Piece),
    /// It has ended: with the rest of it, and why.
    End(usize, Piece, &'static str),
    /// Something failed; nothing follows.
    Failed(ApiError),
}

/// See the [module](self). Dropping it cancels what is left.
pub(super) struct Run {
    deliveries: UnboundedReceiver<(usize, Delivery)>,
    choices: Vec<Choice>,
    /// How likely each answer is so far, where that is counted.
    likely: Vec<Likelihood>,
    /// What is known of the tokens of each answer's prompt until that is told, if they are scored.
    scorings: Vec<Option<Scoring>>,
    /// Likely tokens beside those of echoed prompts, and beside those of `prompt_logprobs`.
    beside: (Option<usize>, Option<usize>),
    echo: Vec<String>,
    speller: Speller,
    /// Answers to each prompt.
    n: usize,
    /// Requests that are neither accepted nor refused.
    submitted: usize,
    /// Answers that have not ended.
    left: usize,
    /// News that came before all requests were accepted.
    early: VecDeque<Update>,
    /// What the log gets.
    pub record: Record,
    // Dropped in this order: the requests are cancelled, then their places are free.
    _flights: Vec<Flight>,
    _places: Taken,
    _open: Open,
}

impl Run {
    /// Submits the prompts, `n` times each: answer `i` is of prompt `i / n`. Waits until the engine has accepted them.
    ///
    /// # Errors
    /// If the engine refuses one; the others are cancelled.
    pub async fn start(
        model: &Model,
        order: Order<'_>,
        places: Taken,
        (open, record): (Open, Record),
    ) -> Result<Run, ApiError> {
        let Order { tenant, settings, prompts, logprobs, ranked, echo, constraint, reading } = order;
        let (sender, deliveries) = unbounded_channel();
        let all = prompts.len() * settings.n;
        let (mut flights, mut choices) = (Vec::with_capacity(all), Vec::with_capacity(all));
        let mut scorings = Vec::with_capacity(all);
        let own = logprobs.or(ranked.then_some(0));
        let beside = (logprobs.filter(|_| echo.is_some()), settings.prompt_logprobs);
        let (tokenizer, shown) = (model.tokenizer.clone(), settings.ending.shown.clone());
        let speller = Speller { tokenizer, shown };
        for index in 0..all {
            let prompt = &prompts[index / settings.n];
            // Of the answers to a prompt, one tells `prompt_logprobs` for all.
            let told = beside.1.filter(|_| index.is_multiple_of(settings.n));
            let prompt_logprobs = beside.0.max(told);
            let request = Request {
                prompt: prompt.clone(),
                sampling: settings.sampling(index % settings.n),
                max_tokens: settings.max_tokens.unwrap_or(model.context),
                ending: settings.ending.clone(),
                logprobs: own,
                prompt_logprobs,
                tenant: tenant.0 as u32,
                priority: settings.priority,
                targets: settings.targets,
                constraint: constraint.clone(),
            };
            let (own, refused) = (sender.clone(), sender.clone());
            let deliver = move |delivery| own.send((index, delivery)).is_ok();
            match model.client.send(request, deliver) {
                Ok(flight) => flights.push(flight),
                Err(error) => drop(refused.send((index, Delivery::Refused(error)))),
            }
            choices.push(Choice::new(speller.clone(), &settings.ending, &reading, index));
            scorings.push(prompt_logprobs.is_some().then(|| Scoring::of(prompt.clone())));
        }
        // Only the engine's thread delivers from here on.
        drop(sender);
        let (submitted, left, early) = (all, all, VecDeque::new());
        let (_flights, _places, _open) = (flights, places, open);
        let (n, echo) = (settings.n, echo.unwrap_or_default().to_vec());
        let mut run = Run {
            deliveries,
            choices,
            likely: vec![Likelihood::default(); all],
            scorings,
            beside,
            echo,
            speller,
            n,
            submitted,
            left,
            early,
            record,
            _flights,
            _places,
            _open,
        };
        // Nothing comes of prompts of one token.
        let told: Vec<Update> = (0..all).filter_map(|index| run.prompt(index, Vec::new())).collect();
        run.early.extend(told);
        let accepted = run.accepted().await;
        if let Err(error) = &accepted {
            run.record.failed(error.status());
        }
        accepted.map(|()| run)
    }

    async fn accepted(&mut self) -> Result<(), ApiError> {
        while self.submitted > 0 {
            let Some((index, delivery)) = self.deliveries.recv().await else { break };
            if let Delivery::Refused(error) = &delivery {
                return Err(ApiError::from_engine(error, "prompt"));
            }
            let update = self.update(index, delivery);
            self.early.extend(update);
        }
        Ok(())
    }

    /// The next news; `None` once all answers have ended.
    pub async fn next(&mut self) -> Option<Update> {
        loop {
            if let Some(update) = self.try_next() {
                return Some(update);
            }
            if self.left == 0 {
                return None;
            }
            let (index, delivery) = self.deliveries.recv().await?;
            if let Some(update) = self.update(index, delivery) {
                return Some(update);
            }
        }
    }

    /// How likely each answer is, by its tokens so far.
    pub fn likely(&self) -> &[Likelihood] {
        &self.likely
    }

    /// News that is there already.
    pub fn try_next(&mut self) -> Option<Update> {
        if let Some(update) = self.early.pop_front() {
            return Some(update);
        }
        while let Ok((index, delivery)) = self.deliveries.try_recv() {
            if let Some(update) = self.update(index, delivery) {
                return Some(update);
            }
        }
        None
    }

    fn update(&mut self, index: usize, delivery: Delivery) -> Option<Update> {
        match delivery {
            Delivery::Accepted(_) => {
                self.submitted -= 1;
                None
            }
            Delivery::Event(Event::Cached(tokens)) => {
                // A prompt counts once, however many answers it has.
                if index.is_multiple_of(self.n) {
                    self.record.cached(tokens);
                }
                None
            }
            Delivery::Event(Event::Prompt(scores)) => self.prompt(index, scores),
            Delivery::Refused(error) => Some(self.failed(ApiError::from_engine(&error, "prompt"))),
            Delivery::Event(Event::Token(token)) => {
                self.record.token(index);
                self.likely[index].add(&token);
                let piece = self.choices[index].push(token);
                (piece != Piece::default()).then_some(Update::Piece(index, piece))
            }
            Delivery::Event(Event::End(Finish::Failed(error))) => {
                Some(self.failed(ApiError::from_engine(&error, "prompt")))
            }
            Delivery::Event(Event::End(Finish::Cancelled)) => {
                let why = "the server has ended before the answer was complete";
                Some(self.failed(ApiError::unavailable("draining", why)))
            }
            Delivery::Event(Event::End(how)) => {
                self.left -= 1;
                let choice = &mut self.choices[index];
                let rest = choice.finish(how == Finish::Length);
                let reason = match how {
                    Finish::Length => "length",
                    _ if choice.has_calls() => "tool_calls",
                    _ => "stop",
                };
                self.record.ended(index, reason);
                Some(Update::End(index, rest, reason))
            }
        }
    }

    /// More of a prompt's tokens are scored; when all are, they are told.
    fn prompt(&mut self, index: usize, scores: Vec<Logprobs>) -> Option<Update> {
        let scoring = &mut self.scorings[index];
        scoring.as_mut()?.push(scores);
        let complete = scoring.take_if(|scoring| scoring.is_complete())?;
        let echoed = self.beside.0.map(|k| complete.echoed(&self.speller, &self.echo[index / self.n], k));
        let ranked = self.beside.1.filter(|_| index.is_multiple_of(self.n));
        Some(Update::Prompt(index, echoed, ranked.map(|k| complete.ranked(&self.speller, k))))
    }

    fn failed(&mut self, error: ApiError) -> Update {
        self.left = 0;
        self.record.failed(error.status());
        Update::Failed(error)
    }
}
