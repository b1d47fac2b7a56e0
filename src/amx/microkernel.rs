//! The frame that matrix microkernels share: zero or load the C tiles, walk down K, store the C tiles,
//! all in one `asm!` block, so that no tile outlives it.

/// Defines `unsafe fn name(k_steps, a.., b.., from, from_ld, to, to_ld)`.
///
/// * `a0 a1; b0 b1; "1024"`: source pointers and how many bytes each advances per step;
/// * `rows 0 from0 to0, 16 from1 to1`: the rows of C that tiles start at, with names for their addresses;
/// * `c "0" in from0 to0 + "64"`: accumulator tmm0 belongs at byte 64 of that row;
/// * `step`: one K step; `{s}` holds 64, the row stride of packed tiles.
///
/// C comes from one place and goes to another, because the sums of a slab of K are kept densely in scratch until
/// the last slab sends them to the matrix.
macro_rules! microkernel {
    (
        $(#[$meta:meta])*
        $name:ident($($a:ident)+ ; $($b:ident)+; $bytes:literal) -> $out:ty,
        rows $($first:literal $from:ident $to:ident),+;
        $(c $tile:literal in $cfrom:ident $cto:ident + $byte:literal),+;
        step $($step:expr),+ $(,)?
    ) => {
        $(#[$meta])*
        ///
        /// The sums start from `from`, or from zero if that is null, and go to `to`: both row-major, with
        /// `from_ld` and `to_ld` elements between rows. They may be the same.
        ///
        /// # Safety
        /// Tile instructions execute in this thread and the shapes named in this file's header are loaded;
        /// `k_steps >= 1`; each source has `k_steps` tiles; every row that a tile covers is readable in `from`
        /// (unless null) and writable in `to`.
        #[allow(clippy::too_many_arguments)]
        pub unsafe fn $name(
            k_steps: usize,
            $($a: *const u8,)+
            $($b: *const u8,)+
            from: *const $out,
            from_ld: usize,
            to: *mut $out,
            to_ld: usize,
        ) {
            debug_assert!(k_steps >= 1);
            // SAFETY: the caller's promises are what the loads and stores of the block need; the tiles it
            // writes are clobbers, and its memory effects are declared by the absence of `nomem`.
            unsafe {
                std::arch::asm!(
                    "test {start}, {start}",
                    "jnz 3f",
                    $(concat!("tilezero tmm", $tile),)+
                    "jmp 2f",
                    "3:",
                    $(concat!("tileloadd tmm", $tile, ", [{", stringify!($cfrom), "} + {fl}*1 + ", $byte, "]"),)+
                    "2:",
                    $($step,)+
                    $(concat!("add {", stringify!($a), "}, ", $bytes),)+
                    $(concat!("add {", stringify!($b), "}, ", $bytes),)+
                    "dec {k}",
                    "jnz 2b",
                    $(concat!("tilestored [{", stringify!($cto), "} + {tl}*1 + ", $byte, "], tmm", $tile),)+
                    k = inout(reg) k_steps => _,
                    $($a = inout(reg) $a => _,)+
                    $($b = inout(reg) $b => _,)+
                    $($from = in(reg) from.wrapping_add($first * from_ld),)+
                    $($to = in(reg) to.wrapping_add($first * to_ld),)+
                    fl = in(reg) from_ld * size_of::<$out>(),
                    tl = in(reg) to_ld * size_of::<$out>(),
                    s = in(reg) 64usize,
                    start = in(reg) from,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

pub(super) use microkernel;
