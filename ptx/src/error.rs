//! Why a text is not a module.

/// A text that is not understood: a form that is unknown is an error, never a guess.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("PTX line {line}: {problem}: {text}")]
pub struct Error {
    /// Counted from 1.
    pub line: u32,
    /// What is wrong with it.
    pub problem: String,
    /// The line.
    pub text: String,
}

impl Error {
    pub(crate) fn new(source: &str, line: u32, problem: impl Into<String>) -> Error {
        Error { line, problem: problem.into(), text: line_of(source, line) }
    }
}

/// Line `line`, counted from 1, without the space around it.
pub(crate) fn line_of(source: &str, line: u32) -> String {
    let number = (line as usize).saturating_sub(1);
    source.lines().nth(number).unwrap_or_default().trim().to_owned()
}
