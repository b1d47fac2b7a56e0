//! `tandem generate`: from a prompt to text.

use std::path::PathBuf;
use std::time::Instant;

use tandem::engine::{Engine, Input, Logits, SeqId};
use tandem::text::{Message, Sampler, Sandbox, StreamDecoder, Tokenizer, logprobs};
use tandem::{Error, atomic_file};

use super::args::EngineArgs;
use super::open::{self, Opened};
use super::predict::Use;
use super::sampling::SamplingArgs;
use super::stopwatch::{Stopwatch, time_of};
use super::{output, progress, prompt};

/// Continues or answers a prompt.
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
    #[arg(long, value_name = "FILE", value_parser = timeline_file)]
    pub timeline: Option<PathBuf>,
    /// How tokens are chosen.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// How the engine runs.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Steps that a drawn timeline shows.
const DRAWN_STEPS: u32 = 2;

/// The two kinds of timeline, by the file's ending.
fn timeline_file(path: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(path);
    match path.extension().and_then(|e| e.to_str()) {
        Some("json" | "svg") => Ok(path),
        _ => {
            Err("a timeline is written to a file that ends in .json (a Chrome trace) or .svg (a drawing)"
                .into())
        }
    }
}

/// Writes the timeline of a run, whole or not at all.
fn write_timeline(engine: &mut Engine, path: &std::path::Path) -> tandem::Result<()> {
    let timeline = engine.timeline().unwrap_or_default();
    atomic_file::replace(path, |to| match path.extension().is_some_and(|e| e == "svg") {
        true => timeline.write_svg(to, DRAWN_STEPS),
        false => timeline.write_chrome(to),
    })
}

/// Tokens that may follow one prompt token id outside of a tokenizer (random weights): bytes of the text.
fn synthetic_ids(text: &str, vocab: usize) -> Vec<u32> {
    text.bytes().map(|b| (b as usize % vocab) as u32).collect()
}

/// Generates.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let started = Instant::now();
    // Before the work, not after it.
    if let Some(path) = &args.timeline {
        atomic_file::check(path)?;
    }
    let prompt = prompt::read(args.prompt.as_deref(), args.file.as_deref())?;
    let opened = open::open(args.model.as_deref())?;
    let sampling = args.sampling.resolve(&opened.model.sampling);
    sampling.ignored.iter().for_each(|sentence| progress::note(sentence));
    progress::detail(&format!("sampling: {sampling}"));
    let sampler = Sampler::new(sampling.params.clone())?;
    let tokenizer = opened.tokenizer()?;
    let ids = match &tokenizer {
        Some(t) => prompt_ids(args, &opened, t, &prompt)?,
        None => synthetic_ids(&prompt, opened.model.spec.vocab),
    };
    if ids.is_empty() {
        return Err(Error::usage("the prompt has no tokens").into());
    }
    open::check_tokens(&ids, opened.model.spec.vocab)?;
    let max_context = opened.model.spec.max_context;
    let limit = args.engine.ctx.map_or(max_context, |c| c as usize);
    if ids.len() > limit {
        let ctx = if args.engine.ctx.is_some() { "--ctx" } else { "the model's context" };
        return Err(Error::usage(format!(
            "the prompt has {} tokens, more than {ctx} of {limit}; shorten it{}",
            ids.len(),
            if limit < max_context { " or raise --ctx" } else { "" }
        ))
        .into());
    }
    let context =
        args.engine.ctx.map_or((ids.len() + args.max_tokens as usize).min(max_context), |c| c as usize);
    let gen_len = (context - ids.len()).min(args.max_tokens as usize);
    let work = Use { prompt: ids.len(), gen_len, batch: 1 };
    let mut running = opened.engine(&args.engine, context, 1, 1, work)?;
    if args.timeline.is_some() {
        running.engine.trace();
    }
    let plan = running.plan(&args.engine);
    let mut generation = Generation {
        args,
        tokenizer: tokenizer.as_ref(),
        sampler,
        stream: StreamDecoder::new(&args.stop),
        text: String::new(),
        tokens: Vec::new(),
        logprobs: Vec::new(),
    };
    let seq = running.engine.add();
    let began = Stopwatch::start(&running.engine);
    // A bar only where the wait is worth one.
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
    // The first token is the prompt's; of loading the model nothing is emulated.
    let first_s = match running.engine.emulated_seconds() {
        Some(_) => first.map_or(0.0, |_| prefill_s),
        None => first.map_or(0.0, |f| f.as_secs_f64()),
    };
    // The first token came from the prompt's own pass.
    let steps = generation.tokens.len().saturating_sub(1);
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
            "tokens": generation.tokens,
            "text": generation.text,
            "finish_reason": finish,
            "plan": plan,
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
        generation.tokens.len(),
        rate(steps, decode_s),
        first_s * 1e3
    ));
    Ok(())
}

/// The prompt's tokens, through the chat template unless `--raw`.
fn prompt_ids(args: &Args, opened: &Opened, tokenizer: &Tokenizer, prompt: &str) -> anyhow::Result<Vec<u32>> {
    let text = |id: Option<u32>| id.and_then(|id| tokenizer.token_text(id)).unwrap_or_default();
    let (bos, eos) = (text(tokenizer.bos()), text(tokenizer.eos()));
    // Control tokens in a prompt are control tokens, as for other programs: whoever leaves the template out often writes
    // its frame by hand. Most templates (and such prompts) have the beginning-of-sequence token themselves: never two.
    let encode = |prompt: &str| tokenizer.encode(prompt, bos.is_empty() || !prompt.starts_with(&bos), true);
    if args.raw {
        return Ok(encode(prompt)?);
    }
    let Some(template) = opened.template(tokenizer) else {
        if args.system.is_some() {
            return Err(Error::usage("--system: this model has no chat template").into());
        }
        progress::detail("this model has no chat template: the prompt is continued as it is");
        return Ok(encode(prompt)?);
    };
    let mut messages = Vec::new();
    if let Some(system) = &args.system {
        messages.push(Message::new("system", system));
    }
    messages.push(Message::new("user", prompt));
    // Whoever made the model wrote this program.
    let rendered = Sandbox::this_program().render(template, &messages, true, &bos, &eos)?;
    if rendered.is_empty() {
        return Err(Error::format("chat template", "renders nothing; use --raw to do without it").into());
    }
    Ok(encode(&rendered)?)
}

/// Refuses logits that nothing can be chosen from. Scores of minus infinity are choices not to be taken.
fn check_numbers(logits: &[f32]) -> tandem::Result<()> {
    let usable = |x: &f32| !x.is_nan() && *x != f32::INFINITY;
    let sound = logits.iter().all(usable) && logits.iter().any(|x| x.is_finite());
    if sound { Ok(()) } else { Err(open::not_numbers()) }
}

/// Where the next token comes from.
enum Next {
    /// To be sampled from these.
    Logits(Vec<f32>),
    /// Chosen already: the likeliest.
    Token(u32),
}

/// One answer in the making.
struct Generation<'a> {
    args: &'a Args,
    tokenizer: Option<&'a Tokenizer>,
    sampler: Sampler,
    stream: StreamDecoder,
    text: String,
    tokens: Vec<u32>,
    logprobs: Vec<serde_json::Value>,
}

impl Generation<'_> {
    /// Whether the likeliest token is all that is asked for, so that logits may stay where they are.
    fn is_greedy(&self) -> bool {
        let p = self.sampler.params();
        p.temperature == 0.0 && p.repeat_penalty == 1.0 && self.args.logprobs.is_none()
    }

    /// Takes the next token, noting its log-probability if that was asked for.
    fn take(&mut self, next: Next, history: &[u32]) -> tandem::Result<u32> {
        let mut logits = match next {
            Next::Token(id) => return Ok(id),
            Next::Logits(logits) => logits,
        };
        check_numbers(&logits)?;
        let Some(k) = self.args.logprobs else { return Ok(self.sampler.sample(&mut logits, history)) };
        let (lse, top) = logprobs(&logits, k as usize);
        let raw = logits.clone();
        let id = self.sampler.sample(&mut logits, history);
        let top: Vec<_> = top.into_iter().map(|(id, p)| serde_json::json!([id, p])).collect();
        let logprob = raw[id as usize] as f64 - lse;
        self.logprobs.push(serde_json::json!({ "id": id, "logprob": logprob, "top": top }));
        Ok(id)
    }

    /// Decodes until something ends it; returns what did. `seen` is called at every token.
    fn decode(
        &mut self,
        engine: &mut Engine,
        seq: SeqId,
        mut next: Next,
        prompt: &[u32],
        seen: &mut dyn FnMut(),
    ) -> anyhow::Result<&'static str> {
        let mut history = prompt.to_vec();
        let finish = loop {
            if self.tokens.len() >= self.args.max_tokens as usize {
                break "length";
            }
            let id = self.take(next, &history)?;
            self.tokens.push(id);
            history.push(id);
            seen();
            if self.tokenizer.is_some_and(|t| t.is_eog(id)) {
                break "stop";
            }
            match self.tokenizer {
                Some(t) if !t.is_special(id) => {
                    let out = self.stream.push(&t.token_bytes(id));
                    self.emit(&out.text)?;
                    if out.stopped {
                        break "stop";
                    }
                }
                Some(_) => {}
                None => self.emit(&format!("{id} "))?,
            }
            if self.tokens.len() >= self.args.max_tokens as usize {
                break "length";
            }
            if engine.len(seq) + 1 > engine.context() {
                break "length";
            }
            let input = [Input { seq, tokens: &[id], logits: Logits::Last }];
            next = if self.is_greedy() {
                Next::Token(engine.forward_greedy(&input)?[0])
            } else {
                Next::Logits(engine.forward(&input)?.to_vec())
            };
        };
        let rest = self.stream.finish();
        self.emit(&rest.text)?;
        Ok(finish)
    }

    fn emit(&mut self, text: &str) -> anyhow::Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        self.text.push_str(text);
        if self.args.json { Ok(()) } else { output::print(text) }
    }
}
