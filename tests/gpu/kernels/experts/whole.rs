//! A whole feed-forward, launch after launch without a look from the host, against `src/reference/experts.rs`.

use super::*;
use crate::support::gpu::{self, Rng};
use tandem::device::kernels::product::{Epilogue, Matrix, gate_up_row};
use tandem::device::{Buffer, DeviceInfo};
use tandem::model::RouterWeights;
use tandem::reference;
use tandem::tensor::Half;

const E: usize = 10;
const USED: usize = 3;
const D: usize = 136;
const I: usize = 48;

/// gate, up `[I][D]` and down `[D][I]` of an expert, as 16-bit floats, and their values.
struct Expert {
    bits: [Vec<u16>; 3],
    values: [Vec<f64>; 3],
}

impl Expert {
    fn new(rng: &mut Rng, act: Half) -> Expert {
        let mut matrix = |k: usize| -> Vec<u16> {
            normals(rng, D * I).iter().map(|&w| encode(act, 1.5 * w / (k as f32).sqrt())).collect()
        };
        let bits = [matrix(D), matrix(D), matrix(I)];
        let values = bits.each_ref().map(|m| m.iter().map(|&w| decode(act, w)).collect());
        Expert { bits, values }
    }

    /// Gate and up as the device has them.
    fn gate_up(&self) -> Vec<u16> {
        let row = |r: usize| {
            let (is_up, i) = gate_up_row(r);
            self.bits[usize::from(is_up)][i * D..][..D].to_vec()
        };
        (0..2 * I).flat_map(row).collect()
    }

    /// down·(silu(gate·x) ∘ up·x), and the sum of the magnitudes that it is made of.
    fn of(&self, x: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let [gate, up, down] = &self.values;
        let dot = |w: &[f64]| w.iter().zip(x).map(|(w, x)| w * x).sum::<f64>();
        let act = |i: usize| {
            let (gate, up) = (dot(&gate[i * D..][..D]), dot(&up[i * D..][..D]));
            gate / (1.0 + (-gate).exp()) * up
        };
        let act: Vec<f64> = (0..I).map(act).collect();
        let row = |r: usize, f: fn(f64) -> f64| {
            down[r * I..][..I].iter().zip(&act).map(|(w, a)| f(w * a)).sum::<f64>()
        };
        ((0..D).map(|r| row(r, |v| v)).collect(), (0..D).map(|r| row(r, f64::abs)).collect())
    }
}

/// One layer of experts on a device; those of odd number are elsewhere if `half`.
struct Layer {
    act: Half,
    router: Vec<f32>,
    gate_w: Vec<f32>,
    experts: Vec<Expert>,
    of: RouterWeights,
    half: bool,
}

impl Layer {
    fn is_here(&self, e: usize) -> bool {
        !self.half || e.is_multiple_of(2)
    }

    /// delta of these rows, and the chosen experts.
    fn run(&self, rt: &Arc<dyn Runtime>, x: &[u16], shared: &[f32]) -> (Vec<f32>, Vec<u32>) {
        let (rt_, act, rows) = (&**rt, self.act, x.len() / D);
        let places = rows * USED;
        let bytes = |len: usize| Buffer::new(rt, len).expect("memory");
        let here: Vec<usize> = (0..E).filter(|&e| self.is_here(e)).collect();
        let slots: Vec<u32> =
            (0..E).map(|e| here.iter().position(|&h| h == e).map_or(NONE, |s| s as u32)).collect();
        let gate_up: Vec<u16> = here.iter().flat_map(|&e| self.experts[e].gate_up()).collect();
        let down: Vec<u16> = here.iter().flat_map(|&e| self.experts[e].bits[2].clone()).collect();
        let (up_w, down_w) = (upload(rt, &gate_up), upload(rt, &down));
        let of = |w: &Buffer, n, k| ExpertMatrices {
            ptr: w.ptr(),
            bias: DevPtr::NULL,
            stride: n * k * 2,
            matrix: Matrix::Dense { n, k },
        };
        let (up_w, down_w, slots) = (of(&up_w, 2 * I, D), of(&down_w, D, I), upload(rt, &slots));
        let tokens = tokens_of(rows, USED, E);

        let (router, gate_w, x) = (upload(rt, &self.router), upload(rt, &self.gate_w), upload(rt, x));
        let (logits, gate) = (bytes(rows * E * 4), bytes(rows * 4));
        let args = RouteArgs {
            router: router.ptr(),
            gate_w: gate_w.ptr(),
            act,
            x: x.ptr(),
            ldx: D,
            logits: logits.ptr(),
            gate: gate.ptr(),
            bias: DevPtr::NULL,
            rows,
            experts: E,
            d: D,
        };
        route_logits(rt_, LANE, &args).unwrap();
        let (ids, weights) = (Output::new(rt, places * 4), bytes(places * 4));
        let (experts, used, of) = (E, USED, self.of);
        let args = ChooseArgs {
            logits: logits.ptr(),
            ids: ids.ptr(),
            weights: weights.ptr(),
            rows,
            experts,
            used,
            of,
        };
        choose(rt_, LANE, &args).unwrap();
        let (place_of, rows_of) = (bytes(places * 4), bytes(places * 4));
        let groups = bytes(group_capacity(places, E, tokens) * GROUP_BYTES);
        let args = SortArgs {
            ids: ids.ptr(),
            slots: slots.ptr(),
            places: place_of.ptr(),
            rows_of: rows_of.ptr(),
            groups: groups.ptr(),
            rows,
            used,
            experts,
            tokens,
        };
        super::sort(rt_, LANE, &args).unwrap();
        let (xs, acts, out) = (bytes(places * D * 2), bytes(places * I * 2), bytes(places * D * 4));
        let args = GatherArgs { rows_of: rows_of.ptr(), x: x.ptr(), ldx: D, xs: xs.ptr(), places, d: D };
        gather(rt_, LANE, &args).unwrap();
        let up = ExpertProductArgs {
            w: up_w,
            act,
            x: xs.ptr(),
            ldx: D,
            y: acts.ptr(),
            ldy: I,
            groups: groups.ptr(),
            rows,
            used,
            experts,
            tokens,
            epilogue: Epilogue::SwiGlu,
        };
        experts_product(rt_, LANE, &up).unwrap();
        let (x, y) = (acts.ptr(), out.ptr());
        let down = ExpertProductArgs { w: down_w, x, ldx: I, y, ldy: D, epilogue: Epilogue::F32, ..up };
        experts_product(rt_, LANE, &down).unwrap();
        let delta = Output::of(rt, shared);
        let args = CombineArgs {
            out: out.ptr(),
            places: place_of.ptr(),
            weights: weights.ptr(),
            shared: delta.ptr(),
            gate: gate.ptr(),
            delta: delta.ptr(),
            rows,
            used,
            d: D,
        };
        combine(rt_, LANE, &args).unwrap();
        (delta.f32(), ids.u32())
    }

    /// What it should be, row by row.
    fn check(&self, rt: &Arc<dyn Runtime>, rows: usize) {
        let mut rng = Rng::new(rows as u64);
        let x: Vec<u16> = normals(&mut rng, rows * D).iter().map(|&x| encode(self.act, x)).collect();
        let shared = normals(&mut rng, rows * D);
        let (got, ids) = self.run(rt, &x, &shared);
        for r in 0..rows {
            let x: Vec<f64> = x[r * D..][..D].iter().map(|&x| decode(self.act, x)).collect();
            let dot = |w: &[f32]| w.iter().zip(&x).map(|(&w, x)| f64::from(w) * x).sum::<f64>();
            let logits: Vec<f32> = self.router.chunks_exact(D).map(|w| dot(w) as f32).collect();
            let chosen = reference::route(&logits, USED, self.of == RouterWeights::OfChosen);
            let experts: Vec<u32> = chosen.iter().map(|c| c.0 as u32).collect();
            assert_eq!(ids[r * USED..][..USED], experts, "row {r} of {rows}");
            let here = |e: usize| self.is_here(e);
            let give = |e: usize| if here(e) { self.experts[e].of(&x) } else { (vec![0.0; D], vec![0.0; D]) };
            let want = reference::mix(&chosen, |e| give(e).0);
            let size = reference::mix(&chosen, |e| give(e).1);
            let gate = 1.0 / (1.0 + (-dot(&self.gate_w)).exp());
            for i in 0..D {
                let of_shared = gate * f64::from(shared[r * D + i]);
                // Activations are rounded to 16 bits. Beside that their sums, and the logits, are right within 2^-14:
                // 136 + 64 roundings of 2^-23 at most, of magnitudes some ten times the sum.
                let tolerance = (epsilon(self.act) + 2f64.powi(-11)) * (size[i] + of_shared.abs()) + 1e-6;
                let (got, want) = (f64::from(got[r * D + i]), want[i] + of_shared);
                assert!(
                    (got - want).abs() <= tolerance,
                    "{rows} rows: {r}, {i} is {got}, wanted {want} within {tolerance:e}"
                );
            }
        }
    }
}

#[test]
fn a_whole_feed_forward() {
    for rt in gpu::runtimes() {
        for act in halves(&rt, |t| format!("experts_gemv_{t}_m4")) {
            for (of, half) in [(RouterWeights::OfChosen, false), (RouterWeights::OfAll, true)] {
                let mut rng = Rng::new(77);
                let router = normals(&mut rng, E * D);
                let gate_w: Vec<f32> = normals(&mut rng, D).iter().map(|w| w / 12.0).collect();
                let experts = (0..E).map(|_| Expert::new(&mut rng, act)).collect();
                let layer = Layer { act, router, gate_w, experts, of, half };
                for rows in [1, 4, 6, 40] {
                    layer.check(&rt, rows);
                }
            }
        }
    }
}

/// What the host refuses before anything is launched.
#[test]
fn wrong_shapes_are_refused_by_name() {
    fn message(call: impl FnOnce() -> tandem::Result<()>) -> String {
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).expect_err("refused");
        panic.downcast_ref::<String>().expect("a formatted message").clone()
    }
    for rt in gpu::runtimes() {
        let (at, rt) = (DevPtr(256), &*rt);
        let chosen = |experts, used| {
            let (logits, ids, weights, of) = (at, at, at, RouterWeights::OfAll);
            message(|| choose(rt, LANE, &ChooseArgs { logits, ids, weights, rows: 1, experts, used, of }))
        };
        assert!(chosen(1025, 8).contains("8 of 1025 experts"));
        assert!(chosen(4, 5).contains("5 of 4 experts"));
        let sort = |rows| {
            let args = SortArgs {
                ids: at,
                slots: at,
                places: at,
                rows_of: at,
                groups: at,
                rows,
                used: 8,
                experts: 8,
                tokens: 8,
            };
            message(|| super::sort(rt, LANE, &args))
        };
        assert!(sort(9000).contains("9000 rows' 8 choices"));
        let product = |stride, tokens| {
            let w = ExpertMatrices {
                ptr: at,
                bias: DevPtr::NULL,
                stride,
                matrix: Matrix::Dense { n: 16, k: 16 },
            };
            let (act, x, y, groups, epilogue) = (Half::F16, at, at, at, Epilogue::F32);
            let args = ExpertProductArgs {
                w,
                act,
                x,
                ldx: 16,
                y,
                ldy: 16,
                groups,
                rows: 5,
                used: 1,
                experts: 3,
                tokens,
                epilogue,
            };
            message(|| experts_product(rt, LANE, &args))
        };
        assert!(product(520, 8).contains("520 bytes apart"));
        assert!(product(512, 128).contains("no kernel for groups of 128 rows"));
    }
}

/// M and what it depends on, on a device of every kind.
#[test]
fn most_tokens_of_devices() {
    let device = |sm, kib: u32| DeviceInfo {
        name: "test".into(),
        sm,
        multiprocessors: 40,
        memory_total: 1 << 30,
        shared_per_block: kib << 10,
        l2_bytes: 0,
        memory_bw: 0,
        clock_khz: 0,
        driver: 0,
    };
    for dtype in [tandem::tensor::DType::Q4_K, tandem::tensor::DType::F16, tandem::tensor::DType::Q8_0] {
        let matrix = Matrix::of(dtype, 1536, 2048);
        assert_eq!(most_tokens(&device(90, 227), &matrix), 64);
        assert_eq!(most_tokens(&device(86, 99), &matrix), 64);
        assert!(most_tokens(&device(75, 64), &matrix) >= 32);
    }
}
