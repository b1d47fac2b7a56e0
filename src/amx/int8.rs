//! int8 products on tiles, 32 elements of K at a time, for formats with a scale per 32 elements (AMX-INT8).
//!
//! ```text
//! layout     A: up to 16 rows of 32 signed bytes, dense. B: 32 x 16 signed bytes as `[8 quads of K][16 columns][4]`.
//!            C: `[rows][16]` i32, dense
//! registers  tmm0-3 C of four products in flight, tmm4 A, tmm5 B; shapes [`Shapes::int8`](super::session::Shapes::int8)
//! bound      the tile unit: a cycle per row of A, at most 16; loads (a line per row of A, 8 of B) 12 cycles, the store
//!            16
//! error      none: integers
//! ```
//!
//! `simd::linear::amx::int8_tiles` scales the sums.

use std::arch::asm;

/// Columns of K of a product.
pub const TILE_K: usize = 32;
/// Bytes of a B tile.
pub const B_BYTES: usize = 512;
/// Sums of a product.
pub const C_LEN: usize = 256;

macro_rules! product {
    ($tile:tt, $a:ident, $b:ident, $c:ident) => {
        asm!(
            concat!("tilezero ", $tile),
            "tileloadd tmm4, [{a} + {sa}*1]",
            "tileloadd tmm5, [{b} + {sb}*1]",
            concat!("tdpbssd ", $tile, ", tmm4, tmm5"),
            concat!("tilestored [{c} + {sb}*1], ", $tile),
            a = in(reg) $a, b = in(reg) $b, c = in(reg) $c, sa = in(reg) TILE_K, sb = in(reg) 64usize,
            out($tile) _, out("tmm4") _, out("tmm5") _,
            options(nostack, preserves_flags)
        )
    };
}

/// `c = a * b`. Consecutive products use different `I` of 0 to 3, so that none waits for another's tile.
///
/// # Safety
/// Tile instructions execute in this thread and [`Shapes::int8`](super::session::Shapes::int8) of `rows` is loaded;
/// `a` has `rows` rows of 32 bytes, `b` a tile, `c` room for `rows` rows of 16 sums.
#[inline(always)]
pub unsafe fn product<const I: usize>(a: *const i8, b: *const i8, c: *mut i32) {
    const { assert!(I < 4) };
    // SAFETY: the caller's promises; no tile outlives the block.
    unsafe {
        match I {
            0 => product!("tmm0", a, b, c),
            1 => product!("tmm1", a, b, c),
            2 => product!("tmm2", a, b, c),
            _ => product!("tmm3", a, b, c),
        }
    }
}
