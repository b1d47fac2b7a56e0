//! Rules of this repository: what its build makes of PTX, which room and which module may use which, what is public, where families
//! and models are named, what comments name and say, how many things a name means, what
//! additions touch.

mod additions;
mod circles;
mod doors;
mod families;
mod flags;
#[path = "../../build/isa.rs"]
mod isa;
mod models;
mod names;
mod paths;
#[path = "../../build/promises.rs"]
mod promises;
mod ptx;
mod rooms;
#[path = "../../build/usage.rs"]
mod usage;
mod words;
