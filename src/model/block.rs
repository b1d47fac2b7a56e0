//! The tensors of a block, enumerated once; checks, sizes and all layouts of weights use this list.

use super::ModelSpec;
use super::spec::{Experts, Norm};

/// The tensors of a block; `None` for those that the model does not have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// Before attention.
    pub attn_norm: Option<NormSpec>,
    /// Queries.
    pub q: MatrixSpec,
    /// Keys.
    pub k: MatrixSpec,
    /// Values.
    pub v: MatrixSpec,
    /// Norm of the queries.
    pub q_norm: Option<NormSpec>,
    /// Norm of the keys.
    pub k_norm: Option<NormSpec>,
    /// A logit for each head.
    pub sinks: Option<NormSpec>,
    /// Out-projection.
    pub o: MatrixSpec,
    /// Norm of attention's output before it is added.
    pub post_attn: Option<NormSpec>,
    /// Before the feed-forward.
    pub ffn_norm: Option<NormSpec>,
    /// The feed-forward.
    pub ffn: FeedForward,
    /// Norm of its output before it is added.
    pub post_ffn: Option<NormSpec>,
}

/// The matrices of a feed-forward.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FeedForward {
    /// One for all rows.
    Dense(Mlp),
    /// A router's choice of several.
    Experts(Mixture),
}

/// A dense feed-forward, or an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mlp {
    /// The gate.
    pub gate: Option<MatrixSpec>,
    /// The first matrix.
    pub up: MatrixSpec,
    /// The second matrix.
    pub down: MatrixSpec,
}

/// The experts of a block. Each has matrices of its own, whether the file stores them one by one or stacked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mixture {
    /// Gives a logit for each expert.
    pub router: MatrixSpec,
    /// The experts.
    pub experts: Vec<Mlp>,
    /// The expert of all rows, and the weights of its gate.
    pub shared: Option<(Mlp, NormSpec)>,
}

/// Whether a matrix has a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bias {
    /// It has none.
    Never,
    /// It may have one.
    Optional,
    /// The model requires it.
    Required,
}

/// A matrix with a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatrixSpec {
    /// `attn_q`: the tensors are `blk.{i}.attn_q.weight` and `.bias`.
    pub name: &'static str,
    /// Whose matrix it is: that of expert 3 is `blk.{i}.ffn_up.3.weight`.
    pub expert: Option<usize>,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// Whether it has a bias.
    pub bias: Bias,
}

impl MatrixSpec {
    /// The canonical name of its tensor in block `layer`.
    pub fn tensor(&self, layer: usize, kind: &str) -> String {
        match self.expert {
            None => tensor_name(layer, self.name, kind),
            Some(e) => expert_tensor_name(layer, self.name, e, kind),
        }
    }
}

/// The weights of a norm, of a gate with one output, or the sinks of all heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NormSpec {
    /// `attn_norm`: the tensors are `blk.{i}.attn_norm.weight` and `.bias`.
    pub name: &'static str,
    /// Elements.
    pub width: usize,
    /// Whether it has a bias (LayerNorm).
    pub bias: bool,
}

/// The canonical name of a tensor of block `layer`.
pub fn tensor_name(layer: usize, name: &str, kind: &str) -> String {
    format!("blk.{layer}.{name}.{kind}")
}

/// The canonical name of a tensor of an expert of block `layer`.
pub fn expert_tensor_name(layer: usize, name: &str, expert: usize, kind: &str) -> String {
    format!("blk.{layer}.{name}.{expert}.{kind}")
}

impl Block {
    /// The tensors of block `layer` of a model.
    pub fn of(spec: &ModelSpec, layer: usize) -> Block {
        let (d, q, kv) = (spec.d_model, spec.q_dim(), spec.kv_dim());
        let layer_norm = matches!(spec.norm, Norm::Layer { .. });
        let matrix = |name, rows, cols, required| {
            let bias = if required { Bias::Required } else { Bias::Optional };
            MatrixSpec { name, expert: None, rows, cols, bias }
        };
        let norm = |name, width| NormSpec { name, width, bias: layer_norm };
        let [q_norm, k_norm] = match spec.qk_norm_widths() {
            Some([q, k]) => [Some(norm("attn_q_norm", q)), Some(norm("attn_k_norm", k))],
            None => [None; 2],
        };
        let pre = |name| spec.pre_norms.then(|| norm(name, d));
        let post = |name| spec.post_norms.then(|| norm(name, d));
        let dense = || Mlp {
            gate: spec.gated().then(|| matrix("ffn_gate", spec.d_ff, d, layer_norm)),
            up: matrix("ffn_up", spec.d_ff, d, layer_norm),
            down: matrix("ffn_down", d, spec.d_ff, layer_norm),
        };
        Block {
            attn_norm: pre("attn_norm"),
            q: matrix("attn_q", q, d, spec.qkv_bias),
            k: matrix("attn_k", kv, d, spec.qkv_bias),
            v: matrix("attn_v", kv, d, spec.qkv_bias),
            q_norm,
            k_norm,
            sinks: spec.sinks.then_some(NormSpec { name: "attn_sinks", width: spec.n_heads, bias: false }),
            o: matrix("attn_output", d, q, spec.o_bias),
            post_attn: post("post_attention_norm"),
            ffn_norm: pre("ffn_norm"),
            ffn: match spec.experts_of(layer) {
                None => FeedForward::Dense(dense()),
                Some(experts) => FeedForward::Experts(Mixture::of(spec, experts)),
            },
            post_ffn: post("post_ffw_norm"),
        }
    }

    /// Its matrices, in the order of their use.
    pub fn matrices(&self) -> Vec<&MatrixSpec> {
        let mut all = vec![&self.q, &self.k, &self.v, &self.o];
        match &self.ffn {
            FeedForward::Dense(mlp) => all.extend(mlp.matrices()),
            FeedForward::Experts(mixture) => {
                all.push(&mixture.router);
                all.extend(mixture.experts.iter().flat_map(Mlp::matrices));
                all.extend(mixture.shared.iter().flat_map(|(mlp, _)| mlp.matrices()));
            }
        }
        all
    }

    /// Its norms and other vectors, in the order of their use.
    pub fn norms(&self) -> impl Iterator<Item = &NormSpec> {
        let Block { attn_norm, q_norm, k_norm, sinks, post_attn, ffn_norm, ffn, post_ffn, .. } = self;
        let gate = match ffn {
            FeedForward::Experts(mixture) => mixture.shared.as_ref().map(|(_, gate)| gate),
            FeedForward::Dense(_) => None,
        };
        [
            attn_norm.as_ref(),
            q_norm.as_ref(),
            k_norm.as_ref(),
            sinks.as_ref(),
            post_attn.as_ref(),
            ffn_norm.as_ref(),
            gate,
            post_ffn.as_ref(),
        ]
        .into_iter()
        .flatten()
    }
}

impl Mlp {
    /// Its matrices, in the order of their use.
    pub fn matrices(&self) -> impl Iterator<Item = &MatrixSpec> {
        self.gate.iter().chain([&self.up, &self.down])
    }
}

impl Mixture {
    fn of(spec: &ModelSpec, experts: &Experts) -> Mixture {
        let d = spec.d_model;
        let bias = if experts.biases { Bias::Required } else { Bias::Never };
        let matrix = |name, expert, rows, cols| MatrixSpec { name, expert, rows, cols, bias };
        let mlp = |[gate, up, down]: [&'static str; 3], expert, ff| Mlp {
            gate: spec.gated().then(|| matrix(gate, expert, ff, d)),
            up: matrix(up, expert, ff, d),
            down: matrix(down, expert, d, ff),
        };
        let shared = |ff| {
            let gate = NormSpec { name: "ffn_gate_inp_shexp", width: d, bias: false };
            (mlp(["ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"], None, ff), gate)
        };
        Mixture {
            router: matrix("ffn_gate_inp", None, experts.count, d),
            experts: (0..experts.count)
                .map(|e| mlp(["ffn_gate", "ffn_up", "ffn_down"], Some(e), experts.d_ff))
                .collect(),
            shared: experts.shared.map(shared),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::load;

    /// Every tensor of a block of every family, and no other: a model that was checked has exactly these.
    #[test]
    fn every_tensor_of_a_block_is_listed_once() {
        for name in crate::model::synth::names().filter(|n| n.starts_with("tiny-")) {
            let m = load(&format!("synth:{name},seed=1")).unwrap();
            let block = Block::of(&m.spec, 1);
            let matrices = block.matrices().into_iter().map(|x| {
                let required = x.bias == Bias::Required;
                let optional = m.weights.get(&x.tensor(1, "bias")).is_some();
                (x.tensor(1, ""), required || optional)
            });
            let norms = block.norms().map(|n| (tensor_name(1, n.name, ""), n.bias));
            let mut listed: Vec<String> = matrices
                .chain(norms)
                .flat_map(|(stem, bias)| {
                    let kinds = if bias { vec!["weight", "bias"] } else { vec!["weight"] };
                    kinds.into_iter().map(move |kind| format!("{stem}{kind}"))
                })
                .collect();
            listed.sort();
            let stored = m.weights.iter().map(|(name, _)| name.to_string());
            let mut stored: Vec<String> = stored.filter(|n| n.starts_with("blk.1.")).collect();
            stored.sort();
            assert_eq!(listed, stored, "{name}");
        }
    }
}
