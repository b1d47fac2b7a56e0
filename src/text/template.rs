//! Chat templates: turn a conversation into the prompt format that the model was trained to continue.
//!
//! Models carry Jinja2 programs for this. They come with the model file and are untrusted, so they run on minijinja
//! with bounds on steps, recursion and output, and see only the conversation. That bounds neither the memory nor the
//! time of a single step, so templates from a model file are rendered by [`super::sandbox`], which runs this code in a
//! process with limits. The environment is that of Hugging Face: `trim_blocks`, `lstrip_blocks`, Python's string
//! methods, `raise_exception`, `strftime_now`, `tojson`.

use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{AutoEscape, Environment, ErrorKind, UndefinedBehavior, context};
use serde::{Deserialize, Serialize};

use super::Tokenizer;
use crate::{Error, Result, small_file};

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, or another role that the template knows.
    pub role: String,
    /// The text of the turn.
    pub content: String,
}

impl Message {
    /// A message by its parts.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Message {
        Message { role: role.into(), content: content.into() }
    }
}

/// A compiled chat template. An untrusted one may take any amount of memory and time to compile and to render: see
/// [`super::Sandbox`].
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
}

/// ChatML, for models that have its tokens but no template.
const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + \
    message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}\
    {{ '<|im_start|>assistant\\n' }}{% endif %}";

const NAME: &str = "chat_template";
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
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
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
        env.add_filter("tojson", tojson);
        // minijinja can iterate over none but Python cannot, and templates test this before taking lengths.
        env.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
        let source = without_generation_tags(source);
        let compiled = std::thread::scope(|scope| {
            let compile = || env.add_template_owned(NAME, source);
            let thread = std::thread::Builder::new().stack_size(COMPILER_STACK).spawn_scoped(scope, compile);
            thread.map(|t| t.join())
        });
        let compiled =
            compiled.map_err(|e| Error::Run(format!("chat template: no thread to compile it: {e}")))?;
        let Ok(compiled) = compiled else {
            return Err(Error::format("chat template", "the template engine failed to compile it"));
        };
        compiled.map_err(|e| {
            let line = e.line().map(|l| format!(" in line {l}")).unwrap_or_default();
            Error::format("chat template", format!("does not compile{line}: {}", one_sentence(&e)))
        })?;
        Ok(ChatTemplate { env })
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
        let template = self.env.get_template(NAME).expect("added when constructed");
        let said: usize = messages.iter().map(|m| m.role.len() + m.content.len()).sum();
        let mut out = Bounded { bytes: Vec::new(), limit: said.saturating_mul(2).saturating_add(MAX_OUTPUT) };
        let turn = |m: &Message| context! { role => &m.role, content => &m.content };
        let context = context! {
            messages => messages.iter().map(turn).collect::<Vec<Value>>(),
            add_generation_prompt,
            bos_token,
            eos_token,
            tools => Value::from(()),
            documents => Value::from(()),
        };
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

/// Removes `{% generation %}` tags, which mark the assistant's text for training and only print their body.
fn without_generation_tags(source: &str) -> String {
    let tag = regex::Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}").expect("a constant pattern");
    tag.replace_all(source, |found: &regex::Captures| {
        let body = if found.get(2).is_some() { "endif" } else { "if true" };
        format!("{{%{} {body} {}%}}", &found[1], &found[3])
    })
    .into_owned()
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

/// `json.dumps(value, ensure_ascii=False, indent=indent)`: unlike minijinja's own, without escapes
/// for HTML.
fn tojson(value: Value, args: Kwargs) -> Result<Value, minijinja::Error> {
    let indent: Option<usize> = args.get("indent")?;
    // Python's other arguments; templates do not depend on them.
    let _: Option<bool> = args.get("ensure_ascii")?;
    let _: Option<bool> = args.get("sort_keys")?;
    args.assert_all_used()?;
    let mut out = String::new();
    let pad = indent.map(|n| " ".repeat(n.min(16)));
    write_json(&mut out, &value, pad.as_deref(), 0)?;
    Ok(Value::from(out))
}

fn write_json(
    out: &mut String,
    value: &Value,
    pad: Option<&str>,
    depth: usize,
) -> Result<(), minijinja::Error> {
    if depth > 64 {
        return Err(minijinja::Error::new(ErrorKind::InvalidOperation, "tojson: nested too deeply"));
    }
    let newline = |out: &mut String, depth: usize| {
        if let Some(pad) = pad {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(pad));
        }
    };
    let comma = if pad.is_some() { "," } else { ", " };
    let text = |s: &str| serde_json::to_string(s).expect("text is always JSON");
    match value.kind() {
        ValueKind::None | ValueKind::Undefined => out.push_str("null"),
        ValueKind::String => out.push_str(&text(value.as_str().unwrap_or_default())),
        ValueKind::Map => {
            out.push('{');
            let mut first = true;
            for key in value.try_iter()? {
                out.push_str(if std::mem::take(&mut first) { "" } else { comma });
                newline(out, depth + 1);
                out.push_str(&text(&key.to_string()));
                out.push_str(": ");
                write_json(out, &value.get_item(&key)?, pad, depth + 1)?;
            }
            if !first {
                newline(out, depth);
            }
            out.push('}');
        }
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            let mut first = true;
            for item in value.try_iter()? {
                out.push_str(if std::mem::take(&mut first) { "" } else { comma });
                newline(out, depth + 1);
                write_json(out, &item, pad, depth + 1)?;
            }
            if !first {
                newline(out, depth);
            }
            out.push(']');
        }
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        // As in JSON, except for numbers that JSON lacks.
        ValueKind::Number => out.push_str(&value.to_string()),
        other => {
            let problem = format!("tojson: {other} values have no JSON");
            return Err(minijinja::Error::new(ErrorKind::InvalidOperation, problem));
        }
    }
    if out.len() > MAX_OUTPUT {
        return Err(minijinja::Error::new(ErrorKind::InvalidOperation, "tojson: the result is too long"));
    }
    Ok(())
}
