//! Products of many matrices of one shape, the rows of each in groups: the experts of a layer.
//!
//! A plan is the launch for one group; its grid has the groups in its second dimension. k is never split over blocks, so there are no
//! partial sums: experts make enough blocks.

use super::args::Matrix;
use super::choose::{GEMV_ROWS, GROUP_ROWS};
use super::plan::DecodePlan;
use super::{gemv, quant, tiles};
use crate::device::runtime::DeviceInfo;
use crate::tensor::Half;

/// Rows of a group that there are kernels for: one for few rows, then tiles.
pub const TOKENS: [usize; 5] = [GEMV_ROWS, 8, 16, 32, GROUP_ROWS];

/// Plans the product of groups of up to `tokens` rows, one of [`TOKENS`], each with one of many matrices like this one; a row is
/// multiplied with `used` of them.
///
/// `None` if the device has no shared memory for it.
///
/// # Panics
/// If columns are no multiple of 8.
pub fn plan(info: &DeviceInfo, matrix: &Matrix, act: Half, tokens: usize, used: usize) -> Option<DecodePlan> {
    let (n, k) = (matrix.n(), matrix.k());
    assert!(n >= 1 && k >= 8 && k.is_multiple_of(8), "experts of {n} x {k}: k is a multiple of 8");
    let named = |plan: DecodePlan| DecodePlan { kernel: format!("experts_{}", plan.kernel), ..plan };
    match matrix {
        // Even a single row has `used` matrices, which fill the device together.
        Matrix::Dense { .. } if tokens == GEMV_ROWS => {
            let together = gemv::dense(info, act, tokens, n * used.max(1), k);
            let block_pairs = gemv::WARPS >> together.k_warps_log2;
            let grid = [n.div_ceil(2).div_ceil(block_pairs) as u32, 1, 1];
            Some(named(DecodePlan { grid, ..together }))
        }
        Matrix::Dense { .. } => tiles::grouped(info, act, tokens, n, k),
        Matrix::Quantised(layout) if tokens == GEMV_ROWS => {
            Some(named(gemv::quantised(layout, act, k.next_multiple_of(64))))
        }
        Matrix::Quantised(layout) => quant::grouped(info, layout, act, tokens),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;

    fn device(sm: u32, multiprocessors: u32, shared_kib: u32) -> DeviceInfo {
        DeviceInfo {
            name: "test".into(),
            sm,
            multiprocessors,
            memory_total: 1 << 30,
            shared_per_block: shared_kib << 10,
            l2_bytes: 0,
            memory_bw: 0,
            clock_khz: 0,
            driver: 0,
        }
    }

    #[test]
    fn every_matrix_has_kernels_for_groups_of_every_size() {
        for info in [device(75, 40, 64), device(86, 72, 99), device(90, 132, 227)] {
            for dtype in [DType::F16, DType::Q4_0, DType::Q4_K, DType::Q5_K, DType::Q6_K, DType::Q8_0] {
                for (n, k) in [(1536, 2048), (2048, 768), (16, 256)] {
                    let matrix = Matrix::of(dtype, n, k);
                    for tokens in TOKENS {
                        let Some(plan) = plan(&info, &matrix, Half::F16, tokens, 8) else {
                            assert!(tokens >= 32 && info.sm == 75, "{dtype}, {tokens} tokens on {info:?}");
                            continue;
                        };
                        assert!(
                            plan.splits == 1 && plan.partial_bytes == 0 && plan.grid[1..] == [1, 1],
                            "{plan:?}"
                        );
                        assert!(plan.shared <= info.shared_per_block, "{plan:?}");
                        assert!(plan.kernel.starts_with("experts_"), "{plan:?}");
                        assert!(plan.k_split << plan.k_warps_log2 >= k, "{plan:?} leaves columns of {k}");
                    }
                }
            }
        }
    }
}
