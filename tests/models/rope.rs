//! Every kind of RoPE scaling, and the families with settings of their own, against the logits that transformers computes for tiny
//! checkpoints (`tests/fixtures/rope.json`, made by `make_rope.py`), with its defaults for what a config.json leaves out.

use std::collections::BTreeMap;
use std::path::Path;

use crate::support::{models, naive_model, rounding};
use safetensors::tensor::{Dtype, TensorView};
use serde::Deserialize;
use serde_json::{Value as Json, json};
use tandem::engine::{NewTokens, Options};
use tandem::model::formats::gguf::{Gguf, Value};
use tandem::model::{
    LoadedModel, Position, RopeScaling, describe, export_gguf, export_hf_folder, from_gguf, hf_spec, load,
};
use tandem::program::Wants;
use tandem::simd::Isa;
use tandem::tensor::{Bytes, DType, Half};

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
    tensors: BTreeMap<String, Vec<usize>>,
    logits: Vec<Vec<f32>>,
}

fn fixture() -> Fixture {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/rope.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// A tensor's elements: `weights` of make_rope.py.
fn elements(name: &str, shape: &[usize], norms_are_offsets: bool) -> Vec<u8> {
    let fnv = |h: u32, b: u8| (h ^ u32::from(b)).wrapping_mul(0x0100_0193);
    let seed = u64::from(name.bytes().fold(0x811c_9dc5, fnv)) << 20;
    let n = shape.iter().product::<usize>() as u64;
    let each = |i: u64| {
        let x = i + seed;
        let x = (x ^ (x >> 15)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let x = (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let unit = (x >> 40) as f64 / f64::from(1 << 23) - 1.0;
        let w = match shape {
            _ if name.contains("norm") => 0.5 * unit + if norms_are_offsets { 0.0 } else { 1.0 },
            [_] => 0.3 * unit,
            _ => unit * (3.0 / shape[1] as f64).sqrt(),
        };
        (w as f32).to_le_bytes()
    };
    (0..n).flat_map(each).collect()
}

/// Writes the checkpoint of a case as `save_pretrained` would.
fn write(case: &Case, dir: &Path) {
    std::fs::write(dir.join("config.json"), case.config.to_string()).unwrap();
    let gemma = case.config["model_type"].as_str().unwrap().starts_with("gemma");
    let data: Vec<(&str, &[usize], Vec<u8>)> = case
        .tensors
        .iter()
        .map(|(name, shape)| (name.as_str(), &shape[..], elements(name, shape, gemma)))
        .collect();
    let views = data.iter().map(|(name, shape, bytes)| {
        (*name, TensorView::new(Dtype::F32, shape.to_vec(), bytes).expect("as many bytes as the shape has"))
    });
    safetensors::serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
}

/// Standard deviation of the scores: products of queries and keys whose elements are about 1, times head_dim^-1/2.
const SCORES: f64 = 1.5;

/// How far logits may be from those of exact arithmetic. As `rounding::cpu`, which expects the other side to round keys and
/// values, too; here each layer's rounding to f16 (unit roundoff u) moves values by u/√3 of their size, root mean square, and
/// scores by u/√3 of their standard deviation: √(1 + SCORES²) of such errors a layer, and the worst row gets four times that.
fn bound(m: &LoadedModel) -> f64 {
    let cache = ((1.0 + SCORES * SCORES) * m.spec.n_layers as f64).sqrt() * 2f64.powi(-11) / 3f64.sqrt();
    rounding::cpu(&m.spec, Half::F16, false) + 4.0 * cache
}

/// Compares logits with those of a case; returns what is out of bounds.
fn compare(what: &str, m: &LoadedModel, case: &Case, f: &Fixture, got: &[Vec<f32>]) -> Option<String> {
    let (bound, worst) = (bound(m), distance(case, f, got));
    println!("{}, {what}: {worst:.1e} of {bound:.1e}", case.title);
    (worst > bound).then(|| format!("{}, {what}: {worst:.1e} of at most {bound:.1e}", case.title))
}

/// The worst distance of the rows that a case has.
fn distance(case: &Case, f: &Fixture, got: &[Vec<f32>]) -> f64 {
    let off = |(&row, want): (&usize, &Vec<f32>)| models::distance(&got[row], want).0;
    f.rows.iter().zip(&case.logits).map(off).fold(0.0, f64::max)
}

fn naive(m: &LoadedModel, f: &Fixture) -> Vec<Vec<f32>> {
    let rows = naive_model::logits(&m.spec, &m.weights, Half::F16, &f.tokens);
    rows.iter().map(|row| row.iter().map(|&x| x as f32).collect()).collect()
}

fn engine(m: &LoadedModel, f: &Fixture, isa: Isa) -> Vec<Vec<f32>> {
    let mut options = Options::new(isa, f.tokens.len());
    (options.kv_dtype, options.threads) = (Half::F16.into(), Some(1));
    let mut engine = models::engine(m, &options);
    let seq = engine.add();
    // A prompt, and then single tokens.
    let (prompt, rest) = f.tokens.split_at(20);
    let mut rows = Vec::new();
    for tokens in std::iter::once(prompt).chain(rest.chunks(1)) {
        let logits = engine.forward(&[NewTokens { id: seq, tokens, wants: Wants::All }]).unwrap();
        rows.extend(logits.chunks_exact(m.spec.vocab).map(<[f32]>::to_vec));
    }
    rows
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
        for isa in [Isa::Reference, Isa::best()] {
            failures.extend(compare(&isa.to_string(), &m, case, &f, &engine(&m, &f, isa)));
        }
        failures.extend(compare("the naive model", &m, case, &f, &naive(&m, &f)));
        // What the bound must not hide: no scaling, or none in windows.
        for local in [false, true] {
            let mut plain = m.clone();
            let Position::Rope(rope) = &mut plain.spec.position else { panic!("no RoPE") };
            let scaling = if local { &mut rope.local_scaling } else { &mut rope.scaling };
            let scaled = std::mem::replace(scaling, RopeScaling::None) != RopeScaling::None;
            if scaled && !case.title.contains("within") {
                let (off, bound) = (distance(case, &f, &naive(&plain, &f)), bound(&m));
                assert!(off > bound, "{}: no scaling moves logits by {off:.1e} only", case.title);
            }
        }

        // The same model written and read again, as a folder and as GGUF where that can carry it.
        let copy = dir.path().join("copy");
        export_hf_folder(&m, &copy, DType::F32, 1).unwrap_or_else(|e| panic!("{}: {e}", case.title));
        let back = load(copy.to_str().unwrap()).unwrap_or_else(|e| panic!("{} copied: {e}", case.title));
        assert_eq!(back.spec.max_context, m.spec.max_context, "{}", case.title);
        failures.extend(compare("copied", &back, case, &f, &engine(&back, &f, Isa::best())));
        match export_gguf(&m) {
            Ok(bytes) => {
                let gguf = Gguf::parse(Bytes::copy_of(&bytes)).unwrap();
                let back = from_gguf(gguf, "m.gguf".into()).unwrap_or_else(|e| panic!("{}: {e}", case.title));
                assert!(back.spec.max_context >= m.spec.max_context, "{}", case.title);
                failures.extend(compare("as GGUF", &back, case, &f, &engine(&back, &f, Isa::best())));
            }
            Err(e) => {
                let why = e.to_string();
                let known =
                    ["windows of", "dynamic RoPE", "without truncation", "no GGUF form", "windowed layers"];
                assert!(known.iter().any(|k| why.contains(k)), "{}: {why}", case.title);
            }
        }
    }
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

/// Where a test's own numbers are enough: what a config.json says that no model can have.
#[test]
fn impossible_settings_are_one_sentence() {
    let config = |rope: Json| {
        json!({
            "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
            "intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": 64, "rope_scaling": rope,
        })
    };
    let factors = json!([1, 1, 1, 1, 1, 1, 1, 1]);
    for (rope, want) in [
        (json!({"type": "yarn", "factor": 0}), "factor: 0, wanted a positive"),
        (json!({"type": "yarn"}), "rope_scaling.factor: missing"),
        (json!({"type": "yarn", "factor": "4"}), "rope_scaling.factor: \"4\", wanted a number"),
        (json!({"type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 1}), "beta_slow"),
        (json!({"type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 9}), "beta_slow"),
        (json!({"type": "yarn", "factor": 4, "attention_factor": -1}), "attention_factor: -1"),
        (json!({"type": "yarn", "factor": 4, "truncate": 1}), "truncate: 1, wanted true or false"),
        (json!({"type": "yarn", "factor": 1e39}), "factor: inf"),
        (
            json!({"type": "yarn", "factor": 4, "original_max_position_embeddings": 0}),
            "original_max_position",
        ),
        (json!({"type": "longrope", "short_factor": factors}), "rope_scaling.long_factor: missing"),
        (json!({"type": "longrope", "short_factor": factors, "long_factor": [1]}), "long_factor: 1 freq"),
        (json!({"type": "su", "short_factor": factors, "long_factor": [1, "x"]}), "wanted a list of numbers"),
        (
            json!({"type": "longrope", "short_factor": [0, 1, 1, 1, 1, 1, 1, 1], "long_factor": factors}),
            "short_factor: 0",
        ),
        (json!({"type": "dynamic", "factor": 0}), "factor: 0, wanted at least 1"),
        (json!({"type": "dynamic"}), "rope_scaling.factor: missing"),
        (json!({"rope_type": 3}), "rope_type: 3, wanted text"),
        (json!({"type": "mystery", "factor": 2}), "`mystery`"),
        (json!([1]), "rope_scaling"),
    ] {
        let found = hf_spec(&config(rope.clone())).and_then(|(_, spec)| spec.check());
        let e = found.expect_err(&rope.to_string()).to_string();
        assert!(e.contains(want) && !e.contains('\n'), "{rope}: {e:?} does not say {want:?}");
    }
    for (key, rope, want) in [
        ("rope_parameters", json!(7), "config.json: rope_parameters: 7, wanted an object"),
        (
            "rope_parameters",
            json!({"rope_type": "linear", "factor": "x"}),
            "config.json: rope_parameters.factor: \"x\"",
        ),
        (
            "rope_parameters",
            json!({"full_attention": {}, "sliding_attention": {"rope_type": "yarn"}}),
            "config.json: rope_parameters.sliding_attention.factor: missing",
        ),
    ] {
        let mut all = config(Json::Null);
        all[key] = rope;
        let e = hf_spec(&all).map(|_| ()).expect_err(want).to_string();
        assert!(e.contains(want), "{e:?} does not say {want:?}");
    }
    // As many tokens as vLLM allows: the stated number times the factor, or the original number times it.
    for (rope, want) in [
        (json!({"type": "linear", "factor": 2.5}), 160),
        (json!({"type": "dynamic", "factor": 2.0}), 128),
        (json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}), 128),
        (
            json!({"type": "longrope", "short_factor": factors, "long_factor": factors,
                "original_max_position_embeddings": 16}),
            64,
        ),
    ] {
        let (_, spec) = hf_spec(&config(rope.clone())).unwrap();
        assert_eq!(spec.max_context, want, "{rope}");
    }
}

/// llama.cpp's rules for YaRN: the recommended factor of cosines and sines, or with a log multiplier the ratio of two, times that
/// of the file.
#[test]
fn keys_of_gguf_mean_what_llama_cpp_reads() {
    let m = load("synth:tiny-llama,dtype=f32,layers=1").unwrap();
    let bytes = Bytes::copy_of(&export_gguf(&m).unwrap());
    let spec = |keys: &[(&str, Value)]| {
        let mut gguf = Gguf::parse(bytes.clone()).unwrap();
        for (key, v) in keys {
            gguf.metadata.insert(format!("llama.{key}"), v.clone());
        }
        from_gguf(gguf, "m.gguf".into())
    };
    let (float, text) = (Value::Float, |s: &str| Value::String(s.into()));
    let yarn = [("rope.scaling.type", text("yarn")), ("rope.scaling.factor", float(4.0))];
    let recommended = 0.1 * 4f64.ln() + 1.0;
    let half = 0.05 * 4f64.ln() + 1.0;
    for (own, want) in [
        (vec![], recommended),
        (vec![("rope.scaling.attn_factor", float(0.5))], 0.5 * recommended),
        (vec![("rope.scaling.yarn_log_multiplier", float(1.0))], 1.0),
        (vec![("rope.scaling.yarn_log_multiplier", float(0.5))], recommended / half),
        (vec![("rope.scaling.yarn_ext_factor", float(-1.0))], recommended),
    ] {
        let m = spec(&[&yarn[..], &own].concat()).unwrap();
        let Position::Rope(rope) = &m.spec.position else { panic!("no RoPE") };
        let RopeScaling::Yarn { factor, attention_factor, original_context, .. } = rope.scaling else {
            panic!("{:?}", rope.scaling)
        };
        assert_eq!((factor, original_context), (4.0, 512));
        assert!(
            (f64::from(attention_factor) / want - 1.0).abs() < 1e-6,
            "{own:?}: {attention_factor}, not {want}"
        );
        assert_eq!(m.spec.max_context, 2048, "four times the original context");
        let said = describe(&m).position;
        assert!(said.contains("yarn scaling 4x of 512 tokens"), "{said}");
    }
    for (own, want) in [
        (vec![("rope.scaling.type", text("longrope"))], "rope_factors_long.weight: missing"),
        (vec![("rope.scaling.type", text("mystery"))], "`mystery`"),
        (vec![("rope.scaling.yarn_ext_factor", float(0.5)), yarn[0].clone()], "yarn_ext_factor: 0.5"),
        (vec![("rope.scaling.yarn_beta_slow", float(32.0)), yarn[0].clone()], "beta_slow"),
        (vec![("rope.scaling.factor", float(f64::NAN)), yarn[0].clone()], "factor: NaN"),
    ] {
        let e = spec(&own).map(|_| ()).expect_err(want).to_string();
        assert!(e.contains(want), "{own:?}: {e:?} does not say {want:?}");
    }
}

/// Queries that grow with their position are not computed, so no run may reach the first such position.
#[test]
fn contexts_beyond_the_first_growth_of_queries_are_refused() {
    let mut m = load("synth:tiny-mistral3,dtype=f32,layers=1").unwrap();
    let Position::Rope(rope) = &mut m.spec.position else { panic!("no RoPE") };
    rope.query_scaling = Some(tandem::model::QueryScaling { beta: 0.1, original_context: 32 });
    let engine = |context| {
        let options = Options::new(Isa::Reference, context);
        tandem::engine::Engine::new(m.spec.clone(), &m.weights, &options, &|_| ()).map(|_| ())
    };
    engine(32).unwrap();
    let e = engine(33).unwrap_err().to_string();
    assert!(e.contains("llama_4_scaling_beta 0.1") && e.contains("32"), "{e}");
}
