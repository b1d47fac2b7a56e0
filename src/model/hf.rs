//! A Hugging Face folder: `config.json`, one or several `*.safetensors`, and the text side.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value as Json;

use super::arch::{self, Family, HfConfig};
use super::check::MAX_LAYERS;
use super::formats::guise::guise;
use super::formats::safetensors::{self, Contents};
use super::formats::{Files, in_file, map_file};
use super::fused::split_fused;
use super::interleaved;
use super::stacks::split_stacks;
use super::vectors::{f32_tensor, vectors_to_f32};
use super::{LoadedModel, ModelSpec, SamplingDefaults, TextSource, Weights, validate};
use crate::tensor::Tensor;
use crate::{Error, Result, small_file};

/// Longest JSON file read. Real configurations take a few KiB, those of tokenizers up to 1 MiB, indices of huge models a few MiB.
const MAX_JSON: u64 = 64 << 20;
/// Longest template read; the template engine takes far shorter ones.
const MAX_TEMPLATE: u64 = 4 << 20;

/// Loads the model in `dir`.
///
/// # Errors
/// A file is missing or malformed, or the model is of an unknown kind.
pub fn load(dir: &Path) -> Result<LoadedModel> {
    let config_path = dir.join("config.json");
    let config = json(&config_path)?
        .ok_or_else(|| Error::format(dir.display().to_string(), without_config(&names_in(dir))))?;
    let (family, mut spec) = hf_spec(&config)?;
    if spec.name.is_empty() {
        spec.name = dir.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    }
    spec.check()?;

    let mut notes = Vec::new();
    let (all, files) = tensors(dir, family, &mut notes)?;
    // A multimodal configuration that is silent ties the head, whatever its text part says, unless there is a head.
    let silent = config.get("text_config").is_some() && config.get("tie_word_embeddings").is_none();
    let is_head = |name: &str| arch::canonical_name(family.names, name).as_deref() == Some("output.weight");
    if silent && !all.tensors.iter().any(|(name, _)| is_head(name)) {
        spec.tied_head = true;
    }
    let (all, stacks) = match family.habits.hf_interleaves {
        true => interleaved::rearranged(family, &spec, all)?,
        false => (all.tensors, Vec::new()),
    };
    let copied: usize = stacks.iter().map(|(_, t)| t.data.len()).sum();
    if copied > 0 {
        notes.push(format!(
            "experts are rearranged in memory, {:.1} GiB beside the weights as they are computed; a GGUF file needs no such copy",
            copied as f64 / (1u64 << 30) as f64
        ));
    }
    let mut weights = Weights::default();
    for (name, t) in canonical(family, &mut spec, all, stacks, &mut notes)? {
        weights.insert(name, t);
    }
    validate(&spec, &weights).map_err(|e| in_hf_names(family, e))?;

    let tokenizer_config = json(&dir.join("tokenizer_config.json"))?;
    let path = dir.join("tokenizer.json");
    // What is there but no file is an error where it is read.
    let text = if path.exists() {
        TextSource::TokenizerJson { path, config: tokenizer_config.as_ref().map(Json::to_string) }
    } else {
        TextSource::Missing(path)
    };
    let generation = json(&dir.join("generation_config.json"))?;
    Ok(LoadedModel {
        spec,
        weights,
        text,
        chat_template: chat_template(dir, tokenizer_config.as_ref())?,
        eos_ids: eos_ids(generation.as_ref()).or_else(|| eos_ids(Some(&config))).unwrap_or_default(),
        sampling: generation.as_ref().map(SamplingDefaults::from_generation_config).unwrap_or_default(),
        source: dir.display().to_string(),
        files,
        notes,
    })
}

/// The sorted names of a folder's entries, as far as it can be read.
fn names_in(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// The likely problem of a folder without a `config.json`.
fn without_config(names: &[String]) -> String {
    if names.iter().any(|n| n == "adapter_config.json") {
        return "an adapter (LoRA), not a model; merge it into its base model first".into();
    }
    let files: Vec<_> = names.iter().filter(|n| n.ends_with(".gguf")).take(4).map(String::as_str).collect();
    match files[..] {
        [] => "no config.json here; is this a model's folder?".into(),
        [_] => format!("a folder without config.json; give the file in it, {}", files[0]),
        _ => format!("a folder without config.json; give one of the files in it, like {}", files.join(", ")),
    }
}

/// The likely problem of a folder without safetensors.
fn without_weights(names: &[String]) -> String {
    let pickle = |n: &&String| [".bin", ".pt", ".pth"].iter().any(|end| n.ends_with(end));
    match names.iter().find(pickle) {
        Some(found) => format!(
            "neither model.safetensors nor model.safetensors.index.json, but {found}; \
             weights in pickles are not read, convert them to safetensors"
        ),
        None => {
            "neither model.safetensors nor model.safetensors.index.json; is the download complete?".into()
        }
    }
}

/// The family and sizes that a `config.json` describes.
///
/// # Errors
/// Unknown `model_type`, or settings that are missing, malformed or not supported.
pub fn hf_spec(config: &Json) -> Result<(&'static Family, ModelSpec)> {
    let model_type = config.get("model_type").and_then(Json::as_str).ok_or_else(|| {
        Error::format("config.json: model_type", "missing; is this a model's configuration?")
    })?;
    let family = arch::of_hf(model_type)?;
    let quantised = config.get("quantization_config").filter(|q| !q.is_null());
    let method = quantised.map(|q| q.get("quant_method").and_then(Json::as_str).unwrap_or("unnamed"));
    if let Some(method) = method.filter(|&m| m != "mxfp4" || !family.habits.hf_interleaves) {
        return Err(Error::Unsupported(format!(
            "config.json: weights quantised by `{method}`; f32, f16 and bf16 folders and GGUF files are supported"
        )));
    }
    let config_of_text = HfConfig::new(config);
    // Families build lists of layers, so an impossible number of layers must be rejected first.
    if let Some(n) = config_of_text.opt_size("num_hidden_layers")?.filter(|&n| n > MAX_LAYERS) {
        return Err(Error::format(
            "config.json: num_hidden_layers",
            format!("{n} layers, wanted at most {MAX_LAYERS}"),
        ));
    }
    config_of_text.causal()?;
    let mut spec = (family.from_hf)(&config_of_text)?;
    // Multimodal files have this setting outside the text part, and that one takes precedence.
    if let (Some(_), Some(tied)) =
        (config.get("text_config"), config.get("tie_word_embeddings").and_then(Json::as_bool))
    {
        spec.tied_head = tied;
    }
    Ok((family, spec))
}

/// A JSON file; `None` if it does not exist.
fn json(path: &Path) -> Result<Option<Json>> {
    let Some(bytes) = small_file::read(path, MAX_JSON)? else { return Ok(None) };
    small_file::parse_json(&bytes)
        .map(Some)
        .map_err(|e| match guise(&bytes) {
            Some(guise) if guise != "JSON" => format!("not valid JSON; this is {guise}"),
            _ => format!("not valid JSON: {e}"),
        })
        .map_err(|problem| Error::format(path.display().to_string(), problem))
}

const WHOLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// All tensors under their own names: of the one file, or of the shards that an index lists. As in `transformers`, the one file
/// comes first: an index beside it is usually what is left of an older upload.
fn tensors(dir: &Path, family: &Family, notes: &mut Vec<String>) -> Result<(Contents, Files)> {
    let interleaves = family.habits.hf_interleaves;
    let skip = |name: &str| {
        let name = if interleaves { interleaved::with_kind(name) } else { name.to_owned() };
        arch::canonical_name(family.names, &name).is_none()
    };
    let raw = |name: &str| interleaves && interleaved::is_raw(name);
    let (one, index_path) = (dir.join(WHOLE), dir.join(INDEX));
    if one.exists() {
        if index_path.exists()
            && !json(&index_path).is_ok_and(|index| index.is_some_and(|i| lists_only(&i, WHOLE)))
        {
            notes.push(format!("{INDEX} is ignored: {WHOLE} beside it holds a whole model"));
        }
        let bytes = map_file(&one)?;
        let all = safetensors::parse(&bytes, &skip, &raw).map_err(|e| in_file(&one, e))?;
        return Ok((all, Files { count: 1, bytes: bytes.len() as u64 }));
    }
    let Some(index) = json(&index_path)? else {
        return Err(Error::format(dir.display().to_string(), without_weights(&names_in(dir))));
    };
    let what = || index_path.display().to_string();
    let map = index
        .get("weight_map")
        .and_then(Json::as_object)
        .ok_or_else(|| Error::format(what(), "no weight_map in it"))?;
    let mut shards: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (tensor, file) in map {
        let file = file.as_str().ok_or_else(|| Error::format(what(), format!("{tensor}: no file name")))?;
        // A shard lies beside its index; a path here could read files of other folders.
        if file.contains(['/', '\\']) || file == ".." {
            return Err(Error::format(what(), format!("{tensor}: `{file}` is not a plain file name")));
        }
        shards.entry(file).or_default().insert(tensor);
    }
    let total = shards.len();
    let (mut all, mut files) = (Contents::default(), Files::default());
    for (file, names) in shards {
        let path = dir.join(file);
        if !path.exists() {
            return Err(Error::format(
                path.display().to_string(),
                format!("missing: one of {total} shards, with {} tensors", names.len()),
            ));
        }
        // A shard may hold more than the index lists; the index decides.
        let bytes = map_file(&path)?;
        let found = safetensors::parse(&bytes, &skip, &raw).map_err(|e| in_file(&path, e))?;
        (files.count, files.bytes) = (files.count + 1, files.bytes + bytes.len() as u64);
        all.tensors.extend(found.tensors.into_iter().filter(|(n, _)| names.contains(n.as_str())));
        all.raw.extend(found.raw.into_iter().filter(|(n, _)| names.contains(n.as_str())));
    }
    Ok((all, files))
}

/// Whether all tensors of an index are in this file.
fn lists_only(index: &Json, file: &str) -> bool {
    let map = index.get("weight_map").and_then(Json::as_object);
    map.is_some_and(|map| !map.is_empty() && map.values().all(|of| of == file))
}

/// Settles which matrix is the head of a model whose configuration ties it to the embedding, as `transformers` does: whichever
/// of the two is stored serves as both, and if both are stored but differ, they are not tied.
fn tie(
    family: &Family,
    spec: &mut ModelSpec,
    stored: &mut BTreeMap<String, Tensor>,
    notes: &mut Vec<String>,
) {
    const EMBEDDING: &str = "token_embd.weight";
    const HEAD: &str = "output.weight";
    if !spec.tied_head {
        return;
    }
    let Some(head) = stored.remove(HEAD) else { return };
    let name = |canonical: &str| arch::file_name(family.names, canonical).unwrap_or_default();
    match stored.get(EMBEDDING) {
        None => {
            stored.insert(EMBEDDING.into(), head);
        }
        Some(embedding) if is_same(embedding, &head) => {}
        Some(_) => {
            notes.push(format!(
                "config.json: tie_word_embeddings is true, but {} and {} differ; both are used",
                name(EMBEDDING),
                name(HEAD)
            ));
            spec.tied_head = false;
            stored.insert(HEAD.into(), head);
        }
    }
}

/// Whether two matrices are equal. Of large ones, samples are compared: a head that was trained or adapted apart from the
/// embedding differs nearly everywhere.
fn is_same(a: &Tensor, b: &Tensor) -> bool {
    const WHOLE: usize = 16 << 20;
    const SAMPLE: usize = 4096;
    const SAMPLES: usize = 1024;
    if a.dtype != b.dtype || a.shape != b.shape {
        return false;
    }
    let n = a.data.len();
    if n <= WHOLE {
        return a.data[..] == b.data[..];
    }
    let (mut of_a, mut of_b) = ([0; SAMPLE], [0; SAMPLE]);
    (0..=SAMPLES).all(|i| {
        let at = ((n - SAMPLE) / SAMPLES) * i;
        a.data.read_at(at, &mut of_a);
        b.data.read_at(at, &mut of_b);
        of_a == of_b
    })
}

/// Tensors under canonical names, norms and biases in f32, and `stacks`, which have them. Those of other parts (vision) are left out.
fn canonical(
    family: &Family,
    spec: &mut ModelSpec,
    all: Vec<(String, Tensor)>,
    stacks: Vec<(String, Tensor)>,
    notes: &mut Vec<String>,
) -> Result<Vec<(String, Tensor)>> {
    let mut out: BTreeMap<String, Tensor> = stacks.into_iter().collect();
    for (hf, t) in all {
        let fused = ["qkv_proj", "gate_up_proj", "query_key_value", ".experts."];
        let unknown = arch::canonical_name(family.names, &hf).is_none();
        if let Some(fused) = fused.iter().find(|f| unknown && hf.contains(**f)) {
            return Err(Error::Unsupported(format!("{hf}: `{fused}` tensors are not supported")));
        }
        if [".weight_scale", ".qweight", ".scales", ".SCB"].iter().any(|s| hf.ends_with(s)) {
            return Err(Error::Unsupported(format!("{hf}: quantised safetensors are not supported")));
        }
        let Some(name) = arch::canonical_name(family.names, &hf) else { continue };
        if out.insert(name.clone(), t).is_some() {
            return Err(Error::format(hf, format!("a second tensor for {name}")));
        }
    }
    tie(family, spec, &mut out, notes);
    let parts = |weights| split_fused(spec, vectors_to_f32(split_stacks(spec, weights)?.into_iter())?);
    let weights = parts(out.into_iter().collect()).map_err(|e| in_hf_names(family, e))?;
    let mut out = Vec::new();
    for (name, t) in weights {
        let t = if family.hf_norms_are_offsets && name.ends_with("_norm.weight") {
            let w: Vec<f32> = crate::reference::dequant::dequantise(&t).iter().map(|w| 1.0 + w).collect();
            f32_tensor(t.shape.clone(), &w)?
        } else {
            t
        };
        out.push((name, t));
    }
    Ok(out)
}

/// Replaces a tensor's name in an error by its name in this folder.
fn in_hf_names(family: &Family, e: Error) -> Error {
    match e {
        Error::Format { what, problem } => {
            let problem = problem.replace("the model's sizes imply", "config.json implies");
            let problem = match problem.strip_suffix("is the file damaged?") {
                Some(p) if what.contains('.') => format!("{p}is a shard missing?"),
                _ => problem,
            };
            Error::Format { what: arch::file_name(family.names, &what).unwrap_or(what), problem }
        }
        Error::Unsupported(text) => {
            let named = text
                .split_once(": ")
                .and_then(|(name, rest)| Some(format!("{}: {rest}", arch::file_name(family.names, name)?)));
            Error::Unsupported(named.unwrap_or(text))
        }
        other => other,
    }
}

fn eos_ids(config: Option<&Json>) -> Option<Vec<u32>> {
    let id = |v: &Json| v.as_u64().and_then(|v| u32::try_from(v).ok());
    let v = config?.get("eos_token_id")?;
    match v {
        Json::Array(list) => Some(list.iter().filter_map(id).collect()),
        v => id(v).map(|v| vec![v]),
    }
}

/// `chat_template.jinja`, or `chat_template` of `tokenizer_config.json` (text, or a list of named templates of
/// which `default` counts), or `chat_template.json`.
fn chat_template(dir: &Path, tokenizer_config: Option<&Json>) -> Result<Option<String>> {
    if let Some(template) = small_file::read_text(&dir.join("chat_template.jinja"), MAX_TEMPLATE)? {
        return Ok(Some(template));
    }
    let of = |c: &Json| match c.get("chat_template")? {
        Json::String(t) => Some(t.clone()),
        Json::Array(list) => {
            let default = list.iter().find(|t| t.get("name").and_then(Json::as_str) == Some("default"))?;
            default.get("template")?.as_str().map(str::to_owned)
        }
        _ => None,
    };
    if let Some(t) = tokenizer_config.and_then(of) {
        return Ok(Some(t));
    }
    Ok(json(&dir.join("chat_template.json"))?.as_ref().and_then(of))
}
