//! A quick look at the limits of the machine: reading memory bounds decoding, arithmetic bounds prefill.

use serde::Serialize;
use tandem::host::Pool;
use tandem::profile::{peaks, read_bandwidth};

/// Bytes read per pass: more than the caches of most machines hold.
const BYTES: usize = 1 << 30;

/// What was measured, with all threads at work.
#[derive(Debug, Serialize)]
pub struct Limits {
    pub threads: usize,
    pub bytes: usize,
    /// `None` if memory is too short for a meaningful buffer.
    pub read_gb_s: Option<f64>,
    pub peaks: Vec<Peak>,
}

/// Arithmetic, in 10^9 operations a second (a multiply-add counts two).
#[derive(Debug, Serialize)]
pub struct Peak {
    pub name: &'static str,
    pub gop_s: f64,
}

/// Measures on `threads` threads, using at most a quarter of `usable` bytes.
pub fn measure(threads: usize, usable: u64) -> Limits {
    let pool = Pool::pinned(Some(threads));
    let bytes = BYTES.min(usize::try_from(usable / 4).unwrap_or(BYTES));
    let read = (bytes >= 256 << 20).then(|| read_bandwidth(&pool, bytes, 5) / 1e9);
    let peaks = peaks(&pool).into_iter().map(|p| Peak { name: p.name, gop_s: p.ops / 1e9 }).collect();
    Limits { threads, bytes, read_gb_s: read, peaks }
}

impl Limits {
    /// Reading memory, in words.
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

    /// The arithmetic peaks, in words.
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
