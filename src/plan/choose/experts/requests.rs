//! Where the experts of a mixture are for requests that share an engine, whose keys and values are on the GPU or, with some requests, on
//! the host.

use std::ops::RangeInclusive;

use super::{is_spread, layer, stream_rows, streamed};
use crate::plan::price::{Workload, price};
use crate::plan::sizes::Sizes;
use crate::plan::step_times::CostSource;
use crate::program::{LayerPlacement, Placement, Side};

/// Requests whose keys and values are to fit the GPU of a model that does not: what is on the host is as little as leaves room for them.
pub const FEW_REQUESTS: usize = 8;

/// All on the GPU but the experts of the first `blocks`.
pub fn experts_on_host(sizes: &Sizes, blocks: usize) -> Placement {
    all_but(sizes, |l| (l < blocks).then(|| layer(Side::Device, Side::Host)))
}

/// The same of as many blocks spread evenly, whose experts are copied to the GPU for prompts.
fn spread(sizes: &Sizes, blocks: usize) -> Placement {
    all_but(sizes, |l| is_spread(l, blocks, sizes.layers()).then(|| streamed(Side::Device)))
}

/// All on the GPU but what `of` says of blocks with experts.
fn all_but(sizes: &Sizes, of: impl Fn(usize) -> Option<LayerPlacement>) -> Placement {
    let mut placement = Placement::all(Side::Device, sizes.layers(), 0);
    for (l, at) in placement.layers.iter_mut().enumerate() {
        if let Some(other) = of(l).filter(|_| sizes.spec.experts_of(l).is_some()) {
            *at = other;
        }
    }
    placement
}

/// The faster of two placements, by the time that `work` takes: with the experts of the first blocks on the host, and with those of blocks
/// spread evenly there, copied to the GPU for steps of as many rows of prompts as pay. Each has as few blocks of `blocks` as `fits` takes.
/// Returns how many these are, and what `fits` made of it; `None` if none fits.
pub fn experts_for_requests<T>(
    source: &dyn CostSource,
    sizes: &Sizes,
    work: &Workload,
    blocks: RangeInclusive<usize>,
    fits: impl Fn(Placement) -> Option<T>,
) -> Option<(usize, T)> {
    let mut best: Option<(f64, usize, T)> = None;
    for (streams, place) in [(false, experts_on_host as fn(&Sizes, usize) -> Placement), (true, spread)] {
        let found = blocks.clone().find_map(|n| fits(place(sizes, n)).map(|fitting| (n, fitting)));
        let Some((n, mut fitting)) = found else { continue };
        let (mut placement, mut seconds, mut pays) = (place(sizes, n), 0.0, true);
        source.ask(sizes, &mut |costs| {
            if streams {
                let rows = stream_rows(costs, sizes, &placement, work.chunk);
                (pays, placement.stream_rows) = (rows.is_some(), rows.unwrap_or(0));
            }
            let all = Placement { device_pages: usize::MAX >> 1, ..placement.clone() };
            let t = price(costs, sizes, &all, work);
            seconds = t.prefill + work.gen_len as f64 * t.step;
        });
        if !pays || best.as_ref().is_some_and(|best| best.0 <= seconds) {
            continue;
        }
        if streams {
            // The same memory, with the number of rows.
            fitting = fits(placement)?;
        }
        best = Some((seconds, n, fitting));
    }
    best.map(|(_, n, fitting)| (n, fitting))
}
