//! Model files: a format a file. Each yields a [`crate::model::ModelSpec`], [`crate::model::Weights`] and the
//! material for the tokenizer and chat template.

pub mod gguf;
