//! Linear layers: `y[M,N] = x[M,K] · W[N,K]ᵀ`, for every dtype and every M.
//!
//! Four ways to hold and multiply a weight, chosen per dtype and tier when the model is loaded:
//!
//! | weights | held as | few rows | many rows |
//! |---|---|---|---|
//! | quantised | [`packed`]: 16 rows interleaved | int8 dot products ([`vnni`], [`avx2_int8`]); AMX, some: [`int8_tiles`] | the same kernel; AMX: bf16 panels |
//! | f32 f16 bf16 | row-major, straight from the file | [`rowdot`] in f32, [`rowdot_bf16`] | [`tiledot`]; AMX: bf16 panels ([`panel`]) |
//! | f16 bf16, AMX, by the tuning table | [`packed`]: bf16 tiles | bf16 dot products ([`paneldot`]) | the same tiles, read in place |
//! | any, reference tier | row-major | [`crate::reference::linear`] | the same |
//!
//! Every output element is computed by one thread in one fixed order over k, so results do not depend
//! on the number of threads. The int8 and tile kernels use the same order for every M; with
//! [`Mode::Deterministic`] no other is used, so results do not depend on what else is in the batch.

mod acts;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2_int8;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod dequantise;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod half_tiles;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod int8_tiles;
mod packed;
#[cfg(target_arch = "x86_64")]
#[cfg_attr(not(target_os = "linux"), allow(dead_code))] // only AMX multiplies panels
mod panel;
#[cfg(target_arch = "x86_64")]
mod paneldot;
mod plan;
#[cfg(target_arch = "x86_64")]
mod rowdot;
#[cfg(target_arch = "x86_64")]
mod rowdot_bf16;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod rows_tiles;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod stored;
#[cfg(target_arch = "x86_64")]
mod tiledot;
#[cfg(target_arch = "x86_64")]
mod vnni;

pub use acts::{Acts, ActsBytes, Forms, Need};
pub use packed::{GROUP, Packed, pack, pack_group};
pub use plan::{Linear, Mode, Out, linear, linear_rows};
