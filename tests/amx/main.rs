//! AMX kernels and the emulator of tile instructions. A binary of their own: emulation, once installed, is there for the whole process, and
//! the tests of other rooms would find tiles, a thousand times slower than their machine's own kernels.
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]

mod emulator;
mod products;
