//! What a request asks of the engine: checks its fields and puts them in the place of the model's own settings.

use std::ops::RangeBounds;

use super::error::ApiError;
use super::fields::{Common, Stop};
use super::model::Model;
use crate::model::{MIN_P_RANGE, PENALTY_RANGE, REPEAT_PENALTY_RANGE, TEMPERATURE_RANGE, TOP_P_RANGE};
use crate::sched::OwnTargets;
use crate::text::{Ending, SamplerParams};

/// Most answers to one prompt.
pub(super) const MOST_CHOICES: u32 = 128;
/// Most texts that end an answer, and most bytes of each: every token's text is compared with all of them.
const MOST_STOPS: usize = 16;
const LONGEST_STOP: usize = 512;
/// Most entries of `logit_bias`, which are added at every token.
const MOST_BIASES: usize = 1024;
/// Most likely tokens beside each of a prompt.
const MOST_PROMPT_LOGPROBS: usize = 20;
/// Most entries of `stop_token_ids`.
const MOST_STOP_TOKENS: usize = 128;
/// Bounds of a bias; the lower one excludes a token for practical purposes.
const BIAS_RANGE: std::ops::RangeInclusive<f32> = -100.0..=100.0;

/// The settings of a request.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub sampling: SamplerParams,
    pub ending: Ending,
    /// Answers to each prompt.
    pub n: usize,
    /// Most tokens of an answer; `None` for as many as the context has room for.
    pub max_tokens: Option<usize>,
    /// Of the waiting requests of a key, those with a lower one come first.
    pub priority: i32,
    /// What is asked of latency, in the place of the server's targets.
    pub targets: OwnTargets,
    /// Log-probabilities of the prompt's tokens, and of this many likely ones beside each.
    pub prompt_logprobs: Option<usize>,
    pub stream: bool,
    pub include_usage: bool,
}

impl Settings {
    /// The settings that `fields` ask for. `seed` is for requests that name none.
    ///
    /// # Errors
    /// A value out of range or not supported, by the name of its field.
    pub fn of(fields: Common, model: &Model, seed: impl FnOnce() -> u64) -> Result<Settings, ApiError> {
        refuse_constraints(&fields)?;
        let mut sampling = model.sampling.clone();
        set(&mut sampling.temperature, within("temperature", fields.temperature, TEMPERATURE_RANGE)?);
        set(&mut sampling.top_p, within("top_p", fields.top_p, TOP_P_RANGE)?);
        set(&mut sampling.min_p, within("min_p", fields.min_p, MIN_P_RANGE)?);
        let (presence, frequency) = (fields.presence_penalty, fields.frequency_penalty);
        set(&mut sampling.presence_penalty, within("presence_penalty", presence, PENALTY_RANGE)?);
        set(&mut sampling.frequency_penalty, within("frequency_penalty", frequency, PENALTY_RANGE)?);
        let repetition = within("repetition_penalty", fields.repetition_penalty, REPEAT_PENALTY_RANGE)?;
        if let Some(penalty) = repetition {
            // Where it is known, it covers prompt and answer.
            (sampling.repeat_penalty, sampling.repeat_last_n) = (penalty, usize::MAX);
        }
        if let Some(k) = fields.top_k {
            // -1 is all, too.
            let k = u32::try_from(k.max(0)).ok().filter(|_| k >= -1);
            sampling.top_k = k.ok_or_else(|| out_of_range("top_k", "a whole number from -1"))? as usize;
        }
        sampling.seed = fields.seed.map_or_else(seed, |seed| seed as u64);
        if let Some(biases) = fields.logit_bias {
            let own = biases_of(&biases, model.vocab)?;
            sampling.biases = sampling.biases.iter().copied().chain(own).collect();
        }
        let max_tokens = fields.max_tokens.map(|n| n as usize);
        let mut ending = model.ending.clone();
        if fields.ignore_eos == Some(true) {
            ending.tokens.clear();
        }
        ending.tokens.extend(stop_tokens(fields.stop_token_ids, model.vocab)?);
        if let Some(stop) = fields.stop {
            ending.stop = stops(stop)?;
        }
        set(&mut ending.min_tokens, fields.min_tokens.map(|n| n as usize));
        if max_tokens.is_some_and(|most| most < ending.min_tokens) && fields.min_tokens.is_some() {
            return Err(out_of_range("min_tokens", "at most max_tokens"));
        }
        ending.withhold(&mut sampling);
        let n = fields.n.unwrap_or(1);
        if !(1..=MOST_CHOICES).contains(&n) {
            return Err(out_of_range("n", &format!("from 1 to {MOST_CHOICES}")));
        }
        let stream = fields.stream.unwrap_or(false);
        if fields.stream_options.is_some() && !stream {
            return Err(ApiError::bad("stream_options", "stream_options: only with stream"));
        }
        let prompt_logprobs = fields.prompt_logprobs.map(|n| n as usize);
        if prompt_logprobs.is_some_and(|n| n > MOST_PROMPT_LOGPROBS) {
            let wanted = format!("from 0 to {MOST_PROMPT_LOGPROBS}");
            return Err(out_of_range("prompt_logprobs", &wanted));
        }
        if prompt_logprobs.is_some() && stream {
            // As in vLLM, whose chunks have no place for them.
            return Err(ApiError::bad("prompt_logprobs", "prompt_logprobs: only without stream"));
        }
        let include_usage = fields.stream_options.and_then(|o| o.include_usage).unwrap_or(false);
        let (n, priority) = (n as usize, fields.priority.unwrap_or(0));
        let targets = OwnTargets::new(
            seconds("ttft_target", fields.ttft_target)?,
            seconds("tpot_target", fields.tpot_target)?,
        );
        Ok(Settings {
            sampling,
            ending,
            n,
            max_tokens,
            priority,
            targets,
            prompt_logprobs,
            stream,
            include_usage,
        })
    }

    /// The sampling of answer `index` to a prompt: its seed is so much more.
    pub fn sampling(&self, index: usize) -> SamplerParams {
        SamplerParams { seed: self.sampling.seed.wrapping_add(index as u64), ..self.sampling.clone() }
    }
}

fn set<T>(to: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *to = value;
    }
}

/// An error for a value that is not within what is `wanted`.
pub(super) fn out_of_range(name: &str, wanted: &str) -> ApiError {
    ApiError::bad(name, format!("{name}: {wanted} is wanted"))
}

fn within(
    name: &str,
    value: Option<f32>,
    range: impl RangeBounds<f32> + std::fmt::Debug,
) -> Result<Option<f32>, ApiError> {
    // NaN is in no range.
    match value {
        Some(x) if !range.contains(&x) => {
            Err(ApiError::bad(name, format!("{name}: {x} is not in {range:?}")))
        }
        value => Ok(value),
    }
}

/// A target of latency.
fn seconds(name: &str, value: Option<f64>) -> Result<Option<f64>, ApiError> {
    match value {
        Some(x) if !(x > 0.0 && x.is_finite()) => Err(out_of_range(name, "a number of seconds above 0")),
        value => Ok(value),
    }
}

/// Other servers' words for forms of answers: these are refused, never ignored.
fn refuse_constraints(fields: &Common) -> Result<(), ApiError> {
    let constraints = [
        ("guided_json", &fields.guided_json),
        ("guided_regex", &fields.guided_regex),
        ("guided_choice", &fields.guided_choice),
        ("guided_grammar", &fields.guided_grammar),
        ("structured_outputs", &fields.structured_outputs),
        ("json_schema", &fields.json_schema),
        ("grammar", &fields.grammar),
        ("regex", &fields.regex),
    ];
    match constraints.iter().find(|(_, value)| value.is_some()) {
        Some((name, _)) => Err(ApiError::unsupported(name, "response_format is supported")),
        None => Ok(()),
    }
}

fn biases_of(
    biases: &std::collections::HashMap<String, f32>,
    vocab: usize,
) -> Result<Vec<(u32, f32)>, ApiError> {
    if biases.len() > MOST_BIASES {
        return Err(out_of_range("logit_bias", &format!("an object of at most {MOST_BIASES} tokens")));
    }
    let mut all = Vec::with_capacity(biases.len());
    for (key, bias) in biases {
        let id = key.parse().ok().filter(|&id: &u32| (id as usize) < vocab);
        let id =
            id.ok_or_else(|| out_of_range("logit_bias", &format!("a token id below {vocab} as a key")))?;
        if !BIAS_RANGE.contains(bias) {
            return Err(out_of_range("logit_bias", "a value from -100 to 100"));
        }
        all.push((id, *bias));
    }
    // In a fixed order: sums of biases of one token are rounded.
    all.sort_unstable_by_key(|(id, _)| *id);
    Ok(all)
}

fn stop_tokens(ids: Option<Vec<u32>>, vocab: usize) -> Result<Vec<u32>, ApiError> {
    let ids = ids.unwrap_or_default();
    if ids.len() > MOST_STOP_TOKENS || ids.iter().any(|&id| id as usize >= vocab) {
        let wanted = format!("a list of at most {MOST_STOP_TOKENS} token ids below {vocab}");
        return Err(out_of_range("stop_token_ids", &wanted));
    }
    Ok(ids)
}

fn stops(stop: Stop) -> Result<Vec<String>, ApiError> {
    let all = match stop {
        Stop::One(text) => vec![text],
        Stop::Many(texts) => texts,
    };
    if all.len() > MOST_STOPS || all.iter().any(|text| text.is_empty() || text.len() > LONGEST_STOP) {
        let wanted = format!("at most {MOST_STOPS} texts of 1 to {LONGEST_STOP} bytes");
        return Err(out_of_range("stop", &wanted));
    }
    Ok(all)
}
