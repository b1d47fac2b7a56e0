//! Runs a [`Pattern`] over text by backtracking, and counts its steps.
//!
//! Backtracking may take exponential time, and even a linear search takes quadratic time for all matches, so steps are
//! taken from the [`budget`] of the text; real patterns need some ten per byte. Where the match of a set is repeated,
//! one entry of the stack stands for all the lengths to try, so that a run of a million spaces takes no memory.

use super::budget;
use super::pattern::{Assertion, Instruction, Pattern, Preference};

/// Where to go on when the present way fails.
#[derive(Debug, Clone, Copy)]
enum Retry {
    At {
        pc: u32,
        at: usize,
    },
    /// A greedy run that ended at `at` may end as early as `low`.
    Shorter {
        pc: u32,
        low: usize,
        at: usize,
    },
    /// A lazy run that ended at `at` may take up to `left` more of its set.
    Longer {
        pc: u32,
        at: usize,
        left: u32,
    },
}

struct Run<'a> {
    pattern: &'a Pattern,
    text: &'a str,
    retries: Vec<Retry>,
    steps: budget::Steps,
}

impl Pattern {
    /// All matches from left to right, none of which overlap, as `fancy_regex::Regex::find_iter` finds them.
    pub(super) fn find_all(&self, text: &str) -> Vec<(usize, usize)> {
        let mut run = Run { pattern: self, text, retries: Vec::new(), steps: budget::Steps::new() };
        let mut found = Vec::new();
        let mut from = 0;
        let mut last_end = None;
        while let Some((start, end)) = run.search(from) {
            if start < end {
                from = end;
            } else {
                from = end + text[end..].chars().next().map_or(1, char::len_utf8);
                // No empty match right after a match.
                if last_end == Some(end) {
                    continue;
                }
            }
            last_end = Some(end);
            found.push((start, end));
        }
        found
    }
}

impl Run<'_> {
    fn search(&mut self, from: usize) -> Option<(usize, usize)> {
        let mut start = from;
        while start <= self.text.len() {
            if let Some(end) = self.matches(0, start) {
                return Some((start, end));
            }
            start += self.text[start..].chars().next().map_or(1, char::len_utf8);
        }
        None
    }

    fn next(&self, set: u32, at: usize) -> Option<usize> {
        let c = self.text[at..].chars().next()?;
        self.pattern.sets[set as usize].contains(c).then(|| at + c.len_utf8())
    }

    fn before(&self, at: usize) -> usize {
        at - self.text[..at].chars().next_back().map_or(0, char::len_utf8)
    }

    fn push(&mut self, retry: Retry) {
        // As many as there are steps, which are memory too.
        if self.retries.len() > (1 << 16) + 8 * self.text.len() {
            budget::exceeded();
        }
        self.retries.push(retry);
    }

    /// The end of the match that the instructions from `pc` on have at `at`.
    fn matches(&mut self, pc: u32, at: usize) -> Option<usize> {
        let bottom = self.retries.len();
        let (mut pc, mut at) = (pc, at);
        loop {
            self.steps.take(1);
            let goes_on = match self.pattern.program[pc as usize] {
                Instruction::Set(set) => self.next(set, at).map(|next| (pc + 1, next)),
                Instruction::Run { set, min, max, preference } => {
                    self.run_of(set, min, max, preference, pc, at).map(|next| (pc + 1, next))
                }
                Instruction::Split { first, second } => {
                    self.push(Retry::At { pc: second, at });
                    Some((first, at))
                }
                Instruction::Jump(to) => Some((to, at)),
                Instruction::Assert(assertion) => self.holds(assertion, at).then_some((pc + 1, at)),
                Instruction::Look { behind, negative, then } => {
                    (self.looks(behind, pc + 1, at) != negative).then_some((then, at))
                }
                Instruction::Atomic { then } => self.matches(pc + 1, at).map(|end| (then, end)),
                Instruction::Match => {
                    self.retries.truncate(bottom);
                    return Some(at);
                }
            };
            (pc, at) = match goes_on {
                Some(next) => next,
                None => self.retry(bottom)?,
            };
        }
    }

    fn run_of(
        &mut self,
        set: u32,
        min: u32,
        max: u32,
        preference: Preference,
        pc: u32,
        at: usize,
    ) -> Option<usize> {
        let mut count = 0;
        let mut end = at;
        while count < min {
            end = self.next(set, end)?;
            count += 1;
            self.steps.take(1);
        }
        if preference == Preference::Lazy {
            if max > min {
                self.push(Retry::Longer { pc, at: end, left: max - min });
            }
            return Some(end);
        }
        let low = end;
        while count < max
            && let Some(next) = self.next(set, end)
        {
            end = next;
            count = count.saturating_add(1).min(u32::MAX - 1);
            self.steps.take(1);
        }
        if preference == Preference::Greedy && end > low {
            self.push(Retry::Shorter { pc: pc + 1, low, at: end });
        }
        Some(end)
    }

    fn retry(&mut self, bottom: usize) -> Option<(u32, usize)> {
        while self.retries.len() > bottom {
            self.steps.take(1);
            match self.retries.pop()? {
                Retry::At { pc, at } => return Some((pc, at)),
                Retry::Shorter { pc, low, at } => {
                    let at = self.before(at);
                    if at > low {
                        self.retries.push(Retry::Shorter { pc, low, at });
                    }
                    return Some((pc, at));
                }
                Retry::Longer { pc, at, left } => {
                    let Instruction::Run { set, .. } = self.pattern.program[pc as usize] else {
                        unreachable!("only a run is lazy");
                    };
                    if let Some(at) = self.next(set, at) {
                        // Without an end, as many as there are.
                        let left = if left == u32::MAX { left } else { left - 1 };
                        if left > 0 {
                            self.retries.push(Retry::Longer { pc, at, left });
                        }
                        return Some((pc + 1, at));
                    }
                }
            }
        }
        None
    }

    fn looks(&mut self, behind: Option<u32>, pc: u32, at: usize) -> bool {
        let Some(width) = behind else { return self.matches(pc, at).is_some() };
        let mut start = at;
        for _ in 0..width {
            self.steps.take(1);
            if start == 0 {
                return false;
            }
            start = self.before(start);
        }
        // All matches have this width.
        self.matches(pc, start).is_some()
    }

    fn holds(&self, assertion: Assertion, at: usize) -> bool {
        let word =
            |c: Option<char>| c.is_some_and(|c| self.pattern.sets[self.pattern.word as usize].contains(c));
        match assertion {
            Assertion::TextStart => at == 0,
            Assertion::TextEnd => at == self.text.len(),
            Assertion::LineStart => at == 0 || self.text.as_bytes()[at - 1] == b'\n',
            Assertion::LineEnd => self.text.as_bytes().get(at).is_none_or(|&b| b == b'\n'),
            Assertion::WordBoundary(wanted) => {
                let (before, after) = self.text.split_at(at);
                (word(before.chars().next_back()) != word(after.chars().next())) == wanted
            }
        }
    }
}
