//! The tokens around a text: which, and for which kind of text.
//!
//! | text | in front | behind |
//! |---|---|---|
//! | as it is ([`Tokenizer::encode`]) | what the model expects, if asked for | likewise |
//! | a prompt without a template ([`Tokenizer::encode_prompt`]) | the same, unless the text begins with it | the same |
//! | what a chat template rendered ([`Tokenizer::encode_chat`]), folder | nothing | nothing |
//! | the same, GGUF | the beginning of a sequence, unless the text begins with it | nothing |
//! | a window of a long text ([`Tokenizer::beginning`]) | what the model expects | nothing |
//!
//! A template is the last word on a chat: in `transformers`, `apply_chat_template` adds nothing to what it rendered, whatever the
//! tokenizer's post-processor says. llama.cpp's files have their own flags instead, and it puts the beginning of a sequence in front of a
//! chat whose template left it to the tokenizer. Both may leave two of them where white space precedes the one in the text; here
//! there is never a second one (docs/decisions/0030).

use super::Tokenizer;
use crate::Result;

/// What a model expects around a text.
#[derive(Debug, Default)]
pub(super) struct Around {
    /// Usually the beginning of a sequence, or nothing.
    pub before: Vec<u32>,
    /// Usually nothing.
    pub after: Vec<u32>,
    /// Whether `before` belongs in front of a rendered chat, too.
    pub begins_chats: bool,
}

impl Tokenizer {
    /// The tokens that the model expects in front of a text.
    pub fn beginning(&self) -> &[u32] {
        &self.around.before
    }

    /// The tokens of a prompt that no template is put around. Control tokens in it count: users who leave out the template
    /// often write its frame themselves.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.begun(text)?;
        ids.extend(&self.around.after);
        Ok(ids)
    }

    /// The tokens of what a chat template rendered.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_chat(&self, text: &str) -> Result<Vec<u32>> {
        if self.around.begins_chats { self.begun(text) } else { self.encode(text, false, true) }
    }

    /// The tokens of `text` with what belongs in front of it, once.
    fn begun(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.encode(text, false, true)?;
        if let Some(&first) = self.around.before.first() {
            let written = self.token_text(first).filter(|t| !t.is_empty());
            let begins = ids.first() == Some(&first)
                || written.is_some_and(|written| text.trim_start().starts_with(&written));
            if !begins {
                ids.splice(0..0, self.around.before.iter().copied());
            }
        }
        Ok(ids)
    }
}
