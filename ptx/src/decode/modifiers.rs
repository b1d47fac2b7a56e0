//! The words after an opcode: every one must be asked for.

use super::Result;
use crate::number::Round;
use crate::types::Type;

/// Modifiers not yet taken.
pub(super) struct Modifiers<'a> {
    rest: Vec<&'a str>,
}

impl<'a> Modifiers<'a> {
    pub fn new(words: impl Iterator<Item = &'a str>) -> Self {
        Modifiers { rest: words.collect() }
    }

    /// Takes a modifier, if it is there.
    pub fn flag(&mut self, word: &str) -> bool {
        let at = self.rest.iter().position(|w| *w == word);
        at.map(|at| self.rest.remove(at)).is_some()
    }

    /// Takes the first of these that is there.
    pub fn one<T: Copy>(&mut self, choices: &[(&str, T)]) -> Option<T> {
        choices.iter().find(|(word, _)| self.flag(word)).map(|(_, value)| *value)
    }

    /// One of these must be there.
    pub fn must<T: Copy>(&mut self, choices: &[(&str, T)]) -> Result<T> {
        self.one(choices).ok_or_else(|| {
            let words: Vec<&str> = choices.iter().map(|(word, _)| *word).collect();
            format!("one of .{} expected", words.join(" ."))
        })
    }

    /// Takes those that begin so.
    pub fn drop_beginning(&mut self, prefix: &str) {
        self.rest.retain(|w| !w.starts_with(prefix));
    }

    /// The next word, whatever it is.
    pub fn word(&mut self) -> Option<&'a str> {
        if self.rest.is_empty() { None } else { Some(self.rest.remove(0)) }
    }

    /// The first type.
    pub fn kind(&mut self) -> Result<Type> {
        let found = self.rest.iter().enumerate().find_map(|(i, w)| Some((i, Type::parse(w)?)));
        let (at, kind) = found.ok_or("a type expected")?;
        self.rest.remove(at);
        Ok(kind)
    }

    /// A rounding of floating point results.
    pub fn round(&mut self) -> Option<Round> {
        self.one(&[("rn", Round::Nearest), ("rz", Round::Zero), ("rm", Round::Down), ("rp", Round::Up)])
    }

    /// A rounding to whole numbers.
    pub fn round_integer(&mut self) -> Option<Round> {
        self.one(&[("rni", Round::Nearest), ("rzi", Round::Zero), ("rmi", Round::Down), ("rpi", Round::Up)])
    }

    /// None may be left.
    pub fn done(&self) -> Result<()> {
        match self.rest.first() {
            None => Ok(()),
            Some(word) => Err(format!("modifier `.{word}` is unknown here")),
        }
    }
}
