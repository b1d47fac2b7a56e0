//! Model files, families and whole models on the CPU.

mod checkpoints;
mod experts;
mod families;
mod formats;
mod golden;
mod invariance;
mod load;
mod rope;
mod router;
#[path = "../support/mod.rs"]
mod support;
