//! Timelines as a drawing: time to the right, a lane a unit with a row for each of its sub-batches, a colour for each kind of work.
//!
//! ```text
//! (a) neo                                       step 0 ┆            step 1 ┆
//! GPU   batch 0   ▓▓▓▓░▓▓▓▓░      ▓▓▓▓░▓▓▓▓░           ┆
//!       batch 1             ▓▓▓▓▓            ▓▓▓▓▓     ┆                            98%
//! CPU   batch 1         ░░░░░░░░░░    ░░░░░░░░░░       ┆                            61%
//! ```
//! All panels have the same scale of time, so that their steps can be compared.

use std::io::Write;

use super::{Panel, Timeline, Traced};
use crate::program::Unit;

const WIDTH: f64 = 1200.0;
/// Beside the lanes: their names; how busy they are.
const LEFT: f64 = 124.0;
const RIGHT: f64 = 58.0;
const ROW: f64 = 22.0;
/// Between lanes.
const GAP: f64 = 8.0;
/// A panel's name and its steps' numbers.
const HEAD: f64 = 40.0;
/// The axis under a panel.
const FOOT: f64 = 34.0;
const INK: &str = "#282828";
const GREY: &str = "#8a8a8a";

/// A kind of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Class {
    Products,
    Attention,
    Ends,
    Rows,
    Pages,
    Weights,
}

impl Class {
    const ALL: [Class; 6] =
        [Class::Products, Class::Attention, Class::Ends, Class::Rows, Class::Pages, Class::Weights];

    fn of(s: &Traced) -> Class {
        match s.name {
            "attend" | "merge" | "append" => Class::Attention,
            "embed" | "head" | "pick" => Class::Ends,
            "publish" | "collect" | "carry" => Class::Rows,
            "page_in" | "page_out" => Class::Pages,
            "stream" => Class::Weights,
            _ => Class::Products,
        }
    }

    fn colour(self) -> &'static str {
        match self {
            Class::Products => "#4a7fb5",
            Class::Attention => "#e08214",
            Class::Ends => "#9aa5ad",
            Class::Rows => "#3f9b6c",
            Class::Pages => "#8868ad",
            Class::Weights => "#a6761d",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Class::Products => "products with weights",
            Class::Attention => "attention",
            Class::Ends => "embedding, head",
            Class::Rows => "rows between the sides",
            Class::Pages => "pages of keys and values",
            Class::Weights => "streamed weights",
        }
    }
}

fn lane_name(unit: Unit) -> &'static str {
    match unit {
        Unit::Gpu => "GPU",
        Unit::H2d => "h2d",
        Unit::D2h => "d2h",
        Unit::Host => "CPU",
    }
}

/// A row of a lane: one sub-batch, in steps with cohorts (`true`) or others.
type RowKey = (u8, bool);

/// Operations drawn as one rectangle: neighbours of a layer that do the same kind of work.
struct Block<'a> {
    first: &'a Traced,
    class: Class,
    count: usize,
    start: f64,
    end: f64,
}

/// Lanes and rows of a panel, and where they are.
struct Lanes {
    /// Unit, its rows, its upper edge.
    lanes: Vec<(Unit, Vec<RowKey>, f64)>,
    height: f64,
}

impl Lanes {
    fn of(timeline: &Timeline) -> Lanes {
        let (mut lanes, mut y) = (Vec::new(), 0.0);
        for unit in [Unit::Gpu, Unit::Host, Unit::H2d, Unit::D2h] {
            let mut rows: Vec<RowKey> =
                timeline.spans.iter().filter(|s| s.unit == unit && !s.is_mark()).map(row_of).collect();
            rows.sort_unstable();
            rows.dedup();
            if !rows.is_empty() {
                let height = ROW * rows.len() as f64;
                lanes.push((unit, rows, y));
                y += height + GAP;
            }
        }
        Lanes { lanes, height: y.max(ROW) }
    }

    /// The upper edge of an operation's row.
    fn y(&self, s: &Traced) -> f64 {
        let Some((_, rows, y)) = self.lanes.iter().find(|l| l.0 == s.unit) else { return 0.0 };
        y + ROW * rows.iter().position(|r| *r == row_of(s)).unwrap_or_default() as f64
    }
}

fn row_of(s: &Traced) -> RowKey {
    (s.sub_batch, s.cohort.is_some())
}

/// Merges adjacent spans: at this scale the border between them is not visible.
fn blocks<'a>(timeline: &'a Timeline, pixel: f64) -> Vec<Block<'a>> {
    let mut order: Vec<&Traced> = timeline.spans.iter().filter(|s| !s.is_mark()).collect();
    order.sort_by(|a, b| (a.unit, row_of(a)).cmp(&(b.unit, row_of(b))).then(a.start.total_cmp(&b.start)));
    let mut all: Vec<Block<'a>> = Vec::new();
    for s in order {
        let class = Class::of(s);
        if let Some(last) = all.last_mut()
            && last.class == class
            && (last.first.unit, row_of(last.first)) == (s.unit, row_of(s))
            && s.start - last.end < 0.3 * pixel
            && (last.first.layer == s.layer || last.end - last.start < 2.0 * pixel)
        {
            last.count += 1;
            last.end = last.end.max(s.end);
        } else {
            all.push(Block { first: s, class, count: 1, start: s.start, end: s.end });
        }
    }
    all
}

/// A round number of seconds between ticks, about ten of them, and the unit to write them in.
fn ticks(seconds: f64) -> (f64, f64, &'static str) {
    let (unit, name) = match seconds {
        s if s >= 2.0 => (1.0, "s"),
        s if s >= 2e-3 => (1e-3, "ms"),
        _ => (1e-6, "µs"),
    };
    let rough = (seconds / unit / 10.0).max(1e-9);
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0].into_iter().map(|m| m * power).find(|s| *s >= rough).unwrap_or(10.0 * power);
    (step * unit, unit, name)
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn length(seconds: f64) -> String {
    match seconds {
        s if s >= 2.0 => format!("{s:.2} s"),
        s if s >= 2e-3 => format!("{:.2} ms", 1e3 * s),
        s => format!("{:.1} µs", 1e6 * s),
    }
}

/// Draws timelines under each other, with the same scale of time.
///
/// # Errors
/// The writer's.
pub fn write_svg(title: &str, panels: &[Panel<'_>], mut to: impl Write) -> std::io::Result<()> {
    let end = |t: &Timeline| t.spans.iter().map(|s| s.end).fold(0.0, f64::max);
    let seconds = panels.iter().map(|p| end(p.timeline)).fold(0.0, f64::max).max(1e-9);
    let lanes: Vec<Lanes> = panels.iter().map(|p| Lanes::of(p.timeline)).collect();
    let top = 34.0;
    let height = top + lanes.iter().map(|l| HEAD + l.height + FOOT).sum::<f64>() + 30.0;
    writeln!(
        to,
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" font-family="Helvetica, Arial, sans-serif" font-size="12" fill="{INK}">"##,
    )?;
    writeln!(to, r##"<rect width="100%" height="100%" fill="white"/>"##)?;
    writeln!(to, r##"<text x="16" y="24" font-size="16">{}</text>"##, escape(title))?;
    let mut y = top;
    for (i, (panel, lanes)) in panels.iter().zip(&lanes).enumerate() {
        let letter = (panels.len() > 1).then(|| char::from(b'a' + (i % 26) as u8));
        draw(panel, lanes, letter, y, seconds, &mut to)?;
        y += HEAD + lanes.height + FOOT;
    }
    legend(panels, y + 10.0, &mut to)?;
    writeln!(to, "</svg>")
}

fn draw(
    panel: &Panel<'_>,
    lanes: &Lanes,
    letter: Option<char>,
    top: f64,
    seconds: f64,
    to: &mut impl Write,
) -> std::io::Result<()> {
    let timeline = panel.timeline;
    let scale = (WIDTH - LEFT - RIGHT) / seconds;
    let x = |t: f64| LEFT + t * scale;
    let letter = letter.map(|l| format!("({l})  ")).unwrap_or_default();
    writeln!(
        to,
        r##"<text x="16" y="{:.1}" font-size="14">{letter}{}</text>"##,
        top + 14.0,
        escape(panel.name)
    )?;
    let (y0, bottom) = (top + HEAD, top + HEAD + lanes.height);
    let end = timeline.spans.iter().map(|s| s.end).fold(0.0, f64::max);
    let cohorts = timeline.spans.iter().any(|s| s.cohort.is_some());
    if timeline.spans.is_empty() {
        writeln!(to, r##"<text x="{LEFT}" y="{:.1}" fill="{GREY}">no step</text>"##, y0 + 14.0)?;
    }
    for (unit, rows, y) in &lanes.lanes {
        let y = y0 + y;
        let high = ROW * rows.len() as f64;
        let middle = y + high / 2.0 + 4.0;
        writeln!(
            to,
            r##"<rect x="{LEFT}" y="{:.1}" width="{:.1}" height="{high}" fill="#f4f4f4"/><text x="16" y="{middle:.1}" font-size="13">{}</text>"##,
            y - 1.0,
            WIDTH - LEFT - RIGHT,
            lane_name(*unit)
        )?;
        if timeline.has_sub_batches() {
            for (i, (b, cohort)) in rows.iter().enumerate() {
                let mut of = timeline.spans.iter().filter(|s| s.unit == *unit && row_of(s) == (*b, *cohort));
                // Pages are of requests, not of a sub-batch.
                if of.all(|s| Class::of(s) == Class::Pages) {
                    continue;
                }
                let name = match (cohort, cohorts) {
                    (true, _) => format!("cohort {b}"),
                    (false, true) => "GPU's rows".into(),
                    (false, false) => format!("batch {b}"),
                };
                writeln!(
                    to,
                    r##"<text x="{:.1}" y="{:.1}" font-size="11" text-anchor="end" fill="{GREY}">{name}</text>"##,
                    LEFT - 8.0,
                    y + ROW * (i as f64 + 0.5) + 3.0
                )?;
            }
        }
        if end > 0.0 {
            let busy = 100.0 * timeline.busy(*unit) / end;
            writeln!(
                to,
                r##"<text x="{:.1}" y="{middle:.1}" text-anchor="end">{busy:.0}%</text>"##,
                WIDTH - 16.0
            )?;
        }
    }
    for block in blocks(timeline, 1.0 / scale) {
        let s = block.first;
        let (from, width) = (x(block.start), ((block.end - block.start) * scale).max(0.25));
        let y = y0 + lanes.y(s);
        let layer = s.layer.map(|l| format!(" {l}")).unwrap_or_default();
        let more = if block.count > 1 { format!(" and {} more", block.count - 1) } else { String::new() };
        writeln!(
            to,
            r##"<rect x="{from:.2}" y="{y:.1}" width="{width:.2}" height="{:.1}" fill="{}"><title>{}{layer}{more}: {} rows, {}</title></rect>"##,
            ROW - 2.0,
            block.class.colour(),
            s.label(timeline.has_sub_batches()),
            s.rows,
            length(block.end - block.start)
        )?;
        // The layer, where there is room for its number.
        if let Some(l) = s.layer.filter(|_| width > 16.0) {
            writeln!(
                to,
                r##"<text x="{:.2}" y="{:.1}" font-size="10" fill="white" text-anchor="middle">{l}</text>"##,
                from + width / 2.0,
                y + ROW / 2.0 + 2.5
            )?;
        }
    }
    for s in timeline.spans.iter().filter(|s| s.is_mark()) {
        let (at, y) = (x(s.start), y0 - 2.0);
        mark(s.name, at, y, to)?;
    }
    for step in 0..timeline.steps() {
        let Some(begin) = timeline.begin_of(step) else { continue };
        let at = x(begin);
        writeln!(
            to,
            r##"<path d="M{at:.2} {:.1}V{bottom:.1}" stroke="{INK}" stroke-dasharray="3 3"/><text x="{:.2}" y="{:.1}" font-size="11" fill="{GREY}">step {step}</text>"##,
            y0 - 16.0,
            at + 4.0,
            y0 - 9.0
        )?;
    }
    let (tick, unit, name) = ticks(seconds);
    writeln!(to, r##"<path d="M{LEFT} {bottom:.1}H{:.1}" stroke="{INK}"/>"##, WIDTH - RIGHT)?;
    for i in 0.. {
        let t = i as f64 * tick;
        if t > seconds * (1.0 + 1e-9) {
            break;
        }
        let value = t / unit;
        let value = if tick / unit < 1.0 { format!("{value:.1}") } else { format!("{value:.0}") };
        let value = if i == 0 { format!("{value} {name}") } else { value };
        writeln!(
            to,
            r##"<path d="M{0:.2} {bottom:.1}v4" stroke="{INK}"/><text x="{0:.2}" y="{1:.1}" font-size="11" text-anchor="middle">{value}</text>"##,
            x(t),
            bottom + 16.0
        )?;
    }
    Ok(())
}

/// A cohort that has joined: a full triangle; one that stays parked: an empty one.
fn mark(name: &str, at: f64, y: f64, to: &mut impl Write) -> std::io::Result<()> {
    let fill = if name == "join" { "#c1272d" } else { "white" };
    writeln!(
        to,
        r##"<path d="M{:.2} {:.1}h7l-3.5 6z" fill="{fill}" stroke="#c1272d"><title>{name}</title></path>"##,
        at - 3.5,
        y - 4.0
    )
}

fn legend(panels: &[Panel<'_>], y: f64, to: &mut impl Write) -> std::io::Result<()> {
    let spans = || panels.iter().flat_map(|p| &p.timeline.spans);
    let mut x = LEFT;
    for class in Class::ALL {
        if spans().any(|s| !s.is_mark() && Class::of(s) == class) {
            writeln!(
                to,
                r##"<rect x="{x:.1}" y="{:.1}" width="12" height="12" fill="{}"/><text x="{:.1}" y="{y:.1}">{}</text>"##,
                y - 10.0,
                class.colour(),
                x + 17.0,
                class.name()
            )?;
            x += 40.0 + 6.6 * class.name().len() as f64;
        }
    }
    for (name, words) in [("join", "a cohort joins"), ("parked", "it stays parked")] {
        if spans().any(|s| s.name == name) {
            mark(name, x + 6.0, y - 3.0, to)?;
            writeln!(to, r##"<text x="{:.1}" y="{y:.1}">{words}</text>"##, x + 17.0)?;
            x += 40.0 + 6.6 * words.len() as f64;
        }
    }
    Ok(())
}
