//! What comes from the host, and pages that move: rows of the mailbox, pages of keys and values.

use super::EmulatedAccelerator;
use crate::Result;
use crate::device::accelerator::{Context, Mailbox, Shape};
use crate::device::emulated::op::PageMove;
use crate::device::emulated::ops::cast::{from_f32, numbers, numbers_mut};
use crate::device::emulated::ops::pages::PageShape;
use crate::device::runtime::DevPtr;

/// See [`Accelerator::collect`](crate::device::accelerator::Accelerator::collect).
pub(super) fn collect(accel: &EmulatedAccelerator, cx: &Context<'_>, mailbox: &Mailbox) -> Result<()> {
    let step = accel.step(cx).clone();
    let (qd, act) = (cx.shape.q_dim(), cx.shape.act);
    if step.n_published == 0 {
        return Ok(());
    }
    let mut io = accel.operands(cx);
    let o = mailbox.memory.device().add(mailbox.out_at(cx.shape, 0));
    let o = io.read_rows(o, &(0..step.n_published), 4 * qd);
    let rows: Vec<usize> = step.elsewhere().collect();
    let outs: Vec<usize> = rows.iter().map(|&r| io.write_rows(cx.ws.attn, &(r..r + 1), 2 * qd)).collect();
    accel.enqueue(cx, "collect", io, move |reads, writes| {
        let o = numbers::<f32>(reads[o]).chunks_exact(qd);
        for (o, &out) in o.zip(&outs) {
            from_f32(act, o, numbers_mut(writes[out]));
        }
        Ok(())
    })
}

/// Pages of a layer and where they go or come from, in the order of a list.
pub(super) fn page_move(
    shape: &Shape,
    kv: DevPtr,
    list: DevPtr,
    n: usize,
    host: DevPtr,
    to_host: bool,
) -> PageMove {
    let page = PageShape { n_kv_heads: shape.n_kv_heads, head_dim: shape.head_dim };
    PageMove { page, kv, list, n, host, to_host }
}
