//! A weight in the form that its kernels read.

use super::acts::{Need, TILE_ROWS};
use super::kernel::{AMX_CHUNK_GROUPS, Ask, CHUNK_GROUPS, GROUP, LinearKernel, Shape};
use super::mode::Mode;
use super::packed::Packed;
use super::table::{self, choose};
use crate::simd::tuning::{LinearTuning, Tuning};
use crate::simd::{Caps, Isa};
use crate::tensor::{DType, Tensor};

/// A weight `[n, k]` in the form that its kernels read, with an optional bias.
#[derive(Debug, Clone)]
pub struct Linear {
    n: usize,
    k: usize,
    dtype: DType,
    isa: Isa,
    store: Store,
    bias: Option<Vec<f32>>,
    fine: bool,
    tuning: LinearTuning,
    forced: Option<&'static LinearKernel>,
}

#[derive(Debug, Clone)]
enum Store {
    Rows(Tensor),
    Packed(Packed),
}

impl Linear {
    /// Whether `isa` reads weights of `dtype` packed (see [`super::packed`]) rather than from the file.
    pub fn wants_packing(dtype: DType, isa: Isa) -> bool {
        if dtype.is_quantised() {
            isa > Isa::Reference
        } else {
            Linear::may_pack(dtype, isa) && Tuning::current().linear(dtype).tiles_at_load
        }
    }

    /// Whether `isa` can read weights of `dtype` packed.
    fn may_pack(dtype: DType, isa: Isa) -> bool {
        match dtype {
            DType::F32 => false,
            DType::F16 | DType::BF16 => isa == Isa::Amx && Caps::get().avx512_bf16,
            _ => isa > Isa::Reference,
        }
    }

    /// A weight read from its file's mapping: a float type, or any in the reference tier.
    pub fn from_rows(w: Tensor, isa: Isa) -> Linear {
        assert!(isa == Isa::Reference || !w.dtype.is_quantised(), "{} is read packed by {isa}", w.dtype);
        let dtype = w.dtype;
        Linear {
            n: w.rows(),
            k: w.cols(),
            dtype,
            isa,
            store: Store::Rows(w),
            bias: None,
            fine: false,
            tuning: Tuning::current().linear(dtype),
            forced: table::forced(isa).ok().flatten(),
        }
    }

    /// A packed weight.
    pub fn from_packed(w: Packed, isa: Isa) -> Linear {
        assert!(Linear::may_pack(w.dtype, isa), "{} is not read packed by {isa}", w.dtype);
        let dtype = w.dtype;
        Linear {
            n: w.n,
            k: w.k,
            dtype,
            isa,
            store: Store::Packed(w),
            bias: None,
            fine: false,
            tuning: Tuning::current().linear(dtype),
            forced: table::forced(isa).ok().flatten(),
        }
    }

    /// Adds a bias of `n` values.
    pub fn with_bias(mut self, bias: Option<Vec<f32>>) -> Linear {
        if let Some(b) = &bias {
            assert_eq!(b.len(), self.n, "a bias has a value per output");
        }
        self.bias = bias;
        self
    }

    /// Where activations are quantised for this weight, quantises them to 16 bits (two int8 planes), at twice the
    /// multiplications: for layers whose inputs have outliers and whose outputs matter most. Where the AMX tier rounds
    /// them to bf16 for float weights, uses two bf16 planes.
    pub fn with_fine_activations(mut self) -> Linear {
        self.fine = true;
        self
    }

    /// Uses these entries instead of those of the table in use ([`Tuning::current`]), for measuring which are best.
    pub fn with_tuning(mut self, tuning: LinearTuning) -> Linear {
        self.tuning = tuning;
        self
    }

    /// Uses this kernel of its tier ([`table::named`]) wherever possible, instead of the one that pays, for measuring.
    pub fn with_kernel(mut self, kernel: &'static LinearKernel) -> Linear {
        self.forced = Some(kernel);
        self
    }

    /// Output features.
    pub fn n(&self) -> usize {
        self.n
    }
    /// Input features.
    pub fn k(&self) -> usize {
        self.k
    }
    /// Storage type of the weights.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes of weights that one multiplication reads.
    pub fn bytes(&self) -> usize {
        match &self.store {
            Store::Rows(t) => t.data.len(),
            Store::Packed(p) => p.data.len(),
        }
    }

    fn is_packed(&self) -> bool {
        matches!(self.store, Store::Packed(_))
    }

    /// The kernel that multiplies this by `m` rows.
    pub fn kernel(&self, m: usize, mode: Mode) -> &'static LinearKernel {
        let &Linear { dtype, fine, ref tuning, .. } = self;
        choose(self.isa, &Ask { dtype, packed: self.is_packed(), fine, m, tuning }, mode, self.forced)
    }

    /// The forms of `m` rows of activations that [`linear`](super::linear) will read.
    pub fn need(&self, m: usize, mode: Mode) -> Need {
        self.kernel(m, mode).need(self.fine)
    }

    /// The kernels of a weight that is not loaded yet, for 1 to `m` rows, each with the least number of rows that it
    /// serves. `fine`: [`Linear::with_fine_activations`].
    pub fn kernels_up_to(
        dtype: DType,
        isa: Isa,
        fine: bool,
        m: usize,
        mode: Mode,
    ) -> Vec<(usize, &'static LinearKernel)> {
        let tuning = &Tuning::current().linear(dtype);
        let (packed, forced) = (Linear::wants_packing(dtype, isa), table::forced(isa).ok().flatten());
        let mut found: Vec<(usize, &'static LinearKernel)> = Vec::new();
        // Row counts at which the kernel may change; above these it stays the same.
        let thresholds =
            [tuning.fine_tiles_from, tuning.tiles_from, tuning.int8_tiles_from, tuning.half_up_to];
        let mut rows: Vec<usize> = thresholds.iter().flat_map(|&t| [t, t.saturating_add(1)]).collect();
        // Kernels without an entry in the tuning table distinguish no larger number of rows than a tile has.
        rows.extend(1..=TILE_ROWS + 1);
        rows.sort_unstable();
        for m in rows.into_iter().filter(|&rows| (1..=m).contains(&rows)) {
            let kernel = choose(isa, &Ask { dtype, packed, fine, m, tuning }, mode, forced);
            if found.last().is_none_or(|(_, k)| *k != kernel) {
                found.push((m, kernel));
            }
        }
        found
    }

    /// [`Linear::need`] of a weight that is not loaded yet: the most rows of each form, over all numbers of rows up to
    /// `m`. `fine`: [`Linear::with_fine_activations`].
    pub fn needs_up_to(dtype: DType, isa: Isa, fine: bool, m: usize, mode: Mode) -> Vec<(usize, Need)> {
        let kernels = Linear::kernels_up_to(dtype, isa, fine, m, mode);
        let last = |i: usize| kernels.get(i + 1).map_or(m, |(from, _)| from - 1);
        kernels.iter().enumerate().map(|(i, (_, kernel))| (last(i), kernel.need(fine))).collect()
    }

    /// Bytes of a thread's working memory when it multiplies `m` rows by a weight of `n` rows of `dtype`, one of `threads`.
    pub fn thread_bytes(dtype: DType, isa: Isa, fine: bool, (m, n): (usize, usize), threads: usize) -> usize {
        // The products of a fine plane, for the columns of a chunk: a thread's share at most, but for those that are multiplied
        // together.
        let most = if isa == Isa::Amx { AMX_CHUNK_GROUPS } else { CHUNK_GROUPS };
        let chunk = most.min((n.div_ceil(GROUP) / threads.max(1)).max(CHUNK_GROUPS));
        let apart = fine && (Linear::wants_packing(dtype, isa) || isa == Isa::Amx);
        if apart { size_of::<f32>() * m * chunk * GROUP } else { 0 }
    }

    /// Where a part of `m` rows of activations must begin that this multiplies ([`linear_parts`]): at a multiple of this. Tiles begin at
    /// every 16th row; other kernels read rows from anywhere.
    ///
    /// [`linear_parts`]: super::linear_parts
    pub fn part_alignment(&self, m: usize, mode: Mode) -> usize {
        let need = self.need(m, mode);
        if need.tiles || need.fine_tiles { TILE_ROWS } else { 1 }
    }

    /// The most that [`Linear::part_alignment`] says of any weight.
    pub fn most_part_alignment(isa: Isa) -> usize {
        if isa == Isa::Amx { TILE_ROWS } else { 1 }
    }

    /// Groups of 16 rows that a thread takes at a time.
    pub(super) fn groups_per_chunk(&self, kernel: &LinearKernel, m: usize, threads: usize) -> usize {
        let &Linear { n, k, fine, ref tuning, .. } = self;
        (kernel.chunk)(&Shape { n, k, bytes: self.bytes(), m, fine, threads, tuning })
    }

    /// The tier whose kernels multiply this.
    pub(super) fn isa(&self) -> Isa {
        self.isa
    }

    /// Whether activations have a fine plane for this weight.
    pub(super) fn is_fine(&self) -> bool {
        self.fine
    }

    pub(super) fn tuning(&self) -> &LinearTuning {
        &self.tuning
    }

    pub(super) fn bias(&self) -> Option<&[f32]> {
        self.bias.as_deref()
    }

    /// The bytes of groups `g0..g1` of 16 rows.
    pub(super) fn groups(&self, g0: usize, g1: usize) -> &[u8] {
        match &self.store {
            Store::Packed(p) => p.group_range(g0, g1),
            Store::Rows(t) => &t.data[g0 * GROUP * t.row_bytes()..(g1 * GROUP).min(self.n) * t.row_bytes()],
        }
    }
}
