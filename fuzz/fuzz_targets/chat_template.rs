//! A chat template is a program from a stranger: whatever it is, an answer or one error, in bounded memory and time.
//!
//! First in a process with limits, which is how the program does it; what ended well there runs here as well, where
//! the fuzzer sees which code it reaches.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tandem::text::{ChatTemplate, Message, Sandbox, serve_sandbox_if_asked};
use tandem::{Error, Result};

/// More than a child may map: program, work, compiler's stack.
const MOST_MEMORY: i64 = 700 << 20;

fuzz_target!(init: serve_sandbox_if_asked(), |source: &str| {
    let messages = [Message::new("system", "Be brief."), Message::new("user", "Hi"), Message::new("assistant", "")];
    let (messages, prompt) = (&messages[..source.len() % 4], source.len() % 8 < 4);
    let there = Sandbox::this_program().render(source, messages, prompt, "<s>", "</s>");
    assert!(children_peak() < MOST_MEMORY, "{} bytes", children_peak());
    match &there {
        Err(Error::Capacity(_)) => return,
        // A panic of the engine's, which only the child may show.
        Err(Error::Run(why)) if why.contains("failed") => return,
        _ => {}
    }
    let here = ChatTemplate::new(source).and_then(|t| t.render(messages, prompt, "<s>", "</s>"));
    // A clock may tick in between.
    if !source.contains("strftime_now") {
        let words = |r: &Result<String>| r.as_ref().map(String::clone).map_err(ToString::to_string);
        assert_eq!(words(&here), words(&there));
    }
});

/// Most memory that any child had, in bytes.
fn children_peak() -> i64 {
    // SAFETY: an rusage of zeroes is a valid one, and getrusage writes one through the pointer.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage), 0);
        usage.ru_maxrss * 1024
    }
}
