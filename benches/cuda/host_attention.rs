//! The CPU's attention of decode rows over keys and values in each kind of memory that they may lie in on the host: what page-locking costs or
//! gains it, and which pages the driver gives.

use std::any::Any;
use std::ptr::NonNull;
use std::time::Instant;

use tandem::Result;
use tandem::cache::{KvGeometry, KvType, PAGE_TOKENS, PagePool};
use tandem::host::Pool;
use tandem::simd::Isa;
use tandem::simd::attention::{AttnPlan, AttnShape, SeqRows};

use crate::measure::{Bench, Work};

/// Batches measured; the middle one counts.
const TIMES: usize = 15;

/// Requests that decode together, tokens of each, and sets of them that take turns, so that each finds its own out of the caches.
struct Size {
    heads: (usize, usize, usize),
    requests: usize,
    tokens: usize,
    sets: usize,
}

/// 64 MiB a batch of a Llama-3-8B layer.
const LARGE: Size = Size { heads: (32, 8, 128), requests: 16, tokens: 1024, sets: 4 };
const TINY: Size = Size { heads: (4, 2, 64), requests: 2, tokens: 64, sets: 1 };

impl Size {
    fn geometry(&self) -> KvGeometry {
        KvGeometry { n_layers: 1, n_kv_heads: self.heads.1, head_dim: self.heads.2, dtype: KvType::BF16 }
    }
    fn pages(&self) -> usize {
        self.sets * self.requests * self.tokens / PAGE_TOKENS
    }
    fn bytes(&self) -> usize {
        self.pages() * PAGE_TOKENS * self.geometry().bytes_per_token_layer()
    }
}

/// Pages in each kind of memory.
fn memories(bench: &Bench, size: &Size, threads: &Pool) -> Result<Vec<(&'static str, PagePool)>> {
    let (geometry, n, bytes) = (size.geometry(), size.pages(), size.bytes());
    let over = |at: *mut u8, owner: Box<dyn Any + Send + Sync>| {
        let at = NonNull::new(at).expect("memory is not at 0");
        // SAFETY: the owner keeps these bytes alive, and nothing else touches them.
        unsafe { PagePool::over(geometry, n, at, bytes, owner) }
    };
    // By the threads that read it, as the engine does it.
    let touch = |at: *mut u8| {
        let (at, page) = (at as usize, bytes / n);
        threads.run(n, &|i, _| {
            // SAFETY: each chunk writes a part of its own of `bytes` bytes that nobody has yet.
            unsafe { (at as *mut u8).add(i * page).write_bytes(0, page) }
        });
    };
    let slab = bench.rt.slab_touched(bytes, &touch)?;
    let locked = bench.rt.pinned(bytes)?;
    Ok(vec![
        ("huge pages", PagePool::new(geometry, n)?),
        ("huge pages, page-locked", over(slab.memory().host(), Box::new(slab.memory().clone()))?),
        ("page-locked by the driver", over(locked.host(), Box::new(locked.clone()))?),
    ])
}

/// Decode attention of the CPU over each of them.
pub fn run(bench: &mut Bench) -> Result<()> {
    let size = if bench.test { TINY } else { LARGE };
    let (n_heads, n_kv_heads, head_dim) = size.heads;
    let name = |memory: &str| format!("{} requests of {} tokens, {memory}", size.requests, size.tokens);
    let kinds = ["huge pages", "huge pages, page-locked", "page-locked by the driver"];
    if !kinds.iter().any(|kind| bench.wants("host", "attention", &name(kind))) {
        return Ok(());
    }
    let threads = Pool::new(std::thread::available_parallelism().map_or(1, |n| n.get()));
    let scale = 1.0 / (head_dim as f32).sqrt();
    let shape = AttnShape { n_heads, n_kv_heads, head_dim, scale, softcap: None, window: None };
    let q: Vec<f32> = (0..size.requests * n_heads * head_dim).map(|i| (i % 29) as f32 / 29.0 - 0.5).collect();
    let pages: Vec<u32> = (0..size.pages() as u32).collect();
    let each = size.tokens / PAGE_TOKENS;
    let mut plans = Vec::new();
    for set in pages.chunks_exact(size.requests * each) {
        let row = |(row0, pages)| SeqRows { pages, first_pos: size.tokens - 1, n_rows: 1, row0 };
        let rows: Vec<SeqRows<'_>> = set.chunks_exact(each).enumerate().map(row).collect();
        plans.push(AttnPlan::new(&shape, &rows, threads.threads())?);
    }
    let isa = Isa::selected()?;
    let mut first: Option<Vec<f32>> = None;
    for (kind, cache) in memories(bench, &size, &threads)? {
        let kv = cache.layer(0);
        let row: Vec<f32> = (0..n_kv_heads * head_dim).map(|i| (i % 13) as f32 / 13.0 - 0.5).collect();
        threads.run(size.pages(), &|page, _| {
            for slot in 0..PAGE_TOKENS {
                // SAFETY: each chunk writes a page of its own, and nobody reads yet.
                unsafe { kv.append(&[page as u32], slot, &row, &row) };
            }
        });
        let mut out = vec![0.0; q.len()];
        let mut times = Vec::new();
        for i in 0..if bench.test { 1 } else { TIMES } {
            let began = Instant::now();
            let plan = i % plans.len();
            plans[plan].run(&threads, isa, &kv, &q, &mut out);
            times.push(began.elapsed().as_secs_f64());
        }
        assert!(out.iter().all(|x| x.is_finite()), "{kind}: not numbers");
        assert_eq!(first.get_or_insert_with(|| out.clone()), &out, "{kind}: another answer");
        times.sort_by(f64::total_cmp);
        let work = Work {
            family: "host",
            kernel: "attention".into(),
            shape: name(kind),
            bytes: (size.bytes() / size.sets) as f64,
            flops: 0.0,
            peak: None,
        };
        bench.timed(work, times[times.len() / 2]);
    }
    Ok(())
}
