//! The vocabulary: token texts in one arena, and a hash table from text to id.
//!
//! A `HashMap<String, u32>` of Gemma's 262 144 tokens costs a quarter million allocations before
//! the first token can be printed. Here the texts lie end to end in one buffer, and the table is
//! one array of ids that compares against that buffer.

use super::hash::Hash;
use crate::{Error, Result};

/// The kind of a token in the model file (`tokenizer.ggml.token_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenKind {
    /// Ordinary text.
    Normal,
    /// The token for text that cannot be encoded.
    Unknown,
    /// Steers the model (`<|im_start|>`, `<bos>`); never printed, matched only on request.
    Control,
    /// Added text that is always matched whole, and printed.
    UserDefined,
    /// Reserved.
    Unused,
    /// One raw byte, written `<0xNN>`.
    Byte,
}

/// The longest text a single token may have. Real ones stay below 1 KiB.
const MAX_TOKEN_LEN: usize = 1 << 16;
const EMPTY: u32 = u32::MAX;

/// Token texts by id and ids by text.
#[derive(Debug)]
pub struct Vocab {
    arena: String,
    ends: Vec<u32>,
    kinds: Vec<TokenKind>,
    table: Vec<u32>,
    hash: Hash,
    longest: usize,
}

impl Vocab {
    /// Indexes `tokens`; `kinds` has one entry each. Empty texts keep their id and match nothing.
    pub fn new(tokens: &[impl AsRef<str>], kinds: Vec<TokenKind>) -> Result<Vocab> {
        let bad = |problem: String| Error::format("tokenizer vocabulary", problem);
        assert_eq!(tokens.len(), kinds.len(), "a kind per token");
        let total: usize = tokens.iter().map(|t| t.as_ref().len()).sum();
        if tokens.is_empty() {
            return Err(bad("it has no tokens".into()));
        }
        if total >= u32::MAX as usize || tokens.len() >= EMPTY as usize / 2 {
            return Err(bad(format!("{} tokens of {total} bytes in all are too many", tokens.len())));
        }
        let mut vocab = Vocab {
            arena: String::with_capacity(total),
            ends: Vec::with_capacity(tokens.len()),
            kinds,
            table: vec![EMPTY; (tokens.len() * 2).next_power_of_two()],
            hash: Hash::new(),
            longest: 0,
        };
        for (id, token) in tokens.iter().map(AsRef::as_ref).enumerate() {
            if token.len() > MAX_TOKEN_LEN {
                let n = token.len();
                return Err(bad(format!("token {id} is {n} bytes long, more than {MAX_TOKEN_LEN}")));
            }
            vocab.arena.push_str(token);
            vocab.ends.push(vocab.arena.len() as u32);
            vocab.longest = vocab.longest.max(token.len());
            if token.is_empty() {
                continue;
            }
            match vocab.slot(token) {
                Err(free) => vocab.table[free] = id as u32,
                Ok(first) => {
                    let text: String = token.chars().take(40).collect();
                    return Err(bad(format!("tokens {first} and {id} are both {text:?}")));
                }
            }
        }
        Ok(vocab)
    }

    /// The id with this text, or the free slot where it would go.
    fn slot(&self, text: &str) -> Result<u32, usize> {
        let mask = self.table.len() - 1;
        let mut at = self.hash.bytes(text.as_bytes()) as usize & mask;
        loop {
            match self.table[at] {
                EMPTY => return Err(at),
                id if self.text(id) == text => return Ok(id),
                _ => at = (at + 1) & mask,
            }
        }
    }

    /// The id of the token with exactly this text.
    pub fn id(&self, text: &str) -> Option<u32> {
        if text.is_empty() || text.len() > self.longest { None } else { self.slot(text).ok() }
    }

    /// The text of token `id`, which must exist.
    pub fn text(&self, id: u32) -> &str {
        let id = id as usize;
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.arena[start as usize..self.ends[id] as usize]
    }

    /// The text of token `id`, if there is such a token.
    pub fn get(&self, id: u32) -> Option<&str> {
        ((id as usize) < self.len()).then(|| self.text(id))
    }

    /// The kind of token `id`, if there is such a token.
    pub fn kind(&self, id: u32) -> Option<TokenKind> {
        self.kinds.get(id as usize).copied()
    }

    /// Overrides the kind of a token that must exist.
    pub fn set_kind(&mut self, id: u32, kind: TokenKind) {
        self.kinds[id as usize] = kind;
    }

    /// All kinds, by id.
    pub fn kinds(&self) -> &[TokenKind] {
        &self.kinds
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.ends.len()
    }
}
