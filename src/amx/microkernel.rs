//! The frame that matrix microkernels share: zero or load the C tiles, walk down K, store the C tiles,
//! all in one `asm!` block, so that no tile outlives it.

/// Defines `unsafe fn name(k_steps, a.., b.., c, ldc, accumulate)`.
///
/// * `a0 a1; b0 b1; "1024"`: source pointers and how many bytes each advances per step;
/// * `rows c0 = 0, c1 = 16`: the rows of C that tiles start at;
/// * `c "0" in c0 + "64"`: accumulator tmm0 belongs at byte 64 of row c0;
/// * `step`: one K step; `{s}` holds 64, the row stride of packed tiles.
macro_rules! microkernel {
    (
        $(#[$meta:meta])*
        $name:ident($($a:ident)+ ; $($b:ident)+; $bytes:literal) -> $out:ty,
        rows $($row:ident = $first:literal),+;
        $(c $tile:literal in $crow:ident + $byte:literal),+;
        step $($step:expr),+ $(,)?
    ) => {
        $(#[$meta])*
        ///
        /// `c` is row-major with `ldc` elements between rows; it is overwritten, or added to if `accumulate`.
        ///
        /// # Safety
        /// Tile instructions execute in this thread and the shapes named in this file's header are loaded;
        /// `k_steps >= 1`; each source has `k_steps` tiles; every row of C that a tile covers is writable (and
        /// readable if `accumulate`).
        #[allow(clippy::too_many_arguments)]
        pub unsafe fn $name(
            k_steps: usize,
            $($a: *const u8,)+
            $($b: *const u8,)+
            c: *mut $out,
            ldc: usize,
            accumulate: bool,
        ) {
            debug_assert!(k_steps >= 1);
            // SAFETY: the caller's promises are what the loads and stores of the block need; the tiles it
            // writes are clobbers, and its memory effects are declared by the absence of `nomem`.
            unsafe {
                std::arch::asm!(
                    "test {acc:e}, {acc:e}",
                    "jnz 3f",
                    $(concat!("tilezero tmm", $tile),)+
                    "jmp 2f",
                    "3:",
                    $(concat!("tileloadd tmm", $tile, ", [{", stringify!($crow), "} + {ld}*1 + ", $byte, "]"),)+
                    "2:",
                    $($step,)+
                    $(concat!("add {", stringify!($a), "}, ", $bytes),)+
                    $(concat!("add {", stringify!($b), "}, ", $bytes),)+
                    "dec {k}",
                    "jnz 2b",
                    $(concat!("tilestored [{", stringify!($crow), "} + {ld}*1 + ", $byte, "], tmm", $tile),)+
                    k = inout(reg) k_steps => _,
                    $($a = inout(reg) $a => _,)+
                    $($b = inout(reg) $b => _,)+
                    $($row = in(reg) c.wrapping_add($first * ldc),)+
                    ld = in(reg) ldc * size_of::<$out>(),
                    s = in(reg) 64usize,
                    acc = in(reg) u32::from(accumulate),
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

pub(super) use microkernel;
