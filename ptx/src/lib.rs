//! Runs PTX, the text that nvcc makes of the kernels, on the CPU.
//!
//! What the host emulation cannot show is in that text: inline PTX and the order of its operands, the layout of
//! parameters, branches for the device only. [`Module::parse`] reads a text, and [`Module::launch`] executes a kernel
//! of it: warps of 32 lanes with barriers, shuffles, asynchronous copies and matrix instructions, written from the PTX ISA
//! (<https://docs.nvidia.com/cuda/parallel-thread-execution/>, whose sections the comments name).
//!
//! Texts for compute capability 7.5, 8.0, 9.0 and 9.0a are read as far as nvcc makes them of these kernels. Forms that
//! are not known are errors when a text is read. What a kernel must not do is a [`Fault`] that names the thread and the
//! line: addresses outside of everything, reads of shared memory that nobody wrote or that a copy in flight will write,
//! read-only loads of what the launch writes, barriers that part of a block misses, loops without end, copies and
//! products that nobody waits for.
//!
//! Where the ISA leaves a choice: approximations are the exact value, rounded; `mma` of floats sums in f32 in the
//! order of k; blocks run one after the other, in an order of the [`Options`].

mod decode;
mod error;
mod exec;
mod fault;
mod instruction;
mod kernel;
mod lexer;
mod memory;
mod module;
mod number;
mod options;
mod parser;
mod syntax;
mod tensor;
mod types;

pub use error::Error;
pub use fault::{Fault, FaultKind, Space};
pub use memory::{
    Buffers, CONSTANT_WINDOW, LOCAL_WINDOW, Memory, MemoryFault, PARAM_WINDOW, SHARED_WINDOW, Scope,
    Semantics,
};
pub use module::{KernelInfo, Module, forms};
pub use options::{Landing, Options, Order, Stats};
pub use tensor::TensorMap;
