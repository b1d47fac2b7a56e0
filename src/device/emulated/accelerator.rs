//! The accelerator contract by plain functions on the host: for any machine, without a compiler for kernels.
//!
//! Every operation of the contract is one operation of a lane, with the exact bytes that it reads and
//! writes, so that a missing event between lanes is found whenever it is missing. Weights stay as their files
//! store them. A row's results do not depend on the other rows at all.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::op::{PageMove, Span};
use super::ops::attention::{self, Tokens};
use super::ops::cast::{from_f32, numbers, numbers_mut, to_f32};
use super::ops::linear::{self, Matrix};
use super::ops::norm::{self, Delta};
use super::ops::pages::PageShape;
use super::ops::qkv::{self, Heads};
use super::runtime::EmulatedRuntime;
use super::step::{HostStep, Row};
use crate::device::accelerator::{
    Accelerator, Attend, Context, EmbedWeight, Half, LayerWeights, Limits, LinearSource, LinearWeight,
    Mailbox, NormWeight, PartialRows, Publish, Residual, Shape, Step, StepDesc, UpWeight,
};
use crate::device::host::Pool;
use crate::device::runtime::{DevPtr, Lane, Pinned, Runtime};
use crate::model::spec::Norm;
use crate::simd::{Isa, Kernels};
use crate::tensor::DType;
use crate::{Error, Result};

/// An accelerator whose operations are functions on the host.
pub struct EmulatedAccelerator {
    emulated: Arc<EmulatedRuntime>,
    runtime: Arc<dyn Runtime>,
    kernels: &'static Kernels,
}

impl EmulatedAccelerator {
    /// Over the lanes and memory of `runtime`.
    pub fn new(runtime: Arc<EmulatedRuntime>) -> EmulatedAccelerator {
        let isa = Isa::selected().unwrap_or(Isa::Reference);
        EmulatedAccelerator { runtime: runtime.clone(), emulated: runtime, kernels: Kernels::for_isa(isa) }
    }

    fn step<'a>(&self, cx: &'a Context<'_>) -> &'a Arc<HostStep> {
        cx.step.inner.downcast_ref().expect("a step that this accelerator prepared")
    }

    /// Operands that begin with the step's list: whatever uses the step has to come after its upload.
    fn operands(&self, cx: &Context<'_>) -> Operands {
        let mut operands = Operands::default();
        operands.read(self.step(cx).list.ptr, self.step(cx).list.len);
        operands
    }

    fn enqueue(
        &self,
        cx: &Context<'_>,
        name: &str,
        operands: Operands,
        body: impl Fn(&[&[u8]], &mut [&mut [u8]]) -> Result<()> + Send + Sync + 'static,
    ) -> Result<()> {
        self.emulated.operation(cx.lane, name, &operands.reads, &operands.writes, body)
    }

    /// delta = W·x + bias.
    fn to_delta(
        &self,
        cx: &Context<'_>,
        name: &str,
        w: &LinearWeight,
        x: DevPtr,
        rows: Range<usize>,
    ) -> Result<()> {
        let rows = self.step(cx).clip(&rows);
        let (d, act, kernels) = (cx.shape.d_model, cx.shape.act, self.kernels);
        let mut io = self.operands(cx);
        let x = io.read_rows(x, &rows, 2 * w.k);
        let w = io.weight(w);
        let delta = io.write_rows(cx.ws.delta, &rows, 4 * d);
        self.enqueue(cx, name, io, move |reads, writes| {
            let x = to_f32(act, numbers(reads[x]));
            linear::linear(kernels, &w.matrix(reads), &x, numbers_mut(writes[delta]), d, 0);
            Ok(())
        })
    }
}

/// The spans of an operation; adding one gives its index.
#[derive(Default)]
struct Operands {
    reads: Vec<Span>,
    writes: Vec<Span>,
}

/// A matrix among the operands.
#[derive(Clone, Copy)]
struct MatrixOperand {
    dtype: DType,
    k: usize,
    data: usize,
    bias: usize,
}

impl MatrixOperand {
    fn matrix<'a>(&self, reads: &[&'a [u8]]) -> Matrix<'a> {
        Matrix { dtype: self.dtype, k: self.k, data: reads[self.data], bias: numbers(reads[self.bias]) }
    }
}

/// What is added to the residual stream, among the operands.
#[derive(Clone, Copy)]
struct DeltaOperand {
    rows: usize,
    post: usize,
    d: usize,
}

impl DeltaOperand {
    fn row<'a>(&self, reads: &[&'a [u8]], i: usize) -> Delta<'a> {
        Delta {
            row: &numbers(reads[self.rows])[i * self.d..(i + 1) * self.d],
            post: numbers(reads[self.post]),
        }
    }
}

impl Operands {
    /// `len` bytes; an operand that is absent (NULL) is empty.
    fn read(&mut self, ptr: DevPtr, len: usize) -> usize {
        self.reads.push(Span::new(ptr, if ptr.is_null() { 0 } else { len }));
        self.reads.len() - 1
    }

    fn write(&mut self, ptr: DevPtr, len: usize) -> usize {
        self.writes.push(Span::new(ptr, len));
        self.writes.len() - 1
    }

    fn read_rows(&mut self, base: DevPtr, rows: &Range<usize>, row_bytes: usize) -> usize {
        self.read(base.add(rows.start * row_bytes), rows.len() * row_bytes)
    }

    fn write_rows(&mut self, base: DevPtr, rows: &Range<usize>, row_bytes: usize) -> usize {
        self.write(base.add(rows.start * row_bytes), rows.len() * row_bytes)
    }

    fn weight(&mut self, w: &LinearWeight) -> MatrixOperand {
        let row = w.dtype.row_bytes(w.k).expect("checked when packed");
        let data = self.read(w.ptr, w.n * row);
        MatrixOperand { dtype: w.dtype, k: w.k, data, bias: self.read(w.bias, 4 * w.n) }
    }

    fn norm(&mut self, w: &NormWeight, d: usize) -> [usize; 2] {
        [self.read(w.w, 4 * d), self.read(w.b, 4 * d)]
    }

    fn delta(&mut self, cx: &Context<'_>, residual: Residual, rows: &Range<usize>) -> Option<DeltaOperand> {
        let d = cx.shape.d_model;
        let post = match residual {
            Residual::None => return None,
            Residual::Delta => DevPtr::NULL,
            Residual::Normed(w) => w,
        };
        let rows = self.read_rows(cx.ws.delta, rows, 4 * d);
        Some(DeltaOperand { rows, post: self.read(post, 4 * d), d })
    }
}

/// hidden += residual; x = norm(hidden), rounded; x again as floats, as the products take it.
struct NormRows {
    kernels: &'static Kernels,
    norm: Norm,
    act: Half,
    d: usize,
    delta: Option<DeltaOperand>,
    weight: [usize; 2],
}

impl NormRows {
    fn run(&self, reads: &[&[u8]], hidden: &mut [f32], x: &mut [u16]) -> Vec<f32> {
        let weight = self.weight.map(|i| numbers::<f32>(reads[i]));
        let mut out = vec![0f32; self.d];
        let rows = hidden.chunks_exact_mut(self.d).zip(x.chunks_exact_mut(self.d));
        for (i, (hidden, x)) in rows.enumerate() {
            if let Some(delta) = &self.delta {
                norm::add(self.kernels, self.norm, hidden, delta.row(reads, i));
            }
            norm::norm(self.kernels, self.norm, hidden, weight[0], weight[1], &mut out);
            from_f32(self.act, &out, x);
        }
        to_f32(self.act, x)
    }
}

fn failed(what: &str, problem: String) -> Error {
    Error::Device { what: format!("operation {what}"), problem }
}

impl Accelerator for EmulatedAccelerator {
    fn runtime(&self) -> &Arc<dyn Runtime> {
        &self.runtime
    }

    fn check(&self, shape: &Shape) -> Result<()> {
        if !shape.head_dim.is_multiple_of(2) {
            return Err(Error::Unsupported(format!(
                "{}: heads of {}",
                self.runtime.info().name,
                shape.head_dim
            )));
        }
        Ok(())
    }

    fn activations_for(&self, dtype: DType) -> Option<Half> {
        Some(if dtype == DType::BF16 { Half::BF16 } else { Half::F16 })
    }

    fn packed_bytes(&self, source: &LinearSource<'_>, _act: Half) -> Result<usize> {
        let row = source.dtype().row_bytes(source.k());
        row.and_then(|r| r.checked_mul(source.n())).ok_or_else(|| {
            Error::Unsupported(format!("a {} matrix of {} columns", source.dtype(), source.k()))
        })
    }

    fn embeds_packed(&self, _dtype: DType, _act: Half, _positions: bool) -> bool {
        true // packed is as stored
    }

    fn pack(&self, source: &LinearSource<'_>, _act: Half, _pool: &Pool, out: &mut [u8]) {
        let both;
        let parts = match *source {
            LinearSource::Rows(parts) => parts,
            LinearSource::GateUp(gate, up) => {
                both = [gate, up];
                &both
            }
        };
        let mut out = out;
        for part in parts {
            let (to, rest) = out.split_at_mut(part.data.len());
            to.copy_from_slice(&part.data);
            out = rest;
        }
    }

    fn scratch_bytes(&self, _shape: &Shape, _limits: &Limits, _weights: &[LinearWeight]) -> usize {
        0
    }

    fn step_bytes(&self, _shape: &Shape, limits: &Limits) -> usize {
        4 * limits.rows
    }

    fn row_bucket(&self, rows: usize) -> usize {
        rows
    }

    fn prepare(
        &self,
        lane: Lane,
        _shape: &Shape,
        limits: &Limits,
        step: &StepDesc<'_>,
        memory: DevPtr,
    ) -> Result<Step> {
        let host = HostStep::new(limits, step, memory);
        let tokens: Vec<u8> = step.tokens.iter().flat_map(|t| t.to_ne_bytes()).collect();
        self.runtime.upload(lane, memory, &tokens)?;
        Ok(Step {
            rows: step.launch_rows,
            n_logits: step.logit_rows.len(),
            // Work is enqueued for exactly the pages and rows of this step.
            graph_key: None,
            inner: Arc::new(Arc::new(host)),
        })
    }

    fn embed(&self, cx: &Context<'_>, weight: &EmbedWeight, rows: Range<usize>) -> Result<()> {
        let step = self.step(cx).clone();
        let rows = step.clip(&rows);
        let (d, vocab, scale) = (cx.shape.d_model, cx.shape.vocab, cx.shape.embed_scale);
        let row_bytes = |dtype: DType| dtype.row_bytes(d).expect("a row of the embedding is whole blocks");
        let mut io = self.operands(cx);
        let table = io.read(weight.table, vocab * row_bytes(weight.dtype));
        let positions = io.read(weight.positions, weight.n_positions * row_bytes(weight.positions_dtype));
        let hidden = io.write_rows(cx.ws.hidden, &rows, 4 * d);
        let (weight, kernels) = (*weight, self.kernels);
        self.enqueue(cx, "embed", io, move |reads, writes| {
            let tokens = &numbers::<u32>(reads[0])[rows.clone()];
            let hidden = numbers_mut::<f32>(writes[hidden]).chunks_exact_mut(d);
            let row = |table: usize, dtype: DType, i: usize| {
                let bytes = row_bytes_of(reads[table], dtype, d, i);
                bytes.ok_or_else(|| failed("embed", format!("row {i} of a table that is shorter")))
            };
            for ((&token, out), r) in tokens.iter().zip(hidden).zip(rows.clone()) {
                kernels.embed_row(weight.dtype, row(table, weight.dtype, token as usize)?, scale, out);
                if !weight.positions.is_null() {
                    let dtype = weight.positions_dtype;
                    let mut position = vec![0f32; d];
                    let at = row(positions, dtype, step.position(r) + weight.position_offset)?;
                    kernels.embed_row(dtype, at, 1.0, &mut position);
                    kernels.add(out, &position);
                }
            }
            Ok(())
        })
    }

    fn qkv(
        &self,
        cx: &Context<'_>,
        layer: &LayerWeights,
        kv: DevPtr,
        residual: Residual,
        publish: Option<Publish<'_>>,
        rows: Range<usize>,
    ) -> Result<()> {
        let step = self.step(cx).clone();
        let (ws, shape) = (cx.ws, cx.shape.clone());
        let rows = step.clip(&rows);
        let (d, qd, kvd, width) = (shape.d_model, shape.q_dim(), shape.kv_dim(), shape.qkv_dim());
        let mut io = self.operands(cx);
        let delta = io.delta(cx, residual, &rows);
        let weight = io.norm(&layer.attn_norm, d);
        let parts: Vec<MatrixOperand> = layer.qkv.iter().map(|w| io.weight(w)).collect();
        let columns: usize = layer.qkv.iter().map(|w| w.n).sum();
        assert_eq!(columns, width, "q, k and v are {columns} rows of weights");
        let bias = io.read(layer.qkv_bias, 4 * width);
        let norms = [layer.q_norm, layer.k_norm].map(|w| io.read(w, 4 * shape.head_dim));
        // The tables' rows of the positions from the first to the last.
        let pairs = shape.rope_dim / 2;
        let seen = step.positions(&rows);
        let rope = layer.rope.map(|table| io.read_rows(table, &seen, 4 * pairs));
        let hidden = io.write_rows(ws.hidden, &rows, 4 * d);
        let x = io.write_rows(ws.x, &rows, 2 * d);
        let projected = io.write_rows(ws.qkv, &rows, 4 * width);
        let q = io.write_rows(ws.q, &rows, 2 * qd);
        let page = PageShape { n_kv_heads: shape.n_kv_heads, head_dim: shape.head_dim };
        let pages = step.pages_written(&rows);
        let first_page = io.writes.len();
        for &p in &pages {
            io.write(kv.add(p as usize * shape.page_bytes()), shape.page_bytes());
        }
        let mailbox = publish.filter(|_| step.n_published > 0).map(|p| {
            assert!(step.n_published <= p.mailbox.rows, "a mailbox of {} rows", p.mailbox.rows);
            (p.mailbox.memory.clone(), step.epoch.wrapping_add(p.epoch_add), p.mailbox.row_at(&shape, 0))
        });
        let published = step.published(&rows);
        let letters = mailbox
            .as_ref()
            .filter(|_| !published.is_empty())
            .map(|(memory, _, at)| io.write_rows(memory.device().add(*at), &published, 4 * width));
        let kernels = self.kernels;
        let norm_rows = NormRows { kernels, norm: shape.norm, act: shape.act, d, delta, weight };
        self.enqueue(cx, "qkv", io, move |reads, writes| {
            let hidden = numbers_mut(std::mem::take(&mut writes[hidden]));
            let x = norm_rows.run(reads, hidden, numbers_mut(std::mem::take(&mut writes[x])));
            let projected = numbers_mut::<f32>(std::mem::take(&mut writes[projected]));
            let mut column = 0;
            for part in &parts {
                let w = part.matrix(reads);
                linear::linear(kernels, &w, &x, projected, width, column);
                column += w.n();
            }
            let heads = Heads {
                n_heads: shape.n_heads,
                n_kv_heads: shape.n_kv_heads,
                head_dim: shape.head_dim,
                bias: numbers(reads[bias]),
                q_norm: numbers(reads[norms[0]]),
                k_norm: numbers(reads[norms[1]]),
                eps: eps(shape.norm),
                pairing: shape.pairing,
            };
            let mut row = vec![0f32; width];
            let mut halves = vec![0u16; width];
            for (i, r) in rows.clone().enumerate() {
                row.copy_from_slice(&projected[i * width..(i + 1) * width]);
                let [cos, sin] = rope.map(|table| {
                    let table = numbers::<f32>(reads[table]);
                    let at = (step.position(r) - seen.start) * pairs;
                    if table.is_empty() { table } else { &table[at..at + pairs] }
                });
                qkv::finish(kernels, &heads, &mut row, cos, sin);
                from_f32(shape.kv, &row, &mut halves);
                numbers_mut(writes[q])[i * qd..(i + 1) * qd].copy_from_slice(&halves[..qd]);
                match step.rows[r] {
                    Row::Here { page: p, token, .. } => {
                        let slot = pages.binary_search(&p).expect("all pages written are listed");
                        let (k, v) = halves[qd..].split_at(kvd);
                        page.append(numbers_mut(writes[first_page + slot]), token, k, v);
                    }
                    Row::Elsewhere { slot, .. } => {
                        if let Some(letters) = letters {
                            let at = (slot - published.start) * width;
                            numbers_mut(writes[letters])[at..at + width].copy_from_slice(&row);
                        }
                    }
                    Row::Nobody => {}
                }
            }
            if let Some((memory, epoch, _)) = &mailbox
                && step.arrive(published.len())
            {
                publish_epoch(memory, *epoch);
            }
            Ok(())
        })
    }

    fn attend(&self, cx: &Context<'_>, layer: &LayerWeights, kv: DevPtr) -> Result<()> {
        let step = self.step(cx).clone();
        let (ws, shape) = (cx.ws, cx.shape.clone());
        let (hd, h_a, h_kv, qd) = (shape.head_dim, shape.n_heads, shape.n_kv_heads, shape.q_dim());
        let window = shape.window.filter(|_| layer.windowed);
        let mut io = self.operands(cx);
        let all = 0..step.rows.len();
        let q = io.read_rows(ws.q, &all, 2 * qd);
        let mut used: Vec<u32> = step.seqs.iter().flat_map(|s| &s.pages).copied().collect();
        used.sort_unstable();
        used.dedup();
        let first_page = io.reads.len();
        for &p in &used {
            io.read(kv.add(p as usize * shape.page_bytes()), shape.page_bytes());
        }
        // A sequence's rows at a time: rows attended elsewhere are written by others.
        let outs: Vec<Option<usize>> = step
            .seqs
            .iter()
            .map(|s| (s.attend == Attend::Here).then(|| io.write_rows(ws.attn, &s.rows(), 2 * qd)))
            .collect();
        let partial = (step.n_partial > 0).then(|| {
            let rows = 0..step.n_partial;
            [(ws.partial.m, 4 * h_a), (ws.partial.s, 4 * h_a), (ws.partial.o, 4 * qd)]
                .map(|(base, bytes)| io.write_rows(base, &rows, bytes))
        });
        let page = PageShape { n_kv_heads: h_kv, head_dim: hd };
        self.enqueue(cx, "attend", io, move |reads, writes| {
            let q = to_f32(shape.kv, numbers(reads[q]));
            for (s, out) in step.seqs.iter().zip(&outs) {
                let from = match s.attend {
                    Attend::Here => 0,
                    Attend::From { from } => from,
                    Attend::Elsewhere => continue,
                };
                let sees = |row: usize| attention::seen(step.position(row), from, window);
                let span = sees(s.row0).start..sees(s.row0 + s.n_rows - 1).end;
                let page_of = |i: usize| {
                    let slot = used.binary_search(&s.page(i)).expect("all pages read are listed");
                    numbers(reads[first_page + slot])
                };
                for kv_head in 0..h_kv {
                    let tokens = Tokens::read(&page, shape.kv, kv_head, span.clone(), page_of);
                    for (i, row) in s.rows().enumerate() {
                        for head in kv_head * h_a / h_kv..(kv_head + 1) * h_a / h_kv {
                            let q = &q[row * qd + head * hd..][..hd];
                            let mut o = vec![0f32; hd];
                            let (m, sum) = tokens.attend(sees(row), shape.attn_scale, q, &mut o);
                            if let Some(out) = out {
                                attention::normalise(sum, &mut o);
                                let to = &mut numbers_mut(writes[*out])[i * qd + head * hd..][..hd];
                                from_f32(shape.act, &o, to);
                            } else if let Some([ms, ss, os]) = partial {
                                let at = s.partial0 + i;
                                numbers_mut(writes[ms])[at * h_a + head] = m;
                                numbers_mut(writes[ss])[at * h_a + head] = sum;
                                numbers_mut(writes[os])[at * qd + head * hd..][..hd].copy_from_slice(&o);
                            }
                        }
                    }
                }
            }
            Ok(())
        })
    }

    fn out_proj(&self, cx: &Context<'_>, layer: &LayerWeights, rows: Range<usize>) -> Result<()> {
        self.to_delta(cx, "out_proj", &layer.o, cx.ws.attn, rows)
    }

    fn ffn_up(
        &self,
        cx: &Context<'_>,
        layer: &LayerWeights,
        residual: Residual,
        rows: Range<usize>,
    ) -> Result<()> {
        let (ws, shape) = (cx.ws, cx.shape);
        let rows = self.step(cx).clip(&rows);
        let (d, ff, act, ffn, kernels) = (shape.d_model, shape.d_ff, shape.act, shape.ffn, self.kernels);
        let mut io = self.operands(cx);
        let delta = io.delta(cx, residual, &rows);
        let weight = io.norm(&layer.ffn_norm, d);
        let parts = match &layer.up {
            UpWeight::GateUp(both) => {
                let row = both.dtype.row_bytes(both.k).expect("checked when packed");
                let ups = if both.bias.is_null() { both.bias } else { both.bias.add(4 * ff) };
                let gate = LinearWeight { n: ff, ..*both };
                let up = LinearWeight { n: ff, ptr: both.ptr.add(ff * row), bias: ups, ..*both };
                (Some(io.weight(&gate)), io.weight(&up))
            }
            UpWeight::Separate(gate, up) => (Some(io.weight(gate)), io.weight(up)),
            UpWeight::Plain(up) => (None, io.weight(up)),
        };
        let hidden = io.write_rows(ws.hidden, &rows, 4 * d);
        let x = io.write_rows(ws.x, &rows, 2 * d);
        let out = io.write_rows(ws.act, &rows, 2 * ff);
        let norm_rows = NormRows { kernels, norm: shape.norm, act, d, delta, weight };
        self.enqueue(cx, "ffn_up", io, move |reads, writes| {
            let hidden = numbers_mut(std::mem::take(&mut writes[hidden]));
            let x = norm_rows.run(reads, hidden, numbers_mut(std::mem::take(&mut writes[x])));
            let mut y = vec![0f32; rows.len() * ff];
            let (gate, up) = (parts.0.map(|w| w.matrix(reads)), parts.1.matrix(reads));
            linear::feed_forward(kernels, ffn, gate.as_ref(), &up, &x, &mut y);
            from_f32(act, &y, numbers_mut(writes[out]));
            Ok(())
        })
    }

    fn ffn_down(&self, cx: &Context<'_>, layer: &LayerWeights, rows: Range<usize>) -> Result<()> {
        self.to_delta(cx, "ffn_down", &layer.down, cx.ws.act, rows)
    }

    fn logits(
        &self,
        cx: &Context<'_>,
        weight: NormWeight,
        head: &LinearWeight,
        residual: Residual,
    ) -> Result<()> {
        let step = self.step(cx).clone();
        let (ws, shape) = (cx.ws, cx.shape);
        let (d, vocab, norm, act) = (shape.d_model, shape.vocab, shape.norm, shape.act);
        let n = step.logit_rows.len();
        let mut io = self.operands(cx);
        let deltas: Vec<Option<DeltaOperand>> =
            step.logit_rows.iter().map(|&r| io.delta(cx, residual, &(r as usize..r as usize + 1))).collect();
        let hiddens: Vec<usize> =
            step.logit_rows.iter().map(|&r| io.read(ws.hidden.add(r as usize * 4 * d), 4 * d)).collect();
        let weight = io.norm(&weight, d);
        let head = io.weight(head);
        let x = io.write_rows(ws.head_x, &(0..n), 2 * d);
        let logits = io.write_rows(ws.logits, &(0..n), 4 * vocab);
        let (cap, kernels) = (shape.logit_softcap, self.kernels);
        self.enqueue(cx, "logits", io, move |reads, writes| {
            let to = numbers_mut::<u16>(std::mem::take(&mut writes[x]));
            let rows = deltas.iter().zip(&hiddens).zip(to.chunks_exact_mut(d));
            for ((delta, &hidden), x) in rows {
                let mut hidden = numbers::<f32>(reads[hidden]).to_vec();
                if let Some(delta) = delta {
                    norm::add(kernels, norm, &mut hidden, delta.row(reads, 0));
                }
                let [w, b] = weight.map(|i| numbers::<f32>(reads[i]));
                let mut out = vec![0f32; d];
                norm::norm(kernels, norm, &hidden, w, b, &mut out);
                from_f32(act, &out, x);
            }
            let logits = numbers_mut(writes[logits]);
            linear::linear(kernels, &head.matrix(reads), &to_f32(act, to), logits, vocab, 0);
            if let Some(cap) = cap {
                kernels.softcap(logits, cap);
            }
            Ok(())
        })
    }

    fn argmax(&self, cx: &Context<'_>) -> Result<()> {
        let (vocab, n) = (cx.shape.vocab, self.step(cx).logit_rows.len());
        let mut io = self.operands(cx);
        let logits = io.read_rows(cx.ws.logits, &(0..n), 4 * vocab);
        let argmax = io.write_rows(cx.ws.argmax, &(0..n), 4);
        let kernels = self.kernels;
        self.enqueue(cx, "argmax", io, move |reads, writes| {
            let rows = numbers::<f32>(reads[logits]).chunks_exact(vocab);
            for (row, best) in rows.zip(numbers_mut::<u32>(writes[argmax])) {
                *best = kernels.argmax(row) as u32;
            }
            Ok(())
        })
    }

    fn collect(&self, cx: &Context<'_>, mailbox: &Mailbox) -> Result<()> {
        let step = self.step(cx).clone();
        let (qd, act) = (cx.shape.q_dim(), cx.shape.act);
        if step.n_published == 0 {
            return Ok(());
        }
        let mut io = self.operands(cx);
        let o = mailbox.memory.device().add(mailbox.out_at(cx.shape, 0));
        let o = io.read_rows(o, &(0..step.n_published), 4 * qd);
        let rows: Vec<usize> = step.elsewhere().collect();
        let outs: Vec<usize> = rows.iter().map(|&r| io.write_rows(cx.ws.attn, &(r..r + 1), 2 * qd)).collect();
        self.enqueue(cx, "collect", io, move |reads, writes| {
            let o = numbers::<f32>(reads[o]).chunks_exact(qd);
            for (o, &out) in o.zip(&outs) {
                from_f32(act, o, numbers_mut(writes[out]));
            }
            Ok(())
        })
    }

    fn merge(&self, cx: &Context<'_>, other: &PartialRows) -> Result<()> {
        let step = self.step(cx).clone();
        let (h_a, hd, qd, act) = (cx.shape.n_heads, cx.shape.head_dim, cx.shape.q_dim(), cx.shape.act);
        let n = 0..step.n_partial;
        if n.is_empty() {
            return Ok(());
        }
        let mut io = self.operands(cx);
        let [here, there] = [&cx.ws.partial, other].map(|p| {
            [(p.m, 4 * h_a), (p.s, 4 * h_a), (p.o, 4 * qd)].map(|(base, bytes)| io.read_rows(base, &n, bytes))
        });
        let rows: Vec<usize> = step.partial().collect();
        let outs: Vec<usize> = rows.iter().map(|&r| io.write_rows(cx.ws.attn, &(r..r + 1), 2 * qd)).collect();
        self.enqueue(cx, "merge", io, move |reads, writes| {
            for (i, &out) in outs.iter().enumerate() {
                let out = numbers_mut::<u16>(writes[out]);
                for head in 0..h_a {
                    let part = |p: [usize; 3]| {
                        let (m, s) = (numbers::<f32>(reads[p[0]]), numbers::<f32>(reads[p[1]]));
                        let o = &numbers::<f32>(reads[p[2]])[i * qd + head * hd..][..hd];
                        (m[i * h_a + head], s[i * h_a + head], o)
                    };
                    let (mut m, mut s, o) = part(here);
                    let mut o = o.to_vec();
                    attention::merge((&mut m, &mut s, &mut o), part(there));
                    attention::normalise(s, &mut o);
                    from_f32(act, &o, &mut out[head * hd..][..hd]);
                }
            }
            Ok(())
        })
    }

    fn gather_pages(&self, cx: &Context<'_>, kv: DevPtr, pages: DevPtr, n: usize, out: DevPtr) -> Result<()> {
        self.emulated.move_pages(cx.lane, page_move(cx.shape, kv, pages, n, out, true))
    }

    fn scatter_pages(
        &self,
        cx: &Context<'_>,
        kv: DevPtr,
        pages: DevPtr,
        n: usize,
        from: DevPtr,
    ) -> Result<()> {
        self.emulated.move_pages(cx.lane, page_move(cx.shape, kv, pages, n, from, false))
    }
}

fn page_move(shape: &Shape, kv: DevPtr, list: DevPtr, n: usize, host: DevPtr, to_host: bool) -> PageMove {
    let page = PageShape { n_kv_heads: shape.n_kv_heads, head_dim: shape.head_dim };
    PageMove { page, kv, list, n, host, to_host }
}

fn eps(norm: Norm) -> f32 {
    let (Norm::Rms { eps } | Norm::Layer { eps }) = norm;
    eps
}

/// Row `i` of a table, if it is that long.
fn row_bytes_of(table: &[u8], dtype: DType, d: usize, i: usize) -> Option<&[u8]> {
    let bytes = dtype.row_bytes(d)?;
    table.get(i.checked_mul(bytes)?..)?.get(..bytes)
}

/// Everything in the mailbox is there: stores its epoch, after all that this thread has written.
fn publish_epoch(mailbox: &Arc<dyn Pinned>, epoch: u32) {
    // SAFETY: a mailbox begins with its epoch, a word that both sides touch atomically only, and is page-aligned.
    let word = unsafe { AtomicU32::from_ptr(mailbox.host().cast()) };
    word.store(epoch, Ordering::Release);
}
