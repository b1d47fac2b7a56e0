//! What the user writes: with line editing and a history at a terminal, line by line elsewhere.

use std::io::{BufRead, IsTerminal};

use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use tandem::{Error, Result};

/// Begins and ends a text of several lines.
const QUOTES: &str = "\"\"\"";

/// Most bytes of a turn.
const MOST: usize = 16 << 20;

/// What was read.
pub enum Typed {
    /// A turn, or a command.
    Text(String),
    /// Ctrl-C, at a terminal.
    Interrupted,
    /// There is no more.
    End,
}

/// See the [module](self).
pub struct LineReader {
    editor: Option<DefaultEditor>,
}

impl LineReader {
    /// A reader of standard input.
    ///
    /// # Errors
    /// A terminal that cannot be used.
    pub fn new() -> Result<LineReader> {
        let terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
        let editor = terminal.then(DefaultEditor::new).transpose().map_err(|e| failed(&e))?;
        Ok(LineReader { editor })
    }

    /// Whether somebody sits there.
    pub fn is_terminal(&self) -> bool {
        self.editor.is_some()
    }

    /// The next turn or command.
    ///
    /// # Errors
    /// What cannot be read, is not UTF-8, or is too long.
    pub fn next(&mut self) -> Result<Typed> {
        let first = match self.line("> ")? {
            Typed::Text(line) => line,
            other => return Ok(other),
        };
        let text = match first.trim_start().strip_prefix(QUOTES) {
            None => first,
            Some(rest) => match self.several(rest)? {
                Typed::Text(text) => text,
                other => return Ok(other),
            },
        };
        if let Some(editor) = &mut self.editor {
            // A history that cannot grow is no reason to stop.
            let _ = editor.add_history_entry(&text);
        }
        Ok(Typed::Text(text))
    }

    /// The lines up to the closing quotes.
    fn several(&mut self, first: &str) -> Result<Typed> {
        let mut text = first.to_owned();
        while !text.trim_end().ends_with(QUOTES) {
            match self.line(". ")? {
                Typed::Text(line) => text = text + "\n" + &line,
                // What was begun is for the model as far as it goes.
                Typed::End => return Ok(Typed::Text(text)),
                Typed::Interrupted => return Ok(Typed::Interrupted),
            }
            if text.len() > MOST {
                return Err(Error::usage(format!("a text of more than {} MiB", MOST >> 20)));
            }
        }
        let text = text.trim_end().strip_suffix(QUOTES).expect("just seen");
        Ok(Typed::Text(text.trim_matches('\n').to_owned()))
    }

    fn line(&mut self, prompt: &str) -> Result<Typed> {
        match &mut self.editor {
            Some(editor) => match editor.readline(prompt) {
                Ok(line) => Ok(Typed::Text(line)),
                Err(ReadlineError::Interrupted) => Ok(Typed::Interrupted),
                Err(ReadlineError::Eof) => Ok(Typed::End),
                Err(e) => Err(failed(&e)),
            },
            None => plain(&mut std::io::stdin().lock()),
        }
    }
}

/// A line without its end.
fn plain(from: &mut impl BufRead) -> Result<Typed> {
    let mut line = Vec::new();
    let mut limited = std::io::Read::take(from, MOST as u64 + 1);
    let n = limited.read_until(b'\n', &mut line).map_err(|e| failed(&e))?;
    if n == 0 {
        return Ok(Typed::End);
    }
    if n > MOST {
        return Err(Error::usage(format!("a line of more than {} MiB", MOST >> 20)));
    }
    let line = String::from_utf8(line).map_err(|_| Error::usage("standard input: not UTF-8"))?;
    Ok(Typed::Text(line.trim_end_matches(['\n', '\r']).to_owned()))
}

fn failed(error: &dyn std::fmt::Display) -> Error {
    Error::Run(format!("standard input: {error}"))
}
