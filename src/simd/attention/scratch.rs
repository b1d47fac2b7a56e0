//! The buffers of a plan: one set per worker, and the slots of rows whose segments are spread over several items.

use std::marker::PhantomData;

use super::kernels::{MAX_ROWS, ROW_BLOCKS, S_STRIDE};

/// Results of segments that are merged by another item: m, s `[slot]`, o `[slot][head_dim]`.
#[derive(Clone, Copy)]
pub(super) struct Slots {
    pub m: *mut f32,
    pub s: *mut f32,
    pub o: *mut f32,
}

/// 16 f32 on a cache line of their own.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[allow(dead_code)] [f32; 16]);

const EMPTY: Line = Line([0.0; 16]);

/// Buffers of a plan: one set per worker, and the slots of split rows.
#[derive(Default)]
pub(super) struct Scratch {
    lines: Vec<Line>,
    m: Vec<f32>,
    s: Vec<f32>,
    o: Vec<f32>,
    head_dim: usize,
    /// Most row blocks of an item.
    row_blocks: usize,
}

/// Lines of one worker: q and the accumulated O (head_dim each) of every row of an item; of one row block O, S of two blocks, P of one in
/// f32 or two in bf16, and 16 lanes of sums per row.
const fn worker_lines(head_dim: usize, row_blocks: usize) -> usize {
    MAX_ROWS * (2 * head_dim * row_blocks + head_dim + 3 * S_STRIDE + 16) / 16
}

impl Scratch {
    /// Makes room for items of one row block, or of up to [`ROW_BLOCKS`] if they have `many`; keeps a buffer that is large enough.
    pub(super) fn resize(&mut self, threads: usize, head_dim: usize, slots: usize, many: bool) {
        self.head_dim = head_dim;
        self.row_blocks = if many { ROW_BLOCKS } else { 1 };
        let grow = |v: &mut Vec<f32>, n: usize| {
            if v.len() < n {
                // Allocate exactly as much, after freeing the old memory: its contents are no longer needed, and the
                // dry run counts this size.
                *v = Vec::new();
                v.resize(n, 0.0);
            }
        };
        grow(&mut self.m, slots);
        grow(&mut self.s, slots);
        grow(&mut self.o, slots * head_dim);
        let lines = threads * worker_lines(head_dim, self.row_blocks);
        if self.lines.len() < lines {
            self.lines.resize(lines, EMPTY);
        }
    }

    pub(super) fn bytes(&self) -> usize {
        let floats = self.m.capacity() + self.s.capacity() + self.o.capacity();
        self.lines.capacity() * size_of::<Line>() + floats * size_of::<f32>()
    }

    /// A handle that workers may use concurrently, each for its own part.
    pub(super) fn share(&mut self) -> Shared<'_> {
        Shared {
            lines: self.lines.as_mut_ptr(),
            m: self.m.as_mut_ptr(),
            s: self.s.as_mut_ptr(),
            o: self.o.as_mut_ptr(),
            head_dim: self.head_dim,
            row_blocks: self.row_blocks,
            _scratch: PhantomData,
        }
    }
}

/// See [`Scratch::share`].
pub(super) struct Shared<'a> {
    lines: *mut Line,
    m: *mut f32,
    s: *mut f32,
    o: *mut f32,
    head_dim: usize,
    row_blocks: usize,
    _scratch: PhantomData<&'a mut Scratch>,
}

// SAFETY: the handle borrows the scratch mutably; its unsafe accessors promise disjoint use.
unsafe impl Sync for Shared<'_> {}

impl Shared<'_> {
    /// # Safety
    /// `worker` is below the number of threads in `resize`, and nothing else uses its buffers now.
    pub(super) unsafe fn worker(&self, worker: usize) -> Own {
        let (hd, blocks) = (self.head_dim, self.row_blocks);
        // SAFETY: within `lines` by the caller's promise and `resize`; the parts add up to worker_lines.
        unsafe {
            let q = self.lines.add(worker * worker_lines(hd, blocks)).cast::<f32>();
            let acc = q.add(MAX_ROWS * hd * blocks);
            let o = acc.add(MAX_ROWS * hd * blocks);
            let s = o.add(MAX_ROWS * hd);
            let p = s.add(2 * MAX_ROWS * S_STRIDE);
            let sum = p.add(MAX_ROWS * S_STRIDE).cast::<[f32; 16]>();
            Own {
                all_q: q,
                all_acc: acc,
                row_blocks: blocks,
                q: q.cast(),
                acc,
                o,
                s,
                p: p.cast(),
                sum,
                m: [0.0; MAX_ROWS],
                acc_m: [[0.0; MAX_ROWS]; ROW_BLOCKS],
                acc_s: [[0.0; MAX_ROWS]; ROW_BLOCKS],
                block: 0,
            }
        }
    }

    /// # Safety
    /// `slot0` is a slot index inside what `resize` made room for.
    pub(super) unsafe fn slots(&self, slot0: usize) -> Slots {
        // SAFETY: the caller's promise.
        unsafe { Slots { m: self.m.add(slot0), s: self.s.add(slot0), o: self.o.add(slot0 * self.head_dim) } }
    }
}

/// One worker's buffers. Of each row block of an item they keep q and what has been accumulated; the rest is used by one at a time.
pub(super) struct Own {
    all_q: *mut f32,
    all_acc: *mut f32,
    row_blocks: usize,
    /// Of the row block `block`.
    pub q: *mut u8,
    pub acc: *mut f32,
    pub o: *mut f32,
    pub s: *mut f32,
    pub p: *mut u8,
    pub sum: *mut [f32; 16],
    pub m: [f32; MAX_ROWS],
    /// By row block.
    pub acc_m: [[f32; MAX_ROWS]; ROW_BLOCKS],
    pub acc_s: [[f32; MAX_ROWS]; ROW_BLOCKS],
    pub block: usize,
}

impl Own {
    /// Turns to the item's row block `block`.
    pub(super) fn turn_to(&mut self, block: usize, hd: usize) {
        assert!(block < self.row_blocks, "row block {block} of an item, room for {}", self.row_blocks);
        self.block = block;
        self.q = self.all_q.wrapping_add(block * MAX_ROWS * hd).cast();
        self.acc = self.all_acc.wrapping_add(block * MAX_ROWS * hd);
    }

    /// # Safety
    /// `buf` is one of this worker's row buffers, of `MAX_ROWS · hd` elements, not aliased now.
    pub(super) unsafe fn row<'b>(buf: *mut f32, r: usize, hd: usize) -> &'b mut [f32] {
        debug_assert!(r < MAX_ROWS);
        // SAFETY: r < MAX_ROWS; the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(buf.add(r * hd), hd) }
    }
}
