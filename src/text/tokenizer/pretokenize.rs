//! Divides text into the pieces that byte-pair encoding works on, by the rule that the model was trained with
//! (`tokenizer.ggml.pre`).
//!
//! A rule is a list of stages; each divides the pieces of the previous stage into its matches and the text between
//! them. The published patterns end in `\s+(?!\S)|\s+`: a run of white space leaves its last character to the word that
//! follows. This look-ahead does not run on a linear-time engine (and a backtracking one silently gives up on long runs
//! of spaces), so the patterns here use `\s+`, and [`Stage`] gives the last character back.

use regex::Regex;

use crate::{Error, Result};

/// How a byte-level vocabulary divides text.
#[derive(Debug)]
pub struct PreTokenizer {
    stages: Vec<Stage>,
}

#[derive(Debug)]
struct Stage {
    regex: Regex,
    spaces: Spaces,
}

/// The treatment of a match that is all white space and precedes a word.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Spaces {
    /// The match is kept: the pattern has no look-ahead.
    Keep,
    /// Its last character is given back, if it has more than one.
    GiveBack,
    /// As [`GiveBack`](Self::GiveBack), except for a run that ends a line, which the pattern matches separately.
    GiveBackWithinLine,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";

/// The pattern of GPT-4 and its descendants, with the given number of digits per piece.
fn gpt4(digits: &str) -> String {
    format!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+"
    )
}

/// GPT-4o's: words split at case changes, with `suffix` the contractions that stick to a word.
fn gpt4o(suffix: &str, digits: &str) -> String {
    format!(
        r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{suffix}|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{suffix}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+"
    )
}

const DEEPSEEK_V3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+"##;
/// Letters of the cased scripts, as DeepSeek LLM lists them.
const DEEPSEEK_LETTERS: &str = concat!(
    r"\s?[A-Za-z",
    r"\u{b5}\u{c0}-\u{d6}\u{d8}-\u{f6}\u{f8}-\u{1ba}\u{1bc}-\u{1bf}\u{1c4}-\u{293}\u{295}-\u{2af}",
    r"\u{370}-\u{373}\u{376}\u{377}\u{37b}-\u{37d}\u{37f}\u{386}\u{388}-\u{38a}\u{38c}\u{38e}-\u{3a1}",
    r"\u{3a3}-\u{3f5}\u{3f7}-\u{481}\u{48a}-\u{52f}\u{531}-\u{556}\u{10a0}-\u{10c5}\u{13a0}-\u{13f5}",
    r"\u{13f8}-\u{13fd}\u{1c90}-\u{1cba}\u{1cbd}-\u{1cbf}\u{1d00}-\u{1d2b}\u{1d6b}-\u{1d77}",
    r"\u{1d79}-\u{1d9a}\u{1e00}-\u{1f15}\u{1f18}-\u{1f1d}\u{1f20}-\u{1f45}\u{1f48}-\u{1f4d}",
    r"\u{1f50}-\u{1f57}\u{1f59}\u{1f5b}\u{1f5d}\u{1f5f}-\u{1f7d}\u{1f80}-\u{1fb4}\u{1fb6}-\u{1fbc}",
    r"\u{1fbe}\u{1fc2}-\u{1fc4}\u{1fc6}-\u{1fcc}\u{1fd0}-\u{1fd3}\u{1fd6}-\u{1fdb}\u{1fe0}-\u{1fec}",
    r"\u{1ff2}-\u{1ff4}\u{1ff6}-\u{1ffc}\u{2102}\u{2107}\u{210a}-\u{2113}\u{2115}\u{2119}-\u{211d}",
    r"\u{2124}\u{2126}\u{2128}\u{212a}-\u{212d}\u{212f}-\u{2134}\u{2139}\u{213c}-\u{213f}",
    r"\u{2145}-\u{2149}\u{214e}\u{2183}\u{2184}\u{2c00}-\u{2c7b}\u{2c7e}-\u{2ce4}\u{2ceb}-\u{2cee}",
    r"\u{2cf2}\u{2cf3}\u{a640}-\u{a66d}\u{a680}-\u{a69b}\u{a722}-\u{a76f}\u{a771}-\u{a787}",
    r"\u{a78b}-\u{a78e}\u{ab70}-\u{abbf}\u{fb00}-\u{fb06}\u{fb13}-\u{fb17}\u{ff21}-\u{ff3a}",
    r"\u{ff41}-\u{ff5a}\u{10400}-\u{1044f}\u{104b0}-\u{104d3}\u{104d8}-\u{104fb}\u{10c80}-\u{10cb2}",
    r"\u{10cc0}-\u{10cf2}\u{118a0}-\u{118df}\u{1e900}-\u{1e943}",
    r"]+"
);
const DEEPSEEK_CJK: &str = "[\u{4e00}-\u{9fa5}\u{800}-\u{4e00}\u{ac00}-\u{d7ff}]+";

/// The defaults that go with a pre-tokeniser's name.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Traits {
    /// Whether a piece that is a token is taken whole, regardless of merges.
    pub ignore_merges: bool,
    /// Whether to prepend the beginning-of-sequence token if the metadata does not say.
    pub add_bos: bool,
}

impl PreTokenizer {
    /// The pre-tokeniser called `name` in `tokenizer.ggml.pre`, with its defaults.
    ///
    /// An unknown name is an error: a wrong split yields plausible text and bad answers.
    pub fn named(name: &str) -> Result<(PreTokenizer, Traits)> {
        use Spaces::{GiveBack, GiveBackWithinLine as WithinLine, Keep};
        let plain = Traits::default();
        let s = str::to_owned;
        let (stages, traits) = match name {
            "gpt-2" | "gpt2" | "phi-2" | "mpt" | "olmo" | "jais" | "trillion" | "granite-docling"
            | "jina-es" | "jina-de" | "jina-v2-es" | "jina-v2-de" | "jina-v1-en" | "jina-v2-code"
            | "roberta-bpe" | "gigachat" | "a.x-4.0" | "mellum" | "modern-bert" | "exaone4" => {
                (vec![(s(GPT2), GiveBack)], plain)
            }
            "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b"
            | "mellum2" => (vec![(s(r"\p{N}"), Keep), (s(GPT2), GiveBack)], plain),
            "llama-bpe" | "llama3" | "llama-v3" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0"
            | "lfm2" | "jina-v5-nano" => {
                (vec![(gpt4(r"\p{N}{1,3}"), WithinLine)], Traits { ignore_merges: true, add_bos: true })
            }
            "dbrx" | "smaug-bpe" | "chatglm-bpe" => (vec![(gpt4(r"\p{N}{1,3}"), WithinLine)], plain),
            "glm4" | "glm5" => {
                (vec![(gpt4(r"\p{N}{1,3}"), WithinLine)], Traits { ignore_merges: true, add_bos: false })
            }
            "qwen2" | "deepseek-r1-qwen" | "stablelm2" | "kormo" | "megrez" | "hunyuan" | "solar-open"
            | "grok-2" => (vec![(gpt4(r"\p{N}"), WithinLine)], plain),
            "qwen35" => (
                vec![(
                    s(
                        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
                    ),
                    WithinLine,
                )],
                plain,
            ),
            "gpt-4o" | "llama4" | "kanana2" | "minimax-m2" => {
                (vec![(gpt4o("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}"), WithinLine)], plain)
            }
            "tekken" => {
                (vec![(gpt4o("", r"\p{N}"), WithinLine)], Traits { ignore_merges: true, add_bos: true })
            }
            "falcon" => (
                vec![(s(r"[\p{P}\$\+<=>\^~\|`]+"), Keep), (s(GPT2), GiveBack), (s("[0-9][0-9][0-9]"), Keep)],
                plain,
            ),
            "default" => (
                vec![
                    (s(r"[\p{P}\$\+<=>\^~\|]+"), Keep),
                    (s(GPT2), GiveBack),
                    (s(r"\p{N}+"), Keep),
                    (s("[0-9][0-9][0-9]"), Keep),
                ],
                plain,
            ),
            "deepseek-llm" => (
                vec![
                    (s(r"[\r\n]"), Keep),
                    (s(DEEPSEEK_LETTERS), Keep),
                    (
                        s(
                            r"\s?[!-/:-~\u{ff01}-\u{ff0f}\u{ff1a}-\u{ff5e}\u{2018}-\u{201f}\u{3000}-\u{3002}]+",
                        ),
                        Keep,
                    ),
                    (s(r"\s+\z"), Keep),
                    (s(DEEPSEEK_CJK), Keep),
                    (s(r"\p{N}+"), Keep),
                ],
                plain,
            ),
            "deepseek-coder" => (
                vec![
                    (s(r"[\r\n]"), Keep),
                    (s(r"\s?\p{L}+"), Keep),
                    (s(r"\s?\p{P}+"), Keep),
                    (s(DEEPSEEK_CJK), Keep),
                    (s(r"\p{N}"), Keep),
                ],
                plain,
            ),
            "deepseek-v3" | "hunyuan-dense" | "joyai-llm" => (
                vec![
                    (s(r"\p{N}{1,3}"), Keep),
                    (s("[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+"), Keep),
                    (s(DEEPSEEK_V3), WithinLine),
                ],
                plain,
            ),
            "bloom" | "poro-chat" | "gpt3-finnish" => (
                vec![(s(r" ?[^(\s|.,!?\u{2026}\u{3002}\u{ff0c}\u{3001}\u{964}\u{6d4}\u{60c})]+"), Keep)],
                plain,
            ),
            "viking" => (
                vec![
                    (s(r" ?[^(\s|.,!?\u{2026}\u{3002}\u{ff0c}\u{3001}\u{964}\u{6d4}\u{60c})]+"), Keep),
                    (s(r"\p{N}"), Keep),
                ],
                plain,
            ),
            other => {
                return Err(Error::Unsupported(format!(
                    "tokenizer.ggml.pre: unknown pre-tokenizer {:?}; a wrong one would spoil the output silently",
                    super::spm::clip(other)
                )));
            }
        };
        let stages = stages
            .into_iter()
            .map(|(pattern, spaces)| Stage {
                regex: Regex::new(&pattern).expect("the patterns are constants, tested to compile"),
                spaces,
            })
            .collect();
        Ok((PreTokenizer { stages }, traits))
    }

    /// Calls `piece` with each piece of `text`, left to right; together they are the text.
    pub fn split<'t>(&self, text: &'t str, mut piece: impl FnMut(&'t str)) {
        // Depth first, stage by stage: `stack` holds (text, stages done), the leftmost on top.
        fn run<'t>(stages: &[Stage], text: &'t str, piece: &mut impl FnMut(&'t str)) {
            match stages.split_first() {
                None => piece(text),
                Some((stage, rest)) => stage.split(text, |part| run_dyn(rest, part, piece)),
            }
        }
        fn run_dyn<'t>(stages: &[Stage], text: &'t str, piece: &mut dyn FnMut(&'t str)) {
            run(stages, text, &mut |part| piece(part));
        }
        run_dyn(&self.stages, text, &mut piece);
    }
}

impl Stage {
    fn split<'t>(&self, text: &'t str, mut piece: impl FnMut(&'t str)) {
        let mut done = 0;
        let mut at = 0;
        while let Some(found) = self.regex.find_at(text, at) {
            let (start, mut end) = (found.start(), found.end());
            if end < text.len() && self.gives_back(found.as_str()) {
                let last = found.as_str().chars().next_back().map_or(0, char::len_utf8);
                // A single white-space character is a separate piece.
                end = if end - last > start { end - last } else { end };
            }
            if start > done {
                piece(&text[done..start]);
            }
            if end > start {
                piece(&text[start..end]);
            }
            done = end;
            // No pattern matches the empty string, but the loop must not depend on that.
            at = if end > at { end } else { at + text[at..].chars().next().map_or(1, char::len_utf8) };
            if at > text.len() {
                break;
            }
        }
        if done < text.len() {
            piece(&text[done..]);
        }
    }

    /// Whether the look-ahead would have rejected this whole match, which is not at the end of the text.
    fn gives_back(&self, found: &str) -> bool {
        match self.spaces {
            Spaces::Keep => false,
            Spaces::GiveBack => found.chars().all(char::is_whitespace),
            Spaces::GiveBackWithinLine => {
                !found.ends_with(['\r', '\n']) && found.chars().all(char::is_whitespace)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces<'t>(name: &str, text: &'t str) -> Vec<&'t str> {
        let mut all = Vec::new();
        PreTokenizer::named(name).expect("a known name").0.split(text, |p| all.push(p));
        assert_eq!(all.concat(), text, "pieces must add up");
        all
    }

    /// Compares with the published pattern of each name on an engine that supports look-ahead.
    #[test]
    fn giving_back_equals_the_published_look_ahead() {
        use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
        use tokenizers::{
            OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _, SplitDelimiterBehavior,
        };
        let published: [(&str, &[&str]); 4] = [
            ("gpt-2", &[r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"]),
            (
                "smollm",
                &[r"\p{N}", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"],
            ),
            (
                "llama-bpe",
                &[
                    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
                ],
            ),
            (
                "qwen2",
                &[
                    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
                ],
            ),
        ];
        let alphabet = [
            " ",
            "  ",
            "\t",
            "\n",
            "\r\n",
            "\u{a0}",
            "\u{3000}",
            "a",
            "Zé",
            "'s",
            "'LL",
            "12",
            "3",
            "!?",
            "中",
            "\u{301}",
            "👩\u{200d}🚀",
            "\0",
        ];
        let mut state = 1u64;
        for (name, patterns) in published {
            let (ours, _) = PreTokenizer::named(name).unwrap();
            let theirs: Vec<Split> = patterns
                .iter()
                .map(|p| {
                    Split::new(SplitPattern::Regex((*p).into()), SplitDelimiterBehavior::Isolated, false)
                        .unwrap()
                })
                .collect();
            for _ in 0..2000 {
                let mut text = String::new();
                for _ in 0..12 {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    text.push_str(alphabet[(state >> 33) as usize % alphabet.len()]);
                }
                let mut got = Vec::new();
                ours.split(&text, |p| got.push(p));
                let mut pre = PreTokenizedString::from(text.as_str());
                for split in &theirs {
                    split.pre_tokenize(&mut pre).unwrap();
                }
                let want: Vec<&str> = pre
                    .get_splits(OffsetReferential::Original, OffsetType::Byte)
                    .into_iter()
                    .map(|(s, _, _)| s)
                    .collect();
                assert_eq!(got, want, "{name} on {text:?}");
            }
        }
    }

    #[test]
    fn every_name_compiles_and_pieces_add_up() {
        for name in [
            "gpt-2",
            "smollm",
            "llama-bpe",
            "dbrx",
            "glm4",
            "qwen2",
            "qwen35",
            "gpt-4o",
            "tekken",
            "falcon",
            "default",
            "deepseek-llm",
            "deepseek-coder",
            "deepseek-v3",
            "bloom",
            "viking",
        ] {
            pieces(name, "It's  20245 WORDS\r\n\n\t中文 áé\u{301} — ok?  ");
            assert!(pieces(name, "").is_empty(), "{name}: the empty text has no pieces");
        }
        assert!(PreTokenizer::named("nonsense").unwrap_err().to_string().contains("nonsense"));
    }

    #[test]
    fn a_long_run_of_spaces_takes_linear_time_and_leaves_one_to_the_word() {
        let text = format!("{}a", " ".repeat(3_000_000));
        let got = pieces("smollm", &text);
        assert_eq!(got.len(), 2);
        assert_eq!(got[1], " a");
    }

    #[test]
    fn digits_are_cut_as_each_family_does() {
        assert_eq!(pieces("smollm", "a 123"), ["a", " ", "1", "2", "3"]);
        assert_eq!(pieces("llama-bpe", "a 12345"), ["a", " ", "123", "45"]);
        assert_eq!(pieces("qwen2", "12 I'LL"), ["1", "2", " I", "'LL"]);
        assert_eq!(pieces("gpt-2", "a 123 I'LL"), ["a", " 123", " I", "'", "LL"]);
    }
}
