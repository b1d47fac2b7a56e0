//! Attention kernels of accelerators against an oracle in f64, and against themselves: the same bits however a
//! row is batched or chunked.
//!
//! Tolerance. With u = 2^-24 (f32), b half an ulp of the KV type at 1 (2^-8 bf16, 2^-11 f16), n tokens seen in
//! t tiles, A = max_t scale·Σ_d |q_d k_td|:
//!
//! * products of 16-bit floats are exact in f32; tensor cores may truncate where they add: 2u a step. With the
//!   scale rounded twice and the largest score subtracted: δe <= (2·head_dim + 8)·u·A;
//! * a weight is 2^x with x rounded as above (4u), rescaled at most once a tile, warp and split (5u each, the
//!   exponents' roundings telescope to 2uA), and rounded to the KV type (b):
//!   η = e^(δe + 2uA) − 1 + (4 + 5·(t + 8))·u + b;
//! * sums of up to n + t + 8 terms: 2u each. Numerator and denominator carry both:
//!   |δout| <= 2·(η + 2·(n + t + 8)·u)·Σ w_t |v_t|
//! * an f16 weight below 2^-14 of the largest is rounded absolutely: 2^-25·Σ |v_t| more, twice;
//! * out is rounded: half an ulp of its type.

mod support;

use std::sync::Arc;

use half::{bf16, f16};
use proptest::prelude::*;
use support::gpu::{self, Rng};
use tandem::device::accelerator::{Half, PartialRows};
use tandem::device::kernels::abi::{ATTENTION_FINAL, DecodeItem, PrefillItem};
use tandem::device::kernels::attention::*;
use tandem::device::runtime::{Buffer, Lane, Runtime};

const PAGE: usize = 32;
const LANE: Lane = Lane::Compute;
/// What memory holds that nobody should read, or write.
const CANARY: u32 = 0x7fc0_babe;

fn encode(t: Half, x: f32) -> u16 {
    match t {
        Half::F16 => f16::from_f32(x).to_bits(),
        Half::BF16 => bf16::from_f32(x).to_bits(),
    }
}

fn decode(t: Half, x: u16) -> f64 {
    match t {
        Half::F16 => f16::from_bits(x).to_f64(),
        Half::BF16 => bf16::from_bits(x).to_f64(),
    }
}

/// Half an ulp at 1.
fn epsilon(t: Half) -> f64 {
    match t {
        Half::F16 => 2f64.powi(-11),
        Half::BF16 => 2f64.powi(-8),
    }
}

fn bytes<T: Copy>(x: &[T]) -> &[u8] {
    // SAFETY: only called with u16, u32 and f32.
    unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), size_of_val(x)) }
}

/// Rows of a sequence in a step.
#[derive(Debug, Clone, Copy)]
struct Part {
    first_pos: usize,
    n_rows: usize,
    /// Tokens before are elsewhere: their pages are not in the table.
    from: usize,
    partial: bool,
}

impl Part {
    /// The row at `pos` alone.
    fn decode(pos: usize) -> Part {
        Part { first_pos: pos, n_rows: 1, from: 0, partial: false }
    }
    fn chunk(first_pos: usize, n_rows: usize) -> Part {
        Part { first_pos, n_rows, from: 0, partial: false }
    }
}

/// One layer: a sequence per part, pages scattered, NaN wherever no token was appended.
#[derive(Clone)]
struct World {
    shape: AttentionShape,
    window: Option<usize>,
    /// What prefill runs on.
    kernel: PrefillKernel,
    parts: Vec<Part>,
    /// First row of each part: one canary row between them.
    row0: Vec<usize>,
    rows: usize,
    q: Vec<u16>,
    kv: Vec<u16>,
    /// Pages of each sequence.
    pages: Vec<Vec<u32>>,
}

/// What a step wrote.
#[derive(Debug, Clone, PartialEq)]
struct Output {
    out: Vec<u16>,
    m: Vec<u32>,
    s: Vec<u32>,
    o: Vec<u32>,
}

impl World {
    fn new(shape: AttentionShape, window: Option<usize>, parts: &[Part], k_scale: f32, seed: u64) -> World {
        let mut rng = Rng::new(seed);
        let (hd, h_kv) = (shape.head_dim, shape.n_kv_heads);
        let lens: Vec<usize> = parts.iter().map(|p| p.first_pos + p.n_rows).collect();
        let n_pages: usize = lens.iter().map(|n| n.div_ceil(PAGE)).sum::<usize>() + 1;
        let mut ids: Vec<u32> = (0..n_pages as u32).collect();
        for i in (1..n_pages).rev() {
            ids.swap(i, rng.below(i + 1));
        }
        let mut kv = vec![encode(shape.kv, f32::NAN); n_pages * h_kv * 2 * PAGE * hd];
        let (mut pages, mut rest) = (Vec::new(), &ids[..]);
        for &len in &lens {
            let (own, tail) = rest.split_at(len.div_ceil(PAGE));
            rest = tail;
            for pos in 0..len {
                for head in 0..h_kv {
                    for half in 0..2 {
                        let at = ((own[pos / PAGE] as usize * h_kv + head) * 2 + half) * PAGE * hd
                            + pos % PAGE * hd;
                        for d in 0..hd {
                            kv[at + d] =
                                encode(shape.kv, rng.normal() * if half == 0 { k_scale } else { 1.0 });
                        }
                    }
                }
            }
            pages.push(own.to_vec());
        }
        let (mut row0, mut rows) = (Vec::new(), 1);
        for p in parts {
            row0.push(rows);
            rows += p.n_rows + 1;
        }
        let width = shape.n_heads * hd;
        let mut q = vec![encode(shape.kv, f32::NAN); rows * width];
        for (p, &r) in parts.iter().zip(&row0) {
            q[r * width..(r + p.n_rows) * width].fill_with(|| encode(shape.kv, rng.normal()));
        }
        World { shape, window, kernel: PrefillKernel::Mma, parts: parts.to_vec(), row0, rows, q, kv, pages }
    }

    /// The same, prefill on another kernel.
    fn on(&self, kernel: PrefillKernel) -> World {
        World { kernel, ..self.clone() }
    }

    /// All kernels that prefill can run on; one if nothing is prefilled.
    fn kernels(&self, rt: &Arc<dyn Runtime>) -> Vec<PrefillKernel> {
        let mut kernels = PrefillKernel::available(&**rt, &self.shape);
        if self.parts.iter().all(|p| p.n_rows == 1) {
            kernels.truncate(1);
        }
        kernels
    }

    fn width(&self) -> usize {
        self.shape.n_heads * self.shape.head_dim
    }

    fn page_start(&self, part: usize) -> usize {
        self.parts[part].from / PAGE
    }

    /// Rows of partial output before part `part`.
    fn partial_row(&self, part: usize) -> usize {
        self.parts[..part].iter().map(|p| if p.partial { p.n_rows } else { 0 }).sum()
    }

    /// What the planner is told: the parts in `which`, the pages of all sequences in one table.
    fn plan(&self, which: &[usize], padding: std::ops::Range<u32>) -> (Plan, Vec<u32>) {
        let mut table = vec![u32::MAX]; // no such page
        let mut rows = Vec::new();
        for &i in which {
            let p = &self.parts[i];
            rows.push(Rows {
                row0: self.row0[i] as u32,
                n_rows: p.n_rows as u32,
                first_pos: p.first_pos as u32,
                from: p.from as u32,
                page: table.len() as u32,
                partial: p.partial.then(|| self.partial_row(i) as u32),
            });
            table.extend(self.pages[i].iter().skip(self.page_start(i)));
            table.push(u32::MAX);
        }
        (Plan::new(&rows, padding, self.window.map(|w| w as u32), self.kernel.queries()), table)
    }

    fn run(&self, rt: &Arc<dyn Runtime>, which: &[usize]) -> Output {
        let (plan, table) = self.plan(which, 0..0);
        self.run_plan(rt, &plan, &table)
    }

    /// Runs a plan twice, as two layers would.
    fn run_plan(&self, rt: &Arc<dyn Runtime>, plan: &Plan, table: &[u32]) -> Output {
        let shape = &self.shape;
        shape.check(&**rt).unwrap();
        let up = |data: &[u8]| Buffer::from_bytes(rt, LANE, data).unwrap();
        let (q, kv, table) = (up(bytes(&self.q)), up(bytes(&self.kv)), up(bytes(table)));
        let decode_items = up(decode_item_bytes(&plan.decode));
        let prefill_items = up(prefill_item_bytes(&plan.prefill));
        let n_decode = up(bytes(&[plan.decode.len() as u32]));
        let n_prefill = up(bytes(&[plan.prefill.len() as u32]));
        let n = self.rows * self.width();
        let n_partial = self.partial_row(self.parts.len());
        let out = up(bytes(&vec![CANARY; n.div_ceil(2)]));
        let canary = |n: usize| up(bytes(&vec![CANARY; n.max(1)]));
        let m = canary(n_partial * shape.n_heads);
        let s = canary(n_partial * shape.n_heads);
        let o = canary(n_partial * self.width());
        let partial = PartialRows { m: m.ptr(), s: s.ptr(), o: o.ptr() };
        // Counters are zero, the rest is what was there before.
        let bytes_all = DecodeWorkspace::bytes(shape, self.rows, plan.splits);
        let zeroed = DecodeWorkspace::bytes(shape, self.rows, 0) - 16;
        let mut workspace = vec![0xffu8; bytes_all];
        workspace[..zeroed].fill(0);
        let workspace = up(&workspace);

        let mut first = None;
        for _ in 0..2 {
            let args = DecodeAttention {
                q: q.ptr(),
                kv: kv.ptr(),
                page_table: table.ptr(),
                items: decode_items.ptr(),
                n_items: n_decode.ptr(),
                max_items: plan.decode.len() + 3,
                out: out.ptr(),
                partial,
                workspace: DecodeWorkspace::at(workspace.ptr(), shape, self.rows, plan.splits),
            };
            decode_attention(&**rt, LANE, shape, &args).unwrap();
            let args = PrefillAttention {
                kernel: self.kernel,
                n_pages: self.kv.len() / (2 * PAGE * shape.head_dim * shape.n_kv_heads),
                q: q.ptr(),
                kv: kv.ptr(),
                page_table: table.ptr(),
                items: prefill_items.ptr(),
                n_items: n_prefill.ptr(),
                max_items: plan.prefill.len() + usize::from(!plan.prefill.is_empty()),
                window: self.window.map(|w| w as u32),
                out: out.ptr(),
                partial,
            };
            prefill_attention(&**rt, LANE, shape, &args).unwrap();
            let down = |b: &Buffer, n: usize| -> Vec<u32> {
                let mut v = vec![0u8; n * 4];
                rt.download(LANE, b.ptr(), &mut v).unwrap();
                v.chunks_exact(4).map(|c| u32::from_le_bytes(c.try_into().unwrap())).collect()
            };
            let mut all = down(&out, n.div_ceil(2));
            let result = Output {
                out: all.drain(..).flat_map(|w| [w as u16, (w >> 16) as u16]).take(n).collect(),
                m: down(&m, n_partial * shape.n_heads),
                s: down(&s, n_partial * shape.n_heads),
                o: down(&o, n_partial * self.width()),
            };
            assert!(
                down(&workspace, zeroed / 4).iter().all(|&c| c == 0),
                "counters are zero again after a launch"
            );
            if let Some(first) = &first {
                assert_eq!(first, &result, "a second run of the same plan");
            }
            first = Some(result);
        }
        first.unwrap()
    }

    /// The oracle: (max, ln Σ e^(x − max), Σ w|v| and Σ|v| and result per element, A, tokens) of a row's head over
    /// tokens from..to.
    fn oracle(&self, part: usize, row: usize, head: usize, tokens: std::ops::Range<usize>) -> Oracle {
        let (hd, h_kv) = (self.shape.head_dim, self.shape.n_kv_heads);
        let kv_head = head / (self.shape.n_heads / h_kv);
        let pos = self.parts[part].first_pos + row;
        let low = tokens.start.max((pos + 1).saturating_sub(self.window.unwrap_or(usize::MAX)));
        let high = tokens.end.min(pos + 1);
        let q = &self.q[(self.row0[part] + row) * self.width() + head * hd..][..hd];
        let kv = |t: usize, half: usize, d: usize| {
            let page = self.pages[part][t / PAGE] as usize;
            decode(
                self.shape.kv,
                self.kv[((page * h_kv + kv_head) * 2 + half) * PAGE * hd + t % PAGE * hd + d],
            )
        };
        let scale = f64::from(self.shape.scale);
        let (mut x, mut a) = (Vec::new(), 0f64);
        for t in low..high {
            let (mut dot, mut abs) = (0.0, 0.0);
            for d in 0..hd {
                let p = decode(self.shape.kv, q[d]) * kv(t, 0, d);
                dot += p;
                abs += p.abs();
            }
            x.push(dot * scale);
            a = a.max(abs * scale);
        }
        let m = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let w: Vec<f64> = x.iter().map(|x| (x - m).exp()).collect();
        let s: f64 = w.iter().sum();
        let (mut out, mut weighted, mut plain) = (vec![0.0; hd], vec![0.0; hd], vec![0.0; hd]);
        for (i, t) in (low..high).enumerate() {
            for d in 0..hd {
                let v = kv(t, 1, d);
                out[d] += w[i] / s * v;
                weighted[d] += w[i] / s * v.abs();
                plain[d] += v.abs() / s;
            }
        }
        Oracle { m, s, out, weighted, plain, a, n: x.len() }
    }

    /// Compares everything that `which` should have written, and that nothing else was.
    fn check(&self, which: &[usize], got: &Output, what: &str) {
        let (hd, heads, width) = (self.shape.head_dim, self.shape.n_heads, self.width());
        let mut written = vec![false; self.rows];
        for &i in which {
            let p = &self.parts[i];
            for row in 0..p.n_rows {
                let at = self.row0[i] + row;
                written[at] = !p.partial;
                for head in 0..heads {
                    let want = self.oracle(i, row, head, p.from..usize::MAX);
                    let name = format!("{what}: {p:?} row {row} head {head}");
                    if p.partial {
                        let r = (self.partial_row(i) + row) * heads + head;
                        let f = |v: &[u32], j: usize| f64::from(f32::from_bits(v[j]));
                        let (m, s) = (f(&got.m, r), f(&got.s, r));
                        if want.n == 0 {
                            assert_eq!((m, s), (f64::NEG_INFINITY, 0.0), "{name}");
                            assert!(
                                got.o[r * hd..(r + 1) * hd].iter().all(|&o| o == 0),
                                "{name}: {:?}",
                                &got.o[r * hd..][..hd]
                            );
                            continue;
                        }
                        let total = m - want.m + (s / want.s).ln();
                        let bound = want.weights(self.shape.kv, hd) + 4.0 * U * want.a;
                        assert!(total.abs() <= bound, "{name}: sum off by {total}, allowed {bound}");
                        for d in 0..hd {
                            want.close(&self.shape, d, f(&got.o, r * hd + d) / s, U, &name);
                        }
                    } else {
                        for d in 0..hd {
                            let x = decode(self.shape.out, got.out[at * width + head * hd + d]);
                            want.close(&self.shape, d, x, epsilon(self.shape.out), &name);
                        }
                    }
                }
            }
        }
        for (row, written) in written.iter().enumerate() {
            if !written {
                let untouched = (0..width).all(|d| {
                    let w = row * width + d;
                    got.out[w] == (if w % 2 == 0 { CANARY as u16 } else { (CANARY >> 16) as u16 })
                });
                assert!(untouched, "{what}: row {row} is nobody's");
            }
        }
    }

    /// What is one part's of an output.
    fn rows_of(&self, i: usize, got: &Output) -> Output {
        let (p, w) = (&self.parts[i], self.width());
        let r = self.partial_row(i);
        let of = |v: &[u32], per: usize| {
            if p.partial { v[r * per..(r + p.n_rows) * per].to_vec() } else { Vec::new() }
        };
        Output {
            out: got.out[self.row0[i] * w..(self.row0[i] + p.n_rows) * w].to_vec(),
            m: of(&got.m, self.shape.n_heads),
            s: of(&got.s, self.shape.n_heads),
            o: of(&got.o, w),
        }
    }
}

const U: f64 = 1.0 / (1u64 << 24) as f64;

struct Oracle {
    m: f64,
    s: f64,
    out: Vec<f64>,
    /// Σ w|v|.
    weighted: Vec<f64>,
    /// Σ |v| / Σ e^(x − max).
    plain: Vec<f64>,
    a: f64,
    n: usize,
}

impl Oracle {
    /// Relative error of a sum of weights.
    fn weights(&self, kv: Half, hd: usize) -> f64 {
        let de = (2 * hd + 8) as f64 * U * self.a;
        let steps = self.n.div_ceil(16) as f64 + 8.0; // the smallest tile is 16 tokens
        (de + 2.0 * U * self.a).exp_m1()
            + (4.0 + 5.0 * steps) * U
            + epsilon(kv)
            + 2.0 * (self.n as f64 + steps) * U
    }

    fn close(&self, shape: &AttentionShape, d: usize, got: f64, rounding: f64, name: &str) {
        let tiny = if shape.kv == Half::F16 { 2f64.powi(-24) * self.plain[d] } else { 0.0 };
        let bound = 2.0 * self.weights(shape.kv, shape.head_dim) * self.weighted[d] + tiny;
        let bound = bound + rounding * (self.out[d].abs() + bound) + 2f64.powi(-25);
        let off = (got - self.out[d]).abs();
        assert!(off <= bound, "{name} element {d}: {got} for {}, off by {off}, allowed {bound}", self.out[d]);
    }
}

/// The output type is the other one, since the kernels do not tie them; a device below 80 has f16 alone.
fn shape(
    rt: &Arc<dyn Runtime>,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    kv: Half,
) -> AttentionShape {
    let out = if kv == Half::BF16 { Half::F16 } else { Half::BF16 };
    let (kv, out) = if rt.info().sm < 80 { (Half::F16, Half::F16) } else { (kv, out) };
    AttentionShape { n_heads, n_kv_heads, head_dim, scale: 1.0 / (head_dim as f32).sqrt(), kv, out }
}

const BOTH: [Half; 2] = [Half::F16, Half::BF16];
const CONTEXTS: [usize; 10] = [1, 31, 32, 33, 255, 256, 257, 512, 513, 1000];

fn all(world: &World) -> Vec<usize> {
    (0..world.parts.len()).collect()
}

/// With every kernel that prefill can run on.
fn run_and_check(rt: &Arc<dyn Runtime>, world: &World, what: &str) {
    for kernel in world.kernels(rt) {
        let world = world.on(kernel);
        world.check(&all(&world), &world.run(rt, &all(&world)), &format!("{what} {kernel:?}"));
    }
}

#[test]
fn decode_matches_the_oracle_for_every_head_size() {
    for rt in gpu::runtimes() {
        for kv in BOTH {
            for hd in HEAD_DIMS {
                let parts: Vec<Part> = CONTEXTS.iter().map(|&n| Part::decode(n - 1)).collect();
                let world = World::new(shape(&rt, 4, 2, hd, kv), None, &parts, 1.0, 1);
                run_and_check(&rt, &world, &format!("{kv:?} {hd}"));
            }
        }
    }
}

#[test]
fn decode_of_every_group() {
    for rt in gpu::runtimes() {
        for (i, (heads, kv_heads)) in
            [(1, 1), (2, 1), (6, 2), (4, 1), (5, 1), (12, 2), (7, 1), (8, 1), (12, 1), (17, 1)]
                .into_iter()
                .enumerate()
        {
            let parts = [Part::decode(39), Part::decode(299)];
            let world = World::new(shape(&rt, heads, kv_heads, 64, BOTH[i % 2]), None, &parts, 1.0, i as u64);
            run_and_check(&rt, &world, &format!("{heads} heads, {kv_heads} KV heads"));
        }
    }
}

#[test]
fn decode_with_a_window() {
    for rt in gpu::runtimes() {
        for window in [1, 17, 32, 300] {
            let parts: Vec<Part> = [0, 16, 17, 40, 255, 256, 599].map(Part::decode).into();
            let world =
                World::new(shape(&rt, 4, 2, 64, Half::BF16), Some(window), &parts, 1.0, window as u64);
            run_and_check(&rt, &world, &format!("window {window}"));
        }
    }
}

/// Scores far apart: one token takes all the weight, and the maximum moves from tile to tile.
#[test]
fn peaked_scores() {
    for rt in gpu::runtimes() {
        for kv in BOTH {
            let parts = [Part::decode(599), Part::chunk(70, 100)];
            let world = World::new(shape(&rt, 4, 2, 64, kv), None, &parts, 8.0, 3);
            run_and_check(&rt, &world, &format!("{kv:?}"));
        }
    }
}

#[test]
fn prefill_matches_the_oracle_for_every_head_size() {
    for rt in gpu::runtimes() {
        for kv in BOTH {
            for hd in HEAD_DIMS {
                // Chunks around the tile, at the start, in the middle of a tile, after a long context.
                let parts =
                    [Part::chunk(0, 5), Part::chunk(0, 64), Part::chunk(33, 65), Part::chunk(200, 31)];
                let world = World::new(shape(&rt, 2, 1, hd, kv), None, &parts, 1.0, 2);
                run_and_check(&rt, &world, &format!("{kv:?} {hd}"));
            }
        }
    }
}

#[test]
fn prefill_of_every_group_and_window() {
    for rt in gpu::runtimes() {
        for (i, (heads, kv_heads, window)) in
            [(1, 1, None), (3, 1, Some(1)), (4, 2, Some(20)), (8, 1, Some(64)), (12, 1, Some(100))]
                .into_iter()
                .enumerate()
        {
            let parts = [Part::chunk(0, 70), Part::chunk(150, 20)];
            let world =
                World::new(shape(&rt, heads, kv_heads, 64, BOTH[i % 2]), window, &parts, 1.0, i as u64);
            run_and_check(&rt, &world, &format!("{heads} heads, {kv_heads} KV heads, window {window:?}"));
        }
    }
}

/// Rows of which this device holds only the later tokens, or none at all, leave as partials.
#[test]
fn partial_rows_are_not_normalised() {
    for rt in gpu::runtimes() {
        for hd in HEAD_DIMS {
            let part = |first_pos, n_rows, from| Part { first_pos, n_rows, from, partial: true };
            let parts = [
                part(600, 1, 0),
                part(600, 1, 288),
                part(300, 1, 320), // nothing here
                part(90, 40, 32),
                part(0, 10, 0),
                part(60, 10, 64), // some rows see nothing here
                part(0, 77, 96),  // none does
                Part::decode(30),
            ];
            let world = World::new(shape(&rt, 4, 2, hd, Half::BF16), None, &parts, 1.0, 5);
            run_and_check(&rt, &world, &format!("{hd}"));
        }
    }
}

/// A row that sees nothing at all and is finished here is zero, not NaN; so are padding rows.
#[test]
fn nothing_seen_is_zero() {
    for rt in gpu::runtimes() {
        let nothing = |n_rows| Part { first_pos: 40, n_rows, from: 64, partial: false };
        let parts = [nothing(1), nothing(9), Part::decode(12)];
        let world = World::new(shape(&rt, 4, 2, 64, Half::F16), None, &parts, 1.0, 6);
        // The row between the first two parts becomes padding.
        let padding = world.row0[1] - 1;
        let (plan, table) = world.plan(&all(&world), padding as u32..padding as u32 + 1);
        let got = world.run_plan(&rt, &plan, &table);
        let w = world.width();
        assert!(got.out[w..world.row0[1] * w + 9 * w].iter().all(|&x| x == 0));
        assert!(got.out[..w].iter().any(|&x| x != 0), "the first row is nobody's");
    }
}

/// Split attention: the tokens before `at` on one side, the others on the other, merged.
#[test]
fn partials_merged_in_any_split_equal_the_whole() {
    for rt in gpu::runtimes() {
        for (kv, hd, at) in
            [(Half::BF16, 64, 32), (Half::F16, 80, 256), (Half::BF16, 128, 544), (Half::F16, 64, 640)]
        {
            let shape = shape(&rt, 4, 2, hd, kv);
            let part = |first_pos, n_rows, from| Part { first_pos, n_rows, from, partial: true };
            let parts = |from| [part(600, 1, from), part(580, 20, from), part(10, 1, from)];
            let kernel = PrefillKernel::best(&*rt, &shape);
            let world = World::new(shape, None, &parts(at), 1.0, 7).on(kernel);
            let late = world.run(&rt, &all(&world));
            world.check(&all(&world), &late, "late tokens");
            // The same world, all tokens here, items cut off.
            let early = World { parts: parts(0).to_vec(), ..world.clone() };
            let (mut plan, table) = early.plan(&all(&early), 0..0);
            let cut = |begin: &mut u32, end: &mut u32| {
                *end = (*end).min(at as u32);
                *begin = (*begin).min(*end);
            };
            plan.decode.iter_mut().for_each(|i: &mut DecodeItem| cut(&mut i.begin, &mut i.end));
            plan.prefill.iter_mut().for_each(|i: &mut PrefillItem| cut(&mut i.begin, &mut i.end));
            let early_out = early.run_plan(&rt, &plan, &table);

            let n = late.m.len() / shape.n_heads;
            let up = |v: &[u32]| Buffer::from_bytes(&rt, LANE, bytes(v)).unwrap();
            let side = |o: &Output| [up(&o.m), up(&o.s), up(&o.o)];
            let ptrs = |b: &[Buffer; 3]| PartialRows { m: b[0].ptr(), s: b[1].ptr(), o: b[2].ptr() };
            let (a, b) = (side(&late), side(&early_out));
            let rows: Vec<u32> = (0..3)
                .flat_map(|i| (0..world.parts[i].n_rows).map(move |r| (i, r)))
                .map(|(i, r)| (world.row0[i] + r) as u32)
                .collect();
            let (rows, n_rows) = (up(&rows), up(&[n as u32]));
            let total = world.rows * world.width();
            let out = up(&vec![CANARY; total / 2]);
            let args = MergeAttention {
                here: ptrs(&a),
                elsewhere: ptrs(&b),
                rows: rows.ptr(),
                n_rows: n_rows.ptr(),
                max_rows: n + 5,
                out: out.ptr(),
            };
            merge_attention(&*rt, LANE, &shape, &args).unwrap();
            let mut merged = vec![0u8; total * 2];
            rt.download(LANE, out.ptr(), &mut merged).unwrap();
            let merged = merged.chunks_exact(2).map(|c| u16::from_le_bytes([c[0], c[1]])).collect();
            let whole = World { parts: parts(0).map(|p| Part { partial: false, ..p }).to_vec(), ..early };
            let got = Output { out: merged, m: Vec::new(), s: Vec::new(), o: Vec::new() };
            whole.check(&all(&whole), &got, &format!("{kv:?} {hd} merged at {at}"));
        }
    }
}

/// The same bits alone, in a batch, and in another order.
#[test]
fn a_row_does_not_depend_on_the_batch() {
    for rt in gpu::runtimes() {
        for window in [None, Some(100)] {
            let parts = [
                Part::decode(700),
                Part::chunk(20, 70),
                Part::decode(3),
                Part { partial: true, ..Part::decode(300) },
                Part::chunk(300, 3),
                Part { partial: true, ..Part::chunk(0, 66) },
            ];
            let world = World::new(shape(&rt, 4, 2, 64, Half::BF16), window, &parts, 1.0, 8);
            for kernel in world.kernels(&rt) {
                let world = world.on(kernel);
                let together = world.run(&rt, &all(&world));
                let reversed = world.run(&rt, &[5, 4, 3, 2, 1, 0]);
                for i in 0..parts.len() {
                    let alone = world.rows_of(i, &world.run(&rt, &[i]));
                    let what = format!("{:?}, window {window:?}, {kernel:?}", parts[i]);
                    assert!(alone == world.rows_of(i, &together), "{what} in a batch");
                    assert!(alone == world.rows_of(i, &reversed), "{what} in a reversed batch");
                }
            }
        }
    }
}

/// Prefill gives the same bits however the prompt is cut into chunks.
#[test]
fn a_prompt_does_not_depend_on_its_chunks() {
    for rt in gpu::runtimes() {
        for window in [None, Some(50)] {
            let world = World::new(shape(&rt, 2, 1, 64, Half::BF16), window, &[Part::chunk(0, 170)], 1.0, 9);
            for kernel in world.kernels(&rt) {
                let whole = world.on(kernel);
                let want = whole.run(&rt, &[0]);
                let w = whole.width();
                for cut in [5, 63, 64, 100] {
                    // Two parts of the same sequence, run from the same memory.
                    let parts = World {
                        parts: vec![Part::chunk(0, cut), Part::chunk(cut, 170 - cut)],
                        row0: vec![1, 1 + cut],
                        pages: vec![whole.pages[0].clone(), whole.pages[0].clone()],
                        ..whole.clone()
                    };
                    let got = parts.run(&rt, &[0, 1]);
                    let same = got.out[w..171 * w] == want.out[w..171 * w];
                    assert!(same, "cut at {cut}, window {window:?}, {kernel:?}");
                }
            }
        }
    }
}

/// Whatever order threads run in and whenever copies land.
#[test]
fn every_schedule_gives_the_same_bits() {
    let parts = [Part::decode(520), Part::chunk(40, 70), Part { partial: true, ..Part::decode(270) }];
    for hd in [64, 96, 256] {
        for kernel in [PrefillKernel::Mma, PrefillKernel::Wgmma] {
            let mut want: Option<Output> = None;
            gpu::for_schedules(|rt, schedule| {
                let world =
                    World::new(shape(rt, 3, 1, hd, Half::BF16), Some(600), &parts, 1.0, 10).on(kernel);
                if !world.kernels(rt).contains(&kernel) {
                    return;
                }
                let got = world.run(rt, &all(&world));
                match &want {
                    None => want = Some(got),
                    Some(want) => assert!(*want == got, "{schedule} at head_dim {hd}, {kernel:?}"),
                }
            });
        }
    }
}

#[test]
fn ldmatrix_is_free_of_bank_conflicts() {
    let parts = [Part::decode(300), Part::chunk(0, 70)];
    for kv in BOTH {
        for hd in HEAD_DIMS {
            let run = |rt: &Arc<dyn Runtime>| {
                World::new(shape(rt, 2, 1, hd, kv), None, &parts, 1.0, 11).run(rt, &[0, 1]);
            };
            let Some((phases, conflicts)) = gpu::bank_conflicts(run) else { return };
            assert!(phases > 0, "the kernels use ldmatrix");
            assert_eq!(conflicts, 0, "of {phases} phases, {kv:?} {hd}");
        }
    }
}

#[test]
fn what_kernels_do_not_cover_is_said() {
    for rt in gpu::runtimes() {
        let good = shape(&rt, 4, 2, 64, Half::BF16);
        for (bad, says) in [
            (AttentionShape { head_dim: 72, ..good }, "72"),
            (AttentionShape { n_kv_heads: 3, ..good }, "3 KV heads"),
            (AttentionShape { scale: 0.0, ..good }, "scale"),
        ] {
            let message = bad.check(&*rt).unwrap_err().to_string();
            assert!(message.contains(says), "{message}");
        }
        // The tests above have seen every kernel there is.
        let want = if rt.info().sm == 90 { PrefillKernel::Wgmma } else { PrefillKernel::Mma };
        for hd in HEAD_DIMS {
            let best = PrefillKernel::best(&*rt, &AttentionShape { head_dim: hd, ..good });
            assert_eq!(best, if [80, 96].contains(&hd) { PrefillKernel::Mma } else { want }, "head_dim {hd}");
        }
    }
}

fn any_part() -> impl Strategy<Value = Part> {
    let rows = prop_oneof![Just(1usize), 2..5usize, 5..90usize];
    (0..400usize, rows, 0..12usize, any::<bool>()).prop_map(|(first_pos, n_rows, page, partial)| {
        let from = if partial { page * PAGE } else { 0 };
        Part { first_pos, n_rows, from, partial }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn any_step_matches_the_oracle(
        parts in proptest::collection::vec(any_part(), 1..4),
        (kv_heads, group) in (1..3usize, 1..10usize),
        hd in prop::sample::select(HEAD_DIMS.to_vec()),
        kv in prop::sample::select(BOTH.to_vec()),
        window in proptest::option::of(1..300usize),
        k_scale in prop::sample::select(vec![0.1f32, 1.0, 4.0]),
        seed in any::<u64>(),
    ) {
        for rt in gpu::runtimes() {
            let shape = shape(&rt, kv_heads * group, kv_heads, hd, kv);
            let world = World::new(shape, window, &parts, k_scale, seed);
            run_and_check(&rt, &world, "proptest");
        }
    }

    /// Items cover what each row sees exactly once, and steps within the limits fit the capacity.
    #[test]
    fn plans_cover_every_token_once(
        lens in proptest::collection::vec((0..40_000u32, prop_oneof![Just(1u32), 1..5u32, 5..200u32]), 0..8),
        window in proptest::option::of(1..5000u32),
        padding in 0..4u32,
        queries in prop::sample::select(vec![64u32, 128]),
    ) {
        let (mut rows, mut row0) = (Vec::new(), 0);
        for &(first_pos, n_rows) in &lens {
            rows.push(Rows { row0, n_rows, first_pos, from: 0, page: 0, partial: None });
            row0 += n_rows;
        }
        let plan = Plan::new(&rows, row0..row0 + padding, window, queries);
        let total = (row0 + padding) as usize;
        let mut seen = vec![0u32; total]; // tokens, per decoded row
        let mut tiles = vec![0u32; total]; // prefill items, per row
        let mut slots = vec![0u32; plan.splits];
        for i in &plan.decode {
            seen[i.row as usize] += i.end - i.begin;
            prop_assert!(i.begin == i.end || i.end - i.begin <= 1024);
            prop_assert_eq!(i.partial, ATTENTION_FINAL);
            if i.n_splits > 1 {
                prop_assert!(i.split < i.n_splits);
                slots[(i.workspace + i.split) as usize] += 1;
            }
        }
        for i in &plan.prefill {
            for r in 0..i.n_rows {
                tiles[(i.row0 + r) as usize] += 1;
                let pos = i.first_pos + r;
                prop_assert!(i.end > pos && i.begin <= (pos + 1).saturating_sub(window.unwrap_or(u32::MAX)));
            }
        }
        prop_assert!(slots.iter().all(|&n| n == 1));
        for r in &rows {
            for i in 0..r.n_rows {
                let (row, tokens) = ((r.row0 + i) as usize, r.first_pos + i + 1);
                let sees = tokens.min(window.unwrap_or(u32::MAX));
                prop_assert!((seen[row], tiles[row]) == (sees, 0) || (seen[row], tiles[row]) == (0, 1));
            }
        }
        let longest = lens.iter().map(|&(p, n)| p + n).max().unwrap_or(1);
        let capacity = Capacity::new(total.max(1), lens.len().max(1), longest as usize);
        prop_assert!(plan.decode.len() <= capacity.decode_items, "{} of {capacity:?}", plan.decode.len());
        prop_assert!(plan.prefill.len() <= capacity.prefill_items, "{} of {capacity:?}", plan.prefill.len());
        prop_assert!(plan.splits <= capacity.splits, "{} of {capacity:?}", plan.splits);
    }
}
