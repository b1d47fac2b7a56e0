//! What to run first on a machine with AMX: every constant of the AMX tier that was set by arithmetic, against its
//! alternatives, and what products reach of the tile unit. docs/performance.md says what to do with the results.
//!
//!   cargo bench --bench amx                   all of it, some ten minutes
//!   cargo bench --bench amx -- threshold      VNNI, int8 tiles and bf16 tiles, made in f32 and f16, by number of tokens:
//!                                             int8_tiles_from, tiles_from, half_up_to
//!   cargo bench --bench amx -- products       products of each kernel against the kernel fed from L2, the tile unit and memory, by
//!                                             shape and state
//!   cargo bench --bench amx -- --test         small, answers checked, no timing; runs on emulated tiles too
//!
//! `products` has a line of MKL's for bf16 where libmkl_rt is found (benches/support/mkl.rs), and says so where not.
//!
//! Alternatives alternate call by call, so that a drifting host moves both. Weights are cold, as in a forward pass.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[path = "support/mkl.rs"]
mod mkl;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod support;

fn main() {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    tiles::main();
    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    println!("amx: skipped: tiles are used on x86-64 Linux only");
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod tiles {
    use std::sync::Mutex;
    use std::time::Instant;

    use tandem::amx::{self, Session, bf16, pack};
    use tandem::host::{AlignedBuffer, Plain, Pool};
    use tandem::profile;
    use tandem::profile::{Gauge, SortedSamples};
    use tandem::simd::Isa;
    use tandem::simd::linear::{Acts, Linear, Mode, Out, linear, pack as packed};
    use tandem::simd::tuning::{LinearTuning, Tuning};
    use tandem::tensor::{Bytes, DType, Tensor};

    use super::mkl::Mkl;
    use super::support::{Rng, make, random, verify};

    /// Copies of a weight that overflow the caches, as each kernel set reads them.
    fn cold(w: &Tensor, isa: Isa, test: bool, with: impl Fn(Linear) -> Linear) -> Vec<Linear> {
        let copies = if test { 1 } else { profile::cold_bytes().div_ceil(w.data.len()).clamp(1, 4096) };
        let copy = || Tensor::new(w.dtype, w.shape.clone(), Bytes::copy_of(&w.data)).expect("same size");
        (0..copies).map(|_| with(make(&copy(), isa))).collect()
    }

    /// A copy that begins on a cache line, as an engine's rows do.
    fn aligned<T: Plain>(numbers: &[T]) -> AlignedBuffer<T> {
        let mut buffer = AlignedBuffer::zeros(numbers.len());
        buffer.copy_from_slice(numbers);
        buffer
    }

    /// A thread's A, panels and C.
    type Operands = (AlignedBuffer<u16>, AlignedBuffer<u16>, AlignedBuffer<f32>);

    /// The bf16 kernel of many tokens with all that it reads in L2: what no product in its blocking can pass. A thread each has A of
    /// 1 MiB, a pair of panels and 32 columns of C.
    struct Fed {
        threads: Vec<Mutex<Operands>>,
        rows: usize,
        k: usize,
    }

    impl Fed {
        /// Products in a sample.
        const REPEATS: usize = 4;

        fn new(pool: &Pool, test: bool) -> Fed {
            let (rows, k) = if test { (32, 64) } else { (256, 2048) };
            let one = half::bf16::from_f32(1.0).to_bits();
            let of_a_thread = |_| {
                let mut a = vec![0; pack::a_blocks_len(rows, k)];
                pack::pack_a_bf16(&vec![1.0; rows * k], rows, k, k, &mut a);
                let mut panel = vec![0; pack::panel_len(k)];
                pack::pack_panel_bf16(&vec![one; 16 * k], 16, k, k, &mut panel);
                Mutex::new((aligned(&a), aligned(&panel.repeat(2)), AlignedBuffer::zeros(rows * 32)))
            };
            Fed { threads: (0..pool.threads()).map(of_a_thread).collect(), rows, k }
        }

        /// Operations of a sample.
        fn ops(&self) -> f64 {
            (2 * self.rows * 32 * self.k * Fed::REPEATS * self.threads.len()) as f64
        }

        /// Seconds of a sample: of the slowest thread, once it has its operands in L2 again, from where the other products of this
        /// bench have driven them (read from L3 or memory they would take as long as the products).
        fn run(&self, pool: &Pool) -> f64 {
            let slowest = Mutex::new(0f64);
            pool.run(self.threads.len(), &|i, _| {
                let mut session = Session::open().expect("the bench runs where tiles are");
                let mut own = self.threads[i].lock().expect("no panic holds it");
                let (a, panels, out) = &mut *own;
                let mut multiply =
                    || bf16::gemm_bf16(&mut session, self.rows, 32, self.k, a, panels, out, 32);
                multiply();
                let begun = Instant::now();
                (0..Fed::REPEATS).for_each(|_| multiply());
                let took = begun.elapsed().as_secs_f64();
                let mut slowest = slowest.lock().expect("no panic holds it");
                *slowest = slowest.max(took);
                assert_eq!(out[self.rows * 32 - 1], self.k as f32);
            });
            slowest.into_inner().expect("no panic holds it")
        }
    }

    /// Medians of the seconds that each set of weights takes for the same activations, its answer checked, and the state of
    /// the cores that they are of; last, those of `fed`.
    fn compare(
        (pool, gauge): (&Pool, &mut Gauge),
        w: &Tensor,
        sets: &[&[Linear]],
        m: usize,
        fed: Option<&Fed>,
        rng: &mut Rng,
        test: bool,
    ) -> Vec<(f64, String)> {
        let (n, k) = (w.rows(), w.cols());
        let x: Vec<f32> = (0..m * k).map(|_| rng.uniform()).collect();
        let (mut acts, mut out) = (Acts::default(), AlignedBuffer::zeros(m * n));
        let mut next = 0;
        let mut times = vec![SortedSamples::default(); sets.len() + usize::from(fed.is_some())];
        let begin = Instant::now();
        loop {
            for (set, times) in sets.iter().zip(&mut times) {
                acts.reset(m, k).copy_from_slice(&x);
                out.fill(f32::NAN);
                let w = &set[next % set.len()];
                times.push(gauge.sample(pool, || {
                    let start = Instant::now();
                    linear(pool, Mode::Fast, &mut acts, &mut [Out { w, out: &mut out, ldo: n }]);
                    start.elapsed().as_secs_f64()
                }));
                if next == 0 {
                    assert!(
                        out.iter().all(|v| v.is_finite()),
                        "{} M={m}: an output was not written",
                        w.dtype()
                    );
                }
            }
            if next == 0 {
                verify(w, &x, &out, n, k, &format!("{} {n}x{k} M={m}", w.dtype));
            }
            if let (Some(fed), Some(times)) = (fed, times.last_mut()) {
                times.push(gauge.sample(pool, || fed.run(pool)));
            }
            next += 1;
            if test || (next >= 5 && begin.elapsed().as_secs_f64() > 0.15) {
                return times.iter().map(SortedSamples::median).collect();
            }
        }
    }

    /// Kernels for few tokens, as changes to the tuning table: two of int8, then bf16 tiles made in f32 and in f16.
    fn kernels() -> Vec<(&'static str, fn(&mut LinearTuning))> {
        const NEVER: usize = usize::MAX;
        vec![
            ("vnni", |e| (e.int8_tiles_from, e.tiles_from) = (NEVER, NEVER)),
            ("int8", |e| (e.int8_tiles_from, e.tiles_from) = (1, NEVER)),
            ("bf16", |e| (e.tiles_from, e.half_up_to) = (1, 0)),
            ("f16", |e| (e.tiles_from, e.half_up_to) = (1, NEVER)),
        ]
    }

    fn threshold(pool: &Pool, gauge: &mut Gauge, rng: &mut Rng, test: bool) {
        let kernels = kernels();
        let names: Vec<&str> = kernels.iter().map(|k| k.0).collect();
        println!("threshold: {}, microseconds; * the least", names.join(" / "));
        println!("C: the cores were shared. M: no state had enough samples. ?: samples of different states");
        let ms: &[usize] = if test { &[8, 17] } else { &[4, 8, 10, 12, 16, 17, 24, 32, 48, 64, 128] };
        let shapes: &[(usize, usize)] =
            if test { &[(80, 256)] } else { &[(1536, 576), (2048, 2048), (8192, 2048)] };
        for dtype in DType::ALL.into_iter().filter(|d| d.is_quantised()) {
            for &(n, k) in shapes.iter().filter(|&&(_, k)| dtype.row_bytes(k).is_some()) {
                let w = random(dtype, n, k, rng);
                let sets: Vec<Vec<Linear>> = kernels
                    .iter()
                    .map(|(_, change)| {
                        let mut entries = Tuning::current().linear(dtype);
                        change(&mut entries);
                        cold(&w, Isa::Amx, test, |l| l.with_tuning(entries))
                    })
                    .collect();
                let sets: Vec<&[Linear]> = sets.iter().map(Vec::as_slice).collect();
                let mut line = format!("{:6} {:>12}", dtype.name(), format!("{n}x{k}"));
                for &m in ms {
                    let t = compare((pool, gauge), &w, &sets, m, None, rng, test);
                    let states: Vec<&str> = t.iter().map(|t| t.1.split(' ').next().unwrap_or("")).collect();
                    let mark = match states[0] {
                        first if states.iter().any(|s| *s != first) => "?",
                        "quiet" => "",
                        "contended" => "C",
                        _ => "M",
                    };
                    let least = t.iter().map(|t| t.0).fold(f64::INFINITY, f64::min);
                    let times: Vec<String> = t
                        .iter()
                        .map(|t| format!("{:.0}{}", t.0 * 1e6, if t.0 == least { "*" } else { "" }))
                        .collect();
                    line += &format!("  M={m} {}{mark}", times.join("/"));
                }
                if !test {
                    println!("{line}");
                }
            }
        }
    }

    /// MKL's median seconds for a bf16 weight, cold, and the state of the cores; its first answer checked.
    fn peer(
        mkl: &Mkl,
        (pool, gauge): (&Pool, &mut Gauge),
        w: &Tensor,
        m: usize,
        rng: &mut Rng,
        test: bool,
    ) -> (f64, String) {
        let (n, k) = (w.rows(), w.cols());
        let copies = if test { 1 } else { (192usize << 20).div_ceil(2 * n * k) };
        let one: Vec<u16> = w.data.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect();
        let weights: Vec<AlignedBuffer<u16>> = (0..copies).map(|_| aligned(&one)).collect();
        let x: Vec<f32> = (0..m * k).map(|_| rng.uniform()).collect();
        let bf16: Vec<u16> = x.iter().map(|&v| half::bf16::from_f32(v).to_bits()).collect();
        let bf16 = aligned(&bf16);
        let (mut out, mut times) = (AlignedBuffer::zeros(m * n), SortedSamples::default());
        let (begin, mut next) = (Instant::now(), 0);
        loop {
            let sample = gauge.sample(pool, || {
                let start = Instant::now();
                mkl.gemm_bf16([m, n, k], &bf16, &weights[next % copies], &mut out);
                start.elapsed().as_secs_f64()
            });
            if next == 0 {
                verify(w, &x, &out, n, k, &format!("mkl {n}x{k} M={m}"));
            } else {
                // The first call sets MKL up.
                times.push(sample);
            }
            next += 1;
            if test || (next >= 6 && begin.elapsed().as_secs_f64() > 0.15) {
                return times.median();
            }
        }
    }

    /// Tokens up to which all kernels are compared.
    const FEW: usize = 64;

    /// Cold copies of what multiplies a weight, with a name: 16-bit floats in rows, as in the file, and in tiles, as packed at load.
    fn variants(w: &Tensor, test: bool) -> Vec<(String, Vec<Linear>)> {
        let (dtype, entries) = (w.dtype, Tuning::current().linear(w.dtype));
        if !dtype.is_quantised() {
            let copies = if test { 1 } else { (192usize << 20).div_ceil(w.data.len()).clamp(1, 400) };
            let tiles = (0..copies).map(|_| Linear::from_packed(packed(w), Isa::Amx)).collect();
            let copy = || Tensor::new(dtype, w.shape.clone(), Bytes::copy_of(&w.data)).expect("same size");
            let rows = (0..copies).map(|_| Linear::from_rows(copy(), Isa::Amx)).collect();
            return vec![(dtype.name().into(), rows), (format!("{} tiles", dtype.name()), tiles)];
        }
        let with = |(kernel, change): (&str, fn(&mut LinearTuning))| {
            let mut entries = entries;
            change(&mut entries);
            (format!("{} {kernel}", dtype.name()), cold(w, Isa::Amx, test, |l| l.with_tuning(entries)))
        };
        kernels().into_iter().map(with).collect()
    }

    fn products(pool: &Pool, gauge: &mut Gauge, rng: &mut Rng, test: bool) {
        let peak = amx::peak().map_or(f64::NAN, |p| p.bf16_tiles * pool.threads() as f64);
        let bandwidth = if test { f64::NAN } else { profile::read_bandwidth(pool, 1 << 30, 5) };
        println!(
            "products: {} threads, tile unit {:.2} TFLOP/s, read bandwidth {:.1} GB/s",
            pool.threads(),
            peak / 1e12,
            bandwidth / 1e9
        );
        println!(
            "{:14} {:>12} {:>5} {:>9} {:>9} {:>7} {:>8} {:>7} {:>6}  state",
            "dtype", "N x K", "M", "us", "TFLOP/s", "of L2", "of unit", "GB/s", "% bw"
        );
        println!(
            "of L2: of the bf16 kernel fed from L2 in the same moments, in the line \"from L2\"; ?: in another state"
        );
        let fed = Fed::new(pool, test);
        let mkl = Mkl::load(pool.threads());
        if let Err(why) = &mkl {
            println!("SKIPPED: the peer MKL: {why}");
        }
        let ms: &[usize] = if test { &[5, 40] } else { &[4, 8, 16, 32, 64, 128, 512, 2048] };
        let shapes: &[(usize, usize)] = if test {
            &[(80, 512)]
        } else {
            &[
                (576, 576),
                (3072, 576),
                (576, 1536),
                (2048, 2048),
                (8192, 2048),
                (2048, 8192),
                (4096, 4096),
                (14336, 4096),
            ]
        };
        for dtype in
            [DType::BF16, DType::F16, DType::Q4_0, DType::Q4_1, DType::Q8_0, DType::Q4_K, DType::Q6_K]
        {
            for &(n, k) in shapes.iter().filter(|&&(_, k)| dtype.row_bytes(k).is_some()) {
                let w = random(dtype, n, k, rng);
                let all = variants(&w, test);
                for &m in ms {
                    // Kernels for few tokens beside each other; of many tokens, tiles only.
                    let tried: Vec<&(String, Vec<Linear>)> = all
                        .iter()
                        .filter(|(name, _)| m <= FEW || !(name.ends_with("vnni") || name.ends_with("int8")))
                        .collect();
                    let sets: Vec<&[Linear]> = tried.iter().map(|(_, set)| set.as_slice()).collect();
                    let mut times = compare((pool, &mut *gauge), &w, &sets, m, Some(&fed), rng, test);
                    let (fed_time, fed_state) = times.pop().expect("the last is of what L2 feeds");
                    let limit = fed.ops() / fed_time;
                    let mut lines: Vec<(String, (f64, String))> =
                        tried.iter().map(|(name, _)| name.clone()).zip(times).collect();
                    if let (DType::BF16, Ok(mkl)) = (dtype, &mkl) {
                        lines.push(("mkl".into(), peer(mkl, (pool, &mut *gauge), &w, m, rng, test)));
                    }
                    if test {
                        continue;
                    }
                    println!(
                        "{:14} {:>12} {m:>5} {:>9.1} {:>9.2} {:>7} {:>7.0}% {:>7} {:>6}  {fed_state}",
                        "from L2",
                        "",
                        fed_time * 1e6,
                        limit / 1e12,
                        "",
                        100.0 * limit / peak,
                        "",
                        ""
                    );
                    let kind = |state: &str| state.split(' ').next().map(str::to_owned);
                    for (name, (t, state)) in lines {
                        let (ops, bytes) = (2.0 * (m * n * k) as f64 / t, all[0].1[0].bytes() as f64 / t);
                        println!(
                            "{:14} {:>12} {m:>5} {:>9.1} {:>9.2} {:>5.0}%{} {:>7.0}% {:>7.1} {:>5.0}%  {state}",
                            name,
                            format!("{n}x{k}"),
                            t * 1e6,
                            ops / 1e12,
                            100.0 * ops / limit,
                            if kind(&state) == kind(&fed_state) { " " } else { "?" },
                            100.0 * ops / peak,
                            bytes / 1e9,
                            100.0 * bytes / bandwidth
                        );
                    }
                }
            }
        }
    }

    pub fn main() {
        let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
        let test = args.iter().any(|a| a == "--test");
        let wants = |part: &str| args.iter().all(|a| a.starts_with("--") || a == part);
        match (amx::available(), amx::hardware()) {
            (Err(why), _) => return println!("amx: skipped: {why}"),
            (_, Err(why)) if !test => return println!("amx: skipped: {why}; emulated tiles are not timed"),
            _ => {}
        }
        let pool = Pool::pinned(None);
        let (mut rng, mut gauge) = (Rng(42), Gauge::new(&pool));
        if wants("threshold") {
            threshold(&pool, &mut gauge, &mut rng, test);
        }
        if wants("products") {
            products(&pool, &mut gauge, &mut rng, test);
        }
        println!("amx: every answer agreed with the reference");
    }
}
