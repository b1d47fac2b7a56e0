//! Jobs over rows: each row is given to one thread, so that the code that computes on it needs no `unsafe`.

use std::marker::PhantomData;

use super::Pool;

/// Rows of a job, each given once to the thread that claims its chunk.
///
/// # Safety
/// Rows of different indices share no element, and [`RowSet::row`] gives the same row for the same index.
pub unsafe trait RowSet: Sync {
    /// A row: a slice, or a tuple of slices.
    type Row;

    /// Number of rows.
    fn rows(&self) -> usize;

    /// Row `r`.
    ///
    /// # Safety
    /// Called at most once for each `r`.
    ///
    /// # Panics
    /// If there is no such row.
    unsafe fn row(&self, r: usize) -> Self::Row;
}

/// A slice in pieces of `len` elements, the last possibly shorter: `chunks_mut` for a job.
pub struct Pieces<'a, T> {
    data: *mut T,
    elements: usize,
    len: usize,
    _data: PhantomData<&'a mut [T]>,
}

// SAFETY: the slice is borrowed mutably, and `row` hands out disjoint pieces of it: as sending each of them.
unsafe impl<T: Send> Sync for Pieces<'_, T> {}

impl<'a, T: Send> Pieces<'a, T> {
    /// `data` in pieces of `len` elements.
    ///
    /// # Panics
    /// If `len` is 0.
    pub fn new(data: &'a mut [T], len: usize) -> Pieces<'a, T> {
        assert!(len > 0, "pieces of no elements");
        Pieces { data: data.as_mut_ptr(), elements: data.len(), len, _data: PhantomData }
    }
}

// SAFETY: piece `r` is elements r·len..(r + 1)·len, which no other piece has.
unsafe impl<'a, T: Send> RowSet for Pieces<'a, T> {
    type Row = &'a mut [T];

    fn rows(&self) -> usize {
        self.elements.div_ceil(self.len)
    }

    unsafe fn row(&self, r: usize) -> &'a mut [T] {
        assert!(r < self.rows(), "piece {r} of {}", self.rows());
        let at = r * self.len;
        // SAFETY: in range; the slice is borrowed for 'a, and the caller asks for each piece once.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(at), self.len.min(self.elements - at)) }
    }
}

/// Row `r` of both.
// SAFETY: as each of them.
unsafe impl<A: RowSet, B: RowSet> RowSet for (A, B) {
    type Row = (A::Row, B::Row);

    fn rows(&self) -> usize {
        assert_eq!(self.0.rows(), self.1.rows(), "as many rows of each");
        self.0.rows()
    }

    unsafe fn row(&self, r: usize) -> Self::Row {
        // SAFETY: the caller's promise is theirs.
        unsafe { (self.0.row(r), self.1.row(r)) }
    }
}

/// Row `r` of all three.
// SAFETY: as each of them.
unsafe impl<A: RowSet, B: RowSet, C: RowSet> RowSet for (A, B, C) {
    type Row = (A::Row, B::Row, C::Row);

    fn rows(&self) -> usize {
        assert_eq!((self.0.rows(), self.0.rows()), (self.1.rows(), self.2.rows()), "as many rows of each");
        self.0.rows()
    }

    unsafe fn row(&self, r: usize) -> Self::Row {
        // SAFETY: the caller's promise is theirs.
        unsafe { (self.0.row(r), self.1.row(r), self.2.row(r)) }
    }
}

impl Pool {
    /// Calls `f(r, row r)` once for each row: `per_chunk` neighbours on one thread, one after the other; all on the calling
    /// thread unless `parallel` (for rows that may be too few to be worth waking workers).
    ///
    /// # Panics
    /// As [`Pool::run`]; if a tuple's parts have different numbers of rows.
    pub fn rows<R: RowSet>(
        &self,
        parallel: bool,
        per_chunk: usize,
        rows: R,
        f: impl Fn(usize, R::Row) + Sync,
    ) {
        let n = rows.rows();
        self.run_if(parallel, n.div_ceil(per_chunk), &|chunk, _| {
            for r in chunk * per_chunk..((chunk + 1) * per_chunk).min(n) {
                // SAFETY: `rows` is ours alone, each chunk runs once, and each row belongs to one chunk.
                f(r, unsafe { rows.row(r) });
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_handed_out_once_with_its_number() {
        for threads in [1, 3] {
            let pool = Pool::new(threads);
            for (parallel, per_chunk) in [(false, 1), (true, 1), (true, 4), (true, 1000)] {
                let (mut a, mut b, mut c) = (vec![0u32; 10 * 7], vec![0u8; 70 * 3], vec![0u64; 70 * 2 - 1]);
                let set = (Pieces::new(&mut a, 1), Pieces::new(&mut b, 3), Pieces::new(&mut c, 2));
                pool.rows(parallel, per_chunk, set, |r, (a, b, c)| {
                    a[0] += r as u32;
                    b.iter_mut().for_each(|x| *x += r as u8);
                    c.iter_mut().for_each(|x| *x += r as u64);
                });
                assert!(a.iter().enumerate().all(|(i, &x)| x == i as u32));
                assert!(b.iter().enumerate().all(|(i, &x)| x == (i / 3) as u8));
                assert!(c.iter().enumerate().all(|(i, &x)| x == (i / 2) as u64), "the last piece is shorter");
            }
        }
    }

    #[test]
    #[should_panic(expected = "as many rows of each")]
    fn buffers_of_different_numbers_of_rows_are_refused() {
        let (mut a, mut b) = ([0u8; 4], [0u8; 5]);
        Pool::new(1).rows(false, 1, (Pieces::new(&mut a, 1), Pieces::new(&mut b, 1)), |_, _| ());
    }
}
