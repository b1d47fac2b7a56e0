//! The grammar of answers in channels, as [`Channels`](crate::text::Channels) splits them again. Control tokens are
//! themselves, not texts that are spelled like them: those are allowed in any text.

use serde_json::json;

use super::schema;
use super::shape::{Calls, Content, Shape, arguments};
use crate::Result;

/// Behind any message but the last.
const NEXT: &str = "<|end|> <|start|> \"assistant\"";
/// The type of arguments. Models were trained with and without its control token.
const TYPED: &str = "typed: (\" \"? <|constrain|> \"json\" | \" json\")?";

/// The rules of an answer, which ends `inside` of a message of the prompt or begins behind `<|start|>assistant`.
///
/// # Errors
/// If a schema is none, or out of bounds.
pub(super) fn rules(shape: &Shape, inside: bool) -> Result<Vec<String>> {
    let mut rules = vec![r"text: /(.|\n)+/".to_owned(), TYPED.to_owned()];
    rules.push(format!("analysis: <|channel|> \"analysis\" <|message|> text? {NEXT}"));
    // What is said before a call is content, which only free content may have.
    let before = match &shape.content {
        Content::Free => {
            rules.push(format!("preamble: <|channel|> \"commentary\" <|message|> text? {NEXT}"));
            "(analysis | preamble)*"
        }
        Content::Schema(_) | Content::Nothing => "analysis*",
    };
    let body = match &shape.content {
        Content::Free => Some("text?".to_owned()),
        Content::Schema(of) => {
            rules.push(format!("value: {}", schema::rule(of)?));
            Some("value".to_owned())
        }
        Content::Nothing => None,
    };
    let call = shape.calls.as_ref().map(|calls| call(calls, &mut rules)).transpose()?;
    let typed = if matches!(shape.content, Content::Schema(_)) { " typed" } else { "" };
    let last = body.as_ref().map(|body| format!("<|channel|> \"final\"{typed} <|message|> {body}"));
    let last: Vec<String> = last.into_iter().chain(call).collect();
    // Without content and calls, nothing is said.
    let turn = if last.is_empty() { before.to_owned() } else { format!("{before} ({})", last.join(" | ")) };
    let start = match (&shape.content, inside) {
        (_, false) => turn,
        (Content::Free, true) => format!("text? ({NEXT} {turn})?"),
        (Content::Schema(_), true) => "value".into(),
        (Content::Nothing, true) => format!("text? {NEXT} {turn}"),
    };
    rules.push(format!("start: {start}"));
    Ok(rules)
}

/// One call. Its recipient stands behind the channel or the role.
fn call(calls: &Calls, rules: &mut Vec<String>) -> Result<String> {
    let mut names = Vec::new();
    for (i, tool) in calls.tools.iter().enumerate() {
        rules.push(format!("arguments_{i}: {}", schema::rule(&arguments(&tool.parameters))?));
        let to = |before: &str| json!(format!("{before} to=functions.{}", tool.name));
        let headers =
            format!("<|channel|> {} typed | {} <|channel|> \"commentary\" typed", to("commentary"), to(""));
        rules.push(format!("tool_{i}: ({headers}) <|message|> arguments_{i}"));
        names.push(format!("tool_{i}"));
    }
    Ok(names.join(" | "))
}
