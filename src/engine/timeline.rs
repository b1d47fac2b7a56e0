//! When the operations of a run happened, on which lane: for people who look at overlap.

use std::borrow::Cow;
use std::io::Write;

use serde::Serialize;

use crate::program::Unit;

/// An operation that has run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Traced {
    /// The kind of operation: `ffn_up`.
    pub name: &'static str,
    /// Where it ran.
    pub unit: Unit,
    /// The block; embedding and head have none.
    pub layer: Option<u32>,
    /// How many rows.
    pub rows: u32,
    /// Of rows that wait for attention on the host between steps, their sub-batch. That they were looked for is an operation without
    /// length on the device's lane: `join`, or `parked` if they go on to wait.
    pub cohort: Option<u8>,
    /// The step that it belongs to, from 0.
    pub step: u32,
    /// Seconds since the timeline began.
    pub start: f64,
    /// Seconds since the timeline began.
    pub end: f64,
}

/// The operations of a run in the order of issue. Those of the host are timed by the thread that computes them, those of the device
/// by events on its lanes, which the lane passes when what was enqueued before is done.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Timeline {
    /// All of them.
    pub spans: Vec<Traced>,
}

/// An event of the Chrome trace format: a complete event ("X"), or the name of a lane ("M").
#[derive(Serialize)]
struct Event<'a> {
    name: Cow<'a, str>,
    ph: &'static str,
    pid: u32,
    tid: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    args: serde_json::Value,
}

impl Traced {
    /// The operation, and whose rows it is of.
    fn label(&self) -> Cow<'static, str> {
        match self.cohort {
            Some(c) => format!("cohort {c} {}", self.name).into(),
            None => self.name.into(),
        }
    }
}

impl Timeline {
    /// Seconds that a unit worked.
    pub fn busy(&self, unit: Unit) -> f64 {
        self.spans.iter().filter(|s| s.unit == unit).map(|s| s.end - s.start).sum()
    }

    /// Writes it as a Chrome trace (JSON; chrome://tracing, ui.perfetto.dev): a lane a unit, times in microseconds.
    ///
    /// # Errors
    /// The writer's.
    pub fn write_chrome(&self, mut to: impl Write) -> std::io::Result<()> {
        let tid = |unit: Unit| Unit::ALL.iter().position(|&u| u == unit).unwrap_or_default();
        let lane = |&unit: &Unit| Event {
            name: "thread_name".into(),
            ph: "M",
            pid: 1,
            tid: tid(unit),
            ts: None,
            dur: None,
            args: serde_json::json!({ "name": unit.name() }),
        };
        let span = |s: &Traced| Event {
            name: s.label(),
            ph: "X",
            pid: 1,
            tid: tid(s.unit),
            ts: Some(1e6 * s.start),
            dur: Some(1e6 * (s.end - s.start)),
            args: serde_json::json!({ "layer": s.layer, "rows": s.rows, "step": s.step, "cohort": s.cohort }),
        };
        let events: Vec<Event<'_>> = Unit::ALL.iter().map(lane).chain(self.spans.iter().map(span)).collect();
        serde_json::to_writer(&mut to, &events)?;
        to.write_all(b"\n")
    }

    /// Draws it as SVG: a lane a unit, time to the right, a colour for each kind of operation. Of a long run, the
    /// last `steps` steps.
    ///
    /// # Errors
    /// The writer's.
    pub fn write_svg(&self, mut to: impl Write, steps: u32) -> std::io::Result<()> {
        const WIDTH: f64 = 1200.0;
        const LANE: f64 = 44.0;
        const LEFT: f64 = 60.0;
        const TOP: f64 = 34.0;
        let last = self.spans.iter().map(|s| s.step).max().unwrap_or_default();
        let shown: Vec<&Traced> = self.spans.iter().filter(|s| s.step + steps > last).collect();
        let begin = shown.iter().map(|s| s.start).fold(f64::INFINITY, f64::min);
        let end = shown.iter().map(|s| s.end).fold(0.0, f64::max);
        let seconds = if shown.is_empty() { 1.0 } else { (end - begin).max(1e-9) };
        let x = |t: f64| LEFT + (t - begin) / seconds * WIDTH;
        let units: Vec<Unit> = Unit::ALL.into_iter().filter(|&u| shown.iter().any(|s| s.unit == u)).collect();
        let mut kinds: Vec<&str> = shown.iter().map(|s| s.name).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let colour = |name: &str| {
            let at = kinds.iter().position(|k| *k == name).unwrap_or_default();
            format!("hsl({:.0},60%,60%)", 360.0 * at as f64 / kinds.len().max(1) as f64)
        };
        let height = TOP + LANE * units.len() as f64 + 60.0;
        writeln!(
            to,
            r##"<svg xmlns="http://www.w3.org/2000/svg" width="{}" height="{height}" font-family="sans-serif" font-size="12">"##,
            LEFT + WIDTH + 20.0
        )?;
        writeln!(to, r##"<rect width="100%" height="100%" fill="white"/>"##)?;
        let what =
            if last < steps { "all steps".into() } else { format!("the last {steps} of {} steps", last + 1) };
        writeln!(to, r##"<text x="{LEFT}" y="20">{:.3} ms: {what}</text>"##, 1e3 * seconds)?;
        for (row, unit) in units.iter().enumerate() {
            let y = TOP + LANE * row as f64;
            writeln!(to, r##"<text x="8" y="{:.1}">{}</text>"##, y + LANE / 2.0, unit.name())?;
            for s in shown.iter().filter(|s| s.unit == *unit) {
                let (from, to_x) = (x(s.start), x(s.end));
                let layer = s.layer.map(|l| format!(" {l}")).unwrap_or_default();
                writeln!(
                    to,
                    r##"<rect x="{from:.2}" y="{y:.1}" width="{:.2}" height="{:.1}" fill="{}"><title>{}{layer}: {} rows, {:.1} us</title></rect>"##,
                    (to_x - from).max(if s.start == s.end { 1.5 } else { 0.2 }),
                    LANE - 8.0,
                    colour(s.name),
                    s.label(),
                    s.rows,
                    1e6 * (s.end - s.start)
                )?;
            }
        }
        let y = TOP + LANE * units.len() as f64 + 16.0;
        for (i, name) in kinds.iter().enumerate() {
            let (column, line) = (i % 10, i / 10);
            let (at, y) = (LEFT + 118.0 * column as f64, y + 20.0 * line as f64);
            writeln!(
                to,
                r##"<rect x="{at}" y="{:.1}" width="12" height="12" fill="{}"/><text x="{:.1}" y="{:.1}">{name}</text>"##,
                y - 10.0,
                colour(name),
                at + 16.0,
                y
            )?;
        }
        writeln!(to, "</svg>")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timeline() -> Timeline {
        let span = |name, unit, step, start, end| Traced {
            name,
            unit,
            layer: Some(2),
            rows: 3,
            cohort: None,
            step,
            start,
            end,
        };
        Timeline {
            spans: vec![
                span("embed", Unit::Host, 0, 0.0, 0.5),
                span("carry", Unit::H2d, 0, 0.5, 0.6),
                span("project", Unit::Gpu, 1, 0.6, 1.0),
            ],
        }
    }

    #[test]
    fn a_chrome_trace_has_every_operation_in_microseconds() {
        let mut out = Vec::new();
        timeline().write_chrome(&mut out).unwrap();
        let events: Vec<serde_json::Value> = serde_json::from_slice(&out).unwrap();
        let complete: Vec<_> = events.iter().filter(|e| e["ph"] == "X").collect();
        assert_eq!(complete.len(), 3);
        assert_eq!(
            (complete[2]["name"].as_str(), complete[2]["ts"].as_f64()),
            (Some("project"), Some(0.6e6))
        );
        assert!((complete[1]["dur"].as_f64().unwrap() - 0.1e6).abs() < 1e-3);
        assert_eq!(events.iter().filter(|e| e["ph"] == "M").count(), 4);
        assert_eq!(timeline().busy(Unit::Host), 0.5);
    }

    #[test]
    fn a_drawing_has_a_rectangle_for_each_operation_of_the_last_steps() {
        let drawn = |steps| {
            let mut out = Vec::new();
            timeline().write_svg(&mut out, steps).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!(drawn(2).matches("<title>").count(), 3);
        assert_eq!(drawn(1).matches("<title>").count(), 1);
        assert!(drawn(1).contains("the last 1 of 2 steps") && drawn(2).contains("all steps"));
        let mut out = Vec::new();
        Timeline::default().write_svg(&mut out, 4).unwrap();
        assert!(String::from_utf8(out).unwrap().ends_with("</svg>\n"));
    }
}
