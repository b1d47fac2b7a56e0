//! Rows that arrive from the host through the mailbox, and pages of keys and values that move between host and device.

use std::ops::Range;

use super::super::exchange::{MoveRows, PageMoves, copy_rows};
use super::lists::lists;
use super::qkv::check_mailbox;
use crate::Result;
use crate::device::accelerator::{LayerPages, Mailbox, PageMove, Shape, StepContext};
use crate::device::runtime::{DevPtr, Runtime};

/// See [`RowOp::Collect`](crate::device::accelerator::RowOp::Collect).
pub(super) fn collect(
    rt: &dyn Runtime,
    cx: &StepContext<'_>,
    mailbox: &Mailbox,
    rows: &Range<usize>,
) -> Result<()> {
    cx.check(rows)?;
    let (lists, q) = (lists(cx), cx.shape.q_dim());
    let some = cx.step.lists.elsewhere_in(rows);
    if some.is_empty() {
        return Ok(());
    }
    check_mailbox(cx, mailbox)?;
    let args = MoveRows {
        from: mailbox.memory.device().add(mailbox.out_at(cx.shape, 0)),
        from_stride: 2 * q,
        to: cx.ws.attn,
        to_stride: 2 * q,
        from_list: lists.places.add(4 * some.start),
        to_list: lists.elsewhere.add(4 * some.start),
        n_rows: DevPtr::NULL,
        gate: DevPtr::NULL,
        max_rows: some.len(),
    };
    copy_rows(rt, cx.lane, &args, 2 * q)
}

/// The pages that move, of the model's shape.
pub(super) fn page_moves<'a>(
    shape: &Shape,
    layers: &'a [LayerPages],
    pages: &'a [PageMove],
) -> PageMoves<'a> {
    PageMoves { layers, pages, n_kv_heads: shape.n_kv_heads, head_dim: shape.head_dim, kv: shape.kv }
}
