//! One answer: printed as it comes, stopped by Ctrl-C, and counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use tandem::engine::{Batcher, Event, Finish, Request};
use tandem::text::{Ending, Sampler, SamplerParams, Told};
use tandem::{Error, Result};

use crate::cli::{open, output, progress};

/// Whether Ctrl-C was pressed.
pub struct Interrupts(Arc<AtomicBool>);

impl Interrupts {
    /// From now on Ctrl-C stops an answer and not the program.
    ///
    /// # Errors
    /// The system refuses.
    pub fn listen() -> Result<Interrupts> {
        let pressed = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(signal_hook::consts::SIGINT, pressed.clone())
            .map_err(|e| Error::Run(format!("Ctrl-C: {e}")))?;
        Ok(Interrupts(pressed))
    }

    /// Whether it was pressed since the last call.
    fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

/// How answers are made.
pub struct Settings {
    pub params: SamplerParams,
    pub ending: Ending,
    pub max_tokens: Option<usize>,
}

impl Settings {
    /// Changes one; returns a sentence about it.
    ///
    /// # Errors
    /// A name that is none, or a value that makes no sense; nothing is changed then.
    pub fn set(&mut self, name: &str, value: &str) -> Result<String> {
        let bad = || Error::usage(format!("/set {name} {value}: a number is wanted"));
        let real = || value.parse::<f32>().map_err(|_| bad());
        let whole = || value.parse::<u64>().map_err(|_| bad());
        let mut params = self.params.clone();
        match name {
            "temp" | "temperature" => params.temperature = real()?,
            "top_p" => params.top_p = real()?,
            "min_p" => params.min_p = real()?,
            "repeat_penalty" => params.repeat_penalty = real()?,
            "top_k" => params.top_k = whole()? as usize,
            "seed" => params.seed = whole()?,
            "max_tokens" => {
                let n = whole()?;
                self.max_tokens = (n > 0).then_some(n as usize);
                return Ok(match n {
                    0 => "max_tokens: as many as there is room for".into(),
                    n => format!("max_tokens: {n}"),
                });
            }
            _ => {
                let known = "temp, top_k, top_p, min_p, repeat_penalty, seed and max_tokens";
                return Err(Error::usage(format!("/set {name}: no such setting; there are {known}")));
            }
        }
        Sampler::new(params.clone())?;
        self.params = params;
        Ok(format!("{name}: {value}"))
    }
}

/// Counts of a conversation.
#[derive(Debug, Default)]
pub struct ChatStats {
    turns: usize,
    prompt: usize,
    cached: usize,
    answer: usize,
    /// Seconds to first tokens, and of the others.
    seconds: [f64; 2],
}

impl ChatStats {
    /// In a sentence.
    pub fn describe(&self, requests: &Batcher) -> String {
        let rate = |n: usize, s: f64| if s > 0.0 { n as f64 / s } else { 0.0 };
        format!(
            "{} turns; {} prompt tokens, {} of them were there, the others at {:.0} tok/s; {} tokens of answers at {:.1} tok/s; \
             context {}",
            self.turns,
            self.prompt,
            self.cached,
            rate(self.prompt - self.cached, self.seconds[0]),
            self.answer,
            rate(self.answer.saturating_sub(self.turns), self.seconds[1]),
            requests.engine().context()
        )
    }
}

/// Answers a prompt; returns the text, as far as it came. Of an answer in channels, `told` shows all and returns the content.
///
/// # Errors
/// The prompt does not fit, the engine has failed, or standard output is closed.
pub fn run(
    requests: &mut Batcher,
    (prompt, mut told): (Vec<u32>, Option<Told>),
    settings: &Settings,
    stats: &mut ChatStats,
    interrupts: &Interrupts,
) -> anyhow::Result<String> {
    let n = prompt.len();
    let parting = told.as_ref().map(Told::tokens).unwrap_or_default();
    let ending = Ending { parting, ..settings.ending.clone() };
    let request = Request {
        prompt,
        sampling: settings.params.clone(),
        max_tokens: settings.max_tokens.unwrap_or(requests.engine().context()),
        ending,
        ..Request::default()
    };
    let began = Instant::now();
    let (id, events) = requests.submit(request)?;
    // What was pressed before is for nobody.
    interrupts.take();
    let (mut text, mut first, mut tokens, mut cached) = (String::new(), None, 0, 0);
    let how = loop {
        if interrupts.take() {
            requests.cancel(id);
        } else {
            requests.step();
        }
        let mut over = None;
        for event in events.try_iter() {
            match event {
                Event::Cached(n) => cached = n,
                Event::Prompt(_) => {}
                Event::Token(mut token) => {
                    if let Some(told) = &mut told {
                        token.text = told.push(token.id, &token.text);
                    }
                    first.get_or_insert_with(|| began.elapsed().as_secs_f64());
                    tokens += 1;
                    output::print(&token.text)?;
                    text += &token.text;
                }
                Event::End(how) => over = Some(how),
            }
        }
        if let Some(how) = over {
            break how;
        }
    };
    if let Some(told) = &mut told {
        output::print(&told.finish())?;
        text = told.content().to_owned();
    }
    output::line("")?;
    let all = began.elapsed().as_secs_f64();
    let first = first.unwrap_or(all);
    let own = &mut stats.seconds;
    (own[0], own[1]) = (own[0] + first, own[1] + all - first);
    (stats.turns, stats.prompt, stats.cached, stats.answer) =
        (stats.turns + 1, stats.prompt + n, stats.cached + cached, stats.answer + tokens);
    progress::detail(&format!(
        "{n} prompt tokens, {cached} of them were there; {tokens} tokens, first after {:.0} ms",
        first * 1e3
    ));
    match how {
        Finish::Failed(error) => Err(open::failed(error).into()),
        Finish::Length if settings.max_tokens.is_none_or(|most| tokens < most) => {
            progress::note("the context is full: /clear begins anew, --ctx makes it longer");
            Ok(text)
        }
        _ => Ok(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_change_or_stay() {
        let mut settings =
            Settings { params: SamplerParams::default(), ending: Ending::default(), max_tokens: None };
        settings.set("temp", "0.7").unwrap();
        settings.set("max_tokens", "12").unwrap();
        assert_eq!((settings.params.temperature, settings.max_tokens), (0.7, Some(12)));
        settings.set("max_tokens", "0").unwrap();
        assert_eq!(settings.max_tokens, None);
        for (name, value, why) in [
            ("temp", "hot", "a number"),
            ("temp", "-1", "temperature"),
            ("top_p", "2", "top_p"),
            ("heat", "1", "no such"),
        ] {
            let error = settings.set(name, value).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        assert_eq!(settings.params.temperature, 0.7);
    }
}
