//! The plan as a picture: time against the boundary k, memory on each side, and LIA's policy map.
//!
//! Four panels on one sheet, white, with the fonts of the reader's own system: nothing is rendered here.

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use tandem::plan::choose::{Candidate, Plan, Request, boundary_curve};
use tandem::plan::{Hardware, Sizes};

use super::map::{Cell, Map, vector};

pub(in crate::cli) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

const SIZE: (u32, u32) = (1240, 940);
const FONT: &str = "Helvetica, Arial, sans-serif";

pub(in crate::cli) const INK: RGBColor = RGBColor(40, 40, 40);
pub(in crate::cli) const GREY: RGBColor = RGBColor(150, 150, 150);
const BLUE: RGBColor = RGBColor(31, 97, 158);
const ORANGE: RGBColor = RGBColor(217, 119, 6);
const RED: RGBColor = RGBColor(185, 28, 28);

/// Distinct in print and for most eyes (after Okabe and Ito).
const PALETTE: [RGBColor; 8] = [
    RGBColor(86, 146, 199),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(120, 120, 120),
    RGBColor(213, 94, 0),
    RGBColor(240, 228, 66),
    RGBColor(90, 60, 140),
];

pub(in crate::cli) fn failed(e: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("drawing: {e}")
}

pub(in crate::cli) fn text(size: u32) -> TextStyle<'static> {
    TextStyle::from((FONT, size)).color(&INK)
}

pub(in crate::cli) fn at(style: TextStyle<'static>, h: HPos, v: VPos) -> TextStyle<'static> {
    style.pos(Pos::new(h, v))
}

/// The sheet.
pub fn svg(
    sizes: &Sizes,
    hardware: &Hardware,
    request: &Request,
    plan: &Plan,
    map: Option<&Map>,
) -> Result<String> {
    let mut out = String::new();
    {
        let root = SVGBackend::with_string(&mut out, SIZE).into_drawing_area();
        root.fill(&WHITE).map_err(failed)?;
        let title = format!(
            "{} on {}: {} x ({} + {} tokens)",
            sizes.spec.name, hardware.name, request.batch, request.prompt, request.gen_len
        );
        root.draw(&Text::new(title, (30, 18), text(20))).map_err(failed)?;
        let chosen = plan.chosen.map_or("nothing fits", |i| plan.candidates[i].strategy.name());
        let chosen = format!("chosen: {chosen}");
        root.draw(&Text::new(chosen, (SIZE.0 as i32 - 30, 20), at(text(16), HPos::Right, VPos::Top)))
            .map_err(failed)?;
        let (_, sheet) = root.split_vertically(50);
        let panels = sheet.split_evenly((2, 2));
        boundary(&panels[0], sizes, hardware, request, plan)?;
        memory(&panels[1], plan)?;
        match map {
            Some(map) => {
                policies(&panels[2], map, "c", "prefill", |c| c.prefill)?;
                policies(&panels[3], map, "d", "decode", |c| c.decode)?;
            }
            None => caption(&panels[2], "c", "no GPU: no policy map")?,
        }
        root.present().map_err(failed)?;
    }
    Ok(out)
}

pub(in crate::cli) fn caption(area: &Area<'_>, letter: &str, words: &str) -> Result<()> {
    area.draw(&Text::new(format!("({letter})  {words}"), (30, 6), text(15))).map_err(failed)
}

/// Time against k, with the other candidates as lines.
fn boundary(
    area: &Area<'_>,
    sizes: &Sizes,
    hardware: &Hardware,
    request: &Request,
    plan: &Plan,
) -> Result<()> {
    caption(area, "a", "predicted time against the boundary k (units on the CPU)")?;
    let curve: Vec<(f64, f64)> =
        boundary_curve(sizes, hardware, request)?.into_iter().map(|(k, t)| (k as f64, t)).collect();
    let others: Vec<&Candidate> = plan.candidates.iter().filter(|c| c.feasible && c.k.is_none()).collect();
    if curve.is_empty() {
        let label = at(text(15).color(&GREY), HPos::Left, VPos::Top);
        return area.draw(&Text::new("no boundary fits", (70, 60), label)).map_err(failed);
    }
    let units = sizes.units() as f64;
    // The curve fills the panel; what is far slower is told at its upper edge.
    let top = curve.iter().map(|p| p.1).fold(0.0, f64::max) * 1.2;
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .margin_top(34)
        .margin_right(30)
        .x_label_area_size(42)
        .y_label_area_size(66)
        .build_cartesian_2d(0f64..units, 0f64..top)
        .map_err(failed)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(WHITE)
        .bold_line_style(RGBColor(225, 225, 225))
        .axis_style(INK)
        .label_style(text(13))
        .axis_desc_style(text(14))
        .x_desc("k")
        .y_desc("seconds")
        .x_label_formatter(&|k| format!("{k:.0}"))
        .y_label_formatter(&|t| if top < 5.0 { format!("{t:.2}") } else { format!("{t:.0}") })
        .draw()
        .map_err(failed)?;
    let first = curve[0].0;
    if first > 0.0 {
        let shade = Rectangle::new([(0.0, 0.0), (first, top)], RGBColor(240, 240, 240).filled());
        chart.draw_series([shade]).map_err(failed)?;
        if first > units * 0.2 {
            let label = at(text(13).color(&GREY), HPos::Center, VPos::Center);
            chart
                .draw_series([Text::new("does not fit the GPU", (first / 2.0, top * 0.5), label)])
                .map_err(failed)?;
        }
    }
    // Labels of lines that lie close together move apart.
    let mut marks: Vec<(f64, &str)> =
        others.iter().filter_map(|c| Some((c.t_total_s?, c.strategy.name()))).collect();
    let above = marks.iter().filter(|m| m.0 > top * 0.93).map(|m| format!("{} {:.0} s", m.1, m.0));
    let above = above.collect::<Vec<_>>().join(", ");
    if !above.is_empty() {
        let label = at(text(13).color(&ORANGE), HPos::Right, VPos::Top);
        let words = format!("beyond this panel: {above}");
        chart.draw_series([Text::new(words, (units * 0.99, top * 0.985), label)]).map_err(failed)?;
    }
    marks.retain(|m| m.0 <= top * 0.93);
    marks.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut lowest = 0.0;
    for (t, name) in marks {
        let dashes = (0..60).map(|i| {
            let x = units * i as f64 / 60.0;
            PathElement::new(vec![(x, t), (x + units / 110.0, t)], ORANGE.stroke_width(1))
        });
        chart.draw_series(dashes).map_err(failed)?;
        let y = f64::max(t, lowest);
        lowest = y + top * 0.05;
        let label = at(text(13).color(&ORANGE), HPos::Left, VPos::Bottom);
        chart.draw_series([Text::new(name, (units * 0.015, y + top * 0.004), label)]).map_err(failed)?;
    }
    chart.draw_series(LineSeries::new(curve.iter().copied(), BLUE.stroke_width(2))).map_err(failed)?;
    let (k, t) = curve.iter().copied().min_by(|a, b| a.1.total_cmp(&b.1)).expect("it is not empty");
    chart.draw_series([Circle::new((k, t), 5, RED.filled())]).map_err(failed)?;
    let (h, dx) = if k > units * 0.6 { (HPos::Right, -0.015) } else { (HPos::Left, 0.015) };
    let label = at(text(14).color(&RED), h, VPos::Top);
    let words = format!("k = {k:.0}: {}", if t < 10.0 { format!("{t:.2} s") } else { format!("{t:.1} s") });
    chart
        .draw_series([Text::new(words, (k + dx * units, (t - top * 0.025).max(top * 0.07)), label)])
        .map_err(failed)?;
    Ok(())
}

/// Stacked bars, GPU and host beside each other, with what there is as a line.
fn memory(area: &Area<'_>, plan: &Plan) -> Result<()> {
    caption(area, "b", "memory of each candidate, GB")?;
    let parts = ["weights", "KV", "staging", "activations", "other"];
    let gpu = |c: &Candidate| {
        let m = &c.memory.gpu;
        ([m.weights, m.kv, m.staging, m.activations, m.workspace + m.modules], m.available)
    };
    let host = |c: &Candidate| {
        let m = &c.memory.host;
        ([m.weights, m.kv, 0, m.activations, m.pinned], m.available)
    };
    let (width, height) = area.dim_in_pixel();
    let (width, height) = (width as i32, height as i32);
    let (left, top, bottom, gap) = (92, 66, height - 76, 34);
    let half = (width - left - gap - 40) / 2;
    let row = (bottom - top) / plan.candidates.len().max(1) as i32;
    let bar = (row * 6 / 10).min(34);
    type Side = fn(&Candidate) -> ([u64; 5], u64);
    let sides: [(&str, i32, Side); 2] = [("GPU", left, gpu), ("host", left + half + gap, host)];
    for (name, x0, of) in sides {
        let gb = |b: u64| b as f64 / 1e9;
        let available = plan.candidates.iter().map(|c| of(c).1).max().unwrap_or(0);
        let totals = plan.candidates.iter().map(|c| of(c).0.iter().sum::<u64>());
        let full = gb(totals.max().unwrap_or(0).max(available)).max(1e-9) * 1.1;
        let x = |b: f64| x0 + (b / full * half as f64) as i32;
        area.draw(&Text::new(name, (x0, top - 24), text(14))).map_err(failed)?;
        area.draw(&PathElement::new(vec![(x0, top), (x0, bottom)], INK)).map_err(failed)?;
        area.draw(&PathElement::new(vec![(x0, bottom), (x0 + half, bottom)], INK)).map_err(failed)?;
        for tick in ticks(full) {
            area.draw(&PathElement::new(vec![(x(tick), bottom), (x(tick), bottom + 4)], INK))
                .map_err(failed)?;
            let label = at(text(13), HPos::Center, VPos::Top);
            area.draw(&Text::new(format!("{tick}"), (x(tick), bottom + 7), label)).map_err(failed)?;
        }
        for (i, c) in plan.candidates.iter().enumerate() {
            let middle = top + row * i as i32 + row / 2;
            let mut from = 0;
            for (part, colour) in of(c).0.into_iter().zip(PALETTE) {
                let (a, b) = (x(gb(from)), x(gb(from + part)));
                if b > a {
                    let shape = [(a, middle - bar / 2), (b, middle + bar / 2)];
                    let fill = if c.feasible { colour.mix(1.0) } else { colour.mix(0.35) };
                    area.draw(&Rectangle::new(shape, fill.filled())).map_err(failed)?;
                }
                from += part;
            }
            if x0 == left {
                let style = if plan.chosen == Some(i) { text(14).color(&RED) } else { text(14) };
                let name = c.strategy.name();
                area.draw(&Text::new(name, (left - 8, middle), at(style, HPos::Right, VPos::Center)))
                    .map_err(failed)?;
            }
        }
        if available > 0 {
            let line = x(gb(available));
            let dashes =
                (top..bottom).step_by(8).map(|y| PathElement::new(vec![(line, y), (line, y + 4)], RED));
            for dash in dashes {
                area.draw(&dash).map_err(failed)?;
            }
            let label = at(text(12).color(&RED), HPos::Center, VPos::Bottom);
            area.draw(&Text::new("available", (line.min(x0 + half - 14), top - 2), label)).map_err(failed)?;
        }
    }
    let mut x = left;
    for (part, colour) in parts.iter().zip(PALETTE) {
        let y = height - 32;
        area.draw(&Rectangle::new([(x, y - 6), (x + 12, y + 6)], colour.filled())).map_err(failed)?;
        area.draw(&Text::new(*part, (x + 18, y), at(text(13), HPos::Left, VPos::Center))).map_err(failed)?;
        x += 34 + 8 * part.len() as i32;
    }
    let label = at(text(12).color(&GREY), HPos::Left, VPos::Center);
    area.draw(&Text::new("pale: does not fit", (x + 8, height - 32), label)).map_err(failed)
}

/// Four to eight round numbers up to `full`.
fn ticks(full: f64) -> Vec<f64> {
    let rough = full / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].iter().map(|m| m * power).find(|s| *s >= rough).unwrap_or(power * 10.0);
    // Rounded, or 0.30000000000000004 is a label.
    (0..).map(|i| ((i as f64 * step) * 1e6).round() / 1e6).take_while(|t| *t <= full).collect()
}

/// Which vector is best, by batch and prompt length, both in octaves.
fn policies(
    area: &Area<'_>,
    map: &Map,
    letter: &str,
    phase: &str,
    of: impl Fn(&Cell) -> [u8; 6] + Copy,
) -> Result<()> {
    let how = if map.overlap { "transfers under compute" } else { "serial costs" };
    caption(area, letter, &format!("LIA's policy for {phase}, 1 = CPU ({how})"))?;
    let vectors = map.vectors(of);
    let colour = |bits: [u8; 6]| match bits {
        [1, 1, 1, 1, 1, 1] => PALETTE[0],
        [0, 1, 1, 0, 0, 0] => PALETTE[1],
        [0, 0, 0, 0, 0, 0] => PALETTE[2],
        _ => PALETTE[3 + vectors.iter().position(|v| *v == bits).unwrap_or(0) % 5],
    };
    let edges = |values: &[u64]| -> Vec<f64> {
        let logs: Vec<f64> = values.iter().map(|&v| (v as f64).log2()).collect();
        let half = if logs.len() > 1 { (logs[1] - logs[0]) / 2.0 } else { 0.125 };
        let last = logs.len() - 1;
        let tail = if last > 0 { (logs[last] - logs[last - 1]) / 2.0 } else { 0.125 };
        let inner = logs.windows(2).map(|w| (w[0] + w[1]) / 2.0);
        [logs[0] - half].into_iter().chain(inner).chain([logs[last] + tail]).collect()
    };
    let (bs, ss) = (edges(&map.batches), edges(&map.prompts));
    let (x, y) = (bs[0]..bs[bs.len() - 1], ss[0]..ss[ss.len() - 1]);
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .margin_top(34)
        .margin_right(30)
        .margin_bottom(40)
        .x_label_area_size(42)
        .y_label_area_size(66)
        .build_cartesian_2d(x, y)
        .map_err(failed)?;
    let cells = map.cells.iter().enumerate().map(|(i, cell)| {
        let (b, s) = (i / map.prompts.len(), i % map.prompts.len());
        Rectangle::new([(bs[b], ss[s]), (bs[b + 1], ss[s + 1])], colour(of(cell)).filled())
    });
    chart.draw_series(cells).map_err(failed)?;
    chart
        .configure_mesh()
        .disable_mesh()
        .axis_style(INK)
        .label_style(text(13))
        .axis_desc_style(text(14))
        .x_desc("batch B")
        .y_desc("prompt length S")
        .x_labels(12)
        .y_labels(8)
        .x_label_formatter(&|v| power(*v))
        .y_label_formatter(&|v| power(*v))
        .draw()
        .map_err(failed)?;
    let (_, height) = area.dim_in_pixel();
    let mut x = 78;
    for bits in vectors.iter().take(3) {
        let y = height as i32 - 26;
        area.draw(&Rectangle::new([(x, y - 6), (x + 12, y + 6)], colour(*bits).filled())).map_err(failed)?;
        let words = format!("{} {}", vector(*bits), name(*bits));
        area.draw(&Text::new(words, (x + 18, y), at(text(13), HPos::Left, VPos::Center))).map_err(failed)?;
        x += 178;
    }
    Ok(())
}

/// Labels are at whole powers of two.
fn power(log2: f64) -> String {
    if (log2 - log2.round()).abs() < 1e-6 { format!("{:.0}", log2.round().exp2()) } else { String::new() }
}

fn name(bits: [u8; 6]) -> &'static str {
    match bits {
        [1, 1, 1, 1, 1, 1] => "all CPU",
        [0, 0, 0, 0, 0, 0] => "all GPU",
        [0, 1, 1, 0, 0, 0] => "attention CPU",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_ticks() {
        assert_eq!(ticks(8.8), [0.0, 2.0, 4.0, 6.0, 8.0]);
        assert_eq!(ticks(0.35), [0.0, 0.1, 0.2, 0.3]);
    }

    #[test]
    fn powers_of_two() {
        assert_eq!((power(3.0).as_str(), power(3.5).as_str()), ("8", ""));
    }
}
