//! Devices that are less than they seem, on the stand-in for the driver: slices of a GPU, memory that has no end, drivers that refuse,
//! memory that goes and devices that are lost on the way. One sentence, a path that works, and the right tokens.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use crate::serve::{Serving, answer};
use crate::support::command::{json, run, stderr, stdout};
use crate::support::fake_driver::{self, stand_in};

const MODEL: &str = "synth:tiny-llama,layers=26,dtype=q8_0,seed=1";

/// Questions about free memory until a model is loaded as planned: of a run whose tokens are known, whose chunk is chosen, too; and of requests.
const PLANNED: u32 = 7;
const REQUESTS_PLANNED: u32 = 5;

/// A home that keeps verdicts on kernels: the first run of all makes them.
fn home() -> PathBuf {
    static ONCE: OnceLock<PathBuf> = OnceLock::new();
    let make = || {
        let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bad-devices");
        std::fs::create_dir_all(&home).unwrap();
        if let Some(mut first) = fake_driver::tandem(&home) {
            let words = format!("generate -m {MODEL} -n 1 --device cuda --strategy gpu-only x");
            let out = run(first.args(words.split(' ')));
            assert_eq!(out.status.code(), Some(0), "{}", stderr(&out));
        }
        home
    };
    ONCE.get_or_init(make).clone()
}

/// The command line on the stand-in; `None` where this build has none that runs kernels.
fn tandem(words: &str, env: &[(&str, &str)]) -> Option<Command> {
    let mut tandem = fake_driver::tandem(&home())?;
    tandem.args(words.split(' ')).env("FAKE_CHECKS", "0").envs(env.iter().copied());
    Some(tandem)
}

/// A slice has a name, and is predicted by its share of the whole GPU's figures.
#[test]
fn a_slice_of_a_gpu_is_told_and_counts_as_one() {
    let slice = [
        ("FAKE_NAME", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"),
        ("FAKE_UNITS", "16"),
        ("FAKE_MEMORY", "10737418240"),
    ];
    let Some(mut doctor) = tandem("doctor --no-probe --json", &slice) else { return };
    let report = json(&run(&mut doctor));
    let device = &report["cuda"]["devices"][0];
    assert_eq!((&device["slice"], &device["multiprocessors"]), (&"1g.10gb".into(), &16.into()), "{device}");
    let text = stdout(&run(&mut tandem("doctor --no-probe", &slice).unwrap()));
    assert!(text.contains("a slice of a GPU (MIG 1g.10gb) with 16 multiprocessors"), "{text}");

    let words = format!("generate -m {MODEL} --json -n 1 --device cuda --strategy gpu-only x");
    let plan = json(&run(&mut tandem(&words, &slice).unwrap()))["plan"].clone();
    let by = plan["predicted"]["by"].as_str().unwrap_or_else(|| panic!("{plan}"));
    assert!(by.contains("the share of a slice (1g.10gb) in the figures of h100-sxm"), "{by}");
}

/// A folder with the stand-in where Windows' driver is.
fn wsl(home: &Path) -> Option<String> {
    let folder = home.join("usr/lib/wsl/lib");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::copy(stand_in()?.join("libcuda.so"), folder.join("libcuda.so")).unwrap();
    Some(folder.to_str().unwrap().to_owned())
}

/// Below WSL too much is no error but lies in the host's memory: nothing may get there. Another process takes much of
/// the device when everything is planned.
#[test]
fn nothing_spills_to_the_host_below_wsl() {
    let temporary = tempfile::tempdir().unwrap();
    let Some(folder) = wsl(temporary.path()) else { return };
    let spills = "fake driver: spills";
    let generate = |wsl: bool| -> Option<Output> {
        let words = format!("generate -m {MODEL} --json -n 2 --ctx 256 --device cuda --strategy helm x");
        let taken = format!("{PLANNED}:14680064");
        let env = [
            ("FAKE_MEMORY", "39845888"),
            ("FAKE_CONTEXT", "2097152"),
            ("FAKE_SPILLS", "1"),
            ("FAKE_TAKEN", &taken),
        ];
        let mut tandem = tandem(&words, &env)?;
        if wsl {
            tandem.env("LD_LIBRARY_PATH", &folder);
        }
        Some(run(&mut tandem))
    };
    let Some(unaware) = generate(false) else { return };
    assert!(stderr(&unaware).contains(spills), "the stand-in never spills: {}", stderr(&unaware));
    let aware = generate(true).unwrap();
    let said = stderr(&aware);
    assert!(!said.contains(spills) && said.contains("planning again with"), "{said}");
    let memory = json(&aware)["plan"]["memory"].clone();
    for side in ["gpu", "host"] {
        assert!(memory[side]["total"].as_u64() > Some(0), "nothing on the {side}: {memory}");
    }

    let mut doctor = tandem("doctor --no-probe --json", &[]).unwrap();
    assert_eq!(json(&run(doctor.env("LD_LIBRARY_PATH", &folder)))["cuda"]["wsl"], true);
    let mut doctor = tandem("doctor --no-probe", &[]).unwrap();
    let text = stdout(&run(doctor.env("LD_LIBRARY_PATH", &folder)));
    assert!(text.lines().any(|l| l.starts_with("! wsl") && l.contains("Windows' driver")), "{text}");
}

/// Ways to have a model on both sides, and what may be refused. (A small model: what counts is which calls are made.)
const BOTH: [&str; 3] = [
    "--strategy helm --boundary 2",
    "--strategy lia --pinned 1 --policy prefill=0,0,0,0,0,0,decode=0,1,1,0,0,0",
    "--strategy helm --boundary 1 --kv-pages 3 --chunk 32 --far attend",
];
const MEDIUM: &str = "synth:tiny-llama,layers=12,dtype=q8_0,seed=1";
const SMALL: &str = "synth:tiny-llama,layers=3,dtype=q8_0,seed=1";
/// Longer than three pages; tokens are bytes.
const PROMPT: &str = "The quick brown fox jumps over the lazy dog, and then it looks around for another one to jump over, and sees none.";

fn generate(options: &str, env: &[(&str, &str)]) -> Option<Output> {
    let words = format!("generate -m {SMALL} --json --raw --temp 0 -n 3 --ctx 128 --device cuda {options}");
    Some(run(tandem(&words, env)?.arg(PROMPT)))
}

/// Requests by NEO, some of which live on the host. (Figures that lie beside the program, so that nothing is measured.)
fn requests(prompts: &Path, options: &str, env: &[(&str, &str)]) -> Option<Output> {
    let words = format!(
        "generate -m {SMALL} --raw --temp 0 --device cuda --hardware h100-spr --kv-pages 6 --prompts {} {options}",
        prompts.display()
    );
    Some(run(&mut tandem(&words, env)?))
}

/// A file of three prompts.
fn prompts(folder: &Path) -> PathBuf {
    let path = folder.join("prompts.jsonl");
    let line = |prompt: &str| serde_json::json!({ "prompt": prompt, "max_tokens": 4 }).to_string();
    std::fs::write(&path, [PROMPT, "hello", "and you?"].map(line).join("\n")).unwrap();
    path
}

/// The tokens of each answer, by its line. Every line is whole.
fn answers(out: &Output) -> Vec<(u64, serde_json::Value)> {
    let text = stdout(out);
    assert!(text.is_empty() || text.ends_with('\n'), "half a line: {text}");
    let parsed = text.lines().map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{e}: {l}")));
    let mut all: Vec<_> =
        parsed.map(|a: serde_json::Value| (a["index"].as_u64().unwrap(), a["tokens"].clone())).collect();
    all.sort_by_key(|(index, _)| *index);
    all
}

/// Host memory that stays pageable, since the system locks no more: one sentence each, and the same tokens by every way.
#[test]
fn memory_that_is_not_locked_changes_no_token() {
    let temporary = tempfile::tempdir().unwrap();
    let path = prompts(temporary.path());
    let refused = [("FAKE_FAIL", "cuMemHostRegister_v2:2:0")];
    for way in BOTH {
        let Some(locked) = generate(way, &[]) else { return };
        let pageable = generate(way, &refused).unwrap();
        assert_eq!(json(&pageable)["tokens"], json(&locked)["tokens"], "{way}");
        let said = stderr(&pageable);
        assert!(said.contains("stay pageable") && said.contains("ulimit -l"), "{way}: {said}");
        assert!(!stderr(&locked).contains("pageable"), "{way}");
    }
    let locked = requests(&path, "--strategy neo", &[]).unwrap();
    let pageable = requests(&path, "--strategy neo", &refused).unwrap();
    assert_eq!(answers(&pageable), answers(&locked));
    assert!(
        answers(&locked).len() == 3 && stderr(&pageable).contains("stay pageable"),
        "{}",
        stderr(&pageable)
    );
}

/// A device that cannot reach the host's memory, and a host that locks none at all, even for staging: what needs no exchange runs, the
/// rest is one sentence that says what does. It is not planned again, since less of the device's memory would not help.
#[test]
fn exchanges_that_cannot_be_are_refused_in_a_sentence() {
    let temporary = tempfile::tempdir().unwrap();
    let path = prompts(temporary.path());
    let Some(right) = generate("--strategy gpu-only", &[]) else { return };
    for alone in ["--strategy gpu-only", "--strategy stream --gpu-memory 6MiB"] {
        let out = generate(alone, &[("FAKE_MAPS", "0")]).unwrap();
        assert_eq!(json(&out)["tokens"], json(&right)["tokens"], "{alone}");
    }
    for (refusal, says, remedy) in [
        (
            ("FAKE_MAPS", "0"),
            "no mapped memory",
            "run all of the model on the GPU, or on the CPU with --device cpu",
        ),
        (("FAKE_FAIL", "cuMemHostAlloc:2:0"), "the host has no", "ulimit -l"),
    ] {
        for way in BOTH {
            let out = generate(way, &[refusal]).unwrap();
            assert_eq!((out.status.code(), stdout(&out).as_str()), (Some(1), ""), "{way}: {}", stderr(&out));
            one_sentence(&out, &[says, remedy]);
        }
        let out = requests(&path, "--strategy neo", &[refusal]).unwrap();
        assert_eq!((out.status.code(), stdout(&out).as_str()), (Some(1), ""), "{}", stderr(&out));
        one_sentence(&out, &[says, remedy]);
    }
}

/// One error, with these parts, and no plan after the first.
#[track_caller]
fn one_sentence(out: &Output, parts: &[&str]) {
    let said = stderr(out);
    let errors: Vec<&str> = said.lines().filter(|l| l.starts_with("tandem: error: ")).collect();
    assert_eq!(errors.len(), 1, "{said}");
    assert!(parts.iter().all(|part| errors[0].contains(part)), "{parts:?}: {said}");
    assert!(!said.contains("planning again") && !said.contains("panicked"), "{said}");
}

/// Another process takes memory when the plan is made: the model is placed again with what is left, on both sides as before.
#[test]
fn memory_that_is_taken_after_planning_leads_to_another_plan() {
    let taken = format!("{}:52428800", PLANNED - 1);
    let env = [("FAKE_MEMORY", "67108864"), ("FAKE_CONTEXT", "2097152"), ("FAKE_TAKEN", &*taken)];
    for strategy in ["helm", "lia"] {
        let words =
            format!("generate -m {MEDIUM} --json -n 2 --ctx 256 --device cuda --strategy {strategy} x");
        let Some(mut tandem) = tandem(&words, &env) else { return };
        let out = run(&mut tandem);
        let said = stderr(&out);
        assert!(said.contains("planning again with"), "{strategy}: {said}");
        let plan = json(&out)["plan"].clone();
        assert_eq!(plan["strategy"], strategy);
        for side in ["gpu", "host"] {
            assert!(plan["memory"][side]["total"].as_u64() > Some(0), "nothing on the {side}: {plan}");
        }
    }
    // Requests whose keys and values live on either side: all weights are there again, and fewer pages.
    let words = format!(
        "serve -m {MEDIUM} --device cuda --strategy neo --hardware h100-spr --ctx 512 --sequences 6 --port 0 --json"
    );
    let taken = format!("{}:31457280", REQUESTS_PLANNED - 1);
    let env = [("FAKE_MEMORY", "67108864"), ("FAKE_CONTEXT", "2097152"), ("FAKE_TAKEN", &*taken)];
    let serving = Serving::spawn(tandem(&words, &env).unwrap());
    serving.wait_until_ready();
    let body = r#"{"prompt":"hello","max_tokens":2}"#;
    let answered = answer(serving.post("/v1/completions", body));
    assert!(answered.starts_with("HTTP/1.1 200") && answered.contains("completion_tokens"), "{answered}");
    serving.signal(libc::SIGTERM);
    let (code, said) = serving.end();
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("planning again with") && said.contains("keys and values of"), "{said}");
    assert!(!said.contains("and 0 on the cpu"), "{said}");
}

/// Requests that are being served when the device is lost get an error as any other, and so do later ones.
#[test]
fn a_server_whose_device_is_lost_says_so_to_everybody() {
    let words =
        format!("serve -m {SMALL} --device cuda --strategy helm --boundary 2 --ctx 128 --port 0 --json");
    let Some(command) = tandem(&words, &[("FAKE_FAIL", "cuLaunchKernel:719:60")]) else { return };
    let serving = Serving::spawn(command);
    serving.wait_until_ready();
    let body = serde_json::json!({ "prompt": PROMPT, "max_tokens": 100 }).to_string();
    for _ in 0..2 {
        let answered = answer(serving.post("/v1/completions", &body));
        let (head, body) = answered.split_once("\r\n\r\n").unwrap();
        println!("{answered}");
        assert!(head.starts_with("HTTP/1.1 5"), "{answered}");
        let error: serde_json::Value = serde_json::from_str(body).unwrap_or_else(|e| panic!("{e}: {body}"));
        assert!(error["error"]["message"].as_str().is_some_and(|m| m.contains("lost")), "{error}");
    }
    serving.signal(libc::SIGTERM);
    let (_, said) = serving.end();
    assert!(!said.contains("panicked"), "{said}");
}

/// A device that is lost in the midst of an answer, between two sides and between two requests: one sentence, and whatever is
/// written is whole.
#[test]
fn a_device_that_is_lost_on_the_way_is_one_sentence() {
    let temporary = tempfile::tempdir().unwrap();
    let path = prompts(temporary.path());
    let launches = |out: &Output| -> u64 {
        let said = stderr(out);
        let line = said.lines().rfind(|l| l.ends_with(" launches")).expect("the stand-in counts");
        line.split(' ').nth(2).unwrap().parse().unwrap()
    };
    for way in BOTH {
        let Some(right) = generate(way, &[]) else { return };
        let fail = format!("cuLaunchKernel:719:{}", launches(&right) * 2 / 3);
        let out = generate(way, &[("FAKE_FAIL", &fail)]).unwrap();
        assert_eq!((out.status.code(), stdout(&out).as_str()), (Some(1), ""), "{way}: {}", stderr(&out));
        one_sentence(&out, &["lost", "719"]);
    }
    let right = requests(&path, "--strategy neo", &[]).unwrap();
    let fail = format!("cuLaunchKernel:719:{}", launches(&right) * 9 / 10);
    let out = requests(&path, "--strategy neo", &[("FAKE_FAIL", &fail)]).unwrap();
    let (said, got, right) = (stderr(&out), answers(&out), answers(&right));
    assert_ne!(out.status.code(), Some(0), "{said}");
    assert!(said.contains("719") && !said.contains("panicked"), "{said}");
    // Who was not answered has a line that says why.
    let (answered, failed): (Vec<_>, Vec<_>) = got.into_iter().partition(|(_, tokens)| !tokens.is_null());
    assert!(!failed.is_empty() && answered.len() + failed.len() == right.len(), "{answered:?} {failed:?}");
    assert!(answered.iter().all(|answer| right.contains(answer)), "{answered:?} of {right:?}");
    assert_eq!(stdout(&out).matches("lost: ").count(), failed.len(), "{}", stdout(&out));
}
