//! Emulated time: what running takes on a described machine, against what the virtual machine predicts for the same programs.
//!
//! The two have nothing in common but the description: predictions price the operations of a program, the emulated accelerator and
//! the host's half count what each call reads and multiplies.

mod divided;
mod nodes;
mod overlap;
mod split;

use std::io::Write;
use std::sync::Arc;

use tandem::device::emulated::{EmulatedOptions, EmulatedRuntime};
use tandem::device::{self, Buffer, Clock, Kind, Lane, Rates, Runtime};
use tandem::engine::{Engine, NewTokens, Options, Timeline};
use tandem::model::{LoadedModel, load};
use tandem::plan::{Costs as _, Hardware, OpCosts, Roofline, Sizes as PlanSizes, StepTimes, hardware};
use tandem::program::{
    Far, Flow, Group, Iteration, Kv, LayerPlacement, Phase, Placement, Policy, RequestId, Residence, Side,
    Unit, Wants, lower, virtual_machine,
};
use tandem::simd::Isa;

const MACHINES: [&str; 3] = ["t4-xeon", "rtx4060-laptop", "h100-spr"];

/// Six blocks: of the last one rows without logits are not computed behind its attention.
fn tiny() -> LoadedModel {
    load("synth:tiny-llama,seed=2,layers=6").unwrap()
}

/// 12.6 MB a layer: large enough that bytes count more than latencies.
fn mid(layers: usize) -> LoadedModel {
    let mut file = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
    let config = format!(
        r#"{{"model_type": "llama", "hidden_size": 768, "num_hidden_layers": {layers}, "num_attention_heads": 12,
            "num_key_value_heads": 4, "intermediate_size": 2048, "vocab_size": 1024, "max_position_embeddings": 512,
            "rope_theta": 10000.0, "rms_norm_eps": 1e-05, "hidden_act": "silu", "tie_word_embeddings": false}}"#
    );
    file.write_all(config.as_bytes()).unwrap();
    load(&format!("synth:{}", file.path().display())).unwrap()
}

fn options(context: usize) -> Options {
    let mut options = Options::new(Isa::selected().unwrap(), context);
    options.threads = Some(2);
    options
}

fn engine(m: &LoadedModel, machine: &str, placement: &Placement, context: usize) -> Engine {
    with(m, machine, placement, &options(context))
}

fn with(m: &LoadedModel, machine: &str, placement: &Placement, options: &Options) -> Engine {
    on(m, &format!("emulated:{machine}").parse().unwrap(), placement, options)
}

fn on(m: &LoadedModel, kind: &Kind, placement: &Placement, options: &Options) -> Engine {
    let (spec, placement) = (m.spec.clone(), placement.clone());
    match kind {
        Kind::Timed(_, h) if !placement.uses(Side::Device) => {
            let clock = Arc::new(Clock::new(Rates::of(h).unwrap()));
            Engine::on_emulated_cpu(spec, &m.weights, options, clock, &|_| ()).unwrap()
        }
        kind => {
            let accel = device::open(kind, Some(1 << 30)).unwrap();
            let name = kind.to_string();
            Engine::placed(spec, &m.weights, options, accel, &name, "test", placement, &|_| ()).unwrap()
        }
    }
}

/// Seconds of a prompt and of the decode step behind it.
fn executed(e: &mut Engine, prompt: usize) -> (f64, f64) {
    let tokens: Vec<u32> = (0..prompt as u32).map(|t| t % 500).collect();
    let now = |e: &Engine| e.emulated_seconds().expect("an engine in emulated time");
    let seq = e.add();
    let begin = now(e);
    e.forward_greedy(&[NewTokens { id: seq, tokens: &tokens, wants: Wants::Last }]).unwrap();
    let middle = now(e);
    e.forward_greedy(&[NewTokens { id: seq, tokens: &[7], wants: Wants::Last }]).unwrap();
    (middle - begin, now(e) - middle)
}

/// What the virtual machine says of a prompt and of the decode step behind it.
fn predicted(m: &LoadedModel, h: &Hardware, placement: &Placement, prompt: usize) -> (f64, f64) {
    let seconds = |phase, first: usize, tokens: usize| {
        let group = Group {
            request: RequestId { slot: 0, generation: 0 },
            phase,
            first: first as u32,
            tokens: tokens as u32,
            kv: Kv::Device,
            wants: Wants::Last,
        };
        predicted_step(m, h, placement, vec![group])
    };
    (seconds(Phase::Prefill, 0, prompt), seconds(Phase::Decode, prompt, 1))
}

/// What it says of a step of these groups.
fn predicted_step(m: &LoadedModel, h: &Hardware, placement: &Placement, groups: Vec<Group>) -> f64 {
    let sizes = PlanSizes::of_weights(&m.spec, &m.weights, Isa::selected().unwrap());
    let costs = Roofline::new(h, &sizes);
    let iteration = Iteration::serial(groups, true);
    let program = lower(placement, &iteration).unwrap();
    let costs = OpCosts::new(&costs, &sizes).of(&iteration).on(placement);
    virtual_machine::run(&program, &costs).seconds()
}

/// Rows from which tokens are drawn: their logits stay on the device, and cost what predictions say.
#[test]
fn drawn_tokens_take_as_long_as_predicted() {
    let m = mid(2);
    for machine in MACHINES {
        let (h, rows) = (hardware::named(machine).unwrap(), 24);
        let placement = Placement::boundary(0, 2, 0, 0);
        let mut options = options(64);
        (options.sequences, options.logits) = (rows, rows);
        let mut e = with(&m, machine, &placement, &options);
        let seqs: Vec<_> = (0..rows).map(|_| e.add()).collect();
        for &seq in &seqs {
            e.forward_greedy(&[NewTokens { id: seq, tokens: &[1, 2, 3, 4, 5], wants: Wants::Last }]).unwrap();
        }
        let inputs: Vec<_> =
            seqs.iter().map(|&seq| NewTokens { id: seq, tokens: &[7], wants: Wants::Last }).collect();
        let mut executed = |top: bool| {
            let begin = e.emulated_seconds().unwrap();
            match top {
                true => e.forward_tops(&inputs, &vec![Some(1.0); rows]).unwrap(),
                false => drop(e.forward(&inputs).unwrap().to_vec()),
            }
            let took = e.emulated_seconds().unwrap() - begin;
            seqs.iter().for_each(|&seq| e.truncate(seq, 5));
            took
        };
        let sizes = PlanSizes::of_weights(&m.spec, &m.weights, Isa::selected().unwrap());
        let predicted = |top: bool| {
            let group = |slot| Group {
                request: RequestId { slot, generation: 0 },
                phase: Phase::Decode,
                first: 5,
                tokens: 1,
                kv: Kv::Device,
                wants: Wants::Last,
            };
            let iteration =
                Iteration { top, ..Iteration::serial((0..rows as u32).map(group).collect(), false) };
            let costs = Roofline::new(&h, &sizes);
            let program = lower(&placement, &iteration).unwrap();
            virtual_machine::run(&program, &OpCosts::new(&costs, &sizes).of(&iteration).on(&placement))
                .seconds()
        };
        let (whole, tops) = (executed(false), executed(true));
        for (got, want) in [(whole, predicted(false)), (tops, predicted(true))] {
            assert!((got / want - 1.0).abs() < 0.1, "{machine}: {got} s, predicted {want}");
        }
        // What is saved, too. Emulated time finds these few logits in the level-two cache, predictions read them twice.
        let reads = Roofline::new(&h, &sizes).copy(Side::Device, 4 * (rows * m.spec.vocab) as u64);
        let (got, want) = (whole - tops, predicted(false) - predicted(true) + reads);
        assert!(got > 0.0 && (got / want - 1.0).abs() < 0.01, "{machine}: {got} s saved, predicted {want}");
    }
}

/// Boundaries, all on the CPU among them, streaming, pinned layers with several vectors.
fn placements(m: &LoadedModel) -> Vec<(String, Placement)> {
    let n = m.spec.n_layers;
    let boundary = |k| (format!("boundary {k}"), Placement::boundary(k, n, 0, 0));
    let mut found: Vec<_> = [0, 1, n / 2 + 1, n, n + 1, n + 2].map(boundary).into();
    let pinned = |blocks: usize, layer: LayerPlacement| {
        let mut p = Placement::all(Side::Device, n, 0);
        p.layers[blocks..].fill(layer);
        p
    };
    let streamed = |prefill: [u8; 6], decode: [u8; 6], kv| {
        let policy = |bits: [u8; 6]| Policy::from_bits(bits.map(|b| b == 1));
        let (prefill, decode) = (policy(prefill), policy(decode));
        LayerPlacement { weights: Residence::Streamed, prefill, decode, kv, device_experts: 0 }
    };
    for (prefill, decode) in [
        ([0; 6], [1; 6]),
        ([1; 6], [0, 1, 1, 0, 0, 0]),
        ([0; 6], [0, 1, 1, 1, 0, 0]),
        ([0, 0, 0, 1, 1, 0], [0; 6]),
    ] {
        found.push((format!("lia {prefill:?} {decode:?}"), pinned(1, streamed(prefill, decode, Side::Host))));
    }
    found.push(("stream".into(), pinned(0, streamed([0; 6], [0; 6], Side::Device))));
    found
}

/// Predicted and executed time of every placement on every machine agree within a tenth.
fn agree(m: &LoadedModel, prompt: usize, machines: &[&str], which: fn(&str) -> bool) {
    let mut wrong = Vec::new();
    for &machine in machines {
        let h = hardware::named(machine).unwrap();
        for (name, placement) in placements(m).into_iter().filter(|(name, _)| which(name)) {
            let (want, got) = (
                predicted(m, &h, &placement, prompt),
                executed(&mut engine(m, machine, &placement, 128), prompt),
            );
            for (phase, want, got) in [("prefill", want.0, got.0), ("decode", want.1, got.1)] {
                let off = got / want - 1.0;
                let line = format!(
                    "{machine} {name} {phase}: predicted {:.1} us, executed {:.1} us ({:+.1}%)",
                    1e6 * want,
                    1e6 * got,
                    100.0 * off
                );
                println!("{line}");
                if off.is_nan() || off.abs() > 0.1 {
                    wrong.push(line);
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} off by more than 10%:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn small_steps_take_what_was_predicted() {
    agree(&tiny(), 40, &MACHINES, |_| true);
}

#[test]
fn large_steps_take_what_was_predicted() {
    let one_of_a_kind = |name: &str| {
        name == "boundary 3" || name.starts_with("lia [0, 0, 0, 0, 0, 0] [1") || name == "stream"
    };
    agree(&mid(4), 6, &["rtx4060-laptop"], one_of_a_kind);
}

/// Of prompts that end in one step, only the rows with logits go on behind the last attention: they are put side by side.
#[test]
fn prompts_of_one_step_take_what_was_predicted() {
    let (m, machine, tokens) = (mid(2), "t4-xeon", [100, 90, 110, 100]);
    let h = hardware::named(machine).unwrap();
    for k in [0, 1, 2] {
        let placement = Placement::boundary(k, m.spec.n_layers, 0, 0);
        let groups = tokens.iter().enumerate().map(|(slot, &tokens)| Group {
            request: RequestId { slot: slot as u32, generation: 0 },
            phase: Phase::Prefill,
            first: 0,
            tokens,
            kv: Kv::Device,
            wants: Wants::Last,
        });
        let want = predicted_step(&m, &h, &placement, groups.collect());
        let mut e = with(&m, machine, &placement, &Options { sequences: 4, chunk: 400, ..options(400) });
        let prompts: Vec<Vec<u32>> = tokens.iter().map(|&n| (0..n).map(|t| t * t % 500).collect()).collect();
        let inputs: Vec<_> =
            prompts.iter().map(|tokens| NewTokens { id: e.add(), tokens, wants: Wants::Last }).collect();
        let begin = e.emulated_seconds().unwrap();
        e.forward_greedy(&inputs).unwrap();
        let got = e.emulated_seconds().unwrap() - begin;
        let off = got / want - 1.0;
        let line = format!("boundary {k}: predicted {want:.6} s, executed {got:.6} s ({:+.1}%)", 100.0 * off);
        println!("{line}");
        assert!(off.abs() < 0.1, "{line}");
    }
}

/// Nothing of this computer's speed is in it.
#[test]
fn emulated_time_is_the_same_in_every_run() {
    let m = tiny();
    let run = || {
        let placement = Placement::boundary(3, m.spec.n_layers, 0, 0);
        let mut e = engine(&m, "rtx4060-laptop", &placement, 128);
        e.trace();
        let seconds = executed(&mut e, 20);
        (seconds, e.timeline().unwrap())
    };
    let (a, b) = (run(), run());
    assert_eq!(a, b);
    assert!(a.0.0 > a.0.1 && a.0.1 > 0.0, "{:?}", a.0);
}

/// Seconds that both units worked at once.
fn overlap(t: &Timeline, a: Unit, b: Unit) -> f64 {
    let of = |unit| t.spans.iter().filter(move |s| s.unit == unit);
    let both = |x: f64, y: f64, from: f64, to: f64| (y.min(to) - x.max(from)).max(0.0);
    of(a).map(|x| of(b).map(|y| both(x.start, x.end, y.start, y.end)).sum::<f64>()).sum()
}

/// A layer's copy runs under the computation of the layer before, whichever of the two takes longer.
#[test]
fn streamed_weights_hide_copies_or_computation() {
    let m = load("synth:tiny-llama,seed=2,layers=24").unwrap();
    let n = m.spec.n_layers;
    let layer = |l: &mut tandem::program::LayerPlacement| {
        l.weights = Residence::Streamed;
    };
    let mut placement = Placement::all(Side::Device, n, 0);
    placement.layers.iter_mut().for_each(layer);
    let folder = tempfile::tempdir().unwrap();
    for (name, gpu) in [("slow", 4e9), ("fast", 4e12)] {
        // A link of 1 GB/s without latency: a layer of 1.2 MB takes 1.2 ms.
        let text = format!(
            "[cpu]\ncores = 8\ndram_bytes = 64e9\nread_bw = 45e9\nflops_bf16 = 1e12\nllc_bytes = 24e6\n\
             [gpu]\nmem_bytes = 8e9\nbw = 1e12\nflops_bf16 = {gpu:e}\n\
             [link]\nh2d_bw = 1e9\nd2h_bw = 1e9\nlatency_s = 0\n"
        );
        let file = folder.path().join(format!("{name}.toml"));
        std::fs::write(&file, text).unwrap();
        let mut e = engine(&m, file.to_str().unwrap(), &placement, 128);
        e.trace();
        executed(&mut e, 32);
        let mut t = e.timeline().unwrap();
        t.spans.retain(|s| s.step == 0);
        let (gpu, link) = (t.busy(Unit::Gpu), t.busy(Unit::H2d));
        let (hidden, less) = (overlap(&t, Unit::Gpu, Unit::H2d), gpu.min(link));
        println!(
            "{name}: gpu {:.2} ms, link {:.2} ms, {:.1}% hidden",
            1e3 * gpu,
            1e3 * link,
            100.0 * hidden / less
        );
        assert!(hidden >= 0.9 * less, "{name}: {hidden} of {less} s");
        assert_eq!(name == "slow", gpu > link);
    }
}

/// A prompt's second chunk over streamed layers, with the first one's keys and values in host memory: pages and weights cross the link
/// under the computation, or it under them. Pages that stand behind the weights of the layer after would wait for this layer's
/// computation.
#[test]
fn streamed_pages_hide_beside_streamed_weights() {
    // A layer of 1 MB, and a KB of keys and values a token.
    let mut file = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
    let config = r#"{"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 8, "intermediate_size": 256, "vocab_size": 512, "max_position_embeddings": 2048,
        "rope_theta": 10000.0, "rms_norm_eps": 1e-05, "hidden_act": "silu", "tie_word_embeddings": false}"#;
    file.write_all(config.as_bytes()).unwrap();
    let m = load(&format!("synth:{}", file.path().display())).unwrap();
    let n = m.spec.n_layers;
    let mut placement = Placement::all(Side::Device, n, 0);
    placement.layers.iter_mut().for_each(|l| (l.weights, l.kv) = (Residence::Streamed, Side::Host));
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (1024, 64);
    for (name, gpu) in [("slow", 5e9), ("even", 6.5e10), ("fast", 4e12)] {
        let text = format!(
            "[cpu]\ncores = 8\ndram_bytes = 64e9\nread_bw = 45e9\nflops_bf16 = 1e12\nllc_bytes = 24e6\n\
             [gpu]\nmem_bytes = 8e9\nbw = 1e12\nflops_bf16 = {gpu:e}\n\
             [link]\nh2d_bw = 1e9\nd2h_bw = 1e9\nlatency_s = 0\n"
        );
        let file = folder.path().join(format!("{name}.toml"));
        std::fs::write(&file, text).unwrap();
        let options = Options { chunk: first, ..options(first + second + 1) };
        let mut e = with(&m, file.to_str().unwrap(), &placement, &options);
        let seq = e.add();
        let tokens: Vec<u32> = (0..(first + second) as u32).map(|t| t % 500).collect();
        e.forward_greedy(&[NewTokens { id: seq, tokens: &tokens[..first], wants: Wants::Nothing }]).unwrap();
        e.trace();
        let begin = e.emulated_seconds().unwrap();
        e.forward_greedy(&[NewTokens { id: seq, tokens: &tokens[first..], wants: Wants::Last }]).unwrap();
        let took = e.emulated_seconds().unwrap() - begin;
        let t = e.timeline().unwrap();
        let pages: f64 = t.spans.iter().filter(|s| s.name == "page_in").map(|s| s.end - s.start).sum();
        let [gpu, to, from] = [Unit::Gpu, Unit::H2d, Unit::D2h].map(|unit| t.busy(unit));
        let longest = gpu.max(to).max(from);
        println!(
            "{name}: {:.2} ms, gpu {:.2}, to it {:.2} (pages {:.2}), from it {:.2}: {:.3} of the longest",
            1e3 * took,
            1e3 * gpu,
            1e3 * to,
            1e3 * pages,
            1e3 * from,
            took / longest
        );
        assert!(pages > 0.2 * to, "{name}: pages take {pages} of {to} s");
        assert!(took <= 1.1 * longest, "{name}: {took} of {longest} s");
    }
}

/// The boundary of the least predicted time is within 3% of the best of all, tried one by one.
#[test]
fn the_predicted_boundary_is_the_best_of_all() {
    let m = tiny();
    let n = m.spec.n_layers;
    let folder = tempfile::tempdir().unwrap();
    let old = folder.path().join("old-gpu.toml");
    let text = "[cpu]\ncores = 64\ndram_bytes = 512e9\nread_bw = 400e9\nflops_bf16 = 20e12\nllc_bytes = 24e6\n\
                [gpu]\nmem_bytes = 8e9\nbw = 100e9\nflops_bf16 = 5e12\n\
                [link]\nh2d_bw = 8e9\nd2h_bw = 8e9\nlatency_s = 5e-6\n";
    std::fs::write(&old, text).unwrap();
    // A GPU to move everything to, or three units; one that is slower than its CPU.
    for (machine, cap) in
        [("t4-xeon", n + 2), ("rtx4060-laptop", n + 2), ("h100-spr", 3), (old.to_str().unwrap(), n + 2)]
    {
        let h = hardware::named(machine).unwrap_or_else(|| hardware::parse(machine, text).unwrap());
        // All boundaries with at most `cap` units on the device.
        let all: Vec<usize> = (n + 2 - cap..=n + 2).collect();
        let run = |k: usize| {
            let placement = Placement::boundary(k, n, 0, 0);
            let want = predicted(&m, &h, &placement, 8).1;
            (want, executed(&mut engine(&m, machine, &placement, 128), 8).1)
        };
        let times: Vec<(f64, f64)> = all.iter().map(|&k| run(k)).collect();
        let least = |of: fn(&(f64, f64)) -> f64| {
            (0..times.len()).min_by(|&a, &b| of(&times[a]).total_cmp(&of(&times[b]))).unwrap()
        };
        let (chosen, best) = (least(|t| t.0), least(|t| t.1));
        println!("{machine}: boundary {} was predicted, {} is best: {times:?}", all[chosen], all[best]);
        assert!(times[chosen].1 <= 1.03 * times[best].1, "{machine}: {times:?}");
    }
}

/// Pages that have left are attended or streamed, whichever is predicted to be faster: by a CPU that reads faster than the link copies,
/// by one that reads slower, and by one that is worth asking only once there are many pages. Nowhere is the way that is chosen more
/// than 3% slower than the other.
#[test]
fn the_predicted_way_to_attend_what_has_left_is_the_faster() {
    let m = mid(2);
    let placement = Placement::all(Side::Device, 2, 0);
    let sizes = PlanSizes::of_weights(&m.spec, &m.weights, Isa::selected().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let machine = |name: &str, read: f64, link: f64| {
        let text = format!(
            "[cpu]\ncores = 8\ndram_bytes = 64e9\nread_bw = {read:e}\nflops_bf16 = 1e12\nllc_bytes = 24e6\n\
             [gpu]\nmem_bytes = 8e9\nbw = 400e9\nflops_bf16 = 2e13\n\
             [link]\nh2d_bw = {link:e}\nd2h_bw = {link:e}\nlatency_s = 5e-6\n"
        );
        let file = folder.path().join(format!("{name}.toml"));
        std::fs::write(&file, &text).unwrap();
        (file.to_str().unwrap().to_owned(), hardware::parse(name, &text).unwrap())
    };
    // Of 256 tokens, all but at most 128 leave: pages of 32 KiB in each of two layers of 12.6 MB.
    let mut seen = Vec::new();
    for (name, read, link) in [("fast-cpu", 100e9, 2e8), ("slow-cpu", 1e9, 50e9), ("both", 100e9, 2e9)] {
        let (file, h) = machine(name, read, link);
        let run = |far: Option<Far>| {
            let mut options = options(256);
            (options.kv_pages, options.chunk, options.far) = (Some(4), 32, far);
            options.times = Some(StepTimes::new(h.clone(), sizes.clone()));
            let mut e = with(&m, &file, &placement, &options);
            let seq = e.add();
            let tokens: Vec<u32> = (0..256).map(|t| t % 500).collect();
            let mut seconds = Vec::new();
            let mut at = 0;
            while at + 32 <= 256 {
                // Two decode steps behind every chunk.
                for n in [30, 1, 1] {
                    let before = e.emulated_seconds().unwrap();
                    let input = NewTokens { id: seq, tokens: &tokens[at..at + n], wants: Wants::Last };
                    e.forward_greedy(&[input]).unwrap();
                    seconds.push(e.emulated_seconds().unwrap() - before);
                    at += n;
                }
            }
            (seconds, e.far_steps())
        };
        let (chosen, steps) = run(None);
        let (attend, stream) = (run(Some(Far::Attend)), run(Some(Far::Stream)));
        assert_eq!((attend.1.stream, stream.1.attend), (0, 0));
        let sum = |t: &[f64]| t.iter().sum::<f64>();
        println!(
            "{name}: {} steps attended, {} streamed: {:.3} ms; all attended {:.3} ms, all streamed {:.3} ms",
            steps.attend,
            steps.stream,
            1e3 * sum(&chosen),
            1e3 * sum(&attend.0),
            1e3 * sum(&stream.0)
        );
        for (step, &t) in chosen.iter().enumerate() {
            let (a, s) = (attend.0[step], stream.0[step]);
            assert!(t <= 1.03 * a.min(s), "{name}, step {step}: {t} s, attended {a} s, streamed {s} s");
        }
        // Of decode rows, behind the chunks.
        let like = |of: &[f64], other: &[f64]| {
            (0..chosen.len()).any(|i| i % 3 > 0 && chosen[i] == of[i] && of[i] < other[i])
        };
        seen.push((like(&attend.0, &stream.0), like(&stream.0, &attend.0)));
    }
    assert_eq!(seen, [(true, false), (false, true), (true, true)]);
}

fn plain(clock: bool) -> (Arc<dyn Runtime>, Option<Arc<Clock>>) {
    let options = EmulatedOptions { memory: 1 << 24, ..Default::default() };
    if !clock {
        return (Arc::new(EmulatedRuntime::new(options).unwrap()), None);
    }
    let rates = Rates::of(&hardware::named("t4-xeon").unwrap()).unwrap();
    let clock = Arc::new(Clock::new(rates));
    (Arc::new(EmulatedRuntime::timed(options, clock.clone()).unwrap()), Some(clock))
}

/// Copies, events and waits of a runtime with a clock: its times are the link's.
#[test]
fn copies_take_the_links_time() {
    let (rt, clock) = plain(true);
    let clock = clock.unwrap();
    let rates = *clock.rates();
    let bytes = 1 << 20;
    let buffer = Buffer::new(&rt, bytes).unwrap();
    let zero = rt.record_timed(Lane::HostToDevice).unwrap();
    rt.upload(Lane::HostToDevice, buffer.ptr(), &vec![1; bytes]).unwrap();
    let up = rt.record_timed(Lane::HostToDevice).unwrap();
    rt.wait(Lane::DeviceToHost, &up).unwrap();
    let pinned = rt.pinned(bytes).unwrap();
    rt.download_pinned(Lane::DeviceToHost, buffer.ptr(), &pinned, 0, bytes).unwrap();
    let down = rt.record_timed(Lane::DeviceToHost).unwrap();
    // By this computer's clock it is done long before it is in emulated time.
    assert!(!rt.is_done(&down).unwrap());
    rt.synchronize(&down).unwrap();
    assert!(rt.is_done(&down).unwrap());
    let near = |got: std::time::Duration, want: f64| {
        let got = got.as_secs_f64();
        assert!((got - want).abs() <= 2e-9, "{got} s, wanted {want}");
    };
    near(rt.elapsed(&zero, &up).unwrap(), rates.upload(bytes));
    near(rt.elapsed(&up, &down).unwrap(), rates.download(bytes));
    assert!((clock.now() - rates.upload(bytes) - rates.download(bytes)).abs() < 1e-9);
    let (plain, none) = plain(false);
    assert!(none.is_none() && plain.clock().is_none());
}
