//! Splits stacks of experts into the matrices of each expert: `blk.3.ffn_up_exps` `[E, rows, cols]` into `blk.3.ffn_up.0`,
//! `blk.3.ffn_up.1`..., and those of their biases, `[E, rows]`.
//!
//! GGUF files have stacks of gates, of first and of second matrices, or of gates and first matrices together; some families
//! have stacks in safetensors, too. The parts are ranges of whole rows, so they are views of the same bytes.

use super::block::expert_tensor_name;
use super::{ModelSpec, Weights};
use crate::tensor::Tensor;
use crate::{Error, Result};

/// The parts of an expert in each stack, by the stack's name: a part, and whether it reads the residual stream's width (gate,
/// up) or writes it (down).
pub(super) const STACKS: [(&str, &[&str]); 4] = [
    ("ffn_gate_exps", &["ffn_gate"]),
    ("ffn_up_exps", &["ffn_up"]),
    ("ffn_gate_up_exps", &["ffn_gate", "ffn_up"]),
    ("ffn_down_exps", &["ffn_down"]),
];

/// The gate of the shared expert: a vector, which safetensors hold as a matrix of one row.
pub(super) const SHARED_GATE: &str = "ffn_gate_inp_shexp";

/// `weights` with the experts' own matrices in place of stacks. Other tensors stay, for the check of all tensors to refuse.
///
/// # Errors
/// A stack has another shape than the sizes imply, or an expert's matrix is there by itself, too.
pub(super) fn split_stacks(spec: &ModelSpec, weights: Weights) -> Result<Weights> {
    if spec.experts.is_none() {
        return Ok(weights);
    }
    let mut out = Weights::default();
    for (name, t) in weights.iter() {
        let Some((layer, stem, kind)) = in_block(name) else {
            out.insert(name, t.clone());
            continue;
        };
        let experts = spec.experts_of(layer);
        let of_biases = kind == "bias" && experts.is_some_and(|e| e.biases);
        let stack = STACKS.iter().find(|(stack, _)| *stack == stem && (kind == "weight" || of_biases));
        let (Some((stack, parts)), Some(experts)) = (stack, experts) else {
            let row = stem == SHARED_GATE && t.shape[..] == [1, spec.d_model];
            let shape = if row { vec![spec.d_model] } else { t.shape.clone() };
            out.insert(name, Tensor { shape, ..t.clone() });
            continue;
        };
        let (d, ff) = (spec.d_model, experts.d_ff);
        let (rows, cols) = if *stack == "ffn_down_exps" { (d, ff) } else { (ff, d) };
        let wanted = [experts.count, parts.len() * rows, cols];
        let wanted = if of_biases { &wanted[..2] } else { &wanted[..] };
        if of_biases && t.dtype.is_quantised() {
            return Err(Error::format(name, format!("biases in {}, wanted floats", t.dtype)));
        }
        if t.shape != wanted {
            return Err(Error::format(
                name,
                format!(
                    "shape {:?}, the model's sizes imply {wanted:?} ({} experts); is the file damaged?",
                    t.shape, experts.count
                ),
            ));
        }
        let shape = if of_biases { vec![rows] } else { vec![rows, cols] };
        let bytes = t.data.len() / (experts.count * parts.len());
        for expert in 0..experts.count {
            for (i, part) in parts.iter().enumerate() {
                let of = expert_tensor_name(layer, part, expert, kind);
                if weights.get(&of).is_some() {
                    return Err(Error::format(name, format!("holds {of}, which is there by itself, too")));
                }
                let at = (expert * parts.len() + i) * bytes;
                let data = t.data.slice(at, bytes).expect("a range of its rows");
                out.insert(of, Tensor::new(t.dtype, shape.clone(), data)?);
            }
        }
    }
    Ok(out)
}

/// Layer, name and kind of `blk.{layer}.{name}.{kind}`.
pub(super) fn in_block(name: &str) -> Option<(usize, &str, &str)> {
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let (stem, kind) = rest.rsplit_once('.')?;
    let number = layer.parse().ok().filter(|n: &usize| n.to_string() == layer)?;
    Some((number, stem, kind))
}

/// Name and expert of `ffn_up.3`.
pub(super) fn of_expert(stem: &str) -> Option<(&str, usize)> {
    let (name, expert) = stem.rsplit_once('.')?;
    Some((name, expert.parse().ok().filter(|n: &usize| n.to_string() == expert)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::load;
    use crate::tensor::Bytes;

    fn stacked(dtype: &str, parts: &[&str], stack: &str) -> (ModelSpec, Weights, Weights) {
        let m = load(&format!("synth:tiny-qwen3-moe,dtype={dtype},layers=1")).unwrap();
        let count = m.spec.experts.as_ref().unwrap().count;
        let names: Vec<String> = (0..count)
            .flat_map(|e| parts.iter().map(move |p| expert_tensor_name(0, p, e, "weight")))
            .collect();
        let of: Vec<&Tensor> = names.iter().map(|n| m.weights.get(n).unwrap()).collect();
        let bytes: Vec<u8> = of.iter().flat_map(|t| t.data.to_vec()).collect();
        let shape = vec![count, parts.len() * of[0].shape[0], of[0].shape[1]];
        let stack_of = Tensor::new(of[0].dtype, shape, Bytes::copy_of(&bytes)).unwrap();
        let mut weights = Weights::default();
        for (n, t) in m.weights.iter().filter(|(n, _)| !names.iter().any(|name| name == n)) {
            weights.insert(n, t.clone());
        }
        weights.insert(format!("blk.0.{stack}.weight"), stack_of);
        (m.spec, m.weights, weights)
    }

    #[test]
    fn parts_of_stacks_are_views_of_whole_rows() {
        for dtype in ["f32", "bf16", "q8_0", "q4_k"] {
            for (stack, parts) in STACKS {
                let (spec, want, weights) = stacked(dtype, parts, stack);
                let whole = weights.get(&format!("blk.0.{stack}.weight")).unwrap().data.as_ptr_range();
                let got = split_stacks(&spec, weights).unwrap();
                let names = |w: &Weights| w.iter().map(|(n, _)| n.to_owned()).collect::<Vec<_>>();
                assert_eq!(names(&got), names(&want));
                for (name, t) in want.iter() {
                    let part = got.get(name).unwrap();
                    assert_eq!((&part.shape, &part.data[..]), (&t.shape, &t.data[..]), "{stack}: {name}");
                }
                let last = got.get(&format!("blk.0.{}.7.weight", parts.last().unwrap())).unwrap();
                assert!(last.data.as_ptr_range().end == whole.end, "{dtype}: a view");
            }
        }
    }

    #[test]
    fn other_shapes_and_doubles_are_refused() {
        let (mut spec, want, mut weights) = stacked("f32", &["ffn_up"], "ffn_up_exps");
        let one = want.get("blk.0.ffn_up.0.weight").unwrap().clone();
        weights.insert("blk.0.ffn_up.0.weight", one);
        let e = split_stacks(&spec, weights.clone()).unwrap_err().to_string();
        assert!(e.contains("blk.0.ffn_up_exps.weight") && e.contains("holds blk.0.ffn_up.0.weight"), "{e}");
        spec.experts.as_mut().unwrap().count = 9;
        let e = split_stacks(&spec, weights).unwrap_err().to_string();
        assert!(e.contains("shape [8, ") && e.contains("imply [9, "), "{e}");
    }
}
