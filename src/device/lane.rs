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

    /// Whether the lane's kernels go first where they and those of another lane wait for the same multiprocessors. Copy
    /// lanes do: their few blocks wait for the link most of the time, and what computes waits for their results.
    pub fn is_urgent(self) -> bool {
        self != Lane::Compute
    }
}
