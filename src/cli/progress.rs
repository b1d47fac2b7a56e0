//! Standard error: progress, logs, errors. Bars on a terminal, plain lines elsewhere.

use std::io::{IsTerminal, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
pub use tandem::open::decimal as megabytes;
use tandem::progress::{Progress, WorkUnit};

use super::flags;

const QUIET: u8 = 0;
const NORMAL: u8 = 1;
const VERBOSE: u8 = 2;
static VERBOSITY: AtomicU8 = AtomicU8::new(NORMAL);

/// What `-v` and `-q` ask for.
pub fn set_verbosity(verbose: bool, quiet: bool) {
    let level = match (verbose, quiet) {
        (_, true) => QUIET,
        (true, _) => VERBOSE,
        _ => NORMAL,
    };
    VERBOSITY.store(level, Ordering::Relaxed);
}

fn level() -> u8 {
    VERBOSITY.load(Ordering::Relaxed)
}

/// Writes text unchanged. (Not with `eprint!`, which panics if stderr is closed.)
pub fn raw(text: &str) {
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// `tandem: error: ...`, always shown.
pub fn error(message: &str) {
    say(&format!("error: {message}"));
}

fn say(message: &str) {
    raw(&format!("tandem: {}\n", one_line(&flags::in_place_of_settings(message))));
}

/// A line unless `--quiet`.
pub fn note(message: &str) {
    if level() >= NORMAL {
        say(message);
    }
}

/// A line with `--verbose`.
pub fn detail(message: &str) {
    if level() >= VERBOSE {
        say(message);
    }
}

/// `text` in one line without control sequences, since names of files and text from models are untrusted.
pub fn one_line(text: &str) -> String {
    let line = text.lines().map(str::trim).collect::<Vec<_>>().join(" ");
    if !line.contains(char::is_control) {
        return line;
    }
    let shown = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    line.chars().map(shown).collect()
}

/// Progress of a long operation, by bytes or by count. Threads may share it.
pub struct BytesBar {
    kind: Kind,
}

enum Kind {
    Hidden(AtomicU64),
    Bar(ProgressBar),
    Lines(Lines),
}

/// A line at the start, at most one every few seconds, and one at the end.
struct Lines {
    what: Mutex<String>,
    show: fn(u64) -> String,
    total: Option<u64>,
    at: AtomicU64,
    begun: Instant,
    said: Mutex<Instant>,
}

/// A bar over `total` bytes (a spinner if unknown) of `what`, which is shortened to fit the line: a bar that wraps onto
/// a second line would not stay in place.
pub fn bytes_bar(total: Option<u64>, what: &str) -> BytesBar {
    let template = match total {
        Some(_) => {
            "{wide_msg} [{bar:24}] {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} {eta}"
        }
        None => "{wide_msg} {spinner} {decimal_bytes} {decimal_bytes_per_sec}",
    };
    bar(total, what, template, megabytes)
}

/// A bar over `total` things (tokens...) of `what`.
pub fn count_bar(total: u64, what: &str) -> BytesBar {
    bar(Some(total), what, "{wide_msg} [{bar:24}] {pos}/{len} {per_sec} {eta}", |n| n.to_string())
}

fn bar(total: Option<u64>, what: &str, template: &str, show: fn(u64) -> String) -> BytesBar {
    let kind = if level() < NORMAL {
        Kind::Hidden(AtomicU64::new(0))
    } else if std::io::stderr().is_terminal() {
        let bar = total.map_or_else(ProgressBar::new_spinner, ProgressBar::new);
        let style = ProgressStyle::with_template(template).expect("a valid template");
        Kind::Bar(bar.with_style(style.progress_chars("=> ")).with_message(what.to_owned()))
    } else {
        let now = Instant::now();
        Kind::Lines(Lines {
            what: Mutex::new(what.into()),
            show,
            total,
            at: AtomicU64::new(0),
            begun: now,
            said: Mutex::new(now),
        })
    };
    BytesBar { kind }
}

impl BytesBar {
    /// Sets the bytes done so far.
    pub fn set(&self, bytes: u64) {
        match &self.kind {
            Kind::Hidden(at) => at.store(bytes, Ordering::Relaxed),
            Kind::Bar(bar) => bar.set_position(bytes),
            Kind::Lines(lines) => {
                lines.at.store(bytes, Ordering::Relaxed);
                lines.tick();
            }
        }
    }

    /// Adds to the bytes done.
    pub fn inc(&self, bytes: u64) {
        match &self.kind {
            Kind::Hidden(at) => drop(at.fetch_add(bytes, Ordering::Relaxed)),
            Kind::Bar(bar) => bar.inc(bytes),
            Kind::Lines(lines) => {
                lines.at.fetch_add(bytes, Ordering::Relaxed);
                lines.tick();
            }
        }
    }

    /// Changes the text beside the bar.
    pub fn say(&self, what: &str) {
        match &self.kind {
            Kind::Hidden(_) => {}
            Kind::Bar(bar) => bar.set_message(what.to_owned()),
            Kind::Lines(lines) => what.clone_into(&mut lines.what.lock().expect("no panic holds it")),
        }
    }

    /// Removes the bar; with plain lines, prints the time taken.
    pub fn finish(&self) {
        match &self.kind {
            Kind::Hidden(_) => {}
            Kind::Bar(bar) => bar.finish_and_clear(),
            Kind::Lines(lines) => lines.finish(),
        }
    }
}

impl Lines {
    fn tick(&self) {
        let Ok(mut said) = self.said.try_lock() else { return };
        if said.elapsed() >= Duration::from_secs(5) {
            *said = Instant::now();
            let at = (self.show)(self.at.load(Ordering::Relaxed));
            let what = self.what.lock().expect("no panic holds it").clone();
            match self.total {
                Some(total) => note(&format!("{what}: {at} of {}", (self.show)(total))),
                None => note(&format!("{what}: {at}")),
            }
        }
    }

    fn finish(&self) {
        let (at, took) = (self.at.load(Ordering::Relaxed), self.begun.elapsed());
        // Short work is not worth a line, and for interrupted work the error is reported.
        if self.total.is_none_or(|total| at >= total) && took >= Duration::from_secs(1) {
            let what = self.what.lock().expect("no panic holds it").clone();
            note(&format!("{what}: {} in {:.1} s", (self.show)(at), took.as_secs_f64()));
        }
    }
}

/// The library's progress on stderr: a bar at a time.
#[derive(Default)]
pub struct Stderr {
    bar: Mutex<Option<BytesBar>>,
}

impl Progress for Stderr {
    fn begin(&self, what: &str, total: Option<u64>, unit: WorkUnit) {
        let bar = match (unit, total) {
            (WorkUnit::Things, Some(total)) => count_bar(total, what),
            (_, total) => bytes_bar(total, what),
        };
        *self.bar.lock().expect("no panic holds it") = Some(bar);
    }
    fn at(&self, bytes: u64) {
        if let Some(bar) = &*self.bar.lock().expect("no panic holds it") {
            bar.set(bytes);
        }
    }
    fn end(&self) {
        if let Some(bar) = self.bar.lock().expect("no panic holds it").take() {
            bar.finish();
        }
    }
    fn note(&self, message: &str) {
        match &*self.bar.lock().expect("no panic holds it") {
            Some(BytesBar { kind: Kind::Bar(bar) }) => bar.suspend(|| note(message)),
            _ => note(message),
        }
    }
    fn detail(&self, message: &str) {
        if level() >= VERBOSE {
            self.note(message);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminals_are_told_nothing_by_strangers() {
        assert_eq!(one_line("a\n  b\r\nü 漢"), "a b ü 漢");
        assert_eq!(one_line("\x1b[2Jx\x07\u{9b}31m"), "\\u{1b}[2Jx\\u{7}\\u{9b}31m");
    }
}
