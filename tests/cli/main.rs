//! The program as users and scripts meet it. `device` counts the kernels that this process launches: no
//! other test here may launch one.

mod agreement;
mod bad_devices;
mod chat;
mod device;
mod experts;
mod generate;
mod harmony;
mod hybrid;
mod kv_type;
mod memory;
mod models;
mod plan;
mod profile;
mod pull;
mod random_memories;
mod requests;
mod router;
mod self_test;
mod serve;
mod simulate;
#[path = "../support/mod.rs"]
mod support;
mod tune;
mod usage;
