//! Seconds that schedulers ask for, by the same costs and programs that placements are priced with.
//!
//! ```text
//! linear, attention, swap, launch    Σ over kinds of layers · how many layers are of the kind
//! iteration                          a program of a few layers on the virtual machine, and what a layer more takes
//! its moves of pages                 one operation for all that a class of rows waits for; programs of all layers
//! ```
//! A scheduler asks several times a step, with a thousand requests in flight. So rows that go the same way are one group of a small
//! program that stands for all of them: operations depend on sums over its rows only. Programs of one shape differ in these sums
//! alone; they are lowered once. Layers that are alike follow each other in runs; of each run a few are priced, and the
//! others take as long as the last of these.

mod run;
mod shape;
mod unroll;

use std::cell::{OnceCell, RefCell};
use std::collections::VecDeque;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use self::run::Run;
use self::shape::{Alike, LayerKinds, MovesToSide, Shape, Sums, Template};
use super::cost::{Costs, Direction, Scan};
use super::operation::{self, OpCosts};
use super::price;
use super::sizes::Sizes;
use super::step_times::CostSource;
use crate::Result;
use crate::cache::PAGE_TOKENS;
use crate::program::virtual_machine::{self, Costs as _, Timeline, run, run_timed};
use crate::program::{
    Flow, Iteration, Kind, LayerPlacement, Op, PerUnit, Placement, Program, Residence, Side, Sublayer, Unit,
    lower,
};
use crate::sched::Predict;

/// Seconds that a step takes, and that each unit works in it, in the order of [`Unit::ALL`].
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Seconds {
    /// From its first operation to its last.
    pub all: f64,
    /// Seconds that each unit works.
    pub busy: PerUnit<f64>,
}

impl Seconds {
    fn of(line: &Timeline) -> Seconds {
        let mut busy = PerUnit::default();
        for span in &line.spans {
            busy[span.unit] += span.end - span.start;
        }
        Seconds { all: line.seconds(), busy }
    }

    /// Combined with copies that run at the same time.
    fn beside(self, copies: Seconds) -> Seconds {
        let busy = PerUnit::from_fn(|unit| self.busy[unit] + copies.busy[unit]);
        Seconds { all: self.all.max(copies.all), busy }
    }

    /// Adds the difference between `more` and `base`, `times` times.
    fn plus(mut self, times: f64, more: Seconds, base: Seconds) -> Seconds {
        self.all += times * (more.all - base.all);
        for unit in Unit::ALL {
            self.busy[unit] += times * (more.busy[unit] - base.busy[unit]);
        }
        self
    }
}

/// Whether pages of a cohort's requests move, which no program has.
fn moves_cohorts(iteration: &Iteration) -> bool {
    let moves = |id| iteration.moves.iter().any(|m| m.request == id);
    !iteration.moves.is_empty()
        && iteration.cohorts().any(|(_, batch)| batch.groups.iter().any(|g| moves(g.request)))
}

/// Seconds before a step's first operation on the device, and behind its last.
struct Edges {
    before: f64,
    after: f64,
    /// See [`virtual_machine::Costs::beside_copies`].
    share: f64,
}

impl virtual_machine::Costs for Edges {
    fn seconds(&self, _op: &Op) -> f64 {
        0.0
    }

    fn before(&self, program: &Program, unit: Unit) -> f64 {
        let is_used = || program.ops.iter().any(|op| op.unit == Unit::Gpu);
        if unit == Unit::Gpu && is_used() { self.before } else { 0.0 }
    }

    fn beside_copies(&self) -> f64 {
        self.share
    }

    fn after(&self, _program: &Program) -> f64 {
        self.after
    }
}

/// The products of decode rows in a layer that are the host's: those that follow its own work, and those between products of the device,
/// which waits for them: experts.
pub(crate) fn products_of_host(
    costs: &dyn Costs,
    sizes: &Sizes,
    layer: usize,
    at: &LayerPlacement,
    rows: u64,
) -> [f64; 2] {
    let device_goes_on = at.decode.side(Sublayer::Out) == Side::Device;
    let mut seconds = [0.0; 2];
    for s in Sublayer::PRODUCTS.into_iter().filter(|&s| at.decode.side(s) == Side::Host) {
        let between = device_goes_on && matches!(s, Sublayer::Up | Sublayer::Down);
        seconds[usize::from(between)] +=
            costs.product(Side::Host, layer, s, rows).max(costs.launch(Side::Host));
    }
    if at.is_divided() {
        let share = price::experts_of_side(costs, sizes, layer, at, Side::Host, rows);
        seconds[1] += share.max(costs.launch(Side::Host));
    }
    seconds
}

/// See the [module](self).
pub struct Predictor {
    source: Arc<dyn CostSource>,
    sizes: Sizes,
    placement: Placement,
    kinds: LayerKinds,
    linear: RefCell<FxHashMap<u64, f64>>,
    launch: OnceCell<f64>,
    /// See [`Costs::beside_copies`].
    share: OnceCell<f64>,
    /// Ways of attending, each with lists of its own.
    ways: usize,
    templates: RefCell<FxHashMap<Shape, Arc<Template>>>,
    /// The last answers: a strategy asks of the same step more than once.
    answers: RefCell<VecDeque<(Shape, Sums, Seconds)>>,
}

/// Answers that are kept.
const MOST_ANSWERS: usize = 8;

/// Shapes that are kept. There are few: orders of a handful of classes.
const MOST_TEMPLATES: usize = 512;

impl Predictor {
    /// A predictor for a model of these sizes with this placement.
    pub fn new(source: impl CostSource + 'static, sizes: Sizes, placement: Placement) -> Predictor {
        Predictor::of(Arc::new(source), sizes, placement)
    }

    /// The same of a source that is shared.
    pub fn of(source: Arc<dyn CostSource>, sizes: Sizes, placement: Placement) -> Predictor {
        let kinds = LayerKinds::of(&sizes, &placement);
        let ways = operation::ways(&placement);
        Predictor {
            source,
            sizes,
            placement,
            kinds,
            linear: RefCell::default(),
            launch: OnceCell::new(),
            share: OnceCell::new(),
            ways,
            templates: RefCell::default(),
            answers: RefCell::default(),
        }
    }

    /// Where the model is.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// The model's sizes.
    pub fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    /// Prices an iteration in full: every layer, every group. The reference for [`Predictor::seconds`].
    ///
    /// # Errors
    /// It cannot be lowered: see [`lower()`].
    pub fn exact(&self, iteration: &Iteration) -> Result<Seconds> {
        let program = lower(&self.placement, iteration)?;
        Ok(self.ask(|costs| {
            let costs = OpCosts::new(costs, &self.sizes).of(iteration).on(&self.placement);
            Seconds::of(&run(&program, &costs))
        }))
    }

    /// The products of decode rows that are the host's, in all layers.
    fn host_products(&self, rows: u64) -> f64 {
        self.sum(|costs, layer, at| products_of_host(costs, &self.sizes, layer, at, rows).iter().sum())
    }

    /// What an iteration takes, cohorts taken to be ready, and how busy each unit is in it.
    ///
    /// # Errors
    /// It cannot be lowered: see [`lower()`].
    pub fn seconds(&self, iteration: &Iteration) -> Result<Seconds> {
        if moves_cohorts(iteration) {
            // Such pages move before the cohort begins, beside the device's rows.
            let rows = self.seconds(&Iteration { moves: Vec::new(), ..iteration.clone() })?;
            let copies = Iteration { moves: iteration.moves.clone(), ..Iteration::serial(Vec::new(), false) };
            return Ok(rows.beside(self.seconds(&copies)?));
        }
        let sums = Sums::of(iteration, &self.kinds);
        if sums.split() || self.kinds.streams_decode {
            return self.exact(iteration);
        }
        let moved = MovesToSide::of(iteration, &self.kinds);
        let shape = Shape::of(&self.placement, iteration, &self.kinds, &sums, &moved);
        if !moved.is_empty() {
            let template = self.template(&shape)?;
            return Ok(self.price(&template, iteration, &sums, &moved));
        }
        let same = |(s, rows, _): &&(Shape, Sums, Seconds)| *s == shape && *rows == sums;
        if let Some(&(.., seconds)) = self.answers.borrow().iter().find(same) {
            return Ok(seconds);
        }
        let template = self.template(&shape)?;
        let seconds = self.price(&template, iteration, &sums, &moved);
        let mut answers = self.answers.borrow_mut();
        answers.truncate(MOST_ANSWERS - 1);
        answers.push_front((shape, sums, seconds));
        Ok(seconds)
    }

    /// The programs of a shape.
    fn template(&self, shape: &Shape) -> Result<Arc<Template>> {
        if let Some(known) = self.templates.borrow().get(shape) {
            return Ok(known.clone());
        }
        let made = Arc::new(Template::new(shape, &self.placement, &self.kinds)?);
        let mut all = self.templates.borrow_mut();
        if all.len() == MOST_TEMPLATES {
            all.clear();
        }
        all.insert(shape.clone(), made.clone());
        Ok(made)
    }

    /// Asks the costs.
    pub(crate) fn ask<T: Default>(&self, question: impl Fn(&dyn Costs) -> T) -> T {
        let mut answer = T::default();
        self.source.ask(&self.sizes, &mut |costs| answer = question(costs));
        answer
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

    /// Seconds of the host to append and attend rows in one layer.
    pub(crate) fn host_layer(&self, costs: &dyn Costs, layer: usize, scan: &Scan) -> f64 {
        let attend = costs.attend(Side::Host, layer, scan).max(costs.launch(Side::Host));
        self.append(costs, Side::Host, layer, scan.rows) + attend
    }

    /// Keys and values of rows, read as f32 and written as they are stored.
    fn append(&self, costs: &dyn Costs, side: Side, layer: usize, rows: u64) -> f64 {
        let read = 4 * 2 * self.sizes.spec.kv_dim() as u64;
        let bytes = (rows * (read + self.sizes.kv_token())).div_ceil(2);
        costs.append(side, layer, rows, bytes).max(costs.launch(side))
    }

    /// Prices an iteration by the programs of its shape.
    fn price(
        &self,
        template: &Template,
        iteration: &Iteration,
        sums: &Sums,
        moved: &[MovesToSide],
    ) -> Seconds {
        self.ask(|costs| self.run(template, self.edges(iteration, sums, costs), (sums, moved), costs))
    }

    /// What comes before and after the operations: see [`OpCosts::on`].
    fn edges(&self, iteration: &Iteration, sums: &Sums, costs: &dyn Costs) -> Edges {
        let batches = || iteration.sub_batches.iter().enumerate();
        // Lists of parked cohorts are there already.
        let begins = batches().filter(|(_, batch)| !batch.groups.is_empty() && batch.at.is_none());
        let before = begins.map(|(b, _)| self.ways as f64 * operation::list(costs, sums.words(b))).sum();
        // A cohort has logits behind its last layer only.
        let ends = batches().filter(|&(b, batch)| {
            let cohort = iteration.flow == Flow::Async && b > 0;
            !cohort || batch.at.is_some() && self.placement.next_stop(batch.at).is_none()
        });
        let vocab = self.sizes.spec.vocab as u64;
        let after = match self.placement.head {
            Side::Host => 0.0,
            _ => ends.map(|(b, _)| operation::results(costs, vocab, iteration, sums.wanted(b))).sum(),
        };
        Edges { before, after, share: costs.beside_copies() }
    }

    fn run(
        &self,
        template: &Template,
        edges: Edges,
        (sums, moved): (&Sums, &[MovesToSide]),
        costs: &dyn Costs,
    ) -> Seconds {
        let stored = sums.stored(&self.sizes, &self.kinds);
        let by_op = OpCosts::new(costs, &self.sizes).reading(stored);
        let one = |op: &Op| match (op.kind, op.layer) {
            // Windows have been applied.
            (Kind::Attend { .. }, Some(layer)) => {
                let side = if op.unit == Unit::Host { Side::Host } else { Side::Device };
                let work = &op.work;
                let scan = Scan { rows: work.rows, kv_tokens: work.kv_tokens, pairs: work.pairs };
                costs.attend_beside(side, layer as usize, &scan, stored).max(costs.launch(side))
            }
            _ => by_op.seconds(op),
        };
        let takes = |alike: &Alike| {
            if let Some(at) = alike.moved {
                return self.moves(&moved[at], costs);
            }
            let mut seconds = 0.0;
            alike.filled(sums, &self.sizes, &self.kinds, |op| seconds += one(op));
            seconds
        };
        let seconds: Vec<f64> = template.ops.iter().map(takes).collect();
        let of = |run: &Run| {
            Seconds::of(&run_timed(&run.program, &run.waits, &edges, &|i| seconds[run.priced[i]]))
        };
        let base = of(&template.base);
        template.longer.iter().fold(base, |sum, (more, layers)| sum.plus(*layers, of(more), base))
    }

    /// Pages over the link, one request after the other.
    fn moves(&self, moved: &MovesToSide, costs: &dyn Costs) -> f64 {
        let direction = match moved.to {
            Side::Device => Direction::ToDevice,
            Side::Host => Direction::ToHost,
        };
        moved.pages.iter().map(|&pages| self.page_seconds(costs, direction, pages)).sum()
    }

    /// Pages of all layers with keys and values on the device, in one launch.
    fn page_seconds(&self, costs: &dyn Costs, direction: Direction, pages: u64) -> f64 {
        let layers = self.placement.layers.iter().filter(|l| l.kv == Side::Device).count() as u64;
        match pages * layers {
            0 => 0.0,
            n => costs.pages(direction, n, n * PAGE_TOKENS as u64 * self.sizes.kv_token()),
        }
    }
}

impl Predict for Predictor {
    fn linear(&self, rows: u64) -> f64 {
        if rows == 0 {
            return 0.0;
        }
        if let Some(&seconds) = self.linear.borrow().get(&rows) {
            return seconds;
        }
        let seconds = self.sum(|costs, layer, at| {
            let policy = at.decode;
            let product = |s| costs.product(policy.side(s), layer, s, rows).max(costs.launch(policy.side(s)));
            let products = Sublayer::PRODUCTS.into_iter().map(product).sum::<f64>();
            let products = products + self.append(costs, at.kv, layer, rows);
            match at.weights {
                Residence::Streamed => {
                    let bytes = self.sizes.blocks[layer].total().device;
                    products.max(costs.stream(bytes))
                }
                _ => products,
            }
        });
        self.linear.borrow_mut().insert(rows, seconds);
        seconds
    }

    fn device_attention(&self, rows: u64, kv_tokens: u64, pairs: u64) -> f64 {
        if rows == 0 {
            return 0.0;
        }
        let scan = Scan { rows, kv_tokens, pairs };
        self.sum(|costs, layer, at| {
            costs.attend(at.kv, layer, &self.scan(layer, scan)).max(costs.launch(at.kv))
        })
    }

    fn host_attention(&self, rows: u64, kv_tokens: u64) -> f64 {
        if rows == 0 {
            return 0.0;
        }
        let scan = Scan { rows, kv_tokens, pairs: kv_tokens };
        self.sum(|costs, layer, _| self.host_layer(costs, layer, &self.scan(layer, scan)))
    }

    fn swap(&self, pages: u64) -> f64 {
        let way = |costs: &dyn Costs, direction| self.page_seconds(costs, direction, pages);
        self.ask(|costs| way(costs, Direction::ToDevice).max(way(costs, Direction::ToHost)))
    }

    /// Queries down and results up: the latency of both.
    fn launch(&self) -> f64 {
        let one = |costs: &dyn Costs, direction| costs.transfer(direction, 1);
        let both = || self.ask(|costs| one(costs, Direction::ToHost) + one(costs, Direction::ToDevice));
        *self.launch.get_or_init(both)
    }

    fn copies(&self, iteration: &Iteration) -> f64 {
        match self.beside_copies() < 1.0 {
            true => self.seconds(iteration).map_or(0.0, |t| t.busy[Unit::H2d].max(t.busy[Unit::D2h])),
            false => 0.0,
        }
    }

    fn beside_copies(&self) -> f64 {
        *self.share.get_or_init(|| self.ask(|costs| costs.beside_copies()))
    }

    fn layers(&self) -> u32 {
        self.placement.layers.len() as u32
    }

    fn token_iterations(&self) -> u32 {
        self.placement.cohort_iterations()
    }

    fn next_stop(&self, at: Option<u32>) -> Option<u32> {
        self.placement.next_stop(at)
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

    /// An iteration that cannot be lowered takes forever, so that no strategy chooses it.
    fn iteration(&self, iteration: &Iteration) -> f64 {
        self.seconds(iteration).map_or(f64::INFINITY, |t| t.all)
    }
}
