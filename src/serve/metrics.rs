//! Counters and histograms, and their text for Prometheus.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use super::lane_name;
use super::recent::Recent;
use crate::engine::Status;

/// Upper bounds of the histograms' buckets, in seconds: from one step of a small model to a minute.
const BOUNDS: [f64; 16] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0];

/// See the [module](self).
#[derive(Default)]
pub(super) struct Metrics {
    /// Requests answered, by path and status.
    requests: Mutex<BTreeMap<(&'static str, u16), u64>>,
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
    tokens: AtomicU64,
    first: Histogram,
    between: Histogram,
    whole: Histogram,
    /// Answers with targets of latency, and those of them that were within.
    with_targets: AtomicU64,
    within_targets: AtomicU64,
    /// The latest answers.
    pub recent: Recent,
}

#[derive(Default)]
struct Histogram {
    /// Observations up to each bound and above the one before; the last has the rest.
    buckets: [AtomicU64; BOUNDS.len() + 1],
    nanoseconds: AtomicU64,
}

impl Histogram {
    fn observe(&self, time: Duration) {
        let seconds = time.as_secs_f64();
        let at = BOUNDS.iter().position(|&bound| seconds <= bound).unwrap_or(BOUNDS.len());
        self.buckets[at].fetch_add(1, Ordering::Relaxed);
        self.nanoseconds.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    fn write(&self, out: &mut String, name: &str, help: &str) {
        head(out, name, help, "histogram");
        let mut sum = 0;
        for (bucket, bound) in
            self.buckets.iter().zip(BOUNDS.iter().map(|b| b.to_string()).chain(["+Inf".into()]))
        {
            sum += bucket.load(Ordering::Relaxed);
            let _ = writeln!(out, "{name}_bucket{{le=\"{bound}\"}} {sum}");
        }
        let seconds = self.nanoseconds.load(Ordering::Relaxed) as f64 / 1e9;
        let _ = writeln!(out, "{name}_sum {seconds}\n{name}_count {sum}");
    }
}

fn head(out: &mut String, name: &str, help: &str, kind: &str) {
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

fn one(out: &mut String, name: &str, help: &str, kind: &str, value: impl std::fmt::Display) {
    head(out, name, help, kind);
    let _ = writeln!(out, "{name} {value}");
}

impl Metrics {
    /// A request was answered so. `path` is a route, so that strangers cannot make names.
    pub fn request(&self, path: &'static str, status: u16) {
        *self.requests.lock().expect("no panic holds it").entry((path, status)).or_default() += 1;
    }

    /// A request for completions has ended: with so many tokens of prompts, so many of them there before, and so many of answers.
    pub fn completion(
        &self,
        path: &'static str,
        status: u16,
        (prompt, cached): (usize, usize),
        tokens: usize,
    ) {
        self.request(path, status);
        self.prompt_tokens.fetch_add(prompt as u64, Ordering::Relaxed);
        self.cached_tokens.fetch_add(cached as u64, Ordering::Relaxed);
        self.tokens.fetch_add(tokens as u64, Ordering::Relaxed);
    }

    /// An answer has ended: its time to the first token, its mean time between tokens, its time as a whole.
    pub fn answer(&self, first: Duration, between: Option<Duration>, whole: Duration) {
        self.first.observe(first);
        if let Some(between) = between {
            self.between.observe(between);
        }
        self.whole.observe(whole);
        self.recent.add((first, between, whole));
    }

    /// So many answers with targets of latency have ended, and so many of them within these.
    pub fn targets(&self, all: usize, within: usize) {
        self.with_targets.fetch_add(all as u64, Ordering::Relaxed);
        self.within_targets.fetch_add(within as u64, Ordering::Relaxed);
    }

    /// Answers with targets of latency, and those within them.
    pub fn in_time(&self) -> Value {
        let (all, within) =
            (self.with_targets.load(Ordering::Relaxed), self.within_targets.load(Ordering::Relaxed));
        json!({ "answers": all, "within": within })
    }

    /// Tokens of ended requests.
    pub fn tokens(&self) -> Value {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (prompt, cached) = (of(&self.prompt_tokens), of(&self.cached_tokens));
        json!({ "prompt": prompt, "cached": cached, "answer": of(&self.tokens) })
    }

    /// Requests for completions by how they ended.
    pub fn by_kind(&self) -> Value {
        let (mut ok, mut refused, mut failed, mut left) = (0, 0, 0, 0);
        for ((path, status), n) in self.requests.lock().expect("no panic holds it").iter() {
            match status {
                _ if !path.ends_with("completions") => {}
                499 => left += n,
                500.. => failed += n,
                400.. => refused += n,
                _ => ok += n,
            }
        }
        json!({ "ok": ok, "refused": refused, "failed": failed, "left": left })
    }

    /// All of them, and those of the engine: its status, and how many places of the queue are taken.
    pub fn text(&self, ready: bool, started: u64, loaded: Option<(Status, usize, &str)>) -> String {
        let mut text = String::new();
        let out = &mut text;
        head(out, "tandem_build_info", "The version.", "gauge");
        let _ = writeln!(out, "tandem_build_info{{version=\"{}\"}} 1", env!("CARGO_PKG_VERSION"));
        one(out, "tandem_start_time_seconds", "Seconds since 1970 of the start.", "gauge", started);
        let help = "Whether the model is loaded and requests are taken.";
        one(out, "tandem_ready", help, "gauge", u8::from(ready));
        head(out, "tandem_http_requests_total", "Requests answered (499: the client went away).", "counter");
        for ((path, status), n) in self.requests.lock().expect("no panic holds it").iter() {
            let _ = writeln!(out, "tandem_http_requests_total{{path=\"{path}\",status=\"{status}\"}} {n}");
        }
        let prompt = self.prompt_tokens.load(Ordering::Relaxed);
        one(out, "tandem_prompt_tokens_total", "Tokens of prompts of ended requests.", "counter", prompt);
        let tokens = self.tokens.load(Ordering::Relaxed);
        let cached = self.cached_tokens.load(Ordering::Relaxed);
        let help = "Those of them that were there from earlier requests.";
        one(out, "tandem_prompt_tokens_cached_total", help, "counter", cached);
        one(out, "tandem_generation_tokens_total", "Tokens of answers of ended requests.", "counter", tokens);
        let help = "From a request's arrival to an answer's first token.";
        self.first.write(out, "tandem_time_to_first_token_seconds", help);
        let help = "Mean time between an answer's tokens.";
        self.between.write(out, "tandem_time_per_output_token_seconds", help);
        let help = "From a request's arrival to an answer's end.";
        self.whole.write(out, "tandem_request_duration_seconds", help);
        let help = "Answers that had targets of latency, the server's or their own.";
        let with_targets = self.with_targets.load(Ordering::Relaxed);
        one(out, "tandem_answers_with_targets_total", help, "counter", with_targets);
        let within = self.within_targets.load(Ordering::Relaxed);
        let help = "Those of them that were within their targets.";
        one(out, "tandem_answers_within_targets_total", help, "counter", within);
        if let Some((status, places, placement)) = loaded {
            head(out, "tandem_placement_info", "Where the model runs.", "gauge");
            // As the format wants its texts.
            let placement = placement.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', " ");
            let _ = writeln!(out, "tandem_placement_info{{placement=\"{placement}\"}} 1");
            engine(out, &status, places);
        }
        text
    }
}

fn engine(out: &mut String, status: &Status, places: usize) {
    head(out, "tandem_strategy_info", "The strategy that schedules the requests.", "gauge");
    let _ = writeln!(out, "tandem_strategy_info{{strategy=\"{}\"}} 1", status.strategy);
    let (waiting, running) = status.load;
    one(out, "tandem_requests_waiting", "Sequences that wait for the engine.", "gauge", waiting);
    one(out, "tandem_requests_running", "Sequences that the engine runs.", "gauge", running);
    one(out, "tandem_places_taken", "Places of the queue that are taken.", "gauge", places);
    head(out, "tandem_kv_pages", "Pages of keys and values; kept ones go when room is needed.", "gauge");
    for (side, name) in ["device", "host"].into_iter().enumerate() {
        let (free, all) = (status.free_pages[side], status.pages[side]);
        let (used, kept) = (all.saturating_sub(free), status.kept_pages[side]);
        let free = free.saturating_sub(kept);
        let _ = writeln!(out, "tandem_kv_pages{{side=\"{name}\",use=\"free\"}} {free}");
        let _ = writeln!(out, "tandem_kv_pages{{side=\"{name}\",use=\"kept\"}} {kept}");
        let _ = writeln!(out, "tandem_kv_pages{{side=\"{name}\",use=\"used\"}} {used}");
    }
    one(out, "tandem_steps_total", "Steps of the engine.", "counter", status.steps);
    one(out, "tandem_rows_total", "Rows computed, of prompts and answers.", "counter", status.rows);
    let help = "Tokens of prompts that were there from earlier requests.";
    one(out, "tandem_cached_tokens_total", help, "counter", status.cached);
    one(out, "tandem_sampled_tokens_total", "Tokens sampled.", "counter", status.tokens);
    one(out, "tandem_sequences_finished_total", "Sequences that ended normally.", "counter", status.ended.0);
    one(out, "tandem_sequences_failed_total", "Sequences that failed.", "counter", status.ended.1);
    one(out, "tandem_swaps_total", "Changes of side of sequences.", "counter", status.swapped);
    let help = "Experts that have come to the device in the place of others.";
    one(out, "tandem_experts_exchanged_total", help, "counter", status.exchanged_experts);
    let (took, predicted) = status.seconds;
    one(out, "tandem_step_seconds_total", "Seconds that steps took.", "counter", took);
    let help = "Seconds predicted for them; 0 without predictions.";
    one(out, "tandem_step_predicted_seconds_total", help, "counter", predicted);
    let help = "Bytes that have crossed the link: weights, pages, rows and results.";
    head(out, "tandem_link_bytes_total", help, "counter");
    for (direction, bytes) in ["to_device", "to_host"].into_iter().zip(status.link_bytes) {
        let _ = writeln!(out, "tandem_link_bytes_total{{direction=\"{direction}\"}} {bytes}");
    }
    if let Some(busy) = status.busy {
        let help = "Seconds that each lane has worked; of those of steps, its busy fraction.";
        head(out, "tandem_lane_busy_seconds_total", help, "counter");
        for (unit, seconds) in busy.iter() {
            let lane = lane_name(unit);
            let _ = writeln!(out, "tandem_lane_busy_seconds_total{{lane=\"{lane}\"}} {seconds}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative() {
        let (histogram, mut out) = (Histogram::default(), String::new());
        for ms in [1, 2, 2000, 100_000] {
            histogram.observe(Duration::from_millis(ms));
        }
        histogram.write(&mut out, "x", "y");
        for line in [
            "x_bucket{le=\"0.001\"} 1",
            "x_bucket{le=\"0.0025\"} 2",
            "x_bucket{le=\"60\"} 3",
            "x_bucket{le=\"+Inf\"} 4",
            "x_count 4",
            "x_sum 102.003",
        ] {
            assert!(out.lines().any(|l| l == line), "{line}: {out}");
        }
    }
}
