//! The profile of a mixture's router: recorded, kept, shown, planned with.

use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::Value;

use crate::support::command::{TOKENIZER, assert_error, json, run, stderr, stdout, tandem};
use tandem::model::{export_hf_folder, load};
use tandem::tensor::DType;

const MODEL: &str = "synth:tiny-qwen3-moe";

fn call(home: &Path, line: &str) -> Output {
    run(tandem(home).args(line.split_whitespace()))
}

/// The one record that is kept.
fn kept(home: &Path) -> PathBuf {
    let all = std::fs::read_dir(home.join("profiles")).unwrap().map(|f| f.unwrap().path());
    let mut of: Vec<PathBuf> =
        all.filter(|p| p.file_name().unwrap().to_str().unwrap().starts_with("router-")).collect();
    assert_eq!(of.len(), 1, "{of:?}");
    of.remove(0)
}

/// The model as a folder of files, with a tokenizer.
fn in_files(home: &Path) -> PathBuf {
    let folder = home.join("moe");
    export_hf_folder(&load(MODEL).unwrap(), &folder, DType::BF16, 1).unwrap();
    std::fs::write(folder.join("tokenizer.json"), TOKENIZER).unwrap();
    folder
}

#[test]
fn a_router_is_recorded_once_and_shown() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let inspect = || call(home, &format!("inspect {MODEL} --experts --json"));
    assert_error(&inspect(), 2, &format!("tandem profile -m {MODEL} --router records it"));
    let line = format!("profile -m {MODEL} --router --tokens 700 --json");
    let out = call(home, &line);
    assert!(
        stderr(&out).contains("random weights: what their routers choose says nothing"),
        "{}",
        stderr(&out)
    );
    let first = json(&out)["router"].clone();
    assert_eq!((&first["cached"], &first["router"]["tokens"]), (&false.into(), &700.into()));
    assert_eq!(first["file"], kept(home).to_str().unwrap());
    assert!(first["text"]["random"] == true && first["text"]["limit"] == 700);
    let again = json(&call(home, &line))["router"].clone();
    assert_eq!((&again["cached"], &again["router"]), (&true.into(), &first["router"]));
    // A part of what is known is known; more is recorded, and so is the same when asked to.
    let of = |more: &str| {
        json(&call(home, &format!("profile -m {MODEL} --router --json {more}")))["router"].clone()
    };
    assert_eq!((&of("--quick")["cached"], &of("--quick")["router"]["tokens"]), (&true.into(), &700.into()));
    let copy = home.join("copy.json");
    let anew = of(&format!("--tokens 700 --again -o {}", copy.display()));
    assert_eq!((&anew["cached"], &anew["router"]), (&false.into(), &first["router"]), "the same choices");
    assert_eq!(std::fs::read(&copy).unwrap(), std::fs::read(kept(home)).unwrap());
    let more = of("--tokens 900");
    assert_eq!((&more["cached"], &more["router"]["tokens"]), (&false.into(), &900.into()));

    let shown = json(&inspect());
    assert_eq!(shown["layers"], 2, "what else is known of the model is there, too");
    let router = &shown["router"];
    assert_eq!((&router["tokens"], router["layers"].as_array().unwrap().len()), (&900.into(), 2));
    for layer in router["layers"].as_array().unwrap() {
        let counts: Vec<u64> =
            layer["counts"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
        assert_eq!((counts.len(), counts.iter().sum::<u64>()), (8, 3 * 900));
        let mut sorted = counts;
        sorted.sort_unstable_by(|a, b| b.cmp(a));
        // Half of eight experts.
        let share = sorted[..4].iter().sum::<u64>() as f64 / 2700.0;
        assert!((layer["most_used"][2].as_f64().unwrap() - share).abs() < 1e-12, "{layer}");
        assert!((1.0..=8.0).contains(&layer["effective"].as_f64().unwrap()));
        assert!((0.0..=1.0).contains(&layer["repeats"].as_f64().unwrap()));
    }
    let one = &router["distinct"][0];
    assert!((one["experts"].as_f64().unwrap() - 3.0).abs() < 1e-9 && one["uniform"] == 3.0, "{one}");
    let text = stdout(&call(home, &format!("inspect {MODEL} --experts")));
    for part in ["routers over 900 random tokens, 3 experts a token", "effective", "mean", "distinct experts"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    // Of a copy, where nothing is kept.
    let empty = tempfile::tempdir().unwrap();
    let line = format!("inspect {MODEL},dtype=q8_0 --experts --json --router-profile {}", copy.display());
    assert_eq!(json(&call(empty.path(), &line))["router"]["tokens"], 700);

    let picture = home.join("heat.svg");
    let line = format!("inspect {MODEL} --experts --plot {}", picture.display());
    assert_eq!(call(home, &line).status.code(), Some(0));
    let svg = std::fs::read_to_string(&picture).unwrap();
    assert!(
        svg.starts_with("<svg role=\"img\"") && svg.contains("<title>Experts of synth:tiny-qwen3-moe by use"),
        "{svg}"
    );
    assert!(svg.trim_end().ends_with("</svg>") && svg.matches("<rect").count() > 10);
    assert_error(
        &call(home, &format!("inspect {MODEL} --experts --plot heat.png")),
        2,
        "wanted the name of an .svg file",
    );
}

/// With the operations of the model, in one command.
#[test]
fn profiles_of_mixtures_have_the_router() {
    let home = tempfile::tempdir().unwrap();
    let line = format!("profile -m {MODEL} --device cpu --quick --json");
    let first = json(&call(home.path(), &line));
    assert!(first["model"]["tables"].is_object());
    assert_eq!(
        (&first["router"]["cached"], &first["router"]["router"]["tokens"]),
        (&false.into(), &512.into())
    );
    let second = json(&call(home.path(), &line));
    assert_eq!((&second["cached"], &second["router"]["cached"]), (&true.into(), &true.into()));
    let text = stdout(&call(home.path(), &format!("profile -m {MODEL} --device cpu --quick")));
    assert!(
        text.contains("routers over 512 random tokens") && text.matches("recorded before").count() == 1,
        "{text}"
    );
}

#[test]
fn plans_read_what_was_recorded() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let plan = |more: &str| {
        let line = format!(
            "plan --hardware rtx2080-102gbs --strategy cpu-only --prompt-len 3 --gen-len 2 --json {more}"
        );
        json(&call(home, &line))
    };
    let seconds = |plan: &Value, of: &str| plan["candidates"][0][of].as_f64().unwrap();
    let model = format!("-m {MODEL}");
    let uniform = plan(&model);
    assert_eq!(
        (&uniform["router"], &plan("-m synth:tiny-llama")["router"]),
        (&"uniform".into(), &Value::Null)
    );
    let copy = home.join("copy.json");
    json(&call(home, &format!("profile -m {MODEL} --router --tokens 99 --json -o {}", copy.display())));
    // Three experts for all: a prompt of three tokens reads those, and not six of eight.
    let mut record: Value = serde_json::from_slice(&std::fs::read(&copy).unwrap()).unwrap();
    for layer in record["router"]["layers"].as_array_mut().unwrap() {
        for (e, n) in layer["counts"].as_array_mut().unwrap().iter_mut().enumerate() {
            *n = if e < 3 { 99.into() } else { 0.into() };
        }
    }
    for to in [&copy, &kept(home)] {
        std::fs::write(to, record.to_string()).unwrap();
    }
    let known = plan(&model);
    assert_eq!(known["router"], kept(home).to_str().unwrap());
    let (less, more) = (seconds(&known, "t_prefill_s"), seconds(&uniform, "t_prefill_s"));
    assert!(less < 0.99 * more, "{less} and {more}");
    let steps = [&known, &uniform].map(|p| seconds(p, "t_decode_step_s"));
    assert!((steps[0] / steps[1] - 1.0).abs() < 1e-6, "a row reads three experts by either: {steps:?}");
    // Given by name it serves sizes without weights, and other types of them.
    let spec = plan(&format!("--spec tiny-qwen3-moe --router-profile {}", copy.display()));
    assert_eq!(spec["router"], copy.to_str().unwrap());
    assert!(seconds(&spec, "t_prefill_s") < 0.99 * seconds(&plan("--spec tiny-qwen3-moe"), "t_prefill_s"));
    // A run is predicted by the same.
    let by = |device: &str| {
        let line = format!("generate -m {MODEL} --json -n 2 hello --device {device}");
        json(&call(home, &line))["plan"]["predicted"]["by"].as_str().unwrap().to_owned()
    };
    let known = ", experts as their router chose them";
    let here = by("emulated --hardware rtx2080-102gbs");
    assert!(here.ends_with(known), "{here}");
    // In emulated time the clock takes them to be alike, and so does the prediction.
    let emulated = by("emulated:rtx2080-102gbs");
    assert!(!emulated.contains(known), "{emulated}");
}

/// Runs with a device count what the routers choose where experts are divided, and the next run begins with what this one learned.
#[test]
fn what_routers_choose_while_a_model_runs_is_kept() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let folder = in_files(home);
    let prompts = home.join("prompts.jsonl");
    std::fs::write(&prompts, "{\"prompt\":\"hello\"}\n{\"prompt\":\"hole?\"}\n").unwrap();
    let generate = |model: &str, more: &str| {
        let line = format!("generate -m {model} --raw -n 20 {more}");
        let out = call(home, &line);
        assert!(out.status.success(), "{}", stderr(&out));
        out
    };
    let model = folder.display().to_string();
    let is_kept = || home.join("profiles").read_dir().is_ok_and(|mut files| files.next().is_some());
    // Nothing is learned of random weights, on the CPU, of whole layers, or where experts are to stay.
    for (model, more) in [
        (MODEL, "hello --device emulated --gpu-experts 3"),
        (&model, "hello --device cpu"),
        (&model, "hello --device emulated --strategy gpu-only"),
        (&model, "hello --device emulated --gpu-experts 3 --fixed-experts"),
    ] {
        generate(model, more);
        assert!(!is_kept(), "{model} {more}");
    }
    let said = stderr(&generate(&model, "hello -v --device emulated --gpu-experts 3"));
    assert!(
        said.contains("what the routers chose for ") && said.contains("is kept for later runs: "),
        "{said}"
    );
    let record = || serde_json::from_slice::<Value>(&std::fs::read(kept(home)).unwrap()).unwrap();
    let learned = || record()["learned"].as_u64().unwrap();
    let first = learned();
    // A prompt, and the tokens that were fed again: as many as end of text allows.
    assert!((2..=25).contains(&first), "{first}");
    // Equal use before: 8 tokens choose each of 8 experts three times. Of the prompt, the last layer computes one row alone.
    let sums: Vec<u64> = record()["router"]["layers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|layer| {
            let counts = layer["counts"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap());
            assert!(counts.clone().all(|n| (3..=3 + first).contains(&n)), "{layer}");
            counts.sum()
        })
        .collect();
    assert!(sums[0] == 3 * (8 + first) && (3 * 9..sums[0]).contains(&sums[1]), "{sums:?}");
    generate(&model, "hello --device emulated --gpu-experts 3");
    assert_eq!(learned(), 2 * first, "the same once more");
    let prompts = format!("--prompts {} --device emulated --gpu-experts 3", prompts.display());
    generate(&model, &prompts);
    assert!(learned() > 2 * first);
    let text = stdout(&call(home, &format!("inspect {model} --experts")));
    assert!(
        text.contains(&format!("routers over {} tokens that ran, 3 experts a token", learned())),
        "{text}"
    );
    // A file that is damaged is told, and stays.
    std::fs::write(kept(home), "{}").unwrap();
    let said = stderr(&generate(&model, "hello --device emulated --gpu-experts 3"));
    assert!(
        said.contains("what the routers chose is not kept: ") && said.contains("not a profile"),
        "{said}"
    );
    assert_eq!(std::fs::read_to_string(kept(home)).unwrap(), "{}");
}

#[test]
fn a_text_is_read_in_the_models_own_tokens() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let folder = in_files(home);
    let text = home.join("text.txt");
    std::fs::write(&text, "hello?".repeat(40)).unwrap();
    let of = |more: &str| {
        let out = call(home, &format!("profile -m {} --router --json {more}", folder.display()));
        (json(&out)["router"].clone(), stderr(&out))
    };
    let (own, said) = of("--tokens 300");
    assert_eq!(
        (&own["text"]["name"], &own["text"]["random"]),
        (&"documents and code of Tandem".into(), &false.into())
    );
    assert!(own["router"]["tokens"] == 300 && !said.contains("random"), "{own} {said}");
    let (first, said) = of(&format!("--text {}", text.display()));
    assert_eq!(
        (&first["text"]["name"], &first["router"]["tokens"]),
        (&text.to_str().unwrap().into(), &240.into())
    );
    assert!(said.contains("the text has 240 tokens, not 4096"), "{said}");
    let (second, _) = of(&format!("--text {}", text.display()));
    assert_eq!((&second["cached"], &second["router"]), (&true.into(), &first["router"]));
    // Whoever gives no text has nothing against this one.
    assert_eq!(of("").0["cached"], true);
    std::fs::write(&text, "hello").unwrap();
    assert_eq!(of(&format!("--text {}", text.display())).0["router"]["tokens"], 5);
    std::fs::write(&text, " \n").unwrap();
    let line = format!("profile -m {} --router --text {}", folder.display(), text.display());
    assert_error(&call(home, &line), 2, "it is empty");
}

#[test]
fn what_makes_no_sense_is_one_sentence() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    for (line, code, want) in [
        ("inspect synth:tiny-llama --experts", 2, "--experts: synth:tiny-llama has no experts"),
        ("profile -m synth:tiny-llama --router", 2, "--router: synth:tiny-llama has no experts"),
        ("profile --router", 2, "--model"),
        ("profile -m synth:tiny-qwen3-moe --router --tokens 0", 2, "--tokens"),
        ("profile -m synth:tiny-qwen3-moe --router --text /nosuch", 1, "/nosuch"),
        (
            "profile -m synth:tiny-qwen3-moe --router --text Cargo.toml",
            2,
            "--text: synth:tiny-qwen3-moe has random weights",
        ),
        ("profile -m synth:tiny-qwen3-moe --router -o /nosuch/r.json", 1, "/nosuch"),
        ("plan --spec tiny-qwen3-moe --hardware t4-xeon --router-profile /nosuch", 1, "/nosuch"),
    ] {
        assert_error(&call(home, line), code, want);
    }
    let copy = home.join("copy.json");
    json(&call(home, &format!("profile -m {MODEL} --router --tokens 50 --json -o {}", copy.display())));
    let of = |model: &str| {
        let line = format!("plan -m {model} --hardware t4-xeon --router-profile {}", copy.display());
        call(home, &line)
    };
    assert_error(&of("synth:tiny-llama"), 1, "a profile of a router, but tiny-llama has no experts");
    assert_error(&of("synth:tiny-qwen3-moe,layers=3"), 1, "a router's profile of 2 layers, the model has 3");
    assert_error(&of("synth:tiny-granite-moe"), 1, "experts");
    let whole = std::fs::read_to_string(&copy).unwrap();
    std::fs::write(&copy, &whole[..whole.len() / 2]).unwrap();
    assert_error(&of(MODEL), 1, "not a profile of a router");
    // What is kept and damaged: reported where it is read, and recorded again.
    std::fs::write(kept(home), &whole[..whole.len() / 2]).unwrap();
    assert_error(&call(home, &format!("inspect {MODEL} --experts")), 1, "not a profile of a router");
    let out = call(home, &format!("plan -m {MODEL} --hardware t4-xeon --prompt-len 8 --gen-len 2 --json"));
    assert!(stderr(&out).contains("experts as if used alike: "), "{}", stderr(&out));
    assert_eq!(json(&out)["router"], "uniform");
    let out = call(home, &format!("profile -m {MODEL} --router --tokens 50 --json"));
    assert!(stderr(&out).contains("recording the router again: "), "{}", stderr(&out));
    assert_eq!(json(&out)["router"]["cached"], false);
    assert_eq!(std::fs::read_to_string(kept(home)).unwrap(), whole);
}
