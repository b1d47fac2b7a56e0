//! A line for each request of each run, as CSV: what averages hide.

use std::io::{self, Write};
use std::path::Path;

use tandem::sched::Targets;
use tandem::sim::Report;
use tandem::{Result, atomic_file};

const HEAD: &str = "strategy,request,arrived_s,output_tokens,made_tokens,ttft_s,tpot_s,finished_s,host_tokens,in_time,failed";

/// Writes the requests of all runs to `path`, whole or not at all; requests are numbered from 0 in the order of their arrival.
///
/// # Errors
/// The file cannot be written.
pub fn write(path: &Path, reports: &[Report], targets: &Targets) -> Result<()> {
    atomic_file::replace(path, |to| lines(to, reports, targets))
}

fn lines(to: &mut dyn Write, reports: &[Report], targets: &Targets) -> io::Result<()> {
    writeln!(to, "{HEAD}")?;
    for report in reports {
        for (i, trip) in report.trips.iter().enumerate() {
            let done = trip.is_done();
            let some =
                |seconds: Option<f64>| seconds.filter(|_| done).map_or(String::new(), |s| format!("{s:.6}"));
            writeln!(
                to,
                "{},{i},{:.6},{},{},{},{},{},{},{},{}",
                report.strategy,
                trip.arrived,
                trip.output,
                trip.made,
                some(Some(trip.ttft())),
                some(trip.tpot()),
                some(Some(trip.last)),
                trip.host_tokens,
                u8::from(done && targets.met(trip.ttft(), trip.tpot())),
                u8::from(!done),
            )?;
        }
    }
    Ok(())
}
