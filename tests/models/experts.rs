//! Mixtures of experts through files: what converters write, and what is damaged.

use std::fs;

use serde_json::{Value as Json, json};
use tandem::Error;
use tandem::model::formats::gguf::Gguf;
use tandem::model::{LoadedModel, Position, RopePairing, RouterWeights, export_gguf, export_hf_folder, load};
use tandem::tensor::{Bytes, DType};

const FAMILIES: [&str; 6] =
    ["tiny-qwen3-moe", "tiny-qwen2-moe", "tiny-mixtral", "tiny-olmoe", "tiny-granite-moe", "tiny-gpt-oss"];

fn synth(what: &str) -> LoadedModel {
    load(&format!("synth:{what}")).unwrap()
}

/// A GGUF file of these bytes, loaded.
fn loaded(bytes: &[u8]) -> Result<LoadedModel, Error> {
    tandem::model::from_gguf(Gguf::parse(Bytes::copy_of(bytes))?, "m.gguf".into())
}

#[test]
fn every_family_survives_gguf_in_stacks() {
    for name in FAMILIES {
        for dtype in ["q4_k", "bf16"] {
            let m = synth(&format!("{name},dtype={dtype}"));
            let bytes = export_gguf(&m).unwrap();
            let file = Gguf::parse(Bytes::copy_of(&bytes)).unwrap();
            let e = m.spec.experts.clone().unwrap();
            let (_, stack) = file.tensors.iter().find(|(n, _)| n == "blk.1.ffn_down_exps.weight").unwrap();
            assert_eq!(stack.shape, [e.count, m.spec.d_model, e.d_ff]);
            assert!(
                file.tensors.iter().all(|(n, _)| !n.contains("ffn_up.1.")),
                "{name}: no expert by itself"
            );
            let back = loaded(&bytes).unwrap_or_else(|e| panic!("{name}: {e}"));
            let mut spec = back.spec.clone();
            if let Position::Rope(r) = &mut spec.position {
                r.pairing = RopePairing::Half;
            }
            assert_eq!(spec, m.spec, "{name}");
            for (n, t) in m.weights.iter().filter(|(n, _)| n.contains("ffn_")) {
                assert!(back.weights.get(n).unwrap().data[..] == t.data[..], "{name}: {n}");
            }
        }
    }
}

/// Older files do not say how experts are weighed; the family does.
#[test]
fn what_older_files_leave_out_is_what_the_family_does() {
    for (name, want) in [
        ("tiny-qwen3-moe", RouterWeights::OfChosen),
        ("tiny-mixtral", RouterWeights::OfChosen),
        ("tiny-qwen2-moe", RouterWeights::OfAll),
        ("tiny-olmoe", RouterWeights::OfAll),
    ] {
        let m = synth(&format!("{name},dtype=q8_0"));
        let bytes = renamed(export_gguf(&m).unwrap(), "expert_weights_norm", "expert_weights_nope");
        assert_eq!(loaded(&bytes).unwrap().spec.experts.unwrap().weights, want, "{name}");
    }
}

/// `bytes` with a text of the same length in place of another, everywhere.
fn renamed(mut bytes: Vec<u8>, from: &str, to: &str) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let mut found = 0;
    for at in 0..bytes.len() - from.len() {
        if bytes[at..].starts_with(from.as_bytes()) {
            bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
            found += 1;
        }
    }
    assert!(found > 0, "{from}");
    bytes
}

/// `bytes` with another number so many bytes behind a text.
fn patched(mut bytes: Vec<u8>, text: &str, behind: usize, value: u32) -> Vec<u8> {
    let at = bytes.windows(text.len()).position(|w| w == text.as_bytes()).expect(text) + text.len() + behind;
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    bytes
}

#[test]
fn damaged_experts_in_gguf_get_one_sentence() {
    let file = || export_gguf(&synth("tiny-qwen3-moe,dtype=q8_0")).unwrap();
    let number = |key: &str, value| patched(file(), &format!("qwen3moe.{key}"), 4, value);
    let stack = "blk.1.ffn_up_exps.weight";
    for (bytes, want) in [
        (number("expert_count", 0), "expert count: 0 is outside 1..=1024"),
        (number("expert_count", 1_000_000_000), "expert count: 1000000000 is outside"),
        (
            number("expert_count", 7),
            "blk.0.ffn_down_exps.weight: shape [8, 256, 256], the model's sizes imply [7, 256, 256]",
        ),
        (number("expert_used_count", 0), "experts of a row: 0 is outside 1..=8"),
        (number("expert_used_count", 9), "experts of a row: 9 is outside 1..=8"),
        (
            number("expert_feed_forward_length", 512),
            "shape [8, 256, 256], the model's sizes imply [8, 256, 512]",
        ),
        (
            renamed(file(), "qwen3moe.expert_used_count", "qwen3moe.expert_uses_count"),
            "expert_used_count: missing",
        ),
        (renamed(file(), stack, "blk.1.ffn_uq_exps.weight"), "blk.1.ffn_up.0.weight: missing from the model"),
        (
            renamed(file(), "blk.1.ffn_gate_inp.weight", "blk.1.ffn_gate_imp.weight"),
            "blk.1.ffn_gate_inp.weight: missing",
        ),
        // Fewer experts in one stack: its outermost dimension, behind the name, the number of dimensions and two others.
        (patched(file(), stack, 20, 4), "blk.1.ffn_up_exps.weight: shape [4, 256, 256]"),
    ] {
        let got = loaded(&bytes).map(|_| ()).expect_err(want).to_string();
        assert!(got.contains(want) && !got.contains('\n'), "{got:?} does not say {want:?}");
    }
}

#[test]
fn damaged_experts_in_folders_get_one_sentence() {
    let complaint = |model: &str, edit: &dyn Fn(&mut Json)| {
        let dir = tempfile::tempdir().unwrap();
        export_hf_folder(&synth(model), dir.path(), DType::BF16, 1).unwrap();
        let path = dir.path().join("config.json");
        let mut c: Json = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        edit(&mut c);
        fs::write(&path, c.to_string()).unwrap();
        load(dir.path().to_str().unwrap()).map(|_| ()).expect_err("accepted").to_string()
    };
    for (model, key, value, want) in [
        ("tiny-qwen3-moe", "num_experts", json!(1_000_000_000u64), "expert count: 1000000000"),
        ("tiny-qwen3-moe", "num_experts", json!(0), "expert count: 0"),
        ("tiny-qwen3-moe", "num_experts", json!(9), "model.layers.0.mlp.experts.8."),
        (
            "tiny-qwen3-moe",
            "num_experts",
            json!(7),
            "model.layers.0.mlp.gate.weight: shape [8, 256], config.json implies [7, 256]",
        ),
        ("tiny-qwen3-moe", "num_experts_per_tok", json!(9), "experts of a row: 9"),
        ("tiny-qwen3-moe", "num_experts", json!("many"), "num_experts: \"many\", wanted a size"),
        (
            "tiny-qwen3-moe",
            "decoder_sparse_step",
            json!(0),
            "decoder_sparse_step: 0, wanted a positive number",
        ),
        (
            "tiny-qwen3-moe",
            "mlp_only_layers",
            json!("none"),
            "mlp_only_layers: \"none\", wanted numbers of layers",
        ),
        ("tiny-qwen3-moe", "mlp_only_layers", json!([0]), "model.layers.0.mlp."),
        ("tiny-qwen3-moe", "moe_intermediate_size", json!(512), "shape [256, 256], config.json implies"),
        ("tiny-qwen2-moe", "shared_expert_intermediate_size", json!(0), "width of the shared expert: 0"),
        ("tiny-olmoe", "clip_qkv", json!(8.0), "clip_qkv is 8.0"),
        (
            "tiny-mixtral",
            "model_type",
            json!("deepseek_v3"),
            "`deepseek_v3`, which is not supported: attention over compressed keys",
        ),
        ("tiny-gpt-oss", "swiglu_limit", json!(5.0), "swiglu_limit is 5; 7 is supported"),
        ("tiny-gpt-oss", "swiglu_alpha", json!(1.0), "swiglu_alpha is 1; 1.702 is supported"),
        (
            "tiny-gpt-oss",
            "num_local_experts",
            json!(7),
            "experts.down_proj: shape [8, 256, 256], config.json implies [7, 256, 256] (7 experts)",
        ),
        (
            "tiny-gpt-oss",
            "intermediate_size",
            json!(128),
            "experts.down_proj: shape [8, 256, 256], config.json implies [8, 128, 256]",
        ),
        ("tiny-gpt-oss", "num_attention_heads", json!(4), "self_attn."),
        ("tiny-gpt-oss", "num_experts_per_tok", json!(0), "experts of a row: 0"),
        (
            "tiny-gpt-oss",
            "quantization_config",
            json!({ "quant_method": "awq" }),
            "weights quantised by `awq`",
        ),
        (
            "tiny-qwen3-moe",
            "quantization_config",
            json!({ "quant_method": "mxfp4" }),
            "weights quantised by `mxfp4`",
        ),
        (
            "tiny-granite-moe",
            "num_local_experts",
            json!(4),
            "output_linear.weight: shape [8, 256, 256], config.json implies [4, 256, 256]",
        ),
    ] {
        let got = complaint(model, &|c| c[key] = value.clone());
        assert!(got.contains(want) && !got.contains('\n'), "{key} = {value}: {got:?} does not say {want:?}");
    }
}

#[test]
fn damaged_gpt_oss_in_gguf_gets_one_sentence() {
    let file = || export_gguf(&synth("tiny-gpt-oss,dtype=q8_0")).unwrap();
    // The same with a tensor of another shape.
    let with = |name: &str, shape: &[usize]| {
        let mut m = synth("tiny-gpt-oss,dtype=q8_0");
        let zeros = Bytes::copy_of(&vec![0; 4 * shape.iter().product::<usize>()]);
        m.weights.insert(name, tandem::tensor::Tensor::new(DType::F32, shape.to_vec(), zeros).unwrap());
        export_gguf(&m).unwrap()
    };
    let up = "blk.1.ffn_up_exps.bias";
    for (bytes, want) in [
        (
            with("blk.1.attn_sinks.weight", &[7]),
            "blk.1.attn_sinks.weight: shape [7], the model's sizes imply [8]",
        ),
        (with("blk.1.attn_sinks.weight", &[8, 1]), "blk.1.attn_sinks.weight: shape [8, 1], the model's"),
        (
            with("blk.0.attn_output.bias", &[255]),
            "blk.0.attn_output.bias: shape [255], the model's sizes imply [256]",
        ),
        (
            with("blk.0.ffn_gate_inp.bias", &[9]),
            "blk.0.ffn_gate_inp.bias: shape [9], the model's sizes imply [8]",
        ),
        // The second dimension of a stack of biases, and the first.
        (
            patched(file(), up, 12, 4),
            "blk.1.ffn_up_exps.bias: shape [4, 256], the model's sizes imply [8, 256] (8 experts)",
        ),
        (patched(file(), up, 4, 128), "blk.1.ffn_up_exps.bias: shape [8, 128], the model's"),
        (renamed(file(), up, "blk.1.ffn_uq_exps.bias"), "blk.1.ffn_up.0.bias: missing from the model"),
        (
            renamed(file(), "blk.0.attn_sinks", "blk.0.attn_sinkz"),
            "blk.0.attn_sinks.weight: missing from the model",
        ),
        (
            renamed(file(), "blk.0.ffn_gate_inp.bias", "blk.0.ffn_gate_imp.bias"),
            "blk.0.ffn_gate_inp.bias: missing",
        ),
        (patched(file(), "gpt-oss.expert_count", 4, 7), "imply [7, 256] (7 experts)"),
        (patched(file(), "gpt-oss.expert_used_count", 4, 9), "experts of a row: 9 is outside 1..=8"),
        (
            renamed(file(), "attention.sliding_window", "attention.sliding_windoo"),
            "gpt-oss.attention.sliding_window: missing from the metadata",
        ),
    ] {
        let got = loaded(&bytes).map(|_| ()).expect_err(want).to_string();
        assert!(got.contains(want) && !got.contains('\n'), "{got:?} does not say {want:?}");
    }
}

/// A file has no key for the kind of ramp: it is the one that the models were trained with.
#[test]
fn gpt_oss_in_gguf_has_llama_cpps_names_and_the_trained_ramp() {
    let m = synth("tiny-gpt-oss,experts=mxfp4");
    let bytes = export_gguf(&m).unwrap();
    let file = Gguf::parse(Bytes::copy_of(&bytes)).unwrap();
    let shape = |name: &str| file.tensors.iter().find(|(n, _)| n == name).map(|(_, t)| t.shape.clone());
    for (name, want) in [
        ("blk.0.post_attention_norm.weight", Some(vec![256])),
        ("blk.0.ffn_norm.weight", None),
        ("blk.1.attn_sinks.weight", Some(vec![8])),
        ("blk.1.ffn_gate_exps.bias", Some(vec![8, 256])),
        ("blk.1.ffn_down_exps.weight", Some(vec![8, 256, 256])),
        ("blk.1.ffn_gate_inp.bias", Some(vec![8])),
    ] {
        assert_eq!(shape(name), want, "{name}");
    }
    let back = loaded(&bytes).unwrap();
    let Position::Rope(rope) = &back.spec.position else { panic!("no RoPE") };
    assert!(matches!(rope.scaling, tandem::model::RopeScaling::Yarn { truncate: false, .. }));
    assert_eq!(back.spec, m.spec);
}

#[test]
fn an_architecture_that_is_not_known_is_refused() {
    let bytes = export_gguf(&synth("tiny-qwen3-moe,dtype=q8_0")).unwrap();
    let bytes = renamed(bytes, "qwen3moe", "qwen9moe");
    let got = loaded(&bytes).map(|_| ()).unwrap_err();
    assert!(matches!(got, Error::Unsupported(_)), "{got}");
    let key = "general.architecture";
    assert!(got.to_string().contains(key), "{got}");
}
