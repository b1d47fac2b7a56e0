//! Many requests over a layer split, in emulated time: weights that do not fit the device beside keys and values that do not.

use tandem::engine::{Batcher, Event, Finish, Request};
use tandem::plan::{Predictor, experts_on_host};
use tandem::program::{MoveRequest, RequestId, Wants};
use tandem::sched::{Targets, by_name};
use tandem::sim::{self, PageCapacity};
use tandem::simd::linear::Mode;
use tandem::text::SamplerParams;
use tandem::workload::Arrival;

use super::*;

const LAYERS: usize = 12;
const REQUESTS: usize = 24;
/// Tokens of a prompt and of an answer: three pages with room to spare.
const TOKENS: (usize, usize) = (40, 48);

/// What a strategy made of the requests: tokens a second, steps by flow, and every answer.
struct Served {
    rate: f64,
    steps: [usize; 3],
    answers: Vec<Vec<u32>>,
}

/// A model that is placed so, with so many pages on the device.
fn serve(m: &LoadedModel, machine: &str, placement: &Placement, pages: usize, strategy: &str) -> Served {
    let kind: Kind = format!("emulated:{machine}").parse().unwrap();
    let accel = device::open(&kind, Some(1 << 30)).unwrap();
    let placement = placement.clone();
    let o = Options {
        mode: Mode::Deterministic,
        sequences: REQUESTS,
        logits: REQUESTS,
        chunk: 64,
        sub_batches: 2,
        kv_pages: Some(pages),
        far_pages: Some(4 * REQUESTS),
        ..options(128)
    };
    let priced = Placement { device_pages: pages, host_pages: 4 * REQUESTS, ..placement.clone() };
    let e = Engine::placed(m.spec.clone(), &m.weights, &o, accel, machine, "test", placement, &|_| ());
    let h = hardware::parse(machine, &std::fs::read_to_string(machine).unwrap()).unwrap();
    let sizes = PlanSizes::of_weights(&m.spec, &m.weights, Isa::selected().unwrap());
    let costs = Predictor::new(h, sizes, priced);
    let mut all = Batcher::with(e.unwrap(), by_name(strategy).unwrap(), Box::new(costs));
    let prompt = |i: usize| (0..TOKENS.0).map(|t| ((t * t * 31 + t * 7 + 11 * i) % 250) as u32).collect();
    let sent: Vec<_> = (0..REQUESTS)
        .map(|i| {
            let sampling = SamplerParams { temperature: 0.0, ..Default::default() };
            let request = Request { prompt: prompt(i), sampling, max_tokens: TOKENS.1, ..Request::default() };
            all.submit(request).unwrap().1
        })
        .collect();
    let (mut steps, mut rounds) = ([0; 3], 0);
    while !all.is_idle() {
        rounds += 1;
        assert!(rounds < 20_000, "{strategy}: no end");
        if let Some(flow) = all.step().flow {
            steps[flow as usize] += 1;
        }
    }
    let seconds = all.engine().emulated_seconds().unwrap();
    let answer = |events: std::sync::mpsc::Receiver<Event>| {
        let mut tokens = Vec::new();
        for event in events.try_iter() {
            match event {
                Event::Token(token) => tokens.push(token.id),
                Event::Cached(_) | Event::Prompt(_) => {}
                Event::End(how) => assert_eq!(how, Finish::Length),
            }
        }
        tokens
    };
    let answers = sent.into_iter().map(answer).collect();
    Served { rate: (REQUESTS * TOKENS.1) as f64 / seconds, steps, answers }
}

/// A GPU of 40 GB/s and a CPU of so many bytes a second, on a link between.
fn machine(folder: &tempfile::TempDir, cpu: f64) -> String {
    let text = format!(
        "[cpu]\ncores = 8\ndram_bytes = 64e9\nread_bw = {cpu:e}\nflops_bf16 = 1e12\nllc_bytes = 24e6\n\
         [gpu]\nmem_bytes = 8e9\nbw = 40e9\nflops_bf16 = 20e12\n\
         [link]\nh2d_bw = 12e9\nd2h_bw = 12e9\nlatency_s = 1e-7\n"
    );
    let file = folder.path().join(format!("split-{cpu:e}.toml"));
    std::fs::write(&file, text).unwrap();
    file.to_str().unwrap().to_string()
}

/// Prints throughput by strategy: `cargo test --release --test plan -- --nocapture over_a_layer_split`.
#[test]
fn strategies_over_a_layer_split_give_the_same_tokens_at_different_speeds() {
    let m = load(&format!("synth:tiny-llama,dtype=f32,seed=2,layers={LAYERS}")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    println!(
        "{:>9} {:>6} {:>6}  {:11} {:>8} {:>6}  steps (one after the other, lock step, asynchronous)",
        "CPU", "blocks", "pages", "strategy", "tok/s", "gain"
    );
    let mut answers: Option<Vec<Vec<u32>>> = None;
    for (cpu, k, pages) in [(8e9, 0, 12), (8e9, 3, 12), (8e9, 6, 12), (16e9, 3, 12)] {
        let machine = machine(&folder, cpu);
        let mut alone = None;
        for strategy in ["gpu-only", "neo", "apex", "auto"] {
            let placement = Placement::boundary(k, LAYERS, 0, 0);
            let Served { rate, steps, answers: got } = serve(&m, &machine, &placement, pages, strategy);
            let base = *alone.get_or_insert(rate);
            let blocks = k.saturating_sub(1);
            println!(
                "{:>4.0} GB/s {blocks:>6} {pages:>6}  {strategy:11} {rate:8.0} {:5.2}x  {steps:?}",
                cpu / 1e9,
                rate / base
            );
            let want = answers.get_or_insert_with(|| got.clone());
            assert!(got == *want, "{strategy}, {blocks} blocks on the host: other tokens");
            if strategy == "apex" && k > 0 {
                assert!(steps[Flow::Async as usize] > 0 || steps[Flow::TwoLanes as usize] > 0, "{steps:?}");
            }
        }
    }
}

/// Requests on either side of a mixture of which some experts, or all, are on the host: in place, and copied for prompts. Every scheduler gives
/// the same tokens, and a simulation says how fast.
#[test]
fn schedules_over_experts_on_the_host_give_the_same_tokens() {
    let n = 4;
    let m = load(&format!("synth:tiny-qwen3-moe,dtype=bf16,seed=2,layers={n}")).unwrap();
    let sizes = PlanSizes::of_weights(&m.spec, &m.weights, Isa::selected().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let machine = machine(&folder, 16e9);
    let h = hardware::parse(&machine, &std::fs::read_to_string(&machine).unwrap()).unwrap();
    // All prompts of some size on the device, those of others on the host.
    let mut streamed = experts_on_host(&sizes, n);
    for at in &mut streamed.layers {
        (at.weights, at.prefill) = (Residence::StreamedExperts, Policy::all(Side::Device));
    }
    streamed.stream_rows = 41;
    let places = [
        ("none", Placement::all(Side::Device, n, 0)),
        ("of 2 blocks", experts_on_host(&sizes, 2)),
        ("all", experts_on_host(&sizes, n)),
        ("all, copied for prompts", streamed),
    ];
    let mut answers: Option<Vec<Vec<u32>>> = None;
    for (what, placement) in &places {
        for (strategy, pages) in
            [("gpu-only", 12), ("neo", 12), ("apex", 12), ("fastdecode", 12), ("auto", 24)]
        {
            let Served { rate, steps, answers: got } = serve(&m, &machine, placement, pages, strategy);
            let want = answers.get_or_insert_with(|| got.clone());
            assert!(got == *want, "{strategy}, experts on the host {what}: other tokens");
            let options = sim::Options {
                rows: 64,
                sub_batches: 2,
                sequences: REQUESTS as u32,
                capacity: PageCapacity { device_pages: pages, host_pages: 4 * REQUESTS },
                targets: Targets::NONE,
                most_answer: None,
                learns_lengths: true,
            };
            let priced = Placement { device_pages: pages, host_pages: 4 * REQUESTS, ..placement.clone() };
            let predictor = Predictor::new(h.clone(), sizes.clone(), priced);
            let arrivals = [Arrival { at: 0.0, input: TOKENS.0 as u32, output: TOKENS.1 as u32 }; REQUESTS];
            let mut scheduler = by_name(strategy).unwrap();
            let report =
                sim::simulate(&arrivals, &mut *scheduler, &predictor, &options, &mut |_| ()).unwrap();
            println!(
                "{what:>24}  {strategy:11} {rate:8.0} tok/s {steps:?}, simulated {:8.0} {:?}",
                report.throughput_tok_s, report.flows
            );
            // Steps of one flow are priced as they run; what two lanes gain is told, not held.
            let off = rate / report.throughput_tok_s - 1.0;
            assert!(strategy != "gpu-only" || off.abs() < 0.02, "{what}: {:+.1}%", 100.0 * off);
        }
    }
}

/// A long request among short ones, with none, some or all of its keys and values away from the device: the tokens of all are the
/// same, and attending on both sides is faster than on the host alone. Prints the time of a step:
/// `cargo test --release --test plan -- --nocapture a_long_request`.
#[test]
fn a_long_request_within_a_batch_is_attended_on_both_sides() {
    const LONG: usize = 28;
    let m = load("synth:tiny-llama,dtype=f32,seed=2,layers=4,ctx=1024").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let machine = machine(&folder, 8e9);
    let kind: Kind = format!("emulated:{machine}").parse().unwrap();
    let step = |far: Far, place: &dyn Fn(&mut Engine, RequestId)| {
        let accel = device::open(&kind, Some(1 << 30)).unwrap();
        let o = Options {
            mode: Mode::Deterministic,
            sequences: 7,
            chunk: 128,
            kv_pages: Some(LONG + 24),
            far_pages: Some(LONG + 4),
            far: Some(far),
            ..options(1024)
        };
        let placement = Placement::all(Side::Device, m.spec.n_layers, 0);
        let e = Engine::placed(m.spec.clone(), &m.weights, &o, accel, &machine, "test", placement, &|_| ());
        let mut e = e.unwrap();
        let prompt = |n: usize| -> Vec<u32> { (0..n as u32).map(|t| t * t * 31 % 250).collect() };
        let seqs: Vec<RequestId> = (0..7).map(|_| e.add_at(Side::Device).unwrap()).collect();
        for (i, &seq) in seqs.iter().enumerate() {
            let tokens = prompt(if i == 0 { 32 * LONG } else { 40 + i });
            for chunk in tokens.chunks(128) {
                e.forward(&[NewTokens { id: seq, tokens: chunk, wants: Wants::Last }]).unwrap();
            }
        }
        place(&mut e, seqs[0]);
        let inputs: Vec<_> =
            seqs.iter().map(|&seq| NewTokens { id: seq, tokens: &[7], wants: Wants::Last }).collect();
        let (mut seconds, mut tokens) = (0.0, Vec::new());
        for _ in 0..5 {
            let from = e.emulated_seconds().unwrap();
            tokens.extend(e.forward_greedy(&inputs).unwrap());
            seconds = e.emulated_seconds().unwrap() - from;
        }
        (1e6 * seconds, tokens)
    };
    let (device, want) = step(Far::Attend, &|_, _| ());
    let (host, got) = step(Far::Attend, &|e, id| e.swap(id, Side::Host).unwrap());
    assert_eq!(got, want);
    println!("on the device {device:.0} us, on the host {host:.0} us");
    let mut best = f64::INFINITY;
    for pages in [4, 8, 14, 20, 26] {
        let [attend, stream] = [Far::Attend, Far::Stream].map(|far| {
            let part = |request| MoveRequest { request, to: Side::Host, pages: 0..pages };
            let (seconds, got) = step(far, &|e, id| e.move_part(&part(id)).unwrap());
            assert_eq!(got, want, "{pages} pages on the host, {far:?}");
            seconds
        });
        println!("{pages:>2} of {LONG} pages on the host: attended {attend:.0} us, streamed {stream:.0} us");
        best = best.min(attend);
        assert!(attend < host, "{attend} us, all on the host {host} us");
    }
    assert!(best < 0.9 * host);
}
