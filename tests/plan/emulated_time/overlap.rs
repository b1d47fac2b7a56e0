//! Asynchronous overlap in emulated time: iterations take what was predicted, and the device waits for no attention of the host.

use tandem::engine::{NewTokens, Outcome};
use tandem::plan::experts_on_host;
use tandem::program::virtual_machine::{Carried, run_from};
use tandem::program::{RequestId, Residence, SubBatch, Wants};

use super::*;

const MODEL_LAYERS: usize = 8;

/// A GPU that works, and a CPU whose memory reads so many bytes a second.
fn machine(folder: &tempfile::TempDir, cpu: f64) -> String {
    let text = format!(
        "[cpu]\ncores = 8\ndram_bytes = 64e9\nread_bw = {cpu:e}\nflops_bf16 = 1e13\nllc_bytes = 24e6\n\
         [gpu]\nmem_bytes = 8e9\nbw = 20e9\nflops_bf16 = 20e12\n\
         [link]\nh2d_bw = 12e9\nd2h_bw = 12e9\nlatency_s = 2e-6\n"
    );
    let file = folder.path().join(format!("cpu-{cpu:e}.toml"));
    std::fs::write(&file, text).unwrap();
    file.to_str().unwrap().to_string()
}

struct Run {
    e: Engine,
    device: Vec<RequestId>,
    host: Vec<Vec<RequestId>>,
}

/// Prompts of 40 tokens: `device` sequences there, and cohorts of as many.
fn begin(m: &LoadedModel, placement: &Placement, machine: &str, device: usize, cohorts: &[usize]) -> Run {
    let kind: Kind = format!("emulated:{machine}").parse().unwrap();
    let accel = device::open(&kind, Some(1 << 30)).unwrap();
    let mut o = options(128);
    (o.sequences, o.sub_batches, o.chunk) = (device + cohorts.iter().sum::<usize>(), 1 + cohorts.len(), 64);
    (o.kv_pages, o.far_pages) = (Some(4 * o.sequences), Some(4 * o.sequences));
    let placement = Placement { device_pages: 0, ..placement.clone() };
    let mut e =
        Engine::placed(m.spec.clone(), &m.weights, &o, accel, machine, "test", placement, &|_| ()).unwrap();
    let prompt: Vec<u32> = (0..40u32).map(|t| t * 7 % 500).collect();
    let mut add = |side| {
        let seq = e.add_at(side).unwrap();
        e.forward_greedy(&[NewTokens { id: seq, tokens: &prompt, wants: Wants::Last }]).unwrap();
        seq
    };
    let own = (0..device).map(|_| add(Side::Device)).collect();
    let host = cohorts.iter().map(|&n| (0..n).map(|_| add(Side::Host)).collect()).collect();
    Run { e, device: own, host }
}

impl Run {
    fn row(seq: RequestId) -> NewTokens<'static> {
        NewTokens { id: seq, tokens: &[7], wants: Wants::Last }
    }

    /// The iteration that the next step is, its cohorts in the order of the engine's.
    fn iteration(&self) -> (Iteration, Vec<Vec<RequestId>>) {
        let group = |seq: &RequestId, kv| Group {
            request: *seq,
            phase: Phase::Decode,
            first: self.e.len(*seq) as u32,
            tokens: 1,
            kv,
            wants: Wants::Last,
        };
        let host = |seqs: &[RequestId]| seqs.iter().map(|s| group(s, Kv::Host)).collect::<Vec<_>>();
        let own = self.device.iter().map(|s| group(s, Kv::Device)).collect();
        let mut sub_batches = vec![SubBatch::of(own)];
        for (seqs, at) in self.e.cohorts() {
            sub_batches.push(SubBatch::parked(host(&seqs), at));
        }
        let waiting: Vec<Vec<RequestId>> =
            self.host.iter().filter(|c| self.e.parked(c[0]).is_none()).cloned().collect();
        sub_batches.extend(waiting.iter().map(|c| SubBatch::of(host(c))));
        (Iteration { sub_batches, moves: vec![], flow: Flow::Async, pick: true, top: false }, waiting)
    }

    fn step(&mut self) -> (f64, Outcome) {
        let device: Vec<NewTokens<'_>> = self.device.iter().map(|&s| Run::row(s)).collect();
        let begin: Vec<Vec<NewTokens<'_>>> =
            self.iteration().1.iter().map(|c| c.iter().map(|&s| Run::row(s)).collect()).collect();
        let batches: Vec<&[NewTokens<'_>]> =
            [&device[..]].into_iter().chain(begin.iter().map(Vec::as_slice)).collect();
        let outcome = self.e.run_rows(&batches, Flow::Async, &[], |i| i.pick = true).unwrap();
        (outcome.seconds, outcome)
    }
}

#[test]
fn iterations_with_cohorts_take_what_was_predicted() {
    let m = load(&format!("synth:tiny-llama,seed=2,layers={MODEL_LAYERS}")).unwrap();
    let placement = Placement::all(Side::Device, m.spec.n_layers, 64);
    take_what_was_predicted(&m, "all on the device", &placement, &[2e9, 0.05e9, 0.02e9]);
}

/// The same where the host has experts: all of them, or half of each layer's. The device waits for these, and for a piece of a cohort's
/// attention before them.
#[test]
fn iterations_with_cohorts_behind_experts_of_the_host_take_what_was_predicted() {
    let m = load("synth:tiny-qwen3-moe,dtype=bf16,seed=2,layers=4").unwrap();
    let sizes = PlanSizes::of_weights(&m.spec, &m.weights, Isa::selected().unwrap());
    let experts = m.spec.experts.as_ref().unwrap().count;
    let mut divided = Placement::all(Side::Device, m.spec.n_layers, 64);
    for at in &mut divided.layers {
        (at.weights, at.device_experts) = (Residence::Both, (experts / 2) as u16);
    }
    let on_host = Placement { device_pages: 64, ..experts_on_host(&sizes, m.spec.n_layers) };
    for (what, placement) in [("all experts on the host", on_host), ("half of the experts", divided)] {
        take_what_was_predicted(&m, what, &placement, &[16e9, 2e9]);
    }
}

/// The time of all iterations, and of each in which the same cohorts join as predicted; beside a host that keeps up, which do.
fn take_what_was_predicted(m: &LoadedModel, what: &str, placement: &Placement, cpus: &[f64]) {
    let folder = tempfile::tempdir().unwrap();
    let sizes = PlanSizes::of_weights(&m.spec, &m.weights, Isa::selected().unwrap());
    let mut wrong = Vec::new();
    for &cpu in cpus {
        let name = machine(&folder, cpu);
        let h = hardware::parse(&name, &std::fs::read_to_string(&name).unwrap()).unwrap();
        let roofline = Roofline::new(&h, &sizes).uncached();
        let mut run = begin(m, placement, &name, 3, &[2, 4]);
        let (mut carried, mut sums, mut same, mut joins) = (Carried::default(), (0.0, 0.0), 0, 0);
        const STEPS: usize = 40;
        for i in 0..STEPS {
            let (iteration, _) = run.iteration();
            let program = lower(placement, &iteration).unwrap();
            let costs = OpCosts::new(&roofline, &sizes).of(&iteration).on(placement);
            let predicted = run_from(&program, &iteration, &costs, &carried);
            let (got, advanced) = run.step();
            let want = predicted.timeline.seconds();
            let mine: Vec<bool> = advanced.cohorts.iter().map(|c| c.advanced).collect();
            let theirs: Vec<bool> =
                iteration.cohorts().map(|(b, c)| c.at.is_none() || predicted.joined.contains(&b)).collect();
            same += usize::from(mine == theirs);
            joins += mine.iter().filter(|&&j| j).count();
            sums = (sums.0 + want, sums.1 + got);
            carried = predicted.carried;
            if mine == theirs && (got / want - 1.0).abs() > 0.1 {
                wrong.push(format!(
                    "{what}, cpu {cpu:e}, iteration {i}: predicted {want:e}, executed {got:e}"
                ));
            }
        }
        println!(
            "{what}, cpu {cpu:e}: {joins} joins, {same} of {STEPS} iterations alike, predicted {:.1} us, executed {:.1} us",
            1e6 * sums.0,
            1e6 * sums.1
        );
        let off = sums.1 / sums.0 - 1.0;
        // Where the host keeps up, every join is predicted. Where it lags, the emulated host reads keys in groups of 16 tokens and the
        // prediction counts tokens, so that a cohort may be ready an iteration earlier or later: of these the time alone is compared.
        let keeps_up = cpu > 1e9;
        if off.abs() > 0.1 || keeps_up && same < STEPS {
            wrong.push(format!("{what}, cpu {cpu:e}: {same} of {STEPS} alike, {:+.1}%", 100.0 * off));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// With a host so slow that nothing joins, steps take what they take without cohorts; the timeline shows attention under whole
/// iterations, joins and cohorts that stay parked.
#[test]
fn the_device_never_waits_for_a_slow_host() {
    let m = load(&format!("synth:tiny-llama,seed=2,layers={MODEL_LAYERS}")).unwrap();
    let placement = Placement::all(Side::Device, m.spec.n_layers, 0);
    let folder = tempfile::tempdir().unwrap();
    let slow = machine(&folder, 2e6);
    let mut alone = begin(&m, &placement, &slow, 3, &[]);
    let mut beside = begin(&m, &placement, &slow, 3, &[2, 2]);
    beside.e.trace();
    beside.step();
    let (mut longest, mut stayed) = (0.0f64, 0);
    for _ in 0..12 {
        let ((want, _), (got, advanced)) = (alone.step(), beside.step());
        let joined = advanced.cohorts.iter().any(|c| c.advanced);
        stayed += advanced.cohorts.iter().filter(|c| !c.advanced).count();
        if !joined {
            longest = longest.max(got / want);
        }
    }
    println!("a step beside parked cohorts takes {longest:.3} times one without; {stayed} looks in vain");
    assert!(stayed > 12 && longest > 0.0 && longest <= 1.05, "{stayed} {longest}");
    // Faster again: attention of a cohort under the whole of an iteration.
    let mut run = begin(&m, &placement, &machine(&folder, 0.05e9), 3, &[4]);
    run.e.trace();
    for _ in 0..3 * MODEL_LAYERS {
        run.step();
    }
    let t = run.e.timeline().unwrap();
    let of = |step: u32| {
        let spans = || t.spans.iter().filter(move |s| s.step == step && s.unit == Unit::Gpu);
        let from = spans().map(|s| s.start).fold(f64::INFINITY, f64::min);
        (from, spans().map(|s| s.end).fold(0.0, f64::max))
    };
    let attends =
        || t.spans.iter().filter(|s| s.unit == Unit::Host && s.cohort == Some(1) && s.name == "attend");
    let covered = (1..3 * MODEL_LAYERS as u32)
        .filter(|&step| attends().any(|a| a.start < of(step).0 && a.end > of(step).1))
        .count();
    let named = |name| t.spans.iter().filter(|s| s.name == name && s.cohort == Some(1)).count();
    println!("{covered} iterations under one attention, {} joins, {} parked", named("join"), named("parked"));
    assert!(covered > 0 && named("join") > 0 && named("parked") > 0);
    let mut trace = Vec::new();
    t.write_chrome(&mut trace).unwrap();
    let trace = String::from_utf8(trace).unwrap();
    assert!(trace.contains("cohort 1 join") && trace.contains("cohort 1 attend"));
}
