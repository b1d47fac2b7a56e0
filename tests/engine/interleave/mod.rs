//! Any interleaving of arrivals, cancellations, steps, swaps and faults over a tiny model: each request's tokens are those of
//! running alone, no page is lost, every request is in one queue, and something moves on in every step.
//!
//! A run is a [`Script`], which a seed makes: the tests and the soak share it. Lanes have threads, so that orders come by chance, or
//! act in turn in an order that the seed makes, too ([`Lanes`]): a hundred times as many runs in the same time, and a failure is run
//! again, event by event, by its seed.

#![allow(dead_code)] // tests and the soak each use a part of it

mod anything;
mod costs;
mod given;
mod many;
mod random;
mod script;
mod seen;
mod watchdog;

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use tandem::device::emulated::{
    EmulatedAccelerator, EmulatedOptions, EmulatedRuntime, FaultPlan, KernelChecks,
};
use tandem::device::{Accelerator, Runtime};
use tandem::engine::{Batcher, Engine, Event, Finish, NewTokens, Options, Request};
use tandem::model::{LoadedModel, ModelSpec, load};
use tandem::program::{LayerPlacement, Placement, Policy, RequestId, Residence, Side, Wants};
use tandem::sched::{Continuous, Strategy, by_name};
use tandem::simd::Isa;
use tandem::simd::linear::Mode;
use tandem::text::{Ending, Sampler, SamplerParams};

use random::Random;

pub use anything::Anything;
pub use costs::Costs;
pub use given::Given;
pub use many::{many, shortest};
pub use script::{Act, BATCH, Fault, Lanes, Script, Setup};
pub use seen::{Counted, Counts};
pub use watchdog::Watchdog;

/// Longest sequence: three pages.
pub const CONTEXT: usize = 96;

/// How long work of a lane may take.
const PATIENCE: Duration = Duration::from_secs(600);

/// Different requests; what each answers alone is computed once.
const KINDS: usize = 24;

/// A tokens and how they ended.
type Answer = (Vec<u32>, Finish);

/// What runs have in common.
pub struct World {
    /// Without windows, and with.
    models: [LoadedModel; 2],
    requests: Vec<Request>,
    /// Of each model, each request's.
    answers: [Vec<Answer>; 2],
    /// Engines of earlier runs, and the devices that are told to fail.
    engines: HashMap<Setup, (Option<Arc<EmulatedRuntime>>, Engine)>,
    /// An accelerator in place of emulated ones.
    given: Option<Given>,
    /// The batch that an engine whose lanes act in turn is at.
    batch: Option<u64>,
    /// Every so-many-th wait of a lane is forgotten: what scripts are to find.
    pub forget_waits: Option<u64>,
    /// Why requests of the last script failed.
    pub reasons: Vec<String>,
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
    /// Things that lanes did in turn.
    pub turns: u64,
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
        self.turns += other.turns;
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
    Request {
        prompt,
        sampling,
        max_tokens: [6, 2, 9, 1, 14][i % 5],
        ending: Ending::at(vec![(i * 7 % vocab) as u32]),
        ..Request::default()
    }
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
        if r.ending.tokens.contains(&token) {
            break Finish::Stop;
        }
        if answer.len() == r.max_tokens || engine.len(seq) == engine.context() {
            break Finish::Length;
        }
        logits = engine
            .forward(&[NewTokens { id: seq, tokens: &[token], wants: Wants::Last }])
            .expect("it fits")
            .to_vec();
    };
    engine.remove(seq);
    (answer, finish)
}

/// Requests that are refused at once.
fn bad(which: usize, r: &Request, all: &Batcher) -> Request {
    let mut bad = r.clone();
    match which {
        0 => bad.prompt.clear(),
        1 => bad.sampling.top_p = 2.0,
        2 => bad.prompt = vec![1; all.engine().context() + 1],
        _ => bad.prompt[0] = u32::MAX,
    }
    bad
}

/// A request in a run.
struct Sent {
    kind: usize,
    id: RequestId,
    /// `None`: whoever asked has gone away.
    events: Option<Receiver<Event>>,
    cancelled: bool,
    tokens: Vec<u32>,
    end: Option<Finish>,
}

impl Sent {
    fn listen(&mut self) -> Result<(), String> {
        for event in self.events.iter().flat_map(Receiver::try_iter) {
            match event {
                _ if self.end.is_some() => return Err(format!("{event:?} behind the end of {:?}", self.id)),
                Event::Token(t) => self.tokens.push(t.id),
                Event::Cached(_) | Event::Prompt(_) => {}
                Event::End(how) => self.end = Some(how),
            }
        }
        Ok(())
    }
}

impl World {
    pub fn new() -> World {
        without_noise();
        let models = ["micro", "micro_windows"].map(|name| {
            let spec = format!("{}/tests/fixtures/{name}.json", env!("CARGO_MANIFEST_DIR"));
            load(&format!("synth:{spec},dtype=f32,seed=5")).expect("a model")
        });
        let requests: Vec<Request> = (0..KINDS).map(|i| request(i, models[0].spec.vocab)).collect();
        let answers = [false, true].map(|windows| {
            let (_, mut lone) = engine(&models[usize::from(windows)], &Setup::alone(windows), PATIENCE);
            requests.iter().map(|r| alone(&mut lone, r)).collect()
        });
        World {
            models,
            requests,
            answers,
            engines: HashMap::new(),
            given: None,
            batch: None,
            forget_waits: None,
            reasons: Vec::new(),
            counts: Arc::default(),
        }
    }

    /// An engine for a script. Lanes that act in turn belong to the scripts of a batch.
    fn engine(&mut self, script: &Script) -> (Option<Arc<EmulatedRuntime>>, Engine) {
        let batch = (script.setup.lanes == Lanes::InTurn).then_some(script.seed / BATCH);
        if batch != self.batch {
            self.engines.clear();
        }
        self.batch = batch;
        let model = &self.models[usize::from(script.setup.windows)];
        let found = self.engines.remove(&script.setup);
        let (runtime, engine) = found.unwrap_or_else(|| match &self.given {
            Some(given) => (None, on(model, &script.setup, given.accel.clone(), Mode::Fast)),
            None => {
                let (runtime, engine) = engine(model, &script.setup, PATIENCE);
                (Some(runtime), engine)
            }
        });
        if let Some(turns) = runtime.as_ref().and_then(|r| r.turns()) {
            turns.begin(script.seed);
        }
        (runtime, engine)
    }

    /// An engine of its own, whose device is taken for lost when work has not ended after `watchdog`.
    pub fn engine_with(&self, setup: &Setup, watchdog: Duration) -> (Arc<EmulatedRuntime>, Engine) {
        engine(&self.models[usize::from(setup.windows)], setup, watchdog)
    }

    /// One of the different requests.
    pub fn request(&self, i: usize) -> Request {
        self.requests[i % KINDS].clone()
    }

    /// The script of this seed on lanes that act in turn, behind those that the engine ran before it.
    ///
    /// # Errors
    /// What went wrong.
    pub fn replay(&mut self, seed: u64, strategies: &[&str], most: usize) -> Result<Tally, String> {
        self.batch = None;
        for before in seed / BATCH * BATCH..seed {
            self.run(&Script::in_turn(before, strategies, usize::MAX))
                .map_err(|e| format!("seed {before}, which comes before it: {e}"))?;
        }
        self.run(&Script::in_turn(seed, strategies, most))
    }

    /// As [`World::run`]; a panic is an error.
    pub fn run_caught(&mut self, script: &Script) -> Result<Tally, String> {
        caught(|| self.run(script))
    }

    /// As [`World::replay`]; a panic is an error.
    pub fn replay_caught(&mut self, seed: u64, strategies: &[&str], most: usize) -> Result<Tally, String> {
        caught(|| self.replay(seed, strategies, most))
    }

    /// Runs a script to its end.
    ///
    /// # Errors
    /// What went wrong.
    pub fn run(&mut self, script: &Script) -> Result<Tally, String> {
        let (runtime, engine) = self.engine(script);
        self.reasons.clear();
        let set_faults = |plan| {
            if let Some(runtime) = &runtime {
                runtime.set_faults(plan);
            }
        };
        set_faults(FaultPlan { forget_waits: self.forget_waits, ..FaultPlan::default() });
        let pages = |e: &Engine| [Side::Device, Side::Host].map(|side| e.kv_pages(side).free);
        let all_pages = pages(&engine);
        let inner = strategy(&script.strategy, script.seed);
        let (counts, random) = (self.counts.clone(), Random(script.seed ^ 0x0b5e));
        let counted = Counted { inner, counts, random, placement: placed(&script.setup, engine.spec()) };
        let mut all = Batcher::with(engine, Box::new(counted), Box::new(Costs::of(script.seed)));
        // A strategy that never saw a request says the same.
        let most_pages = strategy(&script.strategy, script.seed).most_pages(all.limits());
        let mut sent: Vec<Sent> = Vec::new();
        let mut tally = Tally { scripts: 1, ..Tally::default() };
        let mut transient = false;
        let drain = std::iter::repeat_n(&Act::Step, 20_000);
        for (n, act) in script.acts.iter().chain(drain).enumerate() {
            match act {
                Act::Submit(_) | Act::Burst(_) => {
                    let (first, n) = match *act {
                        Act::Burst(n) => (n, n),
                        Act::Submit(kind) => (kind, 1),
                        _ => unreachable!(),
                    };
                    for kind in (first..first + n).map(|k| k % KINDS) {
                        let request = self.requests[kind].clone();
                        let most = (request.prompt.len() + request.max_tokens - 1).min(CONTEXT);
                        let too_long = most.div_ceil(32) > most_pages;
                        let (id, events) = match all.submit(request) {
                            Err(error) if too_long && error.to_string().contains("pages") => continue,
                            done if too_long => {
                                return Err(format!("{most} tokens, longer than its memory: {done:?}"));
                            }
                            done => done.map_err(|e| e.to_string())?,
                        };
                        if sent.iter().any(|s| s.id == id) {
                            return Err(format!("{id:?} is given out twice"));
                        }
                        let (tokens, end, events) = (Vec::new(), None, Some(events));
                        sent.push(Sent { kind, id, events, cancelled: false, tokens, end });
                    }
                }
                Act::Bad(which) => {
                    let bad = bad(*which, &self.requests[0], &all);
                    if all.submit(bad.clone()).is_ok() {
                        return Err(format!("{bad:?} is accepted"));
                    }
                }
                Act::Leave(which) if !sent.is_empty() => {
                    let at = which % sent.len();
                    sent[at].events = None;
                }
                Act::Leave(_) => {}
                Act::Cancel(which) if !sent.is_empty() => {
                    // Somebody who is parked, somebody who lives, or anybody, late too.
                    let parked =
                        |s: &Sent| all.queues().running().iter().any(|j| j.id == s.id && j.at.is_some());
                    let lives = |s: &Sent| s.end.is_none();
                    let of: &dyn Fn(&Sent) -> bool = match which % 4 {
                        0 => &parked,
                        3 => &|_| true,
                        _ => &lives,
                    };
                    let may: Vec<usize> = (0..sent.len()).filter(|&i| of(&sent[i])).collect();
                    let Some(&at) = may.get(which / 4 % may.len().max(1)) else { continue };
                    self.counts.cancels(sent[at].id, all.queues());
                    sent[at].cancelled |= all.cancel(sent[at].id);
                }
                Act::Cancel(_) => {}
                // What is given does not fail.
                Act::Fault(_) if runtime.is_none() => {}
                Act::Fault(fault) => {
                    transient = true;
                    let none = FaultPlan { forget_waits: self.forget_waits, ..FaultPlan::default() };
                    set_faults(match *fault {
                        Fault::Refused(n) => FaultPlan { refuse_launch: Some(n), ..none },
                        Fault::Panic(n) => FaultPlan { panic_host: Some(n), ..none },
                        Fault::Lost(n) => FaultPlan { lost_at: Some(n), ..none },
                        Fault::Endless(n) => FaultPlan { endless_copy: Some(n), ..none },
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
            // Nobody is told how a request ended that nobody listens to.
            let live = sent.iter().filter(|s| s.end.is_none() && s.events.is_some()).count();
            let alone = sent.iter().filter(|s| s.end.is_none() && s.events.is_none()).count();
            if !(live..=live + alone).contains(&(waiting + running)) {
                return Err(format!("act {n}: {live} requests live, {waiting} wait and {running} run"));
            }
            check_pages(&all, all_pages).map_err(|e| format!("act {n}: {e}"))?;
        }
        if !all.is_idle() {
            return Err(format!("{:?} requests are left after {} steps", all.load(), tally.steps));
        }
        // A device that is lost says so at each call.
        let lost = (0..2).all(|_| all.engine().check_device().is_err());
        set_faults(FaultPlan::default());
        tally.turns = runtime.as_ref().and_then(|r| r.turns()).map_or(0, |turns| turns.taken());
        for s in &sent {
            self.check(s, script.setup.windows, lost, transient)
                .map_err(|e| format!("request {:?} of kind {}: {e}", s.id, s.kind))?;
            match &s.end {
                Some(Finish::Cancelled) | None => tally.cancelled += 1,
                Some(Finish::Failed(why)) => {
                    tally.failed += 1;
                    self.reasons.push(why.to_string());
                }
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

    fn check(&self, s: &Sent, windows: bool, lost: bool, transient: bool) -> Result<(), String> {
        if let Some(given) = &self.given {
            return given.check(&self.models[usize::from(windows)], &self.requests[s.kind], s);
        }
        let (tokens, finish) = &self.answers[usize::from(windows)][s.kind];
        let whole = match &s.end {
            None if s.events.is_none() => false,
            None => return Err("it has not ended".into()),
            Some(Finish::Cancelled) if s.cancelled => false,
            Some(Finish::Failed(why))
                if transient && (lost || why.to_string().contains("a fault was injected")) =>
            {
                false
            }
            Some(how) if how == finish => true,
            Some(how) => {
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

/// Panics that are injected are told to nobody.
fn without_noise() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let tell = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let injected = panic.payload_as_str().is_some_and(|text| text == "a fault was injected");
            if !injected {
                tell(panic);
            }
        }));
    });
}

fn caught(run: impl FnOnce() -> Result<Tally, String>) -> Result<Tally, String> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().copied();
        let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        Err(format!("panic: {}", text.unwrap_or("no message")))
    })
}

/// Every page is free or holds tokens of one running request.
fn check_pages(all: &Batcher, pages: [usize; 2]) -> Result<(), String> {
    // A row that is parked has room already.
    let held: usize = all.queues().running().iter().map(|j| j.pages_with(u32::from(j.at.is_some()))).sum();
    let free: usize = [Side::Device, Side::Host].iter().map(|&side| all.engine().kv_pages(side).free).sum();
    match held + free == pages[0] + pages[1] {
        true => Ok(()),
        false => Err(format!("{held} pages are held and {free} are free, of {pages:?}")),
    }
}

fn engine(m: &LoadedModel, setup: &Setup, watchdog: Duration) -> (Arc<EmulatedRuntime>, Engine) {
    let (jitter, turns) = match setup.lanes {
        Lanes::Threads(jitter) => (jitter, None),
        Lanes::InTurn => (None, Some(0)),
    };
    // No kernel runs that would have to be watched.
    let checks = KernelChecks::FAST;
    let o = EmulatedOptions { jitter, turns, watchdog, checks, ..EmulatedOptions::default() };
    let runtime = Arc::new(EmulatedRuntime::new(o).expect("it starts"));
    let accel = Arc::new(EmulatedAccelerator::new(runtime.clone()));
    let engine = on(m, setup, accel, Mode::Deterministic);
    (runtime, engine)
}

fn on(m: &LoadedModel, setup: &Setup, accel: Arc<dyn Accelerator>, mode: Mode) -> Engine {
    let options = Options {
        sequences: setup.sequences,
        logits: setup.sequences,
        chunk: setup.rows,
        threads: Some(1),
        mode,
        kv_pages: Some(setup.device_pages),
        far_pages: (setup.far_pages > 0).then_some(setup.far_pages),
        far: Some(setup.far),
        sub_batches: setup.sub_batches,
        ..Options::new(Isa::best(), CONTEXT)
    };
    let placement = placed(setup, &m.spec);
    Engine::placed(m.spec.clone(), &m.weights, &options, accel, "emulated", "test", placement, &|_| ())
        .expect("it fits")
}

fn placed(setup: &Setup, spec: &ModelSpec) -> Placement {
    let n = spec.n_layers;
    let side = |unit: usize| if setup.on_host >> unit & 1 == 1 { Side::Host } else { Side::Device };
    let layer = |unit: usize| {
        let mut layer = LayerPlacement::all(side(unit));
        if side(unit) == Side::Device && setup.apart >> (unit - 1) & 1 == 1 {
            let policy = Policy::from_bits([false, false, false, false, true, true]);
            (layer.weights, layer.prefill, layer.decode) = (Residence::Both, policy, policy);
        }
        layer
    };
    Placement {
        embedding: side(0),
        layers: (1..=n).map(layer).collect(),
        head: side(n + 1),
        copy_lane_rows: setup.copy_lane_rows,
        stream_rows: 0,
        ..Placement::all(Side::Device, n, 0)
    }
}

fn strategy(name: &str, seed: u64) -> Box<dyn Strategy> {
    match name {
        "anything" => Box::new(Anything::new(seed)),
        "continuous" => Box::new(Continuous::default()),
        name => by_name(name).unwrap_or_else(|| panic!("strategy {name} is not known")),
    }
}

/// The strategies that scripts draw from.
pub const STRATEGIES: [&str; 7] = ["anything", "continuous", "gpu-only", "fastdecode", "neo", "apex", "auto"];
