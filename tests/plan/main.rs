//! Where a model runs, how long that takes and what is computed next: programs, prices, placements and schedules, without and with an engine.

mod auto;
mod baseline;
mod choose;
mod emulated_time;
mod executed_gain;
mod helm;
mod oracles;
mod pages_price;
mod paper_shapes;
mod program;
mod sched;
#[path = "../support/mod.rs"]
mod support;
mod timeline;
