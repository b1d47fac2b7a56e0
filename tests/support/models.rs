//! Real models and engines for tests of the library.

#![allow(dead_code)] // `tests/memory_plan.rs` includes this file alone

use std::path::PathBuf;

use tandem::engine::{Engine, Options};
use tandem::model::{LoadedModel, synth};
use tandem::simd::Isa;

/// Where a model for tests is, in `$TANDEM_TEST_MODELS` or `models/`; a loud skip if it is nowhere.
pub fn find(names: [&str; 2]) -> Option<PathBuf> {
    let folder = std::env::var_os("TANDEM_TEST_MODELS")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("models"), PathBuf::from);
    let found = names.iter().map(|n| folder.join(n)).find(|p| p.is_file());
    if found.is_none() {
        println!("skipped: no {} in {}", names[0], folder.display());
    }
    found
}

/// SmolLM2-135M-Instruct in Q4_1.
pub fn smollm2() -> Option<PathBuf> {
    find(["SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2.gguf"])
}

/// Gemma 3 270M in Q4_K_M.
pub fn gemma3() -> Option<PathBuf> {
    find(["gemma-3-270m-q4_k_m.gguf", "gemma3.gguf"])
}

/// The names of the tiny models without experts, which accelerators run.
pub fn dense_models() -> impl Iterator<Item = &'static str> {
    let dense = |n: &&str| synth::spec(n).is_ok_and(|spec| spec.experts.is_none());
    synth::names().filter(|n| n.starts_with("tiny-")).filter(dense)
}

/// The tiers that this machine runs; a line for each that it does not.
pub fn tiers() -> Vec<Isa> {
    for isa in Isa::ALL {
        if let Some(why) = isa.missing() {
            println!("skipped: tier {isa}: {why}");
        }
    }
    Isa::supported()
}

/// An engine for `m`.
pub fn engine(m: &LoadedModel, options: &Options) -> Engine {
    Engine::new(m.spec.clone(), &m.weights, options, &|_| ())
        .unwrap_or_else(|e| panic!("{}: {e}", m.spec.name))
}

/// How far `got` is from `want`, in standard deviations of `want`: root mean square, and the most.
pub fn distance(got: &[f32], want: &[f32]) -> (f64, f64) {
    assert_eq!(got.len(), want.len());
    let n = want.len() as f64;
    let mean = want.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
    let std = (want.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n).sqrt();
    let (mut square, mut most) = (0f64, 0f64);
    for (&g, &w) in got.iter().zip(want) {
        let e = (f64::from(g) - f64::from(w)).abs() / std;
        // A NaN must not look like no error.
        let e = if e.is_nan() { f64::INFINITY } else { e };
        square += e * e;
        most = most.max(e);
    }
    ((square / n).sqrt(), most)
}
