//! The data that accelerator and host exchange: rows of a step, partial attention, pages.

use std::sync::Arc;

use super::shape::Shape;
use crate::cache::PAGE_TOKENS;
use crate::device::runtime::{DevPtr, Pinned};
use crate::{Error, Result};

/// Mapped pinned memory through which rows cross between device and host: queries, keys and values to the host,
/// attention outputs back.
///
/// layout: 64 bytes that begin with a u32, the epoch of the rows there; `rows` times q|k|v (`[qkv_dim]` of
/// [`Shape::kv`], biases, norms and RoPE applied), in the order of the step's rows attended elsewhere or in part; as many
/// times o (`[q_dim]` of [`Shape::act`]). These are the types in which attention on the device reads its queries, keys and
/// values, and the output projection attention's output: rows attended elsewhere lose nothing by them. Where
/// [`Shape::exact`] is set the device rounds none of them but keys and values, and the mailbox has f32 instead.
#[derive(Clone)]
pub struct Mailbox {
    /// The memory.
    pub memory: Arc<dyn Pinned>,
    /// Number of rows that it holds.
    pub rows: usize,
}

impl Mailbox {
    /// Bytes before the rows.
    pub const HEADER: usize = 64;

    /// Bytes of an element of a row on the link, as predictions and emulated time count them.
    pub const ELEMENT: usize = 2;

    /// Bytes of an element in memory.
    fn element(shape: &Shape) -> usize {
        if shape.exact.is_some() { size_of::<f32>() } else { Mailbox::ELEMENT }
    }

    /// Bytes of a row's parts that are published.
    pub fn published_bytes(shape: &Shape, what: Published) -> usize {
        let width = match what {
            Published::Qkv => shape.qkv_dim(),
            Published::Queries => shape.q_dim(),
        };
        width * Mailbox::element(shape)
    }

    /// Bytes of a row's attention.
    pub fn out_bytes(shape: &Shape) -> usize {
        shape.q_dim() * Mailbox::element(shape)
    }

    /// Bytes of a mailbox for `rows` rows.
    pub fn bytes(shape: &Shape, rows: usize) -> usize {
        Mailbox::HEADER + rows * Mailbox::element(shape) * (shape.qkv_dim() + shape.q_dim())
    }

    /// Byte offset of q|k|v of place `row`.
    pub fn row_at(&self, shape: &Shape, row: usize) -> usize {
        Mailbox::HEADER + row * Mailbox::element(shape) * shape.qkv_dim()
    }

    /// Byte offset of o of place `row`.
    pub fn out_at(&self, shape: &Shape, row: usize) -> usize {
        self.row_at(shape, self.rows) + row * Mailbox::element(shape) * shape.q_dim()
    }
}

/// The parts of a row that are published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Published {
    /// q|k|v: the host appends the keys and values to its own pages.
    Qkv,
    /// q alone: keys and values stay on the device, and the host attends over the pages that it has. The places of k
    /// and v are left unchanged.
    Queries,
}

impl Published {
    /// Elements of a row that are published.
    pub fn width(self, shape: &Shape) -> usize {
        match self {
            Published::Qkv => shape.qkv_dim(),
            Published::Queries => shape.q_dim(),
        }
    }
}

/// Where rows attended elsewhere, in full or in part, are published, and as which epoch.
#[derive(Clone, Copy)]
pub struct Publish<'a> {
    /// The mailbox that the rows are published in.
    pub mailbox: &'a Mailbox,
    /// Added to [`StepDesc::epoch`](super::StepDesc::epoch): the mailbox's epoch takes the sum once all rows of the
    /// call have arrived. The host polls it with acquire ordering.
    pub epoch_add: u32,
    /// The parts of each row to publish.
    pub what: Published,
}

/// The pages of a layer on the device and on the host: where [`PageMove`]s take place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerPages {
    /// Its pages on the device.
    pub device: DevPtr,
    /// Its pages in the host's layout ([`crate::cache`]), in device or mapped memory.
    pub host: DevPtr,
}

/// A page that moves between a layer's pages on the device and on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageMove {
    /// Its page number on the device.
    pub device: u32,
    /// Its page number on the host.
    pub host: u32,
    /// Tokens that it holds, from 1 to [`PAGE_TOKENS`]. The places after them are not read when the page moves to the
    /// host, and become zeros in either direction.
    pub tokens: u32,
}

impl PageMove {
    /// The moves of the pages that hold `tokens` tokens of a sequence, pairing `device[i]` with `host[i]`.
    pub fn of(device: &[u32], host: &[u32], tokens: usize) -> Vec<PageMove> {
        let left = |i: usize| tokens.saturating_sub(i * PAGE_TOKENS).min(PAGE_TOKENS) as u32;
        let pairs = device.iter().zip(host).enumerate();
        pairs
            .map(|(i, (&device, &host))| PageMove { device, host, tokens: left(i) })
            .filter(|p| p.tokens > 0)
            .collect()
    }

    /// Returns an error if a move has a token count that no page has, or if two moves write the same page.
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
