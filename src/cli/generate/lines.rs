//! A file of prompts with one request per line, as a JSON object. Fields are named as in OpenAI's and vLLM's batch
//! files.

use serde_json::{Map, Value};
use tandem::model::{MIN_P_RANGE, REPEAT_PENALTY_RANGE, TEMPERATURE_RANGE, TOP_P_RANGE};
use tandem::text::Message;

use crate::cli::sampling::SamplingArgs;

/// Most bytes of a line, far more than a request of any context needs.
const LONGEST: usize = 16 << 20;

/// The text to continue or answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Ask {
    /// A text: answered with the chat template, or continued if raw.
    Text(String),
    /// Tokens to continue.
    Tokens(Vec<u32>),
    /// A conversation to answer.
    Messages(Vec<Message>),
}

/// The request of a line. The command line decides what it leaves open.
#[derive(Debug, Clone)]
pub struct Line {
    /// In the file, from 1.
    pub number: usize,
    /// The user's id for it: a string or a number.
    pub id: Option<Value>,
    /// The text to continue or answer.
    pub ask: Ask,
    /// Whether a text is continued without the chat template.
    pub raw: Option<bool>,
    /// Most tokens to generate.
    pub max_tokens: Option<usize>,
    /// Its own settings, which override those of the command line.
    pub sampling: SamplingArgs,
    /// Texts that end the answer, instead of the command line's.
    pub stop: Option<Vec<String>>,
}

/// A line that is no request: its number, its id if readable, and the reason.
#[derive(Debug, Clone, PartialEq)]
pub struct Bad {
    /// In the file, from 1.
    pub number: usize,
    /// The user's id for it.
    pub id: Option<Value>,
    /// The reason.
    pub why: String,
}

/// Parses every line of `text` that is not blank.
pub fn parse(text: &str, base: &SamplingArgs) -> Vec<Result<Line, Bad>> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let lines = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty());
    lines.map(|(number, line)| parse_line(number, line, base)).collect()
}

fn parse_line(number: usize, line: &str, base: &SamplingArgs) -> Result<Line, Bad> {
    let bad = |id: Option<Value>, why: String| Bad { number, id, why };
    if line.len() > LONGEST {
        return Err(bad(None, format!("{} bytes, at most {LONGEST} are wanted", line.len())));
    }
    let value: Value = serde_json::from_str(line).map_err(|e| bad(None, not_json(line, &e)))?;
    let Value::Object(mut object) = value else {
        return Err(bad(None, format!("{} where a JSON object is wanted", kind(&value))));
    };
    object.retain(|_, value| !value.is_null());
    let id = object.remove("custom_id").or_else(|| object.remove("id"));
    let id = match id {
        Some(id @ (Value::String(_) | Value::Number(_))) => Some(id),
        None => None,
        Some(other) => return Err(bad(None, format!("id: {} where a string is wanted", kind(&other)))),
    };
    request(number, id.clone(), object, base).map_err(|why| bad(id, why))
}

/// `{"custom_id", "method", "url", "body"}` of a batch file, or the body alone.
fn request(
    number: usize,
    id: Option<Value>,
    mut object: Map<String, Value>,
    base: &SamplingArgs,
) -> Result<Line, String> {
    let mut raw = None;
    if let Some(body) = object.remove("body") {
        if let Some(method) = object.remove("method").filter(|m| m != "POST") {
            return Err(format!("method: {method}, \"POST\" is wanted"));
        }
        let url = object.remove("url");
        raw = match url.as_ref().and_then(Value::as_str) {
            None | Some("/v1/chat/completions") => None,
            Some("/v1/completions") => Some(true),
            Some(_) => {
                let url = url.unwrap_or_default();
                return Err(format!("url: {url}; /v1/chat/completions and /v1/completions are known"));
            }
        };
        if let Some(name) = object.keys().next() {
            return Err(format!("unknown field {name:?} beside a body"));
        }
        object = match body {
            Value::Object(mut body) => {
                body.retain(|_, value| !value.is_null());
                body
            }
            other => return Err(format!("body: {} where a JSON object is wanted", kind(&other))),
        };
    }
    let mut fields = Fields(object);
    let ask = fields.ask()?;
    let stop = fields.stop()?;
    let mut own = base.clone();
    let sampling = &mut own;
    let real = |x: f64| x as f32;
    set(&mut sampling.temp, fields.real("temperature", TEMPERATURE_RANGE, "0 to 100")?.map(real));
    set(&mut sampling.top_p, fields.real("top_p", TOP_P_RANGE, "above 0, up to 1")?.map(real));
    set(&mut sampling.min_p, fields.real("min_p", MIN_P_RANGE, "0 to 1")?.map(real));
    let penalty = fields.either("repetition_penalty", "repeat_penalty")?;
    set(
        &mut sampling.repeat_penalty,
        fields.real(penalty, REPEAT_PENALTY_RANGE, "above 0, up to 100")?.map(real),
    );
    // -1 means all, like 0.
    let top_k = fields.whole("top_k", -1, i64::from(u32::MAX))?;
    set(&mut sampling.top_k, top_k.map(|k| k.max(0) as u32));
    set(&mut sampling.seed, fields.whole("seed", 0, i64::MAX)?.map(|s| s as u64));
    let most = fields.either("max_completion_tokens", "max_tokens")?;
    let max_tokens = fields.whole(most, 1, i64::from(u32::MAX))?.map(|n| n as usize);
    let raw = fields.flag("raw")?.or(raw);
    fields.only("n", &Value::from(1))?;
    fields.only("stream", &Value::from(false))?;
    // These have no effect: there is one model and one user.
    for name in ["model", "user", "metadata"] {
        fields.0.remove(name);
    }
    match fields.0.keys().next() {
        Some(name) => Err(format!(
            "unknown field {name:?}; known are id, prompt, messages, raw, max_tokens, temperature, top_p, top_k, min_p, \
             repetition_penalty, seed and stop"
        )),
        None => Ok(Line { number, id, ask, raw, max_tokens, sampling: own, stop }),
    }
}

fn set<T>(to: &mut Option<T>, value: Option<T>) {
    if value.is_some() {
        *to = value;
    }
}

/// Fields that have not been read yet.
struct Fields(Map<String, Value>);

impl Fields {
    fn ask(&mut self) -> Result<Ask, String> {
        match (self.0.remove("prompt"), self.0.remove("messages")) {
            (Some(_), Some(_)) => Err("both a prompt and messages; one of them is wanted".into()),
            (None, None) => Err("neither a prompt nor messages".into()),
            (Some(Value::String(text)), None) if text.is_empty() => Err("prompt: it is empty".into()),
            (Some(Value::String(text)), None) => Ok(Ask::Text(text)),
            (Some(Value::Array(ids)), None) => {
                let token = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
                let ids: Option<Vec<u32>> = ids.iter().map(token).collect();
                let ids = ids.filter(|ids| !ids.is_empty());
                ids.map(Ask::Tokens).ok_or_else(|| {
                    "prompt: a list that is not of token ids; for several prompts write several lines".into()
                })
            }
            (Some(other), None) => {
                Err(format!("prompt: {} where a text or token ids are wanted", kind(&other)))
            }
            (None, Some(Value::Array(messages))) if !messages.is_empty() => {
                let messages = (1..).zip(&messages).map(|(i, m)| message(i, m)).collect::<Result<_, _>>()?;
                Ok(Ask::Messages(messages))
            }
            (None, Some(other)) => {
                Err(format!("messages: {} where a list of messages is wanted", kind(&other)))
            }
        }
    }

    fn stop(&mut self) -> Result<Option<Vec<String>>, String> {
        let wrong = || "stop: a text, or a list of texts that are not empty, is wanted".to_owned();
        let text = |v: &Value| v.as_str().filter(|s| !s.is_empty()).map(str::to_owned).ok_or_else(wrong);
        match self.0.remove("stop") {
            None => Ok(None),
            Some(Value::Array(list)) => list.iter().map(text).collect::<Result<_, _>>().map(Some),
            Some(one) => Ok(Some(vec![text(&one)?])),
        }
    }

    fn real(
        &mut self,
        name: &str,
        range: impl std::ops::RangeBounds<f32>,
        wanted: &str,
    ) -> Result<Option<f64>, String> {
        let Some(value) = self.0.remove(name) else { return Ok(None) };
        match value.as_f64().filter(|&x| range.contains(&(x as f32))) {
            Some(x) => Ok(Some(x)),
            None => Err(format!("{name}: {value}, a number ({wanted}) is wanted")),
        }
    }

    fn whole(&mut self, name: &str, least: i64, most: i64) -> Result<Option<i64>, String> {
        let Some(value) = self.0.remove(name) else { return Ok(None) };
        match value.as_i64().filter(|n| (least..=most).contains(n)) {
            Some(n) => Ok(Some(n)),
            None => Err(format!("{name}: {value}, a whole number from {least} is wanted")),
        }
    }

    fn flag(&mut self, name: &str) -> Result<Option<bool>, String> {
        let Some(value) = self.0.remove(name) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| format!("{name}: {value}, true or false is wanted"))
    }

    /// The name that is present, of two names of one setting.
    fn either<'n>(&self, one: &'n str, other: &'n str) -> Result<&'n str, String> {
        match (self.0.contains_key(one), self.0.contains_key(other)) {
            (true, true) => Err(format!("both {one} and {other}, which mean the same")),
            (true, false) => Ok(one),
            _ => Ok(other),
        }
    }

    /// Reads a setting for which only one value is supported.
    fn only(&mut self, name: &str, can: &Value) -> Result<(), String> {
        match self.0.remove(name) {
            Some(value) if value != *can => Err(format!("{name}: {value}, only {can} can be")),
            _ => Ok(()),
        }
    }
}

/// `{"role", "content"}`; the content is a text, or parts of type text.
fn message(i: usize, value: &Value) -> Result<Message, String> {
    let role = value["role"].as_str().ok_or_else(|| format!("message {i}: no role"))?;
    let parts = |list: &Vec<Value>| -> Option<String> {
        list.iter().map(|part| part["text"].as_str().filter(|_| part["type"] == "text")).collect()
    };
    let content = match &value["content"] {
        Value::String(text) => Some(text.clone()),
        Value::Array(list) => parts(list),
        _ => None,
    };
    let content = content.ok_or_else(|| format!("message {i}: the content is no text"))?;
    Ok(Message::new(role, content))
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(list) if list.is_empty() => "an empty list",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The position and reason of a JSON error, without "line 1", which refers to the line itself.
fn not_json(line: &str, error: &serde_json::Error) -> String {
    let text = error.to_string();
    let what = text.split(" at line ").next().unwrap_or_default();
    let pretty = matches!(line.trim(), "{" | "[");
    let hint = if pretty { "; each line holds a whole object" } else { "" };
    format!("not a JSON object: {what} (column {}){hint}", error.column())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(line: &str) -> Result<Line, String> {
        let mut all = parse(line, &SamplingArgs { temp: Some(0.25), ..SamplingArgs::default() });
        assert_eq!(all.len(), 1);
        all.pop().unwrap().map_err(|bad| bad.why)
    }

    #[test]
    fn fields_are_those_of_openai_and_vllm() {
        let line = one(
            r#"{"id":"a","prompt":"hi","max_tokens":7,"temperature":0,"top_p":0.5,"top_k":-1,"seed":3,"stop":"x","model":"m","n":1,"user":null}"#,
        )
        .unwrap();
        assert_eq!((line.id, line.ask), (Some("a".into()), Ask::Text("hi".into())));
        assert_eq!((line.max_tokens, line.raw, line.stop), (Some(7), None, Some(vec!["x".to_owned()])));
        let s = line.sampling;
        assert_eq!((s.temp, s.top_p, s.top_k, s.seed), (Some(0.0), Some(0.5), Some(0), Some(3)));
        let line = one(
            r#"{"custom_id":"b","method":"POST","url":"/v1/chat/completions","body":{"model":"m","messages":[
               {"role":"system","content":"s"},{"role":"user","content":[{"type":"text","text":"h"},{"type":"text","text":"i"}]}],
               "max_completion_tokens":9}}"#
                .replace('\n', " ")
                .as_str(),
        )
        .unwrap();
        let messages = vec![Message::new("system", "s"), Message::new("user", "hi")];
        assert_eq!((line.ask, line.max_tokens), (Ask::Messages(messages), Some(9)));
        assert_eq!(line.sampling.temp, Some(0.25), "the command line's");
        let line = one(r#"{"custom_id":1,"url":"/v1/completions","body":{"prompt":[3,5]}}"#).unwrap();
        assert_eq!((line.ask, line.raw, line.id), (Ask::Tokens(vec![3, 5]), Some(true), Some(1.into())));
    }

    #[test]
    fn lines_are_counted_as_an_editor_does_and_blank_ones_are_none() {
        let text = "\u{feff}{\"prompt\":\"a\"}\r\n\n  \n{\"prompt\":\"b\"}\nnot json\n";
        let all = parse(text, &SamplingArgs::default());
        let numbers: Vec<_> =
            all.iter().map(|l| l.as_ref().map_or_else(|b| b.number, |l| l.number)).collect();
        assert_eq!(numbers, [1, 4, 5]);
        assert!(all[2].as_ref().unwrap_err().why.contains("not a JSON object"));
    }

    #[test]
    fn what_is_no_request_is_named() {
        for (line, want) in [
            ("[]", "an empty list where a JSON object is wanted"),
            ("{", "each line holds a whole object"),
            ("{}", "neither a prompt nor messages"),
            (r#"{"prompt":""}"#, "it is empty"),
            (r#"{"prompt":"a","messages":[]}"#, "both a prompt and messages"),
            (r#"{"prompt":["a","b"]}"#, "write several lines"),
            (r#"{"prompt":[-1]}"#, "not of token ids"),
            (r#"{"prompt":3}"#, "a number where a text"),
            (r#"{"messages":[]}"#, "an empty list where"),
            (r#"{"messages":[{"content":"x"}]}"#, "message 1: no role"),
            (r#"{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}"#, "the content is no text"),
            (r#"{"prompt":"a","max_tokens":0}"#, "max_tokens: 0, a whole number from 1"),
            (r#"{"prompt":"a","max_tokens":2.5}"#, "max_tokens: 2.5"),
            (r#"{"prompt":"a","max_tokens":2,"max_completion_tokens":2}"#, "mean the same"),
            (r#"{"prompt":"a","temperature":-1}"#, "temperature: -1, a number (0 to 100)"),
            (r#"{"prompt":"a","temperature":"hot"}"#, "temperature: \"hot\""),
            (r#"{"prompt":"a","top_p":0}"#, "top_p: 0, a number (above 0"),
            (r#"{"prompt":"a","stop":[""]}"#, "stop: a text"),
            (r#"{"prompt":"a","n":2}"#, "n: 2, only 1 can be"),
            (r#"{"prompt":"a","stream":true}"#, "stream: true, only false"),
            (r#"{"prompt":"a","temprature":1}"#, "unknown field \"temprature\"; known are"),
            (r#"{"id":[],"prompt":"a"}"#, "id: an empty list where a string"),
            (r#"{"custom_id":"a","url":"/v1/embeddings","body":{}}"#, "url: \"/v1/embeddings\""),
            (r#"{"body":{"prompt":"a"},"prompt":"b"}"#, "beside a body"),
        ] {
            let why = one(line).unwrap_err();
            assert!(why.contains(want), "{line}: {why}");
        }
        let long = one(&"x".repeat(LONGEST + 1)).unwrap_err();
        assert!(long.contains("16777217 bytes, at most 16777216"), "{long}");
        assert!(one(&"[".repeat(1 << 20)).unwrap_err().contains("recursion limit"));
        let bad = parse(r#"{"id":"a","n":2,"prompt":"x"}"#, &SamplingArgs::default());
        assert_eq!(bad[0].as_ref().unwrap_err().id, Some("a".into()));
    }
}
