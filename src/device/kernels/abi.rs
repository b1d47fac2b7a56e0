//! The parameter structs of `cuda/include/abi.h`, by bindgen.
