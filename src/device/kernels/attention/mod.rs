//! Paged attention on an accelerator: work lists from the rows of a step, and the kernels that run them.
//!
//! ```text
//! rows of a step ─ Plan ─► decode items  ─ decode_attention  ─►┐
//!                  (host)  prefill items ─ prefill_attention ─►┴► out rows, or (m, s, o) ─ merge_attention ─► out
//! ```
//!
//! An [`AttentionPlan`] is made once per step (once more for layers with a window), uploaded, and used by all layers.
//! It is a pure function of the rows, and how it treats a row depends on that row alone.

mod decode;
mod merge;
mod plan;
mod prefill;

pub use decode::{DecodeAttention, DecodeWorkspace, decode_attention};
pub use merge::{MergeAttention, merge_attention};
pub use plan::{AttentionPlan, Capacity, RowRun, SHORTEST_SPLIT, decode_item_bytes, prefill_item_bytes};
pub use prefill::{PrefillAttention, PrefillKernel, prefill_attention};

use std::ops::RangeInclusive;

use super::abi::{ATTENTION_OUT_BF16, ATTENTION_OUT_F16};
use crate::cache::KvType;
use crate::device::runtime::Runtime;
use crate::tensor::Half;
use crate::{Error, Result};

/// Head sizes for which kernels exist.
pub const HEAD_DIMS: [usize; 5] = [64, 80, 96, 128, 256];

/// Soft-caps that kernels compute well: their error is some 2^-20 of the cap, whatever the score.
const SOFTCAPS: RangeInclusive<f32> = 1e-3..=1e3;

/// The shape of attention, the same in all layers of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Query heads; a multiple of `n_kv_heads`.
    pub n_heads: usize,
    /// KV heads.
    pub n_kv_heads: usize,
    /// Elements per head, one of [`HEAD_DIMS`].
    pub head_dim: usize,
    /// Positive factor that scores are multiplied by.
    pub scale: f32,
    /// Soft-cap of the scaled scores, 0.001 to 1000.
    pub softcap: Option<f32>,
    /// How keys and values are stored; queries have its [`KvType::half`].
    pub kv: KvType,
    /// Type of the final rows.
    pub out: Half,
}

impl AttentionShape {
    /// Checks that `runtime` has kernels for this shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], naming the property without a kernel.
    pub fn check(&self, runtime: &dyn Runtime) -> Result<()> {
        let unsupported = |what: String| Err(Error::Unsupported(what));
        if self.n_kv_heads == 0 || self.n_heads == 0 || !self.n_heads.is_multiple_of(self.n_kv_heads) {
            return unsupported(format!(
                "attention of {} heads over {} KV heads: the first must be a multiple of the second",
                self.n_heads, self.n_kv_heads
            ));
        }
        if !(self.scale > 0.0 && self.scale.is_finite()) {
            return unsupported(format!("attention scale {}: it must be positive", self.scale));
        }
        if let Some(cap) = self.softcap.filter(|cap| !SOFTCAPS.contains(cap)) {
            let (least, most) = (SOFTCAPS.start(), SOFTCAPS.end());
            return unsupported(format!("attention soft-cap {cap}: kernels cover {least} to {most}"));
        }
        if !HEAD_DIMS.contains(&self.head_dim) {
            return unsupported(format!(
                "attention heads of {} elements: kernels exist for {HEAD_DIMS:?}",
                self.head_dim
            ));
        }
        for kernel in [self.decode_kernel(), self.merge_kernel()] {
            if !runtime.has_kernel(&kernel) {
                return unsupported(format!("{}: no kernel {kernel} for it", runtime.info().name));
            }
        }
        if PrefillKernel::available(runtime, self).is_empty() {
            let (kv, d) = (self.kv.name(), self.head_dim);
            return unsupported(format!(
                "{}: no kernel prefill_attention_{kv}_d{d} for it",
                runtime.info().name
            ));
        }
        Ok(())
    }

    fn decode_kernel(&self) -> String {
        format!("decode_attention_{}_d{}", self.kv.name(), self.head_dim)
    }

    fn merge_kernel(&self) -> String {
        format!("attention_merge_{}", self.out.name())
    }

    /// The scale for kernels, which compute exponentials to base two.
    fn scale_log2(&self) -> f32 {
        self.scale * std::f32::consts::LOG2_E
    }

    /// The soft-cap for kernels, which apply it to scores before the scale: `cap_span` and `cap_slope`, zeros without a cap.
    fn score_cap(&self) -> [f32; 2] {
        self.softcap.map_or([0.0; 2], |cap| [2.0 * cap / self.scale, 2.0 * self.scale_log2() / cap])
    }

    fn out_type(&self) -> u32 {
        match self.out {
            Half::F16 => ATTENTION_OUT_F16,
            Half::BF16 => ATTENTION_OUT_BF16,
        }
    }
}
