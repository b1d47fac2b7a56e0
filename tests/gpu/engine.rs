//! A whole model on an accelerator: every family against a forward pass in f64, greedy tokens against the CPU's,
//! batches and chunks against single steps, recorded graphs against first runs, and a device that fails.

use std::sync::Arc;

use crate::support::gpu;
use crate::support::models::dense_models;
use crate::support::{models, naive_model, rounding};
use tandem::cache::KvType;
use tandem::device::emulated::{EmulatedAccelerator, EmulatedOptions, EmulatedRuntime};
use tandem::device::{Accelerator, TOP_K, on_kernels};
use tandem::engine::{Engine, NewTokens, Options};
use tandem::model::{LoadedModel, load};
use tandem::program::{RequestId, Wants};
use tandem::simd::Isa;
use tandem::tensor::{Bytes, DType, Half, Tensor};
use tandem::text::{Sampler, SamplerParams};

/// More than a page, than a window of the tiny models and than a tile of queries.
const TOKENS: usize = 70;

fn tokens(n: usize, vocab: usize) -> Vec<u32> {
    (0..n).map(|i| (i * i * 31 + i * 7 + 3) as u32 % vocab as u32).collect()
}

/// Every accelerator of this machine.
fn accelerators() -> Vec<(String, Arc<dyn Accelerator>)> {
    let on_kernels = |rt| on_kernels(rt).expect("a runtime with kernels");
    let kernels = gpu::runtimes().into_iter().map(|rt| (rt.info().name.clone(), on_kernels(rt)));
    let options = EmulatedOptions { jitter: Some(1), ..Default::default() };
    let operations = gpu::wanted("emulated").then(|| {
        let rt = Arc::new(EmulatedRuntime::new(options).expect("it starts"));
        let accel: Arc<dyn Accelerator> = Arc::new(EmulatedAccelerator::new(rt));
        ("emulated by plain functions".to_owned(), accel)
    });
    kernels.chain(operations).collect()
}

fn engine(m: &LoadedModel, options: &Options, accel: &Arc<dyn Accelerator>) -> Engine {
    Engine::on_accelerator(m.spec.clone(), &m.weights, options, accel.clone(), "test", &|_| ())
        .unwrap_or_else(|e| panic!("{}: {e}", m.spec.name))
}

fn options(kv: Half, context: usize, sequences: usize) -> Options {
    let mut options = Options::new(Isa::Reference, context);
    (options.kv_dtype, options.threads, options.sequences) = (kv.into(), Some(2), sequences);
    options
}

#[test]
fn every_family_computes_what_its_spec_says() {
    let mut failures = Vec::new();
    for (device, accel) in accelerators() {
        for name in dense_models() {
            for (dtype, kv) in [("bf16", Half::BF16), ("f16", Half::F16), ("q4_k", Half::BF16)] {
                let kv = gpu::kv(&accel, kv);
                let m = load(&format!("synth:{name},dtype={dtype},seed=7")).unwrap();
                let tokens = tokens(TOKENS, m.spec.vocab);
                let want = naive_model::logits(&m.spec, &m.weights, kv, &tokens);
                let mut e = engine(&m, &options(kv, TOKENS, 1), &accel);
                let got = feed(&mut e, &tokens, &[TOKENS - 4, 1, 1, 1, 1]);
                let bound = rounding::accelerator(&m.spec, kv, rounds_to_bf16(&m));
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
        out.extend_from_slice(e.forward(&[NewTokens { id: seq, tokens, wants: Wants::All }]).unwrap());
        at += n;
    }
    assert_eq!(at, tokens.len());
    e.remove(seq);
    out
}

/// Whether activations are bf16: for bf16 weights, and for the Gemma family, whose activations pass f16's range.
fn rounds_to_bf16(m: &LoadedModel) -> bool {
    m.spec.name.contains("gemma") || m.weights.get("blk.0.ffn_up.weight").unwrap().dtype == DType::BF16
}

/// The logits of the last prompt token and of each of `then`, which are fed whatever the logits say.
fn forced(e: &mut Engine, prompt: &[u32], then: &[u32]) -> Vec<Vec<f32>> {
    let seq = e.add();
    let mut rows = vec![e.prefill(seq, prompt, |_| ()).unwrap()];
    for id in then {
        let input = NewTokens { id: seq, tokens: std::slice::from_ref(id), wants: Wants::Last };
        rows.push(e.forward(&[input]).unwrap().to_vec());
    }
    e.remove(seq);
    rows
}

/// `n` tokens after `prompt`, each the likeliest.
fn greedy(e: &mut Engine, prompt: &[u32], n: usize) -> Vec<u32> {
    let seq = e.add();
    let mut logits = e.prefill(seq, prompt, |_| ()).unwrap();
    let mut ids = Vec::new();
    for _ in 0..n {
        ids.push(rounding::lead(&logits).0);
        let input = NewTokens { id: seq, tokens: &ids[ids.len() - 1..], wants: Wants::Last };
        logits = e.forward(&[input]).unwrap().to_vec();
    }
    e.remove(seq);
    ids
}

/// Both are fed the CPU's tokens: every row of logits is the CPU's within what both round, and so is the likeliest token
/// wherever its lead is beyond that.
fn assert_the_cpus_tokens(
    device: &str,
    m: &LoadedModel,
    accel: &Arc<dyn Accelerator>,
    prompt: &[u32],
    n: usize,
) {
    let name = &m.spec.name;
    let o = options(gpu::kv(accel, Half::BF16), 64, 1);
    let mut cpu = models::engine(m, &o);
    let ids = greedy(&mut cpu, prompt, n);
    let want = forced(&mut cpu, prompt, &ids);
    let got = forced(&mut engine(m, &o, accel), prompt, &ids);
    let bound = rounding::cpu(&m.spec, o.kv_dtype, false)
        + rounding::accelerator(&m.spec, o.kv_dtype, rounds_to_bf16(m));
    let (mut sure, mut equal, mut worst) = (0, 0, 0f64);
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        let off = models::distance(got, want).0;
        assert!(off <= bound, "{device} {name}, row {i}: {off:.2e} standard deviations, at most {bound:.2e}");
        let (id, (best, lead, std)) = (rounding::lead(got).0, rounding::lead(want));
        if rounding::is_sure(want, bound) {
            assert_eq!(
                id,
                best,
                "{device} {name}, row {i}: the CPU's token leads by {:.2} deviations",
                lead / std
            );
            sure += 1;
        }
        (equal, worst) = (equal + usize::from(id == best), worst.max(off));
    }
    let rows = want.len();
    println!("{device} {name}: {equal} of {rows} tokens equal, {sure} had to be; {worst:.1e} of {bound:.1e}");
    assert!(sure * 4 >= rows, "{device} {name}: only {sure} of {rows} tokens were compared");
}

#[test]
fn greedy_tokens_are_the_cpus() {
    for (device, accel) in accelerators() {
        for name in
            ["tiny-llama,dtype=q4_0", "tiny-qwen3,dtype=bf16", "tiny-gemma3,dtype=q8_0", "tiny-opt,dtype=f16"]
        {
            let m = load(&format!("synth:{name},seed=3")).unwrap();
            let prompt = tokens(40, m.spec.vocab);
            assert_the_cpus_tokens(&device, &m, &accel, &prompt, 12);
        }
    }
}

#[test]
fn real_text_from_a_real_model() {
    let Some(path) = models::smollm2() else { return };
    for (device, accel) in accelerators() {
        let mut m = load(path.to_str().unwrap()).unwrap();
        // On the host's emulation two layers of the model are what a test has time for.
        if device.contains("mulated") || gpu::is_stand_in(&device) {
            m.spec.n_layers = 2;
        }
        assert_the_cpus_tokens(&device, &m, &accel, &[504, 2365, 6354, 16438], 3);
    }
}

#[test]
fn a_row_does_not_depend_on_its_batch() {
    for (_, accel) in accelerators() {
        for name in ["tiny-llama,dtype=q4_0", "tiny-gemma3,dtype=bf16"] {
            let m = load(&format!("synth:{name},seed=5")).unwrap();
            let mut e = engine(&m, &options(gpu::kv(&accel, Half::BF16), 64, 8), &accel);
            let vocab = m.spec.vocab;
            // Eight sequences of different lengths; five of them decode together, then the same five among eight.
            let seqs: Vec<RequestId> = (0..8).map(|_| e.add()).collect();
            for (i, &seq) in seqs.iter().enumerate() {
                e.prefill(seq, &tokens(3 + 7 * i, vocab), |_| ()).unwrap();
            }
            let step = |e: &mut Engine, n: usize| -> Vec<f32> {
                let ids: Vec<u32> = (0..n as u32).collect();
                let inputs: Vec<NewTokens<'_>> = seqs[..n]
                    .iter()
                    .zip(&ids)
                    .map(|(&seq, id)| NewTokens {
                        id: seq,
                        tokens: std::slice::from_ref(id),
                        wants: Wants::Last,
                    })
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

/// Memory was planned for four sequences at a time: a fifth would overwrite what the others compute.
#[test]
fn more_sequences_than_were_planned_for_are_refused() {
    for (device, accel) in accelerators() {
        let m = load("synth:tiny-llama,dtype=bf16,seed=5").unwrap();
        let mut e = engine(&m, &options(gpu::kv(&accel, Half::BF16), 64, 4), &accel);
        // Pages are enough for more: the sequences are short.
        let seqs: Vec<RequestId> = (0..5).map(|_| e.add()).collect();
        for &seq in &seqs {
            e.prefill(seq, &tokens(6, m.spec.vocab), |_| ()).unwrap();
        }
        let one = |&seq: &RequestId| NewTokens { id: seq, tokens: &[3], wants: Wants::Last };
        let inputs: Vec<NewTokens<'_>> = seqs.iter().map(one).collect();
        let refused = e.forward(&inputs).map(|_| ()).unwrap_err();
        assert!(
            matches!(&refused, tandem::Error::Capacity(m) if m.contains("5 sequences, 4 were planned for")),
            "{device}: {refused}"
        );
        assert!(seqs.iter().all(|&s| e.len(s) == 6), "{device}: no sequence has changed");
        let four = e.forward(&inputs[..4]).unwrap().to_vec();
        assert!(four.iter().all(|x| x.is_finite()), "{device}");
    }
}

/// A gate and an up projection with biases are multiplied apart: the fused product has no place for them.
#[test]
fn biases_of_a_gated_feed_forward_count() {
    for (device, accel) in accelerators() {
        let mut m = load("synth:tiny-llama,dtype=f16,seed=7").unwrap();
        for (layer, part) in (0..m.spec.n_layers).flat_map(|l| [(l, "ffn_gate"), (l, "ffn_up")]) {
            let bias: Vec<u8> = (0..m.spec.d_ff)
                .flat_map(|i| ((i % 7) as f32 / 4.0 - 0.75 + layer as f32 / 8.0).to_le_bytes())
                .collect();
            let tensor = Tensor::new(DType::F32, vec![m.spec.d_ff], Bytes::copy_of(&bias)).unwrap();
            m.weights.insert(format!("blk.{layer}.{part}.bias"), tensor);
        }
        let tokens = tokens(TOKENS, m.spec.vocab);
        let want = naive_model::logits(&m.spec, &m.weights, Half::F16, &tokens);
        let mut e = engine(&m, &options(Half::F16, TOKENS, 1), &accel);
        let got = feed(&mut e, &tokens, &[TOKENS - 2, 1, 1]);
        let bound = rounding::accelerator(&m.spec, Half::F16, false);
        for (i, (g, w)) in got.chunks_exact(m.spec.vocab).zip(&want).enumerate() {
            let w: Vec<f32> = w.iter().map(|&x| x as f32).collect();
            let off = models::distance(g, &w).0;
            assert!(off <= bound, "{device}, row {i}: {off:.1e}, at most {bound:.1e}");
        }
    }
}

/// A recorded step finds its lists where the first one had them, though the page table and what a window sees have grown
/// meanwhile: at position 64 begins a page.
#[test]
fn recorded_steps_follow_a_growing_context() {
    const PROMPT: usize = 60;
    const STEPS: usize = 8;
    for (device, accel) in accelerators() {
        let kv = gpu::kv(&accel, Half::BF16);
        for name in ["tiny-llama", "tiny-gemma3"] {
            let m = load(&format!("synth:{name},dtype=bf16,seed=11")).unwrap();
            let tokens = tokens(PROMPT + STEPS, m.spec.vocab);
            let want = naive_model::logits(&m.spec, &m.weights, kv, &tokens);
            let mut e = engine(&m, &options(kv, tokens.len(), 1), &accel);
            let seq = e.add();
            e.prefill(seq, &tokens[..PROMPT], |_| ()).unwrap();
            let bound = rounding::accelerator(&m.spec, kv, true);
            for (i, want) in want.iter().enumerate().skip(PROMPT) {
                let input = NewTokens { id: seq, tokens: &tokens[i..=i], wants: Wants::Last };
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

/// Keys and values in 8 bits, by prompts and single tokens.
#[test]
fn codes_of_8_bits_match_the_naive_model() {
    for (device, accel) in accelerators() {
        for name in ["tiny-llama", "tiny-gemma3"] {
            let m = load(&format!("synth:{name},dtype=f16,seed=7")).unwrap();
            let o = Options { kv_dtype: KvType::Q8, ..options(Half::F16, TOKENS, 1) };
            let tokens = tokens(TOKENS, m.spec.vocab);
            let want = naive_model::logits(&m.spec, &m.weights, KvType::Q8, &tokens);
            let mut e = engine(&m, &o, &accel);
            assert_eq!(e.placement().kv_type, "q8");
            let got = feed(&mut e, &tokens, &[TOKENS - 4, 1, 1, 1, 1]);
            let bound = rounding::accelerator(&m.spec, KvType::Q8, rounds_to_bf16(&m));
            for (r, (g, w)) in got.chunks_exact(m.spec.vocab).zip(&want).enumerate() {
                let w: Vec<f32> = w.iter().map(|&x| x as f32).collect();
                let off = models::distance(g, &w).0;
                assert!(off <= bound, "{device} {name}: row {r} is off by {off:.2e}, at most {bound:.2e}");
            }
        }
    }
}

#[test]
fn the_likeliest_token_is_found_on_the_device() {
    for (_, accel) in accelerators() {
        let m = load("synth:tiny-qwen2,dtype=bf16,seed=9").unwrap();
        let mut e = engine(&m, &options(Half::F16, 64, 3), &accel);
        let seqs: Vec<RequestId> = (0..3).map(|_| e.add()).collect();
        for (i, &seq) in seqs.iter().enumerate() {
            e.prefill(seq, &tokens(5 + i, m.spec.vocab), |_| ()).unwrap();
        }
        let inputs: Vec<NewTokens<'_>> =
            seqs.iter().map(|&seq| NewTokens { id: seq, tokens: &[7], wants: Wants::Last }).collect();
        let ids = e.forward_greedy(&inputs).unwrap();
        seqs.iter().enumerate().for_each(|(i, &s)| e.truncate(s, 5 + i));
        let logits = e.forward(&inputs).unwrap();
        let want: Vec<u32> = logits.chunks_exact(m.spec.vocab).map(|row| rounding::lead(row).0).collect();
        assert_eq!(ids, want);
    }
}

/// Logits stay on the device, and what comes back gives the tokens that whole rows give; rows that are needed come one by one.
#[test]
fn drawn_tokens_are_those_of_whole_rows() {
    let plain = SamplerParams { temperature: 0.6, ..SamplerParams::default() };
    let settings = [
        plain.clone(),
        SamplerParams { top_k: 20, seed: 1, ..plain.clone() },
        SamplerParams { top_p: 0.5, seed: 2, ..plain.clone() },
        SamplerParams { top_p: 0.999, temperature: 2.0, seed: 3, ..plain.clone() },
        SamplerParams { min_p: 0.3, seed: 4, ..plain.clone() },
        SamplerParams { repeat_penalty: 1.2, seed: 5, ..plain.clone() },
        SamplerParams { temperature: 0.0, ..plain },
    ];
    for (name, accel) in accelerators() {
        let m = load("synth:tiny-qwen2,dtype=bf16,seed=9").unwrap();
        assert!(m.spec.vocab > TOP_K, "a vocabulary of which something is left out");
        let mut e = engine(&m, &options(Half::F16, 64, settings.len()), &accel);
        let mut samplers: Vec<[Sampler; 2]> =
            settings.iter().map(|p| [(); 2].map(|()| Sampler::new(p.clone()).unwrap())).collect();
        let seqs: Vec<RequestId> = settings.iter().map(|_| e.add()).collect();
        let mut histories: Vec<Vec<u32>> = (0..seqs.len()).map(|i| tokens(5 + i, m.spec.vocab)).collect();
        for (&seq, history) in seqs.iter().zip(&mut histories) {
            e.prefill(seq, history, |_| ()).unwrap();
            history.push(7);
        }
        let (mut told, mut asked) = (0, 0);
        for _ in 0..12 {
            let input = |(&seq, history): (_, &Vec<u32>)| -> (RequestId, Vec<u32>) {
                (seq, history[history.len() - 1..].to_vec())
            };
            let last: Vec<(RequestId, Vec<u32>)> = seqs.iter().zip(&histories).map(input).collect();
            let inputs: Vec<NewTokens<'_>> =
                last.iter().map(|(seq, tokens)| NewTokens { id: *seq, tokens, wants: Wants::Last }).collect();
            let factors: Vec<Option<f32>> = samplers.iter().map(|[s, _]| s.top_factor(TOP_K)).collect();
            e.forward_tops(&inputs, &factors).unwrap();
            for (row, ([among, whole], history)) in samplers.iter_mut().zip(&mut histories).enumerate() {
                let top = e.top(row).expect("of every row of the step").clone();
                let logits = e.logits_row(row).unwrap();
                assert_eq!(top.likeliest[0].0, logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
                assert_eq!(logits[top.likeliest[200].1 as usize], top.likeliest[200].0, "{name}: row {row}");
                let want = whole.choose(&mut logits.to_vec(), history).unwrap();
                let got = factors[row].and_then(|_| among.choose_among(&top));
                (told, asked) = (told + usize::from(got.is_some()), asked + usize::from(got.is_none()));
                let got = got.unwrap_or_else(|| among.choose(logits, history).unwrap());
                assert_eq!(got, want, "{name}: {:?}", whole.params());
                history.push(got);
            }
        }
        assert!(told >= 40 && asked >= 12, "{name}: {told} by the likeliest tokens, {asked} by whole rows");
        // All of the rows, as one copy.
        let inputs: Vec<NewTokens<'_>> =
            seqs.iter().map(|&seq| NewTokens { id: seq, tokens: &[3], wants: Wants::Last }).collect();
        let rows = e.forward(&inputs).unwrap().to_vec();
        assert!(e.top(0).is_none(), "whole rows were wanted");
        for (row, want) in rows.chunks_exact(m.spec.vocab).enumerate() {
            assert!(same_bits(e.logits_row(row).unwrap(), want), "{name}: row {row}");
        }
    }
}
