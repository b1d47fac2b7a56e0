//! The matrices of a model as an accelerator multiplies them: which tensors are packed together.

use crate::device::{Accelerator, DevPtr, LinearSource, LinearWeight};
use crate::model::{Block, FeedForward, MatrixSpec, Mlp, ModelSpec, Position, Weights};
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
        let name = m.tensor(layer, "weight");
        Matrix::one(name.trim_end_matches(".weight").to_owned())
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
    pub ffn: FfnMatrices,
}

/// Of a feed-forward: up; gate and up in one; or gate, then up; and down.
pub(super) type Pair = (Vec<Matrix>, Matrix);

/// The matrices of a feed-forward.
#[derive(Debug)]
pub(super) enum FfnMatrices {
    Dense(Pair),
    Experts(ExpertMatrices),
    /// Experts that no device computes, and why.
    Elsewhere(String),
}

/// The matrices of a layer of experts.
#[derive(Debug)]
pub(super) struct ExpertMatrices {
    /// Gate and up of each expert, in one.
    pub ups: Vec<Matrix>,
    pub downs: Vec<Matrix>,
    /// Those of the expert of all rows.
    pub shared: Option<Pair>,
}

impl FfnMatrices {
    /// Each of its matrices, of experts those of the first.
    fn kinds(self) -> Vec<Matrix> {
        let of = |(mut up, down): Pair| {
            up.push(down);
            up
        };
        match self {
            FfnMatrices::Dense(pair) => of(pair),
            FfnMatrices::Experts(mut e) => {
                e.ups.truncate(1);
                e.downs.truncate(1);
                let shared = e.shared.map_or_else(Vec::new, of);
                e.ups.into_iter().chain(e.downs).chain(shared).collect()
            }
            FfnMatrices::Elsewhere(_) => Vec::new(),
        }
    }
}

impl LayerMatrices {
    /// # Errors
    /// A tensor is missing.
    pub fn new(
        accel: &dyn Accelerator,
        block: &Block,
        weights: &Weights,
        layer: usize,
    ) -> Result<LayerMatrices> {
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
        // `fuses`: whether a product of gate and up in one may have a bias.
        let up = |ffn: &Mlp, fuses: bool| match &ffn.gate {
            None => Ok(vec![Matrix::of(layer, &ffn.up)]),
            Some(gate) => {
                let (mut of_gate, up, both) = (
                    Matrix::of(layer, gate),
                    Matrix::of(layer, &ffn.up),
                    // Rows interleave by eight; other widths and mixed dtypes need separate products.
                    dtype(gate)? == dtype(&ffn.up)?
                        && ffn.up.rows.is_multiple_of(8)
                        && (fuses || !biased(gate) && !biased(&ffn.up)),
                );
                Ok(if both {
                    of_gate.names.extend(up.names);
                    vec![Matrix { gate_up: true, ..of_gate }]
                } else {
                    vec![of_gate, up]
                })
            }
        };
        let ffn = match &block.ffn {
            FeedForward::Dense(mlp) => FfnMatrices::Dense((up(mlp, false)?, Matrix::of(layer, &mlp.down))),
            FeedForward::Experts(mixture) => {
                let pair = |mlp: &Mlp| Ok::<_, Error>((up(mlp, true)?, Matrix::of(layer, &mlp.down)));
                let types = |mlp: &Mlp| Ok::<_, Error>([dtype(&mlp.up)?, dtype(&mlp.down)?]);
                let first = mixture.experts.first().map(types).transpose()?;
                let (mut ups, mut downs, mut alike) = (Vec::new(), Vec::new(), true);
                for mlp in &mixture.experts {
                    let (mut up, down) = pair(mlp)?;
                    alike &= up.len() == 1 && up[0].gate_up && Some(types(mlp)?) == first;
                    ups.append(&mut up);
                    downs.push(down);
                }
                let shared = mixture.shared.as_ref().map(|(mlp, _)| pair(mlp)).transpose()?;
                let fused = shared.as_ref().is_none_or(|(up, _)| up.len() == 1 && up[0].gate_up);
                let foreign = first.into_iter().flatten().find(|&t| !accel.multiplies_experts(t));
                match (alike && fused, foreign) {
                    (true, None) => FfnMatrices::Experts(ExpertMatrices { ups, downs, shared }),
                    (true, Some(dtype)) => FfnMatrices::Elsewhere(format!("experts of {dtype}")),
                    (false, _) => {
                        FfnMatrices::Elsewhere("experts whose matrices are not of one type".to_owned())
                    }
                }
            }
        };
        Ok(LayerMatrices {
            qkv: qkv.into_iter().map(|(_, m)| m).collect(),
            o: Matrix::of(layer, &block.o),
            ffn,
        })
    }

    fn all(self) -> impl Iterator<Item = Matrix> {
        self.qkv.into_iter().chain([self.o]).chain(self.ffn.kinds())
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
pub fn separate_gate_up(accel: &dyn Accelerator, spec: &ModelSpec, weights: &Weights) -> Result<bool> {
    for layer in 0..spec.n_layers {
        let block = Block::of(spec, layer);
        if let FfnMatrices::Dense((up, _)) = LayerMatrices::new(accel, &block, weights, layer)?.ffn
            && up.len() > 1
        {
            return Ok(true);
        }
    }
    Ok(false)
}

fn matrices(accel: &dyn Accelerator, spec: &ModelSpec, weights: &Weights) -> Result<Vec<Matrix>> {
    let mut all = Vec::new();
    for layer in 0..spec.n_layers {
        let block = Block::of(spec, layer);
        all.extend(LayerMatrices::new(accel, &block, weights, layer)?.all());
    }
    all.push(Matrix::one(head_name(spec).to_string()));
    Ok(all)
}

/// All matrices as they will be multiplied, without addresses, for sizing working memory; of a layer's experts those of one.
pub fn linear_shapes(
    accel: &dyn Accelerator,
    spec: &ModelSpec,
    weights: &Weights,
) -> Result<Vec<LinearWeight>> {
    let shape = |m: &Matrix| {
        m.with_source(weights, |s| {
            let (ptr, bias) = (DevPtr::NULL, DevPtr::NULL);
            Ok(LinearWeight { ptr, dtype: s.dtype(), n: s.n(), k: s.k(), bias })
        })
    };
    matrices(accel, spec, weights)?.iter().map(shape).collect()
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
    for m in matrices(accel, spec, weights)? {
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
