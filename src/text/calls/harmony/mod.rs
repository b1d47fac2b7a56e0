//! Harmony, the format of gpt-oss: an answer is several messages, each for a channel or for a function.
//!
//! ```text
//! <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
//! <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
//! ```
//! - `channels` ([`Channels`]): splits the tokens of an answer into reasoning, content and calls;
//! - `header`: what stands in front of `<|message|>`;
//! - `turns` ([`arrange`]): earlier turns as harmony's templates expect them;
//! - `told` ([`Told`]): an answer as one text, for terminals.
//!
//! Its markers are control tokens, and only these count: a text that spells one stays text, so that nothing an answer
//! quotes can open a channel or call a function.

mod channels;
mod header;
mod told;
mod turns;

pub use channels::Channels;
pub use told::Told;
pub use turns::arrange;
