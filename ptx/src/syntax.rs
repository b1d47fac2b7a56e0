//! What the parser makes of a text: names of registers are resolved, instructions are not yet understood.

use std::collections::HashMap;

use crate::fault::Space;
use crate::types::{Class, Register};

/// A module's text.
#[derive(Debug, Default)]
pub(crate) struct Syntax<'a> {
    pub target: &'a str,
    pub variables: Vec<Variable<'a>>,
    pub entries: Vec<Entry<'a>>,
}

/// `.shared`, `.local`, `.global` or `.const`.
#[derive(Debug)]
pub(crate) struct Variable<'a> {
    pub space: Space,
    pub name: &'a str,
    pub align: u32,
    /// 0 of `.extern .shared name[]`, which begins where the block's own shared memory ends.
    pub bytes: u64,
    /// Shorter than `bytes`: zeros follow.
    pub initial: Vec<u8>,
}

/// `.param` of a kernel: its place in the parameter bytes.
#[derive(Debug)]
pub(crate) struct Param<'a> {
    pub name: &'a str,
    pub align: u32,
    pub offset: u32,
    pub bytes: u32,
}

/// `.entry`.
#[derive(Debug)]
pub(crate) struct Entry<'a> {
    pub name: &'a str,
    pub params: Vec<Param<'a>>,
    /// `.maxntid`: the product bounds the threads of a block.
    pub most_threads: Option<[u32; 3]>,
    /// `.reqntid`.
    pub exact_threads: Option<[u32; 3]>,
    pub body: Body<'a>,
}

/// What is between a kernel's braces.
#[derive(Debug)]
pub(crate) struct Body<'a> {
    pub statements: Vec<Statement<'a>>,
    pub variables: Vec<Variable<'a>>,
    /// By the scope that they are in: the statement that follows.
    pub labels: HashMap<(u32, &'a str), u32>,
    /// Of each scope, the one around it; of the first, itself.
    pub parents: Vec<u32>,
    pub registers: Registers,
}

impl Body<'_> {
    /// Where a label that is seen from `scope` is.
    pub fn label(&self, mut scope: u32, name: &str) -> Option<u32> {
        loop {
            if let Some(at) = self.labels.get(&(scope, name)) {
                return Some(*at);
            }
            let parent = self.parents[scope as usize];
            if parent == scope {
                return None;
            }
            scope = parent;
        }
    }
}

/// Registers of each file.
#[derive(Debug, Default, Clone)]
pub(crate) struct Registers {
    pub predicates: u32,
    /// Of 16 and 32 bits.
    pub words: u32,
    pub doubles: u32,
}

impl Registers {
    /// `count` new ones, next to each other: the first.
    pub fn add(&mut self, class: Class, count: u32) -> Register {
        let file = match class {
            Class::Pred => &mut self.predicates,
            Class::W16 | Class::W32 => &mut self.words,
            Class::W64 => &mut self.doubles,
        };
        let index = *file;
        *file += count;
        Register { class, index }
    }
}

/// An instruction.
#[derive(Debug)]
pub(crate) struct Statement<'a> {
    pub line: u32,
    pub scope: u32,
    /// A predicate, and whether it must be false.
    pub guard: Option<(Register, bool)>,
    pub opcode: &'a str,
    pub operands: Vec<Operand<'a>>,
}

/// An operand as written.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Operand<'a> {
    Register(Register),
    /// `!%p`
    Not(Register),
    /// `%r|%p`, `%p|%q`
    Pair(Register, Register),
    /// A special register, a variable, a label.
    Name(&'a str),
    Integer(u64),
    Single(u32),
    Double(u64),
    Vector(Vec<Operand<'a>>),
    /// `[map, {x, y}]`
    Tensor(Base<'a>, Vec<Operand<'a>>),
    /// `[base + offset]`
    Address(Base<'a>, i64),
}

/// What an address counts from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Base<'a> {
    Register(Register),
    Name(&'a str),
    Absolute,
}
