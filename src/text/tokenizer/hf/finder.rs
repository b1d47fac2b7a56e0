//! What `Split` and `Replace` look for: a text, or a pattern.

use serde::Deserialize;

use super::pattern::Pattern;

/// As the file spells it.
#[derive(Deserialize)]
pub(super) enum PatternOf {
    String(String),
    Regex(String),
}

#[derive(Debug)]
pub(super) enum Finder {
    /// Not empty.
    Text(String),
    Pattern(Pattern),
}

/// A text in parts, and for each whether it is a match.
#[derive(Debug)]
pub(super) struct FoundParts(pub(super) Vec<((usize, usize), bool)>);

impl Finder {
    /// # Errors
    /// What is wrong with the pattern.
    pub(super) fn new(pattern: PatternOf) -> Result<Finder, String> {
        match pattern {
            // The crate makes a pattern of every text, and the empty one matches everywhere.
            PatternOf::String(text) if text.is_empty() => Ok(Finder::Pattern(Pattern::new("")?)),
            PatternOf::String(text) => Ok(Finder::Text(text)),
            PatternOf::Regex(regex) => Ok(Finder::Pattern(Pattern::new(&regex)?)),
        }
    }

    /// Whether a match may be empty.
    pub(super) fn finds_nothing_between(&self) -> bool {
        match self {
            Finder::Text(_) => false,
            Finder::Pattern(pattern) => pattern.may_be_empty(),
        }
    }

    /// `text` in parts, as the `tokenizers` crate divides it.
    pub(super) fn split(&self, text: &str) -> FoundParts {
        if text.is_empty() {
            return FoundParts(vec![((0, 0), false)]);
        }
        let matches = match self {
            Finder::Text(wanted) => {
                text.match_indices(wanted.as_str()).map(|(at, found)| (at, at + found.len())).collect()
            }
            Finder::Pattern(pattern) => pattern.find_all(text),
        };
        let mut parts = Vec::with_capacity(matches.len());
        let mut end = 0;
        for (start, stop) in matches {
            if end != start {
                parts.push(((end, start), false));
            }
            parts.push(((start, stop), true));
            end = stop;
        }
        if end != text.len() {
            parts.push(((end, text.len()), false));
        }
        FoundParts(parts)
    }
}

impl FoundParts {
    /// How many matches, and their bytes together.
    pub(super) fn matches(&self) -> (usize, usize) {
        let matches = self.0.iter().filter(|(_, is_match)| *is_match);
        matches.fold((0, 0), |(n, bytes), ((start, end), _)| (n + 1, bytes + end - start))
    }
}

/// For the crate, which takes texts apart as patterns say.
impl tokenizers::pattern::Pattern for &FoundParts {
    fn find_matches(&self, _: &str) -> tokenizers::Result<Vec<(tokenizers::Offsets, bool)>> {
        Ok(self.0.clone())
    }
}
