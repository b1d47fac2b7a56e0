//! Prompts of many requests over streamed layers: in mini-batches within one step, each layer crosses the link once.

use std::sync::Arc;

use tandem::device::Accelerator;
use tandem::device::emulated::{EmulatedAccelerator, EmulatedOptions, EmulatedRuntime};
use tandem::engine::{Batcher, Engine, Options, Request};
use tandem::model::LoadedModel;
use tandem::program::{LayerPlacement, Placement, Policy, Residence, Side};

use super::world::{self, alone, drain, model, options, request};

/// Every layer streamed to the device, keys and values there.
fn engine(m: &LoadedModel, sequences: usize, sub_batches: usize) -> Engine {
    let accel: Arc<dyn Accelerator> = Arc::new(EmulatedAccelerator::new(Arc::new(
        EmulatedRuntime::new(EmulatedOptions::default()).unwrap(),
    )));
    let (n, device) = (m.spec.n_layers, Policy::all(Side::Device));
    let layer = LayerPlacement {
        weights: Residence::Streamed,
        prefill: device,
        decode: device,
        kv: Side::Device,
        device_experts: 0,
    };
    let placement = Placement { layers: vec![layer; n], ..Placement::all(Side::Device, n, 0) };
    let o = Options { sub_batches, ..options(sequences, None) };
    Engine::placed(m.spec.clone(), &m.weights, &o, accel, "emulated", "stream", placement, &|_| ()).unwrap()
}

#[test]
fn sub_batches_share_each_streamed_layers_way_across_the_link() {
    let m = model();
    let layers = m.spec.n_layers;
    let requests: Vec<Request> = (0..6).map(|i| request(2 * i, m.spec.vocab)).collect();
    let mut lone = world::engine(&m, &options(1, None));
    let answers: Vec<_> = requests.iter().map(|r| alone(&mut lone, r)).collect();
    let mut steps = Vec::new();
    for sub_batches in [1, 3] {
        let mut e = engine(&m, 6, sub_batches);
        e.trace();
        let mut all = Batcher::new(e);
        assert_eq!(all.limits().sub_batches as usize, sub_batches);
        let streams: Vec<_> = requests.iter().map(|r| all.submit(r.clone()).unwrap().1).collect();
        let mut most = 0;
        let mut n = 0;
        while !all.is_idle() {
            most = most.max(all.step().rows);
            n += 1;
        }
        assert_eq!(most, 16 * sub_batches, "as many rows in a step as sub-batches have room for");
        for (events, answer) in streams.iter().zip(&answers) {
            let (tokens, end) = drain(events);
            assert_eq!(&(tokens, end.unwrap()), answer, "{sub_batches} sub-batches");
        }
        let timeline = all.into_engine().timeline().unwrap();
        let mut streamed = vec![0; n];
        timeline.spans.iter().filter(|s| s.name == "stream").for_each(|s| streamed[s.step as usize] += 1);
        assert_eq!(streamed, vec![layers; n], "each layer once a step");
        steps.push(n);
    }
    assert!(steps[1] < steps[0], "fewer steps, fewer crossings: {steps:?}");
}
