//! Emulated time: when things would have happened on a machine of given speed.
//!
//! ```text
//! control thread   issue ─ issue ─ issue ─ wait for an event ────────────┐ now = when the event was passed
//! lane             │ start = max(lane free, events waited for, issued) │ end = start + modelled seconds
//! host's workers   the oldest operation that is ready, with all of them; cohorts' behind the others'
//! ```
//! This is a logical clock (docs/decisions/0017): nothing sleeps. Work runs for real, in the order of real events, and
//! its *times* are computed from what was issued. So times are the same in every run and do not depend on the speed of
//! this computer.
//!
//! One thread at a time is the control thread: its time is [`Clock::now`]. The time advances when the thread issues an
//! operation (by the cost of issuing) and when it waits (to the end of what it waited for). Its own computation in
//! between takes no time. Threads that only work for others call [`uncount_waits`]: their waits do not count as the control
//! thread's.
//!
//! Times are computed on request; until then operations stay in their lanes. That makes the host's choice, the oldest
//! ready operation, exact: it is made when everything that the control thread could have issued by then is known.

mod contention;
mod rates;

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

pub use self::contention::CopySpans;
pub use self::rates::{Rates, Work};
use super::lane::Lane;

/// The device's lanes, plus one for the host's workers.
const LANES: usize = Lane::ALL.len() + 1;
const HOST: usize = LANES - 1;

thread_local! {
    static UNCOUNTED: Cell<bool> = const { Cell::new(false) };
}

/// Stops counting the calling thread's waits as the control thread's. For threads that work for others: their waits
/// would advance the others' clock.
pub fn uncount_waits() {
    UNCOUNTED.with(|u| u.set(true));
}

/// Whether waits of the calling thread count as the control thread's.
pub fn counts() -> bool {
    !UNCOUNTED.with(Cell::get)
}

/// When an operation ran; known once the times of everything it depends on are known.
#[derive(Clone, Default)]
pub struct Moment(Arc<OnceLock<(f64, f64)>>);

impl Moment {
    /// Its begin and end in seconds, if known.
    pub fn span(&self) -> Option<(f64, f64)> {
        self.0.get().copied()
    }

    fn end(&self) -> Option<f64> {
        self.span().map(|(_, end)| end)
    }
}

/// An operation in a lane whose time is not known yet.
struct Entry {
    seconds: f64,
    issued: f64,
    after: Vec<Moment>,
    moment: Moment,
    /// For the host's operations: whether this one goes before others that are ready, and whether it is attention, which copies
    /// over the link slow down.
    first: bool,
    attends: bool,
}

impl Entry {
    /// When all its predecessors are done, disregarding its lane.
    fn ready(&self) -> Option<f64> {
        self.after.iter().try_fold(self.issued, |t, m| m.end().map(|end| t.max(end)))
    }
}

#[derive(Default)]
struct State {
    now: f64,
    /// When each lane finishes its known operations.
    free: [f64; LANES],
    lanes: [VecDeque<Entry>; LANES],
    /// Seconds of known work of each lane.
    busy: [f64; LANES],
    /// When copies over the link run, as far as it matters for the host's next operation.
    copies: CopySpans,
    /// The share of its rate that attention on the host keeps beside them.
    share: f64,
}

/// See the [module](self).
pub struct Clock {
    rates: Rates,
    state: Mutex<State>,
}

impl Clock {
    /// A clock at time 0 for a machine of this speed.
    pub fn new(rates: Rates) -> Clock {
        let state = State { share: rates.beside_copies, ..State::default() };
        Clock { rates, state: Mutex::new(state) }
    }

    /// The machine's speed.
    pub fn rates(&self) -> &Rates {
        &self.rates
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The control thread's time, in seconds since the clock was made.
    pub fn now(&self) -> f64 {
        self.lock().now
    }

    /// Seconds of known work of the device's lanes (in the order of [`Lane::ALL`]) and of the host's workers.
    pub fn busy(&self) -> [f64; LANES] {
        self.lock().busy
    }

    /// Advances the control thread's time by `seconds` of work or idling.
    pub fn spend(&self, seconds: f64) {
        self.lock().now += seconds;
    }

    /// Enqueues an operation of the given duration (seconds) on a lane of the device.
    pub fn enqueue(&self, lane: Lane, seconds: f64) -> Moment {
        self.lock().push(lane as usize, seconds, vec![])
    }

    /// A point in a lane: reached when everything enqueued on the lane before is done.
    pub fn record(&self, lane: Lane) -> Moment {
        self.enqueue(lane, 0.0)
    }

    /// Makes later work of `lane` start after `moment`.
    pub fn wait(&self, lane: Lane, moment: &Moment) {
        self.lock().push(lane as usize, 0.0, vec![moment.clone()]);
    }

    /// Enqueues an operation of the given duration (seconds) for the host's workers, ready once all of `after` is done.
    /// Among ready operations, the workers prefer those with `first`, then the one that was issued earliest. One that `attends` takes
    /// longer beside copies over the link, as far as they have been issued when its time is asked for.
    pub fn host(&self, seconds: f64, after: Vec<Moment>, first: bool, attends: bool) -> Moment {
        let mut state = self.lock();
        let moment = state.push(HOST, seconds, after);
        let entry = state.lanes[HOST].back_mut().expect("just pushed");
        (entry.first, entry.attends) = (first, attends);
        moment
    }

    /// Makes the control thread wait for `moment`. On another thread this does nothing.
    pub fn reach(&self, moment: &Moment) {
        if !counts() {
            return;
        }
        let mut state = self.lock();
        state.advance(moment, f64::INFINITY);
        let end = moment.end().expect("a moment of this clock: what it waits for was issued before it");
        state.now = state.now.max(end);
    }

    /// When `moment` ends, in seconds, if nothing is issued before that.
    pub fn end(&self, moment: &Moment) -> f64 {
        let mut state = self.lock();
        state.advance(moment, f64::INFINITY);
        moment.end().expect("a moment of this clock: what it waits for was issued before it")
    }

    /// Whether the control thread's time is past `moment`. Each call costs it the time of a launch, or a microsecond,
    /// so that a polling loop ends.
    pub fn is_past(&self, moment: &Moment) -> bool {
        let mut state = self.lock();
        let now = state.now;
        state.advance(moment, now);
        let past = moment.end().is_some_and(|end| end <= now);
        if !past {
            state.now += self.rates.device.issue.max(1e-6);
        }
        past
    }
}

impl State {
    fn push(&mut self, lane: usize, seconds: f64, after: Vec<Moment>) -> Moment {
        debug_assert!(seconds.is_finite() && seconds >= 0.0, "{seconds} s of work");
        let moment = Moment::default();
        let issued = self.now;
        self.lanes[lane].push_back(Entry {
            seconds,
            issued,
            after,
            moment: moment.clone(),
            first: true,
            attends: false,
        });
        moment
    }

    /// Computes times until that of `moment` is known. Of the host's operations, it places only those that begin by
    /// `limit`: later ones may have to give way to operations that are not issued yet.
    fn advance(&mut self, moment: &Moment, limit: f64) {
        loop {
            while self.device_lanes() {}
            if moment.end().is_some() || !self.host_lane(limit) {
                return;
            }
        }
    }

    /// Places operations of the in-order lanes whose predecessors are known. Returns whether there was any.
    fn device_lanes(&mut self) -> bool {
        let mut found = false;
        for lane in 0..HOST {
            while let Some(ready) = self.lanes[lane].front().and_then(Entry::ready) {
                self.place(lane, 0, ready);
                found = true;
            }
        }
        found
    }

    /// Places the host's next operation, if it begins by `limit`: among those whose predecessors are known, the one
    /// that can begin earliest; among equals, one marked `first`, then the oldest. All other operations wait for one of
    /// these and begin later.
    fn host_lane(&mut self, limit: f64) -> bool {
        let free = self.free[HOST];
        let known = self.lanes[HOST].iter().enumerate();
        let known = known.filter_map(|(at, e)| Some((at, e.ready()?.max(free), !e.first)));
        let next = known.reduce(|best, c| if (c.1, c.2) < (best.1, best.2) { c } else { best });
        match next.filter(|&(_, start, _)| start <= limit) {
            Some((at, start, _)) => {
                self.place(HOST, at, start);
                true
            }
            None => false,
        }
    }

    fn place(&mut self, lane: usize, at: usize, ready: f64) {
        let entry = self.lanes[lane].remove(at).expect("it was found there");
        let start = ready.max(self.free[lane]);
        let end = match entry.attends {
            true => self.copies.end(start, entry.seconds, self.share),
            false => start + entry.seconds,
        };
        if lane == HOST {
            self.copies.forget(end);
        } else if lane != Lane::Compute as usize {
            if self.lanes[HOST].is_empty() {
                // Whatever the host is given begins from now on.
                self.copies.forget(self.now.max(self.free[HOST]));
            }
            self.copies.push(start, end);
        }
        self.free[lane] = end;
        self.busy[lane] += end - start;
        assert!(entry.moment.0.set((start, end)).is_ok(), "a time is found once");
    }
}

#[cfg(test)]
mod tests;
