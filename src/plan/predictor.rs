//! Seconds that schedulers ask for, by the same costs and programs that placements are priced with.
//!
//! ```text
//! linear, attention, swap, launch    Σ over kinds of layers · how many layers are of the kind
//! iteration                          a program of a few layers on the virtual machine, and what a layer more takes
//! ```
//! A scheduler asks several times a step, with a thousand requests in flight. So rows that go the same way are one group of a small
//! program that stands for all of them: operations depend on sums over its rows only. Programs of one shape differ in these sums
//! alone; they are lowered once. Layers that are alike follow each other in runs; of each run a few are priced, and the
//! others take as long as the last of these.

mod shape;

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use self::shape::{Kinds, Rows, Run, Shape, Template};
use super::cost::{Costs, Direction, Scan};
use super::operation::{OpCosts, slower_beside_copies};
use super::sizes::Sizes;
use super::step_times::Source;
use crate::cache::PAGE_TOKENS;
use crate::program::virtual_machine::{Costs as _, run, run_timed};
use crate::program::{
    Iteration, Kind, Kv, LayerPlacement, Placement, Residence, Side, Sublayer, Unit, lower,
};
use crate::sched::Predict;

/// See the [module](self).
pub struct Predictor {
    source: Arc<dyn Source>,
    sizes: Sizes,
    placement: Placement,
    kinds: Kinds,
    linear: RefCell<HashMap<u64, f64>>,
    templates: RefCell<HashMap<Shape, Arc<Template>>>,
}

/// Shapes that are kept. There are few: orders of a handful of classes.
const MOST_TEMPLATES: usize = 512;

impl Predictor {
    /// Of a model of these sizes, placed so.
    pub fn new(source: impl Source + 'static, sizes: Sizes, placement: Placement) -> Predictor {
        Predictor::of(Arc::new(source), sizes, placement)
    }

    /// The same of a source that is shared.
    pub fn of(source: Arc<dyn Source>, sizes: Sizes, placement: Placement) -> Predictor {
        let kinds = Kinds::of(&sizes, &placement);
        Predictor {
            source,
            sizes,
            placement,
            kinds,
            linear: RefCell::default(),
            templates: RefCell::default(),
        }
    }

    /// Where the model is.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// An iteration as it is: every layer, every group. What [`Predict::iteration`] is held against.
    ///
    /// # Errors
    /// It cannot be lowered: see [`lower()`].
    pub fn exact(&self, iteration: &Iteration) -> crate::Result<f64> {
        let program = lower(&self.placement, iteration)?;
        Ok(self.ask(|costs| {
            let costs = OpCosts::new(costs, &self.sizes).of(iteration).on(&self.placement).beside(&program);
            run(&program, &costs).seconds()
        }))
    }

    /// The products of decode rows that are the host's.
    fn host_products(&self, rows: u64) -> f64 {
        let weighted = [Sublayer::Qkv, Sublayer::Out, Sublayer::Up, Sublayer::Down];
        self.sum(|costs, layer, at| {
            let own = weighted.into_iter().filter(|&s| at.decode.side(s) == Side::Host);
            own.map(|s| costs.product(Side::Host, layer, s, rows).max(costs.launch(Side::Host))).sum()
        })
    }

    fn ask(&self, question: impl Fn(&dyn Costs) -> f64) -> f64 {
        let mut seconds = 0.0;
        self.source.ask(&self.sizes, &mut |costs| seconds = question(costs));
        seconds
    }

    /// A sum over layers: each kind's first layer, times how many there are.
    fn sum(&self, of: impl Fn(&dyn Costs, usize, &LayerPlacement) -> f64) -> f64 {
        self.ask(|costs| {
            let each = self.kinds.counts.iter();
            each.map(|&(layer, n)| n as f64 * of(costs, layer, &self.placement.layers[layer])).sum()
        })
    }

    fn scan(&self, layer: usize, scan: Scan) -> Scan {
        match self.sizes.blocks[layer].window {
            // Each row sees at most the window.
            Some(w) => Scan {
                kv_tokens: scan.kv_tokens.min(scan.rows * w),
                pairs: scan.pairs.min(scan.rows * w),
                ..scan
            },
            None => scan,
        }
    }

    /// Seconds of an iteration by the programs of its shape.
    fn price(&self, template: &Template, iteration: &Iteration) -> f64 {
        let windows = &self.kinds.windows;
        let rows: Vec<_> = iteration.sub_batches.iter().map(|b| Rows::of(b, windows)).collect();
        self.ask(|costs| self.run(template, iteration, &rows, costs))
    }

    fn run(&self, template: &Template, iteration: &Iteration, rows: &[Vec<Rows>], costs: &dyn Costs) -> f64 {
        let windows = &self.kinds.windows;
        let by_op = OpCosts::new(costs, &self.sizes);
        let edges = by_op.of(iteration).on(&self.placement);
        let seconds = |run: &Run| -> f64 {
            let alone = |i: usize, slower: f64| {
                let op = run.filled(i, rows, &self.sizes, windows);
                match (op.kind, op.layer) {
                    // Windows have been applied.
                    (Kind::Attend { .. }, Some(layer)) => {
                        let side = if op.unit == Unit::Host { Side::Host } else { Side::Device };
                        let work = &op.work;
                        let scan = Scan { rows: work.rows, kv_tokens: work.kv_tokens, pairs: work.pairs };
                        let slower = if side == Side::Host { slower } else { 1.0 };
                        (costs.attend(side, layer as usize, &scan) * slower).max(costs.launch(side))
                    }
                    _ => by_op.seconds(&op),
                }
            };
            let each = run.program.ops.iter().enumerate().map(|(i, op)| (op, alone(i, 1.0)));
            let slower = slower_beside_copies(costs, each);
            let of = |i: usize| alone(i, slower);
            run_timed(&run.program, &run.waits, &edges, &of).seconds()
        };
        let base = seconds(&template.base);
        template.longer.iter().map(|(more, layers)| layers * (seconds(more) - base)).sum::<f64>() + base
    }
}

impl Predict for Predictor {
    fn linear(&self, rows: u64) -> f64 {
        if let Some(&seconds) = self.linear.borrow().get(&rows) {
            return seconds;
        }
        let weighted = [Sublayer::Qkv, Sublayer::Out, Sublayer::Up, Sublayer::Down];
        let seconds = self.sum(|costs, layer, at| {
            let policy = at.decode;
            let product = |s| costs.product(policy.side(s), layer, s, rows).max(costs.launch(policy.side(s)));
            let kv = 2 * self.sizes.spec.kv_dim() as u64 * rows;
            let append = costs.append(at.kv, layer, rows, 3 * kv).max(costs.launch(at.kv));
            let products = weighted.into_iter().map(product).sum::<f64>() + append;
            match at.weights {
                Residence::Streamed => {
                    let bytes = self.sizes.blocks[layer].total().device;
                    products.max(costs.transfer(Direction::ToDevice, bytes))
                }
                _ => products,
            }
        });
        self.linear.borrow_mut().insert(rows, seconds);
        seconds
    }

    fn device_attention(&self, rows: u64, kv_tokens: u64, pairs: u64) -> f64 {
        let scan = Scan { rows, kv_tokens, pairs };
        self.sum(|costs, layer, at| {
            costs.attend(at.kv, layer, &self.scan(layer, scan)).max(costs.launch(at.kv))
        })
    }

    fn host_attention(&self, rows: u64, kv_tokens: u64) -> f64 {
        let scan = Scan { rows, kv_tokens, pairs: kv_tokens };
        let host = Side::Host;
        // Pages move in the iterations of whoever asks.
        self.sum(|costs, layer, _| {
            let alone = costs.attend(host, layer, &self.scan(layer, scan)).max(costs.launch(host));
            alone / costs.beside_copies()
        })
    }

    fn swap(&self, pages: u64) -> f64 {
        let layers = self.placement.layers.iter().filter(|l| l.kv == Side::Device).count() as u64;
        if pages * layers == 0 {
            return 0.0;
        }
        let bytes = pages * layers * PAGE_TOKENS as u64 * self.sizes.kv_token();
        let way = |costs: &dyn Costs, direction| costs.pages(direction, pages * layers, bytes);
        self.ask(|costs| way(costs, Direction::ToDevice).max(way(costs, Direction::ToHost)))
    }

    fn launch(&self) -> f64 {
        let one = |costs: &dyn Costs, direction| costs.transfer(direction, 1);
        self.ask(|costs| {
            one(costs, Direction::ToHost) + one(costs, Direction::ToDevice) + costs.launch(Side::Host)
        })
    }

    fn layers(&self) -> u32 {
        self.placement.layers.len() as u32
    }

    fn token_iterations(&self) -> u32 {
        self.placement.cohort_iterations()
    }

    fn cohort(&self, rows: u64, kv_tokens: u64) -> f64 {
        let stops = self.token_iterations() - 1;
        (self.host_attention(rows, kv_tokens) + self.host_products(rows)) / f64::from(stops.max(1))
    }

    fn host_part(&self, iteration: &Iteration) -> f64 {
        let groups = || iteration.sub_batches.iter().flat_map(|b| &b.groups);
        let rows: u64 = groups().map(|g| u64::from(g.tokens)).sum();
        let kv_tokens = groups().map(|g| u64::from(g.end())).sum();
        let pairs = groups().map(|g| u64::from(g.tokens) * u64::from(g.end())).sum();
        let scan = Scan { rows, kv_tokens, pairs };
        let attends = |costs: &dyn Costs, layer, at: &LayerPlacement| match at.kv {
            Side::Host => costs.attend(Side::Host, layer, &self.scan(layer, scan)),
            Side::Device => 0.0,
        };
        self.host_products(rows) + self.sum(attends)
    }

    /// An iteration that cannot be lowered takes for ever: nobody chooses it.
    fn iteration(&self, iteration: &Iteration) -> f64 {
        let groups = || iteration.sub_batches.iter().flat_map(|b| &b.groups);
        let split = groups().any(|g| matches!(g.kv, Kv::Split { .. }));
        if split || self.kinds.streams_decode || !iteration.moves.is_empty() {
            return self.exact(iteration).unwrap_or(f64::INFINITY);
        }
        let shape = Shape::of(iteration, &self.kinds);
        let known = self.templates.borrow().get(&shape).cloned();
        let template = match known {
            Some(template) => template,
            None => {
                let Ok(made) = Template::new(&shape, &self.placement, &self.kinds) else {
                    return f64::INFINITY;
                };
                let mut all = self.templates.borrow_mut();
                if all.len() == MOST_TEMPLATES {
                    all.clear();
                }
                let made = Arc::new(made);
                all.insert(shape, made.clone());
                made
            }
        };
        self.price(&template, iteration)
    }
}
