//! A step's lists in device memory.
//!
//! ```text
//! counts │ a word a row: tokens, positions, slots, publication │ logit rows │ items of each part │ pages │ items …
//! └────────────────────────────────────── one upload ──────────────────────────────────────────┘
//! ```
//! Offsets follow from the [`Limits`] alone, so a recorded graph finds the next step's lists where it found its own.

use super::super::abi::{DecodeItem, PrefillItem};
use super::super::attention::{Capacity, Plan, PrefillKernel, Rows, decode_item_bytes, prefill_item_bytes};
use super::scratch::{Scratch, attention_capacity, attention_shape};
use crate::cache::PAGE_TOKENS;
use crate::device::accelerator::{Attend, Limits, Shape, Step, StepDesc, StepRows, StepSeq};
use crate::device::runtime::{DevPtr, Lane, Runtime};
use crate::{Error, Result};

/// Nothing: in lists of rows.
const NONE: u32 = u32::MAX;

/// What the first words of the memory count. `ARRIVED` is kept by kernels.
#[derive(Clone, Copy)]
enum Count {
    Epoch,
    Published,
    Arrived,
}
const COUNTS: usize = 16;

/// Arrays of one word a row.
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

/// One work list.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct List {
    pub items: DevPtr,
    pub n: DevPtr,
    /// Upper bound of the number of items, for the grid.
    pub max: usize,
}

/// The work lists of layers that see the same tokens.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Lists {
    pub decode: List,
    pub prefill: List,
}

/// The work of the rows between two cuts.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PartLists {
    pub full: Lists,
    /// Of layers with the model's window.
    pub window: Option<Lists>,
}

/// What operations need to know of a step.
#[derive(Debug, Clone)]
pub(super) struct StepLists {
    pub tokens: DevPtr,
    pub row_pos: DevPtr,
    pub row_slot: DevPtr,
    /// Place in the mailbox of a row, or none; how many rows have one.
    pub publish_slot: DevPtr,
    pub n_published: DevPtr,
    /// The row of each place.
    pub published: DevPtr,
    pub epoch: DevPtr,
    pub arrived: DevPtr,
    pub logit_rows: DevPtr,
    /// Rows of logits launched for.
    pub launch_logits: usize,
    /// Rows attended elsewhere, and their places in the mailbox.
    pub elsewhere: DevPtr,
    pub places: DevPtr,
    /// Rows whose attention is merged with a part from elsewhere.
    pub partial_rows: DevPtr,
    /// 1, 2, 3, …: how many rows a kernel is to take that reads it from memory; as many words as there are partial rows.
    pub counts: DevPtr,
    pub page_table: DevPtr,
    /// One more than the largest page number in it.
    pub n_pages: usize,
    pub prefill: PrefillKernel,
    pub parts: Vec<PartLists>,
    pub scratch: Scratch,
}

/// Byte offsets.
struct Layout {
    rows: usize,
    /// Words of the upload.
    words: usize,
    /// Of the counts of items, in words: [`PART_LISTS`] for every part, of which there are as many as sequences at most.
    part_counts: usize,
    pages: usize,
    items: [usize; PART_LISTS],
    capacity: Capacity,
    end: usize,
}

impl Layout {
    fn new(limits: &Limits) -> Layout {
        let part_counts = COUNTS + ARRAYS * limits.rows + limits.logit_rows;
        let words = part_counts + PART_LISTS * limits.sequences.max(1);
        let pages = (4 * words).next_multiple_of(256);
        let cap = attention_capacity(limits);
        let mut at = pages + (4 * limits.sequences * limits.pages_per_sequence).next_multiple_of(256);
        let sizes =
            [cap.decode_items * size_of::<DecodeItem>(), cap.prefill_items * size_of::<PrefillItem>()];
        let items = [0, 1, 2, 3].map(|i| {
            let here = at;
            at += sizes[i % 2].next_multiple_of(256);
            here
        });
        Layout { rows: limits.rows, words, part_counts, pages, items, capacity: cap, end: at }
    }

    /// Of an array of one word a row.
    fn array(&self, array: Array) -> usize {
        4 * (COUNTS + array as usize * self.rows)
    }

    fn logits(&self) -> usize {
        4 * (COUNTS + ARRAYS * self.rows)
    }
}

/// Bytes of all lists of any step within `limits`.
pub(super) fn bytes(limits: &Limits) -> usize {
    Layout::new(limits).end
}

/// Makes the lists and enqueues their upload.
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
    let layout = Layout::new(limits);
    let mut words = vec![0u32; layout.words];
    let array = |a: Array| layout.array(a) / 4..layout.array(a) / 4 + n;
    for list in [Array::Tokens, Array::Slots, Array::PublishSlots] {
        words[array(list)].fill(NONE);
    }
    let mut put = |a: Array, values: &[u32]| words[array(a)][..values.len()].copy_from_slice(values);
    put(Array::Tokens, desc.tokens);
    put(Array::Published, rows.published());
    put(Array::Elsewhere, rows.elsewhere());
    put(Array::Partial, rows.partial());
    let places: Vec<u32> = rows.elsewhere().iter().filter_map(|&r| rows.place(r)).map(|p| p as u32).collect();
    put(Array::Places, &places);
    put(Array::Counts, &(1..=rows.partial().len() as u32).collect::<Vec<_>>());
    for (place, &row) in rows.published().iter().enumerate() {
        words[array(Array::PublishSlots)][row as usize] = place as u32;
    }

    let mut page_table: Vec<u32> = Vec::new();
    let mut attended: Vec<Rows> = Vec::new();
    for s in desc.seqs.iter().filter(|s| s.n_rows > 0) {
        let positions = s.first_pos..s.first_pos + s.n_rows;
        for (row, pos) in (s.row0..).zip(positions.clone()) {
            words[array(Array::Positions)][row] = pos as u32;
        }
        if s.attend == Attend::Elsewhere {
            continue;
        }
        let from = s.attend.first_token();
        for (row, pos) in (s.row0..).zip(positions.clone()) {
            let page = s.pages[(pos - from) / PAGE_TOKENS];
            words[array(Array::Slots)][row] = page * PAGE_TOKENS as u32 + (pos % PAGE_TOKENS) as u32;
        }
        attended.push(Rows {
            row0: s.row0 as u32,
            n_rows: s.n_rows as u32,
            first_pos: s.first_pos as u32,
            from: from as u32,
            page: page_table.len() as u32,
            partial: rows.partial().binary_search(&(s.row0 as u32)).ok().map(|p| p as u32),
        });
        page_table.extend(&s.pages[..(positions.end - from).div_ceil(PAGE_TOKENS)]);
    }

    // One token of every sequence, all here, all with logits: a step that others will look like.
    let one = |s: &StepSeq<'_>| s.n_rows == 1 && s.attend == Attend::Here;
    let alike = desc.seqs.iter().all(one) && desc.logit_rows.len() == taken && desc.cuts.is_empty();
    let logit_at = layout.logits() / 4;
    words[logit_at..logit_at + limits.logit_rows].fill(NONE);
    words[logit_at..logit_at + desc.logit_rows.len()].copy_from_slice(desc.logit_rows);
    let launch_logits = if alike { n.min(limits.logit_rows) } else { desc.logit_rows.len() };

    let tokens_per_sequence = limits.pages_per_sequence * PAGE_TOKENS;
    let bound = alike.then(|| Capacity::new(n, n, tokens_per_sequence).decode_items);
    let prefill = PrefillKernel::best(rt, &attention_shape(shape));
    let at = |offset: usize| memory.add(offset);
    // Items of all parts, one behind the other, of one kind and one window each.
    let mut decode: [Vec<DecodeItem>; 2] = Default::default();
    let mut tiles: [Vec<PrefillItem>; 2] = Default::default();
    let mut parts = Vec::new();
    for (i, part) in rows.parts().enumerate() {
        let own = attended.partition_point(|r| (r.row0 as usize) < part.start)
            ..attended.partition_point(|r| (r.row0 as usize) < part.end);
        // Rows behind those taken are the last part's.
        let padding = part.end.min(taken.max(part.start)) as u32..part.end as u32;
        let mut lists = |window: Option<u32>| -> Result<Lists> {
            let plan = Plan::new(&attended[own.clone()], padding.clone(), window, prefill.queries());
            fits("splits of attention", plan.splits, layout.capacity.splits)?;
            let w = usize::from(window.is_some());
            let count = layout.part_counts + PART_LISTS * i + 2 * w;
            words[count] = plan.decode.len() as u32;
            words[count + 1] = plan.prefill.len() as u32;
            let (d, p) = (layout.items[2 * w], layout.items[2 * w + 1]);
            let made = Lists {
                decode: List {
                    items: at(d + decode[w].len() * size_of::<DecodeItem>()),
                    n: at(4 * count),
                    max: bound.unwrap_or(plan.decode.len()),
                },
                prefill: List {
                    items: at(p + tiles[w].len() * size_of::<PrefillItem>()),
                    n: at(4 * (count + 1)),
                    max: plan.prefill.len(),
                },
            };
            decode[w].extend(plan.decode);
            tiles[w].extend(plan.prefill);
            Ok(made)
        };
        let full = lists(None)?;
        let window = shape.window.map(|w| lists(Some(w as u32))).transpose()?;
        parts.push(PartLists { full, window });
    }
    for w in [0, 1] {
        fits("items of decode attention", decode[w].len(), layout.capacity.decode_items)?;
        fits("items of prefill attention", tiles[w].len(), layout.capacity.prefill_items)?;
    }
    words[Count::Epoch as usize] = desc.epoch;
    words[Count::Published as usize] = rows.published().len() as u32;
    let header: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    let pages: Vec<u8> = page_table.iter().flat_map(|w| w.to_le_bytes()).collect();
    upload(rt, lane, memory, &header)?;
    upload(rt, lane, at(layout.pages), &pages)?;
    for w in [0, 1] {
        upload(rt, lane, at(layout.items[2 * w]), decode_item_bytes(&decode[w]))?;
        upload(rt, lane, at(layout.items[2 * w + 1]), prefill_item_bytes(&tiles[w]))?;
    }

    let array = |a: Array| at(layout.array(a));
    let count = |c: Count| at(4 * c as usize);
    let inner = StepLists {
        tokens: array(Array::Tokens),
        row_pos: array(Array::Positions),
        row_slot: array(Array::Slots),
        publish_slot: array(Array::PublishSlots),
        n_published: count(Count::Published),
        published: array(Array::Published),
        epoch: count(Count::Epoch),
        arrived: count(Count::Arrived),
        logit_rows: at(layout.logits()),
        launch_logits,
        elsewhere: array(Array::Elsewhere),
        places: array(Array::Places),
        partial_rows: array(Array::Partial),
        counts: array(Array::Counts),
        page_table: at(layout.pages),
        n_pages: page_table.iter().max().map_or(0, |&p| p as usize + 1),
        prefill,
        parts,
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

/// What was planned from the limits holds what a step needs.
fn fits(what: &str, n: usize, most: usize) -> Result<()> {
    match n <= most {
        true => Ok(()),
        false => Err(Error::Capacity(format!("a step of {n} {what}, {most} were planned for"))),
    }
}

fn upload(rt: &dyn Runtime, lane: Lane, to: DevPtr, data: &[u8]) -> Result<()> {
    if data.is_empty() { Ok(()) } else { rt.upload(lane, to, data) }
}
