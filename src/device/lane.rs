//! The lanes of an accelerator.

/// An in-order queue of asynchronous work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Lane {
    /// Kernels.
    Compute,
    /// Copies from the host.
    HostToDevice,
    /// Copies to the host.
    DeviceToHost,
}

impl Lane {
    /// All lanes.
    pub const ALL: [Lane; 3] = [Lane::Compute, Lane::HostToDevice, Lane::DeviceToHost];
}
