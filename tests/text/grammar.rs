//! Answers that are held to a form: which texts it allows, which schemas it refuses, and how long a mask takes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tandem::model::formats::gguf::Gguf;
use tandem::text::{
    CallFormat, Calls, Constraint, Content, Grammar, Grammars, Part, Reader, Shape, Texts, Thinking,
    Tokenizer, Tool, texts_of,
};

use crate::support::spelling::{self, END};

fn grammars() -> (Arc<Tokenizer>, Grammars) {
    let tokenizer = spelling::tokenizer();
    let grammars = Grammars::new(Some(tokenizer.clone()), 512);
    (tokenizer, grammars)
}

fn compile(shape: &Shape) -> (Arc<Tokenizer>, Constraint) {
    let (tokenizer, grammars) = grammars();
    let grammar = shape.grammar().unwrap();
    let constraint = grammars.compile(&grammar).unwrap_or_else(|e| panic!("{e}: {grammar:?}"));
    (tokenizer, constraint)
}

/// How much of a text is allowed: its bytes, and whether it is complete there, or may end there.
fn follow(tokenizer: &Tokenizer, constraint: &Constraint, text: &str) -> (usize, bool) {
    let mut guide = constraint.guide();
    let tokens = tokenizer.encode(text, false, true).unwrap();
    let mut bytes = 0;
    for &token in &tokens {
        if !guide.mask().unwrap().allows(token) {
            return (bytes, false);
        }
        bytes += tokenizer.token_bytes(token).len();
        if guide.take(token).unwrap() {
            return (bytes, true);
        }
    }
    (bytes, guide.mask().unwrap().allows(END))
}

#[track_caller]
fn allows(form: &(Arc<Tokenizer>, Constraint), text: &str) {
    assert_eq!(follow(&form.0, &form.1, text), (text.len(), true), "{text:?}");
}

/// Everything in front of `at` is allowed, and nothing more.
#[track_caller]
fn stops(form: &(Arc<Tokenizer>, Constraint), text: &str, at: &str) {
    let (bytes, over) = follow(&form.0, &form.1, text);
    assert_eq!((&text[..bytes], over), (at, false), "{text:?}");
}

fn person() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "maxLength": 20 },
            "age": { "type": "integer", "minimum": 0, "maximum": 150 },
            "home": { "$ref": "#/$defs/place" },
            "tags": { "type": "array", "items": { "enum": ["a", "b"] }, "maxItems": 3 },
        },
        "required": ["name", "age", "home"],
        "additionalProperties": false,
        "$defs": { "place": { "type": "object", "properties": { "city": { "type": "string" } },
                              "required": ["city"], "additionalProperties": false } },
    })
}

fn schema(of: Value) -> Shape {
    Shape { content: Content::Schema(of), ..Shape::default() }
}

#[test]
fn json_has_its_schema() {
    let form = compile(&schema(person()));
    allows(&form, r#"{"name": "Ada", "age": 36, "home": {"city": "Köln"}, "tags": ["a", "b"]}"#);
    allows(&form, "{\n  \"name\": \"\",\n  \"age\": 0,\n  \"home\": {\n    \"city\": \"\"\n  }\n}");
    stops(&form, "Sure! {", "");
    stops(&form, r#"{"name": "Ada", "age": 151"#, r#"{"name": "Ada", "age": 15"#);
    stops(&form, r#"{"name": "Ada", "home""#, r#"{"name": "Ada", ""#);
    stops(&form, "{\"name\": 7", "{\"name\": ");
    // Blank lines without end are no JSON of a model.
    let blank = format!("{{{}", "\n".repeat(100));
    stops(&form, &blank, &blank[..41]);
}

#[test]
fn any_object_is_json() {
    let form = compile(&schema(json!({ "type": "object" })));
    allows(&form, r#"{"a": [1, 2.5e3, null, {"b": "é\n\""}], "c": true}"#);
    allows(&form, "{}");
    stops(&form, "[1]", "");
}

fn calls(format: CallFormat, parallel: bool) -> Calls {
    let look = json!({ "type": "object", "properties": { "city": { "$ref": "#/$defs/city" } }, "required": ["city"],
                       "additionalProperties": false, "$defs": { "city": { "type": "string" } } });
    let tools = vec![
        Tool { name: "look".into(), parameters: look },
        Tool { name: "wait".into(), parameters: json!({ "properties": {}, "additionalProperties": false }) },
    ];
    Calls { format, tools, parallel }
}

const FORMATS: [CallFormat; 5] = [
    CallFormat::Hermes,
    CallFormat::Llama,
    CallFormat::Mistral,
    CallFormat::MistralArgs,
    CallFormat::Elements,
];

/// The first call of an answer, as models write it.
fn call(format: CallFormat, name: &str, arguments: &str) -> String {
    match format {
        CallFormat::Hermes => {
            format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>")
        }
        CallFormat::Llama => format!("{{\"name\": \"{name}\", \"parameters\": {arguments}}}"),
        CallFormat::Mistral => format!("[TOOL_CALLS][{{\"name\": \"{name}\", \"arguments\": {arguments}}}]"),
        CallFormat::MistralArgs => format!("[TOOL_CALLS]{name}[ARGS]{arguments}"),
        CallFormat::Elements => {
            let fields: Value = serde_json::from_str(arguments).unwrap();
            // What a reference names is JSON, and no text.
            let element =
                |(name, value): (&String, &Value)| format!("<parameter={name}>\n{value}\n</parameter>\n");
            let elements: String = fields.as_object().unwrap().iter().map(element).collect();
            format!("<tool_call>\n<function={name}>\n{elements}</function>\n</tool_call>")
        }
        CallFormat::Harmony => format!(" to=functions.{name}<|channel|>commentary<|message|>{arguments}"),
    }
}

/// Content, and calls with their arguments, of a text that is read.
fn read(format: CallFormat, text: &str) -> (String, Vec<(String, String)>) {
    let mut reader = Reader::new(Some(format), false, false);
    let mut parts = reader.push(text);
    parts.extend(reader.finish());
    let (mut content, mut calls) = (String::new(), Vec::new());
    for part in parts {
        match part {
            Part::Content(text) => content += &text,
            Part::Call(_, name) => calls.push((name, String::new())),
            Part::Arguments(index, text) => calls[index].1 += &text,
            Part::Reasoning(text) => panic!("{text}"),
        }
    }
    (content, calls)
}

#[test]
fn calls_that_a_grammar_allows_are_read() {
    for format in FORMATS {
        let wanted = compile(&Shape {
            content: Content::Nothing,
            calls: Some(calls(format, false)),
            ..Shape::default()
        });
        let free = compile(&Shape { calls: Some(calls(format, false)), ..Shape::default() });
        let arguments = "{\"city\": \"<b> [x] }\"}";
        let text = call(format, "look", arguments);
        for form in [&wanted, &free] {
            allows(form, &text);
            assert_eq!(read(format, &text), (String::new(), vec![("look".into(), arguments.into())]));
            // No other function, and no other arguments.
            let other = call(format, "book", "{}");
            assert!(!follow(&form.0, &form.1, &other).1, "{other}");
            let other = call(format, "look", "{\"town\": 1}");
            assert!(!follow(&form.0, &form.1, &other).1, "{other}");
            allows(form, &call(format, "wait", "{}"));
        }
        assert!(!follow(&wanted.0, &wanted.1, "Hello").1, "{format:?}");
        allows(&free, "Hello, x < y and [TOOL");
        assert_eq!(read(format, "Hello, x < y and [TOOL").0, "Hello, x < y and [TOOL");
    }
}

#[test]
fn calls_come_together_if_they_may() {
    for (format, text) in [
        (CallFormat::Hermes, format!("{}\n{}", call(CallFormat::Hermes, "wait", "{}"), call(CallFormat::Hermes, "look", "{\"city\": \"\"}"))),
        (CallFormat::Mistral, "[TOOL_CALLS][{\"name\": \"wait\", \"arguments\": {}}, {\"name\": \"look\", \"arguments\": {\"city\": \"\"}}]".into()),
        (CallFormat::MistralArgs, "[TOOL_CALLS]wait[ARGS]{}[TOOL_CALLS]look[ARGS]{\"city\": \"\"}".into()),
    ] {
        for content in [Content::Free, Content::Nothing] {
            let form = |parallel| compile(&Shape { content: content.clone(), calls: Some(calls(format, parallel)), ..Shape::default() });
            allows(&form(true), &text);
            assert_eq!(read(format, &text).1.len(), 2, "{text}");
            let (bytes, _) = follow(&form(false).0, &form(false).1, &text);
            assert!(bytes < text.len(), "{format:?}: one call only");
        }
    }
}

#[test]
fn text_may_precede_calls_but_not_hide_them() {
    for format in [CallFormat::Hermes, CallFormat::Mistral, CallFormat::MistralArgs] {
        let form = compile(&Shape { calls: Some(calls(format, true)), ..Shape::default() });
        allows(&form, &format!("I look.\n{}", call(format, "wait", "{}")));
        let marker = format.opening().unwrap();
        let text = format!("I look. {marker} something else");
        let (bytes, _) = follow(&form.0, &form.1, &text);
        assert!(bytes <= text.find("omething").unwrap(), "{format:?}: {bytes}");
    }
}

#[test]
fn reasoning_precedes_the_form() {
    let of = json!({ "type": "integer" });
    let form = compile(&Shape { thinking: Thinking::Possible, ..schema(of.clone()) });
    allows(&form, "<think>\n12? <b>\n</think>\n\n12");
    allows(&form, "12");
    stops(&form, "twelve", "");
    let form = compile(&Shape { thinking: Thinking::Begun, ..schema(of) });
    allows(&form, "12?</think>12");
    stops(&form, "12?</think>x", "12?</think>");
    let tools = Shape {
        thinking: Thinking::Possible,
        calls: Some(calls(CallFormat::Hermes, true)),
        ..Shape::default()
    };
    let form = compile(&tools);
    allows(&form, "<think>A <tool_call> is no call here.</think>\n\nYes.");
    let text = format!("<think>Hm.</think>\n{}", call(CallFormat::Hermes, "wait", "{}"));
    allows(&form, &text);
}

/// Schemas that cannot be enforced are refused with a reason, hostile ones soon; nothing panics.
#[test]
fn what_cannot_be_enforced_is_refused() {
    let (_, grammars) = grammars();
    let deep = |n| (0..n).fold(json!({ "type": "integer" }), |of, _| json!({ "type": "array", "items": of }));
    let wide: Value = (0..20_000)
        .map(|i| (format!("p{i}"), json!({ "type": "string" })))
        .collect::<serde_json::Map<_, _>>()
        .into();
    let parentheses = format!("{}a{}", "(".repeat(5000), ")".repeat(5000));
    for (of, why) in [
        (json!("x"), "a JSON schema is an object"),
        (json!(false), "no JSON"),
        (json!({ "type": "strin" }), "strin"),
        (json!({ "not": { "type": "string" } }), "not"),
        (json!({ "oneOf": [{ "type": "object" }, { "required": ["a"] }] }), "oneOf"),
        (json!({ "type": "array", "uniqueItems": true }), "uniqueItems"),
        (json!({ "$ref": "https://example.com/schema" }), "ref"),
        (json!({ "$ref": "#/$defs/none" }), ""),
        (json!({ "$ref": "#" }), ""),
        (json!({ "type": "string", "pattern": "(a" }), "unclosed"),
        (json!({ "type": "string", "pattern": "(?=a)b" }), "look-around"),
        (json!({ "type": "string", "pattern": parentheses }), ""),
        (json!({ "type": "string", "format": "no-such-format" }), "format"),
        (deep(100), "nested"),
        (json!({ "type": "object", "properties": wide }), "bytes"),
        // The compiler's own switch for leaving out what it cannot do is not the client's.
        (json!({ "x-guidance": { "lenient": true }, "type": "array", "uniqueItems": true }), "uniqueItems"),
    ] {
        let began = Instant::now();
        let shown: String = of.to_string().chars().take(80).collect();
        let refused = schema(of).grammar().and_then(|g| grammars.compile(&g).map(|_| ()));
        let error = refused.expect_err(&shown).to_string();
        assert!(error.contains(why), "{shown}: {error}");
        assert!(error.len() < 600 && !error.contains('\n'), "{shown}: {error}");
        assert!(began.elapsed() < Duration::from_secs(20), "{shown}: {:?}", began.elapsed());
    }
    assert!(grammars.compile(&Grammar::lark("start: nothing")).is_err());
    assert!(grammars.compile(&Grammar::lark("(".repeat(100_000))).is_err());
    assert!(Grammars::new(None, 512).compile(&schema(json!({})).grammar().unwrap()).is_err());
    // What is allowed to nest may.
    grammars.compile(&schema(deep(25)).grammar().unwrap()).unwrap();
}

/// What one answer takes, no other loses.
#[test]
fn guides_of_one_constraint_are_apart() {
    let (_, constraint) = compile(&schema(json!({ "enum": ["ab", "cd"] })));
    let mut guides = [constraint.guide(), constraint.guide()];
    for (guide, text) in guides.iter_mut().zip(["\"ab\"", "\"cd\""]) {
        for (i, byte) in text.bytes().enumerate() {
            assert!(guide.mask().unwrap().allows(u32::from(byte)), "{text} at {i}");
            assert_eq!(guide.take(u32::from(byte)).unwrap(), i == 3);
        }
    }
    assert!(constraint.guide().take(u32::from(b'x')).is_err(), "a token that is not allowed");
}

#[test]
fn masks_exclude_tokens_from_logits() {
    let (_, constraint) = compile(&schema(json!({ "enum": ["ab", "cd"] })));
    let mut logits = vec![1.0f32; 512];
    constraint.first().apply(&mut logits);
    let left: Vec<usize> = (0..512).filter(|&i| logits[i] == 1.0).collect();
    assert_eq!(left, [usize::from(b'"')]);
}

/// SmolLM2's tokenizer, where the model is: in `TANDEM_TEST_MODELS`, `models/` or the cache.
fn smollm2() -> Option<Arc<Tokenizer>> {
    let name = "SmolLM2-135M-Instruct.Q4_1.gguf";
    let folder = std::env::var_os("TANDEM_TEST_MODELS");
    let folder = folder.map_or(Path::new(env!("CARGO_MANIFEST_DIR")).join("models"), PathBuf::from);
    let path = folder.join(name);
    if !path.is_file() {
        println!("skipped: no {name} in {}", folder.display());
        return None;
    }
    let gguf = Gguf::open(&path).unwrap();
    Some(Arc::new(Tokenizer::from_gguf(&gguf.metadata).unwrap()))
}

/// Time that this thread has had on a core, which other processes do not lengthen.
fn on_cpu() -> Option<Duration> {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    Some(Duration::from_nanos(stat.split(' ').next()?.parse().ok()?))
}

/// Prints the times of masks over a vocabulary of 49 152 tokens, along an answer to a schema with nesting:
/// `cargo test --release --test text masks_are_quick -- --nocapture`.
#[test]
fn masks_are_quick() {
    let Some(tokenizer) = smollm2() else { return };
    let began = Instant::now();
    let grammars = Grammars::new(Some(tokenizer.clone()), tokenizer.vocab_size());
    let order = json!({
        "type": "object",
        "properties": {
            "id": { "type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$" },
            "customer": person(),
            "items": { "type": "array", "minItems": 1, "items": {
                "type": "object",
                "properties": { "what": { "type": "string" }, "price": { "type": "number" },
                                "options": { "type": "array", "items": { "anyOf": [{ "type": "string" }, { "type": "null" }] } } },
                "required": ["what", "price"], "additionalProperties": false } },
            "note": { "type": ["string", "null"] },
        },
        "required": ["id", "customer", "items", "note"],
        "additionalProperties": false,
        "$defs": person()["$defs"],
    });
    let grammar = schema(order).grammar().unwrap();
    grammars.compile(&grammar).unwrap();
    let first = began.elapsed();
    let began = Instant::now();
    let constraint = grammars.compile(&grammar).unwrap();
    let again = began.elapsed();
    let text = r#"{"id": "ABC-1234", "customer": {"name": "Ada Lovelace", "age": 36, "home": {"city": "London"}, "tags": ["a"]},
 "items": [{"what": "A treatise on the analytical engine, with notes by the translator", "price": 12.50, "options": ["bound in leather", null]},
 {"what": "ink", "price": 3}], "note": "Please deliver it to the back door; the dog is friendly, but he barks."}"#;
    let tokens = tokenizer.encode(text, false, false).unwrap();
    let (mut times, mut guides) = (Vec::new(), Vec::new());
    let before = on_cpu();
    for _ in 0..20 {
        let began = Instant::now();
        let mut guide = constraint.guide();
        guides.push(began.elapsed());
        for (i, &token) in tokens.iter().enumerate() {
            let began = Instant::now();
            let mask = guide.mask().unwrap();
            times.push(began.elapsed());
            assert!(mask.allows(token), "token {i} of {text}");
            assert_eq!(guide.take(token).unwrap(), i + 1 == tokens.len());
        }
    }
    let cpu = on_cpu().zip(before).map(|(after, before)| (after - before) / times.len() as u32);
    times.sort_unstable();
    let mean = times.iter().sum::<Duration>() / times.len() as u32;
    let (p50, p99) = (times[times.len() / 2], times[times.len() * 99 / 100]);
    let guide = guides.iter().sum::<Duration>() / guides.len() as u32;
    let most = times[times.len() - 1];
    println!(
        "{} masks over {} tokens: mean {mean:?}, median {p50:?}, p99 {p99:?}, most {most:?}",
        times.len(),
        tokenizer.vocab_size()
    );
    println!(
        "on a core, with taking the token: mean {cpu:?}; a guide takes {guide:?}, compiling {again:?}, the first time {first:?}"
    );
    if !cfg!(debug_assertions) {
        assert!(
            mean < Duration::from_micros(500),
            "ten times what is wanted of the mean, on a machine that others use: {mean:?}"
        );
    }
}

/// Arguments as elements: texts are not quoted, and everything else is JSON.
#[test]
fn elements_have_the_schemas_of_their_parameters() {
    let parameters = json!({
        "type": "object",
        "properties": {
            "city": { "type": "string", "maxLength": 12 },
            "unit": { "enum": ["C", "F"] },
            "days": { "type": "integer", "minimum": 1, "maximum": 9 },
            "at": { "$ref": "#/$defs/place" },
        },
        "required": ["city", "days"],
        "additionalProperties": false,
        "$defs": { "place": { "type": "object", "properties": { "x": { "type": "number" } }, "required": ["x"],
                              "additionalProperties": false } },
    });
    let tools = vec![Tool { name: "look".into(), parameters: parameters.clone() }];
    let calls = |tools| Calls { format: CallFormat::Elements, tools, parallel: true };
    let form = compile(&Shape { content: Content::Nothing, calls: Some(calls(tools)), ..Shape::default() });
    let texts: Texts = Arc::new([("look".to_owned(), texts_of(&parameters))]);
    let head = "<tool_call>\n<function=look>\n<parameter=city>\n";
    let tail = "</function>\n</tool_call>";
    for (text, arguments) in [
        (
            "\"Köln\"\n</parameter>\n<parameter=days>\n3\n</parameter>\n",
            json!({ "city": "\"Köln\"", "days": 3 }),
        ),
        (
            "3\n</parameter>\n<parameter=unit>\nC\n</parameter>\n<parameter=days>3</parameter><parameter=at>\n{\"x\": 1.5}\n</parameter>\n",
            json!({ "city": "3", "unit": "C", "days": 3, "at": { "x": 1.5 } }),
        ),
        ("a\n<b>\n</parameter><parameter=days>\n9\n</parameter>", json!({ "city": "a\n<b>", "days": 9 })),
    ] {
        let text = format!("{head}{text}{tail}");
        allows(&form, &text);
        let mut reader = Reader::new(Some(CallFormat::Elements), false, false).with_texts(texts.clone());
        let mut parts: Vec<Part> = text.chars().flat_map(|c| reader.push(&c.to_string())).collect();
        parts.extend(reader.finish());
        let read: String = parts
            .iter()
            .filter_map(|p| if let Part::Arguments(0, text) = p { Some(text.as_str()) } else { None })
            .collect();
        assert_eq!(serde_json::from_str::<Value>(&read).unwrap_or_else(|e| panic!("{e}: {read}")), arguments);
        assert_eq!(parts[0], Part::Call(0, "look".into()));
    }
    for text in [
        "thirteen characters",
        "a\n</parameter>\n<parameter=unit>\nK",
        "a\n</parameter>\n</function>",
        "a\n</parameter>\n<parameter=days>\n12",
    ] {
        let text = format!("{head}{text}");
        assert!(follow(&form.0, &form.1, &text).0 < text.len(), "{text}");
    }
    for (own, why) in [
        (json!({ "type": "string", "pattern": "^a" }), "pattern"),
        (json!({ "type": "string", "format": "date" }), "format"),
        (json!({ "type": "array", "uniqueItems": true }), "uniqueItems"),
    ] {
        let parameters = json!({ "properties": { "a": own } });
        let tools = vec![Tool { name: "f".into(), parameters }];
        let shape = Shape { calls: Some(calls(tools)), ..Shape::default() };
        let refused = shape.grammar().and_then(|g| grammars().1.compile(&g).map(|_| ()));
        assert!(refused.expect_err(why).to_string().contains(why));
    }
    let whole = json!({ "oneOf": [{ "required": ["a"] }], "properties": { "a": {} } });
    let tools = vec![Tool { name: "f".into(), parameters: whole }];
    let refused =
        Shape { calls: Some(calls(tools)), ..Shape::default() }.grammar().expect_err("oneOf").to_string();
    assert!(refused.contains("oneOf"), "{refused}");
}
