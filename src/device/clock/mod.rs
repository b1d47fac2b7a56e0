//! Emulated time: when things would have happened on a machine of given speed.
//!
//! ```text
//! control thread   issue ─ issue ─ issue ─ wait for an event ────────────┐ now = when the event was passed
//! lane             │ start = max(lane free, events waited for, issued) │ end = start + modelled seconds
//! host's workers   the oldest operation that is ready, with all of them; cohorts' behind the others'
//! ```
//! A logical clock (docs/decisions/0017): nothing sleeps. Work runs for real, in the order of real events, and its *times* are
//! computed from what was issued. So they are the same in every run and do not depend on how fast this computer is.
//!
//! One thread at a time is the control thread: its time is [`Clock::now`]. It goes on when the thread issues something (by
//! what issuing costs) and when it waits (to the time at which what it waited for was done). What it computes itself between
//! takes no time. Threads that only do work for others say so ([`uncounted`]): their waits are no waits of the control thread.
//!
//! Times are found when somebody asks: until then operations are kept in their lanes. That makes the host's choice, the
//! oldest operation that is ready, exact: it is made when everything is known that the control thread could have issued by then.

mod rates;

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

pub use self::rates::{Rates, Work};
use super::lane::Lane;

/// Lanes of the device, then that of the host's workers.
const LANES: usize = Lane::ALL.len() + 1;
const HOST: usize = LANES - 1;

thread_local! {
    static UNCOUNTED: Cell<bool> = const { Cell::new(false) };
}

/// From now on, waits of the calling thread are no waits of the control thread: it works for others, whose clock they
/// would advance.
pub fn uncounted() {
    UNCOUNTED.with(|u| u.set(true));
}

/// Whether waits of the calling thread are the control thread's.
pub fn counts() -> bool {
    !UNCOUNTED.with(Cell::get)
}

/// When something happened: known once all it depends on is.
#[derive(Clone, Default)]
pub struct Moment(Arc<OnceLock<(f64, f64)>>);

impl Moment {
    /// When it began and ended, in seconds, if that is known.
    pub fn span(&self) -> Option<(f64, f64)> {
        self.0.get().copied()
    }

    fn end(&self) -> Option<f64> {
        self.span().map(|(_, end)| end)
    }
}

/// Something in a lane whose time is not known yet.
struct Entry {
    seconds: f64,
    issued: f64,
    after: Vec<Moment>,
    moment: Moment,
    /// Of the host's: whether it goes before others that are ready.
    first: bool,
}

impl Entry {
    /// When everything before it is done, but for its lane.
    fn ready(&self) -> Option<f64> {
        self.after.iter().try_fold(self.issued, |t, m| m.end().map(|end| t.max(end)))
    }
}

#[derive(Default)]
struct State {
    now: f64,
    /// When each lane has done what is known of it.
    free: [f64; LANES],
    lanes: [VecDeque<Entry>; LANES],
    /// Seconds that each lane worked, as far as they are known.
    busy: [f64; LANES],
}

/// See the [module](self).
pub struct Clock {
    rates: Rates,
    state: Mutex<State>,
}

impl Clock {
    /// At time 0, of a machine of this speed.
    pub fn new(rates: Rates) -> Clock {
        Clock { rates, state: Mutex::default() }
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

    /// Seconds that the lanes of the device (in the order of [`Lane::ALL`]) and the host's workers have worked, of what is known.
    pub fn busy(&self) -> [f64; LANES] {
        self.lock().busy
    }

    /// The control thread works for so long, or lets the time pass.
    pub fn spend(&self, seconds: f64) {
        self.lock().now += seconds;
    }

    /// An operation of the given duration (seconds) on a lane of the device.
    pub fn enqueue(&self, lane: Lane, seconds: f64) -> Moment {
        self.lock().push(lane as usize, seconds, vec![])
    }

    /// A point in a lane: everything enqueued on it before is done.
    pub fn record(&self, lane: Lane) -> Moment {
        self.enqueue(lane, 0.0)
    }

    /// Later work of `lane` comes after `moment`.
    pub fn wait(&self, lane: Lane, moment: &Moment) {
        self.lock().push(lane as usize, 0.0, vec![moment.clone()]);
    }

    /// An operation of the host's workers, of so many seconds, once all of `after` is done. Of those that are ready, the
    /// workers take the one that was issued first, of those that come `first` if there is one.
    pub fn host(&self, seconds: f64, after: Vec<Moment>, first: bool) -> Moment {
        let mut state = self.lock();
        let moment = state.push(HOST, seconds, after);
        state.lanes[HOST].back_mut().expect("just pushed").first = first;
        moment
    }

    /// The control thread waits for `moment`. Of another thread nothing happens.
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

    /// Whether the control thread's time is past `moment`. Asking costs it the time of a launch, or a microsecond: a loop that
    /// asks goes on.
    pub fn is_past(&self, moment: &Moment) -> bool {
        let mut state = self.lock();
        let now = state.now;
        state.advance(moment, now);
        let past = moment.end().is_some_and(|end| end <= now);
        if !past {
            state.now += self.rates.device.launch.max(1e-6);
        }
        past
    }
}

impl State {
    fn push(&mut self, lane: usize, seconds: f64, after: Vec<Moment>) -> Moment {
        debug_assert!(seconds.is_finite() && seconds >= 0.0, "{seconds} s of work");
        let moment = Moment::default();
        let issued = self.now;
        self.lanes[lane].push_back(Entry { seconds, issued, after, moment: moment.clone(), first: true });
        moment
    }

    /// Finds times until that of `moment` is known, of the host's operations only those that begin by `limit`: later ones may
    /// have to give way to some that are not issued yet.
    fn advance(&mut self, moment: &Moment, limit: f64) {
        loop {
            while self.device_lanes() {}
            if moment.end().is_some() || !self.host_lane(limit) {
                return;
            }
        }
    }

    /// Work of in-order lanes whose predecessors are known; whether there was any.
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

    /// The host's next operation, if it begins by `limit`: of those whose predecessors are known, the one that can begin
    /// first; of several, one that goes first, and the oldest of these. Others wait for one of them, and begin later.
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
        let end = start + entry.seconds;
        self.free[lane] = end;
        self.busy[lane] += entry.seconds;
        assert!(entry.moment.0.set((start, end)).is_ok(), "a time is found once");
    }
}

#[cfg(test)]
mod tests;
