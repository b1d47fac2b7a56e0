//! Workloads: how many tokens requests bring and want, and when they arrive. From a trace, or made up.
//!
//! ```text
//! trace.csv, synthetic:IN,OUT,N,RATE ─► Source ─► load(Shape: rate, limit, seed, context) ─► Workload: arrivals in order
//! ```
//!
//! | a file | what |
//! |---|---|
//! | `lines` | lines and fields of a CSV file, in bounded memory |
//! | `trace` | columns by name, rows with their errors |
//! | `time` | timestamps |
//! | `synthetic` | `synthetic:IN,OUT,N,RATE` |
//! | `draw` | random numbers, Poisson arrivals |
//!
//! A row of a trace that makes no sense is kept as a [`BadRow`] with its line and column, and the rest are used: a request
//! that cannot be understood fails alone. A file without a usable header or without a single good row is an error.

mod draw;
mod lines;
mod synthetic;
mod time;
mod trace;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::{Error, Result};

pub use draw::{Draw, arrive};
pub use synthetic::{Length, Synthetic};
pub use trace::{BadRow, TraceFile};

/// Tokens of a prompt or an answer that a workload may ask for.
pub const MOST_TOKENS: u32 = 1 << 24;

/// Requests that a workload may hold (64 MB).
pub const MOST_REQUESTS: usize = 4_000_000;

/// Requests per second that may be asked for.
pub const MOST_RATE: f64 = 1e6;

/// Seconds until the last arrival that a rate may lead to: 31 years. Beyond it, the time of a step is lost in rounding.
const LONGEST_RUN: f64 = 1e9;

/// A request before it is made: sizes, and a time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Arrival {
    /// Seconds since the workload began.
    pub at: f64,
    /// Tokens of the prompt, 1 to [`MOST_TOKENS`].
    pub input: u32,
    /// Tokens of the answer, 1 to [`MOST_TOKENS`].
    pub output: u32,
}

/// Where a workload comes from: a CSV file, or `synthetic:IN,OUT,N,RATE`.
#[derive(Debug, Clone, PartialEq)]
pub enum Source {
    /// A file with a header that names its columns.
    Trace(PathBuf),
    /// Made up.
    Synthetic(Synthetic),
}

impl FromStr for Source {
    type Err = String;

    fn from_str(text: &str) -> Result<Source, String> {
        match text.strip_prefix("synthetic:") {
            Some(rest) => rest.parse().map(Source::Synthetic),
            None if text.is_empty() => {
                Err("wanted the path of a CSV file, or synthetic:IN,OUT,N,RATE".to_owned())
            }
            None => Ok(Source::Trace(text.into())),
        }
    }
}

/// What is made of a source.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Shape {
    /// Requests per second. A trace with times keeps its pattern and is stretched to this mean rate; requests without
    /// times arrive as a Poisson process. 0: all at the start. `None`: as the source says, or all at the start.
    pub rate: Option<f64>,
    /// No more requests than this: the first of a trace.
    pub limit: Option<usize>,
    /// Seed of what is drawn at random: arrivals, lengths.
    pub seed: u64,
    /// Tokens that prompt and answer may have together: longer answers are cut to leave a prompt of one token, then longer
    /// prompts to leave room for the answer.
    pub context: Option<u32>,
}

/// Requests in the order of their arrival.
#[derive(Debug, Clone, PartialEq)]
pub struct Workload {
    /// What it is called: the file's name, or as the source was written.
    pub name: String,
    /// In the order of their times; the first of a timed trace arrives at 0.
    pub requests: Vec<Arrival>,
    /// Rows that make no sense, as far as they are told: the first of them.
    pub bad: Vec<BadRow>,
    /// How many rows make no sense.
    pub bad_rows: usize,
    /// Requests that were cut to [`Shape::context`].
    pub cut: usize,
}

impl Workload {
    /// Reads or makes it. `seen` is told now and then how many bytes of a trace have been read.
    ///
    /// # Errors
    /// A file that cannot be read, has no usable header, no good row, or more than [`MOST_REQUESTS`] requests; a shape out
    /// of range.
    pub fn load(source: &Source, shape: &Shape, seen: impl FnMut(u64)) -> Result<Workload> {
        shape.check()?;
        let mut work = match source {
            Source::Trace(path) => {
                let file = File::open(path).map_err(|e| Error::io(path, e))?;
                if file.metadata().is_ok_and(|m| m.is_dir()) {
                    let what = path.display().to_string();
                    return Err(Error::format(what, "is a folder, wanted a CSV file"));
                }
                Workload::of_trace(path, file, shape, seen)?
            }
            Source::Synthetic(made) => {
                let (requests, name) = (made.requests(shape), format!("synthetic:{made}"));
                Workload { name, requests, bad: Vec::new(), bad_rows: 0, cut: 0 }
            }
        };
        let rate = match (shape.rate, source) {
            (None, Source::Synthetic(made)) => Some(made.rate),
            (rate, _) => rate,
        };
        if let (Some(rate), Some(last)) = (rate, work.requests.last())
            && (last.at.is_nan() || last.at > LONGEST_RUN)
        {
            return Err(Error::usage(format!(
                "`rate` {rate:?}: {} requests at {rate:?} a second would take more than {LONGEST_RUN:e} s; wanted 0 (all at \
                 once) or a larger rate",
                work.requests.len()
            )));
        }
        if let Some(context) = shape.context {
            work.cut = work.requests.iter_mut().map(|r| usize::from(cut(r, context))).sum();
        }
        Ok(work)
    }

    fn of_trace(
        path: &Path,
        from: impl std::io::Read,
        shape: &Shape,
        seen: impl FnMut(u64),
    ) -> Result<Workload> {
        let name = path.display().to_string();
        let trace = TraceFile::read(&name, from, shape.limit, seen)?;
        let mut requests = trace.requests;
        match (trace.timed, shape.rate) {
            (true, None) => {}
            (true, Some(rate)) if rate > 0.0 => stretch(&mut requests, rate),
            (_, rate) => draw::arrive(&mut requests, rate.unwrap_or(0.0), &mut Draw::new(shape.seed)),
        }
        Ok(Workload { name, requests, bad: trace.bad, bad_rows: trace.bad_rows, cut: 0 })
    }

    /// Tokens of all prompts, and of all answers.
    pub fn tokens(&self) -> (u64, u64) {
        self.requests.iter().fold((0, 0), |(i, o), r| (i + u64::from(r.input), o + u64::from(r.output)))
    }

    /// Requests per second from the first arrival to the last; `None` if all arrive at once.
    pub fn rate(&self) -> Option<f64> {
        let last = self.requests.last()?.at;
        (last > 0.0).then(|| (self.requests.len() - 1) as f64 / last)
    }
}

impl Shape {
    fn check(&self) -> Result<()> {
        if let Some(rate) = self.rate
            && !(0.0..=MOST_RATE).contains(&rate)
        {
            return Err(Error::usage(format!(
                "`rate` {rate:?}: requests per second; wanted a number from 0 (all at once) to {MOST_RATE:e}"
            )));
        }
        if self.limit == Some(0) {
            return Err(Error::usage("a limit of 0 requests; wanted at least 1"));
        }
        if let Some(context) = self.context.filter(|&c| c < 2) {
            return Err(Error::usage(format!(
                "a context of {context} tokens; wanted at least 2, for a prompt and an answer"
            )));
        }
        Ok(())
    }
}

/// Cuts a request to `context` tokens, at least 2; returns whether it was longer.
fn cut(request: &mut Arrival, context: u32) -> bool {
    // Neither sum can overflow: both are at most MOST_TOKENS.
    if request.input + request.output <= context {
        return false;
    }
    request.output = request.output.min(context - 1);
    request.input = request.input.min(context - request.output);
    true
}

/// The same pattern of arrivals at this mean rate.
fn stretch(requests: &mut [Arrival], rate: f64) {
    let Some(last) = requests.last().map(|r| r.at).filter(|&t| t > 0.0) else { return };
    let wanted = (requests.len() - 1) as f64 / rate;
    requests.iter_mut().for_each(|r| r.at *= wanted / last);
}

#[cfg(test)]
mod tests;
