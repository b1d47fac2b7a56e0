//! `tandem generate --prompts`: a request a line in, a result a line out, each as if it had been the only one.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::{Value, json};
use tandem::model::{export_hf_folder, load};
use tandem::tensor::DType;

use crate::support::command::{assert_error, json as parsed, run, stderr, stdout, tandem};
use crate::support::models::smollm2;

/// A folder of random weights with a tokenizer of letters and a chat template.
fn model(home: &Path) -> PathBuf {
    let folder = home.join("model");
    let loaded = load("synth:tiny-llama,dtype=f32,seed=3").unwrap();
    export_hf_folder(&loaded, &folder, DType::F32, 1).unwrap();
    let letter = |i: usize| char::from(b'a' + (i % 26) as u8);
    let name = |i: usize| match i {
        0..26 => letter(i).to_string(),
        _ => format!("{}{}{}", letter(i), letter(i / 26), letter(i / 676)),
    };
    let vocab: serde_json::Map<String, Value> = (0..loaded.spec.vocab).map(|i| (name(i), json!(i))).collect();
    let tokenizer = json!({"version": "1.0", "added_tokens": [],
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "a"}});
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let template = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m.role }}{{ m.content }}{% endfor %}";
    let config = json!({ "chat_template": template });
    std::fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
    folder
}

fn write(home: &Path, lines: &[Value]) -> PathBuf {
    let path = home.join("prompts.jsonl");
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    std::fs::write(&path, text).unwrap();
    path
}

/// One prompt by itself.
fn alone(home: &Path, model: &Path, args: &[&str]) -> Value {
    let mut command = tandem(home);
    command.args(["generate", "--json", "--deterministic", "-m"]).arg(model).args(args);
    parsed(&run(&mut command))
}

fn many(home: &Path, model: &Path, file: &Path, args: &[&str]) -> (Vec<Value>, std::process::Output) {
    let mut command = tandem(home);
    command.args(["generate", "--deterministic", "-m"]).arg(model).arg("--prompts").arg(file).args(args);
    let output = run(&mut command);
    let lines = stdout(&output);
    (lines.lines().map(|line| serde_json::from_str(line).expect("an object a line")).collect(), output)
}

/// What does not depend on time.
fn timeless(mut result: Value) -> Value {
    for timing in ["ttft_ms", "total_ms"] {
        assert!(result["timings"][timing].as_f64().unwrap() > 0.0, "{result}");
    }
    result.as_object_mut().unwrap().remove("timings");
    result
}

/// A prompt's tokens have the log-probabilities that they had as an answer.
#[test]
fn prompts_are_scored_as_answers_are() {
    let home = tempfile::tempdir().unwrap();
    let (home, model) = (home.path(), model(home.path()));
    let prompt: Vec<u32> = (0..70).map(|i| i * 5 % 400).collect();
    let file =
        write(home, &[json!({"prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": true})]);
    let (answers, _) = many(home, &model, &file, &["--logprobs", "3"]);
    let tokens: Vec<u32> = serde_json::from_value(answers[0]["tokens"].clone()).unwrap();
    let whole = [prompt.clone(), tokens].concat();
    let lines = [
        json!({"prompt": whole, "max_tokens": 0, "prompt_logprobs": 3}),
        json!({"prompt": whole, "max_tokens": 0}),
        json!({"prompt": whole, "max_tokens": 2, "prompt_logprobs": 0}),
        json!({"prompt": [7], "max_tokens": 0, "prompt_logprobs": 1}),
    ];
    let (scored, _) = many(home, &model, &write(home, &lines), &[]);
    let scores = scored[0]["prompt_logprobs"].as_array().unwrap();
    assert_eq!((scores.len(), &scores[0]), (whole.len(), &Value::Null));
    assert_eq!(scores[prompt.len()..], *answers[0]["logprobs"].as_array().unwrap());
    assert!((1..whole.len()).all(|i| scores[i]["id"] == whole[i]));
    assert_eq!(scored[1].get("prompt_logprobs"), None);
    let bare = scored[2]["prompt_logprobs"].as_array().unwrap();
    assert!(
        (1..whole.len()).all(|i| bare[i]["logprob"] == scores[i]["logprob"] && bare[i]["top"] == json!([]))
    );
    assert_eq!(scored[2]["completion_tokens"], 2);
    assert_eq!(scored[3]["prompt_logprobs"], json!([null]));
}

/// A line's targets replace the flags', one by one.
#[test]
fn a_result_says_whether_it_was_within_its_targets() {
    let home = tempfile::tempdir().unwrap();
    let (home, model) = (home.path(), model(home.path()));
    let line = |more: Value| {
        let mut line = json!({"prompt": "a", "max_tokens": 3, "ignore_eos": true});
        line.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        line
    };
    let lines = [
        line(json!({})),
        line(json!({"ttft_target": 1e6})),
        line(json!({"tpot_target": 1e-12})),
        line(json!({"ttft_target": 1e6, "tpot_target": 1e-12})),
    ];
    let file = write(home, &lines);
    let within = |args: &[&str]| -> Vec<Option<bool>> {
        let results = many(home, &model, &file, args).0;
        results.iter().map(|r| r["timings"]["within_targets"].as_bool()).collect()
    };
    assert_eq!(within(&[]), [None, Some(true), Some(false), Some(false)]);
    assert_eq!(within(&["--ttft-target", "1e-12"]), [Some(false), Some(true), Some(false), Some(false)]);
}

#[test]
fn each_answer_is_that_of_running_alone() {
    let home = tempfile::tempdir().unwrap();
    let (home, model) = (home.path(), model(home.path()));
    let first = alone(home, &model, &["-n", "30", "hello"]);
    let text = first["text"].as_str().unwrap();
    // Ends inside of a token, and begins in another one.
    let stop = &text[10..16];
    let long = "abcdefghij".repeat(20);
    let asked: Vec<(Value, Vec<&str>)> = vec![
        (json!({"id": "plain", "prompt": "hello", "max_tokens": 30}), vec!["-n", "30", "hello"]),
        (
            json!({"id": 7, "prompt": "hello", "max_tokens": 30, "stop": [stop, "nowhere"]}),
            vec!["-n", "30", "--stop", stop, "--stop", "nowhere", "hello"],
        ),
        (
            json!({"prompt": "world", "max_tokens": 25, "temperature": 1.2, "seed": 9, "top_p": 0.9}),
            vec!["-n", "25", "--temp", "1.2", "--seed", "9", "--top-p", "0.9", "world"],
        ),
        (json!({"prompt": long, "max_tokens": 3}), vec!["-n", "3", &long]),
        (json!({"prompt": "hello", "raw": true}), vec!["-n", "12", "--raw", "hello"]),
        (
            json!({"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}], "max_tokens": 1}),
            vec!["-n", "1", "--system", "be", "hi"],
        ),
        (
            json!({"custom_id": "c", "method": "POST", "url": "/v1/completions",
                "body": {"model": "any", "prompt": "xyz", "max_tokens": 18, "repetition_penalty": 1.5, "temperature": 0.8, "top_k": 9, "seed": 4}}),
            vec![
                "-n",
                "18",
                "--raw",
                "--repeat-penalty",
                "1.5",
                "--temp",
                "0.8",
                "--top-k",
                "9",
                "--seed",
                "4",
                "--repeat-last-n",
                "-1",
                "xyz",
            ],
        ),
    ];
    let lines: Vec<Value> = asked.iter().map(|(line, _)| line.clone()).collect();
    let file = write(home, &lines);
    let want: Vec<Value> = asked.iter().map(|(_, args)| alone(home, &model, args)).collect();
    assert_eq!(want[1]["finish_reason"], "stop");
    for extra in
        [&["-n", "12"][..], &["-n", "12", "--parallel", "1"], &["-n", "12", "--parallel", "3", "-t", "2"]]
    {
        let (got, output) = many(home, &model, &file, extra);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert_eq!(got.len(), want.len());
        for (i, (got, want)) in got.into_iter().zip(&want).enumerate() {
            let got = timeless(got);
            assert_eq!(got["index"], i);
            for name in ["text", "tokens", "finish_reason", "prompt_tokens"] {
                assert_eq!(got[name], want[name], "{name} of {got} {extra:?}");
            }
            assert_eq!(got["completion_tokens"], want["tokens"].as_array().unwrap().len());
            let id = lines[i].get("id").or(lines[i].get("custom_id"));
            assert_eq!(got.get("id"), id);
        }
        let said = stderr(&output);
        assert!(said.contains("7 requests, ") && said.contains(" tok/s)"), "{said}");
    }
}

#[test]
fn results_come_in_order_or_as_they_are_completed_to_the_screen_or_to_a_file() {
    let home = tempfile::tempdir().unwrap();
    let (home, model) = (home.path(), model(home.path()));
    let lengths = [40, 2, 20, 1, 9, 30];
    let lines: Vec<Value> =
        lengths.iter().map(|n| json!({"prompt": "hello", "temperature": 0.7, "max_tokens": n})).collect();
    let file = write(home, &lines);
    let indices = |got: &[Value]| got.iter().map(|r| r["index"].as_u64().unwrap()).collect::<Vec<_>>();
    let (in_order, _) = many(home, &model, &file, &[]);
    assert_eq!(indices(&in_order), [0, 1, 2, 3, 4, 5]);
    let (completed, _) = many(home, &model, &file, &["--as-completed"]);
    assert_eq!(indices(&completed), [3, 1, 4, 2, 5, 0]);
    let sorted = |mut all: Vec<Value>| {
        all.sort_by_key(|r| r["index"].as_u64());
        all.into_iter().map(timeless).collect::<Vec<_>>()
    };
    assert_eq!(sorted(completed), sorted(in_order.clone()));

    let out = home.join("out.jsonl");
    std::fs::write(&out, "before").unwrap();
    let (nothing, output) = many(home, &model, &file, &["-o", out.to_str().unwrap()]);
    assert_eq!((nothing.len(), output.status.code()), (0, Some(0)));
    let text = std::fs::read_to_string(&out).unwrap();
    let got = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(sorted(got), sorted(in_order));

    // From standard input, with a byte order mark, blank lines and the line ends of others.
    let mut command = tandem(home);
    command.args(["generate", "--prompts", "-", "-q", "-n", "2", "-m"]).arg(&model);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let text = "\u{feff}{\"prompt\": \"a\"}\r\n\r\n  {\"prompt\": \"b\"}";
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), text.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((stdout(&output).lines().count(), stderr(&output).as_str()), (2, ""));
}

#[test]
fn a_line_that_is_no_request_stops_the_command_or_is_an_error_in_its_place() {
    let home = tempfile::tempdir().unwrap();
    let (home, model) = (home.path(), model(home.path()));
    let path = home.join("bad.jsonl");
    let text = "{\"prompt\":\"a\",\"max_tokens\":2}\n\n{\"prompt\":\"b\",\"temprature\":1}\nnot json\n{\"prompt\":\"c\",\"max_tokens\":2}\n";
    std::fs::write(&path, text).unwrap();
    let out = home.join("out.jsonl");
    let (_, output) = many(home, &model, &path, &["-o", out.to_str().unwrap()]);
    assert_error(&output, 1, "bad.jsonl: line 3: unknown field \"temprature\"");
    assert!(stderr(&output).contains("one more line is bad"), "{}", stderr(&output));
    assert!(!out.exists());

    let (got, output) = many(home, &model, &path, &["--keep-going"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("2 of 4 requests failed; the first is line 3 of"),
        "{}",
        stderr(&output)
    );
    let answered: Vec<bool> = got.iter().map(|r| r["text"].is_string()).collect();
    assert_eq!(answered, [true, false, false, true]);
    assert_eq!((&got[1]["index"], &got[2]["error"]["line"]), (&json!(1), &json!(4)));
    assert!(got[2]["error"]["message"].as_str().unwrap().contains("not a JSON object"));
}

#[test]
fn a_thousand_at_once_are_answered_and_the_bad_ones_among_them_are_not() {
    let home = tempfile::tempdir().unwrap();
    let (home, model) = (home.path(), model(home.path()));
    let line = |i: usize| match i % 100 {
        7 => json!({"id": i, "prompt": ""}),
        8 => json!({"id": i, "prompt": "a".repeat(50), "max_tokens": 1}),
        _ => json!({"id": i, "prompt": [i % 50 + 1, i % 5], "max_tokens": 1 + i % 3}),
    };
    let file = write(home, &(0..1000).map(line).collect::<Vec<_>>());
    let (got, output) = many(home, &model, &file, &["--ctx", "40", "--keep-going"]);
    assert_eq!((got.len(), output.status.code()), (1000, Some(1)));
    assert!(stderr(&output).contains("20 of 1000 requests failed"), "{}", stderr(&output));
    for (i, result) in got.iter().enumerate() {
        let why = result["error"]["message"].as_str().unwrap_or_default();
        match i % 100 {
            7 => assert!(why.contains("it is empty"), "{i}: {result}"),
            8 => assert!(why.contains("more than --ctx of 40"), "{i}: {result}"),
            // Those with the same prompt have the same answer, as far as it goes.
            _ => {
                let of = |result: &Value| result["tokens"].as_array().expect("tokens").clone();
                let (own, twin) = (of(result), of(&got[(i + 100) % 1000]));
                let n = own.len().min(twin.len());
                assert!(n > 0 && own[..n] == twin[..n], "{i}: {own:?}, {twin:?}");
            }
        }
    }
}

/// Huge lines and binary ones: each is an error in its place; a file that is no text or never ends is one as a whole.
#[test]
fn a_huge_line_fails_alone_and_a_file_that_is_no_text_as_a_whole() {
    let home = tempfile::tempdir().unwrap();
    let (home, model) = (home.path(), model(home.path()));
    let path = home.join("odd.jsonl");
    let huge = format!("{{\"id\":\"huge\",\"prompt\":\"{}\"}}", "a".repeat(17 << 20));
    let deep = format!("{{\"prompt\":{}", "[".repeat(100_000));
    let long = format!("{{\"id\":\"long\",\"prompt\":\"{}\"}}", "a".repeat(1 << 20));
    let control = "\u{1}\u{2}\0\u{7f}";
    let text = format!(
        "{{\"prompt\":\"a\",\"max_tokens\":2}}\n{huge}\n{deep}\n{long}\n{control}\n{{\"prompt\":\"b\",\"max_tokens\":2}}\n"
    );
    std::fs::write(&path, text).unwrap();
    let (got, output) = many(home, &model, &path, &["--keep-going"]);
    let why: Vec<&str> = got.iter().map(|r| r["error"]["message"].as_str().unwrap_or_default()).collect();
    for (i, want) in [
        "",
        "bytes, at most 16777216",
        "recursion limit",
        "1048580 tokens, more than the model's context of 512",
        "not a JSON object",
        "",
    ]
    .iter()
    .enumerate()
    {
        assert!(why[i].contains(want) && why[i].is_empty() == want.is_empty(), "{i}: {}", why[i]);
        assert_eq!(got[i]["text"].is_string(), want.is_empty(), "{i}");
    }
    assert!(stderr(&output).contains("4 of 6 requests failed"), "{}", stderr(&output));
    for (bytes, want) in
        [(&b"{\"prompt\":\"\xff\"}\n"[..], "not UTF-8 text (byte 11)"), (b"\0\0\n", "line 1")]
    {
        std::fs::write(&path, bytes).unwrap();
        assert_error(&many(home, &model, &path, &[]).1, 1, want);
    }
    for file in ["/dev/zero", "/dev/full"] {
        let (_, output) = many(home, &model, Path::new(file), &["--keep-going"]);
        assert_error(&output, 1, "more than 268435456 bytes, too many for a text");
    }
}

#[test]
fn requests_that_cannot_be_served_fail_one_by_one() {
    let home = tempfile::tempdir().unwrap();
    let (home, model) = (home.path(), model(home.path()));
    let file = write(
        home,
        &[
            json!({"prompt": "a", "max_tokens": 3}),
            json!({"id": "long", "prompt": "a".repeat(60), "max_tokens": 3}),
            json!({"id": "tools", "messages": [{"role": "tool", "content": "x"}]}),
            json!({"id": "unknown", "prompt": [1_000_000]}),
            json!({"prompt": [1, 2, 3], "max_tokens": 3}),
            json!({"id": "runs out", "prompt": "b", "max_tokens": 500}),
        ],
    );
    let (got, output) = many(home, &model, &file, &["--ctx", "40"]);
    assert_eq!(output.status.code(), Some(1));
    let want = "3 of 6 requests failed; the first is line 2 of";
    assert!(stderr(&output).contains(want), "{}", stderr(&output));
    let why = |i: usize| got[i]["error"]["message"].as_str().unwrap_or_default();
    assert!(why(1).contains("64 tokens, more than --ctx of 40"), "{}", why(1));
    assert!(why(2).contains("no tools"), "{}", why(2));
    assert!(why(3).contains("1000000"), "{}", why(3));
    assert_eq!((&got[0]["finish_reason"], &got[4]["prompt_tokens"]), (&json!("length"), &json!(3)));
    // As far as the context goes, as alone.
    let alone = alone(home, &model, &["--ctx", "40", "-n", "500", "b"]);
    assert_eq!(got[5]["tokens"], alone["tokens"]);
    // Not one that can be served: no engine is needed to say so.
    let file = write(home, &[json!({"prompt": "a".repeat(60)})]);
    let (got, output) = many(home, &model, &file, &["--ctx", "40"]);
    assert_eq!((got.len(), output.status.code()), (1, Some(1)));
}

#[test]
fn what_makes_no_sense_is_refused_in_a_sentence() {
    let home = tempfile::tempdir().unwrap();
    let file = write(home.path(), &[json!({"prompt": "a"})]);
    let file = file.to_str().unwrap();
    let nowhere = home.path().join("no/such.jsonl");
    std::fs::write(home.path().join("empty.jsonl"), "\n \n").unwrap();
    let empty = home.path().join("empty.jsonl");
    for (args, code, want) in [
        (vec!["--prompts", file, "a prompt"], 2, "cannot be used with"),
        (vec!["--prompts", file, "--parallel", "0"], 2, "0 is not in 1..=4096"),
        (vec!["-o", "x", "a prompt"], 2, "--prompts"),
        (vec!["--as-completed", "a prompt"], 2, "--prompts"),
        (vec!["--prompts", file, "-o", nowhere.to_str().unwrap()], 1, "no/such.jsonl"),
        (vec!["--prompts", nowhere.to_str().unwrap()], 1, "no/such.jsonl"),
        (vec!["--prompts", empty.to_str().unwrap()], 1, "no prompts"),
    ] {
        let output = run(tandem(home.path()).args(["generate", "-m", "synth:tiny-llama"]).args(&args));
        assert_error(&output, code, want);
    }
}

#[test]
fn a_real_model_answers_as_it_does_alone() {
    let Some(model) = smollm2() else { return };
    let home = tempfile::tempdir().unwrap();
    let prompts =
        ["Why is the sky blue?", "Name three rivers.", "2 + 2 =", "Who wrote Hamlet?", "Say hello."];
    let lines: Vec<Value> =
        prompts.iter().map(|p| json!({"prompt": p, "max_tokens": 24, "stop": "Rayleigh"})).collect();
    let file = write(home.path(), &lines);
    let (got, output) = many(home.path(), &model, &file, &[]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    for (got, prompt) in got.iter().zip(prompts) {
        let want = alone(home.path(), &model, &["-n", "24", "--stop", "Rayleigh", prompt]);
        for name in ["text", "tokens", "finish_reason", "prompt_tokens"] {
            assert_eq!(got[name], want[name], "{name} of {prompt}");
        }
    }
}

#[test]
fn equal_lines_draw_different_samples_and_tell_their_seeds() {
    let home = tempfile::tempdir().unwrap();
    let (home, model) = (home.path(), model(home.path()));
    let mut lines = vec![json!({"prompt": "hello", "max_tokens": 12, "temperature": 1.5}); 4];
    lines.push(json!({"prompt": "hello", "max_tokens": 12, "temperature": 1.5, "seed": 5}));
    lines.push(json!({"prompt": "hello", "max_tokens": 0}));
    let file = write(home, &lines);
    let (first, _) = many(home, &model, &file, &["--parallel", "1"]);
    let tokens: std::collections::BTreeSet<_> = first[..5].iter().map(|r| r["tokens"].to_string()).collect();
    assert_eq!(tokens.len(), 5, "{first:?}");
    assert_eq!((&first[0]["seed"], &first[4]["seed"]), (&json!(0), &json!(5)));
    assert_eq!((&first[5]["tokens"], &first[5]["finish_reason"]), (&json!([]), &json!("length")));
    // The same in every company and order; each is what its seed gives alone.
    let (again, _) = many(home, &model, &file, &["--parallel", "4", "--as-completed"]);
    for result in &first[..5] {
        let same = again.iter().find(|r| r["index"] == result["index"]).unwrap();
        assert_eq!((&same["tokens"], &same["seed"]), (&result["tokens"], &result["seed"]));
        let seed = result["seed"].to_string();
        let one = alone(home, &model, &["-n", "12", "--temp", "1.5", "--seed", &seed, "hello"]);
        assert_eq!(one["tokens"], result["tokens"]);
    }
    let (other, _) = many(home, &model, &file, &["--seed", "random"]);
    assert!(other[..4].iter().zip(&first).all(|(a, b)| a["seed"] != b["seed"]));
}

/// `n` answers with successive seeds, each what it is alone; the best of several by the mean log-probability of their tokens.
#[test]
fn a_line_may_ask_for_several_answers_and_for_the_best() {
    let home = tempfile::tempdir().unwrap();
    let (home, model) = (home.path(), model(home.path()));
    let line = |more: Value| {
        let mut line = json!({"prompt": "hello", "max_tokens": 9, "temperature": 1.5, "seed": 5});
        line.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        line
    };
    let lines = [
        line(json!({"n": 4, "prompt_logprobs": 0})),
        line(json!({"n": 2, "best_of": 4})),
        line(json!({"best_of": 4})),
        line(json!({"n": 2, "max_tokens": 0})),
        line(json!({"n": 3, "prompt": [99999]})),
    ];
    let file = write(home, &lines);
    let (scored, output) = many(home, &model, &file, &["--logprobs", "0"]);
    assert_eq!(output.status.code(), Some(1));
    let all = scored[0]["choices"].as_array().unwrap();
    assert_eq!((all.len(), &scored[0]["prompt_logprobs"][0]), (4, &Value::Null));
    assert!(scored[0].get("text").is_none() && scored[0]["prompt_tokens"].is_u64());
    for (at, choice) in all.iter().enumerate() {
        assert_eq!(choice["seed"], 5 + at);
        let seed = (5 + at).to_string();
        let one = alone(home, &model, &["-n", "9", "--temp", "1.5", "--seed", &seed, "hello"]);
        assert_eq!(choice["tokens"], one["tokens"], "answer {at}");
    }
    let mean = |choice: &&Value| {
        let each = choice["logprobs"].as_array().unwrap().iter().map(|t| t["logprob"].as_f64().unwrap());
        each.clone().sum::<f64>() / each.count() as f64
    };
    let mut best: Vec<&Value> = all.iter().collect();
    best.sort_by(|a, b| mean(b).total_cmp(&mean(a)));
    // The same without log-probabilities that are told, whatever runs beside.
    let (plain, _) = many(home, &model, &file, &["--parallel", "2", "--keep-going"]);
    for told in [&scored, &plain] {
        let seeds = |of: &Value| of.as_array().unwrap().iter().map(|c| c["seed"].clone()).collect::<Vec<_>>();
        assert_eq!(seeds(&told[1]["choices"]), [best[0]["seed"].clone(), best[1]["seed"].clone()]);
        assert_eq!((&told[2]["seed"], &told[2]["tokens"]), (&best[0]["seed"], &best[0]["tokens"]));
        assert_eq!(told[3]["choices"][1]["completion_tokens"], 0);
        assert!(told[4]["error"]["message"].as_str().unwrap().contains("99999"), "{}", told[4]);
        assert_eq!(told.len(), 5);
    }
    assert!(plain[1]["choices"][0].get("logprobs").is_none());
    let (_, output) = many(home, &model, &write(home, &[line(json!({"n": 3, "best_of": 2}))]), &[]);
    assert_error(&output, 1, "best_of: 2, fewer than the n of 3");
}

#[test]
fn variables_reach_the_template() {
    let home = tempfile::tempdir().unwrap();
    let (home, model) = (home.path(), model(home.path()));
    let template = "{% if deep %}z{% endif %}{{ messages[-1].content }}";
    let config = json!({ "chat_template": template });
    std::fs::write(model.join("tokenizer_config.json"), config.to_string()).unwrap();
    let ids = |args: &[&str]| {
        let output = run(tandem(home).args(["tokenize", "--json", "--chat", "-m"]).arg(&model).args(args));
        parsed(&output)["ids"].clone()
    };
    assert_eq!(ids(&["ab"]), json!([0, 1]));
    assert_eq!(ids(&["--template-arg", "deep=true", "ab"]), json!([25, 0, 1]));
    assert_eq!(ids(&["--template-arg", "deep=false", "ab"]), json!([0, 1]));
    assert_eq!(ids(&["--chat-template-kwargs", "{\"deep\": 1}", "ab"]), json!([25, 0, 1]));
    let messages = home.join("m.json");
    std::fs::write(
        &messages,
        json!([{"role": "user", "content": "ab"}, {"role": "x", "content": "c"}]).to_string(),
    )
    .unwrap();
    let output = run(tandem(home).args(["tokenize", "-m"]).arg(&model).arg("--messages").arg(&messages));
    assert_eq!(stdout(&output), "2\n");
    for (args, want) in [
        (&["--template-arg", "messages=[]", "--chat", "ab"][..], "comes from the request"),
        (&["--template-arg", "deep", "--chat", "ab"], "NAME=VALUE"),
        (&["--template-arg", "deep=1", "ab"], "add --chat"),
    ] {
        assert_error(&run(tandem(home).args(["tokenize", "-m"]).arg(&model).args(args)), 2, want);
    }
    let lines = [
        json!({"prompt": "ab", "max_tokens": 1}),
        json!({"prompt": "ab", "max_tokens": 1, "chat_template_kwargs": {"deep": true}}),
    ];
    let (got, _) = many(home, &model, &write(home, &lines), &[]);
    assert_eq!((&got[0]["prompt_tokens"], &got[1]["prompt_tokens"]), (&json!(2), &json!(3)));
    let (got, _) = many(home, &model, &write(home, &lines), &["--template-arg", "deep=1"]);
    assert_eq!(got[0]["prompt_tokens"], 3);
}

/// Windows are texts of their own: a long text is predicted as its parts are, each with the beginning in front.
#[test]
fn every_window_of_perplexity_begins_as_a_text_does() {
    let home = tempfile::tempdir().unwrap();
    let (home, model) = (home.path(), model(home.path()));
    let path = model.join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let special = json!({"z": {"id": "z", "ids": [25], "tokens": ["z"]}});
    tokenizer["post_processor"] = json!({"type": "TemplateProcessing", "special_tokens": special,
        "single": [{"SpecialToken": {"id": "z", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}]});
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    let text: String = (0..50).map(|i| char::from(b'a' + (i * i % 23) as u8)).collect();
    let file = home.join("text");
    let of = |text: &str| {
        std::fs::write(&file, text).unwrap();
        let mut command = tandem(home);
        command.args(["perplexity", "--json", "--deterministic", "-c", "16", "-m"]).arg(&model).arg(&file);
        parsed(&run(&mut command))
    };
    let whole = of(&text);
    assert_eq!(whole["tokens"], 50, "every token of the text, once");
    assert_eq!(whole["windows"], json!({"count": 4, "tokens": 16, "beginning": [25]}));
    let sum = |report: &Value| report["mean_nll"].as_f64().unwrap() * report["tokens"].as_f64().unwrap();
    let parts: f64 =
        text.as_bytes().chunks(15).map(|part| sum(&of(std::str::from_utf8(part).unwrap()))).sum();
    assert!((sum(&whole) / parts - 1.0).abs() < 1e-6, "{} and {parts}", sum(&whole));
}
