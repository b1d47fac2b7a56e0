//! A step's lists in device memory.
//!
//! ```text
//! counts │ tokens │ positions │ slots │ publish slots │ logit rows │ elsewhere rows │ partial rows │ pages │ items …
//! └────────────────────────── one upload ─────────────────────────────────────────┘
//! ```
//! Offsets follow from the [`Limits`] alone, so a recorded graph finds the next step's lists where it found its own.

use super::super::abi::{DecodeItem, PrefillItem};
use super::super::attention::{Capacity, Plan, PrefillKernel, Rows, decode_item_bytes, prefill_item_bytes};
use super::scratch::{Scratch, attention_capacity, attention_shape};
use crate::Result;
use crate::cache::PAGE_TOKENS;
use crate::device::accelerator::{Attend, Limits, Shape, Step, StepDesc};
use crate::device::runtime::{DevPtr, Lane, Runtime};

/// Nothing: in lists of rows.
const NONE: u32 = u32::MAX;

/// What the first words of the memory count. `ARRIVED` is kept by kernels.
#[derive(Clone, Copy)]
enum Count {
    Epoch,
    Published,
    Arrived,
    Partial,
    Decode,
    Prefill,
    WindowDecode,
    WindowPrefill,
}
const COUNTS: usize = 16;

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

/// What operations need to know of a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct StepLists {
    pub tokens: DevPtr,
    pub row_pos: DevPtr,
    pub row_slot: DevPtr,
    pub publish_slot: DevPtr,
    pub n_published: DevPtr,
    pub max_published: usize,
    pub epoch: DevPtr,
    pub arrived: DevPtr,
    pub logit_rows: DevPtr,
    /// Rows of logits launched for.
    pub launch_logits: usize,
    /// Rows attended elsewhere.
    pub elsewhere: DevPtr,
    /// Rows whose attention is merged with a part from elsewhere.
    pub partial_rows: DevPtr,
    pub n_partial: DevPtr,
    pub max_partial: usize,
    pub page_table: DevPtr,
    /// One more than the largest page number in it.
    pub n_pages: usize,
    pub prefill: PrefillKernel,
    pub full: Lists,
    pub window: Option<Lists>,
    pub scratch: Scratch,
}

/// Byte offsets.
struct Layout {
    rows: usize,
    logit_rows: usize,
    pages: usize,
    items: [usize; 4],
    end: usize,
}

impl Layout {
    fn new(limits: &Limits) -> Layout {
        let header = 4 * (COUNTS + 6 * limits.rows + limits.logit_rows);
        let pages = header.next_multiple_of(256);
        let cap = attention_capacity(limits);
        let mut at = pages + (4 * limits.sequences * limits.pages_per_sequence).next_multiple_of(256);
        let sizes =
            [cap.decode_items * size_of::<DecodeItem>(), cap.prefill_items * size_of::<PrefillItem>()];
        let items = [0, 1, 2, 3].map(|i| {
            let here = at;
            at += sizes[i % 2].next_multiple_of(256);
            here
        });
        Layout { rows: limits.rows, logit_rows: limits.logit_rows, pages, items, end: at }
    }

    /// Of the `i`-th array of one word a row.
    fn row_array(&self, i: usize) -> usize {
        4 * (COUNTS + i * self.rows)
    }

    fn logits(&self) -> usize {
        self.row_array(6)
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
    let (n, rows) = (desc.launch_rows, desc.tokens.len());
    let taken: usize = desc.seqs.iter().map(|s| s.n_rows).sum();
    assert!(
        taken <= rows && rows <= n && n <= limits.rows && desc.logit_rows.len() <= limits.logit_rows,
        "a step of {taken} rows with {rows} tokens and {} logits for {n}, within {limits:?}",
        desc.logit_rows.len()
    );
    let layout = Layout::new(limits);
    let mut words = vec![0u32; layout.logits() / 4 + layout.logit_rows];
    let array = |i: usize| layout.row_array(i) / 4..layout.row_array(i) / 4 + n;
    let [tokens, row_pos, row_slot, publish_slot, elsewhere, partial] = [0, 1, 2, 3, 4, 5].map(array);
    for list in [&row_slot, &publish_slot, &elsewhere, &partial] {
        words[list.clone()].fill(NONE);
    }
    words[tokens.clone()].fill(NONE);
    words[tokens.start..tokens.start + rows].copy_from_slice(desc.tokens);

    let mut page_table: Vec<u32> = Vec::new();
    let mut attended: Vec<Rows> = Vec::new();
    let (mut n_published, mut n_partial) = (0u32, 0u32);
    for s in desc.seqs {
        let from = match s.attend {
            Attend::From { from } => from,
            Attend::Here | Attend::Elsewhere => 0,
        };
        for i in 0..s.n_rows {
            let (row, pos) = (s.row0 + i, s.first_pos + i);
            words[row_pos.start + row] = pos as u32;
            if s.attend == Attend::Elsewhere {
                words[publish_slot.start + row] = n_published;
                words[elsewhere.start + n_published as usize] = row as u32;
                n_published += 1;
            } else {
                let page = s.pages[pos / PAGE_TOKENS];
                words[row_slot.start + row] = page * PAGE_TOKENS as u32 + (pos % PAGE_TOKENS) as u32;
            }
        }
        if s.attend == Attend::Elsewhere {
            continue;
        }
        let part = matches!(s.attend, Attend::From { .. }).then_some(n_partial);
        if part.is_some() {
            for i in 0..s.n_rows {
                words[partial.start + n_partial as usize] = (s.row0 + i) as u32;
                n_partial += 1;
            }
        }
        attended.push(Rows {
            row0: s.row0 as u32,
            n_rows: s.n_rows as u32,
            first_pos: s.first_pos as u32,
            from: from as u32,
            page: page_table.len() as u32,
            partial: part,
        });
        let used = (s.first_pos + s.n_rows).div_ceil(PAGE_TOKENS);
        page_table.extend(&s.pages[from / PAGE_TOKENS..used]);
    }

    // One token of every sequence, all here, all with logits: a step that others will look like.
    let alike =
        desc.seqs.iter().all(|s| s.n_rows == 1 && s.attend == Attend::Here) && desc.logit_rows.len() == taken;
    let logit_at = layout.logits() / 4;
    words[logit_at..].fill(NONE);
    words[logit_at..logit_at + desc.logit_rows.len()].copy_from_slice(desc.logit_rows);
    let launch_logits = if alike { n.min(layout.logit_rows) } else { desc.logit_rows.len() };

    let tokens_per_sequence = limits.pages_per_sequence * PAGE_TOKENS;
    let bound = alike.then(|| Capacity::new(n, n, tokens_per_sequence).decode_items);
    let padding = taken as u32..n as u32;
    let prefill = PrefillKernel::best(rt, &attention_shape(shape));
    let at = |offset: usize| memory.add(offset);
    let mut lists = |window: Option<u32>, first: usize, counts: [Count; 2]| -> Result<Lists> {
        let plan = Plan::new(&attended, padding.clone(), window, prefill.queries());
        words[counts[0] as usize] = plan.decode.len() as u32;
        words[counts[1] as usize] = plan.prefill.len() as u32;
        let (d, p) = (layout.items[first], layout.items[first + 1]);
        upload(rt, lane, at(d), decode_item_bytes(&plan.decode), layout.items[first + 1] - d)?;
        let room = layout.items.get(first + 2).copied().unwrap_or(layout.end) - p;
        upload(rt, lane, at(p), prefill_item_bytes(&plan.prefill), room)?;
        let count = |c: Count| at(4 * c as usize);
        Ok(Lists {
            decode: List { items: at(d), n: count(counts[0]), max: bound.unwrap_or(plan.decode.len()) },
            prefill: List { items: at(p), n: count(counts[1]), max: plan.prefill.len() },
        })
    };
    let full = lists(None, 0, [Count::Decode, Count::Prefill])?;
    let window = match shape.window {
        Some(w) => Some(lists(Some(w as u32), 2, [Count::WindowDecode, Count::WindowPrefill])?),
        None => None,
    };
    words[Count::Epoch as usize] = desc.epoch;
    words[Count::Published as usize] = n_published;
    words[Count::Partial as usize] = n_partial;
    let header: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    rt.upload(lane, memory, &header)?;
    let pages: Vec<u8> = page_table.iter().flat_map(|w| w.to_le_bytes()).collect();
    upload(rt, lane, at(layout.pages), &pages, layout.items[0] - layout.pages)?;

    let row_array = |i: usize| at(layout.row_array(i));
    let count = |c: Count| at(4 * c as usize);
    let inner = StepLists {
        tokens: row_array(0),
        row_pos: row_array(1),
        row_slot: row_array(2),
        publish_slot: row_array(3),
        n_published: count(Count::Published),
        max_published: n_published as usize,
        epoch: count(Count::Epoch),
        arrived: count(Count::Arrived),
        logit_rows: at(layout.logits()),
        launch_logits,
        elsewhere: row_array(4),
        partial_rows: row_array(5),
        n_partial: count(Count::Partial),
        max_partial: n_partial as usize,
        page_table: at(layout.pages),
        n_pages: page_table.iter().max().map_or(0, |&p| p as usize + 1),
        prefill,
        full,
        window,
        scratch: Scratch::new(shape, limits),
    };
    Ok(Step {
        rows: n,
        n_logits: desc.logit_rows.len(),
        graph_key: alike.then_some(n as u64),
        inner: std::sync::Arc::new(inner),
    })
}

fn upload(rt: &dyn Runtime, lane: Lane, to: DevPtr, data: &[u8], room: usize) -> Result<()> {
    assert!(data.len() <= room, "{} bytes of lists in {room}: the limits are wrong", data.len());
    if data.is_empty() { Ok(()) } else { rt.upload(lane, to, data) }
}
