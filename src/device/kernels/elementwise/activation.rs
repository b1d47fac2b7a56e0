//! Launching `cuda/activation.cu`.

use super::super::abi::ActivationParams;
use crate::Result;
use crate::device::runtime::{DevPtr, Lane, Runtime};
use crate::model::Ffn;
use crate::tensor::Half;

const THREADS: usize = 256;
/// Elements of a row that a block takes.
const PER_BLOCK: usize = THREADS * 4;

/// What [`activate`] computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// The activation of a feed-forward, rounded to a 16-bit type.
    Ffn(Ffn, Half),
    /// No activation: the rows, plus the bias, rounded to a 16-bit type.
    Cast(Half),
    /// The rows plus the bias, in f32; `out` may be `gate`.
    AddBias,
}

/// Operands of [`activate`]. Optional addresses may be NULL.
#[derive(Debug, Clone, Copy)]
pub struct Activate {
    /// f32 `[rows][ld_gate]`.
    pub gate: DevPtr,
    /// f32 `[rows][ld_up]`; read only for gated feed-forwards.
    pub up: DevPtr,
    /// f32 `[n]`, added to gate; optional.
    pub gate_bias: DevPtr,
    /// f32 `[n]`, added to up; optional.
    pub up_bias: DevPtr,
    /// `[rows][ld_out]`.
    pub out: DevPtr,
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub n: usize,
    /// Distance of gate's rows.
    pub ld_gate: usize,
    /// Distance of up's rows.
    pub ld_up: usize,
    /// Distance of out's rows.
    pub ld_out: usize,
}

/// out = act(gate + gate_bias) · (up + up_bias); without gating, out = act(gate + gate_bias).
///
/// # Errors
/// As [`Runtime::launch`].
///
/// # Panics
/// If a length is no multiple of four.
pub fn activate(runtime: &dyn Runtime, lane: Lane, what: Activation, args: &Activate) -> Result<()> {
    assert!(
        [args.n, args.ld_gate, args.ld_up, args.ld_out].iter().all(|v| v.is_multiple_of(4)),
        "activate: n {}, ld_gate {}, ld_up {}, ld_out {}: wanted multiples of 4",
        args.n,
        args.ld_gate,
        args.ld_up,
        args.ld_out
    );
    let kernel = match what {
        Activation::Ffn(Ffn::SwiGlu, t) => format!("activation_swiglu_{}", t.name()),
        Activation::Ffn(Ffn::ClampedSwiGlu, t) => format!("activation_clamped_swiglu_{}", t.name()),
        Activation::Ffn(Ffn::GeGlu, t) => format!("activation_geglu_{}", t.name()),
        Activation::Ffn(Ffn::Relu, t) => format!("activation_relu_{}", t.name()),
        Activation::Cast(t) => format!("cast_{}", t.name()),
        Activation::AddBias => "cast_f32".into(),
    };
    let params = ActivationParams {
        gate: args.gate,
        up: args.up,
        gate_bias: args.gate_bias,
        up_bias: args.up_bias,
        out: args.out,
        rows: args.rows as u32,
        n: args.n as u32,
        ld_gate: args.ld_gate as u32,
        ld_up: args.ld_up as u32,
        ld_out: args.ld_out as u32,
        ..Default::default()
    };
    super::launch(runtime, lane, &kernel, [args.rows, args.n.div_ceil(PER_BLOCK)], THREADS, 0, &params)
}
