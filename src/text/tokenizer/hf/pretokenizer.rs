//! The pre-tokenizers of a `tokenizer.json`. The crate runs those that need no pattern.

use std::sync::LazyLock;

use serde::Deserialize;
use serde_json::Value as Json;
use tokenizers::pattern::Invert;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::delimiter::CharDelimiterSplit;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::fixed_length::FixedLength;
use tokenizers::pre_tokenizers::metaspace::Metaspace;
use tokenizers::pre_tokenizers::punctuation::Punctuation;
use tokenizers::pre_tokenizers::unicode_scripts::UnicodeScripts;
use tokenizers::pre_tokenizers::whitespace::{Whitespace, WhitespaceSplit};
use tokenizers::tokenizer::normalizer::SplitDelimiterBehavior;
use tokenizers::{PreTokenizedString, PreTokenizer as _};

use super::finder::{Finder, PatternOf};
use super::metaspace::SpelledMetaspace;
use super::sequence::flatten;

/// Most pre-tokenizers that make text longer: each may double it.
const MAX_GROWING: usize = 3;

/// The pattern of GPT-2, which `ByteLevel` implies.
static GPT2: LazyLock<Finder> = LazyLock::new(|| {
    let pattern = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
    Finder::new(PatternOf::Regex(pattern.into())).expect("a pattern of our own")
});

/// As the file spells it.
#[derive(Deserialize)]
#[serde(tag = "type")]
enum Spelled {
    BertPreTokenizer,
    ByteLevel {
        add_prefix_space: bool,
        #[serde(rename = "trim_offsets")]
        _trim_offsets: bool,
        #[serde(default = "yes")]
        use_regex: bool,
    },
    CharDelimiterSplit {
        delimiter: char,
    },
    Metaspace(SpelledMetaspace),
    Whitespace,
    WhitespaceSplit,
    Split {
        pattern: PatternOf,
        behavior: SplitDelimiterBehavior,
        invert: bool,
    },
    Punctuation {
        #[serde(default = "isolated")]
        behavior: SplitDelimiterBehavior,
    },
    Digits {
        individual_digits: bool,
    },
    UnicodeScripts,
    FixedLength {
        #[serde(default = "five")]
        length: usize,
    },
}

fn yes() -> bool {
    true
}

fn isolated() -> SplitDelimiterBehavior {
    SplitDelimiterBehavior::Isolated
}

fn five() -> usize {
    5
}

#[derive(Debug)]
enum Stage {
    Crate(PreTokenizerWrapper),
    Split { finder: Finder, behavior: SplitDelimiterBehavior, invert: bool },
    ByteLevel { add_prefix_space: bool, use_regex: bool },
}

/// All of them, in order.
#[derive(Debug, Default)]
pub(super) struct PreTokenizers {
    stages: Vec<Stage>,
}

impl PreTokenizers {
    /// # Errors
    /// Which part of `json` is no pre-tokenizer, or none that makes sense.
    pub(super) fn new(json: &Json) -> Result<PreTokenizers, String> {
        let mut growing = 0;
        let mut grows = || {
            growing += 1;
            if growing > MAX_GROWING { Err("one of too many that make text longer") } else { Ok(()) }
        };
        let stage = |spelled| {
            let wrapped: PreTokenizerWrapper = match spelled {
                Spelled::ByteLevel { add_prefix_space, use_regex, .. } => {
                    grows()?;
                    return Ok(Stage::ByteLevel { add_prefix_space, use_regex });
                }
                Spelled::Split { pattern, behavior, invert } => {
                    return Ok(Stage::Split { finder: Finder::new(pattern)?, behavior, invert });
                }
                Spelled::Metaspace(metaspace) => {
                    grows()?;
                    let scheme = metaspace.scheme()?;
                    Metaspace::new(metaspace.replacement, scheme, metaspace.split.unwrap_or(true)).into()
                }
                Spelled::FixedLength { length: 0 } => return Err("length is 0".into()),
                Spelled::FixedLength { length } => FixedLength::new(length).into(),
                Spelled::BertPreTokenizer => BertPreTokenizer.into(),
                Spelled::CharDelimiterSplit { delimiter } => CharDelimiterSplit::new(delimiter).into(),
                Spelled::Whitespace => Whitespace.into(),
                Spelled::WhitespaceSplit => WhitespaceSplit.into(),
                Spelled::Punctuation { behavior } => Punctuation::new(behavior).into(),
                Spelled::Digits { individual_digits } => Digits::new(individual_digits).into(),
                Spelled::UnicodeScripts => UnicodeScripts::new().into(),
            };
            Ok(Stage::Crate(wrapped))
        };
        Ok(PreTokenizers { stages: flatten(json, "pre_tokenizer", "pretokenizers", stage)? })
    }

    pub(super) fn run(&self, text: &mut PreTokenizedString) -> tokenizers::Result<()> {
        for stage in &self.stages {
            match stage {
                Stage::Crate(pre_tokenizer) => pre_tokenizer.pre_tokenize(text)?,
                Stage::Split { finder, behavior, invert } => text.split(|_, piece| {
                    let found = finder.split(piece.get());
                    if *invert {
                        piece.split(Invert(&found), *behavior)
                    } else {
                        piece.split(&found, *behavior)
                    }
                })?,
                Stage::ByteLevel { add_prefix_space, use_regex } => {
                    text.split(|_, mut piece| {
                        if *add_prefix_space && !piece.get().starts_with(' ') {
                            piece.prepend(" ");
                        }
                        if *use_regex {
                            let found = GPT2.split(piece.get());
                            piece.split(&found, SplitDelimiterBehavior::Isolated)
                        } else {
                            Ok(vec![piece])
                        }
                    })?;
                    // It spells bytes, and nothing else any more.
                    ByteLevel::new(false, true, false).pre_tokenize(text)?;
                }
            }
        }
        Ok(())
    }
}
