//! Dense decode linear (`cuda/gemv.cu`, `cuda/linear_dense.cu`) against f64, at the edges of its tiles.
#![cfg(tandem_kernels)]

mod support;

use std::collections::HashMap;
use std::sync::Arc;

use half::{bf16, f16};
use proptest::prelude::*;
use tandem::device::accelerator::Half;
use tandem::device::kernels::linear::{
    self, COUNTER_BYTES, Epilogue, LinearArgs, Plan, interleave_gate_up, linear_as,
};
use tandem::device::runtime::{Buffer, DevPtr, DeviceInfo, Lane, Runtime};

/// What y and its surroundings are filled with before: a NaN, as f32 and as two halves.
const CANARY: u8 = 0xff;

#[derive(Debug, Clone, Copy)]
struct Case {
    act: Half,
    m: usize,
    n: usize,
    k: usize,
    /// Elements that a row of x has more than k.
    pad_x: usize,
    /// Columns of a row of y before and after the ones written.
    pad_y: (usize, usize),
    bias: bool,
    epilogue: Epilogue,
    /// Which numbers.
    seed: u64,
}

impl Case {
    fn plain(act: Half, m: usize, n: usize, k: usize) -> Case {
        Case { act, m, n, k, pad_x: 0, pad_y: (0, 0), bias: false, epilogue: Epilogue::F32, seed: 0 }
    }
    fn columns(&self) -> usize {
        if self.epilogue.is_gated() { self.n / 2 } else { self.n }
    }
    fn ldx(&self) -> usize {
        self.k + self.pad_x
    }
    fn ldy(&self) -> usize {
        self.pad_y.0 + self.columns() + self.pad_y.1
    }
    /// Bytes of an element of y.
    fn size(&self) -> usize {
        if self.epilogue == Epilogue::F32 { 4 } else { 2 }
    }
}

fn bits_of(act: Half, v: f64) -> u16 {
    match act {
        Half::F16 => f16::from_f64(v).to_bits(),
        Half::BF16 => bf16::from_f64(v).to_bits(),
    }
}

fn value_of(act: Half, bits: u16) -> f64 {
    match act {
        Half::F16 => f16::from_bits(bits).to_f64(),
        Half::BF16 => bf16::from_bits(bits).to_f64(),
    }
}

/// Uniform in -1..1, by place: the same element whatever the sizes, so that batches of different m compare.
fn noise(seed: u64, row: usize, col: usize) -> f64 {
    let mut z = seed ^ (row as u64) << 40 ^ (col as u64) << 8;
    for _ in 0..2 {
        z = (z ^ z >> 30).wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z ^= z >> 27;
    }
    (z >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

/// Operands as the device gets them, and a copy of w as it was before gates and ups were interleaved.
struct Operands {
    w: Vec<u16>,
    packed: Vec<u16>,
    x: Vec<u16>,
    bias: Vec<f32>,
}

impl Operands {
    fn new(c: &Case) -> Operands {
        // Sums of k products then have a variance of about 1: gates lie where activations bend.
        let scale = (3.0 / c.k as f64).sqrt();
        let w: Vec<u16> =
            (0..c.n * c.k).map(|i| bits_of(c.act, scale * noise(c.seed ^ 1, i / c.k, i % c.k))).collect();
        // Padding of x is NaN: a sum that takes some in shows it.
        let x = (0..c.m * c.ldx())
            .map(|i| (i / c.ldx(), i % c.ldx()))
            .map(|(m, k)| if k < c.k { bits_of(c.act, 3.0 * noise(c.seed ^ 2, m, k)) } else { 0x7fff })
            .collect();
        let bias = (0..c.n).map(|i| noise(c.seed ^ 3, i, 0) as f32).collect();
        let mut packed = w.clone();
        if c.epilogue.is_gated() {
            let bytes: Vec<u8> = w.iter().flat_map(|v| v.to_le_bytes()).collect();
            let (gate, up) = bytes.split_at(bytes.len() / 2);
            let mut out = vec![0; bytes.len()];
            interleave_gate_up(gate, up, 2 * c.k, &mut out);
            packed = out.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect();
        }
        Operands { w, packed, x, bias }
    }

    /// Row n's sum for token m in f64, and the sum of magnitudes. The bias is in the order of the rows as packed.
    fn sum(&self, c: &Case, m: usize, n: usize) -> (f64, f64) {
        let at = if c.epilogue.is_gated() { n % (c.n / 2) / 8 * 16 + n / (c.n / 2) * 8 + n % 8 } else { n };
        let mut sum = if c.bias { f64::from(self.bias[at]) } else { 0.0 };
        let mut size = sum.abs();
        for k in 0..c.k {
            let p = value_of(c.act, self.w[n * c.k + k]) * value_of(c.act, self.x[m * c.ldx() + k]);
            sum += p;
            size += p.abs();
        }
        (sum, size)
    }

    /// Element (m, column) of the output, and how far a right result may be from it.
    ///
    /// A sum has at most k + 64 roundings (64: lanes, warps, splits, bias), each within 2^-23 (tensor cores cut where
    /// IEEE rounds) of the magnitudes summed so far. silu and gelu_tanh have slopes below 1.13. Their f32 evaluation
    /// is within 2^-19 of their argument's magnitude + 1: a fast exponential is off by 2 + 1.2 |x| units in the last
    /// place, and |x| stays below 16.
    fn expect(&self, c: &Case, m: usize, column: usize) -> (f64, f64) {
        let roundings = (c.k + 64) as f64 * 2f64.powi(-23);
        let half = |v: f64| match c.act {
            Half::F16 => v.abs() * 2f64.powi(-11) + 2f64.powi(-25),
            Half::BF16 => v.abs() * 2f64.powi(-8),
        };
        let (sum, size) = self.sum(c, m, column);
        let error = roundings * size;
        let act = match c.epilogue {
            Epilogue::F32 => return (sum, error),
            Epilogue::Relu => return (sum.max(0.0), error + half(sum.abs() + error)),
            Epilogue::SwiGlu => sum / (1.0 + (-sum).exp()),
            Epilogue::GeGlu => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (sum + 0.044715 * sum.powi(3));
                0.5 * sum * (1.0 + inner.tanh())
            }
        };
        assert!(sum.abs() < 16.0, "the bound above holds below 16, the gate is {sum}");
        let (up, up_size) = self.sum(c, m, c.n / 2 + column);
        let act_error = 1.13 * error + 2f64.powi(-19) * (sum.abs() + 1.0);
        let up_error = roundings * up_size;
        let out_error = act_error * (up.abs() + up_error) + act.abs() * up_error;
        (act * up, out_error + half(act * up) + half(out_error))
    }
}

fn upload(rt: &Arc<dyn Runtime>, bytes: &[u8]) -> Buffer {
    Buffer::from_bytes(rt, Lane::Compute, bytes).expect("upload")
}

fn halves(v: &[u16]) -> Vec<u8> {
    v.iter().flat_map(|b| b.to_le_bytes()).collect()
}

/// Bytes after the last row of y that nobody may write.
const GUARD: usize = 64;

/// Runs `c` as `plan` says; all bytes of y, guard included.
fn run(rt: &Arc<dyn Runtime>, c: &Case, o: &Operands, plan: &Plan) -> Vec<u8> {
    let (w, x) = (upload(rt, &halves(&o.packed)), upload(rt, &halves(&o.x)));
    let bias = upload(rt, &o.bias.iter().flat_map(|b| b.to_le_bytes()).collect::<Vec<_>>());
    let mut y = vec![CANARY; c.m * c.ldy() * c.size() + GUARD];
    let out = upload(rt, &y);
    // NaNs: a partial sum that is read before it is written shows.
    let mut scratch = vec![CANARY; COUNTER_BYTES + plan.partial_bytes];
    scratch[..COUNTER_BYTES].fill(0);
    let scratch = upload(rt, &scratch);
    let args = LinearArgs {
        dtype: c.act,
        w: w.ptr(),
        x: x.ptr(),
        bias: if c.bias { bias.ptr() } else { DevPtr::NULL },
        y: out.ptr().add(c.pad_y.0 * c.size()),
        scratch: scratch.ptr(),
        m: c.m,
        n: c.n,
        k: c.k,
        ldx: c.ldx(),
        ldy: c.ldy(),
        epilogue: c.epilogue,
    };
    linear_as(&**rt, Lane::Compute, &args, plan).unwrap_or_else(|e| panic!("{c:?} {plan:?}: {e}"));
    rt.download(Lane::Compute, out.ptr(), &mut y).unwrap_or_else(|e| panic!("{c:?} {plan:?}: {e}"));
    let mut counters = vec![1; COUNTER_BYTES];
    rt.download(Lane::Compute, scratch.ptr(), &mut counters).expect("download");
    assert!(counters.iter().all(|&b| b == 0), "{c:?} {plan:?}: counters are not left at zero");
    y
}

/// Runs `c` as `plan` says and compares every element; what lies around them is untouched.
fn check(rt: &Arc<dyn Runtime>, c: &Case, plan: &Plan) -> Vec<u8> {
    let operands = Operands::new(c);
    let y = run(rt, c, &operands, plan);
    let written = c.pad_y.0..c.pad_y.0 + c.columns();
    for (at, bytes) in y.chunks_exact(c.size()).enumerate() {
        let (m, column) = (at / c.ldy(), at % c.ldy());
        if m >= c.m || !written.contains(&column) {
            assert!(bytes.iter().all(|&b| b == CANARY), "{c:?} {plan:?}: wrote token {m} column {column}");
            continue;
        }
        let got = match c.epilogue {
            Epilogue::F32 => f32::from_le_bytes(bytes.try_into().expect("4 bytes")).into(),
            _ => value_of(c.act, u16::from_le_bytes(bytes.try_into().expect("2 bytes"))),
        };
        let (want, tolerance) = operands.expect(c, m, column - c.pad_y.0);
        assert!(
            (got - want).abs() <= tolerance,
            "{c:?} {plan:?}: token {m} column {column} is {got}, wanted {want} within {tolerance:e}"
        );
    }
    y
}

/// The plan for a device of this runtime's kind with so many multiprocessors: more of them, more splits.
fn plan(rt: &Arc<dyn Runtime>, multiprocessors: u32, c: &Case) -> Plan {
    plan_as(&DeviceInfo { multiprocessors, ..rt.info().clone() }, c)
}

fn plan_as(info: &DeviceInfo, c: &Case) -> Plan {
    Plan::new(info, c.act, c.m, c.n, c.k)
}

fn acts(rt: &Arc<dyn Runtime>) -> Vec<Half> {
    let has = |act: &Half| rt.has_kernel(&format!("gemv_{}_m1", act.name()));
    [Half::F16, Half::BF16].into_iter().filter(has).collect()
}

/// Numbers of tokens that fill the tiles of the kernels, one each.
const TOKENS: [usize; 9] = [1, 2, 3, 4, 8, 16, 32, 64, 128];

#[test]
fn every_kernel_is_there() {
    for rt in support::gpu::runtimes() {
        assert!(!acts(&rt).is_empty(), "{}: no dense linear", rt.info().name);
        for act in acts(&rt) {
            for m in TOKENS {
                let plan = plan_as(rt.info(), &Case::plain(act, m, 64, 64));
                assert!(rt.has_kernel(&plan.kernel), "{}: no {}", rt.info().name, plan.kernel);
            }
        }
    }
}

#[test]
fn tails_of_rows_columns_and_tokens() {
    for rt in support::gpu::runtimes() {
        for act in acts(&rt) {
            for m in TOKENS {
                for (m, n, k) in [
                    (m, 1, 8),
                    (m, 15, 56),
                    (m, 65, 264),
                    (m.max(5) - 1, 129, 72),
                    (m, 64, 1032),
                    (if m > 4 { m - 3 } else { m }, 17, 2056),
                ] {
                    let c = Case { pad_x: 8, pad_y: (3, 2), ..Case::plain(act, m, n, k) };
                    check(&rt, &c, &plan(&rt, 1, &c));
                }
            }
        }
    }
}

#[test]
fn every_epilogue_of_every_kernel() {
    for rt in support::gpu::runtimes() {
        for act in acts(&rt) {
            for m in TOKENS {
                for epilogue in Epilogue::ALL {
                    for bias in [false, true] {
                        let n = 144; // nine groups of 16: the last tile is partly empty
                        let c = Case { epilogue, bias, pad_y: (1, 0), ..Case::plain(act, m, n, 136) };
                        check(&rt, &c, &plan(&rt, 2, &c));
                    }
                }
            }
        }
    }
}

#[test]
fn parts_of_k_add_up() {
    for rt in support::gpu::runtimes() {
        for m in [1, 4, 7, 16, 27, 64, 65] {
            let mut seen = Vec::new();
            let k = if m <= 4 { 4104 } else { 1096 };
            for multiprocessors in [1, 2, 3, 4, 132] {
                let epilogue = if multiprocessors % 2 == 0 { Epilogue::SwiGlu } else { Epilogue::F32 };
                let c = Case { bias: true, epilogue, ..Case::plain(Half::F16, m, 80, k) };
                let plan = plan(&rt, multiprocessors, &c);
                check(&rt, &c, &plan);
                seen.push(plan.k_parts());
            }
            assert!(seen.iter().any(|&(warps, splits)| warps * splits >= 4), "{m} tokens: only {seen:?}");
        }
    }
}

#[test]
fn rings_of_every_length() {
    for rt in support::gpu::runtimes() {
        for m in TOKENS.into_iter().filter(|&m| m > 4) {
            let mut lengths = Vec::new();
            for (sm, kib) in [(75, 64), (86, 99), (90, 227)] {
                let shared_per_block = (kib << 10).min(rt.info().shared_per_block);
                let info = DeviceInfo { sm, shared_per_block, ..rt.info().clone() };
                for k in [8, 72, 136, 520] {
                    let c = Case::plain(Half::F16, m, 30, k);
                    let plan = plan_as(&info, &c);
                    check(&rt, &c, &plan);
                    lengths.push(plan.stages);
                }
            }
            lengths.dedup();
            assert!(lengths.len() >= 2, "{m} tokens: only rings of {lengths:?}");
        }
    }
}

/// The same token among others, in other places, in batches of other sizes: as long as the kernel is the same.
#[test]
fn a_tokens_result_does_not_depend_on_its_batch() {
    for rt in support::gpu::runtimes() {
        for act in acts(&rt) {
            for epilogue in [Epilogue::F32, Epilogue::SwiGlu] {
                let base = Case { epilogue, ..Case::plain(act, 1, 80, 840) };
                let token = |m: usize| -> Vec<u16> {
                    (0..base.k).map(|k| bits_of(act, 3.0 * noise(99, m, k))).collect()
                };
                let mut seen: HashMap<String, Vec<u8>> = HashMap::new();
                for (m, at) in
                    [(1, 0), (2, 1), (3, 0), (4, 2), (5, 4), (8, 0), (7, 3), (9, 8), (16, 3), (17, 16)]
                        .into_iter()
                        .chain([(32, 1), (33, 5), (64, 63), (65, 64), (128, 2), (130, 129), (150, 0)])
                {
                    let c = Case { m, seed: m as u64, ..base };
                    let mut o = Operands::new(&Case { seed: 0, ..c });
                    for other in 0..m {
                        // Neighbours differ from batch to batch, one is not even finite.
                        let row = &mut o.x[other * c.k..(other + 1) * c.k];
                        row.copy_from_slice(&token(if other == at { 0 } else { m * 1000 + other }));
                        if other == (at + 1) % m && m > 1 {
                            row[5] = 0x7fff;
                        }
                    }
                    let plan = plan(&rt, 4, &c);
                    let y = run(&rt, &c, &o, &plan);
                    let bytes = c.columns() * c.size();
                    let row = y[at * bytes..(at + 1) * bytes].to_vec();
                    // One to four tokens: four kernels of the same arithmetic, which is more than is promised.
                    let kernel = if m <= 4 { "gemv".into() } else { plan.kernel };
                    let first = seen.entry(kernel.clone()).or_insert_with(|| row.clone());
                    assert_eq!(*first, row, "{kernel}: token {at} of {m}");
                }
                assert_eq!(seen.len(), 6, "kernels run: {:?}", seen.keys());
            }
        }
    }
}

#[test]
fn results_repeat_bit_for_bit() {
    for rt in support::gpu::runtimes() {
        for m in [1, 4, 5, 16, 40, 70] {
            let c = Case::plain(Half::F16, m, 144, 1032);
            let plan = plan(&rt, 3, &c);
            let o = Operands::new(&c);
            let first = run(&rt, &c, &o, &plan);
            for _ in 0..3 {
                assert!(run(&rt, &c, &o, &plan) == first, "{plan:?}");
            }
        }
    }
}

/// Every order of threads and every time of copies that the emulation knows: the same bits, and its checker
/// finds no race, no read of what nobody wrote and no stray access.
#[test]
fn in_every_schedule() {
    for m in [1, 3, 6, 13, 27, 40, 70] {
        let c = Case { epilogue: Epilogue::GeGlu, bias: true, ..Case::plain(Half::BF16, m, 48, 584) };
        let mut first = None;
        support::gpu::for_schedules(|rt, schedule| {
            let y = check(rt, &c, &plan(rt, 3, &c));
            assert!(*first.get_or_insert_with(|| y.clone()) == y, "{m} tokens, {schedule}");
        });
    }
}

#[test]
fn ldmatrix_has_no_bank_conflicts() {
    for m in TOKENS.into_iter().filter(|&m| m > 4) {
        let c = Case::plain(Half::F16, m, 130, 200);
        let counts = support::gpu::bank_conflicts(|rt| drop(check(rt, &c, &plan(rt, 1, &c))));
        let Some((phases, conflicts)) = counts else { return };
        assert!(phases > 0, "{m} tokens: the kernel uses ldmatrix");
        assert_eq!(conflicts, 0, "{m} tokens: of {phases} phases");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn any_shape(
        m in prop_oneof![1usize..=9, 10usize..=70, Just(129)],
        n in prop_oneof![1usize..=20, 60usize..=140],
        k in 1usize..=90,
        pad_x in 0usize..3,
        pad_y in (0usize..4, 0usize..4),
        bias: bool,
        epilogue in prop::sample::select(Epilogue::ALL.to_vec()),
        multiprocessors in prop::sample::select(vec![1u32, 2, 4, 24]),
        act in 0usize..2,
        seed: u64,
    ) {
        for rt in support::gpu::runtimes() {
            let acts = acts(&rt);
            let n = if epilogue.is_gated() { n.next_multiple_of(16) } else { n };
            let c = Case {
                act: acts[act % acts.len()], m, n, k: 8 * k, pad_x: 8 * pad_x, pad_y, bias, epilogue, seed,
            };
            check(&rt, &c, &plan(&rt, multiprocessors, &c));
        }
    }
}

/// What the host refuses before anything is launched.
#[test]
fn wrong_shapes_are_refused_by_name() {
    for rt in support::gpu::runtimes() {
        let refused = |m, n, k, ldx, ldy, epilogue| {
            let args = LinearArgs {
                dtype: Half::F16,
                w: DevPtr(256),
                x: DevPtr(256),
                bias: DevPtr::NULL,
                y: DevPtr(256),
                scratch: DevPtr(256),
                m,
                n,
                k,
                ldx,
                ldy,
                epilogue,
            };
            let rt = &rt;
            let call = std::panic::AssertUnwindSafe(|| linear::linear(&**rt, Lane::Compute, &args));
            let panic = std::panic::catch_unwind(call).expect_err("refused");
            panic.downcast_ref::<String>().expect("a formatted message").clone()
        };
        assert!(refused(1, 16, 12, 16, 16, Epilogue::F32).contains("16 x 12 weight"));
        assert!(refused(0, 16, 16, 16, 16, Epilogue::F32).contains("0 tokens"));
        assert!(refused(1, 16, 16, 8, 16, Epilogue::F32).contains("x [1][8]"));
        assert!(refused(2, 16, 16, 16, 15, Epilogue::Relu).contains("y [2][15]"));
        assert!(refused(2, 24, 16, 16, 24, Epilogue::SwiGlu).contains("24 rows"));
    }
}
