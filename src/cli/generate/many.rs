//! Many prompts in one run: reads a file of requests and writes one JSON object per line.
//!
//! All requests are present from the start, and one thread makes the steps. Which rows share a step does not depend on
//! chance, so every run gives the same bits.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use serde_json::{Value, json};
use tandem::engine::{Event, Finish, Logprobs, Request, Token};
use tandem::open::{Model, Needs, Scheduled};
use tandem::sched::{OwnTargets, Targets};
use tandem::text::{Chat, Constraint, Conversation, Ending, Message, SamplerParams, Tokenizer, Told};
use tandem::{Error, Result as Outcome, atomic_file};

use super::lines::{self, Bad, ForTemplate, Limits, LineInput, PromptLine};
use super::results::{self, ResultsWriter};
use super::samples::{Candidates, Sample};
use super::{Args, answers, chat, ends, thinking, told, variables, write_timeline};
use crate::cli::flags::in_place_of_settings;
use crate::cli::open;
use crate::cli::sampling::{TokenLists, seed_of};
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
    ending: Ending,
    /// How its answer is shown, if it comes in channels.
    told: Option<Told>,
    prompt_logprobs: Option<usize>,
    /// What it asks of latency for itself.
    targets: OwnTargets,
    /// Answers, and of how many they are the best.
    n: usize,
    best_of: usize,
}

impl Asked {
    /// What is to run, unless it cannot or asks for nothing.
    fn to_run(&self) -> Option<&Wanted> {
        let asks = |wanted: &&Wanted| wanted.max_tokens > 0 || wanted.prompt_logprobs.is_some();
        self.wanted.as_ref().ok().filter(asks)
    }
}

impl Wanted {
    /// Tokens of the prompt, and most tokens of the answer: of each answer.
    fn tokens(&self) -> impl Iterator<Item = (usize, usize)> {
        std::iter::repeat_n((self.prompt.len(), self.max_tokens), self.best_of)
    }

    /// The seed of one of its answers.
    fn seed(&self, at: usize) -> u64 {
        self.sampling.seed.wrapping_add(at as u64)
    }

    /// As many likely tokens as are told, and log-probabilities where the best answers are looked for.
    fn logprobs(&self, told: Option<usize>) -> Option<usize> {
        told.or((self.n < self.best_of).then_some(0))
    }
}

/// Generates for each line of `file`.
pub fn run(args: &Args, file: &Path) -> anyhow::Result<()> {
    if let Some(path) = &args.output {
        atomic_file::check(path)?;
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
    let tokenizer = opened.tokenizer()?.map(Arc::new);
    let chat = chat(&opened, tokenizer.clone(), args.system.as_deref(), &args.variables);
    let constraint =
        args.form.constraint(tokenizer.as_ref(), opened.loaded.spec.vocab, thinking(&chat, args.raw))?;
    let asked = prepare(args, &opened, (&chat, tokenizer.as_deref()), parsed);
    let mut results = ResultsWriter::new(args.output.as_deref(), !args.as_completed);
    let mut failures = Failures::default();
    for (index, asked) in asked.iter().enumerate() {
        match &asked.wanted {
            Err(why) => {
                failures.add(asked, why);
                results.put(index, &failed(index, asked, why))?;
            }
            Ok(wanted) if asked.to_run().is_none() => results.put(index, &nothing(index, asked, wanted))?,
            Ok(_) => {}
        }
    }
    let sizes: Vec<(usize, usize)> =
        asked.iter().filter_map(Asked::to_run).flat_map(Wanted::tokens).collect();
    if !sizes.is_empty() {
        let needs = Needs::new(&sizes, args.engine.context(), opened.loaded.spec.max_context);
        let (mut scheduled, _notices) = open::scheduled(&opened, &args.engine, &needs, args.parallel)?;
        let form = (tokenizer, constraint);
        let learning = opened.learn_router(&args.engine.settings(), scheduled.engine());
        generate(args, form, &mut scheduled, &asked, &mut results, &mut failures)?;
        open::keep_router(learning, scheduled.engine());
    }
    results.finish()?;
    failures.into_error(&name, asked.len())
}

/// # Errors
/// If a line is no request: names the first such line, and the number of others.
fn refuse(name: &str, lines: &[Result<PromptLine, Bad>]) -> tandem::Result<()> {
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
    opened: &Model,
    (chat, tokenizer): (&Chat, Option<&Tokenizer>),
    parsed: Vec<Result<PromptLine, Bad>>,
) -> Vec<Asked> {
    let lists = args.sampling.lists(&opened.loaded.sampling, &opened.loaded.eos_ids);
    let ends = ends(tokenizer);
    let mut said = BTreeSet::new();
    let mut conversations: Vec<Conversation> = Vec::new();
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
        let mut sampling = line.sampling.resolve(&opened.loaded.sampling);
        said.extend(sampling.ignored);
        if !line.own_seed {
            sampling.params.seed = seed_of(sampling.params.seed, index);
        }
        let mut converse = |messages: Vec<Message>| {
            places.push(index);
            conversations.push(with_fields(chat.conversation(messages), &line.template));
            Ok(Vec::new())
        };
        let prompt = match line.ask {
            LineInput::Text(text) if line.raw.unwrap_or(args.raw) => {
                without_fields(&line.template).and_then(|()| chat.raw(&text))
            }
            LineInput::Tokens(ids) => without_fields(&line.template).and_then(|()| chat.tokens(ids)),
            LineInput::Text(text) => converse(vec![Message::new("user", text)]),
            LineInput::Messages(messages) => converse(messages),
        };
        let vocab = opened.loaded.spec.vocab;
        let max_tokens = line.max_tokens.unwrap_or(args.max_tokens as usize);
        let stop = match (line.stop, &args.stop[..]) {
            (Some(stop), _) => stop,
            (None, []) => lists.stop.clone(),
            (None, stop) => stop.to_vec(),
        };
        let wanted = prompt.and_then(|prompt| {
            let ending = limited(&line.limits, &lists, stop, &ends, tokenizer, vocab, &mut sampling.params)?;
            if ending.min_tokens > max_tokens && line.limits.min_tokens.is_some() {
                return Err(Error::usage(format!(
                    "min_tokens: {}, more than the {max_tokens} tokens that are wanted at most",
                    ending.min_tokens
                )));
            }
            let (prompt_logprobs, targets, told) = (line.prompt_logprobs, line.targets, None);
            let sampling = sampling.params;
            let (n, best_of) = (line.n, line.best_of);
            Ok(Wanted { prompt, sampling, max_tokens, ending, told, prompt_logprobs, targets, n, best_of })
        });
        all.push(Asked { number: line.number, id: line.id, wanted: wanted.map_err(|e| worded(&e)) });
    }
    for (index, ids) in places.into_iter().zip(answers(chat, conversations)) {
        let asked = &mut all[index];
        match (ids, &mut asked.wanted) {
            (Ok(ids), Ok(wanted)) => {
                if !wanted.ending.show_special {
                    wanted.told = told(chat, &ids, false);
                    wanted.ending.parting = wanted.told.as_ref().map(Told::tokens).unwrap_or_default();
                }
                wanted.prompt = ids;
            }
            (Err(e), wanted) => *wanted = Err(worded(&e)),
            (Ok(_), Err(_)) => {}
        }
    }
    said.iter().for_each(|sentence| progress::note(sentence));
    let model = opened.loaded.spec.max_context;
    for asked in &mut all {
        let n = asked.wanted.as_ref().map_or(0, |w| w.prompt.len());
        if let Err(e) = super::check_length(n, args.engine.ctx, model) {
            asked.wanted = Err(worded(&e));
        }
    }
    all
}

/// A conversation with what a line has for its template.
fn with_fields(conversation: Conversation, fields: &ForTemplate) -> Conversation {
    Conversation {
        tools: fields.tools.clone(),
        documents: fields.documents.clone(),
        variables: variables::merge(conversation.variables, fields.variables.clone()),
        add_generation_prompt: fields.add_generation_prompt.unwrap_or(!fields.continue_final_message),
        continue_final_message: fields.continue_final_message,
        ..conversation
    }
}

/// # Errors
/// If a line that does without the template has something for it.
fn without_fields(fields: &ForTemplate) -> Outcome<()> {
    let given = [
        ("tools", fields.tools.is_some()),
        ("documents", fields.documents.is_some()),
        ("chat_template_kwargs", !fields.variables.is_empty()),
        ("add_generation_prompt", fields.add_generation_prompt == Some(true)),
        ("continue_final_message", fields.continue_final_message),
    ];
    match given.iter().find(|(_, given)| *given) {
        Some((name, _)) => {
            Err(Error::usage(format!("{name}: this prompt is continued without the chat template")))
        }
        None => Ok(()),
    }
}

/// Puts what a line and the model exclude and prefer into the sampler's settings. Returns how its answer ends.
fn limited(
    limits: &Limits,
    lists: &TokenLists,
    stop: Vec<String>,
    ends: &[u32],
    tokenizer: Option<&Tokenizer>,
    vocab: usize,
    params: &mut SamplerParams,
) -> Outcome<Ending> {
    lists.put(params);
    let biases = limits.logit_bias.iter().map(|(id, _)| ("logit_bias", *id));
    let allowed = limits.allowed.iter().flatten().map(|id| ("allowed_token_ids", *id));
    let stops = limits.stop_tokens.iter().map(|id| ("stop_token_ids", *id));
    if let Some((name, id)) = biases.chain(allowed).chain(stops).find(|(_, id)| *id as usize >= vocab) {
        return Err(Error::usage(format!("{name}: token {id} is outside the vocabulary of {vocab}")));
    }
    if !limits.logit_bias.is_empty() {
        params.biases = params.biases.iter().chain(&limits.logit_bias).copied().collect();
    }
    params.allowed = limits.allowed.as_deref().map(Into::into);
    if !limits.bad_words.is_empty() {
        let Some(tokenizer) = tokenizer else {
            return Err(Error::usage("bad_words: this model has no tokenizer"));
        };
        let mut words = params.sequence_biases.to_vec();
        for word in &limits.bad_words {
            words.extend(spellings(word, tokenizer)?.into_iter().map(|ids| (ids, f32::NEG_INFINITY)));
        }
        params.sequence_biases = words.into();
    }
    let turn: &[u32] = if limits.ignore_eos { &[] } else { ends };
    let ending = Ending {
        tokens: turn.iter().chain(&limits.stop_tokens).copied().collect(),
        stop,
        min_tokens: limits.min_tokens.unwrap_or(lists.min_tokens),
        keep_stop: limits.keep_stop,
        show_special: limits.show_special,
        ..Ending::default()
    };
    ending.withhold(params);
    Ok(ending)
}

/// The tokens of a word at the beginning of a text and behind a space, as vLLM takes them.
fn spellings(word: &str, tokenizer: &Tokenizer) -> Outcome<Vec<Vec<u32>>> {
    let word = word.trim_start();
    let mut all = vec![tokenizer.encode(word, false, false)?];
    let behind = tokenizer.encode(&format!(" {word}"), false, false)?;
    // Another first token, and not one more for the space.
    if behind.len() == all[0].len() && behind.first() != all[0].first() {
        all.push(behind);
    }
    all.retain(|ids| !ids.is_empty());
    Ok(all)
}

/// A request in flight.
struct Flight {
    index: usize,
    /// Its place among the answers to the request.
    at: usize,
    events: Receiver<Event>,
    /// Of the prompt's tokens from the second on.
    scores: Vec<Logprobs>,
    answer: Vec<Token>,
    /// The time of its first token.
    first: Option<f64>,
    told: Option<Told>,
}

impl Flight {
    /// Reads the events up to `now`. Returns how the request ended, if it has.
    fn read(&mut self, now: f64) -> Option<Finish> {
        for event in self.events.try_iter() {
            match event {
                Event::Token(mut token) => {
                    self.first.get_or_insert(now);
                    if let Some(told) = &mut self.told {
                        token.text = told.push(token.id, &token.text);
                    }
                    self.answer.push(token);
                }
                Event::Cached(_) => {}
                Event::Prompt(scores) => self.scores.extend(scores),
                Event::End(how) => {
                    if let (Some(told), Some(last)) = (&mut self.told, self.answer.last_mut()) {
                        last.text += &told.finish();
                    }
                    return Some(how);
                }
            }
        }
        None
    }
}

fn generate(
    args: &Args,
    (tokenizer, constraint): (Option<Arc<Tokenizer>>, Option<Constraint>),
    scheduled: &mut Scheduled,
    asked: &[Asked],
    results: &mut ResultsWriter<'_>,
    failures: &mut Failures,
) -> anyhow::Result<()> {
    let engine = scheduled.engine();
    progress::detail(&format!("{} requests, {} at a time", asked.len(), engine.sequences()));
    if args.timeline.is_some() {
        engine.trace();
    }
    let time = time_of(engine);
    let to_run = asked.iter().enumerate().filter_map(|(i, a)| a.to_run().map(|w| (i, w)));
    let mut waiting = to_run.flat_map(|(i, w)| (0..w.best_of).map(move |at| (i, at, w)));
    let told = args.logprobs.map(|k| k as usize);
    // Answers of requests that are to have several.
    let mut samples: BTreeMap<usize, Candidates> = BTreeMap::new();
    let mut refused = BTreeSet::new();
    let (mut done, mut tokens) = (asked.iter().filter(|a| a.to_run().is_none()).count(), 0);
    let bar = progress::count_bar(asked.len() as u64, "prompts");
    bar.set(done as u64);
    let strategy = scheduled.strategies(&args.engine.settings()).remove(0);
    // The answers are read when they are complete.
    let targets = args.targets.targets()?;
    let targets = if targets.is_some() { targets } else { Targets::OFFLINE };
    scheduled.set_targets(targets);
    let mut requests = scheduled.requests(&strategy);
    requests.set_tokenizer(tokenizer);
    let watch = Stopwatch::start(requests.engine());
    // Submit more requests than can run, so that the scheduler has a choice; but not all, because it examines each.
    let most = 2 * requests.engine().sequences() + 16;
    let mut flights: Vec<Flight> = Vec::new();
    loop {
        while flights.len() < most
            && let Some((index, at, wanted)) = waiting.next()
        {
            if refused.contains(&index) {
                continue;
            }
            let request = Request {
                prompt: wanted.prompt.clone(),
                sampling: SamplerParams { seed: wanted.seed(at), ..wanted.sampling.clone() },
                max_tokens: wanted.max_tokens,
                ending: wanted.ending.clone(),
                logprobs: wanted.logprobs(told),
                // One tells them for all.
                prompt_logprobs: wanted.prompt_logprobs.filter(|_| at == 0),
                targets: wanted.targets,
                constraint: constraint.clone(),
                ..Request::default()
            };
            match requests.submit(request) {
                Ok((_, events)) => {
                    let (scores, answer, told) = (Vec::new(), Vec::new(), wanted.told.clone());
                    flights.push(Flight { index, at, events, scores, answer, first: None, told });
                }
                Err(e) => {
                    done += 1;
                    refused.insert(index);
                    flights.retain(|flight| flight.index != index);
                    failures.add(&asked[index], &worded(&e));
                    results.put(index, &failed(index, &asked[index], &worded(&e)))?;
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
            let flight = flights.remove(at);
            let asked = &asked[flight.index];
            let index = flight.index;
            let result = match (&how, &asked.wanted) {
                (Finish::Failed(why), _) => {
                    failures.add(asked, &worded(why));
                    // With it, its other answers.
                    refused.insert(index);
                    flights.retain(|flight| flight.index != index);
                    at = 0;
                    Some(failed(index, asked, &worded(why)))
                }
                (how, Ok(wanted)) => {
                    let of =
                        samples.entry(index).or_insert_with(|| Candidates::new(wanted.n, wanted.best_of));
                    let sample = finished(flight, wanted, told.is_some(), (how, now, time), &targets);
                    of.add(sample).map(|all| whole(index, asked, wanted, all))
                }
                (_, Err(_)) => unreachable!("what cannot run did not"),
            };
            if let Some(result) = result {
                samples.remove(&index);
                results.put(index, &result)?;
                done += 1;
            }
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

/// An error, in the words of the command line.
fn worded(error: &Error) -> String {
    in_place_of_settings(&error.to_string())
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

/// The result of a request for no token.
fn nothing(index: usize, asked: &Asked, wanted: &Wanted) -> Value {
    let sample = |at| {
        let timings = json!({ "ttft_ms": 0.0, "total_ms": 0.0, "decode_tok_s": 0.0, "time": "measured" });
        let told = json!({
            "text": "", "finish_reason": "length", "completion_tokens": 0, "tokens": [], "seed": wanted.seed(at),
            "timings": timings,
        });
        let Value::Object(told) = told else { unreachable!("an object was made") };
        Sample { at, answer: Vec::new(), scores: Vec::new(), told }
    };
    whole(index, asked, wanted, (Vec::new(), (0..wanted.n).map(sample).collect()))
}

/// An answer, and what is told of it.
fn finished(
    flight: Flight,
    wanted: &Wanted,
    scored: bool,
    (how, now, time): (&Finish, f64, &str),
    targets: &Targets,
) -> Sample {
    let Flight { at, answer, scores, first, .. } = flight;
    let first = first.unwrap_or(now);
    let after = answer.len().saturating_sub(1);
    let decode = if now > first { after as f64 / (now - first) } else { 0.0 };
    let mut told = serde_json::Map::new();
    let text: String = answer.iter().map(|token| &*token.text).collect();
    told.insert("text".into(), json!(text));
    told.insert("finish_reason".into(), json!(if *how == Finish::Length { "length" } else { "stop" }));
    told.insert("completion_tokens".into(), json!(answer.len()));
    told.insert("tokens".into(), json!(answer.iter().map(|token| token.id).collect::<Vec<_>>()));
    if scored && answer.iter().any(|token| token.logprobs.is_some()) {
        told.insert("logprobs".into(), results::logprobs(&answer));
    }
    told.insert("seed".into(), json!(wanted.seed(at)));
    let mut timings =
        json!({ "ttft_ms": 1e3 * first, "total_ms": 1e3 * now, "decode_tok_s": decode, "time": time });
    let targets = targets.with(wanted.targets);
    if targets.is_some() {
        let between = (after > 0).then(|| (now - first) / after as f64);
        timings["within_targets"] = targets.met(first, between).into();
    }
    told.insert("timings".into(), timings);
    Sample { at, answer, scores, told }
}

/// The result of a request: its answer, or `choices` where it asks for several.
fn whole(
    index: usize,
    asked: &Asked,
    wanted: &Wanted,
    (scores, mut samples): (Vec<Logprobs>, Vec<Sample>),
) -> Value {
    let mut line = head(index, asked);
    line.insert("prompt_tokens".into(), json!(wanted.prompt.len()));
    if wanted.prompt_logprobs.is_some() {
        line.insert("prompt_logprobs".into(), results::prompt_logprobs(&wanted.prompt, &scores));
    }
    match wanted.n {
        1 => line.extend(samples.remove(0).told),
        _ => {
            let choices: Vec<_> = samples.into_iter().map(|sample| Value::Object(sample.told)).collect();
            line.insert("choices".into(), choices.into());
        }
    }
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
