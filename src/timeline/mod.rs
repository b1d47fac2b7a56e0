//! When the operations of a run happened, on which lane: to look at overlap.
//!
//! | a file | what |
//! |---|---|
//! | `chrome` | Chrome's trace format: chrome://tracing, ui.perfetto.dev |
//! | `svg` | a drawing: a lane a unit, a row for each of its sub-batches |
//!
//! The engine's timelines are measured, or of emulated time; those of simulations are what the virtual machine says.

mod chrome;
mod svg;

use std::borrow::Cow;
use std::io::Write;

use serde::Serialize;

use crate::program::Unit;

pub use chrome::write_chrome;
pub use svg::write_svg;

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
    /// Its sub-batch in the step.
    pub sub_batch: u8,
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

impl Traced {
    /// Whether it tells what was found rather than what was done: `join`, `parked`.
    fn is_mark(&self) -> bool {
        matches!(self.name, "join" | "parked")
    }

    /// The operation, and whose rows it is of where a step has `several` sub-batches.
    fn label(&self, several: bool) -> Cow<'static, str> {
        match self.cohort {
            Some(c) => format!("cohort {c} {}", self.name).into(),
            None if several => format!("batch {} {}", self.sub_batch, self.name).into(),
            None => self.name.into(),
        }
    }
}

/// The operations of a run in the order of issue. Those of the host are timed by the thread that computes them, those of the device
/// by events on its lanes, which the lane passes when what was enqueued before is done.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Timeline {
    /// The operations.
    pub spans: Vec<Traced>,
}

/// Which steps of a long run are looked at.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepWindow {
    /// Seconds since the run began; `None`: when half of all tokens have been made.
    pub from: Option<f64>,
    /// How many steps.
    pub steps: u32,
}

impl StepWindow {
    /// Steps recorded before those that are shown, and after them: attention of cohorts goes on over several steps.
    pub const MARGIN: u32 = 2;

    /// Whether it begins, `now` seconds after the run did, with so many tokens of `all`.
    pub fn begins(&self, now: f64, tokens: u64, all: u64) -> bool {
        self.from.map_or(2 * tokens >= all, |from| now >= from)
    }

    /// Steps to be recorded.
    pub fn recorded(&self) -> u32 {
        self.steps.saturating_add(2 * StepWindow::MARGIN)
    }

    /// The steps that are shown of the recorded ones ([`StepWindow::recorded`], or fewer if the run was shorter).
    pub fn cut(&self, timeline: &Timeline) -> Timeline {
        let steps = timeline.steps();
        let first = StepWindow::MARGIN.min(steps.saturating_sub(self.steps));
        timeline.part(first..first.saturating_add(self.steps))
    }
}

/// A timeline with a name, where several are shown together.
#[derive(Debug, Clone, Copy)]
pub struct Panel<'a> {
    /// Its name; may be empty.
    pub name: &'a str,
    /// What ran.
    pub timeline: &'a Timeline,
}

impl Timeline {
    /// Seconds that a unit worked.
    pub fn busy(&self, unit: Unit) -> f64 {
        self.spans.iter().filter(|s| s.unit == unit).map(|s| s.end - s.start).sum()
    }

    /// How many steps there are.
    pub fn steps(&self) -> u32 {
        self.spans.iter().map(|s| s.step + 1).max().unwrap_or(0)
    }

    /// When a step begins: what the host does for cohorts may be of earlier ones.
    fn begin_of(&self, step: u32) -> Option<f64> {
        let of =
            self.spans.iter().filter(|s| s.step == step && !(s.unit == Unit::Host && s.cohort.is_some()));
        of.map(|s| s.start).reduce(f64::min)
    }

    /// From the beginning of the first of `steps` to that of the one behind the last. What goes on over these borders is cut there;
    /// steps and seconds count from the first border.
    pub fn part(&self, steps: std::ops::Range<u32>) -> Timeline {
        let from = self.begin_of(steps.start).unwrap_or(0.0);
        let to = self.begin_of(steps.end).unwrap_or(f64::INFINITY);
        let inside = |s: &&Traced| {
            let marks = s.is_mark() && s.start >= from && s.start < to;
            let carried = s.unit == Unit::Host && s.cohort.is_some();
            let of_another = !(carried || steps.contains(&s.step));
            !of_another && (marks || (s.start < to && s.end > from))
        };
        let cut = |s: &Traced| Traced {
            start: s.start.max(from) - from,
            end: s.end.min(to) - from,
            step: s.step.saturating_sub(steps.start),
            ..s.clone()
        };
        Timeline { spans: self.spans.iter().filter(inside).map(cut).collect() }
    }

    /// Whether any step has several sub-batches.
    fn has_sub_batches(&self) -> bool {
        self.spans.iter().any(|s| s.sub_batch > 0)
    }

    /// Writes it as a Chrome trace: [`write_chrome`].
    ///
    /// # Errors
    /// The writer's.
    pub fn write_chrome(&self, to: impl Write) -> std::io::Result<()> {
        write_chrome(&[Panel { name: "tandem", timeline: self }], to)
    }

    /// Draws it ([`write_svg`]): of a long run, the last `steps` steps.
    ///
    /// # Errors
    /// The writer's.
    pub fn write_svg(&self, to: impl Write, steps: u32) -> std::io::Result<()> {
        let all = self.steps();
        let shown = self.part(all.saturating_sub(steps)..all);
        let title = match all > steps {
            true => format!("the last {steps} of {all} steps"),
            false => "all steps".into(),
        };
        write_svg(&title, &[Panel { name: "", timeline: &shown }], to)
    }
}
