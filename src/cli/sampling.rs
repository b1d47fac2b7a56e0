//! How `generate` samples: by the flags, else by the model's recommendation, else greedily.

use std::sync::Arc;

use serde_json::json;
use tandem::model::{
    MIN_P_RANGE, PENALTY_RANGE, REPEAT_PENALTY_RANGE, SamplingDefaults, TEMPERATURE_RANGE, TOP_P_RANGE,
};
use tandem::text::{Ending, SamplerParams, Tokenizer};

use super::args::real;

/// The sampler's options. The model's own recommendation applies for an option that is not given.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Sampling temperature; 0 always takes the most likely token [default: the model's, or 0].
    #[arg(long, alias = "temperature", value_name = "T", allow_negative_numbers = true,
          value_parser = |s: &str| real(s, TEMPERATURE_RANGE, "the temperature (0 to 100)"))]
    pub temp: Option<f32>,
    /// Only among the K most likely tokens; 0 or -1 is all [default: the model's, or 0].
    #[arg(long, value_name = "K", allow_negative_numbers = true, value_parser = top_k)]
    pub top_k: Option<u32>,
    /// Only among the most likely tokens that together have this probability [default: the model's, or 1].
    #[arg(long, value_name = "P", allow_negative_numbers = true,
          value_parser = |s: &str| real(s, TOP_P_RANGE, "the probability (above 0, up to 1)"))]
    pub top_p: Option<f32>,
    /// Only among tokens at least this likely, relative to the most likely one [default: the model's, or 0].
    #[arg(long, value_name = "P", allow_negative_numbers = true,
          value_parser = |s: &str| real(s, MIN_P_RANGE, "the probability (0 to 1)"))]
    pub min_p: Option<f32>,
    /// Divide the score of tokens among the last ones; 1 is off [default: the model's, or 1].
    #[arg(long, value_name = "R", allow_negative_numbers = true,
          value_parser = |s: &str| real(s, REPEAT_PENALTY_RANGE, "the penalty (above 0, up to 100)"))]
    pub repeat_penalty: Option<f32>,
    /// How many of the last tokens the penalty looks at; -1 is all [default: the model's, or 64]. If given, the penalties
    /// below look at no more either.
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = reach)]
    pub repeat_last_n: Option<usize>,
    /// Subtract this from the score of tokens that the answer already has; 0 is off [default: the model's, or 0].
    #[arg(long, value_name = "R", allow_negative_numbers = true,
          value_parser = |s: &str| real(s, PENALTY_RANGE, "the penalty (-2 to 2)"))]
    pub presence_penalty: Option<f32>,
    /// Subtract this from the score of a token as often as the answer has it; 0 is off [default: the model's, or 0].
    #[arg(long, value_name = "R", allow_negative_numbers = true,
          value_parser = |s: &str| real(s, PENALTY_RANGE, "the penalty (-2 to 2)"))]
    pub frequency_penalty: Option<f32>,
    /// Seed of the sampler; the same one draws the same text, random or -1 another each time [default: 0].
    #[arg(short, long, value_name = "S", allow_negative_numbers = true, value_parser = seed)]
    pub seed: Option<u64>,
    /// Sample by these options alone, whatever the model recommends.
    #[arg(long)]
    pub ignore_generation_config: bool,
}

fn top_k(text: &str) -> Result<u32, String> {
    let value: i64 = text.parse().map_err(|_| "a whole number is wanted".to_owned())?;
    // Other programs use -1 for all.
    u32::try_from(value.max(0))
        .ok()
        .filter(|_| value >= -1)
        .ok_or_else(|| format!("{value} is not in -1..=4294967295"))
}

fn reach(text: &str) -> Result<usize, String> {
    match text.parse::<i64>() {
        Ok(-1) => Ok(usize::MAX),
        Ok(n) if (0..=i64::from(u32::MAX)).contains(&n) => Ok(n as usize),
        Ok(n) => Err(format!("{n} is not in -1..=4294967295")),
        Err(_) => Err("a whole number is wanted".into()),
    }
}

/// A seed that is another one each time, of 53 bits, so that any JSON reader preserves it.
pub fn random_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    // The keys of a new hasher are random.
    std::hash::RandomState::new().build_hasher().finish() >> 11
}

/// The seed of request `index` of a file: the first has the file's, the others one of 53 bits mixed from both, so that
/// equal requests draw different answers whatever runs beside them.
pub fn seed_of(seed: u64, index: usize) -> u64 {
    if index == 0 {
        return seed;
    }
    // splitmix64 at a distance that no file's indices reach from another seed.
    let mut z = seed ^ (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)) >> 11
}

fn seed(text: &str) -> Result<u64, String> {
    match text {
        "random" | "-1" => Ok(random_seed()),
        _ => text.parse().map_err(|_| "a whole number from 0, or random, is wanted".into()),
    }
}

/// Where a setting came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    Flag,
    Model,
    Default,
}

impl Origin {
    fn name(self) -> &'static str {
        match self {
            Origin::Flag => "flag",
            Origin::Model => "model",
            Origin::Default => "default",
        }
    }
}

/// The settings in force, each with its origin.
#[derive(Debug)]
pub struct Sampling {
    /// For the sampler.
    pub params: SamplerParams,
    /// A sentence for each recommendation that is not followed, and for each flag without an effect.
    pub ignored: Vec<String>,
    /// Origins of temperature, top-k, top-p, min-p, penalty, its reach, presence, frequency, seed.
    from: [Origin; 9],
}

/// What a model excludes and prefers, whatever the request: shared by all requests.
#[derive(Debug, Clone, Default)]
pub struct TokenLists {
    biases: Arc<[(u32, f32)]>,
    sequence_biases: Arc<[(Vec<u32>, f32)]>,
    begin_suppress: Arc<[u32]>,
    /// Tokens before which no answer ends.
    pub min_tokens: usize,
    /// Texts that end an answer.
    pub stop: Vec<String>,
}

impl TokenLists {
    /// Puts them into the settings of a request.
    pub fn put(&self, params: &mut SamplerParams) {
        params.biases = self.biases.clone();
        params.sequence_biases = self.sequence_biases.clone();
        if !self.begin_suppress.is_empty() {
            params.withheld.push((1, self.begin_suppress.clone()));
        }
    }

    /// What ends an answer of a model with this tokenizer.
    pub fn ending(&self, tokenizer: Option<&Tokenizer>) -> Ending {
        let tokens = tokenizer.map_or_else(Vec::new, |t| t.end_of_generation().collect());
        Ending { tokens, stop: self.stop.clone(), min_tokens: self.min_tokens, ..Ending::default() }
    }
}

impl SamplingArgs {
    /// The settings in force for a model that recommends `model`.
    pub fn resolve(&self, model: &SamplingDefaults) -> Sampling {
        let nothing = SamplingDefaults::default();
        let model = if self.ignore_generation_config { &nothing } else { model };
        let plain = SamplerParams::default();
        let (temperature, t) = pick(self.temp, model.temperature, plain.temperature);
        let (top_k, k) = pick(self.top_k.map(|k| k as usize), model.top_k, plain.top_k);
        let (top_p, p) = pick(self.top_p, model.top_p, plain.top_p);
        let (min_p, m) = pick(self.min_p, model.min_p, plain.min_p);
        let (repeat_penalty, r) = pick(self.repeat_penalty, model.repeat_penalty, plain.repeat_penalty);
        // A penalty and its reach belong together. The model's own penalty, said again, stays what it is.
        let own = r == Origin::Model || self.repeat_penalty == model.repeat_penalty;
        let reach = model.repeat_last_n.filter(|_| own);
        let (repeat_last_n, n) = pick(self.repeat_last_n, reach, plain.repeat_last_n);
        let (presence_penalty, a) =
            pick(self.presence_penalty, model.presence_penalty, plain.presence_penalty);
        let (frequency_penalty, f) =
            pick(self.frequency_penalty, model.frequency_penalty, plain.frequency_penalty);
        let (seed, s) = pick(self.seed, None, plain.seed);
        let mut ignored = model.ignored.clone();
        let idle: Vec<_> = [
            ("--top-k", self.top_k.is_some()),
            ("--top-p", self.top_p.is_some()),
            ("--min-p", self.min_p.is_some()),
        ]
        .into_iter()
        .filter_map(|(flag, given)| given.then_some(flag))
        .collect();
        // No message with an explicit --temp 0.
        if temperature == 0.0 && t != Origin::Flag && !idle.is_empty() {
            ignored.push(format!(
                "{}: without a temperature the likeliest token is always taken; add --temp",
                idle.join(", ")
            ));
        }
        Sampling {
            params: SamplerParams {
                temperature,
                top_k,
                top_p,
                min_p,
                repeat_penalty,
                repeat_last_n,
                presence_penalty,
                frequency_penalty,
                answer_last_n: self.repeat_last_n.unwrap_or(plain.answer_last_n),
                seed,
                ..plain
            },
            ignored,
            from: [t, k, p, m, r, n, a, f, s],
        }
    }

    /// What the model excludes and prefers; `ends` are the tokens that end an answer, which no list may exclude.
    pub fn lists(&self, model: &SamplingDefaults, ends: &[u32]) -> TokenLists {
        if self.ignore_generation_config {
            return TokenLists::default();
        }
        let never = f32::NEG_INFINITY;
        let words = model.bad_words.iter().filter(|word| !matches!(word[..], [id] if ends.contains(&id)));
        let sequences = model.sequence_bias.iter().cloned();
        TokenLists {
            biases: model.suppress.iter().map(|&id| (id, never)).collect(),
            sequence_biases: words.map(|word| (word.clone(), never)).chain(sequences).collect(),
            begin_suppress: model.begin_suppress.clone().into(),
            min_tokens: model.min_tokens.unwrap_or(0),
            stop: model.stop.clone(),
        }
    }
}

fn pick<T>(flag: Option<T>, model: Option<T>, default: T) -> (T, Origin) {
    match (flag, model) {
        (Some(value), _) => (value, Origin::Flag),
        (None, Some(value)) => (value, Origin::Model),
        (None, None) => (default, Origin::Default),
    }
}

impl Sampling {
    /// `sampling` in JSON: the value and origin of each setting. A reach of -1 means all tokens.
    pub fn json(&self) -> serde_json::Value {
        let p = &self.params;
        // Converted through text, so that 0.6 stays 0.6 rather than the f64 value of its f32.
        let real = |x: f32| json!(x.to_string().parse::<f64>().expect("a number"));
        let reach = if p.repeat_last_n == usize::MAX { json!(-1) } else { json!(p.repeat_last_n) };
        let entries = [
            ("temperature", real(p.temperature)),
            ("top_k", json!(p.top_k)),
            ("top_p", real(p.top_p)),
            ("min_p", real(p.min_p)),
            ("repeat_penalty", real(p.repeat_penalty)),
            ("repeat_last_n", reach),
            ("presence_penalty", real(p.presence_penalty)),
            ("frequency_penalty", real(p.frequency_penalty)),
            ("seed", json!(p.seed)),
        ];
        let entry = |((name, value), from): ((&str, serde_json::Value), Origin)| {
            (name.to_owned(), json!({ "value": value, "from": from.name() }))
        };
        entries.into_iter().zip(self.from).map(entry).collect::<serde_json::Map<_, _>>().into()
    }
}

/// In one line.
impl std::fmt::Display for Sampling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let p = &self.params;
        let [t, k, tp, mp, r, _, a, fr, s] = self.from.map(Origin::name);
        write!(
            f,
            "temperature {} ({t}), top-k {} ({k}), top-p {} ({tp}), min-p {} ({mp}), repeat penalty {} ({r}), \
             presence penalty {} ({a}), frequency penalty {} ({fr}), seed {} ({s})",
            p.temperature,
            p.top_k,
            p.top_p,
            p.min_p,
            p.repeat_penalty,
            p.presence_penalty,
            p.frequency_penalty,
            p.seed
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> SamplingDefaults {
        SamplingDefaults {
            temperature: Some(0.6),
            top_k: Some(20),
            repeat_penalty: Some(1.1),
            repeat_last_n: Some(usize::MAX),
            ignored: vec!["num_beams".into()],
            ..SamplingDefaults::default()
        }
    }

    #[test]
    fn flags_win_then_the_model_then_greedy() {
        let args = SamplingArgs { top_k: Some(5), seed: Some(9), ..SamplingArgs::default() };
        let s = args.resolve(&model());
        let p = &s.params;
        assert_eq!((p.temperature, p.top_k, p.top_p, p.repeat_last_n), (0.6, 5, 1.0, usize::MAX));
        assert_eq!(s.json()["temperature"], json!({"value": 0.6, "from": "model"}));
        assert_eq!(s.json()["top_k"], json!({"value": 5, "from": "flag"}));
        assert_eq!(s.json()["top_p"], json!({"value": 1.0, "from": "default"}));
        assert_eq!(s.json()["repeat_last_n"], json!({"value": -1, "from": "model"}));
        assert!(
            s.to_string().starts_with("temperature 0.6 (model), top-k 5 (flag), top-p 1 (default)"),
            "{s}"
        );
        assert_eq!(s.ignored, ["num_beams"]);
        // A flag equal to the default still counts as a flag.
        let greedy = SamplingArgs { temp: Some(0.0), ..SamplingArgs::default() }.resolve(&model());
        assert_eq!((greedy.params.temperature, greedy.from[0]), (0.0, Origin::Flag));
    }

    #[test]
    fn a_penalty_by_flag_reaches_as_far_as_the_flag_says() {
        let s = SamplingArgs { repeat_penalty: Some(1.3), ..SamplingArgs::default() }.resolve(&model());
        assert_eq!((s.params.repeat_penalty, s.params.repeat_last_n), (1.3, 64));
        let s = SamplingArgs { repeat_last_n: Some(7), ..SamplingArgs::default() }.resolve(&model());
        assert_eq!((s.params.repeat_penalty, s.params.repeat_last_n, s.params.answer_last_n), (1.1, 7, 7));
        // Saying the model's own again changes nothing.
        let s = SamplingArgs { repeat_penalty: Some(1.1), ..SamplingArgs::default() }.resolve(&model());
        assert_eq!((s.params.repeat_penalty, s.params.repeat_last_n), (1.1, usize::MAX));
    }

    #[test]
    fn presence_and_frequency_look_at_the_whole_answer_unless_told() {
        let args = SamplingArgs { presence_penalty: Some(0.5), ..SamplingArgs::default() };
        let model =
            SamplingDefaults { frequency_penalty: Some(-1.0), presence_penalty: Some(2.0), ..model() };
        let p = args.resolve(&model).params;
        assert_eq!((p.presence_penalty, p.frequency_penalty, p.answer_last_n), (0.5, -1.0, usize::MAX));
    }

    #[test]
    fn every_request_of_a_file_has_a_seed_of_its_own() {
        let seeds = |base| (0..2000).map(|i| seed_of(base, i)).collect::<std::collections::HashSet<_>>();
        for base in [0, 1, u64::MAX] {
            assert_eq!((seed_of(base, 0), seeds(base).len()), (base, 2000));
            assert!((1..2000).all(|i| seed_of(base, i) < 1 << 53));
        }
        assert!(seeds(0).is_disjoint(&(2..2000).map(|i| seed_of(1, i)).collect()));
    }

    #[test]
    fn lists_are_the_models_and_never_exclude_the_end() {
        let model = SamplingDefaults {
            suppress: vec![3],
            begin_suppress: vec![4],
            bad_words: vec![vec![9], vec![5, 9], vec![6]],
            sequence_bias: vec![(vec![7], 0.5)],
            ..SamplingDefaults::default()
        };
        let mut p = SamplerParams::default();
        SamplingArgs::default().lists(&model, &[9]).put(&mut p);
        let never = f32::NEG_INFINITY;
        assert_eq!(p.biases[..], [(3, never)]);
        assert_eq!(p.sequence_biases[..], [(vec![5, 9], never), (vec![6], never), (vec![7], 0.5)]);
        assert_eq!(p.withheld, [(1, [4].into())]);
        let mut p = SamplerParams::default();
        let args = SamplingArgs { ignore_generation_config: true, ..SamplingArgs::default() };
        args.lists(&model, &[9]).put(&mut p);
        assert_eq!(p, SamplerParams::default());
    }

    #[test]
    fn filters_without_a_temperature_are_told() {
        let filter = SamplingArgs { top_k: Some(40), min_p: Some(0.1), ..SamplingArgs::default() };
        let said = |args: &SamplingArgs, model: &SamplingDefaults| args.resolve(model).ignored;
        let found = said(&filter, &SamplingDefaults::default());
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with("--top-k, --min-p: without a temperature"), "{found:?}");
        let warm = SamplingDefaults { temperature: Some(0.6), ..SamplingDefaults::default() };
        assert!(said(&filter, &warm).is_empty());
        assert!(said(&SamplingArgs { temp: Some(0.0), ..filter.clone() }, &warm).is_empty());
        assert!(said(&SamplingArgs { temp: Some(0.5), ..filter }, &SamplingDefaults::default()).is_empty());
        assert!(said(&SamplingArgs::default(), &SamplingDefaults::default()).is_empty());
    }

    #[test]
    fn what_others_write_for_all_and_for_random() {
        assert_eq!(
            (top_k("-1"), top_k("40"), reach("-1"), reach("9")),
            (Ok(0), Ok(40), Ok(usize::MAX), Ok(9))
        );
        for bad in ["-2", "1.5", "", "x", "99999999999"] {
            assert!(top_k(bad).is_err() && reach(bad).is_err(), "{bad}");
        }
        assert_eq!(seed("18446744073709551615"), Ok(u64::MAX));
        assert!(seed("-2").is_err() && seed("x").is_err());
        let drawn: std::collections::HashSet<_> = (0..8).map(|_| seed("random").unwrap()).collect();
        assert!(drawn.len() > 1 && drawn.iter().all(|s| *s < 1 << 53), "{drawn:?}");
    }

    #[test]
    fn the_model_can_be_left_out() {
        let args = SamplingArgs { ignore_generation_config: true, ..SamplingArgs::default() };
        let s = args.resolve(&model());
        assert_eq!(s.params, SamplerParams::default());
        assert!(s.ignored.is_empty() && s.from.iter().all(|&f| f == Origin::Default));
    }
}
