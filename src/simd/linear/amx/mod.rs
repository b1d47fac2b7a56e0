//! Linear on AMX: tiles of bf16 weights, made a quarter at a time between tile products; int8 tiles for few tokens.
//!
//!   quantised   codes of a group → d·q + m → bf16 tiles ([`quantised`]; for few tokens with f16 arithmetic, `half_tiles`), then
//!               products; up to 16 tokens: [`int8_tiles`]
//!   bf16        rows of the file → transposed to tiles ([`rows`]), then products; up to 16 tokens: [`rows_tiles`]
//!   f16         rows of the file → converted ([`panel`](super::float::panel)), then products
//!   bf16, f16   packed at load: tiles in place ([`stored`])
//!
//! Why not int8 tiles for many tokens: scales change every 32 elements, so a tile product covers K = 32, with as many
//! multiply-adds as a bf16 tile. It saves the dequantisation (once per call and weight) but converts every 16x16 result
//! per 32 elements (once per token block). From 17 tokens on bf16 is faster, and its activations are more precise; up
//! to 16 tokens `int8_tiles` is faster.
//!
//! bound      two 512-bit ports; cycles per 16x32 weights (a tile), counted by scripts/mca for Sapphire Rapids: bf16 40 (48
//!            insertions beside loads, 32 shuffles), quantised: `dequantise`. Against 16 cycles of products per 16 tokens, and 12
//!            cycles per 64-byte line from memory
//! measured   on a Sapphire Rapids, as a C program (decision 0023): q4_0, quarters made in the K loop 1.15 TFLOP/s a thread
//!            at M = 512, through the ring 0.585 at 32; this code has run on emulated tiles only
//! error      weights (quantised: d·q + m; f16) and activations rounded to bf16, f32 accumulation

mod dequantise;
mod half_tiles;
pub(super) mod int8_tiles;
pub(super) mod quantised;
pub(super) mod rows;
pub(super) mod rows_tiles;
pub(super) mod stored;
mod transpose;

use super::kernel::{AMX_CHUNK_GROUPS, Shape, Work};
use crate::amx::Session;
use crate::amx::bf16::{Panels, gemm_bf16_raw};

/// Most groups per chunk when many tokens make the work compute-bound.
const MOST_GROUPS: usize = 128;

/// Groups per chunk. Ranges of columns are long, because each begins by fetching A into L2 and by making its first
/// panels without an overlapping product. `unit` is the number of groups multiplied together.
fn range(s: &Shape<'_>, unit: usize) -> usize {
    let least = if s.m <= 64 { 8 } else { AMX_CHUNK_GROUPS };
    let most = if s.fine { AMX_CHUNK_GROUPS } else { MOST_GROUPS };
    let groups = s.groups();
    let range = (groups / (4 * s.threads)).max(least).min(groups / s.threads).min(most);
    (range / unit * unit).max(unit)
}

/// [`range`] for panels, which are multiplied two at a time, or four at a time with up to 16 tokens.
fn panels(s: &Shape<'_>) -> usize {
    range(s, if s.m <= 16 { 4 } else { 2 })
}

/// The tiles of `w.x`'s plane.
fn tiles(w: &Work<'_>) -> *const u16 {
    if w.plane == 0 { w.x.tiles().as_ptr() } else { w.x.fine_tiles().as_ptr() }
}

/// `out[t·ldo + r] = Σ_k w[r][k]·x[t][k]` by products of bf16 tiles.
///
/// # Safety
/// AMX and AVX-512 BF16 are usable; `panels` are those of the work's `n` rows of `k` rounded up to 64; its activations are tiles.
unsafe fn product(session: &mut Session, w: &Work<'_>, panels: &dyn Panels) {
    // SAFETY: n rows make n/16 panels; k_padded is k rounded up to whole records (K-quants: 256, of which k is a multiple) or
    // padded with zeros by the panels; the rest is the contract.
    unsafe { gemm_bf16_raw(session, w.x.m(), w.n, w.x.k_padded(), tiles(w), panels, w.out, w.ldo) }
}

/// This thread's tiles.
fn session() -> Session {
    Session::open().expect("the tier was checked when the weight was made")
}
