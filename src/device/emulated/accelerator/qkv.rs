//! The first half of attention's sublayer: norm, projections, RoPE, append to the pages or to the mailbox.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::EmulatedAccelerator;
use super::operands::{MatrixOperand, NormRows};
use crate::Result;
use crate::device::accelerator::{Context, LayerWeights, Publish, Residual};
use crate::device::emulated::ops::cast::{from_f32, numbers, numbers_mut};
use crate::device::emulated::ops::linear;
use crate::device::emulated::ops::pages::PageShape;
use crate::device::emulated::ops::qkv::{self, Heads};
use crate::device::emulated::step::Row;
use crate::device::runtime::{DevPtr, Pinned};

/// See [`Accelerator::qkv`](crate::device::accelerator::Accelerator::qkv).
pub(super) fn qkv(
    accel: &EmulatedAccelerator,
    cx: &Context<'_>,
    layer: &LayerWeights,
    kv: DevPtr,
    residual: Residual,
    publish: Option<Publish<'_>>,
    rows: Range<usize>,
) -> Result<()> {
    let step = accel.step(cx).clone();
    let (ws, shape) = (cx.ws, cx.shape.clone());
    let rows = step.clip(&rows);
    let (d, qd, kvd, width) = (shape.d_model, shape.q_dim(), shape.kv_dim(), shape.qkv_dim());
    let mut io = accel.operands(cx);
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
    let kernels = accel.kernels;
    let norm_rows = NormRows { kernels, norm: shape.norm, act: shape.act, d, delta, weight };
    accel.enqueue(cx, "qkv", io, move |reads, writes| {
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
            eps: shape.norm.eps(),
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

/// Everything in the mailbox is there: stores its epoch, after all that this thread has written.
fn publish_epoch(mailbox: &Arc<dyn Pinned>, epoch: u32) {
    // SAFETY: a mailbox begins with its epoch, a word that both sides touch atomically only, and is page-aligned.
    let word = unsafe { AtomicU32::from_ptr(mailbox.host().cast()) };
    word.store(epoch, Ordering::Release);
}
