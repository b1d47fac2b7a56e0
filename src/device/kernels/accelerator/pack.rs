//! Packs matrices into the layouts that the kernels read: dense ones as rows of the activations' type, quantised ones
//! as tiles (`super::super::quant`). Gate and up are interleaved by eight rows.

use std::sync::Mutex;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::super::product::gate_up_row;
use super::super::quant::{self, PackedLayout};
use crate::device::accelerator::LinearSource;
use crate::host::Pool;
use crate::reference::dequant::dequantise_row;
use crate::tensor::{DType, Half, Tensor};

/// Rows that one task converts.
const ROWS: usize = 64;

/// How a quantised matrix is packed; `None` if it is dense.
fn layout(source: &LinearSource<'_>) -> Option<PackedLayout> {
    PackedLayout::new(source.dtype(), source.n(), source.k())
}

/// Bytes of a packed matrix.
pub(super) fn packed_bytes(source: &LinearSource<'_>) -> usize {
    layout(source).map_or_else(|| dense_bytes(source), |l| l.bytes())
}

/// Packs a matrix on all threads.
pub(super) fn pack(source: &LinearSource<'_>, act: Half, pool: &Pool, out: &mut [u8]) {
    let Some(layout) = layout(source) else { return pack_dense(source, act, pool, out) };
    let row = |i: usize| {
        let (tensor, r) = row(source, i);
        tensor.row(r)
    };
    quant::pack(&layout, &row, pool, out);
}

/// Bytes of a packed dense matrix.
fn dense_bytes(source: &LinearSource<'_>) -> usize {
    source.n() * source.k() * 2
}

/// The tensor, and the row in it, that row `i` of the packed matrix comes from.
fn row<'a>(source: &LinearSource<'a>, i: usize) -> (&'a Tensor, usize) {
    match *source {
        LinearSource::Rows(parts) => {
            let mut i = i;
            for part in parts {
                if i < part.rows() {
                    return (part, i);
                }
                i -= part.rows();
            }
            panic!("row {i} beyond a stack of {} matrices", parts.len())
        }
        LinearSource::GateUp(gate, up) => {
            let (is_up, r) = gate_up_row(i);
            (if is_up { up } else { gate }, r)
        }
    }
}

/// Writes the rows, converted to `act`, on all threads.
fn pack_dense(source: &LinearSource<'_>, act: Half, pool: &Pool, out: &mut [u8]) {
    let row_bytes = source.k() * 2;
    assert_eq!(out.len(), dense_bytes(source), "{} x {} packed", source.n(), source.k());
    let tasks = Mutex::new(out.chunks_mut(ROWS * row_bytes).enumerate());
    pool.run(source.n().div_ceil(ROWS), &|_, _| {
        let next = tasks.lock().unwrap_or_else(|e| e.into_inner()).next();
        let Some((chunk, rows)) = next else { return };
        let mut floats = vec![0f32; source.k()];
        for (i, to) in rows.chunks_exact_mut(row_bytes).enumerate() {
            let (tensor, r) = row(source, chunk * ROWS + i);
            convert(tensor.dtype, tensor.row(r), act, &mut floats, to);
        }
    });
}

/// Converts one row to `to`.
fn convert(from: DType, row: &[u8], to: Half, floats: &mut [f32], out: &mut [u8]) {
    if matches!((from, to), (DType::F16, Half::F16) | (DType::BF16, Half::BF16)) {
        return out.copy_from_slice(row);
    }
    dequantise_row(from, row, floats);
    match to {
        Half::BF16 => {
            for (o, &x) in out.chunks_exact_mut(2).zip(&*floats) {
                o.copy_from_slice(&bf16::from_f32(x).to_le_bytes());
            }
        }
        Half::F16 => {
            let mut halves = vec![f16::ZERO; floats.len()];
            // Values beyond f16's range become its largest finite number, not infinity.
            floats.iter_mut().for_each(|x| *x = x.clamp(-65504.0, 65504.0));
            halves.convert_from_f32_slice(floats);
            for (o, h) in out.chunks_exact_mut(2).zip(&halves) {
                o.copy_from_slice(&h.to_le_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Bytes;

    fn tensor(rows: usize, k: usize, first: f32) -> Tensor {
        let data: Vec<u8> = (0..rows * k).flat_map(|i| (first + i as f32).to_le_bytes()).collect();
        Tensor::new(DType::F32, vec![rows, k], Bytes::copy_of(&data)).unwrap()
    }

    fn packed(source: &LinearSource<'_>) -> Vec<f32> {
        let mut out = vec![0; dense_bytes(source)];
        pack_dense(source, Half::F16, &Pool::pinned(Some(2)), &mut out);
        out.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
    }

    #[test]
    fn stacked_rows_follow_each_other() {
        let (a, b) = (tensor(3, 8, 0.0), tensor(130, 8, 100.0));
        let got = packed(&LinearSource::Rows(&[&a, &b]));
        let want: Vec<f32> = (0..24).chain(100..100 + 1040).map(|x| x as f32).collect();
        assert_eq!(got, want);
    }

    #[test]
    fn gates_and_ups_alternate_by_eight_rows() {
        let (gate, up) = (tensor(16, 8, 0.0), tensor(16, 8, 1000.0));
        let got = packed(&LinearSource::GateUp(&gate, &up));
        let firsts: Vec<f32> = got.chunks(64).map(|g| g[0]).collect();
        assert_eq!(firsts, [0.0, 1000.0, 64.0, 1064.0]);
    }
}
