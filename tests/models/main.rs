//! Model files, families and whole models on the CPU.

mod families;
mod formats;
mod golden;
mod invariance;
mod load;
mod rope;
#[path = "../support/mod.rs"]
mod support;
