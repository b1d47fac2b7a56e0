//! Linear kernels of every tier and dtype against the limits measured in the same run.
//!
//!   cargo bench --bench linear                    SmolLM2 and Llama shapes
//!   cargo bench --bench linear -- q4_0 4096       only lines that contain all words
//!   cargo bench --bench linear -- q4_0 M=1,2,3    only these numbers of tokens
//!   cargo bench --bench linear -- NxK=128x2048    another shape, alone
//!   cargo bench --bench linear -- --test          one tiny shape, answers checked, no timing
//!
//! Weights are cold: each call takes the next of enough copies to overflow the caches, as in a forward
//! pass. Answers are verified before anything is timed. GB/s counts the bytes of the weights. Samples are sorted by the state of the
//! cores before and after each (`profile::state`); the last column names the state whose median is shown.

use std::time::Instant;

use tandem::host::{AlignedBuffer, Pool};
use tandem::profile;
use tandem::profile::{Gauge, SortedSamples};
use tandem::simd::Isa;
use tandem::simd::linear::{Acts, Linear, Mode, Out, linear};
use tandem::tensor::{Bytes, DType, Tensor};

mod support;
use support::{Rng, make, median, random, verify};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let test = args.iter().any(|a| a == "--test");
    let is_word = |a: &&String| !["--", "M=", "NxK="].iter().any(|begin| a.starts_with(begin));
    let words: Vec<&String> = args.iter().filter(is_word).collect();
    let pool = Pool::pinned(None);
    let mut rng = Rng(42);
    let (mut bw, mut peaks) = (1.0, Vec::new());
    let mut gauge = Gauge::new(&pool);
    if !test {
        bw = profile::read_bandwidth(&pool, 1 << 30, 5);
        peaks = profile::peaks(&pool);
        println!("{} threads; read bandwidth {:.1} GB/s", pool.threads(), bw / 1e9);
        for p in &peaks {
            println!("peak {}: {:.0} Gop/s", p.name, p.ops / 1e9);
        }
        println!(
            "{:10} {:6} {:>12} {:>5} {:>9} {:>8} {:>6} {:>9} {:>7}  state",
            "tier", "dtype", "N x K", "M", "us", "GB/s", "% bw", "GFLOP/s", "of peak"
        );
    }
    let asked: Vec<(usize, usize)> = args
        .iter()
        .filter_map(|a| a.strip_prefix("NxK="))
        .map(|shape| {
            let (n, k) = shape.split_once('x').expect("NxK= takes a shape, like NxK=128x2048");
            (n.parse().expect("a number of rows"), k.parse().expect("a number of columns"))
        })
        .collect();
    let shapes: &[(usize, usize)] = match (test, asked.as_slice()) {
        (true, _) => &[(48, 256)],
        (_, []) => &[(1536, 576), (576, 1536), (2048, 2048), (8192, 2048), (4096, 4096), (4096, 14336)],
        (_, asked) => asked,
    };
    let chosen: Vec<usize> = args
        .iter()
        .filter_map(|a| a.strip_prefix("M="))
        .flat_map(|list| list.split(','))
        .map(|m| m.parse().expect("M= takes numbers of tokens, like M=1,2,3"))
        .collect();
    let ms: &[usize] = match (test, chosen.as_slice()) {
        (true, _) => &[1, 5, 16],
        (_, []) => &[1, 2, 3, 4, 8, 16, 64, 512],
        (_, chosen) => chosen,
    };
    for &(n, k) in shapes {
        for dtype in DType::ALL {
            if dtype.row_bytes(k).is_none() {
                continue;
            }
            let w = random(dtype, n, k, &mut rng);
            for isa in Isa::supported().into_iter().skip(1) {
                let line = format!("{:10} {:6} {:>12}", isa.name(), dtype.name(), format!("{n}x{k}"));
                if !words.iter().all(|w| line.contains(w.as_str())) {
                    continue;
                }
                let first = make(&w, isa);
                let copies = if test { 1 } else { cold_copies(first.bytes()) };
                let lins: Vec<Linear> = (0..copies)
                    .map(|_| {
                        let copy =
                            Tensor::new(dtype, vec![n, k], Bytes::copy_of(&w.data)).expect("same size");
                        make(&copy, isa)
                    })
                    .collect();
                let mut next = 0;
                for &m in ms {
                    let x: Vec<f32> = (0..m * k).map(|_| rng.uniform()).collect();
                    let mut acts = Acts::default();
                    let mut out = AlignedBuffer::zeros(m * n);
                    let mut once = |next: &mut usize| {
                        acts.reset(m, k).copy_from_slice(&x);
                        let w = &lins[*next % copies];
                        *next += 1;
                        let start = Instant::now();
                        linear(&pool, Mode::Fast, &mut acts, &mut [Out { w, out: &mut out, ldo: n }]);
                        start.elapsed().as_secs_f64()
                    };
                    let t = once(&mut next);
                    let reps = if test { 0 } else { ((0.15 / t) as usize).clamp(5, 400) };
                    let mut times = SortedSamples::default();
                    (0..reps).for_each(|_| times.push(gauge.sample(&pool, || once(&mut next))));
                    verify(&w, &x, &out, n, k, &format!("{line} M={m}"));
                    if test {
                        continue;
                    }
                    let (t, state) = times.median();
                    let (gb, gflop) = (first.bytes() as f64 / t, 2.0 * (m * n * k) as f64 / t);
                    let peak = if dtype.is_quantised() && isa >= Isa::Avx512 {
                        "int8 dot"
                    } else if dtype == DType::BF16 && isa >= Isa::Avx512 {
                        "bf16 dot"
                    } else {
                        "f32 fma"
                    };
                    let peak = peaks.iter().find(|p| p.name == peak).map_or(f64::NAN, |p| p.ops);
                    println!(
                        "{line} {m:>5} {:>9.1} {:>8.1} {:>5.0}% {:>9.0} {:>6.0}%  {state}",
                        t * 1e6,
                        gb / 1e9,
                        100.0 * gb / bw,
                        gflop / 1e9,
                        100.0 * gflop / peak
                    );
                }
            }
        }
        // Peers: f32 GEMM crates, hot, on this thread count where they offer it.
        for m in ms.iter().copied().filter(|&m| m >= 16 && !test && words.is_empty()) {
            let (x, w) = (vec![0.5f32; m * k], vec![0.25f32; n * k]);
            let mut out = AlignedBuffer::<f32>::zeros(m * n);
            for peer in ["gemm", "matrixmultiply"] {
                let mut once = || {
                    let start = Instant::now();
                    // SAFETY: matrices of the stated sizes and strides.
                    unsafe {
                        if peer == "gemm" {
                            gemm::gemm(
                                m,
                                n,
                                k,
                                out.as_mut_ptr(),
                                1,
                                n as isize,
                                false,
                                x.as_ptr(),
                                1,
                                k as isize,
                                w.as_ptr(),
                                k as isize,
                                1,
                                0.0,
                                1.0,
                                false,
                                false,
                                false,
                                gemm::Parallelism::Rayon(pool.threads()),
                            );
                        } else {
                            matrixmultiply::sgemm(
                                m,
                                k,
                                n,
                                1.0,
                                x.as_ptr(),
                                k as isize,
                                1,
                                w.as_ptr(),
                                1,
                                k as isize,
                                0.0,
                                out.as_mut_ptr(),
                                n as isize,
                                1,
                            );
                        }
                    }
                    start.elapsed().as_secs_f64()
                };
                let t = once();
                let t = median((0..((0.2 / t) as usize).clamp(3, 50)).map(|_| once()).collect());
                assert!((out[0] - 0.125 * k as f32).abs() < 1e-2 * k as f32, "{peer} is wrong");
                println!(
                    "{:10} {:6} {:>12} {m:>5} {:>9.1} {:>8} {:>6} {:>9.0}",
                    peer,
                    "f32",
                    format!("{n}x{k}"),
                    t * 1e6,
                    "",
                    "",
                    2.0 * (m * n * k) as f64 / t / 1e9
                );
            }
        }
    }
    println!("linear: every answer agreed with the reference");
}

/// How many copies of so many bytes overflow the caches.
fn cold_copies(bytes: usize) -> usize {
    profile::cold_bytes().div_ceil(bytes.max(1)).clamp(1, 4096)
}
