//! Runs on an accelerator that is given, such as this machine's GPU. Its rounding is not that of running alone: a batch of another size
//! takes other kernels. So every token is held against what the model says after those before it.

use std::collections::HashMap;
use std::sync::Arc;

use tandem::device::Accelerator;
use tandem::engine::{Finish, Request};
use tandem::model::LoadedModel;
use tandem::text::SamplerParams;

use super::{CONTEXT, Counts, Sent, World};

/// Whether the likeliest token could be this one: of a model, after these tokens.
type Judge = dyn Fn(&LoadedModel, &[u32], u32) -> Result<(), String>;

/// The accelerator, and what is expected of it.
pub struct Given {
    pub accel: Arc<dyn Accelerator>,
    /// Without windows, and with.
    pub models: [LoadedModel; 2],
    pub judge: Box<Judge>,
}

impl World {
    /// A world whose runs are on the accelerator. Requests take the likeliest token.
    pub fn on(given: Given) -> World {
        super::without_noise();
        let models = given.models.clone();
        let greedy =
            |r: Request| Request { sampling: SamplerParams { temperature: 0.0, ..Default::default() }, ..r };
        World {
            requests: (0..super::KINDS).map(|i| greedy(super::request(i, models[0].spec.vocab))).collect(),
            models,
            answers: Default::default(),
            engines: HashMap::new(),
            given: Some(given),
            batch: None,
            forget_waits: None,
            reasons: Vec::new(),
            counts: Arc::<Counts>::default(),
        }
    }
}

impl Given {
    pub(super) fn check(&self, m: &LoadedModel, r: &Request, s: &Sent) -> Result<(), String> {
        let mut text = r.prompt.clone();
        for &token in &s.tokens {
            (self.judge)(m, &text, token)?;
            text.push(token);
        }
        let stopped = s.tokens.last().is_some_and(|t| r.ending.tokens.contains(t));
        match &s.end {
            None if s.events.is_none() => Ok(()),
            Some(Finish::Cancelled) if s.cancelled => Ok(()),
            Some(Finish::Stop) if stopped => Ok(()),
            Some(Finish::Length) if !stopped && (s.tokens.len() == r.max_tokens || text.len() > CONTEXT) => {
                Ok(())
            }
            other => Err(format!("it ended by {other:?} after {:?}", s.tokens)),
        }
    }
}
