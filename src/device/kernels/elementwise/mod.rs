//! Launching what works on rows element by element: embedding, norms, RoPE, activations, and the reduction of
//! logits.
//!
//! Every function enqueues one launch (the reduction of logits: two) whose grid depends on shapes alone.

mod activation;
mod embed;
mod logits;
mod norm;
mod rope_append;
mod top_k;

pub use activation::{Activate, Activation, activate};
pub use embed::{Embed, Positions, embed};
pub use logits::{LogitsReduce, logits_reduce, logits_workspace_bytes, softcap};
pub use norm::{NormRows, norm};
pub use rope_append::{PublishRows, RopeAppend, rope_append};
pub use top_k::{TopK, logits_top_k};

use crate::Result;
use crate::device::runtime::{Lane, Launch, Params, Runtime};

/// Launches `kernel`, unless the grid is empty.
pub(super) fn launch<P: Params>(
    runtime: &dyn Runtime,
    lane: Lane,
    kernel: &str,
    grid: [usize; 2],
    block: usize,
    shared: usize,
    params: &P,
) -> Result<()> {
    if grid.contains(&0) {
        return Ok(());
    }
    let launch = Launch {
        kernel,
        grid: [grid[0] as u32, grid[1] as u32, 1],
        block: [block as u32, 1, 1],
        shared: shared as u32,
        params: params.bytes(),
    };
    runtime.launch(lane, &launch)
}
