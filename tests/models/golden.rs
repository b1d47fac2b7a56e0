//! Real models against an f32 forward pass of the same weights (`tests/oracles/`, made with PyTorch): log-
//! probabilities, greedy tokens and the likelihood of a text, for every tier and mode, from GGUF and from
//! dequantised safetensors.

use std::path::Path;

use crate::support::models;
use serde::Deserialize;
use tandem::engine::{Engine, NewTokens, Options};
use tandem::model::{LoadedModel, TextSource, export_hf_folder, load};
use tandem::program::Wants;
use tandem::simd::Isa;
use tandem::simd::linear::Mode;
use tandem::tensor::DType;
use tandem::text::{Tokenizer, logprobs, token_logprob};

#[derive(Deserialize)]
struct Oracle {
    prompts: Vec<Prompt>,
    text: String,
    text_ids: Vec<u32>,
    text_mean_nll: f64,
    text_nll: Vec<f64>,
    text_top5_logprobs: Vec<Vec<(u32, f64)>>,
}

#[derive(Deserialize)]
struct Prompt {
    prompt: String,
    prompt_ids: Vec<u32>,
    logsumexp: f64,
    /// Logits.
    top10: Vec<(u32, f64)>,
    greedy_ids: Vec<u32>,
    /// By how much each greedy token's logit leads.
    margins: Vec<f64>,
}

fn oracle(name: &str) -> Oracle {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/oracles").join(name);
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// What a comparison may cost: the numbers that the project promises.
struct Bounds {
    /// Of the log-probabilities of the oracle's ten likeliest first tokens.
    top10: f64,
    /// Of the mean negative log-likelihood, relative.
    nll: f64,
    /// Greedy tokens are equal where the oracle's choice leads by more than this.
    margin: f64,
}

const INT8: Bounds = Bounds { top10: 0.4, nll: 0.005, margin: 0.3 };
/// Tiles round activations and weights to bf16: other tokens than with int8 are close. (The mean over a text is nearer to the oracle.)
const TILES: Bounds = Bounds { margin: 0.35, ..INT8 };
const FLOAT: Bounds = Bounds { top10: 0.15, ..INT8 };

/// Steps of the text: all logits of a step are held at once.
const STEP: usize = 64;

/// How much of the oracle to compare with.
#[derive(Clone, Copy)]
struct Extent {
    prompts: usize,
    greedy: usize,
    text: usize,
}

const ALL: Extent = Extent { prompts: usize::MAX, greedy: usize::MAX, text: usize::MAX };
/// What a tier or mode does that another has been held against the whole for.
const SHORT: Extent = Extent { greedy: 12, text: 0, ..ALL };
/// For the reference tier, which takes seconds per token.
const LITTLE: Extent = Extent { prompts: 1, greedy: 2, text: 0 };

fn run(m: &LoadedModel, isa: Isa, mode: Mode, context: usize, sequences: usize) -> Engine {
    let mut options = Options::new(isa, context);
    (options.mode, options.sequences) = (mode, sequences);
    models::engine(m, &options)
}

/// Compares; returns what is out of bounds.
fn compare(
    what: &str,
    m: &LoadedModel,
    o: &Oracle,
    b: &Bounds,
    isa: Isa,
    mode: Mode,
    x: Extent,
) -> Vec<String> {
    let what = format!("{what} {isa} {mode:?}");
    let prompts = &o.prompts[..x.prompts.min(o.prompts.len())];
    let mut engine = run(m, isa, mode, 256, prompts.len());
    let vocab = engine.spec().vocab;
    let mut failures = Vec::new();

    // The first new token.
    let seqs: Vec<_> = prompts.iter().map(|_| engine.add()).collect();
    let mut rows: Vec<Vec<f32>> =
        prompts.iter().zip(&seqs).map(|(p, &s)| engine.prefill(s, &p.prompt_ids, |_| ()).unwrap()).collect();
    let mut worst = 0f64;
    for (p, row) in prompts.iter().zip(&rows) {
        let off = p
            .top10
            .iter()
            .map(|&(id, logit)| (f64::from(token_logprob(row, id)) - (logit - p.logsumexp)).abs())
            .fold(0.0, f64::max);
        worst = worst.max(off);
        if off.is_nan() || off > b.top10 {
            failures.push(format!("{what}: top-10 log-probabilities of {:?} off by {off:.3}", p.prompt));
        }
    }

    // Greedy tokens, all prompts as a batch, each fed what the oracle chose, so that a split at a small margin
    // does not end the comparison.
    let steps = x.greedy.min(prompts[0].greedy_ids.len());
    let (mut sure, mut close, mut close_same) = (0, 0, 0);
    for i in 0..steps {
        for (p, row) in prompts.iter().zip(&rows) {
            let (want, margin) = (p.greedy_ids[i], p.margins[i]);
            let got = logprobs(row, 1).1[0].0;
            if margin > b.margin {
                sure += 1;
                if got != want {
                    let prompt = &p.prompt;
                    failures.push(format!(
                        "{what}: token {i} of {prompt:?} is {got}, not {want}, which leads by {margin}"
                    ));
                }
            } else {
                close += 1;
                close_same += usize::from(got == want);
            }
        }
        if i + 1 == steps {
            break;
        }
        let inputs: Vec<_> = prompts
            .iter()
            .zip(&seqs)
            .map(|(p, &seq)| NewTokens { id: seq, tokens: &p.greedy_ids[i..=i], wants: Wants::Last })
            .collect();
        rows = engine.forward(&inputs).unwrap().chunks_exact(vocab).map(<[f32]>::to_vec).collect();
    }

    // The text.
    seqs.into_iter().for_each(|s| engine.remove(s));
    let seq = engine.add();
    let ids = &o.text_ids[..x.text.min(o.text_ids.len())];
    let (mut nll, mut want, mut n, mut worst_top5, mut all_top5, mut n_top5) = (0f64, 0f64, 0, 0f64, 0f64, 0);
    for (step, tokens) in ids.chunks(STEP).enumerate() {
        let logits = engine.forward(&[NewTokens { id: seq, tokens, wants: Wants::All }]).unwrap();
        for (i, row) in logits.chunks_exact(vocab).enumerate() {
            let at = step * STEP + i;
            let Some(&next) = ids.get(at + 1) else { break };
            nll -= f64::from(token_logprob(row, next));
            want += o.text_nll[at];
            n += 1;
            for &(id, p) in &o.text_top5_logprobs[at] {
                let off = (f64::from(token_logprob(row, id)) - p).abs();
                worst_top5 = worst_top5.max(off);
                all_top5 += off;
                n_top5 += 1;
            }
        }
    }
    let mut line = format!(
        "{what}: top-10 within {worst:.3}; {sure} sure tokens, {close_same} of {close} close ones equal"
    );
    if n > 0 {
        let off = nll / want - 1.0;
        let mean_top5 = all_top5 / n_top5 as f64;
        line += &format!(
            "; mean NLL {:.4}, {:+.3}%; top-5 of the text off by {mean_top5:.3}, {worst_top5:.3} at most",
            nll / n as f64,
            off * 100.0
        );
        if off.is_nan() || off.abs() > b.nll {
            failures.push(format!("{what}: mean NLL off by {:.3}%", off * 100.0));
        }
        // On the mean, tokens of a text are no worse than the ten likeliest at their worst.
        if mean_top5.is_nan() || mean_top5 > b.top10 {
            failures.push(format!(
                "{what}: top-5 log-probabilities of the text off by {mean_top5:.3} on average"
            ));
        }
    }
    println!("{line}");
    failures
}

fn check_ids(m: &LoadedModel, o: &Oracle) {
    let TextSource::Gguf(metadata) = &m.text else { panic!("a GGUF file has its tokenizer's metadata") };
    let tokenizer = Tokenizer::from_gguf(metadata).unwrap();
    for p in &o.prompts {
        assert_eq!(tokenizer.encode(&p.prompt, true, false).unwrap(), p.prompt_ids, "{:?}", p.prompt);
    }
    assert_eq!(tokenizer.encode(&o.text, true, false).unwrap(), o.text_ids);
    let mean = o.text_nll.iter().sum::<f64>() / o.text_nll.len() as f64;
    assert!((mean / o.text_mean_nll - 1.0).abs() < 1e-4, "the oracle agrees with itself");
}

fn check_gguf(name: &str, path: &Path, o: &Oracle) {
    let m = load(path.to_str().unwrap()).unwrap();
    check_ids(&m, o);
    let mut failures = Vec::new();
    for isa in models::tiers() {
        let (extent, bounds) = match isa {
            Isa::Reference => (LITTLE, &FLOAT),
            Isa::Amx => (ALL, &TILES),
            _ => (ALL, &INT8),
        };
        failures.extend(compare(name, &m, o, bounds, isa, Mode::Fast, extent));
        if isa == Isa::best() {
            failures.extend(compare(name, &m, o, &INT8, isa, Mode::Deterministic, extent));
        }
    }
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

fn check_folder(name: &str, path: &Path, o: &Oracle, dtypes: &[DType]) {
    let m = load(path.to_str().unwrap()).unwrap();
    let mut failures = Vec::new();
    for &dtype in dtypes {
        let dir = tempfile::tempdir().unwrap();
        export_hf_folder(&m, dir.path(), dtype, 2).unwrap();
        let copy = load(dir.path().to_str().unwrap()).unwrap();
        let what = format!("{name} {dtype} folder");
        for isa in models::tiers() {
            let best = isa == Isa::best();
            let extent = match isa {
                Isa::Reference => LITTLE,
                _ if best => ALL,
                _ => SHORT,
            };
            failures.extend(compare(&what, &copy, o, &FLOAT, isa, Mode::Fast, extent));
            if best {
                failures.extend(compare(&what, &copy, o, &FLOAT, isa, Mode::Deterministic, SHORT));
            }
        }
    }
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

#[test]
fn smollm2_from_gguf() {
    let Some(path) = models::smollm2() else { return };
    check_gguf("SmolLM2 Q4_1", &path, &oracle("smollm2_q4_1.json"));
}

#[test]
fn gemma3_from_gguf() {
    let Some(path) = models::gemma3() else { return };
    check_gguf("Gemma 3 Q4_K_M", &path, &oracle("gemma3_270m.json"));
}

#[test]
fn smollm2_from_safetensors() {
    let Some(path) = models::smollm2() else { return };
    check_folder("SmolLM2", &path, &oracle("smollm2_q4_1.json"), &[DType::F32, DType::BF16]);
}

#[test]
fn gemma3_from_safetensors() {
    let Some(path) = models::gemma3() else { return };
    // In bf16 only: in f32 it would be a gigabyte, and SmolLM2 has shown that path.
    check_folder("Gemma 3", &path, &oracle("gemma3_270m.json"), &[DType::BF16]);
}
