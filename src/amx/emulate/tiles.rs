//! The effect of tile instructions on tile state, after the SDM's pseudocode.
//!
//! Everything here runs inside a signal handler: no allocation, no lock, no panic on any input.
//!
//! TDPBF16PS: per row of A and column of B, one chain of fused multiply-adds from zero over the even elements, one over
//! the odd ones, then `C + (even + odd)`. It rounds to nearest even, treats denormal inputs and results as zero, and
//! neither reads nor writes MXCSR. `C` is *not* the start of a chain.
//!
//! speed      a 16x16x32 product takes about 1 us with AVX-512 (Zen 4), as much as the trap around it
//! refs       Intel SDM vol. 1 ch. 18.2-18.5, vol. 2 (exception classes AMX-E1..E6)

use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};

use super::decode::Dot;

/// The tile registers and configuration of one thread.
#[repr(C, align(64))]
pub struct Tiles {
    /// 0: not configured.
    palette: u8,
    start_row: u8,
    rows: [u8; 8],
    colsb: [u16; 8],
    data: [[[u8; 64]; 16]; 8],
}

/// Why an instruction cannot execute: the exception, and its cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TileFault {
    /// `#UD` or `#GP(0)`.
    pub exception: &'static str,
    /// The cause.
    pub why: &'static str,
    /// The two numbers that disagree, if there are two.
    pub numbers: Option<(u16, u16)>,
}

impl fmt::Display for TileFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.exception, self.why)?;
        match self.numbers {
            Some((a, b)) => write!(f, " ({a}, {b})"),
            None => Ok(()),
        }
    }
}

fn ud(why: &'static str) -> TileFault {
    TileFault { exception: "#UD", why, numbers: None }
}

fn gp(why: &'static str) -> TileFault {
    TileFault { exception: "#GP(0)", why, numbers: None }
}

impl Tiles {
    /// The INIT state.
    pub const INIT: Tiles =
        Tiles { palette: 0, start_row: 0, rows: [0; 8], colsb: [0; 8], data: [[[0; 64]; 16]; 8] };

    /// The state of a new thread. Linux copies the parent's configuration, but no tile data, into it. A signal handler
    /// cannot know the parent, so this stands for any: valid shapes that no kernel loads. Code that assumes an empty
    /// thread, or its parent's configuration, fails with it.
    pub const INHERITED: Tiles = Tiles { palette: 1, rows: [3; 8], colsb: [12; 8], ..Tiles::INIT };

    /// LDTILECFG. A bad configuration changes nothing.
    pub fn load_config(&mut self, mem: &[u8; 64]) -> Result<(), TileFault> {
        match mem[0] {
            0 => {
                *self = Tiles::INIT;
                return Ok(());
            }
            1 => {}
            _ => return Err(gp("ldtilecfg: unknown palette")),
        }
        let zero = |bytes: &[u8]| bytes.iter().all(|&b| b == 0);
        if !zero(&mem[2..16]) || !zero(&mem[32..48]) || !zero(&mem[56..64]) {
            return Err(gp("ldtilecfg: reserved bytes are not zero"));
        }
        let mut rows = [0u8; 8];
        let mut colsb = [0u16; 8];
        for t in 0..8 {
            colsb[t] = u16::from_le_bytes([mem[16 + 2 * t], mem[17 + 2 * t]]);
            rows[t] = mem[48 + t];
            let numbers = Some((u16::from(rows[t]), colsb[t]));
            if rows[t] > 16 || colsb[t] > 64 {
                return Err(TileFault { numbers, ..gp("ldtilecfg: more than 16 rows or 64 bytes a row") });
            }
            if (rows[t] == 0) != (colsb[t] == 0) {
                return Err(TileFault {
                    numbers,
                    ..gp("ldtilecfg: of rows and bytes a row, only one is zero")
                });
            }
        }
        *self = Tiles { palette: 1, start_row: mem[1], rows, colsb, ..Tiles::INIT };
        Ok(())
    }

    /// STTILECFG.
    pub fn store_config(&self) -> [u8; 64] {
        let mut mem = [0u8; 64];
        if self.palette != 0 {
            mem[0] = self.palette;
            mem[1] = self.start_row;
            for t in 0..8 {
                mem[16 + 2 * t..18 + 2 * t].copy_from_slice(&self.colsb[t].to_le_bytes());
                mem[48 + t] = self.rows[t];
            }
        }
        mem
    }

    /// TILERELEASE.
    pub fn release(&mut self) {
        *self = Tiles::INIT;
    }

    /// TILEZERO.
    pub fn zero(&mut self, t: u8) -> Result<(), TileFault> {
        self.valid(t)?;
        self.data[t as usize] = [[0; 64]; 16];
        self.start_row = 0;
        Ok(())
    }

    /// TILELOADD: `read` fills the bytes of a row from memory; the rest of the tile becomes zero.
    pub fn load(&mut self, t: u8, mut read: impl FnMut(usize, &mut [u8])) -> Result<(), TileFault> {
        let (rows, colsb) = self.movable(t)?;
        let start = self.start_row as usize;
        let tile = &mut self.data[t as usize];
        for (r, row) in tile.iter_mut().enumerate().skip(start) {
            *row = [0; 64];
            if r < rows {
                read(r, &mut row[..colsb]);
            }
        }
        self.start_row = 0;
        Ok(())
    }

    /// TILESTORED: `write` gets the bytes of each row.
    pub fn store(&mut self, t: u8, mut write: impl FnMut(usize, &[u8])) -> Result<(), TileFault> {
        let (rows, colsb) = self.movable(t)?;
        for r in self.start_row as usize..rows {
            write(r, &self.data[t as usize][r][..colsb]);
        }
        self.start_row = 0;
        Ok(())
    }

    /// TDPBF16PS, TDPB*: `dst += a * b`.
    pub fn dot(&mut self, dot: Dot, dst: u8, a: u8, b: u8) -> Result<(), TileFault> {
        if dst == a || dst == b || a == b {
            return Err(ud("the three tiles must be different"));
        }
        for t in [dst, a, b] {
            self.valid(t)?;
            if !self.colsb[t as usize].is_multiple_of(4) {
                return Err(ud("bytes a row are no multiple of 4"));
            }
        }
        let (d, a, b) = (dst as usize, a as usize, b as usize);
        let numbers = |x: u16, y: u16| Some((x, y));
        let (dr, ar, br) = (u16::from(self.rows[d]), u16::from(self.rows[a]), u16::from(self.rows[b]));
        if dr != ar {
            return Err(TileFault {
                numbers: numbers(dr, ar),
                ..ud("destination and first source differ in rows")
            });
        }
        if self.colsb[d] != self.colsb[b] {
            let numbers = numbers(self.colsb[d], self.colsb[b]);
            return Err(TileFault { numbers, ..ud("destination and second source differ in bytes a row") });
        }
        if self.colsb[a] / 4 != br {
            let numbers = numbers(self.colsb[a] / 4, br);
            return Err(TileFault {
                numbers,
                ..ud("the first source's dwords a row are not the second's rows")
            });
        }
        let shape = Shape { m: ar as usize, k: br as usize, n: self.colsb[d] as usize / 4 };
        let (ta, tb) = (self.data[a], self.data[b]);
        let tile = &mut self.data[d];
        match dot {
            Dot::Bf16 => dot_bf16(tile, &ta, &tb, shape),
            Dot::Int8(sa, sb) => dot_int8(tile, &ta, &tb, shape, sa, sb),
        }
        for (r, row) in tile.iter_mut().enumerate() {
            row[if r < shape.m { shape.n * 4 } else { 0 }..].fill(0);
        }
        self.start_row = 0;
        Ok(())
    }

    fn valid(&self, t: u8) -> Result<(), TileFault> {
        if self.palette == 0 {
            return Err(ud("no tile configuration is loaded"));
        }
        if self.rows[t as usize] == 0 {
            return Err(ud("the configuration has no such tile"));
        }
        Ok(())
    }

    /// Rows and bytes a row of a tile that is to be loaded or stored.
    fn movable(&self, t: u8) -> Result<(usize, usize), TileFault> {
        self.valid(t)?;
        let (rows, colsb) = (self.rows[t as usize], self.colsb[t as usize]);
        if !colsb.is_multiple_of(4) {
            return Err(ud("bytes a row are no multiple of 4"));
        }
        if self.start_row >= rows {
            let numbers = Some((u16::from(self.start_row), u16::from(rows)));
            return Err(TileFault { numbers, ..ud("the start row is past the tile") });
        }
        Ok((rows as usize, colsb as usize))
    }
}

type Tile = [[u8; 64]; 16];

/// A product's size: rows of A, dwords of A's rows, dwords of B's rows.
#[derive(Clone, Copy)]
struct Shape {
    m: usize,
    k: usize,
    n: usize,
}

/// Turns denormals (and zeros) into zeros of their sign. Results are tested after rounding: one that rounds up to the
/// smallest normal number stays.
#[inline(always)]
fn flush(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits(if bits & 0x7f80_0000 == 0 { bits & 0x8000_0000 } else { bits })
}

#[inline(always)]
fn dword(row: &[u8; 64], i: usize) -> u32 {
    u32::from_le_bytes([row[4 * i], row[4 * i + 1], row[4 * i + 2], row[4 * i + 3]])
}

#[inline(always)]
fn bf16_pair(d: u32) -> (f32, f32) {
    (flush(f32::from_bits(d << 16)), flush(f32::from_bits(d & 0xffff_0000)))
}

/// The 16 columns are always computed (columns past `n` hold zeros and are cleared by the caller), so that
/// loops have constant lengths and become vectors.
#[inline(always)]
fn dot_bf16_body(c: &mut Tile, a: &Tile, b: &Tile, s: Shape) {
    let mut pairs = [([0f32; 16], [0f32; 16]); 16];
    for (row, (even, odd)) in b.iter().zip(&mut pairs).take(s.k) {
        for n in 0..16 {
            (even[n], odd[n]) = bf16_pair(dword(row, n));
        }
    }
    for (row_c, row_a) in c.iter_mut().zip(a).take(s.m) {
        let (mut even, mut odd) = ([0f32; 16], [0f32; 16]);
        for (k, (be, bo)) in pairs.iter().enumerate().take(s.k) {
            let (ae, ao) = bf16_pair(dword(row_a, k));
            for n in 0..16 {
                even[n] = flush(ae.mul_add(be[n], even[n]));
                odd[n] = flush(ao.mul_add(bo[n], odd[n]));
            }
        }
        for n in 0..16 {
            let c = flush(f32::from_bits(dword(row_c, n)));
            let sum = flush(c + flush(even[n] + odd[n]));
            row_c[4 * n..4 * n + 4].copy_from_slice(&sum.to_bits().to_le_bytes());
        }
    }
}

#[inline(always)]
fn widen(byte: u8, signed: bool) -> i32 {
    if signed { i32::from(byte as i8) } else { i32::from(byte) }
}

#[inline(always)]
fn dot_int8_body(c: &mut Tile, a: &Tile, b: &Tile, s: Shape, sa: bool, sb: bool) {
    let mut wide = [[[0i32; 16]; 4]; 16];
    for (wide, row) in wide.iter_mut().zip(b).take(s.k) {
        for (j, wide) in wide.iter_mut().enumerate() {
            for n in 0..16 {
                wide[n] = widen(row[4 * n + j], sb);
            }
        }
    }
    for (row_c, row_a) in c.iter_mut().zip(a).take(s.m) {
        let mut sum: [i32; 16] = std::array::from_fn(|n| dword(row_c, n) as i32);
        for (k, wide) in wide.iter().enumerate().take(s.k) {
            for (j, wide) in wide.iter().enumerate() {
                let x = widen(row_a[4 * k + j], sa);
                for n in 0..16 {
                    // Sums wrap without saturation, as in the instruction.
                    sum[n] = sum[n].wrapping_add(x.wrapping_mul(wide[n]));
                }
            }
        }
        for (n, sum) in sum.iter().enumerate() {
            row_c[4 * n..4 * n + 4].copy_from_slice(&sum.to_le_bytes());
        }
    }
}

/// 2: AVX-512, 1: AVX2 with FMA, 0: plain. Set before the handler is installed, since a signal handler should not
/// detect CPU features.
static LEVEL: AtomicU8 = AtomicU8::new(0);

/// Chooses the fastest way to execute products on this CPU.
pub fn choose_level() {
    let level = if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("fma") {
        2
    } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        1
    } else {
        0
    };
    LEVEL.store(level, Ordering::Relaxed);
}

#[target_feature(enable = "avx512f,avx2,fma")]
fn dot_bf16_avx512(c: &mut Tile, a: &Tile, b: &Tile, s: Shape) {
    dot_bf16_body(c, a, b, s);
}

#[target_feature(enable = "avx2,fma")]
fn dot_bf16_avx2(c: &mut Tile, a: &Tile, b: &Tile, s: Shape) {
    dot_bf16_body(c, a, b, s);
}

fn dot_bf16(c: &mut Tile, a: &Tile, b: &Tile, s: Shape) {
    match LEVEL.load(Ordering::Relaxed) {
        // SAFETY: level 2 is set only where AVX-512F and FMA are detected.
        2 => unsafe { dot_bf16_avx512(c, a, b, s) },
        // SAFETY: level 1 is set only where AVX2 and FMA are detected.
        1 => unsafe { dot_bf16_avx2(c, a, b, s) },
        _ => dot_bf16_body(c, a, b, s),
    }
}

#[target_feature(enable = "avx512f,avx2,fma")]
fn dot_int8_avx512(c: &mut Tile, a: &Tile, b: &Tile, s: Shape, sa: bool, sb: bool) {
    dot_int8_body(c, a, b, s, sa, sb);
}

fn dot_int8(c: &mut Tile, a: &Tile, b: &Tile, s: Shape, sa: bool, sb: bool) {
    match LEVEL.load(Ordering::Relaxed) {
        // SAFETY: level 2 is set only where AVX-512F is detected.
        2 => unsafe { dot_int8_avx512(c, a, b, s, sa, sb) },
        _ => dot_int8_body(c, a, b, s, sa, sb),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(shapes: &[(u8, u16)]) -> [u8; 64] {
        let mut mem = [0u8; 64];
        mem[0] = 1;
        for (t, &(rows, colsb)) in shapes.iter().enumerate() {
            mem[48 + t] = rows;
            mem[16 + 2 * t..18 + 2 * t].copy_from_slice(&colsb.to_le_bytes());
        }
        mem
    }

    /// Each planted error of a configuration is refused, with its reason, and changes nothing.
    #[test]
    fn bad_configurations_are_refused() {
        let good = config(&[(16, 64), (3, 12)]);
        let plant = |i: usize, v: u8| {
            let mut bad = good;
            bad[i] = v;
            bad
        };
        let cases = [
            (plant(0, 2), "unknown palette"),
            (plant(2, 1), "reserved"),
            (plant(15, 1), "reserved"),
            (plant(32, 1), "reserved"),
            (plant(47, 1), "reserved"),
            (plant(56, 1), "reserved"),
            (plant(63, 9), "reserved"),
            (plant(48, 17), "more than 16 rows"),
            (plant(16, 65), "more than 16 rows or 64 bytes"),
            (plant(17, 1), "more than 16 rows or 64 bytes"),
            (plant(48, 0), "only one is zero"),
            (plant(18, 0), "only one is zero"),
            (plant(50, 1), "only one is zero"),
        ];
        let mut tiles = Tiles::INIT;
        tiles.load_config(&good).unwrap();
        assert_eq!(tiles.store_config(), good);
        for (bad, why) in cases {
            let fault = tiles.load_config(&bad).unwrap_err();
            assert_eq!(fault.exception, "#GP(0)");
            assert!(fault.to_string().contains(why), "{fault}, expected {why}");
            assert_eq!(tiles.store_config(), good);
        }
        tiles.load_config(&[0; 64]).unwrap();
        assert_eq!(tiles.store_config(), [0; 64]);
    }

    #[test]
    fn bad_operands_are_refused() {
        let mut t = Tiles::INIT;
        assert!(t.zero(0).unwrap_err().why.contains("no tile configuration"));
        // C 4x16 dwords, A 4x8, B 8x16; 3: other rows, 4: other columns, 5: odd bytes; 6: absent.
        t.load_config(&config(&[(4, 64), (4, 32), (8, 64), (5, 64), (8, 32), (4, 30)])).unwrap();
        t.dot(Dot::Bf16, 0, 1, 2).unwrap();
        let mut refuse = |c, a, b, why: &str| {
            let fault = t.dot(Dot::Int8(true, true), c, a, b).unwrap_err();
            assert_eq!(fault.exception, "#UD");
            assert!(fault.why.contains(why), "{fault}, expected {why}");
        };
        refuse(0, 0, 2, "different");
        refuse(0, 1, 0, "different");
        refuse(0, 1, 1, "different");
        refuse(3, 1, 2, "differ in rows");
        refuse(0, 1, 4, "differ in bytes a row");
        refuse(0, 1, 3, "dwords a row");
        refuse(0, 5, 2, "multiple of 4");
        refuse(0, 6, 2, "no such tile");
        assert!(t.load(6, |_, _| ()).unwrap_err().why.contains("no such tile"));
        assert!(t.load(5, |_, _| ()).unwrap_err().why.contains("multiple of 4"));
        let mut late = config(&[(4, 64)]);
        late[1] = 4;
        t.load_config(&late).unwrap();
        assert!(t.store(0, |_, _| ()).unwrap_err().why.contains("start row"));
    }

    #[test]
    fn an_interrupted_load_resumes_at_its_start_row() {
        let mut t = Tiles::INIT;
        let mut mem = config(&[(4, 8)]);
        mem[1] = 2;
        t.load_config(&mem).unwrap();
        let mut seen = Vec::new();
        t.load(0, |r, row| {
            seen.push(r);
            row.fill(7);
        })
        .unwrap();
        assert_eq!(seen, [2, 3]);
        assert_eq!(t.store_config()[1], 0, "the start row is spent");
    }

    #[test]
    fn what_a_tile_does_not_use_is_zero() {
        let mut t = Tiles::INIT;
        t.load_config(&config(&[(16, 64), (16, 64), (16, 64)])).unwrap();
        for tile in 0..3 {
            t.load(tile, |_, row| row.fill(0x7f)).unwrap();
        }
        t.load_config(&config(&[(2, 8), (2, 4), (1, 8)])).unwrap();
        assert!(
            t.data.as_flattened().as_flattened().iter().all(|&b| b == 0),
            "a configuration clears all tiles"
        );
        // Infinities times the zero columns beside B would leave NaN in the columns beside C.
        for tile in 0..3 {
            t.load(tile, |_, row| row.fill(0x7f)).unwrap();
        }
        t.load(1, |_, row| row.copy_from_slice(&[0x80, 0x7f, 0x80, 0x7f])).unwrap();
        t.dot(Dot::Bf16, 0, 1, 2).unwrap();
        for (r, row) in t.data[0].iter().enumerate() {
            let used = if r < 2 { 8 } else { 0 };
            assert!(
                row[..used].chunks(4).all(|d| d != [0; 4]) && row[used..].iter().all(|&b| b == 0),
                "row {r}"
            );
        }
        t.zero(0).unwrap();
        assert_eq!(t.data[0], [[0; 64]; 16]);
        t.release();
        assert_eq!(t.data[1], [[0; 64]; 16]);
    }

    /// All three ways of executing products give the same bits.
    #[test]
    fn levels_agree() {
        let mut x = 1u32;
        let mut tile = || -> Tile {
            std::array::from_fn(|_| {
                std::array::from_fn(|_| {
                    x = x.wrapping_mul(1664525).wrapping_add(1013904223);
                    (x >> 24) as u8 & 0xbf // exponents below the largest: no infinities, no NaN
                })
            })
        };
        let (c, a, b) = (tile(), tile(), tile());
        for (m, k, n) in [(16, 16, 16), (1, 16, 3), (5, 7, 16)] {
            let s = Shape { m, k, n };
            let mut want = c;
            dot_bf16_body(&mut want, &a, &b, s);
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                let mut got = c;
                // SAFETY: detected above.
                unsafe { dot_bf16_avx2(&mut got, &a, &b, s) };
                assert_eq!(got, want, "avx2 {m}x{k}x{n}");
            }
            if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("fma") {
                let mut got = c;
                // SAFETY: detected above.
                unsafe { dot_bf16_avx512(&mut got, &a, &b, s) };
                assert_eq!(got, want, "avx512 {m}x{k}x{n}");
            }
        }
    }
}
