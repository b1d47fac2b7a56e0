//! A loaded model and its forward pass.
//!
//! [`Engine`] holds the sequences in flight and an executor, of which there is one per way of running a plan:
//! all on the CPU ([`Prepared`] is a model with its weights as the CPU's kernels read them), or all on an
//! accelerator, whose weights are laid out in [`weights`]. One call of [`Engine::forward`] takes any mix of
//! rows: chunks of prompts, single tokens of many sequences. Data walks embedding → (norm → QKV → RoPE →
//! append → attention → out → norm → feed-forward) per layer → norm → head.

mod cpu_only;
mod executor;
mod forward;
mod gpu_only;
mod memory;
mod prepare;
mod rope;
mod sequences;
pub mod weights;

pub use executor::Placement;
pub use forward::{Input, Logits};
pub use memory::Memory;
pub use prepare::Prepared;
pub use sequences::{Engine, Options, SeqId};
