//! Hugging Face's names for the tensors; GGUF's names are the canonical ones.

/// Pairs of (canonical, Hugging Face) names without `.weight`/`.bias`; the first `{}` stands for the layer number, a second one
/// for an expert's.
pub type NameMap = [(&'static str, &'static str)];

/// The names of Llama, and those that are given.
macro_rules! like_llama {
    ($($own:expr),* $(,)?) => { &[
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
    $($own),*
    ] };
}
pub(super) use like_llama;

/// The names of Llama, of Qwen's experts (and OLMoE's), and those that are given.
macro_rules! like_qwen_moe {
    ($($own:expr),* $(,)?) => { $crate::model::arch::names::like_llama![
    ("blk.{}.ffn_gate_inp", "model.layers.{}.mlp.gate"),
    ("blk.{}.ffn_gate.{}", "model.layers.{}.mlp.experts.{}.gate_proj"),
    ("blk.{}.ffn_up.{}", "model.layers.{}.mlp.experts.{}.up_proj"),
    ("blk.{}.ffn_down.{}", "model.layers.{}.mlp.experts.{}.down_proj"),
    $($own),*
    ] };
}
pub(super) use like_qwen_moe;

/// The names of Llama and of every family that follows it.
pub const LLAMA: &NameMap = like_llama![];

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
        if let Some(numbers) = numbers_in(stem, from) {
            let named = numbers.into_iter().flatten().fold(to.to_owned(), |to, n| to.replacen("{}", n, 1));
            return Some(format!("{named}.{suffix}"));
        }
    }
    None
}

/// The numbers in `stem` at the places of `pattern`, of which there are at most two; `None` if it is another name.
fn numbers_in<'n>(stem: &'n str, pattern: &str) -> Option<[Option<&'n str>; 2]> {
    let mut numbers = [None; 2];
    let mut parts = pattern.split("{}");
    let mut rest = stem.strip_prefix(parts.next()?)?;
    for (number, part) in numbers.iter_mut().zip(parts) {
        let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (n, behind) = rest.split_at(digits);
        // "03" is no number of a layer, so that no two names mean the same tensor.
        if !n.parse::<u32>().is_ok_and(|x| x.to_string() == n) {
            return None;
        }
        *number = Some(n);
        rest = behind.strip_prefix(part)?;
    }
    rest.is_empty().then_some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_have_a_number_of_their_own() {
        let map: &NameMap = &[("blk.{}.ffn_gate.{}", "model.layers.{}.mlp.experts.{}.gate_proj")];
        let (canonical, hf) =
            ("blk.3.ffn_gate.127.weight", "model.layers.3.mlp.experts.127.gate_proj.weight");
        assert_eq!(canonical_name(map, hf).as_deref(), Some(canonical));
        assert_eq!(file_name(map, canonical).as_deref(), Some(hf));
        for no in [
            "model.layers.3.mlp.experts.07.gate_proj.weight",
            "model.layers.3.mlp.experts..gate_proj.weight",
            "model.layers.3.mlp.experts.gate_proj.weight",
            "model.layers.3.mlp.experts.1.gate_proj.2.weight",
        ] {
            assert_eq!(canonical_name(map, no), None, "{no}");
        }
    }

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
