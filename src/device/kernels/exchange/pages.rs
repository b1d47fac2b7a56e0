//! Launching `cuda/pages.cu`.

use super::super::abi::{KV_PAGE_TOKENS, PagesParams};
use super::super::elementwise::launch;
use crate::Result;
use crate::device::runtime::{DevPtr, Lane, Runtime};

const THREADS: usize = 128;

/// Operands of [`pages_to_host`] and [`pages_from_host`]. Optional addresses may be NULL.
#[derive(Debug, Clone, Copy)]
pub struct PageMove {
    /// The layer's pages on the device.
    pub device: DevPtr,
    /// Pages in the host's layout ([`crate::cache`]): staging buffer or mapped memory.
    pub host: DevPtr,
    /// u32 `[max_pages]` in device memory: pages of `device`; `u32::MAX`: nothing.
    pub device_pages: DevPtr,
    /// u32 `[max_pages]`: pages of `host`; optional: the i-th goes to page i.
    pub host_pages: DevPtr,
    /// u32 `[max_pages]`: tokens that a page holds; the places after them become zeros without being read; optional:
    /// all 32.
    pub n_tokens: DevPtr,
    /// u32 in device memory: how many pages; optional: `max_pages`.
    pub n_pages: DevPtr,
    /// Most pages.
    pub max_pages: usize,
    /// KV heads.
    pub n_kv_heads: usize,
    /// Elements of a head, a multiple of 16.
    pub head_dim: usize,
}

/// Pages of one layer from the device's layout to the host's.
///
/// # Errors
/// As [`Runtime::launch`].
pub fn pages_to_host(runtime: &dyn Runtime, lane: Lane, args: &PageMove) -> Result<()> {
    move_pages(runtime, lane, "pages_to_host", args)
}

/// Pages of one layer from the host's layout to the device's.
///
/// # Errors
/// As [`Runtime::launch`].
pub fn pages_from_host(runtime: &dyn Runtime, lane: Lane, args: &PageMove) -> Result<()> {
    move_pages(runtime, lane, "pages_from_host", args)
}

fn move_pages(runtime: &dyn Runtime, lane: Lane, kernel: &str, args: &PageMove) -> Result<()> {
    let hd = args.head_dim;
    assert!(hd > 0 && hd.is_multiple_of(16), "{kernel}: head_dim {hd}, wanted a multiple of 16");
    let params = PagesParams {
        device: args.device,
        host: args.host,
        device_pages: args.device_pages,
        host_pages: args.host_pages,
        n_tokens: args.n_tokens,
        n_pages: args.n_pages,
        max_pages: args.max_pages as u32,
        n_kv_heads: args.n_kv_heads as u32,
        head_dim: hd as u32,
        ..Default::default()
    };
    let shared = KV_PAGE_TOKENS as usize * (hd / 2 + 2) * 4;
    launch(runtime, lane, kernel, [args.max_pages, args.n_kv_heads], THREADS, shared, &params)
}
