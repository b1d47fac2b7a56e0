//! Models placed on two sides: any boundary, any policy that can run, streamed layers, keys and values on either side give
//! the model's logits, within the rounding of the sides; memory that does not suffice and policies that cannot run are refused.

use std::sync::Arc;

use crate::support::gpu;
use crate::support::models::dense_models;
use crate::support::sub_batches::{self, Moves};
use crate::support::{models, naive_model, rounding};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tandem::device::emulated::{EmulatedAccelerator, EmulatedOptions, EmulatedRuntime, Speed};
use tandem::device::{Accelerator, on_kernels};
use tandem::engine::{Engine, NewTokens, Options, Sizes};
use tandem::model::{LoadedModel, ModelSpec, load};
use tandem::program::{Flow, LayerPlacement, Placement, Policy, Residence, Side, Staging, Unit, Wants};
use tandem::simd::Isa;
use tandem::simd::linear::Mode;
use tandem::tensor::Half;

/// More than a page, than a window of the tiny models and than a tile of queries.
const TOKENS: usize = 70;

fn plain(options: EmulatedOptions) -> Arc<dyn Accelerator> {
    Arc::new(EmulatedAccelerator::new(Arc::new(EmulatedRuntime::new(options).expect("it starts"))))
}

fn by_functions() -> Arc<dyn Accelerator> {
    plain(EmulatedOptions { jitter: Some(1), ..Default::default() })
}

fn tokens(n: usize, vocab: usize) -> Vec<u32> {
    (0..n).map(|i| (i * i * 31 + i * 7 + 3) as u32 % vocab as u32).collect()
}

fn options(context: usize, sequences: usize) -> Options {
    let mut options = Options::new(Isa::Reference, context);
    (options.threads, options.sequences) = (Some(2), sequences);
    options
}

/// Every layer on the device rounds seven times to 16 bits, and the host rounds less.
fn bound(spec: &ModelSpec, bf16: bool) -> f64 {
    rounding::accelerator(spec, Half::BF16, bf16)
}

fn placed(
    m: &LoadedModel,
    o: &Options,
    accel: &Arc<dyn Accelerator>,
    p: &Placement,
) -> tandem::Result<Engine> {
    Engine::placed(m.spec.clone(), &m.weights, o, accel.clone(), "test", "test", p.clone(), &|_| ())
}

/// The logits of all tokens, in steps of these lengths.
fn feed(e: &mut Engine, tokens: &[u32], steps: &[usize]) -> Vec<f32> {
    let seq = e.add();
    let (mut out, mut at) = (Vec::new(), 0);
    for n in steps {
        let tokens = &tokens[at..at + n];
        out.extend_from_slice(e.forward(&[NewTokens { id: seq, tokens, wants: Wants::All }]).unwrap());
        at += n;
    }
    e.remove(seq);
    out
}

fn worst(got: &[f32], want: &[Vec<f64>], vocab: usize) -> f64 {
    let distance =
        |g: &[f32], w: &Vec<f64>| models::distance(g, &w.iter().map(|&x| x as f32).collect::<Vec<_>>()).0;
    assert_eq!(got.len(), want.len() * vocab);
    got.chunks_exact(vocab).zip(want).map(|(g, w)| distance(g, w)).fold(0.0, f64::max)
}

/// What plans use: a boundary, LIA's policies with pinned layers, full streaming.
fn named(layers: usize) -> Vec<(&'static str, Placement)> {
    let device = LayerPlacement::all(Side::Device);
    let mut attention_on_host = Placement::all(Side::Device, layers, 0);
    attention_on_host.layers = vec![
        LayerPlacement {
            prefill: Policy::ATTENTION_ON_HOST,
            decode: Policy::ATTENTION_ON_HOST,
            kv: Side::Host,
            ..device
        };
        layers
    ];
    let mut streamed = Placement::all(Side::Device, layers, 0);
    streamed.layers = vec![LayerPlacement { weights: Residence::Streamed, ..device }; layers];
    // LIA: prompts on the device with streamed weights, decode on the host in place; the first layer is pinned.
    let mut lia = Placement::all(Side::Device, layers, 0);
    lia.layers = vec![
        LayerPlacement {
            weights: Residence::Streamed,
            decode: Policy::all(Side::Host),
            kv: Side::Host,
            ..device
        };
        layers
    ];
    lia.layers[0] = device;
    let mut flexgen = streamed.clone();
    for layer in &mut flexgen.layers {
        (layer.kv, layer.decode) = (Side::Host, Policy::ATTENTION_ON_HOST);
    }
    let mut zero = streamed.clone();
    zero.layers.iter_mut().for_each(|l| l.kv = Side::Host);
    let mut all = vec![
        ("attention on the host", attention_on_host),
        ("streamed", streamed),
        ("LIA", lia),
        ("FlexGen", flexgen),
        ("keys and values streamed", zero),
    ];
    for k in 0..=layers + 2 {
        all.push(("boundary", Placement::boundary(k, layers, 0, 0)));
    }
    all
}

#[test]
fn placements_that_plans_use_give_the_models_logits() {
    let mut failures = Vec::new();
    for name in dense_models() {
        let dtypes: &[&str] = if name == "tiny-llama" { &["bf16", "f16", "q4_k"] } else { &["q4_k"] };
        for dtype in dtypes {
            let m = load(&format!("synth:{name},dtype={dtype},seed=7")).unwrap();
            let tokens = tokens(TOKENS, m.spec.vocab);
            let want = naive_model::logits(&m.spec, &m.weights, Half::BF16, &tokens);
            let accel = by_functions();
            for (what, placement) in named(m.spec.n_layers) {
                let mut e = placed(&m, &options(TOKENS, 1), &accel, &placement)
                    .unwrap_or_else(|e| panic!("{name} {what}: {e}"));
                let got = feed(&mut e, &tokens, &[TOKENS - 24, 20, 1, 1, 1, 1]);
                let bound = bound(&m.spec, *dtype == "bf16" || name.contains("gemma"));
                let worst = worst(&got, &want, m.spec.vocab);
                if worst > bound {
                    failures.push(format!("{name} {dtype} {what}: {worst:.2e}, at most {bound:.2e}"));
                }
            }
        }
    }
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

/// Families that norm what a sublayer adds (Gemma): the norm is applied where the output is added, with whatever vector.
#[test]
fn every_vector_runs_where_outputs_are_normed_before_they_are_added() {
    let m = load("synth:tiny-gemma3,dtype=q4_k,seed=7").unwrap();
    assert!(m.spec.post_norms);
    let (n, vocab) = (m.spec.n_layers, m.spec.vocab);
    let tokens = tokens(12, vocab);
    let want = naive_model::logits(&m.spec, &m.weights, Half::BF16, &tokens);
    let (accel, bound) = (by_functions(), bound(&m.spec, true));
    for weights in [Residence::Both, Residence::Streamed] {
        for bits in 0..32 {
            let bit = |i: u32| bits >> i & 1 == 1;
            let policy = Policy::from_bits([bit(0), bit(1), bit(1), bit(2), bit(3), bit(4)]);
            let layer = LayerPlacement {
                weights,
                prefill: policy,
                decode: policy,
                kv: Side::Host,
                device_experts: 0,
            };
            for head in [Side::Host, Side::Device] {
                let mut placement = Placement::all(head, n, 0);
                placement.layers = vec![layer; n];
                let what = format!("{weights:?} {:?} {head:?}", policy.bits());
                let mut e =
                    placed(&m, &options(12, 1), &accel, &placement).unwrap_or_else(|e| panic!("{what}: {e}"));
                let worst = worst(&feed(&mut e, &tokens, &[10, 1, 1]), &want, vocab);
                assert!(worst <= bound, "{what}: {worst:.2e}, at most {bound:.2e}");
            }
        }
    }
}

/// Experts change sides while the model runs, as its routers choose: the kernels find them, and what they say is what it is without.
#[test]
fn experts_follow_the_router_on_kernels() {
    let m = load("synth:tiny-qwen3-moe,dtype=q8_0,seed=7").unwrap();
    let (tokens, vocab) = (tokens(TOKENS, m.spec.vocab), m.spec.vocab);
    let mut placement = Placement::all(Side::Device, m.spec.n_layers, 0);
    for (l, layer) in placement.layers.iter_mut().enumerate() {
        if m.spec.experts_of(l).is_some() {
            (layer.weights, layer.device_experts) = (Residence::Both, 3);
        }
    }
    let steps: Vec<usize> = [30].into_iter().chain([1; TOKENS - 30]).collect();
    for runtime in gpu::runtimes() {
        let accel = on_kernels(runtime).expect("a runtime with kernels");
        let kv = gpu::kv(&accel, Half::BF16);
        let run = |follow: Option<f64>| {
            let o = Options { kv_dtype: kv.into(), follow, ..options(TOKENS, 1) };
            let mut e = placed(&m, &o, &accel, &placement).unwrap();
            let got = feed(&mut e, &tokens, &steps);
            (got, e.exchanged_experts())
        };
        let (fixed, follows) = (run(None), run(Some(0.0)));
        assert!(fixed.1 == 0 && follows.1 > 5, "{} experts changed sides", follows.1);
        let want: Vec<Vec<f64>> =
            fixed.0.chunks_exact(vocab).map(|row| row.iter().map(|&x| f64::from(x)).collect()).collect();
        let (worst, bound) = (worst(&follows.0, &want, vocab), 2.0 * bound(&m.spec, false));
        assert!(worst > 0.0 && worst <= bound, "{worst:.2e}, at most {bound:.2e}");
    }
}

/// The real kernels, in host emulation and on a GPU if there is one.
#[test]
fn placements_on_kernels_give_the_models_logits() {
    let m = load("synth:tiny-llama,dtype=q4_k,seed=7").unwrap();
    let tokens = tokens(40, m.spec.vocab);
    for runtime in gpu::runtimes() {
        let accel = on_kernels(runtime).expect("a runtime with kernels");
        let kv = gpu::kv(&accel, Half::BF16);
        let want = naive_model::logits(&m.spec, &m.weights, kv, &tokens);
        let o = Options { kv_dtype: kv.into(), ..options(40, 1) };
        for (what, placement) in named(m.spec.n_layers)
            .into_iter()
            .filter(|(what, _)| *what != "boundary")
            .chain([("boundary", Placement::boundary(1 + m.spec.n_layers / 2, m.spec.n_layers, 0, 0))])
        {
            let mut e = placed(&m, &o, &accel, &placement).unwrap_or_else(|e| panic!("{what}: {e}"));
            let got = feed(&mut e, &tokens, &[34, 4, 1, 1]);
            let (worst, bound) = (worst(&got, &want, m.spec.vocab), bound(&m.spec, false));
            assert!(worst <= bound, "{what}: {worst:.2e}, at most {bound:.2e}");
        }
    }
}

fn any_layer() -> impl Strategy<Value = LayerPlacement> {
    let side = || prop_oneof![Just(Side::Host), Just(Side::Device)];
    let policy = || {
        any::<[bool; 6]>().prop_map(|mut bits| {
            bits[2] = bits[1];
            Policy::from_bits(bits)
        })
    };
    let weights = prop_oneof![Just(Residence::Both), Just(Residence::Streamed)];
    (weights, policy(), policy(), side()).prop_map(|(weights, prefill, decode, kv)| {
        // Attention on the host wants keys and values there.
        let host = [prefill, decode].iter().any(|p| p.attention() == Some(Side::Host));
        LayerPlacement { weights, prefill, decode, kv: if host { Side::Host } else { kv }, device_experts: 0 }
    })
}

/// Any placement of two sequences whose rows mix prompts and decode steps.
#[test]
fn any_placement_gives_the_models_logits() {
    any_placement("synth:tiny-qwen3,dtype=q8_0,seed=3", 60, false);
}

/// The same where what a sublayer adds is normed first.
#[test]
fn any_placement_of_a_family_with_post_norms_gives_the_models_logits() {
    any_placement("synth:tiny-gemma3,dtype=q8_0,seed=3", 40, true);
}

fn any_placement(model: &str, cases: u32, bf16: bool) {
    let m = load(model).unwrap();
    let n = m.spec.n_layers;
    let long = tokens(TOKENS, m.spec.vocab);
    let accel = gpu::an_accelerator();
    let (cases, kv) = (gpu::cases(&accel, cases), gpu::kv(&accel, Half::BF16));
    let o = Options { kv_dtype: kv.into(), ..options(TOKENS, 2) };
    let want = naive_model::logits(&m.spec, &m.weights, kv, &long);
    let (bound, vocab) = (bound(&m.spec, bf16), m.spec.vocab);
    let side = || prop_oneof![Just(Side::Host), Just(Side::Device)];
    let strategy = (side(), prop::collection::vec(any_layer(), n), side(), 1..60usize, 1..9usize);
    let mut runner = TestRunner::new(Config { cases, ..Config::default() });
    runner
        .run(&strategy, |(embedding, layers, head, cut, rest)| {
            let placement = Placement {
                embedding,
                layers,
                head,
                device_pages: 0,
                host_pages: 0,
                windows: vec![],
                staging: Staging::Ahead,
                copy_lane_rows: 1,
                stream_rows: 0,
            };
            let mut e = placed(&m, &o, &accel, &placement).map_err(|e| TestCaseError::fail(e.to_string()))?;
            let (a, b) = (e.add(), e.add());
            // A prompt; then the rest of it beside another prompt, then a token of both.
            let mut got = Vec::new();
            let first = NewTokens { id: a, tokens: &long[..cut], wants: Wants::Nothing };
            e.forward(&[first]).unwrap();
            let both = [
                NewTokens { id: a, tokens: &long[cut..cut + 1], wants: Wants::Last },
                NewTokens { id: b, tokens: &long[..rest], wants: Wants::All },
            ];
            got.extend_from_slice(e.forward(&both).unwrap());
            let more = [
                NewTokens { id: b, tokens: &long[rest..rest + 1], wants: Wants::Last },
                NewTokens { id: a, tokens: &long[cut + 1..cut + 2], wants: Wants::Last },
            ];
            got.extend_from_slice(e.forward(&more).unwrap());
            let picked = e
                .forward_greedy(&[NewTokens { id: a, tokens: &long[cut + 2..cut + 3], wants: Wants::Last }])
                .unwrap();
            prop_assert_eq!(picked.len(), 1);
            let positions: Vec<usize> = std::iter::once(cut).chain(0..rest).chain([rest, cut + 1]).collect();
            let wanted: Vec<Vec<f64>> = positions.iter().map(|&p| want[p].clone()).collect();
            let worst = worst(&got, &wanted, vocab);
            prop_assert!(worst <= bound, "{worst:.2e}, at most {bound:.2e}");
            Ok(())
        })
        .unwrap();
}

/// Any placement, any split of any batch, both flows: the bits of one sub-batch.
#[test]
fn any_split_in_two_sub_batches_gives_the_logits_of_one() {
    let m = load("synth:tiny-qwen3,dtype=q8_0,seed=3").unwrap();
    let n = m.spec.n_layers;
    let long = tokens(TOKENS, m.spec.vocab);
    let accel = by_functions();
    let side = || prop_oneof![Just(Side::Host), Just(Side::Device)];
    let placement = (side(), prop::collection::vec(any_layer(), n), side());
    let batch = prop::collection::vec((1..20usize, any::<bool>(), 0..2u8, 0..2u8), 1..5);
    let mut runner = TestRunner::new(Config { cases: 24, max_shrink_iters: 64, ..Config::default() });
    runner
        .run(&(placement, batch, any::<bool>()), |((embedding, layers, head), batch, lanes)| {
            let placement = Placement {
                embedding,
                layers,
                head,
                device_pages: 0,
                host_pages: 0,
                windows: vec![],
                staging: Staging::Ahead,
                copy_lane_rows: 1,
                stream_rows: 0,
            };
            let mut o = options(80, 4);
            (o.mode, o.sub_batches) = (Mode::Deterministic, 2);
            let fail = |e: tandem::Error| TestCaseError::fail(e.to_string());
            let mut e = placed(&m, &o, &accel, &placement).map_err(fail)?;
            let flow = if lanes { Flow::TwoLanes } else { Flow::Serial };
            let mut both = Vec::new();
            for split in [false, true] {
                let seqs: Vec<_> = batch.iter().map(|_| e.add()).collect();
                let mut got = Vec::new();
                for (step, last) in [(0, false), (1, false), (2, true)] {
                    let inputs: Vec<NewTokens<'_>> = batch
                        .iter()
                        .zip(&seqs)
                        .map(|(&(prompt, all, ..), &seq)| match step {
                            0 if all => NewTokens { id: seq, tokens: &long[..prompt], wants: Wants::All },
                            0 => NewTokens { id: seq, tokens: &long[..prompt], wants: Wants::Last },
                            // Some decode beside the prompts of others.
                            1 if all => NewTokens {
                                id: seq,
                                tokens: &long[prompt..prompt + 3],
                                wants: Wants::Nothing,
                            },
                            _ => {
                                let at = prompt + if all || last { 3 } else { 0 };
                                NewTokens { id: seq, tokens: &long[at..at + 1], wants: Wants::Last }
                            }
                        })
                        .collect();
                    let of: Vec<u8> = batch.iter().map(|b| if step == 0 { b.2 } else { b.3 }).collect();
                    match split {
                        false => got.extend_from_slice(e.forward(&inputs).map_err(fail)?),
                        true => got.extend(
                            sub_batches::forward(&mut e, &inputs, &of, flow, &Moves::default())
                                .map_err(fail)?,
                        ),
                    }
                }
                seqs.into_iter().for_each(|seq| e.remove(seq));
                both.push(got);
            }
            let differ = both[0].iter().zip(&both[1]).filter(|(a, b)| a != b).count();
            prop_assert!(differ == 0, "{differ} of {} logits are not those of one sub-batch", both[0].len());
            Ok(())
        })
        .unwrap();
}

#[test]
fn sub_batches_beyond_those_planned_are_refused() {
    let m = load("synth:tiny-llama,dtype=q4_k,seed=7").unwrap();
    let accel = by_functions();
    let mut e =
        placed(&m, &options(TOKENS, 2), &accel, &Placement::boundary(2, m.spec.n_layers, 0, 0)).unwrap();
    let inputs = [e.add(), e.add()].map(|seq| NewTokens { id: seq, tokens: &[1, 2, 3], wants: Wants::Last });
    let batches = [&inputs[..1], &inputs[1..]];
    let error = e.run_rows(&batches, Flow::TwoLanes, &[], |_| ()).unwrap_err().to_string();
    assert!(error.contains("2 sub-batches, 1 were planned"), "{error}");
    assert_eq!(e.forward(&inputs).unwrap().len(), 2 * m.spec.vocab);
}

/// With kernels that take a while: the CPU attends rows of one sub-batch while the device computes those of the other.
#[test]
fn in_two_lanes_the_sides_work_at_the_same_time() {
    let m = load("synth:tiny-llama,dtype=q4_k,seed=7").unwrap();
    let mut placement = Placement::all(Side::Device, m.spec.n_layers, 0);
    for layer in &mut placement.layers {
        (layer.prefill, layer.decode, layer.kv) =
            (Policy::ATTENTION_ON_HOST, Policy::ATTENTION_ON_HOST, Side::Host);
    }
    let speed = Speed { launch: std::time::Duration::from_millis(3), ..Speed::default() };
    let accel = plain(EmulatedOptions { speed, ..Default::default() });
    let mut o = options(TOKENS, 2);
    o.sub_batches = 2;
    let mut e = placed(&m, &o, &accel, &placement).unwrap();
    e.trace();
    let inputs = [e.add(), e.add()].map(|seq| NewTokens { id: seq, tokens: &[1, 2, 3], wants: Wants::Last });
    e.run_rows(&[&inputs[..1], &inputs[1..]], Flow::TwoLanes, &[], |_| ()).unwrap();
    let spans = e.timeline().expect("it was asked for").spans;
    let of = |unit| spans.iter().filter(move |s| s.unit == unit);
    // Every attention of the first sub-batch, while the device has the second's projections to do.
    let attended: Vec<_> = of(Unit::Host).filter(|s| s.name == "attend").collect();
    let beside =
        attended.iter().filter(|h| of(Unit::Gpu).any(|g| g.start < h.end && h.start < g.end)).count();
    assert_eq!(attended.len(), 2 * m.spec.n_layers);
    assert!(beside >= m.spec.n_layers, "{beside} of {} attentions beside the device", attended.len());
}

#[test]
fn the_first_boundary_that_fits_is_found_by_the_dry_run_and_runs_within_the_cap() {
    let m = load("synth:tiny-llama,dtype=q4_k,seed=7").unwrap();
    let n = m.spec.n_layers;
    let o = options(TOKENS, 1);
    let tokens = tokens(TOKENS, m.spec.vocab);
    let sizes = Sizes::new(&m.spec, &m.weights, &o, &*by_functions()).unwrap();
    let boundary = |k| Placement::boundary(k, n, 0, 0);
    let mut before = u64::MAX;
    for k in 0..=n + 1 {
        let bytes = sizes.device(&boundary(k)).total();
        assert!(bytes < before, "fewer units on the device take less: {bytes} at {k}");
        before = bytes;
        // As much as planned is enough, a byte less is not.
        let capped = |memory| plain(EmulatedOptions { memory, ..Default::default() });
        let accel = capped(bytes);
        let tight = Sizes::new(&m.spec, &m.weights, &o, &*accel).unwrap();
        let found = (0..=n + 2).map(boundary).find(|p| tight.check(p).is_ok()).unwrap();
        assert_eq!(found, boundary(k));
        let mut e = placed(&m, &o, &accel, &found).unwrap();
        assert_eq!(feed(&mut e, &tokens, &[TOKENS]).len(), TOKENS * m.spec.vocab);
        drop(e);
        let error = placed(&m, &o, &capped(bytes - 256), &found).err().expect("too little").to_string();
        assert!(error.contains("free on") && error.contains("weights"), "{error}");
    }
}

#[test]
fn what_cannot_run_is_refused_before_anything_is_allocated() {
    let m = load("synth:tiny-llama,dtype=q4_k,seed=7").unwrap();
    let n = m.spec.n_layers;
    let accel = by_functions();
    let refused =
        |p: Placement| placed(&m, &options(TOKENS, 1), &accel, &p).err().expect("refused").to_string();
    assert!(refused(Placement::all(Side::Device, n + 1, 0)).contains("layers for a model of"));
    let mut split = Placement::all(Side::Device, n, 0);
    split.layers[0].decode = Policy::from_bits([false, true, false, false, false, false]);
    assert!(refused(split).contains("scores and values on different sides"));
    let mut far = Placement::all(Side::Device, n, 0);
    far.layers[0].decode = Policy::ATTENTION_ON_HOST;
    assert!(refused(far).contains("kept on the device"));
}
