//! Every wrapper of `cuda/include/ptx.cuh`, as nvcc compiled it: the tests that compare a GPU with the ISA, on this
//! interpreter. Their expectations are the GPU's (`tests/gpu/kernels/conformance/`), so these files are read from there.

#[path = "../../../tests/gpu/kernels/conformance/arithmetic.rs"]
mod arithmetic;
#[path = "../../../tests/gpu/kernels/conformance/blocks.rs"]
mod blocks;
#[path = "../common/texts.rs"]
mod folder;
#[path = "../../../tests/gpu/kernels/conformance/matrices.rs"]
mod matrices;
#[path = "../../../tests/gpu/kernels/conformance/pipeline.rs"]
mod pipeline;
mod runtime;
#[path = "../../../tests/gpu/kernels/conformance/sm90a.rs"]
mod sm90a;

use std::sync::Arc;

use half::{bf16, f16};
use runtime::{Buffer, ConformanceTmaParams, Lane, Runtime, TensorMap, runtimes};

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

#[derive(Clone, Copy)]
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

/// Runs `kernel` over `input`; what it wrote. `None` where the text does not have it.
fn run(
    rt: &Arc<dyn Runtime>,
    kernel: &str,
    shape: Shape,
    input: &[u32],
    out_words: usize,
) -> Option<Vec<u32>> {
    if !rt.has_kernel(kernel) {
        return None;
    }
    let input = Buffer::from_bytes(rt, Lane::Compute, &bytes_of(input)).unwrap();
    let out = Buffer::new(rt, out_words * 4).unwrap();
    let words = Buffer::new(rt, shape.words.max(1) * 4).unwrap();
    // ConformanceParams: three pointers, n, padding.
    let fields = [input.ptr(), out.ptr(), words.ptr(), u64::from(shape.n)];
    launch(rt, kernel, &shape, &fields.map(u64::to_le_bytes).concat());
    let mut bytes = vec![0; out_words * 4];
    rt.download(Lane::Compute, out.ptr(), &mut bytes).unwrap();
    Some(words_of(&bytes))
}

fn launch(rt: &Arc<dyn Runtime>, kernel: &str, shape: &Shape, params: &[u8]) {
    rt.launch(kernel, shape, params);
}

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
