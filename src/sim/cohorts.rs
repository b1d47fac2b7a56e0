//! What cohorts add to an asynchronous iteration: products of their rows on the device, attention on the host, which goes on by itself where it
//! has the products, too.

use crate::cache::PAGE_TOKENS;
use crate::plan::{Costs, Direction, Group as Alike, Scan};
use crate::plan::{Predictor, experts_of_side, products_of_host};
use crate::program::{Flow, Group, Iteration, Side, SubBatch, Sublayer};

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
        top: iteration.top,
    })
}

/// What a cohort adds to the device's lane, between two of its stops, in seconds.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Joined {
    /// Its kernels. It has a sub-batch of its own: products read the weights of its layer again.
    pub gpu: f64,
    /// What they and copies read and write of host memory.
    pub link: f64,
    /// The host's experts.
    pub experts: f64,
    /// How long the device waits for these: of a divided layer it has experts of its own meanwhile.
    pub waits: f64,
}

/// See [`Joined`].
pub(super) fn joined(predictor: &Predictor, cohort: &SubBatch) -> Joined {
    predictor.ask(|costs| joins(costs, predictor, cohort))
}

fn joins(costs: &dyn Costs, predictor: &Predictor, cohort: &SubBatch) -> Joined {
    let (sizes, placement) = (predictor.sizes(), predictor.placement());
    let own = u64::from(cohort.rows());
    let spec = &sizes.spec;
    let (q, kv, hidden) = (spec.q_dim() as u64, spec.kv_dim() as u64, spec.d_model as u64);
    let layers = sizes.layers() as u32;
    let least = costs.launch(Side::Device);
    let on_device = |layer: u32, s| placement.layers[layer as usize].decode.side(s) == Side::Device;
    let product = |layer: u32, s| costs.product(Side::Device, layer as usize, s, own).max(least);
    let (mut gpu, mut link, mut experts, mut waits) = (0.0, 0.0, 0.0, 0.0);
    match cohort.at {
        Some(l) => {
            let own_part = on_device(l, Sublayer::Out);
            link += costs.transfer(Direction::ToDevice, own * 4 * if own_part { q } else { hidden });
            let (layer, at) = (l as usize, &placement.layers[l as usize]);
            let parts = |parts: &[Sublayer]| -> f64 {
                parts.iter().filter(|&&s| on_device(l, s)).map(|&s| product(l, s)).sum()
            };
            let (device, beside) = match at.is_divided() {
                true => {
                    let own_experts = experts_of_side(costs, sizes, layer, at, Side::Device, own).max(least);
                    (parts(&[Sublayer::Out]) + own_experts, own_experts)
                }
                false => (parts(&Sublayer::PRODUCTS[1..]), 0.0),
            };
            gpu += device;
            [_, experts] = products_of_host(costs, sizes, layer, at, own);
            waits = (experts - beside).max(0.0);
            if experts > 0.0 {
                let row = costs.transfer(Direction::ToHost, own * 4 * hidden);
                link += row + costs.transfer(Direction::ToDevice, own * 4 * hidden);
            }
        }
        None => {
            // A word of its lists for each row, and for each page.
            let words = |g: &Group| 1 + u64::from(g.end()).div_ceil(PAGE_TOKENS as u64);
            link += costs.transfer(Direction::ToDevice, 4 * cohort.groups.iter().map(words).sum::<u64>());
            if placement.embedding == Side::Device {
                gpu += costs.embed(Side::Device, own).max(least);
            }
        }
    }
    let next = cohort.at.map_or(0, |l| l + 1);
    if next >= layers {
        // A token, and a sum beside it.
        link += costs.transfer(Direction::ToHost, own * 8);
        return Joined { gpu: gpu + costs.head(Side::Device, own).max(least), link, experts, waits };
    }
    if on_device(next, Sublayer::Qkv) {
        gpu += product(next, Sublayer::Qkv);
        link += costs.transfer(Direction::ToHost, own * 4 * (q + 2 * kv));
    } else {
        link += costs.transfer(Direction::ToHost, own * 4 * hidden);
    }
    Joined { gpu, link, experts, waits }
}

/// Seconds of the host from one stop of a cohort to the next: attention of the layers between, and their products where they are the
/// host's and the device does not wait for them.
pub(super) fn host_part(predictor: &Predictor, cohort: &SubBatch, stop: u32) -> (f64, f64) {
    let first = cohort.at.map_or(0, |l| l + 1);
    let of = |layer: usize| {
        let at = &predictor.placement().layers[layer];
        let of =
            |costs: &dyn Costs| products_of_host(costs, predictor.sizes(), layer, at, cohort.rows().into());
        let [products, _] = predictor.ask(of);
        (attention(predictor, &cohort.groups, layer), products)
    };
    (first..=stop).map(|layer| of(layer as usize)).fold((0.0, 0.0), |sum, of| (sum.0 + of.0, sum.1 + of.1))
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
