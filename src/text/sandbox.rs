//! Chat templates of strangers, each rendered in a process of its own.
//!
//! A template is a program. The engine counts its steps and its output, but one step may double a string, fold
//! `"a" * 100000000` while compiling, or walk a list that was added to itself sixty times: memory and time without
//! end, inside of one step. What bounds both, whatever the engine does, is the kernel's account of a process. So the
//! program starts itself again, the child sets its own limits ([`libc::RLIMIT_AS`], [`libc::RLIMIT_CPU`]), takes the
//! template and the conversation from standard input, writes the prompt to standard output, and ends; when a limit
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
use super::{ChatTemplate, Message};
use crate::{Error, Result};

/// First argument of a child.
pub const ARGUMENT: &str = "render-chat-template";

/// Address space for the program, its libraries, and what malloc reserves for a second thread.
const PROGRAM: u64 = 256 << 20;
/// For what a template makes. A rendering of a real one takes less than 1 MiB beside its conversation.
const WORK: u64 = 128 << 20;
/// For each byte of the request: it is parsed, put in a context, concatenated a few times, written.
const PER_BYTE: u64 = 32;
/// A real template takes milliseconds; the engine's own bound on steps is worth about one second.
const SECONDS: u64 = 2;

/// Conversations that one child renders: to start it takes longer than to render.
const TOGETHER: usize = 64;

/// What a child is asked.
#[derive(Debug, Serialize, Deserialize)]
struct Request<'a> {
    source: Cow<'a, str>,
    conversations: Vec<Cow<'a, [Message]>>,
    add_generation_prompt: bool,
    bos_token: Cow<'a, str>,
    eos_token: Cow<'a, str>,
}

/// What it answers, for each conversation.
#[derive(Debug, Clone, Serialize, Deserialize)]
enum Answer {
    Prompt(String),
    /// [`Error::Format`]: what, and the problem.
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
    /// Children run the program that is running now. Its `main` has to call [`serve_sandbox_if_asked`] before anything else.
    pub fn this_program() -> Sandbox {
        // Not `current_exe`: this one exists even if the file was replaced since.
        Sandbox { program: "/proc/self/exe".into() }
    }

    /// Children run `program`, whose `main` calls [`serve_sandbox_if_asked`]; `tandem` is one.
    pub fn of_program(program: impl Into<PathBuf>) -> Sandbox {
        Sandbox { program: program.into() }
    }

    /// [`ChatTemplate::render`] of the template `source`.
    ///
    /// # Errors
    /// As [`ChatTemplate::new`] and [`ChatTemplate::render`]; [`Error::Capacity`] if the template takes more memory
    /// or time than any real one; [`Error::Run`] if there can be no second process.
    pub fn render(
        &self,
        source: &str,
        messages: &[Message],
        add_generation_prompt: bool,
        bos_token: &str,
        eos_token: &str,
    ) -> Result<String> {
        let together = self.render_together(
            source,
            &[Cow::Borrowed(messages)],
            add_generation_prompt,
            (bos_token, eos_token),
        );
        together.map(|mut one| one.remove(0))?
    }

    /// The same for many conversations: a process renders [`TOGETHER`] of them. Where they take too much together, each has
    /// one of its own, so that the error is that of the conversation which causes it.
    pub fn render_all(
        &self,
        source: &str,
        conversations: &[Vec<Message>],
        add_generation_prompt: bool,
        bos_token: &str,
        eos_token: &str,
    ) -> Vec<Result<String>> {
        let mut all = Vec::with_capacity(conversations.len());
        for some in conversations.chunks(TOGETHER) {
            let borrowed: Vec<_> = some.iter().map(Cow::from).collect();
            let tokens = (bos_token, eos_token);
            match self.render_together(source, &borrowed, add_generation_prompt, tokens) {
                Ok(answers) => all.extend(answers),
                Err(_) => all.extend(some.iter().map(|messages| {
                    self.render(source, messages, add_generation_prompt, bos_token, eos_token)
                })),
            }
        }
        all
    }

    /// # Errors
    /// The process gave no answer for all of them.
    fn render_together(
        &self,
        source: &str,
        conversations: &[Cow<'_, [Message]>],
        add_generation_prompt: bool,
        (bos_token, eos_token): (&str, &str),
    ) -> Result<Vec<Result<String>>> {
        let request = Request {
            source: source.into(),
            conversations: conversations.to_vec(),
            add_generation_prompt,
            bos_token: bos_token.into(),
            eos_token: eos_token.into(),
        };
        let request = serde_json::to_vec(&request).expect("text and a bool are JSON");
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
        // What it says when it dies is read here, and short.
        command.env("RUST_BACKTRACE", "0");
        command
    }
}

/// Hands a child its request and collects what it says. It reads everything before it writes anything.
fn exchange(command: &mut Command, request: &[u8]) -> io::Result<Output> {
    let mut child = command.spawn()?;
    let mut stdin = child.stdin.take().expect("piped");
    // A child that dies while it reads tells why by its status.
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
        // Rust's runtime aborts for both, and says for which.
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
    // A panic is an answer; its report is not read.
    std::panic::set_hook(Box::new(|_| ()));
    let answers = serde_json::to_vec(&serve()).expect("text is JSON");
    std::process::exit(if io::stdout().write_all(&answers).is_ok() { 0 } else { 1 });
}

/// What is said of one conversation.
fn answer(rendered: Result<String>) -> Answer {
    match rendered {
        Ok(prompt) => Answer::Prompt(prompt),
        Err(Error::Format { what, problem }) => Answer::Malformed(what, problem),
        Err(other) => Answer::Refused(other.to_string()),
    }
}

fn serve() -> Vec<Answer> {
    // The parent's own request needs no bound: it has it in memory too.
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
        // The template's fault: each conversation's.
        Err(error) => return vec![answer(Err(error)); request.conversations.len()],
    };
    let Request { conversations, add_generation_prompt, bos_token, eos_token, .. } = &request;
    let render = |messages: &Cow<'_, [Message]>| {
        template.render(messages, *add_generation_prompt, bos_token, eos_token)
    };
    conversations.iter().map(|messages| answer(render(messages))).collect()
}

/// The template, compiled within limits; rendering has less memory.
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

/// Lowers what this process may use of a resource, unless less was allowed already.
fn set_limit(resource: Resource, amount: u64) -> io::Result<()> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: getrlimit writes one rlimit through the pointer to one, and nothing else.
    if unsafe { libc::getrlimit(resource, &mut limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    limit.rlim_cur = limit.rlim_cur.min(amount);
    // SAFETY: setrlimit reads one rlimit through the pointer to one. Limits change what later calls answer, which
    // has to be right for any of them; no memory of this process is touched.
    if unsafe { libc::setrlimit(resource, &limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
