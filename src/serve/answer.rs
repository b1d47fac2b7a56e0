//! Answers a request that runs: with one JSON object when it is complete, or with a stream of events.

use axum::Json;
use axum::body::Body;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use tokio::time::{Duration, timeout};

use super::choice::{Call, Piece, Scored};
use super::error::ApiError;
use super::form::{Form, Head, Part, event};
use super::run::{Run, Update};
use crate::engine::{Likelihood, best_of};

/// How an answer is written.
pub(super) struct Writing {
    pub head: Head,
    /// Text in front of the answers, of each prompt: `echo`.
    pub echo: Option<Vec<String>>,
    /// Answers to each prompt.
    pub n: usize,
    /// How many of these are told, if they are the best.
    pub best: Option<usize>,
    /// All answers.
    pub choices: usize,
    pub logprobs: bool,
    pub include_usage: bool,
    pub keep_alive: Duration,
}

impl Writing {
    fn echo(&self, index: usize) -> String {
        self.echo.as_ref().map_or_else(String::new, |texts| texts[index / self.n].clone())
    }

    /// Whether the prompts come with log-probabilities, so that they wait for these.
    fn scores_prompts(&self) -> bool {
        self.logprobs && self.echo.is_some()
    }

    fn scored(&self, scored: Vec<Scored>) -> Option<Vec<Scored>> {
        self.logprobs.then_some(scored)
    }
}

/// The whole answer, when it is complete.
pub(super) async fn whole(mut run: Run, writing: &Writing) -> Response {
    let part = |index| Part {
        index,
        text: Some(writing.echo(index)),
        scored: writing.scored(Vec::new()),
        ..Part::default()
    };
    let mut parts: Vec<Part> = (0..writing.choices).map(part).collect();
    parts.iter_mut().for_each(|part| part.offset = chars(part.text.as_deref().unwrap_or_default()));
    while let Some(update) = run.next().await {
        match update {
            Update::Prompt(index, echoed, ranked) => {
                if echoed.is_some() {
                    parts[index].scored = echoed;
                }
                if ranked.is_some() {
                    parts[index..index + writing.n]
                        .iter_mut()
                        .for_each(|part| part.prompt.clone_from(&ranked));
                }
            }
            Update::Piece(index, piece) => add(&mut parts[index], piece),
            Update::End(index, piece, reason) => {
                add(&mut parts[index], piece);
                parts[index].finish = Some(reason);
            }
            Update::Failed(error) => return error.into_response(),
        }
    }
    run.record.done();
    let usage = run.record.usage();
    if let Some(best) = writing.best {
        parts = best_parts(parts, run.likely(), writing.n, best);
    }
    Json(writing.head.whole(parts, usage)).into_response()
}

/// Of each prompt's answers the `best` ones, the best first.
fn best_parts(parts: Vec<Part>, likely: &[Likelihood], n: usize, best: usize) -> Vec<Part> {
    let mut parts: Vec<Option<Part>> = parts.into_iter().map(Some).collect();
    let of_prompt = |(prompt, likely)| best_of(likely, best).into_iter().map(move |at| prompt * n + at);
    let told = likely.chunks(n).enumerate().flat_map(of_prompt);
    told.enumerate().filter_map(|(index, at)| Some(Part { index, ..parts[at].take()? })).collect()
}

/// Adds what is new to a whole answer.
fn add(part: &mut Part, piece: Piece) {
    let Piece { text, reasoning, calls, scored } = piece;
    part.text.get_or_insert_default().push_str(&text);
    if !reasoning.is_empty() {
        part.reasoning.get_or_insert_default().push_str(&reasoning);
    }
    for Call { index, begins, arguments } in calls {
        match part.calls.last_mut() {
            Some(call) if call.index == index => call.arguments += &arguments,
            _ => part.calls.push(Call { index, begins, arguments }),
        }
    }
    part.scored.iter_mut().for_each(|all| all.extend_from_slice(&scored));
}

/// A stream of events. The first are there at once.
pub(super) fn stream(run: Run, writing: Writing) -> Response {
    let offsets = (0..writing.choices).map(|index| chars(&writing.echo(index))).collect();
    let stream = Stream { run: Some(run), writing, offsets, begun: false };
    let chunks = futures_util::stream::unfold(stream, |mut stream| async move {
        let bytes = stream.next().await?;
        Some((Ok::<_, std::convert::Infallible>(bytes), stream))
    });
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-cache"),
        // nginx would wait for more.
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    (headers, Body::from_stream(chunks)).into_response()
}

struct Stream {
    /// Until the last event is written.
    run: Option<Run>,
    writing: Writing,
    /// Characters of each answer so far.
    offsets: Vec<usize>,
    begun: bool,
}

/// Bytes at which a chunk is sent although more is there.
const CHUNK: usize = 16 << 10;

impl Stream {
    /// The next bytes: all news that is there.
    async fn next(&mut self) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        if !self.begun {
            self.begun = true;
            self.begin(&mut bytes);
        }
        while bytes.is_empty() {
            let run = self.run.as_mut()?;
            match timeout(self.writing.keep_alive, run.next()).await {
                // A comment, in the words of the format.
                Err(_) => return Some(b": keep-alive\n\n".to_vec()),
                Ok(None) => self.end(&mut bytes),
                Ok(Some(update)) => self.write(&mut bytes, update),
            }
        }
        while bytes.len() < CHUNK
            && let Some(update) = self.run.as_mut().and_then(Run::try_next)
        {
            self.write(&mut bytes, update);
        }
        Some(bytes)
    }

    /// The role of each answer, or the prompt that it has in front, if that is told without log-probabilities.
    fn begin(&mut self, to: &mut Vec<u8>) {
        if self.writing.scores_prompts() {
            return;
        }
        for index in 0..self.writing.choices {
            let text = self.writing.echo(index);
            if self.writing.head.form == Form::Chat || !text.is_empty() {
                let part = Part { index, text: Some(text), first: true, ..Part::default() };
                self.chunk(to, part);
            }
        }
    }

    fn write(&mut self, to: &mut Vec<u8>, update: Update) {
        match update {
            // Streams have no place for `prompt_logprobs`.
            Update::Prompt(index, scored, _) => {
                let text = Some(self.writing.echo(index));
                self.chunk(to, Part { index, text, scored, ..Part::default() });
            }
            Update::Piece(index, piece) => self.piece(to, index, piece),
            Update::End(index, rest, reason) => {
                if rest != Piece::default() {
                    self.piece(to, index, rest);
                }
                self.chunk(to, Part { index, finish: Some(reason), ..Part::default() });
            }
            Update::Failed(error) => {
                event(to, &error.body());
                to.extend_from_slice(DONE);
                self.run = None;
            }
        }
    }

    fn piece(&mut self, to: &mut Vec<u8>, index: usize, piece: Piece) {
        let Piece { text, reasoning, calls, scored } = piece;
        let offset = self.offsets[index];
        self.offsets[index] += scored.iter().map(|s| chars(&s.token)).sum::<usize>();
        let scored = self.writing.scored(scored);
        let reasoning = (!reasoning.is_empty()).then_some(reasoning);
        // Log-probabilities may come without a text.
        let is_text = !text.is_empty() || (reasoning.is_none() && calls.is_empty());
        let text = is_text.then_some(text);
        self.chunk(to, Part { index, text, reasoning, calls, scored, offset, ..Part::default() });
    }

    fn chunk(&self, to: &mut Vec<u8>, part: Part) {
        self.writing.head.chunk(to, Some(part), self.writing.include_usage, None);
    }

    fn end(&mut self, to: &mut Vec<u8>) {
        let Some(mut run) = self.run.take() else { return };
        run.record.done();
        if self.writing.include_usage {
            let usage = run.record.usage();
            self.writing.head.chunk(to, None, true, Some(usage));
        }
        to.extend_from_slice(DONE);
    }
}

/// The last event of a stream.
const DONE: &[u8] = b"data: [DONE]\n\n";

fn chars(text: &str) -> usize {
    text.chars().count()
}

/// Hands a failure to the log, too.
pub(super) fn refuse(mut record: super::record::Record, error: ApiError) -> Response {
    record.failed(error.status());
    drop(record);
    error.into_response()
}
