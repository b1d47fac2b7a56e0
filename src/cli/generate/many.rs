//! Many prompts in one run: reads a file of requests and writes one JSON object per line.
//!
//! All requests are present from the start, and one thread makes the steps. Which rows share a step does not depend on
//! chance, so every run gives the same bits.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::mpsc::Receiver;

use serde_json::{Value, json};
use tandem::engine::{Event, Finish, Request};
use tandem::program::RequestId;
use tandem::text::{Message, SamplerParams, Tokenizer};
use tandem::{Error, atomic_file};

use super::answer::Answer;
use super::chat::Chat;
use super::lines::{self, Ask, Bad, Line};
use super::results::Results;
use super::{Args, write_timeline};
use crate::cli::open::{self, Needs, Opened, Scheduled};
use crate::cli::stopwatch::{Stopwatch, time_of};
use crate::cli::{progress, prompt};

/// A request of the file, with everything needed to run it, or the reason why it cannot run.
struct Asked {
    number: usize,
    id: Option<Value>,
    wanted: Result<Wanted, String>,
}

/// Tokens and settings to run a request.
struct Wanted {
    prompt: Vec<u32>,
    sampling: SamplerParams,
    max_tokens: usize,
    stop: Vec<String>,
}

impl Wanted {
    /// Tokens of the prompt, and most tokens of the answer.
    fn tokens(&self) -> (usize, usize) {
        (self.prompt.len(), self.max_tokens)
    }
}

/// Generates for each line of `file`.
pub fn run(args: &Args, file: &Path) -> anyhow::Result<()> {
    if let Some(path) = &args.output {
        atomic_file::check(path)?;
    }
    if args.max_tokens == 0 {
        return Err(Error::usage("--max-tokens 0: with --prompts at least 1 is needed").into());
    }
    let name = prompt::name(file);
    let parsed = lines::parse(&prompt::read_file(file)?, &args.sampling);
    if parsed.is_empty() {
        return Err(Error::format(name, "no prompts: a JSON object a line is wanted").into());
    }
    if !args.keep_going {
        refuse(&name, &parsed)?;
    }
    let opened = open::open(args.model.as_deref())?;
    let tokenizer = opened.tokenizer()?;
    let asked = prepare(args, &opened, tokenizer.as_ref(), parsed);
    let mut results = Results::new(args.output.as_deref(), !args.as_completed);
    let mut failures = Failures::default();
    for (index, asked) in asked.iter().enumerate() {
        if let Err(why) = &asked.wanted {
            failures.add(asked, why);
            results.put(index, &failed(index, asked, why))?;
        }
    }
    if asked.iter().any(|a| a.wanted.is_ok()) {
        let sizes: Vec<(usize, usize)> =
            asked.iter().filter_map(|a| a.wanted.as_ref().ok()).map(Wanted::tokens).collect();
        let needs = Needs::new(&sizes, args.engine.ctx, opened.model.spec.max_context);
        let scheduled = opened.scheduled(&args.engine, &needs, args.parallel)?;
        generate(args, tokenizer.as_ref(), scheduled, &asked, &mut results, &mut failures)?;
    }
    results.finish()?;
    failures.into_error(&name, asked.len())
}

/// # Errors
/// If a line is no request: names the first such line, and the number of others.
fn refuse(name: &str, lines: &[Result<Line, Bad>]) -> tandem::Result<()> {
    let mut bad = lines.iter().filter_map(|line| line.as_ref().err());
    let Some(first) = bad.next() else { return Ok(()) };
    let more = match bad.count() {
        0 => String::new(),
        1 => "; one more line is bad".into(),
        n => format!("; {n} more lines are bad"),
    };
    Err(Error::format(format!("{name}: line {}", first.number), format!("{}{more}", first.why)))
}

/// Tokens and settings of each request, or the reason why the model cannot serve it.
fn prepare(
    args: &Args,
    opened: &Opened,
    tokenizer: Option<&Tokenizer>,
    parsed: Vec<Result<Line, Bad>>,
) -> Vec<Asked> {
    let chat = Chat::new(opened, tokenizer, args.system.as_deref());
    let mut said = BTreeSet::new();
    let mut conversations: Vec<Vec<Message>> = Vec::new();
    let mut places = Vec::new();
    let mut all = Vec::with_capacity(parsed.len());
    for (index, line) in parsed.into_iter().enumerate() {
        let line = match line {
            Ok(line) => line,
            Err(Bad { number, id, why }) => {
                all.push(Asked { number, id, wanted: Err(why) });
                continue;
            }
        };
        let sampling = line.sampling.resolve(&opened.model.sampling);
        said.extend(sampling.ignored);
        let prompt = match line.ask {
            Ask::Text(text) if line.raw.unwrap_or(args.raw) => chat.raw(&text),
            Ask::Tokens(ids) => chat.tokens(ids),
            Ask::Text(text) => {
                places.push(index);
                conversations.push(chat.conversation(&text));
                Ok(Vec::new())
            }
            Ask::Messages(messages) => {
                places.push(index);
                conversations.push(messages);
                Ok(Vec::new())
            }
        };
        let (max_tokens, stop) = (line.max_tokens, line.stop);
        let wanted = prompt.map(|prompt| Wanted {
            prompt,
            sampling: sampling.params,
            max_tokens: max_tokens.unwrap_or(args.max_tokens as usize),
            stop: stop.unwrap_or_else(|| args.stop.clone()),
        });
        all.push(Asked { number: line.number, id: line.id, wanted: wanted.map_err(|e| e.to_string()) });
    }
    for (index, ids) in places.into_iter().zip(chat.answers(conversations)) {
        let asked = &mut all[index];
        match (ids, &mut asked.wanted) {
            (Ok(ids), Ok(wanted)) => wanted.prompt = ids,
            (Err(e), wanted) => *wanted = Err(e.to_string()),
            (Ok(_), Err(_)) => {}
        }
    }
    said.iter().for_each(|sentence| progress::note(sentence));
    let model = opened.model.spec.max_context;
    for asked in &mut all {
        let n = asked.wanted.as_ref().map_or(0, |w| w.prompt.len());
        if let Err(e) = super::check_length(n, args.engine.ctx, model) {
            asked.wanted = Err(e.to_string());
        }
    }
    all
}

/// A request in flight.
struct Flight<'a> {
    index: usize,
    id: RequestId,
    events: Receiver<Event>,
    answer: Answer<'a>,
    /// The time of its first token.
    first: Option<f64>,
}

impl Flight<'_> {
    /// Reads the events up to `now`. Returns how the request ended, if it has.
    fn read(&mut self, now: f64) -> Option<Finish> {
        for event in self.events.try_iter() {
            match event {
                Event::Token(id) => {
                    self.first.get_or_insert(now);
                    // The engine also detects the end of the turn, and reports it next.
                    if self.answer.push(id).stops {
                        return Some(Finish::Stop);
                    }
                }
                Event::End(how) => return Some(how),
            }
        }
        None
    }
}

fn generate(
    args: &Args,
    tokenizer: Option<&Tokenizer>,
    mut scheduled: Scheduled,
    asked: &[Asked],
    results: &mut Results<'_>,
    failures: &mut Failures,
) -> anyhow::Result<()> {
    let engine = scheduled.engine();
    progress::detail(&format!("{} requests, {} at a time", asked.len(), engine.sequences()));
    if args.timeline.is_some() {
        engine.trace();
    }
    let time = time_of(engine);
    let ends: Vec<u32> = tokenizer.map_or_else(Vec::new, |t| t.end_of_generation().collect());
    let mut waiting = asked.iter().enumerate().filter_map(|(i, a)| a.wanted.as_ref().ok().map(|w| (i, w)));
    let (mut done, mut tokens) = (asked.iter().filter(|a| a.wanted.is_err()).count(), 0);
    let bar = progress::count_bar(asked.len() as u64, "prompts");
    bar.set(done as u64);
    let strategy = scheduled.strategies(&args.engine).remove(0);
    let mut requests = scheduled.requests(&strategy);
    let watch = Stopwatch::start(requests.engine());
    // Submit more requests than can run, so that the scheduler has a choice; but not all, because it examines each.
    let most = 2 * requests.engine().sequences() + 16;
    let mut flights: Vec<Flight<'_>> = Vec::new();
    loop {
        while flights.len() < most
            && let Some((index, wanted)) = waiting.next()
        {
            let request = Request {
                prompt: wanted.prompt.clone(),
                sampling: wanted.sampling.clone(),
                max_tokens: wanted.max_tokens,
                stop: ends.clone(),
            };
            let answer = Answer::new(tokenizer, &wanted.stop);
            match requests.submit(request) {
                Ok((id, events)) => flights.push(Flight { index, id, events, answer, first: None }),
                Err(e) => {
                    done += 1;
                    failures.add(&asked[index], &e.to_string());
                    results.put(index, &failed(index, &asked[index], &e.to_string()))?;
                }
            }
        }
        if flights.is_empty() {
            break;
        }
        tokens += requests.step().tokens;
        let now = watch.seconds(requests.engine());
        let mut at = 0;
        while at < flights.len() {
            let Some(how) = flights[at].read(now) else {
                at += 1;
                continue;
            };
            let mut flight = flights.remove(at);
            // Only this code detects stop strings.
            requests.cancel(flight.id);
            flight.answer.finish();
            let asked = &asked[flight.index];
            let result = match &how {
                Finish::Failed(why) => {
                    failures.add(asked, why);
                    failed(flight.index, asked, why)
                }
                how => finished(&flight, asked, how, now, time),
            };
            results.put(flight.index, &result)?;
            done += 1;
        }
        bar.say(&format!("prompts, {:.0} tok/s", tokens as f64 / now.max(1e-9)));
        bar.set(done as u64);
    }
    bar.finish();
    let seconds = watch.seconds(requests.engine());
    progress::note(&format!(
        "{} requests, {tokens} tokens in {seconds:.2} s ({:.1} tok/s)",
        asked.len(),
        tokens as f64 / seconds.max(1e-9)
    ));
    scheduled.back(requests);
    if let Some(path) = &args.timeline {
        write_timeline(scheduled.engine(), path)?;
    }
    Ok(())
}

/// The fields for a request's index and the user's id.
fn head(index: usize, asked: &Asked) -> serde_json::Map<String, Value> {
    let mut head = serde_json::Map::new();
    head.insert("index".into(), index.into());
    if let Some(id) = &asked.id {
        head.insert("id".into(), id.clone());
    }
    head
}

fn failed(index: usize, asked: &Asked, why: &str) -> Value {
    let mut line = head(index, asked);
    line.insert("error".into(), json!({ "line": asked.number, "message": why }));
    line.into()
}

fn finished(flight: &Flight<'_>, asked: &Asked, how: &Finish, now: f64, time: &str) -> Value {
    let answer = &flight.answer;
    let first = flight.first.unwrap_or(now);
    let after = answer.tokens.len().saturating_sub(1);
    let decode = if now > first { after as f64 / (now - first) } else { 0.0 };
    let mut line = head(flight.index, asked);
    let prompt = asked.wanted.as_ref().map_or(0, |w| w.prompt.len());
    line.insert("text".into(), json!(answer.text));
    line.insert("finish_reason".into(), json!(if *how == Finish::Length { "length" } else { "stop" }));
    line.insert("prompt_tokens".into(), json!(prompt));
    line.insert("completion_tokens".into(), json!(answer.tokens.len()));
    line.insert("tokens".into(), json!(answer.tokens));
    let timings =
        json!({ "ttft_ms": 1e3 * first, "total_ms": 1e3 * now, "decode_tok_s": decode, "time": time });
    line.insert("timings".into(), timings);
    line.into()
}

/// Counts requests without an answer.
#[derive(Default)]
struct Failures {
    count: usize,
    first: Option<(usize, String)>,
}

impl Failures {
    fn add(&mut self, asked: &Asked, why: &str) {
        self.count += 1;
        self.first.get_or_insert_with(|| (asked.number, why.to_owned()));
    }

    fn into_error(self, name: &str, of: usize) -> anyhow::Result<()> {
        let Some((line, why)) = self.first else { return Ok(()) };
        let n = self.count;
        Err(Error::Run(format!("{n} of {of} requests failed; the first is line {line} of {name}: {why}"))
            .into())
    }
}
