//! Where and how a model runs, for messages and `plan` in JSON.

/// See the [module](self).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunInfo {
    /// `cpu`, `cuda:0`, `emulated`, `emulated:kernels`.
    pub device: String,
    /// The strategy's name: `cpu-only`, `gpu-only`...
    pub strategy: &'static str,
    /// Tier of the CPU's kernels, or the accelerator's architecture.
    pub isa: String,
    /// Threads of the host's pool.
    pub threads: usize,
    /// How keys and values are stored.
    pub kv_type: &'static str,
}
