//! A module: kernels by name, and launching them.

use std::collections::HashMap;

use crate::decode::{self, Constants};
use crate::error::Error;
use crate::exec::Launch;
use crate::fault::{Fault, FaultKind};
use crate::kernel::Kernel;
use crate::memory::Memory;
use crate::options::{Options, Stats};
use crate::parser;

/// A PTX text, decoded.
#[derive(Debug)]
pub struct Module {
    source: String,
    target: String,
    constants: Constants,
    kernels: Vec<Kernel>,
    by_name: HashMap<String, usize>,
}

/// What a kernel says about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct KernelInfo<'a> {
    /// Its name.
    pub name: &'a str,
    /// Bytes of all parameters, padding between them included.
    pub param_bytes: u32,
    /// What the parameters are aligned to.
    pub param_align: u32,
    /// `.maxntid`.
    pub most_threads: Option<[u32; 3]>,
    /// `.reqntid`.
    pub exact_threads: Option<[u32; 3]>,
    /// Bytes of shared memory that it declares.
    pub static_shared: u32,
    /// Bytes of local memory that each thread has.
    pub local_bytes: u32,
    /// Instructions.
    pub instructions: usize,
}

impl Module {
    /// Reads a text, all of it.
    ///
    /// # Errors
    /// A directive, a form of an instruction or an operand is not known, or two kernels have one name.
    pub fn parse(text: &str) -> Result<Module, Error> {
        let syntax = parser::parse(text)?;
        let constants = Constants::new(&syntax);
        let mut kernels = Vec::with_capacity(syntax.entries.len());
        let mut by_name = HashMap::new();
        for entry in &syntax.entries {
            let kernel = decode::kernel(text, &syntax, &constants, entry)?;
            if by_name.insert(kernel.name.clone(), kernels.len()).is_some() {
                return Err(Error::new(text, 0, format!("kernel {} is there twice", kernel.name)));
            }
            kernels.push(kernel);
        }
        let target = syntax.target.to_owned();
        Ok(Module { source: text.to_owned(), target, constants, kernels, by_name })
    }

    /// `sm_80`.
    pub fn target(&self) -> &str {
        &self.target
    }

    /// All kernels, in the order of the text.
    pub fn kernels(&self) -> impl Iterator<Item = KernelInfo<'_>> {
        self.kernels.iter().map(|k| KernelInfo {
            name: &k.name,
            param_bytes: k.param_bytes,
            param_align: k.param_align,
            most_threads: k.most_threads,
            exact_threads: k.exact_threads,
            static_shared: k.static_shared,
            local_bytes: k.local_bytes,
            // Without the end that every kernel is given.
            instructions: k.code.len() - 1,
        })
    }

    /// Runs a kernel to its end: `grid` blocks of `block` threads with `dynamic_shared` bytes of shared memory each.
    ///
    /// # Errors
    /// There is no such kernel, it does not take this launch, or it does what it must not. What it wrote until then
    /// is in `memory`.
    pub fn launch(
        &self,
        kernel: &str,
        grid: [u32; 3],
        block: [u32; 3],
        dynamic_shared: u32,
        params: &[u8],
        memory: &mut dyn Memory,
        options: &Options,
    ) -> Result<Stats, Box<Fault>> {
        let refused = |problem: String| {
            Box::new(Fault {
                kernel: kernel.to_owned(),
                block: None,
                thread: None,
                line: 0,
                instruction: String::new(),
                kind: FaultKind::Launch(problem),
            })
        };
        let found = self.by_name.get(kernel).and_then(|at| self.kernels.get(*at));
        let found = found.ok_or_else(|| refused("the module has no such kernel".into()))?;
        let threads = block.iter().try_fold(1u32, |all, n| all.checked_mul(*n)).unwrap_or(u32::MAX);
        if threads == 0 || threads > 1024 || block[2] > 64 {
            return Err(refused(format!("a block of {block:?} threads")));
        }
        if grid.contains(&0) || grid[0] > i32::MAX as u32 || grid[1] > 65535 || grid[2] > 65535 {
            return Err(refused(format!("a grid of {grid:?} blocks")));
        }
        if let Some(most) = found.most_threads
            && threads > most.iter().product()
        {
            return Err(refused(format!("{threads} threads, .maxntid {most:?}")));
        }
        if let Some(exact) = found.exact_threads
            && block != exact
        {
            return Err(refused(format!("a block of {block:?} threads, .reqntid {exact:?}")));
        }
        if params.len() != found.param_bytes as usize {
            return Err(refused(format!("{} bytes of parameters, not {}", params.len(), found.param_bytes)));
        }
        // The most that any device has.
        if dynamic_shared > 227 * 1024 || found.static_shared > 48 * 1024 {
            return Err(refused(format!("{dynamic_shared} bytes of shared memory")));
        }
        let launch = Launch {
            source: &self.source,
            kernel: found,
            constants: &self.constants.bytes,
            grid,
            block,
            dynamic_shared,
            params,
        };
        launch.run(memory, options)
    }
}

/// The opcodes with their modifiers, of every instruction of a text in order; none of a text that is not understood.
pub fn forms(text: &str) -> Vec<String> {
    let syntax = parser::parse(text).unwrap_or_default();
    let statements = syntax.entries.iter().flat_map(|e| &e.body.statements);
    statements.map(|s| s.opcode.to_owned()).collect()
}
