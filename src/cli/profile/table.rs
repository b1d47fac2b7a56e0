//! A profile as text.

use std::fmt::Write;

use tandem::profile::{Calibration, CopyLoad, ModelProfile, Profile};
use tandem::program::Side;

use crate::cli::progress::megabytes;

/// The machine's limits, a line each.
pub fn limits(profile: &Profile) -> String {
    let (mut text, id, cpu) = (String::new(), &profile.identity, &profile.limits.cpu);
    let gb = |bytes_s: f64| format!("{:.1} GB/s", bytes_s / 1e9);
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "{name:<26} {value}");
    };
    line("CPU", format!("{}, {} threads, {}", id.cpu, id.threads, id.isa));
    line("memory available", megabytes(cpu.memory_bytes));
    line("last-level cache", megabytes(cpu.llc_bytes));
    let read = cpu.read.iter().map(|b| format!("{} ({})", gb(b.bytes_s), b.threads));
    let over = megabytes(cpu.read_bytes);
    line("read (threads)", format!("{}, over {over}", read.collect::<Vec<_>>().join(", ")));
    for n in &cpu.nodes {
        let whose = if n.own { "" } else { ", not of these cores" };
        line(
            &format!("memory node {}", n.node),
            format!("{}, {} read{whose}", megabytes(n.memory_bytes), gb(n.bytes_s)),
        );
    }
    let rates = |rates: &[tandem::profile::Rate]| {
        let each = rates.iter().map(|r| format!("{} {}", r.name, flops(r.ops_s)));
        each.collect::<Vec<_>>().join(", ")
    };
    line("arithmetic, peak", rates(&cpu.peaks));
    line("bf16 products, 512 rows", rates(&cpu.matrix));
    let a = &profile.limits.host_attention;
    let beside = match a.copies {
        CopyLoad::Link => "while the device copies both ways",
        CopyLoad::Thread => "while another thread copies, for want of a device",
        CopyLoad::None => "no copies beside it: one core",
    };
    let (alone, slowed) = (gb(a.alone_bw), gb(a.beside_copies_bw));
    line("attention on the CPU", format!("{alone} ({}), {slowed} {beside}", a.threads));
    line("threads for it", format!("{} reach 95% of the read bandwidth", cpu.knee()));
    let h = &profile.limits.hand_over;
    let (spinning, parked) = (time(h.spinning_s), time(h.parked_s));
    let in_step = |t: Option<f64>| t.map_or(String::new(), |t| format!(", {} inside a step", time(t)));
    let warm = in_step(h.in_step_s);
    line("a job for all threads", format!("{spinning} while they spin, {parked} when they sleep{warm}"));
    if let Some(l) = &h.lane {
        let of = |start: f64, seen: f64| format!("started after {}, seen after {}", time(start), time(seen));
        let (spinning, asleep) = (of(l.start_spinning_s, l.spinning_s), of(l.start_asleep_s, l.asleep_s));
        let warm = in_step(l.in_step_s);
        line("a job for their lane", format!("{spinning}; {asleep} when it sleeps{warm}"));
    }
    if let Some(d) = &profile.limits.device {
        line("device", d.name.clone());
        line("its memory", megabytes(d.memory_bytes));
        line("copy within it", gb(d.copy_bw));
        line("16-bit products", flops(d.matrix_flops));
        line("launch", format!("{} to enqueue, {} on the device", time(d.launch_s), time(d.step_s)));
        let (spin, sleep, lane) = (time(d.round_trip_s), time(d.wake_s), time(d.lane_wait_s));
        line(
            "hand-over",
            format!("{spin} to a host that spins, {sleep} to one that sleeps, {lane} between lanes"),
        );
        for (name, l) in [("host to device", &d.to_device), ("device to host", &d.to_host)] {
            let (pinned, pageable, busy) = (gb(l.pinned_bw), gb(l.pageable_bw), gb(l.busy_bw));
            let latency = time(l.latency_s);
            line(
                name,
                format!(
                    "{pinned} pinned, {pageable} pageable, {busy} while the CPU reads memory, latency {latency}"
                ),
            );
        }
    }
    text
}

/// A model's operations: times for a few sizes, then predicted against executed times.
pub fn model(profile: &Profile, model: &ModelProfile) -> String {
    let (mut text, tables) = (String::new(), &model.tables);
    let id = profile.identity.model.as_ref();
    let name = id.map_or(String::new(), |m| format!("{}, {}", m.name, megabytes(m.bytes)));
    let _ = writeln!(text, "{:<26} {name}", "model");
    const ROWS: [f64; 5] = [1.0, 4.0, 16.0, 64.0, 256.0];
    let heads = ROWS.map(|r| format!("{r:>9} rows")).concat();
    for side in [Side::Host, Side::Device] {
        let Some(t) = tables.side(side) else { continue };
        let mut line = |name: &str, curve: &dyn Fn(f64) -> f64| {
            let _ = writeln!(text, "{name:<26}{}", ROWS.map(|r| format!("{:>14}", time(curve(r)))).concat());
        };
        line(&format!("\n{}: embed and lists", unit(side)), &|r| t.embed.at(r));
        for (kind, l) in t.layers.iter().enumerate() {
            let layers = tables.kinds.iter().filter(|&&k| k == kind).count();
            let of = |op: &str| format!("{op}, x{layers}");
            line(&of("project"), &|r| l.project.at(r));
            line(&of("append"), &|r| l.append.at(r));
            line(&of("attend, 256 tokens each"), &|r| l.attend.at(r, 256.0));
            line(&of("attend, 2048 tokens each"), &|r| l.attend.at(r, 2048.0));
            line(&of("out_proj"), &|r| l.out_proj.at(r));
            line(&of("ffn_up"), &|r| l.ffn_up.at(r));
            line(&of("ffn_down"), &|r| l.ffn_down.at(r));
        }
        line("head", &|r| t.head.at(r));
        line("pick", &|r| t.pick.at(r));
        text = text.replacen(
            &format!("\n{}: embed", unit(side)),
            &format!("\n{:<26}{heads}\n{}: embed", "", unit(side)),
            1,
        );
    }
    compared(&mut text, &model.calibration);
    text
}

fn unit(side: Side) -> &'static str {
    match side {
        Side::Host => "cpu",
        Side::Device => "device",
    }
}

/// Predicted against executed times: operations of the calibration steps, then steps.
fn compared(text: &mut String, calibration: &Calibration) {
    if !calibration.operations.is_empty() {
        let _ = writeln!(
            text,
            "\n{:<12}{:>8}{:>8}{:>10}{:>14}{:>14}{:>9}",
            "operation", "on", "rows", "tokens", "predicted", "executed", "ratio"
        );
    }
    for c in &calibration.operations {
        let (predicted, executed) = (time(c.predicted_s), time(c.executed_s));
        let (ratio, on) = (c.executed_s / c.predicted_s, unit(c.side));
        let _ = writeln!(
            text,
            "{:<12}{on:>8}{:>8}{:>10}{predicted:>14}{executed:>14}{ratio:>9.3}",
            c.kind, c.rows, c.tokens
        );
    }
    if !calibration.steps.is_empty() {
        let _ = writeln!(
            text,
            "\n{:<28}{:>8}{:>14}{:>14}{:>14}{:>10}{:>12}",
            "step", "on", "predicted", "calibrated", "executed", "error", "calibrated"
        );
    }
    for s in &calibration.steps {
        let what = match s.rows {
            1 => format!("decode {} x after {}", s.sequences, s.past),
            rows => format!("prompt of {rows} after {}", s.past),
        };
        let name = if s.calibrates { format!("{what} *") } else { what };
        let [error, calibrated] = s.errors().map(|e| format!("{:+.1}%", 100.0 * e));
        let (on, times) = (unit(s.side), [s.predicted_s, s.calibrated_s, s.executed_s].map(time));
        let [p, c, e] = times;
        let _ = writeln!(text, "{name:<28}{on:>8}{p:>14}{c:>14}{e:>14}{error:>10}{calibrated:>12}");
    }
    if let Some(worst) = calibration.worst_decode_error() {
        let _ = writeln!(
            text,
            "* factors come from these; of the other decode steps the worst is {:.1}% off",
            100.0 * worst
        );
    }
}

fn flops(rate: f64) -> String {
    match rate {
        r if r >= 1e12 => format!("{:.1} TFLOP/s", r / 1e12),
        r => format!("{:.1} GFLOP/s", r / 1e9),
    }
}

/// `3.2 us`.
pub fn time(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s => format!("{:.1} us", s * 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_follow_the_size() {
        assert_eq!([time(2.0), time(3.25e-3), time(4.2e-6)], ["2.00 s", "3.25 ms", "4.2 us"]);
        assert_eq!([flops(2.5e12), flops(3e11)], ["2.5 TFLOP/s", "300.0 GFLOP/s"]);
    }
}
