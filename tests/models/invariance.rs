//! What must not change a result: how a prompt is cut, what else is in the batch, the number of threads, what
//! a sequence held before. Bit for bit in deterministic mode, and for threads in every mode.

use crate::support::{models, rounding};
use tandem::Error;
use tandem::cache::KvType;
use tandem::engine::{Engine, NewTokens, Options};
use tandem::model::{LoadedModel, load};
use tandem::program::{RequestId, Wants};
use tandem::simd::Isa;
use tandem::simd::linear::Mode;

/// Two pages and a bit, beyond the windows of the tiny models.
const TOKENS: usize = 67;

const FAMILIES: [&str; 12] = [
    "tiny-llama",
    "tiny-llama3",
    "tiny-llama-80",
    "tiny-mistral",
    "tiny-qwen2",
    "tiny-qwen3",
    "tiny-gemma3",
    "tiny-opt",
    "tiny-qwen3-moe",
    "tiny-qwen2-moe",
    "tiny-olmoe",
    "tiny-gpt-oss",
];
const DTYPES: [&str; 12] =
    ["f32", "bf16", "f16", "q8_0", "q4_0", "q4_k", "q6_k", "iq4_nl", "mxfp4", "iq4_xs", "q3_k", "q2_k"];

/// Every family in bf16 and q4_k, every dtype in one family with a dense feed-forward and one with experts.
fn models() -> Vec<(String, LoadedModel)> {
    let every_family = FAMILIES.iter().flat_map(|f| ["bf16", "q4_k"].map(|d| (*f, d)));
    let others = DTYPES.iter().filter(|d| !["bf16", "q4_k"].contains(d));
    let every_dtype = others.flat_map(|d| ["tiny-qwen3", "tiny-qwen3-moe"].map(|family| (family, *d)));
    every_family
        .chain(every_dtype)
        .map(|(family, dtype)| {
            let name = format!("{family},dtype={dtype}");
            let m = load(&format!("synth:{name},seed=5")).unwrap();
            (name, m)
        })
        .collect()
}

/// The tiers, but the reference: it has one kernel for everything, and is slow.
fn fast_tiers() -> Vec<Isa> {
    models::tiers().into_iter().filter(|&i| i > Isa::Reference).collect()
}

fn tokens(n: usize, which: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * i * 31 + i * 7 + 3 + which * 101) % 512) as u32).collect()
}

fn options(isa: Isa, mode: Mode, threads: usize) -> Options {
    let mut o = Options::new(isa, 128);
    (o.mode, o.threads, o.sequences) = (mode, Some(threads), 4);
    o
}

/// The logits of all of `tokens`, in steps of `chunk`.
fn feed(e: &mut Engine, seq: RequestId, tokens: &[u32], chunk: usize) -> Vec<f32> {
    let mut out = Vec::new();
    for tokens in tokens.chunks(chunk) {
        out.extend_from_slice(e.forward(&[NewTokens { id: seq, tokens, wants: Wants::All }]).unwrap());
    }
    out
}

/// Exactly equal in deterministic mode; in fast mode the worst row within [`rounding::activations`]. With experts, the last bits
/// of fast mode may choose another expert, and nothing can be said.
#[track_caller]
fn assert_same(what: &str, mode: Mode, m: &LoadedModel, isa: Isa, got: &[f32], want: &[f32]) {
    let differs = got.iter().zip(want).position(|(a, b)| a.to_bits() != b.to_bits());
    assert_eq!(got.len(), want.len(), "{what}");
    let Some(at) = differs else { return };
    let row = at / m.spec.vocab;
    assert!(mode == Mode::Fast, "{what}: row {row}: {} is not {}", got[at], want[at]);
    if m.spec.experts.is_some() {
        return;
    }
    let off = got
        .chunks_exact(m.spec.vocab)
        .zip(want.chunks_exact(m.spec.vocab))
        .map(|(g, w)| models::distance(g, w).0)
        .fold(0.0, f64::max);
    let bound = rounding::activations(m, isa);
    assert!(off <= bound, "{what}: {off:.2e} standard deviations, at most {bound:.2e}");
}

#[test]
fn chunks_of_a_prompt_and_single_tokens_give_what_the_whole_gives() {
    for (name, m) in models() {
        for isa in fast_tiers() {
            for mode in [Mode::Deterministic, Mode::Fast] {
                let mut e = models::engine(&m, &options(isa, mode, 2));
                let tokens = tokens(TOKENS, 0);
                let mut logits = |chunk| {
                    let seq = e.add();
                    let out = feed(&mut e, seq, &tokens, chunk);
                    e.remove(seq);
                    out
                };
                let whole = logits(TOKENS);
                for chunk in [1, 7, 32] {
                    let what = format!("{name} {isa} {mode:?}, chunks of {chunk}");
                    assert_same(&what, mode, &m, isa, &logits(chunk), &whole);
                }
            }
        }
    }
}

#[test]
fn a_sequence_in_a_batch_gives_what_it_gives_alone() {
    for (name, m) in models() {
        for isa in fast_tiers() {
            for mode in [Mode::Deterministic, Mode::Fast] {
                let mut e = models::engine(&m, &options(isa, mode, 2));
                // Lengths that end inside, at and after a page.
                let prompts = [tokens(5, 0), tokens(32, 1), tokens(41, 2)];
                let next = [tokens(3, 3), tokens(1, 4), tokens(20, 5)];
                let alone: Vec<Vec<f32>> = prompts
                    .iter()
                    .zip(&next)
                    .map(|(p, n)| {
                        let seq = e.add();
                        let mut out = feed(&mut e, seq, p, p.len());
                        out.extend(feed(&mut e, seq, n, n.len()));
                        e.remove(seq);
                        out
                    })
                    .collect();
                let seqs: Vec<RequestId> = prompts.iter().map(|_| e.add()).collect();
                let mut together: Vec<Vec<f32>> = vec![Vec::new(); 3];
                for step in [&prompts, &next] {
                    let inputs: Vec<_> = seqs
                        .iter()
                        .zip(step)
                        .map(|(&seq, tokens)| NewTokens { id: seq, tokens, wants: Wants::All })
                        .collect();
                    let mut rest = e.forward(&inputs).unwrap();
                    for (out, input) in together.iter_mut().zip(&inputs) {
                        let (mine, tail) = rest.split_at(input.tokens.len() * m.spec.vocab);
                        out.extend_from_slice(mine);
                        rest = tail;
                    }
                }
                for (i, (t, a)) in together.iter().zip(&alone).enumerate() {
                    let what = format!("{name} {isa} {mode:?}, sequence {i} of a batch");
                    assert_same(&what, mode, &m, isa, t, a);
                }
            }
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for (name, m) in models() {
        for isa in fast_tiers() {
            for mode in [Mode::Deterministic, Mode::Fast] {
                let logits = |threads| {
                    let mut e = models::engine(&m, &options(isa, mode, threads));
                    let seq = e.add();
                    let tokens = tokens(TOKENS, 0);
                    let mut out = feed(&mut e, seq, &tokens[..60], 60);
                    out.extend(feed(&mut e, seq, &tokens[60..], 1));
                    out
                };
                let one = logits(1);
                for threads in [2, 3] {
                    let what = format!("{name} {isa} {mode:?}, {threads} threads");
                    // Bits, in both modes.
                    assert_same(&what, Mode::Deterministic, &m, isa, &logits(threads), &one);
                }
            }
        }
    }
}

#[test]
fn every_tier_and_cache_type_repeats_what_was_forgotten() {
    for family in FAMILIES {
        let m = load(&format!("synth:{family},dtype=q4_k,seed=5")).unwrap();
        for isa in models::tiers() {
            for kv in KvType::ALL {
                let mut o = options(isa, Mode::Deterministic, 2);
                o.kv_dtype = kv;
                let mut e = models::engine(&m, &o);
                // The reference tier: enough to cross a page and no more.
                let n = if isa == Isa::Reference { 36 } else { TOKENS };
                let keep = n - 5;
                let tokens = tokens(n, 0);
                let seq = e.add();
                let first = feed(&mut e, seq, &tokens, n);
                e.truncate(seq, keep);
                assert_eq!(e.len(seq), keep);
                let vocab = m.spec.vocab;
                let what = format!("{family} {isa} KV {}", kv.name());
                let redone = feed(&mut e, seq, &tokens[keep..], 2);
                assert_same(&what, Mode::Deterministic, &m, isa, &redone, &first[keep * vocab..]);
                // Another text in between leaves nothing behind, in no page.
                e.truncate(seq, 0);
                feed(&mut e, seq, &super::invariance::tokens(n, 9), n);
                e.truncate(seq, 0);
                let again = feed(&mut e, seq, &tokens, 32);
                assert_same(&what, Mode::Deterministic, &m, isa, &again, &first);
            }
        }
    }
}

#[test]
fn the_last_rows_logits_are_those_of_all_rows() {
    let m = load("synth:tiny-gemma3,dtype=q8_0,seed=5").unwrap();
    let v = m.spec.vocab;
    for isa in models::tiers() {
        let mut e = models::engine(&m, &options(isa, Mode::Deterministic, 2));
        let (a, b, c) = (tokens(9, 0), tokens(6, 1), tokens(4, 2));
        let run = |e: &mut Engine, wants: [Wants; 3]| {
            let seqs = [e.add(), e.add(), e.add()];
            let inputs: Vec<_> = seqs
                .iter()
                .zip([&a, &b, &c])
                .zip(wants)
                .map(|((&seq, tokens), logits)| NewTokens { id: seq, tokens, wants: logits })
                .collect();
            let out = e.forward(&inputs).unwrap().to_vec();
            seqs.into_iter().for_each(|s| e.remove(s));
            out
        };
        let all = run(&mut e, [Wants::All; 3]);
        assert_eq!(all.len(), 19 * v);
        let some = run(&mut e, [Wants::Last, Wants::Nothing, Wants::All]);
        assert_eq!(some, [&all[8 * v..9 * v], &all[15 * v..]].concat(), "{isa}");
        assert!(run(&mut e, [Wants::Nothing; 3]).is_empty());
    }
}

#[test]
fn a_refused_step_changes_nothing() {
    let m = load("synth:tiny-llama,dtype=q4_0,seed=5").unwrap();
    let mut o = options(Isa::best(), Mode::Deterministic, 2);
    (o.context, o.sequences) = (64, 2);
    let mut e = models::engine(&m, &o);
    let (a, b) = (e.add(), e.add());
    let first = tokens(40, 0);
    feed(&mut e, a, &first, 40);
    let before = e.len(a);
    let good = tokens(3, 1);
    let input = |seq, tokens| NewTokens { id: seq, tokens, wants: Wants::Last };
    let long = tokens(25, 2);
    let cases: [(&str, Vec<NewTokens<'_>>, fn(&Error) -> bool); 4] = [
        ("outside the vocabulary", vec![input(b, &good), input(a, &[1, 512])], |e| {
            matches!(e, Error::Usage(_))
        }),
        ("do not fit the context of 64", vec![input(b, &good), input(a, &long)], |e| {
            matches!(e, Error::Capacity(_))
        }),
        ("twice", vec![input(a, &good), input(a, &good)], |e| matches!(e, Error::Usage(_))),
        ("twice", vec![input(b, &good), input(a, &good), input(b, &good)], |e| matches!(e, Error::Usage(_))),
    ];
    for (want, inputs, kind) in cases {
        let error = e.forward(&inputs).expect_err(want);
        assert!(error.to_string().contains(want) && kind(&error), "{error}");
        assert_eq!((e.len(a), e.len(b)), (before, 0), "{want}");
    }
    for (want, prompt) in [("empty", &[][..]), ("context of 64", &long[..])] {
        let error = e.prefill(a, prompt, |_| ()).expect_err(want);
        assert!(error.to_string().contains(want), "{error}");
        assert_eq!(e.len(a), before);
    }
    // A prompt whose bad token is in its second chunk is refused as a whole.
    let mut o2 = o.clone();
    o2.chunk = 4;
    let mut chunked = models::engine(&m, &o2);
    let seq = chunked.add();
    chunked.prefill(seq, &[1, 2, 3, 4, 5, 9999], |_| ()).expect_err("a token outside the vocabulary");
    assert_eq!(chunked.len(seq), 0, "nothing of a refused prompt stays");

    // More sequences than were planned for: pages run out, and what had been reserved is free again.
    let c = e.add();
    let full = tokens(64, 3);
    feed(&mut e, b, &full, 64);
    let error = e.forward(&[input(a, &good), input(c, &good)]).expect_err("no free pages");
    assert!(matches!(error, Error::Capacity(_)), "{error}");
    assert_eq!((e.len(a), e.len(b), e.len(c)), (before, 64, 0));

    // And `a` goes on as if nothing had happened.
    let got = feed(&mut e, a, &good, 3);
    let mut fresh = models::engine(&m, &o);
    let seq = fresh.add();
    feed(&mut fresh, seq, &first, 40);
    assert_eq!(got, feed(&mut fresh, seq, &good, 3));
}
