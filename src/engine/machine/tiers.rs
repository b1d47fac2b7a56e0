//! Pages for requests that live on two sides, of a model that is wholly on the device.

use super::sizes::Sizes;
use crate::host::memory_available;
use crate::program::{Placement, Side};
use crate::{Error, Result};

/// Pages that memory has room for, of 32 tokens in all layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tiers {
    /// Where everything lives.
    pub placement: Placement,
    /// On the device ([`Options::kv_pages`](crate::engine::Options::kv_pages)).
    pub device_pages: usize,
    /// In pinned host memory ([`Options::far_pages`](crate::engine::Options::far_pages)).
    pub host_pages: usize,
}

impl Sizes {
    /// As many pages on the device as fit, up to `device`, and up to `host` in the host's memory. Sizes of options with as many
    /// pages as both ([`Options::pages`](crate::engine::Options::pages)).
    ///
    /// # Errors
    /// [`Error::Capacity`], with the numbers: not one page fits beside the weights.
    pub fn tiers(mut self, device: usize, host: usize) -> Result<Tiers> {
        let at = |pages: usize| Placement::all(Side::Device, self.layers(), pages);
        let (least, layers) = (at(1), self.layers());
        // What the system calls available is not for one program alone.
        let available = memory_available().map_or(u64::MAX, |bytes| bytes / 20 * 19);
        let host_pages = most(host, |pages| {
            self.far_pages = Some(pages);
            self.host(&least).total() <= available
        });
        self.far_pages = (host_pages > 0).then_some(host_pages);
        let at = |pages: usize| Placement::all(Side::Device, layers, pages);
        let device_pages = most(device, |pages| self.fits(&at(pages)));
        if device_pages == 0 {
            self.check(&least)?;
            return Err(Error::Capacity("no page of keys and values fits the device".into()));
        }
        Ok(Tiers { placement: at(device_pages), device_pages, host_pages })
    }
}

/// The largest number up to `limit` that fits, where fewer do if more do; 0 if none.
fn most(limit: usize, mut fits: impl FnMut(usize) -> bool) -> usize {
    if limit == 0 || fits(limit) {
        return limit;
    }
    let (mut least, mut beyond) = (0, limit);
    while beyond - least > 1 {
        let middle = least + (beyond - least) / 2;
        if fits(middle) { least = middle } else { beyond = middle }
    }
    least
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_that_fits() {
        for limit in 0..20 {
            for room in 0..25 {
                assert_eq!(most(limit, |n| n <= room), limit.min(room), "{limit} {room}");
            }
        }
    }
}
