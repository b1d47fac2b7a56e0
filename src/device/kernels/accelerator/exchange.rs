//! What comes from the host, and pages that move: rows of the mailbox, pages of keys and values.

use super::super::exchange::{MoveRows, PageMove, convert_rows};
use super::scratch::lists;
use crate::Result;
use crate::device::accelerator::{Context, Mailbox, Shape};
use crate::device::runtime::{DevPtr, Runtime};

/// See [`Accelerator::collect`](crate::device::accelerator::Accelerator::collect).
pub(super) fn collect(rt: &dyn Runtime, cx: &Context<'_>, mailbox: &Mailbox) -> Result<()> {
    let (lists, q) = (lists(cx), cx.shape.q_dim());
    if lists.max_published == 0 {
        return Ok(());
    }
    let args = MoveRows {
        from: mailbox.memory.device().add(mailbox.out_at(cx.shape, 0)),
        from_stride: 4 * q,
        to: cx.ws.attn,
        to_stride: 2 * q,
        from_list: DevPtr::NULL,
        to_list: lists.elsewhere,
        n_rows: lists.n_published,
        gate: DevPtr::NULL,
        max_rows: lists.max_published,
    };
    convert_rows(rt, cx.lane, &args, q, cx.shape.act)
}

/// Pages of a layer and where they go or come from, in the order of a list.
pub(super) fn page_move(shape: &Shape, kv: DevPtr, pages: DevPtr, n: usize, host: DevPtr) -> PageMove {
    PageMove {
        device: kv,
        host,
        device_pages: pages,
        host_pages: DevPtr::NULL,
        n_tokens: DevPtr::NULL,
        n_pages: DevPtr::NULL,
        max_pages: n,
        n_kv_heads: shape.n_kv_heads,
        head_dim: shape.head_dim,
    }
}
