//! Every kind of operation by hand on round numbers, and whole programs against the closed form.

use super::*;
use crate::model::synth;
use crate::plan::cost::Batch;
use crate::plan::price::{Workload, price};
use crate::plan::{Group as Alike, Hardware, Roofline, hardware};
use crate::program::virtual_machine::{Costs as _, run, run_timed};
use crate::program::{
    Far, LayerPlacement, Phase, Placement, Policy, Program, RequestId, Residence, Work, lower, waits,
};

fn sizes(name: &str) -> Sizes {
    Sizes::of_spec(&synth::parse(name).unwrap().spec)
}

/// Seconds that tell what was asked: products by sublayer, thousands a row; a byte is a second, twice that to the host.
struct Round;

impl Costs for Round {
    fn embed(&self, _: Side, rows: u64) -> f64 {
        7e9 + rows as f64
    }
    fn sublayer(&self, side: Side, layer: usize, sublayer: Sublayer, batch: &Batch<'_>) -> f64 {
        let side = if side == Side::Host { 1e12 } else { 0.0 };
        side + 1e9 * sublayer as usize as f64 + 1e6 * layer as f64 + batch.rows() as f64
    }
    fn attend(&self, side: Side, layer: usize, scan: &Scan) -> f64 {
        let side = if side == Side::Host { 1e12 } else { 0.0 };
        side + 1e9 * layer as f64 + 1e6 * scan.kv_tokens as f64 + 1e3 * scan.pairs as f64 + scan.rows as f64
    }
    fn head(&self, _: Side, rows: u64) -> f64 {
        8e9 + rows as f64
    }
    fn copy(&self, _: Side, bytes: u64) -> f64 {
        bytes as f64
    }
    fn transfer(&self, direction: Direction, bytes: u64) -> f64 {
        bytes as f64 * if direction == Direction::ToHost { 2.0 } else { 1.0 }
    }
    fn issue(&self, _: Side) -> f64 {
        0.0
    }
}

fn op(kind: Kind, unit: Unit, layer: Option<u32>, work: Work) -> Op {
    Op {
        kind,
        unit,
        layer,
        sub_batch: 0,
        rows: 0..work.rows as u32,
        groups: 0..1,
        wanted_only: false,
        detached: false,
        work,
        reads: Vec::new(),
        writes: Vec::new(),
    }
}

#[test]
fn every_kind_by_hand() {
    use Unit::{D2h, Gpu, H2d, Host};
    let s = sizes("tiny-llama"); // d 256, 4 query heads and 2 KV heads of 64, I 512
    let (d, q, kv, ff, heads, vocab) = (256.0, 256.0, 128.0, 512.0, 4.0, s.spec.vocab as f64);
    let costs = OpCosts::new(&Round, &s);
    let rows = Work { rows: 3, ..Work::default() };
    let seconds = |kind, unit, layer, work| costs.seconds(&op(kind, unit, layer, work));
    let append = |mailbox, staged| Kind::Append { mailbox, staged };
    let whole = Kind::Attend { part: Part::Whole, from_mailbox: false, to_mailbox: false, staged: None };
    let carry = |cargo, to| Kind::Carry { cargo, to };
    let (host, device) = (Side::Host, Side::Device);
    let page = 32.0 * 2.0 * kv * 2.0;
    let partial = 4.0 * (q + 2.0 * heads);
    let layer = s.blocks[1].total().device as f64;
    let pages = Work { pages: 5, ..Work::default() };
    let attended = Work { rows: 3, kv_tokens: 40, pairs: 50, ..Work::default() };
    for (kind, unit, work, want) in [
        (Kind::Embed, Host, rows, 7e9 + 3.0),
        (Kind::Project { add: true }, Host, rows, 1e12 + 1e6 + 3.0),
        (Kind::Project { add: false }, Gpu, rows, 1e6 + 3.0),
        (append(false, None), Gpu, rows, 3.0 * 2.0 * kv * 3.0),
        (append(true, None), Host, rows, 3.0 * 2.0 * kv * 3.0),
        (append(false, Some(1)), Gpu, rows, 3.0 * 2.0 * kv * 3.0),
        (Kind::Publish { queries_only: false }, Gpu, rows, 2.0 * 3.0 * 2.0 * (q + 2.0 * kv)),
        (Kind::Publish { queries_only: true }, Gpu, rows, 2.0 * 3.0 * 2.0 * q),
        (whole, Gpu, attended, 1e9 + 40e6 + 50e3 + 3.0),
        (whole, Host, attended, 1e12 + 1e9 + 40e6 + 50e3 + 3.0),
        (Kind::Collect, Gpu, rows, 3.0 * 2.0 * q),
        (Kind::Merge { mailbox: false }, Gpu, rows, (3.0 * (2.0 * partial + 2.0 * q)) / 2.0),
        (Kind::Merge { mailbox: true }, Gpu, rows, 3.0 * partial + (3.0 * (2.0 * partial + 2.0 * q)) / 2.0),
        (Kind::OutProj, Gpu, rows, 3e9 + 1e6 + 3.0),
        (Kind::FfnUp { add: true }, Gpu, rows, 4e9 + 1e6 + 3.0),
        (Kind::FfnDown, Host, rows, 1e12 + 5e9 + 1e6 + 3.0),
        (Kind::Head { add: true }, Gpu, rows, 8e9 + 3.0),
        (Kind::Pick, Gpu, rows, 3.0 * (4.0 * vocab + 4.0) / 2.0),
        (carry(Cargo::Hidden { pending: None }, device), H2d, rows, 3.0 * 4.0 * d),
        (carry(Cargo::Hidden { pending: Some(Sublayer::Down) }, host), D2h, rows, 2.0 * 3.0 * 4.0 * d),
        (carry(Cargo::Delta { of: Sublayer::Out }, host), D2h, rows, 2.0 * 3.0 * 4.0 * d),
        (carry(Cargo::Qkv, device), H2d, rows, 3.0 * 4.0 * (q + 2.0 * kv)),
        (carry(Cargo::Attn, device), H2d, rows, 3.0 * 2.0 * q),
        (carry(Cargo::Act, host), D2h, rows, 2.0 * 3.0 * 2.0 * ff),
        (Kind::Stream { slot: 1, experts: false }, H2d, Work::default(), layer),
        (Kind::PageIn { staged: None }, H2d, pages, 5.0 * page),
        (Kind::PageOut { staged: Some(0) }, D2h, pages, 2.0 * 5.0 * page),
    ] {
        let name = kind.name();
        let layer = (!matches!(kind, Kind::Embed | Kind::Head { .. } | Kind::Pick)).then_some(1);
        assert_eq!(seconds(kind, unit, layer, work), want, "{name} on {}", unit.name());
    }
}

/// What crosses is what the engine's buffers hold.
#[test]
fn widths_are_those_of_the_engines_rows() {
    use crate::device::{RowBytes, Shape};
    use crate::tensor::Half;
    for name in ["tiny-llama", "tiny-opt", "qwen3-8b"] {
        let s = sizes(name);
        let row = RowBytes::new(&Shape::of(&s.spec, Half::BF16, Half::BF16));
        let costs = OpCosts::new(&Round, &s);
        let bytes = |cargo| {
            let kind = Kind::Carry { cargo, to: Side::Device };
            costs.link_bytes(&op(kind, Unit::H2d, Some(0), Work { rows: 1, ..Work::default() })) as usize
        };
        assert_eq!(bytes(Cargo::Hidden { pending: None }), row.hidden);
        assert_eq!(bytes(Cargo::Delta { of: Sublayer::Down }), row.delta);
        assert_eq!(bytes(Cargo::Qkv), row.qkv);
        assert_eq!(bytes(Cargo::Attn), row.attn);
        assert_eq!(bytes(Cargo::Act), row.act);
    }
}

/// Rows attended on the host cross by 16 bits, there and back: of an 8B model's step of 64 such rows 42 MB, not 84.
#[test]
fn rows_for_the_host_cross_by_sixteen_bits() {
    use crate::device::{Mailbox, Shape};
    use crate::tensor::Half;
    let s = sizes("llama-3.1-8b");
    let layers = s.spec.n_layers;
    let mut placement = Placement::all(Side::Device, layers, 0);
    for layer in &mut placement.layers {
        (layer.decode, layer.kv) = (Policy::ATTENTION_ON_HOST, Side::Host);
    }
    let group = |slot| Group {
        request: RequestId { slot, generation: 0 },
        phase: Phase::Decode,
        first: 40,
        tokens: 1,
        kv: Kv::Device,
        wants: Wants::Last,
    };
    let iteration = Iteration::serial((0..64).map(group).collect(), true);
    let program = lower(&placement, &iteration).unwrap();
    let costs = OpCosts::new(&Round, &s);
    let bytes: u64 = program.ops.iter().map(|op| costs.link_bytes(op)).sum();
    let shape = Shape::of(&s.spec, Half::F16, Half::F16);
    assert_eq!(bytes as usize, layers * (Mailbox::bytes(&shape, 64) - Mailbox::HEADER));
    assert_eq!(bytes, 41_943_040);
}

#[test]
fn a_streamed_layer_costs_the_link() {
    let (s, h) = (sizes("qwen3-8b"), hardware::named("rtx4060-laptop").unwrap());
    let roofline = Roofline::new(&h, &s);
    let costs = OpCosts::new(&roofline, &s);
    let (_, link) = h.accelerator.unwrap();
    let want = link.latency_s + s.blocks[7].total().device as f64 / link.h2d_bw;
    let got =
        costs.seconds(&op(Kind::Stream { slot: 0, experts: false }, Unit::H2d, Some(7), Work::default()));
    assert_eq!(got, want);
    assert!((got - 386e6 / 16e9).abs() < 1e-3, "{got}");
}

#[test]
fn an_operation_takes_at_least_its_launch() {
    let s = sizes("tiny-llama");
    let mut h = hardware::named("rtx4060-laptop").unwrap();
    h.efficiency.gpu_issue_s = 60e-6;
    let roofline = Roofline::new(&h, &s);
    let costs = OpCosts::new(&roofline, &s);
    let work = Work { rows: 1, ..Work::default() };
    let out = op(Kind::OutProj, Unit::Gpu, Some(0), work);
    assert_eq!(costs.seconds(&out), 10e-6);
    let on_host = Op { unit: Unit::Host, ..out };
    assert!(costs.seconds(&on_host) > 0.0 && costs.seconds(&on_host) < 10e-6);
}

fn group(slot: u32, phase: Phase, first: u32, tokens: u32) -> Group {
    let request = RequestId { slot, generation: 0 };
    Group { request, phase, first, tokens, kv: Kv::Device, wants: Wants::Last }
}

fn decode(batch: u32, past: u32) -> Iteration {
    Iteration::serial((0..batch).map(|slot| group(slot, Phase::Decode, past, 1)).collect(), false)
}

fn seconds(h: &Hardware, s: &Sizes, placement: &Placement, iteration: &Iteration) -> f64 {
    let roofline = Roofline::new(h, s);
    run(&lower(placement, iteration).unwrap(), &OpCosts::new(&roofline, s).of(iteration)).seconds()
}

/// On one side a program is the closed form, and the copies of new keys and values that it leaves out: below 1%.
#[test]
fn a_decode_program_is_the_closed_form() {
    let mut h = hardware::named("rtx4060-laptop").unwrap();
    // The closed form has no operation for them.
    (h.efficiency.gpu_launch_s, h.efficiency.hand_over_s) = (0.0, 0.0);
    for name in ["qwen3-8b", "opt-6.7b", "gemma-3-1b", "tiny-llama"] {
        let s = sizes(name);
        let layers = s.layers();
        for side in [Side::Host, Side::Device] {
            for (batch, past) in [(1u32, 127u32), (8, 511)] {
                let placement = Placement::all(side, layers, 1000);
                let work =
                    Workload { prompt: past.into(), gen_len: 1, batch: batch.into(), chunk: past.into() };
                let closed = price(&Roofline::new(&h, &s), &s, &placement, &work).step;
                let program = seconds(&h, &s, &placement, &decode(batch, past));
                let off = (program - closed) / closed;
                assert!((0.0..0.01).contains(&off), "{name} {side:?} {batch}: {program} for {closed}");
            }
        }
    }
}

/// A window is applied to each group's own positions, as the batch that the closed form prices has it.
#[test]
fn windows_clip_what_attention_sees() {
    let s = sizes("tiny-gemma3");
    let (layer, window) =
        s.blocks.iter().enumerate().find_map(|(l, b)| b.window.map(|w| (l as u32, w))).expect("a window");
    let w = window as u32;
    let groups = vec![group(0, Phase::Prefill, 3 * w, 5), group(1, Phase::Prefill, 0, 2 * w)];
    let iteration = Iteration::serial(groups, false);
    let layers = s.layers();
    let program = lower(&Placement::all(Side::Device, layers, 100), &iteration).unwrap();
    let costs = OpCosts::new(&Round, &s).of(&iteration);
    let alike = [(3 * window, 5), (0, 2 * window)].map(|(past, rows)| Alike {
        sequences: 1,
        rows,
        past,
        causal: true,
    });
    let want = Scan::of(&Batch::prefill(&alike), Some(window));
    let attends = |p: &Program| -> Vec<Op> {
        p.ops.iter().filter(|op| matches!(op.kind, Kind::Attend { .. })).cloned().collect()
    };
    let op = attends(&program).into_iter().find(|op| op.layer == Some(layer)).unwrap();
    assert_eq!(costs.scan(&op), want);
    // Without the iteration the groups count as alike: never less, and never more than without a window.
    let alike = OpCosts::new(&Round, &s).scan(&op);
    assert!(alike.pairs >= want.pairs && alike.pairs < op.work.pairs, "{alike:?} {want:?}");
    // Pages on two sides: both parts together are the whole.
    let split = |far| {
        let kv = Kv::Split { boundary: 3 * w / 32 * 32 - 32, far };
        let mut iteration = decode(1, 3 * w + 7);
        iteration.sub_batches[0].groups[0].kv = kv;
        let program = lower(&Placement::all(Side::Device, layers, 100), &iteration).unwrap();
        let costs = OpCosts::new(&Round, &s).of(&iteration);
        let of_layer = attends(&program).into_iter().filter(|op| op.layer == Some(layer));
        of_layer.map(|op| costs.scan(&op)).fold(Scan::default(), Scan::plus)
    };
    for far in [Far::Attend, Far::Stream] {
        let both = split(far);
        assert_eq!((both.kv_tokens, both.pairs), (window, window), "{far:?}");
    }
}

/// Streamed layers run under the layer before: a step is the copies, and what computes behind the last: its block and the
/// head, which take 1/36 and 8% of the compute.
#[test]
fn streams_run_under_compute() {
    let (s, h) = (sizes("qwen3-8b"), hardware::named("rtx4060-laptop").unwrap());
    let gpu = Policy::all(Side::Device);
    let layer = LayerPlacement {
        weights: Residence::Streamed,
        prefill: gpu,
        decode: gpu,
        kv: Side::Device,
        device_experts: 0,
    };
    let mut placement = Placement::all(Side::Device, 36, 100);
    placement.layers = vec![layer; 36];
    let iteration = decode(1, 100);
    let roofline = Roofline::new(&h, &s);
    let costs = OpCosts::new(&roofline, &s).of(&iteration);
    let timeline = run(&lower(&placement, &iteration).unwrap(), &costs);
    let (copies, compute) = (timeline.busy(Unit::H2d), timeline.busy(Unit::Gpu));
    assert!(copies > 36.0 * 385e6 / 16e9 && compute < 0.1 * copies, "{copies} {compute}");
    let exposed = timeline.seconds() - copies;
    assert!(exposed > 0.0 && exposed < 0.12 * compute, "{exposed} of {compute}");
}

#[test]
fn copies_slow_down_attention_on_the_host_while_they_run() {
    let close = |got: f64, want: f64| assert!((got / want - 1.0).abs() < 1e-9, "{got} for {want}");
    let s = sizes("tiny-llama");
    let mut machine = hardware::named("t4-xeon").unwrap();
    machine.efficiency.cpu_beside_copies = 1.0;
    let whole = Kind::Attend { part: Part::Whole, from_mailbox: true, to_mailbox: true, staged: None };
    let work = Work { rows: 4, kv_tokens: 4_000_000, pairs: 4_000_000, ..Work::default() };
    let attends = |unit| op(whole, unit, Some(1), work);
    let moves = |pages| op(Kind::PageIn { staged: None }, Unit::H2d, None, Work { pages, ..Work::default() });
    // Seconds of the first operation, and of the others.
    let run = |machine: &Hardware, ops: &[Op]| {
        let program = Program { ops: ops.to_vec(), ..Program::default() };
        let costs = Roofline::new(machine, &s);
        let spans = run(&program, &OpCosts::new(&costs, &s)).spans;
        let seconds: Vec<f64> = spans.iter().map(|s| s.end - s.start).collect();
        (seconds[0], seconds[1..].iter().sum::<f64>())
    };
    let alone = run(&machine, &[attends(Unit::Host)]).0;
    let (device, _) = run(&machine, &[attends(Unit::Gpu), moves(1_000_000)]);
    let (beside, copies) = run(&machine, &[attends(Unit::Host), moves(100)]);
    close(beside, alone);
    assert!(copies < alone, "{copies} {alone}");
    machine.efficiency.cpu_beside_copies = 0.5;
    close(run(&machine, &[attends(Unit::Host)]).0, alone);
    // While a long copy runs, and while a short one does: it takes half of its own time longer.
    close(run(&machine, &[attends(Unit::Host), moves(1_000_000)]).0, 2.0 * alone);
    close(run(&machine, &[attends(Unit::Host), moves(100)]).0, alone + 0.5 * copies);
    // Nothing of the device's is slower.
    close(run(&machine, &[attends(Unit::Gpu), moves(1_000_000)]).0, device);
    // Of two in a row the copy meets the first, and in part the second.
    let (first, rest) = run(&machine, &[attends(Unit::Host), attends(Unit::Host), moves(100)]);
    close(first + rest - copies, 2.0 * alone + 0.5 * copies);
}

/// What comes back of rows: a token and a sum, the likeliest tokens after the device has read the logits twice, or all logits.
#[test]
fn results_are_tokens_likeliest_tokens_or_logits() {
    let seconds = |pick, top| {
        let iteration = Iteration { pick, top, ..Iteration::serial(Vec::new(), false) };
        results(&Round, 1000, &iteration, 3)
    };
    assert_eq!(seconds(true, false), 2.0 * 3.0 * 8.0);
    assert_eq!(seconds(false, false), 2.0 * 3.0 * 4.0 * 1000.0);
    // Half of what it reads and writes counts as a copy.
    assert_eq!(seconds(false, true), 3.0 * 4.0 * 1000.0 + 2.0 * 3.0 * TOP_BYTES as f64);
    let s = sizes("qwen3-8b");
    for machine in ["t4-xeon", "rtx4060-laptop", "h100-spr"] {
        let machine = hardware::named(machine).unwrap();
        let of = |top| {
            let iteration = Iteration { top, ..Iteration::serial(Vec::new(), false) };
            results(&Roofline::new(&machine, &s), s.spec.vocab as u64, &iteration, 64)
        };
        assert!(of(true) < 0.25 * of(false), "{}: {} for {}", machine.name, of(true), of(false));
    }
}

/// Launches and hand-overs come to the work of each operation.
#[test]
fn launches_and_hand_overs_come_to_the_work() {
    let s = sizes("tiny-llama");
    let mut machine = hardware::named("t4-xeon").unwrap();
    (machine.efficiency.gpu_launch_s, machine.efficiency.hand_over_s) = (0.0, 0.0);
    let work = Work { rows: 4, kv_tokens: 400, pairs: 400, ..Work::default() };
    let whole = Kind::Attend { part: Part::Whole, from_mailbox: false, to_mailbox: false, staged: None };
    let kinds = [
        (Kind::Embed, 1),
        (Kind::Project { add: false }, 2),
        (whole, 2),
        (Kind::OutProj, 1),
        (Kind::FfnUp { add: false }, 2),
        (Kind::FfnDown, 1),
        (Kind::Pick, 2),
    ];
    let seconds = |machine: &Hardware, kind, unit| {
        let costs = Roofline::new(machine, &s);
        OpCosts::new(&costs, &s).seconds(&op(kind, unit, Some(1), work))
    };
    let before = kinds.map(|(k, _)| [Unit::Gpu, Unit::Host].map(|u| seconds(&machine, k, u)));
    (machine.efficiency.gpu_launch_s, machine.efficiency.hand_over_s) = (1e-3, 1e-2);
    for ((kind, kernels), [gpu, host]) in kinds.into_iter().zip(before) {
        let more = seconds(&machine, kind, Unit::Gpu) - gpu;
        assert!((more - 1e-3 * f64::from(kernels)).abs() < 1e-12, "{kind:?}: {more}");
        let more = seconds(&machine, kind, Unit::Host) - host;
        assert!((more - 1e-2).abs() < 1e-12, "{kind:?}: {more}");
    }
}

/// A step of two sub-batches, each of 16 rows on the device and `host` that the host attends.
fn two_lanes(layers: usize, host: u32) -> (Placement, Iteration) {
    let placement = Placement::all(Side::Device, layers, 1000);
    let group = |slot: u32, kv| Group {
        request: RequestId { slot, generation: 0 },
        phase: Phase::Decode,
        first: 500,
        tokens: 1,
        kv,
        wants: Wants::Last,
    };
    let batch = |from: u32| {
        let here = (0..16).map(|i| group(from + i, Kv::Device));
        let there = (16..16 + host).map(|i| group(from + i, Kv::Host));
        SubBatch { groups: here.chain(there).collect(), at: None }
    };
    let sub_batches = vec![batch(0), batch(1000)];
    (placement, Iteration { sub_batches, flow: Flow::TwoLanes, ..Iteration::serial(Vec::new(), true) })
}

/// Where the device is what a step waits for, NEO's lock step takes less with the host's rows on the copy lanes: what crosses is hidden.
#[test]
fn rows_for_the_host_cross_beside_computation() {
    let s = sizes("llama-3.1-8b");
    for (name, host, most) in [("t4-xeon", 64, 0.95), ("a10g-g5", 32, 0.97), ("h100-spr", 16, 0.95)] {
        let h = hardware::named(name).unwrap();
        let roofline = Roofline::new(&h, &s);
        let (placement, iteration) = two_lanes(s.spec.n_layers, host);
        let seconds = |program: &Program| {
            let costs = OpCosts::new(&roofline, &s).of(&iteration).on(&placement);
            run(program, &costs).seconds()
        };
        let [on_compute, on_copies] = [u32::MAX, 16].map(|copy_lane_rows| {
            seconds(&lower(&Placement { copy_lane_rows, ..placement.clone() }, &iteration).unwrap())
        });
        println!("{name}, twice {host} rows: {:.3} ms, {:.3} ms", 1e3 * on_compute, 1e3 * on_copies);
        assert!(on_copies < most * on_compute, "{name}: {on_copies} {on_compute}");
    }
}

/// What handing over costs NEO: launches, hand-overs and the mailbox's rows, as a share of the lock step with as many of the host's rows as
/// make most tokens a second (16 of the device's in each sub-batch, 500 tokens each), and for comparison with fewer. Beside a T4 every row
/// more gains a little.
#[test]
fn handing_over_takes_a_small_share_of_a_lock_step() {
    let s = sizes("llama-3.1-8b");
    for (name, most) in [("t4-xeon", 0.03), ("a10-xeon", 0.04), ("rtx4060-laptop", 0.04), ("h100-spr", 0.12)]
    {
        let machine = hardware::named(name).unwrap();
        let mut free = machine.clone();
        (free.efficiency.gpu_launch_s, free.efficiency.hand_over_s) = (0.0, 0.0);
        let step = |machine: &Hardware, host: u32, mail: bool| {
            let (placement, iteration) = two_lanes(s.spec.n_layers, host);
            let roofline = Roofline::new(machine, &s);
            let costs = OpCosts::new(&roofline, &s).of(&iteration).on(&placement);
            let program = lower(&placement, &iteration).unwrap();
            let takes = |i: usize| match program.ops[i].kind {
                Kind::Publish { .. } | Kind::Collect if !mail => 0.0,
                _ => costs.seconds(&program.ops[i]),
            };
            run_timed(&program, &waits(&program), &costs, &takes).seconds()
        };
        let rate = |host: &u32| f64::from(16 + host) / step(&machine, *host, true);
        let host = (4..=480).step_by(4).max_by(|a, b| rate(a).total_cmp(&rate(b))).unwrap();
        let share = |host: u32| {
            let (all, none) = (step(&machine, host, true), step(&free, host, false));
            let (launches, mail) = (step(&free, host, true), step(&machine, host, false));
            println!(
                "{name}, {host} rows: {:.2} ms, {:.2}% is handing over (launches and hand-overs {:.2}%, mail {:.2}%)",
                1e3 * all,
                100.0 * (1.0 - none / all),
                100.0 * (1.0 - launches / all),
                100.0 * (1.0 - mail / all)
            );
            1.0 - none / all
        };
        for host in [16, 32, 64, host] {
            let share = share(host);
            assert!(share <= most, "{name}, {host} rows: {share}");
        }
    }
}
