//! Tiles of weights, made a quarter at a time beside products.
//!
//! Work overlaps with products only if it stands between them: the core looks some 512 operations ahead, 14 K steps,
//! so what follows a whole call waits for most of it. The tiles are made in the order in which they will be
//! multiplied, a fixed number of quarters after each K step:
//!
//! * **ahead by a group of columns** where several blocks of rows use each tile: two buffers in L2, one of them read
//!   while the other is made;
//! * **ahead by [`RING_LEAD`] steps** where one block uses it (up to 32 rows): a ring in L1.

use std::ops::Range;

use super::pack::TILE_LEN;

/// Where B tiles come from.
pub trait Panels {
    /// Tile `step` of panel `panel`, if the panel lies in memory as tiles, one after the other.
    fn stored(&self, panel: usize, step: usize) -> Option<*const u16>;

    /// Writes tile `step` of `panel` (16 rows of W, 32 of K) to `out`, as
    /// [`pack_panel_bf16`](super::pack::pack_panel_bf16) lays it out.
    ///
    /// # Safety
    /// The panel has this step, and `out` room for a KiB.
    unsafe fn fill(&self, panel: usize, step: usize, out: *mut u16);

    /// A part of the work of [`Panels::fill`]: the four `quarter`s of a tile together do it. `out` is where the tile is.
    ///
    /// # Safety
    /// As [`Panels::fill`]; `quarter < 4`.
    unsafe fn quarter(&self, panel: usize, step: usize, quarter: usize, out: *mut u16);

    /// Asks for the memory that [`Panels::quarter`] will read.
    fn prefetch(&self, panel: usize, step: usize, quarter: usize);
}

/// Steps of a ring, of up to four tiles: at most 32 KiB.
pub(super) const RING: usize = 8;
/// Steps by which a ring's tiles are made before they are used.
pub(super) const RING_LEAD: usize = 4;

/// Columns as groups of at most `wide` panels: whole groups, then halves of them.
#[derive(Clone, Copy)]
pub(super) struct Groups {
    pub panels: usize,
    /// A power of two.
    pub wide: usize,
}

impl Groups {
    pub(super) fn count(self) -> usize {
        self.panels / self.wide + (self.panels % self.wide).count_ones() as usize
    }

    /// Group `i`: (first panel, panels).
    pub(super) fn get(self, i: usize) -> (usize, usize) {
        let whole = self.panels / self.wide;
        if i < whole {
            return (i * self.wide, self.wide);
        }
        let (mut first, mut rest) = (whole * self.wide, self.panels % self.wide);
        for _ in whole..i {
            let largest = 1 << rest.ilog2();
            (first, rest) = (first + largest, rest - largest);
        }
        (first, 1 << rest.ilog2())
    }
}

/// Makes the tiles of all groups over a chunk of K, in order, into the slots of a buffer.
pub(super) struct Maker<'a> {
    panels: &'a dyn Panels,
    groups: Groups,
    steps: Range<usize>,
    /// `slots` steps of `groups.wide` tiles each.
    buffer: *mut u16,
    slots: usize,
    /// Whether to ask for the group after the one that is made.
    prefetch: bool,
    /// The next tile: group, its first panel and width, panel within it, step, quarter; and its slot.
    group: usize,
    first: usize,
    wide: usize,
    panel: usize,
    step: usize,
    quarter: usize,
    slot: usize,
    /// Quarters that are due, times `calls`.
    due: usize,
    calls: usize,
}

impl<'a> Maker<'a> {
    /// For groups that are each multiplied with `calls` blocks of rows.
    ///
    /// # Safety
    /// `panels` has the groups' panels and `steps` of each; `buffer` has room for `slots` times `groups.wide` tiles,
    /// and `slots` is a multiple of how far ahead tiles are made, at least twice that.
    pub(super) unsafe fn new(
        panels: &'a dyn Panels,
        groups: Groups,
        steps: Range<usize>,
        calls: usize,
        (buffer, slots): (*mut u16, usize),
        prefetch: bool,
    ) -> Maker<'a> {
        let (first, wide) = groups.get(0);
        let (step, made) = (steps.start, panels.stored(0, steps.start).is_some());
        Maker {
            panels,
            groups,
            steps,
            buffer,
            slots,
            prefetch,
            group: if made { groups.count() } else { 0 },
            first,
            wide,
            panel: 0,
            step,
            quarter: 0,
            slot: 0,
            due: 0,
            calls,
        }
    }

    /// Makes the next `steps` steps at once: those before the first product.
    pub(super) fn begin(&mut self, steps: usize) {
        for _ in 0..steps {
            self.due += 4 * self.calls * self.wide;
            self.pay();
        }
    }

    /// What is due beside one K step.
    #[inline(always)]
    pub(super) fn beside(&mut self) {
        self.due += 4 * self.wide;
        self.pay();
    }

    #[inline(always)]
    fn pay(&mut self) {
        while self.due >= self.calls && self.group < self.groups.count() {
            let at = self.slot * self.groups.wide + self.panel;
            let out = self.buffer.wrapping_add(at * TILE_LEN);
            let (panel, step) = (self.first + self.panel, self.step);
            let all = self.quarter == 0 && self.due >= 4 * self.calls;
            // SAFETY: the panel and the step exist, and the slot is in the buffer: as promised to `new`.
            unsafe {
                if all {
                    self.panels.fill(panel, step, out);
                } else {
                    self.panels.quarter(panel, step, self.quarter, out);
                }
            }
            let quarters = if all { 0..4 } else { self.quarter..self.quarter + 1 };
            if self.prefetch && panel + self.wide < self.groups.panels {
                quarters.clone().for_each(|q| self.panels.prefetch(panel + self.wide, step, q));
            }
            self.due -= quarters.len() * self.calls;
            self.quarter = quarters.end % 4;
            if self.quarter == 0 {
                self.advance();
            }
        }
    }

    /// To the next tile.
    fn advance(&mut self) {
        self.panel += 1;
        if self.panel < self.wide {
            return;
        }
        self.panel = 0;
        self.step += 1;
        self.slot += 1;
        if self.slot == self.slots {
            self.slot = 0;
        }
        if self.step == self.steps.end {
            self.step = self.steps.start;
            self.group += 1;
            if self.group < self.groups.count() {
                (self.first, self.wide) = self.groups.get(self.group);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_cover_all_panels_in_order() {
        for wide in [2, 4] {
            for panels in 1..20 {
                let groups = Groups { panels, wide };
                let mut at = 0;
                for i in 0..groups.count() {
                    let (first, n) = groups.get(i);
                    assert!(first == at && n <= wide && n.is_power_of_two(), "{panels} by {wide}: group {i}");
                    at += n;
                }
                assert_eq!(at, panels);
            }
        }
    }
}
