//! A model's weights in an accelerator's memory.

use std::sync::Arc;

use super::layer::{LayerLayout, LayerSource};
use super::matrix::{Matrix, head_name, shares_table, tensor};
use crate::Result;
use crate::device::{Accelerator, AttnTables, Buffer, DevPtr, EmbedWeight, Lane, LinearWeight, NormWeight};
use crate::host::Pool;
use crate::model::{Block, ModelSpec, Norm, NormSpec, Position, Weights, tensor_name};
use crate::rope::RopeTable;
use crate::tensor::{DType, Half};

/// What an allocation takes.
fn rounded(bytes: usize) -> u64 {
    bytes.next_multiple_of(256) as u64
}

/// Bytes of the last norm and the head.
///
/// # Errors
/// A missing tensor, or one that the accelerator cannot multiply.
pub fn head_bytes(accel: &dyn Accelerator, spec: &ModelSpec, weights: &Weights, act: Half) -> Result<u64> {
    let norm = if matches!(spec.norm, Norm::Layer { .. }) { 2 } else { 1 };
    let matrix = head_matrix_bytes(accel, spec, weights, act)?;
    Ok(rounded(matrix) + norm * rounded(4 * spec.d_model))
}

/// Bytes of the head's matrix, which one step reads.
///
/// # Errors
/// As [`head_bytes`].
pub fn head_matrix_bytes(
    accel: &dyn Accelerator,
    spec: &ModelSpec,
    weights: &Weights,
    act: Half,
) -> Result<usize> {
    Matrix::one(head_name(spec).to_string()).with_source(weights, |s| accel.packed_bytes(s, act))
}

/// Bytes of the embedding; fewer if a head on the same side serves as its table.
///
/// # Errors
/// A missing tensor.
pub fn embedding_bytes(
    accel: &dyn Accelerator,
    spec: &ModelSpec,
    weights: &Weights,
    act: Half,
    with_head: bool,
) -> Result<u64> {
    let table = tensor(weights, "token_embd.weight")?;
    let shared = with_head && shares_table(accel, spec, table, act);
    let positions = weights.get("position_embd.weight").map_or(0, |t| rounded(t.data.len()));
    Ok(positions + if shared { 0 } else { rounded(table.data.len()) })
}

/// Bytes of [`Upload::tables`].
pub fn table_bytes(spec: &ModelSpec, context: usize) -> u64 {
    let sinks = if spec.sinks { rounded(4 * spec.n_layers * spec.n_heads) } else { 0 };
    let Position::Rope(r) = &spec.position else { return sinks };
    let tables = if r.local_theta.is_some() { 4 } else { 2 };
    tables * rounded(4 * (r.dim / 2) * context) + sinks
}

/// Bytes that [`Upload::post_norms`] will take for a layer.
pub fn post_norm_bytes(spec: &ModelSpec) -> u64 {
    let block = Block::of(spec, 0);
    [block.post_attn, block.post_ffn].iter().flatten().map(|n| rounded(4 * n.width)).sum()
}

/// Uploads one part after the other, keeping the memory.
pub struct Upload<'a> {
    accel: &'a Arc<dyn Accelerator>,
    spec: &'a ModelSpec,
    source: LayerSource<'a>,
    buffers: Vec<Buffer>,
    staging: Vec<u8>,
}

impl<'a> Upload<'a> {
    /// The weights of a model whose matrices are packed for activations of type `act`; `progress` is called with the
    /// bytes of its matrices that are done.
    pub fn new(
        accel: &'a Arc<dyn Accelerator>,
        spec: &'a ModelSpec,
        weights: &'a Weights,
        act: Half,
        pool: &'a Pool,
        progress: &'a (dyn Fn(u64) + Sync),
    ) -> Upload<'a> {
        let source = LayerSource { accel: &**accel, weights, act, pool, progress };
        Upload { accel, spec, source, buffers: Vec::new(), staging: Vec::new() }
    }

    /// The source that images of layers are filled from.
    pub fn source(&self) -> LayerSource<'a> {
        self.source
    }

    /// Waits for all copies and returns the uploaded memory, which must be kept as long as it is used.
    ///
    /// # Errors
    /// A device that failed.
    pub fn finish(self) -> Result<Vec<Buffer>> {
        self.accel.runtime().synchronize_all()?;
        Ok(self.buffers)
    }

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

    fn vector(&mut self, name: &str, n: usize) -> Result<DevPtr> {
        self.scaled_vector(name, n, 1.0)
    }

    fn scaled_vector(&mut self, name: &str, n: usize, by: f32) -> Result<DevPtr> {
        tensor(self.source.weights, name)?;
        let mut v = self.source.weights.floats(name, n)?.unwrap_or_default();
        v.iter_mut().for_each(|x| *x *= by);
        self.floats(&v)
    }

    /// Uploads what attention reads beside the layers' images: tables of RoPE for positions below `context`, which layers share, and the
    /// sinks of each. Returns those of each layer.
    ///
    /// # Errors
    /// If a layer's sinks are missing, or the device lacks memory or has failed.
    pub fn tables(&mut self, context: usize) -> Result<Vec<AttnTables>> {
        let (rope, sinks, spec) = (self.rope(context)?, self.sinks()?, self.spec);
        let of = |layer: usize| AttnTables {
            rope: rope[usize::from(spec.window_of(layer).is_some())],
            sinks: if sinks.is_null() { sinks } else { sinks.add(4 * spec.n_heads * layer) },
        };
        Ok((0..spec.n_layers).map(of).collect())
    }

    /// The sinks of all layers, one after the other; NULL without sinks.
    fn sinks(&mut self) -> Result<DevPtr> {
        let mut all: Vec<f32> = Vec::new();
        for layer in 0..self.spec.n_layers {
            let Some(sinks) = Block::of(self.spec, layer).sinks else { return Ok(DevPtr::NULL) };
            let name = tensor_name(layer, sinks.name, "weight");
            tensor(self.source.weights, &name)?;
            all.extend(self.source.weights.floats(&name, sinks.width)?.unwrap_or_default());
        }
        self.floats(&all)
    }

    /// Tables of RoPE for layers without the model's window, and for layers with it. NULL with learned positions.
    fn rope(&mut self, context: usize) -> Result<[[DevPtr; 2]; 2]> {
        let Position::Rope(rope) = &self.spec.position else { return Ok([[DevPtr::NULL; 2]; 2]) };
        let mut tables = |table: &RopeTable| -> Result<[DevPtr; 2]> {
            let half = table.pairs();
            let (mut cos, mut sin) = (vec![0f32; context * half], vec![0f32; context * half]);
            for p in 0..context {
                let at = p * half..(p + 1) * half;
                table.cos_sin(p, &mut cos[at.clone()], &mut sin[at]);
            }
            Ok([self.floats(&cos)?, self.floats(&sin)?])
        };
        let all = tables(&RopeTable::new(rope, context)?)?;
        let local = RopeTable::local(rope, context)?.map(|t| tables(&t)).transpose()?;
        Ok([all, local.unwrap_or(all)])
    }

    /// Uploads the image of a layer and returns its address. It goes matrix by matrix, so that the host holds no second
    /// image.
    ///
    /// # Errors
    /// If a tensor is misshapen, or the device lacks memory or has failed.
    pub fn layer(&mut self, layout: &LayerLayout) -> Result<DevPtr> {
        let runtime = self.accel.runtime();
        let image = Buffer::new(runtime, layout.bytes)?;
        for piece in &layout.pieces {
            self.staging.clear();
            self.staging.resize(piece.bytes, 0);
            let done = piece.fill(&self.source, &mut self.staging)?;
            runtime.upload(Lane::HostToDevice, image.ptr().add(piece.at), &self.staging)?;
            (self.source.progress)(done);
        }
        let ptr = image.ptr();
        self.buffers.push(image);
        Ok(ptr)
    }

    /// Uploads the norms of the outputs of a layer's attention and feed-forward, separate from the layer's image; NULL
    /// if the family has none. A norm is applied where the output is added, when a streamed layer's image may be gone.
    ///
    /// # Errors
    /// As [`Upload::layer`].
    pub fn post_norms(&mut self, layer: usize) -> Result<[DevPtr; 2]> {
        let block = Block::of(self.spec, layer);
        let mut vector = |norm: &Option<NormSpec>| match norm {
            Some(n) => self.vector(&tensor_name(layer, n.name, "weight"), n.width),
            None => Ok(DevPtr::NULL),
        };
        Ok([vector(&block.post_attn)?, vector(&block.post_ffn)?])
    }

    /// The last norm and the head.
    ///
    /// # Errors
    /// As [`Upload::layer`].
    pub fn head(&mut self) -> Result<(NormWeight, LinearWeight)> {
        let d = self.spec.d_model;
        let scale = self.spec.logit_scale;
        let w = self.scaled_vector("output_norm.weight", d, scale)?;
        let b = match self.spec.norm {
            Norm::Layer { .. } => self.scaled_vector("output_norm.bias", d, scale)?,
            Norm::Rms { .. } => DevPtr::NULL,
        };
        let matrix = Matrix::one(head_name(self.spec).to_string());
        let LayerSource { accel, weights, act, pool, progress } = self.source;
        let mut staging = std::mem::take(&mut self.staging);
        let (dtype, n, k) = matrix.with_source(weights, |s| {
            staging.clear();
            staging.resize(accel.packed_bytes(s, act)?, 0);
            accel.pack(s, act, pool, &mut staging);
            Ok((s.dtype(), s.n(), s.k()))
        })?;
        let ptr = self.bytes(&staging)?;
        self.staging = staging;
        progress(matrix.parts(weights)?.iter().map(|t| t.data.len() as u64).sum());
        Ok((NormWeight { w, b }, LinearWeight { ptr, dtype, n, k, bias: DevPtr::NULL }))
    }

    /// Uploads the embedding, whose table may be the head's if that is also on the device.
    ///
    /// # Errors
    /// As [`Upload::layer`].
    pub fn embedding(&mut self, head: Option<&LinearWeight>) -> Result<EmbedWeight> {
        let weights = self.source.weights;
        let table = tensor(weights, "token_embd.weight")?;
        let head = head.filter(|_| shares_table(&**self.accel, self.spec, table, self.source.act));
        let mut embed = EmbedWeight {
            table: head.map_or_else(|| self.bytes(&table.data), |h| Ok(h.ptr))?,
            dtype: table.dtype,
            packed: head.is_some(),
            positions: DevPtr::NULL,
            positions_dtype: DType::F32,
            n_positions: 0,
            position_offset: 0,
        };
        if let Position::Learned { offset } = self.spec.position {
            let t = tensor(weights, "position_embd.weight")?;
            embed.positions = self.bytes(&t.data)?;
            (embed.positions_dtype, embed.n_positions, embed.position_offset) = (t.dtype, t.rows(), offset);
        }
        Ok(embed)
    }
}
