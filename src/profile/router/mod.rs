//! Which experts a model's routers choose, counted over a text and kept.
//!
//! | a file | what |
//! |---|---|
//! | `record` | runs a text through the model on the CPU, and counts |
//! | `text` | the text that is taken if no other is given |
//! | `store` | [`RouterRecord`]: a file in the cache folder, by the model alone: choices are no matter of the machine |

mod record;
mod store;
mod text;

pub use record::record_router;
pub use store::{RouterRecord, RouterText};
pub use text::router_text;
