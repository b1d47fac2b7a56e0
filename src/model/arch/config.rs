//! Typed access to the settings of a model file. Every error names the key, what was found, what was wanted.

use serde_json::Value as Json;

use crate::model::check::MAX_LAYERS;
use crate::model::formats::gguf::{Array, Metadata, Value};
use crate::model::spec::{Rope, RopePairing, RopeScaling, Window};
use crate::tensor::DType;
use crate::{Error, Result};

use crate::model::Weights;

/// The metadata of a GGUF file, and its tensors, which alone give the vocabulary size and RoPE factors.
pub struct GgufConfig<'a> {
    /// `general.architecture`: the prefix of the keys.
    pub arch: &'a str,
    /// All keys.
    pub meta: &'a Metadata,
    /// All tensors.
    pub tensors: &'a Weights,
}

impl GgufConfig<'_> {
    fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.arch)
    }

    fn missing(&self, key: &str) -> Error {
        Error::format(self.full(key), "missing from the metadata")
    }

    fn wrong(&self, key: &str, want: &str, v: &Value) -> Error {
        let mut found = format!("{v:?}");
        if found.len() > 60 {
            found = format!("{}...", found.chars().take(60).collect::<String>());
        }
        Error::format(self.full(key), format!("{found}, wanted {want}"))
    }

    /// A size, if present. A list of equal sizes (some converters write one per layer) counts as one.
    pub fn opt_size(&self, key: &str) -> Result<Option<usize>> {
        let Some(v) = self.meta.get(&self.full(key)) else { return Ok(None) };
        let n = match v {
            Value::Array(a) => {
                let mut all = a.ints().ok_or_else(|| self.wrong(key, "a size", v))?;
                let first = all.next().ok_or_else(|| self.wrong(key, "a size", v))?;
                if !all.all(|x| x == first) {
                    return Err(Error::Unsupported(format!("{}: sizes that differ by layer", self.full(key))));
                }
                u64::try_from(first).ok()
            }
            v => v.as_u64(),
        };
        n.and_then(|n| usize::try_from(n).ok()).map(Some).ok_or_else(|| self.wrong(key, "a size", v))
    }

    /// A required size.
    pub fn size(&self, key: &str) -> Result<usize> {
        self.opt_size(key)?.ok_or_else(|| self.missing(key))
    }

    /// A number, if present.
    pub fn opt_float(&self, key: &str) -> Result<Option<f32>> {
        let Some(v) = self.meta.get(&self.full(key)) else { return Ok(None) };
        v.as_f64().map(|f| Some(f as f32)).ok_or_else(|| self.wrong(key, "a number", v))
    }

    /// A required number.
    pub fn float(&self, key: &str) -> Result<f32> {
        self.opt_float(key)?.ok_or_else(|| self.missing(key))
    }

    /// Text, if present.
    pub fn opt_text(&self, key: &str) -> Result<Option<&str>> {
        let Some(v) = self.meta.get(&self.full(key)) else { return Ok(None) };
        v.as_str().map(Some).ok_or_else(|| self.wrong(key, "text", v))
    }

    /// Integers, if present.
    pub fn opt_ints(&self, key: &str) -> Option<impl ExactSizeIterator<Item = i64> + '_> {
        self.meta.get(&self.full(key)).and_then(Value::as_array).and_then(Array::ints)
    }

    /// The model's own name.
    pub fn name(&self) -> String {
        self.meta.get("general.name").and_then(Value::as_lossy_str).unwrap_or_default().into_owned()
    }

    /// Rows of the embedding. The tokenizer may have fewer tokens (padding), never more.
    pub fn vocab(&self) -> Result<usize> {
        let t = self
            .tensors
            .get("token_embd.weight")
            .ok_or_else(|| Error::format("token_embd.weight", "missing from the model"))?;
        let rows = match t.shape[..] {
            [rows, _] => rows,
            _ => {
                return Err(Error::format(
                    "token_embd.weight",
                    format!("shape {:?}, wanted [V, d]", t.shape),
                ));
            }
        };
        let tokens = self.meta.get("tokenizer.ggml.tokens").and_then(Value::as_array).map_or(0, Array::len);
        if tokens > rows {
            return Err(Error::format(
                "tokenizer.ggml.tokens",
                format!("{tokens} tokens, but token_embd.weight has only {rows} rows"),
            ));
        }
        Ok(rows)
    }

    /// Width of a head: `attention.key_length`, or d / heads.
    pub fn head_dim(&self, d_model: usize, heads: usize) -> Result<usize> {
        let k = self.opt_size("attention.key_length")?;
        let v = self.opt_size("attention.value_length")?;
        let head_dim = match k {
            Some(k) => k,
            None if heads > 0 && d_model.is_multiple_of(heads) => d_model / heads,
            None => {
                return Err(Error::format(
                    self.full("attention.head_count"),
                    format!("{heads} heads do not divide embedding_length {d_model}"),
                ));
            }
        };
        match v {
            Some(v) if v != head_dim => Err(Error::Unsupported(format!(
                "{}: {v} differs from the key length {head_dim}",
                self.full("attention.value_length")
            ))),
            _ => Ok(head_dim),
        }
    }

    /// The rotary embedding. `theta` is the family's default base.
    pub fn rope(&self, pairing: RopePairing, head_dim: usize, theta: f32) -> Result<Rope> {
        let dim = self.opt_size("rope.dimension_count")?.unwrap_or(head_dim);
        let theta = self.opt_float("rope.freq_base")?.unwrap_or(theta);
        let factor = match self.opt_float("rope.scaling.factor")? {
            Some(f) => Some(f),
            None => self.opt_float("rope.scale_linear")?,
        };
        let scaling = match self.opt_text("rope.scaling.type")? {
            Some("none") => RopeScaling::None,
            None | Some("linear") => match factor {
                // Some writers use zero for "none".
                Some(f) if f != 1.0 && f != 0.0 => RopeScaling::Linear { factor: f },
                _ => RopeScaling::None,
            },
            Some(other) => {
                return Err(Error::Unsupported(format!(
                    "{}: `{other}`; none, linear and rope_freqs.weight are supported",
                    self.full("rope.scaling.type")
                )));
            }
        };
        let scaling = match self.tensors.get("rope_freqs.weight") {
            None => scaling,
            Some(_) if scaling != RopeScaling::None => {
                return Err(Error::Unsupported("rope_freqs.weight together with linear RoPE scaling".into()));
            }
            Some(t) => {
                let t = self.tensors.require("rope_freqs.weight", &[dim / 2]).map(|_| t)?;
                if t.dtype != DType::F32 {
                    return Err(Error::format("rope_freqs.weight", format!("{}, wanted f32", t.dtype)));
                }
                RopeScaling::Factors(crate::reference::dequant::dequantise(t))
            }
        };
        Ok(Rope { theta, local_theta: None, pairing, dim, scaling })
    }

    /// Returns an error for a model whose tokens see those behind them.
    pub fn causal(&self) -> Result<()> {
        match self.meta.get(&self.full("attention.causal")) {
            None | Some(Value::Bool(true)) => Ok(()),
            Some(Value::Bool(false)) => Err(Error::Unsupported(format!(
                "{} is false: attention that is not causal; only models that generate are supported",
                self.full("attention.causal")
            ))),
            Some(v) => Err(self.wrong("attention.causal", "true or false", v)),
        }
    }

    /// Windows of `size` tokens on the layers that the file lists, else on all but every `pattern`-th.
    pub fn window(&self, size: usize, pattern: usize, n_layers: usize) -> Result<Window> {
        let key = "attention.sliding_window_pattern";
        let layers = match self.opt_ints(key) {
            // What is not one for each layer is refused by the check of the spec.
            Some(listed) => listed.take(MAX_LAYERS + 1).map(|x| x != 0).collect(),
            None => all_but_every(self.opt_size(key)?.unwrap_or(pattern), n_layers),
        };
        Ok(Window { size, layers })
    }

    /// Returns an error for a mixture of experts.
    pub fn dense(&self) -> Result<()> {
        match self.opt_size("expert_count")? {
            None | Some(0) => Ok(()),
            Some(n) => Err(Error::Unsupported(format!(
                "{}: a mixture of {n} experts; only dense models are supported",
                self.full("expert_count")
            ))),
        }
    }
}

/// A `config.json`. Settings in a nested `text_config` (multimodal files) are found, too.
pub struct HfConfig<'a> {
    json: &'a Json,
}

impl<'a> HfConfig<'a> {
    /// Wraps the parsed file.
    pub fn new(json: &'a Json) -> Self {
        match json.get("text_config") {
            Some(text) if text.is_object() => HfConfig { json: text },
            _ => HfConfig { json },
        }
    }

    fn missing(key: &str) -> Error {
        Error::format(format!("config.json: {key}"), "missing")
    }

    fn wrong(key: &str, want: &str, v: &Json) -> Error {
        let found: String = v.to_string().chars().take(60).collect();
        Error::format(format!("config.json: {key}"), format!("{found}, wanted {want}"))
    }

    /// A setting; `null` counts as absent.
    pub fn get(&self, key: &str) -> Option<&'a Json> {
        self.json.get(key).filter(|v| !v.is_null())
    }

    /// A size, if present.
    pub fn opt_size(&self, key: &str) -> Result<Option<usize>> {
        let Some(v) = self.get(key) else { return Ok(None) };
        v.as_u64().and_then(|n| n.try_into().ok()).map(Some).ok_or_else(|| Self::wrong(key, "a size", v))
    }

    /// A required size.
    pub fn size(&self, key: &str) -> Result<usize> {
        self.opt_size(key)?.ok_or_else(|| Self::missing(key))
    }

    /// A number, if present.
    pub fn opt_float(&self, key: &str) -> Result<Option<f32>> {
        let Some(v) = self.get(key) else { return Ok(None) };
        v.as_f64().map(|f| Some(f as f32)).ok_or_else(|| Self::wrong(key, "a number", v))
    }

    /// A number that `null` switches off; `default` if absent.
    pub fn float_or_null(&self, key: &str, default: Option<f32>) -> Result<Option<f32>> {
        if self.json.get(key).is_some() { self.opt_float(key) } else { Ok(default) }
    }

    /// A size that `null` switches off; `default` if absent.
    pub fn size_or_null(&self, key: &str, default: Option<usize>) -> Result<Option<usize>> {
        if self.json.get(key).is_some() { self.opt_size(key) } else { Ok(default) }
    }

    /// A switch; `default` if absent.
    pub fn flag(&self, key: &str, default: bool) -> Result<bool> {
        let Some(v) = self.get(key) else { return Ok(default) };
        v.as_bool().ok_or_else(|| Self::wrong(key, "true or false", v))
    }

    /// Text, if present.
    pub fn opt_text(&self, key: &str) -> Result<Option<&'a str>> {
        let Some(v) = self.get(key) else { return Ok(None) };
        v.as_str().map(Some).ok_or_else(|| Self::wrong(key, "text", v))
    }

    /// The model's own name.
    pub fn name(&self) -> String {
        self.get("_name_or_path").and_then(Json::as_str).unwrap_or_default().to_owned()
    }

    /// Returns an error for an activation that is not listed.
    pub fn activation(&self, key: &str, known: &[&str]) -> Result<()> {
        match self.opt_text(key)? {
            Some(a) if !known.contains(&a) => Err(Error::Unsupported(format!(
                "config.json: {key} is `{a}`; this family runs with {}",
                known.join(" or ")
            ))),
            _ => Ok(()),
        }
    }

    /// Returns an error for a model whose tokens see those behind them.
    pub fn causal(&self) -> Result<()> {
        let not = |key: &str, v: &Json| {
            Err(Error::Unsupported(format!(
                "config.json: {key} is {v}: attention that is not causal; only models that generate are supported"
            )))
        };
        match (self.get("is_causal"), self.get("use_bidirectional_attention")) {
            (Some(v @ Json::Bool(false)), _) => not("is_causal", v),
            // Multimodal models name the tokens concerned; those of images do not come here.
            (_, Some(v)) if *v == true || v == "all" => not("use_bidirectional_attention", v),
            _ => Ok(()),
        }
    }

    /// Width of a head: `head_dim`, or d / heads.
    pub fn head_dim(&self, d_model: usize, heads: usize) -> Result<usize> {
        match self.opt_size("head_dim")? {
            Some(n) => Ok(n),
            None if heads > 0 && d_model.is_multiple_of(heads) => Ok(d_model / heads),
            None => Err(Error::format(
                "config.json: num_attention_heads",
                format!("{heads} heads do not divide hidden_size {d_model}"),
            )),
        }
    }

    /// The rotary embedding: `rope_theta` and `rope_scaling`, or the newer `rope_parameters` (by layer type in
    /// Gemma 3). `theta` is the family's default base.
    pub fn rope(&self, head_dim: usize, theta: f32) -> Result<Rope> {
        let params = self.get("rope_parameters");
        let full = params.map(|p| p.get("full_attention").unwrap_or(p));
        let number = |from: Option<&Json>, key: &str| -> Result<Option<f32>> {
            match from.and_then(|o| o.get(key)).filter(|v| !v.is_null()) {
                None => Ok(None),
                Some(v) => v.as_f64().map(|f| Some(f as f32)).ok_or_else(|| Self::wrong(key, "a number", v)),
            }
        };
        let base = match number(full, "rope_theta")? {
            Some(t) => t,
            None => self.opt_float("rope_theta")?.unwrap_or(theta),
        };
        let local_theta = number(params.and_then(|p| p.get("sliding_attention")), "rope_theta")?;
        let dim = match self.opt_float("partial_rotary_factor")? {
            Some(f) if (0.0..=1.0).contains(&f) => (head_dim as f32 * f) as usize,
            Some(f) => return Err(Error::format("config.json: partial_rotary_factor", format!("{f}"))),
            None => head_dim,
        };
        let scaling = match self.get("rope_scaling").or(full) {
            None => RopeScaling::None,
            Some(s) if !s.is_object() => return Err(Self::wrong("rope_scaling", "an object", s)),
            Some(s) => {
                let kind = s.get("rope_type").or_else(|| s.get("type")).filter(|v| !v.is_null());
                let need = |key: &str| {
                    number(Some(s), key)?.ok_or_else(|| Self::missing(&format!("rope_scaling.{key}")))
                };
                match kind.map(|k| k.as_str().unwrap_or("?")) {
                    None | Some("default") => RopeScaling::None,
                    Some("linear") => RopeScaling::Linear { factor: need("factor")? },
                    Some("llama3") => RopeScaling::Llama3 {
                        factor: need("factor")?,
                        low_freq_factor: need("low_freq_factor")?,
                        high_freq_factor: need("high_freq_factor")?,
                        original_context: need("original_max_position_embeddings")? as usize,
                    },
                    Some(other) => {
                        return Err(Error::Unsupported(format!(
                            "config.json: RoPE scaling `{other}`; default, linear and llama3 are supported"
                        )));
                    }
                }
            }
        };
        Ok(Rope { theta: base, local_theta, pairing: RopePairing::Half, dim, scaling })
    }

    /// Which layers are windowed according to `layer_types`, if that is present.
    pub fn layer_types(&self, n_layers: usize) -> Result<Option<Vec<bool>>> {
        let Some(v) = self.get("layer_types") else { return Ok(None) };
        let list = v.as_array().ok_or_else(|| Self::wrong("layer_types", "a list", v))?;
        if list.len() != n_layers {
            return Err(Error::format(
                "config.json: layer_types",
                format!("{} entries for {n_layers} layers", list.len()),
            ));
        }
        let each = |v: &Json| match v.as_str() {
            Some("sliding_attention") => Ok(true),
            Some("full_attention") => Ok(false),
            _ => Err(Error::Unsupported(format!("config.json: layer_types has {v}"))),
        };
        list.iter().map(each).collect::<Result<Vec<_>>>().map(Some)
    }

    /// Windows of `size` tokens on the layers that `layer_types` lists, else on all but every `pattern`-th; `None` if
    /// these are no layers.
    pub fn window(&self, size: usize, pattern: usize, n_layers: usize) -> Result<Option<Window>> {
        let layers = match self.layer_types(n_layers)? {
            Some(listed) => listed,
            None => {
                let stated = match self.opt_size("sliding_window_pattern")? {
                    Some(p) => Some(p),
                    None => self.opt_size("_sliding_window_pattern")?,
                };
                all_but_every(stated.unwrap_or(pattern), n_layers)
            }
        };
        Ok(layers.contains(&true).then_some(Window { size, layers }))
    }

    /// The windows of Qwen: off unless `use_sliding_window`, then on from layer `max_window_layers`.
    pub fn qwen_window(&self, n_layers: usize) -> Result<Option<Window>> {
        if !self.flag("use_sliding_window", false)? {
            return Ok(None);
        }
        let Some(size) = self.opt_size("sliding_window")? else { return Ok(None) };
        let layers = match self.layer_types(n_layers)? {
            Some(l) => l,
            None => {
                let first = self.opt_size("max_window_layers")?.unwrap_or(n_layers);
                (0..n_layers).map(|i| i >= first).collect()
            }
        };
        Ok(layers.contains(&true).then_some(Window { size, layers }))
    }
}

/// Of `n_layers`, all but every `pattern`-th; all if `pattern` is 0.
fn all_but_every(pattern: usize, n_layers: usize) -> Vec<bool> {
    // Sizes are checked after the spec is built, so the number of layers cannot be trusted yet.
    (0..n_layers.min(1 << 16)).map(|i| pattern == 0 || i % pattern < pattern - 1).collect()
}
