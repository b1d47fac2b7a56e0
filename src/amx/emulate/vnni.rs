//! AVX-VNNI's VPDPBUSD in software, for CPUs without it: what multiplies int8 in the AVX2 tier where the CPU has it.
//!
//! | encoding (VEX.256, W0, registers) | instruction |
//! |---|---|
//! | `66.0F38 50 /r` | VPDPBUSD ymm1, ymm2, ymm3: to each dword of ymm1 the sum of four products, unsigned bytes of ymm2 times signed ones of ymm3 |
//!
//! refs: Intel SDM vol. 2 ch. 2.3 (VEX) and the instruction's page

use super::registers::Registers;

/// The instruction: sums, unsigned bytes, signed bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Op(u8, u8, u8);

/// Its bytes.
pub const LEN: usize = 5;

/// The instruction at `code`; `None` if there is another one.
///
/// # Safety
/// `code` points to an instruction whose bytes are all readable.
pub unsafe fn decode(code: *const u8) -> Option<Op> {
    // SAFETY: the first byte belongs to the instruction; a VEX prefix of three bytes is followed by an opcode and a ModRM byte.
    let bytes = unsafe {
        if code.read() != 0xc4 {
            return None;
        }
        code.cast::<[u8; LEN]>().read_unaligned()
    };
    let [_, p0, p1, opcode, modrm] = bytes;
    // Map 0F38; W0, 256 bits, prefix 66; registers only.
    if p0 & 0x1f != 2 || p1 & 0x87 != 0x05 || opcode != 0x50 || modrm < 0xc0 {
        return None;
    }
    // Extension bits are stored inverted.
    let (reg, rm) = (modrm >> 3 & 7 | (!p0 >> 7) << 3, modrm & 7 | (!p0 >> 5 & 1) << 3);
    Some(Op(reg, !p1 >> 3 & 15, rm))
}

/// What the instruction makes of the first 32 bytes.
fn dot(sums: [u8; 64], unsigned: [u8; 64], signed: [u8; 64]) -> [u8; 64] {
    let mut out = [0u8; 64];
    for at in (0..32).step_by(4) {
        let start = i32::from_le_bytes([sums[at], sums[at + 1], sums[at + 2], sums[at + 3]]);
        let product = |i: usize| i32::from(unsigned[at + i]) * i32::from(signed[at + i] as i8);
        // Four products stay within 18 bits; the sum with the start wraps around.
        let sum = start.wrapping_add(product(0) + product(1) + product(2) + product(3));
        out[at..at + 4].copy_from_slice(&sum.to_le_bytes());
    }
    out
}

/// Executes `op` on the registers of a signal frame. Returns whether it could.
///
/// # Safety
/// `fpregs` belongs to the signal context of the interrupted thread.
pub unsafe fn execute(Op(to, unsigned, signed): Op, fpregs: *mut u8) -> bool {
    // SAFETY: the caller's promise; register numbers are of four bits.
    unsafe {
        let Some(registers) = Registers::ymm(fpregs) else { return false };
        registers.write(to, dot(registers.read(to), registers.read(unsigned), registers.read(signed)));
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes as LLVM's assembler writes them.
    #[test]
    fn known_encodings() {
        let cases: [([u8; 5], Op); 3] = [
            ([0xc4, 0xe2, 0x6d, 0x50, 0xcb], Op(1, 2, 3)),
            ([0xc4, 0x42, 0x25, 0x50, 0xcc], Op(9, 11, 12)),
            ([0xc4, 0x62, 0x7d, 0x50, 0xff], Op(15, 0, 7)),
        ];
        for (bytes, op) in cases {
            // SAFETY: five readable bytes.
            assert_eq!(unsafe { decode(bytes.as_ptr()) }, Some(op), "{bytes:02x?}");
        }
        let others: [[u8; 5]; 5] = [
            [0xc4, 0xe2, 0x69, 0x50, 0xcb], // 128 bits
            [0xc4, 0xe2, 0x6d, 0x51, 0xcb], // vpdpbusds
            [0xc4, 0xe2, 0x6f, 0x50, 0xcb], // vpdpbsud
            [0xc4, 0xe2, 0x6d, 0x50, 0x08], // with memory
            [0x0f, 0x0b, 0x90, 0x90, 0x90], // ud2
        ];
        for bytes in others {
            // SAFETY: as above.
            assert_eq!(unsafe { decode(bytes.as_ptr()) }, None, "{bytes:02x?}");
        }
    }

    /// The instruction itself, on hardware or through the signal handler, low and high registers.
    #[test]
    fn the_instruction_computes_what_the_function_says() {
        crate::amx::emulate::install().unwrap();
        if !crate::simd::Caps::get().avx2 {
            return println!("skipped: this CPU reports no avx2, fma and f16c");
        }
        let mut seed = 7u64;
        let mut next = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 56) as u8
        };
        for extreme in [None, Some((255, 128)), Some((255, 127))] {
            let [sums, mut unsigned, mut signed]: [[u8; 64]; 3] =
                std::array::from_fn(|_| std::array::from_fn(|_| next()));
            if let Some((u, s)) = extreme {
                (unsigned, signed) = ([u; 64], [s; 64]);
            }
            let [mut low, mut high] = [[0u8; 64]; 2];
            // SAFETY: AVX is available, the instruction in hardware or in software; 32 of 64 bytes each.
            unsafe {
                std::arch::asm!(
                    "vmovdqu ymm3, [{s}]", "vmovdqu ymm7, [{u}]", "vmovdqu ymm12, [{i}]", "vmovdqu ymm15, [{s}]",
                    "{{vex}} vpdpbusd ymm3, ymm7, ymm12",
                    "{{vex}} vpdpbusd ymm15, ymm7, ymm12",
                    "vmovdqu [{low}], ymm3", "vmovdqu [{high}], ymm15",
                    s = in(reg) &raw const sums, u = in(reg) &raw const unsigned, i = in(reg) &raw const signed,
                    low = in(reg) &raw mut low, high = in(reg) &raw mut high,
                    out("ymm3") _, out("ymm7") _, out("ymm12") _, out("ymm15") _,
                    options(nostack)
                );
            }
            let want = dot(sums, unsigned, signed);
            assert_eq!((low, high), (want, want));
        }
    }
}
