//! Decodes machine code to tile instructions: those that AMX-TILE, AMX-BF16 and AMX-INT8 define, in 64-bit mode:
//!
//! | encoding (VEX.128, map 0F38, W0) | instruction |
//! |---|---|
//! | `NP 49 /0 mem`, `66 49 /0 mem` | LDTILECFG, STTILECFG |
//! | `NP 49 C0`, `F2 49 11:rrr:000` | TILERELEASE, TILEZERO |
//! | `F2 4B /r sib`, `66 4B`, `F3 4B` | TILELOADD, TILELOADDT1, TILESTORED |
//! | `F3 5C 11:rrr:bbb` | TDPBF16PS |
//! | `NP`, `66`, `F3`, `F2` `5E 11:rrr:bbb` | TDPBUUD, TDPBUSD, TDPBSUD, TDPBSSD |
//!
//! Bytes are read one at a time and only as far as the encoding reaches, since the next page may not be mapped.
//!
//! refs: Intel SDM vol. 2, ch. 2.3 (VEX, SIB) and the instructions' pages

use std::fmt;

/// A memory operand: `base + index * 2^scale + disp`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mem {
    /// Number of the base register (0 = rax, in encoding order).
    pub base: Base,
    /// Number of the index register.
    pub index: Option<u8>,
    /// log2 of the index's factor.
    pub scale: u8,
    /// Displacement.
    pub disp: i32,
}

/// The base of a memory operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Base {
    /// Nothing: the displacement is absolute.
    None,
    /// A general register.
    Reg(u8),
    /// The address of the next instruction.
    Rip,
}

/// The element types of a dot product: first source, second source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dot {
    /// bf16 pairs into f32.
    Bf16,
    /// int8 quadruples into i32; whether the first and the second source are signed.
    Int8(bool, bool),
}

/// A tile instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// LDTILECFG mem
    LoadConfig(Mem),
    /// STTILECFG mem
    StoreConfig(Mem),
    /// TILERELEASE
    Release,
    /// TILEZERO tmm
    Zero(u8),
    /// TILELOADD or TILELOADDT1 tmm, mem
    Load(u8, Mem),
    /// TILESTORED mem, tmm
    Store(u8, Mem),
    /// TDP* dst, a, b
    Dot(Dot, u8, u8, u8),
}

/// An instruction and how many bytes it takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Insn {
    /// What it does.
    pub op: Op,
    /// Length in bytes.
    pub len: usize,
}

/// Reads code bytes in order.
pub struct Cursor {
    at: *const u8,
    len: usize,
}

impl Cursor {
    /// From `at` on.
    ///
    /// # Safety
    /// All bytes of the instruction there are readable; no more are read.
    pub unsafe fn new(at: *const u8) -> Cursor {
        Cursor { at, len: 0 }
    }

    /// Bytes read so far.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The next one.
    pub fn byte(&mut self) -> u8 {
        // SAFETY: `decode`'s caller guarantees all bytes of the instruction at `at`, and the bytes read so far imply
        // that this one belongs to it.
        let b = unsafe { self.at.add(self.len).read() };
        self.len += 1;
        b
    }

    fn disp32(&mut self) -> i32 {
        i32::from_le_bytes([self.byte(), self.byte(), self.byte(), self.byte()])
    }

    /// The memory operand that begins with `modrm`; `x` and `b` are the (decoded) extension bits.
    pub fn mem(&mut self, modrm: u8, x: u8, b: u8) -> Mem {
        let (mode, rm) = (modrm >> 6, modrm & 7);
        let mut mem = Mem { base: Base::Reg(rm | b), index: None, scale: 0, disp: 0 };
        let mut base_low = rm;
        if rm == 4 {
            let sib = self.byte();
            let index = sib >> 3 & 7 | x;
            mem.scale = sib >> 6;
            // Index 100b without extension means none (rsp cannot be an index); r12 can.
            mem.index = (index != 4).then_some(index);
            base_low = sib & 7;
            mem.base = Base::Reg(base_low | b);
        }
        match mode {
            // Base 101b without displacement has another meaning: "no base" with SIB, "rip" without.
            0 if base_low == 5 => {
                mem.base = if rm == 4 { Base::None } else { Base::Rip };
                mem.disp = self.disp32();
            }
            1 => mem.disp = i32::from(self.byte() as i8),
            2 => mem.disp = self.disp32(),
            _ => {}
        }
        mem
    }
}

/// The tile instruction at `code`; `None` if there is another one (or none).
///
/// # Safety
/// `code` must point to an instruction whose bytes are all readable.
pub unsafe fn decode(code: *const u8) -> Option<Insn> {
    // SAFETY: the caller's promise.
    let mut c = unsafe { Cursor::new(code) };
    if c.byte() != 0xc4 {
        return None;
    }
    let p1 = c.byte();
    // Extension bits are stored inverted.
    let (r, x, b) = (!p1 >> 4 & 8, !p1 >> 3 & 8, !p1 >> 2 & 8);
    if p1 & 0x1f != 2 {
        return None; // not map 0F38
    }
    let p2 = c.byte();
    if p2 & 0x84 != 0 {
        return None; // W or L
    }
    let (vvvv, pp) = (!p2 >> 3 & 15, p2 & 3);
    let opcode = c.byte();
    if !matches!(opcode, 0x49 | 0x4b | 0x5c | 0x5e) {
        return None;
    }
    let modrm = c.byte();
    let (is_reg, reg, rm) = (modrm >> 6 == 3, modrm >> 3 & 7, modrm & 7);
    const NP: u8 = 0;
    const P66: u8 = 1;
    const PF3: u8 = 2;
    const PF2: u8 = 3;
    let op = match (opcode, pp) {
        (0x5c, PF3) | (0x5e, _) if is_reg && r == 0 && b == 0 && vvvv < 8 => {
            let dot = match (opcode, pp) {
                (0x5c, _) => Dot::Bf16,
                (_, NP) => Dot::Int8(false, false),
                (_, P66) => Dot::Int8(false, true),
                (_, PF3) => Dot::Int8(true, false),
                _ => Dot::Int8(true, true),
            };
            Op::Dot(dot, reg, rm, vvvv)
        }
        _ if vvvv != 0 || r != 0 => return None,
        (0x49, NP) if modrm == 0xc0 => Op::Release,
        (0x49, PF2) if is_reg && rm == 0 && b == 0 => Op::Zero(reg),
        (0x49, NP) if !is_reg && reg == 0 => Op::LoadConfig(c.mem(modrm, x, b)),
        (0x49, P66) if !is_reg && reg == 0 => Op::StoreConfig(c.mem(modrm, x, b)),
        // Tile loads and stores need a SIB byte: its index is the stride.
        (0x4b, PF2 | P66) if !is_reg && rm == 4 => Op::Load(reg, c.mem(modrm, x, b)),
        (0x4b, PF3) if !is_reg && rm == 4 => Op::Store(reg, c.mem(modrm, x, b)),
        _ => return None,
    };
    Some(Insn { op, len: c.len })
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Op::LoadConfig(_) => f.write_str("ldtilecfg"),
            Op::StoreConfig(_) => f.write_str("sttilecfg"),
            Op::Release => f.write_str("tilerelease"),
            Op::Zero(t) => write!(f, "tilezero tmm{t}"),
            Op::Load(t, _) => write!(f, "tileloadd tmm{t}"),
            Op::Store(t, _) => write!(f, "tilestored tmm{t}"),
            Op::Dot(dot, c, a, b) => {
                let name = match dot {
                    Dot::Bf16 => "tdpbf16ps",
                    Dot::Int8(true, true) => "tdpbssd",
                    Dot::Int8(true, false) => "tdpbsud",
                    Dot::Int8(false, true) => "tdpbusd",
                    Dot::Int8(false, false) => "tdpbuud",
                };
                write!(f, "{name} tmm{c}, tmm{a}, tmm{b}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn d(bytes: &[u8]) -> Option<Insn> {
        // Longer than any instruction, so that a decoder that reads too far shows in `len`, not as a fault.
        let mut code = [0x90u8; 24];
        code[..bytes.len()].copy_from_slice(bytes);
        // SAFETY: 24 readable bytes, more than an instruction can take.
        let insn = unsafe { decode(code.as_ptr()) };
        if let Some(i) = insn {
            assert_eq!(i.len, bytes.len(), "{:?}", i.op);
        }
        insn
    }

    fn mem(base: Base, index: Option<u8>, scale: u8, disp: i32) -> Mem {
        Mem { base, index, scale, disp }
    }

    /// Bytes as LLVM's assembler writes them.
    #[test]
    fn known_encodings() {
        let cases: [(&[u8], Op); 16] = [
            (&[0xc4, 0xe2, 0x78, 0x49, 0x07], Op::LoadConfig(mem(Base::Reg(7), None, 0, 0))),
            (&[0xc4, 0xe2, 0x78, 0x49, 0x05, 1, 0, 0, 0], Op::LoadConfig(mem(Base::Rip, None, 0, 1))),
            (&[0xc4, 0xc2, 0x79, 0x49, 0x45, 0xf8], Op::StoreConfig(mem(Base::Reg(13), None, 0, -8))),
            (&[0xc4, 0xe2, 0x79, 0x49, 0x04, 0x24], Op::StoreConfig(mem(Base::Reg(4), None, 0, 0))),
            (&[0xc4, 0xe2, 0x78, 0x49, 0xc0], Op::Release),
            (&[0xc4, 0xe2, 0x7b, 0x49, 0xe8], Op::Zero(5)),
            (&[0xc4, 0xe2, 0x7b, 0x4b, 0x34, 0x17], Op::Load(6, mem(Base::Reg(7), Some(2), 0, 0))),
            (&[0xc4, 0xa2, 0x79, 0x4b, 0x14, 0xe6], Op::Load(2, mem(Base::Reg(6), Some(12), 3, 0))),
            (&[0xc4, 0xc2, 0x7b, 0x4b, 0x44, 0x4d, 0x40], Op::Load(0, mem(Base::Reg(13), Some(1), 1, 64))),
            (&[0xc4, 0xe2, 0x7b, 0x4b, 0x0c, 0x20], Op::Load(1, mem(Base::Reg(0), None, 0, 0))),
            (
                &[0xc4, 0xe2, 0x7b, 0x4b, 0x0c, 0x05, 0, 1, 0, 0],
                Op::Load(1, mem(Base::None, Some(0), 0, 256)),
            ),
            (
                &[0xc4, 0x82, 0x7a, 0x4b, 0x9c, 0x08, 0, 4, 0, 0],
                Op::Store(3, mem(Base::Reg(8), Some(9), 0, 1024)),
            ),
            (&[0xc4, 0xe2, 0x4a, 0x5c, 0xcc], Op::Dot(Dot::Bf16, 1, 4, 6)),
            (&[0xc4, 0xe2, 0x42, 0x5e, 0xd5], Op::Dot(Dot::Int8(true, false), 2, 5, 7)),
            (&[0xc4, 0xe2, 0x73, 0x5e, 0xfa], Op::Dot(Dot::Int8(true, true), 7, 2, 1)),
            (&[0xc4, 0xe2, 0x71, 0x5e, 0xc2], Op::Dot(Dot::Int8(false, true), 0, 2, 1)),
        ];
        for (bytes, op) in cases {
            assert_eq!(d(bytes).map(|i| i.op), Some(op), "{bytes:02x?}");
        }
        assert_eq!(d(&[0xc4, 0xe2, 0x70, 0x5e, 0xc2]).unwrap().op.to_string(), "tdpbuud tmm0, tmm2, tmm1");
    }

    #[test]
    fn other_instructions_are_not_ours() {
        let others: [&[u8]; 8] = [
            &[0x0f, 0x0b],                   // ud2
            &[0xc5, 0xf8, 0x77],             // vzeroupper
            &[0xc4, 0xe2, 0xfb, 0x49, 0xe8], // W1
            &[0xc4, 0xe2, 0x7f, 0x49, 0xe8], // L1
            &[0xc4, 0xe2, 0x3b, 0x49, 0xe8], // tilezero with vvvv in use
            &[0xc4, 0xe2, 0x0a, 0x5c, 0xcc], // tmm14
            &[0xc4, 0xe2, 0x4b, 0x5c, 0xcc], // AMX-FP16's tdpfp16ps
            &[0xc4, 0xe2, 0x7b, 0x4b, 0x07], // tileloadd without SIB
        ];
        for bytes in others {
            assert_eq!(d(bytes), None, "{bytes:02x?}");
        }
    }
}
