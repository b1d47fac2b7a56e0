//! Launching the kernels that move rows and pages between an accelerator and the host.
//!
//! The host's side is mapped pinned memory ([`Pinned`](crate::device::runtime::Pinned)), which kernels read and
//! write in place, or a staging buffer that a copy on another lane fills or empties.

mod pages;
mod rows;

pub use pages::{PageMoves, most_blocks, pages_from_host, pages_to_host};
pub use rows::{CheckReady, MoveRows, PublishArgs, PublishSource, check_ready, copy_rows, publish_rows};
