//! Sequences whose keys and values live on the side that the scheduler chose: the engine's part of two-tier memory.
//!
//! ```text
//! add_at(Device) ─► pages on the device ◄─ swap, or the swaps of a step ─► pages in pinned host memory ◄─ add_at(Host)
//! ```
//! The device computes the prompt of a sequence on the host, and each layer's keys and values go to the host as they
//! are produced (NEO §3.2); the host attends its decode rows in place. Whole pages change sides on a copy lane while
//! the step computes; the source page of a move cannot be allocated until its copy has ended.

use super::kv::{KvPages, Moved, SequenceKv};
use super::sequences::Engine;
use crate::program::{Kv, MoveRequest, RequestId, Side};
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
    /// As [`Engine::set_side`].
    pub fn add_at(&mut self, side: Side) -> Result<RequestId> {
        let id = self.add();
        self.set_side(id, side).inspect_err(|_| self.remove(id))?;
        Ok(id)
    }

    /// Lets an empty sequence live on `side`.
    ///
    /// # Errors
    /// [`Error::Usage`] if the engine has no pages for sequences of that side, the sequence has ended, or it has tokens.
    pub fn set_side(&mut self, id: RequestId, side: Side) -> Result<()> {
        self.check_live(id)?;
        let pages = self.kv_pages(side);
        if pages.all == 0 {
            return Err(Error::usage(format!(
                "no sequence lives on the {}: the engine has no pages for that; see Options::far_pages",
                name(side)
            )));
        }
        if !self.is_empty(id) {
            return Err(Error::usage("a sequence with tokens changes sides by Engine::swap"));
        }
        let sides = self.machine.kv().sides;
        let table = self.sequences.get_mut(id).expect("a live sequence");
        *table = SequenceKv::at(sides, side);
        table.name(id);
        Ok(())
    }

    /// The side where a sequence's new tokens are stored; `None` if the sequence has ended.
    pub fn side(&self, id: RequestId) -> Option<Side> {
        self.sequences.get(id).map(SequenceKv::side)
    }

    /// Where a sequence's keys and values are, in layers that keep them on the device; `None` if the sequence has ended.
    pub fn kv(&self, id: RequestId) -> Option<Kv> {
        let far = self.machine.kv_ref().far.usual();
        self.sequences.get(id).map(|s| s.kv(far))
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
    pub fn swap(&mut self, id: RequestId, side: Side) -> Result<()> {
        self.change(&[(id, side)], &[])
    }

    /// Moves the beginning of a sequence as [`Iteration::moves`](crate::program::Iteration::moves) do, and waits for the
    /// copies.
    ///
    /// # Errors
    /// As [`Engine::swap`], and if pages that go to the host are not all full.
    pub fn move_part(&mut self, part: &MoveRequest) -> Result<()> {
        self.change(&[], std::slice::from_ref(part))
    }

    fn change(&mut self, swaps: &[(RequestId, Side)], moves: &[MoveRequest]) -> Result<()> {
        self.check_moves(swaps, moves)?;
        let mut moved = Vec::new();
        let changed = self.begin_moves(swaps, moves, &mut moved);
        let copied = self.finish_moves(&mut moved);
        changed.and(copied)
    }

    pub(super) fn check_moves(&self, swaps: &[(RequestId, Side)], moves: &[MoveRequest]) -> Result<()> {
        let ids = || swaps.iter().map(|(id, _)| *id).chain(moves.iter().map(|m| m.request));
        if ids().next().is_some() && !self.has_homes() {
            return Err(Error::usage("the pages of this engine move by themselves; see Options::far_pages"));
        }
        ids().try_for_each(|id| self.check_live(id))?;
        self.check_unparked(ids())
    }

    /// Changes sides in the tables, beginnings of sequences first, and appends the copies still to be made to `moved`. If
    /// pages are short but copies in flight will free some, waits for those copies first.
    pub(super) fn begin_moves(
        &mut self,
        swaps: &[(RequestId, Side)],
        moves: &[MoveRequest],
        moved: &mut Vec<Moved>,
    ) -> Result<()> {
        for m in moves {
            let boundary = if m.to == Side::Host { m.pages.end } else { m.pages.start } as usize;
            self.begin_move(m.request, moved, |table, pages, slot| table.split_at(pages, slot, boundary))?;
        }
        for &(id, side) in swaps {
            self.begin_move(id, moved, |table, pages, slot| table.swap(pages, slot, side))?;
        }
        Ok(())
    }

    fn begin_move(
        &mut self,
        id: RequestId,
        moved: &mut Vec<Moved>,
        change: impl Fn(&mut SequenceKv, &mut KvPages, usize) -> Result<Option<Moved>>,
    ) -> Result<()> {
        let change = |e: &mut Engine| {
            let table = e.sequences.get_mut(id).expect("a live sequence");
            change(table, &mut e.machine.kv().pages, id.slot as usize)
        };
        if moved.iter().any(|m| m.request() == id) {
            self.finish_moves(moved)?;
        }
        let mut done = change(self);
        if done.is_err() && !moved.is_empty() {
            self.finish_moves(moved)?;
            done = change(self);
        }
        moved.extend(done?);
        Ok(())
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
