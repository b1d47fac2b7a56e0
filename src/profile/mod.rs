//! What this machine can do at most: read bandwidth and arithmetic peaks, measured in the same run as
//! whatever is compared with them.

mod bandwidth;
mod peak;

pub use bandwidth::read_bandwidth;
pub use peak::{Peak, peaks};
