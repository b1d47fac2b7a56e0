//! Traces: CSV files or JSON lines with the lengths of requests, and the times of their arrivals if they are known.
//!
//! ```text
//! column       known by the names (in any case)
//! prompt       ContextTokens, input_tokens, num_prefill_tokens, prompt_tokens, Request tokens, input_length
//! answer       GeneratedTokens, output_tokens, num_decode_tokens, completion_tokens, Response tokens, output_length
//! time         TIMESTAMP, arrived_at, arrival_time: seconds, or a date and time            may be missing
//!              timestamp_ms, and timestamp beside input_length (Mooncake): milliseconds
//! ```
//! Other columns are passed over. Rows may be in any order of time; times count from the earliest. A file whose first line
//! is a JSON object has an object in each line, whose keys are the columns.

use std::borrow::Cow;
use std::fmt;
use std::io::Read;

use super::lines::{Broken, LARGEST, LONGEST, Lines, TooLong, fields};
use super::{Arrival, MOST_REQUESTS, MOST_TOKENS, time};
use crate::{Error, Result};

const INPUT: [&str; 6] = [
    "contexttokens",
    "input_tokens",
    "num_prefill_tokens",
    "prompt_tokens",
    "request tokens",
    "input_length",
];
const OUTPUT: [&str; 6] = [
    "generatedtokens",
    "output_tokens",
    "num_decode_tokens",
    "completion_tokens",
    "response tokens",
    "output_length",
];
const TIME: [&str; 4] = ["timestamp", "arrived_at", "arrival_time", MILLISECONDS];

/// The column of times in milliseconds.
const MILLISECONDS: &str = "timestamp_ms";
/// Mooncake's column of prompt lengths, beside which `timestamp` counts milliseconds.
const MOONCAKE: &str = "input_length";

/// Bad rows that are kept to be told.
const TOLD: usize = 20;

/// Bytes between two reports of progress.
const REPORT: u64 = 1 << 20;

/// A row that is no request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadRow {
    /// Line of the file, the header being line 1.
    pub line: u64,
    /// Column, as the header names it.
    pub column: String,
    /// What is wrong.
    pub problem: String,
}

impl fmt::Display for BadRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.column.as_str() {
            "" => write!(f, "line {}: {}", self.line, self.problem),
            column => write!(f, "line {}, column {column}: {}", self.line, self.problem),
        }
    }
}

/// What a file says.
#[derive(Debug, Clone, PartialEq)]
pub struct TraceFile {
    /// In the order of their times, all 0 if the file has none.
    pub requests: Vec<Arrival>,
    /// Whether the file has times.
    pub timed: bool,
    /// The first bad rows.
    pub bad: Vec<BadRow>,
    /// All bad rows.
    pub bad_rows: usize,
}

/// Places of the columns, and their names.
struct Columns {
    input: (usize, String),
    output: (usize, String),
    time: Option<(usize, String)>,
    /// Whether numbers in the column of times are milliseconds.
    milliseconds: bool,
    /// The keys of JSON lines; without them lines are of CSV.
    keys: Option<Vec<String>>,
}

impl TraceFile {
    /// Reads at most `limit` rows from `from`, which is called `name` in messages. `seen` is told of bytes read.
    ///
    /// # Errors
    /// A file that cannot be read, without a header that names the columns, without a good row, with more than
    /// [`MOST_REQUESTS`] rows and no limit, or of more than 1 GiB.
    pub fn read(
        name: &str,
        from: impl Read,
        limit: Option<usize>,
        mut seen: impl FnMut(u64),
    ) -> Result<TraceFile> {
        let broken = |why: Broken| match why {
            Broken::Io(e) => Error::io(name, e),
            Broken::TooLarge => Error::format(
                name,
                format!(
                    "more than {LARGEST} bytes, too many for a trace; use its first N rows with `limit` N"
                ),
            ),
        };
        let mut lines = Lines::new(from);
        // The first line of JSON is a row, too.
        let first_row;
        let columns = match lines.header().map_err(broken)? {
            Some(Ok(header)) => {
                let columns = Columns::of(name, header)?;
                first_row = columns.keys.is_some().then(|| without_bom(header).to_vec());
                columns
            }
            Some(Err(TooLong)) => {
                return Err(Error::format(format!("{name}: line 1"), too_long("the header")));
            }
            None => {
                return Err(Error::format(name, "is empty, wanted a CSV file with a header and rows"));
            }
        };
        let mut trace =
            TraceFile { requests: Vec::new(), timed: columns.time.is_some(), bad: Vec::new(), bad_rows: 0 };
        // Times as they are read, of the requests so far.
        let mut times: Vec<i64> = Vec::new();
        let (mut number, mut said) = (u64::from(first_row.is_none()), 0);
        while limit.is_none_or(|most| trace.requests.len() + trace.bad_rows < most) {
            let row = match first_row.as_deref().filter(|_| number == 0) {
                Some(row) => Ok(row),
                None => match lines.next().map_err(broken)? {
                    None => break,
                    Some(row) => row,
                },
            };
            number += 1;
            let parsed = match row {
                Ok(line) if line.iter().all(u8::is_ascii_whitespace) => continue,
                Ok(line) => columns.row(number, line),
                Err(TooLong) => {
                    Err(BadRow { line: number, column: String::new(), problem: too_long("the line") })
                }
            };
            match parsed {
                Ok(_) if trace.requests.len() == MOST_REQUESTS => {
                    return Err(Error::Capacity(format!(
                        "{name}: more than {MOST_REQUESTS} requests; use the first N of them with `limit` N"
                    )));
                }
                Ok((at, request)) => {
                    trace.requests.push(request);
                    times.extend(at);
                }
                Err(bad) => {
                    trace.bad_rows += 1;
                    if trace.bad.len() < TOLD {
                        trace.bad.push(bad);
                    }
                }
            }
            if lines.bytes() >= said + REPORT {
                said = lines.bytes();
                seen(said);
            }
        }
        seen(lines.bytes());
        if trace.requests.is_empty() {
            return Err(match trace.bad.first() {
                Some(bad) => Error::format(name, format!("no good row; {bad}")),
                None => Error::format(name, "has a header and no rows"),
            });
        }
        let first = times.iter().copied().min().unwrap_or(0);
        for (request, at) in trace.requests.iter_mut().zip(times) {
            request.at = (at - first) as f64 / time::SECOND as f64;
        }
        trace.requests.sort_by(|a, b| a.at.total_cmp(&b.at));
        Ok(trace)
    }
}

/// A line without a byte order mark.
fn without_bom(line: &[u8]) -> &[u8] {
    line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line)
}

/// A JSON value as the text of a field; a string without its quotes.
fn plain(value: &serde_json::Value) -> Cow<'_, str> {
    match value {
        serde_json::Value::String(text) => Cow::Borrowed(text.trim()),
        other => Cow::Owned(other.to_string()),
    }
}

fn too_long(what: &str) -> String {
    format!("{what} is longer than {LONGEST} bytes; is this a CSV file?")
}

/// The beginning of text from an untrusted file, quoted for an error message.
fn shown(text: &str) -> String {
    let short: String = text.chars().take(40).collect();
    if short.len() < text.len() { format!("{short:?}...") } else { format!("{short:?}") }
}

impl Columns {
    fn of(name: &str, header: &[u8]) -> Result<Columns> {
        let header = without_bom(header);
        let keys = match header.trim_ascii_start().first() {
            Some(b'{') => {
                let object: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(header)
                    .map_err(|e| Error::format(format!("{name}: line 1"), format!("no JSON object: {e}")))?;
                Some(object.keys().cloned().collect::<Vec<_>>())
            }
            _ => None,
        };
        let names: Vec<Cow<'_, str>> = match &keys {
            Some(keys) => keys.iter().map(|k| Cow::Borrowed(k.as_str())).collect(),
            None => fields(header).collect(),
        };
        let find = |known: &[&str]| -> Result<Option<(usize, String)>> {
            let mut found = names
                .iter()
                .enumerate()
                .filter(|(_, n)| known.contains(&n.to_ascii_lowercase().as_str()))
                .map(|(i, n)| (i, n.clone().into_owned()));
            let first = found.next();
            if let (Some((_, a)), Some((_, b))) = (&first, found.next()) {
                let problem = format!("the header has both {a} and {b}, wanted one of them");
                return Err(Error::format(format!("{name}: line 1"), problem));
            }
            Ok(first)
        };
        let missing = |what: &str, known: &[&str]| {
            let problem = format!(
                "no column of {what}: the header is {}, wanted one of {}",
                shown(&names.join(",")),
                known.join(", ")
            );
            Error::format(format!("{name}: line 1"), problem)
        };
        let (input, output, time) = (find(&INPUT)?, find(&OUTPUT)?, find(&TIME)?);
        let input = input.ok_or_else(|| missing("prompt lengths", &INPUT))?;
        let output = output.ok_or_else(|| missing("answer lengths", &OUTPUT))?;
        let named = |column: &str, known: &str| column.eq_ignore_ascii_case(known);
        let milliseconds = time.as_ref().is_some_and(|(_, column)| {
            named(column, MILLISECONDS) || named(column, "timestamp") && named(&input.1, MOONCAKE)
        });
        Ok(Columns { input, output, time, milliseconds, keys })
    }

    /// A request, and its time if the file has times.
    fn row(&self, line: u64, text: &[u8]) -> Result<(Option<i64>, Arrival), BadRow> {
        let (mut input, mut output, mut at) = (None, None, None);
        let bad = |column: &str, problem: String| BadRow { line, column: column.to_owned(), problem };
        let object: serde_json::Map<String, serde_json::Value>;
        if self.keys.is_some() {
            object = serde_json::from_slice(text).map_err(|e| bad("", format!("no JSON object: {e}")))?;
            let of = |key: &str| object.get(key).map(plain);
            (input, output) = (of(&self.input.1), of(&self.output.1));
            at = self.time.as_ref().and_then(|t| of(&t.1));
        } else {
            for (i, field) in fields(text).enumerate() {
                if i == self.input.0 {
                    input = Some(field);
                } else if i == self.output.0 {
                    output = Some(field);
                } else if self.time.as_ref().is_some_and(|t| t.0 == i) {
                    at = Some(field);
                }
            }
        }
        let tokens = |column: &str, field: Option<Cow<'_, str>>| {
            let text = field.ok_or_else(|| bad(column, "the row has no such field".into()))?;
            // Some tables write whole numbers as 12.0.
            let whole = text.strip_suffix(".0").unwrap_or(&text);
            match whole.parse::<u64>() {
                Ok(0) => Err(bad(column, "0 tokens, wanted at least 1".into())),
                Ok(n) if n <= u64::from(MOST_TOKENS) => Ok(n as u32),
                Ok(n) => Err(bad(column, format!("{n} tokens, wanted at most {MOST_TOKENS}"))),
                Err(_) => {
                    let problem = format!("{} is no number of tokens", shown(&text));
                    Err(bad(column, problem))
                }
            }
        };
        let at = match &self.time {
            None => None,
            Some((_, column)) => {
                let text = at.ok_or_else(|| bad(column, "the row has no such field".into()))?;
                let read = if self.milliseconds { time::parse_milliseconds } else { time::parse };
                Some(read(&text).map_err(|e| bad(column, e))?)
            }
        };
        let (input, output) = (tokens(&self.input.1, input)?, tokens(&self.output.1, output)?);
        Ok((at, Arrival { at: 0.0, input, output }))
    }
}
