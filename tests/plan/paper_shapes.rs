//! The shapes that NEO and APEX report, from the simulator (docs/simulate.md has the figures): over the baseline that the papers have,
//! and over the stronger one that is `gpu-only` here.

use tandem::model::synth;
use tandem::plan::{Predictor, Sizes, Uncached, hardware};
use tandem::program::{Placement, Side};
use tandem::sched;
use tandem::sim::{Options, PageCapacity, Report, simulate};
use tandem::workload::{Shape, Source, Workload};

/// Room for keys and values that NEO's release gives a T4 with a 7B model (54 blocks of 16 tokens) and an A10G with an 8B model.
const T4_NEO: usize = 864;
const A10G_NEO: usize = 26_400;

/// Runs a trace by each strategy, on a machine whose CPU attends `c` times as many tokens a second as its GPU (`None`: as described).
fn throughput(
    spec: &str,
    machine: &str,
    c: Option<f64>,
    gpu_tokens: usize,
    trace: &str,
    names: &[&str],
) -> Vec<Report> {
    let sizes = Sizes::of_spec(&synth::spec(spec).unwrap());
    let mut machine = hardware::named(machine).unwrap();
    if let Some(c) = c {
        machine.cpu.read_bw = c * machine.accelerator.unwrap().0.bw * machine.efficiency.gpu_memory;
    }
    let capacity = PageCapacity { device_pages: gpu_tokens / 32, host_pages: 4000 };
    let options = Options {
        rows: 2048,
        sub_batches: 2,
        sequences: 512,
        capacity,
        targets: sched::Targets::NONE,
        most_answer: None,
        learns_lengths: true,
    };
    let placement = Placement {
        host_pages: capacity.host_pages,
        ..Placement::all(Side::Device, sizes.layers(), capacity.device_pages)
    };
    let predictor = Predictor::new(Uncached(machine), sizes, placement);
    let work = Workload::load(&trace.parse::<Source>().unwrap(), &Shape::default(), |_| ()).unwrap();
    let one = |name: &&str| {
        let mut strategy = sched::by_name(name).unwrap();
        let report = simulate(&work.requests, &mut *strategy, &predictor, &options, &mut |_| ()).unwrap();
        assert_eq!(report.requests.finished, work.requests.len(), "{name}: {:?}", report.requests);
        println!(
            "{trace} {gpu_tokens} {c:?} {name}: {:.1} tok/s, flows {:?}",
            report.throughput_tok_s, report.flows
        );
        report
    };
    names.iter().map(one).collect()
}

/// Each strategy's throughput over the first's.
fn gains(
    spec: &str,
    machine: &str,
    c: Option<f64>,
    gpu_tokens: usize,
    trace: &str,
    names: &[&str],
) -> Vec<f64> {
    let reports = throughput(spec, machine, c, gpu_tokens, trace, names);
    reports[1..].iter().map(|r| r.throughput_tok_s / reports[0].throughput_tok_s).collect()
}

/// NEO §5.2 and its release: with room for two requests on the GPU everything gains several times over; with 4000 tokens it is
/// the 1.6 x that APEX measures. This, not the CPU, makes NEO's 7.5 x. Over prompts that are paced and computed ahead, little is left of it.
#[test]
fn what_the_t4_gains_is_its_lack_of_memory() {
    let names = ["vllm", "gpu-only", "neo", "apex"];
    let at = |tokens| gains("llama-2-7b", "t4-g4dn", None, tokens, "synthetic:373,45,200,0", &names);
    let (tight, wide) = (at(T4_NEO), at(4000));
    assert!(tight[1] > 3.0 && tight[1] < 7.6, "NEO: {tight:?}");
    assert!(wide[1] > 1.3 && wide[1] < 1.8, "NEO: {wide:?}");
    assert!(
        wide[2] > 1.4 && wide[2] < 2.9 && tight[2] > tight[1] && wide[2] > wide[1],
        "APEX: {tight:?} {wide:?}"
    );
    assert!(tight[1] > 2.0 * wide[1]);
    // The stronger baseline: most of NEO's gain is there without attention on the CPU.
    assert!(wide[0] > 1.2 && wide[1] < 1.1 * wide[0] && wide[2] > 1.15 * wide[0], "{wide:?}");
}

/// NEO figure 9: the gain rises over the output's length to a peak and decays towards 1, never far below. FastDecode, which has the CPU
/// attend everything, falls below 0.6 (NEO figure 8b). The peak is that of the baseline's prompts: over `gpu-only` there is none.
#[test]
fn the_gain_over_the_length_of_answers_is_one_of_prompts() {
    let at = |out: u32| {
        let trace = format!("synthetic:1000,{out},120,0");
        let names = ["vllm", "gpu-only", "neo", "fastdecode"];
        gains("llama-3.1-8b", "a10g-g5", Some(0.05), A10G_NEO, &trace, &names)
    };
    let curve = [25, 100, 400, 800].map(at);
    assert!(curve[1][1] > 1.08 && curve[1][1] > curve[0][1], "{curve:?}");
    assert!(curve.iter().all(|c| c[0] > 0.99 && c[1] > 0.985 * c[0] && c[1] < 1.05 * c[0]), "{curve:?}");
    assert!(curve.windows(2).all(|w| w[1][2] < w[0][2] + 0.01) && curve[3][2] < 0.6, "{curve:?}");
}

/// NEO figure 10a: a faster CPU gains more. `auto` keeps that over `gpu-only`, too.
#[test]
fn a_faster_cpu_gains_more() {
    let at = |c: f64| {
        let names = ["vllm", "gpu-only", "neo", "auto"];
        gains("llama-3.1-8b", "a10g-g5", Some(c), A10G_NEO, "synthetic:1000,400,150,0", &names)
    };
    let ladder = [0.05, 0.2, 0.4].map(at);
    assert!(ladder.windows(2).all(|w| w[0][1] <= w[1][1] + 0.01), "{ladder:?}");
    assert!(ladder.windows(2).all(|w| w[0][2] / w[0][0] <= w[1][2] / w[1][0] + 0.01), "{ladder:?}");
    assert!(ladder[2][2] > 1.15 * ladder[2][0], "{ladder:?}");
}

/// Where answers are long and the CPU is not hopelessly slow: APEX >= NEO >= GPU-only, and `auto` at most 2% behind the best of them.
/// On an A10 beside a Xeon the two are even: 2296 over 2250 tok/s while rows crossed in f32, 2452 to 2463 in 16 bits and for NEO, whose
/// device waited for them, on the copy lanes.
#[test]
fn decode_heavy_work_is_ranked_as_apex_says() {
    let cases = [
        ("llama-2-7b", "t4-xeon", Some(0.23), 4000, "synthetic:100,400,120,0", 1.0),
        ("llama-3.1-8b", "a10g-g5", None, A10G_NEO, "synthetic:300,600,150,0", 1.0),
        ("llama-3.1-8b", "a10-xeon", None, A10G_NEO, "synthetic:100,500,200,0", 0.99),
    ];
    for (spec, machine, c, tokens, trace, least) in cases {
        let g = gains(spec, machine, c, tokens, trace, &["gpu-only", "neo", "apex", "auto"]);
        let (neo, apex, auto) = (g[0], g[1], g[2]);
        println!("{machine}: {g:?}");
        assert!(neo >= 1.0 && apex >= least * neo, "{machine}: {g:?}");
        assert!(auto >= 0.98 * apex.max(neo).max(1.0), "{machine}: {g:?}");
    }
}

/// A CPU far below the bound of inequality 6 (N_G/N_C = 20) is for overlap, a faster one for pipelining.
#[test]
fn overlap_and_pipelining_cross_where_the_inequality_says() {
    let apex = |c: f64| {
        let trace = "synthetic:500,800,80,0";
        throughput("llama-3.1-8b", "a10g-g5", Some(c), A10G_NEO, trace, &["apex"]).remove(0).flows
    };
    let (slow, fast) = (apex(0.05), apex(0.4));
    assert!(slow[2] > 2 * slow[1], "overlap at 20:1: {slow:?}");
    assert!(fast[1] > 2 * fast[2], "pipelining at 2.5:1: {fast:?}");
}
