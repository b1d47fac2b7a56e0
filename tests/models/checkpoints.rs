//! Tiny checkpoints of Hugging Face against the logits that transformers computes for them (`tests/fixtures/families.json`,
//! made by `make_families.py`): names of tensors, settings of config.json and the forward pass of a family at once.

use std::collections::BTreeMap;
use std::path::Path;

use crate::support::{models, naive_model, rounding};
use safetensors::tensor::{Dtype, TensorView};
use serde::Deserialize;
use serde_json::Value as Json;
use tandem::engine::{NewTokens, Options};
use tandem::model::{LoadedModel, export_gguf, load};
use tandem::program::Wants;
use tandem::simd::Isa;
use tandem::tensor::Half;

#[derive(Deserialize)]
struct Fixture {
    oracle: String,
    tokens: Vec<u32>,
    /// Positions whose logits are kept.
    rows: Vec<usize>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    title: String,
    config: Json,
    /// Changes all numbers: chosen so that no router's choice is close.
    salt: u32,
    tensors: BTreeMap<String, Vec<usize>>,
    /// Tensors of bytes.
    #[serde(default)]
    raw: BTreeMap<String, Vec<usize>>,
    logits: Vec<Vec<f32>>,
}

/// Standard deviation of the scores: 16 products of queries and keys of standard deviation 2, times a scale of about ¼.
const SCORES: f64 = 4.0;

fn fixture() -> Fixture {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// `bits` of make_families.py.
fn bits(name: &str, shape: &[usize], salt: u32) -> impl Iterator<Item = u64> {
    let fnv = |h: u32, b: u8| (h ^ u32::from(b)).wrapping_mul(0x0100_0193);
    let seed = u64::from(name.bytes().fold(0x811c_9dc5 ^ salt, fnv)) << 20;
    (0..shape.iter().product::<usize>() as u64).map(move |i| {
        let x = i + seed;
        let x = (x ^ (x >> 15)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let x = (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x >> 40
    })
}

/// A tensor's bytes: of `mxfp4` there.
fn bytes(name: &str, shape: &[usize], salt: u32) -> Vec<u8> {
    let scale = name.ends_with("_scales");
    bits(name, shape, salt).map(|x| if scale { 121 + x as u8 % 2 } else { x as u8 }).collect()
}

/// A tensor's elements: `weights` there.
fn elements(name: &str, shape: &[usize], salt: u32, norms_are_offsets: bool) -> Vec<u8> {
    let gain = if name.contains("q_proj") || name.contains("k_proj") { 2.0 } else { 1.0 };
    let each = |x: u64| {
        let unit = x as f64 / f64::from(1 << 23) - 1.0;
        let w = match shape {
            _ if name.contains("norm") => 0.5 * unit + if norms_are_offsets { 0.0 } else { 1.0 },
            _ if name.contains("sinks") => 4.0 * unit,
            [_] => 0.3 * unit,
            [.., cols] => unit * gain * (3.0 / *cols as f64).sqrt(),
            [] => unreachable!("no tensor is a scalar"),
        };
        (w as f32).to_le_bytes()
    };
    bits(name, shape, salt).flat_map(each).collect()
}

/// Writes the checkpoint of a case as `save_pretrained` would.
fn write(case: &Case, dir: &Path) {
    std::fs::write(dir.join("config.json"), case.config.to_string()).unwrap();
    let gemma = case.config["model_type"].as_str().unwrap().starts_with("gemma");
    let floats =
        case.tensors.iter().map(|(name, s)| (name, s, elements(name, s, case.salt, gemma), Dtype::F32));
    let raw = case.raw.iter().map(|(name, s)| (name, s, bytes(name, s, case.salt), Dtype::U8));
    let data: Vec<(&String, &Vec<usize>, Vec<u8>, Dtype)> = floats.chain(raw).collect();
    let views = data.iter().map(|(name, shape, bytes, dtype)| {
        (*name, TensorView::new(*dtype, shape.to_vec(), bytes).expect("as many bytes as the shape has"))
    });
    safetensors::serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
}

/// Compares the logits of `m` with those of a case, in every tier; returns what is out of bounds.
fn compare(what: &str, m: &LoadedModel, case: &Case, f: &Fixture) -> Vec<String> {
    let mut failures = Vec::new();
    for isa in models::tiers() {
        let mut options = Options::new(isa, f.tokens.len());
        (options.kv_dtype, options.threads) = (Half::F16.into(), Some(1));
        let mut engine = models::engine(m, &options);
        let seq = engine.add();
        let vocab = m.spec.vocab;
        let mut got = Vec::new();
        // A prompt, and then single tokens.
        let (prompt, rest) = f.tokens.split_at(16);
        for tokens in std::iter::once(prompt).chain(rest.chunks(1)) {
            let input = NewTokens { id: seq, tokens, wants: Wants::All };
            got.extend_from_slice(engine.forward(&[input]).unwrap());
        }
        let mut bound = rounding::cpu_and_cache(&m.spec, Half::F16, SCORES);
        if isa > Isa::Reference && !case.raw.is_empty() {
            // Both inputs of quantised experts are rounded to int8, as `rounding::activations` has it.
            bound += 4.0 * 2f64.powi(-6) / 3f64.sqrt() * (2.0 * m.spec.n_layers as f64).sqrt();
        }
        for (&row, want) in f.rows.iter().zip(&case.logits) {
            let (off, _) = models::distance(&got[row * vocab..(row + 1) * vocab], want);
            if off > bound {
                failures.push(format!("{what}, {isa}, row {row}: {off:.1e} of at most {bound:.1e}"));
            }
        }
    }
    failures
}

#[test]
fn checkpoints_compute_what_transformers_computes() {
    let f = fixture();
    println!("oracle: {}", f.oracle);
    let mut failures = Vec::new();
    for case in &f.cases {
        let dir = tempfile::tempdir().unwrap();
        write(case, dir.path());
        let m = load(dir.path().to_str().unwrap()).unwrap_or_else(|e| panic!("{}: {e}", case.title));
        failures.extend(compare(&case.title, &m, case, &f));
        // The same model from GGUF.
        let path = dir.path().join("m.gguf");
        std::fs::write(&path, export_gguf(&m).unwrap()).unwrap();
        let m = load(path.to_str().unwrap()).unwrap_or_else(|e| panic!("{} as GGUF: {e}", case.title));
        failures.extend(compare(&format!("{} as GGUF", case.title), &m, case, &f));
    }
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

/// The forward pass in f64 that the other tests hold kernels against agrees with transformers, too.
#[test]
fn the_naive_model_computes_what_transformers_computes() {
    let f = fixture();
    for case in &f.cases {
        let dir = tempfile::tempdir().unwrap();
        write(case, dir.path());
        let m = load(dir.path().to_str().unwrap()).unwrap();
        let got = naive_model::logits(&m.spec, &m.weights, Half::F16, &f.tokens);
        let bound = rounding::cpu_and_cache(&m.spec, Half::F16, SCORES);
        for (&row, want) in f.rows.iter().zip(&case.logits) {
            let got: Vec<f32> = got[row].iter().map(|&x| x as f32).collect();
            let (off, _) = models::distance(&got, want);
            assert!(off <= bound, "{}, row {row}: {off:.1e} of at most {bound:.1e}", case.title);
        }
    }
}
