//! `GET /v1/models` and `GET /v1/models/{id}`.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};

use crate::serve::app::App;
use crate::serve::error::ApiError;

pub(super) const PATH: &str = "/v1/models";
/// Names may have slashes.
pub(super) const ONE: &str = "/v1/models/{*id}";

fn model(app: &App) -> Value {
    let context = app.loaded.get().map(|loaded| loaded.model.context);
    json!({
        "id": app.options.name,
        "object": "model",
        "created": app.started,
        "owned_by": "tandem",
        "max_model_len": context,
    })
}

pub(super) async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({ "object": "list", "data": [model(&app)] }))
}

pub(super) async fn one(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    if id == app.options.name {
        return Ok(Json(model(&app)));
    }
    let message = format!("there is no such model; this server has {}", app.options.name);
    Err(ApiError::not_found("model_not_found", message))
}
