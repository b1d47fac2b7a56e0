//! Answers: whole and streamed, of every form of prompt, by every field.

use serde_json::{Value, json};

use super::world::{Served, World, text_of};

fn served() -> Served {
    World::default().serve()
}

fn ask(more: Value) -> Value {
    let mut body =
        json!({ "model": "any", "messages": [{ "role": "user", "content": "Hello" }], "max_tokens": 12 });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn content(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap()
}

#[test]
fn a_stream_has_the_text_of_the_whole_answer() {
    let served = served();
    for more in [json!({ "temperature": 0 }), json!({ "seed": 7 }), json!({ "seed": 7, "temperature": 3.0 })]
    {
        let whole = served.caller().chat(&ask(more.clone())).ok();
        let mut streamed = ask(more);
        streamed["stream"] = true.into();
        let events = served.stream("/v1/chat/completions", &streamed).all();
        assert_eq!(text_of(&events, 0), content(&whole));
        let first = &events[0]["choices"][0];
        assert_eq!(first["delta"], json!({ "role": "assistant", "content": "" }));
        let last = &events.last().unwrap()["choices"][0];
        assert_eq!((&last["delta"], &last["finish_reason"]), (&json!({}), &json!("length")));
        for event in &events {
            assert_eq!(event["id"], events[0]["id"]);
            assert_eq!(event["created"], events[0]["created"]);
            assert_eq!(event["object"], "chat.completion.chunk");
            assert_eq!(event["model"], "tiny/llama");
            assert!(event.get("usage").is_none());
        }
        for event in &events[1..] {
            assert!(event["choices"][0]["delta"].get("role").is_none());
        }
        for event in &events[..events.len() - 1] {
            assert_eq!(event["choices"][0]["finish_reason"], Value::Null);
        }
        assert_eq!(whole["object"], "chat.completion");
        assert_eq!(whole["choices"][0]["message"]["role"], "assistant");
        assert_eq!(whole["choices"][0]["finish_reason"], "length");
    }
}

/// The next turn computes what is new, and says the same.
#[test]
fn what_was_computed_of_a_conversation_is_used_again() {
    let (plain, kept) = (served(), World { prefixes: true, ..World::default() }.serve());
    let mut prompt: Vec<u32> = (1..60).collect();
    let mut cached = Vec::new();
    for _ in 0..3 {
        let body = json!({ "prompt": prompt, "max_tokens": 20, "temperature": 0, "n": 2 });
        let [want, got] = [&plain, &kept].map(|served| served.caller().post("/v1/completions", &body).ok());
        assert_eq!(want["choices"], got["choices"]);
        assert_eq!(want["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
        assert_eq!(want["usage"]["total_tokens"], got["usage"]["total_tokens"]);
        cached.push(got["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap());
        // Without a tokenizer an answer's text is its tokens' numbers.
        let answer = got["choices"][0]["text"].as_str().unwrap();
        prompt.extend(answer.split_whitespace().map(|id| id.parse::<u32>().unwrap()));
    }
    assert_eq!(cached, [0, 64, 96], "59 + 19 tokens are stored, then 79 + 19");
    let metrics = kept.caller().get("/metrics").body;
    let line = metrics.lines().find_map(|l| l.strip_prefix("tandem_cached_tokens_total "));
    assert!(line.is_some_and(|n| n.parse::<u64>().unwrap() >= 160), "{metrics}");
}

#[test]
fn usage_counts_tokens_once() {
    let served = served();
    let usage = json!({
        "prompt_tokens": 5, "completion_tokens": 24, "total_tokens": 29,
        "prompt_tokens_details": { "cached_tokens": 0 },
    });
    let whole = served.caller().chat(&ask(json!({ "n": 2 }))).ok();
    assert_eq!(whole["usage"], usage);
    let body = ask(json!({ "n": 2, "stream": true, "stream_options": { "include_usage": true } }));
    let events = served.stream("/v1/chat/completions", &body).all();
    let (last, others) = events.split_last().unwrap();
    assert_eq!((&last["usage"], &last["choices"]), (&usage, &json!([])));
    assert!(others.iter().all(|e| e["usage"].is_null() && e.get("usage").is_some()));
}

/// The best of several are those of the highest mean log-probability, whether or not that is told; all of them count.
#[test]
fn the_best_answers_are_told_in_their_order() {
    let served = served();
    let body = |more: Value| {
        let mut body = json!({ "prompt": ["ab", "c"], "max_tokens": 6, "seed": 7, "echo": true });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let complete = |more: Value| served.caller().complete(&body(more)).ok();
    let all = complete(json!({ "n": 5, "logprobs": 0, "echo": false }));
    let all = all["choices"].as_array().unwrap();
    let mean = |choice: &Value| {
        let each = choice["logprobs"]["token_logprobs"].as_array().unwrap();
        each.iter().map(|p| p.as_f64().unwrap()).sum::<f64>() / each.len() as f64
    };
    let mut want = Vec::new();
    for (of, echo) in all.chunks(5).zip(["ab", "c"]) {
        let mut of: Vec<&Value> = of.iter().collect();
        of.sort_by(|a, b| mean(b).total_cmp(&mean(a)));
        want.extend(of[..2].iter().map(|c| format!("{echo}{}", c["text"].as_str().unwrap())));
    }
    let best = complete(json!({ "n": 2, "best_of": 5 }));
    let choices = best["choices"].as_array().unwrap();
    let told: Vec<&str> = choices.iter().map(|c| c["text"].as_str().unwrap()).collect();
    assert_eq!(told, want);
    for (index, choice) in choices.iter().enumerate() {
        assert_eq!((&choice["index"], &choice["logprobs"]), (&json!(index), &Value::Null));
    }
    assert_eq!(best["usage"]["completion_tokens"], 2 * 5 * 6);
    assert_eq!(complete(json!({ "n": 2, "best_of": 2 }))["choices"].as_array().unwrap().len(), 4);
}

#[test]
fn several_answers_have_successive_seeds() {
    let served = served();
    let all = served.caller().chat(&ask(json!({ "n": 3, "seed": 40 }))).ok();
    let texts: Vec<_> = all["choices"].as_array().unwrap().iter().map(|c| &c["message"]["content"]).collect();
    for (i, text) in texts.iter().enumerate() {
        let alone = served.caller().chat(&ask(json!({ "seed": 40 + i }))).ok();
        assert_eq!(*text, content(&alone), "answer {i}");
        assert_eq!(all["choices"][i]["index"], i);
    }
    assert_ne!(texts[0], texts[1], "seeds count");
    let events =
        served.stream("/v1/chat/completions", &ask(json!({ "n": 3, "seed": 40, "stream": true }))).all();
    for (i, text) in texts.iter().enumerate() {
        assert_eq!(text_of(&events, i as u64), **text);
    }
    let unseeded = [0, 1].map(|_| content(&served.caller().chat(&ask(json!({}))).ok()).to_owned());
    assert_ne!(unseeded[0], unseeded[1], "without a seed each answer is another");
}

#[test]
fn a_stop_string_ends_the_text_before_it() {
    let served = served();
    let whole = served.caller().chat(&ask(json!({ "seed": 3 }))).ok();
    let text = content(&whole);
    // From within the fourth token to within the fifth.
    let words: Vec<&str> = text.split(' ').collect();
    let at = words[..3].join(" ").len() + 2;
    let stop = &text[at..at + 4];
    let want = &text[..text.find(stop).unwrap()];
    for stop in [json!(stop), json!(["never", stop])] {
        let body = ask(json!({ "seed": 3, "stop": stop }));
        let short = served.caller().chat(&body).ok();
        assert_eq!(content(&short), want);
        assert_eq!(short["choices"][0]["finish_reason"], "stop");
        let mut streamed = body;
        streamed["stream"] = true.into();
        let events = served.stream("/v1/chat/completions", &streamed).all();
        assert_eq!(text_of(&events, 0), want);
        assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "stop");
    }
}

#[test]
fn prompts_are_texts_or_tokens_one_or_many() {
    let served = served();
    let complete = |prompt: Value| {
        let body = json!({ "prompt": prompt, "max_tokens": 4, "temperature": 0 });
        served.caller().complete(&body).ok()
    };
    let text = |answer: &Value, i: usize| answer["choices"][i]["text"].as_str().unwrap().to_owned();
    // The tokens of a text are its bytes here.
    let (ab, c) = (complete(json!("ab")), complete(json!("c")));
    assert_eq!(ab["object"], "text_completion");
    assert_eq!(ab["usage"]["prompt_tokens"], 2);
    assert_eq!(text(&complete(json!([97, 98])), 0), text(&ab, 0));
    let both = complete(json!(["ab", "c"]));
    assert_eq!([text(&both, 0), text(&both, 1)], [text(&ab, 0), text(&c, 0)]);
    assert_eq!(both["usage"]["prompt_tokens"], 3);
    let both = complete(json!([[97, 98], [99]]));
    assert_eq!([text(&both, 0), text(&both, 1)], [text(&ab, 0), text(&c, 0)]);
    assert_ne!(text(&ab, 0), text(&c, 0));
    // Without a number of tokens there are 16.
    let usual = served.caller().complete(&json!({ "prompt": "ab" })).ok();
    assert_eq!(usual["usage"]["completion_tokens"], 16);
}

#[test]
fn echo_puts_the_prompt_in_front() {
    let served = served();
    let body = json!({ "prompt": ["ab", "c"], "max_tokens": 3, "temperature": 0, "n": 2 });
    let plain = served.caller().complete(&body).ok();
    let mut echoing = body;
    echoing["echo"] = true.into();
    let echoed = served.caller().complete(&echoing).ok();
    echoing["stream"] = true.into();
    let events = served.stream("/v1/completions", &echoing).all();
    for (i, prompt) in ["ab", "ab", "c", "c"].into_iter().enumerate() {
        let want = format!("{prompt}{}", plain["choices"][i]["text"].as_str().unwrap());
        assert_eq!(echoed["choices"][i]["text"], want);
        assert_eq!(text_of(&events, i as u64), want);
    }
    // A prompt alone.
    let nothing = served.caller().complete(&json!({ "prompt": "ab", "max_tokens": 0, "echo": true })).ok();
    assert_eq!(nothing["choices"][0]["text"], "ab");
    assert_eq!(nothing["usage"]["completion_tokens"], 0);
}

#[test]
fn biases_and_penalties_change_what_is_chosen() {
    let served = served();
    let words = |more: Value| {
        let answer = served.caller().chat(&ask(more)).ok();
        content(&answer).split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    let forced = words(json!({ "logit_bias": { "77": 100 } }));
    assert_eq!(forced, vec!["77"; 12]);
    let banned =
        words(json!({ "temperature": 0, "logit_bias": { "77": 100, "78": 99.5 }, "frequency_penalty": 2 }));
    // Each 77 takes 2 from it: after the first, 78 is ahead.
    assert!(banned.contains(&"77".into()) && banned.contains(&"78".into()), "{banned:?}");
    let present = json!({ "temperature": 0, "logit_bias": { "77": 100, "78": 99 }, "presence_penalty": 2 });
    assert_eq!(words(present)[..2], ["77", "78"]);
    let repeated =
        json!({ "temperature": 0, "logit_bias": { "77": 100, "78": 90 }, "repetition_penalty": 2 });
    assert_eq!(words(repeated)[..2], ["77", "78"]);
    let greedy = words(json!({ "temperature": 0 }));
    assert_eq!(words(json!({ "top_k": 1, "seed": 9 })), greedy);
    assert_eq!(words(json!({ "top_p": 1e-6, "seed": 9 })), greedy);
    assert_eq!(words(json!({ "min_p": 1, "seed": 9 })), greedy);
}

#[test]
fn roles_and_parts_of_text_are_taken_and_answers_end_where_the_context_does() {
    let served = served();
    let parts = json!([{ "type": "text", "text": "Hel" }, { "type": "text", "text": "lo" }]);
    let same = json!({ "temperature": 0, "messages": [{ "role": "user", "content": parts }] });
    let (a, b) =
        (served.caller().chat(&ask(same)).ok(), served.caller().chat(&ask(json!({ "temperature": 0 }))).ok());
    assert_eq!(content(&a), content(&b));
    let mut endless = ask(json!({ "temperature": 0 }));
    endless.as_object_mut().unwrap().remove("max_tokens");
    let answer = served.caller().chat(&endless).ok();
    // The last token of a full context is not stored.
    assert_eq!(answer["usage"]["total_tokens"], 256 + 1);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    endless["max_completion_tokens"] = 2.into();
    assert_eq!(served.caller().chat(&endless).ok()["usage"]["completion_tokens"], 2);
}

#[test]
fn other_endpoints_answer() {
    let served = served();
    let caller = served.caller();
    let list = caller.get("/v1/models").ok();
    assert_eq!((&list["object"], &list["data"][0]["id"]), (&json!("list"), &json!("tiny/llama")));
    assert_eq!(caller.get("/v1/models/tiny/llama").ok(), list["data"][0]);
    assert_eq!(caller.get("/v1/models/tiny%2Fllama").ok(), list["data"][0]);
    assert_eq!(caller.get("/v1/models/other").error(404)["code"], "model_not_found");
    assert_eq!(caller.get("/health").ok(), json!({ "status": "ok" }));
    let tokens = caller.post("/tokenize", &json!({ "content": "ab" })).ok();
    assert_eq!((&tokens["tokens"], &tokens["count"]), (&json!([97, 98]), &json!(2)));
    let text = caller.post("/detokenize", &json!({ "tokens": [97, 98] })).ok();
    assert_eq!(text["content"], "97 98 ");
    let none = caller.get("/tokenizer_info").ok();
    assert_eq!(
        (&none["eos_token"], &none["chat_template"], &none["model_max_length"]),
        (&Value::Null, &Value::Null, &json!(256))
    );
    let spelling =
        World { spells: true, template: Some("{{ messages[0].content }}"), ..World::default() }.serve();
    let info = spelling.caller().get("/tokenizer_info").ok();
    assert!(info["tokenizer_class"].is_string(), "{info}");
    assert_eq!(info["chat_template"], "{{ messages[0].content }}");
    caller.complete(&json!({ "prompt": "ab", "max_tokens": 3 })).ok();
    // The engine tells its numbers behind the step that gave the last token.
    served.wait_until_free();
    let metrics = caller.get("/metrics");
    assert_eq!(metrics.status, 200);
    for line in [
        "tandem_ready 1",
        "tandem_http_requests_total{path=\"/v1/completions\",status=\"200\"} 1",
        "tandem_http_requests_total{path=\"/v1/models/{*id}\",status=\"404\"} 1",
        "tandem_prompt_tokens_total 2",
        "tandem_generation_tokens_total 3",
        "tandem_time_to_first_token_seconds_count 1",
        "tandem_strategy_info{strategy=\"gated\"} 1",
        "tandem_requests_running 0",
    ] {
        assert!(metrics.body.lines().any(|l| l == line), "{line}: {}", metrics.body);
    }
}
