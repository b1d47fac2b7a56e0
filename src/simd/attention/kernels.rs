//! Block kernels: what a tier must provide.
//!
//! A *block* is [`BLOCK`] tokens of one sequence at a multiple of [`BLOCK`]; *rows* are (position, query
//! head) pairs that share a KV head. Three kernels process a block for a few rows:
//!
//! 1. `qk`       S[row][token] = q[row] · k[token]                  (q is scaled already; codes' scales are factors of S)
//!    `softcap`  S = cap·tanh(S/cap), where the model caps its scores
//! 2. `softmax`  masks, updates (m, s), turns S into P (times the scales of codes), gives the factor that rescales old sums
//! 3. `pv`       O[row] = O[row]·alpha[row] + Σ_token P[row][token]·v[token]
//!
//! **Canonical arithmetic.** Each kernel computes each row by a chain of operations that depends on that row alone,
//! never on the number of rows. This makes results independent of batch, chunking and threads, bit for bit, within a
//! tier.

use crate::cache::PAGE_TOKENS;

/// Tokens per block. 64 tokens x head_dim 128 are 16 KiB of K and 16 KiB of V.
pub(super) const BLOCK: usize = 64;
/// 16-token groups per block: a K line holds a pair of dims of one group.
pub(super) const GROUPS: usize = BLOCK / 16;
/// Pages per block.
pub(super) const PAGES: usize = BLOCK / PAGE_TOKENS;
/// Most rows of a row block: what the kernels take at once.
pub(super) const MAX_ROWS: usize = 32;
/// Most row blocks of an item. A prompt's rows read the same keys and values: from the core's own cache, if several row blocks follow
/// each other over some tokens before the next tokens are read. 512 tokens of a head take 256 KiB at head_dim 128.
pub(super) const ROW_BLOCKS: usize = 8;

/// Row stride of S, and of P, in f32 / in 16-bit elements or f32 (as the tier stores P).
pub(super) const S_STRIDE: usize = BLOCK;

/// Arguments of `qk`.
pub(crate) struct Qk {
    /// `rows` x head_dim, contiguous: bf16 or f32 as [`BlockKernels::bf16`] says, scaled.
    pub q: *const u8,
    /// 1..=MAX_ROWS.
    pub rows: usize,
    /// A multiple of 16.
    pub head_dim: usize,
    /// Per group of 16 tokens: `[head_dim/2][16][2]`.
    pub k: [*const u8; GROUPS],
    /// Per group: 16 scales of its keys, factors of the scores; addresses without a meaning if the type has none.
    pub k_scales: [*const f32; GROUPS],
    /// Runs of the same size to prefetch meanwhile, one per group: the next data to be read (V of the same tokens), and
    /// the data after that (the next K, and its V).
    pub ahead: [[*const u8; GROUPS]; 3],
    /// 1..=GROUPS; tokens past the last valid one are computed and masked later.
    pub groups: usize,
    /// Out: `rows` x [`S_STRIDE`] f32.
    pub s: *mut f32,
}

/// Arguments of `softcap`.
pub(crate) struct Softcap {
    /// `rows` x [`S_STRIDE`], updated up to `groups`.
    pub s: *mut f32,
    pub rows: usize,
    pub groups: usize,
    /// In the unit of scores.
    pub cap: f32,
}

/// Arguments of `softmax`.
pub(crate) struct Softmax {
    /// `rows` x [`S_STRIDE`]: scores.
    pub s: *mut f32,
    /// Out: `rows` x [`S_STRIDE`] of bf16 or f32; written for whole 32-token pages up to `groups`.
    pub p: *mut u8,
    pub rows: usize,
    pub groups: usize,
    /// Per row: the visible tokens of the block, lo..hi relative to it.
    pub visible: *const (u32, u32),
    /// Per page: 32 scales of its values, factors of P, but not of the sums; as in [`Qk`] if the type has none. Those of slots
    /// without a token may be anything.
    pub v_scales: [*const f32; PAGES],
    /// Per row: running maximum, updated.
    pub m: *mut f32,
    /// Per row: 16 lanes of running sums, updated.
    pub sum: *mut [f32; 16],
    /// Out, per row: exp(m_old − m_new); room for [`MAX_ROWS`].
    pub alpha: *mut f32,
}

/// Arguments of `pv`.
pub(crate) struct Pv {
    /// As `softmax` wrote it.
    pub p: *const u8,
    pub rows: usize,
    pub head_dim: usize,
    /// Per page: `[16][head_dim][2]`.
    pub v: [*const u8; PAGES],
    /// Runs of the same size to prefetch meanwhile, one per page: the next K, its V, and the K after that.
    pub ahead: [[*const u8; PAGES]; 3],
    /// Tokens of the block that are stored, 1..=BLOCK. Later slots may hold anything, including NaN, and must not
    /// enter, not even times zero.
    pub tokens: usize,
    /// `rows` x head_dim, updated.
    pub o: *mut f32,
    pub alpha: *const f32,
}

/// Arguments of `run`: consecutive blocks of one KV head, in each of which every row sees some token.
pub(crate) struct Run<'a> {
    /// As in [`Qk`].
    pub q: *const u8,
    pub rows: usize,
    pub head_dim: usize,
    /// As in [`Softcap`].
    pub softcap: Option<f32>,
    /// At least one.
    pub blocks: &'a [RunBlock],
    /// Keys of the next block, which will probably be read after these.
    pub next: Option<[*const u8; PAGES]>,
    /// Room for two blocks of [`MAX_ROWS`] x [`S_STRIDE`] f32.
    pub s: *mut f32,
    /// Room for two blocks of [`MAX_ROWS`] x [`S_STRIDE`] bf16.
    pub p: *mut u8,
    /// As in [`Softmax`].
    pub m: *mut f32,
    pub sum: *mut [f32; 16],
    /// As in [`Pv`].
    pub o: *mut f32,
}

/// A block of a [`Run`].
#[derive(Clone, Copy)]
pub(crate) struct RunBlock {
    /// Per page: `[2][head_dim/2][16][2]` of K and `[16][head_dim][2]` of V; valid also where no token is stored.
    pub k: [*const u8; PAGES],
    pub v: [*const u8; PAGES],
    /// As in [`Pv`].
    pub tokens: usize,
    /// As in [`Softmax`].
    pub visible: [(u32, u32); MAX_ROWS],
    /// Whether the block is whole and all rows see all of it.
    pub whole: bool,
}

impl RunBlock {
    pub(crate) const NONE: RunBlock = RunBlock {
        k: [std::ptr::null(); PAGES],
        v: [std::ptr::null(); PAGES],
        tokens: 0,
        visible: [(0, 0); MAX_ROWS],
        whole: false,
    };

    /// Pages with stored tokens.
    #[inline(always)]
    pub(crate) fn pages(&self) -> usize {
        self.tokens.div_ceil(PAGE_TOKENS)
    }
}

/// Most blocks of a [`Run`]: those of a segment.
pub(crate) const RUN_BLOCKS: usize = super::SEGMENT / BLOCK;

/// Adds a partial (m, s, o) to an accumulated one.
pub(crate) type MergeFn = unsafe fn(acc: (&mut f32, &mut f32, &mut [f32]), part: (f32, f32, &[f32]));

/// One tier's kernels for one KV type.
#[derive(Clone, Copy)]
pub(crate) struct BlockKernels {
    /// Name in errors, tests and benches.
    #[allow(dead_code)] // read by debuggers and tests
    pub name: &'static str,
    /// Whether q and P cross as bf16 (dot-product and tile instructions) rather than f32.
    pub bf16: bool,
    /// The unit of scores, in natural logarithms: 1, or ln 2 where the kernels work in powers of two. q is packed with
    /// scale / unit.
    pub unit: f32,
    /// Scales a row of q and stores it in the form that `qk` wants.
    pub pack_q: unsafe fn(q: &[f32], scale: f32, to: *mut u8),
    pub qk: unsafe fn(&Qk),
    pub softcap: unsafe fn(&Softcap),
    pub softmax: unsafe fn(&Softmax),
    pub pv: unsafe fn(&Pv),
    /// Processes several blocks of many rows at once, with the same bits as `qk`, `softcap`, `softmax` and `pv` one
    /// after the other; then the least number of rows, and the number of dims that heads must be a multiple of.
    pub run: Option<(unsafe fn(&Run<'_>), usize, usize)>,
    /// Merges a partial result into the accumulator's (m, s, o); see [`super::partial`].
    pub merge: MergeFn,
}
