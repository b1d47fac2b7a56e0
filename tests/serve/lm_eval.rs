//! `lm-eval` as a client, where it is installed: `pip install lm-eval[api]`. `TANDEM_TEST_PYTHON` names the interpreter.

use std::process::Command;

use serde_json::{Value, json};

use super::prompts::by_library;
use super::support::spelling;
use super::world::{World, long_model};

/// Its own code asks and reads, with the server's tokenizer: log-likelihoods are those of the library.
#[test]
fn lm_eval_computes_the_librarys_likelihoods() {
    let python = std::env::var("TANDEM_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
    let import = "import lm_eval.models.openai_completions, aiohttp, requests, tenacity";
    match Command::new(&python).args(["-c", import]).output() {
        Ok(output) if output.status.success() => {}
        Ok(_) => return println!("skipped: SKIPPED: {python} has no package lm-eval with its extra api"),
        Err(e) => return println!("skipped: SKIPPED: {python}: {e}"),
    }
    let served = World { spells: true, prefixes: true, context: 512, ..World::default() }.serve();
    let pairs = [
        ("The sky is", " blue"),
        ("The sky is", " green, or is it not"),
        ("Ein Käse für 3 €", " ist günstig"),
        ("x", "y"),
    ];
    let tokenizer = spelling::tokenizer();
    let wanted = pairs.iter().map(|(context, text)| {
        let ids = tokenizer.encode(&format!("{context}{text}"), false, true).unwrap();
        let scores = by_library(long_model(), &ids);
        let own = &scores[context.len() - 1..];
        json!({
            "context": context, "text": text,
            "sum": own.iter().map(|(p, _)| p).sum::<f64>(), "greedy": own.iter().all(|(_, best)| *best),
        })
    });
    let wanted = Value::Array(wanted.collect()).to_string();
    let output = Command::new(&python)
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/serve/lm_eval_client.py"))
        .args([&format!("http://{}/v1/completions", served.server.address()), &wanted])
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}{err}");
    println!("{out}");
    served.wait_until_free();
}
