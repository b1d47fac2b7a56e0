//! Strategies over a pure driver: any arrivals, cancels, lengths and limits; and what they go by.

#[path = "sched/driver.rs"]
mod driver;
#[path = "sched/invariants.rs"]
mod invariants;
#[path = "sched/oracles.rs"]
mod oracles;
#[path = "sched/predict.rs"]
mod predict;
#[path = "sched/table.rs"]
mod table;
#[path = "sched/throughput.rs"]
mod throughput;
