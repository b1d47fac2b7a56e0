//! The plan as a picture: time against the boundary k, memory on each side, and LIA's policy map.
//!
//! Four panels on one white sheet, in the fonts of the reader's system: text is not rendered here.

use anyhow::Result;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};
use tandem::plan::{Candidate, Hardware, Plan, PlanRequest, Sizes, boundary_curve};

use super::map::{Cell, Map, vector};
use crate::cli::chart::{
    Area, Frame, GREY, INK, PALETTE, at, caption, failed, nothing, number, sheet, text, ticks,
};

const SIZE: (u32, u32) = (1240, 940);

const BLUE: RGBColor = RGBColor(31, 97, 158);
const ORANGE: RGBColor = RGBColor(217, 119, 6);
const RED: RGBColor = RGBColor(185, 28, 28);

/// The sheet.
pub fn svg(
    sizes: &Sizes,
    hardware: &Hardware,
    request: &PlanRequest,
    plan: &Plan,
    map: Option<&Map>,
) -> Result<String> {
    let title = format!(
        "{} on {}: {} x ({} + {} tokens)",
        sizes.spec.name, hardware.name, request.batch, request.prompt, request.gen_len
    );
    let chosen = plan.chosen.map_or("nothing fits", |i| plan.candidates[i].strategy.name());
    sheet(SIZE, &title, &format!("chosen: {chosen}"), |sheet| {
        let panels = sheet.split_evenly((2, 2));
        boundary(&panels[0], sizes, hardware, request, plan)?;
        memory(&panels[1], plan)?;
        match map {
            Some(map) => {
                policies(&panels[2], map, "c", "prefill", |c| c.prefill)?;
                policies(&panels[3], map, "d", "decode", |c| c.decode)
            }
            None => caption(&panels[2], "c", "no GPU: no policy map"),
        }
    })
}

/// Time against k, with the other candidates as lines.
fn boundary(
    area: &Area<'_>,
    sizes: &Sizes,
    hardware: &Hardware,
    request: &PlanRequest,
    plan: &Plan,
) -> Result<()> {
    caption(area, "a", "predicted time against the boundary k (units on the CPU)")?;
    let curve: Vec<(f64, f64)> =
        boundary_curve(sizes, hardware, request)?.into_iter().map(|(k, t)| (k as f64, t)).collect();
    let others: Vec<&Candidate> = plan.candidates.iter().filter(|c| c.feasible && c.k.is_none()).collect();
    if curve.is_empty() {
        return nothing(area, "no boundary fits");
    }
    let units = sizes.units() as f64;
    // The curve fills the panel; far slower candidates are named at its upper edge.
    let top = curve.iter().map(|p| p.1).fold(0.0, f64::max) * 1.2;
    let frame = Frame {
        x: 0.0..units,
        y: 0.0..top,
        names: ("k", "seconds"),
        labels: (&|k| format!("{k:.0}"), &|t| number(*t, top)),
        ticks: (10, 10),
        grid: true,
        margin: (30, 12),
    };
    let mut chart = frame.begin(area)?;
    frame.axes(&mut chart)?;
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
    // Move the labels of close lines apart.
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

/// Draws stacked bars, GPU and host side by side, with the available memory as a line.
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
    // Only weights are there.
    let nodes = |c: &Candidate| {
        let m = c.memory.nodes.unwrap_or_default();
        ([m.weights, 0, 0, 0, 0], m.available)
    };
    type Side = fn(&Candidate) -> ([u64; 5], u64);
    let mut sides: Vec<(&str, Side)> = vec![("GPU", gpu), ("host", host)];
    if plan.candidates.iter().any(|c| c.memory.nodes.is_some()) {
        sides.push(("memory nodes", nodes));
    }
    let n = sides.len() as i32;
    let (left, top, bottom, gap) = (92, 66, height - 76, 34);
    let part = (width - left - gap * (n - 1) - 40) / n;
    let row = (bottom - top) / plan.candidates.len().max(1) as i32;
    let bar = (row * 6 / 10).min(34);
    for (side, (name, of)) in (0..).zip(sides) {
        let x0 = left + side * (part + gap);
        let gb = |b: u64| b as f64 / 1e9;
        let available = plan.candidates.iter().map(|c| of(c).1).max().unwrap_or(0);
        let totals = plan.candidates.iter().map(|c| of(c).0.iter().sum::<u64>());
        let full = gb(totals.max().unwrap_or(0).max(available)).max(1e-9) * 1.1;
        let x = |b: f64| x0 + (b / full * part as f64) as i32;
        area.draw(&Text::new(name, (x0, top - 24), text(14))).map_err(failed)?;
        area.draw(&PathElement::new(vec![(x0, top), (x0, bottom)], INK)).map_err(failed)?;
        area.draw(&PathElement::new(vec![(x0, bottom), (x0 + part, bottom)], INK)).map_err(failed)?;
        for tick in ticks(full) {
            area.draw(&PathElement::new(vec![(x(tick), bottom), (x(tick), bottom + 4)], INK))
                .map_err(failed)?;
            let label = at(text(13), HPos::Center, VPos::Top);
            area.draw(&Text::new(format!("{tick}"), (x(tick), bottom + 7), label)).map_err(failed)?;
        }
        for (i, c) in plan.candidates.iter().enumerate() {
            let middle = top + row * i as i32 + row / 2;
            let mut from = 0;
            for (bytes, colour) in of(c).0.into_iter().zip(PALETTE) {
                let (a, b) = (x(gb(from)), x(gb(from + bytes)));
                if b > a {
                    let shape = [(a, middle - bar / 2), (b, middle + bar / 2)];
                    let fill = if c.feasible { colour.mix(1.0) } else { colour.mix(0.35) };
                    area.draw(&Rectangle::new(shape, fill.filled())).map_err(failed)?;
                }
                from += bytes;
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
            area.draw(&Text::new("available", (line.min(x0 + part - 14), top - 2), label)).map_err(failed)?;
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

/// Draws the best vector by batch and prompt length, both in octaves.
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
    let frame = Frame {
        x,
        y,
        names: ("batch B", "prompt length S"),
        labels: (&|v| power(*v), &|v| power(*v)),
        ticks: (12, 8),
        grid: false,
        margin: (30, 40),
    };
    let mut chart = frame.begin(area)?;
    let cells = map.cells.iter().enumerate().map(|(i, cell)| {
        let (b, s) = (i / map.prompts.len(), i % map.prompts.len());
        Rectangle::new([(bs[b], ss[s]), (bs[b + 1], ss[s + 1])], colour(of(cell)).filled())
    });
    chart.draw_series(cells).map_err(failed)?;
    frame.axes(&mut chart)?;
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

/// The label of a whole power of two.
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
    fn powers_of_two() {
        assert_eq!((power(3.0).as_str(), power(3.5).as_str()), ("8", ""));
    }
}
