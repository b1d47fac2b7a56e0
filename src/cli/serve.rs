//! `tandem serve`: an OpenAI-compatible server.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use tandem::engine::{Engine, Service, Shutdown};
use tandem::hub::DEFAULT_MODEL;
use tandem::open::{Needs, RouterLearning};
use tandem::serve::{Cors, Keys, Model, Options, Server};
use tandem::text::Grammars;
use tandem::{Error, Result};

use super::args::EngineArgs;
use super::generate::chat;
use super::generate::variables::VariableArgs;
use super::open::{self, Notices};
use super::sampling::SamplingArgs;
use super::targets::TargetArgs;
use super::{output, progress, prompt};

/// Serves a model over HTTP, with OpenAI's API (docs/serve.md). Without --ctx, a sequence has the model's context, at most
/// 4096 tokens.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// The model: a .gguf file, a folder, a name that `tandem pull` knows, or synth:NAME
    /// [default: smollm2-135m, fetched on first use].
    #[arg(short, long, value_name = "MODEL")]
    pub model: Option<String>,
    /// The address to listen at; 0.0.0.0 is all of this machine's.
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    pub host: String,
    /// The port; 0 is any that is free.
    #[arg(short, long, value_name = "PORT", default_value_t = 8080)]
    pub port: u16,
    /// A key that clients must show, as a bearer token or in X-Api-Key; may be given several times. Others on this machine may
    /// see it: prefer --api-key-file.
    #[arg(long, value_name = "KEY")]
    pub api_key: Vec<String>,
    /// Keys in the lines of a file.
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// An origin (https://HOST[:PORT]) whose pages may use the server from a browser, or * for all; may be given several times.
    #[arg(long, value_name = "ORIGIN")]
    pub cors: Vec<String>,
    /// The model's name in answers [default: as of -m, without its folder].
    #[arg(long, value_name = "NAME")]
    pub served_name: Option<String>,
    /// Sequences that are computed at a time, each with memory for a whole context [default: as many as memory has room for, at
    /// most 64].
    #[arg(long, value_name = "N", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub sequences: Option<u32>,
    /// Sequences that wait at most; further requests get 429.
    #[arg(long, value_name = "N", default_value_t = 1024, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(0..=1 << 14))]
    pub max_queue: u32,
    /// Sequences of one key that wait at most, beside as many as are computed at a time; further requests of that key get 429
    /// [default: as --max-queue].
    #[arg(long, value_name = "N", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(0..=1 << 14))]
    pub max_queue_per_key: Option<u32>,
    /// Whether requests that begin as earlier ones did share what was computed of them, as far as memory has room.
    #[arg(long, value_enum, value_name = "ON|OFF", default_value_t = PrefixCache::On)]
    pub prefix_cache: PrefixCache,
    /// After SIGTERM or SIGINT, seconds for requests to end before they are cancelled.
    #[arg(long, value_name = "S", default_value_t = 30, allow_negative_numbers = true)]
    pub drain_seconds: u32,
    /// Print the address as one JSON object when listening begins.
    #[arg(long)]
    pub json: bool,
    /// What is asked of latency.
    #[command(flatten)]
    pub targets: TargetArgs,
    /// What the chat template gets.
    #[command(flatten)]
    pub variables: VariableArgs,
    /// How the engine runs.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Whether pages are kept for requests that begin alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
#[allow(missing_docs)]
pub enum PrefixCache {
    On,
    Off,
}

/// Tokens of a sequence at most, unless --ctx says otherwise: each has memory for so many.
const CONTEXT: usize = 4096;
/// Sequences at a time at most, unless --sequences says otherwise: beyond, each waits longer for its tokens and few steps get
/// cheaper.
const SEQUENCES: usize = 64;
/// Temperature where neither a request nor the model names one, as in OpenAI's API.
const TEMPERATURE: f32 = 1.0;
/// How often it is checked that the engine is there.
const CHECK: Duration = Duration::from_millis(250);
/// Time for the last bytes of answers to leave.
const GOODBYE: Duration = Duration::from_secs(2);

/// What the main thread waits for.
enum News {
    Signal(&'static str),
    Loaded(anyhow::Result<Box<Loaded>>),
}

/// A model in memory.
struct Loaded {
    service: Service,
    model: Model,
    learning: Option<RouterLearning>,
    /// The engine's, which are told when this is dropped.
    _notices: Notices,
}

/// Serves until a signal ends it.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let targets = args.targets.targets()?;
    let server = Server::start(options(args)?)?;
    let (sender, news) = channel();
    let signals = sender.clone();
    server.on_signals(move |name| signals.send(News::Signal(name)).is_ok())?;
    let address = server.address();
    progress::note(&format!("listening on http://{address}"));
    if args.json {
        output::json(&serde_json::json!({ "listening": format!("http://{address}") }))?;
    }
    let (drain, queue) = (Duration::from_secs(args.drain_seconds.into()), args.max_queue as usize);
    let args = args.clone();
    std::thread::Builder::new().name("tandem-load".into()).spawn(move || {
        let loaded = load(&args, targets, queue);
        // If nobody waits for it any more, the program is about to end.
        let _ = sender.send(News::Loaded(loaded.map(Box::new)));
    })?;
    let loaded = match news.recv()? {
        News::Loaded(loaded) => loaded?,
        News::Signal(name) => {
            progress::note(&format!("{name} while the model is loaded"));
            return Ok(());
        }
    };
    let Loaded { service, model, learning, _notices } = *loaded;
    let (context, sequences) = (model.context, model.sequences);
    server.ready(model);
    progress::note(&format!("ready: {sequences} sequences at a time, {context} tokens each"));
    let name = wait(&news, &service)?;
    let mut engine = end(server, service, name, drain, &news)?;
    open::keep_router(learning, &mut engine);
    Ok(())
}

fn options(args: &Args) -> Result<Options> {
    let mut keys = Keys::new(args.api_key.iter().map(String::as_str))?;
    if let Some(path) = &args.api_key_file {
        let in_file = Keys::in_lines(&prompt::read_file(path)?);
        keys = keys
            .and(in_file.map_err(|e| Error::usage(format!("--api-key-file {}: {e}", prompt::name(path))))?);
    }
    let name = args.served_name.clone().unwrap_or_else(|| name(args.model.as_deref()));
    let cors = Cors::new(args.cors.iter().map(String::as_str));
    Ok(Options {
        cors: cors.map_err(|e| Error::usage(format!("--cors: {e}")))?,
        host: args.host.clone(),
        port: args.port,
        name,
        keys,
        queue: args.max_queue as usize,
        queue_per_key: args.max_queue_per_key.map(|n| n as usize),
        log: Arc::new(|line, detail| if detail { progress::detail(line) } else { progress::note(line) }),
        ..Options::default()
    })
}

/// A model's name without its folder.
fn name(model: Option<&str>) -> String {
    let name = model.unwrap_or(DEFAULT_MODEL);
    let path = Path::new(name);
    match path.file_name().filter(|_| path.exists()) {
        Some(file) => {
            let file = file.to_string_lossy();
            file.strip_suffix(".gguf").unwrap_or(&file).to_owned()
        }
        None => name.to_owned(),
    }
}

/// Loads the model and starts its service.
fn load(args: &Args, targets: tandem::sched::Targets, queue: usize) -> anyhow::Result<Loaded> {
    let opened = open::open(args.model.as_deref())?;
    let (spec, defaults) = (&opened.loaded.spec, &opened.loaded.sampling);
    let tokenizer = opened.tokenizer()?.map(Arc::new);
    let sampling = SamplingArgs::default();
    let lists = sampling.lists(defaults, &opened.loaded.eos_ids);
    let mut params = sampling.resolve(defaults).params;
    if defaults.temperature.is_none() {
        params.temperature = TEMPERATURE;
    }
    lists.put(&mut params);
    let ending = lists.ending(tokenizer.as_deref());
    let chat = chat(&opened, tokenizer.clone(), None, &args.variables);
    let context = args.engine.ctx.map_or(spec.max_context.min(CONTEXT), |c| c as usize);
    let each = (context / 2, context - context / 2);
    let n = args.sequences.map_or(SEQUENCES, |n| n as usize);
    let needs = Needs::new(&vec![each; n], Some(context), spec.max_context);
    let (mut scheduled, notices) = open::scheduled(&opened, &args.engine, &needs, args.sequences)?;
    let placement = open::placement(&scheduled);
    let strategy = scheduled.strategies(&args.engine.settings()).remove(0);
    scheduled.set_targets(targets);
    let learning = opened.learn_router(&args.engine.settings(), scheduled.engine());
    let mut requests = scheduled.requests(&strategy);
    requests.set_tokenizer(tokenizer.clone());
    requests.keep_prefixes(args.prefix_cache == PrefixCache::On);
    requests.count_busy();
    let sequences = requests.engine().sequences();
    let (vocab, context) = (spec.vocab, requests.engine().context());
    let service = Service::with_capacity(requests, sequences + queue)?;
    let client = service.client();
    let grammars = Grammars::new(tokenizer.clone(), vocab);
    let sampling = params;
    let model = Model {
        client,
        chat,
        tokenizer,
        grammars,
        vocab,
        context,
        sequences,
        sampling,
        ending,
        targets,
        placement,
    };
    Ok(Loaded { service, model, learning, _notices: notices })
}

/// Waits for a signal, and returns its name.
///
/// # Errors
/// If the engine ends by itself.
fn wait(news: &Receiver<News>, service: &Service) -> Result<&'static str> {
    loop {
        match news.recv_timeout(CHECK) {
            Ok(News::Signal(name)) => return Ok(name),
            Ok(News::Loaded(_)) | Err(RecvTimeoutError::Timeout) => service.client().check()?,
            Err(RecvTimeoutError::Disconnected) => return Ok("no signals"),
        }
    }
}

/// Lets requests end, until the deadline or another signal. Returns the engine that ran them.
fn end(
    server: Server,
    service: Service,
    name: &str,
    drain: Duration,
    news: &Receiver<News>,
) -> anyhow::Result<Engine> {
    server.drain();
    let (open, until) = (service.client().in_flight(), Instant::now() + drain);
    progress::note(&format!("{name}: {open} sequences in flight have {} s to end", drain.as_secs()));
    let idle = loop {
        if server.is_idle_within(CHECK.min(until.saturating_duration_since(Instant::now()))) {
            break true;
        }
        if matches!(news.try_recv(), Ok(News::Signal(_))) || Instant::now() >= until {
            break false;
        }
    };
    if !idle {
        progress::note(&format!("{} sequences are cancelled", service.client().in_flight()));
    }
    // Streams get their end before connections are closed.
    let engine = service.shutdown(Shutdown::Cancel)?;
    server.end(GOODBYE);
    Ok(engine)
}
