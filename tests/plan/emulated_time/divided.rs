//! Experts of a layer on both sides at a time, and experts that are copied to the device for prompts.

use std::io::Write;

use tandem::model::RouterProfile;
use tandem::plan::exchange_pays;
use tandem::simd::linear::Mode;

use super::*;

fn loaded(config: &str, more: &str) -> LoadedModel {
    let mut file = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
    file.write_all(config.as_bytes()).unwrap();
    load(&format!("synth:{},seed=3{more}", file.path().display())).unwrap()
}

/// Three layers of 32 experts of 0.8 MB, 4 of which a row uses.
fn mixture() -> LoadedModel {
    let config = r#"{"model_type": "qwen3_moe", "hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 1024, "moe_intermediate_size": 256, "num_experts": 32,
        "num_experts_per_tok": 4, "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 1024,
        "max_position_embeddings": 512, "rope_theta": 10000.0, "rms_norm_eps": 1e-06, "hidden_act": "silu",
        "tie_word_embeddings": false}"#;
    loaded(config, "")
}

/// Four layers with sinks, of 32 experts of 0.8 MB in MXFP4, with biases.
fn gpt_oss() -> LoadedModel {
    let config = r#"{"model_type": "gpt_oss", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 512, "num_local_experts": 32, "num_experts_per_tok": 4,
        "vocab_size": 1024, "max_position_embeddings": 512, "sliding_window": 64, "rope_theta": 150000.0, "rms_norm_eps": 1e-05,
        "hidden_act": "silu", "swiglu_limit": 7.0, "attention_bias": true, "tie_word_embeddings": false}"#;
    loaded(config, ",dtype=q8_0,experts=mxfp4")
}

/// Every second expert is used seldom, in each layer other ones. Equally so in all: predictions take the mean over the layers, and of the
/// last one only rows with logits count.
fn skewed(m: &LoadedModel) -> RouterProfile {
    let mut router = RouterProfile::uniform(m.spec.experts.as_ref().unwrap());
    router.tokens = 1000;
    for (l, layer) in router.layers.iter_mut().enumerate() {
        for (e, n) in layer.counts.iter_mut().enumerate() {
            *n = if (e + l) % 2 == 0 { 220 } else { 30 };
        }
    }
    router.check("skewed", &m.spec).unwrap();
    router
}

#[test]
fn divided_experts_take_what_was_predicted() {
    let m = mixture();
    let isa = Isa::selected().unwrap();
    for machine in MACHINES {
        let h = hardware::named(machine).unwrap();
        // By the number of experts on the device, decode with unequal use.
        let mut steps = Vec::new();
        for router in [None, Some(skewed(&m))] {
            for n in [1, 8, 16, 31] {
                let mut placement = Placement::all(Side::Device, 3, 0);
                for layer in &mut placement.layers {
                    (layer.weights, layer.device_experts) = (Residence::Both, n);
                }
                let options = Options { router: router.clone().map(Arc::new), ..options(128) };
                let mut e = with(&m, machine, &placement, &options);
                e.trace();
                let got = executed(&mut e, 40);
                let sizes = PlanSizes::of_weights(&m.spec, &m.weights, isa);
                let sizes = router.iter().fold(sizes, |sizes, router| sizes.with_most_used(router));
                let want = of_sizes(&sizes, &h, &placement, 40);
                for (phase, want, got) in [("prefill", want.0, got.0), ("decode", want.1, got.1)] {
                    let off = got / want - 1.0;
                    let line = format!(
                        "{machine}, {n} experts, unequal {}, {phase}: predicted {:.1} us, executed {:.1} us ({:+.1}%)",
                        router.is_some(),
                        1e6 * want,
                        1e6 * got,
                        100.0 * off
                    );
                    println!("{line}");
                    assert!(off.abs() < 0.1, "{line}");
                }
                // While the host computes its experts the device computes its own: an H100 is done before the rows are on the host.
                let both = overlap(&e.timeline().unwrap(), Unit::Gpu, Unit::Host);
                println!("{:.1} us on both sides", 1e6 * both);
                assert!(
                    both > 0.0 || n < 16 || machine == "h100-spr",
                    "{machine}: both sides never worked at a time"
                );
                if router.is_some() {
                    steps.push(got.1);
                }
            }
        }
        // The CPU is the slower side: the less it has to read the sooner a step is done.
        assert!(steps.is_sorted_by(|a, b| a > b), "{machine}: {steps:?}");
    }
}

/// Experts of gpt-oss on the device, on the host, on both sides.
#[test]
fn a_gpt_oss_takes_what_was_predicted() {
    let m = gpt_oss();
    let isa = Isa::selected().unwrap();
    let sizes = PlanSizes::of_weights(&m.spec, &m.weights, isa);
    let mut on_host = Policy::all(Side::Device);
    on_host.0[4..].fill(Side::Host);
    for machine in MACHINES {
        let h = hardware::named(machine).unwrap();
        let all = Placement::all(Side::Device, 4, 0);
        let (mut host, mut divided) = (all.clone(), all.clone());
        for layer in &mut host.layers {
            (layer.weights, layer.prefill, layer.decode) = (Residence::Both, on_host, on_host);
        }
        for layer in &mut divided.layers {
            (layer.weights, layer.device_experts) = (Residence::Both, 12);
        }
        for (where_, placement) in [("device", all), ("host", host), ("both", divided)] {
            let got = executed(&mut with(&m, machine, &placement, &options(128)), 40);
            let want = of_sizes(&sizes, &h, &placement, 40);
            for (phase, want, got) in [("prefill", want.0, got.0), ("decode", want.1, got.1)] {
                let off = got / want - 1.0;
                let line = format!(
                    "{machine}, experts on {where_}, {phase}: predicted {:.1} us, executed {:.1} us ({:+.1}%)",
                    1e6 * want,
                    1e6 * got,
                    100.0 * off
                );
                println!("{line}");
                assert!(off.abs() < 0.1, "{line}");
            }
        }
    }
}

/// Experts that the host has, and computes for decode rows; the device computes prompts with copies of them, which cross beside the
/// layers before.
#[test]
fn streamed_experts_take_what_was_predicted() {
    let m = mixture();
    let isa = Isa::selected().unwrap();
    let mut decode = Policy::all(Side::Device);
    decode.0[4..].fill(Side::Host);
    for machine in MACHINES {
        let h = hardware::named(machine).unwrap();
        let mut placement = Placement::all(Side::Device, 3, 0);
        for layer in &mut placement.layers {
            (layer.weights, layer.decode) = (Residence::StreamedExperts, decode);
        }
        let mut e = with(&m, machine, &placement, &options(128));
        e.trace();
        let got = executed(&mut e, 100);
        let want = of_sizes(&PlanSizes::of_weights(&m.spec, &m.weights, isa), &h, &placement, 100);
        for (phase, want, got) in [("prefill", want.0, got.0), ("decode", want.1, got.1)] {
            let off = got / want - 1.0;
            let line = format!(
                "{machine}, streamed, {phase}: predicted {:.1} us, executed {:.1} us ({:+.1}%)",
                1e6 * want,
                1e6 * got,
                100.0 * off
            );
            println!("{line}");
            assert!(off.abs() < 0.1, "{line}");
        }
        let both = overlap(&e.timeline().unwrap(), Unit::Gpu, Unit::H2d);
        assert!(both > 0.0, "{machine}: nothing was computed beside the copies");
    }
}

/// What the virtual machine says of a prompt and of the decode step behind it.
fn of_sizes(sizes: &PlanSizes, h: &Hardware, placement: &Placement, prompt: u32) -> (f64, f64) {
    let seconds = |phase, first, tokens| {
        let request = RequestId { slot: 0, generation: 0 };
        let group = Group { request, phase, first, tokens, kv: Kv::Device, wants: Wants::Last };
        let iteration = Iteration::serial(vec![group], true);
        let program = lower(placement, &iteration).unwrap();
        let costs = Roofline::new(h, sizes);
        virtual_machine::run(&program, &OpCosts::new(&costs, sizes).of(&iteration).on(placement)).seconds()
    };
    (seconds(Phase::Prefill, 0, prompt), seconds(Phase::Decode, prompt, 1))
}

/// The device gets the experts that the router chooses, and steps become shorter; what is computed stays the same.
#[test]
fn experts_that_follow_the_router_make_steps_shorter() {
    let m = mixture();
    for machine in ["t4-g4dn", "rtx4090-desktop"] {
        let h = hardware::named(machine).unwrap();
        let mut placement = Placement::all(Side::Device, 3, 0);
        for layer in &mut placement.layers {
            (layer.weights, layer.device_experts) = (Residence::Both, 8);
        }
        let run = |follow: Option<f64>| {
            let options = Options { follow, mode: Mode::Deterministic, ..options(512) };
            let mut e = with(&m, machine, &placement, &options);
            let (seq, mut tokens, mut begin) = (e.add(), Vec::new(), 0.0);
            for i in 0..400u32 {
                if i == 300 {
                    begin = e.emulated_seconds().unwrap();
                }
                // Few of the tokens, as texts have it.
                let token = [i * i * 31 % 37];
                let new = [NewTokens { id: seq, tokens: &token, wants: Wants::Last }];
                tokens.extend(e.forward_greedy(&new).unwrap().iter().copied());
            }
            (tokens, (e.emulated_seconds().unwrap() - begin) / 100.0, e.exchanged_experts())
        };
        let pays = exchange_pays(&h).unwrap();
        let (fixed, follows) = (run(None), run(Some(pays)));
        let line = format!(
            "{machine}: {:.1} us a step, {:.1} us with experts that follow, {} exchanged for {pays:.1} choices each",
            1e6 * fixed.1,
            1e6 * follows.1,
            follows.2
        );
        println!("{line}");
        assert!(fixed.0 == follows.0, "{line}: other tokens");
        assert!(fixed.2 == 0 && follows.2 > 0 && follows.1 < 0.95 * fixed.1, "{line}");
    }
}
