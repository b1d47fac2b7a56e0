//! The comparison as a picture: throughput by strategy, and how it changes with load or with the length of answers.
//!
//! ```text
//! offline, made up    (a) tokens per second   (b) gain over gpu-only against the length of answers
//! otherwise           (a) tokens per second   (b) latency per token against load
//!                     (c) time to the first token: median, 99%   (d) between tokens: requests of the GPU, of the host
//! with targets        (e) requests in time per second against load, the knee marked
//! latencies           (f) share of the requests by their latency per token (NEO, figure 7)
//! ```
//! The knee of a strategy is the highest load at which it keeps the targets.

use anyhow::Result;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};
use tandem::sched::Targets;
use tandem::sim::Report;
use tandem::workload::{Arrival, Draw, Length, Shape, Source, Synthetic, Workload, arrive};

use super::{Args, ReportHead, Run, Setup};
use crate::cli::chart::{
    Area, BOTTOM, Chart, Frame, INK, LEFT, TOP, at, caption, failed, nothing, number, sheet, text,
    unit_of_time,
};

const WIDTH: u32 = 1240;
/// Height of a row of panels in pixels.
const HEIGHT: u32 = 440;

/// A colour for each strategy, the same in all pictures (after Okabe and Ito).
static COLOURS: [(&str, RGBColor); 5] = [
    ("gpu-only", RGBColor(120, 120, 120)),
    ("fastdecode", RGBColor(230, 159, 0)),
    ("neo", RGBColor(86, 146, 199)),
    ("apex", RGBColor(213, 94, 0)),
    ("auto", RGBColor(0, 128, 96)),
];

fn colour(name: &str) -> &'static RGBColor {
    COLOURS.iter().find(|c| c.0 == name).map_or(&INK, |c| &c.1)
}

/// Number of requests for each point of a load-latency curve.
const POINT: usize = 400;

/// Loads to try, as shares of the highest throughput.
const LOADS: [f64; 7] = [0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 1.05];

/// Points of a strategy.
struct Line {
    strategy: String,
    dashed: bool,
    points: Vec<(f64, f64)>,
}

/// A panel beside the bars.
pub struct SidePanel {
    words: &'static str,
    x: &'static str,
    /// Name of the y axis; `None` for seconds in a suitable unit.
    y: Option<&'static str>,
    /// Whether x is in octaves.
    logarithmic: bool,
    lines: Vec<Line>,
    /// Points with a ring around them: a strategy, x and y.
    knees: Vec<(String, f64, f64)>,
}

/// Simulates the points of the curves: offline synthetic requests with different lengths of answers, other workloads at
/// different loads.
pub fn sweep(
    setup: &Setup,
    args: &Args,
    work: &Workload,
    names: &[&str],
    base: &[Report],
) -> Result<Vec<SidePanel>> {
    match &args.trace {
        Source::Synthetic(made) if work.rate().is_none() => Ok(vec![gains(setup, args, made, names)?]),
        _ => latencies(setup, work, names, base),
    }
}

fn gains(setup: &Setup, args: &Args, made: &Synthetic, names: &[&str]) -> Result<SidePanel> {
    let scale = |n: u32, f: f64| ((f64::from(n) * f).round() as u32).max(1);
    // Halves and doubles the length within the pages and the model's context.
    let context = (setup.sizes.spec.max_context as u64).min(1 << 24) as u32;
    let lengths: Vec<Length> = [0.125, 0.25, 0.5, 1.0, 2.0, 4.0]
        .map(|f| Length { least: scale(made.output.least, f), most: scale(made.output.most, f) })
        .into_iter()
        .filter(|l| l.most + made.input.most <= context)
        .collect();
    let shape =
        Shape { rate: Some(0.0), limit: args.limit.map(|n| n as usize), seed: args.seed, context: None };
    let works: Vec<Vec<Arrival>> =
        lengths.iter().map(|&output| Synthetic { output, ..*made }.requests(&shape)).collect();
    let reports = setup.run(&crossed(&works, names), "simulating answers of other lengths")?;
    let by_gain = names.contains(&"gpu-only");
    let mut lines = lines_of(names, false);
    for (of, l) in reports.chunks(names.len()).zip(&lengths) {
        let unit =
            of.iter().find(|r| by_gain && r.strategy == "gpu-only").map_or(1.0, |r| r.throughput_tok_s);
        for (line, report) in lines.iter_mut().zip(of).filter(|_| unit > 0.0) {
            line.points.push((f64::from(l.least.midpoint(l.most)), report.throughput_tok_s / unit));
        }
    }
    let y = if by_gain { "throughput over gpu-only" } else { "tokens per second" };
    Ok(SidePanel {
        words: "throughput by the length of answers",
        x: "tokens of an answer",
        y: Some(y),
        logarithmic: true,
        lines,
        knees: Vec::new(),
    })
}

/// Runs of every strategy on each of `works`.
fn crossed<'a>(works: &'a [Vec<Arrival>], names: &[&'a str]) -> Vec<Run<'a>> {
    let of = |requests: &'a Vec<Arrival>| names.iter().map(move |&strategy| Run { strategy, requests });
    works.iter().flat_map(of).collect()
}

fn latencies(setup: &Setup, work: &Workload, names: &[&str], base: &[Report]) -> Result<Vec<SidePanel>> {
    let at_once = works_at_once(work);
    let full = match &at_once {
        Some(requests) => {
            let runs: Vec<Run<'_>> = names.iter().map(|strategy| Run { strategy, requests }).collect();
            most(&setup.run(&runs, "simulating the highest load")?, requests)
        }
        None => most(base, &work.requests),
    };
    let points = loads(work, full);
    let (rates, works): (Vec<f64>, Vec<Vec<Arrival>>) = points.into_iter().unzip();
    let reports = setup.run(&crossed(&works, names), "simulating other loads")?;
    let points: Vec<(f64, &[Report])> = rates.into_iter().zip(reports.chunks(names.len())).collect();
    Ok(latency(names, &points, base, &setup.options.targets))
}

/// The requests of the curve's points, all arriving at the start, which gives the highest throughput; `None` for a
/// workload that already has all of them at the start.
pub fn works_at_once(work: &Workload) -> Option<Vec<Arrival>> {
    work.rate()?;
    let n = work.requests.len().min(POINT);
    Some(work.requests[..n].iter().map(|r| Arrival { at: 0.0, ..*r }).collect())
}

/// Requests per second that the fastest of `reports` has finished.
pub fn most(reports: &[Report], requests: &[Arrival]) -> f64 {
    let best = reports.iter().map(|r| r.throughput_tok_s).fold(0.0, f64::max);
    let tokens: u64 = requests.iter().map(|r| u64::from(r.output)).sum();
    best * requests.len() as f64 / (tokens.max(1)) as f64
}

/// Loads to try, in requests per second, from low to above `full`, each with requests of `work` that arrive at that
/// load.
pub fn loads(work: &Workload, full: f64) -> Vec<(f64, Vec<Arrival>)> {
    let n = work.requests.len().min(POINT);
    let at = |load: f64| {
        let mut requests = work.requests[..n].to_vec();
        arrive(&mut requests, load * full, &mut Draw::new(1));
        (load * full, requests)
    };
    LOADS.map(at).into_iter().filter(|(load, _)| *load > 0.0).collect()
}

fn lines_of(names: &[&str], dashed: bool) -> Vec<Line> {
    let of = |n: &&str| Line { strategy: (*n).to_owned(), dashed, points: Vec::new() };
    names.iter().map(of).collect()
}

/// Curves of latency against load from each strategy's reports, of goodput if there are targets, and the shares of latencies in `base`.
pub fn latency(
    names: &[&str],
    points: &[(f64, &[Report])],
    base: &[Report],
    targets: &Targets,
) -> Vec<SidePanel> {
    type Of = fn(&Report) -> Option<f64>;
    let curve = |words, parts: &[(bool, Of)]| {
        let part = |&(dashed, of): &(bool, Of)| {
            let mut lines = lines_of(names, dashed);
            for &(load, reports) in points {
                for (line, report) in lines.iter_mut().zip(reports) {
                    line.points.extend(of(report).map(|t| (load, t)));
                }
            }
            lines
        };
        let lines = parts.iter().flat_map(part).collect();
        SidePanel { words, x: "requests per second", y: None, logarithmic: false, lines, knees: Vec::new() }
    };
    let mut curves = vec![
        curve("time per token, from arrival", &[(false, |r| r.latency_per_token_s)]),
        curve(
            "time to the first token: median, 99% (dashed)",
            &[(false, |r| r.ttft_s.p50), (true, |r| r.ttft_s.p99)],
        ),
        curve(
            "between tokens, median: requests of the GPU, of the host (dashed)",
            &[(false, |r| r.tpot_s.gpu.p50), (true, |r| r.tpot_s.host.p50)],
        ),
    ];
    if targets.is_some() {
        let goodput = curve(
            "requests in time per second; ringed: the highest load that keeps the targets",
            &[(false, |r| Some(r.goodput_req_s))],
        );
        curves.push(SidePanel { y: Some("requests per second"), knees: knees(names, points), ..goodput });
    }
    curves.push(shares(base));
    curves
}

/// Of each strategy the point of the highest load at which it keeps the targets.
fn knees(names: &[&str], points: &[(f64, &[Report])]) -> Vec<(String, f64, f64)> {
    let of = |(i, name): (usize, &&str)| {
        let keeps = points.iter().filter(|(_, reports)| reports[i].keeps_targets == Some(true));
        let (load, reports) = keeps.max_by(|a, b| a.0.total_cmp(&b.0))?;
        Some(((*name).to_owned(), *load, reports[i].goodput_req_s))
    };
    names.iter().enumerate().filter_map(of).collect()
}

/// Points of a distribution.
const SHARES: usize = 50;

/// The share of requests whose latency per token, from arrival, is at most so much (NEO, figure 7).
fn shares(base: &[Report]) -> SidePanel {
    let line = |report: &Report| {
        let done = report.trips.iter().filter(|t| t.is_done());
        let mut all: Vec<f64> = done.map(|t| (t.last - t.arrived) / f64::from(t.made)).collect();
        all.sort_by(f64::total_cmp);
        // Those that failed never come.
        let share = |i: usize| (i + 1) as f64 / report.trips.len() as f64;
        let step = all.len().div_ceil(SHARES).max(1);
        let mut points: Vec<(f64, f64)> =
            all.iter().enumerate().step_by(step).map(|(i, &t)| (t, 100.0 * share(i))).collect();
        points.extend(all.last().map(|&t| (t, 100.0 * share(all.len() - 1))));
        Line { strategy: report.strategy.clone(), dashed: false, points }
    };
    SidePanel {
        words: "requests whose time per token, from arrival, is at most",
        x: "seconds",
        y: Some("per cent of the requests"),
        logarithmic: false,
        lines: base.iter().map(line).collect(),
        knees: Vec::new(),
    }
}

/// The sheet.
pub fn svg(
    about: &ReportHead<'_>,
    work: &Workload,
    reports: &[Report],
    curves: &[SidePanel],
) -> Result<String> {
    let (gpu, host) = about.tokens;
    let name = work.name.rsplit('/').next().unwrap_or_default();
    let title = format!("{} on {}: {name}", about.model, about.hardware);
    let kv = format!("keys and values: {gpu} tokens on the GPU, {host} on the host");
    let rows = (1 + curves.len()).div_ceil(2);
    sheet((WIDTH, 50 + HEIGHT * rows as u32), &title, &kv, |sheet| {
        let panels = sheet.split_evenly((rows, 2));
        bars(&panels[0], reports)?;
        for ((panel, curve), letter) in panels[1..].iter().zip(curves).zip(["b", "c", "d", "e", "f"]) {
            draw(panel, letter, curve)?;
        }
        Ok(())
    })
}

/// Draws tokens per second of each strategy, over the makespan and in the steady window.
fn bars(area: &Area<'_>, reports: &[Report]) -> Result<()> {
    caption(area, "a", "tokens per second: makespan, steady window (pale)")?;
    let top =
        reports.iter().map(|r| r.throughput_tok_s.max(r.steady_tok_s)).fold(0.0, f64::max).max(1e-9) * 1.15;
    let n = reports.len() as f64;
    let right = 30;
    let frame = Frame {
        x: 0.0..n,
        y: 0.0..top,
        names: ("", ""),
        labels: (&|_| String::new(), &|t| number(*t, top)),
        ticks: (1, 8),
        grid: true,
        margin: (right, 12),
    };
    let mut chart = frame.begin(area)?;
    frame.axes(&mut chart)?;
    for (i, r) in reports.iter().enumerate() {
        let (x, c) = (i as f64, colour(&r.strategy));
        let pair = [(0.12, 0.5, r.throughput_tok_s, 1.0), (0.5, 0.88, r.steady_tok_s, 0.4)];
        chart
            .draw_series(pair.map(|(from, to, y, alpha)| {
                Rectangle::new([(x + from, 0.0), (x + to, y)], c.mix(alpha).filled())
            }))
            .map_err(failed)?;
        let above = at(text(13), HPos::Center, VPos::Bottom);
        let words = number(r.throughput_tok_s, r.throughput_tok_s.max(10.0));
        chart
            .draw_series([Text::new(words, (x + 0.31, r.throughput_tok_s + top * 0.01), above)])
            .map_err(failed)?;
    }
    // Names under the axis are drawn in pixels, because the chart clips anything below it.
    let (width, height) = area.dim_in_pixel();
    let inner = f64::from(width - LEFT - right);
    for (i, r) in reports.iter().enumerate() {
        let x = f64::from(LEFT) + inner * (i as f64 + 0.5) / n;
        let below = at(text(13).color(colour(&r.strategy)), HPos::Center, VPos::Top);
        area.draw(&Text::new(r.strategy.clone(), (x as i32, height as i32 - 44), below)).map_err(failed)?;
    }
    Ok(())
}

/// Draws a curve with a line for each strategy, named at its end.
fn draw(area: &Area<'_>, letter: &str, curve: &SidePanel) -> Result<()> {
    caption(area, letter, curve.words)?;
    let points = || curve.lines.iter().flat_map(|l| &l.points);
    let (low, high) = points().fold((f64::INFINITY, 0.0), |(a, b): (f64, f64), p| (a.min(p.0), b.max(p.0)));
    if high <= 0.0 {
        return nothing(area, "nothing finished");
    }
    let put = |x: f64| if curve.logarithmic { x.log2() } else { x };
    let from = if curve.logarithmic { put(low) - 0.2 } else { 0.0 };
    let span = (put(high) - from).max(1e-6);
    let most = points().map(|p| p.1).fold(0.0, f64::max) * 1.1;
    let (unit, y) = match curve.y {
        Some(name) => (1.0, name),
        None => unit_of_time(most),
    };
    let top = most / unit;
    let octave = |x: &f64| number(x.exp2(), high);
    let plain = |x: &f64| number(*x, high);
    let right = 100;
    let frame = Frame {
        x: from..from + span * 1.02,
        y: 0.0..top,
        names: (curve.x, y),
        labels: (if curve.logarithmic { &|_| String::new() } else { &plain }, &|t| number(*t, top)),
        ticks: (8, 8),
        grid: true,
        margin: (right, 12),
    };
    let mut chart = frame.begin(area)?;
    frame.axes(&mut chart)?;
    if curve.logarithmic {
        // Ticks are at the points, whose lengths are round, unlike powers of two.
        let (width, height) = area.dim_in_pixel();
        let inner = f64::from(width - LEFT - right);
        let mut places: Vec<f64> = points().map(|p| put(p.0)).collect();
        places.sort_by(f64::total_cmp);
        places.dedup();
        for x in places {
            let pixel = f64::from(LEFT) + inner * (x - from) / (span * 1.02);
            let (pixel, y) = (pixel as i32, height as i32 - 12 - BOTTOM as i32);
            area.draw(&PathElement::new(vec![(pixel, y), (pixel, y + 5)], INK)).map_err(failed)?;
            let label = at(text(13), HPos::Center, VPos::Top);
            area.draw(&Text::new(octave(&x), (pixel, y + 8), label)).map_err(failed)?;
        }
    }
    // The first lines are the widest, so that coinciding lines all stay visible.
    let mut ends: Vec<End<'_>> = Vec::new();
    for (i, line) in curve.lines.iter().enumerate() {
        let c = colour(&line.strategy);
        let placed: Vec<(f64, f64)> = line.points.iter().map(|&(x, y)| (put(x), y / unit)).collect();
        let later = curve.lines[i + 1..].iter().filter(|l| !l.dashed && !line.dashed).count();
        let width = 2 + later.min(4) as u32 / 2;
        one(&mut chart, &placed, c.stroke_width(width), line.dashed)?;
        let rings = curve.knees.iter().filter(|(name, ..)| *name == line.strategy);
        chart
            .draw_series(rings.map(|&(_, x, y)| Circle::new((put(x), y / unit), 8, c.stroke_width(2))))
            .map_err(failed)?;
        if let Some(last) = placed.last() {
            ends.push((last.1, &line.strategy, line.dashed));
        }
    }
    name_ends(area, ends, top, right)
}

fn one(chart: &mut Chart<'_, '_>, points: &[(f64, f64)], style: ShapeStyle, dashed: bool) -> Result<()> {
    if dashed {
        let line = DashedLineSeries::new(points.iter().copied(), 5, 4, style);
        chart.draw_series(line).map_err(failed)?;
    } else {
        chart.draw_series(LineSeries::new(points.iter().copied(), style)).map_err(failed)?;
    }
    let size = 2 + style.stroke_width as i32 / 2;
    let mark = points.iter().map(|&p| Circle::new(p, size, style.color.filled()));
    chart.draw_series(mark).map_err(failed)?;
    Ok(())
}

/// Where a line ends, its strategy, and whether it is dashed.
type End<'a> = (f64, &'a str, bool);

/// Draws names beside the ends of lines, moved apart if too close.
fn name_ends(area: &Area<'_>, mut ends: Vec<End<'_>>, top: f64, right: u32) -> Result<()> {
    ends.sort_by(|a, b| b.0.total_cmp(&a.0));
    let (width, height) = area.dim_in_pixel();
    let inner = f64::from(height - TOP - 12 - BOTTOM);
    let mut pixels: Vec<f64> = ends.iter().map(|e| f64::from(TOP) + inner * (1.0 - e.0 / top)).collect();
    for i in 1..pixels.len() {
        pixels[i] = pixels[i].max(pixels[i - 1] + 15.0);
    }
    let mut lowest = f64::from(TOP) + inner;
    for pixel in pixels.iter_mut().rev() {
        *pixel = pixel.min(lowest);
        lowest = *pixel - 15.0;
    }
    for ((_, name, dashed), y) in ends.into_iter().zip(pixels) {
        let words = if dashed { format!("{name} ┄") } else { name.to_owned() };
        let label = at(text(13).color(colour(name)), HPos::Left, VPos::Center);
        area.draw(&Text::new(words, ((width - right + 6) as i32, y as i32), label)).map_err(failed)?;
    }
    Ok(())
}
