//! Rows that go the same way, and how their attention runs in a layer.

use std::ops::Range;

use crate::cache::PAGE_TOKENS;
use crate::program::iteration::{Far, Group, Kv, SubBatch};
use crate::program::placement::{Phase, Placement, Side, Sublayer};
use crate::{Error, Result};

/// The kind of a [`Kv`], without numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Home {
    Device,
    Host,
    Split(Far),
}

/// Rows that go the same way.
#[derive(Clone)]
pub(super) struct Class {
    /// Its place among the classes.
    pub index: usize,
    pub rows: Range<u32>,
    pub groups: Range<u32>,
    pub phase: Phase,
    pub home: Home,
    /// Its tokens away from the device are behind the windows of blocks that have one.
    pub behind: bool,
    pub wanted: u32,
    /// Where the residual stream is.
    pub hidden: Side,
    /// Where the last sublayer's output is that is still to be added, and the side that computed it.
    pub delta: Option<(Side, Sublayer)>,
    /// Where the activations of the feed-forward are.
    pub act: Side,
}

/// How a class's attention runs in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Attention {
    /// Keys and values are kept on this side and attended there.
    On(Side),
    /// Kept on both sides, but what is on the host is behind the window: attended on the device.
    Near,
    /// Kept on both sides, attended on both.
    Both,
    /// The oldest are on the host and streamed, the rest is on the device.
    NearAndStreamed,
    /// Kept on the host, attended on the device: the older ones are streamed, the new ones stored.
    Streamed,
}

/// The classes of a sub-batch, in the order of their rows; their residual stream begins on the side of the embedding.
///
/// # Errors
/// A boundary between tokens that is not one between pages, or behind new tokens.
pub(super) fn classes(batch: &SubBatch, placement: &Placement) -> Result<Vec<Class>> {
    let (embedding, widest) = (placement.embedding, placement.widest_window());
    let mut classes: Vec<Class> = Vec::new();
    for (at, (group, rows)) in batch.with_rows().enumerate() {
        let home = match group.kv {
            Kv::Device => Home::Device,
            Kv::Host => Home::Host,
            Kv::Split { boundary, far } => {
                if !(boundary as usize).is_multiple_of(PAGE_TOKENS) || boundary > group.first {
                    return Err(Error::usage(format!(
                        "a boundary at token {boundary} of a sequence that continues at {}; it must be a multiple of \
                         {PAGE_TOKENS}, and new tokens go behind it",
                        group.first
                    )));
                }
                if boundary == 0 { Home::Device } else { Home::Split(far) }
            }
        };
        let at = at as u32;
        let behind = widest.is_some() && boundary(group) <= first_seen(group, widest);
        let behind = behind && matches!(home, Home::Split(_));
        match classes.last_mut() {
            Some(c) if c.phase == group.phase && c.home == home && c.behind == behind => {
                c.rows.end = rows.end;
                c.groups.end = at + 1;
                c.wanted += group.wanted();
            }
            _ => classes.push(Class {
                index: classes.len(),
                rows,
                groups: at..at + 1,
                phase: group.phase,
                home,
                behind,
                wanted: group.wanted(),
                hidden: embedding,
                delta: None,
                act: Side::Device,
            }),
        }
    }
    Ok(classes)
}

/// The same rows in `n` classes for each, as far as there are groups.
pub(super) fn in_pieces(classes: Vec<Class>, groups: &[Group], n: u32) -> Vec<Class> {
    let mut all: Vec<Class> = Vec::new();
    for class in classes {
        let (from, count, mut row) = (class.groups.start, class.groups.len() as u32, class.rows.start);
        let n = n.min(count);
        for i in 0..n {
            let of = from + i * count / n..from + (i + 1) * count / n;
            let members = &groups[of.start as usize..of.end as usize];
            let rows = row..row + members.iter().map(|g| g.tokens).sum::<u32>();
            row = rows.end;
            let wanted = members.iter().map(Group::wanted).sum();
            all.push(Class { index: all.len(), rows, groups: of, wanted, ..class.clone() });
        }
    }
    all
}

/// How a class's attention runs in layer `l`.
pub(super) fn attention(placement: &Placement, l: usize, class: &Class) -> Result<Attention> {
    let (layer, windowed) = (&placement.layers[l], placement.window(l).is_some());
    let policy = layer.policy(class.phase);
    let Some(side) = policy.attention() else {
        return Err(Error::usage(format!(
            "policy {:?} computes scores and values on different sides; one pass over keys and values does both, so such \
             a policy has a predicted time but cannot run",
            policy.bits()
        )));
    };
    Ok(match (layer.kv, class.home, side) {
        (Side::Host, _, Side::Host) => Attention::On(Side::Host),
        (Side::Host, _, Side::Device) => Attention::Streamed,
        (Side::Device, Home::Device, Side::Device) => Attention::On(Side::Device),
        (Side::Device, Home::Split(_), Side::Device) if windowed && class.behind => Attention::Near,
        (Side::Device, Home::Split(Far::Attend), Side::Device) => Attention::Both,
        (Side::Device, Home::Split(Far::Stream), Side::Device) => Attention::NearAndStreamed,
        // A prompt goes through the device and leaves its keys and values behind, layer by layer (NEO §3.2);
        // decode rows are attended where their keys and values are.
        (Side::Device, Home::Host, Side::Device) if class.phase == Phase::Prefill => Attention::Streamed,
        (Side::Device, Home::Host, _) => Attention::On(Side::Host),
        (Side::Device, _, Side::Host) => {
            return Err(Error::usage(format!(
                "policy {:?} attends on the host, but the keys and values of the layer are kept on the device",
                policy.bits()
            )));
        }
    })
}

pub(super) fn boundary(group: &Group) -> u32 {
    match group.kv {
        Kv::Split { boundary, .. } => boundary,
        _ => 0,
    }
}

/// The first token that a row of a group sees in a layer with this window.
pub(super) fn first_seen(group: &Group, window: Option<u32>) -> u32 {
    window.map_or(0, |w| (group.first + 1).saturating_sub(w))
}

pub(super) fn page_span(tokens: Range<u32>) -> Range<u32> {
    let page = PAGE_TOKENS as u32;
    if tokens.is_empty() { 0..0 } else { tokens.start / page..tokens.end.div_ceil(page) }
}
