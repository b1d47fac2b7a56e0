//! Errors in flight end the requests that they belong to; the others go on, and no page is lost.

use std::sync::Arc;

use tandem::device::Accelerator;
use tandem::device::emulated::{EmulatedAccelerator, EmulatedOptions, EmulatedRuntime, FaultPlan};
use tandem::engine::{Batcher, Engine, Finish, Request};
use tandem::model::LoadedModel;
use tandem::program::Placement;
use tandem::tensor::{Bytes, DType, Tensor};

use super::world::{alone, drain, engine, model, options, prompt, request};

/// A model on the device, and on both sides.
fn engines(m: &LoadedModel) -> Vec<(Arc<EmulatedRuntime>, Engine)> {
    [None, Some(1)]
        .map(|k| {
            let runtime = Arc::new(EmulatedRuntime::new(EmulatedOptions::default()).unwrap());
            let accel: Arc<dyn Accelerator> = Arc::new(EmulatedAccelerator::new(runtime.clone()));
            let (spec, o) = (m.spec.clone(), options(4, None));
            let e = match k {
                None => Engine::on_accelerator(spec, &m.weights, &o, accel, "emulated", &|_| ()),
                Some(k) => {
                    let placement = Placement::boundary(k, m.spec.n_layers, 0, 0);
                    Engine::placed(spec, &m.weights, &o, accel, "emulated", "helm", placement, &|_| ())
                }
            };
            (runtime, e.unwrap())
        })
        .into()
}

#[test]
fn a_step_that_fails_once_is_made_again_request_by_request() {
    let m = model();
    // By the CPU: in deterministic mode the bits are the same on the device, on both sides, and when a step is made again.
    let mut lone = engine(&m, &options(1, None));
    let want: Vec<_> = (0..3).map(|i| alone(&mut lone, &request(2 * i, m.spec.vocab)).0).collect();
    for (runtime, e) in engines(&m) {
        let mut all = Batcher::new(e);
        let free = all.limits().all_pages();
        for refuse in [None, Some(1), Some(40), Some(90)] {
            let streams: Vec<_> =
                (0..3).map(|i| all.submit(request(2 * i, m.spec.vocab)).unwrap().1).collect();
            all.step();
            runtime.set_faults(FaultPlan { refuse_launch: refuse, ..FaultPlan::default() });
            while !all.is_idle() {
                assert_eq!(all.step().failed, 0);
            }
            let ends = streams.iter().map(drain).collect::<Vec<_>>();
            assert!(ends.iter().all(|(_, end)| *end == Some(Finish::Length)), "{ends:?}");
            assert!(
                ends.iter().zip(&want).all(|((tokens, _), want)| tokens == want),
                "{ends:?}, alone {want:?}"
            );
        }
        assert_eq!(all.into_engine().free_pages(), free);
    }
}

#[test]
fn a_device_that_is_lost_fails_all_of_them_with_a_sentence_and_no_page_is_lost() {
    let m = model();
    for (runtime, e) in engines(&m) {
        let mut all = Batcher::new(e);
        let free = all.limits().all_pages();
        let streams: Vec<_> = (0..6).map(|i| all.submit(request(i, m.spec.vocab)).unwrap().1).collect();
        for _ in 0..3 {
            all.step();
        }
        runtime.set_faults(FaultPlan { lost_at: Some(5), ..FaultPlan::default() });
        all.run();
        let mut failed = 0;
        for events in &streams {
            match drain(events).1.expect("each has ended") {
                Finish::Failed(why) => {
                    let why = why.to_string();
                    assert!(why.contains("emulated") || why.contains("lost"), "{why}");
                    failed += 1;
                }
                how => assert_eq!(how, Finish::Length),
            }
        }
        assert!(failed >= 2, "{failed} failed");
        assert_eq!((all.load(), all.into_engine().free_pages()), ((0, 0), free));
    }
}

/// A damaged row of the embedding: whoever uses it gets no numbers.
#[test]
fn scores_that_are_no_numbers_fail_the_one_request_that_has_them() {
    const BAD: u32 = 5;
    let good = model();
    let (d, vocab) = (good.spec.d_model, good.spec.vocab);
    let mut m = good.clone();
    let mut bytes = m.weights.get("token_embd.weight").unwrap().data.to_vec();
    bytes[BAD as usize * 4 * d..(BAD as usize + 1) * 4 * d]
        .copy_from_slice(&f32::NAN.to_le_bytes().repeat(d));
    let table = Tensor::new(DType::F32, vec![vocab, d], Bytes::copy_of(&bytes)).unwrap();
    m.weights.insert("token_embd.weight", table);
    let mut lone = engine(&good, &options(1, None));
    // All greedy, and with one that is drawn: two ways through a step.
    for drawn in [2, 1] {
        let mut all = Batcher::new(engine(&m, &options(3, None)));
        let free = all.limits().all_pages();
        let mut damaged = prompt(20, 3, vocab);
        damaged[11] = BAD;
        let (_, bad) = all.submit(Request { prompt: damaged, ..request(0, vocab) }).unwrap();
        let others = [request(0, vocab), request(drawn, vocab)];
        let streams = others.clone().map(|r| all.submit(r).unwrap().1);
        all.run();
        let (tokens, end) = drain(&bad);
        assert!(tokens.is_empty(), "{tokens:?}");
        assert!(
            matches!(&end, Some(Finish::Failed(why)) if why.to_string().contains("not numbers")),
            "{end:?}"
        );
        for (r, events) in others.iter().zip(&streams) {
            let (tokens, end) = drain(events);
            assert_eq!((tokens, end.unwrap()), alone(&mut lone, r));
        }
        assert_eq!(all.into_engine().free_pages(), free);
    }
}
