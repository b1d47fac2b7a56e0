//! Tokens to a module's parts (PTX ISA 4, 5 and 11).

mod body;
mod declare;

use crate::error::Error;
use crate::fault::Space;
use crate::lexer::{Lexer, Token};
use crate::syntax::{Entry, Param, Syntax};
use crate::types::Type;

/// Reads a module.
pub(crate) fn parse(text: &str) -> Result<Syntax<'_>, Error> {
    let mut lexer = Lexer::new(text);
    let mut syntax = Syntax::default();
    while let Some(token) = lexer.next()? {
        let Token::Word(word) = token else { return Err(lexer.error("a directive expected")) };
        match word {
            ".version" => drop(lexer.next()?),
            ".target" => {
                syntax.target = lexer.word()?;
                while lexer.take(',')? {
                    lexer.word()?;
                }
            }
            ".address_size" => {
                if lexer.integer()? != 64 {
                    return Err(lexer.error("addresses of 64 bits only"));
                }
            }
            ".visible" | ".weak" | ".extern" => {}
            ".file" | ".loc" => lexer.skip_line(),
            ".pragma" => skip_to(&mut lexer, ';')?,
            // Debug information.
            ".section" => skip_to(&mut lexer, '}')?,
            ".entry" => syntax.entries.push(entry(&mut lexer)?),
            ".shared" => declare::variable(&mut lexer, Space::Shared, &mut syntax.variables)?,
            ".global" | ".const" => declare::variable(&mut lexer, Space::Constant, &mut syntax.variables)?,
            _ => return Err(lexer.error(format!("`{word}` is unknown here"))),
        }
    }
    Ok(syntax)
}

fn skip_to(lexer: &mut Lexer<'_>, mark: char) -> Result<(), Error> {
    while !lexer.take(mark)? {
        if lexer.next()?.is_none() {
            return Err(lexer.error(format!("`{mark}` expected")));
        }
    }
    Ok(())
}

fn entry<'a>(lexer: &mut Lexer<'a>) -> Result<Entry<'a>, Error> {
    let name = lexer.word()?;
    let params = if lexer.take('(')? { params(lexer)? } else { Vec::new() };
    let (mut most_threads, mut exact_threads) = (None, None);
    while let Some(Token::Word(directive)) = lexer.peek()? {
        lexer.next()?;
        match directive {
            ".maxntid" => most_threads = Some(dimensions(lexer)?),
            ".reqntid" => exact_threads = Some(dimensions(lexer)?),
            // Hints to the assembler.
            ".minnctapersm" | ".maxnreg" => drop(lexer.integer()?),
            ".pragma" => skip_to(lexer, ';')?,
            _ => return Err(lexer.error(format!("`{directive}` is unknown of a kernel"))),
        }
    }
    lexer.expect('{')?;
    let body = body::body(lexer)?;
    Ok(Entry { name, params, most_threads, exact_threads, body })
}

/// One to three numbers; those left out are 1.
fn dimensions(lexer: &mut Lexer<'_>) -> Result<[u32; 3], Error> {
    let mut all = [1; 3];
    for (i, one) in all.iter_mut().enumerate() {
        if i > 0 && !lexer.take(',')? {
            break;
        }
        *one = lexer.integer()? as u32;
    }
    Ok(all)
}

fn params<'a>(lexer: &mut Lexer<'a>) -> Result<Vec<Param<'a>>, Error> {
    let mut params = Vec::new();
    let mut end = 0u32;
    while !lexer.take(')')? {
        if !params.is_empty() {
            lexer.expect(',')?;
        }
        if lexer.word()? != ".param" {
            return Err(lexer.error("`.param` expected"));
        }
        let (mut align, mut kind, mut pointer) = (None, None, false);
        let name = loop {
            let word = lexer.word()?;
            match word.strip_prefix('.') {
                // The alignment after `.ptr` is of what the pointer points to.
                Some("align") if pointer => drop(lexer.integer()?),
                Some("align") => align = Some(lexer.integer()? as u32),
                Some("ptr") => pointer = true,
                Some("global" | "shared" | "const" | "local") if pointer => {}
                Some(word) => match Type::parse(word).filter(|t| *t != Type::Pred) {
                    Some(found) => kind = Some(found),
                    None => return Err(lexer.error(format!("`.{word}` is unknown of a parameter"))),
                },
                None => break word,
            }
        };
        let kind = kind.ok_or_else(|| lexer.error("a parameter without type"))?;
        let mut bytes = kind.bytes();
        if lexer.take('[')? {
            bytes *= lexer.integer()? as u32;
            lexer.expect(']')?;
        }
        let align = align.unwrap_or(kind.bytes());
        if !align.is_power_of_two() {
            return Err(lexer.error("an alignment must be a power of two"));
        }
        let offset = end.next_multiple_of(align);
        end = offset + bytes;
        params.push(Param { name, align, offset, bytes });
    }
    Ok(params)
}
