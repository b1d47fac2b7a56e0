//! Named tensors. Names are GGUF's (`blk.3.attn_q.weight`), whatever the file format.

use std::collections::BTreeMap;

use crate::reference::dequant::dequantise;
use crate::tensor::Tensor;
use crate::{Error, Result};

/// The tensors of a model by canonical (GGUF) name:
/// `token_embd.weight` `[V,d]`, `position_embd.weight` `[P,d]`, `output_norm.{weight,bias}`, `output.weight` `[V,d]`,
/// and per layer `blk.{i}.`: `attn_norm.{weight,bias}`, `attn_{q,k,v}.{weight,bias}`, `attn_{q,k}_norm.weight`,
/// `attn_output.{weight,bias}`, `post_attention_norm.weight`, `ffn_norm.{weight,bias}`,
/// `ffn_{gate,up,down}.{weight,bias}`, `post_ffw_norm.weight`; of experts `ffn_gate_inp.weight` `[E,d]`, of each expert e
/// `ffn_{gate,up,down}.{e}.weight` (GGUF: in stacks), `ffn_{gate,up,down}_shexp.weight`, `ffn_gate_inp_shexp.weight` `[d]`.
#[derive(Debug, Clone, Default)]
pub struct Weights {
    tensors: BTreeMap<String, Tensor>,
}

impl Weights {
    /// Adds (or replaces) a tensor.
    pub fn insert(&mut self, name: impl Into<String>, tensor: Tensor) {
        self.tensors.insert(name.into(), tensor);
    }

    /// The tensor called `name`, if present.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    /// The tensor called `name` with its name here, if present.
    pub(super) fn entry(&self, name: &str) -> Option<(&str, &Tensor)> {
        self.tensors.get_key_value(name).map(|(k, t)| (k.as_str(), t))
    }

    /// The tensor called `name` with exactly this shape.
    pub fn require(&self, name: &str, shape: &[usize]) -> Result<&Tensor> {
        let t = self
            .get(name)
            .ok_or_else(|| Error::format(name, "missing from the model; is a shard missing?"))?;
        if t.shape != shape {
            return Err(Error::format(
                name,
                format!("shape {:?}, the model's sizes imply {shape:?}; is the file damaged?", t.shape),
            ));
        }
        Ok(t)
    }

    /// Like [`Weights::require`], but a missing tensor is `None`.
    pub fn optional(&self, name: &str, shape: &[usize]) -> Result<Option<&Tensor>> {
        if self.get(name).is_none() { Ok(None) } else { self.require(name, shape).map(Some) }
    }

    /// The vector of `n` floats called `name`, of any float dtype, as f32; a missing one is `None`.
    pub fn floats(&self, name: &str, n: usize) -> Result<Option<Vec<f32>>> {
        let Some(t) = self.get(name) else { return Ok(None) };
        if t.shape.iter().product::<usize>() != n || t.dtype.is_quantised() {
            let (dtype, shape) = (t.dtype, &t.shape);
            return Err(Error::format(name, format!("{dtype} of shape {shape:?}, wanted {n} floats")));
        }
        Ok(Some(dequantise(t)))
    }

    /// All tensors in name order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.tensors.iter().map(|(k, v)| (k.as_str(), v))
    }

    /// Total bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.tensors.values().map(|t| t.data.len() as u64).sum()
    }
}

impl FromIterator<(String, Tensor)> for Weights {
    fn from_iter<I: IntoIterator<Item = (String, Tensor)>>(all: I) -> Weights {
        Weights { tensors: all.into_iter().collect() }
    }
}

impl IntoIterator for Weights {
    type Item = (String, Tensor);
    type IntoIter = std::collections::btree_map::IntoIter<String, Tensor>;

    /// All tensors in name order.
    fn into_iter(self) -> Self::IntoIter {
        self.tensors.into_iter()
    }
}
