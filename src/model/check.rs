//! Checks that a model is consistent: first its sizes, then every tensor against the sizes.
//!
//! After [`validate`] the rest of the engine trusts a model: no later code meets a zero head count, a table
//! that is too short or a bias of the wrong length.

use std::collections::BTreeMap;

use super::block::{Bias, Block, tensor_name};
use super::spec::{Norm, Position};
use super::{ModelSpec, Weights};
use crate::{Error, Result};

/// A tensor that a model of some spec has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedTensor {
    /// Its shape, outermost first.
    pub shape: Vec<usize>,
    /// Whether the model requires it.
    pub required: bool,
}

/// Most layers of a model.
pub(in crate::model) const MAX_LAYERS: usize = 4096;
/// Longest context.
pub(super) const MAX_CONTEXT: usize = 1 << 28;

impl ModelSpec {
    /// Checks the sizes on their own: nothing zero, nothing absurd, heads that divide.
    ///
    /// # Errors
    /// The first impossible size.
    pub fn check(&self) -> Result<()> {
        // Far above every released model, and small enough that products of two fit any machine's usize.
        let limits = [
            ("layer count", self.n_layers, MAX_LAYERS),
            ("width", self.d_model, 1 << 18),
            ("head count", self.n_heads, 4096),
            ("KV head count", self.n_kv_heads, 4096),
            ("head width", self.head_dim, 4096),
            ("feed-forward width", self.d_ff, 1 << 20),
            ("vocabulary", self.vocab, 1 << 24),
            ("context length", self.max_context, MAX_CONTEXT),
        ];
        for (what, n, most) in limits {
            if n == 0 || n > most {
                return Err(Error::format(what, format!("{n} is outside 1..={most}; is the file damaged?")));
            }
        }
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            return Err(Error::format(
                "head count",
                format!("{} query heads cannot share {} KV heads evenly", self.n_heads, self.n_kv_heads),
            ));
        }
        if let Some(experts) = &self.experts {
            experts.check(self.n_layers)?;
        }
        let eps = self.norm.eps();
        positive("norm epsilon", eps)?;
        positive("embedding scale", self.embed_scale)?;
        positive("attention scale", self.attn_scale)?;
        positive("logit scale", self.logit_scale)?;
        if let Some(cap) = self.logit_softcap {
            positive("logit soft-cap", cap)?;
        }
        if let Some(cap) = self.attn_softcap {
            positive("attention soft-cap", cap)?;
        }
        if let Some(w) = self.window.as_ref().filter(|w| w.size == 0 || w.layers.len() != self.n_layers) {
            return Err(Error::format(
                "sliding window",
                format!("{} tokens, listed for {} of {} layers", w.size, w.layers.len(), self.n_layers),
            ));
        }
        match &self.position {
            Position::Learned { offset } if *offset > 1 << 16 => {
                Err(Error::format("position offset", format!("{offset}")))
            }
            Position::Learned { .. } => Ok(()),
            Position::Rope(rope) => {
                if rope.dim == 0 || rope.dim % 2 != 0 || rope.dim > self.head_dim {
                    return Err(Error::format(
                        "RoPE dimension",
                        format!(
                            "{} of a head of {}; wanted an even number of its elements",
                            rope.dim, self.head_dim
                        ),
                    ));
                }
                positive("RoPE base", rope.theta)?;
                if let Some(t) = rope.local_theta {
                    positive("RoPE base of windowed layers", t)?;
                }
                rope.scaling.check(rope.dim)?;
                rope.local_scaling.check(rope.dim)?;
                match rope.query_scaling {
                    None => Ok(()),
                    Some(q) if q.original_context == 0 => {
                        Err(Error::format("original_max_position_embeddings", "0, wanted a positive number"))
                    }
                    Some(q) if q.beta.is_finite() => Ok(()),
                    Some(q) => {
                        Err(Error::format("llama_4_scaling_beta", format!("{}, wanted a number", q.beta)))
                    }
                }
            }
        }
    }
}

fn positive(what: &str, x: f32) -> Result<()> {
    if x.is_finite() && x > 0.0 {
        Ok(())
    } else {
        Err(Error::format(what, format!("{x}, wanted a positive number; is the file damaged?")))
    }
}

/// Every tensor that a model of this spec may have, by canonical name.
pub fn wanted_tensors(spec: &ModelSpec) -> BTreeMap<String, WantedTensor> {
    let mut all = BTreeMap::new();
    let mut add = |name: String, shape: &[usize], required: bool| {
        all.insert(name, WantedTensor { shape: shape.to_vec(), required });
    };
    let d = spec.d_model;
    add("token_embd.weight".into(), &[spec.vocab, d], true);
    if let Position::Learned { offset } = spec.position {
        add("position_embd.weight".into(), &[spec.max_context + offset, d], true);
    }
    if !spec.tied_head {
        add("output.weight".into(), &[spec.vocab, d], true);
    }
    add("output_norm.weight".into(), &[d], true);
    if matches!(spec.norm, Norm::Layer { .. }) {
        add("output_norm.bias".into(), &[d], true);
    }
    for i in 0..spec.n_layers {
        let block = Block::of(spec, i);
        for n in block.norms() {
            add(tensor_name(i, n.name, "weight"), &[n.width], true);
            if n.bias {
                add(tensor_name(i, n.name, "bias"), &[n.width], true);
            }
        }
        for m in block.matrices() {
            add(m.tensor(i, "weight"), &[m.rows, m.cols], true);
            if m.bias != Bias::Never {
                add(m.tensor(i, "bias"), &[m.rows], m.bias == Bias::Required);
            }
        }
    }
    all
}

/// Checks the sizes, then that every required tensor is present in the right shape, and that there is no tensor that
/// the engine would have to ignore.
///
/// # Errors
/// The first problem, in one sentence.
pub fn validate(spec: &ModelSpec, weights: &Weights) -> Result<()> {
    spec.check()?;
    let wanted = wanted_tensors(spec);
    for (name, w) in &wanted {
        if w.required {
            weights.require(name, &w.shape)?;
        } else {
            weights.optional(name, &w.shape)?;
        }
    }
    match weights.iter().find(|(name, _)| !wanted.contains_key(*name)) {
        None => Ok(()),
        Some((name, t)) => Err(Error::Unsupported(format!(
            "{name}: a {} tensor of shape {:?} that a {} model of {} layers has no place for",
            t.dtype, t.shape, spec.family, spec.n_layers
        ))),
    }
}
