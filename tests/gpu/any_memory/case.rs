//! A device, a model, and what is to be done with them, by a number.

use std::fmt;
use std::sync::Mutex;

use super::judge::Judge;
use crate::support::chance::Chance;
use crate::support::rounding;
use tandem::cache::KvType;
use tandem::device::Kind;
use tandem::engine::{Event, Finish, NewTokens, Request};
use tandem::open::{Demand, Device, Needs, Running, Settings, Strategy};
use tandem::program::{Placement, Side, Wants};
use tandem::progress::Progress;
use tandem::text::SamplerParams;
use tandem::{Error, Result};

/// What became of a case.
pub enum Outcome {
    /// It ran there.
    Ran(&'static str),
    Refused,
    Failed(String),
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Ran(place) => write!(f, "on {place}"),
            Outcome::Refused => f.write_str("refused"),
            Outcome::Failed(_) => f.write_str("FAILED"),
        }
    }
}

#[derive(Debug)]
pub struct Case {
    pub kind: &'static str,
    model: &'static str,
    layers: &'static str,
    strategy: &'static str,
    hardware: &'static str,
    kv_type: Option<KvType>,
    chunk: Option<usize>,
    context_tokens: usize,
    prompt: usize,
    /// Bytes of the device.
    pub memory: u64,
    /// Bytes that the driver has for itself, gone before anybody asks.
    pub context: u64,
}

/// Notes, among which may be one that a plan has failed.
#[derive(Default)]
struct Notes(Mutex<Vec<String>>);

impl Progress for Notes {
    fn note(&self, message: &str) {
        self.0.lock().unwrap().push(message.to_owned());
    }
}

impl Case {
    /// The case of a number. [`super::ONCE_FAILED`] has some by theirs.
    pub fn of(number: u64) -> Case {
        let mut chance = Chance(number);
        let kind = chance.of(&["dense", "dense", "mixture", "requests"]);
        // Products of 16-bit weights are plain loops on the stand-in, those of codes take long: few.
        let model = match kind {
            "mixture" => chance.of(&["tiny-mixtral,dtype=q4_k", "tiny-qwen3-moe,dtype=q8_0"]),
            _ => chance.of(&[
                "tiny-llama,dtype=bf16",
                "tiny-llama,dtype=bf16",
                "tiny-qwen3,dtype=bf16",
                "tiny-qwen3,dtype=bf16",
                "tiny-qwen2,dtype=f16",
                "tiny-gemma3,dtype=bf16",
                "tiny-llama,dtype=q4_k",
                "tiny-llama,dtype=q8_0",
            ]),
        };
        let coded = model.contains("=q");
        let layers = match kind {
            "mixture" => chance.of(&["2", "3", "4"]),
            _ if coded => chance.of(&["2", "3", "5"]),
            _ => chance.of(&["2", "5", "9", "14"]),
        };
        let strategy = match kind {
            "mixture" => chance.of(&["auto", "cpu-moe", "experts", "ncmoe", "gpu-only"]),
            "requests" => chance.of(&["neo", "apex", "fastdecode", "gpu-only", "auto"]),
            _ => chance.of(&["auto", "auto", "gpu-only", "helm", "lia", "stream", "greedy"]),
        };
        let hardware = chance.of(&["rtx4060-laptop", "a10g-g5", "t4-xeon", "h100-spr", "rtx2080-102gbs"]);
        let kv_type = match chance.of(&["", "", "", "", "", "", "", "q8"]) {
            "q8" => Some(KvType::Q8),
            _ => None,
        };
        let chunk = chance.of(&["", "16", "64"]).parse().ok();
        let context_tokens = chance.between(64.0, 512.0) as usize;
        let prompt = chance.between(3.0, 40.0) as usize;
        let memory = chance.between((8 << 20) as f64, (56 << 20) as f64) as u64;
        let context = chance.between(1.0, memory as f64 / 4.0) as u64;
        let of = Case {
            kind,
            model,
            layers,
            strategy,
            hardware,
            kv_type,
            chunk,
            context_tokens,
            prompt,
            memory,
            context,
        };
        // Of a prompt each row costs as much as a token.
        if coded { Case { prompt: prompt.min(6), ..of } } else { of }
    }

    /// The name of the model.
    pub fn model(&self) -> String {
        format!("synth:{},layers={},seed=1", self.model, self.layers)
    }

    fn settings(&self) -> Settings {
        let strategy = Strategy::ALL.into_iter().find(|s| s.name() == self.strategy).expect("a strategy");
        Settings {
            device: Device::Accelerator(Kind::Cuda(0)),
            strategies: vec![strategy],
            hardware: self.hardware.into(),
            kv_type: self.kv_type,
            chunk: self.chunk,
            threads: Some(1),
            ..Settings::default()
        }
    }

    /// Plans, loads and runs it.
    pub fn run(&self, judge: &Judge) -> Outcome {
        let notes = Notes::default();
        let ran = match self.kind {
            "requests" => self.requests(judge, &notes),
            _ => self.one(judge, &notes),
        };
        // Another plan is for memory that goes when the plan is made, and here nobody takes any.
        let notes = notes.0.into_inner().unwrap();
        if let Some(again) = notes.iter().find(|n| n.contains("planning again") || n.contains("asked for")) {
            return Outcome::Failed(again.clone());
        }
        let lacks = |why: &str| {
            ["free", "available", "room for", "pages of keys and values, there are"]
                .iter()
                .any(|word| why.contains(word))
        };
        match ran {
            Ok(Ok(place)) => Outcome::Ran(place),
            Ok(Err(wrong)) => Outcome::Failed(wrong),
            Err(Error::Capacity(why)) if lacks(&why) && !why.contains("asked for") => Outcome::Refused,
            Err(error) => Outcome::Failed(error.to_string()),
        }
    }

    fn kv(&self) -> KvType {
        self.kv_type.unwrap_or(KvType::BF16)
    }

    /// A prompt and two tokens, whole rows of logits.
    fn one(&self, judge: &Judge, notes: &Notes) -> Result<std::result::Result<&'static str, String>> {
        let demand = Demand { context: self.context_tokens, ..Demand::one(self.prompt, 2) };
        let Running { mut engine, decision, .. } = judge.model.engine(&self.settings(), &demand, notes)?;
        let prompt = judge.prompt(self.prompt, 0);
        let seq = engine.add();
        let (mut rows, mut answer) = (vec![engine.prefill(seq, &prompt, |_| ())?], Vec::new());
        for _ in 0..2 {
            answer.push(rounding::lead(&rows[rows.len() - 1]).0);
            let input = NewTokens { id: seq, tokens: &answer[answer.len() - 1..], wants: Wants::Last };
            rows.push(engine.forward(&[input])?.to_vec());
        }
        Ok(judge.check_rows(self.kv(), &prompt, &answer, &rows).map(|()| place(&decision.placement)))
    }

    /// Requests that share an engine.
    fn requests(&self, judge: &Judge, notes: &Notes) -> Result<std::result::Result<&'static str, String>> {
        let settings = self.settings();
        let prompts = [self.prompt, self.prompt / 2 + 1, 40.min(2 * self.prompt), 1];
        let each: Vec<(usize, usize)> = prompts.iter().map(|&n| (n, 3)).collect();
        let needs = Needs::new(&each, Some(self.context_tokens), self.context_tokens);
        let mut scheduled = judge.model.scheduled(&settings, &needs, None, notes)?;
        let place = match (&scheduled.decision, scheduled.tokens()) {
            (Some(decision), _) => place(&decision.placement),
            (None, (_, 0)) => "cuda:0",
            (None, _) => "both",
        };
        let strategy = scheduled.strategies(&settings)[0].clone();
        let mut requests = scheduled.requests(&strategy);
        let mut sent = Vec::new();
        for (i, &n) in prompts.iter().enumerate() {
            let prompt = judge.prompt(n, i);
            let sampling = SamplerParams { temperature: 0.0, ..SamplerParams::default() };
            let request = Request { prompt: prompt.clone(), max_tokens: 3, sampling, ..Request::default() };
            sent.push((prompt, requests.submit(request)?.1));
        }
        for _ in 0..200 {
            if requests.is_idle() {
                break;
            }
            requests.step();
        }
        for (i, (prompt, events)) in sent.iter().enumerate() {
            let mut answer = Vec::new();
            let mut end = None;
            for event in events.try_iter() {
                match event {
                    Event::Token(token) => answer.push(token.id),
                    Event::End(how) => end = Some(how),
                    Event::Cached(_) | Event::Prompt(_) => {}
                }
            }
            if !matches!(end, Some(Finish::Length)) || answer.len() != 3 {
                return Ok(Err(format!("request {i} ended by {end:?} after {answer:?}")));
            }
            if let Err(wrong) = judge.check_tokens(self.kv(), prompt, &answer) {
                return Ok(Err(format!("request {i}: {wrong}")));
            }
        }
        scheduled.back(requests);
        Ok(Ok(place))
    }
}

fn place(placement: &Placement) -> &'static str {
    match placement {
        p if p.is_host_alone() => "cpu",
        p if p.layers.iter().any(|l| l.uses(Side::Host)) || [p.embedding, p.head].contains(&Side::Host) => {
            "both"
        }
        _ => "cuda:0",
    }
}
