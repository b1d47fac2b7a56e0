//! The rotary embedding of a model file: its base, the elements it turns, and the scaling of its frequencies.
//!
//! Hugging Face's settings are read as `transformers` 5.24 reads them, GGUF's as llama.cpp does.

use serde_json::Value as Json;

use super::{GgufConfig, HfConfig};
use crate::model::check::MAX_CONTEXT;
use crate::model::spec::{QueryScaling, Rope, RopePairing, RopeScaling};
use crate::tensor::DType;
use crate::{Error, Result};

/// The tensor of LongRoPE's divisors for long contexts in GGUF.
pub const LONG_FACTORS: &str = "rope_factors_long.weight";
/// The tensor of its divisors for contexts up to the original one.
pub const SHORT_FACTORS: &str = "rope_factors_short.weight";

/// The factor of cosines and sines that the YaRN paper recommends, with its logarithm times `by`.
pub fn mscale(factor: f64, by: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * by * factor.ln() + 1.0 }
}

/// What a family assumes where a `config.json` is silent, and where it differs from the others.
#[derive(Debug, Clone, Copy)]
pub struct RopeDefaults {
    /// `rope_theta`.
    pub theta: f32,
    /// `max_position_embeddings`.
    pub max_context: Option<usize>,
    /// `original_max_position_embeddings`, if the family has a default (Phi-3) for the one beside the other sizes.
    pub original_context: Option<usize>,
    /// Whether `yarn` is an old name of `longrope` (Phi-3).
    pub yarn_is_longrope: bool,
}

impl RopeDefaults {
    /// Only the base differs.
    pub const fn base(theta: f32) -> RopeDefaults {
        RopeDefaults { theta, max_context: None, original_context: None, yarn_is_longrope: false }
    }
}

impl HfConfig<'_> {
    /// The rotary embedding: `rope_theta` and `rope_scaling`, or the newer `rope_parameters` (which may be by layer type).
    /// `theta` is the family's default base.
    pub fn rope(&self, head_dim: usize, theta: f32) -> Result<Rope> {
        self.rope_or(head_dim, &RopeDefaults::base(theta))
    }

    /// [`HfConfig::rope`] of a family with more defaults.
    pub fn rope_or(&self, head_dim: usize, defaults: &RopeDefaults) -> Result<Rope> {
        let params = self.get("rope_parameters");
        let by_layer = params
            .is_some_and(|p| ["full_attention", "sliding_attention"].iter().any(|k| p.get(*k).is_some()));
        let (full_name, full) = match by_layer {
            true => (FULL, self.of_layers("full_attention")),
            false => ("rope_parameters", params),
        };
        let main = Settings::new(self, &[("rope_scaling", self.get("rope_scaling")), (full_name, full)])?;
        let mut rope = main.rope(head_dim, defaults, "rope_theta")?;
        if let Some(local) = self.of_layers("sliding_attention").filter(|_| by_layer) {
            let local =
                Settings::new(self, &[(SLIDING, Some(local))])?.rope(head_dim, defaults, "rope_theta")?;
            if (local.theta, &local.scaling) != (rope.theta, &rope.scaling) {
                (rope.local_theta, rope.local_scaling) = (Some(local.theta), local.scaling);
            }
        }
        Ok(rope)
    }

    /// The rotary embedding of a family whose windowed layers always have a base of their own (Gemma 3): a flat
    /// `rope_parameters` says nothing about it, and `rope_scaling` is that of the other layers.
    pub fn rope_by_layer(&self, head_dim: usize, defaults: &RopeDefaults, local_theta: f32) -> Result<Rope> {
        let main = Settings::new(
            self,
            &[("rope_scaling", self.get("rope_scaling")), (FULL, self.of_layers("full_attention"))],
        )?;
        let local = Settings::new(self, &[(SLIDING, self.of_layers("sliding_attention"))])?;
        let local = local.rope(
            head_dim,
            &RopeDefaults { theta: local_theta, ..*defaults },
            "rope_local_base_freq",
        )?;
        Ok(Rope {
            local_theta: Some(local.theta),
            local_scaling: local.scaling,
            ..main.rope(head_dim, defaults, "rope_theta")?
        })
    }

    fn of_layers(&self, kind: &str) -> Option<&Json> {
        self.get("rope_parameters").and_then(|p| p.get(kind)).filter(|v| !v.is_null())
    }

    /// The longest context: `max_position_embeddings`, times the factor of a scaling that stretches it. As in vLLM, `yarn`
    /// stretches its original context, and `llama3` and `longrope` state the stretched one.
    pub fn max_context(&self, default: Option<usize>, scaling: &RopeScaling) -> Result<usize> {
        let stated = match self.opt_size("max_position_embeddings")? {
            Some(n) => n,
            None => default.ok_or_else(|| Self::missing("max_position_embeddings"))?,
        };
        let (context, factor) = match *scaling {
            RopeScaling::Linear { factor } | RopeScaling::Dynamic { factor, .. } => (stated, factor),
            RopeScaling::Yarn { factor, original_context, .. } => (original_context, factor),
            _ => return Ok(stated),
        };
        match stretched(context, factor) {
            n if n > MAX_CONTEXT && context <= MAX_CONTEXT => Err(Error::format(
                "config.json: rope_scaling.factor",
                format!("{factor} times {context} tokens is more than {MAX_CONTEXT}; is the file damaged?"),
            )),
            n => Ok(n),
        }
    }
}

/// `context` times `factor`; impossible factors are the check's business.
fn stretched(context: usize, factor: f32) -> usize {
    if !(context > 0 && factor > 0.0 && factor.is_finite()) {
        return context.max(1);
    }
    // A factor stored as f32 must not lose a token: 10.1 x 1000 is 10100.
    let decimal: f64 = factor.to_string().parse().unwrap_or(f64::from(factor));
    ((context as f64 * decimal + 1e-6) as usize).max(1)
}

const FULL: &str = "rope_parameters.full_attention";
const SLIDING: &str = "rope_parameters.sliding_attention";

/// The objects of a `config.json` that settings of RoPE are looked for in, by name, the first first.
struct Settings<'a> {
    config: &'a HfConfig<'a>,
    objects: Vec<(&'static str, &'a Json)>,
}

impl<'a> Settings<'a> {
    fn new(config: &'a HfConfig<'a>, objects: &[(&'static str, Option<&'a Json>)]) -> Result<Settings<'a>> {
        let objects: Vec<_> = objects.iter().filter_map(|&(name, o)| Some((name, o?))).collect();
        match objects.iter().find(|(_, o)| !o.is_object()) {
            Some((name, o)) => Err(HfConfig::wrong(name, "an object", o)),
            None => Ok(Settings { config, objects }),
        }
    }

    fn get(&self, key: &str) -> Option<&'a Json> {
        self.objects.iter().find_map(|(_, o)| o.get(key).filter(|v| !v.is_null()))
    }

    /// The full name of a key: where it is, or where it is missing.
    fn named(&self, key: &str) -> String {
        let has = self.objects.iter().find(|(_, o)| o.get(key).is_some_and(|v| !v.is_null()));
        let (object, _) = has.or(self.objects.first()).unwrap_or(&("rope_parameters", &Json::Null));
        format!("{object}.{key}")
    }

    fn number(&self, key: &str) -> Result<Option<f64>> {
        let Some(v) = self.get(key) else { return Ok(None) };
        v.as_f64().map(Some).ok_or_else(|| HfConfig::wrong(&self.named(key), "a number", v))
    }

    fn need(&self, key: &str) -> Result<f64> {
        self.number(key)?.ok_or_else(|| HfConfig::missing(&self.named(key)))
    }

    fn numbers(&self, key: &str) -> Result<Vec<f32>> {
        let v = self.get(key).ok_or_else(|| HfConfig::missing(&self.named(key)))?;
        let list = v.as_array().and_then(|l| l.iter().map(Json::as_f64).collect::<Option<Vec<f64>>>());
        let list = list.ok_or_else(|| HfConfig::wrong(&self.named(key), "a list of numbers", v))?;
        Ok(list.into_iter().map(|x| x as f32).collect())
    }

    fn rope(&self, head_dim: usize, defaults: &RopeDefaults, theta_key: &str) -> Result<Rope> {
        let theta = match self.number("rope_theta")? {
            Some(t) => t as f32,
            None => self.config.opt_float(theta_key)?.unwrap_or(defaults.theta),
        };
        let partial = match self.number("partial_rotary_factor")? {
            Some(f) => Some(f),
            None => self.config.opt_float("partial_rotary_factor")?.map(f64::from),
        };
        let dim = match partial {
            // Written in decimal, where f32 would lose an element: 0.7 of 10 are 7.
            Some(f) if (0.0..=1.0).contains(&f) => (head_dim as f64 * f + 1e-6) as usize,
            Some(f) => return Err(Error::format("config.json: partial_rotary_factor", format!("{f}"))),
            None => head_dim,
        };
        let scaling = self.scaling(defaults)?;
        let query_scaling = match self.number("llama_4_scaling_beta")? {
            Some(beta) if beta != 0.0 => {
                Some(QueryScaling { beta: beta as f32, original_context: self.original(defaults)? })
            }
            _ => None,
        };
        let (local_theta, local_scaling) = (None, RopeScaling::None);
        Ok(Rope {
            theta,
            local_theta,
            local_scaling,
            pairing: RopePairing::Half,
            dim,
            scaling,
            query_scaling,
        })
    }

    /// The context of the first training: beside the other sizes, where Phi-3 has it, takes precedence.
    fn original(&self, defaults: &RopeDefaults) -> Result<usize> {
        let key = "original_max_position_embeddings";
        if let Some(n) = self.config.opt_size(key)?.or(defaults.original_context) {
            return Ok(n);
        }
        match self.get(key) {
            None => self.stated(defaults),
            Some(v) => {
                let n = v.as_f64().filter(|n| n.fract() == 0.0 && (0.0..1e15).contains(n));
                n.map(|n| n as usize).ok_or_else(|| HfConfig::wrong(&self.named(key), "a size", v))
            }
        }
    }

    fn stated(&self, defaults: &RopeDefaults) -> Result<usize> {
        let n = self.config.opt_size("max_position_embeddings")?.or(defaults.max_context);
        n.ok_or_else(|| HfConfig::missing("max_position_embeddings"))
    }

    /// The factor; where it is `null` (or, if `optional`, absent), how far the context was stretched.
    fn factor(&self, optional: bool, defaults: &RopeDefaults) -> Result<f64> {
        let null = self.objects.iter().any(|(_, o)| o.get("factor").is_some_and(Json::is_null));
        match self.number("factor")? {
            Some(f) => Ok(f),
            None if optional || null => {
                Ok(self.stated(defaults)? as f64 / self.original(defaults)?.max(1) as f64)
            }
            None => Err(HfConfig::missing(&self.named("factor"))),
        }
    }

    fn scaling(&self, defaults: &RopeDefaults) -> Result<RopeScaling> {
        let kind = self.get("rope_type").or_else(|| self.get("type"));
        let kind = match kind {
            None => return Ok(RopeScaling::None),
            Some(k) => k.as_str().ok_or_else(|| HfConfig::wrong(&self.named("rope_type"), "text", k))?,
        };
        Ok(match kind {
            "default" => RopeScaling::None,
            "linear" => RopeScaling::Linear { factor: self.need("factor")? as f32 },
            "dynamic" => RopeScaling::Dynamic {
                factor: self.need("factor")? as f32,
                original_context: self.stated(defaults)?,
            },
            "llama3" => RopeScaling::Llama3 {
                factor: self.need("factor")? as f32,
                low_freq_factor: self.need("low_freq_factor")? as f32,
                high_freq_factor: self.need("high_freq_factor")? as f32,
                original_context: self.original(defaults)?,
            },
            "yarn" if !defaults.yarn_is_longrope => {
                let factor = self.factor(false, defaults)?;
                let attention_factor = match self.number("attention_factor")? {
                    Some(by) => by,
                    None => match (self.number("mscale")?, self.number("mscale_all_dim")?) {
                        (Some(m), Some(all)) if m != 0.0 && all != 0.0 => {
                            mscale(factor, m) / mscale(factor, all)
                        }
                        _ => mscale(factor, 1.0),
                    },
                };
                // Zero counts as absent.
                let turns = |key, default| -> Result<f32> {
                    Ok(self.number(key)?.filter(|&n| n != 0.0).unwrap_or(default) as f32)
                };
                RopeScaling::Yarn {
                    factor: factor as f32,
                    original_context: self.original(defaults)?,
                    beta_fast: turns("beta_fast", 32.0)?,
                    beta_slow: turns("beta_slow", 1.0)?,
                    truncate: match self.get("truncate") {
                        None => true,
                        Some(v) => v
                            .as_bool()
                            .ok_or_else(|| HfConfig::wrong(&self.named("truncate"), "true or false", v))?,
                    },
                    attention_factor: attention_factor as f32,
                }
            }
            "longrope" | "su" | "yarn" => {
                let original = self.original(defaults)?;
                let attention_factor = match self.number("attention_factor")? {
                    Some(by) => by,
                    None => match self.factor(true, defaults)? {
                        f if f <= 1.0 => 1.0,
                        f => (1.0 + f.ln() / (original as f64).ln()).sqrt(),
                    },
                };
                RopeScaling::LongRope {
                    short: self.numbers("short_factor")?,
                    long: self.numbers("long_factor")?,
                    original_context: original,
                    attention_factor: attention_factor as f32,
                }
            }
            other => {
                return Err(Error::Unsupported(format!(
                    "config.json: RoPE scaling `{other}`; default, linear, dynamic, llama3, yarn and longrope are \
                     supported"
                )));
            }
        })
    }
}

impl GgufConfig<'_> {
    /// The rotary embedding. `theta` is the family's default base.
    pub fn rope(&self, pairing: RopePairing, head_dim: usize, theta: f32) -> Result<Rope> {
        let dim = self.opt_size("rope.dimension_count")?.unwrap_or(head_dim);
        let theta = self.opt_float("rope.freq_base")?.unwrap_or(theta);
        let original_context = match self.opt_size("rope.scaling.original_context_length")? {
            Some(n) => n,
            None => self.size("context_length")?,
        };
        let scaling = self.scaling(dim, original_context)?;
        let query_scaling = match self.opt_float("attention.temperature_scale")? {
            Some(beta) if beta != 0.0 => Some(QueryScaling { beta, original_context }),
            _ => None,
        };
        let (local_theta, local_scaling) = (None, RopeScaling::None);
        Ok(Rope { theta, local_theta, local_scaling, pairing, dim, scaling, query_scaling })
    }

    /// The longest context: `context_length`, or what YaRN stretches the original context to if that is more, since
    /// converters leave the unstretched one in the file.
    pub fn max_context(&self, rope: &Rope) -> Result<usize> {
        let stated = self.size("context_length")?;
        Ok(match rope.scaling {
            RopeScaling::Yarn { factor, original_context, .. } => {
                stated.max(stretched(original_context, factor))
            }
            _ => stated,
        })
    }

    fn scaling(&self, dim: usize, original_context: usize) -> Result<RopeScaling> {
        let factor = match self.opt_float("rope.scaling.factor")? {
            Some(f) => Some(f),
            None => self.opt_float("rope.scale_linear")?,
        };
        // Some writers use zero for "none".
        let factor = factor.filter(|&f| f != 0.0).unwrap_or(1.0);
        let attention = self.opt_float("rope.scaling.attn_factor")?.unwrap_or(1.0);
        let key = self.full("rope.scaling.type");
        let kind = self.opt_text("rope.scaling.type")?;
        let factor = if kind == Some("none") { 1.0 } else { factor };
        let freqs = self.factors("rope_freqs.weight", dim)?;
        let long_short = match (self.factors(LONG_FACTORS, dim)?, self.factors(SHORT_FACTORS, dim)?) {
            (Some(long), Some(short)) => Some((long, short)),
            (None, None) => None,
            (None, _) => return Err(Error::format(LONG_FACTORS, format!("missing beside {SHORT_FACTORS}"))),
            (_, None) => return Err(Error::format(SHORT_FACTORS, format!("missing beside {LONG_FACTORS}"))),
        };
        let times = |factors: Vec<f32>| factors.into_iter().map(|f| f * factor).collect::<Vec<f32>>();
        let scaling = match (kind, freqs, long_short) {
            (_, Some(_), Some(_)) => {
                return Err(Error::Unsupported(format!("rope_freqs.weight together with {LONG_FACTORS}")));
            }
            (Some("yarn"), None, None) => return self.yarn(factor, original_context, attention),
            (Some("yarn"), ..) => {
                return Err(Error::Unsupported(format!("{key}: yarn together with factors per frequency")));
            }
            // Phi-3's converter writes the tensors and no type.
            (None | Some("none" | "linear" | "longrope"), None, Some((long, short))) => {
                return Ok(RopeScaling::LongRope {
                    short: times(short),
                    long: times(long),
                    original_context,
                    attention_factor: attention,
                });
            }
            (Some("longrope"), ..) => {
                return Err(Error::format(LONG_FACTORS, format!("missing, but {key} is longrope")));
            }
            (None | Some("none" | "linear"), Some(freqs), None) => RopeScaling::Factors(times(freqs)),
            (None | Some("none" | "linear"), None, None) if factor != 1.0 => RopeScaling::Linear { factor },
            (None | Some("none" | "linear"), None, None) => RopeScaling::None,
            (Some(other), ..) => {
                return Err(Error::Unsupported(format!(
                    "{key}: `{other}`; none, linear, yarn, longrope and rope_freqs.weight are supported"
                )));
            }
        };
        if attention != 1.0 {
            return Err(Error::Unsupported(format!(
                "{}: {attention} without yarn or longrope",
                self.full("rope.scaling.attn_factor")
            )));
        }
        Ok(scaling)
    }

    fn yarn(&self, factor: f32, original_context: usize, attention: f32) -> Result<RopeScaling> {
        let key = "rope.scaling.yarn_ext_factor";
        match self.opt_float(key)? {
            // A negative number asks for the default.
            None | Some(1.0) => {}
            Some(x) if x < 0.0 => {}
            Some(x) => {
                return Err(Error::Unsupported(format!("{}: {x}; 1 is supported", self.full(key))));
            }
        }
        // A multiplier makes the factor the ratio of two, as `mscale` and `mscale_all_dim` do in config.json.
        let by = f64::from(self.opt_float("rope.scaling.yarn_log_multiplier")?.unwrap_or(0.0));
        let stretch = f64::from(factor);
        let own = mscale(stretch, 1.0) / if by == 0.0 { 1.0 } else { mscale(stretch, by) };
        Ok(RopeScaling::Yarn {
            factor,
            original_context,
            beta_fast: self.opt_float("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
            beta_slow: self.opt_float("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
            truncate: true,
            attention_factor: (own * f64::from(attention)) as f32,
        })
    }

    /// Divisors per frequency, if there is such a tensor.
    fn factors(&self, name: &str, dim: usize) -> Result<Option<Vec<f32>>> {
        let Some(t) = self.tensors.get(name) else { return Ok(None) };
        self.tensors.require(name, &[dim / 2])?;
        if t.dtype != DType::F32 {
            return Err(Error::format(name, format!("{}, wanted f32", t.dtype)));
        }
        Ok(Some(crate::reference::dequant::dequantise(t)))
    }
}
