//! `tokenizer.json`, read once into types of our own: the crate's own reader takes it through several generic forms,
//! and panics on some files.

use std::fmt;

use serde::de::{
    self, Deserialize, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor,
};
use serde_json::Value as Json;
use tokenizers::models::bpe::{Merges, Vocab};

/// Ids must be lower than this. The largest vocabularies have less than a million tokens.
const MAX_ID: u32 = 1 << 24;

/// Everything that encoding needs. Truncation and padding are those of a training run, and are ignored.
#[derive(Default)]
pub(super) struct File {
    pub(super) added_tokens: Vec<Added>,
    pub(super) normalizer: Option<Json>,
    pub(super) pre_tokenizer: Option<Json>,
    pub(super) post_processor: Option<Json>,
    pub(super) decoder: Option<Json>,
    pub(super) model: Option<Model>,
}

/// An entry of `added_tokens`. The crate numbers those that the model does not know itself.
#[derive(serde::Deserialize)]
pub(super) struct Added {
    #[serde(rename = "id")]
    _id: u32,
    pub(super) content: String,
    pub(super) single_word: bool,
    pub(super) lstrip: bool,
    pub(super) rstrip: bool,
    pub(super) normalized: bool,
    pub(super) special: bool,
}

/// All that any kind of model has.
#[derive(Default)]
pub(super) struct Model {
    pub(super) kind: Option<String>,
    pub(super) vocab: Option<AnyVocab>,
    pub(super) merges: Option<Merges>,
    pub(super) unk_token: Option<String>,
    pub(super) unk_id: Option<usize>,
    pub(super) dropout: Option<f32>,
    pub(super) continuing_subword_prefix: Option<String>,
    pub(super) end_of_word_suffix: Option<String>,
    pub(super) fuse_unk: bool,
    pub(super) byte_fallback: bool,
    pub(super) ignore_merges: bool,
    pub(super) max_input_chars_per_word: Option<usize>,
}

pub(super) enum AnyVocab {
    /// Tokens and their ids.
    Ids(Vocab),
    /// Tokens and their scores, in the order of their ids.
    Scores(Vec<(String, f64)>),
}

/// Puts the key before what is wrong with its value.
fn at<'de, T: Deserialize<'de>, A: MapAccess<'de>>(map: &mut A, key: &str) -> Result<T, A::Error> {
    map.next_value().map_err(|e| de::Error::custom(format!("{key}: {e}")))
}

/// [`at`], and nothing if the value is null.
fn maybe<'de, T: Deserialize<'de>, A: MapAccess<'de>>(map: &mut A, key: &str) -> Result<Option<T>, A::Error> {
    at(map, key)
}

impl<'de> Deserialize<'de> for File {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Keys;
        impl<'de> Visitor<'de> for Keys {
            type Value = File;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<File, A::Error> {
                let mut file = File::default();
                while let Some(key) = map.next_key::<String>()? {
                    match key.as_str() {
                        "version" => {
                            let version: String = at(&mut map, &key)?;
                            if version != "1.0" {
                                let shown: String = version.chars().take(20).collect();
                                return Err(de::Error::custom(format!("version: {shown:?}, not \"1.0\"")));
                            }
                        }
                        "added_tokens" => file.added_tokens = at(&mut map, &key)?,
                        "normalizer" => file.normalizer = maybe(&mut map, &key)?,
                        "pre_tokenizer" => file.pre_tokenizer = maybe(&mut map, &key)?,
                        "post_processor" => file.post_processor = maybe(&mut map, &key)?,
                        "decoder" => file.decoder = maybe(&mut map, &key)?,
                        "model" => file.model = Some(at(&mut map, &key)?),
                        _ => {
                            map.next_value::<IgnoredAny>()?;
                        }
                    }
                }
                Ok(file)
            }
        }
        deserializer.deserialize_map(Keys)
    }
}

impl<'de> Deserialize<'de> for Model {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Keys;
        impl<'de> Visitor<'de> for Keys {
            type Value = Model;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Model, A::Error> {
                let mut model = Model::default();
                while let Some(key) = map.next_key::<String>()? {
                    match key.as_str() {
                        "type" => model.kind = Some(at(&mut map, &key)?),
                        "vocab" => model.vocab = Some(at(&mut map, &key)?),
                        "merges" => model.merges = Some(at::<AllMerges, A>(&mut map, &key)?.0),
                        "unk_token" => model.unk_token = maybe(&mut map, &key)?,
                        "unk_id" => model.unk_id = maybe(&mut map, &key)?,
                        "dropout" => model.dropout = maybe(&mut map, &key)?,
                        "continuing_subword_prefix" => {
                            model.continuing_subword_prefix = maybe(&mut map, &key)?;
                        }
                        "end_of_word_suffix" => model.end_of_word_suffix = maybe(&mut map, &key)?,
                        "fuse_unk" => model.fuse_unk = maybe(&mut map, &key)?.unwrap_or(false),
                        "byte_fallback" => model.byte_fallback = maybe(&mut map, &key)?.unwrap_or(false),
                        "ignore_merges" => model.ignore_merges = maybe(&mut map, &key)?.unwrap_or(false),
                        "max_input_chars_per_word" => {
                            model.max_input_chars_per_word = maybe(&mut map, &key)?;
                        }
                        _ => {
                            map.next_value::<IgnoredAny>()?;
                        }
                    }
                }
                Ok(model)
            }
        }
        deserializer.deserialize_map(Keys)
    }
}

impl<'de> Deserialize<'de> for AnyVocab {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Tokens;
        impl<'de> Visitor<'de> for Tokens {
            type Value = AnyVocab;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("tokens with ids or scores")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<AnyVocab, A::Error> {
                let mut vocab = Vocab::new();
                while let Some(token) = map.next_key::<String>()? {
                    let id: u32 = map.next_value()?;
                    if id >= MAX_ID {
                        let shown: String = token.chars().take(40).collect();
                        return Err(de::Error::custom(format!(
                            "token {shown:?} has id {id}, which is more than any vocabulary has tokens"
                        )));
                    }
                    vocab.insert(token, id);
                }
                Ok(AnyVocab::Ids(vocab))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<AnyVocab, A::Error> {
                let mut vocab = Vec::new();
                while let Some(token) = list.next_element()? {
                    vocab.push(token);
                }
                Ok(AnyVocab::Scores(vocab))
            }
        }
        deserializer.deserialize_any(Tokens)
    }
}

/// Merges, each spelled `"a b"` or `["a", "b"]`, all of them in the same way.
struct AllMerges(Merges);

impl<'de> Deserialize<'de> for AllMerges {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List;
        impl<'de> Visitor<'de> for List {
            type Value = AllMerges;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<AllMerges, A::Error> {
                let mut merges = Merges::new();
                let mut seed = Merge { pairs: None };
                while let Some(merge) = list.next_element_seed(&mut seed)? {
                    merges.extend(merge);
                }
                Ok(AllMerges(merges))
            }
        }
        deserializer.deserialize_seq(List)
    }
}

/// One merge; none if it is the comment that old files begin with.
struct Merge {
    /// Whether the first one was spelled as a pair.
    pairs: Option<bool>,
}

impl Merge {
    fn spelled<E: de::Error>(&mut self, pair: bool) -> Result<(), E> {
        if *self.pairs.get_or_insert(pair) == pair {
            return Ok(());
        }
        Err(E::custom("some are texts and some are pairs"))
    }
}

impl<'de> DeserializeSeed<'de> for &mut Merge {
    type Value = Option<(String, String)>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for &mut Merge {
    type Value = Option<(String, String)>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("two tokens with a space between them, or a list of two tokens")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
        self.spelled(false)?;
        if text.starts_with("#version") {
            return Ok(None);
        }
        match text.split_once(' ') {
            Some((a, b)) if !b.contains(' ') => Ok(Some((a.to_owned(), b.to_owned()))),
            _ => {
                Err(E::invalid_value(de::Unexpected::Str(&text.chars().take(40).collect::<String>()), &self))
            }
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        self.spelled(true)?;
        let pair = (list.next_element()?, list.next_element()?, list.next_element::<IgnoredAny>()?);
        match pair {
            (Some(a), Some(b), None) => Ok(Some((a, b))),
            _ => Err(de::Error::invalid_length(if pair.2.is_some() { 3 } else { 1 }, &self)),
        }
    }
}
