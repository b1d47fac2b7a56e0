//! The prefill GEMM (`cuda/gemm.cu`, `cuda/gemm_sm90a.cu`) against f64, at the edges of its tiles.
#![cfg(tandem_kernels)]

mod support;

use std::sync::Arc;

use half::{bf16, f16};
use proptest::prelude::*;
use tandem::device::accelerator::Half;
use tandem::device::kernels::gemm::{self, GemmArgs, Path, Plan};
use tandem::device::kernels::linear::{COUNTER_BYTES, Epilogue};
use tandem::device::runtime::{Buffer, DevPtr, DeviceInfo, Lane, Runtime};

/// What y is filled with before: a NaN, as f32 and as two halves.
const CANARY: u8 = 0xff;

#[derive(Debug, Clone, Copy)]
struct Case {
    act: Half,
    m: usize,
    n: usize,
    k: usize,
    /// Elements that a token of x, and of y, has more than needed.
    pad_x: usize,
    pad_y: usize,
    bias: bool,
    epilogue: Epilogue,
}

impl Case {
    fn plain(act: Half, m: usize, n: usize, k: usize) -> Case {
        Case { act, m, n, k, pad_x: 0, pad_y: 0, bias: false, epilogue: Epilogue::F32 }
    }
    fn columns(&self) -> usize {
        if self.epilogue.is_gated() { self.n / 2 } else { self.n }
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

/// Uniform in -1..1, by position: the same element whatever the sizes, so that results of different m compare.
fn noise(seed: u64, row: usize, col: usize) -> f64 {
    let mut h = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (row as u64) << 32 ^ col as u64;
    for _ in 0..2 {
        h = (h ^ h >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        h ^= h >> 29;
    }
    (h >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

/// Operands as the device gets them. Padding of x is NaN: whoever reads it shows it.
struct Operands {
    w: Vec<u16>,
    x: Vec<u16>,
    bias: Vec<f32>,
}

impl Operands {
    fn new(c: &Case) -> Operands {
        // Sums of k products then have a variance of about 1: gates lie where activations bend.
        let scale = (3.0 / c.k as f64).sqrt();
        let w = (0..c.n * c.k).map(|i| bits_of(c.act, scale * noise(1, i / c.k, i % c.k))).collect();
        let ldx = c.k + c.pad_x;
        let x = (0..c.m * ldx)
            .map(|i| if i % ldx < c.k { bits_of(c.act, 3.0 * noise(2, i / ldx, i % ldx)) } else { 0x7fff })
            .collect();
        let bias = (0..c.n).map(|i| noise(3, i, 0) as f32).collect();
        Operands { w, x, bias }
    }

    /// Row n's sum for token m in f64, and the sum of magnitudes.
    fn sum(&self, c: &Case, m: usize, n: usize) -> (f64, f64) {
        let ldx = c.k + c.pad_x;
        let mut sum = if c.bias { f64::from(self.bias[n]) } else { 0.0 };
        let mut size = sum.abs();
        for k in 0..c.k {
            let p = value_of(c.act, self.w[n * c.k + k]) * value_of(c.act, self.x[m * ldx + k]);
            sum += p;
            size += p.abs();
        }
        (sum, size)
    }

    /// Element (m, column) of the output, and how far a right result may be from it.
    ///
    /// A sum has at most one rounding for each product, split and the bias, each within 2^-23 (tensor cores cut where
    /// IEEE rounds) of the magnitudes summed so far. silu and gelu_tanh have slopes below 1.13. Their f32 evaluation
    /// is within 2^-19 of their argument's magnitude + 1 (fast exponential: 2 + 1.2 |x| units in the last place, |x| < 12).
    fn expect(&self, c: &Case, splits: usize, m: usize, column: usize) -> (f64, f64) {
        let roundings = (c.k + splits + 1) as f64 * 2f64.powi(-23);
        let half = |v: f64| match c.act {
            Half::F16 => v.abs() * 2f64.powi(-11) + 2f64.powi(-25),
            Half::BF16 => v.abs() * 2f64.powi(-8),
        };
        if !c.epilogue.is_gated() {
            let (sum, size) = self.sum(c, m, column);
            let error = roundings * size;
            return match c.epilogue {
                Epilogue::F32 => (sum, error),
                _ => (sum.max(0.0), error + half(sum.abs() + error)),
            };
        }
        let row = column / 8 * 16 + column % 8;
        let ((gate, gate_size), (up, up_size)) = (self.sum(c, m, row), self.sum(c, m, row + 8));
        let (eg, eu) = (roundings * gate_size, roundings * up_size);
        let act = match c.epilogue {
            Epilogue::SwiGlu => gate / (1.0 + (-gate).exp()),
            _ => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044715 * gate.powi(3));
                0.5 * gate * (1.0 + inner.tanh())
            }
        };
        let ea = 1.13 * eg + 2f64.powi(-19) * (gate.abs() + 1.0);
        let out = act * up;
        let error = ea * (up.abs() + eu) + act.abs() * eu;
        (out, error + half(out.abs() + error))
    }
}

/// Everything that a launch touches, on a device.
struct Device {
    rt: Arc<dyn Runtime>,
    args: GemmArgs,
    y_bytes: usize,
    _buffers: Vec<Buffer>,
    y: Buffer,
    scratch: Buffer,
}

/// Bytes after the last element of y that nobody may write.
const GUARD: usize = 64;

impl Device {
    fn new(rt: &Arc<dyn Runtime>, c: &Case, o: &Operands) -> Device {
        let upload = |bytes: &[u8]| Buffer::from_bytes(rt, Lane::Compute, bytes).expect("upload");
        let halves = |v: &[u16]| upload(&v.iter().flat_map(|b| b.to_le_bytes()).collect::<Vec<_>>());
        let (w, x) = (halves(&o.w), halves(&o.x));
        let bias = upload(&o.bias.iter().flat_map(|b| b.to_le_bytes()).collect::<Vec<_>>());
        let ldy = c.columns() + c.pad_y;
        let size = if c.epilogue == Epilogue::F32 { 4 } else { 2 };
        let y_bytes = c.m * ldy * size + GUARD;
        let y = upload(&vec![CANARY; y_bytes]);
        // NaNs: a partial sum that is read before it is written shows.
        let mut scratch = vec![CANARY; gemm::scratch_bytes(rt.info())];
        scratch[..COUNTER_BYTES].fill(0);
        let scratch = upload(&scratch);
        let args = GemmArgs {
            dtype: c.act,
            w: w.ptr(),
            x: x.ptr(),
            bias: if c.bias { bias.ptr() } else { DevPtr::NULL },
            y: y.ptr(),
            m: c.m,
            n: c.n,
            k: c.k,
            ldx: c.k + c.pad_x,
            ldy,
            epilogue: c.epilogue,
            scratch: scratch.ptr(),
        };
        Device { rt: rt.clone(), args, y_bytes, _buffers: vec![w, x, bias], y, scratch }
    }

    fn run(&self, plan: &Plan) -> Vec<u8> {
        gemm::gemm_as(&*self.rt, Lane::Compute, &self.args, plan).unwrap_or_else(|e| panic!("{plan:?}: {e}"));
        let mut y = vec![0; self.y_bytes];
        self.rt.download(Lane::Compute, self.y.ptr(), &mut y).unwrap_or_else(|e| panic!("{plan:?}: {e}"));
        let mut counters = vec![1; COUNTER_BYTES];
        self.rt.download(Lane::Compute, self.scratch.ptr(), &mut counters).expect("download");
        assert!(counters.iter().all(|&b| b == 0), "{plan:?}: counters are not left at zero");
        y
    }
}

fn element(c: &Case, y: &[u8], at: usize) -> f64 {
    if c.epilogue == Epilogue::F32 {
        f32::from_le_bytes(y[at * 4..at * 4 + 4].try_into().expect("4 bytes")).into()
    } else {
        value_of(c.act, u16::from_le_bytes([y[at * 2], y[at * 2 + 1]]))
    }
}

/// Runs `c` as `plan` says and compares every element; what lies between and after them is untouched.
fn check(rt: &Arc<dyn Runtime>, c: &Case, plan: &Plan) -> Vec<u8> {
    let operands = Operands::new(c);
    let y = Device::new(rt, c, &operands).run(plan);
    let ldy = c.columns() + c.pad_y;
    let size = if c.epilogue == Epilogue::F32 { 4 } else { 2 };
    for m in 0..c.m {
        for column in 0..c.columns() {
            let got = element(c, &y, m * ldy + column);
            let (want, tolerance) = operands.expect(c, plan.splits, m, column);
            assert!(
                (got - want).abs() <= tolerance,
                "{c:?} {plan:?}: token {m} column {column} is {got}, wanted {want} within {tolerance:e}"
            );
        }
        let padding = &y[(m * ldy + c.columns()) * size..(m + 1) * ldy * size];
        assert!(padding.iter().all(|&b| b == CANARY), "{c:?} {plan:?}: token {m}: wrote beyond its columns");
    }
    assert!(
        y[c.m * ldy * size..].iter().all(|&b| b == CANARY),
        "{c:?} {plan:?}: wrote beyond the last token"
    );
    y
}

/// Paths and tiles that this runtime has for a type.
fn kernels(rt: &dyn Runtime, act: Half) -> Vec<(Path, usize)> {
    [Path::Sync, Path::Async, Path::Tma]
        .into_iter()
        .flat_map(|path| path.tokens().map(|tokens| (path, tokens)))
        .filter(|(path, tokens)| rt.has_kernel(&path.kernel(act, *tokens)))
        .collect()
}

fn unsplit(path: Path, tokens: usize, k: usize) -> Plan {
    Plan { path, tokens, splits: 1, k_per_split: k.next_multiple_of(path.depth()) }
}

/// `splits` parts of K as [`gemm::plan`] cuts it, or fewer.
fn split(path: Path, tokens: usize, k: usize, splits: usize) -> Plan {
    let k_per_split = k.div_ceil(splits).next_multiple_of(path.depth());
    Plan { path, tokens, splits: k.div_ceil(k_per_split), k_per_split }
}

#[test]
fn every_kernel_is_right_at_the_edges_of_its_tiles() {
    for rt in support::gpu::runtimes() {
        for act in [Half::F16, Half::BF16] {
            for (path, tokens) in kernels(&*rt, act) {
                let depth = path.depth();
                for (m, n, k) in [
                    (1, 1, 8),
                    (tokens - 1, 127, depth),
                    (tokens, 128, depth - 8),
                    (tokens + 1, 129, 3 * depth + 8),
                    (7, 136, 7 * depth),
                ] {
                    check(
                        &rt,
                        &Case { pad_x: 8, pad_y: 3, ..Case::plain(act, m, n, k) },
                        &unsplit(path, tokens, k),
                    );
                }
            }
        }
    }
}

#[test]
fn every_epilogue_of_every_kernel() {
    for rt in support::gpu::runtimes() {
        for act in [Half::F16, Half::BF16] {
            for (path, tokens) in kernels(&*rt, act) {
                for epilogue in [Epilogue::F32, Epilogue::Relu, Epilogue::SwiGlu, Epilogue::GeGlu] {
                    for bias in [false, true] {
                        let c = Case { epilogue, bias, pad_y: 1, ..Case::plain(act, 66, 144, 72) };
                        check(&rt, &c, &unsplit(path, tokens, c.k));
                    }
                }
            }
        }
    }
}

#[test]
fn splits_of_k_add_up_and_leave_their_counters_at_zero() {
    for rt in support::gpu::runtimes() {
        for (path, tokens) in kernels(&*rt, Half::F16) {
            for (k, splits) in [(200, 2), (264, 4)] {
                for epilogue in [Epilogue::F32, Epilogue::SwiGlu] {
                    let c = Case { epilogue, bias: true, ..Case::plain(Half::F16, 5, 32, k) };
                    check(&rt, &c, &split(path, tokens, k, splits));
                }
            }
        }
    }
}

#[test]
fn more_items_than_blocks_go_round_the_ring() {
    for rt in support::gpu::runtimes() {
        for (path, tokens) in kernels(&*rt, Half::F16).into_iter().filter(|(path, _)| *path == Path::Tma) {
            // On the emulated device of four multiprocessors: five or six tiles, so a block makes two and its ring goes on.
            check(&rt, &Case::plain(Half::F16, 2 * tokens + 1, 130, 136), &unsplit(path, tokens, 136));
        }
    }
}

#[test]
fn a_row_does_not_depend_on_the_other_rows() {
    for rt in support::gpu::runtimes() {
        for act in [Half::F16, Half::BF16] {
            for (path, tokens) in kernels(&*rt, act) {
                let c = Case::plain(act, tokens + 3, 40, 200);
                let plan = split(path, tokens, c.k, 2);
                let all = check(&rt, &c, &plan);
                for m in [1, 9] {
                    let few = check(&rt, &Case { m, ..c }, &plan);
                    assert_eq!(
                        few[..m * c.n * 4],
                        all[..m * c.n * 4],
                        "{plan:?}: {m} tokens against {}",
                        c.m
                    );
                }
            }
        }
    }
}

#[test]
fn results_repeat_bit_for_bit() {
    for rt in support::gpu::runtimes() {
        for (path, tokens) in kernels(&*rt, Half::F16) {
            let c = Case::plain(Half::F16, 20, 130, 264);
            let plan = split(path, tokens, c.k, 2);
            let operands = Operands::new(&c);
            let device = Device::new(&rt, &c, &operands);
            let first = device.run(&plan);
            for _ in 0..2 {
                assert_eq!(device.run(&plan), first, "{plan:?}");
            }
        }
    }
}

#[test]
fn the_planned_product_is_right() {
    for rt in support::gpu::runtimes() {
        for act in [Half::F16, Half::BF16] {
            if kernels(&*rt, act).is_empty() {
                continue;
            }
            for (m, n, k) in [(70, 96, 576), (130, 192, 64)] {
                let c = Case::plain(act, m, n, k);
                let path = Path::of(&*rt, act);
                check(&rt, &c, &gemm::plan(rt.info(), path, m, n, k));
            }
        }
    }
}

/// Whatever order threads run in and whenever copies land.
#[test]
fn every_schedule_gives_the_same_bits() {
    let mut first: Vec<Vec<u8>> = Vec::new();
    support::gpu::for_schedules(|rt, schedule| {
        let kernels =
            [(Half::BF16, Path::Async, 64), (Half::F16, Path::Sync, 64), (Half::F16, Path::Tma, 128)];
        for (i, (act, path, tokens)) in kernels.into_iter().enumerate() {
            let c = Case { bias: true, ..Case::plain(act, tokens + 3, 130, 264) };
            let y = check(rt, &c, &split(path, tokens, c.k, 2));
            if first.len() == i {
                first.push(y);
            } else {
                assert!(y == first[i], "{path:?}: {schedule} gives other bits");
            }
        }
    });
}

#[test]
fn ldmatrix_is_free_of_bank_conflicts() {
    for (path, tokens) in [(Path::Async, 128), (Path::Async, 64), (Path::Sync, 128), (Path::Sync, 64)] {
        let c = Case::plain(Half::F16, 100, 130, 136);
        let counted = support::gpu::bank_conflicts(|rt| drop(check(rt, &c, &unsplit(path, tokens, c.k))));
        let Some((phases, conflicts)) = counted else { return };
        assert!(phases > 0, "{path:?} reads fragments by ldmatrix");
        assert_eq!(conflicts, 0, "{path:?}: of {phases} phases");
    }
}

/// The mistakes of `cuda/host/planted_gemm.cu`: in every schedule the checker names the one that is there.
#[test]
fn planted_mistakes_are_caught() {
    let c = Case::plain(Half::F16, 133, 130, 640);
    let operands = Operands::new(&c);
    for (kernel, path, tokens, says) in [
        ("planted_gemm_early_read", Path::Async, 64, "while a copy to it is in flight"),
        ("planted_gemm_no_barrier", Path::Async, 64, "nobody wrote"),
        ("planted_gemm_early_release", Path::Tma, 128, ""),
    ] {
        support::gpu::for_schedules(|rt, schedule| {
            let plan = unsplit(path, tokens, c.k);
            let device = Device::new(rt, &c, &operands);
            let launched = gemm::gemm_by(&*device.rt, Lane::Compute, &device.args, &plan, kernel);
            let failed = launched.and_then(|()| rt.synchronize_all()).expect_err(kernel).to_string();
            assert!(failed.contains(kernel) && failed.contains(says), "{kernel}, {schedule}: {failed}");
            assert!(
                ["in flight", "race", "nobody wrote"].iter().any(|w| failed.contains(w)),
                "{kernel}, {schedule}: {failed}"
            );
        });
    }
}

fn device(sm: u32, multiprocessors: u32) -> DeviceInfo {
    DeviceInfo {
        name: "a device".into(),
        sm,
        multiprocessors,
        memory_total: 1 << 34,
        shared_per_block: 99 << 10,
        driver: 0,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn plans_cover_k_fit_their_scratch_and_see_only_the_bucket(
        m in 1usize..5000, n in 1usize..40000, k8 in 1usize..4000, sms in 1u32..200, tma: bool,
    ) {
        let (k, info) = (k8 * 8, device(90, sms));
        let path = if tma { Path::Tma } else { Path::Async };
        let plan = gemm::plan(&info, path, m, n, k);
        prop_assert!(plan.k_per_split.is_multiple_of(path.depth()));
        prop_assert_eq!(k.div_ceil(plan.k_per_split), plan.splits);
        let tiles = n.div_ceil(128) * m.div_ceil(plan.tokens);
        if plan.splits > 1 {
            prop_assert!(COUNTER_BYTES + tiles * plan.splits * 128 * plan.tokens * 4 <= gemm::scratch_bytes(&info));
            prop_assert!(tiles * 4 <= COUNTER_BYTES);
        }
        prop_assert!(gemm::bucket(m) >= m && gemm::bucket(gemm::bucket(m)) == gemm::bucket(m));
        prop_assert_eq!(plan, gemm::plan(&info, path, gemm::bucket(m), n, k));
    }
}

#[test]
fn plans_fill_a_device_with_few_tiles() {
    let h200 = device(90, 132);
    // 8 tiles of 4096 rows in K: 132 multiprocessors would mostly idle.
    let few = gemm::plan(&h200, Path::Tma, 128, 1024, 4096);
    assert!(few.splits >= 4 && few.tokens == 128, "{few:?}");
    // Enough tiles: no partial sums, the tile with the most products for its bytes.
    let many = gemm::plan(&h200, Path::Tma, 2048, 14336 * 2, 4096);
    assert!(many.splits == 1 && many.tokens == 256, "{many:?}");
}
