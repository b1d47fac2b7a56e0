//! Launching `cuda/exchange.cu`.

use super::super::abi::{MoveRowsParams, PublishParams, ReadyParams};
use super::super::elementwise::launch;
use super::pages::most_blocks;
use crate::Result;
use crate::device::runtime::{DevPtr, Lane, Runtime};
use crate::tensor::Half;

const THREADS: usize = 256;
/// Most blocks of a launch on the compute lane: more do not make a bus faster, and within the device 64 blocks of 16-byte copies move
/// some 500 GB/s.
const MAX_BLOCKS: usize = 64;

/// Blocks for so many pieces: on an urgent lane as few as pages take ([`most_blocks`]), so that what computes goes on.
fn blocks(runtime: &dyn Runtime, lane: Lane, pieces: usize) -> usize {
    let most = if lane.is_urgent() { most_blocks(runtime.info().multiprocessors) } else { MAX_BLOCKS };
    pieces.div_ceil(THREADS).clamp(1, most)
}

/// Rows of f32 of one buffer.
#[derive(Debug, Clone, Copy, Default)]
pub struct PublishSource {
    /// NULL: no such buffer.
    pub at: DevPtr,
    /// Bytes from row to row.
    pub stride: usize,
    /// Bytes of a row that are published: a multiple of eight floats.
    pub bytes: usize,
}

/// Operands of [`publish_rows`]. Optional addresses may be NULL.
#[derive(Debug, Clone, Copy)]
pub struct PublishArgs {
    /// The buffers whose rows are put side by side.
    pub sources: [PublishSource; 3],
    /// The type that they are published in, rounded to nearest even.
    pub half: Half,
    /// Mapped host memory.
    pub to: DevPtr,
    /// Bytes from place to place.
    pub stride: usize,
    /// u32 `[max_rows]`: the row that goes to place i; if absent, row i.
    pub list: DevPtr,
    /// u32 in device memory: how many rows; optional: `max_rows`.
    pub n_rows: DevPtr,
    /// Most rows.
    pub max_rows: usize,
    /// u32 in device memory.
    pub epoch: DevPtr,
    /// The epoch published is `*epoch + epoch_add`.
    pub epoch_add: u32,
    /// u32 in mapped host memory: set to the published epoch once all rows have arrived.
    pub epoch_flag: DevPtr,
    /// Arrival counter, u32 in device memory: zero between launches.
    pub arrived: DevPtr,
}

/// Gathers rows into host memory, in 16 bits, then publishes the epoch.
///
/// # Errors
/// As [`Runtime::launch`].
///
/// # Panics
/// If rows are no multiples of eight floats, an address or a distance is no multiple of 16 bytes, or places are too short
/// for the rows.
pub fn publish_rows(runtime: &dyn Runtime, lane: Lane, args: &PublishArgs) -> Result<()> {
    let mut params = PublishParams {
        max_rows: args.max_rows as u32,
        dst: args.to,
        dst_stride: args.stride as u64,
        list: args.list,
        n_rows: args.n_rows,
        epoch: args.epoch,
        epoch_flag: args.epoch_flag,
        arrived: args.arrived,
        epoch_add: args.epoch_add,
        ..Default::default()
    };
    let mut sizes = vec![args.to.0 as usize, args.stride];
    let mut row_bytes = 0;
    for (i, s) in args.sources.iter().enumerate().filter(|(_, s)| !s.at.is_null()) {
        params.src[i] = s.at;
        params.src_stride[i] = s.stride as u64;
        params.src_bytes[i] = s.bytes as u32;
        // As they are published: half as many bytes.
        sizes.extend([s.at.0 as usize, s.stride, s.bytes / 2]);
        row_bytes += s.bytes / 2;
    }
    assert!(args.stride >= row_bytes, "publish: places of {} bytes for rows of {row_bytes}", args.stride);
    assert!(
        sizes.iter().all(|s| s.is_multiple_of(16)),
        "publish: addresses and sizes {sizes:?} are not all multiples of 16"
    );
    let kernel = format!("publish_rows_{}", args.half.name());
    let blocks = blocks(runtime, lane, args.max_rows * row_bytes / 16);
    launch(runtime, lane, &kernel, [blocks, 1], THREADS, 0, &params)
}

/// Operands of [`copy_rows`]. Optional addresses may be NULL.
#[derive(Debug, Clone, Copy)]
pub struct MoveRows {
    /// Rows of `from_stride` bytes, in any memory that the device sees.
    pub from: DevPtr,
    /// Bytes from row to row.
    pub from_stride: usize,
    /// Rows of `to_stride` bytes.
    pub to: DevPtr,
    /// Bytes from row to row.
    pub to_stride: usize,
    /// u32 `[max_rows]`: rows of `from` (`u32::MAX`: none); if absent, row i.
    pub from_list: DevPtr,
    /// u32 `[max_rows]`: rows of `to`, all different; if absent, row i.
    pub to_list: DevPtr,
    /// u32 in device memory: how many rows; optional: `max_rows`.
    pub n_rows: DevPtr,
    /// u32 in device memory: if it is 0 (see [`check_ready`]), nothing is moved; optional.
    pub gate: DevPtr,
    /// Most rows.
    pub max_rows: usize,
}

impl MoveRows {
    fn params(&self, n: usize) -> MoveRowsParams {
        MoveRowsParams {
            src: self.from,
            dst: self.to,
            src_list: self.from_list,
            dst_list: self.to_list,
            n_rows: self.n_rows,
            gate: self.gate,
            src_stride: self.from_stride as u64,
            dst_stride: self.to_stride as u64,
            max_rows: self.max_rows as u32,
            n: n as u32,
        }
    }
}

/// to\[to_list\[i\]\] = from\[from_list\[i\]\], `bytes` bytes of each row.
///
/// # Errors
/// As [`Runtime::launch`].
///
/// # Panics
/// If a size or address is odd.
pub fn copy_rows(runtime: &dyn Runtime, lane: Lane, args: &MoveRows, bytes: usize) -> Result<()> {
    let sizes = [args.from.0 as usize, args.from_stride, args.to.0 as usize, args.to_stride, bytes];
    assert!(
        sizes.iter().all(|s| s.is_multiple_of(2)),
        "copy_rows: addresses and sizes {sizes:?} are not all even"
    );
    let wide = sizes.iter().all(|s| s.is_multiple_of(16));
    let (kernel, piece) = if wide { ("copy_rows_16", 16) } else { ("copy_rows_2", 2) };
    let pieces = args.max_rows * bytes / piece;
    let blocks = blocks(runtime, lane, pieces).min(pieces);
    launch(runtime, lane, kernel, [blocks, 1], THREADS, 0, &args.params(bytes))
}

/// Operands of [`check_ready`].
#[derive(Debug, Clone, Copy)]
pub struct CheckReady {
    /// u32 in mapped host memory: the epoch that the host has reached.
    pub epoch_flag: DevPtr,
    /// u32 in device memory: the epoch awaited is `*epoch + epoch_add`.
    pub epoch: DevPtr,
    /// See `epoch`.
    pub epoch_add: u32,
    /// u32 in device memory: set to 1 if the host has reached the epoch, else to 0.
    pub ready: DevPtr,
}

/// Tests, without waiting, whether the host has reached an epoch.
///
/// # Errors
/// As [`Runtime::launch`].
pub fn check_ready(runtime: &dyn Runtime, lane: Lane, args: &CheckReady) -> Result<()> {
    let params = ReadyParams {
        epoch_flag: args.epoch_flag,
        epoch: args.epoch,
        ready: args.ready,
        epoch_add: args.epoch_add,
        ..Default::default()
    };
    launch(runtime, lane, "check_ready", [1, 1], 1, 0, &params)
}
