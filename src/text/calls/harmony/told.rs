//! An answer in channels as one text, in the words of models with `<think>`: for terminals and files.

use super::super::format::{THINK, UNTHINK};
use super::super::reader::Part;
use super::Channels;

#[derive(Debug, Clone, Copy, PartialEq)]
enum At {
    Content,
    Reasoning,
    Call,
}

/// See the [module](self).
#[derive(Debug, Clone)]
pub struct Told {
    channels: Channels,
    at: At,
    /// Whether content was said since something else was.
    said: bool,
    content: String,
}

impl Told {
    /// An answer that these channels split.
    pub fn new(channels: Channels) -> Told {
        Told { channels, at: At::Content, said: false, content: String::new() }
    }

    /// Its control tokens, which part the text of the answer ([`Ending::parting`](crate::text::Ending::parting)).
    pub fn tokens(&self) -> std::sync::Arc<[u32]> {
        self.channels.tokens()
    }

    /// Takes the next token and the text that came with it; returns what to show.
    pub fn push(&mut self, id: u32, text: &str) -> String {
        let parts = self.channels.push(id, text);
        self.say(parts)
    }

    /// The rest, at the end of the answer.
    pub fn finish(&mut self) -> String {
        let parts = self.channels.finish();
        self.say(parts) + &self.go_to(At::Content)
    }

    /// The content alone: what a later turn remembers.
    pub fn content(&self) -> &str {
        &self.content
    }

    fn say(&mut self, parts: Vec<Part>) -> String {
        let mut said = String::new();
        for part in parts {
            said += &match part {
                Part::Reasoning(text) => self.go_to(At::Reasoning) + &text,
                Part::Content(text) => {
                    self.content += &text;
                    let before = self.go_to(At::Content);
                    self.said = true;
                    before + &text
                }
                Part::Call(_, name) => {
                    let before = self.go_to(At::Content) + &self.go_to(At::Call);
                    format!("{before}{}, \"arguments\": ", serde_json::json!(name))
                }
                Part::Arguments(_, text) => text,
            };
        }
        said
    }

    /// The texts between two parts of different kinds.
    fn go_to(&mut self, to: At) -> String {
        let from = std::mem::replace(&mut self.at, to);
        let behind = match from {
            _ if from == to => return String::new(),
            At::Reasoning => format!("\n{UNTHINK}\n\n"),
            At::Call => "}</tool_call>".into(),
            At::Content if self.said => "\n".into(),
            At::Content => String::new(),
        };
        self.said = false;
        let before = match to {
            At::Reasoning => format!("{THINK}\n"),
            At::Call => "<tool_call>{\"name\": ".into(),
            At::Content => String::new(),
        };
        behind + &before
    }
}
