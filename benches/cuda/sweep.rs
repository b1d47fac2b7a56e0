//! Products of 5 rows and more by every number of splits of k: what the plans' rules (`product/tiles.rs`) are read off.

use tandem::Result;
use tandem::device::kernels::product::choose::DENSE_TILES_ROWS;
use tandem::device::kernels::product::gemm::{self, GemmPlan, Path};
use tandem::device::kernels::product::{
    self, COUNTER_BYTES, DecodePlan, Epilogue, Matrix, ProductArgs, Weight,
};
use tandem::device::{Buffer, DevPtr, Lane};
use tandem::tensor::Half;

use crate::data;
use crate::measure::{Bench, Work};

/// Rows and columns of weights: those of Llama 3 8B, and a narrow one.
const WEIGHTS: [(usize, usize); 5] = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (960, 576)];
const TOKENS: [usize; 5] = [8, 16, 32, 64, 128];
/// Most splits tried, and columns of a step.
const MOST: usize = 16;
const STEP: usize = 64;

/// Times every plan; the line whose shape ends in `*` is what [`DecodePlan::new`] chooses. Answers are those of `dense.rs`.
pub fn run(bench: &mut Bench) -> Result<()> {
    let rt = bench.rt.clone();
    for (n, k) in WEIGHTS {
        let most = TOKENS[TOKENS.len() - 1];
        assert!(most <= DENSE_TILES_ROWS);
        let w = data::halves(Half::BF16, n * k, 1, (3.0 / k as f32).sqrt());
        let x = data::halves(Half::BF16, most * k, 2, 1.0);
        let copies = (0..bench.copies(n * k * 2))
            .map(|_| Buffer::from_bytes(&rt, Lane::Compute, data::bytes_of(&w)))
            .collect::<Result<Vec<_>>>()?;
        let x = Buffer::from_bytes(&rt, Lane::Compute, data::bytes_of(&x))?;
        let y = Buffer::new(&rt, most * n * 4)?;
        // Tiles are at most 128 x 128: padded rows of both, in every split.
        let padded = n.next_multiple_of(128) * most.next_multiple_of(128);
        let scratch = (COUNTER_BYTES + MOST * padded * 4).max(gemm::scratch_bytes(rt.info()));
        let scratch = Buffer::new(&rt, scratch)?;
        rt.fill(Lane::Compute, scratch.ptr(), 0, COUNTER_BYTES)?;
        let args = |i: usize, m: usize| ProductArgs {
            w: Weight {
                ptr: copies[i % copies.len()].ptr(),
                matrix: Matrix::Dense { n, k },
                bias: DevPtr::NULL,
            },
            act: Half::BF16,
            x: x.ptr(),
            ldx: k,
            y: y.ptr(),
            ldy: n,
            m,
            epilogue: Epilogue::F32,
            scratch: scratch.ptr(),
        };
        let work = |kernel: &str, shape: String, m: usize| Work {
            family: "sweep",
            kernel: kernel.into(),
            shape,
            bytes: (2 * n * k + 2 * m * k + 4 * m * n) as f64,
            flops: 2.0 * (m * n * k) as f64,
            peak: None,
        };
        for m in TOKENS {
            let chosen = DecodePlan::new(rt.info(), &Matrix::Dense { n, k }, Half::BF16, m);
            let steps = k.div_ceil(STEP);
            let mut before = 0;
            for splits in 1..=MOST.min(steps / 2) {
                let k_split = steps.div_ceil(splits) * STEP;
                let splits = k.div_ceil(k_split);
                if splits == before {
                    continue;
                }
                before = splits;
                let [tiles_m, tiles_n, _] = chosen.grid;
                let grid = [tiles_m, tiles_n, splits as u32];
                let plan = DecodePlan { k_split, splits, grid, ..chosen.clone() };
                let shape = format!(
                    "{n} x {k} m={m} blocks={} splits={splits}{}",
                    tiles_m * tiles_n * splits as u32,
                    if k_split == chosen.k_split { " *" } else { "" }
                );
                if !bench.wants("sweep", &plan.kernel, &shape) {
                    continue;
                }
                let mut launch = |i: usize| product::decode_as(&*rt, Lane::Compute, &args(i, m), &plan);
                bench.run(work(&plan.kernel, shape, m), &mut launch)?;
            }
            // The same by the kernels for many rows, in as many parts as their scratch has room for.
            let path = Path::of(&*rt, Half::BF16);
            for tokens in path.tokens() {
                let kernel = path.kernel(Half::BF16, tokens);
                let tiles = n.div_ceil(128) * m.div_ceil(tokens);
                let room = (gemm::scratch_bytes(rt.info()) - COUNTER_BYTES) / (tiles * 128 * tokens * 4);
                for splits in 1..=room.clamp(1, MOST) {
                    let k_per_split = k.div_ceil(splits).next_multiple_of(path.depth());
                    let shape = format!("{n} x {k} m={m} blocks={} splits={splits}", tiles * splits);
                    let parts = k.div_ceil(k_per_split) == splits && splits <= k / 128;
                    if m < 32 || !parts || !rt.has_kernel(&kernel) || !bench.wants("sweep", &kernel, &shape) {
                        continue;
                    }
                    let plan = GemmPlan { path, tokens, splits, k_per_split };
                    let mut launch = |i: usize| gemm::gemm_as(&*rt, Lane::Compute, &args(i, m), &plan);
                    bench.run(work(&kernel, shape, m), &mut launch)?;
                }
            }
        }
    }
    Ok(())
}
