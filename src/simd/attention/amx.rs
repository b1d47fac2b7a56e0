//! Block kernels on AMX tiles: the products of [`crate::amx::attention`], the softmax of AVX-512 BF16.
//!
//! Blocks of 17 rows and more, of heads of whole steps, run several at a time ([`super::amx_run`]).
//!
//! bound      memory in decode: a tile product takes about as many cycles as it has rows; in prefill the softmax (7
//!            cycles per 16 scores) and the products (16 cycles per 16 x 16 x 32), which overlap
//! codes      of 8 bits are widened to pages of bf16 first, a block's K, then its V (16 KiB each at head_dim 128), in cache: tiles
//!            load from memory only. No runs of several blocks
//! error      as avx512_bf16.rs

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::avx512_bf16::{Bf16, Kv, Q8, merge, pack_q, softmax};
use super::kernels::{BlockKernels, GROUPS, PAGES, Pv, Qk, RUN_BLOCKS, Run, S_STRIDE};
use crate::amx::Session;
use crate::amx::attention::{pv_bf16, qk_bf16_pages};
use crate::amx::attention_steps::{COLUMNS, LEAST_ROWS, configure};
use crate::cache::PAGE_TOKENS;

/// The head sizes that tiles (at least 32) and the copy of a page's end (at most 256) cover.
pub(super) const HEAD_DIMS: std::ops::RangeInclusive<usize> = 32..=256;

pub(super) static KERNELS: BlockKernels = BlockKernels {
    name: "amx bf16",
    bf16: true,
    unit: std::f32::consts::LN_2,
    pack_q,
    qk,
    softcap: super::avx512_bf16::KERNELS.softcap,
    softmax: softmax::<Bf16>,
    pv,
    run: Some((run, LEAST_ROWS, COLUMNS)),
    merge,
};

/// The same for codes of 8 bits.
pub(super) static KERNELS_Q8: BlockKernels = BlockKernels {
    name: "amx bf16 x q8",
    qk: qk_q8,
    softmax: softmax::<Q8>,
    pv: pv_q8,
    run: None,
    ..KERNELS
};

/// With at most this many rows (decode) we are memory-bound, and tile loads prefetch what is read next: V beside K, and the next
/// K beside V. A few lines beside each load, since a burst of a whole block would wait for the core's line fill buffers, and the
/// products behind it with it.
const MEMORY_BOUND_ROWS: usize = 8;

/// Whether kernels are of this file.
pub(super) fn uses_tiles(kernels: &BlockKernels) -> bool {
    [&KERNELS, &KERNELS_Q8].iter().any(|own| std::ptr::eq(kernels, *own))
}

/// Tiles for this thread. An item of attention holds one throughout: loading a configuration takes some 200 cycles
/// and releasing it clears it, so a session per block would cost as much as the block's products.
pub(super) fn session() -> Session {
    Session::open().expect("the amx tier is selected only where tiles are available")
}

/// # Safety
/// As [`Qk`] says; tiles are available.
unsafe fn qk(a: &Qk) {
    let len = PAGE_TOKENS * a.head_dim;
    let n = a.groups.div_ceil(2);
    // SAFETY: a page's K is contiguous and its first group comes first, so a stored group of even index
    // starts a page of 32·head_dim elements; nothing writes these pages during attention. Groups past n pages are not
    // accessed (their pointers are valid but unused).
    let pages: [&[u16]; PAGES] =
        std::array::from_fn(|i| unsafe { std::slice::from_raw_parts(a.k[2 * i.min(n - 1)].cast(), len) });
    let next: [*const u16; PAGES] = std::array::from_fn(|i| a.ahead[0][2 * i].cast());
    let next = if a.rows <= MEMORY_BOUND_ROWS { &next[..n] } else { &[] };
    // SAFETY: the caller's promise.
    unsafe { scores(a, &pages[..n], next) }
}

/// The scores of a block whose keys are `pages`, without scales.
///
/// # Safety
/// As [`qk`]; pages are 32·head_dim elements.
unsafe fn scores(a: &Qk, pages: &[&[u16]], next: &[*const u16]) {
    // SAFETY: q has rows x head_dim bf16, s rows x S_STRIDE f32 (see `Qk`), and they do not overlap.
    let (q, s) = unsafe {
        (
            std::slice::from_raw_parts(a.q.cast::<u16>(), a.rows * a.head_dim),
            std::slice::from_raw_parts_mut(a.s, a.rows * S_STRIDE),
        )
    };
    qk_bf16_pages(&mut session(), q, a.head_dim, a.rows, a.head_dim, pages, next, s, S_STRIDE);
}

/// # Safety
/// As [`Qk`] says; tiles and AVX-512 BF16 are available.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn qk_q8(a: &Qk) {
    let n = a.groups.div_ceil(2);
    let mut wide = WidePages::uninit();
    // SAFETY: as in `qk`; each of the n pages has two groups of scales, and S a row of each.
    unsafe {
        let codes = std::array::from_fn(|i| a.k[2 * i.min(n - 1)]);
        let ahead = (a.rows <= MEMORY_BOUND_ROWS).then(|| std::array::from_fn(|i| a.ahead[0][2 * i]));
        let pages = widen(codes, n, a.head_dim, ahead, &mut wide);
        scores(a, &pages[..n], &[]);
        let scales: [__m512; GROUPS] = std::array::from_fn(|g| _mm512_loadu_ps(a.k_scales[g.min(2 * n - 1)]));
        for r in 0..a.rows {
            for (g, &scale) in scales[..2 * n].iter().enumerate() {
                let s = a.s.add(r * S_STRIDE + g * 16);
                _mm512_storeu_ps(s, _mm512_mul_ps(_mm512_loadu_ps(s), scale));
            }
        }
    }
}

/// # Safety
/// As [`Pv`] says, P in bf16; tiles and AVX-512 are available.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn pv(a: &Pv) {
    let hd = a.head_dim;
    let n = a.tokens.div_ceil(PAGE_TOKENS);
    let mut copy = PageCopy::uninit();
    let mut v = a.v.map(<*const u8>::cast::<u16>);
    // SAFETY: head_dim is in HEAD_DIMS; the page has the stored tokens.
    unsafe { without_the_rest(&mut v[n - 1], a.tokens, hd, &mut copy) };
    // SAFETY: each is a page of V, or the copy initialised just above; nothing writes them meanwhile.
    let pages: [&[u16]; PAGES] =
        std::array::from_fn(|i| unsafe { std::slice::from_raw_parts(v[i.min(n - 1)], PAGE_TOKENS * hd) });
    let next = a.ahead[0].map(<*const u8>::cast::<u16>);
    let next = if a.rows <= MEMORY_BOUND_ROWS { &next[..n] } else { &[] };
    // SAFETY: the caller's promise.
    unsafe { add_values(a, &pages[..n], next) }
}

/// # Safety
/// As [`Pv`] says, P in bf16 and 0 in slots without a token; tiles and AVX-512 BF16 are available.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn pv_q8(a: &Pv) {
    let n = a.tokens.div_ceil(PAGE_TOKENS);
    let mut wide = WidePages::uninit();
    // SAFETY: as in `pv`. Codes are finite whatever a slot holds, so a weight of 0 leaves nothing of them.
    unsafe {
        let codes = std::array::from_fn(|i| a.v[i.min(n - 1)]);
        let ahead = (a.rows <= MEMORY_BOUND_ROWS).then_some(a.ahead[0]);
        let pages = widen(codes, n, a.head_dim, ahead, &mut wide);
        add_values(a, &pages[..n], &[]);
    }
}

/// `O = O·alpha + P V` of a block whose values are `pages`.
///
/// # Safety
/// As [`pv`]; pages are 32·head_dim elements, all of them finite where P is 0.
#[inline(always)]
unsafe fn add_values(a: &Pv, pages: &[&[u16]], next: &[*const u16]) {
    let (hd, n) = (a.head_dim, pages.len());
    // SAFETY: o has rows x head_dim f32, alpha and p one row each per row (see `Pv`).
    let (o, alpha, p) = unsafe {
        (
            std::slice::from_raw_parts_mut(a.o, a.rows * hd),
            std::slice::from_raw_parts(a.alpha, a.rows),
            std::slice::from_raw_parts(a.p.cast::<u16>(), (a.rows - 1) * S_STRIDE + n * PAGE_TOKENS),
        )
    };
    for (o, &alpha) in o.chunks_exact_mut(hd).zip(alpha) {
        if alpha != 1.0 {
            o.iter_mut().for_each(|x| *x *= alpha);
        }
    }
    pv_bf16(&mut session(), p, S_STRIDE, a.rows, pages, next, hd, o, hd);
}

/// Room for a block's keys, or values, in bf16.
#[repr(align(64))]
struct WidePages([MaybeUninit<u16>; PAGES * PAGE_TOKENS * *HEAD_DIMS.end()]);

impl WidePages {
    fn uninit() -> WidePages {
        WidePages([MaybeUninit::uninit(); PAGES * PAGE_TOKENS * *HEAD_DIMS.end()])
    }
}

/// Widens the codes of the first `n` pages, and prefetches as much of `ahead` meanwhile. Of the pages returned, others than these
/// are the last of them.
///
/// # Safety
/// `head_dim` is in [`HEAD_DIMS`]; each page has 32·head_dim codes; 1 <= n <= PAGES. The CPU has AVX-512 BF16.
#[inline(always)]
unsafe fn widen(
    codes: [*const u8; PAGES],
    n: usize,
    head_dim: usize,
    ahead: Option<[*const u8; PAGES]>,
    to: &mut WidePages,
) -> [&[u16]; PAGES] {
    let len = PAGE_TOKENS * head_dim;
    let to = to.0.as_mut_ptr().cast::<u16>();
    // SAFETY: `to` holds n pages of that head_dim; all of them are written before they are read.
    unsafe {
        for page in 0..n {
            for i in (0..len).step_by(32) {
                if let Some(ahead) = ahead.filter(|_| i % 64 == 0) {
                    _mm_prefetch::<_MM_HINT_T1>(ahead[page].wrapping_add(i).cast());
                }
                let line = <Q8 as Kv>::line(codes[page].cast::<i8>().add(i));
                _mm512_store_si512(to.add(page * len + i).cast(), line);
            }
        }
        std::array::from_fn(|i| std::slice::from_raw_parts(to.add(i.min(n - 1) * len), len))
    }
}

type PageCopy = MaybeUninit<[u16; PAGE_TOKENS * *HEAD_DIMS.end()]>;

/// Replaces a block's last page by a copy with zeros after the last stored token. A tile takes whole pages, and later
/// slots may hold anything, including NaN, which even a weight of 0 would propagate.
///
/// # Safety
/// `head_dim` is in [`HEAD_DIMS`]; `page` is the page of V with the last of a block's `tokens`.
unsafe fn without_the_rest(page: &mut *const u16, tokens: usize, head_dim: usize, copy: &mut PageCopy) {
    let stored = tokens % PAGE_TOKENS;
    if stored == 0 {
        return;
    }
    let to = copy.as_mut_ptr().cast::<u16>();
    // SAFETY: `copy` holds a page of V; stored < PAGE_TOKENS, so the pairs of tokens up to it, of 2·head_dim elements
    // each, lie inside the page.
    unsafe {
        let pairs = stored.div_ceil(2);
        to.copy_from_nonoverlapping(*page, pairs * 2 * head_dim);
        to.add(pairs * 2 * head_dim).write_bytes(0, (PAGE_TOKENS - 2 * pairs) * head_dim);
        if stored % 2 == 1 {
            let last = to.add((pairs - 1) * 2 * head_dim);
            (0..head_dim).for_each(|d| last.add(2 * d + 1).write(0));
        }
    }
    *page = to;
}

/// # Safety
/// As [`Run`] says, with rows and dims as [`KERNELS`] says; tiles and AVX-512 BF16 are available.
unsafe fn run(a: &Run<'_>) {
    configure(&mut session());
    let last = a.blocks.len() - 1;
    let tokens = a.blocks[last].tokens;
    // SAFETY: the caller's promise; only the last block of a sequence, and so of a run, ends within a page.
    unsafe {
        if tokens.is_multiple_of(PAGE_TOKENS) {
            return super::amx_run::run(a);
        }
        let mut blocks = [a.blocks[last]; RUN_BLOCKS];
        blocks[..last].copy_from_slice(&a.blocks[..last]);
        let mut copy = PageCopy::uninit();
        let pages = blocks[last].pages();
        let mut end = blocks[last].v[pages - 1].cast();
        without_the_rest(&mut end, tokens, a.head_dim, &mut copy);
        blocks[last].v[pages - 1] = end.cast();
        super::amx_run::run(&Run { blocks: &blocks[..=last], ..*a });
    }
}
