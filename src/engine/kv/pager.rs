//! Which pages change sides (HELM §4).
//!
//! Above the high watermark of the device's pages the oldest full pages go to the host, down to the middle between the
//! watermarks; below the low one they come back, up to the middle. So what has just moved is no reason to move again. Pages of
//! sequences that are not in the step leave first, then those of the longest; they come back to the sequence that has
//! fewest away, which is the first to be whole again.
//!
//! Two calls a step. [`Pager::make_room`]: what must have moved before the step's own pages can be taken; with 20% to spare that
//! is rare. [`Pager::ahead`]: what moves beside the step, so that the next has room.

use std::ops::Range;

use super::{KvPages, SequenceKv};
use crate::cache::{KvGeometry, PAGE_TOKENS, PageMove};
use crate::program::{self, RequestId, Side};
use crate::{Error, Result};

/// Pages of the device above which the oldest leave, of 100.
const HIGH: usize = 80;
/// Pages of the device below which some come back, of 100.
const LOW: usize = 50;

/// Pages of a sequence that have changed sides in its table, and are to be copied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::engine) struct Moved {
    /// Whose: its place among the sequences.
    pub seq: usize,
    /// Of the request that has the place.
    pub generation: u32,
    /// The side they are on now.
    pub to: Side,
    /// Which, by position in the sequence.
    pub span: Range<u32>,
    /// Where they come from and go to, in order.
    pub copies: Vec<PageMove>,
}

impl Moved {
    /// Whose.
    pub fn request(&self) -> RequestId {
        RequestId { slot: self.seq as u32, generation: self.generation }
    }

    /// As an iteration has it.
    pub fn of_iteration(&self) -> program::PageMove {
        program::PageMove { request: self.request(), to: self.to, pages: self.span.clone() }
    }

    /// The copies have ended well.
    pub fn finish(&self, pages: &mut KvPages) {
        PageMove::finish(&self.copies, &mut pages.device, &mut pages.far);
    }

    /// The copies have failed, none is in flight any more, and what was reserved since has been given back: the pages are
    /// where they were.
    pub fn undo(&self, pages: &mut KvPages, sequences: &mut [Option<SequenceKv>]) {
        if let Some(s) = &mut sequences[self.seq] {
            s.undo(pages, self.to == Side::Host, &self.copies);
        }
    }
}

/// New tokens of a sequence of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) struct Room {
    /// Its place among the sequences.
    pub seq: usize,
    /// How many.
    pub tokens: usize,
    /// Whether they are attended as decode rows are.
    pub decode: bool,
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

/// What is to leave the device of one sequence.
struct Leaves {
    seq: usize,
    /// As many of its oldest full pages; `None`: all of it, and it grows on the host.
    full: Option<usize>,
}

impl Pager {
    /// For so many pages of the device. `prompts_on_host`: whether prompts can grow on the host (decode rows always can).
    pub fn new(device_pages: usize, prompts_on_host: bool) -> Pager {
        let of = |percent: usize| device_pages * percent / 100;
        let (high, low) = (of(HIGH), of(LOW));
        Pager { high, middle: (high + low).div_ceil(2), low, prompts_on_host }
    }

    /// Pages of the device that are in use when nothing moves: what stays of a full device.
    pub fn settled(&self) -> usize {
        self.middle
    }

    /// Moves what must have left before the pages of a step can be taken. The copies have to end first.
    ///
    /// # Errors
    /// Both sides together do not suffice: the numbers; then nothing has changed.
    pub fn make_room(
        &self,
        sequences: &mut [Option<SequenceKv>],
        pages: &mut KvPages,
        step: &[Room],
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

    /// Sequences of the step that grow on the host, and have room on the device again: their last page comes back, so that
    /// they grow there.
    fn come_home(
        &self,
        sequences: &mut [Option<SequenceKv>],
        pages: &mut KvPages,
        step: &[Room],
    ) -> Vec<Moved> {
        let wanted = |f: fn(&Wants) -> usize| -> usize { step.iter().map(|r| f(&wants(sequences, r))).sum() };
        let (mut need, mut far) = (wanted(|w| w.device), wanted(|w| w.far));
        let mut moved = Vec::new();
        for r in step {
            let Some(s) = sequences[r.seq].as_mut().filter(|s| grows_on_host(s)) else { continue };
            let len = s.len();
            let last = usize::from(!len.is_multiple_of(PAGE_TOKENS));
            let own = KvGeometry::pages_for(len + r.tokens) - len / PAGE_TOKENS;
            let used = pages.device.n_pages() - pages.device.n_free() + need + own;
            // Where it is may have no room.
            let stays = far <= pages.far.n_free() && self.can_grow_on_host(r);
            let most = if stays { self.middle } else { pages.device.n_pages() };
            if used > most {
                continue;
            }
            far -= wants_of(s, r.tokens).far;
            let from = (len / PAGE_TOKENS) as u32;
            let generation = s.generation();
            let split = s.split_mut().expect("it grows on the host");
            let Ok(copies) = split.recall(&mut pages.device, &mut pages.far, last) else { continue };
            need += own - last;
            if !copies.is_empty() {
                moved.push(Moved {
                    seq: r.seq,
                    generation,
                    to: Side::Device,
                    span: from..from + last as u32,
                    copies,
                });
            }
        }
        moved
    }

    fn can_grow_on_host(&self, r: &Room) -> bool {
        self.prompts_on_host || r.decode
    }

    /// Counts, and changes nothing.
    fn who_leaves(
        &self,
        sequences: &[Option<SequenceKv>],
        pages: &KvPages,
        step: &[Room],
    ) -> Result<Vec<Leaves>> {
        let wanted: Vec<Wants> = step.iter().map(|r| wants(sequences, r)).collect();
        let device: usize = wanted.iter().map(|w| w.device).sum();
        let mut far: usize = wanted.iter().map(|w| w.far).sum();
        let mut short = device.saturating_sub(pages.device.n_free());
        let far_short = |far: usize| far > pages.far.n_free();
        let strays = step
            .iter()
            .any(|r| sequences[r.seq].as_ref().is_some_and(grows_on_host) && !self.can_grow_on_host(r));
        if short == 0 && !far_short(far) && !strays {
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
        // Then all of a sequence, what is not full and what it wants too: others first, the most pages first.
        let mut whole: Vec<(bool, usize, usize)> = Vec::new();
        for (seq, s) in sequences.iter().enumerate() {
            let Some(s) = s.as_ref().filter(|s| !grows_on_host(s)) else { continue };
            let room = step.iter().position(|r| r.seq == seq);
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
            let want = step.iter().position(|r| r.seq == seq).map_or(0, |at| wanted[at].device);
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
        if short > 0 || far_short(far) || strays {
            return Err(Error::Capacity(format!(
                "KV cache: the step takes {device} more pages of {PAGE_TOKENS} tokens on the device, {} of {} free there, and \
                 {} of {} free on the host for those that would have to leave ({far} wanted); run fewer sequences, smaller \
                 chunks, or raise --kv-pages",
                pages.device.n_free(),
                pages.device.n_pages(),
                pages.far.n_free(),
                pages.far.n_pages(),
            )));
        }
        Ok(leaves)
    }

    /// Moves ahead of need, once the pages of a step have been taken: the copies may run beside it.
    pub fn ahead(
        &self,
        sequences: &mut [Option<SequenceKv>],
        pages: &mut KvPages,
        step: &[Room],
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
                // As many are free, and full.
                moved.extend(leave(sequences, pages, &Leaves { seq, full: Some(n) }).unwrap_or_default());
            }
        } else if used < self.low {
            let mut left = (self.middle - used).min(pages.device.n_free());
            let mut away: Vec<(usize, usize)> = step
                .iter()
                .filter_map(|r| Some((r.seq, sequences[r.seq].as_ref()?)))
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
                    });
                }
            }
        }
        moved
    }
}

/// Pages that a step takes.
struct Wants {
    device: usize,
    far: usize,
}

fn wants(sequences: &[Option<SequenceKv>], r: &Room) -> Wants {
    wants_of(sequences[r.seq].as_ref().expect("a live sequence"), r.tokens)
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

/// Sequences with full pages on the device, and how many: those that are not in the step first, then the longest.
fn victims(sequences: &[Option<SequenceKv>], step: &[Room]) -> Vec<(usize, usize)> {
    let mut found: Vec<(bool, usize, usize, usize)> = Vec::new();
    for (seq, s) in sequences.iter().enumerate() {
        let Some(s) = s else { continue };
        let n = s.split().map_or(0, |t| t.n_evictable());
        if n > 0 {
            found.push((step.iter().any(|r| r.seq == seq), s.len(), seq, n));
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
    Ok((!copies.is_empty()).then_some(Moved { seq: l.seq, generation, to: Side::Host, span, copies }))
}

#[cfg(test)]
mod tests {
    use super::super::Sides;
    use super::*;
    use crate::cache::KvDType;
    use crate::program::{Far, Kv};
    use proptest::prelude::*;

    const G: KvGeometry = KvGeometry { n_layers: 1, n_kv_heads: 1, head_dim: 16, dtype: KvDType::BF16 };

    /// Sequences whose pages hold who wrote them: (sequence, page, generation).
    struct World {
        pages: KvPages,
        sequences: Vec<Option<SequenceKv>>,
        memory: [Vec<Option<(usize, usize)>>; 2],
        pager: Pager,
        moves: usize,
    }

    impl World {
        fn new(device: usize, far: usize) -> World {
            World {
                pages: KvPages::new(G, device, far, 0).unwrap(),
                sequences: Vec::new(),
                memory: [vec![None; device], vec![None; far]],
                pager: Pager::new(device, false),
                moves: 0,
            }
        }

        fn add(&mut self, tokens: usize) -> usize {
            self.sequences.push(Some(SequenceKv::new(Sides { device: true, host: false })));
            let seq = self.sequences.len() - 1;
            self.step(&[Room { seq, tokens, decode: false }], false).unwrap();
            seq
        }

        fn copy(&mut self, moved: &[Moved]) {
            for m in moved {
                assert_eq!(m.copies.len(), m.span.len());
                for (page, c) in m.span.clone().zip(&m.copies) {
                    let [device, far] = &mut self.memory;
                    let (from, to) = match m.to {
                        Side::Host => (device[c.device as usize], &mut far[c.host as usize]),
                        Side::Device => (far[c.host as usize], &mut device[c.device as usize]),
                    };
                    assert_eq!(
                        from,
                        Some((m.seq, page as usize)),
                        "a page that is not where it should be moves"
                    );
                    *to = from;
                    self.moves += 1;
                }
                m.finish(&mut self.pages);
            }
        }

        /// As an engine does it.
        fn step(&mut self, step: &[Room], fails: bool) -> Result<()> {
            let World { pages, sequences, pager, .. } = self;
            let before = pager.make_room(sequences, pages, step)?;
            self.copy(&before);
            let World { pages, sequences, pager, .. } = self;
            for r in step {
                sequences[r.seq].as_mut().unwrap().reserve(pages, r.tokens).expect("room was made");
            }
            let ahead = pager.ahead(sequences, pages, step);
            if fails {
                for r in step {
                    let s = sequences[r.seq].as_mut().unwrap();
                    let len = s.len();
                    s.truncate(pages, len);
                }
                ahead.iter().rev().for_each(|m| m.undo(pages, sequences));
                return Ok(());
            }
            for r in step {
                let s = sequences[r.seq].as_mut().unwrap();
                let (first, end) = (s.len() / PAGE_TOKENS, KvGeometry::pages_for(s.len() + r.tokens));
                s.advance(r.tokens);
                for page in first..end {
                    let far = s.far_pages().len();
                    match page.checked_sub(far) {
                        Some(at) => self.memory[0][s.device_pages()[at] as usize] = Some((r.seq, page)),
                        None => self.memory[1][s.far_pages()[page] as usize] = Some((r.seq, page)),
                    }
                }
            }
            self.copy(&ahead);
            Ok(())
        }

        /// Every page of every sequence is where its table says, and nowhere is one of two.
        fn check(&self) {
            for (seq, s) in self.sequences.iter().enumerate() {
                let Some(s) = s else { continue };
                let far = s.far_pages().iter().map(|&p| self.memory[1][p as usize]);
                let all: Vec<_> =
                    far.chain(s.device_pages().iter().map(|&p| self.memory[0][p as usize])).collect();
                for page in 0..KvGeometry::pages_for(s.len()) {
                    assert_eq!(all[page], Some((seq, page)));
                }
            }
            assert_eq!((self.pages.device.n_waiting(), self.pages.far.n_waiting()), (0, 0));
        }

        fn used(&self) -> usize {
            self.pages.device.n_pages() - self.pages.device.n_free()
        }
    }

    #[test]
    fn above_the_watermark_the_longest_gives_its_oldest_pages() {
        let mut w = World::new(20, 40);
        let (a, b) = (w.add(6 * 32), w.add(10 * 32));
        assert_eq!((w.used(), w.moves), (16, 0), "80% are not above 80%");
        w.step(
            &[Room { seq: a, tokens: 32, decode: false }, Room { seq: b, tokens: 1, decode: true }],
            false,
        )
        .unwrap();
        // 18 are above it, and 13 are in the middle between 10 and 16.
        assert_eq!((w.used(), w.moves), (13, 5));
        let b = w.sequences[b].as_ref().unwrap();
        assert_eq!(b.kv(Far::Attend), Kv::Split { boundary: 160, far: Far::Attend });
        assert_eq!(w.sequences[a].as_ref().unwrap().kv(Far::Attend), Kv::Device);
        w.check();
    }

    #[test]
    fn what_has_moved_stays_until_there_is_much_room() {
        let mut w = World::new(20, 40);
        let (a, b) = (w.add(8 * 32), w.add(8 * 32));
        w.step(&[Room { seq: a, tokens: 1, decode: true }], false).unwrap();
        assert_eq!((w.used(), w.moves), (13, 4), "of the one that is not in the step");
        let step = [Room { seq: a, tokens: 1, decode: true }, Room { seq: b, tokens: 1, decode: true }];
        for _ in 0..30 {
            w.step(&step, false).unwrap();
        }
        assert_eq!(w.moves, 4, "nothing went to and fro");
        let mut gone = w.sequences[a].take().unwrap();
        gone.free(&mut w.pages);
        w.step(&[Room { seq: b, tokens: 1, decode: true }], false).unwrap();
        assert_eq!(w.sequences[b].as_ref().unwrap().kv(Far::Attend), Kv::Device, "all came back");
        w.check();
    }

    #[test]
    fn a_step_that_fails_moves_nothing() {
        let mut w = World::new(10, 20);
        let a = w.add(8 * 32);
        let before = w.sequences[a].as_ref().unwrap().device_pages().to_vec();
        w.step(&[Room { seq: a, tokens: 32, decode: false }], true).unwrap();
        let s = w.sequences[a].as_ref().unwrap();
        assert_eq!((s.device_pages(), s.boundary(), w.moves), (&before[..], 0, 0));
        w.check();
    }

    #[test]
    fn what_both_sides_together_cannot_hold_is_refused_with_the_numbers() {
        let mut w = World::new(4, 3);
        let a = w.add(3 * 32);
        let two = [Room { seq: a, tokens: 64, decode: false }];
        w.step(&two, false).unwrap();
        w.step(&two, false).unwrap();
        let e = w.step(&[Room { seq: a, tokens: 1, decode: true }], false).unwrap_err().to_string();
        assert!(e.contains("takes 1 more pages of 32 tokens on the device, 0 of 4 free"), "{e}");
        assert!(e.contains("0 of 3 free on the host"), "{e}");
        w.check();
        assert_eq!((w.used(), w.sequences[a].as_ref().unwrap().boundary()), (4, 96));
    }

    #[derive(Debug, Clone)]
    enum Act {
        Add(usize),
        Step(Vec<(usize, usize)>, bool),
        Cut(usize, usize),
        Remove(usize),
    }

    fn act() -> impl Strategy<Value = Act> {
        let tokens = || prop_oneof![3 => Just(1usize), 1 => 1..100usize];
        prop_oneof![
            2 => (1..200usize).prop_map(Act::Add),
            8 => (prop::collection::vec((0..5usize, tokens()), 1..4), any::<bool>())
                .prop_map(|(step, fails)| Act::Step(step, fails)),
            1 => (0..5usize, 0..300usize).prop_map(|(s, n)| Act::Cut(s, n)),
            1 => (0..5usize).prop_map(Act::Remove),
        ]
    }

    proptest! {
        #[test]
        fn no_page_is_lost_and_room_is_made_where_both_sides_suffice(
            acts in prop::collection::vec(act(), 1..60),
            device in 1..16usize,
            far in 1..24usize,
            prompts_on_host in any::<bool>(),
        ) {
            let mut w = World::new(device, far);
            w.pager = Pager::new(device, prompts_on_host);
            for act in acts {
                let (step, fails) = match act {
                    Act::Add(tokens) => {
                        w.sequences.push(Some(SequenceKv::new(Sides { device: true, host: false })));
                        (vec![(w.sequences.len() - 1, tokens)], false)
                    }
                    Act::Step(step, fails) => (step, fails),
                    Act::Cut(seq, len) => {
                        let World { pages, sequences, .. } = &mut w;
                        if let Some(Some(s)) = sequences.get_mut(seq) {
                            s.truncate(pages, len);
                        }
                        continue;
                    }
                    Act::Remove(seq) => {
                        if let Some(mut s) = w.sequences.get_mut(seq).and_then(Option::take) {
                            s.free(&mut w.pages);
                        }
                        continue;
                    }
                };
                let mut rooms: Vec<Room> = Vec::new();
                for (seq, tokens) in step {
                    if w.sequences.get(seq).is_some_and(Option::is_some) && rooms.iter().all(|r| r.seq != seq) {
                        rooms.push(Room { seq, tokens, decode: tokens == 1 });
                    }
                }
                let of = |r: &Room| w.sequences[r.seq].as_ref().unwrap();
                let takes: Vec<usize> = rooms.iter().map(|r| wants_of(of(r), r.tokens).device).collect();
                let held = device - w.pages.device.n_free() + far - w.pages.far.n_free();
                let suffices = held + takes.iter().sum::<usize>() <= device + far
                    && takes.iter().map(|n| n + 1).sum::<usize>() <= device
                    && rooms.iter().all(|r| !grows_on_host(of(r)));
                let lens: Vec<usize> = w.sequences.iter().map(|s| s.as_ref().map_or(0, SequenceKv::len)).collect();
                let done = w.step(&rooms, fails);
                prop_assert!(done.is_ok() || !suffices, "{} although both sides suffice", done.unwrap_err());
                w.check();
                for (seq, len) in lens.into_iter().enumerate() {
                    let more = rooms.iter().find(|r| r.seq == seq && done.is_ok() && !fails).map_or(0, |r| r.tokens);
                    let now = w.sequences[seq].as_ref().map_or(0, SequenceKv::len);
                    prop_assert_eq!(now, len + more);
                }
            }
            for s in w.sequences.iter_mut().flatten() {
                s.free(&mut w.pages);
            }
            prop_assert_eq!((w.pages.device.n_free(), w.pages.far.n_free()), (device, far));
        }
    }
}
