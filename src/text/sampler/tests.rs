//! What is chosen, and that the likeliest tokens decide as whole rows do.

use super::*;
use proptest::prelude::*;

fn sampler(change: impl FnOnce(&mut SamplerParams)) -> Sampler {
    let mut params = SamplerParams::default();
    change(&mut params);
    Sampler::new(params).expect("valid parameters")
}

#[test]
fn greedy_takes_the_first_of_equals_and_never_nan() {
    let mut s = sampler(|_| ());
    assert_eq!(s.sample(&mut [0.0, 2.0, 2.0, f32::NAN], &[]), 1);
    assert_eq!(s.sample(&mut [f32::NAN, f32::NEG_INFINITY, -5.0], &[]), 2);
    assert_eq!(s.sample(&mut [f32::NAN, f32::INFINITY, 1.0], &[]), 1);
    assert_eq!(s.sample(&mut [f32::NAN; 40], &[]), 0);
    let mut long: Vec<f32> = (0..1000).map(|i| (i % 37) as f32).collect();
    long[777] = f32::NAN;
    assert_eq!(s.sample(&mut long, &[]), 36);
}

#[test]
fn each_bad_parameter_is_a_usage_error_that_names_it() {
    type Change = fn(&mut SamplerParams);
    let bad: [(&str, Change); 11] = [
        ("`presence_penalty`", |p| p.presence_penalty = 2.5),
        ("`frequency_penalty`", |p| p.frequency_penalty = f32::NAN),
        ("`temperature`", |p| p.temperature = -1.0),
        ("`temperature`", |p| p.temperature = f32::NAN),
        ("`temperature`", |p| p.temperature = f32::INFINITY),
        ("`top_p`", |p| p.top_p = 0.0),
        ("`top_p`", |p| p.top_p = 1.5),
        ("`top_p`", |p| p.top_p = f32::NAN),
        ("`min_p`", |p| p.min_p = -0.1),
        ("`repeat_penalty`", |p| p.repeat_penalty = 0.0),
        ("`repeat_penalty`", |p| p.repeat_penalty = f32::NAN),
    ];
    for (name, change) in bad {
        let mut params = SamplerParams::default();
        change(&mut params);
        match Sampler::new(params) {
            Err(Error::Usage(m)) => assert!(m.starts_with(name), "{m}"),
            other => panic!("{name}: {other:?}"),
        }
    }
}

#[test]
fn filters_bound_the_choice() {
    let logits: Vec<f32> = (0..200).map(|i| ((i * 7919) % 200) as f32 * 0.05).collect();
    let rank = |id: u32| (0..200).filter(|&j| logits[j] > logits[id as usize]).count();
    let draw = |s: &mut Sampler| s.sample(&mut logits.clone(), &[]);
    let mut k = sampler(|p| (p.temperature, p.top_k) = (5.0, 3));
    let mut p = sampler(|p| (p.temperature, p.top_p) = (5.0, 0.3));
    let mut m = sampler(|p| (p.temperature, p.min_p) = (5.0, 0.9));
    // Computed by hand: probabilities fall by e^-0.05 per rank; the top 8 are the first to reach 0.3.
    let weights: Vec<f64> = (0..200).map(|r| (-0.05 * r as f64).exp()).collect();
    let total: f64 = weights.iter().sum();
    let nucleus = 1 + (0..200).find(|&r| weights[..=r].iter().sum::<f64>() >= 0.3 * total).unwrap();
    let mut seen = [0usize; 3];
    for _ in 0..3000 {
        for (s, (max, bound)) in
            [&mut k, &mut p, &mut m].into_iter().zip(seen.iter_mut().zip([3, nucleus, 3]))
        {
            let r = rank(draw(s));
            assert!(r < bound, "rank {r} of {bound}");
            *max = (*max).max(r + 1);
        }
    }
    assert_eq!(seen, [3, nucleus, 3], "every allowed token turns up");
}

#[test]
fn draws_follow_the_tempered_distribution() {
    let logits = [1.0f32, 0.0, -1.0, 0.5];
    for temperature in [0.5f32, 1.0, 2.0] {
        let mut s = sampler(|p| (p.temperature, p.seed) = (temperature, 7));
        let mut counts = [0f64; 4];
        let n = 40_000;
        (0..n).for_each(|_| counts[s.sample(&mut logits.clone(), &[]) as usize] += 1.0);
        let weights = logits.map(|l| (l as f64 / temperature as f64).exp());
        let total: f64 = weights.iter().sum();
        // Chi-square with 3 degrees of freedom exceeds 16.3 once in a thousand seeds.
        let chi: f64 = (0..4)
            .map(|i| (counts[i] - n as f64 * weights[i] / total).powi(2) / (n as f64 * weights[i] / total))
            .sum();
        assert!(chi < 16.3, "temperature {temperature}: chi-square {chi}");
    }
}

#[test]
fn the_same_seed_draws_the_same_and_another_does_not() {
    let draw = |seed| {
        let mut s = sampler(|p| (p.temperature, p.seed, p.top_p) = (1.0, seed, 0.9));
        (0..50)
            .map(|i| s.sample(&mut (0..500).map(|j| ((i * j) % 17) as f32 * 0.3).collect::<Vec<_>>(), &[]))
            .collect::<Vec<_>>()
    };
    assert_eq!(draw(1), draw(1));
    assert_ne!(draw(1), draw(2));
}

#[test]
fn the_penalty_reaches_back_exactly_so_far_and_once() {
    let mut s = sampler(|p| (p.repeat_penalty, p.repeat_last_n) = (2.0, 3));
    let mut logits = [4.0, 3.0, -1.0, 1.5];
    assert_eq!(s.sample(&mut logits, &[1, 0, 0, 2]), 1, "1 is four back: not penalised");
    assert_eq!(logits, [2.0, 3.0, -2.0, 1.5]);
    s.sample(&mut logits, &[99]);
    assert_eq!(logits, [2.0, 3.0, -2.0, 1.5], "an id outside of the vocabulary is ignored");
}

/// `transformers` 5.24.0, `vllm/v1/worker/gpu/sample` formulas: tests/fixtures/make_penalties.py.
#[test]
fn penalties_are_those_of_transformers_and_vllm() {
    let fixture: serde_json::Value =
        serde_json::from_str(include_str!("../../../tests/fixtures/penalties.json")).unwrap();
    let cases = fixture["cases"].as_array().unwrap();
    assert!(cases.len() >= 8, "the fixture lost its cases");
    for case in cases {
        let real = |key: &str| case[key].as_f64().unwrap() as f32;
        let reals = |key: &str| -> Vec<f32> {
            case[key]
                .as_array()
                .unwrap()
                .iter()
                .map(|x| x.as_f64().map_or(f32::NEG_INFINITY, |x| x as f32))
                .collect()
        };
        let ids = |value: &serde_json::Value| -> Vec<u32> {
            value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
        };
        let bad = case["bad_words"].as_array().unwrap().iter().map(|w| (ids(w), f32::NEG_INFINITY));
        let params = SamplerParams {
            repeat_penalty: real("repetition_penalty"),
            repeat_last_n: usize::MAX,
            presence_penalty: real("presence_penalty"),
            frequency_penalty: real("frequency_penalty"),
            sequence_biases: bad.collect(),
            withheld: vec![(1, ids(&case["begin_suppress"]).into())],
            ..SamplerParams::default()
        };
        let (prompt, answer) = (ids(&case["prompt"]), ids(&case["answer"]));
        let mut s = Sampler::new(params).unwrap().after_prompt(prompt.len());
        let mut logits = reals("logits");
        s.sample(&mut logits, &[prompt, answer].concat());
        for (i, (got, want)) in logits.iter().zip(reals("want")).enumerate() {
            // One rounding for each of three operations.
            let near = (got - want).abs() <= 4.0 * f32::EPSILON * want.abs().max(1.0);
            assert!(near || *got == want, "token {i} of {case}: {got}");
        }
    }
}

#[test]
fn biases_exclude_allow_and_prefer() {
    let inf = f32::INFINITY;
    let mut s = sampler(|p| p.biases = [(1, -inf), (2, 1.5), (9, 1.0)].into());
    assert_eq!(s.sample(&mut [0.0, 5.0, 1.0], &[]), 2);
    let mut s = sampler(|p| p.allowed = Some([0, 3, 77].into()));
    assert_eq!(s.choose(&mut [0.0, 5.0, 1.0, 0.5], &[]), Some(3));
    // Two tokens of the answer, after which the third may come.
    let mut s = sampler(|p| p.withheld = vec![(2, [1].into())]).after_prompt(3);
    let mut after = |n: usize| s.sample(&mut [0.0, 5.0, 1.0], &vec![0; n]);
    assert_eq!((after(3), after(4), after(5)), (2, 2, 1));
    let mut none = sampler(|p| (p.temperature, p.allowed) = (1.0, Some([7].into())));
    assert_eq!((none.choose(&mut [0.0; 3], &[]), none.sample(&mut [0.0; 3], &[])), (None, 0));
    let mut sequence = sampler(|p| p.sequence_biases = [(vec![4, 5, 1], -inf)].into());
    let mut after = |history: &[u32]| sequence.sample(&mut [0.0, 5.0, 1.0], history);
    assert_eq!((after(&[9, 4, 5]), after(&[5]), after(&[4, 5, 5])), (2, 1, 1));
    // Whatever changes logits rules out taking the likeliest without them.
    type Change = fn(&mut SamplerParams);
    let changes: [Change; 7] = [
        |p| p.repeat_penalty = 1.1,
        |p| p.presence_penalty = 0.1,
        |p| p.frequency_penalty = -0.1,
        |p| p.biases = [(1, 1.0)].into(),
        |p| p.sequence_biases = [(vec![1], 1.0)].into(),
        |p| p.allowed = Some([1].into()),
        |p| p.withheld = vec![(1, [1].into())],
    ];
    assert!(SamplerParams::default().is_greedy());
    for change in changes {
        assert!(!sampler(change).params().is_greedy());
    }
}

proptest! {
    #[test]
    fn logprobs_equal_the_f64_formula(logits in prop::collection::vec(-60f32..60.0, 1..300), k in 0usize..12) {
        let max = logits.iter().copied().fold(f32::MIN, f32::max) as f64;
        let lse = max + logits.iter().map(|&l| (l as f64 - max).exp()).sum::<f64>().ln();
        let (got, top) = logprobs(&logits, k);
        // A relative error e of the sum is an absolute error e of its logarithm.
        prop_assert!((got - lse).abs() < 3e-7, "{got} {lse}");
        let mut sorted: Vec<(u32, f32)> = (0u32..).zip(logits.iter().copied()).collect();
        sorted.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        prop_assert_eq!(top.len(), k.min(logits.len()));
        for (&(id, lp), &(want, l)) in top.iter().zip(&sorted) {
            prop_assert_eq!(id, want);
            prop_assert_eq!(lp, l as f64 - got);
            prop_assert_eq!(token_logprob(&logits, id), lp as f32);
        }
    }
}

/// The `k` likeliest of a row; the sum is off by the fraction `off`, of at most `error`.
fn top_of(logits: &[f32], k: usize, factor: f32, off: f64, error: f64) -> Top {
    let mut all: Vec<(f32, u32)> = logits.iter().copied().zip(0..).collect();
    let nan_last = |x: f32| if x.is_nan() { f32::from_bits(u32::MAX) } else { x };
    all.sort_by(|a, b| nan_last(b.0).total_cmp(&nan_last(a.0)).then(a.1.cmp(&b.1)));
    all.truncate(k);
    let sum: f64 = logits.iter().map(|&x| (f64::from(x - all[0].0) * f64::from(factor)).exp()).sum();
    Top { likeliest: all, vocab: logits.len(), factor, sum: (sum * (1.0 + off)) as f32, error }
}

/// Draws from rows by the likeliest tokens where these tell, and by whole rows: both must agree, draw after draw.
/// Returns how many of the draws were decided by the likeliest tokens.
fn draws_agree(params: &SamplerParams, rows: &[Vec<f32>], k: usize, off: f64, error: f64) -> usize {
    let mut whole = Sampler::new(params.clone()).expect("valid parameters");
    let mut among = whole.clone();
    let mut decided = 0;
    for row in rows {
        let top = among.top_factor(k).map(|factor| top_of(row, k, factor, off, error));
        let want = whole.choose(&mut row.clone(), &[]);
        let got = top.and_then(|top| among.choose_among(&top));
        decided += usize::from(got.is_some());
        assert_eq!(got.or_else(|| among.choose(&mut row.clone(), &[])), want, "{params:?}, k {k}");
        assert_eq!(among.rng.0, whole.rng.0, "as many numbers drawn");
    }
    decided
}

fn any_logit() -> impl Strategy<Value = f32> {
    prop_oneof![
        20 => -8f32..8.0,
        20 => (-3i8..4).prop_map(f32::from),
        2 => Just(-0.0f32),
        4 => Just(f32::NEG_INFINITY),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn the_likeliest_tokens_decide_as_whole_rows_do(
        mut rows in prop::collection::vec(prop::collection::vec(any_logit(), 1..120), 1..6),
        k in 1usize..60,
        temperature in prop_oneof![Just(0.0f32), Just(1.0), 0.05f32..3.0],
        top_k in prop_oneof![Just(0usize), 1usize..70],
        top_p in prop_oneof![Just(1.0f32), 0.05f32..1.0],
        min_p in prop_oneof![Just(0.0f32), 0.0f32..0.5],
        seed in any::<u64>(),
        (off, error) in prop_oneof![Just((0.0, 1e-5)), Just((9e-6, 1e-5)), Just((-0.04, 0.05)), Just((0.04, 0.05))],
        strange in prop_oneof![30 => Just(None), 1 => Just(Some(f32::NAN)), 1 => Just(Some(f32::INFINITY))],
    ) {
        if let Some(x) = strange {
            let at = seed as usize % rows[0].len();
            rows[0][at] = x;
        }
        let params = SamplerParams { temperature, top_k, top_p, min_p, seed, ..SamplerParams::default() };
        draws_agree(&params, &rows, k, off, error);
    }
}

#[test]
fn most_draws_need_no_whole_row() {
    let mut rng = Xoshiro256::new(5);
    let mut normal = || (0..12).map(|_| rng.unit() as f32).sum::<f32>() - 6.0;
    let rows: Vec<Vec<f32>> = (0..60).map(|_| (0..5000).map(|_| 4.0 * normal()).collect()).collect();
    let all = |change: fn(&mut SamplerParams)| {
        let mut params = SamplerParams { temperature: 0.8, seed: 3, ..SamplerParams::default() };
        change(&mut params);
        draws_agree(&params, &rows, 256, 0.0, 1e-5)
    };
    assert_eq!(all(|p| p.top_k = 40), 60);
    assert_eq!(all(|p| p.top_k = 256), 60);
    assert_eq!(all(|p| p.min_p = 0.05), 60);
    assert_eq!(all(|p| (p.top_k, p.top_p, p.min_p) = (64, 0.9, 0.05)), 60);
    assert_eq!(all(|p| p.temperature = 0.0), 60);
    // What only bounds tell, and what may lie beyond.
    assert!(all(|p| p.top_p = 0.9) >= 58);
    assert!(all(|_| ()) >= 50);
    // Never: more than there are, and changed logits.
    assert_eq!(all(|p| p.top_k = 257), 0);
    assert_eq!(all(|p| p.presence_penalty = 0.5), 0);
}

#[test]
fn logprobs_survive_infinities_and_nan() {
    let (lse, top) = logprobs(&[0.0, f32::NAN, f32::NEG_INFINITY, 0.0], 4);
    assert!((lse - 2f64.ln()).abs() < 3e-7);
    assert_eq!(top.iter().map(|t| t.0).collect::<Vec<_>>(), [0, 3, 2]);
    assert_eq!(top[2].1, f64::NEG_INFINITY);
    assert_eq!(logprobs(&[1.0, 2.0], 0).1, []);
}

proptest! {
    /// A greedy choice among allowed tokens is that of the whole row without the others, or left to the whole row.
    #[test]
    fn the_likeliest_allowed_token_is_that_of_the_whole_row(
        row in proptest::collection::vec(any_logit(), 1..40),
        allowed in proptest::collection::vec(any::<bool>(), 40),
        k in 1usize..40,
    ) {
        let sampler = Sampler::new(SamplerParams::default()).unwrap();
        let top = top_of(&row, k, 1.0, 0.0, 1e-6);
        let mut masked = row.clone();
        masked.iter_mut().zip(&allowed).filter(|(_, allowed)| !**allowed).for_each(|(l, _)| *l = f32::NEG_INFINITY);
        let got = sampler.likeliest_among(&top, |id| allowed[id as usize]);
        if let Some(token) = got {
            prop_assert_eq!(Some(token), sampler.clone().choose(&mut masked, &[]));
        }
        // Where the whole row is there, only rows without numbers are left.
        let usable = row.iter().zip(&allowed).any(|(l, allowed)| *allowed && l.is_finite());
        if k >= row.len() && usable {
            prop_assert!(got.is_some());
        }
    }
}
