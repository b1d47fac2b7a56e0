//! Placements by memory: each strategy uses as much of the device as there is, within the dry run's own numbers, and what
//! it chose runs in exactly that much. By predicted time: nothing that fits is faster, what the user fixed stays.

use std::sync::Arc;

use tandem::Error;
use tandem::device::Accelerator;
use tandem::device::emulated::{EmulatedAccelerator, EmulatedOptions, EmulatedRuntime};
use tandem::engine::{
    Among, Choice, Engine, NewTokens, Options, Prices, Sizes, Strategy, Timed, choose, choose_by_time,
};
use tandem::model::{LoadedModel, load};
use tandem::plan::{self, Hardware, Roofline, Workload, hardware, programs};
use tandem::program::{Placement, Policy, Residence, Side, Wants};
use tandem::simd::Isa;

const TOKENS: usize = 40;
const LIA: Strategy = Strategy::Lia { pinned: None, prefill: None, decode: None };

fn capped(memory: u64) -> Arc<dyn Accelerator> {
    let options = EmulatedOptions { memory, ..Default::default() };
    Arc::new(EmulatedAccelerator::new(Arc::new(EmulatedRuntime::new(options).expect("it starts"))))
}

/// With a head of its own: a shared table costs the device nothing beside the head.
fn model() -> LoadedModel {
    load("synth:tiny-llama,dtype=q4_k,seed=2,layers=8").unwrap()
}

fn options() -> Options {
    let mut options = Options::new(Isa::Reference, TOKENS);
    options.threads = Some(2);
    options
}

fn chosen(m: &LoadedModel, accel: &Arc<dyn Accelerator>, strategy: Strategy) -> tandem::Result<Choice> {
    choose(&Sizes::new(&m.spec, &m.weights, &options(), &**accel)?, strategy)
}

/// A prompt and a few tokens: that it runs in the memory there is.
fn run(m: &LoadedModel, accel: Arc<dyn Accelerator>, choice: &Choice) {
    let placement = choice.placement.clone();
    let mut e =
        Engine::placed(m.spec.clone(), &m.weights, &options(), accel, "test", "test", placement, &|_| ())
            .unwrap_or_else(|e| panic!("{choice:?}: {e}"));
    let seq = e.add();
    e.prefill(seq, &[7; TOKENS - 2], |_| ()).unwrap();
    for token in [3, 4] {
        let logits = e.forward(&[NewTokens { id: seq, tokens: &[token], wants: Wants::Last }]).unwrap();
        assert!(logits.iter().all(|x| x.is_finite()));
    }
}

/// From much memory to a byte less than the last choice needs, until nothing fits: every choice on the way.
fn ladder(strategy: Strategy) -> Vec<Choice> {
    let m = model();
    let mut found: Vec<Choice> = Vec::new();
    let mut memory = 1 << 30;
    loop {
        let accel = capped(memory);
        match chosen(&m, &accel, strategy) {
            Err(Error::Capacity(said)) => {
                for part in ["weights", "KV", "activations", "on the device", "free there", "of host memory"]
                {
                    assert!(said.contains(part), "{part} wanted: {said}");
                }
                return found;
            }
            Err(e) => panic!("{e}"),
            Ok(choice) => {
                assert!(choice.device.total() <= memory);
                if let Some(before) = found.last() {
                    // What did not fit any more stands before it, perhaps with others that do not either.
                    assert!(choice.device.total() < before.device.total(), "{choice:?} after {before:?}");
                    assert!(choice.next.as_ref().is_some_and(|(_, bytes)| *bytes > memory), "{choice:?}");
                }
                if choice.device.total() == 0 {
                    found.push(choice);
                    return found;
                }
                memory = choice.device.total();
                run(&m, capped(memory), &choice);
                found.push(choice);
                memory -= 256;
            }
        }
    }
}

#[test]
fn helm_puts_as_few_units_on_the_host_as_fit() {
    let n = model().spec.n_layers;
    let all = ladder(Strategy::Helm { boundary: None });
    assert_eq!(all.iter().map(|c| c.k.unwrap()).collect::<Vec<_>>(), (0..=n + 2).collect::<Vec<_>>());
    let cpu = all.last().unwrap();
    assert!(!cpu.placement.uses(Side::Device) && cpu.host.kv > 0);
}

#[test]
fn lia_pins_as_many_blocks_as_fit_then_the_head() {
    let n = model().spec.n_layers;
    let all = ladder(LIA);
    let mut pinned: Vec<usize> = all.iter().map(|c| c.pinned.unwrap()).collect();
    pinned.dedup();
    // Two staging buffers take the room of two blocks: nothing is gained by streaming only one or two.
    assert_eq!(pinned[0], n);
    assert!(pinned[1] < n - 2 && pinned[1] > 0, "{pinned:?}");
    assert_eq!(pinned[1..], (0..=pinned[1]).rev().collect::<Vec<_>>());
    for choice in &all {
        let pinned = choice.pinned.unwrap();
        for (l, layer) in choice.placement.layers.iter().enumerate() {
            let want = match l < pinned {
                true => (Residence::Device, [0; 6], [0; 6], Side::Device),
                false => (Residence::Streamed, [0; 6], [1; 6], Side::Host),
            };
            assert_eq!((layer.weights, layer.prefill.bits(), layer.decode.bits(), layer.kv), want, "{l}");
        }
    }
}

#[test]
fn streaming_keeps_keys_and_values_on_the_device_while_they_fit() {
    let all = ladder(Strategy::Stream);
    let mut sides: Vec<Side> = all.iter().map(|c| c.placement.layers[0].kv).collect();
    sides.dedup();
    assert_eq!(sides, [Side::Device, Side::Host]);
    for layer in all.iter().flat_map(|c| &c.placement.layers) {
        let decode = if layer.kv == Side::Host { [0, 1, 1, 0, 0, 0] } else { [0; 6] };
        assert_eq!((layer.weights, layer.prefill.bits()), (Residence::Streamed, [0; 6]));
        assert_eq!(layer.decode.bits(), decode);
    }
}

#[test]
fn what_the_user_fixed_is_kept_or_refused() {
    let m = model();
    let n = m.spec.n_layers;
    let much = capped(1 << 30);
    for k in 0..=n + 2 {
        let choice = chosen(&m, &much, Strategy::Helm { boundary: Some(k) }).unwrap();
        assert_eq!((choice.k, choice.next), (Some(k), None));
    }
    let (on_host, on_device) = (Policy::all(Side::Host), Policy::all(Side::Device));
    let lia = |pinned, prefill, decode| Strategy::Lia { pinned, prefill, decode };
    // Vectors get a block at least; all on the host wants no weights on the device.
    let choice = chosen(&m, &much, lia(None, Some(on_host), None)).unwrap();
    assert_eq!((choice.pinned, choice.policies), (Some(n - 1), Some((on_host, on_host))));
    assert_eq!(choice.placement.layers[n - 1].weights, Residence::Host);
    let choice = chosen(&m, &much, lia(Some(1), None, Some(on_device))).unwrap();
    assert_eq!((choice.pinned, choice.policies), (Some(1), Some((on_device, on_device))));
    assert_eq!(choice.placement.layers[0].weights, Residence::Device);
    assert_eq!(choice.placement.layers[1].weights, Residence::Streamed);

    let split = Policy::from_bits([false, true, false, false, false, false]);
    for (strategy, want) in [
        (Strategy::Helm { boundary: Some(n + 3) }, format!("the model has {} units", n + 2)),
        (lia(Some(n + 1), None, None), format!("the model has {n} blocks")),
        (lia(Some(n), Some(on_host), None), "leaves none to `policy`".to_owned()),
        (lia(None, None, Some(split)), "computes scores and values on different sides".to_owned()),
    ] {
        match chosen(&m, &much, strategy) {
            Err(Error::Usage(said)) => assert!(said.contains(&want), "{said}"),
            other => panic!("{strategy:?}: {other:?}"),
        }
    }
    // A boundary that was asked for is not moved to one that fits.
    let little =
        capped(chosen(&m, &much, Strategy::Helm { boundary: Some(2) }).unwrap().device.total() - 256);
    let said = chosen(&m, &little, Strategy::Helm { boundary: Some(2) }).unwrap_err().to_string();
    assert!(said.contains("boundary 2 of"), "{said}");
    let auto = chosen(&m, &little, Strategy::Helm { boundary: None }).unwrap();
    assert_eq!(auto.k, Some(3));
}

/// A small GPU, and a CPU with `flops`.
fn machine(flops: f64) -> Hardware {
    let mut h = hardware::named("rtx4060-laptop").unwrap();
    h.cpu.flops_bf16 = flops;
    h
}

fn work(prompt: u64, gen_len: u64) -> Workload {
    Workload { prompt, gen_len, batch: 1, chunk: TOKENS as u64 }
}

fn by_time(
    m: &LoadedModel,
    accel: &Arc<dyn Accelerator>,
    among: Among,
    h: &Hardware,
    work: Workload,
) -> tandem::Result<Option<Timed>> {
    let sizes = Sizes::new(&m.spec, &m.weights, &options(), &**accel)?;
    let model = plan::Sizes::of_weights(&m.spec, &m.weights, Isa::Reference);
    let costs = Roofline::new(h, &model);
    choose_by_time(&sizes, among, &Prices { costs: &costs, model: &model, work, post_norms: false })
}

/// Whatever the memory: of all boundaries, pins and streams that the choice by memory would allow, none is faster, and what
/// was chosen runs in exactly what it says.
#[test]
fn by_time_nothing_that_fits_is_faster() {
    let m = model();
    let n = m.spec.n_layers;
    let (h, work) = (machine(1e11), work(30, 10));
    let sized = plan::Sizes::of_weights(&m.spec, &m.weights, Isa::Reference);
    let costs = Roofline::new(&h, &sized);
    let seconds = |p: &Placement| programs(&costs, &sized, p, &work).unwrap().total();
    let all = chosen(&m, &capped(1 << 30), Strategy::Helm { boundary: Some(0) }).unwrap().device.total();
    let mut strategies = Vec::new();
    // In a quarter of the memory only two others fit.
    for eighths in [3, 4, 6, 8] {
        let memory = all * eighths / 8;
        let accel = capped(memory);
        let timed = by_time(&m, &accel, Among::All, &h, work).unwrap().expect("the CPU at least");
        let own = seconds(&timed.choice.placement);
        assert!((timed.run.total() - own).abs() <= 1e-9 * own);
        let helms = (0..=n + 2).map(|k| Strategy::Helm { boundary: Some(k) });
        let pins = (0..=n).map(|p| Strategy::Lia { pinned: Some(p), prefill: None, decode: None });
        let mut others = 0;
        for strategy in helms.chain(pins).chain([Strategy::Stream]) {
            if let Ok(choice) = chosen(&m, &accel, strategy) {
                others += 1;
                let t = seconds(&choice.placement);
                assert!(t >= own * (1.0 - 1e-9), "{strategy:?} {t} is faster than {own}: {}", timed.why);
            }
        }
        assert!(others > 2 && timed.fitting >= others, "{others} of {}", timed.fitting);
        assert!(timed.choice.device.total() <= memory && timed.why.starts_with(timed.strategy.name()));
        if timed.choice.placement.uses(Side::Device) {
            run(&m, capped(timed.choice.device.total()), &timed.choice);
        }
        strategies.push((timed.strategy.name(), timed.choice.k));
    }
    assert_eq!(strategies[3], ("gpu-only", Some(0)), "{strategies:?}");
    assert_ne!(strategies[1].0, "gpu-only");
}

/// One placement, two policies: the host's blocks go to the device for a long prompt, and are computed in place for a short one
/// and in decode.
#[test]
fn long_prompts_stream_the_hosts_blocks() {
    let m = model();
    let (h, helm) = (machine(1e11), Among::One(Strategy::Helm { boundary: None }));
    let room = chosen(&m, &capped(1 << 30), Strategy::Helm { boundary: Some(4) }).unwrap().device.total();
    let streams = |work| {
        let timed = by_time(&m, &capped(room), helm, &h, work).unwrap().unwrap();
        assert!(timed.choice.placement.layers.iter().any(|l| l.decode == Policy::all(Side::Host)));
        run(&m, capped(timed.choice.device.total()), &timed.choice);
        timed.choice.placement.layers.iter().any(|l| l.weights == Residence::Streamed)
    };
    assert!(streams(work(38, 1)));
    assert!(!streams(work(1, 30)));
}

#[test]
fn by_time_what_the_user_fixed_is_kept() {
    let m = model();
    let (n, h, w) = (m.spec.n_layers, machine(1e11), work(38, 2));
    let much = capped(1 << 30);
    let of = |strategy| by_time(&m, &much, Among::One(strategy), &h, w);
    for k in 0..=n + 2 {
        let choice = of(Strategy::Helm { boundary: Some(k) }).unwrap().unwrap().choice;
        let sides = Placement { device_pages: 0, host_pages: 0, ..choice.placement };
        assert_eq!((choice.k, sides), (Some(k), Placement::boundary(k, n, 0, 0)));
    }
    let lia = |pinned, prefill, decode| Strategy::Lia { pinned, prefill, decode };
    let (on_host, on_device) = (Policy::all(Side::Host), Policy::all(Side::Device));
    let choice = of(lia(Some(3), None, None)).unwrap().unwrap().choice;
    assert_eq!(choice.pinned, Some(3));
    let choice = of(lia(None, Some(on_host), Some(on_device))).unwrap().unwrap().choice;
    assert_eq!(choice.policies, Some((on_host, on_device)));
    assert!(choice.pinned < Some(n));
    // Not even what was fixed fits; a boundary that there is not.
    assert_eq!(by_time(&m, &capped(1 << 16), Among::One(lia(Some(3), None, None)), &h, w).unwrap(), None);
    let error = of(Strategy::Helm { boundary: Some(n + 3) }).unwrap_err().to_string();
    assert!(error.contains("units"), "{error}");
    // Nothing but the CPU fits a device of 64 KiB.
    let cpu = by_time(&m, &capped(1 << 16), Among::All, &h, w).unwrap().unwrap();
    assert_eq!((cpu.strategy.name(), cpu.choice.k), ("cpu-only", Some(n + 2)));
    assert!(cpu.considered.iter().any(|c| c.strategy.name() == "lia" && c.seconds.is_none()));
}

#[test]
fn choosing_takes_less_than_half_a_second() {
    let m = load("synth:tiny-llama,dtype=q4_k,seed=2,layers=64").unwrap();
    let h = machine(1e12);
    let accel =
        capped(chosen(&m, &capped(1 << 30), Strategy::Helm { boundary: Some(30) }).unwrap().device.total());
    let once = || {
        let begun = std::time::Instant::now();
        by_time(&m, &accel, Among::All, &h, work(30, 10)).unwrap().unwrap();
        begun.elapsed().as_secs_f64()
    };
    let best = (0..3).map(|_| once()).fold(f64::INFINITY, f64::min);
    assert!(best < 0.5, "{best} s");
}
