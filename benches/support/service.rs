//! Host attention as a service: a decode batch of requests of mixed lengths, alone and while something else copies.
//!
//! | requests | lengths |
//! |---|---|
//! | even | 64, all of the mean length of `long` |
//! | long | one of 8000 tokens beside 63 of 100: it has to be spread over all threads |
//! | mixed | 64 from 128 to 8192 tokens, evenly on a log scale |
//!
//! A copy over a link reads or writes host memory without a core. Here a thread that copies with memcpy stands for it, so it
//! gets a core: attention has the others, and its rate alone is that of the same threads.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use tandem::cache::{KvGeometry, KvType};
use tandem::host::Pool;
use tandem::profile;
use tandem::simd::Isa;
use tandem::simd::attention::{AttnPlan, SeqRows};

use super::{Model, Rng};

/// GQA 4:1, as llama-3-8b.
const HEADS: (usize, usize, usize) = (32, 8, 128);

fn cases() -> Vec<(&'static str, Vec<usize>)> {
    let long: Vec<usize> = std::iter::once(8000).chain([100; 63]).collect();
    let mean = long.iter().sum::<usize>().div_ceil(64);
    let at = |i: usize| (128.0 * 64f64.powf(((i * 37) % 64) as f64 / 63.0)) as usize;
    vec![("even", vec![mean; 64]), ("long", long), ("mixed", (0..64).map(at).collect())]
}

/// A plan of decode rows for each set of pages.
fn plans(model: &Model, lengths: &[usize], threads: usize) -> Vec<AttnPlan> {
    let pages: Vec<usize> = lengths.iter().map(|&n| KvGeometry::pages_for(n)).collect();
    let sets = model.pages.chunks_exact(pages.iter().sum());
    let plan = |mut set: &[u32]| {
        let row = |(row0, (&length, &n))| {
            let own;
            (own, set) = set.split_at(n);
            SeqRows { pages: own, first_pos: length - 1, n_rows: 1, row0 }
        };
        let rows: Vec<SeqRows<'_>> = lengths.iter().zip(&pages).enumerate().map(row).collect();
        AttnPlan::new(&model.shape, &rows, threads).expect("a shape that is covered")
    };
    sets.map(plan).collect()
}

/// Bytes per second that a thread copies, read plus written, while `work` runs on this one.
fn beside_copies<R>(work: impl FnOnce() -> R) -> (R, f64) {
    let (stop, bytes) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Not on the core of the thread that starts it.
            tandem::host::unpin_current_thread();
            let (from, mut to) = (vec![1u8; 128 << 20], vec![2u8; 128 << 20]);
            while !stop.load(Ordering::Relaxed) {
                for (to, from) in to.chunks_mut(1 << 20).zip(from.chunks(1 << 20)) {
                    to.copy_from_slice(std::hint::black_box(from));
                    bytes.fetch_add(2 * from.len() as u64, Ordering::Relaxed);
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                }
            }
        });
        while bytes.load(Ordering::Relaxed) == 0 {
            std::hint::spin_loop();
        }
        let (begun, before) = (Instant::now(), bytes.load(Ordering::Relaxed));
        let result = work();
        let copied = (bytes.load(Ordering::Relaxed) - before) as f64 / begun.elapsed().as_secs_f64();
        stop.store(true, Ordering::Relaxed);
        (result, copied)
    })
}

fn median(mut x: Vec<f64>) -> f64 {
    x.sort_by(f64::total_cmp);
    x[x.len() / 2]
}

/// Median seconds of a call, over all sets of pages in turn.
fn seconds(plans: &mut [AttnPlan], model: &Model, pool: &Pool, isa: Isa, q: &[f32], out: &mut [f32]) -> f64 {
    let (kv, begun, mut times) = (model.kv(), Instant::now(), Vec::new());
    while times.len() < 8 || begun.elapsed().as_millis() < 1500 {
        let at = times.len() % plans.len();
        let start = Instant::now();
        plans[at].run(pool, isa, &kv, q, out);
        times.push(start.elapsed().as_secs_f64());
    }
    median(times)
}

/// Prints a line for each case and number of threads: all, and all but one, which is the one that copies.
pub fn run(pool: &Pool, isa: Isa, quick: bool) {
    let cases = cases();
    let pages = |lengths: &[usize]| lengths.iter().map(|&n| KvGeometry::pages_for(n)).sum::<usize>();
    let most = cases.iter().map(|c| pages(&c.1)).max().unwrap_or(0) * tandem::cache::PAGE_TOKENS;
    // As many bytes as overrun a last-level cache of some hundred megabytes.
    let tokens = if quick { most } else { most.max((1 << 30) / (4 * HEADS.1 * HEADS.2)) };
    let model = Model::new(HEADS, KvType::BF16, tokens, pool);
    let q = Rng(7).uniforms(64 * HEADS.0 * HEADS.2);
    let mut out = vec![0f32; q.len()];
    let all = pool.threads();
    let few = (all > 1).then(|| Pool::new(all - 1));
    println!(
        "{:<34} {:>8} {:>10} {:>8} {:>8} {:>12} {:>8}",
        "service", "threads", "tokens/ms", "GB/s", "of read", "while copies", "copied"
    );
    for (name, lengths) in &cases {
        for pool in few.iter().chain([pool]) {
            let threads = pool.threads();
            let mut plans = plans(&model, lengths, threads);
            plans[0].run(pool, isa, &model.kv(), &q, &mut out);
            model.verify(lengths[0], 1, &q, &out, name);
            let title = format!("llama-3-8b {isa} decode B=64 {name}");
            if quick {
                println!("{title:<34} {threads:>8} verified");
                continue;
            }
            let limit = profile::read_bandwidth(pool, 1 << 30, 5);
            let total: usize = lengths.iter().sum();
            let bytes = (total * model.cache.geometry().bytes_per_token_layer()) as f64;
            let alone = seconds(&mut plans, &model, pool, isa, &q, &mut out);
            let beside = (threads < all)
                .then(|| beside_copies(|| seconds(&mut plans, &model, pool, isa, &q, &mut out)));
            let (beside, copied) = match beside {
                Some((t, copied)) => (format!("{:.0}%", 100.0 * alone / t), format!("{:.1}", copied / 1e9)),
                None => ("-".into(), "-".into()),
            };
            println!(
                "{title:<34} {threads:>8} {:>10.0} {:>8.1} {:>7.0}% {beside:>12} {copied:>8}",
                total as f64 / alone / 1e3,
                bytes / alone / 1e9,
                bytes / alone / limit * 100.0
            );
        }
    }
}
