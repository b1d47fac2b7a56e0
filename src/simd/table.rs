//! The small operations: a method for each, that asserts the shapes and dispatches once.
//!
//! An operation is a [`SimdOp`]: a body over vectors, which each tier runs with its own, and a reference. Those that a tier has
//! instructions of its own for are fields of its table. Fields are private, so a kernel runs only after its CPU features and shapes were
//! checked.

use super::Isa;
use super::generic::activation;
use super::generic::convert::F32ToBf16;
use super::generic::embed::EmbedRow;
use super::generic::map::{InPlace1, InPlace2};
use super::generic::norm::{AddRmsNorm, LayerNorm, RmsNorm, RmsNormHeads};
use super::generic::reduce::Argmax;
use super::generic::rope::RopeHeads;
use super::generic::softmax::MaxAndLogsumexp;
use super::vector::SimdOp;
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::reference;
use crate::reference::quantise::Int8Row;
use crate::rope::RopePairing;
use crate::tensor::DType;

/// The kernels of one tier for small operations: everything but linear layers and attention.
///
/// Activations are `f32`. All kernels are deterministic: the same row gives the same bits, whatever
/// thread or batch it runs in.
#[derive(Clone, Copy)]
pub struct Kernels {
    /// Name of the tier.
    pub name: &'static str,
    /// The tier.
    pub isa: Isa,
    /// Rounding to bf16 where the CPU has an instruction for it.
    pub(super) bf16_instruction: Option<unsafe fn(&[f32], &mut [u16])>,
    /// Written for each tier by itself.
    pub(super) quantise_row: unsafe fn(&[f32], Int8Row<'_>, Option<Int8Row<'_>>),
}

/// Safe scalar Rust.
pub(super) static REFERENCE: Kernels = Kernels {
    name: "reference",
    isa: Isa::Reference,
    bf16_instruction: None,
    quantise_row: reference::quantise::quantise_row,
};

/// Two lengths that must be equal, or a panic that names both.
#[track_caller]
fn same(op: &str, a: (&str, usize), b: (&str, usize)) {
    assert!(a.1 == b.1, "{op}: {} has {} elements, {} has {}", a.0, a.1, b.0, b.1);
}

impl Kernels {
    /// Runs an operation with the vectors of the tier.
    fn run<O: SimdOp>(&self, op: O) -> O::Output {
        match self.isa {
            Isa::Reference => op.reference(),
            // SAFETY: `Kernels` values come from `for_isa` alone, which checked that this CPU has the tier's features. An operation
            // requires nothing else (its slices carry their lengths).
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { avx2::run(op) },
            // SAFETY: the same.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Amx => unsafe { avx512::run(op) },
            #[cfg(not(target_arch = "x86_64"))]
            _ => unreachable!("a tier of another CPU"),
        }
    }

    /// `out = x·w / √(mean(x²) + eps)`, one row.
    pub fn rms_norm(&self, x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
        same("rms_norm", ("x", x.len()), ("w", w.len()));
        same("rms_norm", ("x", x.len()), ("out", out.len()));
        self.run(RmsNorm { x, w, eps, out })
    }

    /// RMS norm in place of each run of `w.len()` elements of `x`: heads of queries or keys, or one row.
    pub fn rms_norm_heads(&self, x: &mut [f32], w: &[f32], eps: f32) {
        assert!(
            x.is_empty() || (!w.is_empty() && x.len().is_multiple_of(w.len())),
            "rms_norm_heads: {} elements are no multiple of the weight's {}",
            x.len(),
            w.len()
        );
        self.run(RmsNormHeads { x, w, eps })
    }

    /// Adds `delta` to the residual `x`, then `out = rms_norm(x)`.
    pub fn add_rms_norm(&self, x: &mut [f32], delta: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
        same("add_rms_norm", ("x", x.len()), ("delta", delta.len()));
        same("add_rms_norm", ("x", x.len()), ("w", w.len()));
        same("add_rms_norm", ("x", x.len()), ("out", out.len()));
        self.run(AddRmsNorm { x, delta, w, eps, out })
    }

    /// `out = (x - mean)·w / √(var + eps) + b`, one row.
    pub fn layer_norm(&self, x: &[f32], w: &[f32], b: &[f32], eps: f32, out: &mut [f32]) {
        same("layer_norm", ("x", x.len()), ("w", w.len()));
        same("layer_norm", ("x", x.len()), ("b", b.len()));
        same("layer_norm", ("x", x.len()), ("out", out.len()));
        self.run(LayerNorm { x, w, b, eps, out })
    }

    /// `x += delta`: residuals and biases.
    pub fn add(&self, x: &mut [f32], delta: &[f32]) {
        same("add", ("x", x.len()), ("delta", delta.len()));
        self.run(InPlace2 { a: x, b: delta, f: activation::Add })
    }

    /// Rotates the first `2·cos.len()` elements of one head; the rest is unchanged.
    pub fn rope(&self, head: &mut [f32], cos: &[f32], sin: &[f32], pairing: RopePairing) {
        let head_dim = head.len();
        self.rope_heads(head, 1, head_dim, cos, sin, pairing);
    }

    /// [`Kernels::rope`] of `n_heads` consecutive heads, all at the same position.
    pub fn rope_heads(
        &self,
        x: &mut [f32],
        n_heads: usize,
        head_dim: usize,
        cos: &[f32],
        sin: &[f32],
        pairing: RopePairing,
    ) {
        same("rope", ("x", x.len()), ("n_heads x head_dim", n_heads * head_dim));
        same("rope", ("cos", cos.len()), ("sin", sin.len()));
        assert!(
            x.is_empty() || 2 * cos.len() <= head_dim,
            "rope: {} pairs in heads of {head_dim} elements",
            cos.len()
        );
        if !x.is_empty() {
            self.run(RopeHeads { x, head_dim, cos, sin, pairing })
        }
    }

    /// `gate = silu(gate)·up`.
    pub fn silu_mul_inplace(&self, gate: &mut [f32], up: &[f32]) {
        same("silu_mul_inplace", ("gate", gate.len()), ("up", up.len()));
        self.run(InPlace2 { a: gate, b: up, f: activation::SiluMul })
    }

    /// `gate = gelu(gate)·up`, tanh approximation.
    pub fn gelu_tanh_mul_inplace(&self, gate: &mut [f32], up: &[f32]) {
        same("gelu_tanh_mul_inplace", ("gate", gate.len()), ("up", up.len()));
        self.run(InPlace2 { a: gate, b: up, f: activation::GeluTanhMul })
    }

    /// `gate = g·σ(1.702·g)·(u + 1)`, g = min(gate, 7), u = min(max(up, -7), 7).
    pub fn clamped_swiglu_inplace(&self, gate: &mut [f32], up: &[f32]) {
        same("clamped_swiglu_inplace", ("gate", gate.len()), ("up", up.len()));
        self.run(InPlace2 { a: gate, b: up, f: activation::ClampedSwiGlu })
    }

    /// `x = max(x, 0)`.
    pub fn relu(&self, x: &mut [f32]) {
        self.run(InPlace1 { x, f: activation::Relu })
    }

    /// `x = cap·tanh(x / cap)`; `cap` is positive.
    pub fn softcap(&self, x: &mut [f32], cap: f32) {
        assert!(cap > 0.0, "softcap: cap {cap} is not positive");
        self.run(InPlace1 { x, f: activation::Softcap(cap) })
    }

    /// max x (NaN ignored; -inf if all are NaN) and log Σ e^x (NaN if any x is).
    pub fn max_and_logsumexp(&self, x: &[f32]) -> (f32, f64) {
        self.run(MaxAndLogsumexp { x })
    }

    /// The lowest index of the greatest element. NaN is never chosen; if all elements are NaN the result is 0.
    pub fn argmax(&self, x: &[f32]) -> usize {
        self.run(Argmax { x })
    }

    /// `out = scale·row`, decoded from any dtype, bit for bit as
    /// [`dequantise_row`](crate::reference::dequant::dequantise_row) defines it.
    pub fn embed_row(&self, dtype: DType, row: &[u8], scale: f32, out: &mut [f32]) {
        assert_eq!(
            Some(row.len()),
            dtype.row_bytes(out.len()),
            "embed_row: {} bytes for {} elements of {dtype}",
            row.len(),
            out.len()
        );
        self.run(EmbedRow { dtype, row, scale, out })
    }

    /// Rounds to bfloat16, ties to even; NaN stays NaN. Where the CPU has AVX512_BF16 its instruction is
    /// used, which treats subnormal inputs (below 1.2e-38) as zero; elsewhere they are kept.
    pub fn f32_to_bf16(&self, x: &[f32], out: &mut [u16]) {
        same("f32_to_bf16", ("x", x.len()), ("out", out.len()));
        match self.bf16_instruction {
            // SAFETY: this CPU has the features of the tier (see `run`), and the slices carry their lengths.
            Some(round) => unsafe { round(x, out) },
            None => self.run(F32ToBf16 { x, out }),
        }
    }

    /// Quantises a row of activations, padded with zeros, to int8 in blocks of 32 ([`reference::quantise`]), and its
    /// rounding error into `fine`, with the same bits in every tier.
    pub fn quantise_row(&self, x: &[f32], row: Int8Row<'_>, fine: Option<Int8Row<'_>>) {
        let blocks = row.blocks();
        assert!(x.len() <= 32 * blocks, "quantise_row: x has {} elements, row has {blocks} blocks", x.len());
        if let Some(fine) = &fine {
            same("quantise_row", ("row", blocks), ("fine", fine.blocks()));
        }
        // SAFETY: this CPU has the features of the tier (see `run`), and the slices carry their lengths.
        unsafe { (self.quantise_row)(x, row, fine) }
    }
}

impl std::fmt::Debug for Kernels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Kernels({})", self.name)
    }
}
