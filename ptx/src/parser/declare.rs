//! Variables (PTX ISA 5.4).

use crate::error::Error;
use crate::fault::Space;
use crate::lexer::{Lexer, Token};
use crate::syntax::Variable;
use crate::types::Type;

/// What follows `.shared`, `.local`, `.global` or `.const`, up to the semicolon.
pub(super) fn variable<'a>(
    lexer: &mut Lexer<'a>,
    space: Space,
    to: &mut Vec<Variable<'a>>,
) -> Result<(), Error> {
    let (mut align, mut kind) = (None, None);
    let name = loop {
        let word = lexer.word()?;
        match word.strip_prefix('.') {
            Some("align") => align = Some(lexer.integer()? as u32),
            Some("attribute") => return Err(lexer.error("attributes of variables are unknown")),
            Some(word) => match Type::parse(word).filter(|t| *t != Type::Pred) {
                Some(found) => kind = Some(found),
                None => return Err(lexer.error(format!("`.{word}` is unknown of a variable"))),
            },
            None => break word,
        }
    };
    let kind = kind.ok_or_else(|| lexer.error("a variable without type"))?;
    let align = align.unwrap_or(kind.bytes());
    if !align.is_power_of_two() {
        return Err(lexer.error("an alignment must be a power of two"));
    }
    let mut count = 1;
    let mut unsized_ = false;
    while lexer.take('[')? {
        if lexer.take(']')? {
            unsized_ = true;
        } else {
            count *= lexer.integer()?;
            lexer.expect(']')?;
        }
    }
    let mut initial = Vec::new();
    if lexer.take('=')? {
        values(lexer, kind, &mut initial)?;
    }
    lexer.expect(';')?;
    let bytes = if unsized_ { initial.len() as u64 } else { count * u64::from(kind.bytes()) };
    if bytes == 0 && space != Space::Shared || initial.len() as u64 > bytes {
        return Err(lexer.error("the size of the variable"));
    }
    to.push(Variable { space, name, align, bytes, initial });
    Ok(())
}

/// A number, or numbers in braces.
fn values(lexer: &mut Lexer<'_>, kind: Type, to: &mut Vec<u8>) -> Result<(), Error> {
    if lexer.take('{')? {
        loop {
            values(lexer, kind, to)?;
            if !lexer.take(',')? {
                return lexer.expect('}');
            }
        }
    }
    let negative = lexer.take('-')?;
    let value = match lexer.next()? {
        Some(Token::Integer(value)) if negative => value.wrapping_neg(),
        Some(Token::Integer(value)) => value,
        Some(Token::Single(bits)) if kind == Type::F32 => u64::from(bits),
        Some(Token::Double(bits)) if kind == Type::F64 => bits,
        _ => return Err(lexer.error("numbers only, as initial values")),
    };
    to.extend_from_slice(&value.to_le_bytes()[..kind.bytes() as usize]);
    Ok(())
}
