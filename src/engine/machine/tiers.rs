//! Pages for requests that live on two sides, for a model whose keys and values are on the device, if requests are not on the host.

use super::sizes::Sizes;
use crate::host::memory_available;
use crate::plan::most;
use crate::program::{LayerPlacement, Placement};
use crate::{Error, Result};

/// Numbers of pages that fit in memory, of 32 tokens in all layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tiers {
    /// Where everything lives.
    pub placement: Placement,
    /// Pages on the device ([`Options::kv_pages`](crate::engine::Options::kv_pages)).
    pub device_pages: usize,
    /// Pages in pinned host memory ([`Options::far_pages`](crate::engine::Options::far_pages)).
    pub host_pages: usize,
}

impl Sizes {
    /// As many pages as fit beside a model that is placed so, up to `device` on the device and up to `host` in the host's memory. These sizes
    /// must be those of options with as many pages as both together ([`Options::pages`](crate::engine::Options::pages)).
    ///
    /// # Errors
    /// [`Error::Capacity`] if not even one page fits beside the weights, or the host has no memory for its own, with the numbers.
    pub fn tiers(mut self, base: &Placement, device: usize, host: usize) -> Result<Tiers> {
        let at = |pages: usize| Placement { device_pages: pages, host_pages: 0, ..base.clone() };
        let least = at(1);
        // One program should not use all memory that the system reports as available.
        let available = memory_available().map_or(u64::MAX, |bytes| bytes / 20 * 19);
        if base.layers.iter().any(LayerPlacement::computes_on_host) {
            let far = self.far_pages.take();
            self.host(&Placement { device_pages: usize::MAX, ..least.clone() }).check()?;
            self.far_pages = far;
        }
        let host_pages = most(host, |pages| {
            self.far_pages = Some(pages);
            self.host(&least).total() <= available
        });
        self.far_pages = (host_pages > 0).then_some(host_pages);
        let device_pages = most(device, |pages| self.fits(&at(pages)));
        if device_pages == 0 {
            self.check(&least)?;
            return Err(Error::Capacity("no page of keys and values fits the device".into()));
        }
        Ok(Tiers { placement: at(device_pages), device_pages, host_pages })
    }
}
