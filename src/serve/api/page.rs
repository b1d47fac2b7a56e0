//! `GET /`: the status page, one file with its style and script, which asks nobody but this server.

use std::sync::OnceLock;

use axum::http::header;
use axum::response::IntoResponse;
use sha2::{Digest, Sha256};

pub(super) const PATH: &str = "/";

/// The file.
const PAGE: &str = include_str!("../page.html");

pub(super) async fn run() -> impl IntoResponse {
    static POLICY: OnceLock<String> = OnceLock::new();
    let policy = POLICY.get_or_init(policy).as_str();
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, policy),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        // Another version may be served at the same address tomorrow.
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, PAGE)
}

/// Only the page's own style and script, by their digests, and requests to this server.
fn policy() -> String {
    let digest = |tag| base64(&Sha256::digest(inside(PAGE, tag)));
    format!(
        "default-src 'none'; script-src 'sha256-{}'; style-src 'sha256-{}'; connect-src 'self'; img-src data:; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        digest("script"),
        digest("style")
    )
}

/// The text of the only element of this kind.
fn inside<'a>(page: &'a str, tag: &str) -> &'a str {
    let (open, close) = (format!("<{tag}>"), format!("</{tag}>"));
    let (_, rest) = page.split_once(&open).expect("the page has one");
    rest.split_once(&close).expect("it ends").0
}

fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let all = three.iter().chain([&0; 2]).take(3).fold(0, |all, &byte| all << 8 | u32::from(byte));
        for i in 0..4 {
            let letter = LETTERS[(all >> (18 - 6 * i) & 63) as usize];
            text.push(if i <= three.len() { char::from(letter) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_written_as_browsers_want_them() {
        for (bytes, text) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
    }

    /// What the policy refuses, or a browser would fetch elsewhere.
    #[test]
    fn the_page_has_one_style_one_script_and_no_other_source() {
        for tag in ["style", "script"] {
            assert_eq!(PAGE.matches(&format!("<{tag}")).count(), 1, "{tag}");
            assert!(inside(PAGE, tag).len() > 1000);
        }
        for never in [
            "http://",
            "https://",
            " style=",
            " onclick=",
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "eval(",
        ] {
            assert!(!PAGE.contains(never), "{never}");
        }
    }
}
