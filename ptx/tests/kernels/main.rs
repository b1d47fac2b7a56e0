//! Whole kernels of `cuda/`, as nvcc compiled them, against references in f64. Needs `TANDEM_PTX_DIR` with folders whose
//! files are named as those of `cuda/`. Parameter structs are those of `cuda/include/abi/`, by their bytes.

mod attention;
mod dense;
mod elementwise;
mod experts;
#[path = "../common/texts.rs"]
mod folder;
mod quantised;
mod rows;

use half::{bf16, f16};
use tandem_ptx::{Buffers, Landing, Module, Options, Order, Stats, TensorMap};

/// The modules of a file: one a target, or one a target and format (`linear_quant.q4_0.ptx`).
fn modules(file: &str) -> Vec<Module> {
    let of_file = |path: &std::path::PathBuf| {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        name.split('.').next() == Some(file)
    };
    let texts = folder::texts().into_iter().filter(of_file);
    let read =
        |path| Module::parse(&std::fs::read_to_string(path).unwrap()).unwrap_or_else(|e| panic!("{e}"));
    texts.map(read).collect()
}

fn has(module: &Module, kernel: &str) -> bool {
    module.kernels().any(|k| k.name == kernel)
}

/// The bytes of a struct, each field aligned to its size.
#[derive(Default, Clone)]
struct Params(Vec<u8>);

impl Params {
    fn align(mut self, to: usize) -> Params {
        self.0.resize(self.0.len().next_multiple_of(to), 0);
        self
    }
    fn pointer(self, address: u64) -> Params {
        let mut s = self.align(8);
        s.0.extend(address.to_le_bytes());
        s
    }
    fn pointers(self, all: &[u64]) -> Params {
        all.iter().fold(self, |p, address| p.pointer(*address))
    }
    fn word(self, value: u32) -> Params {
        let mut s = self.align(4);
        s.0.extend(value.to_le_bytes());
        s
    }
    fn words(self, all: &[u32]) -> Params {
        all.iter().fold(self, |p, value| p.word(*value))
    }
    fn float(self, value: f32) -> Params {
        self.word(value.to_bits())
    }
    fn raw(mut self, bytes: &[u8]) -> Params {
        self.0.extend(bytes);
        self
    }
    /// The struct's own alignment is that of its pointers.
    fn bytes(self) -> Vec<u8> {
        self.align(8).0
    }
}

/// Launches on late copies in ascending order, and on early ones in shuffled order and short turns, must give the same bits.
fn launch(
    module: &Module,
    kernel: &str,
    grid: [u32; 3],
    (block, shared): (u32, u32),
    params: &Params,
    memory: &mut Buffers,
) -> Stats {
    let params = params.clone().bytes();
    let mut other = memory.clone();
    let options =
        |order, copies, turn| Options { order, copies, turn, budget: Some(1 << 24), ..Options::default() };
    let run = |memory: &mut Buffers, options: Options| {
        let done = module.launch(kernel, grid, [block, 1, 1], shared, &params, memory, &options);
        done.unwrap_or_else(|e| panic!("{}: {e}", module.target()))
    };
    let stats = run(memory, options(Order::Ascending, Landing::AtWait, 1 << 14));
    run(&mut other, options(Order::Shuffled(5), Landing::AtOnce, 11));
    assert!(memory.same_as(&other), "{kernel}: the order of blocks, warps and copies shows in the result");
    stats
}

/// Pseudo-random numbers.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }
    /// -1..1
    fn unit(&mut self) -> f32 {
        (f64::from(self.next()) / f64::from(1u32 << 30) - 1.0) as f32
    }
    fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit()).collect()
    }
}

fn float_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// The two 16-bit formats.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Half {
    F16,
    Bf16,
}

impl Half {
    const BOTH: [Half; 2] = [Half::F16, Half::Bf16];
    fn name(self) -> &'static str {
        if self == Half::F16 { "f16" } else { "bf16" }
    }
    /// Half a unit in the last place, relative.
    fn epsilon(self) -> f64 {
        if self == Half::F16 { 2f64.powi(-11) } else { 2f64.powi(-8) }
    }
    fn round(self, v: f32) -> f32 {
        if self == Half::F16 { f16::from_f32(v).to_f32() } else { bf16::from_f32(v).to_f32() }
    }
    fn bytes(self, values: &[f32]) -> Vec<u8> {
        let bits = |v: &f32| {
            if self == Half::F16 { f16::from_f32(*v).to_bits() } else { bf16::from_f32(*v).to_bits() }
        };
        values.iter().flat_map(|v| bits(v).to_le_bytes()).collect()
    }
    fn values(self, bytes: &[u8]) -> Vec<f32> {
        let value = |b: &[u8]| {
            let bits = u16::from_le_bytes([b[0], b[1]]);
            if self == Half::F16 { f16::from_bits(bits).to_f32() } else { bf16::from_bits(bits).to_f32() }
        };
        bytes.chunks_exact(2).map(value).collect()
    }
}
