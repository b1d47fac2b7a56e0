//! Mixtures of experts on two sides: the experts on the CPU, all else on the device, with the CPU's tokens and bits.

use serde_json::Value;

use crate::support::command::{assert_error, json, run, stderr, tandem};
use crate::support::{margin, rounding};
use tandem::model::load;
use tandem::simd::Isa;
use tandem::tensor::Half;

const FAMILIES: [&str; 6] = [
    "tiny-qwen3-moe",
    "tiny-qwen2-moe",
    "tiny-mixtral",
    "tiny-olmoe",
    "tiny-granite-moe",
    // As gpt-oss is published: the rest in a type of its own.
    "tiny-gpt-oss,experts=mxfp4",
];

fn generate(model: &str, device: &str, more: &[&str]) -> std::process::Output {
    let home = tempfile::tempdir().unwrap();
    let args = ["generate", "-m", model, "-n", "6", "--device", device, "hello there"];
    run(tandem(home.path()).args(args).args(more))
}

/// Tokens and probabilities.
fn same(want: &Value, got: &Value, what: &str) {
    for key in ["tokens", "logprobs"] {
        assert!(want[key].is_array() && want[key] == got[key], "{what}: not the CPU's {key}");
    }
}

#[test]
fn experts_on_the_cpu_give_the_cpus_bits_whatever_the_device_has() {
    for family in FAMILIES {
        let model = format!("synth:{family},dtype=q4_k,seed=2,layers=5");
        let all = ["--json", "--deterministic", "--logprobs", "20"];
        let cpu = json(&generate(&model, "cpu", &all));
        let of = |more: &[&str]| json(&generate(&model, "emulated", &[&all[..], more].concat()));
        let whole = of(&["--strategy", "cpu-moe"]);
        same(&cpu, &whole, family);
        let plan = &whole["plan"];
        assert_eq!((&plan["strategy"], &plan["device"]), (&"cpu-moe".into(), &"emulated+cpu".into()));
        let used = plan["memory"]["gpu"]["total"].as_u64().unwrap();
        let mut blocks = Vec::new();
        for eighths in [7, 6, 5, 4] {
            let cap = (used * eighths / 8).to_string();
            let capped = ["--strategy", "cpu-moe", "--gpu-memory", &cap];
            let out = generate(&model, "emulated", &[&all[..], &capped].concat());
            if !out.status.success() {
                assert_error(&out, 1, "of GPU memory");
                continue;
            }
            let less = json(&out);
            same(&cpu, &less, &format!("{family} in {cap} bytes"));
            assert!(less["plan"]["memory"]["gpu"]["total"].as_u64().unwrap() <= used * eighths / 8);
            blocks.push(less["plan"]["gpu_units"].as_u64().unwrap());
        }
        assert!(blocks.len() > 1 && blocks.is_sorted_by(|a, b| a >= b), "{family}: {blocks:?}");
        let auto = of(&[]);
        same(&cpu, &auto, family);
        let candidates = auto["plan"]["predicted"]["candidates"].as_array().unwrap();
        let names: Vec<_> = candidates.iter().map(|c| c["strategy"].as_str().unwrap()).collect();
        let all = ["cpu-only", "gpu-only", "greedy", "stream", "helm", "lia", "cpu-moe", "experts"]
            .map(Value::from);
        let (mut names, mut all) = (names, all.each_ref().map(|v| v.as_str().unwrap()));
        names.sort_unstable();
        all.sort_unstable();
        assert_eq!(names, all);
    }
}

/// Experts on the device, of all blocks or of some, and blocks streamed or divided.
#[test]
fn experts_on_the_device_give_the_cpus_bits() {
    for family in FAMILIES {
        let model = format!("synth:{family},dtype=q4_k,seed=2,layers=5");
        let all = ["--json", "--deterministic", "--logprobs", "20"];
        let cpu = json(&generate(&model, "cpu", &all));
        let of = |more: &[&str]| json(&generate(&model, "emulated", &[&all[..], more].concat()));
        for more in [
            &["--strategy", "gpu-only"][..],
            &["--n-cpu-moe", "0"],
            &["--n-cpu-moe", "2"],
            &["--n-cpu-moe", "5"],
            &["--strategy", "experts"],
            &["--gpu-experts", "0"],
            &["--gpu-experts", "1"],
            &["--gpu-experts", "3"],
            &["--boundary", "3"],
            &["--strategy", "stream"],
            &["--pinned", "2"],
        ] {
            same(&cpu, &of(more), &format!("{family} {more:?}"));
        }
        // With less memory the experts of more blocks are on the CPU.
        let whole = of(&["--strategy", "ncmoe"]);
        let experts = |report: &Value| report["plan"]["experts"]["device"].as_u64().unwrap();
        assert_eq!((&whole["plan"]["experts"]["host"], experts(&whole) > 0), (&0.into(), true), "{family}");
        let used = whole["plan"]["memory"]["gpu"]["total"].as_u64().unwrap();
        for strategy in ["ncmoe", "experts"] {
            let mut on_device = vec![experts(&whole)];
            for eighths in [7, 6, 5] {
                let cap = (used * eighths / 8).to_string();
                let out = generate(
                    &model,
                    "emulated",
                    &[&all[..], &["--strategy", strategy, "--gpu-memory", &cap]].concat(),
                );
                if !out.status.success() {
                    assert_error(&out, 1, "of GPU memory");
                    continue;
                }
                let less = json(&out);
                same(&cpu, &less, &format!("{family} by {strategy} in {cap} bytes"));
                on_device.push(experts(&less));
            }
            assert!(on_device.len() > 2 && on_device.is_sorted_by(|a, b| a >= b), "{family}: {on_device:?}");
            assert!(on_device.last() < on_device.first(), "{family}: {on_device:?}");
        }
    }
}

/// Experts of divided blocks come to the device as they are chosen, unless they are to stay; tokens and bits are the CPU's.
#[test]
fn experts_follow_the_router_unless_they_are_to_stay() {
    let model = "synth:tiny-qwen3-moe,dtype=q4_k,seed=2";
    let of = |device: &str, more: &[&str]| {
        let home = tempfile::tempdir().unwrap();
        let args = ["generate", "-m", model, "-n", "40", "--device", device, "hello there"];
        let all = ["--json", "--deterministic", "--logprobs", "20"];
        json(&run(tandem(home.path()).args(args).args(all).args(more)))
    };
    let cpu = of("cpu", &[]);
    for (more, cache) in [(&[][..], 6), (&["--fixed-experts"], 0)] {
        let report = of("emulated", &[&["--gpu-experts", "3"], more].concat());
        same(&cpu, &report, &format!("{more:?}"));
        let experts = &report["plan"]["experts"];
        let counts = ["device", "host", "cache"].map(|key| experts[key].as_u64().unwrap());
        assert_eq!(counts, [6, 10, cache], "{more:?}: {experts}");
        // How many is the router's affair (tests/engine/same_bits.rs); what never changes sides has no count.
        assert_eq!(report["exchanged_experts"].is_u64(), cache > 0, "{more:?}");
    }
    // Whole blocks stay where they are.
    let whole = of("emulated", &["--n-cpu-moe", "1"]);
    assert_eq!(whole["plan"]["experts"]["cache"], 0);
}

/// Tokens of three requests that share an engine, sorted, and what was said. Each prompt is repeated so often.
fn requests(model: &str, repeats: usize, more: &[&str]) -> (Vec<Value>, String) {
    let home = tempfile::tempdir().unwrap();
    let prompts = home.path().join("prompts.jsonl");
    let line =
        |prompt: &str| format!("{}\n", serde_json::json!({ "prompt": format!("{prompt} ").repeat(repeats) }));
    std::fs::write(&prompts, ["hello there", "once upon a time", "what is it"].map(line).concat()).unwrap();
    let args = ["generate", "-m", model, "-n", "6", "--deterministic", "--json", "--prompts"];
    let out = run(tandem(home.path()).args(args).arg(&prompts).args(more));
    assert!(out.status.success(), "{}", stderr(&out));
    let said = stderr(&out);
    let lines = String::from_utf8(out.stdout).unwrap();
    let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let mut answers: Vec<Value> =
        lines.filter(|line| line["text"].is_string()).map(|line| line["tokens"].clone()).collect();
    answers.sort_by_key(Value::to_string);
    assert_eq!(answers.len(), 3, "{said}");
    (answers, said)
}

/// Requests that share the engine, with sides of their own for keys and values, and by every scheduler.
#[test]
fn requests_share_an_engine_with_experts_on_either_side() {
    for model in ["tiny-qwen3-moe", "tiny-gpt-oss,experts=mxfp4"] {
        let of = |device: &str, more: &[&str]| {
            let device = ["--device", device];
            requests(&format!("synth:{model},dtype=q4_k,seed=2"), 1, &[&device, more].concat()).0
        };
        let cpu = of("cpu", &[]);
        for way in [&["--strategy", "cpu-moe"][..], &["--n-cpu-moe", "1"], &["--strategy", "experts"]] {
            assert_eq!(cpu, of("emulated", way), "{model} {way:?}");
        }
        // With all experts on the device attention may be the host's, of some requests or of all.
        for schedule in ["gpu-only", "neo", "apex", "fastdecode", "auto"] {
            assert_eq!(cpu, of("emulated", &["--strategy", schedule]), "{model} {schedule}");
        }
    }
}

/// A mixture that does not fit runs by schedulers, too, with experts of some blocks on the host and requests on either side.
#[test]
fn schedulers_run_mixtures_that_do_not_fit() {
    for (model, memory) in [("tiny-qwen3-moe", "5M"), ("tiny-gpt-oss,experts=mxfp4", "5M")] {
        let of = |device: &str, more: &[&str]| {
            let device = ["--chunk", "16", "--device", device];
            requests(&format!("synth:{model},dtype=q4_k,seed=2,layers=5"), 12, &[&device, more].concat())
        };
        let (cpu, _) = of("cpu", &[]);
        for schedule in ["gpu-only", "neo", "apex", "fastdecode"] {
            let few = ["--strategy", schedule, "--gpu-memory", memory, "--kv-pages", "8"];
            let (answers, said) = of("emulated", &few);
            assert_eq!(cpu, answers, "{model} {schedule}");
            assert!(said.contains("of 40 experts on emulated"), "{model} {schedule}: {said}");
        }
    }
}

/// Requests of a mixture are simulated with as many experts on the host as do not fit; long prompts with copies of them.
#[test]
fn mixtures_are_simulated() {
    let home = tempfile::tempdir().unwrap();
    let of = |spec: &str, trace: &str, more: &[&str]| {
        let args = ["simulate", "--spec", spec, "--hardware", "rtx4090-desktop", "--trace", trace, "--json"];
        run(tandem(home.path()).args(args).args(["--strategy", "gpu-only,neo"]).args(more))
    };
    let shorts = of("qwen3-30b-a3b", "synthetic:100,20,6,0", &[]);
    let said = stderr(&shorts);
    assert!(said.contains("stay on the host") && said.contains("--n-cpu-moe"), "{said}");
    let shorts = json(&shorts);
    let all = 48 * 128;
    let on_host = shorts["experts"]["host"].as_u64().unwrap();
    assert!(on_host > 0 && on_host + shorts["experts"]["device"].as_u64().unwrap() == all, "{shorts}");
    for strategy in shorts["strategies"].as_array().unwrap() {
        assert!(
            strategy["failed"] == 0 && strategy["throughput_tok_s"].as_f64().unwrap() > 0.0,
            "{strategy}"
        );
    }
    // More of them on the host are slower.
    let rate = |report: &Value| report["strategies"][0]["throughput_tok_s"].as_f64().unwrap();
    let more = json(&of("qwen3-30b-a3b", "synthetic:100,20,6,0", &["--n-cpu-moe", "44"]));
    assert_eq!(more["experts"]["host"], 44 * 128);
    assert!(rate(&more) < rate(&shorts), "{more} {shorts}");
    // The number that a run tells gives the same run, with copies for long prompts, too.
    let long = |more: &[&str]| {
        let args =
            ["simulate", "-m", "synth:qwen3-30b-a3b,dtype=q4_k", "--hardware", "rtx4090-desktop", "--json"];
        let of = ["--gpu-memory", "7.5GB", "--trace", "synthetic:3000,20,6,0", "--strategy", "gpu-only"];
        run(tandem(home.path()).args(args).args(of).args(more))
    };
    let found = long(&[]);
    let said = stderr(&found);
    assert!(said.contains("copied to the GPU for"), "{said}");
    let n = said.split("--n-cpu-moe ").nth(1).unwrap().split(')').next().unwrap();
    assert_eq!(json(&found), json(&long(&["--n-cpu-moe", n])));
    let dense = of("llama-2-7b", "synthetic:100,20,6,0", &["--n-cpu-moe", "3"]);
    assert_error(&dense, 2, "--n-cpu-moe 3: llama-2-7b has no experts");
    let many = of("qwen3-30b-a3b", "synthetic:100,20,6,0", &["--n-cpu-moe", "49"]);
    assert_error(&many, 2, "--n-cpu-moe 49: qwen3-30b-a3b has 48 blocks");
}

/// Where prompts are long and the host has memory for a second layout, experts are copied to the device for them.
#[test]
fn long_prompts_stream_experts() {
    let home = tempfile::tempdir().unwrap();
    let candidate = |prompt: &str, strategy: &str| {
        let args =
            ["plan", "-m", "synth:qwen3-30b-a3b,dtype=q4_k", "--hardware", "rtx4090-desktop", "--json"];
        let of = ["--gpu-memory", "7.5GB", "--prompt-len", prompt, "--gen-len", "32"];
        let plan = json(&run(tandem(home.path()).args(args).args(of)));
        let all = plan["candidates"].as_array().unwrap();
        all.iter().find(|c| c["strategy"] == strategy).unwrap().clone()
    };
    let short = candidate("64", "experts");
    assert!(short["placement"]["stream_rows"].is_null(), "{short}");
    let (long, ncmoe) = (candidate("2048", "experts"), candidate("2048", "ncmoe"));
    let rows = long["placement"]["stream_rows"].as_u64().unwrap();
    assert!((64..2048).contains(&rows), "{rows}");
    assert!(long["reason"].as_str().unwrap().contains("copied to the GPU"), "{long}");
    let seconds = |c: &Value| c["t_prefill_s"].as_f64().unwrap();
    assert!(seconds(&ncmoe) > 3.0 * seconds(&long), "{ncmoe} {long}");
}

#[test]
fn plan_and_generate_agree_on_experts() {
    let home = tempfile::tempdir().unwrap();
    let model = "synth:tiny-qwen2-moe,dtype=q8_0,seed=1,layers=6";
    let (machine, cap) = ("t4-xeon", "500K");
    let args = ["plan", "-m", model, "--hardware", machine, "--gpu-memory", cap, "--chunk", "512", "--json"];
    let out = run(tandem(home.path()).args(args).args(["--prompt-len", "11", "--gen-len", "6"]));
    assert!(out.status.success(), "{}", stderr(&out));
    let planned = json(&out);
    let ran = json(&generate(model, "emulated:t4-xeon", &["--json", "--gpu-memory", cap]));
    let (name, predicted) = (&ran["plan"]["strategy"], &ran["plan"]["predicted"]);
    assert_eq!(name, &planned["chosen"]);
    let candidates = planned["candidates"].as_array().unwrap();
    let c = candidates.iter().find(|c| &c["strategy"] == name).unwrap();
    for (a, b) in [
        (&c["t_prefill_s"], &predicted["t_prefill_s"]),
        (&c["t_decode_s"], &predicted["t_decode_s"]),
        (&c["gpu_units"], &ran["plan"]["gpu_units"]),
    ] {
        assert!(a.is_number() && a == b, "{planned} {ran}");
    }
}

/// A flag of a strategy selects it, in plans, too.
#[test]
fn plans_take_what_is_fixed_of_experts() {
    let home = tempfile::tempdir().unwrap();
    let of = |more: &[&str]| {
        let args = [
            "plan",
            "-m",
            "synth:tiny-qwen3-moe,dtype=q4_k",
            "--hardware",
            "rtx4060-laptop",
            "--prompt-len",
            "64",
            "--gen-len",
            "16",
            "--json",
        ];
        let plan = json(&run(tandem(home.path()).args(args).args(more)));
        let chosen = plan["chosen"].as_str().unwrap().to_owned();
        let all = plan["candidates"].as_array().unwrap();
        (chosen.clone(), all.iter().find(|c| c["strategy"] == *chosen).unwrap()["experts"]["device"].clone())
    };
    assert_eq!(of(&["--n-cpu-moe", "1"]), ("ncmoe".to_owned(), 8.into()));
    assert_eq!(of(&["--gpu-experts", "3"]), ("experts".to_owned(), 6.into()));
}

#[test]
fn what_only_mixtures_have_is_refused_for_others() {
    let home = tempfile::tempdir().unwrap();
    let model = "synth:tiny-qwen3-moe,dtype=q4_k,seed=2";
    for strategy in ["cpu-moe", "ncmoe", "experts"] {
        let dense = generate("synth:tiny-llama,seed=2", "emulated", &["--strategy", strategy]);
        assert_error(&dense, 1, &format!("--strategy {strategy}: this model has no experts"));
    }
    let dense = generate("synth:tiny-llama,seed=2", "emulated", &["--fixed-experts"]);
    assert_error(&dense, 2, "--fixed-experts: the model has no experts");
    assert_error(
        &generate(model, "emulated", &["--n-cpu-moe", "5"]),
        2,
        "--n-cpu-moe 5: the model has 2 blocks",
    );
    assert_error(
        &generate(model, "emulated", &["--gpu-experts", "9"]),
        2,
        "--gpu-experts 9: the model has 8 in a block",
    );
    let ncmoe = ["--gpu-experts", "1", "--strategy", "ncmoe"];
    assert_error(
        &generate(model, "emulated", &ncmoe),
        2,
        "--gpu-experts: is of --strategy experts, not of ncmoe",
    );
    let helm = ["--n-cpu-moe", "1", "--strategy", "helm"];
    assert_error(&generate(model, "emulated", &helm), 2, "--n-cpu-moe: is of --strategy ncmoe, not of helm");
    let split = ["--strategy", "lia", "--policy", "prefill=0,0,0,0,0,0,decode=0,0,0,0,0,1"];
    assert_error(&generate(model, "emulated", &split), 1, "run on one side");
    let (cpu, auto) =
        (json(&generate(model, "cpu", &["--json"])), json(&generate(model, "auto", &["--json"])));
    assert_eq!(cpu["tokens"], auto["tokens"]);
    // What it takes is planned and described.
    let seen = json(&run(tandem(home.path()).args(["inspect", model, "--json"])));
    assert_eq!(seen["experts"], "3 of 8 of width 256, softmax over the chosen");
    assert!(seen["active_parameters"].as_u64() < seen["parameters"].as_u64());
}

/// Sinks join where attention is whole: on the device, on the host, or where parts of both meet.
#[test]
fn sinks_join_on_either_side() {
    let model = "synth:tiny-gpt-oss,experts=mxfp4,seed=2,layers=4";
    let prompt = "hello there ".repeat(12);
    let of = |device: &str, more: &[&str]| {
        let home = tempfile::tempdir().unwrap();
        let args = ["generate", "-m", model, "-n", "6", "--device", device, "--chunk", "32", &prompt];
        let all = ["--json", "--deterministic", "--logprobs", "20"];
        json(&run(tandem(home.path()).args(args).args(all).args(more)))
    };
    let cpu = of("cpu", &[]);
    assert!(cpu["prompt_tokens"].as_u64() > Some(100), "more than three pages");
    for far in ["attend", "stream"] {
        for strategy in ["helm", "lia", "stream"] {
            let few = ["--kv-pages", "3", "--far", far, "--strategy", strategy];
            same(&cpu, &of("emulated", &few), &format!("{strategy}, far pages by {far}"));
        }
    }
    let home = tempfile::tempdir().unwrap();
    let seen = json(&run(tandem(home.path()).args(["inspect", model, "--json"])));
    assert_eq!(seen["attn_sinks"], true);
    assert_eq!(seen["experts"], "3 of 8 of width 256, softmax over the chosen");
    assert!(seen["bytes_by_dtype"]["mxfp4"].as_u64() > Some(0), "{seen}");
}

/// By the GPU's kernels, where they are linked for the host: beside the CPU's experts, with all experts, and with those of one block.
#[test]
fn kernels_give_the_cpus_tokens() {
    if !cfg!(tandem_emulation) {
        println!("skipped: the kernels are not linked for the host");
        let out = generate("synth:tiny-mixtral", "emulated:kernels", &["--strategy", "cpu-moe"]);
        return assert_error(&out, 1, "host-emulation");
    }
    let ways: [&[&str]; 4] = [
        &["--strategy", "cpu-moe"],
        &["--n-cpu-moe", "1"],
        &["--strategy", "gpu-only"],
        &["--gpu-experts", "2"],
    ];
    for (model, ways) in [
        ("tiny-mixtral,dtype=q4_k", &ways[..]),
        ("tiny-qwen2-moe,dtype=f16", &ways[1..]),
        ("tiny-qwen3-moe,dtype=q8_0", &ways[2..]),
        ("tiny-granite-moe,dtype=bf16", &ways[2..3]),
        ("tiny-olmoe,dtype=q6_k", &ways[2..3]),
        ("tiny-gpt-oss,experts=mxfp4,dtype=bf16", &ways[..]),
        ("tiny-gpt-oss,experts=mxfp4,dtype=q8_0", &ways[2..]),
    ] {
        let model = format!("synth:{model},seed=2,layers=2");
        let m = load(&model).unwrap();
        let vocab = m.spec.vocab.to_string();
        let more = ["--json", "--logprobs", &vocab];
        let cpu = json(&generate(&model, "cpu", &more));
        let bound = rounding::cpu(&m.spec, Half::BF16, true)
            + rounding::activations(&m, Isa::best())
            + rounding::accelerator(&m.spec, Half::BF16, model.contains("bf16"));
        for way in ways {
            let report = json(&generate(&model, "emulated:kernels", &[&more[..], way].concat()));
            let device = report["plan"]["device"].as_str().unwrap();
            assert!(device.starts_with("emulated:kernels"), "{model} {way:?} on {device}");
            let sure = margin::compare(&cpu, &report, m.spec.vocab, bound);
            assert!(sure > 0, "{model} {way:?}: nothing was compared, choose another seed");
        }
    }
}
