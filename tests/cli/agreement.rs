//! `plan` gives the answer of a run: for random models, machines, caps and batches the same placement, rows of a step, bytes and
//! predicted times as `generate`, and as `bench` of many sequences.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

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

/// What both say of one strategy: boundary, pins, experts, rows of a step, bytes on both sides, seconds.
fn same(what: &str, planned: &Value, ran: &Value) {
    let predicted = &ran["predicted"];
    for (name, a, b) in [
        ("k", &planned["k"], &ran["k"]),
        ("blocks on the GPU", &planned["pinned_blocks"], &ran["pinned_layers"]),
        ("units on the GPU", &planned["gpu_units"], &ran["gpu_units"]),
        ("experts", &planned["experts"], &ran["experts"]),
    ] {
        assert_eq!(a, b, "{name} of {what}: {planned} {ran}");
    }
    for (name, a, b) in [
        ("rows of a prefill step", &planned["chunk"], &predicted["chunk"]),
        ("GPU memory", &planned["memory"]["gpu"]["total"], &ran["memory"]["gpu"]["total"]),
        ("host memory", &planned["memory"]["host"]["total"], &ran["memory"]["host"]["total"]),
        ("prefill", &planned["t_prefill_s"], &predicted["t_prefill_s"]),
        ("decode", &planned["t_decode_s"], &predicted["t_decode_s"]),
    ] {
        assert!(a.is_number() && a == b, "{name} of {what}: {a} planned, {b}; {planned} {ran}");
    }
}

/// A run: a model, its prompts and answers, and the memory that it may have.
struct Case {
    model: String,
    prompt: usize,
    answer: usize,
    batch: usize,
    cap: String,
    kv: &'static str,
    machine: String,
    /// Given to both, or to neither: then both choose.
    chunk: Option<&'static str>,
}

impl Case {
    fn of(case: u64, machine: String, chance: &mut Chance) -> Case {
        let model = chance.of(&[
            "tiny-llama,dtype=q4_k",
            "tiny-qwen3,dtype=bf16",
            "tiny-gemma3",
            "tiny-llama,dtype=q8_0",
            "tiny-qwen3-moe,dtype=q8_0",
            "tiny-mixtral,dtype=bf16",
        ]);
        let batch = if case % 3 == 2 { chance.between(2.0, 9.0) as usize } else { 1 };
        Case {
            model: format!("synth:{model},layers={},seed=1", chance.of(&["3", "6", "12"])),
            prompt: chance.between(1.0, 200.0) as usize,
            answer: chance.between(1.0, if batch > 1 { 8.0 } else { 30.0 }) as usize,
            batch,
            cap: (chance.between(3e5, 3e7) as u64).to_string(),
            kv: if case.is_multiple_of(2) { "bf16" } else { "q8" },
            machine,
            chunk: (case % 5 == 4).then_some("64"),
        }
    }

    fn is_mixture(&self) -> bool {
        self.model.contains("moe") || self.model.contains("mixtral")
    }

    fn common(&self) -> Vec<String> {
        let mut args = vec!["-m", &self.model, "--gpu-memory", &self.cap, "--kv-type", self.kv, "--json"];
        args.extend(self.chunk.iter().flat_map(|chunk| ["--chunk", chunk]));
        args.into_iter().map(str::to_owned).collect()
    }

    /// What `plan` says of a strategy; `None` if it does not fit.
    fn planned(&self, home: &Path, strategy: &str) -> Option<Value> {
        let shape = [("--prompt-len", self.prompt), ("--gen-len", self.answer), ("--batch", self.batch)];
        let shape = shape.into_iter().flat_map(|(flag, n)| [flag.to_owned(), n.to_string()]);
        let mut plan = tandem(home);
        plan.arg("plan").args(self.common()).args(shape).args([
            "--hardware",
            &self.machine,
            "--strategy",
            strategy,
        ]);
        let out = run(&mut plan);
        out.status.success().then(|| json(&out))
    }

    /// What a run says: `generate`, or `bench` of many sequences.
    fn ran(&self, home: &Path, strategy: &str) -> Result<Value, String> {
        let device = format!("emulated:{}", self.machine);
        let (prompt, answer, batch) =
            (self.prompt.to_string(), self.answer.to_string(), self.batch.to_string());
        let words = "a".repeat(self.prompt);
        let mut command = tandem(home);
        match self.batch {
            1 => command.args(["generate", "-n", &answer, "--raw", &words]),
            _ => command
                .args(["bench", "--prompt", "0", "--depth", &prompt, "--gen", &answer])
                .args(["--batch", &batch, "--repeat", "1"]),
        };
        let out = run(command.args(self.common()).args(["--device", &device, "--strategy", strategy]));
        if out.status.success() { Ok(json(&out)["plan"].clone()) } else { Err(stderr(&out)) }
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
    let (mut split, mut chosen) = (0, BTreeMap::<String, u32>::new());
    let (mut mixtures, mut chunks) = (0, BTreeSet::new());
    for case in first..first + cases {
        let mut chance = Chance(case);
        std::fs::write(&file, machine(&mut chance)).unwrap();
        let run = Case::of(case, file.display().to_string(), &mut chance);
        let Case { model, prompt, answer, batch, cap, .. } = &run;
        let mut strategies = vec!["helm", "lia", "stream", "greedy"];
        if run.is_mixture() {
            strategies.extend(["cpu-moe", "ncmoe", "experts"]);
        }
        for strategy in strategies {
            let what = format!(
                "{strategy} in case {case}, {model}, {batch} x {prompt} + {answer} tokens, {cap} bytes"
            );
            match (run.planned(home.path(), strategy), run.ran(home.path(), strategy)) {
                (Some(planned), Ok(ran)) => {
                    let c = &planned["candidates"][0];
                    same(&what, c, &ran);
                    let units = |name: &str| c[name].as_u64().unwrap();
                    split += u32::from(units("gpu_units") > 0 && units("cpu_units") > 0);
                    mixtures += u32::from(run.is_mixture());
                    chunks.insert(c["chunk"].as_u64().unwrap());
                }
                (None, Err(said)) => {
                    assert!(said.contains("available") && said.contains("try"), "{what}: {said}")
                }
                (planned, ran) => panic!("{what}: planned {}, ran {ran:?}", planned.is_some()),
            }
        }
        // Of those that it compares, the fastest; of equals the preferred.
        let all = run.planned(home.path(), "auto").expect("the CPU at least");
        let ran = run.ran(home.path(), "auto").unwrap();
        let name = ran["strategy"].as_str().unwrap().to_owned();
        let candidates = all["candidates"].as_array().unwrap();
        let of = |name: &str| candidates.iter().find(|c| c["strategy"] == name);
        same(&format!("auto in case {case}"), of(&name).unwrap(), &ran);
        let total =
            |c: &Value| if c["feasible"] == true { c["t_total_s"].as_f64().unwrap() } else { f64::INFINITY };
        let compared = ["cpu-only", "gpu-only", "greedy", "stream", "helm", "lia", "cpu-moe", "experts"];
        for other in compared.into_iter().filter_map(of) {
            assert!(
                total(of(&name).unwrap()) <= total(other) * (1.0 + 1e-8),
                "case {case}: {name}, and {} is faster",
                other["strategy"]
            );
        }
        *chosen.entry(name).or_insert(0) += 1;
    }
    println!(
        "{split} runs on both sides, {mixtures} of mixtures, steps of {chunks:?} rows; auto chose {chosen:?}"
    );
    let many = split > 12 && mixtures > 4 && chunks.len() > 3 && chosen.len() > 1;
    assert!(cases < 12 || many, "{split} {mixtures} {chunks:?} {chosen:?}");
}
