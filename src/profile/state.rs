//! Whether the cores are ours alone at the moment.
//!
//! A virtual CPU is often a hyperthread beside a stranger's: loads from L1 fall by half and more, tile loads by more than
//! that (278 to 80 GB/s on a Sapphire Rapids), products no longer hide them, and the state changes within seconds. A time
//! says little without the state that it was taken in. So a short probe runs before and after each sample: a chain of dependent
//! operations (the clock, and time slices lost), loads from L1 (a busy sibling), tile loads from L1 where there is AMX. Samples
//! are sorted by how both probes compare with the best seen, and tile loads with those of a core that nobody shares as well, where
//! those are known: a stranger may stay for longer than we look.

use std::hint::black_box;
use std::sync::Mutex;
use std::time::Instant;

use super::Samples;
use super::bandwidth::sum;
use crate::host::Pool;
use crate::simd::{CpuId, Vendor};

/// Rates of one moment, each that of the slowest thread.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CoreProbe {
    /// Dependent steps (a multiplication and an addition) a second.
    pub chain: f64,
    /// Bytes a second that are loaded from L1.
    pub loads: f64,
    /// Bytes a second that tiles load from L1; `None` without AMX.
    pub tiles: Option<f64>,
}

/// How a moment compares with the best seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CoreState {
    /// All rates are within [`QUIET`] of the best.
    Quiet,
    /// A rate is below [`CONTENDED`] of the best.
    Contended,
    /// Neither, or the state changed meanwhile.
    Between,
}

/// Share of the best rates that a quiet moment has. On the machines seen, rates are either near the best or near half of it and below.
const QUIET: f64 = 0.8;

/// Share of a best rate below which the core is shared.
const CONTENDED: f64 = 0.65;

impl CoreProbe {
    /// Probes the threads of `pool` at the same time, some 20 µs.
    pub fn of(pool: &Pool) -> CoreProbe {
        let all = Mutex::new(Vec::with_capacity(pool.threads()));
        pool.run(pool.threads(), &|_, _| {
            let probe = CoreProbe::here();
            all.lock().expect("no panic holds it").push(probe);
        });
        let all = all.into_inner().expect("no panic holds it");
        all.into_iter().reduce(|a, b| a.each(b, f64::min)).unwrap_or_else(CoreProbe::here)
    }

    /// Probes this thread.
    fn here() -> CoreProbe {
        const STEPS: u64 = 4096;
        const PASSES: usize = 16;
        // A line more than the stack gives anyway; in L1 beside nothing else.
        let data = black_box([1u8; 16 << 10]);
        black_box(sum(&data));
        let begun = Instant::now();
        let mut x = black_box(1u64);
        for _ in 0..STEPS {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        }
        black_box(x);
        let chained = Instant::now();
        for _ in 0..PASSES {
            black_box(sum(black_box(&data)));
        }
        let loaded = chained.elapsed().as_secs_f64();
        CoreProbe {
            chain: STEPS as f64 / (chained - begun).as_secs_f64().max(1e-9),
            loads: (PASSES * data.len()) as f64 / loaded.max(1e-9),
            tiles: crate::amx::tile_loads(),
        }
    }

    fn each(self, other: CoreProbe, of: fn(f64, f64) -> f64) -> CoreProbe {
        CoreProbe {
            chain: of(self.chain, other.chain),
            loads: of(self.loads, other.loads),
            tiles: self.tiles.zip(other.tiles).map(|(a, b)| of(a, b)),
        }
    }

    /// The lowest share that a rate is of that in `best`, or of `alone`: bytes that tiles load for each step of the best chain.
    fn share(&self, best: &CoreProbe, alone: f64) -> f64 {
        let tiles = self.tiles.zip(best.tiles).map_or(1.0, |(a, b)| a / b.max(alone * best.chain));
        (self.chain / best.chain).min(self.loads / best.loads).min(tiles)
    }

    fn state(&self, best: &CoreProbe, alone: f64) -> CoreState {
        match self.share(best, alone) {
            s if s >= QUIET => CoreState::Quiet,
            s if s < CONTENDED => CoreState::Contended,
            _ => CoreState::Between,
        }
    }
}

/// Bytes that tiles load from L1 for each step of the chain, 4 cycles, on an unshared core: 250 GB/s at 2.83 GHz. A Sapphire
/// Rapids measured 278, and 80 to 120 beside a hyperthread that uses tiles; moments above 200 were its quiet ones. Zero where not
/// measured.
fn alone(cpu: &CpuId) -> f64 {
    match (cpu.vendor, cpu.family, cpu.model) {
        // Sapphire Rapids and Emerald Rapids, which has the same core.
        (Vendor::Intel, 6, 143 | 207) => 250.0 / 2.83 * 4.0,
        _ => 0.0,
    }
}

/// Tells states, by the best rates so far.
#[derive(Debug, Clone)]
pub struct Gauge {
    best: CoreProbe,
    alone: f64,
}

impl Gauge {
    /// Probes some hundred times for the best.
    pub fn new(pool: &Pool) -> Gauge {
        let best = (0..200).map(|_| CoreProbe::of(pool)).reduce(|a, b| a.each(b, f64::max));
        Gauge { best: best.unwrap_or_else(CoreProbe::here), alone: alone(CpuId::get()) }
    }

    /// The best rates seen.
    pub fn best(&self) -> &CoreProbe {
        &self.best
    }

    /// The state of a moment.
    pub fn judge(&mut self, probe: CoreProbe) -> CoreState {
        self.best = self.best.each(probe, f64::max);
        probe.state(&self.best, self.alone)
    }

    /// Seconds of `run`, which times itself, and the state before and after it.
    pub fn sample(&mut self, pool: &Pool, run: impl FnOnce() -> f64) -> (CoreState, f64) {
        let before = CoreProbe::of(pool);
        let seconds = run();
        let (before, after) = (self.judge(before), self.judge(CoreProbe::of(pool)));
        (if before == after { before } else { CoreState::Between }, seconds)
    }
}

/// Samples by state.
#[derive(Debug, Clone, Default)]
pub struct SortedSamples {
    quiet: Samples,
    contended: Samples,
    all: Samples,
}

impl SortedSamples {
    /// One more.
    pub fn push(&mut self, (state, seconds): (CoreState, f64)) {
        self.all.push(seconds);
        match state {
            CoreState::Quiet => self.quiet.push(seconds),
            CoreState::Contended => self.contended.push(seconds),
            CoreState::Between => {}
        }
    }

    /// The median of the state that most is known of, and its name with the number of its samples: `quiet 31`; of all samples if
    /// neither state has three.
    pub fn median(&self) -> (f64, String) {
        let (quiet, contended) = (self.quiet.len(), self.contended.len());
        if quiet >= 3 && quiet >= contended {
            (self.quiet.median(), format!("quiet {quiet}"))
        } else if contended >= 3 {
            (self.contended.median(), format!("contended {contended}"))
        } else {
            (self.all.median(), format!("mixed {}", self.all.len()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEST: CoreProbe = CoreProbe { chain: 1e9, loads: 2e11, tiles: Some(3e11) };

    #[test]
    fn the_slowest_rate_tells_the_state() {
        let with = |chain, loads, tiles| CoreProbe { chain, loads, tiles };
        assert_eq!(with(0.95e9, 1.9e11, Some(2.9e11)).state(&BEST, 0.0), CoreState::Quiet);
        assert_eq!(with(0.95e9, 1.9e11, Some(0.8e11)).state(&BEST, 0.0), CoreState::Contended);
        assert_eq!(with(0.95e9, 1.0e11, None).state(&BEST, 0.0), CoreState::Contended);
        assert_eq!(with(0.7e9, 1.9e11, Some(2.9e11)).state(&BEST, 0.0), CoreState::Between);
    }

    /// Another program that ran from the first probe to the last.
    #[test]
    fn a_state_that_never_changes_is_told_where_a_core_is_known() {
        let at = |clock: f64, tiles| CoreProbe { chain: clock / 4.0, tiles: Some(tiles), ..BEST };
        let rapids = |model| alone(&CpuId { vendor: Vendor::Intel, family: 6, model });
        for (clock, tiles, state) in [
            (2.83e9, 278e9, CoreState::Quiet),
            (2.83e9, 201e9, CoreState::Quiet),
            (2.83e9, 119e9, CoreState::Contended),
            (3.8e9, 373e9, CoreState::Quiet),
            (3.8e9, 108e9, CoreState::Contended),
        ] {
            let probe = at(clock, tiles);
            assert_eq!(probe.state(&probe, rapids(143)), state, "{tiles:e} at {clock:e}");
            assert_eq!(probe.state(&probe, rapids(1)), CoreState::Quiet, "by itself alone");
        }
    }

    #[test]
    fn a_better_moment_raises_the_measure() {
        let mut gauge = Gauge { best: CoreProbe { chain: 1e8, ..BEST }, alone: 0.0 };
        let now = CoreProbe { chain: 2e8, ..BEST };
        assert_eq!(gauge.judge(now), CoreState::Quiet);
        assert_eq!(gauge.judge(CoreProbe { chain: 1e8, ..BEST }), CoreState::Contended);
        assert_eq!(gauge.best().chain, 2e8);
    }

    #[test]
    fn samples_of_different_states_are_not_mixed() {
        let mut s = SortedSamples::default();
        for _ in 0..3 {
            s.push((CoreState::Contended, 9.0));
            s.push((CoreState::Between, 100.0));
        }
        assert_eq!(s.median(), (9.0, "contended 3".into()));
        (0..4).for_each(|_| s.push((CoreState::Quiet, 1.0)));
        assert_eq!(s.median(), (1.0, "quiet 4".into()));
        let mut few = SortedSamples::default();
        few.push((CoreState::Quiet, 5.0));
        assert_eq!(few.median(), (5.0, "mixed 1".into()));
    }

    /// A probe takes so little that it may stand around every sample, and its rates are those of a machine.
    #[test]
    fn a_probe_of_this_machine() {
        let pool = Pool::new(2);
        let (state, seconds) = Gauge::new(&pool).sample(&pool, || 0.5);
        assert_eq!(seconds, 0.5);
        let best = *Gauge::new(&pool).best();
        println!("{state:?} {best:?}");
        assert!(best.chain > 1e6 && best.loads > 1e8, "{best:?}");
        assert_eq!(best.tiles.is_some(), crate::amx::hardware().is_ok());
    }
}
