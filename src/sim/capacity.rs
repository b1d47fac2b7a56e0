//! How many pages of keys and values fit beside a model's weights, on each side.

use serde::Serialize;

use crate::cache::PAGE_TOKENS;
use crate::plan::{Available, Hardware, Load, Sizes, memory, page_bytes};
use crate::program::{LayerPlacement, Placement, Side};
use crate::{Error, Result};

/// Limits of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Rows of a step.
    pub rows: u32,
    /// Requests that run at a time.
    pub sequences: u32,
    /// Tokens of the longest request.
    pub context: u32,
    /// Most memory to use on the GPU, in bytes; `None`: what there is.
    pub gpu_memory: Option<u64>,
    /// Most memory to use on the host, in bytes; `None`: what there is.
    pub host_memory: Option<u64>,
}

/// Pages of [`PAGE_TOKENS`] tokens of all layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct PageCapacity {
    /// On the GPU.
    pub device_pages: usize,
    /// On the host.
    pub host_pages: usize,
}

impl PageCapacity {
    /// Beside weights, activations and workspace, by the same dry run as `tandem plan`, of a model that is placed so; numbers of pages in
    /// `placement` do not matter.
    ///
    /// The host keeps its own blocks' keys and values of every request, and the other blocks' of the requests that live there.
    ///
    /// # Errors
    /// A machine without a GPU; a placement that leaves it no block; a GPU or host that has no room for the weights and a page, with the
    /// numbers.
    pub fn of(
        hardware: &Hardware,
        sizes: &Sizes,
        room: &Room,
        placement: &Placement,
    ) -> Result<PageCapacity> {
        if hardware.accelerator.is_none() {
            return Err(Error::usage(format!(
                "`hardware` {}: describes no GPU; requests are simulated on a CPU and a GPU",
                hardware.name
            )));
        }
        let available = Available::new(hardware, room.gpu_memory);
        let layers = sizes.layers();
        let on_host = placement.layers.iter().filter(|l| l.kv == Side::Host).count();
        if on_host == layers {
            return Err(Error::usage(format!(
                "`boundary` {}: leaves the GPU no block of {}; set at most {layers}",
                on_host + 1,
                sizes.spec.name
            )));
        }
        let placement = &Placement { device_pages: 0, host_pages: 0, ..placement.clone() };
        let load = Load {
            sequences: room.sequences.into(),
            context: room.context.into(),
            chunk: room.rows.into(),
            prompt: room.context.into(),
        };
        let needs = memory(sizes, placement, &load, available);
        // Pages are what is left; the dry run put all of them on the host, and staged them for a GPU that streams.
        let largest = (0..layers).map(|l| sizes.staged(l, &placement.layers[l])).max().unwrap_or(0);
        let staged = placement.staging.buffers() as u64 * largest.next_multiple_of(256);
        let (fixed, pinned) =
            (needs.gpu.total - needs.gpu.kv - needs.gpu.staging + staged, needs.host.total - needs.host.kv);
        let computes_on_host = placement.layers.iter().any(LayerPlacement::computes_on_host);
        let per_layer = page_bytes(sizes);
        let page = per_layer * (layers - on_host) as u64;
        let gb = |bytes: u64| format!("{:.2} GB", bytes as f64 / 1e9);
        let device = needs.gpu.available.saturating_sub(fixed) / page;
        if device == 0 {
            let (what, setting) = match sizes.spec.experts {
                Some(_) => ("experts", "n_cpu_moe"),
                None => ("blocks", "boundary"),
            };
            return Err(Error::Capacity(format!(
                "{} on {}: weights and activations take {} and a page of keys and values {}, the GPU has {}; try a larger \
                 `gpu_memory`, a smaller `chunk`, or {} on the host (`{}`)",
                sizes.spec.name,
                hardware.name,
                gb(fixed),
                gb(page),
                gb(needs.gpu.available),
                what,
                setting
            )));
        }
        // What the user set takes the place of the reserve.
        let there = room.host_memory.unwrap_or(needs.host.available);
        let left = there.saturating_sub(pinned);
        let own = per_layer * on_host as u64;
        // Half of what the host has for keys and values is for requests that live there.
        let device = match (left / 2).checked_div(own) {
            Some(most) => device.min(most.max(u64::from(left >= own))),
            None => device,
        };
        if device == 0 || pinned > there && computes_on_host {
            let what = match on_host {
                0 => "experts".to_owned(),
                n => format!("{n} of {layers} blocks"),
            };
            return Err(Error::Capacity(format!(
                "{} on {} with {what} on the host: they and a page of keys and values take {}, the host has {}",
                sizes.spec.name,
                hardware.name,
                gb(pinned + own),
                gb(there)
            )));
        }
        let host = (left - own * device) / (page + own);
        Ok(PageCapacity { device_pages: device as usize, host_pages: host as usize })
    }

    /// [`PageCapacity::of`] for requests of these lengths in tokens: the longest that the GPU can hold sizes its workspace, whatever
    /// `room` says of the context. Longer ones could not be on the GPU anyway, and must not take memory from all others: they
    /// are served on the host or fail by themselves.
    ///
    /// Returns the number of requests that are longer, too.
    ///
    /// # Errors
    /// As [`PageCapacity::of`] for the shortest.
    pub fn serving(
        hardware: &Hardware,
        sizes: &Sizes,
        room: &Room,
        placement: &Placement,
        lengths: impl Iterator<Item = u32>,
    ) -> Result<(PageCapacity, usize)> {
        let mut lengths: Vec<u32> = lengths.collect();
        lengths.sort_unstable();
        let of = |context: u32| PageCapacity::of(hardware, sizes, &Room { context, ..*room }, placement);
        // The longer the context, the larger the workspace, and the fewer the pages.
        let fits = |&length: &u32| of(length).is_ok_and(|c| c.tokens().0 >= length as usize);
        let served = lengths.partition_point(fits);
        let context = lengths.get(served.saturating_sub(1)).copied().unwrap_or(room.context);
        Ok((of(context)?, lengths.len() - served))
    }

    /// Tokens on (GPU, host).
    pub fn tokens(&self) -> (usize, usize) {
        (self.device_pages * PAGE_TOKENS, self.host_pages * PAGE_TOKENS)
    }
}
