//! `GET /tokenizer_info`, with the names of fields that vLLM has: what a client that counts tokens needs beside `/tokenize` and
//! `/detokenize`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use crate::serve::app::App;
use crate::serve::error::ApiError;
use crate::text::Tokenizer;

pub(super) const PATH: &str = "/tokenizer_info";

pub(super) async fn run(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let model = &app.ready()?.model;
    let tokenizer = model.tokenizer.as_deref();
    let token = |id: fn(&Tokenizer) -> Option<u32>| tokenizer.and_then(|t| t.token_text(id(t)?));
    Ok(Json(json!({
        "tokenizer_class": tokenizer.map(Tokenizer::kind),
        "bos_token": token(Tokenizer::bos),
        "eos_token": token(Tokenizer::eos),
        "pad_token": null,
        "vocab_size": model.vocab,
        "model_max_length": model.context,
        "chat_template": model.chat.template(),
    })))
}
