//! Measures the limits of the machine quickly: memory reads bound decoding, arithmetic bounds prefill.

use serde::Serialize;
use tandem::host::Pool;
use tandem::profile::{CoreProbe, CoreState, Gauge, peaks, read_bandwidth};

/// Bytes read per pass, more than the caches of most machines hold.
const BYTES: usize = 1 << 30;

/// The limits measured with all threads at work.
#[derive(Debug, Serialize)]
pub struct Limits {
    pub threads: usize,
    pub bytes: usize,
    /// `None` if memory is too short for a meaningful buffer.
    pub read_gb_s: Option<f64>,
    pub peaks: Vec<MeasuredPeak>,
    pub cores: Cores,
}

/// Whether this process had the cores to itself, during about a tenth of a second.
#[derive(Debug, Serialize)]
pub struct Cores {
    pub probes: usize,
    /// Share of probes that found the cores quiet.
    pub quiet: f64,
    pub contended: f64,
    /// Loads from L1 in the best moment, of the slowest thread.
    pub l1_gb_s: f64,
    /// Loads from L1 by AMX tiles.
    pub tiles_gb_s: Option<f64>,
}

fn cores(pool: &Pool) -> Cores {
    let mut gauge = Gauge::new(pool);
    let states: Vec<CoreState> = (0..1000).map(|_| gauge.judge(CoreProbe::of(pool))).collect();
    let share = |of| states.iter().filter(|&&s| s == of).count() as f64 / states.len() as f64;
    let best = gauge.best();
    Cores {
        probes: states.len(),
        quiet: share(CoreState::Quiet),
        contended: share(CoreState::Contended),
        l1_gb_s: best.loads / 1e9,
        tiles_gb_s: best.tiles.map(|b| b / 1e9),
    }
}

/// Arithmetic, in 10^9 operations a second (a multiply-add counts two).
#[derive(Debug, Serialize)]
pub struct MeasuredPeak {
    pub name: &'static str,
    pub gop_s: f64,
}

/// Measures on `threads` threads, using at most a quarter of `usable` bytes.
pub fn measure(threads: usize, usable: u64) -> Limits {
    let pool = Pool::pinned(Some(threads));
    let bytes = BYTES.min(usize::try_from(usable / 4).unwrap_or(BYTES));
    let read = (bytes >= 256 << 20).then(|| read_bandwidth(&pool, bytes, 5) / 1e9);
    let peaks = peaks(&pool).into_iter().map(|p| MeasuredPeak { name: p.name, gop_s: p.ops / 1e9 }).collect();
    Limits { threads, bytes, read_gb_s: read, peaks, cores: cores(&pool) }
}

impl Limits {
    /// The read bandwidth, as a sentence.
    pub fn bandwidth(&self) -> String {
        match self.read_gb_s {
            Some(rate) => format!(
                "{rate:.1} GB/s read ({} threads, best of 5 over {} MiB)",
                self.threads,
                self.bytes >> 20
            ),
            None => "not measured: too little memory".into(),
        }
    }

    /// Whether the cores are shared, as a sentence; `!` if they mostly were.
    pub fn cores(&self) -> (char, String) {
        let c = &self.cores;
        let tiles = c.tiles_gb_s.map_or(String::new(), |t| format!(", tiles {t:.0} GB/s"));
        let found = format!(
            "{:.0}% of {} probes quiet, {:.0}% contended (loads from L1 {:.0} GB/s{tiles})",
            100.0 * c.quiet,
            c.probes,
            100.0 * c.contended,
            c.l1_gb_s
        );
        match c.quiet {
            q if q >= 0.5 => ('+', found),
            _ => ('!', format!("{found}: measurements of this moment compare with none of another")),
        }
    }

    /// The arithmetic peaks, as a sentence.
    pub fn arithmetic(&self) -> String {
        let each = self.peaks.iter().map(|p| format!("{} {:.0} Gop/s", p.name, p.gop_s));
        each.collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_memory_is_said() {
        let limits = measure(1, 100 << 20);
        assert_eq!(limits.read_gb_s, None);
        assert!(limits.bandwidth().contains("too little memory"));
    }
}
