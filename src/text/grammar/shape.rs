//! What an answer may consist of: reasoning, then content or calls. Written as a grammar, whose texts are those that
//! [`Reader`](crate::text::Reader) splits again.

use serde_json::{Value, json};

use super::super::calls::{CallFormat, THINK};
use super::{elements, schema};
use crate::Result;

/// Whether an answer begins with reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Thinking {
    /// No.
    #[default]
    None,
    /// If the model wants.
    Possible,
    /// The prompt has begun it.
    Begun,
    /// In messages of its own: the answer comes in channels (harmony).
    Channels,
    /// The same, and the prompt ends inside of a message.
    InMessage,
}

/// The answer beside reasoning and calls.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum Content {
    /// Any text.
    #[default]
    Free,
    /// JSON of this schema.
    Schema(Value),
    /// None: calls are wanted.
    Nothing,
}

/// A function that may be called.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    /// Its name: letters, digits, `_`, `-` and `.`.
    pub name: String,
    /// The JSON schema of its arguments.
    pub parameters: Value,
}

/// The calls that an answer may have.
#[derive(Debug, Clone, PartialEq)]
pub struct Calls {
    /// How they are written.
    pub format: CallFormat,
    /// What may be called, at least one.
    pub tools: Vec<Tool>,
    /// Whether there may be more than one.
    pub parallel: bool,
}

/// See the [module](self).
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Shape {
    /// Reasoning in front.
    pub thinking: Thinking,
    /// The content.
    pub content: Content,
    /// Calls: before the content ends, or instead of it.
    pub calls: Option<Calls>,
}

/// Space between marker and call.
const SPACE: &str = r"ws: /[ \n]{1,4}/";

impl Shape {
    /// Whether any text is an answer.
    pub fn is_free(&self) -> bool {
        self.content == Content::Free && self.calls.is_none()
    }

    /// The rules of an answer without channels.
    ///
    /// # Errors
    /// If a schema is none, or out of bounds.
    pub(super) fn rules(&self) -> Result<Vec<String>> {
        let mut rules = vec![SPACE.to_owned()];
        let think = match self.thinking {
            Thinking::None | Thinking::Channels | Thinking::InMessage => "",
            Thinking::Possible => {
                rules.push(r"think[lazy]: /\s*<think>(.|\n)*<\/think>/".into());
                "(think ws?)? "
            }
            Thinking::Begun => {
                rules.push(r"think[lazy]: /(.|\n)*<\/think>/".into());
                "think ws? "
            }
        };
        let body = match &self.content {
            Content::Schema(of) => {
                rules.push(format!("value: {}", schema::rule(of)?));
                let calls = self.calls.as_ref().map(|calls| calls.alone(&mut rules)).transpose()?;
                calls.map_or("value".into(), |calls| format!("value | {calls}"))
            }
            Content::Nothing => match &self.calls {
                Some(calls) => calls.alone(&mut rules)?,
                None => "ws?".into(),
            },
            Content::Free => {
                // Content that began with reasoning would be read as such.
                let thinks = self.thinking == Thinking::Possible;
                match &self.calls {
                    Some(calls) => calls.in_text(&mut rules, thinks)?,
                    None => {
                        rules.push(r"text: /(.|\n)+/".into());
                        "text?".into()
                    }
                }
            }
        };
        rules.push(format!("start: {think}({body})"));
        Ok(rules)
    }
}

impl Calls {
    /// One call behind its marker, or the list of all.
    fn call(&self, rules: &mut Vec<String>) -> Result<&'static str> {
        let mut names = Vec::new();
        for (i, tool) in self.tools.iter().enumerate() {
            names.push(format!("tool_{i}"));
            if self.format == CallFormat::Elements {
                let call = elements::call(i, &tool.name, &tool.parameters, rules)?;
                rules.push(format!("tool_{i}: {call}"));
                continue;
            }
            let of = schema::rule(&arguments(&tool.parameters))?;
            rules.push(format!("arguments_{i}: {of}"));
            let begins = match self.format {
                CallFormat::MistralArgs => format!("{}[ARGS]", tool.name),
                format => format!("{{\"name\": {}, \"{}\": ", json!(tool.name), format.arguments()),
            };
            let ends = if self.format == CallFormat::MistralArgs { "" } else { " \"}\"" };
            rules.push(format!("tool_{i}: {} arguments_{i}{ends}", json!(begins)));
        }
        rules.push(format!("tool: {}", names.join(" | ")));
        Ok(match self.format {
            CallFormat::Hermes | CallFormat::Elements => "ws? tool ws? \"</tool_call>\"",
            CallFormat::Mistral if self.parallel => "ws? \"[\" tool (\", \" tool)* \"]\"",
            CallFormat::Mistral => "ws? \"[\" tool \"]\"",
            CallFormat::MistralArgs | CallFormat::Llama | CallFormat::Harmony => "tool",
        })
    }

    /// Whether further calls have markers of their own.
    fn repeats(&self) -> bool {
        self.parallel
            && matches!(self.format, CallFormat::Hermes | CallFormat::Elements | CallFormat::MistralArgs)
    }

    /// Calls without a text in front.
    fn alone(&self, rules: &mut Vec<String>) -> Result<String> {
        let call = self.call(rules)?;
        let Some(marker) = self.format.opening() else {
            return Ok(format!("\"<|python_tag|>\"? {call}"));
        };
        let marker = json!(marker);
        let more = if self.repeats() { format!(" (ws? {marker} {call})*") } else { String::new() };
        Ok(format!("{marker} {call}{more}"))
    }

    /// A text, with calls in it or behind it.
    fn in_text(&self, rules: &mut Vec<String>, thinks: bool) -> Result<String> {
        let call = self.call(rules)?;
        let mut first = Vec::new();
        if thinks {
            first.push(THINK);
        }
        let Some(marker) = self.format.opening() else {
            first.extend(["{", "<|python_tag|>"]);
            rules.push(format!("TEXT: /(.|\\n)+/{}", not_first(&first)));
            return Ok(format!("TEXT? | \"<|python_tag|>\"? {call}"));
        };
        rules.push(format!("TEXT: /(.|\\n)+/{}", not_first(&first)));
        rules.push(format!("OPEN: /(.|\\n)*{}/{}", escaped(marker), not_first(&first)));
        // A lazy lexeme ends with the first marker: what follows is a call, and no text.
        rules.push("open[lazy]: OPEN".into());
        Ok(match self.repeats() {
            true => format!("(open {call})* TEXT?"),
            false => format!("TEXT? | open {call}"),
        })
    }
}

/// An intersection that excludes texts which begin with one of these, behind space.
fn not_first(texts: &[&str]) -> String {
    let each: Vec<String> = texts.iter().map(|text| escaped(text)).collect();
    if each.is_empty() { String::new() } else { format!(" & ~/\\s*({})(.|\\n)*/", each.join("|")) }
}

/// A text in a regular expression between slashes.
fn escaped(text: &str) -> String {
    regex::escape(text).replace('/', "\\/")
}

/// Arguments are always an object.
pub(super) fn arguments(parameters: &Value) -> Value {
    let mut parameters = parameters.clone();
    if let Value::Object(fields) = &mut parameters
        && !["type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"]
            .iter()
            .any(|key| fields.contains_key(*key))
    {
        fields.insert("type".into(), "object".into());
    }
    parameters
}
