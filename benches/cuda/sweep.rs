//! Products of 5 rows and more by every number of splits of k: what the plans' rules (`product/tiles.rs`) are read off.

use tandem::Result;
use tandem::device::Lane;
use tandem::device::kernels::product::gemm::{self, GemmPlan, Path};
use tandem::device::kernels::product::{self, COUNTER_BYTES, DecodePlan, Epilogue, Matrix};
use tandem::tensor::Half;

use crate::dense::{LLAMA_8B, Operands, TINY, Weight};
use crate::measure::{Bench, Work};

/// Most splits tried, and columns of a step.
const MOST: usize = 16;
const STEP: usize = 64;
const ACT: Half = Half::BF16;

/// Times every plan; the line whose shape ends in `*` is what [`DecodePlan::new`] chooses.
pub fn run(bench: &mut Bench) -> Result<()> {
    let narrow: Weight = ("smollm2-135m qkv", 960, 576, Epilogue::F32);
    let (weights, tokens): (Vec<Weight>, &[usize]) = match bench.test {
        true => (TINY.to_vec(), &[9, 40]),
        false => ([&LLAMA_8B[..], &[narrow]].concat(), &[8, 16, 32, 64, 128]),
    };
    for weight in weights {
        let (name, n, k, _) = weight;
        let rt = bench.rt.clone();
        let most = tokens[tokens.len() - 1];
        // Tiles are at most 128 x 128: padded rows of both, in every split.
        let padded = n.next_multiple_of(128) * most.next_multiple_of(128);
        let o = Operands::with_scratch(bench, ACT, weight, most, COUNTER_BYTES + MOST * padded * 4)?;
        let work = |kernel: &str, shape: String, m: usize| Work {
            family: "sweep",
            kernel: kernel.into(),
            shape,
            bytes: o.bytes(m),
            flops: o.flops(m),
            peak: None,
        };
        let shape = |m: usize, blocks: usize, splits: usize, mark: &str| {
            format!("{name} m={m} blocks={blocks} splits={splits}{mark}")
        };
        for &m in tokens {
            let chosen = DecodePlan::new(rt.info(), &Matrix::Dense { n, k }, ACT, m);
            let [tiles_m, tiles_n, _] = chosen.grid;
            let steps = k.div_ceil(STEP);
            let mut before = 0;
            for splits in 1..=MOST.min(steps / 2).max(1) {
                let k_split = steps.div_ceil(splits) * STEP;
                // Rounding leaves some numbers out.
                let splits = k.div_ceil(k_split);
                let mark = if k_split == chosen.k_split { " *" } else { "" };
                let shape = shape(m, (tiles_m * tiles_n) as usize * splits, splits, mark);
                let here = bench.rt.has_kernel(&chosen.kernel);
                if splits == before || !here || !bench.wants("sweep", &chosen.kernel, &shape) {
                    continue;
                }
                before = splits;
                let plan =
                    DecodePlan { k_split, splits, grid: [tiles_m, tiles_n, splits as u32], ..chosen.clone() };
                let mut launch = |i: usize| product::decode_as(&*rt, Lane::Compute, &o.args(i, m), &plan);
                launch(0)?;
                o.check(bench, &plan.kernel, m)?;
                bench.run(work(&plan.kernel, shape, m), &mut launch)?;
            }
            // The same by the kernels for many rows, in as many parts as their scratch has room for.
            let path = Path::of(&*rt, ACT);
            for tokens in path.tokens() {
                let kernel = path.kernel(ACT, tokens);
                let tiles = n.div_ceil(128) * m.div_ceil(tokens);
                let room = (gemm::scratch_bytes(rt.info()) - COUNTER_BYTES) / (tiles * 128 * tokens * 4);
                for splits in 1..=room.clamp(1, MOST) {
                    let k_per_split = k.div_ceil(splits).next_multiple_of(path.depth());
                    let shape = shape(m, tiles * splits, splits, "");
                    let parts = k.div_ceil(k_per_split) == splits && (splits == 1 || splits <= k / 128);
                    if m < 32 || !parts || !rt.has_kernel(&kernel) || !bench.wants("sweep", &kernel, &shape) {
                        continue;
                    }
                    let plan = GemmPlan { path, tokens, splits, k_per_split };
                    let mut launch = |i: usize| gemm::gemm_as(&*rt, Lane::Compute, &o.args(i, m), &plan);
                    launch(0)?;
                    o.check(bench, &kernel, m)?;
                    bench.run(work(&kernel, shape, m), &mut launch)?;
                }
            }
        }
    }
    Ok(())
}
