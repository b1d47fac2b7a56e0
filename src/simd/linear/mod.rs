//! Linear layers: `y[M,N] = x[M,K] · W[N,K]ᵀ`, for every dtype and every M.
//!
//! A weight ([`Linear`]) is held in rows, straight from the file, or packed ([`packed`]) when the model is loaded. A kernel
//! ([`LinearKernel`]) is a constant in the file of its code and a line in the [`table`](kernels) of its tiers; the
//! table chooses a kernel by dtype, layout, number of tokens and the tuning table:
//!
//! | weights | held as | few tokens | many tokens |
//! |---|---|---|---|
//! | quantised | packed: 16 rows interleaved | int8 dot products (`quant::{vnni, avx2_int8}`); AMX: `amx::int8_tiles` | the same (AVX2: `quant::avx2_unpacked`); AMX: `amx::quantised` |
//! | f32 f16 bf16 | rows | `float::{rowdot, rowdot_bf16}`; AMX, up to 16: `amx::rows_tiles` | `float::tiledot`; AMX, 16 bits: `amx::rows` |
//! | f16 bf16, AMX, by the tuning table | packed: bf16 tiles | `float::paneldot` | `amx::stored` |
//! | any, reference tier | rows | [`crate::reference::linear`] | the same |
//!
//! [`linear_parts`] multiplies parts of the rows by weights of their own, as mixtures of experts do: one job for all of them.
//!
//! Every output element is computed by one thread in one fixed order over k, so results do not depend
//! on the number of threads. The int8 and tile kernels use the same order for every M; with
//! [`Mode::Deterministic`] no other is used, so results do not depend on what else is in the batch.

mod acts;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
mod chunks;
#[cfg(target_arch = "x86_64")]
mod float;
mod kernel;
mod mode;
mod multiply;
mod packed;
mod parts;
#[cfg(target_arch = "x86_64")]
mod quant;
mod table;
mod weight;

pub use acts::{Acts, ActsBytes, Forms, Need};
pub use kernel::{GROUP, LinearKernel};
pub use mode::Mode;
pub use multiply::{Out, linear, linear_rows};
pub use packed::{Packed, pack, pack_group};
pub use parts::{Part, linear_parts};
pub use table::{forced, kernels, named};
pub use weight::Linear;
