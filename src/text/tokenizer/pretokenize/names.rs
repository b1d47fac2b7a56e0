//! The rule that each name in `tokenizer.ggml.pre` stands for.
//!
//! Published patterns are written without their look-ahead, which [`Spaces`] and [`Stage::Digits`] express.

use super::stage::Digits::{Cut, Trailing};
use super::stage::Spaces::{Cascade, GiveBack, GiveBackWithinLine as WithinLine, Keep};
use super::stage::{Spaces, Stage};

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";

/// The pattern of GPT-4 and its descendants, with the given number of digits per piece.
fn gpt4(digits: &str) -> String {
    format!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+"
    )
}

/// GPT-4's contractions, which stick to a word in GPT-4o's pattern.
const CONTRACTION: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?";

/// GPT-4o's: words split at case changes, with `suffix` the contractions that stick to a word.
fn gpt4o(suffix: &str, digits: &str) -> String {
    format!(
        r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{suffix}|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{suffix}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+"
    )
}

/// DeepSeek V3's, with `ends` the line ends that follow punctuation and stand alone.
fn deepseek_v3(ends: &str) -> String {
    format!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{{|}}~][A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+{ends}|\s+"##
    )
}

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

/// Kimi's: GPT-4o's, with Han characters apart.
const KIMI: &str = concat!(
    r"\p{Han}+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
);
/// The scripts that AFMoE sets apart: Han, kana, Thai, Lao, Khmer, Burmese, Hangul.
const AFMOE_SCRIPTS: &str = concat!(
    r"[\u{4e00}-\u{9fff}\u{3400}-\u{4dbf}\u{f900}-\u{faff}\u{3040}-\u{309f}\u{30a0}-\u{30ff}",
    r"\u{ff65}-\u{ff9f}\u{2f00}-\u{2fdf}\u{e40}-\u{e7f}\u{e80}-\u{eff}\u{1780}-\u{17ff}",
    r"\u{1000}-\u{109f}\u{aa60}-\u{aa7f}\u{a9e0}-\u{a9ff}\u{ac00}-\u{d7af}\u{1100}-\u{11ff}]+"
);
const YOUTU_SCRIPTS: &str = concat!(
    r"[\u{ac00}-\u{d7a3}\u{3131}-\u{318e}]+",
    r"|[\u{ff01}\u{2026}\u{201c}\u{201d}\u{2018}\u{2019}\u{2014}\u{ff1a}\u{ff1b}\u{ff0c}\u{3001}-\u{303f}\u{fe30}-\u{fe4f}]+",
    r"|[\u{3105}-\u{312f}]+|[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+"
);
const CJK: &str = r"[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+";
const BLOOM: &str = r" ?[^(\s|.,!?\u{2026}\u{3002}\u{ff0c}\u{3001}\u{964}\u{6d4}\u{60c})]+";
const DEEPSEEK_PUNCTUATION: &str =
    r"\s?[!-/:-~\u{ff01}-\u{ff0f}\u{ff1a}-\u{ff5e}\u{2018}-\u{201f}\u{3000}-\u{3002}]+";

/// The defaults that go with a pre-tokeniser's name.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Traits {
    /// Whether a piece that is a token is taken whole, regardless of merges.
    pub ignore_merges: bool,
    /// Whether to prepend the beginning-of-sequence token if the metadata does not say.
    pub add_bos: bool,
}

/// A stage that sets the matches of `pattern` apart.
fn m(pattern: impl AsRef<str>, spaces: Spaces) -> Stage {
    Stage::matching(pattern.as_ref(), spaces)
}

/// The stages of the rule called `name`, with its defaults.
pub fn rule(name: &str) -> Option<(Vec<Stage>, Traits)> {
    let plain = Traits::default();
    let whole = Traits { ignore_merges: true, ..plain };
    Some(match name {
        "gpt-2" | "gpt2" | "phi-2" | "mpt" | "olmo" | "jais" | "trillion" | "granite-docling" | "jina-es"
        | "jina-de" | "jina-v2-es" | "jina-v2-de" | "jina-v1-en" | "jina-v2-code" | "roberta-bpe"
        | "gigachat" | "a.x-4.0" | "mellum" | "modern-bert" | "exaone4" => (vec![m(GPT2, GiveBack)], plain),
        "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b"
        | "mellum2" => (vec![m(r"\p{N}", Keep), m(GPT2, GiveBack)], plain),
        "llama-bpe" | "llama3" | "llama-v3" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0" | "lfm2"
        | "jina-v5-nano" => (vec![m(gpt4(r"\p{N}{1,3}"), WithinLine)], Traits { add_bos: true, ..whole }),
        "dbrx" | "smaug-bpe" | "chatglm-bpe" => (vec![m(gpt4(r"\p{N}{1,3}"), WithinLine)], plain),
        "glm4" | "glm5" => (vec![m(gpt4(r"\p{N}{1,3}"), WithinLine)], whole),
        "jais-2" => (vec![m(gpt4(r"\p{N}{1,3}"), Cascade)], plain),
        "minicpm5" => (vec![m(r"\p{N}{1,3}", Keep), m(gpt4(r"\p{N}+"), WithinLine)], whole),
        "qwen2" | "deepseek-r1-qwen" | "stablelm2" | "kormo" | "f2llmv2" | "megrez" | "hunyuan"
        | "solar-open" | "grok-2" => (vec![m(gpt4(r"\p{N}"), WithinLine)], plain),
        "laguna" => (vec![m(r"[^\n]+|\n+", Keep), m(gpt4(r"\p{N}"), WithinLine)], plain),
        "qwen35" => (
            vec![m(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
                WithinLine,
            )],
            plain,
        ),
        "ufakzeka" => (
            vec![m(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+", WithinLine)],
            plain,
        ),
        "seed-coder" => (
            vec![m(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+",
                WithinLine,
            )],
            plain,
        ),
        "bailingmoe" | "bailingmoe2" | "llada-moe" => (
            vec![m(
                r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+",
                WithinLine,
            )],
            plain,
        ),
        // Words that single spaces part are one piece.
        "exaone-moe" => (
            vec![m(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}\p{M}*(?: ?\p{L}\p{M}*)*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+",
                WithinLine,
            )],
            plain,
        ),
        "gpt-4o" | "llama4" | "kanana2" | "minimax-m2" | "talkie" => {
            (vec![m(gpt4o(CONTRACTION, r"\p{N}{1,3}"), WithinLine)], plain)
        }
        "granite-embed-multi-97m" => (vec![m(gpt4o(CONTRACTION, r"\p{N}{1,3}"), WithinLine)], whole),
        "youtu" => (vec![m(YOUTU_SCRIPTS, Keep), m(gpt4o(CONTRACTION, r"\p{N}"), WithinLine)], whole),
        "tiny_aya" | "cohere2moe" => {
            (vec![Stage::Digits(Trailing), m(gpt4o(CONTRACTION, r"\p{N}{1,3}"), WithinLine)], plain)
        }
        "kimi-k2" => (vec![m(KIMI, WithinLine)], plain),
        "tekken" => (vec![m(gpt4o("", r"\p{N}"), WithinLine)], Traits { add_bos: true, ..whole }),
        "falcon" => {
            (vec![m(r"[\p{P}\$\+<=>\^~\|`]+", Keep), m(GPT2, GiveBack), m("[0-9][0-9][0-9]", Keep)], plain)
        }
        "default" => (
            vec![
                m(r"[\p{P}\$\+<=>\^~\|]+", Keep),
                m(GPT2, GiveBack),
                m(r"\p{N}+", Keep),
                m("[0-9][0-9][0-9]", Keep),
            ],
            plain,
        ),
        // Words are not set apart: a token may span several.
        "superbpe" => (vec![m(r"\p{N}+", Keep), Stage::Digits(Cut)], plain),
        "chameleon" => (
            vec![
                m("<sentinel:[0-9]+>", Keep),
                m("IMGIMG[A-I]{1,4}Z", Keep),
                m(r"[\t\n]|    |  ", Keep),
                m(r"\p{N}", Keep),
                m(r"[\p{P}!-/:-@\[-`{-~]", Keep),
                m(GPT2, GiveBack),
            ],
            Traits { add_bos: true, ..plain },
        ),
        "deepseek-llm" => (
            vec![
                m(r"[\r\n]", Keep),
                m(DEEPSEEK_LETTERS, Keep),
                m(DEEPSEEK_PUNCTUATION, Keep),
                m(r"\s+\z", Keep),
                m(DEEPSEEK_CJK, Keep),
                m(r"\p{N}+", Keep),
            ],
            plain,
        ),
        "deepseek-coder" => (
            vec![
                m(r"[\r\n]", Keep),
                m(r"\s?\p{L}+", Keep),
                m(r"\s?\p{P}+", Keep),
                m(DEEPSEEK_CJK, Keep),
                m(r"\p{N}", Keep),
            ],
            plain,
        ),
        "deepseek-v3" | "hunyuan-dense" | "joyai-llm" | "hy_v4" => (
            vec![m(r"\p{N}{1,3}", Keep), m(CJK, Keep), m(deepseek_v3(r"[\r\n]*|\s*[\r\n]+"), WithinLine)],
            plain,
        ),
        "spark2_5" => (
            vec![
                m(r"\p{N}{1,3}", Keep),
                m(CJK, Keep),
                m(deepseek_v3(r"|[\r\n]"), GiveBack),
                m(r"\p{N}", Keep),
            ],
            plain,
        ),
        "afmoe" => (
            vec![
                Stage::Digits(Trailing),
                m(AFMOE_SCRIPTS, Keep),
                m(deepseek_v3(r"[\r\n]*|\s*[\r\n]+"), WithinLine),
            ],
            plain,
        ),
        "bloom" | "poro-chat" | "gpt3-finnish" => (vec![m(BLOOM, Keep)], plain),
        "viking" => (vec![m(BLOOM, Keep), m(r"\p{N}", Keep)], plain),
        _ => return None,
    })
}
