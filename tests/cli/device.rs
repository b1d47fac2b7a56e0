//! `--device emulated` as a user meets it: the CPU's tokens, a plan that says where, memory that is refused.

use crate::support::command::{self, assert_error, json, run, stderr, stdout, tandem};
use crate::support::{margin, rounding};
use tandem::device::{self, Emulation, Kind};
use tandem::engine::{Engine, Options};
use tandem::model::load;
use tandem::simd::Isa;
use tandem::tensor::Half;

fn home() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

const MODEL: &str = "synth:tiny-qwen3,dtype=q4_k,seed=2";

#[test]
fn the_emulated_accelerator_gives_the_cpus_tokens() {
    let home = home();
    let m = load(MODEL).unwrap();
    let vocab = m.spec.vocab;
    let generate = |device: &str, more: &[&str]| {
        let args = ["generate", "-m", MODEL, "-n", "16", "--device", device, "hello there"];
        run(tandem(home.path()).args(args).args(more))
    };
    // Log-probabilities need the logits themselves, which then leave the device.
    let all = ["--json", "--logprobs", &vocab.to_string()];
    let (cpu, emulated) = (json(&generate("cpu", &all)), json(&generate("emulated", &all)));
    assert_eq!(emulated["plan"]["device"], "emulated");
    assert_eq!(emulated["plan"]["strategy"], "gpu-only");
    assert!(emulated["plan"]["memory"]["weights"].as_u64().unwrap() > 0);

    let kv = Half::BF16;
    let bound = rounding::cpu(&m.spec, kv, true)
        + rounding::activations(&m, Isa::best())
        + rounding::accelerator(&m.spec, kv, false);
    let sure = margin::compare(&cpu, &emulated, vocab, bound);
    println!("{sure} tokens had to be equal");
    assert!(sure >= 3, "only {sure} tokens were compared: choose another seed");

    // The likeliest token as the device itself finds it, and as text: one device, so exactly.
    let found = json(&generate("emulated", &["--json"]));
    assert_eq!((&found["tokens"], &found["text"]), (&emulated["tokens"], &emulated["text"]));
    assert_eq!(stdout(&generate("emulated", &[])).trim_end(), emulated["text"].as_str().unwrap().trim_end());
}

/// Devices compute no experts yet; nothing but that is the reason, and the CPU does.
#[test]
fn experts_are_refused_by_devices_and_run_on_the_cpu() {
    let home = home();
    let model = "synth:tiny-qwen3-moe,dtype=q4_k,seed=2";
    let generate = |device: &str, more: &[&str]| {
        let args = ["generate", "-m", model, "-n", "4", "--device", device, "hello there"];
        run(tandem(home.path()).args(args).args(more))
    };
    let why = "mixtures of experts run on the CPU only for now";
    assert_error(&generate("emulated", &[]), 1, why);
    assert_error(&generate("emulated", &["--strategy", "helm"]), 1, why);
    let (cpu, auto) = (json(&generate("cpu", &["--json"])), json(&generate("auto", &["--json"])));
    assert_eq!(cpu["tokens"], auto["tokens"]);
    assert_eq!(auto["plan"]["device"], "cpu");
    // What it takes is planned and described.
    let seen = json(&run(tandem(home.path()).args(["inspect", model, "--json"])));
    assert_eq!(seen["experts"], "3 of 8 of width 256, softmax over the chosen");
    assert!(seen["active_parameters"].as_u64() < seen["parameters"].as_u64());
}

/// Devices compute no sinks either: no placement drops them.
#[test]
fn sinks_are_refused_by_devices_and_run_on_the_cpu() {
    let home = home();
    let model = "synth:tiny-gpt-oss,experts=mxfp4,seed=2";
    let generate = |device: &str, more: &[&str]| {
        let args = ["generate", "-m", model, "-n", "4", "--device", device, "hello there"];
        run(tandem(home.path()).args(args).args(more))
    };
    let why = "attention with sinks: it runs on the CPU only for now";
    assert_error(&generate("emulated", &[]), 1, why);
    for strategy in ["helm", "lia", "stream"] {
        assert_error(&generate("emulated", &["--strategy", strategy]), 1, why);
    }
    let (cpu, auto) = (json(&generate("cpu", &["--json"])), json(&generate("auto", &["--json"])));
    assert_eq!(cpu["tokens"], auto["tokens"]);
    assert_eq!(auto["plan"]["device"], "cpu");
    let seen = json(&run(tandem(home.path()).args(["inspect", model, "--json"])));
    assert_eq!(seen["attn_sinks"], true);
    assert_eq!(seen["experts"], "3 of 8 of width 256, softmax over the chosen");
    assert!(seen["bytes_by_dtype"]["mxfp4"].as_u64() > Some(0), "{seen}");
}

/// A build of the tests links the kernels for the host into the program; `emulated` runs none of them all the same.
#[test]
fn what_emulated_does_is_the_same_in_every_build() {
    let m = load("synth:tiny-llama,dtype=q4_0,seed=1").unwrap();
    let run = |kind: Kind| {
        let accel = device::open(&kind, Some(256 << 20))?;
        let mut options = Options::new(Isa::Reference, 64);
        options.threads = Some(2);
        let name = kind.to_string();
        let mut e = Engine::on_accelerator(m.spec.clone(), &m.weights, &options, accel, &name, &|_| ())?;
        let seq = e.add();
        let before = kernels_launched();
        e.prefill(seq, &[3, 1, 4], |_| ())?;
        Ok::<_, tandem::Error>(kernels_launched() - before)
    };
    assert_eq!(run(Kind::Emulated(Emulation::Functions)).unwrap(), 0);
    let (kernels, home) = (run(Kind::Emulated(Emulation::Kernels)), home());
    let words = format!("generate -m {MODEL} -n 1 --device emulated:kernels --json x");
    let program = command::run(tandem(home.path()).args(words.split(' ')));
    let doctor = json(&command::run(tandem(home.path()).args(["doctor", "--json", "--no-probe"])));
    let listed = &doctor["cuda"]["emulated"];
    assert_eq!(listed["emulated"], true);
    assert_eq!(listed["emulated:kernels"], cfg!(tandem_emulation));
    if cfg!(tandem_emulation) {
        assert!(kernels.unwrap() > 0);
        assert_eq!(json(&program)["plan"]["device"], "emulated:kernels");
    } else {
        assert!(kernels.is_err());
        assert_error(&program, 1, "cargo run --features host-emulation");
    }
}

/// By all threads of this process.
#[cfg(tandem_emulation)]
fn kernels_launched() -> u64 {
    use tandem::device::emulated::ffi;
    ffi::kernels().into_iter().filter_map(ffi::kernel_stats).map(|s| s.launches).sum()
}

#[cfg(not(tandem_emulation))]
fn kernels_launched() -> u64 {
    0
}

#[test]
fn too_little_device_memory_is_refused_with_the_numbers() {
    let home = home();
    let words = format!("generate -m {MODEL} --device emulated --strategy gpu-only --gpu-memory 100K x");
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

/// In emulated time: the same tokens, times of the machine that was named, and the same ones again.
#[test]
fn emulated_time_is_told_and_repeats() {
    let home = home();
    let generate = |device: &str, more: &[&str]| {
        let args = ["generate", "-m", MODEL, "-n", "6", "--device", device, "hello there"];
        run(tandem(home.path()).args(args).args(more))
    };
    let report = |device: &str, more: &[&str]| json(&generate(device, &[&["--json"], more].concat()));
    let gpu = &["--strategy", "gpu-only"][..];
    let plain = report("emulated", gpu);
    assert_eq!(plain["timings"]["time"], "measured");
    // On the CPU alone in that machine's time, too, and wherever a tiny model is soonest done.
    let cpu = report("emulated:t4-xeon", &["--strategy", "cpu-only"]);
    assert_eq!((&cpu["plan"]["device"], &cpu["timings"]["time"]), (&"cpu".into(), &"emulated".into()));
    assert_eq!(report("emulated:t4-xeon", &[])["timings"]["time"], "emulated");
    for more in [gpu, &["--boundary", "2"]] {
        let (one, two) = (report("emulated:t4-xeon", more), report("emulated:t4-xeon", more));
        assert_eq!(
            (&one["tokens"], &one["timings"]["time"]),
            (&report("emulated", more)["tokens"], &"emulated".into())
        );
        let device = one["plan"]["device"].as_str().unwrap();
        assert!(device.starts_with("emulated:t4-xeon"), "{device}");
        let times = |report: &serde_json::Value| {
            ["prefill_tok_s", "decode_tok_s", "ttft_ms"].map(|key| report["timings"][key].as_f64().unwrap())
        };
        assert_eq!(times(&one), times(&two));
        assert!(times(&one).iter().all(|&t| t > 0.0), "{one}");
    }
    let faster = report("emulated:h200-sxm", gpu)["timings"]["decode_tok_s"].as_f64();
    assert!(faster > report("emulated:t4-xeon", gpu)["timings"]["decode_tok_s"].as_f64());
    let said = stderr(&generate("emulated:t4-xeon", gpu));
    assert!(said.contains("times are those of t4-xeon, not of this computer"), "{said}");

    let words =
        "bench -m synth:tiny-llama --device emulated:rtx4060-laptop --prompt 8 --gen 2 --repeat 2 --json";
    let bench = json(&run(tandem(home.path()).args(words.split(' '))));
    assert_eq!(bench["time"], "emulated");
    // What is computed twice takes the same time.
    let rates = &bench["results"][0]["tok_s"];
    assert!(rates["min"].as_f64() > Some(0.0) && rates["min"] == rates["max"], "{bench}");

    // The machine's memory is the cap, of which all is free.
    let large = ["--boundary", "1"];
    assert_eq!(report("emulated:t4-xeon", &large)["plan"]["memory"]["gpu"]["available"], 16_000_000_000u64);
    for bad in ["emulated:t4", "emulated:t4-xeon,fast", "emulated:"] {
        assert_error(&generate(bad, &[]), 2, "t4-xeon, t4-g4dn");
    }
}
