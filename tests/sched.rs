//! Strategies over a pure driver: any arrivals, cancels, lengths and limits.

#[path = "sched/driver.rs"]
mod driver;
#[path = "sched/invariants.rs"]
mod invariants;
#[path = "sched/table.rs"]
mod table;
