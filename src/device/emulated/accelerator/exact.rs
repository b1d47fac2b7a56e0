//! Attention with the CPU's bits: over all tokens, over the tokens before a page, or from a page on.
//!
//! A row's sums are accumulated page after page from the first. So attending the tokens before a page gives the sums at
//! that page, on whichever device. Attention from a page on continues these sums and therefore needs the other part's
//! result: it is computed when the parts are merged, over the pages named in the call to `attend`.

use std::ops::Range;

use super::EmulatedAccelerator;
use super::operands::Operands;
use crate::Result;
use crate::cache::{PAGE_TOKENS, PagePool};
use crate::device::accelerator::{Attend, LayerWeights, PartialRows, Shape, StepContext};
use crate::device::emulated::ops::cast::{numbers, numbers_mut};
use crate::device::emulated::ops::cpu::{CpuKernels, SeqPages};
use crate::device::emulated::ops::pages::PageShape;
use crate::device::emulated::step::{CpuSeq, Late};
use crate::device::runtime::DevPtr;
use crate::simd::attention::{AttnShape, Partial};

/// The attention shape of a layer, as the CPU's kernels take it.
pub(super) fn attn_shape(shape: &Shape, windowed: bool) -> AttnShape {
    AttnShape {
        n_heads: shape.n_heads,
        n_kv_heads: shape.n_kv_heads,
        head_dim: shape.head_dim,
        scale: shape.attn_scale,
        softcap: shape.attn_softcap,
        window: shape.window.filter(|_| windowed),
    }
}

/// A sequence's operands.
struct SeqOperands {
    seq: SeqPages,
    /// Indices among the reads: queries, and the first page.
    q: usize,
    page: usize,
    n_pages: usize,
    /// Indices among the writes: the rows of attn, or m, s and o.
    out: Out,
}

enum Out {
    Whole(usize),
    Part([usize; 3]),
}

impl SeqOperands {
    /// The operands of `rows` of a sequence.
    fn new(
        io: &mut Operands,
        cx: &StepContext<'_>,
        kv: DevPtr,
        s: &CpuSeq,
        rows: &Range<usize>,
        first_pos: usize,
        windowed: bool,
        out: Out,
    ) -> SeqOperands {
        let shape = cx.shape;
        let listed = s.attend.first_token() / PAGE_TOKENS;
        let end = s.attend.end(first_pos + rows.len());
        // Pages that the window has left are not read.
        let window = shape.window.filter(|_| windowed);
        let seen = window.map_or(0, |w| (first_pos + 1).saturating_sub(w)) / PAGE_TOKENS;
        let before = listed.max(seen.min(end.div_ceil(PAGE_TOKENS)));
        let n_pages = end.div_ceil(PAGE_TOKENS).saturating_sub(before);
        let q = io.read_rows(cx.ws.q, rows, 4 * shape.q_dim());
        let page = io.reads.len();
        for &p in &s.pages[before - listed..][..n_pages] {
            io.read(kv.add(p as usize * shape.page_bytes()), shape.page_bytes());
        }
        // Earlier pages are never accessed.
        let pages = (0..before + n_pages).map(|i| i.saturating_sub(before) as u32).collect();
        let tokens = s.attend.first_token()..end;
        SeqOperands { seq: SeqPages { pages, first_pos, n_rows: rows.len(), tokens }, q, page, n_pages, out }
    }

    /// The sequence's queries and pages.
    fn read<'a>(&self, cpu: &CpuKernels, shape: &Shape, reads: &[&'a [u8]]) -> Result<(&'a [f32], PagePool)> {
        // The page holds nothing yet after the last attended token.
        let first = (self.seq.pages.len() - self.n_pages) * PAGE_TOKENS;
        let end = self.seq.tokens.end.min(self.seq.first_pos + self.seq.n_rows);
        let pages = reads[self.page..self.page + self.n_pages].iter().enumerate();
        let pages = pages.map(|(i, page)| (*page, end.saturating_sub(first + i * PAGE_TOKENS)));
        Ok((numbers(reads[self.q]), cpu.pages(PageShape::of(shape), pages)?))
    }
}

/// See [`RowOp::Attend`](crate::device::accelerator::RowOp::Attend).
pub(super) fn attend(
    accel: &EmulatedAccelerator,
    cx: &StepContext<'_>,
    cpu: CpuKernels,
    layer: &LayerWeights,
    kv: DevPtr,
    rows: &Range<usize>,
) -> Result<()> {
    cx.check(rows)?;
    cx.step.lists.parts_of(rows)?;
    let step = accel.step(cx).clone();
    let (ws, shape) = (cx.ws, cx.shape.clone());
    let (h_a, qd) = (shape.n_heads, shape.q_dim());
    step.attend_late(Late { rows: rows.clone(), kv, windowed: layer.windowed });
    let mut io = accel.operands(cx);
    let mut seqs = Vec::new();
    for s in &step.seqs[step.seqs(rows)] {
        let own = s.rows();
        let out = match s.attend {
            Attend::Elsewhere | Attend::From { .. } => continue,
            Attend::Here | Attend::Since { .. } => Out::Whole(io.write_rows(ws.attn, &own, 4 * qd)),
            Attend::UpTo { .. } => {
                let places = cx.step.lists.partial_in(&own);
                let parts = [(ws.partial.m, 4 * h_a), (ws.partial.s, 4 * h_a), (ws.partial.o, 4 * qd)];
                Out::Part(parts.map(|(base, bytes)| io.write_rows(base, &places, bytes)))
            }
        };
        let first = step.position(s.row0);
        seqs.push(SeqOperands::new(&mut io, cx, kv, s, &own, first, layer.windowed, out));
    }
    if seqs.is_empty() {
        return Ok(());
    }
    let attn = attn_shape(&shape, layer.windowed);
    let sinks = io.sinks(layer, h_a);
    accel.enqueue_function(cx, "attend", io, move |reads, writes| {
        for s in &seqs {
            let (q, pages) = s.read(&cpu, &shape, reads)?;
            match s.out {
                Out::Whole(out) => {
                    cpu.attend(&attn, &pages, &s.seq, q, sinks.all(reads), numbers_mut(writes[out]))?;
                }
                Out::Part([m, sum, o]) => {
                    let part = cpu.attend_part(&attn, &pages, &s.seq, q)?;
                    numbers_mut(writes[m]).copy_from_slice(&part.m);
                    numbers_mut(writes[sum]).copy_from_slice(&part.s);
                    numbers_mut(writes[o]).copy_from_slice(&part.o);
                }
            }
        }
        Ok(())
    })
}

/// See [`RowOp::Merge`](crate::device::accelerator::RowOp::Merge).
pub(super) fn merge(
    accel: &EmulatedAccelerator,
    cx: &StepContext<'_>,
    cpu: CpuKernels,
    layer: &LayerWeights,
    other: &PartialRows,
    rows: &Range<usize>,
) -> Result<()> {
    cx.check(rows)?;
    let step = accel.step(cx).clone();
    let shape = cx.shape.clone();
    let (h_a, qd) = (shape.n_heads, shape.q_dim());
    let mut io = accel.operands(cx);
    let mut seqs = Vec::new();
    for s in step.seqs.iter().filter(|s| matches!(s.attend, Attend::From { .. })) {
        let own = s.row0.max(rows.start)..(s.row0 + s.n_rows).min(rows.end);
        if own.is_empty() {
            continue;
        }
        let late = step.late(&own)?;
        let places = cx.step.lists.partial_in(&own);
        let before = [(other.m, 4 * h_a), (other.s, 4 * h_a), (other.o, 4 * qd)]
            .map(|(base, bytes)| io.read_rows(base, &places, bytes));
        let out = io.write_rows(cx.ws.attn, &own, 4 * qd);
        let first_pos = step.position(own.start);
        let operands =
            SeqOperands::new(&mut io, cx, late.kv, s, &own, first_pos, late.windowed, Out::Whole(out));
        seqs.push((operands, before, attn_shape(&shape, late.windowed), out));
    }
    if seqs.is_empty() {
        return Ok(());
    }
    let sinks = io.sinks(layer, h_a);
    accel.enqueue_function(cx, "merge", io, move |reads, writes| {
        for (s, before, attn, out) in &seqs {
            let (q, pages) = s.read(&cpu, &shape, reads)?;
            let [m, sum, o] = before.map(|i| numbers::<f32>(reads[i]).to_vec());
            let before = Partial { m, s: sum, o };
            let (sinks, out) = (sinks.all(reads), numbers_mut(writes[*out]));
            cpu.attend_rest(attn, &pages, &s.seq, q, before, sinks, out)?;
        }
        Ok(())
    })
}
