use super::*;
use crate::model::synth;
use crate::plan::hardware;
use crate::program::{Policy, Residence, Side};

fn sizes(name: &str) -> Sizes {
    Sizes::of_spec(&synth::parse(name).unwrap().spec)
}

fn request() -> PlanRequest {
    PlanRequest {
        prompt: 512,
        gen_len: 128,
        batch: 1,
        gpu_memory: None,
        chunk: None,
        overlap: false,
        fixed: Fixed::default(),
    }
}

fn of(plan: &Plan, strategy: Strategy) -> &Candidate {
    plan.candidates.iter().find(|c| c.strategy == strategy).unwrap()
}

/// By the roofline.
fn plan(sizes: &Sizes, hardware: &Hardware, request: &PlanRequest, strategies: &[Strategy]) -> Result<Plan> {
    plan_with(sizes, hardware, request, strategies, &Roofline::new(hardware, sizes))
}

fn all(model: &str, machine: &str, request: &PlanRequest) -> Plan {
    plan(&sizes(model), &hardware::named(machine).unwrap(), request, &Strategy::ALL).unwrap()
}

/// The sums that the search uses are the price of the placement.
#[test]
fn the_search_and_the_price_agree_on_every_boundary() {
    let s = sizes("qwen3-8b");
    let mut h = hardware::named("rtx4060-laptop").unwrap();
    for (issue, prompt, batch, chunk) in
        [(0.0, 512, 1, 512), (0.0, 700, 3, 256), (0.02, 100, 4, 300), (0.0, 1, 1, 1)]
    {
        (h.efficiency.cpu_issue_s, h.efficiency.gpu_issue_s) = (issue, issue / 2.0);
        let request = PlanRequest { prompt, batch, ..request() };
        let costs = Roofline::new(&h, &s);
        let bytes = request.outline(&s, &h);
        let planner = Planner { sizes: &s, hardware: &h, request: &request, costs: &costs, bytes: &bytes };
        let sums = helm::SideSums::new(&planner, chunk);
        for k in 0..=s.units() {
            for streams in [false, true].into_iter().filter(|&streams| !streams || k > 1) {
                let mut p = Placement::boundary(k, s.layers(), planner.pages(), planner.pages());
                for l in p.layers.iter_mut().filter(|l| streams && l.weights == Residence::Host) {
                    (l.weights, l.prefill) = (Residence::Streamed, Policy::all(Side::Device));
                }
                let (a, b) = (sums.total(k, streams), planner.total(&p, chunk));
                assert!((a - b).abs() < 1e-9 * b, "k {k}, streams {streams}: {a} {b}");
            }
        }
    }
}

/// The search itself, and with it the programs of the best few.
#[test]
fn the_search_takes_less_than_50_ms_for_128_layers() {
    let spec = synth::parse("llama-3.1-70b,layers=128").unwrap().spec;
    let (s, mut h) = (Sizes::of_spec(&spec), hardware::named("l40s-epyc").unwrap());
    h.cpu.dram_bytes = 512e9;
    let request = PlanRequest { prompt: 4096, batch: 8, ..request() };
    let best = |work: &dyn Fn()| {
        let timed = (0..10).map(|_| {
            let begun = std::time::Instant::now();
            work();
            begun.elapsed().as_secs_f64()
        });
        timed.fold(f64::INFINITY, f64::min)
    };
    let search = best(&|| assert!(boundary_curve(&s, &h, &request).unwrap().len() > 20));
    let whole = best(&|| drop(plan(&s, &h, &request, &[Strategy::Helm]).unwrap()));
    println!("{:.1} ms, with programs {:.1} ms", search * 1e3, whole * 1e3);
    assert!(search < 0.05, "{:.1} ms", search * 1e3);
    assert!(whole < 0.5, "{:.1} ms", whole * 1e3);
}

#[test]
fn what_fits_the_gpu_runs_there() {
    let plan = all("qwen3-4b", "rtx3090-epyc", &request());
    assert_eq!(plan.candidates[plan.chosen.unwrap()].strategy, Strategy::GpuOnly);
    assert_eq!(of(&plan, Strategy::Helm).k, Some(0));
    assert_eq!(of(&plan, Strategy::Greedy).k, Some(0));
    assert_eq!(of(&plan, Strategy::Lia).decode_policy, Some([0; 6]));
}

#[test]
fn a_model_larger_than_the_gpu_is_split_and_helm_is_never_worse_than_greedy() {
    for (model, machine, batch, prompt) in [
        ("qwen3-8b", "rtx4060-laptop", 1, 512),
        ("qwen3-14b", "rtx3090-epyc", 1, 512),
        ("qwen3-32b", "l40s-epyc", 8, 4096),
        ("llama-3.1-8b", "rtx4060-laptop", 16, 2048),
        ("opt-30b", "a100-spr", 64, 256),
    ] {
        let plan = all(model, machine, &PlanRequest { batch, prompt, ..request() });
        let (helm, greedy) = (of(&plan, Strategy::Helm), of(&plan, Strategy::Greedy));
        assert!(!of(&plan, Strategy::GpuOnly).feasible, "{model}");
        assert!(
            helm.feasible && helm.t_total_s <= greedy.t_total_s.map(|t| t * (1.0 + 1e-9)) || !greedy.feasible
        );
        let chosen = &plan.candidates[plan.chosen.unwrap()];
        for c in plan.candidates.iter().filter(|c| c.feasible) {
            assert!(
                c.memory.fits() && c.t_total_s >= chosen.t_total_s.map(|t| t * (1.0 - 1e-8)),
                "{model}: {c:?}"
            );
            assert!(
                c.longest_context >= prompt + 128,
                "{model}: {} {}",
                c.strategy.name(),
                c.longest_context
            );
            let sum: f64 = c.stages.iter().map(|s| s.decode_step_s).sum();
            assert!((sum - c.t_decode_step_s.unwrap()).abs() < 1e-9);
        }
    }
}

/// HELM's published split, with keys, values, activations and kernels counted.
#[test]
fn the_published_boundary_on_the_small_machine() {
    let plan = all("qwen3-8b", "rtx4060-laptop", &PlanRequest { prompt: 128, gen_len: 128, ..request() });
    let helm = of(&plan, Strategy::Helm);
    assert_eq!((helm.k, helm.cpu_units, helm.gpu_units), (Some(21), 21, 17), "{:?}", helm.memory);
}

#[test]
fn long_prompts_are_streamed_and_short_ones_computed_in_place() {
    let run = |prompt| all("qwen3-14b", "rtx3090-epyc", &PlanRequest { prompt, gen_len: 32, ..request() });
    let (short, long) = (run(16), run(4096));
    assert!(!of(&short, Strategy::Helm).reason.contains("streamed"), "{}", of(&short, Strategy::Helm).reason);
    assert!(of(&long, Strategy::Helm).reason.contains("streamed to the GPU for prompts"));
}

/// A short prompt, weights that do not fit: greedy filling has HELM's boundary, and HELM is who is named.
#[test]
fn of_equals_a_system_wins_over_its_baseline() {
    let plan = all("qwen3-14b", "rtx3090-epyc", &PlanRequest { prompt: 64, gen_len: 64, ..request() });
    let (helm, greedy) = (of(&plan, Strategy::Helm), of(&plan, Strategy::Greedy));
    assert_eq!((helm.k, greedy.k), (Some(8), Some(8)));
    assert_eq!(plan.candidates[plan.chosen.unwrap()].strategy, Strategy::Helm);
    assert!(plan.why.starts_with("helm: the first 8 of 42 units on the CPU; as fast as "), "{}", plan.why);
}

/// LIA's regimes on its own machine, by the batch.
#[test]
fn vectors_change_with_the_batch() {
    let run = |batch| {
        let h = hardware::named("a100-spr").unwrap();
        let request = PlanRequest { prompt: 32, gen_len: 32, batch, ..request() };
        plan(&sizes("opt-30b"), &h, &request, &[Strategy::Lia]).unwrap().candidates.remove(0)
    };
    assert_eq!(run(1).decode_policy, Some([1, 1, 1, 1, 1, 1]));
    assert_eq!(run(1).prefill_policy, Some([1, 1, 1, 1, 1, 1]));
    assert_eq!(run(64).prefill_policy, Some([0, 0, 0, 0, 0, 0]));
    assert_eq!(run(64).decode_policy, Some([1, 1, 1, 1, 1, 1]));
    assert_eq!(run(1100).decode_policy, Some([0, 1, 1, 0, 0, 0]));
    let one = run(1);
    assert!(one.pinned_blocks.unwrap() > 20 && one.memory.gpu.total <= one.memory.gpu.available, "{one:?}");
}

#[test]
fn contexts_beyond_the_gpu_spill_and_are_attended_where_it_is_faster() {
    let mut h = hardware::named("rtx4090-desktop").unwrap();
    let request = PlanRequest { prompt: 120_000, gen_len: 64, ..request() };
    let s = sizes("llama-3.1-8b");
    let helm = |h: &Hardware| plan(&s, h, &request, &[Strategy::Helm]).unwrap().candidates.remove(0);
    let split = helm(&h);
    assert!(split.feasible, "{}", split.reason);
    if split.spilled.is_some() {
        assert!(split.reason.contains("KV pages on the host"), "{}", split.reason);
        assert!(split.memory.host.kv > 0);
    }
    h.cpu.read_bw = 5e9;
    let slow = helm(&h);
    assert!(slow.t_total_s > split.t_total_s);
}

#[test]
fn without_a_gpu_there_is_the_cpu() {
    let mut h = hardware::named("a10-xeon").unwrap();
    h.accelerator = None;
    let plan = plan(&sizes("llama-3.2-1b"), &h, &request(), &Strategy::ALL).unwrap();
    let chosen = &plan.candidates[plan.chosen.unwrap()];
    assert_eq!(chosen.strategy, Strategy::CpuOnly);
    assert_eq!(of(&plan, Strategy::Helm).k, Some(18));
    assert!(of(&plan, Strategy::Helm).feasible);
    for s in [Strategy::GpuOnly, Strategy::Stream, Strategy::Lia] {
        assert_eq!(
            (of(&plan, s).feasible, of(&plan, s).reason.as_str()),
            (false, "this machine has no GPU"),
            "{s:?}"
        );
    }
}

#[test]
fn what_fits_nowhere_says_so_with_numbers() {
    let plan = all("opt-175b", "rtx4060-laptop", &request());
    assert_eq!(plan.chosen, None);
    for c in &plan.candidates {
        assert!(!c.feasible && c.reason.contains("GB") && c.reason.contains("available"), "{}", c.reason);
    }
}

#[test]
fn requests_that_make_no_sense() {
    let s = sizes("opt-125m");
    let h = hardware::named("a10-xeon").unwrap();
    for (request, want) in [
        (PlanRequest { prompt: 0, ..request() }, "at least 1"),
        (PlanRequest { batch: 0, ..request() }, "at least 1"),
        (PlanRequest { prompt: 4000, ..request() }, "opt-125m was made for 2048"),
        (PlanRequest { prompt: u64::MAX, ..request() }, "was made for"),
        (PlanRequest { batch: u64::MAX, ..request() }, "more than can be planned for"),
        (PlanRequest { batch: 1 << 50, ..request() }, "more than can be planned for"),
    ] {
        let error = plan(&s, &h, &request, &Strategy::ALL).unwrap_err().to_string();
        assert!(error.contains(want), "{want}: {error}");
    }
}

/// The largest request that is accepted overflows nothing.
#[test]
fn large_numbers_are_counted_or_refused() {
    let h = hardware::named("h200-sxm").unwrap();
    for model in ["tiny-llama", "llama-3.1-70b", "opt-175b", "qwen3-32b,ctx=268435456"] {
        let s = sizes(model);
        for batch in (0..50).map(|i| 1u64 << i) {
            for prompt in (0..28).map(|i| 1u64 << i).filter(|n| n + 1 < s.spec.max_context as u64) {
                let request = PlanRequest { prompt, gen_len: 1, batch, chunk: Some(512), ..request() };
                if request.check(&s).is_ok() {
                    plan(&s, &h, &request, &[Strategy::CpuOnly, Strategy::Stream, Strategy::Lia]).unwrap();
                    crate::plan::batch_policies(&Roofline::serial(&h, &s), &s, batch, prompt, false);
                }
            }
        }
    }
}

#[test]
fn a_limit_that_the_user_set_is_kept() {
    for gpu_memory in [2_000_000_000, 4_000_000_000, 6_000_000_000] {
        let plan =
            all("qwen3-8b", "rtx4060-laptop", &PlanRequest { gpu_memory: Some(gpu_memory), ..request() });
        for c in plan.candidates.iter().filter(|c| c.feasible) {
            assert!(c.memory.gpu.total <= gpu_memory);
        }
    }
}

#[test]
fn filling_takes_one_rung_after_the_other() {
    let (s, h) = (sizes("qwen3-8b"), hardware::named("rtx3090-epyc").unwrap());
    let filled_beside = |dram: f64, gpu: u64| {
        let mut h = h.clone();
        h.cpu.dram_bytes = dram;
        h.accelerator.as_mut().unwrap().0.mem_bytes = gpu as f64;
        let request =
            PlanRequest { prompt: 8000, gen_len: 192, batch: 4, gpu_memory: Some(gpu), ..request() };
        plan(&s, &h, &request, &[Strategy::Greedy]).unwrap().candidates.remove(0)
    };
    let filled = |gpu: u64| filled_beside(64e9, gpu);
    let pages = |c: &Candidate| c.placement.device_pages;
    let all = filled(40_000_000_000);
    assert_eq!(
        (all.k, all.chunk, pages(&all), all.reason.as_str()),
        (Some(0), 512, 1024, "everything on the GPU")
    );
    // The rung is as high as the activations of 480 rows.
    let down = (0..200).map(|i| filled(all.memory.gpu.total - i * 1_000_000));
    let shorter = down.into_iter().find(|c| c.chunk < 512).unwrap();
    assert!(shorter.k == Some(0) && pages(&shorter) == 1024, "{}", shorter.reason);
    let fewer = filled(20_000_000_000);
    assert!(
        fewer.k == Some(0) && pages(&fewer) < 1024 && fewer.reason.contains("KV pages"),
        "{}",
        fewer.reason
    );
    let blocks = filled(12_000_000_000);
    assert!(blocks.k > Some(0) && blocks.reason.ends_with("units on the host"), "{}", blocks.reason);
    for c in [all, shorter, fewer, blocks] {
        assert!(c.feasible && c.memory.fits(), "{}", c.reason);
    }
    let none = filled_beside(8e9, 1 << 20);
    assert!(
        !none.feasible && none.reason.contains("host memory") && none.reason.contains("7.60 GB"),
        "{}",
        none.reason
    );
}
