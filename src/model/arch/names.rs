//! Hugging Face's names for the tensors; GGUF's names are the canonical ones.

/// Pairs of (canonical, Hugging Face) names without `.weight`/`.bias`; `{}` stands for the layer number.
pub type NameMap = [(&'static str, &'static str)];

/// The names of Llama and of every family that follows it.
pub const LLAMA: &NameMap = &[
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("output", "lm_head"),
    ("blk.{}.attn_norm", "model.layers.{}.input_layernorm"),
    ("blk.{}.attn_q", "model.layers.{}.self_attn.q_proj"),
    ("blk.{}.attn_k", "model.layers.{}.self_attn.k_proj"),
    ("blk.{}.attn_v", "model.layers.{}.self_attn.v_proj"),
    ("blk.{}.attn_q_norm", "model.layers.{}.self_attn.q_norm"),
    ("blk.{}.attn_k_norm", "model.layers.{}.self_attn.k_norm"),
    ("blk.{}.attn_output", "model.layers.{}.self_attn.o_proj"),
    ("blk.{}.ffn_norm", "model.layers.{}.post_attention_layernorm"),
    ("blk.{}.ffn_gate", "model.layers.{}.mlp.gate_proj"),
    ("blk.{}.ffn_up", "model.layers.{}.mlp.up_proj"),
    ("blk.{}.ffn_down", "model.layers.{}.mlp.down_proj"),
];

/// The canonical name of a Hugging Face tensor; `None` if the family has no such tensor.
///
/// Multimodal checkpoints wrap the text model in `language_model.`, base checkpoints leave out `model.`.
pub fn canonical_name(map: &NameMap, hf: &str) -> Option<String> {
    let plain = hf
        .strip_prefix("language_model.")
        .map(str::to_owned)
        .or_else(|| hf.strip_prefix("model.language_model.").map(|rest| format!("model.{rest}")))
        .unwrap_or_else(|| hf.to_owned());
    translate(plain.as_str(), map.iter().map(|&(c, h)| (h, c)))
        .or_else(|| translate(&format!("model.{plain}"), map.iter().map(|&(c, h)| (h, c))))
}

/// The Hugging Face name of a canonical tensor.
pub fn file_name(map: &NameMap, canonical: &str) -> Option<String> {
    translate(canonical, map.iter().copied())
}

fn translate<'a>(name: &str, pairs: impl Iterator<Item = (&'a str, &'a str)>) -> Option<String> {
    let (stem, suffix) = name.rsplit_once('.').filter(|(_, s)| matches!(*s, "weight" | "bias"))?;
    for (from, to) in pairs {
        match from.split_once("{}") {
            None if from == stem => return Some(format!("{to}.{suffix}")),
            None => {}
            Some((before, after)) => {
                let layer = stem.strip_prefix(before).and_then(|r| r.strip_suffix(after));
                // "03" and "+3" are not layer numbers, so that no two names mean the same tensor.
                if let Some(n) = layer.and_then(|l| l.parse::<u32>().ok().filter(|n| n.to_string() == l)) {
                    return Some(format!("{}.{suffix}", to.replacen("{}", &n.to_string(), 1)));
                }
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_both_ways() {
        for (c, h) in [
            ("token_embd.weight", "model.embed_tokens.weight"),
            ("blk.12.attn_q.bias", "model.layers.12.self_attn.q_proj.bias"),
            ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
            ("output.weight", "lm_head.weight"),
        ] {
            assert_eq!(canonical_name(LLAMA, h).as_deref(), Some(c));
            assert_eq!(file_name(LLAMA, c).as_deref(), Some(h));
        }
        assert_eq!(
            canonical_name(LLAMA, "layers.1.mlp.up_proj.weight").as_deref(),
            Some("blk.1.ffn_up.weight")
        );
        assert_eq!(
            canonical_name(LLAMA, "language_model.model.norm.weight").as_deref(),
            Some("output_norm.weight")
        );
        assert_eq!(
            canonical_name(LLAMA, "model.language_model.norm.weight").as_deref(),
            Some("output_norm.weight")
        );
        for no in [
            "model.layers.03.mlp.up_proj.weight",
            "model.layers.x.mlp.up_proj.weight",
            "model.norm",
            "vision.weight",
        ] {
            assert_eq!(canonical_name(LLAMA, no), None, "{no}");
        }
    }
}
