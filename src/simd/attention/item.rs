//! One work item: one or more blocks of rows against a range of segments.
//!
//! **Order of reading.** One KV head needs 8 or 16 KiB of a page, and the heads of a page are neighbours. An item
//! therefore covers several KV heads and processes them page by page rather than head by head: memory is read in runs
//! of whole pages, or longer runs where a sequence's pages are neighbours too. Scattered runs of 8 to 24 KiB can be
//! read at 62% of the bandwidth of long ones, runs of 128 KiB at 82% (Zen 4, two cores; decision 0011).

use std::ops::Range;

use super::SEGMENT;
use super::kernels::{
    BLOCK, BlockKernels, GROUPS, MAX_ROWS, PAGES, Pv, Qk, RUN_BLOCKS, Run, RunBlock, Softcap, Softmax,
};
use super::partial::{AttnOut, merge_body, normalise, with_sink};
use super::scratch::{Own, Slots};
use super::shape::{AttnShape, Seq};
use crate::cache::{LayerKv, PAGE_TOKENS};
use crate::reference;
use crate::tensor::Rows;

/// The rows and segments of an item. Rows are ordered by (KV head, position, query head of the group). More positions than a row
/// block has room for are several row blocks, of one KV head.
#[derive(Clone, Debug)]
pub(super) struct Work {
    pub seq: usize,
    pub kv_heads: Range<usize>,
    /// Which query heads of each KV head's group.
    pub heads: Range<usize>,
    pub pos: Range<usize>,
    pub segments: Range<usize>,
    /// Tokens of a segment.
    pub segment: usize,
    /// The first token that the sequence attends at all, at the beginning of a page; earlier pages are not touched.
    pub from: usize,
    /// The tokens that any of the rows sees; may be empty.
    pub seen: Range<usize>,
}

impl Work {
    pub(super) fn rows(&self) -> usize {
        self.kv_heads.len() * self.rows_per_kv_head()
    }

    pub(super) fn rows_per_kv_head(&self) -> usize {
        self.pos.len() * self.heads.len()
    }

    /// Positions of a row block.
    fn block_positions(&self) -> usize {
        (MAX_ROWS / self.heads.len()).max(1)
    }

    /// Row blocks.
    pub(super) fn row_blocks(&self) -> usize {
        self.pos.len().div_ceil(self.block_positions()).max(1)
    }

    /// Row block `i`, and the segments from which its rows take anything: one at least, even if they see no token, for they have a
    /// result, too. A row's block and its segments do not depend on how many row blocks are together.
    fn row_block(&self, i: usize, inp: &Inputs<'_>) -> Work {
        if self.row_blocks() == 1 {
            return self.clone();
        }
        let first = self.pos.start + i * self.block_positions();
        let pos = first..(first + self.block_positions()).min(self.pos.end);
        let seen = inp.shape.seen(&pos, &inp.seq.tokens);
        let all = segments_of(&seen, self.segment);
        let segments = self.segments.start.max(all.start)..self.segments.end.min(all.end);
        Work { pos, seen, segments, ..self.clone() }
    }

    /// The first token of `segment` that is read: blocks lie at multiples of their size, but not before `from`.
    fn first_token(&self, segment: usize) -> usize {
        (self.seen.start / BLOCK * BLOCK).max(self.from).max(segment * self.segment)
    }

    /// (row, position, query head) of all rows, in order; query heads come in groups of `group`.
    fn each_row(&self, group: usize) -> impl Iterator<Item = (usize, usize, usize)> + use<'_> {
        let rows = self.kv_heads.clone().flat_map(move |kv_head| {
            self.pos.clone().flat_map(move |pos| self.heads.clone().map(move |h| (pos, kv_head * group + h)))
        });
        rows.enumerate().map(|(r, (pos, head))| (r, pos, head))
    }
}

/// The segments of rows that see the tokens `seen`: one at least.
pub(super) fn segments_of(seen: &Range<usize>, segment: usize) -> Range<usize> {
    let first = seen.start / segment;
    first..seen.end.div_ceil(segment).max(first + 1)
}

/// Which kernels run, by the rows of a KV head in a row block.
#[derive(Clone, Copy)]
pub(super) struct Choice {
    /// `None`: the reference tier.
    pub many: Option<&'static BlockKernels>,
    /// The kernels for up to `vector_rows` rows, if they differ.
    pub few: Option<&'static BlockKernels>,
    pub vector_rows: usize,
}

impl Choice {
    fn of(&self, w: &Work) -> Option<&'static BlockKernels> {
        self.few.filter(|_| w.rows_per_kv_head() <= self.vector_rows).or(self.many)
    }
}

/// The inputs of an item.
pub(super) struct Inputs<'a> {
    pub shape: &'a AttnShape,
    pub choice: Choice,
    pub kv: &'a LayerKv<'a>,
    pub pages: &'a [u32],
    pub seq: &'a Seq,
    pub q: Rows<'a>,
    /// The worker's probable next item, if it sees any token; its first keys are prefetched.
    pub next: Option<(&'a Work, &'a [u32])>,
}

impl Inputs<'_> {
    fn group(&self) -> usize {
        self.shape.n_heads / self.shape.n_kv_heads
    }

    /// Tokens that position `pos` sees.
    fn visible(&self, pos: usize) -> Range<usize> {
        self.shape.visible(pos, &self.seq.tokens)
    }

    /// Row of a position in q and in the results.
    fn row(&self, pos: usize) -> usize {
        self.seq.row0 + pos - self.seq.first_pos
    }

    fn query(&self, pos: usize, head: usize) -> &[f32] {
        let hd = self.shape.head_dim;
        &self.q.row(self.row(pos))[head * hd..(head + 1) * hd]
    }
}

/// The destination of an item's results.
pub(super) struct Sink<'a> {
    kind: Kind<'a>,
}

enum Kind<'a> {
    /// The caller's rows.
    Rows(AttnOut<'a>),
    /// Slot (segment − first)·stride + row0 + row.
    Segments { slots: Slots, first: usize, stride: usize, row0: usize },
}

// SAFETY: items write disjoint parts of the target, which is borrowed mutably for as long as the sink
// lives; the unsafe functions that write through it state so.
unsafe impl Sync for Sink<'_> {}

impl<'a> Sink<'a> {
    pub(super) fn rows(out: AttnOut<'a>) -> Sink<'a> {
        Sink { kind: Kind::Rows(out) }
    }

    /// A sink for the rows of `part`, which has some of the KV heads of `whole`, the owner of these slots.
    pub(super) fn segments(slots: Slots, whole: &Work, part: &Work) -> Sink<'a> {
        let (first, stride) = (whole.segments.start, whole.rows());
        let row0 = (part.kv_heads.start - whole.kv_heads.start) * whole.rows_per_kv_head();
        Sink { kind: Kind::Segments { slots, first, stride, row0 } }
    }
}

/// Runs an item and delivers its rows.
///
/// # Safety
/// `own` belongs to this worker and has room for the item's row blocks; no other item delivers the same (row, head)s, or segments of
/// them, to `sink`, whose target is large enough for them.
pub(super) unsafe fn run_work(inp: &Inputs<'_>, w: &Work, own: &mut Own, sink: &Sink<'_>) {
    let hd = inp.shape.head_dim;
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    let _tiles = inp.choice.many.is_some_and(super::amx::uses_tiles).then(super::amx::session);
    let n = w.row_blocks();
    // SAFETY: buffers hold MAX_ROWS rows of each row block (`Shared::worker`); sinks by the caller's promise.
    unsafe {
        for i in 0..n {
            let part = w.row_block(i, inp);
            let rows = part.rows();
            assert!(rows <= MAX_ROWS, "{rows} rows in a row block");
            own.turn_to(i, hd);
            clear(own, rows, hd);
            let Some(k) = inp.choice.of(&part) else { continue };
            let row_bytes = hd * if k.bf16 { 2 } else { 4 };
            for (r, pos, head) in part.each_row(inp.group()) {
                (k.pack_q)(inp.query(pos, head), inp.shape.scale / k.unit, own.q.add(r * row_bytes));
            }
        }
        // All row blocks see some tokens before any of them sees the next: as many as one segment of the usual length, which
        // a core's own cache holds.
        let together = (SEGMENT / w.segment).max(1);
        for first in w.segments.clone().step_by(together) {
            let end = (first + together).min(w.segments.end);
            for i in 0..n {
                let part = w.row_block(i, inp);
                let kernels = inp.choice.of(&part);
                let unit = kernels.map_or(1.0, |k| k.unit);
                own.turn_to(i, hd);
                // The last one asks for what all of them read next.
                let read_to = if i + 1 == n { part.segments.end } else { end };
                let asks = Asks { end: read_to * w.segment, next_item: i + 1 == n };
                for segment in part.segments.start.max(first)..part.segments.end.min(end) {
                    match kernels {
                        Some(k) => blocks(inp, k, &part, segment, asks, own),
                        None => naive(inp, &part, segment, own),
                    }
                    own.m[..part.rows()].iter_mut().for_each(|m| *m *= unit);
                    keep(inp, w, &part, segment, own, sink);
                }
            }
        }
        if !matches!(sink.kind, Kind::Segments { .. }) {
            for i in 0..n {
                own.turn_to(i, hd);
                deliver(inp, &w.row_block(i, inp), own, sink);
            }
        }
    }
}

/// Adds the results of a segment, of the row block `part` of `w`, to what `own` has of its rows, or puts them where another item will
/// merge them.
///
/// # Safety
/// As [`run_work`].
unsafe fn keep(inp: &Inputs<'_>, w: &Work, part: &Work, segment: usize, own: &mut Own, sink: &Sink<'_>) {
    let hd = inp.shape.head_dim;
    // (Several row blocks have one KV head.)
    let before = (part.pos.start - w.pos.start) * w.heads.len();
    let kernels = inp.choice.of(part);
    // SAFETY: buffers hold MAX_ROWS rows, slots all rows of the split.
    unsafe {
        for r in 0..part.rows() {
            let sum = fold_lanes(&*own.sum.add(r));
            let o = Own::row(own.o, r, hd);
            match sink.kind {
                Kind::Segments { slots, first, stride, row0 } => {
                    let slot = (segment - first) * stride + row0 + before + r;
                    slots.m.add(slot).write(own.m[r]);
                    slots.s.add(slot).write(sum);
                    slots.o.add(slot * hd).copy_from_nonoverlapping(o.as_ptr(), hd);
                }
                _ => accumulate(kernels, hd, own, r, (own.m[r], sum, o)),
            }
        }
    }
}

/// Merges all segments of one KV head's rows of a split item, in order, and delivers them.
///
/// # Safety
/// As [`run_work`], and all segments of these rows are in `slots`.
pub(super) unsafe fn merge_split(
    inp: &Inputs<'_>,
    whole: &Work,
    kv_head: usize,
    slots: Slots,
    own: &mut Own,
    sink: &Sink<'_>,
) {
    let w = &Work { kv_heads: kv_head..kv_head + 1, ..whole.clone() };
    let hd = inp.shape.head_dim;
    let row0 = (kv_head - whole.kv_heads.start) * w.rows();
    own.turn_to(0, hd);
    for i in 0..w.row_blocks() {
        let part = w.row_block(i, inp);
        let kernels = inp.choice.of(&part);
        let before = row0 + (part.pos.start - w.pos.start) * w.heads.len();
        // SAFETY: the caller's promise.
        unsafe {
            clear(own, part.rows(), hd);
            for segment in part.segments.clone() {
                for r in 0..part.rows() {
                    let slot = (segment - w.segments.start) * whole.rows() + before + r;
                    let o = std::slice::from_raw_parts(slots.o.add(slot * hd), hd);
                    accumulate(kernels, hd, own, r, (*slots.m.add(slot), *slots.s.add(slot), o));
                }
            }
            deliver(inp, &part, own, sink);
        }
    }
}

/// # Safety
/// `own` belongs to this worker and `rows` <= MAX_ROWS.
unsafe fn clear(own: &mut Own, rows: usize, hd: usize) {
    own.acc_m[own.block][..rows].fill(f32::NEG_INFINITY);
    own.acc_s[own.block][..rows].fill(0.0);
    // SAFETY: `acc` holds MAX_ROWS rows.
    unsafe { own.acc.write_bytes(0, rows * hd) };
}

/// # Safety
/// `own` belongs to this worker and `r` < MAX_ROWS; `part` does not alias its accumulator.
unsafe fn accumulate(
    kernels: Option<&BlockKernels>,
    hd: usize,
    own: &mut Own,
    r: usize,
    part: (f32, f32, &[f32]),
) {
    // SAFETY: the accumulator is this worker's; a tier is only selected on a machine that has it.
    unsafe {
        let o = Own::row(own.acc, r, hd);
        let acc = (&mut own.acc_m[own.block][r], &mut own.acc_s[own.block][r], o);
        match kernels {
            Some(k) => (k.merge)(acc, part),
            None => merge_body(acc, part),
        }
    }
}

/// Delivers the rows of the row block `w`, to which `own` is turned.
///
/// # Safety
/// As [`run_work`].
unsafe fn deliver(inp: &Inputs<'_>, w: &Work, own: &Own, sink: &Sink<'_>) {
    let hd = inp.shape.head_dim;
    let (acc_m, acc_s) = (&own.acc_m[own.block], &own.acc_s[own.block]);
    for (r, pos, head) in w.each_row(inp.group()) {
        let row = inp.row(pos);
        // SAFETY: the accumulator is this worker's; nothing else writes this (row, head) of the target (the caller's
        // promise).
        unsafe {
            let o = Own::row(own.acc, r, hd);
            match &sink.kind {
                Kind::Rows(AttnOut::Whole(out)) => {
                    let out = out.part(row, head * hd, hd).as_mut_ptr();
                    normalise(acc_s[r], o, |d, x| out.add(d).write(x));
                }
                Kind::Rows(AttnOut::WithSinks(out, sinks)) => {
                    let (_, s, factor) = with_sink((acc_m[r], acc_s[r]), sinks[head]);
                    o.iter_mut().for_each(|o| *o *= factor);
                    let out = out.part(row, head * hd, hd).as_mut_ptr();
                    normalise(s, o, |d, x| out.add(d).write(x));
                }
                Kind::Rows(AttnOut::Partial(out)) => {
                    out.m.part(row, head, 1)[0] = acc_m[r];
                    out.s.part(row, head, 1)[0] = acc_s[r];
                    for (to, &x) in out.o.part(row, head * hd, hd).iter_mut().zip(&*o) {
                        *to = x + 0.0;
                    }
                }
                Kind::Segments { .. } => unreachable!("segments are stored as they are computed"),
            }
        }
    }
}

/// Adds the 16 lanes of a sum, always in the same order.
fn fold_lanes(lanes: &[f32; 16]) -> f32 {
    let mut x = *lanes;
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            x[i] += x[i + half];
        }
    }
    x[0]
}

/// What is prefetched behind the tokens of a segment.
#[derive(Clone, Copy)]
struct Asks {
    /// Keys of tokens up to here.
    end: usize,
    /// And then those of the next item.
    next_item: bool,
}

/// Runs one segment of a row block through the block kernels and leaves (m, lanes of s, o) of its rows in `own`.
///
/// # Safety
/// As [`run_work`]; q is packed.
unsafe fn blocks(inp: &Inputs<'_>, k: &BlockKernels, w: &Work, segment: usize, asks: Asks, own: &mut Own) {
    let (rows, hd, n_heads) = (w.rows(), inp.shape.head_dim, w.heads.len());
    let row_bytes = hd * if k.bf16 { 2 } else { 4 };
    own.m[..rows].fill(f32::NEG_INFINITY);
    // SAFETY: buffers hold MAX_ROWS rows.
    unsafe {
        own.sum.write_bytes(0, rows);
        own.o.write_bytes(0, rows * hd);
    }
    let end = w.seen.end; // end of the stored tokens that this item may read
    let segment_end = end.min((segment + 1) * w.segment);
    let asked_end = end.min(asks.end);
    let (first_kv, per_kv) = (w.kv_heads.start, w.rows_per_kv_head());
    // Past the last stored token, the last stored page is a placeholder: its address is valid and its data unused.
    let keys = |b0: usize| -> [*const u8; PAGES] {
        std::array::from_fn(|i| {
            inp.kv.k_ptr(inp.pages[(b0 + i * PAGE_TOKENS).min(end - 1) / PAGE_TOKENS], first_kv)
        })
    };
    // Bytes of the elements of a 16-token group, in K and in V alike, and of either of a page.
    let (half, part) = (inp.kv.scales_at() / 2, inp.kv.part_bytes());
    // The heads of a page are neighbours; each has its V after its K, of equal length.
    let behind = |pages: [*const u8; PAGES], n: usize| pages.map(|p| p.wrapping_add(n * part));
    let groups_of = |pages: [*const u8; PAGES]| -> [*const u8; GROUPS] {
        std::array::from_fn(|g| pages[g / 2].wrapping_add(g % 2 * half))
    };
    // Scales lie behind the elements; if the type has none, no kernel reads what is there.
    let scales_of = |pages: [*const u8; PAGES]| pages.map(|p| p.wrapping_add(2 * half).cast::<f32>());
    // The keys to prefetch after the last head of a block: those of the next tokens' first head, or of the next item.
    let after = |b0: usize| match inp.next {
        _ if b0 + BLOCK < asked_end => Some(keys(b0 + BLOCK)),
        Some((next, pages)) if asks.next_item => {
            Some(std::array::from_fn(|i| first_keys(inp, next, pages, i * PAGE_TOKENS)))
        }
        _ => None,
    };
    let runs =
        k.run.filter(|&(_, rows, dims)| w.kv_heads.len() == 1 && per_kv >= rows && hd.is_multiple_of(dims));
    let softcap = inp.shape.softcap.map(|cap| cap / k.unit);
    // Consecutive blocks that the same `n` positions from `w.pos.start + a` on see.
    let mut run = [RunBlock::NONE; RUN_BLOCKS];
    let (mut len, mut run_rows, mut run_end) = (0, (0, 0), 0);
    let finish = |run: &[RunBlock], (a, n): (usize, usize), b0: usize, own: &mut Own| {
        let (Some((kernel, ..)), false) = (runs, run.is_empty()) else { return };
        let r0 = a * n_heads;
        // SAFETY: as below, for each block; S and P have room for two (`worker_lines`).
        unsafe {
            kernel(&Run {
                q: own.q.add(r0 * row_bytes),
                rows: n * n_heads,
                head_dim: hd,
                softcap,
                blocks: run,
                next: after(b0),
                s: own.s,
                p: own.p,
                m: own.m.as_mut_ptr().add(r0),
                sum: own.sum.add(r0),
                o: own.o.add(r0 * hd),
            });
        }
    };
    for b0 in (w.first_token(segment)..segment_end).step_by(BLOCK) {
        // There are fewer tokens than a block at the end, and where blocks do not lie at multiples of their size.
        let tokens = (segment_end - b0).min(BLOCK);
        // Rows that see any token of this block are consecutive: later positions see later tokens.
        let sees = |pos: usize| {
            let v = inp.visible(pos);
            v.start < b0 + tokens && v.end > b0 && !v.is_empty()
        };
        let Some(a) = w.pos.clone().position(sees) else { continue };
        let n = w.pos.clone().skip(a).take_while(|&p| sees(p)).count();
        let nr = n * n_heads;
        let mut visible = [(0u32, 0u32); MAX_ROWS];
        for (i, rows) in visible[..nr].chunks_exact_mut(n_heads).enumerate() {
            let see = inp.visible(w.pos.start + a + i);
            rows.fill((see.start.saturating_sub(b0) as u32, (see.end - b0).min(tokens) as u32));
        }
        let mut k_pages = keys(b0);
        let runs_on = runs.is_some_and(|(_, rows, _)| nr >= rows);
        if len > 0 && (!runs_on || run_rows != (a, n) || len == RUN_BLOCKS) {
            finish(&run[..len], run_rows, run_end, own);
            len = 0;
        }
        if runs_on {
            let whole = visible[..nr].iter().all(|v| *v == (0, BLOCK as u32));
            run[len] = RunBlock { k: k_pages, v: behind(k_pages, 1), tokens, visible, whole };
            (len, run_rows, run_end) = (len + 1, (a, n), b0);
            continue;
        }
        let groups = tokens.div_ceil(16);
        let mut alpha = [0.0f32; MAX_ROWS];
        let then = after(b0).unwrap_or(k_pages);
        for kv_head in w.kv_heads.clone() {
            let r0 = (kv_head - first_kv) * per_kv + a * n_heads;
            let v_pages = behind(k_pages, 1);
            let k_scales = scales_of(k_pages);
            // The two K blocks after this one; beyond the item's last head, `then` or a neighbour of it.
            let (next, later) = match w.kv_heads.end - kv_head {
                1 => (then, behind(then, 2)),
                2 => (behind(k_pages, 2), then),
                _ => (behind(k_pages, 2), behind(k_pages, 4)),
            };
            // SAFETY: rows r0..r0+nr lie inside the buffers; pages and heads were checked by k_ptr and v_ptr;
            // `groups` and `tokens` count stored tokens of this block only (rounded up to a group for K, whose
            // slots exist in the page).
            unsafe {
                let s = own.s;
                (k.qk)(&Qk {
                    q: own.q.add(r0 * row_bytes),
                    rows: nr,
                    head_dim: hd,
                    k: groups_of(k_pages),
                    k_scales: std::array::from_fn(|g| k_scales[g / 2].wrapping_add(g % 2 * 16)),
                    ahead: [v_pages, next, behind(next, 1)].map(groups_of),
                    groups,
                    s,
                });
                if let Some(cap) = softcap {
                    (k.softcap)(&Softcap { s, rows: nr, groups, cap });
                }
                (k.softmax)(&Softmax {
                    s,
                    p: own.p,
                    rows: nr,
                    groups,
                    visible: visible.as_ptr(),
                    v_scales: scales_of(v_pages),
                    m: own.m.as_mut_ptr().add(r0),
                    sum: own.sum.add(r0),
                    alpha: alpha.as_mut_ptr(),
                });
                (k.pv)(&Pv {
                    p: own.p,
                    rows: nr,
                    head_dim: hd,
                    v: v_pages,
                    ahead: [next, behind(next, 1), later],
                    tokens,
                    o: own.o.add(r0 * hd),
                    alpha: alpha.as_ptr(),
                });
            }
            k_pages = next;
        }
    }
    finish(&run[..len], run_rows, run_end, own);
}

/// Keys of the token `t` tokens after the first one that the item reads. The item must see some token.
fn first_keys(inp: &Inputs<'_>, w: &Work, pages: &[u32], t: usize) -> *const u8 {
    let t = w.first_token(w.segments.start) + t;
    inp.kv.k_ptr(pages[t.min(w.seen.end - 1) / PAGE_TOKENS], w.kv_heads.start)
}

/// Runs one segment through the oracle.
///
/// # Safety
/// As [`run_work`].
unsafe fn naive(inp: &Inputs<'_>, w: &Work, segment: usize, own: &mut Own) {
    for (r, pos, head) in w.each_row(inp.group()) {
        let see = inp.visible(pos);
        let from = see.start.max(segment * w.segment);
        let tokens = from..see.end.min((segment + 1) * w.segment).max(from);
        // SAFETY: this worker's row buffers.
        let (o, lanes) = unsafe { (Own::row(own.o, r, inp.shape.head_dim), &mut *own.sum.add(r)) };
        let kv_head = head / inp.group();
        let (scale, q) = (inp.shape.scale, inp.query(pos, head));
        let cap = inp.shape.softcap;
        let (m, s) = reference::attention::segment(inp.kv, inp.pages, kv_head, tokens, (scale, cap), q, o);
        own.m[r] = m;
        *lanes = [0.0; 16];
        lanes[0] = s;
    }
}
