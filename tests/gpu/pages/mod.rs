//! Keys and values on two sides: pages that leave the device, come back, are attended by the CPU in place or streamed, give the
//! model's logits; memory that does not suffice is refused, and a device that fails in the middle of a move loses nothing.

mod homes;

use std::sync::Arc;

use crate::support::gpu;
use crate::support::{models, naive_model, rounding};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tandem::Error;
use tandem::cache::KvType;
use tandem::device::emulated::{EmulatedAccelerator, EmulatedOptions, EmulatedRuntime, FaultPlan};
use tandem::device::{Accelerator, on_kernels};
use tandem::engine::timeline::Traced;
use tandem::engine::{Engine, NewTokens, Options};
use tandem::model::{LoadedModel, load};
use tandem::program::{Far, Kv, LayerPlacement, Placement, Policy, RequestId, Residence, Side, Unit, Wants};
use tandem::simd::Isa;
use tandem::tensor::Half;

fn plain() -> Arc<dyn Accelerator> {
    let options = EmulatedOptions { jitter: Some(1), ..Default::default() };
    Arc::new(EmulatedAccelerator::new(Arc::new(EmulatedRuntime::new(options).expect("it starts"))))
}

fn tokens(n: usize, vocab: usize) -> Vec<u32> {
    (0..n).map(|i| (i * i * 31 + i * 7 + 3) as u32 % vocab as u32).collect()
}

/// Steps of up to `chunk` rows.
fn options(context: usize, sequences: usize, chunk: usize, kv_pages: usize, far: Far) -> Options {
    let mut options = Options::new(Isa::Reference, context);
    (options.threads, options.sequences, options.chunk) = (Some(2), sequences, chunk);
    (options.kv_pages, options.far) = (Some(kv_pages), Some(far));
    options
}

fn engine(
    m: &LoadedModel,
    o: &Options,
    accel: &Arc<dyn Accelerator>,
    p: &Placement,
) -> tandem::Result<Engine> {
    Engine::placed(m.spec.clone(), &m.weights, o, accel.clone(), "test", "test", p.clone(), &|_| ())
}

fn on_device(layers: usize) -> Placement {
    Placement::all(Side::Device, layers, 0)
}

/// What the model says after each token.
struct Model {
    m: LoadedModel,
    tokens: Vec<u32>,
    want: Vec<Vec<f64>>,
    bound: f64,
    /// What keys and values are kept in.
    kv: KvType,
}

impl Model {
    fn new(name: &str, dtype: &str, n: usize) -> Model {
        Model::with(name, dtype, n, Half::BF16)
    }

    fn with(name: &str, dtype: &str, n: usize, kv: impl Into<KvType>) -> Model {
        let kv = kv.into();
        let m = load(&format!("synth:{name},dtype={dtype},seed=7,ctx=800")).unwrap();
        let tokens = tokens(n, m.spec.vocab);
        let want = naive_model::logits(&m.spec, &m.weights, kv, &tokens);
        // Whatever the type of 16 bits is, the bound is bf16's.
        let bound =
            rounding::accelerator(&m.spec, if kv.is_scaled() { kv } else { KvType::BF16 }, dtype == "bf16");
        Model { m, tokens, want, bound, kv }
    }

    /// Whether logits are those after the tokens at these positions.
    fn check(&self, got: &[f32], positions: &[usize]) -> Result<(), String> {
        let vocab = self.m.spec.vocab;
        assert_eq!(got.len(), positions.len() * vocab);
        for (row, &p) in got.chunks_exact(vocab).zip(positions) {
            let want: Vec<f32> = self.want[p].iter().map(|&x| x as f32).collect();
            let off = models::distance(row, &want).0;
            if off.is_nan() || off > self.bound {
                return Err(format!("position {p}: {off:.2e}, at most {:.2e}", self.bound));
            }
        }
        Ok(())
    }
}

/// Rows of several sequences, each a beginning of the same text, in steps.
fn step(e: &mut Engine, model: &Model, rows: &[(RequestId, usize)]) -> Result<(), String> {
    let inputs: Vec<NewTokens<'_>> = rows
        .iter()
        .map(|&(seq, n)| {
            let at = e.len(seq);
            NewTokens { id: seq, tokens: &model.tokens[at..at + n], wants: Wants::Last }
        })
        .collect();
    let ends: Vec<usize> = rows.iter().map(|&(seq, n)| e.len(seq) + n - 1).collect();
    let got = e.forward(&inputs).map_err(|e| e.to_string())?;
    model.check(got, &ends)
}

/// HELM's target: eight times what the device can hold, with windows and without.
#[test]
fn eight_times_the_devices_pages_give_the_models_logits() {
    let (accel, mut behind) = (plain(), 0);
    for (name, dtype) in [("tiny-llama", "bf16"), ("tiny-mistral", "q8_0"), ("tiny-gemma3", "q4_k")] {
        let context = 8 * 3 * 32;
        let model = Model::new(name, dtype, context);
        for far in [Far::Attend, Far::Stream] {
            let mut e =
                engine(&model.m, &options(context, 1, 32, 3, far), &accel, &on_device(model.m.spec.n_layers))
                    .unwrap_or_else(|e| panic!("{name} {far:?}: {e}"));
            let seq = e.add();
            let mut at = 0;
            while at < context {
                let n = if at % 96 == 64 { 1 } else { 32 - at % 32 }.min(context - at);
                step(&mut e, &model, &[(seq, n)]).unwrap_or_else(|e| panic!("{name} {far:?}: {e}"));
                at += n;
            }
            // A token again: what has left the device is left alone in layers whose window has left it, too.
            e.truncate(seq, context - 1);
            e.trace();
            step(&mut e, &model, &[(seq, 1)]).unwrap_or_else(|e| panic!("{name} {far:?}: {e}"));
            let Some(Kv::Split { boundary, .. }) = e.kv(seq) else { panic!("{name}: pages are away") };
            let timeline = e.timeline().unwrap();
            for l in 0..model.m.spec.n_layers {
                let first_seen = model.m.spec.window_of(l).map_or(0, |w| context.saturating_sub(w));
                let of = |s: &&Traced| s.layer == Some(l as u32);
                let away = |s: &Traced| s.name == "page_in" || s.unit == Unit::Host || s.name == "merge";
                let found = timeline.spans.iter().filter(of).any(away);
                assert_eq!(found, first_seen < boundary as usize, "{name} {far:?}: layer {l}");
                behind += usize::from(!found);
            }
            e.remove(seq);
        }
    }
    assert!(behind > 4, "{behind} layers with a window");
}

/// The real kernels, in host emulation and on a GPU if there is one.
#[test]
fn pages_that_left_are_attended_by_kernels_too() {
    for (name, runtime) in ["tiny-llama", "tiny-mistral"]
        .into_iter()
        .flat_map(|n| gpu::runtimes().into_iter().map(move |r| (n, r)))
    {
        let accel = on_kernels(runtime).expect("a runtime with kernels");
        let halves = Model::with(name, "q8_0", 164, gpu::kv(&accel, Half::BF16));
        let codes = Model::with(name, "q8_0", 164, KvType::Q8);
        for (model, far) in [&halves, &codes].into_iter().flat_map(|m| [(m, Far::Attend), (m, Far::Stream)]) {
            let o = Options { kv_dtype: model.kv, ..options(164, 1, 64, 4, far) };
            let mut e = engine(&model.m, &o, &accel, &on_device(model.m.spec.n_layers)).unwrap();
            let seq = e.add();
            for n in [64, 33, 1, 1, 60, 1, 4] {
                step(&mut e, model, &[(seq, n)]).unwrap_or_else(|e| panic!("{:?}, {far:?}: {e}", model.kv));
            }
        }
    }
}

/// A sequence whose pages left, in a step with one whose pages did not: the queries of some rows of the step go to the host.
#[test]
fn pages_that_left_are_attended_beside_a_sequence_that_is_all_here() {
    for runtime in gpu::runtimes() {
        let accel = on_kernels(runtime).expect("a runtime with kernels");
        let model = Model::with("tiny-llama", "q8_0", 190, gpu::kv(&accel, Half::BF16));
        let o = Options { kv_dtype: model.kv, ..options(190, 2, 40, 6, Far::Attend) };
        let mut e = engine(&model.m, &o, &accel, &on_device(model.m.spec.n_layers)).unwrap();
        let (long, short) = (e.add(), e.add());
        for rows in [
            vec![(long, 40)],
            vec![(long, 40)],
            vec![(long, 40)],
            vec![(long, 40)],
            vec![(long, 20), (short, 20)],
            vec![(short, 1), (long, 1)],
            vec![(long, 1), (short, 5)],
        ] {
            step(&mut e, &model, &rows).unwrap();
        }
        assert!(matches!(e.kv(long), Some(Kv::Split { .. })) && e.kv(short) == Some(Kv::Device));
    }
}

fn any_layer() -> impl Strategy<Value = LayerPlacement> {
    let side = || prop_oneof![1 => Just(Side::Host), 3 => Just(Side::Device)];
    let policy = || {
        any::<[bool; 6]>().prop_map(|mut bits| {
            bits[1] &= bits[0];
            bits[2] = bits[1];
            Policy::from_bits(bits)
        })
    };
    let weights = prop_oneof![Just(Residence::Both), Just(Residence::Streamed)];
    (weights, policy(), policy(), side()).prop_map(|(weights, prefill, decode, kv)| {
        let host = [prefill, decode].iter().any(|p| p.attention() == Some(Side::Host));
        LayerPlacement { weights, prefill, decode, kv: if host { Side::Host } else { kv }, device_experts: 0 }
    })
}

/// Codes of 8 bits in one of the models.
fn kv_of(name: &str, accel: &Arc<dyn Accelerator>) -> KvType {
    if name == "tiny-mistral" { KvType::Q8 } else { gpu::kv(accel, Half::BF16).into() }
}

/// Any placement, any number of pages, sequences that come and go, are cut and grow: pages leave and come back between steps.
#[test]
fn any_pages_on_any_side_give_the_models_logits() {
    for (name, dtype, cases) in
        [("tiny-qwen3", "q8_0", 40), ("tiny-gemma3", "q8_0", 12), ("tiny-mistral", "q8_0", 12)]
    {
        let accel = gpu::an_accelerator();
        let model = Model::with(name, dtype, 200, kv_of(name, &accel));
        let n = model.m.spec.n_layers;
        let gemma = name == "tiny-gemma3";
        let cases = gpu::cases(&accel, cases);
        let layers = prop_oneof![
            Just(vec![LayerPlacement::all(Side::Device); n]).boxed(),
            if gemma {
                (0..=n).prop_map(move |k| Placement::boundary(k, n, 0, 0).layers).boxed()
            } else {
                prop::collection::vec(any_layer(), n).boxed()
            }
        ];
        let act = (0..3usize, prop_oneof![Just(1usize), 1..33usize], 0..3usize, 1..33usize, 0..12usize);
        let far = prop_oneof![Just(Far::Attend), Just(Far::Stream)];
        let strategy = (layers, 8..20usize, far, prop::collection::vec(act, 1..24));
        let mut runner = TestRunner::new(Config { cases, ..Config::default() });
        runner
            .run(&strategy, |(layers, pages, far, acts)| {
                let placement = Placement { layers, ..on_device(n) };
                let o = Options { kv_dtype: model.kv, ..options(200, 3, 40, pages, far) };
                let mut e = engine(&model.m, &o, &accel, &placement)
                    .map_err(|e| TestCaseError::fail(e.to_string()))?;
                let mut seqs = [e.add(), e.add(), e.add()];
                for (a, n, b, more, what) in acts {
                    match what {
                        0 => {
                            let len = e.len(seqs[a]);
                            e.truncate(seqs[a], len * n / 33);
                            continue;
                        }
                        1 => {
                            e.remove(seqs[a]);
                            seqs[a] = e.add();
                            continue;
                        }
                        _ => {}
                    }
                    let mut rows = vec![(seqs[a], n)];
                    if b != a {
                        rows.push((seqs[b], more.min(40 - n)));
                    }
                    rows.retain(|&(seq, n)| n > 0 && e.len(seq) + n <= 200);
                    if !rows.is_empty() {
                        step(&mut e, &model, &rows).map_err(TestCaseError::fail)?;
                    }
                }
                seqs.into_iter().for_each(|s| e.remove(s));
                Ok(())
            })
            .unwrap();
    }
}

#[test]
fn too_few_pages_for_a_step_are_refused_with_the_numbers() {
    let m = load("synth:tiny-llama,dtype=q8_0,seed=7").unwrap();
    let o = options(200, 1, 128, 4, Far::Attend);
    let e = engine(&m, &o, &plain(), &on_device(m.spec.n_layers)).err().expect("too few");
    assert!(
        matches!(&e, Error::Usage(t) if t.contains("4 pages") && t.contains("128 rows") && t.contains("need 6")),
        "{e}"
    );
}

/// Whatever the device refuses, in the middle of a move of pages or elsewhere: nothing is stored, no page is lost, and the step can
/// be repeated.
#[test]
fn a_step_that_fails_while_pages_move_loses_none() {
    let model = Model::new("tiny-llama", "q8_0", 400);
    let runtime = Arc::new(EmulatedRuntime::new(EmulatedOptions::default()).expect("it starts"));
    let accel: Arc<dyn Accelerator> = Arc::new(EmulatedAccelerator::new(runtime.clone()));
    for far in [Far::Attend, Far::Stream] {
        let o = options(400, 2, 64, 8, far);
        let mut e = engine(&model.m, &o, &accel, &on_device(model.m.spec.n_layers)).unwrap();
        let (a, b) = (e.add(), e.add());
        let (mut refused, mut n) = (0, 1);
        for rows in
            [[(a, 60), (b, 4)], [(a, 40), (b, 24)], [(a, 1), (b, 63)], [(a, 30), (b, 34)], [(a, 1), (b, 60)]]
        {
            // Launch after launch, until the step comes through.
            loop {
                runtime.set_faults(FaultPlan { refuse_launch: Some(n), ..FaultPlan::default() });
                let before = [a, b].map(|s| e.len(s));
                match step(&mut e, &model, &rows) {
                    Ok(()) => break,
                    Err(what) => assert!(what.contains("refused"), "{far:?}: {what}"),
                }
                assert_eq!([a, b].map(|s| e.len(s)), before, "{far:?}: launch {n}");
                (refused, n) = (refused + 1, n + 1);
            }
            n = 1;
        }
        runtime.set_faults(FaultPlan::default());
        assert!(refused > 50, "only {refused} launches were refused");
        step(&mut e, &model, &[(a, 1), (b, 1)]).unwrap();
    }
}
