//! The whole forward pass, slowly and obviously, in f64: no kernels, no cache, no batches, everything
//! recomputed from the spec and the weights. The one thing that it shares with the engine is the dequantiser.

use std::cell::{Cell, RefCell};

use half::{bf16, f16};
use tandem::cache::KvType;
use tandem::model::{
    Experts, Ffn, ModelSpec, Norm, Position, QkNorm, Rope, RopePairing, RopeScaling, RouterWeights, Weights,
};
use tandem::reference::dequant::dequantise;

type Rows = Vec<Vec<f64>>;

/// The logits after each of `tokens`, in a context that they fill. Keys and values are rounded to `kv`, as a cache would store them: that
/// is part of what the engine computes, not an error of it.
pub fn logits(spec: &ModelSpec, weights: &Weights, kv: impl Into<KvType>, tokens: &[u32]) -> Rows {
    Naive::new(spec, weights, kv.into()).run(tokens)
}

/// By how much the last chosen expert leads the next, at least, in standard deviations of the router's logits. Where the lead
/// is smaller than what a computation rounds, it may choose another expert and still be right.
pub fn closest_choice(spec: &ModelSpec, weights: &Weights, kv: impl Into<KvType>, tokens: &[u32]) -> f64 {
    let naive = Naive::new(spec, weights, kv.into());
    naive.run(tokens);
    naive.closest.get()
}

/// The experts that each of `tokens` chooses in each layer; none in dense ones.
pub fn choices(
    spec: &ModelSpec,
    weights: &Weights,
    kv: impl Into<KvType>,
    tokens: &[u32],
) -> Vec<Vec<Vec<usize>>> {
    let naive = Naive::new(spec, weights, kv.into());
    naive.run(tokens);
    naive.chosen.into_inner()
}

struct Naive<'a> {
    spec: &'a ModelSpec,
    weights: &'a Weights,
    kv: KvType,
    closest: Cell<f64>,
    /// By layer, the choices of each row.
    chosen: RefCell<Vec<Vec<Vec<usize>>>>,
}

impl<'a> Naive<'a> {
    fn new(spec: &'a ModelSpec, weights: &'a Weights, kv: KvType) -> Naive<'a> {
        let chosen = RefCell::new(vec![Vec::new(); spec.n_layers]);
        Naive { spec, weights, kv, closest: Cell::new(f64::INFINITY), chosen }
    }
}

impl Naive<'_> {
    fn run(&self, tokens: &[u32]) -> Rows {
        let s = self.spec;
        let table = self.tensor("token_embd.weight").unwrap();
        let mut hidden: Rows = tokens
            .iter()
            .map(|&t| row(&table, t as usize, s.d_model).map(|x| x * f64::from(s.embed_scale)).collect())
            .collect();
        if let Position::Learned { offset } = s.position {
            let table = self.tensor("position_embd.weight").unwrap();
            for (p, h) in hidden.iter_mut().enumerate() {
                h.iter_mut().zip(row(&table, p + offset, s.d_model)).for_each(|(h, x)| *h += x);
            }
        }
        for i in 0..s.n_layers {
            let name = |part: &str| format!("blk.{i}.{part}");
            let input = |norm: &str, x: &Rows| if s.pre_norms { self.norm(norm, x) } else { x.clone() };
            let mut y = self.attention(i, &input(&name("attn_norm"), &hidden));
            if s.post_norms {
                y = self.norm(&name("post_attention_norm"), &y);
            }
            add(&mut hidden, &y);
            let mut y = self.feed_forward(i, &input(&name("ffn_norm"), &hidden));
            if s.post_norms {
                y = self.norm(&name("post_ffw_norm"), &y);
            }
            add(&mut hidden, &y);
        }
        let hidden = self.norm("output_norm", &hidden);
        let mut logits = self.linear(if s.tied_head { "token_embd" } else { "output" }, &hidden);
        logits.iter_mut().flatten().for_each(|x| *x *= f64::from(s.logit_scale));
        if let Some(cap) = s.logit_softcap.map(f64::from) {
            logits.iter_mut().flatten().for_each(|x| *x = cap * (*x / cap).tanh());
        }
        logits
    }

    fn tensor(&self, name: &str) -> Option<Vec<f64>> {
        Some(dequantise(self.weights.get(name)?).into_iter().map(f64::from).collect())
    }

    fn linear(&self, name: &str, x: &Rows) -> Rows {
        let w = self.tensor(&format!("{name}.weight")).unwrap();
        let bias = self.tensor(&format!("{name}.bias"));
        x.iter()
            .map(|x| {
                let mut y: Vec<f64> = w.chunks_exact(x.len()).map(|w| dot(w, x)).collect();
                if let Some(b) = &bias {
                    y.iter_mut().zip(b).for_each(|(y, b)| *y += b);
                }
                y
            })
            .collect()
    }

    fn norm(&self, name: &str, x: &Rows) -> Rows {
        let w = self.tensor(&format!("{name}.weight")).unwrap();
        let b = self.tensor(&format!("{name}.bias"));
        x.iter().map(|x| normed(self.spec.norm, x, &w, b.as_deref())).collect()
    }

    fn attention(&self, layer: usize, x: &Rows) -> Rows {
        let (s, hd) = (self.spec, self.spec.head_dim);
        let [mut q, mut k, mut v] = ["q", "k", "v"].map(|p| self.linear(&format!("blk.{layer}.attn_{p}"), x));
        for (part, rows) in [("q", &mut q), ("k", &mut k)] {
            let w = self.tensor(&format!("blk.{layer}.attn_{part}_norm.weight"));
            for (position, row) in rows.iter_mut().enumerate() {
                if s.qk_norm == Some(QkNorm::Whole) {
                    *row = normed(s.norm, row, w.as_ref().unwrap(), None);
                }
                for head in row.chunks_exact_mut(hd) {
                    if s.qk_norm == Some(QkNorm::PerHead) {
                        head.copy_from_slice(&normed(s.norm, head, w.as_ref().unwrap(), None));
                    }
                    if let Position::Rope(rope) = &s.position {
                        rotate(rope, s.window_of(layer).is_some(), position, head, x.len());
                    }
                }
            }
        }
        for head in k.iter_mut().chain(&mut v).flat_map(|row| row.chunks_exact_mut(hd)) {
            let scale = head.iter().fold(0.0, |most: f64, x| most.max(x.abs())) / 127.0;
            for x in head {
                *x = match self.kv {
                    KvType::BF16 => bf16::from_f64(*x).to_f64(),
                    KvType::F16 => f16::from_f64(*x).to_f64(),
                    KvType::Q8 if scale == 0.0 => 0.0,
                    KvType::Q8 => scale * (*x / scale).round_ties_even(),
                };
            }
        }
        let sinks = s.sinks.then(|| self.tensor(&format!("blk.{layer}.attn_sinks.weight")).unwrap());
        let mut out: Rows = vec![vec![0.0; s.q_dim()]; x.len()];
        for (p, out) in out.iter_mut().enumerate() {
            let first = s.window_of(layer).map_or(0, |w| (p + 1).saturating_sub(w));
            for (h, out) in out.chunks_exact_mut(hd).enumerate() {
                let g = h / (s.n_heads / s.n_kv_heads);
                let head = |row: &'_ Vec<f64>, h: usize| row[h * hd..(h + 1) * hd].to_vec();
                let qh = head(&q[p], h);
                let mut e: Vec<f64> =
                    (first..=p).map(|t| f64::from(s.attn_scale) * dot(&qh, &head(&k[t], g))).collect();
                if let Some(cap) = s.attn_softcap.map(f64::from) {
                    e.iter_mut().for_each(|e| *e = cap * (*e / cap).tanh());
                }
                // One more score, of nothing.
                e.extend(sinks.as_ref().map(|sinks| sinks[h]));
                let most = e.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = e.iter().map(|e| (e - most).exp()).sum();
                for (t, e) in (first..=p).zip(e) {
                    let share = (e - most).exp() / sum;
                    out.iter_mut().zip(head(&v[t], g)).for_each(|(o, v)| *o += share * v);
                }
            }
        }
        self.linear(&format!("blk.{layer}.attn_output"), &out)
    }

    fn feed_forward(&self, layer: usize, x: &Rows) -> Rows {
        match self.spec.experts_of(layer) {
            None => self.mlp(&|part| format!("blk.{layer}.ffn_{part}"), x),
            Some(experts) => x.iter().map(|x| self.experts(layer, experts, x)).collect(),
        }
    }

    fn experts(&self, layer: usize, of: &Experts, x: &Vec<f64>) -> Vec<f64> {
        let one = std::slice::from_ref(x).to_vec();
        let logits = self.linear(&format!("blk.{layer}.ffn_gate_inp"), &one).remove(0);
        let mut order: Vec<usize> = (0..of.count).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        if of.used < of.count {
            let mean = logits.iter().sum::<f64>() / of.count as f64;
            let std = (logits.iter().map(|l| (l - mean).powi(2)).sum::<f64>() / of.count as f64).sqrt();
            let lead = (logits[order[of.used - 1]] - logits[order[of.used]]) / std;
            self.closest.set(self.closest.get().min(lead));
        }
        let exp = |e: &usize| (logits[*e] - logits[order[0]]).exp();
        let chosen = &order[..of.used];
        self.chosen.borrow_mut()[layer].push(chosen.to_vec());
        let sum: f64 = match of.weights {
            RouterWeights::OfAll => order.iter().map(exp).sum(),
            RouterWeights::OfChosen => chosen.iter().map(exp).sum(),
        };
        let mut y = vec![0.0; x.len()];
        let mut plus = |w: f64, part: Vec<f64>| y.iter_mut().zip(part).for_each(|(y, p)| *y += w * p);
        for e in chosen {
            plus(exp(e) / sum, self.mlp(&|part| format!("blk.{layer}.ffn_{part}.{e}"), &one).remove(0));
        }
        if of.shared.is_some() {
            let gate = dot(&self.tensor(&format!("blk.{layer}.ffn_gate_inp_shexp.weight")).unwrap(), x);
            let shared = self.mlp(&|part| format!("blk.{layer}.ffn_{part}_shexp"), &one).remove(0);
            plus(1.0 / (1.0 + (-gate).exp()), shared);
        }
        y
    }

    fn mlp(&self, name: &dyn Fn(&str) -> String, x: &Rows) -> Rows {
        let part = |p: &str, x: &Rows| self.linear(&name(p), x);
        let mut y = part("up", x);
        let gate = if self.spec.gated() { part("gate", x) } else { y.clone() };
        for (y, g) in y.iter_mut().flatten().zip(gate.into_iter().flatten()) {
            *y = match self.spec.ffn {
                Ffn::SwiGlu => g / (1.0 + (-g).exp()) * *y,
                Ffn::ClampedSwiGlu => {
                    let g = g.min(7.0);
                    g / (1.0 + (-1.702 * g).exp()) * (y.clamp(-7.0, 7.0) + 1.0)
                }
                Ffn::GeGlu => {
                    let inner = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g.powi(3));
                    0.5 * g * (1.0 + inner.tanh()) * *y
                }
                Ffn::Relu => y.max(0.0),
            };
        }
        part("down", &y)
    }
}

fn row(table: &[f64], r: usize, width: usize) -> impl Iterator<Item = f64> {
    table[r * width..(r + 1) * width].iter().copied()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(x: &mut Rows, y: &Rows) {
    x.iter_mut().flatten().zip(y.iter().flatten()).for_each(|(x, y)| *x += y);
}

fn normed(norm: Norm, x: &[f64], w: &[f64], b: Option<&[f64]>) -> Vec<f64> {
    let n = x.len() as f64;
    let (mean, eps) = match norm {
        Norm::Rms { eps } => (0.0, eps),
        Norm::Layer { eps } => (x.iter().sum::<f64>() / n, eps),
    };
    let var = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
    let scale = (var + f64::from(eps)).sqrt().recip();
    (0..x.len()).map(|i| (x[i] - mean) * scale * w[i] + b.map_or(0.0, |b| b[i])).collect()
}

fn rotate(rope: &Rope, windowed: bool, position: usize, head: &mut [f64], context: usize) {
    let half = rope.dim / 2;
    let (base, scaling) = match rope.local_theta.filter(|_| windowed) {
        Some(theta) => (f64::from(theta), &rope.local_scaling),
        None => (f64::from(rope.theta), &rope.scaling),
    };
    let mut attention = 1.0;
    for i in 0..half {
        let f = base.powf(-(2.0 * i as f64) / rope.dim as f64);
        let f = match scaling {
            RopeScaling::None => f,
            RopeScaling::Linear { factor } => f / f64::from(*factor),
            RopeScaling::Factors(d) => f / f64::from(d[i]),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let turns = *original_context as f64 * f / (2.0 * std::f64::consts::PI);
                let (low, high) = (f64::from(*low_freq_factor), f64::from(*high_freq_factor));
                // 1: keep the frequency; 0: stretch it fully.
                let keep = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                f * keep + f / f64::from(*factor) * (1.0 - keep)
            }
            RopeScaling::Yarn {
                factor,
                original_context,
                beta_fast,
                beta_slow,
                truncate,
                attention_factor,
            } => {
                attention = f64::from(*attention_factor);
                // Solved for the pair whose wave turns `n` times in the original context: n = c / (2 pi base^(2i/dim)).
                let at = |n: f32| {
                    let turn = *original_context as f64 / (2.0 * std::f64::consts::PI * f64::from(n));
                    turn.log(base) * rope.dim as f64 / 2.0
                };
                let (first, last) = match truncate {
                    true => (at(*beta_fast).floor(), at(*beta_slow).ceil()),
                    false => (at(*beta_fast), at(*beta_slow)),
                };
                let (first, last) = (first.max(0.0), last.min(rope.dim as f64 - 1.0));
                let width = if first == last { 0.001 } else { last - first };
                let slow = ((i as f64 - first) / width).clamp(0.0, 1.0);
                slow * (f / f64::from(*factor)) + (1.0 - slow) * f
            }
            RopeScaling::LongRope { short, long, original_context, attention_factor } => {
                attention = f64::from(*attention_factor);
                f / f64::from(if context > *original_context { long[i] } else { short[i] })
            }
            RopeScaling::Dynamic { factor, original_context } => {
                let (s, dim) = (f64::from(*factor), rope.dim as f64);
                let beyond = context.max(*original_context) as f64 / *original_context as f64;
                let base = base * (s * beyond - (s - 1.0)).powf(dim / (dim - 2.0));
                base.powf(-(2.0 * i as f64) / dim)
            }
        };
        let (a, b) = match rope.pairing {
            RopePairing::Half => (i, i + half),
            RopePairing::Interleaved => (2 * i, 2 * i + 1),
        };
        let (sin, cos) = (position as f64 * f).sin_cos();
        let (sin, cos) = (sin * attention, cos * attention);
        (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[a] * sin + head[b] * cos);
    }
}
