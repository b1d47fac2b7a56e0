//! What cohorts add to an asynchronous iteration: products of their rows on the device, attention on the host.

use crate::cache::PAGE_TOKENS;
use crate::plan::{Costs, Direction, Group as Alike, Scan};
use crate::plan::{Predictor, Sizes};
use crate::program::{Flow, Group, Iteration, Side, SubBatch, Sublayer};

/// The sublayers with weights.
const PRODUCTS: [Sublayer; 4] = [Sublayer::Qkv, Sublayer::Out, Sublayer::Up, Sublayer::Down];

/// The rows of an asynchronous iteration that are the device's, as an iteration of their own; `None` if there are none and
/// no page moves.
pub(super) fn resident(iteration: &Iteration) -> Option<Iteration> {
    let first = iteration.sub_batches.first().filter(|b| !b.groups.is_empty());
    if first.is_none() && iteration.moves.is_empty() {
        return None;
    }
    Some(Iteration {
        sub_batches: first.into_iter().cloned().collect(),
        moves: iteration.moves.clone(),
        flow: Flow::Serial,
        pick: iteration.pick,
    })
}

/// What a cohort adds to the device's lane, between two of its attentions: seconds of its kernels, and of what they and copies read and
/// write of host memory. It has a sub-batch of its own: products read the weights of its layer again.
pub(super) fn joined(predictor: &Predictor, cohort: &SubBatch) -> (f64, f64) {
    predictor.ask(|costs| joins(costs, predictor.sizes(), cohort))
}

fn joins(costs: &dyn Costs, sizes: &Sizes, cohort: &SubBatch) -> (f64, f64) {
    let own = u64::from(cohort.rows());
    let spec = &sizes.spec;
    let (q, kv) = (spec.q_dim() as u64, spec.kv_dim() as u64);
    let layers = sizes.layers() as u32;
    let least = costs.launch(Side::Device);
    let product = |layer: u32, s| costs.product(Side::Device, layer as usize, s, own).max(least);
    let (mut gpu, mut link) = (0.0, 0.0);
    match cohort.at {
        Some(l) => {
            link += costs.transfer(Direction::ToDevice, own * 4 * q);
            gpu += PRODUCTS[1..].iter().map(|&s| product(l, s)).sum::<f64>();
        }
        None => {
            // A word of its lists for each row, and for each page.
            let words = |g: &Group| 1 + u64::from(g.end()).div_ceil(PAGE_TOKENS as u64);
            link += costs.transfer(Direction::ToDevice, 4 * cohort.groups.iter().map(words).sum::<u64>());
            gpu += costs.embed(Side::Device, own).max(least);
        }
    }
    let next = cohort.at.map_or(0, |l| l + 1);
    if next >= layers {
        // A token, and a sum beside it.
        link += costs.transfer(Direction::ToHost, own * 8);
        return (gpu + costs.head(Side::Device, own).max(least), link);
    }
    link += costs.transfer(Direction::ToHost, own * 4 * (q + 2 * kv));
    (gpu + product(next, Sublayer::Qkv), link)
}

/// Seconds of the host to append and attend a cohort's rows in one layer.
pub(super) fn attention(predictor: &Predictor, groups: &[Group], layer: usize) -> f64 {
    let window = predictor.sizes().blocks[layer].window;
    let of = |g: &Group| {
        let alike = Alike { sequences: 1, rows: g.tokens.into(), past: g.first.into(), causal: true };
        Scan { rows: g.tokens.into(), kv_tokens: alike.tokens_read(window), pairs: alike.pairs(window) }
    };
    let scan = groups.iter().map(of).fold(Scan::default(), Scan::plus);
    predictor.ask(|costs| predictor.host_layer(costs, layer, &scan))
}
