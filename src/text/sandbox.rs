//! Renders untrusted chat templates in a separate process.
//!
//! A template is a program. The engine counts its steps and its output, but one step may double a string, fold
//! `"a" * 100000000` while compiling, or walk a list that was added to itself sixty times, which takes unbounded memory
//! and time within a single step. Only the kernel's limits on a process bound both, whatever the engine does. So the
//! program starts itself again, and the child sets its own limits ([`libc::RLIMIT_AS`], [`libc::RLIMIT_CPU`]), reads
//! the template and the conversation from standard input, writes the prompt to standard output, and exits; if a limit
//! ends it first, that is the error. docs/decisions/0013 weighs the alternatives.
//!
//! ```text
//! parent  Sandbox::render ── source, conversations (JSON) ──> stdin   child  serve_sandbox_if_asked
//!                         <── prompts or refusals (JSON) ── stdout         limits, compile, lower limit, render
//! ```

use std::borrow::Cow;
use std::io::{self, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde::{Deserialize, Serialize};

use super::template::COMPILER_STACK;
use super::{ChatTemplate, Conversation, Message};
use crate::{Error, Result};

/// First argument of a child.
pub const ARGUMENT: &str = "render-chat-template";

/// Address space for the program, its libraries, and what malloc reserves for a second thread.
const PROGRAM: u64 = 256 << 20;
/// Bytes for the data that a template makes. Rendering a real one takes less than 1 MiB in addition to its
/// conversation.
const WORK: u64 = 128 << 20;
/// Bytes for each byte of the request, which is parsed, put in a context, concatenated a few times, and written.
const PER_BYTE: u64 = 32;
/// Limit of processor time. A real template takes milliseconds; the engine's own bound on steps amounts to about one
/// second.
const SECONDS: u64 = 2;

/// Conversations that one child renders: starting it takes longer than rendering.
const TOGETHER: usize = 64;

/// The request to a child.
#[derive(Debug, Serialize, Deserialize)]
struct Request<'a> {
    source: Cow<'a, str>,
    conversations: Vec<Cow<'a, Conversation>>,
    bos_token: Cow<'a, str>,
    eos_token: Cow<'a, str>,
}

/// A child's answer for one conversation.
#[derive(Debug, Clone, Serialize, Deserialize)]
enum Answer {
    Prompt(String),
    /// [`Error::Format`]: its subject, and the problem.
    Malformed(String, String),
    /// [`Error::Run`].
    Refused(String),
}

/// Renders chat templates that may be hostile, in bounded memory and time.
#[derive(Debug, Clone)]
pub struct Sandbox {
    program: PathBuf,
}

impl Sandbox {
    /// A sandbox whose children run the current program. Its `main` must call [`serve_sandbox_if_asked`] before
    /// anything else.
    pub fn this_program() -> Sandbox {
        // Not `current_exe`: this link is valid even if the file has been replaced.
        Sandbox { program: "/proc/self/exe".into() }
    }

    /// A sandbox whose children run `program`, whose `main` calls [`serve_sandbox_if_asked`], as `tandem` does.
    pub fn of_program(program: impl Into<PathBuf>) -> Sandbox {
        Sandbox { program: program.into() }
    }

    /// Runs [`ChatTemplate::render`] for the template `source` in a child.
    ///
    /// # Errors
    /// As [`ChatTemplate::new`] and [`ChatTemplate::render`]; [`Error::Capacity`] if the template takes more memory
    /// or time than any real one; [`Error::Run`] if a second process cannot be started.
    pub fn render(
        &self,
        source: &str,
        messages: &[Message],
        add_generation_prompt: bool,
        bos_token: &str,
        eos_token: &str,
    ) -> Result<String> {
        let one = Conversation { add_generation_prompt, ..Conversation::new(messages.to_vec()) };
        self.render_one(source, &one, bos_token, eos_token)
    }

    fn render_one(
        &self,
        source: &str,
        one: &Conversation,
        bos_token: &str,
        eos_token: &str,
    ) -> Result<String> {
        let together = self.render_together(source, &[Cow::Borrowed(one)], (bos_token, eos_token));
        together.map(|mut one| one.remove(0))?
    }

    /// Runs [`ChatTemplate::render_conversation`] for many conversations, [`TOGETHER`] of them per process. If these take
    /// too much together, each is rendered in its own process, so that only the conversation that causes the error
    /// reports it.
    pub fn render_all(
        &self,
        source: &str,
        conversations: &[Conversation],
        bos_token: &str,
        eos_token: &str,
    ) -> Vec<Result<String>> {
        let mut all = Vec::with_capacity(conversations.len());
        for some in conversations.chunks(TOGETHER) {
            let borrowed: Vec<_> = some.iter().map(Cow::Borrowed).collect();
            match self.render_together(source, &borrowed, (bos_token, eos_token)) {
                Ok(answers) => all.extend(answers),
                Err(_) => all.extend(some.iter().map(|c| self.render_one(source, c, bos_token, eos_token))),
            }
        }
        all
    }

    /// # Errors
    /// If the process did not answer for all of them.
    fn render_together(
        &self,
        source: &str,
        conversations: &[Cow<'_, Conversation>],
        (bos_token, eos_token): (&str, &str),
    ) -> Result<Vec<Result<String>>> {
        let request = Request {
            source: source.into(),
            conversations: conversations.to_vec(),
            bos_token: bos_token.into(),
            eos_token: eos_token.into(),
        };
        let request = serde_json::to_vec(&request).expect("conversations are JSON");
        let no_child = |e: io::Error| Error::Run(format!("chat template: no process to render it in: {e}"));
        let output = exchange(&mut self.command(), &request).map_err(no_child)?;
        if !output.status.success() {
            return Err(cause_of_death(&output, request.len()));
        }
        let none = |why: String| Error::Run(format!("chat template: no answer about it: {why}"));
        let answers: Vec<Answer> = serde_json::from_slice(&output.stdout).map_err(|e| none(e.to_string()))?;
        if answers.len() != conversations.len() {
            return Err(none(format!("{} instead of {}", answers.len(), conversations.len())));
        }
        let result = |answer| match answer {
            Answer::Prompt(prompt) => Ok(prompt),
            Answer::Malformed(what, problem) => Err(Error::Format { what, problem }),
            Answer::Refused(why) => Err(Error::Run(why)),
        };
        Ok(answers.into_iter().map(result).collect())
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.arg(ARGUMENT).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // The child's last words are read here, and should be short.
        command.env("RUST_BACKTRACE", "0");
        command
    }
}

/// Sends a child its request and collects its output. The child reads everything before it writes anything.
fn exchange(command: &mut Command, request: &[u8]) -> io::Result<Output> {
    let mut child = command.spawn()?;
    let mut stdin = child.stdin.take().expect("piped");
    // The status of a child that dies while reading gives the reason.
    let written = stdin.write_all(request);
    drop(stdin);
    let output = child.wait_with_output()?;
    match written {
        Err(e) if output.status.success() => Err(e),
        _ => Ok(output),
    }
}

fn cause_of_death(output: &Output, request: usize) -> Error {
    let said = String::from_utf8_lossy(&output.stderr);
    match output.status.signal() {
        Some(libc::SIGXCPU) => {
            Error::Capacity(format!("chat template: it takes more than {SECONDS} s to render"))
        }
        // Rust's runtime aborts in both cases, and its message says which.
        Some(libc::SIGABRT | libc::SIGSEGV) if said.contains("overflowed its stack") => {
            Error::Capacity("chat template: it nests too deeply".into())
        }
        Some(libc::SIGABRT) if said.contains("memory allocation of") => {
            let limit = memory_limit(request) >> 20;
            Error::Capacity(format!("chat template: it takes more than {limit} MiB of memory to render"))
        }
        _ => Error::Run(format!("chat template: the process that rendered it failed ({})", output.status)),
    }
}

/// Bytes of address space for rendering a request of this many bytes.
fn memory_limit(request: usize) -> u64 {
    PROGRAM + WORK + PER_BYTE * request as u64
}

/// The child's half: if this process was started to render a template, does so and exits; else returns at once.
pub fn serve_sandbox_if_asked() {
    if std::env::args_os().nth(1).is_none_or(|a| a != ARGUMENT) {
        return;
    }
    // A panic is turned into an answer; nobody reads its report.
    std::panic::set_hook(Box::new(|_| ()));
    let answers = serde_json::to_vec(&serve()).expect("text is JSON");
    std::process::exit(if io::stdout().write_all(&answers).is_ok() { 0 } else { 1 });
}

/// The answer for one conversation.
fn answer(rendered: Result<String>) -> Answer {
    match rendered {
        Ok(prompt) => Answer::Prompt(prompt),
        Err(Error::Format { what, problem }) => Answer::Malformed(what, problem),
        Err(other) => Answer::Refused(other.to_string()),
    }
}

fn serve() -> Vec<Answer> {
    // The request needs no bound: the parent already holds it in memory.
    let mut bytes = Vec::new();
    if let Err(error) = io::stdin().lock().read_to_end(&mut bytes) {
        return vec![answer(Err(Error::Run(format!("chat template: {error}"))))];
    }
    let request: Request = match serde_json::from_slice(&bytes) {
        Ok(request) => request,
        Err(error) => return vec![answer(Err(Error::Run(format!("chat template: no request: {error}"))))],
    };
    let template = match limited(&request, bytes.len()) {
        Ok(template) => template,
        // An error of the template applies to every conversation.
        Err(error) => return vec![answer(Err(error)); request.conversations.len()],
    };
    let Request { conversations, bos_token, eos_token, .. } = &request;
    let render = |one: &Cow<'_, Conversation>| template.render_conversation(one, bos_token, eos_token);
    conversations.iter().map(|one| answer(render(one))).collect()
}

/// Compiles the template within limits, then lowers the memory limit for rendering.
fn limited(request: &Request<'_>, bytes: usize) -> Result<ChatTemplate> {
    let io = |e: io::Error| Error::Run(format!("chat template: {e}"));
    let limit = memory_limit(bytes);
    set_limit(libc::RLIMIT_CORE, 0).map_err(io)?;
    set_limit(libc::RLIMIT_CPU, SECONDS).map_err(io)?;
    set_limit(libc::RLIMIT_AS, limit + COMPILER_STACK as u64).map_err(io)?;
    let template = ChatTemplate::new(&request.source)?;
    set_limit(libc::RLIMIT_AS, limit).map_err(io)?;
    Ok(template)
}

#[cfg(target_env = "gnu")]
type Resource = libc::__rlimit_resource_t;
#[cfg(not(target_env = "gnu"))]
type Resource = libc::c_int;

/// Lowers this process's limit of a resource, unless it is already lower.
fn set_limit(resource: Resource, amount: u64) -> io::Result<()> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: getrlimit writes one rlimit through the pointer to one, and nothing else.
    if unsafe { libc::getrlimit(resource, &mut limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    limit.rlim_cur = limit.rlim_cur.min(amount);
    // SAFETY: setrlimit reads one rlimit through the pointer to one. Limits only make later calls fail, which all
    // callers handle; no memory of this process is touched.
    if unsafe { libc::setrlimit(resource, &limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
