//! Random weights of any spec (`synth:NAME`).
