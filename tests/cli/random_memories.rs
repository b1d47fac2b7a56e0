//! Devices of any size, on the stand-in for the driver: what is planned is loaded and runs, or the plan says what lacks. The driver
//! gives memory out in pieces, and takes some for itself, which no plan may forget.

use std::collections::BTreeMap;

use crate::support::chance::Chance;
use crate::support::command::{json, run, stderr, tandem};
use crate::support::fake_driver::{executes, stand_in};

/// `TANDEM_MEMORY_CASES` for more of them.
#[test]
fn accepted_plans_load_and_run() {
    let cases = std::env::var("TANDEM_MEMORY_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(24);
    let first = std::env::var("TANDEM_MEMORY_FIRST").ok().and_then(|n| n.parse().ok()).unwrap_or(0);
    if !executes() {
        return;
    }
    let Some(folder) = stand_in() else { return };
    let home = tempfile::tempdir().unwrap();
    let (mut ran, mut refused) = (BTreeMap::<String, u64>::new(), 0);
    for case in first..first + cases {
        let mut chance = Chance(case);
        let model = chance.of(&["tiny-llama,dtype=q4_k", "tiny-qwen3,dtype=bf16", "tiny-llama,dtype=q8_0"]);
        let layers = chance.of(&["2", "5", "12", "26"]);
        let strategy = chance.of(&["auto", "auto", "gpu-only", "helm", "lia"]);
        let ctx = chance.between(64.0, 512.0) as u64;
        let memory = chance.between((20 << 20) as f64, (80 << 20) as f64) as u64;
        // What the driver has for itself is gone before anybody asks.
        let context = chance.between(1.0, memory as f64 / 4.0) as u64;
        let mut command = tandem(home.path());
        command.args([
            "generate",
            "--json",
            "-m",
            &format!("synth:{model},layers={layers},seed=1"),
            "-n",
            "2",
            "--device",
            "cuda",
        ]);
        command.args(["--strategy", strategy, "--ctx", &ctx.to_string(), "hello"]);
        command.env("LD_LIBRARY_PATH", folder).env("FAKE_ORDER", "late").env("FAKE_CHECKS", "0");
        command.env("FAKE_MEMORY", memory.to_string()).env("FAKE_CONTEXT", context.to_string());
        let out = run(&mut command);
        let said = stderr(&out);
        let what = format!(
            "case {case}, {model}, {layers} layers, {strategy}, context {ctx}, {memory} bytes: {said}"
        );
        assert!(!said.contains("asked for"), "planned with memory that is not there: {what}");
        assert!(!said.contains("panicked"), "{what}");
        match out.status.code() {
            Some(0) => {
                let plan = json(&out)["plan"].clone();
                let device = plan["device"].as_str().expect("where it ran").to_owned();
                println!(
                    "{case}: {memory} bytes, {layers} layers, {strategy}: {} on {device}",
                    plan["strategy"]
                );
                *ran.entry(device).or_insert(0) += 1;
            }
            Some(_) => {
                let errors = said.lines().filter(|l| l.starts_with("tandem: error: ")).count();
                assert!(errors == 1 && said.contains("free"), "what lacks, in one sentence: {what}");
                refused += 1;
            }
            None => panic!("{what}"),
        }
    }
    println!("ran: {ran:?}; {refused} were refused with the numbers");
    assert!(ran.values().sum::<u64>() > cases / 2, "{ran:?} of {cases}");
    assert!(
        cases < 24 || ran.len() > 1 && ran.contains_key("cuda:0"),
        "no case was short of memory, or every one: {ran:?}"
    );
}
