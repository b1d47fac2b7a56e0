//! Attention over scattered pages: rows that are decoded, prompts, and the merge of two parts.

use super::Depth;
use super::numbers::{U, scale_of, some_halves, some_parts, stored, unit, words};
use super::probe::{LANE, Probe, Worst, kv_types};
use crate::Result;
use crate::cache::KvType;
use crate::device::accelerator::PartialRows;
use crate::device::kernels::attention::{
    AttentionPlan, AttentionShape, DecodeAttention, DecodeWorkspace, HEAD_DIMS, MergeAttention,
    PrefillAttention, PrefillKernel, RowRun, decode_attention, decode_item_bytes, merge_attention,
    prefill_attention, prefill_item_bytes,
};
use crate::device::runtime::{Buffer, DevPtr};

const PAGE: usize = 32;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;

/// A layer, and rows of sequences that attend to it.
struct Layer {
    shape: AttentionShape,
    window: Option<u32>,
    /// Of each head, or none.
    sinks: Vec<f32>,
    /// First position and rows of each sequence.
    seqs: Vec<(usize, usize)>,
    /// Pages of each sequence.
    pages: Vec<Vec<u32>>,
    n_pages: usize,
    rows: usize,
    q: Vec<f64>,
    q_bytes: Vec<u8>,
    /// `[page][kv_head][K, V]` of `KvType::part_bytes` each.
    kv: Vec<u8>,
}

/// The largest magnitude of queries: scores then differ by some units, as in a model.
const QUERY: f32 = 4.0;

impl Layer {
    fn new(shape: AttentionShape, window: Option<u32>, seqs: &[(usize, usize)]) -> Layer {
        let hd = shape.head_dim;
        let counts: Vec<usize> = seqs.iter().map(|(first, n)| (first + n).div_ceil(PAGE)).collect();
        let n_pages = counts.iter().sum::<usize>() + 1;
        // Every page has another place: 7 has no common divisor with what is not its multiple.
        let step = if n_pages.is_multiple_of(7) { 5 } else { 7 };
        let mut places = (1..=n_pages).map(|i| (i * step % n_pages) as u32);
        let pages = counts.iter().map(|&n| places.by_ref().take(n).collect()).collect();
        let rows = seqs.iter().map(|(_, n)| n).sum();
        let (q, q_bytes) = some_halves(shape.kv.half(), 1, rows * HEADS * hd, QUERY);
        let kv = some_parts(shape.kv, 2, n_pages * KV_HEADS * 2, hd);
        Layer { shape, window, sinks: Vec::new(), seqs: seqs.to_vec(), pages, n_pages, rows, q, q_bytes, kv }
    }

    /// The same with sinks, one far below all scores and one far above them.
    fn with_sinks(self) -> Layer {
        Layer { sinks: vec![-100.0, 0.5, 2.0, 50.0], ..self }
    }

    /// A token's keys (or values) of a head, among those of its page.
    fn part(&self, seq: usize, head: usize, token: usize, is_v: bool) -> &[u8] {
        let page = self.pages[seq][token / PAGE] as usize;
        let bytes = self.shape.kv.part_bytes(self.shape.head_dim);
        &self.kv[((page * KV_HEADS + head) * 2 + usize::from(is_v)) * bytes..][..bytes]
    }

    fn at(&self, seq: usize, head: usize, token: usize, is_v: bool, d: usize) -> f64 {
        let part = self.part(seq, head, token, is_v);
        stored(self.shape.kv, part, self.shape.head_dim, token % PAGE, d)
    }

    /// What a weight is multiplied by before it is rounded.
    fn weight_scale(&self, seq: usize, head: usize, token: usize) -> f64 {
        match self.shape.kv {
            KvType::Q8 => {
                f64::from(scale_of(self.part(seq, head, token, true), self.shape.head_dim, token % PAGE))
            }
            KvType::BF16 | KvType::F16 => 1.0,
        }
    }

    /// Each element of the output and its allowed error. With b the KV type's roundoff, a weight is 2^x with x off by the
    /// products' roundings (δ, of sums whose terms' magnitudes add up to A), and rounded to b; sums pass n terms, rescaled by
    /// tile, warp and split; the output is rounded. A sink is one more score, of which no product is taken.
    fn want(&self) -> Vec<(f64, f64)> {
        let hd = self.shape.head_dim;
        let scale = f64::from(self.shape.scale);
        let cap = self.shape.softcap.map(f64::from);
        let mut want = Vec::new();
        let mut row0 = 0;
        for (seq, &(first, n)) in self.seqs.iter().enumerate() {
            for row in 0..n {
                let pos = first + row;
                let from = (pos + 1).saturating_sub(self.window.map_or(usize::MAX, |w| w as usize));
                for head in 0..HEADS {
                    let q = &self.q[((row0 + row) * HEADS + head) * hd..][..hd];
                    let kv_head = head / (HEADS / KV_HEADS);
                    let (mut x, mut size) = (Vec::new(), 0f64);
                    for token in from..=pos {
                        let terms = (0..hd).map(|d| q[d] * self.at(seq, kv_head, token, false, d));
                        let (dot, abs) = terms.fold((0.0, 0.0), |(s, a), t| (s + t, a + t.abs()));
                        x.push(cap.map_or(dot * scale, |c| c * (dot * scale / c).tanh()));
                        size = size.max(abs * scale);
                    }
                    let sink = self.sinks.get(head).map(|&sink| f64::from(sink));
                    let most = x.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
                    let w: Vec<f64> = x.iter().map(|x| (x - most).exp()).collect();
                    let total = w.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - most).exp());
                    size = size.max(sink.map_or(0.0, f64::abs));
                    let delta = (2 * hd + 14) as f64 * U * size + 16.0 * U * cap.unwrap_or(0.0);
                    let steps = x.len().div_ceil(16) as f64 + 8.0;
                    let sums = (4.0 + 5.0 * steps + 2.0 * (x.len() as f64 + steps)) * U;
                    let weight = delta.exp_m1() + sums + unit(self.shape.kv.half());
                    // A weight is at most twice the largest with its scale's power of two.
                    let scales: Vec<f64> =
                        (from..=pos).map(|token| self.weight_scale(seq, kv_head, token)).collect();
                    let largest = w.iter().zip(&scales).map(|(w, s)| w * s).fold(0f64, f64::max);
                    for d in 0..hd {
                        let (mut out, mut size, mut plain) = (0.0, 0.0, 0.0);
                        for (i, token) in (from..=pos).enumerate() {
                            let v = self.at(seq, kv_head, token, true, d);
                            out += w[i] / total * v;
                            size += w[i] / total * v.abs();
                            plain += v.abs() / scales[i] * largest / total;
                        }
                        // A small f16 weight (with its scale) is rounded absolutely.
                        let off = 2.0 * weight * size + 2f64.powi(-24) * plain;
                        let rounding = unit(self.shape.out);
                        want.push((out, off + rounding * (out.abs() + off) + 2f64.powi(-25)));
                    }
                }
            }
            row0 += n;
        }
        want
    }

    /// The rows for the planner; with `part`, of the tokens from..to alone, as partial rows.
    fn runs(&self, part: Option<(u32, u32)>) -> (Vec<RowRun>, Vec<u32>) {
        let (mut table, mut runs, mut row0) = (Vec::new(), Vec::new(), 0);
        let (from, to) = part.unwrap_or((0, u32::MAX));
        for (pages, &(first, n)) in self.pages.iter().zip(&self.seqs) {
            runs.push(RowRun {
                row0,
                n_rows: n as u32,
                first_pos: first as u32,
                from,
                to,
                page: table.len() as u32,
                partial: part.map(|_| row0),
            });
            table.extend(&pages[from as usize / PAGE..]);
            row0 += n as u32;
        }
        (runs, table)
    }
}

/// What a plan needs on the device.
struct Lists {
    table: Buffer,
    decode: Buffer,
    prefill: Buffer,
    counts: [Buffer; 2],
    workspace: Buffer,
}

impl Lists {
    fn new(p: &Probe, layer: &Layer, plan: &AttentionPlan, table: &[u32]) -> Result<Lists> {
        let count = |n: usize| p.up(&words(&[n as u32]));
        Ok(Lists {
            table: p.up(&words(table))?,
            decode: p.up(decode_item_bytes(&plan.decode))?,
            prefill: p.up(prefill_item_bytes(&plan.prefill))?,
            counts: [count(plan.decode.len())?, count(plan.prefill.len())?],
            workspace: p.zeros(DecodeWorkspace::bytes(&layer.shape, layer.rows, plan.splits))?,
        })
    }
}

/// The sinks in the device's memory, if there are any.
fn sinks_of(p: &Probe, layer: &Layer) -> Result<Option<Buffer>> {
    let words: Vec<u8> = layer.sinks.iter().flat_map(|x| x.to_le_bytes()).collect();
    if words.is_empty() { Ok(None) } else { p.up(&words).map(Some) }
}

/// Launches what a plan has, either of decode or of prefill.
fn attend(
    p: &Probe,
    layer: &Layer,
    kernel: PrefillKernel,
    part: Option<(u32, u32)>,
    kv: &Buffer,
    out: DevPtr,
    partial: PartialRows,
) -> Result<()> {
    let (runs, table) = layer.runs(part);
    let plan = AttentionPlan::new(&runs, 0..0, layer.window, kernel.queries());
    let lists = Lists::new(p, layer, &plan, &table)?;
    let q = p.up(&layer.q_bytes)?;
    let shape = &layer.shape;
    let sinks = sinks_of(p, layer)?;
    let sinks = sinks.as_ref().map_or(DevPtr::NULL, Buffer::ptr);
    if !plan.decode.is_empty() {
        let args = DecodeAttention {
            q: q.ptr(),
            kv: kv.ptr(),
            page_table: lists.table.ptr(),
            items: lists.decode.ptr(),
            n_items: lists.counts[0].ptr(),
            max_items: plan.decode.len(),
            sinks,
            out,
            partial,
            workspace: DecodeWorkspace::at(lists.workspace.ptr(), shape, layer.rows, plan.splits),
        };
        decode_attention(&*p.rt, LANE, shape, &args)?;
    }
    if !plan.prefill.is_empty() {
        let args = PrefillAttention {
            kernel,
            q: q.ptr(),
            kv: kv.ptr(),
            n_pages: layer.n_pages,
            page_table: lists.table.ptr(),
            items: lists.prefill.ptr(),
            n_items: lists.counts[1].ptr(),
            max_items: plan.prefill.len(),
            window: layer.window,
            sinks,
            out,
            partial,
        };
        prefill_attention(&*p.rt, LANE, shape, &args)?;
    }
    // The lists are given back after the work enqueued so far.
    Ok(())
}

const NO_PARTS: PartialRows = PartialRows { m: DevPtr::NULL, s: DevPtr::NULL, o: DevPtr::NULL };

fn run(p: &Probe, layer: &Layer, kernel: PrefillKernel) -> Result<Worst> {
    let kv = p.up(&layer.kv)?;
    let out = p.out(layer.rows * HEADS * layer.shape.head_dim * 2)?;
    attend(p, layer, kernel, None, &kv, out.ptr(), NO_PARTS)?;
    Ok(Worst::of(&p.halves(&out, layer.shape.out)?, layer.want()))
}

/// One row over tokens of two sides, merged.
fn merged(p: &Probe, layer: &Layer) -> Result<Worst> {
    let hd = layer.shape.head_dim;
    let kv = p.up(&layer.kv)?;
    let memory = p.zeros(2 * HEADS * (hd + 2) * 4)?;
    let sides = [0, 1].map(|side| {
        let at = memory.ptr().add(side * HEADS * (hd + 2) * 4);
        PartialRows { m: at.add(HEADS * hd * 4), s: at.add(HEADS * (hd + 1) * 4), o: at }
    });
    let out = p.out(HEADS * hd * 2)?;
    for (side, part) in sides.iter().zip([(0, 64), (64, u32::MAX)]) {
        attend(p, layer, PrefillKernel::Mma, Some(part), &kv, out.ptr(), *side)?;
    }
    let (rows, n, sinks) = (p.up(&words(&[0]))?, p.up(&words(&[1]))?, sinks_of(p, layer)?);
    let args = MergeAttention {
        here: sides[0],
        elsewhere: sides[1],
        rows: rows.ptr(),
        n_rows: n.ptr(),
        max_rows: 1,
        sinks: sinks.as_ref().map_or(DevPtr::NULL, Buffer::ptr),
        out: out.ptr(),
    };
    merge_attention(&*p.rt, LANE, &layer.shape, &args)?;
    Ok(Worst::of(&p.halves(&out, layer.shape.out)?, layer.want()))
}

/// The shapes to check: with a window and a soft-cap too where there is time.
fn shapes(p: &Probe, depth: Depth) -> Vec<(AttentionShape, Option<u32>, String)> {
    let mut found = Vec::new();
    for kv in kv_types(p) {
        for head_dim in HEAD_DIMS {
            if depth == Depth::Quick && ![64, 128].contains(&head_dim) {
                continue;
            }
            let shape = AttentionShape {
                n_heads: HEADS,
                n_kv_heads: KV_HEADS,
                head_dim,
                scale: 1.0 / (head_dim as f32).sqrt(),
                softcap: None,
                kv,
                out: kv.half(),
            };
            let name = format!("heads of {head_dim} in {}", kv.name());
            if depth == Depth::Full && head_dim == 64 {
                let capped = AttentionShape { softcap: Some(20.0), ..shape };
                found.push((capped, Some(40), format!("{name}, a window and a soft-cap")));
            }
            found.push((shape, None, name));
        }
    }
    found
}

/// Rows that are decoded one by one: one over two splits, a short one, and one of two sides.
pub fn decode(p: &mut Probe, depth: Depth) {
    for (shape, window, name) in shapes(p, depth) {
        if !p.has(&format!("decode_attention_{}_d{}", shape.kv.name(), shape.head_dim)) {
            continue;
        }
        let layer = Layer::new(shape, window, &[(300, 1), (5, 1)]);
        p.check(&format!("decode attention, {name}"), |p| run(p, &layer, PrefillKernel::Mma));
        if window.is_none() {
            let layer = Layer::new(shape, None, &[(300, 1), (5, 1)]).with_sinks();
            p.check(&format!("decode attention with sinks, {name}"), |p| run(p, &layer, PrefillKernel::Mma));
        }
        if window.is_none() && p.has(&format!("attention_merge_{}", shape.out.name())) {
            let layer = Layer::new(shape, None, &[(100, 1)]).with_sinks();
            p.check(&format!("merged attention, {name}"), |p| merged(p, &layer));
        }
    }
}

/// Chunks of prompts, by every kernel that the device has for them.
pub fn prefill(p: &mut Probe, depth: Depth) {
    for (shape, window, name) in shapes(p, depth) {
        let layer = Layer::new(shape, window, &[(45, 20), (0, 7)]);
        for kernel in PrefillKernel::available(&*p.rt, &shape) {
            let what = format!("{}, {name}", kernel.name(&shape));
            p.check(&what, |p| run(p, &layer, kernel));
            if window.is_none() {
                let layer = Layer::new(shape, None, &[(45, 20), (0, 7)]).with_sinks();
                p.check(&format!("{what}, sinks"), |p| run(p, &layer, kernel));
            }
        }
    }
}
