//! Shows functions to models whose template has no place for them: in the system message, in the words of Qwen's template.

use super::super::{Conversation, Json, Message};

const BEFORE: &str = "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n\
    You are provided with function signatures within <tools></tools> XML tags:\n<tools>";
const BEHIND: &str = "\n</tools>\n\nFor each function call, return a json object with function name and arguments within \
    <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>";

/// Moves the functions of a conversation, its calls and their results into its texts, in the format
/// [`Hermes`](super::CallFormat::Hermes).
pub fn tell(conversation: &mut Conversation) {
    let messages = std::mem::take(&mut conversation.messages);
    let mut told: Vec<Message> = messages.into_iter().map(message).collect();
    if let Some(tools) = conversation.tools.take() {
        let mut text = BEFORE.to_owned();
        for tool in tools.list() {
            text.push('\n');
            text += &json(tool);
        }
        text += BEHIND;
        if told.first().is_some_and(|first| first.role() == "system") {
            text = format!("{}\n\n{text}", told.remove(0).text());
        }
        told.insert(0, Message::new("system", text));
    }
    conversation.messages = told;
}

fn message(message: Message) -> Message {
    match message.role() {
        "tool" => Message::new("user", format!("<tool_response>\n{}\n</tool_response>", message.text())),
        "assistant" if message.field("tool_calls").is_some() => {
            let mut text = message.text();
            for call in message.field("tool_calls").map(Json::list).unwrap_or_default() {
                let call = call.get("function").unwrap_or(call);
                let field = |name: &str| call.get(name).map_or_else(|| "{}".to_owned(), json);
                if !text.is_empty() {
                    text.push('\n');
                }
                let (name, arguments) = (field("name"), field("arguments"));
                text +=
                    &format!("<tool_call>\n{{\"name\": {name}, \"arguments\": {arguments}}}\n</tool_call>");
            }
            Message::new("assistant", text)
        }
        _ => message,
    }
}

fn json(value: &Json) -> String {
    serde_json::to_string(value).expect("JSON")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(text: &str) -> Vec<Message> {
        let list: Json = serde_json::from_str(text).unwrap();
        list.list().iter().map(|m| Message::from_json(m.clone()).unwrap()).collect()
    }

    #[test]
    fn functions_calls_and_results_become_text() {
        let turns = messages(
            r#"[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": null, "tool_calls": [
                  {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"city": "Ulm"}}}]},
                {"role": "tool", "tool_call_id": "c1", "content": "rain"}]"#,
        );
        let mut conversation = Conversation::new(turns);
        let tools = r#"[{"type": "function", "function": {"name": "look"}}]"#;
        conversation.tools = Some(serde_json::from_str(tools).unwrap());
        tell(&mut conversation);
        assert!(conversation.tools.is_none());
        let told: Vec<(String, String)> =
            conversation.messages.iter().map(|m| (m.role().to_owned(), m.text())).collect();
        assert_eq!(told.len(), 4);
        assert!(told[0].1.starts_with("Be brief.\n\n# Tools"), "{}", told[0].1);
        assert!(
            told[0].1.contains(
                r#"<tools>
{"type":"function","function":{"name":"look"}}
</tools>"#
            ),
            "{}",
            told[0].1
        );
        let call = "<tool_call>\n{\"name\": \"look\", \"arguments\": {\"city\":\"Ulm\"}}\n</tool_call>";
        assert_eq!(told[2], ("assistant".into(), call.into()));
        assert_eq!(told[3], ("user".into(), "<tool_response>\nrain\n</tool_response>".into()));
    }
}
