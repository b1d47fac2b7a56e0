//! AMX tile kernels: bf16 and int8 matrix products in 1 KiB tile registers.
//!
//! | file | answers |
//! |---|---|
//! | `detect` | may this process use tiles, and if not, why not? |
//! | `available` | are tiles available, in hardware or emulated? |
//! | [`session`] | which tile shapes are loaded in this thread? |
//! | [`pack`] | how do activations and weights become tiles? |
//! | [`bf16`] | `C = A * W^T` in bf16, from M = 1 to thousands |
//! | `block`, `make` | one block of C over a chunk of K; tiles of weights made while its products run |
//! | [`attention`] | the two products of attention, on KV pages |
//! | `attention_steps` | these products one step at a time, for vector work between the steps |
//! | [`int8`] | int8 products, 32 elements of K each |
//! | [`mod@peak`] | what is the peak speed of this machine's tile unit? |
//! | [`emulate`] | the same kernels on a CPU without tiles, for tests |
//!
//! The modules of kernels are public because tests and benches call them one by one.
//!
//! A microkernel is one `asm!` block, because AMX intrinsics are unstable in Rust 1.95. Such a block
//! names the tile registers that it writes as clobbers (`out("tmm0") _`, which stable Rust accepts without
//! a target feature) and loads all its operands, so no tile data lives across two blocks, and the compiler need not
//! know about tiles. (`block` is the exception, and says why that is sound.) Only the tile *configuration* outlives a
//! kernel; compiled code cannot touch it either, and [`session::Session`] owns it.
//!
//! Use, on the thread that computes (a session is cheap to open and must not move):
//! ```
//! use tandem::amx::{Session, bf16, pack};
//!
//! let (m, n, k) = (3, 16, 40);
//! let mut a = vec![0; pack::a_blocks_len(m, k)];
//! pack::pack_a_bf16(&vec![1.0; m * k], m, k, k, &mut a);
//! let mut panel = vec![0; pack::panel_len(k)];
//! pack::pack_panel_bf16(&vec![0x3f80; n * k], n, k, k, &mut panel); // 0x3f80: one, in bf16
//! let mut out = vec![0.0; m * n];
//! match Session::open() {
//!     Ok(mut session) => {
//!         bf16::gemm_bf16(&mut session, m, n, k, &a, &panel, &mut out, n);
//!         assert_eq!(out, vec![40.0; m * n]);
//!     }
//!     Err(why) => println!("no tiles: {why}"),
//! }
//! ```

/// Bytes of a tile register: 16 rows of 64.
pub const TILE_BYTES: usize = 1024;

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub mod attention;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) mod attention_steps;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod available;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub mod bf16;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod block;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod detect;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub mod emulate;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub mod int8;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod make;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub mod pack;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub mod peak;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) mod scratch;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub mod session;

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub use available::available;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub use detect::hardware;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub use peak::{ThreadPeak, peak, tile_loads};
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub use session::Session;

/// Whether the AVX512-FP16 instructions that make tiles of weights execute: in hardware, or emulated together with the
/// tiles.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub fn half_arithmetic() -> bool {
    is_x86_feature_detected!("avx512fp16") || (emulate::installed() && is_x86_feature_detected!("avx512f"))
}

/// Whether this process may use AMX tiles with bf16 and int8; otherwise why not.
///
/// # Errors
/// Always, on this platform.
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
pub fn available() -> Result<(), &'static str> {
    Err("AMX tiles are used on x86-64 Linux only")
}

/// Whether this machine has AMX tiles in hardware; otherwise why not.
///
/// # Errors
/// Always, on this platform.
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
pub fn hardware() -> Result<(), &'static str> {
    available()
}

/// Bytes a second that tiles load from L1: none on this platform.
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
pub fn tile_loads() -> Option<f64> {
    None
}
