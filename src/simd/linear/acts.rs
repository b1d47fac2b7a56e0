//! Activations, prepared once for all the weights that read them.

use crate::host::Pool;
use crate::host::memory::ask_for_huge_pages;

/// Rows quantised or converted by one chunk of a parallel preparation.
const ROWS_PER_CHUNK: usize = 8;

/// Which forms of the activations a set of kernels reads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Need {
    /// int8 blocks of 32 with scales and sums.
    pub int8: bool,
    /// A second int8 plane with what the first one lost (implies `int8`).
    pub fine: bool,
    /// bf16, row-major.
    pub bf16: bool,
    /// AMX A tiles, bf16.
    pub tiles: bool,
    /// A second set of tiles with what rounding to bf16 lost (implies `tiles`).
    pub fine_tiles: bool,
}

impl Need {
    /// What either needs.
    pub fn or(self, o: Need) -> Need {
        Need {
            int8: self.int8 || o.int8,
            fine: self.fine || o.fine,
            bf16: self.bf16 || o.bf16,
            tiles: self.tiles || o.tiles,
            fine_tiles: self.fine_tiles || o.fine_tiles,
        }
    }
}

/// What kernels read of `M` rows of `K` activations beside the f32 rows: the forms that they asked for.
///
/// int8: per row and block of 32, `d = max|x|/127`, `q = round(x/d)`; rows are padded with zeros to a
/// multiple of 64 elements. With them go `d·Σq` per 32 and per 16 elements, which multiply the
/// weights' offsets, and `-Σq` for kernels that take an offset of all codes alike into their integer sums. A fine plane is `x - d·q`, quantised in the same way: it stands behind the first one as
/// M more rows, and the products of the two planes add up to those of 16-bit activations. Buffers only grow, so a workspace allocates once.
#[derive(Debug, Default)]
pub struct Forms {
    m: usize,
    k: usize,
    have: Need,
    q: Vec<i8>,
    d: Vec<f32>,
    sum32: Vec<f32>,
    sum16: Vec<f32>,
    minus32: Vec<i32>,
    minus16: Vec<i32>,
    bf16: Vec<u16>,
    tiles: Vec<u16>,
}

/// `M` rows of `K` activations: f32, and their [`Forms`].
#[derive(Debug, Default)]
pub struct Acts {
    f32: Vec<f32>,
    forms: Forms,
}

/// Bytes of the buffers of an [`Acts`], of the widest of what it will hold: the dry run.
#[derive(Debug, Clone, Copy, Default)]
pub struct ActsBytes {
    f32: usize,
    int8: usize,
    bf16: usize,
    tiles: usize,
}

impl ActsBytes {
    /// `m` rows of `k` with the forms in `need`; `own`: the f32 rows are the buffer's, too ([`Acts::reset`]).
    pub fn add(&mut self, m: usize, k: usize, need: Need, own: bool) {
        let kp = k.next_multiple_of(64);
        let planes = |fine: bool| 1 + usize::from(fine);
        // Codes; scale, sum and negated sum per 32 of them, the last two per 16 as well.
        let int8 = planes(need.fine) * m * (kp + 4 * (3 * (kp / 32) + 2 * (kp / 16)));
        let most = |a: &mut usize, bytes: usize, needed: bool| *a = (*a).max(if needed { bytes } else { 0 });
        most(&mut self.f32, 4 * m * k, own);
        most(&mut self.int8, int8, need.int8);
        most(&mut self.bf16, 2 * m * (kp + 32), need.bf16);
        most(&mut self.tiles, 2 * planes(need.fine_tiles) * m.next_multiple_of(16) * kp, need.tiles);
    }

    /// All of it.
    pub fn total(&self) -> usize {
        self.f32 + self.int8 + self.bf16 + self.tiles
    }
}

/// Activations as a kernel reads them: f32 rows `[M][K]` of whoever owns them, and their forms.
#[derive(Clone, Copy)]
pub(super) struct Input<'a> {
    f32: &'a [f32],
    forms: &'a Forms,
}

impl<'a> Input<'a> {
    /// The f32 rows, `[M][K]`.
    pub fn f32(&self) -> &'a [f32] {
        self.f32
    }
}

impl std::ops::Deref for Input<'_> {
    type Target = Forms;
    fn deref(&self) -> &Forms {
        self.forms
    }
}

impl std::ops::Deref for Acts {
    type Target = Forms;
    fn deref(&self) -> &Forms {
        &self.forms
    }
}

impl Acts {
    /// Room for `m` rows of `k`; returns the f32 rows, to be written before [`Acts::prepare`].
    pub fn reset(&mut self, m: usize, k: usize) -> &mut [f32] {
        self.forms.reset(m, k);
        grow(&mut self.f32, m * k);
        &mut self.f32[..m * k]
    }

    /// The f32 rows, `[M][K]`.
    pub fn f32(&self) -> &[f32] {
        &self.f32[..self.m * self.k]
    }

    /// Mutable access to the f32 rows; prepared forms become stale and are dropped.
    pub fn f32_mut(&mut self) -> &mut [f32] {
        self.forms.have = Need::default();
        &mut self.f32[..self.forms.m * self.forms.k]
    }

    /// Makes the forms in `need` from the f32 rows, if they are not there yet.
    pub fn prepare(&mut self, pool: &Pool, need: Need) {
        self.input(pool, need);
    }

    /// The rows with the forms in `need`.
    pub(super) fn input(&mut self, pool: &Pool, need: Need) -> Input<'_> {
        self.forms.prepare(pool, &self.f32[..self.forms.m * self.forms.k], need);
        Input { f32: self.f32(), forms: &self.forms }
    }

    /// `m` rows of `k` that lie elsewhere, with the forms in `need`; the f32 rows here stay as they are, but are without
    /// forms.
    pub(super) fn input_of<'a>(
        &'a mut self,
        pool: &Pool,
        rows: &'a [f32],
        k: usize,
        need: Need,
    ) -> Input<'a> {
        self.forms.reset(rows.len() / k, k);
        self.forms.prepare(pool, rows, need);
        Input { f32: rows, forms: &self.forms }
    }
}

impl Forms {
    fn reset(&mut self, m: usize, k: usize) {
        (self.m, self.k, self.have) = (m, k, Need::default());
    }

    /// Rows.
    pub fn m(&self) -> usize {
        self.m
    }
    /// Columns.
    pub fn k(&self) -> usize {
        self.k
    }
    /// K rounded up to 64, the stride of the int8 rows.
    pub fn k_padded(&self) -> usize {
        self.k.next_multiple_of(64)
    }

    /// int8 codes `[M][k_padded]`; with a fine plane `[2M][k_padded]`.
    pub fn q(&self) -> &[i8] {
        assert!(self.have.int8, "int8 activations were not prepared");
        &self.q[..self.int8_rows() * self.k_padded()]
    }
    /// Scales, one per 32 codes.
    pub fn d(&self) -> &[f32] {
        &self.d[..self.int8_rows() * self.k_padded() / 32]
    }
    /// `d·Σq` per 32 codes.
    pub fn sum32(&self) -> &[f32] {
        &self.sum32[..self.int8_rows() * self.k_padded() / 32]
    }
    /// `d·Σq` per 16 codes.
    pub fn sum16(&self) -> &[f32] {
        &self.sum16[..self.int8_rows() * self.k_padded() / 16]
    }
    /// `-Σq` per 32 codes.
    pub fn minus32(&self) -> &[i32] {
        &self.minus32[..self.int8_rows() * self.k_padded() / 32]
    }
    /// `-Σq` per 16 codes.
    pub fn minus16(&self) -> &[i32] {
        &self.minus16[..self.int8_rows() * self.k_padded() / 16]
    }

    fn int8_rows(&self) -> usize {
        if self.have.fine { 2 * self.m } else { self.m }
    }
    /// bf16 rows `[M][bf16_stride]`, zero-padded.
    pub fn bf16(&self) -> &[u16] {
        assert!(self.have.bf16, "bf16 activations were not prepared");
        &self.bf16[..self.m * self.bf16_stride()]
    }
    /// Elements between the bf16 rows: K rounded up to 64, and a line more, so that the same columns of several
    /// rows lie in different sets of the cache (16 tokens x 4096: 20 against 25 GB/s of weights).
    pub fn bf16_stride(&self) -> usize {
        self.k.next_multiple_of(64) + 32
    }
    /// AMX A tiles `[ceil(M/16)][k_padded/32][16][32]` bf16, zero-padded.
    pub fn tiles(&self) -> &[u16] {
        assert!(self.have.tiles, "AMX activations were not prepared");
        &self.tiles[..self.tiles_len()]
    }
    /// As [`Forms::tiles`], of what those lost of the f32 rows: together 16 bits of mantissa.
    pub fn fine_tiles(&self) -> &[u16] {
        assert!(self.have.fine_tiles, "fine AMX activations were not prepared");
        &self.tiles[self.tiles_len()..2 * self.tiles_len()]
    }

    fn tiles_len(&self) -> usize {
        self.m.next_multiple_of(16) * self.k.next_multiple_of(64)
    }

    /// Makes the forms in `need` of `x`, `[M][K]`, if they are not there yet.
    fn prepare(&mut self, pool: &Pool, x: &[f32], need: Need) {
        let (m, k) = (self.m, self.k);
        let parallel = m * k >= 16 * 1024;
        let chunks = m.div_ceil(ROWS_PER_CHUNK);
        let rows = |c: usize| c * ROWS_PER_CHUNK..((c + 1) * ROWS_PER_CHUNK).min(m);
        if (need.int8 && !self.have.int8) || (need.fine && !self.have.fine) {
            let (kp, planes) = (self.k_padded(), 1 + need.fine as usize);
            grow(&mut self.q, planes * m * kp);
            grow(&mut self.d, planes * m * kp / 32);
            grow(&mut self.sum32, planes * m * kp / 32);
            grow(&mut self.sum16, planes * m * kp / 16);
            grow(&mut self.minus32, planes * m * kp / 32);
            grow(&mut self.minus16, planes * m * kp / 16);
            let q = Rows::new(&mut self.q, kp);
            let d = Rows::new(&mut self.d, kp / 32);
            let s32 = Rows::new(&mut self.sum32, kp / 32);
            let s16 = Rows::new(&mut self.sum16, kp / 16);
            let m32 = Rows::new(&mut self.minus32, kp / 32);
            let m16 = Rows::new(&mut self.minus16, kp / 16);
            pool.run_if(parallel, chunks, &|c, _| {
                for r in rows(c) {
                    // SAFETY: each row, and its fine plane, belongs to exactly one chunk.
                    let plane = |r: usize| unsafe {
                        Plane {
                            q: q.row(r),
                            d: d.row(r),
                            sum32: s32.row(r),
                            sum16: s16.row(r),
                            minus32: m32.row(r),
                            minus16: m16.row(r),
                        }
                    };
                    let fine = need.fine.then(|| plane(m + r));
                    quantise_row(&x[r * k..(r + 1) * k], plane(r), fine);
                }
            });
            self.have.int8 = true;
            self.have.fine = need.fine;
        }
        if need.bf16 && !self.have.bf16 {
            let kp = self.bf16_stride();
            grow(&mut self.bf16, m * kp);
            let out = Rows::new(&mut self.bf16, kp);
            pool.run_if(parallel, chunks, &|c, _| {
                for r in rows(c) {
                    // SAFETY: each row belongs to exactly one chunk.
                    let out = unsafe { out.row(r) };
                    to_bf16(&x[r * k..(r + 1) * k], &mut out[..k]);
                    out[k..].fill(0);
                }
            });
            self.have.bf16 = true;
        }
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        if (need.tiles && !self.have.tiles) || (need.fine_tiles && !self.have.fine_tiles) {
            let kp = k.next_multiple_of(64);
            let (blocks, planes) = (m.div_ceil(16), 1 + need.fine_tiles as usize);
            grow(&mut self.tiles, planes * blocks * 16 * kp);
            let out = Rows::new(&mut self.tiles, 16 * kp);
            pool.run_if(parallel, blocks, &|b, _| {
                let (rows, x) = ((m - b * 16).min(16), &x[b * 16 * k..]);
                // SAFETY: each block of 16 rows, and its fine plane, belongs to exactly one chunk.
                let plane = |p: usize| unsafe { out.row(p * blocks + b) };
                crate::amx::pack::pack_a_block(x, rows, k, k, plane(0));
                if need.fine_tiles {
                    let lost: Vec<f32> =
                        x[..rows * k].iter().map(|&v| v - half::bf16::from_f32(v).to_f32()).collect();
                    crate::amx::pack::pack_a_block(&lost, rows, k, k, plane(1));
                }
            });
            self.have.tiles = true;
            self.have.fine_tiles = need.fine_tiles;
        }
    }
}

/// Makes room for exactly `len`: what the dry run counts.
fn grow<T: Default + Clone>(v: &mut Vec<T>, len: usize) {
    if v.len() < len {
        v.reserve_exact(len - v.len());
        ask_for_huge_pages(v);
        v.resize(len, T::default());
    }
}

/// A matrix whose rows are written by different threads.
pub(crate) struct Rows<T> {
    ptr: *mut T,
    rows: usize,
    stride: usize,
}

// SAFETY: see `row`: callers hand out each row to one thread only.
unsafe impl<T: Send> Sync for Rows<T> {}

impl<T> Rows<T> {
    pub(crate) fn new(data: &mut [T], stride: usize) -> Self {
        Rows { ptr: data.as_mut_ptr(), rows: data.len() / stride.max(1), stride }
    }

    /// # Safety
    /// No two live slices of the same row; the matrix outlives them.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn row(&self, r: usize) -> &mut [T] {
        assert!(r < self.rows, "row {r} of {}", self.rows);
        // SAFETY: in range; exclusivity is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(r * self.stride), self.stride) }
    }
}

/// Where one row's codes go; all of it as long as the padded row implies.
struct Plane<'a> {
    q: &'a mut [i8],
    d: &'a mut [f32],
    sum32: &'a mut [f32],
    sum16: &'a mut [f32],
    minus32: &'a mut [i32],
    minus16: &'a mut [i32],
}

/// Quantises a row, and what is lost into `fine`.
fn quantise_row(x: &[f32], plane: Plane<'_>, fine: Option<Plane<'_>>) {
    #[cfg(target_arch = "x86_64")]
    if crate::simd::Caps::get().avx512 {
        // SAFETY: AVX-512 was detected; the lengths are checked inside.
        unsafe { avx512::quantise_row(x, plane, fine) };
        return;
    }
    quantise_row_scalar(x, plane, fine);
}

fn quantise_row_scalar(x: &[f32], mut plane: Plane<'_>, mut fine: Option<Plane<'_>>) {
    for b in 0..plane.d.len() {
        let mut xs = [0f32; 32];
        let from = &x[(b * 32).min(x.len())..(b * 32 + 32).min(x.len())];
        xs[..from.len()].copy_from_slice(from);
        quantise_block_scalar(&xs, &mut plane, b);
        if let Some(fine) = &mut fine {
            for (x, q) in xs.iter_mut().zip(&plane.q[b * 32..]) {
                *x = (-plane.d[b]).mul_add(*q as f32, *x);
            }
            quantise_block_scalar(&xs, fine, b);
        }
    }
}

fn quantise_block_scalar(xs: &[f32; 32], out: &mut Plane<'_>, b: usize) {
    let qs = &mut out.q[b * 32..b * 32 + 32];
    let amax = xs.iter().fold(0f32, |a, v| a.max(v.abs()));
    let scale = amax / 127.0;
    let inverse = if amax > 0.0 { 127.0 / amax } else { 0.0 };
    for (q, x) in qs.iter_mut().zip(xs) {
        *q = (x * inverse).round_ties_even() as i8;
    }
    let half: [i32; 2] = std::array::from_fn(|h| qs[h * 16..h * 16 + 16].iter().map(|&v| v as i32).sum());
    out.d[b] = scale;
    out.sum16[b * 2] = scale * half[0] as f32;
    out.sum16[b * 2 + 1] = scale * half[1] as f32;
    out.sum32[b] = scale * (half[0] + half[1]) as f32;
    out.minus16[b * 2..b * 2 + 2].copy_from_slice(&half.map(|s| -s));
    out.minus32[b] = -(half[0] + half[1]);
}

/// f32 to bf16, round to nearest even.
fn to_bf16(x: &[f32], out: &mut [u16]) {
    #[cfg(target_arch = "x86_64")]
    if crate::simd::Caps::get().avx512_bf16 && crate::simd::Caps::get().avx512 {
        // SAFETY: AVX-512 BF16 was detected; the lengths are checked inside.
        unsafe { avx512::to_bf16(x, out) };
        return;
    }
    for (o, x) in out.iter_mut().zip(x) {
        *o = half::bf16::from_f32(*x).to_bits();
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;

    use super::Plane;

    /// Four blocks of 32 at a time: their maxima and sums are reduced together, and what is derived from those
    /// is computed for four blocks at once.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
    pub unsafe fn quantise_row(x: &[f32], mut plane: Plane<'_>, mut fine: Option<Plane<'_>>) {
        let blocks = plane.d.len();
        for p in [Some(&plane), fine.as_ref()].into_iter().flatten() {
            let halves = (p.q.len() / 16, p.sum16.len(), p.minus16.len());
            let wholes = (p.d.len(), p.sum32.len(), p.minus32.len());
            assert_eq!(halves, (blocks * 2, blocks * 2, blocks * 2), "a plane of {blocks} blocks");
            assert_eq!(wholes, (blocks, blocks, blocks), "a plane of {blocks} blocks");
        }
        for b in (0..blocks).step_by(4) {
            let mut v = [_mm512_setzero_ps(); 8];
            for (i, v) in v.iter_mut().enumerate() {
                let left = x.len().saturating_sub(b * 32 + i * 16).min(16);
                // SAFETY: masked-off lanes are not read.
                *v = unsafe {
                    let at = x.as_ptr().wrapping_add(b * 32 + i * 16);
                    _mm512_maskz_loadu_ps(((1u32 << left) - 1) as __mmask16, at)
                };
            }
            // SAFETY: the planes have room for blocks up to `blocks`.
            unsafe {
                let (q, d) = quantise_four(&v, &mut plane, b);
                if let Some(fine) = &mut fine {
                    for i in 0..8 {
                        v[i] = _mm512_fnmadd_ps(spread(d, i / 2), _mm512_cvtepi32_ps(q[i]), v[i]);
                    }
                    quantise_four(&v, fine, b);
                }
            }
        }
    }

    /// Lane `i` of four in all of sixteen.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn spread(v: __m128, i: usize) -> __m512 {
        _mm512_permutexvar_ps(_mm512_set1_epi32(i as i32), _mm512_castps128_ps512(v))
    }

    /// The codes of blocks `b..b + 4`, two vectors each, and their scales. Blocks past the plane's end are not stored.
    ///
    /// # Safety
    /// The arrays of the plane agree about its number of blocks, which is more than `b`.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
    #[inline]
    unsafe fn quantise_four(v: &[__m512; 8], out: &mut Plane<'_>, b: usize) -> ([__m512i; 8], __m128) {
        let mut amax = [_mm512_setzero_ps(); 4];
        for (i, amax) in amax.iter_mut().enumerate() {
            *amax = _mm512_max_ps(_mm512_abs_ps(v[2 * i]), _mm512_abs_ps(v[2 * i + 1]));
        }
        let amax = max_of_each(amax);
        let range = _mm_set1_ps(127.0);
        let scale = _mm_div_ps(amax, range);
        let some = _mm_cmp_ps_mask::<_CMP_GT_OQ>(amax, _mm_setzero_ps());
        let inverse = _mm_maskz_div_ps(some, range, amax);
        let mut q = [_mm512_setzero_si512(); 8];
        for i in 0..8 {
            q[i] = _mm512_cvtps_epi32(_mm512_mul_ps(v[i], spread(inverse, i / 2)));
        }
        let low = sum_of_each([q[0], q[2], q[4], q[6]]);
        let high = sum_of_each([q[1], q[3], q[5], q[7]]);
        let both = _mm_add_epi32(low, high);
        // Low and high half of each block in turn.
        let halves = interleave(low, high);
        let scales = _mm_castps_si128(scale);
        let scales = _mm256_castsi256_ps(interleave(scales, scales));
        let left = (out.d.len() - b).min(4);
        let (one, two) = ((1u32 << left) - 1, (1u32 << (2 * left)) - 1);
        let (one, two) = (one as __mmask8, two as __mmask8);
        // SAFETY: `left` blocks, two halves each, exist from block b on by the caller's promise.
        unsafe {
            for (i, q) in q.iter().enumerate().take(2 * left) {
                let to = out.q.as_mut_ptr().add(b * 32 + i * 16);
                _mm_storeu_si128(to.cast(), _mm512_cvtsepi32_epi8(*q));
            }
            _mm_mask_storeu_ps(out.d.as_mut_ptr().add(b), one, scale);
            let sum = _mm_mul_ps(scale, _mm_cvtepi32_ps(both));
            _mm_mask_storeu_ps(out.sum32.as_mut_ptr().add(b), one, sum);
            let minus = _mm_sub_epi32(_mm_setzero_si128(), both);
            _mm_mask_storeu_epi32(out.minus32.as_mut_ptr().add(b), one, minus);
            let sum = _mm256_mul_ps(scales, _mm256_cvtepi32_ps(halves));
            _mm256_mask_storeu_ps(out.sum16.as_mut_ptr().add(2 * b), two, sum);
            let minus = _mm256_sub_epi32(_mm256_setzero_si256(), halves);
            _mm256_mask_storeu_epi32(out.minus16.as_mut_ptr().add(2 * b), two, minus);
        }
        (q, scale)
    }

    /// `a[0] b[0] a[1] b[1] ...`
    #[target_feature(enable = "avx512f,avx512vl")]
    #[inline]
    fn interleave(a: __m128i, b: __m128i) -> __m256i {
        _mm256_set_m128i(_mm_unpackhi_epi32(a, b), _mm_unpacklo_epi32(a, b))
    }

    /// Lane i: the greatest lane of `v[i]`.
    #[target_feature(enable = "avx512f,avx512dq,avx512vl")]
    #[inline]
    fn max_of_each(v: [__m512; 4]) -> __m128 {
        let a = _mm512_max_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
        let b = _mm512_max_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
        let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
        let (lo, hi) = (_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
        let c = _mm512_max_ps(_mm512_castpd_ps(lo), _mm512_castpd_ps(hi));
        let c = _mm256_max_ps(_mm512_castps512_ps256(c), _mm512_extractf32x8_ps::<1>(c));
        _mm_max_ps(_mm256_castps256_ps128(c), _mm256_extractf128_ps::<1>(c))
    }

    /// Lane i: the sum of the lanes of `v[i]`.
    #[target_feature(enable = "avx512f,avx512dq,avx512vl")]
    #[inline]
    fn sum_of_each(v: [__m512i; 4]) -> __m128i {
        let a = _mm512_add_epi32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
        let b = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
        let c = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
        let c = _mm256_add_epi32(_mm512_castsi512_si256(c), _mm512_extracti64x4_epi64::<1>(c));
        _mm_add_epi32(_mm256_castsi256_si128(c), _mm256_extracti128_si256::<1>(c))
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    pub unsafe fn to_bf16(x: &[f32], out: &mut [u16]) {
        assert!(out.len() >= x.len());
        let mut i = 0;
        while i < x.len() {
            let n = (x.len() - i).min(16);
            let mask = ((1u32 << n) - 1) as __mmask16;
            // SAFETY: masked lanes are neither read nor written; `i + n <= x.len() <= out.len()`.
            unsafe {
                let v = _mm512_maskz_loadu_ps(mask, x.as_ptr().add(i));
                let h: __m256i = std::mem::transmute(_mm512_cvtneps_pbh(v));
                _mm256_mask_storeu_epi16(out.as_mut_ptr().add(i).cast(), mask, h);
            }
            i += n;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simd_quantisation_equals_scalar() {
        for k in [1usize, 31, 32, 33, 64, 95, 576] {
            let x: Vec<f32> = (0..k).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.037).collect();
            let kp = k.next_multiple_of(64);
            type Buffers = (Vec<i8>, [Vec<f32>; 3], [Vec<i32>; 2]);
            fn plane((q, [d, sum32, sum16], [minus32, minus16]): &mut Buffers) -> Plane<'_> {
                Plane { q, d, sum32, sum16, minus32, minus16 }
            }
            let floats = [32, 32, 16].map(|per| vec![0.0; kp / per]);
            let empty: Buffers = (vec![0; kp], floats, [32, 16].map(|per| vec![0; kp / per]));
            let (mut a, mut b) = ([empty.clone(), empty.clone()], [empty.clone(), empty]);
            let [a0, a1] = &mut a;
            quantise_row(&x, plane(a0), Some(plane(a1)));
            let [b0, b1] = &mut b;
            quantise_row_scalar(&x, plane(b0), Some(plane(b1)));
            for (i, x) in x.iter().enumerate() {
                let y: f32 = a.iter().map(|p| p.1[0][i / 32] * p.0[i] as f32).sum();
                // Half a step of the second plane, whose range is half a step of the first.
                assert!((x - y).abs() <= a[0].1[0][i / 32] * 1.01 / 2.0 / 254.0, "k = {k}: {x} became {y}");
            }
            assert_eq!(a, b, "k = {k}");
        }
    }
}
