//! Text in, tokens out, and back.
//!
//! - `template` turns a conversation into one prompt, as the model was trained to see it, and [`sandbox`] does so
//!   where the template is a stranger's;
//! - `tokenizer` turns text into token ids, and ids into bytes;
//! - `sampler` picks the next id from the model's logits;
//! - `stream` turns the bytes of successive tokens into text that is safe to print at once.

mod sampler;
pub mod sandbox;
mod stream;
mod template;
mod tokenizer;

pub use sampler::{Sampler, SamplerParams, logprobs, token_logprob};
pub use sandbox::Sandbox;
pub use stream::{StreamDecoder, StreamOutput};
pub use template::{ChatTemplate, Message};
pub use tokenizer::Tokenizer;
