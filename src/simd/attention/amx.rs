//! Block kernels on AMX tiles: the products of [`crate::amx::attention`], the softmax of AVX-512 BF16.
//!
//! Blocks of 17 rows and more, of heads of whole steps, run several at a time ([`super::amx_run`]).
//!
//! bound      memory in decode: a tile product takes about as many cycles as it has rows; in prefill the softmax (7
//!            cycles per 16 scores) and the products (16 cycles per 16 x 16 x 32), which overlap
//! error      as avx512_bf16.rs

use std::mem::MaybeUninit;

use super::avx512_bf16::{merge, pack_q, softmax};
use super::kernels::{BlockKernels, PAGES, Pv, Qk, RUN_BLOCKS, Run, S_STRIDE};
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
    softmax,
    pv,
    run: Some((run, LEAST_ROWS, COLUMNS)),
    merge,
};

/// With at most this many rows (decode) we are memory-bound, and tile loads prefetch what is read next: V beside K, and the next
/// K beside V. A few lines beside each load, since a burst of a whole block would wait for the core's line fill buffers, and the
/// products behind it with it.
const MEMORY_BOUND_ROWS: usize = 8;

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
        std::array::from_fn(|i| unsafe { std::slice::from_raw_parts(a.k[2 * i.min(n - 1)], len) });
    // SAFETY: q has rows x head_dim bf16, s rows x S_STRIDE f32 (see `Qk`), and they do not overlap.
    let (q, s) = unsafe {
        (
            std::slice::from_raw_parts(a.q.cast::<u16>(), a.rows * a.head_dim),
            std::slice::from_raw_parts_mut(a.s, a.rows * S_STRIDE),
        )
    };
    let next: [*const u16; PAGES] = std::array::from_fn(|i| a.ahead[0][2 * i]);
    let next = if a.rows <= MEMORY_BOUND_ROWS { &next[..n] } else { &[] };
    qk_bf16_pages(&mut session(), q, a.head_dim, a.rows, a.head_dim, &pages[..n], next, s, S_STRIDE);
}

/// # Safety
/// As [`Pv`] says, P in bf16; tiles and AVX-512 are available.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn pv(a: &Pv) {
    let hd = a.head_dim;
    let len = PAGE_TOKENS * hd;
    let n = a.tokens.div_ceil(PAGE_TOKENS);
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
    let mut copy = PageCopy::uninit();
    let mut v = a.v;
    // SAFETY: head_dim is in HEAD_DIMS; the page has the stored tokens.
    unsafe { without_the_rest(&mut v[n - 1], a.tokens, hd, &mut copy) };
    // SAFETY: each is a page of V, or the copy initialised just above; nothing writes them meanwhile.
    let pages: [&[u16]; PAGES] =
        std::array::from_fn(|i| unsafe { std::slice::from_raw_parts(v[i.min(n - 1)], len) });
    let next = if a.rows <= MEMORY_BOUND_ROWS { &a.ahead[0][..n] } else { &[] };
    pv_bf16(&mut session(), p, S_STRIDE, a.rows, &pages[..n], next, hd, o, hd);
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
        without_the_rest(&mut blocks[last].v[pages - 1], tokens, a.head_dim, &mut copy);
        super::amx_run::run(&Run { blocks: &blocks[..=last], ..*a });
    }
}
