//! Products of float weights: rows as they lie in the file, or tiles of bf16 that were packed at load.

#[cfg_attr(not(target_os = "linux"), allow(dead_code))] // only AMX multiplies panels
pub(super) mod panel;
pub(super) mod paneldot;
pub(super) mod rowdot;
pub(super) mod rowdot_bf16;
pub(super) mod tiledot;

use super::kernel::Ask;

/// Most tokens for which a row at a time is fastest; beyond, `tiledot` keeps tiles of both in registers.
const FEW: usize = 2;

/// Float weights in rows, for a few tokens.
fn few_rows(a: &Ask<'_>) -> bool {
    !a.packed && !a.dtype.is_quantised() && a.m <= FEW
}

/// Float weights in rows.
fn rows(a: &Ask<'_>) -> bool {
    !a.packed && !a.dtype.is_quantised()
}
