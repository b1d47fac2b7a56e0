//! Reads the JSON of a call as it comes, without waiting for its end.

/// Finds the end of one JSON value.
#[derive(Debug, Default)]
pub(super) struct Value {
    depth: usize,
    begun: bool,
    is_string: bool,
    escaped: bool,
}

/// What a character is to a value.
#[derive(Debug, PartialEq)]
pub(super) enum CharPlace {
    /// Space in front of it.
    Before,
    /// A part of it.
    Inside,
    /// Its last part.
    Last,
    /// The first character that is none of it: numbers and words end so.
    Behind,
}

impl Value {
    /// Takes the next character.
    pub fn push(&mut self, c: char) -> CharPlace {
        if self.is_string {
            match c {
                _ if self.escaped => self.escaped = false,
                '\\' => self.escaped = true,
                '"' => {
                    self.is_string = false;
                    return if self.depth == 0 { CharPlace::Last } else { CharPlace::Inside };
                }
                _ => {}
            }
            return CharPlace::Inside;
        }
        match c {
            c if c.is_whitespace() && !self.begun => return CharPlace::Before,
            c if self.depth == 0 && self.begun && (c.is_whitespace() || [',', '}', ']'].contains(&c)) => {
                return CharPlace::Behind;
            }
            '"' => self.is_string = true,
            '{' | '[' => self.depth += 1,
            '}' | ']' => {
                self.depth = self.depth.saturating_sub(1);
                if self.depth == 0 {
                    return CharPlace::Last;
                }
            }
            _ => {}
        }
        self.begun = true;
        CharPlace::Inside
    }
}

/// Something of a call.
#[derive(Debug, PartialEq)]
pub(super) enum Found {
    /// The function's name.
    Name(String),
    /// More of the text of its arguments.
    Arguments(String),
}

#[derive(Debug, PartialEq)]
enum Field {
    Name,
    Arguments,
    Other,
}

#[derive(Debug)]
enum State {
    /// In front of the object, of a key, or of its end.
    Between,
    Key(Value, String),
    Colon(Field),
    Field(Field, Value, String),
    Done,
}

/// Reads `{"name": "f", "arguments": {…}}`, whatever the order of its fields. Arguments that come first wait for the name.
#[derive(Debug)]
pub(super) struct CallScan {
    state: State,
    arguments: &'static str,
    named: bool,
    early: String,
}

impl CallScan {
    /// Of an object whose arguments have this name.
    pub fn new(arguments: &'static str) -> CallScan {
        CallScan { state: State::Between, arguments, named: false, early: String::new() }
    }

    /// Whether the object is complete.
    pub fn is_done(&self) -> bool {
        matches!(self.state, State::Done)
    }

    /// Takes the next character.
    pub fn push(&mut self, c: char, found: &mut Vec<Found>) {
        let state = std::mem::replace(&mut self.state, State::Between);
        self.state = match state {
            State::Between => match c {
                '"' => {
                    let mut key = Value::default();
                    key.push(c);
                    State::Key(key, c.into())
                }
                '}' => State::Done,
                _ => State::Between,
            },
            State::Key(mut key, mut text) => {
                text.push(c);
                if key.push(c) == CharPlace::Last {
                    State::Colon(self.field(&text))
                } else {
                    State::Key(key, text)
                }
            }
            State::Colon(field) if c == ':' => State::Field(field, Value::default(), String::new()),
            State::Colon(field) => State::Colon(field),
            State::Field(field, mut value, mut text) => match value.push(c) {
                CharPlace::Before => State::Field(field, value, text),
                CharPlace::Behind => {
                    self.ended(field, text, found);
                    if c == '}' { State::Done } else { State::Between }
                }
                place => {
                    match field {
                        Field::Arguments if self.named => argument(c, found),
                        Field::Arguments => self.early.push(c),
                        Field::Name => text.push(c),
                        Field::Other => {}
                    }
                    if place == CharPlace::Last {
                        self.ended(field, text, found);
                        State::Between
                    } else {
                        State::Field(field, value, text)
                    }
                }
            },
            State::Done => State::Done,
        };
    }

    fn field(&self, key: &str) -> Field {
        match serde_json::from_str::<String>(key).as_deref() {
            Ok("name") => Field::Name,
            Ok(key) if key == self.arguments => Field::Arguments,
            _ => Field::Other,
        }
    }

    fn ended(&mut self, field: Field, text: String, found: &mut Vec<Found>) {
        if field == Field::Name && !self.named {
            self.named = true;
            found.push(Found::Name(serde_json::from_str(&text).unwrap_or(text)));
            if !self.early.is_empty() {
                found.push(Found::Arguments(std::mem::take(&mut self.early)));
            }
        }
    }
}

fn argument(c: char, found: &mut Vec<Found>) {
    match found.last_mut() {
        Some(Found::Arguments(text)) => text.push(c),
        _ => found.push(Found::Arguments(c.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> (Vec<Found>, bool) {
        let (mut scan, mut found) = (CallScan::new("arguments"), Vec::new());
        text.chars().for_each(|c| scan.push(c, &mut found));
        (found, scan.is_done())
    }

    #[test]
    fn names_and_arguments_are_found_in_any_order() {
        let name = || Found::Name("f\"g".into());
        let arguments = || Found::Arguments(r#"{"a": "}\"{", "b": [1, {"c": 2}]}"#.into());
        let text = r#" {"name": "f\"g", "x": 12, "arguments": {"a": "}\"{", "b": [1, {"c": 2}]}} "#;
        assert_eq!(read(text), (vec![name(), arguments()], true));
        let text = r#"{"arguments": {"a": "}\"{", "b": [1, {"c": 2}]}, "x": null,"name":"f\"g"}"#;
        assert_eq!(read(text), (vec![name(), arguments()], true));
    }

    #[test]
    fn arguments_come_before_the_object_ends() {
        let (found, done) = read(r#"{"name": "f", "arguments": {"a": "x"#);
        assert_eq!(found, [Found::Name("f".into()), Found::Arguments(r#"{"a": "x"#.into())]);
        assert!(!done);
    }
}
