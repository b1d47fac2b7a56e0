//! Writes the results of many requests, one line each, in the order of the requests or of their completion, to standard
//! output or to a file that is written completely or not at all.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};
use tandem::atomic_file;
use tandem::engine::{Logprobs, Token};

use crate::cli::output;

/// See the [module](self).
pub struct ResultsWriter<'a> {
    /// The file, written once all results are complete; without one, lines go to standard output as soon as their order
    /// allows.
    file: Option<&'a Path>,
    in_order: bool,
    /// Index of the next request to write.
    next: usize,
    /// Lines that wait for earlier ones.
    held: BTreeMap<usize, String>,
    /// Lines of the file.
    lines: Vec<String>,
}

impl<'a> ResultsWriter<'a> {
    /// Results without any request yet.
    pub fn new(file: Option<&'a Path>, in_order: bool) -> ResultsWriter<'a> {
        ResultsWriter { file, in_order, next: 0, held: BTreeMap::new(), lines: Vec::new() }
    }

    /// Adds the result of request `index`.
    ///
    /// # Errors
    /// If standard output was closed.
    pub fn put(&mut self, index: usize, result: &Value) -> anyhow::Result<()> {
        let line = result.to_string();
        if !self.in_order {
            return self.write(line);
        }
        self.held.insert(index, line);
        while let Some(line) = self.held.remove(&self.next) {
            self.next += 1;
            self.write(line)?;
        }
        Ok(())
    }

    fn write(&mut self, line: String) -> anyhow::Result<()> {
        if self.file.is_none() {
            return output::line(&line);
        }
        self.lines.push(line);
        Ok(())
    }

    /// Ends the results and writes the file.
    ///
    /// # Errors
    /// If the file cannot be written; it is then unchanged.
    pub fn finish(self) -> tandem::Result<()> {
        let Some(path) = self.file else { return Ok(()) };
        atomic_file::replace(path, |to| self.lines.iter().try_for_each(|line| writeln!(to, "{line}")))
    }
}

/// The log-probabilities of an answer's tokens, for JSON.
pub fn logprobs(answer: &[Token]) -> Value {
    answer.iter().filter_map(|token| Some(of_token(token.id, token.logprobs.as_ref()?))).collect()
}

/// The log-probabilities of a prompt's tokens, for JSON: null of the first, which follows nothing.
pub fn prompt_logprobs(prompt: &[u32], scores: &[Logprobs]) -> Value {
    let rest = prompt.iter().skip(1).zip(scores).map(|(&id, own)| of_token(id, own));
    std::iter::once(Value::Null).chain(rest).collect()
}

fn of_token(id: u32, own: &Logprobs) -> Value {
    let top: Vec<_> = own.top.iter().map(|(id, p)| json!([id, p])).collect();
    json!({ "id": id, "logprob": own.token, "top": top })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_the_order_that_was_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.jsonl");
        for (in_order, want) in [(true, "0\n1\n2\n3\n"), (false, "2\n0\n3\n1\n")] {
            let mut results = ResultsWriter::new(Some(&path), in_order);
            for i in [2, 0, 3, 1] {
                results.put(i, &i.into()).unwrap();
            }
            results.finish().unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), want);
        }
    }
}
