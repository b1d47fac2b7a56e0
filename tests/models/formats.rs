//! The same model through every format; folders that are damaged in every way we know.

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use serde_json::{Value as Json, json};
use tandem::model::formats::gguf::{Gguf, Value};
use tandem::model::{
    LoadedModel, Position, RopePairing, RopeScaling, export_gguf, export_hf_folder, export_split_gguf, load,
    validate,
};
use tandem::reference::dequant::dequantise;
use tandem::rope::RopeTable;
use tandem::tensor::{Bytes, DType};

fn synth(what: &str) -> LoadedModel {
    load(&format!("synth:{what}")).unwrap()
}

fn open(dir: &Path) -> Result<LoadedModel, String> {
    load(dir.to_str().unwrap()).map_err(|e| e.to_string())
}

/// Equal but for the rounding of norms that went through w - 1 and back.
fn assert_same_weights(a: &LoadedModel, b: &LoadedModel) {
    let names = |m: &LoadedModel| m.weights.iter().map(|(n, _)| n.to_owned()).collect::<Vec<_>>();
    assert_eq!(names(a), names(b));
    for (name, x) in a.weights.iter() {
        let y = b.weights.get(name).unwrap();
        assert_eq!(x.shape, y.shape, "{name}");
        let norm_rounding = if name.ends_with("_norm.weight") { f32::EPSILON } else { 0.0 };
        for (i, (x, y)) in dequantise(x).iter().zip(dequantise(y)).enumerate() {
            assert!((x - y).abs() <= norm_rounding, "{name} element {i}: {x} became {y}");
        }
    }
}

/// Families with experts.
const EXPERTS: [&str; 5] = ["qwen3-moe", "qwen2-moe", "mixtral", "olmoe", "granite-moe"];

#[test]
fn every_family_survives_a_hugging_face_folder() {
    let dense =
        ["llama", "llama3", "llama-80", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "olmo2", "opt"];
    for name in dense.into_iter().chain(EXPERTS) {
        for (dtype, shards) in [(DType::F32, 1), (DType::BF16, 3)] {
            let m = synth(&format!("tiny-{name},dtype={dtype}"));
            let dir = tempfile::tempdir().unwrap();
            export_hf_folder(&m, dir.path(), dtype, shards).unwrap();
            let back = open(dir.path()).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(back.spec, m.spec, "{name}");
            if dtype == DType::F32 {
                assert_same_weights(&m, &back);
            } else {
                let t = |m: &LoadedModel| m.weights.get("blk.1.attn_output.weight").unwrap().data.to_vec();
                assert_eq!(t(&m), t(&back), "{name}: bf16 goes through unchanged");
            }
        }
    }
}

#[test]
fn every_type_of_weights_survives_gguf() {
    for dtype in DType::ALL {
        let m = synth(&format!("tiny-qwen3,dtype={dtype}"));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        fs::write(&path, export_gguf(&m).unwrap()).unwrap();
        let back = load(path.to_str().unwrap()).unwrap_or_else(|e| panic!("{dtype}: {e}"));
        let t = |m: &LoadedModel| {
            let t = m.weights.get("blk.1.ffn_down.weight").unwrap();
            (t.dtype, t.data.to_vec())
        };
        assert_eq!(t(&back).0, dtype);
        assert!(t(&m) == t(&back), "{dtype}: bytes of a tensor changed");
    }
}

/// Split into files, of which the last may be without tensors, and put together again.
#[test]
fn a_split_model_is_the_model() {
    let m = synth("tiny-llama,dtype=q4_k,seed=5");
    let dir = tempfile::tempdir().unwrap();
    let one = dir.path().join("m.gguf");
    fs::write(&one, export_gguf(&m).unwrap()).unwrap();
    let whole = load(one.to_str().unwrap()).unwrap();
    let tensors = Gguf::open(&one).unwrap().tensors.len();
    for count in [2, 3, 7, tensors + 3] {
        let first = export_split_gguf(&m, dir.path(), "m", count).unwrap();
        let parts = load(first.to_str().unwrap()).unwrap_or_else(|e| panic!("{count} files: {e}"));
        assert_eq!(parts.spec, whole.spec, "{count} files");
        let bytes = |m: &LoadedModel| -> Vec<_> {
            m.weights.iter().map(|(n, t)| (n.to_owned(), t.dtype, t.shape.clone(), t.data.to_vec())).collect()
        };
        assert!(bytes(&parts) == bytes(&whole), "{count} files: weights differ");
        assert!(parts.weights.get("blk.1.ffn_down.weight").unwrap().data.is_mapped(), "zero copy");
        let names = (1..=count).map(|i| dir.path().join(format!("m-{i:05}-of-{count:05}.gguf")));
        let size: u64 = names.map(|path| fs::metadata(path).unwrap().len()).sum();
        assert_eq!((parts.files.count, parts.files.bytes), (count, size));
        let last = dir.path().join(format!("m-{count:05}-of-{count:05}.gguf"));
        let said = open(&last).unwrap_err();
        assert!(said.contains(&format!("give the first, m-00001-of-{count:05}.gguf")), "{said}");
        fs::remove_file(&last).unwrap();
        let said = open(&first).unwrap_err();
        assert!(said.contains(last.to_str().unwrap()) && said.contains("missing"), "{said}");
    }
}

/// A model without a name is called as its files are.
#[test]
fn a_split_model_without_a_name_is_called_by_its_files() {
    let mut m = synth("tiny-llama,dtype=q8_0");
    m.spec.name = String::new();
    let dir = tempfile::tempdir().unwrap();
    let first = export_split_gguf(&m, dir.path(), "some-model", 2).unwrap();
    assert_eq!(load(first.to_str().unwrap()).unwrap().spec.name, "some-model");
}

#[test]
fn every_family_survives_gguf() {
    for name in ["llama", "llama-80", "qwen2", "qwen3", "gemma2", "gemma3", "olmo2"] {
        let m = synth(&format!("tiny-{name},dtype=q4_k"));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        fs::write(&path, export_gguf(&m).unwrap()).unwrap();
        let back = load(path.to_str().unwrap()).unwrap_or_else(|e| panic!("{name}: {e}"));
        let mut spec = back.spec.clone();
        if let Position::Rope(r) = &mut spec.position {
            assert_eq!(r.pairing == RopePairing::Interleaved, name.starts_with("llama"), "{name}");
            r.pairing = RopePairing::Half;
        }
        assert_eq!(spec, m.spec, "{name}");
        // And from there to a folder: what was permuted is put right again.
        let folder = dir.path().join("hf");
        export_hf_folder(&back, &folder, DType::F32, 1).unwrap();
        assert_same_weights(&m, &open(&folder).unwrap());
    }
}

#[test]
fn interleaved_rows_are_where_the_format_puts_them() {
    // Head of 64: row 1 of the permuted matrix is row 32 of the original, row 2 is row 1.
    let m = synth("tiny-llama,dtype=f32");
    let g = Gguf::parse(Bytes::copy_of(&export_gguf(&m).unwrap())).unwrap();
    let (_, t) = g.tensors.iter().find(|(n, _)| n == "blk.0.attn_q.weight").unwrap();
    let original = m.weights.get("blk.0.attn_q.weight").unwrap();
    for (to, from) in [(0, 0), (1, 32), (2, 1), (3, 33), (63, 63), (64, 64), (65, 96)] {
        assert_eq!(t.row(to), original.row(from), "row {to}");
    }
}

#[test]
fn rope_factors_come_from_the_file() {
    let mut m = synth("tiny-llama,dtype=q8_0");
    let factors: Vec<f32> = (0..32).map(|i| 1.0 + i as f32).collect();
    let Position::Rope(r) = &mut m.spec.position else { unreachable!() };
    r.scaling = RopeScaling::Factors(factors.clone());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    fs::write(&path, export_gguf(&m).unwrap()).unwrap();
    let back = load(path.to_str().unwrap()).unwrap();
    let Position::Rope(r) = &back.spec.position else { unreachable!() };
    assert_eq!(r.scaling, RopeScaling::Factors(factors));
    assert!(back.weights.get("rope_freqs.weight").is_none(), "it is part of the spec now");
}

/// GGUF has no keys for Llama 3's rule, so its factors are written.
#[test]
fn the_rule_of_llama_3_becomes_factors() {
    let mut m = synth("tiny-llama,dtype=q8_0");
    let Position::Rope(r) = &mut m.spec.position else { unreachable!() };
    r.scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 128,
    };
    let by_rule = RopeTable::new(r, 512).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    fs::write(&path, export_gguf(&m).unwrap()).unwrap();
    let back = load(path.to_str().unwrap()).unwrap();
    let Position::Rope(r) = &back.spec.position else { unreachable!() };
    let RopeScaling::Factors(factors) = &r.scaling else { panic!("{:?}", r.scaling) };
    // Waves that turn often keep their pace, the slowest turn 8 times slower, some are between.
    assert_eq!((factors[0], factors[31]), (1.0, 8.0));
    assert!(factors.iter().any(|&f| f > 1.01 && f < 7.9), "{factors:?}");
    let by_factors = RopeTable::new(r, 512).unwrap();
    for position in [0, 1, 100, 5000] {
        let (mut a, mut b) = ([[0.0f32; 32]; 2], [[0.0f32; 32]; 2]);
        let [cos, sin] = &mut a;
        by_rule.cos_sin(position, cos, sin);
        let [cos, sin] = &mut b;
        by_factors.cos_sin(position, cos, sin);
        for (a, b) in a.as_flattened().iter().zip(b.as_flattened()) {
            // The factor is an f32: an angle of 5000 keeps 6e-8 of itself.
            assert!((a - b).abs() <= 4e-4, "{position}: {a} {b}");
        }
    }
}

#[test]
fn the_text_side_of_a_folder() {
    let m = synth("tiny-llama");
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    export_hf_folder(&m, d, DType::BF16, 1).unwrap();
    let put = |name: &str, v: Json| fs::write(d.join(name), v.to_string()).unwrap();
    assert!(open(d).unwrap().chat_template.is_none());
    put(
        "generation_config.json",
        json!({"eos_token_id": [2, 7], "temperature": 0.6, "top_k": 20, "top_p": 0.95}),
    );
    put(
        "tokenizer_config.json",
        json!({"chat_template": [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]}),
    );
    let l = open(d).unwrap();
    assert_eq!((l.eos_ids, l.chat_template.as_deref()), (vec![2, 7], Some("D")));
    assert_eq!(
        (l.sampling.temperature, l.sampling.top_k, l.sampling.top_p),
        (Some(0.6), Some(20), Some(0.95))
    );
    fs::write(d.join("chat_template.jinja"), "J").unwrap();
    assert_eq!(open(d).unwrap().chat_template.as_deref(), Some("J"));
    fs::write(d.join("tokenizer_config.json"), "{").unwrap();
    assert!(open(d).unwrap_err().contains("not valid JSON"));
}

/// A folder made by `make`, with its config.json edited.
fn complaint(model: &str, edit: impl Fn(&mut Json)) -> String {
    let dir = tempfile::tempdir().unwrap();
    export_hf_folder(&synth(model), dir.path(), DType::BF16, 1).unwrap();
    let path = dir.path().join("config.json");
    let mut c: Json = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    edit(&mut c);
    fs::write(&path, c.to_string()).unwrap();
    open(dir.path()).map(|_| ()).expect_err("accepted")
}

#[test]
fn wrong_configurations_get_one_sentence() {
    let set = |key: &'static str, v: Json| move |c: &mut Json| c[key] = v.clone();
    for (model, key, value, want) in [
        ("tiny-llama", "model_type", json!("mamba"), "`mamba`, which is not supported; supported are llama"),
        ("tiny-llama", "model_type", json!(3), "model_type: missing"),
        ("tiny-llama", "hidden_size", json!("wide"), "config.json: hidden_size: \"wide\", wanted a size"),
        ("tiny-llama", "hidden_size", json!(-1), "wanted a size"),
        ("tiny-llama", "hidden_size", Json::Null, "hidden_size: missing"),
        ("tiny-llama", "num_attention_heads", json!(0), "head count: 0"),
        ("tiny-llama", "num_key_value_heads", json!(3), "cannot share 3 KV heads"),
        ("tiny-llama", "num_hidden_layers", json!(1u64 << 60), "layers, wanted at most"),
        ("tiny-llama", "num_hidden_layers", json!(3), "model.layers.2.attn"),
        ("tiny-llama", "num_hidden_layers", json!(1), "model.layers.1."),
        (
            "tiny-llama",
            "intermediate_size",
            json!(768),
            "shape [256, 512], config.json implies [256, 768]; is a shard missing?",
        ),
        ("tiny-llama", "rms_norm_eps", json!(0.0), "norm epsilon"),
        ("tiny-llama", "rope_theta", json!(-5.0), "RoPE base"),
        (
            "tiny-llama",
            "rope_scaling",
            json!({"rope_type": "mystery", "factor": 4.0}),
            "RoPE scaling `mystery`",
        ),
        ("tiny-llama", "rope_scaling", json!(5), "config.json: rope_scaling: 5, wanted an object"),
        ("tiny-llama", "rope_scaling", json!([]), "wanted an object"),
        ("tiny-llama", "rope_scaling", json!({"type": "linear"}), "rope_scaling.factor: missing"),
        ("tiny-llama", "hidden_act", json!("gelu"), "hidden_act is `gelu`"),
        ("tiny-llama", "quantization_config", json!({"quant_method": "gptq"}), "quantised by `gptq`"),
        ("tiny-llama", "head_dim", json!(63), "RoPE dimension: 63"),
        ("tiny-gemma3", "layer_types", json!(["full_attention"]), "1 entries for 7 layers"),
        ("tiny-gemma3", "attn_logit_softcapping", json!(50.0), "attn_logit_softcapping"),
        (
            "tiny-gemma2",
            "attn_logit_softcapping",
            json!(0.0),
            "attention soft-cap: 0, wanted a positive number",
        ),
        ("tiny-gemma2", "final_logit_softcapping", json!(-1.0), "logit soft-cap: -1"),
        (
            "tiny-gemma2",
            "attn_logit_softcapping",
            json!("x"),
            "attn_logit_softcapping: \"x\", wanted a number",
        ),
        ("tiny-gemma2", "use_bidirectional_attention", json!(true), "use_bidirectional_attention"),
        ("tiny-opt", "do_layer_norm_before", json!(false), "OPT-350m"),
        ("tiny-opt", "word_embed_proj_dim", json!(128), "projected embeddings"),
    ] {
        let got = complaint(model, set(key, value.clone()));
        let want = want.replace("model.layers.2.attn", "model.layers.2.");
        assert!(got.contains(&want), "{key} = {value}: {got:?} does not say {want:?}");
        assert!(!got.contains('\n'));
    }
}

#[test]
fn damaged_folders_get_one_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    export_hf_folder(&synth("tiny-qwen2"), d, DType::BF16, 2).unwrap();
    let shard = d.join("model-00002-of-00002.safetensors");
    let bytes = fs::read(&shard).unwrap();

    fs::write(&shard, &bytes[..bytes.len() - 1]).unwrap();
    let got = open(d).unwrap_err();
    assert!(
        got.starts_with("model-00002-of-00002.safetensors: ") && got.contains("is the download complete?"),
        "{got}"
    );
    fs::write(&shard, b"").unwrap();
    assert!(open(d).unwrap_err().contains("the file is empty"));
    fs::remove_file(&shard).unwrap();
    let got = open(d).unwrap_err();
    assert!(got.contains("model-00002-of-00002.safetensors: missing: one of 2 shards"), "{got}");

    // An index that forgets a shard: the tensor is named as the folder names it.
    let index = d.join("model.safetensors.index.json");
    let mut i: Json = serde_json::from_slice(&fs::read(&index).unwrap()).unwrap();
    i["weight_map"].as_object_mut().unwrap().retain(|_, f| f == "model-00001-of-00002.safetensors");
    fs::write(&index, i.to_string()).unwrap();
    let got = open(d).unwrap_err();
    assert!(
        got.contains("missing from the model; is a shard missing?") && got.starts_with("model."),
        "{got}"
    );
    // An index that points elsewhere.
    fs::write(&index, json!({"weight_map": {"x": "../../etc/passwd"}}).to_string()).unwrap();
    assert!(open(d).unwrap_err().contains("not a plain file name"));
    fs::write(&index, "{}").unwrap();
    assert!(open(d).unwrap_err().contains("no weight_map"));
    fs::remove_file(&index).unwrap();
    assert!(open(d).unwrap_err().contains("neither model.safetensors nor"));
}

#[test]
fn a_tensor_without_a_place_is_not_ignored() {
    let mut m = synth("tiny-llama");
    let norm = m.weights.get("output_norm.weight").unwrap().clone();
    m.weights.insert("blk.0.attn_q_norm.weight", norm);
    let got = validate(&m.spec, &m.weights).unwrap_err().to_string();
    assert!(got.contains("blk.0.attn_q_norm.weight") && got.contains("no place"), "{got}");
}

fn small_gguf() -> &'static [u8] {
    static BYTES: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
    BYTES.get_or_init(|| export_gguf(&synth("tiny-gemma3,dtype=q4_0,layers=1")).unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever happens to the header of a model file, loading it refuses or succeeds; it never panics.
    #[test]
    fn corrupt_models_never_panic(
        flips in prop::collection::vec((0usize..3000, any::<u8>()), 0..5),
        huge in prop::option::of((0usize..3000, prop::sample::select(vec![u64::MAX, 1 << 63, 1 << 40, 1 << 31, 0]))),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut b = small_gguf().to_vec();
        for (at, v) in flips {
            b[at] = v;
        }
        if let Some((at, v)) = huge {
            b[at..at + 8].copy_from_slice(&v.to_le_bytes());
        }
        if let Some(c) = cut {
            b.truncate(c.index(b.len()));
        }
        let model = Gguf::parse(Bytes::copy_of(&b)).and_then(|g| tandem::model::from_gguf(g, "corrupt.gguf".into()));
        if let Ok(m) = model {
            validate(&m.spec, &m.weights).unwrap();
        }
    }

    /// Any number or text in any setting of a config.json gives a sound spec or an error.
    #[test]
    fn odd_configurations_never_panic(
        name in prop::sample::select(vec!["tiny-llama3", "tiny-gemma2", "tiny-gemma3", "tiny-olmo2", "tiny-opt", "tiny-qwen3", "tiny-mistral"]),
        which in any::<prop::sample::Index>(),
        value in prop::sample::select(vec![
            json!(0), json!(1), json!(-1), json!(3), json!(u64::MAX), json!(1u64 << 33), json!(1e308), json!(0.5),
            json!("x"), json!([]), json!({}), json!(null), json!(true), json!({"rope_type": "llama3", "factor": 0}),
        ]),
    ) {
        let text = fs::read(format!("{}/specs/{name}.json", env!("CARGO_MANIFEST_DIR"))).unwrap();
        let mut c: Json = serde_json::from_slice(&text).unwrap();
        let keys: Vec<String> = c.as_object().unwrap().keys().cloned().collect();
        c[which.get(&keys).as_str()] = value;
        if let Ok((_, spec)) = tandem::model::hf_spec(&c) {
            let _ = spec.check();
        }
    }
}

/// A folder of a tiny model in f32, edited.
fn folder(model: &str, edit: impl FnOnce(&Path)) -> (tempfile::TempDir, Result<LoadedModel, String>) {
    let dir = tempfile::tempdir().unwrap();
    export_hf_folder(&synth(&format!("{model},dtype=f32")), dir.path(), DType::F32, 1).unwrap();
    edit(dir.path());
    let loaded = open(dir.path());
    (dir, loaded)
}

/// Rewrites `model.safetensors` with tensors renamed, added or changed.
fn rewrite(dir: &Path, change: impl FnOnce(&mut Vec<(String, Vec<usize>, Vec<u8>)>)) {
    let path = dir.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut all: Vec<_> =
        file.iter().map(|(name, t)| (name.to_owned(), t.shape().to_vec(), t.data().to_vec())).collect();
    change(&mut all);
    let views = all.iter().map(|(name, shape, data)| {
        let view =
            safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), data).unwrap();
        (name.clone(), view)
    });
    let bytes = safetensors::serialize(views.collect::<Vec<_>>(), None).unwrap();
    fs::write(path, bytes).unwrap();
}

fn config(dir: &Path, key: &str, value: Json) {
    let path = dir.join("config.json");
    let mut config: Json = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config[key] = value;
    fs::write(path, config.to_string()).unwrap();
}

/// `save_model` of the safetensors library keeps one of two tensors that share memory, whichever name comes first. What
/// serves is what transformers 5.24.0 takes.
#[test]
fn a_tied_head_is_whichever_matrix_is_stored() {
    const HEAD: &str = "lm_head.weight";
    let embedding = |n: &str| n.ends_with("embed_tokens.weight");
    for model in [
        "tiny-llama",
        "tiny-qwen2",
        "tiny-qwen3",
        "tiny-gemma2",
        "tiny-gemma3",
        "tiny-phi3",
        "tiny-olmo2",
        "tiny-opt",
    ] {
        let changed = |change: &dyn Fn(&mut Vec<(String, Vec<usize>, Vec<u8>)>)| {
            let (_dir, loaded) = folder(model, |dir| {
                config(dir, "tie_word_embeddings", true.into());
                rewrite(dir, |all| {
                    all.retain(|(n, ..)| n != HEAD);
                    change(all);
                });
            });
            loaded.unwrap_or_else(|e| panic!("{model}: {e}"))
        };
        let usual = changed(&|_| ());
        let head_only = changed(&|all| {
            all.iter_mut().for_each(|t| {
                if embedding(&t.0) {
                    t.0 = HEAD.into()
                }
            })
        });
        assert_same_weights(&usual, &head_only);
        assert!(usual.spec.tied_head && head_only.spec.tied_head && head_only.notes.is_empty(), "{model}");
        let with_head = |change: &dyn Fn(&mut [u8])| {
            changed(&|all| {
                let (_, shape, mut data) = all.iter().find(|t| embedding(&t.0)).unwrap().clone();
                change(&mut data);
                all.push((HEAD.into(), shape, data));
            })
        };
        let both = with_head(&|_| ());
        assert!(both.spec.tied_head && both.notes.is_empty(), "{model}: {:?}", both.notes);
        assert_same_weights(&usual, &both);
        let differs = with_head(&|data| data[..4].copy_from_slice(&7f32.to_le_bytes()));
        assert_eq!((differs.spec.tied_head, differs.notes.len()), (false, 1), "{model}");
        assert!(differs.notes[0].contains("tie_word_embeddings") && differs.notes[0].contains(HEAD));
        assert_eq!(dequantise(differs.weights.get("output.weight").unwrap())[0], 7.0);
    }
}

#[test]
fn an_index_beside_a_whole_file_is_ignored_in_one_line() {
    let index = |map: Json| json!({"metadata": {}, "weight_map": map}).to_string();
    for (text, notes) in [
        (index(json!({"model.norm.weight": "model-00001-of-00002.safetensors"})), 1),
        (index(json!({"model.norm.weight": "model.safetensors"})), 0),
        (index(json!({})), 1),
        ("{".into(), 1),
        ("[]".into(), 1),
    ] {
        let (_dir, loaded) =
            folder("tiny-llama", |dir| fs::write(dir.join("model.safetensors.index.json"), &text).unwrap());
        assert_eq!(loaded.unwrap().notes.len(), notes, "{text}");
    }
    let (_dir, loaded) = folder("tiny-llama", |dir| {
        fs::remove_file(dir.join("model.safetensors")).unwrap();
        let text = index(json!({"model.norm.weight": "x.safetensors"}));
        fs::write(dir.join("model.safetensors.index.json"), text).unwrap();
    });
    assert!(loaded.map(|_| ()).unwrap_err().contains("x.safetensors: missing"));
}

#[test]
fn models_that_are_not_causal_are_refused_by_key() {
    for (key, value) in [("is_causal", false), ("use_bidirectional_attention", true)] {
        for model in ["tiny-llama", "tiny-qwen2", "tiny-gemma3", "tiny-opt"] {
            let (_dir, loaded) = folder(model, |dir| config(dir, key, value.into()));
            let error = loaded.map(|_| ()).unwrap_err();
            assert!(error.contains(key) && error.contains("not causal"), "{model}: {error}");
            let (_dir, loaded) = folder(model, |dir| config(dir, key, (!value).into()));
            assert!(loaded.is_ok(), "{model}");
        }
    }
    let mut file = Gguf::parse(Bytes::copy_of(small_gguf())).unwrap();
    let key = format!("{}.attention.causal", file.metadata["general.architecture"].as_str().unwrap());
    for (value, works) in [(Value::Bool(true), true), (Value::Bool(false), false), (Value::Uint(0), false)] {
        file.metadata.insert(key.clone(), value);
        let (metadata, tensors) = (file.metadata.clone(), file.tensors.clone());
        let copy = Gguf { version: 3, metadata, tensors, files: file.files };
        let loaded = tandem::model::from_gguf(copy, "x.gguf".into()).map_err(|e| e.to_string());
        assert_eq!(loaded.is_ok(), works);
        assert!(loaded.err().is_none_or(|e| e.contains(&key)));
    }
}

/// Of a folder, every file that is read whole: a pipe and a hole are refused at once, and numbers of Python are read.
#[test]
fn every_small_file_of_a_folder_is_read_alike() {
    for name in [
        "config.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "chat_template.json",
    ] {
        let made = |make: &dyn Fn(&Path)| {
            let (_dir, loaded) = folder("tiny-llama", |dir| {
                let path = dir.join(name);
                let _ = fs::remove_file(&path);
                make(&path);
            });
            loaded.map(|_| ()).unwrap_err()
        };
        let pipe = made(&|path| {
            let status = std::process::Command::new("mkfifo").arg(path).status().unwrap();
            assert!(status.success());
        });
        assert!(pipe.contains(name) && pipe.contains("a pipe, not a regular file"), "{pipe}");
        let hole = made(&|path| fs::File::create(path).unwrap().set_len(5 << 30).unwrap());
        assert!(hole.contains(name) && hole.contains("5368709120 bytes"), "{hole}");
        let device = made(&|path| std::os::unix::fs::symlink("/dev/zero", path).unwrap());
        assert!(device.contains("a device, not a regular file"), "{device}");
    }
    let (_dir, loaded) = folder("tiny-llama", |dir| {
        for name in ["tokenizer_config.json", "generation_config.json"] {
            fs::write(dir.join(name), "{\"x\": NaN, \"y\": [-Infinity, 1e999], \"z\": \"NaN\"}").unwrap();
        }
        let path = dir.join("config.json");
        let text = fs::read_to_string(&path).unwrap().replacen('{', "{\"x\": Infinity, ", 1);
        fs::write(path, text).unwrap();
    });
    loaded.unwrap();
    for (key, want) in
        [("rope_theta", "rope_theta"), ("rms_norm_eps", "rms_norm_eps"), ("hidden_size", "hidden_size")]
    {
        let (_dir, loaded) = folder("tiny-llama", |dir| {
            config(dir, key, "@".into());
            let path = dir.join("config.json");
            fs::write(&path, fs::read_to_string(&path).unwrap().replace("\"@\"", "Infinity")).unwrap();
        });
        let error = loaded.map(|_| ()).unwrap_err();
        assert!(error.contains(want) && error.contains("Infinity"), "{error}");
    }
}
