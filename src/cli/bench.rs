//! `tandem bench`: prefill and decode speed of a model.

use super::args::EngineArgs;

/// Measures prefill and decode speed.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model: a .gguf file, a folder, a name that `tandem pull` knows, or synth:NAME
    /// [default: smollm2-135m, fetched on first use].
    #[arg(short, long, value_name = "MODEL")]
    pub model: Option<String>,
    /// Prompt lengths to measure prefill with (0 skips it).
    #[arg(long, default_value = "512", value_delimiter = ',', value_name = "N,...")]
    pub prompt: Vec<u32>,
    /// Tokens to decode per measurement (0 skips it).
    #[arg(long, default_value_t = 128, value_name = "N")]
    pub r#gen: u32,
    /// Sequences decoded together.
    #[arg(long, default_value = "1", value_delimiter = ',', value_name = "B,...",
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub batch: Vec<u32>,
    /// Tokens already in the context when decoding starts.
    #[arg(long, default_value = "0", value_delimiter = ',', value_name = "D,...")]
    pub depth: Vec<u32>,
    /// Measurements of each kind; the median and the extremes are reported.
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeat: u32,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// How the engine runs.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Measures.
pub fn run(_args: &Args) -> anyhow::Result<()> {
    anyhow::bail!("bench: not built yet")
}
