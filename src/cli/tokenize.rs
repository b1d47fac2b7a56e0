//! `tandem tokenize`: the token ids of a text.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use serde::Serialize;
use tandem::Error;
use tandem::text::{Json, Message};

use super::generate::variables::VariableArgs;
use super::generate::{answers, chat};
use super::{open, output, prompt};

/// Prints the token ids of a text, one per line.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model: a .gguf file, a folder, or a name that `tandem pull` knows
    /// [default: smollm2-135m, fetched on first use].
    #[arg(short, long, value_name = "MODEL")]
    pub model: Option<String>,
    /// The text; without it and without -f it is read from standard input.
    #[arg(value_name = "TEXT", conflicts_with = "file")]
    pub text: Option<String>,
    /// Read the text from a file (- is standard input), every byte of it.
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Treat control tokens written in the text (like <|im_end|>) as text, and add none at the beginning.
    #[arg(long)]
    pub no_special: bool,
    /// Put the text into the model's chat template, as `generate` does: the tokens of the whole prompt.
    #[arg(long, conflicts_with = "no_special")]
    pub chat: bool,
    /// Instead of a text: a conversation in FILE (- is standard input), a JSON list of objects with a role and a content.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["text", "file", "no_special"])]
    pub messages: Option<PathBuf>,
    /// System message for the chat template.
    #[arg(long, value_name = "S")]
    pub system: Option<String>,
    /// What the chat template gets.
    #[command(flatten)]
    pub variables: VariableArgs,
    /// Print one JSON object: {"ids":[...],"pieces":[...]}.
    #[arg(long)]
    pub json: bool,
}

#[derive(Serialize)]
struct Report {
    ids: Vec<u32>,
    /// The text of each token; bytes that do not form a character are U+FFFD.
    pieces: Vec<String>,
}

/// Tokenizes.
pub fn run(args: &Args) -> Result<()> {
    let in_template = args.chat || args.messages.is_some();
    if !in_template && (args.system.is_some() || args.variables.is_given()) {
        return Err(Error::usage("--system and --template-arg: are for the chat template; add --chat").into());
    }
    let text = match (&args.text, &args.file, &args.messages) {
        (_, _, Some(messages)) => prompt::read_file(messages)?,
        (Some(text), ..) => text.clone(),
        (None, file, None) => prompt::read_file(file.as_deref().unwrap_or(Path::new("-")))?,
    };
    let no_tokenizer = || Error::usage("random weights have no tokenizer; choose a real model");
    if args.model.as_deref().is_some_and(|m| m.starts_with("synth:")) {
        return Err(no_tokenizer().into());
    }
    let opened = open::open(args.model.as_deref())?;
    let tokenizer = Arc::new(opened.tokenizer()?.ok_or_else(no_tokenizer)?);
    let special = !args.no_special;
    let ids = if in_template {
        let messages = match &args.messages {
            Some(path) => messages(&prompt::name(path), &text)?,
            None => vec![Message::new("user", &text)],
        };
        let chat = chat(&opened, Some(tokenizer.clone()), args.system.as_deref(), &args.variables);
        answers(&chat, vec![chat.conversation(messages)]).remove(0)?
    } else {
        tokenizer.encode(&text, special, special)?
    };
    if args.json {
        let piece = |&id: &u32| String::from_utf8_lossy(&tokenizer.token_bytes(id)).into_owned();
        let pieces = ids.iter().map(piece).collect();
        return output::json(&Report { ids, pieces });
    }
    let lines: String = ids.iter().map(|id| format!("{id}\n")).collect();
    output::print(&lines)
}

/// The conversation in a file.
fn messages(name: &str, text: &str) -> Result<Vec<Message>> {
    let wrong = |why: String| Error::format(name, why);
    let json: Json = serde_json::from_str(text).map_err(|e| wrong(format!("not valid JSON: {e}")))?;
    let Json::List(list) = json else {
        return Err(wrong("a list of messages is wanted".into()).into());
    };
    if list.is_empty() {
        return Err(wrong("no messages".into()).into());
    }
    let message =
        |(i, m): (usize, Json)| Message::from_json(m).map_err(|e| wrong(format!("message {i}: {e}")).into());
    (1..).zip(list).map(message).collect()
}
