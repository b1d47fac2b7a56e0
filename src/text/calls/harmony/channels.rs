//! Splits the tokens of an answer into reasoning, content and calls, as they come.
//!
//! ```text
//! header ── <|message|> ─► body ── <|end|>, <|start|>, <|channel|> … ─► header …
//! ```
//! Analysis is reasoning, a message to a function a call, everything else content: also commentary for the user, which
//! models say before they call, and channels that nobody knows. A blank line parts two messages of one field.

use std::sync::Arc;

use super::super::control::Control;
use super::super::reader::{Part, put};
use super::header::{Header, Kind};

#[derive(Debug, Clone)]
enum State {
    Header(Header),
    Body(Body),
}

#[derive(Debug, Clone, Copy)]
enum Body {
    Reasoning,
    Content,
    /// Arguments of the call of this number.
    Call(usize),
}

/// See the [module](self).
#[derive(Debug, Clone)]
pub struct Channels {
    ids: Arc<[(u32, Control)]>,
    state: State,
    /// Whether messages to functions are calls, and not content.
    calls_are_read: bool,
    /// Calls that have begun.
    calls: usize,
    /// Whether the fields have a text, and whether this message has added to it.
    reasoning: bool,
    content: bool,
    fresh: bool,
}

impl Channels {
    /// A reader of the answer to a prompt, for a vocabulary with these control tokens. Without calls, messages to functions
    /// are content.
    pub fn behind(prompt: &[u32], ids: Arc<[(u32, Control)]>, calls_are_read: bool) -> Channels {
        let state = State::Header(Header::default());
        let mut read =
            Channels { ids, state, calls_are_read, calls: 0, reasoning: false, content: false, fresh: true };
        // Only a prompt whose last message is to be continued ends inside of one. Of its header the channel is known by
        // the token in front of its text: other text has no effect on where the answer is.
        let last = prompt.iter().rev().find_map(|&id| read.control(id));
        if last == Some(Control::Message) {
            (read.state, read.content, read.fresh) = (State::Body(Body::Content), true, false);
        }
        read
    }

    /// Whether the answer goes on with a text of the prompt.
    pub fn is_inside(&self) -> bool {
        matches!(self.state, State::Body(_))
    }

    /// Calls that have begun.
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// The control tokens.
    pub fn tokens(&self) -> Arc<[u32]> {
        self.ids.iter().map(|(id, _)| *id).collect()
    }

    /// The control token that a token is.
    fn control(&self, id: u32) -> Option<Control> {
        self.ids.iter().find(|(known, _)| *known == id).map(|(_, control)| *control)
    }

    /// Takes the next token, and the text that came with it, which is of the tokens before if it is a control token.
    pub fn push(&mut self, id: u32, text: &str) -> Vec<Part> {
        let mut parts = Vec::new();
        self.text(text, &mut parts);
        if let Some(control) = self.control(id) {
            self.part(control, &mut parts);
        }
        parts
    }

    /// What was held back, at the end of the answer.
    pub fn finish(&mut self) -> Vec<Part> {
        let mut parts = Vec::new();
        self.close(&mut parts);
        parts
    }

    fn text(&mut self, text: &str, parts: &mut Vec<Part>) {
        let mut rest = text;
        while let State::Header(header) = &mut self.state {
            let Some(c) = rest.chars().next() else { return };
            rest = &rest[c.len_utf8()..];
            if let Some(begins) = header.push(c) {
                self.open(parts);
                self.add(begins, parts);
            }
        }
        self.add(rest.to_owned(), parts);
    }

    fn part(&mut self, control: Control, parts: &mut Vec<Part>) {
        match (control, &mut self.state) {
            (Control::Message, State::Header(_)) => self.open(parts),
            (Control::Channel, State::Header(header)) => {
                let kept = header.clone();
                if header.take_rest().trim().is_empty() {
                    header.channel();
                } else {
                    self.state = State::Header(kept);
                    self.go_to(Header::in_channel(), parts);
                }
            }
            (Control::Channel, State::Body(_)) => self.go_to(Header::in_channel(), parts),
            (Control::Constrain, State::Header(header)) => header.constrain(),
            // They mean nothing inside of a text.
            (Control::Message | Control::Constrain, State::Body(_)) => {}
            (Control::Start, _) => self.go_to(Header::started(), parts),
            (Control::End | Control::Return | Control::Call, _) => self.go_to(Header::default(), parts),
        }
    }

    fn go_to(&mut self, header: Header, parts: &mut Vec<Part>) {
        self.close(parts);
        self.state = State::Header(header);
    }

    /// Ends the message. What is left of a header that has none is text.
    fn close(&mut self, parts: &mut Vec<Part>) {
        if let State::Header(header) = &mut self.state {
            let rest = header.take_rest();
            if !rest.trim().is_empty() {
                self.open(parts);
                self.add(rest, parts);
            }
        }
        self.state = State::Header(Header::default());
    }

    /// The text of the message begins.
    fn open(&mut self, parts: &mut Vec<Part>) {
        let State::Header(header) = &self.state else { return };
        self.fresh = true;
        self.state = State::Body(match header.kind() {
            Kind::Call(name) if self.calls_are_read => {
                parts.push(Part::Call(self.calls, name));
                self.calls += 1;
                Body::Call(self.calls - 1)
            }
            Kind::Reasoning => Body::Reasoning,
            Kind::Content | Kind::Call(_) => Body::Content,
        });
    }

    /// More of the message's text.
    fn add(&mut self, text: String, parts: &mut Vec<Part>) {
        let State::Body(body) = self.state else { return };
        if text.is_empty() {
            return;
        }
        let wrap: fn(String) -> Part = match body {
            Body::Call(index) => return put(parts, Part::Arguments(index, text)),
            Body::Reasoning => Part::Reasoning,
            Body::Content => Part::Content,
        };
        let begun = if matches!(body, Body::Reasoning) { &mut self.reasoning } else { &mut self.content };
        let parted = *begun && self.fresh;
        (*begun, self.fresh) = (true, false);
        parts.push(wrap(if parted { format!("\n\n{text}") } else { text }));
    }
}
