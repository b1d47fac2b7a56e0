//! The dispatch table: one readable list of kernels per tier.
//!
//! A tier inherits the table below it and replaces the kernels that it improves. An operation is dispatched once,
//! through a method that asserts the shapes; the fields are private, so a kernel runs only after its CPU features and
//! shapes were checked.

use super::Isa;
use crate::reference;
use crate::reference::quantise::Int8Row;
use crate::rope::RopePairing;
use crate::tensor::DType;

/// The kernels of one tier for small operations: everything but linear layers and attention.
///
/// Activations are `f32`. All kernels are deterministic: the same row gives the same bits, whatever
/// thread or batch it runs in.
#[derive(Clone, Copy)]
#[allow(clippy::type_complexity)] // a signature per line reads better than twenty aliases
pub struct Kernels {
    /// Name of the tier.
    pub name: &'static str,
    /// The tier.
    pub isa: Isa,
    pub(super) rms_norm: unsafe fn(&[f32], &[f32], f32, &mut [f32]),
    pub(super) rms_norm_heads: unsafe fn(&mut [f32], &[f32], f32),
    pub(super) add_rms_norm: unsafe fn(&mut [f32], &[f32], &[f32], f32, &mut [f32]),
    pub(super) layer_norm: unsafe fn(&[f32], &[f32], &[f32], f32, &mut [f32]),
    pub(super) add: unsafe fn(&mut [f32], &[f32]),
    pub(super) rope_heads: unsafe fn(&mut [f32], usize, &[f32], &[f32], RopePairing),
    pub(super) silu_mul_inplace: unsafe fn(&mut [f32], &[f32]),
    pub(super) gelu_tanh_mul_inplace: unsafe fn(&mut [f32], &[f32]),
    pub(super) clamped_swiglu_inplace: unsafe fn(&mut [f32], &[f32]),
    pub(super) relu: unsafe fn(&mut [f32]),
    pub(super) softcap: unsafe fn(&mut [f32], f32),
    pub(super) max_and_logsumexp: unsafe fn(&[f32]) -> (f32, f64),
    pub(super) argmax: unsafe fn(&[f32]) -> usize,
    pub(super) embed_row: unsafe fn(DType, &[u8], f32, &mut [f32]),
    pub(super) f32_to_bf16: unsafe fn(&[f32], &mut [u16]),
    pub(super) quantise_row: unsafe fn(&[f32], Int8Row<'_>, Option<Int8Row<'_>>),
}

/// Safe scalar Rust.
pub(super) static REFERENCE: Kernels = Kernels {
    name: "reference",
    isa: Isa::Reference,
    rms_norm: reference::norm::rms_norm,
    rms_norm_heads: reference::norm::rms_norm_heads,
    add_rms_norm: reference::norm::add_rms_norm,
    layer_norm: reference::norm::layer_norm,
    add: reference::activation::add,
    rope_heads: reference::rope::rope_heads,
    silu_mul_inplace: reference::activation::silu_mul_inplace,
    gelu_tanh_mul_inplace: reference::activation::gelu_tanh_mul_inplace,
    clamped_swiglu_inplace: reference::activation::clamped_swiglu_inplace,
    relu: reference::activation::relu,
    softcap: reference::activation::softcap,
    max_and_logsumexp: reference::softmax::max_and_logsumexp,
    argmax: reference::reduce::argmax,
    embed_row: reference::embed::embed_row,
    f32_to_bf16: reference::convert::f32_to_bf16,
    quantise_row: reference::quantise::quantise_row,
};

/// Two lengths that must be equal, or a panic that names both.
#[track_caller]
fn same(op: &str, a: (&str, usize), b: (&str, usize)) {
    assert!(a.1 == b.1, "{op}: {} has {} elements, {} has {}", a.0, a.1, b.0, b.1);
}

/// Calls a kernel of the table.
macro_rules! call {
    ($self:ident . $op:ident ( $($arg:expr),* )) => {
        // SAFETY: `Kernels` values come from `for_isa` alone, which checked that this CPU has the tier's features. A
        // kernel requires nothing else (its slices carry their lengths).
        unsafe { ($self.$op)($($arg),*) }
    };
}

impl Kernels {
    /// `out = x·w / √(mean(x²) + eps)`, one row.
    pub fn rms_norm(&self, x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
        same("rms_norm", ("x", x.len()), ("w", w.len()));
        same("rms_norm", ("x", x.len()), ("out", out.len()));
        call!(self.rms_norm(x, w, eps, out))
    }

    /// RMS norm in place of each run of `w.len()` elements of `x`: heads of queries or keys, or one row.
    pub fn rms_norm_heads(&self, x: &mut [f32], w: &[f32], eps: f32) {
        assert!(
            x.is_empty() || (!w.is_empty() && x.len().is_multiple_of(w.len())),
            "rms_norm_heads: {} elements are no multiple of the weight's {}",
            x.len(),
            w.len()
        );
        call!(self.rms_norm_heads(x, w, eps))
    }

    /// Adds `delta` to the residual `x`, then `out = rms_norm(x)`.
    pub fn add_rms_norm(&self, x: &mut [f32], delta: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
        same("add_rms_norm", ("x", x.len()), ("delta", delta.len()));
        same("add_rms_norm", ("x", x.len()), ("w", w.len()));
        same("add_rms_norm", ("x", x.len()), ("out", out.len()));
        call!(self.add_rms_norm(x, delta, w, eps, out))
    }

    /// `out = (x - mean)·w / √(var + eps) + b`, one row.
    pub fn layer_norm(&self, x: &[f32], w: &[f32], b: &[f32], eps: f32, out: &mut [f32]) {
        same("layer_norm", ("x", x.len()), ("w", w.len()));
        same("layer_norm", ("x", x.len()), ("b", b.len()));
        same("layer_norm", ("x", x.len()), ("out", out.len()));
        call!(self.layer_norm(x, w, b, eps, out))
    }

    /// `x += delta`: residuals and biases.
    pub fn add(&self, x: &mut [f32], delta: &[f32]) {
        same("add", ("x", x.len()), ("delta", delta.len()));
        call!(self.add(x, delta))
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
            call!(self.rope_heads(x, head_dim, cos, sin, pairing))
        }
    }

    /// `gate = silu(gate)·up`.
    pub fn silu_mul_inplace(&self, gate: &mut [f32], up: &[f32]) {
        same("silu_mul_inplace", ("gate", gate.len()), ("up", up.len()));
        call!(self.silu_mul_inplace(gate, up))
    }

    /// `gate = gelu(gate)·up`, tanh approximation.
    pub fn gelu_tanh_mul_inplace(&self, gate: &mut [f32], up: &[f32]) {
        same("gelu_tanh_mul_inplace", ("gate", gate.len()), ("up", up.len()));
        call!(self.gelu_tanh_mul_inplace(gate, up))
    }

    /// `gate = g·σ(1.702·g)·(u + 1)`, g = min(gate, 7), u = min(max(up, -7), 7).
    pub fn clamped_swiglu_inplace(&self, gate: &mut [f32], up: &[f32]) {
        same("clamped_swiglu_inplace", ("gate", gate.len()), ("up", up.len()));
        call!(self.clamped_swiglu_inplace(gate, up))
    }

    /// `x = max(x, 0)`.
    pub fn relu(&self, x: &mut [f32]) {
        call!(self.relu(x))
    }

    /// `x = cap·tanh(x / cap)`; `cap` is positive.
    pub fn softcap(&self, x: &mut [f32], cap: f32) {
        assert!(cap > 0.0, "softcap: cap {cap} is not positive");
        call!(self.softcap(x, cap))
    }

    /// max x (NaN ignored; -inf if all are NaN) and log Σ e^x (NaN if any x is).
    pub fn max_and_logsumexp(&self, x: &[f32]) -> (f32, f64) {
        call!(self.max_and_logsumexp(x))
    }

    /// The lowest index of the greatest element. NaN is never chosen; if all elements are NaN the result is 0.
    pub fn argmax(&self, x: &[f32]) -> usize {
        call!(self.argmax(x))
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
        call!(self.embed_row(dtype, row, scale, out))
    }

    /// Rounds to bfloat16, ties to even; NaN stays NaN. Where the CPU has AVX512_BF16 its instruction is
    /// used, which treats subnormal inputs (below 1.2e-38) as zero; elsewhere they are kept.
    pub fn f32_to_bf16(&self, x: &[f32], out: &mut [u16]) {
        same("f32_to_bf16", ("x", x.len()), ("out", out.len()));
        call!(self.f32_to_bf16(x, out))
    }

    /// Quantises a row of activations, padded with zeros, to int8 in blocks of 32 ([`reference::quantise`]), and its
    /// rounding error into `fine`, with the same bits in every tier.
    pub fn quantise_row(&self, x: &[f32], row: Int8Row<'_>, fine: Option<Int8Row<'_>>) {
        let blocks = row.blocks();
        assert!(x.len() <= 32 * blocks, "quantise_row: x has {} elements, row has {blocks} blocks", x.len());
        if let Some(fine) = &fine {
            same("quantise_row", ("row", blocks), ("fine", fine.blocks()));
        }
        call!(self.quantise_row(x, row, fine))
    }
}

impl std::fmt::Debug for Kernels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Kernels({})", self.name)
    }
}
