//! What is asked of the device beside the tokens themselves.

use std::sync::Arc;

use super::*;
use crate::device::emulated::{EmulatedAccelerator, EmulatedOptions, EmulatedRuntime};
use crate::engine::Options;
use crate::model::load;
use crate::program::Placement;
use crate::sched;
use crate::simd::Isa;

/// Requests whose tokens are drawn, some of which live on the host and advance as cohorts: whole rows of logits stay on the device.
#[test]
fn the_device_finds_the_likeliest_tokens_in_asynchronous_steps_too() {
    let m = load("synth:tiny-llama,dtype=q8_0,seed=3,layers=3").unwrap();
    assert!(m.spec.vocab > TOP_K, "a vocabulary of which something is left out");
    let mut options = Options::new(Isa::Reference, 96);
    (options.threads, options.sequences, options.sub_batches, options.chunk) = (Some(1), 8, 3, 24);
    (options.kv_pages, options.far_pages) = (Some(4), Some(16));
    let runtime = Arc::new(EmulatedRuntime::new(EmulatedOptions::default()).unwrap());
    let accel = Arc::new(EmulatedAccelerator::new(runtime));
    let placement = Placement::all(Side::Device, 3, 0);
    let engine =
        Engine::placed(m.spec.clone(), &m.weights, &options, accel, "test", "test", placement, &|_| ());
    let apex = sched::by_name("apex").unwrap();
    let mut all = Batcher::with(engine.unwrap(), apex, Box::new(sched::Untimed));
    let handles: Vec<_> = (0..6)
        .map(|i| {
            let prompt = (0..20u32).map(|t| (t * t * 31 + 7 * i) % 251).collect();
            let sampling = SamplerParams { temperature: 0.8, seed: u64::from(i), ..SamplerParams::default() };
            all.submit(Request { prompt, sampling, max_tokens: 16, ..Request::default() })
        })
        .collect();
    let (mut asynchronous, mut with_results) = (0, 0);
    for _ in 0..500 {
        let report = all.step();
        if report.flow == Some(Flow::Async) {
            asynchronous += 1;
            if report.tokens > 0 {
                with_results += 1;
                assert!(all.engine.top(0).is_some(), "whole rows of logits were copied: {report:?}");
            }
        }
    }
    assert!(
        asynchronous > 5 && with_results > 5,
        "{asynchronous} asynchronous steps, {with_results} with tokens"
    );
    drop(handles);
}
