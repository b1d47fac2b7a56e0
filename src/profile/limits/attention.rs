//! Attention on the host as requests that live there have it: how fast it reads keys and values, alone and while copies run.
//!
//! A copy over the link reads or writes the same memory. It is run on both lanes of the device at once; where there is no
//! device a thread that copies with memcpy stands for it, and has one of the cores, so that fewer threads attend.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};

use crate::cache::{KvGeometry, KvType, PAGE_TOKENS, PagePool};
use crate::device::{Buffer, Lane, Runtime};
use crate::host::{Pool, unpin_current_thread};
use crate::profile::sample::{Effort, Samples, sample, timed};
use crate::simd::Isa;
use crate::simd::attention::{AttnPlan, AttnShape, SeqRows};
use crate::{Error, Result};

/// What copied beside attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CopyLoad {
    /// The device, both ways.
    Link,
    /// A thread, for want of a device.
    Thread,
    /// Nothing: one core, and no device.
    None,
}

/// See the [module](self).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostAttention {
    /// Threads that attended.
    pub threads: u32,
    /// Bytes of keys and values per second, nothing else running.
    pub alone_bw: f64,
    /// The same while copies run.
    pub beside_copies_bw: f64,
    /// What copied.
    pub copies: CopyLoad,
}

/// Query heads, KV heads and elements of a head: those of Llama 3 8B.
const HEADS: (usize, usize, usize) = (32, 8, 128);

/// Requests of the batch, and tokens of each.
const REQUESTS: usize = 16;
const TOKENS: usize = 1024;

impl HostAttention {
    /// Share of its rate that attention keeps while copies run, at most 1.
    pub fn share(&self) -> f64 {
        (self.beside_copies_bw / self.alone_bw).min(1.0)
    }

    /// Measures with the threads of `pool`, of which the thread that copies takes one where there is no device.
    ///
    /// # Errors
    /// No memory for the probes; a device that failed.
    pub(super) fn measure(
        pool: &Pool,
        runtime: Option<&Arc<dyn Runtime>>,
        effort: Effort,
    ) -> Result<HostAttention> {
        let copies = match (runtime, pool.threads()) {
            (Some(_), _) => CopyLoad::Link,
            (None, 1) => CopyLoad::None,
            (None, _) => CopyLoad::Thread,
        };
        // Not pinned: `pool` has pinned this thread to a core, and its workers sleep on theirs.
        let few = (copies == CopyLoad::Thread).then(|| Pool::new(pool.threads() - 1));
        let pool = few.as_ref().unwrap_or(pool);
        let mut batches = Batches::new(pool, effort)?;
        let (mut alone, mut beside) = (Samples::default(), Samples::default());
        // By turns: what else the machine does comes and goes.
        for _ in 0..if effort == Effort::Full { 3 } else { 1 } {
            alone.push(batches.time(pool, effort)?);
            beside.push(match copies {
                CopyLoad::Link => {
                    let runtime = runtime.expect("a link has a device");
                    beside_link(runtime, effort, || batches.time(pool, effort))?
                }
                CopyLoad::Thread => beside_thread(effort, || batches.time(pool, effort))?,
                CopyLoad::None => alone.median(),
            });
        }
        let bw = |s: &Samples| batches.bytes as f64 / s.median().max(1e-9);
        Ok(HostAttention {
            threads: pool.threads() as u32,
            alone_bw: bw(&alone),
            beside_copies_bw: bw(&beside),
            copies,
        })
    }
}

/// Decode batches over several sets of pages, so that each finds its own out of the caches.
struct Batches {
    shape: AttnShape,
    cache: PagePool,
    plans: Vec<AttnPlan>,
    next: usize,
    /// Bytes that a batch reads.
    bytes: usize,
    q: Vec<f32>,
    out: Vec<f32>,
}

impl Batches {
    fn new(pool: &Pool, effort: Effort) -> Result<Batches> {
        let (n_heads, n_kv_heads, head_dim) = HEADS;
        let scale = 1.0 / (head_dim as f32).sqrt();
        let shape = AttnShape { n_heads, n_kv_heads, head_dim, scale, softcap: None, window: None };
        let geometry = KvGeometry { n_layers: 1, n_kv_heads, head_dim, dtype: KvType::BF16 };
        let (requests, sets) = match effort {
            Effort::Quick => (4, 1),
            // 512 MiB.
            Effort::Full => (REQUESTS, 8),
        };
        let each = TOKENS / PAGE_TOKENS;
        let n_pages = sets * requests * each;
        let cache = PagePool::new(geometry, n_pages)?;
        let (kv, width) = (cache.layer(0), n_kv_heads * head_dim);
        let row: Vec<f32> = (0..width).map(|i| (i % 13) as f32 / 13.0 - 0.5).collect();
        pool.run(n_pages, &|page, _| {
            for slot in 0..PAGE_TOKENS {
                // SAFETY: each chunk writes a page of its own, and nobody reads yet.
                unsafe { kv.append(&[page as u32], slot, &row, &row) };
            }
        });
        let pages: Vec<u32> = (0..n_pages as u32).collect();
        let plans = pages.chunks_exact(requests * each).map(|set| {
            let row = |(row0, pages)| SeqRows { pages, first_pos: TOKENS - 1, n_rows: 1, row0 };
            let rows: Vec<SeqRows<'_>> = set.chunks_exact(each).enumerate().map(row).collect();
            AttnPlan::new(&shape, &rows, pool.threads())
        });
        let plans = plans.collect::<Result<Vec<_>>>()?;
        let q: Vec<f32> = (0..requests * n_heads * head_dim).map(|i| (i % 29) as f32 / 29.0 - 0.5).collect();
        let bytes = requests * TOKENS * geometry.bytes_per_token_layer();
        let out = vec![0.0; q.len()];
        Ok(Batches { shape, cache, plans, next: 0, bytes, q, out })
    }

    /// Seconds of a batch.
    fn time(&mut self, pool: &Pool, effort: Effort) -> Result<f64> {
        let isa = Isa::selected()?;
        debug_assert_eq!(self.shape.n_kv_heads, HEADS.1);
        let seconds = sample(effort, || {
            self.next = (self.next + 1) % self.plans.len();
            let plan = &mut self.plans[self.next];
            Ok::<_, Error>(timed(|| plan.run(pool, isa, &self.cache.layer(0), &self.q, &mut self.out)))
        })?;
        Ok(seconds.median())
    }
}

fn copied_bytes(effort: Effort) -> usize {
    match effort {
        Effort::Quick => 4 << 20,
        Effort::Full => 64 << 20,
    }
}

/// Calls `work` on this thread while another one calls `copy` again and again; `copy` has run once when `work` begins.
fn beside<R>(copy: impl FnMut() -> Result<()> + Send, work: impl FnOnce() -> Result<R>) -> Result<R> {
    let (begun, done) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let (begun, done) = (&begun, &done);
        let mut copy = copy;
        let copies = scope.spawn(move || {
            // Not on the core that the thread which started this one is pinned to.
            unpin_current_thread();
            while !done.load(Ordering::Acquire) {
                copy()?;
                begun.store(true, Ordering::Release);
            }
            Ok(())
        });
        while !begun.load(Ordering::Acquire) && !copies.is_finished() {
            std::hint::spin_loop();
        }
        let result = work();
        done.store(true, Ordering::Release);
        let copied = copies.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        copied.and(result)
    })
}

fn beside_thread<R>(effort: Effort, work: impl FnOnce() -> Result<R>) -> Result<R> {
    let bytes = copied_bytes(effort);
    let (from, mut to) = (vec![1u8; bytes], vec![2u8; bytes]);
    let copy = move || {
        to.copy_from_slice(std::hint::black_box(&from));
        Ok(())
    };
    beside(copy, work)
}

fn beside_link<R>(runtime: &Arc<dyn Runtime>, effort: Effort, work: impl FnOnce() -> Result<R>) -> Result<R> {
    let bytes = (copied_bytes(effort) as u64).min(runtime.memory_free()? / 8).max(1 << 16) as usize;
    let there = [Buffer::new(runtime, bytes)?, Buffer::new(runtime, bytes)?];
    let here = [runtime.pinned(bytes)?, runtime.pinned(bytes)?];
    runtime.fill(Lane::Compute, there[1].ptr(), 0, bytes)?;
    runtime.synchronize_all()?;
    let mut pending = VecDeque::new();
    let copy = || {
        runtime.upload_pinned(Lane::HostToDevice, there[0].ptr(), &here[0], 0..bytes)?;
        runtime.download_pinned(Lane::DeviceToHost, there[1].ptr(), &here[1], 0, bytes)?;
        pending.push_back([runtime.record(Lane::HostToDevice)?, runtime.record(Lane::DeviceToHost)?]);
        // One round ahead, so that the lanes are never idle.
        if pending.len() > 1 {
            for event in pending.pop_front().expect("two rounds") {
                runtime.synchronize(&event)?;
            }
        }
        Ok(())
    };
    let result = beside(copy, work);
    runtime.synchronize_all()?;
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Emulation, Kind, open};

    #[test]
    fn a_quick_look_has_both_rates_with_a_device_and_without() {
        let device = open(&Kind::Emulated(Emulation::Functions), Some(64 << 20)).unwrap();
        let runtime = device.runtime().clone();
        for (threads, runtime, copies) in
            [(1, None, CopyLoad::None), (2, None, CopyLoad::Thread), (2, Some(&runtime), CopyLoad::Link)]
        {
            let found = HostAttention::measure(&Pool::new(threads), runtime, Effort::Quick).unwrap();
            assert_eq!((found.copies, found.threads), (copies, if runtime.is_some() { 2 } else { 1 }));
            assert!(found.alone_bw > 1e7 && found.beside_copies_bw > 1e5, "{found:?}");
            assert!(found.share() > 0.0 && found.share() <= 1.0, "{found:?}");
        }
    }

    #[test]
    fn work_begins_when_copies_do_and_a_copy_that_fails_is_told() {
        let copied = std::sync::atomic::AtomicUsize::new(0);
        let copy = || {
            copied.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        assert!(beside(copy, || Ok(copied.load(Ordering::Relaxed))).unwrap() > 0);
        let lost = beside(|| Err(Error::Run("lost".into())), || Ok(1));
        assert_eq!(lost.unwrap_err().to_string(), "lost");
    }
}
