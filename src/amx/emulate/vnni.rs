//! AVX-VNNI's VPDPBUSD in software, for CPUs without it: what multiplies int8 in the AVX2 tier where the CPU has it.
//!
//! | encoding (VEX.256, W0) | instruction |
//! |---|---|
//! | `66.0F38 50 /r` | VPDPBUSD ymm1, ymm2, ymm3/m256: to each dword of ymm1 the sum of four products, unsigned bytes of ymm2 times signed ones of ymm3 |
//!
//! refs: Intel SDM vol. 2 ch. 2.3 (VEX) and the instruction's page

use super::decode::{Cursor, Mem};
use super::registers::Registers;

/// The instruction: sums, unsigned bytes, signed bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Op(u8, u8, Signed);

/// Where the signed bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Signed {
    Register(u8),
    Memory(Mem),
}

/// The instruction at `code` and its length; `None` if there is another one.
///
/// # Safety
/// `code` points to an instruction whose bytes are all readable.
pub unsafe fn decode(code: *const u8) -> Option<(Op, usize)> {
    // SAFETY: the caller's promise; a byte is read where those before it say that it belongs to the instruction.
    let mut c = unsafe { Cursor::new(code) };
    if c.byte() != 0xc4 {
        return None;
    }
    let (p0, p1, opcode) = (c.byte(), c.byte(), c.byte());
    // Map 0F38; W0, 256 bits, prefix 66.
    if p0 & 0x1f != 2 || p1 & 0x87 != 0x05 || opcode != 0x50 {
        return None;
    }
    let modrm = c.byte();
    // Extension bits are stored inverted.
    let (r, x, b) = (!p0 >> 4 & 8, !p0 >> 3 & 8, !p0 >> 2 & 8);
    let signed = match modrm {
        0xc0.. => Signed::Register(modrm & 7 | b),
        _ => Signed::Memory(c.mem(modrm, x, b)),
    };
    Some((Op(modrm >> 3 & 7 | r, !p1 >> 3 & 15, signed), c.len()))
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

/// Executes `op` on the registers of a signal frame; `address` computes those of operands. Returns whether it could.
///
/// # Safety
/// `fpregs` belongs to the signal context of the interrupted thread, as does the memory operand.
pub unsafe fn execute(Op(to, unsigned, signed): Op, fpregs: *mut u8, address: impl Fn(Mem) -> usize) -> bool {
    // SAFETY: the caller's promise; register numbers are of four bits; the instruction reads 32 bytes, at any alignment.
    unsafe {
        let Some(registers) = Registers::ymm(fpregs) else { return false };
        let mut bytes = [0u8; 64];
        match signed {
            Signed::Register(r) => bytes = registers.read(r),
            Signed::Memory(mem) => (address(mem) as *const u8).copy_to_nonoverlapping(bytes.as_mut_ptr(), 32),
        }
        registers.write(to, dot(registers.read(to), registers.read(unsigned), bytes));
    }
    true
}

#[cfg(test)]
mod tests {
    use super::super::decode::Base;
    use super::*;

    /// Bytes as LLVM's assembler writes them.
    #[test]
    fn known_encodings() {
        let register = |to, unsigned, r| (Op(to, unsigned, Signed::Register(r)), 5);
        let (base, index) = (Base::Reg(4), None);
        let spilled = Op(1, 2, Signed::Memory(Mem { base, index, scale: 0, disp: 0x20 }));
        let cases: [([u8; 7], (Op, usize)); 4] = [
            ([0xc4, 0xe2, 0x6d, 0x50, 0xcb, 0x90, 0x90], register(1, 2, 3)),
            ([0xc4, 0x42, 0x25, 0x50, 0xcc, 0x90, 0x90], register(9, 11, 12)),
            ([0xc4, 0x62, 0x7d, 0x50, 0xff, 0x90, 0x90], register(15, 0, 7)),
            ([0xc4, 0xe2, 0x6d, 0x50, 0x4c, 0x24, 0x20], (spilled, 7)),
        ];
        for (bytes, insn) in cases {
            // SAFETY: seven readable bytes.
            assert_eq!(unsafe { decode(bytes.as_ptr()) }, Some(insn), "{bytes:02x?}");
        }
        let others: [[u8; 5]; 4] = [
            [0xc4, 0xe2, 0x69, 0x50, 0xcb], // 128 bits
            [0xc4, 0xe2, 0x6d, 0x51, 0xcb], // vpdpbusds
            [0xc4, 0xe2, 0x6f, 0x50, 0xcb], // vpdpbsud
            [0x0f, 0x0b, 0x90, 0x90, 0x90], // ud2
        ];
        for bytes in others {
            // SAFETY: as above.
            assert_eq!(unsafe { decode(bytes.as_ptr()) }, None, "{bytes:02x?}");
        }
    }

    /// The instruction itself, on hardware or through the signal handler, with registers and with memory.
    #[test]
    fn the_instruction_computes_what_the_function_says() {
        crate::amx::emulate::install().unwrap();
        if !crate::simd::Caps::get().avx2 {
            return println!("skipped: this CPU reports no avx2, fma and f16c");
        }
        if !crate::simd::Caps::get().avx_vnni && !crate::amx::emulate::installed() {
            return println!("skipped: AVX-VNNI is hidden on a CPU with AMX, where nothing is emulated");
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
                    "{{vex}} vpdpbusd ymm15, ymm7, [{i}]",
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
