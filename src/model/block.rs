//! The tensors of a block, enumerated once; checks, sizes and all layouts of weights use this list.
//!
//! [`Block`] is generic in the values that represent a matrix and a norm: names and sizes at first ([`Block::of`]),
//! then the values that they are mapped to, such as expected shapes, a device's layout, or prepared kernels.

use super::ModelSpec;
use super::spec::Norm;

/// One value for every tensor of a block; `None` for tensors that the model does not have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block<M, N> {
    /// Before attention.
    pub attn_norm: Option<N>,
    /// Queries.
    pub q: M,
    /// Keys.
    pub k: M,
    /// Values.
    pub v: M,
    /// Norm of the queries.
    pub q_norm: Option<N>,
    /// Norm of the keys.
    pub k_norm: Option<N>,
    /// Out-projection.
    pub o: M,
    /// Norm of attention's output before it is added.
    pub post_attn: Option<N>,
    /// Before the feed-forward.
    pub ffn_norm: Option<N>,
    /// Gate of the feed-forward.
    pub gate: Option<M>,
    /// Its first matrix.
    pub up: M,
    /// Its second matrix.
    pub down: M,
    /// Norm of its output before it is added.
    pub post_ffn: Option<N>,
}

/// A matrix with a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatrixSpec {
    /// `attn_q`: the tensors are `blk.{i}.attn_q.weight` and `.bias`.
    pub name: &'static str,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// Whether the model requires the bias. Any matrix may have one.
    pub bias_required: bool,
}

/// The weights of a norm.
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

impl Block<MatrixSpec, NormSpec> {
    /// The tensors of every block of a model.
    pub fn of(spec: &ModelSpec) -> Block<MatrixSpec, NormSpec> {
        let (d, ff, q, kv) = (spec.d_model, spec.d_ff, spec.q_dim(), spec.kv_dim());
        let layer_norm = matches!(spec.norm, Norm::Layer { .. });
        let matrix = |name, rows, cols, bias_required| MatrixSpec { name, rows, cols, bias_required };
        let norm = |name, width| NormSpec { name, width, bias: layer_norm };
        let [q_norm, k_norm] = match spec.qk_norm_widths() {
            Some([q, k]) => [Some(norm("attn_q_norm", q)), Some(norm("attn_k_norm", k))],
            None => [None; 2],
        };
        let pre = |name| spec.pre_norms.then(|| norm(name, d));
        let post = |name| spec.post_norms.then(|| norm(name, d));
        Block {
            attn_norm: pre("attn_norm"),
            q: matrix("attn_q", q, d, spec.qkv_bias),
            k: matrix("attn_k", kv, d, spec.qkv_bias),
            v: matrix("attn_v", kv, d, spec.qkv_bias),
            q_norm,
            k_norm,
            o: matrix("attn_output", d, q, layer_norm),
            post_attn: post("post_attention_norm"),
            ffn_norm: pre("ffn_norm"),
            gate: spec.gated().then(|| matrix("ffn_gate", ff, d, layer_norm)),
            up: matrix("ffn_up", ff, d, layer_norm),
            down: matrix("ffn_down", d, ff, layer_norm),
            post_ffn: post("post_ffw_norm"),
        }
    }
}

impl<M, N> Block<M, N> {
    /// Its matrices, in the order of their use.
    pub fn matrices(&self) -> impl Iterator<Item = &M> {
        let Block { q, k, v, o, gate, up, down, .. } = self;
        [Some(q), Some(k), Some(v), Some(o), gate.as_ref(), Some(up), Some(down)].into_iter().flatten()
    }

    /// Its norms, in the order of their use.
    pub fn norms(&self) -> impl Iterator<Item = &N> {
        let Block { attn_norm, q_norm, k_norm, post_attn, ffn_norm, post_ffn, .. } = self;
        [
            attn_norm.as_ref(),
            q_norm.as_ref(),
            k_norm.as_ref(),
            post_attn.as_ref(),
            ffn_norm.as_ref(),
            post_ffn.as_ref(),
        ]
        .into_iter()
        .flatten()
    }

    /// Maps every matrix and norm to another value.
    ///
    /// # Errors
    /// The first error of `matrix` or `norm`.
    pub fn try_map<A, B, E>(
        &self,
        mut matrix: impl FnMut(&M) -> Result<A, E>,
        mut norm: impl FnMut(&N) -> Result<B, E>,
    ) -> Result<Block<A, B>, E> {
        Ok(Block {
            attn_norm: self.attn_norm.as_ref().map(&mut norm).transpose()?,
            q: matrix(&self.q)?,
            k: matrix(&self.k)?,
            v: matrix(&self.v)?,
            q_norm: self.q_norm.as_ref().map(&mut norm).transpose()?,
            k_norm: self.k_norm.as_ref().map(&mut norm).transpose()?,
            o: matrix(&self.o)?,
            post_attn: self.post_attn.as_ref().map(&mut norm).transpose()?,
            ffn_norm: self.ffn_norm.as_ref().map(&mut norm).transpose()?,
            gate: self.gate.as_ref().map(&mut matrix).transpose()?,
            up: matrix(&self.up)?,
            down: matrix(&self.down)?,
            post_ffn: self.post_ffn.as_ref().map(&mut norm).transpose()?,
        })
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
            let block = Block::of(&m.spec);
            let matrices = block.matrices().map(|x| (x.name, x.bias_required));
            let names = matrices.chain(block.norms().map(|n| (n.name, n.bias)));
            let mut listed: Vec<String> = names
                .flat_map(|(name, bias)| {
                    let optional = m.weights.get(&tensor_name(1, name, "bias")).is_some();
                    let kinds = if bias || optional { vec!["weight", "bias"] } else { vec!["weight"] };
                    kinds.into_iter().map(move |kind| tensor_name(1, name, kind))
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
