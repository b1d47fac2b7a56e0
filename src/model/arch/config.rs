//! Typed access to the settings of a model file. Every error names the key, what was found, what was wanted.

use serde_json::Value as Json;

use crate::model::check::MAX_LAYERS;
use crate::model::formats::gguf::{Array, Metadata, Value};
use crate::model::spec::Window;
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
    pub(super) fn full(&self, key: &str) -> String {
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
                    return Err(Error::Unsupported(format!(
                        "{}: sizes that differ by layer",
                        self.full(key)
                    )));
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

    /// A switch, if present.
    pub fn opt_flag(&self, key: &str) -> Result<Option<bool>> {
        match self.meta.get(&self.full(key)) {
            None => Ok(None),
            Some(Value::Bool(on)) => Ok(Some(*on)),
            Some(v) => Err(self.wrong(key, "true or false", v)),
        }
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
                "{}: a mixture of {n} experts, which this architecture is not known to have",
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

    pub(super) fn missing(key: &str) -> Error {
        Error::format(format!("config.json: {key}"), "missing")
    }

    pub(super) fn wrong(key: &str, want: &str, v: &Json) -> Error {
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
        let Some(size) = self.size_or_null("sliding_window", Some(4096))? else { return Ok(None) };
        let layers = match self.layer_types(n_layers)? {
            Some(l) => l,
            None => {
                let first = self.opt_size("max_window_layers")?.unwrap_or(28);
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
