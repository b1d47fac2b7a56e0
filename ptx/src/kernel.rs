//! A kernel ready to run, and the registers that it needs.

use std::collections::HashMap;

use crate::instruction::Instruction;
use crate::syntax::Registers;
use crate::types::Class;

/// A kernel of a module.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub name: String,
    pub param_bytes: u32,
    pub param_align: u32,
    pub most_threads: Option<[u32; 3]>,
    pub exact_threads: Option<[u32; 3]>,
    pub static_shared: u32,
    pub dynamic_shared_at: u32,
    pub local_bytes: u32,
    /// Whether it reads through the read-only path, so that writes must be remembered.
    pub has_constant_loads: bool,
    /// Whether `ldmatrix` needs addresses of lanes whose rows it does not read: before compute capability 8.0.
    pub checks_all_rows: bool,
    pub files: Files,
    pub code: Vec<Instruction>,
}

/// Special registers with a value that a thread keeps (PTX ISA 10).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Special {
    Tid(usize),
    Ntid(usize),
    Ctaid(usize),
    Nctaid(usize),
    LaneId,
    WarpId,
    NWarpId,
    SmId,
    NSmId,
    LaneMaskEq,
    LaneMaskLt,
    LaneMaskLe,
    LaneMaskGt,
    LaneMaskGe,
    DynamicShared,
    TotalShared,
}

impl Special {
    pub fn parse(name: &str) -> Option<Special> {
        let (base, axis) = name.rsplit_once('.').unwrap_or((name, ""));
        let axis = ["x", "y", "z"].iter().position(|a| *a == axis);
        Some(match (base, axis) {
            ("%tid", Some(axis)) => Special::Tid(axis),
            ("%ntid", Some(axis)) => Special::Ntid(axis),
            ("%ctaid", Some(axis)) => Special::Ctaid(axis),
            ("%nctaid", Some(axis)) => Special::Nctaid(axis),
            ("%laneid", None) => Special::LaneId,
            ("%warpid", None) => Special::WarpId,
            ("%nwarpid", None) => Special::NWarpId,
            ("%smid", None) => Special::SmId,
            ("%nsmid", None) => Special::NSmId,
            ("%lanemask_eq", None) => Special::LaneMaskEq,
            ("%lanemask_lt", None) => Special::LaneMaskLt,
            ("%lanemask_le", None) => Special::LaneMaskLe,
            ("%lanemask_gt", None) => Special::LaneMaskGt,
            ("%lanemask_ge", None) => Special::LaneMaskGe,
            ("%dynamic_smem_size", None) => Special::DynamicShared,
            ("%total_smem_size", None) => Special::TotalShared,
            _ => return None,
        })
    }
}

/// Register files: the text's registers, and read-only places of constants and special registers.
#[derive(Debug)]
pub(crate) struct Files {
    pub sizes: Registers,
    words: HashMap<u32, u32>,
    doubles: HashMap<u64, u32>,
    predicates: HashMap<bool, u32>,
    specials: HashMap<Special, u32>,
}

impl Files {
    pub fn new(registers: &Registers) -> Files {
        Files {
            sizes: registers.clone(),
            words: HashMap::new(),
            doubles: HashMap::new(),
            predicates: HashMap::new(),
            specials: HashMap::new(),
        }
    }

    pub fn word(&mut self, value: u32) -> u32 {
        *self.words.entry(value).or_insert_with(|| self.sizes.add(Class::W32, 1).index)
    }

    pub fn double(&mut self, value: u64) -> u32 {
        *self.doubles.entry(value).or_insert_with(|| self.sizes.add(Class::W64, 1).index)
    }

    pub fn predicate(&mut self, value: bool) -> u32 {
        *self.predicates.entry(value).or_insert_with(|| self.sizes.add(Class::Pred, 1).index)
    }

    pub fn special(&mut self, special: Special) -> u32 {
        *self.specials.entry(special).or_insert_with(|| self.sizes.add(Class::W32, 1).index)
    }

    pub fn words(&self) -> impl Iterator<Item = (u32, usize)> {
        self.words.iter().map(|(value, at)| (*value, *at as usize))
    }

    pub fn doubles(&self) -> impl Iterator<Item = (u64, usize)> {
        self.doubles.iter().map(|(value, at)| (*value, *at as usize))
    }

    pub fn predicates(&self) -> impl Iterator<Item = (bool, usize)> {
        self.predicates.iter().map(|(value, at)| (*value, *at as usize))
    }

    pub fn specials(&self) -> impl Iterator<Item = (Special, usize)> {
        self.specials.iter().map(|(special, at)| (*special, *at as usize))
    }
}
