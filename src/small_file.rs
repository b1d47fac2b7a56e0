//! Small files that are read whole: regular files of bounded size, and JSON as Python writes and reads it.
//!
//! A model folder comes from a stranger and a cache may be damaged, so a file may be a pipe that nobody writes to, a device
//! without an end, or a hole of terabytes. Everything the program reads whole, other than what the user pipes into it, is read
//! here.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read};
use std::path::Path;

use serde_json::Value as Json;

use crate::{Error, Result};

/// Opens a regular file. Anything else is refused without being read, and without waiting for its other end.
///
/// # Errors
/// [`Error::Io`]; [`Error::Format`] for what is not a regular file.
pub fn open(path: &Path) -> Result<File> {
    let io = |e| Error::io(path, e);
    let refused = |kind: std::fs::FileType| {
        use std::os::unix::fs::FileTypeExt;
        let what = match () {
            () if kind.is_dir() => "a folder",
            () if kind.is_fifo() => "a pipe",
            () if kind.is_socket() => "a socket",
            () => "a device",
        };
        Error::format(path.display().to_string(), format!("{what}, not a regular file"))
    };
    // Before it is opened, since opening a device may do something; and after, since a name may change its meaning.
    let kind = std::fs::metadata(path).map_err(io)?.file_type();
    if !kind.is_file() {
        return Err(refused(kind));
    }
    let mut options = OpenOptions::new();
    options.read(true);
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK);
    let file = options.open(path).map_err(io)?;
    let kind = file.metadata().map_err(io)?.file_type();
    if kind.is_file() { Ok(file) } else { Err(refused(kind)) }
}

/// The bytes of a regular file of at most `most` bytes. `None` if there is no such file.
///
/// # Errors
/// As [`open`]; [`Error::Format`] for a longer file.
pub fn read(path: &Path, most: u64) -> Result<Option<Vec<u8>>> {
    let file = match open(path) {
        Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    let io = |e| Error::io(path, e);
    let length = file.metadata().map_err(io)?.len();
    let too_long = |n: u64| {
        Err(Error::format(path.display().to_string(), format!("{n} bytes, at most {most} are wanted")))
    };
    if length > most {
        return too_long(length);
    }
    let mut bytes = Vec::with_capacity(length as usize);
    // It may have grown meanwhile, or be a file of the kernel, which has no length.
    file.take(most + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > most { too_long(bytes.len() as u64) } else { Ok(Some(bytes)) }
}

/// [`read`] for text in UTF-8, without a byte order mark.
///
/// # Errors
/// As [`read`]; [`Error::Format`] for other bytes.
pub fn read_text(path: &Path, most: u64) -> Result<Option<String>> {
    let Some(bytes) = read(path, most)? else { return Ok(None) };
    match String::from_utf8(bytes) {
        Ok(mut text) => {
            if text.starts_with('\u{feff}') {
                text.drain(..'\u{feff}'.len_utf8());
            }
            Ok(Some(text))
        }
        Err(e) => {
            let at = e.utf8_error().valid_up_to();
            Err(Error::format(path.display().to_string(), format!("not UTF-8 text (byte {at})")))
        }
    }
}

/// The error of a file that has to be there.
pub fn missing(path: &Path) -> Error {
    Error::io(path, ErrorKind::NotFound.into())
}

/// Parses JSON as Python's `json` does, which wrote most files of models: `NaN`, `Infinity` and `-Infinity` are numbers, and
/// so are numbers too large for one. Each becomes a text, `"NaN"`, `"Infinity"` or `"-Infinity"`, which no reader of numbers takes: whoever
/// uses the value reports it, and whoever does not is not stopped by it. Of equal keys the last counts. A byte order mark is left out.
///
/// # Errors
/// What is wrong with it, and where.
pub fn parse_json(bytes: &[u8]) -> Result<Json, serde_json::Error> {
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    serde_json::from_slice(bytes).or_else(|error| match quote_non_finite(bytes) {
        Some(quoted) => serde_json::from_slice(&quoted),
        None => Err(error),
    })
}

/// The same JSON with quotes around numbers that are not finite; `None` if there are none.
fn quote_non_finite(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(bytes.len() + 16);
    let (mut at, mut found) = (0, false);
    while let Some(&first) = bytes.get(at) {
        let rest = &bytes[at..];
        let len = match first {
            b'"' => string_length(rest),
            b'-' | b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' | b'+' | b'.' => {
                let part = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'+' | b'.');
                rest.iter().position(|b| !part(b)).unwrap_or(rest.len())
            }
            _ => 1,
        };
        let token = &rest[..len];
        let number = |text: &str| text.parse::<f64>().ok().filter(|x| x.is_infinite());
        let word = match token {
            b"NaN" => Some("\"NaN\""),
            b"Infinity" => Some("\"Infinity\""),
            b"-Infinity" => Some("\"-Infinity\""),
            // `parse` also takes words, which are no JSON.
            _ if token.last().is_some_and(u8::is_ascii_digit) => std::str::from_utf8(token)
                .ok()
                .and_then(number)
                .map(|x| if x > 0.0 { "\"Infinity\"" } else { "\"-Infinity\"" }),
            _ => None,
        };
        found |= word.is_some();
        out.extend_from_slice(word.map_or(token, str::as_bytes));
        at += len;
    }
    found.then_some(out)
}

/// Bytes of the string at the beginning, quotes included; all, if it does not end.
fn string_length(bytes: &[u8]) -> usize {
    let mut at = 1;
    while let Some(b) = bytes.get(at) {
        match b {
            b'"' => return at + 1,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    bytes.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_no_regular_file_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let pipe = std::ffi::CString::new(at("pipe").to_str().unwrap()).unwrap();
        // SAFETY: mkfifo reads a string that ends in NUL.
        assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        std::fs::create_dir(at("folder")).unwrap();
        std::os::unix::fs::symlink("/dev/zero", at("link")).unwrap();
        for (name, what) in
            [("pipe", "a pipe"), ("socket", "a socket"), ("folder", "a folder"), ("link", "a device")]
        {
            let error = read(&at(name), 10).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(what), "{error}");
        }
        assert!(read(&at("absent"), 10).unwrap().is_none());
    }

    #[test]
    fn the_bound_is_exact_and_a_hole_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let file = File::create(&path).unwrap();
        file.set_len(10).unwrap();
        assert_eq!(read(&path, 10).unwrap().unwrap().len(), 10);
        assert!(read(&path, 9).unwrap_err().to_string().contains("10 bytes, at most 9"));
        file.set_len(5 << 30).unwrap();
        assert!(read_text(&path, 1 << 20).unwrap_err().to_string().contains("5368709120 bytes"));
        std::fs::write(&path, b"\xef\xbb\xbfa\n").unwrap();
        assert_eq!(read_text(&path, 10).unwrap().unwrap(), "a\n");
        std::fs::write(&path, b"ab\xff").unwrap();
        assert!(read_text(&path, 10).unwrap_err().to_string().contains("not UTF-8 text (byte 2)"));
    }

    /// As `json.loads` of Python 3.11 reads the same texts, with texts for numbers that are not finite.
    #[test]
    fn numbers_of_python() {
        let parse = |text: &str| parse_json(text.as_bytes());
        assert_eq!(
            parse(r#"{"a": NaN, "b": [Infinity, -Infinity, 1e400, -1e999, 2]}"#).unwrap(),
            json!({"a": "NaN", "b": ["Infinity", "-Infinity", "Infinity", "-Infinity", 2]})
        );
        assert_eq!(
            parse(r#"{"NaN": "x NaN : Infinity \" NaN", "y": NaN}"#).unwrap(),
            json!({"NaN": "x NaN : Infinity \" NaN", "y": "NaN"})
        );
        assert_eq!(parse("\u{feff}{\"a\": 1, \"a\": 2}").unwrap(), json!({"a": 2}));
        assert_eq!(parse(&format!("[1{}]", "0".repeat(400))).unwrap(), json!(["Infinity"]));
        for bad in [
            "{\"a\": nan}",
            "[inf]",
            "[+Infinity]",
            "[--Infinity]",
            "[NaNs]",
            "[Infinity1]",
            "{\"a\": NaN",
            "\"NaN",
            "[infinity]",
            "[1e]",
            "NaN\\",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
