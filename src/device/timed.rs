//! An emulated accelerator whose operations take modelled time: the bytes and FLOPs of each call, divided by the rates
//! of a machine.
//!
//! ```text
//! product      weights as they lie in memory + the rows' 16-bit inputs        FLOPs 2·rows·n·k
//! attend       tokens that some row sees (cuda/attention_*.cu) + queries + outputs      FLOPs 4·pairs·q_dim
//! publish      rows of q|k|v over the link; collect, merge: rows of results   latency + bytes
//! page moves   whole pages over the link                                      latency + bytes
//! launch       of each kernel of a call (`device/launches.rs`), beside its work
//! elementwise  residual stream, deltas, q|k|v: what does not stay in the level-two cache
//! ```
//! Times follow from the arguments of a call, padding rows included, and not from a program, so that the prediction for
//! a program can be compared with running it. The runtime below times copies and lists.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use super::accelerator::{
    Accelerator, Attend, ExpertWeights, FeedForward, LayerPages, LayerWeights, Limits, LinearSource,
    LinearWeight, Mailbox, PageMove, Publish, Residual, RowOp, Shape, Step, StepContext, StepDesc, UpWeight,
    Workspace,
};
use super::clock::{Clock, Rates, Work};
use super::emulated::EmulatedRuntime;
use super::launches::Launches;
use super::runtime::{DevPtr, Lane, Runtime};
use crate::Result;
use crate::cache::PAGE_TOKENS;
use crate::host::Pool;
use crate::model::distinct;
use crate::tensor::{DType, Half};

/// Bytes of activations that a level-two cache keeps from one kernel to the next: 4 MiB, as on a T4, since machine
/// descriptions do not state it.
const CACHE: usize = 4 << 20;

/// See the [module](self).
pub struct Timed {
    inner: Arc<dyn Accelerator>,
    emulated: Arc<EmulatedRuntime>,
    clock: Arc<Clock>,
}

/// A step with the sizes that determine the cost of its attention.
struct TimedStep {
    inner: Arc<dyn Any + Send + Sync>,
    seqs: Vec<Extent>,
}

/// Consecutive rows of a sequence.
struct Extent {
    row0: usize,
    n_rows: usize,
    first_pos: usize,
    attend: Attend,
}

impl Extent {
    /// The tokens that row `row` of the step sees on this device.
    fn sees(&self, row: usize, window: Option<usize>) -> Range<usize> {
        let end = self.first_pos + row - self.row0 + 1;
        let first = window.map_or(0, |w| end.saturating_sub(w));
        let here = match self.attend {
            Attend::Here => 0..end,
            Attend::From { from } | Attend::Since { from } => from..end,
            Attend::UpTo { to } => 0..to,
            Attend::Elsewhere => 0..0,
        };
        here.start.max(first).min(here.end)..here.end
    }
}

fn linear(w: &LinearWeight, rows: usize) -> Work {
    let bias = if w.bias.is_null() { 0 } else { 4 * w.n };
    let bytes = w.n * w.dtype.row_bytes(w.k).unwrap_or_default() + bias + 2 * rows * w.k;
    Work { flops: 2 * (rows * w.n * w.k) as u64, bytes: bytes as u64 }
}

fn ups(up: &UpWeight, rows: usize) -> Work {
    match up {
        UpWeight::GateUp(w) | UpWeight::Plain(w) => linear(w, rows),
        UpWeight::Separate(gate, up) => sum([linear(gate, rows), linear(up, rows)]),
    }
}

/// The matrices of the experts here that so many rows are expected to use, each expert here as likely as any other; `w` is that of
/// one.
fn of_experts(w: Work, of: &ExpertWeights, rows: usize) -> Work {
    let read = distinct(of.here, of.uses, rows as u64);
    let choices = rows as f64 * of.uses;
    Work { flops: (w.flops as f64 * choices).round() as u64, bytes: (w.bytes as f64 * read).round() as u64 }
}

/// The router, the first matrices of the chosen experts and of the shared one; and bytes of the activations.
fn experts_up(shape: &Shape, w: &ExpertWeights, rows: usize) -> (Work, usize) {
    let Some(e) = &shape.experts else { return (Work::default(), 0) };
    let (d, gate) = (shape.d_model, usize::from(w.shared.is_some()));
    let router = 4 * (e.count + gate) * d;
    let route = Work { flops: (2 * rows * d * (e.count + gate)) as u64, bytes: router as u64 };
    let one = linear(&w.up, 0);
    let one = Work { flops: (2 * 2 * d * e.d_ff) as u64, ..one };
    let shared = w.shared.as_ref().map_or(Work::default(), |(mlp, _)| ups(&mlp.up, rows));
    if w.is_divided() {
        return (sum([route, shared]), 2 * rows * e.shared);
    }
    // Rows are copied to the places of their choices, and read there.
    let (inputs, outputs) = (4 * rows * e.used * d, 2 * rows * (e.used * e.d_ff + e.shared));
    (sum([route, of_experts(one, w, rows), shared]), inputs + outputs)
}

/// The second matrices, and the sum; with the first ones of those that are here, if the host computes others.
fn experts_down(shape: &Shape, w: &ExpertWeights, rows: usize) -> Work {
    let Some(e) = &shape.experts else { return Work::default() };
    let one = Work { flops: (2 * shape.d_model * e.d_ff) as u64, ..linear(&w.down, 0) };
    let shared = w.shared.as_ref().map_or(Work::default(), |(mlp, _)| linear(&mlp.down, rows));
    let inputs = memory(2 * rows * e.used * e.d_ff);
    let first = match w.is_divided() {
        true => {
            let one = Work { flops: (2 * 2 * shape.d_model * e.d_ff) as u64, ..linear(&w.up, 0) };
            let choices = (rows as f64 * w.uses).round() as usize;
            sum([of_experts(one, w, rows), activations(choices * (4 * shape.d_model + 2 * e.d_ff))])
        }
        false => Work::default(),
    };
    sum([first, of_experts(one, w, rows), shared, inputs, activations(8 * rows * e.used * shape.d_model)])
}

fn sum(parts: impl IntoIterator<Item = Work>) -> Work {
    parts
        .into_iter()
        .fold(Work::default(), |a, b| Work { flops: a.flops + b.flops, bytes: a.bytes + b.bytes })
}

/// Memory traffic of activations that pass from one kernel to another.
fn activations(bytes: usize) -> Work {
    Work { flops: 0, bytes: bytes.saturating_sub(CACHE) as u64 }
}

fn memory(bytes: usize) -> Work {
    Work { flops: 0, bytes: bytes as u64 }
}

impl Timed {
    /// Wraps `inner`, which runs on the lanes of `emulated`, which keeps `clock`.
    pub fn new(inner: Arc<dyn Accelerator>, emulated: Arc<EmulatedRuntime>, clock: Arc<Clock>) -> Timed {
        Timed { inner, emulated, clock }
    }

    fn rates(&self) -> &Rates {
        self.clock.rates()
    }

    fn step<'a>(&self, cx: &'a StepContext<'_>) -> &'a TimedStep {
        cx.step.inner.downcast_ref().expect("a step that this accelerator prepared")
    }

    /// hidden += residual.
    fn added(&self, cx: &StepContext<'_>, residual: Residual, rows: usize) -> Work {
        match residual {
            Residual::None => Work::default(),
            _ => activations(rows * 12 * cx.shape.d_model),
        }
    }

    /// hidden += residual, x = norm(hidden), and the products of x.
    fn normed(&self, cx: &StepContext<'_>, residual: Residual, rows: usize, products: Work) -> Work {
        let norm = activations(rows * 6 * cx.shape.d_model);
        sum([self.added(cx, residual, rows), norm, memory(4 * cx.shape.d_model), products])
    }

    fn projected(&self, cx: &StepContext<'_>, layer: &LayerWeights, residual: Residual, rows: usize) -> Work {
        let products = sum(layer.qkv.iter().map(|w| linear(w, rows)));
        // The parts share their inputs.
        let again = 2 * rows * cx.shape.d_model * layer.qkv.len().saturating_sub(1);
        let products = Work { bytes: products.bytes - again as u64, ..products };
        self.normed(cx, residual, rows, products)
    }

    /// Rounding queries, keys and values; keys and values go to memory.
    fn appended(&self, cx: &StepContext<'_>, rows: usize) -> Work {
        let (width, kv) = (cx.shape.qkv_dim(), cx.shape.kv_dim());
        sum([activations(4 * rows * width), memory(4 * rows * kv)])
    }

    fn published(&self, cx: &StepContext<'_>, publish: &Publish<'_>, rows: &Range<usize>) -> f64 {
        let row = Mailbox::ELEMENT * publish.what.width(cx.shape);
        self.rates().download(row * cx.step.lists.published_in(rows).len())
    }

    fn attended(&self, cx: &StepContext<'_>, layer: &LayerWeights, rows: &Range<usize>) -> Work {
        let shape = cx.shape;
        let window = shape.window.filter(|_| layer.windowed);
        let (mut tokens, mut pairs, mut n) = (0, 0, 0);
        for s in &self.step(cx).seqs {
            let own = s.row0.max(rows.start)..(s.row0 + s.n_rows).min(rows.end);
            if own.is_empty() || s.attend == Attend::Elsewhere {
                continue;
            }
            let (first, last) = (s.sees(own.start, window), s.sees(own.end - 1, window));
            tokens += last.end.saturating_sub(first.start);
            pairs += own.clone().map(|row| s.sees(row, window).len()).sum::<usize>();
            n += own.len();
        }
        let bytes = tokens * shape.page_bytes() / PAGE_TOKENS + 4 * n * shape.q_dim();
        Work { flops: 4 * (pairs * shape.q_dim()) as u64, bytes: bytes as u64 }
    }

    /// Seconds of moving pages of some layers between the device and the host's sides, which may also lie in the device's
    /// memory.
    fn moved(&self, shape: &Shape, layers: &[LayerPages], pages: usize, to_host: bool) -> f64 {
        let bytes = layers.len() * pages * shape.page_bytes();
        match (layers.iter().all(|l| self.emulated.is_host(l.host)), to_host) {
            (true, true) => self.rates().download(bytes),
            (true, false) => self.rates().upload(bytes),
            (false, _) => self.rates().device.seconds(memory(2 * bytes)),
        }
    }

    /// Seconds of an operation.
    fn seconds(&self, cx: &StepContext<'_>, op: RowOp<'_>, rows: &Range<usize>) -> Result<f64> {
        let (n, shape, rates) = (rows.len(), cx.shape, self.rates());
        let passed = |width: usize| activations(4 * n * width);
        let (work, launches) = match op {
            RowOp::Embed(weight) => {
                let row = weight.dtype.row_bytes(shape.d_model).unwrap_or_default();
                (sum([memory(n * row), passed(shape.d_model)]), Launches::EMBED)
            }
            RowOp::Fold(residual) => (self.added(cx, residual, n), 0),
            RowOp::Project { layer, residual } => (self.projected(cx, layer, residual, n), Launches::PROJECT),
            RowOp::Append { .. } => (self.appended(cx, n), Launches::APPEND),
            RowOp::Publish(publish) => return Ok(self.published(cx, &publish, rows)),
            RowOp::Qkv { layer, residual, publish, .. } => {
                let work = sum([self.projected(cx, layer, residual, n), self.appended(cx, n)]);
                let link = publish.map_or(0.0, |p| self.published(cx, &p, rows));
                return Ok(rates.device_operation(work, Launches::PROJECT + Launches::APPEND) + link);
            }
            RowOp::Attend { layer, .. } => (self.attended(cx, layer, rows), Launches::ATTEND),
            RowOp::Merge { other, .. } => {
                let n = cx.step.lists.partial_in(rows).len();
                let part = 4 * n * (shape.q_dim() + 2 * shape.n_heads);
                let far = if self.emulated.is_host(other.o) { rates.upload(part) } else { 0.0 };
                return Ok(far + rates.device.seconds(activations(2 * part + 2 * n * shape.q_dim())));
            }
            RowOp::Collect(_) => {
                let n = cx.step.lists.elsewhere_in(rows).len();
                return Ok(rates.upload(Mailbox::ELEMENT * n * shape.q_dim()));
            }
            RowOp::OutProj(layer) => (sum([linear(&layer.o, n), passed(shape.d_model)]), Launches::OUT),
            RowOp::FfnUp { layer, residual } => {
                let (products, bytes) = match &layer.ffn {
                    FeedForward::Experts(e) => experts_up(shape, e, n),
                    other => (ups(&other.dense()?.up, n), 2 * n * shape.d_ff),
                };
                let launches = match &layer.ffn {
                    FeedForward::Experts(e) if e.is_divided() => Launches::DIVIDED[0],
                    ffn => Launches::up(matches!(ffn, FeedForward::Experts(_))),
                };
                (sum([self.normed(cx, residual, n, products), activations(bytes)]), launches)
            }
            RowOp::FfnDown(layer) => {
                let product = match &layer.ffn {
                    FeedForward::Experts(e) => experts_down(shape, e, n),
                    other => linear(&other.dense()?.down, n),
                };
                let launches = match &layer.ffn {
                    FeedForward::Experts(e) if e.is_divided() => Launches::DIVIDED[1],
                    ffn => Launches::down(matches!(ffn, FeedForward::Experts(_))),
                };
                (sum([product, passed(shape.d_model)]), launches)
            }
            RowOp::AddShare(_) => (passed(3 * shape.d_model), Launches::ADD),
            RowOp::Logits { head, residual, .. } => {
                let n = cx.step.lists.logits_in(rows).len();
                let work = match n {
                    0 => Work::default(),
                    n => self.normed(cx, residual, n, linear(head, n)),
                };
                (sum([work, activations(4 * n * shape.vocab)]), Launches::HEAD)
            }
            RowOp::Argmax => {
                let n = cx.step.lists.logits_in(rows).len();
                (activations(4 * n * shape.vocab), Launches::PICK)
            }
        };
        Ok(rates.device_operation(work, launches))
    }
}

impl Accelerator for Timed {
    fn runtime(&self) -> &Arc<dyn Runtime> {
        self.inner.runtime()
    }

    fn check(&self, shape: &Shape) -> Result<()> {
        self.inner.check(shape)
    }

    fn activations_for(&self, dtype: DType) -> Option<Half> {
        self.inner.activations_for(dtype)
    }

    fn multiplies_experts(&self, dtype: DType) -> bool {
        self.inner.multiplies_experts(dtype)
    }

    fn packed_bytes(&self, source: &LinearSource<'_>, act: Half) -> Result<usize> {
        self.inner.packed_bytes(source, act)
    }

    fn embeds_packed(&self, dtype: DType, act: Half, positions: bool) -> bool {
        self.inner.embeds_packed(dtype, act, positions)
    }

    fn gate_up_row(&self, i: usize, n: usize) -> (bool, usize) {
        self.inner.gate_up_row(i, n)
    }

    fn pack(&self, source: &LinearSource<'_>, act: Half, pool: &Pool, out: &mut [u8]) {
        self.inner.pack(source, act, pool, out);
    }

    fn scratch_bytes(&self, shape: &Shape, limits: &Limits, weights: &[LinearWeight]) -> usize {
        self.inner.scratch_bytes(shape, limits, weights)
    }

    fn step_bytes(&self, shape: &Shape, limits: &Limits) -> usize {
        self.inner.step_bytes(shape, limits)
    }

    fn row_bucket(&self, rows: usize) -> usize {
        self.inner.row_bucket(rows)
    }

    fn prepare(
        &self,
        lane: Lane,
        shape: &Shape,
        limits: &Limits,
        step: &StepDesc<'_>,
        memory: DevPtr,
    ) -> Result<Step> {
        let prepared = self.inner.prepare(lane, shape, limits, step, memory)?;
        let extent = |s: &super::accelerator::StepSeq<'_>| Extent {
            row0: s.row0,
            n_rows: s.n_rows,
            first_pos: s.first_pos,
            attend: s.attend,
        };
        let seqs = step.seqs.iter().filter(|s| s.n_rows > 0).map(extent).collect();
        let inner = Arc::new(TimedStep { inner: prepared.inner.clone(), seqs });
        // Recorded work would keep the times of the step that it was recorded in.
        Ok(Step { inner, graph_key: None, ..prepared })
    }

    /// Occupies the lane for the modelled time, and has the inner accelerator do it, with its own step.
    fn enqueue(&self, cx: &StepContext<'_>, op: RowOp<'_>, rows: Range<usize>) -> Result<()> {
        let step = Step { inner: self.step(cx).inner.clone(), ..cx.step.clone() };
        self.emulated.elapse(cx.lane, self.seconds(cx, op, &rows)?)?;
        self.inner.enqueue(&StepContext { step: &step, ..*cx }, op, rows)
    }

    fn top(&self, lane: Lane, shape: &Shape, ws: &Workspace, factors: &[f32]) -> Result<()> {
        // Logits are read twice.
        let work = activations(2 * 4 * factors.len() * shape.vocab);
        self.emulated.elapse(lane, self.rates().device_operation(work, Launches::TOP))?;
        self.inner.top(lane, shape, ws, factors)
    }

    fn gather_pages(
        &self,
        lane: Lane,
        shape: &Shape,
        layers: &[LayerPages],
        pages: &[PageMove],
    ) -> Result<()> {
        self.emulated.elapse(lane, self.moved(shape, layers, pages.len(), true))?;
        self.inner.gather_pages(lane, shape, layers, pages)
    }

    fn scatter_pages(
        &self,
        lane: Lane,
        shape: &Shape,
        layers: &[LayerPages],
        pages: &[PageMove],
    ) -> Result<()> {
        self.emulated.elapse(lane, self.moved(shape, layers, pages.len(), false))?;
        self.inner.scatter_pages(lane, shape, layers, pages)
    }
}
