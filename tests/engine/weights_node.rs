//! Weights on a chosen memory node: the same tokens, wherever they lie; a node that does not exist is a sentence.

use std::sync::Arc;

use crate::support::command;
use tandem::device::emulated::{EmulatedAccelerator, EmulatedOptions, EmulatedRuntime};
use tandem::engine::{Engine, Options};
use tandem::host::{NumaWish, numa_nodes};
use tandem::model::{LoadedModel, load};
use tandem::program::{LayerPlacement, Placement, Policy, Residence, Side};
use tandem::simd::Isa;

const PROMPT: [u32; 5] = [3, 1, 4, 1, 5];

fn options(wish: Option<NumaWish>) -> Options {
    let weights_node = wish.map(|w| w.among(&numa_nodes()).unwrap());
    Options { threads: Some(2), weights_node, ..Options::new(Isa::best(), 64) }
}

/// All on the CPU, and streamed to a device that gives half of the sublayers back.
fn logits(m: &LoadedModel, o: &Options, streamed: bool) -> tandem::Result<Vec<f32>> {
    let (spec, n) = (m.spec.clone(), m.spec.n_layers);
    let mut e = if streamed {
        let accel =
            Arc::new(EmulatedAccelerator::new(Arc::new(EmulatedRuntime::new(EmulatedOptions::default())?)));
        let (weights, kv) = (Residence::Streamed, Side::Host);
        let layer = LayerPlacement {
            weights,
            prefill: Policy::all(Side::Device),
            decode: Policy::all(Side::Host),
            kv,
            device_experts: 0,
        };
        let placement = Placement { layers: vec![layer; n], ..Placement::all(Side::Host, n, 0) };
        Engine::placed(spec, &m.weights, o, accel, "emulated", "lia", placement, &|_| ())?
    } else {
        Engine::new(spec, &m.weights, o, &|_| ())?
    };
    let seq = e.add();
    e.prefill(seq, &PROMPT, |_| ())
}

#[test]
fn weights_give_the_same_bits_on_whichever_node_they_lie() {
    let Some(last) = numa_nodes().last().map(|n| n.node) else {
        println!("skipped: this system does not tell its memory nodes");
        return;
    };
    // Packed matrices, and rows of floats, which otherwise stay in the file.
    for name in ["synth:tiny-llama,dtype=q4_0,seed=1", "synth:tiny-qwen3,dtype=bf16,seed=1"] {
        let m = load(name).unwrap();
        for streamed in [false, true] {
            let want = logits(&m, &options(None), streamed).unwrap();
            for wish in [NumaWish::Nodes(vec![last]), NumaWish::Interleave] {
                match logits(&m, &options(Some(wish.clone())), streamed) {
                    Ok(got) => assert_eq!(got, want, "{name} {wish:?}, streamed: {streamed}"),
                    Err(e) if e.to_string().contains("the system refuses") => {
                        println!("skipped: {e}");
                        return;
                    }
                    Err(e) => panic!("{e}"),
                }
            }
        }
    }
}

#[test]
fn a_node_that_does_not_exist_is_named_with_those_that_do() {
    let home = tempfile::tempdir().unwrap();
    let args = ["generate", "-m", "synth:tiny-llama", "--device", "cpu", "--weights-node", "4095", "x"];
    let out = command::run(command::tandem(home.path()).args(args));
    if numa_nodes().is_empty() {
        command::assert_error(&out, 1, "does not tell its memory nodes");
        return;
    }
    command::assert_error(&out, 2, "--weights-node 4095: there is no such node");
    let error = command::stderr(&out);
    assert!(numa_nodes().iter().all(|n| error.contains(&format!("{} (cpus", n.node))), "{error}");
}
