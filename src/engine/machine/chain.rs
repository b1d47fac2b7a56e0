//! What a step does with a cohort, and the jobs of it that it gives to the host.

use super::lane::Ticket;

/// What a step does with the sub-batch of a cohort.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Turn {
    /// There is none.
    #[default]
    None,
    /// Its token's embedding comes first.
    Begins,
    /// Not looked at yet.
    Parked,
    /// It advances.
    Joined,
    /// It stays parked.
    Stays,
}

/// The jobs of a cohort that a step gives to the host.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Chain {
    pub turn: Turn,
    /// Epoch of the jobs, once there are any.
    pub epoch: Option<u32>,
    /// The first and the last one given.
    pub first: Option<Ticket>,
    pub job: Option<Ticket>,
}
