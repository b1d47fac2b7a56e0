//! Attention over pages, and merging it with a partial result from another device.

use std::ops::Range;

use super::EmulatedAccelerator;
use crate::Result;
use crate::cache::PAGE_TOKENS;
use crate::device::accelerator::{Attend, LayerWeights, PartialRows, StepContext};
use crate::device::emulated::ops::attention::{self, Tokens};
use crate::device::emulated::ops::cast::{numbers, numbers_mut, to_f32};
use crate::device::emulated::ops::pages::PageShape;
use crate::device::emulated::step::CpuSeq;
use crate::device::runtime::DevPtr;

/// See [`RowOp::Attend`](crate::device::accelerator::RowOp::Attend).
pub(super) fn attend(
    accel: &EmulatedAccelerator,
    cx: &StepContext<'_>,
    layer: &LayerWeights,
    kv: DevPtr,
    rows: &Range<usize>,
) -> Result<()> {
    cx.check(rows)?;
    cx.step.lists.parts_of(rows)?;
    let step = accel.step(cx).clone();
    let (ws, shape) = (cx.ws, cx.shape.clone());
    let (hd, h_a, h_kv, qd) = (shape.head_dim, shape.n_heads, shape.n_kv_heads, shape.q_dim());
    let window = shape.window.filter(|_| layer.windowed);
    let mut io = accel.operands(cx);
    let seqs = step.seqs(rows);
    let own = step.clip(rows);
    let q = io.read_rows(ws.q, &own, 2 * qd);
    // Pages that the window has left are not read.
    let seen_pages = |s: &CpuSeq| {
        let from = s.attend.first_token();
        let first = attention::seen(step.position(s.row0), from, window).start.max(from);
        s.pages.len().min((first - from) / PAGE_TOKENS)..s.pages.len()
    };
    let mut used: Vec<u32> =
        step.seqs[seqs.clone()].iter().flat_map(|s| &s.pages[seen_pages(s)]).copied().collect();
    used.sort_unstable();
    used.dedup();
    let first_page = io.reads.len();
    for &p in &used {
        io.read(kv.add(p as usize * shape.page_bytes()), shape.page_bytes());
    }
    // One output span per sequence, because other operations write the rows attended elsewhere.
    let outs: Vec<Option<usize>> = step.seqs[seqs.clone()]
        .iter()
        .map(|s| s.attend.is_whole().then(|| io.write_rows(ws.attn, &s.rows(), 2 * qd)))
        .collect();
    let places = step.lists.partial_in(rows);
    let partial = (!places.is_empty()).then(|| {
        [(ws.partial.m, 4 * h_a), (ws.partial.s, 4 * h_a), (ws.partial.o, 4 * qd)]
            .map(|(base, bytes)| io.write_rows(base, &places, bytes))
    });
    let sinks = io.sinks(layer, h_a);
    let page = PageShape::of(&shape);
    let scaling = (shape.attn_scale, shape.attn_softcap);
    accel.enqueue_function(cx, "attend", io, move |reads, writes| {
        let q = to_f32(shape.kv.half(), numbers(reads[q]));
        for (s, out) in step.seqs[seqs.clone()].iter().zip(&outs) {
            if s.attend == Attend::Elsewhere {
                continue;
            }
            let from = s.attend.first_token();
            let sees = |row: usize| {
                let seen = attention::seen(step.position(row), from, window);
                let end = s.attend.end(seen.end);
                seen.start.min(end)..end
            };
            let span = sees(s.row0).start..sees(s.row0 + s.n_rows - 1).end;
            let page_of = |i: usize| {
                let slot = used.binary_search(&s.page(i)).expect("all pages read are listed");
                reads[first_page + slot]
            };
            for kv_head in 0..h_kv {
                let tokens = Tokens::read(&page, kv_head, span.clone(), page_of);
                for (i, row) in s.rows().enumerate() {
                    for head in kv_head * h_a / h_kv..(kv_head + 1) * h_a / h_kv {
                        let q = &q[(row - own.start) * qd + head * hd..][..hd];
                        let mut o = vec![0f32; hd];
                        let (m, sum) = tokens.attend(sees(row), scaling, q, &mut o);
                        if let Some(out) = out {
                            attention::normalise((m, sum), sinks.of(reads, head), &mut o);
                            let to = &mut numbers_mut(writes[*out])[i * qd + head * hd..][..hd];
                            shape.act.narrow(&o, to);
                        } else if let Some([ms, ss, os]) = partial {
                            let place = step.lists.partial().binary_search(&(row as u32));
                            let at = place.expect("a row attended in part") - places.start;
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

/// See [`RowOp::Merge`](crate::device::accelerator::RowOp::Merge).
pub(super) fn merge(
    accel: &EmulatedAccelerator,
    cx: &StepContext<'_>,
    layer: &LayerWeights,
    other: &PartialRows,
    rows: &Range<usize>,
) -> Result<()> {
    cx.check(rows)?;
    let (h_a, hd, qd, act) = (cx.shape.n_heads, cx.shape.head_dim, cx.shape.q_dim(), cx.shape.act);
    let n = cx.step.lists.partial_in(rows);
    if n.is_empty() {
        return Ok(());
    }
    let mut io = accel.operands(cx);
    let [here, there] = [&cx.ws.partial, other].map(|p| {
        [(p.m, 4 * h_a), (p.s, 4 * h_a), (p.o, 4 * qd)].map(|(base, bytes)| io.read_rows(base, &n, bytes))
    });
    let sinks = io.sinks(layer, h_a);
    let rows = cx.step.lists.partial()[n].iter().map(|&r| r as usize);
    let outs: Vec<usize> = rows.map(|r| io.write_rows(cx.ws.attn, &(r..r + 1), 2 * qd)).collect();
    accel.enqueue_function(cx, "merge", io, move |reads, writes| {
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
                attention::normalise((m, s), sinks.of(reads, head), &mut o);
                act.narrow(&o, &mut out[head * hd..][..hd]);
            }
        }
        Ok(())
    })
}
