//! Decides which pages change sides (HELM §4).
//!
//! Above the high watermark of the device's pages the oldest full pages go to the host, down to the middle between the
//! watermarks; below the low one they come back, up to the middle. So a move never triggers the opposite move. Pages of
//! sequences that are not in the step leave first, then those of the longest sequences; pages come back first to the
//! sequence with the fewest pages away, which is the first to be complete again.
//!
//! A step makes two calls. [`Pager::make_room`] moves pages that must have left before the step's own pages can be
//! taken; with 20% to spare that is rare. [`Pager::ahead`] moves pages during the step, so that the next one has room.

use std::ops::Range;

use super::{KvPages, SequenceKv};
use crate::cache::{KvGeometry, PAGE_TOKENS, PageCopy};
use crate::program::{self, Group, Phase, RequestId, Side};
use crate::{Error, Result};

/// Percentage of the device's pages in use above which the oldest leave.
const HIGH: usize = 80;
/// Percentage of the device's pages in use below which some come back.
const LOW: usize = 50;

/// Pages of a sequence that have changed sides in its table and must be copied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::engine) struct Moved {
    /// Index of the sequence.
    pub seq: usize,
    /// Generation of the request that has the place.
    pub generation: u32,
    /// The side they are on now.
    pub to: Side,
    /// The pages, by position in the sequence.
    pub span: Range<u32>,
    /// The source and destination of each page, in order.
    pub copies: Vec<PageCopy>,
    /// Whether new tokens went to the host before.
    pub grew_on_host: bool,
}

impl Moved {
    /// The request whose pages move.
    pub fn request(&self) -> RequestId {
        RequestId { slot: self.seq as u32, generation: self.generation }
    }

    /// The move in the form of an iteration.
    pub fn of_iteration(&self) -> program::MoveRequest {
        program::MoveRequest { request: self.request(), to: self.to, pages: self.span.clone() }
    }

    /// All moves in the form of an iteration.
    pub fn all_of_iteration(moved: &[Moved]) -> Vec<program::MoveRequest> {
        moved.iter().map(Moved::of_iteration).collect()
    }

    /// Records that the copies have succeeded.
    pub fn finish(&self, pages: &mut KvPages) {
        PageCopy::finish(&self.copies, &mut pages.device, &mut pages.far);
    }

    /// Undoes the move after its copies failed: the pages are back on their old side. No copy may be in flight any
    /// more, and reservations made since must have been given back.
    pub fn undo(&self, pages: &mut KvPages, sequences: &mut [Option<SequenceKv>]) {
        if let Some(s) = &mut sequences[self.seq] {
            s.undo(pages, self.to == Side::Host, self.grew_on_host, &self.copies);
        }
    }
}

/// See the [module](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) struct Pager {
    high: usize,
    middle: usize,
    low: usize,
    /// Whether prompts can grow on the host: pages of a layer pass through staging memory.
    prompts_on_host: bool,
}

/// The pages of one sequence that are to leave the device.
struct Leaves {
    seq: usize,
    /// Number of its oldest full pages to move; `None`: the whole sequence, which then grows on the host.
    full: Option<usize>,
}

impl Pager {
    /// A pager for `device_pages` pages on the device; `prompts_on_host` says whether prompts can grow on the host
    /// (decode rows always can).
    pub fn new(device_pages: usize, prompts_on_host: bool) -> Pager {
        let of = |percent: usize| device_pages * percent / 100;
        let (high, low) = (of(HIGH), of(LOW));
        Pager { high, middle: (high + low).div_ceil(2), low, prompts_on_host }
    }

    /// Device pages that stay in use once moves have settled on a full device.
    pub fn device_pages_kept(&self) -> usize {
        self.middle
    }

    /// Moves pages that must leave before the pages of a step can be taken. Their copies have to end first.
    ///
    /// # Errors
    /// If both sides together do not suffice, with the numbers; nothing is changed then.
    pub fn make_room(
        &self,
        sequences: &mut [Option<SequenceKv>],
        pages: &mut KvPages,
        step: &[Group],
    ) -> Result<Vec<Moved>> {
        if !pages.pages_move() {
            return Ok(Vec::new());
        }
        let mut moved = self.come_home(sequences, pages, step);
        match self.who_leaves(sequences, pages, step) {
            Ok(leaves) => {
                for l in leaves {
                    moved.extend(leave(sequences, pages, &l)?);
                }
                Ok(moved)
            }
            Err(e) => {
                for m in moved.iter().rev() {
                    m.undo(pages, sequences);
                }
                Err(e)
            }
        }
    }

    /// Brings back the last page of sequences in the step that grow on the host, if the device has room again, so that
    /// they grow on the device.
    fn come_home(
        &self,
        sequences: &mut [Option<SequenceKv>],
        pages: &mut KvPages,
        step: &[Group],
    ) -> Vec<Moved> {
        let wanted = |f: fn(&Wants) -> usize| -> usize { step.iter().map(|r| f(&wants(sequences, r))).sum() };
        let (mut need, mut far) = (wanted(|w| w.device), wanted(|w| w.far));
        let mut moved = Vec::new();
        for r in step {
            let Some(s) = sequences[slot(r)].as_mut().filter(|s| grows_on_host(s)) else { continue };
            let len = s.len();
            let last = usize::from(!len.is_multiple_of(PAGE_TOKENS));
            let own = KvGeometry::pages_for(len + r.tokens as usize) - len / PAGE_TOKENS;
            let used = pages.device.n_pages() - pages.device.n_free() + need + own;
            // The host may have no room for it.
            let stays = far <= pages.far.n_free() && self.can_grow_on_host(r);
            let most = if stays { self.middle } else { pages.device.n_pages() };
            if used > most {
                continue;
            }
            far -= wants_of(s, r.tokens as usize).far;
            let from = (len / PAGE_TOKENS) as u32;
            let generation = s.generation();
            let split = s.split_mut().expect("it grows on the host");
            let Ok(copies) = split.recall(&mut pages.device, &mut pages.far, last) else { continue };
            need += own - last;
            if !copies.is_empty() {
                moved.push(Moved {
                    seq: slot(r),
                    generation,
                    to: Side::Device,
                    span: from..from + last as u32,
                    copies,
                    grew_on_host: true,
                });
            }
        }
        moved
    }

    fn can_grow_on_host(&self, r: &Group) -> bool {
        self.prompts_on_host || r.phase == Phase::Decode
    }

    /// Decides which sequences leave, without changing anything.
    fn who_leaves(
        &self,
        sequences: &[Option<SequenceKv>],
        pages: &KvPages,
        step: &[Group],
    ) -> Result<Vec<Leaves>> {
        let wanted: Vec<Wants> = step.iter().map(|r| wants(sequences, r)).collect();
        let device: usize = wanted.iter().map(|w| w.device).sum();
        let mut far: usize = wanted.iter().map(|w| w.far).sum();
        let mut short = device.saturating_sub(pages.device.n_free());
        let far_short = |far: usize| far > pages.far.n_free();
        let stray =
            |r: &&Group| sequences[slot(r)].as_ref().is_some_and(grows_on_host) && !self.can_grow_on_host(r);
        if let Some(r) = step.iter().find(stray) {
            let len = sequences[slot(r)].as_ref().map_or(0, SequenceKv::len);
            let own = KvGeometry::pages_for(len + r.tokens as usize) - len / PAGE_TOKENS;
            return Err(Error::Capacity(format!(
                "KV cache: {} rows of a prompt whose {len} tokens have left the device are attended there, which takes {own} of its \
                 pages; {} of {} are free and {device} wanted by others; use `far` stream, which attends such prompts from the host, \
                 run fewer sequences, or raise `kv_pages`",
                r.tokens as usize,
                pages.device.n_free(),
                pages.device.n_pages(),
            )));
        }
        if short == 0 && !far_short(far) {
            return Ok(Vec::new());
        }
        let mut leaves: Vec<Leaves> = Vec::new();
        for (seq, n) in victims(sequences, step) {
            let n = n.min(short);
            if n == 0 {
                break;
            }
            leaves.push(Leaves { seq, full: Some(n) });
            (short, far) = (short - n, far + n);
        }
        // Then whole sequences, including pages that are not full and pages that they want: sequences outside the step
        // first, and those with the most pages first.
        let mut whole: Vec<(bool, usize, usize)> = Vec::new();
        for (seq, s) in sequences.iter().enumerate() {
            let Some(s) = s.as_ref().filter(|s| !grows_on_host(s)) else { continue };
            let room = step.iter().position(|r| slot(r) == seq);
            let can = room.is_none_or(|at| self.can_grow_on_host(&step[at]));
            if can && s.split().is_some() {
                let rest = s.device_pages().len() + room.map_or(0, |at| wanted[at].device);
                whole.push((room.is_some(), rest, seq));
            }
        }
        whole.sort_by_key(|&(in_step, rest, _)| (in_step, std::cmp::Reverse(rest)));
        for (_, _, seq) in whole {
            if short == 0 {
                break;
            }
            let s = sequences[seq].as_ref().expect("a live sequence");
            let old = leaves.iter().position(|l| l.seq == seq);
            let full = old.and_then(|at| leaves[at].full).unwrap_or_default();
            let stored = KvGeometry::pages_for(s.len()) - s.far_pages().len();
            let want = step.iter().position(|r| slot(r) == seq).map_or(0, |at| wanted[at].device);
            let (freed, more) = (s.device_pages().len() - full + want, stored - full + want);
            if freed == 0 || far + more > pages.far.n_free() {
                continue;
            }
            (short, far) = (short.saturating_sub(freed), far + more);
            match old {
                Some(at) => leaves[at].full = None,
                None => leaves.push(Leaves { seq, full: None }),
            }
        }
        if short > 0 || far_short(far) {
            return Err(Error::Capacity(format!(
                "KV cache: the step takes {device} more pages of {PAGE_TOKENS} tokens on the device, {} of {} free there, and \
                 {} of {} free on the host for those that would have to leave ({far} wanted); run fewer sequences, smaller \
                 chunks, or raise `kv_pages`",
                pages.device.n_free(),
                pages.device.n_pages(),
                pages.far.n_free(),
                pages.far.n_pages(),
            )));
        }
        Ok(leaves)
    }

    /// Moves pages ahead of need, after the pages of a step have been taken; the copies may run during the step.
    pub fn ahead(
        &self,
        sequences: &mut [Option<SequenceKv>],
        pages: &mut KvPages,
        step: &[Group],
    ) -> Vec<Moved> {
        let mut moved = Vec::new();
        if !pages.pages_move() {
            return moved;
        }
        let used = pages.device.n_pages() - pages.device.n_free() - pages.device.n_waiting();
        if used > self.high {
            let mut left = (used - self.middle).min(pages.far.n_free());
            for (seq, n) in victims(sequences, step) {
                let n = n.min(left);
                if n == 0 {
                    break;
                }
                left -= n;
                // This many pages are free there, and full here.
                moved.extend(leave(sequences, pages, &Leaves { seq, full: Some(n) }).unwrap_or_default());
            }
        } else if used < self.low {
            let mut left = (self.middle - used).min(pages.device.n_free());
            let mut away: Vec<(usize, usize)> = step
                .iter()
                .filter_map(|r| Some((slot(r), sequences[slot(r)].as_ref()?)))
                .filter(|(_, s)| !grows_on_host(s) && !s.far_pages().is_empty())
                .map(|(seq, s)| (s.far_pages().len(), seq))
                .collect();
            away.sort_unstable();
            for (n, seq) in away {
                let n = n.min(left);
                let s = sequences[seq].as_mut().expect("a live sequence");
                let end = s.far_pages().len() as u32;
                let generation = s.generation();
                let split = s.split_mut().expect("pages are away");
                if n > 0
                    && let Ok(copies) = split.recall(&mut pages.device, &mut pages.far, n)
                {
                    left -= n;
                    moved.push(Moved {
                        seq,
                        generation,
                        to: Side::Device,
                        span: end - n as u32..end,
                        copies,
                        grew_on_host: false,
                    });
                }
            }
        }
        moved
    }
}

/// Index of a group's sequence.
fn slot(group: &Group) -> usize {
    group.request.slot as usize
}

/// Pages that a step takes.
struct Wants {
    device: usize,
    far: usize,
}

fn wants(sequences: &[Option<SequenceKv>], r: &Group) -> Wants {
    wants_of(sequences[slot(r)].as_ref().expect("a live sequence"), r.tokens as usize)
}

fn wants_of(s: &SequenceKv, tokens: usize) -> Wants {
    let have = s.far_pages().len() + s.device_pages().len();
    let n = match s.split() {
        Some(_) => KvGeometry::pages_for(s.len() + tokens).saturating_sub(have),
        None => 0,
    };
    if grows_on_host(s) { Wants { device: 0, far: n } } else { Wants { device: n, far: 0 } }
}

fn grows_on_host(s: &SequenceKv) -> bool {
    s.split().is_some_and(|t| t.grows_on_host())
}

/// Sequences with full pages on the device, and their number of such pages: those outside the step first, then the
/// longest.
fn victims(sequences: &[Option<SequenceKv>], step: &[Group]) -> Vec<(usize, usize)> {
    let mut found: Vec<(bool, usize, usize, usize)> = Vec::new();
    for (seq, s) in sequences.iter().enumerate() {
        let Some(s) = s else { continue };
        let n = s.split().map_or(0, |t| t.n_evictable());
        if n > 0 {
            found.push((step.iter().any(|r| slot(r) == seq), s.len(), seq, n));
        }
    }
    found.sort_by_key(|&(in_step, len, seq, _)| (in_step, std::cmp::Reverse(len), seq));
    found.into_iter().map(|(_, _, seq, n)| (seq, n)).collect()
}

fn leave(sequences: &mut [Option<SequenceKv>], pages: &mut KvPages, l: &Leaves) -> Result<Option<Moved>> {
    let s = sequences[l.seq].as_mut().expect("a live sequence");
    let from = s.far_pages().len() as u32;
    let generation = s.generation();
    let split = s.split_mut().expect("pages on the device");
    let copies = match l.full {
        Some(n) => split.evict(&mut pages.device, &mut pages.far, n)?,
        None => split.swap_out(&mut pages.device, &mut pages.far)?,
    };
    let span = from..from + copies.len() as u32;
    let moved = Moved { seq: l.seq, generation, to: Side::Host, span, copies, grew_on_host: false };
    Ok((!moved.copies.is_empty()).then_some(moved))
}

#[cfg(test)]
mod tests;
