//! What a launch may not do.

use std::fmt;

use crate::memory::MemoryFault;

/// A launch that went wrong: where, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The kernel's name.
    pub kernel: String,
    /// The block's index; `None` if the launch was refused.
    pub block: Option<[u32; 3]>,
    /// The thread's index within its block; `None` if the fault is of a warp or a block.
    pub thread: Option<[u32; 3]>,
    /// The line of the PTX, from 1; 0 if the launch was refused.
    pub line: u32,
    /// The line's text.
    pub instruction: String,
    /// What is wrong.
    pub kind: FaultKind,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel {}", self.kernel)?;
        if let Some([x, y, z]) = self.block {
            write!(f, ", block ({x}, {y}, {z})")?;
        }
        if let Some([x, y, z]) = self.thread {
            write!(f, ", thread ({x}, {y}, {z})")?;
        }
        if self.line > 0 {
            write!(f, ", PTX line {}: {}", self.line, self.instruction)?;
        }
        write!(f, ": {}", self.kind)
    }
}

impl std::error::Error for Fault {}

/// State spaces that a fault names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Space {
    /// Of the block.
    Shared,
    /// Of the thread.
    Local,
    /// The kernel's parameters.
    Param,
    /// Of the module, read only.
    Constant,
    /// Everyone's: the caller's memory.
    Global,
}

impl fmt::Display for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Space::Shared => "shared",
            Space::Local => "local",
            Space::Param => "parameter",
            Space::Constant => "constant",
            Space::Global => "global",
        })
    }
}

/// Kinds of faults.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FaultKind {
    /// Grid, block, shared memory or parameters are not what the kernel takes.
    #[error("launch refused: {0}")]
    Launch(String),
    /// Outside of a space that the interpreter owns.
    #[error("{bytes} bytes at {address:#x} are outside of {space} memory of {size} bytes")]
    Outside {
        /// The space.
        space: Space,
        /// Address in it.
        address: u64,
        /// Bytes accessed.
        bytes: u32,
        /// Bytes that there are.
        size: u64,
    },
    /// An address must be a multiple of the bytes accessed.
    #[error("{space} address {address:#x} is not aligned to {bytes} bytes")]
    Misaligned {
        /// The space.
        space: Space,
        /// The address.
        address: u64,
        /// Its alignment should be this.
        bytes: u32,
    },
    /// The caller's memory refuses.
    #[error(transparent)]
    Memory(#[from] MemoryFault),
    /// Nobody wrote these bytes of shared memory, or an asynchronous copy to them is in flight.
    #[error("shared memory at {address:#x} ({bytes} bytes) is read before it is written")]
    Uninitialised {
        /// Address in shared memory.
        address: u64,
        /// Bytes accessed.
        bytes: u32,
    },
    /// `ld.global.nc` needs memory that is constant while the kernel runs.
    #[error(
        "global memory at {address:#x} is read through the read-only path and written by the same launch"
    )]
    NotConstant {
        /// The address.
        address: u64,
    },
    /// A write to memory that is read only.
    #[error("{0} memory is read only")]
    ReadOnly(Space),
    /// Threads of a warp that must execute an instruction together do not.
    #[error("executed by lanes {active:#010x} of {wanted:#010x}, which must come together")]
    Diverged {
        /// Lanes that came.
        active: u32,
        /// Lanes that must come.
        wanted: u32,
    },
    /// A barrier's number or count is wrong.
    #[error("barrier {id}: {problem}")]
    Barrier {
        /// Its number.
        id: u32,
        /// What is wrong.
        problem: String,
    },
    /// No warp of the block can go on.
    #[error("deadlock: {0}")]
    Deadlock(String),
    /// More instructions than the options allow.
    #[error("budget of {0} instructions of a warp spent")]
    Budget(u64),
    /// An operand that the instruction does not take.
    #[error("operand: {0}")]
    Operand(String),
    /// `trap`.
    #[error("trap")]
    Trap,
}

/// A fault and the lane that it is of.
#[derive(Debug)]
pub(crate) struct Problem {
    pub lane: Option<u32>,
    pub kind: FaultKind,
}

impl Problem {
    pub fn of_lane(lane: usize, kind: impl Into<FaultKind>) -> Box<Problem> {
        Box::new(Problem { lane: Some(lane as u32), kind: kind.into() })
    }
    pub fn of_warp(kind: impl Into<FaultKind>) -> Box<Problem> {
        Box::new(Problem { lane: None, kind: kind.into() })
    }
}

/// What executing an instruction gives.
pub(crate) type Outcome<T = ()> = Result<T, Box<Problem>>;
