//! `tandem generate`: continues or answers one prompt, or many.

mod fields;
mod form;
mod lines;
mod many;
mod neutral;
mod results;
mod samples;
pub(super) mod variables;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tandem::engine::{Batcher, Engine, Event, Finish, Request, Token};
use tandem::open::{Demand, Model};
use tandem::text::{Chat, Conversation, Message, Sampler, Thinking, Tokenizer, Told};
use tandem::{Error, atomic_file};

use self::form::FormArgs;
use self::variables::VariableArgs;
use super::args::EngineArgs;
use super::open;
use super::sampling::SamplingArgs;
use super::stopwatch::{Stopwatch, time_of};
use super::targets::TargetArgs;
use super::{output, progress, prompt, timeline};

/// Continues or answers a prompt, or many.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model: a .gguf file, a folder, a name that `tandem pull` knows, or synth:NAME
    /// [default: smollm2-135m, fetched on first use].
    #[arg(short, long, value_name = "MODEL")]
    pub model: Option<String>,
    /// The prompt; without it and without -f it is read from standard input.
    #[arg(value_name = "PROMPT", conflicts_with = "file")]
    pub prompt: Option<String>,
    /// Read the prompt from a file (- is standard input).
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Answer the prompts in FILE (- is standard input), a JSON object a line with a prompt or messages; a JSON object a
    /// line comes out (docs/requests.md).
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "file"])]
    pub prompts: Option<PathBuf>,
    /// With --prompts: write the results to a file, whole or not at all.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// With --prompts: a result comes when it is completed, instead of in the order of the lines.
    #[arg(long)]
    pub as_completed: bool,
    /// With --prompts: a line that is no request is an error in its place, instead of the end before anything runs.
    #[arg(long)]
    pub keep_going: bool,
    /// With --prompts: sequences at a time [default: as many as memory has room for, at most 256].
    #[arg(long, value_name = "N", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub parallel: Option<u32>,
    /// With --prompts: what is asked of latency.
    #[command(flatten)]
    pub targets: TargetArgs,
    /// Most tokens to generate.
    #[arg(short = 'n', long = "max-tokens", aliases = ["n-predict", "predict"], default_value_t = 512, value_name = "N", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(0..))]
    pub max_tokens: u32,
    /// Continue the prompt as it is, without the model's chat template; control tokens (like <|im_end|>) count.
    #[arg(long, conflicts_with = "system")]
    pub raw: bool,
    /// System message for the chat template.
    #[arg(long, alias = "system-prompt", value_name = "S")]
    pub system: Option<String>,
    /// What the chat template gets.
    #[command(flatten)]
    pub variables: VariableArgs,
    /// Stop at this text, which is not printed; may be given several times.
    #[arg(long, value_name = "STR", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub stop: Vec<String>,
    /// With --json or --prompts: log-probabilities of each token and of the K most likely ones.
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(0..=1000))]
    pub logprobs: Option<u32>,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub json: bool,
    /// Write when each operation ran on which lane, of a model on two sides: as a Chrome trace (.json), or drawn, the last
    /// steps (.svg).
    #[arg(long, value_name = "FILE", value_parser = timeline::file)]
    pub timeline: Option<PathBuf>,
    /// The form of answers.
    #[command(flatten)]
    pub form: FormArgs,
    /// How tokens are chosen.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// How the engine runs.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Tokens that end an answer of a model.
pub(super) fn ends(tokenizer: Option<&Tokenizer>) -> Vec<u32> {
    tokenizer.map_or_else(Vec::new, |t| t.end_of_generation().collect())
}

/// How prompts become tokens of a model, by the command line.
pub(super) fn chat(
    opened: &Model,
    tokenizer: Option<Arc<Tokenizer>>,
    system: Option<&str>,
    variables: &VariableArgs,
) -> Chat {
    opened.chat(tokenizer).with_system(system).with_variables(variables.all())
}

/// The tokens of conversations; reports what has no effect on them.
pub(super) fn answers(chat: &Chat, conversations: Vec<Conversation>) -> Vec<tandem::Result<Vec<u32>>> {
    let prompts = chat.answers(conversations);
    prompts.notes.iter().for_each(|note| progress::detail(note));
    prompts.tokens
}

/// How an answer in channels is shown, if it comes in such.
pub(super) fn told(chat: &Chat, prompt: &[u32], raw: bool) -> Option<Told> {
    chat.channels(prompt, true).filter(|_| !raw).map(Told::new)
}

/// The reasoning in front of an answer of a form.
fn thinking(chat: &Chat, raw: bool) -> Thinking {
    if chat.has_channels() && !raw { Thinking::Channels } else { Thinking::None }
}

/// Steps that a drawn timeline shows.
const DRAWN_STEPS: u32 = 2;

/// Writes the timeline of a run, completely or not at all.
fn write_timeline(engine: &mut Engine, path: &std::path::Path) -> tandem::Result<()> {
    let timeline = engine.timeline().unwrap_or_default();
    atomic_file::replace(path, |to| match timeline::is_drawn(path) {
        true => timeline.write_svg(to, DRAWN_STEPS),
        false => timeline.write_chrome(to),
    })
}

/// Returns an error if a prompt of `n` tokens is longer than `--ctx` or the model's context.
fn check_length(n: usize, ctx: Option<u32>, model: usize) -> tandem::Result<()> {
    let limit = ctx.map_or(model, |c| c as usize);
    if n <= limit {
        return Ok(());
    }
    Err(Error::usage(format!(
        "the prompt has {n} tokens, more than {} of {limit}; shorten it{}",
        if ctx.is_some() { "--ctx" } else { "the model's context" },
        if limit < model { " or raise --ctx" } else { "" }
    )))
}

/// Generates.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let started = Instant::now();
    // Checked before the work, not after it.
    if let Some(path) = &args.timeline {
        atomic_file::check(path)?;
    }
    if let Some(file) = &args.prompts {
        return many::run(args, file);
    }
    if args.raw && args.variables.is_given() {
        return Err(Error::usage("--template-arg: is for the chat template, which --raw leaves out").into());
    }
    // clap's `requires` cannot be used: a prompt, which conflicts with --prompts, disables it.
    let of_prompts = [
        (args.output.is_some(), "--output"),
        (args.as_completed, "--as-completed"),
        (args.keep_going, "--keep-going"),
        (args.parallel.is_some(), "--parallel"),
        (args.targets.is_some(), "--ttft-target, --tpot-target"),
    ];
    if let Some((_, flag)) = of_prompts.iter().find(|(given, _)| *given) {
        return Err(Error::usage(format!("{flag}: is for many prompts; add --prompts FILE")).into());
    }
    if args.logprobs.is_some() && !args.json {
        return Err(Error::usage("--logprobs: are part of the JSON object; add --json").into());
    }
    let prompt = prompt::read(args.prompt.as_deref(), args.file.as_deref())?;
    let opened = open::open(args.model.as_deref())?;
    let mut sampling = args.sampling.resolve(&opened.loaded.sampling);
    sampling.ignored.iter().for_each(|sentence| progress::note(sentence));
    progress::detail(&format!("sampling: {sampling}"));
    let tokenizer = opened.tokenizer()?.map(Arc::new);
    let lists = args.sampling.lists(&opened.loaded.sampling, &opened.loaded.eos_ids);
    let mut ending = lists.ending(tokenizer.as_deref());
    if !args.stop.is_empty() {
        ending.stop = args.stop.clone();
    }
    lists.put(&mut sampling.params);
    ending.withhold(&mut sampling.params);
    // Checked before the model is loaded.
    Sampler::new(sampling.params.clone())?;
    let chat = chat(&opened, tokenizer.clone(), args.system.as_deref(), &args.variables);
    let constraint =
        args.form.constraint(tokenizer.as_ref(), opened.loaded.spec.vocab, thinking(&chat, args.raw))?;
    let ids = match args.raw {
        true => chat.raw(&prompt)?,
        false => answers(&chat, vec![chat.conversation(vec![Message::new("user", &prompt)])]).remove(0)?,
    };
    let max_context = opened.loaded.spec.max_context;
    check_length(ids.len(), args.engine.ctx, max_context)?;
    let context =
        args.engine.ctx.map_or((ids.len() + args.max_tokens as usize).min(max_context), |c| c as usize);
    let gen_len = (context - ids.len()).min(args.max_tokens as usize);
    let demand = Demand { context, ..Demand::one(ids.len(), gen_len) };
    let mut running = open::engine(&opened, &args.engine, &demand)?;
    if args.timeline.is_some() {
        running.engine.trace();
    }
    let learning = opened.learn_router(&args.engine.settings(), &mut running.engine);
    let told = told(&chat, &ids, args.raw);
    ending.parting = told.as_ref().map(Told::tokens).unwrap_or_default();
    let request = Request {
        prompt: ids,
        sampling: sampling.params.clone(),
        max_tokens: args.max_tokens as usize,
        ending,
        logprobs: args.logprobs.map(|k| k as usize),
        constraint,
        ..Request::default()
    };
    let (engine, generated) = generate(running.engine, tokenizer, (request, told), started, !args.json)?;
    running.engine = engine;
    let Generated { answer, finish, prompt_tokens, prefill_s, decode_s, first } = generated;
    // The time to the first token; loading the model takes no emulated time.
    let first_s = match running.engine.emulated_seconds() {
        Some(_) => first.map_or(0.0, |_| prefill_s),
        None => first.map_or(0.0, |f| f.as_secs_f64()),
    };
    // The prompt's own pass gave the first token.
    let steps = answer.len().saturating_sub(1);
    let rate = |n: usize, s: f64| if n > 0 && s > 0.0 { n as f64 / s } else { 0.0 };
    let timings = serde_json::json!({
        "load_ms": running.load_ms,
        "prefill_tok_s": rate(prompt_tokens, prefill_s),
        "decode_tok_s": rate(steps, decode_s),
        "ttft_ms": first_s * 1e3,
        "time": time_of(&running.engine),
    });
    open::keep_router(learning, &mut running.engine);
    if let Some(path) = &args.timeline {
        write_timeline(&mut running.engine, path)?;
    }
    if args.json {
        let mut result = serde_json::json!({
            "prompt_tokens": prompt_tokens,
            "tokens": answer.iter().map(|token| token.id).collect::<Vec<_>>(),
            "text": answer.iter().map(|token| &*token.text).collect::<String>(),
            "finish_reason": finish,
            "plan": running.plan(&args.engine),
            "sampling": sampling.json(),
            "timings": timings,
        });
        if args.logprobs.is_some() {
            result["logprobs"] = results::logprobs(&answer);
        }
        if running.engine.follows_router() {
            result["exchanged_experts"] = running.engine.exchanged_experts().into();
        }
        return output::json(&result);
    }
    output::line("")?;
    progress::detail(&format!(
        "{prompt_tokens} prompt tokens at {:.0} tok/s, {} tokens at {:.1} tok/s, first after {:.0} ms; {finish}",
        rate(prompt_tokens, prefill_s),
        answer.len(),
        rate(steps, decode_s),
        first_s * 1e3
    ));
    Ok(())
}

/// The answer to one prompt.
struct Generated {
    answer: Vec<Token>,
    /// Why it ended, in JSON's words.
    finish: &'static str,
    prompt_tokens: usize,
    /// Seconds of the prompt, and of what came after it.
    prefill_s: f64,
    decode_s: f64,
    /// When the first token came, after the program's start.
    first: Option<Duration>,
}

/// Runs one request: a batch of one. Prints text as it comes if `print`. Returns the engine, too.
fn generate(
    engine: Engine,
    tokenizer: Option<Arc<Tokenizer>>,
    (request, mut told): (Request, Option<Told>),
    started: Instant,
    print: bool,
) -> anyhow::Result<(Engine, Generated)> {
    let prompt_tokens = request.prompt.len();
    let mut requests = Batcher::new(engine);
    requests.set_tokenizer(tokenizer);
    let (_, events) = requests.submit(request)?;
    // Show a bar only for a long wait.
    let bar = (prompt_tokens > 4096)
        .then(|| progress::count_bar(prompt_tokens as u64, "reading tokens of the prompt"));
    let began = Stopwatch::start(requests.engine());
    let (mut answer, mut prefill_s, mut first) = (Vec::<Token>::new(), None, None);
    let how = loop {
        requests.step();
        if prefill_s.is_none() {
            let stored = requests.queues().running().first().map_or(prompt_tokens, |job| job.stored as usize);
            if let Some(bar) = &bar {
                bar.set(stored as u64);
            }
            if stored >= prompt_tokens {
                prefill_s = Some(began.seconds(requests.engine()));
                if let Some(bar) = &bar {
                    bar.finish();
                }
            }
        }
        let mut over = None;
        for event in events.try_iter() {
            match event {
                Event::Token(mut token) => {
                    first.get_or_insert_with(|| started.elapsed());
                    if let Some(told) = &mut told {
                        token.text = told.push(token.id, &token.text);
                    }
                    if print && !token.text.is_empty() {
                        output::print(&token.text)?;
                    }
                    answer.push(token);
                }
                Event::Cached(_) | Event::Prompt(_) => {}
                Event::End(how) => over = Some(how),
            }
        }
        if let Some(how) = over {
            break how;
        }
    };
    if let (Some(told), Some(last)) = (&mut told, answer.last_mut()) {
        let rest = told.finish();
        if print {
            output::print(&rest)?;
        }
        last.text += &rest;
    }
    let finish = match how {
        Finish::Failed(error) => return Err(open::failed(error).into()),
        Finish::Stop => "stop",
        Finish::Length | Finish::Cancelled => "length",
    };
    let seconds = began.seconds(requests.engine());
    let prefill_s = prefill_s.unwrap_or(seconds);
    let decode_s = seconds - prefill_s;
    let engine = requests.into_engine();
    Ok((engine, Generated { answer, finish, prompt_tokens, prefill_s, decode_s, first }))
}
