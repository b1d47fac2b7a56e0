//! Turns the user's text into tokens, with or without the chat template.

use tandem::text::{Message, Sandbox, Tokenizer};
use tandem::{Error, Result};

use crate::cli::open::{self, Opened};
use crate::cli::progress;

/// How prompts become tokens.
pub struct Chat<'a> {
    tokenizer: Option<&'a Tokenizer>,
    template: Option<&'a str>,
    system: Option<&'a str>,
    vocab: usize,
    bos: String,
    eos: String,
}

/// Tokens of a text for random weights, which have no tokenizer: its bytes.
fn synthetic_ids(text: &str, vocab: usize) -> Vec<u32> {
    text.bytes().map(|b| (b as usize % vocab) as u32).collect()
}

impl<'a> Chat<'a> {
    /// Chat for a model; `system` is put in front of conversations without a system message.
    pub fn new(opened: &'a Opened, tokenizer: Option<&'a Tokenizer>, system: Option<&'a str>) -> Chat<'a> {
        let text = |id: fn(&Tokenizer) -> Option<u32>| {
            tokenizer.and_then(|t| id(t).and_then(|id| t.token_text(id))).unwrap_or_default()
        };
        Chat {
            tokenizer,
            template: tokenizer.and_then(|t| opened.template(t)),
            system,
            vocab: opened.model.spec.vocab,
            bos: text(Tokenizer::bos),
            eos: text(Tokenizer::eos),
        }
    }

    /// The tokens of a text without the template. Control tokens in the text are recognised, as in other programs:
    /// users who leave out the template often write its frame themselves.
    ///
    /// # Errors
    /// If the text is empty or too long, or the model lacks one of its tokens.
    pub fn raw(&self, text: &str) -> Result<Vec<u32>> {
        let ids = match self.tokenizer {
            // Most templates (and such prompts) contain the beginning-of-sequence token; never add a second one.
            Some(t) => t.encode(text, self.bos.is_empty() || !text.starts_with(&self.bos), true)?,
            None => synthetic_ids(text, self.vocab),
        };
        if ids.is_empty() {
            return Err(Error::usage("the prompt has no tokens"));
        }
        open::check_tokens(&ids, self.vocab)?;
        Ok(ids)
    }

    /// Checks tokens that the user gives as ids.
    ///
    /// # Errors
    /// If the model lacks a token.
    pub fn tokens(&self, ids: Vec<u32>) -> Result<Vec<u32>> {
        match ids.iter().find(|&&id| id as usize >= self.vocab) {
            None => Ok(ids),
            Some(id) => Err(Error::usage(format!("token {id} is outside the vocabulary of {}", self.vocab))),
        }
    }

    /// The conversation that consists of a prompt.
    pub fn conversation(&self, prompt: &str) -> Vec<Message> {
        vec![Message::new("user", prompt)]
    }

    /// The tokens of conversations, each up to the beginning of the answer. Without a template, the last message is
    /// continued unchanged.
    ///
    /// # Errors
    /// A system message, or several messages, for a model without a template. Each conversation has its own errors:
    /// those of the template, and those of [`Chat::raw`].
    pub fn answers(&self, conversations: Vec<Vec<Message>>) -> Vec<Result<Vec<u32>>> {
        let Some(template) = self.template else {
            if self.tokenizer.is_some() && !conversations.is_empty() {
                progress::detail("this model has no chat template: the prompt is continued as it is");
            }
            return conversations.iter().map(|c| self.without_template(c)).collect();
        };
        let complete = |mut messages: Vec<Message>| {
            if let Some(system) = self.system.filter(|_| messages.iter().all(|m| m.role != "system")) {
                messages.insert(0, Message::new("system", system));
            }
            messages
        };
        let conversations: Vec<_> = conversations.into_iter().map(complete).collect();
        // The template comes from the model's author, so its errors are reported as the model file's.
        let rendered =
            Sandbox::this_program().render_all(template, &conversations, true, &self.bos, &self.eos);
        let ids = |text: Result<String>| {
            let text = text?;
            if text.is_empty() {
                return Err(Error::format("chat template", "renders nothing; use --raw to do without it"));
            }
            self.raw(&text)
        };
        rendered.into_iter().map(ids).collect()
    }

    fn without_template(&self, messages: &[Message]) -> Result<Vec<u32>> {
        if self.system.is_some() {
            return Err(Error::usage("--system: this model has no chat template"));
        }
        match messages {
            [only] if only.role == "user" => self.raw(&only.content),
            _ => Err(Error::usage(
                "messages: this model has no chat template; give a prompt, or one message of the user",
            )),
        }
    }
}
