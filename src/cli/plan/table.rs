//! The plan as text: a line per candidate, then the winner's stages and why it won.

use std::fmt::Write;

use tandem::plan::hardware::Energy;
use tandem::plan::{Candidate, Hardware, Plan, PlanRequest, Sizes, UnitRun};

use crate::cli::predict::seconds;
use crate::cli::progress::one_line;

fn optional(t: Option<f64>) -> String {
    t.map_or("-".into(), seconds)
}

fn gb(bytes: u64) -> String {
    format!("{:.2} GB", bytes as f64 / 1e9)
}

/// Heads of [`spent`].
pub(in crate::cli) const SPENT: [&str; 2] = ["J/token", "cost/Mtok"];

/// Joules for a token, and money for a million of them.
pub(in crate::cli) fn spent(energy: Option<&Energy>) -> [String; 2] {
    let number = |x: f64| if x >= 100.0 { format!("{x:.0}") } else { format!("{x:.2}") };
    let of = |x: Option<f64>| x.map_or("-".into(), number);
    [of(energy.map(|e| e.joules_per_token)), of(energy.and_then(|e| e.cost_per_million_tokens))]
}

/// Aligns columns, the first to the left and the others to the right.
pub(in crate::cli) fn columns(rows: &[Vec<String>]) -> String {
    let widths: Vec<usize> = (0..rows.first().map_or(0, Vec::len))
        .map(|c| rows.iter().map(|r| r[c].chars().count()).max().unwrap_or(0))
        .collect();
    let mut out = String::new();
    for row in rows {
        let cells = row.iter().zip(&widths).enumerate().map(|(c, (cell, width))| match c {
            0 => format!("{cell:<width$}"),
            _ => format!("{cell:>width$}"),
        });
        let line = cells.collect::<Vec<_>>().join("  ");
        let _ = writeln!(out, "{}", line.trim_end());
    }
    out
}

fn row(c: &Candidate, energy: bool) -> Vec<String> {
    let mut cells = vec![
        c.strategy.name().into(),
        if c.feasible { "yes" } else { "no" }.into(),
        optional(c.t_total_s),
        optional(c.t_prefill_s),
        optional(c.t_decode_step_s),
        gb(c.memory.gpu.total),
        gb(c.memory.host.total),
        if c.longest_context > 0 { c.longest_context.to_string() } else { "-".into() },
    ];
    if energy {
        cells.extend(spent(c.energy.as_ref()));
    }
    cells
}

/// Stages as they are told: where kinds of blocks alternate, each kind is a line.
fn told(stages: &[UnitRun]) -> Vec<UnitRun> {
    const MOST: usize = 12;
    if stages.len() <= MOST {
        return stages.to_vec();
    }
    let mut kinds: Vec<UnitRun> = Vec::new();
    for stage in stages {
        match kinds.iter_mut().find(|k| k.side == stage.side) {
            Some(kind) => {
                kind.units += stage.units;
                kind.prefill_s += stage.prefill_s;
                kind.decode_step_s += stage.decode_step_s;
            }
            None => kinds.push(stage.clone()),
        }
    }
    for kind in kinds.iter_mut().filter(|k| k.units > 0) {
        kind.name = format!("{} units", kind.units);
    }
    kinds
}

/// The whole text.
pub fn text(sizes: &Sizes, hardware: &Hardware, request: &PlanRequest, plan: &Plan, energy: bool) -> String {
    let mut out = String::new();
    let sequences = if request.batch == 1 { "sequence" } else { "sequences" };
    let _ = writeln!(
        out,
        "{} ({} of weights) on {}: {} {sequences} of {} + {} tokens\n",
        one_line(&sizes.spec.name),
        gb(sizes.model().host - sizes.shared_table.host),
        one_line(&hardware.name),
        request.batch,
        request.prompt,
        request.gen_len
    );
    let head = [
        "strategy",
        "fits",
        "time",
        "prefill",
        "decode step",
        "GPU memory",
        "host memory",
        "longest context",
    ];
    let spent: &[&str] = if energy { &SPENT } else { &[] };
    let mut rows = vec![head.iter().chain(spent).map(|&name| name.to_owned()).collect()];
    rows.extend(plan.candidates.iter().map(|c| row(c, energy)));
    out += &columns(&rows);
    let _ = writeln!(out);
    let width = plan.candidates.iter().map(|c| c.strategy.name().len()).max().unwrap_or(0);
    for c in &plan.candidates {
        let _ = writeln!(out, "{:<width$} {}", c.strategy.name(), c.reason);
        for note in &c.notes {
            let _ = writeln!(out, "{:<width$} {note}", "");
        }
    }
    let Some(chosen) = plan.chosen.map(|i| &plan.candidates[i]) else { return out };
    let _ = writeln!(out, "\nchosen: {}\n", plan.why);
    let mut rows = vec![["stage", "side", "prefill", "decode step"].map(str::to_owned).to_vec()];
    rows.extend(
        told(&chosen.stages)
            .iter()
            .map(|s| vec![s.name.clone(), s.side.into(), seconds(s.prefill_s), seconds(s.decode_step_s)]),
    );
    out += &columns(&rows);
    let _ = writeln!(out);
    let mut rows = vec![["operation", "by", "prefill", "decode step"].map(str::to_owned).to_vec()];
    let mut operations: Vec<_> = chosen.operations.iter().collect();
    operations.sort_by(|a, b| b.decode_step_s.total_cmp(&a.decode_step_s));
    rows.extend(
        operations.iter().map(|o| {
            vec![o.kind.into(), o.unit.name().into(), seconds(o.prefill_s), seconds(o.decode_step_s)]
        }),
    );
    out += &columns(&rows);
    if let Some(busy) = &chosen.busy {
        let _ = writeln!(out);
        for (name, b) in ["prefill", "decode"].iter().zip(busy) {
            let percent = |x: f64| format!("{:.0}%", 100.0 * x);
            let (gpu, host, h2d, d2h) = (percent(b.gpu), percent(b.host), percent(b.h2d), percent(b.d2h));
            let _ = write!(out, "busy in {name:<7}  GPU {gpu}, CPU {host}, link {h2d} up, {d2h} down");
            let hidden = match b.gpu > 0.0 && b.h2d > 0.01 {
                true => format!("; {} of the smaller of GPU and link up overlaps", percent(b.overlap)),
                false => String::new(),
            };
            let _ = writeln!(out, "{hidden}");
        }
    }
    let (gpu, host) = (&chosen.memory.gpu, &chosen.memory.host);
    let memory = |name: &str, parts: &[(&str, u64)], available: u64| {
        let parts: Vec<_> =
            parts.iter().filter(|p| p.1 > 0).map(|(n, b)| format!("{n} {}", gb(*b))).collect();
        match parts.is_empty() {
            true => String::new(),
            false => format!("{name}  {} of {}\n", parts.join(", "), gb(available)),
        }
    };
    let _ = writeln!(out);
    out += &memory(
        "GPU ",
        &[
            ("weights", gpu.weights),
            ("KV", gpu.kv),
            ("staging", gpu.staging),
            ("activations", gpu.activations),
            ("workspace", gpu.workspace),
            ("kernels", gpu.modules),
        ],
        gpu.available,
    );
    out += &memory(
        "host",
        &[
            ("weights", host.weights),
            ("KV", host.kv),
            ("activations", host.activations),
            ("pinned", host.pinned),
        ],
        host.available,
    );
    if let Some(nodes) = &chosen.memory.nodes {
        let numbers =
            chosen.weights_nodes.iter().flatten().map(usize::to_string).collect::<Vec<_>>().join(", ");
        let name = if numbers.contains(',') { "nodes" } else { "node" };
        out += &memory(&format!("{name} {numbers}"), &[("weights", nodes.weights)], nodes.available);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align() {
        let rows = [["a", "1"], ["long", "22"]].map(|r| r.map(str::to_owned).to_vec());
        assert_eq!(columns(&rows), "a      1\nlong  22\n");
    }
}
