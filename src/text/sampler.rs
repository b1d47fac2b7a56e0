//! Samples the next token from logits.
//!
//! The order is the one users know from elsewhere: biases and exclusions, penalties, top-k, top-p, min-p,
//! temperature, draw. Greedy choice is temperature 0. Everything is linear in the vocabulary: candidates are
//! selected, and only the selected few are sorted. Where a device gives the likeliest tokens ([`Top`]), draws that
//! these decide need no row: [`Sampler::choose_among`].

use std::cmp::Ordering;
use std::sync::Arc;

use super::top::{Beyond, Nucleus, Top};
use crate::{Error, Result};

/// How to choose among the model's predictions. The default is greedy.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplerParams {
    /// 0 picks the likeliest token; above, probabilities are p^(1/temperature).
    pub temperature: f32,
    /// Only the `top_k` likeliest tokens; 0 for all.
    pub top_k: usize,
    /// The smallest set of likeliest tokens with at least this probability; 1 for all.
    pub top_p: f32,
    /// Only tokens whose probability is at least this fraction of the likeliest one's; 0 for all.
    pub min_p: f32,
    /// Divides positive logits, and multiplies negative ones, of recent tokens; 1 for none.
    pub repeat_penalty: f32,
    /// How many of the last tokens, those of the prompt included, count as recent.
    pub repeat_last_n: usize,
    /// Subtracted from the logits of tokens that the answer has; 0 for none.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token as often as the answer has it; 0 for none.
    pub frequency_penalty: f32,
    /// How many of the last tokens these two look at. They leave out the prompt in any case.
    pub answer_last_n: usize,
    /// Added to the logits of tokens, minus infinity to exclude one.
    pub biases: Arc<[(u32, f32)]>,
    /// Added to the logit of the last token of a sequence where the others precede it, minus infinity to exclude it.
    pub sequence_biases: Arc<[(Vec<u32>, f32)]>,
    /// Only these tokens.
    pub allowed: Option<Arc<[u32]>>,
    /// Tokens excluded at the beginning of the answer, each list for this many tokens.
    pub withheld: Vec<(usize, Arc<[u32]>)>,
    /// The same seed draws the same text.
    pub seed: u64,
}

impl SamplerParams {
    /// Whether the model's likeliest token is always taken, so that nothing but it is needed of the logits.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0 && self.is_plain()
    }

    /// Whether logits are taken as they are.
    fn is_plain(&self) -> bool {
        self.repeat_penalty == 1.0
            && self.presence_penalty == 0.0
            && self.frequency_penalty == 0.0
            && self.biases.is_empty()
            && self.sequence_biases.is_empty()
            && self.allowed.is_none()
            && self.withheld.is_empty()
    }
}

impl SamplerParams {
    /// The least logit that min-p leaves, where `max` is the greatest.
    fn floor(&self, max: f32) -> f32 {
        if self.min_p > 0.0 { max + self.min_p.ln() } else { f32::NEG_INFINITY }
    }

    /// Whether a logit is worth a look. Without top-p in between, min-p commutes with top-k, so it can reduce the
    /// candidates first.
    fn is_candidate(&self, logit: f32, max: f32) -> bool {
        let early = if self.top_p >= 1.0 { self.floor(max) } else { f32::NEG_INFINITY };
        logit >= early && logit > f32::NEG_INFINITY
    }
}

impl Default for SamplerParams {
    fn default() -> Self {
        SamplerParams {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            answer_last_n: usize::MAX,
            biases: Arc::default(),
            sequence_biases: Arc::default(),
            allowed: None,
            withheld: Vec::new(),
            seed: 0,
        }
    }
}

/// The reason for the end of an answer whose settings exclude every token.
pub const NO_TOKEN_LEFT: &str = "no token is left to choose: the settings exclude all of them";

/// Draws tokens by [`SamplerParams`].
#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplerParams,
    rng: Xoshiro256,
    candidates: Vec<(f32, u32)>,
    /// Tokens of the prompt, with which a history begins.
    prompt: usize,
}

impl Sampler {
    /// Checks the parameters: each violation is a usage error that names the option.
    pub fn new(params: SamplerParams) -> Result<Sampler> {
        let check = |name: &str, value: f32, ok: bool, wanted: &str| {
            if ok { Ok(()) } else { Err(Error::usage(format!("--{name} {value}: must be {wanted}"))) }
        };
        let p = &params;
        // Comparisons with NaN are false, so these checks reject it.
        check(
            "temp",
            p.temperature,
            p.temperature >= 0.0 && p.temperature.is_finite(),
            "0 or a positive number",
        )?;
        check("top-p", p.top_p, p.top_p > 0.0 && p.top_p <= 1.0, "above 0 and at most 1")?;
        check("min-p", p.min_p, (0.0..=1.0).contains(&p.min_p), "between 0 and 1")?;
        let penalty = p.repeat_penalty > 0.0 && p.repeat_penalty.is_finite();
        check("repeat-penalty", p.repeat_penalty, penalty, "a positive number")?;
        for (name, value) in
            [("presence-penalty", p.presence_penalty), ("frequency-penalty", p.frequency_penalty)]
        {
            check(name, value, (-2.0..=2.0).contains(&value), "between -2 and 2")?;
        }
        let rng = Xoshiro256::new(params.seed);
        Ok(Sampler { params, rng, candidates: Vec::new(), prompt: 0 })
    }

    /// For histories that begin with a prompt of `n` tokens, which some settings leave out.
    #[must_use]
    pub fn after_prompt(mut self, n: usize) -> Sampler {
        self.prompt = n;
        self
    }

    /// The parameters in force.
    pub fn params(&self) -> &SamplerParams {
        &self.params
    }

    /// The factor of [`Top::sum`] with which [`Sampler::choose_among`] may decide, if it ever can among `k` tokens: logits
    /// are taken as they are, and not more than `k` are asked for.
    pub fn top_factor(&self, k: usize) -> Option<f32> {
        (self.params.is_plain() && self.params.top_k <= k).then(|| self.factor())
    }

    /// A nucleus is cut before the temperature applies.
    fn factor(&self) -> f32 {
        let p = &self.params;
        if p.top_p < 1.0 || p.temperature == 0.0 { 1.0 } else { 1.0 / p.temperature }
    }

    /// The token that [`Sampler::choose`] would choose from the whole row, if the likeliest tokens tell; nothing has changed
    /// otherwise. Only with [`Sampler::top_factor`].
    pub fn choose_among(&mut self, top: &Top) -> Option<u32> {
        let (&(max, _), &(last, _)) = (top.likeliest.first()?, top.likeliest.last()?);
        // What is not a number, or infinite, is for those who see the whole row.
        if !self.params.is_plain() || !max.is_finite() || !top.sum.is_finite() {
            return None;
        }
        let beyond = top.beyond();
        // Equals of the greatest may be among the others.
        if beyond.is_some() && (last == max || self.params.top_k > top.likeliest.len()) {
            return None;
        }
        if self.params.temperature == 0.0 || self.params.top_k == 1 {
            return top.likeliest.iter().filter(|t| t.0 == max).map(|t| t.1).min();
        }
        self.candidates.clear();
        self.candidates.extend(top.likeliest.iter().filter(|t| self.params.is_candidate(t.0, max)));
        if beyond.is_none() {
            // As they come from a whole row: sums are rounded in the order of their terms.
            self.candidates.sort_unstable_by_key(|t| t.1);
        }
        self.draw_among(max, beyond)
    }

    /// Picks the next token after `history` (oldest first). May change `logits`.
    ///
    /// NaN is never chosen; if all logits are NaN, or all tokens are excluded, the result is token 0.
    pub fn sample(&mut self, logits: &mut [f32], history: &[u32]) -> u32 {
        self.choose(logits, history).unwrap_or(0)
    }

    /// [`Sampler::sample`], unless no token is left to choose: all are excluded, or NaN.
    pub fn choose(&mut self, logits: &mut [f32], history: &[u32]) -> Option<u32> {
        assert!(!logits.is_empty(), "no logits to sample from");
        self.bias(logits, history);
        self.penalise(logits, history);
        self.draw(logits)
    }

    fn draw(&mut self, logits: &mut [f32]) -> Option<u32> {
        let p = &self.params;
        let best = argmax(logits);
        let max = logits[best as usize];
        // The first is NaN, or minus infinity, only if all are.
        if max.is_nan() || max == f32::NEG_INFINITY {
            return None;
        }
        if p.temperature == 0.0 || p.top_k == 1 || !max.is_finite() {
            return Some(best);
        }
        self.candidates.clear();
        let all = logits.iter().copied().zip(0u32..);
        self.candidates.extend(all.filter(|&(l, _)| p.is_candidate(l, max)));
        Some(self.draw_among(max, None).unwrap_or(best))
    }

    /// Draws one of the candidates, which are all of the row, or all but those `beyond`. `None` if the draw takes one of
    /// these, or may take one; then nothing is drawn.
    fn draw_among(&mut self, max: f32, mut beyond: Option<Beyond>) -> Option<u32> {
        let factor = self.factor();
        let (p, all) = (&self.params, &mut self.candidates);
        if p.top_k > 0 {
            if p.top_k < all.len() {
                all.select_nth_unstable_by(p.top_k, order);
                all.truncate(p.top_k);
            }
            // Sums of the same numbers in the same order are the same.
            all.sort_unstable_by(order);
            beyond = None;
        }
        let floor = p.floor(max);
        if p.top_p < 1.0 {
            match beyond {
                None => nucleus(all, max, p.top_p as f64),
                Some(others) if others.factor == factor => {
                    match others.nucleus(all.iter().map(|t| t.0), max, p.top_p as f64) {
                        Nucleus::Has(n) => {
                            all.truncate(n);
                            beyond = None;
                        }
                        Nucleus::GoesOn => {}
                        Nucleus::Unclear => return None,
                    }
                }
                Some(_) => return None,
            }
            all.retain(|&(l, _)| l >= floor);
        }
        let beyond = beyond.filter(|others| !others.is_below(floor));
        // Sort into a fixed order, independent of the selection: the same seed must draw the same token.
        all.sort_unstable_by(order);
        let weight = |l: f32| ((l - max) as f64 / p.temperature as f64).exp();
        let mut rng = self.rng.clone();
        let Some(others) = beyond else {
            let total: f64 = all.iter().map(|&(l, _)| weight(l)).sum();
            let mut left = rng.unit() * total;
            self.rng = rng;
            let drawn = all.iter().find(|t| {
                left -= weight(t.0);
                left < 0.0
            });
            // Rounding may leave a remainder after the last candidate.
            return drawn.or(all.last()).map(|t| t.1);
        };
        // All tokens of the row may be drawn. Their sum lies between two numbers, and so does what is left of it.
        if p.top_p < 1.0 || p.min_p > 0.0 || others.factor != factor {
            return None;
        }
        let drawn = rng.unit();
        let (mut least, mut most) = (drawn * others.low, drawn * others.high);
        for &(l, id) in all.iter() {
            (least, most) = (least - weight(l), most - weight(l));
            if most < 0.0 {
                self.rng = rng;
                return Some(id);
            }
            if least < 0.0 {
                return None;
            }
        }
        None
    }

    /// Adds biases, and excludes tokens.
    fn bias(&self, logits: &mut [f32], history: &[u32]) {
        let p = &self.params;
        let mut add = |id: u32, bias: f32| {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit += bias;
            }
        };
        p.biases.iter().for_each(|&(id, bias)| add(id, bias));
        for (sequence, bias) in p.sequence_biases.iter() {
            if let [before @ .., last] = &sequence[..]
                && history.ends_with(before)
            {
                add(*last, *bias);
            }
        }
        let answered = history.len().saturating_sub(self.prompt);
        for (first, ids) in &p.withheld {
            if answered < *first {
                ids.iter().for_each(|&id| add(id, f32::NEG_INFINITY));
            }
        }
        if let Some(allowed) = &p.allowed {
            let kept: Vec<(usize, f32)> =
                allowed.iter().filter_map(|&id| Some((id as usize, *logits.get(id as usize)?))).collect();
            logits.fill(f32::NEG_INFINITY);
            kept.into_iter().for_each(|(id, logit)| logits[id] = logit);
        }
    }

    /// Penalties in the order of vLLM: repetition first, then frequency and presence.
    fn penalise(&self, logits: &mut [f32], history: &[u32]) {
        let p = &self.params;
        let counted = |tokens: &[u32]| {
            let mut tokens = tokens.to_vec();
            tokens.sort_unstable();
            tokens
        };
        if p.repeat_penalty != 1.0 {
            let recent = counted(&history[history.len().saturating_sub(p.repeat_last_n)..]);
            for same in recent.chunk_by(|a, b| a == b) {
                if let Some(logit) = logits.get_mut(same[0] as usize) {
                    *logit = if *logit > 0.0 { *logit / p.repeat_penalty } else { *logit * p.repeat_penalty };
                }
            }
        }
        if p.presence_penalty != 0.0 || p.frequency_penalty != 0.0 {
            let first = history.len().saturating_sub(p.answer_last_n).max(self.prompt).min(history.len());
            for same in counted(&history[first..]).chunk_by(|a, b| a == b) {
                if let Some(logit) = logits.get_mut(same[0] as usize) {
                    *logit -= p.frequency_penalty * same.len() as f32 + p.presence_penalty;
                }
            }
        }
    }
}

/// Likeliest first, then lowest id.
fn order(a: &(f32, u32), b: &(f32, u32)) -> Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// Keeps the smallest set of likeliest candidates whose probabilities sum to at least `p`.
fn nucleus(candidates: &mut Vec<(f32, u32)>, max: f32, p: f64) {
    let total: f64 = candidates.iter().map(|&(l, _)| ((l - max) as f64).exp()).sum();
    let (mut sorted, mut sum) = (0, 0.0);
    // Real distributions reach p within a few dozen candidates: sort ever larger prefixes.
    let mut prefix = 64;
    while sorted < candidates.len() {
        let rest = &mut candidates[sorted..];
        if prefix < rest.len() {
            rest.select_nth_unstable_by(prefix, order);
        }
        let end = sorted + prefix.min(rest.len());
        candidates[sorted..end].sort_unstable_by(order);
        for at in sorted..end {
            sum += ((candidates[at].0 - max) as f64).exp();
            if sum >= p * total {
                candidates.truncate(at + 1);
                return;
            }
        }
        sorted = end;
        prefix *= 4;
    }
}

/// The position of the largest value; the first of equals. NaN is skipped.
fn argmax(values: &[f32]) -> u32 {
    // Two vectorised passes are faster than a single scalar one.
    let mut lanes = [f32::NEG_INFINITY; 16];
    let (blocks, tail) = values.as_chunks::<16>();
    for block in blocks {
        for (m, &v) in lanes.iter_mut().zip(block) {
            *m = if v > *m { v } else { *m };
        }
    }
    let max = lanes.iter().chain(tail).fold(f32::NEG_INFINITY, |m, &v| if v > m { v } else { m });
    values.iter().position(|&v| v == max).unwrap_or(0) as u32
}

/// The model's own distribution: log(Σ exp(logit)), and the natural log-probabilities of the `k`
/// likeliest tokens, likeliest first. No sampling filter is applied.
pub fn logprobs(logits: &[f32], k: usize) -> (f64, Vec<(u32, f32)>) {
    let lse = logsumexp(logits);
    let mut top: Vec<(f32, u32)> =
        logits.iter().zip(0u32..).filter(|(l, _)| !l.is_nan()).map(|(&l, id)| (l, id)).collect();
    if k < top.len() {
        top.select_nth_unstable_by(k, order);
        top.truncate(k);
    }
    top.sort_unstable_by(order);
    (lse, top.into_iter().map(|(l, id)| (id, (l as f64 - lse) as f32)).collect())
}

/// The natural log-probability of token `id` under `logits`.
pub fn token_logprob(logits: &[f32], id: u32) -> f32 {
    (logits[id as usize] as f64 - logsumexp(logits)) as f32
}

/// log(Σ exp(x)). Terms are computed in f32 (relative error below 2e-7) and summed in f64.
fn logsumexp(x: &[f32]) -> f64 {
    let Some(&max) = x.get(argmax(x) as usize) else { return f64::NEG_INFINITY };
    if !max.is_finite() {
        return max as f64;
    }
    let mut sum = 0.0f64;
    let (blocks, tail) = x.as_chunks::<16>();
    for part in blocks {
        let mut lanes = [0.0f32; 16];
        for (lane, &v) in lanes.iter_mut().zip(part) {
            *lane = exp_negative(v - max);
        }
        sum += lanes.iter().map(|&v| v as f64).sum::<f64>();
    }
    sum += tail.iter().map(|&v| exp_negative(v - max) as f64).sum::<f64>();
    max as f64 + sum.ln()
}

/// exp(x) for x ≤ 0, without branches so that it vectorises. Below -87, and for NaN, it is 0.
fn exp_negative(x: f32) -> f32 {
    let in_range = x > -87.0;
    let x = if in_range { x } else { -87.0 };
    // Adding and subtracting 1.5·2²³ rounds to an integer.
    const MAGIC: f32 = 12582912.0;
    let n = (x * std::f32::consts::LOG2_E + MAGIC) - MAGIC;
    // ln 2 in two parts, the first exact in few bits.
    let r = x - n * 0.693_359_4 - n * -2.121_944_4e-4;
    // exp(r) on |r| ≤ ln2/2 by its Taylor series: the first omitted term is below 2e-9.
    let mut e = 1.0 / 5040.0;
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        e = e * r + c;
    }
    let scale = f32::from_bits(((n as i32 + 127) as u32) << 23);
    if in_range { e * scale } else { 0.0 }
}

/// xoshiro256++ (Blackman & Vigna 2019), seeded through splitmix64.
#[derive(Debug, Clone)]
struct Xoshiro256([u64; 4]);

impl Xoshiro256 {
    fn new(seed: u64) -> Xoshiro256 {
        let mut state = seed;
        Xoshiro256(std::array::from_fn(|_| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        }))
    }

    fn next(&mut self) -> u64 {
        let s = &mut self.0;
        let out = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        out
    }

    /// Uniform in [0, 1).
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sampler(change: impl FnOnce(&mut SamplerParams)) -> Sampler {
        let mut params = SamplerParams::default();
        change(&mut params);
        Sampler::new(params).expect("valid parameters")
    }

    #[test]
    fn greedy_takes_the_first_of_equals_and_never_nan() {
        let mut s = sampler(|_| ());
        assert_eq!(s.sample(&mut [0.0, 2.0, 2.0, f32::NAN], &[]), 1);
        assert_eq!(s.sample(&mut [f32::NAN, f32::NEG_INFINITY, -5.0], &[]), 2);
        assert_eq!(s.sample(&mut [f32::NAN, f32::INFINITY, 1.0], &[]), 1);
        assert_eq!(s.sample(&mut [f32::NAN; 40], &[]), 0);
        let mut long: Vec<f32> = (0..1000).map(|i| (i % 37) as f32).collect();
        long[777] = f32::NAN;
        assert_eq!(s.sample(&mut long, &[]), 36);
    }

    #[test]
    fn each_bad_parameter_is_a_usage_error_that_names_it() {
        type Change = fn(&mut SamplerParams);
        let bad: [(&str, Change); 11] = [
            ("--presence-penalty", |p| p.presence_penalty = 2.5),
            ("--frequency-penalty", |p| p.frequency_penalty = f32::NAN),
            ("--temp", |p| p.temperature = -1.0),
            ("--temp", |p| p.temperature = f32::NAN),
            ("--temp", |p| p.temperature = f32::INFINITY),
            ("--top-p", |p| p.top_p = 0.0),
            ("--top-p", |p| p.top_p = 1.5),
            ("--top-p", |p| p.top_p = f32::NAN),
            ("--min-p", |p| p.min_p = -0.1),
            ("--repeat-penalty", |p| p.repeat_penalty = 0.0),
            ("--repeat-penalty", |p| p.repeat_penalty = f32::NAN),
        ];
        for (name, change) in bad {
            let mut params = SamplerParams::default();
            change(&mut params);
            match Sampler::new(params) {
                Err(Error::Usage(m)) => assert!(m.starts_with(name), "{m}"),
                other => panic!("{name}: {other:?}"),
            }
        }
    }

    #[test]
    fn filters_bound_the_choice() {
        let logits: Vec<f32> = (0..200).map(|i| ((i * 7919) % 200) as f32 * 0.05).collect();
        let rank = |id: u32| (0..200).filter(|&j| logits[j] > logits[id as usize]).count();
        let draw = |s: &mut Sampler| s.sample(&mut logits.clone(), &[]);
        let mut k = sampler(|p| (p.temperature, p.top_k) = (5.0, 3));
        let mut p = sampler(|p| (p.temperature, p.top_p) = (5.0, 0.3));
        let mut m = sampler(|p| (p.temperature, p.min_p) = (5.0, 0.9));
        // Computed by hand: probabilities fall by e^-0.05 per rank; the top 8 are the first to reach 0.3.
        let weights: Vec<f64> = (0..200).map(|r| (-0.05 * r as f64).exp()).collect();
        let total: f64 = weights.iter().sum();
        let nucleus = 1 + (0..200).find(|&r| weights[..=r].iter().sum::<f64>() >= 0.3 * total).unwrap();
        let mut seen = [0usize; 3];
        for _ in 0..3000 {
            for (s, (max, bound)) in
                [&mut k, &mut p, &mut m].into_iter().zip(seen.iter_mut().zip([3, nucleus, 3]))
            {
                let r = rank(draw(s));
                assert!(r < bound, "rank {r} of {bound}");
                *max = (*max).max(r + 1);
            }
        }
        assert_eq!(seen, [3, nucleus, 3], "every allowed token turns up");
    }

    #[test]
    fn draws_follow_the_tempered_distribution() {
        let logits = [1.0f32, 0.0, -1.0, 0.5];
        for temperature in [0.5f32, 1.0, 2.0] {
            let mut s = sampler(|p| (p.temperature, p.seed) = (temperature, 7));
            let mut counts = [0f64; 4];
            let n = 40_000;
            (0..n).for_each(|_| counts[s.sample(&mut logits.clone(), &[]) as usize] += 1.0);
            let weights = logits.map(|l| (l as f64 / temperature as f64).exp());
            let total: f64 = weights.iter().sum();
            // Chi-square with 3 degrees of freedom exceeds 16.3 once in a thousand seeds.
            let chi: f64 = (0..4)
                .map(|i| {
                    (counts[i] - n as f64 * weights[i] / total).powi(2) / (n as f64 * weights[i] / total)
                })
                .sum();
            assert!(chi < 16.3, "temperature {temperature}: chi-square {chi}");
        }
    }

    #[test]
    fn the_same_seed_draws_the_same_and_another_does_not() {
        let draw = |seed| {
            let mut s = sampler(|p| (p.temperature, p.seed, p.top_p) = (1.0, seed, 0.9));
            (0..50)
                .map(|i| {
                    s.sample(&mut (0..500).map(|j| ((i * j) % 17) as f32 * 0.3).collect::<Vec<_>>(), &[])
                })
                .collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    #[test]
    fn the_penalty_reaches_back_exactly_so_far_and_once() {
        let mut s = sampler(|p| (p.repeat_penalty, p.repeat_last_n) = (2.0, 3));
        let mut logits = [4.0, 3.0, -1.0, 1.5];
        assert_eq!(s.sample(&mut logits, &[1, 0, 0, 2]), 1, "1 is four back: not penalised");
        assert_eq!(logits, [2.0, 3.0, -2.0, 1.5]);
        s.sample(&mut logits, &[99]);
        assert_eq!(logits, [2.0, 3.0, -2.0, 1.5], "an id outside of the vocabulary is ignored");
    }

    /// `transformers` 5.24.0, `vllm/v1/worker/gpu/sample` formulas: tests/fixtures/make_penalties.py.
    #[test]
    fn penalties_are_those_of_transformers_and_vllm() {
        let fixture: serde_json::Value =
            serde_json::from_str(include_str!("../../tests/fixtures/penalties.json")).unwrap();
        let cases = fixture["cases"].as_array().unwrap();
        assert!(cases.len() >= 8, "the fixture lost its cases");
        for case in cases {
            let real = |key: &str| case[key].as_f64().unwrap() as f32;
            let reals = |key: &str| -> Vec<f32> {
                case[key]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|x| x.as_f64().map_or(f32::NEG_INFINITY, |x| x as f32))
                    .collect()
            };
            let ids = |value: &serde_json::Value| -> Vec<u32> {
                value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
            };
            let bad = case["bad_words"].as_array().unwrap().iter().map(|w| (ids(w), f32::NEG_INFINITY));
            let params = SamplerParams {
                repeat_penalty: real("repetition_penalty"),
                repeat_last_n: usize::MAX,
                presence_penalty: real("presence_penalty"),
                frequency_penalty: real("frequency_penalty"),
                sequence_biases: bad.collect(),
                withheld: vec![(1, ids(&case["begin_suppress"]).into())],
                ..SamplerParams::default()
            };
            let (prompt, answer) = (ids(&case["prompt"]), ids(&case["answer"]));
            let mut s = Sampler::new(params).unwrap().after_prompt(prompt.len());
            let mut logits = reals("logits");
            s.sample(&mut logits, &[prompt, answer].concat());
            for (i, (got, want)) in logits.iter().zip(reals("want")).enumerate() {
                // One rounding for each of three operations.
                let near = (got - want).abs() <= 4.0 * f32::EPSILON * want.abs().max(1.0);
                assert!(near || *got == want, "token {i} of {case}: {got}");
            }
        }
    }

    #[test]
    fn biases_exclude_allow_and_prefer() {
        let inf = f32::INFINITY;
        let mut s = sampler(|p| p.biases = [(1, -inf), (2, 1.5), (9, 1.0)].into());
        assert_eq!(s.sample(&mut [0.0, 5.0, 1.0], &[]), 2);
        let mut s = sampler(|p| p.allowed = Some([0, 3, 77].into()));
        assert_eq!(s.choose(&mut [0.0, 5.0, 1.0, 0.5], &[]), Some(3));
        // Two tokens of the answer, after which the third may come.
        let mut s = sampler(|p| p.withheld = vec![(2, [1].into())]).after_prompt(3);
        let mut after = |n: usize| s.sample(&mut [0.0, 5.0, 1.0], &vec![0; n]);
        assert_eq!((after(3), after(4), after(5)), (2, 2, 1));
        let mut none = sampler(|p| (p.temperature, p.allowed) = (1.0, Some([7].into())));
        assert_eq!((none.choose(&mut [0.0; 3], &[]), none.sample(&mut [0.0; 3], &[])), (None, 0));
        let mut sequence = sampler(|p| p.sequence_biases = [(vec![4, 5, 1], -inf)].into());
        let mut after = |history: &[u32]| sequence.sample(&mut [0.0, 5.0, 1.0], history);
        assert_eq!((after(&[9, 4, 5]), after(&[5]), after(&[4, 5, 5])), (2, 1, 1));
        // Whatever changes logits rules out taking the likeliest without them.
        type Change = fn(&mut SamplerParams);
        let changes: [Change; 7] = [
            |p| p.repeat_penalty = 1.1,
            |p| p.presence_penalty = 0.1,
            |p| p.frequency_penalty = -0.1,
            |p| p.biases = [(1, 1.0)].into(),
            |p| p.sequence_biases = [(vec![1], 1.0)].into(),
            |p| p.allowed = Some([1].into()),
            |p| p.withheld = vec![(1, [1].into())],
        ];
        assert!(SamplerParams::default().is_greedy());
        for change in changes {
            assert!(!sampler(change).params().is_greedy());
        }
    }

    proptest! {
        #[test]
        fn logprobs_equal_the_f64_formula(logits in prop::collection::vec(-60f32..60.0, 1..300), k in 0usize..12) {
            let max = logits.iter().copied().fold(f32::MIN, f32::max) as f64;
            let lse = max + logits.iter().map(|&l| (l as f64 - max).exp()).sum::<f64>().ln();
            let (got, top) = logprobs(&logits, k);
            // A relative error e of the sum is an absolute error e of its logarithm.
            prop_assert!((got - lse).abs() < 3e-7, "{got} {lse}");
            let mut sorted: Vec<(u32, f32)> = (0u32..).zip(logits.iter().copied()).collect();
            sorted.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            prop_assert_eq!(top.len(), k.min(logits.len()));
            for (&(id, lp), &(want, l)) in top.iter().zip(&sorted) {
                prop_assert_eq!(id, want);
                prop_assert_eq!(lp, (l as f64 - got) as f32);
                prop_assert_eq!(token_logprob(&logits, id), lp);
            }
        }
    }

    /// The `k` likeliest of a row; the sum is off by the fraction `off`, of at most `error`.
    fn top_of(logits: &[f32], k: usize, factor: f32, off: f64, error: f64) -> Top {
        let mut all: Vec<(f32, u32)> = logits.iter().copied().zip(0..).collect();
        let nan_last = |x: f32| if x.is_nan() { f32::from_bits(u32::MAX) } else { x };
        all.sort_by(|a, b| nan_last(b.0).total_cmp(&nan_last(a.0)).then(a.1.cmp(&b.1)));
        all.truncate(k);
        let sum: f64 = logits.iter().map(|&x| (f64::from(x - all[0].0) * f64::from(factor)).exp()).sum();
        Top { likeliest: all, vocab: logits.len(), factor, sum: (sum * (1.0 + off)) as f32, error }
    }

    /// Draws from rows by the likeliest tokens where these tell, and by whole rows: both must agree, draw after draw.
    /// Returns how many of the draws were decided by the likeliest tokens.
    fn draws_agree(params: &SamplerParams, rows: &[Vec<f32>], k: usize, off: f64, error: f64) -> usize {
        let mut whole = Sampler::new(params.clone()).expect("valid parameters");
        let mut among = whole.clone();
        let mut decided = 0;
        for row in rows {
            let top = among.top_factor(k).map(|factor| top_of(row, k, factor, off, error));
            let want = whole.choose(&mut row.clone(), &[]);
            let got = top.and_then(|top| among.choose_among(&top));
            decided += usize::from(got.is_some());
            assert_eq!(got.or_else(|| among.choose(&mut row.clone(), &[])), want, "{params:?}, k {k}");
            assert_eq!(among.rng.0, whole.rng.0, "as many numbers drawn");
        }
        decided
    }

    fn any_logit() -> impl Strategy<Value = f32> {
        prop_oneof![
            20 => -8f32..8.0,
            20 => (-3i8..4).prop_map(f32::from),
            2 => Just(-0.0f32),
            4 => Just(f32::NEG_INFINITY),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn the_likeliest_tokens_decide_as_whole_rows_do(
            mut rows in prop::collection::vec(prop::collection::vec(any_logit(), 1..120), 1..6),
            k in 1usize..60,
            temperature in prop_oneof![Just(0.0f32), Just(1.0), 0.05f32..3.0],
            top_k in prop_oneof![Just(0usize), 1usize..70],
            top_p in prop_oneof![Just(1.0f32), 0.05f32..1.0],
            min_p in prop_oneof![Just(0.0f32), 0.0f32..0.5],
            seed in any::<u64>(),
            (off, error) in prop_oneof![Just((0.0, 1e-5)), Just((9e-6, 1e-5)), Just((-0.04, 0.05)), Just((0.04, 0.05))],
            strange in prop_oneof![30 => Just(None), 1 => Just(Some(f32::NAN)), 1 => Just(Some(f32::INFINITY))],
        ) {
            if let Some(x) = strange {
                let at = seed as usize % rows[0].len();
                rows[0][at] = x;
            }
            let params = SamplerParams { temperature, top_k, top_p, min_p, seed, ..SamplerParams::default() };
            draws_agree(&params, &rows, k, off, error);
        }
    }

    #[test]
    fn most_draws_need_no_whole_row() {
        let mut rng = Xoshiro256::new(5);
        let mut normal = || (0..12).map(|_| rng.unit() as f32).sum::<f32>() - 6.0;
        let rows: Vec<Vec<f32>> = (0..60).map(|_| (0..5000).map(|_| 4.0 * normal()).collect()).collect();
        let all = |change: fn(&mut SamplerParams)| {
            let mut params = SamplerParams { temperature: 0.8, seed: 3, ..SamplerParams::default() };
            change(&mut params);
            draws_agree(&params, &rows, 256, 0.0, 1e-5)
        };
        assert_eq!(all(|p| p.top_k = 40), 60);
        assert_eq!(all(|p| p.top_k = 256), 60);
        assert_eq!(all(|p| p.min_p = 0.05), 60);
        assert_eq!(all(|p| (p.top_k, p.top_p, p.min_p) = (64, 0.9, 0.05)), 60);
        assert_eq!(all(|p| p.temperature = 0.0), 60);
        // What only bounds tell, and what may lie beyond.
        assert!(all(|p| p.top_p = 0.9) >= 58);
        assert!(all(|_| ()) >= 50);
        // Never: more than there are, and changed logits.
        assert_eq!(all(|p| p.top_k = 257), 0);
        assert_eq!(all(|p| p.presence_penalty = 0.5), 0);
    }

    #[test]
    fn logprobs_survive_infinities_and_nan() {
        let (lse, top) = logprobs(&[0.0, f32::NAN, f32::NEG_INFINITY, 0.0], 4);
        assert!((lse - 2f64.ln()).abs() < 3e-7);
        assert_eq!(top.iter().map(|t| t.0).collect::<Vec<_>>(), [0, 3, 2]);
        assert_eq!(top[2].1, f32::NEG_INFINITY);
    }
}
