//! The device alone as a baseline: prompts paced as well as in any strategy, and never faster than a hybrid that may fall back to it.

use tandem::model::synth;
use tandem::plan::{Hardware, Predictor, Sizes, Uncached, hardware};
use tandem::program::{Placement, Side};
use tandem::sched::{self, Targets};
use tandem::sim::{Options, PageCapacity, Room, simulate};
use tandem::workload::{Shape, Source, Workload};

/// Tokens a second of each strategy in the order of [`sched::NAMES`], with the options that `tandem simulate` has by default.
fn throughput(machine: &Hardware, spec: &str, trace: &str) -> Vec<f64> {
    let sizes = Sizes::of_spec(&synth::spec(spec).unwrap());
    let work = Workload::load(&trace.parse::<Source>().unwrap(), &Shape::default(), |_| ()).unwrap();
    let context = work.requests.iter().map(|r| r.input + r.output).max().unwrap();
    let room = Room { rows: 2048, sequences: 512, context, gpu_memory: None, host_memory: None };
    let capacity =
        PageCapacity::of(machine, &sizes, &room, &Placement::all(Side::Device, sizes.layers(), 0)).unwrap();
    let options = Options {
        rows: room.rows,
        sub_batches: 2,
        sequences: room.sequences,
        capacity,
        targets: Targets::NONE,
        most_answer: None,
        learns_lengths: true,
    };
    let placement = Placement {
        host_pages: capacity.host_pages,
        ..Placement::all(Side::Device, sizes.layers(), capacity.device_pages)
    };
    let predictor = Predictor::new(Uncached(machine.clone()), sizes, placement);
    let one = |name: &&str| {
        let mut strategy = sched::by_name(name).unwrap();
        let report = simulate(&work.requests, &mut *strategy, &predictor, &options, &mut |_| ()).unwrap();
        assert_eq!(report.requests.failed, 0, "{name}: {:?}", report.requests);
        report.throughput_tok_s
    };
    let all = sched::NAMES.iter().map(one).collect();
    println!("{spec} on {} {trace}: {:?} {all:.1?}", machine.name, sched::NAMES);
    all
}

/// [gpu-only, fastdecode, neo, apex, auto] over the first.
fn gains(machine: &Hardware, spec: &str, trace: &str) -> [f64; 5] {
    assert_eq!(sched::NAMES, ["gpu-only", "fastdecode", "neo", "apex", "auto"]);
    let all = throughput(machine, spec, trace);
    [0, 1, 2, 3, 4].map(|i| all[i] / all[0])
}

/// What hybrids gain where the CPU attends nothing is that prompts are paced, and computed ahead into the host's memory: the device alone
/// has both, too. (2.3% are left where NEO keeps fewer of them ahead.)
#[test]
fn without_attention_on_the_cpu_nothing_is_gained() {
    let cases = [
        ("llama-2-7b", "t4-g4dn", "synthetic:279..466,33..56,100,0"),
        ("llama-3.1-8b", "a10g-g5", "synthetic:750..1250,75..125,150,0"),
        ("llama-3.1-8b", "rtx4090-desktop", "synthetic:750..1250,150..250,200,0"),
        ("qwen3-14b", "l40s-epyc", "synthetic:750..1250,150..250,200,0"),
    ];
    for (spec, name, trace) in cases {
        let mut machine = hardware::named(name).unwrap();
        machine.cpu.read_bw = 1e6;
        let [_, fastdecode, hybrids @ ..] = gains(&machine, spec, trace);
        assert!(hybrids.iter().all(|gain| (gain - 1.0).abs() < 0.025), "{name} {trace}: {hybrids:?}");
        assert!(fastdecode < 0.01, "it has no other way: {fastdecode}");
    }
}

/// Draws from a range, evenly in the exponent.
struct Draws(u64);

impl Draws {
    fn between(&mut self, low: f64, high: f64) -> f64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        low * (high / low).powf((self.0 >> 40) as f64 / (1u64 << 24) as f64)
    }
}

/// Machines of all proportions: slow links and CPUs, GPUs with room for a few requests or many.
fn machine(draws: &mut Draws) -> Hardware {
    let mut machine = hardware::named("t4-g4dn").unwrap();
    machine.cpu.read_bw = draws.between(2e9, 3e11);
    machine.cpu.flops_bf16 = draws.between(3e11, 2e13);
    let (gpu, link) = machine.accelerator.as_mut().unwrap();
    gpu.bw = draws.between(2e11, 2.5e12);
    gpu.flops_bf16 = draws.between(2e13, 6e14);
    gpu.mem_bytes = draws.between(15.5e9, 24e9);
    link.h2d_bw = draws.between(1e9, 6e10);
    link.d2h_bw = link.h2d_bw;
    // As descriptions have it.
    machine.efficiency.cpu_beside_copies = (1.0 - link.h2d_bw / machine.cpu.read_bw).max(0.5);
    machine
}

fn trace(draws: &mut Draws) -> String {
    let [prompt, answer] = [(50.0, 1000.0), (30.0, 600.0)].map(|(low, high)| draws.between(low, high) as u32);
    let n = draws.between(60.0, 200.0) as u32;
    format!("synthetic:{}..{},{}..{},{n},0", prompt * 3 / 4, prompt * 5 / 4, answer * 3 / 4, answer * 5 / 4)
}

/// NEO and APEX leave the host alone where that is predicted to be faster; `auto` is nowhere far below the best.
#[test]
fn no_hybrid_is_slower_than_the_device_alone() {
    let mut draws = Draws(7);
    let (mut sum, mut shares, n) = (0.0, Vec::new(), 40);
    for _ in 0..n {
        let (machine, trace) = (machine(&mut draws), trace(&mut draws));
        let [_, fastdecode, neo, apex, auto] = gains(&machine, "llama-2-7b", &trace);
        let what = format!("{machine:?} {trace}: {neo:.3} {apex:.3} {auto:.3}, fastdecode {fastdecode:.3}");
        assert!(neo > 0.95 && apex > 0.95, "{what}");
        let share = auto / fastdecode.max(neo).max(apex).max(1.0);
        // The least is 0.984: the device alone chooses anew among fewer, and is lucky.
        assert!(share > 0.98, "{what}");
        shares.push(share);
        sum += neo + apex;
    }
    shares.sort_by(f64::total_cmp);
    let mean = shares.iter().sum::<f64>() / f64::from(n);
    println!(
        "NEO and APEX over the device alone: mean {:.3}; auto over the best of the others: mean {mean:.3}, least {:.3?}",
        sum / f64::from(2 * n),
        &shares[..3]
    );
    assert!(mean > 1.0, "{shares:.3?}");
    assert!(sum > 0.995 * f64::from(2 * n), "{sum}");
}

/// A faster CPU, a faster link, more memory make no strategy slower: by more than 1% in at most one of a hundred comparisons, and there by at most 1.5%.
///
/// Not 1% in all: a policy that is chosen by prediction keeps its place within a margin of 1%, and is changed in the middle of a run, where luck
/// finds a better schedule on one machine and not on the other. Beyond these cases (`TANDEM_CASES=75 TANDEM_FROM=24`) there are a few where a faster
/// host gets more requests than are good for it: APEX 0.945 (case 89). They are known, and no reason to let these here fall behind.
#[test]
fn a_better_machine_is_not_slower() {
    let of = |name: &str, default: u64| std::env::var(name).map_or(default, |n| n.parse().unwrap());
    let (cases, from) = (of("TANDEM_CASES", 24), of("TANDEM_FROM", 0));
    let better: [(&str, fn(&mut Hardware)); 3] = [
        ("CPU", |m| m.cpu.read_bw *= 1.5),
        ("link", |m| {
            let link = &mut m.accelerator.as_mut().unwrap().1;
            (link.h2d_bw, link.d2h_bw) = (link.h2d_bw * 1.5, link.d2h_bw * 1.5);
        }),
        ("memory", |m| {
            let gpu = &mut m.accelerator.as_mut().unwrap().0;
            gpu.mem_bytes *= 1.08;
        }),
    ];
    let mut ratios = Vec::new();
    for case in from..from + cases {
        let mut draws = Draws(11 + (case << 20));
        let (base, trace) = (machine(&mut draws), trace(&mut draws));
        let before = throughput(&base, "llama-2-7b", &trace);
        for (what, change) in better {
            let mut machine = base.clone();
            change(&mut machine);
            let after = throughput(&machine, "llama-2-7b", &trace);
            for (name, (after, before)) in sched::NAMES.iter().zip(after.iter().zip(&before)) {
                ratios.push((after / before, format!("{name}, {what}, case {case}: {trace}")));
            }
        }
    }
    ratios.sort_by(|a, b| a.0.total_cmp(&b.0));
    let slower = ratios.iter().filter(|r| r.0 < 0.99).count();
    println!("of {} ratios {slower} below 0.99; least {:.4?}", ratios.len(), &ratios[..6]);
    let (one_of, known) = if from + cases <= 24 { (100, 0.985) } else { (50, 0.94) };
    assert!(one_of * slower <= ratios.len(), "{slower} of {}: {:.4?}", ratios.len(), &ratios[..=slower]);
    assert!(ratios[0].0 > known, "{:.4?}", ratios[0]);
}
