//! Devices of any size, on the stand-in for the driver: what is planned is loaded and runs, or the plan says what lacks. The driver
//! gives memory out in pieces, and takes some for itself, which no plan may forget.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::support::chance::Chance;
use crate::support::command::{json, run, stderr, stdout};
use crate::support::fake_driver;

/// Whoever runs it.
#[derive(Debug, Default)]
struct Tally {
    /// By device.
    ran: BTreeMap<String, u64>,
    /// By what was run.
    kinds: BTreeMap<&'static str, u64>,
    refused: u64,
}

/// A case by its number, and what it is.
fn case(number: u64, home: &Path, prompts: &Path) -> Option<(Command, &'static str, String)> {
    let mut chance = Chance(number);
    let kind = chance.of(&["dense", "dense", "mixture", "requests"]);
    let model = match kind {
        "mixture" => chance.of(&["tiny-mixtral,dtype=q4_k", "tiny-qwen3-moe,dtype=q8_0"]),
        _ => chance.of(&["tiny-llama,dtype=q4_k", "tiny-qwen3,dtype=bf16", "tiny-llama,dtype=q8_0"]),
    };
    let layers = match kind {
        "mixture" => chance.of(&["2", "3", "4"]),
        _ => chance.of(&["2", "5", "9", "14"]),
    };
    let strategy = match kind {
        "mixture" => chance.of(&["auto", "cpu-moe", "experts", "gpu-only"]),
        "requests" => chance.of(&["neo", "apex", "fastdecode", "auto"]),
        _ => chance.of(&["auto", "auto", "gpu-only", "helm", "lia", "stream"]),
    };
    let ctx = chance.between(64.0, 512.0) as u64;
    let memory = chance.between((12 << 20) as f64, (56 << 20) as f64) as u64;
    // What the driver has for itself is gone before anybody asks.
    let context = chance.between(1.0, memory as f64 / 4.0) as u64;
    let mut command = fake_driver::tandem(home)?;
    command.args(["generate", "-m", &format!("synth:{model},layers={layers},seed=1")]);
    command.args(["--device", "cuda", "--strategy", strategy, "--ctx", &ctx.to_string()]);
    match kind {
        // Figures that lie beside the program, so that no case measures anything.
        "requests" => command.args(["--hardware", "rtx4060-laptop", "--raw", "--prompts"]).arg(prompts),
        _ => command.args(["--json", "-n", "2", "hello"]),
    };
    command.env("FAKE_CHECKS", "0").env("FAKE_PLAIN", "1");
    command.env("FAKE_MEMORY", memory.to_string()).env("FAKE_CONTEXT", context.to_string());
    let what = format!("{model}, {layers} layers, {strategy}, context {ctx}, {memory} bytes");
    Some((command, kind, what))
}

/// Runs a case, and says where it ran, if it was not refused.
fn tried(mut command: Command, kind: &str, what: &str) -> Option<String> {
    let out = run(&mut command);
    let said = stderr(&out);
    // Another plan is for memory that goes when the plan is made, and here nobody takes any.
    assert!(
        !said.contains("asked for") && !said.contains("planning again"),
        "memory that is not there: {what}: {said}"
    );
    assert!(!said.contains("panicked"), "{what}: {said}");
    match out.status.code() {
        Some(0) if kind == "requests" => {
            let answers = stdout(&out);
            assert_eq!(answers.lines().count(), 3, "{what}: {said}");
            let both = said.contains("keys and values of") && !said.contains(" 0 on the cpu");
            let (cpu, cuda) = (said.contains("all on the cpu"), said.contains("cuda:0"));
            Some(
                if both {
                    "requests on both sides"
                } else if cpu || !cuda {
                    "cpu"
                } else {
                    "cuda:0"
                }
                .to_owned(),
            )
        }
        Some(0) => Some(json(&out)["plan"]["device"].as_str().expect("where it ran").to_owned()),
        Some(_) => {
            let errors = said.lines().filter(|l| l.starts_with("tandem: error: ")).count();
            assert!(errors == 1, "one sentence: {what}: {said}");
            assert!(
                said.contains("free") || said.contains("available") || said.contains("room for"),
                "what lacks, with numbers: {what}: {said}"
            );
            None
        }
        None => panic!("{what}: {said}"),
    }
}

/// `TANDEM_MEMORY_CASES` for more of them.
#[test]
fn accepted_plans_load_and_run() {
    let given = |name: &str, otherwise: u64| {
        std::env::var(name).ok().and_then(|n| n.parse().ok()).unwrap_or(otherwise)
    };
    let (cases, first) = (given("TANDEM_MEMORY_CASES", 32), given("TANDEM_MEMORY_FIRST", 0));
    let temporary = tempfile::tempdir().unwrap();
    // One that keeps the verdict on the kernels, which each process wants to have.
    let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bad-devices");
    std::fs::create_dir_all(&home).unwrap();
    let prompts = temporary.path().join("prompts.jsonl");
    let line = |prompt: &str| serde_json::json!({ "prompt": prompt, "max_tokens": 2 }).to_string();
    std::fs::write(
        &prompts,
        ["hello", "and a longer one, of some more tokens than one page", "x"].map(line).join("\n"),
    )
    .unwrap();
    let (next, tally) = (AtomicU64::new(first), Mutex::new(Tally::default()));
    // The first one alone, for the verdict.
    let one = || {
        let number = next.fetch_add(1, Ordering::Relaxed);
        if number >= first + cases {
            return false;
        }
        let Some((command, kind, what)) = case(number, &home, &prompts) else { return false };
        let what = format!("case {number}, {what}");
        let ran = tried(command, kind, &what);
        println!("{what}: {}", ran.as_deref().unwrap_or("refused"));
        let mut tally = tally.lock().unwrap();
        *tally.kinds.entry(kind).or_insert(0) += 1;
        match ran {
            Some(device) => *tally.ran.entry(device).or_insert(0) += 1,
            None => tally.refused += 1,
        }
        true
    };
    if !one() {
        return;
    }
    std::thread::scope(|s| (0..2).for_each(|_| drop(s.spawn(|| while one() {}))));
    let tally = tally.into_inner().unwrap();
    println!("{tally:?}");
    let ran: u64 = tally.ran.values().sum();
    assert!(ran + tally.refused == cases && ran > cases / 2, "{tally:?} of {cases}");
    if cases >= 24 {
        assert!(
            tally.ran.contains_key("cuda:0") && tally.ran.len() > 1,
            "no case was short of memory, or every one: {tally:?}"
        );
        assert_eq!(tally.kinds.len(), 3, "{tally:?}");
    }
}
