//! Tokenizer metadata of a GGUF file (`tokenizer.ggml.*`) to a [`Tokenizer`].

use std::borrow::Cow;

use super::*;
use crate::model::formats::gguf::Value;

const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
const MERGES: &str = "tokenizer.ggml.merges";
const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const CHARACTER_MAP: &str = "tokenizer.ggml.precompiled_charsmap";
const EXTRA_SPACES: &str = "tokenizer.ggml.remove_extra_whitespaces";

/// Most tokens, and most merges: several times those of any model.
const MOST_STRINGS: usize = 1 << 24;

pub(super) fn load(metadata: &Metadata) -> Result<Tokenizer> {
    let file = Reader(metadata);
    let model = file.string(MODEL)?.filter(|&model| model != "no_vocab");
    let model = model.ok_or_else(|| missing(MODEL, "the file carries no tokenizer"))?;
    let tokens = match metadata.get(TOKENS) {
        None => return Err(missing(TOKENS, "the file carries no vocabulary")),
        // An empty array has no meaningful type; the vocabulary rejects it as empty.
        Some(value) => file.strings(TOKENS, value)?,
    };
    let mut vocab = Vocab::new(&tokens, file.kinds(tokens.len())?)?;
    let sentencepiece = match model {
        "gpt2" => false,
        "llama" | "t5" => true,
        other => {
            return Err(Error::Unsupported(format!(
                "{MODEL}: {:?} tokenizers are not supported (gpt2, llama and t5 are)",
                spm::clip(other)
            )));
        }
    };

    let t5 = model == "t5";
    let mut roles = Roles::default();
    // SentencePiece files rarely state these; its own defaults are 0 unknown, 1 beginning, 2 end.
    let role = |key: &str, default: u32| {
        let known = metadata.contains_key(key) || !sentencepiece || default as usize >= vocab.len();
        if known { file.id(key, vocab.len()) } else { Ok(Some(default)) }
    };
    // T5's are 0 padding, 1 end, 2 unknown, and it has no beginning.
    let bos = "tokenizer.ggml.bos_token_id";
    roles.bos = if t5 { file.id(bos, vocab.len())? } else { role(bos, 1)? };
    roles.eos = role("tokenizer.ggml.eos_token_id", if t5 { 1 } else { 2 })?;
    let unknown = role("tokenizer.ggml.unknown_token_id", if t5 { 2 } else { 0 })?;
    roles.end_of_generation.extend(roles.eos);
    for key in ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
        roles.end_of_generation.extend(file.id(key, vocab.len())?);
    }
    for text in END_OF_GENERATION {
        let Some(id) = vocab.id(text) else { continue };
        // Some files mark these as ordinary text by mistake, and they would be printed.
        if is_unmistakable(text) || vocab.kind(id) == Some(TokenKind::Control) {
            vocab.set_kind(id, TokenKind::Control);
            roles.end_of_generation.insert(id);
        }
    }
    keep_harmony_end(&vocab, &mut roles);

    let add_space_prefix = file.flag("tokenizer.ggml.add_space_prefix")?;
    let add_bos = file.flag("tokenizer.ggml.add_bos_token")?;
    let begins;
    let add_eos = file.flag("tokenizer.ggml.add_eos_token")?.unwrap_or(t5);
    let special = SpecialTokens::default();
    let engine = if sentencepiece {
        begins = add_bos.unwrap_or(!t5);
        let scores = match metadata.get(SCORES) {
            None => return Err(missing(SCORES, "a SentencePiece vocabulary needs scores")),
            Some(value) => file.floats(SCORES, value, vocab.len())?,
        };
        spm::check_scores(&vocab, &scores)?;
        if t5 || unigram::is_unigram(&vocab, &scores) {
            file.no_character_map()?;
            let mut unigram = Unigram::new(&vocab, &scores, unknown);
            unigram.add_space_prefix = add_space_prefix.unwrap_or(!t5);
            unigram.remove_extra_whitespaces = file.flag(EXTRA_SPACES)?.unwrap_or(false);
            Engine::Unigram { vocab, special, unigram }
        } else {
            let spm = Spm::new(&vocab, &scores, unknown);
            Engine::Spm { vocab, special, spm, add_space_prefix: add_space_prefix.unwrap_or(true) }
        }
    } else {
        let (pre, traits) =
            PreTokenizer::named(file.string(PRE)?.filter(|pre| !pre.is_empty()).unwrap_or("default"))?;
        begins = add_bos.unwrap_or(traits.add_bos);
        let merges = match metadata.get(MERGES) {
            None => return Err(missing(MERGES, "a byte-pair vocabulary needs merges")),
            Some(value) => file.strings(MERGES, value)?,
        };
        if merges.is_empty() {
            return Err(missing(MERGES, "a byte-pair vocabulary needs merges, and the list is empty"));
        }
        let bpe = Bpe::new(&vocab, &merges, traits.ignore_merges)?;
        Engine::Bpe { vocab, special, pre, bpe }
    };
    for (wanted, id, name) in [(begins, roles.bos, "bos"), (add_eos, roles.eos, "eos")] {
        if wanted && id.is_none() {
            return Err(missing(
                &format!("tokenizer.ggml.{name}_token_id"),
                &format!("the file asks for the {name} token on every text, but does not name it"),
            ));
        }
    }
    let of = |wanted: bool, id: Option<u32>| id.filter(|_| wanted).into_iter().collect();
    let around = Around { before: of(begins, roles.bos), after: of(add_eos, roles.eos), begins_chats: true };
    Ok(Tokenizer { engine, special: roles, around })
}

/// In vocabularies with `<|return|>` and `<|call|>`, `<|end|>` closes a message inside of an answer.
fn keep_harmony_end(vocab: &Vocab, roles: &mut Roles) {
    if vocab.id("<|return|>").is_some()
        && vocab.id("<|call|>").is_some()
        && let Some(end) = vocab.id("<|end|>")
    {
        roles.end_of_generation.remove(&end);
    }
}

fn missing(key: &str, why: &str) -> Error {
    Error::format(key, format!("missing; {why}"))
}

/// Typed access that names the key in its errors.
struct Reader<'m>(&'m Metadata);

impl<'m> Reader<'m> {
    fn wrong<T>(&self, key: &str, value: &Value, wanted: &str) -> Result<T> {
        let found = match value {
            Value::Uint(_) | Value::Int(_) => "an integer",
            Value::Float(_) => "a float",
            Value::Bool(_) => "a bool",
            Value::String(_) => "a string",
            Value::Bytes(_) => "text that is not UTF-8",
            Value::Array(array) => array.what(),
        };
        Err(Error::format(key, format!("found {found}, wanted {wanted}")))
    }

    fn string(&self, key: &str) -> Result<Option<&'m str>> {
        match self.0.get(key) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(other) => self.wrong(key, other, "a string"),
        }
    }

    fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.0.get(key) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(other) => self.wrong(key, other, "a bool"),
        }
    }

    fn strings(&self, key: &str, value: &'m Value) -> Result<Vec<Cow<'m, str>>> {
        let wrong = || self.wrong(key, value, "an array of strings");
        let Some(array) = value.as_array() else { return wrong() };
        // Before anything is made of them: an entry takes more memory here than an empty string in the file.
        if array.len() > MOST_STRINGS {
            return Err(Error::format(
                key,
                format!("{} strings, at most {MOST_STRINGS} are possible", array.len()),
            ));
        }
        match array.strings() {
            Some(strings) => Ok(strings.map(raw::spelled).collect()),
            None if array.len() == 0 => Ok(Vec::new()),
            None => wrong(),
        }
    }

    fn floats(&self, key: &str, value: &'m Value, vocab: usize) -> Result<Vec<f32>> {
        let Some(array) = value.as_array() else { return self.wrong(key, value, "an array of floats") };
        if array.len() != vocab {
            return Err(Error::format(key, format!("{} scores for {vocab} tokens", array.len())));
        }
        match (array.floats(), array.ints()) {
            (Some(floats), _) => Ok(floats.collect()),
            (_, Some(ints)) => Ok(ints.map(|i| i as f32).collect()),
            _ => self.wrong(key, value, "an array of floats"),
        }
    }

    /// Refuses files whose texts are to be normalised first.
    fn no_character_map(&self) -> Result<()> {
        match self.0.get(CHARACTER_MAP) {
            Some(value) if value.as_array().is_none_or(|map| map.len() > 0) => {
                Err(Error::Unsupported(format!(
                    "{CHARACTER_MAP}: this vocabulary normalises characters (such as NFKC), which is not supported"
                )))
            }
            _ => Ok(()),
        }
    }

    /// A token id that must be in the vocabulary.
    fn id(&self, key: &str, vocab: usize) -> Result<Option<u32>> {
        let Some(value) = self.0.get(key) else { return Ok(None) };
        // Converters write "none" as -1 or 0xffff_ffff.
        if matches!(value, Value::Int(-1) | Value::Uint(0xffff_ffff)) {
            return Ok(None);
        }
        match value.as_u64() {
            Some(id) if id < vocab as u64 => Ok(Some(id as u32)),
            Some(id) => Err(Error::format(key, format!("token {id}, but the vocabulary has {vocab} tokens"))),
            None => self.wrong(key, value, "a token id"),
        }
    }

    fn kinds(&self, vocab: usize) -> Result<Vec<TokenKind>> {
        let Some(value) = self.0.get(TYPES) else { return Ok(vec![TokenKind::Normal; vocab]) };
        let Some(types) = value.as_array() else { return self.wrong(TYPES, value, "an array of integers") };
        if types.len() != vocab {
            return Err(Error::format(TYPES, format!("{} types for {vocab} tokens", types.len())));
        }
        let Some(types) = types.ints() else { return self.wrong(TYPES, value, "an array of integers") };
        types
            .enumerate()
            .map(|(id, kind)| {
                Ok(match kind {
                    0 | 1 => TokenKind::Normal,
                    2 => TokenKind::Unknown,
                    3 => TokenKind::Control,
                    4 => TokenKind::UserDefined,
                    5 => TokenKind::Unused,
                    6 => TokenKind::Byte,
                    other => {
                        return Err(Error::format(TYPES, format!("token {id} has unknown type {other}")));
                    }
                })
            })
            .collect()
    }
}
