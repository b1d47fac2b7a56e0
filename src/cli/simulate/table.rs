//! The comparison as text: what was simulated, then a line per strategy.

use std::fmt::Write;

use tandem::sched::Targets;
use tandem::sim::Report;
use tandem::workload::Workload;

use super::ReportHead;
use crate::cli::plan::table::{SPENT, columns, spent};
use crate::cli::predict::seconds;
use crate::cli::progress::one_line;
use crate::cli::targets;

const HEAD: [&str; 12] = [
    "strategy",
    "tok/s",
    "steady",
    "gain",
    "makespan",
    "first token",
    "p99",
    "token (GPU)",
    "token (host)",
    "GPU",
    "CPU",
    "link",
];

/// With targets.
const IN_TIME: [&str; 2] = ["in time", "goodput"];

fn optional(t: Option<f64>) -> String {
    t.map_or("-".into(), seconds)
}

fn rate(x: f64) -> String {
    if x >= 1000.0 { format!("{x:.0}") } else { format!("{x:.1}") }
}

/// The throughput of `r` over that of the baseline; `None` if not as many requests failed: then they did not do the same work.
fn gain(r: &Report, baseline: Option<&Report>) -> Option<f64> {
    let baseline = baseline.filter(|b| b.throughput_tok_s > 0.0 && b.failed == r.failed)?;
    Some(r.throughput_tok_s / baseline.throughput_tok_s)
}

fn row(r: &Report, baseline: Option<&Report>, targets: &Targets, energy: bool) -> Vec<String> {
    let percent = |x: f64| if x.is_nan() { "-".into() } else { format!("{:.0}%", 100.0 * x) };
    let mut cells = vec![
        r.strategy.clone(),
        rate(r.throughput_tok_s),
        rate(r.steady_tok_s),
        gain(r, baseline).map_or("-".into(), |gain| format!("{gain:.2}x")),
        seconds(r.makespan_s),
        optional(r.ttft_s.p50),
        optional(r.ttft_s.p99),
        optional(r.tpot_s.gpu.p50),
        optional(r.tpot_s.host.p50),
        percent(r.gpu_busy),
        percent(r.cpu_busy),
        percent(r.link_busy),
    ];
    if targets.is_some() {
        let all = r.requests.finished + r.requests.failed;
        cells.push(percent(r.within_targets as f64 / all.max(1) as f64));
        cells.push(format!("{:.2}/s", r.goodput_req_s));
    }
    if energy {
        cells.extend(spent(r.energy.as_ref()));
    }
    cells.push(r.requests.failed.to_string());
    cells
}

/// What is asked of latency, and what comes next to it if no strategy keeps it.
fn latency(reports: &[Report], asked: &Targets) -> String {
    let mut out = format!(
        "\nin time: {} of 100 requests within {}",
        asked.percentile,
        targets::flags(asked.ttft, asked.tpot)
    );
    let kept: Vec<&str> =
        reports.iter().filter(|r| r.keeps_targets == Some(true)).map(|r| r.strategy.as_str()).collect();
    match (kept.is_empty(), targets::nearest(reports, asked)) {
        (false, _) => out += &format!("; kept by {}", kept.join(", ")),
        (true, Some(nearest)) => {
            out += &format!(
                "; no strategy keeps it, {} would keep {}",
                nearest.strategy,
                targets::flags(nearest.ttft_s, nearest.tpot_s)
            );
        }
        (true, None) => out += "; no strategy keeps it",
    }
    out + "\n"
}

/// The whole text.
pub fn text(
    about: &ReportHead<'_>,
    work: &Workload,
    reports: &[Report],
    asked: &Targets,
    energy: bool,
) -> String {
    let mut out = String::new();
    let (input, output) = work.tokens();
    let n = work.requests.len().max(1) as f64;
    let arrivals = match work.rate() {
        Some(rate) => format!("{rate:.2} a second"),
        None => "all at the start".into(),
    };
    let (gpu, host) = about.tokens;
    let split = match (about.boundary, about.experts) {
        (Some(k), _) => format!("; {k} units on the host"),
        (_, Some(experts)) if experts.host > 0 => {
            format!("; {} of {} experts on the host", experts.host, experts.host + experts.device)
        }
        _ => String::new(),
    };
    let _ = writeln!(
        out,
        "{} on {}: {} requests of {:.0} + {:.0} tokens on average, {arrivals} ({})\n\
         keys and values: {gpu} tokens on the GPU, {host} on the host{split}\n",
        one_line(about.model),
        one_line(about.hardware),
        work.requests.len(),
        input as f64 / n,
        output as f64 / n,
        one_line(&work.name),
    );
    let of = |name: &str| reports.iter().find(|r| r.strategy == name);
    let baseline = of("gpu-only").or_else(|| of("vllm"));
    let in_time: &[&str] = if asked.is_some() { &IN_TIME } else { &[] };
    let costs: &[&str] = if energy { &SPENT } else { &[] };
    let head = HEAD.iter().chain(in_time).chain(costs).chain(&["failed"]);
    let mut rows = vec![head.map(|&name| name.to_owned()).collect()];
    rows.extend(reports.iter().map(|r| row(r, baseline, asked, energy)));
    out += &columns(&rows);
    if asked.is_some() {
        out += &latency(reports, asked);
    }
    for r in reports {
        if let Some(b) = baseline.filter(|b| b.failed != r.failed) {
            let _ = writeln!(
                out,
                "\n{}: no gain over {}, of which {} requests failed, not {}: the rest is other work",
                r.strategy, b.strategy, b.failed, r.failed
            );
        }
    }
    for r in reports {
        for (why, n) in &r.requests.reasons {
            let _ = writeln!(out, "\n{}: {n} failed: {}", r.strategy, one_line(why));
        }
    }
    out
}
