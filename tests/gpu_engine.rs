//! A whole model on an accelerator: every family against a forward pass in f64, greedy tokens against the CPU's,
//! batches and chunks against single steps, recorded graphs against first runs, and a device that fails.

#[path = "support/models.rs"]
mod models;
#[path = "support/naive_model.rs"]
mod naive_model;
mod support;

use std::sync::Arc;

use support::gpu;
use tandem::cache::KvDType;
use tandem::device::accelerator::Accelerator;
use tandem::device::emulated::{EmulatedAccelerator, EmulatedOptions, EmulatedRuntime};
use tandem::device::open::on_kernels;
use tandem::engine::{Engine, Input, Logits, Options, SeqId};
use tandem::model::{LoadedModel, ModelSpec, load};
use tandem::simd::Isa;

/// More than a page, than a window of the tiny models and than a tile of queries.
const TOKENS: usize = 70;

fn tokens(n: usize, vocab: usize) -> Vec<u32> {
    (0..n).map(|i| (i * i * 31 + i * 7 + 3) as u32 % vocab as u32).collect()
}

/// Every accelerator of this machine.
fn accelerators() -> Vec<(String, Arc<dyn Accelerator>)> {
    let on_kernels = |rt| on_kernels(rt).expect("a runtime with kernels");
    let kernels = gpu::runtimes().into_iter().map(|rt| (rt.info().name.clone(), on_kernels(rt)));
    let operations: Arc<dyn Accelerator> = Arc::new(EmulatedAccelerator::new(Arc::new(
        EmulatedRuntime::new(EmulatedOptions { jitter: Some(1), ..Default::default() }).expect("it starts"),
    )));
    kernels.chain([("emulated by plain functions".to_owned(), operations)]).collect()
}

fn engine(m: &LoadedModel, options: &Options, accel: &Arc<dyn Accelerator>) -> Engine {
    Engine::on_accelerator(m.spec.clone(), &m.weights, options, accel.clone(), "test", &|_| ())
        .unwrap_or_else(|e| panic!("{}: {e}", m.spec.name))
}

fn options(kv: KvDType, context: usize, sequences: usize) -> Options {
    let mut options = Options::new(Isa::Reference, context);
    (options.kv_dtype, options.threads, options.sequences) = (kv, Some(2), sequences);
    options
}

/// By how many standard deviations of the logits the worst row may be off, root mean square of the row.
///
/// As in tests/families.rs, but what enters every matrix is rounded to 16 bits: with unit roundoff u (2⁻⁸ for
/// bfloat16, 2⁻¹¹ for f16), u/√3 root mean square of a value. A layer rounds the inputs of q|k|v (which moves q, k
/// and v), q, k and v themselves, the probabilities, attention's output, and the inputs of up and down: seven
/// independent errors of that size, so √(7L) of them; the worst of 70 rows gets four times that.
fn bound(spec: &ModelSpec, kv: KvDType, bf16: bool) -> f64 {
    let u = |bf16: bool| if bf16 { 2f64.powi(-8) } else { 2f64.powi(-11) };
    let widest = u(bf16 || kv == KvDType::BF16);
    4.0 * (7.0 * spec.n_layers as f64).sqrt() * widest / 3f64.sqrt()
}

#[test]
fn every_family_computes_what_its_spec_says() {
    let mut failures = Vec::new();
    for (device, accel) in accelerators() {
        for name in tandem::model::synth::names().filter(|n| n.starts_with("tiny-")) {
            for (dtype, kv) in [("bf16", KvDType::BF16), ("f16", KvDType::F16), ("q4_k", KvDType::BF16)] {
                let m = load(&format!("synth:{name},dtype={dtype},seed=7")).unwrap();
                let tokens = tokens(TOKENS, m.spec.vocab);
                let want = naive_model::logits(&m.spec, &m.weights, kv, &tokens);
                let mut e = engine(&m, &options(kv, TOKENS, 1), &accel);
                let got = feed(&mut e, &tokens, &[TOKENS - 4, 1, 1, 1, 1]);
                let bound = bound(&m.spec, kv, dtype == "bf16" || name.contains("gemma"));
                let worst = got
                    .chunks_exact(m.spec.vocab)
                    .zip(&want)
                    .map(|(g, w)| models::distance(g, &w.iter().map(|&x| x as f32).collect::<Vec<_>>()).0)
                    .fold(0.0, f64::max);
                println!("{device} {name} {dtype} KV {}: {worst:.1e} of {bound:.1e}", kv.name());
                if worst > bound {
                    failures
                        .push(format!("{name} {dtype} KV {}: {worst:.2e}, at most {bound:.2e}", kv.name()));
                }
            }
        }
    }
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

/// The logits of all tokens, in steps of these lengths.
fn feed(e: &mut Engine, tokens: &[u32], steps: &[usize]) -> Vec<f32> {
    let seq = e.add();
    let (mut out, mut at) = (Vec::new(), 0);
    for n in steps {
        let tokens = &tokens[at..at + n];
        out.extend_from_slice(e.forward(&[Input { seq, tokens, logits: Logits::All }]).unwrap());
        at += n;
    }
    assert_eq!(at, tokens.len());
    e.remove(seq);
    out
}

/// `n` tokens after `prompt`, each the likeliest, and by how much each led.
fn greedy(e: &mut Engine, prompt: &[u32], n: usize) -> (Vec<u32>, Vec<f32>) {
    let seq = e.add();
    let mut logits = e.prefill(seq, prompt, |_| ()).unwrap();
    let (mut ids, mut margins) = (Vec::new(), Vec::new());
    for _ in 0..n {
        let (id, margin) = lead(&logits);
        ids.push(id);
        margins.push(margin);
        logits = e.forward(&[Input { seq, tokens: &[id], logits: Logits::Last }]).unwrap().to_vec();
    }
    e.remove(seq);
    (ids, margins)
}

fn lead(logits: &[f32]) -> (u32, f32) {
    let best = tandem::reference::reduce::argmax(logits);
    let second = logits.iter().enumerate().filter(|(i, _)| *i != best).map(|(_, x)| *x);
    (best as u32, logits[best] - second.fold(f32::NEG_INFINITY, f32::max))
}

/// A step in which tokens may differ: the leads below this are within both sides' rounding.
const SURE: f32 = 0.3;

#[test]
fn greedy_tokens_are_the_cpus() {
    for (device, accel) in accelerators() {
        for name in
            ["tiny-llama,dtype=q4_0", "tiny-qwen3,dtype=bf16", "tiny-gemma3,dtype=q8_0", "tiny-opt,dtype=f16"]
        {
            let m = load(&format!("synth:{name},seed=3")).unwrap();
            let prompt = tokens(40, m.spec.vocab);
            let o = options(KvDType::BF16, 64, 1);
            let mut cpu = models::engine(&m, &o);
            let (want, margins) = greedy(&mut cpu, &prompt, 12);
            let mut e = engine(&m, &o, &accel);
            let (got, _) = greedy(&mut e, &prompt, 12);
            // Once a token within rounding differs, so does all that follows.
            let same = got.iter().zip(&want).take_while(|(g, w)| g == w).count();
            println!("{device} {name}: {same} of {} tokens equal", want.len());
            assert!(
                same == want.len() || margins[same] < SURE,
                "{name}: {got:?}, CPU {want:?}, leads {margins:?}"
            );
        }
    }
}

#[test]
fn real_text_from_a_real_model() {
    let Some(path) = models::smollm2() else { return };
    for (device, accel) in accelerators() {
        // On the host's emulation two layers of the model are what a test has time for.
        let mut m = load(path.to_str().unwrap()).unwrap();
        let emulated = device.contains("mulated");
        if emulated {
            m.spec.n_layers = 2;
        }
        let prompt = [504u32, 2365, 6354, 16438];
        let o = options(KvDType::BF16, 32, 1);
        let (want, margins) = greedy(&mut models::engine(&m, &o), &prompt, 3);
        let (got, _) = greedy(&mut engine(&m, &o, &accel), &prompt, 3);
        let same = got.iter().zip(&want).take_while(|(g, w)| g == w).count();
        println!("{device}: {got:?}, the CPU says {want:?} with leads {margins:?}");
        assert!(same == want.len() || margins[same] < SURE, "{got:?}, CPU {want:?}, leads {margins:?}");
    }
}

#[test]
fn a_row_does_not_depend_on_its_batch() {
    for (_, accel) in accelerators() {
        for name in ["tiny-llama,dtype=q4_0", "tiny-gemma3,dtype=bf16"] {
            let m = load(&format!("synth:{name},seed=5")).unwrap();
            let mut e = engine(&m, &options(KvDType::BF16, 64, 8), &accel);
            let vocab = m.spec.vocab;
            // Eight sequences of different lengths; five of them decode together, then the same five among eight.
            let seqs: Vec<SeqId> = (0..8).map(|_| e.add()).collect();
            for (i, &seq) in seqs.iter().enumerate() {
                e.prefill(seq, &tokens(3 + 7 * i, vocab), |_| ()).unwrap();
            }
            let step = |e: &mut Engine, n: usize| -> Vec<f32> {
                let ids: Vec<u32> = (0..n as u32).collect();
                let inputs: Vec<Input<'_>> = seqs[..n]
                    .iter()
                    .zip(&ids)
                    .map(|(&seq, id)| Input { seq, tokens: std::slice::from_ref(id), logits: Logits::Last })
                    .collect();
                let out = e.forward(&inputs).unwrap().to_vec();
                let lens: Vec<usize> = seqs.iter().map(|&s| e.len(s)).collect();
                seqs[..n].iter().zip(lens).for_each(|(&s, len)| e.truncate(s, len - 1));
                out
            };
            let (five, again, eight) = (step(&mut e, 5), step(&mut e, 5), step(&mut e, 8));
            assert!(same_bits(&five, &again), "{name}: a replayed step gives other bits than the first one");
            assert!(same_bits(&five, &eight[..5 * vocab]), "{name}: five rows alone, and five among eight");
        }
    }
}

/// A recorded step finds its lists where the first one had them, though the page table and what a window sees have grown
/// meanwhile: at position 64 begins a page.
#[test]
fn recorded_steps_follow_a_growing_context() {
    const PROMPT: usize = 60;
    const STEPS: usize = 8;
    let kv = KvDType::BF16;
    for (device, accel) in accelerators() {
        for name in ["tiny-llama", "tiny-gemma3"] {
            let m = load(&format!("synth:{name},dtype=bf16,seed=11")).unwrap();
            let tokens = tokens(PROMPT + STEPS, m.spec.vocab);
            let want = naive_model::logits(&m.spec, &m.weights, kv, &tokens);
            let mut e = engine(&m, &options(kv, tokens.len(), 1), &accel);
            let seq = e.add();
            e.prefill(seq, &tokens[..PROMPT], |_| ()).unwrap();
            let bound = bound(&m.spec, kv, true);
            for (i, want) in want.iter().enumerate().skip(PROMPT) {
                let input = Input { seq, tokens: &tokens[i..=i], logits: Logits::Last };
                let got = e.forward(&[input]).unwrap();
                let want: Vec<f32> = want.iter().map(|&x| x as f32).collect();
                let off = models::distance(got, &want).0;
                assert!(off <= bound, "{device} {name}, position {i}: {off:.2e}, at most {bound:.2e}");
            }
        }
    }
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

#[test]
fn the_likeliest_token_is_found_on_the_device() {
    for (_, accel) in accelerators() {
        let m = load("synth:tiny-qwen2,dtype=bf16,seed=9").unwrap();
        let mut e = engine(&m, &options(KvDType::F16, 64, 3), &accel);
        let seqs: Vec<SeqId> = (0..3).map(|_| e.add()).collect();
        for (i, &seq) in seqs.iter().enumerate() {
            e.prefill(seq, &tokens(5 + i, m.spec.vocab), |_| ()).unwrap();
        }
        let inputs: Vec<Input<'_>> =
            seqs.iter().map(|&seq| Input { seq, tokens: &[7], logits: Logits::Last }).collect();
        let ids = e.forward_greedy(&inputs).unwrap().to_vec();
        seqs.iter().enumerate().for_each(|(i, &s)| e.truncate(s, 5 + i));
        let logits = e.forward(&inputs).unwrap();
        let want: Vec<u32> = logits.chunks_exact(m.spec.vocab).map(|row| lead(row).0).collect();
        assert_eq!(ids, want);
    }
}
