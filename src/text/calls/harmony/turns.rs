//! Earlier turns as the templates of harmony expect them: one call a message with its result behind it, and no content
//! beside the reasoning that led to a call.

use super::super::super::{Conversation, Json, Message};

/// Puts the turns of a conversation into that form.
pub fn arrange(conversation: &mut Conversation) {
    let mut turns = std::mem::take(&mut conversation.messages).into_iter().peekable();
    let mut arranged = Vec::with_capacity(turns.len());
    while let Some(turn) = turns.next() {
        let mut calls = match turn.field("tool_calls") {
            Some(Json::List(calls)) if turn.role() == "assistant" => calls.clone(),
            _ => Vec::new(),
        };
        if turn.role() != "assistant" {
            arranged.push(turn);
            continue;
        }
        if calls.is_empty() {
            // Templates add to the content, and an empty list of calls is one to them.
            arranged.push(with(
                &without(&turn, &["tool_calls", "content"]),
                "content",
                Json::Text(turn.text()),
            ));
            continue;
        }
        let mut results = Vec::new();
        while let Some(result) = turns.next_if(|next| next.role() == "tool") {
            results.push(result);
        }
        let first = with(&thoughtful(&turn), "tool_calls", Json::List(vec![calls.remove(0)]));
        let others = calls
            .into_iter()
            .map(|call| with(&Message::new("assistant", ""), "tool_calls", Json::List(vec![call])));
        let of = |turn: &Message| id(turn.field("tool_calls").and_then(|calls| calls.list().first()), "id");
        for turn in std::iter::once(first).chain(others) {
            let own = of(&turn);
            arranged.push(turn);
            // Results without an id have the order of the calls.
            let is_own = |result: &Message| own.is_none() || [None, own.clone()].contains(&id_of(result));
            if let Some(at) = results.iter().position(is_own) {
                arranged.push(results.remove(at));
            }
        }
        arranged.append(&mut results);
    }
    conversation.messages = arranged;
    conversation.tools.iter_mut().for_each(describe);
}

fn id(of: Option<&Json>, name: &str) -> Option<String> {
    of?.get(name)?.as_str().map(str::to_owned)
}

fn id_of(result: &Message) -> Option<String> {
    result.field("tool_call_id")?.as_str().map(str::to_owned)
}

/// A turn that calls, with its content behind its reasoning: templates have both in one place, and refuse both.
fn thoughtful(turn: &Message) -> Message {
    const NAMES: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];
    let reasoning = NAMES.iter().find_map(|name| turn.field(name)?.as_str()).unwrap_or_default();
    let texts = [reasoning.to_owned(), turn.text()];
    let texts: Vec<String> = texts.into_iter().filter(|text| !text.is_empty()).collect();
    let mut bare = without(turn, &["content"]);
    NAMES.iter().for_each(|name| bare = without(&bare, &[name]));
    if texts.is_empty() { bare } else { with(&bare, "thinking", Json::Text(texts.join("\n\n"))) }
}

fn entries(turn: &Message, keep: impl Fn(&str) -> bool) -> Vec<(String, Json)> {
    match turn.fields() {
        Json::Object(entries) => entries.iter().filter(|(name, _)| keep(name)).cloned().collect(),
        _ => Vec::new(),
    }
}

fn without(turn: &Message, names: &[&str]) -> Message {
    Message::from_json(Json::Object(entries(turn, |name| !names.contains(&name)))).expect("it has its role")
}

fn with(turn: &Message, name: &str, value: Json) -> Message {
    let mut entries = entries(turn, |own| own != name);
    entries.push((name.to_owned(), value));
    Message::from_json(Json::Object(entries)).expect("it has its role")
}

/// Functions without a description have an empty one, to which templates add.
fn describe(tools: &mut Json) {
    let Json::List(tools) = tools else { return };
    for function in tools.iter_mut().filter_map(|tool| tool.get_mut("function")) {
        if function.get("description").and_then(Json::as_str).is_none()
            && let Json::Object(entries) = function
        {
            entries.retain(|(name, _)| name != "description");
            entries.push(("description".into(), Json::Text(String::new())));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arranged(turns: &str) -> String {
        let turns: Json = serde_json::from_str(turns).unwrap();
        let turns = turns.list().iter().map(|m| Message::from_json(m.clone()).unwrap()).collect();
        let mut conversation = Conversation::new(turns);
        conversation.tools = Some(serde_json::from_str(r#"[{"function": {"name": "f"}}]"#).unwrap());
        arrange(&mut conversation);
        let tools = serde_json::to_string(&conversation.tools).unwrap();
        assert_eq!(tools, r#"[{"function":{"name":"f","description":""}}]"#);
        serde_json::to_string(&conversation.messages).unwrap()
    }

    #[test]
    fn calls_come_one_by_one_with_their_results() {
        let turns = r#"[{"role": "user", "content": "Go."},
            {"role": "assistant", "content": "I look.", "reasoning_content": "Both?",
             "tool_calls": [{"id": "a", "function": {"name": "f"}}, {"id": "b", "function": {"name": "g"}}]},
            {"role": "tool", "tool_call_id": "b", "content": "2"}, {"role": "tool", "tool_call_id": "a", "content": "1"},
            {"role": "assistant", "reasoning_content": "Hm.", "content": "3"}, {"role": "assistant", "tool_calls": []}]"#;
        let wanted = r#"[{"role":"user","content":"Go."},
            {"role":"assistant","thinking":"Both?\n\nI look.","tool_calls":[{"id":"a","function":{"name":"f"}}]},
            {"role":"tool","tool_call_id":"a","content":"1"},
            {"role":"assistant","content":"","tool_calls":[{"id":"b","function":{"name":"g"}}]},
            {"role":"tool","tool_call_id":"b","content":"2"},
            {"role":"assistant","reasoning_content":"Hm.","content":"3"},{"role":"assistant","content":""}]"#;
        let lines: String = wanted.lines().map(str::trim_start).collect();
        assert_eq!(arranged(turns), lines);
    }
}
