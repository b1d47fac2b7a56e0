//! Rules of this repository: what its build makes of PTX.

#[path = "../../build/isa.rs"]
mod isa;
#[path = "../../build/promises.rs"]
mod promises;
mod ptx;
#[path = "../../build/usage.rs"]
mod usage;
