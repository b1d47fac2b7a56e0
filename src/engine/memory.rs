//! What a run will occupy, computed before anything is allocated.

use crate::cache::{KvDType, KvGeometry};
use crate::host::cgroup::memory_available;
use crate::model::{ModelSpec, Weights};
use crate::simd::Isa;
use crate::simd::linear::{Linear, Packed};
use crate::{Error, Result};

/// Bytes of a run, by purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Weights as the kernels read them (packed, or mapped from the file).
    pub weights: u64,
    /// Pages of keys and values.
    pub kv: u64,
    /// Activations of the widest step, logits included.
    pub activations: u64,
}

impl Memory {
    /// The dry run: `kv_tokens` tokens of context in all, steps of up to `rows` rows.
    pub fn plan(
        spec: &ModelSpec,
        weights: &Weights,
        isa: Isa,
        kv: &KvGeometry,
        kv_tokens: usize,
        rows: usize,
    ) -> Memory {
        let weights = weights
            .iter()
            .map(|(_, t)| {
                let packed = Linear::wants_packing(t.dtype, isa) && t.shape.len() == 2;
                let size = if packed { Packed::size(t.dtype, t.rows(), t.cols()) } else { None };
                size.unwrap_or(t.data.len()) as u64
            })
            .sum();
        let widest = (2 * spec.d_ff).max(spec.q_dim() + 2 * spec.kv_dim()) + 3 * spec.d_model + spec.q_dim();
        // f32 rows, and the prepared forms of the widest input (int8, bf16, tiles, scales).
        let per_row = 4 * widest + 6 * spec.d_ff.max(spec.d_model).max(spec.q_dim());
        Memory {
            weights,
            kv: (kv_tokens as u64).saturating_mul(kv.bytes_per_token() as u64),
            activations: (rows as u64).saturating_mul(per_row as u64) + 4 * spec.vocab as u64,
        }
    }

    /// All of it.
    pub fn total(&self) -> u64 {
        self.weights.saturating_add(self.kv).saturating_add(self.activations)
    }

    /// Compares with what the system says is available.
    ///
    /// # Errors
    /// It does not fit; the message has the numbers.
    pub fn check(&self) -> Result<()> {
        let Some(available) = memory_available() else { return Ok(()) };
        if self.total() <= available {
            return Ok(());
        }
        let gib = |b: u64| b as f64 / (1u64 << 30) as f64;
        Err(Error::Capacity(format!(
            "needs {:.1} GiB (weights {:.1}, KV {:.1}, activations {:.1}), {:.1} GiB of host memory available; \
             try a smaller --ctx or a smaller quantisation",
            gib(self.total()),
            gib(self.weights),
            gib(self.kv),
            gib(self.activations),
            gib(available)
        )))
    }
}

impl Memory {
    /// Compares with what a device has free.
    ///
    /// # Errors
    /// It does not fit; the message has the numbers.
    pub(super) fn check_device(&self, free: u64, device: &str) -> Result<()> {
        if self.total() <= free {
            return Ok(());
        }
        let gib = |b: u64| b as f64 / (1u64 << 30) as f64;
        Err(Error::Capacity(format!(
            "needs {:.2} GiB (weights {:.2}, KV {:.2}, activations {:.2}), {:.2} GiB free on {device}; \
             try a smaller --ctx or a smaller quantisation, or run on the CPU with --device cpu",
            gib(self.total()),
            gib(self.weights),
            gib(self.kv),
            gib(self.activations),
            gib(free)
        )))
    }
}

/// Geometry of the KV cache of a model.
pub(super) fn geometry(spec: &ModelSpec, dtype: KvDType) -> KvGeometry {
    KvGeometry { n_layers: spec.n_layers, n_kv_heads: spec.n_kv_heads, head_dim: spec.head_dim, dtype }
}
