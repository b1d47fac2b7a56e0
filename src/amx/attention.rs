//! The two products of attention on KV pages, for 1 to 32 query rows (AMX-BF16).
//!
//! ```text
//! S[rows][tokens] = Q K^T          O[rows][head_dim] += P V
//!
//! layout     K of a page and head: `[token/16][head_dim/2][16 tokens][2 dims]`, so 32 dims of 16 tokens are a B
//!            tile, a contiguous KiB; V: `[token/2][head_dim][2 tokens]`, so 32 tokens of 16 dims are a B tile
//!            with rows head_dim * 4 bytes apart. Q and P are row-major: A tiles straight from there
//! tile       rows <= 16: 1 A x 4 B (4 groups of 16 tokens, or 64 dims of O); rows > 16: 2 A x 2 B
//! registers  tmm0-3 accumulators, tmm4 (4-5) A, tmm5-7 (6-7) B: shapes `attention(rows)`, the same for both
//!            products and all head sizes, so a block of attention loads one configuration
//! tail       head_dim 80 = 2 x 32 + 16: the last step takes dims 48..80 with a Q whose first 16 dims are zeroed;
//!            no half tile, no other configuration, and only dims of the same tokens are read
//! bound      memory for decode (rows 1..8): a product takes about `rows` cycles, a KiB from memory 100+; so each tile
//!            load can prefetch as much of what comes next, a few lines at a time
//!            the tile unit for prefill (rows 32): 4 products of 16 cycles per 4 tile loads of 8
//! measured   a C program in these layouts, quiet, head_dim 128, a block of 32 x 64: S 211 ns, O 306 (a third of it C through the tiles),
//!            where products take 135 each; decode 27 to 29 GB/s of 37 with two threads (docs/performance.md, decision 0057)
//! error      as bf16.rs: steps of 32, even and odd elements apart, f32
//! refs       Dao 2023 (FlashAttention-2) for the driver; bf16.rs for the blocking
//! ```
//!
//! All 32 tokens of a page are read. K of tokens that do not exist yet gives columns of S that the caller
//! masks; V of such tokens is multiplied by a P of zero, so **it must be finite**: pages are zeroed when
//! they are allocated.

use std::arch::asm;

use super::session::{Session, Shapes};
use crate::cache::PAGE_TOKENS;

/// Tokens of a K group: the columns of a B tile.
pub const GROUP: usize = 16;
const _: () = assert!(PAGE_TOKENS == 2 * GROUP, "a page is two K groups and one V tile deep");

/// S of one group of 16 tokens: `s[row][token] = q[row] . k[token]`, overwriting.
///
/// `q` has `rows` rows (1..=32) of `head_dim` bf16, `q_stride` elements apart; `k_group` is
/// `[head_dim/2][16][2]`; rows of `s` are `s_stride` apart. [`qk_bf16_pages`] does more per call.
///
/// # Panics
/// A slice is too short for the shape, or `head_dim` is no multiple of 16 from 32 on.
#[allow(clippy::too_many_arguments)]
pub fn qk_bf16(
    session: &mut Session,
    q: &[u16],
    q_stride: usize,
    rows: usize,
    head_dim: usize,
    k_group: &[u16],
    s: &mut [f32],
    s_stride: usize,
) {
    let to = check_qk(q, q_stride, rows, head_dim, s, s_stride, GROUP);
    assert!(
        k_group.len() >= GROUP * head_dim,
        "qk_bf16: {} elements are no 16 x {head_dim} of K",
        k_group.len()
    );
    session.load(&Shapes::attention(rows));
    let query = Query::new(q, q_stride, rows, head_dim);
    // SAFETY: shapes are loaded; the asserts above cover Q, K and S.
    unsafe { query.times_groups(&[k_group.as_ptr()], &[], to, s_stride) }
}

/// S of whole pages: `s[row][32 * page + token] = q[row] . k[page][token]`, overwriting.
///
/// `pages` are the K parts of one head, `[2][head_dim/2][16][2]` each; the rest is as in [`qk_bf16`]. `ahead` are pages to
/// prefetch into L2: one for each of `pages`, or none. Each tile load then asks for as much of them as it loads, for at most
/// 16 rows: more rows are not memory-bound, and prefetch nothing.
///
/// # Panics
/// A slice is too short for the shape, `ahead` has other than 0 or as many pages, or `head_dim` is no multiple of 16 from 32 on.
#[allow(clippy::too_many_arguments)]
pub fn qk_bf16_pages(
    session: &mut Session,
    q: &[u16],
    q_stride: usize,
    rows: usize,
    head_dim: usize,
    pages: &[&[u16]],
    ahead: &[*const u16],
    s: &mut [f32],
    s_stride: usize,
) {
    if pages.is_empty() {
        return;
    }
    let to = check_qk(q, q_stride, rows, head_dim, s, s_stride, pages.len() * PAGE_TOKENS);
    check_pages("qk_bf16_pages", pages, ahead, head_dim);
    session.load(&Shapes::attention(rows));
    let query = Query::new(q, q_stride, rows, head_dim);
    // Four groups at once keep four accumulators busy; more rows fill them with two.
    let at_once = if rows <= 16 { 2 } else { 1 };
    for (i, some) in pages.chunks(at_once).enumerate() {
        let mut groups = [std::ptr::null(); 4];
        for (two, page) in groups.chunks_exact_mut(2).zip(some) {
            two[0] = page.as_ptr();
            two[1] = page[GROUP * head_dim..].as_ptr();
        }
        let to = to.wrapping_add(i * at_once * PAGE_TOKENS);
        let ahead = ahead.get(i * at_once..i * at_once + some.len()).unwrap_or_default();
        // SAFETY: shapes are loaded; each page has two groups (checked), S has the columns (checked).
        unsafe { query.times_groups(&groups[..2 * some.len()], ahead, to, s_stride) };
    }
}

fn check_qk(
    q: &[u16],
    q_stride: usize,
    rows: usize,
    head_dim: usize,
    s: &mut [f32],
    s_stride: usize,
    tokens: usize,
) -> *mut f32 {
    assert!((1..=32).contains(&rows), "qk_bf16: 1 to 32 query rows, not {rows}");
    assert!(
        head_dim >= 32 && head_dim.is_multiple_of(16),
        "qk_bf16: head_dim {head_dim} is no multiple of 16 from 32 on"
    );
    assert!(q_stride >= head_dim && s_stride >= tokens, "qk_bf16: rows overlap ({q_stride}, {s_stride})");
    assert!(
        q.len() >= (rows - 1) * q_stride + head_dim,
        "qk_bf16: {} elements are no {rows} x {head_dim} of Q (stride {q_stride})",
        q.len()
    );
    assert!(
        s.len() >= (rows - 1) * s_stride + tokens,
        "qk_bf16: {} values hold no {rows} x {tokens} of S (stride {s_stride})",
        s.len()
    );
    s.as_mut_ptr()
}

fn check_pages(what: &str, pages: &[&[u16]], ahead: &[*const u16], head_dim: usize) {
    assert!(
        ahead.is_empty() || ahead.len() == pages.len(),
        "{what}: {} pages ahead of {}, all or none wanted",
        ahead.len(),
        pages.len()
    );
    for page in pages {
        assert!(
            page.len() >= PAGE_TOKENS * head_dim,
            "{what}: a page of {} elements, {PAGE_TOKENS} x {head_dim} wanted",
            page.len()
        );
    }
}

/// Queries in the form that the kernels take.
struct Query {
    q: *const u16,
    /// Bytes between rows.
    stride: usize,
    rows: usize,
    /// Full steps of 32 dims.
    steps: usize,
    /// The last 32 dims with the first 16 zeroed, if head_dim has such a tail.
    tail: Option<Tail>,
}

#[repr(C, align(64))]
struct Tail([[u16; 32]; 32]);

/// Prefetches the 16 lines of a KiB into L2, where the kernel's `AHEAD` is true.
macro_rules! ask {
    ($page:ident + $at:literal) => {
        concat!(
            ".if {ahead}\n",
            ".irp line,0,64,128,192,256,320,384,448,512,576,640,704,768,832,896,960\n",
            "prefetcht1 [{",
            stringify!($page),
            "} + ",
            $at,
            " + \\line]\n",
            ".endr\n",
            ".endif"
        )
    };
}

/// Defines one shape of `S = Q K^T`: loops over steps of 32 dims, then once more over the tail, if any. `ask` prefetches a KiB
/// of a page `ahead`; a step takes 2 of each.
macro_rules! qk_kernel {
    (
        $(#[$meta:meta])*
        $name:ident, rows $($q:ident $at:literal $s:ident),+; groups $($k:ident)+; ahead $($page:ident)*;
        tiles $($tile:literal in $row:ident + $byte:literal),+;
        step $($step:literal $(ask $from:ident + $kib:literal)?),+ $(,)?
    ) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// Shapes `attention(rows)` are loaded; Q, the groups and S are as large as the query says.
        unsafe fn $name<const AHEAD: bool>(
            query: &Query,
            groups: &[*const u16],
            ahead: &[*const u16],
            s: *mut f32,
            s_stride: usize,
        ) {
            let mut group = groups.iter().copied();
            $(let $k = group.next().expect("as many groups as the kernel takes");)+
            let mut page = ahead.iter().copied();
            $(let $page = page.next().unwrap_or(std::ptr::null());)*
            debug_assert!(!AHEAD || page.next().is_none(), "as many pages ahead as the kernel takes");
            let tail = query.tail.as_ref().map_or(std::ptr::null(), |t| t.0.as_ptr().cast::<u8>());
            // SAFETY: the caller's promises; tiles are clobbers, memory effects are declared.
            unsafe {
                asm!(
                    $(concat!("tilezero tmm", $tile),)+
                    "2:",
                    $($step, $(ask!($from + $kib),)?)+
                    $(concat!("add {", stringify!($q), "}, 64"),)+
                    $(concat!("add {", stringify!($k), "}, 1024"),)+
                    ".if {ahead}",
                    $(concat!("add {", stringify!($page), "}, 2048"),)*
                    ".endif",
                    "dec {steps}",
                    "jnz 2b",
                    // The tail is one more step, 16 dims back, with the zeroed copy of Q.
                    "test {tail}, {tail}",
                    "jz 3f",
                    $(concat!("lea {", stringify!($q), "}, [{tail} + 64*", $at, "]"),)+
                    "mov {qs}, 64",
                    $(concat!("sub {", stringify!($k), "}, 512"),)+
                    "xor {tail:e}, {tail:e}",
                    "mov {steps:e}, 1",
                    "jmp 2b",
                    "3:",
                    $(concat!("tilestored [{", stringify!($row), "} + {ss}*1 + ", $byte, "], tmm", $tile),)+
                    $($q = inout(reg) query.q.cast::<u8>().wrapping_add($at * query.stride) => _,)+
                    $($k = inout(reg) $k => _,)+
                    $($page = inout(reg) $page => _,)*
                    ahead = const AHEAD as usize,
                    $($s = in(reg) s.wrapping_add($at * s_stride),)+
                    qs = inout(reg) query.stride => _,
                    ss = in(reg) s_stride * 4,
                    st = in(reg) 64usize,
                    steps = inout(reg) query.steps => _,
                    tail = inout(reg) tail => _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

qk_kernel! {
    /// Up to 16 rows, 16 tokens.
    qk_16x16, rows q0 0 s0; groups k0; ahead;
    tiles "0" in s0 + "0";
    step
        "tileloadd tmm4, [{q0} + {qs}*1]",
        "tileloadd tmm5, [{k0} + {st}*1]",
        "tdpbf16ps tmm0, tmm4, tmm5",
}

qk_kernel! {
    /// Up to 16 rows, 32 tokens: one page.
    qk_16x32, rows q0 0 s0; groups k0 k1; ahead page;
    tiles "0" in s0 + "0", "1" in s0 + "64";
    step
        "tileloadd tmm4, [{q0} + {qs}*1]",
        "tileloadd tmm5, [{k0} + {st}*1]" ask page + "0",
        "tileloadd tmm6, [{k1} + {st}*1]" ask page + "1024",
        "tdpbf16ps tmm0, tmm4, tmm5",
        "tdpbf16ps tmm1, tmm4, tmm6",
}

qk_kernel! {
    /// Up to 16 rows, 64 tokens: two pages.
    qk_16x64, rows q0 0 s0; groups k0 k1 k2 k3; ahead page0 page1;
    tiles "0" in s0 + "0", "1" in s0 + "64", "2" in s0 + "128", "3" in s0 + "192";
    step
        "tileloadd tmm4, [{q0} + {qs}*1]",
        "tileloadd tmm5, [{k0} + {st}*1]" ask page0 + "0",
        "tileloadd tmm6, [{k1} + {st}*1]" ask page0 + "1024",
        "tdpbf16ps tmm0, tmm4, tmm5",
        "tileloadd tmm7, [{k2} + {st}*1]" ask page1 + "0",
        "tdpbf16ps tmm1, tmm4, tmm6",
        "tileloadd tmm5, [{k3} + {st}*1]" ask page1 + "1024",
        "tdpbf16ps tmm2, tmm4, tmm7",
        "tdpbf16ps tmm3, tmm4, tmm5",
}

qk_kernel! {
    /// 17 to 32 rows, 16 tokens.
    qk_32x16, rows q0 0 s0, q1 16 s1; groups k0; ahead;
    tiles "0" in s0 + "0", "2" in s1 + "0";
    step
        "tileloadd tmm6, [{k0} + {st}*1]",
        "tileloadd tmm4, [{q0} + {qs}*1]",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tileloadd tmm5, [{q1} + {qs}*1]",
        "tdpbf16ps tmm2, tmm5, tmm6",
}

qk_kernel! {
    /// 17 to 32 rows, 32 tokens: one page.
    qk_32x32, rows q0 0 s0, q1 16 s1; groups k0 k1; ahead;
    tiles "0" in s0 + "0", "1" in s0 + "64", "2" in s1 + "0", "3" in s1 + "64";
    step
        "tileloadd tmm6, [{k0} + {st}*1]",
        "tileloadd tmm4, [{q0} + {qs}*1]",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tileloadd tmm7, [{k1} + {st}*1]",
        "tdpbf16ps tmm1, tmm4, tmm7",
        "tileloadd tmm5, [{q1} + {qs}*1]",
        "tdpbf16ps tmm2, tmm5, tmm6",
        "tdpbf16ps tmm3, tmm5, tmm7",
}

impl Query {
    fn new(q: &[u16], q_stride: usize, rows: usize, head_dim: usize) -> Query {
        let tail = (!head_dim.is_multiple_of(32)).then(|| {
            let mut tail = Tail([[0; 32]; 32]);
            for (to, row) in tail.0.iter_mut().zip(q.chunks(q_stride)).take(rows) {
                to[16..].copy_from_slice(&row[head_dim - 16..head_dim]);
            }
            tail
        });
        Query { q: q.as_ptr(), stride: q_stride * 2, rows, steps: head_dim / 32, tail }
    }

    /// S of 1, 2 or (with up to 16 rows) 4 groups; `ahead` has as many pages as the groups make, or none.
    ///
    /// # Safety
    /// Shapes `attention(rows)` are loaded; groups have 16 x head_dim elements; `s` has `rows` rows of 16
    /// values per group.
    unsafe fn times_groups(&self, groups: &[*const u16], ahead: &[*const u16], s: *mut f32, s_stride: usize) {
        // SAFETY: the caller's promises are the kernels'; prefetching any address is harmless.
        unsafe {
            match (self.rows <= 16, groups.len(), ahead.is_empty()) {
                (true, 1, _) => qk_16x16::<false>(self, groups, &[], s, s_stride),
                (true, 2, true) => qk_16x32::<false>(self, groups, &[], s, s_stride),
                (true, 2, false) => qk_16x32::<true>(self, groups, ahead, s, s_stride),
                (true, _, true) => qk_16x64::<false>(self, groups, &[], s, s_stride),
                (true, _, false) => qk_16x64::<true>(self, groups, ahead, s, s_stride),
                (false, 1, _) => qk_32x16::<false>(self, groups, &[], s, s_stride),
                (false, ..) => qk_32x32::<false>(self, groups, &[], s, s_stride),
            }
        }
    }
}

/// Pages per call of a PV kernel: O is read and written once per call.
const PV_PAGES: usize = 64;

/// `o[row][dim] += sum over tokens of p[row][token] * v[token][dim]`.
///
/// `p` has `rows` rows (1..=32) of 32 bf16 per page, `p_stride` elements apart; `pages` are the V parts of
/// one head, `[16][head_dim][2]` each; rows of `o` are `o_stride` apart. O stays in tiles across pages.
/// `ahead` is as in [`qk_bf16_pages`].
///
/// # Panics
/// A slice is too short for the shape, `ahead` has other than 0 or as many pages, or `head_dim` is no multiple of 16.
#[allow(clippy::too_many_arguments)]
pub fn pv_bf16(
    session: &mut Session,
    p: &[u16],
    p_stride: usize,
    rows: usize,
    pages: &[&[u16]],
    ahead: &[*const u16],
    head_dim: usize,
    o: &mut [f32],
    o_stride: usize,
) {
    if pages.is_empty() {
        return;
    }
    let tokens = pages.len() * PAGE_TOKENS;
    assert!((1..=32).contains(&rows), "pv_bf16: 1 to 32 query rows, not {rows}");
    assert!(
        head_dim >= 16 && head_dim.is_multiple_of(16),
        "pv_bf16: head_dim {head_dim} is no multiple of 16"
    );
    assert!(p_stride >= tokens && o_stride >= head_dim, "pv_bf16: rows overlap ({p_stride}, {o_stride})");
    assert!(
        p.len() >= (rows - 1) * p_stride + tokens,
        "pv_bf16: {} elements are no {rows} x {tokens} of P (stride {p_stride})",
        p.len()
    );
    assert!(
        o.len() >= (rows - 1) * o_stride + head_dim,
        "pv_bf16: {} values hold no {rows} x {head_dim} of O (stride {o_stride})",
        o.len()
    );
    check_pages("pv_bf16", pages, ahead, head_dim);
    session.load(&Shapes::attention(rows));
    let widest = if rows <= 16 { 4 } else { 2 };
    for (i, some) in pages.chunks(PV_PAGES).enumerate() {
        let mut at = [std::ptr::null(); PV_PAGES];
        for (at, page) in at.iter_mut().zip(some) {
            *at = page.as_ptr();
        }
        let mut dim = 0;
        while dim < head_dim {
            // 80 is 3 + 2 tiles, not 4 + 1, because the products of a lone accumulator would depend on each other.
            let left = (head_dim - dim) / 16;
            let wide = left.div_ceil(left.div_ceil(widest));
            let job = Pv {
                p: p.as_ptr().wrapping_add(i * PV_PAGES * PAGE_TOKENS),
                p_stride,
                pages: &at[..some.len()],
                ahead: ahead.get(i * PV_PAGES..i * PV_PAGES + some.len()).unwrap_or_default(),
                dim,
                v_stride: head_dim * 4,
                o: o.as_mut_ptr().wrapping_add(dim),
                o_stride,
            };
            // SAFETY: shapes are loaded; the asserts above cover P, V and O, and dims dim..dim + 16 wide exist.
            unsafe {
                match (rows <= 16, wide, job.ahead.is_empty()) {
                    (true, 1, true) => pv_16x16::<false>(&job),
                    (true, 1, false) => pv_16x16::<true>(&job),
                    (true, 2, true) => pv_16x32::<false>(&job),
                    (true, 2, false) => pv_16x32::<true>(&job),
                    (true, 3, true) => pv_16x48::<false>(&job),
                    (true, 3, false) => pv_16x48::<true>(&job),
                    (true, _, true) => pv_16x64::<false>(&job),
                    (true, _, false) => pv_16x64::<true>(&job),
                    (false, 1, _) => pv_32x16::<false>(&job),
                    (false, ..) => pv_32x32::<false>(&job),
                }
            }
            dim += 16 * wide;
        }
    }
}

/// Some columns of `O += P V`.
struct Pv<'a> {
    p: *const u16,
    p_stride: usize,
    pages: &'a [*const u16],
    /// As many to prefetch, or none.
    ahead: &'a [*const u16],
    /// The first column.
    dim: usize,
    /// Bytes between rows of a V tile.
    v_stride: usize,
    /// O at that column.
    o: *mut f32,
    o_stride: usize,
}

/// Defines one shape of `O += P V`: O loaded, a loop over pages, O stored. `ask` prefetches a KiB of the `next` page.
macro_rules! pv_kernel {
    (
        $(#[$meta:meta])*
        $name:ident, rows $($p:ident $at:literal $o:ident),+;
        tiles $($tile:literal in $row:ident + $byte:literal),+;
        step $($step:literal $(ask $from:ident + $kib:literal)?),+ $(,)?
    ) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// Shapes `attention(rows)` are loaded; P has 32 columns per page, pages have the columns of V, O has
        /// the columns of the tiles.
        unsafe fn $name<const AHEAD: bool>(job: &Pv) {
            debug_assert!(!job.pages.is_empty());
            debug_assert!(!AHEAD || job.ahead.len() == job.pages.len());
            // SAFETY: the caller's promises; tiles are clobbers, memory effects are declared.
            unsafe {
                asm!(
                    $(concat!("tileloadd tmm", $tile, ", [{", stringify!($row), "} + {os}*1 + ", $byte, "]"),)+
                    "2:",
                    "mov {v}, [{pages}]",
                    "add {pages}, 8",
                    "add {v}, {column}",
                    ".if {ahead}",
                    "mov {next}, [{asked}]",
                    "add {asked}, 8",
                    "add {next}, {run}",
                    ".endif",
                    $($step, $(ask!($from + $kib),)?)+
                    $(concat!("add {", stringify!($p), "}, 64"),)+
                    "dec {n}",
                    "jnz 2b",
                    $(concat!("tilestored [{", stringify!($row), "} + {os}*1 + ", $byte, "], tmm", $tile),)+
                    $($p = inout(reg) job.p.wrapping_add($at * job.p_stride) => _,)+
                    $($o = in(reg) job.o.wrapping_add($at * job.o_stride),)+
                    ps = in(reg) job.p_stride * 2,
                    os = in(reg) job.o_stride * 4,
                    vs = in(reg) job.v_stride,
                    v = out(reg) _,
                    column = in(reg) job.dim * 4,
                    asked = inout(reg) job.ahead.as_ptr() => _,
                    next = out(reg) _,
                    // A page is 64 bytes a dim.
                    run = in(reg) job.dim * 64,
                    ahead = const AHEAD as usize,
                    pages = inout(reg) job.pages.as_ptr() => _,
                    n = inout(reg) job.pages.len() => _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

pv_kernel! {
    /// Up to 16 rows, 16 dims.
    pv_16x16, rows p0 0 o0;
    tiles "0" in o0 + "0";
    step
        "tileloadd tmm4, [{p0} + {ps}*1]",
        "tileloadd tmm5, [{v} + {vs}*1]" ask next + "0",
        "tdpbf16ps tmm0, tmm4, tmm5",
}

pv_kernel! {
    /// Up to 16 rows, 32 dims.
    pv_16x32, rows p0 0 o0;
    tiles "0" in o0 + "0", "1" in o0 + "64";
    step
        "tileloadd tmm4, [{p0} + {ps}*1]",
        "tileloadd tmm5, [{v} + {vs}*1]" ask next + "0",
        "tileloadd tmm6, [{v} + {vs}*1 + 64]" ask next + "1024",
        "tdpbf16ps tmm0, tmm4, tmm5",
        "tdpbf16ps tmm1, tmm4, tmm6",
}

pv_kernel! {
    /// Up to 16 rows, 48 dims.
    pv_16x48, rows p0 0 o0;
    tiles "0" in o0 + "0", "1" in o0 + "64", "2" in o0 + "128";
    step
        "tileloadd tmm4, [{p0} + {ps}*1]",
        "tileloadd tmm5, [{v} + {vs}*1]" ask next + "0",
        "tileloadd tmm6, [{v} + {vs}*1 + 64]" ask next + "1024",
        "tdpbf16ps tmm0, tmm4, tmm5",
        "tileloadd tmm7, [{v} + {vs}*1 + 128]" ask next + "2048",
        "tdpbf16ps tmm1, tmm4, tmm6",
        "tdpbf16ps tmm2, tmm4, tmm7",
}

pv_kernel! {
    /// Up to 16 rows, 64 dims.
    pv_16x64, rows p0 0 o0;
    tiles "0" in o0 + "0", "1" in o0 + "64", "2" in o0 + "128", "3" in o0 + "192";
    step
        "tileloadd tmm4, [{p0} + {ps}*1]",
        "tileloadd tmm5, [{v} + {vs}*1]" ask next + "0",
        "tileloadd tmm6, [{v} + {vs}*1 + 64]" ask next + "1024",
        "tdpbf16ps tmm0, tmm4, tmm5",
        "tileloadd tmm7, [{v} + {vs}*1 + 128]" ask next + "2048",
        "tdpbf16ps tmm1, tmm4, tmm6",
        "tileloadd tmm5, [{v} + {vs}*1 + 192]" ask next + "3072",
        "tdpbf16ps tmm2, tmm4, tmm7",
        "tdpbf16ps tmm3, tmm4, tmm5",
}

pv_kernel! {
    /// 17 to 32 rows, 16 dims.
    pv_32x16, rows p0 0 o0, p1 16 o1;
    tiles "0" in o0 + "0", "2" in o1 + "0";
    step
        "tileloadd tmm6, [{v} + {vs}*1]",
        "tileloadd tmm4, [{p0} + {ps}*1]",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tileloadd tmm5, [{p1} + {ps}*1]",
        "tdpbf16ps tmm2, tmm5, tmm6",
}

pv_kernel! {
    /// 17 to 32 rows, 32 dims.
    pv_32x32, rows p0 0 o0, p1 16 o1;
    tiles "0" in o0 + "0", "1" in o0 + "64", "2" in o1 + "0", "3" in o1 + "64";
    step
        "tileloadd tmm6, [{v} + {vs}*1]",
        "tileloadd tmm4, [{p0} + {ps}*1]",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tileloadd tmm7, [{v} + {vs}*1 + 64]",
        "tdpbf16ps tmm1, tmm4, tmm7",
        "tileloadd tmm5, [{p1} + {ps}*1]",
        "tdpbf16ps tmm2, tmm5, tmm6",
        "tdpbf16ps tmm3, tmm5, tmm7",
}
