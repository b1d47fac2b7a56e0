//! Lines and fields of a CSV file, in memory that does not grow with the file.
//!
//! Fields are separated by commas; a field in double quotes may contain commas, and two double quotes stand for one. A quoted
//! field ends on its line.

use std::borrow::Cow;
use std::io::{self, BufRead, BufReader, Read};

/// Bytes of a line. What is longer is no table of lengths.
pub const LONGEST: usize = 64 << 10;

/// Bytes of a file: 256 a request. Some files (`/dev/zero`, a pipe) never end.
pub const LARGEST: u64 = 1 << 30;

/// A line that is longer than [`LONGEST`].
#[derive(Debug, PartialEq, Eq)]
pub struct TooLong;

/// Why there are no more lines.
#[derive(Debug)]
pub enum Broken {
    /// The file cannot be read.
    Io(io::Error),
    /// It goes on behind [`LARGEST`].
    TooLarge,
}

/// Reads lines.
pub struct Lines<R> {
    from: BufReader<R>,
    line: Vec<u8>,
    bytes: u64,
    most: u64,
}

impl<R: Read> Lines<R> {
    /// The lines of `from`.
    pub fn new(from: R) -> Lines<R> {
        Lines { from: BufReader::new(from), line: Vec::new(), bytes: 0, most: LARGEST }
    }

    /// Bytes read so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The next line without its end; `None` at the end of the file. A line that is too long is passed over.
    pub fn next(&mut self) -> Result<Option<Result<&[u8], TooLong>>, Broken> {
        self.read(true)
    }

    /// As [`Lines::next`], of a line without which the others are of no use: one that is too long is not read to its end.
    pub fn header(&mut self) -> Result<Option<Result<&[u8], TooLong>>, Broken> {
        self.read(false)
    }

    fn read(&mut self, to_the_end: bool) -> Result<Option<Result<&[u8], TooLong>>, Broken> {
        self.line.clear();
        let mut long = false;
        loop {
            let buffer = match self.from.fill_buf() {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                other => other.map_err(Broken::Io)?,
            };
            if self.bytes >= self.most && !buffer.is_empty() {
                return Err(Broken::TooLarge);
            }
            let end = buffer.iter().position(|&b| b == b'\n');
            let taken = &buffer[..end.unwrap_or(buffer.len())];
            let (used, last) = (taken.len() + usize::from(end.is_some()), end.is_some() || buffer.is_empty());
            if self.line.len() + taken.len() > LONGEST {
                long = true;
            } else if !long {
                self.line.extend_from_slice(taken);
            }
            self.from.consume(used);
            self.bytes += used as u64;
            if last || long && !to_the_end {
                if used == 0 && self.line.is_empty() && !long {
                    return Ok(None);
                }
                break;
            }
        }
        if long {
            return Ok(Some(Err(TooLong)));
        }
        Ok(Some(Ok(self.line.strip_suffix(b"\r").unwrap_or(&self.line))))
    }
}

/// The fields of a line, without the quotes and blanks around them. What is no UTF-8 is shown as U+FFFD.
pub fn fields(line: &[u8]) -> impl Iterator<Item = Cow<'_, str>> {
    let mut rest = Some(line);
    std::iter::from_fn(move || {
        let line = rest?;
        let mut quoted = false;
        let end = line.iter().position(|&b| {
            quoted ^= b == b'"';
            b == b',' && !quoted
        });
        let field = &line[..end.unwrap_or(line.len())];
        rest = end.map(|at| &line[at + 1..]);
        let field = field.trim_ascii();
        Some(match field.strip_prefix(b"\"").and_then(|f| f.strip_suffix(b"\"")) {
            Some(inner) => Cow::Owned(String::from_utf8_lossy(inner).replace("\"\"", "\"")),
            None => String::from_utf8_lossy(field),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &[u8]) -> Vec<Option<String>> {
        let mut lines = Lines::new(text);
        let mut out = Vec::new();
        while let Some(line) = lines.next().unwrap() {
            out.push(line.ok().map(|l| String::from_utf8_lossy(l).into_owned()));
        }
        assert_eq!(lines.bytes(), text.len() as u64);
        out
    }

    #[test]
    fn ends_of_lines() {
        let some = |l: &[&str]| l.iter().map(|l| Some((*l).to_owned())).collect::<Vec<_>>();
        assert_eq!(lines(b""), some(&[]));
        assert_eq!(lines(b"a\nb"), some(&["a", "b"]));
        assert_eq!(lines(b"a\r\n\nb\n"), some(&["a", "", "b"]));
    }

    #[test]
    fn a_line_that_is_too_long_is_passed_over_and_not_kept() {
        let mut text = vec![b'x'; 10 * LONGEST];
        text.extend(b"\nnext\n");
        assert_eq!(lines(&text), [None, Some("next".into())]);
        let mut reader = Lines::new(&text[..]);
        assert_eq!(reader.next().unwrap(), Some(Err(TooLong)));
        assert!(reader.line.capacity() <= 2 * LONGEST);
        assert_eq!(lines(&text[..10 * LONGEST]), [None]);
        let exact = vec![b'x'; LONGEST];
        assert_eq!(lines(&exact).len(), 1);
        assert!(lines(&exact)[0].is_some());
    }

    #[test]
    fn files_that_never_end_do() {
        let mut zeros = Lines::new(io::repeat(0));
        assert_eq!(zeros.header().unwrap(), Some(Err(TooLong)));
        assert!(zeros.bytes() < 2 * LONGEST as u64, "{} bytes of a header", zeros.bytes());
        let most = 4 * LONGEST as u64;
        zeros.most = most;
        assert!(matches!(zeros.next(), Err(Broken::TooLarge)));
        let mut rows = Lines { most, ..Lines::new(io::repeat(b'\n')) };
        assert_eq!((0..).find(|_| rows.next().is_err()), Some(most));
        // What ends there is whole.
        let mut whole = Lines { most, ..Lines::new(io::repeat(b'x').take(most)) };
        assert_eq!(whole.next().unwrap(), Some(Err(TooLong)));
        assert_eq!(whole.next().unwrap(), None);
    }

    #[test]
    fn fields_with_and_without_quotes() {
        let of = |l: &str| fields(l.as_bytes()).map(Cow::into_owned).collect::<Vec<_>>();
        assert_eq!(of("a, b ,,c"), ["a", "b", "", "c"]);
        assert_eq!(of("\"a,b\",\"c \"\"d\"\"\""), ["a,b", "c \"d\""]);
        assert_eq!(of("\"open,1"), ["\"open,1"]);
        assert_eq!(of(""), [""]);
    }
}
