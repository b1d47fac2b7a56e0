//! A profile as people read it.

use std::fmt::Write;

use tandem::profile::Profile;

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
    let rates = |rates: &[tandem::profile::limits::Rate]| {
        let each = rates.iter().map(|r| format!("{} {}", r.name, flops(r.ops_s)));
        each.collect::<Vec<_>>().join(", ")
    };
    line("arithmetic, peak", rates(&cpu.peaks));
    line("bf16 products, 512 rows", rates(&cpu.matrix));
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
