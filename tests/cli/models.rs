//! Commands on real and on broken model files.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::support::command::{TOKENIZER, assert_error, json, run, stderr, stdout, tandem};
use crate::support::models::smollm2;

/// Broken model files, by what is wrong with them.
fn broken(folder: &Path) -> Vec<(&'static str, PathBuf)> {
    let header = |version: u32, tensors: u64, keys: u64| {
        [b"GGUF".as_slice(), &version.to_le_bytes(), &tensors.to_le_bytes(), &keys.to_le_bytes()].concat()
    };
    let key = |name: &str, kind: u32, value: &[u8]| {
        [(name.len() as u64).to_le_bytes().as_slice(), name.as_bytes(), &kind.to_le_bytes(), value].concat()
    };
    let text = |s: &str| [(s.len() as u64).to_le_bytes().as_slice(), s.as_bytes()].concat();
    // A string of 2^63 bytes, an array of 2^61 entries, an array of arrays of arrays...
    let long_string = [header(3, 0, 1), key("a", 8, &(1u64 << 63).to_le_bytes())].concat();
    let long_array = [header(3, 0, 1), key("a", 9, &[4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32])].concat();
    let nested = [9u32.to_le_bytes().as_slice(), &1u64.to_le_bytes()].concat().repeat(10_000);
    let nested = [header(3, 0, 1), key("a", 9, &nested)].concat();
    let stranger = [header(3, 0, 1), key("general.architecture", 8, &text("perceptron"))].concat();
    let files: Vec<(&'static str, Vec<u8>)> = vec![
        ("empty", vec![]),
        ("text", b"hello, I am no model".to_vec()),
        ("magic only", b"GGUF".to_vec()),
        ("version 1", header(1, 0, 0)),
        ("version 99", header(99, 0, 0)),
        ("big endian", [b"GGUF".as_slice(), &3u32.to_be_bytes(), &[0; 16]].concat()),
        ("2^60 tensors", header(3, 1 << 60, 0)),
        ("2^60 keys", header(3, 0, 1 << 60)),
        ("long string", long_string),
        ("long array", long_array),
        ("nested arrays", nested),
        ("nothing inside", header(3, 0, 0)),
        ("unknown architecture", stranger),
    ];
    let write = |(name, bytes): (&'static str, Vec<u8>)| {
        let path = folder.join(format!("{}.gguf", name.replace(' ', "_")));
        std::fs::write(&path, bytes).unwrap();
        (name, path)
    };
    files.into_iter().map(write).collect()
}

#[test]
fn broken_models_are_one_sentence() {
    let dir = tempfile::tempdir().unwrap();
    for (what, path) in broken(dir.path()) {
        for command in COMMANDS {
            let output = run(tandem(dir.path()).args(words(command, path.to_str().unwrap())));
            println!("{what}: {}", stderr(&output).trim_end());
            assert_error(&output, 1, "");
        }
    }
}

#[test]
fn truncated_models_are_one_sentence() {
    let Some(model) = smollm2() else { return };
    let dir = tempfile::tempdir().unwrap();
    let whole = std::fs::read(model).unwrap();
    for keep in [100, 5_000, 500_000, 1_800_000, 50_000_000, whole.len() - 1] {
        let path = dir.path().join("cut.gguf");
        std::fs::write(&path, &whole[..keep]).unwrap();
        for command in COMMANDS {
            let output = run(tandem(dir.path()).args(words(command, path.to_str().unwrap())));
            println!("{keep} bytes: {}", stderr(&output).trim_end());
            assert_error(&output, 1, "");
        }
    }
}

#[test]
fn folders_without_the_right_files_are_one_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("model");
    std::fs::create_dir(&folder).unwrap();
    for (name, content) in
        [("", ""), ("config.json", "{"), ("tokenizer.json", "{}"), ("model.safetensors", "x")]
    {
        if !name.is_empty() {
            std::fs::write(folder.join(name), content).unwrap();
        }
        for command in COMMANDS {
            let output = run(tandem(dir.path()).args(words(command, folder.to_str().unwrap())));
            println!("with {name}: {}", stderr(&output).trim_end());
            assert_error(&output, 1, "");
        }
    }
}

/// What people take for a model, and what the message says it is.
const MISTAKEN: &[(&str, &[u8], &str)] = &[
    ("page.gguf", b"<!DOCTYPE html><html><title>Sign in</title></html>", "this is a web page"),
    ("lfs.gguf", LFS, "this is a Git LFS pointer"),
    ("model.bin", b"\x80\x02}q\x00X\x01\x00\x00\x00aq\x01K\x01s.", "this is a Python pickle"),
    ("pytorch_model.bin", b"PK\x03\x04\x14\x00\x00\x00", "this is a zip archive"),
    ("old.ggml", b"tjgg\x03\x00\x00\x00\x00\x00\x00\x00", "a ggml file from before GGUF"),
    ("model.gguf.gz", b"\x1f\x8b\x08\x00", "this is a compressed file"),
];

const LFS: &[u8] = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 98362432\n";

#[test]
fn what_is_taken_for_a_model_is_recognised() {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes, want) in MISTAKEN {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        for command in COMMANDS {
            assert_error(&run(tandem(dir.path()).args(words(command, path.to_str().unwrap()))), 1, want);
        }
    }
}

#[test]
fn folders_that_hold_something_else_say_what() {
    let dir = tempfile::tempdir().unwrap();
    let m = tandem::model::load("synth:tiny-llama").unwrap();
    let whole = dir.path().join("whole");
    tandem::model::export_hf_folder(&m, &whole, tandem::tensor::DType::BF16, 1).unwrap();
    let config = std::fs::read(whole.join("config.json")).unwrap();
    let cases: [(&str, &[(&str, &[u8])], &str); 6] = [
        ("one", &[("m.gguf", b"GGUF")], "give the file in it, m.gguf"),
        (
            "two",
            &[("a.gguf", b"GGUF"), ("b.gguf", b"GGUF")],
            "give one of the files in it, like a.gguf, b.gguf",
        ),
        ("adapter", &[("adapter_config.json", b"{}")], "an adapter (LoRA), not a model"),
        (
            "pickle",
            &[("config.json", &config), ("pytorch_model.bin", b"PK")],
            "weights in pickles are not read",
        ),
        ("lfs", &[("config.json", &config), ("model.safetensors", LFS)], "this is a Git LFS pointer"),
        ("lfs config", &[("config.json", LFS)], "this is a Git LFS pointer"),
    ];
    for (name, files, want) in cases {
        let folder = dir.path().join(name);
        std::fs::create_dir(&folder).unwrap();
        for (file, bytes) in files {
            std::fs::write(folder.join(file), bytes).unwrap();
        }
        for command in COMMANDS {
            assert_error(&run(tandem(dir.path()).args(words(command, folder.to_str().unwrap()))), 1, want);
        }
    }
}

#[test]
fn random_weights_are_described_without_being_made() {
    let dir = tempfile::tempdir().unwrap();
    // 325 GiB.
    let report = json(&run(tandem(dir.path()).args(["inspect", "--json", "synth:opt-175b"])));
    assert_eq!(report["layers"], 96);
    assert!(report["weight_bytes"].as_u64().unwrap() > 340_000_000_000, "{report}");
    // Where they can be made, they are what was described.
    let m = tandem::model::load("synth:tiny-gemma3,dtype=q4_0").unwrap();
    let made = serde_json::to_value(tandem::model::describe(&m)).unwrap();
    let described =
        json(&run(tandem(dir.path()).args(["inspect", "--json", "synth:tiny-gemma3,dtype=q4_0"])));
    for (key, value) in made.as_object().unwrap() {
        assert_eq!(&described[key], value, "{key}");
    }
    assert_eq!(
        stdout(&run(tandem(dir.path()).args(["inspect", "-m", "synth:tiny-opt"]))).lines().count(),
        13
    );
    for (name, want) in [
        ("synth:nosuch", "no such spec; give the path of a config.json or one of smollm2-135m"),
        ("synth:tiny-llama,layers=0", "layers=0: wanted 1 to 4096"),
        ("synth:tiny-llama,ctx=99999999999", "wanted 1 to 268435456"),
    ] {
        for command in ["generate -m MODEL x", "bench -m MODEL", "inspect MODEL"] {
            let output = run(tandem(dir.path()).args(words(command, name)));
            assert_error(&output, 2, want);
            // Nothing is announced that is not begun.
            assert_eq!(stderr(&output).lines().count(), 1, "{}", stderr(&output));
        }
    }
}

#[test]
fn the_names_of_random_weights_are_documented() {
    let docs = include_str!("../../docs/models.md");
    for name in tandem::model::synth::names() {
        assert!(docs.contains(&format!("`{name}`")), "docs/models.md: {name}");
    }
}

#[test]
fn a_folder_without_a_tokenizer_is_measured_but_not_given_text() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("model");
    let m = tandem::model::load("synth:tiny-llama").unwrap();
    tandem::model::export_hf_folder(&m, &folder, tandem::tensor::DType::BF16, 1).unwrap();
    let folder = folder.to_str().unwrap();
    for command in ["generate -m MODEL hello", "tokenize -m MODEL hello", "perplexity -m MODEL Cargo.toml"] {
        assert_error(&run(tandem(dir.path()).args(words(command, folder))), 1, "tokenizer.json: missing");
    }
    let report = json(&run(tandem(dir.path()).args(words("inspect MODEL --json", folder))));
    assert_eq!(report["tokenizer"], "none: tokenizer.json is missing");
    let bench = "bench -m MODEL --json --prompt 4 --gen 2 --repeat 1";
    json(&run(tandem(dir.path()).args(words(bench, folder))));
}

#[test]
fn a_tokenizer_of_another_model_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let m = tandem::model::load("synth:tiny-llama").unwrap();
    let folder = dir.path().join("model");
    tandem::model::export_hf_folder(&m, &folder, tandem::tensor::DType::BF16, 1).unwrap();
    std::fs::write(folder.join("tokenizer.json"), TOKENIZER.replace(r#""?":4"#, r#""?":400000"#)).unwrap();
    for command in ["generate -m MODEL xyz", "perplexity --json -m MODEL Cargo.toml"] {
        let output = run(tandem(dir.path()).args(words(command, folder.to_str().unwrap())));
        assert_error(&output, 1, "tokenizer: gives token 400000, the model has");
    }
    // A template that leaves nothing of the question is told apart from an empty question.
    std::fs::write(folder.join("tokenizer.json"), TOKENIZER).unwrap();
    std::fs::write(folder.join("tokenizer_config.json"), r#"{"chat_template": "{# #}"}"#).unwrap();
    let output = run(tandem(dir.path()).args(words("generate -m MODEL xyz", folder.to_str().unwrap())));
    assert_error(&output, 1, "chat template: renders nothing");
}

#[test]
fn names_out_of_models_do_not_speak_to_the_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let mut m = tandem::model::load("synth:tiny-llama").unwrap();
    m.spec.name = "\x1b[2Jnice\nsource       elsewhere\x07".into();
    let path = dir.path().join("m.gguf");
    std::fs::write(&path, tandem::model::export_gguf(&m).unwrap()).unwrap();
    let shown = stdout(&run(tandem(dir.path()).arg("inspect").arg(&path)));
    assert!(!shown.contains(['\x1b', '\x07']) && shown.contains("nice source"), "{shown}");
    let missing = run(tandem(dir.path()).args(["inspect", "no\x1b[31mfile"]));
    assert_error(&missing, 2, "no\\u{1b}[31mfile: no such file");
}

/// A split model is one: its files are counted, and any that is not the first is told from it. Neither another one's file in the
/// place of one of its own nor a missing one is a model.
#[test]
fn a_split_model_is_described_as_one() {
    let dir = tempfile::tempdir().unwrap();
    let export = |spec: &str, name: &str| {
        let m = tandem::model::load(spec).unwrap();
        tandem::model::export_split_gguf(&m, dir.path(), name, 3).unwrap()
    };
    let (first, other) =
        (export("synth:tiny-llama,dtype=q2_k", "m"), export("synth:tiny-qwen3,layers=3", "other"));
    let part = |name: &str, number: usize| dir.path().join(format!("{name}-{number:05}-of-00003.gguf"));
    let size = |path: PathBuf| std::fs::metadata(path).unwrap().len();
    let inspect = |path: &Path, extra: &[&str]| run(tandem(dir.path()).arg("inspect").arg(path).args(extra));
    let report = json(&inspect(&first, &["--json"]));
    assert_eq!(report["files"], 3, "{report}");
    assert_eq!(report["file_bytes"], (1..=3).map(|i| size(part("m", i))).sum::<u64>());
    let words = stdout(&inspect(&first, &[]));
    assert!(words.lines().any(|l| l.starts_with("files        3, ") && l.ends_with(" together")), "{words}");
    let bench = "bench -m MODEL --json --prompt 4 --gen 2 --repeat 1";
    json(&run(tandem(dir.path()).args(self::words(bench, first.to_str().unwrap()))));
    assert_error(
        &inspect(&part("m", 2), &[]),
        2,
        "file 2 of a model of 3 files; give the first, m-00001-of-00003.gguf",
    );
    std::fs::rename(part("other", 2), part("m", 2)).unwrap();
    assert_error(&inspect(&first, &[]), 1, "m-00002-of-00003.gguf: split.tensors.count");
    let missing = format!("{}: missing, one of the 3 files", part("other", 2).display());
    assert_error(&inspect(&other, &[]), 1, &missing);
}

#[test]
fn a_pipe_is_no_model() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pipe");
    let c_path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: the path is a C string.
    assert_eq!(unsafe { libc::mkfifo(c_path.as_ptr(), 0o600) }, 0);
    for command in COMMANDS {
        assert_error(
            &run(tandem(dir.path()).args(words(command, path.to_str().unwrap()))),
            1,
            "not a regular file",
        );
    }
}

#[test]
fn weights_that_are_no_numbers_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let mut m = tandem::model::load("synth:tiny-llama").unwrap();
    let d = m.spec.d_model;
    let nan = tandem::tensor::Bytes::copy_of(&f32::NAN.to_le_bytes().repeat(d));
    let norm = tandem::tensor::Tensor::new(tandem::tensor::DType::F32, vec![d], nan).unwrap();
    m.weights.insert("blk.0.attn_norm.weight", norm);
    let folder = dir.path().join("model");
    tandem::model::export_hf_folder(&m, &folder, tandem::tensor::DType::BF16, 1).unwrap();
    std::fs::write(folder.join("tokenizer.json"), TOKENIZER).unwrap();
    let folder = folder.to_str().unwrap();
    for command in [
        "generate -m MODEL hello",
        "generate -m MODEL --json --logprobs 2 hello",
        "perplexity -m MODEL Cargo.toml",
        "perplexity --json -m MODEL Cargo.toml",
    ] {
        assert_error(&run(tandem(dir.path()).args(words(command, folder))), 1, "not numbers");
    }
}

/// Commands that load a model (MODEL).
const COMMANDS: &[&str] = &["tokenize -m MODEL hello", "inspect MODEL --json"];

fn words<'a>(command: &'a str, model: &'a str) -> impl Iterator<Item = &'a str> {
    command.split(' ').map(move |w| if w == "MODEL" { model } else { w })
}

fn with_stdin(command: &mut Command, input: &[u8]) -> std::process::Output {
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn tokenize_prints_ids_and_pieces() {
    let Some(model) = smollm2() else { return };
    let dir = tempfile::tempdir().unwrap();
    let tokenize = || {
        let mut command = tandem(dir.path());
        command.args(["tokenize", "-m"]).arg(&model);
        command
    };
    let report = json(&run(tokenize().args(["--json", "The capital of France is"])));
    assert_eq!(report["ids"], serde_json::json!([504, 3575, 282, 4649, 314]));
    assert_eq!(report["pieces"], serde_json::json!(["The", " capital", " of", " France", " is"]));
    assert_eq!(stdout(&run(tokenize().arg("The capital"))), "504\n3575\n");
    // From a file and from standard input every byte counts.
    let file = dir.path().join("text");
    std::fs::write(&file, "The capital\n").unwrap();
    let from_file = json(&run(tokenize().arg("--json").arg("-f").arg(&file)));
    assert_eq!(from_file["pieces"], serde_json::json!(["The", " capital", "\n"]));
    assert_eq!(json(&with_stdin(tokenize().arg("--json"), b"The capital\n")), from_file);
    assert_eq!(stdout(&run(tokenize().arg(""))), "");
    // Control tokens are tokens, unless --no-special says that they are text.
    assert_eq!(stdout(&run(tokenize().arg("<|im_end|>"))), "2\n");
    assert!(stdout(&run(tokenize().args(["--no-special", "<|im_end|>"]))).lines().count() > 1);
    assert_error(&with_stdin(&mut tokenize(), b"ab\xff"), 1, "not UTF-8 text (byte 2)");
    assert_error(&run(tokenize().args(["-f", "no/such/file"])), 1, "no/such/file: No such file");
}

#[test]
fn what_cannot_be_tokenized() {
    let dir = tempfile::tempdir().unwrap();
    assert_error(
        &run(tandem(dir.path()).args(["tokenize", "-m", "synth:llama-3.2-1b", "x"])),
        2,
        "no tokenizer",
    );
    assert_error(
        &run(tandem(dir.path()).args(["tokenize", "-m", "nosuch", "x"])),
        2,
        "no such file or folder",
    );
}
