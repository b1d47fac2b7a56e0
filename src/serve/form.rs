//! The forms of answers: chat and text completions, whole and in chunks.

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::choice::{Call, Scored};

/// Log-probabilities below this are written as this: JSON has no infinity.
pub(super) const LEAST: f64 = -9999.0;

/// Which of the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Chat,
    Text,
}

/// What all parts of an answer have.
pub(super) struct Head {
    pub form: Form,
    pub id: String,
    pub created: u64,
    pub model: String,
}

/// `usage`.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: Details,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct Details {
    cached_tokens: usize,
}

impl Usage {
    /// Tokens of prompts, those of them that were there from earlier requests, and tokens of answers.
    pub fn new(prompt: usize, cached: usize, completion: usize) -> Usage {
        let prompt_tokens_details = Details { cached_tokens: cached };
        let total_tokens = prompt + completion;
        Usage { prompt_tokens: prompt, completion_tokens: completion, total_tokens, prompt_tokens_details }
    }

    /// As given to [`Usage::new`].
    pub fn tokens(&self) -> (usize, usize, usize) {
        (self.prompt_tokens, self.prompt_tokens_details.cached_tokens, self.completion_tokens)
    }
}

/// A part of one answer, or all of it.
#[derive(Debug, Default)]
pub(super) struct Part {
    pub index: usize,
    /// `None` at the end of a stream.
    pub text: Option<String>,
    pub reasoning: Option<String>,
    pub calls: Vec<Call>,
    /// Whether it is the first of a stream.
    pub first: bool,
    pub scored: Option<Vec<Scored>>,
    /// `prompt_logprobs`.
    pub prompt: Option<Value>,
    /// Characters of the text before it.
    pub offset: usize,
    pub finish: Option<&'static str>,
}

#[derive(Serialize)]
struct Whole<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
    /// Of the prompt of a chat; text completions have them with each answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Value>,
}

impl Head {
    /// A whole answer.
    pub fn whole(&self, mut parts: Vec<Part>, usage: Usage) -> Value {
        let object = match self.form {
            Form::Chat => "chat.completion",
            Form::Text => "text_completion",
        };
        let prompt_logprobs = match self.form {
            Form::Chat => parts.first_mut().and_then(|part| part.prompt.take()),
            Form::Text => None,
        };
        let choice = |part: Part| match self.form {
            Form::Chat => json!({
                "index": part.index,
                "message": message(&part),
                "logprobs": part.scored.as_deref().map(chat_logprobs),
                "finish_reason": part.finish,
            }),
            Form::Text => self.text_choice(part),
        };
        let choices = parts.into_iter().map(choice).collect();
        let (id, model, created) = (&*self.id, &*self.model, self.created);
        let usage = Some(Some(usage));
        let whole = Whole { id, object, created, model, choices, usage, prompt_logprobs };
        serde_json::to_value(whole).expect("plain values")
    }

    /// Writes an event of a stream. With `counts`, chunks have a usage, which is null until it is known.
    pub fn chunk(&self, to: &mut Vec<u8>, part: Option<Part>, counts: bool, usage: Option<Usage>) {
        let object = match self.form {
            Form::Chat => "chat.completion.chunk",
            Form::Text => "text_completion",
        };
        let choice = |part: Part| match self.form {
            Form::Chat => chat_delta(part),
            Form::Text => self.text_choice(part),
        };
        let choices = part.into_iter().map(choice).collect();
        let usage = counts.then_some(usage);
        let (id, model, created) = (&*self.id, &*self.model, self.created);
        event(to, &Whole { id, object, created, model, choices, usage, prompt_logprobs: None });
    }

    fn text_choice(&self, part: Part) -> Value {
        let mut choice = json!({
            "index": part.index,
            "text": part.text.unwrap_or_default(),
            "logprobs": part.scored.as_deref().map(|scored| text_logprobs(scored, part.offset)),
            "finish_reason": part.finish,
        });
        if let Some(prompt) = part.prompt {
            choice["prompt_logprobs"] = prompt;
        }
        choice
    }
}

/// The message of a whole answer. One that only calls functions has no content.
fn message(part: &Part) -> Value {
    let content = part.text.as_deref().filter(|text| !text.is_empty() || part.calls.is_empty());
    let mut message = json!({ "role": "assistant", "content": content, "refusal": null });
    if let Some(reasoning) = &part.reasoning {
        message["reasoning_content"] = json!(reasoning);
    }
    if !part.calls.is_empty() {
        message["tool_calls"] = part.calls.iter().map(|one| call(one, false)).collect();
    }
    message
}

/// A call, or a part of one in a stream: with its number there, and id and name only where it begins.
fn call(call: &Call, numbered: bool) -> Value {
    let mut function = Map::new();
    let mut entry = Map::new();
    if numbered {
        entry.insert("index".into(), call.index.into());
    }
    if let Some((id, name)) = &call.begins {
        entry.insert("id".into(), id.as_str().into());
        entry.insert("type".into(), "function".into());
        function.insert("name".into(), name.as_str().into());
    }
    function.insert("arguments".into(), call.arguments.as_str().into());
    entry.insert("function".into(), function.into());
    entry.into()
}

fn chat_delta(part: Part) -> Value {
    let mut delta = Map::new();
    if part.first {
        delta.insert("role".into(), "assistant".into());
    }
    if let Some(text) = part.text {
        delta.insert("content".into(), text.into());
    }
    if let Some(reasoning) = part.reasoning {
        delta.insert("reasoning_content".into(), reasoning.into());
    }
    if !part.calls.is_empty() {
        delta.insert("tool_calls".into(), part.calls.iter().map(|one| call(one, true)).collect());
    }
    json!({
        "index": part.index,
        "delta": delta,
        "logprobs": part.scored.as_deref().map(chat_logprobs),
        "finish_reason": part.finish,
    })
}

/// Writes an event of a stream.
pub(super) fn event(to: &mut Vec<u8>, data: &impl Serialize) {
    to.extend_from_slice(b"data: ");
    serde_json::to_writer(&mut *to, data).expect("plain values, written to memory");
    to.extend_from_slice(b"\n\n");
}

/// `{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}`.
fn chat_logprobs(scored: &[Scored]) -> Value {
    let one = |token: &str, bytes: &[u8], logprob: f64| json!({ "token": token, "bytes": bytes, "logprob": logprob.max(LEAST) });
    let content = scored.iter().map(|s| {
        let mut entry = one(&s.token, &s.bytes, s.logprob.unwrap_or_default());
        let top = s.top.iter().map(|(token, bytes, p)| one(token, bytes, *p));
        entry["top_logprobs"] = top.collect();
        entry
    });
    json!({ "content": content.collect::<Vec<_>>(), "refusal": null })
}

/// `{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`, a list each. The token itself is among the likely ones in any case.
fn text_logprobs(scored: &[Scored], mut offset: usize) -> Value {
    let top = |s: &Scored| {
        let own = (&s.token, s.logprob?);
        let mut entries = Map::new();
        for (token, p) in s.top.iter().map(|(token, _, p)| (token, *p)).chain([own]) {
            // Of several tokens that look the same, the likeliest.
            entries.entry(token.as_str()).or_insert_with(|| json!(p.max(LEAST)));
        }
        Some(entries)
    };
    let mut begins = |s: &Scored| {
        s.offset.unwrap_or_else(|| {
            offset += s.token.chars().count();
            offset - s.token.chars().count()
        })
    };
    json!({
        "tokens": scored.iter().map(|s| &*s.token).collect::<Vec<_>>(),
        "token_logprobs": scored.iter().map(|s| s.logprob.map(|p| p.max(LEAST))).collect::<Vec<_>>(),
        "top_logprobs": scored.iter().map(top).collect::<Vec<_>>(),
        "text_offset": scored.iter().map(&mut begins).collect::<Vec<_>>(),
    })
}
