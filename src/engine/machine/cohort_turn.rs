//! A step's treatment of a cohort, and the cohort's jobs that the step gives to the host.

use super::lane::Ticket;

/// A step's treatment of a cohort's sub-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum CohortTurn {
    /// There is no cohort.
    #[default]
    None,
    /// The cohort begins, with its token's embedding.
    Begins,
    /// It is parked and has not been checked yet.
    Parked,
    /// It advances.
    Joined,
    /// It stays parked.
    Stays,
}

/// The jobs of a cohort that a step gives to the host.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct CohortJobs {
    pub turn: CohortTurn,
    /// Epoch of the jobs, once there are any.
    pub epoch: Option<u32>,
    /// The first and the last one given.
    pub first: Option<Ticket>,
    pub job: Option<Ticket>,
}
