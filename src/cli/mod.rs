//! The command line: parse, call the library, print. A file per subcommand.
//!
//! Exit codes: 0 done, 1 the run failed, 2 the request makes no sense (usage). An error is one
//! sentence on stderr, `tandem: error: ...`. Standard output carries results only; progress and logs
//! go to stderr. When the reader of standard output goes away (`tandem ... | head -1`), the command stops and exits
//! with 1.

mod args;
mod bench;
mod chart;
mod chat;
mod decision;
mod doctor;
mod figures;
mod flags;
mod generate;
mod inspect;
mod open;
mod output;
mod perplexity;
mod plan;
mod predict;
mod profile;
mod progress;
mod prompt;
mod pull;
mod records;
mod sampling;
mod serve;
mod simulate;
mod stopwatch;
mod targets;
mod timeline;
mod tokenize;
mod tune;

use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use tandem::open::Requests;

/// Runs large language models on one machine.
#[derive(Debug, Parser)]
#[command(name = "tandem", version, arg_required_else_help = true)]
struct Cli {
    /// More detail on stderr.
    #[arg(short, long, global = true, conflicts_with = "quiet", display_order = 900)]
    verbose: bool,
    /// Nothing on stderr but errors.
    #[arg(short, long, global = true, display_order = 901)]
    quiet: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Continue or answer a prompt.
    Generate(generate::Args),
    /// Answer requests over HTTP, with OpenAI's API.
    Serve(serve::Args),
    /// Talk with a model at the terminal.
    Chat(chat::Args),
    /// Print the token ids of a text.
    Tokenize(tokenize::Args),
    /// How well a model predicts a text.
    Perplexity(perplexity::Args),
    /// What is in a model.
    Inspect(inspect::Args),
    /// Fetch a model into the cache folder.
    Pull(pull::Args),
    /// Predict how a model would run on a machine, and compare the ways to run it.
    Plan(plan::Args),
    /// Run many requests by several strategies on a machine that need not be there.
    Simulate(simulate::Args),
    /// Measure what this machine can do, and keep it.
    Profile(profile::Args),
    /// Measure which kernel settings are best on this machine, and keep them.
    Tune(tune::Args),
    /// Measure prefill and decode speed.
    Bench(bench::Args),
    /// What this machine can do, what it cannot, and why.
    Doctor(doctor::Args),
}

/// The whole command: parses, runs, reports.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return unparsed(&error),
    };
    progress::set_verbosity(cli.verbose, cli.quiet);
    tandem::device::listen_to_notices(progress::note);
    tandem::device::self_test_opened_gpus(doctor::verdicts());
    match output::check_open().and_then(|()| run(&cli.command)).and_then(|()| output::flush()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            if !(cli.quiet && error.is::<output::Closed>()) {
                progress::error(&message(&error));
            }
            let usage = error.chain().any(|e| matches!(e.downcast_ref(), Some(tandem::Error::Usage(_))));
            ExitCode::from(if usage { 2 } else { 1 })
        }
    }
}

/// The error and its causes, each unless what is there already says it.
fn message(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |said, cause| match said.as_str() {
        "" => cause,
        s if s.contains(&cause) => said,
        _ => format!("{said}: {cause}"),
    })
}

fn run(command: &Command) -> anyhow::Result<()> {
    // A table in use cannot be changed, and `tune` begins with the defaults.
    if !matches!(command, Command::Tune(_))
        && let Some(notice) = tandem::profile::install_kept_tuning()
    {
        progress::note(&notice);
    }
    match command {
        Command::Generate(args) => {
            let many = if args.prompts.is_some() { Requests::Many } else { Requests::One };
            args.engine.check_for(many)?;
            generate::run(args)
        }
        Command::Chat(args) => {
            args.engine.check_for(Requests::One)?;
            chat::run(args)
        }
        Command::Tokenize(args) => tokenize::run(args),
        Command::Perplexity(args) => {
            args.engine.check_for(Requests::One)?;
            perplexity::run(args)
        }
        Command::Inspect(args) => inspect::run(args),
        Command::Plan(args) => plan::run(args),
        Command::Simulate(args) => simulate::run(args),
        Command::Profile(args) => profile::run(args),
        Command::Tune(args) => tune::run(args),
        Command::Pull(args) => pull::run(args),
        Command::Bench(args) => {
            let many = if args.trace.is_some() { Requests::Compared } else { Requests::One };
            args.engine.check_for(many)?;
            bench::run(args)
        }
        Command::Doctor(args) => doctor::run(args),
        Command::Serve(args) => {
            args.engine.check_for(Requests::Many)?;
            serve::run(args)
        }
    }
}

/// Help and version on stdout; a mistake as one sentence on stderr.
fn unparsed(error: &clap::Error) -> ExitCode {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            let text = error.render().to_string();
            match output::check_open().and_then(|()| output::print(&text)) {
                Ok(()) => ExitCode::SUCCESS,
                Err(_) => ExitCode::from(1),
            }
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            progress::raw(&error.render().to_string());
            ExitCode::from(2)
        }
        _ => {
            let words = std::env::args_os().map(|w| w.to_string_lossy().into_owned());
            progress::error(&sentence(error, words));
            ExitCode::from(2)
        }
    }
}

/// clap's report, which takes a paragraph per thought, in one line. `words` are the command line.
fn sentence(error: &clap::Error, mut words: impl Iterator<Item = String>) -> String {
    let text = error.render().to_string();
    let first: Vec<&str> = text.lines().take_while(|l| !l.trim().is_empty()).map(str::trim).collect();
    let mut line = first.join(" ");
    if let Some(rest) = line.strip_prefix("error: ") {
        line = rest.to_owned();
    }
    let tips: Vec<_> = text.lines().filter_map(|l| l.trim().strip_prefix("tip: ")).collect();
    if !tips.is_empty() {
        line = format!("{line} ({})", tips.join("; "));
    }
    match words.find(|w| Cli::command().find_subcommand(w).is_some()) {
        Some(command) => format!("{line}; see tandem {command} --help"),
        None => format!("{line}; see tandem --help"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn no_cause_is_told_twice() {
        let io = std::io::Error::other("no luck");
        let error = anyhow::Error::new(tandem::Error::io("some/file", io)).context("loading");
        assert_eq!(message(&error), "loading: some/file: no luck");
    }

    #[test]
    fn mistakes_become_one_sentence() {
        for (line, want) in [
            ("tandem frobnicate", "unrecognized subcommand 'frobnicate'"),
            ("tandem pull", "the following required arguments were not provided"),
            ("tandem generate --tmp 1", "unexpected argument '--tmp' found"),
            ("tandem generate -n many x", "invalid value 'many'"),
        ] {
            let error = Cli::try_parse_from(line.split(' ')).unwrap_err();
            let text = sentence(&error, line.split(' ').map(Into::into));
            assert!(
                text.starts_with(want) && text.contains("--help") && !text.contains('\n'),
                "{line}: {text}"
            );
        }
    }
}
