//! Sequences whose keys and values live on the side that the scheduler chose: the engine's part of two-tier memory.
//!
//! ```text
//! add_at(Device) ─► pages on the device ◄─ swap, or the swaps of a step ─► pages in pinned host memory ◄─ add_at(Host)
//! ```
//! The device computes the prompt of a sequence on the host, and each layer's keys and values go to the host as they
//! are produced (NEO §3.2); the host attends its decode rows in place. Whole pages change sides on a copy lane while
//! the step computes; the source page of a move cannot be allocated until its copy has ended.

use super::kv::{Moved, SequenceKv, Swap, Target};
use super::seq_id::SeqId;
use super::sequences::Engine;
use crate::program::{Kv, Side};
use crate::{Error, Result};

/// Pages of keys and values on one side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SidePages {
    /// Pages that no sequence holds.
    pub free: usize,
    /// Total number of pages.
    pub all: usize,
}

impl Engine {
    /// Adds an empty sequence whose keys and values live on `side`, in layers that keep them on the device. (Layers on
    /// the host keep theirs there.)
    ///
    /// # Errors
    /// [`Error::Usage`] if the engine has no pages for sequences of that side.
    pub fn add_at(&mut self, side: Side) -> Result<SeqId> {
        let pages = self.kv_pages(side);
        if pages.all == 0 {
            return Err(Error::usage(format!(
                "no sequence lives on the {}: the engine has no pages for that; see Options::far_pages",
                name(side)
            )));
        }
        let sides = self.machine.kv().sides;
        Ok(self.put(SequenceKv::at(sides, side)))
    }

    /// The side where a sequence's new tokens are stored; `None` if the sequence has ended.
    pub fn side(&self, id: SeqId) -> Option<Side> {
        self.sequences.get(id.request()).map(SequenceKv::side)
    }

    /// Where a sequence's keys and values are, in layers that keep them on the device; `None` if the sequence has ended.
    pub fn kv(&self, id: SeqId) -> Option<Kv> {
        let far = self.machine.kv_ref().far.usual();
        self.sequences.get(id.request()).map(|s| s.kv(far))
    }

    /// Pages for sequences that live on `side`.
    pub fn kv_pages(&self, side: Side) -> SidePages {
        let (free, all) = self.machine.kv_ref().pages.of_side(side);
        SidePages { free, all }
    }

    /// Whether the caller chooses the side that each sequence lives on ([`Options::far_pages`](super::Options::far_pages)).
    pub fn has_homes(&self) -> bool {
        self.machine.kv_ref().pager.is_none()
    }

    /// Pages of staging memory that the prompts of one step may use on their way to the host. A prompt up to position n
    /// uses the pages of n tokens.
    pub fn staging_pages(&self) -> usize {
        self.machine.kv_ref().staged
    }

    /// Moves a sequence to `side`, and waits for the copies.
    ///
    /// # Errors
    /// If there are not enough free pages there, the sequence has ended, the device has failed, or the engine moves its
    /// pages by itself. On an error nothing has moved.
    pub fn swap(&mut self, seq: SeqId, side: Side) -> Result<()> {
        self.change(&[Swap { seq, to: Target::Whole(side) }])
    }

    /// Moves several sequences one after the other, and waits for the copies.
    ///
    /// # Errors
    /// As [`Engine::swap`]; moves before the first that fails are kept.
    pub fn change(&mut self, swaps: &[Swap]) -> Result<()> {
        self.check_swaps(swaps)?;
        let mut moved = Vec::new();
        let changed = self.begin_swaps(swaps, &mut moved);
        let copied = self.finish_moves(&mut moved);
        changed.and(copied)
    }

    pub(super) fn check_swaps(&self, swaps: &[Swap]) -> Result<()> {
        if !swaps.is_empty() && !self.has_homes() {
            return Err(Error::usage("the pages of this engine move by themselves; see Options::far_pages"));
        }
        swaps.iter().try_for_each(|s| self.check_live(s.seq))?;
        self.check_free(swaps.iter().map(|s| s.seq))
    }

    /// Changes sides in the tables and appends the copies still to be made to `moved`. If pages are short but copies in
    /// flight will free some, waits for those copies first.
    pub(super) fn begin_swaps(&mut self, swaps: &[Swap], moved: &mut Vec<Moved>) -> Result<()> {
        for swap in swaps {
            if moved.iter().any(|m| m.request() == swap.seq.request()) {
                self.finish_moves(moved)?;
            }
            let mut done = self.begin_swap(swap);
            if done.is_err() && !moved.is_empty() {
                self.finish_moves(moved)?;
                done = self.begin_swap(swap);
            }
            moved.extend(done?);
        }
        Ok(())
    }

    fn begin_swap(&mut self, swap: &Swap) -> Result<Option<Moved>> {
        let id = swap.seq.request();
        let table = self.sequences.get_mut(id).expect("a live sequence");
        table.swap(&mut self.machine.kv().pages, id.slot as usize, swap.to)
    }

    /// Copies pages that have changed sides in the tables, and waits for the copies. If that fails, the pages are back
    /// on their old side.
    pub(super) fn finish_moves(&mut self, moved: &mut Vec<Moved>) -> Result<()> {
        let moved = std::mem::take(moved);
        if moved.is_empty() {
            return Ok(());
        }
        let done = self.machine.move_pages(&moved);
        self.moved(&moved, done.is_ok());
        done
    }
}

fn name(side: Side) -> &'static str {
    match side {
        Side::Host => "host",
        Side::Device => "device",
    }
}
