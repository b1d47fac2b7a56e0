//! Rows of numbers, f32 unless said otherwise, that lie a fixed distance apart, in memory of whoever owns it: a workspace, a mailbox in pinned memory.

use std::marker::PhantomData;

use crate::host::RowSet;

/// Rows to read.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a, T = f32> {
    data: &'a [T],
    width: usize,
    stride: usize,
}

impl<'a, T> Rows<'a, T> {
    /// Rows of `width` elements, one directly behind the other.
    pub fn new(data: &'a [T], width: usize) -> Rows<'a, T> {
        Rows::strided(data, width, width)
    }

    /// Rows of `width` elements; row `r` begins at element `r · stride`.
    ///
    /// # Panics
    /// If rows overlap.
    pub fn strided(data: &'a [T], width: usize, stride: usize) -> Rows<'a, T> {
        assert!(width > 0 && width <= stride, "rows of {width} elements, {stride} apart");
        Rows { data, width, stride }
    }

    /// Whole rows.
    pub fn len(&self) -> usize {
        whole_rows(self.data.len(), self.width, self.stride)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Elements of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// All elements, row after row.
    ///
    /// # Panics
    /// If something lies between the rows.
    pub fn dense(&self) -> &'a [T] {
        assert!(self.width == self.stride, "rows of {} elements lie {} apart", self.width, self.stride);
        &self.data[..self.len() * self.width]
    }

    /// Row `r`.
    ///
    /// # Panics
    /// If it does not exist.
    pub fn row(&self, r: usize) -> &'a [T] {
        &self.data[r * self.stride..r * self.stride + self.width]
    }
}

/// Rows to write, from several threads.
#[derive(Debug)]
pub struct RowsMut<'a> {
    ptr: *mut f32,
    rows: usize,
    width: usize,
    stride: usize,
    _data: PhantomData<&'a mut [f32]>,
}

// SAFETY: the rows are borrowed mutably; `row`, the one way to them, is unsafe and promises one holder for each.
unsafe impl Send for RowsMut<'_> {}
// SAFETY: as above.
unsafe impl Sync for RowsMut<'_> {}

impl<'a> RowsMut<'a> {
    /// Rows of `width` elements, one directly behind the other.
    pub fn new(data: &'a mut [f32], width: usize) -> RowsMut<'a> {
        RowsMut::strided(data, width, width)
    }

    /// Rows of `width` elements; row `r` begins at element `r · stride`.
    ///
    /// # Panics
    /// If rows overlap.
    pub fn strided(data: &'a mut [f32], width: usize, stride: usize) -> RowsMut<'a> {
        assert!(width > 0 && width <= stride, "rows of {width} elements, {stride} apart");
        let rows = whole_rows(data.len(), width, stride);
        RowsMut { ptr: data.as_mut_ptr(), rows, width, stride, _data: PhantomData }
    }

    /// `rows` rows of `width` elements, `stride` apart, from `ptr` on: for memory in which other rows lie between them.
    ///
    /// # Safety
    /// These elements are valid f32 for reads and writes throughout `'a`, nobody else touches them meanwhile, and
    /// `width <= stride`.
    pub unsafe fn from_raw(ptr: *mut f32, rows: usize, width: usize, stride: usize) -> RowsMut<'a> {
        RowsMut { ptr, rows, width, stride, _data: PhantomData }
    }

    /// Rows.
    pub fn len(&self) -> usize {
        self.rows
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.rows == 0
    }

    /// Elements of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Row `r`.
    ///
    /// # Safety
    /// No other slice of this row is live.
    ///
    /// # Panics
    /// If it does not exist.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn row(&self, r: usize) -> &mut [f32] {
        assert!(r < self.rows, "row {r} of {}", self.rows);
        // SAFETY: in range; exclusivity is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(r * self.stride), self.width) }
    }

    /// Elements `at..at + n` of row `r`.
    ///
    /// # Safety
    /// No other slice of these elements is live.
    ///
    /// # Panics
    /// If they do not exist.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part(&self, r: usize, at: usize, n: usize) -> &mut [f32] {
        assert!(r < self.rows && at + n <= self.width, "row {r} of {}, {n} elements at {at}", self.rows);
        // SAFETY: in range; exclusivity is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(r * self.stride + at), n) }
    }
}

// SAFETY: rows are at least `width` apart (checked, or promised to `from_raw`) and `width` long.
unsafe impl<'a> RowSet for RowsMut<'a> {
    type Row = &'a mut [f32];

    fn rows(&self) -> usize {
        self.rows
    }

    unsafe fn row(&self, r: usize) -> &'a mut [f32] {
        assert!(r < self.rows, "row {r} of {}", self.rows);
        // SAFETY: in range; the elements are borrowed for 'a, and the caller asks for each row once.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(r * self.stride), self.width) }
    }
}

fn whole_rows(len: usize, width: usize, stride: usize) -> usize {
    if len < width { 0 } else { (len - width) / stride + 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_row_needs_no_gap_behind_it() {
        let data: Vec<f32> = (0..11).map(|i| i as f32).collect();
        let rows = Rows::strided(&data, 3, 4);
        assert_eq!((rows.len(), rows.row(2)), (3, &[8.0, 9.0, 10.0][..]));
        assert_eq!(Rows::strided(&data[..10], 3, 4).len(), 2);
        assert!(Rows::new(&data[..2], 3).is_empty());
    }

    #[test]
    fn gaps_between_rows_stay_as_they_are() {
        let mut data = [0.0; 11];
        let rows = RowsMut::strided(&mut data, 3, 4);
        assert_eq!(rows.len(), 3);
        for r in 0..3 {
            // SAFETY: one slice at a time.
            unsafe { rows.row(r) }.fill(1.0 + r as f32);
        }
        // SAFETY: one slice at a time.
        unsafe { rows.part(1, 1, 2) }.fill(9.0);
        assert_eq!(data, [1.0, 1.0, 1.0, 0.0, 2.0, 9.0, 9.0, 0.0, 3.0, 3.0, 3.0]);
    }

    #[test]
    #[should_panic(expected = "row 3 of 3")]
    fn a_row_that_does_not_exist_is_refused() {
        let mut data = [0.0; 11];
        // SAFETY: one slice.
        unsafe { RowsMut::strided(&mut data, 3, 4).row(3) };
    }
}
