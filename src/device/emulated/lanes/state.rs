//! State shared by the host's calls and the lanes' threads, under one lock.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::ThreadId;
use std::time::Instant;

use super::Core;
use crate::device::clock::Moment;
use crate::device::emulated::op::{Op, Span};
use crate::device::emulated::options::FaultPlan;
use crate::device::emulated::order::{LaneClock, Order};
use crate::device::emulated::pinned::HostBytes;
use crate::device::runtime::{DevPtr, Lane, Pinned};
use crate::{Error, Result};

/// An error that can be reported several times.
#[derive(Debug, Clone)]
pub(super) struct Problem(Arc<(String, String)>);

impl Problem {
    pub fn new(what: impl Into<String>, problem: impl Into<String>) -> Problem {
        Problem(Arc::new((what.into(), problem.into())))
    }

    pub fn of(error: Error, what: &str) -> Problem {
        match error {
            Error::Device { what, problem } => Problem::new(what, problem),
            other => Problem::new(what, other.to_string()),
        }
    }

    pub fn error(&self) -> Error {
        Error::Device { what: self.0.0.clone(), problem: self.0.1.clone() }
    }

    pub fn is(&self, other: &Problem) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// A point in a lane.
pub(in crate::device::emulated) struct Mark {
    pub device: Weak<Core>,
    pub(super) lane: Lane,
    pub(super) clock: LaneClock,
    /// Set when the lane reaches the mark.
    pub(super) done: OnceLock<std::result::Result<(), Problem>>,
    /// When it was reached, for marks that keep the time.
    pub(super) passed: Option<OnceLock<Instant>>,
    /// When it is reached in emulated time.
    pub moment: Option<Moment>,
}

pub(super) enum LaneStep {
    Work(Op),
    Signal(Arc<Mark>),
    Wait(Arc<Mark>),
}

pub(super) struct Enqueued {
    pub seq: u64,
    pub step: LaneStep,
    /// Whether the device is lost when this work begins.
    pub lose: bool,
    /// Whether the work never ends.
    pub endless: bool,
    /// Pinned memory that the work uses.
    pub _keep: Vec<Arc<HostBytes>>,
}

/// A failure, and the last work of the lane that it covers: unknown until the failure has been reported.
pub(super) struct Trouble {
    pub problem: Problem,
    pub through: Option<u64>,
}

#[derive(Default)]
pub(super) struct LaneState {
    pub queue: VecDeque<Enqueued>,
    pub enqueued: u64,
    pub completed: u64,
    pub running: Option<(Instant, String)>,
    pub trouble: Option<Trouble>,
}

impl LaneState {
    /// The failure that covers work number `seq`.
    pub fn trouble_of(&mut self, seq: u64) -> Option<Problem> {
        let trouble = self.trouble.as_ref()?;
        if trouble.through.is_some_and(|last| seq > last) {
            self.trouble = None;
            return None;
        }
        Some(trouble.problem.clone())
    }
}

/// Calls since the plan was set.
#[derive(Default)]
pub(super) struct Faults {
    pub plan: FaultPlan,
    pub allocations: u64,
    pub operations: u64,
    pub copies: u64,
    pub launches: u64,
    pub host_jobs: u64,
    pub waits: u64,
}

#[derive(Default)]
pub(super) struct State {
    pub lanes: [LaneState; 3],
    pub order: Order,
    pub lost: Option<Problem>,
    /// An error of a call that could not return it.
    pub owed: Option<Problem>,
    pub shutdown: bool,
    pub faults: Faults,
    pub capture: Option<(ThreadId, Vec<Op>)>,
    /// Pinned memory by address. Dropped entries are removed when more is allocated.
    pub pinned: BTreeMap<u64, Weak<HostBytes>>,
    /// Freed memory, and for each lane the last work that may use it.
    pub retired: Vec<(DevPtr, [u64; 3])>,
}

impl State {
    /// Reports a pending asynchronous error to a call on `lane`.
    pub fn report(&mut self, lane: Lane) -> Result<()> {
        self.alive()?;
        let lane = &mut self.lanes[lane as usize];
        if let Some(trouble) = lane.trouble.as_mut().filter(|t| t.through.is_none()) {
            trouble.through = Some(lane.enqueued);
            return Err(trouble.problem.error());
        }
        Ok(())
    }

    /// Returns an error if the device is lost, or if an earlier call could not return its error.
    pub fn alive(&mut self) -> Result<()> {
        if let Some(lost) = &self.lost {
            return Err(lost.error());
        }
        self.owed.take().map_or(Ok(()), |p| Err(p.error()))
    }

    pub fn over(&self) -> bool {
        self.shutdown || self.lost.is_some()
    }

    /// Returns an error during a recording, for calls that wait or that have effects outside it.
    pub fn not_capturing(&self) -> Result<()> {
        match &self.capture {
            Some((thread, _)) if *thread == std::thread::current().id() => Err(Error::Device {
                what: "emulated accelerator".into(),
                problem: "work is being recorded: only enqueueing on the compute lane is possible".into(),
            }),
            _ => Ok(()),
        }
    }

    /// The pinned memory that a span lies in.
    pub fn pinned(&self, span: &Span) -> Option<Arc<HostBytes>> {
        let (&start, memory) = self.pinned.range(..=span.ptr.0).next_back()?;
        let memory = memory.upgrade()?;
        (span.len <= (start + memory.len() as u64).checked_sub(span.ptr.0)? as usize).then_some(memory)
    }
}
