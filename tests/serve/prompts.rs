//! Prompts that come back with log-probabilities: `echo` with `logprobs`.

use serde_json::{Value, json};
use tandem::engine::{Engine, NewTokens, Options};
use tandem::model::{LoadedModel, load};
use tandem::program::Wants;
use tandem::simd::Isa;
use tandem::simd::linear::Mode;
use tandem::text::logprobs;

use super::world::{Served, World, text_of};

/// A prompt's log-probabilities by the library alone, and whether each token is the likeliest.
pub fn by_library(loaded: LoadedModel, ids: &[u32]) -> Vec<(f64, bool)> {
    let vocab = loaded.spec.vocab;
    let options = Options { mode: Mode::Deterministic, ..Options::new(Isa::selected().unwrap(), 256) };
    let mut engine = Engine::new(loaded.spec, &loaded.weights, &options, &|_| ()).unwrap();
    let seq = engine.add();
    let logits = engine.forward(&[NewTokens { id: seq, tokens: ids, wants: Wants::All }]).unwrap();
    let scored = |(row, &id): (&[f32], &u32)| {
        let (lse, top) = logprobs(row, 1);
        (f64::from(row[id as usize]) - lse, top[0].0 == id)
    };
    logits.chunks_exact(vocab).zip(&ids[1..]).map(scored).collect()
}

fn list<'a>(choice: &'a Value, name: &str) -> &'a [Value] {
    choice["logprobs"][name].as_array().unwrap_or_else(|| panic!("{name}: {choice}"))
}

/// What `lm-eval`'s `local-completions` makes of an answer (`parse_logprobs` of version 0.4.13): the sum over the tokens behind the
/// first `context` of the prompt, and whether each is the likeliest. The last entry is the token that had to be generated.
fn as_lm_eval(choice: &Value, context: usize) -> (f64, bool) {
    let ours = |name: &str| &list(choice, name)[context..list(choice, name).len() - 1];
    let own = ours("token_logprobs").iter().map(|p| p.as_f64().unwrap());
    let best = ours("top_logprobs").iter().map(|top| {
        let each = top.as_object().unwrap().values().map(|p| p.as_f64().unwrap());
        each.fold(f64::NEG_INFINITY, f64::max)
    });
    (own.clone().sum(), own.eq(best))
}

fn complete(served: &Served, body: &Value) -> Value {
    served.caller().complete(body).ok()
}

/// The request that `lm-eval` sends for a batch of texts with their contexts.
#[test]
fn likelihoods_of_lm_eval_are_those_of_the_library() {
    let served = World { prefixes: true, ..World::default() }.serve();
    let ids =
        |n: usize, salt: usize| -> Vec<u32> { (0..n).map(|i| ((i * i * 7 + salt) % 500) as u32).collect() };
    // The likeliest continuation, which is greedy.
    let begin = ids(40, 3);
    let answer = complete(&served, &json!({ "prompt": begin, "max_tokens": 5, "temperature": 0 }));
    let more =
        answer["choices"][0]["text"].as_str().unwrap().split_whitespace().map(|n| n.parse::<u32>().unwrap());
    let greedy = [begin.clone(), more.collect()].concat();
    let prompts = [ids(90, 1), greedy, ids(2, 9), ids(90, 1)];
    let contexts = [70, 40, 1, 1];
    let body = json!({
        "model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": true,
    });
    let whole = complete(&served, &body);
    assert_eq!(whole["choices"].as_array().unwrap().len(), prompts.len());
    for (i, (prompt, context)) in prompts.iter().zip(contexts).enumerate() {
        let choice = &whole["choices"][i];
        assert_eq!(choice["index"], i);
        let want = &by_library(load("synth:tiny-llama").unwrap(), prompt)[context - 1..];
        let sum: f64 = want.iter().map(|(p, _)| p).sum();
        assert_eq!(as_lm_eval(choice, context), (sum, want.iter().all(|(_, best)| *best)), "prompt {i}");
    }
    assert!(as_lm_eval(&whole["choices"][1], 40).1 && !as_lm_eval(&whole["choices"][0], 70).1);
    // Half of the first prompt was there: it was computed all the same.
    assert_eq!(whole["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    served.wait_until_free();
}

#[test]
fn the_lists_begin_with_the_prompt() {
    let served = World { spells: true, ..World::default() }.serve();
    let text = "a € <|end|>b";
    let body =
        json!({ "prompt": [text, "x"], "n": 2, "echo": true, "logprobs": 3, "max_tokens": 4, "seed": 5 });
    let whole = complete(&served, &body);
    let plain = complete(
        &served,
        &json!({ "prompt": [text, "x"], "n": 2, "logprobs": 3, "max_tokens": 4, "seed": 5 }),
    );
    for index in 0..4 {
        let (choice, own) = (&whole["choices"][index], &plain["choices"][index]);
        let (text, prompt) = if index < 2 { (text, 8) } else { ("x", 1) };
        assert_eq!(choice["text"], format!("{text}{}", own["text"].as_str().unwrap()));
        let n = list(choice, "tokens").len();
        for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            assert_eq!(list(choice, name).len(), n, "{name}");
        }
        // The answer's part is what it is without the prompt, but for where it is.
        for name in ["tokens", "token_logprobs", "top_logprobs"] {
            assert_eq!(list(choice, name)[prompt..], *list(own, name), "{name}");
        }
        let begin = text.chars().count() as u64;
        let moved: Vec<_> = list(own, "text_offset").iter().map(|at| at.as_u64().unwrap() + begin).collect();
        assert_eq!(list(choice, "text_offset")[prompt..], moved);
        // Nothing is known of the first token.
        assert_eq!(
            (&list(choice, "token_logprobs")[0], &list(choice, "top_logprobs")[0]),
            (&Value::Null, &Value::Null)
        );
        for i in 1..prompt {
            let top = list(choice, "top_logprobs")[i].as_object().unwrap();
            let token = list(choice, "tokens")[i].as_str().unwrap();
            // Several tokens without a character look the same: they are one entry, with the best of their numbers.
            assert!(!top.is_empty() && top.len() <= 4, "{top:?}");
            assert!(top[token].as_f64() >= list(choice, "token_logprobs")[i].as_f64());
            assert!(list(choice, "token_logprobs")[i].as_f64().unwrap() < 0.0);
        }
    }
    let first = &whole["choices"][0];
    assert_eq!(list(first, "tokens")[6..8], ["<|end|>", "b"]);
    assert_eq!(list(first, "text_offset")[..8], [0, 1, 2, 2, 2, 3, 4, 11]);
}

#[test]
fn a_stream_begins_with_the_scored_prompt() {
    let served = World::default().serve();
    let mut body =
        json!({ "prompt": [[7, 8, 9], [4]], "echo": true, "logprobs": 2, "max_tokens": 3, "temperature": 0 });
    let whole = complete(&served, &body);
    body["stream"] = true.into();
    let events = served.stream("/v1/completions", &body).all();
    for index in 0..2u64 {
        let want = &whole["choices"][index as usize];
        assert_eq!(text_of(&events, index), want["text"].as_str().unwrap());
        let choices = || {
            events.iter().flat_map(|e| e["choices"].as_array().unwrap()).filter(move |c| c["index"] == index)
        };
        for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            let parts = choices().filter(|c| c["logprobs"].is_object()).flat_map(|c| list(c, name));
            assert_eq!(parts.cloned().collect::<Vec<_>>(), list(want, name), "{name}");
        }
        let first = choices().next().unwrap();
        assert_eq!(first["text"], ["7 8 9 ", "4 "][index as usize]);
    }
}

#[test]
fn a_prompt_may_be_all() {
    let served = World::default().serve();
    for (prompt, n) in [(json!([7, 8, 9]), 3), (json!([4]), 1)] {
        let body = json!({ "prompt": prompt, "echo": true, "logprobs": 0, "max_tokens": 0 });
        let whole = complete(&served, &body);
        let choice = &whole["choices"][0];
        assert_eq!((list(choice, "tokens").len(), choice["finish_reason"].as_str()), (n, Some("length")));
        assert_eq!(whole["usage"]["completion_tokens"], 0);
        let rest = list(choice, "top_logprobs").iter().skip(1);
        assert!(rest.clone().all(|top| top.as_object().unwrap().len() == 1), "its own: {choice}");
    }
    // The context has no room for an answer.
    let body = json!({ "prompt": vec![3; 256], "echo": true, "logprobs": 0, "max_tokens": 0 });
    assert_eq!(list(&complete(&served, &body)["choices"][0], "tokens").len(), 256);
}

/// vLLM's `prompt_logprobs`, in both kinds of completions.
#[test]
fn prompt_logprobs_are_those_of_the_library_with_their_ranks() {
    let served = World { prefixes: true, ..World::default() }.serve();
    let ids: Vec<u32> = (0..70).map(|i| (i * i * 7 + 1) % 500).collect();
    let want = by_library(load("synth:tiny-llama").unwrap(), &ids);
    // Twice: pages that the first has left serve no scores.
    for k in [3, 0] {
        let body =
            json!({ "prompt": [ids, [5]], "max_tokens": 2, "temperature": 0, "prompt_logprobs": k, "n": 2 });
        let answer = complete(&served, &body);
        let choices = answer["choices"].as_array().unwrap();
        assert_eq!(choices.len(), 4);
        let all = choices[0]["prompt_logprobs"].as_array().unwrap();
        assert_eq!((all.len(), &all[0]), (ids.len(), &Value::Null));
        for ((entries, id), (logprob, is_best)) in all[1..].iter().zip(&ids[1..]).zip(&want) {
            let entries = entries.as_object().unwrap();
            let own = &entries[&id.to_string()];
            assert_eq!(own["logprob"].as_f64(), Some(*logprob));
            assert_eq!(own["decoded_token"], format!("{id} "));
            let rank = own["rank"].as_u64().unwrap();
            assert_eq!(rank == 1, *is_best);
            let mut ranks: Vec<u64> = entries.values().map(|e| e["rank"].as_u64().unwrap()).collect();
            ranks.sort_unstable();
            // The likeliest, and the token itself, once if it is one of them.
            let mut wanted: Vec<u64> = (1..=k).collect();
            wanted.extend((rank > k).then_some(rank));
            assert_eq!(ranks, wanted);
            let of = |rank: u64| entries.values().find(|e| e["rank"] == rank).unwrap()["logprob"].as_f64();
            assert!((1..k).all(|rank| of(rank) >= of(rank + 1)));
        }
        // All answers to a prompt have them; one token follows nothing.
        assert_eq!(choices[1]["prompt_logprobs"], choices[0]["prompt_logprobs"]);
        assert_eq!(choices[2]["prompt_logprobs"], json!([null]));
        // The legacy lists beside them have their own number of likely ones.
        let both =
            json!({ "prompt": ids, "max_tokens": 0, "prompt_logprobs": k, "echo": true, "logprobs": 1 });
        let both = &complete(&served, &both)["choices"][0];
        assert_eq!(both["prompt_logprobs"], choices[0]["prompt_logprobs"]);
        assert!(
            list(both, "top_logprobs")[1..]
                .iter()
                .all(|top| (1..=2).contains(&top.as_object().unwrap().len()))
        );
        assert_eq!(list(both, "token_logprobs")[1].as_f64(), Some(want[0].0));
    }
    let body =
        json!({ "messages": [{ "role": "user", "content": "abc" }], "max_tokens": 1, "prompt_logprobs": 1 });
    let chat = served.caller().chat(&body).ok();
    let n = chat["usage"]["prompt_tokens"].as_u64().unwrap() as usize;
    assert_eq!(chat["prompt_logprobs"].as_array().unwrap().len(), n);
    assert!(chat["choices"][0].get("prompt_logprobs").is_none());
    let without = served
        .caller()
        .chat(&json!({ "messages": [{ "role": "user", "content": "abc" }], "max_tokens": 1 }))
        .ok();
    assert!(without.get("prompt_logprobs").is_none());
}
