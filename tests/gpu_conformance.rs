//! What every wrapper of `cuda/include/ptx.cuh` does (`cuda/conformance.cu`), against the PTX ISA, stated here a
//! second time and independently of the host emulation: layouts as the ISA's formulas give them, element by
//! element. Runs on every runtime: the emulation here, the device where there is one.
#![cfg(tandem_kernels)]

mod support;

use std::sync::Arc;

use half::{bf16, f16};
use support::gpu;
use tandem::device::emulated::{CopyTiming, KernelChecks, Schedule};
use tandem::device::kernels::abi::{ConformanceParams, ConformanceTmaParams, TensorMap};
use tandem::device::runtime::{Buffer, Lane, Launch, Params, Runtime};

/// Pseudo-random words (xorshift), the same in every run.
struct Words(u64);

impl Words {
    fn new(seed: u64) -> Words {
        Words(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 24) as u32
    }
    /// An integer of small magnitude: products and sums of these are exact in every format here.
    fn small(&mut self) -> i32 {
        (self.next() % 17) as i32 - 8
    }
}

/// Every runtime of this machine; the emulation in every order of threads, too.
fn runtimes() -> Vec<Arc<dyn Runtime>> {
    let orders = [
        (Schedule::Descending, CopyTiming::AtOnce),
        (Schedule::Random, CopyTiming::Random),
        (Schedule::Preempted, CopyTiming::Random),
    ];
    let others = orders.into_iter().filter_map(|(schedule, copies)| {
        gpu::emulated(KernelChecks { schedule, copies, seed: 3, ..Default::default() })
    });
    gpu::runtimes().into_iter().chain(others).collect()
}

struct Shape {
    grid: u32,
    block: u32,
    shared: u32,
    /// Words of scratch, zero before.
    words: usize,
    n: u32,
}

const WARP: Shape = Shape { grid: 1, block: 32, shared: 0, words: 0, n: 0 };

fn bytes_of(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

fn words_of(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// Runs `kernel` over `input`; what it wrote. `None`, and a line, where the runtime does not have it.
fn run(
    rt: &Arc<dyn Runtime>,
    kernel: &str,
    shape: Shape,
    input: &[u32],
    out_words: usize,
) -> Option<Vec<u32>> {
    if !rt.has_kernel(kernel) {
        println!("skipped: {} has no {kernel}", rt.info().name);
        return None;
    }
    let input = Buffer::from_bytes(rt, Lane::Compute, &bytes_of(input)).unwrap();
    let out = Buffer::new(rt, out_words * 4).unwrap();
    let words = Buffer::from_bytes(rt, Lane::Compute, &vec![0; shape.words.max(1) * 4]).unwrap();
    let params = ConformanceParams {
        in_: input.ptr(),
        out: out.ptr(),
        words: words.ptr(),
        n: shape.n,
        ..Default::default()
    };
    launch(rt, kernel, &shape, params.bytes());
    let mut bytes = vec![0; out_words * 4];
    rt.download(Lane::Compute, out.ptr(), &mut bytes).unwrap();
    Some(words_of(&bytes))
}

fn launch(rt: &Arc<dyn Runtime>, kernel: &str, shape: &Shape, params: &[u8]) {
    let launch =
        Launch { kernel, grid: [shape.grid, 1, 1], block: [shape.block, 1, 1], shared: shape.shared, params };
    rt.launch(Lane::Compute, &launch).unwrap();
}

// ---------------------------------------------------------------------------------------------------------
// Formats.

#[derive(Debug, Clone, Copy, PartialEq)]
enum Half {
    F16,
    Bf16,
}

impl Half {
    fn name(self) -> &'static str {
        match self {
            Half::F16 => "f16",
            Half::Bf16 => "bf16",
        }
    }
    fn bits(self, v: f64) -> u16 {
        match self {
            Half::F16 => f16::from_f64(v).to_bits(),
            Half::Bf16 => bf16::from_f64(v).to_bits(),
        }
    }
    fn value(self, bits: u16) -> f64 {
        match self {
            Half::F16 => f16::from_bits(bits).to_f64(),
            Half::Bf16 => bf16::from_bits(bits).to_f64(),
        }
    }
    fn rounded(self, v: f32) -> u16 {
        match self {
            Half::F16 => f16::from_f32(v).to_bits(),
            Half::Bf16 => bf16::from_f32(v).to_bits(),
        }
    }
    /// Equal, or both NaN: which NaN is not specified.
    fn same(self, a: u16, b: u16) -> bool {
        a == b || self.value(a).is_nan() && self.value(b).is_nan()
    }
    fn same2(self, a: u32, b: u32) -> bool {
        self.same(a as u16, b as u16) && self.same((a >> 16) as u16, (b >> 16) as u16)
    }
}

fn same_f32(a: u32, b: f32) -> bool {
    a == b.to_bits() || f32::from_bits(a).is_nan() && b.is_nan()
}

/// Sets half `i` of `words`, the lower half of a word first.
fn set_half(words: &mut [u32], i: usize, bits: u16) {
    let shift = 16 * (i % 2);
    words[i / 2] = words[i / 2] & !(0xffff << shift) | u32::from(bits) << shift;
}

fn set_byte(words: &mut [u32], i: usize, byte: u8) {
    let shift = 8 * (i % 4);
    words[i / 4] = words[i / 4] & !(0xff << shift) | u32::from(byte) << shift;
}

// ---------------------------------------------------------------------------------------------------------
// Matrices. The ISA, 9.7.14: groupID = laneid >> 2, threadID_in_group = laneid % 4; a_i, b_i, c_i are the elements
// of a lane's fragment in order.

/// (row, column) of element i of a, m16n8k16 of 16-bit floats.
fn a_16(lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    let row = if i < 2 || (4..6).contains(&i) { group } else { group + 8 };
    let col = if i < 4 { thread * 2 + (i & 1) } else { thread * 2 + (i & 1) + 8 };
    (row, col)
}

/// (row, column) of element i of b, m16n8k16 of 16-bit floats.
fn b_16(lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    (if i < 2 { thread * 2 + (i & 1) } else { thread * 2 + (i & 1) + 8 }, group)
}

/// (row, column) of element i of a, m16n8k32 of bytes.
fn a_32(lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    let row = if i < 4 || (8..12).contains(&i) { group } else { group + 8 };
    let col = if i < 8 { thread * 4 + (i & 3) } else { thread * 4 + (i & 3) + 16 };
    (row, col)
}

/// (row, column) of element i of b, m16n8k32 of bytes.
fn b_32(lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    (if i < 4 { thread * 4 + (i & 3) } else { thread * 4 + (i & 3) + 16 }, group)
}

/// (row, column) of element i of c, both.
fn c_16(lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    (if i < 2 { group } else { group + 8 }, thread * 2 + (i & 1))
}

#[test]
fn ldmatrix_gives_rows_or_columns_to_lanes() {
    // Half j of matrix m's row i is 64 m + 8 i + j: every element is another.
    let element = |m: usize, i: usize, j: usize| (64 * m + 8 * i + j) as u32;
    let input: Vec<u32> = (0..128).map(|w| (2 * w) | ((2 * w + 1) << 16)).collect();
    for rt in runtimes() {
        let shape = Shape { shared: 512, ..WARP };
        let Some(out) = run(&rt, "conformance_ldmatrix", shape, &input, 384) else { continue };
        for lane in 0..32 {
            let (row, col) = (lane / 4, lane % 4 * 2);
            let plain = |m| element(m, row, col) | element(m, row, col + 1) << 16;
            let transposed = |m| element(m, col, row) | element(m, col + 1, row) << 16;
            for m in 0..4 {
                assert_eq!(out[lane * 4 + m], plain(m), "x4, lane {lane}, matrix {m}");
                assert_eq!(out[128 + lane * 4 + m], transposed(m), "x4 trans, lane {lane}, matrix {m}");
            }
            for m in 0..2 {
                assert_eq!(out[256 + lane * 2 + m], plain(m), "x2, lane {lane}, matrix {m}");
                assert_eq!(out[320 + lane * 2 + m], transposed(m), "x2 trans, lane {lane}, matrix {m}");
            }
        }
    }
}

#[test]
fn movmatrix_transposes_in_registers() {
    let element = |row: usize, col: usize| (8 * row + col) as u32;
    let input: Vec<u32> =
        (0..32).map(|l| element(l / 4, l % 4 * 2) | element(l / 4, l % 4 * 2 + 1) << 16).collect();
    for rt in runtimes() {
        let Some(out) = run(&rt, "conformance_movmatrix", WARP, &input, 32) else { continue };
        for lane in 0..32 {
            let (row, col) = (lane / 4, lane % 4 * 2);
            assert_eq!(out[lane], element(col, row) | element(col + 1, row) << 16, "lane {lane}");
        }
    }
}

/// Operands of one mma as matrices.
struct Matrices {
    a: Vec<Vec<f64>>,
    b: Vec<Vec<f64>>,
    c: Vec<Vec<f64>>,
}

impl Matrices {
    fn new(m: usize, n: usize, k: usize, mut element: impl FnMut() -> f64) -> Matrices {
        let mut matrix =
            |rows, cols| (0..rows).map(|_| (0..cols).map(|_| element()).collect()).collect::<Vec<Vec<f64>>>();
        Matrices { a: matrix(m, k), b: matrix(k, n), c: matrix(m, n) }
    }
    fn product(&self, row: usize, col: usize) -> f64 {
        self.c[row][col] + self.a[row].iter().zip(&self.b).map(|(a, b)| a * b[col]).sum::<f64>()
    }
    /// Σ|ab| + |c|: what errors are measured by.
    fn magnitude(&self, row: usize, col: usize) -> f64 {
        self.c[row][col].abs() + self.a[row].iter().zip(&self.b).map(|(a, b)| (a * b[col]).abs()).sum::<f64>()
    }
}

fn fragments_16(half: Half, m: &Matrices) -> Vec<u32> {
    let mut input = vec![0; 32 * 10];
    for lane in 0..32 {
        let words = &mut input[lane * 10..][..10];
        for i in 0..8 {
            let (row, col) = a_16(lane, i);
            set_half(words, i, half.bits(m.a[row][col]));
        }
        for i in 0..4 {
            let (row, col) = b_16(lane, i);
            set_half(words, 8 + i, half.bits(m.b[row][col]));
            let (row, col) = c_16(lane, i);
            words[6 + i] = (m.c[row][col] as f32).to_bits();
        }
    }
    input
}

#[test]
fn mma_of_halves_is_exact_on_small_integers() {
    for rt in runtimes() {
        for half in [Half::F16, Half::Bf16] {
            let mut words = Words::new(3);
            let m = Matrices::new(16, 8, 16, || f64::from(words.small()));
            let name = format!("conformance_mma_{}", half.name());
            let Some(out) = run(&rt, &name, WARP, &fragments_16(half, &m), 128) else { continue };
            for lane in 0..32 {
                for i in 0..4 {
                    let (row, col) = c_16(lane, i);
                    let got = f64::from(f32::from_bits(out[lane * 4 + i]));
                    assert_eq!(got, m.product(row, col), "{name}: lane {lane}, c{i}");
                }
            }
        }
    }
}

/// Tensor cores align 17 terms to the largest and cut each below 2^-23 of it; sums are cut again when they are
/// combined: at most 2 * 17 times 2^-23 of Σ|ab| + |c|, in any order.
#[test]
fn mma_of_halves_accumulates_in_f32() {
    for rt in runtimes() {
        for half in [Half::F16, Half::Bf16] {
            for seed in 0..8 {
                let mut words = Words::new(seed);
                let m = Matrices::new(16, 8, 16, || {
                    let v = f64::from(words.next()) / f64::from(u32::MAX) * 2.0 - 1.0;
                    half.value(half.bits(v * f64::from(1 << (words.next() % 8))))
                });
                let name = format!("conformance_mma_{}", half.name());
                let Some(out) = run(&rt, &name, WARP, &fragments_16(half, &m), 128) else { continue };
                for lane in 0..32 {
                    for i in 0..4 {
                        let (row, col) = c_16(lane, i);
                        let got = f64::from(f32::from_bits(out[lane * 4 + i]));
                        let bound = 34.0 * 2f64.powi(-23) * m.magnitude(row, col);
                        let error = (got - m.product(row, col)).abs();
                        assert!(error <= bound, "{name}: lane {lane}, c{i}: off by {error}, bound {bound}");
                    }
                }
            }
        }
    }
}

#[test]
fn mma_of_bytes_is_exact_and_wraps() {
    for rt in runtimes() {
        let mut words = Words::new(5);
        let m = Matrices::new(16, 8, 32, || f64::from(words.next() as i8));
        let mut input = vec![0; 32 * 10];
        // Accumulators at the ends of the range: the sum wraps.
        let c = |row: usize, col: usize| {
            if (row + col).is_multiple_of(2) { i32::MAX - row as i32 } else { i32::MIN + col as i32 }
        };
        for lane in 0..32 {
            let fragment = &mut input[lane * 10..][..10];
            for i in 0..16 {
                let (row, col) = a_32(lane, i);
                set_byte(fragment, i, m.a[row][col] as i8 as u8);
            }
            for i in 0..8 {
                let (row, col) = b_32(lane, i);
                set_byte(fragment, 16 + i, m.b[row][col] as i8 as u8);
            }
            for i in 0..4 {
                let (row, col) = c_16(lane, i);
                fragment[6 + i] = c(row, col) as u32;
            }
        }
        let Some(out) = run(&rt, "conformance_mma_s8", WARP, &input, 128) else { continue };
        for lane in 0..32 {
            for i in 0..4 {
                let (row, col) = c_16(lane, i);
                let dot: i64 = (0..32).map(|k| (m.a[row][k] * m.b[k][col]) as i64).sum();
                assert_eq!(
                    out[lane * 4 + i] as i32,
                    (i64::from(c(row, col)) + dot) as i32,
                    "lane {lane}, c{i}"
                );
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------
// Arithmetic.

#[test]
fn bits_and_integer_dot_products() {
    const N: usize = 1000;
    let mut words = Words::new(7);
    let input: Vec<u32> = (0..3 * N).map(|_| words.next()).collect();
    for rt in runtimes() {
        let shape = Shape { grid: N.div_ceil(32) as u32, n: N as u32, ..WARP };
        let Some(out) = run(&rt, "conformance_bits", shape, &input, 5 * N) else { continue };
        for (t, out) in out.chunks_exact(5).enumerate() {
            let [a, b, c] = input[3 * t..][..3].try_into().unwrap();
            assert_eq!(out[0], prmt(a, b, c), "prmt {a:#x} {b:#x} {c:#x}");
            assert_eq!(out[1], (a & b) | c, "lop3 0xea");
            assert_eq!(out[2], a ^ b ^ c, "lop3 0x96");
            assert_eq!(out[3], lop3(0x1d, a, b, c), "lop3 0x1d");
            let dot = |w: u32, v: u32| -> i32 {
                w.to_le_bytes()
                    .iter()
                    .zip(v.to_le_bytes())
                    .map(|(x, y)| i32::from(*x as i8) * i32::from(y as i8))
                    .sum()
            };
            assert_eq!(out[4] as i32, dot(a, b).wrapping_add(c as i32), "dp4a {a:#x} {b:#x} {c:#x}");
        }
    }
}

/// The ISA: byte i of the result is byte `sel.nibble[i] & 7` of {b, a}; with bit 3, its sign eight times.
fn prmt(a: u32, b: u32, sel: u32) -> u32 {
    let source: Vec<u8> = a.to_le_bytes().into_iter().chain(b.to_le_bytes()).collect();
    let byte = |i: usize| {
        let nibble = (sel >> (4 * i)) as usize & 0xf;
        let byte = source[nibble & 7];
        if nibble & 8 == 0 { byte } else { ((byte as i8) >> 7) as u8 }
    };
    u32::from_le_bytes([byte(0), byte(1), byte(2), byte(3)])
}

/// The ISA: bit by bit, the table's entry number (a b c).
fn lop3(table: u32, a: u32, b: u32, c: u32) -> u32 {
    (0..32).fold(0, |r, i| {
        let entry = (a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1);
        r | (table >> entry & 1) << i
    })
}

#[test]
fn packed_arithmetic_rounds_once() {
    const N: usize = 2000;
    for rt in runtimes() {
        for half in [Half::F16, Half::Bf16] {
            let mut words = Words::new(11);
            // Exponents within 16 of each other, so that f64 holds every sum exactly; and the special values.
            let special = [0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 1.0, -1.0];
            let mut value = || {
                let pick = words.next();
                if pick.is_multiple_of(8) {
                    return half.bits(special[words.next() as usize % special.len()]);
                }
                let v = 1.0 + f64::from(words.next() % 2048) / 2048.0;
                let v = v * 2f64.powi((words.next() % 12) as i32 - 8);
                half.bits(if pick & 16 == 0 { v } else { -v })
            };
            let input: Vec<u32> = (0..3 * N).map(|_| u32::from(value()) | u32::from(value()) << 16).collect();
            let name = format!("conformance_packed_{}", half.name());
            let shape = Shape { grid: N.div_ceil(32) as u32, n: N as u32, ..WARP };
            let Some(out) = run(&rt, &name, shape, &input, 9 * N) else { continue };
            for (t, out) in out.chunks_exact(9).enumerate() {
                let [a, b, c] = input[3 * t..][..3].try_into().unwrap();
                let both = |f: &dyn Fn(f64, f64, f64) -> f64| {
                    let at = |shift: u32| {
                        let v = |w: u32| half.value((w >> shift) as u16);
                        u32::from(half.bits(f(v(a), v(b), v(c)))) << shift
                    };
                    at(0) | at(16)
                };
                let case = format!("{name}: {a:#x} {b:#x} {c:#x}");
                for (i, want) in [
                    both(&|a, b, c| a * b + c),
                    both(&|a, b, _| a * b),
                    both(&|a, b, _| a + b),
                    both(&|a, b, _| a - b),
                ]
                .into_iter()
                .enumerate()
                {
                    let op = ["fma2", "mul2", "add2", "sub2"][i];
                    assert!(half.same2(out[i], want), "{case}: {op} gives {:#x}, not {want:#x}", out[i]);
                }
            }
        }
    }
}

#[test]
fn conversions_round_to_nearest_even() {
    const N: usize = 4000;
    for rt in runtimes() {
        for half in [Half::F16, Half::Bf16] {
            // Any bits at all, and values around the ends and ties of both formats.
            let mut words = Words::new(13);
            let near = [
                65504.0,
                65520.0,
                65519.99,
                3.0e38,
                f32::MAX,
                6.1e-5,
                5.96e-8,
                2.98e-8,
                2.981e-8,
                1e-40,
                1.00390625,
            ];
            let mut value = |i: usize| match i % 4 {
                0 => words.next(),
                1 => near[words.next() as usize % near.len()].to_bits() ^ (words.next() & 1) << 31,
                2 => words.next() & 0xffff_8000 | 0x8000,
                _ => (1.0 + words.next() as f32 / u32::MAX as f32).to_bits(),
            };
            let input: Vec<u32> = (0..3 * N).map(&mut value).collect();
            let name = format!("conformance_packed_{}", half.name());
            let shape = Shape { grid: N.div_ceil(32) as u32, n: N as u32, ..WARP };
            let Some(out) = run(&rt, &name, shape, &input, 9 * N) else { continue };
            for (t, out) in out.chunks_exact(9).enumerate() {
                let (x, y) = (f32::from_bits(input[3 * t]), f32::from_bits(input[3 * t + 1]));
                let (lo, hi) = (half.rounded(x), half.rounded(y));
                let pair = u32::from(lo) | u32::from(hi) << 16;
                assert!(
                    half.same2(out[4], pair),
                    "{name}: pack2({x:e}, {y:e}) is {:#x}, not {pair:#x}",
                    out[4]
                );
                assert!(
                    half.same(out[5] as u16, lo),
                    "{name}: from_f32({x:e}) is {:#x}, not {lo:#x}",
                    out[5]
                );
                let wide = |bits: u16| half.value(bits) as f32;
                let (low, high) = (x.to_bits() as u16, (x.to_bits() >> 16) as u16);
                assert!(same_f32(out[6], wide(low)), "{name}: to_f32({low:#x})");
                assert!(
                    same_f32(out[7], wide(low)) && same_f32(out[8], wide(high)),
                    "{name}: unpack2({x:e})"
                );
            }
        }
    }
}

/// Bounds in units of ε = 2^-24 of the result: ex2 2^-22 (ISA), __expf 2 + 1.16|x| ulp, the others 2 ulp (CUDA's
/// programming guide, an ulp is up to 2 ε); activations from those by the chain rule (below).
#[test]
fn functions_are_as_close_as_documented() {
    const N: usize = 4000;
    let input: Vec<f32> = (0..N).map(|i| (i as f32 / N as f32 - 0.5) * 40.0 + 1e-3).collect();
    let words: Vec<u32> = input.iter().map(|x| x.to_bits()).collect();
    let eps = 2f64.powi(-24);
    for rt in runtimes() {
        let shape = Shape { grid: N.div_ceil(32) as u32, n: N as u32, ..WARP };
        let Some(out) = run(&rt, "conformance_functions", shape, &words, 7 * N) else { continue };
        for (x, out) in input.iter().zip(out.chunks_exact(7)) {
            let x = f64::from(*x);
            let expf = (2.0 + 1.16 * x.abs()) * 2.0 * eps;
            let silu = x / (1.0 + (-x).exp());
            // gelu: the argument of tanh has a few roundings; tanh' a <= 1/2; then 1 + t cancels for negative x, so
            // the error is of x, not of the result: |x| / 2 * (2 ulp + 4 ε / 2 + rounding of 1 + t).
            let gelu = 8.0 * eps * x.abs();
            let wants = [
                ("ex2", x.exp2(), 4.0 * eps * x.exp2()),
                ("__expf", x.exp(), expf * x.exp()),
                ("rsqrtf", x.abs().powf(-0.5), 4.0 * eps * x.abs().powf(-0.5)),
                ("tanhf", x.tanh(), 4.0 * eps * x.tanh().abs()),
                ("silu", silu, (expf + 4.0 * eps) * silu.abs()),
                (
                    "gelu_tanh",
                    0.5 * x * (1.0 + (0.7978845608028654 * (x + 0.044715 * x * x * x)).tanh()),
                    gelu,
                ),
            ];
            for (i, (name, want, bound)) in wants.into_iter().enumerate() {
                let got = f64::from(f32::from_bits(out[i]));
                assert!((got - want).abs() <= bound, "{name}({x}) is {got:e}, not {want:e} to {bound:e}");
            }
            // No erf in the standard library: its derivative's bound and oddness instead. gelu(x) - gelu(-x) = x.
            let erf = f64::from(f32::from_bits(out[6]));
            let mean = erf - x.max(0.0);
            assert!((-0.17 - gelu..=gelu).contains(&mean), "gelu_erf({x}) is {erf}");
        }
    }
}

// ---------------------------------------------------------------------------------------------------------
// Warps and blocks.

/// The ISA's pseudo-code of shfl, with the clamp and mask that CUDA's intrinsics pass.
fn shuffle_source(mode: &str, lane: u32, operand: u32, width: u32) -> u32 {
    let mask = (32 - width) & 31;
    let clamp = if mode == "up" { 0 } else { 31 };
    let b = operand & 31;
    let max_lane = (lane & mask) | (clamp & !mask & 31);
    let (j, valid) = match mode {
        "up" => (lane.wrapping_sub(b), lane as i32 - b as i32 >= max_lane as i32),
        "down" => (lane + b, lane + b <= max_lane),
        "bfly" => (lane ^ b, lane ^ b <= max_lane),
        _ => {
            let j = (lane & mask) | (b & !mask & 31);
            (j, j <= max_lane)
        }
    };
    if valid { j } else { lane }
}

#[test]
fn shuffles_and_votes() {
    for rt in runtimes() {
        for operand in [0, 1, 3, 7, 8, 15, 16, 31] {
            let mut words = Words::new(u64::from(operand));
            // The index of each lane may differ; of the others it is one for all.
            let input: Vec<u32> = (0..32).flat_map(|_| [words.next(), operand]).collect();
            let value = |lane: u32| input[2 * lane as usize];
            let Some(out) = run(&rt, "conformance_shuffle", WARP, &input, 32 * 11) else { continue };
            let votes = (0..32).fold(0, |v, l| v | (value(l) & 1) << l);
            let (mut sum, mut most) = (0.0, 0f32);
            for lane in 0..32 {
                sum += (value(lane) % 64) as f32;
                most = most.max((value(lane) % 64) as f32);
            }
            for lane in 0..32 {
                let out = &out[lane as usize * 11..][..11];
                for (i, mode) in ["idx", "up", "down", "bfly"].into_iter().enumerate() {
                    for (at, width) in [(i, 32), (4 + i, 8)] {
                        let want = value(shuffle_source(mode, lane, operand, width));
                        assert_eq!(out[at], want, "{mode} by {operand}, width {width}, lane {lane}");
                    }
                }
                assert_eq!(out[8], votes, "ballot");
                assert_eq!(
                    (f32::from_bits(out[9]), f32::from_bits(out[10])),
                    (sum, most),
                    "warp_sum, warp_max"
                );
            }
        }
    }
}

#[test]
fn block_reductions_and_named_barriers() {
    let mut words = Words::new(17);
    let values: Vec<f32> = (0..256).map(|_| words.small() as f32).collect();
    let input: Vec<u32> = values.iter().map(|v| v.to_bits()).collect();
    for rt in runtimes() {
        let shape = Shape { block: 256, shared: 2048, ..WARP };
        let Some(out) = run(&rt, "conformance_barriers", shape, &input, 768) else { continue };
        for (t, out) in out.chunks_exact(3).enumerate() {
            let from = (t + 64) % 256;
            let handed = if from < 128 { values[from] + values[from + 128] } else { values[from] };
            let want = [values.iter().sum(), values.iter().copied().fold(f32::MIN, f32::max), handed];
            assert_eq!(out.iter().map(|w| f32::from_bits(*w)).collect::<Vec<_>>(), want, "thread {t}");
        }
    }
}

#[test]
fn copies_fill_zeros_where_the_predicate_is_false() {
    let input: Vec<u32> = (1..=128).collect();
    for rt in runtimes() {
        let shape = Shape { shared: 512, ..WARP };
        let Some(out) = run(&rt, "conformance_copies", shape, &input, 384) else { continue };
        for lane in 0..32 {
            let from = if lane < 16 { 15 - lane } else { 47 - lane };
            let want = if from % 2 == 0 { input[from * 4..][..4].to_vec() } else { vec![0; 4] };
            assert_eq!(out[lane * 4..][..4], want, "lane {lane}");
        }
        assert_eq!(out[128..256], input, "ld_stream_16");
        assert_eq!(out[256..], input, "ld_16");
    }
}

#[test]
fn the_last_block_sees_what_all_others_released() {
    const BLOCKS: u32 = 37;
    for rt in runtimes() {
        let shape = Shape { grid: BLOCKS, shared: 16, words: 1 + BLOCKS as usize, n: BLOCKS, ..WARP };
        let words = BLOCKS as usize * 33 + 32;
        let Some(out) = run(&rt, "conformance_last_block", shape, &[0], words) else { continue };
        let (sums, seen) = out[BLOCKS as usize * 32..].split_at(32);
        for (lane, sum) in sums.iter().enumerate() {
            assert_eq!(*sum, BLOCKS * (BLOCKS + 1) / 2 * (lane as u32 + 1), "lane {lane}");
        }
        assert!(seen.iter().enumerate().all(|(b, v)| *v == b as u32 + 7), "flags: {seen:?}");
    }
}

// ---------------------------------------------------------------------------------------------------------
// sm_90a.

/// Where byte `col_byte` of row `row` lies in a tile of 128-byte rows swizzled by 128 bytes: of its 16-byte chunk's
/// number, the row's number modulo 8 is xor-ed (the ISA's figures of Swizzle 128B).
fn swizzled(row: usize, col_byte: usize) -> usize {
    row * 128 + ((col_byte / 16) ^ (row % 8)) * 16 + col_byte % 16
}

/// (row, column) of element i of the accumulators of wgmma m64nNk16 in thread t of 128.
fn d_64(t: usize, i: usize) -> (usize, usize) {
    let (warp, lane) = (t / 32, t % 32);
    (warp * 16 + lane / 4 + i % 4 / 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2)
}

fn check_wgmma(name: &str, out: &[u32], n: usize, m: &Matrices) {
    for t in 0..128 {
        for i in 0..n / 2 {
            let (row, col) = d_64(t, i);
            let got = f64::from(f32::from_bits(out[t * n / 2 + i]));
            assert_eq!(got, m.product(row, col), "{name}: thread {t}, d[{i}], element ({row}, {col})");
        }
    }
}

fn accumulators(n: usize, m: &Matrices) -> Vec<u32> {
    let element = |at: usize| {
        let (row, col) = d_64(at / (n / 2), at % (n / 2));
        (m.c[row][col] as f32).to_bits()
    };
    (0..64 * n).map(element).collect()
}

#[test]
fn wgmma_of_two_tiles_in_shared_memory() {
    for rt in runtimes() {
        for (half, n) in [(Half::F16, 8), (Half::F16, 128), (Half::Bf16, 64), (Half::Bf16, 256)] {
            let mut words = Words::new(n as u64);
            let m = Matrices::new(64, n, 64, || f64::from(words.small()));
            let mut input = vec![0; (8192 + 128 * n) / 4];
            for row in 0..64 {
                for k in 0..64 {
                    set_half(&mut input, swizzled(row, 2 * k) / 2, half.bits(m.a[row][k]));
                }
            }
            for col in 0..n {
                for k in 0..64 {
                    set_half(&mut input[2048..], swizzled(col, 2 * k) / 2, half.bits(m.b[k][col]));
                }
            }
            input.extend(accumulators(n, &m));
            let name = format!("conformance_wgmma_{}_n{n}", half.name());
            let shape = Shape { block: 128, shared: 8192 + 128 * n as u32, ..WARP };
            let Some(out) = run(&rt, &name, shape, &input, 64 * n) else { continue };
            check_wgmma(&name, &out, n, &m);
        }
    }
}

#[test]
fn wgmma_of_registers_and_a_tile_by_columns() {
    for rt in runtimes() {
        for (half, n) in [(Half::F16, 64), (Half::Bf16, 128)] {
            let mut words = Words::new(100 + n as u64);
            let m = Matrices::new(64, n, 16, || f64::from(words.small()));
            let mut input = vec![0; 512 + 8 * n];
            for t in 0..128 {
                for i in 0..8 {
                    let (row, k) = a_16(t % 32, i);
                    set_half(&mut input[t * 4..], i, half.bits(m.a[t / 32 * 16 + row][k]));
                }
            }
            for col in 0..n {
                for k in 0..16 {
                    let at = col / 64 * 2048 + swizzled(k, col % 64 * 2);
                    set_half(&mut input[512..], at / 2, half.bits(m.b[k][col]));
                }
            }
            input.extend(accumulators(n, &m));
            let name = format!("conformance_wgmma_ra_{}_n{n}", half.name());
            let shape = Shape { block: 128, shared: 32 * n as u32, ..WARP };
            let Some(out) = run(&rt, &name, shape, &input, 64 * n) else { continue };
            check_wgmma(&name, &out, n, &m);
        }
    }
}

#[test]
fn bulk_copies_swizzle_and_fill_zeros_outside() {
    const KERNEL: &str = "conformance_tma_sm90a";
    let (rows, cols, stride) = (50usize, 72usize, 80usize);
    for rt in runtimes() {
        if !rt.has_kernel(KERNEL) {
            println!("skipped: {} has no {KERNEL}", rt.info().name);
            continue;
        }
        // Element (r, c) is 1 + its place; what lies between the rows must not be seen.
        let matrix: Vec<u8> = (0..rows * stride).flat_map(|i| (1 + i as u16).to_le_bytes()).collect();
        let matrix = Buffer::from_bytes(&rt, Lane::Compute, &matrix).unwrap();
        for (box_rows, x, y) in [(64, 0, 0), (64, 64, 0), (16, 8, 40), (8, -16, -4), (128, 200, 0)] {
            let words = box_rows * 32;
            let out = Buffer::new(&rt, words * 4).unwrap();
            let bytes = rt
                .tensor_map_2d(matrix.ptr(), rows as u64, cols as u64, stride as u64, box_rows as u32, 64)
                .unwrap();
            let params = ConformanceTmaParams {
                map: TensorMap { bytes },
                out: out.ptr(),
                x,
                y,
                box_rows: box_rows as u32,
                box_cols: 64,
                ..Default::default()
            };
            let shape = Shape { shared: words as u32 * 4 + 8, ..WARP };
            launch(&rt, KERNEL, &shape, params.bytes());
            let mut got = vec![0; words * 4];
            rt.download(Lane::Compute, out.ptr(), &mut got).unwrap();
            for r in 0..box_rows {
                for c in 0..64 {
                    let (row, col) = (y + r as i32, x + c as i32);
                    let inside = (0..rows as i32).contains(&row) && (0..cols as i32).contains(&col);
                    let want = if inside { 1 + (row as usize * stride + col as usize) as u16 } else { 0 };
                    let at = swizzled(r, 2 * c);
                    let got = u16::from_le_bytes([got[at], got[at + 1]]);
                    assert_eq!(got, want, "box of {box_rows} rows at ({x}, {y}): row {r}, column {c}");
                }
            }
        }
    }
}

#[test]
fn mbarrier_phases_hand_a_word_back_and_forth() {
    const N: usize = 100;
    let mut words = Words::new(23);
    let input: Vec<u32> = (0..N).map(|_| words.next()).collect();
    for rt in runtimes() {
        let shape = Shape { block: 64, shared: 32, n: N as u32, ..WARP };
        let Some(out) = run(&rt, "conformance_mbarrier_sm90a", shape, &input, N) else { continue };
        assert_eq!(out, input);
    }
}
