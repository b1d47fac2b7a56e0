//! Reads a call whose arguments are elements, and writes them as JSON as they come.
//!
//! ```text
//! <function=look>
//! <parameter=city>
//! Köln
//! </parameter>
//! </function>                        {"city": "Köln"}
//! ```
//! Values of parameters that are texts stand as they are, between line ends; others are JSON. Which is which, the functions
//! say: `3` may be either.

use std::sync::Arc;

use serde_json::{Value, json};

use super::marker::{begun, cut};
use super::scan::Found;

const FUNCTION: &str = "<function=";
const PARAMETER: &str = "<parameter=";
const OVER: &str = "</function>";
const END: &str = "</parameter>";
/// Behind a text.
const TEXT_END: &str = "\n</parameter>";

/// Of each function, the parameters whose values are texts.
pub type Texts = Arc<[(String, Vec<String>)]>;

/// Whether the values of a schema are texts: then they are not quoted.
pub fn is_text(schema: &Value) -> bool {
    match (schema.get("type"), schema.get("enum").and_then(Value::as_array)) {
        (Some(kind), _) => kind == "string",
        (None, Some(values)) => !values.is_empty() && values.iter().all(Value::is_string),
        (None, None) => schema.get("const").is_some_and(Value::is_string),
    }
}

/// The parameters of a function with this schema whose values are texts.
pub fn texts_of(parameters: &Value) -> Vec<String> {
    let properties = parameters.get("properties").and_then(Value::as_object);
    properties.into_iter().flatten().filter(|(_, own)| is_text(own)).map(|(name, _)| name.clone()).collect()
}

#[derive(Debug)]
enum State {
    /// In front of the function.
    Function,
    /// In front of a parameter, or of the end.
    Between,
    /// In front of a text, of which the line end is none.
    Line,
    Text,
    Json,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Elements {
    texts: Texts,
    state: State,
    name: String,
    /// Whether there was a parameter.
    has_one: bool,
}

impl Elements {
    pub fn new(texts: Texts) -> Elements {
        Elements { texts, state: State::Function, name: String::new(), has_one: false }
    }

    /// Takes what can be read of a text. Returns whether the call is complete.
    pub fn read(&mut self, text: &mut String, found: &mut Vec<Found>) -> bool {
        loop {
            self.state = match self.state {
                State::Function => match tag(text, FUNCTION) {
                    Some(name) => {
                        found.push(Found::Name(name.clone()));
                        found.push(Found::Arguments("{".into()));
                        self.name = name;
                        State::Between
                    }
                    None => return false,
                },
                State::Between => {
                    let over = text.find(OVER);
                    if over.is_some_and(|at| text.find(PARAMETER).is_none_or(|other| at < other)) {
                        text.drain(..over.unwrap_or_default() + OVER.len());
                        found.push(Found::Arguments("}".into()));
                        return true;
                    }
                    let Some(name) = tag(text, PARAMETER) else { return false };
                    let is_text = self.is_text(&name);
                    let comma = if std::mem::replace(&mut self.has_one, true) { ", " } else { "" };
                    let quote = if is_text { "\"" } else { "" };
                    found.push(Found::Arguments(format!("{comma}{}: {quote}", json!(name))));
                    if is_text { State::Line } else { State::Json }
                }
                State::Line if text.is_empty() => return false,
                State::Line => {
                    if text.starts_with('\n') {
                        text.remove(0);
                    }
                    State::Text
                }
                State::Text => {
                    let (value, ends) = match text.find(END) {
                        Some(at) => {
                            let value = text[..at].strip_suffix('\n').unwrap_or(&text[..at]).to_owned();
                            text.drain(..at + END.len());
                            (value, true)
                        }
                        None => {
                            let held = begun(text, TEXT_END).max(begun(text, END));
                            (text.drain(..text.len() - held).collect(), false)
                        }
                    };
                    let quoted = json!(value).to_string();
                    let last = if ends { quoted.len() } else { quoted.len() - 1 };
                    put(found, &quoted[1..last]);
                    if !ends {
                        return false;
                    }
                    State::Between
                }
                State::Json => {
                    let (value, ends) = cut(text, END);
                    put(found, value.trim_start());
                    if !ends {
                        return false;
                    }
                    State::Between
                }
            };
        }
    }

    fn is_text(&self, parameter: &str) -> bool {
        let own = self.texts.iter().find(|(function, _)| *function == self.name);
        own.is_some_and(|(_, parameters)| parameters.iter().any(|name| name == parameter))
    }
}

fn put(found: &mut Vec<Found>, text: &str) {
    if !text.is_empty() {
        found.push(Found::Arguments(text.to_owned()));
    }
}

/// Takes a tag that names something, once it is complete.
fn tag(text: &mut String, opening: &str) -> Option<String> {
    let begins = text.find(opening)? + opening.len();
    let length = text[begins..].find('>')?;
    let name = text[begins..begins + length].trim().to_owned();
    text.drain(..=begins + length);
    Some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Name and arguments of a call that comes in pieces of `n` characters, and what follows it.
    fn read(text: &str, n: usize) -> (Option<String>, String, String, bool) {
        let mut elements = Elements::new(Arc::new([("f".to_owned(), vec!["a".to_owned(), "b".to_owned()])]));
        let (mut held, mut found, mut over) = (String::new(), Vec::new(), false);
        for piece in text.chars().collect::<Vec<_>>().chunks(n) {
            held.extend(piece);
            over = over || elements.read(&mut held, &mut found);
        }
        let (mut name, mut arguments) = (None, String::new());
        for part in found {
            match part {
                Found::Name(own) => name = Some(own),
                Found::Arguments(text) => arguments += &text,
            }
        }
        (name, arguments, held, over)
    }

    #[test]
    fn elements_become_json() {
        let text = "\n<function=f>\n<parameter=a>\nsays \"hi\"\n\n\\ </par\n</parameter>\n<parameter=n>\n{\"x\": [1]}\n</parameter>\n\
                    <parameter=b>\n\n</parameter>\n</function>\n</tool_call>";
        for n in [1, 2, 3, 7, 1000] {
            let (name, arguments, rest, over) = read(text, n);
            assert_eq!((name.as_deref(), over), (Some("f"), true), "in pieces of {n}");
            let value: Value =
                serde_json::from_str(&arguments).unwrap_or_else(|e| panic!("{e}: {arguments}"));
            assert_eq!(value, json!({ "a": "says \"hi\"\n\n\\ </par", "n": { "x": [1] }, "b": "" }));
            assert_eq!(rest, "\n</tool_call>");
            // Cut at any place it is the beginning of the same.
            let cut: String = text.chars().take(text.chars().count() * n / (n + 3)).collect();
            assert!(arguments.starts_with(&read(&cut, n).1), "{cut}");
        }
        assert_eq!(read("<function=f>\n</function>", 4).1, "{}");
        assert_eq!(
            read("<function=g>\n<parameter=a>\n3\n</parameter></function>", 4).1,
            "{\"a\": 3}",
            "no text of g"
        );
    }
}
