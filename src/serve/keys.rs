//! Keys that clients show: `Authorization: Bearer KEY` or `X-Api-Key: KEY`.

use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use sha2::{Digest, Sha256};

use crate::{Error, Result};

/// The keys that a server accepts, as digests: comparing these takes the same time wherever two keys begin to differ, and no
/// key stays in memory.
#[derive(Debug, Clone, Default)]
pub struct Keys(Vec<[u8; 32]>);

impl Keys {
    /// These keys.
    ///
    /// # Errors
    /// If a key is empty or has characters that no header can carry.
    pub fn new<'a>(keys: impl IntoIterator<Item = &'a str>) -> Result<Keys> {
        let digest = |key: &str| match !key.is_empty() && key.bytes().all(|b| b.is_ascii_graphic()) {
            true => Ok(Sha256::digest(key.as_bytes()).into()),
            false => Err(Error::usage("a key is one word of printable ASCII characters")),
        };
        keys.into_iter().map(digest).collect::<Result<_>>().map(Keys)
    }

    /// The keys in the lines of a file's text; empty lines and those that begin with # are left out.
    ///
    /// # Errors
    /// As [`Keys::new`], and if there is none.
    pub fn in_lines(text: &str) -> Result<Keys> {
        let lines = text.lines().map(str::trim);
        let keys = Keys::new(lines.filter(|line| !line.is_empty() && !line.starts_with('#')))?;
        if keys.0.is_empty() { Err(Error::usage("no key; one a line is wanted")) } else { Ok(keys) }
    }

    /// These and others.
    #[must_use]
    pub fn and(mut self, others: Keys) -> Keys {
        self.0.extend(others.0);
        self
    }

    /// Their number.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Whose request has these headers, if it is let in: the number of its key, 0 where none is wanted.
    pub fn admit(&self, headers: &HeaderMap) -> Option<usize> {
        match self.0.is_empty() {
            true => Some(0),
            false => self.place(shown(headers)?),
        }
    }

    fn place(&self, key: &[u8]) -> Option<usize> {
        let digest: [u8; 32] = Sha256::digest(key).into();
        let differs = |own: &[u8; 32]| own.iter().zip(&digest).fold(0, |all, (a, b)| all | (a ^ b));
        // All of them are compared, in any case.
        self.0
            .iter()
            .enumerate()
            .fold(None, |found, (at, own)| if differs(own) == 0 { Some(at) } else { found })
    }
}

/// The key of a request.
fn shown(headers: &HeaderMap) -> Option<&[u8]> {
    if let Some(value) = headers.get("x-api-key") {
        return Some(value.as_bytes());
    }
    let value = headers.get(AUTHORIZATION)?.as_bytes();
    let (scheme, key) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: &'static str, value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(name.parse().unwrap(), value.parse().unwrap())])
    }

    #[test]
    fn one_of_the_keys_is_needed_if_there_are_any() {
        let keys = Keys::in_lines("# ours\n\nfirst\n second \n").unwrap();
        for (name, value, admitted) in [
            ("authorization", "Bearer first", Some(0)),
            ("authorization", "bearer  second", Some(1)),
            ("x-api-key", "second", Some(1)),
            ("x-api-key", "secon", None),
            ("x-api-key", "seconds", None),
            ("authorization", "Basic first", None),
            ("authorization", "Bearer", None),
            ("authorization", "Bearer ", None),
            ("authorization", "first", None),
            ("x-other", "first", None),
        ] {
            assert_eq!(keys.admit(&headers(name, value)), admitted, "{name}: {value}");
        }
        assert_eq!(Keys::default().admit(&HeaderMap::new()), Some(0));
    }

    #[test]
    fn keys_that_no_header_carries_are_refused() {
        for bad in ["", "two words", "k\u{e9}y", "a\nb"] {
            assert!(Keys::new([bad]).is_err(), "{bad:?}");
        }
        assert!(Keys::in_lines("# none\n").is_err());
    }
}
