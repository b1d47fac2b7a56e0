//! A layer's layout: where each of its parts lies in one contiguous image, independent of the image's address.

use std::ops::Range;

use super::matrix::{ExpertMatrices, FfnMatrices, LayerMatrices, Matrix, Pair, tensor};
use crate::device::{
    Accelerator, AttnTables, DevPtr, ExpertWeights, FeedForward, FfnWeights, LayerWeights, LinearWeight,
    NormWeight, UpWeight,
};
use crate::engine::divided::Divided;
use crate::host::Pool;
use crate::model::{self, Bias, Block, Mixture, ModelSpec, NormSpec, Weights, tensor_name};
use crate::tensor::Half;
use crate::{Error, Result};

/// Alignment of everything in an image. Kernels need at most 128 bytes for weights (bulk copies).
const ALIGN: usize = 256;

/// Address of the image for the addresses in a layout. It is not NULL, which stands for an absent part.
const ORIGIN: DevPtr = DevPtr(ALIGN as u64);

use crate::device::NO_SLOT;

/// The contents of a piece of an image.
#[derive(Debug, Clone)]
enum Content {
    /// A matrix, packed by its accelerator.
    Packed(Matrix),
    /// Consecutive vectors of f32; zeros for a name that the model does not have.
    Floats(Vec<(String, usize)>),
    /// The biases of a gate and its up in one, in the order of their rows.
    GateUpBias(Matrix),
    /// Numbers.
    Words(Vec<u32>),
}

/// Some bytes of an image.
#[derive(Debug, Clone)]
pub(super) struct Piece {
    /// Offset of the first byte.
    pub at: usize,
    /// Number of bytes.
    pub bytes: usize,
    content: Content,
}

impl Piece {
    /// Writes the piece's bytes. Returns the bytes of the model's matrices that went into them.
    pub fn fill(&self, source: &LayerSource<'_>, out: &mut [u8]) -> Result<u64> {
        match &self.content {
            Content::Packed(m) => {
                m.with_source(source.weights, |s| {
                    source.accel.pack(s, source.act, source.pool, out);
                    Ok(())
                })?;
                Ok(m.parts(source.weights)?.iter().map(|t| t.data.len() as u64).sum())
            }
            Content::Floats(vectors) => {
                let mut rest = out;
                for (name, n) in vectors {
                    let (to, behind) = rest.split_at_mut(4 * n);
                    rest = behind;
                    match source.weights.floats(name, *n)? {
                        None => to.fill(0),
                        Some(v) => {
                            for (to, x) in to.chunks_exact_mut(4).zip(v) {
                                to.copy_from_slice(&x.to_le_bytes());
                            }
                        }
                    }
                }
                Ok(0)
            }
            Content::GateUpBias(m) => {
                let n = self.bytes / size_of::<f32>();
                let mut parts = Vec::with_capacity(2);
                for name in &m.names {
                    let name = format!("{name}.bias");
                    let found = source.weights.floats(&name, n / 2)?;
                    parts.push(found.ok_or_else(|| Error::format(name, "missing from the model"))?);
                }
                for (i, to) in out.chunks_exact_mut(4).enumerate() {
                    let (is_up, row) = source.accel.gate_up_row(i, n);
                    to.copy_from_slice(&parts[usize::from(is_up)][row].to_le_bytes());
                }
                Ok(0)
            }
            Content::Words(words) => {
                for (to, x) in out.chunks_exact_mut(4).zip(words) {
                    to.copy_from_slice(&x.to_le_bytes());
                }
                Ok(0)
            }
        }
    }

    /// The same of another matrix, with that one's bias.
    pub fn of(&self, matrix: &Matrix) -> Piece {
        let content = match &self.content {
            Content::Packed(_) => Content::Packed(matrix.clone()),
            Content::GateUpBias(_) => Content::GateUpBias(matrix.clone()),
            Content::Floats(vectors) => {
                Content::Floats(vec![(format!("{}.bias", matrix.names[0]), vectors[0].1)])
            }
            Content::Words(words) => Content::Words(words.clone()),
        };
        Piece { content, ..*self }
    }

    fn is_matrix(&self) -> bool {
        matches!(self.content, Content::Packed(_))
    }
}

/// The data and helpers with which images are filled.
#[derive(Clone, Copy)]
pub struct LayerSource<'a> {
    /// Packs matrices.
    pub accel: &'a dyn Accelerator,
    /// The model's weights.
    pub weights: &'a Weights,
    /// Type of activations that matrices are packed for.
    pub act: Half,
    /// Packs in parallel.
    pub pool: &'a Pool,
    /// Called with the bytes of the model's matrices that are done.
    pub progress: &'a (dyn Fn(u64) + Sync),
}

/// See the [module](self).
#[derive(Debug, Clone)]
pub struct LayerLayout {
    /// Number of the layer.
    pub layer: usize,
    /// Bytes of an image.
    pub bytes: usize,
    /// Why the device does not compute its feed-forward, if so.
    elsewhere: Option<String>,
    /// Disjoint pieces, ascending.
    pub(super) pieces: Vec<Piece>,
    /// Bytes of the image that are the feed-forward's.
    ffn: Range<usize>,
    /// Addresses in an image at [`ORIGIN`].
    at_origin: LayerWeights,
}

/// Places pieces one after the other.
pub(super) struct ImagePlacing<'a> {
    accel: &'a dyn Accelerator,
    weights: &'a Weights,
    act: Half,
    layer: usize,
    /// k of the layer's experts, if it has some.
    used: usize,
    next: usize,
    pieces: Vec<Piece>,
}

impl<'a> ImagePlacing<'a> {
    /// Nothing of a layer yet.
    pub fn of_layer(
        accel: &'a dyn Accelerator,
        weights: &'a Weights,
        act: Half,
        layer: usize,
    ) -> ImagePlacing<'a> {
        ImagePlacing { accel, weights, act, layer, used: 0, next: 0, pieces: Vec::new() }
    }

    /// Places a matrix of an expert. Returns its bytes, to the next one's.
    pub fn expert(&mut self, matrix: &Matrix) -> Result<usize> {
        let from = self.next;
        self.matrix(matrix, true)?;
        Ok(self.next - from)
    }

    /// What was placed.
    pub fn into_pieces(self) -> Vec<Piece> {
        self.pieces
    }

    fn place(&mut self, bytes: usize, content: Content) -> DevPtr {
        let at = self.next;
        self.next = (at + bytes).next_multiple_of(ALIGN);
        self.pieces.push(Piece { at, bytes, content });
        ORIGIN.add(at)
    }

    /// Places consecutive vectors; NULL if the model has none of them.
    fn floats(&mut self, vectors: Vec<(String, usize)>) -> DevPtr {
        if vectors.iter().all(|(name, _)| self.weights.get(name).is_none()) {
            return DevPtr::NULL;
        }
        let n: usize = vectors.iter().map(|(_, n)| n).sum();
        self.place(4 * n, Content::Floats(vectors))
    }

    fn required(&mut self, name: &str, kind: &str, n: usize) -> Result<DevPtr> {
        let name = tensor_name(self.layer, name, kind);
        tensor(self.weights, &name)?;
        Ok(self.floats(vec![(name, n)]))
    }

    /// Places the weights of a norm; NULL without a norm.
    fn norm(&mut self, norm: &Option<NormSpec>) -> Result<NormWeight> {
        let Some(norm) = norm else { return Ok(NormWeight::default()) };
        let w = self.required(norm.name, "weight", norm.width)?;
        let b = if norm.bias { self.required(norm.name, "bias", norm.width)? } else { DevPtr::NULL };
        Ok(NormWeight { w, b })
    }

    /// Places the weights of a norm without a bias; NULL without a norm.
    fn plain(&mut self, norm: &Option<NormSpec>) -> Result<DevPtr> {
        norm.as_ref().map_or(Ok(DevPtr::NULL), |n| self.required(n.name, "weight", n.width))
    }

    /// Places a matrix, then its bias, if it may have one.
    fn matrix(&mut self, m: &Matrix, biased: bool) -> Result<LinearWeight> {
        let (bytes, dtype, n, k) = m.with_source(self.weights, |s| {
            Ok((self.accel.packed_bytes(s, self.act)?, s.dtype(), s.n(), s.k()))
        })?;
        let ptr = self.place(bytes, Content::Packed(m.clone()));
        let bias = match biased {
            true if m.gate_up && self.weights.get(&format!("{}.bias", m.names[0])).is_some() => {
                self.place(4 * n, Content::GateUpBias(m.clone()))
            }
            true if !m.gate_up => self.floats(vec![(format!("{}.bias", m.names[0]), n)]),
            _ => DevPtr::NULL,
        };
        Ok(LinearWeight { ptr, dtype, n, k, bias })
    }

    fn pair(&mut self, (ups, down): &Pair) -> Result<FfnWeights> {
        let packed = ups.iter().map(|m| self.matrix(m, true)).collect::<Result<Vec<_>>>()?;
        let up = match (&packed[..], &ups[..]) {
            ([w], [m]) if m.gate_up => UpWeight::GateUp(*w),
            ([w], _) => UpWeight::Plain(*w),
            _ => UpWeight::Separate(packed[0], packed[1]),
        };
        Ok(FfnWeights { up, down: self.matrix(down, true)? })
    }

    /// Places matrices of one size and type one after the other, each with its bias: the first, and bytes from each to the next.
    fn alike(&mut self, matrices: &[Matrix]) -> Result<(LinearWeight, usize)> {
        let mut placed = Vec::with_capacity(matrices.len());
        for m in matrices {
            placed.push(self.matrix(m, true)?);
        }
        let first = placed[0];
        let stride = placed.get(1).map_or(0, |next| (next.ptr.0 - first.ptr.0) as usize);
        for (e, w) in placed.iter().enumerate() {
            let bias = if first.bias.is_null() { first.bias } else { first.bias.add(e * stride) };
            let want = (first.dtype, first.ptr.add(e * stride), bias);
            assert_eq!((w.dtype, w.ptr, w.bias), want, "experts are alike");
        }
        Ok((first, stride))
    }

    /// `divided`: which experts are here, if not all of them are.
    fn experts(
        &mut self,
        mixture: &Mixture,
        matrices: &ExpertMatrices,
        divided: Option<&Divided>,
    ) -> Result<ExpertWeights> {
        let here = divided.map(|of| &of.on_device[..]);
        let of = &mixture.router;
        let router = self.required(of.name, "weight", of.rows * of.cols)?;
        let router_bias = match of.bias {
            Bias::Required => self.required(of.name, "bias", of.rows)?,
            Bias::Never | Bias::Optional => DevPtr::NULL,
        };
        let some = |all: &[Matrix]| match here {
            None => all.to_vec(),
            Some(here) => here.iter().map(|&e| all[e as usize].clone()).collect(),
        };
        let (up, up_stride) = self.alike(&some(&matrices.ups))?;
        let (down, down_stride) = self.alike(&some(&matrices.downs))?;
        let shared = match (&matrices.shared, &mixture.shared) {
            (Some(pair), Some((_, gate))) => {
                Some((self.pair(pair)?, self.required(gate.name, "weight", gate.width)?))
            }
            _ => None,
        };
        let slots = here.map_or(DevPtr::NULL, |here| {
            let mut slots = vec![NO_SLOT; matrices.ups.len()];
            here.iter().zip(0..).for_each(|(&e, slot)| slots[e as usize] = slot);
            self.place(4 * slots.len(), Content::Words(slots))
        });
        let here = here.map_or(matrices.ups.len(), <[u32]>::len);
        let uses = divided.map_or(self.used as f64, |of| of.uses);
        Ok(ExpertWeights { router, router_bias, up, up_stride, down, down_stride, shared, here, uses, slots })
    }

    fn feed_forward(
        &mut self,
        block: &Block,
        matrices: &FfnMatrices,
        divided: Option<&Divided>,
    ) -> Result<FeedForward> {
        Ok(match (matrices, &block.ffn) {
            (FfnMatrices::Dense(pair), _) => FeedForward::Dense(self.pair(pair)?),
            (FfnMatrices::Experts(of), model::FeedForward::Experts(mixture)) => {
                FeedForward::Experts(Box::new(self.experts(mixture, of, divided)?))
            }
            _ => FeedForward::Elsewhere,
        })
    }
}

impl LayerLayout {
    /// The layout of one layer of a model, for an accelerator and its activations; experts that the accelerator does not compute are
    /// not part of it.
    ///
    /// # Errors
    /// A missing tensor, or one that the accelerator cannot multiply.
    pub fn new(
        accel: &dyn Accelerator,
        spec: &ModelSpec,
        weights: &Weights,
        layer: usize,
        act: Half,
    ) -> Result<LayerLayout> {
        let matrices = LayerMatrices::new(accel, &Block::of(spec, layer), weights, layer)?;
        LayerLayout::of(accel, spec, weights, layer, act, matrices, None)
    }

    /// The same with some of its experts; the host computes the others.
    ///
    /// # Errors
    /// As [`LayerLayout::new`].
    pub(in crate::engine) fn divided(
        accel: &dyn Accelerator,
        spec: &ModelSpec,
        weights: &Weights,
        layer: usize,
        act: Half,
        of: &Divided,
    ) -> Result<LayerLayout> {
        let matrices = LayerMatrices::new(accel, &Block::of(spec, layer), weights, layer)?;
        LayerLayout::of(accel, spec, weights, layer, act, matrices, Some(of))
    }

    /// The same without experts, which the host computes.
    ///
    /// # Errors
    /// As [`LayerLayout::new`].
    pub fn without_experts(
        accel: &dyn Accelerator,
        spec: &ModelSpec,
        weights: &Weights,
        layer: usize,
        act: Half,
    ) -> Result<LayerLayout> {
        let mut matrices = LayerMatrices::new(accel, &Block::of(spec, layer), weights, layer)?;
        if spec.experts_of(layer).is_some() {
            matrices.ffn = FfnMatrices::Elsewhere("experts that the host computes".to_owned());
        }
        LayerLayout::of(accel, spec, weights, layer, act, matrices, None)
    }

    fn of(
        accel: &dyn Accelerator,
        spec: &ModelSpec,
        weights: &Weights,
        layer: usize,
        act: Half,
        matrices: LayerMatrices,
        divided: Option<&Divided>,
    ) -> Result<LayerLayout> {
        let block = Block::of(spec, layer);
        let used = spec.experts_of(layer).map_or(0, |e| e.used);
        let mut p = ImagePlacing { used, ..ImagePlacing::of_layer(accel, weights, act, layer) };
        let attn_norm = p.norm(&block.attn_norm)?;
        let qkv = matrices.qkv.iter().map(|m| p.matrix(m, false)).collect::<Result<_>>()?;
        let biases = [&block.q, &block.k, &block.v];
        let qkv_bias = p.floats(biases.map(|m| (tensor_name(layer, m.name, "bias"), m.rows)).into());
        let (q_norm, k_norm) = (p.plain(&block.q_norm)?, p.plain(&block.k_norm)?);
        let o = p.matrix(&matrices.o, true)?;
        let post_attn = p.plain(&block.post_attn)?;
        let ffn_norm = p.norm(&block.ffn_norm)?;
        let before = p.next;
        let ffn = p.feed_forward(&block, &matrices.ffn, divided)?;
        let of_ffn = before..p.next;
        let post_ffn = p.plain(&block.post_ffn)?;
        let at_origin = LayerWeights {
            attn_norm,
            qkv,
            qkv_bias,
            q_norm,
            k_norm,
            o,
            post_attn,
            ffn_norm,
            ffn,
            post_ffn,
            windowed: spec.window_of(layer).is_some(),
            tables: AttnTables::default(),
        };
        let elsewhere = match matrices.ffn {
            FfnMatrices::Elsewhere(why) => Some(why),
            FfnMatrices::Dense(_) | FfnMatrices::Experts(_) => None,
        };
        Ok(LayerLayout { layer, bytes: p.next, elsewhere, pieces: p.pieces, ffn: of_ffn, at_origin })
    }

    /// The layout of its feed-forward alone.
    pub fn feed_forward(&self) -> LayerLayout {
        let Range { start, end } = self.ffn;
        let here = self.pieces.iter().filter(|p| self.ffn.contains(&p.at));
        let none = LinearWeight { ptr: DevPtr::NULL, bias: DevPtr::NULL, ..self.at_origin.o };
        LayerLayout {
            layer: self.layer,
            bytes: end - start,
            elsewhere: self.elsewhere.clone(),
            pieces: here.map(|p| Piece { at: p.at - start, ..p.clone() }).collect(),
            ffn: 0..end - start,
            at_origin: LayerWeights {
                attn_norm: NormWeight::default(),
                qkv: Vec::new(),
                qkv_bias: DevPtr::NULL,
                q_norm: DevPtr::NULL,
                k_norm: DevPtr::NULL,
                o: none,
                post_attn: DevPtr::NULL,
                ffn_norm: NormWeight::default(),
                ffn: self.at_origin.ffn.moved(ORIGIN.add(start), ORIGIN),
                post_ffn: DevPtr::NULL,
                windowed: self.at_origin.windowed,
                tables: AttnTables::default(),
            },
        }
    }

    /// Bytes of the image of its [feed-forward alone](Self::feed_forward).
    pub fn feed_forward_bytes(&self) -> usize {
        self.ffn.len()
    }

    /// The weights of an image at `base`, with these tables of its attention.
    pub fn at(&self, base: DevPtr, tables: AttnTables) -> LayerWeights {
        LayerWeights { tables, ..self.at_origin.moved(ORIGIN, base) }
    }

    /// Whether the layer's attention has the model's window (and with it the tables of windowed layers).
    pub fn windowed(&self) -> bool {
        self.at_origin.windowed
    }

    /// Why the device does not compute its feed-forward, if so: it has none of the matrices.
    pub fn elsewhere(&self) -> Option<&str> {
        self.elsewhere.as_deref()
    }

    /// Bytes of an image with so many of its experts ([`LayerLayout::divided`]), of a layout with all; 0 stands for all.
    pub fn bytes_with(&self, experts: u16) -> usize {
        match (&self.at_origin.ffn, usize::from(experts)) {
            (FeedForward::Experts(w), n) if n > 0 && n < w.here => {
                self.bytes - (w.here - n) * (w.up_stride + w.down_stride)
                    + (4 * w.here).next_multiple_of(ALIGN)
            }
            _ => self.bytes,
        }
    }

    /// Bytes of an image of one of its experts; 0 without experts on the device.
    pub fn expert_bytes(&self) -> usize {
        match &self.at_origin.ffn {
            FeedForward::Experts(w) => w.up_stride + w.down_stride,
            FeedForward::Dense(_) | FeedForward::Elsewhere => 0,
        }
    }

    /// Bytes of its matrices that a decode step of one row reads.
    pub fn matrix_bytes(&self, spec: &ModelSpec) -> u64 {
        let all: u64 = self.pieces.iter().filter(|p| p.is_matrix()).map(|p| p.bytes as u64).sum();
        match (&self.at_origin.ffn, spec.experts_of(self.layer)) {
            (FeedForward::Experts(w), Some(e)) => {
                // A single one is counted whole.
                let of_one = |w: &LinearWeight, stride: usize| match w.bias.is_null() || stride == 0 {
                    true => stride,
                    false => stride - (4 * w.n).next_multiple_of(ALIGN),
                };
                let one = (of_one(&w.up, w.up_stride) + of_one(&w.down, w.down_stride)) as u64;
                let router = 4 * (e.count * spec.d_model) as u64;
                all - w.here as u64 * one + (w.uses * one as f64) as u64 + router
            }
            _ => all,
        }
    }

    /// Writes an image.
    ///
    /// # Errors
    /// If a tensor is misshapen, or the image has another size.
    pub fn fill(&self, source: &LayerSource<'_>, image: &mut [u8]) -> Result<()> {
        if image.len() != self.bytes {
            return Err(Error::Capacity(format!(
                "{} bytes for the {} of layer {}",
                image.len(),
                self.bytes,
                self.layer
            )));
        }
        for piece in &self.pieces {
            let done = piece.fill(source, &mut image[piece.at..piece.at + piece.bytes])?;
            (source.progress)(done);
        }
        Ok(())
    }
}
