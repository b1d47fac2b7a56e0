//! Answers of a form, by a model of random weights whose tokens are bytes: what it says has the form nevertheless, or is cut.

use serde_json::{Value, json};

use super::support::spelling;
use super::world::{Served, World};

/// A template in the words of Hermes, that shows functions.
const TEMPLATE: &str = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{% for m in messages %}<|turn|>{{ m.role }} \
    {{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>\
    {% endfor %}{% if add_generation_prompt %}<|turn|>assistant {% endif %}";

fn served(template: &'static str) -> Served {
    World { spells: true, template: Some(template), context: 4096, chunk: 256, ..World::default() }.serve()
}

/// Space is made unlikely: a random model says much of it.
fn no_space() -> Value {
    json!({ "9": -100, "10": -100, "13": -100, "32": -100 })
}

fn chat(more: Value) -> Value {
    let mut body =
        json!({ "messages": [{ "role": "user", "content": "Go." }], "seed": 1, "logit_bias": no_space() });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn schema(schema: Value) -> Value {
    json!({ "type": "json_schema", "json_schema": { "name": "a", "strict": true, "schema": schema } })
}

/// What the schema of [`person`] says, to the letter.
#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Person {
    name: String,
    age: u8,
    likes: Vec<Like>,
}

#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields, rename_all = "lowercase")]
enum Like {
    Tea,
    Jam,
}

fn person() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "maxLength": 8 },
            "age": { "type": "integer", "minimum": 0, "maximum": 120 },
            "likes": { "type": "array", "items": { "enum": ["tea", "jam"] }, "maxItems": 3 },
        },
        "required": ["name", "age", "likes"],
        "additionalProperties": false,
    })
}

#[track_caller]
fn check(text: &str) {
    let person: Person = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
    assert!(person.name.chars().count() <= 8 && person.age <= 120 && person.likes.len() <= 3, "{person:?}");
}

fn tools() -> Value {
    json!([
        { "type": "function", "function": { "name": "meet", "description": "Meets somebody.", "parameters": person() } },
        { "type": "function", "function": { "name": "leave" } },
    ])
}

#[test]
fn answers_have_the_schema_that_was_asked_for() {
    let served = served(TEMPLATE);
    for (seed, temperature) in [(1, 0.0), (2, 1.0), (3, 2.0)] {
        let body = chat(
            json!({ "response_format": schema(person()), "seed": seed, "temperature": temperature, "n": 2 }),
        );
        let whole = served.caller().chat(&body).ok();
        for choice in whole["choices"].as_array().unwrap() {
            check(choice["message"]["content"].as_str().unwrap());
            assert_eq!(choice["finish_reason"], "stop");
        }
        let mut body = body;
        body["stream"] = true.into();
        let events = served.stream("/v1/chat/completions", &body).all();
        let text = super::world::text_of(&events, 1);
        assert_eq!(json!(text), whole["choices"][1]["message"]["content"], "streamed and whole");
    }
    // Text completions, too; and several prompts.
    let body = json!({ "prompt": ["a", "b"], "max_tokens": 1000, "response_format": schema(person()), "seed": 4, "logit_bias": no_space() });
    for choice in served.caller().complete(&body).ok()["choices"].as_array().unwrap() {
        check(choice["text"].as_str().unwrap());
    }
    served.wait_until_free();
}

#[test]
fn an_answer_that_is_cut_says_so() {
    let served = served(TEMPLATE);
    let body = chat(json!({ "response_format": schema(person()), "max_tokens": 3 }));
    let choice = served.caller().chat(&body).ok()["choices"][0].clone();
    assert_eq!(choice["finish_reason"], "length");
    assert!(choice["message"]["content"].as_str().unwrap().starts_with('{'));
    let body = chat(json!({ "tools": tools(), "tool_choice": "required", "max_tokens": 40 }));
    let choice = served.caller().chat(&body).ok()["choices"][0].clone();
    assert_eq!(choice["finish_reason"], "length", "{choice}");
    // Log-probabilities stay those of the model, of all tokens.
    let body = chat(
        json!({ "response_format": schema(person()), "max_tokens": 9, "logprobs": true, "top_logprobs": 2 }),
    );
    let choice = served.caller().chat(&body).ok()["choices"][0].clone();
    let entries = choice["logprobs"]["content"].as_array().unwrap();
    let bytes: Vec<u8> = entries
        .iter()
        .flat_map(|e| e["bytes"].as_array().unwrap())
        .map(|b| b.as_u64().unwrap() as u8)
        .collect();
    let text = choice["message"]["content"].as_str().unwrap();
    assert!(bytes.starts_with(text.as_bytes()), "{choice}");
    assert!(entries.iter().all(|e| e["top_logprobs"].as_array().unwrap().len() == 2));
    assert!(
        entries.iter().any(|e| e["logprob"].as_f64() < e["top_logprobs"][0]["logprob"].as_f64()),
        "it wanted another token"
    );
}

#[test]
fn functions_are_called_with_their_arguments() {
    let templates = [
        TEMPLATE,
        // No place for functions: they are told in the system message.
        "{% for m in messages %}<|turn|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}<|turn|>assistant ",
        "{{ tools }}[TOOL_CALLS]{% for m in messages %}<|turn|>{{ m.content }}<|end|>{% endfor %}<|turn|>",
        "{{ tools }}[TOOL_CALLS][ARGS]{% for m in messages %}<|turn|>{{ m.content }}<|end|>{% endfor %}<|turn|>",
        "{{ tools }}<|python_tag|>{% for m in messages %}<|turn|>{{ m.content }}<|end|>{% endfor %}<|turn|>",
        "{{ tools }}<tool_call><function=x><parameter=y>{% for m in messages %}<|turn|>{{ m.content }}<|end|>{% endfor %}<|turn|>",
    ];
    for (i, template) in templates.into_iter().enumerate() {
        let served = served(template);
        let named = json!({ "type": "function", "function": { "name": "meet" } });
        for choice in [named, json!("required")] {
            let body = chat(
                json!({ "tools": tools(), "tool_choice": choice, "seed": 3, "parallel_tool_calls": false }),
            );
            let whole = served.caller().chat(&body).ok();
            let answer = &whole["choices"][0];
            assert_eq!(answer["finish_reason"], "tool_calls", "{template}: {answer}");
            assert_eq!(answer["message"]["content"], Value::Null, "{answer}");
            let calls = answer["message"]["tool_calls"].as_array().unwrap();
            assert_eq!(calls.len(), 1);
            let (name, arguments) =
                (&calls[0]["function"]["name"], calls[0]["function"]["arguments"].as_str().unwrap());
            match name.as_str().unwrap() {
                "meet" => check(arguments),
                "leave" => {
                    assert_eq!(serde_json::from_str::<Value>(arguments).unwrap(), json!({}), "{arguments}")
                }
                other => panic!("{other}"),
            }
            assert!(choice == "required" || name == "meet");
            let id = calls[0]["id"].as_str().unwrap();
            assert_eq!(id.len() == 9, [2, 3].contains(&i), "{id}");
            let mut body = body;
            body["stream"] = true.into();
            let (calls, finish) = streamed(served.stream("/v1/chat/completions", &body).all());
            assert_eq!(finish, "tool_calls");
            assert_eq!(calls, [(name.as_str().unwrap().to_owned(), arguments.to_owned())]);
        }
        served.wait_until_free();
    }
}

/// The calls of a stream, by name and arguments; checks how they come.
fn streamed(events: Vec<Value>) -> (Vec<(String, String)>, String) {
    let (mut calls, mut finish, mut pieces) = (Vec::<(String, String)>::new(), String::new(), 0);
    for event in events {
        let choice = &event["choices"][0];
        if let Some(reason) = choice["finish_reason"].as_str() {
            finish = reason.to_owned();
        }
        for part in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            let index = part["index"].as_u64().unwrap() as usize;
            if let Some(name) = part["function"]["name"].as_str() {
                assert_eq!((index, &part["type"]), (calls.len(), &json!("function")), "{part}");
                assert!(!part["id"].as_str().unwrap().is_empty());
                calls.push((name.to_owned(), String::new()));
            } else {
                assert!(
                    part.get("id").is_none() && part.get("type").is_none(),
                    "only where it begins: {part}"
                );
                pieces += 1;
            }
            calls[index].1 += part["function"]["arguments"].as_str().unwrap();
        }
    }
    let length: usize = calls.iter().map(|call| call.1.len()).sum();
    assert!(length < 8 || pieces > 2, "arguments come as they form: {pieces} pieces of {length} bytes");
    (calls, finish)
}

/// Turns with calls and results reach the template, with arguments as objects.
#[test]
fn earlier_calls_reach_the_template() {
    let served = served(TEMPLATE);
    let turns = json!([
        { "role": "user", "content": "Go." },
        { "role": "assistant", "content": null, "tool_calls": [
            { "id": "c", "type": "function", "function": { "name": "meet", "arguments": "{\"name\": \"Ada\"}" } }] },
        { "role": "tool", "tool_call_id": "c", "content": "met" },
    ]);
    let ask = |messages: &Value| {
        let body = json!({ "messages": messages, "max_tokens": 2, "tools": tools(), "seed": 1 });
        served.caller().chat(&body).ok()["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    // The template prints the function of the call as an object, in which the text of its arguments is one.
    let with = ask(&turns);
    let mut longer = turns.clone();
    longer[1]["tool_calls"][0]["function"]["arguments"] = "{\"name\": \"Adam\"}".into();
    assert_eq!(ask(&longer), with + 1);
    let mut spaced = turns;
    spaced[1]["tool_calls"][0]["function"]["arguments"] = "{ \"name\" :   \"Ada\" }".into();
    assert_eq!(ask(&spaced), with, "an object, and no text");
}

#[test]
fn reasoning_has_a_field_of_its_own() {
    // The template says </think> in a comment, and begins to reason.
    let served = served("{# </think> #}{% for m in messages %}{{ m.content }}{% endfor %}<|turn|><think>\n");
    let form =
        schema(json!({ "type": "object", "properties": { "a": { "type": "boolean" } }, "required": ["a"],
                             "additionalProperties": false }));
    // Biased, so that the random model comes to an end of its reasoning: it says nothing else.
    let body = chat(json!({ "response_format": form, "max_tokens": 60, "logit_bias": {
        "60": 60, "47": 60, "116": 60, "104": 60, "105": 60, "110": 60, "107": 60, "62": 60 } }));
    let whole = served.caller().chat(&body).ok();
    let message = &whole["choices"][0]["message"];
    let reasoning = message["reasoning_content"].as_str().unwrap();
    assert!(reasoning.bytes().all(|b| b"</think>".contains(&b)) && !reasoning.is_empty(), "{message}");
    let mut body = body;
    body["stream"] = true.into();
    let events = served.stream("/v1/chat/completions", &body).all();
    let parts = events.iter().filter_map(|e| e["choices"][0]["delta"]["reasoning_content"].as_str());
    assert_eq!(parts.collect::<String>(), reasoning);
}

#[test]
fn forms_that_cannot_be_enforced_are_refused_by_name() {
    let served = served(TEMPLATE);
    let tool = |parameters: Value| {
        json!([{ "type": "function", "function": { "name": "f" } },
                                          { "type": "function", "function": { "name": "g", "parameters": parameters } }])
    };
    let unique = json!({ "type": "array", "uniqueItems": true });
    let deep = (0..100).fold(json!({}), |of, _| json!({ "type": "array", "items": of }));
    for (more, param) in [
        (json!({ "response_format": schema(unique.clone()) }), "response_format"),
        (json!({ "response_format": schema(json!({ "type": "nothing" })) }), "response_format"),
        (json!({ "response_format": schema(json!({ "$ref": "#" })) }), "response_format"),
        (json!({ "response_format": schema(json!("x")) }), "response_format"),
        (json!({ "response_format": schema(deep) }), "response_format"),
        (json!({ "response_format": { "type": "json_schema" } }), "response_format"),
        (json!({ "tools": tool(json!({ "properties": { "a": unique } })) }), "tools[1].function.parameters"),
        (json!({ "tools": tool(json!([])) }), "tools[1].function.parameters"),
        (
            json!({ "tools": [{ "type": "function", "function": { "name": "a b" } }] }),
            "tools[0].function.name",
        ),
        (json!({ "tools": [{ "type": "web_search" }] }), "tools[0].type"),
        (
            json!({ "tools": tools(), "tool_choice": { "type": "function", "function": { "name": "h" } } }),
            "tool_choice",
        ),
        (json!({ "tools": tools(), "tool_choice": "any" }), "tool_choice"),
        (json!({ "tool_choice": "required" }), "tool_choice"),
    ] {
        for stream in [false, true] {
            let mut body = chat(more.clone());
            body["stream"] = stream.into();
            let error = served.caller().chat(&body).error(400);
            assert_eq!(
                (&error["param"], &error["type"]),
                (&json!(param), &json!("invalid_request_error")),
                "{more}"
            );
        }
    }
    assert_eq!(served.gate.steps(), 0, "nothing was computed");
    // A way of writing calls that nobody here reads.
    let served = self::served("{{ tools }}<function=x>{{ messages }}");
    let error = served.caller().chat(&chat(json!({ "tools": tools() }))).error(400);
    assert_eq!((&error["param"], &error["code"]), (&json!("tools"), &json!("unsupported_value")));
}

/// One request's form changes no other's answer, greedy or drawn.
#[test]
fn neighbours_are_free() {
    let served = served(TEMPLATE);
    let free = |temperature: f64| {
        chat(json!({ "max_tokens": 60, "temperature": temperature, "seed": 9, "logprobs": true }))
    };
    let caller = served.caller();
    let answer = |body: &Value| caller.chat(body).ok()["choices"][0].clone();
    let alone = [answer(&free(0.0)), answer(&free(1.0))];
    let held = chat(json!({ "response_format": schema(person()), "seed": 5 }));
    let held_alone = answer(&held);
    std::thread::scope(|scope| {
        let others: Vec<_> = (0..2).map(|_| scope.spawn(|| answer(&held))).collect();
        for (temperature, alone) in [0.0, 1.0].into_iter().zip(&alone) {
            assert_eq!(answer(&free(temperature)), *alone);
        }
        for other in others {
            assert_eq!(other.join().unwrap(), held_alone);
        }
    });
    assert_eq!(spelling::END, 256);
}
