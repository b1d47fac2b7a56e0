//! How long an iteration takes on a described machine, and which host work outlasts it.
//!
//! ```text
//! serial, two lanes   the program on the virtual machine, its moves included
//! asynchronous        gpu   │ sub-batch 0: layer 0 … layer l │ cohort: post(l), pre(l+1) │ layer l+1 … head │
//!                     host  │ … attention of cohorts, oldest first, over the ends of iterations …           │
//! ```
//! A cohort that waits for layer l joins if its attention is done when the device begins layer l; if not, it stays parked for
//! a whole iteration. The device never waits for it, unless there is nothing else to do.

use std::collections::HashMap;

use super::cohorts::{self, Joined};
use crate::Result;
use crate::plan::Predictor;
use crate::plan::Seconds;
use crate::program::virtual_machine::Carried;
use crate::program::{CopySpans, Flow, Group, Iteration, MoveRequest, RequestId, SubBatch, Unit};
use crate::sched::Predict;

/// What an iteration took.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Lap {
    /// Seconds from its start to the start of the next.
    pub seconds: f64,
    /// Seconds that the GPU, the CPU and the link (each direction) worked for it: some of the CPU's after its end.
    pub gpu: f64,
    /// See `gpu`.
    pub cpu: f64,
    /// To the device.
    pub h2d: f64,
    /// To the host.
    pub d2h: f64,
    /// For each sub-batch, the layer whose attention it now waits for, as `Queues::commit` takes it.
    pub parked: Vec<Option<u32>>,
    /// Cohorts in it.
    pub cohorts: u32,
    /// Those of them that advanced.
    pub advanced: u32,
}

/// See the [module](self).
pub struct SimClock<'a> {
    predictor: &'a Predictor,
    /// When the CPU has done what it was given.
    host_free: f64,
    /// When the attention of each parked request is done.
    ready: HashMap<RequestId, f64>,
}

impl<'a> SimClock<'a> {
    /// A clock that runs by these predictions.
    pub fn new(predictor: &'a Predictor) -> SimClock<'a> {
        SimClock { predictor, host_free: 0.0, ready: HashMap::new() }
    }

    /// The host's work in flight at `now`.
    pub(super) fn carried(&self, now: f64) -> Carried {
        let left = |t: f64| (t - now).max(0.0);
        let cohorts = self.ready.iter().map(|(&id, &t)| (id, left(t))).collect();
        Carried { host: left(self.host_free), cohorts }
    }

    /// An iteration that begins at `now`, in seconds.
    ///
    /// # Errors
    /// An iteration that cannot be lowered.
    pub fn run(&mut self, iteration: &Iteration, now: f64) -> Result<Lap> {
        if iteration.flow == Flow::Async {
            return self.overlapped(iteration, now);
        }
        let t = self.predictor.seconds(iteration)?;
        let mut lap = lap(&t);
        if t.busy[Unit::Host] > 0.0 {
            // What the CPU still does for cohorts comes first: it takes the oldest.
            lap.seconds += (self.host_free - now).max(0.0);
            self.host_free = now + lap.seconds;
        }
        lap.parked = vec![None; iteration.sub_batches.len()];
        self.forget(iteration);
        Ok(lap)
    }

    /// CopySpans of whole requests, with nothing beside them.
    ///
    /// # Errors
    /// Moves that cannot be lowered.
    pub fn copies(&self, moves: Vec<MoveRequest>) -> Result<Lap> {
        if moves.is_empty() {
            return Ok(Lap::default());
        }
        let iteration =
            Iteration { sub_batches: Vec::new(), moves, flow: Flow::Serial, pick: false, top: false };
        Ok(lap(&self.predictor.seconds(&iteration)?))
    }

    fn forget(&mut self, iteration: &Iteration) {
        if !self.ready.is_empty() {
            iteration.sub_batches.iter().flat_map(|s| &s.groups).for_each(|g| {
                self.ready.remove(&g.request);
            });
        }
    }

    /// Asynchronous overlap.
    fn overlapped(&mut self, iteration: &Iteration, now: f64) -> Result<Lap> {
        let (first, parked) = iteration.sub_batches.split_first().expect("an iteration has a sub-batch");
        let t = match cohorts::resident(iteration) {
            Some(resident) => self.predictor.seconds(&resident)?,
            None => Seconds::default(),
        };
        let mut lap = lap(&t);
        lap.parked.push(None);
        let (layers, placement) = (self.predictor.layers(), self.predictor.placement());
        let when = |clock: &SimClock<'_>, batch: &SubBatch| match batch.at {
            None => 0.0,
            Some(_) => {
                let done = |g: &Group| clock.ready.get(&g.request).copied().unwrap_or(0.0);
                batch.groups.iter().map(done).fold(0.0, f64::max)
            }
        };
        let mut start = now;
        if t.busy[Unit::Host] > 0.0 {
            // Layers of the device's own rows that the host computes come behind what it still does for cohorts.
            start = start.max(self.host_free);
            self.host_free = start + t.busy[Unit::Host];
        }
        // With nothing else to do the device waits for the first cohort.
        if first.groups.is_empty() {
            let earliest = parked.iter().map(|b| when(self, b)).fold(f64::INFINITY, f64::min);
            if earliest.is_finite() {
                start = start.max(earliest);
            }
        }
        // Pages of this iteration move from its begin on; what is under way on the host is attention, which they slow down.
        let share = self.predictor.ask(|costs| costs.beside_copies());
        let copies = CopySpans::of([(start, start + lap.h2d.max(lap.d2h))]);
        let slowed = |t: f64| if t > start { copies.end(start, t - start, share) } else { t };
        self.host_free = slowed(self.host_free);
        self.ready.values_mut().for_each(|t| *t = slowed(*t));
        let mut extra = 0.0;
        // In the order in which the device comes by.
        let mut order: Vec<usize> = (0..parked.len()).filter(|&c| !parked[c].groups.is_empty()).collect();
        order.sort_by_key(|&c| parked[c].at.map_or(0, |l| placement.joins_behind(l) + 1));
        lap.parked.resize(1 + parked.len(), None);
        for c in order {
            let batch = &parked[c];
            lap.cohorts += 1;
            let through = |l: u32| f64::from(l) / f64::from(layers) * t.all;
            let looked = start + extra + batch.at.map_or(0.0, through);
            let here = start + extra + batch.at.map_or(0.0, |l| through(placement.joins_behind(l) + 1));
            if when(self, batch) > looked {
                lap.parked[1 + c] = batch.at;
                continue;
            }
            lap.advanced += 1;
            let Joined { gpu, link, experts, waits } = cohorts::joined(self.predictor, batch);
            // The device waits for the host's experts, which go before what nobody waits for.
            self.host_free += experts;
            lap.cpu += experts;
            let there = gpu + link + waits;
            extra += there;
            lap.gpu += gpu + link;
            lap.d2h += link;
            let Some(next) = placement.next_stop(batch.at) else {
                self.forget(&Iteration::serial(batch.groups.clone(), false));
                continue;
            };
            lap.parked[1 + c] = Some(next);
            let (attends, products) = cohorts::host_part(self.predictor, batch, next);
            let begin = self.host_free.max(here + there);
            self.host_free = copies.end(begin, attends, share) + products;
            lap.cpu += self.host_free - begin;
            for group in &batch.groups {
                self.ready.insert(group.request, self.host_free);
            }
        }
        lap.seconds = start - now + t.all + extra;
        Ok(lap)
    }
}

fn lap(t: &Seconds) -> Lap {
    let [gpu, h2d, d2h, cpu] = Unit::ALL.map(|unit| t.busy[unit]);
    Lap { seconds: t.all, gpu, cpu, h2d, d2h, ..Lap::default() }
}
