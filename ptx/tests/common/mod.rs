//! Small kernels around the instructions under test.
#![allow(dead_code, reason = "each test uses some of it")]

use tandem_ptx::{Buffers, Fault, Module, Options};

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) as u32
    }
    /// -1..1
    pub fn unit(&mut self) -> f32 {
        (f64::from(self.next()) / f64::from(u32::MAX) * 2.0 - 1.0) as f32
    }
    /// Words at the ends of ranges, and others.
    pub fn word(&mut self) -> u32 {
        const ENDS: [u32; 10] =
            [0, 1, 2, 31, 32, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff, 0x8000_8000, 0x7fff_7fff];
        if self.next().is_multiple_of(3) { ENDS[self.next() as usize % ENDS.len()] } else { self.next() }
    }
}

/// A module of one kernel `k` with parameters `in` and `out`, two pointers. Registers: %r0..%r63, %p, %q (.b64), %h
/// (.b16), %f (.f32), %g (.f64), and %in, %out, %lane.
pub fn module(declarations: &str, body: &str) -> String {
    format!(
        ".version 9.0\n.target sm_80\n.address_size 64\n{declarations}\n\
         .visible .entry k(\n.param .u64 k_in,\n.param .u64 k_out\n)\n{{\n\
         .reg .b32 %r<64>;\n.reg .pred %p<16>;\n.reg .b64 %q<32>;\n.reg .b16 %h<32>;\n.reg .f32 %f<32>;\n\
         .reg .f64 %g<16>;\n.reg .b64 %in, %out;\n.reg .b32 %lane;\n\
         ld.param.u64 %in, [k_in];\nld.param.u64 %out, [k_out];\nmov.u32 %lane, %tid.x;\n\
         {body}\nret;\n}}\n"
    )
}

/// How `run` launches.
pub struct Launch {
    pub grid: u32,
    pub threads: u32,
    pub shared: u32,
    pub options: Options,
}

impl Default for Launch {
    fn default() -> Launch {
        Launch { grid: 1, threads: 32, shared: 0, options: Options::default() }
    }
}

/// Runs a module's kernel `k`: the words of `out`, which has `words` of them, zero before.
pub fn run(text: &str, input: &[u32], words: usize, launch: Launch) -> Result<Vec<u32>, Box<Fault>> {
    let module = Module::parse(text).unwrap_or_else(|e| panic!("{e}"));
    let mut memory = Buffers::new();
    let (from, to) = (memory.add_words(input), memory.add_words(&vec![0; words]));
    let params: Vec<u8> = [from, to].iter().flat_map(|a| a.to_le_bytes()).collect();
    let block = [launch.threads, 1, 1];
    module.launch("k", [launch.grid, 1, 1], block, launch.shared, &params, &mut memory, &launch.options)?;
    Ok(memory.words(to))
}

/// Executes a body once a lane: `input` has `per` words for each of 32 lanes, in %r0 and on; the results are the words in
/// %r32 and on, `results` of them a lane.
pub fn lanes(body: &str, per: usize, input: &[u32], results: usize) -> Vec<u32> {
    assert_eq!(input.len(), 32 * per, "32 lanes");
    let mut text = format!("mad.wide.u32 %in, %lane, {}, %in;\n", 4 * per);
    for i in 0..per {
        text += &format!("ld.global.u32 %r{i}, [%in+{}];\n", 4 * i);
    }
    text += body;
    text += &format!("\nmad.wide.u32 %out, %lane, {}, %out;\n", 4 * results);
    for i in 0..results {
        text += &format!("st.global.u32 [%out+{}], %r{};\n", 4 * i, 32 + i);
    }
    run(&module("", &text), input, 32 * results, Launch::default()).unwrap_or_else(|e| panic!("{e}\n{body}"))
}

/// Every lane's results against what a function of its operands gives. Operands are words of `Random`.
pub fn check(body: &str, per: usize, results: usize, want: impl Fn(&[u32]) -> Vec<u32>) {
    check_with(body, per, results, &mut Random::word, want);
}

/// The same with other operands.
pub fn check_with(
    body: &str,
    per: usize,
    results: usize,
    operand: &mut dyn FnMut(&mut Random) -> u32,
    want: impl Fn(&[u32]) -> Vec<u32>,
) {
    let mut random = Random(body.len() as u64);
    for _ in 0..20 {
        let input: Vec<u32> = (0..32 * per).map(|_| operand(&mut random)).collect();
        let out = lanes(body, per, &input, results);
        for (operands, got) in input.chunks(per).zip(out.chunks(results)) {
            assert_eq!(got, want(operands), "{body}\nof {operands:x?}");
        }
    }
}
