//! Each kernel against f64, with a tolerance derived from its roundings; what it is built from against the PTX ISA.

mod attention;
mod conformance;
mod elementwise;
mod exchange;
mod experts;
mod gemm;
mod linear;
mod logits;
mod quant;
