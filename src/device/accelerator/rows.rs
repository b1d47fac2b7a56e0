//! The roles of a step's rows, checked once for every implementation.

use std::ops::Range;

use super::desc::{Attend, StepDesc};
use super::shape::Limits;
use crate::cache::PAGE_TOKENS;
use crate::{Error, Result};

/// The rows of a [`StepDesc`] that was found to be sound and within its limits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepRows {
    limits: Limits,
    taken: usize,
    /// Number of rows that launches are sized for.
    launch: usize,
    /// Boundaries between the parts of attention: 0, the cuts, and the number of rows launched for.
    bounds: Vec<usize>,
    /// Rows attended elsewhere, in full or in part. A row's index is its place in the mailbox.
    published: Vec<u32>,
    elsewhere: Vec<u32>,
    partial: Vec<u32>,
    logits: Vec<u32>,
}

/// The index range that the rows of a range occupy in an ascending list.
fn within(list: &[u32], rows: &Range<usize>) -> Range<usize> {
    let at = |row: usize| list.partition_point(|&r| (r as usize) < row);
    at(rows.start)..at(rows.end)
}

impl StepRows {
    /// Checks a step.
    ///
    /// # Errors
    /// [`Error::Capacity`]: more rows, sequences, pages or logits than `limits` say, with the numbers.
    /// [`Error::Usage`]: rows that do not follow one another, tokens, logits or cuts that do not belong to rows,
    /// missing pages.
    pub fn new(limits: &Limits, desc: &StepDesc<'_>) -> Result<StepRows> {
        let used: Vec<_> = desc.seqs.iter().filter(|s| s.n_rows > 0).collect();
        let taken: usize = used.iter().map(|s| s.n_rows).sum();
        let within_limit = |what: &str, n: usize, most: usize| match n <= most {
            true => Ok(()),
            false => Err(Error::Capacity(format!("a step of {n} {what}, {most} were planned for"))),
        };
        within_limit("rows", desc.launch_rows, limits.rows)?;
        within_limit("sequences", used.len(), limits.sequences)?;
        within_limit("rows of logits", desc.logit_rows.len(), limits.logit_rows)?;
        if desc.tokens.len() != taken || taken > desc.launch_rows {
            return Err(Error::usage(format!(
                "a step of {taken} rows with {} tokens, launched for {} rows",
                desc.tokens.len(),
                desc.launch_rows
            )));
        }
        let mut rows = StepRows {
            limits: *limits,
            taken,
            launch: desc.launch_rows,
            bounds: vec![0],
            published: Vec::new(),
            elsewhere: Vec::new(),
            partial: Vec::new(),
            logits: desc.logit_rows.to_vec(),
        };
        let mut next = 0;
        for (i, s) in used.iter().enumerate() {
            if s.row0 != next {
                return Err(Error::usage(format!(
                    "sequence {i} of a step begins at row {}, the sequence before it ends at row {next}",
                    s.row0
                )));
            }
            next += s.n_rows;
            let own = s.row0 as u32..next as u32;
            match s.attend {
                Attend::Here | Attend::Since { .. } => {}
                Attend::From { .. } => {
                    rows.partial.extend(own.clone());
                    rows.published.extend(own);
                }
                Attend::UpTo { to } => {
                    rows.partial.extend(own);
                    if !to.is_multiple_of(PAGE_TOKENS) || to > s.first_pos {
                        return Err(Error::usage(format!(
                            "sequence {i} of a step is attended here up to token {to}: wanted the first of a page, at most \
                             {}, its first row",
                            s.first_pos
                        )));
                    }
                }
                Attend::Elsewhere => {
                    rows.elsewhere.extend(own.clone());
                    rows.published.extend(own);
                    continue;
                }
            }
            let from = s.attend.first_token();
            if !from.is_multiple_of(PAGE_TOKENS) || from > s.first_pos {
                return Err(Error::usage(format!(
                    "sequence {i} of a step is attended here from token {from} on: wanted the first of a page, \
                     at most {}, its first row",
                    s.first_pos
                )));
            }
            let pages = (s.attend.end(s.first_pos + s.n_rows) - from).div_ceil(PAGE_TOKENS);
            within_limit("pages of a sequence", pages, limits.pages_per_sequence)?;
            if s.pages.len() < pages {
                return Err(Error::usage(format!(
                    "sequence {i} of a step needs {pages} pages from token {from} on, {} are listed",
                    s.pages.len()
                )));
            }
        }
        let ascending = desc.logit_rows.windows(2).all(|w| w[0] < w[1]);
        if !ascending || desc.logit_rows.last().is_some_and(|&r| r as usize >= taken) {
            return Err(Error::usage(format!(
                "logits of rows {:?}: wanted ascending rows of {taken}",
                desc.logit_rows
            )));
        }
        for &cut in desc.cuts {
            let begins = used.iter().any(|s| s.row0 == cut);
            if !begins || cut <= *rows.bounds.last().expect("0 at least") {
                return Err(Error::usage(format!(
                    "cuts at rows {:?}: wanted ascending first rows of sequences, after the first",
                    desc.cuts
                )));
            }
            rows.bounds.push(cut);
        }
        rows.bounds.push(desc.launch_rows);
        Ok(rows)
    }

    /// The limits that the step was checked against.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Rows that belong to a sequence; the rows after them are padding.
    pub fn taken(&self) -> usize {
        self.taken
    }

    /// Whether `rows` are all rows launched for.
    pub fn is_all(&self, rows: &Range<usize>) -> bool {
        *rows == (0..self.launch)
    }

    /// The rows of each part of attention, in order; the last part includes the padding.
    pub fn parts(&self) -> impl Iterator<Item = Range<usize>> {
        self.bounds.windows(2).map(|w| w[0]..w[1])
    }

    /// The parts of attention that `rows` cover.
    ///
    /// # Errors
    /// [`Error::Usage`] if the rows begin or end between two cuts.
    pub fn parts_of(&self, rows: &Range<usize>) -> Result<Range<usize>> {
        if rows.is_empty() {
            return Ok(0..0);
        }
        // A range that reaches the last taken row includes the padding.
        let end = if rows.end >= self.taken { self.launch } else { rows.end };
        match (self.bounds.binary_search(&rows.start), self.bounds.binary_search(&end)) {
            (Ok(first), Ok(last)) => Ok(first..last),
            _ => Err(Error::usage(format!(
                "attention of rows {rows:?} of a step that is cut at rows {:?} only",
                &self.bounds[1..self.bounds.len() - 1]
            ))),
        }
    }

    /// Rows attended elsewhere or in part, ascending; a row's index is its place in the mailbox.
    pub fn published(&self) -> &[u32] {
        &self.published
    }

    /// The index range of `rows` in [`StepRows::published`].
    pub fn published_in(&self, rows: &Range<usize>) -> Range<usize> {
        within(&self.published, rows)
    }

    /// Rows attended elsewhere, ascending.
    pub fn elsewhere(&self) -> &[u32] {
        &self.elsewhere
    }

    /// The index range of `rows` in [`StepRows::elsewhere`].
    pub fn elsewhere_in(&self, rows: &Range<usize>) -> Range<usize> {
        within(&self.elsewhere, rows)
    }

    /// The place in the mailbox of a row of [`StepRows::published`].
    pub fn place(&self, row: u32) -> Option<usize> {
        self.published.binary_search(&row).ok()
    }

    /// Rows attended in part, ascending; a row's index is its place in [`PartialRows`](super::PartialRows).
    pub fn partial(&self) -> &[u32] {
        &self.partial
    }

    /// The index range of `rows` in [`StepRows::partial`].
    pub fn partial_in(&self, rows: &Range<usize>) -> Range<usize> {
        within(&self.partial, rows)
    }

    /// Rows that want logits, ascending; a row's index is its place in the logits.
    pub fn logits(&self) -> &[u32] {
        &self.logits
    }

    /// The index range of `rows` in [`StepRows::logits`].
    pub fn logits_in(&self, rows: &Range<usize>) -> Range<usize> {
        within(&self.logits, rows)
    }
}

#[cfg(test)]
mod tests {
    use super::super::desc::StepSeq;
    use super::*;

    const LIMITS: Limits = Limits { rows: 16, logit_rows: 2, sequences: 4, pages_per_sequence: 3 };

    fn seq(row0: usize, n_rows: usize, first_pos: usize, attend: Attend, pages: &[u32]) -> StepSeq<'_> {
        StepSeq { pages, first_pos, row0, n_rows, attend }
    }

    fn check(seqs: &[StepSeq<'_>], tokens: usize, logit_rows: &[u32], cuts: &[usize]) -> Result<StepRows> {
        let tokens = vec![0; tokens];
        let launch_rows = tokens.len().next_power_of_two();
        StepRows::new(&LIMITS, &StepDesc { seqs, tokens: &tokens, logit_rows, cuts, epoch: 0, launch_rows })
    }

    #[test]
    fn rows_are_found_by_what_they_are() {
        let seqs = [
            seq(0, 2, 0, Attend::Here, &[1]),
            seq(2, 1, 9, Attend::Elsewhere, &[]),
            seq(3, 1, 70, Attend::From { from: 64 }, &[5]),
            seq(4, 1, 3, Attend::Elsewhere, &[]),
        ];
        let rows = check(&seqs, 5, &[1, 4], &[2, 4]).unwrap();
        assert_eq!((rows.taken(), rows.is_all(&(0..8)), rows.is_all(&(0..5))), (5, true, false));
        assert_eq!(
            (rows.published(), rows.elsewhere(), rows.partial()),
            (&[2, 3, 4][..], &[2, 4][..], &[3][..])
        );
        assert_eq!((rows.place(4), rows.place(1)), (Some(2), None));
        assert_eq!((rows.published_in(&(3..8)), rows.elsewhere_in(&(3..8))), (1..3, 1..2));
        assert_eq!((rows.partial_in(&(0..3)), rows.logits_in(&(2..8))), (0..0, 1..2));
        assert_eq!(rows.parts().collect::<Vec<_>>(), [0..2, 2..4, 4..8]);
        for (range, parts) in [(0..8, 0..3), (0..5, 0..3), (2..5, 1..3), (0..4, 0..2), (3..3, 0..0)] {
            assert_eq!(rows.parts_of(&range).unwrap(), parts, "{range:?}");
        }
        for range in [0..3, 1..4, 3..5] {
            let e = rows.parts_of(&range).unwrap_err();
            assert!(matches!(&e, Error::Usage(m) if m.contains("[2, 4]")), "{range:?}: {e}");
        }
    }

    #[test]
    fn what_was_not_planned_for_is_refused_with_the_numbers() {
        let one = |row0: usize| seq(row0, 1, 0, Attend::Here, &[0]);
        let capacity = |r: Result<StepRows>, what: &str| match r {
            Err(Error::Capacity(m)) => assert!(m.contains(what), "{m}"),
            other => panic!("{what}: {other:?}"),
        };
        let five: Vec<_> = (0..5).map(one).collect();
        capacity(check(&five, 5, &[], &[]), "5 sequences, 4");
        capacity(check(&[seq(0, 17, 0, Attend::Here, &[0])], 17, &[], &[]), "32 rows, 16");
        capacity(check(&[seq(0, 3, 0, Attend::Here, &[0])], 3, &[0, 1, 2], &[]), "3 rows of logits, 2");
        capacity(check(&[seq(0, 1, 96, Attend::Here, &[0; 4])], 1, &[], &[]), "4 pages of a sequence, 3");
        // Only the pages on the device count.
        check(&[seq(0, 1, 96, Attend::From { from: 32 }, &[0; 3])], 1, &[], &[]).unwrap();
        check(&[seq(0, 1, 960, Attend::Elsewhere, &[])], 1, &[], &[]).unwrap();
        check(&[seq(0, 1, 960, Attend::UpTo { to: 96 }, &[0; 3])], 1, &[], &[]).unwrap();
        check(&[seq(0, 1, 960, Attend::UpTo { to: 0 }, &[])], 1, &[], &[]).unwrap();
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        let one = |row0: usize| seq(row0, 1, 0, Attend::Here, &[0]);
        let usage = |r: Result<StepRows>, what: &str| match r {
            Err(Error::Usage(m)) => assert!(m.contains(what), "{m}"),
            other => panic!("{what}: {other:?}"),
        };
        usage(check(&[one(1)], 1, &[], &[]), "begins at row 1");
        usage(check(&[one(0), one(2)], 2, &[], &[]), "begins at row 2, the sequence before it ends at row 1");
        usage(check(&[one(0), one(0)], 2, &[], &[]), "begins at row 0");
        usage(check(&[one(0)], 2, &[], &[]), "1 rows with 2 tokens");
        usage(check(&[one(0)], 1, &[1], &[]), "logits of rows");
        usage(check(&[one(0), one(1)], 2, &[1, 1], &[]), "logits of rows");
        usage(check(&[seq(0, 3, 40, Attend::Here, &[1])], 3, &[], &[]), "needs 2 pages");
        usage(check(&[seq(0, 1, 40, Attend::From { from: 8 }, &[1; 9])], 1, &[], &[]), "from token 8");
        usage(check(&[seq(0, 1, 40, Attend::From { from: 64 }, &[1; 9])], 1, &[], &[]), "from token 64");
        usage(check(&[seq(0, 1, 40, Attend::UpTo { to: 8 }, &[1; 9])], 1, &[], &[]), "up to token 8");
        usage(check(&[seq(0, 1, 40, Attend::UpTo { to: 64 }, &[1; 9])], 1, &[], &[]), "up to token 64");
        usage(check(&[seq(0, 1, 70, Attend::UpTo { to: 64 }, &[1])], 1, &[], &[]), "needs 2 pages");
        usage(check(&[one(0), one(1)], 2, &[], &[0]), "cuts");
        usage(check(&[seq(0, 4, 0, Attend::Here, &[1])], 4, &[], &[2]), "cuts");
        usage(check(&[one(0), one(1), one(2)], 3, &[], &[2, 1]), "cuts");
    }
}
