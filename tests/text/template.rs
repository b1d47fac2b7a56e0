//! Chat templates against what Python's Jinja2 makes of them, and against hostile ones.
//!
//! `TANDEM_TEST_TEMPLATES` may name another file made like `tests/fixtures/chat_templates.json`, and
//! `TANDEM_TEST_TEMPLATE_CASES` one of `tests/fixtures/make_templates.py`.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tandem::Error;
use tandem::text::{ChatTemplate, Conversation, Json, Message};

#[test]
fn templates_render_as_jinja2_renders_them() {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat_templates.json");
    let path = std::env::var_os("TANDEM_TEST_TEMPLATES").map_or(own, PathBuf::from);
    // Not `serde_json::Value`, which sorts the keys of messages.
    let fixture: Json = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let list = |of: &Json, key: &str| match of.get(key) {
        Some(Json::List(list)) => list.clone(),
        other => panic!("{key}: {other:?}"),
    };
    let mut failures = Vec::new();
    let mut checked = 0;
    for template in &list(&fixture, "templates") {
        let text = |key: &str| template.get(key).and_then(Json::as_str).unwrap();
        let name = text("name");
        let compiled = match ChatTemplate::new(text("source")) {
            Ok(compiled) => compiled,
            Err(e) => {
                failures.push(format!("{name}: {e}"));
                continue;
            }
        };
        for (i, case) in list(template, "cases").iter().enumerate() {
            let messages: Vec<Message> =
                list(case, "messages").into_iter().map(|m| Message::from_json(m).unwrap()).collect();
            let prompt = case.get("add_generation_prompt") == Some(&Json::Bool(true));
            let got = compiled.render(&messages, prompt, text("bos"), text("eos"));
            checked += 1;
            match (&got, case.get("want").and_then(Json::as_str)) {
                (Ok(got), Some(want)) if got == want => {}
                (Err(_), None) => {}
                (got, want) => failures.push(format!("{name} {i}\n   got {got:?}\n  want {want:?}")),
            }
        }
    }
    assert!(checked >= 50, "the fixture lost its cases");
    assert!(failures.is_empty(), "{} of {checked} differ:\n{}", failures.len(), failures.join("\n"));
}

/// White space, line ends, raw blocks, escapes, `tojson`, fields and variables: made by `make_templates.py` with
/// transformers 5.24.0 and jinja2 3.1.6.
#[test]
fn small_templates_render_as_transformers_renders_them() {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/template_cases.json");
    let path = std::env::var_os("TANDEM_TEST_TEMPLATE_CASES").map_or(own, PathBuf::from);
    let Json::Object(mut fixture) = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap() else {
        panic!("no object")
    };
    let Some((_, Json::List(cases))) = fixture.pop() else { panic!("no cases") };
    assert!(cases.len() >= 100, "the fixture lost its cases");
    let mut failures = Vec::new();
    for case in &cases {
        let source = case.get("source").and_then(Json::as_str).unwrap();
        let Some(Json::List(messages)) = case.get("messages") else { panic!("no messages in {source}") };
        let messages = messages.iter().map(|m| Message::from_json(m.clone()).unwrap()).collect();
        let conversation = Conversation {
            tools: case.get("tools").cloned(),
            documents: case.get("documents").cloned(),
            variables: match case.get("variables") {
                Some(Json::Object(variables)) => variables.clone(),
                _ => Vec::new(),
            },
            add_generation_prompt: case.get("add_generation_prompt") == Some(&Json::Bool(true)),
            continue_final_message: case.get("continue_final_message").is_some(),
            ..Conversation::new(messages)
        };
        let got = ChatTemplate::new(source).and_then(|t| t.render_conversation(&conversation, "<s>", "</s>"));
        match (&got, case.get("want").and_then(Json::as_str)) {
            (Ok(got), Some(want)) if got == want => {}
            (Err(_), None) => {}
            (got, want) => failures.push(format!("{source:?}\n   got {got:?}\n  want {want:?}")),
        }
    }
    assert!(failures.is_empty(), "{} of {} differ:\n{}", failures.len(), cases.len(), failures.join("\n"));
}

/// Errors name the line of the file, whatever was rewritten in front of it.
#[test]
fn lines_keep_their_numbers() {
    for (before, line) in [
        ("a\r\nb\r\n", 3),
        ("a\rb\r", 3),
        ("{#\n\n#}\n", 4),
        ("{% set x = 1 -%}\n\n\n", 4),
        ("{% raw %}\n{{\n{% endraw %}\n", 4),
        ("{{ 'a\\\nb' }}\n", 3),
        ("  \n{% if true\n %}\n{% endif %}\n", 5),
    ] {
        for bad in ["{{ raise_exception('no') }}", "{% nonsense %}", "{{ 'open", "{{ (1]"] {
            let error = render(&format!("{before}{bad}")).unwrap_err().to_string();
            assert!(error.contains(&format!("line {line}")), "{before:?}{bad}: {error}");
        }
    }
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
