//! Regular expressions of a `tokenizer.json`: their syntax, and the program that `matcher` runs.
//!
//! The syntax is that of the `fancy-regex` crate, which the `tokenizers` crate uses, as far as tokenizers use it:
//! classes, groups, alternatives, greedy, lazy and possessive repetition, look-around, anchors and the flags `i`, `m`
//! and `s`. Anything else (backreferences, conditionals, recursion) is refused. Sets of characters are left to
//! `regex-syntax`, as `fancy-regex` does, so that they follow the same version of Unicode.

use std::collections::HashMap;

use regex_syntax::ParserBuilder;
use regex_syntax::hir::{Class, HirKind};

/// Longest pattern, in bytes. Real ones have some hundreds.
const MAX_PATTERN: usize = 8192;
/// Deepest nesting of groups.
const MAX_DEPTH: usize = 32;
/// Longest program. Counted repetition of groups is written out.
const MAX_PROGRAM: usize = 16384;

/// A set of characters.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Set {
    ascii: u128,
    /// Inclusive, in order.
    others: Box<[(char, char)]>,
}

impl Set {
    pub(super) fn contains(&self, c: char) -> bool {
        if c.is_ascii() {
            return self.ascii >> (c as u32) & 1 == 1;
        }
        let after = self.others.partition_point(|&(low, _)| low <= c);
        after > 0 && c <= self.others[after - 1].1
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Assertion {
    TextStart,
    TextEnd,
    LineStart,
    LineEnd,
    /// Between a word character and another; false: anywhere else.
    WordBoundary(bool),
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Preference {
    Greedy,
    Lazy,
    /// Greedy, and nothing is given back.
    Possessive,
}

/// One instruction. Numbers are positions in the program, unless named otherwise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Instruction {
    /// One character of set number `.0`.
    Set(u32),
    /// `min` to `max` characters of set number `set`.
    Run {
        set: u32,
        min: u32,
        max: u32,
        preference: Preference,
    },
    /// Goes on at `first`; if that fails, at `second`.
    Split {
        first: u32,
        second: u32,
    },
    Jump(u32),
    Assert(Assertion),
    /// The instructions from the next one on match here, or end here if they begin `behind` characters earlier; goes
    /// on at `then` from where it is.
    Look {
        behind: Option<u32>,
        negative: bool,
        then: u32,
    },
    /// The instructions from the next one on match in the first way that they can; goes on at `then` from their end.
    Atomic {
        then: u32,
    },
    Match,
}

/// A compiled pattern.
#[derive(Debug, Clone)]
pub(super) struct Pattern {
    pub(super) program: Vec<Instruction>,
    pub(super) sets: Vec<Set>,
    /// Set number of word characters, if the pattern asks for word boundaries.
    pub(super) word: u32,
    may_be_empty: bool,
}

#[derive(Debug, Clone)]
enum Node {
    Empty,
    Set(u32),
    Concat(Vec<Node>),
    Either(Vec<Node>),
    Repeat { node: Box<Node>, min: u32, max: u32, greedy: bool },
    Atomic(Box<Node>),
    Look { behind: bool, negative: bool, node: Box<Node> },
    Assert(Assertion),
}

impl Pattern {
    /// # Errors
    /// What is wrong with `pattern`, or not supported.
    pub(super) fn new(pattern: &str) -> Result<Pattern, String> {
        if pattern.len() > MAX_PATTERN {
            return Err(format!(
                "a pattern of {} bytes is too long; the limit is {MAX_PATTERN}",
                pattern.len()
            ));
        }
        let mut parser = Parser { pattern, at: 0, sets: Vec::new(), known: HashMap::new(), word: 0 };
        let node = parser.alternatives(Flags::default(), 0)?;
        if parser.at != pattern.len() {
            return Err(parser.problem("`)` closes nothing"));
        }
        let may_be_empty = node.may_be_empty();
        let mut compiled =
            Pattern { program: Vec::new(), sets: parser.sets, word: parser.word, may_be_empty };
        compiled.compile(&node)?;
        compiled.push(Instruction::Match)?;
        Ok(compiled)
    }

    /// Whether a match may have no characters.
    pub(super) fn may_be_empty(&self) -> bool {
        self.may_be_empty
    }

    fn push(&mut self, instruction: Instruction) -> Result<usize, String> {
        if self.program.len() == MAX_PROGRAM {
            return Err("the pattern's counted repetitions are too long".into());
        }
        self.program.push(instruction);
        Ok(self.program.len() - 1)
    }

    fn here(&self) -> u32 {
        self.program.len() as u32
    }

    fn compile(&mut self, node: &Node) -> Result<(), String> {
        match node {
            Node::Empty => {}
            Node::Set(set) => {
                self.push(Instruction::Set(*set))?;
            }
            Node::Concat(nodes) => {
                for node in nodes {
                    self.compile(node)?;
                }
            }
            Node::Either(nodes) => {
                let mut jumps = Vec::new();
                for (i, node) in nodes.iter().enumerate() {
                    if i + 1 == nodes.len() {
                        self.compile(node)?;
                        break;
                    }
                    let split = self.push(Instruction::Jump(0))?;
                    self.compile(node)?;
                    jumps.push(self.push(Instruction::Jump(0))?);
                    self.program[split] = Instruction::Split { first: split as u32 + 1, second: self.here() };
                }
                for jump in jumps {
                    self.program[jump] = Instruction::Jump(self.here());
                }
            }
            Node::Repeat { node, min, max, greedy } => self.repeat(node, *min, *max, *greedy)?,
            Node::Atomic(node) => {
                if let Node::Repeat { node, min, max, greedy: true } = &**node
                    && let Node::Set(set) = **node
                {
                    let preference = Preference::Possessive;
                    self.push(Instruction::Run { set, min: *min, max: *max, preference })?;
                    return Ok(());
                }
                let atomic = self.push(Instruction::Jump(0))?;
                self.compile(node)?;
                self.push(Instruction::Match)?;
                self.program[atomic] = Instruction::Atomic { then: self.here() };
            }
            Node::Look { behind, negative, node } => {
                let behind = match (behind, node.width()) {
                    (false, _) => None,
                    (true, Some(width)) => Some(width),
                    (true, None) => return Err("a look-behind must have one length".into()),
                };
                let look = self.push(Instruction::Jump(0))?;
                self.compile(node)?;
                self.push(Instruction::Match)?;
                self.program[look] = Instruction::Look { behind, negative: *negative, then: self.here() };
            }
            Node::Assert(assertion) => {
                self.push(Instruction::Assert(*assertion))?;
            }
        }
        Ok(())
    }

    fn repeat(&mut self, node: &Node, min: u32, max: u32, greedy: bool) -> Result<(), String> {
        if let Node::Set(set) = *node {
            let preference = if greedy { Preference::Greedy } else { Preference::Lazy };
            self.push(Instruction::Run { set, min, max, preference })?;
            return Ok(());
        }
        for _ in 0..min {
            self.compile(node)?;
        }
        let split = |at: u32, out: u32| match greedy {
            true => Instruction::Split { first: at + 1, second: out },
            false => Instruction::Split { first: out, second: at + 1 },
        };
        if max == u32::MAX {
            if node.may_be_empty() {
                return Err("the pattern repeats without end what may be empty".into());
            }
            let at = self.push(Instruction::Jump(0))?;
            self.compile(node)?;
            self.push(Instruction::Jump(at as u32))?;
            self.program[at] = split(at as u32, self.here());
            return Ok(());
        }
        let mut splits = Vec::new();
        for _ in min..max {
            splits.push(self.push(Instruction::Jump(0))?);
            self.compile(node)?;
        }
        for at in splits {
            self.program[at] = split(at as u32, self.here());
        }
        Ok(())
    }
}

impl Node {
    fn may_be_empty(&self) -> bool {
        match self {
            Node::Set(_) => false,
            Node::Empty | Node::Look { .. } | Node::Assert(_) => true,
            Node::Concat(nodes) => nodes.iter().all(Node::may_be_empty),
            Node::Either(nodes) => nodes.iter().any(Node::may_be_empty),
            Node::Repeat { node, min, .. } => *min == 0 || node.may_be_empty(),
            Node::Atomic(node) => node.may_be_empty(),
        }
    }

    /// Characters of every match, if they are always as many.
    fn width(&self) -> Option<u32> {
        match self {
            Node::Set(_) => Some(1),
            Node::Empty | Node::Look { .. } | Node::Assert(_) => Some(0),
            Node::Concat(nodes) => nodes.iter().try_fold(0u32, |sum, node| sum.checked_add(node.width()?)),
            Node::Either(nodes) => {
                let first = nodes.first()?.width();
                if nodes.iter().all(|node| node.width() == first) { first } else { None }
            }
            Node::Repeat { node, min, max, .. } if min == max => node.width()?.checked_mul(*min),
            Node::Repeat { .. } => None,
            Node::Atomic(node) => node.width(),
        }
    }
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Hash)]
struct Flags {
    ignore_case: bool,
    lines: bool,
    dot_is_all: bool,
}

struct Parser<'a> {
    pattern: &'a str,
    at: usize,
    sets: Vec<Set>,
    /// Numbers of sets by their text.
    known: HashMap<(&'a str, Flags), u32>,
    word: u32,
}

impl<'a> Parser<'a> {
    fn problem(&self, what: &str) -> String {
        format!("pattern, byte {}: {what}", self.at)
    }

    fn rest(&self) -> &'a str {
        &self.pattern[self.at..]
    }

    fn eat(&mut self, text: &str) -> bool {
        let found = self.rest().starts_with(text);
        if found {
            self.at += text.len();
        }
        found
    }

    /// `a|b|...` up to a closing parenthesis or the end.
    fn alternatives(&mut self, mut flags: Flags, depth: usize) -> Result<Node, String> {
        if depth > MAX_DEPTH {
            return Err(self.problem("groups are nested too deeply"));
        }
        let mut all = Vec::new();
        loop {
            let mut sequence = Vec::new();
            while !self.rest().is_empty() && !self.rest().starts_with(['|', ')']) {
                if let Some(changed) = self.flags_alone(flags)? {
                    flags = changed;
                    continue;
                }
                let atom = self.atom(flags, depth)?;
                sequence.push(self.quantified(atom)?);
            }
            all.push(match sequence.len() {
                0 => Node::Empty,
                1 => sequence.remove(0),
                _ => Node::Concat(sequence),
            });
            if !self.eat("|") {
                break;
            }
        }
        Ok(if all.len() == 1 { all.remove(0) } else { Node::Either(all) })
    }

    /// `(?i)` and its like, which hold for the rest of their group.
    fn flags_alone(&mut self, flags: Flags) -> Result<Option<Flags>, String> {
        let Some(inside) = self.rest().strip_prefix("(?") else { return Ok(None) };
        let letters = inside.find(|c: char| !c.is_ascii_alphabetic() && c != '-').unwrap_or(inside.len());
        if letters == 0 || !inside[letters..].starts_with(')') {
            return Ok(None);
        }
        let changed = self.with_flags(flags, &inside[..letters])?;
        self.at += letters + 3;
        Ok(Some(changed))
    }

    fn with_flags(&self, mut flags: Flags, letters: &str) -> Result<Flags, String> {
        let mut on = true;
        for letter in letters.chars() {
            match letter {
                '-' => on = false,
                'i' => flags.ignore_case = on,
                'm' => flags.lines = on,
                's' => flags.dot_is_all = on,
                'u' if on => {}
                _ => return Err(self.problem(&format!("the flag `{letter}` is not supported"))),
            }
        }
        Ok(flags)
    }

    fn atom(&mut self, flags: Flags, depth: usize) -> Result<Node, String> {
        let first = self.rest().chars().next().expect("the caller saw a character");
        let assertion = match first {
            '(' => return self.group(flags, depth),
            '[' => {
                let length = self.class_length()?;
                return self.set(length, flags);
            }
            '\\' => return self.escape(flags),
            '^' if flags.lines => Assertion::LineStart,
            '^' => Assertion::TextStart,
            '$' if flags.lines => Assertion::LineEnd,
            '$' => Assertion::TextEnd,
            '*' | '+' | '?' | '{' => return Err(self.problem("there is nothing to repeat")),
            _ => return self.set(first.len_utf8(), flags),
        };
        self.at += 1;
        Ok(Node::Assert(assertion))
    }

    fn group(&mut self, flags: Flags, depth: usize) -> Result<Node, String> {
        let start = self.at;
        let mut inner = flags;
        let mut wrap: fn(Node) -> Node = |node| node;
        if self.eat("(?=") {
            wrap = |node| Node::Look { behind: false, negative: false, node: Box::new(node) };
        } else if self.eat("(?!") {
            wrap = |node| Node::Look { behind: false, negative: true, node: Box::new(node) };
        } else if self.eat("(?<=") {
            wrap = |node| Node::Look { behind: true, negative: false, node: Box::new(node) };
        } else if self.eat("(?<!") {
            wrap = |node| Node::Look { behind: true, negative: true, node: Box::new(node) };
        } else if self.eat("(?>") {
            wrap = |node| Node::Atomic(Box::new(node));
        } else if self.eat("(?P<") || self.eat("(?<") {
            let name = self.rest().find('>').filter(|&n| n > 0);
            let name = name.ok_or_else(|| self.problem("a group's name has no end"))?;
            if !self.rest()[..name].chars().all(|c| c.is_alphanumeric() || c == '_') {
                return Err(self.problem("a group's name is none"));
            }
            self.at += name + 1;
        } else if self.eat("(?") {
            let letters = self.rest().find(':').unwrap_or(0);
            let text = &self.rest()[..letters];
            if !self.rest()[letters..].starts_with(':')
                || !text.chars().all(|c| c.is_ascii_alphabetic() || c == '-')
            {
                return Err(self.problem("this kind of group is not supported"));
            }
            inner = self.with_flags(flags, text)?;
            self.at += letters + 1;
        } else {
            self.at += 1;
            if self.rest().starts_with('*') {
                return Err(self.problem("verbs are not supported"));
            }
        }
        let node = self.alternatives(inner, depth + 1)?;
        if !self.eat(")") {
            self.at = start;
            return Err(self.problem("a group is not closed"));
        }
        Ok(wrap(node))
    }

    /// Bytes of the class that begins here, which may contain others.
    fn class_length(&self) -> Result<usize, String> {
        let text = self.rest();
        let mut depth = 0;
        let mut at = 0;
        while at < text.len() {
            match text.as_bytes()[at] {
                b'\\' => {
                    let escaped = text[at + 1..].chars().next().map_or(1, char::len_utf8);
                    at += escaped;
                }
                b'[' => {
                    depth += 1;
                    // A bracket that closes is a character where a class begins.
                    at += usize::from(text[at + 1..].starts_with('^'));
                    at += usize::from(text[at + 1..].starts_with(']'));
                }
                b']' => {
                    depth -= 1;
                    if depth == 0 {
                        return Ok(at + 1);
                    }
                }
                _ => {}
            }
            at += 1;
        }
        Err(self.problem("a class is not closed"))
    }

    fn escape(&mut self, flags: Flags) -> Result<Node, String> {
        let escaped = self.rest().chars().nth(1).ok_or_else(|| self.problem("`\\` at the end"))?;
        let rest = &self.rest()[1 + escaped.len_utf8()..];
        // The length of what follows in braces, or of so many digits.
        let braced = || {
            let end = rest.strip_prefix('{')?.find('}')?;
            Some(end + 2)
        };
        let hexadecimal = |digits: usize| {
            let plain = rest.as_bytes().get(..digits).is_some_and(|d| d.iter().all(u8::is_ascii_hexdigit));
            if plain { Some(digits) } else { braced() }
        };
        let length = match escaped {
            'd' | 'D' | 's' | 'S' | 'w' | 'W' | 'n' | 'r' | 't' | 'f' | 'v' | 'a' => Some(0),
            'p' | 'P' => match rest.chars().next() {
                Some('{') => braced(),
                Some(c) => Some(c.len_utf8()),
                None => None,
            },
            'x' => hexadecimal(2),
            'u' => hexadecimal(4),
            'U' => hexadecimal(8),
            'A' | 'z' | 'b' | 'B' => {
                if matches!(escaped, 'b' | 'B') && rest.starts_with('{') {
                    return Err(self.problem("this word boundary is not supported"));
                }
                self.at += 2;
                return Ok(Node::Assert(match escaped {
                    'A' => Assertion::TextStart,
                    'z' => Assertion::TextEnd,
                    _ => {
                        self.word = self.set_number("\\w", Flags::default())?;
                        Assertion::WordBoundary(escaped == 'b')
                    }
                }));
            }
            '<' | '>' => None,
            c if c.is_ascii_alphanumeric() => None,
            // Any other character stands for itself; `regex-syntax` knows that only of ASCII's punctuation.
            c if c.is_ascii_punctuation() => Some(0),
            c => {
                self.at += 1;
                return self.set(c.len_utf8(), flags);
            }
        };
        let length = length.ok_or_else(|| self.problem(&format!("`\\{escaped}` is not supported here")))?;
        self.set(1 + escaped.len_utf8() + length, flags)
    }

    /// The set that the next `length` bytes mean.
    fn set(&mut self, length: usize, flags: Flags) -> Result<Node, String> {
        let text = &self.rest()[..length];
        let number = self.set_number(text, flags)?;
        self.at += length;
        Ok(Node::Set(number))
    }

    fn set_number(&mut self, text: &'a str, flags: Flags) -> Result<u32, String> {
        if let Some(&number) = self.known.get(&(text, flags)) {
            return Ok(number);
        }
        let parsed = ParserBuilder::new()
            .nest_limit(MAX_DEPTH as u32)
            .case_insensitive(flags.ignore_case)
            .dot_matches_new_line(flags.dot_is_all)
            .build()
            .parse(text)
            .map_err(|_| self.problem("no set of characters"))?;
        let ranges: Vec<(char, char)> = match parsed.kind() {
            HirKind::Class(Class::Unicode(class)) => {
                class.ranges().iter().map(|range| (range.start(), range.end())).collect()
            }
            HirKind::Literal(literal) => {
                let mut characters = std::str::from_utf8(&literal.0).unwrap_or("").chars();
                match (characters.next(), characters.next()) {
                    (Some(c), None) => vec![(c, c)],
                    _ => return Err(self.problem("no single character")),
                }
            }
            _ => return Err(self.problem("no set of characters")),
        };
        let mut ascii = 0;
        let mut others = Vec::new();
        for (low, high) in ranges {
            for c in low as u32..=(high as u32).min(127) {
                ascii |= 1u128 << c;
            }
            if !high.is_ascii() {
                others.push((low, high));
            }
        }
        let set = Set { ascii, others: others.into() };
        self.sets.push(set);
        let number = self.sets.len() as u32 - 1;
        self.known.insert((text, flags), number);
        Ok(number)
    }

    fn quantified(&mut self, node: Node) -> Result<Node, String> {
        let (min, max) = if self.eat("?") {
            (0, 1)
        } else if self.eat("*") {
            (0, u32::MAX)
        } else if self.eat("+") {
            (1, u32::MAX)
        } else if self.rest().starts_with('{') {
            self.counts()?
        } else {
            return Ok(node);
        };
        if matches!(node, Node::Look { .. } | Node::Assert(_)) {
            return Err(self.problem("an assertion is repeated"));
        }
        if min > max {
            return Err(self.problem("a repetition's counts are out of order"));
        }
        let greedy = !self.eat("?");
        let repeat = Node::Repeat { node: Box::new(node), min, max, greedy };
        Ok(if self.eat("+") { Node::Atomic(Box::new(repeat)) } else { repeat })
    }

    /// `{m}`, `{m,}` or `{m,n}`.
    fn counts(&mut self) -> Result<(u32, u32), String> {
        let inside = self.rest().strip_prefix('{').and_then(|rest| rest.split_once('}'));
        let (inside, _) = inside.ok_or_else(|| self.problem("`{` is not closed"))?;
        let number = |text: &str| {
            let value = text.parse::<u32>().ok().filter(|_| text.bytes().all(|b| b.is_ascii_digit()));
            value.filter(|&n| n <= MAX_PROGRAM as u32).ok_or_else(|| self.problem("a count is none"))
        };
        let counts = match inside.split_once(',') {
            None => (number(inside)?, number(inside)?),
            Some((min, "")) => (number(min)?, u32::MAX),
            Some((min, max)) => (number(min)?, number(max)?),
        };
        self.at += inside.len() + 2;
        Ok(counts)
    }
}
