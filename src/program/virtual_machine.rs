//! A machine that only keeps time: runs a program over a clock and a table of costs.
//!
//! The device's lanes run their operations in the order of issue, the host takes the oldest operation that is ready, a cohort's if
//! there is no other; an operation starts when its lane is free and what it waits for ([`super::order::waits`]) is done.
//!
//! Attention on the host takes longer while copies run ([`CopySpans`], [`Costs::beside_copies`]).
//!
//! Asynchronous iterations leave work of the host behind, and begin with what earlier ones have left ([`Carried`]): [`run_from`].

mod straight;

use std::collections::{HashMap, HashSet};

use serde::Serialize;

use crate::device::CopySpans;

use super::iteration::{Flow, Iteration, RequestId};
use super::op::{Kind, Op, Program};
use super::order::waits;
use super::unit::{PerUnit, Unit};

/// How long operations take.
pub trait Costs {
    /// Seconds of one operation on its unit, alone.
    fn seconds(&self, op: &Op) -> f64;

    /// Seconds that `unit` is busy before the first operation of `program`: a step's lists, on their way to the device.
    fn before(&self, _program: &Program, _unit: Unit) -> f64 {
        0.0
    }

    /// Share of its rate that attention on the host keeps while copies over the link run, in (0, 1].
    fn beside_copies(&self) -> f64 {
        1.0
    }

    /// Seconds from the end of the last operation of `program` until the step's results are where they were asked for.
    fn after(&self, _program: &Program) -> f64 {
        0.0
    }
}

impl<F: Fn(&Op) -> f64> Costs for F {
    fn seconds(&self, op: &Op) -> f64 {
        self(op)
    }
}

/// When an operation ran.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct OpSpan {
    /// Which, by place in the program.
    pub op: usize,
    /// Where.
    pub unit: Unit,
    /// Seconds since the program began.
    pub start: f64,
    /// Seconds since the program began.
    pub end: f64,
    /// Whether the end of the iteration does not wait for it ([`Op::detached`](super::op::Op::detached)).
    pub detached: bool,
}

/// What a run took.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Timeline {
    /// In the order of the program. What a cohort that did not join would have done has spans without length, at the time at
    /// which it was looked for.
    pub spans: Vec<OpSpan>,
    /// Seconds behind the last: [`Costs::after`].
    pub after: f64,
}

impl Timeline {
    /// Seconds until the last operation is done, but for those that the end of the iteration does not wait for, and its results are
    /// where they were asked for.
    pub fn seconds(&self) -> f64 {
        let ends = self.spans.iter().filter(|s| !s.detached).map(|s| s.end);
        ends.fold(0.0, f64::max) + self.after
    }

    /// Seconds that a unit worked.
    pub fn busy(&self, unit: Unit) -> f64 {
        self.spans.iter().filter(|s| s.unit == unit).map(|s| s.end - s.start).sum()
    }

    /// Seconds during which both units worked.
    pub fn overlap(&self, a: Unit, b: Unit) -> f64 {
        let of = |unit| {
            let mut spans: Vec<_> =
                self.spans.iter().filter(|s| s.unit == unit).map(|s| (s.start, s.end)).collect();
            spans.sort_by(|x, y| x.0.total_cmp(&y.0));
            spans
        };
        let (a, b) = (of(a), of(b));
        let (mut i, mut j, mut both) = (0, 0, 0.0);
        while i < a.len() && j < b.len() {
            both += (a[i].1.min(b[j].1) - a[i].0.max(b[j].0)).max(0.0);
            if a[i].1 < b[j].1 { i += 1 } else { j += 1 }
        }
        both
    }
}

/// What asynchronous iterations leave to the next one.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Carried {
    /// Seconds until the host's workers have done what they have been given.
    pub host: f64,
    /// For each parked cohort, by its first request, the seconds until its attention is done.
    pub cohorts: Vec<(RequestId, f64)>,
}

impl Carried {
    /// Seconds until the attention of the cohort with this first request is done: 0 of one that is not known.
    pub fn ready(&self, first: RequestId) -> f64 {
        self.cohorts.iter().find(|(id, _)| *id == first).map_or(0.0, |&(_, seconds)| seconds)
    }

    /// So many seconds later.
    pub fn later(mut self, seconds: f64) -> Carried {
        let left = |t: f64| (t - seconds).max(0.0);
        self.host = left(self.host);
        self.cohorts.iter_mut().for_each(|(_, t)| *t = left(*t));
        self
    }
}

/// A run of an asynchronous iteration.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Advance {
    /// What it took.
    pub timeline: Timeline,
    /// The cohorts, by sub-batch, that were parked and have joined.
    pub joined: Vec<u8>,
    /// For the next iteration, from the end of this one on.
    pub carried: Carried,
}

/// Runs `program` by `costs`. Cohorts are taken to be ready.
pub fn run(program: &Program, costs: &impl Costs) -> Timeline {
    run_timed(program, &waits(program), costs, &|i| costs.seconds(&program.ops[i]))
}

/// The same with what each operation waits for ([`waits`]) and takes, by place in the program: who runs programs of one shape many
/// times knows both. `costs` says what is before and after the operations.
pub fn run_timed(
    program: &Program,
    waits: &[Vec<usize>],
    costs: &impl Costs,
    takes: &dyn Fn(usize) -> f64,
) -> Timeline {
    beside_copies(program, waits, costs, takes, (0.0, 0.0), &|_| 0.0).0
}

/// Runs the `program` of `iteration` by `costs`, after iterations that have left `carried`. A cohort joins if its attention
/// is done when the device begins its layer: by then the issuing thread, one layer ahead, has come to the layer's end. An
/// iteration without rows of the device's own, nor of a cohort that begins, waits until one of the cohorts is ready.
pub fn run_from(program: &Program, iteration: &Iteration, costs: &impl Costs, carried: &Carried) -> Advance {
    let first = |b: u8| iteration.sub_batches[b as usize].groups[0].request;
    let cohorts: Vec<(u8, Option<u32>)> = iteration.cohorts().map(|(b, batch)| (b, batch.at)).collect();
    let idle = iteration.sub_batches.first().is_none_or(|b| b.groups.is_empty())
        && cohorts.iter().all(|(_, at)| at.is_some());
    let earliest = cohorts.iter().map(|&(b, _)| carried.ready(first(b))).reduce(f64::min);
    let begin = earliest.filter(|_| idle).unwrap_or_default();
    let takes = |i: usize| costs.seconds(&program.ops[i]);
    let ready = |b| carried.ready(first(b));
    let backlog = (carried.host, begin);
    let (timeline, joined) = beside_copies(program, &waits(program), costs, &takes, backlog, &ready);
    let seconds = timeline.seconds();
    // What was under way is attention, which this iteration's copies slow down, too.
    let (copies, share) = (copies(&timeline), costs.beside_copies());
    let slowed = |t: f64| if t > 0.0 { copies.end(0.0, t, share) } else { t };
    let cohorts_under_way = carried.cohorts.iter().map(|&(id, t)| (id, slowed(t))).collect();
    let mut left = Carried { host: slowed(carried.host), cohorts: cohorts_under_way }.later(seconds);
    for (b, at) in cohorts {
        if at.is_some() && !joined.contains(&b) {
            continue;
        }
        left.cohorts.retain(|(id, _)| *id != first(b));
        let detached = || timeline.spans.iter().filter(|s| s.detached && program.ops[s.op].sub_batch == b);
        let done = detached().map(|s| s.end - seconds).fold(0.0, f64::max);
        if detached().next().is_some() {
            left.cohorts.push((first(b), done));
            left.host = left.host.max(done);
        }
    }
    Advance { timeline, joined, carried: left }
}

/// When copies over the link run.
fn copies(timeline: &Timeline) -> CopySpans {
    let over = |unit| matches!(unit, Unit::H2d | Unit::D2h);
    CopySpans::of(timeline.spans.iter().filter(|s| over(s.unit)).map(|s| (s.start, s.end)))
}

/// How often attention is placed anew until it and the copies beside it agree. Each time at least one more operation has its place.
const ROUNDS: usize = 8;

/// As [`place`], with attention on the host slowed down by the copies beside it.
fn beside_copies(
    program: &Program,
    waits: &[Vec<usize>],
    costs: &impl Costs,
    takes: &dyn Fn(usize) -> f64,
    free: (f64, f64),
    ready_at: &dyn Fn(u8) -> f64,
) -> (Timeline, Vec<u8>) {
    let mut placed = place(program, waits, costs, takes, free, ready_at);
    let share = costs.beside_copies();
    let attends = |op: &Op| op.unit == Unit::Host && matches!(op.kind, Kind::Attend { .. });
    if share >= 1.0 || !program.ops.iter().any(attends) {
        return placed;
    }
    let mut longer: Vec<f64> = Vec::new();
    for _ in 0..ROUNDS {
        let copies = copies(&placed.0);
        if copies.is_empty() {
            break;
        }
        longer.resize(program.ops.len(), 0.0);
        for span in placed.0.spans.iter().filter(|s| attends(&program.ops[s.op])) {
            let alone = takes(span.op);
            longer[span.op] = copies.end(span.start, alone, share) - span.start - alone;
        }
        let before = placed.0.seconds();
        placed = place(program, waits, costs, &|i| takes(i) + longer[i], free, ready_at);
        if (placed.0.seconds() - before).abs() <= 1e-6 * before {
            break;
        }
    }
    placed
}

/// When each operation runs, with workers of the host that are free from `free.0` on, lanes of the device that are from `free.1` on,
/// and cohorts that are ready at `ready_at`; and the cohorts that have joined.
fn place(
    program: &Program,
    waits: &[Vec<usize>],
    costs: &impl Costs,
    takes: &dyn Fn(usize) -> f64,
    free: (f64, f64),
    ready_at: &dyn Fn(u8) -> f64,
) -> (Timeline, Vec<u8>) {
    match straight::straight(program, waits, costs, takes, free) {
        Some(timeline) => (timeline, Vec::new()),
        None => search(program, waits, costs, takes, free, ready_at),
    }
}

/// As [`place`], whatever the program.
fn search(
    program: &Program,
    waits: &[Vec<usize>],
    costs: &impl Costs,
    takes: &dyn Fn(usize) -> f64,
    (backlog, begin): (f64, f64),
    ready_at: &dyn Fn(u8) -> f64,
) -> (Timeline, Vec<u8>) {
    let none = OpSpan { op: 0, unit: Unit::Host, start: 0.0, end: f64::NAN, detached: false };
    let mut spans = vec![none; program.ops.len()];
    // By unit, the next one last; and what of the host's nobody in this iteration waits for.
    let mut queues: PerUnit<Vec<usize>> = PerUnit::default();
    let mut apart: Vec<usize> = Vec::new();
    for (i, op) in program.ops.iter().enumerate().rev() {
        match op.detached {
            true => apart.push(i),
            false => queues[op.unit].push(i),
        }
    }
    let mut free = PerUnit::from_fn(|unit| {
        let from = if unit == Unit::Host { backlog } else { begin };
        from + costs.before(program, unit)
    });
    let (mut joined, mut stay) = (Vec::new(), HashSet::new());
    // When the device has begun the layer that it is at.
    let mut begun = (None, 0.0);
    let mut joins: HashMap<u8, usize> = HashMap::new();
    if program.flow == Flow::Async {
        let all = program.ops.iter().enumerate().filter(|(_, op)| op.kind == Kind::Join);
        joins.extend(all.map(|(i, op)| (op.sub_batch, i)));
    }
    // When everything that an operation waits for is done, once all of it has been placed.
    let ready = |spans: &[OpSpan], op: usize| -> Option<f64> {
        // Nothing of a cohort before it is known whether it joins.
        let of = &program.ops[op];
        let join = match program.is_of_cohort(of) {
            true => joins.get(&of.sub_batch).filter(|&&j| j != op),
            false => None,
        };
        waits[op].iter().chain(join).try_fold(0.0f64, |t, &w| {
            let end = spans[w].end;
            (!end.is_nan()).then_some(t.max(end))
        })
    };
    let mut left = program.ops.len();
    while left > 0 {
        let before = left;
        for unit in Unit::ALL {
            loop {
                let next = match unit {
                    // In order.
                    Unit::Gpu | Unit::H2d | Unit::D2h => {
                        let queue = &queues[unit];
                        queue.last().and_then(|&op| Some((queue.len() - 1, op, ready(&spans, op)?)))
                    }
                    // The oldest of those that are ready when the workers are free, or else the first to become so. Only
                    // operations whose predecessors all have a time can be judged: the oldest others may still
                    // come first, so the search ends at the first of them, but for those of cohorts, which come last.
                    Unit::Host => {
                        let earlier = |best: Option<(usize, usize, f64)>, c: (usize, usize, f64)| match best {
                            Some(b) if b.2.max(free[unit]) <= c.2.max(free[unit]) => Some(b),
                            _ => Some(c),
                        };
                        let first = |best, queue: &[usize]| {
                            let known = queue.iter().enumerate().rev();
                            known
                                .map_while(|(at, &op)| Some((at, op, ready(&spans, op)?)))
                                .fold(best, earlier)
                        };
                        first(first(None, &queues[unit]), &apart)
                    }
                };
                let Some((at, i, ready)) = next else { break };
                let op = &program.ops[i];
                let detached = op.detached;
                let queue = if detached { &mut apart } else { &mut queues[unit] };
                queue.remove(at);
                left -= 1;
                if program.is_of_cohort(op) && stay.contains(&op.sub_batch) {
                    let t = spans[joins[&op.sub_batch]].end;
                    spans[i] = OpSpan { op: i, unit, start: t, end: t, detached };
                    continue;
                }
                let start = ready.max(free[unit]);
                if unit == Unit::Gpu && op.layer != begun.0 && op.kind != Kind::Join {
                    begun = (op.layer, start);
                }
                if op.kind == Kind::Join {
                    // Without rows of the device's own nothing is ahead of it.
                    let looked = if begun.0 == op.layer { begun.1 } else { free[unit] };
                    match ready_at(op.sub_batch) <= looked {
                        true => joined.push(op.sub_batch),
                        false => {
                            stay.insert(op.sub_batch);
                        }
                    }
                    spans[i] = OpSpan { op: i, unit, start: free[unit], end: free[unit], detached };
                    continue;
                }
                let end = start + takes(i);
                spans[i] = OpSpan { op: i, unit, start, end, detached };
                free[unit] = end;
            }
        }
        // Waits point backwards in the program, so the earliest operation left can always be placed.
        assert!(left < before, "operations wait for each other in a circle");
    }
    (Timeline { spans, after: costs.after(program) }, joined)
}
