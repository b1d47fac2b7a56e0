//! `tandem bench --trace`: how requests of a trace are served, by one scheduler or several.

use tandem::sim::Report;
use tandem::workload::{Arrival, Shape, Source};
use tandem::{Error, atomic_file};

use super::Args;
use super::replay::replay;
use crate::cli::open::{self, Needs, Scheduled};
use crate::cli::simulate::{About, count_bad_rows, json, load, plot, table};
use crate::cli::{output, progress};

/// Runs, reports.
pub fn run(args: &Args, source: &Source) -> anyhow::Result<()> {
    if let Some(path) = &args.plot {
        if path.extension().is_none_or(|e| !e.eq_ignore_ascii_case("svg")) {
            return Err(
                Error::usage(format!("--plot {}: wanted the name of an .svg file", path.display())).into()
            );
        }
        atomic_file::check(path)?;
    }
    let opened = open::open(args.model.as_deref())?;
    let most = opened.model.spec.max_context;
    let context = args.engine.ctx.map_or(most, |c| c as usize);
    let shape = Shape {
        rate: args.rate,
        limit: args.limit.map(|n| n as usize),
        seed: args.seed,
        context: Some(context.clamp(2, 1 << 25) as u32),
    };
    let work = load(source, &shape)?;
    let sizes: Vec<(usize, usize)> =
        work.requests.iter().map(|r| (r.input as usize, r.output as usize)).collect();
    let needs = Needs::new(&sizes, args.engine.ctx, most);
    let mut scheduled = opened.scheduled(&args.engine, &needs, args.parallel)?;
    let names = scheduled.strategies(&args.engine);
    let mut reports = Vec::new();
    for name in &names {
        reports.push(one(&mut scheduled, name, &work.requests, name));
    }
    let machine = args.engine.timed_machine().map(|machine| machine.name.clone());
    let device = scheduled.engine().placement().device;
    let hardware = machine.unwrap_or(device);
    let about = About { model: &opened.name, hardware: &hardware, tokens: scheduled.tokens() };
    let mut points = Vec::new();
    if args.plot.is_some() {
        for (load, requests) in plot::loads(&work, &reports) {
            let at = |name| format!("{name}, {load:.2} requests a second");
            let of: Vec<Report> =
                names.iter().map(|name| one(&mut scheduled, name, &requests, &at(name))).collect();
            points.push((load, of));
        }
    }
    count_bad_rows(&work, &mut reports);
    if let Some(path) = &args.plot {
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let points: Vec<(f64, &[Report])> = points.iter().map(|(load, of)| (*load, &of[..])).collect();
        let drawn = plot::svg(&about, &work, &reports, &plot::latency(&names, &points))?;
        atomic_file::replace(path, |to| to.write_all(drawn.as_bytes()))?;
    }
    match args.json {
        true => output::json(&json(&about, &work, &reports)?),
        false => output::print(&table::text(&about, &work, &reports)),
    }
}

/// One run.
fn one(scheduled: &mut Scheduled, strategy: &str, arrivals: &[Arrival], what: &str) -> Report {
    let mut requests = scheduled.requests(strategy);
    let bar = progress::count_bar(arrivals.len() as u64, what);
    let report = replay(&mut requests, strategy, arrivals, &mut |over, tokens, now| {
        bar.say(&format!("{what}: {:.0} tok/s", tokens as f64 / now.max(1e-9)));
        bar.set(over as u64);
    });
    bar.finish();
    scheduled.back(requests);
    report
}
