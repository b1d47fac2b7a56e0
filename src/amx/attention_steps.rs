//! The products of attention one step at a time, so that the caller can interleave vector work.
//!
//! A whole call of [`super::attention`] is one chain of loads, products and stores, during which ports 0 and 5 are
//! idle; during the softmax that follows, the tile unit is idle. Here the caller runs the loops: [`Qk::begin`], then
//! [`Qk::step`]s with other work after each, then [`Qk::store`]; the same for [`Pv`]. They take 17 to 32 rows. Steps
//! add in the same order as the whole calls, so the bits are the same.
//!
//! ```text
//! registers  seven, shapes SEVEN: tmm0-3 S or O, tmm4 A, tmm5-6 B
//! rows       two A tiles of 16 rows: the first 16 and the *last* 16. With fewer than 32 rows some are in both,
//!            computed and stored twice with equal results: one configuration serves all, and no row beyond the last is
//!            touched
//! tiles      live across `asm!` blocks, sound as in `block.rs`: the compiler has no tile instructions here, blocks keep
//!            their order, and callers run vector instructions only between `begin` and `store`
//! bound      4 products of 16 cycles a step against 4 tile loads
//! ```

use std::arch::asm;

use super::session::{Session, Shapes};

/// Columns of S or O that go through the registers together.
pub(crate) const COLUMNS: usize = 32;
/// Fewest rows.
pub(crate) const LEAST_ROWS: usize = 17;

/// Configures this thread's tiles for [`Qk`] and [`Pv`].
pub(crate) fn configure(session: &mut Session) {
    session.load(&Shapes::SEVEN);
}

/// Loads tmm0-3: rows of C from `c` and `c2`, `ld` bytes apart, two tiles side by side.
///
/// # Safety
/// Shapes SEVEN are loaded; 16 rows of 128 bytes are readable at both.
#[inline(always)]
unsafe fn load_c(c: *const f32, c2: *const f32, ld: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "tileloadd tmm0, [{c} + {ld}*1]",
            "tileloadd tmm1, [{c} + {ld}*1 + 64]",
            "tileloadd tmm2, [{c2} + {ld}*1]",
            "tileloadd tmm3, [{c2} + {ld}*1 + 64]",
            c = in(reg) c, c2 = in(reg) c2, ld = in(reg) ld,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            options(nostack, preserves_flags)
        );
    }
}

/// # Safety
/// As [`load_c`], and writable.
#[inline(always)]
unsafe fn store_c(c: *mut f32, c2: *mut f32, ld: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "tilestored [{c} + {ld}*1], tmm0",
            "tilestored [{c} + {ld}*1 + 64], tmm1",
            "tilestored [{c2} + {ld}*1], tmm2",
            "tilestored [{c2} + {ld}*1 + 64], tmm3",
            c = in(reg) c, c2 = in(reg) c2, ld = in(reg) ld,
            options(nostack, preserves_flags)
        );
    }
}

/// One step: A tiles at `a` and `a2`, rows `a_ld` bytes apart, times B tiles at `b` and `b2`, rows `b_ld` apart.
///
/// # Safety
/// Shapes SEVEN are loaded; 16 rows of 64 bytes are readable at all four.
#[inline(always)]
unsafe fn step(a: *const u16, a2: *const u16, a_ld: usize, b: *const u16, b2: *const u16, b_ld: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "tileloadd tmm5, [{b} + {bs}*1]",
            "tileloadd tmm4, [{a} + {s}*1]",
            "tdpbf16ps tmm0, tmm4, tmm5",
            "tileloadd tmm6, [{b2} + {bs}*1]",
            "tdpbf16ps tmm1, tmm4, tmm6",
            "tileloadd tmm4, [{a2} + {s}*1]",
            "tdpbf16ps tmm2, tmm4, tmm5",
            "tdpbf16ps tmm3, tmm4, tmm6",
            a = in(reg) a, a2 = in(reg) a2, s = in(reg) a_ld,
            b = in(reg) b, b2 = in(reg) b2, bs = in(reg) b_ld,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _,
            options(nostack, preserves_flags)
        );
    }
}

/// `S = Q K^T` for one page of 32 tokens: two groups of 16, `[head_dim/2][16][2]` each.
pub(crate) struct Qk {
    /// Rows of `head_dim` bf16, contiguous.
    pub q: *const u16,
    /// 17 to 32.
    pub rows: usize,
    /// A multiple of 32.
    pub head_dim: usize,
    /// The page's keys.
    pub k: *const u16,
    /// Out: 32 columns of rows `s_stride` values apart.
    pub s: *mut f32,
    pub s_stride: usize,
}

impl Qk {
    /// Steps of 32 dims.
    #[inline(always)]
    pub(crate) fn steps(head_dim: usize) -> usize {
        head_dim / 32
    }

    /// # Safety
    /// Tiles are [configured](configure) in this thread.
    #[inline(always)]
    pub(crate) unsafe fn begin(&self) {
        // SAFETY: the caller's promise.
        unsafe {
            asm!(
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                options(nostack, preserves_flags)
            );
        }
    }

    /// Dims `32·i ..`.
    ///
    /// # Safety
    /// Between `begin` and `store`; `i < steps`; Q and the page are as large as the fields say.
    #[inline(always)]
    pub(crate) unsafe fn step(&self, i: usize) {
        let q = self.q.wrapping_add(i * 32);
        let q2 = q.wrapping_add((self.rows - 16) * self.head_dim);
        let k = self.k.wrapping_add(i * 512);
        // SAFETY: the caller's promise: 32 dims of the first and the last 16 rows, and of both groups.
        unsafe { step(q, q2, self.head_dim * 2, k, k.wrapping_add(16 * self.head_dim), 64) }
    }

    /// # Safety
    /// After all steps; S is as large as the fields say.
    #[inline(always)]
    pub(crate) unsafe fn store(&self) {
        // SAFETY: the caller's promise.
        unsafe { store_c(self.s, self.s.wrapping_add((self.rows - 16) * self.s_stride), self.s_stride * 4) }
    }
}

/// 32 columns of `O += P V`, over pages of 32 tokens, `[16][head_dim][2]` each.
pub(crate) struct Pv {
    /// Rows of 32 bf16 per page, `p_stride` apart.
    pub p: *const u16,
    pub p_stride: usize,
    /// 17 to 32.
    pub rows: usize,
    /// A multiple of 32.
    pub head_dim: usize,
    /// The first column, a multiple of 32.
    pub column: usize,
    /// Rows of `head_dim` values, contiguous.
    pub o: *mut f32,
}

impl Pv {
    #[inline(always)]
    fn ends(&self) -> (*mut f32, *mut f32, usize) {
        let o = self.o.wrapping_add(self.column);
        (o, o.wrapping_add((self.rows - 16) * self.head_dim), self.head_dim * 4)
    }

    /// # Safety
    /// Tiles are [configured](configure) in this thread; O is as large as the fields say.
    #[inline(always)]
    pub(crate) unsafe fn begin(&self) {
        let (o, o2, ld) = self.ends();
        // SAFETY: the caller's promise.
        unsafe { load_c(o, o2, ld) }
    }

    /// Page `i` of P, whose values are at `v`.
    ///
    /// # Safety
    /// Between `begin` and `store`; P has that page; `v` is a page of V, all of it finite where P is zero.
    #[inline(always)]
    pub(crate) unsafe fn step(&self, i: usize, v: *const u16) {
        let p = self.p.wrapping_add(i * 32);
        let p2 = p.wrapping_add((self.rows - 16) * self.p_stride);
        let v = v.wrapping_add(self.column * 2);
        // SAFETY: the caller's promise: a page of the first and the last 16 rows, 32 columns of 16 pairs of tokens.
        unsafe { step(p, p2, self.p_stride * 2, v, v.wrapping_add(32), self.head_dim * 4) }
    }

    /// # Safety
    /// After all steps; O is as large as the fields say.
    #[inline(always)]
    pub(crate) unsafe fn store(&self) {
        let (o, o2, ld) = self.ends();
        // SAFETY: the caller's promise.
        unsafe { store_c(o, o2, ld) }
    }
}
