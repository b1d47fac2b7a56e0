//! Where results of many requests go: a line each, in the order of the requests or of their ends, to standard output or to
//! a file that is written whole or not at all.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;
use tandem::atomic_file;

use crate::cli::output;

/// See the [module](self).
pub struct Results<'a> {
    /// Written when all is there; without one, lines go to standard output as soon as they may.
    file: Option<&'a Path>,
    in_order: bool,
    /// The request whose turn it is.
    next: usize,
    /// Lines before which others have to come.
    held: BTreeMap<usize, String>,
    /// Lines of the file.
    lines: Vec<String>,
}

impl<'a> Results<'a> {
    /// Of no request yet.
    pub fn new(file: Option<&'a Path>, in_order: bool) -> Results<'a> {
        Results { file, in_order, next: 0, held: BTreeMap::new(), lines: Vec::new() }
    }

    /// The result of the request `index`.
    ///
    /// # Errors
    /// Standard output is gone.
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

    /// All results are there.
    ///
    /// # Errors
    /// The file cannot be written; then it is as it was.
    pub fn finish(self) -> tandem::Result<()> {
        let Some(path) = self.file else { return Ok(()) };
        atomic_file::replace(path, |to| self.lines.iter().try_for_each(|line| writeln!(to, "{line}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_the_order_that_was_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.jsonl");
        for (in_order, want) in [(true, "0\n1\n2\n3\n"), (false, "2\n0\n3\n1\n")] {
            let mut results = Results::new(Some(&path), in_order);
            for i in [2, 0, 3, 1] {
                results.put(i, &i.into()).unwrap();
            }
            results.finish().unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), want);
        }
    }
}
