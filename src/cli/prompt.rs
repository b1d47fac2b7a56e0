//! Text that users hand over: an argument, a file, or standard input.

use std::io::{IsTerminal, Read};
use std::path::Path;

use tandem::{Error, Result};

/// The prompt from `PROMPT`, `-f FILE` or standard input. A final line end of a file is not part of it.
///
/// # Errors
/// There is none, it is empty, it is not UTF-8, or it cannot be read.
pub fn read(prompt: Option<&str>, file: Option<&Path>) -> Result<String> {
    let text = match (prompt, file) {
        (Some(text), _) => text.to_owned(),
        (None, Some(path)) => trimmed(read_file(path)?),
        (None, None) if std::io::stdin().is_terminal() => {
            return Err(Error::usage(
                "no prompt: give it as an argument, with -f FILE, or on standard input",
            ));
        }
        (None, None) => trimmed(read_file(Path::new("-"))?),
    };
    if text.is_empty() {
        return Err(Error::usage("the prompt is empty"));
    }
    Ok(text)
}

/// The text of a file; `-` is standard input.
///
/// # Errors
/// It cannot be read, or is not UTF-8.
pub fn read_file(path: &Path) -> Result<String> {
    let mut bytes = Vec::new();
    let (name, read) = if path == Path::new("-") {
        (Path::new("standard input"), std::io::stdin().lock().read_to_end(&mut bytes))
    } else {
        (path, std::fs::File::open(path).and_then(|mut f| f.read_to_end(&mut bytes)))
    };
    read.map_err(|e| Error::io(name, e))?;
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Error::format(name.display().to_string(), format!("not UTF-8 text (byte {at})"))
    })
}

fn trimmed(mut text: String) -> String {
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_end_is_not_part_of_the_prompt() {
        assert_eq!(trimmed("a\n\r\n".into()), "a\n");
        assert_eq!(trimmed("a".into()), "a");
    }

    #[test]
    fn bad_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        assert!(matches!(read(None, Some(&path)), Err(Error::Io { .. })));
        std::fs::write(&path, b"ab\xff").unwrap();
        assert!(read(None, Some(&path)).unwrap_err().to_string().contains("not UTF-8 text (byte 2)"));
        std::fs::write(&path, b"\n").unwrap();
        assert!(matches!(read(None, Some(&path)), Err(Error::Usage(_))));
    }
}
