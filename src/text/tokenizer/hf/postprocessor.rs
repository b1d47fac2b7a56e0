//! What the post-processor of a `tokenizer.json` puts around a text.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::Value as Json;

use super::sequence::flatten;

/// Most tokens around a text. Real files have one or two.
const MAX_TOKENS: usize = 1024;

/// As the file spells it. What does not matter here must still be there.
#[derive(Deserialize)]
#[serde(tag = "type")]
#[allow(dead_code, reason = "read to see that the file has it")]
enum Spelled {
    RobertaProcessing { sep: (String, u32), cls: (String, u32) },
    BertProcessing { sep: (String, u32), cls: (String, u32) },
    ByteLevel { add_prefix_space: bool, trim_offsets: bool, use_regex: Option<bool> },
    TemplateProcessing { single: Vec<Piece>, pair: Vec<Piece>, special_tokens: HashMap<String, SpecialToken> },
}

#[derive(Deserialize)]
#[allow(dead_code, reason = "read to see that the file has it")]
enum Piece {
    Sequence { id: Sequence, type_id: u32 },
    SpecialToken { id: String, type_id: u32 },
}

#[derive(Deserialize, PartialEq)]
enum Sequence {
    A,
    B,
}

#[derive(Deserialize)]
struct SpecialToken {
    ids: Vec<u32>,
    tokens: Vec<String>,
}

/// Tokens before and after a text.
type Sides = (Vec<u32>, Vec<u32>);

/// The tokens before and after a text.
///
/// # Errors
/// Which part of `json` is no post-processor, or names a token for which `known` is false.
pub(super) fn around(json: Option<&Json>, known: impl Fn(u32) -> bool) -> Result<Sides, String> {
    let Some(json) = json else { return Ok(Sides::default()) };
    let stages = flatten(json, "post_processor", "processors", |spelled| {
        let around = match spelled {
            // Positions in the text are none of ours.
            Spelled::ByteLevel { .. } => return Ok(None),
            Spelled::RobertaProcessing { sep, cls } | Spelled::BertProcessing { sep, cls } => {
                (vec![cls.1], vec![sep.1])
            }
            Spelled::TemplateProcessing { single, special_tokens, .. } => template(&single, &special_tokens)?,
        };
        match around.0.iter().chain(&around.1).find(|&&id| !known(id)) {
            Some(id) => Err(format!("it adds token {id}, which the vocabulary lacks")),
            None => Ok(Some(around)),
        }
    })?;
    let mut added = stages.into_iter().flatten();
    match (added.next(), added.next()) {
        (_, Some(_)) => Err("post_processor: more than one of its parts adds tokens".into()),
        (around, None) => Ok(around.unwrap_or_default()),
    }
}

fn template(single: &[Piece], special_tokens: &HashMap<String, SpecialToken>) -> Result<Sides, String> {
    let (mut before, mut after) = Sides::default();
    let mut has_text = false;
    for piece in single {
        match piece {
            Piece::Sequence { id: Sequence::B, .. } => {
                return Err("single has sequence B, which is of pairs".into());
            }
            Piece::Sequence { .. } if has_text => return Err("single has the text twice".into()),
            Piece::Sequence { .. } => has_text = true,
            Piece::SpecialToken { id, .. } => {
                let shown = || id.chars().take(40).collect::<String>();
                let token = special_tokens.get(id);
                let token = token.ok_or_else(|| format!("special_tokens has no {:?}", shown()))?;
                if token.ids.len() != token.tokens.len() {
                    return Err(format!("special_tokens has not as many ids as tokens for {:?}", shown()));
                }
                let side = if has_text { &mut after } else { &mut before };
                side.extend(&token.ids);
                if side.len() > MAX_TOKENS {
                    return Err(format!("single adds more than {MAX_TOKENS} tokens"));
                }
            }
        }
    }
    if has_text { Ok((before, after)) } else { Err("single lacks the text".into()) }
}
