//! The form that a request wants its answer in: `response_format`, `tools`, `tool_choice`. An answer that was asked to have a form is never
//! given without it.

use serde_json::Value;

use super::choice::Reading;
use super::error::ApiError;
use super::fields::{Chat, ResponseFormat};
use super::model::Model;
use crate::text::{self, Calls, Channels, Constraint, Content, Json, Shape, Thinking, Tool};
use crate::{Error, Result};

/// Most functions of a request.
const MOST_TOOLS: usize = 128;
/// Most characters of a function's name.
const LONGEST_NAME: usize = 64;

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Wanted {
    content: Content,
    calls: Option<Calls>,
}

/// What to do about functions.
enum Choice {
    None,
    Auto,
    Required,
    Named(String),
}

impl Wanted {
    /// What `response_format` asks for.
    ///
    /// # Errors
    /// An unknown type, or one without its schema.
    pub fn content(format: Option<&ResponseFormat>) -> Result<Wanted, ApiError> {
        let name = "response_format";
        let content = match format.map(|format| (&*format.kind, &format.json_schema)) {
            None | Some(("text", _)) => Content::Free,
            Some(("json_object", _)) => Content::Schema(serde_json::json!({ "type": "object" })),
            Some(("json_schema", schema)) => {
                let schema = schema.as_ref().and_then(|s| s.schema.clone());
                let missing = || ApiError::bad(name, format!("{name}: json_schema.schema is wanted"));
                Content::Schema(schema.ok_or_else(missing)?)
            }
            Some((kind, _)) => {
                let kind: String = kind.chars().take(LONGEST_NAME).collect();
                let why = format!("type {kind:?} is not one of text, json_object, json_schema");
                return Err(ApiError::unsupported(name, &why));
            }
        };
        Ok(Wanted { content, calls: None })
    }

    /// With the functions of a conversation.
    ///
    /// # Errors
    /// Functions that are none, a choice of none of them, or a model whose calls cannot be read.
    pub fn with_tools(mut self, fields: &Chat, chat: &text::Chat) -> Result<Wanted, ApiError> {
        let given = fields.tools.as_deref().unwrap_or_default();
        let choice = choice(fields.tool_choice.as_ref(), given.is_empty())?;
        if let Choice::None = choice {
            return Ok(self);
        }
        if given.len() > MOST_TOOLS {
            return Err(ApiError::bad("tools", format!("tools: at most {MOST_TOOLS} are wanted")));
        }
        let mut tools = Vec::with_capacity(given.len());
        for (index, tool) in given.iter().enumerate() {
            tools.push(function(index, tool)?);
        }
        let Some(format) = chat.call_format() else {
            let why = match chat.has_template() {
                true => {
                    "this model's chat template has calls written in a way that this server does not read"
                }
                false => "this model has no chat template",
            };
            return Err(ApiError::unsupported("tools", why));
        };
        if let Choice::Named(name) = &choice {
            tools.retain(|tool| tool.name == *name);
            if tools.is_empty() {
                let why = format!("tool_choice: {name} is not the name of one of the tools");
                return Err(ApiError::bad("tool_choice", why));
            }
        }
        if !matches!(choice, Choice::Auto) {
            self.content = Content::Nothing;
        }
        let parallel = fields.parallel_tool_calls.unwrap_or(true) && format.is_parallel();
        // A named function is called once.
        let parallel = parallel && !matches!(choice, Choice::Named(_));
        self.calls = Some(Calls { format, tools, parallel });
        Ok(self)
    }

    /// Whether the model is shown functions.
    pub fn has_tools(&self) -> bool {
        self.calls.is_some()
    }

    /// Compiles the form, which may take some milliseconds, and says how the answer's text is read. `begun` says whether the prompt has
    /// begun to reason; `channels` split an answer that comes in such.
    ///
    /// # Errors
    /// A schema that is none, or cannot be enforced.
    pub fn prepare(
        self,
        model: &Model,
        (thinks, begun): (bool, bool),
        channels: Option<Channels>,
    ) -> Result<(Option<Constraint>, Reading), ApiError> {
        let thinking = match (&channels, thinks, begun) {
            (Some(channels), ..) if channels.is_inside() => Thinking::InMessage,
            (Some(_), ..) => Thinking::Channels,
            (None, _, true) => Thinking::Begun,
            (None, true, false) => Thinking::Possible,
            (None, false, false) => Thinking::None,
        };
        let format = self.calls.as_ref().map(|calls| calls.format);
        let tools = self.calls.iter().flat_map(|calls| &calls.tools);
        let texts = tools.map(|tool| (tool.name.clone(), text::texts_of(&tool.parameters))).collect();
        let reading = Reading { format, texts, thinks, begun, channels, ..Reading::default() };
        let shape = Shape { thinking, content: self.content, calls: self.calls };
        if shape.is_free() {
            return Ok((None, reading));
        }
        match compile(model, &shape) {
            Ok(constraint) => Ok((Some(constraint), reading)),
            Err(error) => Err(refusal(model, shape, error)),
        }
    }
}

fn compile(model: &Model, shape: &Shape) -> Result<Constraint> {
    model.grammars.compile(&shape.grammar()?)
}

/// Says which part of a shape is at fault.
fn refusal(model: &Model, shape: Shape, error: Error) -> ApiError {
    let refused = |param: &str, error: &Error| match error {
        Error::Usage(why) => ApiError::bad(param, format!("{param}: {why}")),
        Error::Unsupported(why) => ApiError::unsupported(param, why),
        other => ApiError::internal(other.to_string()),
    };
    let Shape { thinking, content, calls } = shape;
    let Some(calls) = calls else { return refused("response_format", &error) };
    let alone = Shape { thinking, content: content.clone(), calls: None };
    if let (Content::Schema(_), Err(error)) = (content, compile(model, &alone)) {
        return refused("response_format", &error);
    }
    for (index, tool) in calls.tools.iter().enumerate() {
        let calls = Some(Calls { tools: vec![tool.clone()], ..calls.clone() });
        let alone = Shape { thinking, content: Content::Nothing, calls };
        if let Err(error) = compile(model, &alone) {
            return refused(&format!("tools[{index}].function.parameters"), &error);
        }
    }
    refused("tools", &error)
}

fn choice(choice: Option<&Value>, no_tools: bool) -> Result<Choice, ApiError> {
    let bad = |why: &str| ApiError::bad("tool_choice", format!("tool_choice: {why}"));
    let wanted = match choice {
        None => Choice::Auto,
        Some(Value::String(word)) => match word.as_str() {
            "none" => Choice::None,
            "auto" => Choice::Auto,
            "required" => Choice::Required,
            _ => return Err(bad("none, auto, required or a function is wanted")),
        },
        Some(value) => match (value["type"].as_str(), value["function"]["name"].as_str()) {
            (Some("function"), Some(name)) => Choice::Named(name.to_owned()),
            _ => return Err(bad("none, auto, required or a function is wanted")),
        },
    };
    match wanted {
        Choice::None | Choice::Auto if no_tools => Ok(Choice::None),
        _ if no_tools => Err(bad("there are no tools to choose from")),
        wanted => Ok(wanted),
    }
}

fn function(index: usize, tool: &Json) -> Result<Tool, ApiError> {
    let bad = |field: &str, why: &str| {
        let param = format!("tools[{index}]{field}");
        ApiError::bad(&param, format!("{param}: {why}"))
    };
    if tool.get("type").and_then(Json::as_str) != Some("function") {
        return Err(bad(".type", "function is wanted"));
    }
    let function = tool.get("function");
    let name = function.and_then(|f| f.get("name")).and_then(Json::as_str).unwrap_or_default();
    let fits = |c: char| c.is_ascii_alphanumeric() || ['_', '-', '.'].contains(&c);
    if name.is_empty() || name.len() > LONGEST_NAME || !name.chars().all(fits) {
        let wanted = format!("1 to {LONGEST_NAME} letters, digits, _, - and . are wanted");
        return Err(bad(".function.name", &wanted));
    }
    let parameters = match function.and_then(|f| f.get("parameters")) {
        // A function without parameters.
        None | Some(Json::Null) => {
            serde_json::json!({ "type": "object", "properties": {}, "additionalProperties": false })
        }
        Some(parameters @ Json::Object(_)) => serde_json::to_value(parameters).expect("JSON"),
        Some(_) => return Err(bad(".function.parameters", "a JSON schema is wanted")),
    };
    Ok(Tool { name: name.to_owned(), parameters })
}
