//! A kernel's body: registers by scope, labels, instructions.

use std::collections::HashMap;

use super::declare;
use crate::error::Error;
use crate::fault::Space;
use crate::lexer::{Lexer, Token};
use crate::syntax::{Base, Body, Operand, Registers, Statement};
use crate::types::{Class, Register, Type};

/// What a scope declares.
#[derive(Default)]
struct Scope<'a> {
    number: u32,
    single: HashMap<&'a str, Register>,
    /// `%r<33>`: by `%r`, the first and how many.
    numbered: HashMap<&'a str, (Register, u32)>,
}

struct Parser<'a, 'l> {
    lexer: &'l mut Lexer<'a>,
    scopes: Vec<Scope<'a>>,
    body: Body<'a>,
}

/// Reads up to the closing brace.
pub(super) fn body<'a>(lexer: &mut Lexer<'a>) -> Result<Body<'a>, Error> {
    let body = Body {
        statements: Vec::new(),
        variables: Vec::new(),
        labels: HashMap::new(),
        parents: vec![0],
        registers: Registers::default(),
    };
    let mut parser = Parser { lexer, scopes: vec![Scope::default()], body };
    while !parser.scopes.is_empty() {
        parser.step()?;
    }
    Ok(parser.body)
}

impl<'a> Parser<'a, '_> {
    fn scope(&self) -> u32 {
        self.scopes.last().map_or(0, |s| s.number)
    }

    fn step(&mut self) -> Result<(), Error> {
        match self.lexer.next()? {
            Some(Token::Mark('{')) => {
                let number = self.body.parents.len() as u32;
                self.body.parents.push(self.scope());
                self.scopes.push(Scope { number, ..Scope::default() });
            }
            Some(Token::Mark('}')) => drop(self.scopes.pop()),
            Some(Token::Mark(';')) => {}
            Some(Token::Mark('@')) => {
                let negated = self.lexer.take('!')?;
                let name = self.lexer.word()?;
                let register = self.register(name).filter(|r| r.class == Class::Pred);
                let register =
                    register.ok_or_else(|| self.lexer.error(format!("`{name}` is no predicate")))?;
                let opcode = self.lexer.word()?;
                self.statement(Some((register, negated)), opcode)?;
            }
            Some(Token::Word(".reg")) => self.registers()?,
            Some(Token::Word(".shared")) => {
                declare::variable(self.lexer, Space::Shared, &mut self.body.variables)?;
            }
            Some(Token::Word(".local")) => {
                declare::variable(self.lexer, Space::Local, &mut self.body.variables)?;
            }
            Some(Token::Word(".pragma")) => super::skip_to(self.lexer, ';')?,
            Some(Token::Word(".loc")) => self.lexer.skip_line(),
            Some(Token::Word(word)) if word.starts_with('.') => {
                return Err(self.lexer.error(format!("`{word}` is unknown here")));
            }
            Some(Token::Word(word)) => {
                let line = self.lexer.line_of_token();
                if self.lexer.take(':')? {
                    let at = self.body.statements.len() as u32;
                    if self.body.labels.insert((self.scope(), word), at).is_some() {
                        return Err(self.lexer.error(format!("`{word}` is there twice")));
                    }
                } else {
                    self.statement_at(line, None, word)?;
                }
            }
            _ => return Err(self.lexer.error("an instruction expected")),
        }
        Ok(())
    }

    fn registers(&mut self) -> Result<(), Error> {
        let word = self.lexer.word()?;
        let kind = word.strip_prefix('.').and_then(Type::parse);
        let class = kind.and_then(Type::class);
        let class = class.ok_or_else(|| self.lexer.error(format!("registers of `{word}`")))?;
        loop {
            let name = self.lexer.word()?;
            let count = if self.lexer.take('<')? {
                let count = self.lexer.integer()? as u32;
                self.lexer.expect('>')?;
                Some(count)
            } else {
                None
            };
            let first = self.body.registers.add(class, count.unwrap_or(1));
            let Some(scope) = self.scopes.last_mut() else { break };
            match count {
                Some(count) => drop(scope.numbered.insert(name, (first, count))),
                None => drop(scope.single.insert(name, first)),
            }
            if !self.lexer.take(',')? {
                break;
            }
        }
        self.lexer.expect(';')
    }

    fn register(&self, name: &str) -> Option<Register> {
        let prefix = name.trim_end_matches(|c: char| c.is_ascii_digit());
        let number = name[prefix.len()..].parse::<u32>();
        self.scopes.iter().rev().find_map(|scope| {
            if let Some(register) = scope.single.get(name) {
                return Some(*register);
            }
            let (first, count) = scope.numbered.get(prefix)?;
            let number = number.clone().ok().filter(|n| n < count)?;
            Some(Register { class: first.class, index: first.index + number })
        })
    }

    fn statement(&mut self, guard: Option<(Register, bool)>, opcode: &'a str) -> Result<(), Error> {
        let line = self.lexer.line_of_token();
        self.statement_at(line, guard, opcode)
    }

    fn statement_at(
        &mut self,
        line: u32,
        guard: Option<(Register, bool)>,
        opcode: &'a str,
    ) -> Result<(), Error> {
        let mut operands = Vec::new();
        while !self.lexer.take(';')? {
            if !operands.is_empty() {
                self.lexer.expect(',')?;
            }
            operands.push(self.operand()?);
        }
        let scope = self.scope();
        self.body.statements.push(Statement { line, scope, guard, opcode, operands });
        Ok(())
    }

    fn operand(&mut self) -> Result<Operand<'a>, Error> {
        Ok(match self.lexer.next()? {
            Some(Token::Mark('-')) => Operand::Integer(self.lexer.integer()?.wrapping_neg()),
            Some(Token::Integer(value)) => Operand::Integer(value),
            Some(Token::Single(bits)) => Operand::Single(bits),
            Some(Token::Double(bits)) => Operand::Double(bits),
            Some(Token::Mark('!')) => {
                let name = self.lexer.word()?;
                let register = self.register(name);
                Operand::Not(register.ok_or_else(|| self.lexer.error(format!("`{name}` is no register")))?)
            }
            Some(Token::Mark('{')) => {
                let mut all = Vec::new();
                loop {
                    all.push(self.operand()?);
                    if !self.lexer.take(',')? {
                        break;
                    }
                }
                self.lexer.expect('}')?;
                Operand::Vector(all)
            }
            Some(Token::Mark('[')) => self.address()?,
            Some(Token::Word(name)) => match self.register(name) {
                None => Operand::Name(name),
                Some(first) if self.lexer.take('|')? => {
                    let name = self.lexer.word()?;
                    let second = self.register(name);
                    let unknown = || self.lexer.error(format!("`{name}` is no register"));
                    Operand::Pair(first, second.ok_or_else(unknown)?)
                }
                Some(register) => Operand::Register(register),
            },
            _ => return Err(self.lexer.error("an operand expected")),
        })
    }

    /// `[name]`, `[%rd1+8]`, `[%rd1+-8]`.
    fn address(&mut self) -> Result<Operand<'a>, Error> {
        let base = match self.lexer.peek()? {
            Some(Token::Word(name)) => {
                self.lexer.next()?;
                self.register(name).map_or(Base::Name(name), Base::Register)
            }
            _ => Base::Absolute,
        };
        if self.lexer.take(',')? {
            let Operand::Vector(at) = self.operand()? else {
                return Err(self.lexer.error("coordinates expected"));
            };
            self.lexer.expect(']')?;
            return Ok(Operand::Tensor(base, at));
        }
        let mut offset = 0i64;
        while !self.lexer.take(']')? {
            self.lexer.take('+')?;
            let negative = self.lexer.take('-')?;
            let value = self.lexer.integer()? as i64;
            offset = offset.wrapping_add(if negative { -value } else { value });
        }
        Ok(Operand::Address(base, offset))
    }
}
