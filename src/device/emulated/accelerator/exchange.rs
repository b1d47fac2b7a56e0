//! Rows that arrive from the host through the mailbox, and pages of keys and values that move between host and device.

use std::ops::Range;

use super::EmulatedAccelerator;
use super::qkv::check_mailbox;
use crate::Result;
use crate::device::accelerator::{LayerPages, Mailbox, PageMove, Shape, StepContext};
use crate::device::emulated::op::LayerPageMoves;
use crate::device::emulated::ops::cast::Kept;
use crate::device::emulated::ops::pages::PageShape;

/// See [`RowOp::Collect`](crate::device::accelerator::RowOp::Collect).
pub(super) fn collect(
    accel: &EmulatedAccelerator,
    cx: &StepContext<'_>,
    mailbox: &Mailbox,
    rows: &Range<usize>,
) -> Result<()> {
    cx.check(rows)?;
    let (qd, lists) = (cx.shape.q_dim(), &cx.step.lists);
    let act = Kept::of(cx.shape, cx.shape.act);
    let some = &lists.elsewhere()[lists.elsewhere_in(rows)];
    if some.is_empty() {
        return Ok(());
    }
    check_mailbox(cx, mailbox)?;
    let mut io = accel.operands(cx);
    let letters: Vec<(usize, usize)> = some
        .iter()
        .map(|&row| {
            let place = lists.place(row).expect("rows attended elsewhere have a place");
            let o = mailbox.memory.device().add(mailbox.out_at(cx.shape, place));
            let row = row as usize;
            (io.read(o, act.bytes() * qd), io.write_rows(cx.ws.attn, &(row..row + 1), act.bytes() * qd))
        })
        .collect();
    accel.enqueue_function(cx, "collect", io, move |reads, writes| {
        for &(o, out) in &letters {
            writes[out].copy_from_slice(reads[o]);
        }
        Ok(())
    })
}

/// The pages that move, of the model's shape.
pub(super) fn page_moves(
    shape: &Shape,
    layers: &[LayerPages],
    pages: &[PageMove],
    to_host: bool,
) -> Result<LayerPageMoves> {
    PageMove::check(pages, to_host)?;
    let page = PageShape::of(shape);
    Ok(LayerPageMoves { page, layers: layers.into(), pages: pages.into(), to_host })
}
