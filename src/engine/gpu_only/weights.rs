//! A model's weights in an accelerator's memory.

use std::sync::Arc;

use crate::device::accelerator::{
    Accelerator, EmbedWeight, Half, LayerWeights, LinearSource, LinearWeight, NormWeight, UpWeight,
};
use crate::device::runtime::{Buffer, DevPtr, Lane};
use crate::host::Pool;
use crate::model::spec::{Norm, Position};
use crate::model::{ModelSpec, Weights};
use crate::simd::RopeTable;
use crate::tensor::{DType, Tensor};
use crate::{Error, Result};

/// All weights of a model, uploaded.
pub(super) struct DeviceWeights {
    pub layers: Vec<LayerWeights>,
    pub embed: EmbedWeight,
    pub out_norm: NormWeight,
    pub head: LinearWeight,
    /// Bytes that one decode step reads.
    pub bytes_per_step: u64,
    /// What the addresses above point into.
    _buffers: Vec<Buffer>,
}

/// Matrices of a model, as they are multiplied: what is packed together.
struct Matrix {
    /// Names without `.weight`; more than one are stacked.
    names: Vec<String>,
    /// Gate and up of a gated feed-forward, interleaved for the fused activation.
    gate_up: bool,
}

impl Matrix {
    fn one(name: String) -> Matrix {
        Matrix { names: vec![name], gate_up: false }
    }

    fn parts<'a>(&self, weights: &'a Weights) -> Result<Vec<&'a Tensor>> {
        self.names.iter().map(|n| tensor(weights, &format!("{n}.weight"))).collect()
    }
}

fn tensor<'a>(weights: &'a Weights, name: &str) -> Result<&'a Tensor> {
    weights.get(name).ok_or_else(|| Error::format(name, "missing from the model; is a shard missing?"))
}

/// Calls `f` with the matrix as its accelerator packs it.
fn with_source<R>(
    m: &Matrix,
    weights: &Weights,
    f: impl FnOnce(&LinearSource<'_>) -> Result<R>,
) -> Result<R> {
    let parts = m.parts(weights)?;
    match (m.gate_up, &parts[..]) {
        (true, [gate, up]) => f(&LinearSource::GateUp(gate, up)),
        _ => f(&LinearSource::Rows(&parts)),
    }
}

/// q, k and v, stacked as far as they have one dtype.
fn qkv_matrices(weights: &Weights, layer: usize) -> Result<Vec<Matrix>> {
    let mut out: Vec<(DType, Matrix)> = Vec::new();
    for part in ["attn_q", "attn_k", "attn_v"] {
        let name = format!("blk.{layer}.{part}");
        let dtype = tensor(weights, &format!("{name}.weight"))?.dtype;
        match out.last_mut() {
            Some((d, m)) if *d == dtype => m.names.push(name),
            _ => out.push((dtype, Matrix::one(name))),
        }
    }
    Ok(out.into_iter().map(|(_, m)| m).collect())
}

/// The feed-forward's first matrices.
fn up_matrices(spec: &ModelSpec, weights: &Weights, layer: usize) -> Result<Vec<Matrix>> {
    let (gate, up) = (format!("blk.{layer}.ffn_gate"), format!("blk.{layer}.ffn_up"));
    if !spec.gated() {
        return Ok(vec![Matrix::one(up)]);
    }
    let dtype = |n: &str| tensor(weights, &format!("{n}.weight")).map(|t| t.dtype);
    // Rows interleave by eight; other widths and mixed dtypes are multiplied apart.
    if dtype(&gate)? == dtype(&up)? && spec.d_ff.is_multiple_of(8) {
        return Ok(vec![Matrix { names: vec![gate, up], gate_up: true }]);
    }
    Ok(vec![Matrix::one(gate), Matrix::one(up)])
}

fn head_name(spec: &ModelSpec) -> &'static str {
    if spec.tied_head { "token_embd" } else { "output" }
}

/// Whether the head's packed matrix is the embedding's table, too.
fn shares_table(accel: &dyn Accelerator, spec: &ModelSpec, table: &Tensor, act: Half) -> bool {
    let positions = matches!(spec.position, Position::Learned { .. });
    spec.tied_head && accel.embeds_packed(table.dtype, act, positions)
}

/// Whether some layer multiplies gate and up apart, and so needs a workspace for them.
pub(super) fn separate_gate_up(spec: &ModelSpec, weights: &Weights) -> Result<bool> {
    for layer in 0..spec.n_layers {
        if up_matrices(spec, weights, layer)?.len() > 1 {
            return Ok(true);
        }
    }
    Ok(false)
}

fn matrices(spec: &ModelSpec, weights: &Weights) -> Result<Vec<Matrix>> {
    let mut all = Vec::new();
    for i in 0..spec.n_layers {
        all.extend(qkv_matrices(weights, i)?);
        all.push(Matrix::one(format!("blk.{i}.attn_output")));
        all.extend(up_matrices(spec, weights, i)?);
        all.push(Matrix::one(format!("blk.{i}.ffn_down")));
    }
    all.push(Matrix::one(head_name(spec).to_string()));
    Ok(all)
}

/// All matrices as they will be multiplied, without addresses: what working memory is sized by.
pub(super) fn linear_shapes(spec: &ModelSpec, weights: &Weights) -> Result<Vec<LinearWeight>> {
    let shape = |m: &Matrix| {
        with_source(m, weights, |s| {
            let (ptr, bias) = (DevPtr::NULL, DevPtr::NULL);
            Ok(LinearWeight { ptr, dtype: s.dtype(), n: s.n(), k: s.k(), bias })
        })
    };
    matrices(spec, weights)?.iter().map(shape).collect()
}

/// The activation type that all weights of a model can be multiplied with: bfloat16 if any of them is, or if the
/// family's activations leave f16's range.
///
/// # Errors
/// A dtype that the accelerator cannot multiply.
pub(super) fn activation_type(accel: &dyn Accelerator, spec: &ModelSpec, weights: &Weights) -> Result<Half> {
    let mut act = Half::F16;
    for m in matrices(spec, weights)? {
        for (t, name) in m.parts(weights)?.iter().zip(&m.names) {
            match accel.activations_for(t.dtype) {
                Some(Half::BF16) => act = Half::BF16,
                Some(Half::F16) => {}
                None => {
                    let device = &accel.runtime().info().name;
                    return Err(Error::Unsupported(format!(
                        "{name}.weight: {device} has no kernel for {} weights; run on the CPU with --device cpu",
                        t.dtype
                    )));
                }
            }
        }
    }
    if spec.wide_activations && accel.activations_for(DType::BF16) == Some(Half::BF16) {
        act = Half::BF16;
    }
    Ok(act)
}

/// Bytes that [`DeviceWeights::upload`] will take.
///
/// # Errors
/// A missing tensor, or one that the accelerator cannot multiply.
pub(super) fn device_bytes(
    accel: &dyn Accelerator,
    spec: &ModelSpec,
    weights: &Weights,
    act: Half,
    context: usize,
) -> Result<u64> {
    let table = tensor(weights, "token_embd.weight")?;
    let shared = shares_table(accel, spec, table, act);
    let mut total = if shared { 0 } else { table.data.len() as u64 };
    total += weights.get("position_embd.weight").map_or(0, |t| t.data.len() as u64);
    for m in matrices(spec, weights)? {
        total += with_source(&m, weights, |s| accel.packed_bytes(s, act))? as u64;
    }
    let vectors = weights.iter().filter(|(_, t)| t.shape.len() == 1);
    total += vectors.map(|(_, t)| 4 * t.shape[0] as u64 + 256).sum::<u64>();
    if let Position::Rope(r) = &spec.position {
        total += 2 * 2 * 4 * (r.dim as u64 / 2) * context as u64;
    }
    Ok(total)
}

/// Uploads one thing after the other, keeping the memory.
struct Upload<'a> {
    accel: &'a Arc<dyn Accelerator>,
    weights: &'a Weights,
    act: Half,
    pool: &'a Pool,
    progress: &'a (dyn Fn(u64) + Sync),
    buffers: Vec<Buffer>,
    staging: Vec<u8>,
    bytes_per_step: u64,
}

impl Upload<'_> {
    fn bytes(&mut self, data: &[u8]) -> Result<DevPtr> {
        let buffer = Buffer::from_bytes(self.accel.runtime(), Lane::HostToDevice, data)?;
        let ptr = buffer.ptr();
        self.buffers.push(buffer);
        Ok(ptr)
    }

    fn floats(&mut self, data: &[f32]) -> Result<DevPtr> {
        let bytes: Vec<u8> = data.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.bytes(&bytes)
    }

    /// A vector of any float dtype; NULL if the model has none of that name.
    fn vector(&mut self, name: &str, n: usize) -> Result<DevPtr> {
        match self.weights.floats(name, n)? {
            Some(v) => self.floats(&v),
            None => Ok(DevPtr::NULL),
        }
    }

    fn required(&mut self, name: &str, n: usize) -> Result<DevPtr> {
        let ptr = self.vector(name, n)?;
        if ptr.is_null() { Err(Error::format(name, "missing from the model")) } else { Ok(ptr) }
    }

    fn norm(&mut self, name: &str, spec: &ModelSpec) -> Result<NormWeight> {
        let w = self.required(&format!("{name}.weight"), spec.d_model)?;
        let b = match spec.norm {
            Norm::Layer { .. } => self.required(&format!("{name}.bias"), spec.d_model)?,
            Norm::Rms { .. } => DevPtr::NULL,
        };
        Ok(NormWeight { w, b })
    }

    fn matrix(&mut self, m: &Matrix, biased: bool) -> Result<LinearWeight> {
        let (accel, act, pool) = (self.accel.clone(), self.act, self.pool);
        let mut staging = std::mem::take(&mut self.staging);
        let (dtype, n, k) = with_source(m, self.weights, |source| {
            let bytes = accel.packed_bytes(source, act)?;
            staging.clear();
            staging.resize(bytes, 0);
            accel.pack(source, act, pool, &mut staging);
            Ok((source.dtype(), source.n(), source.k()))
        })?;
        let ptr = self.bytes(&staging)?;
        self.bytes_per_step += staging.len() as u64;
        self.staging = staging;
        (self.progress)(m.parts(self.weights)?.iter().map(|t| t.data.len() as u64).sum());
        let bias = if biased { self.vector(&format!("{}.bias", m.names[0]), n)? } else { DevPtr::NULL };
        Ok(LinearWeight { ptr, dtype, n, k, bias })
    }

    /// The biases of q, k and v in one vector, zeros where one is missing; NULL if all are.
    fn qkv_bias(&mut self, spec: &ModelSpec, layer: usize) -> Result<DevPtr> {
        let widths = [("attn_q", spec.q_dim()), ("attn_k", spec.kv_dim()), ("attn_v", spec.kv_dim())];
        let mut all = Vec::new();
        let mut any = false;
        for (part, n) in widths {
            let v = self.weights.floats(&format!("blk.{layer}.{part}.bias"), n)?;
            any |= v.is_some();
            all.extend(v.unwrap_or_else(|| vec![0.0; n]));
        }
        if any { self.floats(&all) } else { Ok(DevPtr::NULL) }
    }

    fn rope(&mut self, table: &RopeTable, context: usize) -> Result<[DevPtr; 2]> {
        let half = table.pairs();
        let (mut cos, mut sin) = (vec![0f32; context * half], vec![0f32; context * half]);
        for p in 0..context {
            let at = p * half..(p + 1) * half;
            table.cos_sin(p, &mut cos[at.clone()], &mut sin[at]);
        }
        Ok([self.floats(&cos)?, self.floats(&sin)?])
    }
}

impl DeviceWeights {
    /// Packs and uploads everything; `progress` is told the bytes of weights done.
    ///
    /// # Errors
    /// A missing or misshapen tensor; no memory on the device; a device that failed.
    pub fn upload(
        accel: &Arc<dyn Accelerator>,
        spec: &ModelSpec,
        weights: &Weights,
        act: Half,
        context: usize,
        pool: &Pool,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<DeviceWeights> {
        let mut up = Upload {
            accel,
            weights,
            act,
            pool,
            progress,
            buffers: Vec::new(),
            staging: Vec::new(),
            bytes_per_step: 0,
        };
        let (rope, local) = match &spec.position {
            Position::Rope(r) => {
                let rope = up.rope(&RopeTable::new(r)?, context)?;
                let local = RopeTable::local(r)?.map(|t| up.rope(&t, context)).transpose()?;
                (rope, local.unwrap_or(rope))
            }
            Position::Learned { .. } => ([DevPtr::NULL; 2], [DevPtr::NULL; 2]),
        };
        let mut layers = Vec::with_capacity(spec.n_layers);
        for i in 0..spec.n_layers {
            let name = |s: &str| format!("blk.{i}.{s}");
            let windowed = spec.window_of(i).is_some();
            let qkv = qkv_matrices(weights, i)?.iter().map(|m| up.matrix(m, false)).collect::<Result<_>>()?;
            let head_norm = |up: &mut Upload<'_>, s: &str| match spec.qk_norm {
                true => up.required(&name(s), spec.head_dim),
                false => Ok(DevPtr::NULL),
            };
            let post = |up: &mut Upload<'_>, s: &str| match spec.post_norms {
                true => up.required(&name(s), spec.d_model),
                false => Ok(DevPtr::NULL),
            };
            let mut ups = Vec::new();
            for m in up_matrices(spec, weights, i)? {
                let gate_up = m.gate_up;
                ups.push((gate_up, up.matrix(&m, !gate_up)?));
            }
            layers.push(LayerWeights {
                attn_norm: up.norm(&name("attn_norm"), spec)?,
                qkv,
                qkv_bias: up.qkv_bias(spec, i)?,
                q_norm: head_norm(&mut up, "attn_q_norm.weight")?,
                k_norm: head_norm(&mut up, "attn_k_norm.weight")?,
                o: up.matrix(&Matrix::one(name("attn_output")), true)?,
                post_attn: post(&mut up, "post_attention_norm.weight")?,
                ffn_norm: up.norm(&name("ffn_norm"), spec)?,
                up: match ups[..] {
                    [(true, w)] => UpWeight::GateUp(w),
                    [(false, w)] => UpWeight::Plain(w),
                    _ => UpWeight::Separate(ups[0].1, ups[1].1),
                },
                down: up.matrix(&Matrix::one(name("ffn_down")), true)?,
                post_ffn: post(&mut up, "post_ffw_norm.weight")?,
                windowed,
                rope: if windowed { local } else { rope },
            });
        }
        let out_norm = up.norm("output_norm", spec)?;
        let head = up.matrix(&Matrix::one(head_name(spec).to_string()), false)?;
        let table = tensor(weights, "token_embd.weight")?;
        let shared = shares_table(&**accel, spec, table, act);
        let mut embed = EmbedWeight {
            table: if shared { head.ptr } else { up.bytes(&table.data)? },
            dtype: table.dtype,
            packed: shared,
            positions: DevPtr::NULL,
            positions_dtype: DType::F32,
            n_positions: 0,
            position_offset: 0,
        };
        if let Position::Learned { offset } = spec.position {
            let t = tensor(weights, "position_embd.weight")?;
            embed.positions = up.bytes(&t.data)?;
            (embed.positions_dtype, embed.n_positions, embed.position_offset) = (t.dtype, t.rows(), offset);
        }
        accel.runtime().synchronize_all()?;
        let (buffers, bytes_per_step) = (up.buffers, up.bytes_per_step);
        Ok(DeviceWeights { layers, embed, out_norm, head, bytes_per_step, _buffers: buffers })
    }
}
