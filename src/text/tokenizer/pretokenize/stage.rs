//! One stage of a pre-tokeniser: sets matches apart, or groups digits.

use regex::Regex;

/// Divides a text into matches and what is between them.
#[derive(Debug)]
pub enum Stage {
    /// The matches of a pattern.
    Matching(Regex, Spaces),
    /// Numbers, in groups of three from the right.
    Digits(Digits),
}

/// The treatment of a match that is all white space and precedes a word.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Spaces {
    /// The match is kept: the pattern has no look-ahead.
    Keep,
    /// Its last character is given back, if it has more than one.
    GiveBack,
    /// As [`GiveBack`](Self::GiveBack), except for a run that ends a line, which the pattern matches separately.
    GiveBackWithinLine,
    /// As [`GiveBackWithinLine`](Self::GiveBackWithinLine), and what is left is cut into powers of two, at most 512.
    Cascade,
}

/// What belongs to a number, and what happens at its ends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Digits {
    /// `(?=(\d{3})+(?!\d))`: cuts before each group of three; the digits left over stay with what precedes them.
    Cut,
    /// A number of any script ends a piece after each group, the first of which includes the text before it.
    Trailing,
}

impl Stage {
    /// A stage for one of the constant patterns.
    pub fn matching(pattern: &str, spaces: Spaces) -> Stage {
        Stage::Matching(Regex::new(pattern).expect("the patterns are constants, tested to compile"), spaces)
    }

    /// Calls `piece` with each piece of `text`, left to right.
    pub fn split<'t>(&self, text: &'t str, mut piece: impl FnMut(&'t str)) {
        match self {
            Stage::Matching(regex, spaces) => set_apart(regex, *spaces, text, &mut piece),
            Stage::Digits(digits) => {
                let mut done = 0;
                digits.cuts(text, |cut| {
                    if cut > done {
                        piece(&text[done..cut]);
                        done = cut;
                    }
                });
                if done < text.len() {
                    piece(&text[done..]);
                }
            }
        }
    }
}

fn set_apart<'t>(regex: &Regex, spaces: Spaces, text: &'t str, piece: &mut impl FnMut(&'t str)) {
    let mut done = 0;
    let mut at = 0;
    while let Some(found) = regex.find_at(text, at) {
        let (start, mut end) = (found.start(), found.end());
        let run = spaces.look_ahead(found.as_str());
        if run && end < text.len() {
            let last = found.as_str().chars().next_back().map_or(0, char::len_utf8);
            // A single white-space character is a separate piece.
            end = if end - last > start { end - last } else { end };
        }
        if start > done {
            piece(&text[done..start]);
        }
        if run && spaces == Spaces::Cascade {
            powers_of_two(&text[start..end], piece);
        } else if end > start {
            piece(&text[start..end]);
        }
        done = end;
        // No pattern matches the empty string, but the loop must not depend on that.
        at = if end > at { end } else { at + text[at..].chars().next().map_or(1, char::len_utf8) };
        if at > text.len() {
            break;
        }
    }
    if done < text.len() {
        piece(&text[done..]);
    }
}

/// The largest first: 512, 256 and so on to 4 characters, then 2 or 1.
fn powers_of_two<'t>(mut run: &'t str, piece: &mut impl FnMut(&'t str)) {
    let mut left = run.chars().count();
    while left > 0 {
        let n = if left >= 512 { 512 } else { 1 << left.ilog2() };
        let end = run.char_indices().nth(n).map_or(run.len(), |(at, _)| at);
        piece(&run[..end]);
        run = &run[end..];
        left -= n;
    }
}

impl Spaces {
    /// Whether `\s+(?!\S)` is what made this match, so that it leaves its last character to a word that follows.
    fn look_ahead(self, found: &str) -> bool {
        let spaces = || found.chars().all(char::is_whitespace);
        match self {
            Spaces::Keep => false,
            Spaces::GiveBack => spaces(),
            Spaces::GiveBackWithinLine | Spaces::Cascade => !found.ends_with(['\r', '\n']) && spaces(),
        }
    }
}

impl Digits {
    fn is_digit(self, c: char) -> bool {
        if self == Digits::Trailing { c.is_numeric() } else { c.is_ascii_digit() }
    }

    /// Calls `cut` with the places to cut `text` at, ascending.
    fn cuts(self, text: &str, mut cut: impl FnMut(usize)) {
        let mut chars = text.char_indices().peekable();
        while let Some((start, c)) = chars.next() {
            if !self.is_digit(c) {
                continue;
            }
            let mut digits = vec![start];
            let mut end = start + c.len_utf8();
            while let Some((at, c)) = chars.next_if(|&(_, c)| self.is_digit(c)) {
                digits.push(at);
                end = at + c.len_utf8();
            }
            let n = digits.len();
            for (i, &at) in digits.iter().enumerate() {
                let group = (n - i).is_multiple_of(3);
                let wanted = match self {
                    Digits::Cut => group,
                    Digits::Trailing => group && i > 0,
                };
                if wanted {
                    cut(at);
                }
            }
            if self == Digits::Trailing {
                cut(end);
            }
        }
    }
}
