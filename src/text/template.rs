//! Chat templates: turn a conversation into the prompt format that the model was trained to continue.
//!
//! Models carry Jinja2 programs for this. They come with the model file and are untrusted, so they run on minijinja
//! with bounds on steps, recursion and output, and see only the conversation. That bounds neither the memory nor the
//! time of a single step, so templates from a model file are rendered by [`super::sandbox`], which runs this code in a
//! process with limits. The environment is that of Hugging Face: `trim_blocks`, `lstrip_blocks` ([`source`]), Python's
//! string methods, `raise_exception`, `strftime_now`, `tojson` ([`tojson`](mod@tojson)).

mod json;
mod source;
mod tojson;

use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, ErrorKind, UndefinedBehavior, escape_formatter};
use serde::{Deserialize, Serialize};

use super::Tokenizer;
use crate::{Error, Result, small_file};

pub use json::Json;

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Message(Json);

impl Message {
    /// A message by its parts: the role is `system`, `user`, `assistant`, or another one that the template knows.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Message {
        let entry = |key: &str, text: String| (key.to_owned(), Json::Text(text));
        Message(Json::Object(vec![entry("role", role.into()), entry("content", content.into())]))
    }

    /// A message with the fields of an object. All of them reach the template, except for those that are null.
    ///
    /// # Errors
    /// If it is no object with a role, or its content is neither a text nor a list of parts with a text.
    pub fn from_json(mut fields: Json) -> std::result::Result<Message, &'static str> {
        let Json::Object(entries) = &mut fields else { return Err("it is no object") };
        // Other programs write `"content": null` for a turn that only calls tools.
        entries.retain(|(_, value)| *value != Json::Null);
        if fields.get("role").and_then(Json::as_str).is_none() {
            return Err("no role");
        }
        let is_text = |part: &Json| {
            part.get("type").and_then(Json::as_str) == Some("text")
                && part.get("text").and_then(Json::as_str).is_some()
        };
        match fields.get("content") {
            None | Some(Json::Text(_)) => Ok(Message(fields)),
            Some(Json::List(parts)) if parts.iter().all(is_text) => Ok(Message(fields)),
            Some(_) => Err("the content is no text"),
        }
    }

    /// The role.
    pub fn role(&self) -> &str {
        self.0.get("role").and_then(Json::as_str).unwrap_or_default()
    }

    /// Another field.
    pub fn field(&self, name: &str) -> Option<&Json> {
        self.0.get(name)
    }

    /// All of its fields.
    pub fn fields(&self) -> &Json {
        &self.0
    }

    /// The text of the turn: its content, or that of all parts.
    pub fn text(&self) -> String {
        match self.0.get("content") {
            Some(Json::Text(text)) => text.clone(),
            Some(Json::List(parts)) => parts.iter().filter_map(|p| p.get("text")?.as_str()).collect(),
            _ => String::new(),
        }
    }

    /// The text at its end: its content, or the last part of it.
    fn last_text(&self) -> String {
        match self.0.get("content") {
            Some(Json::List(parts)) => {
                parts.last().and_then(|p| p.get("text")?.as_str()).unwrap_or_default().to_owned()
            }
            _ => self.text(),
        }
    }

    /// Whether the content is a list of parts.
    fn has_parts(&self) -> bool {
        matches!(self.0.get("content"), Some(Json::List(_)))
    }

    /// The fields as a template gets them: without parts unless `parts`, the text of the content with `more` at its end,
    /// and the reasoning under the names that templates read, as `transformers` gives it.
    fn for_template(&self, parts: bool, more: &str) -> Value {
        let Json::Object(entries) = &self.0 else { return self.0.value() };
        let mut entries: Vec<_> = entries.iter().filter(|(_, v)| *v != Json::Null).cloned().collect();
        if self.has_parts() && !parts {
            json::put(&mut entries, "content".into(), Json::Text(self.text()));
        }
        if !more.is_empty()
            && let Some((_, content)) = entries.iter_mut().find(|(key, _)| key == "content")
        {
            append(content, more);
        }
        let named = |key: &&str| entries.iter().find(|(name, _)| name == key).map(|(_, v)| v.clone());
        if let Some(reasoning) = ["reasoning_content", "thinking", "reasoning"].iter().find_map(named) {
            if named(&"thinking").is_none() {
                entries.insert(0, ("thinking".into(), reasoning.clone()));
            }
            json::put(&mut entries, "reasoning_content".into(), reasoning);
        }
        Json::Object(entries).value()
    }
}

/// Appends to a text, or to the last part of a content.
fn append(content: &mut Json, more: &str) {
    match content {
        Json::Text(text) => text.push_str(more),
        Json::List(parts) => {
            let Some(Json::Object(last)) = parts.last_mut() else { return };
            if let Some((_, text)) = last.iter_mut().find(|(key, _)| key == "text") {
                append(text, more);
            }
        }
        _ => {}
    }
}

/// A conversation, and what else its template gets.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Conversation {
    /// The turns.
    pub messages: Vec<Message>,
    /// Functions that the model may call, as in OpenAI's API; `None` in the template without any.
    pub tools: Option<Json>,
    /// Documents to answer from.
    pub documents: Option<Json>,
    /// Further variables of the template, such as `enable_thinking`.
    pub variables: Vec<(String, Json)>,
    /// Whether the prompt ends where the answer begins, instead of behind the last message.
    pub add_generation_prompt: bool,
    /// Whether the prompt ends inside of the last message, which the answer continues.
    pub continue_final_message: bool,
}

impl Conversation {
    /// Messages to answer.
    pub fn new(messages: Vec<Message>) -> Conversation {
        Conversation {
            messages,
            tools: None,
            documents: None,
            variables: Vec::new(),
            add_generation_prompt: true,
            continue_final_message: false,
        }
    }
}

/// Variables that have a place of their own in a request, or that name arguments of `apply_chat_template`.
const RESERVED: [&str; 15] = [
    "messages",
    "conversation",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
];

/// Whether a user may set the template's variable `name`.
pub fn is_template_variable(name: &str) -> bool {
    !name.is_empty() && !RESERVED.contains(&name)
}

/// A compiled chat template. An untrusted one may take any amount of memory and time to compile and to render: see
/// [`super::Sandbox`].
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    /// Whether the source speaks of a message's content, without which no message can be continued.
    has_content: bool,
    /// Whether it prints contents that are lists of parts, once known.
    parts: OnceLock<bool>,
}

/// ChatML, for models that have its tokens but no template.
const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + \
    message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}\
    {{ '<|im_start|>assistant\\n' }}{% endif %}";

const NAME: &str = "chat_template";
/// What marks the end of a message that is to be continued, in the prompt; the name is that of `transformers`.
const FINAL: &str = "CONTINUE_FINAL_MESSAGE_TAG ";
/// Real templates have a few KiB; those with tool use up to 25.
const MAX_SOURCE: usize = 128 << 10;
/// The compiler recurses once for every operator of a chain such as `1+1+1`, so two bytes of source
/// may cost a stack frame: 4 KiB for each of those. Untouched stack costs nothing.
pub(super) const COMPILER_STACK: usize = 256 << 20;
/// A turn takes tens to hundreds of steps; this many take about a second.
const MAX_STEPS: u64 = 5_000_000;
/// On top of the conversation itself.
const MAX_OUTPUT: usize = 16 << 20;

impl ChatTemplate {
    /// Compiles Jinja2 source.
    pub fn new(source: &str) -> Result<ChatTemplate> {
        if source.len() > MAX_SOURCE {
            let n = source.len();
            return Err(Error::format("chat template", format!("{n} bytes, more than {MAX_SOURCE}")));
        }
        let mut env = Environment::new();
        // All white space is decided by `source::rewrite`.
        let syntax = SyntaxConfig::builder().keep_trailing_newline(true).build();
        env.set_syntax(syntax.expect("the default delimiters"));
        env.set_undefined_behavior(UndefinedBehavior::Lenient);
        env.set_auto_escape_callback(|_| AutoEscape::None);
        env.set_recursion_limit(100);
        env.set_fuel(Some(MAX_STEPS));
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        env.add_function("strftime_now", strftime_now);
        env.add_filter("tojson", tojson::tojson);
        env.set_formatter(|out, state, value| match f64::try_from(value.clone()) {
            Ok(x) if value.is_number() && !value.is_integer() => Ok(out.write_str(&tojson::float(x))?),
            _ => escape_formatter(out, state, value),
        });
        // minijinja can iterate over none but Python cannot, and templates test this before taking lengths.
        env.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
        let has_content = source.contains("content");
        let source = source::rewrite(source)?;
        let compiled = std::thread::scope(|scope| {
            let compile = || env.add_template_owned(NAME, source);
            let thread = std::thread::Builder::new().stack_size(COMPILER_STACK).spawn_scoped(scope, compile);
            thread.map(|t| t.join())
        });
        let compiled =
            compiled.map_err(|e| Error::Run(format!(
                "chat template: no thread to compile it: {e}; a limit on memory (ulimit -v, -d) or on processes (ulimit -u) \
                 leaves no room for one"
            )))?;
        let Ok(compiled) = compiled else {
            return Err(Error::format("chat template", "the template engine failed to compile it"));
        };
        compiled.map_err(|e| {
            let line = e.line().map(|l| format!(" in line {l}")).unwrap_or_default();
            Error::format("chat template", format!("does not compile{line}: {}", one_sentence(&e)))
        })?;
        Ok(ChatTemplate { env, has_content, parts: OnceLock::new() })
    }

    /// The source of a template for a model that carries none: ChatML if the vocabulary has its tokens.
    pub fn fallback(tokenizer: &Tokenizer) -> Option<&'static str> {
        let start = tokenizer.token_id("<|im_start|>")?;
        tokenizer.is_special(start).then_some(CHATML)
    }

    /// The template's source in a Hugging Face `tokenizer_config.json`: a string, or a list of named
    /// ones, of which `default` is for conversation.
    pub fn source_in_config(tokenizer_config: &str) -> Option<String> {
        let config = small_file::parse_json(tokenizer_config.as_bytes()).ok()?;
        let entry = config.get("chat_template")?;
        let named = |list: &Vec<serde_json::Value>| {
            list.iter()
                .find(|t| t["name"] == "default")
                .and_then(|t| t["template"].as_str().map(str::to_owned))
        };
        entry.as_str().map(str::to_owned).or_else(|| entry.as_array().and_then(named))
    }

    /// The prompt for `messages`; with `add_generation_prompt`, up to where the answer begins.
    pub fn render(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
        bos_token: &str,
        eos_token: &str,
    ) -> Result<String> {
        let conversation = Conversation { add_generation_prompt, ..Conversation::new(messages.to_vec()) };
        self.render_conversation(&conversation, bos_token, eos_token)
    }

    /// The prompt for a conversation.
    ///
    /// # Errors
    /// Those of the template, and if the last message is to be continued and does not appear in the prompt.
    pub fn render_conversation(
        &self,
        conversation: &Conversation,
        bos_token: &str,
        eos_token: &str,
    ) -> Result<String> {
        let parts = conversation.messages.iter().any(Message::has_parts) && self.prints_parts();
        if !conversation.continue_final_message {
            return self.run(conversation, parts, "", bos_token, eos_token);
        }
        let refuse = |why: &str| Err(Error::Run(format!("continue_final_message: {why}")));
        let last = conversation.messages.last().map(Message::last_text).unwrap_or_default();
        if !self.has_content {
            return refuse("the chat template does not print contents");
        }
        if last.is_empty() {
            return refuse("the last message has no text to continue");
        }
        let prompt = self.run(conversation, parts, FINAL, bos_token, eos_token)?;
        match prompt.rfind(FINAL.trim_end()) {
            None => refuse("the chat template does not print the last message"),
            Some(_) if !prompt.contains(last.trim()) => refuse("the chat template changes the last message"),
            // The space at the end is gone where a template trims.
            Some(at) if prompt[at..].starts_with(FINAL) => Ok(prompt[..at].to_owned()),
            Some(at) => Ok(prompt[..at].trim_end().to_owned()),
        }
    }

    /// Whether a content that is a list of parts is printed as their texts, which not every template does.
    fn prints_parts(&self) -> bool {
        *self.parts.get_or_init(|| {
            let part = [("type", "text"), ("text", FINAL)].map(|(k, v)| (k.to_owned(), Json::from(v)));
            let content = Json::List(vec![Json::Object(part.into())]);
            let fields = vec![("role".to_owned(), Json::from("user")), ("content".to_owned(), content)];
            let one = Conversation::new(vec![Message(Json::Object(fields))]);
            let prompt = self.run(&one, true, "", "", "").unwrap_or_default();
            prompt.contains(FINAL.trim_end()) && !prompt.contains("'text'") && !prompt.contains("\"text\"")
        })
    }

    fn run(
        &self,
        conversation: &Conversation,
        parts: bool,
        more: &str,
        bos_token: &str,
        eos_token: &str,
    ) -> Result<String> {
        let template = self.env.get_template(NAME).expect("added when constructed");
        let Conversation { messages, tools, documents, variables, add_generation_prompt, .. } = conversation;
        let said: usize = messages.iter().map(|m| m.0.size()).sum::<usize>()
            + tools
                .iter()
                .chain(documents)
                .chain(variables.iter().map(|(_, v)| v))
                .map(Json::size)
                .sum::<usize>();
        let mut out = Bounded { bytes: Vec::new(), limit: said.saturating_mul(2).saturating_add(MAX_OUTPUT) };
        let turn = |(i, m): (usize, &Message)| {
            m.for_template(parts, if i + 1 == messages.len() { more } else { "" })
        };
        // The user's variables may replace the special tokens, as in `transformers`, but nothing else.
        let mut all = vec![("bos_token", Value::from(bos_token)), ("eos_token", Value::from(eos_token))];
        all.extend(variables.iter().map(|(name, value)| (name.as_str(), value.value())));
        all.extend([
            ("messages", messages.iter().enumerate().map(turn).collect()),
            ("add_generation_prompt", Value::from(*add_generation_prompt)),
            ("tools", tools.as_ref().map_or(Value::from(()), Json::value)),
            ("documents", documents.as_ref().map_or(Value::from(()), Json::value)),
        ]);
        let context = Value::from_pairs(all);
        // The engine has panicked on slices of empty lists; a panic leaves none of our state inconsistent.
        let run = AssertUnwindSafe(|| template.render_captured_to(context, &mut out).map(drop));
        match catch_unwind(run) {
            Ok(result) => result.map_err(refusal)?,
            Err(_) => return Err(Error::Run("chat template: the template engine failed on it".into())),
        }
        String::from_utf8(out.bytes).map_err(|_| Error::Run("chat template: wrote no UTF-8".into()))
    }
}

/// The error of the template or the engine, in one sentence.
fn refusal(error: minijinja::Error) -> Error {
    let line = error.line().map(|l| format!(" (line {l})")).unwrap_or_default();
    let what = match error.kind() {
        ErrorKind::OutOfFuel => "it takes too many steps".to_owned(),
        ErrorKind::WriteFailure => "it writes too much".to_owned(),
        _ => one_sentence(&error),
    };
    Error::Run(format!("chat template{line}: {what}"))
}

fn one_sentence(error: &minijinja::Error) -> String {
    let detail = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    detail.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(500).collect()
}

/// Collects output up to a limit.
struct Bounded {
    bytes: Vec<u8>,
    limit: usize,
}

impl Write for Bounded {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if data.len() > self.limit - self.bytes.len() {
            return Err(io::Error::other("output limit"));
        }
        self.bytes.extend_from_slice(data);
        Ok(data.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The local time, formatted as C and Python do.
fn strftime_now(format: String) -> Result<String, minijinja::Error> {
    let bad =
        |what: &str| minijinja::Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {what}"));
    if format.is_empty() {
        return Ok(String::new());
    }
    let format = std::ffi::CString::new(format).map_err(|_| bad("the format has a NUL"))?;
    let mut buffer = [0u8; 512];
    // SAFETY: `time` takes a null pointer. `localtime_r` writes the `tm` it is given, for which all
    // zeroes is a valid value, and says so by not returning null. `strftime` reads a NUL-terminated
    // string and the `tm`, and writes at most `buffer.len()` bytes.
    let written = unsafe {
        let now = libc::time(std::ptr::null_mut());
        let mut local: libc::tm = std::mem::zeroed();
        if libc::localtime_r(&now, &mut local).is_null() {
            return Err(bad("the local time is unknown"));
        }
        libc::strftime(buffer.as_mut_ptr().cast(), buffer.len(), format.as_ptr(), &local)
    };
    if written == 0 {
        return Err(bad("the result is empty or too long"));
    }
    Ok(String::from_utf8_lossy(&buffer[..written]).into_owned())
}
