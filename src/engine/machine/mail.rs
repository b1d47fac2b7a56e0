//! The host's side of a mailbox: rows that the device has published, and what the host answers.
//!
//! Rows are 16 bits wide on the link. Keys and values go from there into pages as they are, or are quantised on the way; queries are widened
//! for attention, and its results rounded, by all workers if there are enough rows. With exact results all of them are f32.

use std::ops::Range;

use super::device::rows_of;
use crate::cache::LayerKv;
use crate::device::{Mailbox, Shape, Step};
use crate::engine::host::{HostContext, HostStep, each_row};
use crate::host::{Pieces, Pool};
use crate::program::Op;
use crate::tensor::{Rows, RowsMut};

/// The places of an operation's rows in the memory that they pass through.
#[derive(Debug, Clone)]
pub(super) struct MailboxRows {
    /// In the mailbox.
    pub mail: Range<usize>,
    /// Among the rows attended in parts.
    pub parts: Range<usize>,
}

impl MailboxRows {
    pub fn of(step: &Step, op: &Op) -> MailboxRows {
        let rows = rows_of(op);
        MailboxRows { mail: step.lists.published_in(&rows), parts: step.lists.partial_in(&rows) }
    }
}

/// Rows of the mailbox that belong to rows of an operation.
pub(super) struct Mail<'a> {
    pub mailbox: &'a Mailbox,
    pub shape: &'a Shape,
    /// Their consecutive places.
    pub places: Range<usize>,
}

impl Mail<'_> {
    /// `width` elements from element `from` on of q|k|v of each row.
    ///
    /// # Safety
    /// The device has published the rows and writes none of them meanwhile. `T` is u16, or f32 with exact results.
    unsafe fn rows<T>(&self, from: usize, width: usize) -> Rows<'_, T> {
        let at = self.mailbox.row_at(self.shape, self.places.start) + size_of::<T>() * from;
        let stride = self.shape.qkv_dim();
        let len = self.places.len().saturating_sub(1) * stride + width;
        assert!(
            at + size_of::<T>() * len <= self.mailbox.memory.len(),
            "rows {:?} of a mailbox",
            self.places
        );
        // SAFETY: inside the memory (checked), aligned (the header is 64 bytes, rows are whole elements), any bits are a
        // number, and nothing writes it.
        let data = unsafe { std::slice::from_raw_parts(self.mailbox.memory.host().add(at).cast::<T>(), len) };
        Rows::strided(data, width, stride)
    }

    /// Copies the queries of all rows to those of `to`.
    ///
    /// # Safety
    /// The device has published the rows and writes none of them meanwhile.
    pub unsafe fn queries(&self, pool: &Pool, to: RowsMut<'_>) {
        let (qd, half) = (self.shape.q_dim(), self.shape.kv.half());
        if self.shape.exact.is_some() {
            // SAFETY: the caller's promise; exact results are f32.
            let q = unsafe { self.rows::<f32>(0, qd) };
            return each_row(pool, to, qd, |r, to| to.copy_from_slice(q.row(r)));
        }
        // SAFETY: the caller's promise.
        let q = unsafe { self.rows::<u16>(0, qd) };
        each_row(pool, to, qd, |r, to| half.widen(q.row(r), to));
    }

    /// Stores the keys and values of all rows in the pages of `rows`, rows of the step.
    ///
    /// # Safety
    /// As [`Mail::queries`].
    pub unsafe fn append(
        &self,
        cx: &HostContext<'_>,
        step: &HostStep,
        pages: &LayerKv<'_>,
        rows: Range<usize>,
    ) {
        let (qd, kvd) = (self.shape.q_dim(), self.shape.kv_dim());
        if self.shape.exact.is_some() {
            // SAFETY: the caller's promise; exact results are f32.
            let (k, v) = unsafe { (self.rows::<f32>(qd, kvd), self.rows::<f32>(qd + kvd, kvd)) };
            return cx.append_from(step, pages, rows, k, v);
        }
        assert_eq!(pages.dtype(), self.shape.kv, "the type of the host's pages, and of the device's");
        // SAFETY: the caller's promise.
        let (k, v) = unsafe { (self.rows::<u16>(qd, kvd), self.rows::<u16>(qd + kvd, kvd)) };
        cx.append_from(step, pages, rows, k, v);
    }

    /// Answers with these results, one for each row.
    ///
    /// # Safety
    /// The device has collected earlier results there, and the next are written once.
    pub unsafe fn answer(&self, pool: &Pool, from: Rows<'_>) {
        let (qd, act) = (self.shape.q_dim(), self.shape.act);
        assert_eq!(from.len(), self.places.len(), "results of the rows of a mailbox");
        if self.shape.exact.is_some() {
            // SAFETY: the caller's promise; exact results are f32.
            let to = unsafe { self.out::<f32>() };
            return each_row(pool, to, qd, |r, to| to.copy_from_slice(from.row(r)));
        }
        // SAFETY: the caller's promise.
        let to = unsafe { self.out::<u16>() };
        each_row(pool, to, qd, |r, to| act.narrow(from.row(r), to));
    }

    /// The places of the rows' results.
    ///
    /// # Safety
    /// As [`Mail::answer`]. `T` is u16, or f32 with exact results.
    unsafe fn out<T: Send>(&self) -> Pieces<'_, T> {
        let (at, width) = (self.mailbox.out_at(self.shape, self.places.start), self.shape.q_dim());
        let len = width * self.places.len();
        assert!(
            at + size_of::<T>() * len <= self.mailbox.memory.len(),
            "rows {:?} of a mailbox",
            self.places
        );
        // SAFETY: inside the memory (checked), aligned as in `rows`, any bits are a number; the caller promises that nothing
        // else touches them.
        let data =
            unsafe { std::slice::from_raw_parts_mut(self.mailbox.memory.host().add(at).cast::<T>(), len) };
        Pieces::new(data, width)
    }
}
