//! Text to tokens (PTX ISA 4, "Syntax").

use crate::error::Error;

/// A token of the language.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Token<'a> {
    /// A name, a directive, or an opcode with its modifiers: `%r1`, `.reg`, `ld.global.L1::no_allocate.u32`.
    Word(&'a str),
    /// `12`, `0x1f`: without a sign.
    Integer(u64),
    /// `0f3F800000`.
    Single(u32),
    /// `0d3FF0000000000000`.
    Double(u64),
    /// A number with a point: versions only.
    Decimal(&'a str),
    /// In quotation marks.
    Quoted(&'a str),
    /// Any other character.
    Mark(char),
}

/// Tokens of a text, one ahead.
pub(crate) struct Lexer<'a> {
    text: &'a str,
    at: usize,
    line: u32,
    ahead: Option<Option<Token<'a>>>,
    token_line: u32,
}

impl<'a> Lexer<'a> {
    pub fn new(text: &'a str) -> Self {
        Lexer { text, at: 0, line: 1, ahead: None, token_line: 1 }
    }

    /// The line of the token that `next` returned last, or `peek` will.
    pub fn line_of_token(&self) -> u32 {
        self.token_line
    }

    pub fn error(&self, problem: impl Into<String>) -> Error {
        Error::new(self.text, self.line_of_token(), problem)
    }

    pub fn peek(&mut self) -> Result<Option<Token<'a>>, Error> {
        if self.ahead.is_none() {
            let token = self.read()?;
            self.ahead = Some(token);
        }
        Ok(self.ahead.flatten())
    }

    pub fn next(&mut self) -> Result<Option<Token<'a>>, Error> {
        let token = self.peek()?;
        self.ahead = None;
        Ok(token)
    }

    /// Takes a character, if it comes next.
    pub fn take(&mut self, mark: char) -> Result<bool, Error> {
        let is = self.peek()? == Some(Token::Mark(mark));
        if is {
            self.ahead = None;
        }
        Ok(is)
    }

    pub fn expect(&mut self, mark: char) -> Result<(), Error> {
        if self.take(mark)? { Ok(()) } else { Err(self.error(format!("`{mark}` expected"))) }
    }

    pub fn word(&mut self) -> Result<&'a str, Error> {
        match self.next()? {
            Some(Token::Word(word)) => Ok(word),
            _ => Err(self.error("a name expected")),
        }
    }

    pub fn integer(&mut self) -> Result<u64, Error> {
        match self.next()? {
            Some(Token::Integer(value)) => Ok(value),
            _ => Err(self.error("an integer expected")),
        }
    }

    /// Goes on after the end of the line of the last token.
    pub fn skip_line(&mut self) {
        self.ahead = None;
        // The token ahead may have come from a later line: go back by nothing, forward only while on this one.
        while self.line == self.token_line && self.at < self.text.len() {
            self.advance();
        }
    }

    fn advance(&mut self) {
        let byte = self.text.as_bytes()[self.at];
        self.line += u32::from(byte == b'\n');
        self.at += 1;
    }

    fn skip_space(&mut self) -> Result<(), Error> {
        loop {
            let rest = &self.text.as_bytes()[self.at..];
            match rest {
                [c, ..] if c.is_ascii_whitespace() => self.advance(),
                [b'/', b'/', ..] => {
                    self.at += rest.iter().position(|c| *c == b'\n').unwrap_or(rest.len());
                }
                [b'/', b'*', ..] => {
                    let end = self.text[self.at..].find("*/");
                    let end = self.at + end.ok_or_else(|| self.error("a comment without end"))? + 2;
                    while self.at < end {
                        self.advance();
                    }
                }
                _ => return Ok(()),
            }
        }
    }

    fn read(&mut self) -> Result<Option<Token<'a>>, Error> {
        self.skip_space()?;
        self.token_line = self.line;
        let rest = &self.text[self.at..];
        let bytes = rest.as_bytes();
        let Some(first) = rest.chars().next() else { return Ok(None) };
        let length = match first {
            '"' => rest[1..].find('"').ok_or_else(|| self.error("a string without end"))? + 2,
            _ if is_word(bytes[0]) => word_length(bytes),
            _ => first.len_utf8(),
        };
        let word = &rest[..length];
        self.at += length;
        let token = match first {
            '"' => Token::Quoted(&word[1..length - 1]),
            '0'..='9' => number(word).ok_or_else(|| self.error(format!("`{word}` is no number")))?,
            _ if is_word(bytes[0]) => Token::Word(word),
            _ => Token::Mark(first),
        };
        Ok(Some(token))
    }
}

fn is_word(c: u8) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, b'_' | b'$' | b'%' | b'.')
}

/// A word may contain `::` (`L2::128B`), but a label ends in one colon.
fn word_length(bytes: &[u8]) -> usize {
    let mut at = 0;
    while at < bytes.len() {
        if is_word(bytes[at]) {
            at += 1;
        } else if bytes[at..].starts_with(b"::") {
            at += 2;
        } else {
            break;
        }
    }
    at
}

fn number(word: &str) -> Option<Token<'_>> {
    let hex = |digits: &str| u64::from_str_radix(digits, 16).ok();
    if word.contains('.') {
        return Some(Token::Decimal(word));
    }
    match word.get(..2) {
        Some("0f" | "0F") if word.len() == 10 => hex(&word[2..]).map(|v| Token::Single(v as u32)),
        Some("0d" | "0D") if word.len() == 18 => hex(&word[2..]).map(Token::Double),
        Some("0x" | "0X") => hex(word[2..].trim_end_matches('U')).map(Token::Integer),
        _ => word.trim_end_matches('U').parse().ok().map(Token::Integer),
    }
}
