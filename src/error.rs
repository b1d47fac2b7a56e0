//! The typed errors of the library. Each message says which thing, what was found, what was wanted.

use std::path::PathBuf;

/// `Result` with the library's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong with files, users and machines. Broken invariants of our own panic instead.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused a file operation.
    #[error("{path}: {source}")]
    Io {
        /// The file concerned.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A model file is malformed: truncated, inconsistent, or not what it claims to be.
    #[error("{what}: {problem}")]
    Format {
        /// The file, tensor or metadata key.
        what: String,
        /// What was found and what was wanted.
        problem: String,
    },
    /// Well-formed, but something that this build cannot run (an unknown architecture, dtype...).
    #[error("{0}")]
    Unsupported(String),
    /// The caller asked for something contradictory or out of range (exit code 2 on the command line).
    #[error("{0}")]
    Usage(String),
    /// Something does not fit: memory, context, disk. Carries the numbers.
    #[error("{0}")]
    Capacity(String),
    /// A download or another outside service failed.
    #[error("{0}")]
    Network(String),
    /// An accelerator, its driver or a kernel: missing, refused, lost, failed.
    #[error("{what}: {problem}")]
    Device {
        /// The device, kernel or copy concerned.
        what: String,
        /// What happened, and the remedy if there is one.
        problem: String,
    },
    /// A service that takes no requests any more: it was shut down, its device is lost, or it panicked.
    #[error("{0}")]
    Unavailable(String),
    /// The operation was refused or failed for another reason.
    #[error("{0}")]
    Run(String),
}

impl Error {
    /// A malformed `what`, with the problem found.
    pub fn format(what: impl Into<String>, problem: impl Into<String>) -> Self {
        Error::Format { what: what.into(), problem: problem.into() }
    }
    /// An I/O error at `path`.
    pub fn io(path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Error::Io { path: path.into(), source }
    }
    /// A usage error.
    pub fn usage(msg: impl Into<String>) -> Self {
        Error::Usage(msg.into())
    }
}
