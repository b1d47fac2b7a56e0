//! AMX tile kernels.

/// Whether this process may use AMX tiles with bf16 and int8; otherwise why not.
pub fn available() -> Result<(), &'static str> {
    Err("this CPU reports no amx_bf16")
}
