//! The server as clients meet it: over a model of random weights in this process, by HTTP and by bare sockets.

mod answers;
mod connections;
mod cors;
mod errors;
mod fairness;
mod forms;
mod harmony;
mod lifecycle;
mod lm_eval;
mod openai;
mod page;
mod prompts;
mod schemathesis;
mod scores;
mod soak;
#[path = "../support/mod.rs"]
mod support;
mod targets;
mod world;
