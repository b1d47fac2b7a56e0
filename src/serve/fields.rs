//! The fields of a request, as clients write them. Fields that are not here have no effect; those that ask for what this
//! server lacks are here to be refused.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::Value;

use crate::text::Json;

/// Fields that both kinds of completions have.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Common {
    pub max_tokens: Option<u32>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<i64>,
    pub min_p: Option<f32>,
    pub seed: Option<i64>,
    pub stop: Option<Stop>,
    pub n: Option<u32>,
    pub logit_bias: Option<HashMap<String, f32>>,
    pub presence_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    pub model: Option<String>,
    /// Which of the waiting requests of a key come first: those with a lower one.
    pub priority: Option<i32>,
    /// Seconds to the first token, and between tokens, in the place of the server's targets.
    pub ttft_target: Option<f64>,
    pub tpot_target: Option<f64>,
    /// vLLM's name for scores of the prompt.
    pub prompt_logprobs: Option<u32>,
    /// Tokens before which the answer does not end.
    pub min_tokens: Option<u32>,
    /// Whether the end of the turn does not end the answer.
    pub ignore_eos: Option<bool>,
    pub stop_token_ids: Option<Vec<u32>>,
    /// Constraints in OpenAI's words, and in those of other servers.
    pub response_format: Option<ResponseFormat>,
    pub guided_json: Option<Value>,
    pub guided_regex: Option<Value>,
    pub guided_choice: Option<Value>,
    pub guided_grammar: Option<Value>,
    pub structured_outputs: Option<Value>,
    pub json_schema: Option<Value>,
    pub grammar: Option<Value>,
    pub regex: Option<Value>,
}

/// `stop`.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "a string or a list of strings is wanted")]
pub(super) enum Stop {
    One(String),
    Many(Vec<String>),
}

/// `stream_options`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StreamOptions {
    pub include_usage: Option<bool>,
}

/// `response_format`.
#[derive(Debug, Deserialize)]
pub(super) struct ResponseFormat {
    #[serde(rename = "type")]
    pub kind: String,
    pub json_schema: Option<JsonSchema>,
}

/// `response_format.json_schema`. Its `strict` makes no difference: the schema is enforced in any case.
#[derive(Debug, Deserialize)]
pub(super) struct JsonSchema {
    pub schema: Option<Value>,
}

/// What `POST /v1/chat/completions` has besides.
#[derive(Debug, Deserialize)]
pub(super) struct Chat {
    pub messages: Vec<Json>,
    pub max_completion_tokens: Option<u32>,
    pub logprobs: Option<bool>,
    pub top_logprobs: Option<u32>,
    pub tools: Option<Vec<Json>>,
    pub tool_choice: Option<Value>,
    pub parallel_tool_calls: Option<bool>,
    pub functions: Option<Vec<Value>>,
    pub function_call: Option<Value>,
    pub modalities: Option<Vec<String>>,
    pub audio: Option<Value>,
    pub web_search_options: Option<Value>,
    pub chat_template_kwargs: Option<Json>,
    pub reasoning_effort: Option<String>,
    pub add_generation_prompt: Option<bool>,
    pub continue_final_message: Option<bool>,
}

/// What `POST /v1/completions` has besides.
#[derive(Debug, Deserialize)]
pub(super) struct Completion {
    pub prompt: Prompt,
    pub logprobs: Option<u32>,
    pub echo: Option<bool>,
    pub best_of: Option<u32>,
    pub suffix: Option<String>,
}

/// A prompt, or several.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "a string, a list of strings, token ids, or a list of these is wanted")]
pub(super) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    ManyTokens(Vec<Vec<u32>>),
}
