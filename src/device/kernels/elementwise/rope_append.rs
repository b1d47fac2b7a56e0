//! Launching `cuda/rope_append.cu`.

use super::super::abi::RopeAppendParams;
use crate::Result;
use crate::cache::KvType;
use crate::device::runtime::{DevPtr, Lane, Runtime};
use crate::model::{QkNorm, RopePairing};

const WARPS: usize = 4;
/// Most warps of a block that takes a whole row.
const ROW_WARPS: usize = 32;
/// Longest head: two quads per lane hold this many elements.
const MAX_HEAD_DIM: usize = 256;

/// Rows that are also written to the host: see [`RopeAppend::publish`].
#[derive(Debug, Clone, Copy)]
pub struct PublishRows {
    /// i32 `[rows]`: place of the row in `to`; -1: not published.
    pub slots: DevPtr,
    /// u32 in device memory: how many rows are published in all. Several launches of one lane may share them: the last
    /// one sets the epoch.
    pub n: DevPtr,
    /// Mapped host memory: places of `stride` bytes, each for the q|k|v of one row, in the KV type's 16-bit one.
    pub to: DevPtr,
    /// Bytes from place to place.
    pub stride: usize,
    /// u32 in device memory.
    pub epoch: DevPtr,
    /// The epoch published is `*epoch + epoch_add`.
    pub epoch_add: u32,
    /// u32 in mapped host memory: set to the published epoch once all rows have arrived.
    pub epoch_flag: DevPtr,
    /// Arrival counter, u32 in device memory: zero before the first of these launches and after the last.
    pub arrived: DevPtr,
}

/// Operands of [`rope_append`]. Optional addresses may be NULL.
#[derive(Debug, Clone, Copy)]
pub struct RopeAppend {
    /// q|k|v, f32 `[rows][ld]`.
    pub qkv: DevPtr,
    /// f32 `[(n_heads + 2·n_kv_heads) · head_dim]`; optional.
    pub bias: DevPtr,
    /// Weights of the RMS norm of the queries, f32 `[head_dim]` or `[n_heads · head_dim]`; optional.
    pub q_norm: DevPtr,
    /// Weights of the RMS norm of the keys, f32 `[head_dim]` or `[n_kv_heads · head_dim]`; optional.
    pub k_norm: DevPtr,
    /// What these norms are taken over.
    pub norms: QkNorm,
    /// Epsilon of both norms.
    pub eps: f32,
    /// cos and sin, f32 `[positions][rope_dim/2]`; not read if `rope_dim` is 0.
    pub rope: [DevPtr; 2],
    /// Rotated elements of a head; 0: none.
    pub rope_dim: usize,
    /// Which elements are rotated together.
    pub pairing: RopePairing,
    /// u32 `[rows]`: positions.
    pub row_pos: DevPtr,
    /// i32 `[rows]`: page · 32 + token in page; -1 means that K and V of the row are not stored. Optional: without it
    /// no row's are.
    pub row_slot: DevPtr,
    /// q|k|v as f32 `[rows][ld]`, before any rounding; optional. It may be `qkv` itself.
    pub finished: DevPtr,
    /// `[rows][n_heads · head_dim]` of [`KvType::half`]; optional.
    pub q: DevPtr,
    /// The layer's pages.
    pub kv: DevPtr,
    /// How K and V are stored in pages; q and what is published have its [`KvType::half`].
    pub kv_type: KvType,
    /// Publication of some rows to the host.
    pub publish: Option<PublishRows>,
    /// Rows.
    pub rows: usize,
    /// Distance of qkv's rows.
    pub ld: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key/value heads.
    pub n_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

/// Applies bias, norms of q and k, and RoPE; writes q to its buffer, K and V to their pages, published rows to the host.
///
/// # Errors
/// As [`Runtime::launch`].
///
/// # Panics
/// If a size is no multiple of four, a head has more than 256 elements, or more elements are rotated than a head has.
pub fn rope_append(runtime: &dyn Runtime, lane: Lane, args: &RopeAppend) -> Result<()> {
    let (hd, rd, heads) = (args.head_dim, args.rope_dim, args.n_heads + 2 * args.n_kv_heads);
    assert!(
        hd.is_multiple_of(4) && rd.is_multiple_of(4) && rd <= hd && hd <= MAX_HEAD_DIM,
        "rope_append: head_dim {hd}, rope_dim {rd}: wanted multiples of 4 up to {MAX_HEAD_DIM}"
    );
    assert!(
        args.ld.is_multiple_of(4) && args.ld >= heads * hd,
        "rope_append: rows {} apart for {heads} heads of {hd}",
        args.ld
    );
    let mut params = RopeAppendParams {
        qkv: args.qkv,
        bias: args.bias,
        q_norm: args.q_norm,
        k_norm: args.k_norm,
        rope_cos: args.rope[0],
        rope_sin: args.rope[1],
        row_pos: args.row_pos,
        row_slot: args.row_slot,
        finished: args.finished,
        q: args.q,
        kv: args.kv,
        rows: args.rows as u32,
        ld: args.ld as u32,
        n_heads: args.n_heads as u32,
        n_kv_heads: args.n_kv_heads as u32,
        head_dim: hd as u32,
        rope_dim: rd as u32,
        interleaved: (args.pairing == RopePairing::Interleaved).into(),
        eps: args.eps,
        ..Default::default()
    };
    if let Some(p) = &args.publish {
        let row_bytes = heads * hd * 2;
        assert!(
            p.stride >= row_bytes && p.stride.is_multiple_of(8),
            "rope_append: places of {} bytes for rows of {row_bytes}",
            p.stride
        );
        params.publish_slot = p.slots;
        params.n_published = p.n;
        params.published = p.to;
        params.publish_stride = p.stride as u64;
        params.epoch = p.epoch;
        params.epoch_add = p.epoch_add;
        params.epoch_flag = p.epoch_flag;
        params.arrived = p.arrived;
    }
    let kv = args.kv_type.name();
    let normed = !args.q_norm.is_null() || !args.k_norm.is_null();
    if normed && args.norms == QkNorm::Whole {
        let (kernel, threads) = (format!("rope_append_whole_{kv}"), 32 * heads.min(ROW_WARPS));
        return super::launch(runtime, lane, &kernel, [args.rows, 1], threads, 128, &params);
    }
    let kernel = format!("rope_append_{kv}");
    super::launch(runtime, lane, &kernel, [args.rows, heads.div_ceil(WARPS)], 32 * WARPS, 0, &params)
}
