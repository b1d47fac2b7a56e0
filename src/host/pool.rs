//! A pool of threads that share out the chunks of one job at a time.
//!
//! * Chunks are claimed dynamically (one compare-and-swap each), so a core that is busy elsewhere
//!   takes fewer of them instead of delaying all threads.
//! * A job ends when its *chunks* are done, not when every thread has taken part: a worker that is descheduled while
//!   idle delays nothing.
//! * Workers spin for a short while after a job (the next one of a forward pass comes within
//!   microseconds), then park; while the pool waits actively ([`Pool::active_wait`]) they go on spinning.
//!
//! Which thread runs a chunk is left to chance; results must not depend on it. Every kernel here
//! writes disjoint outputs per chunk and reduces in a fixed order, so they do not.

use std::any::Any;
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use super::active_wait::{self, ActiveWait};
use super::cpu::Thread;

/// How long an idle worker spins before it parks. A forward pass leaves gaps of a few microseconds
/// between jobs and of some hundred between tokens (sampling, printing).
const SPIN: std::time::Duration = std::time::Duration::from_micros(300);

/// Spins of the leader between two looks at the clock-free done counter before it yields its core:
/// only reached when a worker was descheduled in the middle of a chunk.
const YIELD_AFTER: u32 = 20_000;

/// Most ranges that [`Pool::run_ranges`] and [`Pool::run_streams`] split a job into.
pub const MAX_RANGES: usize = 64;

/// Most chunks that [`Pool::run_streams`] hands out at a time: a thread that is held up in the middle of more would let the others wait.
const MAX_RUN: usize = 8;

/// The job type: `(chunk, worker)`.
type Job<'a> = dyn Fn(usize, usize) + Sync + 'a;

#[repr(align(128))]
struct Line<T>(T);

struct Shared {
    /// High 32 bits: job number. Low 32 bits: chunks not yet claimed.
    state: Line<AtomicU64>,
    /// Chunks finished in the current job.
    done: Line<AtomicUsize>,
    /// Workers that are parked or about to park.
    sleepers: Line<AtomicU32>,
    job: UnsafeCell<Option<(*const Job<'static>, usize)>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
    /// Whether idle workers are told not to park.
    active: Arc<active_wait::Deadline>,
}

// SAFETY: `job` is written only by the thread inside `Pool::run` (serialised by `Pool::busy`) while no
// chunk is claimable or in progress, and read only after a successful claim: see `claim`.
unsafe impl Sync for Shared {}
// SAFETY: the raw pointer in `job` is only dereferenced while the job it belongs to is in progress.
unsafe impl Send for Shared {}

impl Shared {
    /// Claims a chunk of the current job. The job cannot end, nor its data change, before the claimant
    /// reports it in `done`.
    fn claim(&self) -> Option<usize> {
        let mut s = self.state.0.load(Ordering::Relaxed);
        loop {
            let left = s as u32;
            if left == 0 {
                return None;
            }
            // The job number in the high half makes the exchange fail if the job has changed.
            match self.state.0.compare_exchange_weak(s, s - 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Some(left as usize),
                Err(now) => s = now,
            }
        }
    }

    /// Runs chunks until none is left to claim.
    fn work(&self, worker: usize) {
        while let Some(left) = self.claim() {
            // SAFETY: a chunk is claimed and not yet reported done, so the leader still waits in
            // `run`: the job is set, unchanging, and the closure it points to is alive.
            let (job, total) = unsafe { (*self.job.get()).expect("a claimable job is set") };
            // SAFETY: as above.
            let job = unsafe { &*job };
            if let Err(p) = catch_unwind(AssertUnwindSafe(|| job(total - left, worker))) {
                self.panic.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(p);
            }
            self.done.0.fetch_add(1, Ordering::Release);
        }
    }
}

/// Threads that run jobs together; the thread that calls [`Pool::run`] is worker 0.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held by the thread inside `run`; the thread that is pinned to `core`.
    busy: Mutex<Option<Thread>>,
    /// The core of worker 0, if workers are pinned.
    core: Option<core_affinity::CoreId>,
}

impl Pool {
    /// A pool of `threads` workers (at least one), the caller of [`Pool::run`] included, free to move
    /// between cores.
    pub fn new(threads: usize) -> Pool {
        Pool::build(threads, &[])
    }

    /// A pool over the cores that this process may use, each worker pinned to one of them. The calling thread is pinned
    /// to the first, until another one calls [`Pool::run`] or the pool is dropped. `threads` defaults to
    /// [`super::cpu::allowed_cores`], and is bounded by them: more threads would spin beside each other while the one with
    /// the last chunk waits for a core.
    pub fn pinned(threads: Option<usize>) -> Pool {
        let cores = super::cpu::cores();
        let allowed = super::cpu::allowed_cores();
        let threads = threads.unwrap_or(allowed).clamp(1, allowed);
        if threads > cores.len() {
            // Cores are not known; pinning would put two threads on one.
            return Pool::build(threads, &[]);
        }
        core_affinity::set_for_current(cores[0]);
        let mut pool = Pool::build(threads, &cores[..threads]);
        pool.core = Some(cores[0]);
        pool.busy = Mutex::new(Some(Thread::current()));
        pool
    }

    fn build(threads: usize, cores: &[core_affinity::CoreId]) -> Pool {
        let shared = Arc::new(Shared {
            state: Line(AtomicU64::new(0)),
            done: Line(AtomicUsize::new(0)),
            sleepers: Line(AtomicU32::new(0)),
            job: UnsafeCell::new(None),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
            active: Arc::default(),
        });
        let workers = (1..threads.max(1))
            .map_while(|w| {
                let shared = shared.clone();
                let core = cores.get(w).copied();
                std::thread::Builder::new()
                    .name(format!("tandem-{w}"))
                    .spawn(move || {
                        match core {
                            Some(core) => {
                                core_affinity::set_for_current(core);
                            }
                            // A thread begins on the cores of its parent, which another pool may have pinned to one.
                            None => super::cpu::unpin_current_thread(),
                        }
                        worker_loop(&shared, w)
                    })
                    // A limit on threads or memory (ulimit -u, -v): those that started do the work.
                    .ok()
            })
            .collect();
        Pool { shared, workers, busy: Mutex::new(None), core: None }
    }

    /// The switch that keeps idle workers from parking, for steps in which another device works between their jobs. Who switches it on
    /// leaves pinned workers their cores, if there are others.
    pub fn active_wait(&self) -> ActiveWait {
        let (shared, threads) = (self.shared.clone(), self.workers.iter().map(|w| w.thread().clone()));
        let threads: Vec<std::thread::Thread> = threads.collect();
        let wake = move || {
            if shared.sleepers.0.load(Ordering::SeqCst) > 0 {
                threads.iter().for_each(std::thread::Thread::unpark);
            }
        };
        let beside = match self.core {
            Some(_) => super::cpu::cores()[self.threads()..].to_vec(),
            None => Vec::new(),
        };
        ActiveWait::new(self.shared.active.clone(), Arc::new(wake), beside)
    }

    /// Number of threads that take part.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `f(chunk, worker)` for every chunk in `0..chunks`, each exactly once, lower chunks first,
    /// on any worker in `0..threads()`; returns when all are done. Calls from several threads take
    /// turns; a call from inside a job deadlocks (jobs do not nest).
    ///
    /// # Panics
    /// If `f` panicked in any chunk, after the others have ended.
    pub fn run(&self, chunks: usize, f: &(dyn Fn(usize, usize) + Sync)) {
        if chunks == 0 {
            return;
        }
        // Taken even if no worker is woken, since otherwise two callers would both be worker 0.
        let mut turn = self.busy.lock().unwrap_or_else(|e| e.into_inner());
        self.lead(&mut turn);
        if self.workers.is_empty() || chunks == 1 {
            for c in 0..chunks {
                f(c, 0);
            }
            return;
        }
        assert!(chunks <= u32::MAX as usize, "{chunks} chunks in one job");
        let shared = &*self.shared;
        // SAFETY: only the lifetime is erased; `run` does not return before every chunk is done, and
        // nothing dereferences the pointer without holding an unfinished chunk.
        let job: *const Job<'static> = unsafe { std::mem::transmute::<*const Job<'_>, _>(f) };
        // SAFETY: no chunk is claimable (the last job's counter is 0) and none is in progress (the
        // last `run` waited for them), so nothing reads `job` now; `busy` excludes other leaders.
        unsafe { *shared.job.get() = Some((job, chunks)) };
        shared.done.0.store(0, Ordering::Relaxed);
        let number = (shared.state.0.load(Ordering::Relaxed) >> 32).wrapping_add(1) as u32;
        // Sequentially consistent with the worker's `sleepers` increment and second read of `state`: either the worker
        // sees this job, or we see the sleeper.
        shared.state.0.store(((number as u64) << 32) | chunks as u64, Ordering::SeqCst);
        if shared.sleepers.0.load(Ordering::SeqCst) > 0 {
            for w in &self.workers {
                w.thread().unpark();
            }
        }
        shared.work(0);
        let mut spins = 0u32;
        while shared.done.0.load(Ordering::Acquire) < chunks {
            std::hint::spin_loop();
            spins += 1;
            if spins > YIELD_AFTER {
                std::thread::yield_now();
            }
        }
        let panic = shared.panic.lock().unwrap_or_else(|e| e.into_inner()).take();
        if let Some(p) = panic {
            resume_unwind(p);
        }
    }

    /// Makes the current thread worker 0: pins it, and unpins the previous one.
    fn lead(&self, leader: &mut Option<Thread>) {
        let Some(core) = self.core else { return };
        if leader.is_some_and(Thread::is_current) {
            return;
        }
        core_affinity::set_for_current(core);
        if let Some(before) = leader.replace(Thread::current()) {
            before.unpin();
        }
    }

    /// Like [`Pool::run`], but each worker starts on its own contiguous range and then helps with the others' ranges, and `f` is
    /// given several neighbouring chunks at a time, fewer as a range comes to its end. For chunks that stream memory: a core's
    /// prefetchers follow one long stream better than alternating pieces, and what a call of `f` costs is paid less often.
    pub fn run_streams(&self, chunks: usize, f: &(dyn Fn(Range<usize>, usize) + Sync)) {
        let ranges = self.threads().min(MAX_RANGES);
        if ranges == 1 {
            return self.run(chunks.min(1), &|_, worker| f(0..chunks, worker));
        }
        if chunks <= ranges {
            return self.run(chunks, &|c, worker| f(c..c + 1, worker));
        }
        let ends: [usize; MAX_RANGES] = std::array::from_fn(|i| (i + 1) * chunks / ranges);
        self.claim_ranges(&ends[..ranges], |left| (left / 4).clamp(1, MAX_RUN), f);
    }

    /// Like [`Pool::run`], but each worker starts on one of the ranges and then helps with the others: range `i` ends before chunk
    /// `ends[i]`, where the next one begins. A range's chunks start in order, also if other workers help.
    ///
    /// # Panics
    /// As [`Pool::run`]; if there are more than [`MAX_RANGES`].
    pub fn run_ranges(&self, ends: &[usize], f: &(dyn Fn(usize, usize) + Sync)) {
        if ends.last().is_none_or(|&chunks| chunks <= 1) {
            return self.run(ends.last().copied().unwrap_or(0), f);
        }
        self.claim_ranges(ends, |_| 1, &|chunks, worker| chunks.for_each(|c| f(c, worker)));
    }

    /// Runs `f` for the chunks of each range, as many at a time as `take` says for those that are left.
    fn claim_ranges(
        &self,
        ends: &[usize],
        take: impl Fn(usize) -> usize + Sync,
        f: &(dyn Fn(Range<usize>, usize) + Sync),
    ) {
        let ranges = ends.len();
        assert!(ranges <= MAX_RANGES, "{ranges} ranges in one job");
        // Only as many lines as there are ranges: writing all of them would take longer than a short job.
        let mut next = [const { MaybeUninit::<Line<AtomicUsize>>::uninit() }; MAX_RANGES];
        for (i, next) in next[..ranges].iter_mut().enumerate() {
            next.write(Line(AtomicUsize::new(if i == 0 { 0 } else { ends[i - 1] })));
        }
        // SAFETY: the first `ranges` elements have just been written, and MaybeUninit<T> is laid out as T.
        let next = unsafe { std::slice::from_raw_parts(next.as_ptr().cast::<Line<AtomicUsize>>(), ranges) };
        self.run(ranges, &|slot, worker| {
            for i in 0..ranges {
                let range = (slot + i) % ranges;
                let (next, end) = (&next[range].0, ends[range]);
                loop {
                    // Others may claim between these two: then there is less left than `take` was told.
                    let left = end.saturating_sub(next.load(Ordering::Relaxed));
                    if left == 0 {
                        break;
                    }
                    let count = take(left);
                    let from = next.fetch_add(count, Ordering::Relaxed);
                    if from >= end {
                        break;
                    }
                    f(from..(from + count).min(end), worker);
                }
            }
        });
    }

    /// [`Pool::run`] if `parallel`, otherwise the same chunks one after another on this thread: for work that may be
    /// too small to be worth waking workers.
    pub fn run_if(&self, parallel: bool, chunks: usize, f: &(dyn Fn(usize, usize) + Sync)) {
        if parallel {
            self.run(chunks, f);
        } else {
            (0..chunks).for_each(|c| f(c, 0));
        }
    }
}

fn worker_loop(shared: &Shared, worker: usize) {
    let mut idle_since = None::<std::time::Instant>;
    while !shared.stop.load(Ordering::Relaxed) {
        if shared.state.0.load(Ordering::Relaxed) as u32 > 0 {
            shared.work(worker);
            idle_since = None;
            continue;
        }
        for _ in 0..64 {
            if shared.state.0.load(Ordering::Relaxed) as u32 > 0 {
                break;
            }
            std::hint::spin_loop();
        }
        let since = *idle_since.get_or_insert_with(std::time::Instant::now);
        if since.elapsed() > SPIN && !shared.active.is_on() {
            shared.sleepers.0.fetch_add(1, Ordering::SeqCst);
            let told = shared.stop.load(Ordering::SeqCst) || shared.active.is_on();
            if shared.state.0.load(Ordering::SeqCst) as u32 == 0 && !told {
                std::thread::park();
            }
            shared.sleepers.0.fetch_sub(1, Ordering::SeqCst);
            idle_since = None;
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for w in self.workers.drain(..) {
            w.thread().unpark();
            let _ = w.join();
        }
        if let Some(leader) = self.busy.get_mut().unwrap_or_else(|e| e.into_inner()).take() {
            leader.unpin();
        }
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pool({} threads)", self.threads())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn every_chunk_runs_once() {
        for threads in [1, 2, 3, 5] {
            let pool = Pool::new(threads);
            for chunks in [0, 1, 2, 3, 17, 1000] {
                let hits: Vec<AtomicUsize> = (0..chunks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(chunks, &|c, w| {
                    assert!(w < threads);
                    hits[c].fetch_add(1, Ordering::Relaxed);
                });
                assert!(
                    hits.iter().all(|h| h.load(Ordering::Relaxed) == 1),
                    "{threads} threads, {chunks} chunks"
                );
            }
        }
    }

    #[test]
    fn streams_run_every_chunk_once_in_runs_of_neighbours() {
        for threads in [1, 2, 3, 5] {
            let pool = Pool::new(threads);
            for chunks in [0, 1, 2, 3, 17, 1000] {
                let hits: Vec<AtomicUsize> = (0..chunks).map(|_| AtomicUsize::new(0)).collect();
                let calls = AtomicUsize::new(0);
                pool.run_streams(chunks, &|run, w| {
                    assert!(w < threads && run.start < run.end, "worker {w}, {run:?}");
                    assert!(threads == 1 || run.len() <= MAX_RUN, "{run:?}");
                    calls.fetch_add(1, Ordering::Relaxed);
                    for c in run {
                        hits[c].fetch_add(1, Ordering::Relaxed);
                    }
                });
                assert!(
                    hits.iter().all(|h| h.load(Ordering::Relaxed) == 1),
                    "{threads} threads, {chunks} chunks"
                );
                assert!(chunks < 1000 || calls.into_inner() < 400, "neighbours run together");
            }
        }
    }

    #[test]
    fn callers_take_turns_for_a_job_of_one_chunk_too() {
        for (threads, chunks) in [(2, 1), (1, 3)] {
            let (pool, inside) = (Pool::new(threads), AtomicUsize::new(0));
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        for _ in 0..20 {
                            pool.run(chunks, &|_, worker| {
                                assert_eq!(worker, 0);
                                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two are worker 0");
                                std::thread::sleep(std::time::Duration::from_micros(200));
                                inside.fetch_sub(1, Ordering::SeqCst);
                            });
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn a_free_pool_of_a_pinned_thread_has_all_cores() {
        let all = crate::host::cpu::cores();
        if all.len() < 2 {
            println!("skipped: one core only");
            return;
        }
        std::thread::spawn(move || {
            core_affinity::set_for_current(all[0]);
            let (pool, met) = (Pool::new(3), std::sync::Barrier::new(3));
            pool.run(3, &|_, worker| {
                // All three are here, so each has one chunk.
                met.wait();
                let mine = core_affinity::get_core_ids().map_or(0, |cores| cores.len());
                assert_eq!(mine, if worker == 0 { 1 } else { all.len() }, "worker {worker}");
            });
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_pool_that_moves_to_another_thread_lets_its_builder_go() {
        let all = crate::host::cpu::cores().len();
        if all < 2 {
            println!("skipped: one core only");
            return;
        }
        let mine = || core_affinity::get_core_ids().map_or(0, |cores| cores.len());
        for runs in [true, false] {
            // Before the pool: threads start with their parent's cores.
            let (sender, pools) = std::sync::mpsc::channel::<Pool>();
            let other = std::thread::spawn(move || {
                let pool = pools.recv().unwrap();
                if runs {
                    pool.run(3, &|_, _| ());
                    assert_eq!(mine(), 1, "the new caller is pinned instead");
                }
                drop(pool);
                assert_eq!(mine(), all, "and let go with the pool");
            });
            let pool = Pool::pinned(Some(2));
            assert_eq!(mine(), 1, "pinned with the pool");
            sender.send(pool).unwrap();
            other.join().unwrap();
            assert_eq!(mine(), all, "the builder is free; the other thread ran jobs: {runs}");
        }
    }

    #[test]
    fn every_chunk_of_every_range_runs_once() {
        for threads in [1, 2, 3] {
            let pool = Pool::new(threads);
            for ends in [&[][..], &[0], &[1], &[0, 1], &[5, 5, 9], &[0, 0, 4, 4], &[7, 1000]] {
                let chunks = ends.last().copied().unwrap_or(0);
                let hits: Vec<AtomicUsize> = (0..chunks).map(|_| AtomicUsize::new(0)).collect();
                pool.run_ranges(ends, &|c, w| {
                    assert!(w < threads);
                    hits[c].fetch_add(1, Ordering::Relaxed);
                });
                assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1), "{threads} threads, {ends:?}");
            }
        }
    }

    #[test]
    fn many_short_jobs_with_sleeps_between() {
        let pool = Pool::new(4);
        let total = AtomicUsize::new(0);
        for i in 0..2000 {
            pool.run(7, &|_, _| {
                total.fetch_add(1, Ordering::Relaxed);
            });
            if i % 500 == 0 {
                std::thread::sleep(2 * SPIN);
            }
        }
        assert_eq!(total.load(Ordering::Relaxed), 14_000);
    }

    /// Jobs that come when workers would have parked find them spinning, on cores of their own.
    #[test]
    fn workers_that_wait_actively_do_not_park() {
        let pool = Pool::new(2);
        let active_wait = pool.active_wait();
        let parked = || pool.shared.sleepers.0.load(Ordering::SeqCst) > 0;
        let within = |limit: std::time::Duration, what: &dyn Fn() -> bool| {
            let since = std::time::Instant::now();
            while !what() && since.elapsed() < limit {
                std::thread::yield_now();
            }
            what()
        };
        let long = std::time::Duration::from_secs(20);
        assert!(within(long, &parked), "idle workers park");
        active_wait.begin(long);
        assert!(within(long, &|| !parked()), "active_wait wakes them");
        assert!(!within(20 * SPIN, &parked), "and keeps them awake");
        active_wait.end();
        assert!(within(long, &parked), "then they park again");
        let hits = AtomicUsize::new(0);
        pool.run(8, &|_, _| {
            hits.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(hits.into_inner(), 8);
    }

    #[test]
    fn a_panic_in_a_chunk_reaches_the_caller_and_the_pool_survives() {
        let pool = Pool::new(2);
        let r = catch_unwind(AssertUnwindSafe(|| pool.run(10, &|c, _| assert!(c != 5, "chunk five"))));
        assert!(r.is_err());
        let n = AtomicUsize::new(0);
        pool.run(10, &|_, _| {
            n.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(n.into_inner(), 10);
    }
}
