//! Gains over the device alone that a simulation predicts, against those of the same requests on the real engine in emulated time.
//!
//! Both run the same schedulers over the same pages, rows and sequences. The simulation prices programs of a few layers by the
//! description of the machine; the emulated accelerator and the host's half count what each call reads and multiplies.

use std::io::Write;
use std::sync::mpsc::Receiver;

use tandem::device::{self, Kind};
use tandem::engine::{Batcher, Engine, Event, Options, Request};
use tandem::model::{LoadedModel, load};
use tandem::plan::{Hardware, Predictor, Sizes, Uncached, hardware};
use tandem::program::{Flow, Placement, Side};
use tandem::sched::by_name;
use tandem::sim::{self, PageCapacity, Report};
use tandem::simd::Isa;
use tandem::text::SamplerParams;
use tandem::workload::Arrival;

/// Requests, and the memory that they have.
#[derive(Clone, Copy)]
struct Work {
    requests: usize,
    /// Tokens of prompts and answers, from and to.
    input: (u32, u32),
    output: (u32, u32),
    device_pages: usize,
    host_pages: usize,
    rows: usize,
}

impl Work {
    /// Lengths evenly between the ends, in no order.
    fn arrivals(&self) -> Vec<Arrival> {
        let of = |(from, to): (u32, u32), i: usize| from + (i as u32 * 7919 + 13) % (to - from + 1);
        let one = |i| Arrival { at: 0.0, input: of(self.input, i), output: of(self.output, 3 * i + 1) };
        (0..self.requests).map(one).collect()
    }
}

/// What a strategy made of the requests.
#[derive(Debug, Clone, Copy, Default)]
struct Outcome {
    tokens: u32,
    seconds: f64,
    iterations: u64,
    /// How many ran unified, in two lanes, asynchronously.
    flows: [u64; 3],
}

impl Outcome {
    fn rate(&self) -> f64 {
        f64::from(self.tokens) / self.seconds
    }
}

fn flow(flow: Flow) -> usize {
    match flow {
        Flow::Serial => 0,
        Flow::TwoLanes => 1,
        Flow::Async => 2,
    }
}

/// Requests on the engine, in its emulated time.
fn executed(requests: &mut Batcher, arrivals: &[Arrival]) -> Outcome {
    let vocab = requests.engine().spec().vocab;
    let begun = requests.engine().emulated_seconds().expect("emulated time");
    let streams: Vec<Receiver<Event>> = arrivals
        .iter()
        .enumerate()
        .map(|(n, arrival)| {
            let token = |i: u32| (i * 7919 + n as u32 * 104_729 + 13) % vocab as u32;
            let request = Request {
                prompt: (0..arrival.input).map(token).collect(),
                sampling: SamplerParams { temperature: 0.0, ..Default::default() },
                max_tokens: arrival.output as usize,
                ..Request::default()
            };
            requests.submit(request).unwrap().1
        })
        .collect();
    let mut done = Outcome::default();
    while !requests.is_idle() {
        let report = requests.step();
        assert_eq!(report.failed, 0);
        done.iterations += 1;
        if let Some(of) = report.flow.map(flow) {
            done.flows[of] += 1;
        }
    }
    done.seconds = requests.engine().emulated_seconds().unwrap() - begun;
    let tokens =
        |events: &Receiver<Event>| events.try_iter().filter(|e| matches!(e, Event::Token(_))).count();
    done.tokens = streams.iter().map(tokens).sum::<usize>() as u32;
    done
}

struct Machine {
    name: String,
    hardware: &'static Hardware,
    /// What `emulated:` takes.
    file: String,
    _folder: Option<tempfile::TempDir>,
}

impl Machine {
    fn named(name: &str) -> Machine {
        let hardware = Box::leak(Box::new(hardware::named(name).unwrap()));
        Machine { name: name.into(), hardware, file: name.into(), _folder: None }
    }

    /// A described machine with so much slower memories, arithmetic and links: a small model is to it what one so many times larger
    /// is to the machine itself, for which latencies are short.
    fn slower(name: &str, times: f64) -> Machine {
        let h = hardware::named(name).unwrap();
        let (gpu, link) = h.accelerator.unwrap();
        let (cpu, e) = (h.cpu, h.efficiency);
        let text = format!(
            "[cpu]\ncores = {}\ndram_bytes = {:e}\nread_bw = {:e}\nflops_bf16 = {:e}\nllc_bytes = {:e}\n\
             [gpu]\nmem_bytes = {:e}\nbw = {:e}\nflops_bf16 = {:e}\n\
             [link]\nh2d_bw = {:e}\nd2h_bw = {:e}\nlatency_s = {:e}\n\
             [efficiency]\ngpu_compute = {}\ngpu_memory = {}\ncpu_compute = {}\ncpu_memory = {}\n",
            cpu.cores,
            cpu.dram_bytes,
            cpu.read_bw / times,
            cpu.flops_bf16 / times,
            cpu.llc_bytes,
            gpu.mem_bytes,
            gpu.bw / times,
            gpu.flops_bf16 / times,
            link.h2d_bw / times,
            link.d2h_bw / times,
            link.latency_s,
            e.gpu_compute,
            e.gpu_memory,
            e.cpu_compute,
            e.cpu_memory,
        );
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(format!("{name}-slow.toml"));
        std::fs::write(&file, &text).unwrap();
        let hardware = Box::leak(Box::new(hardware::parse(name, &text).unwrap()));
        let name = format!("{name} / {times}");
        Machine { name, hardware, file: file.to_str().unwrap().into(), _folder: Some(folder) }
    }
}

/// Executes and simulates by each strategy.
fn both(m: &LoadedModel, machine: &Machine, work: &Work, strategies: &[&str]) -> Vec<(Outcome, Report)> {
    let isa = Isa::selected().unwrap();
    let arrivals = work.arrivals();
    let context = arrivals.iter().map(|a| a.input + a.output).max().unwrap() as usize;
    let options = Options {
        sequences: work.requests,
        logits: work.requests,
        chunk: work.rows,
        threads: Some(2),
        kv_pages: Some(work.device_pages),
        far_pages: Some(work.host_pages),
        sub_batches: 2,
        ..Options::new(isa, context)
    };
    let n = m.spec.n_layers;
    let placement =
        Placement { host_pages: work.host_pages, ..Placement::all(Side::Device, n, work.device_pages) };
    let kind: Kind = format!("emulated:{}", machine.file).parse().unwrap();
    let accel = device::open(&kind, Some(1 << 30)).unwrap();
    let engine = Engine::placed(
        m.spec.clone(),
        &m.weights,
        &options,
        accel,
        "test",
        "test",
        placement.clone(),
        &|_| (),
    );
    let mut engine = Some(engine.unwrap());
    let sizes = Sizes::of_weights(&m.spec, &m.weights, isa);
    let mut results = Vec::new();
    for name in strategies {
        let predict = || Predictor::new(Uncached(machine.hardware.clone()), sizes.clone(), placement.clone());
        let mut requests = Batcher::with(engine.take().unwrap(), by_name(name).unwrap(), Box::new(predict()));
        let limits = *requests.limits();
        let done = executed(&mut requests, &arrivals);
        engine = Some(requests.into_engine());
        let options = sim::Options {
            rows: limits.rows,
            sub_batches: limits.sub_batches,
            sequences: limits.sequences,
            capacity: PageCapacity { device_pages: limits.device_pages, host_pages: limits.host_pages },
            targets: tandem::sched::Targets::NONE,
            most_answer: None,
            learns_lengths: true,
        };
        let report =
            sim::simulate(&arrivals, &mut *by_name(name).unwrap(), &predict(), &options, &mut |_| ());
        results.push((done, report.unwrap()));
    }
    results
}

/// Six layers of 0.44 MB, whose tokens take 256 bytes each in a layer.
fn small() -> LoadedModel {
    let mut file = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
    let config = r#"{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 64, "intermediate_size": 1024, "vocab_size": 256,
        "max_position_embeddings": 512, "rope_theta": 10000.0, "rms_norm_eps": 1e-05, "hidden_act": "silu",
        "tie_word_embeddings": false}"#;
    file.write_all(config.as_bytes()).unwrap();
    load(&format!("synth:{}", file.path().display())).unwrap()
}

const STRATEGIES: [&str; 5] = ["gpu-only", "fastdecode", "neo", "apex", "auto"];

/// Throughputs, and gains over gpu-only, agree within a tenth; returns the gains that were executed.
fn agree(m: &LoadedModel, machine: &Machine, work: &Work) -> Vec<f64> {
    let results = both(m, machine, work, &STRATEGIES);
    let mut wrong = Vec::new();
    let base = (results[0].0.rate(), results[0].1.throughput_tok_s);
    let mut gains = Vec::new();
    for (name, (done, report)) in STRATEGIES.iter().zip(&results) {
        let rates = (done.rate(), report.throughput_tok_s);
        let gain = (rates.0 / base.0, rates.1 / base.1);
        let off = [rates.1 / rates.0 - 1.0, gain.1 / gain.0 - 1.0];
        let line = format!(
            "{:14} {name:10} executed {:8.0} tok/s {:5.2}x ({} steps: {:?}), simulated {:8.0} tok/s {:5.2}x ({}: {:?}), \
             {:+.1}%, gain {:+.1}%",
            machine.name,
            rates.0,
            gain.0,
            done.iterations,
            done.flows,
            rates.1,
            gain.1,
            report.iterations,
            report.flows,
            100.0 * off[0],
            100.0 * off[1]
        );
        println!("{line}");
        if off.iter().any(|off| off.is_nan() || off.abs() > 0.1) {
            wrong.push(line);
        }
        gains.push(gain.0);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    gains
}

/// Long answers, whose keys and values do not fit the device.
const DECODE: Work =
    Work { requests: 16, input: (20, 50), output: (30, 70), device_pages: 9, host_pages: 64, rows: 128 };

#[test]
fn gains_in_simulation_are_those_executed() {
    let m = small();
    for name in ["t4-xeon", "a10-xeon"] {
        let gains = agree(&m, &Machine::slower(name, 400.0), &DECODE);
        let most = gains.iter().fold(0.0f64, |a, &b| a.max(b));
        assert!(most > 1.2, "{name}: there is something to gain: {gains:?}");
    }
}

/// Steps of microseconds, which latencies of the link make longer than anything else.
#[test]
fn losses_in_simulation_are_those_executed() {
    agree(&small(), &Machine::named("t4-xeon"), &DECODE);
}

#[test]
fn long_prompts_take_what_is_simulated() {
    let work = Work { input: (60, 120), output: (6, 16), device_pages: 14, ..DECODE };
    agree(&small(), &Machine::slower("t4-xeon", 400.0), &work);
}
