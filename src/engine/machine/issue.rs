//! Issues a program: operations of the device are enqueued, those of the host become jobs of its lane.
//!
//! The issuing thread computes nothing. It waits for a job of the host where an operation of the device needs its results, in the
//! order of the program; jobs themselves wait for events of the device. A transfer of rows has two parts: to the
//! device, a job that writes the rows to pinned memory, then a copy; to the host, a copy, then a job that reads them
//! from there.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::carry::{AreaKey, Place, What};
use super::cohort_turn::{CohortJobs, CohortTurn};
use super::device::{lane, rows_of};
use super::host::HostHalf;
use super::lane::{HostJob, NONE, Ran, Ticket};
use super::lists::PartLists;
use super::lowered::Lowered;
use super::mail::MailboxRows;
use super::mode::Mode;
use super::part::{GroupRows, Part};
use super::segments::fusible;
use super::work::HostWork;
use super::{HostSide, RealMachine};
use crate::Result;
use crate::cache::PAGE_TOKENS;
use crate::device::{Event, HostUse, Lane, Pinned, Runtime, Step, Work};
use crate::engine::kv::Moved;
use crate::program::{Cargo, Group, Kind, Kv, Op, Side, Sublayer, Unit};

/// The state of a program's issue.
pub(super) struct Issue<'a> {
    /// The copies of pages that change sides.
    pub moved: &'a [Moved],
    /// Events of the device's operations that others wait for.
    events: Vec<Option<Event>>,
    /// Tickets of the host's operations, and of transfers.
    jobs: Vec<Option<Ticket>>,
    /// For each sub-batch, the job that gives the host's lane its rows; its other jobs come after it.
    pub prepared: Vec<Option<Ticket>>,
    /// Lists of each sub-batch.
    pub lists: Vec<PartLists>,
    /// The turn of each sub-batch's cohort.
    pub chains: Vec<CohortJobs>,
    /// The layer that was issued last on the device, and the event of its start, where cohorts may join after it.
    pub layer: Option<u32>,
    pub begun: Option<Event>,
}

impl<'a> Issue<'a> {
    pub fn new(lowered: &Lowered, moved: &'a [Moved], chains: Vec<CohortJobs>) -> Issue<'a> {
        // Operations of one unit wait for nothing.
        let n = if lowered.waits.is_empty() { 0 } else { lowered.program.ops.len() };
        let (events, jobs) = (vec![None; n], vec![None; n]);
        let prepared = vec![None; chains.len()];
        Issue { moved, events, jobs, prepared, lists: Vec::new(), chains, layer: None, begun: None }
    }

    /// Whether an operation is skipped because its cohort stays parked.
    pub fn stays(&self, op: &Op) -> bool {
        self.chains.get(op.sub_batch as usize).is_some_and(|c| c.turn == CohortTurn::Stays)
    }

    /// Whether there are cohorts.
    pub fn has_cohorts(&self) -> bool {
        self.chains.iter().any(|c| c.turn != CohortTurn::None)
    }

    /// A key that is equal for steps with equal launches; `None` if a step must not be recorded.
    pub fn graph_key(&self) -> Option<u64> {
        let mut hash = DefaultHasher::new();
        // Only the device's own work is recorded.
        let lists = if self.has_cohorts() { &self.lists[..1] } else { &self.lists[..] };
        for lists in lists {
            // Streamed pages differ from step to step.
            if !lists.far.is_empty() {
                return None;
            }
            lists.modes.len().hash(&mut hash);
            for (mode, step) in &lists.modes {
                (mode, step.graph_key?).hash(&mut hash);
            }
        }
        Some(hash.finish())
    }
}

impl RealMachine {
    /// Issues the operation at `at` with those fused with it; returns how many.
    pub(super) fn issue(
        &mut self,
        lowered: &Arc<Lowered>,
        at: usize,
        issue: &mut Issue<'_>,
        parts: &[Part<'_>],
    ) -> Result<usize> {
        let ops = &lowered.program.ops;
        let op = &ops[at];
        if op.unit == Unit::Host {
            self.on_host(lowered, at, issue, parts)?;
            return Ok(1);
        }
        let n = fusible(ops, at);
        for i in at..at + n {
            self.wait_for(lowered, i, issue)?;
        }
        // Data that a cohort left when it was parked is already in place: what the host's layers handed over.
        let joined = lowered.cohort(op).is_some_and(|b| issue.chains[b as usize].turn == CohortTurn::Joined);
        let handed = joined && op.layer.is_some_and(|l| self.placement.ends_on_host(l));
        if let Kind::Carry { cargo, to: Side::Device } = op.kind
            && !handed
        {
            self.fill(lowered, at, cargo, issue)?;
        }
        let runtime = self.device().runtime.clone();
        // Rows to the host wait for the operation that computed them, in `fetch`.
        if !matches!(op.kind, Kind::Carry { to: Side::Host, .. }) {
            self.works(op.unit)?;
        }
        let begun = self.trace.as_ref().map(|_| runtime.record_timed(lane(op.unit))).transpose()?;
        let mut arrived = None;
        match op.kind {
            Kind::Stream { .. } => self.device_mut().fetch(op.layer.unwrap_or_default() as usize)?,
            Kind::Carry { cargo, to: Side::Device } => self.send(op, cargo)?,
            Kind::Carry { cargo, to: Side::Host } => arrived = Some(self.fetch(op, cargo, issue)?),
            Kind::PageIn { .. } | Kind::PageOut { .. } => self.pages_of(op, parts, issue.moved)?,
            _ => self.enqueue(lowered, at, n, issue)?,
        }
        if let (Some(trace), Some(begun)) = (&mut self.trace, begun) {
            trace.enqueued(at, op, lowered.cohort(op), begun, &*runtime)?;
        }
        if arrived.is_some() {
            issue.events[at] = Some(runtime.record(lane(op.unit))?);
        } else {
            self.issued(lowered, at..at + n, issue)?;
        }
        if let (Some(places), Kind::Carry { cargo, .. }) = (arrived, op.kind) {
            let (after, events) = (tickets(lowered, at, issue), issue.events[at].iter().cloned().collect());
            let program = lowered.clone();
            let bytes = |&what: &What| self.area_bytes(op, what).len();
            let work = HostWork::copy(What::of(cargo).iter().map(bytes).sum());
            let job = self.make_job((at, op), events, after, work, move |half| {
                for (what, place) in &places {
                    // SAFETY: the job waits for the copies, so they are done, and the next ones wait for this job.
                    unsafe { half.land(&program.program.ops[at], *what, place) };
                }
                Ok(())
            });
            // A cohort goes on to the host's layers; for a head or experts on the host the step waits.
            let goes_on = lowered.goes_on(at);
            let job = match goes_on {
                true => self.cohort_job(lowered, at, job, issue)?,
                false => self.lane_mut().give(job),
            };
            issue.jobs[at] = Some(job);
            for &what in What::of(cargo) {
                let bytes = self.area_bytes(op, what);
                self.areas_mut().lands(area(op, what, Side::Host), bytes, job)?;
            }
        }
        Ok(n)
    }

    /// Enqueues the operation at `at`, on its lane of the device, with those fused with it: `n` in all.
    pub(super) fn enqueue(
        &mut self,
        lowered: &Lowered,
        at: usize,
        n: usize,
        issue: &Issue<'_>,
    ) -> Result<()> {
        let ops = &lowered.program.ops;
        // Each publication has a different epoch.
        let epoch = at as u32 + 1;
        let step = lists(&self.device().modes, &ops[at], &issue.lists);
        let far = ops[at].layer.and_then(|l| {
            let window = self.device().modes[l as usize].window;
            let far = &issue.lists[ops[at].sub_batch as usize].far;
            far.iter().find(|(w, _)| *w == window).map(|(_, step)| step)
        });
        let device = self.device.as_mut().expect("a device");
        match n {
            1 => {
                let packed = lowered.parts[ops[at].sub_batch as usize].packed.as_ref();
                device.compute(&ops[at], step, far, packed, epoch)
            }
            n => device.fused(&ops[at], &ops[at + 1], (n > 2).then(|| &ops[at + 2]), step, epoch),
        }
    }

    /// After operations of one device lane were enqueued: records an event if others wait for one of them.
    pub(super) fn issued(&self, lowered: &Lowered, ops: Range<usize>, issue: &mut Issue<'_>) -> Result<()> {
        if ops.clone().any(|i| lowered.awaited[i]) {
            let unit = lowered.program.ops[ops.start].unit;
            let event = self.device().runtime.record(lane(unit))?;
            issue.events[ops].fill(Some(event));
        }
        Ok(())
    }

    /// Makes the device's lane wait for what operation `at` waits for, before it is enqueued.
    pub(super) fn wait_for(&mut self, lowered: &Lowered, at: usize, issue: &Issue<'_>) -> Result<()> {
        let ops = &lowered.program.ops;
        let op = &ops[at];
        let carries = matches!(op.kind, Kind::Carry { .. });
        for &w in lowered.waits(at) {
            match (ops[w].unit, issue.jobs[w]) {
                _ if issue.stays(&ops[w]) => {}
                // The host's half of a transfer does its own waiting.
                (Unit::Host, Some(_)) if carries => {}
                (Unit::Host, Some(job)) => {
                    self.rests(&Lane::ALL)?;
                    self.lane().wait(job)?;
                }
                (unit, _) if unit == op.unit => {}
                _ => {
                    self.rests(&[lane(op.unit)])?;
                    let event = issue.events[w].as_ref().expect("recorded when issued");
                    self.device().runtime.wait(lane(op.unit), event)?;
                }
            }
        }
        Ok(())
    }

    /// Counts this unit of the device as busy: an operation of it is enqueued next.
    pub(super) fn works(&mut self, unit: Unit) -> Result<()> {
        let (busy, device) = (self.busy.as_mut(), self.device.as_ref());
        busy.zip(device).map_or(Ok(()), |(busy, device)| busy.begin(unit, &*device.runtime))
    }

    /// Counts these lanes of the device as idle from here on.
    pub(super) fn rests(&mut self, lanes: &[Lane]) -> Result<()> {
        let Some((busy, device)) = self.busy.as_mut().zip(self.device.as_ref()) else { return Ok(()) };
        lanes.iter().try_for_each(|&lane| busy.pause(lane, &*device.runtime))
    }

    /// Issues an operation of the host as a job, or runs it at once if there is no device to wait for.
    fn on_host(
        &mut self,
        lowered: &Arc<Lowered>,
        at: usize,
        issue: &mut Issue<'_>,
        parts: &[Part<'_>],
    ) -> Result<()> {
        let op = &lowered.program.ops[at];
        let alone = lowered.parts[op.sub_batch as usize].alone;
        if let Some(HostSide::Inline(half)) = &mut self.host {
            let from = Instant::now();
            half.compute(op, None, alone);
            if let Some(busy) = &mut self.busy {
                busy.host(from.elapsed().as_secs_f64());
            }
            // In emulated time, the issuing thread's clock advances by the work.
            let emulated = self.clock.as_ref().map(|clock| {
                let (begun, work) = (clock.now(), self.work.of(op, alone && op.wanted_only));
                clock.spend(clock.rates().host_operation(work, attends(op)));
                (begun, clock.now())
            });
            if let Some(trace) = &mut self.trace {
                trace.ran(op, None, &Ran { op: at, program: None, from, to: Instant::now(), emulated });
            }
            return Ok(());
        }
        let mail =
            through_mailbox(op).then(|| MailboxRows::of(lists(&self.device().modes, op, &issue.lists), op));
        let events = events(lowered, at, issue);
        let mut after = tickets(lowered, at, issue);
        let program = lowered.clone();
        let work = self.work.of(op, alone && op.wanted_only);
        let runtime = self.device().runtime.clone();
        let pages = self.pinned_pages(op, parts);
        // The job uses these pages from now on, even before it begins, until it ends or is given up; meanwhile the
        // device gets no work that touches them.
        let uses = pages.as_ref().and_then(|pages| pages.uses(&*runtime, op));
        if lowered.cohort(op).is_some() {
            self.slots[op.sub_batch as usize].note_use(uses.as_ref());
        }
        let used = uses.map(Used);
        let detached = op.detached;
        // A cohort's job that the step waits for comes after the job that gives the lane its rows.
        after.extend(issue.chains.get(op.sub_batch as usize).and_then(|c| c.job).filter(|_| !detached));
        let job = self.make_job((at, op), events, after, work, move |half| {
            let _used = used;
            let op = &program.program.ops[at];
            if let Some(pages) = pages {
                pages.check(&*runtime, op)?;
            }
            half.compute(op, mail, alone);
            Ok(())
        });
        let job = match detached {
            true => self.cohort_job(lowered, at, job, issue)?,
            false => self.lane_mut().give(job),
        };
        if let Some(slot) = issue.jobs.get_mut(at) {
            *slot = Some(job);
        }
        Ok(())
    }

    /// The pages that an operation of the host uses in place and that the device also moves, for an accelerator that
    /// watches memory.
    fn pinned_pages(&self, op: &Op, parts: &[Part<'_>]) -> Option<PinnedPages> {
        let device = self.device();
        let l = op.layer? as usize;
        let far = self.placement.layers[l].kv == Side::Device;
        let home = if far { &device.far_pages } else { &device.host_pages };
        let (memory, layer) = home.as_ref().filter(|_| device.runtime.watches())?;
        let at = self.places[l] * layer;
        let (part, page) = (&parts[op.sub_batch as usize], device.shape.page_bytes());
        let of = |rows: &GroupRows<'_>, from: usize, to: usize| -> Vec<usize> {
            let pages = if far { rows.table.far_pages() } else { rows.table.host_pages() };
            let pages = &pages[from / PAGE_TOKENS..to.div_ceil(PAGE_TOKENS)];
            pages.iter().map(|&p| at + p as usize * page).collect()
        };
        let range = op.groups.start as usize..op.groups.end as usize;
        let window = self.placement.window(l);
        let seen = |g: &Group| window.map_or(0, |w| (g.first + 1).saturating_sub(w)) as usize;
        let pages =
            part.groups[range.clone()].iter().zip(&part.rows[range]).flat_map(|(group, rows)| {
                match (op.kind, group.kv) {
                    (Kind::Append { .. }, _) => of(rows, group.first as usize, group.end() as usize),
                    (Kind::Attend { .. }, Kv::Split { boundary, .. }) if far => {
                        of(rows, seen(group).min(boundary as usize), boundary as usize)
                    }
                    (Kind::Attend { .. }, _) => of(rows, seen(group), group.end() as usize),
                    _ => vec![],
                }
            });
        Some(PinnedPages { memory: memory.clone(), at: pages.collect(), bytes: page })
    }

    /// The host's half of a transfer to the device, up to its end.
    fn fill(&mut self, lowered: &Arc<Lowered>, at: usize, cargo: Cargo, issue: &mut Issue<'_>) -> Result<()> {
        let op = &lowered.program.ops[at];
        let what = one(cargo);
        let bytes = self.area_bytes(op, what);
        let work = HostWork::copy(bytes.len());
        let (place, busy) = self.areas_mut().place_to_fill(area(op, what, Side::Device), bytes)?;
        let after = tickets(lowered, at, issue);
        let program = lowered.clone();
        let job = self.job((at, op), busy.into_iter().collect(), after, work, move |half| {
            // SAFETY: the job waits for the last copy from there, so it is done, and the next is enqueued after this
            // job.
            unsafe { half.fill(&program.program.ops[at], cargo, &place) };
            Ok(())
        });
        issue.jobs[at] = Some(job);
        self.rests(&Lane::ALL)?;
        self.lane().wait(job)
    }

    /// Enqueues the copy of a transfer to the device.
    fn send(&mut self, op: &Op, cargo: Cargo) -> Result<()> {
        let what = one(cargo);
        let bytes = self.area_bytes(op, what);
        let d = self.device();
        let span = what.span(&d.parts[op.sub_batch as usize].ws, &d.shape, &rows_of(op));
        self.areas_mut().send(area(op, what, Side::Device), bytes, span)
    }

    /// Enqueues the copies of a transfer to the host; returns where the rows arrive.
    fn fetch(&mut self, op: &Op, cargo: Cargo, issue: &Issue<'_>) -> Result<Vec<(What, Place)>> {
        for &what in What::of(cargo) {
            let (key, bytes) = (area(op, what, Side::Host), self.area_bytes(op, what));
            for job in self.areas_mut().landings(key, &bytes)? {
                self.rests(&Lane::ALL)?;
                self.lane().wait(job)?;
            }
        }
        let (b, layer, rows) = (op.sub_batch as usize, op.layer.unwrap_or_default() as usize, rows_of(op));
        if let Cargo::Hidden { pending: Some(of) } = cargo {
            let step = lists(&self.device().modes, op, &issue.lists);
            self.device.as_mut().expect("a device").fold(b, layer, of, step, rows.clone())?;
        }
        let d = self.device();
        // The operation that computed the rows is on the compute lane.
        let span = |&what: &What| (what, what.span(&d.parts[b].ws, &d.shape, &rows));
        let (runtime, spans) = (d.runtime.clone(), What::of(cargo).iter().map(span).collect::<Vec<_>>());
        self.rests(&[Lane::DeviceToHost])?;
        runtime.wait(Lane::DeviceToHost, &runtime.record(Lane::Compute)?)?;
        self.works(Unit::D2h)?;
        let copy = |(what, span)| {
            let bytes = self.area_bytes(op, what);
            Ok((what, self.areas_mut().fetch(area(op, what, Side::Host), bytes, span)?))
        };
        spans.into_iter().map(copy).collect()
    }

    /// Enqueues copies of pages that change sides, or of a layer's pages to or from staging memory.
    fn pages_of(&mut self, op: &Op, parts: &[Part<'_>], moved: &[Moved]) -> Result<()> {
        let bytes = self.move_pages_of(op, parts, moved)?;
        match op.unit {
            Unit::D2h => self.crossed.add_to_host(bytes),
            _ => self.crossed.add_to_device(bytes),
        }
        Ok(())
    }

    /// Returns the bytes that cross.
    fn move_pages_of(&self, op: &Op, parts: &[Part<'_>], moved: &[Moved]) -> Result<usize> {
        let (Kind::PageOut { staged } | Kind::PageIn { staged }) = op.kind else {
            unreachable!("pages do not move by {}", op.kind.name())
        };
        if staged.is_none() {
            let same = |m: &&Moved| {
                let request = m.request();
                op.reads.iter().any(|r| {
                    matches!(r.buffer, crate::program::Buffer::Pages(side, of) if of == request && side != m.to)
                        && r.span == m.span
                })
            };
            let m = moved.iter().find(same).expect("the copies of every move");
            return self.device().change_sides(op, &m.copies);
        }
        let (part, at) = (&parts[op.sub_batch as usize], op.groups.start as usize);
        let (group, rows) = (&part.groups[at], &part.rows[at]);
        let tokens = match op.kind {
            Kind::PageIn { .. } => group.first,
            _ => group.end(),
        };
        let l = op.layer.unwrap_or_default() as usize;
        let (home, staged) = match self.placement.layers[l].kv {
            Side::Host => (rows.table.host_pages(), rows.table.host_pages()),
            Side::Device => (rows.table.far_pages(), &part.staged[at][..]),
        };
        self.device().move_staged(op, self.places[l], (home, staged), tokens as usize)
    }

    /// The job that writes a cohort's residual stream, after the host's layers, to the area from which it is carried to
    /// the device. `op` is the last operation of these layers.
    pub(super) fn hand_over(&mut self, op: &Op) -> Result<HostJob<HostHalf>> {
        let cargo = Cargo::Hidden { pending: Some(Sublayer::Down) };
        let op = Op { kind: Kind::Carry { cargo, to: Side::Device }, unit: Unit::H2d, ..op.clone() };
        let what = one(cargo);
        let bytes = self.area_bytes(&op, what);
        let work = HostWork::copy(bytes.len());
        let (place, busy) = self.areas_mut().place_to_fill(area(&op, what, Side::Device), bytes)?;
        Ok(self.make_job((NONE, &op.clone()), busy.into_iter().collect(), vec![], work, move |half| {
            // SAFETY: the job waits for the last copy from there, so it is done, and the next is enqueued when the
            // cohort joins.
            unsafe { half.fill(&op, cargo, &place) };
            Ok(())
        }))
    }

    /// The bytes of an area that the rows of a transfer occupy.
    fn area_bytes(&self, op: &Op, what: What) -> Range<usize> {
        let (row, rows) = (what.row_bytes(&self.device().shape), rows_of(op));
        rows.start * row..rows.end * row
    }

    fn job(
        &mut self,
        at: (usize, &Op),
        events: Vec<Event>,
        after: Vec<Ticket>,
        amount: Work,
        work: impl FnOnce(&mut HostHalf) -> Result<()> + Send + 'static,
    ) -> Ticket {
        let job = self.make_job(at, events, after, amount, work);
        self.lane_mut().give(job)
    }

    /// A job of the place `op` in the program, for the operation `of`.
    pub(super) fn make_job(
        &self,
        (op, of): (usize, &Op),
        events: Vec<Event>,
        after: Vec<Ticket>,
        amount: Work,
        work: impl FnOnce(&mut HostHalf) -> Result<()> + Send + 'static,
    ) -> HostJob<HostHalf> {
        let attends = attends(of);
        let clock = self.device().runtime.clock();
        let seconds = clock.map_or(0.0, |clock| clock.rates().host_operation(amount, attends));
        HostJob { op, events, after, seconds, attends, detached: None, program: None, work: Box::new(work) }
    }
}

/// Whether it is attention.
fn attends(op: &Op) -> bool {
    matches!(op.kind, Kind::Attend { .. })
}

/// Pages in pinned memory, by their first bytes.
struct PinnedPages {
    memory: Arc<dyn Pinned>,
    at: Vec<usize>,
    bytes: usize,
}

impl PinnedPages {
    fn spans(&self) -> Vec<(*const u8, usize)> {
        let base = self.memory.host().cast_const();
        self.at.iter().map(|&at| (base.wrapping_add(at), self.bytes)).collect()
    }

    /// Checks that no work in flight touches them.
    fn check(&self, runtime: &dyn Runtime, op: &Op) -> Result<()> {
        match op.kind {
            Kind::Append { .. } => runtime.host_access(&[], &self.spans()),
            _ => runtime.host_access(&self.spans(), &[]),
        }
    }

    /// Records that a job of the host will use them.
    fn uses(&self, runtime: &dyn Runtime, op: &Op) -> Option<Uses> {
        let used = match op.kind {
            _ if self.at.is_empty() => None,
            Kind::Append { .. } => runtime.host_use(&[], &self.spans()),
            _ => runtime.host_use(&self.spans(), &[]),
        };
        used.map(|used| Uses(Arc::new(Mutex::new(Some(used)))))
    }
}

/// Bytes that a job of the host uses until it ends or is given up, which may be long before the lane drops it.
#[derive(Clone)]
pub(super) struct Uses(Arc<Mutex<Option<HostUse>>>);

impl Uses {
    /// Whether the job no longer uses them.
    pub fn ended(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Ends the use.
    pub fn end(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

/// The uses of a job, which end with it, even if it panics or never runs.
struct Used(Uses);

impl Drop for Used {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// The lists that an operation of the device uses.
pub(super) fn lists<'a>(modes: &[Mode], op: &Op, lists: &'a [PartLists]) -> &'a Step {
    let of = op.layer.map(|l| modes[l as usize]);
    let found = lists[op.sub_batch as usize].modes.iter().find(|(mode, _)| of.is_none_or(|of| of == *mode));
    &found.expect("lists for every way of attending").1
}

fn area(op: &Op, what: What, to: Side) -> AreaKey {
    (op.sub_batch, what, to)
}

/// What crosses to the device as this cargo: one copy.
fn one(cargo: Cargo) -> What {
    match What::of(cargo) {
        &[what] => what,
        _ => unreachable!("{cargo:?} goes to the host"),
    }
}

fn through_mailbox(op: &Op) -> bool {
    matches!(
        op.kind,
        Kind::Append { mailbox: true, .. }
            | Kind::Attend { from_mailbox: true, .. }
            | Kind::Attend { to_mailbox: true, .. }
    )
}

/// The jobs that operation `at` waits for.
fn tickets(lowered: &Lowered, at: usize, issue: &Issue<'_>) -> Vec<Ticket> {
    let waits = lowered.waits(at).iter().filter_map(|&w| issue.jobs[w]);
    waits.chain(issue.prepared[lowered.program.ops[at].sub_batch as usize]).collect()
}

/// The events that operation `at` of the host waits for; for rows that come across the link it waits for jobs instead.
fn events(lowered: &Lowered, at: usize, issue: &Issue<'_>) -> Vec<Event> {
    let ops = &lowered.program.ops;
    let waits = lowered.waits(at).iter().filter(|&&w| issue.jobs[w].is_none() && !issue.stays(&ops[w]));
    waits.map(|&w| issue.events[w].clone().expect("recorded when issued")).collect()
}
