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
            if ok { Ok(()) } else { Err(Error::usage(format!("`{name}` {value}: must be {wanted}"))) }
        };
        let p = &params;
        // Comparisons with NaN are false, so these checks reject it.
        check(
            "temperature",
            p.temperature,
            p.temperature >= 0.0 && p.temperature.is_finite(),
            "0 or a positive number",
        )?;
        check("top_p", p.top_p, p.top_p > 0.0 && p.top_p <= 1.0, "above 0 and at most 1")?;
        check("min_p", p.min_p, (0.0..=1.0).contains(&p.min_p), "between 0 and 1")?;
        let penalty = p.repeat_penalty > 0.0 && p.repeat_penalty.is_finite();
        check("repeat_penalty", p.repeat_penalty, penalty, "a positive number")?;
        for (name, value) in
            [("presence_penalty", p.presence_penalty), ("frequency_penalty", p.frequency_penalty)]
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

    /// The likeliest token that is `allowed`, if the likeliest tokens tell: what a greedy choice from the whole row would be
    /// without the others. Nothing is drawn.
    pub fn likeliest_among(&self, top: &Top, allowed: impl Fn(u32) -> bool) -> Option<u32> {
        let (&(max, _), &(last, _)) = (top.likeliest.first()?, top.likeliest.last()?);
        // What is not a number, or infinite, is for those who see the whole row.
        if !self.params.is_greedy() || !max.is_finite() || !top.sum.is_finite() {
            return None;
        }
        let best = top.likeliest.iter().find(|t| allowed(t.1))?.0;
        // Equals of it may be among the others.
        if best == f32::NEG_INFINITY || (best == last && !top.is_whole()) {
            return None;
        }
        top.likeliest.iter().filter(|t| t.0 == best && allowed(t.1)).map(|t| t.1).min()
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
pub fn logprobs(logits: &[f32], k: usize) -> (f64, Vec<(u32, f64)>) {
    let lse = logsumexp(logits);
    let top = likeliest(logits, k);
    (lse, top.into_iter().map(|(l, id)| (id, f64::from(l) - lse)).collect())
}

/// The `k` likeliest tokens in [`order`], without NaN. Few of many are wanted, so hardly any enters the list.
fn likeliest(logits: &[f32], k: usize) -> Vec<(f32, u32)> {
    let k = k.min(logits.len());
    let mut top: Vec<(f32, u32)> = Vec::with_capacity(k);
    for (&l, id) in logits.iter().zip(0u32..) {
        let full = top.len() == k;
        if l.is_nan() || (full && top.last().is_none_or(|last| l < last.0)) {
            continue;
        }
        let at = top.partition_point(|other| order(other, &(l, id)).is_lt());
        if at < k {
            top.truncate(k - 1);
            top.insert(at, (l, id));
        }
    }
    top
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
mod tests;
