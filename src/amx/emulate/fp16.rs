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
//! The registers are in the signal frame, in the standard format of XSAVE. CPUID gives the offsets of its parts; since
//! a virtual machine may take long to execute CPUID, it is queried once, before the handler is installed.
//!
//! refs: Intel SDM vol. 1 ch. 13 (XSAVE), vol. 2 ch. 2.7 (EVEX) and the instructions' pages

use std::arch::x86_64::__cpuid_count;
use std::sync::atomic::{AtomicUsize, Ordering};

/// 32 halves.
type Zmm = [u16; 32];

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

/// Offsets of the upper halves of zmm0-15, and of zmm16-31, in the format of XSAVE; 0: unknown.
static UPPER: AtomicUsize = AtomicUsize::new(0);
static HIGH: AtomicUsize = AtomicUsize::new(0);

/// Determines where registers lie. Call it before the handler is installed.
pub fn prepare() {
    if is_x86_feature_detected!("avx512f") {
        UPPER.store(__cpuid_count(0xd, 6).ebx as usize, Ordering::Relaxed);
        HIGH.store(__cpuid_count(0xd, 7).ebx as usize, Ordering::Relaxed);
    }
}

/// The vector registers of an interrupted thread: (bit of XSTATE_BV, offset, bytes a register) of their parts.
struct Registers {
    area: *mut u8,
    parts: [(u32, usize, usize); 4],
}

impl Registers {
    /// The registers in a signal frame; `None` if it has no AVX-512 state.
    ///
    /// # Safety
    /// `area` is the `fpregs` of a signal context that the kernel passed, and nothing else refers to it.
    unsafe fn of(area: *mut u8) -> Option<Registers> {
        let (upper, high) = (UPPER.load(Ordering::Relaxed), HIGH.load(Ordering::Relaxed));
        // SAFETY: a frame has 512 bytes in the format of FXSAVE; those from 464 on are the kernel's own: a magic number,
        // a size, the features that follow.
        let (magic, features) = unsafe {
            (area.add(464).cast::<u32>().read_unaligned(), area.add(472).cast::<u64>().read_unaligned())
        };
        let known = magic == 0x4650_5853 && features >> 5 & 7 == 7 && upper != 0 && high != 0;
        // xmm0-15 from byte 160, upper halves of ymm0-15 from 576: these are fixed.
        known
            .then_some(Registers { area, parts: [(1, 160, 16), (2, 576, 16), (6, upper, 32), (7, high, 64)] })
    }

    /// The parts of register `r`, as indices, and its number within them.
    fn of_register(r: u8) -> (&'static [usize], usize) {
        if r < 16 { (&[0, 1, 2], r as usize) } else { (&[3], r as usize - 16) }
    }

    /// XSTATE_BV: parts whose bit is clear are all zeros, whatever their bytes hold.
    fn present(&self) -> *mut u64 {
        self.area.wrapping_add(512).cast()
    }

    /// # Safety
    /// `r < 32`; the frame still exists.
    unsafe fn read(&self, r: u8) -> Zmm {
        let (mut out, mut at) = ([0u8; 64], 0);
        let (parts, i) = Registers::of_register(r);
        for &part in parts {
            let (bit, offset, bytes) = self.parts[part];
            // SAFETY: the frame has this part, as `of` checked, with 16 registers.
            unsafe {
                if self.present().read_unaligned() >> bit & 1 == 1 {
                    let from = self.area.add(offset + i * bytes);
                    from.copy_to_nonoverlapping(out.as_mut_ptr().add(at), bytes);
                }
            }
            at += bytes;
        }
        std::array::from_fn(|w| u16::from_le_bytes([out[2 * w], out[2 * w + 1]]))
    }

    /// # Safety
    /// As [`Registers::read`].
    unsafe fn write(&self, r: u8, value: &Zmm) {
        let (mut bytes_of, mut at) = ([0u8; 64], 0);
        for (to, word) in bytes_of.chunks_exact_mut(2).zip(value) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        let (parts, i) = Registers::of_register(r);
        for &part in parts {
            let (bit, offset, bytes) = self.parts[part];
            // SAFETY: as in `read`.
            unsafe {
                let present = self.present().read_unaligned();
                if present >> bit & 1 == 0 {
                    self.area.add(offset).write_bytes(0, 16 * bytes);
                    self.present().write_unaligned(present | 1 << bit);
                }
                let to = self.area.add(offset + i * bytes);
                to.copy_from_nonoverlapping(bytes_of.as_ptr().add(at), bytes);
            }
            at += bytes;
        }
    }
}

/// Executes `op` on the registers of a signal frame. Returns whether it could.
///
/// # Safety
/// `fpregs` belongs to the signal context of the interrupted thread.
pub unsafe fn execute(op: Op, fpregs: *mut u8) -> bool {
    if fpregs.is_null() {
        return false;
    }
    // SAFETY: the caller's promise; register numbers are of five bits.
    unsafe {
        let Some(registers) = Registers::of(fpregs) else { return false };
        let (to, value): (u8, Zmm) = match op {
            Op::Fma(to, b, c) => {
                let (a, b, c) = (registers.read(to), registers.read(b), registers.read(c));
                (to, std::array::from_fn(|i| fma(a[i], b[i], c[i])))
            }
            Op::FromWords(to, from) => (to, registers.read(from).map(from_word)),
        };
        registers.write(to, &value);
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
