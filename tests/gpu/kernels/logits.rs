//! Reduction of logits on accelerators: greedy, top-k, log Σ e^x, soft-cap.

use std::sync::Arc;

use crate::support::gpu::memory::*;
use crate::support::gpu::{self, Rng};
use proptest::prelude::*;
use tandem::device::kernels::elementwise::*;
use tandem::device::{Buffer, Runtime, TOP_BYTES, TOP_K, top_error, top_of};
use tandem::reference::reduce::argmax;
use tandem::reference::softmax::max_and_logsumexp;

const U: f64 = 1.0 / (1u64 << 24) as f64;

/// Indices, values and log Σ e^x of each row.
struct Reduced {
    indices: Vec<u32>,
    values: Vec<f32>,
    logsumexp: Vec<f32>,
}

fn reduce(rt: &Arc<dyn Runtime>, logits: &[f32], rows: usize, vocab: usize, ld: usize, k: usize) -> Reduced {
    let logits = upload(rt, logits);
    // Never written before: whoever reads what no warp wrote is caught.
    let workspace = Buffer::new(rt, logits_workspace_bytes(rows, vocab, k)).expect("memory");
    let (indices, values) = (Output::new(rt, rows * k * 4), Output::new(rt, rows * k * 4));
    let logsumexp = Output::new(rt, rows * 4);
    let args = LogitsReduce {
        logits: logits.ptr(),
        workspace: workspace.ptr(),
        indices: indices.ptr(),
        values: values.ptr(),
        logsumexp: logsumexp.ptr(),
        rows,
        vocab,
        ld,
        k,
    };
    logits_reduce(&**rt, LANE, &args).expect("launch");
    Reduced { indices: indices.u32(), values: values.f32(), logsumexp: logsumexp.f32() }
}

/// The order that the kernel promises, by sorting.
fn top(row: &[f32], k: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..row.len() as u32).collect();
    order.sort_by(|&a, &b| {
        let (x, y) = (row[a as usize], row[b as usize]);
        let nan_last = x.is_nan().cmp(&y.is_nan());
        nan_last.then(y.partial_cmp(&x).unwrap_or(std::cmp::Ordering::Equal)).then(a.cmp(&b))
    });
    order.truncate(k);
    order
}

/// Runs and checks.
///
/// log Σ e^x: a term e^(x - m) is off by 2|x - m|u (difference and product) where it weighs e^-|x - m| (<= 0.74u), and
/// by 2 ulp (4u) of exp2; it passes at most 32 + 5 additions in its span, is rescaled (as a term again) and passes
/// spans/32 + 6 more. The logarithm has these as absolute error, its own 1 ulp of log(vocab) <= 13 and the last sum's.
fn check(rt: &Arc<dyn Runtime>, logits: &[f32], rows: usize, vocab: usize, ld: usize, k: usize) {
    let got = reduce(rt, logits, rows, vocab, ld, k);
    let spans = vocab.div_ceil(1024) as f64;
    for row in 0..rows {
        let x = &logits[row * ld..row * ld + vocab];
        let indices = &got.indices[row * k..][..k];
        assert_eq!(indices, top(x, k), "row {row} of {rows}, vocab {vocab}, k {k}");
        assert_eq!(indices[0] as usize, argmax(x), "row {row}: the reference's choice");
        for (v, &i) in got.values[row * k..][..k].iter().zip(indices) {
            assert_eq!(v.to_bits(), x[i as usize].to_bits(), "row {row}, index {i}");
        }
        let (_, want) = max_and_logsumexp(x);
        let lse = f64::from(got.logsumexp[row]);
        if want.is_nan() || want.is_infinite() {
            assert!(lse == want || want.is_nan() && lse.is_nan(), "row {row}: {lse} instead of {want}");
            continue;
        }
        let terms = 2.0 * 5.0 * U + (32.0 + 5.0 + spans / 32.0 + 6.0) * U;
        let error = terms + 2.0 * 13.0 * U + want.abs() * U;
        assert!(
            (lse - want).abs() <= error,
            "row {row}, vocab {vocab}: {lse} instead of {want}, within {error:e}"
        );
    }
}

fn random(rows: usize, ld: usize, seed: u64) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    (0..rows * ld).map(|_| rng.normal() * 5.0).collect()
}

#[test]
fn all_vocabularies() {
    for rt in gpu::runtimes() {
        for (vocab, ld) in
            [(1, 1), (5, 8), (1023, 1023), (1024, 1024), (1025, 1028), (4099, 4100), (9000, 9001)]
        {
            for k in [1, 2, 40, 64].into_iter().filter(|k| *k <= vocab) {
                check(&rt, &random(2, ld, vocab as u64), 2, vocab, ld, k);
            }
        }
    }
}

/// More candidates than the second stage takes at once: 262208 words are 257 spans, 64 each.
#[test]
fn the_largest_vocabulary() {
    for rt in gpu::runtimes() {
        let vocab = 262_208;
        let mut logits = random(1, vocab, 1);
        check(&rt, &logits, 1, vocab, vocab, 64);
        // All of the best in the last span.
        for (i, x) in logits[vocab - 64..].iter_mut().enumerate() {
            *x = 100.0 + (i * 37 % 64) as f32;
        }
        check(&rt, &logits, 1, vocab, vocab, 64);
        check(&rt, &logits, 1, vocab, vocab, 1);
    }
}

#[test]
fn ties_go_to_the_lowest_index_and_nan_loses() {
    for rt in gpu::runtimes() {
        let (vocab, k) = (3000, 8);
        let special = |f: &dyn Fn(usize) -> f32| (0..vocab).map(f).collect::<Vec<f32>>();
        let rows = [
            special(&|_| 1.5),
            special(&|i| if i % 2 == 0 { 0.0 } else { -0.0 }),
            special(&|i| if i % 500 == 499 { 7.0 } else { -(i as f32) }),
            special(&|i| if i % 3 == 0 { f32::NAN } else { i as f32 }),
            special(&|i| if i < 2996 { f32::NAN } else { -1.0 }),
            special(&|_| f32::NAN),
            special(&|_| f32::NEG_INFINITY),
            special(&|i| if i == 2222 { f32::INFINITY } else { i as f32 }),
            special(&|i| if i > 1500 { f32::NEG_INFINITY } else { -(i as f32) }),
            special(&|i| if i == 77 { f32::MIN_POSITIVE / 2.0 } else { -1e30 }),
        ];
        check(&rt, &rows.concat(), rows.len(), vocab, vocab, k);
        check(&rt, &rows.concat(), rows.len(), vocab, vocab, 1);
    }
}

#[test]
fn every_order_of_threads_gives_the_same() {
    // 1280 candidates: two warps of the second stage.
    gpu::for_schedules(|rt, _| check(rt, &random(1, 20_003, 3), 1, 20_003, 20_003, 64));
}

/// cap·tanh(x / cap): three roundings and tanh's 2 ulp (4u), all relative since z·tanh'(z) <= tanh(z).
#[test]
fn soft_cap() {
    for rt in gpu::runtimes() {
        for (vocab, ld) in [(7, 7), (1000, 1004), (2053, 2053)] {
            let cap = 30.0f32;
            let rows = 3;
            let mut x: Vec<f32> = random(rows, ld, 5).iter().map(|v| v * 10.0).collect();
            x[1] = f32::INFINITY;
            x[2] = f32::NAN;
            let inout = Output::of(&rt, &x);
            softcap(&*rt, LANE, inout.ptr(), cap, rows, vocab, ld).expect("launch");
            for (i, got) in inout.f32().into_iter().enumerate() {
                if i % ld >= vocab || x[i].is_nan() {
                    assert!(got.to_bits() == x[i].to_bits() || i % ld < vocab && got.is_nan(), "element {i}");
                    continue;
                }
                let want = f64::from(cap) * (f64::from(x[i]) / f64::from(cap)).tanh();
                let error = want.abs() * 7.0 * U;
                assert!((f64::from(got) - want).abs() <= error, "element {i}: {got} instead of {want}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Few different values: ties everywhere.
    #[test]
    fn any_row(
        vocab in 1..5000usize,
        pad in 0..5usize,
        rows in 0..3usize,
        k in 1..=64usize,
        values in 2..40u64,
        seed in any::<u64>(),
    ) {
        let ld = vocab + pad;
        let mut rng = Rng::new(seed);
        let logits: Vec<f32> = (0..rows * ld)
            .map(|_| match rng.next_u64() % values {
                0 if values % 3 == 0 => f32::NAN,
                1 if values % 4 == 0 => f32::NEG_INFINITY,
                v => v as f32 - 10.0,
            })
            .collect();
        for rt in gpu::runtimes() {
            check(&rt, &logits, rows, vocab, ld, k.min(vocab));
        }
    }
}

/// Checks `logits_top_k` on rows: values and tokens are exact, the sum is within half of what the contract allows.
fn check_top_k(rt: &Arc<dyn Runtime>, logits: &[f32], factors: &[f32], vocab: usize, ld: usize) {
    let on_device = upload(rt, logits);
    let out = Output::new(rt, factors.len() * TOP_BYTES);
    let args = TopK { logits: on_device.ptr(), out: out.ptr(), factors, vocab, ld };
    logits_top_k(&**rt, LANE, &args).expect("launch");
    for (row, (bytes, &factor)) in out.bytes().chunks_exact(TOP_BYTES).zip(factors).enumerate() {
        let x = &logits[row * ld..row * ld + vocab];
        let (likeliest, sum) = top_of(bytes, vocab);
        let mut want: Vec<(f32, u32)> = x.iter().copied().zip(0..).collect();
        // NaN last, whatever its sign.
        let key = |x: f32| if x.is_nan() { f32::from_bits(u32::MAX) } else { x };
        want.sort_by(|a, b| key(b.0).total_cmp(&key(a.0)).then(a.1.cmp(&b.1)));
        want.truncate(TOP_K);
        assert_eq!(likeliest.len(), want.len());
        for (i, (got, want)) in likeliest.iter().zip(&want).enumerate() {
            let same = got.0.to_bits() == want.0.to_bits() || got.0.is_nan() && want.0.is_nan();
            assert!(
                same && got.1 == want.1,
                "row {row}, vocab {vocab}, place {i}: {got:?} instead of {want:?}"
            );
        }
        let most = want[0].0;
        let exact: f64 = x.iter().map(|&x| (f64::from(x - most) * f64::from(factor)).exp()).sum();
        if exact.is_nan() || !most.is_finite() {
            assert!(
                sum.is_nan(),
                "row {row}, vocab {vocab}: {sum} of logits that are not all finite numbers"
            );
            continue;
        }
        let off = (f64::from(sum) / exact - 1.0).abs();
        let error = top_error(vocab) / 2.0;
        assert!(
            off <= error,
            "row {row}, vocab {vocab}, factor {factor}: {sum} is off by {off:e} of {error:e}"
        );
    }
}

#[test]
fn top_k_of_all_vocabularies() {
    for rt in gpu::runtimes() {
        for (vocab, ld) in
            [(1, 1), (5, 8), (255, 256), (256, 256), (257, 257), (1023, 1023), (4099, 4100), (20_000, 20_001)]
        {
            check_top_k(&rt, &random(3, ld, vocab as u64), &[1.0, 1.0 / 0.7, 0.3], vocab, ld);
        }
    }
}

/// The greatest lie where few threads look, so that the first bound leaves too many of the others: it is bisected.
#[test]
fn top_k_of_rows_whose_greatest_are_neighbours_or_equal() {
    for rt in gpu::runtimes() {
        let vocab = 50_000;
        let special = |f: &dyn Fn(usize) -> f32| (0..vocab).map(f).collect::<Vec<f32>>();
        let rows = [
            special(&|i| if i % 4096 < 4 { 50.0 + (i % 977) as f32 } else { (i % 31) as f32 }),
            special(&|_| 1.5),
            special(&|i| if i % 2 == 0 { 0.0 } else { -0.0 }),
            special(&|i| f32::from(i as u8 % 3)),
            special(&|i| if i > 200 { f32::NEG_INFINITY } else { -(i as f32) }),
            special(&|i| i as f32 * 1e-3),
            special(&|i| -(i as f32) * 1e-3),
        ];
        check_top_k(&rt, &rows.concat(), &vec![1.0; rows.len()], vocab, vocab);
    }
}

#[test]
fn top_k_of_logits_that_are_not_numbers() {
    for rt in gpu::runtimes() {
        let vocab = 3000;
        let special = |f: &dyn Fn(usize) -> f32| (0..vocab).map(f).collect::<Vec<f32>>();
        let rows = [
            special(&|i| if i % 3 == 0 { f32::NAN } else { i as f32 }),
            special(&|i| if i < 2996 { f32::NAN } else { -1.0 }),
            special(&|i| if i == 7 { -f32::NAN } else { i as f32 }),
            special(&|_| f32::NAN),
            special(&|_| f32::NEG_INFINITY),
            special(&|i| if i == 2222 { f32::INFINITY } else { i as f32 }),
        ];
        check_top_k(&rt, &rows.concat(), &vec![1.0; rows.len()], vocab, vocab);
        // A temperature so low that its inverse is infinite.
        check_top_k(&rt, &special(&|i| i as f32), &[f32::MAX], vocab, vocab);
    }
}

/// More rows than a launch takes.
#[test]
fn top_k_of_many_rows() {
    for rt in gpu::runtimes() {
        let factors: Vec<f32> = (0..130).map(|i| 0.5 + i as f32 / 64.0).collect();
        check_top_k(&rt, &random(130, 300, 4), &factors, 299, 300);
    }
}

#[test]
fn top_k_in_every_order_of_threads() {
    gpu::for_schedules(|rt, _| check_top_k(rt, &random(1, 5003, 3), &[1.0], 5003, 5003));
}
