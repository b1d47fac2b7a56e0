//! The status page, and what it reads.

use std::process::Command;

use regex::Regex;
use serde_json::{Value, json};
use tandem::serve::{Keys, Options};

use super::world::World;

/// The paths of fields that the page reads.
fn fields(page: &str) -> Vec<String> {
    let reads = Regex::new(r#"\bat\(status, "([a-z0-9_.]+)"\)"#).unwrap();
    reads.captures_iter(page).map(|found| found[1].to_owned()).collect()
}

#[test]
fn the_page_needs_no_key_and_its_numbers_do() {
    let options = Options { keys: Keys::new(["sk-test"]).unwrap(), ..Options::default() };
    let served = World { options, ..World::default() }.serve();
    let caller = served.caller();
    let page = caller.get("/");
    assert_eq!(page.status, 200);
    assert!(page.body.starts_with("<!doctype html>"));
    let policy = page.header("content-security-policy");
    for part in [
        "default-src 'none'",
        "script-src 'sha256-",
        "style-src 'sha256-",
        "connect-src 'self'",
        "frame-ancestors 'none'",
    ] {
        assert!(policy.contains(part), "{part}: {policy}");
    }
    assert!(!policy.contains("unsafe"), "{policy}");
    assert_eq!(page.header("content-type"), "text/html; charset=utf-8");
    assert_eq!(page.header("x-content-type-options"), "nosniff");
    assert_eq!(page.header("referrer-policy"), "no-referrer");
    caller.get("/status").error(401);
    caller.post("/", &json!({})).error(405);
}

#[test]
fn every_field_that_the_page_reads_is_there() {
    let mut served = World { ready: false, ..World::default() }.serve();
    let caller = served.caller();
    let loading = caller.get("/status").ok();
    assert_eq!((&loading["state"], &loading["engine"]), (&json!("loading"), &Value::Null));
    served.ready();
    let page = caller.get("/").body;
    let fields = fields(&page);
    assert!(fields.len() > 40, "{fields:?}");
    // Every access has this form: others would not be found.
    assert_eq!(page.matches("at(status").count(), fields.len());
    let status = caller.get("/status").ok();
    for field in &fields {
        let pointer = format!("/{}", field.replace('.', "/"));
        assert!(status.pointer(&pointer).is_some(), "{field} is not in {status}");
    }
    for id in Regex::new(r#"\b(?:put|byId)\("([a-z0-9-]+)"[,)]"#).unwrap().captures_iter(&page) {
        assert_eq!(page.matches(&format!("id=\"{}\"", &id[1])).count(), 1, "{}", &id[1]);
    }
    served.server.drain();
    assert_eq!(caller.get("/status").ok()["state"], "draining");
}

#[test]
fn the_status_tells_what_was_done() {
    let served = World { prefixes: true, ..World::default() }.serve();
    let caller = served.caller();
    let prompt = "a".repeat(100);
    let body = json!({ "prompt": prompt, "max_tokens": 12, "seed": 1 });
    caller.complete(&body).ok();
    caller.complete(&body).ok();
    caller.complete(&json!({ "prompt": "a", "max_tokens": "many" })).error(400);
    served.wait_until_free();
    served.logged(" 400 ");
    let status = caller.get("/status").ok();
    assert_eq!(status["http"], json!({ "ok": 2, "refused": 1, "failed": 0, "left": 0 }));
    // Three full pages of a hundred tokens were there.
    assert_eq!(status["tokens"], json!({ "prompt": 200, "cached": 96, "answer": 24 }));
    assert_eq!(status["latency"]["answers"], 2);
    let first = |percent: &str| status["latency"]["first_token"][percent].as_f64().unwrap();
    assert!(
        0.0 < first("p50")
            && first("p50") <= first("p99")
            && first("p99") <= status["uptime_s"].as_f64().unwrap()
    );
    let engine = &status["engine"];
    assert_eq!(
        (&engine["tokens"], &engine["cached"], &engine["finished"]),
        (&json!(24), &json!(96), &json!(2))
    );
    assert_eq!((&engine["strategy"], &engine["exchanged_experts"]), (&json!("gated"), &json!(0)));
    let busy = engine["lane_seconds"]["cpu"].as_f64().unwrap();
    assert!(busy > 0.0 && busy <= engine["step_seconds"].as_f64().unwrap() + 1e-3, "{engine}");
    // Pages of ended requests are kept, and no page is counted twice.
    let host = &status["pages"]["host"];
    assert_eq!(host["used"], 0);
    assert_eq!(host["kept"], 3, "{host}");
    let all = host["kept"].as_u64().unwrap() + host["free"].as_u64().unwrap();
    assert_eq!(all as usize, served.service.client().status().pages[1]);
    let metrics = caller.get("/metrics").body;
    for line in [
        "tandem_kv_pages{side=\"host\",use=\"kept\"} 3",
        "tandem_prompt_tokens_cached_total 96",
        "tandem_placement_info{placement=\"cpu-only: all on the cpu\"} 1",
        "tandem_lane_busy_seconds_total{lane=\"gpu\"} 0",
        "tandem_experts_exchanged_total 0",
    ] {
        assert!(metrics.lines().any(|l| l == line), "{line}: {metrics}");
    }
}

/// In headless Chromium, where Playwright for Python is: `TANDEM_TEST_PYTHON` names the interpreter.
#[test]
fn a_browser_shows_it_and_chats() {
    let python = std::env::var("TANDEM_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
    let options =
        Options { keys: Keys::new(["sk-test"]).unwrap(), name: "tiny".into(), ..Options::default() };
    let template = "{% for m in messages %}<|turn|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}<|turn|>";
    let world = World {
        options,
        spells: true,
        template: Some(template),
        context: 4096,
        chunk: 256,
        ..World::default()
    };
    let served = world.serve();
    let output = Command::new(&python)
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/see-page"))
        .args([&format!("http://{}", served.server.address()), "--key", "sk-test"])
        .output();
    match output {
        Ok(output) => {
            let (out, err) =
                (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            assert!(output.status.success(), "{out}{err}");
            println!("{out}");
        }
        Err(e) => println!("skipped: SKIPPED: {python}: {e}"),
    }
}
