//! From the sequences of a step to work items.

use std::ops::Range;

use super::item::{Work, segments_of};
use super::kernels::{MAX_ROWS, ROW_BLOCKS};
use super::scratch::Scratch;
use super::shape::Seq;
use super::share::Shares;
use super::{AttnShape, SEGMENT};
use crate::Result;
use crate::cache::{PAGE_TOKENS, SeqRows};

/// Items of a thread of which none is made larger: enough to end at about the same time.
const ITEMS_OF_A_THREAD: usize = 16;

/// Keys and values of a sequence that stay in a core's own cache from row block to row block in any case.
const CACHED_BYTES: usize = if cfg!(test) { 0 } else { 512 << 10 };

/// Rows of a sequence, and the tokens and heads that they attend.
#[derive(Debug, Clone)]
pub struct AttnRows<'a> {
    /// The rows; the pages are those from position 0 to the last token attended.
    pub rows: SeqRows<'a>,
    /// The tokens to attend, among those that position and window let a row see. The range begins at the beginning of a
    /// page; earlier pages are not accessed.
    pub tokens: Range<usize>,
    /// The KV heads to attend; the results of other heads are left unchanged.
    pub kv_heads: Range<usize>,
}

impl<'a> AttnRows<'a> {
    /// All tokens.
    pub const ALL_TOKENS: Range<usize> = 0..usize::MAX;
    /// All KV heads.
    pub const ALL_HEADS: Range<usize> = 0..usize::MAX;

    /// All tokens and heads of these rows.
    pub fn whole(rows: SeqRows<'a>) -> AttnRows<'a> {
        AttnRows { rows, tokens: AttnRows::ALL_TOKENS, kv_heads: AttnRows::ALL_HEADS }
    }

    /// Position of the last row, plus one.
    fn end(&self) -> usize {
        self.rows.first_pos + self.rows.n_rows
    }
}

/// The work items of one step, for all layers of one shape. Reuse it from step to step with
/// [`AttnPlan::rebuild`], which keeps its buffers.
pub struct AttnPlan {
    pub(super) shape: AttnShape,
    pub(super) threads: usize,
    /// Number of threads that share memory-bound rows.
    readers: usize,
    /// Tokens of a segment.
    segment: usize,
    /// Most rows of a KV head for which the AMX tier uses vector kernels.
    pub(super) vector_rows: usize,
    /// Number of rows that q and out must have.
    pub(super) rows: usize,
    pub(super) pages: Vec<u32>,
    pub(super) seqs: Vec<Seq>,
    pub(super) shares: Shares,
    pub(super) scratch: Scratch,
}

impl AttnPlan {
    /// Plans the attention of `seqs` for a pool of `threads`.
    ///
    /// # Errors
    /// If the kernels do not cover the head_dim or the head counts.
    ///
    /// # Panics
    /// If sequences overlap in rows, or have fewer pages than tokens: invariants of the caller.
    pub fn new(shape: &AttnShape, seqs: &[SeqRows<'_>], threads: usize) -> Result<AttnPlan> {
        shape.check()?;
        let mut plan = AttnPlan {
            shape: *shape,
            threads: threads.max(1),
            readers: threads.max(1),
            segment: SEGMENT,
            vector_rows: 0,
            rows: 0,
            pages: Vec::new(),
            seqs: Vec::new(),
            shares: Shares::default(),
            scratch: Scratch::default(),
        };
        plan.rebuild(seqs);
        Ok(plan)
    }

    /// Sums tokens in segments of this length, a multiple of the page, instead of [`SEGMENT`]. With segments of one
    /// page, tokens attended in two places, divided at any page, give the same bits as in one place: see the
    /// [module](super).
    ///
    /// # Panics
    /// If rows have been planned already, or a segment is not a whole number of pages.
    pub fn in_segments_of(mut self, tokens: usize) -> AttnPlan {
        assert!(self.seqs.is_empty(), "attention: segments of a plan with {} sequences", self.seqs.len());
        assert!(tokens > 0 && tokens.is_multiple_of(PAGE_TOKENS), "attention: segments of {tokens} tokens");
        self.segment = tokens;
        self
    }

    /// Uses at most this many of the pool's threads for memory-bound rows (decode):
    /// beyond the knee of the bandwidth curve more threads read no faster. Results keep the same bits.
    pub fn with_readers(mut self, readers: usize) -> AttnPlan {
        self.readers = readers.clamp(1, self.threads);
        self
    }

    /// Lets the AMX tier attend blocks of at most `rows` rows of a KV head (decode) with vector kernels. This is
    /// faster, but a row's bits then depend on the number of rows in its block; without it, and in other tiers, they do
    /// not.
    pub fn with_vector_rows(mut self, rows: usize) -> AttnPlan {
        self.vector_rows = rows;
        self
    }

    /// The shape it was made for.
    pub fn shape(&self) -> &AttnShape {
        &self.shape
    }

    /// Plans another step of the same shape, in the same buffers.
    ///
    /// # Panics
    /// As [`AttnPlan::new`].
    pub fn rebuild(&mut self, seqs: &[SeqRows<'_>]) {
        self.rebuild_rows(&seqs.iter().copied().map(AttnRows::whole).collect::<Vec<_>>());
    }

    /// [`AttnPlan::rebuild`] for rows that attend some of their tokens or heads.
    ///
    /// # Panics
    /// As [`AttnPlan::new`], and if the tokens do not begin at a page.
    pub fn rebuild_rows(&mut self, seqs: &[AttnRows<'_>]) {
        self.pages.clear();
        self.seqs.clear();
        let mut spans: Vec<(usize, usize)> = Vec::with_capacity(seqs.len());
        for a in seqs.iter().filter(|a| a.rows.n_rows > 0) {
            let (s, end) = (&a.rows, a.end().min(a.tokens.end));
            assert!(
                end <= s.pages.len() * PAGE_TOKENS,
                "attention: position {} in {} pages of {PAGE_TOKENS}",
                end - 1,
                s.pages.len()
            );
            assert!(
                a.tokens.start.is_multiple_of(PAGE_TOKENS),
                "attention: of the tokens from {} on, in the middle of a page",
                a.tokens.start
            );
            spans.push((s.row0, s.row0 + s.n_rows));
            let from = self.pages.len();
            self.pages.extend_from_slice(&s.pages[..end.div_ceil(PAGE_TOKENS)]);
            let (first_pos, row0, tokens) = (s.first_pos, s.row0, a.tokens.clone());
            self.seqs.push(Seq { pages: from..self.pages.len(), first_pos, row0, tokens });
        }
        // Results are written in parallel: rows must not be shared.
        spans.sort_unstable();
        assert!(spans.windows(2).all(|w| w[0].1 <= w[1].0), "attention: sequences share rows");
        self.rows = spans.last().map_or(0, |s| s.1);

        let works: Vec<Work> = self.row_blocks(seqs);
        let many = works.iter().any(|w| w.rows_per_kv_head() > MAX_ROWS);
        let slots = self.shares.rebuild(works, self.shape.head_dim, self.threads, self.readers);
        self.scratch.resize(self.threads, self.shape.head_dim, slots, many);
    }

    /// Divides all rows into items to be cut: row blocks of few rows of many KV heads, or of one, and of these as many together as leave
    /// each thread enough of them to even out.
    fn row_blocks(&self, seqs: &[AttnRows<'_>]) -> Vec<Work> {
        let group = self.shape.n_heads / self.shape.n_kv_heads;
        // A group larger than a block (multi-query attention with many heads) is divided by heads.
        let heads = group.min(MAX_ROWS);
        let positions = MAX_ROWS / heads;
        let seqs = || seqs.iter().filter(|a| a.rows.n_rows > 0);
        let blocks: usize = seqs().map(|a| a.rows.n_rows / positions).sum();
        let blocks = blocks * self.shape.n_kv_heads * group.div_ceil(heads);
        let together = (blocks / (self.threads * ITEMS_OF_A_THREAD)).clamp(1, ROW_BLOCKS);
        let mut works = Vec::new();
        for (seq, a) in seqs().enumerate() {
            let s = &a.rows;
            let last_head = self.shape.n_kv_heads.min(a.kv_heads.end);
            // Keys and values of 16 bits.
            let bytes = a.end().min(a.tokens.end) * self.shape.n_kv_heads * self.shape.head_dim * 4;
            let positions = if bytes > CACHED_BYTES { positions * together } else { positions };
            for first in (0..s.n_rows).step_by(positions) {
                let n_pos = positions.min(s.n_rows - first);
                let pos = s.first_pos + first..s.first_pos + first + n_pos;
                let seen = self.shape.seen(&pos, &a.tokens);
                let segments = segments_of(&seen, self.segment);
                let kv_heads = (MAX_ROWS / (heads * n_pos)).clamp(1, self.shape.n_kv_heads);
                for kv_head in (a.kv_heads.start..last_head).step_by(kv_heads) {
                    let kv_heads = kv_head..(kv_head + kv_heads).min(last_head);
                    for h in (0..group).step_by(heads) {
                        works.push(Work {
                            seq,
                            kv_heads: kv_heads.clone(),
                            heads: h..(h + heads).min(group),
                            pos: pos.clone(),
                            segments: segments.clone(),
                            segment: self.segment,
                            from: a.tokens.start,
                            seen: seen.clone(),
                        });
                    }
                }
            }
        }
        works
    }

    /// Bytes of its buffers, which suffice for all steps planned so far.
    pub fn bytes(&self) -> usize {
        let lists = self.pages.capacity() * size_of::<u32>() + self.seqs.capacity() * size_of::<Seq>();
        lists + self.shares.bytes() + self.scratch.bytes()
    }
}
