//! Every family and every switch of a spec against a forward pass in f64 that has no cache and no kernels.

use crate::support::{models, naive_model, rounding};
use tandem::cache::KvType;
use tandem::engine::{NewTokens, Options};
use tandem::model::{
    Experts, LoadedModel, ModelSpec, Position, Rope, RopePairing, RopeScaling, RouterWeights, load,
};
use tandem::program::Wants;
use tandem::simd::Isa;
use tandem::simd::linear::Mode;
use tandem::tensor::Half;

/// More than a page, than a window of the tiny models and than a block of attention.
const TOKENS: usize = 70;
/// With experts: with every choice there is more risk that one is too close to be compared.
const TOKENS_OF_EXPERTS: usize = 16;

fn tokens(n: usize, vocab: usize) -> Vec<u32> {
    (0..n).map(|i| (i * i * 31 + i * 7 + 3) as u32 % vocab as u32).collect()
}

/// Compares the tiers that `of` takes.
fn check(name: &str, m: &LoadedModel, of: &dyn Fn(Isa) -> bool) -> Vec<String> {
    let mut failures = Vec::new();
    let vocab = m.spec.vocab;
    let n = tokens_of(&m.spec);
    let tokens = tokens(n, vocab);
    for kv in KvType::ALL {
        let want: Vec<f32> = naive_model::logits(&m.spec, &m.weights, kv, &tokens)
            .into_iter()
            .flatten()
            .map(|x| x as f32)
            .collect();
        for isa in models::tiers().into_iter().filter(|&isa| of(isa)) {
            for mode in [Mode::Fast, Mode::Deterministic] {
                if isa == Isa::Reference && mode == Mode::Deterministic {
                    continue; // it has one kernel for everything, and is slow
                }
                let mut options = Options::new(isa, n);
                (options.kv_dtype, options.mode, options.threads) = (kv, mode, Some(2));
                let mut e = models::engine(m, &options);
                let seq = e.add();
                let mut got = Vec::new();
                // A prompt, and then single tokens.
                let (prompt, rest) = tokens.split_at(n - 4);
                for step in std::iter::once(prompt).chain(rest.chunks(1)) {
                    let input = NewTokens { id: seq, tokens: step, wants: Wants::All };
                    got.extend_from_slice(e.forward(&[input]).unwrap());
                }
                let products = kv != KvType::F16 && isa >= Isa::Avx512;
                let bound = rounding::cpu(&m.spec, kv, products);
                let worst = got
                    .chunks_exact(vocab)
                    .zip(want.chunks_exact(vocab))
                    .map(|(g, w)| models::distance(g, w).0)
                    .fold(0.0, f64::max);
                println!("{name} {isa} {mode:?} KV {}: {worst:.1e} of {bound:.1e}", kv.name());
                if worst > bound {
                    failures.push(format!(
                        "{name} {isa} {mode:?} KV {}: {worst:.2e}, at most {bound:.2e}",
                        kv.name()
                    ));
                }
            }
        }
    }
    failures
}

fn tokens_of(spec: &ModelSpec) -> usize {
    if spec.experts.is_some() { TOKENS_OF_EXPERTS } else { TOKENS }
}

/// A tiny model with f32 weights, its spec changed; if it has experts, the first that chooses none of them by so little that rounding
/// might choose another. A router's logits are off by a quarter of the bound, like other results, and the lead of one over
/// another by √2 of that: twice the bound is six times as much.
///
/// Tiers with bf16 dot products round more, so that they have a model of their own: what the others compute does not depend on the best
/// tier of the machine.
pub fn decided(name: &str, bf16_dots: bool, change: &dyn Fn(&mut ModelSpec)) -> LoadedModel {
    for seed in 7..2000 {
        let mut m = load(&format!("synth:{name},dtype=f32,seed={seed}")).unwrap();
        change(&mut m.spec);
        let tokens = tokens(tokens_of(&m.spec), m.spec.vocab);
        let is_clear = KvType::ALL.iter().all(|&kv| {
            let bound = rounding::cpu(&m.spec, kv, kv != KvType::F16 && bf16_dots);
            naive_model::closest_choice(&m.spec, &m.weights, kv, &tokens) > 2.0 * bound
        });
        if m.spec.experts.is_none() || is_clear {
            return m;
        }
    }
    panic!("{name}: every seed has choices that are too close");
}

/// Compares `name`, its spec changed, on every tier of the machine.
fn on_every_tier(what: &str, name: &str, change: &dyn Fn(&mut ModelSpec)) -> Vec<String> {
    let has_bf16_dots = |isa: Isa| isa >= Isa::Avx512;
    let mut failures = Vec::new();
    for bf16_dots in [false, true] {
        let of = |isa| has_bf16_dots(isa) == bf16_dots;
        if Isa::supported().into_iter().any(of) {
            failures.extend(check(what, &decided(name, bf16_dots, change), &of));
        }
    }
    failures
}

/// A tiny model with f32 weights, its spec changed.
fn with(name: &str, change: impl FnOnce(&mut ModelSpec)) -> LoadedModel {
    let mut m = load(&format!("synth:{name},dtype=f32,seed=7")).unwrap();
    change(&mut m.spec);
    m
}

fn experts(spec: &mut ModelSpec) -> &mut Experts {
    spec.experts.as_mut().expect("a model with experts")
}

fn rope(spec: &mut ModelSpec) -> &mut Rope {
    let Position::Rope(rope) = &mut spec.position else { panic!("no RoPE") };
    rope
}

#[test]
fn every_family_computes_what_its_spec_says() {
    let mut failures = Vec::new();
    for name in tandem::model::synth::names().filter(|n| n.starts_with("tiny-")) {
        failures.extend(on_every_tier(name, name, &|_| ()));
    }
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

#[test]
fn every_switch_of_a_spec_does_what_it_says() {
    let factors = |s: &mut ModelSpec| {
        let n = rope(s).dim / 2;
        rope(s).scaling = RopeScaling::Factors((0..n).map(|i| 1.0 + i as f32 / 8.0).collect());
    };
    let yarn = |truncate| RopeScaling::Yarn {
        factor: 4.0,
        original_context: 64,
        beta_fast: 8.0,
        beta_slow: 0.5,
        truncate,
        attention_factor: 1.2,
    };
    let variants: [(&str, &str, &dyn Fn(&mut ModelSpec)); 19] = [
        ("interleaved pairs", "tiny-llama", &|s| rope(s).pairing = RopePairing::Interleaved),
        ("linear scaling", "tiny-llama", &|s| rope(s).scaling = RopeScaling::Linear { factor: 4.0 }),
        ("frequency factors", "tiny-llama", &factors),
        ("half of the head rotated", "tiny-llama", &|s| rope(s).dim = 32),
        ("part of the head rotated, interleaved", "tiny-qwen3", &|s| {
            (rope(s).dim, rope(s).pairing) = (48, RopePairing::Interleaved);
        }),
        ("soft-capped logits", "tiny-gemma3", &|s| s.logit_softcap = Some(1.5)),
        ("soft-capped scores beside head norms", "tiny-gemma3", &|s| s.attn_softcap = Some(0.5)),
        ("soft-capped scores of grouped heads", "tiny-llama", &|s| s.attn_softcap = Some(1.0)),
        ("linear scaling beside local theta", "tiny-gemma3", &|s| {
            rope(s).scaling = RopeScaling::Linear { factor: 8.0 };
        }),
        ("yarn scaling", "tiny-llama", &|s| rope(s).scaling = yarn(true)),
        ("yarn scaling between whole pairs, half of the head rotated", "tiny-llama", &|s| {
            (rope(s).dim, rope(s).scaling) = (32, yarn(false));
        }),
        ("dynamic scaling beyond the first context", "tiny-llama", &|s| {
            rope(s).scaling = RopeScaling::Dynamic { factor: 4.0, original_context: 32 };
        }),
        ("short factors of longrope", "tiny-phi3", &|s| {
            if let RopeScaling::LongRope { original_context, .. } = &mut rope(s).scaling {
                *original_context = TOKENS;
            }
        }),
        ("scaling of windowed layers", "tiny-gemma3", &|s| rope(s).local_scaling = yarn(true)),
        ("logits scaled before their soft-cap", "tiny-gemma3", &|s| {
            (s.logit_scale, s.logit_softcap) = (0.3, Some(1.5));
        }),
        ("experts weighed among all", "tiny-qwen3-moe", &|s| {
            experts(s).weights = RouterWeights::OfAll;
        }),
        ("one expert", "tiny-mixtral", &|s| experts(s).used = 1),
        ("all experts", "tiny-mixtral", &|s| experts(s).used = 4),
        ("llama3 scaling, short first context", "tiny-llama3", &|s| {
            rope(s).scaling = RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_context: 64,
            };
        }),
    ];
    let mut failures = Vec::new();
    for (what, name, change) in variants {
        failures.extend(on_every_tier(what, name, change));
    }
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

#[test]
fn the_comparison_sees_small_mistakes() {
    // What the bounds must not hide: each of these is one wrong constant.
    let mistakes: [(&str, &str, &dyn Fn(&mut ModelSpec)); 16] = [
        ("tiny-gemma3", "window off by one", &|s| s.window.as_mut().unwrap().size += 1),
        ("tiny-gemma3", "no local theta", &|s| rope(s).local_theta = None),
        ("tiny-gemma3", "SiLU for GELU", &|s| s.ffn = tandem::model::Ffn::SwiGlu),
        ("tiny-gemma3", "scale of the scores 1% off", &|s| s.attn_scale *= 1.01),
        ("tiny-gemma3", "no post norms", &|s| s.post_norms = false),
        ("tiny-gemma2", "no cap of the scores", &|s| s.attn_softcap = None),
        ("tiny-gemma2", "cap of the scores 10% off", &|s| s.attn_softcap = s.attn_softcap.map(|c| c * 1.1)),
        ("tiny-gemma2", "windows on the other layers", &|s| {
            s.window.as_mut().unwrap().layers.iter_mut().for_each(|w| *w = !*w);
        }),
        ("tiny-olmo2", "no post norms", &|s| s.post_norms = false),
        ("tiny-qwen3-moe", "one expert less", &|s| experts(s).used -= 1),
        ("tiny-qwen3-moe", "weights of all", &|s| experts(s).weights = RouterWeights::OfAll),
        ("tiny-qwen2-moe", "no shared expert", &|s| experts(s).shared = None),
        ("tiny-gpt-oss", "no sinks", &|s| s.sinks = false),
        ("tiny-gpt-oss", "plain SwiGLU", &|s| s.ffn = tandem::model::Ffn::SwiGlu),
        ("tiny-gpt-oss", "windows on the other layers", &|s| {
            s.window.as_mut().unwrap().layers.iter_mut().for_each(|w| *w = !*w);
        }),
        ("tiny-gpt-oss", "a truncated ramp", &|s| {
            if let RopeScaling::Yarn { truncate, .. } = &mut rope(s).scaling {
                *truncate = true;
            }
        }),
    ];
    for (name, what, mistake) in mistakes {
        let m = with(name, |_| ());
        let (right, wrong) = (naive(&m), naive(&with(name, mistake)));
        let worst = (0..TOKENS)
            .map(|r| models::distance(&wrong[r * 512..(r + 1) * 512], &right[r * 512..(r + 1) * 512]).0)
            .fold(0.0, f64::max);
        let bound = rounding::cpu(&m.spec, Half::F16, false);
        println!("{name}, {what}: {worst:.1e}, against a bound of {bound:.1e}");
        assert!(worst > 2.0 * bound, "{what} moves the logits by {worst:.1e} only");
    }
}

fn naive(m: &LoadedModel) -> Vec<f32> {
    let rows = naive_model::logits(&m.spec, &m.weights, Half::F16, &tokens(TOKENS, m.spec.vocab));
    rows.into_iter().flatten().map(|x| x as f32).collect()
}
