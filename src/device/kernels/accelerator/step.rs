//! A step's lists in device memory: one block, one upload.
//!
//! ```text
//! …room… pages │ counts │ a word a row: tokens, positions, slots, … │ logit rows │ counts of items │ items of windowed layers │ items … room…
//!        └──────────────────────────────────────────── uploaded ──────────────────────────────────────────────────┘
//! ```
//! A recorded graph finds the next step's lists where it found its own: in steps that share a graph ([`Step::graph_key`]),
//! every list begins at an offset that follows from the [`Limits`] and the number of rows. The two lists that grow with
//! the context lie at the ends: the page table ends where the counts begin (so its first used entry moves), and the
//! items of layers without a window come last. The upload therefore stays contiguous, and as short as the step's own
//! lists.

use std::ops::Range;

use super::super::abi::{DecodeItem, PrefillItem};
use super::super::attention::{
    AttentionPlan, Capacity, PrefillKernel, RowRun, SHORTEST_SPLIT, decode_item_bytes, prefill_item_bytes,
};
use super::lists::{List, Lists, PartLists, StepLists};
use super::scratch::{Scratch, attention_capacity, attention_shape};
use super::uses::pages_of;
use crate::cache::PAGE_TOKENS;
use crate::device::accelerator::{Attend, Limits, Shape, Step, StepDesc, StepRows, StepSeq};
use crate::device::runtime::{DevPtr, Lane, Runtime};
use crate::{Error, Result};

/// The entry that stands for no row in a list of rows.
const NONE: u32 = u32::MAX;

/// The counters in the first words of the memory. Kernels maintain `ARRIVED`.
#[derive(Clone, Copy)]
enum Count {
    Epoch,
    Published,
    Arrived,
}
const COUNTS: usize = 16;

/// Arrays with one word per row.
#[derive(Clone, Copy)]
enum Array {
    Tokens,
    Positions,
    Slots,
    PublishSlots,
    Published,
    Elsewhere,
    Places,
    Partial,
    Counts,
}
const ARRAYS: usize = 9;

/// Work lists of a part of a step: decode and prefill, of layers without and with the window.
const PART_LISTS: usize = 4;

/// Alignment of the items in bytes: kernels read them 16 bytes at a time.
const ITEM_ALIGN: usize = 16;

/// Byte offsets of the lists in front of the items, for steps of `n` rows and `parts` parts of attention.
struct ListLayout {
    n: usize,
    /// Where the page table ends and the counts begin.
    counts: usize,
    logits: usize,
    /// Offset of the counts of items: [`PART_LISTS`] for every part.
    part_counts: usize,
    items: usize,
}

impl ListLayout {
    fn new(limits: &Limits, n: usize, parts: usize) -> ListLayout {
        let counts = (4 * limits.sequences * limits.pages_per_sequence).next_multiple_of(256);
        let logits = counts + 4 * (COUNTS + ARRAYS * n);
        let part_counts = logits + 4 * n.min(limits.logit_rows);
        let items = (part_counts + 4 * PART_LISTS * parts).next_multiple_of(ITEM_ALIGN);
        ListLayout { n, counts, logits, part_counts, items }
    }

    fn count(&self, c: Count) -> usize {
        self.counts + 4 * c as usize
    }

    /// Offset of an array with one word per row.
    fn array(&self, array: Array) -> usize {
        self.counts + 4 * (COUNTS + array as usize * self.n)
    }

    /// Offset of the count of list `list` of part `part`.
    fn part_count(&self, part: usize, list: usize) -> usize {
        self.part_counts + 4 * (PART_LISTS * part + list)
    }
}

/// Bytes of all lists of any step within `limits`.
pub(super) fn bytes(limits: &Limits) -> usize {
    let cap = attention_capacity(limits);
    let items = cap.decode_items * size_of::<DecodeItem>() + cap.prefill_items * size_of::<PrefillItem>();
    // With a window there are two lists of each kind.
    ListLayout::new(limits, limits.rows, limits.sequences.max(1)).items + 2 * items
}

/// A step's lists while they are assembled; the first byte goes to offset `first` in device memory.
struct Block {
    first: usize,
    bytes: Vec<u8>,
}

impl Block {
    fn set(&mut self, offset: usize, words: &[u32]) {
        let at = offset - self.first;
        for (to, word) in self.bytes[at..at + 4 * words.len()].chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
    }

    fn fill(&mut self, offset: usize, n: usize, word: u32) {
        self.set(offset, &vec![word; n]);
    }

    /// Appends a list and reserves `room` bytes for it. Returns the offset at which the list begins.
    fn push(&mut self, list: &[u8], room: usize) -> Result<usize> {
        fits("bytes of lists", list.len(), room)?;
        let at = self.first + self.bytes.len();
        self.bytes.extend_from_slice(list);
        self.bytes.resize(at - self.first + room, 0);
        Ok(at)
    }
}

/// Makes the lists and enqueues their upload as one copy.
pub(super) fn prepare(
    rt: &dyn Runtime,
    lane: Lane,
    shape: &Shape,
    limits: &Limits,
    desc: &StepDesc<'_>,
    memory: DevPtr,
) -> Result<Step> {
    let rows = StepRows::new(limits, desc)?;
    let (n, taken) = (desc.launch_rows, rows.taken());
    let layout = ListLayout::new(limits, n, rows.parts().count());

    // The page table ends where the counts begin; its indices count from the beginning of the space reserved for it.
    let used = |s: &StepSeq<'_>| {
        s.attend.end(s.first_pos + s.n_rows).saturating_sub(s.attend.first_token()).div_ceil(PAGE_TOKENS)
    };
    let seqs = || desc.seqs.iter().filter(|s| s.n_rows > 0);
    let n_listed: usize = seqs().map(used).sum();
    fits("pages", n_listed, layout.counts / 4)?;
    let first_page = layout.counts / 4 - n_listed;
    let first = 4 * first_page;
    let mut block = Block { first, bytes: vec![0; layout.items - first] };
    for list in [Array::Tokens, Array::Slots, Array::PublishSlots] {
        block.fill(layout.array(list), n, NONE);
    }
    let mut put = |a: Array, values: &[u32]| block.set(layout.array(a), values);
    put(Array::Tokens, desc.tokens);
    put(Array::Published, rows.published());
    put(Array::Elsewhere, rows.elsewhere());
    put(Array::Partial, rows.partial());
    let places: Vec<u32> = rows.elsewhere().iter().filter_map(|&r| rows.place(r)).map(|p| p as u32).collect();
    put(Array::Places, &places);
    put(Array::Counts, &(1..=rows.partial().len() as u32).collect::<Vec<_>>());
    for (place, &row) in rows.published().iter().enumerate() {
        block.set(layout.array(Array::PublishSlots) + 4 * row as usize, &[place as u32]);
    }

    let mut page_table: Vec<u32> = Vec::with_capacity(n_listed);
    let mut attended: Vec<RowRun> = Vec::new();
    for s in seqs() {
        let positions = s.first_pos as u32..(s.first_pos + s.n_rows) as u32;
        block.set(layout.array(Array::Positions) + 4 * s.row0, &positions.clone().collect::<Vec<_>>());
        if s.attend == Attend::Elsewhere {
            continue;
        }
        let (from, page_tokens) = (s.attend.first_token(), PAGE_TOKENS as u32);
        let slot = |pos: u32| s.pages[(pos as usize - from) / PAGE_TOKENS] * page_tokens + pos % page_tokens;
        if s.attend.stores() {
            block.set(layout.array(Array::Slots) + 4 * s.row0, &positions.map(slot).collect::<Vec<_>>());
        }
        attended.push(RowRun {
            row0: s.row0 as u32,
            n_rows: s.n_rows as u32,
            first_pos: s.first_pos as u32,
            from: from as u32,
            to: match s.attend {
                Attend::UpTo { to } => to as u32,
                _ => u32::MAX,
            },
            page: (first_page + page_table.len()) as u32,
            partial: rows.partial().binary_search(&(s.row0 as u32)).ok().map(|p| p as u32),
        });
        page_table.extend(&s.pages[..used(s)]);
    }
    block.set(first, &page_table);

    // One token of every sequence, all attended here and all with logits: later steps will have the same shape.
    let one = |s: &StepSeq<'_>| s.n_rows == 1 && s.attend == Attend::Here;
    let alike = desc.seqs.iter().all(one) && desc.logit_rows.len() == taken && desc.cuts.is_empty();
    block.fill(layout.logits, n.min(limits.logit_rows), NONE);
    block.set(layout.logits, desc.logit_rows);
    let launch_logits = if alike { n.min(limits.logit_rows) } else { desc.logit_rows.len() };
    block.set(layout.count(Count::Epoch), &[desc.epoch]);
    block.set(layout.count(Count::Published), &[rows.published().len() as u32]);

    // Each list holds the items of one kind and one window, all parts in order.
    let capacity = attention_capacity(limits);
    let tokens_per_sequence = limits.pages_per_sequence * PAGE_TOKENS;
    let bound = alike.then(|| Capacity::new(n, n, tokens_per_sequence).decode_items);
    let prefill = PrefillKernel::best(rt, &attention_shape(shape));
    let mut decode: [Vec<DecodeItem>; 2] = Default::default();
    let mut tiles: [Vec<PrefillItem>; 2] = Default::default();
    // For each part and window: the ranges of its decode items and of its prefill tiles.
    let mut found: Vec<[Option<[Range<usize>; 2]>; 2]> = Vec::new();
    for (i, part) in rows.parts().enumerate() {
        let own = attended.partition_point(|r| (r.row0 as usize) < part.start)
            ..attended.partition_point(|r| (r.row0 as usize) < part.end);
        // Padding rows after the last taken row belong to the last part.
        let padding = part.end.min(taken.max(part.start)) as u32..part.end as u32;
        let mut lists = |window: Option<u32>| -> Result<[Range<usize>; 2]> {
            let plan = AttentionPlan::new(&attended[own.clone()], padding.clone(), window, prefill.queries());
            fits("splits of attention", plan.splits, capacity.splits)?;
            let w = usize::from(window.is_some());
            block.set(layout.part_count(i, 2 * w), &[plan.decode.len() as u32, plan.prefill.len() as u32]);
            let (d, t) = (decode[w].len(), tiles[w].len());
            decode[w].extend(plan.decode);
            tiles[w].extend(plan.prefill);
            Ok([d..decode[w].len(), t..tiles[w].len()])
        };
        let full = lists(None)?;
        let window = shape.window.map(|w| lists(Some(w as u32))).transpose()?;
        found.push([Some(full), window]);
    }
    for w in [0, 1] {
        fits("items of decode attention", decode[w].len(), capacity.decode_items)?;
        fits("items of prefill attention", tiles[w].len(), capacity.prefill_items)?;
    }
    // In steps that share a graph only the last list may vary in length; such steps have no prefill tiles.
    let splits = window_splits(shape.window, tokens_per_sequence);
    let sequences = n.min(limits.sequences);
    let mut items = [[0; 2]; 2];
    for w in [1, 0] {
        let (d, t) = (decode_item_bytes(&decode[w]), prefill_item_bytes(&tiles[w]));
        let room = match (alike, w, shape.window) {
            (true, 1, Some(_)) => (sequences * splits + n - sequences) * size_of::<DecodeItem>(),
            _ => d.len(),
        };
        items[w] = [block.push(d, room)?, block.push(t, t.len())?];
    }
    fits("bytes of lists", first + block.bytes.len(), bytes(limits))?;
    rt.upload(lane, memory.add(first), &block.bytes)?;

    let at = |offset: usize| memory.add(offset);
    let lists = |part: usize, w: usize, [d, t]: &[Range<usize>; 2]| Lists {
        decode: List {
            items: at(items[w][0] + d.start * size_of::<DecodeItem>()),
            n: at(layout.part_count(part, 2 * w)),
            max: bound.unwrap_or(d.len()),
        },
        prefill: List {
            items: at(items[w][1] + t.start * size_of::<PrefillItem>()),
            n: at(layout.part_count(part, 2 * w + 1)),
            max: t.len(),
        },
    };
    let parts = found.iter().enumerate().map(|(i, [full, window])| PartLists {
        full: full.as_ref().map(|f| lists(i, 0, f)).unwrap_or_default(),
        window: window.as_ref().map(|f| lists(i, 1, f)),
    });
    let array = |a: Array| at(layout.array(a));
    let count = |c: Count| at(layout.count(c));
    let inner = StepLists {
        tokens: array(Array::Tokens),
        row_pos: array(Array::Positions),
        row_slot: array(Array::Slots),
        publish_slot: array(Array::PublishSlots),
        n_published: count(Count::Published),
        published: array(Array::Published),
        epoch: count(Count::Epoch),
        arrived: count(Count::Arrived),
        logit_rows: at(layout.logits),
        launch_logits,
        elsewhere: array(Array::Elsewhere),
        places: array(Array::Places),
        partial_rows: array(Array::Partial),
        counts: array(Array::Counts),
        page_table: memory,
        n_pages: page_table.iter().max().map_or(0, |&p| p as usize + 1),
        pages: pages_of(rt, desc),
        prefill,
        parts: parts.collect(),
        scratch: Scratch::new(shape, limits),
    };
    Ok(Step {
        rows: n,
        n_logits: desc.logit_rows.len(),
        lists: std::sync::Arc::new(rows),
        graph_key: alike.then_some(n as u64),
        inner: std::sync::Arc::new(inner),
    })
}

/// Maximum number of splits of a row that sees at most `window` of at most `tokens` tokens.
fn window_splits(window: Option<usize>, tokens: usize) -> usize {
    let all = Capacity::new(1, 1, tokens).decode_items;
    // A run of tokens as long as the shortest split may begin anywhere, so it touches up to two splits.
    window.map_or(all, |w| all.min(w.div_ceil(SHORTEST_SPLIT) + 1))
}

/// Returns an error if a step needs more than was planned from the limits.
fn fits(what: &str, n: usize, most: usize) -> Result<()> {
    match n <= most {
        true => Ok(()),
        false => Err(Error::Capacity(format!("a step of {n} {what}, {most} were planned for"))),
    }
}
