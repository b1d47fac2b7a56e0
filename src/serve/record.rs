//! What the log and the metrics get of a request for completions, when it ends: however that is.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::StatusCode;

use super::app::App;
use super::form::Usage;
use crate::sched::Targets;

/// The status in the log of a request whose client has gone; no client sees it.
const GONE: u16 = 499;

/// See the [module](self). Dropping it writes the line.
pub(super) struct Record {
    app: Arc<App>,
    path: &'static str,
    id: String,
    begun: Instant,
    /// Set once the answer is complete or refused.
    status: Option<StatusCode>,
    stream: bool,
    prompt: usize,
    /// Tokens of prompts that were there from earlier requests.
    cached: usize,
    /// Of each answer: tokens, and the times of the first and the last.
    answers: Vec<(usize, Option<(Instant, Instant)>)>,
    /// What is asked of its latency.
    targets: Targets,
    /// Answers that have ended, and those of them that were within the targets.
    over: (usize, usize),
    finish: Option<&'static str>,
}

impl Record {
    /// A request that begins now.
    pub fn new(app: Arc<App>, path: &'static str, id: String) -> Record {
        let begun = Instant::now();
        Record {
            app,
            path,
            id,
            begun,
            status: None,
            stream: false,
            prompt: 0,
            cached: 0,
            answers: Vec::new(),
            targets: Targets::NONE,
            over: (0, 0),
            finish: None,
        }
    }

    /// It has these tokens of prompts, so many answers, and these targets, of its own or the server's.
    pub fn asks(&mut self, prompt: usize, answers: usize, stream: bool, targets: Targets) {
        (self.prompt, self.answers, self.stream) = (prompt, vec![(0, None); answers], stream);
        self.targets = targets;
    }

    /// So many tokens of a prompt were there.
    pub fn cached(&mut self, tokens: usize) {
        self.cached += tokens;
    }

    /// A token of an answer has come.
    pub fn token(&mut self, answer: usize) {
        let now = Instant::now();
        let (tokens, times) = &mut self.answers[answer];
        *tokens += 1;
        let first = times.map_or(now, |(first, _)| first);
        *times = Some((first, now));
    }

    /// An answer has ended.
    pub fn ended(&mut self, answer: usize, reason: &'static str) {
        self.finish = Some(reason);
        if let (tokens, Some((first, last))) = self.answers[answer] {
            let between = (tokens > 1).then(|| (last - first) / (tokens - 1) as u32);
            let to_first = first - self.begun;
            self.app.metrics.answer(to_first, between, self.begun.elapsed());
            let within = self.targets.met(to_first.as_secs_f64(), between.map(|d| d.as_secs_f64()));
            self.over = (self.over.0 + 1, self.over.1 + usize::from(within));
        }
    }

    /// The answer is complete.
    pub fn done(&mut self) {
        self.status.get_or_insert(StatusCode::OK);
    }

    /// It is answered by an error.
    pub fn failed(&mut self, status: StatusCode) {
        self.status = Some(status);
    }

    /// Tokens of the prompts, those of them that were there, and tokens of the answers.
    pub fn usage(&self) -> Usage {
        Usage::new(self.prompt, self.cached, self.answers.iter().map(|a| a.0).sum())
    }
}

impl Record {
    /// Counts the answers that had targets, and returns what the log says of them. Those that failed are late; those that a client has
    /// left are neither.
    fn count_targets(&self, status: u16) -> String {
        let failed = if status >= 500 { self.answers.len() - self.over.0 } else { 0 };
        let (all, within) = (self.over.0 + failed, self.over.1);
        if !self.targets.is_some() || all == 0 {
            return String::new();
        }
        self.app.metrics.targets(all, within);
        format!(" within_targets={within}/{all}")
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let (prompt, cached, tokens) = self.usage().tokens();
        let status = self.status.map_or(GONE, |status| status.as_u16());
        self.app.metrics.completion(self.path, status, (prompt, cached), tokens);
        let targets = self.count_targets(status);
        let ms = |d: Duration| format!("{:.1}", d.as_secs_f64() * 1e3);
        let first = self.answers.iter().filter_map(|a| Some(a.1?.0)).min();
        let first = first.map_or("-".into(), |first| ms(first - self.begun));
        let line = format!(
            "POST {} {status} id={} prompt={prompt} cached={cached} tokens={tokens} answers={} stream={} finish={} ttft_ms={first} total_ms={}{targets}",
            self.path,
            self.id,
            self.answers.len(),
            self.stream,
            self.finish.unwrap_or("-"),
            ms(self.begun.elapsed())
        );
        (self.app.options.log)(&line, false);
    }
}
