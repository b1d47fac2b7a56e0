//! Divides text into the pieces that byte-pair encoding works on, by the rule that the model was trained with
//! (`tokenizer.ggml.pre`).
//!
//! A rule is a list of stages; each divides the pieces of the previous stage into its matches and the text between
//! them. The published patterns end in `\s+(?!\S)|\s+`: a run of white space leaves its last character to the word that
//! follows. This look-ahead does not run on a linear-time engine (and a backtracking one silently gives up on long runs
//! of spaces), so the patterns here use `\s+`, and [`stage`] gives the last character back.

mod names;
mod stage;

use crate::{Error, Result};

pub use names::Traits;
use stage::Stage;

/// How a byte-level vocabulary divides text.
#[derive(Debug)]
pub struct PreTokenizer {
    stages: Vec<Stage>,
}

impl PreTokenizer {
    /// The pre-tokeniser called `name` in `tokenizer.ggml.pre`, with its defaults.
    ///
    /// An unknown name is an error: a wrong split yields plausible text and bad answers.
    pub fn named(name: &str) -> Result<(PreTokenizer, Traits)> {
        match names::rule(name) {
            Some((stages, traits)) => Ok((PreTokenizer { stages }, traits)),
            None => Err(Error::Unsupported(format!(
                "tokenizer.ggml.pre: unknown pre-tokenizer {:?}; a wrong one would spoil the output silently",
                super::spm::clip(name)
            ))),
        }
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
            "kimi-k2",
            "seed-coder",
            "superbpe",
            "bailingmoe2",
            "llada-moe",
            "chameleon",
            "afmoe",
            "exaone-moe",
            "jais-2",
            "minicpm5",
            "laguna",
            "ufakzeka",
            "granite-embed-multi-97m",
            "youtu",
            "cohere2moe",
            "tiny_aya",
            "spark2_5",
            "hy_v4",
            "f2llmv2",
            "talkie",
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
    fn runs_of_spaces_are_cut_as_jais_does() {
        let lens = |text: &str| pieces("jais-2", text).into_iter().map(str::len).collect::<Vec<_>>();
        assert_eq!(lens(&format!("{}a", " ".repeat(1030))), [512, 512, 4, 1, 2]);
        assert_eq!(lens("x   "), [1, 2, 1]);
        assert_eq!(lens("x  \n  y"), [1, 3, 1, 2]);
    }

    #[test]
    fn digits_are_cut_as_each_family_does() {
        assert_eq!(pieces("superbpe", "the cat 12345 and 678"), ["the cat ", "12", "345", " and ", "678"]);
        assert_eq!(pieces("superbpe", "12½345"), ["12½", "345"]);
        assert_eq!(pieces("afmoe", "a  1234"), ["a", " ", " ", "1", "234"]);
        assert_eq!(pieces("afmoe", "1234567 中"), ["1", "234", "567", " ", "中"]);
        assert_eq!(pieces("tiny_aya", "x 12345 1234x"), ["x", " ", "12", "345", " ", "1", "234", "x"]);
        assert_eq!(pieces("exaone-moe", "one two  3"), ["one two", " ", " ", "3"]);
        assert_eq!(pieces("chameleon", "    a.1IMGIMGABZ"), ["    ", "a", ".", "1", "IMGIMGABZ"]);
        assert_eq!(pieces("kimi-k2", "don't中文 abcDE"), ["don't", "中文", " abc", "DE"]);

        assert_eq!(pieces("smollm", "a 123"), ["a", " ", "1", "2", "3"]);
        assert_eq!(pieces("llama-bpe", "a 12345"), ["a", " ", "123", "45"]);
        assert_eq!(pieces("qwen2", "12 I'LL"), ["1", "2", " I", "'LL"]);
        assert_eq!(pieces("gpt-2", "a 123 I'LL"), ["a", " 123", " I", "'", "LL"]);
    }
}
