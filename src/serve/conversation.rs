//! The conversation of a request: its messages as the chat template gets them.

use super::error::ApiError;
use super::fields;
use crate::text::{self, Conversation, Json, Message, is_template_variable};

/// The roles of messages.
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];
/// Most messages.
const MOST_MESSAGES: usize = 4096;

/// The conversation of a request, with its functions if the model `has_tools`.
///
/// # Errors
/// Messages with another role or without a text, and fields that ask for what is not there yet.
pub(super) fn of(
    fields: &fields::Chat,
    has_tools: bool,
    chat: &text::Chat,
) -> Result<Conversation, ApiError> {
    refuse_others(fields)?;
    if fields.messages.is_empty() || fields.messages.len() > MOST_MESSAGES {
        let message = format!("messages: 1 to {MOST_MESSAGES} messages are wanted");
        return Err(ApiError::bad("messages", message));
    }
    let knows_developers = chat.mentions("developer");
    let each = fields.messages.iter().enumerate();
    let messages = each.map(|(i, fields)| message(i, fields, knows_developers)).collect::<Result<_, _>>()?;
    let mut conversation = chat.conversation(messages);
    conversation.tools = fields.tools.clone().filter(|_| has_tools).map(Json::List);
    let has_calls = conversation.messages.iter().any(|m| m.field("tool_calls").is_some());
    if chat.has_template() && !chat.shows_tools() && (has_tools || has_calls) {
        text::tell(&mut conversation);
    }
    if let Some(variables) = &fields.chat_template_kwargs {
        conversation.variables = template_variables(variables)?;
    }
    // OpenAI's name for what templates have as a variable. One that a template does not read has no effect.
    if let Some(effort) = &fields.reasoning_effort
        && chat.mentions("reasoning_effort")
        && conversation.variables.iter().all(|(name, _)| name != "reasoning_effort")
    {
        conversation.variables.push(("reasoning_effort".into(), effort.as_str().into()));
    }
    conversation.continue_final_message = fields.continue_final_message.unwrap_or(false);
    let answers = fields.add_generation_prompt;
    if conversation.continue_final_message && answers == Some(true) {
        let message = "add_generation_prompt and continue_final_message: only one of them can be true";
        return Err(ApiError::bad("add_generation_prompt", message));
    }
    conversation.add_generation_prompt = answers.unwrap_or(!conversation.continue_final_message);
    Ok(conversation)
}

fn message(index: usize, fields: &Json, knows_developers: bool) -> Result<Message, ApiError> {
    let at = |field: &str| format!("messages[{index}]{field}");
    let mut fields = fields.clone();
    let role = fields.get("role").and_then(Json::as_str).unwrap_or_default();
    if !ROLES.contains(&role) {
        let param = at(".role");
        let message = format!("{param}: one of {} is wanted", ROLES.join(", "));
        return Err(ApiError::bad(&param, message));
    }
    // The newer name of the same role.
    if role == "developer"
        && !knows_developers
        && let Json::Object(entries) = &mut fields
        && let Some((_, role)) = entries.iter_mut().find(|(name, _)| name == "role")
    {
        *role = Json::from("system");
    }
    open_arguments(&mut fields);
    Message::from_json(fields).map_err(|why| {
        let param = at(".content");
        let message = format!("{param}: {why}; texts and parts of type text are supported");
        ApiError::bad(&param, message)
    })
}

/// Arguments of calls as objects, which templates print: in a request they are texts.
fn open_arguments(message: &mut Json) {
    let Some(Json::List(calls)) = message.get_mut("tool_calls") else { return };
    for call in calls {
        let Some(arguments) = call.get_mut("function").and_then(|f| f.get_mut("arguments")) else { continue };
        let parsed = arguments.as_str().and_then(|text| serde_json::from_str::<Json>(text).ok());
        if let Some(object @ Json::Object(_)) = parsed {
            *arguments = object;
        }
    }
}

fn template_variables(variables: &Json) -> Result<Vec<(String, Json)>, ApiError> {
    let name = "chat_template_kwargs";
    match variables {
        Json::Object(entries) => match entries.iter().find(|(key, _)| !is_template_variable(key)) {
            None => Ok(entries.clone()),
            Some((key, _)) => Err(ApiError::bad(name, format!("{name}: {key} comes from the request"))),
        },
        _ => Err(ApiError::bad(name, format!("{name}: an object is wanted"))),
    }
}

/// Asks for functions in older words, and for answers that are no text, are refused.
fn refuse_others(fields: &fields::Chat) -> Result<(), ApiError> {
    let why = "tools and tool_choice are supported";
    let none = fields.function_call.as_ref().is_some_and(|choice| choice == "none");
    if fields.functions.as_ref().is_some_and(|list| !list.is_empty()) && !none {
        return Err(ApiError::unsupported("functions", why));
    }
    if fields.function_call.as_ref().is_some_and(|choice| choice != "none" && choice != "auto") {
        return Err(ApiError::unsupported("function_call", why));
    }
    let other_than_text = fields.modalities.iter().flatten().any(|modality| modality != "text");
    let text_only = "only text is answered";
    if other_than_text {
        return Err(ApiError::unsupported("modalities", text_only));
    }
    if fields.audio.is_some() {
        return Err(ApiError::unsupported("audio", text_only));
    }
    match fields.web_search_options {
        Some(_) => Err(ApiError::unsupported("web_search_options", "this server searches nothing")),
        None => Ok(()),
    }
}
