//! Everything on one accelerator: weights, KV pages and all sublayers.
//!
//! ```text
//! compute   │ lists │ embed │ layer 0 … layer L-1 │ head │ argmax │        (decode: a graph from the second step on)
//! to host   │                                                      logits or tokens │
//! ```
//!
//! The baseline that hybrid strategies are measured against, and what they become when all fits.

use std::collections::HashMap;
use std::sync::Arc;

use super::executor::{Executor, Placement, Want};
use super::input::{Input, wanted_rows};
use super::iterate::Sharing;
use super::memory::{Memory, geometry};
use super::options::Options;
use super::weights::{self, DeviceWeights};
use crate::cache::{BlockTable, KvDType, PageList};
use crate::device::accelerator::{
    Accelerator, Attend, Context, Half, Limits, Residual, Shape, StepDesc, StepSeq, Workspace,
};
use crate::device::clock::Clock;
use crate::device::preload::{self, Needs};
use crate::device::runtime::{Buffer, DevPtr, Graph, Lane};
use crate::host::Pool;
use crate::model::{ModelSpec, Weights};
use crate::{Error, Result};

/// Decode steps of at most this many rows are recorded as graphs.
const GRAPH_ROWS: usize = 64;

/// See the [module](self).
pub(super) struct GpuOnly {
    accel: Arc<dyn Accelerator>,
    name: String,
    n_layers: usize,
    threads: usize,
    shape: Shape,
    limits: Limits,
    weights: DeviceWeights,
    pages: PageList,
    kv: Vec<Buffer>,
    workspace: Workspace,
    step: Buffer,
    _activations: Vec<Buffer>,
    /// By the step's key and whether tokens are wanted: `None` once such a step has run, the graph from the second on.
    graphs: HashMap<(u64, bool), Option<Graph>>,
    /// Whether the runtime records graphs; learnt at the first attempt.
    records: bool,
    logits: Vec<f32>,
    bytes: Vec<u8>,
    argmax: Vec<Option<u32>>,
    memory: Memory,
}

impl GpuOnly {
    /// Sizes everything, allocates, packs and uploads.
    ///
    /// # Errors
    /// It does not fit the device's memory (with the numbers); weights that it cannot multiply; a device
    /// that failed.
    pub fn new(
        spec: &ModelSpec,
        weights: &Weights,
        options: &Options,
        n_pages: usize,
        accel: Arc<dyn Accelerator>,
        device: &str,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<GpuOnly> {
        let act = weights::activation_type(&*accel, spec, weights)?;
        let kv = match options.kv_dtype {
            KvDType::BF16 => Half::BF16,
            KvDType::F16 => Half::F16,
        };
        let shape = Shape::of(spec, act, kv);
        accel.check(&shape)?;
        let rows = options.chunk.min(options.context).max(options.sequences);
        let padded = |n: usize| n.max(accel.row_bucket(n.min(GRAPH_ROWS)));
        let (rows, sequences) = (padded(rows), padded(options.sequences));
        // Logits of every row are only for measurements: one row per sequence is what decoding needs.
        let logit_rows = sequences.max(LOGIT_ROWS.min(rows));
        let pages_per_sequence = crate::cache::KvGeometry::pages_for(options.context);
        let limits = Limits { rows, logit_rows, sequences, pages_per_sequence };
        let linears = weights::linear_shapes(spec, weights)?;
        let gate_up = weights::separate_gate_up(spec, weights)?;
        let scratch = accel.scratch_bytes(&shape, &limits, &linears);
        let sizes = Workspace::sizes(&shape, &limits, gate_up, false, scratch);
        let step_bytes = accel.step_bytes(&shape, &limits);
        let kv_layer = n_pages as u64 * shape.page_bytes() as u64;
        let memory = Memory {
            weights: weights::device_bytes(&*accel, spec, weights, act, options.context)?,
            kv: kv_layer * spec.n_layers as u64,
            activations: sizes.iter().chain([&step_bytes]).map(|b| b.next_multiple_of(256) as u64).sum(),
        };
        memory.check_device(accel.runtime().memory_free()?, &accel.runtime().info().name)?;

        let runtime = accel.runtime().clone();
        let pages = PageList::new(geometry(spec, options.kv_dtype), n_pages)?;
        let pool = Pool::pinned(options.threads);
        let threads = pool.threads();
        let weights = preload::beside(&*runtime, &Needs::new(&shape, &linears), || {
            DeviceWeights::upload(&accel, spec, weights, act, options.context, &pool, progress)
        })?;
        let zeroed = |bytes: usize| -> Result<Buffer> {
            let buffer = Buffer::new(&runtime, bytes)?;
            runtime.fill(Lane::Compute, buffer.ptr(), 0, buffer.len())?;
            Ok(buffer)
        };
        let kv = (0..spec.n_layers).map(|_| zeroed(kv_layer as usize)).collect::<Result<Vec<_>>>()?;
        let activations = sizes.iter().map(|&b| zeroed(b)).collect::<Result<Vec<_>>>()?;
        let workspace = Workspace::at(
            limits,
            std::array::from_fn(|i| if sizes[i] == 0 { DevPtr::NULL } else { activations[i].ptr() }),
        );
        let step = zeroed(step_bytes)?;
        runtime.synchronize_all()?;
        Ok(GpuOnly {
            accel,
            name: device.to_string(),
            n_layers: spec.n_layers,
            threads,
            shape,
            limits,
            weights,
            pages,
            kv,
            workspace,
            step,
            _activations: activations,
            graphs: HashMap::new(),
            records: true,
            logits: Vec::new(),
            bytes: Vec::new(),
            argmax: Vec::new(),
            memory,
        })
    }

    /// Enqueues all of a step.
    fn enqueue(&self, cx: &Context<'_>, want: Want) -> Result<()> {
        let (a, rows) = (&self.accel, 0..cx.step.rows);
        a.embed(cx, &self.weights.embed, rows.clone())?;
        let mut residual = Residual::None;
        for (i, layer) in self.weights.layers.iter().enumerate() {
            let kv = self.kv[i].ptr();
            a.qkv(cx, layer, kv, residual, None, rows.clone())?;
            if i + 1 == self.n_layers && cx.step.n_logits == 0 {
                // A chunk in the middle of a prompt: after the last keys and values nothing is wanted.
                return Ok(());
            }
            a.attend(cx, layer, kv, rows.clone())?;
            a.out_proj(cx, layer, rows.clone())?;
            a.ffn_up(cx, layer, Residual::after(layer.post_attn), rows.clone())?;
            a.ffn_down(cx, layer, rows.clone())?;
            residual = Residual::after(layer.post_ffn);
        }
        a.logits(cx, self.weights.out_norm, &self.weights.head, residual, rows.clone())?;
        if want == Want::Argmax { a.argmax(cx, rows) } else { Ok(()) }
    }

    /// Runs one step whose logit rows fit the workspace.
    fn step(
        &mut self,
        seqs: &[StepSeq<'_>],
        tokens: &[u32],
        logit_rows: &[u32],
        want: Want,
        decode: bool,
    ) -> Result<()> {
        let rows = tokens.len();
        // Decode steps are padded to a bucket, so that few graphs serve all batches.
        let few = decode && rows <= GRAPH_ROWS;
        let graph = few && self.records;
        let launch_rows = if few { self.accel.row_bucket(rows) } else { rows };
        let desc = StepDesc { seqs, tokens, logit_rows, cuts: &[], epoch: 0, launch_rows };
        let lane = Lane::Compute;
        let step = self.accel.prepare(lane, &self.shape, &self.limits, &desc, self.step.ptr())?;
        let cx = Context { lane, shape: &self.shape, ws: &self.workspace, step: &step };
        let runtime = self.accel.runtime().clone();
        match step.graph_key.filter(|_| graph).map(|key| (key, want == Want::Argmax)) {
            None => self.enqueue(&cx, want)?,
            Some(key) => match self.graphs.get(&key) {
                // The first such step runs kernel by kernel: what is loaded or sized with a kernel's first launch has no
                // place in a recording.
                None => {
                    self.enqueue(&cx, want)?;
                    self.graphs.insert(key, None);
                }
                Some(Some(graph)) => runtime.replay(graph)?,
                Some(None) => match runtime.capture(&mut || self.enqueue(&cx, want))? {
                    Some(graph) => {
                        runtime.replay(&graph)?;
                        self.graphs.insert(key, Some(graph));
                    }
                    None => {
                        self.records = false;
                        self.enqueue(&cx, want)?;
                    }
                },
            },
        }
        if logit_rows.is_empty() {
            return Ok(());
        }
        let from = match want {
            Want::Logits => self.workspace.logit_rows(&self.shape, &(0..logit_rows.len())),
            Want::Argmax => self.workspace.picked(logit_rows.len()),
        };
        self.bytes.resize(from.bytes, 0);
        runtime.download(lane, from.ptr, &mut self.bytes)?;
        let floats = self.bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        match want {
            Want::Logits => self.logits.extend(floats),
            Want::Argmax => self.argmax.extend(self.workspace.picked_tokens(&self.bytes)),
        }
        Ok(())
    }
}

/// Rows of logits that a step makes room for, beyond one per sequence.
const LOGIT_ROWS: usize = 64;

impl Executor for GpuOnly {
    fn pages(&mut self) -> &mut PageList {
        &mut self.pages
    }

    fn run(
        &mut self,
        inputs: &[Input<'_>],
        tables: &[&BlockTable],
        want: Want,
        _: Sharing<'_>,
    ) -> Result<()> {
        self.logits.clear();
        self.argmax.clear();
        let tokens: Vec<u32> = inputs.iter().flat_map(|i| i.tokens).copied().collect();
        if tokens.is_empty() {
            return Ok(());
        }
        if tokens.len() > self.limits.rows {
            return Err(Error::Capacity(format!(
                "a step of {} rows, {} were planned for; use smaller chunks",
                tokens.len(),
                self.limits.rows
            )));
        }
        let wanted: Vec<u32> = wanted_rows(inputs).into_iter().map(|r| r as u32).collect();
        let mut seqs = Vec::with_capacity(inputs.len());
        let mut row0 = 0;
        for (input, table) in inputs.iter().zip(tables) {
            let n_rows = input.tokens.len();
            if n_rows > 0 {
                let (pages, first_pos) = (table.pages(), table.len());
                seqs.push(StepSeq { pages, first_pos, row0, n_rows, attend: Attend::Here });
            }
            row0 += n_rows;
        }
        let decode = inputs.iter().all(|i| i.tokens.len() == 1) && wanted.len() == tokens.len();
        if wanted.len() <= self.limits.logit_rows {
            return self.step(&seqs, &tokens, &wanted, want, decode);
        }
        // Logits of more rows than there is room for: the rows go in as many steps as it takes.
        for (at, rows) in row_runs(tokens.len(), &wanted, self.limits.logit_rows) {
            let part: Vec<StepSeq<'_>> = seqs.iter().filter_map(|s| slice_rows(s, &rows)).collect();
            let logit_rows: Vec<u32> = wanted[at].iter().map(|r| r - rows.start as u32).collect();
            self.step(&part, &tokens[rows], &logit_rows, want, false)?;
        }
        Ok(())
    }

    fn logits(&self) -> &[f32] {
        &self.logits
    }

    fn argmax(&self) -> &[Option<u32>] {
        &self.argmax
    }

    fn placement(&self) -> Placement {
        let info = self.accel.runtime().info();
        Placement {
            device: self.name.clone(),
            strategy: "gpu-only",
            isa: format!("{}, sm_{}, {} activations", info.name, info.sm, self.shape.act.name()),
            threads: self.threads,
            kv_type: self.shape.kv.name(),
        }
    }

    fn memory(&self) -> Memory {
        self.memory
    }

    fn clock(&self) -> Option<&Arc<Clock>> {
        self.accel.runtime().clock()
    }

    fn bytes_per_step(&self) -> u64 {
        self.weights.bytes_per_step
    }
}

/// Splits `n` rows so that each run has at most `most` of the `wanted` ones: ranges of `wanted`, and of rows.
fn row_runs(n: usize, wanted: &[u32], most: usize) -> Vec<(std::ops::Range<usize>, std::ops::Range<usize>)> {
    let mut runs = Vec::new();
    let mut start = 0;
    for at in (0..wanted.len()).step_by(most) {
        let to = (at + most).min(wanted.len());
        let end = if to == wanted.len() { n } else { wanted[to - 1] as usize + 1 };
        runs.push((at..to, start..end));
        start = end;
    }
    runs
}

/// The part of a sequence's rows inside `rows`, which becomes row 0.
fn slice_rows<'a>(s: &StepSeq<'a>, rows: &std::ops::Range<usize>) -> Option<StepSeq<'a>> {
    let (from, to) = (s.row0.max(rows.start), (s.row0 + s.n_rows).min(rows.end));
    (from < to).then(|| StepSeq {
        first_pos: s.first_pos + from - s.row0,
        row0: from - rows.start,
        n_rows: to - from,
        ..*s
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_cover_all_rows_and_wanted_rows_once() {
        for (n, wanted, most) in
            [(10usize, vec![9u32], 1usize), (7, (0..7).collect(), 3), (9, vec![2, 3, 8], 2)]
        {
            let runs = row_runs(n, &wanted, most);
            let mut row = 0;
            let mut at = 0;
            for (w, r) in runs {
                assert_eq!((w.start, r.start), (at, row));
                assert!(w.len() <= most && wanted[w.clone()].iter().all(|&x| r.contains(&(x as usize))));
                (at, row) = (w.end, r.end);
            }
            assert_eq!((at, row), (wanted.len(), n));
        }
    }
}
