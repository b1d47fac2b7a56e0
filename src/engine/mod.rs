//! A loaded model and its forward pass.
//!
//! [`Prepared`] is a model with its weights as the kernels read them; [`Engine`] adds the thread pool,
//! the paged KV cache and the sequences in flight. One call of [`Engine::forward`] takes any mix of
//! rows: chunks of prompts, single tokens of many sequences. Data walks embedding → (norm → QKV → RoPE →
//! append → attention → out → norm → feed-forward) per layer → norm → head.

mod forward;
mod memory;
mod prepare;
mod rope;
mod sequences;

pub use forward::{Input, Logits};
pub use memory::Memory;
pub use prepare::Prepared;
pub use sequences::{Engine, Options, SeqId};
