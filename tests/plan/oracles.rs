//! The numbers that HELM and LIA print (tests/oracles/papers.json): HELM's from its closed form (`helm.rs`), LIA's from the planner's
//! own formulas.
//!
//! Every entry that reproduces must, within its tolerance; of those that do not, the ones with a corrected formula must
//! give the corrected number, and not the printed one.

use std::collections::BTreeMap;

use serde_json::Value as Json;
use tandem::model::synth;
use tandem::plan::{
    Batch, Costs, Direction, ELEMENT, Group, Hardware, Prefix, Resident, Roofline, Sizes, attention_elements,
    best_policies, ffn_elements, hardware, incoming_bytes, norm_elements, streaming_threshold,
};
use tandem::program::{Phase, Policy, Side, Sublayer};

use super::helm::{Stages, greedy_boundary, search_boundary, weights_fit};

fn oracles() -> Vec<Json> {
    let file: Json = serde_json::from_str(include_str!("../oracles/papers.json")).unwrap();
    file["oracles"].as_array().unwrap().clone()
}

fn sizes(name: &str) -> Sizes {
    Sizes::of_spec(&synth::parse(name).unwrap().spec)
}

/// HELM's blocks: matrices and two norms of 16 bits (without Qwen's norms of heads).
fn helm_block(s: &Sizes) -> u64 {
    ELEMENT * (attention_elements(&s.spec) + ffn_elements(&s.spec) + norm_elements(&s.spec))
}

/// HELM's units: embedding, blocks, head.
fn helm_units(s: &Sizes) -> Vec<u64> {
    let table = (s.spec.vocab * s.spec.d_model) as u64 * ELEMENT;
    [table].into_iter().chain(std::iter::repeat_n(helm_block(s), s.layers())).chain([table]).collect()
}

/// The running example: 45 GB/s on the CPU, 218 GB/s on the GPU; milliseconds.
fn running_example(k: usize) -> (f64, f64, f64) {
    let mut units = helm_units(&sizes("qwen3-8b"));
    units[0] = 0; // a row of the embedding is looked up
    let at = |bw: f64| Prefix::new(units.iter().map(|&b| b as f64 / bw));
    let stages = Stages { cpu: at(45e9), gpu: at(218e9), comm: 5e-6, issue: (0.0, 0.0) };
    let (cpu, gpu, comm) = stages.split(k);
    (cpu * 1e3, gpu * 1e3, (cpu + gpu + comm) * 1e3)
}

/// `cpu(k)->cuda(n)`, by the rule that all published plans follow.
fn published_plan(model: &str, nominal_gb: f64) -> String {
    let units = helm_units(&sizes(model));
    let available = (nominal_gb * 1e9 - 5e8) as u64;
    let at = |bw: f64| Prefix::new(units.iter().map(|&b| b as f64 / bw));
    let stages = Stages { cpu: at(45e9), gpu: at(218e9), comm: 5e-6, issue: (0.0, 0.0) };
    let k = search_boundary(units.len(), |k| weights_fit(&units, k, available), |k| stages.total(k)).unwrap();
    format!("cpu({k})->cuda({})", units.len() - k)
}

/// (m, s, o) after each page of the six tokens: HELM's streaming paged attention, over tokens in pages of any size.
fn online_softmax(pages: &[&[(f64, f64)]]) -> Vec<(f64, f64, f64)> {
    let (mut m, mut s, mut o) = (f64::NEG_INFINITY, 0.0, 0.0);
    let mut trace = Vec::new();
    for page in pages {
        let next = page.iter().fold(m, |m, &(e, _)| m.max(e));
        let keep = (m - next).exp();
        s = keep * s + page.iter().map(|&(e, _)| (e - next).exp()).sum::<f64>();
        o = keep * o + page.iter().map(|&(e, v)| (e - next).exp() * v).sum::<f64>();
        m = next;
        trace.push((m, s, o));
    }
    trace
}

const SIX: [(f64, f64); 6] = [(2.0, 10.0), (4.0, 30.0), (1.0, 5.0), (0.0, 2.0), (1.0, 8.0), (2.0, 12.0)];

/// LIA's Figure 9: effective figures of its A100 machine.
fn fig9(h2d: f64, gpu_bw: f64, gpu_flops: f64) -> Hardware {
    let text = format!(
        "[cpu]\ncores = 40\ndram_bytes = 512e9\nread_bw = 260e9\nflops_bf16 = 20e12\nllc_bytes = 105e6\n\
         [gpu]\nmem_bytes = 40e9\nbw = {gpu_bw:e}\nflops_bf16 = {gpu_flops:e}\n\
         [link]\nh2d_bw = {h2d:e}\nd2h_bw = {h2d:e}\nlatency_s = 0\n"
    );
    hardware::parse("fig9", &text).unwrap()
}

fn bits(p: Policy) -> String {
    p.bits().map(|b| b.to_string()).concat()
}

fn best(costs: &dyn Costs, s: &Sizes, phase: Phase, b: u64, tokens: u64) -> String {
    let groups = [if phase == Phase::Prefill { Group::prompts(b, tokens) } else { Group::decode(b, tokens) }];
    bits(best_policies(costs, s, 0, Resident::HOST, &Batch { phase, groups: &groups }, false).0.policy)
}

/// The first of `range` for which `is`, which holds from there on.
fn first(range: std::ops::Range<u64>, is: impl Fn(u64) -> bool) -> f64 {
    let (mut low, mut high) = (range.start, range.end);
    while low < high {
        let middle = (low + high) / 2;
        if is(middle) { high = middle } else { low = middle + 1 }
    }
    low as f64
}

/// The prefill and decode thresholds of OPT-175B.
fn fig9_thresholds() -> (f64, f64) {
    let (h, s) = (fig9(25e9, 1555e9, 150e12), sizes("opt-175b"));
    let costs = Roofline::serial(&h, &s);
    let prefill = first(1..4096, |n| best(&costs, &s, Phase::Prefill, 1, n) == "000000");
    let decode = first(1..4096, |b| best(&costs, &s, Phase::Decode, b, 256) != "111111");
    (prefill, decode)
}

/// Parameters and, for all layers, keys and values of `tokens` tokens.
fn parameters(s: &Sizes) -> f64 {
    (s.model().host - s.shared_table.host) as f64
}
fn kv(s: &Sizes, tokens: u64) -> f64 {
    (tokens * s.kv_token() * s.layers() as u64) as f64
}

const GIB: f64 = (1u64 << 30) as f64;

fn flops(s: &Sizes, sequences: u64, tokens: u64) -> f64 {
    let h = fig9(25e9, 1555e9, 150e12);
    let costs = Roofline::serial(&h, s);
    let groups = [Group::prompts(sequences, tokens)];
    let batch = Batch::prefill(&groups);
    Sublayer::ALL.iter().map(|&x| costs.work(Side::Device, 0, x, &batch).flops as f64).sum()
}

/// What our formulas give for an entry; `None` if it is not about a formula of ours.
fn ours(id: &str, entry: &Json) -> Option<Json> {
    let q8 = sizes("qwen3-8b");
    let (opt30, opt175) = (sizes("opt-30b"), sizes("opt-175b"));
    let list = |x: &Json| -> Vec<f64> { x.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect() };
    let ratio = |x: &Json| list(x)[0] / list(x)[1];
    let e = ELEMENT as f64;
    let one = |x: f64| Some(Json::from(x));
    let many = |x: &[f64]| Some(Json::from(x.to_vec()));
    let block = helm_block(&q8) as f64;
    let layer30 =
        (e * (attention_elements(&opt30.spec) + ffn_elements(&opt30.spec)) as f64, opt30.layers() as f64);
    match id {
        "helm.w_attn.8b" => one(e * attention_elements(&q8.spec) as f64),
        "helm.w_ffn.8b" => one(e * ffn_elements(&q8.spec) as f64),
        "helm.w_norm.8b" => one(e * norm_elements(&q8.spec) as f64),
        "helm.w_param.8b" => one(block),
        "helm.ffn_share.8b" => one(e * ffn_elements(&q8.spec) as f64 / block),
        "helm.w_act.8b" => one(q8.hidden(1) as f64),
        "helm.kv_per_token.8b" => one(kv(&q8, 1)),
        "helm.kv_4096.8b" => one(kv(&q8, 4096)),
        "helm.w_kv.block.8b" => one((4096 * q8.kv_token()) as f64),
        "helm.units" => Some(serde_json::json!({
            "4B": sizes("qwen3-4b").units(), "8B": q8.units(),
            "14B": sizes("qwen3-14b").units(), "32B": sizes("qwen3-32b").units(),
        })),
        "helm.block_time.8b" => many(&[block / 45e9 * 1e3, block / 218e9 * 1e3]),
        "helm.allcpu.8b" => one(running_example(37).0),
        "helm.allgpu_bytes.8b" => one(36.0 * block / 1e9),
        "helm.embed_plus_head.8b" => one((helm_units(&q8)[0] + helm_units(&q8)[37]) as f64 / 1e9),
        "helm.tcomm" => {
            let text = include_str!("../../hardware/rtx4060-laptop.toml");
            let h = hardware::parse("rtx4060-laptop", text).unwrap();
            one(Roofline::new(&h, &q8).transfer(Direction::ToDevice, q8.hidden(1)))
        }
        "helm.running_example.k18" => one(running_example(18).2),
        "helm.running_example.k21" => {
            let (cpu, gpu, total) = running_example(21);
            many(&[cpu, gpu, total])
        }
        "helm.no_kernel" => one(20.0 * block / 3.7e9 * 1e3),
        "helm.gpu_7_16GB" => one(helm_units(&q8)[21..].iter().sum::<u64>() as f64 / 1e9),
        "helm.plan.4060.8B" => Some(published_plan("qwen3-8b", 8.0).into()),
        "helm.plan.3090.14B" => Some(published_plan("qwen3-14b", 24.0).into()),
        "helm.plan.3090.4B" => Some(published_plan("qwen3-4b", 24.0).into()),
        "helm.plan.3090.8B" => Some(published_plan("qwen3-8b", 24.0).into()),
        "helm.plan.L40S.4B" => Some(published_plan("qwen3-4b", 48.0).into()),
        "helm.plan.L40S.8B" => Some(published_plan("qwen3-8b", 48.0).into()),
        "helm.sixtoken" | "helm.sixtoken.exact" => {
            let (_, s, o) = *online_softmax(&[&SIX[..4], &SIX[4..]]).last().unwrap();
            one(o / s)
        }
        "helm.sixtoken.trace" => {
            let pages: Vec<&[(f64, f64)]> = SIX.chunks(1).collect();
            Some(online_softmax(&pages).iter().map(|&(m, s, o)| Json::from(vec![m, s, o])).collect())
        }
        id if id.starts_with("helm.speedup.") && id != "helm.speedup.mean" => one(ratio(&entry["inputs"])),
        "helm.speedup.mean" => {
            let all = oracles();
            let each: Vec<f64> = all
                .iter()
                .filter(|o| {
                    let id = o["id"].as_str().unwrap();
                    id.starts_with("helm.speedup.") && id != "helm.speedup.mean"
                })
                .map(|o| ratio(&o["inputs"]))
                .collect();
            one(each.iter().sum::<f64>() / each.len() as f64)
        }
        "helm.latency_ratio" | "lia.ablation" => {
            Some(entry["inputs"].as_array().unwrap().iter().map(|p| Json::from(ratio(p))).collect())
        }
        "helm.context" => one(30000.0 / 500.0),
        "helm.maxctx" => many(&[8192.0 / 1024.0, 8192.0 / 128.0]),
        "lia.fig9.prefill_BL" => one(fig9_thresholds().0),
        "lia.fig9.decode_B" => one(fig9_thresholds().1),
        "lia.table3.32" => one(100.0 * parameters(&opt30) / (parameters(&opt30) + kv(&opt30, 900 * 64))),
        "lia.table3.32.B" => one(100.0 * parameters(&opt30) / (parameters(&opt30) + kv(&opt30, 1580 * 64))),
        // With the parameters in slow memory, the fast one holds this many more sequences.
        "lia.table3.32.maxB" => one((parameters(&opt30) + kv(&opt30, 900 * 64)) / kv(&opt30, 64)),
        "lia.mem.330" => one((parameters(&opt175) + kv(&opt175, 1024)) / GIB),
        "lia.mem.1_6TB" => one((parameters(&opt175) + kv(&opt175, 256 * 1024)) / 1e12),
        "lia.kv.145GB" => one(kv(&opt175, 32 * 1024) / GIB),
        "lia.layer.1_2GB" => one(layer30.0 / 1e9),
        "lia.opt1.62pct" => many(&[0.62 * layer30.1, 30.0 * layer30.0 / GIB]),
        "lia.opt1.flexgen32" => one(0.58 * layer30.0 * layer30.1 / GIB),
        "lia.opt1.4_7" => one(e * (opt30.spec.d_model as f64).powi(2) * layer30.1 / GIB),
        "lia.opb.50000" => one(4.0 * opt175.spec.d_model as f64),
        "lia.pcie5.5s" => one(parameters(&opt175) / 64e9),
        "lia.five_h100" => one((parameters(&opt175) / 80e9).ceil()),
        "lia.amx.peak" => one(40.0 * 1024.0 * 2.2e9 / 1e12),
        // 16 x 16 x 32 multiply-adds in 16 cycles, against two FMA units of 32 lanes.
        "lia.amx.ratio8" => one((16.0 * 16.0 * 32.0 * 2.0 / 16.0) / (2.0 * 32.0 * 2.0)),
        "lia.compute_growth" => one(flops(&opt175, 32, 1024) / flops(&opt175, 32, 64)),
        "lia.transfer_growth" => {
            // Weights, keys and values, and a block's activations in and out.
            let block = opt175.blocks[0].total().host as f64;
            let bytes = |n: u64| block + (n * opt175.kv_token() + 2 * opt175.hidden(n)) as f64;
            one(bytes(32 * 1024) / bytes(32 * 64))
        }
        _ => None,
    }
}

/// Entries about measurements of the papers, prices and typing: no formula of ours can agree or disagree.
const NOT_FORMULAS: &[&str] = &[
    "helm.table63",
    "lia.ablation.1_9",
    "lia.cxl_gain",
    "lia.cxl_cost",
    // Each has a test of its own below.
    "lia.threshold_closed_form",
    "lia.three_policies",
];

#[track_caller]
fn close(id: &str, ours: &Json, want: &Json, tolerance: f64) {
    match (ours, want) {
        (Json::Array(a), Json::Array(b)) => {
            assert_eq!(a.len(), b.len(), "{id}");
            a.iter().zip(b).for_each(|(a, b)| close(id, a, b, tolerance));
        }
        (Json::Object(a), Json::Object(b)) => {
            assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>(), "{id}");
            a.iter().for_each(|(k, v)| close(id, v, &b[k], tolerance));
        }
        (Json::Number(a), Json::Number(b)) => {
            let (a, b) = (a.as_f64().unwrap(), b.as_f64().unwrap());
            assert!((a - b).abs() <= tolerance, "{id}: {a}, the oracle says {b} ± {tolerance}");
        }
        (a, b) => assert_eq!(a, b, "{id}"),
    }
}

#[test]
fn every_number_that_reproduces_does() {
    let mut checked = 0;
    for entry in oracles().iter().filter(|o| o["reproduces"] == true) {
        let id = entry["id"].as_str().unwrap();
        match ours(id, entry) {
            Some(found) => {
                let tolerance = entry["tolerance"].as_f64().unwrap();
                let (printed, got) = (entry["expected"].to_string(), found.to_string());
                println!("{id:<28} printed {printed:<20} ours {got:<20} tolerance {tolerance}");
                close(id, &found, &entry["expected"], tolerance);
                checked += 1;
            }
            None => assert!(NOT_FORMULAS.contains(&id), "{id}: no formula for this oracle"),
        }
    }
    assert_eq!(checked, 52);
}

/// Prints that contradict themselves: our number is the corrected one.
#[test]
fn corrected_numbers_are_ours() {
    // The precision to which each correction is given.
    let corrected: BTreeMap<&str, f64> = [
        ("helm.w_kv.block.8b", 0.0),
        ("helm.embed_plus_head.8b", 1e-6),
        ("helm.running_example.k21", 0.05),
        ("helm.gpu_7_16GB", 1e-6),
    ]
    .into();
    let all = oracles();
    for (id, tolerance) in corrected {
        let entry = all.iter().find(|o| o["id"] == id).unwrap();
        assert_eq!(entry["reproduces"], false, "{id}");
        close(id, &ours(id, entry).unwrap(), &entry["computed"], tolerance);
    }
}

/// An additive δ cannot explain the published rows; as a lower bound of the stage it can.
#[test]
fn issue_time_is_a_lower_bound() {
    let stages = |issue: f64| Stages {
        cpu: Prefix::new([0.0; 38]),
        gpu: Prefix::new([36.9e-3 / 38.0; 38]),
        comm: 0.0,
        issue: (0.0, issue),
    };
    assert!((stages(1.64e-3).total(0) - 62.32e-3).abs() < 1e-9);
    assert!((stages(0.5e-3).total(0) - 36.9e-3).abs() < 1e-9);
}

#[test]
fn any_paging_of_the_six_tokens_gives_the_same() {
    for split in 1..6 {
        for at in 0..6 - split {
            let pages = [&SIX[..at], &SIX[at..at + split], &SIX[at + split..]];
            let pages: Vec<_> = pages.into_iter().filter(|p| !p.is_empty()).collect();
            let (_, s, o) = *online_softmax(&pages).last().unwrap();
            let backwards: Vec<_> = pages.iter().rev().copied().collect();
            let (_, s2, o2) = *online_softmax(&backwards).last().unwrap();
            assert!((o / s - 24.241826859978875).abs() < 1e-9 && (o2 / s2 - o / s).abs() < 1e-9);
        }
    }
}

/// The merge that the engine runs, over pages of the six tokens in any order.
#[test]
fn the_engines_merge_gives_the_six_token_result() {
    use tandem::simd::attention::{Partial, merge_partials};
    for pages in [1usize, 2, 3, 6] {
        let part = |page: &[(f64, f64)]| {
            let (m, s, o) = online_softmax(&[page])[0];
            Partial { m: vec![m as f32], s: vec![s as f32], o: vec![o as f32] }
        };
        let mut parts: Vec<Partial> = SIX.chunks(6 / pages).map(part).collect();
        for _ in 0..parts.len() {
            parts.rotate_left(1);
            let mut out = [0f32];
            merge_partials(&parts.iter().collect::<Vec<_>>(), 1, None, &mut out);
            // A handful of roundings of numbers below 40, and an approximated exponential.
            assert!((out[0] as f64 - 24.241826859978875).abs() < 1e-4, "{pages} pages: {}", out[0]);
        }
    }
}

#[test]
fn the_closed_form_agrees_with_the_search_and_with_any_model() {
    let n = streaming_threshold(25e9, 1555e9, 260e9, 20e12, 150e12).unwrap();
    assert!((n - 849.0).abs() < 1.0, "{n}");
    let h = fig9(25e9, 1555e9, 150e12);
    for model in ["opt-30b", "opt-66b", "opt-175b"] {
        let s = sizes(model);
        let costs = Roofline::serial(&h, &s);
        let prefill = first(1..4096, |n| best(&costs, &s, Phase::Prefill, 1, n) == "000000");
        assert!((prefill - n).abs() < 0.05 * n, "{model}: {prefill}, {n} in closed form");
    }
    // By the data sheet (PCIe 32 GB/s, 312 TFLOP/s) the threshold would be far from the printed one.
    let sheet = streaming_threshold(32e9, 1555e9, 260e9, 20e12, 312e12).unwrap();
    assert!((sheet - 596.0).abs() < 60.0, "{sheet}");
}

/// LIA §7.1: of 64 vectors three win on dense models; decode depends on B alone, prefill on B·L.
#[test]
fn three_policies_win() {
    let mut seen = std::collections::BTreeSet::new();
    for h in [fig9(25e9, 1555e9, 150e12), fig9(50e9, 2000e9, 360e12)] {
        let s = sizes("opt-175b");
        let costs = Roofline::serial(&h, &s);
        for b in [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 900, 1100, 1500, 2000, 3000] {
            for tokens in [32, 64, 128, 256, 512, 1024, 2048] {
                seen.insert(best(&costs, &s, Phase::Prefill, b, tokens));
                seen.insert(best(&costs, &s, Phase::Decode, b, tokens));
            }
        }
        let by_b = |b| -> Vec<_> { [32, 256, 2048].map(|n| best(&costs, &s, Phase::Decode, b, n)).into() };
        assert!(by_b(64).iter().all(|p| p == "111111") && by_b(2000).iter().all(|p| p == "011000"));
        for (b, n) in [(1, 2048), (2, 1024), (8, 256), (64, 32)] {
            assert_eq!(best(&costs, &s, Phase::Prefill, b, n), "000000", "{b} x {n}");
        }
    }
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), ["000000", "011000", "111111"]);
}

/// The printed conditions test p = 1 for the GPU: taken literally they give the complement of the published policies.
#[test]
fn one_is_the_cpu() {
    let (h, s) = (fig9(25e9, 1555e9, 150e12), sizes("opt-175b"));
    assert_eq!(best(&Roofline::serial(&h, &s), &s, Phase::Decode, 64, 256), "111111");
}

/// X_6 is four times as wide as the residual, which is what crosses.
#[test]
fn the_residual_is_as_wide_as_the_model() {
    let s = sizes("opt-175b");
    let groups = [Group::decode(7, 10)];
    let x6 = incoming_bytes(&s, 0, Sublayer::Down, &Batch::decode(&groups));
    assert_eq!((s.hidden(7), x6), (2 * 7 * 12288, 8 * 7 * 12288));
}

/// LIA's Table 1: bytes and FLOPs of each sublayer, for B = 2, L = 8, d = 4.
#[test]
fn lia_table_1() {
    let mut spec = synth::parse("tiny-opt").unwrap().spec;
    (spec.d_model, spec.n_heads, spec.n_kv_heads, spec.head_dim, spec.d_ff) = (4, 1, 1, 4, 16);
    let s = Sizes::of_spec(&spec);
    let h = fig9(25e9, 1555e9, 150e12);
    let costs = Roofline::serial(&h, &s);
    for (id, groups) in [
        ("lia.table1.prefill", [Group::prompts(2, 8)]),
        ("lia.table1.decode", [Group { sequences: 2, rows: 1, past: 7, causal: true }]),
    ] {
        let all = oracles();
        let want = &all.iter().find(|o| o["id"] == id).unwrap()["expected"];
        let batch = Batch { phase: Phase::Prefill, groups: &groups };
        for (i, sublayer) in Sublayer::ALL.into_iter().enumerate() {
            let w = costs.work(Side::Device, 0, sublayer, &batch);
            assert_eq!(w.flops, want["C"][i].as_u64().unwrap(), "{id} {sublayer:?}");
            // The table leaves out biases and norms, and prints 2·B·L·d for the scores, which are 2·B·n_h·L².
            let vectors = match sublayer {
                Sublayer::Qkv => 3 * 4 + 8,
                Sublayer::Up => 16 + 8,
                Sublayer::Out | Sublayer::Down => 4,
                _ => 0,
            };
            assert_eq!(w.y - 2 * vectors, want["DY"][i].as_u64().unwrap(), "{id} {sublayer:?}");
            if sublayer == Sublayer::Values {
                assert_eq!(w.x, groups[0].total_rows() * 8 * 2);
            } else {
                assert_eq!(w.x, want["DX"][i].as_u64().unwrap(), "{id} {sublayer:?}");
            }
        }
    }
}

#[test]
fn greedy_filling_finds_the_published_plans_too() {
    let units = helm_units(&sizes("qwen3-8b"));
    assert_eq!(greedy_boundary(units.len(), |k| weights_fit(&units, k, 7_500_000_000)), Some(21));
}
