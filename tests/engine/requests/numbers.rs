//! Weights that give no numbers are noticed in every greedy step, wherever it runs.

use std::sync::Arc;

use tandem::device::emulated::{EmulatedAccelerator, EmulatedOptions, EmulatedRuntime};
use tandem::device::{Accelerator, on_kernels};
use tandem::engine::{Engine, NewTokens, Options};
use tandem::model::{LoadedModel, load};
use tandem::program::{Placement, RequestId, Wants};
use tandem::simd::Isa;
use tandem::tensor::{Bytes, DType, Tensor};

use crate::support::gpu;

/// A token whose embedding is not a number.
pub const BAD: u32 = 5;

/// A model with untied matrices, the embedding of [`BAD`] NaN, or the head's row of it.
pub fn model(tensor: &str) -> LoadedModel {
    let mut m = load("synth:tiny-llama,dtype=f32,seed=3").unwrap();
    assert!(!m.spec.tied_head, "the embedding is not the head");
    let d = m.spec.d_model;
    let mut bytes = m.weights.get(tensor).unwrap().data.to_vec();
    let row = BAD as usize * 4 * d..(BAD as usize + 1) * 4 * d;
    bytes[row].copy_from_slice(&f32::NAN.to_le_bytes().repeat(d));
    let damaged = Tensor::new(DType::F32, vec![m.spec.vocab, d], Bytes::copy_of(&bytes)).unwrap();
    m.weights.insert(tensor, damaged);
    m
}

/// The same model on the CPU, on accelerators, and on both sides.
fn engines(m: &LoadedModel) -> Vec<(String, Engine)> {
    let options = Options { sequences: 3, logits: 3, threads: Some(2), ..Options::new(Isa::best(), 64) };
    let mut accels: Vec<Arc<dyn Accelerator>> = Vec::new();
    let plain = EmulatedRuntime::new(EmulatedOptions::default()).unwrap();
    accels.push(Arc::new(EmulatedAccelerator::new(Arc::new(plain))));
    accels.extend(gpu::runtimes().into_iter().map(|rt| on_kernels(rt).unwrap()));
    let mut all = Vec::new();
    let cpu = Engine::new(m.spec.clone(), &m.weights, &options, &|_| ()).unwrap();
    all.push(("cpu".to_owned(), cpu));
    for accel in accels {
        let name = accel.runtime().info().name.clone();
        let on = Engine::on_accelerator(m.spec.clone(), &m.weights, &options, accel.clone(), &name, &|_| ());
        all.push((name.clone(), on.unwrap()));
        let n = m.spec.n_layers;
        for k in [1, n + 1] {
            let placement = Placement::boundary(k, n, 0, 0);
            let (spec, what) = (m.spec.clone(), format!("{name}, boundary {k}"));
            let accel = accel.clone();
            let e = Engine::placed(spec, &m.weights, &options, accel, &name, "helm", placement, &|_| ());
            all.push((what, e.unwrap()));
        }
    }
    all
}

fn inputs<'a>(seqs: &[RequestId], tokens: &'a [[u32; 1]]) -> Vec<NewTokens<'a>> {
    seqs.iter().zip(tokens).map(|(&seq, t)| NewTokens { id: seq, tokens: t, wants: Wants::Last }).collect()
}

#[test]
fn a_row_without_numbers_is_named_and_the_others_have_their_tokens() {
    let m = model("token_embd.weight");
    for (what, mut e) in engines(&m) {
        let seqs = [e.add(), e.add(), e.add()];
        // Not the first step, nor the first row.
        let good = e.forward_greedy(&inputs(&seqs, &[[1], [2], [3]])).unwrap();
        assert_eq!(good.len(), 3, "{what}");
        let error = e.forward_greedy(&inputs(&seqs, &[[1], [BAD], [3]])).unwrap_err().to_string();
        assert!(error.contains("row 1 ") && error.contains("not numbers"), "{what}: {error}");
        seqs.iter().for_each(|&s| e.truncate(s, 1));
        let picks = e.forward_picks(&inputs(&seqs, &[[1], [BAD], [3]])).unwrap().to_vec();
        assert!(picks[0].is_some() && picks[1].is_none() && picks[2].is_some(), "{what}: {picks:?}");
    }
}

#[test]
fn one_score_that_is_no_number_is_enough() {
    let m = model("output.weight");
    for (what, mut e) in engines(&m) {
        let seqs = [e.add()];
        let error = e.forward_greedy(&inputs(&seqs, &[[1]])).unwrap_err().to_string();
        assert!(error.contains("not numbers"), "{what}: {error}");
    }
}
