//! `GET /health`: 200 if requests are taken, 503 while the model is loaded and before the end.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use crate::serve::app::App;
use crate::serve::error::ApiError;

pub(super) const PATH: &str = "/health";

pub(super) async fn run(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    app.ready()?.model.check()?;
    Ok(Json(json!({ "status": "ok" })))
}
