//! Writes a model to files, as a Hugging Face folder or as GGUF.
//!
//! For tests ("the same model from GGUF and from a dequantised safetensors copy"), fuzz seeds, and to hand
//! random models to other engines. No quantisation to GGUF of real models: other tools do that well.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, View};
use serde_json::{Value as Json, json};

use super::arch::{self, Family};
use super::block::{expert_tensor_name, tensor_name};
use super::formats::gguf::{Gguf, Metadata, PartName, Value, metadata_of_part, write};
use super::interleaved;
use super::spec::{Position, Rope, RopePairing, RopeScaling, RouterWeights};
use super::stacks::{SHARED_GATE, STACKS, in_block, of_expert};
use super::{LoadedModel, ModelSpec, Weights};
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
    let stacks = |stem: &str| arch::file_name(family.names, &tensor_name(0, stem, "weight")).is_some();
    for (name, parts) in stacked(fused(family, &m.weights), &m.weights, &stacks) {
        let hf = arch::file_name(family.names, &name).ok_or_else(|| {
            Error::Unsupported(format!("{name}: a {} model of Hugging Face has no such tensor", family.name))
        })?;
        let minus_one = family.hf_norms_are_offsets && name.ends_with("_norm.weight");
        let mut shape = shape_of(&m.spec, &name, &parts);
        if in_block(&name).is_some_and(|(_, stem, _)| stem == SHARED_GATE) {
            shape.insert(0, 1);
        }
        let hf = if family.habits.hf_interleaves { interleaved::without_kind(&hf) } else { hf };
        let alternate = stack_parts(&name).filter(|_| family.habits.hf_interleaves);
        if alternate.is_some() {
            shape[1..].reverse();
        }
        views.push((hf, HfView { spec: &m.spec, parts, shape, dtype, minus_one, alternate }));
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

/// The tensors as the files of a family have them: each with the parts that it is made of, mostly itself.
fn fused<'a>(family: &Family, weights: &'a Weights) -> Vec<(String, Vec<(&'a str, &'a Tensor)>)> {
    let fuses = |stem: &str| arch::file_name(family.names, &tensor_name(0, stem, "weight")).is_some();
    let mut groups: Vec<(&str, &[&str])> = Vec::new();
    if fuses("attn_qkv") {
        groups.push(("attn_qkv", &["attn_q", "attn_k", "attn_v"]));
    }
    if fuses("ffn_gate_up") {
        groups.push(("ffn_gate_up", &["ffn_gate", "ffn_up"]));
    }
    let mut out = Vec::new();
    for (name, t) in weights.iter() {
        let Some((layer, stem, kind)) = in_block(name) else {
            out.push((name.to_owned(), vec![(name, t)]));
            continue;
        };
        match groups.iter().find(|(_, parts)| parts.contains(&stem)) {
            None => out.push((name.to_owned(), vec![(name, t)])),
            Some((whole, parts)) if parts[0] == stem => {
                let all = parts.iter().map(|p| tensor_name(layer, p, kind));
                let all: Vec<_> = all.filter_map(|p| weights.iter().find(|(n, _)| *n == p)).collect();
                out.push((tensor_name(layer, whole, kind), all));
            }
            Some(_) => {}
        }
    }
    out
}

/// The same with the experts' matrices in the stacks for which `has` is true.
fn stacked<'a>(
    tensors: Vec<(String, Vec<(&'a str, &'a Tensor)>)>,
    weights: &'a Weights,
    has: &dyn Fn(&str) -> bool,
) -> Vec<(String, Vec<(&'a str, &'a Tensor)>)> {
    let mut out = Vec::new();
    for (name, of) in tensors {
        let expert = in_block(&name).and_then(|(layer, stem, kind)| Some(((layer, kind), of_expert(stem)?)));
        let stack = expert.and_then(|(_, (part, _))| {
            STACKS.iter().find(|(stack, parts)| has(stack) && parts.contains(&part))
        });
        let (Some(((layer, kind), (part, expert))), Some((stack, parts))) = (expert, stack) else {
            out.push((name, of));
            continue;
        };
        if (part, expert) != (parts[0], 0) {
            continue;
        }
        let each = (0..).flat_map(|e| parts.iter().map(move |p| expert_tensor_name(layer, p, e, kind)));
        let all = each.map_while(|name| weights.entry(&name));
        out.push((tensor_name(layer, stack, kind), all.collect()));
    }
    out
}

/// The shape of a tensor made of parts.
fn shape_of(spec: &ModelSpec, name: &str, parts: &[(&str, &Tensor)]) -> Vec<usize> {
    let mut shape = parts[0].1.shape.clone();
    shape[0] = parts.iter().map(|(_, t)| t.shape[0]).sum();
    if let Some(experts) = spec.experts.as_ref().filter(|_| stack_parts(name).is_some()) {
        shape[0] /= experts.count;
        shape.insert(0, experts.count);
    }
    shape
}

/// How many matrices of each expert are in a stack; `None` for what is no stack.
fn stack_parts(name: &str) -> Option<usize> {
    let (_, stem, _) = in_block(name)?;
    STACKS.iter().find(|(stack, _)| *stack == stem).map(|(_, parts)| parts.len())
}

/// Writes what [`export_gguf`] makes as `NAME-00001-of-0000N.gguf` and so on in `dir`, N being `count`, and gives the path of
/// the first, which names all.
///
/// # Errors
/// As there; or if a file cannot be written.
pub fn export_split_gguf(m: &LoadedModel, dir: &Path, name: &str, count: usize) -> Result<PathBuf> {
    let whole = Gguf::parse(Bytes::copy_of(&export_gguf(m)?))?;
    let (tensors, names) = (&whole.tensors, PartName { stem: name, number: 1, count: count as u64 });
    let each = tensors.len().div_ceil(count);
    for i in 0..count {
        let part = tensors.iter().skip(i * each).take(each).map(|(n, t)| (n.as_str(), t));
        let metadata = metadata_of_part(&whole.metadata, i, count, tensors.len());
        let path = dir.join(names.of(i as u64 + 1));
        std::fs::write(&path, write::to_bytes(&metadata, part)).map_err(|e| Error::io(&path, e))?;
    }
    Ok(dir.join(names.of(1)))
}

/// A tensor that is converted when it is written, so that a folder never needs twice the model's memory.
struct HfView<'a> {
    spec: &'a ModelSpec,
    /// The tensors that it consists of, one behind the other.
    parts: Vec<(&'a str, &'a Tensor)>,
    shape: Vec<usize>,
    dtype: DType,
    minus_one: bool,
    /// That so many parts at a time alternate, and are transposed ([`interleaved`]).
    alternate: Option<usize>,
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
        &self.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        let mut x = Vec::new();
        for (name, tensor) in &self.parts {
            match heads_of_qk(self.spec, name) {
                Some(heads) => x.extend(dequantise(&permute_rows(tensor, heads, false))),
                None => x.extend(dequantise(tensor)),
            }
        }
        if let Some(n) = self.alternate {
            let rows = self.parts[0].1.shape[0];
            let cols = self.parts[0].1.shape.get(1).copied().unwrap_or(1);
            let experts = x.chunks_exact(n * rows * cols);
            let columns = experts.flat_map(|x| {
                (0..cols * rows * n).map(move |i| (i / (rows * n), i / n % rows, i % n)).map(
                    // Column c of row r of part p.
                    move |(c, r, p)| x[(p * rows + r) * cols + c],
                )
            });
            x = columns.collect();
        }
        if self.minus_one {
            x.iter_mut().for_each(|x| *x -= 1.0);
        }
        let mut out = vec![0; self.data_len()];
        quantise_row(self.dtype, &x, &mut out);
        out.into()
    }
    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.block_bytes()
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
    let mut extra = Vec::new();
    let mut permute = false;
    let unsupported = |what: &str| Err(Error::Unsupported(format!("GGUF cannot carry {what}")));
    if let Position::Rope(r) = &s.position {
        permute = family.gguf_pairing == RopePairing::Interleaved && r.pairing == RopePairing::Half;
        set(format!("{name}.rope.freq_base"), Value::Float(r.theta.into()));
        set(format!("{name}.rope.dimension_count"), n(r.dim));
        if let Some(local) = r.local_theta {
            set(format!("{name}.rope.freq_base_swa"), Value::Float(local.into()));
        }
        if r.local_theta.is_some() && r.local_scaling != RopeScaling::None {
            return unsupported("a RoPE scaling of windowed layers");
        }
        if let Some(q) = r.query_scaling {
            set(format!("{name}.attention.temperature_scale"), Value::Float(q.beta.into()));
            set(format!("{name}.rope.scaling.original_context_length"), n(q.original_context));
        }
        let mut vector = |name, values: &[f32]| -> Result<()> {
            extra.push((name, super::vectors::f32_tensor(vec![values.len()], values)?));
            Ok(())
        };
        match &r.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => {
                set(format!("{name}.rope.scaling.type"), Value::String("linear".into()));
                set(format!("{name}.rope.scaling.factor"), Value::Float(f64::from(*factor)));
            }
            // GGUF has no keys for Llama 3's rule: files hold the resulting factors.
            RopeScaling::Factors(_) | RopeScaling::Llama3 { .. } => {
                vector("rope_freqs.weight", &RopeTable::factors(r)?)?;
            }
            RopeScaling::Yarn { truncate, .. } if *truncate != family.habits.gguf_yarn_truncates => {
                let kind = if *truncate { "with" } else { "without" };
                return unsupported(&format!("yarn scaling {kind} truncation"));
            }
            &RopeScaling::Yarn {
                factor, original_context, beta_fast, beta_slow, attention_factor, ..
            } => {
                set(format!("{name}.rope.scaling.type"), Value::String("yarn".into()));
                set(format!("{name}.rope.scaling.original_context_length"), n(original_context));
                // The file has what the factor is beside the recommended one, in f32: others read no f64 here.
                let own = (f64::from(attention_factor) / arch::mscale(factor.into(), 1.0)) as f32;
                for (key, x) in [
                    ("factor", f64::from(factor)),
                    ("yarn_beta_fast", beta_fast.into()),
                    ("yarn_beta_slow", beta_slow.into()),
                    ("attn_factor", own.into()),
                ] {
                    set(format!("{name}.rope.scaling.{key}"), Value::Float(x));
                }
            }
            RopeScaling::LongRope { short, long, original_context, attention_factor } => {
                set(format!("{name}.rope.scaling.original_context_length"), n(*original_context));
                set(format!("{name}.rope.scaling.attn_factor"), Value::Float((*attention_factor).into()));
                vector(arch::LONG_FACTORS, long)?;
                vector(arch::SHORT_FACTORS, short)?;
            }
            RopeScaling::Dynamic { .. } => return unsupported("dynamic RoPE scaling"),
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
    // Where these differ from what a family derives from its sizes, the file says so.
    for (key, x, usual) in [
        ("attention.scale", s.attn_scale, (s.head_dim as f32).powf(-0.5)),
        ("embedding_scale", s.embed_scale, 1.0),
        ("logit_scale", s.logit_scale.recip(), 1.0),
    ] {
        if x != usual {
            set(format!("{name}.{key}"), Value::Float(x.into()));
        }
    }
    if let Some(e) = &s.experts {
        for (key, x) in [
            ("expert_count", Some(e.count)),
            ("expert_used_count", Some(e.used)),
            ("expert_feed_forward_length", Some(e.d_ff)),
            ("expert_shared_feed_forward_length", e.shared),
        ] {
            if let Some(x) = x {
                set(format!("{name}.{key}"), n(x));
            }
        }
        let of_chosen = e.weights == RouterWeights::OfChosen;
        set(format!("{name}.expert_weights_norm"), Value::Bool(of_chosen));
    }
    let mut tensors = Vec::new();
    let one_by_one = |stack: &str| stack != "ffn_gate_up_exps";
    for (name, parts) in stacked(fused(family, &m.weights), &m.weights, &one_by_one) {
        let shape = shape_of(s, &name, &parts);
        let parts: Vec<Tensor> = parts
            .into_iter()
            .map(|(name, t)| match qk_heads(s, name).filter(|_| permute) {
                Some(heads) => permute_rows(t, heads, true),
                None => t.clone(),
            })
            .collect();
        // Here the fused matrix has the name of the one it begins in other families.
        let whole = Tensor { shape, ..joined(&name, parts)? };
        let own = in_block(&name).and_then(|(layer, stem, kind)| {
            let (_, gguf) = family.habits.gguf_names.iter().find(|(canonical, _)| *canonical == stem)?;
            Some(tensor_name(layer, gguf, kind))
        });
        tensors.push((own.unwrap_or_else(|| name.replace("ffn_gate_up", "ffn_up")), whole));
    }
    tensors.extend(extra.into_iter().map(|(name, t)| (name.to_owned(), t)));
    Ok(write::to_bytes(&meta, tensors.iter().map(|(n, t)| (n.as_str(), t))))
}

/// Tensors one behind the other.
fn joined(name: &str, mut parts: Vec<Tensor>) -> Result<Tensor> {
    if parts.len() == 1 {
        return Ok(parts.remove(0));
    }
    if parts.iter().any(|t| t.dtype != parts[0].dtype) {
        return Err(Error::Unsupported(format!("{name}: its parts have different types")));
    }
    let bytes: Vec<u8> = parts.iter().flat_map(|t| t.data.iter().copied()).collect();
    let mut shape = parts[0].shape.clone();
    shape[0] = parts.iter().map(|t| t.shape[0]).sum();
    Tensor::new(parts[0].dtype, shape, Bytes::copy_of(&bytes))
}
