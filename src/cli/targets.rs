//! Targets of latency on the command line, and what is said about those that are not kept.

use std::fmt::Write;

use serde::Serialize;
use tandem::plan::Predictor;
use tandem::program::{Group, Iteration, Kv, Phase, RequestId, Wants};
use tandem::sched::{Predict, Targets};
use tandem::sim::{Report, Trip};
use tandem::workload::Arrival;
use tandem::{Error, Result};

use super::predict;

/// What is asked of latency.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct TargetArgs {
    /// Seconds from a request's arrival to its first token: strategies are as fast as they can be within this.
    #[arg(long, value_name = "S", value_parser = positive, allow_hyphen_values = true)]
    pub ttft_target: Option<f64>,
    /// Seconds between a request's tokens, likewise.
    #[arg(long, value_name = "S", value_parser = positive, allow_hyphen_values = true)]
    pub tpot_target: Option<f64>,
    /// Per cent of the requests that must be within the targets [default: 90].
    #[arg(long, value_name = "P", value_parser = clap::value_parser!(u32).range(1..=100), allow_negative_numbers = true)]
    pub target_percentile: Option<u32>,
}

fn positive(text: &str) -> std::result::Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "a target is a number of seconds, like 0.2".to_owned())?;
    match seconds > 0.0 && seconds.is_finite() {
        true => Ok(seconds),
        false => Err("a target is a number of seconds above 0".into()),
    }
}

impl TargetArgs {
    /// The targets.
    ///
    /// # Errors
    /// A percentile of no target.
    pub fn targets(&self) -> Result<Targets> {
        let targets = Targets {
            ttft: self.ttft_target,
            tpot: self.tpot_target,
            percentile: self.target_percentile.unwrap_or(Targets::NONE.percentile),
            ..Targets::NONE
        };
        match self.target_percentile {
            Some(p) if !targets.is_some() => Err(Error::usage(format!(
                "--target-percentile {p}: of no target; add --ttft-target or --tpot-target"
            ))),
            _ => Ok(targets),
        }
    }

    /// Whether anything is given.
    pub fn is_some(&self) -> bool {
        self.ttft_target.is_some() || self.tpot_target.is_some() || self.target_percentile.is_some()
    }
}

/// A request's rows from `first` on, alone on the device.
fn alone(phase: Phase, first: u32, tokens: u32) -> Iteration {
    let request = RequestId { slot: 0, generation: 0 };
    Iteration::serial(vec![Group { request, phase, first, tokens, kv: Kv::Device, wants: Wants::Last }], true)
}

/// What no strategy can keep, since a request that is alone on the machine takes longer: a sentence for each target.
pub fn impossible(targets: &Targets, requests: &[Arrival], rows: u32, predictor: &Predictor) -> Vec<String> {
    // As many prompts are at most this long as must be in time.
    let rank = |mut lengths: Vec<u32>| {
        lengths.sort_unstable();
        let at = (lengths.len() * targets.percentile as usize).div_ceil(100);
        at.checked_sub(1).map(|i| lengths[i])
    };
    let p = targets.percentile;
    let mut said = Vec::new();
    if let Some((most, prompt)) = targets.ttft.zip(rank(requests.iter().map(|r| r.input).collect())) {
        let steps = (0..prompt).step_by(rows.max(1) as usize);
        let seconds: f64 =
            steps.map(|at| predictor.iteration(&alone(Phase::Prefill, at, rows.min(prompt - at)))).sum();
        if seconds > most {
            said.push(format!(
                "--ttft-target {most}: no strategy can keep it: {p} of 100 prompts have up to {prompt} tokens, which take {} \
                 alone; --ttft-target {} is the least to ask for",
                predict::seconds(seconds),
                up(seconds)
            ));
        }
    }
    let answers = requests.iter().filter(|r| r.output > 1).map(|r| r.input);
    if let Some((most, prompt)) = targets.tpot.zip(rank(answers.collect())) {
        let seconds = predictor.iteration(&alone(Phase::Decode, prompt, 1));
        if seconds > most {
            said.push(format!(
                "--tpot-target {most}: no strategy can keep it: a token of a request that is alone takes {}; --tpot-target {} \
                 is the least to ask for",
                predict::seconds(seconds),
                up(seconds)
            ));
        }
    }
    said
}

/// Rounded up to four digits: what it says is kept.
fn up(seconds: f64) -> f64 {
    let digits = (3.0 - seconds.log10().floor()).clamp(0.0, 9.0) as i32;
    let scale = 10f64.powi(digits);
    (seconds * scale).ceil() / scale
}

/// The factor on the targets that a run keeps: infinite if requests failed that count.
fn factor(report: &Report, targets: &Targets) -> f64 {
    let of = |trip: &Trip| {
        let ratio = |most: Option<f64>, seconds: Option<f64>| {
            most.zip(seconds).map_or(0.0, |(most, seconds)| seconds / most)
        };
        match trip.is_done() {
            true => ratio(targets.ttft, Some(trip.ttft())).max(ratio(targets.tpot, trip.tpot())),
            false => f64::INFINITY,
        }
    };
    let mut factors: Vec<f64> = report.trips.iter().map(of).collect();
    factors.sort_by(f64::total_cmp);
    let at = (factors.len() * targets.percentile as usize).div_ceil(100);
    at.checked_sub(1).map_or(1.0, |i| factors[i])
}

/// The strategy that is nearest to targets that none keeps, and what it would keep.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Nearest {
    /// The strategy.
    pub strategy: String,
    /// What it keeps.
    pub ttft_s: Option<f64>,
    /// The same between tokens.
    pub tpot_s: Option<f64>,
}

/// Of runs that do not keep the targets, the nearest; `None` if one keeps them, or nothing finishes.
pub fn nearest(reports: &[Report], targets: &Targets) -> Option<Nearest> {
    if reports.iter().any(|r| r.keeps_targets != Some(false)) {
        return None;
    }
    let all = reports.iter().map(|r| (r, factor(r, targets)));
    let (report, factor) = all.min_by(|a, b| a.1.total_cmp(&b.1))?;
    factor.is_finite().then(|| Nearest {
        strategy: report.strategy.clone(),
        ttft_s: targets.ttft.map(|t| up(t * factor)),
        tpot_s: targets.tpot.map(|t| up(t * factor)),
    })
}

/// `--ttft-target 2 --tpot-target 0.1`.
pub fn flags(ttft: Option<f64>, tpot: Option<f64>) -> String {
    let mut out = String::new();
    for (flag, seconds) in [("--ttft-target", ttft), ("--tpot-target", tpot)] {
        if let Some(seconds) = seconds {
            let _ = write!(out, "{}{flag} {seconds}", if out.is_empty() { "" } else { " " });
        }
    }
    out
}
