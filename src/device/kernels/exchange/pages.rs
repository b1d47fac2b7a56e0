//! Launching `cuda/pages.cu`.

use super::super::abi::{KV_PAGE_TOKENS, PAGES_MAX, PageItem, PagesParams};
use super::super::elementwise::launch;
use crate::Result;
use crate::device::accelerator::PageMove;
use crate::device::runtime::{DevPtr, Lane, Runtime};

const THREADS: usize = 128;

/// Operands of [`pages_to_host`] and [`pages_from_host`].
#[derive(Debug, Clone, Copy)]
pub struct PageMoves<'a> {
    /// The layer's pages on the device.
    pub device: DevPtr,
    /// Pages in the host's layout ([`crate::cache`]): staging buffer or mapped memory.
    pub host: DevPtr,
    /// The pages to move, any number.
    pub pages: &'a [PageMove],
    /// KV heads.
    pub n_kv_heads: usize,
    /// Elements of a head, a multiple of 16.
    pub head_dim: usize,
}

/// Copies pages of one layer from the device's layout to the host's.
///
/// # Errors
/// As [`Runtime::launch`].
pub fn pages_to_host(runtime: &dyn Runtime, lane: Lane, args: &PageMoves<'_>) -> Result<()> {
    move_pages(runtime, lane, "pages_to_host", args)
}

/// Copies pages of one layer from the host's layout to the device's.
///
/// # Errors
/// As [`Runtime::launch`].
pub fn pages_from_host(runtime: &dyn Runtime, lane: Lane, args: &PageMoves<'_>) -> Result<()> {
    move_pages(runtime, lane, "pages_from_host", args)
}

fn move_pages(runtime: &dyn Runtime, lane: Lane, kernel: &str, args: &PageMoves<'_>) -> Result<()> {
    let hd = args.head_dim;
    assert!(hd > 0 && hd.is_multiple_of(16), "{kernel}: head_dim {hd}, wanted a multiple of 16");
    let shared = KV_PAGE_TOKENS as usize * (hd / 2 + 2) * 4;
    for some in args.pages.chunks(PAGES_MAX as usize) {
        let mut params = PagesParams {
            device: args.device,
            host: args.host,
            n_kv_heads: args.n_kv_heads as u32,
            head_dim: hd as u32,
            ..Default::default()
        };
        for (item, page) in params.pages.iter_mut().zip(some) {
            *item = PageItem { device: page.device, host: page.host, tokens: page.tokens };
        }
        launch(runtime, lane, kernel, [some.len(), args.n_kv_heads], THREADS, shared, &params)?;
    }
    Ok(())
}
