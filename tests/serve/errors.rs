//! Requests that are refused: by status, field and code.

use serde_json::{Value, json};
use tandem::serve::{Keys, Options};

use super::world::World;

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn chat(more: Value) -> Value {
    let mut body = json!({ "messages": [{ "role": "user", "content": "Hello" }], "max_tokens": 2 });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn text(more: Value) -> Value {
    let mut body = json!({ "prompt": "ab", "max_tokens": 2 });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[test]
fn a_value_that_is_wrong_is_refused_by_its_name() {
    let served = World::default().serve();
    let user = json!({ "role": "user", "content": "x" });
    let image = json!([{ "type": "image_url", "image_url": { "url": "data:," } }]);
    let stops: Vec<String> = (0..17).map(|i| i.to_string()).collect();
    let biases: serde_json::Map<_, _> = (0..512).map(|i| (i.to_string(), json!(101))).collect();
    for (path, body, param) in [
        (CHAT, chat(json!({ "temperature": -1 })), "temperature"),
        (CHAT, chat(json!({ "temperature": "hot" })), "temperature"),
        (CHAT, chat(json!({ "top_p": 0 })), "top_p"),
        (CHAT, chat(json!({ "top_p": 1.5 })), "top_p"),
        (CHAT, chat(json!({ "top_k": -2 })), "top_k"),
        (CHAT, chat(json!({ "min_p": 2 })), "min_p"),
        (CHAT, chat(json!({ "presence_penalty": 3 })), "presence_penalty"),
        (CHAT, chat(json!({ "frequency_penalty": -3 })), "frequency_penalty"),
        (CHAT, chat(json!({ "repetition_penalty": 0 })), "repetition_penalty"),
        (CHAT, chat(json!({ "n": 0 })), "n"),
        (CHAT, chat(json!({ "n": 129 })), "n"),
        (CHAT, chat(json!({ "n": 1.5 })), "n"),
        (CHAT, chat(json!({ "max_tokens": 0 })), "max_tokens"),
        (CHAT, chat(json!({ "max_tokens": -1 })), "max_tokens"),
        (CHAT, chat(json!({ "max_completion_tokens": 0 })), "max_completion_tokens"),
        (CHAT, chat(json!({ "min_tokens": 3 })), "min_tokens"),
        (CHAT, chat(json!({ "stop": stops })), "stop"),
        (CHAT, chat(json!({ "stop": "" })), "stop"),
        (CHAT, chat(json!({ "stop": "x".repeat(513) })), "stop"),
        (CHAT, chat(json!({ "stop": 7 })), "stop"),
        (CHAT, chat(json!({ "stop_token_ids": [512] })), "stop_token_ids"),
        (CHAT, chat(json!({ "logit_bias": { "512": 1 } })), "logit_bias"),
        (CHAT, chat(json!({ "logit_bias": { "x": 1 } })), "logit_bias"),
        (CHAT, chat(json!({ "logit_bias": biases })), "logit_bias"),
        (CHAT, chat(json!({ "stream": "yes" })), "stream"),
        (CHAT, chat(json!({ "stream_options": { "include_usage": true } })), "stream_options"),
        (CHAT, chat(json!({ "top_logprobs": 2 })), "top_logprobs"),
        (CHAT, chat(json!({ "logprobs": true, "top_logprobs": 21 })), "top_logprobs"),
        (CHAT, chat(json!({ "logprobs": 3 })), "logprobs"),
        (CHAT, chat(json!({ "messages": [] })), "messages"),
        (CHAT, chat(json!({ "messages": "hi" })), "messages"),
        (CHAT, chat(json!({ "messages": [user, { "role": "wizard", "content": "x" }] })), "messages[1].role"),
        (CHAT, chat(json!({ "messages": [user, "x"] })), "messages[1].role"),
        (CHAT, chat(json!({ "messages": [{ "role": "user", "content": image }] })), "messages[0].content"),
        (CHAT, chat(json!({ "messages": [{ "role": "user", "content": 5 }] })), "messages[0].content"),
        (
            CHAT,
            chat(json!({ "response_format": { "type": "json_schema", "json_schema": {} } })),
            "response_format",
        ),
        (CHAT, chat(json!({ "response_format": "json_object" })), "response_format"),
        (CHAT, chat(json!({ "tool_choice": "required" })), "tool_choice"),
        (CHAT, chat(json!({ "tool_choice": "perhaps" })), "tool_choice"),
        (CHAT, chat(json!({ "tools": [{ "type": "code" }] })), "tools[0].type"),
        // Without a chat template, only one message of the user has a meaning.
        (CHAT, chat(json!({ "messages": [user, user] })), "messages"),
        (CHAT, chat(json!({ "messages": [{ "role": "user", "content": "" }] })), "messages"),
        (CHAT, chat(json!({ "chat_template_kwargs": { "messages": [] } })), "chat_template_kwargs"),
        (CHAT, json!({ "max_tokens": 2 }), "messages"),
        (TEXT, json!({ "max_tokens": 2 }), "prompt"),
        (TEXT, text(json!({ "prompt": [] })), "prompt"),
        (TEXT, text(json!({ "prompt": [[]] })), "prompt"),
        (TEXT, text(json!({ "prompt": "" })), "prompt"),
        (TEXT, text(json!({ "prompt": [1, "a"] })), "prompt"),
        (TEXT, text(json!({ "prompt": [512] })), "prompt"),
        (TEXT, text(json!({ "prompt": [-1] })), "prompt"),
        (TEXT, text(json!({ "prompt": { "text": "a" } })), "prompt"),
        (TEXT, text(json!({ "logprobs": 21 })), "logprobs"),
        (TEXT, text(json!({ "prompt_logprobs": 21 })), "prompt_logprobs"),
        (TEXT, text(json!({ "prompt_logprobs": -1 })), "prompt_logprobs"),
        (CHAT, chat(json!({ "prompt_logprobs": 1, "stream": true })), "prompt_logprobs"),
        (TEXT, text(json!({ "ttft_target": 0 })), "ttft_target"),
        (TEXT, text(json!({ "tpot_target": -0.5 })), "tpot_target"),
        (TEXT, text(json!({ "tpot_target": "NaN" })), "tpot_target"),
        (CHAT, chat(json!({ "ttft_target": "soon" })), "ttft_target"),
        (CHAT, chat(json!({ "tpot_target": 0.0 })), "tpot_target"),
        (TEXT, text(json!({ "n": 2, "best_of": 1 })), "best_of"),
        (TEXT, text(json!({ "best_of": 129 })), "best_of"),
        (TEXT, text(json!({ "best_of": 2, "stream": true })), "best_of"),
        (TEXT, text(json!({ "suffix": "x" })), "suffix"),
        (TEXT, text(json!({ "prompt": vec!["a"; 2000] })), "prompt"),
    ] {
        let error = served.caller().post(path, &body).error(400);
        assert_eq!(
            (&error["param"], &error["type"]),
            (&json!(param), &json!("invalid_request_error")),
            "{body}"
        );
    }
    assert_eq!(served.gate.steps(), 0, "nothing was computed");
}

/// What this server cannot do it must not seem to do: without texts and a template a model has no forms and no tools.
#[test]
fn a_constraint_that_is_not_kept_is_refused() {
    let served = World::default().serve();
    let tool = json!([{ "type": "function", "function": { "name": "f", "parameters": {} } }]);
    for (path, body, param) in [
        (CHAT, chat(json!({ "response_format": { "type": "json_object" } })), "response_format"),
        (CHAT, chat(json!({ "response_format": { "type": "grammar" } })), "response_format"),
        (TEXT, text(json!({ "response_format": { "type": "json_object" } })), "response_format"),
        (CHAT, chat(json!({ "tools": tool })), "tools"),
        (CHAT, chat(json!({ "tools": tool, "tool_choice": "auto" })), "tools"),
        (CHAT, chat(json!({ "functions": tool })), "functions"),
        (CHAT, chat(json!({ "guided_json": {} })), "guided_json"),
        (CHAT, chat(json!({ "guided_choice": ["a"] })), "guided_choice"),
        (TEXT, text(json!({ "grammar": "root ::= \"a\"" })), "grammar"),
        (TEXT, text(json!({ "structured_outputs": { "regex": "a" } })), "structured_outputs"),
        (CHAT, chat(json!({ "modalities": ["text", "audio"] })), "modalities"),
    ] {
        let error = served.caller().post(path, &body).error(400);
        assert_eq!((&error["param"], &error["code"]), (&json!(param), &json!("unsupported_value")), "{body}");
    }
    let harmless = json!({
        "tools": tool, "tool_choice": "none", "response_format": { "type": "text" }, "modalities": ["text"],
        "user": "u", "metadata": { "a": "b" }, "an_unknown_field": [1, 2], "stop": null, "seed": null,
    });
    served.caller().chat(&chat(harmless)).ok();
}

#[test]
fn a_prompt_beyond_the_context_is_refused_with_numbers() {
    let served = World::default().serve();
    for (path, body, param) in [
        (CHAT, chat(json!({ "messages": [{ "role": "user", "content": "x".repeat(257) }] })), "messages"),
        (
            CHAT,
            chat(json!({ "stream": true, "messages": [{ "role": "user", "content": "x".repeat(257) }] })),
            "messages",
        ),
        (TEXT, text(json!({ "prompt": ["ab", "x".repeat(257)] })), "prompt"),
    ] {
        let error = served.caller().post(path, &body).error(400);
        let want = json!(["context_length_exceeded", param, 257, 256]);
        assert_eq!(json!([error["code"], error["param"], error["n_prompt_tokens"], error["n_ctx"]]), want);
    }
    let full = served.caller().complete(&text(json!({ "prompt": "x".repeat(256) }))).ok();
    assert_eq!(full["usage"]["completion_tokens"], 1);
}

#[test]
fn bodies_that_are_no_json_are_refused() {
    let served = World::default().serve();
    let json = [("content-type", "application/json; charset=utf-8")];
    let deep = format!("{{\"messages\": {}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
    let prefixes =
        ["", "{", "[1", "nope", "{\"prompt\": \"a\"} x", "{\"prompt\": \"\u{0}\"}", "\u{feff}{}", "\"a"];
    for body in prefixes.into_iter().chain([deep.as_str()]) {
        for path in [CHAT, TEXT, "/tokenize", "/detokenize"] {
            served.caller().post_text(path, body, &json).error(400);
        }
    }
    for kind in ["text/plain", "application/x-www-form-urlencoded", "application/jsonp"] {
        let reply = served.caller().post_text(TEXT, "{\"prompt\": \"ab\"}", &[("content-type", kind)]);
        reply.error(415);
    }
    let large = format!("{{\"prompt\": \"{}\"}}", "x".repeat(5 << 20));
    served.caller().post_text(TEXT, &large, &json).error(413);
    served.caller().complete(&text(json!({}))).ok();
}

#[test]
fn paths_and_methods_that_are_not_there_are_refused() {
    let served = World::default().serve();
    for path in ["/page", "/v1", "/v1/embeddings", "/v1/../etc/passwd", "/%2e%2e/x", "//", "/v1/models/"] {
        let error = served.caller().get(path).error(404);
        assert!(["unknown_url", "model_not_found"].contains(&error["code"].as_str().unwrap()), "{path}");
    }
    served.caller().get(CHAT).error(405);
    served.caller().post("/health", &json!({})).error(405);
}

#[test]
fn a_key_is_wanted_where_there_are_keys() {
    let keys = Keys::new(["secret", "other"]).unwrap();
    let options = Options { keys, name: "m".into(), ..Options::default() };
    let served = World { options, ..World::default() }.serve();
    let body = text(json!({})).to_string();
    let post = |headers: &[(&str, &str)]| {
        let all: Vec<_> = [("content-type", "application/json")].iter().chain(headers).copied().collect();
        served.caller().post_text(TEXT, &body, &all)
    };
    for headers in [
        &[][..],
        &[("authorization", "Bearer wrong")],
        &[("authorization", "Bearer secretsecret")],
        &[("authorization", "Basic secret")],
        &[("x-api-key", "")],
    ] {
        assert_eq!(post(headers).error(401)["code"], "invalid_api_key", "{headers:?}");
    }
    post(&[("authorization", "Bearer secret")]).ok();
    post(&[("authorization", "bearer other")]).ok();
    post(&[("x-api-key", "secret")]).ok();
    served.caller().get("/health").ok();
    served.caller().get("/v1/models").ok();
    served.caller().get("/v1/models/m").ok();
    served.caller().get("/metrics").error(401);
    served.caller().get("/openapi.json").ok();
    served.caller().get("/unknown").error(401);
    let line = served.logged("401");
    assert!(!line.contains("secret") && !line.contains("wrong"), "{line}");
}
