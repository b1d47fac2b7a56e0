//! The accelerator contract where hybrid execution needs it: attention in parts and elsewhere, operations on rows of a
//! step, sub-batches side by side, mailboxes, pages that move between host and device. One layer, two sequences, on
//! every accelerator of this machine.

mod attention;
mod bench;
#[cfg(tandem_kernels)]
mod launches;
mod limits;
mod pages;
mod rows;
