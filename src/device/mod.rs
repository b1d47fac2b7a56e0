//! Accelerators, which run work beside the CPU, behind one contract.
//!
//! A [`Runtime`] is the interface of any accelerator: its own memory, in-order asynchronous lanes, events, pinned host
//! memory, launching a kernel by name. `kernels` (if the build contains it) plans and launches the kernels of `cuda/`
//! through a runtime, on a GPU or emulated. An [`Accelerator`] is a runtime and the operations of a transformer on it.
//!
//! | item | what |
//! |---|---|
//! | [`Kind`], [`Emulation`], [`open()`], [`check`], [`on_kernels`] | opens an accelerator by name |
//! | [`Runtime`], [`DeviceInfo`], [`Lane`], [`Event`], [`Graph`], [`Launch`], [`Params`] | the interface of any accelerator |
//! | [`DevPtr`], [`Buffer`], [`Pinned`], [`Slab`], [`HostUse`] | device memory, and host memory that the device can reach |
//! | [`Accelerator`], [`Shape`], [`Limits`], [`Workspace`], [`RowBytes`] | a transformer on an accelerator |
//! | [`StepDesc`], [`StepSeq`], [`Attend`], [`Step`], [`StepContext`], [`SubBatch`], [`SubBatches`], [`RowSpan`] | one step |
//! | [`TOP_K`], [`TOP_BYTES`], [`top_of`], [`top_error`] | the likeliest tokens of a row, for sampling |
//! | [`LinearWeight`], [`LinearSource`], [`NormWeight`], [`UpWeight`], [`FfnWeights`], [`FeedForward`], [`ExpertWeights`], [`EmbedWeight`], [`LayerWeights`] | weights, by address |
//! | [`Mailbox`], [`Publish`], [`Published`], [`PartialRows`], [`Residual`], [`PageMove`], [`LayerPages`] | exchange of rows and pages with the host |
//! | [`KernelNeeds`], [`load_kernels`], [`load_kernels_beside`] | loads kernels, while weights are read |
//! | [`Clock`], [`Moment`], [`Rates`], [`Work`], [`uncount_waits`] | emulated time |
//! | [`Turns`], [`Actor`] | threads that act in turn, for tests |
//! | [`find_machine`], [`machine_names`] | descriptions of machines, by name or file |
//! | [`self_test()`], [`self_test_opened_gpus`], [`SelfTest`], [`GroupReport`], [`Verdict`], [`Depth`], [`About`] | a device's kernels against the host's arithmetic |
//! | [`listen_to_notices`] | messages of a device while it works |
//! | [`cuda`], [`emulated`] | NVIDIA GPUs; CPU threads that emulate one |
//! | [`built`], `kernels` | the kernels of this build, and the code that plans and launches them |

mod accelerator;
pub mod built;
mod clock;
pub mod cuda;
pub mod emulated;
#[cfg(tandem_kernels)]
pub mod kernels;
mod lane;
mod launches;
mod machine;
mod notice;
mod open;
mod preload;
mod runtime;
mod self_test;
mod timed;
mod turns;

pub use accelerator::{
    Accelerator, Attend, AttnTables, EmbedWeight, ExpertRows, ExpertShape, ExpertWeights, FeedForward,
    FfnWeights, LayerPages, LayerWeights, Limits, LinearSource, LinearWeight, Mailbox, NO_SLOT, NormWeight,
    PageMove, PartialRows, Publish, Published, Residual, RowBytes, RowOp, RowSpan, Shape, Step, StepContext,
    StepDesc, StepSeq, SubBatch, SubBatches, TOP_BYTES, TOP_K, UpWeight, Workspace, top_error, top_of,
};
pub use clock::{Clock, CopySpans, Moment, Rates, Work, uncount_waits};
pub use launches::Launches;
pub use machine::{find_machine, machine_names};
pub use notice::listen_to_notices;
pub use open::{Emulation, Kind, check, on_kernels, open, self_test};
pub use preload::{KernelNeeds, load_kernels, load_kernels_beside};
pub use runtime::{
    Buffer, DevPtr, DeviceInfo, Event, Graph, HostUse, Lane, Launch, Params, Pinned, Runtime, Slab, slice,
};
pub use self_test::{About, Depth, GroupReport, SelfTest, Verdict, self_test_opened_gpus};
pub use turns::{Actor, Turns};
