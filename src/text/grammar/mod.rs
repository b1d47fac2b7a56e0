//! Answers of a form that is asked for: JSON of a schema, calls of functions, a grammar. `llguidance` says which tokens may come next.
//!
//! ```text
//! Shape ─► Grammar (Lark) ── Grammars::compile, apart ─► Constraint ── one for each answer ─► Guide: take a token, give a Mask
//! ```
//! - `shape` ([`Shape`], [`Thinking`], [`Content`], [`Calls`], [`Tool`]): what an answer may consist of, as a grammar;
//! - `elements`: calls whose arguments are elements;
//! - `harmony`: the same for answers in channels;
//! - `schema`: a JSON schema in bounds;
//! - `vocabulary`: the tokens, as the grammar sees them;
//! - `compile` ([`Grammars`]): grammars of strangers become constraints, within limits of steps and memory;
//! - `guide` ([`Constraint`], [`Guide`], [`Mask`]): where an answer is in its grammar.

mod compile;
mod elements;
mod guide;
mod harmony;
mod schema;
mod shape;
mod vocabulary;

pub use compile::Grammars;
pub use guide::{Constraint, Guide, Mask};
pub use shape::{Calls, Content, Shape, Thinking, Tool};

use crate::Result;

/// A grammar in llguidance's dialect of Lark.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grammar(String);

impl Grammar {
    /// A grammar with a rule `start`.
    pub fn lark(text: impl Into<String>) -> Grammar {
        Grammar(text.into())
    }
}

impl Shape {
    /// The grammar.
    ///
    /// # Errors
    /// If a schema is none, or out of bounds.
    pub fn grammar(&self) -> Result<Grammar> {
        let rules = match self.thinking {
            Thinking::Channels => harmony::rules(self, false),
            Thinking::InMessage => harmony::rules(self, true),
            Thinking::None | Thinking::Possible | Thinking::Begun => self.rules(),
        };
        Ok(Grammar(rules?.join("\n")))
    }
}

/// Most characters of a reason.
const LONGEST_REASON: usize = 400;

/// The library's reason, in one line of bounded length.
fn reason(text: &str) -> String {
    let text = text.split("<backtrace>").next().unwrap_or_default().replace("<non-verbose/>", "");
    let mut words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if let Some((end, _)) = words.char_indices().nth(LONGEST_REASON) {
        words.truncate(end);
        words.push('…');
    }
    words
}
