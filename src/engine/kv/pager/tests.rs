use super::super::Sides;
use super::*;
use crate::cache::KvType;
use crate::program::{Far, Kv, Wants};
use proptest::prelude::*;

const G: KvGeometry = KvGeometry { n_layers: 1, n_kv_heads: 1, head_dim: 16, dtype: KvType::BF16 };

/// New tokens of a sequence.
fn rows(seq: usize, tokens: usize, decode: bool) -> Group {
    Group {
        request: RequestId { slot: seq as u32, generation: 0 },
        phase: if decode { Phase::Decode } else { Phase::Prefill },
        first: 0,
        tokens: tokens as u32,
        kv: Kv::Device,
        wants: Wants::Last,
    }
}

/// Sequences whose pages record their writer: (sequence, page, generation).
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
        self.step(&[rows(seq, tokens, false)], false).unwrap();
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
                assert_eq!(from, Some((m.seq, page as usize)), "a page that is not where it should be moves");
                *to = from;
                self.moves += 1;
            }
            m.finish(&mut self.pages);
        }
    }

    /// Runs a step like an engine.
    fn step(&mut self, step: &[Group], fails: bool) -> Result<()> {
        let World { pages, sequences, pager, .. } = self;
        let before = pager.make_room(sequences, pages, step)?;
        self.copy(&before);
        let World { pages, sequences, pager, .. } = self;
        for r in step {
            sequences[slot(r)].as_mut().unwrap().reserve(pages, r.tokens as usize).expect("room was made");
        }
        let ahead = pager.ahead(sequences, pages, step);
        if fails {
            for r in step {
                let s = sequences[slot(r)].as_mut().unwrap();
                let len = s.len();
                s.truncate(pages, len);
            }
            ahead.iter().rev().for_each(|m| m.undo(pages, sequences));
            return Ok(());
        }
        for r in step {
            let s = sequences[slot(r)].as_mut().unwrap();
            let (first, end) = (s.len() / PAGE_TOKENS, KvGeometry::pages_for(s.len() + r.tokens as usize));
            s.advance(r.tokens as usize);
            for page in first..end {
                let far = s.far_pages().len();
                match page.checked_sub(far) {
                    Some(at) => self.memory[0][s.device_pages()[at] as usize] = Some((slot(r), page)),
                    None => self.memory[1][s.far_pages()[page] as usize] = Some((slot(r), page)),
                }
            }
        }
        self.copy(&ahead);
        Ok(())
    }

    /// Checks that every page of every sequence is where its table says, and that no two sequences share a page.
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
    w.step(&[rows(a, 32, false), rows(b, 1, true)], false).unwrap();
    // 18 pages are above the high watermark, and 13 are midway between 10 and 16.
    assert_eq!((w.used(), w.moves), (13, 5));
    let b = w.sequences[b].as_ref().unwrap();
    assert_eq!(b.kv(Far::Attend), Kv::Split { boundary: 160, far: Far::Attend });
    assert_eq!(w.sequences[a].as_ref().unwrap().kv(Far::Attend), Kv::Device);
    w.check();
}

/// A prompt whose pages have all left the device but that the device attends comes back if there is room, or is refused
/// with the numbers before anything has moved; with staging memory it grows where it is.
#[test]
fn a_prompt_that_has_left_the_device_needs_room_there() {
    let mut w = World::new(6, 40);
    let a = w.add(40);
    let World { pages, sequences, .. } = &mut w;
    let copies = sequences[a].as_mut().unwrap().split_mut().unwrap();
    let copies = copies.swap_out(&mut pages.device, &mut pages.far).unwrap();
    w.copy(&[Moved { seq: a, generation: 0, to: Side::Host, span: 0..2, grew_on_host: false, copies }]);
    let b = w.add(4 * 32);
    let (free, moves) = ((w.pages.device.n_free(), w.pages.far.n_free()), w.moves);
    let step = [rows(a, 60, false), rows(b, 1, true)];
    let error = w.step(&step, false).expect_err("there is no room").to_string();
    for part in
        ["60 rows of a prompt whose 40 tokens", "takes 3 of its pages; 2 of 6 are free", "`far` stream"]
    {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert_eq!(
        ((w.pages.device.n_free(), w.pages.far.n_free()), w.moves),
        (free, moves),
        "nothing has changed"
    );
    w.check();
    // A shorter prompt has room.
    w.step(&[rows(a, 20, false)], false).unwrap();
    assert!(!grows_on_host(w.sequences[a].as_ref().unwrap()));
    w.check();
    // A streamed prompt needs no room.
    w.pager = Pager::new(6, true);
    let World { pages, sequences, .. } = &mut w;
    let s = sequences[a].as_mut().unwrap();
    let copies = s.split_mut().unwrap().swap_out(&mut pages.device, &mut pages.far).unwrap();
    let from = KvGeometry::pages_for(s.len()) as u32 - copies.len() as u32;
    let span = from..from + copies.len() as u32;
    w.copy(&[Moved { seq: a, generation: 0, to: Side::Host, span, grew_on_host: false, copies }]);
    w.step(&step, false).unwrap();
    assert!(grows_on_host(w.sequences[a].as_ref().unwrap()));
    w.check();
}

#[test]
fn what_has_moved_stays_until_there_is_much_room() {
    let mut w = World::new(20, 40);
    let (a, b) = (w.add(8 * 32), w.add(8 * 32));
    w.step(&[rows(a, 1, true)], false).unwrap();
    assert_eq!((w.used(), w.moves), (13, 4), "of the one that is not in the step");
    let step = [rows(a, 1, true), rows(b, 1, true)];
    for _ in 0..30 {
        w.step(&step, false).unwrap();
    }
    assert_eq!(w.moves, 4, "nothing went to and fro");
    let mut gone = w.sequences[a].take().unwrap();
    gone.free(&mut w.pages);
    w.step(&[rows(b, 1, true)], false).unwrap();
    assert_eq!(w.sequences[b].as_ref().unwrap().kv(Far::Attend), Kv::Device, "all came back");
    w.check();
}

#[test]
fn a_step_that_fails_moves_nothing() {
    let mut w = World::new(10, 20);
    let a = w.add(8 * 32);
    let before = w.sequences[a].as_ref().unwrap().device_pages().to_vec();
    w.step(&[rows(a, 32, false)], true).unwrap();
    let s = w.sequences[a].as_ref().unwrap();
    assert_eq!((s.device_pages(), s.boundary(), w.moves), (&before[..], 0, 0));
    w.check();
}

#[test]
fn what_both_sides_together_cannot_hold_is_refused_with_the_numbers() {
    let mut w = World::new(4, 3);
    let a = w.add(3 * 32);
    let two = [rows(a, 64, false)];
    w.step(&two, false).unwrap();
    w.step(&two, false).unwrap();
    let e = w.step(&[rows(a, 1, true)], false).unwrap_err().to_string();
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
            let mut groups: Vec<Group> = Vec::new();
            for (seq, tokens) in step {
                if w.sequences.get(seq).is_some_and(Option::is_some) && groups.iter().all(|r| slot(r) != seq) {
                    groups.push(rows(seq, tokens, tokens == 1));
                }
            }
            let of = |r: &Group| w.sequences[slot(r)].as_ref().unwrap();
            let takes: Vec<usize> = groups.iter().map(|r| wants_of(of(r), r.tokens as usize).device).collect();
            let held = device - w.pages.device.n_free() + far - w.pages.far.n_free();
            let suffices = held + takes.iter().sum::<usize>() <= device + far
                && takes.iter().map(|n| n + 1).sum::<usize>() <= device
                && groups.iter().all(|r| !grows_on_host(of(r)));
            let lens: Vec<usize> = w.sequences.iter().map(|s| s.as_ref().map_or(0, SequenceKv::len)).collect();
            let done = w.step(&groups, fails);
            prop_assert!(done.is_ok() || !suffices, "{} although both sides suffice", done.unwrap_err());
            w.check();
            for (seq, len) in lens.into_iter().enumerate() {
                let more = groups.iter().find(|r| slot(r) == seq && done.is_ok() && !fails).map_or(0, |r| r.tokens as usize);
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
