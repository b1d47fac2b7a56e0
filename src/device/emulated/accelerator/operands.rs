//! The spans that an operation is enqueued with to read and write, and access to their contents.

use std::borrow::Cow;
use std::ops::Range;

use crate::device::accelerator::{LayerWeights, LinearWeight, NormWeight, Residual, StepContext};
use crate::device::emulated::op::Span;
use crate::device::emulated::ops::cast::{Kept, numbers};
use crate::device::emulated::ops::matrix::Matrix;
use crate::device::emulated::ops::norm::{self, Delta};
use crate::device::runtime::DevPtr;
use crate::model::Norm;
use crate::simd::Kernels;
use crate::tensor::DType;

/// The spans of an operation; adding a span returns its index.
pub(super) struct Operands {
    pub reads: Vec<Span>,
    pub writes: Vec<Span>,
}

impl Operands {
    /// `len` bytes; an operand that is absent (NULL) is empty.
    pub fn read(&mut self, ptr: DevPtr, len: usize) -> usize {
        self.reads.push(Span::new(ptr, if ptr.is_null() { 0 } else { len }));
        self.reads.len() - 1
    }

    pub fn write(&mut self, ptr: DevPtr, len: usize) -> usize {
        self.writes.push(Span::new(ptr, len));
        self.writes.len() - 1
    }

    pub fn read_rows(&mut self, base: DevPtr, rows: &Range<usize>, row_bytes: usize) -> usize {
        self.read(base.add(rows.start * row_bytes), rows.len() * row_bytes)
    }

    pub fn write_rows(&mut self, base: DevPtr, rows: &Range<usize>, row_bytes: usize) -> usize {
        self.write(base.add(rows.start * row_bytes), rows.len() * row_bytes)
    }

    pub fn weight(&mut self, w: &LinearWeight) -> MatrixOperand {
        let row = w.dtype.row_bytes(w.k).expect("checked when packed");
        let data = self.read(w.ptr, w.n * row);
        MatrixOperand { dtype: w.dtype, k: w.k, data, bias: self.read(w.bias, 4 * w.n) }
    }

    /// `count` matrices alike, of which `w` is the first, and their biases; the next ones begin so many bytes later
    /// ([`MatrixOperand::part`]).
    pub fn spaced(&mut self, w: &LinearWeight, stride: usize, count: usize) -> MatrixOperand {
        let row = w.dtype.row_bytes(w.k).expect("checked when packed");
        let data = self.read(w.ptr, (count - 1) * stride + w.n * row);
        MatrixOperand {
            dtype: w.dtype,
            k: w.k,
            data,
            bias: self.read(w.bias, (count - 1) * stride + 4 * w.n),
        }
    }

    /// The sinks of a layer's heads.
    pub fn sinks(&mut self, layer: &LayerWeights, n_heads: usize) -> SinkOperand {
        SinkOperand(self.read(layer.tables.sinks, 4 * n_heads))
    }

    pub fn norm(&mut self, w: &NormWeight, d: usize) -> [usize; 2] {
        [self.read(w.w, 4 * d), self.read(w.b, 4 * d)]
    }

    pub fn delta(
        &mut self,
        cx: &StepContext<'_>,
        residual: Residual,
        rows: &Range<usize>,
    ) -> Option<DeltaOperand> {
        let d = cx.shape.d_model;
        let post = match residual {
            Residual::None => return None,
            Residual::Delta => DevPtr::NULL,
            Residual::Normed(w) => w,
        };
        let rows = self.read_rows(cx.ws.delta, rows, 4 * d);
        Some(DeltaOperand { rows, post: self.read(post, 4 * d), d })
    }
}

/// A matrix among the operands.
#[derive(Clone, Copy)]
pub(super) struct MatrixOperand {
    dtype: DType,
    k: usize,
    data: usize,
    bias: usize,
}

impl MatrixOperand {
    pub fn matrix<'a>(&self, reads: &[&'a [u8]]) -> Matrix<'a> {
        Matrix { dtype: self.dtype, k: self.k, data: reads[self.data], bias: numbers(reads[self.bias]) }
    }

    /// Rows `rows` of the matrix that begins at byte `at`.
    pub fn part<'a>(&self, reads: &[&'a [u8]], at: usize, rows: Range<usize>) -> Matrix<'a> {
        let row = self.dtype.row_bytes(self.k).expect("checked when packed");
        let data = &reads[self.data][at + rows.start * row..at + rows.end * row];
        let bias = match reads[self.bias] {
            [] => &[],
            all => numbers(&all[at + 4 * rows.start..at + 4 * rows.end]),
        };
        Matrix { dtype: self.dtype, k: self.k, data, bias }
    }
}

/// The sinks of all heads among the operands, if the model has some.
#[derive(Clone, Copy)]
pub(super) struct SinkOperand(usize);

impl SinkOperand {
    /// Those of all heads; `None` of a layer without.
    pub fn all<'a>(self, reads: &[&'a [u8]]) -> Option<&'a [f32]> {
        Some(numbers(reads[self.0])).filter(|sinks: &&[f32]| !sinks.is_empty())
    }

    /// That of one head.
    pub fn of(self, reads: &[&[u8]], head: usize) -> Option<f32> {
        self.all(reads).map(|sinks| sinks[head])
    }
}

/// The residual to add, as indices among the operands.
#[derive(Clone, Copy)]
pub(super) struct DeltaOperand {
    rows: usize,
    post: usize,
    d: usize,
}

impl DeltaOperand {
    pub fn row<'a>(&self, reads: &[&'a [u8]], i: usize) -> Delta<'a> {
        Delta {
            row: &numbers(reads[self.rows])[i * self.d..(i + 1) * self.d],
            post: numbers(reads[self.post]),
        }
    }
}

/// hidden += residual; x = norm(hidden) (hidden itself without weights), in the type of activations; and x again as
/// floats, for the products.
pub(super) struct NormRows {
    pub kernels: &'static Kernels,
    pub norm: Norm,
    pub act: Kept,
    pub d: usize,
    pub delta: Option<DeltaOperand>,
    pub weight: [usize; 2],
}

impl NormRows {
    pub fn run<'x>(&self, reads: &[&[u8]], hidden: &mut [f32], x: &'x mut [u8]) -> Cow<'x, [f32]> {
        let weight = self.weight.map(|i| numbers::<f32>(reads[i]));
        let mut out = vec![0f32; self.d];
        let rows = hidden.chunks_exact_mut(self.d).zip(x.chunks_exact_mut(self.d * self.act.bytes()));
        for (i, (hidden, x)) in rows.enumerate() {
            if let Some(delta) = &self.delta {
                norm::add(self.kernels, self.norm, hidden, delta.row(reads, i));
            }
            norm::norm(self.kernels, self.norm, hidden, weight[0], weight[1], &mut out);
            self.act.write(&out, x);
        }
        self.act.read(x)
    }
}
