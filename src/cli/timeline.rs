//! `--timeline FILE`: which operation ran when, as a Chrome trace or a drawing; for many requests, in a few steps.

use std::path::{Path, PathBuf};

use tandem::timeline::{Panel, StepWindow, Timeline, write_chrome, write_svg};
use tandem::{Error, atomic_file};

/// The timeline of a few steps of a run of many requests.
#[derive(Debug, clap::Args)]
pub struct TimelineArgs {
    /// Write when each operation ran on which lane in a few steps of each strategy: as a Chrome trace (.json), or drawn (.svg).
    #[arg(long, value_name = "FILE", value_parser = file)]
    pub timeline: Option<PathBuf>,
    /// With --timeline: seconds since the beginning of the run at which the steps begin [default: when half of all tokens are made].
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true, requires = "timeline")]
    pub timeline_from: Option<f64>,
    /// With --timeline: how many steps.
    #[arg(long, value_name = "N", default_value_t = 2, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub timeline_steps: u32,
}

/// The two kinds of timeline, by the file's ending.
pub fn file(path: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(path);
    match path.extension().and_then(|e| e.to_str()) {
        Some("json" | "svg") => Ok(path),
        _ => {
            Err("a timeline is written to a file that ends in .json (a Chrome trace) or .svg (a drawing)"
                .into())
        }
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    let wrong = || format!("{text:?} is no time; wanted seconds, 0 or more");
    text.parse().ok().filter(|t: &f64| t.is_finite() && *t >= 0.0).ok_or_else(wrong)
}

/// Whether the file is to be a drawing.
pub fn is_drawn(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "svg")
}

impl TimelineArgs {
    /// The steps to record, if requested. Checks before the work that the file's folder exists.
    ///
    /// # Errors
    /// If the folder does not exist.
    pub fn window(&self) -> tandem::Result<Option<StepWindow>> {
        let Some(path) = &self.timeline else { return Ok(None) };
        atomic_file::check(path)?;
        Ok(Some(StepWindow { from: self.timeline_from, steps: self.timeline_steps }))
    }

    /// Writes the timelines by strategy.
    ///
    /// # Errors
    /// If no strategy ran as long as [`TimelineArgs::timeline_from`], or the file cannot be written.
    pub fn write(&self, title: &str, names: &[&str], timelines: &[Timeline]) -> tandem::Result<()> {
        let Some(path) = &self.timeline else { return Ok(()) };
        if timelines.iter().all(|t| t.spans.is_empty()) {
            let from = self.timeline_from.map(|t| format!("-from {t}")).unwrap_or_default();
            return Err(Error::usage(format!(
                "--timeline{from}: no step is made then; every run is over before"
            )));
        }
        let panels: Vec<Panel<'_>> =
            names.iter().zip(timelines).map(|(name, timeline)| Panel { name, timeline }).collect();
        atomic_file::replace(path, |to| match is_drawn(path) {
            true => write_svg(title, &panels, to),
            false => write_chrome(&panels, to),
        })
    }
}
