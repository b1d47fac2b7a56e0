//! Tandem: large language models on one machine whose GPU is too small for the job.
//!
//! ```
//! use std::sync::Arc;
//! use tandem::progress::Silent;
//! use tandem::{Batcher, Demand, Event, Model, Request, Settings};
//!
//! # fn main() -> tandem::Result<()> {
//! // A .gguf file, a folder, a name that `tandem pull` knows, or random weights.
//! let model = Model::open("synth:tiny-llama", &Silent)?;
//! // Room for a prompt of 8 tokens and an answer of 16, wherever that is fastest on this machine.
//! let running = model.engine(&Settings::default(), &Demand::one(8, 16), &Silent)?;
//!
//! let mut requests = Batcher::new(running.engine);
//! requests.set_tokenizer(model.tokenizer()?.map(Arc::new));
//! let request = Request { prompt: vec![1, 2, 3], max_tokens: 16, ..Request::default() };
//! let (_, events) = requests.submit(request)?;
//! requests.run();
//! let mut answer = String::new();
//! for event in events {
//!     match event {
//!         Event::Token(token) => answer += &token.text,
//!         Event::Cached(_) | Event::Prompt(_) => {}
//!         Event::End(how) => println!("{answer} ({how:?})"),
//!     }
//! }
//! # assert_eq!(answer.split_whitespace().count(), 16);
//! # Ok(())
//! # }
//! ```
//! The front of the house: [`Model`] opens, [`Settings`] say how it is to run, [`Engine`] is where it runs, a [`Batcher`]
//! serves [`Request`]s with it step by step, and a [`Service`] from any thread.
//!
//! A walk through the rooms, in the direction data takes:
//!
//! 1. [`open`] finds a model by name, chooses where it runs, and loads it there.
//! 2. [`text`] turns a prompt into tokens, and tokens back into text; it also samples.
//! 3. [`model`] reads model files into a [`model::ModelSpec`] (sizes, no format left) and named
//!    zero-copy weight views.
//! 4. [`engine`] holds a loaded model and the sequences in flight, and runs a forward pass.
//! 5. [`cache`] is where keys and values live: pages and block tables.
//! 6. [`device`] is where work runs beside the CPU: accelerators behind one contract; [`host`] is the CPU's cores and the thread
//!    pool over them, on which everything else stands.
//! 7. [`simd`], [`amx`] are the kernels; [`reference`](mod@reference) is the oracle of each.
//! 8. [`profile`] measures what the machine and the kernels can do, and how long a model's operations take.
//! 9. [`plan`] predicts where a model should run; [`sched`] says who is computed when; [`program`] is what is run where,
//!    as values.
//! 10. [`sim`] runs these schedulers and programs on a clock alone, over many requests.
//! 11. [`serve`] answers OpenAI's API over HTTP with a running engine.
//! 12. [`tensor`] has dtypes and the block formats that all of them share; [`rope`] the angles of rotary position embedding.
//!
//! Four rooms stand apart: [`hardware`] describes a machine in numbers, [`hub`] fetches models by name, [`workload`] has the
//! requests that a machine is tried with, [`timeline`] shows when what was computed.

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
pub mod open;
pub mod plan;
pub mod profile;
pub mod program;
pub mod progress;
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

pub use engine::{Batcher, Engine, Event, Finish, Request, Service};
pub use error::{Error, Result};
pub use open::{Demand, Model, Settings};
