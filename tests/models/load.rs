//! Real files and random models through the front door.

use std::path::PathBuf;

use tandem::model::{self, Position, QkNorm, RopePairing, describe, load, synth};
use tandem::tensor::DType;

/// A model of this machine, or a loud skip.
fn real(names: [&str; 2]) -> Option<String> {
    let dir = std::env::var_os("TANDEM_TEST_MODELS")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("models"), PathBuf::from);
    let found = names.iter().map(|n| dir.join(n)).find(|p| p.is_file());
    if found.is_none() {
        println!("skipped: no {} in {}", names[0], dir.display());
    }
    found.map(|p| p.display().to_string())
}

#[test]
fn smollm2_has_the_sizes_it_is_known_for() {
    let Some(path) = real(["SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2.gguf"]) else { return };
    let m = load(&path).unwrap();
    let s = &m.spec;
    assert_eq!((s.n_layers, s.d_model, s.n_heads, s.n_kv_heads, s.head_dim), (30, 576, 9, 3, 64));
    assert_eq!((s.d_ff, s.vocab, s.max_context, s.tied_head), (1536, 49152, 8192, true));
    let Position::Rope(rope) = &s.position else { panic!("no RoPE") };
    assert_eq!((rope.theta, rope.pairing, rope.dim), (100_000.0, RopePairing::Interleaved, 64));
    assert_eq!(m.weights.get("token_embd.weight").unwrap().dtype, DType::Q8_0);
    assert!(m.weights.get("token_embd.weight").unwrap().data.is_mapped(), "zero copy");
    assert!(m.chat_template.unwrap().contains("<|im_start|>"));
    assert_eq!(m.eos_ids, [2]);
}

#[test]
fn gemma3_has_the_sizes_it_is_known_for() {
    let Some(path) = real(["gemma-3-270m-q4_k_m.gguf", "gemma3.gguf"]) else { return };
    let m = load(&path).unwrap();
    let s = &m.spec;
    assert_eq!((s.n_layers, s.d_model, s.n_heads, s.n_kv_heads, s.head_dim), (18, 640, 4, 1, 256));
    assert!(s.qk_norm == Some(QkNorm::PerHead) && s.post_norms && s.tied_head);
    assert_eq!(s.attn_scale, 1.0 / 16.0);
    assert_eq!(s.embed_scale, 640f32.sqrt());
    let w = s.window.as_ref().unwrap();
    assert_eq!(w.size, 512);
    let global: Vec<usize> = (0..18).filter(|&i| !w.layers[i]).collect();
    assert_eq!(global, [5, 11, 17]);
    let Position::Rope(rope) = &s.position else { panic!("no RoPE") };
    assert_eq!((rope.theta, rope.local_theta, rope.pairing), (1e6, Some(1e4), RopePairing::Half));
    let d = describe(&m);
    assert_eq!(d.kv_bytes_per_token, 18 * 2 * 256 * 2);
    assert_eq!(d.parameters, 268_098_176);
}

#[test]
fn every_spec_is_sound() {
    for name in synth::names() {
        let r = synth::parse(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        r.spec.check().unwrap_or_else(|e| panic!("{name}: {e}"));
    }
    let params = |name: &str| -> f64 {
        let spec = synth::parse(name).unwrap().spec;
        model::wanted_tensors(&spec)
            .values()
            .filter(|w| w.required)
            .map(|w| w.shape.iter().product::<usize>() as f64)
            .sum::<f64>()
            / 1e9
    };
    for (name, billions) in [
        ("smollm2-135m", 0.1345),
        ("llama-3.2-1b", 1.236),
        ("llama-3.1-8b", 8.030),
        ("llama-3.1-70b", 70.55),
        ("llama-2-7b", 6.738),
        ("mistral-7b", 7.248),
        ("qwen2-0.5b", 0.494),
        ("qwen3-0.6b", 0.596),
        ("qwen3-4b", 4.022),
        ("qwen3-8b", 8.191),
        ("gemma-3-270m", 0.2681),
        ("qwen3-30b-a3b", 30.53),
        ("qwen3-235b-a22b", 235.1),
        ("qwen1.5-moe-a2.7b", 14.32),
        ("mixtral-8x7b", 46.70),
        ("olmoe-1b-7b", 6.919),
        ("granite-3.1-3b-a800m", 3.30),
        ("gemma-3-1b", 1.000),
        ("opt-125m", 0.1252),
        ("opt-30b", 29.97),
        ("opt-175b", 174.6),
    ] {
        let p = params(name);
        assert!((p / billions - 1.0).abs() < 2e-3, "{name}: {p} billion parameters, known for {billions}");
    }
}

#[test]
fn every_tiny_model_loads_in_every_dtype() {
    for name in synth::names().filter(|n| n.starts_with("tiny-")) {
        for d in DType::ALL {
            let m =
                load(&format!("synth:{name},dtype={d},seed=3")).unwrap_or_else(|e| panic!("{name} {d}: {e}"));
            assert!(m.notes.is_empty(), "{name} {d}: {:?}", m.notes);
            // Mean and spread of a matrix and of one that writes to the residual stream.
            for (t, extra) in
                [("blk.0.ffn_up.weight", 1.0), ("blk.0.ffn_down.weight", 2.0 * m.spec.n_layers as f64)]
            {
                // Of the first expert, if there are some.
                let w =
                    m.weights.get(t).or_else(|| m.weights.get(&t.replace(".weight", ".0.weight"))).unwrap();
                assert_eq!(w.dtype, d);
                let x = tandem::reference::dequant::dequantise(w);
                let n = x.len() as f64;
                let mean = x.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
                let var = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / n;
                let want = 1.0 / (w.cols() as f64 * extra);
                assert!((var / want - 1.0).abs() < 0.08, "{name} {d} {t}: variance {var}, wanted {want}");
                // n independent elements (blocks of one sign: 256 together) put the mean within 5 deviations.
                assert!(mean.abs() < 5.0 * (want * 16.0 / n).sqrt(), "{name} {d} {t}: mean {mean}");
            }
        }
    }
}

#[test]
fn random_weights_repeat_and_seeds_differ() {
    let embed = |s: &str| load(s).unwrap().weights.get("token_embd.weight").unwrap().data.to_vec();
    let a = embed("synth:tiny-llama,dtype=q4_k,seed=1");
    assert_eq!(a, embed("synth:tiny-llama,dtype=q4_k,seed=1"));
    assert_ne!(a, embed("synth:tiny-llama,dtype=q4_k,seed=2"));
    // Another depth leaves the rows of the embedding alone.
    assert_eq!(a, embed("synth:tiny-llama,dtype=q4_k,seed=1,layers=3"));
}

#[test]
fn wrong_requests_get_one_sentence() {
    for (s, want) in [
        ("synth:nope", "no such spec"),
        ("synth:tiny-llama,dtype=q9", "dtype=q9: wanted one of f32"),
        ("synth:tiny-llama,colour=red", "options are"),
        ("synth:tiny-llama,layers=0", "layers=0: wanted 1 to 4096"),
        ("synth:opt-175b,dtype=f32,layers=4096", "memory are available"),
        ("/nonexistent/model.gguf", "No such file"),
        (env!("CARGO_MANIFEST_DIR"), "no config.json here"),
        (concat!(env!("CARGO_MANIFEST_DIR"), "/README.nope"), "No such file"),
        (concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"), "does not start with `GGUF`"),
    ] {
        let got = load(s).map(|_| ()).expect_err(s).to_string();
        assert!(got.contains(want), "{s}: {got:?} does not say {want:?}");
        assert!(!got.contains('\n'));
    }
}
