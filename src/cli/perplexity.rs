//! `tandem perplexity`: how well a model predicts a text.

use std::path::PathBuf;

use super::args::EngineArgs;

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

/// Measures.
pub fn run(_args: &Args) -> anyhow::Result<()> {
    anyhow::bail!("perplexity: not built yet")
}
