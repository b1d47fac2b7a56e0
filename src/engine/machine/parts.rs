//! Partial attention results on their way from the host to the device: (m, s, o) of rows, in mapped pinned memory.

use std::ops::Range;
use std::sync::Arc;

use crate::device::{PartialRows, Pinned, Shape};
use crate::simd::attention::PartialMut;
use crate::tensor::RowsMut;

/// Memory for `rows` rows: m of all rows, then s, then o.
#[derive(Clone)]
pub(super) struct PartMail {
    pub memory: Arc<dyn Pinned>,
    pub rows: usize,
}

impl PartMail {
    /// Bytes for `rows` rows.
    pub fn bytes(shape: &Shape, rows: usize) -> usize {
        4 * rows * (2 * shape.n_heads + shape.q_dim())
    }

    /// Byte offsets of m, s and o.
    fn offsets(&self, shape: &Shape) -> [usize; 3] {
        let ms = 4 * self.rows * shape.n_heads;
        [0, ms, 2 * ms]
    }

    /// The addresses on the device.
    pub fn on_device(&self, shape: &Shape) -> PartialRows {
        let [m, s, o] = self.offsets(shape).map(|at| self.memory.device().add(at));
        PartialRows { m, s, o }
    }

    /// The rows at `places`, for the host to write.
    ///
    /// # Safety
    /// The device has merged earlier results there, and reads the next after they have been written, once.
    pub unsafe fn rows(&self, shape: &Shape, places: &Range<usize>) -> PartialMut<'_> {
        assert!(places.end <= self.rows, "places {places:?} of {}", self.rows);
        assert!(
            PartMail::bytes(shape, self.rows) <= self.memory.len(),
            "rows in {} bytes",
            self.memory.len()
        );
        let [m, s, o] = self.offsets(shape);
        let rows = |at: usize, width: usize| {
            // SAFETY: inside the memory (checked), aligned to 4 bytes, any bits are f32; the caller promises that
            // nothing else touches them.
            unsafe {
                let data = self.memory.host().add(at + 4 * width * places.start).cast::<f32>();
                RowsMut::from_raw(data, places.len(), width, width)
            }
        };
        PartialMut { m: rows(m, shape.n_heads), s: rows(s, shape.n_heads), o: rows(o, shape.q_dim()) }
    }
}
