//! Loads a model's kernels while its weights are read. A driver may have to compile them, which would otherwise happen
//! in the middle of a prompt.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::accelerator::{LinearWeight, Shape};
use super::notice;
use super::runtime::Runtime;
use crate::Result;
use crate::host::unpin_current_thread;
use crate::tensor::DType;

/// Decides from their names which kernels a model runs. A superfluous kernel costs memory; a missing one is loaded at
/// its first launch.
pub struct KernelNeeds {
    /// Formats of quantised matrices.
    formats: BTreeSet<&'static str>,
    /// 16-bit types of activations, keys and values.
    halves: [&'static str; 2],
    head_dim: usize,
    /// Whether it computes experts.
    experts: bool,
}

impl KernelNeeds {
    /// The needs of a model of this shape with these matrices.
    pub fn new(shape: &Shape, matrices: &[LinearWeight]) -> KernelNeeds {
        KernelNeeds {
            formats: matrices.iter().map(|m| m.dtype.name()).collect(),
            halves: [shape.act.name(), shape.kv.name()],
            head_dim: shape.head_dim,
            experts: shape.experts.is_some(),
        }
    }

    /// Whether the model may run the kernel of that name: `linear_q4_0_f16_t8`.
    pub fn kernel(&self, name: &str) -> bool {
        let words: Vec<&str> = name.split('_').collect();
        let tests = ["conformance", "peak"].contains(&words[0]);
        let experts = words[0] == "experts" && !self.experts;
        let has = |word: &str| format!("_{name}_").contains(&format!("_{word}_"));
        let of_another_format = words[0] != "embed"
            && DType::QUANTISED.iter().any(|d| has(d.name()) && !self.formats.contains(d.name()));
        let of_another_type =
            ["f16", "bf16"].iter().any(|half| words.contains(half) && !self.halves.contains(half));
        let head_dim = words.iter().find_map(|w| w.strip_prefix('d')?.parse::<usize>().ok());
        !tests
            && !experts
            && !of_another_format
            && !of_another_type
            && head_dim.is_none_or(|d| d == self.head_dim)
    }
}

/// Interval after which long loading is reported, repeatedly.
const PATIENCE: Duration = Duration::from_secs(3);

/// Loads the kernels.
///
/// # Errors
/// A kernel that does not load.
pub fn load_kernels(runtime: &dyn Runtime, needs: &KernelNeeds) -> Result<()> {
    let said = Cell::new(Instant::now());
    runtime.preload(&|name| needs.kernel(name), &|done, of| {
        if said.get().elapsed() > PATIENCE {
            said.set(Instant::now());
            notice::say(&format!("{}: {done} of {of} kernel modules are loaded", runtime.info().name));
        }
    })
}

/// Does `work` and loads the kernels concurrently.
///
/// # Errors
/// The error of `work`; otherwise the error of a kernel that does not load.
pub fn load_kernels_beside<R>(
    runtime: &dyn Runtime,
    needs: &KernelNeeds,
    work: impl FnOnce() -> Result<R>,
) -> Result<R> {
    std::thread::scope(|scope| {
        let kernels = scope.spawn(|| {
            // Not on the core that `work` is pinned to.
            unpin_current_thread();
            load_kernels(runtime, needs)
        });
        let done = work()?;
        kernels.join().expect("loading kernels does not panic")?;
        Ok(done)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_needs_the_kernels_of_its_formats_types_and_heads() {
        let formats = [DType::Q4_K, DType::Q6_K].map(DType::name).into();
        let needs = KernelNeeds { formats, halves: ["f16", "f16"], head_dim: 128, experts: false };
        for name in [
            "linear_q4_k_f16_t8",
            "gemv_q6_k_f16",
            "quant_gather_q6_k",
            "embed_q8_0",
            "embed_f32",
            "gemm_f16_128x128_sync",
            "decode_attention_f16_d128",
            "prefill_attention_f16_d128_sm90a",
            "norm_rms_f16_warp",
            "argmax_rows",
            "publish_rows_f16",
        ] {
            assert!(needs.kernel(name), "{name}");
        }
        for name in [
            "linear_q4_0_f16_t8",
            "linear_q4_k_bf16_t8",
            "gemv_q8_0_f16",
            "decode_attention_f16_d64",
            "decode_attention_bf16_d128",
            "conformance_ldmatrix",
            "peak_mma_f16",
            "experts_gemv_q4_k_f16",
        ] {
            assert!(!needs.kernel(name), "{name}");
        }
        assert!(KernelNeeds { experts: true, ..needs }.kernel("experts_gemv_q4_k_f16"));
    }
}
