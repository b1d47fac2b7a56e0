//! The model of a `tokenizer.json`. BPE and WordLevel are the crate's; the other two are the crate's algorithms with
//! memory in proportion to the file, and steps that are counted.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use tokenizers::Model as _;
use tokenizers::models::bpe::{BPE, BpeBuilder, Merges, Vocab};
use tokenizers::models::unigram::UnigramTrainer;
use tokenizers::models::wordlevel::{WordLevel, WordLevelBuilder};
use tokenizers::models::wordpiece::{WordPiece, WordPieceBuilder};
use tokenizers::models::{ModelWrapper, TrainerWrapper};

use super::budget::Steps;
use super::file::{self, AnyVocab};
use super::unigram::HfUnigram;

/// Longest mark at the beginning or the end of a subword. Every character of a text is looked up with it, and may
/// become as many tokens.
const MAX_MARK: usize = 16;

#[derive(Debug)]
pub(super) enum Model {
    Bpe(BPE),
    WordPiece(WordPiece),
    WordLevel(WordLevel),
    Unigram(HfUnigram),
}

impl Model {
    /// # Errors
    /// What is wrong with `model`.
    pub(super) fn new(model: file::Model) -> Result<Model, String> {
        let kind = match (&model.kind, &model.vocab) {
            (Some(kind), _) => kind.as_str(),
            // Old files do not say.
            (None, Some(AnyVocab::Scores(_))) => "Unigram",
            _ if model.merges.is_some() => "BPE",
            _ if model.max_input_chars_per_word.is_some() => "WordPiece",
            _ => "WordLevel",
        };
        for (key, mark) in [
            ("continuing_subword_prefix", &model.continuing_subword_prefix),
            ("end_of_word_suffix", &model.end_of_word_suffix),
        ] {
            if mark.as_ref().is_some_and(|mark| mark.len() > MAX_MARK) {
                return Err(format!("model.{key} is longer than {MAX_MARK} bytes"));
            }
        }
        match kind {
            "BPE" => bpe(model),
            "WordPiece" => {
                let builder = WordPieceBuilder::default()
                    .vocab(ids(model.vocab)?)
                    .unk_token(need(model.unk_token, "unk_token")?)
                    .continuing_subword_prefix(need(
                        model.continuing_subword_prefix,
                        "continuing_subword_prefix",
                    )?)
                    .max_input_chars_per_word(need(
                        model.max_input_chars_per_word,
                        "max_input_chars_per_word",
                    )?);
                Ok(Model::WordPiece(builder.build().map_err(|e| format!("model: {e}"))?))
            }
            "WordLevel" => {
                let builder = WordLevelBuilder::default()
                    .vocab(ids(model.vocab)?)
                    .unk_token(need(model.unk_token, "unk_token")?);
                Ok(Model::WordLevel(builder.build().map_err(|e| format!("model: {e}"))?))
            }
            "Unigram" => match model.vocab {
                Some(AnyVocab::Scores(vocab)) => {
                    let unigram = HfUnigram::new(vocab, model.unk_id, model.byte_fallback);
                    unigram.map(Model::Unigram).map_err(|e| format!("model: {e}"))
                }
                _ => Err("model.vocab is no list of tokens and scores".into()),
            },
            _ => Err(format!(
                "model.type is {:?}, not BPE, WordPiece, WordLevel or Unigram",
                kind.chars().take(40).collect::<String>()
            )),
        }
    }

    /// Appends the tokens of a piece of text, which is not empty.
    ///
    /// # Errors
    /// If the vocabulary lacks what the piece needs.
    pub(super) fn tokenize(&self, piece: &str, out: &mut Vec<u32>) -> Result<(), String> {
        let tokens = match self {
            Model::Bpe(bpe) => bpe.tokenize(piece),
            Model::WordLevel(words) => words.tokenize(piece),
            Model::WordPiece(words) => return word_piece(words, piece, out),
            Model::Unigram(unigram) => return unigram.tokenize(piece, out),
        };
        out.extend(tokens.map_err(|e| format!("model: {e}"))?.iter().map(|token| token.id));
        Ok(())
    }

    pub(super) fn token_to_id(&self, token: &str) -> Option<u32> {
        match self {
            Model::Bpe(bpe) => bpe.token_to_id(token),
            Model::WordPiece(words) => words.token_to_id(token),
            Model::WordLevel(words) => words.token_to_id(token),
            Model::Unigram(unigram) => unigram.token_to_id(token),
        }
    }

    pub(super) fn id_to_token(&self, id: u32) -> Option<String> {
        match self {
            Model::Bpe(bpe) => bpe.id_to_token(id),
            Model::WordPiece(words) => words.id_to_token(id),
            Model::WordLevel(words) => words.id_to_token(id),
            Model::Unigram(unigram) => unigram.id_to_token(id).map(str::to_owned),
        }
    }

    pub(super) fn vocab_size(&self) -> usize {
        match self {
            Model::Bpe(bpe) => bpe.get_vocab_size(),
            Model::WordPiece(words) => words.get_vocab_size(),
            Model::WordLevel(words) => words.get_vocab_size(),
            Model::Unigram(unigram) => unigram.vocab_size(),
        }
    }
}

fn need<T>(value: Option<T>, key: &str) -> Result<T, String> {
    value.ok_or_else(|| format!("model.{key} is missing"))
}

fn ids(vocab: Option<AnyVocab>) -> Result<Vocab, String> {
    match vocab {
        Some(AnyVocab::Ids(vocab)) => Ok(vocab),
        Some(AnyVocab::Scores(_)) => Err("model.vocab has scores, not ids".into()),
        None => Err("model.vocab is missing".into()),
    }
}

fn bpe(model: file::Model) -> Result<Model, String> {
    let vocab = ids(model.vocab)?;
    let merges = need(model.merges, "merges")?;
    // Encoding would be a matter of luck.
    if model.dropout.is_some_and(|dropout| dropout != 0.0) {
        return Err("model.dropout is for training, and must be null".into());
    }
    let prefix = model.continuing_subword_prefix.unwrap_or_default();
    check_merges(&vocab, &merges, &prefix)?;
    let mut builder = BpeBuilder::new()
        .vocab_and_merges(vocab, merges)
        .fuse_unk(model.fuse_unk)
        .byte_fallback(model.byte_fallback)
        .ignore_merges(model.ignore_merges)
        // An empty prefix is the same as none.
        .continuing_subword_prefix(prefix);
    if let Some(unk) = model.unk_token {
        builder = builder.unk_token(unk);
    }
    if let Some(suffix) = model.end_of_word_suffix {
        builder = builder.end_of_word_suffix(suffix);
    }
    Ok(Model::Bpe(builder.build().map_err(|e| format!("model.merges: {e}"))?))
}

/// The crate joins merges in a buffer as long as the longest token, and cuts the prefix off without a look.
fn check_merges(vocab: &Vocab, merges: &Merges, prefix: &str) -> Result<(), String> {
    let longest = vocab.keys().map(String::len).max().unwrap_or(0);
    for (i, (a, b)) in merges.iter().enumerate() {
        if !b.starts_with(prefix) {
            return Err(format!(
                "model.merges: the second token of number {i} lacks continuing_subword_prefix"
            ));
        }
        if a.len() + b.len() - prefix.len() > longest {
            return Err(format!("model.merges: number {i} makes no token"));
        }
    }
    Ok(())
}

/// Greedily from the left, the longest token at each place, as the crate does.
fn word_piece(model: &WordPiece, word: &str, out: &mut Vec<u32>) -> Result<(), String> {
    let unknown = || {
        let unk = model.token_to_id(&model.unk_token);
        unk.ok_or_else(|| String::from("model: the vocabulary lacks unk_token, which this text needs"))
    };
    if word.chars().count() > model.max_input_chars_per_word {
        out.push(unknown()?);
        return Ok(());
    }
    let before = out.len();
    let mut steps = Steps::new();
    let mut start = 0;
    let mut looked_up = String::new();
    while start < word.len() {
        let mut end = word.len();
        looked_up.clear();
        if start > 0 {
            looked_up.push_str(&model.continuing_subword_prefix);
        }
        looked_up.push_str(&word[start..]);
        loop {
            steps.take(1 + looked_up.len() as u64 / 16);
            if let Some(id) = model.token_to_id(&looked_up) {
                out.push(id);
                break;
            }
            let Some(last) = word[start..end].chars().next_back() else { break };
            end -= last.len_utf8();
            if end == start {
                break;
            }
            looked_up.truncate(looked_up.len() - last.len_utf8());
        }
        if end == start {
            out.truncate(before);
            out.push(unknown()?);
            return Ok(());
        }
        start = end;
    }
    Ok(())
}

/// For the crate's added vocabulary, which asks for tokens and how many there are.
impl tokenizers::Model for Model {
    type Trainer = TrainerWrapper;

    fn tokenize(&self, piece: &str) -> tokenizers::Result<Vec<tokenizers::Token>> {
        let mut ids = Vec::new();
        Model::tokenize(self, piece, &mut ids)?;
        let value = |id| Model::id_to_token(self, id).unwrap_or_default();
        Ok(ids.into_iter().map(|id| tokenizers::Token::new(id, value(id), (0, piece.len()))).collect())
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        Model::token_to_id(self, token)
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        Model::id_to_token(self, id)
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        let ids = 0..self.get_vocab_size() as u32;
        ids.filter_map(|id| Some((Model::id_to_token(self, id)?, id))).collect()
    }

    fn get_vocab_size(&self) -> usize {
        self.vocab_size()
    }

    fn save(&self, _: &Path, _: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        Err("tokenizers are only read here".into())
    }

    fn get_trainer(&self) -> TrainerWrapper {
        match self {
            Model::Bpe(bpe) => ModelWrapper::from(bpe.clone()).get_trainer(),
            _ => TrainerWrapper::UnigramTrainer(UnigramTrainer::default()),
        }
    }
}
