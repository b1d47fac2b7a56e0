//! Activations, prepared once for all the weights that read them.

use std::ops::Range;

use crate::host::{AlignedBuffer, Pieces, Pool};
use crate::reference::quantise::Int8Row;
use crate::simd::Kernels;

/// Rows quantised or converted by one chunk of a parallel preparation.
const ROWS_PER_CHUNK: usize = 8;

/// Rows of a tile.
pub(super) const TILE_ROWS: usize = 16;

/// The forms of the activations that a set of kernels reads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Need {
    /// int8 blocks of 32 with scales and sums.
    pub int8: bool,
    /// A second int8 plane with the rounding error of the first (implies `int8`).
    pub fine: bool,
    /// bf16, row-major.
    pub bf16: bool,
    /// AMX A tiles, bf16.
    pub tiles: bool,
    /// A second set of tiles with the rounding error of bf16 (implies `tiles`).
    pub fine_tiles: bool,
}

impl Need {
    /// The forms that either needs.
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

/// Which rows are read in which forms: ranges of rows in their order, each with its forms; `None` means that all rows have all forms.
#[derive(Clone, Copy)]
struct Readers<'a>(Option<&'a [(Range<usize>, Need)]>);

impl Readers<'_> {
    /// Whether a form of some of `rows` is read.
    fn any(self, rows: Range<usize>, form: fn(&Need) -> bool) -> bool {
        let Some(parts) = self.0 else { return true };
        let from = parts.partition_point(|(of, _)| of.end <= rows.start);
        parts[from..].iter().take_while(|(of, _)| of.start < rows.end).any(|(_, need)| form(need))
    }
}

/// The forms of `M` rows of `K` activations that kernels read in addition to the f32 rows.
///
/// int8 ([`crate::reference::quantise`]): codes of rows padded with zeros to a multiple of 64 elements, scales, and sums that
/// multiply the weights' offsets; kernels that fold a constant zero point into the integer accumulator read the negated sums.
/// A fine plane follows the first one as M more rows. Buffers only grow, to the size that the dry run counts, so a
/// workspace allocates once.
#[derive(Debug, Default)]
pub struct Forms {
    m: usize,
    k: usize,
    have: Need,
    q: AlignedBuffer<i8>,
    d: AlignedBuffer<f32>,
    sum32: AlignedBuffer<f32>,
    sum16: AlignedBuffer<f32>,
    minus32: AlignedBuffer<i32>,
    minus16: AlignedBuffer<i32>,
    bf16: AlignedBuffer<u16>,
    tiles: AlignedBuffer<u16>,
}

/// `M` rows of `K` activations: f32, and their [`Forms`].
#[derive(Debug, Default)]
pub struct Acts {
    f32: AlignedBuffer<f32>,
    forms: Forms,
}

/// Bytes of the buffers of an [`Acts`] for the largest activations that it will hold; for the dry run.
#[derive(Debug, Clone, Copy, Default)]
pub struct ActsBytes {
    f32: usize,
    int8: usize,
    bf16: usize,
    tiles: usize,
}

impl ActsBytes {
    /// Counts `m` rows of `k` with the forms in `need`; `own` says that the buffer also holds the f32 rows
    /// ([`Acts::reset`]).
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

    /// Total bytes.
    pub fn total(&self) -> usize {
        self.f32 + self.int8 + self.bf16 + self.tiles
    }
}

/// Activations as a kernel reads them: borrowed f32 rows `[M][K]`, and their forms; or some of the rows.
#[derive(Clone, Copy)]
pub(super) struct Input<'a> {
    f32: &'a [f32],
    forms: &'a Forms,
    first: usize,
    m: usize,
}

impl<'a> Input<'a> {
    fn new(f32: &'a [f32], forms: &'a Forms) -> Input<'a> {
        Input { f32, forms, first: 0, m: forms.m }
    }

    /// Some of the rows. Tiles begin at every 16th, and fine planes are those of all rows only.
    pub fn rows(self, rows: Range<usize>) -> Input<'a> {
        assert!(rows.start <= rows.end && rows.end <= self.m, "rows {rows:?} of {}", self.m);
        Input { first: self.first + rows.start, m: rows.len(), ..self }
    }

    /// Rows.
    #[inline]
    pub fn m(&self) -> usize {
        self.m
    }
    /// Columns.
    #[inline]
    pub fn k(&self) -> usize {
        self.forms.k
    }
    /// See [`Forms::k_padded`].
    #[inline]
    pub fn k_padded(&self) -> usize {
        self.forms.k_padded()
    }
    /// See [`Forms::bf16_stride`].
    pub fn bf16_stride(&self) -> usize {
        self.forms.bf16_stride()
    }

    /// The f32 rows, `[M][K]`.
    pub fn f32(&self) -> &'a [f32] {
        self.of(self.f32, self.k())
    }
    /// See [`Forms::q`]; the other parts of the int8 form follow.
    #[inline]
    pub fn q(&self) -> &'a [i8] {
        self.of(self.forms.q(), self.k_padded())
    }
    #[inline]
    pub fn d(&self) -> &'a [f32] {
        self.of(self.forms.d(), self.k_padded() / 32)
    }
    #[inline]
    pub fn sum32(&self) -> &'a [f32] {
        self.of(self.forms.sum32(), self.k_padded() / 32)
    }
    #[inline]
    pub fn sum16(&self) -> &'a [f32] {
        self.of(self.forms.sum16(), self.k_padded() / 16)
    }
    #[inline]
    pub fn minus32(&self) -> &'a [i32] {
        self.of(self.forms.minus32(), self.k_padded() / 32)
    }
    #[inline]
    pub fn minus16(&self) -> &'a [i32] {
        self.of(self.forms.minus16(), self.k_padded() / 16)
    }
    /// See [`Forms::bf16`].
    pub fn bf16(&self) -> &'a [u16] {
        self.of(self.forms.bf16(), self.bf16_stride())
    }
    /// See [`Forms::tiles`].
    #[cfg_attr(not(all(target_arch = "x86_64", target_os = "linux")), allow(dead_code))]
    pub fn tiles(&self) -> &'a [u16] {
        if self.is_whole() {
            return self.forms.tiles();
        }
        assert!(self.first.is_multiple_of(TILE_ROWS), "tiles begin at every 16th row, not at {}", self.first);
        &self.forms.tiles()[self.first * self.k_padded()..]
    }
    /// See [`Forms::fine_tiles`].
    #[cfg_attr(not(all(target_arch = "x86_64", target_os = "linux")), allow(dead_code))]
    pub fn fine_tiles(&self) -> &'a [u16] {
        assert!(self.is_whole(), "fine tiles of some rows");
        self.forms.fine_tiles()
    }

    #[inline]
    fn is_whole(&self) -> bool {
        self.first == 0 && self.m == self.forms.m
    }

    /// The part of `all`, `each` elements a row, that belongs to these rows.
    #[inline]
    fn of<T>(&self, all: &'a [T], each: usize) -> &'a [T] {
        // A fine plane lies behind the rows.
        if self.is_whole() { all } else { &all[self.first * each..(self.first + self.m) * each] }
    }
}

impl std::ops::Deref for Acts {
    type Target = Forms;
    fn deref(&self) -> &Forms {
        &self.forms
    }
}

impl Acts {
    /// Makes room for `m` rows of `k` and returns the f32 rows, to be written before [`linear`](super::linear) reads
    /// them.
    pub fn reset(&mut self, m: usize, k: usize) -> &mut [f32] {
        self.forms.reset(m, k);
        self.f32.renew(m * k);
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

    /// The rows with the forms in `need`, made by `kernels`, the tier of the weights that read them.
    pub(super) fn input(&mut self, pool: &Pool, kernels: &Kernels, need: Need) -> Input<'_> {
        let x = &self.f32[..self.forms.m * self.forms.k];
        self.forms.prepare(pool, kernels, x, need, Readers(None));
        Input::new(self.f32(), &self.forms)
    }

    /// Drops prepared forms.
    pub(super) fn forget_forms(&mut self) {
        self.forms.have = Need::default();
    }

    /// The rows, each with the forms in which `readers` read it: these are ranges of rows, in their order. Forms that existed are made
    /// again, and the new ones are to be [forgotten](Acts::forget_forms) after use.
    pub(super) fn input_for(
        &mut self,
        pool: &Pool,
        kernels: &Kernels,
        readers: &[(Range<usize>, Need)],
    ) -> Input<'_> {
        debug_assert!(readers.windows(2).all(|r| r[0].0.end <= r[1].0.start), "ranges in their order");
        self.forget_forms();
        let need = readers.iter().fold(Need::default(), |all, (_, need)| all.or(*need));
        let x = &self.f32[..self.forms.m * self.forms.k];
        self.forms.prepare(pool, kernels, x, need, Readers(Some(readers)));
        Input::new(self.f32(), &self.forms)
    }

    /// `m` rows of `k` that lie elsewhere, with the forms in `need`. The f32 rows of this buffer are unchanged but lose
    /// their forms.
    pub(super) fn input_of<'a>(
        &'a mut self,
        pool: &Pool,
        kernels: &Kernels,
        rows: &'a [f32],
        k: usize,
        need: Need,
    ) -> Input<'a> {
        self.forms.reset(rows.len() / k, k);
        self.forms.prepare(pool, kernels, rows, need, Readers(None));
        Input::new(rows, &self.forms)
    }
}

impl Forms {
    fn reset(&mut self, m: usize, k: usize) {
        (self.m, self.k, self.have) = (m, k, Need::default());
    }

    /// Rows.
    #[inline]
    pub fn m(&self) -> usize {
        self.m
    }
    /// Columns.
    #[inline]
    pub fn k(&self) -> usize {
        self.k
    }
    /// K rounded up to 64, the stride of the int8 rows.
    #[inline]
    pub fn k_padded(&self) -> usize {
        self.k.next_multiple_of(64)
    }

    /// int8 codes `[M][k_padded]`; with a fine plane `[2M][k_padded]`.
    #[inline]
    pub fn q(&self) -> &[i8] {
        assert!(self.have.int8, "int8 activations were not prepared");
        &self.q[..self.int8_rows() * self.k_padded()]
    }
    /// Scales, one per 32 codes.
    #[inline]
    pub fn d(&self) -> &[f32] {
        &self.d[..self.int8_rows() * self.k_padded() / 32]
    }
    /// `d·Σq` per 32 codes.
    #[inline]
    pub fn sum32(&self) -> &[f32] {
        &self.sum32[..self.int8_rows() * self.k_padded() / 32]
    }
    /// `d·Σq` per 16 codes.
    #[inline]
    pub fn sum16(&self) -> &[f32] {
        &self.sum16[..self.int8_rows() * self.k_padded() / 16]
    }
    /// `-Σq` per 32 codes.
    #[inline]
    pub fn minus32(&self) -> &[i32] {
        &self.minus32[..self.int8_rows() * self.k_padded() / 32]
    }
    /// `-Σq` per 16 codes.
    #[inline]
    pub fn minus16(&self) -> &[i32] {
        &self.minus16[..self.int8_rows() * self.k_padded() / 16]
    }

    #[inline]
    fn int8_rows(&self) -> usize {
        if self.have.fine { 2 * self.m } else { self.m }
    }
    /// bf16 rows `[M][bf16_stride]`, zero-padded.
    pub fn bf16(&self) -> &[u16] {
        assert!(self.have.bf16, "bf16 activations were not prepared");
        &self.bf16[..self.m * self.bf16_stride()]
    }
    /// Elements between the bf16 rows: K rounded up to 64, plus one line, so that the same columns of several rows lie
    /// in different cache sets (16 tokens x 4096: 20 against 25 GB/s of weights).
    pub fn bf16_stride(&self) -> usize {
        self.k.next_multiple_of(64) + 32
    }
    /// AMX A tiles `[ceil(M/16)][k_padded/32][16][32]` bf16, zero-padded.
    pub fn tiles(&self) -> &[u16] {
        assert!(self.have.tiles, "AMX activations were not prepared");
        &self.tiles[..self.tiles_len()]
    }
    /// As [`Forms::tiles`], for the rounding error of those tiles; together they have 16 bits of mantissa.
    pub fn fine_tiles(&self) -> &[u16] {
        assert!(self.have.fine_tiles, "fine AMX activations were not prepared");
        &self.tiles[self.tiles_len()..2 * self.tiles_len()]
    }

    fn tiles_len(&self) -> usize {
        self.m.next_multiple_of(16) * self.k.next_multiple_of(64)
    }

    /// Makes those forms in `need` of `x`, `[M][K]`, that do not exist yet, of the rows that are read in them, with the kernels of a
    /// tier.
    fn prepare(&mut self, pool: &Pool, kernels: &Kernels, x: &[f32], need: Need, readers: Readers<'_>) {
        if (need.int8 && !self.have.int8) || (need.fine && !self.have.fine) {
            self.quantise(pool, kernels, x, need.fine, readers);
        }
        if need.bf16 && !self.have.bf16 {
            self.round(pool, kernels, x, readers);
        }
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        if (need.tiles && !self.have.tiles) || (need.fine_tiles && !self.have.fine_tiles) {
            self.tile(pool, x, need.fine_tiles, readers);
        }
    }

    /// Whether to share rows among threads: few elements are not worth waking any.
    fn parallel(&self) -> bool {
        self.m * self.k >= 16 * 1024
    }

    fn quantise(&mut self, pool: &Pool, kernels: &Kernels, x: &[f32], fine: bool, readers: Readers<'_>) {
        let (m, k, kp, parallel) = (self.m, self.k, self.k_padded(), self.parallel());
        let rows = (1 + usize::from(fine)) * m;
        self.q.renew(rows * kp);
        self.d.renew(rows * kp / 32);
        self.sum32.renew(rows * kp / 32);
        self.sum16.renew(rows * kp / 16);
        self.minus32.renew(rows * kp / 32);
        self.minus16.renew(rows * kp / 16);
        // The fine plane follows the first one.
        let (q, q2) = planes(&mut self.q, m, rows, kp);
        let (d, d2) = planes(&mut self.d, m, rows, kp / 32);
        let (s32, s32_2) = planes(&mut self.sum32, m, rows, kp / 32);
        let (s16, s16_2) = planes(&mut self.sum16, m, rows, kp / 16);
        let (m32, m32_2) = planes(&mut self.minus32, m, rows, kp / 32);
        let (m16, m16_2) = planes(&mut self.minus16, m, rows, kp / 16);
        let x = |r: usize| &x[r * k..(r + 1) * k];
        let plane = ((q, d, s32), (s16, m32, m16));
        if fine {
            let both = (plane, ((q2, d2, s32_2), (s16_2, m32_2, m16_2)));
            pool.rows(parallel, ROWS_PER_CHUNK, both, |r, (row, fine)| {
                kernels.quantise_row(x(r), int8_row(row), Some(int8_row(fine)));
            });
        } else {
            pool.rows(parallel, ROWS_PER_CHUNK, plane, |r, row| {
                if readers.any(r..r + 1, |need| need.int8) {
                    kernels.quantise_row(x(r), int8_row(row), None);
                }
            });
        }
        (self.have.int8, self.have.fine) = (true, fine);
    }

    fn round(&mut self, pool: &Pool, kernels: &Kernels, x: &[f32], readers: Readers<'_>) {
        let (m, k, kp, parallel) = (self.m, self.k, self.bf16_stride(), self.parallel());
        self.bf16.renew(m * kp);
        pool.rows(parallel, ROWS_PER_CHUNK, Pieces::new(&mut self.bf16[..m * kp], kp), |r, out| {
            if readers.any(r..r + 1, |need| need.bf16) {
                kernels.f32_to_bf16(&x[r * k..(r + 1) * k], &mut out[..k]);
                out[k..].fill(0);
            }
        });
        self.have.bf16 = true;
    }

    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    fn tile(&mut self, pool: &Pool, x: &[f32], fine: bool, readers: Readers<'_>) {
        let (m, k, kp, parallel) = (self.m, self.k, self.k_padded(), self.parallel());
        let (blocks, each) = (m.div_ceil(16), 16 * kp);
        let all = (1 + usize::from(fine)) * blocks;
        self.tiles.renew(all * each);
        let (first, second) = planes(&mut self.tiles, blocks, all, each);
        let block = |b: usize| ((m - b * 16).min(16), &x[b * 16 * k..]);
        if fine {
            pool.rows(parallel, 1, (first, second), |b, (first, second)| {
                let (rows, x) = block(b);
                crate::amx::pack::pack_a_block(x, rows, k, k, first);
                let lost: Vec<f32> =
                    x[..rows * k].iter().map(|&v| v - half::bf16::from_f32(v).to_f32()).collect();
                crate::amx::pack::pack_a_block(&lost, rows, k, k, second);
            });
        } else {
            pool.rows(parallel, 1, first, |b, out| {
                let (rows, x) = block(b);
                if readers.any(16 * b..16 * b + rows, |need| need.tiles) {
                    crate::amx::pack::pack_a_block(x, rows, k, k, out);
                }
            });
        }
        (self.have.tiles, self.have.fine_tiles) = (true, fine);
    }
}

/// The first `m` rows of `each` elements, and the following rows up to `rows`: a plane and its fine plane.
fn planes<T: Send>(data: &mut [T], m: usize, rows: usize, each: usize) -> (Pieces<'_, T>, Pieces<'_, T>) {
    let (first, second) = data[..rows * each].split_at_mut(m * each);
    (Pieces::new(first, each), Pieces::new(second, each))
}

/// A row's slices: codes, scales, sums of 32; sums of 16, negated sums of 32 and of 16.
type Int8Slices<'a> =
    ((&'a mut [i8], &'a mut [f32], &'a mut [f32]), (&'a mut [f32], &'a mut [i32], &'a mut [i32]));

fn int8_row<'a>(((q, d, sum32), (sum16, minus32, minus16)): Int8Slices<'a>) -> Int8Row<'a> {
    Int8Row { q, d, sum32, sum16, minus32, minus16 }
}
