//! Bytes that a model's weights will take on the host, by the unit that brings them.

use std::collections::HashSet;

use super::{ALIGN, Units, linear_names, router_names};
use crate::model::{ModelSpec, Weights};
use crate::simd::Isa;
use crate::simd::linear::{Linear, Packed};
use crate::tensor::Tensor;
use crate::{Error, Result};

/// Bytes of a model's weights, packed or mapped from the file. All units are counted in one pass over the tensors: a mixture has
/// thousands of them in each block.
pub(in crate::engine) struct WeightBytes {
    /// What is there whichever units are prepared: norms, biases and routers in f32, tables that are looked up.
    pub always: u64,
    /// What each block brings.
    pub blocks: Vec<u64>,
    /// What the head brings.
    pub head: u64,
    /// With every unit.
    pub all: u64,
}

impl WeightBytes {
    /// Those of `weights` for the kernels of `isa`.
    ///
    /// # Errors
    /// If the size of packed weights overflows.
    pub fn of(spec: &ModelSpec, weights: &Weights, isa: Isa) -> Result<WeightBytes> {
        let none = Units { layers: vec![false; spec.n_layers], head: false, node: None };
        // Multiplied by the kernels: such a matrix comes with its unit.
        let of_units = |units: Units| -> Result<(u64, Vec<String>)> {
            let names: Vec<String> = linear_names(spec, &units).collect();
            let tensors = names.iter().filter_map(|name| weights.get(name));
            Ok((sum(tensors.map(|t| as_multiplied(t, isa)))?, names))
        };
        let mut multiplied = HashSet::new();
        let mut blocks = Vec::with_capacity(spec.n_layers);
        for layer in 0..spec.n_layers {
            let mut layers = none.layers.clone();
            layers[layer] = true;
            let (bytes, names) = of_units(Units { layers, ..none.clone() })?;
            blocks.push(bytes);
            multiplied.extend(names);
        }
        let (mut head, names) = of_units(Units { head: true, ..none })?;
        multiplied.extend(names);
        let routers: HashSet<String> = router_names(spec).map(|(_, name)| name).collect();
        let always = |(name, t): (&str, &Tensor)| match t.shape.len() {
            1 => 4 * t.shape[0] as u64,
            _ if routers.contains(name) => 4 * (t.rows() * t.cols()) as u64,
            // The embedding's rows are looked up in the file, also where the head multiplies by them.
            _ if multiplied.contains(name) && name != TABLE => 0,
            _ => t.data.len() as u64,
        };
        let always = sum(weights.iter().map(always))?;
        let mut all = sum([always, head].into_iter().chain(blocks.iter().copied()))?;
        // The pages of a tied table are given back once it is packed, and the head's bytes are these pages where it is not.
        if let Some(table) = weights.get(TABLE).filter(|_| spec.tied_head) {
            all -= table.data.len() as u64;
            head = head.saturating_sub(table.data.len() as u64);
        }
        Ok(WeightBytes { always, blocks, head, all })
    }
}

const TABLE: &str = "token_embd.weight";

fn sum(mut bytes: impl Iterator<Item = u64>) -> Result<u64> {
    bytes
        .try_fold(0u64, u64::checked_add)
        .ok_or_else(|| Error::Capacity("the packed weights' size overflows".into()))
}

/// Bytes of a matrix as the kernels read it.
fn as_multiplied(t: &Tensor, isa: Isa) -> u64 {
    if !Linear::wants_packing(t.dtype, isa) {
        return t.data.len() as u64;
    }
    let size = Packed::size(t.dtype, t.rows(), t.cols()).expect("quantised");
    size.next_multiple_of(ALIGN) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::prepare::Arena;
    use crate::model::synth;

    /// What a unit brings is what preparing it alone packs, and where nothing is packed its own tensors; all together is what
    /// preparing the model takes.
    #[test]
    fn units_bring_what_their_arenas_hold() {
        for name in [
            "tiny-llama,dtype=q4_0",
            "tiny-granite-moe,dtype=q4_0",
            "tiny-qwen3-moe,dtype=q6_k",
            "tiny-gpt-oss,dtype=q8_0,experts=mxfp4",
        ] {
            let m = synth::outline(name).unwrap();
            let (spec, weights) = (&m.spec, &m.weights);
            let none = Units { layers: vec![false; spec.n_layers], head: false, node: None };
            for isa in Isa::supported() {
                let takes = |units: &Units| match isa {
                    Isa::Reference => {
                        linear_names(spec, units).map(|n| weights.get(&n).unwrap().data.len() as u64).sum()
                    }
                    _ => Arena::plan(spec, weights, isa, units).unwrap().total as u64,
                };
                let of = WeightBytes::of(spec, weights, isa).unwrap();
                for layer in 0..spec.n_layers {
                    let mut only = none.clone();
                    only.layers[layer] = true;
                    assert_eq!(of.blocks[layer], takes(&only), "{name}, {isa}: block {layer}");
                }
                let tied = if spec.tied_head { weights.get(TABLE).unwrap().data.len() as u64 } else { 0 };
                let all = of.always - tied + takes(&Units::all(spec));
                assert_eq!(of.all, all, "{name}, {isa}");
                let head = takes(&Units { head: true, ..none.clone() });
                assert_eq!(of.head, head.saturating_sub(tied), "{name}, {isa}");
            }
        }
    }
}
