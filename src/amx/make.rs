//! Makes tiles of weights, a quarter at a time, while products run.
//!
//! Work overlaps with products only if it is interleaved with them: the core looks some 512 operations ahead, 14 K
//! steps, so work after a whole call waits for most of it. The tiles are made in the order in which they will be
//! multiplied, a fixed number of quarters after each K step:
//!
//! * **ahead by a group of columns** where several blocks of rows use each tile: two buffers in L2, one of them read
//!   while the other is made;
//! * **ahead by [`RING_LEAD`] steps** where one block uses it (up to 32 rows, 64 where [`Panels::ring_of_64`] says so): a ring in L1.
//!
//! Panels that lie in memory as tiles are not made but prefetched, a group of columns ahead and at the same pace
//! (measured on a Sapphire Rapids, 512 x 8192 x 2048: 1.035 TFLOP/s a thread, 0.96 without). Where one block uses each
//! tile, nothing is prefetched: that is one ascending stream, and has not been measured.

use std::ops::Range;

use super::pack::TILE_LEN;

/// Where B tiles come from.
pub trait Panels {
    /// Tile `step` of panel `panel`, if the panel lies in memory as consecutive tiles.
    fn stored(&self, panel: usize, step: usize) -> Option<*const u16>;

    /// Writes tile `step` of `panel` (16 rows of W, 32 of K) to `out`, as
    /// [`pack_panel_bf16`](super::pack::pack_panel_bf16) lays it out.
    ///
    /// # Safety
    /// The panel has this step, and `out` room for a KiB.
    unsafe fn fill(&self, panel: usize, step: usize, out: *mut u16);

    /// Does a quarter of the work of [`Panels::fill`]. `out` is the address of the whole tile.
    ///
    /// # Safety
    /// As [`Panels::fill`]; `quarter < 4`.
    unsafe fn quarter(&self, panel: usize, step: usize, quarter: usize, out: *mut u16);

    /// Whether products of 49 to 64 rows use each tile once, from a ring in L1, rather than twice from L2. Measured on a Sapphire Rapids
    /// for tiles of q4_0, quiet and beside a hyperthread that uses tiles, TFLOP/s: made by f16 arithmetic 0.80 and 0.37 against 0.79 and
    /// 0.34; made in f32 0.64 and 0.35 against 0.69 and 0.32.
    fn ring_of_64(&self) -> bool {
        false
    }

    /// Prefetches the memory that [`Panels::quarter`] will read; for stored panels, that quarter of the tile itself.
    fn prefetch(&self, panel: usize, step: usize, quarter: usize);
}

/// Steps of a ring. Each has up to four tiles, so a ring takes at most 32 KiB.
pub(super) const RING: usize = 8;
/// Number of steps that a ring's tiles are made before they are used.
pub(super) const RING_LEAD: usize = 4;

/// Columns divided into groups of at most `wide` panels: whole groups, then ever smaller halves.
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
    /// Whether to prefetch the group after the one being made.
    prefetch: bool,
    /// Whether tiles lie in memory, so that they are prefetched rather than made.
    stored: bool,
    /// The next tile: group, its first panel and width, panel within it, step, quarter; and its slot.
    group: usize,
    first: usize,
    wide: usize,
    panel: usize,
    step: usize,
    quarter: usize,
    slot: usize,
    /// Number of quarters due, times `calls`.
    due: usize,
    calls: usize,
}

impl<'a> Maker<'a> {
    /// A maker for groups that are each multiplied with `calls` blocks of rows.
    ///
    /// # Safety
    /// `panels` has the groups' panels and `steps` of each; `buffer` has room for `slots` times `groups.wide` tiles,
    /// and `slots` is a multiple of the number of steps by which tiles are made ahead, at least twice that.
    pub(super) unsafe fn new(
        panels: &'a dyn Panels,
        groups: Groups,
        steps: Range<usize>,
        calls: usize,
        (buffer, slots): (*mut u16, usize),
        prefetch: bool,
    ) -> Maker<'a> {
        let (first, wide) = groups.get(0);
        let (step, stored) = (steps.start, panels.stored(0, steps.start).is_some());
        Maker {
            panels,
            groups,
            steps,
            buffer,
            slots,
            prefetch,
            stored,
            group: if stored && calls == 1 { groups.count() } else { 0 },
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

    /// Makes the next `steps` steps at once, before the first product. Stored panels need none.
    pub(super) fn begin(&mut self, steps: usize) {
        for _ in 0..steps {
            if self.stored && self.group < self.groups.count() {
                self.panel = self.wide - 1;
                self.advance();
                continue;
            }
            self.due += 4 * self.calls * self.wide;
            self.pay();
        }
    }

    /// Does the work that is due after one K step.
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
            let quarters = if all { 0..4 } else { self.quarter..self.quarter + 1 };
            // SAFETY: by the contract of `new`, the panel and the step exist and the slot is in the buffer.
            unsafe {
                if self.stored {
                    quarters.clone().for_each(|q| self.panels.prefetch(panel, step, q));
                } else if all {
                    self.panels.fill(panel, step, out);
                } else {
                    self.panels.quarter(panel, step, self.quarter, out);
                }
            }
            if self.prefetch && !self.stored && panel + self.wide < self.groups.panels {
                quarters.clone().for_each(|q| self.panels.prefetch(panel + self.wide, step, q));
            }
            self.due -= quarters.len() * self.calls;
            self.quarter = quarters.end % 4;
            if self.quarter == 0 {
                self.advance();
            }
        }
    }

    /// Moves to the next tile.
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
    use std::cell::RefCell;

    use super::*;

    /// Stored panels that record the prefetches.
    struct Asked {
        quarters: RefCell<Vec<(usize, usize, usize)>>,
    }

    impl Panels for Asked {
        fn stored(&self, _: usize, _: usize) -> Option<*const u16> {
            Some(std::ptr::null())
        }
        unsafe fn fill(&self, _: usize, _: usize, _: *mut u16) {
            unreachable!("stored")
        }
        unsafe fn quarter(&self, _: usize, _: usize, _: usize, _: *mut u16) {
            unreachable!("stored")
        }
        fn prefetch(&self, panel: usize, step: usize, quarter: usize) {
            self.quarters.borrow_mut().push((panel, step, quarter));
        }
    }

    /// Each quarter of each tile is prefetched once, in order, during the products of the previous group; those of the
    /// first group never, and none if each tile is used once.
    #[test]
    fn stored_panels_are_asked_for_a_group_ahead() {
        for (panels, steps, calls) in [(2, 5..7, 8), (7, 0..64, 8), (9, 3..8, 3), (8, 0..20, 2), (6, 0..9, 1)]
        {
            let (asked, groups) = (Asked { quarters: RefCell::new(Vec::new()) }, Groups { panels, wide: 2 });
            let slots = 2 * steps.len();
            let buffer = (std::ptr::null_mut(), slots);
            // SAFETY: nothing is made, so the buffer is not touched.
            let mut maker = unsafe { Maker::new(&asked, groups, steps.clone(), calls, buffer, true) };
            maker.begin(steps.len());
            assert!(asked.quarters.borrow().is_empty(), "before the first product");
            let mut want = Vec::new();
            for group in 0..groups.count() {
                for _ in 0..calls * steps.len() {
                    maker.beside();
                }
                if group + 1 < groups.count() && calls > 1 {
                    let (first, wide) = groups.get(group + 1);
                    let tiles = steps.clone().flat_map(|s| (first..first + wide).map(move |p| (p, s)));
                    want.extend(tiles.flat_map(|(p, s)| (0..4).map(move |q| (p, s, q))));
                }
                assert_eq!(*asked.quarters.borrow(), want, "{panels} panels, {calls} calls: group {group}");
            }
        }
    }

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
