//! What the rooms of tests share, a module for each concern. Every `tests/*/main.rs` has it as its module `support`.

#![allow(dead_code)] // each room uses a part of it

pub mod chance;
pub mod chaos;
pub mod command;
pub mod fake_driver;
pub mod gpu;
pub mod margin;
pub mod models;
pub mod mutate_json;
pub mod naive_model;
pub mod ptx_executor;
pub mod rounding;
pub mod server;
pub mod spelling;
pub mod sub_batches;
