//! Tokenisers and chat templates. `sandbox` reads what all children of this process used: no other test here may start one.

mod around;
mod bad_metadata;
mod grammar;
mod harmony;
mod json;
mod sandbox;
#[path = "../support/mod.rs"]
mod support;
mod template;
mod tokenizer;
mod tokenizer_json;
mod unigram;
