//! Writes a model to files, as a Hugging Face folder or as GGUF.
//!
//! For tests ("the same model from GGUF and from a dequantised safetensors copy"), fuzz seeds, and to hand
//! random models to other engines. No quantisation to GGUF of real models: other tools do that well.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use safetensors::tensor::{Dtype, View};
use serde_json::{Value as Json, json};

use super::arch;
use super::formats::gguf::{Metadata, Value, write};
use super::spec::{Position, Rope, RopePairing, RopeScaling};
use super::{LoadedModel, ModelSpec};
use crate::reference::dequant::dequantise;
use crate::rope::RopeTable;
use crate::tensor::{Bytes, DType, Tensor, quantise_row};
use crate::{Error, Result};

/// Writes `config.json`, `generation_config.json`, and the weights as `dtype` (f32, f16 or bf16) in `shards`
/// files. Matrices are dequantised, Q and K put in Hugging Face's row order.
///
/// # Errors
/// If a file cannot be written, or the spec has a property that config.json cannot express.
pub fn export_hf_folder(m: &LoadedModel, dir: &Path, dtype: DType, shards: usize) -> Result<()> {
    assert!(!dtype.is_quantised() && shards > 0, "{dtype} in {shards} shards");
    let family = arch::by_name(&m.spec.family).expect("a loaded model has a known family");
    std::fs::create_dir_all(dir).map_err(|e| Error::io(dir, e))?;
    let save = |name: &str, json: &Json| {
        let path = dir.join(name);
        std::fs::write(&path, format!("{json:#}\n")).map_err(|e| Error::io(path, e))
    };
    save("config.json", &config(&m.spec, dtype)?)?;
    save("generation_config.json", &json!({ "eos_token_id": m.eos_ids }))?;

    let mut views = Vec::new();
    for (name, tensor) in m.weights.iter() {
        let hf = arch::file_name(family.names, name).ok_or_else(|| {
            Error::Unsupported(format!("{name}: a {} model of Hugging Face has no such tensor", family.name))
        })?;
        let norm = family.hf_norms_are_offsets && name.ends_with("_norm.weight");
        views.push((hf, HfView { spec: &m.spec, name, tensor, dtype, minus_one: norm }));
    }
    let per_shard = views.len().div_ceil(shards);
    let (mut map, mut total) = (BTreeMap::new(), 0);
    let mut rest = views;
    for i in 0..shards {
        let tail = rest.split_off(per_shard.min(rest.len()));
        let shard = std::mem::replace(&mut rest, tail);
        let file = match shards {
            1 => "model.safetensors".to_owned(),
            n => format!("model-{:05}-of-{n:05}.safetensors", i + 1),
        };
        for (name, v) in &shard {
            map.insert(name.clone(), file.clone());
            total += v.data_len();
        }
        let path = dir.join(file);
        safetensors::serialize_to_file(shard, None, &path)
            .map_err(|e| Error::Run(format!("{}: {e}", path.display())))?;
    }
    if shards > 1 {
        save(
            "model.safetensors.index.json",
            &json!({ "metadata": { "total_size": total }, "weight_map": map }),
        )?;
    }
    Ok(())
}

/// A tensor that is converted when it is written, so that a folder never needs twice the model's memory.
struct HfView<'a> {
    spec: &'a ModelSpec,
    name: &'a str,
    tensor: &'a Tensor,
    dtype: DType,
    minus_one: bool,
}

impl View for HfView<'_> {
    fn dtype(&self) -> Dtype {
        match self.dtype {
            DType::F32 => Dtype::F32,
            DType::F16 => Dtype::F16,
            _ => Dtype::BF16,
        }
    }
    fn shape(&self) -> &[usize] {
        &self.tensor.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        let t = match heads_of_qk(self.spec, self.name) {
            Some(heads) => permute_rows(self.tensor, heads, false),
            None => self.tensor.clone(),
        };
        let mut x = dequantise(&t);
        if self.minus_one {
            x.iter_mut().for_each(|x| *x -= 1.0);
        }
        let mut out = vec![0; self.data_len()];
        quantise_row(self.dtype, &x, &mut out);
        out.into()
    }
    fn data_len(&self) -> usize {
        self.tensor.rows() * self.tensor.cols() * self.dtype.block_bytes()
    }
}

/// The heads of a Q or K tensor whose rows are stored for interleaved RoPE.
fn heads_of_qk(spec: &ModelSpec, name: &str) -> Option<usize> {
    match &spec.position {
        Position::Rope(Rope { pairing: RopePairing::Interleaved, .. }) => qk_heads(spec, name),
        _ => None,
    }
}

fn qk_heads(spec: &ModelSpec, name: &str) -> Option<usize> {
    let stem = name.strip_prefix("blk.")?.split_once('.')?.1;
    match stem {
        "attn_q.weight" | "attn_q.bias" => Some(spec.n_heads),
        "attn_k.weight" | "attn_k.bias" => Some(spec.n_kv_heads),
        _ => None,
    }
}

/// Within each head, row 2i+j of the interleaved order is row i+j·half of the other.
fn permute_rows(t: &Tensor, heads: usize, to_interleaved: bool) -> Tensor {
    let rows = t.shape[0];
    let (per_head, bytes) = (rows / heads, t.data.len() / rows);
    let mut out = vec![0; t.data.len()];
    for r in 0..rows {
        let (h, i) = (r / per_head, r % per_head);
        let interleaved = h * per_head + i % (per_head / 2) * 2 + i / (per_head / 2);
        let (to, from) = if to_interleaved { (interleaved, r) } else { (r, interleaved) };
        out[to * bytes..(to + 1) * bytes].copy_from_slice(&t.data[from * bytes..(from + 1) * bytes]);
    }
    Tensor::new(t.dtype, t.shape.clone(), Bytes::copy_of(&out)).expect("same size as before")
}

/// The `config.json` of a spec.
fn config(s: &ModelSpec, dtype: DType) -> Result<Json> {
    let mut c = json!({
        "_name_or_path": s.name,
        "hidden_size": s.d_model,
        "num_hidden_layers": s.n_layers,
        "num_attention_heads": s.n_heads,
        "vocab_size": s.vocab,
        "max_position_embeddings": s.max_context,
        "tie_word_embeddings": s.tied_head,
        "torch_dtype": match dtype { DType::F32 => "float32", DType::F16 => "float16", _ => "bfloat16" },
    });
    let family = arch::by_name(&s.family).expect("a loaded model has a known family");
    c["model_type"] = family.hf[0].into();
    (family.to_hf)(s, c.as_object_mut().expect("made above"))?;
    Ok(c)
}

/// The model as a GGUF file without a tokenizer, with tensors in their present dtypes. A spec that came from Hugging
/// Face gets its Q and K rows permuted where the architecture wants it.
///
/// # Errors
/// If the family has no GGUF form, or the format cannot express the spec.
pub fn export_gguf(m: &LoadedModel) -> Result<Vec<u8>> {
    let s = &m.spec;
    let family = arch::by_name(&s.family).expect("a loaded model has a known family");
    let name =
        *family.gguf.first().ok_or_else(|| Error::Unsupported(format!("{} has no GGUF form", s.family)))?;
    let mut meta = Metadata::new();
    let mut set = |key: String, v: Value| meta.insert(key, v);
    let n = |x: usize| Value::Uint(x as u64);
    set("general.architecture".into(), Value::String(name.into()));
    set("general.name".into(), Value::String(s.name.clone()));
    for (key, x) in [
        ("block_count", s.n_layers),
        ("context_length", s.max_context),
        ("embedding_length", s.d_model),
        ("feed_forward_length", s.d_ff),
        ("attention.head_count", s.n_heads),
        ("attention.head_count_kv", s.n_kv_heads),
        ("attention.key_length", s.head_dim),
        ("attention.value_length", s.head_dim),
    ] {
        set(format!("{name}.{key}"), n(x));
    }
    // No tokenizer is written, which other engines need to be told.
    set("tokenizer.ggml.model".into(), Value::String("no_vocab".into()));
    set(format!("{name}.vocab_size"), n(s.vocab));
    let eps = s.norm.eps();
    set(format!("{name}.attention.layer_norm_rms_epsilon"), Value::Float(eps.into()));
    let mut extra = None;
    let mut permute = false;
    if let Position::Rope(r) = &s.position {
        permute = family.gguf_pairing == RopePairing::Interleaved && r.pairing == RopePairing::Half;
        set(format!("{name}.rope.freq_base"), Value::Float(r.theta.into()));
        set(format!("{name}.rope.dimension_count"), n(r.dim));
        match &r.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => {
                set(format!("{name}.rope.scaling.type"), Value::String("linear".into()));
                set(format!("{name}.rope.scaling.factor"), Value::Float(f64::from(*factor)));
            }
            // GGUF has no keys for Llama 3's rule: files hold the resulting factors.
            RopeScaling::Factors(_) | RopeScaling::Llama3 { .. } => {
                let factors = RopeTable::factors(r)?;
                extra = Some(super::vectors::f32_tensor(vec![factors.len()], &factors)?);
            }
        }
    }
    if let Some(w) = &s.window {
        if !family.gguf_windows {
            return Err(Error::Unsupported(format!("sliding windows of {} have no place in GGUF", s.family)));
        }
        set(format!("{name}.attention.sliding_window"), n(w.size));
        let layers: Vec<i64> = w.layers.iter().map(|&l| i64::from(l)).collect();
        set(format!("{name}.attention.sliding_window_pattern"), Value::ints(&layers));
    }
    if s.attn_scale != (s.head_dim as f32).powf(-0.5) {
        set(format!("{name}.attention.scale"), Value::Float(s.attn_scale.into()));
    }
    for (key, cap) in
        [("attn_logit_softcapping", s.attn_softcap), ("final_logit_softcapping", s.logit_softcap)]
    {
        match (family.gguf_softcaps, cap) {
            (true, cap) => {
                set(format!("{name}.{key}"), Value::Float(cap.unwrap_or(0.0).into()));
            }
            (false, Some(_)) => {
                return Err(Error::Unsupported(format!("soft-caps of {} have no place in GGUF", s.family)));
            }
            (false, None) => {}
        }
    }
    let mut tensors: Vec<(&str, Tensor)> = m
        .weights
        .iter()
        .map(|(name, t)| match qk_heads(s, name).filter(|_| permute) {
            Some(heads) => (name, permute_rows(t, heads, true)),
            None => (name, t.clone()),
        })
        .collect();
    tensors.extend(extra.map(|t| ("rope_freqs.weight", t)));
    Ok(write::to_bytes(&meta, tensors.iter().map(|(n, t)| (*n, t))))
}
