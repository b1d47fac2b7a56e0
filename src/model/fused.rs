//! Splits matrices that files store as one: queries, keys and values (`attn_qkv`), and the feed-forward's gate and first matrix.
//!
//! The parts are ranges of whole rows, so they are views of the same bytes, whatever the type.

use super::block::tensor_name;
use super::{ModelSpec, Weights};
use crate::tensor::Tensor;
use crate::{Error, Result};

/// `weights` with the parts in place of `blk.{i}.attn_qkv`, `blk.{i}.ffn_gate_up`, and of a `blk.{i}.ffn_up` that also holds
/// the gate (GGUF). What does not have the expected rows is left for the check of all tensors to refuse.
///
/// # Errors
/// A part is there by itself, too, or a fused matrix has not the rows of its parts.
pub(super) fn split_fused(spec: &ModelSpec, weights: Weights) -> Result<Weights> {
    let fused = |n: &str| n.contains(".attn_qkv.") || n.contains(".ffn_gate_up.") || n.contains(".ffn_up.");
    if !weights.iter().any(|(name, _)| fused(name)) {
        return Ok(weights);
    }
    let (q, kv, ff) = (spec.q_dim(), spec.kv_dim(), spec.d_ff);
    let qkv = [("attn_q", q), ("attn_k", kv), ("attn_v", kv)];
    let gate_up = [("ffn_gate", ff), ("ffn_up", ff)];
    let mut out = Weights::default();
    for (name, t) in weights.iter() {
        let layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        let parts: Option<(usize, &str, &[(&str, usize)])> = layer
            .and_then(|(n, rest)| {
                Some((n.parse().ok().filter(|l: &usize| l.to_string() == n)?, rest.rsplit_once('.')?))
            })
            .and_then(|(layer, (stem, kind))| match stem {
                "attn_qkv" => Some((layer, kind, &qkv[..])),
                "ffn_gate_up" => Some((layer, kind, &gate_up[..])),
                // Llama.cpp's converters leave the fused matrix its name; a file with a gate has none of these.
                "ffn_up"
                    if spec.gated()
                        && spec.experts_of(layer).is_none()
                        && weights.get(&tensor_name(layer, "ffn_gate", kind)).is_none()
                        && t.shape.first() == Some(&(2 * ff)) =>
                {
                    Some((layer, kind, &gate_up[..]))
                }
                _ => None,
            });
        let Some((layer, kind, parts)) = parts else {
            out.insert(name.to_owned(), t.clone());
            continue;
        };
        let rows: usize = parts.iter().map(|(_, n)| n).sum();
        if t.shape.first() != Some(&rows) {
            let names: Vec<String> = parts.iter().map(|(part, n)| format!("{part} {n}")).collect();
            return Err(Error::format(
                name,
                format!(
                    "shape {:?}, wanted {rows} rows ({}); is the file damaged?",
                    t.shape,
                    names.join(", ")
                ),
            ));
        }
        let mut first = 0;
        for &(part, n) in parts {
            let part = tensor_name(layer, part, kind);
            if part != name && weights.get(&part).is_some() {
                return Err(Error::format(name, format!("holds {part}, which is there by itself, too")));
            }
            out.insert(part, rows_of(t, first, n, rows)?);
            first += n;
        }
    }
    Ok(out)
}

/// `n` of the `all` rows of a matrix (or elements of a bias) from `first` on.
fn rows_of(t: &Tensor, first: usize, n: usize, all: usize) -> Result<Tensor> {
    let bytes = t.data.len() / all;
    let data = t.data.slice(first * bytes, n * bytes).expect("a range of its rows");
    let mut shape = t.shape.clone();
    shape[0] = n;
    Tensor::new(t.dtype, shape, data)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::load;
    use crate::tensor::Bytes;

    /// The tensors of a layer one behind the other, as files store them.
    fn fuse(weights: &mut Weights, parts: &[&str], name: &str, kind: &str) {
        let names: Vec<String> = parts.iter().map(|p| tensor_name(0, p, kind)).collect();
        let parts: Vec<Tensor> = names.iter().map(|n| weights.get(n).unwrap().clone()).collect();
        *weights = std::mem::take(weights).into_iter().filter(|(n, _)| !names.contains(n)).fold(
            Weights::default(),
            |mut all, (n, t)| {
                all.insert(n, t);
                all
            },
        );
        let bytes: Vec<u8> = parts.iter().flat_map(|t| t.data.to_vec()).collect();
        let mut shape = parts[0].shape.clone();
        shape[0] = parts.iter().map(|t| t.shape[0]).sum();
        let t = Tensor::new(parts[0].dtype, shape, Bytes::copy_of(&bytes)).unwrap();
        weights.insert(tensor_name(0, name, kind), t);
    }

    fn fused(dtype: &str) -> (ModelSpec, Weights, Weights) {
        let m = load(&format!("synth:tiny-qwen2,dtype={dtype},layers=1")).unwrap();
        let mut weights = m.weights.clone();
        for kind in ["weight", "bias"] {
            fuse(&mut weights, &["attn_q", "attn_k", "attn_v"], "attn_qkv", kind);
        }
        fuse(&mut weights, &["ffn_gate", "ffn_up"], "ffn_up", "weight");
        (m.spec, m.weights, weights)
    }

    #[test]
    fn parts_are_views_of_whole_rows() {
        for dtype in ["f32", "bf16", "q8_0", "q4_0", "q4_k", "q6_k"] {
            let (spec, want, weights) = fused(dtype);
            let whole = weights.get("blk.0.attn_qkv.weight").unwrap().data.as_ptr_range();
            let got = split_fused(&spec, weights).unwrap();
            let names = |w: &Weights| w.iter().map(|(n, _)| n.to_owned()).collect::<Vec<_>>();
            assert_eq!(names(&got), names(&want));
            for (name, t) in want.iter() {
                let part = got.get(name).unwrap();
                assert_eq!(
                    (&part.shape, part.dtype, &part.data[..]),
                    (&t.shape, t.dtype, &t.data[..]),
                    "{name}"
                );
            }
            let v = got.get("blk.0.attn_v.weight").unwrap().data.as_ptr_range();
            assert!(whole.contains(&v.start) && v.end == whole.end, "{dtype}: values are a view");
        }
    }

    #[test]
    fn wrong_rows_and_doubles_are_refused() {
        let (mut spec, want, mut weights) = fused("f32");
        spec.n_kv_heads = 1;
        let e = split_fused(&spec, weights.clone()).unwrap_err().to_string();
        assert!(e.contains("blk.0.attn_qkv.") && e.contains("rows"), "{e}");
        spec.n_kv_heads = 2;
        weights.insert("blk.0.attn_q.weight", want.get("blk.0.attn_q.weight").unwrap().clone());
        let e = split_fused(&spec, weights).unwrap_err().to_string();
        assert!(e.contains("holds blk.0.attn_q.weight"), "{e}");
    }
}
