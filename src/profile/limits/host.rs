//! The CPU: read bandwidth by threads, arithmetic and matrix rates, cache, memory.

use serde::{Deserialize, Serialize};

use super::nodes::NodeLimits;
use crate::host::{AlignedBuffer, Pool, memory_available, numa_nodes};
use crate::profile::bandwidth::ReadProbe;
use crate::profile::peak::peaks;
use crate::profile::sample::{Effort, Samples, sample, timed};
use crate::simd::Isa;
use crate::simd::linear::{Acts, Linear, Mode, Out, linear};
use crate::tensor::{Bytes, DType, Tensor};
use crate::{Error, Result};

/// Read bandwidth of some threads.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bandwidth {
    /// Threads that read.
    pub threads: u32,
    /// Bytes per second of all of them together.
    pub bytes_s: f64,
}

/// A rate by name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rate {
    /// An instruction (`f32 fma`, `bf16 dot`, `int8 dot`), or a tier of kernels (`avx2`, `avx512`, `amx`).
    pub name: String,
    /// Operations per second of all threads together; a multiply-add counts two.
    pub ops_s: f64,
}

/// What the CPU and its memory can do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpuLimits {
    /// Threads of the pool that computes.
    pub threads: u32,
    /// Bytes of memory that were available.
    pub memory_bytes: u64,
    /// Bytes of the last-level cache.
    pub llc_bytes: u64,
    /// Bytes of the buffer that was read: at least four times the last-level cache, unless memory or time was short.
    pub read_bytes: u64,
    /// Read bandwidth by threads, ascending; the last one is of all threads.
    pub read: Vec<Bandwidth>,
    /// Arithmetic in registers, by instruction.
    pub peaks: Vec<Rate>,
    /// A product of 512 rows with a bf16 matrix, by tier of kernels.
    pub matrix: Vec<Rate>,
    /// The memory nodes, if there are several.
    pub nodes: Vec<NodeLimits>,
}

impl CpuLimits {
    /// Measures with all threads of `pool`. `progress` is called after bandwidth, and after arithmetic.
    ///
    /// # Errors
    /// The system does not say how much memory there is.
    pub fn measure(pool: &Pool, effort: Effort, progress: &dyn Fn()) -> Result<CpuLimits> {
        let available = memory_available()
            .ok_or_else(|| Error::Run("the system does not say how much memory there is".into()))?;
        let llc = last_level_cache();
        let wanted = match effort {
            Effort::Quick => (4 * llc).min(256 << 20),
            Effort::Full => (4 * llc).max(512 << 20),
        };
        let probe = ReadProbe::new(wanted.min(available / 4) as usize);
        let all = pool.threads();
        let bandwidth = |pool: &Pool, threads: usize| {
            let seconds: Samples = sample(effort, || Ok::<_, Error>(probe.pass(pool)))?;
            // The best pass: a limit is what nothing exceeds.
            let bytes_s = probe.bytes() as f64 / seconds.quantile(0.0);
            Ok::<_, Error>(Bandwidth { threads: threads as u32, bytes_s })
        };
        let mut read = Vec::new();
        for threads in thread_counts(all) {
            read.push(match threads == all {
                true => bandwidth(pool, threads)?,
                // Not pinned: `pool` has pinned this thread to a core, and its workers sleep on theirs.
                false => bandwidth(&Pool::new(threads), threads)?,
            });
        }
        let nodes = NodeLimits::measure(&numa_nodes(), pool, probe.bytes() as u64, effort)?;
        progress();
        let peaks = peaks(pool).into_iter().map(|p| Rate { name: p.name.into(), ops_s: p.ops }).collect();
        progress();
        let tiers = Isa::supported().into_iter();
        // The reference tier is not there to be fast; where it is the only one, it is what there is.
        let fast: Vec<Isa> = tiers.clone().filter(|&i| i > Isa::Reference).collect();
        let tiers = if fast.is_empty() { tiers.collect() } else { fast };
        let matrix = tiers
            .into_iter()
            .map(|isa| Ok(Rate { name: isa.name().into(), ops_s: matrix_rate(pool, isa, effort)? }))
            .collect::<Result<_>>()?;
        progress();
        Ok(CpuLimits {
            threads: all as u32,
            memory_bytes: available,
            llc_bytes: llc,
            read_bytes: probe.bytes() as u64,
            read,
            peaks,
            matrix,
            nodes,
        })
    }

    /// Bytes per second that all threads read.
    pub fn read_bw(&self) -> f64 {
        self.read.last().map_or(0.0, |b| b.bytes_s)
    }

    /// The fewest threads, of those measured, that read at 95% of the best rate: where memory bounds the work, as in attention
    /// of single rows, more of them add nothing.
    pub fn knee(&self) -> u32 {
        let best = self.read.iter().map(|b| b.bytes_s).fold(0.0, f64::max);
        self.read.iter().find(|b| b.bytes_s >= 0.95 * best).map_or(self.threads, |b| b.threads)
    }

    /// FLOP/s of the fastest tier's bf16 product.
    pub fn matrix_flops(&self) -> f64 {
        self.matrix.iter().map(|r| r.ops_s).fold(0.0, f64::max)
    }
}

/// 1, 2, 4… and `all`.
fn thread_counts(all: usize) -> Vec<usize> {
    let mut counts: Vec<usize> = (0..).map(|i| 1 << i).take_while(|&n| n < all).collect();
    counts.push(all);
    counts
}

/// FLOP/s of 512 rows times a square bf16 matrix by the kernels of `isa`.
fn matrix_rate(pool: &Pool, isa: Isa, effort: Effort) -> Result<f64> {
    const ROWS: usize = 512;
    let d = match (effort, isa) {
        (_, Isa::Reference) => 256,
        (Effort::Quick, _) => 1024,
        (Effort::Full, _) => 4096,
    };
    // Values around 1, so that no sum overflows or becomes denormal.
    let word = |i: u64| 0x3f80_bf80_3f81_bf7f ^ (i % 61);
    let words: Vec<u64> = (0..(d * d / 4) as u64).map(word).collect();
    let tensor = Tensor::new(DType::BF16, vec![d, d], Bytes::from_words(words, 2 * d * d))?;
    let weight = Linear::from_rows(tensor, isa);
    let (mut acts, mut out) = (Acts::default(), AlignedBuffer::zeros(ROWS * d));
    let run = || {
        acts.reset(ROWS, d).iter_mut().enumerate().for_each(|(i, x)| *x = (i % 17) as f32 / 16.0 - 0.5);
        let mut outs = [Out { w: &weight, out: &mut out, ldo: d }];
        Ok::<_, Error>(timed(|| linear(pool, Mode::Fast, &mut acts, &mut outs)))
    };
    let seconds = sample(effort, run)?.quantile(0.0);
    Ok(2.0 * (ROWS * d * d) as f64 / seconds)
}

/// Bytes of the last-level cache, as Linux tells it for the first processor; 32 MiB where it does not.
pub fn last_level_cache() -> u64 {
    let told = || {
        let text = (0..5).rev().find_map(|i| {
            std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{i}/size")).ok()
        })?;
        let kib: u64 = text.trim().strip_suffix('K')?.parse().ok()?;
        kib.checked_mul(1024)
    };
    told().unwrap_or(32 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_power_of_two_and_all_threads() {
        assert_eq!(thread_counts(1), [1]);
        assert_eq!(thread_counts(2), [1, 2]);
        assert_eq!(thread_counts(6), [1, 2, 4, 6]);
        assert_eq!(thread_counts(64), [1, 2, 4, 8, 16, 32, 64]);
    }

    #[test]
    fn the_knee_is_where_more_threads_add_nothing() {
        let mut limits = CpuLimits {
            threads: 16,
            memory_bytes: 1,
            llc_bytes: 1,
            read_bytes: 1,
            read: [(1, 12.0), (2, 23.0), (4, 44.0), (8, 61.0), (16, 63.0)]
                .map(|(threads, bytes_s)| Bandwidth { threads, bytes_s })
                .into(),
            peaks: vec![],
            matrix: vec![],
            nodes: vec![],
        };
        assert_eq!(limits.knee(), 8);
        limits.read[4].bytes_s = 65.0;
        assert_eq!(limits.knee(), 16);
        // Threads that get in each other's way.
        limits.read[4].bytes_s = 40.0;
        assert_eq!(limits.knee(), 8);
        limits.read.clear();
        assert_eq!(limits.knee(), 16);
    }

    #[test]
    fn a_quick_look_has_every_figure() {
        let (pool, steps) = (Pool::new(2), std::cell::Cell::new(0));
        let limits = CpuLimits::measure(&pool, Effort::Quick, &|| steps.set(steps.get() + 1)).unwrap();
        assert_eq!((limits.threads, limits.read.len(), steps.get()), (2, 2, 3));
        assert!(limits.read_bw() > 1e8 && limits.matrix_flops() > 1e7, "{limits:?}");
        assert!(limits.matrix.iter().all(|r| r.ops_s > 0.0));
        assert!(limits.read_bytes <= 256 << 20);
    }
}
