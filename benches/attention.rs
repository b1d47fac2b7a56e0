//! Paged attention of every tier against the read bandwidth measured in the same run.
//!
//!   cargo bench --bench attention                    decode and prefill, Llama-3-8B and SmolLM2 shapes
//!   cargo bench --bench attention -- llama avx512    only lines that contain all words
//!   cargo bench --bench attention -- service         decode batches of mixed lengths, also beside copies
//!   cargo bench --bench attention -- types          types of keys and values against each other, in turns
//!   cargo bench --bench attention -- --test          one tiny case, answers checked, no timing
//!
//! Keys and values are cold: each call takes the next of enough layers' worth of scattered pages to overflow
//! the caches, as in a forward pass. Answers are verified before anything is timed. GB/s counts the bytes of
//! the keys and values that are read. Samples are sorted by the state of the cores (`profile::state`). Decode in the AMX tier has
//! two lines: as outside deterministic mode, by vector kernels, and by tiles.

#[path = "support/service.rs"]
mod service;

use std::time::Instant;

use tandem::cache::{KvGeometry, KvType, LayerKv, PAGE_TOKENS, PagePool};
use tandem::host::Pool;
use tandem::profile::{Gauge, SortedSamples};
use tandem::simd::Isa;
use tandem::simd::attention::{AttnPlan, AttnShape, SeqRows};
use tandem::simd::tuning::Tuning;
use tandem::{profile, reference};

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
    fn uniforms(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.uniform()).collect()
    }
}

/// A model's attention and a pool full of keys and values for it.
struct Model {
    shape: AttnShape,
    cache: PagePool,
    /// All pages, shuffled.
    pages: Vec<u32>,
}

impl Model {
    fn new(heads: (usize, usize, usize), dtype: KvType, tokens: usize, pool: &Pool) -> Model {
        let (n_heads, n_kv_heads, head_dim) = heads;
        let scale = 1.0 / (head_dim as f32).sqrt();
        let shape = AttnShape { n_heads, n_kv_heads, head_dim, scale, softcap: None, window: None };
        let geometry = KvGeometry { n_layers: 1, n_kv_heads, head_dim, dtype };
        let n_pages = KvGeometry::pages_for(tokens);
        let cache = PagePool::new(geometry, n_pages).expect("memory for the keys and values");
        let mut rng = Rng(0x2545_f491_4f6c_dd1d);
        let mut pages: Vec<u32> = (0..n_pages as u32).collect();
        for i in (1..n_pages).rev() {
            pages.swap(i, (rng.next() % (i as u64 + 1)) as usize);
        }
        // Rows repeat with a period that no page divides.
        let width = n_kv_heads * head_dim;
        let rows = 37;
        let (k, v) = (rng.uniforms(rows * width), rng.uniforms(rows * width));
        let kv = cache.layer(0);
        pool.run(n_pages, &|page, _| {
            for slot in 0..PAGE_TOKENS {
                let row = (page * PAGE_TOKENS + slot) % rows * width;
                let (k, v) = (&k[row..row + width], &v[row..row + width]);
                // SAFETY: each chunk writes a page of its own, and nobody reads yet.
                unsafe { kv.append(&[page as u32], slot, k, v) };
            }
        });
        Model { shape, cache, pages }
    }

    fn kv(&self) -> LayerKv<'_> {
        self.cache.layer(0)
    }

    /// Plans of `batch` sequences with `context` tokens, of which the last `rows` are attended; one plan for each
    /// set of pages, until they hold `bytes`.
    fn plans(
        &self,
        batch: usize,
        context: usize,
        rows: usize,
        threads: usize,
        bytes: usize,
    ) -> Vec<AttnPlan> {
        let per_seq = KvGeometry::pages_for(context);
        let page_bytes = self.cache.geometry().bytes_per_page();
        let enough = bytes.div_ceil(batch * per_seq * page_bytes).max(1);
        let sets = self.pages.chunks_exact(batch * per_seq).take(enough);
        sets.map(|set| {
            let seqs: Vec<SeqRows> = set
                .chunks_exact(per_seq)
                .enumerate()
                .map(|(i, pages)| SeqRows { pages, first_pos: context - rows, n_rows: rows, row0: i * rows })
                .collect();
            AttnPlan::new(&self.shape, &seqs, threads).expect("a shape that is covered")
        })
        .collect()
    }

    /// Compares some heads of the first sequence's last row with the oracle; panics when they differ.
    fn verify(&self, context: usize, rows: usize, q: &[f32], out: &[f32], what: &str) {
        let hd = self.shape.head_dim;
        let group = self.shape.n_heads / self.shape.n_kv_heads;
        let pages = &self.pages[..KvGeometry::pages_for(context)];
        let mut o = vec![0f32; hd];
        for head in [0, self.shape.n_heads / 2, self.shape.n_heads - 1] {
            let at = ((rows - 1) * self.shape.n_heads + head) * hd;
            let q = &q[at..at + hd];
            let kv = self.kv();
            let (_, s) = reference::attention::segment(
                &kv,
                pages,
                head / group,
                0..context,
                (self.shape.scale, self.shape.softcap),
                q,
                &mut o,
            );
            for (d, o) in o.iter().enumerate() {
                let (got, want) = (out[at + d], o / s);
                // Values are below 1 and weights carry two bf16 roundings at most (the tests derive more).
                assert!((got - want).abs() <= 0.01, "{what}: head {head} dim {d}: {got}, want {want}");
            }
        }
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let quick = args.iter().any(|a| a == "--test");
    let words: Vec<&String> = args.iter().filter(|a| !a.starts_with("--")).collect();
    let pool = Pool::pinned(None);
    if quick || words.iter().any(|w| *w == "service") {
        service::run(&pool, Isa::best(), quick);
        if !quick {
            return;
        }
    }
    if words.iter().any(|w| *w == "types") {
        types(&pool, Isa::best());
        return;
    }
    let threads = pool.threads();
    let limit = if quick { 0.0 } else { profile::read_bandwidth(&pool, 1 << 30, 3) };
    println!("{threads} threads, read bandwidth {:.1} GB/s", limit / 1e9);
    println!("{:<46} {:>9} {:>8} {:>7} {:>8}  state", "work", "µs", "GB/s", "of read", "GFLOP/s");
    let mut gauge = Gauge::new(&pool);

    let llama = (32, 8, 128);
    let smol = (9, 3, 64);
    for (name, heads) in [("llama-3-8b", llama), ("smollm2", smol)] {
        for dtype in KvType::ALL {
            let wanted = |line: &str| words.iter().all(|w| line.contains(w.as_str()));
            let lines = cases(name, quick);
            let title = |isa: Isa, (kind, batch, context, _): (&str, usize, usize, usize)| {
                format!("{name} {} {isa} {kind} B={batch} {context}", dtype.name())
            };
            let tiers: Vec<Isa> =
                Isa::supported().into_iter().filter(|&i| quick || i != Isa::Reference).collect();
            if !lines.iter().any(|&l| tiers.iter().any(|&i| wanted(&title(i, l)))) {
                continue;
            }
            let most = lines.iter().map(|l| l.1 * l.2.next_multiple_of(PAGE_TOKENS)).max().unwrap_or(0);
            let tokens = if quick { most } else { most.max((512 << 20) / (4 * heads.1 * heads.2)) };
            let model = Model::new(heads, dtype, tokens, &pool);
            for line in lines {
                for &isa in &tiers {
                    let few = Tuning::current().attention_vector_rows;
                    let ways: &[(&str, usize)] = match isa {
                        Isa::Amx if line.3 == 1 => &[("", few), (" tiles", 0)],
                        _ => &[("", 0)],
                    };
                    for (way, vector_rows) in ways {
                        let title = title(isa, line) + way;
                        if wanted(&title) {
                            run(&model, isa, line, *vector_rows, &title, (&pool, &mut gauge), quick, limit);
                        }
                    }
                }
            }
        }
    }
}

/// Types of keys and values against each other in the best tier. They take turns, so that what else the machine does falls on all of
/// them alike; times are medians, ratios those of medians.
fn types(pool: &Pool, isa: Isa) {
    const ROUNDS: usize = 41;
    println!("{isa}, {} threads, medians of {ROUNDS} calls in turns", pool.threads());
    println!("{:<38} {:>10} {:>10} {:>10} {:>9} {:>9}", "µs", "bf16", "f16", "q8", "bf16/q8", "f16/q8");
    for (name, heads) in [("llama-3-8b", (32, 8, 128)), ("smollm2", (9, 3, 64))] {
        let lines = [("decode", 1, 1), ("decode", 4, 1), ("prefill", 1, 256)];
        for (kind, batch, rows) in lines {
            for context in [1024usize, 4096, 16384] {
                // Cold: the types take turns, and each has pages for several calls.
                let tokens = (2 * batch * context).max((96 << 20) / (4 * heads.1 * heads.2));
                let tokens = tokens.next_multiple_of(batch * context);
                let models = KvType::ALL.map(|dtype| Model::new(heads, dtype, tokens, pool));
                let width = heads.0 * heads.2;
                let q: Vec<f32> = Rng(7).uniforms(batch * rows * width);
                let mut out = vec![0f32; q.len()];
                let mut plans = models.each_ref().map(|m| {
                    let few = Tuning::current().attention_vector_rows;
                    let plans = m.plans(batch, context, rows, pool.threads(), usize::MAX / 2);
                    plans.into_iter().map(|p| p.with_vector_rows(few)).collect::<Vec<_>>()
                });
                let mut times = [const { Vec::new() }; 3];
                for round in 0..ROUNDS + 1 {
                    for ((m, plans), times) in models.iter().zip(&mut plans).zip(&mut times) {
                        let n = plans.len();
                        let start = Instant::now();
                        plans[round % n].run(pool, isa, &m.kv(), &q, &mut out);
                        // The first touches pages of results and plans.
                        if round > 0 {
                            times.push(start.elapsed().as_secs_f64() * 1e6);
                        } else {
                            m.verify(context, rows, &q, &out, name);
                        }
                    }
                }
                let [bf16, f16, q8] = times.map(|mut t| {
                    t.sort_by(f64::total_cmp);
                    t[t.len() / 2]
                });
                let title = format!("{name} {kind} B={batch} {rows} of {context}");
                println!(
                    "{title:<38} {bf16:>10.1} {f16:>10.1} {q8:>10.1} {:>9.2} {:>9.2}",
                    bf16 / q8,
                    f16 / q8
                );
            }
        }
    }
}

/// (kind, batch, context, rows per sequence).
fn cases(model: &str, quick: bool) -> Vec<(&'static str, usize, usize, usize)> {
    if quick {
        return vec![("decode", 3, 130, 1), ("prefill", 1, 70, 70)];
    }
    let mut cases = vec![("decode", 1, 4096, 1), ("decode", 16, 4096, 1), ("decode", 64, 512, 1)];
    cases.extend([("prefill", 1, 512, 512), ("prefill", 1, 4096, 4096)]);
    if model != "smollm2" {
        cases.splice(
            0..3,
            [1, 4, 16, 64].into_iter().flat_map(|b| [512, 2048, 8192].map(|c| ("decode", b, c, 1))),
        );
    }
    cases
}

#[allow(clippy::too_many_arguments)]
fn run(
    model: &Model,
    isa: Isa,
    (_, batch, context, rows): (&str, usize, usize, usize),
    vector_rows: usize,
    title: &str,
    (pool, gauge): (&Pool, &mut Gauge),
    quick: bool,
    limit: f64,
) {
    let width = model.shape.n_heads * model.shape.head_dim;
    let plans = model.plans(batch, context, rows, pool.threads(), if quick { 1 } else { 512 << 20 });
    let mut plans: Vec<AttnPlan> = plans.into_iter().map(|p| p.with_vector_rows(vector_rows)).collect();
    let q: Vec<f32> = Rng(7).uniforms(batch * rows * width);
    let mut out = vec![0f32; q.len()];
    let kv = model.kv();
    plans[0].run(pool, isa, &kv, &q, &mut out);
    model.verify(context, rows, &q, &out, title);
    if quick {
        println!("{title:<46} verified");
        return;
    }
    let mut times = SortedSamples::default();
    let begin = Instant::now();
    let mut i = 0;
    while i < 5 || (begin.elapsed().as_millis() < 300 && i < 2000) {
        let n = plans.len();
        times.push(gauge.sample(pool, || {
            let start = Instant::now();
            plans[i % n].run(pool, isa, &kv, &q, &mut out);
            start.elapsed().as_secs_f64()
        }));
        i += 1;
    }
    let (t, state) = times.median();
    let bytes = (batch * context * model.cache.geometry().bytes_per_token_layer()) as f64;
    // Each row sees all tokens up to its own: two multiply-adds per element of K and of V.
    let seen: usize = (context - rows..context).map(|p| p + 1).sum();
    let flops = (4 * batch * seen * width) as f64;
    let (gbs, share) = if rows == 1 {
        (format!("{:.1}", bytes / t / 1e9), format!("{:.0}%", bytes / t / limit * 100.0))
    } else {
        ("-".into(), "-".into())
    };
    println!("{title:<46} {:>9.1} {gbs:>8} {share:>7} {:>8.1}  {state}", t * 1e6, flops / t / 1e9);
}
