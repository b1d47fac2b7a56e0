//! The endpoints, a file each.

mod chat;
mod completions;
mod cors;
mod health;
mod metrics;
mod models;
mod openapi;
mod page;
mod status;
mod tokenize;
mod tokenizer_info;

use std::sync::Arc;

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{Method, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};

use super::app::App;
use super::error::ApiError;
use super::places::Tenant;

/// Paths that need no key: whether the server is there, what it serves, how it is asked, and the page, which asks for a key.
const PUBLIC: [&str; 5] = [health::PATH, models::PATH, models::ONE, openapi::PATH, page::PATH];
/// Paths whose requests are written to the log with their tokens.
const RECORDED: [&str; 2] = [chat::PATH, completions::PATH];
/// All of them, for metrics.
const PATHS: [&str; 12] = [
    page::PATH,
    chat::PATH,
    completions::PATH,
    models::PATH,
    models::ONE,
    health::PATH,
    metrics::PATH,
    status::PATH,
    openapi::PATH,
    tokenize::PATH,
    tokenize::BACK,
    tokenizer_info::PATH,
];

/// Characters of an unknown path in the log.
const LONGEST: usize = 100;

/// All endpoints.
pub(super) fn routes(app: Arc<App>) -> Router {
    Router::new()
        .route(page::PATH, get(page::run))
        .route(status::PATH, get(status::run))
        .route(chat::PATH, post(chat::run))
        .route(completions::PATH, post(completions::run))
        .route(models::PATH, get(models::list))
        .route(models::ONE, get(models::one))
        .route(health::PATH, get(health::run))
        .route(metrics::PATH, get(metrics::run))
        .route(openapi::PATH, get(openapi::run))
        .route(tokenize::PATH, post(tokenize::run))
        .route(tokenize::BACK, post(tokenize::back))
        .route(tokenizer_info::PATH, get(tokenizer_info::run))
        .method_not_allowed_fallback(wrong_method)
        .fallback(nothing)
        .layer(middleware::from_fn_with_state(app.clone(), guard))
        .layer(middleware::from_fn_with_state(app.clone(), cors::allow))
        .with_state(app)
}

async fn nothing() -> ApiError {
    let paths = PATHS.join(", ");
    ApiError::not_found("unknown_url", format!("there is nothing at this path; there are {paths}"))
}

async fn wrong_method(method: Method) -> ApiError {
    let message = format!("{method} is not allowed at this path");
    ApiError::of_request(StatusCode::METHOD_NOT_ALLOWED, message)
}

/// Lets in who has a key, and writes the log of requests that do not write their own.
async fn guard(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let begun = std::time::Instant::now();
    let matched = request.extensions().get::<MatchedPath>();
    let path = matched.and_then(|m| PATHS.into_iter().find(|path| *path == m.as_str())).unwrap_or("other");
    let method = request.method().clone();
    // A stranger's path is cut; what it may be made of, a URI has checked.
    let shown = match path {
        "other" => request.uri().path().chars().take(LONGEST).collect(),
        path => path.to_owned(),
    };
    let key = app.options.keys.admit(request.headers());
    request.extensions_mut().insert(Tenant(key.unwrap_or_default()));
    let admitted = PUBLIC.contains(&path) || key.is_some();
    if admitted && RECORDED.contains(&path) && method == Method::POST {
        return next.run(request).await;
    }
    let response = if admitted { next.run(request).await } else { ApiError::key().into_response() };
    let status = response.status().as_u16();
    app.metrics.request(path, status);
    let total = begun.elapsed().as_secs_f64() * 1e3;
    // Probes, scrapes and the page come every few seconds.
    let detail = [health::PATH, metrics::PATH, status::PATH].contains(&path);
    (app.options.log)(&format!("{method} {shown} {status} total_ms={total:.1}"), detail);
    response
}
