//! The shape of a layer's attention, and the rows of a sequence that it computes.

use std::ops::Range;

use crate::{Error, Result};

/// The shape of attention in one kind of layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttnShape {
    /// Query heads; a multiple of `n_kv_heads`.
    pub n_heads: usize,
    /// KV heads.
    pub n_kv_heads: usize,
    /// Elements per head, a multiple of 16.
    pub head_dim: usize,
    /// Factor of the scores, usually 1/√head_dim.
    pub scale: f32,
    /// Soft-cap of the scaled scores: cap·tanh(score / cap), before the mask.
    pub softcap: Option<f32>,
    /// A row sees only the last `window` tokens, including its own; with `None` all tokens up to its own.
    pub window: Option<usize>,
}

impl AttnShape {
    /// Checks that the kernels cover this shape.
    ///
    /// # Errors
    /// If they do not cover the head_dim or the head counts.
    pub fn check(&self) -> Result<()> {
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(16) {
            return Err(Error::Unsupported(format!(
                "attention: head_dim {}, wanted a positive multiple of 16",
                self.head_dim
            )));
        }
        if self.n_kv_heads == 0 || self.n_heads == 0 || !self.n_heads.is_multiple_of(self.n_kv_heads) {
            return Err(Error::Unsupported(format!(
                "attention: {} query heads, {} KV heads; the first must be a multiple of the second",
                self.n_heads, self.n_kv_heads
            )));
        }
        Ok(())
    }

    /// The part of `tokens` that position `pos` sees; an empty range begins where it ends.
    pub(super) fn visible(&self, pos: usize, tokens: &Range<usize>) -> Range<usize> {
        let start = self.window.map_or(0, |w| (pos + 1).saturating_sub(w)).max(tokens.start);
        start.min((pos + 1).min(tokens.end))..(pos + 1).min(tokens.end)
    }

    /// The part of `tokens` that any of the positions sees.
    pub(super) fn seen(&self, pos: &Range<usize>, tokens: &Range<usize>) -> Range<usize> {
        let start = self.visible(pos.start, tokens).start;
        start..self.visible(pos.end - 1, tokens).end.max(start)
    }
}

/// The rows of one sequence; the plan's own list holds its pages.
pub(super) struct Seq {
    pub pages: Range<usize>,
    pub first_pos: usize,
    pub row0: usize,
    /// Tokens attended.
    pub tokens: Range<usize>,
}
