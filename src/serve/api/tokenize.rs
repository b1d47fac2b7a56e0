//! `POST /tokenize` and `POST /detokenize`, with the names of fields that other servers have.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::serve::app::App;
use crate::serve::body;
use crate::serve::complete::apart;
use crate::serve::error::ApiError;

pub(super) const PATH: &str = "/tokenize";
pub(super) const BACK: &str = "/detokenize";

#[derive(Deserialize)]
struct Text {
    /// The text.
    #[serde(alias = "prompt")]
    content: String,
    /// Whether the tokens that the model expects around a text are added.
    #[serde(alias = "add_special_tokens")]
    add_special: Option<bool>,
    /// Whether control tokens in the text count as such.
    parse_special: Option<bool>,
}

#[derive(Deserialize)]
struct Tokens {
    tokens: Vec<u32>,
}

pub(super) async fn run(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ApiError> {
    app.ready()?;
    let text: Text = body::read(&app, request).await?.parse()?;
    let (around, special) = (text.add_special.unwrap_or(true), text.parse_special.unwrap_or(true));
    let encode = move |model: &crate::serve::model::Model| {
        let bad = |e| ApiError::from_engine(&e, "content");
        let ids = match &model.tokenizer {
            Some(t) => t.encode(&text.content, around, special).map_err(bad)?,
            None if text.content.is_empty() => Vec::new(),
            None => model.chat.raw(&text.content).map_err(bad)?,
        };
        Ok(json!({ "tokens": ids, "count": ids.len(), "max_model_len": model.context }))
    };
    apart(&app, encode).await.map(Json)
}

pub(super) async fn back(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ApiError> {
    app.ready()?;
    let Tokens { tokens } = body::read(&app, request).await?.parse()?;
    let decode = move |model: &crate::serve::model::Model| {
        let ids = model.chat.tokens(tokens).map_err(|e| ApiError::from_engine(&e, "tokens"))?;
        let text = model.text_of(&ids);
        Ok(json!({ "content": text, "prompt": text }))
    };
    apart(&app, decode).await.map(Json)
}
