//! The pinned thread pool of the host.

mod pool;
pub use pool::Pool;
