//! The peak speed of this machine's tile unit, in one thread: the limit that benches and `doctor` compare kernels with.
//! It is measured on hardware only; emulation says nothing about speed.
//!
//! ```text
//! tiles      six independent accumulators, one A, one B, no memory: 16 cycles a product
//! from L1    the 2x2 step of the matrix kernels, its four KiB in L1: 64 cycles of products, 32 of loads
//! measured   not measured: no AMX machine at hand; PEERS' figures for one Sapphire Rapids thread are 2.9 and
//!            2.8 TFLOP/s in bf16, 5.8 TOP/s in int8
//! ```

use std::arch::asm;
use std::time::{Duration, Instant};

use super::session::{Session, Shapes};

/// Operations (a multiplication and an addition are two) a second of one thread.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ThreadPeak {
    /// bf16 products, tiles only.
    pub bf16_tiles: f64,
    /// bf16 products in 2x2 blocks with tile loads from L1.
    pub bf16_from_l1: f64,
    /// int8 products, tiles only.
    pub int8_tiles: f64,
    /// int8 products in 2x2 blocks with tile loads from L1.
    pub int8_from_l1: f64,
}

/// Measures this thread's core, in about 0.2 s; `None` without AMX hardware.
pub fn peak() -> Option<ThreadPeak> {
    super::hardware().ok()?;
    let mut session = Session::open().ok()?;
    let mut buffers = Buffers::default();
    // Multiply-adds of a product: 16 x 16 x 32 bf16, 16 x 16 x 64 int8.
    let (bf16, int8) = (2.0 * 8192.0, 2.0 * 16384.0);
    let mut rate = |run: Run, products: usize, ops: f64| {
        let n = 20_000;
        let mut best = Duration::MAX;
        for _ in 0..10 {
            let start = Instant::now();
            run(&mut session, &mut buffers, n);
            best = best.min(start.elapsed());
        }
        (n * products) as f64 * ops / best.as_secs_f64()
    };
    Some(ThreadPeak {
        bf16_tiles: rate(bf16_tiles, 6, bf16),
        bf16_from_l1: rate(bf16_from_l1, 4, bf16),
        int8_tiles: rate(int8_tiles, 6, int8),
        int8_from_l1: rate(int8_from_l1, 4, int8),
    })
}

/// Bytes a second that tiles load from L1 at this moment, in some 10 µs; `None` without AMX hardware. Beside a hyperthread that uses
/// tiles it falls to a third or less (Sapphire Rapids: 278 to 80 GB/s).
pub fn tile_loads() -> Option<f64> {
    super::hardware().ok()?;
    let (mut session, mut buffers, n) = (Session::open().ok()?, Buffers::default(), 500);
    loads_from_l1(&mut session, &mut buffers, 10);
    let begun = Instant::now();
    loads_from_l1(&mut session, &mut buffers, n);
    Some((n * 4 * super::TILE_BYTES) as f64 / begun.elapsed().as_secs_f64().max(1e-9))
}

/// Runs `n` rounds of four loads; the last tile goes to `c`, so that tests can verify the work.
fn loads_from_l1(session: &mut Session, buffers: &mut Buffers, n: usize) {
    assert!(n > 0);
    session.load(&Shapes::FULL);
    // SAFETY: FULL is loaded; A and B are two KiB each, C is one.
    unsafe {
        asm!(
            "2:",
            "tileloadd tmm0, [{a} + {s}*1]",
            "tileloadd tmm1, [{a} + {s}*1 + 1024]",
            "tileloadd tmm2, [{b} + {s}*1]",
            "tileloadd tmm3, [{b} + {s}*1 + 1024]",
            "dec {n}",
            "jnz 2b",
            "tilestored [{c} + {s}*1], tmm3",
            a = in(reg) &raw const buffers.a, b = in(reg) &raw const buffers.b,
            c = in(reg) &raw mut buffers.c, s = in(reg) 64usize, n = inout(reg) n => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            options(nostack),
        );
    }
}

type Run = fn(&mut Session, &mut Buffers, usize);

/// Two A tiles, two B tiles, one C tile.
#[repr(C, align(64))]
struct Buffers {
    a: [[u8; 1024]; 2],
    b: [[u8; 1024]; 2],
    c: [u8; 1024],
}

impl Default for Buffers {
    fn default() -> Self {
        Buffers { a: [[0; 1024]; 2], b: [[0; 1024]; 2], c: [0; 1024] }
    }
}

/// Runs `n` rounds of six products; the sixth accumulator goes to `c`, so that tests can verify the work.
macro_rules! tiles_only {
    ($name:ident, $op:literal) => {
        fn $name(session: &mut Session, buffers: &mut Buffers, n: usize) {
            assert!(n > 0);
            session.load(&Shapes::FULL);
            // SAFETY: FULL is loaded; A, B and C are one KiB each.
            unsafe {
                asm!(
                    "tilezero tmm0", "tilezero tmm1", "tilezero tmm2",
                    "tilezero tmm3", "tilezero tmm4", "tilezero tmm5",
                    "tileloadd tmm6, [{a} + {s}*1]",
                    "tileloadd tmm7, [{b} + {s}*1]",
                    "2:",
                    concat!($op, " tmm0, tmm6, tmm7"),
                    concat!($op, " tmm1, tmm6, tmm7"),
                    concat!($op, " tmm2, tmm6, tmm7"),
                    concat!($op, " tmm3, tmm6, tmm7"),
                    concat!($op, " tmm4, tmm6, tmm7"),
                    concat!($op, " tmm5, tmm6, tmm7"),
                    "dec {n}",
                    "jnz 2b",
                    "tilestored [{c} + {s}*1], tmm5",
                    a = in(reg) &raw const buffers.a, b = in(reg) &raw const buffers.b,
                    c = in(reg) &raw mut buffers.c, s = in(reg) 64usize, n = inout(reg) n => _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

/// `n` rounds of four loads and four products.
macro_rules! from_l1 {
    ($name:ident, $op:literal) => {
        fn $name(session: &mut Session, buffers: &mut Buffers, n: usize) {
            assert!(n > 0);
            session.load(&Shapes::FULL);
            // SAFETY: FULL is loaded; A and B are two KiB each, C is one.
            unsafe {
                asm!(
                    "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                    "2:",
                    "tileloadd tmm6, [{b} + {s}*1]",
                    "tileloadd tmm4, [{a} + {s}*1]",
                    concat!($op, " tmm0, tmm4, tmm6"),
                    "tileloadd tmm7, [{b} + {s}*1 + 1024]",
                    concat!($op, " tmm1, tmm4, tmm7"),
                    "tileloadd tmm5, [{a} + {s}*1 + 1024]",
                    concat!($op, " tmm2, tmm5, tmm6"),
                    concat!($op, " tmm3, tmm5, tmm7"),
                    "dec {n}",
                    "jnz 2b",
                    "tilestored [{c} + {s}*1], tmm3",
                    a = in(reg) &raw const buffers.a, b = in(reg) &raw const buffers.b,
                    c = in(reg) &raw mut buffers.c, s = in(reg) 64usize, n = inout(reg) n => _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

tiles_only!(bf16_tiles, "tdpbf16ps");
tiles_only!(int8_tiles, "tdpbsud");
from_l1!(bf16_from_l1, "tdpbf16ps");
from_l1!(int8_from_l1, "tdpbsud");

#[cfg(test)]
mod tests {
    use super::*;

    /// A loop that skipped work would report too high a peak.
    #[test]
    fn the_loops_do_the_products_that_are_counted() {
        if super::super::available().is_err() {
            super::super::emulate::install().unwrap();
        }
        let mut session = Session::open().unwrap();
        let one = 0x3f80u16.to_le_bytes();
        let mut ones = Buffers::default();
        for tile in ones.a.iter_mut().chain(&mut ones.b) {
            for pair in tile.chunks_exact_mut(2) {
                pair.copy_from_slice(&one);
            }
        }
        for run in [bf16_tiles as Run, bf16_from_l1] {
            run(&mut session, &mut ones, 5);
            assert!(ones.c.chunks_exact(4).all(|c| f32::from_le_bytes(c.try_into().unwrap()) == 32.0 * 5.0));
        }
        for tile in ones.a.iter_mut().chain(&mut ones.b) {
            tile.fill(3);
        }
        loads_from_l1(&mut session, &mut ones, 2);
        assert_eq!(ones.c, [3; 1024]);
        for run in [int8_tiles as Run, int8_from_l1] {
            run(&mut session, &mut ones, 5);
            assert!(ones.c.chunks_exact(4).all(|c| i32::from_le_bytes(c.try_into().unwrap()) == 9 * 64 * 5));
        }
    }

    #[test]
    fn emulation_is_never_timed() {
        match (super::super::hardware(), peak()) {
            (Err(why), got) => {
                assert_eq!(got, None);
                println!("skipped: {why}");
            }
            (Ok(()), Some(p)) => {
                println!("{p:?}");
                assert!(p.bf16_tiles > 1e11 && p.int8_tiles > p.bf16_tiles, "{p:?}");
                assert!(p.bf16_from_l1 <= p.bf16_tiles * 1.2, "{p:?}");
            }
            (Ok(()), None) => panic!("hardware without a peak"),
        }
    }
}
