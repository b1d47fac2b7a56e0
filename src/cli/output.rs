//! Standard output: results, and nothing else. A reader that goes away is an error, never a panic.

use std::io::{ErrorKind, Write};

use anyhow::{Context, Result};
use serde::Serialize;

/// Standard output was closed: a pipe whose reader left, or before the start.
#[derive(Debug, thiserror::Error)]
#[error("stdout was closed before all of the output was written")]
pub struct Closed;

/// Writes `text` and flushes, so that a stream of tokens appears as it grows.
pub fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|e| match e.kind() {
        ErrorKind::BrokenPipe => anyhow::Error::new(Closed),
        _ => anyhow::Error::new(e).context("stdout"),
    })
}

/// [`print`] with a line end.
pub fn line(text: &str) -> Result<()> {
    print(&format!("{text}\n"))
}

/// One JSON object on one line.
pub fn json(value: &impl Serialize) -> Result<()> {
    line(&serde_json::to_string(value).context("the result as JSON")?)
}

/// Writes everything still buffered.
pub fn flush() -> Result<()> {
    print("")
}

/// Fails if the process was started without a standard output (`>&-`).
pub fn check_open() -> Result<()> {
    if at_start::CLOSED.load(std::sync::atomic::Ordering::Relaxed) {
        return Err(anyhow::Error::new(Closed));
    }
    Ok(())
}

/// Records whether standard output was closed at the start. Before `main`, Rust's runtime replaces a closed standard
/// stream by /dev/null, after which the loss of output cannot be detected; so this runs before the runtime.
#[cfg(target_os = "linux")]
mod at_start {
    use std::sync::atomic::{AtomicBool, Ordering};

    pub static CLOSED: AtomicBool = AtomicBool::new(false);

    extern "C" fn look() {
        // SAFETY: fcntl with F_GETFD takes no pointer and changes nothing.
        let closed = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) } == -1;
        CLOSED.store(closed, Ordering::Relaxed);
    }

    // SAFETY: .init_array holds pointers to functions that the loader calls before main; `look` needs
    // nothing of Rust's runtime: it makes one system call and stores to a static.
    #[used]
    #[unsafe(link_section = ".init_array")]
    static LOOK: extern "C" fn() = look;
}

#[cfg(not(target_os = "linux"))]
mod at_start {
    pub static CLOSED: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);
}
