//! Rows and pages between an accelerator and the host: everything here is exact.

mod moves;
mod pages;
mod publish;
mod round_trip;
mod rounds;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::support::gpu::memory::*;
use crate::support::gpu::{self, Rng};
use proptest::prelude::*;
use tandem::cache::{BlockTable, KvGeometry, KvType, LayerKv, PAGE_TOKENS, PagePool};
use tandem::device::emulated::{EmulatedOptions, EmulatedRuntime, KernelChecks};
use tandem::device::kernels::elementwise::{PublishRows, RopeAppend, rope_append};
use tandem::device::kernels::exchange::*;
use tandem::device::{DevPtr, LayerPages, PageMove, Pinned, Runtime};
use tandem::model::{QkNorm, RopePairing};
use tandem::tensor::Half;

fn noise(rng: &mut Rng, n: usize) -> Vec<u8> {
    (0..n).map(|_| rng.next_u64() as u8).collect()
}

/// A word of mapped memory, as another thread of the host sees it.
fn word(memory: &dyn Pinned, at: usize) -> &AtomicU32 {
    assert!(at.is_multiple_of(4) && at + 4 <= memory.len());
    // SAFETY: in range and aligned (pinned memory is page-aligned), lives as long as `memory`, and while it is shared
    // with the device it is only accessed atomically.
    unsafe { &*memory.host().add(at).cast::<AtomicU32>() }
}

/// Bytes of mapped memory.
///
/// # Safety
/// Nobody writes them meanwhile.
unsafe fn mapped(memory: &dyn Pinned, at: usize, len: usize) -> &[u8] {
    assert!(at + len <= memory.len());
    // SAFETY: in range; no writer is the caller's promise.
    unsafe { std::slice::from_raw_parts(memory.host().add(at), len) }
}

/// Polls until the word is `value`; acquires what was written before it.
fn wait_for(word: &AtomicU32, value: u32) {
    let start = Instant::now();
    while word.load(Ordering::Acquire) != value {
        assert!(start.elapsed() < Duration::from_secs(60), "epoch {value} never came");
        std::thread::yield_now();
    }
}

fn shuffled(rng: &mut Rng, n: usize) -> Vec<u32> {
    let mut list: Vec<u32> = (0..n as u32).collect();
    for i in (1..n).rev() {
        list.swap(i, rng.below(i + 1));
    }
    list
}

#[test]
fn every_order_of_threads_gives_the_same() {
    gpu::for_schedules(|rt, _| {
        for kv in [KvType::BF16, KvType::Q8] {
            pages::check(rt, kv, 1, 48, &[40], true, 2);
        }
        let list = Some(vec![2, 0, 1]);
        let (widths, pads) = ([256, 64, 64], [0; 3]);
        let half = Half::F16;
        publish::check(rt, &publish::Case { widths, pads, stored: 3, list, half, counted: Some(2), seed: 4 });
    });
}
