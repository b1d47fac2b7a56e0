//! Fragments. The layouts are those of the figures of the ISA, 9.7.14: groupID = lane >> 2, threadID_in_group = lane % 4.

mod common;
use common::{Launch, Random, lanes, module, run};

/// (row, column) of element i of A of 16-bit floats, m16n8k8 and m16n8k16.
fn a_half(lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    let row = if i < 2 || (4..6).contains(&i) { group } else { group + 8 };
    (row, thread * 2 + (i & 1) + if i < 4 { 0 } else { 8 })
}
/// (row, column) of element i of B of 16-bit floats.
fn b_half(lane: usize, i: usize) -> (usize, usize) {
    (lane % 4 * 2 + (i & 1) + if i < 2 { 0 } else { 8 }, lane >> 2)
}
/// (row, column) of element i of A of bytes, m16n8k16 and m16n8k32.
fn a_byte(lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    let row = if i < 4 || (8..12).contains(&i) { group } else { group + 8 };
    (row, thread * 4 + (i & 3) + if i < 8 { 0 } else { 16 })
}
/// (row, column) of element i of B of bytes.
fn b_byte(lane: usize, i: usize) -> (usize, usize) {
    (lane % 4 * 4 + (i & 3) + if i < 4 { 0 } else { 16 }, lane >> 2)
}
/// (row, column) of element i of C and D.
fn c_any(lane: usize, i: usize) -> (usize, usize) {
    (if i < 2 { lane >> 2 } else { (lane >> 2) + 8 }, lane % 4 * 2 + (i & 1))
}

type Matrix = Vec<Vec<i64>>;

fn matrix(rows: usize, cols: usize, mut element: impl FnMut() -> i64) -> Matrix {
    (0..rows).map(|_| (0..cols).map(|_| element()).collect()).collect()
}

fn product(a: &Matrix, b: &Matrix, row: usize, col: usize) -> i64 {
    a[row].iter().zip(b).map(|(x, y)| x * y[col]).sum()
}

/// Whole numbers below 256 by their bits: f16, bf16.
fn half(kind: &str, v: i64) -> u32 {
    let bits = (v as f32).to_bits();
    if kind == "bf16" || v == 0 {
        return bits >> 16;
    }
    // The exponent's bias goes from 127 to 15, the mantissa from 23 bits to 10.
    (bits >> 16 & 0x8000) | (((bits >> 23 & 255) - 112) << 10) | (bits >> 13 & 0x3ff)
}

fn registers(from: usize, count: usize) -> String {
    (from..from + count).map(|i| format!("%r{i}")).collect::<Vec<_>>().join(", ")
}

#[test]
fn mma_of_halves() {
    for (k, kind) in [(16, "f16"), (16, "bf16"), (8, "f16"), (8, "bf16")] {
        let mut random = Random(k as u64);
        let mut small = || i64::from(random.next() % 17) - 8;
        let (a, b, c) = (matrix(16, k, &mut small), matrix(k, 8, &mut small), matrix(16, 8, &mut small));
        let (na, nb) = (k / 4, k / 8);
        let per = na + nb + 4;
        let mut input = vec![0u32; 32 * per];
        for lane in 0..32 {
            let words = &mut input[lane * per..][..per];
            for i in 0..2 * na {
                let (row, col) = a_half(lane, i);
                words[i / 2] |= half(kind, a[row][col]) << (16 * (i % 2));
            }
            for i in 0..2 * nb {
                let (row, col) = b_half(lane, i);
                words[na + i / 2] |= half(kind, b[row][col]) << (16 * (i % 2));
            }
            for i in 0..4 {
                let (row, col) = c_any(lane, i);
                words[na + nb + i] = (c[row][col] as f32).to_bits();
            }
        }
        let body = format!(
            "mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32 {{{}}}, {{{}}}, {{{}}}, {{{}}};",
            registers(32, 4),
            registers(0, na),
            registers(na, nb),
            registers(na + nb, 4)
        );
        for (lane, out) in lanes(&body, per, &input, 4).chunks(4).enumerate() {
            for (i, got) in out.iter().enumerate() {
                let (row, col) = c_any(lane, i);
                let want = product(&a, &b, row, col) + c[row][col];
                assert_eq!(f32::from_bits(*got), want as f32, "{body}, lane {lane}, {i}");
            }
        }
    }
}

#[test]
fn mma_of_bytes() {
    let shapes = [(16, 32, "s8", "s8"), (16, 16, "s8", "s8"), (8, 16, "s8", "s8"), (16, 32, "u8", "s8")];
    for (m, k, ka, kb) in shapes {
        let mut random = Random((m + k) as u64);
        let mut byte = |kind: &str| {
            let byte = random.next() as u8;
            if kind == "s8" { i64::from(byte as i8) } else { i64::from(byte) }
        };
        let (a, b) = (matrix(m, k, || byte(ka)), matrix(k, 8, || byte(kb)));
        // Accumulators at the ends of the range: sums wrap.
        let c =
            |row: usize, col: usize| if (row + col).is_multiple_of(2) { i32::MAX - 3 } else { i32::MIN + 9 };
        let (na, nb, nc) = (m * k / 128, k / 16, m / 4);
        let per = na + nb + nc;
        let mut input = vec![0u32; 32 * per];
        for lane in 0..32 {
            let words = &mut input[lane * per..][..per];
            for i in 0..4 * na {
                // m8n8k16 has the elements of the first four only.
                let (row, col) = a_byte(lane, i);
                words[i / 4] |= (a[row][col] as u8 as u32) << (8 * (i % 4));
            }
            for i in 0..4 * nb {
                let (row, col) = b_byte(lane, i);
                words[na + i / 4] |= (b[row][col] as u8 as u32) << (8 * (i % 4));
            }
            for i in 0..nc {
                let (row, col) = c_any(lane, i);
                words[na + nb + i] = c(row, col) as u32;
            }
        }
        let body = format!(
            "mma.sync.aligned.m{m}n8k{k}.row.col.s32.{ka}.{kb}.s32 {{{}}}, {{{}}}, {{{}}}, {{{}}};",
            registers(32, nc),
            registers(0, na),
            registers(na, nb),
            registers(na + nb, nc)
        );
        for (lane, out) in lanes(&body, per, &input, nc).chunks(nc).enumerate() {
            for (i, got) in out.iter().enumerate() {
                let (row, col) = c_any(lane, i);
                let want = product(&a, &b, row, col) + i64::from(c(row, col));
                assert_eq!(*got, want as u32, "{body}, lane {lane}, {i}");
            }
        }
    }
}

/// The result may be where the accumulator was, as kernels write it.
#[test]
fn mma_in_place() {
    let body = "mov.u32 %r32, %r6; mov.u32 %r33, %r7; mov.u32 %r34, %r8; mov.u32 %r35, %r9;\n\
                mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r32, %r33, %r34, %r35}, {%r0, %r1, %r2, %r3},\n\
                {%r4, %r5}, {%r32, %r33, %r34, %r35};";
    let one = half("f16", 1) * 0x1_0001;
    let input: Vec<u32> =
        (0..32).flat_map(|_| [one, one, one, one, one, one, 0x3f80_0000, 0, 0x4000_0000, 0]).collect();
    let want = [17f32, 16.0, 18.0, 16.0].map(f32::to_bits);
    assert!(lanes(body, 10, &input, 4).chunks(4).all(|out| out == want));
}

#[test]
fn ldmatrix_of_one_two_and_four() {
    for (count, transposed) in [(1, false), (2, false), (4, false), (1, true), (2, true), (4, true)] {
        // Rows backwards in memory, so that addresses matter; half j of row i of matrix m is 64 m + 8 i + j.
        let body = format!(
            ".shared .align 16 .b8 own[512];\nmad.wide.u32 %q0, %lane, 16, %in;\n\
             ld.global.v4.u32 {{%r0, %r1, %r2, %r3}}, [%q0]; mov.u32 %r4, own; shl.b32 %r5, %lane, 4; sub.s32 %r6, 496, %r5;\n\
             add.s32 %r6, %r4, %r6; st.shared.v4.u32 [%r6], {{%r0, %r1, %r2, %r3}}; bar.warp.sync -1;\n\
             ldmatrix.sync.aligned.m8n8.x{count}{}.shared.b16 {{{}}}, [%r6];\nmad.wide.u32 %q1, %lane, 16, %out;\n\
             st.global.v4.u32 [%q1], {{%r32, %r33, %r34, %r35}};",
            if transposed { ".trans" } else { "" },
            registers(32, count)
        );
        let input: Vec<u32> = (0..128).map(|w| (2 * w) | (2 * w + 1) << 16).collect();
        let out = run(&module("", &body), &input, 128, Launch::default()).unwrap();
        for lane in 0..32u32 {
            let (row, col) = (lane / 4, lane % 4 * 2);
            for m in 0..count as u32 {
                let element = |i: u32, j: u32| 64 * m + 8 * i + j;
                let want = if transposed {
                    element(col, row) | element(col + 1, row) << 16
                } else {
                    element(row, col) | element(row, col + 1) << 16
                };
                assert_eq!(out[(4 * lane + m) as usize], want, "x{count} {transposed}, lane {lane}, {m}");
            }
        }
    }
}

#[test]
fn movmatrix_transposes() {
    let element = |row: u32, col: u32| 8 * row + col;
    let input: Vec<u32> =
        (0..32).map(|l| element(l / 4, l % 4 * 2) | element(l / 4, l % 4 * 2 + 1) << 16).collect();
    let out = lanes("movmatrix.sync.aligned.m8n8.trans.b16 %r32, %r0;", 1, &input, 1);
    for (lane, got) in out.iter().enumerate() {
        let (row, col) = (lane as u32 / 4, lane as u32 % 4 * 2);
        assert_eq!(*got, element(col, row) | element(col + 1, row) << 16, "lane {lane}");
    }
}
