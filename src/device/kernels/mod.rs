//! Planning and launching of the kernels in `cuda/`, for any [`Runtime`](super::runtime::Runtime) that
//! runs them: a GPU, or the host emulation of the same files.
//!
//! Each operation has a file: it chooses tiles and splits from shapes alone (so results repeat bit for bit), fills the
//! parameter struct of `cuda/include/abi/<op>.h` and launches. The modules are public because tests and benches launch
//! kernels one by one.

pub mod abi;
pub mod accelerator;
pub mod attention;
pub mod elementwise;
pub mod exchange;
pub mod experts;
pub mod product;
pub mod quant;
