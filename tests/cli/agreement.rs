//! `plan` and `generate` give one answer: for random models, machines and caps, the same placement, bytes and predicted times.

use serde_json::Value;

use crate::support::chance::Chance;
use crate::support::command::{json, run, stderr, tandem};

/// A described machine by chance: a GPU that is faster than the CPU, slower, or behind a slow link.
fn machine(chance: &mut Chance) -> String {
    let mut figure = |from: f64, to: f64| chance.between(from, to);
    format!(
        "[cpu]\ncores = 8\ndram_bytes = 64e9\nread_bw = {}\nflops_bf16 = {}\nllc_bytes = 24e6\n\
         [gpu]\nmem_bytes = 8e9\nbw = {}\nflops_bf16 = {}\n\
         [link]\nh2d_bw = {}\nd2h_bw = {}\nlatency_s = {}\n",
        figure(5e9, 200e9),
        figure(1e10, 1e13),
        figure(50e9, 1e12),
        figure(1e12, 1e14),
        figure(1e9, 50e9),
        figure(1e9, 50e9),
        figure(1e-6, 2e-5),
    )
}

/// What both say of one strategy: boundary, pins, bytes on the GPU, seconds.
fn same(what: &str, planned: &Value, ran: &Value) {
    let predicted = &ran["predicted"];
    for (a, b) in [("k", &ran["k"]), ("pinned_blocks", &ran["pinned_layers"])] {
        assert_eq!(&planned[a], b, "{a} of {what}: {planned} {ran}");
    }
    for (name, a, b) in [
        ("GPU memory", &planned["memory"]["gpu"]["total"], &ran["memory"]["gpu"]["total"]),
        ("prefill", &planned["t_prefill_s"], &predicted["t_prefill_s"]),
        ("decode", &planned["t_decode_s"], &predicted["t_decode_s"]),
    ] {
        assert!(a.is_number() && a == b, "{name} of {what}: {a} planned, {b}; {planned} {ran}");
    }
}

/// `TANDEM_AGREEMENT_CASES` for more of them, `TANDEM_AGREEMENT_FIRST` to begin elsewhere.
#[test]
fn plan_and_generate_agree() {
    let of =
        |name: &str, default: u64| std::env::var(name).ok().and_then(|n| n.parse().ok()).unwrap_or(default);
    let (cases, first) = (of("TANDEM_AGREEMENT_CASES", 12), of("TANDEM_AGREEMENT_FIRST", 0));
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("machine.toml");
    let (mut split, mut chosen) = (0, std::collections::BTreeMap::<String, u32>::new());
    for case in first..first + cases {
        let mut chance = Chance(case);
        std::fs::write(&file, machine(&mut chance)).unwrap();
        let model = chance.of(&[
            "tiny-llama,dtype=q4_k",
            "tiny-qwen3,dtype=bf16",
            "tiny-gemma3",
            "tiny-llama,dtype=q8_0",
        ]);
        let model = format!("synth:{model},layers={},seed=1", chance.of(&["3", "6", "12"]));
        let (prompt, answer) = (chance.between(1.0, 200.0) as usize, chance.between(1.0, 30.0) as usize);
        let cap = (chance.between(3e5, 3e7) as u64).to_string();
        let kv = ["--kv-type", if case % 2 == 0 { "bf16" } else { "q8" }];
        let plan = |strategy: &str| {
            let (prompt, answer) = (prompt.to_string(), answer.to_string());
            let shape = ["--prompt-len", &prompt, "--gen-len", &answer, "--chunk", "512"];
            let args =
                ["plan", "-m", &model, "--hardware", file.to_str().unwrap(), "--gpu-memory", &cap, "--json"];
            let out = run(tandem(home.path()).args(args).args(shape).args(kv).args(["--strategy", strategy]));
            out.status.success().then(|| json(&out))
        };
        let generate = |strategy: &str| {
            let (device, answer) = (format!("emulated:{}", file.display()), answer.to_string());
            let args = [
                "generate",
                "-m",
                &model,
                "-n",
                &answer,
                "--device",
                &device,
                "--gpu-memory",
                &cap,
                "--json",
            ];
            let words = "a".repeat(prompt);
            let out =
                run(tandem(home.path()).args(args).args(kv).args(["--strategy", strategy, "--raw", &words]));
            match out.status.success() {
                true => Ok(json(&out)["plan"].clone()),
                false => Err(stderr(&out)),
            }
        };
        for strategy in ["helm", "lia", "stream", "greedy"] {
            let what = format!("{strategy} in case {case}, {model}, {prompt} + {answer} tokens, {cap} bytes");
            match (plan(strategy), generate(strategy)) {
                (Some(planned), Ok(ran)) => {
                    let c = &planned["candidates"][0];
                    same(&what, c, &ran);
                    let units = |name: &str| c[name].as_u64().unwrap();
                    assert_eq!(ran["gpu_units"], c["gpu_units"], "{what}");
                    split += u32::from(units("gpu_units") > 0 && units("cpu_units") > 0);
                }
                (None, Err(said)) => {
                    assert!(said.contains("available") && said.contains("try"), "{what}: {said}")
                }
                (planned, ran) => panic!("{what}: planned {}, ran {ran:?}", planned.is_some()),
            }
        }
        // Of the six that it compares, the fastest; of equals the preferred.
        let all = plan("auto").expect("the CPU at least");
        let ran = generate("auto").unwrap();
        let name = ran["strategy"].as_str().unwrap().to_owned();
        let candidates = all["candidates"].as_array().unwrap();
        let of = |name: &str| candidates.iter().find(|c| c["strategy"] == name).unwrap();
        same(&format!("auto in case {case}"), of(&name), &ran);
        let total =
            |c: &Value| if c["feasible"] == true { c["t_total_s"].as_f64().unwrap() } else { f64::INFINITY };
        for other in ["cpu-only", "gpu-only", "greedy", "stream", "helm", "lia"] {
            assert!(
                total(of(&name)) <= total(of(other)) * (1.0 + 1e-8),
                "case {case}: {name}, and {other} is faster"
            );
        }
        *chosen.entry(name).or_insert(0) += 1;
    }
    println!("{split} runs on both sides; auto chose {chosen:?}");
    assert!(cases < 12 || split > 12 && chosen.len() > 1, "{split} {chosen:?}");
}
