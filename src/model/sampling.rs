//! The sampling settings that a model's authors recommend.
//!
//! Hugging Face folders have it in `generation_config.json`, GGUF files under `general.sampling.*` (which is where
//! converters put the former). The advice is untrusted and a model works without it, so a setting that makes no sense,
//! or that the sampler does not have, is reported and left out, never an error.

use std::fmt;
use std::ops::RangeInclusive;

use serde_json::Value as Json;

use super::formats::gguf::{Metadata, Value};

/// Temperatures that make sense.
pub const TEMPERATURE_RANGE: RangeInclusive<f32> = 0.0..=100.0;
/// Shares of probability for top-p.
pub const TOP_P_RANGE: RangeInclusive<f32> = f32::MIN_POSITIVE..=1.0;
/// Relative probabilities for min-p.
pub const MIN_P_RANGE: RangeInclusive<f32> = 0.0..=1.0;
/// Repetition penalties; 1 is none.
pub const REPEAT_PENALTY_RANGE: RangeInclusive<f32> = f32::MIN_POSITIVE..=100.0;
/// Presence and frequency penalties; 0 is none.
pub const PENALTY_RANGE: RangeInclusive<f32> = -2.0..=2.0;
/// Most tokens, sequences or texts of a list.
const MOST_LISTED: usize = 1 << 16;

/// Recommended settings. Each lies in its range; those without a recommendation are `None`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SamplingDefaults {
    /// Softmax temperature, in [`TEMPERATURE_RANGE`]; 0 is greedy.
    pub temperature: Option<f32>,
    /// Only this many likeliest tokens; 0 for all.
    pub top_k: Option<usize>,
    /// Only the likeliest tokens that make up this probability, in [`TOP_P_RANGE`].
    pub top_p: Option<f32>,
    /// Only tokens whose probability is at least this fraction of the likeliest one's, in [`MIN_P_RANGE`].
    pub min_p: Option<f32>,
    /// Divides positive logits, and multiplies negative ones, of earlier tokens, in [`REPEAT_PENALTY_RANGE`].
    pub repeat_penalty: Option<f32>,
    /// How many of the last tokens the penalty covers; `usize::MAX` for all.
    pub repeat_last_n: Option<usize>,
    /// Subtracted from the logits of tokens that the answer has, in [`PENALTY_RANGE`].
    pub presence_penalty: Option<f32>,
    /// The same as often as the answer has the token, in [`PENALTY_RANGE`].
    pub frequency_penalty: Option<f32>,
    /// Tokens that are never chosen.
    pub suppress: Vec<u32>,
    /// Tokens that are not chosen first.
    pub begin_suppress: Vec<u32>,
    /// Sequences of which the last token is not chosen behind the others.
    pub bad_words: Vec<Vec<u32>>,
    /// Added to the logit of the last token of a sequence behind the others.
    pub sequence_bias: Vec<(Vec<u32>, f32)>,
    /// Tokens before which the answer does not end.
    pub min_tokens: Option<usize>,
    /// Texts that end the answer.
    pub stop: Vec<String>,
    /// A sentence for each setting that was found but is not followed.
    pub ignored: Vec<String>,
}

/// As a sentence, for `tandem inspect`; empty if nothing is recommended.
impl fmt::Display for SamplingDefaults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let real = |name: &str, value: Option<f32>| value.map(|v| format!("{name} {v}"));
        let top_k = self.top_k.map(|k| format!("top-k {k}"));
        let count = |what: &str, n: usize| (n > 0).then(|| format!("{n} {what}"));
        let said = [
            real("temperature", self.temperature),
            top_k,
            real("top-p", self.top_p),
            real("min-p", self.min_p),
            real("repeat penalty", self.repeat_penalty),
            real("presence penalty", self.presence_penalty),
            real("frequency penalty", self.frequency_penalty),
            count("tokens suppressed", self.suppress.len()),
            count("tokens suppressed at the beginning", self.begin_suppress.len()),
            count("bad words", self.bad_words.len()),
            count("biases", self.sequence_bias.len()),
            self.min_tokens.map(|n| format!("at least {n} tokens")),
            count("stop strings", self.stop.len()),
        ];
        f.write_str(&said.into_iter().flatten().collect::<Vec<_>>().join(", "))
    }
}

impl SamplingDefaults {
    /// From a `generation_config.json`.
    ///
    /// `do_sample: false` is temperature 0, whatever else the file says; `do_sample: true` without a temperature is
    /// temperature 1, its meaning in `transformers`. The repetition penalty of `transformers` covers all tokens.
    pub fn from_generation_config(config: &Json) -> SamplingDefaults {
        let mut found = Reader::new("generation_config.json: ", |key| match config.get(key)? {
            Json::Null => None,
            Json::Number(n) => Some(Found::Number(n.as_f64().unwrap_or(f64::NAN))),
            Json::Bool(b) => Some(Found::Bool(*b)),
            Json::String(s) => Some(Found::Text(s.clone())),
            Json::Array(_) | Json::Object(_) => Some(Found::Compound),
        });
        let mut temperature = found.real("temperature", TEMPERATURE_RANGE);
        match found.get("do_sample") {
            None => {}
            Some(Found::Bool(true)) => temperature = temperature.or(Some(1.0)),
            Some(Found::Bool(false)) => temperature = Some(0.0),
            Some(other) => found.ignore("do_sample", &other, "true or false is wanted"),
        }
        let repeat_penalty = found.real("repetition_penalty", REPEAT_PENALTY_RANGE);
        for (key, off) in UNSUPPORTED {
            found.unsupported(key, off);
        }
        // 20 is what `transformers` wrote into files that said nothing about it.
        for (key, off) in [("max_new_tokens", None), ("max_length", Some(20.0))] {
            if let Some(value) =
                found.get(key).filter(|v| !matches!((v, off), (Found::Number(x), Some(off)) if *x == off))
            {
                found.ignore(key, &value, "-n says how many tokens are generated");
            }
        }
        let mut list = |key: &str, wanted: &str, read: &mut dyn FnMut(&Json) -> Option<()>| {
            let value = config.get(key).filter(|v| !v.is_null());
            let short = |v: &Json| v.as_array().is_none_or(|list| list.len() <= MOST_LISTED);
            let problem = match value {
                None => return,
                Some(value) if !short(value) => format!("more than {MOST_LISTED} entries"),
                Some(value) if read(value).is_none() => format!("{wanted} is wanted"),
                Some(_) => return,
            };
            let shown = found.get(key).unwrap_or(Found::Compound);
            found.ignore(key, &shown, &problem);
        };
        let (mut suppress, mut begin_suppress) = (Vec::new(), Vec::new());
        let (mut bad_words, mut sequence_bias, mut stop) = (Vec::new(), Vec::new(), Vec::new());
        for (key, to) in [("suppress_tokens", &mut suppress), ("begin_suppress_tokens", &mut begin_suppress)]
        {
            list(key, "a list of token ids", &mut |v| tokens(v).map(|ids| *to = ids));
        }
        list("bad_words_ids", "a list of lists of token ids", &mut |v| {
            let words: Option<Vec<_>> = v.as_array()?.iter().map(sequence).collect();
            words.map(|words| bad_words = words)
        });
        list("sequence_bias", "a list of token ids with their biases", &mut |v| {
            biases(v).map(|all| sequence_bias = all)
        });
        list("stop_strings", "a text, or a list of texts that are not empty,", &mut |v| {
            let text = |v: &Json| v.as_str().filter(|s| !s.is_empty()).map(str::to_owned);
            let texts: Option<Vec<String>> = match v {
                Json::Array(list) => list.iter().map(text).collect(),
                one => text(one).map(|one| vec![one]),
            };
            texts.map(|texts| stop = texts)
        });
        SamplingDefaults {
            temperature,
            top_k: found.count("top_k").map(|k| k.unwrap_or(0)),
            top_p: found.real("top_p", TOP_P_RANGE),
            min_p: found.real("min_p", MIN_P_RANGE),
            repeat_last_n: repeat_penalty.map(|_| usize::MAX),
            repeat_penalty,
            presence_penalty: found.real("presence_penalty", PENALTY_RANGE),
            frequency_penalty: found.real("frequency_penalty", PENALTY_RANGE),
            suppress,
            begin_suppress,
            bad_words,
            sequence_bias,
            min_tokens: found.count("min_new_tokens").flatten().filter(|n| *n > 0),
            stop,
            ignored: found.ignored,
        }
    }

    /// From the metadata of a GGUF file: `general.sampling.*`.
    ///
    /// A filter without a temperature is temperature 1. Converters copy `top_k`, `top_p` and `min_p` out of a
    /// `generation_config.json` but have no key for its `do_sample`, and `transformers` leaves a temperature of 1, its
    /// default, out of the file: a filter alone is then all that remains for a model that is meant to be sampled (Gemma
    /// 3).
    pub fn from_gguf(metadata: &Metadata) -> SamplingDefaults {
        let mut found = Reader::new("general.sampling.", |key| {
            Some(match metadata.get(&format!("general.sampling.{key}"))? {
                Value::Bool(b) => Found::Bool(*b),
                value @ (Value::String(_) | Value::Bytes(_)) => {
                    Found::Text(value.as_lossy_str().unwrap_or_default().into_owned())
                }
                value => value.as_f64().map_or(Found::Compound, Found::Number),
            })
        });
        let repeat_penalty = found.real("penalty_repeat", REPEAT_PENALTY_RANGE);
        let last_n = found.count("penalty_last_n").map(|n| n.unwrap_or(usize::MAX));
        found.unsupported("mirostat", 0.0);
        found.unsupported("xtc_probability", 0.0);
        if let Some(order) = found.get("sequence") {
            found.ignore("sequence", &order, "the order of the filters is fixed");
        }
        let names = metadata.keys().filter_map(|key| key.strip_prefix("general.sampling."));
        for key in names.filter(|key| !GGUF_KEYS.contains(key)).take(16) {
            if let Some(value) = found.get(key) {
                found.ignore(key, &value, "this sampler does not have it");
            }
        }
        let top_k = found.count("top_k").map(|k| k.unwrap_or(0));
        let (top_p, min_p) = (found.real("top_p", TOP_P_RANGE), found.real("min_p", MIN_P_RANGE));
        let filters =
            top_k.is_some_and(|k| k > 0) || top_p.is_some_and(|p| p < 1.0) || min_p.is_some_and(|p| p > 0.0);
        // A temperature that makes no sense counts as absent.
        let temperature = match found.get("temp") {
            None => filters.then_some(1.0),
            Some(_) => found.real("temp", TEMPERATURE_RANGE),
        };
        SamplingDefaults {
            temperature,
            top_k,
            top_p,
            min_p,
            // The reach of a penalty has no meaning without a penalty.
            repeat_last_n: repeat_penalty.and(last_n),
            repeat_penalty,
            ignored: found.ignored,
            ..SamplingDefaults::default()
        }
    }
}

/// Settings of `transformers` that change the text and that the sampler does not have, each with the value at which it
/// changes nothing.
const UNSUPPORTED: [(&str, f64); 23] = [
    ("typical_p", 1.0),
    ("epsilon_cutoff", 0.0),
    ("eta_cutoff", 0.0),
    ("top_h", f64::NAN),
    ("penalty_alpha", 0.0),
    ("no_repeat_ngram_size", 0.0),
    ("encoder_repetition_penalty", 1.0),
    ("encoder_no_repeat_ngram_size", 0.0),
    ("num_beams", 1.0),
    ("num_beam_groups", 1.0),
    ("diversity_penalty", 0.0),
    ("num_return_sequences", 1.0),
    ("min_length", 0.0),
    ("max_time", f64::NAN),
    ("guidance_scale", 1.0),
    ("exponential_decay_length_penalty", f64::NAN),
    ("watermarking_config", f64::NAN),
    ("token_healing", 0.0),
    ("forced_bos_token_id", f64::NAN),
    ("forced_eos_token_id", f64::NAN),
    ("forced_decoder_ids", f64::NAN),
    ("force_words_ids", f64::NAN),
    ("constraints", f64::NAN),
];

/// What `general.sampling.*` may hold. The last three belong to mirostat and XTC, about which a line is said.
const GGUF_KEYS: [&str; 12] = [
    "temp",
    "top_k",
    "top_p",
    "min_p",
    "penalty_repeat",
    "penalty_last_n",
    "mirostat",
    "xtc_probability",
    "sequence",
    "mirostat_tau",
    "mirostat_eta",
    "xtc_threshold",
];

fn tokens(value: &Json) -> Option<Vec<u32>> {
    value.as_array()?.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect()
}

/// Tokens, at least one.
fn sequence(value: &Json) -> Option<Vec<u32>> {
    tokens(value).filter(|ids| !ids.is_empty())
}

/// `[[[id, id, ...], bias], ...]`.
fn biases(value: &Json) -> Option<Vec<(Vec<u32>, f32)>> {
    let entry = |entry: &Json| match &entry.as_array()?[..] {
        [ids, bias] => {
            let bias = bias.as_f64()? as f32;
            Some((sequence(ids)?, bias)).filter(|_| bias.is_finite())
        }
        _ => None,
    };
    value.as_array()?.iter().map(entry).collect()
}

/// One setting as a file has it.
enum Found {
    Number(f64),
    Bool(bool),
    Text(String),
    Compound,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Found::Number(x) if x.abs() >= 1e15 => write!(f, "{x:e}"),
            Found::Number(x) => write!(f, "{x}"),
            Found::Bool(b) => write!(f, "{b}"),
            // The text is untrusted, so it is escaped and shortened.
            Found::Text(s) => write!(f, "{:?}", s.chars().take(40).collect::<String>()),
            Found::Compound => f.write_str("a list or an object"),
        }
    }
}

/// Reads settings, and remembers those that it could not use.
struct Reader<F> {
    /// Text in front of a key in messages.
    prefix: &'static str,
    lookup: F,
    ignored: Vec<String>,
}

impl<F: Fn(&str) -> Option<Found>> Reader<F> {
    fn new(prefix: &'static str, lookup: F) -> Self {
        Reader { prefix, lookup, ignored: Vec::new() }
    }

    fn get(&self, key: &str) -> Option<Found> {
        (self.lookup)(key)
    }

    fn ignore(&mut self, key: &str, found: &Found, why: &str) {
        // The names of other keys of a file are as untrusted as its texts.
        let key: String = key.chars().take(40).flat_map(char::escape_debug).collect();
        self.ignored.push(format!("{}{key}: {found} is ignored: {why}", self.prefix));
    }

    fn real(&mut self, key: &str, range: RangeInclusive<f32>) -> Option<f32> {
        match self.get(key)? {
            // NaN lies in no range.
            Found::Number(x) if range.contains(&(x as f32)) => Some(x as f32),
            other => {
                let (low, high) = (range.start(), range.end());
                let low = if *low == f32::MIN_POSITIVE { "above 0".into() } else { format!("from {low}") };
                self.ignore(key, &other, &format!("a number {low} to {high} is wanted"));
                None
            }
        }
    }

    /// A whole number; -1, which means that there is no limit, is `Some(None)`.
    fn count(&mut self, key: &str) -> Option<Option<usize>> {
        match self.get(key)? {
            Found::Number(-1.0) => Some(None),
            Found::Number(x) if x.fract() == 0.0 && (0.0..=u32::MAX as f64).contains(&x) => {
                Some(Some(x as usize))
            }
            other => {
                self.ignore(key, &other, "a whole number, or -1 for no limit, is wanted");
                None
            }
        }
    }

    /// Reports a setting that changes the text but that the sampler does not have, unless it is `off`.
    fn unsupported(&mut self, key: &str, off: f64) {
        match self.get(key) {
            Some(Found::Number(x)) if x == off => {}
            Some(Found::Bool(false)) if off == 0.0 => {}
            Some(other) => self.ignore(key, &other, "this sampler does not have it"),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn hf(config: Json) -> SamplingDefaults {
        SamplingDefaults::from_generation_config(&config)
    }

    fn gguf(pairs: &[(&str, Value)]) -> SamplingDefaults {
        let pairs = pairs.iter().map(|(k, v)| (format!("general.sampling.{k}"), v.clone()));
        SamplingDefaults::from_gguf(&pairs.collect())
    }

    #[test]
    fn what_real_models_say() {
        let qwen3 = hf(
            json!({"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1]}),
        );
        assert_eq!(qwen3.to_string(), "temperature 0.6, top-k 20, top-p 0.95");
        let want = SamplingDefaults {
            temperature: Some(0.6),
            top_k: Some(20),
            top_p: Some(0.95),
            ..SamplingDefaults::default()
        };
        assert_eq!(qwen3, want);
        // Gemma 3 states no temperature, so the default of `transformers` applies.
        let gemma = hf(json!({"do_sample": true, "top_k": 64, "top_p": 0.95}));
        assert_eq!((gemma.temperature, gemma.top_k), (Some(1.0), Some(64)));
        // Qwen 2.5 has a penalty, which covers all tokens.
        let qwen = hf(json!({"repetition_penalty": 1.1, "temperature": 0.7, "do_sample": true}));
        assert_eq!((qwen.repeat_penalty, qwen.repeat_last_n), (Some(1.1), Some(usize::MAX)));
        // SmolLM2 has token ids only. Nulls count as absent.
        assert_eq!(hf(json!({"bos_token_id": 1, "temperature": null})), SamplingDefaults::default());
    }

    #[test]
    fn do_sample_decides_about_greedy() {
        let temperature = |c: Json| hf(c).temperature;
        assert_eq!(temperature(json!({"do_sample": false, "temperature": 0.7})), Some(0.0));
        assert_eq!(temperature(json!({"temperature": 0.7})), Some(0.7));
        assert_eq!(temperature(json!({"top_k": 40})), None);
        let odd = hf(json!({"do_sample": "yes"}));
        assert_eq!(odd.temperature, None);
        assert_eq!(
            odd.ignored,
            ["generation_config.json: do_sample: \"yes\" is ignored: true or false is wanted"]
        );
    }

    #[test]
    fn gguf_keys() {
        let found = gguf(&[
            ("temp", Value::Float(0.7)),
            ("top_k", Value::Int(-1)),
            ("top_p", Value::Float(0.9)),
            ("min_p", Value::Float(0.05)),
            ("penalty_repeat", Value::Float(1.05)),
            ("penalty_last_n", Value::Int(-1)),
            ("mirostat", Value::Int(0)),
        ]);
        let want = SamplingDefaults {
            temperature: Some(0.7),
            top_k: Some(0),
            top_p: Some(0.9),
            min_p: Some(0.05),
            repeat_penalty: Some(1.05),
            repeat_last_n: Some(usize::MAX),
            ..SamplingDefaults::default()
        };
        assert_eq!(found, want);
        let odd = gguf(&[("mirostat", Value::Int(2)), ("sequence", Value::String("kp\u{1b}[2J".into()))]);
        assert_eq!(odd.ignored.len(), 2, "{odd:?}");
        assert!(odd.ignored.iter().all(|i| !i.contains('\u{1b}')), "{odd:?}");
        assert_eq!(gguf(&[("penalty_last_n", Value::Int(256))]).repeat_last_n, None);
    }

    #[test]
    fn a_filter_in_a_gguf_file_asks_for_sampling() {
        let temperature = |pairs: &[(&str, Value)]| gguf(pairs).temperature;
        // Gemma 3's file and folder give the same settings.
        let folder = hf(json!({"do_sample": true, "top_k": 64, "top_p": 0.95}));
        assert_eq!(gguf(&[("top_k", Value::Int(64)), ("top_p", Value::Float(0.95))]), folder);
        assert_eq!(temperature(&[("min_p", Value::Float(0.1))]), Some(1.0));
        // Filters that pass everything, and penalties, do not imply a temperature.
        assert_eq!(temperature(&[("top_k", Value::Int(0)), ("top_p", Value::Float(1.0))]), None);
        assert_eq!(temperature(&[("top_k", Value::Int(-1)), ("min_p", Value::Float(0.0))]), None);
        assert_eq!(temperature(&[("penalty_repeat", Value::Float(1.1))]), None);
        // A valid temperature in the file is used, an invalid one counts as absent.
        let at = |t: f64| temperature(&[("temp", Value::Float(t)), ("top_k", Value::Int(40))]);
        assert_eq!((at(0.0), at(0.5), at(-1.0)), (Some(0.0), Some(0.5), None));
        assert_eq!(temperature(&[("top_k", Value::String("40".into()))]), None);
    }

    #[test]
    fn nonsense_is_left_out_and_told() {
        for bad in [json!(-0.1), json!(1e300), json!("0.7"), json!([0.7]), json!({}), json!(true), json!(101)]
        {
            for key in ["temperature", "top_p", "min_p", "repetition_penalty"] {
                let found = hf(json!({ key: bad.clone() }));
                assert_eq!(found.ignored.len(), 1, "{key} {bad}: {found:?}");
                assert!(found.ignored[0].contains(key), "{found:?}");
                assert_eq!(
                    SamplingDefaults { ignored: vec![], ..found },
                    SamplingDefaults::default(),
                    "{key} {bad}"
                );
            }
        }
        for bad in [json!(-2), json!(0.5), json!(1e12), json!("9"), json!(u64::MAX)] {
            let found = hf(json!({ "top_k": bad.clone() }));
            assert_eq!((found.top_k, found.ignored.len()), (None, 1), "{bad}");
        }
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0] {
            let found = gguf(&[("temp", Value::Float(bad)), ("penalty_repeat", Value::Float(bad))]);
            assert_eq!((found.temperature, found.ignored.len()), (None, 2), "{bad}: {found:?}");
        }
        assert_eq!(hf(json!({"num_beams": 4, "typical_p": 1.0})).ignored.len(), 1);
        // Not even an object.
        assert_eq!(hf(json!([1, 2])), SamplingDefaults::default());
    }

    #[test]
    fn lists_are_read_or_told() {
        let found = hf(json!({
            "suppress_tokens": [5, 6], "begin_suppress_tokens": [7], "bad_words_ids": [[1], [2, 3]],
            "sequence_bias": [[[8, 9], -1.5]], "stop_strings": "\n\n", "min_new_tokens": 4,
            "presence_penalty": 1.5, "frequency_penalty": -0.5, "forced_eos_token_id": null, "max_length": 20,
        }));
        let want = SamplingDefaults {
            suppress: vec![5, 6],
            begin_suppress: vec![7],
            bad_words: vec![vec![1], vec![2, 3]],
            sequence_bias: vec![(vec![8, 9], -1.5)],
            stop: vec!["\n\n".into()],
            min_tokens: Some(4),
            presence_penalty: Some(1.5),
            frequency_penalty: Some(-0.5),
            ..SamplingDefaults::default()
        };
        assert_eq!(found, want);
        assert_eq!(
            found.to_string(),
            "presence penalty 1.5, frequency penalty -0.5, 2 tokens suppressed, 1 tokens suppressed at the beginning, \
             2 bad words, 1 biases, at least 4 tokens, 1 stop strings"
        );
        assert_eq!(hf(json!({"stop_strings": ["a", "b"]})).stop, ["a", "b"]);
        // Nothing to say: nothing is said.
        assert_eq!(hf(json!({"suppress_tokens": [], "bad_words_ids": null})), SamplingDefaults::default());
        for key in
            ["suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias", "stop_strings"]
        {
            let long = Json::Array(vec![json!(1); MOST_LISTED + 1]);
            for bad in
                [json!(7), json!({}), json!([-1]), json!([1.5]), json!([[]]), json!(["", 1]), json!(""), long]
            {
                let found = hf(json!({ key: bad.clone() }));
                assert_eq!(found.ignored.len(), 1, "{key} {bad}");
                assert!(
                    found.ignored[0].contains(key) && found.ignored[0].contains("is ignored"),
                    "{found:?}"
                );
                assert_eq!(
                    SamplingDefaults { ignored: vec![], ..found },
                    SamplingDefaults::default(),
                    "{key} {bad}"
                );
            }
        }
        for (key, value) in [
            ("presence_penalty", json!(2.5)),
            ("frequency_penalty", json!("1")),
            ("min_new_tokens", json!(-3)),
            ("min_length", json!(10)),
            ("max_length", json!(4096)),
            ("max_new_tokens", json!(20)),
            ("forced_eos_token_id", json!(2)),
            ("forced_decoder_ids", json!([[1, 2]])),
            ("encoder_repetition_penalty", json!(1.2)),
            ("watermarking_config", json!({})),
            ("no_repeat_ngram_size", json!(3)),
        ] {
            let found = hf(json!({ key: value }));
            assert!(found.ignored.len() == 1 && found.ignored[0].contains(key), "{key}: {found:?}");
        }
        let other = gguf(&[("typ\u{1b}_p", Value::Float(0.5)), ("xtc_threshold", Value::Float(0.1))]);
        assert_eq!(
            other.ignored,
            ["general.sampling.typ\\u{1b}_p: 0.5 is ignored: this sampler does not have it"]
        );
    }

    proptest! {
        #[test]
        fn whatever_the_file_says_the_settings_lie_in_their_ranges(x in any::<f64>(), k in any::<i64>()) {
            let f = gguf(&[
                ("temp", Value::Float(x)),
                ("top_p", Value::Float(x)),
                ("min_p", Value::Float(x)),
                ("penalty_repeat", Value::Float(x)),
                ("top_k", Value::Int(k)),
                ("penalty_last_n", Value::Float(x)),
            ]);
            prop_assert!(f.temperature.is_none_or(|v| TEMPERATURE_RANGE.contains(&v)));
            prop_assert!(f.top_p.is_none_or(|v| TOP_P_RANGE.contains(&v)));
            prop_assert!(f.min_p.is_none_or(|v| MIN_P_RANGE.contains(&v)));
            prop_assert!(f.repeat_penalty.is_none_or(|v| REPEAT_PENALTY_RANGE.contains(&v)));
        }
    }
}
