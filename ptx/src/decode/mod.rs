//! Statements to instructions: what an opcode's modifiers and operands mean.

mod arithmetic;
mod bits;
mod compare;
mod control;
mod convert;
mod hopper;
mod layout;
mod matrix;
mod memory;
mod modifiers;
mod movement;
mod operands;

use crate::error::Error;
use crate::instruction::{Instruction, Op};
use crate::kernel::Kernel;
use crate::syntax::{Entry, Statement, Syntax};

use layout::Layout;
use modifiers::Modifiers;

/// What a statement may be rejected for.
type Result<T> = std::result::Result<T, String>;

/// Decodes one kernel.
pub(crate) struct Decoder<'s> {
    entry: &'s Entry<'s>,
    layout: Layout,
    /// Registers of the kernel, then constants and special registers.
    files: crate::kernel::Files,
}

/// A kernel of a module.
///
/// # Errors
/// A form that is not known.
pub(crate) fn kernel(
    source: &str,
    syntax: &Syntax<'_>,
    constants: &layout::Constants,
    entry: &Entry<'_>,
) -> std::result::Result<Kernel, Error> {
    let layout = Layout::new(syntax, constants, entry);
    let files = crate::kernel::Files::new(&entry.body.registers);
    let mut decoder = Decoder { entry, layout, files };
    let mut code = Vec::with_capacity(entry.body.statements.len() + 1);
    for statement in &entry.body.statements {
        let op = decoder.statement(statement);
        let op = op.map_err(|problem| Error::new(source, statement.line, problem))?;
        let guard = statement.guard.map(|(register, negated)| (register.index, negated));
        code.push(Instruction { op, guard, line: statement.line });
    }
    // Running off the end is `ret`.
    let line = entry.body.statements.last().map_or(0, |s| s.line);
    code.push(Instruction { op: Op::Exit, guard: None, line });
    let Decoder { layout, files, .. } = decoder;
    let param_bytes = entry.params.last().map_or(0, |p| p.offset + p.bytes);
    let param_align = entry.params.iter().map(|p| p.align).max().unwrap_or(1);
    Ok(Kernel {
        name: entry.name.to_owned(),
        param_bytes,
        param_align,
        most_threads: entry.most_threads,
        exact_threads: entry.exact_threads,
        static_shared: layout.static_shared,
        dynamic_shared_at: layout.dynamic_at,
        local_bytes: layout.local_bytes,
        checks_all_rows: syntax.target.starts_with("sm_7"),
        has_constant_loads: code.iter().any(|i| is_constant_load(&i.op)),
        files,
        code,
    })
}

pub(crate) use layout::Constants;

fn is_constant_load(op: &Op) -> bool {
    matches!(op, Op::Load(access) if access.semantics == crate::memory::Semantics::Constant)
}

impl Decoder<'_> {
    fn statement(&mut self, statement: &Statement<'_>) -> Result<Op> {
        let mut words = statement.opcode.split('.');
        let name = words.next().unwrap_or_default();
        let mut modifiers = Modifiers::new(words);
        let (m, s) = (&mut modifiers, statement);
        let op = match name {
            "mov" => self.mov(m, s),
            "cvta" => self.cvta(m, s),
            "selp" => self.selp(m, s),
            "add" | "sub" | "mul" | "div" | "rem" | "min" | "max" | "copysign" => self.binary(name, m, s),
            "mad" | "fma" => self.mad(name, m, s),
            "neg" | "abs" | "rcp" | "sqrt" | "rsqrt" | "ex2" | "lg2" | "sin" | "cos" | "tanh" => {
                self.unary(name, m, s)
            }
            "and" | "or" | "xor" | "not" | "cnot" | "shl" | "shr" => self.bitwise(name, m, s),
            "popc" | "clz" | "brev" | "bfind" => self.count(name, m, s),
            "lop3" | "prmt" | "shf" | "dp4a" | "sad" => self.triple(name, m, s),
            "bfe" | "bfi" => self.bit_field(name, m, s),
            "setp" | "set" => self.compare(name, m, s),
            "cvt" => self.cvt(m, s),
            "ld" | "st" | "ldu" => self.access(name, m, s),
            "atom" | "red" => self.atomic(name, m, s),
            "isspacep" => self.is_space(m, s),
            "cp" => self.copy(m, s),
            "prefetch" | "prefetchu" | "applypriority" | "discard" | "griddepcontrol" => {
                self.hint(name, m, s)
            }
            "membar" | "fence" => self.fence(name, m, s),
            "bra" | "ret" | "exit" | "trap" | "nanosleep" => self.jump(name, m, s),
            "bar" | "barrier" => self.barrier(m, s),
            "shfl" | "vote" | "activemask" | "redux" => self.warp(name, m, s),
            "mma" | "ldmatrix" | "movmatrix" => self.matrix(name, m, s),
            "mbarrier" => self.mbarrier(m, s),
            "wgmma" => self.wgmma(m, s),
            "setmaxnreg" => self.max_registers(m, s),
            _ => Err("an unknown instruction".into()),
        }?;
        modifiers.done()?;
        Ok(op)
    }
}
