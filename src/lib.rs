//! Tandem: large language models on one machine whose GPU is too small for the job.
//!
//! A walk through the rooms, in the direction data takes:
//!
//! 1. [`text`] turns a prompt into tokens, and tokens back into text; it also samples.
//! 2. [`model`] reads model files into a [`model::ModelSpec`] (sizes, no format left) and named
//!    zero-copy weight views.
//! 3. [`engine`] holds a loaded model and the sequences in flight, and runs a forward pass.
//! 4. [`cache`] is where keys and values live: pages and block tables.
//! 5. [`device`] is where work runs beside the CPU: accelerators behind one contract; [`host`] is the CPU's cores and the thread
//!    pool over them, on which everything else stands.
//! 6. [`simd`], [`amx`] are the kernels; [`reference`](mod@reference) is the oracle of each.
//! 7. [`profile`] measures what the machine and the kernels can do, and how long a model's operations take.
//! 8. [`plan`] predicts where a model should run; [`sched`] says who is computed when; [`program`] is what is run where,
//!    as values.
//! 9. [`sim`] runs these schedulers and programs on a clock alone, over many requests.
//! 10. [`serve`] answers OpenAI's API over HTTP with a running engine.
//! 11. [`tensor`] has dtypes and the block formats that all of them share; [`rope`] the angles of rotary position embedding.
//!
//! Beside the way: [`hardware`] describes a machine in numbers, [`hub`] fetches models by name, [`workload`] has the requests that a machine is tried with,
//! [`timeline`] shows when what was computed.

pub mod amx;
pub mod atomic_file;
pub mod cache;
pub mod device;
pub mod engine;
pub mod error;
pub mod hardware;
pub mod host;
pub mod hub;
pub mod model;
pub mod plan;
pub mod profile;
pub mod program;
pub mod reference;
pub mod rope;
pub mod sched;
pub mod serve;
pub mod sim;
pub mod simd;
mod small_file;
pub mod tensor;
pub mod text;
pub mod timeline;
pub mod workload;

pub use error::{Error, Result};
