//! Matrices in registers. The ISA, 9.7.14: groupID = laneid >> 2, threadID_in_group = laneid % 4; a_i, b_i, c_i are
//! the elements of a lane's fragment in order.

use super::*;

/// (row, column) of element i of a, m16n8k16 of 16-bit floats.
pub fn a_16(lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    let row = if i < 2 || (4..6).contains(&i) { group } else { group + 8 };
    let col = if i < 4 { thread * 2 + (i & 1) } else { thread * 2 + (i & 1) + 8 };
    (row, col)
}

/// (row, column) of element i of b, m16n8k16 of 16-bit floats.
fn b_16(lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    (if i < 2 { thread * 2 + (i & 1) } else { thread * 2 + (i & 1) + 8 }, group)
}

/// (row, column) of element i of a, m16n8k32 of bytes.
fn a_32(lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    let row = if i < 4 || (8..12).contains(&i) { group } else { group + 8 };
    let col = if i < 8 { thread * 4 + (i & 3) } else { thread * 4 + (i & 3) + 16 };
    (row, col)
}

/// (row, column) of element i of b, m16n8k32 of bytes.
fn b_32(lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    (if i < 4 { thread * 4 + (i & 3) } else { thread * 4 + (i & 3) + 16 }, group)
}

/// (row, column) of element i of c, both.
fn c_16(lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    (if i < 2 { group } else { group + 8 }, thread * 2 + (i & 1))
}

#[test]
fn ldmatrix_gives_rows_or_columns_to_lanes() {
    // Half j of matrix m's row i is 64 m + 8 i + j: every element is another.
    let element = |m: usize, i: usize, j: usize| (64 * m + 8 * i + j) as u32;
    let input: Vec<u32> = (0..128).map(|w| (2 * w) | ((2 * w + 1) << 16)).collect();
    for rt in runtimes() {
        let shape = Shape { shared: 512, ..WARP };
        let Some(out) = run(&rt, "conformance_ldmatrix", shape, &input, 384) else { continue };
        for lane in 0..32 {
            let (row, col) = (lane / 4, lane % 4 * 2);
            let plain = |m| element(m, row, col) | element(m, row, col + 1) << 16;
            let transposed = |m| element(m, col, row) | element(m, col + 1, row) << 16;
            for m in 0..4 {
                assert_eq!(out[lane * 4 + m], plain(m), "x4, lane {lane}, matrix {m}");
                assert_eq!(out[128 + lane * 4 + m], transposed(m), "x4 trans, lane {lane}, matrix {m}");
            }
            for m in 0..2 {
                assert_eq!(out[256 + lane * 2 + m], plain(m), "x2, lane {lane}, matrix {m}");
                assert_eq!(out[320 + lane * 2 + m], transposed(m), "x2 trans, lane {lane}, matrix {m}");
            }
        }
    }
}

#[test]
fn movmatrix_transposes_in_registers() {
    let element = |row: usize, col: usize| (8 * row + col) as u32;
    let input: Vec<u32> =
        (0..32).map(|l| element(l / 4, l % 4 * 2) | element(l / 4, l % 4 * 2 + 1) << 16).collect();
    for rt in runtimes() {
        let Some(out) = run(&rt, "conformance_movmatrix", WARP, &input, 32) else { continue };
        for lane in 0..32 {
            let (row, col) = (lane / 4, lane % 4 * 2);
            assert_eq!(out[lane], element(col, row) | element(col + 1, row) << 16, "lane {lane}");
        }
    }
}

/// Operands of one mma as matrices.
pub struct Matrices {
    pub a: Vec<Vec<f64>>,
    pub b: Vec<Vec<f64>>,
    pub c: Vec<Vec<f64>>,
}

impl Matrices {
    pub fn new(m: usize, n: usize, k: usize, mut element: impl FnMut() -> f64) -> Matrices {
        let mut matrix =
            |rows, cols| (0..rows).map(|_| (0..cols).map(|_| element()).collect()).collect::<Vec<Vec<f64>>>();
        Matrices { a: matrix(m, k), b: matrix(k, n), c: matrix(m, n) }
    }
    pub fn product(&self, row: usize, col: usize) -> f64 {
        self.c[row][col] + self.a[row].iter().zip(&self.b).map(|(a, b)| a * b[col]).sum::<f64>()
    }
    /// Σ|ab| + |c|: what errors are measured by.
    pub fn magnitude(&self, row: usize, col: usize) -> f64 {
        self.c[row][col].abs() + self.a[row].iter().zip(&self.b).map(|(a, b)| (a * b[col]).abs()).sum::<f64>()
    }
}

fn fragments_16(half: Half, m: &Matrices) -> Vec<u32> {
    let mut input = vec![0; 32 * 10];
    for lane in 0..32 {
        let words = &mut input[lane * 10..][..10];
        for i in 0..8 {
            let (row, col) = a_16(lane, i);
            set_half(words, i, half.bits(m.a[row][col]));
        }
        for i in 0..4 {
            let (row, col) = b_16(lane, i);
            set_half(words, 8 + i, half.bits(m.b[row][col]));
            let (row, col) = c_16(lane, i);
            words[6 + i] = (m.c[row][col] as f32).to_bits();
        }
    }
    input
}

#[test]
fn mma_of_halves_is_exact_on_small_integers() {
    for rt in runtimes() {
        for half in [Half::F16, Half::Bf16] {
            let mut words = Words::new(3);
            let m = Matrices::new(16, 8, 16, || f64::from(words.small()));
            let name = format!("conformance_mma_{}", half.name());
            let Some(out) = run(&rt, &name, WARP, &fragments_16(half, &m), 128) else { continue };
            for lane in 0..32 {
                for i in 0..4 {
                    let (row, col) = c_16(lane, i);
                    let got = f64::from(f32::from_bits(out[lane * 4 + i]));
                    assert_eq!(got, m.product(row, col), "{name}: lane {lane}, c{i}");
                }
            }
        }
    }
}

/// Tensor cores align 17 terms to the largest and cut each below 2^-23 of it; sums are cut again when they are
/// combined: at most 2 * 17 times 2^-23 of Σ|ab| + |c|, in any order.
#[test]
fn mma_of_halves_accumulates_in_f32() {
    for rt in runtimes() {
        for half in [Half::F16, Half::Bf16] {
            for seed in 0..8 {
                let mut words = Words::new(seed);
                let m = Matrices::new(16, 8, 16, || {
                    let v = f64::from(words.next()) / f64::from(u32::MAX) * 2.0 - 1.0;
                    half.value(half.bits(v * f64::from(1 << (words.next() % 8))))
                });
                let name = format!("conformance_mma_{}", half.name());
                let Some(out) = run(&rt, &name, WARP, &fragments_16(half, &m), 128) else { continue };
                for lane in 0..32 {
                    for i in 0..4 {
                        let (row, col) = c_16(lane, i);
                        let got = f64::from(f32::from_bits(out[lane * 4 + i]));
                        let bound = 34.0 * 2f64.powi(-23) * m.magnitude(row, col);
                        let error = (got - m.product(row, col)).abs();
                        assert!(error <= bound, "{name}: lane {lane}, c{i}: off by {error}, bound {bound}");
                    }
                }
            }
        }
    }
}

#[test]
fn mma_of_bytes_is_exact_and_wraps() {
    for rt in runtimes() {
        let mut words = Words::new(5);
        let m = Matrices::new(16, 8, 32, || f64::from(words.next() as i8));
        let mut input = vec![0; 32 * 10];
        // Accumulators at the ends of the range: the sum wraps.
        let c = |row: usize, col: usize| {
            if (row + col).is_multiple_of(2) { i32::MAX - row as i32 } else { i32::MIN + col as i32 }
        };
        for lane in 0..32 {
            let fragment = &mut input[lane * 10..][..10];
            for i in 0..16 {
                let (row, col) = a_32(lane, i);
                set_byte(fragment, i, m.a[row][col] as i8 as u8);
            }
            for i in 0..8 {
                let (row, col) = b_32(lane, i);
                set_byte(fragment, 16 + i, m.b[row][col] as i8 as u8);
            }
            for i in 0..4 {
                let (row, col) = c_16(lane, i);
                fragment[6 + i] = c(row, col) as u32;
            }
        }
        let Some(out) = run(&rt, "conformance_mma_s8", WARP, &input, 128) else { continue };
        for lane in 0..32 {
            for i in 0..4 {
                let (row, col) = c_16(lane, i);
                let dot: i64 = (0..32).map(|k| (m.a[row][k] * m.b[k][col]) as i64).sum();
                assert_eq!(
                    out[lane * 4 + i] as i32,
                    (i64::from(c(row, col)) + dot) as i32,
                    "lane {lane}, c{i}"
                );
            }
        }
    }
}
