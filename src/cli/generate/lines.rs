//! A file of prompts with one request per line, as a JSON object. Fields are named as in OpenAI's and vLLM's batch
//! files.

use serde_json::{Map, Value};
use tandem::model::{MIN_P_RANGE, PENALTY_RANGE, REPEAT_PENALTY_RANGE, TEMPERATURE_RANGE, TOP_P_RANGE};
use tandem::sched::OwnTargets;
use tandem::text::{Json, Message, is_template_variable};

use super::fields::{Fields, kind, shown};
use super::neutral;
use crate::cli::sampling::{SamplingArgs, random_seed};

/// Most bytes of a line, far more than a request of any context needs.
const LONGEST: usize = 16 << 20;

/// Most likely tokens beside each token of a prompt, as many as `--logprobs` gives beside those of an answer.
const MOST_LOGPROBS: i64 = 1000;

/// Most answers of a request, as the server has it.
const MOST_ANSWERS: i64 = 128;

/// The text to continue or answer.
#[derive(Debug, Clone, PartialEq)]
pub enum LineInput {
    /// A text: answered with the chat template, or continued if raw.
    Text(String),
    /// Tokens to continue.
    Tokens(Vec<u32>),
    /// A conversation to answer.
    Messages(Vec<Message>),
}

/// What the chat template gets besides the messages.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ForTemplate {
    /// Functions that the model may call.
    pub tools: Option<Json>,
    /// Documents to answer from.
    pub documents: Option<Json>,
    /// Its variables, which override those of the command line.
    pub variables: Vec<(String, Json)>,
    /// Whether the prompt ends where the answer begins.
    pub add_generation_prompt: Option<bool>,
    /// Whether the answer continues the last message.
    pub continue_final_message: bool,
}

/// Limits to what is chosen and to where the answer ends, which the command line does not have.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Limits {
    /// Added to the scores of tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Only these tokens.
    pub allowed: Option<Vec<u32>>,
    /// Texts that the answer does not have.
    pub bad_words: Vec<String>,
    /// Tokens before which the answer does not end.
    pub min_tokens: Option<usize>,
    /// Tokens that end the answer, besides those of the end of the turn.
    pub stop_tokens: Vec<u32>,
    /// Whether the end of the turn does not end the answer.
    pub ignore_eos: bool,
    /// Whether the text includes what ended the answer.
    pub keep_stop: bool,
    /// Whether special tokens are text.
    pub show_special: bool,
}

/// The request of a line. The command line decides what it leaves open.
#[derive(Debug, Clone)]
pub struct PromptLine {
    /// In the file, from 1.
    pub number: usize,
    /// The user's id for it: a string or a number.
    pub id: Option<Value>,
    /// The text to continue or answer.
    pub ask: LineInput,
    /// Whether a text is continued without the chat template.
    pub raw: Option<bool>,
    /// For the chat template.
    pub template: ForTemplate,
    /// Most tokens to generate.
    pub max_tokens: Option<usize>,
    /// Answers, each with a seed of its own.
    pub n: usize,
    /// Answers of which these are the best: at least so many.
    pub best_of: usize,
    /// Its own settings, which override those of the command line.
    pub sampling: SamplingArgs,
    /// Whether the seed is the line's own, instead of one made from that of the command line.
    pub own_seed: bool,
    /// What limits the choice.
    pub limits: Limits,
    /// Texts that end the answer, instead of the command line's.
    pub stop: Option<Vec<String>>,
    /// Log-probabilities of the prompt's tokens, and of so many likely ones beside each.
    pub prompt_logprobs: Option<usize>,
    /// What it asks of latency, in the place of the command line's targets.
    pub targets: OwnTargets,
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
pub fn parse(text: &str, base: &SamplingArgs) -> Vec<Result<PromptLine, Bad>> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let lines = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty());
    lines.map(|(number, line)| parse_line(number, line, base)).collect()
}

fn parse_line(number: usize, line: &str, base: &SamplingArgs) -> Result<PromptLine, Bad> {
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
    // Again, with the order of keys, which templates print.
    let ordered: Json = serde_json::from_str(line).map_err(|e| bad(id.clone(), not_json(line, &e)))?;
    request(number, id.clone(), object, &ordered, base).map_err(|why| bad(id, why))
}

/// `{"custom_id", "method", "url", "body"}` of a batch file, or the body alone.
fn request(
    number: usize,
    id: Option<Value>,
    mut object: Map<String, Value>,
    mut ordered: &Json,
    base: &SamplingArgs,
) -> Result<PromptLine, String> {
    let mut raw = None;
    if let Some(body) = object.remove("body") {
        ordered = ordered.get("body").unwrap_or(ordered);
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
    let mut fields = Fields(object, ordered);
    let ask = fields.ask()?;
    let raw = fields.flag("raw")?.or(raw);
    let template = fields.template()?;
    let stop = fields.texts("stop")?;
    let limits = fields.limits()?;
    let prompt_logprobs = fields.prompt_logprobs()?;
    let n = fields.whole("n", 1, MOST_ANSWERS)?.unwrap_or(1);
    let best_of = fields.whole("best_of", 1, MOST_ANSWERS)?.unwrap_or(n);
    if best_of < n {
        return Err(format!("best_of: {best_of}, fewer than the n of {n} that are wanted"));
    }
    let targets = OwnTargets::new(fields.seconds("ttft_target")?, fields.seconds("tpot_target")?);
    let (sampling, own_seed) = fields.sampling(base)?;
    let most = fields.one_of(&["max_completion_tokens", "max_tokens", "n_predict"])?;
    let max_tokens = fields.whole(most, 0, i64::from(u32::MAX))?.map(|n| n as usize);
    if let (Some(least), Some(most)) = (limits.min_tokens, max_tokens)
        && least > most
    {
        return Err(format!("min_tokens: {least}, more than the {most} tokens that are wanted at most"));
    }
    // What the chat template or the tokenizer adds is added in any case.
    let adds = matches!(ask, LineInput::Text(_)) && raw == Some(true);
    fields.only("add_special_tokens", &[&adds.to_string()])?;
    for (name, values) in neutral::NEUTRAL {
        fields.only(name, values)?;
    }
    neutral::NO_EFFECT.iter().for_each(|name| drop(fields.0.remove(*name)));
    match fields.0.keys().next() {
        Some(name) => Err(format!(
            "unknown field {:?}; known are id, prompt, messages, raw, max_tokens, temperature, top_p, top_k, min_p, \
             repetition_penalty, presence_penalty, frequency_penalty, seed, stop and others (docs/requests.md)",
            name.chars().take(60).collect::<String>()
        )),
        None => Ok(PromptLine {
            number,
            id,
            ask,
            raw,
            template,
            max_tokens,
            n: n as usize,
            best_of: best_of as usize,
            sampling,
            own_seed,
            limits,
            stop,
            prompt_logprobs,
            targets,
        }),
    }
}

fn set<T>(to: &mut Option<T>, value: Option<T>) {
    if value.is_some() {
        *to = value;
    }
}

impl Fields<'_> {
    fn ask(&mut self) -> Result<LineInput, String> {
        match (self.0.remove("prompt"), self.0.remove("messages")) {
            (Some(_), Some(_)) => Err("both a prompt and messages; one of them is wanted".into()),
            (None, None) => Err("neither a prompt nor messages".into()),
            (Some(Value::String(text)), None) if text.is_empty() => Err("prompt: it is empty".into()),
            (Some(Value::String(text)), None) => Ok(LineInput::Text(text)),
            (Some(Value::Array(ids)), None) => {
                let token = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
                let ids: Option<Vec<u32>> = ids.iter().map(token).collect();
                let ids = ids.filter(|ids| !ids.is_empty());
                ids.map(LineInput::Tokens).ok_or_else(|| {
                    "prompt: a list that is not of token ids; for several prompts write several lines".into()
                })
            }
            (Some(other), None) => {
                Err(format!("prompt: {} where a text or token ids are wanted", kind(&other)))
            }
            (None, Some(Value::Array(messages))) if !messages.is_empty() => {
                let Some(Json::List(ordered)) = self.1.get("messages") else {
                    return Ok(LineInput::Messages(vec![]));
                };
                let message = |(i, m): (usize, &Json)| {
                    Message::from_json(m.clone()).map_err(|e| format!("message {i}: {e}"))
                };
                debug_assert_eq!(ordered.len(), messages.len());
                Ok(LineInput::Messages((1..).zip(ordered).map(message).collect::<Result<_, _>>()?))
            }
            (None, Some(other)) => {
                Err(format!("messages: {} where a list of messages is wanted", kind(&other)))
            }
        }
    }

    fn template(&mut self) -> Result<ForTemplate, String> {
        let continue_final_message = self.flag("continue_final_message")?.unwrap_or(false);
        let add_generation_prompt = self.flag("add_generation_prompt")?;
        if continue_final_message && add_generation_prompt == Some(true) {
            return Err(
                "add_generation_prompt and continue_final_message: only one of them can be true".into()
            );
        }
        let mut variables = match self.0.remove("chat_template_kwargs") {
            None => Vec::new(),
            Some(Value::Object(_)) => match self.1.get("chat_template_kwargs") {
                Some(Json::Object(entries)) => entries.clone(),
                _ => Vec::new(),
            },
            Some(other) => {
                return Err(format!("chat_template_kwargs: {} where an object is wanted", kind(&other)));
            }
        };
        if let Some((name, _)) = variables.iter().find(|(name, _)| !is_template_variable(name)) {
            let name: String = name.chars().take(60).collect();
            return Err(format!(
                "chat_template_kwargs: {name:?} is no variable of its own: it is a field of the request"
            ));
        }
        // OpenAI's name for what templates have as a variable.
        if let Some(effort) = self.0.remove("reasoning_effort")
            && variables.iter().all(|(name, _)| name != "reasoning_effort")
        {
            let effort = effort
                .as_str()
                .ok_or_else(|| format!("reasoning_effort: {}, a text is wanted", shown(&effort)))?;
            variables.push(("reasoning_effort".into(), effort.into()));
        }
        Ok(ForTemplate {
            tools: self.objects("tools")?,
            documents: self.objects("documents")?,
            variables,
            add_generation_prompt,
            continue_final_message,
        })
    }

    fn limits(&mut self) -> Result<Limits, String> {
        let allowed = self.tokens("allowed_token_ids")?;
        if allowed.as_ref().is_some_and(Vec::is_empty) {
            return Err("allowed_token_ids: an empty list allows no token".into());
        }
        Ok(Limits {
            logit_bias: self.logit_bias()?,
            allowed,
            bad_words: self.texts("bad_words")?.unwrap_or_default(),
            min_tokens: self.whole("min_tokens", 0, i64::from(u32::MAX))?.map(|n| n as usize),
            stop_tokens: self.tokens("stop_token_ids")?.unwrap_or_default(),
            ignore_eos: self.flag("ignore_eos")?.unwrap_or(false),
            keep_stop: self.flag("include_stop_str_in_output")?.unwrap_or(false),
            show_special: !self.flag("skip_special_tokens")?.unwrap_or(true),
        })
    }

    /// A number, as in vLLM; or false, which asks for nothing.
    fn prompt_logprobs(&mut self) -> Result<Option<usize>, String> {
        if self.0.get("prompt_logprobs") == Some(&Value::Bool(false)) {
            self.0.remove("prompt_logprobs");
        }
        let k = self.whole("prompt_logprobs", 0, MOST_LOGPROBS)?;
        Ok(k.map(|k| k as usize))
    }

    /// `{"id": bias}`.
    fn logit_bias(&mut self) -> Result<Vec<(u32, f32)>, String> {
        let Some(value) = self.0.remove("logit_bias") else { return Ok(Vec::new()) };
        let wrong = || {
            format!(
                "logit_bias: {}, an object of token ids with biases from -100 to 100 is wanted",
                shown(&value)
            )
        };
        let bias = |(id, bias): (&String, &Value)| {
            let bias = bias.as_f64().filter(|b| (-100.0..=100.0).contains(b));
            Some((id.parse().ok()?, bias? as f32))
        };
        value.as_object().ok_or_else(wrong)?.iter().map(bias).collect::<Option<_>>().ok_or_else(wrong)
    }

    /// The settings of the sampler, and whether the seed is the line's own.
    fn sampling(&mut self, base: &SamplingArgs) -> Result<(SamplingArgs, bool), String> {
        let mut own = base.clone();
        let mut real =
            |to: &mut Option<f32>, name: &str, range: std::ops::RangeInclusive<f32>, wanted: &str| {
                self.real(name, range, wanted).map(|value| set(to, value.map(|x| x as f32)))
            };
        real(&mut own.temp, "temperature", TEMPERATURE_RANGE, "0 to 100")?;
        real(&mut own.top_p, "top_p", TOP_P_RANGE, "above 0, up to 1")?;
        real(&mut own.min_p, "min_p", MIN_P_RANGE, "0 to 1")?;
        real(&mut own.presence_penalty, "presence_penalty", PENALTY_RANGE, "-2 to 2")?;
        real(&mut own.frequency_penalty, "frequency_penalty", PENALTY_RANGE, "-2 to 2")?;
        let penalty = self.one_of(&["repetition_penalty", "repeat_penalty"])?;
        let value = self.real(penalty, REPEAT_PENALTY_RANGE, "above 0, up to 100")?;
        let last_n = self.whole("repeat_last_n", -1, i64::from(u32::MAX))?;
        if penalty == "repetition_penalty" && value.is_some() {
            if last_n.is_some() {
                return Err(
                    "repeat_last_n: repetition_penalty looks at all tokens; repeat_penalty looks at the last"
                        .into(),
                );
            }
            // As vLLM and `transformers` do, whatever the command line says of its own.
            own.repeat_last_n = Some(usize::MAX);
        }
        set(&mut own.repeat_penalty, value.map(|x| x as f32));
        set(&mut own.repeat_last_n, last_n.map(|n| usize::try_from(n).unwrap_or(usize::MAX)));
        // -1 means all, like 0.
        let top_k = self.whole("top_k", -1, i64::from(u32::MAX))?;
        set(&mut own.top_k, top_k.map(|k| k.max(0) as u32));
        let seed = match self.0.remove("seed") {
            None => None,
            Some(value) => match (value.as_u64(), value.as_i64()) {
                (Some(seed), _) => Some(seed),
                (None, Some(-1)) => Some(random_seed()),
                _ => {
                    let value = shown(&value);
                    return Err(format!(
                        "seed: {value}, a whole number from 0, or -1 for a random one, is wanted"
                    ));
                }
            },
        };
        set(&mut own.seed, seed);
        Ok((own, seed.is_some()))
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

    fn one(line: &str) -> Result<PromptLine, String> {
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
        assert_eq!((line.id, line.ask), (Some("a".into()), LineInput::Text("hi".into())));
        assert_eq!((line.prompt_logprobs, line.targets), (None, OwnTargets::default()));
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
        let LineInput::Messages(messages) = line.ask else { panic!("{:?}", line.ask) };
        let said: Vec<_> = messages.iter().map(|m| (m.role(), m.text())).collect();
        assert_eq!(said, [("system", "s".to_owned()), ("user", "hi".to_owned())]);
        assert_eq!(line.max_tokens, Some(9));
        assert_eq!(line.sampling.temp, Some(0.25), "the command line's");
        let line =
            one(r#"{"custom_id":1,"url":"/v1/completions","body":{"prompt":[3,5],"prompt_logprobs":2}}"#)
                .unwrap();
        assert_eq!(line.prompt_logprobs, Some(2));
        assert_eq!(
            (line.ask, line.raw, line.id),
            (LineInput::Tokens(vec![3, 5]), Some(true), Some(1.into()))
        );
        let line = one(r#"{"prompt":"a","ttft_target":2,"tpot_target":0.05}"#).unwrap();
        assert_eq!(line.targets, OwnTargets::new(Some(2.0), Some(0.05)));
    }

    /// Clients write defaults out: what changes nothing is no error.
    #[test]
    fn values_that_change_nothing_are_accepted() {
        let all = r#"{"messages":[{"role":"user","content":"a"}],"frequency_penalty":0,"presence_penalty":0.0,
            "logprobs":false,"top_logprobs":0,"tools":[],"tool_choice":"auto","n":1,"best_of":1,"stream":false,
            "stream_options":{"include_usage":true},"echo":false,"logit_bias":{},"response_format":{"type":"text"},
            "min_tokens":0,"ignore_eos":false,"skip_special_tokens":true,"user":"u","store":false,"service_tier":"auto",
            "parallel_tool_calls":true,"max_tokens":0,"top_k":-1,"stop":[],"stop_token_ids":[],"repetition_penalty":1.0,
            "min_p":0,"length_penalty":1,"use_beam_search":false,"include_stop_str_in_output":false,"documents":[],
            "chat_template_kwargs":{},"add_generation_prompt":true,"continue_final_message":false,"metadata":{},
            "spaces_between_special_tokens":true,"suffix":"","modalities":["text"],"add_special_tokens":false,
            "priority":0,"request_id":"r","safety_identifier":"s","prompt_cache_key":"k","repeat_last_n":null,
            "functions":[],"function_call":"none","verbosity":"medium","cache_prompt":true,"mirostat":0,"typical_p":1.0}"#
            .replace('\n', " ");
        let line = one(&all).unwrap();
        assert_eq!(
            (line.max_tokens, line.template, line.own_seed),
            (Some(0), ForTemplate { add_generation_prompt: Some(true), ..ForTemplate::default() }, false)
        );
        assert_eq!(line.limits, Limits { min_tokens: Some(0), ..Limits::default() });
        // Null is the same as nothing, for every field.
        let mut nulls: Map<String, Value> = serde_json::from_str(&all).unwrap();
        nulls.iter_mut().filter(|(name, _)| *name != "messages").for_each(|(_, value)| *value = Value::Null);
        one(&Value::Object(nulls).to_string()).unwrap();
        assert_eq!(one(r#"{"prompt":"a","logprobs":0,"tool_choice":"none"}"#).unwrap().max_tokens, None);
    }

    #[test]
    fn penalties_mean_what_their_names_mean_elsewhere() {
        let of = |line: &str, base: &SamplingArgs| {
            let s = parse(line, base).pop().unwrap().unwrap().sampling;
            (s.repeat_penalty, s.repeat_last_n)
        };
        let none = SamplingArgs::default();
        let flags =
            SamplingArgs { repeat_penalty: Some(1.2), repeat_last_n: Some(8), ..SamplingArgs::default() };
        let all = Some(usize::MAX);
        assert_eq!(of(r#"{"prompt":"a","repetition_penalty":1.5}"#, &none), (Some(1.5), all));
        assert_eq!(of(r#"{"prompt":"a","repetition_penalty":1.5}"#, &flags), (Some(1.5), all));
        assert_eq!(of(r#"{"prompt":"a","repeat_penalty":1.5}"#, &none), (Some(1.5), None));
        assert_eq!(
            of(r#"{"prompt":"a","repeat_penalty":1.5,"repeat_last_n":5}"#, &flags),
            (Some(1.5), Some(5))
        );
        assert_eq!(of(r#"{"prompt":"a","repeat_last_n":-1}"#, &flags), (Some(1.2), all));
        assert_eq!(of(r#"{"prompt":"a"}"#, &flags), (Some(1.2), Some(8)));
    }

    #[test]
    fn limits_and_what_templates_get() {
        let line = one(
            r#"{"messages":[{"role":"assistant","content":null,"tool_calls":[{"z":1,"a":2}]}],"tools":[{"type":"function"}],
               "chat_template_kwargs":{"enable_thinking":false,"b":{"z":1,"a":2.0}},"reasoning_effort":"low","seed":-1,
               "logit_bias":{"5":-100,"7":1.5},"allowed_token_ids":[1,2],"bad_words":["x"],"min_tokens":3,
               "stop_token_ids":[9],"ignore_eos":true,"include_stop_str_in_output":true,"skip_special_tokens":false,
               "continue_final_message":true,"presence_penalty":-1,"frequency_penalty":0.5}"#
                .replace('\n', " ")
                .as_str(),
        )
        .unwrap();
        let text = |json: &Json| serde_json::to_string(json).unwrap();
        assert_eq!(text(line.template.tools.as_ref().unwrap()), r#"[{"type":"function"}]"#);
        let variables: Vec<_> =
            line.template.variables.iter().map(|(k, v)| format!("{k}={}", text(v))).collect();
        assert_eq!(variables, ["enable_thinking=false", r#"b={"z":1,"a":2.0}"#, r#"reasoning_effort="low""#]);
        assert!(line.template.continue_final_message && line.own_seed && line.sampling.seed.is_some());
        let want = Limits {
            logit_bias: vec![(5, -100.0), (7, 1.5)],
            allowed: Some(vec![1, 2]),
            bad_words: vec!["x".into()],
            min_tokens: Some(3),
            stop_tokens: vec![9],
            ignore_eos: true,
            keep_stop: true,
            show_special: true,
        };
        assert_eq!(line.limits, want);
        assert_eq!(
            (line.sampling.presence_penalty, line.sampling.frequency_penalty),
            (Some(-1.0), Some(0.5))
        );
        let LineInput::Messages(messages) = &line.ask else { panic!("{:?}", line.ask) };
        assert_eq!(
            serde_json::to_string(&messages[0]).unwrap(),
            r#"{"role":"assistant","tool_calls":[{"z":1,"a":2}]}"#
        );
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
            (r#"{"prompt":"a","max_tokens":-1}"#, "max_tokens: -1, a whole number from 0"),
            (r#"{"prompt":"a","seed":-2}"#, "seed: -2, a whole number from 0"),
            (r#"{"prompt":"a","prompt_logprobs":-1}"#, "prompt_logprobs: -1, a whole number from 0"),
            (r#"{"prompt":"a","prompt_logprobs":true}"#, "prompt_logprobs: true, a whole number from 0"),
            (r#"{"prompt":"a","logprobs":5}"#, "logprobs: 5, only false or 0 can be"),
            (
                r#"{"prompt":"a","response_format":{"type":"json_object"}}"#,
                "response_format: {\"type\":\"json_object\"}, only",
            ),
            (r#"{"prompt":"a","tool_choice":"required"}"#, "tool_choice: \"required\", only"),
            (r#"{"prompt":"a","guided_json":{}}"#, "guided_json: {}, which cannot be had"),
            (r#"{"prompt":"a","presence_penalty":3}"#, "presence_penalty: 3, a number (-2 to 2)"),
            (r#"{"prompt":"a","logit_bias":{"x":1}}"#, "logit_bias: {\"x\":1}, an object of token ids"),
            (r#"{"prompt":"a","logit_bias":{"1":101}}"#, "from -100 to 100"),
            (r#"{"prompt":"a","min_tokens":5,"max_tokens":2}"#, "min_tokens: 5, more than the 2"),
            (r#"{"prompt":"a","tools":3}"#, "tools: a number where a list of objects"),
            (
                r#"{"prompt":"a","chat_template_kwargs":{"messages":[]}}"#,
                "chat_template_kwargs: \"messages\" is no variable",
            ),
            (r#"{"prompt":"a","chat_template_kwargs":[]}"#, "an empty list where an object"),
            (
                r#"{"prompt":"a","add_generation_prompt":true,"continue_final_message":true}"#,
                "only one of them",
            ),
            (
                r#"{"prompt":"a","repetition_penalty":1.1,"repeat_last_n":9}"#,
                "repeat_last_n: repetition_penalty looks",
            ),
            (r#"{"prompt":"a","repetition_penalty":1.1,"repeat_penalty":1.1}"#, "mean the same"),
            (r#"{"prompt":"a","allowed_token_ids":[]}"#, "allows no token"),
            (r#"{"prompt":"a","stop_token_ids":["x"]}"#, "stop_token_ids: [\"x\"], a list of token ids"),
            (r#"{"prompt":"a","max_tokens":2.5}"#, "max_tokens: 2.5"),
            (r#"{"prompt":"a","max_tokens":2,"max_completion_tokens":2}"#, "mean the same"),
            (r#"{"prompt":"a","temperature":-1}"#, "temperature: -1, a number (0 to 100)"),
            (r#"{"prompt":"a","temperature":"hot"}"#, "temperature: \"hot\""),
            (r#"{"prompt":"a","ttft_target":0}"#, "ttft_target: 0, a number of seconds above 0"),
            (r#"{"prompt":"a","tpot_target":-2.5}"#, "tpot_target: -2.5, a number of seconds above 0"),
            (r#"{"prompt":"a","tpot_target":"NaN"}"#, "tpot_target: \"NaN\", a number of seconds"),
            (r#"{"prompt":"a","top_p":0}"#, "top_p: 0, a number (above 0"),
            (r#"{"prompt":"a","stop":[""]}"#, "stop: a text"),
            (r#"{"prompt":"a","n":0}"#, "n: 0, a whole number from 1 is wanted"),
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
        let bad = parse(r#"{"id":"a","n":0,"prompt":"x"}"#, &SamplingArgs::default());
        assert_eq!(bad[0].as_ref().unwrap_err().id, Some("a".into()));
    }
}
