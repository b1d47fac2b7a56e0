//! A step's lists in device memory: one block, one upload.
//!
//! ```text
//! …room… pages │ counts │ a word a row: tokens, positions, slots, … │ logit rows │ items of windowed layers │ items … room…
//!        └──────────────────────────────────── uploaded ───────────────────────────────────────┘
//! ```
//! A recorded graph finds the next step's lists where it found its own: in steps that share a graph ([`Step::graph_key`]),
//! every list begins at an offset that follows from the [`Limits`] and the number of rows. The two lists that grow with the
//! context lie at the ends: the page table ends where the counts begin (its first used entry is what moves), and the items of
//! layers without a window are last. So what is uploaded stays contiguous, and as short as the step's own lists.

use super::super::abi::{DecodeItem, PrefillItem};
use super::super::attention::{
    Capacity, Plan, PrefillKernel, Rows, SHORTEST_SPLIT, decode_item_bytes, prefill_item_bytes,
};
use super::scratch::{Scratch, attention_capacity, attention_shape};
use crate::Result;
use crate::cache::PAGE_TOKENS;
use crate::device::accelerator::{Attend, Limits, Shape, Step, StepDesc, StepSeq};
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

/// The row array whose padding is a position, not [`NONE`].
const ROW_POS: usize = 1;

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

/// Bytes that items are aligned to: they are read 16 bytes at a time.
const ITEM_ALIGN: usize = 16;

/// Byte offsets of what lies in front of the items, for steps of `n` rows.
struct Layout {
    n: usize,
    /// Where the page table ends and the counts begin.
    counts: usize,
    logits: usize,
    items: usize,
}

impl Layout {
    fn new(limits: &Limits, n: usize) -> Layout {
        let counts = (4 * limits.sequences * limits.pages_per_sequence).next_multiple_of(256);
        let logits = counts + 4 * (COUNTS + 6 * n);
        let items = (logits + 4 * n.min(limits.logit_rows)).next_multiple_of(ITEM_ALIGN);
        Layout { n, counts, logits, items }
    }

    fn count(&self, c: Count) -> usize {
        self.counts + 4 * c as usize
    }

    /// Of the `i`-th array of one word a row.
    fn row_array(&self, i: usize) -> usize {
        self.counts + 4 * (COUNTS + i * self.n)
    }
}

/// Bytes of all lists of any step within `limits`.
pub(super) fn bytes(limits: &Limits) -> usize {
    let cap = attention_capacity(limits);
    let items = cap.decode_items * size_of::<DecodeItem>() + cap.prefill_items * size_of::<PrefillItem>();
    // With a window there are two of each.
    Layout::new(limits, limits.rows).items + 2 * items
}

/// The bytes of a step's lists while they are put together: from `first`, an offset in the device's memory, on.
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

    /// Appends a list that others may follow `room` bytes further on. Where it begins.
    fn push(&mut self, list: &[u8], room: usize) -> usize {
        assert!(list.len() <= room, "{} bytes of lists in {room}: the limits are wrong", list.len());
        let at = self.first + self.bytes.len();
        self.bytes.extend_from_slice(list);
        self.bytes.resize(at - self.first + room, 0);
        at
    }
}

/// Makes the lists and enqueues their upload, one copy.
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
    let layout = Layout::new(limits, n);
    // Of one word a row, in the order of `Layout::row_array`.
    let mut lists = [0, 1, 2, 3, 4, 5].map(|i| vec![if i == ROW_POS { 0 } else { NONE }; n]);
    let [tokens, row_pos, row_slot, publish_slot, elsewhere, partial] = &mut lists;
    tokens[..rows].copy_from_slice(desc.tokens);

    // The page table ends where the counts begin; indices count from the beginning of its room.
    let used_pages = |s: &StepSeq<'_>| match s.attend {
        Attend::Elsewhere => 0..0,
        Attend::Here => 0..(s.first_pos + s.n_rows).div_ceil(PAGE_TOKENS),
        Attend::From { from } => from / PAGE_TOKENS..(s.first_pos + s.n_rows).div_ceil(PAGE_TOKENS),
    };
    let n_listed: usize = desc.seqs.iter().map(|s| used_pages(s).len()).sum();
    let room = layout.counts / 4;
    assert!(n_listed <= room, "{n_listed} pages in a table of {room}: the limits are wrong");
    let first_page = room - n_listed;
    let mut page_table: Vec<u32> = Vec::with_capacity(n_listed);
    let mut attended: Vec<Rows> = Vec::new();
    let (mut n_published, mut n_partial) = (0u32, 0u32);
    for s in desc.seqs {
        let from = match s.attend {
            Attend::From { from } => from,
            Attend::Here | Attend::Elsewhere => 0,
        };
        for i in 0..s.n_rows {
            let (row, pos) = (s.row0 + i, s.first_pos + i);
            row_pos[row] = pos as u32;
            if s.attend == Attend::Elsewhere {
                publish_slot[row] = n_published;
                elsewhere[n_published as usize] = row as u32;
                n_published += 1;
            } else {
                let page = s.pages[pos / PAGE_TOKENS];
                row_slot[row] = page * PAGE_TOKENS as u32 + (pos % PAGE_TOKENS) as u32;
            }
        }
        if s.attend == Attend::Elsewhere {
            continue;
        }
        let part = matches!(s.attend, Attend::From { .. }).then_some(n_partial);
        if part.is_some() {
            for i in 0..s.n_rows {
                partial[n_partial as usize] = (s.row0 + i) as u32;
                n_partial += 1;
            }
        }
        attended.push(Rows {
            row0: s.row0 as u32,
            n_rows: s.n_rows as u32,
            first_pos: s.first_pos as u32,
            from: from as u32,
            page: (first_page + page_table.len()) as u32,
            partial: part,
        });
        page_table.extend(&s.pages[used_pages(s)]);
    }

    // One token of every sequence, all here, all with logits: a step that others will look like.
    let alike =
        desc.seqs.iter().all(|s| s.n_rows == 1 && s.attend == Attend::Here) && desc.logit_rows.len() == taken;
    let launch_logits = if alike { n.min(limits.logit_rows) } else { desc.logit_rows.len() };
    let mut logit_rows = desc.logit_rows.to_vec();
    logit_rows.resize((layout.items - layout.logits) / 4, NONE);

    let tokens_per_sequence = limits.pages_per_sequence * PAGE_TOKENS;
    let bound = alike.then(|| Capacity::new(n, n, tokens_per_sequence).decode_items);
    let padding = taken as u32..n as u32;
    let prefill = PrefillKernel::best(rt, &attention_shape(shape));
    let plan = |window| Plan::new(&attended, padding.clone(), window, prefill.queries());
    let plain = plan(None);
    let windowed = shape.window.map(|w| plan(Some(w as u32))).unwrap_or_default();

    let mut counts = [0; COUNTS];
    for (count, value) in [
        (Count::Epoch, desc.epoch),
        (Count::Published, n_published),
        (Count::Partial, n_partial),
        (Count::Decode, plain.decode.len() as u32),
        (Count::Prefill, plain.prefill.len() as u32),
        (Count::WindowDecode, windowed.decode.len() as u32),
        (Count::WindowPrefill, windowed.prefill.len() as u32),
    ] {
        counts[count as usize] = value;
    }
    let first = layout.counts - 4 * page_table.len();
    let mut block = Block { first, bytes: vec![0; layout.items - first] };
    block.set(first, &page_table);
    block.set(layout.counts, &counts);
    for (i, list) in lists.iter().enumerate() {
        block.set(layout.row_array(i), list);
    }
    block.set(layout.logits, &logit_rows);

    let at = |offset: usize| memory.add(offset);
    let mut put = |plan: &Plan, counts: [Count; 2], room: Option<usize>| {
        let decode = decode_item_bytes(&plan.decode);
        let decode_at = block.push(decode, room.unwrap_or(decode.len()));
        let items = prefill_item_bytes(&plan.prefill);
        let prefill_at = block.push(items, items.len());
        let [n_decode, n_prefill] = counts.map(|c| at(layout.count(c)));
        Lists {
            decode: List { items: at(decode_at), n: n_decode, max: bound.unwrap_or(plan.decode.len()) },
            prefill: List { items: at(prefill_at), n: n_prefill, max: plan.prefill.len() },
        }
    };
    // Only the last list of a step that shares its graph may vary in length.
    let splits = window_splits(shape.window, tokens_per_sequence);
    let sequences = n.min(limits.sequences);
    let window_room = alike.then(|| (sequences * splits + n - sequences) * size_of::<DecodeItem>());
    let window =
        shape.window.map(|_| put(&windowed, [Count::WindowDecode, Count::WindowPrefill], window_room));
    let full = put(&plain, [Count::Decode, Count::Prefill], None);
    let room = bytes(limits) - first;
    assert!(
        block.bytes.len() <= room,
        "{} bytes of lists in {room}: the limits are wrong",
        block.bytes.len()
    );
    rt.upload(lane, at(first), &block.bytes)?;

    let row_array = |i: usize| at(layout.row_array(i));
    let count = |c: Count| at(layout.count(c));
    let inner = StepLists {
        tokens: row_array(0),
        row_pos: row_array(1),
        row_slot: row_array(2),
        publish_slot: row_array(3),
        n_published: count(Count::Published),
        max_published: n_published as usize,
        epoch: count(Count::Epoch),
        arrived: count(Count::Arrived),
        logit_rows: at(layout.logits),
        launch_logits,
        elsewhere: row_array(4),
        partial_rows: row_array(5),
        n_partial: count(Count::Partial),
        max_partial: n_partial as usize,
        page_table: memory,
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

/// The most splits of a row that sees at most `window` of at most `tokens` tokens.
fn window_splits(window: Option<usize>, tokens: usize) -> usize {
    let all = Capacity::new(1, 1, tokens).decode_items;
    // As many tokens as the shortest split has, wherever they begin, lie in two splits.
    window.map_or(all, |w| all.min(w.div_ceil(SHORTEST_SPLIT) + 1))
}
