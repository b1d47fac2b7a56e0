//! `--kv-type` as a user meets it: what 8 bits take, that every strategy gives the CPU's text with them, and what plans say.

use serde_json::Value;
use tandem::cache::KvType;

use crate::support::command::{assert_error, json, run, stderr, tandem};
use crate::support::fake_driver;

const MODEL: &str = "synth:tiny-qwen3,dtype=q8_0,seed=2";

fn generate(home: &tempfile::TempDir, more: &[&str]) -> Value {
    let args = ["generate", "-m", MODEL, "-n", "12", "--json", "--deterministic"];
    let out = run(tandem(home.path()).args(args).args(more).args(["--raw", "hello there, once upon a time"]));
    assert!(out.status.success(), "{}", stderr(&out));
    json(&out)
}

#[test]
fn eight_bits_take_half_and_every_name_of_them_is_known() {
    let home = tempfile::tempdir().unwrap();
    let cpu = |more: &[&str]| generate(&home, &[&["--device", "cpu"], more].concat());
    let of = |run: &Value| (run["plan"]["kv_type"].clone(), run["plan"]["memory"]["kv"].as_u64().unwrap());
    let (bf16, q8) = (cpu(&[]), cpu(&["--kv-type", "q8"]));
    assert_eq!((of(&bf16).0, of(&q8).0), ("bf16".into(), "q8".into()));
    let spec = tandem::model::load(MODEL).unwrap().spec;
    let head = |kv: KvType| kv.head_bytes(spec.head_dim) as u64;
    assert_eq!(of(&q8).1 * head(KvType::BF16), of(&bf16).1 * head(KvType::Q8));
    for name in [["--kv", "q8"], ["--kv", "q8_0"], ["--kv-type", "q8_0"]] {
        assert_eq!(cpu(&name)["tokens"], q8["tokens"], "{name:?}");
    }
    let out = run(tandem(home.path()).args(["generate", "-m", MODEL, "--kv-type", "q4", "hello"]));
    assert_error(&out, 2, "q8");
}

/// In deterministic mode wherever pages are, and whatever attends them.
#[test]
fn every_strategy_gives_the_cpus_text_with_eight_bits() {
    let home = tempfile::tempdir().unwrap();
    let cpu = generate(&home, &["--device", "cpu", "--kv-type", "q8"]);
    for strategy in ["gpu-only", "helm", "lia", "stream", "greedy", "auto"] {
        let q8 = ["--device", "emulated:t4-xeon", "--kv-type", "q8", "--strategy", strategy];
        for memory in [&[][..], &["--gpu-memory", "700K"]] {
            let args = [&q8[..], memory].concat();
            // Some keep more on the device than that.
            let out = run(tandem(home.path())
                .args(["generate", "-m", MODEL, "-n", "12", "--json", "--deterministic"])
                .args(&args)
                .args(["--raw", "hello there, once upon a time"]));
            if !out.status.success() {
                assert!(
                    !memory.is_empty() && ["available", "free on"].iter().any(|s| stderr(&out).contains(s)),
                    "{args:?}: {}",
                    stderr(&out)
                );
                continue;
            }
            let ran = json(&out);
            assert_eq!(ran["tokens"], cpu["tokens"], "{args:?}");
            assert_eq!(ran["plan"]["kv_type"], "q8", "{args:?}");
        }
    }
}

/// Through the CUDA runtime and its kernels: pages on the device, on both sides, and attended where they are.
#[test]
fn a_gpu_gives_the_cpus_text_with_eight_bits() {
    let home = tempfile::tempdir().unwrap();
    let words =
        "generate -m synth:tiny-llama,dtype=f16,seed=1 --json --raw --temp 0 -n 3 --ctx 128 --kv-type q8";
    let text = "once upon a time there was a page, and another page, and a third one that was written to by nobody at all. ";
    let on = |mut command: std::process::Command, more: &str| {
        let more = more.split(' ').filter(|word| !word.is_empty());
        let out = run(command.args(words.split(' ')).args(more).arg(text));
        assert!(out.status.success(), "{}", stderr(&out));
        json(&out)
    };
    let cpu = on(tandem(home.path()), "--device cpu");
    for more in [
        "--strategy gpu-only",
        "--strategy helm --boundary 1 --kv-pages 3 --chunk 32 --far attend",
        "--strategy helm --boundary 1 --kv-pages 3 --chunk 32 --far stream",
        "--strategy lia",
    ] {
        let Some(mut command) = fake_driver::tandem(home.path()) else { return };
        command.env("FAKE_CHECKS", "0");
        let ran = on(command, &format!("--device cuda {more}"));
        assert_eq!((&ran["tokens"], &ran["plan"]["kv_type"]), (&cpu["tokens"], &"q8".into()), "{more}");
    }
}

/// Requests together, their pages on the device, on the host, and crossing.
#[test]
fn every_schedule_gives_the_cpus_texts_with_eight_bits() {
    let home = tempfile::tempdir().unwrap();
    let prompts = home.path().join("prompts.jsonl");
    let lines = ["hello there", "once upon a time", "what is it", "and then"]
        .map(|p| format!("{{\"prompt\": \"{p} {p}\"}}\n"));
    std::fs::write(&prompts, lines.concat()).unwrap();
    let of = |more: &[&str]| {
        let args = ["generate", "-m", MODEL, "-n", "8", "--deterministic", "--kv-type", "q8", "--json"];
        let out =
            run(tandem(home.path()).args(args).args(["--prompts", prompts.to_str().unwrap()]).args(more));
        assert!(out.status.success(), "{more:?}: {}", stderr(&out));
        let lines = String::from_utf8(out.stdout).unwrap();
        let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let mut texts: Vec<Value> = lines.filter_map(|l| l.get("text").cloned()).collect();
        texts.sort_by_key(Value::to_string);
        texts
    };
    let cpu = of(&["--device", "cpu"]);
    assert_eq!(cpu.len(), 4);
    for schedule in ["gpu-only", "neo", "apex", "fastdecode", "auto"] {
        let on = ["--device", "emulated", "--strategy", schedule];
        assert_eq!(of(&on), cpu, "{schedule}");
        if ["neo", "apex"].contains(&schedule) {
            // Too few pages on the device for all of them.
            assert_eq!(of(&[&on[..], &["--kv-pages", "3"]].concat()), cpu, "{schedule}, few pages");
        }
    }
}

#[test]
fn plans_count_and_predict_eight_bits() {
    let home = tempfile::tempdir().unwrap();
    let plan = |more: &[&str]| {
        let args = ["plan", "--spec", "llama-3.1-8b", "--hardware", "h100-spr", "--prompt-len", "16384"];
        let out = run(tandem(home.path()).args(args).args(["--batch", "8", "--json"]).args(more));
        assert!(out.status.success(), "{}", stderr(&out));
        json(&out)
    };
    let (bf16, q8) = (plan(&[]), plan(&["--kv-type", "q8"]));
    assert_eq!((&bf16["kv_type"], &q8["kv_type"]), (&"bf16".into(), &"q8".into()));
    for strategy in ["gpu-only", "cpu-only"] {
        let of = |plan: &Value| {
            let all = plan["candidates"].as_array().unwrap().clone();
            all.into_iter().find(|c| c["strategy"] == strategy).unwrap()
        };
        let (a, b) = (of(&bf16), of(&q8));
        let side = if strategy == "gpu-only" { "gpu" } else { "host" };
        let kv = |c: &Value| c["memory"][side]["kv"].as_u64().unwrap() as f64;
        assert!((kv(&b) / kv(&a) - 132.0 / 256.0).abs() < 1e-3, "{strategy}: {a} {b}");
        let step = |c: &Value| c["t_decode_step_s"].as_f64().unwrap();
        // 17 GB of keys and values beside 16 GB of weights.
        assert!(step(&b) < 0.85 * step(&a), "{strategy}: {} and {}", step(&a), step(&b));
    }
}
