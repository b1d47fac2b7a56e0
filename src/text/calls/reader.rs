//! Splits the text of an answer into reasoning, content and calls, as it comes.
//!
//! ```text
//! start ─► thinking ─► content ─► call ─► content …      a marker that may have begun is held back
//! ```
//! What is read so was constrained, so calls are well formed unless the answer was cut.

use super::elements::{Elements, Texts};
use super::format::{CallFormat, THINK, UNTHINK};
use super::marker::cut;
use super::scan::{CallScan, CharPlace, Found, Value};

/// A part of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// More of the reasoning.
    Reasoning(String),
    /// More of the content.
    Content(String),
    /// A call begins: its number in the answer, from 0, and the function's name.
    Call(usize, String),
    /// More of the arguments of a call, which are JSON.
    Arguments(usize, String),
}

#[derive(Debug)]
enum State {
    /// Nothing but space was there.
    Start,
    Thinking,
    /// In front of the content, or of a call without a marker.
    Open,
    Content,
    /// The object of a call.
    Object(CallScan),
    /// The elements of a call.
    Elements(Elements),
    /// Between the calls of a list.
    List,
    /// A name, up to its arguments.
    Name,
    Arguments(Value),
    /// Behind a call, up to the marker that closes it.
    Close(&'static str),
    /// What follows is no part of the answer.
    Over,
}

/// See the [module](self).
#[derive(Debug)]
pub struct Reader {
    format: Option<CallFormat>,
    texts: Texts,
    state: State,
    /// Text that no part has yet.
    text: String,
    /// Calls that have begun.
    calls: usize,
    /// Whether space comes first, which is left out.
    skips_space: bool,
    /// Whether the text is the content, as it is.
    is_plain: bool,
}

impl Reader {
    /// A reader of answers that may begin with reasoning if they `think`, inside of it if the prompt has `begun` it, and that
    /// have calls in a format.
    pub fn new(format: Option<CallFormat>, thinks: bool, begun: bool) -> Reader {
        let state = match (begun, thinks) {
            (true, _) => State::Thinking,
            (false, true) => State::Start,
            (false, false) => State::Open,
        };
        let is_plain = format.is_none() && !thinks && !begun;
        let texts = Texts::default();
        Reader { format, texts, state, text: String::new(), calls: 0, skips_space: begun, is_plain }
    }

    /// With the parameters of functions whose values are texts, where arguments are elements.
    #[must_use]
    pub fn with_texts(mut self, texts: Texts) -> Reader {
        self.texts = texts;
        self
    }

    /// A reader of answers that are content alone.
    pub fn plain() -> Reader {
        Reader::new(None, false, false)
    }

    /// Calls that have begun.
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// Takes more of the text.
    pub fn push(&mut self, text: &str) -> Vec<Part> {
        let mut parts = Vec::new();
        if self.is_plain {
            put(&mut parts, Part::Content(text.to_owned()));
            return parts;
        }
        self.text += text;
        while self.advance(&mut parts) {}
        parts
    }

    /// What was held back, at the end of the text.
    pub fn finish(&mut self) -> Vec<Part> {
        let (mut parts, text) = (Vec::new(), std::mem::take(&mut self.text));
        match self.state {
            State::Thinking => put(&mut parts, Part::Reasoning(text)),
            State::Start | State::Open | State::Content if self.calls == 0 || !text.trim().is_empty() => {
                put(&mut parts, Part::Content(text));
            }
            _ => {}
        }
        parts
    }

    /// Reads on; whether there may be more to read.
    fn advance(&mut self, parts: &mut Vec<Part>) -> bool {
        if self.skips_space {
            let space = self.text.len() - self.text.trim_start().len();
            self.text.drain(..space);
            self.skips_space = self.text.is_empty();
            if self.skips_space {
                return false;
            }
        }
        match &mut self.state {
            State::Start => match begins(&self.text, THINK) {
                Begins::Yes(end) => {
                    self.text.drain(..end);
                    self.skips_space = true;
                    self.go_to(State::Thinking)
                }
                Begins::Perhaps => false,
                Begins::No => self.go_to(State::Open),
            },
            State::Thinking => {
                let (text, found) = cut(&mut self.text, UNTHINK);
                put(parts, Part::Reasoning(text));
                if found {
                    self.skips_space = true;
                    self.state = State::Open;
                }
                found
            }
            State::Open if self.format == Some(CallFormat::Llama) => {
                match begins(&self.text, "<|python_tag|>") {
                    Begins::Yes(end) => drop(self.text.drain(..end)),
                    Begins::Perhaps => return false,
                    Begins::No => {}
                }
                match self.text.trim_start().chars().next() {
                    Some('{') => self.go_to(State::Object(CallScan::new(CallFormat::Llama.arguments()))),
                    Some(_) => {
                        self.format = None;
                        self.go_to(State::Content)
                    }
                    None => false,
                }
            }
            State::Open => self.go_to(State::Content),
            State::Content => self.content(parts),
            State::Object(scan) => {
                let mut found = Vec::new();
                let end = self.text.char_indices().find_map(|(at, c)| {
                    scan.push(c, &mut found);
                    scan.is_done().then_some(at + c.len_utf8())
                });
                let done = end.is_some();
                self.text.drain(..end.unwrap_or(self.text.len()));
                found.into_iter().for_each(|found| self.found(found, parts));
                if done {
                    self.state = match self.format {
                        Some(CallFormat::Mistral) => State::List,
                        Some(CallFormat::Hermes) => State::Close("</tool_call>"),
                        _ => State::Over,
                    };
                }
                done
            }
            State::Elements(elements) => {
                let mut found = Vec::new();
                let done = elements.read(&mut self.text, &mut found);
                found.into_iter().for_each(|found| self.found(found, parts));
                if done {
                    self.state = State::Close("</tool_call>");
                }
                done
            }
            State::List => match self.text.find(['{', ']']) {
                None => false,
                Some(at) if self.text[at..].starts_with('{') => {
                    self.text.drain(..at);
                    self.go_to(State::Object(CallScan::new("arguments")))
                }
                Some(at) => {
                    self.text.drain(..=at);
                    self.closed()
                }
            },
            State::Name => match self.text.find("[ARGS]") {
                None => false,
                Some(at) => {
                    let name = self.text[..at].trim().to_owned();
                    self.text.drain(..at + "[ARGS]".len());
                    self.found(Found::Name(name), parts);
                    self.go_to(State::Arguments(Value::default()))
                }
            },
            State::Arguments(value) => {
                let end = self.text.char_indices().find_map(|(at, c)| match value.push(c) {
                    CharPlace::Last => Some(at + c.len_utf8()),
                    CharPlace::Behind => Some(at),
                    CharPlace::Before | CharPlace::Inside => None,
                });
                let text: String = self.text.drain(..end.unwrap_or(self.text.len())).collect();
                put(parts, Part::Arguments(self.calls - 1, text));
                end.is_some() && self.closed()
            }
            State::Close(marker) => match self.text.find(*marker) {
                None => false,
                Some(at) => {
                    self.text.drain(..at + marker.len());
                    self.closed()
                }
            },
            State::Over => {
                self.text.clear();
                false
            }
        }
    }

    fn content(&mut self, parts: &mut Vec<Part>) -> bool {
        let Some(opening) = self.format.and_then(CallFormat::opening) else {
            put(parts, Part::Content(std::mem::take(&mut self.text)));
            return false;
        };
        let (text, found) = cut(&mut self.text, opening);
        put(parts, Part::Content(text));
        if found {
            self.state = match self.format {
                Some(CallFormat::MistralArgs) => State::Name,
                Some(CallFormat::Mistral) => State::List,
                Some(CallFormat::Elements) => State::Elements(Elements::new(self.texts.clone())),
                _ => State::Object(CallScan::new("arguments")),
            };
        }
        found
    }

    /// Goes on in another state.
    fn go_to(&mut self, state: State) -> bool {
        self.state = state;
        true
    }

    /// A call is complete, or all calls of a list.
    fn closed(&mut self) -> bool {
        self.skips_space = true;
        self.go_to(State::Content)
    }

    fn found(&mut self, found: Found, parts: &mut Vec<Part>) {
        match found {
            Found::Name(name) => {
                parts.push(Part::Call(self.calls, name));
                self.calls += 1;
            }
            Found::Arguments(text) => put(parts, Part::Arguments(self.calls - 1, text)),
        }
    }
}

/// Adds a part that is not empty.
pub(super) fn put(parts: &mut Vec<Part>, part: Part) {
    let (Part::Reasoning(text) | Part::Content(text) | Part::Arguments(_, text) | Part::Call(_, text)) =
        &part;
    if !text.is_empty() {
        parts.push(part);
    }
}

enum Begins {
    /// And here it ends.
    Yes(usize),
    Perhaps,
    No,
}

/// Whether a text begins with a marker, behind space.
fn begins(text: &str, marker: &str) -> Begins {
    let rest = text.trim_start();
    match () {
        () if rest.starts_with(marker) => Begins::Yes(text.len() - rest.len() + marker.len()),
        () if marker.starts_with(rest) => Begins::Perhaps,
        () => Begins::No,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The parts of a text that comes in pieces of `n` characters, joined.
    fn read(format: Option<CallFormat>, think: (bool, bool), text: &str, n: usize) -> Vec<Part> {
        let mut reader = Reader::new(format, think.0, think.1);
        let chars: Vec<char> = text.chars().collect();
        let mut parts: Vec<Part> = Vec::new();
        let pieces = chars.chunks(n).map(|piece| piece.iter().collect::<String>());
        let mut all: Vec<Part> = pieces.flat_map(|piece| reader.push(&piece)).collect();
        all.extend(reader.finish());
        for part in all {
            match (parts.last_mut(), part) {
                (Some(Part::Reasoning(a)), Part::Reasoning(b))
                | (Some(Part::Content(a)), Part::Content(b)) => {
                    a.push_str(&b);
                }
                (Some(Part::Arguments(i, a)), Part::Arguments(j, b)) if *i == j => a.push_str(&b),
                (_, part) => parts.push(part),
            }
        }
        parts
    }

    #[track_caller]
    fn check(format: Option<CallFormat>, think: (bool, bool), text: &str, wanted: &[Part]) {
        for n in [1, 2, 3, 7, 1000] {
            assert_eq!(read(format, think, text, n), wanted, "in pieces of {n}");
        }
    }

    fn content(text: &str) -> Part {
        Part::Content(text.into())
    }
    fn reasoning(text: &str) -> Part {
        Part::Reasoning(text.into())
    }
    fn call(index: usize, name: &str, arguments: &str) -> [Part; 2] {
        [Part::Call(index, name.into()), Part::Arguments(index, arguments.into())]
    }

    #[test]
    fn reasoning_is_split_from_the_answer() {
        let no = None;
        check(
            no,
            (true, false),
            "<think>\nWell, 1 < 2.\n</think>\n\nYes </think>",
            &[reasoning("Well, 1 < 2."), content("Yes </think>")],
        );
        check(no, (true, true), "Well.</think>Yes", &[reasoning("Well."), content("Yes")]);
        check(no, (true, false), " Yes <think>", &[content(" Yes <think>")]);
        check(no, (true, true), "cut of", &[reasoning("cut of")]);
        check(no, (false, false), "<think>a</think>", &[content("<think>a</think>")]);
    }

    #[test]
    fn calls_of_hermes_are_read() {
        let text = "I look.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"</tool_call>\"}}\n</tool_call>\n\
                    <tool_call>{\"name\": \"g\", \"arguments\": {}}</tool_call>";
        let mut wanted = vec![content("I look.")];
        wanted.extend(call(0, "f", "{\"a\": \"</tool_call>\"}"));
        wanted.extend(call(1, "g", "{}"));
        check(Some(CallFormat::Hermes), (false, false), text, &wanted);
        check(Some(CallFormat::Hermes), (false, false), "a < b, <tool \n", &[content("a < b, <tool \n")]);
        let cut = "<tool_call>{\"name\": \"g\", \"arguments\": {\"x\": 1";
        check(Some(CallFormat::Hermes), (true, false), cut, &call(0, "g", "{\"x\": 1"));
    }

    #[test]
    fn calls_of_llama_are_the_whole_answer() {
        let text = "{\"name\": \"f\", \"parameters\": {\"a\": 1}}";
        let wanted = call(0, "f", "{\"a\": 1}");
        check(Some(CallFormat::Llama), (false, false), text, &wanted);
        check(Some(CallFormat::Llama), (false, false), &format!("<|python_tag|>{text}"), &wanted);
        check(Some(CallFormat::Llama), (false, false), "<|pyth is {", &[content("<|pyth is {")]);
    }

    #[test]
    fn calls_of_mistral_are_lists_or_follow_their_names() {
        let list = "Yes.[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": [1]}}, {\"name\": \"g\", \"arguments\": {}}]";
        let mut wanted = vec![content("Yes.")];
        wanted.extend(call(0, "f", "{\"a\": [1]}"));
        wanted.extend(call(1, "g", "{}"));
        check(Some(CallFormat::Mistral), (false, false), list, &wanted);
        let named = "Yes.[TOOL_CALLS]f[ARGS]{\"a\": [1]}[TOOL_CALLS]g[ARGS]{}";
        check(Some(CallFormat::MistralArgs), (false, false), named, &wanted);
    }
}
