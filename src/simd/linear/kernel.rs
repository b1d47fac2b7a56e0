//! The description of a kernel of linear layers. Each kernel is a constant in the file of its code, and a line in
//! [`table`](super::table).

use super::acts::{Input, Need};
use super::mode::Mode;
use crate::simd::tuning::LinearTuning;
use crate::tensor::DType;

/// Rows of a weight that are packed together ([`packed`](super::packed)), and that a thread takes together.
pub const GROUP: usize = 16;

/// One way to multiply weights by activations.
pub struct LinearKernel {
    /// Its name in messages and `TANDEM_LINEAR`.
    pub name: &'static str,
    /// Whether it can compute this product: depends on the weights' dtype and layout, the number of tokens, and CPU
    /// features that not all CPUs of its tier have.
    pub(super) takes: fn(&Ask<'_>) -> bool,
    /// Whether it is faster for this product than the later kernels of its tier's table, by the thresholds of the
    /// tuning table.
    pub(super) pays: fn(&Ask<'_>) -> bool,
    /// Whether a row's bits are the same for every number of tokens, and the same as those of every other such kernel
    /// that takes these weights. Such kernels serve [`Mode::Deterministic`].
    pub(super) any_rows: bool,
    /// The form of the activations that it reads.
    pub(super) reads: ActsForm,
    /// Groups of 16 rows that a thread takes at a time.
    pub(super) chunk: fn(&Shape<'_>) -> usize,
    /// Computes some rows of the weights times all tokens.
    ///
    /// # Safety
    /// The CPU has the tier's features, [`LinearKernel::takes`] returned true, and the fields of the work are correct.
    pub(super) run: unsafe fn(&Work<'_>),
}

/// The product that a kernel is asked to compute.
pub(super) struct Ask<'a> {
    /// The weights' dtype.
    pub dtype: DType,
    /// Whether they are packed ([`super::packed`]), rather than in rows as in the file.
    pub packed: bool,
    /// Whether a second plane keeps the rounding error of activations ([`super::Linear::with_fine_activations`]).
    pub fine: bool,
    /// Tokens.
    pub m: usize,
    /// The entries of the tuning table.
    pub tuning: &'a LinearTuning,
}

impl Ask<'_> {
    /// Whether the weights are packed and of a quantised dtype.
    pub fn quantised(&self) -> bool {
        self.packed && self.dtype.is_quantised()
    }

    /// Least number of tokens for bf16 tiles.
    pub fn tiles_from(&self) -> usize {
        if self.fine { self.tuning.fine_tiles_from } else { self.tuning.tiles_from }
    }
}

/// Activations as a kernel reads them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(super) enum ActsForm {
    /// f32 rows.
    F32,
    /// int8 in blocks of 32; with a fine plane if requested.
    Int8,
    /// Rows of bf16.
    Bf16,
    /// A tiles of bf16.
    Tiles,
    /// A tiles of bf16, with a fine plane if requested.
    FineTiles,
}

/// The sizes by which a product is divided among threads.
pub(super) struct Shape<'a> {
    /// Output features.
    pub n: usize,
    /// Input features.
    pub k: usize,
    /// Bytes of the whole weight.
    pub bytes: usize,
    /// Tokens.
    pub m: usize,
    /// As in [`Ask`].
    pub fine: bool,
    /// Threads that share the work.
    pub threads: usize,
    /// The entries of the tuning table.
    pub tuning: &'a LinearTuning,
}

/// Some rows of a weight, times all tokens.
pub(super) struct Work<'a> {
    /// The weights' dtype.
    pub dtype: DType,
    /// `n` rows of the file, or whole groups that hold them.
    pub w: &'a [u8],
    /// Rows.
    pub n: usize,
    /// Columns.
    pub k: usize,
    /// The activations, in the form that the kernel reads.
    pub x: Input<'a>,
    /// Which plane of them: 0, or 1, the fine one.
    pub plane: usize,
    /// `x.m()` rows of `ldo >= n`; `out[t·ldo + r]` is written, by this work alone.
    pub out: *mut f32,
    /// Distance between rows of `out`.
    pub ldo: usize,
    /// The entries of the tuning table.
    pub tuning: &'a LinearTuning,
}

impl Work<'_> {
    /// Whether the tuning table says that weights are requested ahead for this many tokens.
    pub(super) fn asks_ahead(&self) -> bool {
        self.x.m() >= self.tuning.ahead_from
    }
}

impl LinearKernel {
    /// The forms of the activations that it reads; `fine` as in [`Ask`].
    pub(super) fn need(&self, fine: bool) -> Need {
        match self.reads {
            ActsForm::F32 => Need::default(),
            ActsForm::Int8 => Need { int8: true, fine, ..Need::default() },
            ActsForm::Bf16 => Need { bf16: true, ..Need::default() },
            ActsForm::Tiles => Need { tiles: true, ..Need::default() },
            ActsForm::FineTiles => Need { tiles: true, fine_tiles: fine, ..Need::default() },
        }
    }

    /// Number of planes of activations that it multiplies, one after the other.
    pub(super) fn planes(&self, fine: bool) -> usize {
        1 + usize::from(fine && matches!(self.reads, ActsForm::Int8 | ActsForm::FineTiles))
    }

    /// Whether it can compute this product with the promise of `mode` about its bits.
    pub(super) fn may(&self, ask: &Ask<'_>, mode: Mode) -> bool {
        (mode == Mode::Fast || self.any_rows) && (self.takes)(ask)
    }
}

impl PartialEq for LinearKernel {
    fn eq(&self, other: &LinearKernel) -> bool {
        self.name == other.name
    }
}
impl Eq for LinearKernel {}

impl std::fmt::Debug for LinearKernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl std::fmt::Display for LinearKernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// Groups of 16 rows per chunk when many tokens make the work compute-bound, so that the weights stay in L2.
pub(super) const CHUNK_GROUPS: usize = 4;

/// Groups per chunk in the AMX tier, which converts them to tiles while products run: the minimum if each thread has as
/// many, and the maximum if a fine plane's products of a chunk need a buffer.
pub(super) const AMX_CHUNK_GROUPS: usize = 32;

impl Shape<'_> {
    /// Groups of 16 rows.
    pub fn groups(&self) -> usize {
        self.n.div_ceil(GROUP)
    }

    /// Most groups of a chunk, so that each thread gets four chunks and none waits long for the last.
    pub fn most(&self) -> usize {
        self.groups().div_ceil(4 * self.threads)
    }

    /// Number of groups in `bytes` bytes.
    pub fn of_bytes(&self, bytes: usize) -> usize {
        (bytes / self.bytes.div_ceil(self.groups()).max(1)).min(self.most()).max(1)
    }

    /// Whether so few tokens use each byte of the weights that chunks are long runs of memory; weights of a chunk stay in L2 otherwise.
    pub fn streams(&self) -> bool {
        self.m < 4
    }

    /// The default chunk.
    pub fn usual(&self) -> usize {
        if self.streams() {
            self.of_bytes(self.tuning.chunk_bytes)
        } else {
            CHUNK_GROUPS.min(self.most()).max(1)
        }
    }
}
