//! The comparison as a picture: throughput by strategy, and how it changes with load or with the length of answers.

use anyhow::Result;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};
use tandem::sim::Report;
use tandem::workload::{Arrival, Length, Shape, Source, Synthetic, Workload};

use super::{About, Args, Run, Setup};
use crate::cli::plan::plot::{Area, GREY, INK, at, caption, failed, text};

const SIZE: (u32, u32) = (1240, 520);

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

/// Requests of each point of a load-latency curve.
const POINT: usize = 400;

/// Shares of the highest throughput that loads are tried at.
const LOADS: [f64; 7] = [0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 1.05];

/// What is drawn beside the bars.
pub struct Curve {
    x: &'static str,
    y: &'static str,
    logarithmic: bool,
    lines: Vec<(String, Vec<(f64, f64)>)>,
}

/// Simulates the points of the curve: offline synthetic requests with other lengths of answers, others at other loads.
pub fn sweep(setup: &Setup, args: &Args, work: &Workload, names: &[&str], base: &[Report]) -> Result<Curve> {
    match &args.trace {
        Source::Synthetic(made) if work.rate().is_none() => gains(setup, args, made, names),
        _ => latencies(setup, work, names, base),
    }
}

fn gains(setup: &Setup, args: &Args, made: &Synthetic, names: &[&str]) -> Result<Curve> {
    let scale = |n: u32, f: f64| ((f64::from(n) * f).round() as u32).max(1);
    // Halves and doubles as far as the pages and the model's context reach.
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
    let runs: Vec<Run<'_>> = works
        .iter()
        .flat_map(|requests| names.iter().map(move |strategy| Run { strategy, requests }))
        .collect();
    let reports = setup.run(&runs, "simulating answers of other lengths")?;
    let by_gain = names.contains(&"gpu-only");
    let mut lines: Vec<(String, Vec<(f64, f64)>)> =
        names.iter().map(|n| ((*n).to_owned(), Vec::new())).collect();
    for (of, l) in reports.chunks(names.len()).zip(&lengths) {
        let unit =
            of.iter().find(|r| by_gain && r.strategy == "gpu-only").map_or(1.0, |r| r.throughput_tok_s);
        for (line, report) in lines.iter_mut().zip(of).filter(|_| unit > 0.0) {
            line.1.push((f64::from(l.least.midpoint(l.most)), report.throughput_tok_s / unit));
        }
    }
    let y = if by_gain { "throughput over gpu-only" } else { "tokens per second" };
    Ok(Curve { x: "tokens of an answer", y, logarithmic: true, lines })
}

fn latencies(setup: &Setup, work: &Workload, names: &[&str], base: &[Report]) -> Result<Curve> {
    let points = loads(work, base);
    let runs: Vec<Run<'_>> = points
        .iter()
        .flat_map(|(_, requests)| names.iter().map(move |strategy| Run { strategy, requests }))
        .collect();
    let reports = setup.run(&runs, "simulating other loads")?;
    let points: Vec<(f64, &[Report])> = points.iter().map(|p| p.0).zip(reports.chunks(names.len())).collect();
    Ok(latency(names, &points))
}

/// Loads to try, in requests per second, from little to more than the fastest of `base` manages; and requests of `work` that
/// arrive so.
pub fn loads(work: &Workload, base: &[Report]) -> Vec<(f64, Vec<Arrival>)> {
    let n = work.requests.len().min(POINT);
    let best = base.iter().map(|r| r.throughput_tok_s).fold(0.0, f64::max);
    let mean = work.tokens().1 as f64 / work.requests.len().max(1) as f64;
    // Requests per second at which the fastest is full, if it was full: a trace with idle times has its own rate at least.
    let full = (best / mean).max(work.rate().unwrap_or(0.0));
    let at = |load: f64| {
        let mut requests = work.requests[..n].to_vec();
        tandem::workload::arrive(&mut requests, load * full, &mut tandem::workload::Draw::new(1));
        (load * full, requests)
    };
    LOADS.map(at).to_vec()
}

/// Latency against load: what each strategy reports at each.
pub fn latency(names: &[&str], points: &[(f64, &[Report])]) -> Curve {
    let mut lines: Vec<(String, Vec<(f64, f64)>)> =
        names.iter().map(|n| ((*n).to_owned(), Vec::new())).collect();
    for &(load, of) in points {
        for (line, report) in lines.iter_mut().zip(of) {
            line.1.extend(report.latency_per_token_s.map(|t| (load, t)));
        }
    }
    Curve { x: "requests per second", y: "seconds per token, from arrival", logarithmic: false, lines }
}

/// The sheet.
pub fn svg(about: &About<'_>, work: &Workload, reports: &[Report], curve: &Curve) -> Result<String> {
    let mut out = String::new();
    {
        let root = SVGBackend::with_string(&mut out, SIZE).into_drawing_area();
        root.fill(&WHITE).map_err(failed)?;
        let (gpu, host) = about.tokens;
        let name = work.name.rsplit('/').next().unwrap_or_default();
        let title = format!("{} on {}: {name}", about.model, about.hardware);
        root.draw(&Text::new(title, (30, 18), text(20))).map_err(failed)?;
        let kv = format!("keys and values: {gpu} tokens on the GPU, {host} on the host");
        let right = at(text(14).color(&GREY), HPos::Right, VPos::Top);
        root.draw(&Text::new(kv, (SIZE.0 as i32 - 30, 22), right)).map_err(failed)?;
        let (_, sheet) = root.split_vertically(50);
        let (left, right) = sheet.split_horizontally(480);
        bars(&left, reports)?;
        lines(&right, curve)?;
        root.present().map_err(failed)?;
    }
    Ok(out)
}

/// Tokens per second of each strategy: over the makespan, and in the steady window.
fn bars(area: &Area<'_>, reports: &[Report]) -> Result<()> {
    caption(area, "a", "tokens per second: makespan (full), steady window (pale)")?;
    let top =
        reports.iter().map(|r| r.throughput_tok_s.max(r.steady_tok_s)).fold(0.0, f64::max).max(1e-9) * 1.15;
    let n = reports.len() as f64;
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .margin_top(34)
        .x_label_area_size(42)
        .y_label_area_size(66)
        .build_cartesian_2d(0f64..n, 0f64..top)
        .map_err(failed)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .disable_x_axis()
        .light_line_style(WHITE)
        .bold_line_style(RGBColor(225, 225, 225))
        .axis_style(INK)
        .label_style(text(13))
        .y_label_formatter(&|t| if top < 20.0 { format!("{t:.1}") } else { format!("{t:.0}") })
        .draw()
        .map_err(failed)?;
    for (i, r) in reports.iter().enumerate() {
        let (x, c) = (i as f64, colour(&r.strategy));
        let pair = [(0.12, 0.5, r.throughput_tok_s, 1.0), (0.5, 0.88, r.steady_tok_s, 0.4)];
        chart
            .draw_series(pair.map(|(from, to, y, alpha)| {
                Rectangle::new([(x + from, 0.0), (x + to, y)], c.mix(alpha).filled())
            }))
            .map_err(failed)?;
        let above = at(text(13), HPos::Center, VPos::Bottom);
        let words = if r.throughput_tok_s < 20.0 {
            format!("{:.1}", r.throughput_tok_s)
        } else {
            format!("{:.0}", r.throughput_tok_s)
        };
        chart
            .draw_series([Text::new(words, (x + 0.31, r.throughput_tok_s + top * 0.01), above)])
            .map_err(failed)?;
    }
    // Names under the axis, in pixels: the chart clips what is below it.
    let (width, height) = area.dim_in_pixel();
    let inner = f64::from(width) - 12.0 - 66.0 - 12.0;
    for (i, r) in reports.iter().enumerate() {
        let x = 12.0 + 66.0 + inner * (i as f64 + 0.5) / n;
        let below = at(text(13).color(colour(&r.strategy)), HPos::Center, VPos::Top);
        area.draw(&Text::new(r.strategy.clone(), (x as i32, height as i32 - 44), below)).map_err(failed)?;
    }
    Ok(())
}

/// The curve, a line for each strategy, named at its end.
fn lines(area: &Area<'_>, curve: &Curve) -> Result<()> {
    let words = format!("{} against {}", curve.y, curve.x);
    caption(area, "b", &words)?;
    let points = || curve.lines.iter().flat_map(|l| &l.1);
    let (low, high) = points().fold((f64::INFINITY, 0.0), |(a, b): (f64, f64), p| (a.min(p.0), b.max(p.0)));
    if high <= 0.0 {
        let label = at(text(15).color(&GREY), HPos::Left, VPos::Top);
        return area.draw(&Text::new("nothing finished", (70, 60), label)).map_err(failed);
    }
    let put = |x: f64| if curve.logarithmic { x.log2() } else { x };
    let back = |x: f64| if curve.logarithmic { x.exp2() } else { x };
    let from = if curve.logarithmic { put(low) - 0.2 } else { 0.0 };
    let span = (put(high) - from).max(1e-6);
    let top = points().map(|p| p.1).fold(0.0, f64::max) * 1.1;
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .margin_top(34)
        .margin_right(100)
        .x_label_area_size(46)
        .y_label_area_size(70)
        .build_cartesian_2d(from..from + span * 1.02, 0f64..top)
        .map_err(failed)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(WHITE)
        .bold_line_style(RGBColor(225, 225, 225))
        .axis_style(INK)
        .label_style(text(13))
        .axis_desc_style(text(14))
        .x_desc(curve.x)
        .y_desc(curve.y)
        .x_label_formatter(&|x| {
            if back(*x) < 10.0 { format!("{:.1}", back(*x)) } else { format!("{:.0}", back(*x)) }
        })
        .y_label_formatter(&|t| if top < 5.0 { format!("{t:.2}") } else { format!("{t:.1}") })
        .draw()
        .map_err(failed)?;
    let mut ends: Vec<(f64, &str)> = Vec::new();
    for (name, points) in &curve.lines {
        let c = colour(name);
        let placed: Vec<(f64, f64)> = points.iter().map(|&(x, y)| (put(x), y)).collect();
        chart.draw_series(LineSeries::new(placed.iter().copied(), c.stroke_width(2))).map_err(failed)?;
        chart.draw_series(placed.iter().map(|&p| Circle::new(p, 3, c.filled()))).map_err(failed)?;
        ends.extend(placed.last().map(|p| (p.1, name.as_str())));
    }
    // Names that lie close together move apart, upwards.
    ends.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (width, height) = area.dim_in_pixel();
    let inner = f64::from(height) - 34.0 - 12.0 - 46.0;
    let mut lowest = f64::INFINITY;
    for (y, name) in ends {
        let pixel = (34.0 + inner * (1.0 - y / top)).min(lowest - 16.0);
        lowest = pixel;
        let label = at(text(13).color(colour(name)), HPos::Left, VPos::Center);
        area.draw(&Text::new(name.to_owned(), (width as i32 - 96, pixel as i32), label)).map_err(failed)?;
    }
    Ok(())
}
