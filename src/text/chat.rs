//! Turns what a user writes into tokens, with or without the chat template: a text, a conversation.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::calls::{CallFormat, Channels, Control, MARKERS, THINK, UNTHINK, arrange};
use super::{ChatTemplate, Conversation, Json, Message, Sandbox, Tokenizer};
use crate::{Error, Result};

/// How prompts become tokens.
#[derive(Debug, Clone)]
pub struct Chat {
    tokenizer: Option<Arc<Tokenizer>>,
    template: Option<String>,
    sandbox: Sandbox,
    system: Option<String>,
    /// The user's variables of the template.
    variables: Vec<(String, Json)>,
    vocab: usize,
    bos: String,
    eos: String,
}

/// The tokens of conversations.
#[derive(Debug)]
pub struct Prompts {
    /// Those of each conversation, or why it has none.
    pub tokens: Vec<Result<Vec<u32>>>,
    /// What has no effect on them, in sentences.
    pub notes: Vec<String>,
}

/// Tokens at the end of a prompt in which `<think>` is looked for: it may be spelled, with space behind it.
const TAIL: usize = 16;

/// Tokens of a text for random weights, which have no tokenizer: its bytes.
fn synthetic_ids(text: &str, vocab: usize) -> Vec<u32> {
    text.bytes().map(|b| (b as usize % vocab) as u32).collect()
}

/// Whether a template has a name in it, by itself.
fn mentions(template: &str, name: &str) -> bool {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    template
        .match_indices(name)
        .any(|(at, _)| !template[..at].ends_with(part) && !template[at + name.len()..].starts_with(part))
}

impl Chat {
    /// Chat for a model with a vocabulary of `vocab` and the chat template `template`, by default one that its special tokens
    /// imply. A model without a tokenizer (random weights) takes the bytes of a text as its tokens.
    pub fn new(tokenizer: Option<Arc<Tokenizer>>, template: Option<&str>, vocab: usize) -> Chat {
        let text = |id: fn(&Tokenizer) -> Option<u32>| {
            tokenizer.as_deref().and_then(|t| id(t).and_then(|id| t.token_text(id))).unwrap_or_default()
        };
        let (bos, eos) = (text(Tokenizer::bos), text(Tokenizer::eos));
        let own = |t: &Tokenizer| template.or_else(|| ChatTemplate::fallback(t)).map(str::to_owned);
        let template = tokenizer.as_deref().and_then(own);
        let (system, variables) = (None, Vec::new());
        Chat { tokenizer, template, sandbox: Sandbox::this_program(), system, variables, vocab, bos, eos }
    }

    /// With `text` in front of conversations without a system message, if there is one.
    #[must_use]
    pub fn with_system(mut self, text: Option<&str>) -> Chat {
        self.system = text.map(str::to_owned);
        self
    }

    /// With variables that reach the template.
    #[must_use]
    pub fn with_variables(mut self, variables: Vec<(String, Json)>) -> Chat {
        self.variables = variables;
        self
    }

    /// With another sandbox than this program's.
    #[must_use]
    pub fn in_sandbox(mut self, sandbox: Sandbox) -> Chat {
        self.sandbox = sandbox;
        self
    }

    /// The chat template, if there is one.
    pub fn template(&self) -> Option<&str> {
        self.template.as_deref()
    }

    /// Whether the model has a chat template.
    pub fn has_template(&self) -> bool {
        self.template.is_some()
    }

    /// Whether the template has `name` in it.
    pub fn mentions(&self, name: &str) -> bool {
        self.template.as_deref().is_some_and(|template| mentions(template, name))
    }

    /// Whether the template shows functions to the model.
    pub fn shows_tools(&self) -> bool {
        self.mentions("tools")
    }

    /// How the model writes calls of functions: as its template asks for, or, where the template has no place for functions, as
    /// [`tell`](super::tell) does. `None` without a template, or if its way of writing is not known.
    pub fn call_format(&self) -> Option<CallFormat> {
        let template = self.template.as_deref()?;
        let format = if self.shows_tools() { CallFormat::of(template)? } else { CallFormat::Hermes };
        (format != CallFormat::Harmony || self.controls().is_some()).then_some(format)
    }

    /// The control tokens of harmony, if the template writes it and the vocabulary has them.
    fn controls(&self) -> Option<Arc<[(u32, Control)]>> {
        self.template.as_deref().filter(|template| Control::is_in(template))?;
        let tokenizer = self.tokenizer.as_deref()?;
        let id = |text| tokenizer.token_id(text).filter(|&id| tokenizer.is_special(id));
        let known: Vec<_> = Control::ALL.iter().map(|&(control, text)| (id(text), control)).collect();
        let complete = known[..Control::NEEDED].iter().all(|(id, _)| id.is_some());
        complete.then(|| known.into_iter().filter_map(|(id, control)| Some((id?, control))).collect())
    }

    /// Whether answers come in channels, as harmony has them (gpt-oss).
    pub fn has_channels(&self) -> bool {
        self.controls().is_some()
    }

    /// How the answer to a prompt is split, if it comes in channels; with calls, or with their texts as content.
    pub fn channels(&self, prompt: &[u32], calls: bool) -> Option<Channels> {
        self.controls().map(|ids| Channels::behind(prompt, ids, calls))
    }

    /// Whether answers may begin with reasoning between `<think>` and `</think>`.
    pub fn thinks(&self) -> bool {
        self.template.as_deref().is_some_and(|template| template.contains(UNTHINK))
    }

    /// Whether a prompt ends inside of reasoning: the template has begun it.
    pub fn has_begun_thinking(&self, prompt: &[u32]) -> bool {
        let Some(tokenizer) = self.tokenizer.as_deref().filter(|_| self.thinks()) else { return false };
        let tail = &prompt[prompt.len().saturating_sub(TAIL)..];
        tokenizer.decode(tail, false).trim_end().ends_with(THINK)
    }

    /// Control tokens that are markers in the text of answers.
    pub fn markers(&self) -> Arc<[u32]> {
        let tokenizer = self.tokenizer.as_deref();
        let special = |t: &Tokenizer, text| t.token_id(text).filter(|&id| t.is_special(id));
        MARKERS.iter().filter_map(|text| special(tokenizer?, text)).collect()
    }

    /// The tokens of a text without the template. Control tokens in the text are recognised, as in other programs:
    /// users who leave out the template often write its frame themselves.
    ///
    /// # Errors
    /// If the text is empty or too long, or the model lacks one of its tokens.
    pub fn raw(&self, text: &str) -> Result<Vec<u32>> {
        let ids = match &self.tokenizer {
            Some(t) => t.encode_prompt(text)?,
            None => synthetic_ids(text, self.vocab),
        };
        self.checked(ids)
    }

    fn checked(&self, ids: Vec<u32>) -> Result<Vec<u32>> {
        if ids.is_empty() {
            return Err(Error::usage("the prompt has no tokens"));
        }
        check_tokens(&ids, self.vocab)?;
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

    /// Messages to answer, with the user's variables.
    pub fn conversation(&self, messages: Vec<Message>) -> Conversation {
        Conversation { variables: self.variables.clone(), ..Conversation::new(messages) }
    }

    /// The tokens of conversations, each up to the beginning of the answer. Without a template, the last message is
    /// continued unchanged.
    ///
    /// # Errors
    /// A system message, several messages, tools or variables, for a model without a template. Each conversation has its
    /// own errors: those of the template, tools that the template does not show, and those of [`Chat::raw`].
    pub fn answers(&self, conversations: Vec<Conversation>) -> Prompts {
        let Some(template) = self.template.as_deref() else {
            let tells = self.tokenizer.is_some() && !conversations.is_empty();
            let note = "this model has no chat template: the prompt is continued as it is";
            let notes = tells.then(|| note.to_owned()).into_iter().collect();
            return Prompts {
                tokens: conversations.iter().map(|c| self.without_template(c)).collect(),
                notes,
            };
        };
        let mut refused = Vec::with_capacity(conversations.len());
        let mut complete = Vec::with_capacity(conversations.len());
        let mut unused = BTreeSet::new();
        let has_channels = self.has_channels();
        for mut one in conversations {
            if has_channels {
                arrange(&mut one);
            }
            if let Some(system) =
                self.system.as_deref().filter(|_| one.messages.iter().all(|m| m.role() != "system"))
            {
                one.messages.insert(0, Message::new("system", system));
            }
            unused.extend(one.variables.iter().map(|v| v.0.clone()).filter(|name| !mentions(template, name)));
            let hidden = [("tools", one.tools.is_some()), ("documents", one.documents.is_some())];
            let hidden = hidden.into_iter().find(|(name, given)| *given && !mentions(template, name));
            refused.push(hidden.map(|(name, _)| {
                Error::usage(format!("{name}: this model's chat template does not show any to the model"))
            }));
            complete.push(one);
        }
        let unused = unused.into_iter();
        let notes = unused
            .map(|name| format!("the chat template has no variable {name}: it has no effect"))
            .collect();
        // The template comes from the model's author, so its errors are reported as the model file's.
        let rendered = self.sandbox.render_all(template, &complete, &self.bos, &self.eos);
        let ids = |(text, refused): (Result<String>, Option<Error>)| {
            let text = refused.map_or(text, Err)?;
            if text.is_empty() {
                return Err(Error::format("chat template", "renders nothing; use `raw` to do without it"));
            }
            match &self.tokenizer {
                Some(t) => self.checked(t.encode_chat(&text)?),
                None => self.raw(&text),
            }
        };
        Prompts { tokens: rendered.into_iter().zip(refused).map(ids).collect(), notes }
    }

    fn without_template(&self, conversation: &Conversation) -> Result<Vec<u32>> {
        let needs_one = [
            ("`system`", self.system.is_some()),
            ("tools", conversation.tools.is_some()),
            ("documents", conversation.documents.is_some()),
            ("continue_final_message", conversation.continue_final_message),
        ];
        if let Some((name, _)) = needs_one.iter().find(|(_, given)| *given) {
            return Err(Error::usage(format!("{name}: this model has no chat template")));
        }
        if let Some((name, _)) = conversation.variables.first() {
            return Err(Error::usage(format!("variable {name}: this model has no chat template")));
        }
        match &conversation.messages[..] {
            [only] if only.role() == "user" => self.raw(&only.text()),
            _ => Err(Error::usage(
                "messages: this model has no chat template; give a prompt, or one message of the user",
            )),
        }
    }
}

/// Returns an error for tokens without a row in the model, as from a tokenizer of another model.
pub fn check_tokens(ids: &[u32], vocab: usize) -> Result<()> {
    match ids.iter().find(|&&id| id as usize >= vocab) {
        None => Ok(()),
        Some(id) => Err(Error::format(
            "tokenizer",
            format!("gives token {id}, the model has {vocab}; do tokenizer and weights belong together?"),
        )),
    }
}
