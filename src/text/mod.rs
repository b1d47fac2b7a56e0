//! Text in, tokens out, and back.
//!
//! - `template` ([`ChatTemplate`], [`Conversation`], [`Message`], [`Json`], [`is_template_variable`]) turns a conversation
//!   into one prompt, as the model was trained to see it, and `sandbox` ([`Sandbox`], [`serve_sandbox_if_asked`]) does so for untrusted templates;
//! - `chat` ([`Chat`], [`Prompts`], [`check_tokens`]) turns what a user writes, a text or a conversation, into tokens with both of these and the next;
//! - `calls` ([`CallFormat`], [`Reader`], [`Part`], [`Channels`], [`Control`], [`Told`], [`Texts`], [`is_text`], [`texts_of`], [`arrange`], [`tell`], [`MARKERS`]) splits an answer's text into reasoning, content and calls of functions;
//! - `grammar` ([`Shape`], [`Grammar`], [`Grammars`], [`Constraint`], [`Guide`], [`Mask`]) holds answers to a form: JSON of a schema, calls;
//! - `tokenizer` ([`Tokenizer`]) turns text into token ids, and ids into bytes;
//! - `sampler` ([`Sampler`], [`SamplerParams`], [`Top`], [`NO_TOKEN_LEFT`], [`logprobs`], [`token_logprob`]) picks the next id from the model's logits;
//! - `stream` ([`StreamDecoder`], [`StreamOutput`]) turns the bytes of successive tokens into text that can be printed
//!   at once, and `answer` ([`Answer`], [`Ending`], [`Piece`]) the tokens of an answer into its text, up to where it ends.

mod answer;
mod calls;
mod chat;
mod grammar;
mod sampler;
mod sandbox;
mod stream;
mod template;
mod tokenizer;
mod top;

pub use answer::{Answer, Ending, Piece};
pub use calls::{
    CallFormat, Channels, Control, MARKERS, Part, Reader, Texts, Told, arrange, is_text, tell, texts_of,
};
pub use chat::{Chat, Prompts, check_tokens};
pub use grammar::{Calls, Constraint, Content, Grammar, Grammars, Guide, Mask, Shape, Thinking, Tool};
pub use sampler::{NO_TOKEN_LEFT, Sampler, SamplerParams, logprobs, token_logprob};
pub use sandbox::{Sandbox, serve_sandbox_if_asked};
pub use stream::{StreamDecoder, StreamOutput};
pub use template::{ChatTemplate, Conversation, Json, Message, is_template_variable};
pub use tokenizer::Tokenizer;
pub use top::Top;
