//! Quantised linear on int8 tiles: packed codes times int8 activations, with the bits of
//! [`vnni`](super::super::quant::vnni).
//!
//!   y[t][n] = Σ_blocks (d_w·d_x)·Σ(q_w - z)·q_x + m_w·(d_x·Σq_x)       z: the code that means zero, where it is one for all
//!
//! A tile product covers a block of 32 of K (16 where scales change after 16: the other half of B is zeros). Its sums, whole
//! numbers, go through L1 to the vector unit, which scales them and adds them up: the same numbers in the same order
//! as VNNI, so that the choice between the two may depend on the number of tokens, even in deterministic mode.
//!
//! layout     groups as in `packed`; activations are packed per call: `[block of rows][step][row][32]`, scales `[step][16]`
//! tile       16 columns x up to 16 tokens x 32; rows in equal blocks, the last of which overlaps the one before it
//! pipeline   these overlap: codes of step s + 4 become a B tile, the product of step s goes to scratch (four of them),
//!            the sums of step s - 2 are scaled; the tile unit and stores hide behind ports 0 and 5
//! registers  R sums + d, m + temporaries of 32 zmm, R = 8, 12 or 16
//! bound      ports 0 and 5: per step and token cvt, mul, fma (asymmetric: one fma more) = 24 (32) cycles for 16 tokens,
//!            and 10-18 for making codes; the store unit 24. Counted: `scripts/mca`
//! measured   on a Sapphire Rapids, as a C program of the same shape (decision 0025): q4_0 M = 16 0.37 Top/s a thread where
//!            VNNI tiles of 2 x 8 take 0.295, q8_0 0.31 against 0.24; contended 0.32 against 0.24. This code has run on
//!            emulated tiles only
//! error      as vnni: integers exact; f32 rounding over K/32 blocks; activations quantised to 8 bits

use std::arch::x86_64::*;

use super::super::kernel::{ActsForm, GROUP, LinearKernel, Work};
use super::super::quant::X;
use super::super::quant::format::RecordFormat;
use super::range;
use crate::amx::int8::{B_BYTES, C_LEN, TILE_K, product};
use crate::amx::scratch;
use crate::amx::session::{Session, Shapes};
use crate::tensor::formats::with_format;

/// Most tokens of a block.
const ROWS: usize = 16;
/// Blocks of a pass (64 tokens), which share each tile of codes.
const PASS: usize = 4;
/// Number of steps that a tile of codes is made before it is multiplied, and the slots of a ring of tiles.
const LEAD: usize = 4;
const RING: usize = 8;
/// Number of products whose sums wait in scratch.
const IN_FLIGHT: usize = 4;

/// Divides rows into equal blocks: the number of blocks, and the rows of each. Block `i` begins at `min(i * rows, m -
/// rows)`.
fn blocks(m: usize) -> (usize, usize) {
    let blocks = m.div_ceil(ROWS);
    (blocks, m.div_ceil(blocks))
}

/// A thread's memory: one pass's activations, tiles of codes, sums.
struct Scratch {
    /// `[block][step][rows][32]`, 512 bytes a step.
    q: *mut i8,
    /// `[block][step][16]`.
    d: *mut f32,
    /// `[block][step][products][16]`; written only for formats with offsets.
    sums: *mut f32,
    /// `[slot][products]` B tiles.
    codes: *mut i8,
    slots: usize,
    /// `[IN_FLIGHT][products]` C tiles.
    c: *mut i32,
}

/// One block of rows times one group.
struct BlockProduct<'a> {
    /// The group, followed by the next groups.
    w: *const u8,
    steps: usize,
    rows: usize,
    q: *const i8,
    d: *const f32,
    sums: *const f32,
    scratch: &'a Scratch,
    /// `Some` if the tiles of codes are still to be made: how far ahead weights are prefetched.
    make: Option<usize>,
    out: *mut f32,
    ldo: usize,
    lanes: __mmask16,
}

impl BlockProduct<'_> {
    /// The record of a step, and its block within it.
    #[inline(always)]
    fn at<F: RecordFormat>(&self, step: usize) -> (*const u8, usize) {
        let blocks = F::LAYOUT.record_k / 32;
        (self.w.wrapping_add(step / blocks * F::LAYOUT.record_bytes), step % blocks)
    }

    /// The B tiles of `step` in slot `slot`.
    ///
    /// # Safety
    /// The group has this step, the scratch this slot; AVX-512.
    #[inline(always)]
    unsafe fn make<F: RecordFormat>(&self, step: usize, slot: usize, ahead: usize) {
        let (w, b) = self.at::<F>(step);
        // SAFETY: the record has block `b`; the slot has room for a tile, for two where scales change halfway.
        unsafe {
            let lines = F::LAYOUT.record_bytes.div_ceil(2 * F::LAYOUT.record_k);
            for l in b * lines..(b + 1) * lines {
                _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add(ahead + l * 64).cast());
            }
            let to = self.scratch.codes.add(slot * products::<F>() * B_BYTES);
            let codes = F::codes(w, b);
            let zero = _mm512_set1_epi8(F::ZERO_LOG2.map_or(0, |z| (1u32 << z) as i8));
            for i in 0..8 {
                let signed = if F::ZERO_LOG2.is_some() { _mm512_sub_epi8(codes[i], zero) } else { codes[i] };
                // Quads 4 to 7 of a second tile lie in its second half; the rest has been zero since the call began.
                let tile = if F::HALVES { i / 4 * B_BYTES } else { 0 };
                _mm512_storeu_si512(to.add(tile + i * 64).cast(), signed);
            }
        }
    }

    /// Computes the products of `step` from slot `slot` to scratch `I`.
    ///
    /// # Safety
    /// As [`BlockProduct::make`], which has made the slot; [`Shapes::int8`] of the job's rows is loaded.
    #[inline(always)]
    unsafe fn multiply<F: RecordFormat, const I: usize>(&self, step: usize, slot: usize) {
        // SAFETY: tiles of this step and slot, sums of this place.
        unsafe {
            let a = self.q.add(step * ROWS * TILE_K);
            let b = self.scratch.codes.add(slot * products::<F>() * B_BYTES).cast_const();
            let c = self.scratch.c.add(I * products::<F>() * C_LEN);
            product::<I>(a, b, c);
            if F::HALVES {
                product::<I>(a, b.add(B_BYTES), c.add(C_LEN));
            }
        }
    }

    /// Scales the sums of `step`, which are in scratch `I`, and adds them to `acc`: the operations of `vnni::tile`.
    ///
    /// # Safety
    /// [`BlockProduct::multiply`] has put them there.
    #[inline(always)]
    unsafe fn scale<F: RecordFormat, const I: usize, const R: usize>(
        &self,
        step: usize,
        acc: &mut [__m512; R],
    ) {
        let (w, b) = self.at::<F>(step);
        // SAFETY: the record has block `b`; scales of 16 rows for each step, sums of 16 rows.
        unsafe {
            let c = self.scratch.c.add(I * products::<F>() * C_LEN).cast_const();
            let sum = |t: usize| c.add(t * 16).cast::<__m512i>();
            let (d_x, s_x) = (self.d.add(step * ROWS), self.sums.wrapping_add(step * products::<F>() * ROWS));
            let (d, m) = F::scales(w, b, 0);
            if F::HALVES {
                let (d1, m1) = F::scales(w, b, 1);
                for t in 0..R {
                    let i0 = _mm512_cvtepi32_ps(sum(t).read());
                    let i1 = _mm512_cvtepi32_ps(sum(t + 16).read());
                    let both = _mm512_fmadd_ps(i0, d, _mm512_mul_ps(i1, d1));
                    acc[t] = _mm512_fmadd_ps(both, _mm512_set1_ps(*d_x.add(t)), acc[t]);
                    if F::ZERO_LOG2.is_none() {
                        acc[t] = _mm512_fmadd_ps(m, _mm512_set1_ps(*s_x.add(t)), acc[t]);
                        acc[t] = _mm512_fmadd_ps(m1, _mm512_set1_ps(*s_x.add(ROWS + t)), acc[t]);
                    }
                }
            } else {
                for t in 0..R {
                    let scale = _mm512_mul_ps(d, _mm512_set1_ps(*d_x.add(t)));
                    acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum(t).read()), scale, acc[t]);
                    if F::ZERO_LOG2.is_none() {
                        acc[t] = _mm512_fmadd_ps(m, _mm512_set1_ps(*s_x.add(t)), acc[t]);
                    }
                }
            }
        }
    }

    /// Does the overlapping work of `step`. The last step is two after the last product.
    ///
    /// # Safety
    /// As [`BlockProduct::run`]; steps come in order from 0, `I` is `step % 4`.
    #[inline(always)]
    unsafe fn step<F: RecordFormat, const I: usize, const J: usize, const R: usize>(
        &self,
        step: usize,
        slot: &mut usize,
        acc: &mut [__m512; R],
    ) {
        const { assert!(J == (I + 2) % IN_FLIGHT) };
        // SAFETY: steps below `steps` only, each of them made LEAD steps ahead and multiplied two before it is scaled.
        unsafe {
            if step < self.steps {
                self.multiply::<F, I>(step, *slot);
                if let (Some(ahead), true) = (self.make, step + LEAD < self.steps) {
                    let to = *slot + LEAD;
                    let to = if to >= self.scratch.slots { to - self.scratch.slots } else { to };
                    self.make::<F>(step + LEAD, to, ahead);
                }
                *slot = if *slot + 1 == self.scratch.slots { 0 } else { *slot + 1 };
            }
            if step >= 2 && step - 2 < self.steps {
                self.scale::<F, J, R>(step - 2, acc);
            }
        }
    }

    /// All steps of the block.
    ///
    /// # Safety
    /// AVX-512 VNNI; [`Shapes::int8`] of `rows` is loaded; the group has `steps` blocks of 32 and the activations as many,
    /// of 16 rows; the slots are `steps`, or [`RING`] where the tiles are made for this block of rows only; the outputs
    /// exist. `rows <= R`.
    #[inline(always)]
    unsafe fn run<F: RecordFormat, const R: usize>(&self) {
        let mut slot = 0;
        // SAFETY: as promised.
        unsafe {
            let mut acc = [_mm512_setzero_ps(); R];
            if let Some(ahead) = self.make {
                for step in 0..LEAD.min(self.steps) {
                    self.make::<F>(step, step, ahead);
                }
            }
            for step in (0..self.steps + 2).step_by(IN_FLIGHT) {
                self.step::<F, 0, 2, R>(step, &mut slot, &mut acc);
                self.step::<F, 1, 3, R>(step + 1, &mut slot, &mut acc);
                self.step::<F, 2, 0, R>(step + 2, &mut slot, &mut acc);
                self.step::<F, 3, 1, R>(step + 3, &mut slot, &mut acc);
            }
            for t in 0..R {
                if t < self.rows {
                    _mm512_mask_storeu_ps(self.out.add(t * self.ldo), self.lanes, acc[t]);
                }
            }
        }
    }
}

/// Products of a block of 32.
const fn products<F: RecordFormat>() -> usize {
    if F::HALVES { 2 } else { 1 }
}

/// Copies rows `first..first + rows` of the activations to block `block` of the scratch.
///
/// # Safety
/// The rows exist and have `steps` blocks of 32; the scratch has this block. AVX.
#[inline(always)]
unsafe fn pack<F: RecordFormat>(
    x: X,
    first: usize,
    rows: usize,
    steps: usize,
    block: usize,
    scratch: &Scratch,
) {
    // SAFETY: as promised: 512 bytes and 16 scales of each step.
    unsafe {
        let x = x.row(first);
        let (q, at) = (scratch.q.add(block * steps * ROWS * TILE_K), block * steps * ROWS);
        for t in 0..rows {
            for s in 0..steps {
                let from = x.q.add(t * x.stride + s * TILE_K).cast::<__m256i>();
                q.add((s * ROWS + t) * TILE_K).cast::<__m256i>().write_unaligned(from.read_unaligned());
                *scratch.d.add(at + s * ROWS + t) = *x.d.add(t * x.stride / 32 + s);
                let sums = scratch.sums.wrapping_add((at + s * ROWS) * products::<F>() + t);
                if F::ZERO_LOG2.is_some() {
                    continue;
                } else if F::HALVES {
                    let from = x.sum16.add(t * x.stride / 16 + s * 2);
                    (*sums, *sums.add(ROWS)) = (*from, *from.add(1));
                } else {
                    *sums = *x.sum32.add(t * x.stride / 32 + s);
                }
            }
        }
    }
}

/// The arguments of a call.
#[derive(Clone, Copy)]
struct Call<'a> {
    /// How many bytes ahead of their use weights are prefetched.
    ahead: usize,
    w: &'a [u8],
    k: usize,
    x: X,
    m: usize,
    out: *mut f32,
    ldo: usize,
    n: usize,
}

/// [`multiply`] for one format.
///
/// # Safety
/// As there.
unsafe fn run<F: RecordFormat>(call: Call<'_>) {
    let mut session = Session::open().expect("the tier was checked when the weight was made");
    let steps = call.k.div_ceil(F::LAYOUT.record_k) * F::LAYOUT.record_k / 32;
    if call.m == 0 || steps == 0 {
        return;
    }
    let (n_blocks, rows) = blocks(call.m);
    session.renew(&Shapes::int8(rows));
    let pass = n_blocks.min(PASS);
    let slots = if pass == 1 { RING } else { steps.max(LEAD) };
    let (q, d) = (pass * steps * ROWS * TILE_K, pass * steps * ROWS * size_of::<f32>());
    let codes = slots * products::<F>() * B_BYTES;
    let c = IN_FLIGHT * products::<F>() * C_LEN * size_of::<i32>();
    let sums = d * products::<F>();
    scratch::with(q + d + sums + codes + c, |base| {
        let at = |bytes: usize| base.wrapping_add(bytes);
        let scratch = Scratch {
            q: base.cast(),
            d: at(q).cast(),
            sums: at(q + d).cast(),
            codes: at(q + d + sums).cast(),
            slots,
            c: at(q + d + sums + codes).cast(),
        };
        // SAFETY: the scratch is as large as these say. The scales of missing rows and the unused halves of B tiles are
        // zero. The shapes of blocks of `rows` are loaded; the rest is the caller's contract.
        unsafe {
            scratch.d.write_bytes(0, (d + sums) / size_of::<f32>());
            scratch.codes.write_bytes(0, codes);
            groups::<F>(call, steps, &scratch);
        }
    });
}

/// All groups times all rows.
///
/// # Safety
/// As [`multiply`]; the scratch has room for a pass of `steps`, and zeros for scales and codes; shapes of these rows are loaded.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,fma")]
unsafe fn groups<F: RecordFormat>(call: Call<'_>, steps: usize, scratch: &Scratch) {
    let Call { ahead, w, x, m, out, ldo, n, .. } = call;
    let group_bytes = steps * 32 / F::LAYOUT.record_k * F::LAYOUT.record_bytes;
    let (n_blocks, rows) = blocks(m);
    for first in (0..n_blocks).step_by(PASS) {
        let pass = first..n_blocks.min(first + PASS);
        let row = |block: usize| (block * rows).min(m - rows);
        for block in pass.clone() {
            // SAFETY: `rows` rows from there on are among the `m`; `pass` blocks fit the scratch.
            unsafe { pack::<F>(x, row(block), rows, steps, block - first, scratch) };
        }
        for (g, w) in w.chunks_exact(group_bytes).enumerate() {
            let lanes = (n - g * GROUP).min(GROUP);
            for block in pass.clone() {
                let at = (block - first) * steps * ROWS;
                let job = BlockProduct {
                    w: w.as_ptr(),
                    steps,
                    rows,
                    q: scratch.q.wrapping_add(at * TILE_K),
                    d: scratch.d.wrapping_add(at),
                    sums: scratch.sums.wrapping_add(at * products::<F>()),
                    scratch,
                    make: (block == first).then_some(ahead),
                    out: out.wrapping_add(row(block) * ldo + g * GROUP),
                    ldo,
                    lanes: ((1u32 << lanes) - 1) as __mmask16,
                };
                // SAFETY: group, activations and outputs exist; slots are as many as steps unless this is the only block of
                // rows, whose tiles are made as it goes.
                unsafe {
                    match rows {
                        0..=8 => job.run::<F, 8>(),
                        9..=12 => job.run::<F, 12>(),
                        _ => job.run::<F, 16>(),
                    }
                }
            }
        }
    }
}

pub(in super::super) static KERNEL: LinearKernel = LinearKernel {
    name: "amx_int8",
    takes: |a| a.quantised(),
    pays: |a| a.m >= a.tuning.int8_tiles_from,
    any_rows: true,
    reads: ActsForm::Int8,
    chunk: |s| range(s, 1),
    run: multiply,
};

/// Computes `out[t·ldo + row]` for the rows of the groups `w`, with the bits of `vnni`.
///
/// # Safety
/// AVX-512 VNNI and tile instructions execute; the work's weights are whole groups of a quantised dtype, its activations int8.
unsafe fn multiply(work: &Work<'_>) {
    let &Work { w, k, n, out, ldo, .. } = work;
    let call = Call { ahead: work.tuning.ahead_bytes, w, k, x: X::of(work), m: work.x.m(), out, ldo, n };
    // SAFETY: the caller's contract.
    unsafe { with_format!(work.dtype, F => run::<F>(call)) }
}
