//! Text from the user: an argument, a file, or standard input.

use std::io::{IsTerminal, Read};
use std::path::Path;

use tandem::{Error, Result};

/// Most bytes of a text, beyond all contexts. Some files (`/dev/zero`, a pipe) never end.
const MOST: u64 = 256 << 20;

/// The prompt from `PROMPT`, `-f FILE` or standard input. A file's final line end is not part of it, nor is the byte
/// order mark that some editors put in front.
///
/// # Errors
/// If there is no prompt, or it is empty, not UTF-8, or unreadable.
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
/// If it cannot be read, is longer than 256 MiB, or is not UTF-8.
pub fn read_file(path: &Path) -> Result<String> {
    let mut bytes = Vec::new();
    let read = if path == Path::new("-") {
        std::io::stdin().lock().take(MOST + 1).read_to_end(&mut bytes)
    } else {
        std::fs::File::open(path).and_then(|f| f.take(MOST + 1).read_to_end(&mut bytes))
    };
    read.map_err(|e| Error::io(name(path), e))?;
    if bytes.len() as u64 > MOST {
        return Err(Error::format(name(path), format!("more than {MOST} bytes, too many for a text")));
    }
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        let likely = match e.as_bytes() {
            [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => "; it looks like UTF-16: convert it",
            _ => "",
        };
        Error::format(name(path), format!("not UTF-8 text (byte {at}){likely}"))
    })
}

/// The name of a file in messages.
pub fn name(path: &Path) -> String {
    if path == Path::new("-") { "standard input".into() } else { path.display().to_string() }
}

fn trimmed(mut text: String) -> String {
    if text.starts_with('\u{feff}') {
        text.remove(0);
    }
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
        assert_eq!(trimmed("\u{feff}a\u{feff}\n".into()), "a\u{feff}");
    }

    #[test]
    fn bad_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        assert!(matches!(read(None, Some(&path)), Err(Error::Io { .. })));
        std::fs::write(&path, b"ab\xff").unwrap();
        assert!(read(None, Some(&path)).unwrap_err().to_string().contains("not UTF-8 text (byte 2)"));
        std::fs::write(&path, b"\xff\xfea\0").unwrap();
        assert!(read(None, Some(&path)).unwrap_err().to_string().contains("UTF-16"));
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(MOST + 1).unwrap();
        assert!(read_file(&path).unwrap_err().to_string().contains("more than 268435456 bytes"));
        file.set_len(MOST).unwrap();
        assert_eq!(read_file(&path).unwrap().len() as u64, MOST);
        std::fs::write(&path, b"\n").unwrap();
        assert!(matches!(read(None, Some(&path)), Err(Error::Usage(_))));
    }
}
