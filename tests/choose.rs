//! Placements by memory: each strategy uses as much of the device as there is, within the dry run's own numbers, and what
//! it chose runs in exactly that much.

mod support;

use std::sync::Arc;

use tandem::Error;
use tandem::device::accelerator::Accelerator;
use tandem::device::emulated::{EmulatedAccelerator, EmulatedOptions, EmulatedRuntime};
use tandem::engine::{Choice, Engine, Input, Logits, Options, Sizes, Strategy, choose};
use tandem::model::{LoadedModel, load};
use tandem::program::{Policy, Residence, Side};
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
        let logits = e.forward(&[Input { seq, tokens: &[token], logits: Logits::Last }]).unwrap();
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
        (lia(Some(n), Some(on_host), None), "leaves none to --policy".to_owned()),
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
