//! How often the router of each layer chose which expert over a text, and what follows for the experts that rows are going to read.
//!
//! ```text
//! p_e  = (n_e + 1/2) / (T + E/(2·k))       of a row choosing e; n_e of T counted rows did
//! D(B) = Σ_e 1 − (1 − p_e)^B               distinct experts of B rows
//! ```
//! Half a choice is added to the count of each expert (Krichevsky and Trofimov 1981), so that no expert is impossible because a text of
//! finite length did not use it, and the sum of all p_e is still k. Equal counts give p_e = k/E, and D(B) = E·(1 − (1 − k/E)^B). Rows are
//! taken as independent; tokens in a row that choose alike read fewer ([`RouterProfile::repeats`]).

use serde::{Deserialize, Serialize};

use super::{Experts, ModelSpec};
use crate::{Error, Result};

/// The choices of all routers of a model, counted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouterProfile {
    /// Tokens whose choices were counted: the most of any layer.
    pub tokens: u64,
    /// k, experts that a token chooses in a layer.
    pub used: u32,
    /// For each layer of the model, its counts.
    pub layers: Vec<RouterCounts>,
}

/// The choices of one layer's router.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouterCounts {
    /// For each expert, the tokens that chose it; empty for a layer without experts.
    pub counts: Vec<u64>,
    /// Tokens that were counted together with the token before them in the same sequence.
    pub followers: u64,
    /// Choices of these tokens which the token before had made, too.
    pub repeated: u64,
}

/// Most tokens that may be counted, so that sums over all experts are exact in 64 bits and in a double.
const MOST_TOKENS: u64 = 1 << 40;

impl RouterCounts {
    fn choices(&self) -> u64 {
        self.counts.iter().fold(0, |sum, &n| sum.saturating_add(n))
    }
}

impl RouterProfile {
    /// Without counts, for a model with these experts. It holds for no model ([`RouterProfile::check`]) until something is counted.
    pub fn empty(of: &Experts) -> RouterProfile {
        let layer = |&has: &bool| RouterCounts {
            counts: vec![0; if has { of.count } else { 0 }],
            ..RouterCounts::default()
        };
        RouterProfile { tokens: 0, used: of.used as u32, layers: of.layers.iter().map(layer).collect() }
    }

    /// Each expert chosen as often as any other: what planners assume where nothing was counted.
    pub fn uniform(of: &Experts) -> RouterProfile {
        // E tokens make k choices each, k for each of E experts.
        let mut profile = RouterProfile { tokens: of.count as u64, ..RouterProfile::empty(of) };
        profile.layers.iter_mut().for_each(|l| l.counts.fill(of.used as u64));
        profile
    }

    /// Adds the choices that were counted in `other`, of the same model.
    ///
    /// # Panics
    /// If layers or experts differ.
    pub fn add(&mut self, other: &RouterProfile) {
        assert_eq!((self.used, self.layers.len()), (other.used, other.layers.len()), "profiles of one model");
        for (of, other) in self.layers.iter_mut().zip(&other.layers) {
            assert_eq!(of.counts.len(), other.counts.len(), "profiles of one model");
            of.counts.iter_mut().zip(&other.counts).for_each(|(n, more)| *n += more);
            of.followers += other.followers;
            of.repeated += other.repeated;
        }
        self.count_tokens();
    }

    /// Sets the number of tokens to the most of any layer.
    pub(crate) fn count_tokens(&mut self) {
        self.tokens = (0..self.layers.len()).map(|layer| self.tokens_of(layer)).max().unwrap_or(0);
    }

    /// Experts of a layer; 0 if it has none.
    pub fn experts(&self, layer: usize) -> usize {
        self.layers[layer].counts.len()
    }

    /// Tokens counted in a layer.
    pub fn tokens_of(&self, layer: usize) -> u64 {
        self.layers[layer].choices() / u64::from(self.used)
    }

    /// The probability that a row chooses `expert` in `layer`, more than 0 whatever was counted (see the [module](self)).
    ///
    /// # Panics
    /// If there is no such layer or expert.
    pub fn probability(&self, layer: usize, expert: u32) -> f64 {
        let of = &self.layers[layer];
        self.smoothed(of.counts[expert as usize], of.choices(), of.counts.len())
    }

    /// `n` of `choices` were of the expert, one of `count`.
    fn smoothed(&self, n: u64, choices: u64, count: usize) -> f64 {
        let k = f64::from(self.used);
        (n as f64 + 0.5) * k / (choices as f64 + 0.5 * count as f64)
    }

    /// How many of `experts` (each named once) `rows` rows are expected to choose in `layer`: Σ_e 1 − (1 − p_e)^rows.
    ///
    /// # Panics
    /// If there is no such layer or expert.
    pub fn distinct(&self, layer: usize, experts: impl IntoIterator<Item = u32>, rows: f64) -> f64 {
        let of = &self.layers[layer];
        let choices = of.choices();
        let chosen = |e: u32| {
            let p = self.smoothed(of.counts[e as usize], choices, of.counts.len());
            1.0 - (1.0 - p).max(0.0).powf(rows)
        };
        experts.into_iter().map(chosen).sum()
    }

    /// [`RouterProfile::distinct`] of all experts of a layer.
    pub fn distinct_of_all(&self, layer: usize, rows: f64) -> f64 {
        self.distinct(layer, 0..self.experts(layer) as u32, rows)
    }

    /// The experts of a layer, the most used first, the lowest index first among equals.
    pub fn by_use(&self, layer: usize) -> Vec<u32> {
        let counts = &self.layers[layer].counts;
        let mut experts: Vec<u32> = (0..counts.len() as u32).collect();
        experts.sort_by_key(|&e| (std::cmp::Reverse(counts[e as usize]), e));
        experts
    }

    /// The share of a layer's choices that fell on the most used `part` (0 to 1, rounded up to whole experts) of its experts, as counted.
    pub fn share_of_most_used(&self, layer: usize, part: f64) -> f64 {
        let counts = &self.layers[layer].counts;
        // 0.1 of 40 is 4.000000000000001 in doubles.
        let most = (part * counts.len() as f64 - 1e-9).ceil().max(0.0) as usize;
        let of_these: u64 = self.by_use(layer).iter().take(most).map(|&e| counts[e as usize]).sum();
        of_these as f64 / (self.layers[layer].choices() as f64).max(1.0)
    }

    /// The number of equally used experts whose choices would be as uncertain as those of this layer: exp of the entropy of its choices,
    /// as counted.
    pub fn effective(&self, layer: usize) -> f64 {
        let of = &self.layers[layer];
        let all = of.choices() as f64;
        let shares = of.counts.iter().filter(|&&n| n > 0).map(|&n| n as f64 / all);
        shares.map(|p| -p * p.ln()).sum::<f64>().exp()
    }

    /// The share of a token's choices that the token before it in the same sequence had made, too. `None` if no such pair was counted.
    /// Independent choices of equally likely experts would give k/E.
    pub fn repeats(&self, layer: usize) -> Option<f64> {
        let of = &self.layers[layer];
        let choices = of.followers as f64 * f64::from(self.used);
        (choices > 0.0).then(|| of.repeated as f64 / choices)
    }

    /// Whether these can be choices of a model with such sizes; `what` is their name for messages, a file perhaps.
    ///
    /// # Errors
    /// [`Error::Format`]: no experts in the model, another number of layers, of experts or of experts of a token, no token counted,
    /// more choices than the tokens can have made.
    pub fn check(&self, what: &str, spec: &ModelSpec) -> Result<()> {
        let wrong = |why: String| Err(Error::format(what, why));
        let Some(e) = &spec.experts else {
            return wrong(format!("a profile of a router, but {} has no experts", spec.name));
        };
        if self.layers.len() != spec.n_layers {
            return wrong(format!(
                "a router's profile of {} layers, the model has {}",
                self.layers.len(),
                spec.n_layers
            ));
        }
        if self.used as usize != e.used {
            return wrong(format!("{} experts of a token were counted, the model has {}", self.used, e.used));
        }
        if self.tokens == 0 || self.tokens > MOST_TOKENS {
            return wrong(format!("{} tokens were counted, wanted 1 to {MOST_TOKENS}", self.tokens));
        }
        for (layer, of) in self.layers.iter().enumerate() {
            let wanted = spec.experts_of(layer).map_or(0, |e| e.count);
            if of.counts.len() != wanted {
                return wrong(format!(
                    "layer {layer}: {} experts were counted, the model has {wanted}",
                    of.counts.len()
                ));
            }
            self.check_counts(layer).or_else(wrong)?;
        }
        Ok(())
    }

    /// Whether so many tokens can have made the choices of a layer.
    fn check_counts(&self, layer: usize) -> std::result::Result<(), String> {
        let (of, k) = (&self.layers[layer], u64::from(self.used));
        let (choices, most) = (of.choices(), self.tokens * k);
        if of.counts.is_empty() {
            return Ok(());
        }
        if choices == 0 {
            return Err(format!("layer {layer}: no choice of {} tokens was counted", self.tokens));
        }
        if choices > most || choices % k != 0 {
            let of = format!("{} tokens of {k} choices each", self.tokens);
            return Err(format!("layer {layer}: {choices} choices were counted, of {of}"));
        }
        if let Some((e, n)) = of.counts.iter().enumerate().find(|(_, n)| **n > choices / k) {
            return Err(format!("layer {layer}: {n} of {} tokens chose expert {e}", choices / k));
        }
        if of.followers > choices / k || of.repeated > of.followers * k {
            return Err(format!(
                "layer {layer}: {} choices were repeated by {} of {} tokens of {k} choices each",
                of.repeated,
                of.followers,
                choices / k
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::synth;
    use proptest::prelude::*;

    fn spec() -> ModelSpec {
        synth::spec("qwen3-30b-a3b").unwrap()
    }

    /// Of a layer of E experts, tokens that choose k different ones each.
    fn of_tokens() -> impl Strategy<Value = (usize, usize, Vec<Vec<u32>>)> {
        (1usize..24).prop_flat_map(|count| {
            (1..=count).prop_flat_map(move |k| {
                let all: Vec<u32> = (0..count as u32).collect();
                let token = prop::sample::subsequence(all, k);
                (Just(count), Just(k), prop::collection::vec(token, 1..40))
            })
        })
    }

    fn counted(count: usize, k: usize, tokens: &[Vec<u32>]) -> RouterProfile {
        let mut layer = RouterCounts { counts: vec![0; count], ..RouterCounts::default() };
        tokens.iter().flatten().for_each(|&e| layer.counts[e as usize] += 1);
        RouterProfile { tokens: tokens.len() as u64, used: k as u32, layers: vec![layer] }
    }

    proptest! {
        #[test]
        fn probabilities_are_those_of_k_choices((count, k, tokens) in of_tokens()) {
            let profile = counted(count, k, &tokens);
            let p: Vec<f64> = (0..count as u32).map(|e| profile.probability(0, e)).collect();
            prop_assert!(p.iter().all(|&p| p > 0.0 && p <= 1.0 + 1e-12), "{p:?}");
            prop_assert!((p.iter().sum::<f64>() - k as f64).abs() < 1e-9 * count as f64);
            prop_assert_eq!(profile.tokens_of(0), tokens.len() as u64);
            // The order of the counts is that of the probabilities.
            let by_use = profile.by_use(0);
            prop_assert!(by_use.windows(2).all(|w| {
                let [a, b] = [w[0], w[1]].map(|e| p[e as usize]);
                a > b || a == b && w[0] < w[1]
            }), "{by_use:?} {p:?}");
            let mut sorted = by_use;
            sorted.sort_unstable();
            prop_assert_eq!(sorted, (0..count as u32).collect::<Vec<_>>());
        }

        #[test]
        fn more_rows_choose_more_experts_and_no_more_than_there_are(
            (count, k, tokens) in of_tokens(),
            rows in prop::collection::vec(0.0f64..1e6, 2..6),
        ) {
            let profile = counted(count, k, &tokens);
            let mut rows = rows;
            rows.sort_by(f64::total_cmp);
            let distinct: Vec<f64> = rows.iter().map(|&r| profile.distinct_of_all(0, r)).collect();
            prop_assert!(distinct.windows(2).all(|w| w[0] <= w[1]), "{distinct:?}");
            prop_assert!(distinct.iter().all(|&d| (0.0..=count as f64).contains(&d)), "{distinct:?}");
            prop_assert_eq!(profile.distinct_of_all(0, 0.0), 0.0);
            prop_assert!((profile.distinct_of_all(0, 1.0) - k as f64).abs() < 1e-9 * count as f64);
            // Parts add up, and unequal use reads no more than equal use.
            let of = |experts: std::ops::Range<u32>| profile.distinct(0, experts, rows[0]);
            let half = count as u32 / 2;
            prop_assert!((of(0..half) + of(half..count as u32) - distinct[0]).abs() < 1e-9 * count as f64);
            if rows[0] >= 1.0 {
                let uniform = count as f64 * super::super::share_read(count, k, rows[0] as u64 + 1);
                prop_assert!(distinct[0] <= uniform + 1e-9, "{} over {uniform}", distinct[0]);
            }
        }

        #[test]
        fn equal_use_is_the_formula(count in 1usize..1024, used in 1usize..64, rows in 0u64..100_000) {
            let used = used.min(count);
            let mut e = spec().experts.unwrap();
            (e.count, e.used) = (count, used);
            let uniform = RouterProfile::uniform(&e);
            let (found, want) = (uniform.distinct_of_all(0, rows as f64), e.distinct(rows));
            prop_assert!((found - want).abs() <= 1e-9 * count as f64, "{found} for {want}");
            prop_assert!((uniform.effective(0) - count as f64).abs() < 1e-6 * count as f64);
            prop_assert!((uniform.share_of_most_used(0, 1.0) - 1.0).abs() < 1e-12);
        }
    }

    #[test]
    fn profiles_add_up_layer_by_layer() {
        let of =
            |counts: &[u64], followers, repeated| RouterCounts { counts: counts.into(), followers, repeated };
        let layers = |a, b| RouterProfile { tokens: 0, used: 2, layers: vec![a, of(&[], 0, 0), b] };
        let mut sum = layers(of(&[3, 1, 2], 2, 1), of(&[1, 1, 0], 0, 0));
        sum.add(&layers(of(&[1, 1, 0], 0, 0), of(&[4, 2, 2], 3, 4)));
        assert_eq!(sum.layers[0], of(&[4, 2, 2], 2, 1));
        assert_eq!(sum.layers[2], of(&[5, 3, 2], 3, 4));
        assert_eq!(sum.tokens, 5);
    }

    /// The figures of docs/experts.md.
    #[test]
    fn equal_use_of_128_experts() {
        let uniform = RouterProfile::uniform(spec().experts.as_ref().unwrap());
        uniform.check("uniform", &spec()).unwrap();
        for (rows, want) in [(1.0, 8.0), (2.0, 15.5), (4.0, 29.1), (8.0, 51.6), (16.0, 82.4), (64.0, 125.9)] {
            let found = uniform.distinct_of_all(47, rows);
            assert!((found - want).abs() < 0.06, "{rows}: {found}");
        }
    }

    #[test]
    fn what_was_counted_is_described() {
        // 10 tokens of 2 choices: expert 0 always, the others 1, 2, 3 and 4 times.
        let layer = RouterCounts { counts: vec![10, 1, 2, 3, 4], followers: 9, repeated: 12 };
        let p = RouterProfile { tokens: 10, used: 2, layers: vec![layer] };
        assert_eq!(p.by_use(0), [0, 4, 3, 2, 1]);
        let shares = [0.1, 0.2, 0.4, 1.0].map(|part| p.share_of_most_used(0, part));
        assert_eq!(shares, [0.5, 0.5, 0.7, 1.0]);
        assert_eq!(p.repeats(0), Some(12.0 / 18.0));
        let entropy: f64 = [0.5f64, 0.05, 0.1, 0.15, 0.2].iter().map(|p| -p * p.ln()).sum();
        assert!((p.effective(0) - entropy.exp()).abs() < 1e-12);
        assert!((p.probability(0, 0) - 10.5 / 11.25).abs() < 1e-12);
        assert!((p.probability(0, 1) - 1.5 / 11.25).abs() < 1e-12);
    }

    #[test]
    fn a_profile_of_another_model_is_refused_with_the_numbers() {
        let (spec, dense) = (spec(), synth::spec("tiny-llama").unwrap());
        let good = RouterProfile::uniform(spec.experts.as_ref().unwrap());
        good.check("r.json", &spec).unwrap();
        let said = |p: &RouterProfile, spec: &ModelSpec| p.check("r.json", spec).unwrap_err().to_string();
        assert!(said(&good, &dense).contains("r.json: a profile of a router, but tiny-llama has no experts"));
        let changed = |change: &dyn Fn(&mut RouterProfile)| {
            let mut p = good.clone();
            change(&mut p);
            said(&p, &spec)
        };
        for (change, want) in [
            (
                &(|p: &mut RouterProfile| p.layers.truncate(47)) as &dyn Fn(&mut RouterProfile),
                "of 47 layers, the model has 48",
            ),
            (&|p| p.layers[3].counts.truncate(127), "layer 3: 127 experts were counted, the model has 128"),
            (&|p| p.used = 7, "7 experts of a token were counted, the model has 8"),
            (&|p| p.tokens = 0, "0 tokens were counted"),
            (&|p| p.tokens = u64::MAX, "18446744073709551615 tokens were counted, wanted 1 to"),
            (&|p| p.layers[47].counts.fill(0), "layer 47: no choice of 128 tokens was counted"),
            (
                &|p| p.layers[9].counts[0] = 16,
                "layer 9: 1032 choices were counted, of 128 tokens of 8 choices each",
            ),
            (&|p| p.layers[9].counts[0] = u64::MAX, "layer 9: 18446744073709551615 choices"),
            (&|p| p.layers[9].counts[5] = 9, "layer 9: 1025 choices"),
            (&|p| p.layers[9].counts[5] = 7, "layer 9: 1023 choices"),
            (
                &|p| {
                    p.layers[9].counts.fill(0);
                    p.layers[9].counts[5] = 16
                },
                "layer 9: 16 of 2 tokens chose expert 5",
            ),
            (&|p| p.layers[0].followers = 129, "layer 0: 0 choices were repeated by 129 of 128 tokens"),
            (
                &|p| (p.layers[0].followers, p.layers[0].repeated) = (1, 9),
                "layer 0: 9 choices were repeated by 1 of 128",
            ),
        ] {
            let found = changed(change);
            assert!(found.contains(want), "{want}: {found}");
        }
        let text = serde_json::to_string(&good).unwrap();
        assert_eq!(serde_json::from_str::<RouterProfile>(&text).unwrap(), good);
        assert!(serde_json::from_str::<RouterProfile>(&text[..text.len() / 2]).is_err());
    }
}
