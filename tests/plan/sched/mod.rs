//! Strategies over a pure driver: any arrivals, cancels, lengths and limits; and what they go by.

mod driver;
mod formulas;
mod invariants;
mod oracles;
mod predict;
mod table;
mod throughput;
