//! Calls of functions in an answer's text: how a chat template has models write them, and how they are read as they form.
//!
//! - `format` ([`CallFormat`], [`MARKERS`]): the ways of writing that are known;
//! - `scan`: reads the JSON of one call, character by character;
//! - `elements` ([`Texts`], [`is_text`], [`texts_of`]): reads a call whose arguments are elements, and `marker` looks for markers;
//! - `reader` ([`Reader`], [`Part`]): splits a text into reasoning, content and calls;
//! - `harmony` ([`Channels`], [`Told`], [`arrange`]): answers in channels, which gpt-oss gives, and `control` ([`Control`]) their tokens;
//! - `tell` ([`tell`]): shows functions to models whose template has no place for them.

mod control;
mod elements;
mod format;
mod harmony;
mod marker;
mod reader;
mod scan;
mod tell;

pub use control::Control;
pub use elements::{Texts, is_text, texts_of};
pub use format::{CallFormat, MARKERS, THINK, UNTHINK};
pub use harmony::{Channels, Told, arrange};
pub use reader::{Part, Reader};
pub use tell::tell;
