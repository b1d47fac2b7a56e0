//! What sm_90a has: wgmma, bulk copies, mbarriers.

use super::matrices::{Matrices, a_16};
use super::*;

/// Where byte `col_byte` of row `row` lies in a tile of 128-byte rows swizzled by 128 bytes: of its 16-byte chunk's
/// number, the row's number modulo 8 is xor-ed (the ISA's figures of Swizzle 128B).
pub fn swizzled(row: usize, col_byte: usize) -> usize {
    row * 128 + ((col_byte / 16) ^ (row % 8)) * 16 + col_byte % 16
}

/// (row, column) of element i of the accumulators of wgmma m64nNk16 in thread t of 128.
fn d_64(t: usize, i: usize) -> (usize, usize) {
    let (warp, lane) = (t / 32, t % 32);
    (warp * 16 + lane / 4 + i % 4 / 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2)
}

/// Compares what a product left in the accumulators of all threads.
pub fn check_product(name: &str, out: &[u32], n: usize, m: &Matrices) {
    for t in 0..128 {
        for i in 0..n / 2 {
            let (row, col) = d_64(t, i);
            let got = f64::from(f32::from_bits(out[t * n / 2 + i]));
            assert_eq!(got, m.product(row, col), "{name}: thread {t}, d[{i}], element ({row}, {col})");
        }
    }
}

/// Runs `kernel` twice: adding to accumulators (scale-d 1), and overwriting such that hold NaN (scale-d 0). All products
/// and sums are small integers, exact in f32.
fn check_wgmma(rt: &Arc<dyn Runtime>, kernel: &str, shape: Shape, operands: &[u32], n: usize, m: &Matrices) {
    for accumulate in [true, false] {
        let d = if accumulate { accumulators(n, m) } else { vec![f32::NAN.to_bits(); 64 * n] };
        let shape = Shape { n: u32::from(accumulate), ..shape };
        let Some(out) = run(rt, kernel, shape, &[operands, &d].concat(), 64 * n) else { return };
        for t in 0..128 {
            for i in 0..n / 2 {
                let (row, col) = d_64(t, i);
                let got = f64::from(f32::from_bits(out[t * n / 2 + i]));
                let want = m.product(row, col) - if accumulate { 0.0 } else { m.c[row][col] };
                let place = format!("thread {t}, d[{i}], element ({row}, {col})");
                assert_eq!(got, want, "{kernel}, accumulate {accumulate}: {place}");
            }
        }
    }
}

pub fn accumulators(n: usize, m: &Matrices) -> Vec<u32> {
    let element = |at: usize| {
        let (row, col) = d_64(at / (n / 2), at % (n / 2));
        (m.c[row][col] as f32).to_bits()
    };
    (0..64 * n).map(element).collect()
}

#[test]
fn wgmma_of_two_tiles_in_shared_memory() {
    for rt in runtimes() {
        for (half, n, how) in [
            (Half::F16, 8, ""),
            (Half::F16, 128, ""),
            (Half::Bf16, 64, ""),
            (Half::Bf16, 256, ""),
            (Half::F16, 64, "_pipelined"),
            (Half::Bf16, 256, "_pipelined"),
        ] {
            let mut words = Words::new(n as u64);
            let m = Matrices::new(64, n, 64, || f64::from(words.small()));
            let mut input = vec![0; (8192 + 128 * n) / 4];
            for row in 0..64 {
                for k in 0..64 {
                    set_half(&mut input, swizzled(row, 2 * k) / 2, half.bits(m.a[row][k]));
                }
            }
            for col in 0..n {
                for k in 0..64 {
                    set_half(&mut input[2048..], swizzled(col, 2 * k) / 2, half.bits(m.b[k][col]));
                }
            }
            let name = format!("conformance_wgmma_{}_n{n}{how}", half.name());
            let shape = Shape { block: 128, shared: 8192 + 128 * n as u32, ..WARP };
            check_wgmma(&rt, &name, shape, &input, n, &m);
        }
    }
}

#[test]
fn wgmma_of_registers_and_a_tile_by_columns() {
    for rt in runtimes() {
        for (half, n) in [(Half::F16, 64), (Half::Bf16, 128), (Half::F16, 256)] {
            let mut words = Words::new(100 + n as u64);
            let m = Matrices::new(64, n, 16, || f64::from(words.small()));
            let mut input = vec![0; 512 + 8 * n];
            for t in 0..128 {
                for i in 0..8 {
                    let (row, k) = a_16(t % 32, i);
                    set_half(&mut input[t * 4..], i, half.bits(m.a[t / 32 * 16 + row][k]));
                }
            }
            for col in 0..n {
                for k in 0..16 {
                    let at = col / 64 * 2048 + swizzled(k, col % 64 * 2);
                    set_half(&mut input[512..], at / 2, half.bits(m.b[k][col]));
                }
            }
            let name = format!("conformance_wgmma_ra_{}_n{n}", half.name());
            let shape = Shape { block: 128, shared: 32 * n as u32, ..WARP };
            check_wgmma(&rt, &name, shape, &input, n, &m);
        }
    }
}

#[test]
fn bulk_copies_swizzle_and_fill_zeros_outside() {
    const KERNEL: &str = "conformance_tma_sm90a";
    let (rows, cols, stride) = (50usize, 72usize, 80usize);
    for rt in runtimes() {
        if !rt.has_kernel(KERNEL) {
            println!("skipped: {} has no {KERNEL}", rt.info().name);
            continue;
        }
        // Element (r, c) is 1 + its place; what lies between the rows must not be seen.
        let matrix: Vec<u8> = (0..rows * stride).flat_map(|i| (1 + i as u16).to_le_bytes()).collect();
        let matrix = Buffer::from_bytes(&rt, Lane::Compute, &matrix).unwrap();
        for (box_rows, x, y) in [(64, 0, 0), (64, 64, 0), (16, 8, 40), (8, -16, -4), (128, 200, 0)] {
            let words = box_rows * 32;
            let out = Buffer::new(&rt, words * 4).unwrap();
            let bytes = rt
                .tensor_map_2d(matrix.ptr(), rows as u64, cols as u64, stride as u64, box_rows as u32, 64)
                .unwrap();
            let params = ConformanceTmaParams {
                map: TensorMap { bytes },
                out: out.ptr(),
                x,
                y,
                box_rows: box_rows as u32,
                box_cols: 64,
                ..Default::default()
            };
            let shape = Shape { shared: words as u32 * 4 + 8, ..WARP };
            launch(&rt, KERNEL, &shape, params.bytes());
            let mut got = vec![0; words * 4];
            rt.download(Lane::Compute, out.ptr(), &mut got).unwrap();
            for r in 0..box_rows {
                for c in 0..64 {
                    let (row, col) = (y + r as i32, x + c as i32);
                    let inside = (0..rows as i32).contains(&row) && (0..cols as i32).contains(&col);
                    let want = if inside { 1 + (row as usize * stride + col as usize) as u16 } else { 0 };
                    let at = swizzled(r, 2 * c);
                    let got = u16::from_le_bytes([got[at], got[at + 1]]);
                    assert_eq!(got, want, "box of {box_rows} rows at ({x}, {y}): row {r}, column {c}");
                }
            }
        }
    }
}

#[test]
fn mbarrier_phases_hand_a_word_back_and_forth() {
    const N: usize = 100;
    let mut words = Words::new(23);
    let input: Vec<u32> = (0..N).map(|_| words.next()).collect();
    for rt in runtimes() {
        let shape = Shape { block: 64, shared: 32, n: N as u32, ..WARP };
        let Some(out) = run(&rt, "conformance_mbarrier_sm90a", shape, &input, N) else { continue };
        assert_eq!(out, input);
    }
}
