//! `tandem bench --trace`: how requests of a trace are served, by one scheduler or several.

use tandem::open::{Needs, Scheduled};
use tandem::sched::Targets;
use tandem::sim::Report;
use tandem::workload::{Arrival, Shape, Source, Workload};
use tandem::{Error, atomic_file};

use super::Args;
use super::replay::{RecordedSteps, replay};
use crate::cli::open;
use crate::cli::simulate::plot::{self, SidePanel};
use crate::cli::simulate::{ReportHead, count_bad_rows, json, load, table};
use crate::cli::{output, progress, records};

/// Runs the trace and reports.
pub fn run(args: &Args, source: &Source) -> anyhow::Result<()> {
    if let Some(path) = &args.plot {
        if path.extension().is_none_or(|e| !e.eq_ignore_ascii_case("svg")) {
            return Err(
                Error::usage(format!("--plot {}: wanted the name of an .svg file", path.display())).into()
            );
        }
        atomic_file::check(path)?;
    }
    args.records.as_deref().map_or(Ok(()), atomic_file::check)?;
    let asked = args.targets.targets()?;
    let window = args.timeline.window()?;
    let opened = open::open(args.model.as_deref())?;
    let most = opened.loaded.spec.max_context;
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
    let needs = Needs::new(&sizes, args.engine.context(), most);
    let (mut scheduled, _notices) = open::scheduled(&opened, &args.engine, &needs, args.parallel)?;
    scheduled.set_targets(asked);
    if args.engine.lengths.is_some() {
        progress::note("--lengths has no effect: schedulers know where the answers of a trace end");
    }
    let settings = args.engine.settings();
    let names = scheduled.strategies(&settings);
    let (mut reports, mut timelines) = (Vec::new(), Vec::new());
    for name in &names {
        let mut look = window.map(|window| RecordedSteps::new(window, &work.requests));
        reports.push(one(&mut scheduled, name, &work.requests, look.as_mut(), name));
        timelines.extend(look.map(RecordedSteps::into_timeline));
    }
    let machine = settings.timed_machine().map(|machine| machine.name.clone());
    let device = scheduled.engine().placement().device;
    let hardware = machine.unwrap_or(device);
    let kv_type = scheduled.engine().placement().kv_type;
    let about = ReportHead {
        model: &opened.name,
        hardware: &hardware,
        tokens: scheduled.tokens(),
        kv_type,
        boundary: None,
        experts: scheduled.experts(),
    };
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    if window.is_some() {
        let title = format!("{} on {}: {}", about.model, about.hardware, work.name);
        args.timeline.write(&title, &names, &timelines)?;
    }
    let curves = match &args.plot {
        Some(_) => curves(&mut scheduled, &work, &names, &reports, &asked),
        None => Vec::new(),
    };
    if let Some(path) = &args.records {
        records::write(path, &reports, &asked)?;
    }
    count_bad_rows(&work, &mut reports);
    if let Some(path) = &args.plot {
        let drawn = plot::svg(&about, &work, &reports, &curves)?;
        atomic_file::replace(path, |to| to.write_all(drawn.as_bytes()))?;
    }
    match args.json {
        true => output::json(&json(&about, &work, &reports, &asked)?),
        false => output::print(&table::text(&about, &work, &reports, &asked, false)),
    }
}

/// Latencies at other loads, up to the highest that the fastest strategy can serve.
fn curves(
    scheduled: &mut Scheduled,
    work: &Workload,
    names: &[&str],
    base: &[Report],
    targets: &Targets,
) -> Vec<SidePanel> {
    let full = match plot::works_at_once(work) {
        Some(requests) => {
            let at = |name| format!("{name}, all at once");
            let of: Vec<Report> =
                names.iter().map(|name| one(scheduled, name, &requests, None, &at(name))).collect();
            plot::most(&of, &requests)
        }
        None => plot::most(base, &work.requests),
    };
    let loads = plot::loads(work, full);
    let n = loads.len();
    let run = |(i, (load, requests)): (usize, (f64, Vec<Arrival>))| {
        let at = |name| format!("{name}, load {} of {n}, {load:.3} requests a second", i + 1);
        let of: Vec<Report> =
            names.iter().map(|name| one(scheduled, name, &requests, None, &at(name))).collect();
        (load, of)
    };
    let points: Vec<(f64, Vec<Report>)> = loads.into_iter().enumerate().map(run).collect();
    let points: Vec<(f64, &[Report])> = points.iter().map(|(load, of)| (*load, &of[..])).collect();
    plot::latency(names, &points, base, targets)
}

/// One run.
fn one(
    scheduled: &mut Scheduled,
    strategy: &str,
    arrivals: &[Arrival],
    look: Option<&mut RecordedSteps>,
    what: &str,
) -> Report {
    let mut requests = scheduled.requests(strategy);
    let bar = progress::count_bar(arrivals.len() as u64, what);
    let report = replay(&mut requests, strategy, arrivals, look, &mut |over, tokens, now| {
        bar.say(&format!("{what}: {:.0} tok/s", tokens as f64 / now.max(1e-9)));
        bar.set(over as u64);
    });
    bar.finish();
    scheduled.back(requests);
    report
}
