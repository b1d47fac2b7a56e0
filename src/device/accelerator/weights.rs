//! Weights: where they come from, and their addresses in the device's memory.

use crate::device::runtime::DevPtr;
use crate::tensor::{DType, Tensor};
use crate::{Error, Result};

/// Matrices to be multiplied together: concatenated rows, or gate and up of a gated feed-forward.
#[derive(Debug, Clone, Copy)]
pub enum LinearSource<'a> {
    /// The rows of all parts, one part after the other; dtypes and columns are equal.
    Rows(&'a [&'a Tensor]),
    /// Gate and up, which `ffn_up` multiplies together before it applies the activation; shapes and dtypes are equal.
    GateUp(&'a Tensor, &'a Tensor),
}

impl LinearSource<'_> {
    /// Storage type of the weights.
    pub fn dtype(&self) -> DType {
        match self {
            LinearSource::Rows(parts) => parts[0].dtype,
            LinearSource::GateUp(gate, _) => gate.dtype,
        }
    }
    /// Total number of rows.
    pub fn n(&self) -> usize {
        match self {
            LinearSource::Rows(parts) => parts.iter().map(|p| p.rows()).sum(),
            LinearSource::GateUp(gate, up) => gate.rows() + up.rows(),
        }
    }
    /// Columns.
    pub fn k(&self) -> usize {
        match self {
            LinearSource::Rows(parts) => parts[0].cols(),
            LinearSource::GateUp(gate, _) => gate.cols(),
        }
    }
    /// Whether it is a gate and an up projection.
    pub fn is_gate_up(&self) -> bool {
        matches!(self, LinearSource::GateUp(..))
    }
}

/// A packed matrix in device memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinearWeight {
    /// Where [`Accelerator::pack`](super::Accelerator::pack)'s bytes lie.
    pub ptr: DevPtr,
    /// The type of the weight that it was packed from.
    pub dtype: DType,
    /// Rows (gate and up both counted).
    pub n: usize,
    /// Columns.
    pub k: usize,
    /// f32 `[n]`, or NULL.
    pub bias: DevPtr,
}

impl LinearWeight {
    /// The same, in an image at `to` instead of `from`.
    fn moved(&self, from: DevPtr, to: DevPtr) -> LinearWeight {
        LinearWeight { ptr: moved(self.ptr, from, to), bias: moved(self.bias, from, to), ..*self }
    }
}

/// Weights of a norm, f32 `[d]`.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct NormWeight {
    /// The factor of each element.
    pub w: DevPtr,
    /// The bias of each element (LayerNorm), or NULL.
    pub b: DevPtr,
}

/// The feed-forward's first matrices.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum UpWeight {
    /// Packed from [`LinearSource::GateUp`].
    GateUp(LinearWeight),
    /// Gate and up of different dtypes.
    Separate(LinearWeight, LinearWeight),
    /// No gate.
    Plain(LinearWeight),
}

/// The matrices of a dense feed-forward.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FfnWeights {
    /// Up (and gate).
    pub up: UpWeight,
    /// Down.
    pub down: LinearWeight,
}

/// The feed-forward of a layer of experts, whose matrices have one type, and lie one after the other at equal distances.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertWeights {
    /// f32 `[E][d]`.
    pub router: DevPtr,
    /// f32 `[E]`, or NULL.
    pub router_bias: DevPtr,
    /// Gate and up of expert 0, packed from [`LinearSource::GateUp`]; the bias is in the order of the rows
    /// ([`Accelerator::gate_up_row`](super::Accelerator::gate_up_row)).
    pub up: LinearWeight,
    /// Bytes from an expert's gate and up to the next one's, and from bias to bias.
    pub up_stride: usize,
    /// Down of expert 0.
    pub down: LinearWeight,
    /// Bytes from an expert's down to the next one's, and from bias to bias.
    pub down_stride: usize,
    /// The expert of all rows, and the f32 `[d]` of its gate.
    pub shared: Option<(FfnWeights, DevPtr)>,
    /// Experts that are here.
    pub here: usize,
    /// Choices of a row that are expected to be of these: k, if all are here.
    pub uses: f64,
    /// u32 `[E]`: which of those that are here an expert is, or [`NO_SLOT`], where the host computes it. NULL: all are here.
    pub slots: DevPtr,
}

impl ExpertWeights {
    /// Whether the host computes some of the experts.
    pub fn is_divided(&self) -> bool {
        !self.slots.is_null()
    }
}

/// What [`ExpertWeights::slots`] has for an expert that is not here.
pub const NO_SLOT: u32 = u32::MAX;

/// A feed-forward on a device.
#[derive(Debug, Clone, PartialEq)]
pub enum FeedForward {
    /// One for all rows.
    Dense(FfnWeights),
    /// A router's choice of several.
    Experts(Box<ExpertWeights>),
    /// The host computes it: the device has none of its matrices.
    Elsewhere,
}

/// One block's weights. Plain addresses: the block may lie in memory of its own or in a staging buffer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerWeights {
    /// Before attention; NULL: none.
    pub attn_norm: NormWeight,
    /// q|k|v in one to three parts, in this order (parts where dtypes differ).
    pub qkv: Vec<LinearWeight>,
    /// f32 `[qkv_dim]`, or NULL.
    pub qkv_bias: DevPtr,
    /// Norms of q and k, f32 `[head_dim]` or as many as the row has ([`Shape::qk_norm`](super::Shape::qk_norm)), or NULL.
    pub q_norm: DevPtr,
    /// See `q_norm`.
    pub k_norm: DevPtr,
    /// Out-projection.
    pub o: LinearWeight,
    /// Norm of attention's output before it is added, f32 `[d]`, or NULL.
    pub post_attn: DevPtr,
    /// Before the feed-forward; NULL: none.
    pub ffn_norm: NormWeight,
    /// The feed-forward.
    pub ffn: FeedForward,
    /// Norm of the feed-forward's output before it is added, f32 `[d]`, or NULL.
    pub post_ffn: DevPtr,
    /// Whether attention has the model's sliding window.
    pub windowed: bool,
    /// What attention reads that is not part of the layer's image.
    pub tables: AttnTables,
}

/// What attention of a layer reads beside its matrices and norms, and needs where only the keys and values of the layer are on the
/// device.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct AttnTables {
    /// cos and sin of RoPE, f32 `[positions][rope_dim/2]` each; NULL without RoPE.
    pub rope: [DevPtr; 2],
    /// The sinks of the heads, f32 `[h_a]`, or NULL.
    pub sinks: DevPtr,
}

/// What is wrong with a call that asks for a feed-forward which the layer does not have.
fn elsewhere() -> Error {
    Error::usage("a feed-forward on a device that has none of its matrices")
}

/// An address that was made for memory at `from`, in memory at `to`.
fn moved(p: DevPtr, from: DevPtr, to: DevPtr) -> DevPtr {
    if p.is_null() { p } else { DevPtr(p.0 - from.0 + to.0) }
}

impl FeedForward {
    /// The same, in an image at `to` instead of `from`.
    pub fn moved(&self, from: DevPtr, to: DevPtr) -> FeedForward {
        let at = |p| moved(p, from, to);
        let linear = |w: &LinearWeight| w.moved(from, to);
        let up = |w: &UpWeight| match w {
            UpWeight::GateUp(w) => UpWeight::GateUp(linear(w)),
            UpWeight::Separate(gate, up) => UpWeight::Separate(linear(gate), linear(up)),
            UpWeight::Plain(w) => UpWeight::Plain(linear(w)),
        };
        let ffn = |w: &FfnWeights| FfnWeights { up: up(&w.up), down: linear(&w.down) };
        match self {
            FeedForward::Dense(dense) => FeedForward::Dense(ffn(dense)),
            FeedForward::Experts(e) => FeedForward::Experts(Box::new(ExpertWeights {
                router: at(e.router),
                router_bias: at(e.router_bias),
                up: linear(&e.up),
                down: linear(&e.down),
                shared: e.shared.as_ref().map(|(of, gate)| (ffn(of), at(*gate))),
                slots: at(e.slots),
                ..**e
            })),
            FeedForward::Elsewhere => FeedForward::Elsewhere,
        }
    }

    /// Returns an error if it is not here, which is a mistake of the caller: no placement computes it here.
    ///
    /// # Errors
    /// [`Error::Usage`].
    pub fn dense(&self) -> Result<&FfnWeights> {
        match self {
            FeedForward::Dense(dense) => Ok(dense),
            FeedForward::Experts(_) | FeedForward::Elsewhere => Err(elsewhere()),
        }
    }

    /// The same of experts.
    ///
    /// # Errors
    /// [`Error::Usage`].
    pub fn experts(&self) -> Result<&ExpertWeights> {
        match self {
            FeedForward::Experts(experts) => Ok(experts),
            FeedForward::Dense(_) | FeedForward::Elsewhere => Err(elsewhere()),
        }
    }
}

impl LayerWeights {
    /// These weights after the image that they lie in has moved from one address to another. Attention's tables are not
    /// part of the image and do not move.
    pub fn moved(&self, from: DevPtr, to: DevPtr) -> LayerWeights {
        let at = |p| moved(p, from, to);
        let norm = |n: &NormWeight| NormWeight { w: at(n.w), b: at(n.b) };
        let linear = |w: &LinearWeight| w.moved(from, to);
        LayerWeights {
            attn_norm: norm(&self.attn_norm),
            qkv: self.qkv.iter().map(linear).collect(),
            qkv_bias: at(self.qkv_bias),
            q_norm: at(self.q_norm),
            k_norm: at(self.k_norm),
            o: linear(&self.o),
            post_attn: at(self.post_attn),
            ffn_norm: norm(&self.ffn_norm),
            ffn: self.ffn.moved(from, to),
            post_ffn: at(self.post_ffn),
            windowed: self.windowed,
            tables: self.tables,
        }
    }
}

/// The embedding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EmbedWeight {
    /// `[V][d]`, rows as in the file, unless `packed`.
    pub table: DevPtr,
    /// Its storage type.
    pub dtype: DType,
    /// The table is the tied head, as [`Accelerator::pack`](super::Accelerator::pack) left it.
    pub packed: bool,
    /// Learned positions `[P][d]`, rows as in the file, or NULL.
    pub positions: DevPtr,
    /// Their storage type.
    pub positions_dtype: DType,
    /// Rows of the positions.
    pub n_positions: usize,
    /// Row of position 0.
    pub position_offset: usize,
}
