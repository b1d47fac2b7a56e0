//! One chooser for plans and runs, with the bytes of loaded tensors: what it chooses fits and runs in exactly what was counted,
//! nothing that fits is faster, what the user fixed stays.

use std::sync::Arc;

use tandem::Error;
use tandem::device::Accelerator;
use tandem::device::emulated::{EmulatedAccelerator, EmulatedOptions, EmulatedRuntime};
use tandem::engine::{Engine, NewTokens, Options, Sizes};
use tandem::model::{LoadedModel, load};
use tandem::plan::{
    self, Candidate, Fixed, Hardware, Plan, PlanRequest, Roofline, Strategy, Workload, hardware, plan_within,
    programs_with,
};
use tandem::program::{Far, Placement, Policy, Residence, Side, Wants};
use tandem::simd::Isa;

const TOKENS: usize = 40;
const MUCH: u64 = 1 << 30;

/// Those that `generate` compares.
const ALL: [Strategy; 6] =
    [Strategy::CpuOnly, Strategy::GpuOnly, Strategy::Greedy, Strategy::Stream, Strategy::Helm, Strategy::Lia];

fn capped(memory: u64) -> Arc<dyn Accelerator> {
    let options = EmulatedOptions { memory, ..Default::default() };
    Arc::new(EmulatedAccelerator::new(Arc::new(EmulatedRuntime::new(options).expect("it starts"))))
}

/// With a head of its own: a shared table costs the device nothing beside the head.
fn model() -> LoadedModel {
    load("synth:tiny-llama,dtype=q4_k,seed=2,layers=8").unwrap()
}

fn options() -> Options {
    let mut options = Options::new(Isa::Reference, TOKENS);
    options.threads = Some(2);
    options
}

fn sized(m: &LoadedModel, memory: u64) -> Sizes {
    Sizes::new(&m.spec, &m.weights, &options(), &*capped(memory)).unwrap()
}

/// A small GPU, and a CPU with `flops`.
fn machine(flops: f64) -> Hardware {
    let mut h = hardware::named("rtx4060-laptop").unwrap();
    h.cpu.flops_bf16 = flops;
    h
}

fn work(prompt: u64, gen_len: u64) -> Workload {
    Workload { prompt, gen_len, batch: 1, chunk: TOKENS as u64 }
}

fn planned(
    m: &LoadedModel,
    memory: u64,
    strategies: &[Strategy],
    fixed: Fixed,
    h: &Hardware,
    work: Workload,
) -> tandem::Result<Plan> {
    let (sizes, model) = (sized(m, memory), plan::Sizes::of_weights(&m.spec, &m.weights, Isa::Reference));
    let request = PlanRequest {
        prompt: work.prompt,
        gen_len: work.gen_len,
        batch: work.batch,
        gpu_memory: None,
        chunk: Some(work.chunk),
        overlap: false,
        fixed,
    };
    plan_within(&sizes.counted(), &model, h, &request, strategies, &Roofline::new(h, &model))
}

fn chosen(plan: &Plan) -> &Candidate {
    &plan.candidates[plan.chosen.expect("one fits")]
}

/// A prompt and a few tokens, in exactly the memory that was counted.
fn run(m: &LoadedModel, c: &Candidate) {
    let placement = sized(m, MUCH).with_pages(c.placement.clone()).0;
    if !placement.uses(Side::Device) {
        return;
    }
    let mut options = options();
    options.far = Some(c.way.unwrap_or(Far::Stream));
    let accel = capped(c.memory.gpu.total);
    let mut e =
        Engine::placed(m.spec.clone(), &m.weights, &options, accel, "test", "test", placement, &|_| ())
            .unwrap_or_else(|e| panic!("{}: {e}", c.reason));
    let seq = e.add();
    e.prefill(seq, &[7; TOKENS - 2], |_| ()).unwrap();
    for token in [3, 4] {
        let logits = e.forward(&[NewTokens { id: seq, tokens: &[token], wants: Wants::Last }]).unwrap();
        assert!(logits.iter().all(|x| x.is_finite()));
    }
}

/// From much memory to a byte less than the last choice needs, until nothing fits: every choice on the way.
fn ladder(strategy: Strategy, h: &Hardware) -> Vec<Candidate> {
    let m = model();
    let mut found: Vec<Candidate> = Vec::new();
    let mut memory = MUCH;
    loop {
        let plan = planned(&m, memory, &[strategy], Fixed::default(), h, work(30, 10)).unwrap();
        let Some(i) = plan.chosen else {
            let said = &plan.candidates[0].reason;
            for part in ["weights", "KV", "activations", "of GPU memory", "available"] {
                assert!(said.contains(part), "{part} wanted: {said}");
            }
            return found;
        };
        let c = plan.candidates[i].clone();
        assert!(c.memory.gpu.total <= memory && c.memory.gpu.available == memory);
        if let Some(before) = found.last() {
            assert!(c.memory.gpu.total < before.memory.gpu.total, "{} after {}", c.reason, before.reason);
            let (more, less) = (before.t_total_s.unwrap(), c.t_total_s.unwrap());
            assert!(
                less >= 0.99 * more || strategy == Strategy::Greedy,
                "{less} with less, {more} with more: {} beside {}",
                c.reason,
                before.reason
            );
        }
        run(&m, &c);
        let used = c.memory.gpu.total;
        found.push(c);
        if used == 0 {
            return found;
        }
        memory = used - 256;
    }
}

#[test]
fn filling_puts_as_few_units_on_the_host_as_fit() {
    let n = model().spec.n_layers;
    let mut all: Vec<usize> = ladder(Strategy::Greedy, &machine(1e11)).iter().map(|c| c.k.unwrap()).collect();
    all.dedup();
    assert_eq!(all, (0..=n + 2).collect::<Vec<_>>());
}

#[test]
fn helm_uses_the_memory_there_is() {
    let n = model().spec.n_layers;
    let all = ladder(Strategy::Helm, &machine(1e11));
    let ks: Vec<usize> = all.iter().map(|c| c.k.unwrap()).collect();
    assert_eq!((ks[0], *ks.last().unwrap()), (0, n + 2));
    assert!(all.len() >= n, "{ks:?}");
    let cpu = all.last().unwrap();
    assert!(!cpu.placement.uses(Side::Device) && cpu.memory.host.kv > 0);
}

#[test]
fn lia_pins_as_many_blocks_as_pay() {
    let n = model().spec.n_layers;
    let all = ladder(Strategy::Lia, &machine(1e11));
    let pinned: Vec<usize> = all.iter().map(|c| c.pinned_blocks.unwrap()).collect();
    assert_eq!((pinned[0], *pinned.last().unwrap()), (n, 0), "{pinned:?}");
    for c in &all {
        let there = c.placement.layers.iter().filter(|l| l.weights == Residence::Device).count();
        assert_eq!(Some(there), c.pinned_blocks, "{}", c.reason);
    }
}

#[test]
fn streaming_keeps_keys_and_values_on_the_device_while_that_pays() {
    let all = ladder(Strategy::Stream, &machine(1e11));
    let sides: Vec<Side> = all.iter().map(|c| c.placement.layers[0].kv).collect();
    assert_eq!((sides[0], *sides.last().unwrap()), (Side::Device, Side::Host), "{sides:?}");
    for layer in all.iter().flat_map(|c| &c.placement.layers) {
        assert_eq!((layer.weights, layer.prefill.bits()), (Residence::Streamed, [0; 6]));
    }
}

#[test]
fn what_the_user_fixed_is_kept_or_refused() {
    let m = model();
    let (n, h, w) = (m.spec.n_layers, machine(1e11), work(38, 2));
    let of = |memory, strategy, fixed| planned(&m, memory, &[strategy], fixed, &h, w);
    let boundary = |k| Fixed { boundary: Some(k), ..Fixed::default() };
    for k in 0..=n + 2 {
        let plan = of(MUCH, Strategy::Helm, boundary(k)).unwrap();
        let c = chosen(&plan);
        let ends = (c.placement.embedding, c.placement.head);
        let side = |host: bool| if host { Side::Host } else { Side::Device };
        assert_eq!((c.k, ends), (Some(k), (side(k > 0), side(k == n + 2))));
        run(&m, c);
    }
    let (on_host, on_device) = (Policy::all(Side::Host), Policy::all(Side::Device));
    let lia = |pinned, prefill, decode| Fixed { pinned, prefill, decode, ..Fixed::default() };
    let three = of(MUCH, Strategy::Lia, lia(Some(3), None, None)).unwrap();
    assert_eq!(chosen(&three).pinned_blocks, Some(3));
    // Vectors get a block at least; all on the host wants no weights on the device.
    let plan = of(MUCH, Strategy::Lia, lia(None, Some(on_host), Some(on_device))).unwrap();
    let c = chosen(&plan);
    assert_eq!((c.prefill_policy, c.decode_policy), (Some([1; 6]), Some([0; 6])));
    assert!(c.pinned_blocks < Some(n));
    let plan = of(MUCH, Strategy::Lia, lia(Some(n - 1), Some(on_host), Some(on_host))).unwrap();
    let last = |p: &Plan| chosen(p).placement.layers.iter().find(|l| l.weights != Residence::Device).copied();
    assert_eq!(last(&plan).map(|l| l.weights), Some(Residence::Host));

    let split = Policy::from_bits([false, true, false, false, false, false]);
    for (strategy, fixed, want) in [
        (Strategy::Helm, boundary(n + 3), format!("the model has {} units", n + 2)),
        (Strategy::Lia, lia(Some(n + 1), None, None), format!("the model has {n} blocks")),
        (Strategy::Lia, lia(Some(n), Some(on_host), None), "leaves none to `policy`".to_owned()),
        (
            Strategy::Lia,
            lia(None, None, Some(split)),
            "computes scores and values on different sides".to_owned(),
        ),
    ] {
        match of(MUCH, strategy, fixed) {
            Err(Error::Usage(said)) => assert!(said.contains(&want), "{said}"),
            other => panic!("{strategy:?}: {other:?}"),
        }
    }
    // A boundary that was asked for is not moved to one that fits, and pins that do not fit are not fewer.
    let little = sized(&m, MUCH).device(&Placement::boundary(4, n, 0, 0)).total();
    let plan = of(little, Strategy::Helm, boundary(2)).unwrap();
    assert!(plan.chosen.is_none() && plan.candidates[0].k == Some(2), "{}", plan.candidates[0].reason);
    assert!(of(1 << 16, Strategy::Lia, lia(Some(3), None, None)).unwrap().chosen.is_none());
    // Nothing but the CPU fits a device of 64 KiB.
    let plan = planned(&m, 1 << 16, &ALL, Fixed::default(), &h, w).unwrap();
    assert_eq!((chosen(&plan).strategy, chosen(&plan).k), (Strategy::CpuOnly, Some(n + 2)));
    assert!(plan.candidates.iter().any(|c| c.strategy == Strategy::Lia && !c.feasible));
}

/// Every boundary, its host blocks in place, and with the first blocks pinned every number of them by two vectors.
fn others(n: usize) -> Vec<Placement> {
    let mut found: Vec<Placement> = (0..=n + 2).map(|k| Placement::boundary(k, n, 0, 0)).collect();
    for pinned in 0..n {
        for decode in [Policy::all(Side::Host), Policy::ATTENTION_ON_HOST] {
            let mut p = Placement::all(Side::Device, n, 0);
            for layer in &mut p.layers[pinned..] {
                (layer.weights, layer.kv) = (Residence::Streamed, Side::Host);
                (layer.prefill, layer.decode) = (Policy::all(Side::Device), decode);
            }
            found.push(p);
        }
    }
    found
}

/// Whatever the memory, and the CPU.
#[test]
fn nothing_that_fits_is_faster() {
    let m = model();
    let n = m.spec.n_layers;
    let model = plan::Sizes::of_weights(&m.spec, &m.weights, Isa::Reference);
    let work = work(30, 10);
    let all = sized(&m, MUCH).device(&Placement::all(Side::Device, n, 0)).total();
    let mut strategies = Vec::new();
    for flops in [1e10, 1e11, 1e13] {
        let h = machine(flops);
        let costs = Roofline::new(&h, &model);
        // In a quarter of the memory only two others fit.
        for eighths in [3, 4, 6, 8] {
            let memory = all * eighths / 8;
            let plan = planned(&m, memory, &ALL, Fixed::default(), &h, work).unwrap();
            let (c, sizes) = (chosen(&plan), sized(&m, memory));
            let own = c.t_total_s.unwrap();
            assert!(c.memory.gpu.total <= memory && plan.why.starts_with(c.strategy.name()));
            run(&m, c);
            let mut compared = 0;
            for p in others(n) {
                if sizes.check(&p).is_err() {
                    continue;
                }
                compared += 1;
                let p = sizes.with_pages(p).0;
                let t = programs_with(&costs, &model, &p, &work, Some(Far::Attend)).unwrap().total();
                assert!(t >= own * (1.0 - 1e-9), "{p:?} {t} is faster than {own}: {}", plan.why);
            }
            assert!(compared > 2, "{compared}");
            strategies.push(c.strategy);
        }
    }
    assert_eq!(strategies[7], Strategy::GpuOnly, "{strategies:?}");
    assert_ne!(strategies[5], Strategy::GpuOnly);
}

/// One placement, two policies: the host's blocks go to the device for a long prompt, and are computed in place for a short one
/// and in decode.
#[test]
fn long_prompts_stream_the_hosts_blocks() {
    let m = model();
    let h = machine(1e11);
    let room = sized(&m, MUCH).device(&Placement::boundary(4, m.spec.n_layers, 0, 0)).total();
    let streams = |work| {
        let plan = planned(&m, room, &[Strategy::Helm], Fixed::default(), &h, work).unwrap();
        let c = chosen(&plan);
        assert!(c.placement.layers.iter().any(|l| l.decode == Policy::all(Side::Host)), "{}", c.reason);
        run(&m, c);
        c.placement.layers.iter().any(|l| l.weights == Residence::Streamed)
    };
    assert!(streams(work(38, 1)));
    assert!(!streams(work(1, 30)));
}

#[test]
fn choosing_takes_less_than_half_a_second() {
    let m = load("synth:tiny-llama,dtype=q4_k,seed=2,layers=64").unwrap();
    let h = machine(1e12);
    let room = sized(&m, MUCH).device(&Placement::boundary(30, 64, 0, 0)).total();
    let once = || {
        let begun = std::time::Instant::now();
        planned(&m, room, &ALL, Fixed::default(), &h, work(30, 10)).unwrap();
        begun.elapsed().as_secs_f64()
    };
    let best = (0..3).map(|_| once()).fold(f64::INFINITY, f64::min);
    println!("{:.1} ms", 1e3 * best);
    assert!(best < 0.5, "{best} s");
}
