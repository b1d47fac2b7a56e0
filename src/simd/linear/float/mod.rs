//! Products of float weights: rows as in the file, or bf16 tiles that were packed at load.

#[cfg_attr(not(target_os = "linux"), allow(dead_code))] // only AMX multiplies panels
pub(super) mod panel;
pub(super) mod paneldot;
pub(super) mod rowdot;
pub(super) mod rowdot_bf16;
pub(super) mod tiledot;

use super::kernel::Ask;

/// Most tokens for which row dot products are fastest; beyond, `tiledot` keeps tiles of both operands in registers.
const FEW: usize = 2;

/// Whether the weights are float rows and there are few tokens.
fn few_rows(a: &Ask<'_>) -> bool {
    !a.packed && !a.dtype.is_quantised() && a.m <= FEW
}

/// Whether the weights are float rows.
fn rows(a: &Ask<'_>) -> bool {
    !a.packed && !a.dtype.is_quantised()
}
