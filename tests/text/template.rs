//! Chat templates against what Python's Jinja2 makes of them, and against hostile ones.
//!
//! `TANDEM_TEST_TEMPLATES` may name another file made like `tests/fixtures/chat_templates.json`.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tandem::Error;
use tandem::text::{ChatTemplate, Message};

#[test]
fn templates_render_as_jinja2_renders_them() {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat_templates.json");
    let path = std::env::var_os("TANDEM_TEST_TEMPLATES").map_or(own, PathBuf::from);
    let fixture: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let mut failures = Vec::new();
    let mut checked = 0;
    for template in fixture["templates"].as_array().unwrap() {
        let text = |key: &str| template[key].as_str().unwrap();
        let name = text("name");
        let compiled = match ChatTemplate::new(text("source")) {
            Ok(compiled) => compiled,
            Err(e) => {
                failures.push(format!("{name}: {e}"));
                continue;
            }
        };
        for (i, case) in template["cases"].as_array().unwrap().iter().enumerate() {
            let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).unwrap();
            let prompt = case["add_generation_prompt"].as_bool().unwrap();
            let got = compiled.render(&messages, prompt, text("bos"), text("eos"));
            checked += 1;
            match (&got, case["want"].as_str()) {
                (Ok(got), Some(want)) if got == want => {}
                (Err(_), None) => {}
                (got, want) => {
                    failures.push(format!("{name} {i}\n   got {got:?}\n  want {want:?} {}", case["error"]))
                }
            }
        }
    }
    assert!(checked >= 50, "the fixture lost its cases");
    assert!(failures.is_empty(), "{} of {checked} differ:\n{}", failures.len(), failures.join("\n"));
}

fn render(source: &str) -> Result<String, Error> {
    let messages = [Message::new("user", "hi")];
    ChatTemplate::new(source)?.render(&messages, true, "<s>", "</s>")
}

#[test]
fn what_a_template_raises_is_the_error() {
    let error = render("{{ raise_exception('roles must alternate') }}").unwrap_err().to_string();
    assert!(error.contains("roles must alternate") && !error.contains('\n'), "{error}");
    let error = render("line one\n{% if %}").unwrap_err().to_string();
    assert!(error.contains("line 2") && !error.contains('\n'), "{error}");
}

#[test]
fn hostile_templates_end_soon_with_an_error() {
    let nested = format!("{}1{}", "{{ (".repeat(5000), ") }}".repeat(5000));
    let parens = format!("{{{{ {}1{} }}}}", "(".repeat(60_000), ")".repeat(60_000));
    let long = format!("{{{{ 1{} }}}}", "+1".repeat(60_000));
    let pipes = format!("{{{{ 1{} }}}}", "|e".repeat(60_000));
    let dots = format!("{{{{ x{} }}}}", ".a".repeat(60_000));
    let ifs = format!("{}{}", "{% if true %}".repeat(8_000), "{% endif %}".repeat(8_000));
    let huge = "x".repeat(2 << 20);
    let sources = [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% for a in range(100000) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ 'x' * 10000000000 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{% include 'chat_template' %}",
        "{% extends 'chat_template' %}",
        &nested,
        &parens,
        &long,
        &pipes,
        &dots,
        &ifs,
        &huge,
    ];
    for source in sources {
        let start = Instant::now();
        let result = render(source);
        let shown: String = source.chars().take(80).collect();
        let took = start.elapsed();
        assert!(took < Duration::from_secs(20), "{shown}: took {took:?}");
        match result {
            Err(e) => assert!(e.to_string().len() < 2000, "{shown}: a long error"),
            // Harmless after all: small.
            Ok(text) => assert!(text.len() < 1 << 20, "{shown}: wrote {} bytes", text.len()),
        }
    }
}
