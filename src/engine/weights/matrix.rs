//! The matrices of a model as an accelerator multiplies them: which tensors are packed together.

use crate::device::{Accelerator, DevPtr, LinearSource, LinearWeight};
use crate::model::{Block, MatrixSpec, ModelSpec, Position, Weights};
use crate::tensor::{DType, Half, Tensor};
use crate::{Error, Result};

/// Tensors that are multiplied as one matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Matrix {
    /// Names without `.weight`; more than one are stacked.
    pub names: Vec<String>,
    /// Gate and up of a gated feed-forward, interleaved for the fused activation.
    pub gate_up: bool,
}

impl Matrix {
    pub fn one(name: String) -> Matrix {
        Matrix { names: vec![name], gate_up: false }
    }

    fn of(layer: usize, m: &MatrixSpec) -> Matrix {
        Matrix::one(format!("blk.{layer}.{}", m.name))
    }

    pub fn parts<'a>(&self, weights: &'a Weights) -> Result<Vec<&'a Tensor>> {
        self.names.iter().map(|n| tensor(weights, &format!("{n}.weight"))).collect()
    }

    /// Calls `f` with the source from which the accelerator packs the matrix.
    pub fn with_source<R>(
        &self,
        weights: &Weights,
        f: impl FnOnce(&LinearSource<'_>) -> Result<R>,
    ) -> Result<R> {
        let parts = self.parts(weights)?;
        match (self.gate_up, &parts[..]) {
            (true, [gate, up]) => f(&LinearSource::GateUp(gate, up)),
            _ => f(&LinearSource::Rows(&parts)),
        }
    }
}

pub(super) fn tensor<'a>(weights: &'a Weights, name: &str) -> Result<&'a Tensor> {
    weights.get(name).ok_or_else(|| Error::format(name, "missing from the model; is a shard missing?"))
}

/// The matrices of a layer as they are multiplied.
#[derive(Debug)]
pub(super) struct LayerMatrices {
    /// q, k and v, stacked as far as they have one dtype.
    pub qkv: Vec<Matrix>,
    pub o: Matrix,
    /// Up; gate and up in one; or gate, then up.
    pub up: Vec<Matrix>,
    pub down: Matrix,
}

impl LayerMatrices {
    /// # Errors
    /// A tensor is missing, or attention or the feed-forward is none that accelerators compute.
    pub fn new(spec: &ModelSpec, block: &Block, weights: &Weights, layer: usize) -> Result<LayerMatrices> {
        if block.sinks.is_some() {
            return Err(Error::Unsupported(
                "attention with sinks: it runs on the CPU only for now; use `device` cpu".into(),
            ));
        }
        let ffn = block.ffn.dense()?;
        let dtype = |m: &MatrixSpec| tensor(weights, &m.tensor(layer, "weight")).map(|t| t.dtype);
        let mut qkv: Vec<(DType, Matrix)> = Vec::new();
        for part in [&block.q, &block.k, &block.v] {
            let (dtype, matrix) = (dtype(part)?, Matrix::of(layer, part));
            match qkv.last_mut() {
                Some((d, m)) if *d == dtype => m.names.extend(matrix.names),
                _ => qkv.push((dtype, matrix)),
            }
        }
        let biased = |m: &MatrixSpec| weights.get(&m.tensor(layer, "bias")).is_some();
        let up = match &ffn.gate {
            None => vec![Matrix::of(layer, &ffn.up)],
            Some(gate) => {
                let (mut gate, up, both) = (
                    Matrix::of(layer, gate),
                    Matrix::of(layer, &ffn.up),
                    // Rows interleave by eight; other widths, mixed dtypes and biases need separate products.
                    dtype(gate)? == dtype(&ffn.up)?
                        && spec.d_ff.is_multiple_of(8)
                        && !biased(gate)
                        && !biased(&ffn.up),
                );
                if both {
                    gate.names.extend(up.names);
                    vec![Matrix { gate_up: true, ..gate }]
                } else {
                    vec![gate, up]
                }
            }
        };
        Ok(LayerMatrices {
            qkv: qkv.into_iter().map(|(_, m)| m).collect(),
            o: Matrix::of(layer, &block.o),
            up,
            down: Matrix::of(layer, &ffn.down),
        })
    }

    fn all(self) -> impl Iterator<Item = Matrix> {
        self.qkv.into_iter().chain([self.o]).chain(self.up).chain([self.down])
    }
}

/// The head, by name.
pub(super) fn head_name(spec: &ModelSpec) -> &'static str {
    if spec.tied_head { "token_embd" } else { "output" }
}

/// Whether the head's packed matrix also serves as the embedding's table.
pub(super) fn shares_table(accel: &dyn Accelerator, spec: &ModelSpec, table: &Tensor, act: Half) -> bool {
    let positions = matches!(spec.position, Position::Learned { .. });
    spec.tied_head && accel.embeds_packed(table.dtype, act, positions)
}

/// Whether some layer multiplies gate and up separately, and so needs a workspace for them.
pub fn separate_gate_up(spec: &ModelSpec, weights: &Weights) -> Result<bool> {
    for layer in 0..spec.n_layers {
        let block = Block::of(spec, layer);
        if LayerMatrices::new(spec, &block, weights, layer)?.up.len() > 1 {
            return Ok(true);
        }
    }
    Ok(false)
}

fn matrices(spec: &ModelSpec, weights: &Weights) -> Result<Vec<Matrix>> {
    let mut all = Vec::new();
    for layer in 0..spec.n_layers {
        let block = Block::of(spec, layer);
        all.extend(LayerMatrices::new(spec, &block, weights, layer)?.all());
    }
    all.push(Matrix::one(head_name(spec).to_string()));
    Ok(all)
}

/// All matrices as they will be multiplied, without addresses, for sizing working memory.
pub fn linear_shapes(spec: &ModelSpec, weights: &Weights) -> Result<Vec<LinearWeight>> {
    let shape = |m: &Matrix| {
        m.with_source(weights, |s| {
            let (ptr, bias) = (DevPtr::NULL, DevPtr::NULL);
            Ok(LinearWeight { ptr, dtype: s.dtype(), n: s.n(), k: s.k(), bias })
        })
    };
    matrices(spec, weights)?.iter().map(shape).collect()
}

/// The activation type that all weights of a model can be multiplied with: bfloat16 if any of them is, or if the
/// family's activations exceed f16's range.
///
/// # Errors
/// If the accelerator cannot multiply a dtype.
pub fn activation_type(accel: &dyn Accelerator, spec: &ModelSpec, weights: &Weights) -> Result<Half> {
    let mut act = Half::F16;
    let half = |name: &str, dtype| {
        accel.activations_for(dtype).ok_or_else(|| {
            let device = &accel.runtime().info().name;
            Error::Unsupported(format!(
                "{name}.weight: {device} has no kernel for {dtype} weights; run on the CPU with `device` cpu"
            ))
        })
    };
    for m in matrices(spec, weights)? {
        for (t, name) in m.parts(weights)?.iter().zip(&m.names) {
            if half(name, t.dtype)? == Half::BF16 {
                act = Half::BF16;
            }
        }
    }
    half("token_embd", tensor(weights, "token_embd.weight")?.dtype)?;
    if spec.wide_activations && accel.activations_for(DType::BF16) == Some(Half::BF16) {
        act = Half::BF16;
    }
    Ok(act)
}
