//! In deterministic mode a row has the same bits at any place and in any batch: whatever the placement, the way pages are
//! split over both sides, the sub-batches, the flow and the other rows of a step, the logits are those of the CPU alone. So a test of a
//! schedule, a swap or an interleaving may compare tokens and logits with those of running alone, bit by bit.

use std::sync::Arc;

use crate::support::chaos::Chaos;
use crate::support::models;
use crate::support::sub_batches::{self, Moves};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tandem::cache::KvType;
use tandem::device::Accelerator;
use tandem::device::emulated::{EmulatedAccelerator, EmulatedOptions, EmulatedRuntime};
use tandem::engine::{Engine, NewTokens, Options};
use tandem::model::{LoadedModel, ModelSpec, load};
use tandem::program::{
    COPY_LANE_ROWS, Far, Flow, LayerPlacement, Placement, Policy, RequestId, Residence, Side, Staging,
    Sublayer, Wants,
};
use tandem::simd::Isa;
use tandem::simd::linear::Mode;

/// Tokens of each text: seven pages and a part, several windows of the tiny models, and more than any step.
const CONTEXT: usize = 230;

/// Rows of a step at most.
const ROWS: usize = 40;

/// Sequences at most.
const SEQUENCES: usize = 3;

fn device() -> Arc<dyn Accelerator> {
    let options = EmulatedOptions { jitter: Some(1), ..Default::default() };
    Arc::new(EmulatedAccelerator::new(Arc::new(EmulatedRuntime::new(options).expect("it starts"))))
}

/// A model, two texts, and what the CPU alone says after each of their tokens.
struct World {
    m: LoadedModel,
    isa: Isa,
    kv: KvType,
    texts: [Vec<u32>; 2],
    want: [Vec<f32>; 2],
    /// Experts that have changed sides.
    exchanged: std::cell::Cell<u64>,
}

impl World {
    fn new(name: &str, dtype: &str, isa: Isa, kv: KvType) -> World {
        let m = load(&format!("synth:{name},dtype={dtype},seed=11,ctx={CONTEXT}")).unwrap();
        let text = |salt: usize| -> Vec<u32> {
            (0..CONTEXT).map(|i| (i * i * 31 + i * 7 + salt * 13 + 3) as u32 % m.spec.vocab as u32).collect()
        };
        let texts = [text(0), text(1)];
        let mut world =
            World { m, isa, kv, texts, want: [Vec::new(), Vec::new()], exchanged: Default::default() };
        let mut o = world.options();
        (o.chunk, o.logits) = (CONTEXT, CONTEXT);
        let mut e = models::engine(&world.m, &o);
        for t in 0..2 {
            let seq = e.add();
            let all = [NewTokens { id: seq, tokens: &world.texts[t], wants: Wants::All }];
            world.want[t] = e.forward(&all).unwrap().to_vec();
            e.remove(seq);
        }
        world
    }

    fn options(&self) -> Options {
        Options {
            mode: Mode::Deterministic,
            kv_dtype: self.kv,
            threads: Some(2),
            sequences: SEQUENCES,
            chunk: ROWS,
            logits: ROWS,
            sub_batches: 2,
            ..Options::new(self.isa, CONTEXT)
        }
    }

    /// Logits of positions of a text.
    fn want(&self, text: usize, positions: std::ops::Range<usize>) -> &[f32] {
        let vocab = self.m.spec.vocab;
        &self.want[text][positions.start * vocab..positions.end * vocab]
    }
}

/// What happens to the sequences in a step.
#[derive(Debug, Clone)]
enum Act {
    /// Rows for each sequence, which of them are in the second sub-batch, and how those share the lanes.
    Step { rows: [usize; SEQUENCES], second: [bool; SEQUENCES], lanes: bool, all: bool },
    /// A sequence is cut to so many of 32 parts.
    Cut { seq: usize, parts: usize },
    /// A sequence ends, another begins.
    Renew { seq: usize },
}

fn any_act() -> impl Strategy<Value = Act> {
    let rows = prop_oneof![2 => Just(0usize), 3 => Just(1usize), 2 => 1..14usize];
    let step = (prop::array::uniform3(rows), any::<[bool; 3]>(), any::<bool>(), any::<bool>());
    prop_oneof![
        8 => step.prop_map(|(rows, second, lanes, all)| Act::Step { rows, second, lanes, all }),
        1 => (0..SEQUENCES, 0..32usize).prop_map(|(seq, parts)| Act::Cut { seq, parts }),
        1 => (0..SEQUENCES).prop_map(|seq| Act::Renew { seq }),
    ]
}

fn any_layer() -> impl Strategy<Value = LayerPlacement> {
    let side = || prop_oneof![1 => Just(Side::Host), 2 => Just(Side::Device)];
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

/// A placement, and a limit to the device's pages.
#[derive(Debug, Clone)]
struct Place {
    placement: Placement,
    kv_pages: Option<usize>,
    /// `None`: what is predicted to be faster.
    far: Option<Far>,
    /// Whether experts of divided layers follow the routers.
    follow: bool,
}

fn any_place(layers: usize) -> impl Strategy<Value = Place> {
    let side = || prop_oneof![Just(Side::Host), Just(Side::Device)];
    let all = vec![LayerPlacement::all(Side::Device); layers];
    let blocks = prop_oneof![
        2 => prop::collection::vec(any_layer(), layers),
        1 => Just(all),
        1 => (0..=layers).prop_map(move |k| Placement::boundary(k, layers, 0, 0).layers),
    ];
    let far = prop_oneof![Just(Some(Far::Attend)), Just(Some(Far::Stream)), Just(None)];
    let pages = prop_oneof![1 => Just(None), 3 => (8..16usize).prop_map(Some)];
    (side(), blocks, side(), pages, far).prop_map(|(embedding, layers, head, kv_pages, far)| Place {
        placement: Placement {
            embedding,
            layers,
            head,
            device_pages: 0,
            host_pages: 0,
            windows: vec![],
            staging: Staging::Ahead,
            copy_lane_rows: COPY_LANE_ROWS,
            stream_rows: 0,
        },
        kv_pages,
        far,
        follow: false,
    })
}

/// Runs `acts`, and compares the bits of every row's logits.
fn check(
    world: &World,
    accel: &Arc<dyn Accelerator>,
    place: &Place,
    acts: &[Act],
) -> Result<usize, TestCaseError> {
    let follow = place.follow.then_some(0.0);
    let o = Options { kv_pages: place.kv_pages, far: place.far, follow, ..world.options() };
    run(world, &o, accel, &place.placement, acts, &mut || ())
}

/// The same in an engine with these options. Before each step `mishap` may plan a fault: then the step is made again.
fn run(
    world: &World,
    o: &Options,
    accel: &Arc<dyn Accelerator>,
    placement: &Placement,
    acts: &[Act],
    mishap: &mut dyn FnMut(),
) -> Result<usize, TestCaseError> {
    let fail = |e: tandem::Error| TestCaseError::fail(e.to_string());
    let m = &world.m;
    let p = placement.clone();
    let mut e = Engine::placed(m.spec.clone(), &m.weights, o, accel.clone(), "test", "test", p, &|_| ())
        .map_err(fail)?;
    let free = e.free_pages();
    let mut seqs: Vec<(RequestId, usize)> = (0..SEQUENCES).map(|i| (e.add(), i % 2)).collect();
    let mut compared = 0;
    for act in acts {
        match act {
            Act::Cut { seq, parts } => {
                let id = seqs[*seq].0;
                e.truncate(id, e.len(id) * parts / 32);
            }
            Act::Renew { seq } => {
                e.remove(seqs[*seq].0);
                seqs[*seq] = (e.add(), 1 - seqs[*seq].1);
            }
            Act::Step { rows, second, lanes, all } => {
                let fits = |i: &usize| rows[*i] > 0 && e.len(seqs[*i].0) + rows[*i] <= CONTEXT;
                let chosen: Vec<usize> = (0..SEQUENCES).filter(fits).collect();
                if chosen.is_empty() {
                    continue;
                }
                let logits = if *all { Wants::All } else { Wants::Last };
                let ranges: Vec<_> =
                    chosen.iter().map(|&i| e.len(seqs[i].0)..e.len(seqs[i].0) + rows[i]).collect();
                let inputs: Vec<NewTokens<'_>> = chosen
                    .iter()
                    .zip(&ranges)
                    .map(|(&i, r)| NewTokens {
                        id: seqs[i].0,
                        tokens: &world.texts[seqs[i].1][r.clone()],
                        wants: logits,
                    })
                    .collect();
                let split: Vec<u8> = chosen.iter().map(|&i| u8::from(second[i])).collect();
                let flow = if *lanes { Flow::TwoLanes } else { Flow::Serial };
                let got = loop {
                    mishap();
                    match sub_batches::forward(&mut e, &inputs, &split, flow, &Moves::default()) {
                        Ok(got) => break got,
                        Err(error) if Chaos::planned(&error) => {}
                        Err(error) => return Err(fail(error)),
                    }
                    for (&i, r) in chosen.iter().zip(&ranges) {
                        prop_assert_eq!(e.len(seqs[i].0), r.start, "a step that failed stores nothing");
                    }
                };
                let mut at = 0;
                for (&i, r) in chosen.iter().zip(&ranges) {
                    let positions = if *all { r.clone() } else { r.end - 1..r.end };
                    for position in positions {
                        let want = world.want(seqs[i].1, position..position + 1);
                        let row = &got[at..at + want.len()];
                        let differ = row.iter().zip(want).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
                        prop_assert!(
                            differ == 0,
                            "sequence {i}, position {position} of {r:?}: {differ} of {} logits have other bits; {:?}, alone {:?}",
                            want.len(),
                            &row[..3],
                            &want[..3]
                        );
                        (at, compared) = (at + want.len(), compared + 1);
                    }
                }
                prop_assert_eq!(at, got.len());
            }
        }
    }
    seqs.into_iter().for_each(|(seq, _)| e.remove(seq));
    prop_assert_eq!(e.free_pages(), free, "every page came back");
    world.exchanged.set(world.exchanged.get() + e.exchanged_experts());
    Ok(compared)
}

/// The same for a mixture: both parts of a feed-forward are on one side, or its experts are divided or streamed alone.
fn any_mixture(spec: &ModelSpec) -> impl Strategy<Value = Place> + use<> {
    let counts: Vec<usize> = (0..spec.n_layers).map(|l| spec.experts_of(l).map_or(0, |e| e.count)).collect();
    let divided = prop::option::of(any::<prop::sample::Index>());
    let how = prop::collection::vec((divided, any::<bool>()), counts.len());
    (any_place(counts.len()), how, 0..9u32, any::<bool>()).prop_map(move |(mut place, how, from, follow)| {
        (place.placement.stream_rows, place.follow) = (from, follow);
        let layers = place.placement.layers.iter_mut().zip(how).zip(&counts);
        for ((layer, (divided, alone)), &count) in layers.filter(|(_, count)| **count > 0) {
            if layer.weights == Residence::Streamed && alone {
                layer.weights = Residence::StreamedExperts;
            }
            for policy in [&mut layer.prefill, &mut layer.decode] {
                policy.0[Sublayer::Down as usize] = policy.0[Sublayer::Up as usize];
            }
            if let Some(n) = divided.filter(|_| layer.weights == Residence::Both) {
                for policy in [&mut layer.prefill, &mut layer.decode] {
                    policy.0[Sublayer::Up as usize] = Side::Device;
                    policy.0[Sublayer::Down as usize] = Side::Device;
                }
                layer.device_experts = 1 + n.index(count - 1) as u16;
            }
        }
        place
    })
}

/// Returns how many experts have changed sides.
fn any_place_and_batch(name: &str, dtypes: &[&str], cases: u32) -> u64 {
    let mut exchanged = 0;
    for dtype in dtypes {
        for (isa, kv) in
            [(Isa::best(), KvType::BF16), (Isa::best(), KvType::Q8), (Isa::Reference, KvType::F16)]
        {
            let world = World::new(name, dtype, isa, kv);
            let accel = device();
            let places = match world.m.spec.experts {
                None => any_place(world.m.spec.n_layers).boxed(),
                Some(_) => any_mixture(&world.m.spec).boxed(),
            };
            let strategy = (places, prop::collection::vec(any_act(), 1..24));
            let compared = std::cell::Cell::new(0);
            // How many rows a case has is chance: of few cases all may be short. Then there are as many cases again.
            let enough = 20 * cases as usize;
            for again in 0.. {
                let config = Config { cases, max_shrink_iters: 200, ..Config::default() };
                TestRunner::new(config)
                    .run(&strategy, |(place, acts)| {
                        compared.set(compared.get() + check(&world, &accel, &place, &acts)?);
                        Ok(())
                    })
                    .unwrap_or_else(|e| panic!("{name} {dtype} {isa}: {e}"));
                if compared.get() > enough {
                    break;
                }
                assert!(again < 3, "only {} rows were compared", compared.get());
            }
            exchanged += world.exchanged.get();
        }
    }
    exchanged
}

/// Prompts that end in one step: behind the last attention their last rows are put side by side. Also where this attention is in
/// parts, and beside decode rows.
#[test]
fn prompts_that_end_together_have_the_same_bits() {
    let step = |rows| Act::Step { rows, second: [false; SEQUENCES], lanes: false, all: false };
    let acts = [step([13, 12, 15]), step([20, 1, 17]), step([1, 1, 1]), step([12, 27, 1])];
    for name in ["tiny-llama", "tiny-gemma3", "tiny-opt", "tiny-gpt-oss"] {
        let world = World::new(name, "q8_0", Isa::best(), KvType::BF16);
        let (n, accel) = (world.m.spec.n_layers, device());
        for k in 0..n {
            for far in [None, Some(Far::Attend), Some(Far::Stream)] {
                let placement = Placement::boundary(k, n, 0, 0);
                let place = Place { placement, kv_pages: far.map(|_| 8), far, follow: false };
                let compared =
                    check(&world, &accel, &place, &acts).unwrap_or_else(|e| panic!("{name} {k}: {e}"));
                assert_eq!(compared, 3 * acts.len());
            }
        }
    }
}

/// Eight times what the device holds, through several of the longer sums that fast attention makes: pages that left are attended by
/// the CPU, or streamed, beside those that stay.
#[test]
fn eight_times_the_devices_pages_have_the_same_bits() {
    let (pages, context) = (3, 8 * 3 * 32);
    for name in ["tiny-llama", "tiny-gemma3", "tiny-gpt-oss"] {
        let m = load(&format!("synth:{name},dtype=q8_0,seed=11,ctx={context}")).unwrap();
        let text: Vec<u32> =
            (0..context).map(|i| (i * i * 31 + i * 7) as u32 % m.spec.vocab as u32).collect();
        let o = Options { mode: Mode::Deterministic, threads: Some(2), ..Options::new(Isa::best(), context) };
        let all = Options { chunk: context, logits: context, ..o.clone() };
        let mut e = models::engine(&m, &all);
        let seq = e.add();
        let want = e.forward(&[NewTokens { id: seq, tokens: &text, wants: Wants::All }]).unwrap().to_vec();
        let accel = device();
        for far in [Far::Attend, Far::Stream] {
            let o = Options { chunk: 32, logits: 32, kv_pages: Some(pages), far: Some(far), ..o.clone() };
            let place = Placement::all(Side::Device, m.spec.n_layers, 0);
            let (spec, accel) = (m.spec.clone(), accel.clone());
            let mut e = Engine::placed(spec, &m.weights, &o, accel, "test", "test", place, &|_| ()).unwrap();
            e.trace();
            let (seq, mut at) = (e.add(), 0);
            while at < context {
                let n = if at % 96 == 64 { 1 } else { 32 - at % 32 }.min(context - at);
                let got = e
                    .forward(&[NewTokens { id: seq, tokens: &text[at..at + n], wants: Wants::All }])
                    .unwrap();
                let vocab = m.spec.vocab;
                let same = got.iter().zip(&want[at * vocab..]).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same && got.len() == n * vocab, "{name} {far:?}: positions {at} to {}", at + n);
                at += n;
            }
            let merges = e.timeline().unwrap().spans.iter().filter(|s| s.name == "merge").count();
            // Of layers with a window, what has left the device is behind it.
            let full = (0..m.spec.n_layers).filter(|&l| m.spec.window_of(l).is_none()).count();
            assert!(full > 0 && merges > 20 * full, "{name} {far:?}: {merges} merges in {full} layers");
        }
    }
}

/// Experts on the host behind attention that is not: of every layer, of every other one, and behind a layer of the host's; and experts of
/// each layer on both sides.
fn experts_apart(spec: &ModelSpec) -> Vec<Placement> {
    let n = spec.n_layers;
    let of = |which: &dyn Fn(usize) -> bool, change: &dyn Fn(usize, &mut LayerPlacement)| {
        let mut placement = Placement::all(Side::Device, n, 0);
        for (l, layer) in placement.layers.iter_mut().enumerate().filter(|(l, _)| which(*l)) {
            layer.weights = Residence::Both;
            change(l, layer);
        }
        placement
    };
    let on_host = |_: usize, layer: &mut LayerPlacement| {
        let policy = Policy::from_bits([false, false, false, false, true, true]);
        (layer.prefill, layer.decode) = (policy, policy);
    };
    let divided = |l: usize, layer: &mut LayerPlacement| match spec.experts_of(l) {
        Some(e) => layer.device_experts = (e.count / 2) as u16,
        None => on_host(l, layer),
    };
    let mut behind = of(&|_| true, &on_host);
    behind.layers[0] = LayerPlacement::all(Side::Host);
    vec![of(&|_| true, &on_host), of(&|l| l % 2 == 0, &on_host), behind, of(&|_| true, &divided)]
}

/// Cohorts (APEX) over weights on both sides: rows that pass the layers in several steps, by whichever side has each, beside rows of
/// the device.
#[test]
fn cohorts_have_the_same_bits_over_any_layer_split() {
    for (name, dtype) in [
        ("tiny-llama", "q8_0"),
        ("tiny-gemma3", "q4_k"),
        ("tiny-opt", "f32"),
        ("tiny-gpt-oss,experts=mxfp4", "q8_0"),
        ("tiny-qwen3-moe", "q8_0"),
        // Its first layer is dense.
        ("tiny-qwen2-moe,layers=3", "bf16"),
    ] {
        let world = World::new(name, dtype, Isa::best(), KvType::BF16);
        let (n, vocab) = (world.m.spec.n_layers, world.m.spec.vocab);
        let mut places: Vec<Placement> = (0..=n).map(|k| Placement::boundary(k, n, 0, 0)).collect();
        // The host's layers last, and every other one.
        let on_host = |which: &dyn Fn(usize) -> bool| {
            let mut placement = Placement::all(Side::Device, n, 0);
            let layers = placement.layers.iter_mut().enumerate().filter(|(l, _)| which(*l));
            layers.for_each(|(_, layer)| *layer = LayerPlacement::all(Side::Host));
            placement
        };
        places.extend([on_host(&|l| l + 1 == n), on_host(&|l| l % 2 == 0)]);
        if world.m.spec.experts.is_some() {
            places.extend(experts_apart(&world.m.spec));
        }
        for placement in places {
            let o = Options { sub_batches: 3, far_pages: Some(24), kv_pages: Some(12), ..world.options() };
            let (spec, accel) = (world.m.spec.clone(), device());
            let placed = format!("{placement:?}");
            let e =
                Engine::placed(spec, &world.m.weights, &o, accel, "test", "test", placement.clone(), &|_| ());
            let mut e = e.unwrap();
            // One on the device, two on the host, each a cohort; a text and what has been said of it.
            let mut seqs = Vec::new();
            for (side, text, first) in [(Side::Device, 0, 9), (Side::Host, 1, 70), (Side::Host, 0, 33)] {
                let seq = e.add_at(side).unwrap();
                for chunk in world.texts[text][..first].chunks(ROWS) {
                    e.forward(&[NewTokens { id: seq, tokens: chunk, wants: Wants::Last }]).unwrap();
                }
                seqs.push((seq, text, 0));
            }
            let mut steps = 0;
            while seqs.iter().any(|&(.., said)| said < 3) {
                steps += 1;
                assert!(steps < 100, "{name}: no end over {placed}");
                let token = |&(seq, text, _): &(RequestId, usize, usize)| {
                    let at = e.len(seq);
                    (seq, text, at, &world.texts[text][at..at + 1])
                };
                let rows: Vec<_> = seqs.iter().map(token).collect();
                let input = |i: usize| NewTokens { id: rows[i].0, tokens: rows[i].3, wants: Wants::Last };
                let begin: Vec<[NewTokens<'_>; 1]> = [1, 2]
                    .into_iter()
                    .filter(|&i| e.parked(rows[i].0).is_none())
                    .map(|i| [input(i)])
                    .collect();
                let own = [input(0)];
                let batches: Vec<&[NewTokens<'_>]> =
                    [&own[..]].into_iter().chain(begin.iter().map(|c| &c[..])).collect();
                let cohorts = e.run_rows(&batches, Flow::Async, &[], |_| ()).unwrap().cohorts;
                let ended = cohorts.iter().filter_map(|c| Some((c.groups[0].request, c.rows.clone()?.start)));
                for (seq, row) in [(rows[0].0, 0)].into_iter().chain(ended) {
                    let &(_, text, at, _) = rows.iter().find(|r| r.0 == seq).unwrap();
                    let got = &e.logits()[row * vocab..(row + 1) * vocab];
                    let differ = got
                        .iter()
                        .zip(world.want(text, at..at + 1))
                        .filter(|(a, b)| a.to_bits() != b.to_bits());
                    assert_eq!(differ.count(), 0, "{name}, position {at} of text {text}, over {placed}");
                    seqs.iter_mut().find(|s| s.0 == seq).unwrap().2 += 1;
                }
            }
            // At a fixed lag a token takes as many steps as there are places to park, and one.
            assert_eq!(steps, 3 * placement.cohort_iterations() as usize, "{name} over {placed}");
        }
    }
}

#[test]
fn a_llama_has_the_same_bits_anywhere() {
    any_place_and_batch("tiny-llama", &["f32", "bf16", "q8_0", "q4_k"], 16);
}

/// Experts, of a layer on either side, or divided between them.
#[test]
fn mixtures_have_the_same_bits_anywhere() {
    let mut exchanged = any_place_and_batch("tiny-qwen3-moe", &["bf16", "q8_0"], 16);
    // An expert of all rows, and layers without experts.
    exchanged += any_place_and_batch("tiny-qwen2-moe", &["q4_k"], 16);
    assert!(exchanged > 0, "no expert has changed sides");
}

/// Sinks, windows of every other layer, biases of all matrices and of routers.
#[test]
fn a_gpt_oss_has_the_same_bits_anywhere() {
    let exchanged = any_place_and_batch("tiny-gpt-oss,experts=mxfp4", &["bf16", "q8_0"], 16);
    assert!(exchanged > 0, "no expert has changed sides");
}

/// Norms of heads.
#[test]
fn a_qwen3_has_the_same_bits_anywhere() {
    any_place_and_batch("tiny-qwen3", &["bf16", "q8_0"], 16);
}

/// Windows of some layers, norms of what sublayers add, large activations.
#[test]
fn a_gemma3_has_the_same_bits_anywhere() {
    any_place_and_batch("tiny-gemma3", &["f32", "q4_k"], 16);
}

/// Soft-capped scores, windows of every other layer.
#[test]
fn a_gemma2_has_the_same_bits_anywhere() {
    any_place_and_batch("tiny-gemma2", &["q8_0"], 8);
}

/// Norms of all queries and all keys, none before a sublayer.
#[test]
fn an_olmo2_has_the_same_bits_anywhere() {
    any_place_and_batch("tiny-olmo2", &["bf16"], 8);
}

/// A window in every layer.
#[test]
fn a_mistral_has_the_same_bits_anywhere() {
    any_place_and_batch("tiny-mistral", &["q8_0"], 16);
}

/// Layer norms, biases, learned positions, a feed-forward without a gate.
#[test]
fn an_opt_has_the_same_bits_anywhere() {
    any_place_and_batch("tiny-opt", &["f32", "q8_0"], 12);
}

/// A machine of any temper: slow on either side, unpunctual, with little memory, with launches that are refused.
#[test]
fn no_temper_of_the_machine_changes_a_bit() {
    let world = World::new("tiny-qwen3", "q8_0", Isa::best(), KvType::BF16);
    let strategy = (Chaos::any(), any_place(world.m.spec.n_layers), prop::collection::vec(any_act(), 1..16));
    let planned = std::cell::Cell::new(0);
    let mut runner = TestRunner::new(Config { cases: 40, max_shrink_iters: 100, ..Config::default() });
    runner
        .run(&strategy, |(mut chaos, place, acts)| {
            let (runtime, accel) = chaos.accelerator();
            let options = Options { kv_pages: place.kv_pages, far: place.far, ..world.options() };
            let options = chaos.squeeze(options);
            let mut mishap = || {
                let plan = chaos.mishap();
                planned.set(planned.get() + usize::from(plan.refuse_launch.is_some()));
                runtime.set_faults(plan);
            };
            run(&world, &options, &accel, &place.placement, &acts, &mut mishap)?;
            Ok(())
        })
        .unwrap();
    assert!(planned.get() > 0, "no fault was planned");
}
