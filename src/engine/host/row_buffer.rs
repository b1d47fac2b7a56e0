//! Memory for rows.

use std::ops::Range;

use crate::host::AlignedBuffer;
use crate::tensor::{Rows, RowsMut};

/// Rows of one width; their number only grows.
#[derive(Debug)]
pub struct RowBuffer {
    data: AlignedBuffer<f32>,
    width: usize,
}

impl RowBuffer {
    pub(super) fn new(width: usize) -> RowBuffer {
        RowBuffer { data: AlignedBuffer::default(), width }
    }

    /// Makes room for exactly `rows` rows, the size that the dry run counts; existing rows move along.
    pub(super) fn reserve(&mut self, rows: usize) {
        self.data.extend(rows * self.width);
    }

    /// Elements of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Number of rows that fit.
    pub fn len(&self) -> usize {
        self.data.len() / self.width.max(1)
    }

    /// Whether no row fits.
    pub fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    /// The elements of `rows`, row after row.
    pub fn rows(&self, rows: Range<usize>) -> &[f32] {
        &self.data[rows.start * self.width..rows.end * self.width]
    }

    /// The elements of `rows`, mutable.
    pub fn rows_mut(&mut self, rows: Range<usize>) -> &mut [f32] {
        &mut self.data[rows.start * self.width..rows.end * self.width]
    }

    /// `rows`, as operations read them.
    pub fn view(&self, rows: Range<usize>) -> Rows<'_> {
        Rows::new(self.rows(rows), self.width)
    }

    /// `rows`, as operations write them.
    pub fn view_mut(&mut self, rows: Range<usize>) -> RowsMut<'_> {
        let width = self.width;
        RowsMut::new(self.rows_mut(rows), width)
    }

    /// Moves the rows `keep` (ascending) to row `to` and the following rows.
    pub(super) fn keep(&mut self, to: usize, keep: impl Iterator<Item = usize>) {
        for (i, from) in keep.enumerate() {
            let at = from * self.width;
            self.data.copy_within(at..at + self.width, (to + i) * self.width);
        }
    }
}
