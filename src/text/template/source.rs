//! Divides a template's source as Jinja2 divides it, and writes it so that minijinja reads the same.
//!
//! The engine and Jinja2 differ in what belongs to a text between two tags: line ends other than LF, the newline after
//! `{% raw %}`, which characters are white space, where `+` may stand. So all of that is decided here, by the rules of
//! Jinja2's `lexer.py` with the settings of `transformers` (`trim_blocks`, `lstrip_blocks`, one newline at the end is
//! dropped). The result has no whitespace control left; the engine is set to keep every text as it is.
//!
//! Lines keep their numbers: newlines that belong to no text are put into comments or inside of a tag.

use crate::{Error, Result};

/// `source` for an engine without any whitespace control.
///
/// # Errors
/// A tag, comment, raw block or string without an end, and brackets that do not match, with the line.
pub fn rewrite(source: &str) -> Result<String> {
    let mut source = source.replace("\r\n", "\n").replace('\r', "\n");
    if source.ends_with('\n') {
        source.pop();
    }
    let mut writer =
        Writer { source: &source, at: 0, out: String::with_capacity(source.len() + 64), lost: 0 };
    let mut line_starting = true;
    while let Some(tag) = writer.text(&mut line_starting) {
        match tag {
            Tag::Comment => writer.comment()?,
            Tag::Raw => writer.raw(&mut line_starting)?,
            Tag::Variable => writer.expression("{{", "}}")?,
            // Only `{% raw %}` and `{% raw -%}` begin a raw block.
            Tag::Block
                if writer
                    .rest()
                    .trim_start_matches(is_space)
                    .strip_prefix("raw")
                    .is_some_and(|r| r.starts_with(|c| is_space(c) || c == '+')) =>
            {
                return Err(writer.error("unknown tag raw"));
            }
            Tag::Block => writer.expression("{%", "%}")?,
        }
        // What was just read, white space behind a tag included, ends here.
        line_starting = writer.source[..writer.at].ends_with('\n');
    }
    writer.lines();
    Ok(writer.out)
}

#[derive(Clone, Copy, PartialEq)]
enum Tag {
    Variable,
    Block,
    Comment,
    /// `{% raw %}`, read to its end.
    Raw,
}

struct Writer<'s> {
    source: &'s str,
    /// Bytes read.
    at: usize,
    out: String,
    /// Newlines read that are not in `out` yet.
    lost: usize,
}

impl<'s> Writer<'s> {
    fn rest(&self) -> &'s str {
        &self.source[self.at..]
    }

    /// Reads the text up to the next tag, and the tag's beginning. `None` at the end of the source.
    fn text(&mut self, line_starting: &mut bool) -> Option<Tag> {
        let rest = self.rest();
        let opener = |at: &usize| matches!(rest.as_bytes().get(at + 1), Some(b'{' | b'%' | b'#'));
        let Some(at) = rest.match_indices('{').map(|(at, _)| at).find(opener) else {
            self.at = self.source.len();
            self.data(rest);
            return None;
        };
        let raw = raw_begin(&rest[at..]);
        let tag = match rest.as_bytes()[at + 1] {
            b'{' => Tag::Variable,
            b'#' => Tag::Comment,
            _ if raw.is_some() => Tag::Raw,
            _ => Tag::Block,
        };
        let sign = rest[at + 2..].chars().next().filter(|c| matches!(c, '-' | '+'));
        let kept = self.before(&rest[..at], sign, tag == Tag::Variable, *line_starting);
        self.data(kept);
        let begin = raw.unwrap_or(2 + sign.map_or(0, char::len_utf8));
        self.skip(&rest[kept.len()..at + begin]);
        self.at += at + begin;
        *line_starting = self.source[..self.at].ends_with('\n');
        Some(tag)
    }

    /// The part of a text that stays in front of a tag.
    fn before(&self, text: &'s str, sign: Option<char>, variable: bool, line_starting: bool) -> &'s str {
        match sign {
            Some('-') => text.trim_end_matches(is_space),
            None if !variable => {
                let line = text.rfind('\n').map_or(0, |at| at + 1);
                let whole = line > 0 || line_starting;
                if whole && text[line..].chars().all(is_space) { &text[..line] } else { text }
            }
            _ => text,
        }
    }

    /// Reads the end of a comment, which its beginning precedes.
    fn comment(&mut self) -> Result<()> {
        let rest = self.rest();
        let Some(end) = rest.find("#}") else { return Err(self.error("the comment has no end")) };
        let sign = rest[..end].chars().next_back();
        self.close(end + 2, sign, true);
        Ok(())
    }

    /// Reads the body and the end of a raw block.
    fn raw(&mut self, line_starting: &mut bool) -> Result<()> {
        let rest = self.rest();
        let found = rest.match_indices("{%").find_map(|(at, _)| Some((at, endraw(&rest[at..])?)));
        let Some((at, (length, sign))) = found else {
            return Err(self.error("the raw block has no end"));
        };
        let before = rest[at + 2..].chars().next().filter(|c| matches!(c, '-' | '+'));
        let kept = self.before(&rest[..at], before, false, *line_starting);
        self.data(kept);
        self.skip(&rest[kept.len()..at]);
        self.at += at;
        self.close(length, sign, true);
        Ok(())
    }

    /// Skips `length` bytes of the end of a tag, and the white space behind them that belongs to it.
    fn close(&mut self, length: usize, sign: Option<char>, trim_newline: bool) {
        let behind = &self.rest()[length..];
        let more = match sign {
            Some('-') => behind.len() - behind.trim_start_matches(is_space).len(),
            Some('+') => 0,
            _ => usize::from(trim_newline && behind.starts_with('\n')),
        };
        self.skip(&self.rest()[..length + more]);
        self.at += length + more;
    }

    /// Reads a tag with an expression or a statement up to its end, and writes it.
    fn expression(&mut self, begin: &str, end: &'static str) -> Result<()> {
        let mut body = String::new();
        let mut open: Vec<char> = Vec::new();
        let sign = loop {
            let rest = self.rest();
            let Some(c) = rest.chars().next() else {
                return Err(self.error("the tag has no end"));
            };
            if open.is_empty() {
                // `+}}` is no end of an expression.
                let signed = c == '-' || (c == '+' && end == "%}");
                if signed && rest[1..].starts_with(end) {
                    break Some(c);
                }
                if rest.starts_with(end) {
                    break None;
                }
            }
            match c {
                '\'' | '"' => {
                    self.string(&mut body)?;
                    continue;
                }
                '(' => open.push(')'),
                '[' => open.push(']'),
                '{' => open.push('}'),
                ')' | ']' | '}' if open.pop() != Some(c) => {
                    return Err(self.error(&format!("unexpected '{c}'")));
                }
                _ => {}
            }
            // The engine knows only white space of ASCII.
            body.push(if c != '\n' && is_space(c) { ' ' } else { c });
            self.at += c.len_utf8();
        };
        // Tags for training, which print their body, in a scope of its own.
        let body = match body.trim() {
            "generation" => body.replace("generation", "with"),
            "endgeneration" => body.replace("endgeneration", "endwith"),
            _ => body,
        };
        self.lines();
        // Spaces, so that neither a sign nor a bracket joins the delimiters.
        for part in [begin, " ", &body, " ", end] {
            self.out.push_str(part);
        }
        self.close(end.len() + sign.map_or(0, char::len_utf8), sign, end == "%}");
        Ok(())
    }

    /// Reads a string literal and writes it with the escapes that the engine has.
    fn string(&mut self, body: &mut String) -> Result<()> {
        let rest = self.rest();
        let quote = rest.chars().next().expect("a quote");
        let mut chars = rest[1..].chars();
        body.push(quote);
        let mut continued = 0;
        loop {
            let Some(c) = chars.next() else { return Err(self.error("the string has no end")) };
            if c == quote {
                break;
            }
            if c != '\\' {
                body.push(c);
                continue;
            }
            let Some(escape) = chars.next() else { return Err(self.error("the string has no end")) };
            let mut digits = |first: &str, radix: u32, least: usize, most: usize| {
                let more: String =
                    chars.clone().take_while(|c| c.is_digit(radix)).take(most - first.len()).collect();
                let text = format!("{first}{more}");
                chars = chars.as_str()[more.len()..].chars();
                (text.len() >= least).then(|| u32::from_str_radix(&text, radix).unwrap_or(u32::MAX))
            };
            let code = match escape {
                // A line that goes on in the next one.
                '\n' => {
                    continued += 1;
                    continue;
                }
                'n' | 'r' | 't' | 'b' | 'f' | '\\' | '\'' | '"' => {
                    body.push('\\');
                    body.push(escape);
                    continue;
                }
                'a' => Some(7),
                'v' => Some(11),
                'x' => digits("", 16, 2, 2),
                'u' => digits("", 16, 4, 4),
                'U' => digits("", 16, 8, 8).filter(|&code| code <= 0x10_ffff),
                '0'..='7' => digits(&escape.to_string(), 8, 1, 3),
                'N' => None,
                // Not an escape, so a backslash.
                other => {
                    body.push_str("\\\\");
                    body.push(other);
                    continue;
                }
            };
            let Some(code) = code else {
                return Err(self.error(&format!("a string has an escape \\{escape} that is not understood")));
            };
            match char::from_u32(code).filter(|c| *c as u32 > 0xffff) {
                Some(c) => body.push(c),
                // Halves of a pair stay with each other.
                None => body.push_str(&format!("\\u{code:04x}")),
            }
        }
        body.push(quote);
        body.extend(std::iter::repeat_n('\n', continued));
        self.at += rest.len() - chars.as_str().len();
        Ok(())
    }

    /// Writes text that the engine must print as it is.
    fn data(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        self.lines();
        let opens = ["{{", "{%", "{#"].iter().any(|opener| text.contains(opener));
        // A brace at the end could join the next tag.
        if !opens && !text.ends_with('{') {
            self.out.push_str(text);
            return;
        }
        self.out.push_str("{{ \"");
        for c in text.chars() {
            if matches!(c, '"' | '\\') {
                self.out.push('\\');
            }
            self.out.push(c);
        }
        self.out.push_str("\" }}");
    }

    /// Takes note of source that belongs to no text and no expression.
    fn skip(&mut self, source: &str) {
        self.lost += source.matches('\n').count();
    }

    /// Writes the newlines that were skipped.
    fn lines(&mut self) {
        if self.lost > 0 {
            self.out.push_str("{#");
            self.out.extend(std::iter::repeat_n('\n', std::mem::take(&mut self.lost)));
            self.out.push_str("#}");
        }
    }

    fn error(&self, problem: &str) -> Error {
        let line = 1 + self.source[..self.at].matches('\n').count();
        Error::format("chat template", format!("does not compile in line {line}: {problem}"))
    }
}

/// White space as Python's regular expressions and `str.strip` have it: four separators of ASCII more than Unicode's.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// The length of `{% raw %}` at the beginning of `text`, with the white space that `-%}` takes.
fn raw_begin(text: &str) -> Option<usize> {
    let inside = text.strip_prefix("{%")?;
    let inside = inside.strip_prefix(['-', '+']).unwrap_or(inside).trim_start_matches(is_space);
    let inside = inside.strip_prefix("raw")?.trim_start_matches(is_space);
    let behind = match inside.strip_prefix("-%}") {
        Some(behind) => behind.trim_start_matches(is_space),
        None => inside.strip_prefix("%}")?,
    };
    Some(text.len() - behind.len())
}

/// The length of `{% endraw %}` at the beginning of `text`, and the sign at its end.
fn endraw(text: &str) -> Option<(usize, Option<char>)> {
    let inside = text.strip_prefix("{%")?;
    let inside = inside.strip_prefix(['-', '+']).unwrap_or(inside).trim_start_matches(is_space);
    let inside = inside.strip_prefix("endraw")?.trim_start_matches(is_space);
    let sign = inside.chars().next().filter(|c| matches!(c, '-' | '+'));
    let behind = inside[sign.map_or(0, char::len_utf8)..].strip_prefix("%}")?;
    Some((text.len() - behind.len(), sign))
}
