//! `GET /metrics`, for Prometheus.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;

use crate::serve::app::App;

pub(super) const PATH: &str = "/metrics";

pub(super) async fn run(State(app): State<Arc<App>>) -> impl IntoResponse {
    ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text(&app))
}

fn text(app: &App) -> String {
    let loaded = app.loaded.get();
    let engine = loaded.map(|l| (l.model.client.status(), l.places.taken(), l.model.placement.as_str()));
    app.metrics.text(loaded.is_some() && !app.is_draining(), app.started, engine)
}
