//! `tandem tokenize`: the token ids of a text.

use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::Serialize;
use tandem::Error;

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
    let text = match (&args.text, &args.file) {
        (Some(text), _) => text.clone(),
        (None, file) => prompt::read_file(file.as_deref().unwrap_or(Path::new("-")))?,
    };
    let no_tokenizer = || Error::usage("random weights have no tokenizer; choose a real model");
    if args.model.as_deref().is_some_and(|m| m.starts_with("synth:")) {
        return Err(no_tokenizer().into());
    }
    let tokenizer = open::open(args.model.as_deref())?.tokenizer()?.ok_or_else(no_tokenizer)?;
    let special = !args.no_special;
    let ids = tokenizer.encode(&text, special, special)?;
    if args.json {
        let piece = |&id: &u32| String::from_utf8_lossy(&tokenizer.token_bytes(id)).into_owned();
        let pieces = ids.iter().map(piece).collect();
        return output::json(&Report { ids, pieces });
    }
    let lines: String = ids.iter().map(|id| format!("{id}\n")).collect();
    output::print(&lines)
}
