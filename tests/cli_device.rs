//! `--device emulated` as a user meets it: the CPU's tokens, a plan that says where, memory that is refused.

mod support;

use support::{assert_error, json, run, stdout, tandem};

fn home() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

const MODEL: &str = "synth:tiny-qwen3,dtype=q4_k,seed=2";

#[test]
fn the_emulated_accelerator_gives_the_cpus_tokens() {
    let home = home();
    let generate = |device: &str, more: &[&str]| {
        let args = ["generate", "-m", MODEL, "-n", "10", "--device", device, "hello there"];
        run(tandem(home.path()).args(args).args(more))
    };
    let (cpu, emulated) = (generate("cpu", &[]), generate("emulated", &[]));
    assert_eq!(stdout(&cpu), stdout(&emulated));
    let (cpu, emulated) = (json(&generate("cpu", &["--json"])), json(&generate("emulated", &["--json"])));
    assert_eq!(cpu["tokens"], emulated["tokens"]);
    assert_eq!(emulated["plan"]["device"], "emulated");
    assert_eq!(emulated["plan"]["strategy"], "gpu-only");
    assert!(emulated["plan"]["memory"]["weights"].as_u64().unwrap() > 0);
    // Log-probabilities need the logits themselves, which then leave the device.
    let logprobs = ["--json", "--logprobs", "2"];
    let (a, b) = (json(&generate("cpu", &logprobs)), json(&generate("emulated", &logprobs)));
    let first = |j: &serde_json::Value| j["logprobs"][0]["logprob"].as_f64().unwrap();
    assert!((first(&a) - first(&b)).abs() < 0.05, "{} and {}", first(&a), first(&b));
}

#[test]
fn too_little_device_memory_is_refused_with_the_numbers() {
    let home = home();
    let words = format!("generate -m {MODEL} --device emulated --gpu-memory 100K x");
    let output = run(tandem(home.path()).args(words.split(' ')));
    assert_error(&output, 1, "KV");
}

#[test]
fn bench_and_perplexity_run_there_too() {
    let home = home();
    let words =
        format!("bench -m {MODEL} --device emulated --prompt 8 --gen 2 --batch 1,3 --repeat 1 --json");
    let report = json(&run(tandem(home.path()).args(words.split(' '))));
    assert_eq!(report["results"].as_array().unwrap().len(), 3);
    assert_eq!(report["plan"]["device"], "emulated");
}
