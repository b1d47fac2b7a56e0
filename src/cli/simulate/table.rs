//! The comparison as text: what was simulated, then a line per strategy.

use std::fmt::Write;

use tandem::sim::Report;
use tandem::workload::Workload;

use super::About;
use crate::cli::plan::table::columns;
use crate::cli::predict::seconds;
use crate::cli::progress::one_line;

const HEAD: [&str; 13] = [
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
    "failed",
];

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

fn row(r: &Report, baseline: Option<&Report>) -> Vec<String> {
    let percent = |x: f64| if x.is_nan() { "-".into() } else { format!("{:.0}%", 100.0 * x) };
    vec![
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
        r.requests.failed.to_string(),
    ]
}

/// The whole text.
pub fn text(about: &About<'_>, work: &Workload, reports: &[Report]) -> String {
    let mut out = String::new();
    let (input, output) = work.tokens();
    let n = work.requests.len().max(1) as f64;
    let arrivals = match work.rate() {
        Some(rate) => format!("{rate:.2} a second"),
        None => "all at the start".into(),
    };
    let (gpu, host) = about.tokens;
    let _ = writeln!(
        out,
        "{} on {}: {} requests of {:.0} + {:.0} tokens on average, {arrivals} ({})\n\
         keys and values: {gpu} tokens on the GPU, {host} on the host\n",
        one_line(about.model),
        one_line(about.hardware),
        work.requests.len(),
        input as f64 / n,
        output as f64 / n,
        one_line(&work.name),
    );
    let of = |name: &str| reports.iter().find(|r| r.strategy == name);
    let baseline = of("gpu-only").or_else(|| of("vllm"));
    let mut rows = vec![HEAD.map(str::to_owned).to_vec()];
    rows.extend(reports.iter().map(|r| row(r, baseline)));
    out += &columns(&rows);
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
