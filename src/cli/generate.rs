//! `tandem generate`: continues or answers one prompt, or many.

mod answer;
pub(super) mod chat;
mod lines;
mod many;
mod neutral;
mod results;
pub(super) mod variables;

use std::path::PathBuf;
use std::time::Instant;

use tandem::device::TOP_K;
use tandem::engine::{Engine, NewTokens};
use tandem::program::{RequestId, Wants};
use tandem::text::{Message, NO_TOKEN_LEFT, Sampler, Tokenizer, logprobs};
use tandem::{Error, atomic_file};

use self::answer::{Answer, Ending};
use self::chat::Chat;
use self::variables::VariableArgs;
use super::args::EngineArgs;
use super::open;
use super::predict::Use;
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
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "file", "logprobs"])]
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
    /// With --json: log-probabilities of each token and of the K most likely ones.
    #[arg(long, value_name = "K", requires = "json", value_parser = clap::value_parser!(u32).range(0..=1000))]
    pub logprobs: Option<u32>,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub json: bool,
    /// Write when each operation ran on which lane, of a model on two sides: as a Chrome trace (.json), or drawn, the last
    /// steps (.svg).
    #[arg(long, value_name = "FILE", value_parser = timeline::file)]
    pub timeline: Option<PathBuf>,
    /// How tokens are chosen.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// How the engine runs.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Tokens that end an answer of a model.
fn ends(tokenizer: Option<&Tokenizer>) -> Vec<u32> {
    tokenizer.map_or_else(Vec::new, |t| t.end_of_generation().collect())
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
    let prompt = prompt::read(args.prompt.as_deref(), args.file.as_deref())?;
    let opened = open::open(args.model.as_deref())?;
    let mut sampling = args.sampling.resolve(&opened.model.sampling);
    sampling.ignored.iter().for_each(|sentence| progress::note(sentence));
    progress::detail(&format!("sampling: {sampling}"));
    let tokenizer = opened.tokenizer()?;
    let lists = args.sampling.lists(&opened.model.sampling, &opened.model.eos_ids);
    let ending = Ending {
        tokens: ends(tokenizer.as_ref()),
        stop: if args.stop.is_empty() { lists.stop.clone() } else { args.stop.clone() },
        min_tokens: lists.min_tokens,
        ..Ending::default()
    };
    lists.put(&mut sampling.params);
    ending.withhold(&mut sampling.params);
    let sampler = Sampler::new(sampling.params.clone())?;
    let chat = Chat::new(&opened, tokenizer.as_ref(), args.system.as_deref(), args.variables.all());
    let ids = match args.raw {
        true => chat.raw(&prompt)?,
        false => chat.answers(vec![chat.conversation(vec![Message::new("user", &prompt)])]).remove(0)?,
    };
    let max_context = opened.model.spec.max_context;
    check_length(ids.len(), args.engine.ctx, max_context)?;
    let context =
        args.engine.ctx.map_or((ids.len() + args.max_tokens as usize).min(max_context), |c| c as usize);
    let gen_len = (context - ids.len()).min(args.max_tokens as usize);
    let work = Use { prompt: ids.len(), gen_len, batch: 1 };
    let mut running = opened.engine(&args.engine, context, 1, 1, work)?;
    if args.timeline.is_some() {
        running.engine.trace();
    }
    let mut generation = Generation {
        args,
        sampler: sampler.after_prompt(ids.len()),
        answer: Answer::new(tokenizer.as_ref(), &ending),
        logprobs: Vec::new(),
    };
    let seq = running.engine.add();
    let began = Stopwatch::start(&running.engine);
    // Show a bar only for a long wait.
    let bar =
        (ids.len() > 4096).then(|| progress::count_bar(ids.len() as u64, "reading tokens of the prompt"));
    let logits = running.engine.prefill(seq, &ids, |done| {
        if let Some(bar) = &bar {
            bar.set(done as u64);
        }
    })?;
    if let Some(bar) = &bar {
        bar.finish();
    }
    let prefill_s = began.seconds(&running.engine);
    let decode_began = Stopwatch::start(&running.engine);
    let mut first = None;
    let first_from = Next::Logits(logits);
    let finish = generation.decode(&mut running.engine, seq, first_from, &ids, &mut || {
        first.get_or_insert_with(|| started.elapsed());
    })?;
    let decode_s = decode_began.seconds(&running.engine);
    // The time to the first token; loading the model takes no emulated time.
    let first_s = match running.engine.emulated_seconds() {
        Some(_) => first.map_or(0.0, |_| prefill_s),
        None => first.map_or(0.0, |f| f.as_secs_f64()),
    };
    // The prompt's own pass gave the first token.
    let steps = generation.answer.tokens.len().saturating_sub(1);
    let rate = |n: usize, s: f64| if n > 0 && s > 0.0 { n as f64 / s } else { 0.0 };
    let timings = serde_json::json!({
        "load_ms": running.load_ms,
        "prefill_tok_s": rate(ids.len(), prefill_s),
        "decode_tok_s": rate(steps, decode_s),
        "ttft_ms": first_s * 1e3,
        "time": time_of(&running.engine),
    });
    if let Some(path) = &args.timeline {
        write_timeline(&mut running.engine, path)?;
    }
    if args.json {
        let mut result = serde_json::json!({
            "prompt_tokens": ids.len(),
            "tokens": generation.answer.tokens,
            "text": generation.answer.text,
            "finish_reason": finish,
            "plan": running.plan(&args.engine),
            "sampling": sampling.json(),
            "timings": timings,
        });
        if args.logprobs.is_some() {
            result["logprobs"] = serde_json::Value::Array(generation.logprobs);
        }
        return output::json(&result);
    }
    output::line("")?;
    progress::detail(&format!(
        "{} prompt tokens at {:.0} tok/s, {} tokens at {:.1} tok/s, first after {:.0} ms; {finish}",
        ids.len(),
        rate(ids.len(), prefill_s),
        generation.answer.tokens.len(),
        rate(steps, decode_s),
        first_s * 1e3
    ));
    Ok(())
}

/// Returns an error for logits from which no token can be chosen. A score of minus infinity only excludes its token.
fn check_numbers(logits: &[f32]) -> tandem::Result<()> {
    let usable = |x: &f32| !x.is_nan() && *x != f32::INFINITY;
    let sound = logits.iter().all(usable) && logits.iter().any(|x| x.is_finite());
    if sound { Ok(()) } else { Err(open::not_numbers()) }
}

/// The source of the next token.
enum Next {
    /// Logits to sample from.
    Logits(Vec<f32>),
    /// The likeliest token, already chosen.
    Token(u32),
    /// The only row of the engine's last step.
    Row,
}

/// The generation of one answer.
struct Generation<'a> {
    args: &'a Args,
    sampler: Sampler,
    answer: Answer<'a>,
    logprobs: Vec<serde_json::Value>,
}

impl Generation<'_> {
    /// Whether only the likeliest token is needed, so that logits may stay on their device.
    fn is_greedy(&self) -> bool {
        self.sampler.params().is_greedy() && self.args.logprobs.is_none()
    }

    /// Takes the next token and records its log-probability if requested.
    fn take(&mut self, engine: &mut Engine, next: Next, history: &[u32]) -> tandem::Result<u32> {
        let nothing = || Error::Run(NO_TOKEN_LEFT.into());
        let mut logits = match next {
            Next::Token(id) => return Ok(id),
            Next::Row => {
                if let Some(id) = engine.top(0).and_then(|top| self.sampler.choose_among(top)) {
                    return Ok(id);
                }
                let logits = engine.logits_row(0)?;
                check_numbers(logits)?;
                return self.sampler.choose(logits, history).ok_or_else(nothing);
            }
            Next::Logits(logits) => logits,
        };
        check_numbers(&logits)?;
        let Some(k) = self.args.logprobs else {
            return self.sampler.choose(&mut logits, history).ok_or_else(nothing);
        };
        let (lse, top) = logprobs(&logits, k as usize);
        let raw = logits.clone();
        let id = self.sampler.choose(&mut logits, history).ok_or_else(nothing)?;
        let top: Vec<_> = top.into_iter().map(|(id, p)| serde_json::json!([id, p])).collect();
        let logprob = raw[id as usize] as f64 - lse;
        self.logprobs.push(serde_json::json!({ "id": id, "logprob": logprob, "top": top }));
        Ok(id)
    }

    /// Decodes until the answer ends and returns the reason. `seen` is called for every token.
    fn decode(
        &mut self,
        engine: &mut Engine,
        seq: RequestId,
        mut next: Next,
        prompt: &[u32],
        seen: &mut dyn FnMut(),
    ) -> anyhow::Result<&'static str> {
        let mut history = prompt.to_vec();
        let finish = loop {
            let most = self.args.max_tokens as usize;
            if self.answer.tokens.len() >= most {
                break "length";
            }
            let id = self.take(engine, next, &history)?;
            history.push(id);
            seen();
            let piece = self.answer.push(id);
            self.emit(&piece.text)?;
            if piece.stops {
                break "stop";
            }
            if self.answer.tokens.len() >= most {
                break "length";
            }
            if engine.len(seq) + 1 > engine.context() {
                break "length";
            }
            let input = [NewTokens { id: seq, tokens: &[id], wants: Wants::Last }];
            next = if self.is_greedy() {
                Next::Token(engine.forward_greedy(&input)?[0])
            } else if self.args.logprobs.is_none() {
                engine.forward_tops(&input, &[self.sampler.top_factor(TOP_K)])?;
                Next::Row
            } else {
                Next::Logits(engine.forward(&input)?.to_vec())
            };
        };
        let rest = self.answer.finish();
        self.emit(&rest)?;
        Ok(finish)
    }

    fn emit(&self, text: &str) -> anyhow::Result<()> {
        if text.is_empty() || self.args.json { Ok(()) } else { output::print(text) }
    }
}
