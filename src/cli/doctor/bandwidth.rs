//! A quick look at how fast memory can be read: the limit of decoding.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

use serde::Serialize;

/// Bytes that all threads together read per pass: more than any cache holds.
const TOTAL: usize = 1 << 30;
const PASSES: usize = 5;

/// A measurement.
#[derive(Debug, Serialize)]
pub struct Bandwidth {
    pub threads: usize,
    pub bytes: usize,
    /// GB/s of the median and of the best pass.
    pub median_gb_s: f64,
    pub best_gb_s: f64,
}

impl Bandwidth {
    pub fn describe(&self) -> String {
        let Bandwidth { threads, bytes, median_gb_s, best_gb_s } = self;
        let mib = bytes >> 20;
        format!(
            "{median_gb_s:.1} GB/s read, best {best_gb_s:.1} ({threads} threads, {mib} MiB, {PASSES} passes)"
        )
    }
}

/// Reads with all threads at once. `None` if memory is too short for a meaningful buffer.
pub fn measure(threads: usize, usable: u64) -> Option<Bandwidth> {
    let total = TOTAL.min(usize::try_from(usable / 4).unwrap_or(TOTAL));
    if total < 256 << 20 {
        return None;
    }
    let words = total / 8 / threads;
    let barrier = Barrier::new(threads);
    let cores = core_affinity::get_core_ids().unwrap_or_default();
    let spans: Vec<Vec<(Instant, Instant)>> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|i| {
                let (barrier, core) = (&barrier, cores.get(i).copied());
                scope.spawn(move || {
                    if let Some(core) = core {
                        core_affinity::set_for_current(core);
                    }
                    // Written by the thread that reads it, so that it lies in this thread's node.
                    let buffer: Vec<u64> = (0..words as u64).collect();
                    (0..PASSES)
                        .map(|_| {
                            barrier.wait();
                            let begun = Instant::now();
                            black_box(sum(black_box(&buffer)));
                            (begun, Instant::now())
                        })
                        .collect()
                })
            })
            .collect();
        workers.into_iter().map(|w| w.join().expect("a reading thread panicked")).collect()
    });
    let mut rates: Vec<f64> = (0..PASSES)
        .map(|pass| {
            let begun = spans.iter().map(|s| s[pass].0).min().expect("at least one thread");
            let ended = spans.iter().map(|s| s[pass].1).max().expect("at least one thread");
            (words * 8 * threads) as f64 / (ended - begun).as_secs_f64() / 1e9
        })
        .collect();
    rates.sort_by(f64::total_cmp);
    Some(Bandwidth {
        threads,
        bytes: words * 8 * threads,
        median_gb_s: rates[PASSES / 2],
        best_gb_s: rates[PASSES - 1],
    })
}

/// Reads every word, in four streams: one alone does not fill a core's queue of outstanding misses.
fn sum(words: &[u64]) -> u64 {
    let quarter = words.len() / 4;
    let (a, rest) = words.split_at(quarter);
    let (b, rest) = rest.split_at(quarter);
    let (c, d) = rest.split_at(quarter);
    let mut acc = [0u64; 8];
    let (a, b, c, d) = (a.chunks_exact(8), b.chunks_exact(8), c.chunks_exact(8), d.chunks_exact(8));
    for (((a, b), c), d) in a.zip(b).zip(c).zip(d) {
        for i in 0..8 {
            acc[i] = acc[i].wrapping_add(a[i] ^ b[i]).wrapping_add(c[i] ^ d[i]);
        }
    }
    acc.iter().fold(0, |s, &x| s.wrapping_add(x))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_memory_is_no_measurement() {
        assert!(measure(1, 100 << 20).is_none());
    }
}
