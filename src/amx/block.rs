//! One block of C over a chunk of K. Its tiles stay in registers from the first step to the last, and after each step a
//! part of the next tiles of weights is made.
//!
//! The only place where tile data lives across two `asm!` blocks. That is sound because nothing but `asm!` touches
//! tile registers (the compiler has no instructions for them here), blocks that are not `pure` keep their order, and
//! the code between two steps, [`Maker::beside`], makes tiles of weights in memory with vector instructions only.
//!
//! ```text
//! registers  seven: tmm0-3 C, tmm4 A, tmm5-6 B. A core's hyperthreads share its tile registers: beside one that uses
//!            tiles, fewer live tiles are faster (measured on a Sapphire Rapids: 8 tiles 0.44, 7 0.63 TFLOP/s from L2;
//!            alone the same 1.45)
//! bound      32x32: 4 products of 16 cycles a step against 4 tile loads, 4 KiB from L2; 64x16: 5, B from L1
//! ```

use std::arch::asm;

use super::TILE_BYTES;
use super::make::Maker;

/// The operands of a block, and its destination.
pub(super) struct Block {
    /// K steps, at least one.
    pub steps: usize,
    /// The first A tile of each block of 16 rows; a step is a KiB.
    pub a: [*const u8; 4],
    /// The first B tile of each panel.
    pub b: [*const u8; 4],
    /// Bytes from a B tile to that of the next step.
    pub b_step: usize,
    /// Steps until B wraps to the beginning of its ring, and the length of that ring.
    pub turn: usize,
    pub ring: usize,
    /// C so far, or null for zeros; row-major, `from_ld` values between rows.
    pub from: *const f32,
    pub from_ld: usize,
    /// Destination of C, in the same layout.
    pub to: *mut f32,
    pub to_ld: usize,
}

macro_rules! block {
    (
        $(#[$meta:meta])*
        $name:ident($($a:ident $ai:literal)+; $($b:ident $bi:literal)+);
        c $($tile:tt row $row:literal col $col:literal),+;
        step $($step:literal),+ $(,)?
    ) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// Tile instructions execute in this thread, and [`Shapes::SEVEN`](super::session::Shapes::SEVEN) is loaded; the
        /// sources have `steps` tiles; every value of C in these rows and columns is readable and writable where `from`
        /// (unless null) and `to` say.
        pub(super) unsafe fn $name(block: &Block, maker: &mut Maker<'_>) {
            debug_assert!(block.steps >= 1);
            $(let mut $a = block.a[$ai];)+
            $(let mut $b = block.b[$bi];)+
            let mut turn = block.turn;
            // SAFETY: the caller's promises; see this file's header for the tiles that live on.
            unsafe {
                $(if block.from.is_null() {
                    asm!(concat!("tilezero ", $tile), out($tile) _, options(nostack, preserves_flags));
                } else {
                    asm!(concat!("tileloadd ", $tile, ", [{p} + {ld}*1]"),
                        p = in(reg) block.from.wrapping_add($row * block.from_ld + $col),
                        ld = in(reg) block.from_ld * size_of::<f32>(), out($tile) _, options(nostack, preserves_flags));
                })+
                for _ in 0..block.steps {
                    asm!($($step,)+ $($a = in(reg) $a,)+ $($b = in(reg) $b,)+ s = in(reg) 64usize,
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        out("tmm4") _, out("tmm5") _, out("tmm6") _,
                        options(nostack, preserves_flags));
                    $($a = $a.wrapping_add(TILE_BYTES);)+
                    $($b = $b.wrapping_add(block.b_step);)+
                    turn -= 1;
                    if turn == 0 {
                        turn = block.ring;
                        $($b = $b.wrapping_sub(block.ring * block.b_step);)+
                    }
                    maker.beside();
                }
                $(asm!(concat!("tilestored [{p} + {ld}*1], ", $tile),
                    p = in(reg) block.to.wrapping_add($row * block.to_ld + $col),
                    ld = in(reg) block.to_ld * size_of::<f32>(), options(nostack, preserves_flags));)+
            }
        }
    };
}

block! {
    /// 32 rows x 32 columns.
    rows32_cols32(a0 0 a1 1; b0 0 b1 1);
    c "tmm0" row 0 col 0, "tmm1" row 0 col 16, "tmm2" row 16 col 0, "tmm3" row 16 col 16;
    step
        "tileloadd tmm5, [{b0} + {s}*1]",
        "tileloadd tmm4, [{a0} + {s}*1]",
        "tdpbf16ps tmm0, tmm4, tmm5",
        "tileloadd tmm6, [{b1} + {s}*1]",
        "tdpbf16ps tmm1, tmm4, tmm6",
        "tileloadd tmm4, [{a1} + {s}*1]",
        "tdpbf16ps tmm2, tmm4, tmm5",
        "tdpbf16ps tmm3, tmm4, tmm6",
}

block! {
    /// 64 rows x 16 columns: each tile of B is loaded once, from L1, where it was just made.
    rows64_cols16(a0 0 a1 1 a2 2 a3 3; b0 0);
    c "tmm0" row 0 col 0, "tmm1" row 16 col 0, "tmm2" row 32 col 0, "tmm3" row 48 col 0;
    step
        "tileloadd tmm5, [{b0} + {s}*1]",
        "tileloadd tmm4, [{a0} + {s}*1]",
        "tdpbf16ps tmm0, tmm4, tmm5",
        "tileloadd tmm6, [{a1} + {s}*1]",
        "tdpbf16ps tmm1, tmm6, tmm5",
        "tileloadd tmm4, [{a2} + {s}*1]",
        "tdpbf16ps tmm2, tmm4, tmm5",
        "tileloadd tmm6, [{a3} + {s}*1]",
        "tdpbf16ps tmm3, tmm6, tmm5",
}

block! {
    /// 32 rows x 16 columns: the last panel of an odd number.
    rows32_cols16(a0 0 a1 1; b0 0);
    c "tmm0" row 0 col 0, "tmm2" row 16 col 0;
    step
        "tileloadd tmm5, [{b0} + {s}*1]",
        "tileloadd tmm4, [{a0} + {s}*1]",
        "tdpbf16ps tmm0, tmm4, tmm5",
        "tileloadd tmm4, [{a1} + {s}*1]",
        "tdpbf16ps tmm2, tmm4, tmm5",
}

block! {
    /// 16 rows x 32 columns: the last A block of an odd number.
    rows16_cols32(a0 0; b0 0 b1 1);
    c "tmm0" row 0 col 0, "tmm1" row 0 col 16;
    step
        "tileloadd tmm4, [{a0} + {s}*1]",
        "tileloadd tmm5, [{b0} + {s}*1]",
        "tdpbf16ps tmm0, tmm4, tmm5",
        "tileloadd tmm6, [{b1} + {s}*1]",
        "tdpbf16ps tmm1, tmm4, tmm6",
}

block! {
    /// 16 rows x 16 columns.
    rows16_cols16(a0 0; b0 0);
    c "tmm0" row 0 col 0;
    step
        "tileloadd tmm4, [{a0} + {s}*1]",
        "tileloadd tmm5, [{b0} + {s}*1]",
        "tdpbf16ps tmm0, tmm4, tmm5",
}

block! {
    /// 16 rows x 64 columns: four chains of products, where there is one A block only.
    rows16_cols64(a0 0; b0 0 b1 1 b2 2 b3 3);
    c "tmm0" row 0 col 0, "tmm1" row 0 col 16, "tmm2" row 0 col 32, "tmm3" row 0 col 48;
    step
        "tileloadd tmm4, [{a0} + {s}*1]",
        "tileloadd tmm5, [{b0} + {s}*1]",
        "tdpbf16ps tmm0, tmm4, tmm5",
        "tileloadd tmm6, [{b1} + {s}*1]",
        "tdpbf16ps tmm1, tmm4, tmm6",
        "tileloadd tmm5, [{b2} + {s}*1]",
        "tdpbf16ps tmm2, tmm4, tmm5",
        "tileloadd tmm6, [{b3} + {s}*1]",
        "tdpbf16ps tmm3, tmm4, tmm6",
}
