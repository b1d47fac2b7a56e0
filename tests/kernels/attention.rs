//! Attention of every tier against an oracle in f64, and against itself: the same bits however a row is
//! batched, chunked or threaded.
//!
//! Tolerance. With u = 2^-24 (f32) and b = 2^-9 (bf16), n tokens, A_t = scale·Σ_d |q_d k_td|:
//!
//! * a score is a chain of head_dim fused operations on a rounded q: δe_t <= (head_dim + 2)·u·A_t, and b·A_t
//!   more where q is rounded to bf16;
//! * a cap c·tanh(e/c) has slope <= 1, so it makes no error larger; of itself it adds the roundings of c in the unit of
//!   scores, of e/c and of the product, and 2 ulp of tanh: 7u of a result that is at most A_t;
//! * a weight is exp(e − m) with e − m rounded (u·|e − m| <= 2·u·A), and m, if counted in
//!   powers of two, once more (u·A), exp within 2 ulp (4u; 2^-18 where P is rounded to bf16), one more such
//!   exp per block and per segment that rescales it, and b where P is rounded to bf16:
//!   η = e^(δe + 3uA) − 1 + 4u·(2 + blocks + segments) [+ b + 2^-18];
//! * numerator and denominator each carry η, and chains of at most n + 2·(blocks + segments) roundings:
//!   |δout| <= 2·(η + (n + 2·(blocks + segments))·u)·Σ w_t |v_t|, plus what exp's cut-off at e^-87 drops.
//!
//! * codes of 8 bits: a score is rounded once more when it is multiplied by its token's scale, and the oracle's key is (u each); so
//!   are a weight and the oracle's value.
//!
//! Keys and values are compared as stored, so their rounding is not part of it.

use std::ops::Range;

use proptest::prelude::*;
use tandem::cache::{KvGeometry, KvType, LayerKv, PAGE_TOKENS, PagePool};
use tandem::host::Pool;
use tandem::simd::Isa;
use tandem::simd::attention::{
    AttnOut, AttnPlan, AttnRows, AttnShape, Partial, PartialMut, SEGMENT, SeqRows, merge_partials,
};
use tandem::tensor::{Rows, RowsMut};
use tandem::{Error, reference};

/// A small generator, so that a failing case is described by its seed.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
    /// Roughly normal, variance 1.
    fn normal(&mut self) -> f32 {
        (0..4).map(|_| (self.next() >> 40) as f32 / (1 << 24) as f32 - 0.5).sum::<f32>() * 1.732
    }
    fn normals(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.normal() * scale).collect()
    }
    fn shuffled(&mut self, n: usize) -> Vec<u32> {
        let mut v: Vec<u32> = (0..n as u32).collect();
        for i in (1..n).rev() {
            v.swap(i, self.below(i + 1));
        }
        v
    }
}

/// Some sequences in one layer, pages scattered, and a query for each of their positions.
struct World {
    shape: AttnShape,
    pool: PagePool,
    /// Pages of each sequence.
    pages: Vec<Vec<u32>>,
    /// `[token][n_heads · head_dim]` of each sequence.
    q: Vec<Vec<f32>>,
    /// `[n_heads]`, or none.
    sinks: Vec<f32>,
}

impl World {
    fn new(shape: AttnShape, dtype: KvType, lens: &[usize], k_scale: f32, rng: &mut Rng) -> World {
        let (hd, h_kv) = (shape.head_dim, shape.n_kv_heads);
        let n_pages: usize = lens.iter().map(|&n| KvGeometry::pages_for(n)).sum::<usize>() + 2;
        let geometry = KvGeometry { n_layers: 2, n_kv_heads: h_kv, head_dim: hd, dtype };
        let pool = PagePool::new(geometry, n_pages).unwrap();
        let kv = pool.layer(1);
        let ids = rng.shuffled(n_pages);
        // What was there before is poison: nothing that is not part of a sequence may enter its result.
        let nan = vec![f32::NAN; h_kv * hd];
        for pos in 0..n_pages * PAGE_TOKENS {
            // SAFETY: one thread, and nobody reads yet.
            unsafe { kv.append(&ids, pos, &nan, &nan) };
        }
        let mut pages = Vec::new();
        let mut rest = &ids[..];
        let mut q = Vec::new();
        for &len in lens {
            let (own, tail) = rest.split_at(KvGeometry::pages_for(len));
            rest = tail;
            for pos in 0..len {
                let (k, v) = (rng.normals(h_kv * hd, k_scale), rng.normals(h_kv * hd, 1.0));
                // SAFETY: one thread, and nobody reads yet.
                unsafe { kv.append(own, pos, &k, &v) };
            }
            pages.push(own.to_vec());
            q.push(rng.normals(len * shape.n_heads * hd, 1.0));
        }
        World { shape, pool, pages, q, sinks: Vec::new() }
    }

    /// Sinks from far below all scores to far above.
    fn with_sinks(mut self, rng: &mut Rng) -> World {
        let mut sink = || match rng.below(6) {
            0 => f32::NEG_INFINITY,
            1 => -90.0,
            2 => 30.0 * rng.normal(),
            _ => 2.0 * rng.normal(),
        };
        self.sinks = (0..self.shape.n_heads).map(|_| sink()).collect();
        self
    }

    fn width(&self) -> usize {
        self.shape.n_heads * self.shape.head_dim
    }

    fn kv(&self) -> LayerKv<'_> {
        self.pool.layer(1)
    }

    /// Attends `parts` = (sequence, first position, rows) in one step; canaries before, between and after.
    fn attend(&self, isa: Isa, threads: usize, parts: &[(usize, usize, usize)]) -> Vec<Vec<f32>> {
        const CANARY: u32 = 0x7fc0_babe;
        let width = self.width();
        let mut q = vec![f32::NAN; width];
        let mut seqs = Vec::new();
        let mut row = 1;
        for &(s, first_pos, n_rows) in parts {
            seqs.push(SeqRows { pages: &self.pages[s], first_pos, n_rows, row0: row });
            q.extend_from_slice(&self.q[s][first_pos * width..(first_pos + n_rows) * width]);
            q.extend(std::iter::repeat_n(f32::NAN, width));
            row += n_rows + 1;
        }
        let mut out = vec![f32::from_bits(CANARY); row * width];
        let mut plan = AttnPlan::new(&self.shape, &seqs, threads).unwrap();
        let pool = Pool::new(threads);
        for _ in 0..2 {
            // Twice: a plan serves many layers.
            if self.sinks.is_empty() {
                plan.run(&pool, isa, &self.kv(), &q, &mut out);
            } else {
                let to = AttnOut::WithSinks(RowsMut::new(&mut out, width), &self.sinks);
                plan.run_rows(&pool, isa, &self.kv(), Rows::new(&q, width), to);
            }
        }
        let mut results = Vec::new();
        let mut untouched = vec![true; row];
        for s in &seqs {
            untouched[s.row0..s.row0 + s.n_rows].fill(false);
            results.push(out[s.row0 * width..(s.row0 + s.n_rows) * width].to_vec());
        }
        for (row, untouched) in untouched.into_iter().enumerate() {
            let clean = out[row * width..(row + 1) * width].iter().all(|x| x.to_bits() == CANARY);
            assert!(!untouched || clean, "row {row} is nobody's and was written");
        }
        results
    }

    fn visible(&self, pos: usize) -> std::ops::Range<usize> {
        self.shape.window.map_or(0, |w| (pos + 1).saturating_sub(w))..pos + 1
    }

    /// Attends `rows` of sequence 0 over `tokens` alone. As beside an accelerator: q lies between other rows, the parts
    /// of a result lie one behind the other, and pages before `tokens` are somewhere else.
    fn attend_part(&self, isa: Isa, rows: Range<usize>, tokens: Range<usize>) -> Partial {
        const CANARY: u32 = 0x7fc0_babe;
        let (width, h, n) = (self.width(), self.shape.n_heads, rows.len());
        let stride = width + 5;
        let mut q = vec![f32::NAN; n * stride];
        for (r, pos) in rows.clone().enumerate() {
            q[r * stride..][..width].copy_from_slice(&self.q[0][pos * width..(pos + 1) * width]);
        }
        let last = tokens.end.min(rows.end).div_ceil(PAGE_TOKENS);
        let elsewhere = (tokens.start / PAGE_TOKENS).min(last);
        let mut pages = vec![u32::MAX; elsewhere];
        pages.extend(&self.pages[0][elsewhere..last]);
        let seq = SeqRows { pages: &pages, first_pos: rows.start, n_rows: n, row0: 0 };
        let mut plan = AttnPlan::new(&self.shape, &[], 2).unwrap();
        plan.rebuild_rows(&[AttnRows { tokens, ..AttnRows::whole(seq) }]);
        let row = 2 * h + width + 3;
        let mut memory = vec![f32::from_bits(CANARY); n * row];
        let at = memory.as_mut_ptr();
        let rows_at = |skip: usize, width: usize| {
            // SAFETY: rows of three parts that do not overlap, inside `memory`, which is looked at only afterwards.
            unsafe { RowsMut::from_raw(at.add(skip), n, width, row) }
        };
        let out = PartialMut { m: rows_at(0, h), s: rows_at(h, h), o: rows_at(2 * h, width) };
        let pool = Pool::new(2);
        plan.run_rows(&pool, isa, &self.kv(), Rows::strided(&q, width, stride), AttnOut::Partial(out));
        let mut part = Partial { m: Vec::new(), s: Vec::new(), o: Vec::new() };
        for row in memory.chunks_exact(row) {
            part.m.extend(&row[..h]);
            part.s.extend(&row[h..2 * h]);
            part.o.extend(&row[2 * h..2 * h + width]);
            assert!(row[2 * h + width..].iter().all(|x| x.to_bits() == CANARY), "written between the rows");
        }
        part
    }

    /// Compares one row with the oracle.
    fn check(&self, isa: Isa, s: usize, pos: usize, got: &[f32]) -> Result<(), String> {
        self.check_tokens(isa, s, pos, 0..usize::MAX, got)
    }

    /// Compares one row, attended over `tokens` alone, with the oracle.
    fn check_tokens(
        &self,
        isa: Isa,
        s: usize,
        pos: usize,
        tokens: Range<usize>,
        got: &[f32],
    ) -> Result<(), String> {
        let (sh, kv) = (&self.shape, self.kv());
        let hd = sh.head_dim;
        let see = self.visible(pos);
        let see = see.start.max(tokens.start)..see.end.min(tokens.end);
        let u = 2f64.powi(-24);
        let rounded = matches!(isa, Isa::Avx512 | Isa::Amx) && kv.dtype() != KvType::F16;
        let scales = if kv.dtype().is_scaled() { 2.0 * u } else { 0.0 };
        let (b, p_exp) = if rounded { (2f64.powi(-9), 2f64.powi(-18)) } else { (0.0, 0.0) };
        for head in 0..sh.n_heads {
            let kv_head = head / (sh.n_heads / sh.n_kv_heads);
            let q = &self.q[s][pos * self.width() + head * hd..][..hd];
            let mut a_max = 0.0f64;
            let scores: Vec<f64> = see
                .clone()
                .map(|t| {
                    let (page, slot) = (self.pages[s][t / PAGE_TOKENS], t % PAGE_TOKENS);
                    let (mut e, mut a) = (0.0, 0.0);
                    for (d, &q) in q.iter().enumerate() {
                        let x = q as f64 * sh.scale as f64 * kv.key(page, kv_head, slot, d) as f64;
                        e += x;
                        a += x.abs();
                    }
                    a_max = a_max.max(a);
                    sh.softcap.map_or(e, |cap| cap as f64 * (e / cap as f64).tanh())
                })
                .collect();
            let sink = self.sinks.get(head).map(|&sink| f64::from(sink));
            let m = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
            let p: Vec<f64> = scores.iter().map(|e| (e - m).exp()).collect();
            let sum: f64 = p.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - m).exp());
            let n = see.len() as f64;
            // A sink is one more part that is merged.
            let merges = 1.0 + f64::from(u8::from(sink.is_some()));
            let cuts = (n / 64.0).ceil() + 1.0 + (n / SEGMENT as f64).ceil() + merges;
            let cap = if sh.softcap.is_some() { 7.0 * u } else { 0.0 };
            let de = a_max * ((hd as f64 + 2.0) * u + b + cap + scales);
            let eta = (de + 3.0 * u * a_max).exp_m1() + 4.0 * u * (2.0 + cuts) + b + p_exp + scales;
            for d in 0..hd {
                let (mut want, mut mass, mut biggest) = (0.0, 0.0, 0.0f64);
                for (t, p) in see.clone().zip(&p) {
                    let (page, slot) = (self.pages[s][t / PAGE_TOKENS], t % PAGE_TOKENS);
                    let v = kv.value(page, kv_head, slot, d) as f64;
                    want += p * v;
                    mass += p * v.abs();
                    biggest = biggest.max(v.abs());
                }
                if sum > 0.0 {
                    want /= sum;
                    mass /= sum;
                }
                let tol = 2.0 * (eta + (n + 2.0 * cuts) * u) * mass + n * biggest * (-87f64).exp();
                let got = got[head * hd + d] as f64;
                if (got - want).abs().partial_cmp(&tol).is_none_or(|o| o.is_gt()) {
                    return Err(format!(
                        "{isa} {}: sequence {s} position {pos} head {head} dim {d}: got {got}, want {want} ± {tol:e}",
                        kv.dtype().name()
                    ));
                }
            }
        }
        Ok(())
    }
}

fn shape(n_kv_heads: usize, group: usize, head_dim: usize, window: Option<usize>) -> AttnShape {
    let scale = 1.0 / (head_dim as f32).sqrt();
    AttnShape { n_heads: n_kv_heads * group, n_kv_heads, head_dim, scale, softcap: None, window }
}

/// Whether tile instructions are executed in software (`TANDEM_AMX=emulate`), a thousand times slower.
fn emulated() -> bool {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    return tandem::amx::emulate::installed();
    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    false
}

fn tiers() -> Vec<Isa> {
    for isa in Isa::ALL {
        if let Some(why) = isa.missing() {
            println!("skipped: tier {isa}: {why}");
        }
    }
    Isa::supported()
}

/// Lengths around the edges of lanes, pages, blocks and segments.
fn a_length() -> impl Strategy<Value = usize> {
    prop_oneof![
        prop::sample::select(vec![
            1usize, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 511, 512, 513, 575, 577
        ]),
        1..700usize,
    ]
}

fn a_shape() -> impl Strategy<Value = AttnShape> {
    let window = prop_oneof![
        3 => Just(None),
        1 => prop::sample::select(vec![1usize, 2, 16, 31, 33, 64, 100, 512, 513]).prop_map(Some),
    ];
    let dims = prop::sample::select(vec![16usize, 48, 64, 80, 96, 112, 128, 256]);
    // From one that bends all scores to one that bends few.
    let softcap = prop_oneof![
        2 => Just(None),
        1 => prop::sample::select(vec![0.5f32, 3.0, 50.0]).prop_map(Some),
    ];
    (1..3usize, 1..9usize, dims, window, softcap)
        .prop_map(|(h, g, d, w, softcap)| AttnShape { softcap, ..shape(h, g, d, w) })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Ragged batches of prefill chunks and decodes, against the oracle, in every tier.
    #[test]
    fn every_tier_agrees_with_the_oracle(
        shape in a_shape(),
        lens in prop::collection::vec(a_length(), 1..4),
        dtype in prop::sample::select(KvType::ALL.to_vec()),
        sinks in any::<bool>(),
        k_scale in prop::sample::select(vec![0.1f32, 1.0, 4.0]),
        seed in any::<u64>(),
    ) {
        let mut rng = Rng(seed);
        let world = World::new(shape, dtype, &lens, k_scale, &mut rng);
        let world = if sinks { world.with_sinks(&mut rng) } else { world };
        // The last rows of each sequence, few enough for the oracle to stay quick.
        let parts: Vec<_> = lens.iter().enumerate().map(|(s, &len)| {
            let rows = (1 + rng.below(20)).min(len);
            (s, len - rows, rows)
        }).collect();
        for isa in tiers() {
            let out = world.attend(isa, 2, &parts);
            for (&(s, first, rows), out) in parts.iter().zip(&out) {
                for i in [0, rows / 2, rows - 1] {
                    let row = &out[i * world.width()..(i + 1) * world.width()];
                    prop_assert_eq!(world.check(isa, s, first + i, row), Ok(()));
                }
            }
        }
    }

    /// Prefill at once = prefill in chunks = decode token by token; alone = batched; 1 thread = 2 = 3.
    #[test]
    fn a_row_has_the_same_bits_however_it_is_computed(
        shape in a_shape(),
        len in a_length(),
        other in a_length(),
        dtype in prop::sample::select(KvType::ALL.to_vec()),
        sinks in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let mut rng = Rng(seed);
        let world = World::new(shape, dtype, &[len, other], 1.0, &mut rng);
        let world = if sinks { world.with_sinks(&mut rng) } else { world };
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let width = world.width();
        for isa in tiers() {
            let slow = isa == Isa::Reference || isa == Isa::Amx && emulated();
            if slow && len * shape.n_heads * shape.head_dim * len > 20_000_000 {
                continue; // minutes in the oracle or on emulated tiles; smaller cases take the same paths
            }
            let whole = bits(&world.attend(isa, 1, &[(0, 0, len)])[0]);
            // In chunks, cut anywhere, on other numbers of threads.
            let mut pos = 0;
            while pos < len {
                let n = (1 + rng.below(200)).min(len - pos);
                let threads = 1 + rng.below(3);
                let chunk = bits(&world.attend(isa, threads, &[(0, pos, n)])[0]);
                prop_assert_eq!(&chunk[..], &whole[pos * width..(pos + n) * width], "{} chunk {}+{}", isa, pos, n);
                pos += n;
            }
            // As decode, alone and beside another sequence, on 1, 2 and 3 threads.
            for _ in 0..6 {
                let pos = rng.below(len);
                let want = &whole[pos * width..(pos + 1) * width];
                for threads in 1..4 {
                    let alone = bits(&world.attend(isa, threads, &[(0, pos, 1)])[0]);
                    prop_assert_eq!(&alone[..], want, "{} decode {} on {} threads", isa, pos, threads);
                    let first = rng.below(other);
                    let rows = 1 + rng.below(other - first).min(if slow { 2 } else { 40 });
                    let beside = world.attend(isa, threads, &[(1, first, rows), (0, pos, 1)]);
                    prop_assert_eq!(&bits(&beside[1])[..], want, "{} decode {} in a batch", isa, pos);
                }
            }
        }
    }

    /// Tokens split between devices, which attend them apart, sliding windows included: partial results merge to the
    /// whole, in any order, and each is right by itself. Sinks join when parts are merged.
    #[test]
    fn partial_results_of_disjoint_tokens_merge_to_the_whole(
        shape in a_shape(),
        len in 2..700usize,
        dtype in prop::sample::select(KvType::ALL.to_vec()),
        sinks in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let mut rng = Rng(seed);
        let world = World::new(shape, dtype, &[len], 1.0, &mut rng);
        let world = if sinks { world.with_sinks(&mut rng) } else { world };
        let sinks = sinks.then_some(&world.sinks[..]);
        let (width, n) = (world.width(), (1 + rng.below(6)).min(len));
        let rows = len - n..len;
        let pages = len.div_ceil(PAGE_TOKENS);
        let mut cuts = [rng.below(pages + 1), rng.below(pages + 1)].map(|page| page * PAGE_TOKENS);
        cuts.sort_unstable();
        // One part alone ends anywhere.
        let alone = cuts[0]..cuts[0] + rng.below(len - cuts[0].min(len) + 2);
        for isa in tiers() {
            let bounds = [0, cuts[0], cuts[1], usize::MAX];
            let parts: Vec<Partial> =
                bounds.windows(2).map(|b| world.attend_part(isa, rows.clone(), b[0]..b[1])).collect();
            for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
                let mut out = vec![0.0; n * width];
                merge_partials(&order.map(|i| &parts[i]), shape.head_dim, sinks, &mut out);
                for (i, row) in out.chunks_exact(width).enumerate() {
                    prop_assert_eq!(world.check(isa, 0, rows.start + i, row), Ok(()), "cut at {:?}", cuts);
                }
            }
            let part = world.attend_part(isa, rows.clone(), alone.clone());
            let mut out = vec![0.0; n * width];
            merge_partials(&[&part], shape.head_dim, sinks, &mut out);
            for (i, row) in out.chunks_exact(width).enumerate() {
                let pos = rows.start + i;
                prop_assert_eq!(world.check_tokens(isa, 0, pos, alone.clone(), row), Ok(()), "of {:?}", alone);
                let see = world.visible(pos);
                let nothing = see.start.max(alone.start) >= see.end.min(alone.end);
                let m = &part.m[i * shape.n_heads..(i + 1) * shape.n_heads];
                prop_assert_eq!(nothing, m.iter().all(|&m| m == f32::NEG_INFINITY), "position {}", pos);
            }
        }
    }
}

/// A sink takes part in the softmax once, however many parts a row was computed in; one far below all scores changes nothing, and one
/// far above leaves nothing.
#[test]
fn a_sink_joins_once() {
    let mut world = World::new(shape(2, 4, 64, None), KvType::F16, &[3 * SEGMENT + 7], 0.0, &mut Rng(3));
    let last = 3 * SEGMENT + 6;
    let attend = |world: &World, isa, threads| world.attend(isa, threads, &[(0, last, 1)]).remove(0);
    for isa in tiers() {
        world.sinks.clear();
        let without = attend(&world, isa, 1);
        world.sinks = vec![f32::NEG_INFINITY; 8];
        assert_eq!(attend(&world, isa, 3), without, "{isa}");
        world.sinks = vec![200.0; 8];
        assert!(attend(&world, isa, 3).iter().all(|&x| x == 0.0), "{isa}");
        // Keys are zero, so all scores are: the sink gets as much as all n tokens together.
        world.sinks = vec![((last + 1) as f32).ln(); 8];
        for threads in [1, 3] {
            let halved = attend(&world, isa, threads);
            let far =
                halved.iter().zip(&without).find(|(a, b)| (2.0 * **a - **b).abs() > 1e-5 + 1e-4 * b.abs());
            assert_eq!(far, None, "{isa}, {threads} threads");
        }
    }
}

#[test]
#[should_panic(expected = "3 sinks, 8 heads")]
fn sinks_of_other_heads_panic() {
    let mut world = World::new(shape(2, 4, 64, None), KvType::F16, &[5], 1.0, &mut Rng(3));
    world.sinks = vec![0.0; 3];
    world.attend(Isa::Reference, 1, &[(0, 4, 1)]);
}

/// Work items of some KV heads: the results of the others are somebody else's.
#[test]
fn heads_that_are_not_attended_stay_as_they_are() {
    let world = World::new(shape(3, 2, 64, Some(100)), KvType::BF16, &[600], 1.0, &mut Rng(5));
    let width = world.width();
    for isa in tiers() {
        let whole = &world.attend(isa, 2, &[(0, 598, 2)])[0];
        let seq = SeqRows { pages: &world.pages[0], first_pos: 598, n_rows: 2, row0: 0 };
        let mut plan = AttnPlan::new(&world.shape, &[], 2).unwrap();
        let mut out = vec![-1.0; 2 * width];
        for kv_heads in [1..2, 2..3] {
            plan.rebuild_rows(&[AttnRows { kv_heads, ..AttnRows::whole(seq) }]);
            plan.run(&Pool::new(2), isa, &world.kv(), &world.q[0][598 * width..], &mut out);
        }
        for (got, want) in out.chunks_exact(width).zip(whole.chunks_exact(width)) {
            let heads = 2 * 64;
            assert!(got[..heads].iter().all(|&x| x == -1.0), "{isa}");
            assert_eq!(got[heads..], want[heads..], "{isa}");
        }
    }
}

/// Large head groups (multi-query attention) and long contexts, which proptest's sizes do not reach.
#[test]
fn wide_groups_and_long_contexts_agree_with_the_oracle() {
    for (shape, len) in [
        (shape(1, 71, 64, None), 130),
        (shape(1, 40, 128, Some(50)), 200),
        (shape(3, 3, 64, None), 4096 + 33),
        (shape(2, 4, 128, Some(1024)), 3000),
    ] {
        for dtype in KvType::ALL {
            let world = World::new(shape, dtype, &[len], 1.0, &mut Rng(7));
            for isa in tiers().into_iter().filter(|&i| i > Isa::Reference || len < 500) {
                let rows = 3;
                let many = world.attend(isa, 2, &[(0, len - rows, rows)]);
                for i in 0..rows {
                    let row = &many[0][i * world.width()..(i + 1) * world.width()];
                    world.check(isa, 0, len - rows + i, row).unwrap();
                    let alone = world.attend(isa, 1, &[(0, len - rows + i, 1)]);
                    assert!(
                        alone[0].iter().zip(row).all(|(a, b)| a.to_bits() == b.to_bits()),
                        "{isa} row {i}"
                    );
                }
            }
        }
    }
}

/// One head of 16 dims whose scores and values are given.
fn scripted(scores: &[f32], values: &[f32], dtype: KvType) -> World {
    let shape =
        AttnShape { n_heads: 1, n_kv_heads: 1, head_dim: 16, scale: 1.0, softcap: None, window: None };
    let mut world = World::new(shape, dtype, &[scores.len()], 1.0, &mut Rng(3));
    world.q[0].fill(0.0);
    for (pos, (&e, &v)) in scores.iter().zip(values).enumerate() {
        let (mut k, v) = ([0.0; 16], [v; 16]);
        k[0] = e;
        // SAFETY: one thread.
        unsafe { world.kv().append(&world.pages[0], pos, &k, &v) };
        world.q[0][pos * 16] = 1.0;
    }
    world
}

#[test]
fn the_papers_example_gives_24_2_however_split() {
    let (scores, values) = ([2.0, 4.0, 1.0, 0.0, 1.0, 2.0], [10.0, 30.0, 5.0, 2.0, 8.0, 12.0]);
    for dtype in KvType::ALL {
        for isa in tiers() {
            let whole = scripted(&scores, &values, dtype).attend(isa, 1, &[(0, 5, 1)]);
            assert!((whole[0][0] - 24.2).abs() < 0.1, "{isa}: {}", whole[0][0]);
            // Two parts, then each token its own part, forwards and backwards.
            let part = |from: usize, to: usize| {
                let w = scripted(&scores[from..to], &values[from..to], dtype);
                let rows = SeqRows { pages: &w.pages[0], first_pos: to - from - 1, n_rows: 1, row0: 0 };
                let mut part = Partial::empty(1, 1, 16);
                AttnPlan::new(&w.shape, &[rows], 1).unwrap().run_partial(
                    &Pool::new(1),
                    isa,
                    &w.kv(),
                    &w.q[0],
                    &mut part,
                );
                part
            };
            let singles: Vec<Partial> = (0..6).map(|t| part(t, t + 1)).collect();
            let mut splits: Vec<Vec<Partial>> = (1..6).map(|cut| vec![part(0, cut), part(cut, 6)]).collect();
            splits.push(singles.clone());
            splits.push(singles.into_iter().rev().collect());
            for parts in splits {
                let mut out = [0.0; 16];
                merge_partials(&parts.iter().collect::<Vec<_>>(), 16, None, &mut out);
                assert!((out[0] - 24.2).abs() < 0.1, "{isa} in {} parts: {}", parts.len(), out[0]);
            }
        }
    }
}

#[test]
fn extreme_scores_neither_overflow_nor_leave_nan() {
    let inf = f32::INFINITY;
    for isa in tiers() {
        for dtype in KvType::ALL {
            // One score dwarfs the rest: the output is its value.
            let mut scores = vec![-3e4; 600];
            scores[37] = 3e4;
            let values: Vec<f32> = (0..600).map(|t| (t % 128) as f32).collect();
            let out = scripted(&scores, &values, dtype).attend(isa, 2, &[(0, 599, 1)]);
            // Of codes the one weight, 1, is rounded to bf16 with its scale, and the scale was rounded.
            let off = if dtype.is_scaled() { 2f32.powi(-8) } else { 0.0 };
            let near = |x: f32| (x - 37.0).abs() <= off * 37.0;
            assert!(out[0].iter().all(|&x| near(x)), "{isa} {}: {:?}", dtype.name(), &out[0][..4]);
            // −∞ hides a token.
            let mut scores = vec![-inf; 600];
            scores[550] = 1.0;
            let out = scripted(&scores, &values, dtype).attend(isa, 2, &[(0, 599, 1)]);
            if dtype.is_scaled() {
                // Codes have no infinity: such a key is no number, and neither is what attends it.
                assert!(out[0].iter().all(|x| x.is_nan()), "{isa}: {:?}", &out[0][..4]);
            } else {
                let want = (550 % 128) as f32;
                assert!(out[0].iter().all(|&x| x == want), "{isa} {}", dtype.name());
                // Nothing but −∞: nothing is attended, the output is 0 and not NaN.
                let out = scripted(&[-inf; 70], &[1.0; 70], dtype).attend(isa, 1, &[(0, 69, 1)]);
                assert!(out[0].iter().all(|&x| x == 0.0), "{isa} {}: {:?}", dtype.name(), &out[0][..4]);
            }
            // A window of 0 tokens sees nothing, at segment edges too.
            let mut world = scripted(&[1.0; 520], &[1.0; 520], dtype);
            world.shape.window = Some(0);
            let out = world.attend(isa, 2, &[(0, 500, 20)]);
            assert!(out[0].iter().all(|&x| x == 0.0), "{isa} {}", dtype.name());
        }
    }
}

#[test]
fn equal_values_come_out_unchanged() {
    // The sum adds the weights as rounded, so the output is a convex combination of values.
    for isa in tiers() {
        let mut rng = Rng(11);
        let scores: Vec<f32> = (0..700).map(|_| rng.normal() * 3.0).collect();
        let out = scripted(&scores, &[1.0; 700], KvType::BF16).attend(isa, 2, &[(0, 699, 1)]);
        assert!(out[0].iter().all(|x| (x - 1.0).abs() < 700.0 * 2f32.powi(-24)), "{isa}: {:?}", &out[0][..4]);
    }
}

#[test]
fn the_reference_segment_agrees_with_the_oracle() {
    let shape = shape(2, 2, 64, None);
    let world = World::new(shape, KvType::BF16, &[100], 1.0, &mut Rng(5));
    let mut out = vec![0.0; world.width()];
    let mut o = vec![0.0; 64];
    for head in 0..4 {
        let q = &world.q[0][99 * world.width() + head * 64..][..64];
        let kv = world.kv();
        let (_, s) = reference::attention::segment(
            &kv,
            &world.pages[0],
            head / 2,
            0..100,
            (shape.scale, None),
            q,
            &mut o,
        );
        for (out, o) in out[head * 64..].iter_mut().zip(&o) {
            *out = o / s;
        }
    }
    world.check(Isa::Reference, 0, 99, &out).unwrap();
}

#[test]
fn shapes_that_kernels_do_not_cover_are_typed_errors() {
    for (n_heads, n_kv_heads, head_dim) in [(4, 2, 72), (4, 2, 0), (4, 3, 64), (4, 0, 64), (0, 2, 64)] {
        let shape = AttnShape { n_heads, n_kv_heads, head_dim, scale: 1.0, softcap: None, window: None };
        let e = AttnPlan::new(&shape, &[], 1).err().expect("must be refused");
        assert!(matches!(e, Error::Unsupported(_)), "{e}");
    }
}

#[test]
fn an_empty_step_is_no_work() {
    let world = World::new(shape(1, 1, 16, None), KvType::BF16, &[1], 1.0, &mut Rng(1));
    let none = SeqRows { pages: &[], first_pos: 0, n_rows: 0, row0: 0 };
    let mut plan = AttnPlan::new(&world.shape, &[none], 2).unwrap();
    plan.run(&Pool::new(2), Isa::best(), &world.kv(), &[], &mut []);
    plan.rebuild(&[]);
    plan.run(&Pool::new(2), Isa::best(), &world.kv(), &[], &mut []);
}

#[test]
#[should_panic(expected = "share rows")]
fn sequences_that_share_rows_are_refused() {
    let a = SeqRows { pages: &[0], first_pos: 0, n_rows: 3, row0: 0 };
    let b = SeqRows { pages: &[1], first_pos: 0, n_rows: 1, row0: 2 };
    let _ = AttnPlan::new(&shape(1, 1, 16, None), &[a, b], 1);
}
