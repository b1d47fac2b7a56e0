//! Fields of OpenAI's, vLLM's and llama.cpp's requests that change nothing: some whatever they hold, others at the values
//! that clients write out because they are the defaults.

use serde_json::Value;

/// Fields without an effect: there is one user and one model, nothing is kept, and nothing is sent piece by piece.
pub const NO_EFFECT: [&str; 27] = [
    "model",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
    "stream_options",
    "request_id",
    "priority",
    "cache_salt",
    "return_token_ids",
    "cache_prompt",
    "id_slot",
    "n_keep",
    "n_cache_reuse",
    "timings_per_token",
    "return_tokens",
    "return_progress",
    // These tune filters whose own fields are below.
    "mirostat_tau",
    "mirostat_eta",
    "xtc_threshold",
    "dynatemp_exponent",
    "dry_base",
    "dry_allowed_length",
];

/// Fields that cannot be had, each with the values, as JSON, at which they change nothing.
pub const NEUTRAL: [(&str, &[&str]); 48] = [
    ("stream", &["false"]),
    ("echo", &["false"]),
    ("logprobs", &["false", "0"]),
    ("top_logprobs", &["0"]),
    ("response_format", &[r#"{"type":"text"}"#]),
    ("tool_choice", &[r#""none""#, r#""auto""#]),
    ("functions", &["[]"]),
    ("function_call", &[r#""none""#, r#""auto""#]),
    ("suffix", &[r#""""#]),
    ("modalities", &[r#"["text"]"#]),
    ("audio", &[]),
    ("prediction", &[]),
    ("web_search_options", &[]),
    ("verbosity", &[r#""medium""#]),
    ("use_beam_search", &["false"]),
    ("length_penalty", &["1"]),
    ("early_stopping", &["false"]),
    ("spaces_between_special_tokens", &["true"]),
    ("detokenize", &["true"]),
    ("truncate_prompt_tokens", &[]),
    ("return_tokens_as_token_ids", &["false"]),
    ("include_reasoning", &["true"]),
    ("thinking_token_budget", &[]),
    ("structured_outputs", &[]),
    ("guided_json", &[]),
    ("guided_regex", &[]),
    ("guided_choice", &["[]"]),
    ("guided_grammar", &[]),
    ("guided_decoding_backend", &[]),
    ("guided_whitespace_pattern", &[]),
    ("logits_processors", &["[]"]),
    ("chat_template", &[]),
    ("mm_processor_kwargs", &["{}"]),
    ("vllm_xargs", &["{}"]),
    ("kv_transfer_params", &[]),
    ("grammar", &[r#""""#]),
    ("json_schema", &[]),
    ("n_probs", &["0"]),
    ("min_keep", &["0", "1"]),
    ("typical_p", &["1"]),
    ("mirostat", &["0"]),
    ("dry_multiplier", &["0"]),
    ("xtc_probability", &["0"]),
    ("dynatemp_range", &["0"]),
    ("top_n_sigma", &["-1", "0"]),
    ("t_max_predict_ms", &["-1", "0"]),
    ("samplers", &["[]"]),
    ("lora", &["[]"]),
];

/// Whether a value is the one that is written so; 1.0 is 1.
pub fn is(value: &Value, neutral: &str) -> bool {
    match value {
        Value::Number(n) => neutral.parse().is_ok_and(|want: f64| n.as_f64() == Some(want)),
        value => serde_json::from_str::<Value>(neutral).is_ok_and(|want| *value == want),
    }
}
