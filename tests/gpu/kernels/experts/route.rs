//! Logits of a router, and the choice among them.

use super::*;
use crate::support::gpu::{self, Rng};
use proptest::prelude::*;
use tandem::model::RouterWeights;
use tandem::reference;
use tandem::tensor::Half;

#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub act: Half,
    pub rows: usize,
    pub experts: usize,
    pub d: usize,
    pub pad: usize,
    pub shared: bool,
    pub bias: bool,
    pub seed: u64,
}

/// Compares every logit with its sum in f64. A sum has at most d/32 + 14 roundings (experts_route.cu).
pub fn check(rt: &Arc<dyn Runtime>, c: &Case) -> Vec<f32> {
    let Case { act, rows, experts, d, .. } = *c;
    let ldx = d + c.pad;
    let mut rng = Rng::new(c.seed);
    let (weights, bias) = (normals(&mut rng, (experts + 1) * d), normals(&mut rng, experts));
    let mut x: Vec<u16> = normals(&mut rng, rows * ldx).iter().map(|&x| encode(act, x)).collect();
    // Between rows: NaN, which a sum that takes some in shows.
    x.chunks_exact_mut(ldx).for_each(|row| row[d..].fill(0x7fff));
    let (router, gate_w) = (upload(rt, &weights[..experts * d]), upload(rt, &weights[experts * d..]));
    let (x_dev, bias_dev) = (upload(rt, &x), upload(rt, &bias));
    let (logits, gate) = (Output::new(rt, rows * experts * 4), Output::new(rt, rows * 4));
    let args = RouteArgs {
        router: router.ptr(),
        gate_w: if c.shared { gate_w.ptr() } else { DevPtr::NULL },
        act,
        x: x_dev.ptr(),
        ldx,
        logits: logits.ptr(),
        gate: gate.ptr(),
        bias: if c.bias { bias_dev.ptr() } else { DevPtr::NULL },
        rows,
        experts,
        d,
    };
    route_logits(&**rt, LANE, &args).unwrap_or_else(|e| panic!("{c:?}: {e}"));
    let (got, got_gate) = (logits.f32(), gate.f32());
    for r in 0..rows {
        for e in 0..experts + usize::from(c.shared) {
            let mut sum = bias.get(e).filter(|_| c.bias).map_or(0.0, |&b| f64::from(b));
            let mut size = sum.abs();
            for (&w, &x) in weights[e * d..][..d].iter().zip(&x[r * ldx..]) {
                let product = f64::from(w) * decode(act, x);
                sum += product;
                size += product.abs();
            }
            let got = if e < experts { got[r * experts + e] } else { got_gate[r] };
            let tolerance = (d as f64 / 32.0 + 14.0) * U * size;
            assert!(
                (f64::from(got) - sum).abs() <= tolerance,
                "{c:?}: row {r}, expert {e} is {got}, wanted {sum} within {tolerance:e}"
            );
        }
    }
    assert!(
        c.shared || got_gate.iter().all(|g| g.to_bits() == u32::MAX),
        "{c:?}: no gate, but logits of one"
    );
    got
}

fn acts(rt: &Arc<dyn Runtime>) -> Vec<Half> {
    halves(rt, |t| format!("experts_logits_{t}_few"))
}

#[test]
fn logits_of_few_and_many_rows() {
    for rt in gpu::runtimes() {
        for act in acts(&rt) {
            for (rows, experts, d) in [
                (1, 3, 8),
                (1, 128, 264),
                (4, 60, 72),
                (5, 7, 2056),
                (16, 8, 128),
                (17, 9, 136),
                (33, 60, 260),
                (70, 3, 516),
            ] {
                for shared in [false, true] {
                    check(&rt, &Case { act, rows, experts, d, pad: 4, shared, bias: rows % 2 == 1, seed: 1 });
                }
            }
        }
    }
}

#[test]
fn a_rows_logits_do_not_depend_on_the_other_rows() {
    for rt in gpu::runtimes() {
        // Logits of row 0 by the kernel for few rows, and by that for many; the seed makes weights and row 0 the same.
        for kernel in [[1, 3, 16], [17, 32, 45]] {
            let of = |rows| {
                check(
                    &rt,
                    &Case {
                        act: Half::F16,
                        rows,
                        experts: 12,
                        d: 296,
                        pad: 0,
                        shared: true,
                        bias: true,
                        seed: 3,
                    },
                )
            };
            let first = of(kernel[0])[..12].to_vec();
            for rows in kernel {
                assert_eq!(of(rows)[..12], first, "{rows} rows");
            }
        }
    }
}

/// Chooses, and compares with the reference: ids exactly. A weight e^(l - m) / s is off by the rounding of l - m, which
/// weighs |l - m|, two ulp of each exponential, the sum's roundings and the quotient's.
pub fn check_choice(rt: &Arc<dyn Runtime>, logits: &[f32], experts: usize, used: usize, of: RouterWeights) {
    let rows = logits.len() / experts;
    let (ids, weights) = run(rt, logits, experts, used, of);
    for r in 0..rows {
        let row = &logits[r * experts..][..experts];
        let want = reference::route(row, used, of == RouterWeights::OfChosen);
        for (j, &(e, w)) in want.iter().enumerate() {
            let (id, weight) = (ids[r * used + j] as usize, f64::from(weights[r * used + j]));
            assert_eq!(id, e, "row {r}, choice {j} of {used} of {experts}: {row:?}");
            let apart = f64::from(row[want[0].0] - row[e]).abs();
            let tolerance =
                (2.0 * apart + experts as f64 / 16.0 + used as f64 + 24.0) * U * w + 2f64.powi(-126);
            assert!((weight - w).abs() <= tolerance, "row {r}, choice {j}: weight {weight}, wanted {w}");
        }
    }
}

fn run(
    rt: &Arc<dyn Runtime>,
    logits: &[f32],
    experts: usize,
    used: usize,
    of: RouterWeights,
) -> (Vec<u32>, Vec<f32>) {
    let rows = logits.len() / experts;
    let logits = upload(rt, logits);
    let (ids, weights) = (Output::new(rt, rows * used * 4), Output::new(rt, rows * used * 4));
    let (ids_at, weights_at) = (ids.ptr(), weights.ptr());
    let args = ChooseArgs { logits: logits.ptr(), ids: ids_at, weights: weights_at, rows, experts, used, of };
    choose(&**rt, LANE, &args).expect("launch");
    (ids.u32(), weights.f32())
}

const BOTH: [RouterWeights; 2] = [RouterWeights::OfChosen, RouterWeights::OfAll];

#[test]
fn the_largest_are_chosen_and_weighed() {
    for rt in gpu::runtimes() {
        for experts in [1, 3, 60, 128, 129, 256, 257, 1024] {
            for used in [1, 2, 4, 8, 32, 40] {
                let (used, mut rng) = (used.min(experts), Rng::new(experts as u64));
                let rows = if experts > 256 { 3 } else { 6 };
                let logits: Vec<f32> = normals(&mut rng, rows * experts).iter().map(|x| 3.0 * x).collect();
                for of in BOTH {
                    check_choice(&rt, &logits, experts, used, of);
                }
            }
        }
    }
}

/// Any distinct experts that exist; what has no NaN beside it in the sum is right.
#[test]
fn what_is_no_number_chooses_experts_that_exist() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    for rt in gpu::runtimes() {
        for logits in [[nan; 5], [nan, 1.0, inf, -inf, 2.0], [-inf; 5], [nan, -inf, nan, -inf, 0.0]] {
            for (used, of) in [(3, BOTH[0]), (3, BOTH[1]), (5, BOTH[0]), (1, BOTH[1])] {
                let (ids, weights) = run(&rt, &logits, 5, used, of);
                let mut distinct = ids.clone();
                distinct.sort_unstable();
                distinct.dedup();
                assert!(distinct.len() == used && distinct[used - 1] < 5, "{logits:?}: {ids:?}");
                if of == RouterWeights::OfAll && logits.iter().any(|l| l.is_nan()) {
                    assert!(weights.iter().all(|w| w.is_nan()), "{logits:?}: {weights:?}");
                }
            }
        }
        let (ids, _) = run(&rt, &[nan, 1.0, -inf, nan, 2.0], 5, 5, BOTH[0]);
        assert_eq!(ids, [4, 1, 0, 2, 3], "NaN counts as -inf");
        let (ids, _) = run(&rt, &[-0.0, 0.0, -0.0, -1.0, 0.0], 5, 4, BOTH[0]);
        assert_eq!(ids, [0, 1, 2, 4], "zeros are equal");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    /// Few values, so that many are equal.
    #[test]
    fn the_choice_is_the_references(
        values in prop::collection::vec((-8i8..8).prop_map(|x| f32::from(x) / 3.0), 300),
        experts in 1usize..150,
        used in 1usize..12,
        of in prop::sample::select(BOTH.to_vec()),
    ) {
        for rt in gpu::runtimes() {
            let logits = &values[..values.len() / experts * experts];
            check_choice(&rt, logits, experts, used.min(experts), of);
        }
    }

    #[test]
    fn any_router(
        rows in 1usize..40,
        experts in 1usize..20,
        d in 1usize..70,
        pad in 0usize..3,
        shared: bool,
        act in 0usize..2,
        seed: u64,
    ) {
        for rt in gpu::runtimes() {
            let acts = acts(&rt);
            let act = acts[act % acts.len()];
            check(&rt, &Case { act, rows, experts, d: 4 * d, pad: 4 * pad, shared, bias: seed % 2 == 0, seed });
        }
    }
}
