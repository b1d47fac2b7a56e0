//! Launching `cuda/pages.cu`.

use super::super::abi::{KV_PAGE_TOKENS, PAGES_LAYERS, PAGES_MAX, PageItem, PageLayer, PagesParams};
use super::super::elementwise::launch;
use crate::Result;
use crate::cache::KvType;
use crate::device::accelerator::{LayerPages, PageMove};
use crate::device::runtime::{Lane, Runtime};

const THREADS: usize = 256;

/// Operands of [`pages_to_host`] and [`pages_from_host`].
#[derive(Debug, Clone, Copy)]
pub struct PageMoves<'a> {
    /// The layers whose pages move: the host's side ([`crate::cache`]) is a staging buffer or mapped memory.
    pub layers: &'a [LayerPages],
    /// The pages to move in each layer, any number.
    pub pages: &'a [PageMove],
    /// KV heads.
    pub n_kv_heads: usize,
    /// Elements of a head, a multiple of 16, at most 256.
    pub head_dim: usize,
    /// How keys and values are stored.
    pub kv: KvType,
}

/// Most blocks of a move on a device with so many multiprocessors: an eighth of them, from 4 to 16. The others go on with
/// the products beside it, which a move on an urgent lane interrupts wherever it has blocks. So few saturate the link:
/// a block has 16 KiB in flight at `head_dim` 128 and takes some 2 us for them (1.3 us the latency of the bus), 8 GB/s;
/// a link of 12 GB/s (T4, laptops) needs 2 of its 4 or 5 blocks, 25 GB/s (A10) 4 of 9, 55 GB/s (H100) 7 of 16.
pub fn most_blocks(multiprocessors: u32) -> usize {
    (multiprocessors as usize / 8).clamp(4, 16)
}

/// Copies pages from the device's layout to the host's.
///
/// # Errors
/// As [`Runtime::launch`].
pub fn pages_to_host(runtime: &dyn Runtime, lane: Lane, args: &PageMoves<'_>) -> Result<()> {
    move_pages(runtime, lane, "pages_to_host", args)
}

/// Copies pages from the host's layout to the device's.
///
/// # Errors
/// As [`Runtime::launch`].
pub fn pages_from_host(runtime: &dyn Runtime, lane: Lane, args: &PageMoves<'_>) -> Result<()> {
    move_pages(runtime, lane, "pages_from_host", args)
}

fn move_pages(runtime: &dyn Runtime, lane: Lane, kernel: &str, args: &PageMoves<'_>) -> Result<()> {
    let hd = args.head_dim;
    assert!(
        (16..=256).contains(&hd) && hd.is_multiple_of(16),
        "{kernel}: head_dim {hd}, wanted a multiple of 16 up to 256"
    );
    let tokens = KV_PAGE_TOKENS as usize;
    let (kernel, shared) = match args.kv {
        KvType::BF16 | KvType::F16 => (kernel.to_owned(), tokens * (hd / 2 + 2) * 4),
        KvType::Q8 => (format!("{kernel}_q8"), 2 * tokens * (hd + 4) + 2 * tokens * size_of::<f32>()),
    };
    let most = most_blocks(runtime.info().multiprocessors);
    for layers in args.layers.chunks(PAGES_LAYERS as usize) {
        for pages in args.pages.chunks(PAGES_MAX as usize) {
            let mut params = PagesParams {
                n_kv_heads: args.n_kv_heads as u32,
                head_dim: hd as u32,
                n_layers: layers.len() as u32,
                n_pages: pages.len() as u32,
                ..Default::default()
            };
            for (to, layer) in params.layers.iter_mut().zip(layers) {
                *to = PageLayer { device: layer.device, host: layer.host };
            }
            for (to, page) in params.pages.iter_mut().zip(pages) {
                *to = PageItem { device: page.device, host: page.host, tokens: page.tokens };
            }
            let blocks = most.min(layers.len() * pages.len() * args.n_kv_heads);
            launch(runtime, lane, &kernel, [blocks, 1], THREADS, shared, &params)?;
        }
    }
    Ok(())
}
