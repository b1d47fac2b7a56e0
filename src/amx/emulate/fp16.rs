//! The two AVX512-FP16 instructions that make tiles of weights, in software, for CPUs without them.
//!
//! | encoding (EVEX.512, W0, registers, no mask) | instruction |
//! |---|---|
//! | `66.MAP6 A8 /r` | VFMADD213PH zmm1, zmm2, zmm3: `zmm1 = zmm2 * zmm1 + zmm3`, rounded once |
//! | `F2.MAP5 7D /r` | VCVTUW2PH zmm1, zmm2 |
//!
//! Rounding is to nearest, ties to even, which MXCSR selects everywhere here. Denormals are not flushed: these
//! instructions ignore MXCSR there. The emulation is exact in integers: a half is a multiple of 2^-24, a product a
//! multiple of 2^-48.
//!
//! refs: Intel SDM vol. 2 ch. 2.7 (EVEX) and the instructions' pages

use super::registers::Registers;

/// 32 halves.
type Zmm = [u16; 32];

fn halves(bytes: [u8; 64]) -> Zmm {
    std::array::from_fn(|w| u16::from_le_bytes([bytes[2 * w], bytes[2 * w + 1]]))
}

/// An instruction of this file: its registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// VFMADD213PH: destination and factor, factor, summand.
    Fma(u8, u8, u8),
    /// VCVTUW2PH: destination, source.
    FromWords(u8, u8),
}

/// Bytes of either instruction.
pub const LEN: usize = 6;

/// The instruction at `code`; `None` if there is another one.
///
/// # Safety
/// `code` points to an instruction whose bytes are all readable.
pub unsafe fn decode(code: *const u8) -> Option<Op> {
    // SAFETY: the first byte belongs to the instruction; an EVEX prefix is followed by an opcode and a ModRM byte.
    let bytes = unsafe {
        if code.read() != 0x62 {
            return None;
        }
        code.cast::<[u8; LEN]>().read_unaligned()
    };
    let [_, p0, p1, p2, opcode, modrm] = bytes;
    // No mask, no zeroing, no embedded rounding, 512 bits; registers only; W0.
    if p2 & 0xf7 != 0x40 || modrm < 0xc0 || p1 & 0x84 != 0x04 || p0 & 8 != 0 {
        return None;
    }
    // Extension bits are stored inverted.
    let bit = |byte: u8, from: u8, to: u8| (!byte >> from & 1) << to;
    let reg = modrm >> 3 & 7 | bit(p0, 7, 3) | bit(p0, 4, 4);
    let rm = modrm & 7 | bit(p0, 5, 3) | bit(p0, 6, 4);
    let v = !p1 >> 3 & 15 | bit(p2, 3, 4);
    match (p0 & 7, p1 & 3, opcode) {
        (6, 1, 0xa8) => Some(Op::Fma(reg, v, rm)),
        (5, 3, 0x7d) if v == 0 => Some(Op::FromWords(reg, rm)),
        _ => None,
    }
}

/// `n * 2^-scale` as a half: to nearest, ties to even. `scale` is 24 to 48.
fn round(n: i128, scale: u32, negative_zero: bool) -> u16 {
    let sign = if n < 0 || (n == 0 && negative_zero) { 0x8000 } else { 0 };
    let n = n.unsigned_abs();
    // Bits below 2^-24, and those beyond 11 significant bits, are dropped.
    let drop = (scale - 24).max((128 - n.leading_zeros()).saturating_sub(11));
    let half = if drop == 0 { 0 } else { 1u128 << (drop - 1) };
    let (kept, rest) = (n >> drop, n & ((1u128 << drop) - 1));
    let kept = kept + u128::from(rest > half || (drop > 0 && rest == half && kept & 1 == 1));
    // `kept` is at most 2^11, so adding it carries into the next exponent.
    let exponent = drop - (scale - 24);
    let bits = match kept {
        0..0x400 => kept as u32,
        _ => (exponent << 10) + kept as u32,
    };
    sign | bits.min(0x7c00) as u16
}

/// A finite half in units of 2^-24.
fn units(h: u16) -> i128 {
    let (exponent, mantissa) = (u32::from(h >> 10 & 31), i128::from(h & 0x3ff));
    let n = if exponent == 0 { mantissa } else { (mantissa | 0x400) << (exponent - 1) };
    if h & 0x8000 != 0 { -n } else { n }
}

/// `a * b + c`.
pub fn fma(a: u16, b: u16, c: u16) -> u16 {
    const INFINITE: u16 = 0x7c00;
    let (special, nan) = (|h: u16| h & INFINITE == INFINITE, |h: u16| h & 0x7fff > INFINITE);
    let sign = (a ^ b) & 0x8000;
    if let Some(h) = [a, b, c].into_iter().find(|&h| nan(h)) {
        return h | 0x200;
    }
    if special(a) || special(b) {
        let zero = a & 0x7fff == 0 || b & 0x7fff == 0;
        return if zero || (special(c) && c & 0x8000 != sign) { 0xfe00 } else { sign | INFINITE };
    }
    if special(c) {
        return c;
    }
    // A zero sum is negative if both terms are.
    let product_is_zero = a & 0x7fff == 0 || b & 0x7fff == 0;
    let negative_zero = sign != 0 && c & 0x8000 != 0 && product_is_zero && c & 0x7fff == 0;
    round(units(a) * units(b) + (units(c) << 24), 48, negative_zero)
}

/// An unsigned word as a half.
pub fn from_word(w: u16) -> u16 {
    round(i128::from(w) << 24, 24, false)
}

/// Executes `op` on the registers of a signal frame. Returns whether it could.
///
/// # Safety
/// `fpregs` belongs to the signal context of the interrupted thread.
pub unsafe fn execute(op: Op, fpregs: *mut u8) -> bool {
    // SAFETY: the caller's promise; register numbers are of five bits.
    unsafe {
        let Some(registers) = Registers::zmm(fpregs) else { return false };
        let read = |r| halves(registers.read(r));
        let (to, value): (u8, Zmm) = match op {
            Op::Fma(to, b, c) => {
                let (a, b, c) = (read(to), read(b), read(c));
                (to, std::array::from_fn(|i| fma(a[i], b[i], c[i])))
            }
            Op::FromWords(to, from) => (to, read(from).map(from_word)),
        };
        registers.write(to, std::array::from_fn(|i| value[i / 2].to_le_bytes()[i % 2]));
    }
    true
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    fn noise(seed: u64) -> impl FnMut() -> u16 {
        let mut x = seed | 1;
        move || {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 24) as u16
        }
    }

    fn same(got: u16, want: u16) -> bool {
        got == want || (f16::from_bits(got).is_nan() && f16::from_bits(want).is_nan())
    }

    /// Products and sums of halves are exact in f64, so the expected result needs only one rounding.
    #[test]
    fn products_and_sums_are_those_of_the_half_crate() {
        let mut next = noise(5);
        for _ in 0..300_000 {
            let (a, b) = (next(), next());
            let (x, y) = (f16::from_bits(a), f16::from_bits(b));
            let zero = (x * y).to_bits() & 0x8000;
            assert!(same(fma(a, b, zero), (x * y).to_bits()), "{x} * {y}");
            assert!(same(fma(a, f16::ONE.to_bits(), b), (x + y).to_bits()), "{x} + {y}");
        }
        for w in 0..=u16::MAX {
            assert_eq!(from_word(w), f16::from_f32(f32::from(w)).to_bits(), "{w}");
        }
    }

    /// Cases in which rounding twice is wrong: a tie of the product that a much smaller summand breaks.
    #[test]
    fn a_product_and_a_sum_are_rounded_once() {
        let h = |v: f32| f16::from_f32(v).to_bits();
        let (a, b) = (h(1.0 + 2f32.powi(-10)), h(1.0 + 2f32.powi(-1)));
        // 1.5 + 1.5 * 2^-10 lies midway between two halves 2^-10 apart, so it rounds to even.
        assert_eq!(fma(a, b, 0), h(1.5 + 2f32.powi(-9)));
        assert_eq!(fma(a, b, h(2f32.powi(-24))), h(1.5 + 2f32.powi(-9)));
        assert_eq!(fma(a, b, h(-2f32.powi(-24))), h(1.5 + 2f32.powi(-10)));
        assert_eq!(fma(h(65504.0), h(2.0), h(-65504.0)), h(65504.0), "no overflow in between");
        assert_eq!(fma(h(65504.0), h(2.0), 0), 0x7c00);
        assert_eq!(fma(h(2f32.powi(-14)), h(0.5), 0), 0x0200, "denormals are numbers");
        assert_eq!((fma(0x8000, h(1.0), 0x8000), fma(h(1.0), h(1.0), h(-1.0))), (0x8000, 0));
    }

    /// Bytes as LLVM's assembler writes them.
    #[test]
    fn known_encodings() {
        let cases: [([u8; 6], Op); 4] = [
            ([0x62, 0xf6, 0x7d, 0x48, 0xa8, 0xd1], Op::Fma(2, 0, 1)),
            ([0x62, 0xa6, 0x45, 0x40, 0xa8, 0xc9], Op::Fma(17, 23, 17)),
            ([0x62, 0xf5, 0x7f, 0x48, 0x7d, 0xc2], Op::FromWords(0, 2)),
            ([0x62, 0x25, 0x7f, 0x48, 0x7d, 0xfe], Op::FromWords(31, 22)),
        ];
        for (bytes, op) in cases {
            // SAFETY: six readable bytes.
            assert_eq!(unsafe { decode(bytes.as_ptr()) }, Some(op), "{bytes:02x?}");
        }
        let others: [[u8; 6]; 5] = [
            [0x62, 0xf6, 0x7d, 0x48, 0xb8, 0xd1], // vfmadd231ph
            [0x62, 0xf6, 0x7d, 0x49, 0xa8, 0xd1], // with a mask
            [0x62, 0xf6, 0x7d, 0x48, 0xa8, 0x10], // with memory
            [0x62, 0xf2, 0x7d, 0x48, 0xa8, 0xd1], // vfmadd213ps
            [0x0f, 0x0b, 0x90, 0x90, 0x90, 0x90], // ud2
        ];
        for bytes in others {
            // SAFETY: as above.
            assert_eq!(unsafe { decode(bytes.as_ptr()) }, None, "{bytes:02x?}");
        }
    }

    /// The instructions themselves, on hardware or through the signal handler: low and high registers, all lanes.
    #[test]
    fn instructions_compute_what_the_functions_say() {
        crate::amx::emulate::install().unwrap();
        if !crate::amx::half_arithmetic() {
            println!("skipped: this CPU has AMX or no AVX-512, and no AVX512-FP16");
            return;
        }
        let mut next = noise(9);
        for _ in 0..20 {
            let [a, b, c]: [Zmm; 3] = std::array::from_fn(|_| std::array::from_fn(|_| next()));
            let (mut low, mut high, mut words) = ([0u16; 32], [0u16; 32], [0u16; 32]);
            // SAFETY: AVX-512 and the two instructions are available, in hardware or in software; 64 bytes each.
            unsafe {
                std::arch::asm!(
                    "vmovdqu64 zmm3, [{a}]", "vmovdqu64 zmm17, [{b}]", "vmovdqu64 zmm9, [{c}]",
                    "vmovdqa64 zmm30, zmm3",
                    "vfmadd213ph zmm3, zmm17, zmm9",
                    "vfmadd213ph zmm30, zmm17, zmm9",
                    "vcvtuw2ph zmm18, zmm9",
                    "vmovdqu64 [{low}], zmm3", "vmovdqu64 [{high}], zmm30", "vmovdqu64 [{words}], zmm18",
                    a = in(reg) &raw const a, b = in(reg) &raw const b, c = in(reg) &raw const c,
                    low = in(reg) &raw mut low, high = in(reg) &raw mut high, words = in(reg) &raw mut words,
                    out("zmm3") _, out("zmm17") _, out("zmm9") _, out("zmm30") _, out("zmm18") _,
                    options(nostack)
                );
            }
            for i in 0..32 {
                let want = fma(a[i], b[i], c[i]);
                assert!(same(low[i], want) && same(high[i], want), "{:x} {:x} {:x}", a[i], b[i], c[i]);
                assert_eq!(words[i], from_word(c[i]));
            }
        }
    }
}
