//! Where an answer is in its grammar, and the tokens that may come next.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use llguidance::Matcher;
use llguidance::toktrie::SimpleVob;

use super::reason;
use crate::{Error, Result};

/// A compiled grammar, for any number of answers.
#[derive(Clone)]
pub struct Constraint(Arc<Start>);

struct Start {
    matcher: Mutex<Matcher>,
    first: Mask,
}

impl Constraint {
    pub(super) fn new(matcher: Matcher, first: Mask) -> Constraint {
        Constraint(Arc::new(Start { matcher: Mutex::new(matcher), first }))
    }

    /// A guide for one answer. Answers share nothing that changes: what one of them takes is not taken from another.
    pub fn guide(&self) -> Guide {
        Guide(self.0.matcher.lock().unwrap_or_else(PoisonError::into_inner).deep_clone())
    }

    /// The tokens with which answers may begin.
    pub fn first(&self) -> &Mask {
        &self.0.first
    }
}

/// The same compiled grammar.
impl PartialEq for Constraint {
    fn eq(&self, other: &Constraint) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraint").finish_non_exhaustive()
    }
}

/// An answer on its way through a grammar.
pub struct Guide(Matcher);

impl Guide {
    /// Takes the answer's next token. Returns whether the answer is complete: nothing may follow.
    ///
    /// # Errors
    /// If the grammar does not allow it, or takes too many steps.
    pub fn take(&mut self, token: u32) -> Result<bool> {
        self.0.consume_token(token).map_err(failed)?;
        Ok(self.0.is_stopped())
    }

    /// The tokens that may come next; those that end the answer among them, if it may end here.
    ///
    /// # Errors
    /// If the grammar takes too many steps.
    pub fn mask(&mut self) -> Result<Mask> {
        self.0.compute_mask_or_eos().map(Mask::new).map_err(failed)
    }
}

fn failed(error: impl fmt::Display) -> Error {
    Error::Run(format!("the answer cannot be held to its grammar: {}", reason(&error.to_string())))
}

/// A set of tokens.
#[derive(Debug, Clone)]
pub struct Mask(SimpleVob);

impl Mask {
    pub(super) fn new(tokens: SimpleVob) -> Mask {
        Mask(tokens)
    }

    /// Whether a token is in it.
    pub fn allows(&self, token: u32) -> bool {
        (token as usize) < self.0.len() && self.0.is_allowed(token)
    }

    /// Excludes all other tokens: their logits become minus infinity.
    pub fn apply(&self, logits: &mut [f32]) {
        let words = self.0.as_slice();
        for (i, chunk) in logits.chunks_mut(32).enumerate() {
            let allowed = words.get(i).copied().unwrap_or(0);
            if allowed == u32::MAX {
                continue;
            }
            for (bit, logit) in chunk.iter_mut().enumerate() {
                if allowed >> bit & 1 == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }
}
