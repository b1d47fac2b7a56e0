//! `tandem generate`: from a prompt to text.

use std::path::PathBuf;

use super::args::{EngineArgs, real};

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
    #[arg(short = 'n', long = "max-tokens", default_value_t = 512, value_name = "N",
          value_parser = clap::value_parser!(u32).range(0..))]
    pub max_tokens: u32,
    /// Continue the prompt as it is, without the model's chat template.
    #[arg(long, conflicts_with = "system")]
    pub raw: bool,
    /// System message for the chat template.
    #[arg(long, value_name = "S")]
    pub system: Option<String>,
    /// Stop at this text, which is not printed; may be given several times.
    #[arg(long, value_name = "STR", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub stop: Vec<String>,
    /// Sampling temperature; 0 always takes the most likely token.
    #[arg(long, default_value_t = 0.0, value_name = "T", help_heading = "Sampling",
          value_parser = |s: &str| real(s, 0.0..=100.0, "the temperature (0 to 100)"))]
    pub temp: f32,
    /// Only among the K most likely tokens; 0 is all.
    #[arg(long, default_value_t = 0, value_name = "K", help_heading = "Sampling")]
    pub top_k: u32,
    /// Only among the most likely tokens that together have this probability.
    #[arg(long, default_value_t = 1.0, value_name = "P", help_heading = "Sampling",
          value_parser = |s: &str| real(s, f32::MIN_POSITIVE..=1.0, "the probability (above 0, up to 1)"))]
    pub top_p: f32,
    /// Only among tokens at least this likely, relative to the most likely one.
    #[arg(long, default_value_t = 0.0, value_name = "P", help_heading = "Sampling",
          value_parser = |s: &str| real(s, 0.0..=1.0, "the probability (0 to 1)"))]
    pub min_p: f32,
    /// Divide the score of tokens already seen; 1 is off.
    #[arg(long, default_value_t = 1.0, value_name = "R", help_heading = "Sampling",
          value_parser = |s: &str| real(s, f32::MIN_POSITIVE..=100.0, "the penalty (above 0, up to 100)"))]
    pub repeat_penalty: f32,
    /// Seed of the sampler.
    #[arg(long, default_value_t = 0, value_name = "S", help_heading = "Sampling")]
    pub seed: u64,
    /// With --json: log-probabilities of each token and of the K most likely ones.
    #[arg(long, value_name = "K", requires = "json", value_parser = clap::value_parser!(u32).range(0..=1000))]
    pub logprobs: Option<u32>,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub json: bool,
    /// How the engine runs.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Generates.
pub fn run(_args: &Args) -> anyhow::Result<()> {
    anyhow::bail!("generate: not built yet")
}
