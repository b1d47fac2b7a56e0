//! What crosses between accelerator and host: rows of a step, attention in parts, pages.

use std::sync::Arc;

use super::shape::Shape;
use crate::cache::PAGE_TOKENS;
use crate::device::runtime::Pinned;
use crate::{Error, Result};

/// Rows that cross to the host and back in mapped pinned memory: queries, keys and values one way, attention
/// outputs the other.
///
/// layout: 64 bytes that begin with a u32, the epoch of the rows there; `rows` times q|k|v (f32 `[qkv_dim]`, biases,
/// norms and RoPE applied), in the order of the step's rows attended elsewhere or in part; as many times o (f32
/// `[q_dim]`).
#[derive(Clone)]
pub struct Mailbox {
    /// The memory.
    pub memory: Arc<dyn Pinned>,
    /// Rows it has room for.
    pub rows: usize,
}

impl Mailbox {
    /// Bytes before the rows.
    pub const HEADER: usize = 64;

    /// Bytes of a mailbox for `rows` rows.
    pub fn bytes(shape: &Shape, rows: usize) -> usize {
        Mailbox::HEADER + rows * 4 * (shape.qkv_dim() + shape.q_dim())
    }

    /// Byte offset of q|k|v of place `row`.
    pub fn row_at(&self, shape: &Shape, row: usize) -> usize {
        Mailbox::HEADER + row * 4 * shape.qkv_dim()
    }

    /// Byte offset of o of place `row`.
    pub fn out_at(&self, shape: &Shape, row: usize) -> usize {
        self.row_at(shape, self.rows) + row * 4 * shape.q_dim()
    }
}

/// The parts of a row that are published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Published {
    /// q|k|v: the host appends the keys and values to its own pages.
    Qkv,
    /// q alone: the keys and values stay here, and the host attends over the pages that it has. What lies in the
    /// places of k and v is left as it was.
    Queries,
}

/// Where rows attended elsewhere, in full or in part, are published, and as which epoch.
#[derive(Clone, Copy)]
pub struct Publish<'a> {
    /// Where.
    pub mailbox: &'a Mailbox,
    /// The mailbox's epoch becomes [`StepDesc::epoch`](super::StepDesc::epoch) plus this once all rows of the call
    /// are there; the host polls it with acquire.
    pub epoch_add: u32,
    /// What goes.
    pub what: Published,
}

/// A page that moves between a layer's pages here and the host's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageMove {
    /// Its number here.
    pub device: u32,
    /// Its number there.
    pub host: u32,
    /// Tokens that it holds, from 1 to [`PAGE_TOKENS`]. The places after them are not
    /// read on the way to the host, and become zeros either way.
    pub tokens: u32,
}

impl PageMove {
    /// The pages that hold `tokens` tokens of a sequence, `device[i]` with `host[i]`.
    pub fn of(device: &[u32], host: &[u32], tokens: usize) -> Vec<PageMove> {
        let left = |i: usize| tokens.saturating_sub(i * PAGE_TOKENS).min(PAGE_TOKENS) as u32;
        let pairs = device.iter().zip(host).enumerate();
        pairs
            .map(|(i, (&device, &host))| PageMove { device, host, tokens: left(i) })
            .filter(|p| p.tokens > 0)
            .collect()
    }

    /// Refuses counts that no page has, and pages that two moves write.
    pub(crate) fn check(pages: &[PageMove], to_host: bool) -> Result<()> {
        if let Some(p) = pages.iter().find(|p| p.tokens == 0 || p.tokens as usize > PAGE_TOKENS) {
            return Err(Error::usage(format!(
                "a move of {} tokens of page {}: a page holds 1 to {PAGE_TOKENS}",
                p.tokens, p.device
            )));
        }
        let mut written: Vec<u32> = pages.iter().map(|p| if to_host { p.host } else { p.device }).collect();
        written.sort_unstable();
        match written.windows(2).find(|w| w[0] == w[1]) {
            None => Ok(()),
            Some(twice) => Err(Error::usage(format!(
                "page {} of the {} is written by two moves of one call",
                twice[0],
                if to_host { "host" } else { "device" }
            ))),
        }
    }
}
