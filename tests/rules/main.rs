//! Rules of this repository: what its build makes of PTX, and which room may use which, where families are named.

mod circles;
mod families;
#[path = "../../build/isa.rs"]
mod isa;
#[path = "../../build/promises.rs"]
mod promises;
mod ptx;
mod rooms;
#[path = "../../build/usage.rs"]
mod usage;
