//! int8 matrix product on tiles: `C[M,N] = X[M,K] * W[N,K]^T` in i32, X signed, W unsigned codes (AMX-INT8).
//!
//! ```text
//! layout     X `[M/16][K/64][16 m][64 k]` i8, W `[N/16][K/4][16 n][4 k]` u8: tiles are contiguous KiB; M and N
//!            padded with zeros to multiples of 32, K to 64
//! tile       32x32; K steps of 64, or one block of 32 for formats with a scale per 32 elements
//! registers  tmm0-3 C, tmm4-5 A, tmm6-7 B; shapes FULL, or INT8_K32
//! bound      the tile unit: 4 products of 16 cycles per step of 64 (twice the bf16 rate)
//! use        the engine multiplies quantised weights as bf16 tiles after dequantising a panel: with a scale per
//!            32 elements an int8 product is 32 deep, takes the same 16 cycles as a bf16 product over 32, and
//!            its i32 tile must leave through memory to be scaled (16 KiB of C traffic per 32 x 32 x 128).
//!            This file keeps the int8 rate of a machine measurable, and serves formats with long scales
//! measured   not measured: no AMX machine at hand. Predicted 5.6 TOP/s a thread at 2.8 GHz, from the 5.8 that
//!            were seen without loads on Sapphire Rapids
//! error      none: integers; sums wrap beyond i32
//! ```

use super::TILE_BYTES;
use super::microkernel::microkernel;
use super::session::{Session, Shapes};

/// K elements of an int8 tile.
pub const TILE_K: usize = 64;

microkernel! {
    /// 32 rows x 32 columns in steps of 64 (shapes FULL).
    gemm_int8_32x32(a0 a1; b0 b1; "1024") -> i32,
    rows 0 from0 to0, 16 from1 to1;
    c "0" in from0 to0 + "0", c "1" in from0 to0 + "64", c "2" in from1 to1 + "0", c "3" in from1 to1 + "64";
    step
        "tileloadd tmm6, [{b0} + {s}*1]",
        "tileloadd tmm4, [{a0} + {s}*1]",
        "tdpbsud tmm0, tmm4, tmm6",
        "tileloadd tmm7, [{b1} + {s}*1]",
        "tdpbsud tmm1, tmm4, tmm7",
        "tileloadd tmm5, [{a1} + {s}*1]",
        "tdpbsud tmm2, tmm5, tmm6",
        "tdpbsud tmm3, tmm5, tmm7",
}

microkernel! {
    /// 32 rows x 32 columns over one block of 32 (shapes INT8_K32): the left or right halves of A tiles, the
    /// upper or lower halves of B tiles, in place. `k_steps` must be 1.
    gemm_int8_32x32_k32(a0 a1; b0 b1; "0") -> i32,
    rows 0 from0 to0, 16 from1 to1;
    c "0" in from0 to0 + "0", c "1" in from0 to0 + "64", c "2" in from1 to1 + "0", c "3" in from1 to1 + "64";
    step
        "tileloadd tmm6, [{b0} + {s}*1]",
        "tileloadd tmm4, [{a0} + {s}*1]",
        "tdpbsud tmm0, tmm4, tmm6",
        "tileloadd tmm7, [{b1} + {s}*1]",
        "tdpbsud tmm1, tmm4, tmm7",
        "tileloadd tmm5, [{a1} + {s}*1]",
        "tdpbsud tmm2, tmm5, tmm6",
        "tdpbsud tmm3, tmm5, tmm7",
}

/// Bytes of `rows` x `k` packed, as X or as W: whole tiles, an even number of blocks of 16 rows.
pub const fn packed_len(rows: usize, k: usize) -> usize {
    rows.div_ceil(32) * 2 * k.div_ceil(TILE_K) * TILE_BYTES
}

/// Packs `m` rows of `k` signed activations.
///
/// # Panics
/// `x` is shorter than `m * k`.
pub fn pack_a_int8(x: &[i8], m: usize, k: usize) -> Vec<i8> {
    assert!(x.len() >= m * k, "pack_a_int8: {} values are no {m} x {k}", x.len());
    let mut out = vec![0; packed_len(m, k)];
    for (row, values) in x.chunks_exact(k.max(1)).enumerate().take(m) {
        for (i, &v) in values.iter().enumerate() {
            let tile = row / 16 * k.div_ceil(TILE_K) + i / TILE_K;
            out[tile * TILE_BYTES + row % 16 * 64 + i % TILE_K] = v;
        }
    }
    out
}

/// Packs `n` rows of `k` unsigned weight codes.
///
/// # Panics
/// `w` is shorter than `n * k`.
pub fn pack_w_int8(w: &[u8], n: usize, k: usize) -> Vec<u8> {
    assert!(w.len() >= n * k, "pack_w_int8: {} values are no {n} x {k}", w.len());
    let mut out = vec![0; packed_len(n, k)];
    for (row, values) in w.chunks_exact(k.max(1)).enumerate().take(n) {
        for (i, &v) in values.iter().enumerate() {
            let tile = row / 16 * k.div_ceil(TILE_K) + i / TILE_K;
            out[tile * TILE_BYTES + i % TILE_K / 4 * 64 + row % 16 * 4 + i % 4] = v;
        }
    }
    out
}

/// A 32 x 32 block of sums, row-major.
pub type Block = [i32; 1024];

/// The sums of every 32 x 32 block of `X W^T` over all of K: `sink(row, column, sums)` gets the block whose
/// upper left corner is (row, column); sums beyond `m` and `n` are zero.
///
/// # Panics
/// `a` or `w` is not as long as [`packed_len`] says.
pub fn gemm_int8(
    session: &mut Session,
    m: usize,
    n: usize,
    k: usize,
    a: &[i8],
    w: &[u8],
    mut sink: impl FnMut(usize, usize, &Block),
) {
    let steps = k.div_ceil(TILE_K);
    each_block(m, n, k, a, w, |row, col, tiles| {
        let mut sums = [0; 1024];
        if steps > 0 {
            session.load(&Shapes::FULL);
            let [a0, a1, b0, b1] = tiles;
            // SAFETY: FULL is loaded; each source has `steps` tiles (checked by each_block); C is the array.
            unsafe { gemm_int8_32x32(steps, a0, a1, b0, b1, std::ptr::null(), 0, sums.as_mut_ptr(), 32) };
        }
        sink(row, col, &sums);
    });
}

/// As [`gemm_int8`], but apart for each block of 32 elements of K, as formats with a scale per 32 need:
/// `sink(row, column, k / 32, sums)`.
///
/// # Panics
/// `a` or `w` is not as long as [`packed_len`] says.
pub fn gemm_int8_k32(
    session: &mut Session,
    m: usize,
    n: usize,
    k: usize,
    a: &[i8],
    w: &[u8],
    mut sink: impl FnMut(usize, usize, usize, &Block),
) {
    each_block(m, n, k, a, w, |row, col, tiles| {
        for block in 0..k.div_ceil(32) {
            let (tile, half) = (block / 2 * TILE_BYTES, block % 2);
            let [a0, a1] = [tiles[0], tiles[1]].map(|p| p.wrapping_add(tile + half * 32));
            let [b0, b1] = [tiles[2], tiles[3]].map(|p| p.wrapping_add(tile + half * 512));
            let mut sums = [0; 1024];
            session.load(&Shapes::INT8_K32);
            // SAFETY: INT8_K32 is loaded; `block` lies within the tiles that each_block checked.
            unsafe { gemm_int8_32x32_k32(1, a0, a1, b0, b1, std::ptr::null(), 0, sums.as_mut_ptr(), 32) };
            sink(row, col, block, &sums);
        }
    });
}

/// Calls `f(row, column, [a0, a1, b0, b1])` for each 32 x 32 block, with its four rows of tiles.
fn each_block(
    m: usize,
    n: usize,
    k: usize,
    a: &[i8],
    w: &[u8],
    mut f: impl FnMut(usize, usize, [*const u8; 4]),
) {
    assert!(a.len() >= packed_len(m, k), "gemm_int8: {} bytes are no packed {m} x {k} X", a.len());
    assert!(w.len() >= packed_len(n, k), "gemm_int8: {} bytes are no packed {n} x {k} W", w.len());
    let deep = k.div_ceil(TILE_K) * TILE_BYTES;
    for col in (0..n).step_by(32) {
        for row in (0..m).step_by(32) {
            let a0 = a.as_ptr().cast::<u8>().wrapping_add(row / 16 * deep);
            let b0 = w.as_ptr().wrapping_add(col / 16 * deep);
            f(row, col, [a0, a0.wrapping_add(deep), b0, b0.wrapping_add(deep)]);
        }
    }
}
