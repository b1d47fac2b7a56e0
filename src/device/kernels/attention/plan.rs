//! Work lists of a step's attention: a pure function of its rows.
//!
//! Up to `DECODE_RUN_ROWS` rows of a sequence are decoded row by row: the row's tokens are cut into splits, at
//! multiples of a length that follows from the row's position alone. More rows are prefill: tiles of 64 or 128 queries,
//! and a row's result does not depend on its tile. So the result of a row does not depend on the other rows of the
//! step.

use std::ops::Range;

use super::super::abi::{
    ATTENTION_FINAL, DECODE_SPLIT_MAX, DecodeItem, KV_PAGE_TOKENS, PREFILL_QUERIES, PREFILL_QUERIES_SM90A,
    PrefillItem,
};

/// Sequences with at most this many rows are decoded row by row: a prefill tile would be mostly padding, and has no
/// splits to spread a long context over the device.
const DECODE_RUN_ROWS: u32 = 4;

/// Consecutive rows of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowRun {
    /// First row of the step.
    pub row0: u32,
    /// Rows.
    pub n_rows: u32,
    /// Position of the first row.
    pub first_pos: u32,
    /// First token attended on this device, at the beginning of a page; 0 unless another device attends the tokens
    /// before it.
    pub from: u32,
    /// First token after those attended on this device; `u32::MAX` unless another device attends the tokens from there
    /// on.
    pub to: u32,
    /// Index in the page table of the page that holds token `from`; the pages of later tokens follow.
    pub page: u32,
    /// If set, the rows are written as partial rows, from this row of the partial output on.
    pub partial: Option<u32>,
}

/// The work items of a step, for all layers that see the same tokens.
#[derive(Debug, Clone, Default)]
pub struct AttentionPlan {
    /// Decode items, long ones first.
    pub decode: Vec<DecodeItem>,
    /// Prefill items, long ones first, so that short ones fill the gaps at the end of a launch.
    pub prefill: Vec<PrefillItem>,
    /// Splits that need a place in the workspace.
    pub splits: usize,
}

/// Tokens of the shortest splits.
pub const SHORTEST_SPLIT: usize = 256;

/// Tokens per split of a row that sees tokens up to `end`. Short splits let a small batch fill the device; longer ones
/// bound the work of merging (at most 32 splits up to 32k tokens).
fn split_tokens(end: u32) -> u32 {
    match end {
        0..=8192 => SHORTEST_SPLIT as u32,
        8193..=16384 => 512,
        _ => DECODE_SPLIT_MAX,
    }
}

/// First token that the row at `pos` sees.
fn first_seen(pos: u32, from: u32, window: Option<u32>) -> u32 {
    from.max((pos + 1).saturating_sub(window.unwrap_or(u32::MAX)))
}

impl AttentionPlan {
    /// Plans a step with these rows, and with padding rows whose output becomes zero. A row sees its own token and
    /// those before it; with a window, only the last `window` of them. Prefill items have up to `queries` rows
    /// ([`super::PrefillKernel::queries`]).
    ///
    /// # Panics
    /// If `from` is not at the beginning of a page, the window is 0, or no kernel takes that many `queries`: invariants
    /// of the caller.
    pub fn new(rows: &[RowRun], padding: Range<u32>, window: Option<u32>, queries: u32) -> AttentionPlan {
        assert!([PREFILL_QUERIES, PREFILL_QUERIES_SM90A].contains(&queries), "tiles of {queries} queries");
        assert_ne!(window, Some(0), "a window of no tokens");
        let mut plan = AttentionPlan::default();
        for r in rows {
            assert!(r.from.is_multiple_of(KV_PAGE_TOKENS), "tokens attended here begin at {}", r.from);
            if r.n_rows <= DECODE_RUN_ROWS {
                for i in 0..r.n_rows {
                    plan.decode_row(r, i, window);
                }
            } else {
                plan.prefill_tiles(r, window, queries);
            }
        }
        for row in padding {
            plan.decode.push(DecodeItem { row, n_splits: 1, partial: ATTENTION_FINAL, ..Default::default() });
        }
        // The sort is stable: items of equal length keep their order, and neighbours share pages in L2.
        plan.decode.sort_by_key(|i| std::cmp::Reverse(i.end - i.begin));
        plan.prefill.sort_by_key(|i| std::cmp::Reverse(i.end - i.begin));
        plan
    }

    fn decode_row(&mut self, rows: &RowRun, i: u32, window: Option<u32>) {
        let pos = rows.first_pos + i;
        let end = rows.to.min(pos + 1);
        let begin = first_seen(pos, rows.from, window).min(end);
        let split = split_tokens(end);
        let first = begin / split;
        let n_splits = (end.div_ceil(split) - first).max(1);
        for s in 0..n_splits {
            self.decode.push(DecodeItem {
                row: rows.row0 + i,
                pages: rows.page.wrapping_sub(rows.from / KV_PAGE_TOKENS),
                begin: begin.max((first + s) * split),
                end: end.min((first + s + 1) * split),
                split: s,
                n_splits,
                workspace: if n_splits > 1 { self.splits as u32 } else { 0 },
                partial: rows.partial.map_or(ATTENTION_FINAL, |p| p + i),
            });
        }
        if n_splits > 1 {
            self.splits += n_splits as usize;
        }
    }

    fn prefill_tiles(&mut self, rows: &RowRun, window: Option<u32>, queries: u32) {
        for at in (0..rows.n_rows).step_by(queries as usize) {
            let n_rows = queries.min(rows.n_rows - at);
            let first_pos = rows.first_pos + at;
            let end = rows.to.min(first_pos + n_rows);
            self.prefill.push(PrefillItem {
                row0: rows.row0 + at,
                n_rows,
                first_pos,
                pages: rows.page.wrapping_sub(rows.from / KV_PAGE_TOKENS),
                begin: first_seen(first_pos, rows.from, window).min(end),
                end,
                partial: rows.partial.map_or(ATTENTION_FINAL, |p| p + at),
                reserved: 0,
            });
        }
    }
}

/// Upper bounds of the plans of all steps within some limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Decode items.
    pub decode_items: usize,
    /// Prefill items.
    pub prefill_items: usize,
    /// Splits in the workspace.
    pub splits: usize,
}

impl Capacity {
    /// Capacity for steps with up to `rows` rows in up to `sequences` sequences of up to `tokens` tokens.
    pub fn new(rows: usize, sequences: usize, tokens: usize) -> Capacity {
        // The number of splits peaks just before their length doubles, or at the end.
        let most = [8192, 16384, tokens]
            .into_iter()
            .filter(|&n| n <= tokens)
            .map(|n| n.div_ceil(split_tokens(n as u32) as usize))
            .max()
            .unwrap_or(1)
            .max(1);
        let decode_rows = rows.min(sequences * DECODE_RUN_ROWS as usize);
        Capacity {
            // Decode rows and padding rows together are never more than all rows.
            decode_items: decode_rows * most + (rows - decode_rows),
            prefill_items: rows / PREFILL_QUERIES as usize + sequences,
            splits: decode_rows * most,
        }
    }
}

impl Capacity {
    /// Capacity where the tokens attended on this device may begin at any page, not only at token 0: a span of `tokens`
    /// tokens may begin and end within a split.
    pub fn anywhere(rows: usize, sequences: usize, tokens: usize) -> Capacity {
        let aligned = Capacity::new(rows, sequences, tokens);
        let more = rows.min(sequences * DECODE_RUN_ROWS as usize);
        Capacity { decode_items: aligned.decode_items + more, splits: aligned.splits + more, ..aligned }
    }
}

/// What is uploaded.
pub fn decode_item_bytes(items: &[DecodeItem]) -> &[u8] {
    // SAFETY: eight u32 each, without padding; any bytes are initialised.
    unsafe { std::slice::from_raw_parts(items.as_ptr().cast(), size_of_val(items)) }
}

/// What is uploaded.
pub fn prefill_item_bytes(items: &[PrefillItem]) -> &[u8] {
    // SAFETY: eight u32 each, without padding; any bytes are initialised.
    unsafe { std::slice::from_raw_parts(items.as_ptr().cast(), size_of_val(items)) }
}
