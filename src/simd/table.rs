//! The dispatch table: one readable list of kernels per tier.
//!
//! A tier inherits the table below it and replaces what it does better. An operation is dispatched
//! once, through a method that asserts the shapes; the fields themselves are private, so a kernel runs
//! only after its CPU features and its shapes were checked.

use super::Isa;
use crate::reference;
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
    pub(super) scale: unsafe fn(&mut [f32], f32),
    pub(super) rope_heads: unsafe fn(&mut [f32], usize, &[f32], &[f32], RopePairing),
    pub(super) silu_mul: unsafe fn(&[f32], &[f32], &mut [f32]),
    pub(super) silu_mul_inplace: unsafe fn(&mut [f32], &[f32]),
    pub(super) gelu_tanh_mul: unsafe fn(&[f32], &[f32], &mut [f32]),
    pub(super) gelu_tanh_mul_inplace: unsafe fn(&mut [f32], &[f32]),
    pub(super) relu: unsafe fn(&mut [f32]),
    pub(super) softcap: unsafe fn(&mut [f32], f32),
    pub(super) softmax: unsafe fn(&mut [f32]),
    pub(super) max_and_logsumexp: unsafe fn(&[f32]) -> (f32, f64),
    pub(super) argmax: unsafe fn(&[f32]) -> usize,
    pub(super) embed_row: unsafe fn(DType, &[u8], f32, &mut [f32]),
    pub(super) f32_to_bf16: unsafe fn(&[f32], &mut [u16]),
    pub(super) f32_to_f16: unsafe fn(&[f32], &mut [u16]),
    pub(super) bf16_to_f32: unsafe fn(&[u16], &mut [f32]),
    pub(super) f16_to_f32: unsafe fn(&[u16], &mut [f32]),
}

/// Safe scalar Rust.
static REFERENCE: Kernels = Kernels {
    name: "reference",
    isa: Isa::Reference,
    rms_norm: reference::norm::rms_norm,
    rms_norm_heads: reference::norm::rms_norm_heads,
    add_rms_norm: reference::norm::add_rms_norm,
    layer_norm: reference::norm::layer_norm,
    add: reference::activation::add,
    scale: reference::activation::scale,
    rope_heads: reference::rope::rope_heads,
    silu_mul: reference::activation::silu_mul,
    silu_mul_inplace: reference::activation::silu_mul_inplace,
    gelu_tanh_mul: reference::activation::gelu_tanh_mul,
    gelu_tanh_mul_inplace: reference::activation::gelu_tanh_mul_inplace,
    relu: reference::activation::relu,
    softcap: reference::activation::softcap,
    softmax: reference::softmax::softmax,
    max_and_logsumexp: reference::softmax::max_and_logsumexp,
    argmax: reference::reduce::argmax,
    embed_row: reference::embed::embed_row,
    f32_to_bf16: reference::convert::f32_to_bf16,
    f32_to_f16: reference::convert::f32_to_f16,
    bf16_to_f32: reference::convert::bf16_to_f32,
    f16_to_f32: reference::convert::f16_to_f32,
};

/// Two lengths that must be equal, or a panic that names both.
#[track_caller]
fn same(op: &str, a: (&str, usize), b: (&str, usize)) {
    assert!(a.1 == b.1, "{op}: {} has {} elements, {} has {}", a.0, a.1, b.0, b.1);
}

/// Calls a kernel of the table.
macro_rules! call {
    ($self:ident . $op:ident ( $($arg:expr),* )) => {
        // SAFETY: `Kernels` values come from `for_isa` alone, which checked that this CPU has the tier's
        // features; that is all that a kernel asks for (its slices carry their own lengths).
        unsafe { ($self.$op)($($arg),*) }
    };
}

impl Kernels {
    /// The table of a tier.
    ///
    /// # Panics
    /// If this CPU cannot run it: choose among [`Isa::supported`], or use [`Isa::selected`].
    pub fn for_isa(isa: Isa) -> &'static Kernels {
        if let Some(why) = isa.missing() {
            panic!("kernels of tier {isa} on a CPU that cannot run them: {why}");
        }
        #[cfg(target_arch = "x86_64")]
        {
            use super::{Caps, avx2, avx512};
            match isa {
                Isa::Reference => &REFERENCE,
                Isa::Avx2 => &avx2::KERNELS,
                Isa::Avx512 if Caps::get().avx512_bf16 => &avx512::KERNELS_BF16,
                Isa::Avx512 => &avx512::KERNELS,
                Isa::Amx if Caps::get().avx512_bf16 => &avx512::KERNELS_AMX_BF16,
                Isa::Amx => &avx512::KERNELS_AMX,
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        &REFERENCE
    }

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

    /// `x *= factor`.
    pub fn scale(&self, x: &mut [f32], factor: f32) {
        call!(self.scale(x, factor))
    }

    /// Rotates the first `2·cos.len()` elements of one head; the rest is left alone.
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

    /// `out = silu(gate)·up`.
    pub fn silu_mul(&self, gate: &[f32], up: &[f32], out: &mut [f32]) {
        same("silu_mul", ("gate", gate.len()), ("up", up.len()));
        same("silu_mul", ("gate", gate.len()), ("out", out.len()));
        call!(self.silu_mul(gate, up, out))
    }

    /// `gate = silu(gate)·up`.
    pub fn silu_mul_inplace(&self, gate: &mut [f32], up: &[f32]) {
        same("silu_mul_inplace", ("gate", gate.len()), ("up", up.len()));
        call!(self.silu_mul_inplace(gate, up))
    }

    /// `out = gelu(gate)·up`, tanh approximation.
    pub fn gelu_tanh_mul(&self, gate: &[f32], up: &[f32], out: &mut [f32]) {
        same("gelu_tanh_mul", ("gate", gate.len()), ("up", up.len()));
        same("gelu_tanh_mul", ("gate", gate.len()), ("out", out.len()));
        call!(self.gelu_tanh_mul(gate, up, out))
    }

    /// `gate = gelu(gate)·up`, tanh approximation.
    pub fn gelu_tanh_mul_inplace(&self, gate: &mut [f32], up: &[f32]) {
        same("gelu_tanh_mul_inplace", ("gate", gate.len()), ("up", up.len()));
        call!(self.gelu_tanh_mul_inplace(gate, up))
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

    /// Softmax in place. A fully masked row (all -inf) becomes zeros.
    pub fn softmax(&self, x: &mut [f32]) {
        call!(self.softmax(x))
    }

    /// max x (NaN ignored; -inf if there is nothing else) and log Σ e^x (NaN if any x is).
    pub fn max_and_logsumexp(&self, x: &[f32]) -> (f32, f64) {
        call!(self.max_and_logsumexp(x))
    }

    /// The lowest index of the greatest element. NaN never wins, unless there is nothing else: then 0.
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
    /// used, which takes subnormal inputs (below 1.2e-38) for zero; elsewhere they are kept.
    pub fn f32_to_bf16(&self, x: &[f32], out: &mut [u16]) {
        same("f32_to_bf16", ("x", x.len()), ("out", out.len()));
        call!(self.f32_to_bf16(x, out))
    }

    /// Rounds to IEEE half, ties to even; beyond 65 504 + half an ulp it is infinity, NaN stays NaN.
    pub fn f32_to_f16(&self, x: &[f32], out: &mut [u16]) {
        same("f32_to_f16", ("x", x.len()), ("out", out.len()));
        call!(self.f32_to_f16(x, out))
    }

    /// Widens bfloat16.
    pub fn bf16_to_f32(&self, x: &[u16], out: &mut [f32]) {
        same("bf16_to_f32", ("x", x.len()), ("out", out.len()));
        call!(self.bf16_to_f32(x, out))
    }

    /// Widens IEEE half.
    pub fn f16_to_f32(&self, x: &[u16], out: &mut [f32]) {
        same("f16_to_f32", ("x", x.len()), ("out", out.len()));
        call!(self.f16_to_f32(x, out))
    }
}

impl std::fmt::Debug for Kernels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Kernels({})", self.name)
    }
}
