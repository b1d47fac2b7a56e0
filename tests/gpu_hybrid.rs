//! The accelerator contract where hybrid execution needs it: attention in parts and elsewhere, operations on rows of a
//! step, sub-batches side by side, mailboxes, pages that move between host and device. One layer, two sequences, on
//! every accelerator of this machine.

#[path = "gpu_hybrid/attention.rs"]
mod attention;
#[path = "gpu_hybrid/bench.rs"]
mod bench;
#[path = "gpu_hybrid/limits.rs"]
mod limits;
#[path = "gpu_hybrid/pages.rs"]
mod pages;
#[path = "gpu_hybrid/rows.rs"]
mod rows;
mod support;
