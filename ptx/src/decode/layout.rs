//! Where a kernel's variables are, and what their names mean as operands.

use std::collections::{HashMap, HashSet};

use crate::fault::Space;
use crate::memory::CONSTANT_WINDOW;
use crate::syntax::{Base, Entry, Operand, Syntax, Variable};

/// The module's own arrays, one after the other.
#[derive(Debug, Default, Clone)]
pub(crate) struct Constants {
    pub bytes: Vec<u8>,
    /// Addresses.
    names: HashMap<String, u64>,
}

impl Constants {
    pub fn new(syntax: &Syntax<'_>) -> Constants {
        let mut constants = Constants::default();
        for v in syntax.variables.iter().filter(|v| v.space == Space::Constant) {
            let at = constants.bytes.len().next_multiple_of(v.align as usize);
            constants.bytes.resize(at, 0);
            constants.bytes.extend_from_slice(&v.initial);
            constants.bytes.resize(at + v.bytes as usize, 0);
            constants.names.insert(v.name.to_owned(), CONSTANT_WINDOW + at as u64);
        }
        constants
    }
}

/// A kernel's shared and local memory.
#[derive(Debug)]
pub(super) struct Layout {
    /// Addresses in their spaces.
    names: HashMap<String, u64>,
    pub static_shared: u32,
    /// Where the memory begins that the launch gives.
    pub dynamic_at: u32,
    /// Of each thread.
    pub local_bytes: u32,
}

impl Layout {
    pub fn new(syntax: &Syntax<'_>, constants: &Constants, entry: &Entry<'_>) -> Layout {
        let mut names = constants.names.clone();
        for param in &entry.params {
            names.insert(param.name.to_owned(), u64::from(param.offset));
        }
        // Shared memory of the module belongs to those kernels that name it.
        let named: HashSet<&str> =
            entry.body.statements.iter().flat_map(|s| &s.operands).filter_map(name_of).collect();
        let of_module =
            syntax.variables.iter().filter(|v| v.space == Space::Shared && named.contains(v.name));
        let all: Vec<&Variable<'_>> = of_module.chain(&entry.body.variables).collect();
        let mut place = |space: Space| {
            let mut end = 0u64;
            for v in all.iter().filter(|v| v.space == space && v.bytes > 0) {
                let at = end.next_multiple_of(u64::from(v.align));
                names.insert(v.name.to_owned(), at);
                end = at + v.bytes;
            }
            end as u32
        };
        let (static_shared, local_bytes) = (place(Space::Shared), place(Space::Local));
        let dynamic: Vec<_> = all.iter().filter(|v| v.space == Space::Shared && v.bytes == 0).collect();
        let align = dynamic.iter().map(|v| v.align).max().unwrap_or(1);
        let dynamic_at = static_shared.next_multiple_of(align);
        for v in dynamic {
            names.insert(v.name.to_owned(), u64::from(dynamic_at));
        }
        Layout { names, static_shared, dynamic_at, local_bytes }
    }

    pub fn address(&self, name: &str) -> Option<u64> {
        self.names.get(name).copied()
    }
}

fn name_of<'a>(operand: &Operand<'a>) -> Option<&'a str> {
    match operand {
        Operand::Name(name) | Operand::Address(Base::Name(name), _) => Some(name),
        _ => None,
    }
}
