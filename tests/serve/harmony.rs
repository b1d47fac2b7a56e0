//! Answers in channels, by a model of random weights whose tokens are bytes and harmony's control tokens.

use serde_json::{Value, json};

use super::world::{Served, World, text_of};

/// A template in the words of harmony.
const TEMPLATE: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}\
    {% if m.thinking and m.content and m.tool_calls %}{{ raise_exception('both') }}{% endif %}\
    <|start|>{{ m.role }}<|channel|>final<|message|>{{ m.thinking or '' }}{{ m.content or '' }}{{ reasoning_effort or '' }}<|end|>\
    {% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}";

fn served() -> Served {
    let world = World {
        spells: true,
        channels: true,
        template: Some(TEMPLATE),
        context: 4096,
        chunk: 256,
        ..World::default()
    };
    world.serve()
}

/// The control tokens by id: see the tests' tokenizer.
const END: u64 = 256;
const START: u64 = 257;
const MESSAGE: u64 = 258;
const RETURN: u64 = 261;

/// Space is made unlikely, and the end of a message likely: a random model says much of both.
fn chat(more: Value) -> Value {
    let mut body = json!({
        "messages": [{ "role": "user", "content": "Go." }], "seed": 1,
        "logit_bias": { "9": -100, "10": -100, "13": -100, "32": -100, "256": 4 },
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn form() -> Value {
    let schema = json!({ "type": "object", "properties": { "a": { "enum": ["tea", "jam"] } }, "required": ["a"],
                         "additionalProperties": false });
    json!({ "type": "json_schema", "json_schema": { "name": "a", "schema": schema } })
}

fn tools() -> Value {
    let parameters = form()["json_schema"]["schema"].clone();
    json!([{ "type": "function", "function": { "name": "fetch", "parameters": parameters } },
           { "type": "function", "function": { "name": "leave" } }])
}

/// The texts of a stream's deltas, in the field of this name.
fn field(events: &[Value], name: &str) -> String {
    events.iter().filter_map(|e| e["choices"][0]["delta"][name].as_str()).collect()
}

#[test]
fn forms_hold_for_what_comes_behind_the_analysis() {
    let served = served();
    let mut thoughts = 0;
    for seed in 0..6 {
        let body = chat(json!({ "response_format": form(), "seed": seed, "max_tokens": 2000 }));
        let choice = served.caller().chat(&body).ok()["choices"][0].clone();
        assert_eq!(choice["finish_reason"], "stop", "{choice}");
        let content: Value = serde_json::from_str(choice["message"]["content"].as_str().unwrap()).unwrap();
        assert!(content["a"] == "tea" || content["a"] == "jam", "{choice}");
        thoughts += usize::from(choice["message"]["reasoning_content"].is_string());
        let mut body = body;
        body["stream"] = true.into();
        let events = served.stream("/v1/chat/completions", &body).all();
        assert_eq!(json!(text_of(&events, 0)), choice["message"]["content"], "streamed and whole");
        let reasoning = choice["message"]["reasoning_content"].as_str().unwrap_or_default();
        assert_eq!(field(&events, "reasoning_content"), reasoning);
    }
    assert!(thoughts > 0, "some of the answers reason");
    served.wait_until_free();
}

#[test]
fn functions_are_called_by_messages_to_them() {
    let served = served();
    for seed in 0..4 {
        let body =
            chat(json!({ "tools": tools(), "tool_choice": "required", "seed": seed, "max_tokens": 2000 }));
        let choice = served.caller().chat(&body).ok()["choices"][0].clone();
        assert_eq!(
            (&choice["finish_reason"], &choice["message"]["content"]),
            (&json!("tool_calls"), &Value::Null)
        );
        let calls = choice["message"]["tool_calls"].as_array().unwrap();
        assert_eq!(calls.len(), 1, "one call ends the answer");
        let name = calls[0]["function"]["name"].as_str().unwrap();
        let arguments = calls[0]["function"]["arguments"].as_str().unwrap();
        let parsed: Value = serde_json::from_str(arguments).unwrap();
        assert!(
            name == "leave" && parsed == json!({}) || name == "fetch" && parsed["a"].is_string(),
            "{choice}"
        );
        let mut body = body;
        body["stream"] = true.into();
        let events = served.stream("/v1/chat/completions", &body).all();
        let deltas: Vec<&Value> = events
            .iter()
            .filter_map(|e| e["choices"][0]["delta"]["tool_calls"].as_array())
            .flatten()
            .collect();
        assert_eq!(deltas[0]["function"]["name"], name);
        assert!(deltas[1..].iter().all(|delta| delta.get("id").is_none()), "id and name once");
        let streamed: String = deltas.iter().map(|d| d["function"]["arguments"].as_str().unwrap()).collect();
        assert_eq!(streamed, arguments);
        assert!(deltas.len() > 2 || name == "leave", "arguments come as they form: {deltas:?}");
    }
}

/// The model is made to say control tokens and letters: `<|end|>` goes on, `<|return|>` ends, and no marker is text.
#[test]
fn messages_end_with_their_tokens() {
    let served = served();
    let mut bias = json!({ "97": 100, "98": 100 });
    bias[END.to_string()] = json!(98);
    bias[START.to_string()] = json!(98);
    bias[MESSAGE.to_string()] = json!(98);
    bias[RETURN.to_string()] = json!(97);
    let (mut ended, mut parted) = (0, 0);
    for seed in 0..8 {
        let body = chat(json!({ "logit_bias": bias, "seed": seed, "max_tokens": 60, "logprobs": true }));
        let whole = served.caller().chat(&body).ok();
        let choice = &whole["choices"][0];
        let text = choice["message"]["content"].as_str().unwrap();
        assert!(text.bytes().all(|b| b"ab\n".contains(&b)), "{text:?}");
        let entries = choice["logprobs"]["content"].as_array().unwrap();
        let tokens: Vec<&str> = entries.iter().map(|e| e["token"].as_str().unwrap()).collect();
        assert!(
            tokens.iter().all(|t| ["a", "b", "<|end|>", "<|start|>", "<|message|>"].contains(t)),
            "{tokens:?}"
        );
        let said = tokens.iter().filter(|t| t.len() == 1).count();
        assert!(text.bytes().filter(|b| *b != b'\n').count() <= said, "{text:?} of {tokens:?}");
        ended += usize::from(choice["finish_reason"] == "stop");
        parted += usize::from(tokens.contains(&"<|end|>"));
        let count = whole["usage"]["completion_tokens"].as_u64().unwrap() as usize;
        assert_eq!(
            count,
            tokens.len() + usize::from(choice["finish_reason"] == "stop"),
            "all but the last one"
        );
        let mut body = body;
        body["stream"] = true.into();
        let events = served.stream("/v1/chat/completions", &body).all();
        assert_eq!(text_of(&events, 0), text, "streamed and whole");
    }
    assert!(ended > 0 && parted > 0, "{ended} ended, {parted} went on behind <|end|>");
}

/// What clients send back of an answer reaches the template, which has reasoning and content of a call in one place.
#[test]
fn earlier_reasoning_reaches_the_template() {
    let served = served();
    let ask = |more: Value| {
        let mut turn = json!({ "role": "assistant", "tool_calls": [
            { "id": "c", "type": "function", "function": { "name": "leave", "arguments": "{}" } }] });
        turn.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let result = json!({ "role": "tool", "tool_call_id": "c", "content": "left" });
        let body = json!({ "messages": [{ "role": "user", "content": "Go." }, turn, result], "max_tokens": 1, "tools": tools() });
        served.caller().chat(&body).ok()["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    let bare = ask(json!({ "content": null }));
    assert_eq!(ask(json!({ "reasoning_content": "Hm." })), bare + 3);
    assert_eq!(ask(json!({ "reasoning_content": "Hm.", "content": "I go." })), bare + 3 + 2 + 5);
    let effort = |effort: Value| {
        let body = chat(json!({ "max_tokens": 1, "reasoning_effort": effort }));
        served.caller().chat(&body).ok()["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    assert_eq!(effort(json!("high")), effort(Value::Null) + 4);
}
