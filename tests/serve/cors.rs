//! Pages of other origins: a browser's questions, and what it wants to see in answers.

use serde_json::json;
use tandem::serve::{Cors, Keys, Options};

use super::world::{Served, World};

/// Status and headers of an answer, read from a bare socket.
fn head(served: &Served, request: &str) -> (u16, String) {
    use std::io::{Read, Write};
    let mut stream = served.connect();
    let request = request.replace('\n', "\r\n");
    stream.write_all(format!("{request}\r\nHost: x\r\nConnection: close\r\n\r\n").as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, _) = text.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), head.to_ascii_lowercase())
}

fn world(origins: &[&str]) -> Served {
    let cors = Cors::new(origins.iter().copied()).unwrap();
    let keys = Keys::new(["secret"]).unwrap();
    World { options: Options { cors, keys, ..Options::default() }, ..World::default() }.serve()
}

const PREFLIGHT: &str = "OPTIONS /v1/chat/completions HTTP/1.1\nAccess-Control-Request-Method: POST\nAccess-Control-Request-Headers: authorization,content-type,x-stainless-os";

#[test]
fn nothing_is_allowed_unless_asked_for() {
    let served = world(&[]);
    let (status, head) = head(&served, &format!("{PREFLIGHT}\nOrigin: https://a.org"));
    assert_eq!(status, 401);
    assert!(!head.contains("access-control") && !head.contains("vary"), "{head}");
}

#[test]
fn preflights_need_no_key_and_requests_do() {
    let served = world(&["https://a.org", "http://localhost:3000"]);
    for origin in ["https://a.org", "http://localhost:3000"] {
        let (status, head) = head(&served, &format!("{PREFLIGHT}\nOrigin: {origin}"));
        assert_eq!(status, 204, "{head}");
        for line in [
            format!("access-control-allow-origin: {origin}"),
            "access-control-allow-methods: get, post".into(),
            "access-control-allow-headers: authorization,content-type,x-stainless-os".into(),
            "vary: origin".into(),
        ] {
            assert!(head.lines().any(|l| l == line), "{line}: {head}");
        }
        assert!(!head.contains("credentials"), "{head}");
    }
    // An error can be read, too, or nobody learns that the key is wrong.
    let (status, refused) = head(&served, "GET /metrics HTTP/1.1\nOrigin: https://a.org");
    assert_eq!(status, 401);
    assert!(refused.contains("access-control-allow-origin: https://a.org"), "{refused}");
    let (status, admitted) = head(&served, "GET /metrics HTTP/1.1\nOrigin: https://a.org\nX-Api-Key: secret");
    assert_eq!(status, 200);
    assert!(admitted.contains("access-control-expose-headers: retry-after"), "{admitted}");
}

#[test]
fn other_origins_and_other_programs_are_as_before() {
    let served = world(&["https://a.org"]);
    for origin in ["Origin: https://b.org", "Origin: https://a.org.evil.org", "Origin: null", "X-Other: 1"] {
        let (status, asked) = head(&served, &format!("{PREFLIGHT}\n{origin}"));
        assert_eq!(status, 401, "{origin}");
        assert!(!asked.contains("access-control"), "{asked}");
        let (status, got) = head(&served, &format!("GET /health HTTP/1.1\n{origin}"));
        assert_eq!(status, 200, "{origin}");
        assert!(!got.contains("access-control") && got.contains("vary: origin"), "{got}");
    }
    let body = json!({ "prompt": "a", "max_tokens": 1 }).to_string();
    let headers = [("content-type", "application/json"), ("x-api-key", "secret")];
    served.caller().post_text("/v1/completions", &body, &headers).ok();
}

#[test]
fn a_star_is_every_origin() {
    let served = world(&["*"]);
    let (status, head) = head(&served, &format!("{PREFLIGHT}\nOrigin: null"));
    assert_eq!(status, 204);
    assert!(head.contains("access-control-allow-origin: *"), "{head}");
}
