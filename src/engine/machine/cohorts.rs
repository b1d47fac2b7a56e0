//! Cohorts between iterations: the per-layer sync table (APEX §4), and how a step updates it.
//!
//! ```text
//! begins ─► jobs given ─► parked at layer 0 ─► joined: jobs of layer 1 ─► … parked at the last layer ─► joined: logits
//!                          │        ▲ not ready: stays as it is
//!                          └────────┘
//! ```
//! A cohort keeps a sub-batch to itself from its token's embedding to its logits: residual stream and lists in the device's
//! workspace of that sub-batch, queries and results in its mailbox. Its jobs live on the host's lane across steps, and
//! their failures do not fail the step. When the issuing thread checks a cohort it is at most one layer ahead of the
//! device: it waits for the device to begin the layer, never for the host.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::cohort_turn::{CohortJobs, CohortTurn};
use super::host::HostHalf;
use super::issue::{Issue, Uses};
use super::lane::{Detached, HostJob, NONE, Ticket};
use super::lists::PartLists;
use super::lowered::Lowered;
use super::part::Part;
use super::sync::{SyncState, SyncWord};
use super::{HostSide, RealMachine};
use crate::device::Lane as DeviceLane;
use crate::engine::host::HostSeq;
use crate::engine::outcome::CohortOutcome;
use crate::program::{
    Flow, Group, Iteration, Kind, Kv, Op, Phase, RequestId, Side, SubBatch, Unit, Wants, lower,
};
use crate::{Error, Result};

/// How long a merge at a fixed lag waits for the host.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// A line of the sync table: the cohort that owns this sub-batch, if any.
#[derive(Default)]
pub(super) struct Slot {
    word: Arc<SyncWord>,
    error: Arc<Mutex<Option<Error>>>,
    parked: Option<Parked>,
    /// The memory that its jobs use.
    uses: Vec<Uses>,
}

impl Slot {
    /// Records the pages that a job of its cohort uses.
    pub fn note_use(&mut self, uses: Option<&Uses>) {
        self.uses.retain(|uses| !uses.ended());
        self.uses.extend(uses.cloned());
    }
}

/// A cohort whose attention of a layer is in progress.
#[derive(Clone)]
pub(in crate::engine) struct Parked {
    /// Its rows.
    pub groups: Vec<Group>,
    /// Their tokens.
    pub tokens: Vec<u32>,
    /// The layer.
    pub at: u32,
    epoch: u32,
    /// The last job.
    job: Ticket,
    /// Its lists on the device, for all layers.
    lists: PartLists,
}

impl RealMachine {
    /// The sub-batches with cohorts, and the cohorts.
    pub fn cohorts(&self) -> impl Iterator<Item = (usize, &Parked)> {
        self.slots.iter().enumerate().filter_map(|(b, slot)| Some((b, slot.parked.as_ref()?)))
    }

    /// The layer at which a row of a request is parked.
    pub fn parked_at(&self, request: RequestId) -> Option<u32> {
        let of = |p: &&Parked| p.groups.iter().any(|g| g.request == request);
        self.cohorts().map(|(_, p)| p).find(of).map(|p| p.at)
    }

    /// Sub-batches that are free for a cohort.
    pub fn free_slots(&self) -> Vec<usize> {
        (1..self.sub_batches).filter(|&b| self.slots.get(b).is_none_or(|s| s.parked.is_none())).collect()
    }

    /// Ends the cohort with a row of this request, once the host no longer works on it, and returns its requests, whose
    /// tokens must start over.
    pub fn leave(&mut self, request: RequestId) -> Vec<RequestId> {
        let of = |s: &Slot| s.parked.as_ref().is_some_and(|p| p.groups.iter().any(|g| g.request == request));
        let Some(b) = self.slots.iter().position(of) else { return Vec::new() };
        let parked = self.slots[b].parked.take().expect("found");
        self.abandon(b, parked.epoch);
        parked.groups.iter().map(|g| g.request).collect()
    }

    /// Withdraws the work of this epoch from the host, or waits until it has ended.
    fn abandon(&mut self, b: usize, epoch: u32) {
        let word = self.slots[b].word.clone();
        if !word.discard(epoch) {
            self.lane().wait_for_end(&word, epoch, None);
            word.release(epoch);
        }
        // The lane may still hold jobs of it, which will not run.
        self.slots[b].uses.drain(..).for_each(|uses| uses.end());
        self.slots[b].error.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.lane_mut().forget(b, Ticket::MAX);
    }

    /// Checks that an iteration agrees with the state of the cohorts.
    ///
    /// # Errors
    /// If it does not, if it would use a sub-batch that a cohort owns in another way, or if cohorts cannot run on the
    /// placement.
    pub(super) fn begin_cohorts(
        &mut self,
        iteration: &Iteration,
        parts: &[Part<'_>],
    ) -> Result<Vec<CohortJobs>> {
        let mut chains = vec![CohortJobs::default(); parts.len()];
        for (b, part) in parts.iter().enumerate() {
            let parked = self.slots.get(b).and_then(|s| s.parked.as_ref());
            let cohort = iteration.flow == Flow::Async && b > 0 && !part.groups.is_empty();
            chains[b].turn = match (cohort, parked, iteration.sub_batches[b].at) {
                (false, None, _) => continue,
                (true, None, None) => CohortTurn::Begins,
                (true, Some(p), Some(at)) if p.at == at && p.groups == part.groups => CohortTurn::Parked,
                (false, Some(_), _) if part.groups.is_empty() => continue,
                (_, parked, at) => {
                    return Err(Error::usage(format!(
                        "sub-batch {b} is parked at {:?}, and a step takes it as parked at {at:?} (layers)",
                        parked.map(|p| p.at)
                    )));
                }
            };
        }
        if chains.iter().any(|c| c.turn != CohortTurn::None) {
            self.check_cohorts()?;
        }
        if self.slots.len() < parts.len() {
            self.slots.resize_with(parts.len(), Slot::default);
        }
        // If the device has no rows of its own and no cohort begins, there is nothing to do until one is ready.
        let waits = chains.iter().any(|c| c.turn == CohortTurn::Parked)
            && chains.iter().all(|c| matches!(c.turn, CohortTurn::Parked | CohortTurn::None))
            && parts[0].groups.is_empty();
        if waits {
            self.wait_for_one(&chains);
        }
        Ok(chains)
    }

    /// Checks that cohorts can run.
    ///
    /// # Errors
    /// If they cannot run on the placement, with the reason.
    pub fn check_cohorts(&self) -> Result<()> {
        if self.device.is_none() || !matches!(self.host, Some(HostSide::Lane(_))) {
            return Err(Error::usage("cohorts without a device beside the host"));
        }
        let group = Group {
            request: RequestId { slot: 0, generation: 0 },
            phase: Phase::Decode,
            first: 1,
            tokens: 1,
            kv: Kv::Host,
            wants: Wants::Last,
        };
        let sub_batches = vec![SubBatch::default(), SubBatch::of(vec![group])];
        let iteration =
            Iteration { sub_batches, moves: Vec::new(), flow: Flow::Async, pick: false, top: false };
        let refused = self
            .refuses_cohorts
            .get_or_init(|| lower(&self.placement, &iteration).err().map(|e| e.to_string()));
        refused.as_ref().map_or(Ok(()), |why| Err(Error::usage(why.clone())))
    }

    /// Gives the host's lane the rows of cohorts that begin.
    pub(super) fn prepare_cohorts(&mut self, parts: &[Part<'_>], chains: &mut [CohortJobs]) {
        for (b, part) in parts.iter().enumerate() {
            if chains[b].turn == CohortTurn::Begins {
                let job = self.preparation(b, part, self.placement.head == Side::Host);
                self.give_detached(b, job, false, &mut chains[b]);
            } else if chains[b].turn != CohortTurn::None {
                self.work.begin(b, &part.host_sequences(false), &part.boundaries(), &part.wanted);
            }
        }
    }

    /// Gives the host's lane the rows of a sub-batch of the step as a job, since a parked cohort may occupy the lane.
    pub(super) fn prepare_by_lane(&mut self, b: usize, part: &Part<'_>, head: bool) -> Ticket {
        let job = self.preparation(b, part, head);
        self.lane_mut().give(job)
    }

    fn preparation(&mut self, b: usize, part: &Part<'_>, head: bool) -> HostJob<HostHalf> {
        let (own, far) = (part.host_sequences(false), part.host_sequences(true));
        self.work.begin(b, &own, &part.boundaries(), &part.wanted);
        let (own, far) = (owned(&own), owned(&far));
        let (tokens, wanted) = (part.tokens.clone(), part.wanted.clone());
        HostJob {
            op: NONE,
            events: vec![],
            after: vec![],
            seconds: 0.0,
            attends: false,
            detached: None,
            program: None,
            work: Box::new(move |half: &mut HostHalf| {
                half.prepare(b, &borrowed(&own), &tokens, &wanted, head);
                half.prepare_far(b, &borrowed(&far));
                Ok(())
            }),
        }
    }

    /// Gives the lane a job of a cohort; `last` says whether the cohort waits for its results.
    pub(super) fn give_detached(
        &mut self,
        b: usize,
        mut job: HostJob<HostHalf>,
        last: bool,
        chain: &mut CohortJobs,
    ) -> Ticket {
        let slot = &self.slots[b];
        let first = chain.epoch.is_none();
        let epoch = *chain.epoch.get_or_insert_with(|| slot.word.park());
        let (word, error) = (slot.word.clone(), slot.error.clone());
        job.detached = Some(Detached { of: b, word, epoch, error, first, last });
        job.after.extend(chain.job);
        let ticket = self.lane_mut().give(job);
        (chain.first, chain.job) = (chain.first.or(Some(ticket)), Some(ticket));
        ticket
    }

    /// Checks whether the cohort of `op` can join, at most one layer ahead of the device.
    pub(super) fn join(&mut self, op: &Op, issue: &mut Issue<'_>) -> Result<CohortTurn> {
        let b = op.sub_batch as usize;
        if let Some(begun) = &issue.begun {
            self.device().runtime.spin_until_done(begun)?;
        }
        let (epoch, job) = {
            let parked = self.slots[b].parked.as_ref().expect("a cohort that is parked");
            (parked.epoch, parked.job)
        };
        let word = self.slots[b].word.clone();
        // Where lanes act in turn, their order is fixed without waiting.
        let fixed_lag = self.deterministic && self.device().runtime.turns().is_none();
        let found = match (fixed_lag, self.lane().is_past(job)) {
            // Join at a fixed lag of one iteration.
            (true, _) => {
                self.rests(&DeviceLane::ALL)?;
                if !self.lane().wait_for_end(&word, epoch, Some(Instant::now() + self.patience)) {
                    return Err(Error::Run(format!(
                        "the host's attention before the device's layer {} takes more than {:?}",
                        op.layer.unwrap_or_default(),
                        self.patience
                    )));
                }
                // Advance emulated time, too.
                self.lane().reach([job]);
                word.look(epoch)
            }
            (false, None) => word.look(epoch),
            (false, Some(false)) => SyncState::Waiting,
            // In emulated time it is done, though this computer may be slower.
            (false, Some(true)) => {
                self.lane().wait_for_end(&word, epoch, None);
                word.look(epoch)
            }
        };
        let turn = match found {
            SyncState::Ready => {
                word.release(epoch);
                CohortTurn::Joined
            }
            SyncState::Waiting | SyncState::Failed => CohortTurn::Stays,
        };
        issue.chains[b].turn = turn;
        Ok(turn)
    }

    /// Waits until one of the parked cohorts has ended.
    fn wait_for_one(&mut self, chains: &[CohortJobs]) {
        let parked: Vec<_> = chains
            .iter()
            .zip(&self.slots)
            .filter(|(c, _)| c.turn == CohortTurn::Parked)
            .filter_map(|(_, s)| Some((s.word.clone(), s.parked.as_ref()?)))
            .map(|(word, p)| (word, p.epoch, p.job))
            .collect();
        let lane = self.lane();
        let first = lane.reach_first(parked.iter().map(|p| p.2));
        lane.wait_for_ends(|| match first {
            Some(job) => parked.iter().any(|p| p.2 == job && p.0.look(p.1) != SyncState::Waiting),
            None => parked.iter().any(|p| p.0.look(p.1) != SyncState::Waiting),
        });
    }

    /// Called after the step was issued or given up: parks the cohorts that it touched again, or ends them if it
    /// failed.
    pub(super) fn end_cohorts(
        &mut self,
        parts: &[Part<'_>],
        chains: &[CohortJobs],
        lists: &mut [PartLists],
        well: bool,
    ) -> Vec<CohortOutcome> {
        let mut outcomes = Vec::new();
        for (b, chain) in chains.iter().enumerate().filter(|(_, c)| c.turn != CohortTurn::None) {
            let before = self.slots[b].parked.take();
            let groups = parts[b].groups.to_vec();
            let mut outcome =
                CohortOutcome { slot: b, groups, at: None, advanced: false, rows: None, failed: None };
            let touched = matches!(chain.turn, CohortTurn::Begins | CohortTurn::Joined);
            if touched && !well {
                if let Some(epoch) = chain.epoch {
                    // Its last job may not have been given, so this one ends the work.
                    let job = HostJob {
                        op: NONE,
                        events: vec![],
                        after: vec![],
                        seconds: 0.0,
                        attends: false,
                        detached: None,
                        program: None,
                        work: Box::new(|_: &mut HostHalf| Ok(())),
                    };
                    self.give_detached(b, job, true, &mut { *chain });
                    self.abandon(b, epoch);
                }
                outcomes.push(outcome);
                continue;
            }
            let next = match (&before, chain.turn) {
                (None, _) => self.placement.next_stop(None),
                (Some(p), CohortTurn::Joined) => self.placement.next_stop(Some(p.at)),
                (Some(p), _) => Some(p.at),
            };
            outcome.at = next;
            outcome.advanced = touched;
            match (next, touched, before) {
                (Some(at), true, before) => {
                    let lists = before.map_or_else(|| std::mem::take(&mut lists[b]), |p| p.lists);
                    let (epoch, job) = (chain.epoch.expect("jobs"), chain.job.expect("jobs"));
                    self.lane_mut().forget(b, chain.first.expect("jobs"));
                    let (groups, tokens) = (outcome.groups.clone(), parts[b].tokens.clone());
                    self.slots[b].parked = Some(Parked { groups, tokens, at, epoch, job, lists });
                }
                (Some(_), false, Some(parked)) => {
                    if self.slots[b].word.look(parked.epoch) == SyncState::Failed && self.is_known(parked.job)
                    {
                        let error = self.slots[b].error.lock().unwrap_or_else(PoisonError::into_inner).take();
                        self.abandon(b, parked.epoch);
                        outcome.at = None;
                        outcome.failed = error.or_else(|| Some(Error::Run("the host's lane failed".into())));
                    } else {
                        self.slots[b].parked = Some(parked);
                    }
                }
                (None, ..) => self.lane_mut().forget(b, Ticket::MAX),
                (Some(_), false, None) => unreachable!("a cohort that begins goes on"),
            }
            outcomes.push(outcome);
        }
        outcomes
    }

    /// Whether a job has ended by the machine's clock.
    fn is_known(&self, job: Ticket) -> bool {
        self.lane().is_past(job).unwrap_or(true)
    }

    /// Whether the rows of a sub-batch got their logits in this step.
    pub(super) fn has_logits(&self, b: usize, chains: &[CohortJobs]) -> bool {
        match chains[b].turn {
            CohortTurn::None => true,
            CohortTurn::Joined => {
                let at = self.slots[b].parked.as_ref().map(|p| p.at);
                at.is_some() && self.placement.next_stop(at).is_none()
            }
            CohortTurn::Begins | CohortTurn::Parked | CohortTurn::Stays => false,
        }
    }

    /// The lists of a parked cohort, which are already on the device.
    pub(super) fn kept_lists(&self, flow: Flow, b: usize) -> Option<PartLists> {
        let parked = self.slots.get(b)?.parked.as_ref()?;
        (flow == Flow::Async).then(|| parked.lists.clone())
    }

    /// Records that the device begins a layer at which a cohort may join.
    pub(super) fn note_begun(&mut self, lowered: &Lowered, op: &Op, issue: &mut Issue<'_>) -> Result<()> {
        let first = op.unit == Unit::Gpu && op.kind != Kind::Join && op.layer != issue.layer;
        if !first {
            return Ok(());
        }
        issue.layer = op.layer;
        issue.begun = match op.layer.is_some_and(|l| lowered.joins.contains(&l)) {
            true => Some(self.device().runtime.record(DeviceLane::Compute)?),
            false => None,
        };
        Ok(())
    }

    /// A job of a cohort: see [`RealMachine::give_detached`].
    pub(super) fn cohort_job(
        &mut self,
        lowered: &Arc<Lowered>,
        at: usize,
        job: HostJob<HostHalf>,
        issue: &mut Issue<'_>,
    ) -> Result<Ticket> {
        let op = &lowered.program.ops[at];
        let b = op.sub_batch as usize;
        let last = lowered.last_detached[b] == Some(at);
        // After the host's layers the residual stream goes to the device when the cohort joins, or to a head on the
        // host.
        let ends = op.layer.is_some_and(|l| l as usize + 1 == self.placement.layers.len());
        let goes_on = last && op.kind == Kind::FfnDown && !(ends && self.placement.head == Side::Host);
        let mut chain = issue.chains[b];
        let job = HostJob { program: Some(lowered.clone()), ..job };
        let ticket = self.give_detached(b, job, last && !goes_on, &mut chain);
        issue.chains[b] = chain;
        if goes_on {
            let job = self.hand_over(op)?;
            self.give_detached(b, job, true, &mut issue.chains[b]);
        }
        Ok(ticket)
    }
}

#[cfg(test)]
impl RealMachine {
    /// Delays attention on the host at random from now on.
    pub fn slow_host(&self, seed: u64) {
        self.lane().state().delays = Some(seed);
    }

    /// Makes attention on the host take this much longer, from now on.
    pub fn delay_host(&self, by: Duration) {
        self.lane().state().delay = by;
    }

    /// How long a merge at a fixed lag waits for the host.
    pub fn have_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Lets cohorts join when they are ready even in deterministic mode: rows have the same bits, but the number of
    /// steps varies.
    pub fn let_cohorts_be_late(&mut self) {
        self.deterministic = false;
    }

    /// The host's operation after this many others panics.
    pub fn panic_host(&self, after: usize) {
        self.lane().state().panics_at = Some(after);
    }
}

/// Sequences for the host with owned lists of pages, for jobs that outlive the step.
struct Owned {
    pages: Vec<u32>,
    first_pos: usize,
    n_rows: usize,
    tokens: std::ops::Range<usize>,
}

fn owned(seqs: &[HostSeq<'_>]) -> Vec<Owned> {
    let own = |s: &HostSeq<'_>| Owned {
        pages: s.pages.to_vec(),
        first_pos: s.first_pos,
        n_rows: s.n_rows,
        tokens: s.tokens.clone(),
    };
    seqs.iter().map(own).collect()
}

fn borrowed(seqs: &[Owned]) -> Vec<HostSeq<'_>> {
    fn of(s: &Owned) -> HostSeq<'_> {
        HostSeq { pages: &s.pages, first_pos: s.first_pos, n_rows: s.n_rows, tokens: s.tokens.clone() }
    }
    seqs.iter().map(of).collect()
}
