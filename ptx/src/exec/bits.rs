//! Bits of one word.

use crate::instruction::PermuteMode;

/// Bit i of the result is bit (a_i b_i c_i) of the table (PTX ISA 9.7.8.5).
pub(super) fn lop3(table: u8, a: u32, b: u32, c: u32) -> u32 {
    let mut result = 0;
    for entry in 0..8 {
        if table >> entry & 1 == 1 {
            let pick = |bit: u32, x: u32| if entry >> bit & 1 == 1 { x } else { !x };
            result |= pick(2, a) & pick(1, b) & pick(0, c);
        }
    }
    result
}

/// Bytes of {b, a} (PTX ISA 9.7.9.7, `prmt`).
pub(super) fn permute(mode: PermuteMode, a: u32, b: u32, c: u32) -> u32 {
    let source = u64::from(b) << 32 | u64::from(a);
    let n = c & 3;
    let byte = |i: u32| -> u32 {
        let select = match mode {
            PermuteMode::Select => c >> (4 * i) & 15,
            PermuteMode::Forward4 => n + i,
            PermuteMode::Backward4 => n.wrapping_sub(i) & 7,
            PermuteMode::Replicate8 => n,
            PermuteMode::EdgeLeft => n.max(i),
            PermuteMode::EdgeRight => n.min(i),
            PermuteMode::Replicate16 => (n & 1) * 2 + (i & 1),
        };
        let byte = (source >> (8 * (select & 7))) as u8;
        // Only the first mode has a bit that replicates the sign.
        if select & 8 != 0 { u32::from((byte as i8 >> 7) as u8) } else { u32::from(byte) }
    };
    byte(0) | byte(1) << 8 | byte(2) << 16 | byte(3) << 24
}

/// Four products of bytes, added to c.
pub(super) fn dot4(a: u32, a_signed: bool, b: u32, b_signed: bool, c: u32) -> u32 {
    (0..4).fold(c, |sum, i| sum.wrapping_add(byte(a, i, a_signed).wrapping_mul(byte(b, i, b_signed)) as u32))
}

/// Byte i as a number.
#[inline(always)]
pub(super) fn byte(word: u32, i: u32, signed: bool) -> i32 {
    let byte = (word >> (8 * i)) as u8;
    if signed { i32::from(byte as i8) } else { i32::from(byte) }
}

/// `bfe` (PTX ISA 9.7.1.19): place and length are of 8 bits; the sign is the field's highest bit, or the word's if the
/// field ends beyond it.
pub(super) fn extract(a: u64, width: u32, at: u32, length: u32, signed: bool) -> u64 {
    let (at, length) = (at & 0xff, length & 0xff);
    if length == 0 {
        return 0;
    }
    let last = (at + length - 1).min(width - 1);
    let sign = signed && a >> last & 1 == 1;
    let value = a.unbounded_shr(at);
    // Bits of the field that the word has; the sign fills those above.
    let kept = if at < width { length.min(width - at) } else { 0 };
    let ones = 1u64.unbounded_shl(kept).wrapping_sub(1);
    value & ones | if sign { !ones } else { 0 }
}

/// `bfi` (PTX ISA 9.7.1.20): the bits that are replaced, and the shift.
pub(super) fn field(width: u32, at: u32, length: u32) -> (u64, u32) {
    let (at, length) = (at & 0xff, length & 0xff);
    let ones = 1u64.unbounded_shl(length).wrapping_sub(1);
    ((ones.unbounded_shl(at)) & (u64::MAX >> (64 - width)), at)
}
