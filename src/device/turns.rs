//! Turns: work that would have its own threads runs on the waiting thread instead, one action at a time, in an order
//! derived from a seed.
//!
//! With threads, an interleaving happens by chance and cannot be repeated. Here the lanes of the emulated accelerator and the host's lane
//! are [`Actor`]s: a waiting thread lets them act until its condition holds, and each call that enqueues lets some of
//! them act. So a seed determines an interleaving, the same in every run, and no time is lost waking threads. If a
//! thread waits and no actor can act, that is a deadlock, detected at once.
//!
//! Effects of real threads (spinning, parking, memory ordering) are not covered; tests with threads and the model
//! checker (`loom/`) cover those.
//!
//! refs   Zhou et al., FoundationDB (SIGMOD 2021), §4: deterministic simulation; Burckhardt et al. 2010 (priorities by chance)

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// A participant that acts in turn.
pub trait Actor: Send + Sync {
    /// Performs one action; `draw(n)` returns a number below `n`. Returns whether there was anything to do. Must not
    /// wait.
    fn act(&self, draw: &mut dyn FnMut(usize) -> usize) -> bool;
}

/// SplitMix64 (Steele, Lea & Flood 2014).
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// An actor and its relative frequency of acting. 0: only if no other can.
struct Seat {
    actor: Weak<dyn Actor>,
    pace: usize,
}

#[derive(Default)]
struct Table {
    random: u64,
    seats: Vec<Seat>,
    /// How many of 8 chances to act are used while no thread waits.
    eager: usize,
    /// Seats that have not been tried yet.
    left: Vec<usize>,
}

impl Table {
    fn below(&mut self, n: usize) -> usize {
        (next(&mut self.random) % n.max(1) as u64) as usize
    }

    fn pace(&mut self) -> usize {
        [0, 1, 1, 4, 16][self.below(5)]
    }

    /// Lets one actor act. Returns whether any could.
    fn one(&mut self) -> bool {
        let mut left = std::mem::take(&mut self.left);
        left.clear();
        left.extend(0..self.seats.len());
        let acted = self.one_of(&mut left);
        self.left = left;
        acted
    }

    fn one_of(&mut self, left: &mut Vec<usize>) -> bool {
        while !left.is_empty() {
            let sum: usize = left.iter().map(|&i| self.seats[i].pace).sum();
            let mut at = self.below(if sum == 0 { left.len() } else { sum });
            let chosen = left.iter().position(|&i| {
                let weight = if sum == 0 { 1 } else { self.seats[i].pace };
                let here = at < weight;
                at = at.saturating_sub(weight);
                here
            });
            let i = left.swap_remove(chosen.expect("one of them"));
            let Some(actor) = self.seats[i].actor.upgrade() else { continue };
            if actor.act(&mut |n| self.below(n)) {
                return true;
            }
        }
        false
    }
}

/// See the [module](self). One thread at a time may wait.
#[derive(Default)]
pub struct Turns {
    table: Mutex<Table>,
    /// Set while an actor acts; calls that it makes let no other actor act.
    busy: AtomicBool,
    taken: AtomicU64,
}

struct Busy<'a>(&'a AtomicBool);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Turns {
    /// Turns in the order of this seed.
    pub fn new(seed: u64) -> Arc<Turns> {
        let turns = Turns::default();
        turns.begin(seed);
        Arc::new(turns)
    }

    /// Restarts with the order of this seed, which also decides which actors are quick and which are slow.
    pub fn begin(&self, seed: u64) {
        let mut table = self.table();
        table.random = seed;
        table.eager = [0, 1, 4, 7][table.below(4)];
        for i in 0..table.seats.len() {
            table.seats[i].pace = table.pace();
        }
        self.taken.store(0, Ordering::Relaxed);
    }

    /// Adds an actor, which takes part as long as it lives.
    pub fn add(&self, actor: Weak<dyn Actor>) {
        let mut table = self.table();
        table.seats.retain(|s| s.actor.strong_count() > 0);
        let pace = table.pace();
        table.seats.push(Seat { actor, pace });
    }

    /// Number of actions since the seed was set, equal in identical runs.
    pub fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Lets one actor act, for a caller that waits. Returns whether any could.
    ///
    /// # Panics
    /// If called by an actor that is acting.
    pub fn one(&self) -> bool {
        let busy = self.enter().expect("somebody waits who acts");
        let acted = self.table().one();
        self.taken.fetch_add(u64::from(acted), Ordering::Relaxed);
        drop(busy);
        acted
    }

    /// Lets some actors act, or none, for a caller that does not wait.
    pub fn some(&self) {
        let Some(busy) = self.enter() else { return };
        let mut table = self.table();
        while table.below(8) < table.eager && table.one() {
            self.taken.fetch_add(1, Ordering::Relaxed);
        }
        drop(table);
        drop(busy);
    }

    fn enter(&self) -> Option<Busy<'_>> {
        let free = self.busy.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok();
        free.then_some(Busy(&self.busy))
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Acts a given number of times and notes when.
    struct Counter(u8, Mutex<usize>, Arc<Mutex<Vec<u8>>>);

    impl Actor for Counter {
        fn act(&self, draw: &mut dyn FnMut(usize) -> usize) -> bool {
            assert!(draw(3) < 3);
            let mut left = self.1.lock().unwrap();
            let acts = *left > 0;
            *left -= usize::from(acts);
            if acts {
                self.2.lock().unwrap().push(self.0);
            }
            acts
        }
    }

    fn run(seed: u64) -> (Vec<u8>, u64) {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let actors: Vec<Arc<dyn Actor>> =
            (0..3).map(|i| Arc::new(Counter(i, Mutex::new(20), seen.clone())) as Arc<dyn Actor>).collect();
        let turns = Turns::default();
        actors.iter().for_each(|a| turns.add(Arc::downgrade(a)));
        turns.begin(seed);
        turns.some();
        while turns.one() {}
        turns.some();
        let seen = seen.lock().unwrap().clone();
        (seen, turns.taken())
    }

    #[test]
    fn a_seed_is_an_order_and_all_that_can_act_do() {
        let orders: std::collections::BTreeSet<Vec<u8>> = (0..50)
            .map(|seed| {
                let (order, taken) = run(seed);
                assert_eq!((order.len(), taken), (60, 60));
                assert_eq!(run(seed).0, order);
                order
            })
            .collect();
        assert!(orders.len() > 45, "{} orders of 50 seeds", orders.len());
        // Some slow actor comes last.
        assert!(orders.iter().any(|o| o[40..].iter().all(|&i| i == o[40])));
    }
}
