//! `tandem chat`: a conversation at the terminal.
//!
//! Each turn is a request whose prompt begins with what was said before; its pages of keys and values are still there, so
//! that a turn computes what is new ([`Batcher::keep_prefixes`]).

mod command;
mod history;
mod reader;
mod turn;

use std::path::PathBuf;
use std::sync::Arc;

use tandem::Error;
use tandem::engine::Batcher;
use tandem::open::{Demand, RunWork};

use self::command::{Command, HELP};
use self::history::History;
use self::reader::{LineReader, Typed};
use self::turn::{ChatStats, Interrupts, Settings};
use super::args::EngineArgs;
use super::generate::variables::VariableArgs;
use super::generate::{chat, told};
use super::sampling::SamplingArgs;
use super::{open, output, progress};

/// Tokens of a conversation at most, unless --ctx says otherwise.
const CONTEXT: usize = 8192;

/// Talks with a model; `/help` lists what can be said to the program. Without a terminal, each line of standard input is a turn.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model: a .gguf file, a folder, a name that `tandem pull` knows, or synth:NAME
    /// [default: smollm2-135m, fetched on first use].
    #[arg(short, long, value_name = "MODEL")]
    pub model: Option<String>,
    /// What the model is told before the conversation.
    #[arg(long, value_name = "TEXT", conflicts_with = "load")]
    pub system: Option<String>,
    /// Go on with a conversation that /save has written.
    #[arg(long, value_name = "FILE")]
    pub load: Option<PathBuf>,
    /// Most tokens of an answer [default: as many as the context has room for].
    #[arg(short = 'n', long, value_name = "N", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..))]
    pub max_tokens: Option<u32>,
    /// How answers are sampled.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// What the chat template gets.
    #[command(flatten)]
    pub variables: VariableArgs,
    /// How the engine runs.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Talks until the end of the input, or `/bye`.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let mut history = match &args.load {
        Some(path) => History::read(path)?,
        None => History::default(),
    };
    if let Some(system) = &args.system {
        history.set_system(Some(system.clone()));
    }
    let opened = open::open(args.model.as_deref())?;
    let tokenizer = opened.tokenizer()?.map(Arc::new);
    let mut sampling = args.sampling.resolve(&opened.loaded.sampling);
    sampling.ignored.iter().for_each(|sentence| progress::note(sentence));
    let lists = args.sampling.lists(&opened.loaded.sampling, &opened.loaded.eos_ids);
    lists.put(&mut sampling.params);
    let ending = lists.ending(tokenizer.as_deref());
    ending.withhold(&mut sampling.params);
    let chat = chat(&opened, tokenizer.clone(), None, &args.variables);
    let most = opened.loaded.spec.max_context;
    let context = args.engine.context().unwrap_or(CONTEXT.min(most));
    let work = RunWork { prompt: context / 4, gen_len: context / 4, batch: 1 };
    let demand = Demand { context, sequences: 1, logits: 1, pages: None, work };
    let mut running = open::engine(&opened, &args.engine, &demand)?;
    let learning = opened.learn_router(&args.engine.settings(), &mut running.engine);
    let mut requests = Batcher::new(running.engine);
    requests.set_tokenizer(tokenizer);
    requests.keep_prefixes(true);
    let interrupts = Interrupts::listen()?;
    let settings =
        Settings { params: sampling.params, ending, max_tokens: args.max_tokens.map(|n| n as usize) };
    let mut talk = Talk { requests, chat, settings, history, stats: ChatStats::default(), interrupts };
    let mut reader = LineReader::new()?;
    if reader.is_terminal() {
        progress::note(&format!("{}: /help for help, Ctrl-D to leave", opened.name));
    }
    let talked = talk.go_on(&mut reader);
    open::keep_router(learning, &mut talk.requests.into_engine());
    talked
}

/// A conversation under way.
struct Talk {
    requests: Batcher,
    chat: tandem::text::Chat,
    settings: Settings,
    history: History,
    stats: ChatStats,
    interrupts: Interrupts,
}

impl Talk {
    fn go_on(&mut self, reader: &mut LineReader) -> anyhow::Result<()> {
        let alone = !reader.is_terminal();
        loop {
            let text = match reader.next()? {
                Typed::Text(text) => text,
                Typed::Interrupted => continue,
                Typed::End => return Ok(()),
            };
            let done = match Command::parse(&text) {
                Ok(Some(Command::Bye)) => return Ok(()),
                Ok(Some(command)) => self.obey(command),
                Ok(None) if text.trim().is_empty() => Ok(()),
                Ok(None) => self.answer(&text),
                Err(why) => Err(Error::usage(why).into()),
            };
            match done {
                Ok(()) => {}
                // Nobody is there to try something else, or nobody reads.
                Err(error) if alone || error.is::<output::Closed>() => return Err(error),
                Err(error) => progress::error(&error.to_string()),
            }
        }
    }

    fn obey(&mut self, command: Command) -> anyhow::Result<()> {
        match command {
            Command::Help => output::print(HELP)?,
            Command::System(text) => {
                self.history.set_system(text);
                progress::note("the conversation begins anew");
            }
            Command::Clear => {
                self.history.clear();
                progress::note("the conversation begins anew");
            }
            Command::Save(path) => {
                self.history.write(&path)?;
                progress::note(&format!("{} messages in {}", self.history.len(), path.display()));
            }
            Command::Load(path) => {
                self.history = History::read(&path)?;
                progress::note(&format!("{} messages from {}", self.history.len(), path.display()));
            }
            Command::Set(name, value) => {
                let said = self.settings.set(&name, &value)?;
                progress::note(&said);
            }
            Command::Stats => output::line(&self.stats.describe(&self.requests))?,
            Command::Bye => {}
        }
        Ok(())
    }

    /// Answers, and remembers both if there is an answer.
    fn answer(&mut self, text: &str) -> anyhow::Result<()> {
        let conversation = self.chat.conversation(self.history.with(text));
        let prompts = self.chat.answers(vec![conversation]);
        prompts.notes.iter().for_each(|note| progress::detail(note));
        let tokens = prompts.tokens.into_iter().next().expect("one conversation")?;
        let told = told(&self.chat, &tokens, false);
        let answer =
            turn::run(&mut self.requests, (tokens, told), &self.settings, &mut self.stats, &self.interrupts)?;
        self.history.push(text, answer);
        Ok(())
    }
}

/// The error for a file that is no conversation.
fn no_conversation(path: &std::path::Path, why: impl std::fmt::Display) -> Error {
    Error::format(path.display().to_string(), format!("no conversation as /save writes it: {why}"))
}
