//! Packs activations and weights into tiles.
//!
//! ```text
//! A blocks   X[M,K] -> `[ceil(M/16)][ceil(K/32)][16 m][32 k]` bf16: a KiB per A tile, contiguous
//! panel      16 rows of W[N,K] -> `[ceil(K/32)*16][16 n][2 k]` bf16 ("VNNI16"): a KiB per B tile, contiguous
//! padding    zeros, in M, N and K: a padded product adds 0 * 0
//! rounding   to nearest even, like vcvtneps2bf16: denormal inputs become zeros of their sign, NaNs quiet; the portable
//!            path gives the same bits
//! bound      memory: reads 4 (A) or 2 (panel) and writes 2 bytes per element
//! measured   not on an AMX machine (none at hand)
//! ```

use std::arch::x86_64::*;

/// Rows of an A block and of a panel.
pub const BLOCK_ROWS: usize = 16;
/// K elements of a bf16 tile.
pub const TILE_K: usize = 32;
/// Elements of a bf16 tile.
pub const TILE_LEN: usize = BLOCK_ROWS * TILE_K;

/// Elements of the A blocks of an `m` x `k` matrix.
pub const fn a_blocks_len(m: usize, k: usize) -> usize {
    m.div_ceil(BLOCK_ROWS) * panel_len(k)
}

/// Elements of a panel of depth `k`.
pub const fn panel_len(k: usize) -> usize {
    k.div_ceil(TILE_K) * TILE_LEN
}

/// f32 to bf16 with vcvtneps2bf16's rounding.
#[inline(always)]
pub const fn bf16_from_f32(x: f32) -> u16 {
    let bits = x.to_bits();
    let high = (bits >> 16) as u16;
    if bits & 0x7fff_ffff > 0x7f80_0000 {
        high | 0x40
    } else if bits & 0x7f80_0000 == 0 {
        high & 0x8000
    } else {
        ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
    }
}

/// Packs `m` rows of `k` values, `ldx` apart in `x`, as A blocks into `out`.
///
/// Blocks are independent: to share the work, give each worker a multiple of 16 rows and its part of `out`.
///
/// # Panics
/// `x` or `out` is too short for the shape, or rows overlap (`ldx < k`).
pub fn pack_a_bf16(x: &[f32], m: usize, k: usize, ldx: usize, out: &mut [u16]) {
    assert!(ldx >= k, "pack_a_bf16: rows of {k} values overlap at a distance of {ldx}");
    assert!(
        m == 0 || x.len() >= (m - 1) * ldx + k,
        "pack_a_bf16: {} values hold no {m} x {k} (ld {ldx})",
        x.len()
    );
    assert!(
        out.len() >= a_blocks_len(m, k),
        "pack_a_bf16: {} elements hold no A blocks of {m} x {k}",
        out.len()
    );
    let out = &mut out[..a_blocks_len(m, k)];
    for (b, block) in out.chunks_exact_mut(panel_len(k).max(1)).enumerate() {
        let first = b * BLOCK_ROWS;
        pack_a_block(&x[first * ldx..], (m - first).min(BLOCK_ROWS), k, ldx, block);
    }
}

/// Packs `rows` (at most 16) rows of `k` values, `ldx` apart in `x`, as one A block as deep as `block`, which may
/// be deeper than `k`: zeros follow.
///
/// # Panics
/// `block` is not made of whole tiles, or too small; `x` is too short.
pub fn pack_a_block(x: &[f32], rows: usize, k: usize, ldx: usize, block: &mut [u16]) {
    assert!(
        rows <= BLOCK_ROWS && block.len() >= panel_len(k) && block.len().is_multiple_of(TILE_LEN),
        "pack_a_block: {} elements are no A block of {rows} x {k}",
        block.len()
    );
    let fast = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16");
    for r in 0..BLOCK_ROWS {
        let src = if r < rows { &x[r * ldx..r * ldx + k] } else { &[] };
        if fast {
            // SAFETY: detected above; `block` is made of whole tiles, and r < 16.
            unsafe { pack_row_avx512(src, block, r) }
        } else {
            pack_row_portable(src, block, r);
        }
    }
}

/// Writes row `r` of each tile of `block` from `src`; if `src` is shorter than the block is deep, zeros follow.
fn pack_row_portable(src: &[f32], block: &mut [u16], r: usize) {
    for (t, tile) in block.chunks_exact_mut(TILE_LEN).enumerate() {
        for (j, to) in tile[r * TILE_K..(r + 1) * TILE_K].iter_mut().enumerate() {
            *to = src.get(t * TILE_K + j).map_or(0, |&v| bf16_from_f32(v));
        }
    }
}

/// # Safety
/// AVX-512 F and BF16; `block` is made of whole tiles; `r < 16`.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn pack_row_avx512(src: &[f32], block: &mut [u16], r: usize) {
    let (whole, deep) = ((src.len() / TILE_K).min(block.len() / TILE_LEN), block.len() / TILE_LEN);
    let to = block.as_mut_ptr().wrapping_add(r * TILE_K);
    // SAFETY: `whole` times 32 elements are in `src`, the masks of the tile after them admit only existing elements;
    // masked-off elements are not accessed. Each store is row `r` of one of `deep` tiles of 16 rows of 32 elements.
    unsafe {
        for t in 0..whole {
            let p = src.as_ptr().add(t * TILE_K);
            let both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(p.add(16)), _mm512_loadu_ps(p));
            _mm512_storeu_si512(to.add(t * TILE_LEN).cast(), std::mem::transmute::<__m512bh, __m512i>(both));
        }
        for t in whole..deep {
            let rest = src.len().saturating_sub(t * TILE_K);
            let p = src.as_ptr().wrapping_add(t * TILE_K);
            let low = _mm512_maskz_loadu_ps(low_mask(rest), p);
            let high = _mm512_maskz_loadu_ps(low_mask(rest.saturating_sub(16)), p.wrapping_add(16));
            let both = _mm512_cvtne2ps_pbh(high, low);
            _mm512_storeu_si512(to.add(t * TILE_LEN).cast(), std::mem::transmute::<__m512bh, __m512i>(both));
        }
    }
}

/// A mask of the first `n` lanes of 16.
#[inline(always)]
const fn low_mask(n: usize) -> u16 {
    if n >= 16 { 0xffff } else { (1 << n) - 1 }
}

/// Packs `rows` (at most 16) rows of `k` bf16 values, `ldw` apart in `w`, as a panel into `out`.
///
/// # Panics
/// `w` or `out` is too short for the shape, or rows overlap (`ldw < k`).
pub fn pack_panel_bf16(w: &[u16], rows: usize, k: usize, ldw: usize, out: &mut [u16]) {
    assert!(rows <= BLOCK_ROWS, "pack_panel_bf16: a panel has 16 rows, not {rows}");
    assert!(ldw >= k, "pack_panel_bf16: rows of {k} values overlap at a distance of {ldw}");
    assert!(
        rows == 0 || w.len() >= (rows - 1) * ldw + k,
        "pack_panel_bf16: {} values hold no {rows} x {k} (ld {ldw})",
        w.len()
    );
    assert!(out.len() >= panel_len(k), "pack_panel_bf16: {} elements hold no panel of depth {k}", out.len());
    let fast = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw");
    for (t, tile) in out[..panel_len(k)].chunks_exact_mut(TILE_LEN).enumerate() {
        if fast {
            // SAFETY: detected above; the asserts say that `rows` rows of `k` lie in `w`; `tile` is whole.
            unsafe { pack_tile_avx512(w, rows, k, ldw, t * TILE_K, tile) }
        } else {
            pack_tile_portable(w, rows, k, ldw, t * TILE_K, tile);
        }
    }
}

fn pack_tile_portable(w: &[u16], rows: usize, k: usize, ldw: usize, k0: usize, tile: &mut [u16]) {
    for (i, to) in tile.iter_mut().enumerate() {
        let (pair, n, odd) = (i / 32, i / 2 % 16, i % 2);
        let at = k0 + 2 * pair + odd;
        *to = if n < rows && at < k { w[n * ldw + at] } else { 0 };
    }
}

/// Packs a tile: the transpose of 16 x 16 dwords (pairs of k), in 4 stages of 16 shuffles.
///
/// # Safety
/// AVX-512 F and BW; `rows` rows of `k` values lie `ldw` apart in `w`; `tile` has 512 elements.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn pack_tile_avx512(w: &[u16], rows: usize, k: usize, ldw: usize, k0: usize, tile: &mut [u16]) {
    let left = k.saturating_sub(k0).min(TILE_K);
    let mask: u32 = if left == TILE_K { u32::MAX } else { (1 << left) - 1 };
    let mut v = [_mm512_setzero_si512(); 16];
    for (n, row) in v.iter_mut().enumerate().take(rows) {
        // SAFETY: the mask admits only elements k0..k of row n, which `w` has.
        *row = unsafe { _mm512_maskz_loadu_epi16(mask, w.as_ptr().wrapping_add(n * ldw + k0).cast()) };
    }
    transpose_16x16(&mut v);
    for (pair, row) in v.iter().enumerate() {
        // SAFETY: 16 rows of 32 elements are the 512 of the tile.
        unsafe { _mm512_storeu_si512(tile.as_mut_ptr().add(pair * 32).cast(), *row) };
    }
}

/// Transposes 16 x 16 dwords.
#[target_feature(enable = "avx512f")]
fn transpose_16x16(v: &mut [__m512i; 16]) {
    let mut t = *v;
    // Within 128-bit lanes: 4 x 4 dwords of each group of four rows.
    for g in 0..4 {
        let [a, b, c, d] = [v[4 * g], v[4 * g + 1], v[4 * g + 2], v[4 * g + 3]];
        let (ab0, ab1) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let (cd0, cd1) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        t[4 * g] = _mm512_unpacklo_epi64(ab0, cd0);
        t[4 * g + 1] = _mm512_unpackhi_epi64(ab0, cd0);
        t[4 * g + 2] = _mm512_unpacklo_epi64(ab1, cd1);
        t[4 * g + 3] = _mm512_unpackhi_epi64(ab1, cd1);
    }
    // Across lanes: t[4g + j] lane l holds rows 4g.. of column 4l + j, so a 4 x 4 transpose of lanes.
    for j in 0..4 {
        let (r0, r1, r2, r3) = (t[j], t[4 + j], t[8 + j], t[12 + j]);
        let a = _mm512_shuffle_i32x4::<0x44>(r0, r1); // r0.0 r0.1 r1.0 r1.1
        let b = _mm512_shuffle_i32x4::<0xee>(r0, r1); // r0.2 r0.3 r1.2 r1.3
        let c = _mm512_shuffle_i32x4::<0x44>(r2, r3);
        let d = _mm512_shuffle_i32x4::<0xee>(r2, r3);
        v[j] = _mm512_shuffle_i32x4::<0x88>(a, c); // r0.0 r1.0 r2.0 r3.0
        v[4 + j] = _mm512_shuffle_i32x4::<0xdd>(a, c); // r0.1 r1.1 r2.1 r3.1
        v[8 + j] = _mm512_shuffle_i32x4::<0x88>(b, d);
        v[12 + j] = _mm512_shuffle_i32x4::<0xdd>(b, d);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_the_hardwares() {
        let cases: [(u32, u16); 12] = [
            (0x3f80_0000, 0x3f80),
            (0x3f80_7fff, 0x3f80),
            (0x3f80_8000, 0x3f80), // tie to even
            (0x3f81_8000, 0x3f82), // tie to even
            (0x3f80_8001, 0x3f81),
            (0x7f7f_ffff, 0x7f80), // overflows to infinity
            (0xff80_0000, 0xff80),
            (0x7f80_0001, 0x7fc0), // signalling NaN becomes quiet
            (0xffff_ffff, 0xffff),
            (0x007f_ffff, 0x0000), // denormals are zeros
            (0x8000_0001, 0x8000),
            (0x0080_0000, 0x0080),
        ];
        for (from, to) in cases {
            assert_eq!(bf16_from_f32(f32::from_bits(from)), to, "{from:#x}");
        }
        // Runs the vector path, if there is one, on the same bits and a sweep of all exponents.
        let sweep: Vec<f32> = cases
            .iter()
            .map(|c| c.0)
            .chain((0..4096u32).map(|i| i.wrapping_mul(0x9e37_79b9)))
            .map(f32::from_bits)
            .collect();
        let mut out = vec![0xaaaau16; a_blocks_len(1, sweep.len())];
        pack_a_bf16(&sweep, 1, sweep.len(), sweep.len(), &mut out);
        for (i, &x) in sweep.iter().enumerate() {
            assert_eq!(out[i / 32 * TILE_LEN + i % 32], bf16_from_f32(x), "{:#x}", x.to_bits());
        }
    }

    #[test]
    fn a_blocks_hold_each_value_where_the_layout_says() {
        for (m, k, pad) in
            [(1, 1, 0), (16, 32, 0), (17, 33, 3), (5, 95, 1), (33, 16, 0), (0, 7, 0), (3, 0, 0)]
        {
            let ldx = k + pad;
            let x: Vec<f32> = (0..m * ldx).map(|i| i as f32 + 1.0).collect();
            let mut out = vec![0xaaaau16; a_blocks_len(m, k) + 4];
            pack_a_bf16(&x, m, k, ldx, &mut out);
            assert_eq!(out.split_off(a_blocks_len(m, k)), [0xaaaa; 4], "wrote past the end");
            let k32 = k.div_ceil(32);
            for (i, &got) in out.iter().enumerate() {
                let (tile, r, j) = (i / TILE_LEN, i / 32 % 16, i % 32);
                let (row, col) = (tile / k32 * 16 + r, tile % k32 * 32 + j);
                let want = if row < m && col < k { bf16_from_f32(x[row * ldx + col]) } else { 0 };
                assert_eq!(got, want, "{m}x{k}: row {row}, column {col}");
            }
        }
    }

    #[test]
    fn panels_hold_each_value_where_the_layout_says() {
        for (rows, k, pad) in
            [(16, 32, 0), (16, 64, 5), (1, 1, 0), (7, 33, 2), (16, 80, 0), (15, 31, 1), (0, 40, 0)]
        {
            let ldw = k + pad;
            let w: Vec<u16> = (0..rows * ldw).map(|i| i as u16 + 1).collect();
            let mut out = vec![0xaaaau16; panel_len(k) + 4];
            pack_panel_bf16(&w, rows, k, ldw, &mut out);
            assert_eq!(out.split_off(panel_len(k)), [0xaaaa; 4], "wrote past the end");
            for (i, &got) in out.iter().enumerate() {
                let (pair, n, odd) = (i / 32, i / 2 % 16, i % 2);
                let col = 2 * pair + odd;
                let want = if n < rows && col < k { w[n * ldw + col] } else { 0 };
                assert_eq!(got, want, "{rows}x{k}: row {n}, column {col}");
            }
        }
    }
}
