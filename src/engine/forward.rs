//! One forward pass over any mix of rows.

use std::sync::atomic::{AtomicPtr, Ordering};

use super::prepare::{Layer, NormWeight, Prepared};
use super::rope::RopeCache;
use super::sequences::SeqId;
use crate::Result;
use crate::cache::{BlockTable, LayerKv, PagePool, SeqRows};
use crate::host::Pool;
use crate::model::ModelSpec;
use crate::model::spec::{Ffn, Norm, Position, RopePairing};
use crate::simd::attention::{AttnPlan, AttnShape};
use crate::simd::linear::{Acts, Linear, Mode, Out, linear};
use crate::simd::{Isa, Kernels, RopeTable};

/// Consecutive new tokens of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// Whose.
    pub seq: SeqId,
    /// Token ids; they follow what the sequence holds.
    pub tokens: &'a [u32],
    /// Which of these rows need logits.
    pub logits: Logits,
}

/// Which rows need logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Logits {
    /// None (a chunk in the middle of a prompt).
    None,
    /// The last.
    Last,
    /// All (perplexity).
    All,
}

/// Below this many elements a row-wise operation is not worth waking threads for.
const PARALLEL_ELEMENTS: usize = 16 * 1024;

/// The workspace and plans of forward passes; buffers only grow.
pub(super) struct Forward {
    kernels: &'static Kernels,
    mode: Mode,
    rope: Option<RopeCache>,
    rope_local: Option<RopeCache>,
    pairing: RopePairing,
    attn: AttnPlan,
    attn_window: Option<AttnPlan>,
    hidden: Vec<f32>,
    delta: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    acts: Acts,
    logits: Vec<f32>,
    n_logits: usize,
}

/// Rows written by different threads.
struct RowsMut {
    ptr: AtomicPtr<f32>,
    len: usize,
    width: usize,
}

impl RowsMut {
    fn new(data: &mut [f32], width: usize) -> RowsMut {
        RowsMut { ptr: AtomicPtr::new(data.as_mut_ptr()), len: data.len(), width }
    }
    /// # Safety
    /// No two live slices of one row; the data outlives them.
    #[allow(clippy::mut_from_ref)]
    unsafe fn row(&self, r: usize) -> &mut [f32] {
        assert!((r + 1) * self.width <= self.len, "row {r} of {}", self.len / self.width);
        // SAFETY: in range; exclusivity is the caller's promise.
        unsafe {
            std::slice::from_raw_parts_mut(self.ptr.load(Ordering::Relaxed).add(r * self.width), self.width)
        }
    }
}

/// Calls `f(row)` for each row once, on several threads if the rows are worth it.
fn each_row(pool: &Pool, rows: usize, width: usize, f: &(dyn Fn(usize) + Sync)) {
    const PER_CHUNK: usize = 4;
    pool.run_if(rows * width >= PARALLEL_ELEMENTS, rows.div_ceil(PER_CHUNK), &|c, _| {
        (c * PER_CHUNK..((c + 1) * PER_CHUNK).min(rows)).for_each(f);
    });
}

fn sized(v: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if v.len() < len {
        v.resize(len, 0.0);
    }
    &mut v[..len]
}

impl Forward {
    pub fn new(spec: &ModelSpec, isa: Isa, mode: Mode, threads: usize) -> Result<Forward> {
        let shape = |window| AttnShape {
            n_heads: spec.n_heads,
            n_kv_heads: spec.n_kv_heads,
            head_dim: spec.head_dim,
            scale: spec.attn_scale,
            window,
        };
        let (rope, rope_local, pairing) = match &spec.position {
            Position::Rope(r) => {
                let local = RopeTable::local(r)?.map(RopeCache::new);
                (Some(RopeCache::new(RopeTable::new(r)?)), local, r.pairing)
            }
            Position::Learned { .. } => (None, None, RopePairing::Half),
        };
        let window = spec.window.as_ref().map(|w| AttnPlan::new(&shape(Some(w.size)), &[], threads));
        Ok(Forward {
            kernels: Kernels::for_isa(isa),
            mode,
            rope,
            rope_local,
            pairing,
            attn: AttnPlan::new(&shape(None), &[], threads)?,
            attn_window: window.transpose()?,
            hidden: Vec::new(),
            delta: Vec::new(),
            q: Vec::new(),
            k: Vec::new(),
            v: Vec::new(),
            gate: Vec::new(),
            up: Vec::new(),
            acts: Acts::default(),
            logits: Vec::new(),
            n_logits: 0,
        })
    }

    /// The logits of the last [`Forward::run`].
    pub fn logits(&self) -> &[f32] {
        &self.logits[..self.n_logits]
    }

    /// Runs all rows. The tables have room for the new tokens, which are not counted in them yet.
    pub fn run(
        &mut self,
        m: &Prepared,
        pool: &Pool,
        cache: &PagePool,
        inputs: &[Input<'_>],
        tables: &[&BlockTable],
    ) {
        let spec = &m.spec;
        let d = spec.d_model;
        let mut seqs: Vec<SeqRows<'_>> = Vec::with_capacity(inputs.len());
        let mut positions: Vec<usize> = Vec::new();
        for (input, table) in inputs.iter().zip(tables) {
            let (first_pos, n_rows) = (table.len(), input.tokens.len());
            if n_rows > 0 {
                seqs.push(SeqRows { pages: table.pages(), first_pos, n_rows, row0: positions.len() });
            }
            positions.extend(first_pos..first_pos + n_rows);
        }
        let rows = positions.len();
        self.n_logits = 0;
        if rows == 0 {
            return;
        }
        let furthest = positions.iter().max().map_or(0, |p| p + 1);
        [&mut self.rope, &mut self.rope_local].into_iter().flatten().for_each(|r| r.extend_to(furthest));

        self.embed(m, pool, inputs, &positions);
        self.attn.rebuild(&seqs);
        if let Some(plan) = &mut self.attn_window {
            plan.rebuild(&seqs);
        }
        // What the last sublayer adds to the residual stream is added together with the next norm.
        let mut pending = false;
        let wanted = wanted_rows(inputs);
        let last_seqs = single_rows(&seqs, &wanted);
        let mut rows = rows;
        for (i, layer) in m.layers.iter().enumerate() {
            let kv = cache.layer(i);
            let windowed = spec.window_of(i).is_some();
            self.norm_into_acts(pool, spec, &layer.attn_norm, rows, pending);
            self.project(spec, pool, layer, windowed, &kv, &seqs, &positions);
            // Beyond the last layer's keys and values only rows with logits matter.
            if i + 1 == m.layers.len() && wanted.len() < rows {
                if wanted.is_empty() {
                    return;
                }
                keep_rows(&mut self.q, spec.q_dim(), &wanted);
                keep_rows(&mut self.hidden, d, &wanted);
                rows = wanted.len();
                match (&mut self.attn_window, windowed) {
                    (Some(plan), true) => plan.rebuild(&last_seqs),
                    _ => self.attn.rebuild(&last_seqs),
                }
            }
            self.attend(spec, pool, layer, windowed, &kv, m.isa, rows);
            self.post_norm(pool, spec, layer.post_attn.as_deref(), rows);
            self.norm_into_acts(pool, spec, &layer.ffn_norm, rows, true);
            self.feed_forward(pool, spec, layer, rows);
            self.post_norm(pool, spec, layer.post_ffn.as_deref(), rows);
            pending = true;
        }
        self.head(m, pool, rows);
    }

    fn embed(&mut self, m: &Prepared, pool: &Pool, inputs: &[Input<'_>], positions: &[usize]) {
        let (spec, d) = (&m.spec, m.spec.d_model);
        let tokens: Vec<u32> = inputs.iter().flat_map(|i| i.tokens).copied().collect();
        let hidden = RowsMut::new(sized(&mut self.hidden, tokens.len() * d), d);
        let k = self.kernels;
        // Packed for the head: its rows are read from the file, lest the whole table be resident a second time.
        let twice = spec.tied_head && Linear::wants_packing(m.embed.dtype, m.isa);
        each_row(pool, tokens.len(), d, &|r| {
            // SAFETY: one call per row.
            let out = unsafe { hidden.row(r) };
            let token = tokens[r] as usize;
            if twice {
                let mut row = vec![0; m.embed.row_bytes()];
                m.embed.data.read_at(token * row.len(), &mut row);
                k.embed_row(m.embed.dtype, &row, spec.embed_scale, out);
            } else {
                k.embed_row(m.embed.dtype, m.embed.row(token), spec.embed_scale, out);
            }
            if let (Some(table), Position::Learned { offset }) = (&m.positions, &spec.position) {
                let mut position = vec![0f32; d];
                k.embed_row(table.dtype, table.row(positions[r] + offset), 1.0, &mut position);
                k.add(out, &position);
            }
        });
    }

    /// acts = norm(hidden + delta), and hidden += delta, when `add`.
    fn norm_into_acts(&mut self, pool: &Pool, spec: &ModelSpec, w: &NormWeight, rows: usize, add: bool) {
        let d = spec.d_model;
        let hidden = RowsMut::new(&mut self.hidden[..rows * d], d);
        let out = RowsMut::new(self.acts.reset(rows, d), d);
        let (k, delta) = (self.kernels, &self.delta);
        each_row(pool, rows, d, &|r| {
            // SAFETY: one call per row.
            let (h, o) = unsafe { (hidden.row(r), out.row(r)) };
            let delta = add.then(|| &delta[r * d..(r + 1) * d]);
            match spec.norm {
                Norm::Rms { eps } => match delta {
                    Some(delta) => k.add_rms_norm(h, delta, &w.w, eps, o),
                    None => k.rms_norm(h, &w.w, eps, o),
                },
                Norm::Layer { eps } => {
                    if let Some(delta) = delta {
                        k.add(h, delta);
                    }
                    k.layer_norm(h, &w.w, w.b.as_deref().expect("checked when prepared"), eps, o);
                }
            }
        });
    }

    /// delta = norm(delta), for families that norm a sublayer's output.
    fn post_norm(&mut self, pool: &Pool, spec: &ModelSpec, w: Option<&[f32]>, rows: usize) {
        let (Some(w), Norm::Rms { eps }) = (w, spec.norm) else { return };
        let d = spec.d_model;
        let delta = RowsMut::new(&mut self.delta[..rows * d], d);
        let k = self.kernels;
        each_row(pool, rows, d, &|r| {
            // SAFETY: one call per row.
            let row = unsafe { delta.row(r) };
            k.rms_norm_heads(row, w, eps);
        });
    }

    /// q, k, v from acts; norms and RoPE of their heads; k and v into their pages.
    fn project(
        &mut self,
        spec: &ModelSpec,
        pool: &Pool,
        layer: &Layer,
        windowed: bool,
        kv: &LayerKv<'_>,
        seqs: &[SeqRows<'_>],
        positions: &[usize],
    ) {
        let rows = positions.len();
        let (qd, kvd, hd) = (spec.q_dim(), spec.kv_dim(), spec.head_dim);
        let q = sized(&mut self.q, rows * qd);
        let k = sized(&mut self.k, rows * kvd);
        let v = sized(&mut self.v, rows * kvd);
        linear(
            pool,
            self.mode,
            &mut self.acts,
            &mut [
                Out { w: &layer.q, out: q, ldo: qd },
                Out { w: &layer.k, out: k, ldo: kvd },
                Out { w: &layer.v, out: v, ldo: kvd },
            ],
        );
        let kernels = self.kernels;
        let eps = spec.norm.eps();
        let rope =
            if windowed { self.rope_local.as_ref().or(self.rope.as_ref()) } else { self.rope.as_ref() };
        // Which sequence a row belongs to, for its pages.
        let seq_of = |r: usize| &seqs[seqs.partition_point(|s| s.row0 <= r) - 1];
        let (qs, ks) = (RowsMut::new(q, qd), RowsMut::new(k, kvd));
        let (pairing, v) = (self.pairing, &*v);
        // Chunks of rows: whole pages of one sequence would be ideal for the cache lines of K; rows of a
        // chunk are neighbours, so few lines are shared between threads.
        each_row(pool, rows, qd + 2 * kvd, &|r| {
            // SAFETY: one call per row.
            let (q, k) = unsafe { (qs.row(r), ks.row(r)) };
            if let Some(w) = &layer.q_norm {
                kernels.rms_norm_heads(q, w, eps);
            }
            if let Some(w) = &layer.k_norm {
                kernels.rms_norm_heads(k, w, eps);
            }
            if let Some(rope) = rope {
                let (cos, sin) = rope.at(positions[r]);
                kernels.rope_heads(q, spec.n_heads, hd, cos, sin, pairing);
                kernels.rope_heads(k, spec.n_kv_heads, hd, cos, sin, pairing);
            }
            // SAFETY: block tables never share pages, and each (sequence, position) is one row.
            unsafe { kv.append(seq_of(r).pages, positions[r], k, &v[r * kvd..(r + 1) * kvd]) };
        });
    }

    /// delta = out-projection(attention(q)).
    fn attend(
        &mut self,
        spec: &ModelSpec,
        pool: &Pool,
        layer: &Layer,
        windowed: bool,
        kv: &LayerKv<'_>,
        isa: Isa,
        rows: usize,
    ) {
        let (d, qd) = (spec.d_model, spec.q_dim());
        let plan = match (&mut self.attn_window, windowed) {
            (Some(plan), true) => plan,
            _ => &mut self.attn,
        };
        plan.run(pool, isa, kv, &self.q[..rows * qd], self.acts.reset(rows, qd));
        let delta = sized(&mut self.delta, rows * d);
        linear(pool, self.mode, &mut self.acts, &mut [Out { w: &layer.o, out: delta, ldo: d }]);
    }

    /// delta = feed-forward(acts).
    fn feed_forward(&mut self, pool: &Pool, spec: &ModelSpec, layer: &Layer, rows: usize) {
        let (d, ff) = (spec.d_model, spec.d_ff);
        let up = sized(&mut self.up, rows * ff);
        if let Some(w) = &layer.gate {
            let gate = sized(&mut self.gate, rows * ff);
            let outs = &mut [Out { w, out: gate, ldo: ff }, Out { w: &layer.up, out: up, ldo: ff }];
            linear(pool, self.mode, &mut self.acts, outs);
        } else {
            linear(pool, self.mode, &mut self.acts, &mut [Out { w: &layer.up, out: up, ldo: ff }]);
        }
        let (k, gate, up) = (self.kernels, &self.gate, &self.up);
        let out = RowsMut::new(self.acts.reset(rows, ff), ff);
        each_row(pool, rows, ff, &|r| {
            // SAFETY: one call per row.
            let out = unsafe { out.row(r) };
            let at = r * ff..(r + 1) * ff;
            match spec.ffn {
                Ffn::SwiGlu => k.silu_mul(&gate[at.clone()], &up[at], out),
                Ffn::GeGlu => k.gelu_tanh_mul(&gate[at.clone()], &up[at], out),
                Ffn::Relu => {
                    out.copy_from_slice(&up[at]);
                    k.relu(out);
                }
            }
        });
        let delta = sized(&mut self.delta, rows * d);
        linear(pool, self.mode, &mut self.acts, &mut [Out { w: &layer.down, out: delta, ldo: d }]);
    }

    /// logits = head(norm(hidden + delta)); the rows left are those that want them.
    fn head(&mut self, m: &Prepared, pool: &Pool, rows: usize) {
        let v = m.spec.vocab;
        self.norm_into_acts(pool, &m.spec, &m.out_norm, rows, true);
        let logits = sized(&mut self.logits, rows * v);
        linear(pool, self.mode, &mut self.acts, &mut [Out { w: &m.head, out: logits, ldo: v }]);
        if let Some(cap) = m.spec.logit_softcap {
            self.kernels.softcap(logits, cap);
        }
        self.n_logits = rows * v;
    }
}

/// The rows whose logits are wanted, ascending.
pub(super) fn wanted_rows(inputs: &[Input<'_>]) -> Vec<usize> {
    let mut wanted = Vec::new();
    let mut row = 0;
    for input in inputs {
        let n = input.tokens.len();
        match input.logits {
            Logits::None => {}
            Logits::Last => wanted.extend((row + n).checked_sub(1).filter(|_| n > 0)),
            Logits::All => wanted.extend(row..row + n),
        }
        row += n;
    }
    wanted
}

/// The rows `wanted` as sequences of one row each, one after the other.
fn single_rows<'a>(seqs: &[SeqRows<'a>], wanted: &[usize]) -> Vec<SeqRows<'a>> {
    wanted
        .iter()
        .enumerate()
        .map(|(to, &r)| {
            let s = &seqs[seqs.partition_point(|s| s.row0 <= r) - 1];
            SeqRows { pages: s.pages, first_pos: s.first_pos + r - s.row0, n_rows: 1, row0: to }
        })
        .collect()
}

/// Moves the rows `wanted` (ascending) to the front.
fn keep_rows(data: &mut [f32], width: usize, wanted: &[usize]) {
    for (to, &from) in wanted.iter().enumerate() {
        data.copy_within(from * width..(from + 1) * width, to * width);
    }
}
