//! Options that several subcommands share, and how their values are parsed.

use std::str::FromStr;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use tandem::cache::KvType;
use tandem::host::NumaWish;
use tandem::open::{Device, Requests, Settings, Strategy};
use tandem::plan::Fixed;
use tandem::program::Policy;
use tandem::{Error, Result};

use super::progress;

/// Cohorts that asynchronous overlap may have under way, as `--cohorts` takes them.
pub const COHORTS: std::ops::RangeInclusive<i64> = 1..=8;

/// What schedulers expect of the lengths of answers: as long as those that have ended by themselves, or as long as they may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)] // help of single values would double the length of all help
pub enum LengthsChoice {
    Learned,
    Allowed,
}

/// How the engine runs.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Engine")]
pub struct EngineArgs {
    /// Where to run: auto (a GPU if there is one and the model fits it), cpu, cuda[:i], emulated or emulated:kernels.
    /// emulated:HARDWARE tells the time that a machine of hardware/ would take, like emulated:t4-xeon (docs/hybrid.md).
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    pub device: Device,
    /// How CPU and GPU share the work: auto (the fastest, as predicted), cpu-only, gpu-only, greedy, stream, helm, lia or,
    /// of a mixture of experts, experts, ncmoe or cpu-moe (docs/hybrid.md); many requests also by fastdecode, neo or apex, and bench --trace by several of these, gpu-only and
    /// auto (docs/requests.md).
    #[arg(long = "strategy", value_name = "STRATEGY", value_parser = strategy(), value_delimiter = ',', default_value = "auto")]
    pub strategies: Vec<Strategy>,
    /// What is fixed of the placement.
    #[command(flatten)]
    pub fixed: FixedArgs,
    /// The machine that times are predicted for: auto (this one), a name from hardware/, or a TOML file (docs/plan.md).
    #[arg(long, value_name = "auto|NAME|FILE", default_value = "auto")]
    pub hardware: String,
    /// Pages of keys and values (32 tokens each) on the GPU, in each block that keeps them there; the oldest of the others are
    /// kept by the CPU [default: all, or as many as fit].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), allow_negative_numbers = true)]
    pub kv_pages: Option<u32>,
    /// Cohorts of the host's requests that asynchronous overlap (apex, auto) has under way at a time, of many requests [default: 1].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(COHORTS), allow_negative_numbers = true)]
    pub cohorts: Option<u32>,
    /// What schedulers expect of the lengths of answers, of many requests: as long as those that have ended, or as long as allowed
    /// [default: learned].
    #[arg(long, value_enum, value_name = "HOW")]
    pub lengths: Option<LengthsChoice>,
    /// How pages that left the GPU are attended: by the CPU in place, or streamed to the GPU [default: in each
    /// step the way of the least predicted time].
    #[arg(long, value_enum, value_name = "HOW")]
    pub far: Option<FarChoice>,
    /// Most memory to use on the GPU, like 6GiB [default: all that is free].
    #[arg(long, value_parser = size, value_name = "SIZE", allow_hyphen_values = true)]
    pub gpu_memory: Option<u64>,
    /// Threads, the calling one included, at most one per core this process may use [default: one per core].
    #[arg(short, long, value_parser = clap::value_parser!(u32).range(1..=1024), value_name = "N",
          allow_negative_numbers = true)]
    pub threads: Option<u32>,
    /// Memory for weights on the host: NUMA or CXL nodes, page by page over several, like 1 or 1,2, or interleave for all
    /// (`tandem doctor` lists them; with --device emulated:HARDWARE those that it describes) [default: where the system
    /// puts them].
    #[arg(long, value_name = "NODES|interleave", allow_hyphen_values = true)]
    pub weights_node: Option<NumaWish>,
    /// A sequence's results do not depend on what else is in the batch, nor on how it was split, nor (with --device emulated) on what
    /// is computed where.
    #[arg(long)]
    pub deterministic: bool,
    /// Context length in tokens [default: as long as the prompt and the answer, at most the model's].
    #[arg(short, long, alias = "ctx-size", value_parser = clap::value_parser!(u32).range(1..), value_name = "N",
          allow_negative_numbers = true)]
    pub ctx: Option<u32>,
    /// Storage of keys and values: 16-bit floats, or q8: 8 bits, about half the memory [default: bf16; f16 on a GPU without bfloat16].
    #[arg(long, alias = "kv", value_parser = kv_type())]
    pub kv_type: Option<KvType>,
    /// Of a mixture of experts whose blocks are divided between GPU and CPU, leave the experts where they are at first, whatever the
    /// routers choose [default: those that are chosen more often come to the GPU].
    #[arg(long)]
    pub fixed_experts: bool,
    /// Prompt tokens per forward pass [default: chosen by the engine].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65536), value_name = "N",
          allow_negative_numbers = true)]
    pub chunk: Option<u32>,
}

impl EngineArgs {
    /// As the library takes them.
    pub fn settings(&self) -> Settings {
        Settings {
            device: self.device.clone(),
            strategies: self.strategies.clone(),
            fixed: self.fixed.fixed(),
            hardware: self.hardware.clone(),
            kv_pages: self.kv_pages.map(|n| n as usize),
            far: self.far.map(Into::into),
            cohorts: self.cohorts.map(|n| n as usize),
            learns_lengths: self.lengths.map(|how| how == LengthsChoice::Learned),
            gpu_memory: self.gpu_memory,
            threads: self.threads.map(|n| n as usize),
            weights_node: self.weights_node.clone(),
            deterministic: self.deterministic,
            kv_type: self.kv_type,
            fixed_experts: self.fixed_experts,
            chunk: self.chunk.map(|n| n as usize),
        }
    }

    /// Returns an error for contradictory options, before anything is fetched or read.
    ///
    /// # Errors
    /// As [`Settings::check`].
    pub fn check_for(&self, requests: Requests) -> Result<()> {
        let settings = self.settings();
        if let [_, second, ..] = self.strategies[..]
            && requests != Requests::Compared
        {
            let second = second.name();
            return Err(Error::usage(format!(
                "--strategy: one is wanted, and there is {second}, too; bench --trace compares several"
            )));
        }
        if let Some(why) = settings.of_many().filter(|_| requests == Requests::One) {
            return Err(Error::usage(format!("{why}; use it with generate --prompts or bench --trace")));
        }
        settings.check(requests)?;
        let allowed = tandem::host::allowed_cores();
        if let Some(threads) = self.threads.filter(|&t| t as usize > allowed) {
            progress::note(&format!(
                "--threads {threads}: this process may use {allowed} cores (affinity, cgroup quota); it runs {allowed} threads, \
                 since more would wait for each other"
            ));
        }
        Ok(())
    }

    /// The context that `--ctx` asks for.
    pub fn context(&self) -> Option<usize> {
        self.ctx.map(|n| n as usize)
    }
}

/// What is fixed of a strategy's placement: a flag selects the strategy that it is of.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct FixedArgs {
    /// HELM: units on the CPU, counted from the embedding over the blocks to the head [default: the fastest that fits].
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32), allow_negative_numbers = true)]
    pub boundary: Option<u32>,
    /// LIA: blocks that stay on the GPU [default: as many as fit].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32), allow_negative_numbers = true)]
    pub pinned: Option<u32>,
    /// LIA: who computes the six sublayers of the other blocks, for prompts and in decode (1 is the CPU)
    /// [default: the fastest].
    #[arg(long, value_name = "VECTORS")]
    pub policy: Option<Policies>,
    /// ncmoe, of a mixture of experts: blocks, the first ones, whose experts are on the CPU [default: as few as fit].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32), allow_negative_numbers = true)]
    pub n_cpu_moe: Option<u32>,
    /// experts, of a mixture of experts: experts of each block on the GPU, the others on the CPU [default: the fastest that fits].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32), allow_negative_numbers = true)]
    pub gpu_experts: Option<u32>,
}

impl FixedArgs {
    /// As planners take it.
    pub fn fixed(&self) -> Fixed {
        let policy = self.policy.unwrap_or_default();
        Fixed {
            boundary: self.boundary.map(|k| k as usize),
            pinned: self.pinned.map(|p| p as usize),
            prefill: policy.prefill,
            decode: policy.decode,
            experts_on_host: self.n_cpu_moe.map(|n| n as usize),
            gpu_experts: self.gpu_experts.map(|n| n as usize),
        }
    }
}

/// LIA's vectors, as far as given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Policies {
    /// For prompts.
    pub prefill: Option<Policy>,
    /// For decode rows.
    pub decode: Option<Policy>,
}

impl FromStr for Policies {
    type Err = String;

    /// `prefill=0,0,0,0,0,0,decode=1,1,1,1,1,1`, or one of them.
    fn from_str(text: &str) -> Result<Policies, String> {
        let bad = || {
            "six bits for each phase are wanted, 1 is the CPU, like prefill=0,0,0,0,0,0,decode=1,1,1,1,1,1"
                .to_owned()
        };
        let mut found = Policies::default();
        let mut rest = text;
        while !rest.is_empty() {
            let (name, tail) = rest.split_once('=').ok_or_else(bad)?;
            let next = tail.find(|c: char| c.is_ascii_alphabetic());
            let (bits, after) = match next {
                Some(at) => (tail[..at].strip_suffix(',').ok_or_else(bad)?, &tail[at..]),
                None => (tail, ""),
            };
            let bits: Vec<bool> = bits
                .split(',')
                .map(|bit| match bit {
                    "0" => Ok(false),
                    "1" => Ok(true),
                    _ => Err(bad()),
                })
                .collect::<Result<_, _>>()?;
            let bits: [bool; 6] = bits.try_into().map_err(|_| bad())?;
            let vector = match name {
                "prefill" => &mut found.prefill,
                "decode" => &mut found.decode,
                _ => return Err(bad()),
            };
            if vector.replace(Policy::from_bits(bits)).is_some() {
                return Err(bad());
            }
            rest = after;
        }
        if found == Policies::default() { Err(bad()) } else { Ok(found) }
    }
}

/// How pages of keys and values that left the GPU are attended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)]
pub enum FarChoice {
    Attend,
    Stream,
}

impl From<FarChoice> for tandem::program::Far {
    fn from(far: FarChoice) -> tandem::program::Far {
        match far {
            FarChoice::Attend => tandem::program::Far::Attend,
            FarChoice::Stream => tandem::program::Far::Stream,
        }
    }
}

/// A strategy by its name.
fn strategy() -> impl TypedValueParser<Value = Strategy> {
    let named =
        |name: String| Strategy::ALL.into_iter().find(|s| s.name() == name).expect("one of the names");
    PossibleValuesParser::new(Strategy::ALL.map(Strategy::name)).map(named)
}

/// A type of keys and values by its name; `q8_0` is what llama.cpp calls its own of 8 bits.
pub fn kv_type() -> impl TypedValueParser<Value = KvType> {
    let names = KvType::ALL.map(|t| {
        let name = PossibleValue::new(t.name());
        if t == KvType::Q8 { name.alias("q8_0") } else { name }
    });
    let named = |name: String| match name.as_str() {
        "q8_0" => KvType::Q8,
        name => KvType::ALL.into_iter().find(|t| t.name() == name).expect("one of the names"),
    };
    PossibleValuesParser::new(names).map(named)
}

/// Parses a number of bytes: `123`, `512M`, `6GiB`, `1.5g`. K, M, G, T are powers of 1024; with a `B` but no `i`, of
/// 1000.
pub fn size(text: &str) -> Result<u64, String> {
    let bad = || "a size is a number with K, M, G or T, like 6GiB".to_owned();
    let lower = text.trim().to_ascii_lowercase();
    let split = lower.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(lower.len());
    let (number, unit) = lower.split_at(split);
    let number: f64 = number.trim().parse().map_err(|_| bad())?;
    let scale: f64 = match unit {
        "" | "b" => 1.0,
        "k" | "kib" => 1024.0,
        "m" | "mib" => 1024f64.powi(2),
        "g" | "gib" => 1024f64.powi(3),
        "t" | "tib" => 1024f64.powi(4),
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        _ => return Err(bad()),
    };
    let bytes = number * scale;
    if (0.0..9e18).contains(&bytes) { Ok(bytes as u64) } else { Err(bad()) }
}

/// A number in a range of reals, for the sampling options.
pub fn real(text: &str, range: impl std::ops::RangeBounds<f32>, what: &str) -> Result<f32, String> {
    let value: f32 = text.parse().map_err(|_| format!("{what} is a number"))?;
    if range.contains(&value) { Ok(value) } else { Err(format!("{what} is out of range")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (text, want) in
            [("0", 0), ("123", 123), ("6GiB", 6 << 30), ("1.5g", 3 << 29), ("2 MB", 2_000_000)]
        {
            assert_eq!(size(text), Ok(want), "{text}");
        }
        for bad in ["", "G", "-1G", "1X", "nan", "inf", "1e30T"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn policies() {
        let policy = |bits: [u8; 6]| Some(Policy::from_bits(bits.map(|b| b == 1)));
        let (prefill, decode) = (policy([0, 0, 0, 0, 0, 1]), policy([1, 0, 0, 1, 1, 1]));
        let both = Ok(Policies { prefill, decode });
        assert_eq!("prefill=0,0,0,0,0,1,decode=1,0,0,1,1,1".parse(), both);
        assert_eq!("decode=1,0,0,1,1,1,prefill=0,0,0,0,0,1".parse(), both);
        assert_eq!("decode=1,0,0,1,1,1".parse(), Ok(Policies { prefill: None, decode }));
        for bad in [
            "",
            "0,0,0,0,0,1",
            "prefill",
            "prefill=",
            "prefill=0,0,0,0,0",
            "prefill=0,0,0,0,0,1,1",
            "prefill=0,0,0,0,0,2",
            "prefill=0,0,0,0,0,1,",
            "prefill=0,0,0,0,0,1decode=1,0,0,1,1,1",
            "prefill=0,0,0,0,0,1,prefill=0,0,0,0,0,1",
            "attention=0,0,0,0,0,1",
        ] {
            assert!(bad.parse::<Policies>().is_err(), "{bad}");
        }
    }
}
