//! Which pages of other origins a browser lets use the server (CORS): none, unless that is asked for.
//!
//! A client shows a key in a header, and the server sets no cookies: so answers never allow credentials, and `*` lets a page do only what
//! any program could that reaches the server.

use axum::http::HeaderValue;

use crate::{Error, Result};

const ANY: HeaderValue = HeaderValue::from_static("*");

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

    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The value with which answers to this origin allow it.
    pub(super) fn allowed(&self, origin: &HeaderValue) -> Option<HeaderValue> {
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
