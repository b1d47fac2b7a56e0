//! GGUF v2/v3.

mod value;

pub use value::{Metadata, Value};
