//! Which kernel multiplies which weight, and how its rows are shared out.

use super::acts::{Acts, Input, Need};
use super::packed::{GROUP, Packed};
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use super::{amx, int8_tiles};
#[cfg(target_arch = "x86_64")]
use super::{avx2_int8, panel, paneldot, rowdot, rowdot_bf16, tiledot, vnni};
use crate::host::Pool;
use crate::simd::tuning::{LinearTuning, Tuning};
use crate::simd::{Caps, Isa, Kernels};
use crate::tensor::{DType, Rows, Tensor};

/// Whether results may depend, in their last bits, on how many rows are computed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// The fastest kernel for each M.
    #[default]
    Fast,
    /// The same kernel, in the same order, for every M.
    Deterministic,
}

/// A weight `[n, k]` as its kernels hold it, with an optional bias.
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
}

#[derive(Debug, Clone)]
enum Store {
    Rows(Tensor),
    Packed(Packed),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(dead_code)]
enum Path {
    Reference,
    Vnni,
    Avx2Int8,
    RowDot,
    RowDotBf16,
    /// Dot products of bf16 weights that lie in tiles.
    PanelDot,
    /// Tiles of dot products in f32.
    Tiles,
    /// The same with bf16 activations.
    TilesBf16,
    AmxPacked,
    /// int8 tiles: the bits of [`Path::Vnni`].
    AmxInt8,
    AmxRows,
}

/// Tokens from which the AMX tier multiplies packed weights by tiles.
#[derive(Clone, Copy)]
struct TilesFrom {
    /// By tiles of bf16, in fast mode.
    bf16: usize,
    /// By tiles of int8 otherwise.
    int8: usize,
}

impl TilesFrom {
    /// int8 products are made twice with fine activations.
    fn of(tuning: &LinearTuning, fine: bool) -> TilesFrom {
        let bf16 = if fine { tuning.tiles_from / 2 } else { tuning.tiles_from };
        TilesFrom { bf16, int8: tuning.int8_tiles_from }
    }
}

/// More rows than any path but that of packed tiles distinguishes.
const FEW_ROWS: usize = 4;

/// Groups of 16 rows per chunk when many tokens make it compute-bound: the weights stay in L2.
const CHUNK_GROUPS: usize = 4;

/// Groups per chunk of the AMX tier when many tokens make it compute-bound, where threads have as many, and at most.
const AMX_LEAST_GROUPS: usize = 32;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
const AMX_MOST_GROUPS: usize = 128;

/// Weight bytes per chunk of float tiles when many tokens make it compute-bound: in L2 beside a tile of tokens.
#[cfg(target_arch = "x86_64")]
const TILES_CHUNK_BYTES: usize = 256 * 1024;

/// Bytes of an activation as `path` reads it.
#[cfg(target_arch = "x86_64")]
fn act_bytes(path: Path) -> usize {
    if path == Path::TilesBf16 { 2 } else { 4 }
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

    /// Where activations are quantised for this weight, quantise them to 16 bits (two int8 planes): for
    /// layers whose inputs have outliers and whose outputs decide much, at twice the multiplications. The same where
    /// the AMX tier rounds them to bf16 for float weights (two bf16 planes).
    pub fn with_fine_activations(mut self) -> Linear {
        self.fine = true;
        self
    }

    /// Other entries than those of the table in use ([`Tuning::current`]): for measuring which are best.
    pub fn with_tuning(mut self, tuning: LinearTuning) -> Linear {
        self.tuning = tuning;
        self
    }

    /// Another number of tokens from which the AMX tier multiplies packed weights by tiles: for the bench that
    /// measures where that number should be.
    #[doc(hidden)]
    pub fn with_tiles_from(mut self, m: usize) -> Linear {
        self.tuning.tiles_from = m;
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

    fn path(&self, m: usize, mode: Mode) -> Path {
        let from = TilesFrom::of(&self.tuning, self.fine);
        Linear::path_of(self.dtype, self.isa, matches!(self.store, Store::Packed(_)), from, m, mode)
    }

    fn path_of(dtype: DType, isa: Isa, packed: bool, from: TilesFrom, m: usize, mode: Mode) -> Path {
        let fast = mode == Mode::Fast;
        match isa {
            Isa::Reference => Path::Reference,
            #[cfg(target_arch = "x86_64")]
            _ if packed && !dtype.is_quantised() => {
                if fast && m <= paneldot::MAX_M {
                    Path::PanelDot
                } else {
                    Path::AmxRows
                }
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 if packed => Path::Avx2Int8,
            #[cfg(target_arch = "x86_64")]
            Isa::Amx if packed && fast && m >= from.bf16 => Path::AmxPacked,
            #[cfg(target_arch = "x86_64")]
            Isa::Amx if packed && m >= from.int8 => Path::AmxInt8,
            #[cfg(target_arch = "x86_64")]
            _ if packed => Path::Vnni,
            #[cfg(target_arch = "x86_64")]
            isa if fast && m <= rowdot::MAX_M => {
                let dot = isa > Isa::Avx2 && dtype == DType::BF16 && Caps::get().avx512_bf16;
                if dot { Path::RowDotBf16 } else { Path::RowDot }
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Amx if dtype != DType::F32 => Path::AmxRows,
            #[cfg(target_arch = "x86_64")]
            isa if isa > Isa::Avx2 && dtype == DType::BF16 && Caps::get().bf16_dot_pays() => Path::TilesBf16,
            #[cfg(target_arch = "x86_64")]
            _ => Path::Tiles,
            #[cfg(not(target_arch = "x86_64"))]
            _ => Path::Reference,
        }
    }

    /// Which forms of `m` rows of activations [`linear`] will read.
    pub fn need(&self, m: usize, mode: Mode) -> Need {
        Linear::need_of(self.path(m, mode), self.fine)
    }

    fn need_of(path: Path, fine: bool) -> Need {
        match path {
            Path::Vnni | Path::AmxInt8 | Path::Avx2Int8 => Need { int8: true, fine, ..Need::default() },
            Path::AmxPacked => Need { tiles: true, ..Need::default() },
            Path::AmxRows => Need { tiles: true, fine_tiles: fine, ..Need::default() },
            Path::RowDotBf16 | Path::PanelDot | Path::TilesBf16 => Need { bf16: true, ..Need::default() },
            _ => Need::default(),
        }
    }

    /// [`Linear::need`] of a weight that is not loaded yet, for every number of rows up to `m`: the most of each form.
    /// `fine`: [`Linear::with_fine_activations`].
    pub fn needs_up_to(dtype: DType, isa: Isa, fine: bool, m: usize, mode: Mode) -> Vec<(usize, Need)> {
        let from = TilesFrom::of(&Tuning::current().linear(dtype), fine);
        let packed = Linear::wants_packing(dtype, isa);
        let need = |m| Linear::need_of(Linear::path_of(dtype, isa, packed, from, m, mode), fine);
        // Above these few rows the path is the same for any number.
        (1..=m.min(from.bf16.max(FEW_ROWS))).chain([m]).map(|m| (m, need(m))).collect()
    }

    /// Bytes of a thread's working memory when it multiplies `m` rows by weights of `dtype`.
    pub fn thread_bytes(dtype: DType, isa: Isa, fine: bool, m: usize) -> usize {
        // The products of a fine plane, for the columns of a chunk.
        let chunk = if isa == Isa::Amx { AMX_LEAST_GROUPS } else { CHUNK_GROUPS };
        let apart = fine && (Linear::wants_packing(dtype, isa) || isa == Isa::Amx);
        if apart { size_of::<f32>() * m * chunk * GROUP } else { 0 }
    }

    /// Groups per chunk of the AMX tier at most: fewer where a fine plane's products of a chunk need a buffer.
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    fn amx_most_groups(&self) -> usize {
        if self.fine { AMX_LEAST_GROUPS } else { AMX_MOST_GROUPS }
    }

    /// Groups of 16 rows per chunk.
    fn groups_per_chunk(&self, path: Path, m: usize, threads: usize) -> usize {
        let groups = self.n.div_ceil(GROUP);
        let most = groups.div_ceil(4 * threads);
        let of_bytes = |bytes: usize| (bytes / self.bytes().div_ceil(groups).max(1)).min(most).max(1);
        match path {
            // Long ranges of columns: each begins by fetching A into L2 and by making its first panels with no product
            // beside them. Panels are multiplied by two, by four with up to 16 tokens.
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Path::AmxPacked | Path::AmxInt8 | Path::AmxRows => {
                let unit = match path {
                    Path::AmxInt8 => 1,
                    _ if m <= 16 => 4,
                    _ => 2,
                };
                let least = if m <= 64 { 8 } else { AMX_LEAST_GROUPS };
                let range =
                    (groups / (4 * threads)).max(least).min(groups / threads).min(self.amx_most_groups());
                (range / unit * unit).max(unit)
            }
            #[cfg(target_arch = "x86_64")]
            Path::Tiles | Path::TilesBf16 => {
                let few = tiledot::few(m, self.k, act_bytes(path));
                of_bytes(if few { self.tuning.chunk_bytes } else { TILES_CHUNK_BYTES })
            }
            // Whole tiles, and long runs of memory.
            #[cfg(target_arch = "x86_64")]
            Path::PanelDot => {
                let whole = of_bytes(self.tuning.chunk_bytes).next_multiple_of(paneldot::GROUPS);
                whole.min(groups.div_ceil(2 * threads)).max(1)
            }
            // Whole tiles.
            #[cfg(target_arch = "x86_64")]
            Path::Vnni => {
                let unit = vnni::groups_per_tile(&self.tuning, m);
                let chunk = if m >= 4 { CHUNK_GROUPS.min(most) } else { of_bytes(self.tuning.chunk_bytes) };
                let whole = chunk.next_multiple_of(unit);
                if whole <= most { whole } else { (most / unit * unit).max(unit.min(groups)) }
            }
            _ if m >= 4 => CHUNK_GROUPS.min(most).max(1),
            _ => of_bytes(self.tuning.chunk_bytes),
        }
    }

    /// Computes groups `g0..g1` for all rows of `x`.
    ///
    /// # Safety
    /// `out` has `x.m()` rows of `ldo >= n`; nobody else touches the columns of these groups.
    unsafe fn run(&self, path: Path, g0: usize, g1: usize, x: Input<'_>, out: *mut f32, ldo: usize) {
        let (m, k) = (x.m(), self.k);
        let (r0, r1) = (g0 * GROUP, (g1 * GROUP).min(self.n));
        match (&self.store, path) {
            (Store::Rows(w), Path::Reference) => {
                crate::reference::linear::linear_rows(w, r0..r1, x.f32(), &mut |t, n, v| {
                    // SAFETY: t < m, r0 <= n < r1 <= ldo; these columns are ours.
                    unsafe { *out.add(t * ldo + n) = v };
                });
            }
            #[cfg(target_arch = "x86_64")]
            (Store::Packed(p), Path::Vnni | Path::AmxInt8 | Path::Avx2Int8) => {
                let xs = vnni::X {
                    q: x.q().as_ptr(),
                    d: x.d().as_ptr(),
                    sum32: x.sum32().as_ptr(),
                    sum16: x.sum16().as_ptr(),
                    minus32: x.minus32().as_ptr(),
                    minus16: x.minus16().as_ptr(),
                    stride: x.k_padded(),
                };
                let (n, groups) = (r1 - r0, p.group_range(g0, g1));
                let kernel = |xs, out, ldo| {
                    // SAFETY: the tier was checked when the weight was made; shapes by `linear`'s checks; the
                    // caller's outputs are `m` rows of `n` columns, `ldo` apart.
                    unsafe {
                        match path {
                            Path::Vnni => vnni::gemm(&self.tuning, self.dtype, groups, k, xs, m, out, ldo, n),
                            #[cfg(target_os = "linux")]
                            Path::AmxInt8 => {
                                int8_tiles::gemm(&self.tuning, self.dtype, groups, k, xs, m, out, ldo, n)
                            }
                            _ => avx2_int8::gemm(self.dtype, groups, k, xs, m, out, ldo, n),
                        }
                    }
                };
                // SAFETY: columns r0..r1 of every row are ours.
                kernel(xs, unsafe { out.add(r0) }, ldo);
                if self.fine {
                    panel::with_scratch(m * n * 4, |fine| {
                        let fine = fine.cast::<f32>();
                        // SAFETY: as above; the fine plane is M more rows, its products fit the scratch.
                        unsafe {
                            kernel(xs.row(m), fine, n);
                            add_columns(std::slice::from_raw_parts(fine, m * n), m, n, out.add(r0), ldo);
                        }
                    });
                }
            }
            #[cfg(target_arch = "x86_64")]
            (Store::Rows(w), Path::RowDot) => {
                let kernel = if self.isa == Isa::Avx2 { rowdot::avx2 } else { rowdot::avx512 };
                let rows = &w.data[r0 * w.row_bytes()..r1 * w.row_bytes()];
                // SAFETY: as above; `rows` holds r1 - r0 rows.
                unsafe {
                    kernel(self.dtype, rows.as_ptr(), r1 - r0, k, x.f32().as_ptr(), m, out.add(r0), ldo)
                };
            }
            #[cfg(target_arch = "x86_64")]
            (Store::Rows(w), Path::RowDotBf16) => {
                let rows = &w.data[r0 * w.row_bytes()..r1 * w.row_bytes()];
                let (x, stride) = (x.bf16().as_ptr(), x.bf16_stride());
                // SAFETY: as above; `rows` holds r1 - r0 rows.
                unsafe { rowdot_bf16::gemm(rows.as_ptr(), r1 - r0, k, x, stride, m, out.add(r0), ldo) };
            }
            #[cfg(target_arch = "x86_64")]
            (Store::Packed(p), Path::PanelDot) => {
                let w = p.group_range(g0, g1).as_ptr().cast();
                let (x, stride) = (x.bf16().as_ptr(), x.bf16_stride());
                let job = paneldot::Job { w, n: r1 - r0, k, x, stride, m, out: out.wrapping_add(r0), ldo };
                // SAFETY: as above; the groups hold r1 - r0 rows in tiles.
                unsafe { paneldot::gemm(&job) };
            }
            #[cfg(target_arch = "x86_64")]
            (Store::Rows(w), Path::Tiles | Path::TilesBf16) => {
                let (xp, x_stride) = match path {
                    Path::TilesBf16 => (x.bf16().as_ptr().cast::<u8>(), x.bf16_stride() * 2),
                    _ => (x.f32().as_ptr().cast::<u8>(), k * 4),
                };
                let rows = &w.data[r0 * w.row_bytes()..r1 * w.row_bytes()];
                let out = out.wrapping_add(r0);
                let job = tiledot::Job { w: rows.as_ptr(), n: r1 - r0, k, x: xp, x_stride, m, out, ldo };
                // SAFETY: as above; `rows` holds r1 - r0 rows, the activations were prepared for this path.
                unsafe {
                    match (self.isa, path) {
                        (_, Path::TilesBf16) => tiledot::avx512_bf16(&job),
                        (Isa::Avx2, _) => tiledot::avx2(self.dtype, &job),
                        _ => tiledot::avx512(self.dtype, &job),
                    }
                }
            }
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            (store, Path::AmxPacked | Path::AmxRows) => {
                let source = match store {
                    Store::Packed(p) => amx::Source::Groups(self.dtype, p.group_range(g0, g1)),
                    Store::Rows(w) => {
                        let rows = &w.data[r0 * w.row_bytes()..r1 * w.row_bytes()];
                        amx::Source::Rows(self.dtype, rows.as_ptr())
                    }
                };
                let (kp, tiles, half) = (x.k_padded(), x.tiles().as_ptr(), self.tuning.half_up_to);
                // SAFETY: the tier was checked when the weight was made; shapes by `linear`'s checks;
                // columns r0..r1 of every row are ours.
                unsafe { amx::gemm(&source, half, r1 - r0, k, kp, tiles, m, out.add(r0), ldo) };
                if self.fine && path == Path::AmxRows {
                    let n = r1 - r0;
                    let mut fine = vec![0f32; m * n];
                    let tiles = x.fine_tiles().as_ptr();
                    // SAFETY: as above; the fine plane's products have a buffer of their own.
                    unsafe {
                        amx::gemm(&source, half, n, k, kp, tiles, m, fine.as_mut_ptr(), n);
                        add_columns(&fine, m, n, out.add(r0), ldo);
                    }
                }
            }
            (store, path) => unreachable!("{path:?} cannot read {store:?}"),
        }
        if let Some(bias) = &self.bias {
            for t in 0..m {
                for (n, b) in bias.iter().enumerate().take(r1).skip(r0) {
                    // SAFETY: t < m and n < r1: our columns.
                    unsafe { *out.add(t * ldo + n) += b };
                }
            }
        }
    }
}

/// Adds the `[m][n]` products of a fine plane to `m` rows of `out`, `ldo` apart.
///
/// # Safety
/// These columns of `out` exist and belong to the caller.
#[cfg(target_arch = "x86_64")]
unsafe fn add_columns(fine: &[f32], m: usize, n: usize, out: *mut f32, ldo: usize) {
    for t in 0..m {
        for (c, v) in fine[t * n..(t + 1) * n].iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { *out.add(t * ldo + c) += v };
        }
    }
}

/// One product of a [`linear`] call.
pub struct Out<'a> {
    /// The weight.
    pub w: &'a Linear,
    /// Where the results go: `[m][ldo]`, columns `0..n` are written.
    pub out: &'a mut [f32],
    /// Distance between rows of `out`.
    pub ldo: usize,
}

struct Piece {
    path: Path,
    per_chunk: usize,
    first_chunk: usize,
    groups: usize,
    out: *mut f32,
    ldo: usize,
}

/// Several weights times the same activations, as one parallel job.
///
/// `x` is prepared here as the weights need.
///
/// # Panics
/// If shapes disagree.
pub fn linear(pool: &Pool, mode: Mode, x: &mut Acts, outs: &mut [Out<'_>]) {
    let (need, kernels) = (need(mode, x.m(), outs), kernels(outs));
    multiply(pool, mode, x.input(pool, kernels, need), outs);
}

/// The same for activations that lie elsewhere, one row directly behind the other: they are read where they are. `acts`
/// holds their forms; its own rows are without forms afterwards.
///
/// # Panics
/// If shapes disagree, or the rows do not lie one behind the other.
pub fn linear_rows(pool: &Pool, mode: Mode, x: Rows<'_>, acts: &mut Acts, outs: &mut [Out<'_>]) {
    let (need, kernels) = (need(mode, x.len(), outs), kernels(outs));
    multiply(pool, mode, acts.input_of(pool, kernels, x.dense(), x.width(), need), outs);
}

fn need(mode: Mode, m: usize, outs: &[Out<'_>]) -> Need {
    outs.iter().fold(Need::default(), |a, o| a.or(o.w.need(m, mode)))
}

/// The kernels that prepare activations: those of the weights' tier, which is one for all weights of a model.
fn kernels(outs: &[Out<'_>]) -> &'static Kernels {
    let isa = outs.first().map_or(Isa::Reference, |o| o.w.isa);
    assert!(outs.iter().all(|o| o.w.isa == isa), "weights of one tier in one job");
    Kernels::for_isa(isa)
}

fn multiply(pool: &Pool, mode: Mode, x: Input<'_>, outs: &mut [Out<'_>]) {
    let m = x.m();
    if m == 0 {
        return;
    }
    const MAX: usize = 4;
    assert!(outs.len() <= MAX, "{} weights in one job", outs.len());
    let mut chunks = 0;
    let pieces: [Option<Piece>; MAX] = std::array::from_fn(|i| {
        let o = outs.get_mut(i)?;
        assert_eq!(x.k(), o.w.k, "activations of {} columns, weight [{}, {}]", x.k(), o.w.n, o.w.k);
        assert!(o.ldo >= o.w.n && o.out.len() >= (m - 1) * o.ldo + o.w.n, "outputs too small for {m} rows");
        let path = o.w.path(m, mode);
        let groups = o.w.n.div_ceil(GROUP);
        let per_chunk = o.w.groups_per_chunk(path, m, pool.threads());
        let piece =
            Piece { path, per_chunk, first_chunk: chunks, groups, out: o.out.as_mut_ptr(), ldo: o.ldo };
        chunks += groups.div_ceil(per_chunk);
        Some(piece)
    });
    let weights: [Option<&Linear>; MAX] = std::array::from_fn(|i| outs.get(i).map(|o| o.w));
    let job = Shared { pieces, weights };
    pool.run_streams(chunks, &|c, _| {
        let job = &job;
        let i = (0..MAX)
            .rev()
            .find(|&i| job.pieces[i].as_ref().is_some_and(|p| p.first_chunk <= c))
            .expect("chunk 0 belongs to the first piece");
        let (p, w) = (job.pieces[i].as_ref().expect("found"), job.weights[i].expect("as pieces"));
        let g0 = (c - p.first_chunk) * p.per_chunk;
        let g1 = (g0 + p.per_chunk).min(p.groups);
        // SAFETY: outputs were checked above; each group belongs to exactly one chunk.
        unsafe { w.run(p.path, g0, g1, x, p.out, p.ldo) };
    });
}

struct Shared<'a> {
    pieces: [Option<Piece>; 4],
    weights: [Option<&'a Linear>; 4],
}
// SAFETY: the output pointers are written in disjoint columns, see `linear`.
unsafe impl Sync for Shared<'_> {}
