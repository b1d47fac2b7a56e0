//! Which pages of other origins a browser lets use the server (CORS): none, unless that is asked for.
//!
//! A browser asks before it sends a request with a key or with JSON (a preflight, `OPTIONS`), and lets a page read answers only if they
//! name its origin. Both need no key: what the page may do needs one. Cookies are none of a server's that knows its clients by keys, so
//! credentials are not allowed, and `*` lets no page do what its user could not.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{self, HeaderName};
use axum::http::{HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::app::App;
use crate::{Error, Result};

/// Seconds for which a browser need not ask again.
const MAX_AGE: HeaderValue = HeaderValue::from_static("600");
const ANY: HeaderValue = HeaderValue::from_static("*");
/// What a page may read beside the usual headers.
const EXPOSED: HeaderValue = HeaderValue::from_static("retry-after");

/// The origins whose pages may use a server.
#[derive(Debug, Clone, Default)]
pub struct Cors(Vec<HeaderValue>);

impl Cors {
    /// These origins, as browsers write them (`https://chat.example.org`, `http://localhost:3000`), or `*` for all.
    ///
    /// # Errors
    /// If one has another form.
    pub fn new<'a>(origins: impl IntoIterator<Item = &'a str>) -> Result<Cors> {
        let origin = |text: &str| match is_origin(text) {
            true => Ok(HeaderValue::from_str(text).expect("printable ASCII")),
            false => Err(Error::usage(format!(
                "{text:?} is not an origin: http://HOST or https://HOST, with :PORT if it has one and nothing behind, or *, is wanted"
            ))),
        };
        origins.into_iter().map(origin).collect::<Result<_>>().map(Cors)
    }

    /// The value with which answers to this origin allow it.
    fn allowed(&self, origin: &HeaderValue) -> Option<HeaderValue> {
        match self.0.contains(&ANY) {
            true => Some(ANY),
            false => self.0.contains(origin).then(|| origin.clone()),
        }
    }
}

/// Whether a browser might send this as `Origin`: in lower case, without a path.
fn is_origin(text: &str) -> bool {
    let host = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    let fits = |c: char| matches!(c, 'a'..='z' | '0'..='9' | '.' | '-' | '_' | ':' | '[' | ']');
    text == "*" || host.is_some_and(|host| !host.is_empty() && host.chars().all(fits))
}

/// Answers preflights of allowed origins, and marks the other answers to them, errors included.
pub(super) async fn allow(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let cors = &app.options.cors;
    if cors.0.is_empty() {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_are_what_browsers_send() {
        for good in ["*", "https://a.org", "http://localhost:3000", "http://[::1]:80", "http://127.0.0.1"] {
            assert!(Cors::new([good]).is_ok(), "{good}");
        }
        for bad in
            ["", "a.org", "https://", "https://a.org/", "https://A.org", "https://*.a.org", "null", "ftp://a"]
        {
            assert!(Cors::new([bad]).is_err(), "{bad}");
        }
    }
}
