//! Integers and bits, each against the ISA's definition in wider numbers.

mod common;
use common::check;

fn s(x: u32) -> i64 {
    i64::from(x as i32)
}
fn u(x: u32) -> u64 {
    u64::from(x)
}

#[test]
fn sums_and_products() {
    check("add.s32 %r32, %r0, %r1; sub.u32 %r33, %r0, %r1;", 2, 2, |v| {
        vec![(s(v[0]) + s(v[1])) as u32, (s(v[0]) - s(v[1])) as u32]
    });
    check("mul.lo.s32 %r32, %r0, %r1; mul.hi.s32 %r33, %r0, %r1; mul.hi.u32 %r34, %r0, %r1;", 2, 3, |v| {
        let (signed, unsigned) = (s(v[0]) * s(v[1]), u(v[0]) * u(v[1]));
        vec![signed as u32, (signed >> 32) as u32, (unsigned >> 32) as u32]
    });
    check("mad.lo.s32 %r32, %r0, %r1, %r2; mad.hi.u32 %r33, %r0, %r1, %r2;", 3, 2, |v| {
        let product = u128::from(v[0]) * u128::from(v[1]);
        vec![(product + u128::from(v[2])) as u32, ((product >> 32) + u128::from(v[2])) as u32]
    });
}

#[test]
fn wide_products() {
    let body = "mul.wide.u32 %q0, %r0, %r1; mov.b64 {%r32, %r33}, %q0;\n\
                mul.wide.s32 %q1, %r0, -3; mov.b64 {%r34, %r35}, %q1;\n\
                mad.wide.s32 %q2, %r0, %r1, %q0; mov.b64 {%r36, %r37}, %q2;";
    check(body, 2, 6, |v| {
        let (a, b) = (u(v[0]) * u(v[1]), s(v[0]) * -3);
        let c = ((s(v[0]) * s(v[1])) as u64).wrapping_add(a);
        vec![a as u32, (a >> 32) as u32, b as u32, (b >> 32) as u32, c as u32, (c >> 32) as u32]
    });
    let body = "mov.b32 {%h0, %h1}, %r0; mul.wide.u16 %r32, %h0, %h1; mul.wide.s16 %r33, %h0, %h1;\n\
                mul.lo.s16 %h2, %h0, %h1; add.s16 %h3, %h0, %h1; sub.s16 %h4, %h0, %h1;\n\
                mov.b32 %r34, {%h2, %h3}; cvt.u32.u16 %r35, %h4;";
    check(body, 1, 4, |v| {
        let (a, b) = (v[0] & 0xffff, v[0] >> 16);
        let (x, y) = (i32::from(a as u16 as i16), i32::from(b as u16 as i16));
        let sum = (a + b) & 0xffff;
        vec![a * b, (x * y) as u32, ((a * b) & 0xffff) | sum << 16, a.wrapping_sub(b) & 0xffff]
    });
}

#[test]
fn quotients() {
    let body = "or.b32 %r1, %r1, 1; div.u32 %r32, %r0, %r1; rem.u32 %r33, %r0, %r1;\n\
                div.s32 %r34, %r0, %r1; rem.s32 %r35, %r0, %r1;";
    check(body, 2, 4, |v| {
        let (a, b) = (v[0], v[1] | 1);
        // Quotients of 64 bits: the least number by -1 wraps.
        vec![a / b, a % b, (s(a) / s(b)) as u32, (s(a) % s(b)) as u32]
    });
    let body = "mov.b64 %q0, {%r0, %r1}; mov.b64 %q1, {%r2, %r3}; or.b64 %q1, %q1, 1;\n\
                div.u64 %q2, %q0, %q1; rem.u64 %q3, %q0, %q1; mul.lo.s64 %q4, %q0, %q1; sub.s64 %q5, %q0, %q1;\n\
                mov.b64 {%r32, %r33}, %q2; mov.b64 {%r34, %r35}, %q3; mov.b64 {%r36, %r37}, %q4;\n\
                mov.b64 {%r38, %r39}, %q5;";
    check(body, 4, 8, |v| {
        let (a, b) = (u(v[0]) | u(v[1]) << 32, u(v[2]) | u(v[3]) << 32 | 1);
        let product = (u128::from(a) * u128::from(b)) as u64;
        [a / b, a % b, product, a.wrapping_sub(b)]
            .iter()
            .flat_map(|x| [*x as u32, (x >> 32) as u32])
            .collect()
    });
}

#[test]
fn least_and_greatest() {
    let body = "min.u32 %r32, %r0, %r1; max.u32 %r33, %r0, %r1; min.s32 %r34, %r0, %r1; max.s32 %r35, %r0, %r1;\n\
                mov.b64 %q0, {%r0, %r1}; mov.b64 %q1, {%r1, %r0}; max.u64 %q2, %q0, %q1; mov.b64 {%r36, %r37}, %q2;\n\
                neg.s32 %r38, %r0; abs.s32 %r39, %r0;";
    check(body, 2, 8, |v| {
        let wide = (u(v[0]) | u(v[1]) << 32).max(u(v[1]) | u(v[0]) << 32);
        vec![
            v[0].min(v[1]),
            v[0].max(v[1]),
            s(v[0]).min(s(v[1])) as u32,
            s(v[0]).max(s(v[1])) as u32,
            wide as u32,
            (wide >> 32) as u32,
            (-s(v[0])) as u32,
            s(v[0]).unsigned_abs() as u32,
        ]
    });
}

#[test]
fn shifts_beyond_the_width_are_zero_or_the_sign() {
    let body = "and.b32 %r1, %r1, 63; shl.b32 %r32, %r0, %r1; shr.u32 %r33, %r0, %r1; shr.s32 %r34, %r0, %r1;\n\
                mov.b32 {%h0, %h1}, %r0; shl.b16 %h2, %h0, %r1; shr.u16 %h3, %h0, %r1; shr.s16 %h4, %h0, %r1;\n\
                mov.b32 %r35, {%h2, %h3}; cvt.u32.u16 %r36, %h4;\n\
                cvt.u64.u32 %q0, %r0; shl.b64 %q1, %q0, %r1; shr.u64 %q2, %q1, 7; mov.b64 {%r37, %r38}, %q2;";
    check(body, 2, 7, |v| {
        let (a, n) = (v[0], v[1] & 63);
        let half = a & 0xffff;
        // In 128 bits nothing falls off.
        let left = |x: u32| u128::from(x) << n;
        let wide = left(a) as u64 >> 7;
        vec![
            left(a) as u32,
            (u(a) >> n) as u32,
            (s(a) >> n) as u32,
            (left(half) as u32 & 0xffff) | ((u(half) >> n) as u32) << 16,
            (i64::from(half as u16 as i16) >> n) as u32 & 0xffff,
            wide as u32,
            (wide >> 32) as u32,
        ]
    });
    let body = "shf.l.wrap.b32 %r32, %r0, %r1, %r2; shf.r.wrap.b32 %r33, %r0, %r1, %r2;\n\
                shf.l.clamp.b32 %r34, %r0, %r1, %r2; shf.r.clamp.b32 %r35, %r0, %r1, %r2;";
    check(body, 3, 4, |v| {
        let both = u(v[1]) << 32 | u(v[0]);
        let (wrap, clamp) = (v[2] % 32, v[2].min(32));
        let left = |n| ((u128::from(both) << n) >> 32) as u32;
        vec![left(wrap), (both >> wrap) as u32, left(clamp), (both >> clamp) as u32]
    });
}

/// The ISA's loops over bits.
#[test]
fn bit_fields() {
    let body = "bfe.u32 %r32, %r0, %r1, %r2; bfe.s32 %r33, %r0, %r1, %r2; bfi.b32 %r34, %r0, %r3, %r1, %r2;\n\
                mov.b64 %q0, {%r0, %r3}; bfe.s64 %q1, %q0, %r1, %r2; mov.b64 {%r35, %r36}, %q1;\n\
                mov.b64 %q2, {%r3, %r0}; bfi.b64 %q3, %q0, %q2, %r1, %r2; mov.b64 {%r37, %r38}, %q3;";
    let mut operand = |random: &mut common::Random| {
        let word = random.word();
        if random.next().is_multiple_of(2) { word } else { word % 40 }
    };
    common::check_with(body, 4, 7, &mut operand, |v| {
        let (at, length) = (v[1] & 0xff, v[2] & 0xff);
        let extract = |a: u64, width: u32, signed: bool| {
            let bit = |i: u32| a >> i & 1;
            let sign = if signed && length > 0 { bit((at + length - 1).min(width - 1)) } else { 0 };
            (0..width)
                .fold(0u64, |d, i| d | if i < length && at + i < width { bit(at + i) } else { sign } << i)
        };
        let insert = |a: u64, b: u64, width: u32| {
            (0..length)
                .filter(|i| at + i < width && *i < width)
                .fold(b, |d, i| d & !(1 << (at + i)) | (a >> i & 1) << (at + i))
        };
        let (q0, q2) = (u(v[0]) | u(v[3]) << 32, u(v[3]) | u(v[0]) << 32);
        let (wide, inserted) = (extract(q0, 64, true), insert(q0, q2, 64));
        vec![
            extract(u(v[0]), 32, false) as u32,
            extract(u(v[0]), 32, true) as u32,
            insert(u(v[0]), u(v[3]), 32) as u32,
            wide as u32,
            (wide >> 32) as u32,
            inserted as u32,
            (inserted >> 32) as u32,
        ]
    });
}

#[test]
fn counts() {
    let body = "popc.b32 %r32, %r0; clz.b32 %r33, %r0; brev.b32 %r34, %r0; bfind.u32 %r35, %r0;\n\
                bfind.s32 %r36, %r0; bfind.shiftamt.u32 %r37, %r0; mov.b64 %q0, {%r0, %r1}; clz.b64 %r38, %q0;\n\
                popc.b64 %r39, %q0; not.b32 %r40, %r0; cnot.b32 %r41, %r0;";
    check(body, 2, 10, |v| {
        let a = v[0];
        let highest = |x: u32| (0..32).rev().find(|i| x >> i & 1 == 1).map_or(u32::MAX, |i| i);
        let find = highest(a);
        let wide = u(a) | u(v[1]) << 32;
        vec![
            (0..32).map(|i| a >> i & 1).sum(),
            31u32.wrapping_sub(find),
            (0..32).fold(0, |r, i| r | (a >> i & 1) << (31 - i)),
            find,
            highest(if a >> 31 == 1 { !a } else { a }),
            if a == 0 { u32::MAX } else { 31 - find },
            (0..64).rev().find(|i| wide >> i & 1 == 1).map_or(64, |i| 63 - i),
            (0..64).map(|i| (wide >> i & 1) as u32).sum(),
            u32::MAX - a,
            u32::from(a == 0),
        ]
    });
}

#[test]
fn truth_tables_and_bytes() {
    for table in [0xea, 0x96, 0x1d, 0xf8, 0x6a, 0x00, 0xff, 0x80, 0x01] {
        check(&format!("lop3.b32 %r32, %r0, %r1, %r2, {table};"), 3, 1, |v| {
            let bit = |x: u32, i: u32| x >> i & 1;
            let entry = |i| bit(v[0], i) * 4 + bit(v[1], i) * 2 + bit(v[2], i);
            vec![(0..32).fold(0, |r, i| r | (table >> entry(i) & 1) << i)]
        });
    }
    check("prmt.b32 %r32, %r0, %r1, %r2; prmt.b32 %r33, %r0, 0, 0x5410;", 3, 2, |v| {
        let source = [v[0].to_le_bytes(), v[1].to_le_bytes()].concat();
        let byte = |i: u32| {
            let nibble = v[2] >> (4 * i) & 15;
            let byte = source[nibble as usize % 8];
            if nibble < 8 {
                byte
            } else if byte > 127 {
                255
            } else {
                0
            }
        };
        vec![u32::from_le_bytes([byte(0), byte(1), byte(2), byte(3)]), v[0] & 0xffff]
    });
    check("dp4a.s32.s32 %r32, %r0, %r1, %r2; dp4a.u32.s32 %r33, %r0, %r1, %r2;", 3, 2, |v| {
        let dot = |signed: bool| {
            let byte = |b: u8| if signed { i64::from(b as i8) } else { i64::from(b) };
            let pairs = v[0].to_le_bytes().into_iter().zip(v[1].to_le_bytes());
            pairs.map(|(x, y)| byte(x) * i64::from(y as i8)).sum::<i64>()
        };
        vec![(dot(true) + s(v[2])) as u32, (dot(false) + s(v[2])) as u32]
    });
}
