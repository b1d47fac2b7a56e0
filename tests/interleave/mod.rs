//! Any interleaving of arrivals, cancellations, steps, swaps and faults over a tiny model: each request's tokens are those of
//! running alone, no page is lost, every request is in one queue, and something moves on in every step.
//!
//! A run is a [`Script`], which a seed makes: the tests and the soak share it, and a failure is run again by its seed.

#![allow(dead_code)] // tests and the soak each use a part of it

mod anything;
mod costs;
mod random;
mod script;
mod seen;
mod watchdog;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use tandem::device::accelerator::Accelerator;
use tandem::device::emulated::{EmulatedAccelerator, EmulatedOptions, EmulatedRuntime, FaultPlan};
use tandem::engine::{Engine, Event, Finish, Input, Logits, Options, Request, Requests};
use tandem::model::{LoadedModel, load};
use tandem::program::{Placement, RequestId, Side};
use tandem::sched::{Continuous, Strategy, by_name};
use tandem::simd::Isa;
use tandem::simd::linear::Mode;
use tandem::text::{Sampler, SamplerParams};

pub use anything::Anything;
pub use costs::Costs;
pub use script::{Act, Fault, Script, Setup};
pub use seen::{Counted, Counts};
pub use watchdog::Watchdog;

/// Longest sequence: three pages.
pub const CONTEXT: usize = 96;

/// Different requests; what each answers alone is computed once.
const KINDS: usize = 24;

/// A tokens and how they ended.
type Answer = (Vec<u32>, Finish);

/// What runs have in common.
pub struct World {
    model: LoadedModel,
    requests: Vec<Request>,
    answers: Vec<Answer>,
    /// Engines of earlier runs.
    engines: HashMap<Setup, (Arc<EmulatedRuntime>, Engine)>,
    /// What strategies have decided.
    pub counts: Arc<Counts>,
}

/// What runs did, in all.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tally {
    pub scripts: usize,
    pub steps: usize,
    pub tokens: usize,
    pub swaps: usize,
    pub cancelled: usize,
    pub failed: usize,
    pub finished: usize,
}

impl Tally {
    pub fn add(&mut self, other: &Tally) {
        self.scripts += other.scripts;
        self.steps += other.steps;
        self.tokens += other.tokens;
        self.swaps += other.swaps;
        self.cancelled += other.cancelled;
        self.failed += other.failed;
        self.finished += other.finished;
    }
}

fn request(i: usize, vocab: usize) -> Request {
    let sampling = SamplerParams {
        temperature: if i.is_multiple_of(3) { 0.0 } else { 0.9 },
        top_k: 20,
        repeat_penalty: if i % 4 == 1 { 1.2 } else { 1.0 },
        seed: i as u64,
        ..Default::default()
    };
    let n = [3, 33, 1, 17, 60, 32, 8, 45][i % 8];
    let prompt = (0..n).map(|t| ((t * t * 31 + t * 7 + i * 13) % vocab) as u32).collect();
    Request { prompt, sampling, max_tokens: [6, 2, 12, 1, 40][i % 5], stop: vec![(i * 7 % vocab) as u32] }
}

/// Prefill, then a token at a time, by hand.
fn alone(engine: &mut Engine, r: &Request) -> Answer {
    let seq = engine.add();
    let mut sampler = Sampler::new(r.sampling.clone()).expect("it makes sense");
    let mut history = r.prompt.clone();
    let mut logits = engine.prefill(seq, &r.prompt, |_| ()).expect("it fits");
    let mut answer = Vec::new();
    let finish = loop {
        let token = sampler.sample(&mut logits, &history);
        answer.push(token);
        history.push(token);
        if r.stop.contains(&token) {
            break Finish::Stop;
        }
        if answer.len() == r.max_tokens || engine.len(seq) == engine.context() {
            break Finish::Length;
        }
        logits = engine
            .forward(&[Input { seq, tokens: &[token], logits: Logits::Last }])
            .expect("it fits")
            .to_vec();
    };
    engine.remove(seq);
    (answer, finish)
}

/// A request in a run.
struct Sent {
    kind: usize,
    id: RequestId,
    events: Receiver<Event>,
    cancelled: bool,
    tokens: Vec<u32>,
    end: Option<Finish>,
}

impl Sent {
    fn listen(&mut self) -> Result<(), String> {
        for event in self.events.try_iter() {
            match event {
                _ if self.end.is_some() => return Err(format!("{event:?} behind the end of {:?}", self.id)),
                Event::Token(t) => self.tokens.push(t),
                Event::End(how) => self.end = Some(how),
            }
        }
        Ok(())
    }
}

impl World {
    pub fn new() -> World {
        let spec = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/micro.json");
        let model = load(&format!("synth:{spec},dtype=f32,seed=5")).expect("a model");
        let requests: Vec<Request> = (0..KINDS).map(|i| request(i, model.spec.vocab)).collect();
        let (_, mut lone) = engine(&model, &Setup::alone());
        let answers = requests.iter().map(|r| alone(&mut lone, r)).collect();
        World { model, requests, answers, engines: HashMap::new(), counts: Arc::default() }
    }

    /// Runs a script to its end.
    ///
    /// # Errors
    /// What went wrong.
    pub fn run(&mut self, script: &Script) -> Result<Tally, String> {
        let (runtime, engine) =
            self.engines.remove(&script.setup).unwrap_or_else(|| engine(&self.model, &script.setup));
        let pages = |e: &Engine| [Side::Device, Side::Host].map(|side| e.kv_pages(side).free);
        let all_pages = pages(&engine);
        let inner = strategy(&script.strategy, script.seed, script.setup.on_host == 0);
        let counted = Counted { inner, counts: self.counts.clone() };
        let mut all = Requests::with(engine, Box::new(counted), Box::new(Costs::of(script.seed)));
        let mut sent: Vec<Sent> = Vec::new();
        let mut tally = Tally { scripts: 1, ..Tally::default() };
        let (mut lost, mut transient) = (false, false);
        let drain = std::iter::repeat_n(&Act::Step, 20_000);
        for (n, act) in script.acts.iter().chain(drain).enumerate() {
            match act {
                Act::Submit(kind) => {
                    let (id, events) =
                        all.submit(self.requests[*kind % KINDS].clone()).map_err(|e| e.to_string())?;
                    if sent.iter().any(|s| s.id == id) {
                        return Err(format!("{id:?} is given out twice"));
                    }
                    let (tokens, end) = (Vec::new(), None);
                    sent.push(Sent { kind: *kind % KINDS, id, events, cancelled: false, tokens, end });
                }
                Act::Cancel(which) if !sent.is_empty() => {
                    let at = which % sent.len();
                    sent[at].cancelled |= all.cancel(sent[at].id);
                }
                Act::Cancel(_) => {}
                Act::Fault(fault) => {
                    lost |= matches!(fault, Fault::Lost(_));
                    transient = true;
                    runtime.set_faults(match *fault {
                        Fault::Refused(n) => FaultPlan { refuse_launch: Some(n), ..FaultPlan::default() },
                        Fault::Lost(n) => FaultPlan { lost_at: Some(n), ..FaultPlan::default() },
                    });
                }
                Act::Step if all.is_idle() && n >= script.acts.len() => break,
                Act::Step => {
                    let (waiting, running) = all.load();
                    let report = all.step();
                    tally.steps += 1;
                    tally.tokens += report.tokens;
                    tally.swaps += report.swapped;
                    let moved = report.rows + report.admitted + report.swapped + report.failed;
                    if moved == 0 && waiting + running > 0 && !transient {
                        return Err(format!("step {n}: no progress of {waiting} and {running} requests"));
                    }
                }
            }
            for s in &mut sent {
                s.listen()?;
            }
            let (waiting, running) = all.load();
            let live = sent.iter().filter(|s| s.end.is_none()).count();
            if waiting + running != live {
                return Err(format!("act {n}: {live} requests live, {waiting} wait and {running} run"));
            }
            check_pages(&all, all_pages).map_err(|e| format!("act {n}: {e}"))?;
        }
        if !all.is_idle() {
            return Err(format!("{:?} requests are left after {} steps", all.load(), tally.steps));
        }
        runtime.set_faults(FaultPlan::default());
        for s in &sent {
            self.check(s, lost, transient)
                .map_err(|e| format!("request {:?} of kind {}: {e}", s.id, s.kind))?;
            match s.end {
                Some(Finish::Cancelled) => tally.cancelled += 1,
                Some(Finish::Failed(_)) => tally.failed += 1,
                _ => tally.finished += 1,
            }
        }
        let engine = all.into_engine();
        if pages(&engine) != all_pages {
            return Err(format!("{:?} of {all_pages:?} pages are free in the end", pages(&engine)));
        }
        if !lost {
            self.engines.insert(script.setup.clone(), (runtime, engine));
        }
        Ok(tally)
    }

    fn check(&self, s: &Sent, lost: bool, transient: bool) -> Result<(), String> {
        let (tokens, finish) = &self.answers[s.kind];
        let whole = match s.end.as_ref().expect("all have ended") {
            Finish::Cancelled if s.cancelled => false,
            Finish::Failed(why) if transient && (lost || why.contains("refused")) => false,
            how if how == finish => true,
            how => {
                return Err(format!("it ended by {how:?}, alone by {finish:?}: {:?}, {tokens:?}", s.tokens));
            }
        };
        let n = if whole { tokens.len() } else { s.tokens.len() };
        if tokens.get(..n) != Some(&s.tokens[..]) {
            return Err(format!("its tokens are {:?}, alone they are {tokens:?}", s.tokens));
        }
        Ok(())
    }
}

/// Every page is free or holds tokens of one running request.
fn check_pages(all: &Requests, pages: [usize; 2]) -> Result<(), String> {
    // A row that is parked has room already.
    let held: usize = all.queues().running().iter().map(|j| j.pages_with(u32::from(j.at.is_some()))).sum();
    let free: usize = [Side::Device, Side::Host].iter().map(|&side| all.engine().kv_pages(side).free).sum();
    match held + free == pages[0] + pages[1] {
        true => Ok(()),
        false => Err(format!("{held} pages are held and {free} are free, of {pages:?}")),
    }
}

fn engine(m: &LoadedModel, setup: &Setup) -> (Arc<EmulatedRuntime>, Engine) {
    let o = EmulatedOptions { jitter: setup.jitter, ..EmulatedOptions::default() };
    let runtime = Arc::new(EmulatedRuntime::new(o).expect("it starts"));
    let accel: Arc<dyn Accelerator> = Arc::new(EmulatedAccelerator::new(runtime.clone()));
    let options = Options {
        sequences: setup.sequences,
        logits: setup.sequences,
        chunk: setup.rows,
        threads: Some(1),
        mode: Mode::Deterministic,
        kv_pages: Some(setup.device_pages),
        far_pages: (setup.far_pages > 0).then_some(setup.far_pages),
        far: Some(setup.far),
        sub_batches: setup.sub_batches,
        ..Options::new(Isa::best(), CONTEXT)
    };
    let n = m.spec.n_layers;
    let placement = match setup.on_host {
        0 => Placement::all(Side::Device, n, 0),
        k => Placement::boundary(k, n, 0, 0),
    };
    let engine =
        Engine::placed(m.spec.clone(), &m.weights, &options, accel, "emulated", "test", placement, &|_| ());
    (runtime, engine.expect("it fits"))
}

fn strategy(name: &str, seed: u64, overlaps: bool) -> Box<dyn Strategy> {
    match name {
        "anything" => Box::new(Anything::new(seed, overlaps)),
        "continuous" => Box::new(Continuous::default()),
        name => by_name(name).unwrap_or_else(|| panic!("strategy {name} is not known")),
    }
}

/// The strategies that scripts draw from.
pub const STRATEGIES: [&str; 7] = ["anything", "continuous", "gpu-only", "fastdecode", "neo", "apex", "auto"];
