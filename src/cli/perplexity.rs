//! `tandem perplexity`: how well a model predicts a text.

use std::path::PathBuf;

use tandem::Error;
use tandem::engine::{Batcher, Event, Finish, Request};
use tandem::open::{Demand, RunWork};

use super::args::EngineArgs;
use super::{open, output, progress, prompt};

/// Context of a window unless `--ctx` says otherwise.
const WINDOW: usize = 2048;

/// Rows per step: all logits of a step are in memory at once, 4·V bytes for each row.
const STEP: usize = 128;

/// Measures how well a model predicts a text.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model: a .gguf file, a folder, or a name that `tandem pull` knows
    /// [default: smollm2-135m, fetched on first use].
    #[arg(short, long, value_name = "MODEL")]
    pub model: Option<String>,
    /// The text (- is standard input).
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// How the engine runs.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Measures the perplexity. The text is divided into windows of the context (at most `--ctx`, default 2048), each of which
/// begins with the tokens that the model expects in front of a text; every token behind the first is predicted from those before
/// it in its window. Each token of the text is scored once at most.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let text = prompt::read_file(&args.file)?;
    let opened = open::open(args.model.as_deref())?;
    let Some(tokenizer) = opened.tokenizer()? else {
        return Err(Error::usage("random weights have no tokenizer, so there is nothing to predict").into());
    };
    // Each window begins as the model expects a text to begin; what would follow a text is no part of it.
    let beginning = tokenizer.beginning();
    let ids = tokenizer.encode(&text, false, false)?;
    if beginning.len() + ids.len() < 2 {
        return Err(Error::usage(format!(
            "{} has {} tokens; at least 2 are needed to predict one",
            prompt::name(&args.file),
            ids.len()
        ))
        .into());
    }
    tandem::text::check_tokens(&ids, opened.loaded.spec.vocab)?;
    let max_context = opened.loaded.spec.max_context;
    if let Some(ctx) = args.engine.ctx.filter(|&c| c as usize > max_context) {
        return Err(Error::usage(format!("--ctx {ctx}: the model was made for at most {max_context}")).into());
    }
    let context = args.engine.ctx.map_or(WINDOW.min(max_context), |c| c as usize);
    let context = context.min(beginning.len() + ids.len());
    // One to predict from, and one to predict.
    let least = beginning.len().max(1) + 1;
    if context < least {
        return Err(Error::usage(format!("--ctx: at least {least} tokens are needed to predict one")).into());
    }
    let work = RunWork { prompt: context, gen_len: 0, batch: 1 };
    let demand = Demand { context, sequences: 1, logits: STEP, pages: None, work };
    let mut running = open::engine(&opened, &args.engine, &demand)?;
    let windows: Vec<Vec<u32>> =
        ids.chunks(context - beginning.len()).map(|part| [beginning, part].concat()).collect();
    // The beginning is given, not predicted.
    let given = beginning.len().max(1);
    let total: usize = windows.iter().map(|window| window.len() - given).sum();
    let bar = (total > 1024).then(|| progress::count_bar(total as u64, "predicting tokens"));
    let mut requests = Batcher::new(running.engine);
    let (mut nll, mut scored, window_count) = (0f64, 0usize, windows.len());
    for window in windows {
        // Nothing is generated: every row scores the token behind it.
        let request = Request { prompt: window, prompt_logprobs: Some(0), ..Request::default() };
        let (_, events) = requests.submit(request)?;
        // Position of the next token that is scored.
        let mut at = 1;
        while !requests.is_idle() {
            requests.step();
            for event in events.try_iter() {
                match event {
                    Event::Prompt(scores) => {
                        let predicted = &scores[given.saturating_sub(at).min(scores.len())..];
                        nll -= predicted.iter().map(|score| score.token).sum::<f64>();
                        scored += predicted.len();
                        at += scores.len();
                    }
                    Event::End(Finish::Failed(error)) => return Err(open::failed(error).into()),
                    _ => {}
                }
            }
            if let Some(bar) = &bar {
                bar.set(scored as u64);
            }
        }
    }
    running.engine = requests.into_engine();
    if let Some(bar) = &bar {
        bar.finish();
    }
    let mean = nll / scored as f64;
    if !mean.is_finite() {
        return Err(open::not_numbers().into());
    }
    if args.json {
        return output::json(&serde_json::json!({
            "tokens": scored,
            "mean_nll": mean,
            "perplexity": mean.exp(),
            "windows": { "count": window_count, "tokens": context, "beginning": beginning },
            "plan": running.plan(&args.engine),
        }));
    }
    output::line(&format!(
        "{scored} tokens predicted; mean negative log-likelihood {mean:.5}, perplexity {:.4}",
        mean.exp()
    ))
}
