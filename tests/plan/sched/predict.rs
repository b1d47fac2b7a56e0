//! Predictions over programs: a few layers and sums over rows stand for all of them.

use std::time::Instant;

use proptest::prelude::{ProptestConfig, prop, prop_assert, prop_oneof, proptest};
use proptest::strategy::Strategy as Draw;
use tandem::cache::PAGE_TOKENS;
use tandem::model::synth;
use tandem::plan::Costs as _;
use tandem::plan::{Hardware, Predictor, Roofline, Sizes, hardware};
use tandem::program::{
    Flow, Group, Iteration, Kv, LayerPlacement, MoveRequest, Phase, Placement, Policy, RequestId, Residence,
    Side, SubBatch, Sublayer, Unit, Wants, check, lower,
};
use tandem::sched::{self, Limits, Predict, Queues, RequestView};

use super::invariants::cases;

const KINDS: [(Phase, Kv); 4] = [
    (Phase::Prefill, Kv::Host),
    (Phase::Prefill, Kv::Device),
    (Phase::Decode, Kv::Device),
    (Phase::Decode, Kv::Host),
];

fn predictor(model: &str, machine: &str, placement: &dyn Fn(usize) -> Placement) -> Predictor {
    on_machine(model, hardware::named(machine).unwrap(), placement)
}

fn on_machine(model: &str, machine: Hardware, placement: &dyn Fn(usize) -> Placement) -> Predictor {
    let sizes = Sizes::of_spec(&synth::parse(model).unwrap().spec);
    let placement = placement(sizes.layers());
    Predictor::new(machine, sizes, placement)
}

fn on_device(layers: usize) -> Placement {
    Placement { host_pages: 10_000, ..Placement::all(Side::Device, layers, 10_000) }
}

/// A third of the blocks on the host.
fn split(layers: usize) -> Placement {
    Placement::boundary(layers / 3, layers, 10_000, 10_000)
}

/// Most weights streamed.
fn streamed(layers: usize) -> Placement {
    let mut placement = on_device(layers);
    for layer in &mut placement.layers[2..] {
        let policy = Policy::all(Side::Device);
        *layer = LayerPlacement {
            weights: Residence::Streamed,
            prefill: policy,
            decode: policy,
            kv: Side::Device,
            device_experts: 0,
        };
    }
    placement
}

/// Groups of each kind: (stored, tokens) each.
fn batch(kinds: &[Vec<(u32, u32)>; 4], ids: &mut u32) -> SubBatch {
    let mut groups = Vec::new();
    for ((phase, kv), rows) in KINDS.iter().zip(kinds) {
        for &(first, tokens) in rows {
            *ids += 1;
            let tokens = if *phase == Phase::Decode { 1 } else { tokens };
            let wants = if *phase == Phase::Decode || tokens % 2 == 0 { Wants::Last } else { Wants::Nothing };
            groups.push(Group {
                request: RequestId { slot: *ids, generation: 0 },
                phase: *phase,
                first,
                tokens,
                kv: *kv,
                wants,
            });
        }
    }
    SubBatch::of(groups)
}

fn rows() -> impl Draw<Value = Vec<(u32, u32)>> {
    prop::collection::vec((0..5000u32, 1..400u32), 0..6)
}

fn kinds() -> impl Draw<Value = [Vec<(u32, u32)>; 4]> {
    [rows(), rows(), rows(), rows()]
}

fn iterations(layers: u32) -> impl Draw<Value = Iteration> {
    let one = |flow, sub_batches| Iteration { sub_batches, moves: Vec::new(), flow, pick: true, top: false };
    prop_oneof![
        kinds().prop_map(move |k| one(Flow::Serial, vec![batch(&k, &mut 0)])),
        (kinds(), kinds()).prop_map(move |(a, b)| {
            let mut ids = 0;
            one(Flow::TwoLanes, vec![batch(&a, &mut ids), batch(&b, &mut ids)])
        }),
        (kinds(), rows(), prop::option::of(0..layers)).prop_map(move |(a, c, at)| {
            let mut ids = 0;
            let first = batch(&a, &mut ids);
            let cohort = batch(&[vec![], vec![], vec![], c], &mut ids);
            let at = at.filter(|_| !cohort.groups.is_empty());
            one(Flow::Async, vec![first, SubBatch { at, ..cohort }])
        }),
    ]
}

/// Whole requests to the side where the iteration has them: of its first sub-batch those that `which` says, and one without rows.
fn with_moves(mut iteration: Iteration, which: &[bool]) -> Iteration {
    let of = |request, pages: u32, to| MoveRequest { request, to, pages: 0..pages };
    let groups = iteration.sub_batches[0].groups.iter().zip(which);
    iteration.moves = groups
        .filter(|(g, moves)| **moves && g.first as usize >= PAGE_TOKENS)
        .map(|(g, _)| {
            let to = if g.kv == Kv::Host { Side::Host } else { Side::Device };
            let page = PAGE_TOKENS as u32;
            // Half of them with the page that the next token goes to.
            of(g.request, if g.request.slot % 2 == 0 { g.first.div_ceil(page) } else { g.first / page }, to)
        })
        .collect();
    if which.first() == Some(&true) {
        let stranger = RequestId { slot: 1 << 20, generation: 0 };
        iteration.moves.push(of(stranger, 30, Side::Host));
    }
    iteration
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(90), ..ProptestConfig::default() })]
    #[test]
    fn a_few_layers_tell_what_all_of_them_take(
        iteration in iterations(32), which in 0..3usize, moves in prop::collection::vec(prop::bool::weighted(0.2), 0..24),
        slowed in prop::bool::ANY
    ) {
        let iteration = with_moves(iteration, &moves);
        let placement: &dyn Fn(usize) -> Placement = [&on_device as &dyn Fn(usize) -> Placement, &split, &streamed][which];
        let (model, machine) = [("llama-3.1-8b", "a10-xeon"), ("llama-2-7b", "t4-xeon"), ("llama-3.1-8b", "a10-xeon")][which];
        let mut machine = hardware::named(machine).unwrap();
        if slowed {
            // Copies slow down attention on the host.
            machine.efficiency.cpu_beside_copies = 0.6;
        }
        let predictor = on_machine(model, machine, placement);
        let Ok(exact) = predictor.exact(&iteration) else { return Ok(()) };
        // Twice: the second time the shape is known.
        for _ in 0..2 {
            let predicted = predictor.seconds(&iteration).unwrap();
            let (all, want) = (predicted.all, exact.all);
            prop_assert!((all - want).abs() <= 0.01 * want, "{all} of {want} s: {iteration:?}");
            for unit in Unit::ALL {
                let (busy, works) = (predicted.busy[unit], exact.busy[unit]);
                let near = (busy - works).abs() <= 0.01 * works.max(want);
                prop_assert!(near, "{unit:?}: {busy} of {works} s in {want}: {iteration:?}");
            }
        }
    }
}

/// Windows, and blocks of two kinds that take turns: all layers are priced, rows still as sums.
#[test]
fn blocks_that_take_turns_and_windows_are_priced_as_they_are() {
    let predictor = predictor("gemma-3-1b", "a10-xeon", &on_device);
    let mut ids = 0;
    let kinds = [vec![(40, 200)], vec![(0, 31), (700, 64)], vec![(10, 1), (3000, 1)], vec![(900, 1)]];
    let iteration = Iteration::serial(batch(&kinds, &mut ids).groups, true);
    let (predicted, exact) = (predictor.iteration(&iteration), predictor.exact(&iteration).unwrap().all);
    assert!((predicted - exact).abs() <= 1e-3 * exact, "{predicted} of {exact}");
}

#[test]
fn parts_agree_with_whole_iterations() {
    let p = predictor("llama-3.1-8b", "a10-xeon", &on_device);
    let decode = |n: u32, kv: Kv, stored: u32| -> Iteration {
        let group = |slot| Group {
            request: RequestId { slot, generation: 0 },
            phase: Phase::Decode,
            first: stored - 1,
            tokens: 1,
            kv,
            wants: Wants::Last,
        };
        Iteration::serial((0..n).map(group).collect(), true)
    };
    let parts = p.linear(32) + p.device_attention(32, 32 * 1000, 32 * 1000);
    let whole = p.iteration(&decode(32, Kv::Device, 1000));
    // The head, the embedding and what goes to and from the device are left.
    assert!(parts < whole && whole < 1.15 * parts, "{parts} and {whole}");
    let more = p.iteration(&decode(32, Kv::Host, 8000)) - p.iteration(&decode(32, Kv::Host, 4000));
    let attention = p.host_attention(32, 32 * 8000) - p.host_attention(32, 32 * 4000);
    assert!((more - attention).abs() < 0.05 * attention, "{more} and {attention}");
    assert!(p.swap(0) == 0.0 && p.swap(10) > 0.0 && p.launch() > 0.0 && p.layers() == 32);
}

/// Queues with `n` requests: half on each side, all decoding.
fn crowd(n: u32) -> Queues {
    let mut queues = Queues::default();
    let mut decision = sched::Decision {
        admit: Vec::new(),
        passed: Vec::new(),
        swaps: Vec::new(),
        iteration: Iteration::serial(Vec::new(), false),
    };
    let mut groups = Vec::new();
    for slot in 0..n {
        let job = RequestView::new(RequestId { slot, generation: 0 }, 100 + slot % 300, 900);
        decision.admit.push((job.id, if slot % 2 == 0 { Side::Device } else { Side::Host }));
        groups.push(job.group(job.prompt, Side::Device));
        queues.submit(job);
    }
    queues.admit(&decision);
    queues.commit(&Iteration::serial(groups, false), &[], |g| g.tokens);
    // And as many that wait.
    for slot in n..2 * n {
        queues.submit(RequestView::new(RequestId { slot, generation: 0 }, 200, 900));
    }
    queues
}

/// Prints what scheduling and lowering take: `cargo test --release --test plan -- --ignored --nocapture speed`.
#[test]
#[ignore = "measures time"]
fn speed() {
    let p = predictor("llama-3.1-8b", "a10-xeon", &on_device);
    let queues = crowd(1000);
    let limits =
        Limits { rows: 512, sub_batches: 3, sequences: 4096, device_pages: 12_000, host_pages: 60_000 };
    let median = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2] * 1e6
    };
    for name in sched::NAMES {
        let mut strategy = sched::by_name(name).unwrap();
        let mut flow = Flow::Serial;
        let times = (0..200).map(|_| {
            let start = Instant::now();
            flow = strategy.plan(&queues, &limits, &p).iteration.flow;
            start.elapsed().as_secs_f64()
        });
        println!("plan      {name:10} {:8.1} us ({flow:?})", median(times.collect()));
        let iteration = sched::by_name(name).unwrap().plan(&queues, &limits, &p).iteration;
        let times = (0..50).map(|_| {
            let start = Instant::now();
            let program = lower(p.placement(), &iteration).unwrap();
            let lowered = start.elapsed().as_secs_f64();
            check(&program, p.placement(), &iteration).unwrap();
            (lowered, start.elapsed().as_secs_f64() - lowered)
        });
        let (lowering, checking): (Vec<f64>, Vec<f64>) = times.unzip();
        let rows: u32 = iteration.sub_batches.iter().map(SubBatch::rows).sum();
        println!("lower     {:8.1} us, check {:8.1} us ({rows} rows)", median(lowering), median(checking));
        let times = (0..200).map(|_| {
            let start = Instant::now();
            std::hint::black_box(p.iteration(&iteration));
            start.elapsed().as_secs_f64()
        });
        println!("predict   {:8.1} us", median(times.collect()));
    }
}

/// Prints what it would save to compute a cohort's rows within the products of the device's rows (decision 0019): the share of an
/// iteration's predicted time. `cargo test --test plan -- --ignored --nocapture rows_within`.
#[test]
#[ignore = "prints a table"]
fn rows_within_the_devices_products() {
    const PRODUCTS: [Sublayer; 4] = [Sublayer::Qkv, Sublayer::Out, Sublayer::Up, Sublayer::Down];
    println!("model         machine    rows  stored  cohorts       iteration  apart   within   saves");
    for (model, machine) in
        [("llama-2-7b", "t4-xeon"), ("llama-3.1-8b", "a10-xeon"), ("llama-3.1-8b", "h100-spr")]
    {
        let p = predictor(model, machine, &on_device);
        let sizes = Sizes::of_spec(&synth::parse(model).unwrap().spec);
        let hardware = hardware::named(machine).unwrap();
        let roofline = Roofline::new(&hardware, &sizes);
        for (rows, stored) in [(16, 400), (16, 2000), (64, 400), (64, 2000)] {
            for cohorts in [&[32][..], &[32, 32]] {
                let mut slot = 0;
                let mut groups = |n: u64, kv: Kv| -> Vec<Group> {
                    let group = |_| {
                        slot += 1;
                        let request = RequestId { slot, generation: 0 };
                        Group {
                            request,
                            phase: Phase::Decode,
                            first: stored,
                            tokens: 1,
                            kv,
                            wants: Wants::Last,
                        }
                    };
                    (0..n).map(group).collect()
                };
                let mut sub_batches = vec![SubBatch::of(groups(rows, Kv::Device))];
                for (i, &n) in cohorts.iter().enumerate() {
                    sub_batches.push(SubBatch::parked(groups(n, Kv::Host), 7 + 9 * i as u32));
                }
                let iteration =
                    Iteration { sub_batches, moves: Vec::new(), flow: Flow::Async, pick: true, top: false };
                let all = p.exact(&iteration).unwrap().all;
                let product = |rows| -> f64 {
                    PRODUCTS.iter().map(|&s| roofline.product(Side::Device, 7, s, rows)).sum()
                };
                // Behind one another, the rows grow; the residual stream is copied on joining and on parking.
                let (mut apart, mut within) = (0.0, 0.0);
                for &n in cohorts {
                    apart += product(n);
                    let copies = 2.0 * roofline.copy(Side::Device, 2 * 4 * n * sizes.spec.d_model as u64);
                    within += product(rows + n) - product(rows) + copies;
                }
                println!(
                    "{model:13} {machine:9} {rows:5} {stored:7}  {:12} {:8.2} ms {:6.2}   {:6.2}  {:5.1}%",
                    format!("{cohorts:?}"),
                    1e3 * all,
                    1e3 * apart,
                    1e3 * within,
                    100.0 * (apart - within) / all
                );
            }
        }
    }
}
