//! Log-probabilities, in both forms.

use serde_json::{Value, json};

use super::world::{World, text_of};

fn sum_of_exp(top: &[Value]) -> f64 {
    top.iter().map(|t| t["logprob"].as_f64().unwrap().exp()).sum()
}

fn joined(entries: &[Value]) -> String {
    let bytes = entries.iter().flat_map(|e| e["bytes"].as_array().unwrap());
    String::from_utf8(bytes.map(|b| b.as_u64().unwrap() as u8).collect()).unwrap()
}

#[test]
fn tokens_with_log_probabilities_are_the_text() {
    let served = World::default().serve();
    for (stop, ends) in [(json!(null), "length"), (json!("1"), "stop")] {
        let body = json!({
            "messages": [{ "role": "user", "content": "Hello" }], "max_tokens": 40, "seed": 11,
            "logprobs": true, "top_logprobs": 20, "stop": stop,
        });
        let whole = served.caller().chat(&body).ok();
        let choice = &whole["choices"][0];
        assert_eq!(choice["finish_reason"], ends);
        let entries = choice["logprobs"]["content"].as_array().unwrap();
        let text = choice["message"]["content"].as_str().unwrap();
        // The token in which the stop string begins has more than the text.
        assert!(joined(entries).starts_with(text), "{} is not {text}", joined(entries));
        let (_, others) = entries.split_last().unwrap();
        assert!(text.starts_with(&joined(others)));
        for entry in entries {
            let top = entry["top_logprobs"].as_array().unwrap();
            let own = entry["logprob"].as_f64().unwrap();
            let each: Vec<f64> = top.iter().map(|t| t["logprob"].as_f64().unwrap()).collect();
            assert_eq!(each.len(), 20);
            assert!(each.is_sorted_by(|a, b| a >= b) && own <= each[0] + 1e-6 && own < 0.0);
            // Of the 512 tokens of flat random weights, the likeliest 20 have at least their share and not all.
            let sum = sum_of_exp(top);
            assert!(sum > 20.0 / 512.0 && sum < 1.0, "{sum}");
            if let Some(same) = top.iter().find(|t| t["token"] == entry["token"]) {
                assert!((same["logprob"].as_f64().unwrap() - own).abs() < 1e-5);
            }
        }
        let mut streamed = body;
        streamed["stream"] = true.into();
        let events = served.stream("/v1/chat/completions", &streamed).all();
        let parts = events.iter().filter_map(|e| e["choices"][0]["logprobs"]["content"].as_array());
        let all: Vec<Value> = parts.flatten().cloned().collect();
        assert_eq!(all, *entries);
        assert_eq!(text_of(&events, 0), text);
    }
}

#[test]
fn legacy_lists_are_parallel() {
    let served = World::default().serve();
    let body = json!({ "prompt": "ab", "max_tokens": 5, "temperature": 0, "logprobs": 3 });
    let answer = served.caller().complete(&body).ok();
    let choice = &answer["choices"][0];
    let list = |name: &str| choice["logprobs"][name].as_array().unwrap().clone();
    let tokens = list("tokens");
    let text: String = tokens.iter().map(|t| t.as_str().unwrap()).collect();
    assert_eq!(choice["text"], text);
    let mut offset = 0;
    for (i, token) in tokens.iter().enumerate() {
        let token = token.as_str().unwrap();
        assert_eq!(list("text_offset")[i], offset);
        offset += token.len();
        let top = list("top_logprobs")[i].as_object().unwrap().clone();
        let own = list("token_logprobs")[i].as_f64().unwrap();
        assert_eq!(top.len(), 3);
        // What is chosen greedily is the likeliest, to the bit: readers compare the numbers.
        assert_eq!(top[token].as_f64(), Some(own));
        assert!(top.values().all(|p| p.as_f64().unwrap() <= own));
    }
    assert_eq!(tokens.len(), 5);
    let none = served.caller().complete(&json!({ "prompt": "ab", "max_tokens": 5 })).ok();
    assert_eq!(none["choices"][0]["logprobs"], Value::Null);
}
