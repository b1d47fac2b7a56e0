//! What browsers ask before pages of other origins may use the server, and want to see in answers.
//!
//! A browser asks before it sends a request with a key or with JSON (a preflight, `OPTIONS`), and lets a page read answers only if they
//! name its origin. Neither needs a key: what the page then does needs one.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{self, HeaderName};
use axum::http::{HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::serve::app::App;

/// Seconds for which a browser need not ask again.
const MAX_AGE: HeaderValue = HeaderValue::from_static("600");
/// What a page may read beside the usual headers.
const EXPOSED: HeaderValue = HeaderValue::from_static("retry-after");

/// Answers preflights of allowed origins, and marks the other answers to them, errors included.
pub(super) async fn allow(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let cors = &app.options.cors;
    if cors.is_empty() {
        return next.run(request).await;
    }
    let headers = request.headers();
    let allowed = headers.get(header::ORIGIN).and_then(|origin| cors.allowed(origin));
    let preflight =
        request.method() == Method::OPTIONS && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let wanted = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let mut response = match (preflight, &allowed) {
        (true, Some(_)) => StatusCode::NO_CONTENT.into_response(),
        _ => next.run(request).await,
    };
    let mut set = |name: HeaderName, value: HeaderValue| drop(response.headers_mut().insert(name, value));
    // Also where it is not allowed: a cache must not take this answer for another origin.
    set(header::VARY, HeaderValue::from_static("origin"));
    let Some(origin) = allowed else { return response };
    set(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    if preflight {
        set(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST"));
        set(header::ACCESS_CONTROL_MAX_AGE, MAX_AGE);
        // Clients send headers of their own (`x-stainless-...`), which have no effect.
        if let Some(wanted) = wanted {
            set(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted);
        }
    } else {
        set(header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
    }
    response
}
