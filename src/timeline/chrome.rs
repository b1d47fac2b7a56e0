//! A timeline as a Chrome trace (JSON): a process a timeline, a lane a unit, times in microseconds.

use std::borrow::Cow;
use std::io::Write;

use serde::Serialize;
use serde_json::{Value, json};

use super::{Panel, Traced};
use crate::program::Unit;

/// An event of the format: a complete event ("X"), or the name of a lane or a process ("M").
#[derive(Serialize)]
struct Event<'a> {
    name: Cow<'a, str>,
    ph: &'static str,
    pid: usize,
    tid: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    args: Value,
}

fn tid(unit: Unit) -> usize {
    Unit::ALL.iter().position(|&u| u == unit).unwrap_or_default()
}

/// Writes timelines, each as a process.
///
/// # Errors
/// The writer's.
pub fn write_chrome(panels: &[Panel<'_>], mut to: impl Write) -> std::io::Result<()> {
    let mut events: Vec<Event<'_>> = Vec::new();
    for (panel, pid) in panels.iter().zip(1..) {
        let meta = |name: &'static str, tid: usize, value: &str| Event {
            name: name.into(),
            ph: "M",
            pid,
            tid,
            ts: None,
            dur: None,
            args: json!({ "name": value }),
        };
        events.push(meta("process_name", 0, panel.name));
        events.extend(Unit::ALL.iter().map(|&unit| meta("thread_name", tid(unit), unit.name())));
        let several = panel.timeline.has_sub_batches();
        events.extend(panel.timeline.spans.iter().map(|s: &Traced| Event {
            name: s.label(several),
            ph: "X",
            pid,
            tid: tid(s.unit),
            ts: Some(1e6 * s.start),
            dur: Some(1e6 * (s.end - s.start)),
            args: json!({
                "layer": s.layer, "rows": s.rows, "step": s.step, "sub_batch": s.sub_batch, "cohort": s.cohort,
            }),
        }));
    }
    serde_json::to_writer(&mut to, &events)?;
    to.write_all(b"\n")
}
