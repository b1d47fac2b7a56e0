//! A weight in the form that its kernels read.

use super::acts::{Need, TILE_ROWS};
use super::chunks::Chunks;
use super::kernel::{Ask, GROUP, LinearKernel, Shape};
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

    /// [`Linear::kernels_up_to`], each with the numbers of rows, the least and the most, that it serves.
    fn served_up_to(
        dtype: DType,
        isa: Isa,
        fine: bool,
        m: usize,
        mode: Mode,
    ) -> impl Iterator<Item = ([usize; 2], &'static LinearKernel)> {
        let kernels = Linear::kernels_up_to(dtype, isa, fine, m, mode);
        let next: Vec<usize> = kernels.iter().skip(1).map(|&(from, _)| from).chain([m + 1]).collect();
        kernels.into_iter().zip(next).map(|((from, kernel), next)| ([from, next - 1], kernel))
    }

    /// [`Linear::need`] of a weight that is not loaded yet: the most rows of each form, over all numbers of rows up to
    /// `m`. `fine`: [`Linear::with_fine_activations`].
    pub fn needs_up_to(dtype: DType, isa: Isa, fine: bool, m: usize, mode: Mode) -> Vec<(usize, Need)> {
        let served = Linear::served_up_to(dtype, isa, fine, m, mode);
        served.map(|([_, last], kernel)| (last, kernel.need(fine))).collect()
    }

    /// Most bytes of a thread's working memory when it multiplies 1 to `m` rows by a weight `[n][k]` of `dtype`, one of `threads`:
    /// the products of a fine plane, for the columns of a chunk. `fine`: [`Linear::with_fine_activations`].
    pub fn thread_bytes(
        dtype: DType,
        isa: Isa,
        fine: bool,
        m: usize,
        (n, k): (usize, usize),
        (threads, mode): (usize, Mode),
    ) -> usize {
        let tuning = &Tuning::current().linear(dtype);
        let bytes = n * dtype.row_bytes(k).unwrap_or(0);
        let products = |kernel: &LinearKernel, m: usize| {
            let shape = Shape { n, k, bytes, m, fine, threads: threads.max(1), tuning };
            m * (kernel.chunk)(&shape).min(shape.groups()) * GROUP
        };
        let apart =
            Linear::served_up_to(dtype, isa, fine, m, mode).filter(|(_, kernel)| kernel.planes(fine) > 1);
        let most = apart.flat_map(|(rows, kernel)| rows.map(|m| products(kernel, m))).max();
        size_of::<f32>() * most.unwrap_or(0)
    }

    /// Where a part of `m` rows of activations must begin that this multiplies ([`linear_parts`]): at a multiple of this. Tiles begin at
    /// every 16th row; other kernels read rows from anywhere.
    ///
    /// [`linear_parts`]: super::linear_parts
    pub fn part_alignment(&self, m: usize, mode: Mode) -> usize {
        let need = self.need(m, mode);
        if need.tiles || need.fine_tiles { TILE_ROWS } else { 1 }
    }

    /// From how many rows on, up to `m`, [`Linear::part_alignment`] of a weight that is not loaded yet may be more than 1, and what it is
    /// then; `None` if never.
    pub fn parts_aligned_from(dtype: DType, isa: Isa, m: usize, mode: Mode) -> Option<(usize, usize)> {
        let kernels = Linear::kernels_up_to(dtype, isa, false, m, mode);
        let (from, _) = kernels.into_iter().find(|(_, kernel)| kernel.need(false).tiles)?;
        Some((from, TILE_ROWS))
    }

    /// Its product with `m` rows, divided for `threads`; `first` numbers the first chunk in a job of several products.
    pub(super) fn chunks(&self, kernel: &LinearKernel, m: usize, threads: usize, first: usize) -> Chunks {
        let &Linear { n, k, fine, ref tuning, .. } = self;
        let shape = Shape { n, k, bytes: self.bytes(), m, fine, threads, tuning };
        // A fine plane's products wait in memory that is planned for a chunk (`Linear::thread_bytes`).
        let joined = shape.streams() && kernel.planes(fine) == 1;
        Chunks::new(first, shape.groups(), (kernel.chunk)(&shape), joined)
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
    #[inline]
    pub(super) fn groups(&self, g0: usize, g1: usize) -> &[u8] {
        match &self.store {
            Store::Packed(p) => p.group_range(g0, g1),
            Store::Rows(t) => &t.data[g0 * GROUP * t.row_bytes()..(g1 * GROUP).min(self.n) * t.row_bytes()],
        }
    }
}
