//! The normalizers of a `tokenizer.json`, with bounds on what they make of a text.

use serde::Deserialize;
use serde_json::Value as Json;
use tokenizers::NormalizedString;
use tokenizers::normalizers::{
    BertNormalizer, ByteLevel, Lowercase, NFC, NFD, NFKC, NFKD, Nmt, NormalizerWrapper, Precompiled, Strip,
    StripAccents,
};

use super::budget;
use super::finder::{Finder, PatternOf};
use super::precompiled;
use super::sequence::flatten;

/// Longest text put before every piece. Real ones have one character.
const MAX_PREPEND: usize = 64;

/// As the file spells it.
#[derive(Deserialize)]
#[serde(tag = "type")]
enum Spelled {
    #[serde(alias = "Bert")]
    BertNormalizer {
        clean_text: bool,
        handle_chinese_chars: bool,
        strip_accents: Option<bool>,
        lowercase: bool,
    },
    Strip {
        strip_left: bool,
        strip_right: bool,
    },
    StripAccents,
    #[allow(clippy::upper_case_acronyms, reason = "spelled so in the file")]
    NFC,
    #[allow(clippy::upper_case_acronyms, reason = "spelled so in the file")]
    NFD,
    #[allow(clippy::upper_case_acronyms, reason = "spelled so in the file")]
    NFKC,
    #[allow(clippy::upper_case_acronyms, reason = "spelled so in the file")]
    NFKD,
    Lowercase,
    Nmt,
    ByteLevel,
    Precompiled {
        precompiled_charsmap: String,
    },
    Replace {
        pattern: PatternOf,
        content: String,
    },
    Prepend {
        prepend: String,
    },
}

#[derive(Debug)]
enum Stage {
    Crate(NormalizerWrapper),
    Replace { finder: Finder, content: String },
    Prepend(String),
}

/// All of them, in order.
#[derive(Debug, Default)]
pub(super) struct Normalizer {
    stages: Vec<Stage>,
}

impl Normalizer {
    /// # Errors
    /// Which part of `json` is no normalizer, or none that makes sense.
    pub(super) fn new(json: &Json) -> Result<Normalizer, String> {
        let stage = |spelled| {
            let wrapped: NormalizerWrapper = match spelled {
                Spelled::BertNormalizer { clean_text, handle_chinese_chars, strip_accents, lowercase } => {
                    BertNormalizer::new(clean_text, handle_chinese_chars, strip_accents, lowercase).into()
                }
                Spelled::Strip { strip_left, strip_right } => Strip::new(strip_left, strip_right).into(),
                Spelled::StripAccents => NormalizerWrapper::StripAccents(StripAccents),
                Spelled::NFC => NFC.into(),
                Spelled::NFD => NFD.into(),
                Spelled::NFKC => NFKC.into(),
                Spelled::NFKD => NFKD.into(),
                Spelled::Lowercase => Lowercase.into(),
                Spelled::Nmt => Nmt.into(),
                Spelled::ByteLevel => ByteLevel::new().into(),
                Spelled::Precompiled { precompiled_charsmap } => {
                    let map = precompiled::base64(&precompiled_charsmap);
                    let map = map.ok_or("precompiled_charsmap is not base 64")?;
                    precompiled::check(&map)?;
                    Precompiled::from(&map).map_err(|e| e.to_string())?.into()
                }
                Spelled::Replace { pattern, content } => {
                    let finder = Finder::new(pattern)?;
                    if finder.finds_nothing_between() {
                        return Err("the pattern is empty".into());
                    }
                    return Ok(Stage::Replace { finder, content });
                }
                Spelled::Prepend { prepend } if prepend.len() > MAX_PREPEND => {
                    return Err(format!("prepend has {} bytes; the limit is {MAX_PREPEND}", prepend.len()));
                }
                Spelled::Prepend { prepend } => return Ok(Stage::Prepend(prepend)),
            };
            Ok(Stage::Crate(wrapped))
        };
        Ok(Normalizer { stages: flatten(json, "normalizer", "normalizers", stage)? })
    }
}

impl tokenizers::Normalizer for Normalizer {
    fn normalize(&self, text: &mut NormalizedString) -> tokenizers::Result<()> {
        for stage in &self.stages {
            match stage {
                Stage::Crate(normalizer) => normalizer.normalize(text)?,
                Stage::Replace { finder, content } => {
                    let found = finder.split(text.get());
                    let (matches, replaced) = found.matches();
                    let grown = matches.saturating_mul(content.len());
                    budget::check_normalized((text.len() - replaced).saturating_add(grown));
                    text.replace(&found, content)?;
                }
                Stage::Prepend(prepend) => {
                    text.prepend(prepend);
                }
            }
            budget::check_normalized(text.len());
        }
        budget::spend_normalized(text.len());
        Ok(())
    }
}
