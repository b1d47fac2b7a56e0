//! What a scheduler weighs, from any [`Costs`]: closed sums over layers for the parts, the virtual machine for whole iterations.
//!
//! ```text
//! linear            Σ over layers: products with weights, append                         of the device
//! attention         Σ over layers: one pass over keys and values                         of the device, or of the host with its append
//! iteration         Short: programs of a few layers on the virtual machine
//!   asynchronous    the device's rows alone, and what each cohort that joins adds        (all are taken to be ready)
//! ```

use super::cost::{Costs, Direction, Group as Alike, Scan};
use super::short::{Seconds, Short};
use super::sizes::Sizes;
use crate::Result;
use crate::cache::PAGE_TOKENS;
use crate::program::{Flow, Group, Iteration, Placement, Side, SubBatch, Sublayer};
use crate::sched::Predict;

/// The sublayers with weights.
const PRODUCTS: [Sublayer; 4] = [Sublayer::Qkv, Sublayer::Out, Sublayer::Up, Sublayer::Down];

/// Predicts for one model on one placement.
pub struct Predicted<'a> {
    costs: &'a dyn Costs,
    sizes: &'a Sizes,
    short: Short<'a>,
}

impl<'a> Predicted<'a> {
    /// See the [module](self).
    pub fn new(costs: &'a dyn Costs, sizes: &'a Sizes, placement: &Placement) -> Predicted<'a> {
        Predicted { costs, sizes, short: Short::new(costs, sizes, placement) }
    }

    /// An iteration in lock step, or one sub-batch after the other: what it takes and how busy each unit is.
    ///
    /// # Errors
    /// An iteration that cannot be lowered.
    pub fn seconds(&self, iteration: &Iteration) -> Result<Seconds> {
        self.short.seconds(iteration)
    }

    /// The rows of an asynchronous iteration that are the device's, as an iteration of their own; `None` if there are none and
    /// no page moves.
    pub fn resident(iteration: &Iteration) -> Option<Iteration> {
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

    /// What a cohort of an asynchronous iteration adds to the device's lane, between two of its attentions: seconds of its kernels, and of
    /// what they and copies read and write of host memory. It has a sub-batch of its own: products read the weights of its layer again.
    pub fn joined(&self, cohort: &SubBatch) -> (f64, f64) {
        let (costs, own) = (self.costs, u64::from(cohort.rows()));
        let spec = &self.sizes.spec;
        let (q, kv) = (spec.q_dim() as u64, spec.kv_dim() as u64);
        let layers = self.sizes.layers() as u32;
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
    pub fn cohort_attention(&self, groups: &[Group], layer: usize) -> f64 {
        let window = self.sizes.blocks[layer].window;
        let of = |g: &Group| {
            let alike = Alike { sequences: 1, rows: g.tokens.into(), past: g.first.into(), causal: true };
            Scan { rows: g.tokens.into(), kv_tokens: alike.tokens_read(window), pairs: alike.pairs(window) }
        };
        self.host_layer(layer, &groups.iter().map(of).fold(Scan::default(), Scan::plus))
    }

    fn host_layer(&self, layer: usize, scan: &Scan) -> f64 {
        let costs = self.costs;
        let attend = costs.attend(Side::Host, layer, scan).max(costs.launch(Side::Host));
        self.append(Side::Host, layer, scan.rows) + attend
    }

    /// Keys and values of rows, read as f32 and written as 16 bits.
    fn append(&self, side: Side, layer: usize, rows: u64) -> f64 {
        let bytes = 3 * rows * 2 * self.sizes.spec.kv_dim() as u64;
        self.costs.append(side, layer, rows, bytes).max(self.costs.launch(side))
    }

    /// What rows of sequences that are alike attend in a layer with its window.
    fn windowed(&self, layer: usize, rows: u64, kv_tokens: u64, pairs: u64) -> Scan {
        match self.sizes.blocks[layer].window {
            None => Scan { rows, kv_tokens, pairs },
            Some(w) => Scan { rows, kv_tokens: kv_tokens.min(rows * w), pairs: pairs.min(rows * w) },
        }
    }

    /// The sum over layers, of which those that are alike are asked once.
    fn sum(&self, of: impl Fn(usize) -> f64) -> f64 {
        self.short.kinds().map(|(layer, count)| count as f64 * of(layer)).sum()
    }
}

impl Predict for Predicted<'_> {
    fn linear(&self, rows: u64) -> f64 {
        if rows == 0 {
            return 0.0;
        }
        let least = self.costs.launch(Side::Device);
        self.sum(|layer| {
            let product = |s: &Sublayer| self.costs.product(Side::Device, layer, *s, rows).max(least);
            PRODUCTS.iter().map(product).sum::<f64>() + self.append(Side::Device, layer, rows)
        })
    }

    fn device_attention(&self, rows: u64, kv_tokens: u64, pairs: u64) -> f64 {
        if rows == 0 {
            return 0.0;
        }
        let least = self.costs.launch(Side::Device);
        self.sum(|layer| {
            let scan = self.windowed(layer, rows, kv_tokens, pairs);
            self.costs.attend(Side::Device, layer, &scan).max(least)
        })
    }

    fn host_attention(&self, rows: u64, kv_tokens: u64) -> f64 {
        if rows == 0 {
            return 0.0;
        }
        let alone =
            self.sum(|layer| self.host_layer(layer, &self.windowed(layer, rows, kv_tokens, kv_tokens)));
        // Pages move in the iterations of whoever asks.
        alone / self.costs.beside_copies()
    }

    fn swap(&self, pages: u64) -> f64 {
        // A copy for each layer.
        let bytes = pages * PAGE_TOKENS as u64 * self.sizes.kv_token();
        self.sizes.layers() as f64 * self.costs.pages(Direction::ToHost, pages, bytes)
    }

    fn launch(&self) -> f64 {
        // Queries down and results up: the latency of both.
        [Direction::ToHost, Direction::ToDevice].map(|way| self.costs.transfer(way, 1)).iter().sum()
    }

    fn layers(&self) -> u32 {
        self.sizes.layers() as u32
    }

    /// What cannot be lowered takes for ever.
    fn iteration(&self, iteration: &Iteration) -> f64 {
        if iteration.flow != Flow::Async {
            return self.seconds(iteration).map_or(f64::INFINITY, |t| t.all);
        }
        let alone = Self::resident(iteration).map_or(Ok(0.0), |i| self.seconds(&i).map(|t| t.all));
        let Ok(alone) = alone else { return f64::INFINITY };
        let cohorts = iteration.sub_batches.iter().skip(1).filter(|b| !b.groups.is_empty());
        let added = cohorts.map(|cohort| {
            let (gpu, link) = self.joined(cohort);
            gpu + link
        });
        alone + added.sum::<f64>()
    }
}
